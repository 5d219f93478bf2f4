"""Text files by name, out of a folder, a tar or a zip archive. Nothing is ever unpacked onto the disk."""

from __future__ import annotations

import bz2
import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

LARGEST = 200_000_000
"""Bytes of all text files together; more are refused before they are read."""
MOST_PASSED = 1_000_000_000
"""Bytes of a tar archive that are decompressed on the way to what is wanted."""
MOST_MEMBERS = 100_000
"""Members of a tar archive, wanted or not: each takes a kilobyte of memory."""

Found = tuple[str, int, Callable[[], bytes]]
"""Name of a file, its size, and how to read it."""


def read_texts(path: Path, wanted: Callable[[str], bool]) -> dict[str, str]:
    """The files whose name (with its folders, parted by /) is wanted, as text.

    Members of archives are read in memory and only if they are plain files: a link, or a name that leads out of the
    archive, has no way to the disk. Limits hold for all files together.
    """
    path = Path(path)
    try:
        with ExitStack() as stack:
            contents = {}
            total = 0
            for name, size, read in _files(path, wanted, stack):
                total += size
                if total > LARGEST:
                    raise ValueError(
                        f"text files may have {LARGEST:,} bytes together: {path.name!r} has {total:,} with "
                        f"{name!r:.100}. Is it the right one?"
                    )
                contents[name] = read()
    except (
        zipfile.BadZipFile,
        tarfile.TarError,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and (error.errno is not None or isinstance(error, FileNotFoundError)):
            raise  # of the disk, and not of a decompressor
        raise ValueError(
            f"an archive must read back whole: {path.name!r} does not ({str(error)[:200]}). It is damaged; "
            "fetch it again."
        ) from None
    return {name: _decode(content, name) for name, content in contents.items()}


def _files(path: Path, wanted: Callable[[str], bool], stack: ExitStack) -> Iterable[Found]:
    """What is wanted of a folder, an archive, or a file that is neither."""
    if path.is_dir():
        return _in_folder(path, wanted)
    if not path.is_file():
        raise FileNotFoundError(f"{path.name!r} is not there: no such file or folder.")
    if zipfile.is_zipfile(path):
        return _in_zip(stack.enter_context(zipfile.ZipFile(path)), path, wanted)
    unpacked: Any = _Passed(stack.enter_context(_decompressed(path)), path)
    try:
        # next to nothing may be read in one piece but a text: a name of a gigabyte is a name in bad faith
        archive = stack.enter_context(tarfile.open(fileobj=unpacked, mode="r:"))  # noqa: SIM115
    except tarfile.TarError:
        return [(path.name, path.stat().st_size, path.read_bytes)] if wanted(path.name) else []
    return _in_tar(archive, path, wanted)


def _in_folder(path: Path, wanted: Callable[[str], bool]) -> Iterator[Found]:
    root = path.resolve()
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if wanted(name) and file.is_file() and file.resolve().is_relative_to(root):
            yield name, file.stat().st_size, file.read_bytes


def _in_zip(archive: zipfile.ZipFile, path: Path, wanted: Callable[[str], bool]) -> Iterator[Found]:
    for info in archive.infolist():
        if wanted(info.filename) and not info.is_dir():
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise _other_compression(path)
            yield info.filename, info.file_size, partial(archive.read, info)


def _in_tar(archive: tarfile.TarFile, path: Path, wanted: Callable[[str], bool]) -> Iterator[Found]:
    for count, member in enumerate(archive, 1):
        if count > MOST_MEMBERS:
            raise ValueError(f"an archive may have {MOST_MEMBERS:,} members: {path.name!r} has more. Unpack it first.")
        if member.isreg() and wanted(member.name):
            yield member.name, member.size, partial(_read_member, archive, member)


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    return b"" if file is None else file.read(member.size)


def _decompressed(path: Path) -> Any:
    with path.open("rb") as file:
        start = file.read(6)
    if start == b"\xfd7zXZ\x00":
        raise _other_compression(path)
    if start[:3] == b"BZh":
        return bz2.open(path)
    return gzip.open(path) if start[:2] == b"\x1f\x8b" else path.open("rb")


def _other_compression(path: Path) -> ValueError:
    return ValueError(
        f"an archive must be a zip, or a tar compressed by gzip or bzip2: {path.name!r} is compressed by other means, "
        "some of which let a small file ask for all memory. Unpack it, and pass the folder."
    )


class _Passed:
    """A decompressed file that ends in an error where more is read or passed over than the limits allow."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path = file, path

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, place: int, whence: int = 0) -> int:
        self._check(place, MOST_PASSED)
        return int(self._file.seek(place, whence))

    def read(self, size: int = -1) -> bytes:
        self._check(size, LARGEST)
        self._check(self._file.tell() + size, MOST_PASSED)
        return bytes(self._file.read(size))

    def _check(self, size: int, most: int) -> None:
        if size > most:
            raise ValueError(
                f"an archive may have {most:,} bytes in one piece, and {MOST_PASSED:,} in all before what is wanted: "
                f"{self._path.name!r} has {size:,}. Is it the right one? If so, unpack it and pass the folder."
            )


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text must be UTF-8: {name!r:.100} is not ({error.reason} at byte {error.start}). "
            "Fetch or convert it again."
        ) from None
