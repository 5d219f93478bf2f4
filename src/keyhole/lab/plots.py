"""Charts on paper, as SVG and PNG. Nothing is computed here.

Reports draw every chart twice: here for papers and for the pages of docs/, and by plotly.js in the
browser, where points say their numbers and curves can be hidden. Neither library does the work of
the other: plotly writes no picture without a browser, and matplotlib no page to explore.

Charts are not named by their types here, because reports are made of drawings and not the other way
round: ``chart`` is a `keyhole.lab.report.document.Chart`, ``series`` one of its curves.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

GRID = "#ecece6"
MARK_LINE = "#8a929c"
MARK_TEXT = "#5a626c"

MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "down": "v",
    "diamond": "D",
    "cross": "P",
    "pentagon": "p",
    "star": "*",
}
"""Markers of roles by the names that matplotlib has for them."""

NO_NUMBER = "#f0efec"
"""The colour of a cell of a matrix that has no number."""

MOST_COLUMNS_OF_WORDS = 14
"""Columns of a matrix beyond which there is no room for words in its cells."""

LARGEST = 1e150
"""Numbers beyond it overflow on the way to the paper: they are not drawn."""

STEPS_PER_DECADE = ([1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 5], [1, 3], [1])
"""What may be written on a logarithmic axis, the densest first."""


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """No letter that a font lacks and no number that cannot be drawn is worth a warning.

    The rows have them all.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


# ---------------------------------------------------------------- charts


@_without_warnings()
def draw_chart(chart: Any, style: Mapping[str, tuple[str, str]]) -> dict[str, bytes]:
    """Draw the curves of a chart on white: pictures by suffix, "svg" and "png".

    Equal charts give equal bytes. ``style`` has colour and marker of each role; a curve without a
    role goes by its name.
    """
    figure = _figure(5.6, 3.9)
    axis = figure.add_axes((0.125, 0.235, 0.85, 0.675))

    # the curves; several of one name and look have one entry in the legend
    is_on_its_side = bool(chart.names)
    handles: dict[tuple[str, str], Any] = {}
    for series in chart.series:
        colour, marker = style[series.role or series.name]
        drawn = _draw_series(axis, series, colour, MARKERS[marker], is_on_its_side)
        handles.setdefault((series.name, series.look), drawn)

    # the axes: scales first, since marks and grid lie on them
    _set_scales(axis, chart)
    _draw_marks(axis, chart.marks)
    axis.grid(True, which="major", color=GRID, lw=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)

    # the words
    _name_axes(axis, chart)
    if is_on_its_side:
        _turn_on_its_side(axis, chart.names)
    _draw_legend(axis, handles)
    return _pictures(figure)


def _draw_series(axis: Any, series: Any, colour: str, marker: str, is_on_its_side: bool) -> Any:
    """One curve, as its look says: what the legend shows of it."""
    x = _drawable(series.x)
    y = _drawable(series.y)
    low = y if series.low is None else _drawable(series.low)
    high = y if series.high is None else _drawable(series.high)
    if series.look == "band":
        return axis.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    if series.look == "points":
        # bars, if there are any, from the points to their low and high ends
        bars = None
        if series.low is not None and series.high is not None:
            bars = np.nan_to_num(np.maximum([y - low, high - y], 0.0))
        return _draw_points(axis, x, y, bars, colour, marker, is_on_its_side)
    return _draw_line(axis, x, y, colour, series.look)


def _draw_points(
    axis: Any,
    x: np.ndarray,
    y: np.ndarray,
    bars: np.ndarray | None,
    colour: str,
    marker: str,
    is_on_its_side: bool,
) -> Any:
    """Points with bars: joined by a line, but for those of names that have no order."""
    if is_on_its_side:
        return axis.errorbar(
            y,
            x,
            xerr=bars,
            color=colour,
            ls="",
            marker=marker,
            ms=6,
            elinewidth=1.2,
            capsize=3,
        )
    return axis.errorbar(
        x,
        y,
        yerr=bars,
        color=colour,
        lw=1.6,
        marker=marker,
        ms=4.2,
        elinewidth=0.9,
        capsize=2,
    )


def _draw_line(axis: Any, x: np.ndarray, y: np.ndarray, colour: str, look: str) -> Any:
    """A line, dashed or thin as its look says; a single point is a dot."""
    marker = "" if len(x) > 1 else "."
    if look == "dashed":
        lines = axis.plot(x, y, color=colour, marker=marker, lw=1.4, ls=(0, (4, 2.5)))
    elif look == "thin":
        lines = axis.plot(x, y, color=colour, marker=marker, lw=0.7, alpha=0.75)
    else:
        lines = axis.plot(x, y, color=colour, marker=marker, lw=1.8)
    return lines[0]


