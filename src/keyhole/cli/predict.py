"""`keyhole predict`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from keyhole.cli._app import (
    Dim,
    Keys,
    MissingAsFitted,
    Query,
    ReferenceDate,
    SetId,
    Tokens,
    app,
    check_output,
)
from keyhole.cli._output import echo, refuse

if TYPE_CHECKING:
    from keyhole.data.layout import Dataset
    from keyhole.data.reader import ParquetSets
    from keyhole.state import SavedModel


@app.command(short_help="Predict every set of a file.")
def predict(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model written by kh.save or keyhole fit.")
    ],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="Parquet, Arrow, CSV, npz or .ts file, or a folder of Parquet or .ts.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="File to write: .parquet, .arrow, .csv, .tsv or .jsonl (JSON lines).",
        ),
    ],
    tokens: Tokens = None,
    keys: Keys = None,
    query: Query = None,
    reference_date: ReferenceDate = None,
    set_id: SetId = None,
    missing: MissingAsFitted = None,
    dim: Dim = None,
    keep: Annotated[
        list[str] | None, typer.Option("--id", help="Column to copy to OUT; may be repeated.")
    ] = None,
    proba: Annotated[
        bool, typer.Option("--proba", help="Add a column of probabilities for each class.")
    ] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            help="Coverage, such as 0.9. Adds intervals or sets of labels, and the novelty."
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Add what each key adds to the prediction, and the effect of columns."
        ),
    ] = False,
    key_id: Annotated[
        str | None,
        typer.Option(
            "--key-id", help="Column that names the keys. OUT gets it as lists, in their order."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
) -> None:
    """Predict every set of IN with a saved model, row group by row group.

    OUT appears when all of it is written.

    IN is read like the data that the model was fitted to, unless options say otherwise. Its
    columns, dimension and queries are checked. With one row per token, OUT has a column that says
    which set each prediction is for.
    """
    inputs = [model, source]
    if tokens is not None:
        inputs.append(Path(tokens))
    check_output(out, inputs)
    from keyhole.data.datasets import open_data
    from keyhole.data.layout import check_columns
    from keyhole.data.writer import output_format, write_tables
    from keyhole.state import read_model

    output_format(out)  # refuses an ending that says nothing
    if out.exists() and not overwrite:
        refuse(f"{out} exists. Choose another name, or pass --overwrite.")

    # the model, and whether it can do what it is to do
    saved = read_model(model)
    if proba and not hasattr(saved.estimator, "predict_proba"):
        refuse(f"--proba needs a classifier: {model} holds a {type(saved.estimator).__name__}.")
    _check_interval(saved, interval)
    has_columns = bool(saved.schema.columns)
    if explain and has_columns and getattr(saved.estimator, "_training", None) is None:
        echo(
            "note: there are no effects of columns: they are measured from the means of the "
            "training samples, which the model does not have. Save it with keep='all'.",
            err=True,
        )

    # the sets, read as those that the model was fitted to
    sets = open_data(
        source,
        tokens=tokens,
        keys=keys,
        query=query,
        reference_date=reference_date,
        set_id=set_id,
        missing=missing,
        dim=dim,
        schema=saved.schema,
        copied=[name for name in [*(keep or []), key_id] if name is not None],
    )
    sets.layout = replace(sets.layout, key_id=key_id)

    # columns that are copied; names of keys are in the table of tokens where there is one
    copied = list(dict.fromkeys(filter(None, [sets.layout.set_id, *(keep or []), key_id])))
    columns_of_samples = copied
    if key_id is not None and sets.tokens is not None:
        check_columns(sets.tokens.schema, [key_id], None, str(tokens))
        columns_of_samples = [name for name in copied if name != key_id]
    sets.require(columns_of_samples, one_type=True)

    # predict row group by row group; the file appears when all of it is written
    work = _Work(
        model=saved,
        sets=sets,
        copied=copied,
        proba=proba,
        interval=interval,
        explain=explain,
    )
    work.check_first()
    rows = write_tables(out, work.tables(), overwrite=overwrite)
    echo(f"wrote {out}: {rows} predictions")
    if work.has_novelty:
        _warn_of_novelty(sum(work.novel), rows)


def _check_interval(saved: SavedModel, interval: float | None) -> None:
    """Refuse what has no intervals; say where they are not what they could be."""
    if interval is None:
        return
    method = getattr(saved.estimator, "interval_method", None)
    if method is None:
        refuse(
            "--interval needs an attention regressor or classifier: this is a "
            f"{type(saved.estimator).__name__}."
        )
    if method == "jackknife":
        echo(
            "note: intervals are those of the plain jackknife, and there is no novelty: the model "
            "has no samples to leave out. Fit it in one piece, and save it with keep='all'.",
            err=True,
        )


def _warn_of_novelty(count: int, n_sets: int) -> None:
    """Say how many sets are unlike those of training."""
    from keyhole.estimators.evidence import NOVEL

    if count:
        echo(
            f"warning: {count} of {n_sets} sets are more novel than {NOVEL:.0%} of the "
            f"training sets, where about {n_sets * (1 - NOVEL):.2g} would be by chance. If "
            "there are many more, the model extrapolates on them. See column novelty.",
            err=True,
        )


@dataclass(frozen=True)
class _Work:
    """Sets to predict, the model to predict them with, and what goes beside the predictions."""

    model: SavedModel
    sets: ParquetSets
    copied: list[str]
    proba: bool
    interval: float | None = None
    explain: bool = False
    novel: list[int] = field(default_factory=list)
    """How many sets of each row group are unlike those of training."""

    @property
    def has_novelty(self) -> bool:
        """Whether there is a column of novelty."""
        return self.interval is not None and (
            getattr(self.model.estimator, "_training", None) is not None
        )

    def check_first(self) -> None:
        """Predict one set, to refuse before the work what would be refused after it."""
        batches = (
            data for number in range(self.sets.n_groups) for data, _ in self.sets.read(number)
        )
        first = next(batches, None)
        if first is None:
            raise ValueError(
                f"there must be sets to predict: {self.sets.paths[0].name!r} has no rows."
            )
        predicted = list(self.predictions(first[:1]))
        for name in self.copied:
            if name in predicted:
                raise ValueError(
                    f"copied columns must have names of their own: --id {name!r} is also a column "
                    f"of the predictions ({', '.join(predicted[:5])}). Rename it in the input."
                )

    def tables(self) -> Iterator[Any]:
        """Arrow tables of the row groups that have sets; a terminal gets a bar of progress."""
        filled = [number for number in range(self.sets.n_groups) if self.sets.rows(number)]
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("row groups", total=len(filled))
            for number in filled:
                yield self.table(number)
                progress.advance(task)

    def table(self, number: int) -> Any:
        """An Arrow table of the predictions of one row group, made batch by batch."""
        from keyhole.data.writer import predictions_table
        from keyhole.estimators.evidence import NOVEL

        columns: dict[str, Any] = {name: [] for name in self.copied}
        parts_of_predictions: dict[str, list[np.ndarray]] = {}
        for data, copies in self.sets.read(number, self.copied):
            for name, column in self.predictions(data).items():
                parts_of_predictions.setdefault(name, []).append(column)
            for name in self.copied:
                columns[name].append(copies[name])
        for name, parts in parts_of_predictions.items():
            columns[name] = np.concatenate(parts)
        if self.has_novelty:
            self.novel.append(int((columns["novelty"] > NOVEL).sum()))
        return predictions_table(columns)

    def predictions(self, data: Dataset) -> dict[str, np.ndarray]:
        """Columns of the output: predictions, and the probability of each class."""
        # names that are positions in a list say nothing of what they are, and are not compared
        fitted = self.model.estimator
        schema = self.model.schema
        names = (*schema.names, *data.names)
        has_positions = any(re.fullmatch(r".*\[\d+\]", name) for name in names)
        schema.check(data.sets, () if has_positions else data.names)

        # a column for each output
        predictions = fitted.predict(data.sets)
        columns: dict[str, np.ndarray] = {}
        if predictions.ndim == 1:
            columns["prediction"] = predictions
        else:
            for i, output in enumerate(predictions.T):
                columns[f"prediction_{i}"] = output

        # what goes beside
        if self.proba:
            probabilities = fitted.predict_proba(data.sets)
            for label, column in zip(fitted.classes_, probabilities.T, strict=True):
                columns[f"probability_{label}"] = column
        if self.interval is not None:
            columns |= self.intervals(data.sets)
        if self.explain:
            columns |= self.explanations(data.sets)
        return columns

    def intervals(self, sets: Any) -> dict[str, np.ndarray]:
        """Lower and upper ends, or lists of plausible labels.

        And novelty, where there are leave-one-out fits.
        """
        fitted = self.model.estimator
        columns: dict[str, np.ndarray] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said once, before
            # a set of labels, or two ends for each output
            if hasattr(fitted, "classes_"):
                is_plausible = fitted.predict_set(sets, self.interval)
                columns["labels"] = lists(fitted.classes_[row] for row in is_plausible)
            else:
                ends = fitted.predict_interval(sets, self.interval)
                has_one_output = ends.ndim == 2
                ends = ends.reshape(len(sets), -1, 2)
                for i in range(ends.shape[1]):
                    suffix = "" if has_one_output else f"_{i}"
                    columns[f"lower{suffix}"] = ends[:, i, 0]
                    columns[f"upper{suffix}"] = ends[:, i, 1]
        if self.has_novelty:
            columns["novelty"] = fitted.novelty(sets)
        return columns

    def explanations(self, sets: Any) -> dict[str, np.ndarray]:
        """What each key and each sample-level feature says for the prediction; effects of columns.

        In the order of the keys, each with an equal share of the intercept: see
        `keyhole.estimators.evidence`. Of a classifier, positive numbers speak for the label that
        was predicted and negative ones for the one beside it; of several outputs a column for each.
        """
        from keyhole.estimators.evidence import (
            effects_of_columns,
            evidence_of_predictions,
            table_columns,
        )

        fitted = self.model.estimator
        evidence_of_outputs = evidence_of_predictions(fitted, sets)
        table = []
        effects_of_outputs = None
        if self.model.schema.columns:
            table = table_columns(self.model.schema, sets)
            effects_of_outputs = effects_of_columns(fitted, sets, table, evidence_of_outputs)
        columns = {}
        for j, evidence in enumerate(evidence_of_outputs):
            suffix = ""
            if len(evidence_of_outputs) > 1:
                suffix = f"_{j}"
            columns[f"evidence{suffix}"] = lists(evidence.keys)
            if evidence.others is not None:
                columns["evidence_against"] = evidence.others
            if evidence.extras.shape[1]:
                columns[f"extras_evidence{suffix}"] = lists(evidence.extras)
            if effects_of_outputs is not None:
                for column, effects in zip(table, effects_of_outputs[j].T, strict=True):
                    of_query = "query_" if column.of == "query" else ""
                    columns[f"effect_{of_query}{column.name}{suffix}"] = effects
        return columns


def lists(rows: Iterable[Any]) -> np.ndarray:
    """Arrays of any lengths as one column of objects."""
    entries = list(rows)
    column = np.empty(len(entries), dtype=object)
    for i, entry in enumerate(entries):
        column[i] = entry
    return column
