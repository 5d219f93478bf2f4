"""What `fit`, `predict` and `lens` share: reading data as the command line names it."""

from __future__ import annotations

import math
from typing import Annotated, Any

import numpy as np
import typer

from keyhole.cli._app import refuse

KEYS_HELP = "Columns of the coordinates of a key, with commas [default: column keys, or all columns left]."
QUERY_HELP = "Columns of the query, with commas [default: column query, or rows whose role is query]."
EXTRAS_HELP = "Columns of the sample itself, with commas, solved for beside the sets [default: column extras]."
TARGET_HELP = "Column to predict [default: target, label, class or y]."
SET_HELP = "Column that says which set a row belongs to, where a row is a token [default: set, bag, id, …]."
TOKENS_HELP = "A table with one row per token, where DATA has one row per sample; joined by the column of --set."
Data = Annotated[
    str, typer.Argument(help="A table of sets (Parquet, Arrow, CSV, npz), .ts or a folder of such, .xyz, or: digits.")
]
Tokens = Annotated[str | None, typer.Option(help=TOKENS_HELP)]
Keys = Annotated[str | None, typer.Option(help=KEYS_HELP)]
Query = Annotated[str | None, typer.Option(help=QUERY_HELP)]
Target = Annotated[str | None, typer.Option(help=TARGET_HELP)]
Extras = Annotated[str | None, typer.Option(help=EXTRAS_HELP)]
SetId = Annotated[str | None, typer.Option("--set", help=SET_HELP)]
Missing = Annotated[str, typer.Option(help="Gaps: error, drop tokens with one, or impute (mean, or a category).")]
Groups = Annotated[str | None, typer.Option(help="Column of siblings (a patient, a story) that are left out together.")]
Time = Annotated[str | None, typer.Option(help="Column of dates or numbers: what is newer is kept for testing.")]
Split = Annotated[str | None, typer.Option(help="Column that says train or test (or 0 or 1) of every sample.")]
Dim = Annotated[int | None, typer.Option(help="Coordinates of a key, if its column is flat.", min=1)]
Task = Annotated[str, typer.Option(help="auto, regression or classification.")]
TASKS = ("auto", "regression", "classification")


def read_data(data: str, **columns: Any) -> Any:
    """The data, or a message and exit code 2."""
    from keyhole.data.datasets import load_data

    try:
        found = load_data(data, **columns)
    except (ValueError, OSError) as error:
        refuse(str(error))
    if found.target is None:
        refuse(f"{data} must have a target to learn: no column target, label, class or y. Name it with --target.")
    return found


def task_of(target: np.ndarray, task: str) -> str:
    """The task: as asked, or classification where the target is text, yes or no, or a few whole numbers."""
    if task not in TASKS:
        refuse(f"--task must be one of {', '.join(TASKS)}: got {task!r}.")
    kind = target.dtype.kind
    if task == "regression" and kind == "U":
        refuse(f"--task regression needs a target of numbers: this one holds text such as {target[0]!r:.40}.")
    if task != "auto":
        return task
    from keyhole.lab.lens.look import likely_task

    return likely_task(target)


def read_heads(text: str) -> float:
    """A number of heads, or infinity."""
    if text.strip().lower() in ("inf", "∞"):
        return math.inf
    if not text.strip().isdecimal() or not 1 <= len(text.strip()) <= 9 or int(text) < 1:
        refuse(f"--heads must be a whole number of at least 1, or inf: got {text!r}.")
    return int(text)