def _drawable(values: Sequence[Any]) -> np.ndarray:
    """Numbers with gaps where there is nothing to draw.

    NaN, infinities, and what overflows on the way to the paper.
    """
    array = np.array(values, dtype=np.float64)
    is_small_enough = np.abs(array) < LARGEST
    array[~is_small_enough] = np.nan
    return array


# ---------------------------------------------------------------- axes


def _set_scales(axis: Any, chart: Any) -> None:
    """Logarithmic axes where they are asked for; one without a positive number has no logarithm."""
    has_positive_x = any((_drawable(series.x) > 0).any() for series in chart.series)
    has_positive_y = any((_drawable(series.y) > 0).any() for series in chart.series)
    if chart.x_log and has_positive_x:
        axis.set_xscale("log")
    if chart.y_log and has_positive_y:
        axis.set_yscale("log")
        axis.set_ylim(*_log_limits(chart))

    # plain numbers, which are also drawn faster than powers
    for side in (axis.xaxis, axis.yaxis):
        if side.get_scale() == "log":
            side.set_ticks(_log_ticks(*side.get_view_interval()))
            side.set_major_formatter(lambda value, _: f"{value:g}")
            side.set_minor_formatter(lambda value, _: "")


def _log_ticks(low: float, high: float, most: int = 8) -> np.ndarray:
    """Numbers to write on a logarithmic axis.

    The densest of a few steps per decade that leaves room to read.
    """
    decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices = []
    for steps in STEPS_PER_DECADE:
        values = np.outer(decades, steps).ravel()
        is_inside = (values >= low * (1 - 1e-9)) & (values <= high * (1 + 1e-9))
        choices.append(values[is_inside])
        if 2 < len(choices[-1]) <= most:
            return choices[-1]

    # hardly a fraction of a decade: the densest, few as they are
    densest = choices[0]
    if len(densest) <= most:
        return densest

    # many decades: every second, third, … of them
    sparsest = choices[-1]
    step = max(1, math.ceil(len(sparsest) / most))
    return sparsest[::step]


def _log_limits(chart: Any) -> tuple[float, float]:
    """Room for every point and upper bar.

    A lower bar that reaches far below every point is cut off.
    """
    # points, and the ends of bars and marks that are not far below them
    inside = [float(y) for series in chart.series for y in _drawable(series.y) if y > 0]
    lowest_end = min(inside) / 3
    ends = [*chart.marks.values()]
    for series in chart.series:
        for side in (series.low, series.high):
            if side is not None:
                ends.extend(side)
    inside += [end for end in ends if lowest_end <= end < LARGEST]

    # 4.5 % of the axis on either side, or a factor of two around a single number
    smallest = min(inside)
    largest = max(inside)
    room = 2.0
    if largest > smallest:
        room = (largest / smallest) ** 0.045
    return smallest / room, largest * room


def _draw_marks(axis: Any, marks: Mapping[str, float]) -> None:
    """Dotted levels with their names at the right end, where the axis has such levels."""
    is_linear = axis.get_yscale() == "linear"
    for name, level in marks.items():
        is_on_axis = math.isfinite(level) and (level > 0 or is_linear)
        if not is_on_axis:
            continue
        axis.axhline(level, color=MARK_LINE, lw=0.8, ls=":")

        # a level far below all points is beyond the limits of the axis: its name would stand alone,
        # and stretch the picture
        lowest, highest = sorted(axis.get_ylim())
        if not lowest <= level <= highest:
            continue
        axis.annotate(
            _label(name),
            (1, level),
            xycoords=("axes fraction", "data"),
            xytext=(-3, 2),
            textcoords="offset points",
            ha="right",
            fontsize=7.5,
            color=MARK_TEXT,
        )


def _turn_on_its_side(axis: Any, names: Sequence[str]) -> None:
    """Names one below the other instead of numbers, and what was y from zero to the right."""
    axis.set_yticks(range(len(names)), [_label(name) for name in names])
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlim(left=0.0)
    axis.set(xlabel=axis.get_ylabel().replace("\n", " "), ylabel="")


def _draw_legend(axis: Any, handles: Mapping[tuple[str, str], Any]) -> None:
    """One entry per name and look; a band goes with the curve of its name, if there is one."""
    names_of_curves = {name for name, look in handles if look != "band"}
    labels = []
    shown = []
    for (name, look), drawn in handles.items():
        is_band_of_a_curve = look == "band" and name in names_of_curves
        if name and not is_band_of_a_curve:
            labels.append(_label(name))
            shown.append(drawn)
    if shown:
        axis.legend(
            shown,
            labels,
            frameon=False,
            fontsize=7.5,
            loc="upper center",
            bbox_to_anchor=(0.46, -0.15),
            ncols=min(3, len(shown)),
        )


# ---------------------------------------------------------------- heat maps


