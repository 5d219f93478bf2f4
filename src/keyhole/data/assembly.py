"""Sets and joins: the samples of a table, whatever its form, by a layout that is settled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int, Shaped

from keyhole.data.columns import (
    PLURALS,
    Place,
    SchemaError,
    ages,
    coded,
    ids_alike,
    inner_type,
    instants,
    is_list,
    labels,
    matrix,
    misfit_of,
    numbers,
    parts_of_split,
    plain_column,
    reference_days,
    refuse_gaps,
    set_ids,
    time_zone,
    unlisted,
)
from keyhole.data.dataset import Dataset
from keyhole.data.layout import Layout
from keyhole.data.rules import kind_of
from keyhole.data.sets import SetBatch

TOKENS = "the table of tokens"


@dataclass(frozen=True)
class SampleRows:
    """The samples of a table of any form: their own columns, and where the tokens of each are.

    ``tokens`` are the key columns, ``rows`` the entries of these in the order of the samples (None:
    all as they are), of which sample i has those from ``offsets[i]`` to ``offsets[i + 1]``.
    ``query_rows`` are the entries that are queries, where rows have roles.
    """

    samples: Any
    place: Place
    tokens: list[tuple[str, Any]]
    place_of_tokens: Place
    offsets: Int[np.ndarray, " o"]
    rows: Int[np.ndarray, " t"] | None = None
    ids: Shaped[np.ndarray, " n"] | None = None
    query_rows: Int[np.ndarray, " n"] | None = None
    key_ids: Any = None
    left_out: tuple[str, ...] = ()

    def row_of_tokens(self, offsets: Int[np.ndarray, " o"]) -> Int[np.ndarray, " t"]:
        """The row of the table in which each token is, where sets begin at ``offsets``."""
        if self.rows is not None:
            return self.rows
        return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def read_samples(
    layout: Layout,
    table: pa.Table | pa.RecordBatch,
    place: Place,
    copied: Sequence[str] = (),
    tokens: pa.Table | None = None,
) -> tuple[Dataset, dict[str, Any]]:
    """The samples of a table, and some columns as they are, with one entry per sample."""
    try:
        rows = split_rows(layout, table, place, copied, tokens)
        sets = _sets_of(layout, rows)
        copies = {name: rows.samples[name] for name in copied if name != layout.key_id}
        if layout.key_id is not None and layout.key_id in copied:
            copies[layout.key_id] = _ids_of_keys(layout, rows, sets)
        return _dataset(layout, rows, sets), copies
    except pa.ArrowException as error:
        raise SchemaError(
            f"the columns{place.inside} must read as sets: {str(error)[:300]}."
        ) from None


# ---------------------------------------------------------------- which tokens a sample has


def split_rows(
    layout: Layout,
    table: pa.Table | pa.RecordBatch,
    place: Place,
    copied: Sequence[str] = (),
    tokens: pa.Table | None = None,
) -> SampleRows:
    """Samples and their tokens, in each of the three forms of tables."""
    columns = {name: plain_column(table.column(name)) for name in layout.columns(copied)}
    if layout.form == "joined":
        assert tokens is not None
        needed = [*layout.keys, layout.set_id, layout.key_id]
        of_tokens = {n: plain_column(tokens.column(n)) for n in needed if n is not None}
        _check_time_zones(layout, {**of_tokens, **columns})
        return _joined_rows(layout, columns, place, of_tokens)
    _check_time_zones(layout, columns)
    if layout.form == "tokens":
        return _token_rows(layout, columns, place, copied)
    if layout.form == "sets":
        return _list_rows(layout, columns, place)
    raise ValueError(f"a table has one of three forms: got {layout.form!r}.")


def _token_rows(
    layout: Layout, columns: Mapping[str, Any], place: Place, copied: Sequence[str]
) -> SampleRows:
    """One row per token; the order of samples is that in which their sets first appear."""
    assert layout.set_id is not None
    ids = set_ids(columns[layout.set_id], layout.set_id, place)
    owner, first_rows = _owners(ids)
    n_sets = len(first_rows)
    if layout.dim is not None and layout.dim != len(layout.keys):
        raise SchemaError(
            f"`dim` is {layout.dim}, and there are {len(layout.keys)} key columns. Leave it out."
        )

    # columns of samples say the same in all rows of a set, so that the first row stands for it
    copied_of_samples = [name for name in copied if name != layout.key_id]
    of_samples = list(dict.fromkeys([*layout.of_samples, *copied_of_samples]))
    for name in of_samples:
        _check_constant(columns[name], owner, first_rows, name, place)
    first = pa.array(first_rows)
    samples = {name: columns[name].take(first) for name in [*of_samples, layout.set_id]}

    # keys, set after set, and the rows that are queries by their role
    is_key = np.ones(len(ids), dtype=bool)
    query_rows = None
    if layout.role is not None:
        is_key, query_rows = _rows_by_role(columns[layout.role], owner, n_sets, place)
    key_rows = np.flatnonzero(is_key)
    order = key_rows[np.argsort(owner[key_rows], kind="stable")]
    return SampleRows(
        samples=samples,
        place=place._replace(rows=first_rows),
        tokens=[(name, columns[name]) for name in layout.keys],
        place_of_tokens=place,
        offsets=_offsets(np.bincount(owner[order], minlength=n_sets)),
        rows=order,
        ids=ids[first_rows],
        query_rows=query_rows,
        key_ids=columns.get(layout.key_id or ""),
    )


def _joined_rows(
    layout: Layout, columns: Mapping[str, Any], place: Place, tokens: Mapping[str, Any]
) -> SampleRows:
    """Two tables: a sample has the tokens of its id, which other samples may have too."""
    assert layout.set_id is not None
    place_of_tokens = Place(TOKENS)
    kinds = columns[layout.set_id].type, tokens[layout.set_id].type
    ids = set_ids(columns[layout.set_id], layout.set_id, place)
    token_ids = set_ids(tokens[layout.set_id], layout.set_id, place_of_tokens)
    sample_ids, token_ids = ids_alike(ids, token_ids)
    if (sample_ids.dtype.kind == "U") != (token_ids.dtype.kind == "U"):
        raise SchemaError(
            f"column {layout.set_id!r} must hold the same ids in both tables: it holds {kinds[0]} "
            f"for samples and {kinds[1]} for tokens. Convert one of them."
        )

    # tokens sorted by id: those of a sample are the run from `start` to `end`
    order = np.argsort(token_ids, kind="stable")
    sorted_ids = token_ids[order]
    starts = np.searchsorted(sorted_ids, sample_ids, side="left")
    ends = np.searchsorted(sorted_ids, sample_ids, side="right")
    lengths = ends - starts
    has_none = lengths == 0
    if layout.missing != "drop" and has_none.any():
        row = int(has_none.argmax())
        raise SchemaError(
            f"every sample must have tokens: {layout.set_id!r} is {ids[row]!s:.40} in "
            f"{place.row(row)}, and in no row of the table of tokens ({int(has_none.sum())} such "
            "samples). Drop such samples, or give them a token of zeros with missing='drop' "
            "(--missing drop)."
        )
    offsets = _offsets(lengths)
    rows = order[np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)]
    left_out: tuple[str, ...] = ()
    n_strays = len(token_ids) - len(np.unique(rows))
    if n_strays:
        left_out = (f"{n_strays} tokens, whose {layout.set_id!r} no sample has",)
    return SampleRows(
        samples=columns,
        place=place,
        tokens=[(name, tokens[name]) for name in layout.keys],
        place_of_tokens=place_of_tokens,
        offsets=offsets,
        rows=rows,
        ids=ids,
        key_ids=tokens.get(layout.key_id or ""),
        left_out=left_out,
    )


def _list_rows(layout: Layout, columns: Mapping[str, Any], place: Place) -> SampleRows:
    """One row per set: lists end to end, those of a row equally long in all columns."""
    # a row without a list in one column has no tokens
    has_lists = np.ones(len(columns[layout.keys[0]]), dtype=bool)
    for name in layout.keys:
        has_lists &= columns[name].is_valid().to_numpy(zero_copy_only=False)
        if layout.missing != "drop" and not has_lists.all():
            raise SchemaError(
                f"column {name!r} must have a list in every row: {place.row(has_lists.argmin())} "
                "is empty. Drop the row, or have its tokens dropped with missing='drop' "
                "(--missing drop)."
            )
    tokens: list[tuple[str, Any]] = []
    offsets = np.zeros(1, dtype=np.int64)
    for name in layout.keys:
        column = columns[name]
        if not has_lists.all():
            column = pc.if_else(pa.array(has_lists), column, None)
        values, offsets_of_column = unlisted(column)
        if tokens and not np.array_equal(offsets, offsets_of_column):
            lengths = np.diff(offsets)
            other_lengths = np.diff(offsets_of_column)
            row = int((lengths != other_lengths).argmax())
            raise SchemaError(
                f"the coordinates of a set must have equally many entries: in {place.row(row)} "
                f"column {layout.keys[0]!r} has {lengths[row]} and {name!r} has "
                f"{other_lengths[row]}. Pad or cut them."
            )
        offsets = offsets_of_column
        tokens.append((name, plain_column(values)))
    ids = None
    if layout.set_id is not None:
        ids = set_ids(columns[layout.set_id], layout.set_id, place)
    return SampleRows(
        samples=columns, place=place, tokens=tokens, place_of_tokens=place, offsets=offsets, ids=ids
    )


def _offsets(lengths: np.ndarray) -> Int[np.ndarray, " o"]:
    """Where each set begins, and the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


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
    if is_list(column.type):
        values: np.ndarray = matrix(column, name, place, "vectors")
    elif kind_of(column.type) == "number":
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
    column: Any, owner: np.ndarray, n: int, place: Place
) -> tuple[Bool[np.ndarray, " r"], Int[np.ndarray, " n"] | None]:
    """Which rows are keys, and the row of the query of each set if there are any."""
    # roles in any case; all else is probably a column of another meaning
    roles = np.char.lower(np.array([str(v) for v in column.to_pylist()], dtype=np.str_))
    is_other = ~np.isin(roles, ["key", "query"])
    if is_other.any():
        row = int(is_other.argmax())
        raise SchemaError(
            f"column 'role' must say 'key' or 'query': {place.row(row)} says {roles[row]!s:.40}. "
            "Rename the column if it is something else."
        )
    # one query for each set, or none at all
    query_rows = np.flatnonzero(roles == "query")
    if len(query_rows) == 0:
        return roles == "key", None
    counts = np.bincount(owner[query_rows], minlength=n)
    if (counts != 1).any():
        i = int((counts != 1).argmax())
        raise SchemaError(
            "every set must have one row whose role is 'query', or leave out the column 'role': "
            f"set number {i}{place.inside} has {counts[i]}."
        )
    row_of_query = np.empty(n, dtype=np.int64)
    row_of_query[owner[query_rows]] = query_rows
    return roles == "key", row_of_query


