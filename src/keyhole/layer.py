"""The layer f(x) = Σ_m <v_m, φ_m(x)> + b, fitted in closed form: features or kernel, then ridge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, narrowed, unit_exponent
from keyhole._duplicates import first_occurrences
from keyhole.features import pooled_feature_blocks, pooled_features, pooled_values
from keyhole.groups import PooledSets
from keyhole.heads import HeadDraw, HeadLaw
from keyhole.pooled_kernels import pooled_kernel
from keyhole.sets import SetBatch
from keyhole.solvers import (
    RidgeSolution,
    accumulate_design,
    accumulate_gram,
    mirror_lower,
    ridge_gram_fixed,
    ridge_gram_path,
    ridge_statistics_path,
)
from keyhole.solvers.left_out import leave_groups_out
from keyhole.solvers.weighted_gram import check_gram_size

FEW = 32
"""Samples at least, or a sixteenth of all, whose mean feature stands for that of all while rounding is at stake."""


@dataclass(frozen=True)
class FiniteLayer:
    """A layer of M heads, regenerated from their seed as needed.

    Attributes
    ----------
    heads : HeadDraw
    values : array (M, D, t)
        v, in the scaling where φ carries M^{-1/2}.
    intercept : array (t,)
    activation, dtype : str
    """

    heads: HeadDraw
    values: Float[np.ndarray, "m e t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    activation: str
    dtype: str

    def predict(self, batch: SetBatch | PooledSets, *, memory_budget: int = MEMORY_BUDGET) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``. O(tokens · M · D) and no temporary beyond the budget."""
        # values have the units of y, which may be beyond the range of float32
        units = unit_exponent(self.values, axis=(0, 1))
        scores = pooled_values(
            batch,
            self.heads,
            np.ldexp(self.values, -units),
            self.activation,
            dtype=self.dtype,
            memory_budget=memory_budget,
        )
        return np.asarray(np.ldexp(scores.astype(np.float64), units) + self.intercept)

    def in_units(self, exponent: int) -> FiniteLayer:
        """The layer of outputs 2^exponent times as large."""
        return replace(self, values=np.ldexp(self.values, exponent), intercept=np.ldexp(self.intercept, exponent))


