"""One row per set: a column of lists of tokens, or one column of lists per coordinate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int

from keyhole.sets import SetBatch
from keyhole.tables.columns import TARGET_NAMES, check_columns, first_of, floats, is_list, is_number, labels, numbers
from keyhole.tables.dataset import Dataset
from keyhole.tables.long import Choice, fill_empty


def has_list_keys(table: pa.Table, choice: Choice) -> bool:
    """Whether the keys are in list columns."""
    if choice.keys:
        check_columns(table, choice.keys, "keys")
        return is_list(table.schema.field(choice.keys[0]).type)
    return any(is_list(field.type) for field in table.schema)


def read_lists(table: pa.Table, choice: Choice, source: str) -> Dataset:
    """Sets out of list columns."""
    target = choice.target or first_of(table, TARGET_NAMES)
    if target is not None:
        check_columns(table, [target], "target")
    keys, query = _key_columns(table, choice, target), _query_columns(table, choice)
    if table.num_rows == 0:
        raise ValueError(f"a table must have at least one row: {source} has none.")
    tokens, offsets, names = _tokens(table, keys, choice.missing)
    queries = None if query is None else _queries(table, query, tokens.shape[1])
    sets = _split(tokens, offsets, names, choice.missing)
    if queries is not None and not np.isfinite(queries).all():
        row = int((~np.isfinite(queries)).any(axis=1).argmax())
        raise ValueError(f"queries must be known: that of row {row} has a gap. Fill it in, or drop the row.")
    y = None if target is None else labels(table, target)
    columns = (("keys", ",".join(keys)), ("query", ",".join(query or ())), ("target", target or ""))
    words = f"{source}: {len(sets)} rows, one row per set"
    return Dataset(SetBatch(sets, queries), y, names, words, target or "", columns=tuple(c for c in columns if c[1]))


def _key_columns(table: pa.Table, choice: Choice, target: str | None) -> tuple[str, ...]:
    if choice.keys:
        return choice.keys
    if any(field.name == "keys" and is_list(field.type) for field in table.schema):
        check_columns(table, ["keys"], "keys")
        return ("keys",)
    used = (target, "query", *(choice.query or ()))
    found = tuple(f.name for f in table.schema if is_list(f.type) and f.name not in used)
    check_columns(table, found, "keys")
    nested = [name for name in found if is_list(table.schema.field(name).type.value_type)]
    if len(nested) > 1 or (nested and len(found) > 1) or not found:
        raise ValueError(
            "keys must be one column of lists of tokens, or one column of lists of numbers per coordinate: found "
            f"{', '.join(repr(n) for n in found) or 'none'}. Name them with `keys` (--keys)."
        )
    return found


def _query_columns(table: pa.Table, choice: Choice) -> tuple[str, ...] | None:
    query = choice.query or (("query",) if "query" in table.column_names else None)
    check_columns(table, query or (), "query")
    return query


def _tokens(
    table: pa.Table, keys: tuple[str, ...], missing: str
) -> tuple[Float[np.ndarray, "t d"], Int[np.ndarray, " o"], Any]:
    kind = table.schema.field(keys[0]).type
    known = _known_rows(table, keys, missing)
    if len(keys) == 1 and is_list(kind) and is_list(kind.value_type):
        outer, offsets = _known_tokens(*_flatten(table, keys[0], known), keys[0], missing)
        inner = _rows(outer, keys[0])
        return inner, offsets, tuple(f"{keys[0]}[{j}]" for j in range(inner.shape[1]))
    parts, first = [], None
    for name in keys:
        if not is_list(table.schema.field(name).type):
            raise ValueError(
                f"all key columns must hold lists if one does: {name!r} holds {table.schema.field(name).type}. "
                "Repeat what belongs to the whole set as a list, or make it the query."
            )
        values, offsets = _flatten(table, name, known)
        _check_numbers(values.type, name)
        parts.append(floats(values))
        if first is not None and not np.array_equal(first, offsets):
            row = int((np.diff(first) != np.diff(offsets)).argmax())
            raise ValueError(
                f"the coordinates of a set must have equally many entries: in row {row} column {keys[0]!r} has "
                f"{np.diff(first)[row]} and {name!r} has {np.diff(offsets)[row]}. Pad or cut them."
            )
        first = offsets
    assert first is not None  # there is at least one key column
    return np.stack(parts, axis=1), first, keys


def _known_rows(table: pa.Table, names: tuple[str, ...], missing: str) -> Bool[np.ndarray, " n"]:
    """Rows in which all these columns have a list: the others are refused, or all their tokens dropped."""
    known = np.ones(table.num_rows, dtype=bool)
    for name in names:
        known &= table.column(name).is_valid().to_numpy()
        if missing != "drop" and not known.all():
            more = ", or have its tokens dropped with missing='drop' (--missing drop)" if missing == "error" else ""
            raise ValueError(
                f"column {name!r} must have a list in every row: row {int(known.argmin())} is empty. "
                f"Drop the row{more}."
            )
    return known


def _flatten(table: pa.Table, name: str, known: Bool[np.ndarray, " n"]) -> tuple[Any, Int[np.ndarray, " o"]]:
    """The values of a list column end to end, and where each row begins; rows that are not known have none."""
    column = table.column(name).combine_chunks().filter(pa.array(known))
    lengths = np.zeros(len(known), dtype=np.int64)
    lengths[known] = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return column.flatten(), np.concatenate([[0], np.cumsum(lengths)])


def _known_tokens(tokens: Any, offsets: np.ndarray, name: str, missing: str) -> tuple[Any, Int[np.ndarray, " o"]]:
    """Lists of coordinates without those that are null, which are refused or dropped."""
    known = np.asarray(tokens.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    if not known.all() and missing == "error":
        row = int(np.searchsorted(offsets, known.argmin(), side="right")) - 1
        raise ValueError(
            f"column {name!r} must hold lists of tokens: row {row} has one that is empty. Drop it, or all such tokens "
            "with missing='drop' (--missing drop)."
        )
    return tokens.filter(pa.array(known)), np.concatenate([[0], np.cumsum(known)])[offsets]


def _rows(column: Any, name: str) -> Float[np.ndarray, "t d"]:
    """Lists of equal length as the rows of a matrix."""
    _check_numbers(column.type.value_type, name)
    lengths = np.asarray(pc.list_value_length(column).to_numpy(zero_copy_only=False))
    if len(lengths) == 0:
        raise ValueError(f"column {name!r} must hold at least one token: all lists are empty.")
    if (lengths != lengths[0]).any() or lengths[0] == 0:
        i = int((lengths != lengths[0]).argmax())
        raise ValueError(
            f"all tokens of column {name!r} must have as many coordinates, at least one: token 0 has {lengths[0]} and "
            f"token {i} has {lengths[i]}. Pad or cut them."
        )
    return floats(column.flatten()).reshape(len(lengths), int(lengths[0]))


def _check_numbers(kind: pa.DataType, name: str) -> None:
    if not is_number(kind):
        raise ValueError(f"column {name!r} must hold lists of numbers: it holds lists of {kind}. Encode them first.")


def _queries(table: pa.Table, query: tuple[str, ...], dim: int) -> Float[np.ndarray, "n d"]:
    if len(query) == 1 and is_list(table.schema.field(query[0]).type):
        _known_rows(table, query, "never")
        found = _rows(table.column(query[0]).combine_chunks(), query[0])
    else:
        found = np.stack([numbers(table, name) for name in query], axis=1)
    if found.shape[1] != dim:
        raise ValueError(
            f"a query has the coordinates of a key: {', '.join(query[:10])} has {found.shape[1]} and keys have {dim}. "
            "Pad the shorter with zeros."
        )
    return found


def _split(tokens: np.ndarray, offsets: np.ndarray, names: tuple[str, ...], missing: str) -> list[np.ndarray]:
    if missing == "error" and not np.isfinite(tokens).all():
        row, column = (int(k) for k in np.argwhere(~np.isfinite(tokens))[0])
        owner = int(np.searchsorted(offsets, row, side="right")) - 1
        raise ValueError(
            f"tokens must be known: {names[column]!r} has a gap in row {owner}, "
            f"{int((~np.isfinite(tokens)).sum())} such entries in all. Fill them in, or drop the tokens that have one "
            "with missing='drop' (--missing drop)."
        )
    sets = np.split(tokens, offsets[1:-1])
    if missing == "drop":
        sets = [s[~np.isnan(s).any(axis=1)] for s in sets]
    return fill_empty(sets, missing)
