"""Charts and heat maps on paper: SVG by matplotlib, for papers and for the pages of docs/.

Equal blocks give equal bytes.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keyhole.lab.report.document import Chart, HeatMap, Series
from keyhole.lab.report.inks import Ink, inks_of, role_of

MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle-up": "^",
    "triangle-down": "v",
    "diamond": "D",
    "cross": "P",
    "pentagon": "p",
    "star": "*",
}
"""matplotlib's names of markers by plotly's."""

STROKES: dict[str, dict[str, Any]] = {
    "line": {"lw": 1.8},
    "dashed": {"lw": 1.4, "ls": (0, (4, 2.5))},
    "thin": {"lw": 0.7, "alpha": 0.75},
}
"""Looks of lines."""

GRID = "#ecece6"
WORDS = "#5a626c"
NO_NUMBER = "#f0efec"
"""The colour of a cell of a matrix that has no number."""

MOST_WORDS = 14
"""Columns of a matrix beyond which there is no room for words in its cells."""

LARGEST = 1e150
"""Numbers beyond it overflow on the way to the paper: they are not drawn."""


def svg_of(block: Chart | HeatMap) -> bytes:
    """The picture of a block on white."""
    import matplotlib
    from matplotlib.figure import Figure

    # neither random identifiers nor the date may be in the file
    with _quiet(), matplotlib.rc_context({"svg.hashsalt": "keyhole"}):
        figure = Figure(figsize=(5.6, 3.9), dpi=150)
        if isinstance(block, Chart):
            _draw_chart(figure, block)
        else:
            _draw_heat_map(figure, block)
        content = io.BytesIO()
        figure.savefig(content, format="svg", bbox_inches="tight", metadata={"Date": None})
    return content.getvalue()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No letter that a font lacks and no number that cannot be drawn is worth a warning."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def _drawable(values: Sequence[Any]) -> np.ndarray:
    """Numbers with gaps where there is nothing to draw."""
    array = np.array(values, dtype=np.float64)
    array[~(np.abs(array) < LARGEST)] = np.nan
    return array


def _label(text: str) -> str:
    r"""Words for matplotlib: a dollar is a dollar, ``f_{1,2}`` a subscript, backquotes go.

    >>> print(_label("cost_$ of f_{1,2}"))
    cost_\$ of f$_{\mathdefault{1,2}}$
    """
    text = text.replace("`", "").replace("$", r"\$")
    return re.sub(r"([_^])\{([\w,.+\- ]{1,40})\}", r"$\1{\\mathdefault{\2}}$", text)


def _name_axes(axis: Any, block: Chart | HeatMap) -> None:
    """Title and names of the axes, in lines that fit the picture."""
    axis.set_title(_label(textwrap.fill(block.title, 72)), fontsize=10, loc="left")
    axis.set_xlabel(_label(textwrap.fill(block.x_label, 64)), fontsize=9)
    axis.set_ylabel(_label(textwrap.fill(block.y_label, 48)), fontsize=9)
    axis.tick_params(labelsize=8)


# ---------------------------------------------------------------- curves


def _draw_chart(figure: Any, chart: Chart) -> None:
    """Curves, marks, axes and legend."""
    axis = figure.add_subplot()
    inks = inks_of(chart.series)
    handles: dict[str, Any] = {}
    for series in chart.series:
        drawn = _draw_series(axis, series, inks[role_of(series)], bool(chart.names))
        # a band goes with the curve of its name, if there is one
        if series.name and not (series.look == "band" and series.name in handles):
            handles[series.name] = drawn
    _set_scales(axis, chart)
    _draw_marks(axis, chart)
    axis.grid(True, which="major", color=GRID, lw=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    _name_axes(axis, chart)
    if chart.names:
        # names one below the other, what was y from zero to the right
        axis.set_yticks(range(len(chart.names)), [_label(name) for name in chart.names])
        axis.set_ylim(len(chart.names) - 0.5, -0.5)
        axis.set_xlim(left=0.0)
        axis.set(xlabel=axis.get_ylabel().replace("\n", " "), ylabel="")
    if handles:
        axis.legend(
            handles.values(),
            [_label(name) for name in handles],
            frameon=False,
            fontsize=7.5,
            loc="upper center",
            bbox_to_anchor=(0.46, -0.15),
            ncols=min(3, len(handles)),
        )


def _draw_series(axis: Any, series: Series, ink: Ink, is_on_its_side: bool) -> Any:
    """One curve, as its look says: what the legend shows of it."""
    x = _drawable(series.x)
    y = _drawable(series.y)
    low = y if series.low is None else _drawable(series.low)
    high = y if series.high is None else _drawable(series.high)
    if series.look == "band":
        return axis.fill_between(x, low, high, color=ink.colour, alpha=0.15, lw=0)
    if series.look not in ("points", "dots"):
        marker = "" if len(x) > 1 else "."
        lines = axis.plot(x, y, color=ink.colour, marker=marker, **STROKES[series.look])
        return lines[0]
    bars = None
    if series.low is not None and series.high is not None:
        bars = np.nan_to_num(np.maximum([y - low, high - y], 0.0))
    style = {
        "color": ink.colour,
        "marker": MARKERS[ink.marker],
        "ms": 4.2,
        "elinewidth": 0.9,
        "capsize": 2,
    }
    if is_on_its_side:
        return axis.errorbar(y, x, xerr=bars, ls="", **style)
    return axis.errorbar(x, y, yerr=bars, ls="-" if series.look == "points" else "", **style)


def _set_scales(axis: Any, chart: Chart) -> None:
    """Logarithmic axes where they are asked for and a number is positive, with plain numbers."""
    from matplotlib.ticker import LogLocator

    for is_log, side, name in ((chart.x_log, axis.xaxis, "x"), (chart.y_log, axis.yaxis, "y")):
        parts = [series.x if name == "x" else series.y for series in chart.series]
        values = _drawable([value for part in parts for value in part])
        positive = values[values > 0]
        if not is_log or len(positive) == 0:
            continue
        axis.set(**{f"{name}scale": "log"})
        low, high = float(positive.min()), float(positive.max())
        if name == "y":
            # a bar or a mark that lies far below every point is cut off
            levels = [level for level in chart.marks.values() if low / 3 <= level < LARGEST]
            low, high = min([low, *levels]), max([high, *levels])
            room = (high / low) ** 0.05 if high > low else 2.0
            axis.set_ylim(low / room, high * room)
        decades = math.log10(high / low)
        subs = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
        side.set_major_locator(LogLocator(subs=subs, numticks=9))
        side.set_major_formatter(lambda value, _: f"{value:g}")
        side.set_minor_formatter(lambda value, _: "")


def _draw_marks(axis: Any, chart: Chart) -> None:
    """Dotted levels with their names at the right end, where the axis has such levels."""
    lowest, highest = sorted(axis.get_ylim())
    for name, level in chart.marks.items():
        if lowest <= level <= highest:
            axis.axhline(level, color="#8a929c", lw=0.8, ls=":")
            axis.annotate(
                _label(name),
                (1, level),
                xycoords=("axes fraction", "data"),
                xytext=(-3, 2),
                textcoords="offset points",
                ha="right",
                fontsize=7.5,
                color=WORDS,
            )


# ---------------------------------------------------------------- heat maps


def _draw_heat_map(figure: Any, block: HeatMap) -> None:
    """A matrix with words in its cells, or with a colour bar beside it."""
    import matplotlib

    values = _drawable(block.values).reshape(len(block.index), len(block.columns))
    finite = values[np.isfinite(values)]
    low, high, colours = 0.0, 1.0, "GnBu"
    if finite.size:
        low, high = float(finite.min()), float(finite.max())
    if block.centre is not None:
        # colours reach equally far on both sides
        reach = max(high - block.centre, block.centre - low) or 1.0
        low, high, colours = block.centre - reach, block.centre + reach, "RdBu_r"

    has_words = block.words is not None and len(block.columns) <= MOST_WORDS
    width = max(6.0, 1.6 + 0.72 * len(block.columns)) if has_words else 6.0
    figure.set_size_inches(width, min(9.0, max(2.6, 1.8 + 0.27 * len(block.index))))
    axis = figure.add_subplot()
    image = axis.imshow(
        values,
        cmap=matplotlib.colormaps[colours].with_extremes(bad=NO_NUMBER),
        vmin=low,
        vmax=high,
        aspect="auto",
        interpolation="nearest",
    )
    for names, set_ticks, most in (
        (block.columns, axis.set_xticks, 16),
        (block.index, axis.set_yticks, 32),
    ):
        step = max(1, math.ceil(len(names) / most))
        labels = [_label(textwrap.shorten(name, 24, placeholder="…")) for name in names[::step]]
        set_ticks(range(0, len(names), step), labels)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    _name_axes(axis, block)
    if block.words is None or not has_words:
        figure.colorbar(image, ax=axis, fraction=0.03).outline.set_visible(False)
        return
    for label in axis.get_xticklabels():
        label.set(rotation=35, ha="right", rotation_mode="anchor")
    # light words on dark colours
    dark_from = (low + high) / 2 + (high - low) / 6
    for row, texts in enumerate(block.words):
        for place, text in enumerate(texts):
            colour = "white" if values[row, place] > dark_from else "#1f2937"
            axis.text(
                place, row, _label(text), ha="center", va="center", fontsize=7.5, color=colour
            )
