"""Columns of a table as sets and numbers, without a Python object per row: list buffers are taken as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole.sets import SetBatch

REMEDY = "list<list<float>>, list<fixed_size_list<float>>, or a flat list<float> with `dim` given"


class SchemaError(ValueError):
    """A column that cannot be read as what it was asked for."""


def sets_of(table: Any, keys: str, query: str | None, dim: int | None, where: str) -> SetBatch:
    """The sets of a table or record batch; ``where`` names it in errors ("row group 3 of a.parquet")."""
    tokens, offsets = _tokens(_column(table, keys, where), keys, dim, where)
    lengths = np.diff(offsets)
    if len(lengths) and lengths.min() == 0:
        i = int(lengths.argmin())
        raise SchemaError(f"every set must have at least one key: row {i} of {where} has none in column {keys!r}.")
    _check_finite(tokens, keys, where)
    asked = None
    if query is not None:
        asked = matrix_of(table, query, where)
        if asked.shape[1] != tokens.shape[1]:
            raise SchemaError(
                f"columns {keys!r} and {query!r} must share their token dimension: keys have {tokens.shape[1]} "
                f"coordinates and queries {asked.shape[1]} in {where}."
            )
        both = np.result_type(tokens, asked)
        tokens, asked = tokens.astype(both, copy=False), asked.astype(both, copy=False)
    return SetBatch._from_flat(tokens, offsets, asked)


def matrix_of(table: Any, name: str, where: str) -> Float[np.ndarray, "n d"]:
    """A column of lists of equal length as a matrix; a column of numbers as one column of it."""
    import pyarrow as pa

    column = _column(table, name, where)
    if not _is_list(column.type):
        values = _numbers(column, name, where)
        _check_finite(values, name, where)
        return values[:, None]
    if _is_list(column.type.value_type):
        raise _mismatch(name, column.type, where, "a list of numbers", "Name the column that holds one vector per row.")
    if pa.types.is_fixed_size_list(column.type):
        matrix = _numbers(column.flatten(), name, where).reshape(len(column), -1)
    else:
        offsets, values = _unwrap(column)
        widths = np.unique(np.diff(offsets))
        if len(widths) > 1:
            raise _mismatch(name, column.type, where, "lists of one length", f"Lengths are {widths[:4].tolist()} …")
        matrix = _numbers(values, name, where).reshape(len(column), -1)
    _check_finite(matrix, name, where)
    return matrix


def labels_of(table: Any, name: str, where: str) -> np.ndarray:
    """A column of labels or numbers as a NumPy array: text stays text."""
    import pyarrow as pa

    column = _column(table, name, where)
    if _is_list(column.type):
        return matrix_of(table, name, where)
    if _is_number(column.type):
        return _numbers(column, name, where)
    if pa.types.is_nested(column.type):
        raise _mismatch(name, column.type, where, "labels or numbers", "Name a column with one value per row.")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _tokens(
    column: Any, name: str, dim: int | None, where: str
) -> tuple[Float[np.ndarray, "t d"], Int[np.ndarray, " o"]]:
    """All keys end to end, and where each set begins."""
    if not _is_list(column.type):
        raise _mismatch(name, column.type, where, "sets of keys", f"Store it as {REMEDY}.")
    outer, inner = _unwrap(column)
    if _is_list(inner.type):
        if _is_list(inner.type.value_type):
            raise _mismatch(name, inner.type, where, "sets of keys", "There is one level of lists too many.")
        if inner.null_count:
            raise SchemaError(f"column {name!r} of {where} has {inner.null_count} keys that are null. Drop them.")
        ends, flat = _unwrap(inner)
        widths = np.diff(ends)
        width = int(widths[0]) if len(widths) else (dim or 1)
        if width == 0:
            raise SchemaError(f"keys of column {name!r} must have at least one coordinate: key 0 of {where} has none.")
        if len(widths) and (widths != width).any():
            i = int(np.flatnonzero(widths != width)[0])
            raise SchemaError(
                f"all keys of column {name!r} must have one dimension: key {i} of {where} has {int(widths[i])} "
                f"coordinates, the first {width}."
            )
        if dim is not None and dim != width:
            raise SchemaError(f"`dim` is {dim}, and the keys of column {name!r} in {where} have {width} coordinates.")
        return _numbers(flat, name, where).reshape(-1, width), outer
    if dim is None:
        raise _mismatch(name, column.type, where, "sets of keys", "It is flat: say how many coordinates a key has.")
    lengths = np.diff(outer)
    if (lengths % dim).any():
        i = int(np.flatnonzero(lengths % dim)[0])
        raise SchemaError(
            f"lists of column {name!r} must be whole keys of `dim` = {dim} coordinates: row {i} of {where} has "
            f"{int(lengths[i])} numbers."
        )
    return _numbers(inner, name, where).reshape(-1, dim), outer // dim


def _unwrap(column: Any) -> tuple[Int[np.ndarray, " o"], Any]:
    """Offsets from 0 and the values between them, of a list array of any kind, sliced or not."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        return np.arange(len(column) + 1, dtype=np.int64) * column.type.list_size, column.flatten()
    offsets = column.offsets.to_numpy(zero_copy_only=True).astype(np.int64)
    if len(offsets) == 0:
        offsets = np.zeros(1, np.int64)
    return offsets - offsets[0], column.values.slice(offsets[0], offsets[-1] - offsets[0])


def _numbers(values: Any, name: str, where: str) -> np.ndarray:
    """A flat array of float32 or float64, sharing memory with the column where that is possible."""
    if not _is_number(values.type):
        raise _mismatch(name, values.type, where, "numbers", "Encode text and dates as numbers first.")
    if values.null_count:
        raise SchemaError(f"column {name!r} of {where} has {values.null_count} nulls. Drop or impute them.")
    array = values.to_numpy(zero_copy_only=False)
    if array.dtype not in (np.float32, np.float64):
        return array.astype(np.float64)
    return np.require(array, requirements="A")  # a buffer of a file may begin at any byte


def _column(table: Any, name: str, where: str) -> Any:
    if name not in table.schema.names:
        raise SchemaError(f"there is no column {name!r} in {where}: it has {', '.join(table.schema.names)}.")
    column = table.column(name)
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    if column.null_count:
        i = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise SchemaError(f"column {name!r} must not be null: row {i} of {where} is. Drop such rows.")
    return column


def _check_finite(values: np.ndarray, name: str, where: str) -> None:
    if not np.isfinite(values).all():
        bad = int(np.size(values) - np.isfinite(values).sum())
        raise SchemaError(
            f"column {name!r} must be finite: {bad} entries of {where} are NaN or infinite. Impute or drop them."
        )


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _mismatch(name: str, found: Any, where: str, wanted: str, remedy: str) -> SchemaError:
    return SchemaError(f"column {name!r} must hold {wanted}: found type {found} in {where}. {remedy}")
