"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4


def write_whole(content: bytes | Callable[[Path], object], path: Path, *, overwrite: bool = True) -> Path:
    """Write a file beside its place and give it its name once it is complete, so that nobody reads half of it.

    ``content`` may be a function that writes to the path it is given; the folder is made if it is not there. Without
    ``overwrite`` a file of that name is a FileExistsError, also where somebody else made it in the meantime.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_whole(b"all of it", Path(folder) / "new" / "file").read_bytes()
    b'all of it'
    """
    if path.exists() and not overwrite:
        raise FileExistsError(f"a file is not replaced unless asked: {path.name!r} exists.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name[:100]}.{uuid4().hex}.partial")
    try:
        if callable(content):
            content(partial)
        else:
            partial.write_bytes(content)
        if not overwrite:
            try:
                os.link(partial, path)  # unlike a rename, it fails where the name is taken
                return path
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                pass
        os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return path
