"""How the columns of a table become sets.

One row per set or one per token, whatever file they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int, Shaped

from keyhole.data.columns import (
    HOLDS,
    PLURALS,
    NumberEvidence,
    Place,
    SchemaError,
    Study,
    TextEvidence,
    coded,
    instants,
    is_list,
    is_number,
    kind_of,
    labels,
    matrix,
    numbers,
    one_piece,
    parts_of_split,
    plain_values,
    refuse_gaps,
    same_lengths,
    set_ids,
    unlisted,
)
from keyhole.data.schema import Coding, Schema
from keyhole.data.sets import SetBatch, SetGroups

SET_NAMES = ("set", "set_id", "bag", "bag_id", "id", "group")
TARGET_NAMES = ("target", "label", "class", "y")  # usual names, "y" last: it may be a coordinate
Pieces = Callable[[list[str]], Iterator[Any]]
"""Record batches of some columns, all rows of the table in their order."""
PROBLEM = b"keyhole: no column"
"""Note of a field whose cells make no column, with the reason: it may not be read, and does no harm
unread.
"""


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
        The options that read a table, resolved: pass them again to read another table in the same
        way.
    ids : array (n,) or None
        What a table with one row per token calls its sets.
    weights, groups, time : array (n,) or None
        Weights of samples, what names siblings among them (for ``fit(…, groups=data.groups)``), and
        when they were, where columns were named for these.
    query_names, extra_names : tuple of str
        Names of the coordinates of a query, and of the columns of samples.
    codings : tuple of Coding
        How columns that are no plain numbers became such.
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
    groups: Shaped[np.ndarray, " n"] | None = None
    time: Float[np.ndarray, " n"] | None = None
    query_names: tuple[str, ...] = ()
    extra_names: tuple[str, ...] = ()
    codings: tuple[Coding, ...] = field(default=(), repr=False)
    left_out: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, rows: Any) -> Dataset:
        """Some of the samples: a slice, integers, or a mask."""
        each = {
            name: getattr(self, name)
            for name in ("target", "split", "ids", "weights", "groups", "time")
        }
        some = {name: values[rows] for name, values in each.items() if values is not None}
        return replace(self, sets=self.sets[rows], **some)

    def __repr__(self) -> str:
        return f"Dataset({len(self)} sets: {self.description})"

    @property
    def schema(self) -> Schema:
        """What was learned about columns.

        ``schema.read(table)`` reads another table in the same way.
        """
        sets = self.sets.sets
        return Schema(
            sets.dim,
            sets.query is not None,
            self.names,
            self.target_name,
            self.columns,
            self.codings,
        )

    @property
    def train(self) -> Dataset:
        """The training part; all of it where there is no split."""
        return self if self.split is None else self[np.flatnonzero(self.split == 0)]

    @property
    def test(self) -> Dataset:
        """The part for testing."""
        if self.split is None:
            raise ValueError(
                "this data comes without a split of its own: split it yourself, by indexing, or "
                "name a column with `split` or `time`."
            )
        return self[np.flatnonzero(self.split == 1)]


# ---------------------------------------------------------------- which column is what


def check_names(given: str | Sequence[str] | None, option: str) -> None:
    """Raise unless names are given each once, or not at all.

    They come in a list or in one text with commas.
    """
    if given is None:
        return
    names = [part.strip() for part in given.split(",")] if isinstance(given, str) else list(given)
    if (
        not names
        or not all(isinstance(n, str) and n for n in names)
        or len(set(names)) < len(names)
    ):
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
            problem = (
                f"is not in the table {source}"
                if count == 0
                else f"is there {count} times in {source}"
            )
            rule = (
                f"`{option}` must name columns of the table"
                if option
                else "every column that is read must be there"
            )
            remedy = " Rename all but one of them." if count else ""
            if option == "keys" and not count:
                remedy = " If it is in another table, of tokens, pass that as `tokens` (--tokens)."
            raise SchemaError(
                f"{rule}: column {name!r} {problem}. It has "
                f"{', '.join(repr(c) for c in schema.names[:30])}.{remedy}"
            )
        note = (schema.field(name).metadata or {}).get(PROBLEM)
        if note is not None:
            raise SchemaError(
                f"a column must hold one kind of thing: {name!r} does not "
                f"({note.decode(errors='replace')}). Convert it, for example to text."
            )


@dataclass(frozen=True)
class Layout:
    """How the columns of a table become sets: every column that is read, by its use.

    ``keys`` is one column of lists of tokens, one of lists per coordinate, or one of numbers per
    coordinate. With one row per token ``set_id`` says which set a row belongs to, and ``role``
    which rows are queries. ``dim`` is the number of coordinates of a key, where lists are flat or
    may all be empty. Where keys are ``joined`` they have a table of their own, and all else has a
    table with one row per sample. ``codings`` are those of columns that are no plain numbers;
    ``unknown`` says what becomes of categories that they do not know. ``key_id`` is a column of
    tokens that is copied as a list of its entries in the order of the keys.
    """

    keys: tuple[str, ...]
    query: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    weight: str | None = None
    groups: str | None = None
    time: str | None = None
    split: str | None = None
    set_id: str | None = None
    role: str | None = None
    dim: int | None = None
    missing: str = "error"
    joined: bool = False
    codings: tuple[Coding, ...] = ()
    unknown: str = "error"
    left_out: tuple[str, ...] = ()
    key_id: str | None = None

    @classmethod
    def of(
        cls,
        schema: pa.Schema,
        pieces: Pieces,
        source: str,
        given: dict[str, Any],
        tokens: Any = None,
    ) -> Layout:
        """Settle what was not said by names and types, and by what all rows hold.

        ``pieces`` goes through all rows of some columns; ``source`` is the name of the table, for
        messages; ``given`` are the options of `ParquetSets`, by name, and ``tokens`` is a table of
        their own.
        """
        target, extras, set_id = (given[option] for option in ("target", "extras", "set_id"))
        named = _names(given["keys"], schema if tokens is None else tokens.schema)
        asked = _names(given["query"], schema) or ()
        if tokens is None:
            check_columns(schema, named or (), "keys", source)
        rest = {
            option: given[option]
            for option in ("missing", "dim", "weight", "groups", "time", "split")
        }
        single = {
            option: given[option] for option in ("set_id", "weight", "groups", "time", "split")
        }
        for option, name in single.items():
            if name is not None and (not isinstance(name, str) or not name):
                raise ValueError(f"`{option}` must name a column: got {name!r:.60}.")
            check_columns(schema, [name] if name else [], option, source)
        usual = [n for n in TARGET_NAMES if n in schema.names and n not in {*(named or ()), *asked}]
        found = [n for n in usual if not _is_ragged(schema, n)][:1]
        targets = (
            tuple(found)
            if target is None
            else (target,)
            if isinstance(target, str)
            else tuple(target)
        )
        check_columns(schema, targets, "target", source)
        lists = [f.name for f in schema if is_list(f.type)]
        own = _names(extras, schema) or ()
        if (
            extras is None
            and "extras" in lists
            and "extras" not in {*(named or ()), *asked, *targets}
        ):
            own = ("extras",)
        check_columns(schema, own, "extras", source)
        used = {
            *asked,
            *(targets or found),
            *own,
            *(rest[o] for o in ("weight", "groups", "time", "split")),
        }
        if tokens is not None:
            made = cls._by_join(schema, source, tokens, named, asked, used, set_id)
            return replace(made, target=targets, extras=own, **rest)
        settle = (
            cls._by_set
            if set_id is None and (named[0] in lists if named else lists)
            else cls._by_token
        )
        made = settle(schema, pieces, source, named, asked, used, set_id)
        return replace(made, target=targets, extras=own, **rest)._with_width(schema, pieces, source)

    @classmethod
    def _by_join(
        cls,
        schema: pa.Schema,
        source: str,
        tokens: pa.Table,
        keys: Any,
        query: Any,
        used: set[Any],
        set_id: str | None,
    ) -> Layout:
        """Keys in a table of tokens, all else in one of samples.

        An id says which tokens a sample has.
        """
        both = [n for n in SET_NAMES if n in schema.names and n in tokens.schema.names]
        set_id = set_id or next(iter(both), None)
        if set_id is None:
            raise SchemaError(
                "tables of samples and of tokens need a column that says what belongs together: "
                f"none of {', '.join(SET_NAMES)} is in both. Name it with `set_id` (--set)."
            )
        check_columns(schema, [set_id], "set_id", source)
        check_columns(schema, query, "query", source)
        check_columns(tokens.schema, keys or (), "keys", "of tokens")

        def pieces(names: list[str]) -> Iterator[Any]:
            return iter(tokens.select(names).to_batches())

        found = cls._by_token(tokens.schema, pieces, "the table of tokens", keys, (), set(), set_id)
        others = [f.name for f in schema if f.name not in {*used, set_id}]
        left_out = tuple(f"{name!r} of the samples is neither query nor extra" for name in others)
        return replace(
            found, query=query, role=None, joined=True, left_out=found.left_out + left_out
        )

    @classmethod
    def _by_token(
        cls,
        schema: pa.Schema,
        pieces: Pieces,
        source: str,
        keys: Any,
        query: Any,
        used: set[Any],
        set_id: str | None,
    ) -> Layout:
        set_id = set_id or next((n for n in SET_NAMES if n in schema.names), None)
        if set_id is None:
            what = (
                (
                    f"column {keys[0]!r} must hold sets of keys: found type "
                    f"{schema.field(keys[0]).type}. "
                )
                if keys
                else ""
            )
            raise SchemaError(
                f"{what}a table with one row per token needs a column that says which set a row "
                f"belongs to: none of {', '.join(SET_NAMES)} is among "
                f"{', '.join(schema.names[:30])} of {source}. Name it with `set_id` (--set)."
            )
        role = "role" if "role" in schema.names and not query else None
        check_columns(schema, [set_id], "set_id", source)
        check_columns(schema, [role] if role else [], "role", source)
        left_out: tuple[str, ...] = ()
        if keys is None:
            others = [f for f in schema if f.name not in {*used, set_id, role}]
            odd = [
                (f.name, "several kinds of things" if f.metadata else f.type)
                for f in others
                if not kind_of(f.type)
            ]
            left_out = tuple(f"{name!r} holds {what}" for name, what in odd)
            keys, more = _coordinates(
                [f.name for f in others if kind_of(f.type)], schema, pieces, source
            )
            left_out += more
        if not keys:
            why = f" ({'; '.join(left_out[:10])})" if left_out else ""
            raise SchemaError(
                "a table must have a column of numbers, or of few texts, for the keys: none is "
                f"left among {', '.join(schema.names[:30])} of {source}{why}. Name them with "
                "`keys` (--keys)."
            )
        check_columns(schema, query, "query", source)
        return cls(keys, query, set_id=set_id, role=role, left_out=left_out)

    @classmethod
    def _by_set(
        cls,
        schema: pa.Schema,
        pieces: Pieces,
        source: str,
        keys: Any,
        query: Any,
        used: set[Any],
        _: str | None,
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
                    "keys must be one column of lists of tokens, or one column of lists of numbers "
                    f"per coordinate: found {', '.join(repr(n) for n in found) or 'none'} in "
                    f"{source}. Name them with `keys` (--keys)."
                )
            keys, left_out = (
                (tuple(found), ()) if nested else _coordinates(found, schema, pieces, source)
            )
        for name in keys:
            kind = schema.field(name).type
            if not is_list(kind):
                raise SchemaError(
                    f"all key columns must hold lists if one does: {name!r} holds {kind}. Repeat "
                    "what belongs to the whole set as a list, or make it the query."
                )
        return cls(keys, query, left_out=left_out)

    def _with_width(self, schema: pa.Schema, pieces: Pieces, source: str) -> Layout:
        """The same with the coordinates of a token.

        For where lists do not say and all of a batch may be empty.
        """
        if not self.keys:
            raise SchemaError(
                f"keys must be in some column: none is left for them in {source}. Name them with "
                "`keys`."
            )
        name, kind = self.keys[0], schema.field(self.keys[0]).type
        if self.dim is not None or self.set_id is not None or len(self.keys) > 1:
            return self
        if not is_list(kind.value_type):
            if name == "keys":  # tokens, by its name
                raise SchemaError(
                    f"column 'keys' must hold sets of keys: found type {kind} in {source}. It is "
                    "flat: say how many coordinates a key has with `dim` (--dim), 1 if each number "
                    "is a key."
                )
            return self
        if self.missing != "drop" or pa.types.is_fixed_size_list(kind.value_type):
            return self
        # the first token says how many coordinates tokens have, whatever number of empty sets
        # precede
        for piece in pieces([name]):
            column = piece.column(0)
            if not is_list(column.type) or not is_list(column.type.value_type):
                break  # another file holds something else, which is refused where it is read
            tokens = unlisted(column)[0].drop_null()
            widths = np.diff(unlisted(tokens)[1])
            if len(widths):
                return replace(self, dim=int(widths[0]) or None)
        return self

    @property
    def of_samples(self) -> list[str]:
        """Columns of samples rather than of tokens."""
        single = filter(None, (self.weight, self.groups, self.time, self.split))
        return list(dict.fromkeys([*self.query, *self.target, *self.extras, *single]))

    def columns(self, more: Sequence[str] = ()) -> list[str]:
        """Names of the columns it reads, and of some more.

        Of the table of samples where there are two.
        """
        keys = () if self.joined else self.keys
        names = [*keys, *self.of_samples, *filter(None, (self.set_id, self.role)), *more]
        return [name for name in dict.fromkeys(names) if not (self.joined and name == self.key_id)]

    def studies(self, schema: pa.Schema, tokens: pa.Schema | None) -> list[Study]:
        """What is to be learned about columns.

        Categories of text, the first of dates, means where gaps are filled.
        """
        found: dict[str, Study] = {}
        for part, names in (
            (schema if tokens is None else tokens, self.keys),
            (schema, self.query + self.extras),
        ):
            for name in names:
                kind = _inner(part.field(name).type)
                said = kind_of(kind)
                if not said and not is_list(kind) and not pa.types.is_null(kind):
                    raise SchemaError(
                        f"column {name!r} must hold numbers, text or dates: it holds "
                        f"{part.field(name).type}. Leave it out, or convert it."
                    )
                if name in found and found[name].kind != said:
                    raise SchemaError(
                        f"columns of one name must hold the same: {name!r} holds "
                        f"{HOLDS[found[name].kind]} among tokens and {HOLDS.get(said, kind)} among "
                        "samples. Rename one, or convert it."
                    )
                if said in ("text", "date") or (said == "number" and self.missing == "impute"):
                    found.setdefault(name, Study(name, said))
        return list(found.values())

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """The options of `read_table` that give this layout."""
        target: Any = self.target[0] if len(self.target) == 1 else self.target
        every = (
            ("set_id", self.set_id),
            ("keys", self.keys),
            ("query", self.query),
            ("target", target),
            ("extras", self.extras),
            ("dim", self.dim),
            ("missing", self.missing if self.missing != "error" else None),
        )
        return tuple((option, value) for option, value in every if value)

    def read(
        self, table: Any, place: Place, copied: Sequence[str] = (), tokens: Any = None
    ) -> tuple[Dataset, dict[str, Any]]:
        """The samples of a table or record batch, and some columns as they are.

        With one entry per sample.
        """
        try:
            table = whole_batch(table)
            if self.joined:
                return self._read_joined(table, place, copied, tokens)
            return (
                self._read_rows(table, place, copied)
                if self.set_id
                else self._read_lists(table, place, copied)
            )
        except pa.ArrowException as error:
            raise SchemaError(
                f"the columns{place.inside} must read as sets: {str(error)[:300]}."
            ) from None

    def _coded(
        self, columns: Iterable[tuple[str, Any]], place: Place, lists: str = ""
    ) -> tuple[np.ndarray, list[str]]:
        """Columns as the columns of a matrix.

        With the name of the column that each of these comes from.
        """
        known, impute = {coding.column: coding for coding in self.codings}, self.missing == "impute"
        parts, owners = [], []
        for name, column in columns:
            if name in known:
                part = coded(
                    known[name], column, place, lists=lists, impute=impute, unknown=self.unknown
                )
            else:
                part = numbers(plain_values(column), name, place, lists=lists)[:, None]
            parts.append(part)
            owners += [name] * part.shape[1]
        return np.concatenate(parts, axis=1), owners

    def _names_of(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Names of the coordinates that columns become."""
        known = {coding.column: coding for coding in self.codings}
        return tuple(n for c in columns for n in (known[c].names if c in known else (c,)))

    def _dataset(
        self, sets: SetBatch, names: tuple[str, ...], samples: Any, place: Place, **more: Any
    ) -> Dataset:
        """Sets with all that the table says of samples besides."""
        sets = sets.with_extras(self._vectors(samples, place, self.extras, "extra"))
        read: dict[str, tuple[str | None, Callable[..., np.ndarray]]] = {
            "weights": (self.weight, numbers),
            "groups": (self.groups, partial(set_ids, what="which group")),
            "time": (self.time, instants),
            "split": (self.split, parts_of_split),
        }
        for use, (name, reader) in read.items():
            if name is not None:
                more[use] = reader(plain_values(samples.column(name)), name, place)
        return Dataset(
            sets,
            self.targets(samples, place),
            names,
            "",
            ", ".join(self.target),
            columns=self.options,
            query_names=self._names_of(self.query) if self.role is None else names,
            extra_names=self._names_of(self.extras),
            codings=self.codings,
            left_out=self.left_out,
            **more,
        )

    def _sets(
        self,
        tokens: np.ndarray,
        offsets: np.ndarray,
        query: Any,
        names: Sequence[str],
        place: Place,
        rows: Callable[[], np.ndarray],
    ) -> SetBatch:
        """Sets of tokens; gaps are refused, or the tokens that have one dropped.

        ``rows`` says where each token was.

        ``names`` are those of the columns that the coordinates come from.
        """
        if not np.isfinite(tokens).all():
            known = (
                ~np.isnan(tokens).any(axis=1)
                if self.missing == "drop"
                else np.ones(len(tokens), dtype=bool)
            )
            refuse_gaps(tokens[known], names, place, "token", rows()[known])
            tokens, offsets = tokens[known], np.concatenate([[0], np.cumsum(known)])[offsets]
        empty = np.flatnonzero(np.diff(offsets) == 0)
        if len(empty) and self.missing == "drop":
            tokens = np.insert(tokens, offsets[empty], 0.0, axis=0)
            offsets = np.concatenate([[0], np.cumsum(np.maximum(np.diff(offsets), 1))])
        elif len(empty):
            what = f"set {empty[0]} has no keys"
            what += (
                ""
                if self.set_id
                else f", {place.row(empty[0])} has none in column {self.keys[0]!r}"
            )
            raise SchemaError(f"every set must have at least one key: {what}. Drop such sets.")
        if query is not None:
            both = np.result_type(tokens, query)
            tokens, query = tokens.astype(both, copy=False), query.astype(both, copy=False)
        return SetBatch._from_flat(
            tokens, offsets.astype(np.int64, copy=False), query, None, self._pairs()
        )

    def _pairs(self) -> tuple[tuple[int, int], ...] | None:
        """Coordinates of one name in query and keys.

        None where they are all there are, in their order, or none is.
        """
        names, asked = self._names_of(self.keys), self._names_of(self.query)
        pairs = tuple((i, names.index(name)) for i, name in enumerate(asked) if name in names)
        return (
            pairs
            if pairs and pairs != tuple((i, i) for i in range(min(len(names), len(asked))))
            else None
        )

    def _beside(
        self,
        copied: Sequence[str],
        samples: Any,
        sets: SetBatch,
        place: Place,
        keys: tuple[Any, Any, Any] | None = None,
    ) -> dict[str, Any]:
        """Columns to copy, one entry per sample.

        ``keys`` are a table of tokens, its rows in order, their offsets.
        """
        found = {name: samples.column(name) for name in copied if name != self.key_id}
        if self.key_id is not None and self.key_id in copied:
            if keys is None:
                ids = samples.column(self.key_id)
            else:
                table, rows, offsets = keys
                ids = pa.LargeListArray.from_arrays(
                    pa.array(offsets), table.column(self.key_id).take(pa.array(rows))
                )
            if not is_list(ids.type) or not np.array_equal(pc.list_value_length(ids), sets.lengths):
                raise SchemaError(
                    f"column {self.key_id!r} must have an id for each key{place.inside}: it does "
                    "not, or keys with gaps were dropped. Fill gaps (--missing impute), or leave "
                    "out --key-id."
                )
            found[self.key_id] = ids
        return found

    # ------------------------------------------------------------ one row per set

    def _read_lists(
        self, table: Any, place: Place, copied: Sequence[str]
    ) -> tuple[Dataset, dict[str, Any]]:
        tokens, offsets, names, owners = self._list_tokens(table, place)
        if self.dim is not None and tokens.shape[1] != self.dim:
            raise SchemaError(
                f"`dim` is {self.dim}, and the keys of {', '.join(self.keys[:5])} have "
                f"{tokens.shape[1]} coordinates{place.inside}."
            )
        query = self._vectors(table, place, self.query, "query")
        lengths = np.diff(offsets)
        sets = self._sets(
            tokens,
            offsets,
            query,
            owners,
            place,
            lambda: np.repeat(np.arange(len(lengths)), lengths),
        )
        return self._dataset(sets, names, table, place), self._beside(copied, table, sets, place)

    def _list_tokens(
        self, table: Any, place: Place
    ) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], Sequence[str]]:
        """Tokens end to end, where each set begins, and names.

        Names of coordinates, and of the columns they come from.
        """
        known = self._known_rows(table, place)
        columns = [table.column(name) for name in self.keys]
        if not known.all():
            columns = [pc.if_else(pa.array(known), column, None) for column in columns]
        values, offsets = unlisted(columns[0])
        first = self.keys[0]
        if len(columns) == 1 and is_list(values.type):
            tokens, offsets, names = self._nested_tokens(values, offsets, place)
            return tokens, offsets, names, names
        if len(columns) == 1 and self.dim is not None:
            odd = np.diff(offsets) % self.dim != 0
            if odd.any():
                i = int(odd.argmax())
                raise SchemaError(
                    f"lists of column {first!r} must be whole keys of `dim` = {self.dim} "
                    f"coordinates: {place.row(i)} has {np.diff(offsets)[i]} numbers."
                )
            flat = numbers(values, first, place, lists="lists of ")
            names = _positions(first, self.dim)
            return flat.reshape(-1, self.dim), offsets // self.dim, names, names
        parts = [(first, values)]
        for name, column in zip(self.keys[1:], columns[1:], strict=True):
            values, others = unlisted(column)
            if not np.array_equal(offsets, others):
                row = int((np.diff(offsets) != np.diff(others)).argmax())
                raise SchemaError(
                    f"the coordinates of a set must have equally many entries: in {place.row(row)} "
                    f"column {first!r} has {np.diff(offsets)[row]} and {name!r} has "
                    f"{np.diff(others)[row]}. Pad or cut them."
                )
            parts.append((name, values))
        rows = np.repeat(np.arange(table.num_rows), np.diff(offsets)) if self.codings else None
        tokens, owners = self._coded(parts, place._replace(rows=rows), "lists of ")
        return tokens, offsets, self._names_of(self.keys), owners

    def _nested_tokens(
        self, tokens: Any, offsets: np.ndarray, place: Place
    ) -> tuple[np.ndarray, Int[np.ndarray, " o"], tuple[str, ...]]:
        """Tokens out of lists of lists; those that are null are refused or dropped."""
        name = self.keys[0]
        if is_list(tokens.type.value_type):
            raise SchemaError(
                f"column {name!r} must hold sets of keys: found type "
                f"list<{tokens.type}>{place.inside}. There is one level of lists too many."
            )
        if tokens.null_count:
            known = tokens.is_valid().to_numpy(zero_copy_only=False)
            if self.missing != "drop":
                row = int(np.searchsorted(offsets, known.argmin(), side="right")) - 1
                raise SchemaError(
                    f"column {name!r} must hold lists of tokens: {place.row(row)} has one that is "
                    "empty. Drop it, or all such tokens with missing='drop' (--missing drop)."
                )
            tokens = tokens.filter(pa.array(known))
            offsets = np.concatenate([[0], np.cumsum(known)])[offsets]
        flat, width, odd = same_lengths(tokens)
        width = width or self.dim or 0  # where all lists are empty
        if odd is not None:
            row = int(np.searchsorted(offsets, odd[0], side="right")) - 1
            raise SchemaError(
                f"all tokens of column {name!r} must have as many coordinates, at least one: the "
                f"first has {width}, and token {odd[0] - offsets[row]} of {place.row(row)} has "
                f"{odd[1]}. Pad or cut them."
            )
        if not width:
            raise SchemaError(
                f"column {name!r} must hold at least one token: all lists{place.inside} are empty. "
                "Say how many coordinates a token has with `dim` (--dim)."
            )
        return (
            numbers(flat, name, place, lists="lists of ").reshape(-1, width),
            offsets,
            _positions(name, width),
        )

    def _known_rows(self, table: Any, place: Place) -> Bool[np.ndarray, " n"]:
        """Rows in which all key columns have a list.

        The others are refused, or all their tokens dropped.
        """
        known = np.ones(table.num_rows, dtype=bool)
        for name in self.keys:
            if table.column(name).null_count:
                known &= table.column(name).is_valid().to_numpy(zero_copy_only=False)
            if self.missing != "drop" and not known.all():
                raise SchemaError(
                    f"column {name!r} must have a list in every row: {place.row(known.argmin())} "
                    "is empty. Drop the row, or have its tokens dropped with missing='drop' "
                    "(--missing drop)."
                )
        return known

    def _vectors(
        self, table: Any, place: Place, names: tuple[str, ...], what: str
    ) -> Float[np.ndarray, "n d"] | None:
        """One vector for each row, from a column of lists or one of numbers per coordinate.

        None for no columns.
        """
        if not names:
            return None
        first = table.column(names[0])
        if len(names) == 1 and is_list(first.type):
            found, owners = matrix(first, names[0], place, PLURALS[what]), list(names)
        else:
            found, owners = self._coded(((name, table.column(name)) for name in names), place)
        refuse_gaps(found, owners, place, what)
        return found

    def targets(self, table: Any, place: Place) -> np.ndarray | None:
        """The target of each row; one column of several outputs for several columns."""
        if len(self.target) < 2:
            return (
                labels(table.column(self.target[0]), self.target[0], place) if self.target else None
            )
        found = np.stack([numbers(table.column(name), name, place) for name in self.target], axis=1)
        refuse_gaps(found, self.target, place, "target")
        return found

    # ------------------------------------------------------------ one row per token

    def _read_rows(
        self, table: Any, place: Place, copied: Sequence[str]
    ) -> tuple[Dataset, dict[str, Any]]:
        """Sets out of rows; the order of sets is that in which they first appear."""
        assert self.set_id is not None
        ids = set_ids(plain_values(table.column(self.set_id)), self.set_id, place)
        owner, first = _owners(ids)
        tokens, names = self._coded(((name, table.column(name)) for name in self.keys), place)
        if self.dim is not None and self.dim != len(self.keys):
            raise SchemaError(
                f"`dim` is {self.dim}, and there are {len(self.keys)} key columns. Leave it out."
            )
        for name in dict.fromkeys(
            [*self.of_samples, *(name for name in copied if name != self.key_id)]
        ):
            _check_constant(table.column(name), owner, first, name, place)
        samples, at = table.take(pa.array(first)), place._replace(rows=first)
        is_key, query = np.ones(len(tokens), dtype=bool), None
        if self.role is not None:
            is_key, query = _rows_by_role(table.column(self.role), tokens, owner, len(first), place)
            if query is not None:
                refuse_gaps(query, names, at, "query")
        else:
            query = self._vectors(samples, at, self.query, "query")
        rows = np.flatnonzero(is_key)
        order = rows[np.argsort(owner[rows], kind="stable")]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[order], minlength=len(first)))])
        sets = self._sets(tokens[order], offsets, query, names, place, lambda: order)
        data = self._dataset(sets, self._names_of(self.keys), samples, at, ids=ids[first])
        return data, self._beside(copied, samples, sets, place, (table, order, offsets))

    def _read_joined(
        self, samples: Any, place: Place, copied: Sequence[str], tokens: Any
    ) -> tuple[Dataset, Any]:
        """Sets out of two tables.

        A sample has the tokens of its id, which other samples may have too.
        """
        assert self.set_id is not None
        there = Place("the table of tokens")
        tokens = whole_batch(tokens)
        wanted = set_ids(plain_values(samples.column(self.set_id)), self.set_id, place)
        held = set_ids(plain_values(tokens.column(self.set_id)), self.set_id, there)
        if (wanted.dtype.kind == "U") != (held.dtype.kind == "U"):
            raise SchemaError(
                f"column {self.set_id!r} must hold the same ids in both tables: it holds "
                f"{samples.column(self.set_id).type} for samples and "
                f"{tokens.column(self.set_id).type} for tokens. Convert one of them."
            )
        values, names = self._coded(((name, tokens.column(name)) for name in self.keys), there)
        order = np.argsort(held, kind="stable")
        first, last = (
            np.searchsorted(held[order], wanted, side=side) for side in ("left", "right")
        )
        if self.missing != "drop" and (first == last).any():
            i = int((first == last).argmax())
            raise SchemaError(
                f"every sample must have tokens: {self.set_id!r} is {wanted[i]!s:.40} in "
                f"{place.row(i)}, and in no row of the table of tokens "
                f"({int((first == last).sum())} such samples). Drop such samples, or give them a "
                "token of zeros with missing='drop' (--missing drop)."
            )
        offsets = np.concatenate([[0], np.cumsum(last - first)])
        rows = order[np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], last - first)]
        query = self._vectors(samples, place, self.query, "query")
        sets = self._sets(values[rows], offsets, query, names, there, lambda: rows)
        strays = int(len(held) - len(np.unique(rows)))
        left_out = self.left_out + (
            (f"{strays} tokens, whose {self.set_id!r} no sample has",) if strays else ()
        )
        data = replace(self, left_out=left_out)._dataset(
            sets, self._names_of(self.keys), samples, place, ids=wanted
        )
        return data, self._beside(copied, samples, sets, place, (tokens, rows, offsets))