# ---------------------------------------------------------------- columns as numbers


def _coded(
    layout: Layout, columns: Iterable[tuple[str, Any]], place: Place, lists: str = ""
) -> tuple[Float[np.ndarray, "r d"], list[str]]:
    """Columns as those of a matrix, and the name of the column that each of these comes from."""
    codings = {coding.column: coding for coding in layout.codings}
    parts = []
    owners: list[str] = []
    for name, column in columns:
        if name in codings:
            part = coded(
                codings[name],
                column,
                place,
                lists=lists,
                impute=layout.imputes,
                unknown=layout.unknown,
            )
        else:
            part = numbers(column, name, place, lists=lists)[:, None]
        parts.append(part)
        owners += [name] * part.shape[1]
    return np.concatenate(parts, axis=1), owners


def _token_values(
    layout: Layout, rows: SampleRows
) -> tuple[np.ndarray, Int[np.ndarray, " o"], list[str], np.ndarray | None]:
    """Tokens in the order of the samples, where each begins, names, and queries by role.

    The names are those of the columns that coordinates come from.
    """
    if _has_positions(layout, rows):
        if is_list(rows.tokens[0][1].type):
            return (*_nested_tokens(layout, rows), None)
        return (*_flat_tokens(layout, rows, layout.dim or 1), None)
    place = rows.place_of_tokens
    lists = ""
    if layout.form == "sets":
        place = place._replace(rows=rows.row_of_tokens(rows.offsets))
        lists = "lists of "
    values, owners = _coded(layout, rows.tokens, place, lists)
    reference = _reference(layout, rows)
    query = None
    if rows.query_rows is not None:
        query = _with_ages(layout, values[rows.query_rows], owners, reference, rows.place)
    is_in_order = rows.rows is None or np.array_equal(rows.rows, np.arange(len(values)))
    if not is_in_order:
        values = values[rows.rows]
    if reference is not None:
        reference = np.repeat(reference, np.diff(rows.offsets))
        place = place._replace(rows=rows.row_of_tokens(rows.offsets))
    return _with_ages(layout, values, owners, reference, place), rows.offsets, owners, query


