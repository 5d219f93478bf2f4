"""`keyhole predict`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from keyhole.cli._app import app, refuse

if TYPE_CHECKING:
    from keyhole.sources import ParquetSets
    from keyhole.sources.parts import PartedFile


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A model written by kh.save.")],
    source: Annotated[Path, typer.Argument(metavar="IN", help="Parquet or Arrow file, or a folder of Parquet files.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Parquet file to write.")],
    keys: Annotated[str, typer.Option(help="Column of the sets.")] = "keys",
    query: Annotated[str | None, typer.Option(help="Column of the queries [default: query, if there is one].")] = None,
    dim: Annotated[int | None, typer.Option(help="Coordinates of a key, if its column is flat.", min=1)] = None,
    keep: Annotated[list[str] | None, typer.Option("--id", help="Column to copy to OUT; may be repeated.")] = None,
    proba: Annotated[bool, typer.Option("--proba", help="Add a column of probabilities for each class.")] = False,
    batch_size: Annotated[int | None, typer.Option(help="Sets at a time [default: some 32 MiB].", min=1)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, and start over.")] = False,
) -> None:
    """Predict every set of IN with a saved model, row group by row group; an interrupted run goes on where it was."""
    import keyhole
    from keyhole.sources import ParquetSets
    from keyhole.sources.parts import PartedFile

    console = Console(stderr=True)
    try:
        fitted = keyhole.load(model)
        sets = ParquetSets(source, keys=keys, query=query, target=(), dim=dim, batch_size=batch_size)
        sets.require(keep or [])
        if proba and not hasattr(fitted, "predict_proba"):
            refuse(f"--proba needs a classifier: {model} holds a {type(fitted).__name__}.")
        job = _job(model, sets, keep or [], proba)
        file = PartedFile(out, job, overwrite=overwrite)
        _write_missing(fitted, sets, file, keep or [], proba, console)
        rows = file.join(list(range(sets.n_groups)))
    except KeyboardInterrupt:
        typer.echo(f"interrupted: what is done is kept in {out}.parts; run the same command to go on.", err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError) as error:
        refuse(str(error))
    typer.echo(f"wrote {out}: {rows} predictions")


def _job(model: Path, sets: ParquetSets, keep: list[str], proba: bool) -> dict[str, Any]:
    """What the output depends on; sizes and times stand for the contents of the input."""
    files = sorted(p for p in model.rglob("*") if p.is_file()) if model.is_dir() else [model]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    inputs = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sets.paths]
    columns = [sets.keys, sets.query, sets.dim]
    return {"model": digest, "input": inputs, "columns": columns, "copied": keep, "probabilities": proba}


def _write_missing(
    fitted: Any, sets: ParquetSets, file: PartedFile, keep: list[str], proba: bool, console: Console
) -> None:
    """Predict the row groups that have no part yet."""
    done = file.done()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("row groups", total=sets.n_groups, completed=len(done))
        for number in range(sets.n_groups):
            if number not in done:
                file.write(number, _predict_group(fitted, sets, number, keep, proba))
                progress.advance(task)


def _predict_group(fitted: Any, sets: ParquetSets, number: int, keep: list[str], proba: bool) -> Any:
    from keyhole.sources.parts import predictions_table

    copied: dict[str, Any] = {name: [] for name in keep}
    predictions, probabilities = [], []
    for table, where in sets.tables(number, sets.columns(keep)):
        batch = sets.batch(table, where).sets
        predictions.append(fitted.predict(batch))
        if proba:
            probabilities.append(fitted.predict_proba(batch))
        for name in keep:
            copied[name].append(table.column(name))
    made = np.concatenate(predictions)
    columns = {"prediction": made} if made.ndim == 1 else {f"prediction_{i}": c for i, c in enumerate(made.T)}
    if proba:
        shares = np.concatenate(probabilities)
        columns |= {f"probability_{label}": c for label, c in zip(fitted.classes_, shares.T, strict=True)}
    return predictions_table({**copied, **columns})
