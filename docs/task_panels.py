"""Draw the pictures of docs/explanation/what_one_layer_learns.md.

`keyhole reproduce tasks --preset full --out OUT`, then `python docs/task_panels.py OUT FIGURES`
writes FIGURES/tasks-matrix.svg, FIGURES/tasks-panels.png and their rows as CSV from the cells in
OUT. Nothing is measured here.
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from keyhole.lab.cells import Store
from keyhole.lab.figures import tasks
from keyhole.lab.plots import MARKERS, draw_heat_map
from keyhole.lab.report.document import Chart, HeatMap, Report, csv_bytes
from keyhole.lab.report.html import inks_of

COLUMNS = 4


def main(out: Path, figures: Path) -> None:
    """Read the cells of the full preset and write the pictures."""
    config = tasks.PRESETS["full"]
    with Store(out / "cells.sqlite") as store:
        results = store.get(tasks.cells(config))
    section = tasks.section(config, results)
    charts = [block for block in section.blocks if isinstance(block, Chart)]
    [matrix] = [block for block in section.blocks if isinstance(block, HeatMap)]

    pictures = draw_heat_map(matrix)
    (figures / "tasks-matrix.svg").write_bytes(pictures["svg"])
    (figures / "tasks-matrix.csv").write_bytes(csv_bytes(matrix.rows))

    inks = inks_of(Report(title="", lead="", sections=[section]))
    figure = draw_panels(charts, {role: (ink.light, ink.marker) for role, ink in inks.items()})
    figure.savefig(figures / "tasks-panels.png", dpi=110, bbox_inches="tight")
    rows = [row for chart in charts for row in chart.rows]
    (figures / "tasks-panels.csv").write_bytes(csv_bytes(rows))


def draw_panels(charts: list[Chart], style: dict[str, tuple[str, str]]) -> Figure:
    """All charts on one sheet, with one legend for all of them."""
    n_rows = -(-len(charts) // COLUMNS)
    figure = Figure(figsize=(3.0 * COLUMNS, 2.3 * n_rows + 0.8))
    axes = figure.subplots(n_rows, COLUMNS, squeeze=False)
    handles = {}
    for axis, chart in zip(axes.ravel(), charts, strict=False):
        draw_panel(axis, chart, style, handles)
    for axis in axes.ravel()[len(charts) :]:
        axis.set_visible(False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=6, fontsize=8, frameon=False
    )
    return figure


def draw_panel(axis, chart: Chart, style: dict[str, tuple[str, str]], handles: dict) -> None:
    """One chart: points with error bars, dashed predictions, and the level of "learned"."""
    for series in chart.series:
        colour, marker = style[series.role or series.name]
        if series.look == "dashed":
            axis.plot(series.x, series.y, color=colour, lw=1.0, ls=(0, (4, 2.5)))
            continue
        bars = None
        if series.low is not None and series.high is not None:
            below = [y - low for y, low in zip(series.y, series.low, strict=True)]
            above = [high - y for y, high in zip(series.y, series.high, strict=True)]
            bars = [below, above]
        drawn = axis.errorbar(
            series.x,
            series.y,
            yerr=bars,
            color=colour,
            marker=MARKERS[marker],
            lw=1.1,
            ms=3,
            elinewidth=0.7,
        )
        handles.setdefault(series.name, drawn)
    for level in chart.marks.values():
        axis.axhline(level, color="#8a929c", lw=0.8, ls=":")
    axis.set_xscale("log")
    axis.set_yscale("log")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter(lambda value, _: f"{value:g}")
        side.set_minor_formatter(lambda value, _: "")
    axis.set_title(chart.title.partition(":")[0], fontsize=9, loc="left")
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
