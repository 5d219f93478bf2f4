"""One reader of sets, for Parquet, Arrow, CSV and npz: whole by `read_table`, in parts by `ParquetSets`."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jaxtyping import Bool, Float, Int, Shaped
from pyarrow import csv

from keyhole._array import MEMORY_BUDGET, thread_count
from keyhole._checks import check_choice, check_count
from keyhole.data.batches import Batch
from keyhole.data.npz import npz_table
from keyhole.data.sets import SetBatch, SetGroups

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".csv", ".tsv", ".npz")
SET_NAMES = ("set", "set_id", "bag", "bag_id", "id", "group")
TARGET_NAMES = ("target", "label", "class", "y")
"""Usual names, "y" last: it may be a coordinate."""
BATCH_BYTES = 2**25
"""Bytes of a batch when nobody says how many rows it has."""
HEAD_ROWS = 1000
"""Rows that are looked at to say what a column is."""
AGAIN = "fetch or write it again"


class SchemaError(ValueError):
    """A column that cannot be read as what it was asked for."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever Arrow says of a file that does not read into a ValueError that names the file.

    A file that is not there, or that we may not read, stays an OSError.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    # an OverflowError is a size in a damaged header that no integer of ours holds
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
        raise ValueError(
            f"{path.name!r} must be a table in the format of its suffix: it does not read "
            f"({str(error).strip()[:300]}). It is damaged or of another format; {AGAIN}."
        ) from None


def validated(data: Any, path: Path, *, full: bool = True) -> Any:
    """Return a table or record batch once every offset, length and text in it has been looked at.

    Offsets that lead nowhere are memory that is not ours, and Arrow follows them unless it is asked to look first.
    Numbers themselves are not touched, so the cost is that of the offsets; none of them is read if not ``full``, which
    is enough to count rows.
    """
    try:
        data.validate(full=full)
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(
            f"a table must hold together: {path.name!r} does not ({str(error).strip()[:200]}). It is damaged; {AGAIN}."
        ) from None
    return data


def check_file_name(path: Path) -> None:
    """Raise unless the name of a file is text: Arrow opens no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"names of files must be text in UTF-8: got {path.name!r}. Rename it.") from None


class Place(NamedTuple):
    """Where some rows are, for messages: "row 9 of row group 2 of sets.parquet"."""

    words: str = ""
    first: int = 0

    def row(self, i: Any) -> str:
        """Row i in words."""
        return f"row {self.first + int(i)}{self.inside.replace(' in ', ' of ', 1)}"

    @property
    def inside(self) -> str:
        """The place in words, after a space."""
        return f" in {self.words}" if self.words else ""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Sets, what is to be predicted of them, and names.

    Attributes
    ----------
    sets : SetBatch or SetGroups
        n samples.
    target : array (n,) or (n, t), or None
        Numbers, or labels.
    names : tuple of d strings
        Names of the coordinates of a token.
    description : str
        Where the sets come from and what was done to them.
    target_name : str
    split : array (n,) or None
        0 for training, 1 for testing, where the source says so.
    columns : tuple of (str, value)
        The options that read a table, resolved: pass them again to read another table in the same way.
    ids : array (n,) or None
        What a table with one row per token calls its sets.
    weights : array (n,) or None
        Weights of samples, where a column was named for them.
    left_out : tuple of str
        Columns that were not taken for coordinates, each with the reason in words.

    Examples
    --------
    >>> Dataset(SetBatch(np.zeros((2, 3, 1))), np.array(["a", "b"]), ("x",), "two sets of zeros")
    Dataset(2 sets: two sets of zeros)
    """

    sets: SetBatch | SetGroups
    target: Shaped[np.ndarray, " n *outputs"] | None
    names: tuple[str, ...] = ()
    description: str = ""
    target_name: str = ""
    split: Shaped[np.ndarray, " n"] | None = None
    columns: tuple[tuple[str, Any], ...] = ()
    ids: Shaped[np.ndarray, " n"] | None = None
    weights: Float[np.ndarray, " n"] | None = None
    left_out: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, rows: Any) -> Dataset:
        """Some of the samples: a slice, integers, or a mask."""
        each = {name: getattr(self, name) for name in ("target", "split", "ids", "weights")}
        some = {name: values[rows] for name, values in each.items() if values is not None}
        return replace(self, sets=self.sets[rows], **some)

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


