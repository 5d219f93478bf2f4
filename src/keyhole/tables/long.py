"""Long form: one row per token, with a column that says which set it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from jaxtyping import Float, Int, Shaped

from keyhole.sets import SetBatch
from keyhole.tables.columns import SET_NAMES, TARGET_NAMES, check_columns, first_of, is_number, labels, numbers, set_ids
from keyhole.tables.dataset import Dataset


@dataclass(frozen=True)
class Choice:
    """Columns by their use; None where the table is to say."""

    keys: tuple[str, ...] | None = None
    query: tuple[str, ...] | None = None
    target: str | None = None
    set_id: str | None = None
    missing: str = "error"


def read_long(table: pa.Table, choice: Choice, source: str) -> Dataset:
    """Sets out of rows; the order of sets is that in which they first appear."""
    set_id = choice.set_id or first_of(table, SET_NAMES)
    if set_id is None:
        raise ValueError(
            "a table with one row per token needs a column that says which set a row belongs to: none of "
            f"{', '.join(SET_NAMES)} is among {', '.join(table.column_names[:30])}. Name it with `set_id` (--set)."
        )
    check_columns(table, [set_id], "set_id")
    target = choice.target or first_of(table, TARGET_NAMES)
    if target is not None:
        check_columns(table, [target], "target")
    if table.num_rows == 0:
        raise ValueError(f"a table must have at least one row: {source} has none.")
    role = "role" if "role" in table.column_names and choice.query is None else None
    check_columns(table, [role] if role else [], "role")
    query = choice.query or ()
    keys = choice.keys or tuple(
        name
        for name, field in zip(table.column_names, table.schema, strict=True)
        if name not in (set_id, target, role, *query) and is_number(field.type)
    )
    _check_choice(table, keys, query)
    owner, first = _owners(set_ids(table, set_id))
    tokens = np.stack([numbers(table, name) for name in keys], axis=1)
    is_key = np.ones(len(tokens), dtype=bool)
    queries = None
    if role is not None:
        is_key, queries = _rows_by_role(table, tokens, owner, len(first))
    elif query:
        queries = np.stack([_constant(numbers(table, name), owner, first, name) for name in query], axis=1)
    y = None if target is None else _constant(labels(table, target), owner, first, target)
    sets = _gather(tokens, owner, is_key, len(first), keys, choice.missing)
    if queries is not None:
        _refuse_gaps(queries, query or keys, "query")
    columns = (("set_id", set_id), ("keys", ",".join(keys)), ("query", ",".join(query)), ("target", target or ""))
    words = f"{source}: {len(first)} sets of {len(tokens)} rows, one row per token"
    return Dataset(SetBatch(sets, queries), y, keys, words, target or "", columns=tuple(c for c in columns if c[1]))


def _check_choice(table: pa.Table, keys: tuple[str, ...], query: tuple[str, ...]) -> None:
    if not keys:
        raise ValueError(
            f"a table must have a column of numbers for the keys: none is left among "
            f"{', '.join(table.column_names[:30])}. Name them with `keys` (--keys)."
        )
    check_columns(table, keys, "keys")
    check_columns(table, query, "query")
    if query and len(query) != len(keys):
        raise ValueError(
            f"a query has the coordinates of a key: got {len(query)} query columns ({', '.join(query[:10])}) for "
            f"{len(keys)} key columns ({', '.join(keys[:10])}). Name as many, in the same order; add a column of zeros "
            "where one of them has none."
        )


def _owners(ids: Shaped[np.ndarray, " r"]) -> tuple[Int[np.ndarray, " r"], Int[np.ndarray, " n"]]:
    """The set of each row, numbered by first appearance, and that first row."""
    _, first, owner = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[owner.reshape(-1)], first[order]


def _constant(values: np.ndarray, owner: np.ndarray, first: np.ndarray, name: str) -> Shaped[np.ndarray, " n"]:
    """One value per set; raise where rows of a set disagree."""
    chosen = values[first]
    same = values == chosen[owner]
    if values.dtype.kind == "f":
        same |= np.isnan(values) & np.isnan(chosen[owner])
    if not same.all():
        row = int((~same).argmax())
        raise ValueError(
            f"column {name!r} must be the same in all rows of a set: row {row} says {values[row]!s:.40} where row "
            f"{first[owner[row]]} of the same set says {chosen[owner[row]]!s:.40}. Is this the right column, and "
            "`set_id` the right set?"
        )
    return np.asarray(chosen)


def _rows_by_role(
    table: pa.Table, tokens: np.ndarray, owner: np.ndarray, n: int
) -> tuple[Shaped[np.ndarray, " r"], Float[np.ndarray, "n d"] | None]:
    roles = np.char.lower(np.array([str(v) for v in table.column("role").to_pylist()], dtype=np.str_))
    unknown = ~np.isin(roles, ["key", "query"])
    if unknown.any():
        row = int(unknown.argmax())
        raise ValueError(
            f"column 'role' must say 'key' or 'query': row {row} says {roles[row]!s:.40}. Rename the column if it is "
            "something else."
        )
    rows = np.flatnonzero(roles == "query")
    if len(rows) == 0:
        return roles == "key", None
    counts = np.bincount(owner[rows], minlength=n)
    if (counts != 1).any():
        i = int((counts != 1).argmax())
        raise ValueError(
            f"every set must have one row whose role is 'query', or leave out the column 'role': set number {i} has "
            f"{counts[i]}."
        )
    queries = np.empty((n, tokens.shape[1]))
    queries[owner[rows]] = tokens[rows]
    return roles == "key", queries


def _gather(
    tokens: np.ndarray, owner: np.ndarray, is_key: np.ndarray, n: int, names: tuple[str, ...], missing: str
) -> list[np.ndarray]:
    """Keys set by set, gaps refused or their tokens dropped."""
    if missing == "error":
        _refuse_gaps(np.where(is_key[:, None], tokens, 0.0), names, "row")
    else:
        is_key = is_key & ~np.isnan(tokens).any(axis=1)
    rows = np.flatnonzero(is_key)
    order = rows[np.argsort(owner[rows], kind="stable")]
    ends = np.cumsum(np.bincount(owner[order], minlength=n))[:-1]
    return fill_empty(np.split(tokens[order], ends), missing)


def fill_empty(sets: list[np.ndarray], missing: str) -> list[np.ndarray]:
    """A set without tokens gets one of zeros if its tokens were dropped; else SetBatch will name it."""
    if missing == "error":
        return sets
    return [s if len(s) else np.zeros((1, s.shape[1])) for s in sets]


def _refuse_gaps(values: np.ndarray, names: tuple[str, ...], kind: str) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        row, column = (int(k) for k in np.argwhere(~finite)[0])
        what = "missing" if np.isnan(values[row, column]) else "infinite"
        raise ValueError(
            f"tokens must be known: column {names[column]!r} is {what} in {kind} {row}, {int((~finite).sum())} such "
            "entries in all. Fill them in, or drop the tokens that have one with missing='drop' (--missing drop)."
        )