def whole_batch(table: Any) -> Any:
    """A table as one record batch, one piece for each column; a record batch as it is."""
    if not isinstance(table, pa.Table):
        return table
    table = table.combine_chunks()
    return pa.record_batch([one_piece(c) for c in table.columns], names=table.column_names)


def _inner(kind: pa.DataType) -> pa.DataType:
    """The type of what lists hold, or of the column itself."""
    return kind.value_type if is_list(kind) else kind


def _positions(name: str, dim: int) -> tuple[str, ...]:
    return tuple(f"{name}[{j}]" for j in range(dim))


def _is_ragged(schema: pa.Schema, name: str) -> bool:
    """Whether a column holds lists of any lengths.

    Coordinates rather than a target, which may be a list of one.
    """
    kinds = [f.type for f in schema if f.name == name]
    return any(is_list(kind) and not pa.types.is_fixed_size_list(kind) for kind in kinds)


def _coordinates(
    names: list[str], schema: pa.Schema, pieces: Pieces, source: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those columns that are coordinates, and words for those that look like something else.

    All rows decide: the same table gives the same coordinates whatever file it is in. Most columns
    of numbers are settled by the first rows, since no later row can make them anything but
    coordinates; the others are read to their end, one by one.
    """
    check_columns(schema, names, "keys", source)
    first = next(iter(pieces(names)), None) if names else None
    if first is None:
        return tuple(names), ()
    reasons: dict[str, str] = {}
    for name in names:
        kind = kind_of(_inner(schema.field(name).type))
        if kind == "number":
            reasons[name] = _number_reason(name, first, pieces)
        elif kind == "text":
            reasons[name] = _text_reason(name, pieces)
        elif kind == "date":
            reasons[name] = "a time, because it holds dates"
    left_out = {name: reason for name, reason in reasons.items() if reason}
    coordinates = tuple(name for name in names if name not in left_out)
    return coordinates, tuple(f"{name!r} looks like {reason}" for name, reason in left_out.items())


def _number_reason(name: str, first: Any, pieces: Pieces) -> str:
    """What a column of numbers is other than a coordinate, or ""; ``first`` are the first rows."""
    evidence = NumberEvidence(name)
    evidence.add(numbers(_entries(first.column(name)), name, Place()))
    if evidence.is_coordinate():
        return ""
    evidence = NumberEvidence(name)
    for piece in pieces([name]):
        entries = _entries(piece.column(0))
        # a file in which the column holds something else is refused where the column is read
        if kind_of(entries.type) == "number":
            evidence.add(numbers(entries, name, Place()))
        if evidence.is_coordinate():
            return ""
    return evidence.reason()


def _text_reason(name: str, pieces: Pieces) -> str:
    """What a column of texts is other than a coordinate, or ""."""
    evidence = TextEvidence()
    for piece in pieces([name]):
        entries = _entries(piece.column(0))
        if kind_of(entries.type) == "text":
            evidence.add(entries)
        if evidence.is_name():
            break
    return evidence.reason()


def _entries(column: Any) -> Any:
    """The entries of a column, of all its lists if it holds lists, without a dictionary."""
    column = one_piece(column) if isinstance(column, pa.ChunkedArray) else column
    return plain_values(unlisted(column)[0] if is_list(column.type) else column)


def _owners(ids: Shaped[np.ndarray, " r"]) -> tuple[Int[np.ndarray, " r"], Int[np.ndarray, " n"]]:
    """The set of each row, numbered by first appearance, and that first row."""
    starts = np.flatnonzero(
        np.concatenate([[True], ids[1:] != ids[:-1]])
    )  # of runs of rows of one set
    _, first, owner = np.unique(ids[starts], return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return np.repeat(rank[owner.reshape(-1)], np.diff([*starts, len(ids)])), starts[first[order]]


def _check_constant(
    column: Any, owner: np.ndarray, first: np.ndarray, name: str, place: Place
) -> None:
    """Raise where rows of a set disagree."""
    column = plain_values(column)
    if is_list(column.type):
        values: np.ndarray = matrix(column, name, place, "vectors")
    elif is_number(column.type):
        values = numbers(column, name, place)
    else:
        values = np.asarray(column.dictionary_encode().indices.fill_null(-1))
    chosen = values[first][owner]
    same = values == chosen
    if values.dtype.kind == "f":
        same |= np.isnan(values) & np.isnan(chosen)
    same = same if same.ndim == 1 else same.all(axis=1)
    if not same.all():
        row = int((~same).argmax())
        one, other = (str(column[i]) for i in (row, int(first[owner[row]])))
        raise SchemaError(
            f"column {name!r} must be the same in all rows of a set: {place.row(row)} says "
            f"{one:.40} where {place.row(first[owner[row]])}, of the same set, says {other:.40}. "
            "Is this the right column, and `set_id` the right set?"
        )


def _rows_by_role(
    column: Any, tokens: np.ndarray, owner: np.ndarray, n: int, place: Place
) -> tuple[Bool[np.ndarray, " r"], Float[np.ndarray, "n d"] | None]:
    """Which rows are keys, and the query of each set if there are any."""
    roles = np.char.lower(np.array([str(v) for v in column.to_pylist()], dtype=np.str_))
    unknown = ~np.isin(roles, ["key", "query"])
    if unknown.any():
        row = int(unknown.argmax())
        raise SchemaError(
            f"column 'role' must say 'key' or 'query': {place.row(row)} says {roles[row]!s:.40}. "
            "Rename the column if it is something else."
        )
    rows = np.flatnonzero(roles == "query")
    if len(rows) == 0:
        return roles == "key", None
    counts = np.bincount(owner[rows], minlength=n)
    if (counts != 1).any():
        i = int((counts != 1).argmax())
        raise SchemaError(
            "every set must have one row whose role is 'query', or leave out the column 'role': "
            f"set number {i}{place.inside} has {counts[i]}."
        )
    queries = np.empty((n, tokens.shape[1]), tokens.dtype)
    queries[owner[rows]] = tokens[rows]
    return roles == "key", queries