def _has_positions(layout: Layout, rows: SampleRows) -> bool:
    """Whether one column of lists has all coordinates, which have positions for names."""
    if layout.form != "sets" or len(rows.tokens) > 1:
        return False
    return layout.dim is not None or is_list(rows.tokens[0][1].type)


def _nested_tokens(
    layout: Layout, rows: SampleRows
) -> tuple[np.ndarray, Int[np.ndarray, " o"], list[str]]:
    """Tokens out of lists of lists; those that are null are refused or dropped."""
    name, tokens = rows.tokens[0]
    place = rows.place
    offsets = rows.offsets
    if is_list(tokens.type.value_type):
        raise SchemaError(
            f"column {name!r} must hold sets of keys: found type list<{tokens.type}>"
            f"{place.inside}. There is one level of lists too many."
        )
    if tokens.null_count:
        is_present = tokens.is_valid().to_numpy(zero_copy_only=False)
        if layout.missing != "drop":
            row = int(np.searchsorted(offsets, is_present.argmin(), side="right")) - 1
            raise SchemaError(
                f"column {name!r} must hold lists of tokens: {place.row(row)} has one that is "
                "empty. Drop it, or all such tokens with missing='drop' (--missing drop)."
            )
        tokens = tokens.filter(pa.array(is_present))
        offsets = _offsets(is_present)[offsets]

    # all tokens have one width, which `dim` says where there are none
    flat, token_offsets = unlisted(tokens)
    width = int(token_offsets[1]) if len(tokens) else layout.dim or 0
    misfit = misfit_of(token_offsets)
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
    values = numbers(flat, name, place, lists="lists of ").reshape(-1, width)
    if layout.dim is not None and layout.dim != width:
        raise SchemaError(
            f"`dim` is {layout.dim}, and the keys of {name} have {width} coordinates{place.inside}."
        )
    return values, offsets, [f"{name}[{j}]" for j in range(width)]


