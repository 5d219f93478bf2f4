"""One reader of sets, for files and for tables in memory.

Whole by `read_table`, in parts by `ParquetSets`.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keyhole._array import MEMORY_BUDGET, thread_count
from keyhole._checks import LARGEST_COUNT, check_choice, check_count
from keyhole._files import refuse_special_file
from keyhole.data.batches import Batch
from keyhole.data.columns import (
    Place,
    SchemaError,
    Study,
    days,
    ids_alike,
    is_list,
    labels,
    one_piece,
    plain_values,
    reference_days,
    set_ids,
    unlisted,
)
from keyhole.data.layout import (
    PROBLEM,
    SET_NAMES,
    ColumnName,
    ColumnNames,
    Dataset,
    Layout,
    TableOptions,
    check_columns,
    check_names,
    names_as_text,
    warn_of_leaks,
)
from keyhole.data.npz import npz_table
from keyhole.data.schema import Coding, Schema
from keyhole.data.text_files import (
    ColumnUses,
    UnreadableFileError,
    column_names_of,
    is_text_file,
    read_texts,
    typed,
)

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".csv", ".tsv", ".npz")
BATCH_BYTES = 2**25  # bytes of a batch when nobody says how many rows it has
PROBED_ROWS = 256  # rows whose size in memory stands for that of the others
ALL_ROWS = 2**31  # a batch size that no row group exceeds
AGAIN = "fetch or write it again"
MISSING = ("error", "drop", "impute")
NEWEST = 0.2
"""Share of the samples, the newest, that is set apart for testing where a column says when they
were.
"""


class DataTable(Protocol):
    """A table of pandas, polars or Arrow."""

    @property
    def columns(self) -> Any:
        """Its columns, or their names."""


FilePath = str | os.PathLike[str]
TableSource = FilePath | Sequence[FilePath] | DataTable
"""Files, or a table in memory."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever Arrow says of a file that does not read into a ValueError that names the file.

    A file that is not there, or that we may not read, stays an OSError.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError, UnreadableFileError):
        raise
    # an OverflowError is a size in a damaged header that no integer of ours holds
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, OverflowError) as error:
        raise UnreadableFileError(
            f"{path.name!r} must be a table in the format of its suffix: it does not read "
            f"({str(error).strip()[:300]}). It is damaged or of another format; {AGAIN}."
        ) from None


def validated(data: Any, path: Path, *, full: bool = True) -> Any:
    """Return a table or record batch once every offset, length and text in it has been looked at.

    Offsets that lead nowhere are memory that is not ours, and Arrow follows them unless it is asked
    to look first. Numbers themselves are not touched, so the cost is that of the offsets; none of
    them is read if not ``full``, which is enough to count rows.
    """
    try:
        data.validate(full=full)
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(
            f"a table must hold together: {path.name!r} does not ({str(error).strip()[:200]}). It "
            f"is damaged; {AGAIN}."
        ) from None
    return data