# ---------------------------------------------------------------- columns as arrays


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """Whether a column holds numbers."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in kinds)


def numbers(column: Any, name: str, place: Place, *, lists: str = "") -> Float[np.ndarray, " r"]:
    """A column as float32 or float64, NaN where an entry is missing; it shares memory where that is possible."""
    kind = column.type
    if not is_number(kind):
        raise SchemaError(
            f"column {name!r} must hold {lists}numbers: it holds {lists}{kind}{place.inside}. Leave it out, or encode "
            "it as numbers first."
        )
    if pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        column = column.cast(pa.float64() if pa.types.is_decimal(kind) else pa.int8())
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype not in (np.float32, np.float64):
        return np.asarray(array, dtype=np.float64)
    return np.require(array, requirements="A")  # a buffer of a file may begin at any byte


def unlisted(column: Any) -> tuple[Any, Int[np.ndarray, " o"]]:
    """The values of a column of lists end to end, and where each row begins; a row that is null has none."""
    if pa.types.is_fixed_size_list(column.type):
        known = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else np.ones(len(column), bool)
        return column.flatten(), np.concatenate([[0], np.cumsum(known)]) * column.type.list_size
    if column.null_count:
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        return column.flatten(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets - offsets[0]


def same_lengths(column: Any) -> tuple[Any, int, tuple[int, int] | None]:
    """The values of lists end to end, their length, and the first list of another length or of none with it."""
    if pa.types.is_fixed_size_list(column.type) and not column.null_count and column.type.list_size:
        return column.flatten(), int(column.type.list_size), None
    flat, offsets = unlisted(column)
    lengths = np.diff(offsets)
    length = int(lengths[0]) if len(lengths) else 0
    odd = (lengths != length) | (lengths == 0)
    return flat, length, (int(odd.argmax()), int(lengths[odd.argmax()])) if odd.any() else None


def matrix(column: Any, name: str, place: Place, what: str) -> Float[np.ndarray, "n d"]:
    """Lists of equal length, one for each row, as the rows of a matrix."""
    if column.null_count:
        row = int(column.is_valid().to_numpy(zero_copy_only=False).argmin())
        raise SchemaError(f"column {name!r} must have a list in every row: {place.row(row)} is empty. Drop the row.")
    flat, width, odd = same_lengths(column)
    if odd is not None:
        raise SchemaError(
            f"all {what} of column {name!r} must have as many coordinates, at least one: that of {place.row(0)} has "
            f"{width} and that of {place.row(odd[0])} has {odd[1]}. Pad or cut them."
        )
    return numbers(flat, name, place, lists="lists of ").reshape(len(column), -1)


def labels(column: Any, name: str, place: Place) -> np.ndarray:
    """A target: integers, numbers, booleans or text without gaps, or lists of numbers, one for each output."""
    if is_list(column.type):
        found = matrix(column, name, place, "targets")
        _refuse_gaps(found, (name,), place, "target")
        return found
    gaps = _gaps(column)
    if len(gaps):
        raise SchemaError(
            f"target column {name!r} must be known in every row: {place.row(gaps[0])} is empty ({len(gaps)} in all). "
            "Drop such rows first."
        )
    return _values(column, name, place, "target column")


def set_ids(column: Any, name: str, place: Place) -> Shaped[np.ndarray, " r"]:
    """Which set each row belongs to: every row says so."""
    gaps = _gaps(column)
    if len(gaps):
        some = ", ".join(str(place.first + int(i)) for i in gaps[:5])
        rows = f"rows {some}{' …' if len(gaps) > 5 else ''} are" if len(gaps) > 1 else f"{place.row(gaps[0])} is"
        raise SchemaError(
            f"column {name!r} must say of every row which set it belongs to: {rows} empty ({len(gaps)} in all). Fill "
            "in the sets, or drop such rows."
        )
    return _values(column, name, place, "set column")


def _gaps(column: Any) -> Int[np.ndarray, " g"]:
    """Rows that say nothing. In CSV a gap among texts is an empty text."""
    empty = column.is_null()
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        blank = pc.equal(pc.utf8_trim_whitespace(column.cast(kind)), "")
        empty = pc.or_(empty, pc.fill_null(blank, False))
    return np.flatnonzero(empty.to_numpy(zero_copy_only=False))


def _values(column: Any, name: str, place: Place, what: str) -> Shaped[np.ndarray, " r"]:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(column.to_pylist(), dtype=np.str_)
    if not is_number(kind):
        raise SchemaError(
            f"{what} {name!r} must hold numbers or text: it holds {kind}{place.inside}. Convert it first."
        )
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    values = numbers(column, name, place)
    if not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        raise SchemaError(f"{what} {name!r} must be finite: {place.row(row)} is {values[row]}. Drop such rows first.")
    return values


def _refuse_gaps(values: np.ndarray, names: Sequence[str], place: Place, what: str, owner: Any = None) -> None:
    """Raise if numbers are missing or infinite; ``owner`` is the row of each if that is not its place."""
    finite = np.isfinite(values)
    if finite.all():
        return
    i, column = (int(k) for k in np.argwhere(~finite)[0])
    missing = np.isnan(values[i, column])
    drop = ", or drop the tokens that have one with missing='drop' (--missing drop)" if what == "token" else ""
    raise SchemaError(
        f"{'tokens' if what == 'token' else 'queries' if what == 'query' else 'targets'} must be known: "
        f"{names[min(column, len(names) - 1)]!r} is {'missing' if missing else 'infinite'} in "
        f"{place.row(i if owner is None else owner[i])}, {int((~finite).sum())} such entries in all. Fill them in"
        f"{drop if missing else ''}."
    )


# ---------------------------------------------------------------- which column is what

_WORDS = {
    "an id": {"id", "ids", "idx", "index", "uid", "uuid", "guid", "row", "rowid", "key", "nr", "number", "unnamed"},
    "a time": {"time", "timestamp", "date", "datetime", "year", "month", "day", "epoch", "ts"},
    "a split": {"split", "fold", "folds", "train", "test", "partition", "subset", "holdout"},
}


def looks_like(name: str, values: Float[np.ndarray, " r"]) -> str:
    """What a column of numbers seems to be other than a coordinate, with the evidence in words; "" for nothing.

    Both its name and its first numbers have to say so: an id is whole numbers; a time is a date or rises through the
    whole table; a split is a few whole numbers. Numbers that count the rows are an id under any name.

    Examples
    --------
    >>> looks_like("customer_id", np.array([7.0, 9.0, 7.0]))
    'an id, by its name and whole numbers'
    >>> looks_like("weight", np.array([7.0, 9.0, 7.0]))
    ''
    """
    values = values[np.isfinite(values)]
    if not len(values):
        return ""
    whole = bool((values == np.rint(values)).all())
    if whole and len(values) >= 20 and (np.diff(values) == 1).all():
        return "an id, because it counts the rows"
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name) or ["index"]  # pandas writes its index without a name
    kind = next((k for k, words in _WORDS.items() if words & {part.lower() for part in parts}), "")
    if kind == "an id" and whole:
        return "an id, by its name and whole numbers"
    low, high = values.min(), values.max()
    date = whole and (low >= 1e8 or (low >= 19000101 and high <= 21001231) or (low >= 1900 and high <= 2100))
    if kind == "a time" and (date or (len(values) >= 20 and (np.diff(values) >= 0).all() and low < high)):
        return f"a time, by its name and because it {'holds dates' if date else 'rises through the whole table'}"
    if kind == "a split" and whole and len(np.unique(values)) <= 10:
        return "a split, by its name and few values"
    return ""


def check_names(given: str | Sequence[str] | None, option: str) -> None:
    """Raise unless names are given each once, in a list or in one text with commas; or not at all."""
    if given is None:
        return
    names = [part.strip() for part in given.split(",")] if isinstance(given, str) else list(given)
    if not names or not all(isinstance(n, str) and n for n in names) or len(set(names)) < len(names):
        raise ValueError(f"`{option}` must name columns, each once: got {given!r}.")


def _names(given: str | Sequence[str] | None, schema: pa.Schema) -> tuple[str, ...] | None:
    if not isinstance(given, str):
        return None if given is None else tuple(given)
    return (given,) if given in schema.names else tuple(part.strip() for part in given.split(","))


def check_columns(schema: pa.Schema, names: Sequence[str], option: str | None, source: str) -> None:
    """Raise if a column is not there, or there twice."""
    for name in names:
        count = schema.names.count(name)
        if count != 1:
            problem = f"is not in the table {source}" if count == 0 else f"is there {count} times in {source}"
            rule = f"`{option}` must name columns of the table" if option else "every column that is read must be there"
            raise SchemaError(
                f"{rule}: column {name!r} {problem}. It has "
                f"{', '.join(repr(c) for c in schema.names[:30])}."
                f"{' Rename all but one of them.' if count else ''}"
            )


@dataclass(frozen=True)
class Layout:
    """How the columns of a table become sets: every column that is read, by its use.

    Attributes
    ----------
    keys : tuple of str
        One column of lists of tokens, one of lists per coordinate, or one of numbers per coordinate.
    query, target : tuples of str
        None of them if empty.
    weight : str or None
    set_id : str or None
        With one row per token, the column that says which set a row belongs to; None with one row per set.
    role : str or None
        With one row per token, the column that says which rows are queries.
    dim : int or None
        Coordinates of a key, where lists are flat or may all be empty.
    missing : "error" or "drop"
    left_out : tuple of str
    """

    keys: tuple[str, ...]
    query: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    weight: str | None = None
    set_id: str | None = None
    role: str | None = None
    dim: int | None = None
    missing: str = "error"
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        schema: pa.Schema,
        head: Callable[[list[str]], Any],
        source: str,
        *,
        keys: str | Sequence[str] | None = None,
        query: str | Sequence[str] | None = None,
        target: str | Sequence[str] | None = None,
        weight: str | None = None,
        set_id: str | None = None,
        dim: int | None = None,
        missing: str = "error",
    ) -> Layout:
        """Settle what was not said by names and types, and by the first rows.

        ``head`` gives the first rows of some columns, None if there are no rows; ``source`` is the name of the table,
        for messages; all else is as in `ParquetSets`.
        """
        named, asked = _names(keys, schema), _names(query, schema) or ()
        check_columns(schema, named or (), "keys", source)
        check_columns(schema, [set_id] if set_id else [], "set_id", source)
        check_columns(schema, [weight] if weight else [], "weight", source)
        usual = [n for n in TARGET_NAMES if n in schema.names and n not in {*(named or ()), *asked}]
        found = [n for n in usual if not _is_ragged(schema, n)][:1]
        targets = tuple(found) if target is None else (target,) if isinstance(target, str) else tuple(target)
        check_columns(schema, targets, "target", source)
        lists = [f.name for f in schema if is_list(f.type)]
        settle = cls._by_set if set_id is None and (named[0] in lists if named else lists) else cls._by_token
        used = {*asked, *(targets or found), weight}
        made = settle(schema, head, source, named, asked, used, set_id)
        return replace(made, target=targets, weight=weight, missing=missing, dim=dim)._with_width(schema, head, source)

    @classmethod
    def _by_token(
        cls, schema: pa.Schema, head: Any, source: str, keys: Any, query: Any, used: set[Any], set_id: str | None
    ) -> Layout:
        set_id = set_id or next((n for n in SET_NAMES if n in schema.names), None)
        if set_id is None:
            what = (
                f"column {keys[0]!r} must hold sets of keys: found type {schema.field(keys[0]).type}. " if keys else ""
            )
            raise SchemaError(
                f"{what}a table with one row per token needs a column that says which set a row belongs to: none of "
                f"{', '.join(SET_NAMES)} is among {', '.join(schema.names[:30])} of {source}. Name it with `set_id` "
                "(--set)."
            )
        role = "role" if "role" in schema.names and not query else None
        check_columns(schema, [set_id], "set_id", source)
        check_columns(schema, [role] if role else [], "role", source)
        left_out: tuple[str, ...] = ()
        if keys is None:
            others = [f for f in schema if f.name not in {*used, set_id, role}]
            left_out = tuple(f"{f.name!r} holds {f.type}" for f in others if not is_number(f.type))
            keys, more = _coordinates([f.name for f in others if is_number(f.type)], schema, head, source)
            left_out += more
        if not keys:
            why = f" ({'; '.join(left_out[:10])})" if left_out else ""
            raise SchemaError(
                f"a table must have a column of numbers for the keys: none is left among "
                f"{', '.join(schema.names[:30])} of {source}{why}. Name them with `keys` (--keys)."
            )
        check_columns(schema, query, "query", source)
        if query and len(query) != len(keys):
            raise SchemaError(
                f"a query has the coordinates of a key: got {len(query)} query columns ({', '.join(query[:10])}) for "
                f"{len(keys)} key columns ({', '.join(keys[:10])}). Name as many, in the same order; add a column of "
                "zeros where one of them has none."
            )
        return cls(keys, query, set_id=set_id, role=role, left_out=left_out)

    @classmethod
    def _by_set(
        cls, schema: pa.Schema, head: Any, source: str, keys: Any, query: Any, used: set[Any], _: str | None
    ) -> Layout:
        if not query and "query" in schema.names and "query" not in (keys or ()):
            query = ("query",)
        check_columns(schema, query, "query", source)
        left_out: tuple[str, ...] = ()
        if keys is None and any(f.name == "keys" and is_list(f.type) for f in schema):
            keys = ("keys",)
            check_columns(schema, keys, "keys", source)
        elif keys is None:
            found = [f.name for f in schema if is_list(f.type) and f.name not in {*used, *query}]
            nested = [f for f in schema if f.name in found and is_list(f.type.value_type)]
            if (nested and len(found) > 1) or not found:
                raise SchemaError(
                    "keys must be one column of lists of tokens, or one column of lists of numbers per coordinate: "
                    f"found {', '.join(repr(n) for n in found) or 'none'} in {source}. Name them with `keys` (--keys)."
                )
            keys, left_out = (tuple(found), ()) if nested else _coordinates(found, schema, head, source)
        for name in keys:
            kind = schema.field(name).type
            if not is_list(kind):
                raise SchemaError(
                    f"all key columns must hold lists if one does: {name!r} holds {kind}. Repeat what belongs to the "
                    "whole set as a list, or make it the query."
                )
        return cls(keys, query, left_out=left_out)

    def _with_width(self, schema: pa.Schema, head: Any, source: str) -> Layout:
        """The same with the coordinates of a token, where lists do not say and all of a batch may be empty."""
        name, kind = self.keys[0], schema.field(self.keys[0]).type
        if self.dim is not None or self.set_id is not None or len(self.keys) > 1:
            return self
        if not is_list(kind.value_type):
            if name == "keys":  # tokens, by its name
                raise SchemaError(
                    f"column 'keys' must hold sets of keys: found type {kind} in {source}. It is flat: say how many "
                    "coordinates a key has with `dim` (--dim), 1 if each number is a key."
                )
            return self
        if self.missing == "error" or pa.types.is_fixed_size_list(kind.value_type) or (rows := head([name])) is None:
            return self
        widths = np.diff(unlisted(unlisted(rows.column(name))[0].drop_null())[1])
        return replace(self, dim=int(widths[0]) or None) if len(widths) else self

    def columns(self, more: Sequence[str] = ()) -> list[str]:
        """Names of the columns it reads, and of some more."""
        single = filter(None, (self.weight, self.set_id, self.role))
        return list(dict.fromkeys([*self.keys, *self.query, *self.target, *single, *more]))

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """The options of `read_table` that give this layout."""
        target: Any = self.target[0] if len(self.target) == 1 else self.target
        every = (("set_id", self.set_id), ("keys", self.keys), ("query", self.query), ("target", target),
                 ("dim", self.dim), ("missing", self.missing if self.missing != "error" else None))  # fmt: skip
        return tuple((option, value) for option, value in every if value)

    def read(self, table: Any, place: Place, copied: Sequence[str] = ()) -> tuple[Dataset, dict[str, Any]]:
        """The samples of a table or record batch, and some columns as they are, one entry per sample."""
        try:
            if isinstance(table, pa.Table):  # one piece for each column
                table = table.combine_chunks()
                table = pa.record_batch([_one_piece(c) for c in table.columns], names=table.column_names)
            return self._read_rows(table, place, copied) if self.set_id else self._read_lists(table, place, copied)
        except pa.ArrowException as error:
            raise SchemaError(f"the columns{place.inside} must read as sets: {str(error)[:300]}.") from None

    def _dataset(self, sets: SetBatch, y: Any, names: tuple[str, ...], **more: Any) -> Dataset:
        return Dataset(sets, y, names, "", ", ".join(self.target), columns=self.options, left_out=self.left_out, **more)

    def _sets(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        query: Any,
        names: tuple[str, ...],
        place: Place,
        rows: Callable[[], np.ndarray],
    ) -> SetBatch:
        """Sets of tokens; gaps are refused, or the tokens that have one dropped. ``rows`` says where each token was."""
        if not np.isfinite(tokens).all():
            known = ~np.isnan(tokens).any(axis=1) if self.missing == "drop" else np.ones(len(tokens), dtype=bool)
            _refuse_gaps(tokens[known], names, place, "token", rows()[known])
            tokens, offsets = tokens[known], np.concatenate([[0], np.cumsum(known)])[offsets]
        empty = np.flatnonzero(np.diff(offsets) == 0)
        if len(empty) and self.missing == "drop":
            tokens = np.insert(tokens, offsets[empty], 0.0, axis=0)
            offsets = np.concatenate([[0], np.cumsum(np.maximum(np.diff(offsets), 1))])
        elif len(empty):
            what = f"set {empty[0]} has no keys"
            what += "" if self.set_id else f", {place.row(empty[0])} has none in column {self.keys[0]!r}"
            raise SchemaError(f"every set must have at least one key: {what}. Drop such sets.")
        if query is not None:
            if query.shape[1] != tokens.shape[1]:
                raise SchemaError(
                    f"a query has the coordinates of a key: {', '.join(self.query[:10])} has {query.shape[1]} and keys "
                    f"have {tokens.shape[1]}{place.inside}. Pad the shorter with zeros."
                )
            both = np.result_type(tokens, query)
            tokens, query = tokens.astype(both, copy=False), query.astype(both, copy=False)
        return SetBatch._from_flat(tokens, offsets.astype(np.int64, copy=False), query)

    # ------------------------------------------------------------ one row per set

    def _read_lists(self, table: Any, place: Place, copied: Sequence[str]) -> tuple[Dataset, dict[str, Any]]:
        tokens, offsets, names = self._list_tokens(table, place)
        if self.dim is not None and tokens.shape[1] != self.dim:
            raise SchemaError(
                f"`dim` is {self.dim}, and the keys of {', '.join(self.keys[:5])} have {tokens.shape[1]} coordinates"
                f"{place.inside}."
            )
        query = self._list_query(table, place)
        lengths = np.diff(offsets)
        sets = self._sets(tokens, offsets, query, names, place, lambda: np.repeat(np.arange(len(lengths)), lengths))
        data = self._dataset(sets, self.targets(table, place), names, weights=self._weights(table, place))
        return data, {name: table.column(name) for name in copied}

    def _list_tokens(self, table: Any, place: Place) -> tuple[np.ndarray, Int[np.ndarray, " o"], tuple[str, ...]]:
        """Tokens end to end, where each set begins, and names of coordinates."""
        known = self._known_rows(table, place)
        columns = [table.column(name) for name in self.keys]
        if not known.all():
            columns = [pc.if_else(pa.array(known), column, None) for column in columns]
        values, offsets = unlisted(columns[0])
        first = self.keys[0]
        if len(columns) == 1 and is_list(values.type):
            return self._nested_tokens(values, offsets, place)
        if len(columns) == 1 and self.dim is not None:
            odd = np.diff(offsets) % self.dim != 0
            if odd.any():
                i = int(odd.argmax())
                raise SchemaError(
                    f"lists of column {first!r} must be whole keys of `dim` = {self.dim} coordinates: {place.row(i)} "
                    f"has {np.diff(offsets)[i]} numbers."
                )
            flat = numbers(values, first, place, lists="lists of ")
            return flat.reshape(-1, self.dim), offsets // self.dim, _positions(first, self.dim)
        parts = [numbers(values, first, place, lists="lists of ")]
        for name, column in zip(self.keys[1:], columns[1:], strict=True):
            values, others = unlisted(column)
            if not np.array_equal(offsets, others):
                row = int((np.diff(offsets) != np.diff(others)).argmax())
                raise SchemaError(
                    f"the coordinates of a set must have equally many entries: in {place.row(row)} column {first!r} "
                    f"has {np.diff(offsets)[row]} and {name!r} has {np.diff(others)[row]}. Pad or cut them."
                )
            parts.append(numbers(values, name, place, lists="lists of "))
        return np.stack(parts, axis=1), offsets, self.keys

    def _nested_tokens(
        self, tokens: Any, offsets: np.ndarray, place: Place
    ) -> tuple[np.ndarray, Int[np.ndarray, " o"], tuple[str, ...]]:
        """Tokens out of lists of lists; those that are null are refused or dropped."""
        name = self.keys[0]
        if is_list(tokens.type.value_type):
            raise SchemaError(
                f"column {name!r} must hold sets of keys: found type list<{tokens.type}>{place.inside}. There is one "
                "level of lists too many."
            )
        if tokens.null_count:
            known = tokens.is_valid().to_numpy(zero_copy_only=False)
            if self.missing == "error":
                row = int(np.searchsorted(offsets, known.argmin(), side="right")) - 1
                raise SchemaError(
                    f"column {name!r} must hold lists of tokens: {place.row(row)} has one that is empty. Drop it, or "
                    "all such tokens with missing='drop' (--missing drop)."
                )
            tokens = tokens.filter(pa.array(known))
            offsets = np.concatenate([[0], np.cumsum(known)])[offsets]
        flat, width, odd = same_lengths(tokens)
        width = width or self.dim or 0  # where all lists are empty
        if odd is not None:
            row = int(np.searchsorted(offsets, odd[0], side="right")) - 1
            raise SchemaError(
                f"all tokens of column {name!r} must have as many coordinates, at least one: the first has {width}, "
                f"and token {odd[0] - offsets[row]} of {place.row(row)} has {odd[1]}. Pad or cut them."
            )
        if not width:
            raise SchemaError(
                f"column {name!r} must hold at least one token: all lists{place.inside} are empty. Say how many "
                "coordinates a token has with `dim` (--dim)."
            )
        return numbers(flat, name, place, lists="lists of ").reshape(-1, width), offsets, _positions(name, width)

    def _known_rows(self, table: Any, place: Place) -> Bool[np.ndarray, " n"]:
        """Rows in which all key columns have a list: the others are refused, or all their tokens dropped."""
        known = np.ones(table.num_rows, dtype=bool)
        for name in self.keys:
            if table.column(name).null_count:
                known &= table.column(name).is_valid().to_numpy(zero_copy_only=False)
            if self.missing == "error" and not known.all():
                raise SchemaError(
                    f"column {name!r} must have a list in every row: {place.row(known.argmin())} is empty. Drop the "
                    "row, or have its tokens dropped with missing='drop' (--missing drop)."
                )
        return known

    def _list_query(self, table: Any, place: Place) -> Float[np.ndarray, "n d"] | None:
        if not self.query:
            return None
        first = table.column(self.query[0])
        if len(self.query) == 1 and is_list(first.type):
            found = matrix(first, self.query[0], place, "queries")
        else:
            found = np.stack([numbers(table.column(name), name, place) for name in self.query], axis=1)
        _refuse_gaps(found, self.query, place, "query")
        return found

    def targets(self, table: Any, place: Place) -> np.ndarray | None:
        """The target of each row; one column of several outputs for several columns."""
        if len(self.target) < 2:
            return labels(table.column(self.target[0]), self.target[0], place) if self.target else None
        found = np.stack([numbers(table.column(name), name, place) for name in self.target], axis=1)
        _refuse_gaps(found, self.target, place, "target")
        return found

    def _weights(self, table: Any, place: Place) -> Float[np.ndarray, " n"] | None:
        return None if self.weight is None else numbers(table.column(self.weight), self.weight, place)

    # ------------------------------------------------------------ one row per token

    def _read_rows(self, table: Any, place: Place, copied: Sequence[str]) -> tuple[Dataset, dict[str, Any]]:
        """Sets out of rows; the order of sets is that in which they first appear."""
        assert self.set_id is not None
        ids = set_ids(table.column(self.set_id), self.set_id, place)
        owner, first = _owners(ids)
        tokens = np.stack([numbers(table.column(name), name, place) for name in self.keys], axis=1)
        if self.dim is not None and self.dim != len(self.keys):
            raise SchemaError(f"`dim` is {self.dim}, and there are {len(self.keys)} key columns. Leave it out.")

        def constant(values: np.ndarray, name: str) -> np.ndarray:
            return _constant(values, owner, first, name, place)

        is_key, query = np.ones(len(tokens), dtype=bool), None
        if self.role is not None:
            is_key, query = _rows_by_role(table.column(self.role), tokens, owner, len(first), place)
            if query is not None:
                _refuse_gaps(query, self.keys, place, "query", first)
        elif self.query:
            query = np.stack([constant(numbers(table.column(n), n, place), n) for n in self.query], axis=1)
            _refuse_gaps(query, self.query, place, "query", first)
        every = self.targets(table, place)
        y = None if every is None else constant(every, ", ".join(self.target))
        weights = self._weights(table, place)
        rows = np.flatnonzero(is_key)
        order = rows[np.argsort(owner[rows], kind="stable")]
        ends = np.cumsum(np.bincount(owner[order], minlength=len(first)))
        offsets = np.concatenate([[0], ends])
        sets = self._sets(tokens[order], offsets, query, self.keys, place, lambda: order)
        if weights is not None:
            weights = constant(weights, str(self.weight))
        data = self._dataset(sets, y, self.keys, ids=ids[first], weights=weights)
        more = {}
        for name in copied:
            column = table.column(name)
            codes = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
            _constant(np.asarray(codes.indices.fill_null(-1)), owner, first, name, place, column)
            more[name] = column.take(pa.array(first))
        return data, more


def _one_piece(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _positions(name: str, dim: int) -> tuple[str, ...]:
    return tuple(f"{name}[{j}]" for j in range(dim))


def _is_ragged(schema: pa.Schema, name: str) -> bool:
    """Whether a column holds lists of any lengths: coordinates rather than a target, which may be a list of one."""
    kinds = [f.type for f in schema if f.name == name]
    return any(is_list(kind) and not pa.types.is_fixed_size_list(kind) for kind in kinds)


def _coordinates(
    found: list[str], schema: pa.Schema, head: Any, source: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those columns that are coordinates, and words for those that look like something else."""
    check_columns(schema, found, "keys", source)
    rows = head(found) if found else None
    if rows is None:
        return tuple(found), ()
    reasons = {}
    for name in found:
        column = rows.column(name)
        column = column.flatten() if is_list(column.type) else column
        if is_number(column.type):
            reasons[name] = looks_like(name, numbers(column, name, Place(source)))
    odd = {name: why for name, why in reasons.items() if why}
    return tuple(n for n in found if n not in odd), tuple(f"{name!r} looks like {why}" for name, why in odd.items())


