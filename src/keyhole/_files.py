"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4


def write_whole(
    content: bytes | Callable[[Path], object], path: Path, *, overwrite: bool = True
) -> Path:
    """Write a file beside its place and give it its name once it is complete.

    So that nobody reads half of it.

    ``content`` may be a function that writes to the path it is given; the folder is made if it is
    not there. Without ``overwrite`` a file of that name is a FileExistsError, also where somebody
    else made it in the meantime.

    A file that is replaced keeps its mode, its group and, where we may, its owner. A symbolic link
    is followed: the file that it leads to is replaced, or made, and the link stays. Another name of
    the same file (a hard link) keeps the old content.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(b"all of it", Path(folder) / "new" / "file").read_bytes()
    b'all of it'
    """
    if path.exists() and not overwrite:
        raise FileExistsError(f"a file is not replaced unless asked: {path.name!r} exists.")
    target = behind_links(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name[:100]}.{uuid4().hex}.partial")
    try:
        create_draft(draft, target)
        if callable(content):
            content(draft)
        else:
            draft.write_bytes(content)
        if not overwrite:
            try:
                os.link(draft, target)  # unlike a rename, it fails where the name is taken
                return path
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                pass
        replace_file(draft, target)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    return path


def refuse_special_file(path: Path) -> None:
    """Raise if a path leads to a pipe, socket or device, which may never come to an end.

    A path that leads nowhere is a FileNotFoundError.
    """
    mode = path.stat().st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return
    if stat.S_ISFIFO(mode):
        kind = "a named pipe"
    elif stat.S_ISSOCK(mode):
        kind = "a socket"
    else:
        kind = "a device"
    raise ValueError(
        f"{path.name!r} must be an ordinary file: it is {kind}. Copy what it gives to a file first."
    )


def behind_links(path: Path) -> Path:
    """The place that a path leads to once all links are followed; there need not be anything."""
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(
            errno.ELOOP,
            f"{os.strerror(errno.ELOOP)}: a link must lead to a file, not in a loop",
            str(path),
        )
    return target


def create_draft(draft: Path, target: Path) -> None:
    """Make an empty file to write to; for its owner alone if it is to replace a file."""
    mode = 0o600 if target.exists() else 0o666  # less what the process takes from all new files
    os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))


def replace_file(draft: Path, target: Path) -> None:
    """Give a draft its name, and group, owner and mode of the file that has it so far."""
    try:
        old = target.stat()
    except FileNotFoundError:
        os.replace(draft, target)
        return
    mode = stat.S_IMODE(old.st_mode) & 0o777
    if hasattr(os, "chown"):
        new = draft.stat()
        if new.st_gid != old.st_gid:
            try:
                os.chown(draft, -1, old.st_gid)
            except OSError:
                mode &= ~stat.S_IRWXG  # what its group was allowed, another group is not
        if new.st_uid != old.st_uid:
            with contextlib.suppress(OSError):  # only root may give a file away
                os.chown(draft, old.st_uid, -1)
    os.chmod(draft, mode)
    os.replace(draft, target)