def check_file_name(path: Path) -> None:
    """Raise unless the name of a file is text: Arrow opens no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"names of files must be text in UTF-8: got {path.name!r}. Rename it."
        ) from None


class _ParquetFile:
    """Row groups of a Parquet file.

    The footer is read once; readers are made anew: threads may not share one.
    """

    split = None

    def __init__(self, path: Path) -> None:
        with reading(path), pq.ParquetFile(path) as file:
            self.metadata = file.metadata
            self.schema = file.schema_arrow
            groups = range(self.metadata.num_row_groups)
            counts = [self.metadata.row_group(i).num_rows for i in groups]
            self.schema.names  # noqa: B018 - text, or an error
        self.path = path
        self.n_groups = len(counts)
        has_negative_count = min(counts, default=0) < 0
        if has_negative_count or sum(counts) != self.metadata.num_rows:
            raise self._rows_lost(path.name, self.metadata.num_rows, sum(counts))

    def where(self, group: int) -> str:
        return f"row group {group} of {self.path.name}"

    def rows(self, group: int) -> int:
        return int(self.metadata.row_group(group).num_rows)

    def _rows_of_a_batch(self, file: Any, group: int, columns: list[str]) -> int:
        """Rows that take `BATCH_BYTES` in memory, as the first ones do.

        Sizes in the footer say little, since a value repeated often takes next to nothing in the
        file. And Arrow ends the process where it is asked for the footer of a column that is
        damaged.
        """
        probes = file.iter_batches(
            PROBED_ROWS, row_groups=[group], columns=columns, use_threads=False
        )
        probe = next(probes, None)
        if probe is None or probe.num_rows == 0:
            return 1
        return _rows_of_batch_bytes(probe.num_rows, validated(probe, self.path).nbytes)

    def read(
        self, group: int, columns: list[str], batch_size: int | None
    ) -> Iterator[tuple[Any, int]]:
        """Record batches of one row group, each with its first row."""
        expected_rows = self.rows(group)
        rows_read = 0
        with ExitStack() as stack:
            # open the file and settle how many rows a batch has
            with reading(self.path):
                file = stack.enter_context(
                    pq.ParquetFile(self.path, memory_map=True, metadata=self.metadata)
                )
                if batch_size is None:
                    batch_size = self._rows_of_a_batch(file, group, columns)
                batch_size = min(batch_size, max(1, expected_rows))
                # Arrow gets no threads of its own: the arithmetic has them
                batches = file.iter_batches(
                    batch_size, row_groups=[group], columns=columns, use_threads=False
                )
            # `reading` guards the decoding alone: errors of whoever uses a batch are not the file's
            while True:
                with reading(self.path):
                    batch = next(batches, None)
                if batch is None:
                    break
                if batch.num_rows:
                    yield validated(batch, self.path), rows_read
                rows_read += batch.num_rows
        if rows_read != expected_rows:
            raise self._rows_lost(self.where(group), expected_rows, rows_read)

    def _rows_lost(self, where: str, stated_rows: int, counted_rows: int) -> ValueError:
        return ValueError(
            f"a table must hold together: {where} says that it has {stated_rows} rows, and "
            f"{counted_rows} are there. {self.path.name!r} is damaged; {AGAIN}."
        )


class _ArrowFile:
    """Record batches of an Arrow file or stream, or of a table.

    Files are memory-mapped; a table was read whole.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        groups: Callable[[int], Any],
        n_groups: int,
        name: str,
        split: np.ndarray | None = None,
    ) -> None:
        self.path = path
        self.schema = schema
        self._groups = groups
        self.n_groups = n_groups
        self._name = name
        self.split = split
        with reading(path):
            schema.names  # noqa: B018 - text, or an error

    @classmethod
    def file(cls, path: Path) -> _ArrowFile:
        with reading(path):
            file = pa.ipc.open_file(pa.memory_map(str(path)))
            return cls(
                path=path,
                schema=file.schema,
                groups=file.get_batch,
                n_groups=file.num_record_batches,
                name="record batch {} of {}",
            )

    @classmethod
    def stream(cls, path: Path) -> _ArrowFile:
        with reading(path):
            file = pa.ipc.open_stream(pa.memory_map(str(path)))
            batches = list(file)
        return cls(
            path=path,
            schema=file.schema,
            groups=batches.__getitem__,
            n_groups=len(batches),
            name="record batch {} of {}",
        )

    @classmethod
    def table(
        cls,
        path: Path,
        table: pa.Table,
        split: np.ndarray | None = None,
    ) -> _ArrowFile:
        """All rows are one group: they were read together."""
        with reading(path):
            columns = [one_piece(column) for column in table.columns]
            whole = pa.record_batch(columns, schema=table.schema)
        return cls(
            path=path,
            schema=table.schema,
            groups=[whole].__getitem__,
            n_groups=1,
            name="{1}",
            split=names_as_text(split),
        )

    def where(self, group: int) -> str:
        return self._name.format(group, self.path.name)

    def _group(self, number: int) -> Any:
        with reading(self.path):
            return self._groups(number)

    def rows(self, group: int) -> int:
        return int(validated(self._group(group), self.path, full=False).num_rows)

    def read(
        self, group: int, columns: list[str], batch_size: int | None
    ) -> Iterator[tuple[Any, int]]:
        """Record batches of one group, each with its first row."""
        table = self._group(group)
        with reading(self.path):
            table = table.select(columns)
        validated(table, self.path)
        if batch_size is None:
            batch_size = _rows_of_batch_bytes(table.num_rows, table.nbytes)
        for start in range(0, table.num_rows, batch_size):
            yield table.slice(start, batch_size), start


