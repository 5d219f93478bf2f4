"""`keyhole lens`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from keyhole.cli._app import (
    MAX_SEED,
    Activation,
    Data,
    Dim,
    Extras,
    Groups,
    Keys,
    Missing,
    Pooling,
    Query,
    ReferenceDate,
    SetId,
    Split,
    Target,
    Task,
    Time,
    Tokens,
    app,
    check_folder,
    read_data,
    task_of,
)
from keyhole.cli._output import echo, echo_json, refuse, say, show_table
from keyhole.vocabulary import ACTIVATIONS, POOLINGS

_HELP = """What can one attention layer learn from this data?

DATA is a table of sets (Parquet, Arrow, CSV with one row per token, npz), or the name digits, which
comes with keyhole. The command fits learners on pooled input and attention layers side by side, as
many as take a minute, by estimate. It says whether attention pays, whether the query matters, and
whether more data or more heads would help.
"""


@app.command(help=_HELP)
def lens(
    data: Data,
    tokens: Tokens = None,
    keys: Keys = None,
    query: Query = None,
    target: Target = None,
    extras: Extras = None,
    set_id: SetId = None,
    missing: Missing = "error",
    dim: Dim = None,
    groups: Groups = None,
    time: Time = None,
    split: Split = None,
    reference_date: ReferenceDate = None,
    task: Task = "auto",
    n_heads: Annotated[
        int,
        typer.Option(help="Number of heads of the layers with finitely many.", min=1, max=100_000),
    ] = 256,
    activation: Activation = "auto",
    pooling: Pooling = "auto",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the report [default: out/lens/NAME, a new one each time]."),
    ] = None,
    report: Annotated[bool, typer.Option(help="Write the HTML report.")] = True,
    overwrite: Annotated[
        bool, typer.Option(help="Replace a report in the folder of --out.")
    ] = False,
    seed: Annotated[
        int, typer.Option(help="Seed of everything that is drawn.", min=0, max=MAX_SEED)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Look, print, write."""
    settings = {"activation": (activation, ACTIVATIONS), "pooling": (pooling, POOLINGS)}
    for name, (value, known) in settings.items():
        if value not in ("auto", *known):
            refuse(f"--{name} must be auto or one of {', '.join(known)}: got {value!r}.")
    folder = _folder(data, out, overwrite) if report else None

    # read
    from keyhole.data.layout import TableOptions

    options = TableOptions(
        keys=keys,
        query=query,
        target=target,
        extras=extras,
        set_id=set_id,
        missing=missing,
        dim=dim,
        groups=groups,
        time=time,
        split=split,
        reference_date=reference_date,
    )
    dataset = read_data(data, tokens, options)
    assert dataset.target is not None
    kind = task_of(dataset.target, task)
    from keyhole.lab.lens.findings import LensConfig
    from keyhole.lab.lens.look import look
    from keyhole.lab.report.html import as_json as plain

    # fit learners side by side, and write the report
    config = LensConfig(
        kind=kind,
        n_heads=n_heads,
        activation=activation,
        pooling=pooling,
        seed=seed,
    )
    console = Console(stderr=True)
    with console.status("starting …") as status:
        findings = look(dataset, config, status.update)
        files = []
        if folder is not None:
            status.update("drawing the report")
            files = findings.save(folder, overwrite=overwrite)

    # print
    if as_json:
        echo_json(json.loads(plain(findings.as_data())))
    else:
        _print(Console(), findings)
    if files:
        echo(f"wrote {files[0]} and the charts beside it", err=as_json)


def _folder(data: str, out: Path | None, overwrite: bool) -> Path:
    """Where the report goes: never onto another one unless asked."""
    if out is not None:
        check_folder(out, overwrite=overwrite)
        return out
    # a new folder, numbered from 2 on where the name of the data is taken
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(data).stem).strip("-")[:60] or "data"
    folder = Path("out/lens") / stem
    number = 1
    while folder.exists():
        number += 1
        folder = Path("out/lens") / f"{stem}-{number}"
    check_folder(folder)
    return folder


def _print(console: Console, findings: Any) -> None:
    from keyhole.lab.lens.findings import percent

    rows = []
    for row in findings.table:
        shown = {
            "learner": row["learner"],
            "error": percent(row["error, %"] / 100),
            "±": percent(row["±"] / 100),
        }
        for measure in ("R²", "AUC", "log-loss"):
            if measure in row:
                value = row[measure]
                shown[measure] = f"{value:.3f}" if math.isfinite(value) else "–"
        shown["sets"] = str(row["sets"])
        shown["folds"] = str(row["folds"])
        rows.append(shown)
    # the table first, then the questions that it decides, then what the budget did not allow
    say(console, f"{findings.description}; {findings.config.kind}")
    show_table(console, f"held-out error: {findings.measure}", rows)
    for answer in findings.answers.values():
        say(console, f"{answer.question} {answer.sentence}")
    for note in findings.skipped:
        say(console, f"(skipped) {note}")
    say(console, findings.settings)
    say(console, f"Start from {findings.recommendation}")
