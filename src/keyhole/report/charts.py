"""What `report.js` needs to draw a chart: numbers, labels and the words shown under the pointer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keyhole.report.document import Chart, HeatMap, Series
from keyhole.report.palette import role_of
from keyhole.report.words import as_chart_text, number

# painted in this order, so that measured points lie on top
_ORDER = ("band", "thin", "dashed", "line", "points")


def chart_data(chart: Chart) -> dict[str, Any]:
    """A chart as plain data."""
    ordered = sorted(chart.series, key=lambda series: _ORDER.index(series.look))
    return {
        "kind": "curves",
        "x_label": as_chart_text(chart.x_label),
        "y_label": as_chart_text(chart.y_label),
        "x_log": chart.x_log,
        "y_log": chart.y_log,
        "series": [_series_data(series, chart) for series in ordered],
        "marks": [[as_chart_text(name), level] for name, level in chart.marks.items()],
    }


def heat_map_data(block: HeatMap) -> dict[str, Any]:
    """A heat map as plain data; `reach` is how far the colours go on either side of the centre."""
    numbers = [v for row in block.values for v in row if math.isfinite(v)]
    centre = block.centre
    reach = max((abs(v - centre) for v in numbers), default=1.0) or 1.0 if centre is not None else None
    columns, index = [as_chart_text(c) for c in block.columns], [as_chart_text(i) for i in block.index]
    x, y = as_chart_text(block.x_label), as_chart_text(block.y_label)
    return {
        "kind": "map",
        "x_label": x,
        "y_label": y,
        "columns": columns,
        "index": index,
        "values": [list(row) for row in block.values],
        "texts": _short(block.values),
        "hover": [
            [f"{y} {row}, {x} {name}<br><b>{number(v)}</b>" for name, v in zip(columns, values, strict=True)]
            for row, values in zip(index, block.values, strict=True)
        ],
        "centre": centre,
        "reach": reach,
    }


def _short(values: Sequence[Sequence[float]]) -> list[list[str]]:
    """Numbers short enough for a cell: two digits of the largest, and as many decimals everywhere."""
    largest = max((abs(v) for row in values for v in row if math.isfinite(v)), default=0.0)
    if largest and not 1e-3 <= largest < 1e5:
        return [[number(v, 2) for v in row] for row in values]
    decimals = max(0, 1 - math.floor(math.log10(largest))) if largest else 0
    return [[f"{v:.{decimals}f}".replace("-", "−") if math.isfinite(v) else "" for v in row] for row in values]


def legend_key(series: Series, chart: Chart) -> tuple[str, str, str]:
    """What switches a curve on and off: name, role and look; a band goes with a curve of its name, if there is one."""
    others = (
        s.look for s in chart.series if s.look != "band" and (s.name, role_of(s)) == (series.name, role_of(series))
    )
    look = next(others, series.look) if series.look == "band" else series.look
    return series.name, role_of(series), look


def _series_data(series: Series, chart: Chart) -> dict[str, Any]:
    return {
        "key": list(legend_key(series, chart)),
        "role": role_of(series),
        "look": series.look,
        "x": list(series.x),
        "y": list(series.y),
        "low": None if series.low is None else list(series.low),
        "high": None if series.high is None else list(series.high),
        "hover": [_words(series, chart, k) for k in range(len(series.x))],
    }


def _words(series: Series, chart: Chart, k: int) -> str:
    lines = [
        f"<b>{as_chart_text(series.name)}</b>",
        f"{as_chart_text(chart.x_label)}: {number(series.x[k], 5)}",
        f"{as_chart_text(chart.y_label)}: {number(series.y[k])}",
    ]
    if series.low is not None and series.high is not None:
        lines.append(f"from {number(series.low[k], 3)} to {number(series.high[k], 3)}")
    if series.hover is not None and series.hover[k]:
        lines.append(as_chart_text(series.hover[k]))
    return "<br>".join(lines)
