"""Arrays in npz files, none of them trusted, and the table that they make."""

from __future__ import annotations

import errno
import io
import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

GROWTH = 2**27
TIMES = 20
"""Arrays of a file may take 128 MiB and twenty times its size together: deflated zeros claim a
thousand times.
"""
LONGEST_HEADER = 10_000  # bytes; NumPy's own limit, which it looks at after reading


UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    RuntimeError,
    UnicodeDecodeError,
)


class NpzFile:
    """Arrays of an npz file by name, each checked before it is allocated, and all of them together.

    Of a file that is in memory already the content is given, and the path is its name alone.
    """

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path if content is None else io.BytesIO(content))
        except (*UNREADABLE, ValueError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise  # of the disk; an invalid argument is a place that a damaged header leads to
            raise ValueError(
                f"an npz file is a zip archive of arrays: {path.name!r} is not ({error}). {_REMEDY}"
            ) from None
        self._size = path.stat().st_size if content is None else len(content)
        self._room = GROWTH + TIMES * self._size
        self.names = [n.removesuffix(".npy") for n in self._zip.namelist() if n.endswith(".npy")]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            return self._read(name)
        except (*UNREADABLE, KeyError, OSError) as error:
            words = f"{name!r} of {self.path.name!r} does not ({error})"
            raise ValueError(
                f"the arrays of an npz file must read back: {words}. {_REMEDY}"
            ) from None

    def _read(self, name: str) -> np.ndarray:
        """An array; nothing is allocated for it before its header has been checked."""

        def wrong(rule: str, evidence: str, remedy: str = _REMEDY) -> ValueError:
            return ValueError(f"{rule}: {name!r} of {self.path.name!r} {evidence}. {remedy}")

        # the entry of the archive
        info = self._zip.getinfo(f"{name}.npy")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise wrong("arrays must be stored as NumPy does", "is compressed by other means")
        if info.compress_size > self._size:  # as much would be allocated before a byte is read
            raise zipfile.BadZipFile("it is said to be larger than the file")
        with self._zip.open(info) as file:
            # the header of the array
            try:
                shape, is_transposed, dtype = _header(file)
            except (
                ValueError,
                TypeError,
                SyntaxError,
                tokenize.TokenError,
                RecursionError,
                MemoryError,
            ) as error:
                words = f"does not ({str(error)[:100] or type(error).__name__})"
                raise wrong("an array must begin with its shape and type", words) from None
            rest = info.file_size - file.tell()
            size = math.prod(shape) * dtype.itemsize
            if dtype.kind not in "biufcSU" or not dtype.itemsize:
                content_kind = "objects" if dtype.hasobject else dtype
                raise wrong(
                    "arrays must hold numbers or text",
                    f"holds {content_kind}",
                    "Save it as numbers.",
                )
            if size != rest or min(shape, default=0) < 0:
                words = f"has shape {shape} of {dtype}, {size:,} bytes, and {rest:,} are there"
                raise wrong("an array must be as large as its shape says", words)

            # its content, for which there is room also when numbers become floats
            self._take_room(name, math.prod(shape) * max(dtype.itemsize, 8))
            content = bytearray(file.read(rest + 1))  # writable, as an array of one's own is
        if len(content) != size:
            raise wrong("all bytes of an array must be there", f"has {len(content):,} of {size:,}")
        try:
            flat = np.frombuffer(content, dtype)
            if is_transposed:
                return flat.reshape(shape[::-1]).T
            return flat.reshape(shape)
        except ValueError as error:  # no bytes, or an axis too long for NumPy
            raise wrong(
                "an array must have a shape that NumPy knows", f"has {shape} ({error})"
            ) from None

    def _take_room(self, name: str, size: int) -> None:
        if size > self._room:
            raise ValueError(
                f"arrays may take {GROWTH:,} bytes and {TIMES} times the size of their file "
                f"together: {name!r} of {self.path.name!r} takes {size:,} bytes in memory, and "
                f"{self._room:,} are left of that. If it is what it should be, save it "
                "uncompressed, by np.savez."
            )
        self._room -= size


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of an array."""
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"format {version}, where 1 and 2 are read")
    shape, turned, dtype = readers[version](_Short(file))
    return tuple(int(length) for length in shape), bool(turned), dtype


class _Short:
    """A file of which nothing long is read in one piece."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= LONGEST_HEADER:
            raise ValueError(f"a header of {size:,} bytes")
        return bytes(self._file.read(size))


_REMEDY = "The file is damaged or of another kind; fetch or write it again."


def npz_table(
    path: Path,
    keys: tuple[str, ...] | None,
    query: tuple[str, ...] | None,
    target: tuple[str, ...] | None,
    extras: tuple[str, ...] | None = None,
    content: bytes | None = None,
) -> tuple[Any, np.ndarray | None]:
    """The arrays of an npz file as a table of one row per set, and its split or None.

    Names are those of the arrays.
    """
    import pyarrow as pa

    # which arrays: those that were named, else those of the usual names
    file = NpzFile(path, content)
    keys_name = keys[0] if keys else "X"
    if not keys and "keys" in file:
        keys_name = "keys"
    query_name = query[0] if query else _first_of(("query",), file)
    extras_name = extras[0] if extras else _first_of(("extras",), file)
    targets = [_first_of(("y", "target"), file)] if target is None else list(target)
    for name in filter(None, (keys_name, query_name, extras_name, *targets)):
        _check_name(file, name)

    # keys: sets of one size, or tokens end to end with a pointer to the first of each set
    tokens = _floats(file[keys_name], keys_name)
    if tokens.ndim == 3:
        if 0 in tokens.shape:
            raise ValueError(
                f"array {keys_name!r} must have sets, keys and coordinates: its shape is "
                f"{tokens.shape}."
            )
        ptr = np.arange(len(tokens) + 1) * tokens.shape[1]
        tokens = tokens.reshape(-1, tokens.shape[2])
    else:
        ptr = _pointer(file, tokens, keys_name)
    n = len(ptr) - 1
    columns = {keys_name: pa.LargeListArray.from_arrays(pa.array(ptr), _rows(tokens))}

    # queries and extras: a vector for each set
    for vectors, what in ((query_name, "query"), (extras_name, "row of extras")):
        if vectors is None:
            continue
        matrix = _floats(file[vectors], vectors)
        if matrix.ndim != 2 or len(matrix) != n or not matrix.shape[1]:
            raise ValueError(
                f"array {vectors!r} must have one {what} per set, ({n}, d): its shape is "
                f"{matrix.shape}. Save one row for each set."
            )
        columns[vectors] = _rows(matrix)

    # targets
    for name in filter(None, targets):
        try:
            columns[name] = pa.array(_target(file[name], name, n))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"array {name!r} must hold text: it does not read ({error}). Save it again."
            ) from None

    # an array "split" that is something else than one whole number per set is no split
    if "split" not in file:
        return pa.table(columns), None
    split = file["split"]
    is_split = split.shape == (n,) and split.dtype.kind in "iu"
    return pa.table(columns), split if is_split else None


