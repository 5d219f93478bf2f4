"""The layer f(x) = Σ_m <v_m, φ_m(x)> + b, fitted in closed form: features or kernel, then ridge."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, narrowed, unit_exponent
from keyhole.attention.features import apply_values, attention_features, feature_blocks
from keyhole.attention.heads import HeadDraw, HeadLaw
from keyhole.attention.kernels import attention_kernel, tensor_kernel
from keyhole.data.sets import PooledSets, SetBatch, first_occurrences
from keyhole.ridge.design import accumulate_design, ridge_statistics_path
from keyhole.ridge.gram import ridge_gram_fixed, ridge_gram_path, weighed_path
from keyhole.ridge.iterative import IterativeSolution, Preconditioner, ResidualWarning, ridge_cg
from keyhole.ridge.left_out import leave_groups_out
from keyhole.ridge.matrices import accumulate_gram, mirror_lower
from keyhole.ridge.problem import (
    EPS,
    RidgeSolution,
    Weighing,
    centre_of,
    centred,
    check_gram_size,
    check_outputs,
    check_weights,
    default_alphas,
    leave_one_out,
    mean_squares,
    numerical_floor,
    rounding_of_squares,
    select_alpha,
)

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
        scores = apply_values(
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
            kernel = attention_kernel(batch[rows], self.sets, self.law, self.activation, memory_budget=memory_budget)
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
        """The fit to outputs 2^exponent times as large; errors are 0 or infinite where float64 has no such squares."""
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
    first = first_occurrences(batch, columns)
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
    gram = attention_kernel(samples.batch, None, law, activation, memory_budget=memory_budget)
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
        whole = attention_features(samples.batch, heads, activation, dtype=dtype)

    def row_blocks() -> Iterator[np.ndarray]:
        for rows in blocks(n, size):
            if whole is not None:
                yield whole[rows]
            else:
                yield attention_features(samples.batch[rows], heads, activation, dtype=dtype)

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
        centre = attention_features(few, heads, activation, dtype=dtype).mean(axis=0, dtype=np.float64)
        centre = centre.astype(dtype).astype(np.float64)  # what is subtracted, to the last digit

    # all features in one block if they fit; blocks of half the budget are as fast, and leave the rest to the solver
    whole = n * heads.n_heads * width * np.dtype(dtype).itemsize <= 0.9 * memory_budget
    block_budget = memory_budget if whole else memory_budget // 2

    def make() -> Iterator[tuple[slice, np.ndarray]]:
        options: dict[str, Any] = {"dtype": dtype, "memory_budget": block_budget, "reuse_buffer": True}
        options["centre"] = centre if fit_intercept else None
        return feature_blocks(samples.batch, heads, activation, **options)

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


RANK = 2000
"""Columns of the preconditioner, if memory and the size of the problem allow."""

IN_CACHE = 2**25
"""Bytes of a block of features that is made, then gone through twice."""

PRODUCTS_PER_PASS = 8
"""Operations of the preconditioner's products for each operation of one pass over the features: products run several
times as fast, and at n = 2400, M = 1500 iterations fell from 12 (at 2) to 7, and the time by a half."""

HELD_OUT = 10
"""One distinct sample in so many is held out to choose a penalty."""

TOLERANCE = {"float64": 1e-8, "float32": 1e-6}
"""Relative residual asked for: what products of that precision can reach, and more than predictions need."""


def exceeds_memory(n: int, p: int, dtype: str) -> bool:
    """Whether the smaller of the n × n and p × p Gram matrices, and a factorisation, outgrow this machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf
    copies = 4 if p < n else 1.5
    return copies * min(n, p) ** 2 * np.dtype(dtype).itemsize > 0.8 * memory


