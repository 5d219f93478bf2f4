"""One reader of sets, for files and for tables in memory.

Whole by `read_table`, in parts by `ParquetSets`.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from keyhole._array import MEMORY_BUDGET, thread_count
from keyhole._checks import LARGEST_COUNT, check_choice, check_count
from keyhole._files import refuse_special_file
from keyhole.data.batches import Batch
from keyhole.data.columns import (
    Place,
    SchemaError,
    is_list,
    labels,
    one_piece,
    plain_values,
    set_ids,
    unlisted,
)
from keyhole.data.layout import PROBLEM, Dataset, Layout, check_columns, check_names
from keyhole.data.npz import npz_table
from keyhole.data.schema import Coding, Schema

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".csv", ".tsv", ".npz")
BATCH_BYTES = 2**25  # bytes of a batch when nobody says how many rows it has
AGAIN = "fetch or write it again"
MISSING = ("error", "drop", "impute")
READ_OPTIONS = ("keys", "query", "target", "extras", "set_id", "missing", "dim")
"""Options that a schema has of the table it was learned from."""
NEWEST = 0.2
"""Share of the samples, the newest, that is set apart for testing where a column says when they
were.
"""


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
            counts = [
                self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)
            ]
            self.schema.names  # noqa: B018 - text, or an error
        self.path = path
        self.n_groups = len(counts)
        if min(counts, default=0) < 0 or sum(counts) != self.metadata.num_rows:
            raise self._rows_lost(path.name, self.metadata.num_rows, sum(counts))

    def where(self, group: int) -> str:
        return f"row group {group} of {self.path.name}"

    def rows(self, group: int) -> int:
        return int(self.metadata.row_group(group).num_rows)

    def _rows_of_a_batch(self, file: Any, group: int, columns: list[str]) -> int:
        """Rows that take `BATCH_BYTES` in memory, as the first ones do.

        Sizes in the footer say little, since a value repeated often takes next to nothing in the
        file; and Arrow ends the process where it is asked for the footer of a column that is
        damaged.
        """
        first = next(
            file.iter_batches(PROBED_ROWS, row_groups=[group], columns=columns, use_threads=False),
            None,
        )
        if first is None or first.num_rows == 0:
            return 1
        return int(BATCH_BYTES * first.num_rows // max(1, validated(first, self.path).nbytes))

    def read(
        self, group: int, columns: list[str], batch_size: int | None
    ) -> Iterator[tuple[Any, int]]:
        """Record batches of one row group, each with its first row."""
        expected = self.rows(group)
        seen = 0
        with ExitStack() as stack:
            with reading(self.path):
                file = stack.enter_context(
                    pq.ParquetFile(self.path, memory_map=True, metadata=self.metadata)
                )
                size = (
                    self._rows_of_a_batch(file, group, columns)
                    if batch_size is None
                    else batch_size
                )
                size = min(max(1, size), max(1, expected))
                # without threads of its own: the arithmetic has them
                batches = file.iter_batches(
                    size, row_groups=[group], columns=columns, use_threads=False
                )
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
            f"a table must hold together: {where} says that it has {said} rows, and {found} are "
            f"there. {self.path.name!r} is damaged; {AGAIN}."
        )


class _ArrowFile:
    """Record batches of an Arrow file or stream, or of a table.

    Files are memory-mapped; a table was read whole.
    """

    def __init__(
        self,
        path: Path,
        schema: pa.Schema,
        groups: Any,
        n_groups: int,
        name: str,
        split: Any = None,
    ) -> None:
        self.path, self.schema, self._groups, self.n_groups, self._name = (
            path,
            schema,
            groups,
            n_groups,
            name,
        )
        self.split = split
        with reading(path):
            schema.names  # noqa: B018 - text, or an error

    @classmethod
    def file(cls, path: Path) -> _ArrowFile:
        with reading(path):
            file = pa.ipc.open_file(pa.memory_map(str(path)))
            return cls(
                path, file.schema, file.get_batch, file.num_record_batches, "record batch {} of {}"
            )

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
            whole = pa.record_batch([one_piece(c) for c in table.columns], schema=table.schema)
        return cls(path, table.schema, [whole].__getitem__, 1, "{1}", split)

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
            batch_size = max(1, int(BATCH_BYTES * table.num_rows // max(1, table.nbytes)))
        for start in range(0, table.num_rows, batch_size):
            yield table.slice(start, batch_size), start


def _open(path: Path, keys: Any, query: Any, target: Any, extras: Any) -> _ParquetFile | _ArrowFile:
    """A file by its suffix if its kind is read whole, else by its first bytes."""
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return _ArrowFile.table(path, *npz_table(path, keys, query, target, extras))
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
        f"{path.name} must be a Parquet file or an Arrow file: it begins with {magic!r}. Convert "
        "it, for example with pandas: frame.to_parquet(path)."
    )


def table_in_memory(content: bytes, name: str, target: str | None = None) -> pa.Table:
    """The table in the bytes of a file.

    Nothing is opened, of its name only the end of a TSV counts.
    """
    try:
        if content[:2] == b"PK":
            return npz_table(
                Path(name or "the file"), None, None, target and (target,), content=content
            )[0]
        if content[:4] == b"PAR1":
            table = pq.read_table(pa.BufferReader(content))
        elif content[:6] == b"ARROW1":
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        else:
            options = csv.ParseOptions(delimiter="\t" if name.lower().endswith(".tsv") else ",")
            table = csv.read_csv(pa.BufferReader(content), parse_options=options)
        table.validate(full=True)
        return table
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
    if hasattr(
        source, "set_axis"
    ):  # pandas may have names twice, and names that are no text: they stand aside
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
    columns = [_arrow_column(frame[column]) for column in frame.columns]
    notes = [{PROBLEM: problem} if problem else None for _, problem in columns]
    fields = [
        pa.field(n, c.type, metadata=note)
        for n, (c, _), note in zip(names, columns, notes, strict=True)
    ]
    return pa.table([column for column, _ in columns], schema=pa.schema(fields))


def _arrow_column(series: Any) -> tuple[Any, str]:
    """A column of a frame, cells that are matrices being lists of their rows.

    Or nulls, and what is the matter.
    """
    try:
        return series.to_arrow(), ""
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        cells = [list(cell) if getattr(cell, "ndim", 0) == 2 else cell for cell in series.to_list()]
    try:
        return pa.array(cells, from_pandas=True), ""
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        return pa.nulls(len(cells)), " ".join(str(error).split())[:150]


def _files(path: Any) -> list[Path]:
    paths = [Path(path)] if isinstance(path, (str, os.PathLike)) else [Path(p) for p in path]
    found = [file for p in paths for file in (sorted(p.glob("*.parquet")) if p.is_dir() else [p])]
    if not found:
        raise FileNotFoundError(f"there is no Parquet file in {path}.")
    for file in found:
        check_file_name(file)
        if file.exists():
            refuse_special_file(file)
        if not file.is_file():
            raise FileNotFoundError(f"{file.name!r} is not there: no such file.")
    return found


def _table_of_files(paths: Sequence[Path]) -> pa.Table:
    """Files as one table in memory."""
    files = [_open(path, None, None, None, None) for path in paths]
    read = [
        t
        for f in files
        for group in range(f.n_groups)
        for t, _ in f.read(group, f.schema.names, 2**31)
    ]
    with reading(paths[0]):
        return pa.Table.from_batches(read, files[0].schema)


class _Beginnings(NamedTuple):
    """Where sets begin in the groups of a table with one row per token.

    A set belongs to the group it begins in.

    For each group its ``rows``, the leading ones to ``skip``, of a set of an earlier group, and the
    ``sets`` that begin.
    """

    rows: list[int]
    skip: list[int]
    sets: list[int]


class ParquetSets:
    """Sets in Parquet, Arrow, CSV or npz files, in batches.

    Two batches are in memory, one of them being read.

    It can be gone through any number of times, cut into parts and sent to other processes: it holds
    names and numbers only. Parquet and Arrow files are read row group by row group; CSV and npz
    files are read whole.

    Parameters
    ----------
    path : path, sequence of paths, or table of pandas, polars or Arrow
        A folder stands for its ``*.parquet`` files. Arrow files (the IPC format, also called
        Feather) are memory-mapped, and their batches are views of them.
    tokens : path or table, optional
        A table with one row per token, where ``path`` has one row per sample; it is read whole.
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
        Columns of the sample itself: one column of lists, or one column of numbers each; by default
        the column of lists ``extras``. With one row per token they are the same in all rows of a
        set.
    weight : str, optional
        Column of sample weights.
    groups : str, optional
        Column that names siblings among samples, to be left out together:
        ``fit(…, groups=data.groups)``.
    time : str, optional
        Column that says when a sample was, in dates or numbers. The newest fifth is then the test
        part of the data.
    split : str, optional
        Column that says of every sample whether it is for training or for testing: train or test,
        or 0 or 1.
    set_id : str, optional
        With one row per token, which set a row belongs to; by default the first of set, set_id,
        bag, bag_id, id, group. Rows of a set follow each other where they are not in one row group.
    missing : "error", "drop" or "impute"
        What to do about a gap (NaN or nothing): refuse the table; drop a token that has one, a set
        without any token left getting one of zeros, and refuse gaps of queries and extras; or fill
        it, a number or date by the mean over the rows of the table and a text by a category of its
        own. Gaps in targets are always refused.
    dim : int, optional
        Coordinates of a key, for flat lists.
    schema : Schema, optional
        What was learned about another table, to read this one in the same way: all options that are
        not given.
    unknown : "error" or "ignore"
        With a schema, what becomes of a category that it does not know: refused, or none of those
        it knows.
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
        tokens: Any = None,
        keys: str | Sequence[str] | None = None,
        query: str | Sequence[str] | None = None,
        target: str | Sequence[str] | None = None,
        extras: str | Sequence[str] | None = None,
        weight: str | None = None,
        groups: str | None = None,
        time: str | None = None,
        split: str | None = None,
        set_id: str | None = None,
        missing: str | None = None,
        dim: int | None = None,
        schema: Schema | None = None,
        unknown: str = "error",
        batch_size: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        named: dict[str, Any] = {"keys": keys, "query": query, "target": target, "extras": extras}
        named |= {"set_id": set_id, "missing": missing, "dim": dim}
        known = (
            {}
            if schema is None
            else {k: v for k, v in schema.columns if k in READ_OPTIONS and named[k] is None}
        )
        named |= known
        named["missing"] = check_choice(named["missing"] or "error", "missing", MISSING)
        check_choice(unknown, "unknown", ("error", "ignore"))
        for option in ("keys", "query", "extras"):
            check_names(named[option], option)
        named["dim"] = (
            None
            if named["dim"] is None
            else check_count(named["dim"], "dim", maximum=LARGEST_COUNT)
        )
        self.batch_size = (
            None
            if batch_size is None
            else check_count(batch_size, "batch_size", maximum=LARGEST_COUNT)
        )
        self._lasting: list[_ParquetFile | _ArrowFile] = []
        if isinstance(path, (str, os.PathLike, list, tuple)):
            self.paths = _files(path)
        else:
            self.paths = [Path("the table")]
            self._lasting = [_ArrowFile.table(self.paths[0], table_of(path, "source"))]
        arrays = {k: named[k] for k in ("keys", "query", "target", "extras")}
        self._arrays = {
            k: (v,) if isinstance(v, str) else None if v is None else tuple(v)
            for k, v in arrays.items()
        }
        self._held: list[_ParquetFile | _ArrowFile] = []
        beside = _files(tokens) if isinstance(tokens, (str, os.PathLike)) else []
        if tokens is not None:
            tokens = _table_of_files(beside) if beside else table_of(tokens, "tokens")
        self.tokens: pa.Table | None = tokens
        self.files = [] if self._lasting else [*self.paths, *beside]
        first = self._file(0)
        if "target" in known and not set(self._arrays["target"] or ()) <= set(first.schema.names):
            named["target"] = ()  # what is to be predicted is not known yet
        named |= {"weight": weight, "groups": groups, "time": time, "split": split}
        self._ends = np.cumsum([self._file(i).n_groups for i in range(len(self.paths))]).tolist()
        self.layout = Layout.of(first.schema, self._evidence, self.paths[0].name, named, tokens)
        every: int = self._ends[-1]
        self.start = check_count(start, "start", minimum=0)
        self.stop = every if stop is None else min(check_count(stop, "stop", minimum=0), every)
        self.require(self.layout.columns())
        self.require([self.layout.set_id] if self.layout.set_id else [], one_type=True)
        codings = self._learned() if schema is None else schema.codings
        self.layout = replace(self.layout, codings=codings, unknown=unknown)

    def _learned(self) -> tuple[Coding, ...]:
        """How columns that are no plain numbers become such, by a pass over these columns."""
        tokens = self.tokens
        studies = self.layout.studies(
            self._file(0).schema, None if tokens is None else tokens.schema
        )
        keys = set(self.layout.keys)
        for study in studies:
            own = tokens is None or study.name in {*self.layout.query, *self.layout.extras}
            pieces = self._pieces([study.name]) if own else iter(())
            if tokens is not None and study.name in keys:
                there = Place("the table of tokens")
                pieces = chain(
                    pieces, ((piece, there) for piece in tokens.select([study.name]).to_batches())
                )
            for table, place in pieces:
                column = table.column(0)
                lists = is_list(column.type)
                study.add(
                    unlisted(column)[0] if lists else column, place, "lists of " if lists else ""
                )
        return tuple(study.coding(impute=self.layout.missing == "impute") for study in studies)

    def _pieces(self, columns: list[str]) -> Iterator[tuple[Any, Place]]:
        """Record batches of some columns of all row groups, whichever of them are to be read."""
        return chain.from_iterable(self._tables(i, columns, None) for i in range(self._ends[-1]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": []}

    def _file(self, which: int) -> _ParquetFile | _ArrowFile:
        if not self._held:
            self._held = self._lasting or [_open(path, **self._arrays) for path in self.paths]
        return self._held[which]

    def _evidence(self, columns: list[str]) -> Iterator[Any]:
        """Record batches of some columns of all files, to say what the columns are.

        A file that lacks one of them, or has it twice, is passed over here: it is refused if the
        column is to be read.
        """
        for number in range(self._ends[-1]):
            which, _ = self._place(number)
            names = self._file(which).schema.names
            if all(names.count(column) == 1 for column in columns):
                yield from (table for table, _ in self._tables(number, columns, None))

    @property
    def target(self) -> Any:
        """The column of the target, or columns; None if there is none."""
        return None if not self.layout.target else dict(self.layout.options)["target"]

    def require(self, columns: Sequence[str], *, one_type: bool = False) -> None:
        """Raise unless every file has these columns, each once.

        And of the same type in all files if asked.
        """
        first = self._file(0).schema
        for i, file in enumerate(self.paths):
            schema = self._file(i).schema
            check_columns(schema, columns, None, file.name)
            for name in columns if one_type else ():
                found, wanted = schema.field(name).type, first.field(name).type
                if found != wanted:
                    raise SchemaError(
                        f"column {name!r} must have one type: it is {wanted} in "
                        f"{self.paths[0].name} and {found} in {file.name}. Convert one of them."
                    )

    @property
    def _by_token(self) -> bool:
        """Whether a row is a token, so that a set may go on in the next row group."""
        return self.layout.set_id is not None and not self.layout.joined

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
        return which, number - (self._ends[which - 1] if which else 0)

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
        rows, skip, seen, begin, last = [], [], [], [], None
        for number in range(self._ends[-1]):
            pieces = self._tables(number, [name], None)
            parts = [set_ids(plain_values(t.column(name)), name, place) for t, place in pieces]
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
                names = [
                    self._file(self._place(g)[0]).where(self._place(g)[1]) for g, _ in (one, two)
                ]
                raise SchemaError(
                    f"rows of a set must follow each other in a table of {size:,} bytes, which is "
                    f"read in parts: {Place(names[1]).row(two[1])} belongs to set "
                    f"{every[order[again[0]]]!s:.40}, which began in "
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
            table, place = self._token_rows(number, columns)
            data, more = self.layout.read(table, place, copied)
            size = self.batch_size or max(1, BATCH_BYTES * len(data) // max(1, table.nbytes))
            for start in range(0, len(data), size):
                yield (
                    data[start : start + size],
                    {name: c.slice(start, size) for name, c in more.items()},
                )

    def group(self, number: int) -> Iterator[Batch]:
        """The batches of one row group, counted over all files."""
        for data, _ in self.read(number):
            yield Batch(data.sets, data.target, data.weights)

    def whole(self) -> Dataset:
        """All of it as one data set; rows of a set need not be together."""
        tables = [
            t
            for i in range(self.start, self.stop)
            for t, _ in self._tables(i, self.layout.columns(), 2**31)
        ]
        name = self.paths[0].name if len(self.paths) == 1 else f"{len(self.paths)} files"
        if not tables:
            raise ValueError(f"a table must have at least one row: {name} has none.")
        with reading(self.paths[0]):
            table = pa.Table.from_batches(tables)
        data, _ = self.layout.read(table, Place(), tokens=self.tokens)
        words = f"{len(data)} rows, one row per set"
        if self._by_token:
            words = f"{len(data)} sets of {table.num_rows} rows, one row per token"
        elif self.tokens is not None:
            words = (
                f"{len(data)} samples with {len(data.sets.sets.tokens)} tokens of a table of "
                f"{self.tokens.num_rows}"
            )
        split = self._file(0).split if data.split is None else data.split
        if data.time is not None and data.split is None:
            split = np.zeros(len(data), dtype=np.int64)
            split[np.argsort(data.time, kind="stable")[len(data) - int(NEWEST * len(data)) :]] = 1
        return replace(data, description=f"{name}: {words}", split=split)

    def __iter__(self) -> Iterator[Batch]:
        batches = (batch for part in range(self.start, self.stop) for batch in self.group(part))
        return _read_ahead(batches) if thread_count() > 1 else batches

    def parts(self, count: int | None = None) -> list[ParquetSets]:
        """Cut it into at most ``count`` runs of row groups, one row group each if None.

        None of them is empty.
        """
        filled = [i for i in range(self.n_groups) if self.rows(self.start + i)]
        if not filled:
            raise ValueError(
                f"there must be sets to share out: {self.paths[0].name!r} has no rows."
            )
        count = len(filled) if count is None else min(check_count(count, "count"), len(filled))
        cuts = [filled[i] for i in np.linspace(0, len(filled), count + 1).round().astype(int)[:-1]]
        return [self[a:b] for a, b in pairwise([0, *cuts[1:], self.n_groups])]

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
        found: list[np.ndarray] = []
        for number in range(self.start, self.stop):
            tables = self._tables(number, self.layout.target, self.batch_size)
            found += [
                np.unique(labels(t.column(0), self.layout.target[0], place)) for t, place in tables
            ]
        if not found:
            raise SchemaError(f"labels are read from rows: {self.paths[0].name!r} has none.")
        return np.unique(np.concatenate(found))

    def __repr__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"ParquetSets({self.paths[0].name!r}{more}, row groups {self.start}:{self.stop})"


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
    keys: str | Sequence[str] | None = None,
    query: str | Sequence[str] | None = None,
    target: str | Sequence[str] | None = None,
    extras: str | Sequence[str] | None = None,
    groups: str | None = None,
    time: str | None = None,
    split: str | None = None,
    set_id: str | None = None,
    missing: str | None = None,
    dim: int | None = None,
) -> Dataset:
    r"""Read sets from a table or a file.

    Tables are those of pandas, polars or Arrow; files are Parquet, Arrow, CSV or npz.

    One row per set: keys in one column of lists of tokens, or in one column of lists per
    coordinate. One row per token (the only form of CSV): a column for the set, columns for the
    coordinates. Two tables: one row per token in ``tokens`` and one row per sample in ``source``,
    joined by ``set_id``. In npz: ``keys`` (n, N, d), or ``X`` (tokens, d) with ``ptr`` (n + 1), and
    ``y``.

    Text becomes numbers: a coordinate for each category, up to 32 of them, and a place that a hash
    names for more; dates become days after the first one, booleans 0 and 1. What was learned so is
    ``data.schema``, which reads other tables the same way. Columns of one name in query and keys
    are paired (`SetBatch.pairs`).

    Parameters
    ----------
    source : table, str or Path
        A table in memory; a file, its format told by the suffix; or a folder of Parquet files.
    tokens : table, str or Path, optional
        The tokens, where ``source`` has one row per sample. A sample has the tokens of its id, also
        where other samples have the same.
    keys, query, target, extras, groups, time, split, set_id, missing, dim
        As in `keyhole.data.ParquetSets`, which reads the same tables in parts.

    Returns
    -------
    Dataset
        With ``sets``, ``target``, ``names`` and ``schema``; ``left_out`` says what was not read,
        and why.

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
    for given in (source, tokens):
        path = Path(given) if isinstance(given, (str, os.PathLike)) else None
        if path is not None and path.suffix.lower() not in SUFFIXES and not path.is_dir():
            raise ValueError(
                f"a table is read by its suffix, one of {', '.join(SUFFIXES)}: got {path.name!r}. "
                "Rename it, or convert it."
            )
    named: dict[str, Any] = {
        "keys": keys,
        "query": query,
        "target": target,
        "extras": extras,
        "set_id": set_id,
    }
    named |= {"groups": groups, "time": time, "split": split, "missing": missing, "dim": dim}
    return ParquetSets(source, tokens=tokens, **named).whole()


PROBED_ROWS = 256  # rows whose size in memory stands for that of the others
