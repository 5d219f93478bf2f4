"""`keyhole explain`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from keyhole.cli._app import (
    MissingAsFitted,
    Tokens,
    app,
    check_output,
)
from keyhole.cli._output import echo, refuse, say, show_table

if TYPE_CHECKING:
    from keyhole.data import Dataset
    from keyhole.lab.explain import Account

PICTURES = (".svg", ".png", ".pdf")
MAX_COLUMNS = 6
"""Columns that the table of rows shows, those of largest effect."""


@app.command()
def explain(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model written by kh.save or keyhole fit.")
    ],
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="Data in the form that the model was fitted to.")
    ],
    tokens: Tokens = None,
    *,
    chosen: Annotated[
        str, typer.Option("--set", help="Which set: its id, or its number, from 0 on.")
    ],
    out: Annotated[
        Path | None, typer.Option(help=f"Draw a picture into this file: {', '.join(PICTURES)}.")
    ] = None,
    coverage: Annotated[
        float, typer.Option(help="Share of outcomes that the interval should contain.")
    ] = 0.9,
    missing: MissingAsFitted = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the picture.")] = False,
) -> None:
    """Explain one prediction by columns and rows.

    The effect of a column is how much lower the prediction would be if the column had its training
    mean in every row of the set. What rows add, with an equal share of the intercept each, adds up
    to the prediction. For a label that is its score, or its lead over the label that came second.
    """
    if out is not None:
        _check_picture(out, [model, Path(data)], overwrite=overwrite)
    from keyhole.lab.explain import explain_prediction, save_picture
    from keyhole.lab.written import written_set
    from keyhole.state import read_model

    saved = read_model(model)
    if not hasattr(saved.estimator, "contributions"):
        refuse(
            f"{model} must predict to be explained: it holds a {type(saved.estimator).__name__}."
        )
    dataset = _read_as_fitted(saved.schema, data, tokens, missing)

    # the set, and the rows it comes from
    number = _number_of_set(chosen, dataset)
    sample = dataset.sets[number : number + 1]
    written = written_set(
        Path(data), tokens, saved.schema, (chosen, number), int(sample.sets.lengths.sum())
    )
    truth = None if dataset.target is None else dataset.target[number]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the words themselves name the plain jackknife
        explanation = explain_prediction(
            model=saved.estimator,
            sample=sample,
            schema=saved.schema,
            written=written,
            name=f"set {chosen}",
            truth=truth,
            coverage=coverage,
        )

    # print, and draw where asked
    console = Console()
    say(console, explanation.sentence)
    for account in explanation.accounts:
        _print(console, account)
    if out is not None:
        save_picture(explanation, out, overwrite=overwrite)
        echo(f"wrote {out}")


def _check_picture(out: Path, inputs: list[Path], *, overwrite: bool) -> None:
    """Refuse, before any work, a picture that cannot be drawn or written."""
    from keyhole.lab.report.html import check_lab

    check_lab("a picture")
    if out.suffix.lower() not in PICTURES:
        refuse(f"--out must name a picture, by its ending {', '.join(PICTURES)}: got {out.name!r}.")
    check_output(out, inputs)
    if out.exists() and not overwrite:
        refuse(
            f"a file is not replaced unless asked: {out.name!r} exists. Choose another name, or "
            "add --overwrite."
        )


def _read_as_fitted(schema: Any, data: str, tokens: str | None, missing: str | None) -> Dataset:
    """The data, read as that which the model was fitted to."""
    from keyhole.data.datasets import holds_series, load_data
    from keyhole.data.reader import SUFFIXES

    path = Path(data)
    is_table = path.suffix.lower() in SUFFIXES or (path.is_dir() and not holds_series(path))
    if is_table:
        dataset = schema.read(path, tokens=tokens, missing=missing)
    else:
        dataset = load_data(data)

    # names that are positions in a list say nothing of what they are, and are not compared
    has_positions = any("[" in name for name in dataset.names)
    schema.check(dataset.sets, () if has_positions else dataset.names)
    return dataset


def _number_of_set(chosen: str, dataset: Dataset) -> int:
    """The place of the set that was named, by its id where sets have one."""
    if dataset.ids is not None:
        names = [str(name) for name in dataset.ids.tolist()]
        if chosen not in names:
            refuse(
                f"--set must name a set of the data: {chosen!r} is none of {', '.join(names[:5])} "
                f"… ({len(names)} in all)."
            )
        if names.count(chosen) > 1:
            echo(f"note: {names.count(chosen)} samples are called {chosen}: this is the first.")
        return names.index(chosen)
    # Python itself refuses to read endless numbers
    is_short_number = chosen.isdecimal() and len(chosen) <= 18
    if not is_short_number or int(chosen) >= len(dataset):
        refuse(
            f"--set must be the number of a set, from 0 to {len(dataset) - 1}: got {chosen!r:.40}."
        )
    return int(chosen)


def _print(console: Console, account: Account) -> None:
    """The columns, then the rows."""
    if account.columns:
        show_table(
            console,
            f"Columns: their effect {account.speaks}",
            [
                {"column": name, "effect": f"{effect:+.3g}", "in this set": values}
                for name, effect, values in account.columns
            ],
        )
    else:
        say(console, "(no effects of columns: the model was saved without its training samples)")
    rows = []
    for row, adds, cells in account.rows:
        shown = list(cells.items())[:MAX_COLUMNS]
        rows.append({"row": row, "adds": f"{adds:+.3g}", **dict(shown)})
    show_table(console, f"Rows: what each adds {account.speaks}", rows)
    say(console, f"(the {len(rows)} largest of {account.of_rows}, counted from 0)")
