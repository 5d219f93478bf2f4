"""The error of a head distribution on a training set.

Leave-one-out and held-out errors, and the gradient of the former.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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
from keyhole.data.sets import SampleBatch, SetBatch
from keyhole.ridge.gram import centred_inverse, left_out_residuals, loo_gradient, ridge_gram
from keyhole.ridge.problem import RidgeProblem, check_gram_size, numerical_floor

_HELD_OUT_RUNS = 100
"""The held-out part is made of runs of consecutive samples, a hundredth of them each: neighbours in
a table are often related (questions about one story), and a sample is not held out if a related one
is seen."""

_GROUPS_LEFT = 2
"""Every held-out part leaves at least so many groups: leave-one-out needs one to leave out and one
to fit."""


@dataclass(frozen=True)
class Outcomes:
    """What a fit is to, and how its samples count: all that ridge needs beside features.

    ``columns`` are outputs; ``weights`` are 1 each where there are none; samples of one of the
    ``groups`` are left out together; ``extras`` are sample-level features, (n, 0) if there are
    none.
    """

    columns: Float[np.ndarray, "n t"] = field(repr=False)
    weights: Float[np.ndarray, " n"] | None = field(repr=False)
    groups: Int[np.ndarray, " n"] | None = field(repr=False)
    extras: Float[np.ndarray, "n c"] = field(repr=False)
    fit_intercept: bool

    def __len__(self) -> int:
        return len(self.columns)

    def weights_or_ones(self) -> Float[np.ndarray, " n"]:
        """The weight of every sample."""
        if self.weights is None:
            return np.ones(len(self))
        return self.weights

    def problem(self, alphas: Float[np.ndarray, " a"] | None) -> RidgeProblem:
        """The ridge problem with these penalties; None for an automatic grid."""
        return RidgeProblem.of(
            self.columns,
            alphas,
            fit_intercept=self.fit_intercept,
            weights=self.weights,
            groups=self.groups,
        )


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
        """Centre and scale the outputs and the weights; drop samples of weight 0.

        The mean weight is 1: the penalty, which is in proportion to weights, is the search's own.
        """
        rows = rows_with_weight(len(batch), weights)
        if len(rows) < len(batch):
            batch = batch[rows]
            columns = columns[rows]
            if groups is not None:
                groups = groups[rows]
        if weights is not None:
            weights = weights[rows] / weights[rows].mean()

        # outputs of mean 0, which the intercept makes up for, and of mean square 1
        if fit_intercept:
            columns = columns - np.average(columns, axis=0, weights=weights)
        squares = np.square(columns).mean(axis=1)
        size = float(np.sqrt(np.average(squares, weights=weights)))
        return cls(
            batch=batch,
            columns=columns / (size or 1.0),
            weights=weights,
            activation=activation,
            fit_intercept=fit_intercept,
            groups=groups,
        )

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, rows: Int[np.ndarray, " r"]) -> Task:
        """Some of the samples."""
        return replace(
            self,
            batch=self.batch[rows],
            columns=self.columns[rows],
            weights=None if self.weights is None else self.weights[rows],
            groups=None if self.groups is None else self.groups[rows],
        )

    def outcomes(self, rows: Int[np.ndarray, " r"]) -> Outcomes:
        """What a fit to some of the samples is to."""
        return Outcomes(
            columns=self.columns[rows],
            weights=None if self.weights is None else self.weights[rows],
            groups=None if self.groups is None else self.groups[rows],
            extras=self.extras[rows],
            fit_intercept=self.fit_intercept,
        )

    def drawn(self, rows: Int[np.ndarray, " r"], count: int, seed: int) -> Int[np.ndarray, " _"]:
        """At most ``count`` of some of the samples, drawn at random, in their order."""
        if len(rows) <= count:
            return rows
        drawn = np.random.default_rng(seed).choice(rows, count, replace=False)
        return np.sort(drawn)

    def at_most(self, count: int, seed: int) -> Task:
        """At most ``count`` of the samples, drawn at random; the task itself if it has no more."""
        if len(self) <= count:
            return self
        return self.take(self.drawn(np.arange(len(self)), count, seed))

    def with_sets(self, sets: SetBatch) -> Task:
        """The same samples with other sets."""
        return replace(self, batch=self.batch.with_sets(sets))

    @property
    def extras(self) -> Float[np.ndarray, "n c"]:
        """Sample-level features in float32, (n, 0) if there are none."""
        if self.batch.extras is None:
            return np.zeros((len(self), 0), np.float32)
        return self.batch.extras.astype(np.float32)

    def features(
        self, heads: Float[np.ndarray, "m f e"], hops: Sequence[Float[np.ndarray, "p _ e"]] = ()
    ) -> Float[np.ndarray, "n c"]:
        """Features after some hops, in the precision of the heads."""
        with np.errstate(over="ignore", invalid="ignore"):
            hop_trace, _, features = self.passed(heads, hops, traced=self.batch.has_query)
        if np.isfinite(features).all():
            return features
        # overflow: computed once more, by the function that raises the error in words
        batch = self.batch.with_sets(hop_trace.sets)
        return attention_features(batch, heads, self.activation, dtype=heads.dtype)

    def passed(
        self,
        heads: Float[np.ndarray, "m f e"],
        hops: Sequence[Float[np.ndarray, "p _ e"]],
        *,
        traced: bool = True,
    ) -> tuple[HopTrace, FeatureTrace | None, Float[np.ndarray, "n c"]]:
        """Go through some hops and then the heads: both traces, and the features.

        The trace of the heads is None where it does not fit, or is not wanted.
        """
        sets = self.batch.sets.astype(heads.dtype)
        fits = traced and FeatureTrace.fits(self.batch, len(heads))
        stacks = key_stacks(sets, len(heads), heads.dtype) if fits or hops else []
        hop_trace = HopTrace.of(sets, hops, stacks)
        if fits:
            trace = FeatureTrace.of(hop_trace.sets, heads, self.activation, stacks=stacks)
            return hop_trace, trace, trace.features()
        batch = self.batch.with_sets(hop_trace.sets)
        features = attention_features(batch, heads, self.activation, dtype=heads.dtype)
        return hop_trace, None, features


def rows_with_weight(n: int, weights: Float[np.ndarray, " n"] | None) -> Int[np.ndarray, " r"]:
    """The numbers of the samples, among n, that have weight."""
    if weights is None:
        return np.arange(n)
    return np.flatnonzero(weights > 0)


def held_out_parts(
    n: int, share: float, seed: int, groups: Int[np.ndarray, " n"] | None = None, turns: int = 1
) -> list[Bool[np.ndarray, " n"]]:
    """Disjoint masks of about ``share·n`` samples each: whole groups, or runs of n/100 samples.

    At most ``turns`` masks: fewer if there are not enough groups, and none if there are two, since
    every mask leaves at least two groups to fit to. Beside one large group some small ones may be
    in no mask.

    >>> sum(held_out_parts(90, 0.2, seed=0, turns=5)).tolist() == [1] * 90
    True
    """
    if groups is None:
        groups = np.arange(n) // max(1, n // _HELD_OUT_RUNS)
    _, member, counts = np.unique(groups, return_inverse=True, return_counts=True)

    # groups in random order go into the first mask until it has its share, then into the next
    order = np.random.default_rng(seed).permutation(len(counts))
    samples_before = np.cumsum(counts[order]) - counts[order]
    turn_of_group = np.minimum(samples_before / (share * n), len(counts)).astype(int)
    most_groups = max(0, len(counts) - _GROUPS_LEFT)
    masks = [np.isin(member, order[turn_of_group == turn][:most_groups]) for turn in range(turns)]
    return [mask for mask in masks if mask.any()]


@dataclass(frozen=True)
class Judgement:
    """Squared errors of a head distribution, sample by sample, averaged over outputs.

    ``alpha`` is the penalty of the fit; ``spread`` the mean squared length of its features.
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

    The penalty is chosen by leave-one-out unless given. ``heads`` are those of the head
    distribution under the seed, if they are drawn already. O(n²p + n³) with p = n_heads · D.
    """
    # heads in float32: an error only steers the search, values are fitted afresh afterwards
    hops = hops_of(distribution)
    if heads is None:
        heads = drawn_heads(task.batch, distribution, n_heads, seed)
    heads = heads.astype(np.float32)

    # centred features and their Gram matrix
    features = task.features(heads, hops)
    if task.fit_intercept:
        centre = features.mean(axis=0)
    else:
        centre = np.zeros(features.shape[1], features.dtype)
    features -= centre
    gram = features @ features.T
    gram += task.extras @ task.extras.T
    outcomes = task.outcomes(np.arange(len(task)))
    dual, intercept, left_out, alpha = ridge_values(gram, outcomes, alpha)

    # errors of the held-out samples
    held_out_errors = np.zeros(0)
    if held_out is not None:
        values = features.T @ dual.astype(features.dtype)
        predicted = (held_out.features(heads, hops) - centre) @ values + intercept
        predicted = predicted + held_out.extras @ (task.extras.T @ dual)
        held_out_errors = np.square(held_out.columns - predicted).mean(axis=1)
    return Judgement(
        loo=np.square(left_out).mean(axis=1),
        held_out=held_out_errors,
        alpha=alpha,
        spread=float(gram.trace()) / len(gram),
    )


def hops_of(distribution: HeadDistribution) -> Sequence[Float[np.ndarray, "p _ e"]]:
    """The matrices of the hops before the last; none of a distribution of one hop."""
    return tuple(getattr(distribution, "hops_", ()))


def drawn_heads(
    batch: SampleBatch, distribution: HeadDistribution, n_heads: int, seed: int
) -> Float[np.ndarray, "m f e"]:
    """Heads of a head distribution for some samples: their last rows where there is no query."""
    n_found = sum(len(hop) for hop in hops_of(distribution))
    query_dim = batch.query_dim + batch.dim * n_found
    draw = HeadDraw(distribution, n_heads, batch.dim, seed, query_dim)
    return draw.seen_by(query=batch.has_query).block(0, n_heads)


def ridge_values(
    gram: Float[np.ndarray, "n n"], outcomes: Outcomes, alpha: float | None
) -> tuple[Float[np.ndarray, "n t"], Float[np.ndarray, " t"], Float[np.ndarray, "n t"], float]:
    """Dual coefficients, intercept, leave-one-out residuals and penalty of ridge on a Gram matrix.

    A penalty that is given is used as it is, or raised to what the rounding of the matrix carries
    if it is so small that K + α is not positive definite: a descent reached it, no user set it.
    """
    if alpha is None:
        return _chosen_ridge_values(gram, outcomes)
    weights = outcomes.weights_or_ones()
    columns = outcomes.columns
    fit_intercept = outcomes.fit_intercept
    check_gram_size(gram.diagonal())

    # the inverse of K + α diag(1/w), less its part along the intercept
    try:
        inverse = centred_inverse(gram, alpha / weights, fit_intercept=fit_intercept)
    except np.linalg.LinAlgError:
        alpha = max(alpha, carried_penalty(gram, weights))
        inverse = centred_inverse(gram, alpha / weights, fit_intercept=fit_intercept)

    dual = inverse @ columns
    intercept = np.zeros(dual.shape[1])
    if fit_intercept:
        # y − K a − α a / w is the intercept, the same for every sample
        level = columns - gram @ dual - alpha * dual / weights[:, None]
        intercept = np.average(level, axis=0, weights=weights)
    return dual, intercept, left_out_residuals(inverse, dual, outcomes.groups), alpha


def carried_penalty(gram: Float[np.ndarray, "n n"], weights: Float[np.ndarray, " n"]) -> float:
    """The least α for which K + α diag(1/w) is positive definite in spite of rounding in K."""
    rounding = float(np.finfo(gram.dtype).eps)
    largest = float(np.linalg.norm(gram.astype(np.float64))) or 1.0  # at least λ_max
    return numerical_floor(largest, len(gram), rounding) * float(weights.max())


def _chosen_ridge_values(
    gram: Float[np.ndarray, "n n"], outcomes: Outcomes
) -> tuple[Float[np.ndarray, "n t"], Float[np.ndarray, " t"], Float[np.ndarray, "n t"], float]:
    """The same with a penalty chosen by leave-one-out."""
    alphas = None
    if outcomes.groups is not None:
        alphas = penalties_to_compare(float(np.linalg.norm(gram)))
    fit = ridge_gram(gram, outcomes.problem(alphas), dtype=np.float64)
    assert fit.left_out is not None
    return fit.coef, fit.intercept, fit.left_out, fit.alpha


def penalties_to_compare(gram_norm: float) -> Float[np.ndarray, " a"]:
    """A few penalties, from what float32 carries up: they will do to compare head distributions.

    Where whole groups are left out, every one is expensive.
    """
    return (gram_norm or 1.0) * np.geomspace(4e-6, 1.0, 7)


def improvement(
    before: Float[np.ndarray, " n"],
    after: Float[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"] | None,
    groups: Int[np.ndarray, " n"] | None = None,
) -> tuple[float, float]:
    """Mean of the paired differences before − after, and its standard error."""
    if weights is None:
        weights = np.ones(len(before))
    difference = before - after
    mean = float(np.average(difference, weights=weights))
    excess = weights * (difference - mean)
    if groups is not None:
        # samples of one group are not independent: their sum counts as one
        _, member = np.unique(groups, return_inverse=True)
        excess = np.bincount(member, weights=excess)
    return mean, float(np.sqrt(np.square(excess).sum()) / weights.sum())


@dataclass(frozen=True)
class HeadGradient:
    """The leave-one-out error of some heads, and its gradient.

    The gradient is in their head distribution and in the logarithm of the penalty.

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
        """From the gradient in every head, ``heads``, which is overwritten.

        Those of a mean add up.
        """
        owner = np.arange(len(heads)) % n_means
        in_means = np.stack(
            [heads[owner == k].sum(axis=0, dtype=np.float64) for k in range(n_means)]
        )
        heads *= noise
        in_scales = np.concatenate([heads.sum(axis=(0, 2)), heads.sum(axis=(0, 1))])
        return cls(error=error, log_alpha=log_alpha, means=in_means, scales=in_scales, hops=hops)


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
    # features of all heads, after the hops
    owner = np.arange(len(noise)) % len(means)
    heads = (noise + means[owner]).astype(dtype)
    hop_trace, trace, features = task.passed(heads, hops)
    if task.fit_intercept:  # the intercept makes up for it, and float32 keeps its digits
        features -= features.mean(axis=0)

    # the error as a function of the Gram matrix K = ΦΦᵀ, and ∂E/∂K
    gram = features @ features.T
    gram += (task.extras @ task.extras.T).astype(dtype)
    loo = loo_gradient(
        gram,
        task.columns,
        alpha,
        fit_intercept=task.fit_intercept,
        weights=task.weights,
        groups=task.groups,
    )

    # ∂E/∂Φ = 2 ∂E/∂K Φ, a block of rows in each thread
    slopes = 2 * loo.gram.astype(dtype)
    in_features = np.empty_like(features)
    rows_per_thread = -(-len(features) // thread_count())

    def multiply(rows: slice) -> None:
        np.matmul(slopes[rows], features, out=in_features[rows])

    run_threads(multiply, blocks(len(features), rows_per_thread))

    # back through the heads: to every head if scales are learned, else summed for each mean; and to
    # the queries of the last hop if there are others before it
    n_matrices = len(heads) if scales else len(means)
    in_queries = np.empty((len(hop_trace.sets), heads.shape[1]), dtype) if hops else None
    if trace is not None:
        in_matrices = trace.pullback(in_features, n_matrices, in_queries)
    else:
        in_matrices = attention_pullback(
            task.batch.with_sets(hop_trace.sets),
            heads,
            in_features,
            task.activation,
            n_means=n_matrices,
            queries=in_queries,
        )

    # back through the hops
    in_hops = [] if in_queries is None else hop_trace.pullback(in_queries)
    if scales:
        return HeadGradient.of_heads(
            error=loo.error,
            log_alpha=loo.log_alpha,
            heads=in_matrices,
            noise=noise,
            n_means=len(means),
            hops=in_hops,
        )
    return HeadGradient(
        error=loo.error,
        log_alpha=loo.log_alpha,
        means=in_matrices.astype(np.float64),
        scales=None,
        hops=in_hops,
    )
