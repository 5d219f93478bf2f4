"""Files as blocks that are read one after the other: row groups, record batches, whole tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keyhole._files import refuse_special_file
from keyhole.data.columns import SchemaError, plain_column
from keyhole.data.layout import TableOptions, as_names
from keyhole.data.npz import npz_table, read_arrays
from keyhole.data.text_files import ColumnUses, UnreadableFileError, is_text_file, read_texts, typed

SUFFIXES = (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".csv", ".tsv", ".npz")
BATCH_BYTES = 2**25  # bytes of a batch when nobody says how many rows it has
PROBED_ROWS = 256  # rows whose size in memory stands for that of the others
ALL_ROWS = 2**31  # a batch size that no block exceeds


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever Arrow says of a file that does not read into a ValueError that names the file.

    A file that is not there, or that we may not read, stays an OSError.
    """
    try:
        yield
    except (FileNotFoundError, PermissionError, IsADirectoryError, UnreadableFileError):
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
        raise UnreadableFileError(
            f"{path.name!r} must be a table in the format of its suffix: it does not read "
            f"({str(error).strip()[:300]}). It is damaged or of another format; fetch or write it "
            "again."
        ) from None


def rows_of_batch_bytes(n_rows: int, n_bytes: int) -> int:
    """Rows that take `BATCH_BYTES`, where ``n_rows`` of them take ``n_bytes``; at least one."""
    return max(1, int(BATCH_BYTES * n_rows // max(1, n_bytes)))


@dataclass(frozen=True)
class ParquetBlocks:
    """The row groups of a Parquet file, decoded when they are asked for."""

    path: Path
    metadata: Any = field(repr=False)
    schema: pa.Schema = field(repr=False)
    split: None = None

    @classmethod
    def open(cls, path: Path) -> ParquetBlocks:
        """Read the footer."""
        with reading(path), pq.ParquetFile(path) as file:
            return cls(path, file.metadata, file.schema_arrow)

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each row group, as the footer says."""
        groups = range(self.metadata.num_row_groups)
        return tuple(self.metadata.row_group(i).num_rows for i in groups)

    def where(self, block: int) -> str:
        """The row group and the file."""
        return f"row group {block} of {self.path.name}"

    def read(
        self, block: int, columns: Sequence[str], batch_size: int | None
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Record batches of a row group. Arrow gets no threads of its own: arithmetic has them."""
        chosen = {"row_groups": [block], "columns": list(columns), "use_threads": False}
        with reading(self.path):
            file = pq.ParquetFile(self.path, memory_map=True, metadata=self.metadata)
        with file:
            # sizes in the footer say little: a value repeated often takes next to nothing there
            if batch_size is None:
                with reading(self.path):
                    probe = next(file.iter_batches(PROBED_ROWS, **chosen), None)
                batch_size = 1
                if probe is not None:
                    batch_size = rows_of_batch_bytes(probe.num_rows, probe.nbytes)
            batches = file.iter_batches(min(batch_size, max(1, self.counts[block])), **chosen)
            first = 0
            # `reading` guards the decoding alone: errors of whoever uses a batch are not the file's
            while True:
                with reading(self.path):
                    batch = next(batches, None)
                if batch is None:
                    break
                if batch.num_rows:
                    yield batch, first
                first += batch.num_rows


@dataclass(frozen=True)
class TableBlocks:
    """Record batches in memory, or of an Arrow file that is mapped into memory."""

    path: Path
    batches: list[pa.RecordBatch] = field(repr=False)
    schema: pa.Schema = field(repr=False)
    split: np.ndarray | None = field(default=None, repr=False)

    @classmethod
    def of(cls, path: Path, table: pa.Table, split: np.ndarray | None = None) -> TableBlocks:
        """All rows together, in one block."""
        with reading(path):
            table.validate(full=True)
            columns = [plain_column(column, keeps_dictionary=True) for column in table.columns]
            return cls(path, [pa.record_batch(columns, schema=table.schema)], table.schema, split)

    @classmethod
    def open(cls, path: Path, *, is_stream: bool) -> TableBlocks:
        """An Arrow file, of which every offset is looked at before it is followed."""
        with reading(path):
            source = pa.memory_map(str(path))
            file = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
            table = file.read_all()
            table.validate(full=True)
            return cls(path, table.to_batches(), table.schema)

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each batch."""
        return tuple(batch.num_rows for batch in self.batches)

    def where(self, block: int) -> str:
        """The name of the table, or of the record batch in the file."""
        if len(self.batches) == 1:
            return self.path.name
        return f"record batch {block} of {self.path.name}"

    def read(
        self, block: int, columns: Sequence[str], batch_size: int | None
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Consecutive rows of a block, each piece with its first row."""
        batch = self.batches[block].select(list(columns))
        if batch_size is None:
            batch_size = rows_of_batch_bytes(batch.num_rows, batch.nbytes)
        for start in range(0, batch.num_rows, batch_size):
            yield batch.slice(start, batch_size), start


Blocks = ParquetBlocks | TableBlocks
"""A file, or a table in memory, in blocks of rows: names and types of its columns, the rows of each
block, what it says of training and testing, and record batches of a block with their first rows."""


def files_of(path: Any) -> list[Path]:
    """The files that a path, or a list of paths, names; a folder stands for its Parquet files."""
    named = [Path(one) for one in path] if isinstance(path, (list, tuple)) else [Path(path)]
    files: list[Path] = []
    for one in named:
        files.extend(sorted(one.glob("*.parquet")) if one.is_dir() else [one])
    if not files:
        raise FileNotFoundError(
            f"there is no Parquet file in {path}. Name a file, or a folder that has some."
        )
    for file in files:
        check_file_name(file)
        if file.exists():
            refuse_special_file(file)
        if not file.is_file():
            raise FileNotFoundError(
                f"{file.name!r} is not there: no such file. Check the name and the folder."
            )
    return files


def check_file_name(path: Path) -> None:
    """Raise unless the name of a file is text: Arrow opens no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"names of files must be text in UTF-8: got {path.name!r}. Rename it."
        ) from None


def open_files(paths: Sequence[Path], options: TableOptions, uses: ColumnUses) -> list[Blocks]:
    """Files by their suffix; the columns of text files have one type in all of them."""
    texts = {}
    for path in paths:
        if is_text_file(path.name):
            with reading(path):
                texts[path] = read_texts(path, path.name)
    names = ", ".join(path.name for path in list(texts)[:3])
    tables = dict(zip(texts, typed(list(texts.values()), names, uses), strict=True))
    blocks: list[Blocks] = []
    for path in paths:
        if path in tables:
            blocks.append(TableBlocks.of(path, tables[path]))
        elif path.suffix.lower() == ".npz":
            blocks.append(_open_npz(path, options))
        else:
            blocks.append(_open_arrow(path))
        with reading(path):
            # names that are text, and types that pyarrow has arrays of, or an error
            blocks[-1].schema.empty_table().columns  # noqa: B018
    return blocks


def _open_npz(path: Path, options: TableOptions) -> TableBlocks:
    """The arrays that options name, or that have the usual names."""
    arrays = read_arrays(path, path.name)
    single = {}
    for option in ("keys", "query", "extras"):
        names = as_names(getattr(options, option), list(arrays))
        single[option] = names[0] if names else None
    target = None if options.target is None else as_names(options.target, list(arrays))
    table, split = npz_table(
        arrays,
        path.name,
        keys=single["keys"],
        query=single["query"],
        target=target,
        extras=single["extras"],
    )
    return TableBlocks.of(path, table, split)


def _open_arrow(path: Path) -> Blocks:
    """A Parquet or Arrow file, by its first bytes."""
    with path.open("rb") as file:
        magic = file.read(6)
    if magic[:4] == b"PAR1":
        return ParquetBlocks.open(path)
    is_arrow_file = magic == b"ARROW1"
    if is_arrow_file or path.suffix.lower() in (".arrow", ".feather", ".ipc"):
        return TableBlocks.open(path, is_stream=not is_arrow_file)
    raise SchemaError(
        f"{path.name} must be a Parquet file or an Arrow file: it begins with {magic!r}. Convert "
        "it, for example with pandas: frame.to_parquet(path)."
    )


def whole_table(blocks: Sequence[Blocks]) -> pa.Table:
    """All columns and rows of some files."""
    names = blocks[0].schema.names
    batches = []
    for one in blocks:
        for block in range(len(one.counts)):
            batches += [batch for batch, _ in one.read(block, names, ALL_ROWS)]
    return pa.Table.from_batches(batches, blocks[0].schema)
