"""Charts and heat maps as figures of plotly: plain data that its library draws in the browser.

Ground is transparent and words are grey, so that one figure is read on light and on dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keyhole.lab.report.document import Chart, HeatMap, Series
from keyhole.lab.report.inks import Ink, inks_of, role_of
from keyhole.lab.report.words import as_chart_text, number

WORDS = "#7c8590"
GRID = "rgba(128, 136, 148, 0.22)"
RISING = [[0, "#e6f0e6"], [0.5, "#5fa8b0"], [1, "#0b3c5d"]]
DIVERGING = [[0, "#0a5c94"], [0.25, "#7fb4d8"], [0.5, "#f6f5f1"], [0.75, "#eda877"], [1, "#b64c00"]]

LINES: dict[str, dict[str, Any]] = {
    "points": {"width": 2},
    "line": {"width": 2.2},
    "dashed": {"width": 1.8, "dash": "dash"},
    "thin": {"width": 1},
}
"""Strokes of the looks that have one."""

PAINTED = ("band", "thin", "dashed", "line", "points", "dots")
"""The order of the looks, so that measured points lie on top."""

MOST_WORDS = 14
"""Columns of a matrix beyond which there is no room for words in its cells."""


def figure_of(block: Chart | HeatMap) -> dict[str, Any]:
    """The figure of a block: its traces and its layout."""
    if isinstance(block, Chart):
        return _curves(block)
    return _matrix(block)


def _layout(block: Chart | HeatMap, height: float, **more: Any) -> dict[str, Any]:
    """What all figures share."""
    return {
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0, 0, 0, 0)",
        "plot_bgcolor": "rgba(0, 0, 0, 0)",
        "font": {"size": 12, "color": WORDS},
        "margin": {"l": 60, "r": 14, "t": 10, "b": 48},
        "hovermode": "closest",
        # curves that a reader hid stay hidden when the figure is drawn anew
        "uirevision": as_chart_text(block.name),
        **more,
    }


def _axis(label: str, **more: Any) -> dict[str, Any]:
    """An axis with its label."""
    return {
        "title": {"text": as_chart_text(label), "standoff": 8},
        "gridcolor": GRID,
        "zerolinecolor": GRID,
        "automargin": True,
        "exponentformat": "power",
        **more,
    }


# ---------------------------------------------------------------- curves


def _curves(chart: Chart) -> dict[str, Any]:
    """Curves on common axes."""
    inks = inks_of(chart.series)
    measured = {role_of(series) for series in chart.series if series.look in ("points", "dots")}
    traces: list[dict[str, Any]] = []
    for series in sorted(chart.series, key=lambda series: PAINTED.index(series.look)):
        _check_sizes(series)
        # lines that go with measured points have their colour and their entry in the legend
        has_entry = series.look in ("points", "dots") or role_of(series) not in measured
        for trace in _traces(series, inks[role_of(series)], chart):
            trace["showlegend"] &= has_entry
            traces.append(trace)
    x_axis = _axis(chart.x_label, **_scale([series.x for series in chart.series], chart.x_log))
    heights = [series.y for series in chart.series] + [list(chart.marks.values())]
    y_axis = _axis(chart.y_label, **_scale(heights, chart.y_log))
    if chart.names:
        # names down the side, what was y from zero to the right
        x_axis = _axis(chart.y_label, rangemode="tozero")
        y_axis = _axis("", autorange="reversed", **_places(chart.names, len(chart.names)))
    n_entries = sum(trace["showlegend"] for trace in traces)
    shapes, annotations = _marks(chart)
    layout = _layout(
        chart,
        height=320 + 18 * math.ceil(n_entries / 2),
        xaxis=x_axis,
        yaxis=y_axis,
        legend={"orientation": "h", "y": -0.2, "yanchor": "top", "font": {"size": 11}},
        shapes=shapes,
        annotations=annotations,
    )
    return {"data": traces, "layout": layout}


def _check_sizes(series: Series) -> None:
    """Refuse a curve whose parts are not equally long."""
    for part in (series.y, series.low, series.high, series.hover):
        if part is not None and len(part) != len(series.x):
            raise ValueError(
                f"x and y of the curve {series.name!r} must have the same size: got "
                f"{len(series.x)} and {len(part)}."
            )


def _traces(series: Series, ink: Ink, chart: Chart) -> list[dict[str, Any]]:
    """The traces of a curve: one, or the two edges of a band."""
    name = as_chart_text(series.name)
    common = {
        "type": "scatter",
        "x": list(series.x),
        "y": list(series.y),
        "name": name,
        "showlegend": bool(series.name),
        "legendgroup": as_chart_text(role_of(series)),
        "hovertext": _hover(series, chart),
        "hovertemplate": "%{hovertext}<extra></extra>",
        "line": {"color": ink.colour, **LINES.get(series.look, {})},
        "marker": {"color": ink.colour, "symbol": ink.marker, "size": 7},
    }
    if series.look == "band":
        edge = {
            **common,
            "mode": "lines",
            "line": {"width": 0},
            "hoverinfo": "skip",
            "hovertemplate": None,
        }
        low = {**edge, "y": list(series.low or series.y), "showlegend": False}
        high = {**edge, "y": list(series.high or series.y), "fill": "tonexty",
                "fillcolor": _faded(ink.colour)}  # fmt: skip
        return [low, high]
    if series.look in ("points", "dots"):
        bars = _error_bars(series, ink)
        if chart.names:
            sideways = {"x": list(series.y), "y": list(series.x), "mode": "markers"}
            return [{**common, **sideways, "error_x": bars}]
        mode = "markers" if series.look == "dots" else "lines+markers"
        return [{**common, "mode": mode, "error_y": bars}]
    mode = "lines" if len(series.x) > 1 else "markers"
    return [{**common, "mode": mode}]


def _error_bars(series: Series, ink: Ink) -> dict[str, Any]:
    """Bars from the points to their low and high ends; none where there are no ends."""
    if series.low is None or series.high is None:
        return {"visible": False}
    y = np.array(series.y, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        above = np.nan_to_num(np.array(series.high, dtype=np.float64) - y)
        below = np.nan_to_num(y - np.array(series.low, dtype=np.float64))
    return {
        "type": "data",
        "symmetric": False,
        "array": np.maximum(above, 0.0).tolist(),
        "arrayminus": np.maximum(below, 0.0).tolist(),
        "thickness": 1.2,
        "width": 3,
        "color": ink.colour,
    }


def _hover(series: Series, chart: Chart) -> list[str]:
    """Words under the pointer: the curve, and the numbers of its point in full."""
    x_label = as_chart_text(chart.x_label)
    y_label = as_chart_text(chart.y_label)
    texts = []
    for i, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        place = as_chart_text(chart.names[int(x)]) if chart.names else number(x)
        lines = [f"<b>{as_chart_text(series.name)}</b>", f"{x_label}: {place}"]
        value = f"{y_label}: {number(y)}"
        if series.low is not None and series.high is not None:
            value += f" ({number(series.low[i])} to {number(series.high[i])})"
        lines.append(value)
        if series.hover is not None:
            lines.append(as_chart_text(series.hover[i]))
        texts.append("<br>".join(lines))
    return texts


def _faded(colour: str) -> str:
    """A colour that lets through what is below it."""
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.16)"


def _scale(parts: Sequence[Sequence[float]], is_log: bool) -> dict[str, Any]:
    """Type and range of an axis.

    A logarithmic one spans what is drawn on it: an error bar that reaches far below every point
    must not squeeze the points together.
    """
    if not is_log:
        return {}
    values = np.array([value for part in parts for value in part], dtype=np.float64)
    logs = np.log10(values[np.isfinite(values) & (values > 0)])
    if len(logs) == 0:
        return {}
    room = 0.05 * float(np.ptp(logs)) or 0.3
    low = float(logs.min()) - room
    high = float(logs.max()) + room
    # 1, 2, 5 in each decade, or decades alone where there are many
    return {"type": "log", "range": [low, high], "dtick": "D2" if high - low < 2.5 else 1}


def _marks(chart: Chart) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Dotted levels with their names at the right end."""
    shapes = []
    annotations = []
    for name, level in chart.marks.items():
        if not math.isfinite(level) or (chart.y_log and level <= 0):
            continue
        line = {"color": WORDS, "width": 1, "dash": "dot"}
        ends = {"x0": 0, "x1": 1, "y0": level, "y1": level}
        shapes.append({"type": "line", "xref": "paper", **ends, "line": line})
        annotations.append(
            {
                "text": as_chart_text(name),
                "xref": "paper",
                "x": 1,
                "y": math.log10(level) if chart.y_log else level,
                "xanchor": "right",
                "yanchor": "bottom",
                "showarrow": False,
                "font": {"size": 11},
            }
        )
    return shapes, annotations


