"""Arrays of an npz file as a table of one row per set."""

from __future__ import annotations

import errno
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa


def read_arrays(source: Path | io.BufferedIOBase, name: str) -> dict[str, np.ndarray]:
    """The arrays of an npz file by name; objects are refused, because they would be executed."""
    if isinstance(source, Path):
        with source.open("rb") as file:
            return read_arrays(file, name)
    try:
        with np.load(source, allow_pickle=False) as arrays:
            return {key: np.asarray(arrays[key]) for key in arrays.files}
    except Exception as error:
        # an error of the disk has its own number; an invalid argument is where damage leads
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ValueError(
            f"an npz file is an archive of arrays of numbers or text: {name!r} does not read "
            f"({str(error)[:200]}). Write it again, by np.savez."
        ) from None


def npz_table(
    arrays: Mapping[str, np.ndarray],
    name: str,
    keys: str | None = None,
    query: str | None = None,
    target: tuple[str, ...] | None = None,
    extras: str | None = None,
) -> tuple[pa.Table, np.ndarray | None]:
    """A table of one row per set, and its split or None; options name arrays."""
    keys = keys or ("keys" if "keys" in arrays else "X")
    query = query or _first_of(("query",), arrays)
    extras = extras or _first_of(("extras",), arrays)
    targets = target
    if targets is None:
        usual = _first_of(("y", "target"), arrays)
        targets = () if usual is None else (usual,)
    for needed in (keys, query, extras, *targets):
        if needed is not None:
            _check_name(arrays, needed, name)

    # keys: sets of one size, or tokens end to end with a pointer to the first of each set
    tokens = _floats(arrays[keys], keys)
    if tokens.ndim == 3 and 0 not in tokens.shape:
        ptr = np.arange(len(tokens) + 1) * tokens.shape[1]
        tokens = tokens.reshape(-1, tokens.shape[2])
    elif tokens.ndim == 2 and tokens.shape[1]:
        _check_name(arrays, "ptr", name)
        ptr = check_pointer(arrays["ptr"], len(tokens), keys)
    else:
        raise ValueError(
            f"array {keys!r} must have shape (n, N, d), or (tokens, d) with 'ptr', and coordinates:"
            f" its shape is {tokens.shape}. For one key per set save x[:, None, :]."
        )
    n_sets = len(ptr) - 1
    columns: dict[str, Any] = {keys: pa.LargeListArray.from_arrays(pa.array(ptr), as_rows(tokens))}

    # queries and extras: a vector for each set; targets: a number or text for each
    for vectors in (query, extras):
        if vectors is None:
            continue
        values = _floats(arrays[vectors], vectors)
        if values.ndim != 2 or len(values) != n_sets or not values.shape[1]:
            raise ValueError(
                f"array {vectors!r} must have one row per set, ({n_sets}, d): its shape is "
                f"{values.shape}. Save one row for each set."
            )
        columns[vectors] = as_rows(values)
    for column in targets:
        try:
            columns[column] = pa.array(_target(arrays[column], column, n_sets))
        except UnicodeDecodeError as error:
            raise ValueError(
                f"array {column!r} must hold text: it does not read ({error}). Save it again."
            ) from None

    # an array "split" that is something else than one whole number per set is no split
    split = arrays.get("split")
    if split is None or split.shape != (n_sets,) or split.dtype.kind not in "iu":
        split = None
    return pa.table(columns), split


def _first_of(names: tuple[str, ...], arrays: Mapping[str, np.ndarray]) -> str | None:
    """The first of some names that an array has, or None."""
    return next((name for name in names if name in arrays), None)


def as_rows(matrix: np.ndarray) -> Any:
    """The rows of a matrix as an Arrow column of lists of one length."""
    values = pa.array(np.ascontiguousarray(matrix).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, matrix.shape[1])


def _check_name(arrays: Mapping[str, np.ndarray], needed: str, name: str) -> None:
    if needed not in arrays:
        names = ", ".join(repr(other) for other in list(arrays)[:30]) or "nothing"
        raise ValueError(
            f"{name!r} must hold {needed!r}: it holds {names}. Tokens are in 'keys' (n, N, d), or "
            "in 'X' (tokens, d) with 'ptr' (sets + 1); or name them (--keys)."
        )


def _floats(array: np.ndarray, name: str) -> np.ndarray:
    """Numbers in float32 if they are, else in float64."""
    if array.dtype.kind not in "fiub":
        raise ValueError(
            f"array {name!r} must hold numbers: it holds {array.dtype}. Encode it as numbers first."
        )
    dtype = np.float32 if array.dtype == np.float32 else np.float64
    return array.astype(dtype, copy=False)


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


def _target(array: np.ndarray, name: str, n_sets: int) -> np.ndarray:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape != (n_sets,) or array.dtype.kind not in "fiubU":
        raise ValueError(
            f"target {name!r} must have one number or text per set: got {array.dtype} of shape "
            f"{array.shape} for {n_sets} sets."
        )
    return array.astype(array.dtype.newbyteorder("="))  # Arrow knows one order of bytes
