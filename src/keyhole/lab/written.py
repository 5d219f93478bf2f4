"""A set as its file writes it: which rows it comes from, and what stands in them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.feather
import pyarrow.parquet as pq

from keyhole.data.schema import Schema

MISSING = "–"
"""What is shown for an empty cell."""


@dataclass(frozen=True)
class WrittenSet:
    """The rows of one set, in the order of its keys.

    Attributes
    ----------
    source : str
        What the rows are rows of, such as "transactions.csv".
    numbers : list of int
        The number of each row in its file, counted from 0.
    rows : dict of lists of str
        What stands in each row, by the name of the column.
    sample : dict of str
        What stands in the columns of the query and of sample-level features.
    """

    source: str
    numbers: list[int]
    rows: dict[str, list[str]]
    sample: dict[str, str]


def written_set(
    path: Path, tokens: str | None, schema: Schema, place: tuple[str, int], n_keys: int
) -> WrittenSet | None:
    """The set as it is written; None for data without columns, such as arrays and series.

    ``place`` is the id of the set, and its number among all sets. None too where the rows of the
    file are not the ``n_keys`` keys of the set: a set without rows has one key of zeros.
    """
    options = dict(schema.columns)
    key_columns = list(options.get("keys", ()))
    sample_columns = [*options.get("query", ()), *options.get("extras", ())]
    set_id = options.get("set_id")
    if not key_columns:
        return None

    # one row for each set, its keys in lists
    chosen, number = place
    if set_id is None:
        table = _read(path, [*key_columns, *sample_columns])
        if table is None or not all(pa.types.is_nested(table[name].type) for name in key_columns):
            return None
        lists = {name: _texts(table[name][number].as_py()) for name in key_columns}
        rows = _without_missing(lists, n_keys)
        if rows is None:
            return None
        return WrittenSet(
            source=f"the lists in row {number} of {path.name}",
            numbers=rows,
            rows={name: [cells[k] for k in rows] for name, cells in lists.items()},
            sample={name: as_text(table[name][number].as_py()) for name in sample_columns},
        )

    # one row for each key, in this table or in one of its own
    samples = _read(path, [set_id, *sample_columns, *([] if tokens else key_columns)], ["role"])
    row_path = Path(tokens) if tokens else path
    table = _read(row_path, [set_id, *key_columns]) if tokens else samples
    if samples is None or table is None:
        return None
    of_set = _rows_of(table, set_id, chosen)
    has_query_rows = schema.has_query and "query" not in options and "role" in table.column_names
    if has_query_rows:
        of_set = [k for k in of_set if str(table["role"][k].as_py()).lower() != "query"]
    cells = {
        name: _texts(table[name].take(pa.array(of_set, pa.int64())).to_pylist())
        for name in key_columns
    }
    rows = _without_missing(cells, n_keys)
    if rows is None:
        return None
    [first, *_] = _rows_of(samples, set_id, chosen)
    return WrittenSet(
        source=row_path.name,
        numbers=[of_set[k] for k in rows],
        rows={name: [column[k] for k in rows] for name, column in cells.items()},
        sample={name: as_text(samples[name][first].as_py()) for name in sample_columns},
    )


def _read(path: Path, columns: Sequence[str], if_there: Sequence[str] = ()) -> pa.Table | None:
    """Some columns of a file, those of CSV as text; None where the file has no such columns."""
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in (".parquet", ".pq"):
        table = pq.read_table(path)
    elif suffix in (".arrow", ".feather", ".ipc"):
        table = pa.feather.read_table(path)
    elif suffix in (".csv", ".tsv"):
        parse = pc_csv.ParseOptions(delimiter="\t" if suffix == ".tsv" else ",")
        with pc_csv.open_csv(path, parse_options=parse) as file:
            names = file.schema.names
        texts = pc_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        table = pc_csv.read_csv(path, parse_options=parse, convert_options=texts)
    else:
        return None
    if not set(columns) <= set(table.column_names):
        return None
    names = [name for name in dict.fromkeys([*columns, *if_there]) if name in table.column_names]
    return table.select(names)


def _rows_of(table: pa.Table, set_id: str, chosen: str) -> list[int]:
    """The numbers of the rows of a set."""
    ids = pc.utf8_trim_whitespace(pc.cast(table[set_id], pa.string()))
    is_chosen = pc.fill_null(pc.equal(ids, chosen), False)
    return [int(row) for row in np.flatnonzero(is_chosen.to_numpy())]


def _without_missing(cells: dict[str, list[str]], n_keys: int) -> list[int] | None:
    """Which rows the keys are: all, or those without a missing value (missing="drop")."""
    [n_rows] = {len(column) for column in cells.values()}
    if n_rows == n_keys:
        return list(range(n_rows))
    whole = [k for k in range(n_rows) if all(column[k] != MISSING for column in cells.values())]
    return whole if len(whole) == n_keys else None


def _texts(values: Sequence[Any]) -> list[str]:
    return [as_text(value) for value in values]


def as_text(value: Any) -> str:
    """A cell as it is written; a number that is none and an empty cell are missing.

    >>> [as_text(cell) for cell in (19.99, "web", None, datetime.datetime(2024, 11, 5))]
    ['19.99', 'web', '–', '2024-11-05']
    """
    is_missing = value is None or value == "" or value != value
    if is_missing:
        return MISSING
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime.datetime):
        return str(value).removesuffix(" 00:00:00")
    return str(value)
