"""Tables that are written: Parquet files of sets, and predictions in the format of their name."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq

from keyhole._files import write_whole
from keyhole.data.batches import Batch, as_batch
from keyhole.data.blocks import check_file_name
from keyhole.data.npz import as_rows
from keyhole.data.sets import SetBatch


def write_parquet(
    path: Any,
    batches: Iterable[Any],
    *,
    row_group_size: int | None = None,
    extra: dict[str, Any] | None = None,
) -> int:
    """Write batches, (X, y) or sets alone, to a Parquet file.

    With columns keys, query, extras, y and weight.

    The file appears under its name when it is complete. It is not compressed: random numbers would
    not shrink.

    Parameters
    ----------
    path : path
    batches : iterable
        X SetBatches of one dimension; y (n,) or (n, outputs); all with the same columns.
    row_group_size : int, optional
        Rows of a row group; by default each batch is one.
    extra : dict of arrays, optional
        Further columns, rows in order over all batches.

    Returns
    -------
    int
        Rows written.
    """
    path = Path(path)
    check_file_name(path)
    rows = 0

    def write(draft: Path) -> None:
        nonlocal rows
        with contextlib.ExitStack() as stack:
            writer = None
            for item in batches:
                table = sets_table(as_batch(item), extra or {}, rows)
                # the first batch says which columns there are
                if writer is None:
                    writer = stack.enter_context(
                        pq.ParquetWriter(
                            draft,
                            table.schema,
                            compression="none",
                            use_dictionary=False,
                            write_statistics=False,
                        )
                    )
                writer.write_table(table, row_group_size=row_group_size or table.num_rows)
                rows += table.num_rows
            if writer is None:
                raise ValueError("`batches` must give at least one batch: got none.")

    write_whole(write, path)
    return rows


def sets_table(
    batch: Batch, extra: Mapping[str, Any] = MappingProxyType({}), start: int = 0
) -> Any:
    """A batch as an Arrow table with columns keys, query, extras, y and weight.

    Rows of further columns, from ``start`` on, are appended.
    """
    # sets: keys as lists of tokens, query and extras as vectors
    sets: SetBatch = batch.sets
    tokens = as_rows(sets.tokens)
    columns = {"keys": pa.LargeListArray.from_arrays(pa.array(sets.offsets), tokens)}
    if sets.query is not None:
        columns["query"] = as_rows(sets.query)
    if sets.extras is not None:
        columns["extras"] = as_rows(sets.extras)

    # target and weights: numbers or texts, or one vector of outputs per row
    for name, values in (("y", batch.y), ("weight", batch.weights)):
        if values is None:
            continue
        array = np.ascontiguousarray(values)
        if np.ndim(values) == 1:
            columns[name] = pa.array(array)
        else:
            columns[name] = as_rows(array)
    for name, values in extra.items():
        columns[name] = pa.array(values[start : start + len(sets)])
    return pa.table(columns)


# ---------------------------------------------------------------- predictions

OutputFormat = Literal["parquet", "arrow", "csv", "tsv", "jsonl"]
FORMAT_OF_ENDING: dict[str, OutputFormat] = {
    "": "parquet",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
"""What is written under which name; one without an ending is Parquet."""


def output_format(path: Path) -> OutputFormat:
    """The format that the ending of a name stands for; ValueError where it stands for none.

    >>> output_format(Path("costs.CSV"))
    'csv'
    >>> output_format(Path("costs.xlsx"))
    Traceback (most recent call last):
        ...
    ValueError: predictions are written as the ending of their name says, one of .parquet, ...
    """
    ending = path.suffix.lower()
    if ending not in FORMAT_OF_ENDING:
        endings = ", ".join(name for name in FORMAT_OF_ENDING if name)
        remedy = "Choose another ending."
        if ending == ".json":
            remedy = f"JSON is written line by line: use {path.stem}.jsonl."
        raise ValueError(
            f"predictions are written as the ending of their name says, one of {endings}: got "
            f"{path.name!r}. {remedy}"
        )
    return FORMAT_OF_ENDING[ending]


class TableWriter(Protocol):
    """Takes the tables of a file one after the other."""

    def write_table(self, table: pa.Table) -> None:
        """Add the rows of a table."""


@contextmanager
def table_writer(path: Path, schema: pa.Schema, file_format: OutputFormat) -> Iterator[TableWriter]:
    """Open a file for tables of one schema."""
    with contextlib.ExitStack() as stack:
        if file_format == "parquet":
            yield stack.enter_context(pq.ParquetWriter(path, schema))
        elif file_format == "arrow":
            yield stack.enter_context(pa.ipc.new_file(path, schema))
        elif file_format == "jsonl":
            file = stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
            yield _JsonLines(file)
        else:
            delimiter = "," if file_format == "csv" else "\t"
            options = pc_csv.WriteOptions(delimiter=delimiter)
            flat_schema = _with_lists_as_text(schema.empty_table()).schema
            writer = pc_csv.CSVWriter(path, flat_schema, write_options=options)
            yield _TextCells(stack.enter_context(writer))


class _TextCells:
    """CSV has no lists: one is written as the JSON of it, such as "[0.5, -0.25]"."""

    def __init__(self, writer: pc_csv.CSVWriter) -> None:
        self.writer = writer

    def write_table(self, table: pa.Table) -> None:
        self.writer.write_table(_with_lists_as_text(table))


def _with_lists_as_text(table: pa.Table) -> pa.Table:
    """The table with every column of lists, or of other nested things, as JSON text."""
    for number, field in enumerate(table.schema):
        if pa.types.is_nested(field.type):
            cells = [_json(value) for value in table.column(number).to_pylist()]
            table = table.set_column(number, field.name, pa.array(cells, type=pa.string()))
    return table


class _JsonLines:
    """One JSON object per row.

    JSON has no infinity: the end of an interval that is infinite is null.
    """

    def __init__(self, file: Any) -> None:
        self.file = file

    def write_table(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            self.file.write(_json(row) + "\n")


def _json(value: Any) -> str:
    """A value as JSON; what JSON has no form for, such as a date, is its text."""
    return json.dumps(_without_infinities(value), ensure_ascii=False, allow_nan=False, default=str)


def _without_infinities(value: Any) -> Any:
    """The same value with null instead of numbers that are not finite, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _without_infinities(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_without_infinities(entry) for entry in value]
    return value


