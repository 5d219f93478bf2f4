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
from keyhole.cli._output import echo_json, refuse, say, show_table

if TYPE_CHECKING:
    from keyhole.lab.cells import Store
    from keyhole.lab.jobs import OnFinished, Plan, Timer
    from keyhole.lab.report.document import Report
    from keyhole.lab.reproduce import Figure


LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal


@app.command()
def reproduce(
    figures: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FIGURE …]",
            help=(
                "averages, correlation, rotation, head-count, complexity, dimension, learner, "
                "prediction, transformer; none means all."
            ),
        ),
    ] = None,
    preset: Annotated[
        str, typer.Option(help="quick (minutes) or full (an hour on two cores).")
    ] = "quick",
    out: Annotated[
        Path,
        typer.Option(help="Folder for the report, the tables and the store of finished cells."),
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

    Finished cells are kept in OUT/cells.sqlite: stop at any time, and the same command goes on from
    there.
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

    names = answer_or_exit(lambda: check_names(figures or []))
    chosen: list[Figure] = answer_or_exit(
        lambda: choose_figures(names, preset, seed, settings or [])
    )
    # a report beside a store of cells is one of ours, and this run goes on with it
    check_folder(out, overwrite=overwrite or (out / "cells.sqlite").exists())
    if scheduler is not None:
        try:
            check_scheduler(scheduler)
        except RunError as error:
            refuse(str(error))
    console = Console(stderr=as_json)
    start = time.monotonic()
    with answer_or_exit(lambda: Store(out / "cells.sqlite")) as store:
        cells = answer_or_exit(lambda: {figure.name: figure.cells() for figure in chosen})
        plan = answer_or_exit(
            lambda: Plan.of([cell for group in cells.values() for cell in group], store)
        )
        try:
            _run(
                plan,
                store,
                {f.name: {cell.key for cell in cells[f.name]} for f in chosen},
                scheduler,
                jobs,
                console,
            )
        except (RunError, StoreError) as error:
            refuse(str(error))
        except KeyboardInterrupt:
            kept = (
                f"{len(store.get(plan.cells))} of {len(plan.cells)} cells are finished and kept in "
                f"{store.path}"
            )
            say(console, f"stopped: {kept}. The same command goes on from there.")
            raise typer.Exit(INTERRUPTED) from None
        results = answer_or_exit(lambda: store.get(plan.cells))
    tables = export(results, out) if results else []
    command = shlex.join(["keyhole", *sys.argv[1:]])
    provenance = provenance_of(
        command, seed, preset, time.monotonic() - start, len(plan.cells), len(plan.missing)
    )
    transformer = TRANSFORMER in names
    report = answer_or_exit(
        lambda: build_report(chosen, results, transformer=transformer, provenance=provenance)
    )
    files = write_report(report, out)
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

    found = len(plan.cells) - len(plan.missing)
    known = f", {found} of them finished before" if found else ""
    say(console, f"{len(plan.cells)} cells in {len(plan.jobs)} jobs{known}.")
    if not plan.jobs:
        return
    costs = {
        cell.key: cost for job in plan.jobs for cell, cost in cell_costs(plan.wanted(job)).items()
    }
    with _progress(Timer(plan, costs), figures, console) as report:
        if scheduler is None:
            run_local(plan, store, jobs, report)
        else:
            run_dask(plan, store, scheduler, report)


@contextmanager
def _progress(timer: Timer, figures: dict[str, set[str]], console: Console) -> Iterator[OnFinished]:
    """A bar on a terminal, a line now and then elsewhere."""
    terminal, last = console.is_terminal, time.monotonic()
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
            newest = list(keys)[-1:]
            name = next((name for name, own in figures.items() for key in newest if key in own), "")
            description = f"figure {name}" if name else bar.tasks[0].description
            bar.update(task, completed=timer.done, description=description, words=_line(timer, ""))
            if not terminal and time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                say(console, _line(timer, name))

        yield report
    if not terminal:
        say(console, _line(timer, ""))


def _line(timer: Timer, figure: str) -> str:
    left = (
        ""
        if timer.left is None or timer.done == timer.total
        else f", about {_duration(timer.left)} left"
    )
    where = f", figure {figure}" if figure else ""
    return (
        f"{timer.done}/{timer.total} cells, {timer.rate:.1f} per second, "
        f"{_duration(timer.seconds)}{left}{where}"
    )


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