@dataclass(frozen=True)
class HeadDesign:
    """The features of M heads as a design that is multiplied with, block by block of heads, and never stored."""

    batch: SetBatch | PooledSets
    heads: HeadDraw
    activation: str
    dtype: str
    memory_budget: int
    centre: Float[np.ndarray, " p"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(n, p)."""
        return len(self.batch), self.heads.n_heads * (self.heads.dim + 1)

    def column_blocks(self, heads: HeadDraw | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Columns and features of a block of heads at a time, overwritten by the next."""
        heads = self.heads if heads is None else heads
        width = heads.dim + 1
        # at least 16 heads, so that a block of few samples is not all overhead
        row = len(self.batch) * width * np.dtype(self.dtype).itemsize
        budget = min(self.memory_budget, max(IN_CACHE, 16 * (row + 40 * width**2)))
        options: dict[str, Any] = {"dtype": self.dtype, "memory_budget": budget, "reuse_buffer": True}
        # the centre is that of all heads; of fewer, scaled by their own number, it is larger
        centre = self.centre
        if centre is not None and heads is not self.heads:
            centre = centre[: heads.n_heads * width] * math.sqrt(self.heads.n_heads / heads.n_heads)
        for part, block in feature_blocks(self.batch, heads, self.activation, centre=centre, **options):
            yield slice(part.start * width, part.stop * width), block

    def gram_product(self, dual: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "n c"]:
        """ΦΦᵀ a in one pass: every block is made once and used twice."""
        total, (narrow, units) = np.zeros(dual.shape), narrowed(dual, self.dtype)
        for _, block in self.column_blocks():
            total += block @ (block.T @ narrow)
        return np.ldexp(total, units)

    def rmatvec(self, dual: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "p c"]:
        """Φᵀ a."""
        result, (narrow, units) = np.empty((self.shape[1], dual.shape[1])), narrowed(dual, self.dtype)
        for columns, block in self.column_blocks():
            result[columns] = block.T @ narrow
        return np.ldexp(result, units)

    def matvec(self, values: Float[np.ndarray, "p c"]) -> Float[np.ndarray, "n c"]:
        """Φ v."""
        options: dict[str, Any] = {"dtype": self.dtype, "memory_budget": self.memory_budget}
        outputs = apply_values(self.batch, self.heads, values, self.activation, **options).astype(np.float64)
        return outputs if self.centre is None else outputs - self.centre @ values

    def preconditioner(self, weights: Float[np.ndarray, " n"] | None, *, primal: bool) -> Preconditioner:
        """Nyström on some samples and the first heads in dual form, the features of some samples in primal form."""
        n, p = self.shape
        size = p if primal else n
        rank = min(
            RANK, max(1, min(n, p) // 3), max(1, self.memory_budget // (2 * size * np.dtype(self.dtype).itemsize))
        )
        roots = np.ones(n) if weights is None else np.sqrt(weights)
        chosen = np.sort(np.random.default_rng(0).choice(n, rank, replace=False))
        if primal:
            factor = attention_features(self.batch[chosen], self.heads, self.activation, dtype=self.dtype)
            factor *= (roots[chosen] * math.sqrt(n / rank))[:, None].astype(factor.dtype)
            if self.centre is not None:
                factor -= factor.mean(axis=0)
            return Preconditioner.of_factor(np.ascontiguousarray(factor.T))
        columns = self._gram_columns(chosen)
        square = columns[chosen].astype(np.float64)
        columns *= roots[:, None].astype(columns.dtype)
        if self.centre is not None:
            columns -= np.outer(roots, roots @ columns / (roots @ roots)).astype(columns.dtype)
        return Preconditioner.of_columns(columns, (square + square.T) / 2)

    def _gram_columns(self, chosen: Int[np.ndarray, " r"]) -> Float[np.ndarray, "n r"]:
        """ΦΦ_Sᵀ of as many of the heads as take about the time of two passes: it stands for that of all."""
        lengths = self.batch.token_counts
        width = self.heads.dim + 1
        pass_cost = self.heads.n_heads * (2 * width**2 + 4 * width * float(lengths.mean()))
        few = int(min(self.heads.n_heads, max(64, PRODUCTS_PER_PASS * pass_cost / (2 * width * len(chosen)))))
        heads = HeadDraw(self.heads.law, few, self.heads.dim, self.heads.seed)
        columns = np.zeros((len(self.batch), len(chosen)), self.dtype)
        for _, block in self.column_blocks(heads):
            columns += block @ block[chosen].T
        return columns


def fit_large_layer(
    batch: SetBatch | PooledSets,
    columns: Float[np.ndarray, "n t"],
    heads: HeadDraw,
    penalties: Float[np.ndarray, " a"] | None,
    *,
    hold_out: bool = False,
    activation: str = "relu",
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    dtype: str = "float64",
    memory_budget: int = MEMORY_BUDGET,
) -> LayerFit:
    """Fit the values of M heads by preconditioned conjugate gradients; parameters as for `fit_finite_layer`.

    One penalty is used as it is. Among several the one of least error on a tenth of the samples, held out, is used;
    leave-one-out would need a matrix that there is no room for, and there is no automatic grid for the same reason.
    With ``hold_out`` the tenth is predicted even if there is nothing to choose.

    Notes
    -----
    n M (2D² + 4DN) + 4np operations an iteration; memory for the preconditioner, some blocks of features and a few
    vectors. The certificate's ``residual`` bounds the error of the fitted values, in root mean square and as a share
    of the standard deviation of y.
    """
    if penalties is None:
        raise ValueError(
            "alpha='loo' needs an n × n or a p × p matrix, and conjugate gradients make neither. Give `alpha` as a "
            "number, or as a few numbers to choose from on a tenth of the samples that is held out; a fit with fewer "
            "heads can say which: the penalty means the same at every number of heads."
        )
    samples = distinct_samples(batch, columns, weights)
    options = {"activation": activation, "dtype": dtype, "fit_intercept": fit_intercept, "memory_budget": memory_budget}
    errors = np.full(len(penalties), np.nan)
    predictions = np.full(columns.shape, np.nan)
    best = 0
    if len(penalties) > 1 or hold_out:
        order = np.random.default_rng(1).permutation(len(samples.batch))
        held, rest = np.sort(order[::HELD_OUT]), np.setdiff1d(order, order[::HELD_OUT])
        if len(rest) == 0 or len(held) == 0:
            raise ValueError("holding out a tenth needs at least two samples: got 1. Give one number as `alpha`.")
        guesses = _held_out_predictions(samples, held, rest, heads, penalties, options)
        w = np.ones(len(held)) if samples.weights is None else samples.weights[held]
        errors = np.array([w @ np.square(samples.columns[held] - g).mean(axis=1) / w.sum() for g in guesses])
        best = int(np.argmin(errors))
        place = np.full(len(samples.batch), -1)
        place[held] = np.arange(len(held))
        seen = (samples.owner >= 0) & (place[samples.owner] >= 0)
        predictions[seen] = guesses[best][place[samples.owner[seen]]]
    alpha = float(penalties[best])
    solved, layer = _solve_by_gradients(
        samples.batch, samples.columns, samples.weights, heads, np.array([alpha]), options
    )
    if not solved.converged:
        warnings.warn(
            f"conjugate gradients ended at a relative residual of {solved.residual:.1e} after {solved.n_iter} "
            f"iterations, {TOLERANCE[dtype]:.0e} was asked for: fitted values may be off by that share of the standard "
            "deviation of y. A larger alpha, or dtype='float64', is solved further.",
            ResidualWarning,
            stacklevel=2,
        )
    certificate = Certificate(solved.residual, solved.n_iter, solved.converged)
    error = float(errors[best])
    return LayerFit(layer[0], alpha, penalties, errors, predictions, error, "cg", "holdout", certificate)


def _held_out_predictions(
    samples: Samples,
    held: np.ndarray,
    rest: np.ndarray,
    heads: HeadDraw,
    penalties: np.ndarray,
    options: dict[str, Any],
) -> list[np.ndarray]:
    """Predictions for the samples held out by the fit to the others, at every penalty: all in the same passes."""
    weights = None if samples.weights is None else samples.weights[rest]
    _, layers = _solve_by_gradients(samples.batch[rest], samples.columns[rest], weights, heads, penalties, options)
    values = np.concatenate([layer.values for layer in layers], axis=2)
    whole = FiniteLayer(
        heads, values, np.concatenate([layer.intercept for layer in layers]), options["activation"], options["dtype"]
    )
    outputs = whole.predict(samples.batch[held], memory_budget=options["memory_budget"])
    return np.split(outputs, len(penalties), axis=1)


def _solve_by_gradients(
    batch: Any,
    columns: np.ndarray,
    weights: np.ndarray | None,
    heads: HeadDraw,
    penalties: np.ndarray,
    options: dict[str, Any],
) -> tuple[IterativeSolution, list[FiniteLayer]]:
    """One layer for each penalty."""
    n, t = columns.shape
    activation, dtype, budget = options["activation"], options["dtype"], options["memory_budget"]
    centre = None
    if options["fit_intercept"]:
        few = batch[:: max(1, n // max(32, min(n // 16, block_size(8 * heads.n_heads * (heads.dim + 1), budget // 4))))]
        centre = attention_features(few, heads, activation, dtype=dtype).mean(axis=0, dtype=np.float64)
        centre = centre.astype(dtype).astype(np.float64)  # what is subtracted, to the last digit
    design = HeadDesign(batch, heads, activation, dtype, budget, centre)
    primal = design.shape[1] < n
    solved = ridge_cg(
        design,
        np.tile(columns, (1, len(penalties))),
        np.repeat(penalties, t),
        design.preconditioner(weights, primal=primal),
        primal=primal,
        fit_intercept=options["fit_intercept"],
        weights=weights,
        tol=TOLERANCE[dtype],
    )
    intercept = solved.intercept - (0.0 if centre is None else centre @ solved.coef)
    layers = []
    for i in range(len(penalties)):
        part = slice(i * t, (i + 1) * t)
        values = solved.coef[:, part].reshape(heads.n_heads, heads.dim + 1, t)
        layers.append(FiniteLayer(heads, values, intercept[part], activation, dtype))
    return solved, layers


def pick_device(device: Any, batch: SetBatch) -> str | None:
    """The device asked for, that of the batch for None, or the first GPU if there is one for "auto"."""
    if device is None:
        return batch.device
    from keyhole._tensors import check_device, gpu_or_none

    return gpu_or_none() if device == "auto" else str(check_device(device))


def plain_sets(batch: SetBatch | PooledSets) -> SetBatch:
    """Return the batch if every sample is one set, the mean over its keys; devices know no other pooling."""
    if not batch.is_plain:
        raise ValueError(
            "a device takes one set per sample and the mean over its keys: pooling='sum', query='each' and SetGroups "
            "are computed by NumPy. Leave `device` out."
        )
    return batch.sets


@dataclass(frozen=True)
class DeviceKernelLayer(KernelLayer):
    """A `KernelLayer` whose kernel is evaluated on a device, in float32 or float64."""

    device: str = "cpu"
    dtype: str = "float64"

    def predict(self, batch: SetBatch | PooledSets, *, memory_budget: int = MEMORY_BUDGET) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``, in blocks of rows of the kernel."""
        from keyhole._tensors import as_array, to_device

        batch, given = plain_sets(batch), plain_sets(self.sets)
        sets, dual = given.astype(self.dtype).to(self.device), to_device(self.dual, self.device)
        scores = np.empty((len(batch), self.dual.shape[1]))
        for rows in blocks(len(batch), block_size(16 * len(sets), memory_budget)):
            part = batch[rows].numpy().astype(self.dtype).to(self.device)
            kernel = attention_kernel(part, sets, self.law, self.activation, memory_budget=memory_budget)
            scores[rows] = as_array(kernel.to(dual.dtype) @ dual)
        return np.asarray(scores + self.intercept)


@dataclass(frozen=True)
class DeviceFiniteLayer(FiniteLayer):
    """A `FiniteLayer` whose features are computed on a device."""

    device: str = "cpu"

    def predict(self, batch: SetBatch | PooledSets, *, memory_budget: int = MEMORY_BUDGET) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``, in blocks of sets."""
        from keyhole._tensors import as_array, to_device

        batch = plain_sets(batch)
        values = to_device(self.values.reshape(-1, self.values.shape[2]), self.device)
        scores = np.empty((len(batch), values.shape[1]))
        for rows in blocks(len(batch), block_size(16 * len(values), memory_budget)):
            part = batch[rows].numpy().astype(self.dtype).to(self.device)
            scores[rows] = as_array(attention_features(part, self.heads, self.activation).to(values.dtype) @ values)
        return np.asarray(scores + self.intercept)


def fit_kernel_on_device(
    batch: SetBatch,
    columns: Float[np.ndarray, "n t"],
    law: HeadLaw,
    penalties: Float[np.ndarray, " a"] | None = None,
    *,
    device: str,
    dtype: str = "float64",
    activation: str = "relu",
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> LayerFit:
    """Fit infinitely many heads on a device: the kernel in ``dtype``, the factorisation in float64.

    Parameters as for `layer.fit_kernel_layer`. Penalties below the numerical floor, which is higher for a float32
    kernel, are left to the host. Cost: tokens²/2 pairs, 2n³/3 operations per penalty, two n × n matrices of float64 on
    the device, or one if two do not fit and there is one penalty.
    """
    samples = distinct_samples(batch.numpy(), columns, weights)
    check_enough_samples(samples, penalties)
    sets = samples.batch.astype(dtype).to(device)
    gram = tensor_kernel(sets, law, activation, "float64", memory_budget)
    rounding = float(np.finfo(dtype).eps)
    best, alphas, errors = _solve_device_gram(gram, samples, penalties, fit_intercept, rounding, memory_budget)
    layer = DeviceKernelLayer(law, samples.batch, best.coef, best.intercept, activation, device, dtype)
    return assemble(layer, Solved(best, alphas, errors), samples, batch, "kernel", memory_budget)


def fit_finite_on_device(
    batch: SetBatch,
    columns: Float[np.ndarray, "n t"],
    heads: HeadDraw,
    penalties: Float[np.ndarray, " a"] | None = None,
    *,
    device: str,
    dtype: str = "float64",
    activation: str = "relu",
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> LayerFit:
    """Fit M heads on a device through ΦΦᵀ, summed in float64; on the host if n × n matrices do not fit the device.

    Parameters as for `layer.fit_finite_layer`.
    """
    from keyhole._tensors import as_array, free_bytes, to_device, zeros

    samples = distinct_samples(batch.numpy(), columns, weights)
    check_enough_samples(samples, penalties)
    n, width = len(samples.batch), heads.dim + 1
    if 3 * 8 * n * n > free_bytes(device):
        options: dict[str, Any] = {"activation": activation, "fit_intercept": fit_intercept, "weights": weights}
        return fit_finite_layer(
            batch.numpy(), columns, heads, penalties, dtype=dtype, memory_budget=memory_budget, **options
        )
    sets = samples.batch.astype(dtype).to(device)

    def head_blocks() -> Iterator[tuple[slice, Any]]:
        for part in blocks(heads.n_heads, block_size(16 * n * width, max(memory_budget, free_bytes(device) // 8))):
            yield part, _features(sets, heads, part, activation)

    gram = zeros(n, n, device)
    for _, block in head_blocks():
        gram.addmm_(block, block.T)
    best, alphas, errors = _solve_device_gram(gram, samples, penalties, fit_intercept, EPS, memory_budget)
    dual = to_device(best.coef, device)
    values = np.empty((heads.n_heads, width, dual.shape[1]))
    for part, block in head_blocks():
        values[part] = as_array(block.T @ dual).reshape(-1, width, dual.shape[1])
    layer = DeviceFiniteLayer(heads, values, best.intercept, activation, dtype, device)
    return assemble(layer, Solved(best, alphas, errors), samples, batch, "dual", memory_budget)


def _features(sets: SetBatch, heads: HeadDraw, part: slice, activation: str) -> Any:
    """Columns of Φ under some of the heads, in float64 on the device of the sets."""
    from keyhole._tensors import astype

    block = astype(attention_features(sets, heads.block(part.start, part.stop), activation), "float64")
    return block.mul_(((part.stop - part.start) / heads.n_heads) ** 0.5)  # M^{-1/2} is that of all heads


def _solve_device_gram(
    gram: Any,
    samples: Samples,
    penalties: Float[np.ndarray, " a"] | None,
    fit_intercept: bool,
    rounding: float,
    memory_budget: int,
) -> tuple[RidgeSolution, np.ndarray, np.ndarray]:
    """Ridge on a float64 Gram matrix on a device, which is overwritten: the best fit, the penalties, their errors."""
    from keyhole._tensors import as_array, as_tensor, free_bytes
    from keyhole.ridge.device import DeviceRidge

    y = samples.columns
    check_outputs(y)
    given = check_weights(samples.weights, len(y))
    y_mean = centre_of(y, np.sqrt(given)) if fit_intercept else np.zeros(y.shape[1])
    weights = None if samples.weights is None else as_tensor(given, gram)
    tensors = as_tensor(centred(y, y_mean), gram), weights, as_tensor(y_mean, gram)
    problem = DeviceRidge.of(gram, *tensors, fit_intercept)
    single = penalties is not None and len(penalties) == 1
    largest = problem.size() if single else problem.largest()
    scale = max(largest, problem.removed)
    floor = numerical_floor(scale, len(y), rounding)
    alphas = default_alphas(largest, floor) if penalties is None else penalties
    tight = 8 * gram.shape[0] ** 2 > free_bytes(str(gram.device))
    solved: list[tuple[np.ndarray, np.ndarray]] = []
    if alphas.min() > 0 and alphas.min() >= floor:
        for alpha in alphas:
            found = problem.solve(float(alpha), overwrite=single and tight)
            if found is None:
                break
            solved.append((as_array(found[0]), as_array(found[1])))
    if len(solved) < len(alphas):
        return _solve_on_host(
            problem, given, alphas, y, rounding, memory_budget, lost=single and tight and alphas[0] >= floor
        )
    roots = np.sqrt(given)[:, None]
    loos = [leave_one_out(alpha * dual / roots, kept) for alpha, (dual, kept) in zip(alphas, solved, strict=True)]
    errors = np.array([float(mean_squares(loo, given).mean()) for loo in loos])
    resolution = rounding_of_squares(float(np.abs(y).max()), rounding)
    i = 0 if single else select_alpha(alphas, errors, resolution)
    coef, intercept = (as_array(x) for x in problem.unscale(as_tensor(solved[i][0], gram)))
    return RidgeSolution(float(alphas[i]), coef, intercept, loos[i], float(errors[i]), "cholesky"), alphas, errors


def _solve_on_host(
    problem: Any,
    weights: np.ndarray,
    alphas: np.ndarray,
    y: np.ndarray,
    rounding: float,
    memory_budget: int,
    lost: bool,
) -> tuple[RidgeSolution, np.ndarray, np.ndarray]:
    """The path by NumPy, for penalties below the numerical floor."""
    from keyhole._tensors import as_array

    if lost:
        raise np.linalg.LinAlgError(
            f"the kernel plus alpha = {alphas[0]:g} is not positive definite in float64, and the device is too small "
            "to keep a copy of it. Use a larger alpha, dtype='float64', or device=None."
        )
    normal = None if problem.normal is None else as_array(problem.normal)
    host = Weighing(
        as_array(problem.y), np.sqrt(weights), normal, as_array(problem.y_mean), as_array(problem.gram_mean),
        problem.removed, float(np.abs(y).max()),
    )  # fmt: skip
    matrix = np.asfortranarray(as_array(problem.matrix))
    path = weighed_path(
        matrix, host, alphas, rounding=rounding, dtype=np.dtype(np.float64), memory_budget=memory_budget
    )
    return path.solution(0 if len(alphas) == 1 else None), path.alphas, path.loo_mse
