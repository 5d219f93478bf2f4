"""The settings of the layer that a lens uses throughout, chosen as the estimators choose them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.attention.heads import GaussianHeads
from keyhole.choose import Choice, choice_seconds, choose, first_settings
from keyhole.data.tokens import TokenRule
from keyhole.key_selection import ALL_KEYS
from keyhole.lab.lens.findings import LensConfig
from keyhole.lab.lens.problem import LensProblem
from keyhole.spec import AUTO, LayerSpec

MOST = 300  # samples that choices are made on
MIN_PILOT = 20  # samples that choices are made on at least
FOR_CHOICE = 1 / 4  # share of the budget that choices may take


@dataclass(frozen=True)
class TokenChoice:
    """What `keyhole.choose.choose` chose on a part of the samples, as for default settings.

    The first candidates where the budget was too small for a choice.

    Attributes
    ----------
    rule : TokenRule
        The scaling of tokens, the query and the pooling.
    activation : str
    zero_mean : head distribution
        The best of those without a mean: under softmax their scale is chosen.
    biased : head distribution or None
        The best of the head distributions with a mean, whether or not it was chosen; None where
        there is no query that keys could resemble.
    seconds : float
        What the choice takes, as predicted.
    is_measured : bool
        False where the budget was too small for a choice.
    """

    rule: TokenRule
    activation: str
    zero_mean: GaussianHeads
    biased: GaussianHeads | None
    seconds: float
    is_measured: bool = True


def estimator_line(
    *, classifies: bool, heads: Any, n_heads: float, activation: str, rule: TokenRule
) -> str:
    """The estimator with these settings, as a line of Python to copy.

    Learners on Gram matrices see all keys and minimise squared errors.
    """
    kind = "AttentionClassifier" if classifies else "AttentionRegressor"
    count = 'float("inf")' if math.isinf(n_heads) else f"{n_heads:.0f}"
    settings = [
        count,
        f"heads=kh.{heads!r}",
        f"activation={activation!r}",
        f"pooling={rule.pooling!r}",
        f"scaling={rule.scaling!r}",
        f"query={rule.query!r}",
        "keys='all'",
    ]
    if classifies:
        settings.append("loss='squared_error'")
    return f"kh.{kind}({', '.join(settings)})"


def default_estimator_line(spec: LayerSpec) -> str:
    """The estimator with default settings, and those that the user gave."""
    kind = "AttentionClassifier" if spec.classifies else "AttentionRegressor"
    settings = []
    if spec.activation != AUTO:
        settings.append(f"activation={spec.activation!r}")
    if spec.pooling != AUTO:
        settings.append(f"pooling={spec.pooling!r}")
    return f"kh.{kind}({', '.join(settings)})"


def default_spec(problem: LensProblem, config: LensConfig) -> LayerSpec:
    """What an estimator with default settings, and those that the user gave, leaves open.

    Heads are not learned: other learners of the lens do that.
    """
    spec = LayerSpec(activation=config.activation, pooling=config.pooling, seed=config.seed)
    if problem.labels is None:
        return spec
    return replace(spec, criterion="log_loss", loss=AUTO, classifies=True)


def make_choice(problem: LensProblem, config: LensConfig) -> TokenChoice:
    """Choose settings as the estimators do, within the budget.

    The first training samples choose: as many as make the choice cost no more than its share of the
    budget. Gram matrices of squared errors on all keys serve every question of a lens, so neither
    the log-loss nor a selection of keys is tried here: `default_spec` leaves them open.
    """
    train = problem.folds[0][0]
    spec = replace(
        default_spec(problem, config),
        n_heads=config.n_heads,
        keys=ALL_KEYS,
        loss="squared_error",
        extras_scale=1.0,
    )

    # the largest part whose choice is affordable
    n_samples = min(len(train), MOST)
    while n_samples >= MIN_PILOT:
        data = problem.training_set(train[:n_samples])
        seconds = choice_seconds(spec, data)
        if seconds <= FOR_CHOICE * config.budget:
            choice = choose(spec, data)
            rule = choice.token_rule(data)
            return TokenChoice(
                rule=rule,
                activation=choice.spec.activation,
                zero_mean=best_heads(choice, with_mean=False) or GaussianHeads(),
                biased=best_heads(choice, with_mean=True),
                seconds=seconds,
            )
        n_samples //= 2

    # too little for any choice
    data = problem.training_set(train[:MIN_PILOT])
    settings = first_settings(spec)
    rule = TokenRule.learn(data.samples, "standard", "given", settings.pooling)
    biased = GaussianHeads(1.0) if problem.has_query else None
    return TokenChoice(
        rule=rule,
        activation=settings.activation,
        zero_mean=GaussianHeads(),
        biased=biased,
        seconds=0.0,
        is_measured=False,
    )


def best_heads(choice: Choice, *, with_mean: bool) -> GaussianHeads | None:
    """The heads of least loss among those with, or without, a mean, under what was chosen else."""
    chosen = (
        choice.spec.activation,
        choice.spec.pooling,
        choice.spec.scaling,
        choice.spec.query,
    )
    best = None
    for candidate in choice.candidates:
        heads = candidate.heads
        settings = (
            candidate.activation,
            candidate.pooling,
            candidate.scaling,
            candidate.query,
        )
        if settings != chosen:
            continue
        if isinstance(heads, GaussianHeads) and has_mean(heads) == with_mean:
            if best is None or candidate.loss < best.loss:
                best = candidate
    if best is None:
        return None
    assert isinstance(best.heads, GaussianHeads)
    return best.heads


def has_mean(heads: GaussianHeads) -> bool:
    """Whether the mean of a head distribution is not zero."""
    return bool(np.any(np.asarray(heads.mean) != 0.0))