def _places(names: Sequence[str], most: int) -> dict[str, Any]:
    """Names instead of numbers on an axis, as many as there is room for."""
    step = max(1, math.ceil(len(names) / most))
    kept = range(0, len(names), step)
    return {
        "tickmode": "array",
        "tickvals": list(kept),
        "ticktext": [as_chart_text(_cut(names[k])) for k in kept],
    }


def _cut(name: str, longest: int = 28) -> str:
    """A name that leaves room for the chart it stands beside."""
    return name if len(name) <= longest else name[: longest - 1] + "…"


# ---------------------------------------------------------------- heat maps


def _matrix(block: HeatMap) -> dict[str, Any]:
    """A matrix of numbers over named rows and columns."""
    values = np.array(block.values, dtype=np.float64).reshape(len(block.index), len(block.columns))
    words = block.words
    if words is None:
        words = [["" if not math.isfinite(v) else f"{v:.2g}" for v in row] for row in block.values]
    full = block.words or [[number(v) for v in row] for row in block.values]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": values.tolist(),
        "xgap": 1,
        "ygap": 1,
        "colorscale": RISING,
        "colorbar": {"thickness": 10, "outlinewidth": 0},
        "hovertext": [
            [
                f"{as_chart_text(f'{block.y_label} {row}, {block.x_label} {column}')}"
                f"<br><b>{as_chart_text(text)}</b>"
                for column, text in zip(block.columns, texts, strict=True)
            ]
            for row, texts in zip(block.index, full, strict=True)
        ],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }
    if len(block.columns) <= MOST_WORDS:
        trace["text"] = [[as_chart_text(text) for text in row] for row in words]
        trace["texttemplate"] = "%{text}"
    if block.centre is not None:
        # colours reach equally far on both sides
        distances = np.abs(values[np.isfinite(values)] - block.centre)
        reach = float(distances.max(initial=0.0)) or 1.0
        trace |= {"colorscale": DIVERGING}
        trace |= {"zmin": block.centre - reach, "zmax": block.centre + reach}
    layout = _layout(
        block,
        height=min(760, 130 + 30 * len(block.index)),
        showlegend=False,
        xaxis=_axis(block.x_label, showgrid=False, **_places(block.columns, 24)),
        yaxis=_axis(
            block.y_label, showgrid=False, autorange="reversed", **_places(block.index, 32)
        ),
    )
    # a page that lets a reader click on places needs their names
    names: Mapping[str, Any] = {
        "columns": [as_chart_text(name) for name in block.columns],
        "index": [as_chart_text(name) for name in block.index],
    }
    return {"data": [trace, *_over(block)], "layout": layout, **names}


def _over(block: HeatMap) -> list[dict[str, Any]]:
    """The line and the points that lie over a matrix."""
    traces: list[dict[str, Any]] = []
    if block.line:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": list(range(len(block.line))),
                "y": list(block.line),
                "line": {"color": "#1f2937", "width": 2.5},
                "hoverinfo": "skip",
            }
        )
    if block.points:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [x for x, _, _ in block.points],
                "y": [y for _, y, _ in block.points],
                "hovertext": [as_chart_text(text) for *_, text in block.points],
                "hovertemplate": "%{hovertext}<extra></extra>",
                "marker": {
                    "size": 13,
                    "color": "#ffffff",
                    "line": {"color": "#1f2937", "width": 2},
                },
            }
        )
    return traces
