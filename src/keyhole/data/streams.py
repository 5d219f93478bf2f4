"""Batches of sets from files, read in parts: Parquet and Arrow, and predictions written the same way."""

from __future__ import annotations

import contextlib
import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import thread_count
from keyhole._checks import check_count
from keyhole.data.sets import SetBatch

AGAIN = "fetch or write it again"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever Arrow says of a file that does not read into a ValueError that names the file.

    A file that is not there, or that we may not read, stays an OSError.
    """
    import pyarrow as pa

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
    import pyarrow as pa

    try:
        data.validate(full=full)
    except (pa.ArrowException, ValueError) as error:
        raise ValueError(
            f"a table must hold together: {path.name!r} does not ({str(error).strip()[:200]}). It is damaged; {AGAIN}."
        ) from None
    return data


def column_names(schema: Any, path: Path) -> list[str]:
    """Names of the columns; a ValueError if they are not text."""
    with reading(path):
        return list(schema.names)


def check_file_name(path: Path) -> None:
    """Raise unless the name of a file is text: Arrow opens no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"names of files must be text in UTF-8: got {path.name!r}. Rename it.") from None


def read_arrow(path: Path, suffix: str) -> Any:
    """A whole file as a validated Arrow table: CSV, TSV, Parquet, or Arrow as a file or a stream."""
    check_file_name(path)
    with reading(path):
        table = _read(path, suffix)
    column_names(table.schema, path)
    return validated(table, path)


def _read(path: Path, suffix: str) -> Any:
    import pyarrow as pa

    if suffix in (".csv", ".tsv"):
        from pyarrow import csv

        return csv.read_csv(path, parse_options=csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ","))
    if suffix in (".parquet", ".pq"):
        from pyarrow import parquet

        return parquet.read_table(path)
    with pa.OSFile(str(path), "rb") as source:
        try:
            return pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            return pa.ipc.open_stream(source).read_all()


class Batch(NamedTuple):
    """Some samples: ``sets``, and ``y`` and ``weights`` or None.

    Examples
    --------
    >>> sets, y, weights = Batch("three sets", [1, 2, 3])
    >>> weights is None
    True
    """

    sets: Any
    y: Any = None
    weights: Any = None


def as_batch(item: Any) -> Batch:
    """Return (X, y), (X, y, sample_weight) or sets alone as a Batch.

    Examples
    --------
    >>> as_batch(("sets", "y")).y
    'y'
    """
    if isinstance(item, Batch):
        return item
    if not isinstance(item, tuple):
        return Batch(item)
    if not 1 <= len(item) <= 3:
        raise ValueError(f"a batch must be sets, (X, y) or (X, y, sample_weight): got a tuple of {len(item)}.")
    return Batch(*item)


REMEDY = "list<list<float>>, list<fixed_size_list<float>>, or a flat list<float> with `dim` given"


class SchemaError(ValueError):
    """A column that cannot be read as what it was asked for."""


def sets_of(table: Any, keys: str, query: str | None, dim: int | None, where: str) -> SetBatch:
    """The sets of a table or record batch; ``where`` names it in errors ("row group 3 of a.parquet")."""
    tokens, offsets = _tokens(_column(table, keys, where), keys, dim, where)
    lengths = np.diff(offsets)
    if len(lengths) and lengths.min() == 0:
        i = int(lengths.argmin())
        raise SchemaError(f"every set must have at least one key: row {i} of {where} has none in column {keys!r}.")
    _check_finite(tokens, keys, where)
    asked = None
    if query is not None:
        asked = matrix_of(table, query, where)
        if asked.shape[1] != tokens.shape[1]:
            raise SchemaError(
                f"columns {keys!r} and {query!r} must share their token dimension: keys have {tokens.shape[1]} "
                f"coordinates and queries {asked.shape[1]} in {where}."
            )
        both = np.result_type(tokens, asked)
        tokens, asked = tokens.astype(both, copy=False), asked.astype(both, copy=False)
    return SetBatch._from_flat(tokens, offsets, asked)


