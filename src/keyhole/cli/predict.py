"""`keyhole predict`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from keyhole.cli._app import app, check_output, refuse

if TYPE_CHECKING:
    from keyhole.data.streams import ParquetSets, PartedFile
    from keyhole.models import Schema


IN_ONE = (".csv", ".tsv", ".npz")
"""Tables that are read whole."""


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A model written by kh.save.")],
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Parquet or Arrow file, or a folder of Parquet files; CSV or npz.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Parquet file to write.")],
    keys: Annotated[str | None, typer.Option(help="Column of the sets [default: as the model was fitted].")] = None,
    query: Annotated[str | None, typer.Option(help="Column of the queries [default: as the model was fitted].")] = None,
    dim: Annotated[int | None, typer.Option(help="Coordinates of a key, if its column is flat.", min=1)] = None,
    keep: Annotated[list[str] | None, typer.Option("--id", help="Column to copy to OUT; may be repeated.")] = None,
    proba: Annotated[bool, typer.Option("--proba", help="Add a column of probabilities for each class.")] = False,
    batch_size: Annotated[int | None, typer.Option(help="Sets at a time [default: some 32 MiB].", min=1)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT, and start over.")] = False,
) -> None:
    """Predict every set of IN with a saved model, row group by row group; an interrupted run goes on where it was.

    The columns are those the model was fitted to unless said otherwise; dimension, queries and names are checked.
    """
    check_output(out, [model, source])
    from keyhole.data.streams import ParquetSets, PartedFile
    from keyhole.models import read_model

    console = Console(stderr=True)
    try:
        saved = read_model(model)
        fitted, given = saved.estimator, {"keys": keys, "query": query}
        if proba and not hasattr(fitted, "predict_proba"):
            refuse(f"--proba needs a classifier: {model} holds a {type(fitted).__name__}.")
        columns = {**dict(saved.schema.columns), **{name: column for name, column in given.items() if column}}
        if source.suffix.lower() in IN_ONE or "set_id" in columns:
            file = PartedFile(out, _job(model, [source], columns, keep or [], proba), overwrite=overwrite)
            whole = _predict_table(fitted, saved.schema, source, columns, keep or [], proba)
            with file:
                file.write(0, whole)
                rows = file.join([0])
        else:
            names = (columns.get("keys", "keys"), columns.get("query"))
            sets = ParquetSets(source, keys=names[0], query=names[1], target=(), dim=dim, batch_size=batch_size)
            sets.require(keep or [], one_type=True)
            job = _job(model, sets.paths, [sets.keys, sets.query, sets.dim], keep or [], proba)
            file = PartedFile(out, job, overwrite=overwrite)
            _check_first(saved.schema, fitted, sets, keep or [], proba)
            with file:
                rows = _write_missing(saved.schema, fitted, sets, file, keep or [], proba, console)
    except KeyboardInterrupt:
        typer.echo(f"interrupted: what is done is kept in {out}.parts; run the same command to go on.", err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError) as error:
        refuse(str(error))
    typer.echo(f"wrote {out}: {rows} predictions")


def _job(model: Path, paths: Sequence[Path], columns: Any, keep: list[str], proba: bool) -> dict[str, Any]:
    """What the output depends on; sizes and times stand for the contents of the input."""
    files = sorted(p for p in model.rglob("*") if p.is_file()) if model.is_dir() else [model]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    inputs = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    return {"model": digest, "input": inputs, "columns": columns, "copied": keep, "probabilities": proba}


def _predict_table(
    fitted: Any, schema: Schema, source: Path, columns: dict[str, str], keep: list[str], proba: bool
) -> Any:
    """Predict a table that is read whole, because sets are spread over its rows."""
    from keyhole.data.streams import predictions_table
    from keyhole.data.tables import read_table

    if keep:
        raise ValueError(
            f"--id copies columns of tables with one row per set: {source.name} has one row per token, or arrays. Its "
            "predictions are in the order in which its sets begin."
        )
    options = {name: column for name, column in columns.items() if name in ("keys", "query", "set_id")}
    data = read_table(source, **options)
    schema.check(data.sets, data.names)
    shares = fitted.predict_proba(data.sets) if proba else None
    return predictions_table(_named(fitted, fitted.predict(data.sets), shares))


def _check_first(schema: Schema, fitted: Any, sets: ParquetSets, keep: list[str], proba: bool) -> None:
    """Predict one set, to refuse before the work what would be refused after it."""
    first = next((batch for number in range(sets.n_groups) for batch in sets.group(number)), None)
    if first is None:
        raise ValueError(f"there must be sets to predict: {sets.paths[0].name!r} has no rows.")
    one = first.sets[:1]
    schema.check(one)
    named = _named(fitted, fitted.predict(one), fitted.predict_proba(one) if proba else None)
    for name in keep:
        if name in named:
            raise ValueError(
                f"copied columns must have names of their own: --id {name!r} is also a column of the predictions "
                f"({', '.join(list(named)[:5])}). Rename it in the input."
            )


def _write_missing(
    schema: Schema, fitted: Any, sets: ParquetSets, file: PartedFile, keep: list[str], proba: bool, console: Console
) -> int:
    """Predict the row groups that have no part yet, and join all; row groups without rows need none."""
    rows = [sets.rows(number) for number in range(sets.n_groups)]
    filled = [number for number, count in enumerate(rows) if count]
    done = file.done(rows)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("row groups", total=len(filled), completed=len(done))
        for number in filled:
            if number not in done:
                file.write(number, _predict_group(schema, fitted, sets, number, keep, proba))
                progress.advance(task)
    return file.join(filled)


def _predict_group(schema: Schema, fitted: Any, sets: ParquetSets, number: int, keep: list[str], proba: bool) -> Any:
    from keyhole.data.streams import predictions_table

    copied: dict[str, Any] = {name: [] for name in keep}
    predictions, probabilities = [], []
    for table, where in sets.tables(number, sets.columns(keep)):
        batch = sets.batch(table, where).sets
        schema.check(batch)
        predictions.append(fitted.predict(batch))
        if proba:
            probabilities.append(fitted.predict_proba(batch))
        for name in keep:
            copied[name].append(table.column(name))
    shares = np.concatenate(probabilities) if proba else None
    return predictions_table({**copied, **_named(fitted, np.concatenate(predictions), shares)})


def _named(fitted: Any, predictions: np.ndarray, shares: np.ndarray | None) -> dict[str, Any]:
    """Columns of the output: predictions, and the probability of each class."""
    columns: dict[str, Any] = {"prediction": predictions}
    if predictions.ndim > 1:
        columns = {f"prediction_{i}": column for i, column in enumerate(predictions.T)}
    if shares is not None:
        columns |= {f"probability_{label}": c for label, c in zip(fitted.classes_, shares.T, strict=True)}
    return columns
