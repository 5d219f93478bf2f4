"""`keyhole lens`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from keyhole.cli._app import (
    MAX_SEED,
    Data,
    Dim,
    Extras,
    Groups,
    Keys,
    Missing,
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
from keyhole.cli._output import echo, echo_json, say

_HELP = """What can attention layers learn from this data?

DATA is a table of sets (Parquet, Arrow, CSV with one row per token, npz), or the name digits, which
comes with keyhole. The command fits learners on pooled input, default settings, and each of their
layers by itself, on the same folds. It says whether attention pays, whether the query matters, and
whether more samples or more heads would help.
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
    from keyhole.lab.lens import lens as look

    # fit learners side by side, and write the report
    console = Console(stderr=True)
    with console.status("starting …") as status:
        findings = look(dataset, task=kind, seed=seed, tell=status.update)
        files = []
        if folder is not None:
            files = findings.save(folder, overwrite=overwrite)

    # print
    if as_json:
        echo_json(findings.as_data())
    else:
        for line in str(findings).splitlines():
            say(Console(), line)
    if files:
        echo(f"wrote {files[0]}, and the data beside it", err=as_json)


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
