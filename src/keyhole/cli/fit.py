"""`keyhole fit`."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from keyhole.cli._app import (
    HEADS,
    MAX_SEED,
    Activation,
    Alpha,
    Data,
    Dim,
    Extras,
    Groups,
    Heads,
    Keys,
    MakeQuery,
    Missing,
    NHeads,
    Pooling,
    Query,
    ReferenceDate,
    Scaling,
    SetId,
    Split,
    Target,
    Task,
    Time,
    Tokens,
    app,
    check_output,
    read_data,
    read_n_heads,
    task_of,
)
from keyhole.cli._output import refuse, say
from keyhole.registry import ACTIVATIONS, POOLINGS, QUERIES, SCALINGS

_HELP = """Fit attention layers to a table of sets and save them.

DATA is a table with one row per token, or with one row per set and list columns. Text, dates and
booleans become numbers. MODEL is the file to write, for kh.load and keyhole predict. It also stores
how the table was read. Layers with the settings that you leave open are fitted and combined. The
command prints the error on samples that were left out, and the error on the samples that --time or
--split holds out.
"""


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
    n_heads: NHeads = "auto",
    heads: Heads = "auto",
    alpha: Alpha = "loo",
    activation: Activation = "auto",
    pooling: Pooling = "auto",
    scaling: Scaling = "auto",
    make_query: MakeQuery = "auto",
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
    head_count = n_heads if n_heads == "auto" else read_n_heads(n_heads)
    distribution = head_distribution(heads)
    penalty = _alpha(alpha)

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
    import keyhole as kh

    estimator_class: Any = kh.AttentionClassifier
    if kind == "regression":
        estimator_class = kh.AttentionRegressor
    estimator = estimator_class(
        n_heads=head_count,
        heads=distribution,
        alpha=penalty,
        activation=activation,
        pooling=pooling,
        scaling=scaling,
        query=make_query,
        random_state=seed,
    )
    console = Console()
    start = perf_counter()
    with console.status("fitting …"):
        estimator.fit(train.sets, train.target, groups=train.groups)
    seconds = perf_counter() - start

    # save, and say what was learned
    kh.save(estimator, model, schema=dataset.schema, overwrite=overwrite)
    _print(console, estimator, dataset, kind, seconds)
    say(console, f"wrote {model}")


def head_distribution(name: str) -> Any:
    """The head distribution of a name; None for the one that is chosen."""
    import keyhole as kh

    distributions = {
        "auto": None,
        "zero-mean": kh.GaussianHeads(),
        "biased": kh.GaussianHeads(mean=1.0),
        "learned": kh.LearnedHeads(),
    }
    if name not in distributions:
        remedy = ""
        if name.isdecimal() or name == "inf":
            remedy = f" For the number of heads use --n-heads {name}."
        refuse(
            "--heads is the head distribution, one of auto, "
            f"{', '.join(HEADS)}: got {name!r}.{remedy}"
        )
    return distributions[name]


def _alpha(text: str) -> Any:
    if text == "loo":
        return text
    try:
        return float(text)
    except ValueError:
        refuse(f"--alpha must be a number or loo: got {text!r}.")


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
    for line in _model_lines(estimator):
        say(console, line)

    # its errors
    say(console, _held_out_line(estimator, data, kind))
    if data.split is not None and len(data.test):
        say(console, _test_line(estimator, data, kind))
    say(console, f"{len(data.train)} sets in {seconds:.1f} s")


def _model_lines(estimator: Any) -> list[str]:
    """The layers of the fit, or the settings of its only one, each with what it means."""
    from keyhole.estimators.report import heads_words, table_lines

    rows = estimator.members_
    if len(rows) > 1:
        kept = [row for row in rows if row.weight]
        lines = [f"{len(kept)} of {len(rows)} layers, combined by their leave-one-out predictions:"]
        return [*lines, *(f"  {line}" for line in table_lines(kept))]
    (row,) = rows
    params = row.params
    penalty = f"α {row.alpha:.3g}, the larger the smoother"
    if estimator.alpha == "loo":
        penalty += " (chosen by leave-one-out)"
    settings = {
        "heads": f"{heads_words(row)} query-key matrices, which score rows, of {row.heads}",
        "activation": f"{params['activation']}: {ACTIVATIONS[params['activation']].help}",
        "pooling": f"{params['pooling']}: {POOLINGS[params['pooling']].help}",
        "scaling": f"{params['scaling']}: {SCALINGS[params['scaling']]}",
        "query": f"{params['query']}: {QUERIES[params['query']]}",
        "penalty": penalty,
    }
    return [f"  {name:<10} {words}" for name, words in settings.items()]


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


def _held_out_line(estimator: Any, data: Any, kind: str) -> str:
    """How well samples that were held out are predicted; beside a constant guess."""
    from keyhole.estimators import scores

    train = data.train
    method = "held out of the whole procedure (ten folds):"
    if estimator.held_out_words_.startswith(("On samples left", "On groups left")):
        method = "leave-one-out" if data.groups is None else "leave-one-group-out"
    if kind == "regression":
        predictions = estimator.held_out_predictions_
        is_known = np.isfinite(predictions.reshape(len(train), -1)).all(axis=1)
        target = train.target[is_known]
        measures = scores.number_measures(target, predictions[is_known])
        return (
            f"{method} RMSE {measures.rmse:.4g}, R² {measures.r2:.3f}"
            f"{_constant_rmse(target, train.target)}{_uncounted(is_known)}"
        )

    # the standard error of a share e of n samples is √(e (1 − e) / n)
    classes = estimator.classes_
    labels = np.searchsorted(classes, train.target)
    probabilities = estimator.held_out_predictions_
    is_known = np.isfinite(probabilities).all(axis=1)
    measures_of_classes = scores.class_measures(labels[is_known], probabilities[is_known])
    accuracy = measures_of_classes.accuracy
    standard_error = np.sqrt(accuracy * (1 - accuracy) / max(1, int(is_known.sum())))
    guess = scores.constant_class_guess(labels[is_known], labels, len(classes))
    return (
        f"{method} {measures_of_classes.words(len(classes), standard_error)}, {len(classes)} "
        f"classes; a constant guess: {guess.words()}{_uncounted(is_known)}"
    )


def _constant_rmse(target: np.ndarray, training_target: np.ndarray) -> str:
    """The RMSE of the mean of the training samples, in words."""
    rmse = float(np.sqrt(np.square(target - training_target.mean(axis=0)).mean()))
    return f"; a constant guess: RMSE {rmse:.4g}"


def _uncounted(is_known: np.ndarray) -> str:
    """Samples that are not counted: they are fitted exactly within rounding."""
    count = int((~is_known).sum())
    return f" ({count} samples that are fitted exactly are not counted)" if count else ""


def _test_line(estimator: Any, data: Any, kind: str) -> str:
    """How well the test part of the data is predicted; beside a constant guess."""
    from keyhole.estimators import scores

    test = data.test
    if kind == "regression":
        measures = scores.number_measures(test.target, estimator.predict(test.sets))
        words = f"RMSE {measures.rmse:.4g}, R² {measures.r2:.3f}"
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
