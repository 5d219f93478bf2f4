"""How the columns of a table become sets.

One row per set or one per token, whatever file they come from.
"""

from __future__ import annotations

import warnings
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
    MIN_ROWS,
    PLURALS,
    NumberEvidence,
    Place,
    SchemaError,
    Study,
    TextEvidence,
    ages,
    coded,
    ids_alike,
    instants,
    is_date,
    is_list,
    is_number,
    is_readable,
    kind_of,
    labels,
    matrix,
    numbers,
    one_piece,
    parts_of_split,
    plain_values,
    reference_days,
    refuse_gaps,
    same_lengths,
    set_ids,
    time_zone,
    unlisted,
)
from keyhole.data.schema import MOST_CATEGORIES, Coding, Schema, names_of_coordinates
from keyhole.data.sets import SetBatch, SetGroups

SET_NAMES = ("set", "set_id", "bag", "bag_id", "id", "group")
TARGET_NAMES = ("target", "label", "class", "y")  # usual names, "y" last: it may be a coordinate
ColumnName = str | int
ColumnNames = ColumnName | Sequence[ColumnName]
"""What users name columns by: pandas may have whole numbers for names."""
Pieces = Callable[[list[str]], Iterator[Any]]
"""Record batches of some columns, all rows of the table in their order."""
PROBLEM = b"keyhole: no column"
"""Note of a field whose cells make no column, with the reason: it may not be read, and does no harm
unread.
"""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Sets with their targets, and the names of their coordinates.

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
        Weights of samples, their groups (for ``fit(…, groups=data.groups)``), and when they were,
        where columns were named for these.
    query_names, extra_names : tuple of str
        Names of the coordinates of a query, and of the sample-level features.
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

        def chosen(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[rows]

        return replace(
            self,
            sets=self.sets[rows],
            target=chosen(self.target),
            split=chosen(self.split),
            ids=chosen(self.ids),
            weights=chosen(self.weights),
            groups=chosen(self.groups),
            time=chosen(self.time),
        )

    def __repr__(self) -> str:
        return f"Dataset({len(self)} sets: {self.description})"

    @property
    def schema(self) -> Schema:
        """What was learned about columns.

        ``schema.read(table)`` reads another table in the same way.
        """
        sets = self.sets.sets
        return Schema(
            dim=sets.dim,
            has_query=sets.query is not None,
            names=self.names,
            target=self.target_name,
            columns=self.columns,
            codings=self.codings,
        )

    @property
    def train(self) -> Dataset:
        """The training part; all of it where there is no split."""
        if self.split is None:
            return self
        return self[np.flatnonzero(self.split == 0)]

    @property
    def test(self) -> Dataset:
        """The part for testing."""
        if self.split is None:
            raise ValueError(
                "this data comes without a split of its own: split it yourself, by indexing, or "
                "name a column with `split` or `time`."
            )
        return self[np.flatnonzero(self.split == 1)]


def warn_of_leaks(data: Dataset) -> None:
    """Name the columns that are the target, or a factor of it plus a number, in all samples.

    Of labels the ones that say whether a sample has a label are meant. Fewer than `MIN_ROWS`
    samples show nothing.
    """
    if data.target is None or len(data) < MIN_ROWS:
        return
    targets = np.asarray(data.target)
    if targets.dtype.kind in "US":
        targets = (targets[:, None] == np.unique(targets)[:MOST_CATEGORIES]).astype(np.float64)
    targets = targets.reshape(len(data), -1).astype(np.float64)

    # columns of samples, and those of tokens that are the same in all tokens of a sample
    sets = data.sets.sets
    starts = sets.offsets[:-1]
    of_tokens = np.asarray(sets.tokens[starts])
    owner = np.repeat(np.arange(len(data)), np.diff(sets.offsets))
    is_constant = (sets.tokens == of_tokens[owner]).all(axis=0)
    named_columns = list(zip(data.names, of_tokens.T, strict=True))
    named_columns = [pair for pair, same in zip(named_columns, is_constant, strict=True) if same]
    for names, values in ((data.query_names, sets.query), (data.extra_names, sets.extras)):
        if values is not None and len(names) == values.shape[1]:
            named_columns += zip(names, values.T, strict=True)
    for name, values in named_columns:
        if any(_is_affine(values, target) for target in targets.T):
            warnings.warn(
                f"column {name.partition('=')[0]!r} gives the target {data.target_name!r} away: "
                f"in all {len(data)} samples it is the target, or a factor times it plus a "
                "number. Leave it out by naming `keys` (--keys), unless it is known when a "
                "prediction is made.",
                UserWarning,
                stacklevel=3,
            )


def _is_affine(values: Float[np.ndarray, " n"], target: Float[np.ndarray, " n"]) -> bool:
    """Whether values are a·target + b with a ≠ 0, up to the rounding of float32."""
    low, high = int(target.argmin()), int(target.argmax())
    rise = float(target[high] - target[low])
    difference = float(values[high]) - float(values[low])
    if rise == 0 or difference == 0:
        return False
    expected = float(values[low]) + difference / rise * (target - target[low])
    return bool((np.abs(values - expected) <= 1e-6 * abs(difference)).all())


# ---------------------------------------------------------------- which column is what


@dataclass(frozen=True)
class TableOptions:
    """What a user says about the columns of a table; see `ParquetSets`. None: to be found out."""

    keys: str | Sequence[str] | None = None
    query: str | Sequence[str] | None = None
    target: str | Sequence[str] | None = None
    extras: str | Sequence[str] | None = None
    set_id: str | None = None
    missing: str | None = None
    dim: int | None = None
    weight: str | None = None
    groups: str | None = None
    time: str | None = None
    split: str | None = None
    reference_date: str | None = None


def check_names(given: str | Sequence[str] | None, option: str) -> None:
    """Raise unless names are given each once, or not at all.

    They come in a list or in one text with commas.
    """
    if given is None:
        return
    if isinstance(given, str):
        names = _parted_by_commas(given)
    else:
        names = tuple(given)
    are_texts = all(isinstance(name, str) and name for name in names)
    if not names or not are_texts or len(set(names)) < len(names):
        raise ValueError(f"`{option}` must name columns, each once: got {given!r}.")


def names_as_text(given: Any) -> Any:
    """Names of columns as texts: pandas may have whole numbers for names."""
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        return str(given)
    if isinstance(given, (list, tuple)):
        return type(given)(names_as_text(name) for name in given)
    return given


def _parted_by_commas(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _names(given: str | Sequence[str] | None, schema: pa.Schema) -> tuple[str, ...] | None:
    """Names of columns as a tuple; one text is a column of this name, or names with commas."""
    if given is None:
        return None
    if not isinstance(given, str):
        return tuple(given)
    if given in schema.names:
        return (given,)
    return _parted_by_commas(given)


def check_columns(schema: pa.Schema, names: Sequence[str], option: str | None, source: str) -> None:
    """Raise if a column is not there, or there twice, or cannot be read.

    ``option`` named the columns, or None; ``source`` is the name of the table, for messages.
    """
    if option:
        rule = f"`{option}` must name columns of the table"
    else:
        rule = "every column that is read must be there"
    # what there is to choose from
    columns = ", ".join(repr(column) for column in schema.names[:30])
    for name in names:
        count = schema.names.count(name)
        if count == 0:
            remedy = ""
            if option == "keys":
                remedy = " If it is in another table, of tokens, pass that as `tokens` (--tokens)."
            table = str(source)
            if not table.startswith("the table"):
                table = f"the table {table}"
            raise SchemaError(
                f"{rule}: column {name!r} is not in {table}. It has {columns}.{remedy}"
            )
        if count > 1:
            raise SchemaError(
                f"{rule}: column {name!r} is there {count} times in {source}. It has {columns}. "
                "Rename all but one of them."
            )
        # a column that Arrow cannot hold came with a note instead of its cells
        note = (schema.field(name).metadata or {}).get(PROBLEM)
        if note is not None:
            raise SchemaError(
                f"a column must hold one kind of thing: {name!r} does not "
                f"({note.decode(errors='replace')}). Convert it, for example to text."
            )
        kind = schema.field(name).type
        if not is_readable(kind):
            raise SchemaError(
                f"a column must have a type that pyarrow reads: {name!r} has {kind}. Convert it to "
                "numbers, dates or text."
            )


@dataclass(frozen=True)
class Layout:
    """How the columns of a table become sets: every column that is read, by its use.

    ``keys`` is one column of lists of tokens, one of lists per coordinate, or one of numbers per
    coordinate. With one row per token ``set_id`` says which set a row belongs to, and ``role``
    which rows are queries. ``dim`` is the number of coordinates of a key, where lists are flat or
    may all be empty. Where keys are ``joined`` they have a table of their own, and all else has a
    table with one row per sample. ``codings`` are those of columns that are no plain numbers;
    ``unknown`` says what becomes of categories that are not in them. ``key_id`` is a column of
    tokens that is copied as a list of its entries in the order of the keys. ``reference_date`` is a
    column of samples that dates are counted back from, as ages.
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
    has_lists: bool = False
    codings: tuple[Coding, ...] = ()
    unknown: str = "error"
    left_out: tuple[str, ...] = ()
    key_id: str | None = None
    reference_date: str | None = None
    warned_columns: set[str] = field(default_factory=set, compare=False, repr=False)
    """Columns of which it was said that dates lie after the reference date: it is said once."""

    @classmethod
    def of(
        cls,
        schema: pa.Schema,
        pieces: Pieces,
        source: str,
        options: TableOptions,
        tokens: pa.Table | None = None,
    ) -> Layout:
        """Settle what was not said by names and types, and by what all rows hold.

        ``pieces`` goes through all rows of some columns; ``source`` is the name of the table, for
        messages; ``tokens`` is a table of their own.
        """
        # keys and query, as far as they were named
        keys = _names(options.keys, schema if tokens is None else tokens.schema)
        query = _names(options.query, schema) or ()
        if tokens is None:
            check_columns(schema, keys or (), "keys", source)
        _check_single_columns(schema, options, source)

        # the target: as named, or a column of a usual name that nothing else uses
        if options.target is None:
            targets = _usual_target(schema, taken={*(keys or ()), *query})
        elif isinstance(options.target, str):
            targets = (options.target,)
        else:
            targets = tuple(options.target)
        check_columns(schema, targets, "target", source)

        # sample-level features: as named, or the column of lists "extras"
        lists = [column.name for column in schema if is_list(column.type)]
        extras = _names(options.extras, schema) or ()
        has_usual_extras = "extras" in lists and "extras" not in {*(keys or ()), *query, *targets}
        if options.extras is None and has_usual_extras:
            extras = ("extras",)
        check_columns(schema, extras, "extras", source)

        # the keys, among the columns that nothing else uses
        used: set[str | None] = {*query, *targets, *extras}
        used |= {options.weight, options.groups, options.time, options.split}
        used |= {options.reference_date}
        with_ages = options.reference_date is not None
        if options.target is not None and not targets:
            # whoever says that there is no target does not make a coordinate of it
            used |= set(_usual_target(schema, taken={*(keys or ()), *query}))
        if tokens is not None:
            layout = cls._by_join(
                schema, source, tokens, keys, query, used, options.set_id, with_ages=with_ages
            )
        else:
            free_lists = [name for name in lists if name not in used]
            keys_are_lists = keys[0] in lists if keys else bool(free_lists)
            if keys_are_lists:
                layout = cls._by_set(schema, pieces, source, keys, query, used, with_ages=with_ages)
            else:
                layout = cls._by_token(
                    schema,
                    pieces,
                    source,
                    keys,
                    query,
                    used,
                    options.set_id,
                    with_ages=with_ages,
                )
        layout = replace(
            layout,
            target=targets,
            extras=extras,
            missing=options.missing or "error",
            dim=options.dim,
            weight=options.weight,
            groups=options.groups,
            time=options.time,
            split=options.split,
            reference_date=options.reference_date,
            set_id=options.set_id or layout.set_id,
        )
        if tokens is not None:
            return layout
        return layout._with_width(schema, pieces, source)

    @classmethod
    def _by_join(
        cls,
        schema: pa.Schema,
        source: str,
        tokens: pa.Table,
        keys: tuple[str, ...] | None,
        query: tuple[str, ...],
        used: set[str | None],
        set_id: str | None,
        *,
        with_ages: bool,
    ) -> Layout:
        """Keys in a table of tokens, all else in one of samples.

        An id says which tokens a sample has.
        """
        # the column that both tables have
        if not set_id:
            in_both = {*schema.names} & {*tokens.schema.names}
            set_id = next((name for name in SET_NAMES if name in in_both), None)
        if set_id is None:
            raise SchemaError(
                "tables of samples and of tokens need a column that says what belongs together: "
                f"none of {', '.join(SET_NAMES)} is in both. Name it with `set_id` (--set)."
            )
        check_columns(schema, [set_id], "set_id", source)
        check_columns(schema, query, "query", source)
        check_columns(tokens.schema, keys or (), "keys", "of tokens")

        # keys are settled as in a table with one row per token
        def pieces(names: list[str]) -> Iterator[Any]:
            return iter(tokens.select(names).to_batches())

        layout = cls._by_token(
            tokens.schema,
            pieces,
            "the table of tokens",
            keys,
            (),
            set(),
            set_id,
            with_ages=with_ages,
        )
        unused = [column.name for column in schema if column.name not in {*used, set_id}]
        left_out = tuple(f"{name!r} of the samples is neither query nor extra" for name in unused)
        return replace(
            layout, query=query, role=None, joined=True, left_out=layout.left_out + left_out
        )

    @classmethod
    def _by_token(
        cls,
        schema: pa.Schema,
        pieces: Pieces,
        source: str,
        keys: tuple[str, ...] | None,
        query: tuple[str, ...],
        used: set[str | None],
        set_id: str | None,
        *,
        with_ages: bool,
    ) -> Layout:
        """One row per token; ``used`` are columns that cannot be keys.

        Dates are keys unasked only if they are counted as ages.
        """
        # which set a row belongs to
        if not set_id:
            set_id = next((name for name in SET_NAMES if name in schema.names), None)
        if set_id is None:
            problem = ""
            if keys:
                problem = (
                    f"column {keys[0]!r} must hold sets of keys: found type "
                    f"{schema.field(keys[0]).type}. "
                )
            raise SchemaError(
                f"{problem}a table with one row per token needs a column that says which set a row "
                f"belongs to: none of {', '.join(SET_NAMES)} is among "
                f"{', '.join(schema.names[:30])} of {source}. Name it with `set_id` (--set)."
            )
        check_columns(schema, [set_id], "set_id", source)

        # which rows are queries
        role = None
        if "role" in schema.names and not query:
            role = "role"
            check_columns(schema, [role], "role", source)

        # coordinates: all other columns that can become numbers and look like nothing else
        left_out: tuple[str, ...] = ()
        if keys is None:
            candidates = []
            for column in schema:
                if column.name in {*used, set_id, role}:
                    continue
                if kind_of(column.type):
                    candidates.append(column.name)
                else:
                    content = "several kinds of things" if column.metadata else column.type
                    left_out += (f"{column.name!r} holds {content}",)
            keys, reasons = _coordinates(candidates, schema, pieces, source, with_ages=with_ages)
            left_out += reasons
        if not keys:
            why = f" ({'; '.join(left_out[:10])})" if left_out else ""
            raise SchemaError(
                "a table must have a column of numbers, or of few texts, for the keys: none is "
                f"left among {', '.join(schema.names[:30])} of {source}{why}. Name them with "
                "`keys` (--keys)."
            )
        check_columns(schema, query, "query", source)
        return cls(keys=keys, query=query, set_id=set_id, role=role, left_out=left_out)

    @classmethod
    def _by_set(
        cls,
        schema: pa.Schema,
        pieces: Pieces,
        source: str,
        keys: tuple[str, ...] | None,
        query: tuple[str, ...],
        used: set[str | None],
        *,
        with_ages: bool,
    ) -> Layout:
        """One row per set; ``used`` are columns that cannot be keys.

        Dates are keys unasked only if they are counted as ages.
        """
        if not query and "query" in schema.names and "query" not in (keys or ()):
            query = ("query",)
        check_columns(schema, query, "query", source)

        # keys: as named, or the column "keys", or all columns of lists that look like coordinates
        left_out: tuple[str, ...] = ()
        lists = [column.name for column in schema if is_list(column.type)]
        if keys is None and "keys" in lists:
            keys = ("keys",)
            check_columns(schema, keys, "keys", source)
        elif keys is None:
            candidates = [name for name in lists if name not in {*used, *query}]
            check_columns(schema, candidates, "keys", source)
            has_lists_of_lists = any(
                is_list(schema.field(name).type.value_type) for name in candidates
            )
            if not candidates or (has_lists_of_lists and len(candidates) > 1):
                raise SchemaError(
                    "keys must be one column of lists of tokens, or one column of lists of numbers "
                    f"per coordinate: found {', '.join(map(repr, candidates)) or 'none'} in "
                    f"{source}. Name them with `keys` (--keys)."
                )
            if has_lists_of_lists:
                keys = tuple(candidates)
            else:
                keys, left_out = _coordinates(
                    candidates, schema, pieces, source, with_ages=with_ages
                )
        # a column without lists has one entry per set, and says nothing of single keys
        for name in keys:
            kind = schema.field(name).type
            if not is_list(kind):
                raise SchemaError(
                    f"all key columns must hold lists if one does: {name!r} holds {kind}. Repeat "
                    "what belongs to the whole set as a list, or make it the query."
                )
        return cls(keys=keys, query=query, has_lists=True, left_out=left_out)

    def _with_width(self, schema: pa.Schema, pieces: Pieces, source: str) -> Layout:
        """The same with the coordinates of a token.

        For where lists do not say and all of a batch may be empty.
        """
        if not self.keys:
            raise SchemaError(
                f"keys must be in some column: none is left for them in {source}. Name them with "
                "`keys`."
            )
        name = self.keys[0]
        kind = schema.field(name).type
        if self.dim is not None or not self.has_lists or len(self.keys) > 1:
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
        single = filter(
            None, (self.weight, self.groups, self.time, self.split, self.reference_date)
        )
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

        Categories of text, the first of dates, means where missing values are filled in.
        """
        studies: dict[str, Study] = {}
        # keys are in the table of tokens where there is one; query and extras are of samples
        key_schema = schema if tokens is None else tokens
        columns = [key_schema.field(name) for name in self.keys]
        columns += [schema.field(name) for name in self.query + self.extras]
        for column in columns:
            name = column.name
            inner = _inner(column.type)
            kind = kind_of(inner)
            if self._counts_age(name, inner):
                kind = "age"
            if not kind and not is_list(inner) and not pa.types.is_null(inner):
                raise SchemaError(
                    f"column {name!r} must hold numbers, text or dates: it holds "
                    f"{column.type}. Leave it out, or convert it."
                )
            # a column of query and keys alike is coded once, for both
            if name in studies and studies[name].kind != kind:
                raise SchemaError(
                    f"columns of one name must hold the same: {name!r} holds "
                    f"{HOLDS[studies[name].kind]} among tokens and {HOLDS.get(kind, inner)} among "
                    "samples. Rename one, or convert it."
                )
            # plain numbers without anything to fill in need not be studied
            needs_mean = kind == "number" and self.missing == "impute"
            if kind in ("text", "date", "age") or needs_mean:
                studies.setdefault(name, Study(name, kind))
        return list(studies.values())

    def _counts_age(self, name: str, kind: pa.DataType) -> bool:
        """Whether a column becomes ages: dates do, but for those that ages are counted from."""
        has_reference = self.reference_date is not None and name != self.reference_date
        return has_reference and is_date(kind)

    def check_ages(self, *, from_schema: bool) -> None:
        """Raise unless there are ages where there is a date to count from, and the reverse."""
        has_ages = any(coding.kind == "age" for coding in self.codings)
        if has_ages == (self.reference_date is not None):
            return
        if has_ages:
            raise SchemaError(
                "ages are counted from the date of the sample: the schema has ages, and no column "
                "to count from. Name it with `reference_date` (--reference-date)."
            )
        if from_schema:
            raise SchemaError(
                "dates must be read as in the table that the schema was learned from: it was "
                f"learned without `reference_date`, and now that is {self.reference_date!r}. Leave "
                "it out, or read both tables with it."
            )
        raise SchemaError(
            f"dates are counted from the reference date {self.reference_date!r} as ages: no column "
            "of keys, query or extras holds dates. Name one of dates with `keys` (--keys), or "
            "leave out `reference_date` (--reference-date)."
        )

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """The options of `read_table` that give this layout."""
        target: Any = self.target
        if len(self.target) == 1:
            target = self.target[0]
        missing = None if self.missing == "error" else self.missing
        options = (
            ("set_id", self.set_id),
            ("keys", self.keys),
            ("query", self.query),
            ("target", target),
            ("extras", self.extras),
            ("dim", self.dim),
            ("missing", missing),
            ("reference_date", self.reference_date),
        )
        return tuple((option, value) for option, value in options if value)

    def read(
        self, table: Any, place: Place, copied: Sequence[str] = (), tokens: Any = None
    ) -> tuple[Dataset, dict[str, Any]]:
        """The samples of a table or record batch, and some columns as they are.

        With one entry per sample.
        """
        try:
            table = whole_batch(table)
            self._check_time_zones(table, tokens)
            if self.joined:
                return self._read_joined(table, place, copied, tokens)
            if not self.has_lists:
                return self._read_rows(table, place, copied)
            return self._read_lists(table, place, copied)
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
        codings = {coding.column: coding for coding in self.codings}
        parts: list[np.ndarray] = []
        owners: list[str] = []
        for name, column in columns:
            if name in codings:
                part = coded(
                    codings[name],
                    column,
                    place,
                    lists=lists,
                    impute=self.missing == "impute",
                    unknown=self.unknown,
                )
            else:
                part = numbers(plain_values(column), name, place, lists=lists)[:, None]
            parts.append(part)
            owners += [name] * part.shape[1]
        return np.concatenate(parts, axis=1), owners

    def _check_time_zones(self, table: Any, tokens: Any) -> None:
        """Raise where one of reference date and dates has a time zone, and the other has none."""
        if self.reference_date is None:
            return
        reference_zone = time_zone(table.schema.field(self.reference_date).type)
        age_columns = [coding.column for coding in self.codings if coding.kind == "age"]
        schemas = [table.schema] if tokens is None else [table.schema, tokens.schema]
        for schema in schemas:
            for name in age_columns:
                if name not in schema.names:
                    continue
                kind = _inner(schema.field(name).type)
                zone = time_zone(kind)
                if is_date(kind) and (zone is None) != (reference_zone is None):
                    raise SchemaError(
                        "dates and the reference date must both have a time zone, or neither: "
                        f"{self.reference_date!r} has {_zone_words(reference_zone)} and {name!r} "
                        f"has {_zone_words(zone)}. Convert one of them, for example with "
                        "frame[name].dt.tz_localize('UTC') of pandas."
                    )

    def _reference(self, table: Any, place: Place) -> Float[np.ndarray, " n"] | None:
        """The reference date of each row in days since 1970; None where there is none."""
        if self.reference_date is None:
            return None
        name = self.reference_date
        return reference_days(plain_values(table.column(name)), name, place)

    def _with_ages(
        self,
        values: Float[np.ndarray, "r d"],
        owners: Sequence[str],
        reference: Float[np.ndarray, " r"] | None,
        place: Place,
    ) -> Float[np.ndarray, "r d"]:
        """Coded columns, days of dates turned into ages.

        ``owners`` are the columns they come from, ``reference`` the reference date of each entry.
        """
        if reference is None:
            return values
        codings = {coding.column: coding for coding in self.codings if coding.kind == "age"}
        aged = values.astype(np.float64)
        for j, name in enumerate(owners):
            if name in codings:
                aged[:, j] = ages(
                    codings[name], values[:, j], reference, impute=self.missing == "impute"
                )
                self._warn_of_later_dates(name, aged[:, j], place)
        return aged

    def _warn_of_later_dates(
        self, name: str, ages_of_column: Float[np.ndarray, " r"], place: Place
    ) -> None:
        """Say that some ages are negative; once, however many parts a table is read in."""
        is_later = ages_of_column < 0
        if name in self.warned_columns or not is_later.any():
            return
        self.warned_columns.add(name)
        warnings.warn(
            f"dates of column {name!r} lie after the date of their sample in "
            f"{self.reference_date!r} ({place.row(is_later.argmax())} is the first, "
            f"{int(is_later.sum())} of {len(is_later)} entries read so far): their age is "
            "negative. Drop such tokens if they are not known yet when a prediction is made.",
            UserWarning,
            stacklevel=2,
        )

    def _names_of(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Names of the coordinates that columns become."""
        return names_of_coordinates(columns, self.codings)

    def _dataset(
        self,
        sets: SetBatch,
        names: tuple[str, ...],
        samples: Any,
        place: Place,
        ids: np.ndarray | None = None,
    ) -> Dataset:
        """Sets with all that the table says of samples besides."""

        def read(name: str | None, reader: Callable[..., np.ndarray]) -> np.ndarray | None:
            if name is None:
                return None
            return reader(plain_values(samples.column(name)), name, place)

        # sample-level features join the sets; all else stands beside them
        extras = self._vectors(samples, place, self.extras, "extra")
        query_names = names  # rows of a role are queries with the coordinates of the keys
        if self.role is None:
            query_names = self._names_of(self.query)
        return Dataset(
            sets=sets.with_extras(extras),
            target=self.targets(samples, place),
            names=names,
            target_name=", ".join(self.target),
            split=read(self.split, parts_of_split),
            columns=self.options,
            ids=ids,
            weights=read(self.weight, numbers),
            groups=read(self.groups, partial(set_ids, what="which group")),
            time=read(self.time, instants),
            query_names=query_names,
            extra_names=self._names_of(self.extras),
            codings=self.codings,
            left_out=self.left_out,
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
        """Sets of tokens; missing values are refused, or the tokens that have one dropped.

        ``names`` are those of the columns that the coordinates come from. ``rows`` says in which
        row each token was.
        """
        # missing and infinite values
        if not np.isfinite(tokens).all():
            is_present = np.ones(len(tokens), dtype=bool)
            if self.missing == "drop":
                is_present = ~np.isnan(tokens).any(axis=1)
            refuse_gaps(
                tokens[is_present],
                names,
                place,
                "token",
                rows()[is_present],
                has_imputed=self.missing == "impute",
            )
            tokens = tokens[is_present]
            offsets = np.concatenate([[0], np.cumsum(is_present)])[offsets]

        # a set without any token gets one of zeros, or is refused
        empty = np.flatnonzero(np.diff(offsets) == 0)
        if len(empty) and self.missing == "drop":
            tokens = np.insert(tokens, offsets[empty], 0.0, axis=0)
            offsets = np.concatenate([[0], np.cumsum(np.maximum(np.diff(offsets), 1))])
        elif len(empty):
            evidence = f"set {empty[0]} has no keys"
            if self.has_lists:
                evidence += f", {place.row(empty[0])} has none in column {self.keys[0]!r}"
            raise SchemaError(
                f"every set must have at least one key: {evidence}. Drop such sets, or give them a "
                "token of zeros with missing='drop' (--missing drop)."
            )

        # keys and queries in one type
        if query is not None:
            dtype = np.result_type(tokens, query)
            tokens = tokens.astype(dtype, copy=False)
            query = query.astype(dtype, copy=False)
        return SetBatch._from_flat(
            tokens, offsets.astype(np.int64, copy=False), query, None, self._pairs()
        )

    def _pairs(self) -> tuple[tuple[int, int], ...] | None:
        """Coordinates of one name in query and keys.

        None where query and keys have the same coordinates in the same order, or none in common.
        """
        names = self._names_of(self.keys)
        query_names = self._names_of(self.query)
        pairs = tuple((i, names.index(name)) for i, name in enumerate(query_names) if name in names)
        if not pairs or names == query_names:
            return None
        return pairs

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
        copies = {name: samples.column(name) for name in copied if name != self.key_id}
        if self.key_id is None or self.key_id not in copied:
            return copies
        # the ids of keys, as one list per sample in the order of its keys
        if keys is None:
            ids = samples.column(self.key_id)
        else:
            table, rows, offsets = keys
            entries = table.column(self.key_id).take(pa.array(rows))
            ids = pa.LargeListArray.from_arrays(pa.array(offsets), entries)
        if not is_list(ids.type) or not np.array_equal(pc.list_value_length(ids), sets.lengths):
            raise SchemaError(
                f"column {self.key_id!r} must have an id for each key{place.inside}: it does "
                "not, or keys with missing values were dropped. Fill these in (--missing impute), "
                "or leave out --key-id."
            )
        copies[self.key_id] = ids
        return copies

    # ------------------------------------------------------------ one row per set

    def _read_lists(
        self, table: Any, place: Place, copied: Sequence[str]
    ) -> tuple[Dataset, dict[str, Any]]:
        """Sets out of lists, a row each."""
        tokens, offsets, names, owners = self._list_tokens(table, place)
        if self.dim is not None and tokens.shape[1] != self.dim:
            raise SchemaError(
                f"`dim` is {self.dim}, and the keys of {', '.join(self.keys[:5])} have "
                f"{tokens.shape[1]} coordinates{place.inside}."
            )
        query = self._vectors(table, place, self.query, "query")
        lengths = np.diff(offsets)

        def rows_of_tokens() -> np.ndarray:
            return np.repeat(np.arange(len(lengths)), lengths)

        sets = self._sets(tokens, offsets, query, owners, place, rows_of_tokens)
        ids = None
        if self.set_id is not None:
            ids = set_ids(plain_values(table.column(self.set_id)), self.set_id, place)
        data = self._dataset(sets, names, table, place, ids=ids)
        return data, self._beside(copied, table, sets, place)

    def _list_tokens(
        self, table: Any, place: Place
    ) -> tuple[np.ndarray, np.ndarray, tuple[str, ...], Sequence[str]]:
        """Tokens end to end, where each set begins, and names.

        Names of coordinates, and of the columns they come from.
        """
        # a row without a list in one column has no tokens
        has_lists = self._rows_with_lists(table, place)
        columns = [table.column(name) for name in self.keys]
        if not has_lists.all():
            columns = [pc.if_else(pa.array(has_lists), column, None) for column in columns]
        values, offsets = unlisted(columns[0])
        first = self.keys[0]

        # one column of lists of tokens
        if len(columns) == 1 and is_list(values.type):
            tokens, offsets, names = self._nested_tokens(values, offsets, place)
            return tokens, offsets, names, names

        # one column of flat lists, `dim` numbers for each token
        if len(columns) == 1 and self.dim is not None:
            lengths = np.diff(offsets)
            has_rest = lengths % self.dim != 0
            if has_rest.any():
                row = int(has_rest.argmax())
                raise SchemaError(
                    f"lists of column {first!r} must be whole keys of `dim` = {self.dim} "
                    f"coordinates: {place.row(row)} has {lengths[row]} numbers."
                )
            flat = numbers(values, first, place, lists="lists of ")
            names = _positions(first, self.dim)
            return flat.reshape(-1, self.dim), offsets // self.dim, names, names

        # one column of lists for each coordinate: lists of a row are equally long
        parts = [(first, values)]
        for name, column in zip(self.keys[1:], columns[1:], strict=True):
            values, other_offsets = unlisted(column)
            if not np.array_equal(offsets, other_offsets):
                lengths = np.diff(offsets)
                other_lengths = np.diff(other_offsets)
                row = int((lengths != other_lengths).argmax())
                raise SchemaError(
                    f"the coordinates of a set must have equally many entries: in {place.row(row)} "
                    f"column {first!r} has {lengths[row]} and {name!r} has "
                    f"{other_lengths[row]}. Pad or cut them."
                )
            parts.append((name, values))
        rows = None
        if self.codings:
            rows = np.repeat(np.arange(table.num_rows), np.diff(offsets))
        place_of_entries = place._replace(rows=rows)
        tokens, owners = self._coded(parts, place_of_entries, "lists of ")
        reference = self._reference(table, place)
        if reference is not None:
            reference = reference[rows]
        tokens = self._with_ages(tokens, owners, reference, place_of_entries)
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

        # tokens that are null
        if tokens.null_count:
            is_present = tokens.is_valid().to_numpy(zero_copy_only=False)
            if self.missing != "drop":
                row = int(np.searchsorted(offsets, is_present.argmin(), side="right")) - 1
                raise SchemaError(
                    f"column {name!r} must hold lists of tokens: {place.row(row)} has one that is "
                    "empty. Drop it, or all such tokens with missing='drop' (--missing drop)."
                )
            tokens = tokens.filter(pa.array(is_present))
            offsets = np.concatenate([[0], np.cumsum(is_present)])[offsets]

        # all tokens have one width, which `dim` says where there are none
        flat, width, misfit = same_lengths(tokens)
        width = width or self.dim or 0
        if misfit is not None:
            token, length = misfit
            row = int(np.searchsorted(offsets, token, side="right")) - 1
            raise SchemaError(
                f"all tokens of column {name!r} must have as many coordinates, at least one: the "
                f"first has {width}, and token {token - offsets[row]} of {place.row(row)} has "
                f"{length}. Pad or cut them."
            )
        if not width:
            raise SchemaError(
                f"column {name!r} must hold at least one token: all lists{place.inside} are empty. "
                "Say how many coordinates a token has with `dim` (--dim)."
            )
        values = numbers(flat, name, place, lists="lists of ")
        return values.reshape(-1, width), offsets, _positions(name, width)

    def _rows_with_lists(self, table: Any, place: Place) -> Bool[np.ndarray, " n"]:
        """Rows in which all key columns have a list.

        The others are refused, or all their tokens dropped.
        """
        has_lists = np.ones(table.num_rows, dtype=bool)
        for name in self.keys:
            column = table.column(name)
            if column.null_count:
                has_lists &= column.is_valid().to_numpy(zero_copy_only=False)
            if self.missing != "drop" and not has_lists.all():
                row = has_lists.argmin()
                raise SchemaError(
                    f"column {name!r} must have a list in every row: {place.row(row)} "
                    "is empty. Drop the row, or have its tokens dropped with missing='drop' "
                    "(--missing drop)."
                )
        return has_lists

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
            vectors = matrix(first, names[0], place, PLURALS[what])
            owners = list(names)
        else:
            vectors, owners = self._coded(self._columns_of(table, names), place)
            vectors = self._with_ages(vectors, owners, self._reference(table, place), place)
        refuse_gaps(vectors, owners, place, what, has_imputed=self.missing == "impute")
        return vectors

    @staticmethod
    def _columns_of(table: Any, names: Sequence[str]) -> list[tuple[str, Any]]:
        """Columns of a table with their names."""
        return [(name, table.column(name)) for name in names]

    def targets(self, table: Any, place: Place) -> np.ndarray | None:
        """The target of each row: (n,) of one column, (n, outputs) of several, None of none."""
        if not self.target:
            return None
        if len(self.target) == 1:
            name = self.target[0]
            return labels(table.column(name), name, place)
        outputs = [numbers(table.column(name), name, place) for name in self.target]
        targets = np.stack(outputs, axis=1)
        refuse_gaps(targets, self.target, place, "target")
        return targets

    # ------------------------------------------------------------ one row per token

    def _read_rows(
        self, table: Any, place: Place, copied: Sequence[str]
    ) -> tuple[Dataset, dict[str, Any]]:
        """Sets out of rows; the order of sets is that in which they first appear."""
        assert self.set_id is not None
        # the set of each row, and all tokens
        ids = set_ids(plain_values(table.column(self.set_id)), self.set_id, place)
        owner, first_rows = _owners(ids)
        n_sets = len(first_rows)
        tokens, names = self._coded(self._columns_of(table, self.keys), place)
        tokens = self._with_ages(tokens, names, self._reference(table, place), place)
        if self.dim is not None and self.dim != len(self.keys):
            raise SchemaError(
                f"`dim` is {self.dim}, and there are {len(self.keys)} key columns. Leave it out."
            )

        # columns of samples say the same in all rows of a set, so that the first row stands for it
        copied_of_samples = [name for name in copied if name != self.key_id]
        for name in dict.fromkeys([*self.of_samples, *copied_of_samples]):
            _check_constant(table.column(name), owner, first_rows, name, place)
        samples = table.take(pa.array(first_rows))
        place_of_samples = place._replace(rows=first_rows)

        # queries: rows of their own by their role, or columns of samples
        is_key = np.ones(len(tokens), dtype=bool)
        if self.role is None:
            query = self._vectors(samples, place_of_samples, self.query, "query")
        else:
            is_key, query = _rows_by_role(table.column(self.role), tokens, owner, n_sets, place)
            if query is not None:
                has_imputed = self.missing == "impute"
                refuse_gaps(query, names, place_of_samples, "query", has_imputed=has_imputed)

        # keys, set after set
        key_rows = np.flatnonzero(is_key)
        order = key_rows[np.argsort(owner[key_rows], kind="stable")]
        lengths = np.bincount(owner[order], minlength=n_sets)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        sets = self._sets(tokens[order], offsets, query, names, place, lambda: order)
        data = self._dataset(
            sets, self._names_of(self.keys), samples, place_of_samples, ids=ids[first_rows]
        )
        return data, self._beside(copied, samples, sets, place, (table, order, offsets))

    def _read_joined(
        self, samples: Any, place: Place, copied: Sequence[str], tokens: Any
    ) -> tuple[Dataset, Any]:
        """Sets out of two tables.

        A sample has the tokens of its id, which other samples may have too.
        """
        assert self.set_id is not None
        place_of_tokens = Place("the table of tokens")
        tokens = whole_batch(tokens)

        # ids of both tables, of one kind
        sample_column = samples.column(self.set_id)
        token_column = tokens.column(self.set_id)
        sample_ids = set_ids(plain_values(sample_column), self.set_id, place)
        token_ids = set_ids(plain_values(token_column), self.set_id, place_of_tokens)
        sample_ids, token_ids = ids_alike(sample_ids, token_ids)
        if (sample_ids.dtype.kind == "U") != (token_ids.dtype.kind == "U"):
            raise SchemaError(
                f"column {self.set_id!r} must hold the same ids in both tables: it holds "
                f"{sample_column.type} for samples and {token_column.type} for tokens. Convert one "
                "of them."
            )
        values, names = self._coded(self._columns_of(tokens, self.keys), place_of_tokens)

        # tokens sorted by id: those of a sample are the run from `start` to `end`
        order = np.argsort(token_ids, kind="stable")
        sorted_ids = token_ids[order]
        starts = np.searchsorted(sorted_ids, sample_ids, side="left")
        ends = np.searchsorted(sorted_ids, sample_ids, side="right")
        lengths = ends - starts
        has_none = lengths == 0
        if self.missing != "drop" and has_none.any():
            row = int(has_none.argmax())
            raise SchemaError(
                f"every sample must have tokens: {self.set_id!r} is {sample_ids[row]!s:.40} in "
                f"{place.row(row)}, and in no row of the table of tokens "
                f"({int(has_none.sum())} such samples). Drop such samples, or give them a "
                "token of zeros with missing='drop' (--missing drop)."
            )
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = order[np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)]
        query = self._vectors(samples, place, self.query, "query")

        # tokens of several samples have an age for each
        reference = self._reference(samples, place)
        if reference is not None:
            reference = np.repeat(reference, lengths)
        place_of_entries = place_of_tokens._replace(rows=rows)
        keys = self._with_ages(values[rows], names, reference, place_of_entries)
        sets = self._sets(keys, offsets, query, names, place_of_tokens, lambda: rows)

        # tokens that belong to no sample are left out, and that is said
        layout = self
        n_strays = len(token_ids) - len(np.unique(rows))
        if n_strays:
            strays = f"{n_strays} tokens, whose {self.set_id!r} no sample has"
            layout = replace(self, left_out=(*self.left_out, strays))
        data = layout._dataset(sets, self._names_of(self.keys), samples, place, ids=sample_ids)
        return data, self._beside(copied, samples, sets, place, (tokens, rows, offsets))


def _check_single_columns(schema: pa.Schema, options: TableOptions, source: str) -> None:
    """Raise unless options that name one column each name one that is there."""
    names = {
        "set_id": options.set_id,
        "weight": options.weight,
        "groups": options.groups,
        "time": options.time,
        "split": options.split,
        "reference_date": options.reference_date,
    }
    for option, name in names.items():
        if name is None:
            continue
        if not isinstance(name, str) or not name:
            raise ValueError(f"`{option}` must name a column: got {name!r:.60}.")
        check_columns(schema, [name], option, source)


def _zone_words(zone: str | None) -> str:
    return "none" if zone is None else f"one ({zone})"


def _usual_target(schema: pa.Schema, taken: set[str]) -> tuple[str, ...]:
    """The first column of a usual name of a target that is not taken, or none."""
    for name in TARGET_NAMES:
        if name in schema.names and name not in taken and not _is_ragged(schema, name):
            return (name,)
    return ()


def whole_batch(table: Any) -> Any:
    """A table as one record batch, one piece for each column; a record batch as it is."""
    if not isinstance(table, pa.Table):
        return table
    table = table.combine_chunks()
    columns = [one_piece(column) for column in table.columns]
    return pa.record_batch(columns, names=table.column_names)


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
    names: list[str], schema: pa.Schema, pieces: Pieces, source: str, *, with_ages: bool
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
        inner = _inner(schema.field(name).type)
        kind = kind_of(inner)
        if kind == "number":
            reasons[name] = _number_reason(name, first, pieces)
        elif kind == "text":
            reasons[name] = _text_reason(name, pieces)
        elif kind == "date" and not with_ages and is_date(inner):
            reasons[name] = (
                "a time, because it holds dates (its age is a coordinate if reference_date "
                "(--reference-date) names the date of the sample)"
            )
        elif kind == "date" and not is_date(inner):
            reasons[name] = "a time, because it holds durations"
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
    evidence = TextEvidence(name)
    for piece in pieces([name]):
        entries = _entries(piece.column(0))
        if kind_of(entries.type) == "text":
            evidence.add(entries)
        if evidence.is_name():
            break
    return evidence.reason()


def _entries(column: Any) -> Any:
    """The entries of a column, of all its lists if it holds lists, without a dictionary."""
    if isinstance(column, pa.ChunkedArray):
        column = one_piece(column)
    if is_list(column.type):
        column, _ = unlisted(column)
    return plain_values(column)


def _owners(ids: Shaped[np.ndarray, " r"]) -> tuple[Int[np.ndarray, " r"], Int[np.ndarray, " n"]]:
    """The set of each row, numbered by first appearance, and that first row."""
    # rows of one set mostly follow each other: sorting the runs is cheaper than sorting the rows
    run_starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    run_lengths = np.diff([*run_starts, len(ids)])
    _, first_runs, set_of_run = np.unique(ids[run_starts], return_index=True, return_inverse=True)
    # np.unique numbers sets by their ids; here they are numbered as they appear
    order = np.argsort(first_runs)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    owner = np.repeat(rank[set_of_run.reshape(-1)], run_lengths)
    return owner, run_starts[first_runs[order]]


def _check_constant(
    column: Any, owner: np.ndarray, first: np.ndarray, name: str, place: Place
) -> None:
    """Raise where rows of a set disagree; ``first`` is the first row of each set."""
    column = plain_values(column)
    if is_list(column.type):
        values: np.ndarray = matrix(column, name, place, "vectors")
    elif is_number(column.type):
        values = numbers(column, name, place)
    else:
        values = np.asarray(column.dictionary_encode().indices.fill_null(-1))

    # every row against the first row of its set; two missing values agree
    first_of_row = first[owner]
    expected = values[first_of_row]
    agrees = values == expected
    if values.dtype.kind == "f":
        agrees |= np.isnan(values) & np.isnan(expected)
    if agrees.ndim == 2:
        agrees = agrees.all(axis=1)
    if not agrees.all():
        row = int((~agrees).argmax())
        first_row = int(first_of_row[row])
        raise SchemaError(
            f"column {name!r} must be the same in all rows of a set: {place.row(row)} says "
            f"{column[row]!s:.40} where {place.row(first_row)}, of the same set, says "
            f"{column[first_row]!s:.40}. Is this the right column, and `set_id` the right set?"
        )


def _rows_by_role(
    column: Any, tokens: np.ndarray, owner: np.ndarray, n: int, place: Place
) -> tuple[Bool[np.ndarray, " r"], Float[np.ndarray, "n d"] | None]:
    """Which rows are keys, and the query of each set if there are any."""
    # roles in any case; all else is probably a column of another meaning
    roles = np.char.lower(np.array([str(v) for v in column.to_pylist()], dtype=np.str_))
    is_other = ~np.isin(roles, ["key", "query"])
    if is_other.any():
        row = int(is_other.argmax())
        raise SchemaError(
            f"column 'role' must say 'key' or 'query': {place.row(row)} says {roles[row]!s:.40}. "
            "Rename the column if it is something else."
        )
    is_key = roles == "key"
    # one query for each set, or none at all
    query_rows = np.flatnonzero(roles == "query")
    if len(query_rows) == 0:
        return is_key, None
    counts = np.bincount(owner[query_rows], minlength=n)
    if (counts != 1).any():
        i = int((counts != 1).argmax())
        raise SchemaError(
            "every set must have one row whose role is 'query', or leave out the column 'role': "
            f"set number {i}{place.inside} has {counts[i]}."
        )
    queries = np.empty((n, tokens.shape[1]), tokens.dtype)
    queries[owner[query_rows]] = tokens[query_rows]
    return is_key, queries
