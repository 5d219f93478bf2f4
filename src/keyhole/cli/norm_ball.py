"""`keyhole norm-ball`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from keyhole.cli._app import app, check_folder


@app.command("norm-ball")
def norm_ball(
    out: Annotated[Path, typer.Option(help="Folder for the figure and the rows behind it.")] = Path("out/norm_ball"),
    heads: Annotated[int, typer.Option(help="Heads M.", min=1)] = 100,
    largest: Annotated[int, typer.Option(help="Largest number of training sets n.", min=32)] = 512,
    repeats: Annotated[int, typer.Option(help="Independent repetitions behind each error bar.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of everything.", min=0)] = 0,
) -> None:
    """Fit ridge and the norm ball on the same target, with clean labels and with some wild ones; draw both."""
    from keyhole.experiments import norm_ball as experiment

    sizes = tuple(sorted({max(8, largest >> k) for k in range(4)}))
    config = experiment.Config(n_heads=heads, sizes=sizes, repeats=repeats, seed=seed)
    check_folder(out)
    console = Console()
    with console.status("starting …") as status:
        rows = experiment.run(config, progress=lambda text: status.update(text))
    for path in [*experiment.write_rows(rows, out), *experiment.plot(rows, config, out)]:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
