"""Parquet and Arrow files as batches of sets, row group by row group; and the way back."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from keyhole._array import thread_count
from keyhole._checks import check_count
from keyhole.sets import SetBatch
from keyhole.sources.arrow import AGAIN, check_file_name, column_names, reading, validated
from keyhole.sources.batch import Batch, as_batch
from keyhole.sources.columns import SchemaError, labels_of, matrix_of, sets_of

BATCH_BYTES = 2**25
"""Bytes of a batch when nobody says how many rows it has."""


class ParquetSets:
    """Sets in Parquet or Arrow files, read row group by row group: two batches of them are in memory, one being read.

    It can be gone through any number of times, cut into parts and sent to other processes: it holds names and
    numbers only.

    Parameters
    ----------
    path : path, folder of ``*.parquet`` files, or sequence of paths
        Arrow files (the IPC format, also called Feather) are memory-mapped, and their batches are views of them.
    keys : str
        Column of the sets: list<list<float>>, list<fixed_size_list<float>>, or flat lists and ``dim``.
    query : str, optional
        Column of queries, one vector per row; by default "query" if the files have it.
    target : str or sequence of str, optional
        Column or columns of outputs or labels, () for none; by default "y" if the files have it.
    weight : str, optional
        Column of sample weights.
    dim : int, optional
        Coordinates of a key, for flat lists.
    batch_size : int, optional
        Rows of a batch; by default as many as take some 32 MiB.
    start, stop : int, optional
        First row group to read, and the one to stop before: to resume, or to read a part.

    Examples
    --------
    >>> import tempfile, keyhole as kh
    >>> from pathlib import Path
    >>> sets = kh.targets.sphere_sets(100, n_keys=4, dim=3, seed=0)
    >>> path = Path(tempfile.mkdtemp()) / "sets.parquet"
    >>> write_parquet(path, [(sets, sets.query[:, 0])], row_group_size=40)
    100
    >>> source = ParquetSets(path)
    >>> [len(batch.sets) for batch in source], source.n_rows
    ([40, 40, 20], 100)
    """

    def __init__(
        self,
        path: Any,
        *,
        keys: str = "keys",
        query: str | None = None,
        target: str | Sequence[str] | None = None,
        weight: str | None = None,
        dim: int | None = None,
        batch_size: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self.paths = _files(path)
        self.keys = keys
        names = _open(self.paths[0]).schema.names
        self.query = query if query is not None else ("query" if "query" in names else None)
        self.target = target if target is not None else ("y" if "y" in names else None)
        self.weight = weight
        self.dim = None if dim is None else check_count(dim, "dim")
        self.batch_size = None if batch_size is None else check_count(batch_size, "batch_size")
        self._ends = np.cumsum([_open(file).n_groups for file in self.paths]).tolist()
        groups = self._ends[-1]
        self.start = check_count(start, "start", minimum=0)
        self.stop = groups if stop is None else min(check_count(stop, "stop", minimum=0), groups)
        self.require(self.columns())

    def require(self, columns: Sequence[str], *, one_type: bool = False) -> None:
        """Raise unless every file has these columns, each once, and of the same type in all files if asked."""
        first = _open(self.paths[0]).schema
        for file in self.paths:
            schema = _open(file).schema
            for name in columns:
                _check_column(schema.names, name, file)
                found, wanted = schema.field(name).type, first.field(name).type
                if one_type and found != wanted:
                    raise SchemaError(
                        f"column {name!r} must have one type: it is {wanted} in {self.paths[0].name} and {found} in "
                        f"{file.name}. Convert one of them."
                    )

    def columns(self, more: Sequence[str] = ()) -> list[str]:
        """Names of the columns it reads, and of some more."""
        targets = [] if self.target is None else [self.target] if isinstance(self.target, str) else list(self.target)
        every = [
            self.keys,
            *([] if self.query is None else [self.query]),
            *targets,
            *filter(None, [self.weight]),
            *more,
        ]
        return list(dict.fromkeys(every))

    @property
    def n_groups(self) -> int:
        """Row groups it reads."""
        return max(0, self.stop - self.start)

    @property
    def n_rows(self) -> int:
        """Rows of all of them, from the footers of the files."""
        return sum(map(self.rows, range(self.start, self.stop)))

    def rows(self, number: int) -> int:
        """Rows of one row group, counted over all files."""
        file, group = self._place(number)
        return _open(file).rows(group)

    def _place(self, number: int) -> tuple[Path, int]:
        """The file of a row group, and its number there."""
        which = bisect_right(self._ends, number)
        return self.paths[which], number - (self._ends[which - 1] if which else 0)

    def __iter__(self) -> Iterator[Batch]:
        batches = (batch for part in range(self.start, self.stop) for batch in self.group(part))
        return _read_ahead(batches) if thread_count() > 1 else batches

    def group(self, number: int) -> Iterator[Batch]:
        """The batches of one row group, counted over all files."""
        for table, where in self.tables(number, self.columns()):
            yield self.batch(table, where)

    def tables(self, number: int, columns: Sequence[str]) -> Iterator[tuple[Any, str]]:
        """Record batches of some columns of one row group, each with words for where it is."""
        file, group = self._place(number)
        yield from _open(file).read(group, list(columns), self.batch_size)

    def parts(self, count: int | None = None) -> list[ParquetSets]:
        """Cut it into at most ``count`` runs of row groups, one row group each if None."""
        count = self.n_groups if count is None else min(check_count(count, "count"), self.n_groups)
        cuts = np.linspace(0, self.n_groups, count + 1).round().astype(int)
        return [self[a:b] for a, b in pairwise(cuts.tolist())]

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
        if not isinstance(self.target, str):
            raise SchemaError(f"labels are in one column: `target` is {self.target!r}.")
        found: list[np.ndarray] = []
        for number in range(self.start, self.stop):
            found += [np.unique(labels_of(t, self.target, where)) for t, where in self.tables(number, [self.target])]
        return np.unique(np.concatenate(found))

    def batch(self, table: Any, where: str) -> Batch:
        """A record batch as samples; ``where`` names it in errors."""
        import pyarrow as pa

        try:
            return self._batch(table, where)
        except SchemaError:
            raise
        except pa.ArrowException as error:
            raise SchemaError(f"the columns of {where} must read as sets: {str(error)[:300]}.") from None

    def _batch(self, table: Any, where: str) -> Batch:
        sets = sets_of(table, self.keys, self.query, self.dim, where)
        y = None
        if isinstance(self.target, str):
            y = labels_of(table, self.target, where)
        elif self.target:
            y = np.concatenate([matrix_of(table, name, where) for name in self.target], axis=1)
        weights = None if self.weight is None else matrix_of(table, self.weight, where)[:, 0]
        return Batch(sets, y, weights)

    def __repr__(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        return f"ParquetSets({self.paths[0].name!r}{more}, row groups {self.start}:{self.stop})"


def _check_column(names: list[str], name: str, file: Path) -> None:
    count = names.count(name)
    if count == 0:
        raise SchemaError(
            f"there is no column {name!r} in {file.name}: it has {', '.join(names[:30])}. Name the columns to read: "
            "ParquetSets(path, keys=…, query=…, target=…)."
        )
    if count > 1:
        raise SchemaError(
            f"a column that is read must have a name of its own: column {name!r} is there {count} times in "
            f"{file.name}. Rename all but one of them."
        )


def _read_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, the next one read while this one is worked on: decoding takes one core, and leaves the rest."""
    with ThreadPoolExecutor(1) as reader:
        following = reader.submit(next, batches, None)
        while (batch := following.result()) is not None:
            following = reader.submit(next, batches, None)
            yield batch


