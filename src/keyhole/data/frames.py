"""Tables in memory as Arrow tables: frames of pandas and polars, and the bytes of a file."""

from __future__ import annotations

import io
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from keyhole.data.layout import PROBLEM
from keyhole.data.npz import npz_table, read_arrays
from keyhole.data.text_files import ColumnUses, UnreadableFileError, read_texts, typed


class DataTable(Protocol):
    """A table of pandas, polars or Arrow."""

    @property
    def columns(self) -> Any:
        """Its columns, or their names."""


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


def table_in_memory(content: bytes, name: str, target: str | None = None) -> pa.Table:
    """The table in the bytes of a file.

    Nothing is opened. The first bytes say what the file is; of its name only the end of a TSV
    counts.
    """
    name = name or "the file"
    try:
        if content[:2] == b"PK":  # a zip archive, which npz is
            targets = (target,) if target else None
            table, _ = npz_table(read_arrays(io.BytesIO(content), name), name, target=targets)
            return table
        if content[:4] == b"PAR1":
            table = pq.read_table(pa.BufferReader(content))
        elif content[:6] == b"ARROW1":
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        else:
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
