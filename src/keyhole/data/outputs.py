"""Tables of predictions in the format that the name of their file says."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq

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


def written_column(path: Path, name: str, file_format: OutputFormat) -> np.ndarray:
    """One column of numbers of a file that was written."""
    if file_format == "parquet":
        column = pq.read_table(path, columns=[name])[name]
    elif file_format == "arrow":
        column = pa.ipc.open_file(path).read_all()[name]
    elif file_format == "jsonl":
        with path.open(encoding="utf-8") as lines:
            return np.array([json.loads(line)[name] for line in lines], dtype=np.float64)
    else:
        delimiter = "," if file_format == "csv" else "\t"
        column = pc_csv.read_csv(
            path,
            parse_options=pc_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=pc_csv.ConvertOptions(include_columns=[name]),
        )[name]
    return np.asarray(column.to_numpy())
