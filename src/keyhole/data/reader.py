"""Tables of sets, whole by `read_table` and in parts by `ParquetSets`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import pyarrow as pa

from keyhole._array import thread_count
from keyhole._checks import LARGEST_COUNT, check_choice, check_count
from keyhole.data.assembly import read_samples, split_rows, sums_of_ages
from keyhole.data.batches import Batch
from keyhole.data.blocks import (
    ALL_ROWS,
    TableBlocks,
    files_of,
    open_files,
    reading,
    rows_of_batch_bytes,
    whole_table,
)
from keyhole.data.blocks import SUFFIXES as SUFFIXES
from keyhole.data.columns import (
    ColumnSummary,
    Place,
    SchemaError,
    is_list,
    labels,
    plain_column,
    set_ids,
    unlisted,
)
from keyhole.data.dataset import Dataset, warn_of_leaks
from keyhole.data.frames import DataTable, table_of
from keyhole.data.frames import table_in_memory as table_in_memory
from keyhole.data.layout import (
    ColumnName,
    ColumnNames,
    Layout,
    TableOptions,
    as_names,
    check_columns,
    check_kinds_agree,
    settle,
    usual_set_id,
)
from keyhole.data.schema import Schema
from keyhole.data.text_files import ColumnUses, column_names_of, is_text_file

NEWEST = 0.2
"""Share of the samples, the newest, that is set apart for testing where a column says when they
were."""
FilePath = str | os.PathLike[str]
TableSource = FilePath | Sequence[FilePath] | DataTable
"""Files, or a table in memory."""


class _Beginnings(NamedTuple):
    """Of a block of a table with one row per token: a set belongs to the block it begins in."""

    skip: int
    """Leading rows that belong to a set of an earlier block."""
    n_sets: int
    """Sets that begin in it."""


class ParquetSets:
    """Sets in Parquet, Arrow, CSV or npz files, in batches.

    ``for X, y in source`` goes through them; with ``weight`` it is ``for X, y, sample_weight in
    source``. Two batches are in memory, one of them being read.

    It can be gone through any number of times, cut into parts and sent to other processes. Parquet
    and Arrow files are read row group by row group; CSV and npz files are read whole.

    Parameters
    ----------
    path : path, sequence of paths, or table of pandas, polars or Arrow
        A folder stands for its ``*.parquet`` files. Arrow files (the IPC format, also called
        Feather) are memory-mapped, and their batches are views of them.
    tokens : path or table, optional
        A table with one row per token, where ``path`` has one row per sample. It is read whole.
    keys, query, target, extras, weight, groups, time, split, reference_date, set_id, missing, dim
        As in `read_table`. With one row per token, rows of a set must follow each other where they
        are not in one row group.
    schema : Schema, optional
        What was learned about another table, to read this one in the same way: all options that are
        not given.
    unknown : "error" or "ignore"
        With a schema, what becomes of a category that is not in it: it is refused, or read as none
        of its categories.
    copied : sequence of str
        Columns that are copied to predictions: those of a text file are read as written.
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
    >>> [len(X) for X, y in source], source.n_rows
    ([40, 40, 20], 100)
    """

    def __init__(
        self,
        path: TableSource,
        *,
        tokens: FilePath | DataTable | None = None,
        keys: ColumnNames | None = None,
        query: ColumnNames | None = None,
        target: ColumnNames | None = None,
        extras: ColumnNames | None = None,
        weight: ColumnName | None = None,
        groups: ColumnName | None = None,
        time: ColumnName | None = None,
        split: ColumnName | None = None,
        reference_date: ColumnName | None = None,
        set_id: ColumnName | None = None,
        missing: str | None = None,
        dim: int | None = None,
        schema: Schema | None = None,
        unknown: str = "error",
        copied: Sequence[str] = (),
        batch_size: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        # what was not given is as in the table that the schema was learned from
        options = TableOptions(
            keys=keys,
            query=query,
            target=target,
            extras=extras,
            set_id=set_id,
            missing=missing,
            dim=dim,
            weight=weight,
            groups=groups,
            time=time,
            split=split,
            reference_date=reference_date,
        )
        stored = {} if schema is None else dict(schema.columns)
        options = options.checked(stored)
        check_choice(unknown, "unknown", ("error", "ignore"))
        if batch_size is not None:
            batch_size = check_count(batch_size, "batch_size", maximum=LARGEST_COUNT)
        self.batch_size = batch_size

        # the files, or one table in memory; and the table of tokens, where there is one
        self.paths = files_of(path) if _names_files(path) else [Path("the table")]
        token_files = files_of(tokens) if isinstance(tokens, (str, os.PathLike)) else []
        uses = _uses_of_columns(options, schema, self.paths, token_files, copied)
        if _names_files(path):
            self._files = open_files(self.paths, options, uses)
            self.files = [*self.paths, *token_files]
        else:
            self._files = [TableBlocks.of(self.paths[0], table_of(path, "source"))]
            self.files = []
        self.tokens: pa.Table | None = None
        if token_files:
            with reading(token_files[0]):
                self.tokens = whole_table(open_files(token_files, TableOptions(), uses))
        elif tokens is not None:
            self.tokens = table_of(tokens, "tokens")

        # row groups of all files one after the other, and which of them are read
        self._blocks = [(file, i) for file in self._files for i in range(len(file.counts))]
        self.start = check_count(start, "start", minimum=0)
        self.stop = len(self._blocks)
        if stop is not None:
            self.stop = min(check_count(stop, "stop", minimum=0), self.stop)

        # a table to predict for need not have the target yet
        table_schema = self._files[0].schema
        named_targets = set(as_names(options.target, table_schema.names))
        if target is None and "target" in stored and not named_targets <= {*table_schema.names}:
            options = replace(options, target=())
        self.layout = self._settled(options, schema)
        self.layout = replace(self.layout, unknown=unknown)
        self.layout.check_ages(from_schema=schema is not None)
        if schema is None and self.layout.imputes:
            self._fill_ages()

    def _settled(self, options: TableOptions, schema: Schema | None) -> Layout:
        """Which column is what, and how each becomes numbers."""
        first = self._files[0].schema
        source = self.paths[0].name
        token_schema = None if self.tokens is None else self.tokens.schema
        layout, candidates = settle(first, options, source, token_schema)
        if token_schema is not None:
            check_kinds_agree(replace(layout, keys=layout.keys or candidates), first, token_schema)
        summaries: Mapping[str, ColumnSummary] = {}
        if schema is None or candidates:
            summaries = self._summaries(layout, candidates)
        if not layout.keys:
            layout = layout.with_coordinates(candidates, summaries, source)

        # all files must have the columns
        self.require(layout.columns())
        if layout.set_id is not None:
            self.require([layout.set_id], one_type=True)
        if layout.form == "sets" and layout.dim is None and layout.missing == "drop":
            layout = replace(layout, dim=self._width_of_tokens(layout))
        if schema is not None:
            return replace(layout, codings=schema.codings)
        return layout.with_codings(summaries)

    def _summaries(self, layout: Layout, candidates: Sequence[str]) -> dict[str, ColumnSummary]:
        """What all rows hold of the columns that may be keys, or that need a coding.

        The same table gives the same coordinates whatever file it is in. Most columns of numbers
        are settled by the first rows, and are not read further.
        """
        key_schema = self._files[0].schema if self.tokens is None else self.tokens.schema
        fields = [key_schema.field(name) for name in candidates or layout.keys]
        fields += [self._files[0].schema.field(n) for n in layout.query + layout.extras]
        summaries: dict[str, ColumnSummary] = {}
        for column in fields:
            name = column.name
            kind = layout.kind_of_column(column)
            is_plain = kind in ("", "number") and not (kind and layout.imputes)
            if name in summaries or (is_plain and name not in candidates):
                continue
            ages = layout.counts_ages(name, kind)
            summaries[name] = ColumnSummary(name, kind, counts_ages=ages)
            for piece in () if ages else self._pieces(layout, name):
                values = plain_column(piece)
                summaries[name].add(unlisted(values)[0] if is_list(values.type) else values)
                if summaries[name].is_settled and not layout.imputes:
                    break
        return summaries

    def _pieces(self, layout: Layout, name: str) -> Iterator[Any]:
        """All rows of one column: of the samples, of the tokens, or of both.

        A file that lacks the column is passed over: it is refused where the column is to be read.
        """
        of_samples = name in {*layout.query, *layout.extras}
        if self.tokens is None or of_samples:
            for file, block in self._blocks:
                if file.schema.names.count(name) == 1:
                    for batch, _ in file.read(block, [name], None):
                        yield batch.column(0)
        if self.tokens is not None and name in self.tokens.column_names:
            yield from self.tokens.column(name).chunks

    def _width_of_tokens(self, layout: Layout) -> int | None:
        """The coordinates of the first token that there is, whatever empty sets precede it."""
        for piece in self._pieces(layout, layout.keys[0]):
            tokens = plain_column(piece)
            if len(layout.keys) > 1 or not is_list(tokens.type.value_type):
                return None
            tokens = unlisted(tokens)[0].drop_null()
            if len(tokens):
                return int(unlisted(tokens)[1][1]) or None
        return None

    def _fill_ages(self) -> None:
        """Learn the mean of each column of ages, over the tokens that samples have."""
        if not any(coding.kind == "age" for coding in self.layout.codings):
            return
        totals: dict[str, tuple[float, int]] = {}
        for number in range(len(self._blocks)):
            for table, place in self._tables(number, self.layout.columns(), None):
                rows = split_rows(self.layout, table, place, tokens=self.tokens)
                for name, (total, count) in sums_of_ages(self.layout, rows).items():
                    before = totals.get(name, (0.0, 0))
                    totals[name] = (before[0] + total, before[1] + count)
        codings = []
        for coding in self.layout.codings:
            total, count = totals.get(coding.column, (0.0, 0))
            if coding.kind == "age" and count:
                coding = replace(coding, fill=total / count)
            codings.append(coding)
        self.layout = replace(self.layout, codings=tuple(codings))

    @property
    def target(self) -> Any:
        """The column of the target, or columns; None if there is none."""
        return dict(self.layout.options).get("target")

    def require(self, columns: Sequence[str], *, one_type: bool = False) -> None:
        """Raise unless every file has these columns, each once.

        And of the same type in all files if ``one_type``.
        """
        first = self._files[0].schema
        for path, file in zip(self.paths, self._files, strict=True):
            check_columns(file.schema, columns, None, path.name)
            for name in columns if one_type else ():
                kind = file.schema.field(name).type
                first_kind = first.field(name).type
                if kind != first_kind:
                    raise SchemaError(
                        f"column {name!r} must have one type: it is {first_kind} in "
                        f"{self.paths[0].name} and {kind} in {path.name}. Convert one of them."
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
        if self.layout.form == "tokens":
            return self._beginnings[number].n_sets
        file, block = self._blocks[number]
        return file.counts[block]

    def _tables(
        self, number: int, columns: Sequence[str], batch_size: int | None
    ) -> Iterator[tuple[pa.RecordBatch, Place]]:
        """Record batches of some columns of one row group, each with its place."""
        file, block = self._blocks[number]
        for batch, first in file.read(block, columns, batch_size):
            yield batch, Place(file.where(block), first)

    @cached_property
    def _beginnings(self) -> list[_Beginnings]:
        """Where sets begin, by a pass over their ids: rows of a set must follow each other."""
        name = str(self.layout.set_id)
        beginnings = []
        group_of_set: dict[Any, int] = {}
        last_id = None
        for number, (file, block) in enumerate(self._blocks):
            parts = []
            for batch, place in self._tables(number, [name], None):
                parts.append(set_ids(plain_column(batch.column(0)), name, place))
            if not parts:
                beginnings.append(_Beginnings(skip=0, n_sets=0))
                continue

            # rows up to the first id that differs from the last of the group before go on with it
            ids = np.concatenate(parts)
            is_another = np.ones(len(ids), dtype=bool) if last_id is None else ids != last_id
            skip = int(is_another.argmax()) if is_another.any() else len(ids)
            distinct = np.unique(ids[skip:]).tolist()
            last_id = ids[-1]
            for set_name in distinct:
                if set_name in group_of_set:
                    other_file, other_block = self._blocks[group_of_set[set_name]]
                    raise SchemaError(
                        "rows of a set must follow each other in a table that is read in parts: "
                        f"set {set_name!s:.40} is in {other_file.where(other_block)} and, after "
                        f"other sets, in {file.where(block)}. Sort the table by {name!r}, or read "
                        "it whole with kh.read_table."
                    )
                group_of_set[set_name] = number
            beginnings.append(_Beginnings(skip=skip, n_sets=len(distinct)))
        return beginnings

    def _token_rows(self, number: int, columns: Sequence[str]) -> tuple[pa.Table, Place]:
        """The rows of all sets that begin in a row group, also where they go on in the next."""
        beginnings = self._beginnings

        def rows_of(group: int, chosen: slice) -> pa.Table:
            batches = [batch for batch, _ in self._tables(group, columns, ALL_ROWS)]
            return pa.Table.from_batches(batches)[chosen]

        first = beginnings[number].skip
        pieces = [rows_of(number, slice(first, None))]
        for group in range(number + 1, len(beginnings)):
            if beginnings[group].skip:
                pieces.append(rows_of(group, slice(0, beginnings[group].skip)))
            if beginnings[group].n_sets:
                break
        file, block = self._blocks[number]
        return pa.concat_tables(pieces), Place(file.where(block), first)

    def read(
        self, number: int, copied: Sequence[str] = ()
    ) -> Iterator[tuple[Dataset, dict[str, Any]]]:
        """The samples of one row group, counted over all files, in batches.

        Each comes with some columns as they are.
        """
        columns = self.layout.columns(copied)
        if self.layout.form != "tokens":
            for table, place in self._tables(number, columns, self.batch_size):
                yield read_samples(self.layout, table, place, copied, self.tokens)
        elif self.rows(number):
            # the sets of the group are made together, and then cut into batches
            table, place = self._token_rows(number, columns)
            data, copies = read_samples(self.layout, table, place, copied)
            size = self.batch_size or rows_of_batch_bytes(len(data), table.nbytes)
            for start in range(0, len(data), size):
                copies_of_batch = {name: col.slice(start, size) for name, col in copies.items()}
                yield data[start : start + size], copies_of_batch

    def group(self, number: int) -> Iterator[Batch]:
        """The batches of one row group, counted over all files."""
        for data, _ in self.read(number):
            yield Batch(data.sets, data.target, data.weights)

    def whole(self) -> Dataset:
        """All of it as one data set; rows of a set need not be together."""
        tables = []
        for number in range(self.start, self.stop):
            for table, _ in self._tables(number, self.layout.columns(), ALL_ROWS):
                tables.append(table)
        if len(self.paths) == 1:
            name = self.paths[0].name
        else:
            name = f"{len(self.paths)} files"
        if not tables:
            raise ValueError(f"a table must have at least one row: {name} has none.")
        with reading(self.paths[0]):
            table = pa.Table.from_batches(tables)
        data, _ = read_samples(self.layout, table, Place(), tokens=self.tokens)

        # what was read, in words
        if self.layout.form == "tokens":
            words = f"{len(data)} sets of {table.num_rows} rows, one row per token"
        elif self.tokens is not None:
            words = (
                f"{len(data)} samples with {len(data.sets.sets.tokens)} tokens of a table of "
                f"{self.tokens.num_rows}"
            )
        else:
            words = f"{len(data)} rows, one row per set"

        # the split: by its own column, else by time, else that of the file
        split = data.split
        if split is None and data.time is not None:
            n_train = len(data) - int(NEWEST * len(data))
            oldest_first = np.argsort(data.time, kind="stable")
            split = np.zeros(len(data), dtype=np.int64)
            split[oldest_first[n_train:]] = 1
        elif split is None:
            split = self._files[0].split
        return replace(data, description=f"{name}: {words}", split=split)

    def __iter__(self) -> Iterator[Batch]:
        batches = chain.from_iterable(map(self.group, range(self.start, self.stop)))
        if thread_count() > 1:
            return _read_ahead(batches)
        return batches

    def parts(self, count: int | None = None) -> list[ParquetSets]:
        """Cut it into at most ``count`` runs of row groups, one row group each if None.

        None of them is empty.
        """
        filled = [i for i in range(self.n_groups) if self.rows(self.start + i)]
        if not filled:
            raise ValueError(
                f"there must be sets to share out: {self.paths[0].name!r} has no rows."
            )
        n_parts = len(filled)
        if count is not None:
            n_parts = min(check_count(count, "count"), n_parts)
        # each part begins with a row group that has rows; the first takes empty ones before it too
        places = np.linspace(0, len(filled), n_parts + 1).round().astype(int)
        inner_cuts = [filled[place] for place in places[1:-1]]
        return [self[first:last] for first, last in pairwise([0, *inner_cuts, self.n_groups])]

    def __getitem__(self, groups: slice) -> ParquetSets:
        """Some of its row groups: ``source[3:]`` goes on after the first three."""
        first, last, step = groups.indices(self.n_groups)
        if step != 1:
            raise ValueError(f"row groups are read in order: got a slice of step {step}.")
        part = object.__new__(ParquetSets)
        part.__dict__.update(
            self.__dict__, start=self.start + first, stop=self.start + max(first, last)
        )
        return part

    def labels(self) -> np.ndarray:
        """The distinct values of the target, read without the sets."""
        if len(self.layout.target) != 1:
            raise SchemaError(f"labels are in one column: `target` is {self.target!r}.")
        name = self.layout.target[0]
        distinct: list[np.ndarray] = []
        for number in range(self.start, self.stop):
            for table, place in self._tables(number, self.layout.target, self.batch_size):
                distinct.append(np.unique(labels(plain_column(table.column(0)), name, place)))
        if not distinct:
            raise SchemaError(f"labels are read from rows: {self.paths[0].name!r} has none.")
        return np.unique(np.concatenate(distinct))

    def __repr__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"ParquetSets({self.paths[0].name!r}{more}, row groups {self.start}:{self.stop})"


def _uses_of_columns(
    options: TableOptions,
    schema: Schema | None,
    paths: Sequence[Path],
    token_files: Sequence[Path],
    copied: Sequence[str],
) -> ColumnUses:
    """What the columns of a text file are read as, whatever their cells are.

    Ids, groups and columns that are copied are what is written. Weights, times and splits are no
    codes. What a schema says of keys, queries and extras holds for all tables that are read by it.
    """
    # the column that names the sets, in both tables if there are two
    headers = []
    for files in (paths, token_files):
        if files and is_text_file(files[0].name):
            with reading(files[0]):
                headers.append(column_names_of(files[0], files[0].name))
    id_column = options.set_id
    if id_column is None and headers:
        id_column = usual_set_id(headers[0], headers[-1])

    texts: set[str] = set()
    numbers = {str(name) for name in (options.weight, options.time, options.split) if name}
    if schema is not None:
        for names in (options.keys, options.query, options.extras):
            numbers.update(as_names(names, ()))
        texts = {c.column for c in schema.codings if c.kind in ("one-hot", "hashed")}
    ids = {str(name) for name in (id_column, options.groups) if name}
    ids.update(name for name in copied if name not in numbers)
    return ColumnUses(texts=texts - ids, ids=ids - texts, numbers=numbers - texts)


def _names_files(source: Any) -> TypeGuard[FilePath | Sequence[FilePath]]:
    """Whether a source is a path, or a list of paths."""
    if isinstance(source, (list, tuple)):
        return all(isinstance(path, (str, os.PathLike)) for path in source)
    return isinstance(source, (str, os.PathLike))


def _read_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, the next one read while this one is worked on.

    Decoding takes one core, and leaves the rest.
    """
    with ThreadPoolExecutor(1) as reader:
        following = reader.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = reader.submit(next, batches, None)
            yield batch


