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
    Query,
    SetId,
    Tokens,
    app,
    check_output,
)
from keyhole.cli._output import echo, refuse

if TYPE_CHECKING:
    from keyhole.data.layout import Dataset
    from keyhole.data.reader import ParquetSets
    from keyhole.data.writer import PartedFile
    from keyhole.models import SavedModel

GAPS = (
    "Gaps: error, drop tokens with one, or impute as the model was fitted [default: as the model "
    "was fitted]."
)
Drop = Annotated[str | None, typer.Option(help=GAPS)]
Unknown = Annotated[
    str,
    typer.Option(help="Categories that the model does not know: error, or ignore (none of them)."),
]


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A model written by kh.save.")],
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="Parquet, Arrow, CSV, npz or .ts file, or a folder of Parquet or .ts.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Parquet file to write.")],
    tokens: Tokens = None,
    keys: Keys = None,
    query: Query = None,
    set_id: SetId = None,
    missing: Drop = None,
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
        typer.Option(help="Coverage, such as 0.9: adds intervals, or sets of labels, and novelty."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Add what each key adds to the prediction.")
    ] = False,
    key_id: Annotated[
        str | None,
        typer.Option(
            "--key-id", help="Column that names the keys: copied as lists in their order."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Sets at a time [default: some 32 MiB].", min=1, max=MAX_COUNT),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT, and start over.")
    ] = False,
) -> None:
    """Predict every set of IN with a saved model, row group by row group.

    An interrupted run goes on where it was.

    IN is read as the data that the model was fitted to unless said otherwise; dimension, queries
    and names are checked. With one row per token, OUT says which set each prediction is for.
    """
    check_output(out, [model, source, *([] if tokens is None else [Path(tokens)])])
    from keyhole.data.datasets import open_data
    from keyhole.data.layout import check_columns
    from keyhole.data.writer import PartedFile
    from keyhole.models import read_model

    try:
        saved = read_model(model)
        if proba and not hasattr(saved.estimator, "predict_proba"):
            refuse(f"--proba needs a classifier: {model} holds a {type(saved.estimator).__name__}.")
        _check_sureness(saved, interval)
        sets = open_data(
            source,
            tokens=tokens,
            keys=keys,
            query=query,
            set_id=set_id,
            missing=missing,
            dim=dim,
            schema=saved.schema,
            unknown=unknown,
            batch_size=batch_size,
        )
        copied = list(dict.fromkeys(filter(None, [sets.layout.set_id, *(keep or []), key_id])))
        sets.layout = replace(sets.layout, key_id=key_id)
        if key_id is not None and sets.tokens is not None:
            check_columns(sets.tokens.schema, [key_id], None, str(tokens))
        sets.require(
            [name for name in copied if sets.tokens is None or name != key_id], one_type=True
        )
        asked = {"probabilities": proba, **({} if interval is None else {"interval": interval})}
        asked |= {"explain": True} if explain else {}
        file = PartedFile(out, _job(model, sets, copied) | asked, overwrite=overwrite)
        work = _Work(saved, sets, copied, proba, interval, explain)
        work.check_first()
        with file:
            rows = _write_missing(work, file)
    except (ValueError, OSError) as error:
        refuse(str(error))
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


def _check_sureness(saved: SavedModel, interval: float | None) -> None:
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
    from keyhole.data.writer import written_column
    from keyhole.lab.explain import NOVEL

    found = written_column(out, "novelty")
    count = int((found > NOVEL).sum())
    if count:
        echo(
            f"warning: {count} of {len(found)} sets are more novel than {NOVEL:.0%} of the "
            "training sets: there the model extrapolates. See column novelty.",
            err=True,
        )


