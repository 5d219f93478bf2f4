"""npz: arrays ``X`` and ``ptr`` of tokens end to end, or ``keys`` (n, N, d), with ``y``. Never with pickle."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.sets import SetBatch
from keyhole.tables.dataset import Dataset
from keyhole.tables.long import Choice, fill_empty

GROWTH, TIMES = 2**27, 20
"""Arrays of a file may take 128 MiB and twenty times its size together: deflated zeros claim a thousand times."""
LONGEST_HEADER = 10_000
"""Bytes; NumPy's own limit, which it looks at after reading."""


class NpzFile:
    """Arrays of an npz file by name, each checked before it is allocated, and all of them together.

    Parameters
    ----------
    path : Path
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
            raise ValueError(
                f"an npz file is a zip archive of arrays: {path.name!r} is not ({error}). {_REMEDY}"
            ) from None
        self._room = GROWTH + TIMES * path.stat().st_size
        self.names = [n.removesuffix(".npy") for n in self._zip.namelist() if n.endswith(".npy")]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            return self._read(name)
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            NotImplementedError,
            RuntimeError,
            KeyError,
            OSError,
        ) as error:
            words = f"{name!r} of {self.path.name!r} does not ({error})"
            raise ValueError(f"the arrays of an npz file must read back: {words}. {_REMEDY}") from None

    def _read(self, name: str) -> np.ndarray:
        info = self._zip.getinfo(f"{name}.npy")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"arrays must be stored as NumPy does: {name!r} of {self.path.name!r} is compressed by other means. "
                f"{_REMEDY}"
            )
        with self._zip.open(info) as file:
            shape, turned, dtype = self._header(name, file)
            rest = info.file_size - file.tell()
            size = math.prod(shape) * dtype.itemsize
            if dtype.hasobject:
                raise ValueError(
                    f"arrays must hold numbers or text: {name!r} of {self.path.name!r} holds objects. "
                    "Save it as numbers."
                )
            if dtype.kind not in "biufcSU" or not dtype.itemsize:
                raise ValueError(
                    f"arrays must hold numbers or text: {name!r} of {self.path.name!r} holds {dtype}. "
                    "Save it as numbers."
                )
            if size != rest or min(shape, default=0) < 0:
                raise ValueError(
                    f"an array must be as large as its shape says: {name!r} of {self.path.name!r} has shape {shape} of "
                    f"{dtype}, {size:,} bytes, and {rest:,} are there. {_REMEDY}"
                )
            self._take_room(name, math.prod(shape) * max(dtype.itemsize, 8))  # numbers become floats
            content = bytearray(file.read(rest + 1))  # writable, as an array of one's own is
        if len(content) != size:
            raise ValueError(
                f"all bytes of an array must be there: {name!r} has {len(content):,} of {size:,}. {_REMEDY}"
            )
        try:
            flat = np.frombuffer(content, dtype)
            return flat.reshape(shape[::-1]).T if turned else flat.reshape(shape)
        except ValueError as error:  # no bytes, or an axis too long for NumPy
            raise ValueError(
                f"an array must have a shape that NumPy knows: {name!r} of {self.path.name!r} has {shape} ({error}). "
                f"{_REMEDY}"
            ) from None

    def _header(self, name: str, file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        """Shape, order and type of an array."""
        try:
            version = np.lib.format.read_magic(file)
            readers = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }
            if version not in readers:
                raise ValueError(f"format {version}, where 1 and 2 are read")
            shape, turned, dtype = readers[version](_Short(file))
        except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"an array must begin with its shape and type: {name!r} of {self.path.name!r} does not "
                f"({str(error)[:100] or type(error).__name__}). {_REMEDY}"
            ) from None
        return tuple(int(length) for length in shape), bool(turned), dtype

    def _take_room(self, name: str, size: int) -> None:
        if size > self._room:
            raise ValueError(
                f"arrays may take {GROWTH:,} bytes and {TIMES} times the size of their file together: {name!r} of "
                f"{self.path.name!r} takes {size:,} bytes in memory, and {self._room:,} are left of that. If it is "
                "what it should be, save it uncompressed, by np.savez."
            )
        self._room -= size


class _Short:
    """A file of which nothing long is read in one piece."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= LONGEST_HEADER:
            raise ValueError(f"a header of {size:,} bytes")
        return bytes(self._file.read(size))


_REMEDY = "The file is damaged or of another kind; fetch or write it again."


