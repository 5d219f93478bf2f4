"""`keyhole heads`."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from keyhole.cli._app import MAX_COUNT, app, check_folder
from keyhole.cli._output import echo, echo_json, say, show_table

_HELP = """How far the heads of a trained transformer lean towards the identity.

CHECKPOINT is a safetensors file, or a folder with one, of a BERT-, GPT-, Llama- or T5-like model.
For each head, the trace of W = QᵀK is compared with what a random rotation between queries and keys
would give: z counts standard errors.
"""


@app.command(help=_HELP, short_help="Measure the heads of a trained transformer.")
def heads(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A safetensors file, or a folder with one.")
    ],
    n_heads: Annotated[
        int | None,
        typer.Option(
            help="Heads per layer [default: from config.json in the same folder].",
            min=1,
            max=MAX_COUNT,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write an HTML report with its charts into this folder.")
    ] = None,
    fold_norm: Annotated[
        bool,
        typer.Option(help="Multiply W by the scale of the layer norm in front of attention."),
    ] = True,
    overwrite: Annotated[
        bool, typer.Option(help="Replace a report in the folder of --out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print layers and the verdict; write the report where asked."""
    from keyhole.lab.figures import transformer as figure

    if out is not None:
        check_folder(out, overwrite=overwrite)
    findings = figure.measure(checkpoint, n_heads, fold_norm=fold_norm)
    if as_json:
        echo_json(figure.as_data(findings))
    else:
        _print(Console(), figure, findings)
    if out is not None:
        for path in _write(figure, findings, out)[:1]:
            echo(f"wrote {path} and the charts beside it", err=as_json)


def _print(console: Console, figure: Any, findings: Any) -> None:
    verdict = figure.verdict_of(findings)
    rows = figure.layer_rows(findings)
    # one row per layer: z against both kinds of chance, and how many heads lean which way
    table = [
        {
            "layer": row["layer"],
            "z, rotation": f"{row['z']:.1f}",
            "z, signs": f"{row['z_signs']:.1f}",
            "towards": f"{row['towards']}",
            "away": f"{row['away']}",
            "z of each head": " ".join(f"{z:4.0f}" for z in layer.z),
        }
        for row, layer in zip(rows, findings.lean.layers, strict=True)
    ]
    show_table(console, "lean towards the identity, in standard errors", table)
    # the verdict, and the numbers it rests on
    say(console, f"{verdict.state}: {verdict.sentence}")
    for name, text in verdict.numbers.items():
        say(console, f"  {name}: {text}")
    say(console, figure.section_of(findings).settings)


def _write(figure: Any, findings: Any, out: Path) -> list[Path]:
    import keyhole
    from keyhole.lab.report.document import Report
    from keyhole.lab.report.html import write_report

    provenance = {
        "checkpoint": findings.name,
        "keyhole": keyhole.__version__,
        "NumPy": np.__version__,
        "Python": platform.python_version(),
        "layer norms": "folded in" if findings.fold_norm else "left out",
    }
    lead = (
        "How far the query-key matrices of a trained model lean towards the identity, and what "
        "chance would give."
    )
    return write_report(
        Report(f"Heads of {findings.name}", lead, [figure.section_of(findings)], provenance), out
    )
