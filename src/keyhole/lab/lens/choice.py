"""The scaling of tokens, the query and the head distribution that a lens uses throughout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keyhole.attention.heads import GaussianHeads
from keyhole.choose import Choice, choice_seconds, choose
from keyhole.data.tokens import TokenRule
from keyhole.lab.lens.findings import LensConfig
from keyhole.lab.lens.problem import LensProblem
from keyhole.spec import LayerSpec

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
        The scaling of tokens and the query.
    biased : head distribution or None
        The best of the head distributions with a mean, whether or not it was chosen; None where
        there is no query that keys could resemble.
    seconds : float
        What the choice takes, as predicted.
    is_measured : bool
        False where the budget was too small for a choice.
    """

    rule: TokenRule
    biased: GaussianHeads | None
    seconds: float
    is_measured: bool = True


def make_choice(problem: LensProblem, config: LensConfig) -> TokenChoice:
    """Choose scaling, query and head distribution as the estimators do, within the budget.

    The first training samples choose: as many as make the choice cost no more than its share of the
    budget.
    """
    train = problem.folds[0][0]
    spec = LayerSpec(
        n_heads=config.n_heads,
        activation=config.activation,
        pooling=config.pooling,
        criterion="squared_error" if problem.labels is None else "log_loss",
        seed=config.seed,
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
            return TokenChoice(rule=rule, biased=best_biased(choice), seconds=seconds)
        n_samples //= 2

    # too little for any choice
    data = problem.training_set(train[:MIN_PILOT])
    rule = TokenRule.learn(data.samples, "standard", "given", config.pooling)
    biased = GaussianHeads(1.0) if problem.has_query else None
    return TokenChoice(rule=rule, biased=biased, seconds=0.0, is_measured=False)


def best_biased(choice: Choice) -> GaussianHeads | None:
    """The candidate with a mean of least loss, under the scaling and query that were chosen."""
    best = None
    for candidate in choice.candidates:
        has_chosen_scaling = candidate.scaling == choice.spec.scaling
        has_chosen_query = candidate.query == choice.spec.query
        heads = candidate.heads
        if not (has_chosen_scaling and has_chosen_query):
            continue
        if isinstance(heads, GaussianHeads) and has_mean(heads):
            if best is None or candidate.loss < best.loss:
                best = candidate
    if best is None:
        return None
    assert isinstance(best.heads, GaussianHeads)
    return best.heads


def has_mean(heads: GaussianHeads) -> bool:
    """Whether the mean of a head distribution is not zero."""
    return bool(np.any(np.asarray(heads.mean) != 0.0))
