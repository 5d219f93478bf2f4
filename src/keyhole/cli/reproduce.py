"""`keyhole reproduce`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from keyhole.cli._app import INTERRUPTED, MAX_SEED, answer_or_exit, app, check_folder
from keyhole.cli._output import echo, echo_json, refuse, say, show_table

if TYPE_CHECKING:
    from keyhole.lab.cells import Store
    from keyhole.lab.jobs import OnFinished, Plan, Timer
    from keyhole.lab.report.document import Report
    from keyhole.lab.reproduce import Figure


LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal


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
        str, typer.Option(help="quick (minutes) or full (an hour on two cores).")
    ] = "quick",
    out: Annotated[
        Path,
        typer.Option(help="Folder for the report, the tables and the finished results."),
    ] = Path("out/reproduce"),
    seed: Annotated[
        int, typer.Option(help="Seed of everything that is drawn.", min=0, max=MAX_SEED)
    ] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a setting: d=8, sizes=64,128, …"),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Run on the Dask cluster of this scheduler."),
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

    Finished results are kept in OUT/cells.sqlite: stop at any time, and the same command continues
    from there.
    """
    from keyhole.lab.cells import Store, StoreError, export
    from keyhole.lab.jobs import Plan, RunError, check_scheduler
    from keyhole.lab.report.html import write_report
    from keyhole.lab.reproduce import (
        TRANSFORMER,
        build_report,
        check_names,
        choose_figures,
        provenance_of,
    )

    # refuse before any work
    names = answer_or_exit(lambda: check_names(figures or []))
    chosen: list[Figure] = answer_or_exit(
        lambda: choose_figures(names, preset, seed, settings or [])
    )
    # a report beside a store of cells is one of ours, and this run goes on with it
    check_folder(out, overwrite=overwrite or (out / "cells.sqlite").exists())
    # a cluster that does not answer is found out before cells are planned
    if scheduler is not None:
        try:
            check_scheduler(scheduler)
        except RunError as error:
            refuse(str(error))

    # compute the cells of all figures that are not in the store
    console = Console(stderr=as_json)
    start = time.monotonic()
    with answer_or_exit(lambda: Store(out / "cells.sqlite")) as store:
        cells = answer_or_exit(lambda: {figure.name: figure.cells() for figure in chosen})
        plan = answer_or_exit(
            lambda: Plan.of([cell for group in cells.values() for cell in group], store)
        )
        keys_of_figures = {name: {cell.key for cell in group} for name, group in cells.items()}
        try:
            _run(plan, store, keys_of_figures, scheduler, jobs, console)
        except (RunError, StoreError) as error:
            refuse(str(error))
        except KeyboardInterrupt:
            echo(
                f"stopped: {len(store.get(plan.cells))} of {len(plan.cells)} cells are finished "
                f"and kept in {store.path}. The same command goes on from there.",
                err=True,
            )
            raise typer.Exit(INTERRUPTED) from None
        results = answer_or_exit(lambda: store.get(plan.cells))

    # write tables and the report
    tables = export(results, out) if results else []
    provenance = provenance_of(
        command=shlex.join(["keyhole", *sys.argv[1:]]),
        seed=seed,
        preset=preset,
        seconds=time.monotonic() - start,
        cells=len(plan.cells),
        computed=len(plan.missing),
    )
    transformer = TRANSFORMER in names
    report = answer_or_exit(
        lambda: build_report(chosen, results, transformer=transformer, provenance=provenance)
    )
    files = write_report(report, out)

    # print verdicts
    _tell(report, [*files[:1], *tables], console)
    if as_json:
        echo_json(_summary(report, plan, files, tables, time.monotonic() - start), indent=None)


def _run(
    plan: Plan,
    store: Store,
    figures: dict[str, set[str]],
    scheduler: str | None,
    jobs: int | None,
    console: Console,
) -> None:
    from keyhole.lab.jobs import Timer, cell_costs, run_dask, run_local

    n_finished = len(plan.cells) - len(plan.missing)
    finished = f", {n_finished} of them finished before" if n_finished else ""
    say(console, f"{len(plan.cells)} cells in {len(plan.jobs)} jobs{finished}.")
    if not plan.jobs:
        return
    # predicted costs, from which the time that remains is estimated
    costs = {}
    for job in plan.jobs:
        for cell, cost in cell_costs(plan.wanted(job)).items():
            costs[cell.key] = cost
    with _progress(Timer(plan, costs), figures, console) as report:
        if scheduler is None:
            run_local(plan, store, jobs, report)
        else:
            run_dask(plan, store, scheduler, report)


@contextmanager
def _progress(timer: Timer, figures: dict[str, set[str]], console: Console) -> Iterator[OnFinished]:
    """A bar on a terminal, a line now and then elsewhere."""
    terminal = console.is_terminal
    last = time.monotonic()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not terminal) as bar:
        task = bar.add_task("starting …", total=timer.total, words="")

        def report(keys: Collection[str]) -> None:
            nonlocal last
            timer.finish(keys)
            # the first figure that the newest cell belongs to
            newest = list(keys)[-1:]
            name = ""
            for figure, keys_of_figure in figures.items():
                if not name and not keys_of_figure.isdisjoint(newest):
                    name = figure
            description = bar.tasks[0].description
            if name:
                description = f"figure {name}"
            bar.update(task, completed=timer.done, description=description, words=_line(timer, ""))
            # elsewhere than on a terminal a line now and then
            if not terminal and time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                say(console, _line(timer, name))

        yield report
    if not terminal:
        say(console, _line(timer, ""))


def _line(timer: Timer, figure: str) -> str:
    """Progress in words: cells, their rate, and the time that it took and will take."""
    line = (
        f"{timer.done}/{timer.total} cells, {timer.rate:.1f} per second, {_duration(timer.seconds)}"
    )
    if timer.left is not None and timer.done != timer.total:
        line += f", about {_duration(timer.left)} left"
    if figure:
        line += f", figure {figure}"
    return line


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _tell(report: Report, files: list[Path], console: Console) -> None:
    rows = [
        {
            "claim": section.title,
            "verdict": section.verdict.state,
            "in words": section.verdict.sentence,
        }
        for section in report.sections
        if section.verdict is not None
    ]
    if rows:
        show_table(console, "verdicts", rows)
    for path in files:
        say(console, f"wrote {path}")


def _summary(
    report: Report, plan: Plan, files: list[Path], tables: list[Path], seconds: float
) -> dict[str, Any]:
    return {
        "cells": len(plan.cells),
        "computed": len(plan.missing),
        "seconds": round(seconds, 1),
        "report": str(files[0]) if files else None,
        "tables": [str(path) for path in tables],
        "verdicts": {
            section.slug: {"state": section.verdict.state, "sentence": section.verdict.sentence}
            for section in report.sections
            if section.verdict is not None
        },
    }