def _owners(ids: Shaped[np.ndarray, " r"]) -> tuple[Int[np.ndarray, " r"], Int[np.ndarray, " n"]]:
    """The set of each row, numbered by first appearance, and that first row."""
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))  # of runs of rows of one set
    _, first, owner = np.unique(ids[starts], return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return np.repeat(rank[owner.reshape(-1)], np.diff([*starts, len(ids)])), starts[first[order]]


def _constant(
    values: np.ndarray, owner: np.ndarray, first: np.ndarray, name: str, place: Place, shown: Any = None
) -> np.ndarray:
    """One value per set; raise where rows of a set disagree."""
    chosen = values[first]
    same = values == chosen[owner]
    if values.dtype.kind == "f":
        same |= np.isnan(values) & np.isnan(chosen[owner])
    same = same if same.ndim == 1 else same.all(axis=1)
    if not same.all():
        row = int((~same).argmax())
        one, other = (values if shown is None else shown)[row], (values if shown is None else shown)[first[owner[row]]]
        raise SchemaError(
            f"column {name!r} must be the same in all rows of a set: {place.row(row)} says {one!s:.40} where "
            f"{place.row(first[owner[row]])}, of the same set, says {other!s:.40}. Is this the right column, and "
            "`set_id` the right set?"
        )
    return np.asarray(chosen)


def _rows_by_role(
    column: Any, tokens: np.ndarray, owner: np.ndarray, n: int, place: Place
) -> tuple[Bool[np.ndarray, " r"], Float[np.ndarray, "n d"] | None]:
    """Which rows are keys, and the query of each set if there are any."""
    roles = np.char.lower(np.array([str(v) for v in column.to_pylist()], dtype=np.str_))
    unknown = ~np.isin(roles, ["key", "query"])
    if unknown.any():
        row = int(unknown.argmax())
        raise SchemaError(
            f"column 'role' must say 'key' or 'query': {place.row(row)} says {roles[row]!s:.40}. Rename the column if "
            "it is something else."
        )
    rows = np.flatnonzero(roles == "query")
    if len(rows) == 0:
        return roles == "key", None
    counts = np.bincount(owner[rows], minlength=n)
    if (counts != 1).any():
        i = int((counts != 1).argmax())
        raise SchemaError(
            f"every set must have one row whose role is 'query', or leave out the column 'role': set number {i}"
            f"{place.inside} has {counts[i]}."
        )
    queries = np.empty((n, tokens.shape[1]), tokens.dtype)
    queries[owner[rows]] = tokens[rows]
    return roles == "key", queries


# ---------------------------------------------------------------- files in parts


class _ParquetFile:
    """Row groups of a Parquet file. The footer is read once; readers are made anew: threads may not share one."""

    split = None

    def __init__(self, path: Path) -> None:
        with reading(path), pq.ParquetFile(path) as file:
            self.metadata = file.metadata
            self.schema = file.schema_arrow
            counts = [self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)]
            self.schema.names  # noqa: B018 - text, or an error
        self.path = path
        self.n_groups = len(counts)
        if min(counts, default=0) < 0 or sum(counts) != self.metadata.num_rows:
            raise self._rows_lost(path.name, self.metadata.num_rows, sum(counts))

    def where(self, group: int) -> str:
        return f"row group {group} of {self.path.name}"

    def rows(self, group: int) -> int:
        return int(self.metadata.row_group(group).num_rows)

    def _rows_of_a_batch(self, group: int, columns: list[str]) -> int:
        """Rows that take `BATCH_BYTES` in memory: a value repeated often takes next to nothing in the file."""
        info = self.metadata.row_group(group)
        size = 0
        for column in map(info.column, range(info.num_columns)):
            if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in columns):
                size += max(column.total_uncompressed_size, 8 * column.num_values)
        return int(BATCH_BYTES * info.num_rows // max(1, size))

    def read(self, group: int, columns: list[str], batch_size: int | None) -> Iterator[tuple[Any, int]]:
        """Record batches of one row group, each with its first row."""
        expected = self.rows(group)
        size = self._rows_of_a_batch(group, columns) if batch_size is None else batch_size
        seen = 0
        with ExitStack() as stack:
            with reading(self.path):
                file = stack.enter_context(pq.ParquetFile(self.path, memory_map=True, metadata=self.metadata))
                # without threads of its own: the arithmetic has them
                size = min(max(1, size), max(1, expected))
                batches = file.iter_batches(size, row_groups=[group], columns=columns, use_threads=False)
            while True:
                with reading(self.path):
                    table = next(batches, None)
                if table is None:
                    break
                if table.num_rows:
                    yield validated(table, self.path), seen
                seen += table.num_rows
        if seen != expected:
            raise self._rows_lost(self.where(group), expected, seen)

    def _rows_lost(self, where: str, said: int, found: int) -> ValueError:
        return ValueError(
            f"a table must hold together: {where} says that it has {said} rows, and {found} are there. "
            f"{self.path.name!r} is damaged; {AGAIN}."
        )


class _ArrowFile:
    """Record batches: of an Arrow file or stream, memory-mapped, or of a table that was read whole."""

    def __init__(self, path: Path, schema: pa.Schema, groups: Any, n_groups: int, name: str, split: Any = None) -> None:
        self.path, self.schema, self._groups, self.n_groups, self._name = path, schema, groups, n_groups, name
        self.split = split
        with reading(path):
            schema.names  # noqa: B018 - text, or an error

    @classmethod
    def file(cls, path: Path) -> _ArrowFile:
        with reading(path):
            file = pa.ipc.open_file(pa.memory_map(str(path)))
            return cls(path, file.schema, file.get_batch, file.num_record_batches, "record batch {} of {}")

    @classmethod
    def stream(cls, path: Path) -> _ArrowFile:
        with reading(path):
            file = pa.ipc.open_stream(pa.memory_map(str(path)))
            batches = list(file)
        return cls(path, file.schema, batches.__getitem__, len(batches), "record batch {} of {}")

    @classmethod
    def table(cls, path: Path, table: pa.Table, split: Any = None) -> _ArrowFile:
        """All rows are one group: they were read together."""
        with reading(path):
            whole = pa.record_batch([_one_piece(c) for c in table.columns], schema=table.schema)
        return cls(path, table.schema, [whole].__getitem__, 1, "{1}", split)

    def where(self, group: int) -> str:
        return self._name.format(group, self.path.name)

    def _group(self, number: int) -> Any:
        with reading(self.path):
            return self._groups(number)

    def rows(self, group: int) -> int:
        return int(validated(self._group(group), self.path, full=False).num_rows)

    def read(self, group: int, columns: list[str], batch_size: int | None) -> Iterator[tuple[Any, int]]:
        """Record batches of one group, each with its first row."""
        table = self._group(group)
        with reading(self.path):
            table = table.select(columns)
        validated(table, self.path)
        if batch_size is None:
            batch_size = max(1, int(BATCH_BYTES * table.num_rows // max(1, table.nbytes)))
        for start in range(0, table.num_rows, batch_size):
            yield table.slice(start, batch_size), start


def _open(path: Path, keys: Any, query: Any, target: Any) -> _ParquetFile | _ArrowFile:
    """A file by its suffix if that is of a kind that is read whole, else by the bytes it begins with."""
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return _ArrowFile.table(path, *npz_table(path, keys, query, target))
    if suffix in (".csv", ".tsv"):
        with reading(path):
            options = csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ",")
            return _ArrowFile.table(path, csv.read_csv(path, parse_options=options))
    status = path.stat()
    return _opened(path, os.getpid(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _opened(path: Path, _pid: int, _size: int, _time: int) -> _ParquetFile | _ArrowFile:
    """Open a Parquet or Arrow file once per process and state of the file."""
    with path.open("rb") as file:
        magic = file.read(6)
    if magic[:4] == b"PAR1":
        return _ParquetFile(path)
    if magic == b"ARROW1":
        return _ArrowFile.file(path)
    if path.suffix.lower() in (".arrow", ".feather", ".ipc"):
        return _ArrowFile.stream(path)
    raise SchemaError(
        f"{path.name} must be a Parquet file or an Arrow file: it begins with {magic!r}. Convert it, for example "
        "with pandas: frame.to_parquet(path)."
    )


def _files(path: Any) -> list[Path]:
    paths = [Path(path)] if isinstance(path, (str, os.PathLike)) else [Path(p) for p in path]
    found = [file for p in paths for file in (sorted(p.glob("*.parquet")) if p.is_dir() else [p])]
    if not found:
        raise FileNotFoundError(f"there is no Parquet file in {path}.")
    for file in found:
        check_file_name(file)
        if not file.is_file():
            raise FileNotFoundError(f"{file.name!r} is not there: no such file.")
    return found


class _Beginnings(NamedTuple):
    """Where sets begin in the groups of a table with one row per token: a set belongs to the group it begins in.

    Attributes
    ----------
    rows : rows of each group
    skip : leading rows of each group that belong to a set of an earlier one
    sets : sets that begin in each group
    """

    rows: list[int]
    skip: list[int]
    sets: list[int]


class ParquetSets:
    """Sets in Parquet, Arrow, CSV or npz files, in batches: two batches are in memory, one of them being read.

    It can be gone through any number of times, cut into parts and sent to other processes: it holds names and
    numbers only. Parquet and Arrow files are read row group by row group; CSV and npz files are read whole.

    Parameters
    ----------
    path : path, folder of ``*.parquet`` files, or sequence of paths
        Arrow files (the IPC format, also called Feather) are memory-mapped, and their batches are views of them.
    keys : column name or names, optional
        With one row per set, one column of lists of tokens (list<list<float>>, list<fixed_size_list<float>>, or flat
        lists and ``dim``), or one column of lists of numbers per coordinate. With one row per token, one column of
        numbers per coordinate. By default the column ``keys``, or all columns (of lists, of numbers) that serve no
        other purpose, but those that look like an id, a time or a split. Names in one string are parted by commas.
    query : column name or names, optional
        One column of lists, or one column of numbers per coordinate. By default the column ``query``; with one row per
        token, the rows whose column ``role`` says "query".
    target : str or sequence of str, optional
        Column or columns of outputs or labels, () for none; by default the first of target, label, class, y. With one
        row per token it is the same in all rows of a set.
    weight : str, optional
        Column of sample weights.
    set_id : str, optional
        With one row per token, which set a row belongs to; by default the first of set, set_id, bag, bag_id, id,
        group. Rows of a set follow each other where they are not in one row group.
    missing : "error" or "drop"
        What to do about a token with a gap (NaN or nothing): refuse the table, or drop the token; a set without any
        token left gets one of zeros. Gaps in queries and targets are always refused.
    dim : int, optional
        Coordinates of a key, for flat lists.
    batch_size : int, optional
        Sets of a batch; by default as many as take some 32 MiB.
    start, stop : int, optional
        First row group to read, and the one to stop before: to resume, or to read a part.

    Examples
    --------
    >>> import tempfile, keyhole as kh
    >>> from pathlib import Path
    >>> sets = kh.targets.sphere_sets(100, n_keys=4, dim=3, seed=0)
    >>> path = Path(tempfile.mkdtemp()) / "sets.parquet"
    >>> kh.data.write_parquet(path, [(sets, sets.query[:, 0])], row_group_size=40)
    100
    >>> source = ParquetSets(path)
    >>> [len(batch.sets) for batch in source], source.n_rows
    ([40, 40, 20], 100)
    """

    def __init__(
        self,
        path: Any,
        *,
        keys: str | Sequence[str] | None = None,
        query: str | Sequence[str] | None = None,
        target: str | Sequence[str] | None = None,
        weight: str | None = None,
        set_id: str | None = None,
        missing: str = "error",
        dim: int | None = None,
        batch_size: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        check_choice(missing, "missing", ("error", "drop"))
        check_names(keys, "keys")
        check_names(query, "query")
        dim = None if dim is None else check_count(dim, "dim")
        self.batch_size = None if batch_size is None else check_count(batch_size, "batch_size")
        self.paths = _files(path)
        named: dict[str, Any] = {"keys": keys, "query": query, "target": target}
        self._arrays = {k: (v,) if isinstance(v, str) else None if v is None else tuple(v) for k, v in named.items()}
        self._held: list[_ParquetFile | _ArrowFile] = []
        first = self._file(0)
        named |= {"weight": weight, "set_id": set_id, "dim": dim, "missing": missing}
        self.layout = Layout.of(first.schema, self._head, self.paths[0].name, **named)
        self._ends = np.cumsum([self._file(i).n_groups for i in range(len(self.paths))]).tolist()
        groups = self._ends[-1]
        self.start = check_count(start, "start", minimum=0)
        self.stop = groups if stop is None else min(check_count(stop, "stop", minimum=0), groups)
        self.require(self.layout.columns())
        self.require([self.layout.set_id] if self.layout.set_id else [], one_type=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": []}

    def _file(self, which: int) -> _ParquetFile | _ArrowFile:
        if not self._held:
            self._held = [_open(path, **self._arrays) for path in self.paths]
        return self._held[which]

    def _head(self, columns: list[str]) -> Any:
        """The first rows of some columns of the first file, None if there are none."""
        file = self._file(0)
        batches = (t for group in range(file.n_groups) for t, _ in file.read(group, columns, HEAD_ROWS))
        return next(batches, None)

    @property
    def target(self) -> Any:
        """The column of the target, or columns; None if there is none."""
        return None if not self.layout.target else dict(self.layout.options)["target"]

    def require(self, columns: Sequence[str], *, one_type: bool = False) -> None:
        """Raise unless every file has these columns, each once, and of the same type in all files if asked."""
        first = self._file(0).schema
        for i, file in enumerate(self.paths):
            schema = self._file(i).schema
            check_columns(schema, columns, None, file.name)
            for name in columns if one_type else ():
                found, wanted = schema.field(name).type, first.field(name).type
                if found != wanted:
                    raise SchemaError(
                        f"column {name!r} must have one type: it is {wanted} in {self.paths[0].name} and {found} in "
                        f"{file.name}. Convert one of them."
                    )

    @property
    def n_groups(self) -> int:
        """Row groups it reads."""
        return max(0, self.stop - self.start)

    @property
    def n_rows(self) -> int:
        """Samples of all of them: rows, from the footers of the files, or sets of tokens."""
        return sum(map(self.rows, range(self.start, self.stop)))

    def rows(self, number: int) -> int:
        """Samples of one row group, counted over all files."""
        if self.layout.set_id is not None:
            return self._beginnings.sets[number]
        which, group = self._place(number)
        return self._file(which).rows(group)

    def _place(self, number: int) -> tuple[int, int]:
        """The file of a row group, and its number there."""
        which = bisect_right(self._ends, number)
        return which, number - (self._ends[which - 1] if which else 0)

    def _tables(self, number: int, columns: Sequence[str], batch_size: int | None) -> Iterator[tuple[Any, Place]]:
        """Record batches of some columns of one row group, each with its place."""
        which, group = self._place(number)
        file = self._file(which)
        for table, first in file.read(group, list(columns), batch_size):
            yield table, Place(file.where(group), first)

    @cached_property
    def _beginnings(self) -> _Beginnings:
        """Where sets begin, by a pass over their ids. Rows of a set follow each other, or all fits into memory."""
        name = str(self.layout.set_id)
        rows, skip, seen, begin, last = [], [], [], [], None
        for number in range(self._ends[-1]):
            parts = [set_ids(t.column(name), name, place) for t, place in self._tables(number, [name], None)]
            ids = np.concatenate(parts) if parts else np.zeros(0)
            other = ids != last if last is not None else np.ones(len(ids), dtype=bool)
            skip.append(int(other.argmax()) if other.any() else len(ids))
            rows.append(len(ids))
            found, at = np.unique(ids[skip[-1] :], return_index=True)
            seen += [found] if len(found) else []
            begin += [(number, skip[-1] + int(i)) for i in at]
            last = ids[-1] if len(ids) else last
        sets = np.bincount([number for number, _ in begin], minlength=len(rows)).tolist()
        every = np.concatenate(seen) if seen else np.zeros(0)
        order = np.argsort(every, kind="stable")
        again = np.flatnonzero(every[order][1:] == every[order][:-1])
        if len(again):
            size = 8 * sum(rows) * len(self.layout.columns())
            if size > MEMORY_BUDGET:
                one, two = (begin[order[again[0] + k]] for k in (0, 1))
                names = [self._file(self._place(g)[0]).where(self._place(g)[1]) for g, _ in (one, two)]
                raise SchemaError(
                    f"rows of a set must follow each other in a table of {size:,} bytes, which is read in parts: "
                    f"{Place(names[1]).row(two[1])} belongs to set {every[order[again[0]]]!s:.40}, which began in "
                    f"{Place(names[0]).row(one[1])}. Sort the table by {name!r}."
                )
            first = next(i for i, count in enumerate(rows) if count)
            sets = [len(np.unique(every)) if i == first else 0 for i in range(len(rows))]
            skip = [0 if i == first else count for i, count in enumerate(rows)]
        return _Beginnings(rows, skip, sets)

    def _token_rows(self, number: int, columns: Sequence[str]) -> tuple[Any, Place]:
        """The rows of all sets that begin in a row group, also where they go on in the next."""
        rows, skip, _ = self._beginnings
        which, group = self._place(number)
        place = Place(self._file(which).where(group), skip[number])

        def piece(k: int, keep: slice) -> pa.Table:
            batches = [t for t, _ in self._tables(k, columns, rows[k] or 1)]
            return pa.Table.from_batches(batches)[keep]

        pieces = [piece(number, slice(skip[number], None))]
        for k in range(number + 1, len(rows)):
            if skip[k]:
                pieces.append(piece(k, slice(0, skip[k])))
            if skip[k] < rows[k]:
                break
        return pa.concat_tables(pieces), place

    def read(self, number: int, copied: Sequence[str] = ()) -> Iterator[tuple[Dataset, dict[str, Any]]]:
        """The samples of one row group, counted over all files, in batches, each with some columns as they are."""
        columns = self.layout.columns(copied)
        if self.layout.set_id is None:
            for table, place in self._tables(number, columns, self.batch_size):
                yield self.layout.read(table, place, copied)
        elif self.rows(number):
            table, place = self._token_rows(number, columns)
            data, more = self.layout.read(table, place, copied)
            size = self.batch_size or max(1, BATCH_BYTES * len(data) // max(1, table.nbytes))
            for start in range(0, len(data), size):
                yield data[start : start + size], {name: c.slice(start, size) for name, c in more.items()}

    def group(self, number: int) -> Iterator[Batch]:
        """The batches of one row group, counted over all files."""
        for data, _ in self.read(number):
            yield Batch(data.sets, data.target, data.weights)

    def whole(self) -> Dataset:
        """All of it as one data set; rows of a set need not be together."""
        tables = [t for i in range(self.start, self.stop) for t, _ in self._tables(i, self.layout.columns(), 2**31)]
        name = self.paths[0].name if len(self.paths) == 1 else f"{len(self.paths)} files"
        if not tables:
            raise ValueError(f"a table must have at least one row: {name} has none.")
        with reading(self.paths[0]):
            table = pa.Table.from_batches(tables)
        data, _ = self.layout.read(table, Place())
        words = f"{len(data)} rows, one row per set"
        if self.layout.set_id is not None:
            words = f"{len(data)} sets of {table.num_rows} rows, one row per token"
        return replace(data, description=f"{name}: {words}", split=self._file(0).split)

    def __iter__(self) -> Iterator[Batch]:
        batches = (batch for part in range(self.start, self.stop) for batch in self.group(part))
        return _read_ahead(batches) if thread_count() > 1 else batches

    def parts(self, count: int | None = None) -> list[ParquetSets]:
        """Cut it into at most ``count`` runs of row groups, one row group each if None; none of them is empty."""
        filled = [i for i in range(self.n_groups) if self.rows(self.start + i)]
        if not filled:
            raise ValueError(f"there must be sets to share out: {self.paths[0].name!r} has no rows.")
        count = len(filled) if count is None else min(check_count(count, "count"), len(filled))
        cuts = [filled[i] for i in np.linspace(0, len(filled), count + 1).round().astype(int)[:-1]]
        return [self[a:b] for a, b in pairwise([0, *cuts[1:], self.n_groups])]

    def __getitem__(self, groups: slice) -> ParquetSets:
        """Some of its row groups: ``source[3:]`` goes on after the first three."""
        first, last, step = groups.indices(self.n_groups)
        if step != 1:
            raise ValueError(f"row groups are read in order: got a slice of step {step}.")
        part = object.__new__(ParquetSets)
        part.__dict__.update(self.__dict__, start=self.start + first, stop=self.start + max(first, last))
        return part

    def labels(self) -> np.ndarray:
        """The distinct values of the target, read without the sets."""
        if len(self.layout.target) != 1:
            raise SchemaError(f"labels are in one column: `target` is {self.target!r}.")
        found: list[np.ndarray] = []
        for number in range(self.start, self.stop):
            tables = self._tables(number, self.layout.target, self.batch_size)
            found += [np.unique(labels(t.column(0), self.layout.target[0], place)) for t, place in tables]
        return np.unique(np.concatenate(found))

    def __repr__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"ParquetSets({self.paths[0].name!r}{more}, row groups {self.start}:{self.stop})"


def _read_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, the next one read while this one is worked on: decoding takes one core, and leaves the rest."""
    with ThreadPoolExecutor(1) as reader:
        following = reader.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = reader.submit(next, batches, None)
            yield batch


def frame_dataset(frame: Any, **options: Any) -> Dataset:
    """The samples of a pandas frame, read as any table; the options are those of `Layout.of`."""
    columns = {
        str(name): pa.array([list(cell) if getattr(cell, "ndim", 0) == 2 else cell for cell in frame[name]])
        if frame[name].dtype == object
        else pa.array(frame[name])
        for name in frame.columns
    }
    table = pa.table(columns)
    layout = Layout.of(table.schema, table.select, "a partition", **options)
    return layout.read(table, Place("a partition"))[0]


def read_table(
    path: Any,
    *,
    keys: str | Sequence[str] | None = None,
    query: str | Sequence[str] | None = None,
    target: str | Sequence[str] | None = None,
    set_id: str | None = None,
    missing: str = "error",
    dim: int | None = None,
) -> Dataset:
    r"""Read sets from Parquet, Arrow, CSV or npz; the suffix of the file says which.

    One row per set: keys in one column of lists of tokens, or in one column of lists per coordinate. One row per
    token (the only form of CSV): a column for the set, columns for the coordinates. In npz: ``keys`` (n, N, d), or
    ``X`` (tokens, d) with ``ptr`` (n + 1), and ``y``.

    Parameters
    ----------
    path : str or Path
        A file, or a folder of Parquet files.
    keys, query, target, set_id, missing, dim
        As in `keyhole.data.ParquetSets`, which reads the same tables in parts.

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
    check_names(keys, "keys")
    if path.suffix.lower() not in SUFFIXES and not path.is_dir():
        raise ValueError(
            f"a table is read by its suffix, one of {', '.join(SUFFIXES)}: got {path.name!r}. Rename it, or convert it."
        )
    source = ParquetSets(path, keys=keys, query=query, target=target, set_id=set_id, missing=missing, dim=dim)
    return source.whole()
