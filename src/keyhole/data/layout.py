"""Which column of a table is what: keys, query, target and all else, by name, type and content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from keyhole._checks import LARGEST_COUNT, check_choice, check_count
from keyhole.data.columns import ColumnSummary, SchemaError, inner_type, is_list
from keyhole.data.dataset import Dataset as Dataset
from keyhole.data.rules import WORDS_OF_KINDS, kind_of, reason_to_leave_out
from keyhole.data.schema import Coding, names_of_coordinates

SET_NAMES = ("set", "set_id", "bag", "bag_id", "id", "group")
TARGET_NAMES = ("target", "label", "class", "y")  # usual names, "y" last: it may be a coordinate
SINGLE_OPTIONS = ("set_id", "weight", "groups", "time", "split", "reference_date")
"""Options that name one column."""
STORED_OPTIONS = ("set_id", "keys", "query", "target", "extras", "dim", "missing", "reference_date")
"""Options that read another table in the same way."""
MISSING = ("error", "drop", "impute")
ColumnName = str | int
ColumnNames = ColumnName | Sequence[ColumnName]
"""What users name columns by: pandas may have whole numbers for names."""
PROBLEM = b"keyhole: no column"
"""Note of a field whose cells make no column, with the reason: it may not be read, and does no harm
unread."""


@dataclass(frozen=True)
class TableOptions:
    """What a user says about the columns of a table; see `read_table`. None: to be found out."""

    keys: ColumnNames | None = None
    query: ColumnNames | None = None
    target: ColumnNames | None = None
    extras: ColumnNames | None = None
    set_id: ColumnName | None = None
    missing: str | None = None
    dim: int | None = None
    weight: ColumnName | None = None
    groups: ColumnName | None = None
    time: ColumnName | None = None
    split: ColumnName | None = None
    reference_date: ColumnName | None = None

    def checked(self, stored: Mapping[str, Any]) -> TableOptions:
        """The same with names as texts; what is None is as a schema stored it, or the default."""
        values = {}
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name != "dim":
                value = _as_text(value)
            if value is None:
                value = stored.get(option.name)
            values[option.name] = value
        options = TableOptions(**values)
        for name in ("keys", "query", "extras"):
            _check_names(getattr(options, name), name)
        for name in SINGLE_OPTIONS:
            value = getattr(options, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"`{name}` must name a column: got {value!r:.60}.")
        dim = options.dim
        if dim is not None:
            dim = check_count(dim, "dim", maximum=LARGEST_COUNT)
        missing = check_choice(options.missing or "error", "missing", MISSING)
        return replace(options, dim=dim, missing=missing)


def _as_text(given: Any) -> Any:
    """Names of columns as texts, whatever the frame calls them."""
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        return str(given)
    if isinstance(given, (list, tuple)):
        return tuple(_as_text(name) for name in given)
    return given


def _check_names(given: Any, option: str) -> None:
    """Raise unless names are given each once, or not at all."""
    if given is None:
        return
    names = _parted_by_commas(given) if isinstance(given, str) else tuple(given)
    are_texts = all(isinstance(name, str) and name for name in names)
    if not names or not are_texts or len(set(names)) < len(names):
        raise ValueError(f"`{option}` must name columns, each once: got {given!r}.")


def _parted_by_commas(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def as_names(given: Any, columns: Sequence[str]) -> tuple[str, ...]:
    """Names of columns as a tuple; one text is a column of this name, or names with commas."""
    if given is None:
        return ()
    if not isinstance(given, str):
        return tuple(given)
    if given in columns:
        return (given,)
    return _parted_by_commas(given)


def check_columns(schema: pa.Schema, names: Sequence[str], option: str | None, source: str) -> None:
    """Raise if a column is not there, or there twice, or cannot be read.

    ``option`` named the columns, or None; ``source`` is the name of the table, for messages.
    """
    rule = "every column that is read must be there"
    if option:
        rule = f"`{option}` must name columns of the table"
    columns = ", ".join(repr(column) for column in schema.names[:30])
    table = source if source.startswith("the table") else f"the table {source}"
    for name in names:
        count = schema.names.count(name)
        if count == 0:
            remedy = ""
            if option == "keys":
                remedy = " If it is in another table, of tokens, pass that as `tokens` (--tokens)."
            raise SchemaError(
                f"{rule}: column {name!r} is not in {table}. It has {columns}.{remedy}"
            )
        if count > 1:
            raise SchemaError(
                f"{rule}: column {name!r} is there {count} times in {source}. It has {columns}. "
                "Rename all but one of them."
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

    ``form`` says what a row is: a token, whose set is named by ``set_id``; a set, with lists for
    keys; or, where keys have a table of their own, a sample with the tokens of its ``set_id``. With
    one row per token ``role`` says which rows are queries. ``dim`` is the number of coordinates of
    a key, where lists are flat or may all be empty. ``codings`` are those of columns that are no
    plain numbers; ``unknown`` says what becomes of categories that are not in them. ``key_id`` is a
    column of tokens that is copied as a list of its entries in the order of the keys.
    """

    form: Literal["tokens", "sets", "joined"]
    keys: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    weight: str | None = None
    groups: str | None = None
    time: str | None = None
    split: str | None = None
    set_id: str | None = None
    role: str | None = None
    reference_date: str | None = None
    dim: int | None = None
    missing: str = "error"
    codings: tuple[Coding, ...] = ()
    unknown: str = "error"
    left_out: tuple[str, ...] = ()
    key_id: str | None = None
    warned_columns: set[str] = field(default_factory=set, compare=False, repr=False)
    """Columns of which it was said that dates lie after the reference date: it is said once."""

    @property
    def imputes(self) -> bool:
        """Whether missing values are filled in."""
        return self.missing == "impute"

    @property
    def of_samples(self) -> list[str]:
        """Columns of samples rather than of tokens."""
        single = [self.weight, self.groups, self.time, self.split, self.reference_date]
        named = [name for name in single if name is not None]
        return list(dict.fromkeys([*self.query, *self.target, *self.extras, *named]))

    def columns(self, more: Sequence[str] = ()) -> list[str]:
        """Names of the columns it reads, and of some more; of samples where keys are apart."""
        is_joined = self.form == "joined"
        keys = () if is_joined else self.keys
        single = [name for name in (self.set_id, self.role) if name is not None]
        names = dict.fromkeys([*keys, *self.of_samples, *single, *more])
        return [name for name in names if not (is_joined and name == self.key_id)]

    @property
    def options(self) -> tuple[tuple[str, Any], ...]:
        """The options of `read_table` that give this layout."""
        values: dict[str, Any] = {name: getattr(self, name) for name in STORED_OPTIONS}
        if len(self.target) == 1:
            values["target"] = self.target[0]
        if self.missing == "error":
            values["missing"] = None
        return tuple((option, value) for option, value in values.items() if value)

    def names_of(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Names of the coordinates that columns become."""
        return names_of_coordinates(columns, self.codings)

    def kind_of_column(self, column: pa.Field) -> str:
        """What a column holds, or its lists hold, that can become numbers; refused if nothing."""
        inner = inner_type(column.type)
        kind = kind_of(inner)
        if not kind and not is_list(inner) and not pa.types.is_null(inner):
            raise SchemaError(
                f"column {column.name!r} must hold numbers, text or dates: it holds {column.type}. "
                "Leave it out, or convert it."
            )
        return kind

    def counts_ages(self, name: str, kind: str) -> bool:
        """Whether a column becomes ages: dates do, but for those that ages are counted from."""
        has_reference = self.reference_date is not None and name != self.reference_date
        return has_reference and kind == "date"

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

    def with_coordinates(
        self, candidates: Sequence[str], summaries: Mapping[str, ColumnSummary], source: str
    ) -> Layout:
        """The same with those candidates for keys that look like nothing else, all rows seen."""
        keys = []
        left_out = list(self.left_out)
        for name in candidates:
            reason = reason_to_leave_out(summaries[name]) if name in summaries else ""
            if reason:
                left_out.append(f"{name!r} looks like {reason}")
            else:
                keys.append(name)
        if not keys:
            why = f" ({'; '.join(left_out[:10])})" if left_out else ""
            raise SchemaError(
                "a table must have a column of numbers, or of few texts, for the keys: none is "
                f"left in {source}{why}. Name them with `keys` (--keys)."
            )
        return replace(self, keys=tuple(keys), left_out=tuple(left_out))

    def with_codings(self, summaries: Mapping[str, ColumnSummary]) -> Layout:
        """The same with codings of all columns that are no plain numbers."""
        codings = []
        for name in dict.fromkeys([*self.keys, *self.query, *self.extras]):
            summary = summaries.get(name)
            if summary is None or (summary.kind == "number" and not self.imputes):
                continue
            codings.append(summary.coding(impute=self.imputes))
        return replace(self, codings=tuple(codings))


# ---------------------------------------------------------------- what names and types say


def settle(
    schema: pa.Schema, options: TableOptions, source: str, tokens: pa.Schema | None
) -> tuple[Layout, tuple[str, ...]]:
    """A layout as far as names and types say, and the columns that may be keys if none is named.

    ``tokens`` is the schema of a table of their own, ``source`` the name of the table.
    """
    # what is named, or has a usual name, in the table of samples
    key_schema = schema if tokens is None else tokens
    keys = as_names(options.keys, key_schema.names)
    query = as_names(options.query, schema.names)
    single: dict[str, Any] = {option: getattr(options, option) for option in SINGLE_OPTIONS}
    for option, name in single.items():
        if name is not None:
            check_columns(schema, [name], option, source)
    usual_target = _usual_target(schema, taken={*keys, *query})
    target = usual_target
    if isinstance(options.target, str):
        target = (options.target,)
    elif options.target is not None:
        target = as_names(options.target, schema.names)
    lists = [column.name for column in schema if is_list(column.type)]
    extras = as_names(options.extras, schema.names)
    if options.extras is None and "extras" in lists and "extras" not in {*keys, *query, *target}:
        extras = ("extras",)
    check_columns(schema, target, "target", source)
    check_columns(schema, extras, "extras", source)
    check_columns(schema, query, "query", source)

    # the form, and what it needs
    used: set[str | None] = {*query, *target, *extras}
    if not target:
        # whoever says that there is no target does not make a coordinate of its column
        used |= set(usual_target)
    used |= set(single.values())
    free_lists = [name for name in lists if name not in used]
    keys_are_lists = bool(free_lists)
    if keys:
        check_columns(key_schema, keys, "keys", source if tokens is None else "of tokens")
        # lists beside an id are sets only if no key column says otherwise
        keys_are_lists = all(name in lists for name in keys)
        if single["set_id"] is None:
            keys_are_lists = keys[0] in lists
    form: Literal["tokens", "sets", "joined"] = "tokens"
    if tokens is not None:
        form = "joined"
    elif keys_are_lists:
        form = "sets"
    set_id = single["set_id"]
    if set_id is None and form != "sets":
        set_id = usual_set_id(schema.names, None if tokens is None else tokens.names)
    layout = Layout(
        form=form,
        keys=keys,
        query=query,
        target=target,
        extras=extras,
        weight=single["weight"],
        groups=single["groups"],
        time=single["time"],
        split=single["split"],
        set_id=set_id,
        reference_date=single["reference_date"],
        dim=options.dim,
        missing=options.missing or "error",
    )
    if form == "sets":
        return _settle_sets(layout, schema, source, free_lists)
    if set_id is None:
        raise SchemaError(_no_set_column(schema, source, keys, is_joined=tokens is not None))
    check_columns(schema, [set_id], "set_id", source)
    if form == "joined":
        check_columns(key_schema, [set_id], "set_id", "of tokens")
        unused = [name for name in schema.names if name not in {*used, set_id}]
        left_out = tuple(f"{name!r} of the samples is neither query nor extra" for name in unused)
        return _with_candidates(layout, key_schema, {set_id}, left_out)
    if "role" in schema.names and not query:
        layout = replace(layout, role="role")
        check_columns(schema, ["role"], "role", source)
    return _with_candidates(layout, schema, {*used, set_id, layout.role}, ())


def usual_set_id(names: Sequence[str], names_of_tokens: Sequence[str] | None) -> str | None:
    """The first usual name of a column of sets that is there, in both tables if there are two."""
    for name in SET_NAMES:
        if name in names and (names_of_tokens is None or name in names_of_tokens):
            return name
    return None


def _usual_target(schema: pa.Schema, taken: set[str]) -> tuple[str, ...]:
    """The first column of a usual name of a target that is not taken, or none.

    Lists of any lengths are coordinates rather than a target, which may be a list of one length.
    """
    for name in TARGET_NAMES:
        kinds = [column.type for column in schema if column.name == name]
        is_ragged = any(is_list(k) and not pa.types.is_fixed_size_list(k) for k in kinds)
        if kinds and name not in taken and not is_ragged:
            return (name,)
    return ()


def _no_set_column(
    schema: pa.Schema, source: str, keys: tuple[str, ...], *, is_joined: bool
) -> str:
    """What to say where no column names the sets."""
    if is_joined:
        return (
            "tables of samples and of tokens need a column that says what belongs together: none "
            f"of {', '.join(SET_NAMES)} is in both. Name it with `set_id` (--set)."
        )
    problem = ""
    if keys:
        kind = schema.field(keys[0]).type
        problem = f"column {keys[0]!r} must hold sets of keys: found type {kind}. "
    return (
        f"{problem}a table with one row per token needs a column that says which set a row belongs "
        f"to: none of {', '.join(SET_NAMES)} is among {', '.join(schema.names[:30])} of {source}. "
        "Name it with `set_id` (--set)."
    )


def _with_candidates(
    layout: Layout, schema: pa.Schema, taken: set[str | None], left_out: tuple[str, ...]
) -> tuple[Layout, tuple[str, ...]]:
    """A layout of rows per token, and the columns that may be keys."""
    if layout.keys:
        return replace(layout, left_out=left_out), ()
    candidates = []
    unreadable = []
    for column in schema:
        if column.name in taken:
            continue
        if kind_of(column.type):
            candidates.append(column.name)
        else:
            content = "several kinds of things" if column.metadata else column.type
            unreadable.append(f"{column.name!r} holds {content}")
    check_columns(schema, candidates, "keys", "of tokens" if layout.form == "joined" else "")
    return replace(layout, left_out=(*unreadable, *left_out)), tuple(candidates)


def _settle_sets(
    layout: Layout, schema: pa.Schema, source: str, free_lists: list[str]
) -> tuple[Layout, tuple[str, ...]]:
    """One row per set: lists for keys."""
    query = layout.query
    if not query and "query" in schema.names and "query" not in layout.keys:
        query = ("query",)
        check_columns(schema, query, "query", source)
    layout = replace(layout, query=query)
    if not layout.keys and "keys" in free_lists:
        layout = replace(layout, keys=("keys",))

    # all lists that serve no other purpose; lists of tokens are one column
    candidates: tuple[str, ...] = ()
    if not layout.keys:
        candidates = tuple(name for name in free_lists if name not in query)
        check_columns(schema, candidates, "keys", source)
        nested = [n for n in candidates if is_list(schema.field(n).type.value_type)]
        if not candidates or (nested and len(candidates) > 1):
            raise SchemaError(
                "keys must be one column of lists of tokens, or one column of lists of numbers per "
                f"coordinate: found {', '.join(map(repr, candidates)) or 'none'} in {source}. Name "
                "them with `keys` (--keys)."
            )
        if nested:
            layout = replace(layout, keys=candidates)
            candidates = ()
    check_columns(schema, layout.keys, "keys", source)
    for name in layout.keys:
        if not is_list(schema.field(name).type):
            raise SchemaError(
                f"all key columns must hold lists if one does: {name!r} holds "
                f"{schema.field(name).type}. Repeat what belongs to the whole set as a list, or "
                "make it the query."
            )
    is_flat = layout.keys == ("keys",) and not is_list(schema.field("keys").type.value_type)
    if is_flat and layout.dim is None:
        raise SchemaError(
            f"column 'keys' must hold sets of keys: found type {schema.field('keys').type} in "
            f"{source}. It is flat: say how many coordinates a key has with `dim` (--dim), 1 if "
            "each number is a key."
        )
    return layout, candidates


def check_kinds_agree(layout: Layout, schema: pa.Schema, tokens: pa.Schema) -> None:
    """Raise if a column of query or extras is of another kind than the key of the same name."""
    for name in dict.fromkeys([*layout.query, *layout.extras]):
        if name not in layout.keys:
            continue
        kind = layout.kind_of_column(schema.field(name))
        kind_of_key = layout.kind_of_column(tokens.field(name))
        if kind != kind_of_key:
            raise SchemaError(
                f"columns of one name must hold the same: {name!r} holds "
                f"{WORDS_OF_KINDS.get(kind_of_key, kind_of_key)} among tokens and "
                f"{WORDS_OF_KINDS.get(kind, kind)} among samples. Rename one, or convert it."
            )