def read_npz(path: Path, choice: Choice) -> Dataset:
    """Sets out of an npz file."""
    file = NpzFile(path)
    keys_name = choice.keys[0] if choice.keys else "keys" if "keys" in file else "X"
    for name in (keys_name, *(choice.query or ())):
        _check_name(file, name)
    tokens = _floats(file[keys_name], keys_name)
    sets: Any = _dense(tokens, keys_name) if tokens.ndim == 3 else _by_pointer(file, tokens, keys_name)
    query_name = choice.query[0] if choice.query else "query" if "query" in file else None
    query = None if query_name is None else _floats(file[query_name], query_name)
    sets = _with_gaps(sets, choice.missing)
    target_name = choice.target or next((n for n in ("y", "target") if n in file), None)
    if target_name is not None:
        _check_name(file, target_name)
    y = None if target_name is None else _target(file[target_name], target_name, len(sets))
    split = _split_of(file, len(sets))
    dim = sets[0].shape[1]
    names = tuple(f"{keys_name}[{j}]" for j in range(dim))
    columns = (("keys", keys_name), ("query", query_name or ""), ("target", target_name or ""))
    return Dataset(
        SetBatch(sets, query),
        y,
        names,
        f"{path.name}: {len(sets)} sets",
        target_name or "",
        split,
        tuple(c for c in columns if c[1]),
    )


def _check_name(file: NpzFile, name: str) -> None:
    if name not in file:
        raise ValueError(
            f"{file.path.name!r} must hold {name!r}: it holds "
            f"{', '.join(repr(n) for n in file.names[:30]) or 'nothing'}. Tokens are in 'keys' (n, N, d), or in "
            "'X' (tokens, d) with 'ptr' (sets + 1); or name them (--keys)."
        )


def _floats(array: np.ndarray, name: str) -> np.ndarray:
    if array.dtype.kind not in "fiub":
        raise ValueError(f"array {name!r} must hold numbers: it holds {array.dtype}. Encode it as numbers first.")
    return array.astype(np.float32 if array.dtype == np.float32 else np.float64, copy=False)


def _dense(tokens: np.ndarray, name: str) -> list[np.ndarray]:
    if 0 in tokens.shape:
        raise ValueError(f"array {name!r} must have sets, keys and coordinates: its shape is {tokens.shape}.")
    return list(tokens)


def _by_pointer(file: NpzFile, tokens: np.ndarray, name: str) -> list[np.ndarray]:
    if tokens.ndim != 2:
        raise ValueError(
            f"array {name!r} must have shape (n, N, d), or (tokens, d) with 'ptr': its shape is {tokens.shape}. "
            "For one key per set save x[:, None, :]."
        )
    _check_name(file, "ptr")
    ptr = file["ptr"]
    if ptr.ndim != 1 or ptr.dtype.kind not in "iu" or len(ptr) < 2:
        raise ValueError(
            f"'ptr' must be a vector of integers, one more than sets: got {ptr.dtype} of shape {ptr.shape}."
        )
    ptr = ptr.astype(np.int64)
    if ptr[0] != 0 or ptr[-1] != len(tokens) or (np.diff(ptr) < 0).any():
        raise ValueError(
            f"'ptr' must rise from 0 to the {len(tokens)} rows of {name!r}, set i owning rows ptr[i] to ptr[i+1]: "
            f"it goes from {ptr[0]} to {ptr[-1]}, its smallest step is {np.diff(ptr).min()}."
        )
    return np.split(tokens, ptr[1:-1])


def _with_gaps(sets: list[np.ndarray], missing: str) -> list[np.ndarray]:
    if missing == "drop":
        sets = [s[~np.isnan(s).any(axis=1)] for s in sets]
    return fill_empty(sets, missing)


def _target(array: np.ndarray, name: str, n: int) -> np.ndarray:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape != (n,) or array.dtype.kind not in "fiubU":
        raise ValueError(
            f"target {name!r} must have one number or text per set: got {array.dtype} of shape "
            f"{array.shape} for {n} sets."
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        i = int((~np.isfinite(array)).argmax())
        raise ValueError(f"target {name!r} must be finite: set {i} has {array[i]}. Drop such sets first.")
    return array


def _split_of(file: NpzFile, n: int) -> np.ndarray | None:
    split = file["split"] if "split" in file.names else None
    return split if split is not None and split.shape == (n,) and split.dtype.kind in "iu" else None