def _first_of(names: tuple[str, ...], file: NpzFile) -> str | None:
    """The first of some names that an array of the file has, or None."""
    return next((name for name in names if name in file), None)


def _rows(matrix: np.ndarray) -> Any:
    """The rows of a matrix as an Arrow column of lists of one length."""
    import pyarrow as pa

    values = pa.array(np.ascontiguousarray(matrix).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, matrix.shape[1])


def _check_name(file: NpzFile, name: str) -> None:
    if name not in file:
        raise ValueError(
            f"{file.path.name!r} must hold {name!r}: it holds "
            f"{', '.join(repr(n) for n in file.names[:30]) or 'nothing'}. Tokens are in 'keys' "
            "(n, N, d), or in 'X' (tokens, d) with 'ptr' (sets + 1); or name them (--keys)."
        )


def _floats(array: np.ndarray, name: str) -> np.ndarray:
    """Numbers in float32 if they are, else in float64."""
    if array.dtype.kind not in "fiub":
        raise ValueError(
            f"array {name!r} must hold numbers: it holds {array.dtype}. Encode it as numbers first."
        )
    dtype = np.float32 if array.dtype == np.float32 else np.float64
    return array.astype(dtype, copy=False)


def _pointer(file: NpzFile, tokens: np.ndarray, name: str) -> np.ndarray:
    if tokens.ndim != 2 or not tokens.shape[1]:
        raise ValueError(
            f"array {name!r} must have shape (n, N, d), or (tokens, d) with 'ptr': its shape is "
            f"{tokens.shape}. For one key per set save x[:, None, :]."
        )
    _check_name(file, "ptr")
    return check_pointer(file["ptr"], len(tokens), name)


def check_pointer(ptr: np.ndarray, n_rows: int, name: str) -> np.ndarray:
    """The rows at which samples begin, and the end of the last.

    Integers that rise from 0 to the rows of an array.
    """
    if ptr.ndim != 1 or ptr.dtype.kind not in "iu" or len(ptr) < 2:
        raise ValueError(
            f"'ptr' must be a vector of integers, one more than sets: got {ptr.dtype} of shape "
            f"{ptr.shape}."
        )
    ptr = ptr.astype(np.int64)
    if ptr[0] != 0 or ptr[-1] != n_rows or (np.diff(ptr) < 0).any():
        raise ValueError(
            f"'ptr' must rise from 0 to the {n_rows} rows of {name!r}, set i owning rows ptr[i] to "
            f"ptr[i+1]: it goes from {ptr[0]} to {ptr[-1]}, its smallest step is "
            f"{np.diff(ptr).min()}."
        )
    return ptr


def _target(array: np.ndarray, name: str, n: int) -> np.ndarray:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape != (n,) or array.dtype.kind not in "fiubU":
        raise ValueError(
            f"target {name!r} must have one number or text per set: got {array.dtype} of shape "
            f"{array.shape} for {n} sets."
        )
    return array.astype(array.dtype.newbyteorder("="))  # Arrow knows one order of bytes