def _flat_tokens(
    layout: Layout, rows: SampleRows, dim: int
) -> tuple[np.ndarray, Int[np.ndarray, " o"], list[str]]:
    """Tokens out of flat lists, ``dim`` numbers for each."""
    name, column = rows.tokens[0]
    lengths = np.diff(rows.offsets)
    has_rest = lengths % dim != 0
    if has_rest.any():
        row = int(has_rest.argmax())
        raise SchemaError(
            f"lists of column {name!r} must be whole keys of `dim` = {dim} coordinates: "
            f"{rows.place.row(row)} has {lengths[row]} numbers."
        )
    flat = numbers(column, name, rows.place, lists="lists of ")
    return flat.reshape(-1, dim), rows.offsets // dim, [f"{name}[{j}]" for j in range(dim)]


def _vectors(
    layout: Layout, rows: SampleRows, names: tuple[str, ...], what: str
) -> tuple[np.ndarray, list[str]] | None:
    """One vector for each sample, from a column of lists or one per coordinate; None for none."""
    if not names:
        return None
    first = rows.samples[names[0]]
    if len(names) == 1 and is_list(first.type):
        return matrix(first, names[0], rows.place, PLURALS[what]), list(names)
    values, owners = _coded(layout, [(name, rows.samples[name]) for name in names], rows.place)
    return _with_ages(layout, values, owners, _reference(layout, rows), rows.place), owners


