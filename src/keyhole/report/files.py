"""Files of a report: safe names, and the rows behind each chart as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence

from keyhole.report.document import Chart, HeatMap, Row, Series, Table


def safe_names(names: Sequence[str]) -> list[str]:
    """Names fit for files and anchors, all different also where case does not count.

    A name that is fit already and alone stays as it is.

    >>> safe_names(["f_{1,2}", "../../etc", "a", "A", ""])
    ['f_-1-2', 'etc', 'a', 'A-2', 'unnamed']
    """
    taken: set[str] = set()
    safe = []
    for name in names:
        stem = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:80] or "unnamed"
        choice, k = stem, 1
        while choice.casefold() in taken:
            k += 1
            choice = f"{stem}-{k}"
        taken.add(choice.casefold())
        safe.append(choice)
    return safe


def rows_behind(block: Chart | HeatMap | Table) -> list[Row]:
    """The rows that drew a block: those it brings, else one per point or cell."""
    if block.rows:
        return list(block.rows)
    if isinstance(block, Chart):
        return [row for series in block.series for row in _points(series)]
    if isinstance(block, HeatMap):
        return [
            {"row": row, "column": name, "value": value}
            for row, values in zip(block.index, block.values, strict=True)
            for name, value in zip(block.columns, values, strict=True)
        ]
    return []


def csv_bytes(rows: Sequence[Row]) -> bytes:
    """Rows as CSV, numbers in full; a key that a row lacks is an empty cell.

    >>> csv_bytes([{"n": 1, "error": 0.1}, {"n": 2, "note": None}]).decode().split()
    ['n,error,note', '1,0.1,', '2,,']
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=keys, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _points(series: Series) -> list[Row]:
    empty = [None] * len(series.x)
    low = empty if series.low is None else series.low
    high = empty if series.high is None else series.high
    return [
        {"series": series.name, "look": series.look, "x": x, "y": y, "low": a, "high": b}
        for x, y, a, b in zip(series.x, series.y, low, high, strict=True)
    ]
