"""`keyhole reproduce`."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from keyhole.cli._app import INTERRUPTED, MAX_SEED, answer_or_exit, app, check_folder
from keyhole.cli._output import echo, echo_json, say, show_table

if TYPE_CHECKING:
    from keyhole.lab.report.document import Report


@app.command(short_help="Redraw every claim of the paper.")
def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FIGURE",
            help=(
                "averages, correlation, rotation, head-count, complexity, dimension, learner, "
                "prediction, tasks, transformer; none means all."
            ),
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="quick (minutes) or full (more than an hour on two cores).")
    ] = "quick",
    out: Annotated[
        Path,
        typer.Option(help="Folder for the report, the tables and the finished cells."),
    ] = Path("out/reproduce"),
    seed: Annotated[
        int, typer.Option(help="Seed of everything that is drawn.", min=0, max=MAX_SEED)
    ] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a setting: d=8, sizes=64,128, …"),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Worker processes; by default one per core.", min=1, max=4096)
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace a report in OUT that is not of this command.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one line of JSON on standard output.")
    ] = False,
) -> None:
    """Redraw every claim of the paper: figures, predictions and verdicts in one HTML report.

    Finished cells are kept in OUT/cells: stop at any time, and the same command continues from
    there.
    """
    from keyhole.lab.reproduce import (
        TRANSFORMER,
        build_report,
        check_names,
        choose_figures,
        provenance_of,
    )

    # refuse before any work; a report beside finished cells is one of ours
    names = answer_or_exit(lambda: check_names(figures or []))
    chosen = answer_or_exit(lambda: choose_figures(names, preset, seed, settings or []))
    check_folder(out, overwrite=overwrite or (out / "cells").exists())
    cells = answer_or_exit(lambda: [cell for figure in chosen for cell in figure.cells()])

    # compute the cells that are not finished
    from keyhole._files import write_whole
    from keyhole.lab.report.document import csv_bytes
    from keyhole.lab.report.html import write_report
    from keyhole.lab.run import compute

    console = Console(stderr=as_json)
    start = time.monotonic()
    try:
        results, computed = answer_or_exit(
            lambda: compute(cells, out / "cells", jobs or -1, console)
        )
    except KeyboardInterrupt:
        echo(
            f"stopped: finished cells are kept in {out / 'cells'}. The same command goes on from "
            "there.",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None

    # write the report and its tables
    provenance = provenance_of(
        command=shlex.join(["keyhole", *sys.argv[1:]]),
        seed=seed,
        preset=preset,
        seconds=time.monotonic() - start,
        cells=len(results),
        computed=computed,
    )
    transformer = TRANSFORMER in names
    report = answer_or_exit(
        lambda: build_report(chosen, results, transformer=transformer, provenance=provenance)
    )
    for figure in chosen:
        rows = [row for cell in figure.cells() for row in results[cell]]
        write_whole(csv_bytes(rows), out / "tables" / f"{figure.name}.csv")
    files = write_report(report, out)

    # print verdicts
    summary = {
        "cells": len(results),
        "computed": computed,
        "seconds": round(time.monotonic() - start, 1),
        "report": str(files[0]),
        "verdicts": _verdicts(report),
    }
    verdicts = [
        {
            "claim": section.title,
            "verdict": section.verdict.state,
            "in words": section.verdict.sentence,
        }
        for section in report.sections
        if section.verdict is not None
    ]
    show_table(console, "verdicts", verdicts)
    say(console, f"wrote {files[0]}, and charts and tables beside it")
    if as_json:
        echo_json(summary, indent=None)


def _verdicts(report: Report) -> dict[str, Any]:
    """State, sentence and numbers of every section by its name."""
    return {
        section.slug: {
            "state": section.verdict.state,
            "sentence": section.verdict.sentence,
            "numbers": dict(section.verdict.numbers),
        }
        for section in report.sections
        if section.verdict is not None
    }