# ---------------------------------------------------------------- ages


def _reference(layout: Layout, rows: SampleRows) -> Float[np.ndarray, " n"] | None:
    """The reference date of each sample in days since 1970; None where there is none."""
    if layout.reference_date is None:
        return None
    return reference_days(rows.samples[layout.reference_date], layout.reference_date, rows.place)


def _with_ages(
    layout: Layout,
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
    codings = {coding.column: coding for coding in layout.codings if coding.kind == "age"}
    aged = values.astype(np.float64)
    for j, name in enumerate(owners):
        if name in codings:
            aged[:, j] = ages(codings[name], values[:, j], reference, impute=layout.imputes)
            _warn_of_later_dates(layout, name, aged[:, j], place)
    return aged


def _warn_of_later_dates(
    layout: Layout, name: str, ages_of_column: Float[np.ndarray, " r"], place: Place
) -> None:
    """Say that some ages are negative; once, however many parts a table is read in."""
    is_later = ages_of_column < 0
    if name in layout.warned_columns or not is_later.any():
        return
    layout.warned_columns.add(name)
    warnings.warn(
        f"dates of column {name!r} lie after the date of their sample in "
        f"{layout.reference_date!r} ({place.row(is_later.argmax())} is the first, "
        f"{int(is_later.sum())} of {len(is_later)} entries read so far): their age is "
        "negative. Drop such tokens if they are not known yet when a prediction is made.",
        UserWarning,
        stacklevel=2,
    )


def _check_time_zones(layout: Layout, columns: Mapping[str, Any]) -> None:
    """Raise where one of reference date and dates has a time zone, and the other has none."""
    if layout.reference_date is None:
        return
    reference_zone = time_zone(columns[layout.reference_date].type)
    for coding in layout.codings:
        if coding.kind != "age" or coding.column not in columns:
            continue
        kind = inner_type(columns[coding.column].type)
        zone = time_zone(kind)
        if kind_of(kind) == "date" and (zone is None) != (reference_zone is None):
            words = [f"one ({z})" if z else "none" for z in (reference_zone, zone)]
            raise SchemaError(
                "dates and the reference date must both have a time zone, or neither: "
                f"{layout.reference_date!r} has {words[0]} and {coding.column!r} has {words[1]}. "
                "Convert one of them, for example with frame[name].dt.tz_localize('UTC') of pandas."
            )


def sums_of_ages(layout: Layout, rows: SampleRows) -> dict[str, tuple[float, int]]:
    """The sum and the number of the known ages of each column, over tokens and samples."""
    names = {coding.column for coding in layout.codings if coding.kind == "age"}
    matrices = []
    of_tokens = [(name, column) for name, column in rows.tokens if name in names]
    if of_tokens:
        values, _, owners, _ = _token_values(layout, replace(rows, tokens=of_tokens))
        matrices.append((values, owners))
    of_samples = tuple(n for n in dict.fromkeys([*layout.query, *layout.extras]) if n in names)
    vectors = _vectors(layout, rows, of_samples, "extra")
    if vectors is not None:
        matrices.append(vectors)
    sums: dict[str, tuple[float, int]] = {}
    for values, owners in matrices:
        for name, column in zip(owners, values.T, strict=True):
            known = column[np.isfinite(column)]
            total, count = sums.get(name, (0.0, 0))
            sums[name] = (total + float(known.sum()), count + len(known))
    return sums


# ---------------------------------------------------------------- samples


def _sets_of(layout: Layout, rows: SampleRows) -> SetBatch:
    """The sets; missing values are refused, or the tokens that have one dropped."""
    tokens, offsets, owners, query = _token_values(layout, rows)
    given_query = _vectors(layout, rows, layout.query, "query")
    if query is not None:
        refuse_gaps(query, owners, rows.place, "query", has_imputed=layout.imputes)
    elif given_query is not None:
        query, names = given_query
        refuse_gaps(query, names, rows.place, "query", has_imputed=layout.imputes)

    # missing and infinite values
    if not np.isfinite(tokens).all():
        is_present = np.ones(len(tokens), dtype=bool)
        if layout.missing == "drop":
            is_present = ~np.isnan(tokens).any(axis=1)
        refuse_gaps(
            tokens[is_present],
            owners,
            rows.place_of_tokens,
            "token",
            rows.row_of_tokens(offsets)[is_present],
            has_imputed=layout.imputes,
        )
        tokens = tokens[is_present]
        offsets = _offsets(is_present)[offsets]

    # a set without any token gets one of zeros, or is refused
    empty = np.flatnonzero(np.diff(offsets) == 0)
    if len(empty) and layout.missing == "drop":
        tokens = np.insert(tokens, offsets[empty], 0.0, axis=0)
        offsets = _offsets(np.maximum(np.diff(offsets), 1))
    elif len(empty):
        evidence = f"set {empty[0]} has no keys"
        if layout.form == "sets":
            evidence += f", {rows.place.row(empty[0])} has none in column {layout.keys[0]!r}"
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
        tokens, offsets.astype(np.int64, copy=False), query, None, _pairs(layout)
    )