@_without_warnings()
def draw_heat_map(block: Any) -> dict[str, bytes]:
    """Draw a `keyhole.lab.report.document.HeatMap` on white.

    Return the pictures by suffix, as `draw_chart` does.
    """
    # the range of colours: of the numbers, or symmetric about the centre
    values = _drawable(block.values).reshape(len(block.index), len(block.columns))
    finite = values[np.isfinite(values)]
    low = 0.0
    high = 1.0
    if finite.size:
        low = float(finite.min())
        high = float(finite.max())
    colours = "GnBu"
    if block.centre is not None:
        reach = max(high - block.centre, block.centre - low) or 1.0
        low = block.centre - reach
        high = block.centre + reach
        colours = "RdBu_r"

    # the matrix, as high as its rows need, with room below for the names of its columns
    has_words = block.words is not None and len(block.columns) <= MOST_COLUMNS_OF_WORDS
    width = 6.0
    room_below = 0.62
    if has_words:
        width = max(width, 1.6 + 0.72 * len(block.columns))
        room_below = 1.25
    height = min(9.0, max(2.6, room_below + 0.68 + 0.27 * len(block.index)))
    bottom = room_below / height
    share = 1 - (room_below + 0.38) / height
    figure = _figure(width, height)
    axis = figure.add_axes((0.16, bottom, 0.72, share))
    colour_map = _colour_map(colours)
    image = axis.imshow(
        values, cmap=colour_map, vmin=low, vmax=high, aspect="auto", interpolation="nearest"
    )
    _name_cells(axis.set_xticks, block.columns, most=16)
    _name_cells(axis.set_yticks, block.index, most=32)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)

    # words in the cells say the numbers; without them the colours beside the matrix do
    if has_words:
        for label in axis.get_xticklabels():
            label.set(rotation=35, ha="right", rotation_mode="anchor")
        _write_words(axis, block.words, values, low, high)
    else:
        bar = figure.colorbar(image, cax=figure.add_axes((0.9, bottom, 0.02, share)))
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=8, length=0)
    _name_axes(axis, block)
    return _pictures(figure)


def _colour_map(name: str) -> Any:
    """Colours by name, with a light grey for cells without a number."""
    import matplotlib

    return matplotlib.colormaps[name].with_extremes(bad=NO_NUMBER)


def _write_words(
    axis: Any, words: Sequence[Sequence[str]], values: np.ndarray, low: float, high: float
) -> None:
    """Write words into the cells of a matrix, light on dark colours."""
    middle = (low + high) / 2
    for row, texts in enumerate(words):
        for column, text in enumerate(texts):
            is_dark = values[row, column] > middle + (high - low) / 6
            colour = "white" if is_dark else "#1f2937"
            axis.text(
                column, row, _label(text), ha="center", va="center", fontsize=7.5, color=colour
            )


def _name_cells(set_ticks: Callable[..., object], names: Sequence[str], most: int) -> None:
    """Name rows or columns, as many of them as there is room for."""
    step = max(1, math.ceil(len(names) / most))
    labels = [_label(textwrap.shorten(name, 24, placeholder="…")) for name in names[::step]]
    set_ticks(range(0, len(names), step), labels)


# ---------------------------------------------------------------- words and files


def _label(text: str) -> str:
    r"""Words for matplotlib: a dollar is a dollar, ``f_{1,2}`` a subscript, backquotes go.

    >>> print(_label("cost_$ of f_{1,2}"))
    cost_\$ of f$_{\mathdefault{1,2}}$
    """
    text = text.replace("`", "").replace("$", r"\$")
    return re.sub(r"([_^])\{([\w,.+\- ]{1,40})\}", r"$\1{\\mathdefault{\2}}$", text)


def _name_axes(axis: Any, block: Any) -> None:
    """Title and names of the axes, in lines that fit the picture."""
    axis.set_title(_label(textwrap.fill(block.title, 72)), fontsize=10, loc="left")
    axis.set_xlabel(_label(textwrap.fill(block.x_label, 64)), fontsize=9)
    axis.set_ylabel(_label(textwrap.fill(block.y_label, 48)), fontsize=9)
    axis.tick_params(labelsize=8)


def _figure(width: float, height: float) -> Any:
    """An empty figure of so many inches; matplotlib is imported when something is drawn."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150)


def _pictures(figure: Any) -> dict[str, bytes]:
    """The figure as SVG and PNG, the same bytes each time."""
    import matplotlib

    # measured once, for both: a layout costs as much as a drawing
    box = figure.get_tightbbox().padded(0.12)

    # neither random identifiers nor the date may be in the SVG
    svg = io.BytesIO()
    png = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "keyhole"}):
        figure.savefig(svg, format="svg", bbox_inches=box, metadata={"Date": None})
        figure.savefig(png, format="png", bbox_inches=box, dpi=150)
    return {"svg": svg.getvalue(), "png": png.getvalue()}
