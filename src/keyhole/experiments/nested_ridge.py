"""Ridge on nested samples and nested heads: one Gram matrix for all of them, one factorisation for all targets.

Whatever is asked for beside a cell, its numbers are the same to the last bit: heads are summed in blocks of fixed
bounds, each target and each size goes through calls of its own shape, and BLAS runs on one thread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from scipy.linalg import get_lapack_funcs

from keyhole.features import attention_features, mlp_features
from keyhole.heads import GaussianHeads, sample_mlp_weights
from keyhole.kernels import attention_kernel, mlp_kernel
from keyhole.sets import SetBatch
from keyhole.solvers.grams import add_outer
from keyhole.solvers.penalties import default_alphas, numerical_floor, select_alpha
from keyhole.solvers.ridge import leave_one_out, mean_squares, rounding_of_squares
from keyhole.solvers.tridiagonal import Sweep, Tridiagonal, tridiagonalise
from keyhole.solvers.weighted_gram import Weighing, centre_of, centred, weigh_gram

HEAD_BLOCK = 64
"""Heads added to the Gram matrix at a time. A fixed number, so that the sum of the first M heads is one sequence of
operations whatever M comes after; a square, so that the scale M^{-1/2} of a block is taken off without rounding."""

LAWS = {"attention": GaussianHeads(), "biased": GaussianHeads(mean=1.0)}


def nested_grams(
    model: str, train: SetBatch, test: SetBatch, heads: Sequence[int | None], seed: int
) -> Iterator[tuple[int | None, Float[np.ndarray, "n n"], Float[np.ndarray, "test n"]]]:
    """Yield M, the Gram matrix of the training sets and the kernel of test against training sets, for each M wanted.

    ``heads`` has None for the exact kernel; the first M of a draw are the draw of M. Of the Gram matrix only the lower
    triangle in Fortran order is meant to be read. Cost: the n²MD operations of the largest M, and those of the last
    M mod 64 heads of each other.
    """
    if None in heads:
        yield None, *exact_kernels(model, train, test)
    finite = sorted({m for m in heads if m is not None})
    n = len(train) if finite else 0
    gram, cross, done = np.zeros((n, n), order="F"), np.zeros((len(test), n)), 0
    for m in finite:
        while done + HEAD_BLOCK <= m:
            _add_heads(model, gram, cross, train, test, seed, done, done + HEAD_BLOCK)
            done += HEAD_BLOCK
        if m == finite[-1]:
            full, of_test = gram, cross
        else:
            full, of_test = gram.copy(order="F"), cross.copy()
        if done < m:
            _add_heads(model, full, of_test, train, test, seed, done, m)
        full *= 1.0 / m
        of_test *= 1.0 / m
        yield m, full, of_test


def exact_kernels(model: str, train: SetBatch, test: SetBatch) -> tuple[np.ndarray, np.ndarray]:
    """The kernel of infinitely many heads among training sets, in Fortran order, and of test against training sets."""
    if model == "mlp":
        return mlp_kernel(train).T, mlp_kernel(test, train)
    law = LAWS[model]
    return attention_kernel(train, law=law).T, attention_kernel(test, train, law=law)


def _add_heads(
    model: str, gram: np.ndarray, cross: np.ndarray, train: SetBatch, test: SetBatch, seed: int, start: int, stop: int
) -> None:
    """Add heads ``start … stop − 1`` (of the MLP, as many hidden units as they have values) without any M^{-1/2}."""
    count, width = stop - start, train.dim + 1
    if model == "mlp":
        n_keys = int(train.lengths[0])
        weights = sample_mlp_weights(count * width, n_keys, train.dim, seed, start=start * width)
        # the MLP's own scale is (M(d+1))^{-1/2}, of which M^{-1/2} is taken off
        features, of_test = mlp_features(train, weights), mlp_features(test, weights)
    else:
        heads = LAWS[model].sample(count, train.dim, seed, start=start)
        features, of_test = attention_features(train, heads), attention_features(test, heads)
    features *= math.sqrt(count)
    of_test *= math.sqrt(count)
    add_outer(gram, features)
    cross += of_test @ features.T


@dataclass(frozen=True)
class Outcome:
    """Relative test errors of one target: mean squared error over the variance of the target on the test sets."""

    error: float
    """With the penalty ``alpha`` that leave-one-out chooses on the training sets."""
    alpha: float
    oracle: float
    """With the penalty that is best on the test sets, which nobody can know."""
    oracle_alpha: float
    loo: float
    """What leave-one-out says of its choice, over the same variance."""


@dataclass(frozen=True)
class FactorisedGram:
    """A Gram matrix reduced once, for any number of targets and the default path of penalties.

    The same mathematics as `ridge_gram_path` with an intercept; outputs are taken one at a time, so that the bits of
    one do not depend on its neighbours.
    """

    basis: Float[np.ndarray, "n m"]
    factors: tuple[tuple[np.ndarray, np.ndarray], ...]
    problem: Weighing
    alphas: Float[np.ndarray, " a"]
    complements: Float[np.ndarray, "a n"]
    rounding: float

    @classmethod
    def of(cls, gram: Float[np.ndarray, "n n"]) -> FactorisedGram:
        """Factorise a copy of ``gram``, of which the lower triangle is read. 8n³/3 operations."""
        matrix, problem = weigh_gram(gram, np.zeros((len(gram), 1)), None, fit_intercept=True, overwrite_gram=False)
        form = tridiagonalise(matrix, problem.normal, np.float64)
        del matrix
        rounding = float(np.finfo(np.float64).eps)
        largest = form.largest()
        floor = numerical_floor(max(largest, problem.removed), len(gram), rounding)
        sweep = Sweep.of(form, problem.y)
        complements = None
        while complements is None:
            alphas = default_alphas(largest, floor)
            complements = sweep.complements(alphas)
            floor *= 10.0  # rounding made an eigenvalue below −alpha: penalties that small cannot be judged
        return cls(form.basis, _factors(form, alphas), problem, alphas, complements, rounding)

    def outcome(
        self, y: Float[np.ndarray, " n"], cross: Float[np.ndarray, "test n"], truth: Float[np.ndarray, " test"]
    ) -> Outcome:
        """Fit one target at every penalty and measure it. 2n²a operations for a penalties."""
        column = y[:, None]
        mean = centre_of(column, self.problem.roots)
        problem = replace(self.problem, y=centred(column, mean), y_mean=mean, y_size=float(np.abs(y).max()))
        (pttrs,) = get_lapack_funcs(("pttrs",), (self.basis,))
        outputs = self.basis.T @ problem.y
        dual = self.basis @ np.hstack([pttrs(pivots, beside, outputs)[0] for pivots, beside in self.factors])
        scores = [
            float(mean_squares(leave_one_out(alpha * dual[:, [i]], self.complements[i]), problem.weights)[0])
            for i, alpha in enumerate(self.alphas)
        ]
        chosen = select_alpha(self.alphas, np.array(scores), rounding_of_squares(problem.y_size, self.rounding))
        predictions = cross @ dual + (problem.y_mean - problem.gram_mean @ dual)
        spread = float(np.var(truth))
        errors = np.mean(np.square(predictions - truth[:, None]), axis=0) / spread
        best = int(np.argmin(errors))
        return Outcome(
            float(errors[chosen]),
            float(self.alphas[chosen]),
            float(errors[best]),
            float(self.alphas[best]),
            float(scores[chosen]) / spread,
        )


def _factors(form: Tridiagonal, alphas: Float[np.ndarray, " a"]) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """L D Lᵀ of T + alpha for every penalty, as LAPACK keeps it: D, and the diagonal of L beside ones."""
    (pttrf,) = get_lapack_funcs(("pttrf",), (form.diagonal,))
    # LAPACK of one row takes no empty vector
    beside = form.beside if len(form.beside) else np.zeros(1)
    return tuple(tuple(pttrf(form.diagonal + alpha, beside)[:2]) for alpha in alphas)
