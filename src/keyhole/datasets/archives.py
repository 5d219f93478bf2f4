"""Text files by name, out of a folder, a tar or a zip archive. Nothing is ever unpacked onto the disk."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

LARGEST = 200_000_000
"""Bytes of one text file; a larger one is refused before it is read."""


def read_texts(path: Path, wanted: Callable[[str], bool]) -> dict[str, str]:
    """The files whose name (with its folders, parted by /) is wanted, as text.

    Members of archives are read in memory and only if they are plain files: a link, or a name that leads out of the
    archive, has no way to the disk.
    """
    path = Path(path)
    try:
        if path.is_dir():
            root = path.resolve()
            found = {
                file.relative_to(path).as_posix(): _file(file)
                for file in sorted(path.rglob("*"))
                if wanted(file.relative_to(path).as_posix()) and file.is_file() and file.resolve().is_relative_to(root)
            }
        elif zipfile.is_zipfile(path):
            found = _zip(path, wanted)
        elif tarfile.is_tarfile(path):
            found = _tar(path, wanted)
        elif path.is_file():
            found = {path.name: _file(path)} if wanted(path.name) else {}
        else:
            raise FileNotFoundError(f"{path.name!r} is not there: no such file or folder.")
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"an archive must read back whole: {path.name!r} does not ({str(error)[:200]}). It is damaged; "
            "fetch it again."
        ) from None
    return {name: _decode(content, name) for name, content in found.items()}


def _file(path: Path) -> bytes:
    _check_size(path.name, path.stat().st_size)
    return path.read_bytes()


def _zip(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    found = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if wanted(info.filename) and not info.is_dir():
                _check_size(info.filename, info.file_size)
                with archive.open(info) as file:
                    found[info.filename] = file.read(LARGEST)
    return found


def _tar(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isreg() and wanted(member.name):
                _check_size(member.name, member.size)
                file = archive.extractfile(member)
                found[member.name] = b"" if file is None else file.read(LARGEST)
    return found


def _check_size(name: str, size: int) -> None:
    if size > LARGEST:
        raise ValueError(f"a text file may have {LARGEST:,} bytes: {name!r:.100} has {size:,}. Is it the right one?")


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text must be UTF-8: {name!r:.100} is not ({error.reason} at byte {error.start}). "
            "Fetch or convert it again."
        ) from None
