"""The values of many heads by preconditioned conjugate gradients.

They serve where neither Gram matrix fits the memory (docs/howto/out_of_core.md, "Too many heads
for a matrix"). The plain version, with the same solution, is `keyhole.textbook.ridge`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import block_size, narrowed
from keyhole.attention.features import apply_values, attention_features, feature_blocks
from keyhole.attention.heads import DRAWN_BYTES, HeadDraw
from keyhole.data.sets import SampleBatch
from keyhole.ridge.calibration import PathLosses
from keyhole.ridge.iterative import Preconditioner, ResidualWarning, ridge_cg
from keyhole.ridge.problem import RidgeFit, RidgeProblem
from keyhole.solvers.layers import FiniteLayer
from keyhole.solvers.solve import (
    LayerFit,
    ValueProblem,
    beside,
    count_features,
    extras_or_none,
)
from keyhole.spec import LayerSpec

MAX_PRECONDITIONER_RANK = 2000
"""Columns of the preconditioner, if memory and the size of the problem allow."""

BLOCK_BYTES = 2**25
"""Bytes of a block of features that is made, then gone through twice: it stays in the cache."""

PRODUCTS_PER_PASS = 8
"""Operations of the preconditioner's products for each operation of one pass over the features:
products run several times as fast, and at n = 2400, M = 1500 iterations fell from 12 (at 2) to 7,
and the time by a half."""

MIN_SAMPLES_FOR_MEAN_FEATURE = 32
"""Samples at least, or a sixteenth of all, whose mean feature is taken off all features."""

ONE_IN_HELD_OUT = 10
"""One sample in so many is held out to choose a penalty."""

TOLERANCE = {"float64": 1e-8, "float32": 1e-6}
"""Relative residual asked for: what products of that precision can reach, and more than predictions
need.
"""


def solve_by_gradients(problem: ValueProblem) -> LayerFit:
    """Fit by preconditioned conjugate gradients.

    One penalty is used as it is. Among several, the one of least error on a tenth of the samples,
    held out, is used: leave-one-out would need a matrix that there is no room for, and there is no
    automatic grid for the same reason. n M (2D² + 4DN) + 4np operations an iteration; memory for
    the preconditioner, some blocks of features and a few vectors.
    """
    alphas = problem.ridge.alphas
    if alphas is None:
        raise ValueError(
            "alpha='loo' needs an n × n or a p × p matrix, and conjugate gradients make neither. "
            "Give `alpha` as a number, or as a few numbers to choose from on a tenth of the "
            "samples that is held out; a fit with fewer heads can say which: the penalty means the "
            "same at every number of heads."
        )
    # choose the penalty on held-out samples, if there is a choice
    if len(alphas) > 1 or problem.spec.classifies:
        trial = _hold_out(problem, alphas)
    else:
        trial = _nothing_held_out(problem, alphas)

    # then solve for all samples
    layer, ridge = _solve_rows(problem, None, alphas[trial.best : trial.best + 1])
    tolerance = TOLERANCE[problem.spec.dtype]
    if ridge.residual > tolerance:
        warnings.warn(
            f"conjugate gradients ended at a relative residual of {ridge.residual:.1e} after "
            f"{ridge.n_iter} iterations, {tolerance:.0e} was asked for: fitted values may be off "
            "by that share of the standard deviation of y. A larger alpha, or dtype='float64', is "
            "solved further.",
            ResidualWarning,
            stacklevel=2,
        )
    ridge = replace(
        ridge, alphas=alphas, errors=trial.errors, best=trial.best, log_losses=trial.log_losses
    )
    return LayerFit(
        layer=layer,
        ridge=ridge,
        predictions=trial.predictions,
        route="cg",
        samples=problem.samples,
    )


@dataclass(frozen=True)
class HeldOutTrial:
    """What a tenth of the samples said of some penalties; NaN where none was held out."""

    errors: Float[np.ndarray, " a"]
    log_losses: Float[np.ndarray, " a"] | None
    best: int
    predictions: Float[np.ndarray, "n t"]


def _nothing_held_out(problem: ValueProblem, alphas: Float[np.ndarray, " a"]) -> HeldOutTrial:
    """What is known of a single penalty that nobody judged: NaN everywhere."""
    unknown = np.full(len(alphas), np.nan)
    log_losses = None
    if problem.ridge.criterion == "log_loss":
        log_losses = unknown.copy()
    n_outputs = problem.samples.data.outputs.shape[1]
    return HeldOutTrial(
        errors=unknown,
        log_losses=log_losses,
        best=0,
        predictions=np.full((problem.samples.n_given, n_outputs), np.nan),
    )


def _hold_out(problem: ValueProblem, alphas: Float[np.ndarray, " a"]) -> HeldOutTrial:
    """Fit nine tenths of the samples at every penalty; the last tenth judges the penalties."""
    # one sample in ten, at random
    data = problem.samples.data
    order = data.shuffled_rows(seed=1)
    held_out = np.sort(order[::ONE_IN_HELD_OUT])
    rest = np.setdiff1d(order, held_out)
    if len(rest) == 0:
        raise ValueError(
            "holding out a tenth needs at least two samples: got 1. Give one number as `alpha`."
        )

    # one layer whose outputs are those of all penalties, one after the other
    layer, _ = _solve_rows(problem, rest, alphas)
    outputs = layer.predict(data.samples[held_out], memory_budget=problem.spec.memory_budget)
    predictions_of_alpha = np.split(outputs, len(alphas), axis=1)

    # errors, and for classes the log-losses, of the samples held out
    targets = data.outputs[held_out]
    weights = problem.ridge.weights[held_out]
    squares = [np.square(targets - predicted).mean(axis=1) for predicted in predictions_of_alpha]
    errors = np.array([weights @ square / weights.sum() for square in squares])
    log_losses = None
    if problem.ridge.criterion == "log_loss":
        losses = PathLosses(targets, weights, len(alphas))
        losses.put(slice(None), slice(None), targets - np.array(predictions_of_alpha))
        log_losses = losses.losses()
    if log_losses is None:
        best = int(np.argmin(errors))
    else:
        best = int(np.argmin(log_losses))

    # hand the predictions back to the samples as they were given
    predictions = np.full((problem.samples.n_given, targets.shape[1]), np.nan)
    predictions[problem.samples.rows[held_out]] = predictions_of_alpha[best]
    return HeldOutTrial(errors=errors, log_losses=log_losses, best=best, predictions=predictions)


def _solve_rows(
    problem: ValueProblem, rows: Int[np.ndarray, " r"] | None, alphas: Float[np.ndarray, " a"]
) -> tuple[FiniteLayer, RidgeFit]:
    """Fit some samples, or all: a layer, and the ridge fit at the first penalty.

    The outputs of the layer are those of all penalties, one after the other.
    """
    heads = problem.heads
    assert isinstance(heads, HeadDraw)
    spec = problem.spec

    # the ridge problem of these samples
    chosen: Any = rows
    if rows is None:
        chosen = slice(None)
    batch = problem.batch[chosen]
    weights = problem.ridge.weights[chosen]
    ridge_problem = RidgeProblem.of(
        problem.ridge.y[chosen], alphas, fit_intercept=problem.ridge.fit_intercept, weights=weights
    )

    # with an intercept a constant may be taken off every feature, which keeps rounding small
    centre = None
    if ridge_problem.fit_intercept:
        centre = mean_feature(batch, heads, spec)
    design = HeadDesign(
        batch=batch,
        heads=heads,
        activation=spec.activation,
        dtype=spec.dtype,
        memory_budget=spec.memory_budget,
        centre=centre,
    )

    # the smaller of the two systems, ΦᵀΦ + αI or ΦΦᵀ + αI
    primal = design.shape[1] < len(batch)
    preconditioner = design.preconditioner(weights, primal=primal)
    fits = ridge_cg(design, ridge_problem, preconditioner, primal=primal, tol=TOLERANCE[spec.dtype])
    values = np.hstack([fit.coef for fit in fits])

    # <v, φ − centre> + b = <v, φ> + (b − <v, centre>)
    intercept = np.concatenate([fit.intercept for fit in fits])
    if centre is not None:
        intercept = intercept - centre @ values[: len(centre)]
    return problem.finite_layer(values, intercept), fits[0]


def mean_feature(batch: Any, heads: HeadDraw, spec: LayerSpec) -> Float[np.ndarray, " p"]:
    """The mean feature of a few samples, as it is in the precision of the features.

    With an intercept any constant may be taken from a column of Φ. This one is nearly the true
    mean, which keeps rounding small without another pass over Φ. It depends on the order of the
    samples: nothing but rounding may depend on it.
    """
    # every step-th sample: a sixteenth of all if they are within the memory, but at least 32
    n = len(batch)
    n_features = heads.n_heads * (heads.dim + 1)
    affordable = min(n // 16, block_size(8 * n_features, spec.memory_budget // 4))
    step = max(1, n // max(MIN_SAMPLES_FOR_MEAN_FEATURE, affordable))
    features = attention_features(batch[::step], heads, spec.activation, dtype=spec.dtype)

    # a number of the features' precision, so that subtracting it there is subtracting the same
    centre = features.mean(axis=0, dtype=np.float64)
    return np.asarray(centre.astype(spec.dtype).astype(np.float64))


@dataclass(frozen=True)
class HeadDesign:
    """Φ of M heads as a design that is multiplied with, block by block of heads, and never stored.

    ``centre`` is what is taken off every row of Φ.
    """

    batch: SampleBatch
    heads: HeadDraw
    activation: str
    dtype: str
    memory_budget: int
    centre: Float[np.ndarray, " p"] | None = None

    @property
    def extras(self) -> Float[np.ndarray, "n c"]:
        """The last columns of the design, in its precision; perhaps none of them."""
        return extras_or_none(self.batch).astype(self.dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """(n, p)."""
        return len(self.batch), count_features(self.heads, self.batch)

    def column_blocks(self, heads: HeadDraw | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Columns and features of a block of heads at a time, overwritten by the next.

        ``heads`` are the first few of all heads; None means all.
        """
        # which heads, and the centre of their features
        centre = self.centre
        if heads is None:
            heads = self.heads
        elif centre is not None:
            # the centre is that of all heads; of fewer, whose features are scaled by their own
            # number, it is larger
            n_columns = heads.n_heads * (heads.dim + 1)
            centre = centre[:n_columns] * math.sqrt(self.heads.n_heads / heads.n_heads)
        width = heads.dim + 1

        # a block that stays in the cache, but at least 16 heads, so that few samples are not all
        # overhead
        bytes_per_head = len(self.batch) * width * np.dtype(self.dtype).itemsize
        bytes_per_head += DRAWN_BYTES * heads.seen_by(query=self.batch.has_query).entries
        budget = min(self.memory_budget, max(BLOCK_BYTES, 16 * bytes_per_head))
        features_of_heads = feature_blocks(
            self.batch,
            heads,
            self.activation,
            centre=centre,
            dtype=self.dtype,
            memory_budget=budget,
            reuse_buffer=True,
        )
        for part, features in features_of_heads:
            yield slice(part.start * width, part.stop * width), features

        # the extras are the last columns
        extras = self.extras
        if extras.shape[1]:
            first = heads.n_heads * width
            yield slice(first, first + extras.shape[1]), extras

    def gram_product(self, dual: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "n c"]:
        """ΦΦᵀ a in one pass: every block is made once and used twice."""
        total = np.zeros(dual.shape)
        narrow, exponents = narrowed(dual, self.dtype)
        for _, features in self.column_blocks():
            total += features @ (features.T @ narrow)
        return np.ldexp(total, exponents)

    def rmatvec(self, dual: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "p c"]:
        """Φᵀ a."""
        result = np.empty((self.shape[1], dual.shape[1]))
        narrow, exponents = narrowed(dual, self.dtype)
        for columns, features in self.column_blocks():
            result[columns] = features.T @ narrow
        return np.ldexp(result, exponents)

    def matvec(self, values: Float[np.ndarray, "p c"]) -> Float[np.ndarray, "n c"]:
        """Φ v: of the heads and of the extras, less the centre."""
        extras = self.extras
        n_of_heads = len(values) - extras.shape[1]
        outputs = apply_values(
            self.batch,
            self.heads,
            values[:n_of_heads],
            self.activation,
            dtype=self.dtype,
            memory_budget=self.memory_budget,
        )
        outputs = outputs.astype(np.float64)
        outputs += extras @ values[n_of_heads:]
        if self.centre is not None:
            outputs = outputs - self.centre @ values[:n_of_heads]
        return np.asarray(outputs)

    def preconditioner(
        self, weights: Float[np.ndarray, " n"] | None, *, primal: bool
    ) -> Preconditioner:
        """An approximation of low rank to ΦᵀΦ (primal) or ΦΦᵀ (dual), made from some samples.

        In primal form it is the features of these samples; in dual form Nyström's, from the columns
        of ΦΦᵀ that belong to them.
        """
        # as many samples as memory and the size of the problem allow
        n, p = self.shape
        if primal:
            size = p
        else:
            size = n
        affordable = self.memory_budget // (2 * size * np.dtype(self.dtype).itemsize)
        rank = min(MAX_PRECONDITIONER_RANK, max(1, min(n, p) // 3), max(1, affordable))
        if weights is None:
            roots = np.ones(n)
        else:
            roots = np.sqrt(weights)
        landmarks = np.sort(np.random.default_rng(0).choice(n, rank, replace=False))
        if primal:
            return self._primal_preconditioner(landmarks, roots)
        return self._dual_preconditioner(landmarks, roots)

    def _primal_preconditioner(
        self, landmarks: Int[np.ndarray, " r"], roots: np.ndarray
    ) -> Preconditioner:
        """ΦᵀWΦ from some rows of √W Φ, scaled up to stand for all rows."""
        n_over_rank = len(self.batch) / len(landmarks)
        features = attention_features(
            self.batch[landmarks], self.heads, self.activation, dtype=self.dtype
        )
        factor = beside(features, self.extras[landmarks])
        factor *= (roots[landmarks] * math.sqrt(n_over_rank))[:, None].astype(factor.dtype)

        # an intercept takes off what is constant
        if self.centre is not None:
            factor -= factor.mean(axis=0)
        return Preconditioner.of_factor(np.ascontiguousarray(factor.T))

    def _dual_preconditioner(
        self, landmarks: Int[np.ndarray, " r"], roots: np.ndarray
    ) -> Preconditioner:
        """√W ΦΦᵀ √W by Nyström, from some of its columns and the square where they meet."""
        columns = self._gram_columns(landmarks)
        square = columns[landmarks].astype(np.float64)
        columns *= roots[:, None].astype(columns.dtype)

        # an intercept takes off what lies in the direction of √w
        if self.centre is not None:
            columns -= np.outer(roots, roots @ columns / (roots @ roots)).astype(columns.dtype)
        return Preconditioner.of_columns(columns, (square + square.T) / 2)

    def _gram_columns(self, landmarks: Int[np.ndarray, " r"]) -> Float[np.ndarray, "n r"]:
        """ΦΦ_Sᵀ of some samples S, from as many heads as are cheap; it stands for that of all."""
        # heads whose products take PRODUCTS_PER_PASS operations for each operation of one pass
        width = self.heads.dim + 1
        entries = self.heads.seen_by(query=self.batch.has_query).entries
        keys_per_set = float(self.batch.token_counts.mean())
        pass_cost = self.heads.n_heads * (2 * entries + 4 * width * keys_per_set)
        affordable = max(64, PRODUCTS_PER_PASS * pass_cost / (2 * width * len(landmarks)))
        first_heads = HeadDraw(
            self.heads.distribution,
            int(min(self.heads.n_heads, affordable)),
            self.heads.dim,
            self.heads.seed,
            self.heads.query_dim,
        )
        columns = np.zeros((len(self.batch), len(landmarks)), self.dtype)
        for _, features in self.column_blocks(first_heads):
            columns += features @ features[landmarks].T  # (n, r)
        return columns
