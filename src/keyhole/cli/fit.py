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

DATA is a table with one row per set (list columns) or one row per token, or a name that comes with
keyhole, such as digits. Text, dates and booleans become numbers. MODEL is the file to write, for
kh.load and keyhole predict; how the table was read is stored in it. The leave-one-out error is
printed, and the error of what --time or --split sets apart.
"""
HEADS = ("auto", "zero-mean", "biased", "identity", "learned")


@app.command(help=_HELP)
def fit(
    data: Data,
    model: Annotated[Path, typer.Argument(help="The file to write.")],
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
    task: Task = "auto",
    n_heads: Annotated[
        str | None, typer.Option(help="Heads M: a number, inf for the exact kernel, or auto.")
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            help=(
                "Head distribution: auto, zero-mean, biased, identity (its strength chosen) or "
                "learned."
            )
        ),
    ] = None,
    alpha: Annotated[str | None, typer.Option(help="Ridge penalty, a number or loo.")] = None,
    activation: Annotated[
        str | None, typer.Option(help="relu, softmax, linear, square, step or exp.")
    ] = None,
    pooling: Annotated[
        str | None, typer.Option(help="mean, or sum for targets that grow with the set.")
    ] = None,
    scaling: Annotated[
        str | None, typer.Option(help="Of tokens: none, sphere, standard or auto.")
    ] = None,
    make_query: Annotated[
        str | None,
        typer.Option(help="given; mean of the keys; each key in turn; auto tries given and mean."),
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
    dataset = read_data(
        data,
        tokens=tokens,
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
    )
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
    from keyhole.models import save

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
            "(the head distribution was learned from all samples: its leave-one-out error flatters "
            "a little)",
        )
    if data.split is not None and len(data.test):
        say(console, _test_line(estimator, data, kind))
    say(console, f"{len(data.train)} sets in {seconds:.1f} s")


def _leave_one_out_line(estimator: Any, data: Any, kind: str) -> str:
    """RMSE and R², or accuracy with its standard error, of samples or groups left out."""
    train = data.train
    method = "leave-one-out" if data.groups is None else "leave-one-group-out"
    if kind == "regression":
        # R² is 1 − MSE / Var y; it is not defined for a constant target
        mean_square = np.square(train.target - estimator.loo_predictions_).mean()
        variance = train.target.var()
        share = mean_square / variance if variance > 0 else float("nan")
        rmse = number(float(np.sqrt(mean_square)))
        return f"{method} RMSE {rmse}, R² {1 - share:.3f}"
    # one score says which of two classes wins, else each class has a score
    scores = estimator.loo_decision_
    if scores.ndim == 1:
        winners = (scores > 0).astype(int)
    else:
        winners = scores.argmax(axis=1)
    # the standard error of a share e of n samples is √(e (1 − e) / n)
    error_rate = float((estimator.classes_[winners] != train.target).mean())
    standard_error = np.sqrt(error_rate * (1 - error_rate) / len(train))
    return (
        f"{method} accuracy {100 * (1 - error_rate):.1f} % ± {100 * standard_error:.1f}, "
        f"{len(estimator.classes_)} classes"
    )


def _test_line(estimator: Any, data: Any, kind: str) -> str:
    """RMSE and R², or accuracy, on the test part of the data."""
    test = data.test
    score = f"{estimator.score(test.sets, test.target):.3f}"
    if kind == "regression":
        errors = np.square(test.target - estimator.predict(test.sets))
        measures = f"RMSE {number(float(np.sqrt(errors.mean())))}, R² {score}"
    else:
        measures = f"accuracy {score}"
    part = "sets that the data sets apart"
    if data.time is not None:
        part = "newest sets, kept for testing"
    return f"test {measures} on the {len(test)} {part}, which the model has not seen"
