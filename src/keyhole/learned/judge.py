"""What a law is worth on a training set: leave-one-out, and a part that nothing else has seen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole.features import pooled_features
from keyhole.groups import PooledSets
from keyhole.heads import HeadLaw
from keyhole.sets import SetBatch
from keyhole.solvers import RidgeSolution, ridge_gram_path
from keyhole.solvers.left_out import GroupPath, leave_groups_out

_RUNS = 100
"""The held-out part is made of runs of consecutive samples, a hundredth of them each: neighbours in a table are often
related (questions about one story), and a sample held out beside its sibling is not held out."""


@dataclass(frozen=True)
class Task:
    """Training samples with the options of the layer that will be fitted to them.

    Attributes
    ----------
    batch : SetBatch or PooledSets
    columns : array (n, t)
        Outputs, centred and scaled so that their mean square is 1.
    weights : array (n,) or None
    activation : str
    fit_intercept : bool
    groups : array (n,) or None
        Samples that are left out together.
    """

    batch: SetBatch | PooledSets = field(repr=False)
    columns: Float[np.ndarray, "n t"] = field(repr=False)
    weights: Float[np.ndarray, " n"] | None = field(repr=False)
    activation: str
    fit_intercept: bool
    groups: Int[np.ndarray, " n"] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        batch: SetBatch | PooledSets,
        columns: Float[np.ndarray, "n t"],
        weights: Float[np.ndarray, " n"] | None,
        activation: str,
        fit_intercept: bool,
        groups: Int[np.ndarray, " n"] | None = None,
    ) -> Task:
        """Centre and scale the outputs; drop samples of weight zero."""
        if weights is not None and not (weights > 0).all():
            kept = np.flatnonzero(weights > 0)
            batch, columns, weights = batch[kept], columns[kept], weights[kept]
            groups = None if groups is None else groups[kept]
        centre = np.average(columns, axis=0, weights=weights) if fit_intercept else 0.0
        centred = columns - centre
        size = float(np.sqrt(np.average(np.square(centred).mean(axis=1), weights=weights)))
        return cls(batch, centred / (size or 1.0), weights, activation, fit_intercept, groups)

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, rows: Int[np.ndarray, " r"]) -> Task:
        """Some of the samples."""
        weights = None if self.weights is None else self.weights[rows]
        groups = None if self.groups is None else self.groups[rows]
        return replace(self, batch=self.batch[rows], columns=self.columns[rows], weights=weights, groups=groups)

    def features(self, heads: Float[np.ndarray, "m e e"]) -> Float[np.ndarray, "n p"]:
        """Features in float32: an error only steers the search, and the values are fitted afresh afterwards."""
        return pooled_features(self.batch, heads, self.activation, dtype=np.float32)


def held_out_parts(
    n: int, share: float, seed: int, groups: Int[np.ndarray, " n"] | None = None, turns: int = 1
) -> list[Bool[np.ndarray, " n"]]:
    """Disjoint masks of about ``share·n`` samples each: whole groups, or without groups runs of n/100 consecutive ones.

    ``turns`` of them, or as many as there are samples for; never all samples in one.

    Examples
    --------
    >>> [int(mask.sum()) for mask in held_out_parts(1000, 0.2, seed=0)]
    [200]
    >>> sum(held_out_parts(90, 0.2, seed=0, turns=5)).tolist() == [1] * 90
    True
    """
    rng = np.random.default_rng(seed)
    if groups is None:
        groups = np.arange(n) // max(1, n // _RUNS)
    _, member, counts = np.unique(groups, return_inverse=True, return_counts=True)
    order = rng.permutation(len(counts))
    ends = np.cumsum(counts[order])
    # groups in random order until they have the share, then the next
    part = np.minimum((ends - counts[order]) / (share * n), len(counts)).astype(int)
    masks = [np.isin(member, order[part == turn]) for turn in range(turns)]
    if masks[0].all():
        masks[0] = np.isin(member, order[:-1])
    return [mask for mask in masks if mask.any()]


@dataclass(frozen=True)
class Judgement:
    """Squared errors of a law, sample by sample, averaged over outputs."""

    loo: Float[np.ndarray, " n"] = field(repr=False)
    held_out: Float[np.ndarray, " h"] = field(repr=False)
    alpha: float


def judge(task: Task, law: HeadLaw, n_heads: int, seed: int, held_out: Task | None = None) -> Judgement:
    """Fit the values of ``n_heads`` heads of a law to ``task`` with a penalty by leave-one-out, and predict.

    O(n²p + n³) with p = n_heads · D.
    """
    heads = law.sample(n_heads, task.batch.dim, seed)
    features = task.features(heads)
    centre = features.mean(axis=0) if task.fit_intercept else np.zeros(features.shape[1], features.dtype)
    features -= centre
    options: dict[str, Any] = {"fit_intercept": task.fit_intercept, "weights": task.weights}
    gram = features @ features.T
    fit: GroupPath | RidgeSolution
    if task.groups is not None:
        # a few, from what float32 carries up, will do to compare laws
        few = (float(np.linalg.norm(gram)) or 1.0) * np.geomspace(4e-6, 1.0, 7)
        fit = leave_groups_out(gram, task.columns, task.groups, few, **options)
        residuals = fit.residuals
    else:
        fit = ridge_gram_path(gram, task.columns, dtype=np.float64, **options).solution()
        residuals = fit.loo_residuals
    ahead = np.zeros(0)
    if held_out is not None:
        values = features.T @ fit.coef.astype(features.dtype)
        predicted = (held_out.features(heads) - centre) @ values + fit.intercept
        ahead = np.square(held_out.columns - predicted).mean(axis=1)
    return Judgement(np.square(residuals).mean(axis=1), ahead, fit.alpha)


def improvement(
    before: Float[np.ndarray, " n"],
    after: Float[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"] | None,
    groups: Int[np.ndarray, " n"] | None = None,
) -> tuple[float, float]:
    """Mean of the paired differences before − after, and its standard error; members of a group are not independent."""
    w = np.ones(len(before)) if weights is None else weights
    difference = before - after
    mean = float(np.average(difference, weights=w))
    excess = w * (difference - mean)
    if groups is not None:
        excess = np.bincount(np.unique(groups, return_inverse=True)[1], weights=excess)
    return mean, float(np.sqrt(np.square(excess).sum()) / w.sum())