def read_table(
    source: Any,
    *,
    tokens: Any = None,
    keys: ColumnNames | None = None,
    query: ColumnNames | None = None,
    target: ColumnNames | None = None,
    extras: ColumnNames | None = None,
    weight: ColumnName | None = None,
    groups: ColumnName | None = None,
    time: ColumnName | None = None,
    split: ColumnName | None = None,
    reference_date: ColumnName | None = None,
    set_id: ColumnName | None = None,
    missing: str | None = None,
    dim: int | None = None,
) -> Dataset:
    r"""Read sets from a table or a file.

    Tables are those of pandas, polars or Arrow; files are Parquet, Arrow, CSV or npz. A *token* is
    one element of a set. A table has one of three forms:

    - one row per token (the only form of CSV): a column for the set, columns for the coordinates;
    - one row per set: keys in one column of lists of tokens, or in one column of lists per
      coordinate;
    - two tables: one row per token in ``tokens`` and one row per sample in ``source``, joined by
      ``set_id``.

    An npz file holds ``keys`` (n, N, d), or ``X`` (tokens, d) with ``ptr`` (n + 1), and ``y``.

    Text becomes numbers: a 0/1 coordinate for each category, or for more than 32 categories +1 or
    −1 at one of 32 coordinates, by a hash. Dates become days after the first one, or, with
    ``reference_date``, days before the date of their sample. Durations become seconds, and
    booleans 0 and 1.
    ``data.schema`` stores all of this, and reads other tables in the same way.

    CSV files are in UTF-8, and every cell is text: a column gets a type only if all its cells have
    it, and a whole number with a leading zero, such as 007, is text. Ids, groups and the column
    that joins two tables are the text that is written. A warning tells of a column that is the
    target, or a factor times it plus a number.

    Parameters
    ----------
    source : table, str or Path
        A table in memory, a file (its suffix tells the format), or a folder of Parquet files.
    tokens : table, str or Path, optional
        The table of tokens, if ``source`` has one row per sample. Samples may share an id, and
        then have the same tokens.
    keys : column name or names, optional
        Coordinates of a key. With one row per token, columns of numbers, text or dates. With one
        row per set, one column of lists of tokens, or one column of lists of numbers per
        coordinate. By default the column ``keys``, or all columns that serve no other purpose and
        do not look like an id, a time, a name or a split. Names in one string are separated by
        commas.
    query : column name or names, optional
        One column of lists, or one column per coordinate. By default the column ``query``; with
        one row per token, the rows whose column ``role`` says "query". Columns that have the same
        name in query and keys are paired (`SetBatch.pairs`).
    target : str or sequence of str, optional
        Columns of outputs or labels, () for none; by default the first of target, label, class, y.
        With one row per token it is the same in all rows of a set.
    extras : column name or names, optional
        Sample-level features: one column of lists, or one column each. By default the column of
        lists ``extras``. With one row per token they are the same in all rows of a set.
    weight : str, optional
        Column of sample weights.
    groups : str, optional
        Column that names the group of each sample, for ``fit(…, groups=data.groups)``.
    time : str, optional
        Column of dates or numbers. The newest fifth of the samples becomes ``data.test``.
    split : str, optional
        Column that says train or test, or 0 or 1, for every sample.
    reference_date : str, optional
        Column with the date of each sample. Dates of keys, query and extras then become ages: the
        days before it. A warning tells of later dates, whose age is negative. Give all these
        columns a time zone, or none.
    set_id : str, optional
        Column that says which set a row belongs to, with one row per token; by default the first
        of set, set_id, bag, bag_id, id, group. With one row per set it names the sets.
    missing : "error", "drop" or "impute", optional
        What to do with a missing value (NaN or an empty cell). "error", the default, refuses the
        table. "drop" leaves out a token that has one; a set without tokens gets one of zeros.
        "impute" fills in the mean of the column, and for text a category of its own. Missing
        targets are always refused.
    dim : int, optional
        Number of coordinates of a key, if one column of flat lists holds all keys of a set.

    Returns
    -------
    Dataset
        With ``sets``, ``target``, ``names`` and ``schema``. ``left_out`` lists columns that were
        not read, with the reason.

    See Also
    --------
    keyhole.data.ParquetSets : The same tables in batches, for files larger than memory.

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
    # a suffix that is none of ours is refused before anything is opened
    for table in (source, tokens):
        if not isinstance(table, (str, os.PathLike)):
            continue
        path = Path(table)
        if path.suffix.lower() not in SUFFIXES and not path.is_dir():
            raise ValueError(
                f"a table is read by its suffix, one of {', '.join(SUFFIXES)}: got {path.name!r}. "
                "Rename it, or convert it."
            )
    reader = ParquetSets(
        source,
        tokens=tokens,
        keys=keys,
        query=query,
        target=target,
        extras=extras,
        weight=weight,
        groups=groups,
        time=time,
        split=split,
        reference_date=reference_date,
        set_id=set_id,
        missing=missing,
        dim=dim,
    )
    data = reader.whole()
    warn_of_leaks(data)
    return data
