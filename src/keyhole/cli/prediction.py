"""`keyhole prediction`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from keyhole.cli._app import app, check_folder, refuse, text_table


@app.command()
def prediction(
    preset: Annotated[str, typer.Option(help="quick (seconds) or full (minutes).")] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for tables, rows and figure.")] = Path("out/prediction"),
    seed: Annotated[int, typer.Option(help="Seed of everything.", min=0)] = 0,
    ratio: Annotated[
        bool, typer.Option(help="Also measure how many times more samples an MLP needs on f_{1,2}.")
    ] = True,
) -> None:
    """Fit models over a grid and hold their test errors against the predicted ones."""
    from dataclasses import replace

    from keyhole.experiments import prediction as experiment
    from keyhole.experiments import sample_ratio

    if preset not in experiment.PRESETS:
        refuse(f"--preset must be one of {', '.join(experiment.PRESETS)}: got {preset!r}.")
    check_folder(out)
    console = Console()
    ratios: list[dict[str, Any]] = []
    with console.status("starting …") as status:
        rows = experiment.run(replace(experiment.PRESETS[preset], seed=seed), status.update)
        if ratio:
            ratios = sample_ratio.run(replace(sample_ratio.PRESETS[preset], seed=seed), status.update)
    files = [*experiment.write_tables(rows, out), *experiment.plot(rows, out)]
    console.print(text_table("predicted against measured test error", experiment.summarise(rows)))
    beyond = experiment.readable(experiment.outliers(rows))
    if beyond:
        console.print(text_table("cells beyond their tolerance, worst first", beyond[:20]))
    if ratios:
        files += sample_ratio.write_tables(ratios, out)
        console.print(text_table("samples needed on f_{1,2}", sample_ratio.readable(ratios)))
    for path in files:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
