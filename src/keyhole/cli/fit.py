"""`keyhole fit`."""

from __future__ import annotations

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
    import keyhole as kh

    check_output(model, [Path(data), *([] if tokens is None else [Path(tokens)])])
    if model.exists() and not overwrite:
        refuse(
            f"a file is not replaced unless asked: {model.name!r} exists. Choose another name, or "
            "add --overwrite."
        )
    named = {
        "n_heads": n_heads if n_heads in (None, "auto") else read_n_heads(n_heads),
        "heads": None if heads is None else head_distribution(heads),
        "alpha": None if alpha is None else _alpha(alpha),
        "activation": activation,
        "pooling": pooling,
        "scaling": scaling,
        "query": make_query,
        "random_state": seed,
    }
    options = {
        name: value for name, value in named.items() if value is not None
    }  # the rest is the estimator's
    columns = {
        "keys": keys,
        "query": query,
        "target": target,
        "extras": extras,
        "set_id": set_id,
        "tokens": tokens,
    }
    found = read_data(
        data, **columns, missing=missing, dim=dim, groups=groups, time=time, split=split
    )
    train = found.train
    if not len(train):
        refuse(
            f"there must be samples to learn from: --split {split} says test of all {len(found)}."
        )
    kind = task_of(found.target, task)
    console = Console()
    began = perf_counter()
    with console.status("fitting …"):
        made: Any = kh.AttentionRegressor if kind == "regression" else kh.AttentionClassifier
        estimator = answer_or_exit(
            lambda: made(**options).fit(train.sets, train.target, groups=train.groups)
        )
    seconds = perf_counter() - began
    _save(estimator, model, found, overwrite)
    _print(console, estimator, found, kind, seconds)
    say(console, f"wrote {model}")


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
        refuse(str(error))


def _print(console: Console, estimator: Any, data: Any, kind: str, seconds: float) -> None:
    train = data.train
    say(console, f"{data.description}; target {data.target_name or 'without a name'}, {kind}")
    columns = dict(data.columns)
    if columns:
        asked = f"; query: {', '.join(columns['query'])}" if "query" in columns else ""
        own = f"; extras: {', '.join(columns['extras'])}" if "extras" in columns else ""
        say(console, f"keys: {', '.join(columns['keys'])}{asked}{own}")
    if data.left_out:
        say(
            console,
            f"left out: {'; '.join(data.left_out)}. Name the keys with --keys to choose otherwise.",
        )
    rule = estimator.tokens_
    distribution = estimator.heads_
    heads = "the exact kernel" if estimator.solver_ == "kernel" else f"{estimator.n_heads_} heads"
    say(
        console,
        f"{heads}, {distribution}; α {estimator.alpha_:.3g}; "
        f"tokens: {rule.scaling}, query: {rule.query}, pooling: {rule.pooling}",
    )
    left = "leave-one-out" if data.groups is None else "leave-one-group-out"
    if kind == "regression":
        residuals = np.square(train.target - estimator.loo_predictions_)
        share = residuals.mean() / train.target.var() if train.target.var() > 0 else float("nan")
        say(console, f"{left} RMSE {number(float(np.sqrt(residuals.mean())))}, R² {1 - share:.3f}")
    else:
        scores = estimator.loo_decision_
        winners = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        wrong = float((estimator.classes_[winners] != train.target).mean())
        error = np.sqrt(wrong * (1 - wrong) / len(train))
        say(
            console,
            f"{left} accuracy {100 * (1 - wrong):.1f} % ± {100 * error:.1f}, "
            f"{len(estimator.classes_)} classes",
        )
    if getattr(distribution, "chosen", "") == "learned":
        say(
            console,
            "(the head distribution was learned from all samples: its leave-one-out error flatters "
            "a little)",
        )
    if data.split is not None and len(data.test):
        score = estimator.score(data.test.sets, data.test.target)
        name = "R²" if kind == "regression" else "accuracy"
        which = (
            "newest sets, kept for testing"
            if data.time is not None
            else "sets that the data sets apart"
        )
        errors = (
            np.square(data.test.target - estimator.predict(data.test.sets))
            if kind == "regression"
            else None
        )
        rmse = "" if errors is None else f"RMSE {number(float(np.sqrt(errors.mean())))}, "
        say(
            console,
            f"test {rmse}{name} {score:.3f} on the {len(data.test)} {which}, which the model has "
            "not seen",
        )
    say(console, f"{len(train)} sets in {seconds:.1f} s")
