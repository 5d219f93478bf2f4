"""Charts on paper, as SVG and PNG. Nothing is computed here."""

from __future__ import annotations

import contextlib
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """No letter that a font lacks and no number that cannot be drawn is worth a warning.

    The rows have them all.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


@_without_warnings()
def draw_chart(chart: Any, style: Mapping[str, tuple[str, str]]) -> dict[str, bytes]:
    """Draw the curves of a chart on white: pictures by suffix, "svg" and "png".

    Equal charts give equal bytes.

    ``chart`` is not named by its type, because reports are made of drawings and not the other way
    round. ``style`` has colour and marker of each role; a curve without a role goes by its name.
    """
    figure = _figure(5.6, 3.9)
    axis = figure.add_axes((0.125, 0.235, 0.85, 0.675))
    handles: dict[tuple[str, str], Any] = {}
    for series in chart.series:
        colour, marker = style[series.role or series.name]
        drawn = _draw_series(axis, series, colour, _MARKERS[marker], lying=bool(chart.names))
        handles.setdefault((series.name, series.look), drawn)
    # an axis without a positive number has no logarithm
    if chart.x_log and any((_drawable(series.x) > 0).any() for series in chart.series):
        axis.set_xscale("log")
    if chart.y_log and any((_drawable(series.y) > 0).any() for series in chart.series):
        axis.set_yscale("log")
        axis.set_ylim(*_log_limits(chart))
    for side in (axis.xaxis, axis.yaxis):
        if side.get_scale() == "log":
            side.set_ticks(_log_ticks(*side.get_view_interval()))
            # plain numbers, which are also drawn faster than powers
            side.set_major_formatter(lambda value, _: f"{value:g}")
            side.set_minor_formatter(lambda value, _: "")
    for name, level in chart.marks.items():
        if math.isfinite(level) and (level > 0 or axis.get_yscale() == "linear"):
            axis.axhline(level, color="#8a929c", lw=0.8, ls=":")
            place = {
                "xycoords": ("axes fraction", "data"),
                "xytext": (-3, 2),
                "textcoords": "offset points",
            }
            axis.annotate(
                _label(name), (1, level), ha="right", fontsize=7.5, color="#5a626c", **place
            )
    axis.grid(True, which="major", color="#ecece6", lw=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    _name_axes(axis, chart)
    if chart.names:
        axis.set_yticks(range(len(chart.names)), [_label(name) for name in chart.names])
        axis.set_ylim(len(chart.names) - 0.5, -0.5)
        axis.set_xlim(left=0.0)
        axis.set(xlabel=axis.get_ylabel().replace("\n", " "), ylabel="")
    _draw_legend(axis, handles)
    return _pictures(figure)


@_without_warnings()
def draw_heat_map(block: Any) -> dict[str, bytes]:
    """Draw a `keyhole.lab.report.document.HeatMap` on white.

    Return the pictures by suffix, as `draw_chart` does.
    """
    values = _drawable(block.values).reshape(len(block.index), len(block.columns))
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    colours = "GnBu"
    if block.centre is not None:
        reach = max(high - block.centre, block.centre - low) or 1.0
        low, high, colours = block.centre - reach, block.centre + reach, "RdBu_r"
    height = min(9.0, max(2.6, 1.3 + 0.27 * len(block.index)))
    figure = _figure(6.0, height)
    axis = figure.add_axes((0.16, 0.62 / height, 0.72, 1 - 1.0 / height))
    image = axis.imshow(
        values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )
    _name_cells(axis.set_xticks, block.columns, most=16)
    _name_cells(axis.set_yticks, block.index, most=32)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    bar = figure.colorbar(image, cax=figure.add_axes((0.9, 0.62 / height, 0.02, 1 - 1.0 / height)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, length=0)
    _name_axes(axis, block)
    return _pictures(figure)


_MARKERS = {
    "circle": "o", "square": "s", "triangle": "^", "down": "v",
    "diamond": "D", "cross": "P", "pentagon": "p", "star": "*",
}  # fmt: skip


def _draw_legend(axis: Any, handles: Mapping[tuple[str, str], Any]) -> None:
    """One entry per name and look; a band goes with the curve of its name, if there is one."""
    curves = {name for name, look in handles if look != "band"}
    kept = {
        key: drawn
        for key, drawn in handles.items()
        if key[0] and not (key[1] == "band" and key[0] in curves)
    }
    if kept:
        place = {"loc": "upper center", "bbox_to_anchor": (0.46, -0.15), "ncols": min(3, len(kept))}
        axis.legend(
            list(kept.values()),
            [_label(name) for name, _ in kept],
            frameon=False,
            fontsize=7.5,
            **place,
        )


def _draw_series(axis: Any, series: Any, colour: str, marker: str, *, lying: bool) -> Any:
    x, y = _drawable(series.x), _drawable(series.y)
    low = y if series.low is None else _drawable(series.low)
    high = y if series.high is None else _drawable(series.high)
    if series.look == "band":
        return axis.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    if series.look == "points":
        bars = np.nan_to_num(np.maximum([y - low, high - y], 0.0))
        yerr = None if series.low is None or series.high is None else bars
        if lying:
            return axis.errorbar(
                y, x, xerr=yerr, color=colour, ls="", marker=marker, ms=6, elinewidth=1.2, capsize=3
            )
        return axis.errorbar(
            x, y, yerr=yerr, color=colour, lw=1.6, marker=marker, ms=4.2, elinewidth=0.9, capsize=2
        )
    strokes: dict[str, dict[str, Any]] = {
        "line": {"lw": 1.8},
        "dashed": {"lw": 1.4, "ls": (0, (4, 2.5))},
        "thin": {"lw": 0.7, "alpha": 0.75},
    }
    return axis.plot(x, y, color=colour, marker="" if len(x) > 1 else ".", **strokes[series.look])[
        0
    ]


def _drawable(values: Sequence[Any]) -> np.ndarray:
    """Numbers with gaps where there is nothing to draw.

    NaN, infinities, and what overflows on the way to the paper.
    """
    array = np.array(values, dtype=np.float64)
    array[~(np.abs(array) < 1e150)] = np.nan
    return array


def _log_ticks(low: float, high: float, most: int = 8) -> np.ndarray:
    """Numbers to write on a logarithmic axis.

    The densest of a few steps per decade that leaves room to read.
    """
    decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices = []
    for steps in ([1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 5], [1, 3], [1]):
        values = np.outer(decades, steps).ravel()
        choices.append(values[(values >= low * (1 - 1e-9)) & (values <= high * (1 + 1e-9))])
        if 2 < len(choices[-1]) <= most:
            return choices[-1]
    if len(choices[0]) <= most:  # hardly a fraction of a decade
        return choices[0]
    return choices[-1][:: max(1, -(-len(choices[-1]) // most))]


def _log_limits(chart: Any) -> tuple[float, float]:
    """Room for every point and upper bar.

    A lower bar that reaches far below every point is cut off.
    """
    centres = [float(y) for series in chart.series for y in _drawable(series.y) if y > 0]
    ends = [
        v
        for series in chart.series
        for side in (series.low, series.high)
        for v in (() if side is None else side)
    ] + list(chart.marks.values())
    inside = centres + [v for v in ends if min(centres) / 3 <= v < 1e150]
    room = (max(inside) / min(inside)) ** 0.045 if max(inside) > min(inside) else 2.0
    return min(inside) / room, max(inside) * room


def _label(text: str) -> str:
    r"""Words for matplotlib: a dollar is a dollar, ``f_{1,2}`` a subscript, backquotes go.

    >>> print(_label("cost_$ of f_{1,2}"))
    cost_\$ of f$_{\mathdefault{1,2}}$
    """
    text = text.replace("`", "").replace("$", r"\$")
    return re.sub(r"([_^])\{([\w,.+\- ]{1,40})\}", r"$\1{\\mathdefault{\2}}$", text)


def _name_axes(axis: Any, block: Any) -> None:
    axis.set_title(_label(textwrap.fill(block.title, 72)), fontsize=10, loc="left")
    axis.set_xlabel(_label(textwrap.fill(block.x_label, 64)), fontsize=9)
    axis.set_ylabel(_label(textwrap.fill(block.y_label, 48)), fontsize=9)
    axis.tick_params(labelsize=8)


def _name_cells(set_ticks: Any, names: Sequence[str], most: int) -> None:
    step = max(1, math.ceil(len(names) / most))
    set_ticks(
        range(0, len(names), step),
        [_label(textwrap.shorten(name, 24, placeholder="…")) for name in names[::step]],
    )


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150)


def _pictures(figure: Any) -> dict[str, bytes]:
    """The figure as SVG and PNG, the same bytes each time."""
    import matplotlib

    pictures = {}
    # measured once, for both: a layout costs as much as a drawing
    box = figure.get_tightbbox().padded(0.12)
    # identifiers in the SVG must not be random
    with matplotlib.rc_context({"svg.hashsalt": "keyhole"}):
        for suffix, more in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 150})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=suffix, bbox_inches=box, **more)
            pictures[suffix] = buffer.getvalue()
    return pictures