def write_tables(path: Path, tables: Iterable[pa.Table], *, overwrite: bool = False) -> int:
    """Write tables of one schema, one after the other, and return the number of rows.

    The file appears under its name when all are written; in Parquet each is a row group.
    """
    file_format = output_format(path)
    check_file_name(path)
    rows = 0

    def write(draft: Path) -> None:
        nonlocal rows
        with contextlib.ExitStack() as stack:
            writer = None
            schema = None
            for table in tables:
                # the first table says which columns there are
                if writer is None:
                    schema = table.schema
                    writer = stack.enter_context(table_writer(draft, schema, file_format))
                writer.write_table(table.cast(schema))
                rows += table.num_rows
            if writer is None:
                raise ValueError("there must be rows to write: the input has none.")

    try:
        write_whole(write, path, overwrite=overwrite)
    except pa.ArrowException as error:
        raise ValueError(
            f"every column must have a type that {file_format} can store: "
            f"{str(error).strip()[:200]}. Leave it out."
        ) from None
    return rows


def predictions_table(columns: dict[str, Any]) -> Any:
    """An Arrow table of some columns: arrays, or lists of Arrow arrays that follow each other."""
    arrow_columns = {}
    for name, values in columns.items():
        if isinstance(values, list):
            arrow_columns[name] = pa.chunked_array(values)
        else:
            arrow_columns[name] = pa.array(values)
    return pa.table(arrow_columns)