def matrix_of(table: Any, name: str, where: str) -> Float[np.ndarray, "n d"]:
    """A column of lists of equal length as a matrix; a column of numbers as one column of it."""
    import pyarrow as pa

    column = _column(table, name, where)
    if not _is_list(column.type):
        values = _numbers(column, name, where)
        _check_finite(values, name, where)
        return values[:, None]
    if _is_list(column.type.value_type):
        raise _mismatch(name, column.type, where, "a list of numbers", "Name the column that holds one vector per row.")
    if pa.types.is_fixed_size_list(column.type):
        matrix = _numbers(column.flatten(), name, where).reshape(len(column), -1)
    else:
        offsets, values = _unwrap(column)
        widths = np.unique(np.diff(offsets))
        if len(widths) > 1:
            raise _mismatch(name, column.type, where, "lists of one length", f"Lengths are {widths[:4].tolist()} …")
        matrix = _numbers(values, name, where).reshape(len(column), -1)
    _check_finite(matrix, name, where)
    return matrix


def labels_of(table: Any, name: str, where: str) -> np.ndarray:
    """A column of labels or numbers as a NumPy array: text stays text."""
    import pyarrow as pa

    column = _column(table, name, where)
    if _is_list(column.type):
        return matrix_of(table, name, where)
    if _is_number(column.type):
        return _numbers(column, name, where)
    if pa.types.is_nested(column.type):
        raise _mismatch(name, column.type, where, "labels or numbers", "Name a column with one value per row.")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _tokens(
    column: Any, name: str, dim: int | None, where: str
) -> tuple[Float[np.ndarray, "t d"], Int[np.ndarray, " o"]]:
    """All keys end to end, and where each set begins."""
    if not _is_list(column.type):
        raise _mismatch(name, column.type, where, "sets of keys", f"Store it as {REMEDY}.")
    outer, inner = _unwrap(column)
    if _is_list(inner.type):
        if _is_list(inner.type.value_type):
            raise _mismatch(name, inner.type, where, "sets of keys", "There is one level of lists too many.")
        if inner.null_count:
            raise SchemaError(f"column {name!r} of {where} has {inner.null_count} keys that are null. Drop them.")
        ends, flat = _unwrap(inner)
        widths = np.diff(ends)
        width = int(widths[0]) if len(widths) else (dim or 1)
        if width == 0:
            raise SchemaError(f"keys of column {name!r} must have at least one coordinate: key 0 of {where} has none.")
        if len(widths) and (widths != width).any():
            i = int(np.flatnonzero(widths != width)[0])
            raise SchemaError(
                f"all keys of column {name!r} must have one dimension: key {i} of {where} has {int(widths[i])} "
                f"coordinates, the first {width}."
            )
        if dim is not None and dim != width:
            raise SchemaError(f"`dim` is {dim}, and the keys of column {name!r} in {where} have {width} coordinates.")
        return _numbers(flat, name, where).reshape(-1, width), outer
    if dim is None:
        raise _mismatch(name, column.type, where, "sets of keys", "It is flat: say how many coordinates a key has.")
    lengths = np.diff(outer)
    if (lengths % dim).any():
        i = int(np.flatnonzero(lengths % dim)[0])
        raise SchemaError(
            f"lists of column {name!r} must be whole keys of `dim` = {dim} coordinates: row {i} of {where} has "
            f"{int(lengths[i])} numbers."
        )
    return _numbers(inner, name, where).reshape(-1, dim), outer // dim


def _unwrap(column: Any) -> tuple[Int[np.ndarray, " o"], Any]:
    """Offsets from 0 and the values between them, of a list array of any kind, sliced or not."""
    import pyarrow as pa

    if pa.types.is_fixed_size_list(column.type):
        return np.arange(len(column) + 1, dtype=np.int64) * column.type.list_size, column.flatten()
    offsets = column.offsets.to_numpy(zero_copy_only=True).astype(np.int64)
    if len(offsets) == 0:
        offsets = np.zeros(1, np.int64)
    return offsets - offsets[0], column.values.slice(offsets[0], offsets[-1] - offsets[0])


def _numbers(values: Any, name: str, where: str) -> np.ndarray:
    """A flat array of float32 or float64, sharing memory with the column where that is possible."""
    if not _is_number(values.type):
        raise _mismatch(name, values.type, where, "numbers", "Encode text and dates as numbers first.")
    if values.null_count:
        raise SchemaError(f"column {name!r} of {where} has {values.null_count} nulls. Drop or impute them.")
    array = values.to_numpy(zero_copy_only=False)
    if array.dtype not in (np.float32, np.float64):
        return array.astype(np.float64)
    return np.require(array, requirements="A")  # a buffer of a file may begin at any byte