def _rows_of_batch_bytes(n_rows: int, n_bytes: int) -> int:
    """Rows that take `BATCH_BYTES`, where ``n_rows`` of them take ``n_bytes``; at least one."""
    return max(1, int(BATCH_BYTES * n_rows // max(1, n_bytes)))


class _ArrayNames(NamedTuple):
    """Which arrays of an npz file hold what; None where that is to be told by usual names."""

    keys: tuple[str, ...] | None = None
    query: tuple[str, ...] | None = None
    target: tuple[str, ...] | None = None
    extras: tuple[str, ...] | None = None

    @classmethod
    def of(cls, options: TableOptions) -> _ArrayNames:
        return cls(
            keys=_as_tuple(options.keys),
            query=_as_tuple(options.query),
            target=_as_tuple(options.target),
            extras=_as_tuple(options.extras),
        )


def _as_tuple(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Names of columns as a tuple; a text is one name."""
    if names is None:
        return None
    if isinstance(names, str):
        return (names,)
    return tuple(names)


def _open_all(
    paths: Sequence[Path], arrays: _ArrayNames, uses: ColumnUses
) -> list[_ParquetFile | _ArrowFile]:
    """Files by their suffix if their kind is read whole, else by their first bytes.

    The columns of text files have one type in all of them.
    """
    texts = {}
    for path in paths:
        if is_text_file(path.name):
            with reading(path):
                texts[path] = read_texts(path, path.name)
    tables = {}
    if texts:
        names = ", ".join(path.name for path in list(texts)[:3])
        tables = dict(zip(texts, typed(list(texts.values()), names, uses), strict=True))
    files: list[_ParquetFile | _ArrowFile] = []
    for path in paths:
        if path in tables:
            files.append(_ArrowFile.table(path, tables[path]))
        else:
            files.append(_open(path, arrays))
    return files


def _open(path: Path, arrays: _ArrayNames) -> _ParquetFile | _ArrowFile:
    """A file that is no text."""
    if path.suffix.lower() == ".npz":
        table, split = npz_table(path, arrays.keys, arrays.query, arrays.target, arrays.extras)
        return _ArrowFile.table(path, table, split)
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
        f"{path.name} must be a Parquet file or an Arrow file: it begins with {magic!r}. Convert "
        "it, for example with pandas: frame.to_parquet(path)."
    )


def table_in_memory(content: bytes, name: str, target: str | None = None) -> pa.Table:
    """The table in the bytes of a file.

    Nothing is opened. The first bytes say what the file is; of its name only the end of a TSV
    counts.
    """
    try:
        if content[:2] == b"PK":  # a zip archive, which npz is
            targets = (target,) if target else None
            path = Path(name or "the file")
            table, _ = npz_table(path, None, None, targets, content=content)
            return table
        if content[:4] == b"PAR1":
            table = pq.read_table(pa.BufferReader(content))
        elif content[:6] == b"ARROW1":
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        else:
            name = name or "the file"
            (table,) = typed([read_texts(content, name)], name, ColumnUses())
        table.validate(full=True)
        return table
    except UnreadableFileError:
        raise
    except (pa.ArrowException, ValueError, OSError) as error:
        words = str(error).strip()[:200]
        raise ValueError(
            f"a table must be CSV, TSV, Parquet, Arrow or npz: this one does not read ({words})."
        ) from None


def table_of(source: Any, what: str) -> pa.Table:
    """A table of pandas, polars or Arrow as one of Arrow, column by column.

    An index is no column.
    """
    import narwhals as nw

    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        return source

    # pandas may have a name twice, and names that are no text: its columns are numbered for
    # narwhals, and get their names back below
    is_pandas = hasattr(source, "set_axis") and hasattr(source, "columns")
    if is_pandas:
        names = [str(name) for name in source.columns]
        source = source.set_axis([str(i) for i in range(len(names))], axis=1)
    else:
        names = list(getattr(source, "columns", ()))
    try:
        frame = nw.from_native(source, eager_only=True)
    except TypeError:
        raise TypeError(
            f"`{what}` must be a path, or a table of pandas, polars or Arrow: got "
            f"{type(source).__name__}. Collect a lazy frame first, and make a table of anything "
            "else, for example with pandas.DataFrame."
        ) from None

    # a column that Arrow cannot hold becomes nulls with a note, and is refused only if it is read
    columns = []
    fields = []
    for name, frame_name in zip(names, frame.columns, strict=True):
        column, problem = _arrow_column(frame[frame_name])
        note = {PROBLEM: problem} if problem else None
        columns.append(column)
        fields.append(pa.field(name, column.type, metadata=note))
    return pa.table(columns, schema=pa.schema(fields))


def _arrow_column(series: Any) -> tuple[Any, str]:
    """A column of a frame, and "".

    Cells that are matrices become lists of their rows. Where Arrow cannot hold the cells, the
    column is one of nulls, and the text says why.
    """
    refusals = (pa.ArrowException, ValueError, TypeError, OverflowError)
    try:
        return series.to_arrow(), ""
    except refusals:
        cells = series.to_list()
    for i, cell in enumerate(cells):
        is_matrix = getattr(cell, "ndim", 0) == 2
        if is_matrix:
            cells[i] = list(cell)
    try:
        return pa.array(cells, from_pandas=True), ""
    except refusals as error:
        return pa.nulls(len(cells)), " ".join(str(error).split())[:150]


def _names_files(source: Any) -> TypeGuard[FilePath | Sequence[FilePath]]:
    """Whether a source is a path, or a list of paths."""
    if isinstance(source, (list, tuple)):
        return all(isinstance(path, (str, os.PathLike)) for path in source)
    return isinstance(source, (str, os.PathLike))


def _files(path: FilePath | Sequence[FilePath]) -> list[Path]:
    """The files that paths name, each checked; a folder stands for its Parquet files."""
    # one path or several; in a folder Parquet files alone count
    if isinstance(path, (str, os.PathLike)):
        paths = [Path(path)]
    else:
        paths = [Path(one) for one in path]
    files: list[Path] = []
    for one in paths:
        if one.is_dir():
            files.extend(sorted(one.glob("*.parquet")))
        else:
            files.append(one)
    if not files:
        raise FileNotFoundError(
            f"there is no Parquet file in {path}. Name a file, or a folder that has some."
        )
    # refuse in words what Arrow would refuse in its own, or wait for without end
    for file in files:
        check_file_name(file)
        if file.exists():
            refuse_special_file(file)
        if not file.is_file():
            raise FileNotFoundError(
                f"{file.name!r} is not there: no such file. Check the name and the folder."
            )
    return files


def _table_of_files(files: Sequence[_ParquetFile | _ArrowFile]) -> pa.Table:
    """Files as one table in memory."""
    batches = []
    for file in files:
        for group in range(file.n_groups):
            for batch, _ in file.read(group, file.schema.names, ALL_ROWS):
                batches.append(batch)
    with reading(files[0].path):
        return pa.Table.from_batches(batches, files[0].schema)


def _uses_of_columns(
    options: TableOptions, schema: Schema | None, id_column: str | None, copied: Sequence[str]
) -> ColumnUses:
    """What the columns of a text file are read as, whatever their cells are.

    Ids, groups and columns that are copied are what is written. Weights, times and splits are no
    codes. What a schema says of keys, queries and extras holds for all tables that are read by it.
    """
    texts: set[str] = set()
    numbers = {name for name in (options.weight, options.time, options.split) if name}
    if schema is not None:
        for names in (options.keys, options.query, options.extras):
            numbers.update(_as_tuple(names) or ())
        texts = {c.column for c in schema.codings if c.kind in ("one-hot", "hashed")}
    ids = {name for name in (id_column, options.groups) if name}
    ids.update(name for name in copied if name not in numbers)
    return ColumnUses(texts=texts - ids, ids=ids - texts, numbers=numbers - texts)


class _Beginnings(NamedTuple):
    """Where sets begin in the row groups of a table with one row per token.

    A set belongs to the row group it begins in. Each list has one entry per row group.
    """

    rows: list[int]
    """Rows of the group."""
    skip: list[int]
    """Its leading rows that belong to a set of an earlier group."""
    sets: list[int]
    """Sets that begin in it."""


@dataclass
class _GroupIds:
    """The ids of the sets of a table, row group by row group; see `_Beginnings`."""

    rows: list[int] = field(default_factory=list)
    skip: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    """Of each group the distinct ids after the skipped rows."""
    first_rows: list[tuple[int, int]] = field(default_factory=list)
    """Of each of these ids, group after group: its group, and its first row there."""
    last_id: Any = None

    def add(self, ids: np.ndarray) -> None:
        """Take in the ids of the rows of the next row group."""
        # rows up to the first id that differs from the last of the group before go on with its set
        if self.last_id is None:
            begins_another = np.ones(len(ids), dtype=bool)
        else:
            begins_another = ids != self.last_id
        skip = len(ids)
        if begins_another.any():
            skip = int(begins_another.argmax())
        distinct, positions = np.unique(ids[skip:], return_index=True)
        number = len(self.rows)
        self.rows.append(len(ids))
        self.skip.append(skip)
        if len(distinct):
            self.ids.append(distinct)
        self.first_rows.extend((number, skip + int(position)) for position in positions)
        if len(ids):
            self.last_id = ids[-1]

    def all_ids(self) -> np.ndarray:
        """The ids of all groups end to end, as in ``first_rows``."""
        return np.concatenate(self.ids) if self.ids else np.zeros(0)

    def sets_of_groups(self) -> list[int]:
        """How many sets begin in each group, if no set is interrupted."""
        groups = [group for group, _ in self.first_rows]
        return np.bincount(groups, minlength=len(self.rows)).tolist()


class ParquetSets:
    """Sets in Parquet, Arrow, CSV or npz files, in batches.

    ``for X, y in source`` goes through them; with ``weight`` it is ``for X, y, sample_weight in
    source``. Two batches are in memory, one of them being read.

    It can be gone through any number of times, cut into parts and sent to other processes: it holds
    names and numbers only. Parquet and Arrow files are read row group by row group; CSV and npz
    files are read whole.

    Parameters
    ----------
    path : path, sequence of paths, or table of pandas, polars or Arrow
        A folder stands for its ``*.parquet`` files. Arrow files (the IPC format, also called
        Feather) are memory-mapped, and their batches are views of them.
    tokens : path or table, optional
        A table with one row per token, where ``path`` has one row per sample. It is read whole.
    keys : column name or names, optional
        With one row per set, one column of lists of tokens (list<list<float>>,
        list<fixed_size_list<float>>, or flat lists and ``dim``), or one column of lists of numbers
        per coordinate. With one row per token, one column of numbers, text or dates per coordinate.
        By default the column ``keys``, or all columns (of lists, of numbers, of few texts) that
        serve no other purpose, but those that look like an id, a time or a split. Names in one
        string are parted by commas.
    query : column name or names, optional
        One column of lists, or one column of numbers per coordinate. By default the column
        ``query``; with one row per token, the rows whose column ``role`` says "query".
    target : str or sequence of str, optional
        Column or columns of outputs or labels, () for none; by default the first of target, label,
        class, y. With one row per token it is the same in all rows of a set.
    extras : column name or names, optional
        Sample-level features: one column of lists, or one column of numbers each. By default the
        column of lists ``extras``. With one row per token they are the same in all rows of a set.
    weight : str, optional
        Column of sample weights.
    groups : str, optional
        Column that names the group of each sample. Samples of one group are held out together:
        ``fit(…, groups=data.groups)``.
    time : str, optional
        Column that says when a sample was, in dates or numbers. The newest fifth is then the test
        part of the data.
    split : str, optional
        Column that says of every sample whether it is for training or for testing: train or test,
        or 0 or 1.
    reference_date : str, optional
        Column of dates, one for each sample: dates of keys, query and extras are then ages, the
        days before it, negative for later dates, of which a warning tells. Without it a date is
        the days after the first one of the table, which says little about samples of other
        times. Dates are keys unasked only with it. The column itself, if it is an extra, stays the
        days after the first one. Either all these columns have a time zone, or none has.
    set_id : str, optional
        With one row per token, which set a row belongs to; by default the first of set, set_id,
        bag, bag_id, id, group. Rows of a set follow each other where they are not in one row group.
    missing : "error", "drop" or "impute"
        What to do about a missing value (NaN or an empty cell). "error" refuses the table. "drop"
        drops a token that has one, gives a set without any token left one token of zeros, and
        refuses missing values of queries and extras. "impute" fills in a number or date by the
        mean over the rows of the table, and a text by a category of its own. Missing values in
        targets are always refused.
    dim : int, optional
        Coordinates of a key, for flat lists.
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
            keys=names_as_text(keys),
            query=names_as_text(query),
            target=names_as_text(target),
            extras=names_as_text(extras),
            set_id=names_as_text(set_id),
            missing=missing,
            dim=dim,
            weight=names_as_text(weight),
            groups=names_as_text(groups),
            time=names_as_text(time),
            split=split,
            reference_date=names_as_text(reference_date),
        )
        target = options.target
        target_is_of_schema = False
        if schema is not None:
            stored = dict(schema.columns)
            target_is_of_schema = target is None and "target" in stored
            options = _with_stored_options(options, stored)
        options = _checked_options(options)
        check_choice(unknown, "unknown", ("error", "ignore"))
        self.batch_size = _checked_size(batch_size, "batch_size")

        # the files, or one table in memory, which is held for good
        self._lasting: list[_ParquetFile | _ArrowFile] = []
        if _names_files(path):
            self.paths = _files(path)
        else:
            self.paths = [Path("the table")]
            self._lasting = [_ArrowFile.table(self.paths[0], table_of(path, "source"))]
        self._arrays = _ArrayNames.of(options)
        self._held: list[_ParquetFile | _ArrowFile] = []
        id_column = self._id_column(options, tokens)
        self._uses = _uses_of_columns(options, schema, id_column, copied)

        # the table of tokens, where there is one
        token_files: list[Path] = []
        self.tokens: pa.Table | None = None
        if isinstance(tokens, (str, os.PathLike)):
            token_files = _files(tokens)
            self.tokens = _table_of_files(_open_all(token_files, _ArrayNames(), self._uses))
        elif tokens is not None:
            self.tokens = table_of(tokens, "tokens")
        self.files = [] if self._lasting else [*self.paths, *token_files]

        # a table to predict for need not have the target yet
        first = self._file(0)
        if target_is_of_schema:
            columns = set(first.schema.names)
            if not set(self._arrays.target or ()) <= columns:
                options = replace(options, target=())

        # which column is what, and which row groups are read
        self._ends = np.cumsum([self._file(i).n_groups for i in range(len(self.paths))]).tolist()
        self.layout = Layout.of(
            first.schema, self._evidence, self.paths[0].name, options, self.tokens
        )
        n_groups: int = self._ends[-1]
        self.start = check_count(start, "start", minimum=0)
        self.stop = n_groups
        if stop is not None:
            self.stop = min(check_count(stop, "stop", minimum=0), n_groups)

        # all files must have the columns; then these are learned about, or read as in the schema
        self.require(self.layout.columns())
        if self.layout.set_id:
            self.require([self.layout.set_id], one_type=True)
        codings = self._learned() if schema is None else schema.codings
        self.layout = replace(self.layout, codings=codings, unknown=unknown)
        self.layout.check_ages(from_schema=schema is not None)

    def _learned(self) -> tuple[Coding, ...]:
        """How columns that are no plain numbers become such, by a pass over these columns."""
        token_schema = None if self.tokens is None else self.tokens.schema
        studies = self.layout.studies(self._file(0).schema, token_schema)
        impute = self.layout.missing == "impute"
        for study in studies:
            if study.kind == "age":
                # of ages there is nothing to learn but the mean that fills in missing ones
                if impute:
                    self._study_ages(study)
                continue
            for table, place in self._pieces_to_study(study.name):
                column = table.column(0)
                if is_list(column.type):
                    study.add(unlisted(column)[0], place, "lists of ")
                else:
                    study.add(column, place)
        return tuple(study.coding(impute=impute) for study in studies)

    def _study_ages(self, study: Study) -> None:
        """The sum and the number of all known ages of one column."""
        name = study.name
        reference = str(self.layout.reference_date)

        # dates in the table of samples, or of tokens that say the date of their sample themselves
        of_samples = name in {*self.layout.query, *self.layout.extras}
        if self.tokens is None or of_samples:
            for table, place in self._pieces([name, reference]):
                dates = plain_values(table.column(0))
                from_days = reference_days(plain_values(table.column(1)), reference, place)
                if is_list(dates.type):
                    dates, offsets = unlisted(dates)
                    from_days = np.repeat(from_days, np.diff(offsets))
                known_ages = _known(from_days - days(plain_values(dates)))
                study.add_sum(float(known_ages.sum()), len(known_ages))

        # dates in the table of tokens, each as often as samples have it
        if self.tokens is not None and name in self.layout.keys:
            self._study_ages_of_join(study, reference)

    def _study_ages_of_join(self, study: Study, reference: str) -> None:
        """The same for a table of tokens: Σ over samples s and their tokens t of (r_s − date_t)."""
        set_id = str(self.layout.set_id)
        assert self.tokens is not None

        # samples of each id: how many, and the sum of their reference dates
        id_parts = []
        day_parts = []
        for table, place in self._pieces([set_id, reference]):
            id_parts.append(set_ids(plain_values(table.column(0)), set_id, place))
            day_parts.append(reference_days(plain_values(table.column(1)), reference, place))
        ids, sample_of = np.unique(np.concatenate(id_parts), return_inverse=True)
        counts = np.bincount(sample_of)
        sums = np.bincount(sample_of, weights=np.concatenate(day_parts))

        # tokens whose date is known and whose id a sample has
        place = Place("the table of tokens")
        tokens = self.tokens.select([set_id, study.name])
        token_ids = set_ids(plain_values(one_piece(tokens.column(0))), set_id, place)
        ids, token_ids = ids_alike(ids, token_ids)
        in_days = days(plain_values(one_piece(tokens.column(1))))
        is_counted = np.isin(token_ids, ids) & np.isfinite(in_days)
        position = np.searchsorted(ids, token_ids[is_counted])
        total = sums[position].sum() - (counts[position] * in_days[is_counted]).sum()
        study.add_sum(float(total), int(counts[position].sum()))

    def _pieces_to_study(self, name: str) -> Iterator[tuple[Any, Place]]:
        """All record batches of one column: of the samples, of the tokens, or of both."""
        of_samples = name in {*self.layout.query, *self.layout.extras}
        if self.tokens is None or of_samples:
            yield from self._pieces([name])
        if self.tokens is not None and name in self.layout.keys:
            for batch in self.tokens.select([name]).to_batches():
                yield batch, Place("the table of tokens")

    def _pieces(self, columns: list[str]) -> Iterator[tuple[Any, Place]]:
        """Record batches of some columns of all row groups, whichever of them are to be read."""
        return chain.from_iterable(self._tables(i, columns, None) for i in range(self._ends[-1]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": []}

    def _file(self, which: int) -> _ParquetFile | _ArrowFile:
        if not self._held:
            self._held = self._lasting or _open_all(self.paths, self._arrays, self._uses)
        return self._held[which]

    def _id_column(self, options: TableOptions, tokens: Any) -> str | None:
        """The column of a text file that names the sets, as far as names tell."""
        if options.set_id is not None:
            return options.set_id
        names = self._names_of_text_file(self.paths[0])
        if isinstance(tokens, (str, os.PathLike)):
            names_of_tokens = self._names_of_text_file(Path(tokens))
            both = set(names) & set(names_of_tokens)
            names = [name for name in names or names_of_tokens if name in both or not both]
        return next((name for name in SET_NAMES if name in names), None)

    def _names_of_text_file(self, path: Path) -> list[str]:
        """The names of the columns of a text file; none of another kind of file."""
        if self._lasting or not is_text_file(path.name):
            return []
        with reading(path):
            return column_names_of(path, path.name)

    def _evidence(self, columns: list[str]) -> Iterator[Any]:
        """Record batches of some columns of all files, to say what the columns are.

        A file that lacks one of them, or has it twice, is passed over here: it is refused if the
        column is to be read.
        """
        for number in range(self._ends[-1]):
            which, _ = self._place(number)
            names = self._file(which).schema.names
            if all(names.count(column) == 1 for column in columns):
                for table, _ in self._tables(number, columns, None):
                    yield table

    @property
    def target(self) -> Any:
        """The column of the target, or columns; None if there is none."""
        return None if not self.layout.target else dict(self.layout.options)["target"]

    def require(self, columns: Sequence[str], *, one_type: bool = False) -> None:
        """Raise unless every file has these columns, each once.

        And of the same type in all files if ``one_type``.
        """
        first = self._file(0).schema
        for i, path in enumerate(self.paths):
            schema = self._file(i).schema
            check_columns(schema, columns, None, path.name)
            if not one_type:
                continue
            for name in columns:
                kind = schema.field(name).type
                first_kind = first.field(name).type
                if kind != first_kind:
                    raise SchemaError(
                        f"column {name!r} must have one type: it is {first_kind} in "
                        f"{self.paths[0].name} and {kind} in {path.name}. Convert one of them."
                    )

    @property
    def _by_token(self) -> bool:
        """Whether a row is a token, so that a set may go on in the next row group."""
        return not self.layout.has_lists and not self.layout.joined

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
        if self._by_token:
            return self._beginnings.sets[number]
        which, group = self._place(number)
        return self._file(which).rows(group)

    def _place(self, number: int) -> tuple[int, int]:
        """The file of a row group, and its number there."""
        which = bisect_right(self._ends, number)
        groups_before = self._ends[which - 1] if which else 0
        return which, number - groups_before

    def _where(self, number: int) -> str:
        """A row group in words, for messages."""
        which, group = self._place(number)
        return self._file(which).where(group)

    def _tables(
        self, number: int, columns: Sequence[str], batch_size: int | None
    ) -> Iterator[tuple[Any, Place]]:
        """Record batches of some columns of one row group, each with its place."""
        which, group = self._place(number)
        file = self._file(which)
        for table, first in file.read(group, list(columns), batch_size):
            yield table, Place(file.where(group), first)

    @cached_property
    def _beginnings(self) -> _Beginnings:
        """Where sets begin, by a pass over their ids.

        Rows of a set follow each other, or all fits into memory.
        """
        name = str(self.layout.set_id)
        groups = _GroupIds()
        for number in range(self._ends[-1]):
            parts = [
                set_ids(plain_values(table.column(name)), name, place)
                for table, place in self._tables(number, [name], None)
            ]
            groups.add(np.concatenate(parts) if parts else np.zeros(0))

        # an id that begins twice is a set with rows of other sets in between
        ids = groups.all_ids()
        order = np.argsort(ids, kind="stable")
        sorted_ids = ids[order]
        repeats = np.flatnonzero(sorted_ids[1:] == sorted_ids[:-1])
        if len(repeats) == 0:
            return _Beginnings(rows=groups.rows, skip=groups.skip, sets=groups.sets_of_groups())

        # such a table is read as one part, if it fits into memory
        n_bytes = 8 * sum(groups.rows) * len(self.layout.columns())
        if n_bytes > MEMORY_BUDGET:
            first_group, first_row = groups.first_rows[order[repeats[0]]]
            second_group, second_row = groups.first_rows[order[repeats[0] + 1]]
            raise SchemaError(
                f"rows of a set must follow each other in a table of {n_bytes:,} bytes, which is "
                f"read in parts: {Place(self._where(second_group)).row(second_row)} belongs to set "
                f"{sorted_ids[repeats[0]]!s:.40}, which began in "
                f"{Place(self._where(first_group)).row(first_row)}. Sort the table by {name!r}."
            )
        first = next(i for i, count in enumerate(groups.rows) if count)
        sets = [0] * len(groups.rows)
        sets[first] = len(np.unique(ids))
        skip = list(groups.rows)
        skip[first] = 0
        return _Beginnings(rows=groups.rows, skip=skip, sets=sets)

    def _token_rows(self, number: int, columns: Sequence[str]) -> tuple[Any, Place]:
        """The rows of all sets that begin in a row group, also where they go on in the next."""
        rows, skip, _ = self._beginnings

        def rows_of(group: int, chosen: slice) -> pa.Table:
            batches = [table for table, _ in self._tables(group, columns, rows[group] or 1)]
            return pa.Table.from_batches(batches)[chosen]

        pieces = [rows_of(number, slice(skip[number], None))]
        for group in range(number + 1, len(rows)):
            if skip[group]:
                pieces.append(rows_of(group, slice(0, skip[group])))
            another_set_begins = skip[group] < rows[group]
            if another_set_begins:
                break
        return pa.concat_tables(pieces), Place(self._where(number), skip[number])

    def read(
        self, number: int, copied: Sequence[str] = ()
    ) -> Iterator[tuple[Dataset, dict[str, Any]]]:
        """The samples of one row group, counted over all files, in batches.

        Each comes with some columns as they are.
        """
        columns = self.layout.columns(copied)
        if not self._by_token:
            for table, place in self._tables(number, columns, self.batch_size):
                yield self.layout.read(table, place, copied, self.tokens)
        elif self.rows(number):
            # the sets of the group are made together, and then cut into batches
            table, place = self._token_rows(number, columns)
            data, copies = self.layout.read(table, place, copied)
            size = self.batch_size or _rows_of_batch_bytes(len(data), table.nbytes)
            for start in range(0, len(data), size):
                copies_of_batch = {name: col.slice(start, size) for name, col in copies.items()}
                yield data[start : start + size], copies_of_batch

    def group(self, number: int) -> Iterator[Batch]:
        """The batches of one row group, counted over all files."""
        for data, _ in self.read(number):
            yield Batch(data.sets, data.target, data.weights)

    def whole(self) -> Dataset:
        """All of it as one data set; rows of a set need not be together."""
        # all rows as one table
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
        data, _ = self.layout.read(table, Place(), tokens=self.tokens)

        # what was read, in words
        if self._by_token:
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
            split = self._file(0).split
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
                distinct.append(np.unique(labels(table.column(0), name, place)))
        if not distinct:
            raise SchemaError(f"labels are read from rows: {self.paths[0].name!r} has none.")
        return np.unique(np.concatenate(distinct))

    def __repr__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"ParquetSets({self.paths[0].name!r}{more}, row groups {self.start}:{self.stop})"


def _with_stored_options(options: TableOptions, stored: dict[str, Any]) -> TableOptions:
    """Options, those that are None as a schema stored them."""

    def filled(value: Any, name: str) -> Any:
        if value is None:
            return stored.get(name)
        return value

    return replace(
        options,
        keys=filled(options.keys, "keys"),
        query=filled(options.query, "query"),
        target=filled(options.target, "target"),
        extras=filled(options.extras, "extras"),
        set_id=filled(options.set_id, "set_id"),
        missing=filled(options.missing, "missing"),
        dim=filled(options.dim, "dim"),
        reference_date=filled(options.reference_date, "reference_date"),
    )


def _checked_options(options: TableOptions) -> TableOptions:
    """Options that are known to be of their kind; missing values are an error by default."""
    check_names(options.keys, "keys")
    check_names(options.query, "query")
    check_names(options.extras, "extras")
    return replace(
        options,
        missing=check_choice(options.missing or "error", "missing", MISSING),
        dim=_checked_size(options.dim, "dim"),
    )


def _known(values: np.ndarray) -> np.ndarray:
    """The values that are not missing."""
    return values[np.isfinite(values)]


def _checked_size(size: int | None, name: str) -> int | None:
    if size is None:
        return None
    return check_count(size, name, maximum=LARGEST_COUNT)


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
    ``reference_date``, days before the date of their sample. Booleans become 0 and 1.
    ``data.schema`` stores all of this, and reads other tables in the same way.

    CSV files are in UTF-8. A column of whole numbers in a CSV file is text if any of them is
    written with a leading zero, such as 007: ids 007 and 7 are two sets.

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
        of set, set_id, bag, bag_id, id, group.
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
