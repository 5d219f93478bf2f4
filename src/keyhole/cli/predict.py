"""`keyhole predict`."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from keyhole.cli._app import (
    INTERRUPTED,
    MAX_COUNT,
    Dim,
    Keys,
    MissingAsFitted,
    Query,
    ReferenceDate,
    SetId,
    Tokens,
    Unknown,
    app,
    check_output,
    refuse_error,
)
from keyhole.cli._output import echo, refuse

if TYPE_CHECKING:
    from keyhole.data.layout import Dataset
    from keyhole.data.reader import ParquetSets
    from keyhole.data.writer import PartedFile
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
    unknown: Unknown = "error",
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
        bool, typer.Option("--explain", help="Add what each key adds to the prediction.")
    ] = False,
    key_id: Annotated[
        str | None,
        typer.Option(
            "--key-id", help="Column that names the keys. OUT gets it as lists, in their order."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Sets that are predicted at a time [default: about 32 MiB of them].",
            min=1,
            max=MAX_COUNT,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT, and start over.")
    ] = False,
) -> None:
    """Predict every set of IN with a saved model, row group by row group.

    An interrupted run continues where it stopped.

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
    from keyhole.data.outputs import output_format
    from keyhole.data.writer import PartedFile
    from keyhole.state import read_model

    try:
        file_format = output_format(out)

        # the model, and whether it can do what it is to do
        saved = read_model(model)
        if proba and not hasattr(saved.estimator, "predict_proba"):
            refuse(f"--proba needs a classifier: {model} holds a {type(saved.estimator).__name__}.")
        _check_interval(saved, interval)

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
            unknown=unknown,
            batch_size=batch_size,
        )
        sets.layout = replace(sets.layout, key_id=key_id)

        # columns that are copied; names of keys are in the table of tokens where there is one
        copied = list(dict.fromkeys(filter(None, [sets.layout.set_id, *(keep or []), key_id])))
        columns_of_samples = copied
        if key_id is not None and sets.tokens is not None:
            check_columns(sets.tokens.schema, [key_id], None, str(tokens))
            columns_of_samples = [name for name in copied if name != key_id]
        sets.require(columns_of_samples, one_type=True)

        # predict what an earlier run of the same job has not predicted
        work = _Work(
            model=saved,
            sets=sets,
            copied=copied,
            proba=proba,
            interval=interval,
            explain=explain,
        )
        file = PartedFile(out, _job(model, work), overwrite=overwrite, file_format=file_format)
        work.check_first()
        with file:
            rows = _write_missing(work, file)
    except (ValueError, OSError) as error:
        refuse_error(error)
    echo(f"wrote {out}: {rows} predictions")
    if work.has_novelty:
        _warn_of_novelty(out)


def _write_missing(work: _Work, file: PartedFile) -> int:
    """Predict what is not predicted yet; an interrupt says where the rest is kept."""
    try:
        return work.write_missing(file)
    except KeyboardInterrupt:
        echo(
            f"interrupted: what is done is kept in {file.folder}; run the same command to go on.",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None


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


def _warn_of_novelty(out: Path) -> None:
    """Say how many sets are unlike those of training."""
    from keyhole.data.outputs import output_format, written_column
    from keyhole.lab.explain import NOVEL

    novelty = written_column(out, "novelty", output_format(out))
    count = int((novelty > NOVEL).sum())
    if count:
        echo(
            f"warning: {count} of {len(novelty)} sets are more novel than {NOVEL:.0%} of the "
            f"training sets, where about {len(novelty) * (1 - NOVEL):.2g} would be by chance. If "
            "there are many more, the model extrapolates on them. See column novelty.",
            err=True,
        )


def _job(model: Path, work: _Work) -> dict[str, Any]:
    """What the output depends on; sizes and times stand for the contents of the input.

    An option that is not used is not named.
    """
    files = []
    for path in work.sets.files:
        status = path.stat()
        files.append([path.name, status.st_size, status.st_mtime_ns])
    columns = list(work.sets.layout.options)
    if work.sets.layout.unknown == "ignore":
        columns.append(("unknown", "ignore"))
    job: dict[str, Any] = {
        "model": hashlib.sha256(model.read_bytes()).hexdigest(),
        "input": files,
        "columns": columns,
        "copied": work.copied,
        "probabilities": work.proba,
    }
    # what goes beside the predictions
    if work.interval is not None:
        job["interval"] = work.interval
    if work.explain:
        job["explain"] = True
    return job


@dataclass(frozen=True)
class _Work:
    """Sets to predict, the model to predict them with, and what goes beside the predictions."""

    model: SavedModel
    sets: ParquetSets
    copied: list[str]
    proba: bool
    interval: float | None = None
    explain: bool = False

    @property
    def has_novelty(self) -> bool:
        """Whether there is a column of novelty."""
        return self.interval is not None and hasattr(self.model.estimator, "training_")

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

    def write_missing(self, file: PartedFile) -> int:
        """Predict the row groups that have no part yet, and join all.

        Row groups without sets need none.
        """
        # row groups that have sets, and of these the ones that an earlier run has finished
        rows = [self.sets.rows(number) for number in range(self.sets.n_groups)]
        filled = [number for number, count in enumerate(rows) if count]
        done = file.done(rows)
        # a bar of progress on a terminal, nothing elsewhere
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("row groups", total=len(filled), completed=len(done))
            for number in filled:
                if number not in done:
                    self.write(number, file)
                    progress.advance(task)
        return file.join(filled)

    def write(self, number: int, file: PartedFile) -> None:
        """Predict one row group, batch by batch."""
        from keyhole.data.writer import predictions_table

        columns: dict[str, Any] = {name: [] for name in self.copied}
        parts_of_predictions: dict[str, list[np.ndarray]] = {}
        for data, copies in self.sets.read(number, self.copied):
            for name, column in self.predictions(data).items():
                parts_of_predictions.setdefault(name, []).append(column)
            for name in self.copied:
                columns[name].append(copies[name])
        for name, parts in parts_of_predictions.items():
            columns[name] = np.concatenate(parts)
        file.write(number, predictions_table(columns))

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
        """What each key and each sample-level feature says for the prediction.

        In the order of the keys, each with an equal share of the intercept: see
        `keyhole.estimators.evidence`. Of a classifier, positive numbers speak for the label that
        was predicted and negative ones for the one beside it; of several outputs a column for each.
        """
        from keyhole.estimators.evidence import evidence_of_predictions

        evidence_of_outputs = evidence_of_predictions(self.model.estimator, sets)
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
        return columns


def lists(rows: Iterable[Any]) -> np.ndarray:
    """Arrays of any lengths as one column of objects."""
    entries = list(rows)
    column = np.empty(len(entries), dtype=object)
    for i, entry in enumerate(entries):
        column[i] = entry
    return column