def _job(model: Path, sets: ParquetSets, copied: list[str]) -> dict[str, Any]:
    """What the output depends on; sizes and times stand for the contents of the input."""
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    inputs = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in sets.files]
    columns = [
        *sets.layout.options,
        *([("unknown", "ignore")] if sets.layout.unknown == "ignore" else []),
    ]
    return {"model": digest, "input": inputs, "columns": columns, "copied": copied}


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
        return self.interval is not None and self.model.estimator.interval_method == "jackknife+"

    def check_first(self) -> None:
        """Predict one set, to refuse before the work what would be refused after it."""
        groups = range(self.sets.n_groups)
        first = next((data for number in groups for data, _ in self.sets.read(number)), None)
        if first is None:
            raise ValueError(
                f"there must be sets to predict: {self.sets.paths[0].name!r} has no rows."
            )
        named = self.predictions(first[:1])
        for name in self.copied:
            if name in named:
                raise ValueError(
                    f"copied columns must have names of their own: --id {name!r} is also a column "
                    f"of the predictions ({', '.join(list(named)[:5])}). Rename it in the input."
                )

    def write_missing(self, file: PartedFile) -> int:
        """Predict the row groups that have no part yet, and join all.

        Row groups without sets need none.
        """
        rows = [self.sets.rows(number) for number in range(self.sets.n_groups)]
        filled = [number for number, count in enumerate(rows) if count]
        done = file.done(rows)
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

        beside: dict[str, list[Any]] = {name: [] for name in self.copied}
        named: dict[str, list[np.ndarray]] = {}
        for data, more in self.sets.read(number, self.copied):
            for name, column in self.predictions(data).items():
                named.setdefault(name, []).append(column)
            for name in self.copied:
                beside[name].append(more[name])
        found = {name: np.concatenate(parts) for name, parts in named.items()}
        file.write(number, predictions_table({**beside, **found}))

    def predictions(self, data: Dataset) -> dict[str, np.ndarray]:
        """Columns of the output: predictions, and the probability of each class."""
        fitted, schema = self.model.estimator, self.model.schema
        # names that are positions in a list say nothing of what they are
        named = [n for n in (*schema.names, *data.names) if re.fullmatch(r".*\[\d+\]", n)]
        schema.check(data.sets, () if named else data.names)
        found = fitted.predict(data.sets)
        columns: dict[str, np.ndarray] = {"prediction": found}
        if found.ndim > 1:
            columns = {f"prediction_{i}": column for i, column in enumerate(found.T)}
        if self.proba:
            shares = fitted.predict_proba(data.sets)
            columns |= {
                f"probability_{label}": c
                for label, c in zip(fitted.classes_, shares.T, strict=True)
            }
        if self.interval is not None:
            columns |= self.sureness(data.sets)
        if self.explain:
            columns |= self.explanations(data.sets)
        return columns

    def sureness(self, sets: Any) -> dict[str, np.ndarray]:
        """Lower and upper ends, or lists of plausible labels.

        And novelty, where there are leave-one-out fits.
        """
        fitted, columns = self.model.estimator, {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said once, before
            if hasattr(fitted, "classes_"):
                columns["labels"] = lists(
                    fitted.classes_[row] for row in fitted.predict_set(sets, self.interval)
                )
            else:
                found = fitted.predict_interval(sets, self.interval)
                for i, ends in enumerate(np.moveaxis(found.reshape(len(sets), -1, 2), 1, 0)):
                    suffix = "" if found.ndim == 2 else f"_{i}"
                    columns |= {f"lower{suffix}": ends[:, 0], f"upper{suffix}": ends[:, 1]}
        return columns | ({"novelty": fitted.novelty(sets)} if self.has_novelty else {})

    def explanations(self, sets: Any) -> dict[str, np.ndarray]:
        """What each key and each column of extras adds to the prediction.

        In the order of the keys.

        Of several classes, to the score of the one that won; of several outputs a column for each.
        """
        fitted = self.model.estimator
        keys, extras = fitted.contributions(sets), fitted.extras_contributions(sets)
        if keys[0].ndim == 1:
            columns = {"": (keys, extras)}
        elif hasattr(fitted, "classes_"):
            won = fitted.decision_function(sets).argmax(axis=1)
            own = (
                [part[:, j] for part, j in zip(keys, won, strict=True)],
                extras[np.arange(len(won)), :, won],
            )
            columns = {"": own}
        else:
            columns = {
                f"_{j}": ([part[:, j] for part in keys], extras[:, :, j])
                for j in range(keys[0].shape[1])
            }
        named = {f"contributions{suffix}": lists(parts) for suffix, (parts, _) in columns.items()}
        if extras.shape[1]:
            named |= {
                f"extras_contributions{suffix}": lists(parts)
                for suffix, (_, parts) in columns.items()
            }
        return named


def lists(rows: Iterable[Any]) -> np.ndarray:
    """Arrays of any lengths as one column of objects."""
    found = list(rows)
    column = np.empty(len(found), dtype=object)
    for i, row in enumerate(found):
        column[i] = row
    return column
