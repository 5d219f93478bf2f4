"""Tables of sets: Parquet and Arrow with list columns, CSV with one row per token, npz."""

from __future__ import annotations

import errno
import math
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int, Shaped

from keyhole._checks import check_choice
from keyhole.data.sets import SetBatch, SetGroups
from keyhole.data.streams import read_arrow

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


@dataclass(frozen=True, eq=False)
class Dataset:
    """Sets, what is to be predicted of them, and names.

    Attributes
    ----------
    sets : SetBatch or SetGroups
        n samples.
    target : array (n,) or None
        Numbers, or labels.
    names : tuple of d strings
        Names of the coordinates of a token.
    description : str
        Where the sets come from and what was done to them.
    target_name : str
    split : array (n,) or None
        0 for training, 1 for testing, where the source says so.
    columns : tuple of (str, str)
        The options that read a table, resolved: pass them again to read another table in the same way.

    Examples
    --------
    >>> Dataset(SetBatch(np.zeros((2, 3, 1))), np.array(["a", "b"]), ("x",), "two sets of zeros")
    Dataset(2 sets: two sets of zeros)
    """

    sets: SetBatch | SetGroups
    target: Shaped[np.ndarray, " n"] | None
    names: tuple[str, ...] = ()
    description: str = ""
    target_name: str = ""
    split: Shaped[np.ndarray, " n"] | None = None
    columns: tuple[tuple[str, str], ...] = field(default=())

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, rows: Any) -> Dataset:
        """Some of the samples: a slice, integers, or a mask."""
        target = None if self.target is None else self.target[rows]
        split = None if self.split is None else self.split[rows]
        return Dataset(self.sets[rows], target, self.names, self.description, self.target_name, split, self.columns)

    def __repr__(self) -> str:
        return f"Dataset({len(self)} sets: {self.description})"

    @property
    def train(self) -> Dataset:
        """The training part; all of it where there is no split."""
        return self if self.split is None else self[np.flatnonzero(self.split == 0)]

    @property
    def test(self) -> Dataset:
        """The part for testing."""
        if self.split is None:
            raise ValueError("this data comes without a split of its own: split it yourself, by indexing.")
        return self[np.flatnonzero(self.split == 1)]


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
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise  # of the disk; an invalid argument is a place that a damaged header leads to
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
            UnicodeDecodeError,
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
        if info.compress_size > self.path.stat().st_size:  # as much would be allocated before a byte is read
            raise zipfile.BadZipFile("it is said to be larger than the file")
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


SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".csv", ".tsv", ".npz")


def read_table(
    path: Any,
    *,
    keys: str | Sequence[str] | None = None,
    query: str | Sequence[str] | None = None,
    target: str | None = None,
    set_id: str | None = None,
    missing: str = "error",
) -> Dataset:
    r"""Read sets from Parquet, Arrow, CSV or npz; the suffix of the file says which.

    One row per set: keys in one column of lists of tokens, or in one column of lists per coordinate. One row per
    token (the only form of CSV): a column for the set, columns for the coordinates. In npz: ``keys`` (n, N, d), or
    ``X`` (tokens, d) with ``ptr`` (n + 1), and ``y``.

    Parameters
    ----------
    path : str or Path
    keys : column name or names, optional
        By default the column ``keys``, or all columns (of lists, of numbers) that serve no other purpose. Names in
        one string are parted by commas.
    query : column name or names, optional
        By default the column ``query``; with one row per token, the rows whose column ``role`` says "query".
    target : column name, optional
        By default the first of target, label, class, y. With one row per token it is the same in all rows of a set.
    set_id : column name, optional
        With one row per token, which set a row belongs to; by default the first of set, set_id, bag, bag_id, id,
        group.
    missing : "error" or "drop"
        What to do about a token with a gap (NaN or nothing): refuse the table, or drop the token; a set without any
        token left gets one of zeros. Gaps in queries and targets are always refused.

    Returns
    -------
    Dataset

    Examples
    --------
    >>> import pathlib, tempfile
    >>> rows = "set,x,y,target\na,1,2,yes\na,3,4,yes\nb,5,6,no\n"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "sets.csv")
    ...     _ = file.write_text(rows)
    ...     data = read_table(file, target="target")
    >>> data.sets
    SetBatch(2 sets, 1–2 keys each (3 in all), dim 2, no query, float64)
    >>> data.names, data.target.tolist()
    (('x', 'y'), ['yes', 'no'])
    """
    path = Path(path)
    check_choice(missing, "missing", ("error", "drop"))
    choice = Choice(_names(keys, "keys"), _names(query, "query"), target, set_id, missing)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"a table is read by its suffix, one of {', '.join(SUFFIXES)}: got {path.name!r}. Rename it, or convert it."
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path.name!r} is not there: no such file.")
    if suffix == ".npz":
        return read_npz(path, choice)
    table = read_arrow(path, suffix)
    try:
        return (read_lists if has_list_keys(table, choice) else read_long)(table, choice, path.name)
    except pa.ArrowException as error:
        raise ValueError(f"the columns of {path.name!r} must read as sets: {str(error)[:300]}.") from None


def _names(given: str | Sequence[str] | None, option: str) -> tuple[str, ...] | None:
    if given is None:
        return None
    names = tuple(part.strip() for part in given.split(",")) if isinstance(given, str) else tuple(given)
    if not names or not all(names) or len(set(names)) < len(names):
        raise ValueError(f"`{option}` must name columns, each once: got {given!r}.")
    return names
