"""The error of a head distribution on a training set.

What is left out, what is held out, and the gradient of the former.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole._array import blocks, run_threads, thread_count
from keyhole.attention.features import (
    FeatureTrace,
    attention_features,
    attention_pullback,
    key_stacks,
)
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.attention.hops import HopTrace
from keyhole.data.sets import DistinctSamples, SampleBatch, SetBatch, distinct_hashes, shuffled
from keyhole.ridge.gram import centred_inverse, left_out_residuals, loo_gradient, ridge_gram
from keyhole.ridge.problem import RidgeProblem, check_gram_size, numerical_floor

_HELD_OUT_RUNS = 100
"""The held-out part is made of runs of consecutive samples, a hundredth of them each: neighbours in
a table are often related (questions about one story), and a sample held out beside its sibling is
not held out."""


@dataclass(frozen=True)
class Task:
    """Training samples with the options of the layer that will be fitted to them.

    ``columns`` are outputs, centred and scaled so that their mean square is 1; ``weights`` are 1 on
    average; samples of one of the ``groups`` are left out together.
    """

    batch: SampleBatch = field(repr=False)
    columns: Float[np.ndarray, "n t"] = field(repr=False)
    weights: Float[np.ndarray, " n"] | None = field(repr=False)
    activation: str
    fit_intercept: bool
    groups: Int[np.ndarray, " n"] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        batch: SampleBatch,
        columns: Float[np.ndarray, "n t"],
        weights: Float[np.ndarray, " n"] | None,
        activation: str,
        fit_intercept: bool,
        groups: Int[np.ndarray, " n"] | None = None,
    ) -> Task:
        """Centre and scale the outputs and the weights; join duplicates, drop samples of weight 0.

        Duplicates are one sample of their joint weight. The mean weight is 1: the penalty, which is
        in proportion to weights, is the search's own.
        """
        distinct = DistinctSamples.of(batch, columns, weights, groups)
        weights = distinct.weights
        if len(distinct) < len(batch):
            batch = batch[distinct.rows]
            columns = columns[distinct.rows]
            groups = None if groups is None else groups[distinct.rows]
        if weights is not None:
            weights = weights / weights.mean()
        centre = np.average(columns, axis=0, weights=weights) if fit_intercept else 0.0
        centred = columns - centre
        size = float(np.sqrt(np.average(np.square(centred).mean(axis=1), weights=weights)))
        return cls(
            batch=batch,
            columns=centred / (size or 1.0),
            weights=weights,
            activation=activation,
            fit_intercept=fit_intercept,
            groups=groups,
        )

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, rows: Int[np.ndarray, " r"]) -> Task:
        """Some of the samples."""
        weights = None if self.weights is None else self.weights[rows]
        groups = None if self.groups is None else self.groups[rows]
        return replace(
            self, batch=self.batch[rows], columns=self.columns[rows], weights=weights, groups=groups
        )

    def rows(self, count: int, seed: int) -> Int[np.ndarray, " r"]:
        """At most ``count`` of the samples, drawn at random, in their order.

        The same ones wherever they stand.
        """
        if len(self) <= count:
            return np.arange(len(self))
        return np.sort(shuffled(self._hashes, seed)[:count])

    @cached_property
    def _hashes(self) -> np.ndarray:
        """One hash per sample: every step of a descent draws other samples by them."""
        return distinct_hashes(self.batch, self.columns, self.groups)

    def at_most(self, count: int, seed: int) -> Task:
        """Those samples."""
        return self if len(self) <= count else self.take(self.rows(count, seed))

    def with_sets(self, sets: SetBatch) -> Task:
        """The same samples with other sets."""
        return replace(self, batch=self.batch.with_sets(sets))

    @property
    def extras(self) -> Float[np.ndarray, "n c"]:
        """Columns of the samples themselves in float32, none of them perhaps."""
        extras = self.batch.extras
        return (np.zeros((len(self), 0)) if extras is None else extras).astype(np.float32)

    def features(
        self, heads: Float[np.ndarray, "m f e"], hops: Sequence[Float[np.ndarray, "p _ e"]] = ()
    ) -> Float[np.ndarray, "n c"]:
        """Features after some hops, in the precision of the heads."""
        with np.errstate(over="ignore", invalid="ignore"):
            seen, _, found = self.passed(heads, hops, traced=self.batch.has_query)
        if np.isfinite(found).all():
            return found
        return attention_features(
            self.batch.with_sets(seen.sets), heads, self.activation, dtype=heads.dtype
        )  # the error

    def passed(
        self,
        heads: Float[np.ndarray, "m f e"],
        hops: Sequence[Float[np.ndarray, "p _ e"]],
        *,
        traced: bool = True,
    ) -> tuple[HopTrace, FeatureTrace | None, Float[np.ndarray, "n c"]]:
        """Some hops, then the heads: how they went.

        With a trace of the heads where it fits and is asked for.
        """
        sets = self.batch.sets.astype(heads.dtype)
        fits = traced and FeatureTrace.fits(self.batch, len(heads))
        stacks = key_stacks(sets, len(heads), heads.dtype) if fits or hops else []
        seen = HopTrace.of(sets, hops, stacks)
        if fits:
            trace = FeatureTrace.of(seen.sets, heads, self.activation, stacks=stacks)
            return seen, trace, trace.features()
        batch = self.batch.with_sets(seen.sets)
        return seen, None, attention_features(batch, heads, self.activation, dtype=heads.dtype)


def held_out_parts(
    n: int, share: float, seed: int, groups: Int[np.ndarray, " n"] | None = None, turns: int = 1
) -> list[Bool[np.ndarray, " n"]]:
    """Disjoint masks of about ``share·n`` samples each.

    Whole groups, or without groups runs of n/100 consecutive ones.

    ``turns`` of them, or as many as there are samples for; never all samples in one.

    >>> sum(held_out_parts(90, 0.2, seed=0, turns=5)).tolist() == [1] * 90
    True
    """
    rng = np.random.default_rng(seed)
    if groups is None:
        groups = np.arange(n) // max(1, n // _HELD_OUT_RUNS)
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
    """Squared errors of a head distribution, sample by sample, averaged over outputs.

    ``spread`` is that of its features.
    """

    loo: Float[np.ndarray, " n"] = field(repr=False)
    held_out: Float[np.ndarray, " h"] = field(repr=False)
    alpha: float
    spread: float = 1.0


def judge(
    task: Task,
    distribution: HeadDistribution,
    n_heads: int,
    seed: int,
    held_out: Task | None = None,
    alpha: float | None = None,
    heads: Float[np.ndarray, "m f e"] | None = None,
) -> Judgement:
    """Fit the values of ``n_heads`` heads of a head distribution to ``task`` and predict.

    The penalty is chosen by leave-one-out unless given.

    ``heads`` are those of the head distribution under the seed, if somebody drew them already.
    O(n²p + n³) with p = n_heads · D.
    """
    hops, dim = getattr(distribution, "hops_", ()), task.batch.dim
    if heads is None:
        asked = task.batch.query_dim + dim * sum(len(hop) for hop in hops)
        heads = HeadDraw(distribution, n_heads, dim, seed, asked).block(0, n_heads)
    heads = heads.astype(
        np.float32
    )  # an error only steers the search, and the values are fitted afresh afterwards
    features = task.features(heads, hops)
    centre = (
        features.mean(axis=0) if task.fit_intercept else np.zeros(features.shape[1], features.dtype)
    )
    features -= centre
    gram = features @ features.T
    gram += task.extras @ task.extras.T
    coef, intercept, left_out, alpha = ridge_values(gram, task, alpha)
    ahead = np.zeros(0)
    if held_out is not None:
        values = features.T @ coef.astype(features.dtype)
        predicted = (held_out.features(heads, hops) - centre) @ values + intercept
        predicted = predicted + held_out.extras @ (task.extras.T @ coef)
        ahead = np.square(held_out.columns - predicted).mean(axis=1)
    return Judgement(
        np.square(left_out).mean(axis=1), ahead, alpha, float(gram.trace()) / len(gram)
    )


def ridge_values(
    gram: Float[np.ndarray, "n n"], task: Task, alpha: float | None
) -> tuple[Float[np.ndarray, "n t"], Float[np.ndarray, " t"], Float[np.ndarray, "n t"], float]:
    """Dual coefficients, intercept, left-out residuals and penalty of ridge on a Gram matrix.

    A penalty that is given is used as it is, or raised to what the rounding of the matrix carries
    if it is so small that K + α is not positive definite: it was reached by a descent, not asked
    for.
    """
    if alpha is None:
        return _chosen_ridge_values(gram, task)
    weights = np.ones(len(task)) if task.weights is None else task.weights
    check_gram_size(gram.diagonal())
    try:
        inverse = centred_inverse(gram, alpha / weights, fit_intercept=task.fit_intercept)
    except np.linalg.LinAlgError:
        alpha = max(alpha, carried_penalty(gram, weights))
        inverse = centred_inverse(gram, alpha / weights, fit_intercept=task.fit_intercept)
    dual = inverse @ task.columns
    intercept = np.zeros(dual.shape[1])
    if task.fit_intercept:
        # y − K a − α a / w is the intercept, the same for every sample
        level = task.columns - gram @ dual - alpha * dual / weights[:, None]
        intercept = np.average(level, axis=0, weights=weights)
    return dual, intercept, left_out_residuals(inverse, dual, task.groups), alpha


def carried_penalty(gram: Float[np.ndarray, "n n"], weights: Float[np.ndarray, " n"]) -> float:
    """The least α for which K + α diag(1/w) is sure to be positive definite.

    Whatever rounding did to K.
    """
    rounding = float(np.finfo(gram.dtype).eps)
    largest = float(np.linalg.norm(gram.astype(np.float64))) or 1.0  # at least λ_max
    return numerical_floor(largest, len(gram), rounding) * float(weights.max())


def _chosen_ridge_values(
    gram: Float[np.ndarray, "n n"], task: Task
) -> tuple[Float[np.ndarray, "n t"], Float[np.ndarray, " t"], Float[np.ndarray, "n t"], float]:
    """The same with a penalty chosen by leave-one-out."""
    alphas = None
    if task.groups is not None:
        # a few, from what float32 carries up, will do to compare head distributions
        alphas = (float(np.linalg.norm(gram)) or 1.0) * np.geomspace(4e-6, 1.0, 7)
    problem = RidgeProblem.of(
        task.columns,
        alphas,
        fit_intercept=task.fit_intercept,
        weights=task.weights,
        groups=task.groups,
    )
    fit = ridge_gram(gram, problem, dtype=np.float64)
    assert fit.left_out is not None
    return fit.coef, fit.intercept, fit.left_out, fit.alpha


def improvement(
    before: Float[np.ndarray, " n"],
    after: Float[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"] | None,
    groups: Int[np.ndarray, " n"] | None = None,
) -> tuple[float, float]:
    """Mean of the paired differences before − after, and its standard error.

    Members of a group are not independent.
    """
    w = np.ones(len(before)) if weights is None else weights
    difference = before - after
    mean = float(np.average(difference, weights=w))
    excess = w * (difference - mean)
    if groups is not None:
        excess = np.bincount(np.unique(groups, return_inverse=True)[1], weights=excess)
    return mean, float(np.sqrt(np.square(excess).sum()) / w.sum())


@dataclass(frozen=True)
class HeadGradient:
    """The leave-one-out error of some heads, and its gradient.

    In their head distribution and in the logarithm of the penalty.

    ``means`` is (K, D_q, D); ``scales`` (D_q + D,), in the logarithms of the scales of query and
    key, or None; ``hops`` in the matrices of the hops before the last.
    """

    error: float
    log_alpha: float
    means: Float[np.ndarray, "k f e"] = field(repr=False)
    scales: Float[np.ndarray, " g"] | None = field(repr=False)
    hops: list[Float[np.ndarray, "p _ e"]] = field(default_factory=list, repr=False)

    @classmethod
    def of_heads(
        cls,
        error: float,
        log_alpha: float,
        heads: Float[np.ndarray, "m f e"],
        noise: Float[np.ndarray, "m f e"],
        n_means: int,
        hops: list[Float[np.ndarray, "p _ e"]],
    ) -> HeadGradient:
        """From the gradient in every head, which is overwritten: those of a mean add up."""
        owner = np.arange(len(heads)) % n_means
        in_means = np.stack(
            [heads[owner == k].sum(axis=0, dtype=np.float64) for k in range(n_means)]
        )
        heads *= noise
        in_scales = np.concatenate([heads.sum(axis=(0, 2)), heads.sum(axis=(0, 1))])
        return cls(error, log_alpha, in_means, in_scales, hops)


def gradient_in_heads(
    task: Task,
    means: Float[np.ndarray, "k f e"],
    noise: Float[np.ndarray, "m f e"],
    alpha: float,
    dtype: str = "float32",
    *,
    scales: bool = False,
    hops: Sequence[Float[np.ndarray, "p _ e"]] = (),
) -> HeadGradient:
    """The leave-one-out error of heads after some hops, and its gradient.

    Heads are W_m = means[m mod K] + noise_m; the gradient is in their head distribution.

    Values are solved for, not descended on: the error is that of ridge at penalty ``alpha``, a
    function of the Gram matrix ΦΦᵀ alone. O(n²p + n³ + tokens·p) for p = M·D. Where noise_ij is a_i
    b_j times something fixed, the gradient in log a_i is Σ_mj ∂E/∂W_mij noise_mij, and that in log
    b_j the sum over m and i.
    """
    owner = np.arange(len(noise)) % len(means)
    heads = (noise + means[owner]).astype(dtype)
    seen, trace, features = task.passed(heads, hops)
    if task.fit_intercept:  # the intercept makes up for it, and float32 keeps its digits
        features -= features.mean(axis=0)
    gram = features @ features.T
    gram += (task.extras @ task.extras.T).astype(dtype)
    options: dict[str, Any] = {
        "fit_intercept": task.fit_intercept,
        "weights": task.weights,
        "groups": task.groups,
    }
    found = loo_gradient(gram, task.columns, alpha, **options)
    cotangent, slopes = np.empty_like(features), 2 * found.gram.astype(dtype)
    rows = blocks(len(features), -(-len(features) // thread_count()))
    run_threads(lambda part: np.matmul(slopes[part], features, out=cotangent[part]), rows)
    n_means = len(heads) if scales else len(means)
    queries = np.empty((len(seen.sets), heads.shape[1]), dtype) if hops else None
    if trace:
        pulled = trace.pullback(cotangent, n_means, queries)
    else:
        options = {"n_means": n_means, "queries": queries}
        pulled = attention_pullback(
            task.batch.with_sets(seen.sets), heads, cotangent, task.activation, **options
        )
    in_hops = [] if queries is None else seen.pullback(queries)
    if not scales:
        return HeadGradient(found.error, found.log_alpha, pulled.astype(np.float64), None, in_hops)
    return HeadGradient.of_heads(found.error, found.log_alpha, pulled, noise, len(means), in_hops)