def _column(table: Any, name: str, where: str) -> Any:
    if name not in table.schema.names:
        raise SchemaError(f"there is no column {name!r} in {where}: it has {', '.join(table.schema.names)}.")
    column = table.column(name)
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    if column.null_count:
        i = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise SchemaError(f"column {name!r} must not be null: row {i} of {where} is. Drop such rows.")
    return column


def _check_finite(values: np.ndarray, name: str, where: str) -> None:
    if not np.isfinite(values).all():
        bad = int(np.size(values) - np.isfinite(values).sum())
        raise SchemaError(
            f"column {name!r} must be finite: {bad} entries of {where} are NaN or infinite. Impute or drop them."
        )


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _mismatch(name: str, found: Any, where: str, wanted: str, remedy: str) -> SchemaError:
    return SchemaError(f"column {name!r} must hold {wanted}: found type {found} in {where}. {remedy}")


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
    if hasattr(batches, "shape") or not isinstance(batches, Iterable):
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


MAKER = "keyhole predict"
OURS = re.compile(r"part-\d{8}\.parquet|(part-\d{8}|joined|job)\.\d+\.draft|job\.json|lock")
"""Names of what we put into the folder of parts: nothing else in it is ever removed."""


class PartedFile:
    """Parts in a folder beside the file, joined when all are there; parts made earlier by the same job are kept.

    Making one looks and refuses, and touches nothing; ``with`` takes the folder for this run alone.

    Parameters
    ----------
    path : path
        The file to make. Never seen half-written.
    job : dict
        What the parts are made from, in words and numbers: parts of another job are not mixed with.
    overwrite : bool
        Whether an existing file may be replaced, and parts of another job thrown away.
    """

    def __init__(self, path: Any, job: dict[str, Any], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.folder = self.path.with_name(self.path.name + ".parts")
        self.job = json.loads(json.dumps(job))  # as it will read back: tuples are lists
        self.overwrite = overwrite
        self._lock: int | None = None
        check_file_name(self.path)
        if self.path.is_dir():
            raise ValueError(f"the output must name a file: {self.path} is a folder. Add a file name to it.")
        self._refuse_to_replace()
        self._refuse_another_job()

    def __enter__(self) -> PartedFile:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder / "lock", self.path)
        except OSError as error:
            raise OSError(f"{self.folder} cannot be written: {error.strerror}. Choose another place.") from None
        try:
            if self._refuse_another_job() != self.job:  # again: it may have changed before it was ours
                self._clear()
                note = {"made by": MAKER, "job": self.job}
                with self._draft(self.folder / "job.json") as draft:
                    draft.write_text(json.dumps(note, indent=1, sort_keys=True), encoding="utf-8")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refuse_to_replace(self) -> None:
        if self.path.exists() and not self.overwrite:
            raise FileExistsError(f"{self.path} exists. Choose another name, or pass --overwrite.")

    def _refuse_another_job(self) -> Any:
        """The job of the parts that are there, None if there are none."""
        known = self._known_job()
        if known is not None and known != self.job and not self.overwrite:
            changed = ", ".join(sorted(key for key in {*known, *self.job} if known.get(key) != self.job.get(key)))
            raise ValueError(
                f"{self.folder} holds parts of another run: {changed} changed since. Run it as before to go on, "
                "or pass --overwrite to start over."
            )
        return known

    def _known_job(self) -> Any:
        """What the note in the folder says; raise unless the folder is ours, or there is none, or nothing in it."""
        foreign = ValueError(
            f"the folder {self.folder} is needed for parts of the output, and what is there was not made by keyhole. "
            "Move it away, or choose another output."
        )
        try:
            note = json.loads((self.folder / "job.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            # a run that was killed before it wrote its note leaves no more than this
            left = os.listdir(self.folder) if self.folder.exists() else []
            if all(name == "lock" or re.fullmatch(r"job\.\d+\.draft", name) for name in left):
                return None
            raise foreign from None
        except (NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
            if not self.folder.parent.is_dir():
                return None  # the path leads through a file: making the folder will say so
            raise foreign from None
        if not isinstance(note, dict) or note.get("made by") != MAKER or not isinstance(note.get("job"), dict):
            raise foreign
        return note["job"]

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.parquet"

    def _clear(self, *, keep: Sequence[str] = ("lock",)) -> None:
        """Remove what is ours from the folder; the note last but one, the lock last."""
        ours = [name for name in os.listdir(self.folder) if OURS.fullmatch(name) and name not in keep]
        for name in sorted(ours, key=lambda name: (name == "lock", name == "job.json")):
            (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def _draft(self, name: Path, target: Path | None = None) -> Iterator[Path]:
        """A file to write that takes its name once it is complete, and leaves nothing if it cannot be."""
        import pyarrow as pa

        draft = self.folder / f"{name.stem}.{os.getpid()}.draft"
        try:
            yield draft
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            if target is not None:
                self._refuse_to_replace()
            os.replace(draft, target or name)
        except FileExistsError:
            raise
        except OSError as error:
            raise OSError(
                f"{self.path} cannot be written: {error.strerror or error}. What is done is kept in {self.folder}: "
                "make room, and run the same command to go on."
            ) from None
        except pa.ArrowException as error:
            raise ValueError(
                f"every column must have a type that Parquet can store: {str(error).strip()[:200]}. Leave it out."
            ) from None
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()

    def done(self, rows: Sequence[int]) -> set[int]:
        """Numbers of the parts that are there, read, and have their number of rows; the others are to be made again."""
        import pyarrow.parquet as pq

        found = set()
        for number, expected in enumerate(rows):
            with contextlib.suppress(ValueError, OSError), reading(self._part(number)):
                if pq.read_metadata(self._part(number)).num_rows == expected:
                    found.add(number)
        return found

    def write(self, number: int, table: Any) -> None:
        """Write one part; it appears under its name when it is complete."""
        import pyarrow.parquet as pq

        with self._draft(self._part(number)) as draft:
            pq.write_table(table, draft, write_page_checksum=True)

    def join(self, numbers: Sequence[int]) -> int:
        """Join the parts into the file, one row group each, and remove them; return the number of rows."""
        import pyarrow.parquet as pq

        rows = 0
        with self._draft(Path("joined"), self.path) as draft, contextlib.ExitStack() as stack:
            writer = None
            for number in numbers:
                table = self._read(number, None if writer is None else writer.schema)
                if writer is None:
                    writer = stack.enter_context(pq.ParquetWriter(draft, table.schema))
                writer.write_table(table)
                rows += table.num_rows
            if writer is None:
                raise ValueError("there are no parts to join: the input has no rows.")
        self._clear(keep=())
        with contextlib.suppress(OSError):  # somebody put something into it: that stays
            self.folder.rmdir()
        return rows

    def _read(self, number: int, schema: Any) -> Any:
        """A part, read in full; one that is damaged is removed, for the next run to make it again."""
        import pyarrow.parquet as pq

        part = self._part(number)
        try:
            with reading(part):
                table = pq.read_table(part, page_checksum_verification=True)
            if schema is not None and table.schema != schema:
                raise ValueError(f"parts must have the same columns: {part.name!r} has other columns than the first.")
            return validated(table, part)
        except ValueError as error:
            part.unlink(missing_ok=True)
            raise ValueError(f"{error} This part was removed: run the same command to make it again.") from None


def _locked(path: Path, output: Path) -> int | None:
    """Lock a file until it is closed, at the latest when the process ends; None where there are no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    busy = ValueError(
        f"one run writes an output at a time: another run is writing {output}. Wait for it, or choose another output."
    )
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file), os.stat(path)):
            raise busy  # it ended, and took the file with it, while we waited
    except (BlockingIOError, FileNotFoundError):
        os.close(file)
        raise busy from None
    except ValueError:
        os.close(file)
        raise
    except OSError:  # a file system without locks: drafts of two processes still have two names
        os.close(file)
        return None
    return file


def predictions_table(columns: dict[str, Any]) -> Any:
    """An Arrow table of some columns: arrays, or lists of Arrow arrays that follow each other."""
    import pyarrow as pa

    return pa.table({name: pa.chunked_array(v) if isinstance(v, list) else pa.array(v) for name, v in columns.items()})
