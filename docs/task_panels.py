"""Draw the pictures of docs/explanation/what_one_layer_learns.md.

    keyhole reproduce tasks --preset full --out OUT
    python docs/task_panels.py OUT FIGURES

writes FIGURES/tasks-matrix.svg, FIGURES/tasks-panels.png and their rows as CSV from the cells in
OUT. Cells that are not finished there are computed first.

If some learners were measured anew, their rows replace those in the tables of FIGURES, and all
other rows stay:

    keyhole reproduce tasks --preset full --set learners=learned --out OUT
    python docs/task_panels.py OUT FIGURES --learners learned
"""

import argparse
import csv
from dataclasses import replace
from pathlib import Path

from matplotlib.figure import Figure

from keyhole.lab.figures import tasks
from keyhole.lab.report.document import Chart, HeatMap, Row, Series, bars, csv_bytes
from keyhole.lab.report.inks import Ink, inks_of, role_of
from keyhole.lab.report.pictures import MARKERS, svg_of
from keyhole.lab.run import compute
from keyhole.lab.task_learners import NAMES

COLUMNS = 4
KEYS = {name: key for key, name in NAMES.items()}
"""The key of a learner by the name it has in the tables."""


def main() -> None:
    """Read what was measured and write the tables and pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("figures", type=Path)
    parser.add_argument("--learners", nargs="+", help="only these replace their rows")
    options = parser.parse_args()
    matrix_table = options.figures / "tasks-matrix.csv"
    panels_table = options.figures / "tasks-panels.csv"

    # rows of the cells that were measured
    config = tasks.PRESETS["full"]
    if options.learners:
        config = replace(config, learners=tuple(options.learners))
    results, _ = compute(tasks.cells(config), options.out / "cells", n_jobs=-1)
    section = tasks.section(config, [row for rows in results.values() for row in rows])
    charts = [block for block in section.blocks if isinstance(block, Chart)]
    [matrix] = [block for block in section.blocks if isinstance(block, HeatMap)]
    matrix_rows = list(matrix.rows)
    panel_rows = [row for chart in charts for row in chart.rows]
    if options.learners:
        matrix_rows = with_replaced(rows_of(matrix_table), matrix_rows)
        panel_rows = with_replaced(rows_of(panels_table), panel_rows)
        matrix = matrix_from(matrix, matrix_rows, panel_rows)
        charts = [panel_from(chart, panel_rows) for chart in charts]

    # pictures of all rows
    matrix_table.write_bytes(csv_bytes(matrix_rows))
    panels_table.write_bytes(csv_bytes(panel_rows))
    (options.figures / "tasks-matrix.svg").write_bytes(svg_of(matrix))
    figure = draw_panels(charts, inks_of([series for chart in charts for series in chart.series]))
    figure.savefig(options.figures / "tasks-panels.png", dpi=110, bbox_inches="tight")


# ---------------------------------------------------------------- rows that are replaced


def rows_of(table: Path) -> list[Row]:
    """The rows of a table: numbers as numbers, and None for an empty cell."""
    with table.open(newline="") as file:
        return [{key: as_value(text) for key, text in row.items()} for row in csv.DictReader(file)]


def as_value(text: str) -> str | int | float | None:
    """What a cell of a table holds."""
    if text == "":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def with_replaced(old: list[Row], new: list[Row]) -> list[Row]:
    """The old rows in their order, those that were measured anew in the place of theirs."""

    def place(row: Row) -> tuple:
        return tuple(row.get(key) for key in ("task", "learner", "features", "n", "N"))

    places = [place(row) for row in old]
    newer = {place(row): row for row in new}
    unknown = [key for key in newer if key not in places]
    if unknown:
        raise SystemExit(f"The tables have no row of {unknown[0]}: measure all learners.")
    return [{**row, **newer.get(key, {})} for key, row in zip(places, old, strict=True)]


def matrix_from(measured: HeatMap, rows: list[Row], panel_rows: list[Row]) -> HeatMap:
    """The matrix of all rows, in the order of tasks and learners that these have."""
    columns = [NAMES[key] for key in tasks.COLUMNS]
    smallest: dict[tuple, int] = {}
    for point in panel_rows:
        pair = (point["task"], point["learner"])
        smallest[pair] = min(point["n"], smallest.get(pair, point["n"]))
    by_place = {
        pair: {**row, "smallest_n": smallest[pair]}
        for row in rows
        if (pair := (row["task"], row["learner"])) in smallest
    }
    values = []
    words = []
    for task in measured.index:
        entries = [tasks.matrix_entry(by_place.get((task, learner))) for learner in columns]
        values.append([value for value, _ in entries])
        words.append([text for _, text in entries])
    return replace(measured, columns=columns, values=values, words=words, rows=rows)


def panel_from(measured: Chart, rows: list[Row]) -> Chart:
    """The panel of a task, or of the word sensitivity, with the curves of all rows."""
    if measured.name == f"tasks-{tasks.SENSITIVITY}":
        return measured
    task = measured.name.removeprefix("tasks-")
    own = [row for row in rows if row["task"] == task]
    series = []
    for learner in dict.fromkeys(row["learner"] for row in own):
        points = [row for row in own if row["learner"] == learner]
        key = KEYS[learner]
        role = tasks.ROLES.get(key, key)
        x = [row["n"] for row in points]
        errors = [row["standard_error"] or 0.0 for row in points]
        series.append(
            tasks.drawable(bars(learner, x, [row["measured"] for row in points], errors, role))
        )
        predicted = [row["predicted"] for row in points]
        if None not in predicted:
            line = Series(f"{learner}, predicted", x, predicted, look="dashed", role=role)
            series.append(tasks.drawable(line))
    return replace(measured, series=series, rows=own)


# ---------------------------------------------------------------- pictures


def draw_panels(charts: list[Chart], inks: dict[str, Ink]) -> Figure:
    """All charts on one sheet, with one legend for all of them."""
    n_rows = -(-len(charts) // COLUMNS)
    figure = Figure(figsize=(3.0 * COLUMNS, 2.3 * n_rows + 0.8))
    axes = figure.subplots(n_rows, COLUMNS, squeeze=False)
    handles = {}
    for axis, chart in zip(axes.ravel(), charts, strict=False):
        draw_panel(axis, chart, inks, handles)
    for axis in axes.ravel()[len(charts) :]:
        axis.set_visible(False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=6, fontsize=8, frameon=False
    )
    return figure


def draw_panel(axis, chart: Chart, inks: dict[str, Ink], handles: dict) -> None:
    """One chart: points with error bars, dashed predictions, and the level of "learned"."""
    for series in chart.series:
        colour, marker = inks[role_of(series)]
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
    main()
