"""A layer too large for the matrices of a direct solve: conjugate gradients over heads that are made anew each time."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, narrowed
from keyhole.features import pooled_feature_blocks, pooled_features, pooled_values
from keyhole.groups import PooledSets
from keyhole.heads import HeadDraw
from keyhole.layer import Certificate, FiniteLayer, LayerFit, Samples, distinct_samples
from keyhole.sets import SetBatch
from keyhole.solvers.iterative import IterativeSolution, Preconditioner, ResidualWarning, ridge_cg

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
        for part, block in pooled_feature_blocks(self.batch, heads, self.activation, centre=centre, **options):
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
        outputs = pooled_values(self.batch, self.heads, values, self.activation, **options).astype(np.float64)
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
            factor = pooled_features(self.batch[chosen], self.heads, self.activation, dtype=self.dtype)
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
        lengths = self.batch.weights_of_sets if isinstance(self.batch, PooledSets) else self.batch.lengths
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
    solved, layer = _solve(samples.batch, samples.columns, samples.weights, heads, np.array([alpha]), options)
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
    _, layers = _solve(samples.batch[rest], samples.columns[rest], weights, heads, penalties, options)
    values = np.concatenate([layer.values for layer in layers], axis=2)
    whole = FiniteLayer(
        heads, values, np.concatenate([layer.intercept for layer in layers]), options["activation"], options["dtype"]
    )
    outputs = whole.predict(samples.batch[held], memory_budget=options["memory_budget"])
    return np.split(outputs, len(penalties), axis=1)


def _solve(
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
        centre = pooled_features(few, heads, activation, dtype=dtype).mean(axis=0, dtype=np.float64)
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
