"""`keyhole compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from keyhole.cli._app import app, check_folder


@app.command()
def compare(
    out: Annotated[Path, typer.Option(help="Folder for the figure and the rows behind it.")] = Path("out/compare"),
    dim: Annotated[int, typer.Option(help="Token dimension d.", min=1)] = 16,
    keys: Annotated[int, typer.Option(help="Keys per set N.", min=1)] = 16,
    heads: Annotated[int, typer.Option(help="Heads M; the MLP gets width M(d+1).", min=1)] = 200,
    largest: Annotated[int, typer.Option(help="Largest number of training sets n.", min=32)] = 2048,
    repeats: Annotated[int, typer.Option(help="Independent repetitions behind each error bar.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Seed of everything.", min=0)] = 0,
) -> None:
    """Fit attention and an MLP, finite and infinite, on one target of each family; print and draw the comparison."""
    from keyhole.experiments import compare as experiment

    config = experiment.Config(dim, keys, heads, experiment.sizes_up_to(largest), repeats, seed=seed)
    check_folder(out)
    console = Console()
    with console.status("starting …") as status:
        rows = experiment.run(config, progress=lambda text: status.update(text))
    files = [*experiment.write_rows(rows, out), *experiment.plot(rows, config, out)]
    console.print(_comparison_table(experiment.summarise(rows), config.sizes[-1]))
    console.print(f"{config.describe()}; relative test error, mean ± standard error over {config.repeats} repetitions.")
    for path in files:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)


def _comparison_table(summary: dict[tuple[str, str], dict[str, str]], n: int) -> Table:
    table = Table(title=f"relative test error at n = {n}", title_justify="left")
    targets = list(dict.fromkeys(target for cells in summary.values() for target in cells))
    table.add_column("model")
    table.add_column("heads")
    for target in targets:
        table.add_column(target, justify="right")
    for (model, heads), cells in summary.items():
        table.add_row(model, heads, *(cells[target] for target in targets))
    return table