@dataclass(frozen=True)
class KernelLayer:
    """A layer of infinitely many heads: f(x) = Σ_i dual_i K(x, x_i) + b.

    Attributes
    ----------
    law : HeadLaw
    sets : SetBatch or PooledSets
        The n training samples.
    dual : array (n, t)
    intercept : array (t,)
    activation : str
    """

    law: HeadLaw
    sets: SetBatch | PooledSets
    dual: Float[np.ndarray, "n t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    activation: str

    def predict(self, batch: SetBatch | PooledSets, *, memory_budget: int = MEMORY_BUDGET) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``, in blocks of rows of the kernel."""
        scores = np.empty((len(batch), self.dual.shape[1]))
        for rows in blocks(len(batch), block_size(8 * len(self.sets), memory_budget)):
            kernel = pooled_kernel(batch[rows], self.sets, self.law, self.activation, memory_budget=memory_budget)
            scores[rows] = kernel @ self.dual
        return np.asarray(scores + self.intercept)

    def in_units(self, exponent: int) -> KernelLayer:
        """The layer of outputs 2^exponent times as large."""
        return replace(self, dual=np.ldexp(self.dual, exponent), intercept=np.ldexp(self.intercept, exponent))


@dataclass(frozen=True)
class Certificate:
    """What an iterative solve reached: its relative residual, in how many iterations, and whether that was the aim."""

    residual: float
    n_iter: int
    converged: bool


@dataclass(frozen=True)
class LayerFit:
    """A fitted layer and what leave-one-out says of it.

    Attributes
    ----------
    layer : FiniteLayer or KernelLayer
    alpha : float
        The penalty used.
    alphas, loo_errors : arrays (a,)
        The penalties tried and the leave-one-out mean squared error of each.
    loo_predictions : array (n, t)
        For each sample given, the prediction of the fit without it and its copies.
    loo_error : float
        Their weighted mean squared error. NaN for a single sample, which leaves nothing to fit.
    route : str
        "primal", "dual", "kernel" or "cg".
    selection : str
        "loo", or "holdout" if the errors and predictions above are those of samples held out (NaN for the others).
    certificate : Certificate or None
        Of an iterative solve.
    """

    layer: FiniteLayer | KernelLayer
    alpha: float
    alphas: Float[np.ndarray, " a"]
    loo_errors: Float[np.ndarray, " a"]
    loo_predictions: Float[np.ndarray, "n t"] = field(repr=False)
    loo_error: float
    route: str
    selection: str = "loo"
    certificate: Certificate | None = None

    def in_units(self, exponent: int) -> LayerFit:
        """The fit to outputs 2^exponent times as large: its errors are 0 or infinite where float64 has no such squares."""
        with np.errstate(over="ignore", under="ignore"):
            return replace(
                self,
                layer=self.layer.in_units(exponent),
                loo_errors=np.ldexp(self.loo_errors, 2 * exponent),
                loo_predictions=np.ldexp(self.loo_predictions, exponent),
                loo_error=float(np.ldexp(self.loo_error, 2 * exponent)),
            )


@dataclass(frozen=True)
class Samples:
    """Distinct samples of positive weight, and which of them each sample given is.

    Where there are groups, also the samples of weight 0 that have a sibling of positive weight: they are predicted by
    the fit without their group.

    Attributes
    ----------
    batch : SetBatch or PooledSets
        Of the kind that was given.
    columns : array (n', t)
    weights : array (n',) or None
        Joint weight of all copies; None if every one is 1.
    owner : array (n,)
        Position of each sample given among these; −1 for one of weight 0 that no copy or sibling brings in.
    groups : array (n',) or None
        Samples of one number are left out together.
    """

    batch: Any
    columns: Float[np.ndarray, "k t"]
    weights: Float[np.ndarray, " k"] | None
    owner: Int[np.ndarray, " n"]
    groups: Int[np.ndarray, " k"] | None = None

    @property
    def weighed(self) -> Int[np.ndarray, " w"]:
        """Positions of the samples of positive weight."""
        return np.arange(len(self.batch)) if self.weights is None else np.flatnonzero(self.weights)


def grouped_samples(
    batch: SetBatch | PooledSets,
    columns: Float[np.ndarray, "n t"],
    weights: Float[np.ndarray, " n"] | None,
    groups: Int[np.ndarray, " n"] | None,
) -> Samples:
    """Distinct samples; where there are groups, all of every group that has weight: copies may belong to several."""
    if groups is None:
        return distinct_samples(batch, columns, weights)
    if weights is None:
        return Samples(batch, columns, None, np.arange(len(batch)), groups)
    kept = np.flatnonzero(np.isin(groups, groups[weights > 0]))
    owner = np.full(len(batch), -1)
    owner[kept] = np.arange(len(kept))
    known = np.where(weights[kept, None] > 0, columns[kept], 0.0)
    return Samples(batch[kept], known, weights[kept], owner, groups[kept])


def distinct_samples(
    batch: SetBatch | PooledSets, columns: Float[np.ndarray, "n t"], weights: Float[np.ndarray, " n"] | None
) -> Samples:
    """Join exact copies, so that repeating a sample is the same as weighting it, and drop what has no weight then."""
    given = np.ones(len(batch)) if weights is None else weights
    first = first_occurrences(batch.pairs() if isinstance(batch, PooledSets) else batch, columns)
    joint = np.bincount(first, weights=given, minlength=len(batch))
    rows = np.flatnonzero(joint > 0)
    place = np.full(len(batch), -1)
    place[rows] = np.arange(len(rows))
    joint = joint[rows]
    shared = None if (joint == 1.0).all() else joint
    if len(rows) == len(batch):
        return Samples(batch, columns, shared, place)
    return Samples(batch[rows], columns[rows], shared, place[first])


def check_enough_samples(samples: Samples, penalties: Float[np.ndarray, " a"] | None) -> None:
    """Raise if a penalty is to be chosen by leave-one-out and there is only one sample."""
    if len(samples.weighed) < 2 and (penalties is None or len(penalties) > 1):
        raise ValueError(
            "leave-one-out needs at least two samples: got 1 sample (copies and samples of weight 0 do not "
            "count). Give more samples, or one fixed number as `alpha`."
        )


def fit_finite_layer(
    batch: SetBatch | PooledSets,
    columns: Float[np.ndarray, "n t"],
    heads: HeadDraw,
    penalties: Float[np.ndarray, " a"] | None = None,
    *,
    activation: str = "relu",
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    groups: Int[np.ndarray, " n"] | None = None,
    dtype: str = "float64",
    memory_budget: int = MEMORY_BUDGET,
) -> LayerFit:
    """Fit the values of M heads by ridge; primal if M·D is less than the number of distinct samples, else dual.

    Parameters
    ----------
    batch : SetBatch or PooledSets
        n samples.
    columns : array (n, t)
        Outputs.
    heads : HeadDraw
    penalties : array (a,), optional
        Chosen from by leave-one-out; an automatic grid if None; one alone is used as it is.
    activation : str
    fit_intercept : bool
    weights : array (n,), optional
        Not negative.
    groups : array (n,), optional
        Samples of one number are left out together; the fit is dual then, with an eigendecomposition.
    dtype : "float64" or "float32"
        Precision of features and Gram matrix.
    memory_budget : int
        Bound in bytes on any temporary but the Gram matrix, n × n or p × p with p = M·D.

    Notes
    -----
    Primal O(np² + p³), dual O(n²p + n³); the features are made once if they fit the budget, otherwise block by
    block, three times in primal and twice in dual form.
    """
    samples = grouped_samples(batch, columns, weights, groups)
    check_enough_samples(samples, penalties)
    n_columns = heads.n_heads * (heads.dim + 1)
    primal = groups is None and n_columns < len(samples.batch)
    fit_values = _fit_primal if primal else _fit_dual
    solved, values, intercept = fit_values(samples, heads, penalties, activation, fit_intercept, dtype, memory_budget)
    values = values.reshape(heads.n_heads, heads.dim + 1, -1)
    layer = FiniteLayer(heads, values, intercept, activation, dtype)
    return assemble(layer, solved, samples, batch, "primal" if primal else "dual", memory_budget)


def fit_kernel_layer(
    batch: SetBatch | PooledSets,
    columns: Float[np.ndarray, "n t"],
    law: HeadLaw,
    penalties: Float[np.ndarray, " a"] | None = None,
    *,
    activation: str = "relu",
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    groups: Int[np.ndarray, " n"] | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> LayerFit:
    """Fit infinitely many heads: ridge on their exact kernel. Parameters as for `fit_finite_layer`. O(tokens² + n³)."""
    samples = grouped_samples(batch, columns, weights, groups)
    check_enough_samples(samples, penalties)
    gram = pooled_kernel(samples.batch, None, law, activation, memory_budget=memory_budget)
    check_gram_size(gram.diagonal())
    solved = _solve_gram(gram, samples, penalties, fit_intercept, None, memory_budget)
    kept = samples.weighed
    sets = samples.batch if len(kept) == len(samples.batch) else samples.batch[kept]
    layer = KernelLayer(law, sets, solved.best.coef[kept], solved.best.intercept, activation)
    return assemble(layer, solved, samples, batch, "kernel", memory_budget)


@dataclass(frozen=True)
class Solved:
    """The solution used, and the errors of all penalties tried."""

    best: RidgeSolution
    alphas: Float[np.ndarray, " a"]
    loo_errors: Float[np.ndarray, " a"]


def _fit_primal(
    samples: Samples,
    heads: HeadDraw,
    penalties: np.ndarray | None,
    activation: str,
    fit_intercept: bool,
    dtype: str,
    memory_budget: int,
) -> tuple[Solved, np.ndarray, np.ndarray]:
    """Sum ΦᵀΦ over rows, then pass over the rows again for leave-one-out."""
    n = len(samples.batch)
    row_bytes = heads.n_heads * (heads.dim + 1) * np.dtype(dtype).itemsize
    # the solver makes a few temporaries of the size of a block
    size = block_size(6 * row_bytes, memory_budget)
    whole = None
    if n * row_bytes <= memory_budget:
        whole = pooled_features(samples.batch, heads, activation, dtype=dtype)

    def row_blocks() -> Iterator[np.ndarray]:
        for rows in blocks(n, size):
            if whole is not None:
                yield whole[rows]
            else:
                yield pooled_features(samples.batch[rows], heads, activation, dtype=dtype)

    statistics = accumulate_design(row_blocks, samples.columns, fit_intercept=fit_intercept, weights=samples.weights)
    path = ridge_statistics_path(statistics, row_blocks, penalties, overwrite_gram=True)
    best = path.solution(0 if len(path.alphas) == 1 else None)  # one alone needs no judgement
    return Solved(best, path.alphas, path.loo_mse), best.coef, best.intercept


def _fit_dual(
    samples: Samples,
    heads: HeadDraw,
    penalties: np.ndarray | None,
    activation: str,
    fit_intercept: bool,
    dtype: str,
    memory_budget: int,
) -> tuple[Solved, np.ndarray, np.ndarray]:
    """Sum ΦΦᵀ over blocks of heads, solve, then v = Φᵀa over the blocks again.

    With an intercept any constant may be taken from a column of Φ. Its mean over a few samples is nearly the true one,
    and keeps the rounding of the products in proportion to what varies (see `accumulate_gram`) without a pass over Φ.
    """
    n, width = len(samples.batch), heads.dim + 1
    heads = heads.stored(memory_budget // 4)
    centre = np.zeros(heads.n_heads * width)
    if fit_intercept:
        few = samples.batch[:: max(1, n // max(FEW, n // 16))]
        centre = pooled_features(few, heads, activation, dtype=dtype).mean(axis=0, dtype=np.float64)
        centre = centre.astype(dtype).astype(np.float64)  # what is subtracted, to the last digit

    # all features in one block if they fit; blocks of half the budget are as fast, and leave the rest to the solver
    whole = n * heads.n_heads * width * np.dtype(dtype).itemsize <= 0.9 * memory_budget
    block_budget = memory_budget if whole else memory_budget // 2

    def make() -> Iterator[tuple[slice, np.ndarray]]:
        options: dict[str, Any] = {"dtype": dtype, "memory_budget": block_budget, "reuse_buffer": True}
        options["centre"] = centre if fit_intercept else None
        return pooled_feature_blocks(samples.batch, heads, activation, **options)

    kept: list[tuple[slice, np.ndarray]] = []

    def first_pass() -> Iterator[np.ndarray]:
        for part, block in make():
            if part == slice(0, heads.n_heads):
                kept.append((part, block))
            yield block

    total = accumulate_gram(first_pass(), n, dtype, memory_budget=memory_budget)
    check_gram_size(total.gram.diagonal())
    solved = _solve_gram(total.gram, samples, penalties, fit_intercept, total.rounding, memory_budget)
    dual = solved.best.coef
    values = np.empty((heads.n_heads * width, dual.shape[1]))
    narrow, units = narrowed(dual, dtype)
    for part, block in kept or make():
        values[part.start * width : part.stop * width] = block.T @ narrow
    values = np.ldexp(values, units)
    return solved, values, solved.best.intercept - centre @ values


def _solve_gram(
    gram: np.ndarray,
    samples: Samples,
    penalties: np.ndarray | None,
    fit_intercept: bool,
    rounding: float | None,
    memory_budget: int,
) -> Solved:
    """Ridge on a Gram matrix, which is overwritten: one Cholesky for one penalty, a path for several or for groups."""
    if samples.groups is not None:
        mirror_lower(gram)
        found = leave_groups_out(
            gram,
            samples.columns,
            samples.groups,
            penalties,
            fit_intercept=fit_intercept,
            weights=samples.weights,
            rounding=rounding,
        )
        best = RidgeSolution(found.alpha, found.coef, found.intercept, found.residuals, found.error, "eigen")
        return Solved(best, found.alphas, found.errors)
    options: dict[str, Any] = {
        "fit_intercept": fit_intercept,
        "weights": samples.weights,
        "rounding": rounding,
        "overwrite_gram": True,
        "memory_budget": memory_budget,
    }
    if penalties is not None and len(penalties) == 1:
        best = ridge_gram_fixed(gram, samples.columns, float(penalties[0]), **options)
        return Solved(best, penalties, np.array([best.loo_mse]))
    path = ridge_gram_path(gram, samples.columns, penalties, **options)
    return Solved(path.solution(), path.alphas, path.loo_mse)


def assemble(
    layer: FiniteLayer | KernelLayer,
    solved: Solved,
    samples: Samples,
    batch: SetBatch | PooledSets,
    route: str,
    memory_budget: int,
) -> LayerFit:
    """Hand leave-one-out back to the samples as they were given."""
    best = solved.best
    alone = len(samples.weighed) == 1
    left_out = samples.columns - best.loo_residuals
    predictions = np.full((len(batch), left_out.shape[1]), np.nan)
    known = samples.owner >= 0
    if not alone:
        predictions[known] = left_out[samples.owner[known]]
    if not known.all():  # a sample of weight 0, without copies and siblings, is left out already
        predictions[~known] = layer.predict(batch[~known], memory_budget=memory_budget)
    error = float("nan") if alone else best.loo_mse
    return LayerFit(layer, best.alpha, solved.alphas, solved.loo_errors, predictions, error, route)
