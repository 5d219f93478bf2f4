"""Columns of an Arrow table as arrays, with errors that name the column, what was found and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int, Shaped

SET_NAMES = ("set", "set_id", "bag", "bag_id", "id", "group")
TARGET_NAMES = ("target", "label", "class", "y")
"""Usual names, "y" last: it may be a coordinate."""


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether a column holds numbers."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def check_columns(table: pa.Table, names: Sequence[str], option: str) -> None:
    """Raise if a column is not there, or there twice."""
    for name in names:
        count = table.column_names.count(name)
        if count != 1:
            problem = "is not in the table" if count == 0 else f"is there {count} times"
            remedy = "" if count == 0 else " Rename all but one of them."
            raise ValueError(
                f"`{option}` must name columns of the table: {name!r} {problem}. It has "
                f"{', '.join(repr(c) for c in table.column_names[:30])}.{remedy}"
            )


def first_of(table: pa.Table, candidates: Sequence[str]) -> str | None:
    """The first of some usual names that is a column."""
    return next((name for name in candidates if name in table.column_names), None)


def numbers(table: pa.Table, name: str) -> Float[np.ndarray, " r"]:
    """A column of numbers; missing entries are NaN."""
    column = table.column(name)
    if not is_number(column.type):
        raise ValueError(
            f"column {name!r} must hold numbers: it holds {column.type}. Leave it out of the keys, or encode it as "
            "numbers first."
        )
    return floats(column)


def floats(column: Any) -> Float[np.ndarray, " r"]:
    """Numbers as float64, NaN where missing."""
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.int8())
    return np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)


def set_ids(table: pa.Table, name: str) -> Shaped[np.ndarray, " r"]:
    """Which set each row belongs to: every row says so."""
    gaps = _gaps(table.column(name))
    if len(gaps):
        rows = f"rows {', '.join(map(str, gaps[:5]))}{' …' if len(gaps) > 5 else ''} are"
        raise ValueError(
            f"column {name!r} must say of every row which set it belongs to: "
            f"{rows if len(gaps) > 1 else f'row {gaps[0]} is'} empty ({len(gaps)} in all). Fill in the sets, or drop "
            "such rows."
        )
    return _values(table, name, "set column")


def labels(table: pa.Table, name: str) -> Shaped[np.ndarray, " r"]:
    """A target: integers, numbers, booleans or text, without gaps."""
    gaps = _gaps(table.column(name))
    if len(gaps):
        raise ValueError(
            f"target column {name!r} must be known in every row: row {gaps[0]} is empty ({len(gaps)} in all). "
            "Drop such rows first."
        )
    return _values(table, name, "target column")


def _gaps(column: Any) -> Int[np.ndarray, " g"]:
    """Rows that say nothing. In CSV a gap among texts is an empty text."""
    empty = column.is_null()
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        blank = pc.equal(pc.utf8_trim_whitespace(column.cast(kind)), "")
        empty = pc.or_(empty, pc.fill_null(blank, False))
    return np.flatnonzero(empty.to_numpy())


def _values(table: pa.Table, name: str, what: str) -> Shaped[np.ndarray, " r"]:
    column = table.column(name)
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(column.to_pylist(), dtype=np.str_)
    if not is_number(kind):
        raise ValueError(f"{what} {name!r} must hold numbers or text: it holds {kind}. Convert it first.")
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        values = floats(column)
        if not np.isfinite(values).all():
            row = int((~np.isfinite(values)).argmax())
            raise ValueError(f"{what} {name!r} must be finite: row {row} is {values[row]}. Drop such rows first.")
        return values
    return np.asarray(column.to_numpy())
