"""`keyhole fit`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from keyhole.cli._app import (
    MAX_SEED,
    Data,
    Dim,
    Extras,
    Groups,
    Keys,
    Missing,
    Query,
    ReferenceDate,
    SetId,
    Split,
    Target,
    Task,
    Time,
    Tokens,
    answer_or_exit,
    app,
    check_output,
    read_data,
    read_n_heads,
    refuse_error,
    task_of,
)
from keyhole.cli._output import refuse, say
from keyhole.lab.report.html import number

_HELP = """Fit one attention layer to a table of sets and save it.

DATA is a table with one row per token, or with one row per set and list columns. Text, dates and
booleans become numbers. MODEL is the file to write, for kh.load and keyhole predict. It also stores
how the table was read. Settings that you do not pass are chosen on the training samples. The
command prints the leave-one-out error, and the error on the samples that --time or --split holds
out.
"""
HEADS = ("auto", "zero-mean", "biased", "identity", "learned")


@app.command(help=_HELP)
def fit(
    data: Data,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The file to write.")],
    tokens: Tokens = None,
    keys: Keys = None,
    query: Query = None,
    target: Target = None,
    extras: Extras = None,
    set_id: SetId = None,
    missing: Missing = "error",
    dim: Dim = None,
    groups: Groups = None,
    time: Time = None,
    split: Split = None,
    reference_date: ReferenceDate = None,
    task: Task = "auto",
    n_heads: Annotated[
        str | None,
        typer.Option(help="Number of heads, or inf for the exact kernel, or auto [default: auto]."),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help=(
                "Head distribution: auto, zero-mean, biased, identity (with a strength that is "
                "chosen) or learned [default: auto]."
            )
        ),
    ] = None,
    alpha: Annotated[
        str | None,
        typer.Option(help="Ridge penalty: a number, or loo for leave-one-out [default: loo]."),
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option(help="auto, relu, softmax, linear, square, step or exp [default: auto]."),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            help=(
                "How keys are combined: auto, mean, mean+size, mean+statistics, or sum for targets "
                "that grow with the set [default: auto]."
            )
        ),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(help="Scaling of tokens: auto, none, sphere or standard [default: auto]."),
    ] = None,
    make_query: Annotated[
        str | None,
        typer.Option(
            help=(
                "Query of sets: given, mean (of the keys), each (every key in turn) or auto "
                "[default: auto]."
            )
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the heads.", min=0, max=MAX_SEED)] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace MODEL if it is there.")] = False,
) -> None:
    """Read, fit, print, save."""
    # refuse before any work what would be refused after it
    inputs = [Path(data)]
    if tokens is not None:
        inputs.append(Path(tokens))
    check_output(model, inputs)
    if model.exists() and not overwrite:
        refuse(
            f"a file is not replaced unless asked: {model.name!r} exists. Choose another name, or "
            "add --overwrite."
        )
    parameters = _Parameters(
        n_heads=n_heads if n_heads in (None, "auto") else read_n_heads(n_heads),
        heads=None if heads is None else head_distribution(heads),
        alpha=None if alpha is None else _alpha(alpha),
        activation=activation,
        pooling=pooling,
        scaling=scaling,
        query=make_query,
        random_state=seed,
    )

    # read
    from keyhole.data.layout import TableOptions

    options = TableOptions(
        keys=keys,
        query=query,
        target=target,
        extras=extras,
        set_id=set_id,
        missing=missing,
        dim=dim,
        groups=groups,
        time=time,
        split=split,
        reference_date=reference_date,
    )
    dataset = read_data(data, tokens, options)
    train = dataset.train
    if not len(train):
        refuse(
            f"there must be samples to learn from: --split {split} says test of all {len(dataset)}."
        )

    # fit
    assert dataset.target is not None
    kind = task_of(dataset.target, task)
    estimator = parameters.estimator(kind)
    console = Console()
    start = perf_counter()
    with console.status("fitting …"):
        answer_or_exit(lambda: estimator.fit(train.sets, train.target, groups=train.groups))
    seconds = perf_counter() - start

    # save, and say what was learned
    _save(estimator, model, dataset, overwrite)
    _print(console, estimator, dataset, kind, seconds)
    say(console, f"wrote {model}")


@dataclass(frozen=True)
class _Parameters:
    """Parameters of an estimator that the command line gives; None: as the estimator has them."""

    n_heads: float | str | None
    heads: Any
    alpha: float | str | None
    activation: str | None
    pooling: str | None
    scaling: str | None
    query: str | None
    random_state: int

    def estimator(self, kind: str) -> Any:
        """An estimator for a task, "regression" or "classification", not yet fitted."""
        import keyhole as kh

        estimator: Any = kh.AttentionClassifier()
        if kind == "regression":
            estimator = kh.AttentionRegressor()
        for parameter in fields(self):
            value = getattr(self, parameter.name)
            if value is not None:
                setattr(estimator, parameter.name, value)
        return estimator


def head_distribution(name: str) -> Any:
    """The head distribution of a name; None for the one that is chosen."""
    import keyhole as kh

    distributions = {
        "auto": None,
        "zero-mean": kh.GaussianHeads(),
        "biased": kh.GaussianHeads(mean=1.0),
        "identity": kh.IdentityHeads(),
        "learned": kh.LearnedHeads(),
    }
    if name not in distributions:
        remedy = ""
        if name.isdecimal() or name == "inf":
            remedy = f" For the number of heads use --n-heads {name}."
        refuse(
            f"--heads is the head distribution, one of {', '.join(HEADS)}: got {name!r}.{remedy}"
        )
    return distributions[name]


def _alpha(text: str) -> Any:
    if text == "loo":
        return text
    try:
        return float(text)
    except ValueError:
        refuse(f"--alpha must be a number or loo: got {text!r}.")


def _save(estimator: Any, path: Path, data: Any, overwrite: bool) -> None:
    from keyhole.state import save

    try:
        save(estimator, path, schema=data.schema, overwrite=overwrite)
    except (ValueError, OSError) as error:
        refuse_error(error)


def _print(console: Console, estimator: Any, data: Any, kind: str, seconds: float) -> None:
    """Say what was read, what was fitted, and how well it does."""
    # the data
    say(console, f"{data.description}; target {data.target_name or 'without a name'}, {kind}")
    columns = dict(data.columns)
    if columns:
        uses = [f"keys: {', '.join(columns['keys'])}"]
        for use in ("query", "extras"):
            if use in columns:
                uses.append(f"{use}: {', '.join(columns[use])}")
        say(console, "; ".join(uses))
    for line in _date_lines(data):
        say(console, line)
    if data.left_out:
        say(
            console,
            f"left out: {'; '.join(data.left_out)}. Name the keys with --keys to choose otherwise.",
        )

    # the model
    rule = estimator.tokens_
    distribution = estimator.heads_
    heads = f"{estimator.n_heads_} heads"
    if estimator.solver_ == "kernel":
        heads = "the exact kernel"
    say(
        console,
        f"{heads}, {distribution}; α {estimator.alpha_:.3g}; "
        f"tokens: {rule.scaling}, query: {rule.query}, pooling: {rule.pooling}",
    )

    # its errors
    say(console, _leave_one_out_line(estimator, data, kind))
    if getattr(distribution, "chosen", "") == "learned":
        say(
            console,
            "(the head distribution was learned from the same samples, so this leave-one-out error "
            "is slightly too low; --split or --time gives an error on samples it has not seen)",
        )
    if data.split is not None and len(data.test):
        say(console, _test_line(estimator, data, kind))
    say(console, f"{len(data.train)} sets in {seconds:.1f} s")


def _date_lines(data: Any) -> list[str]:
    """How dates became numbers: ages, or days after the first one."""
    reference = dict(data.columns).get("reference_date")
    of_kind: dict[str, list[str]] = {"age": [], "date": []}
    for coding in data.codings:
        if coding.kind in of_kind:
            of_kind[coding.kind].append(coding.column)
    lines = []
    if of_kind["age"]:
        lines.append(f"dates: {', '.join(of_kind['age'])} in days before {reference}")
    if of_kind["date"]:
        line = f"dates: {', '.join(of_kind['date'])} in days after the first one"
        if reference is None:
            line += " (--reference-date counts the days before the date of each sample)"
        lines.append(line)
    return lines


def _leave_one_out_line(estimator: Any, data: Any, kind: str) -> str:
    """How well samples, or groups, are predicted that were left out; beside a constant guess."""
    from keyhole.lab import scores

    train = data.train
    method = "leave-one-out" if data.groups is None else "leave-one-group-out"
    n_held_out = getattr(estimator, "n_held_out_", 0)
    if n_held_out:
        method = "held-out"
    if kind == "regression":
        predictions = estimator.loo_predictions_
        is_known = np.isfinite(predictions.reshape(len(train), -1)).all(axis=1)
        target = train.target[is_known]
        measures = scores.number_measures(target, predictions[is_known])
        return (
            f"{method} RMSE {number(measures.rmse)}, R² {measures.r2:.3f}"
            f"{_constant_rmse(target, train.target)}{_uncounted(is_known, n_held_out)}"
        )

    # the standard error of a share e of n samples is √(e (1 − e) / n)
    classes = estimator.classes_
    labels = np.searchsorted(classes, train.target)
    probabilities = scores.probabilities_of(estimator.loo_decision_, estimator.temperature_)
    is_known = np.isfinite(probabilities).all(axis=1)
    measures_of_classes = scores.class_measures(labels[is_known], probabilities[is_known])
    accuracy = measures_of_classes.accuracy
    standard_error = np.sqrt(accuracy * (1 - accuracy) / max(1, int(is_known.sum())))
    guess = scores.constant_class_guess(labels[is_known], labels, len(classes))
    return (
        f"{method} {measures_of_classes.words(len(classes), standard_error)}, {len(classes)} "
        f"classes; a constant guess: {guess.words()}{_uncounted(is_known, n_held_out)}"
    )


def _constant_rmse(target: np.ndarray, training_target: np.ndarray) -> str:
    """The RMSE of the mean of the training samples, in words."""
    rmse = float(np.sqrt(np.square(target - training_target.mean(axis=0)).mean()))
    return f"; a constant guess: RMSE {number(rmse)}"


def _uncounted(is_known: np.ndarray, n_held_out: int) -> str:
    """Samples of which nothing is known left out: fitted exactly within rounding, or learned from.

    Where heads were learned, only samples that were held out from learning count.
    """
    if n_held_out:
        return f" ({n_held_out} samples that learned heads have not seen)"
    count = int((~is_known).sum())
    return f" ({count} samples that are fitted exactly are not counted)" if count else ""


def _test_line(estimator: Any, data: Any, kind: str) -> str:
    """How well the test part of the data is predicted; beside a constant guess."""
    from keyhole.lab import scores

    test = data.test
    if kind == "regression":
        measures = scores.number_measures(test.target, estimator.predict(test.sets))
        words = f"RMSE {number(measures.rmse)}, R² {measures.r2:.3f}"
        guess = _constant_rmse(test.target, data.train.target)
    else:
        # a class that the training part does not have is none of the columns
        classes = estimator.classes_
        places = np.minimum(np.searchsorted(classes, test.target), len(classes) - 1)
        labels = np.where(classes[places] == test.target, places, -1)
        training_labels = np.searchsorted(classes, data.train.target)
        probabilities = estimator.predict_proba(test.sets)
        words = scores.class_measures(labels, probabilities).words(len(classes))
        constant = scores.constant_class_guess(labels, training_labels, len(classes))
        guess = f"; a constant guess: {constant.words()}"
    part = "sets that the data sets apart"
    if data.time is not None:
        part = "newest sets, kept for testing"
    return f"test {words} on the {len(test)} {part}, which the model has not seen{guess}"
