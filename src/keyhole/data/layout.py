"""How the columns of a table become sets: one row per set or one per token, whatever file they come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int, Shaped

from keyhole.data.sets import SetBatch, SetGroups

SET_NAMES = ("set", "set_id", "bag", "bag_id", "id", "group")
TARGET_NAMES = ("target", "label", "class", "y")  # usual names, "y" last: it may be a coordinate


class SchemaError(ValueError):
    """A column that cannot be read as what it was asked for."""


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
    if not len(column):  # its offsets may lead anywhere: nobody has looked at them
        return column.values.slice(0, 0), np.zeros(1, np.int64)
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
    if len(column) and pa.types.is_fixed_size_list(column.type) and not column.null_count and column.type.list_size:
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


_PLURALS = {"token": "tokens", "query": "queries", "target": "targets", "extra": "extras"}


def _refuse_gaps(values: np.ndarray, names: Sequence[str], place: Place, what: str, owner: Any = None) -> None:
    """Raise if numbers are missing or infinite; ``owner`` is the row of each if that is not its place."""
    finite = np.isfinite(values)
    if finite.all():
        return
    i, column = (int(k) for k in np.argwhere(~finite)[0])
    missing = np.isnan(values[i, column])
    drop = ", or drop the tokens that have one with missing='drop' (--missing drop)" if what == "token" else ""
    raise SchemaError(
        f"{_PLURALS[what]} must be known: "
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

    >>> looks_like("customer_id", np.array([7.0, 9.0, 7.0]))
    'an id, by its name and whole numbers'
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

    ``keys`` is one column of lists of tokens, one of lists per coordinate, or one of numbers per coordinate. With one
    row per token ``set_id`` says which set a row belongs to, and ``role`` which rows are queries. ``dim`` is the number
    of coordinates of a key, where lists are flat or may all be empty.
    """

    keys: tuple[str, ...]
    query: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
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
        extras: str | Sequence[str] | None = None,
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
        own = _names(extras, schema) or ()
        if extras is None and "extras" in lists and "extras" not in {*(named or ()), *asked, *targets}:
            own = ("extras",)
        check_columns(schema, own, "extras", source)
        settle = cls._by_set if set_id is None and (named[0] in lists if named else lists) else cls._by_token
        used = {*asked, *(targets or found), *own, weight}
        made = settle(schema, head, source, named, asked, used, set_id)
        made = replace(made, target=targets, extras=own, weight=weight, missing=missing, dim=dim)
        return made._with_width(schema, head, source)

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
            check_columns(schema, found, "keys", source)
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
        if not self.keys:
            raise SchemaError(f"keys must be in some column: none is left for them in {source}. Name them with `keys`.")
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
        return list(dict.fromkeys([*self.keys, *self.query, *self.target, *self.extras, *single, *more]))

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """The options of `read_table` that give this layout."""
        target: Any = self.target[0] if len(self.target) == 1 else self.target
        every = (("set_id", self.set_id), ("keys", self.keys), ("query", self.query), ("target", target),
                 ("extras", self.extras),
                 ("dim", self.dim), ("missing", self.missing if self.missing != "error" else None))  # fmt: skip
        return tuple((option, value) for option, value in every if value)

    def read(self, table: Any, place: Place, copied: Sequence[str] = ()) -> tuple[Dataset, dict[str, Any]]:
        """The samples of a table or record batch, and some columns as they are, one entry per sample."""
        try:
            if isinstance(table, pa.Table):  # one piece for each column
                table = table.combine_chunks()
                table = pa.record_batch([one_piece(c) for c in table.columns], names=table.column_names)
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
        query = self._vectors(table, place, self.query, "query")
        lengths = np.diff(offsets)
        sets = self._sets(tokens, offsets, query, names, place, lambda: np.repeat(np.arange(len(lengths)), lengths))
        sets = sets.with_extras(self._vectors(table, place, self.extras, "extra"))
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

    def _vectors(self, table: Any, place: Place, names: tuple[str, ...], what: str) -> Float[np.ndarray, "n d"] | None:
        """One vector for each row, from a column of lists or one of numbers per coordinate; None for no columns."""
        if not names:
            return None
        first = table.column(names[0])
        if len(names) == 1 and is_list(first.type):
            found = matrix(first, names[0], place, _PLURALS[what])
        else:
            found = np.stack([numbers(table.column(name), name, place) for name in names], axis=1)
        _refuse_gaps(found, names, place, what)
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
        extras = self._vectors(table, place, self.extras, "extra")
        if extras is not None:
            extras = constant(extras, ", ".join(self.extras))
        every = self.targets(table, place)
        y = None if every is None else constant(every, ", ".join(self.target))
        weights = self._weights(table, place)
        rows = np.flatnonzero(is_key)
        order = rows[np.argsort(owner[rows], kind="stable")]
        ends = np.cumsum(np.bincount(owner[order], minlength=len(first)))
        offsets = np.concatenate([[0], ends])
        sets = self._sets(tokens[order], offsets, query, self.keys, place, lambda: order).with_extras(extras)
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


def one_piece(column: Any) -> Any:
    """A column in one piece, which it is in already or is copied to."""
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