def _pairs(layout: Layout) -> tuple[tuple[int, int], ...] | None:
    """Coordinates of one name in query and keys.

    None where query and keys have the same coordinates in the same order, or none in common.
    """
    names = layout.names_of(layout.keys)
    query_names = layout.names_of(layout.query)
    pairs = tuple((i, names.index(name)) for i, name in enumerate(query_names) if name in names)
    if not pairs or names == query_names:
        return None
    return pairs


def _dataset(layout: Layout, rows: SampleRows, sets: SetBatch) -> Dataset:
    """Sets with all that the table says of samples besides."""

    def read(name: str | None, reader: Callable[..., np.ndarray]) -> np.ndarray | None:
        if name is None:
            return None
        return reader(rows.samples[name], name, rows.place)

    extras = _vectors(layout, rows, layout.extras, "extra")
    if extras is not None:
        values, owners = extras
        refuse_gaps(values, owners, rows.place, "extra", has_imputed=layout.imputes)
        sets = sets.with_extras(values)
    names = layout.names_of(layout.keys)
    if _has_positions(layout, rows):
        names = tuple(f"{layout.keys[0]}[{j}]" for j in range(sets.dim))
    query_names = names  # rows of a role are queries with the coordinates of the keys
    if rows.query_rows is None:
        query_names = layout.names_of(layout.query)
    return Dataset(
        sets=sets,
        target=_targets(layout, rows),
        names=names,
        target_name=", ".join(layout.target),
        split=read(layout.split, parts_of_split),
        columns=layout.options,
        ids=rows.ids,
        weights=read(layout.weight, numbers),
        groups=read(layout.groups, partial(set_ids, what="which group")),
        time=read(layout.time, instants),
        query_names=query_names,
        extra_names=layout.names_of(layout.extras),
        codings=layout.codings,
        left_out=(*layout.left_out, *rows.left_out),
    )


def _targets(layout: Layout, rows: SampleRows) -> np.ndarray | None:
    """The target of each sample: (n,) of one column, (n, outputs) of several, None of none."""
    if not layout.target:
        return None
    if len(layout.target) == 1:
        name = layout.target[0]
        return labels(rows.samples[name], name, rows.place)
    outputs = [numbers(rows.samples[name], name, rows.place) for name in layout.target]
    targets = np.stack(outputs, axis=1)
    refuse_gaps(targets, layout.target, rows.place, "target")
    return targets


def _ids_of_keys(layout: Layout, rows: SampleRows, sets: SetBatch) -> Any:
    """The ids of keys, as one list per sample in the order of its keys."""
    if rows.key_ids is None:
        ids = rows.samples[layout.key_id]
    else:
        entries = rows.key_ids.take(pa.array(rows.rows))
        ids = pa.LargeListArray.from_arrays(pa.array(rows.offsets), entries)
    if not is_list(ids.type) or not np.array_equal(pc.list_value_length(ids), sets.lengths):
        raise SchemaError(
            f"column {layout.key_id!r} must have an id for each key{rows.place.inside}: it does "
            "not, or keys with missing values were dropped. Fill these in (--missing impute), "
            "or leave out --key-id."
        )
    return ids