class _ParquetFile:
    """Row groups of a Parquet file. The footer is read once; readers are made anew: threads may not share one."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet as pq

        with reading(path), pq.ParquetFile(path) as file:
            self.metadata = file.metadata
            self.schema = file.schema_arrow
            counts = [self.metadata.row_group(i).num_rows for i in range(self.metadata.num_row_groups)]
        column_names(self.schema, path)
        self.path = path
        self.n_groups = len(counts)
        if min(counts, default=0) < 0 or sum(counts) != self.metadata.num_rows:
            raise _rows_lost(path.name, self.metadata.num_rows, sum(counts), path)

    def rows(self, group: int) -> int:
        return int(self.metadata.row_group(group).num_rows)

    def read(self, group: int, columns: list[str], batch_size: int | None) -> Iterator[tuple[Any, str]]:
        import pyarrow.parquet as pq

        info = self.metadata.row_group(group)
        if batch_size is None:
            batch_size = int(BATCH_BYTES * info.num_rows // max(1, info.total_byte_size))
        batch_size = min(max(1, batch_size), max(1, info.num_rows))
        where = f"row group {group} of {self.path.name}"
        seen = 0
        with ExitStack() as stack:
            with reading(self.path):
                file = stack.enter_context(pq.ParquetFile(self.path, memory_map=True, metadata=self.metadata))
                # without threads of its own: the arithmetic has them
                batches = file.iter_batches(batch_size, row_groups=[group], columns=columns, use_threads=False)
            while True:
                with reading(self.path):
                    table = next(batches, None)
                if table is None:
                    break
                seen += table.num_rows
                if table.num_rows:
                    yield validated(table, self.path), where
        if seen != info.num_rows:
            raise _rows_lost(where, info.num_rows, seen, self.path)


def _rows_lost(where: str, said: int, found: int, path: Path) -> ValueError:
    return ValueError(
        f"a table must hold together: {where} says that it has {said} rows, and {found} are there. {path.name!r} is "
        f"damaged; {AGAIN}."
    )


class _ArrowFile:
    """Record batches of an Arrow file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self.path = path
        with reading(path):
            self.file = pa.ipc.open_file(pa.memory_map(str(path)))
            self.schema = self.file.schema
            self.n_groups = self.file.num_record_batches
        column_names(self.schema, path)

    def _group(self, number: int) -> Any:
        with reading(self.path):
            return self.file.get_batch(number)

    def rows(self, group: int) -> int:
        return int(validated(self._group(group), self.path, full=False).num_rows)

    def read(self, group: int, columns: list[str], batch_size: int | None) -> Iterator[tuple[Any, str]]:
        table = self._group(group)
        with reading(self.path):
            table = table.select(columns)
        validated(table, self.path)
        if batch_size is None:
            batch_size = max(1, int(BATCH_BYTES * table.num_rows // max(1, table.nbytes)))
        for start in range(0, table.num_rows, batch_size):
            yield table.slice(start, batch_size), f"record batch {group} of {self.path.name}"


def _open(path: Path) -> _ParquetFile | _ArrowFile:
    status = path.stat()
    return _opened(path, os.getpid(), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=64)
def _opened(path: Path, _pid: int, _size: int, _time: int) -> _ParquetFile | _ArrowFile:
    """Open a file once per process and state of the file, by the magic bytes it begins with."""
    with path.open("rb") as file:
        magic = file.read(6)
    if magic[:4] == b"PAR1":
        return _ParquetFile(path)
    if magic == b"ARROW1":
        return _ArrowFile(path)
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
            raise FileNotFoundError(f"there is no file {file}.")
    return found


def as_source(batches: Any) -> Any:
    """An iterable of batches as it is; the path of a file as a `ParquetSets`."""
    if isinstance(batches, (str, os.PathLike)):
        return ParquetSets(batches)
    if isinstance(batches, (SetBatch, np.ndarray)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"`batches` must be an iterable of batches such as [(X, y), …], or a path: got {type(batches).__name__}. "
            "Use fit or predict for one batch."
        )
    return batches


def write_parquet(
    path: Any,
    batches: Iterable[Any],
    *,
    row_group_size: int | None = None,
    extra: dict[str, Any] | None = None,
    compression: str = "none",
) -> int:
    """Write batches, (X, y) or sets alone, to a Parquet file with columns keys, query, y and weight.

    The file appears under its name when it is complete.

    Parameters
    ----------
    path : path
    batches : iterable
        X SetBatches of one dimension; y (n,) or (n, outputs); all with the same columns.
    row_group_size : int, optional
        Rows of a row group; by default each batch is one.
    extra : dict of arrays, optional
        Further columns, rows in order over all batches.
    compression : str
        "none" reads fastest: random numbers do not compress.

    Returns
    -------
    int
        Rows written.
    """
    import pyarrow.parquet as pq

    path = Path(path)
    check_file_name(path)
    draft = path.with_name(f".{path.name[:50]}.{os.getpid()}.draft")
    writer, rows = None, 0
    try:
        for item in batches:
            table = _table(as_batch(item), extra or {}, rows)
            if writer is None:
                options = {"compression": compression, "use_dictionary": False, "write_statistics": False}
                writer = pq.ParquetWriter(draft, table.schema, **options)
            writer.write_table(table, row_group_size=row_group_size or table.num_rows)
            rows += table.num_rows
        if writer is None:
            raise ValueError("`batches` must give at least one batch: got none.")
        writer.close()
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return rows


def _table(batch: Batch, extra: dict[str, Any], start: int) -> Any:
    import pyarrow as pa

    sets: SetBatch = batch.sets
    number = pa.from_numpy_dtype(sets.dtype)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(sets.tokens.reshape(-1)), sets.dim)
    columns = {"keys": pa.LargeListArray.from_arrays(pa.array(sets.offsets), flat)}
    if sets.query is not None:
        columns["query"] = pa.FixedSizeListArray.from_arrays(pa.array(sets.query.reshape(-1), number), sets.dim)
    for name, values in (("y", batch.y), ("weight", batch.weights)):
        if values is None:
            continue
        values = np.asarray(values)
        column = pa.array(np.ascontiguousarray(values).reshape(-1))
        columns[name] = column if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(column, values.shape[1])
    for name, values in extra.items():
        columns[name] = pa.array(values[start : start + len(sets)])
    return pa.table(columns)
