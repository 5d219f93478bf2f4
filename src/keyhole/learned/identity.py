"""How strong an identity, and how wide the noise: chosen from a few by leave-one-out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._checks import check_count, check_number
from keyhole.groups import PooledSets
from keyhole.heads import GaussianHeads, _Params, identity_mean
from keyhole.learned.fitted import FittedHeads
from keyhole.learned.judge import Judgement, Task, improvement, judge
from keyhole.sets import SetBatch


class UnfittedLaw(_Params):
    """A law that a training set has to choose first, by ``fit``."""

    def sample(self, n_heads: int, dim: int, seed: int, *, start: int = 0) -> Float[np.ndarray, "m e e"]:
        """Raise: there is no law before a training set has spoken."""
        name = type(self).__name__
        raise ValueError(
            f"{name} has no heads before it has seen a training set. Pass it as `law` to kh.AttentionRegressor or "
            f"kh.AttentionClassifier, which fit it first; or call {name}(…).fit(sets, y) and use the law that returns."
        )


class IdentityHeads(UnfittedLaw):
    """Heads W = c·W_0 + scale·G whose strength c, and scale, are chosen by leave-one-out on the training set.

    W_0 = [[I, 0], [0, 0]], so that the mean score is c·<x_0, x_i>: keys that resemble the query. The first pair
    is the incumbent: another takes its place only if its leave-one-out error is lower by more than a standard
    error of the difference, sample by sample.

    Parameters
    ----------
    strengths : sequence of float
        c to choose from, the incumbent first.
    scales : sequence of float
        Standard deviations to choose from, the incumbent first.
    n_heads : int
        Heads drawn to compare with.
    max_samples : int
        Samples used to compare, a random part if there are more.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(300, n_keys=5, dim=6, seed=0)
    >>> y = kh.targets.Correlation(3, dim=6)(sets)
    >>> model = kh.AttentionRegressor(100, law=kh.IdentityHeads(), random_state=0).fit(sets, y)
    >>> model.law_.chosen, model.law_.strength > 0
    ('identity', True)
    """

    def __init__(
        self,
        strengths: Any = (0.0, 1.0, 3.0, 10.0, 30.0),
        scales: Any = (0.5,),
        n_heads: Any = 128,
        max_samples: Any = 1000,
    ) -> None:
        self.strengths = strengths
        self.scales = scales
        self.n_heads = n_heads
        self.max_samples = max_samples

    def fit(
        self,
        batch: SetBatch | PooledSets,
        y: Float[np.ndarray, "n ..."],
        *,
        activation: str = "relu",
        fit_intercept: bool = True,
        weights: Float[np.ndarray, " n"] | None = None,
        groups: Int[np.ndarray, " n"] | None = None,
        seed: int = 0,
    ) -> FittedHeads:
        """Choose; return a law to sample from. The estimators call this first."""
        task = Task.of(
            batch, np.asarray(y, dtype=float).reshape(len(batch), -1), weights, activation, fit_intercept, groups
        )
        choice, tried = choose_identity(
            shrink(task, check_count(self.max_samples, "max_samples"), seed),
            _numbers(self.strengths, "strengths"),
            _numbers(self.scales, "scales"),
            check_count(self.n_heads, "n_heads"),
            seed,
        )
        del tried
        return choice


def choose_identity(
    task: Task, strengths: Sequence[float], scales: Sequence[float], n_heads: int, seed: int
) -> tuple[FittedHeads, Judgement]:
    """The pair of least leave-one-out error if that is beyond doubt, else the first pair."""
    laws = [(c, s) for s in scales for c in strengths]
    judged = [judge(task, GaussianHeads(c, s), n_heads, seed) for c, s in laws]
    best = int(np.argmin([np.average(j.loo, weights=task.weights) for j in judged]))
    gain, error = improvement(judged[0].loo, judged[best].loo, task.weights, task.groups)
    if gain <= error:
        best = 0
    strength, scale = laws[best]
    dim = task.batch.dim
    reason = (
        f"leave-one-out error {np.average(judged[best].loo, weights=task.weights):.3g} of the variance, "
        f"{np.average(judged[0].loo, weights=task.weights):.3g} for c = {laws[0][0]:g}, scale {laws[0][1]:g}"
    )
    chosen = "identity" if strength else "zero-mean"
    law = FittedHeads(strength * identity_mean(dim)[None], scale, chosen, strength, reason=reason)
    return law, judged[best]


def shrink(task: Task, most: int, seed: int) -> Task:
    """At most ``most`` of the samples, drawn at random, in their order."""
    if len(task) <= most:
        return task
    return task.take(np.sort(np.random.default_rng([seed, most]).permutation(len(task))[:most]))


def _numbers(values: Any, name: str) -> list[float]:
    if np.ndim(values) != 1 or len(values) == 0:
        raise ValueError(f"`{name}` must be a sequence of at least one number: got {values!r}.")
    minimum = 0.0 if name == "scales" else -np.inf
    return [check_number(v, f"{name}[{i}]", minimum=minimum, exclusive=name == "scales") for i, v in enumerate(values)]
