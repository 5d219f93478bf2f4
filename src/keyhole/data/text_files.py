"""CSV and TSV files: every cell is text, and a column gets a type only if all its cells have it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from keyhole.data.rules import CELL_RULES

CODE = r"^[+-]?0[0-9xX]"
"""A whole number that begins with a zero, such as 007: ids and postcodes are written so."""
DECIMAL_COMMA = r"^[+-]?[0-9]*,[0-9]+$"
MISSING_CELLS = pa.array(csv.ConvertOptions().null_values)
"""What stands for a missing value among numbers and dates: nothing, NA, NaN, null and the like."""


class UnreadableFileError(ValueError):
    """A file that does not read; the message says all that is to be said."""


@dataclass(frozen=True)
class ColumnUses:
    """What is known of columns before the file is read: it decides in the place of the cells."""

    texts: Collection[str] = ()
    """Read as written: what the schema knows as text."""
    ids: Collection[str] = ()
    """Read as written: ids, groups, keys of joins. 1e3 and 1000 are two of them."""
    numbers: Collection[str] = ()
    """Numbers also with leading zeros: weights, times, splits, what the schema knows as numbers."""


def is_text_file(name: str) -> bool:
    """Whether a file of this name is CSV or TSV."""
    return name.lower().endswith((".csv", ".tsv"))


def column_names_of(source: Path | bytes, name: str) -> list[str]:
    """The names in the first line of a CSV or TSV file."""
    with csv.open_csv(_content(source), parse_options=_parse_options(name)) as reader:
        try:
            return list(reader.schema.names)
        except UnicodeDecodeError as error:
            raise UnreadableFileError(
                f"a CSV file must be in UTF-8: the name {error.object!r:.60} of a column in the "
                f"first line of {name!r} is not. Save the file as UTF-8."
            ) from None


def read_texts(source: Path | bytes, name: str) -> pa.Table:
    """The cells of a CSV or TSV file as they are written."""
    names = column_names_of(source, name)
    as_bytes = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()))
    table = csv.read_csv(
        _content(source), parse_options=_parse_options(name), convert_options=as_bytes
    )
    columns = []
    for column_name, column in zip(names, table.columns, strict=True):
        columns.append(_decoded(column, column_name, name))
    return pa.table(columns, names=names)


def typed(tables: Sequence[pa.Table], name: str, uses: ColumnUses) -> list[pa.Table]:
    """Files of one table with types instead of texts: a column has one type in all of them."""
    kinds: dict[str, pa.DataType] = {}
    for column_name in dict.fromkeys(n for table in tables for n in table.column_names):
        pieces = [
            table.column(i)
            for table in tables
            for i, other in enumerate(table.column_names)
            if other == column_name
        ]
        kinds[column_name] = _kind_of_cells(pieces, column_name, name, uses)
    results = []
    for table in tables:
        columns = []
        for column_name, column in zip(table.column_names, table.columns, strict=True):
            is_id = column_name in uses.ids
            columns.append(_converted(column, kinds[column_name], is_id=is_id))
        results.append(pa.table(columns, names=table.column_names))
    return results


def _kind_of_cells(
    pieces: Sequence[pa.ChunkedArray], column_name: str, name: str, uses: ColumnUses
) -> pa.DataType:
    """The type of a column: as its use says, else the first that all cells have."""
    if column_name in uses.ids or column_name in uses.texts:
        return pa.string()
    cells = pa.chunked_array(
        [chunk for piece in pieces for chunk in _known(piece).chunks], type=pa.string()
    )
    if cells.null_count == len(cells):
        return pa.null()
    may_be_number = True
    if column_name not in uses.numbers:
        may_be_number = not pc.any(pc.match_substring_regex(cells, CODE + r"\d*$")).as_py()
    for rule in CELL_RULES:
        if rule.is_number and not may_be_number:
            continue
        try:
            cells.cast(rule.type)
        except pa.ArrowInvalid:
            continue
        return rule.type
    _refuse_decimal_commas(cells, column_name, name)
    return pa.string()


def _refuse_decimal_commas(cells: pa.ChunkedArray, column_name: str, name: str) -> None:
    """Raise if a column is text only because its numbers have commas."""
    has_comma = pc.match_substring_regex(cells, DECIMAL_COMMA)
    if not pc.any(has_comma).as_py():
        return
    with_points = pc.replace_substring(cells, ",", ".")
    try:
        with_points.cast(pa.float64())
    except pa.ArrowInvalid:
        return
    row = pc.index(has_comma, True).as_py()
    raise ValueError(
        f"numbers must be written with a decimal point: column {column_name!r} of {name!r} has "
        f"commas, row {row} holds {cells[row].as_py()!r:.40}. Replace them, for example by "
        "pandas.read_csv(…, decimal=','), and pass the frame."
    )


def _known(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Cells without blanks around them; None for those that stand for a missing value."""
    trimmed = pc.utf8_trim_whitespace(column)
    is_missing = pc.is_in(trimmed, value_set=MISSING_CELLS)
    return pc.if_else(is_missing, pa.scalar(None, pa.string()), trimmed)


def _converted(column: pa.ChunkedArray, kind: pa.DataType, *, is_id: bool) -> pa.ChunkedArray:
    """A column of texts in its type; an id that stands for a missing value is missing."""
    if pa.types.is_string(kind) and not is_id:
        return column
    if pa.types.is_string(kind):
        return pc.if_else(pc.is_null(_known(column)), pa.scalar(None, pa.string()), column)
    if pa.types.is_null(kind):
        return pa.chunked_array([pa.nulls(len(column))])
    return _known(column).cast(kind)


def _decoded(column: pa.ChunkedArray, column_name: str, name: str) -> pa.ChunkedArray:
    """Bytes as text; an error names the first cell that is in another encoding."""
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        for row, cell in enumerate(column.to_pylist()):
            try:
                cell.decode()
            except UnicodeDecodeError:
                raise UnreadableFileError(
                    f"a CSV file must be in UTF-8: column {column_name!r} of {name!r} is not, row "
                    f"{row} holds {cell!r:.60}. Save the file as UTF-8."
                ) from None
        raise


def _content(source: Path | bytes) -> Path | pa.BufferReader:
    """What Arrow reads from: a file, or bytes in memory."""
    return pa.BufferReader(source) if isinstance(source, bytes) else source


def _parse_options(name: str) -> csv.ParseOptions:
    """How a file of this name separates its columns: by tabs in .tsv, by commas else."""
    return csv.ParseOptions(delimiter="\t" if name.lower().endswith(".tsv") else ",")
