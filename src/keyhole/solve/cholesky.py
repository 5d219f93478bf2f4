"""Ridge at one penalty from one Cholesky factorisation: a ninth of the work of all penalties.

From a Gram matrix with B = S K̄ S + α + c s sᵀ/w̄, K̄ the centred matrix and s = √w,

    a = S B⁻¹ S (y − ȳ),        I − H = α B⁻¹ − α/(α + c) s sᵀ/w̄.

The intercept is the eigenvector s, at which S K̄ S is zero. With c = λ_max it does not limit how
well B is inverted; c = 0 would leave 1/α there, and cost digits. Without an intercept c = 0.

And from features with A = Φ̄ᵀ W Φ̄ + α = L Lᵀ the coordinates T = (φ − φ̄) L⁻ᵀ, in which the fit is
that of `spectral` with gains 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole.solve.matrices import (
    as_float64,
    as_like,
    identity,
    inverse_of_factor,
    on_host,
    positive_factor,
    solve_lower,
    solve_stack,
    with_penalty,
)
from keyhole.solve.problem import EPS, RidgeFit, RidgeProblem
from keyhole.solve.spectral import (
    CoordinateFactor,
    Spectrum,
    _joined,
    group_stacks,
    warn_of_small_penalty,
    weighed_and_centred,
    without_each,
)
from keyhole.solve.sums import Sums

POWER_STEPS = 8
"""Power iterations for the size of λ_max, which decides whether a penalty is small."""


def fit_gram(gram: Any, problem: RidgeProblem) -> RidgeFit:
    """Ridge on a Gram matrix, both triangles, which is overwritten if it is float64.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((40, 3))
    >>> y = x @ [[1.0], [2.0], [-1.0]] + 0.1 * rng.standard_normal((40, 1)) + 5
    >>> fit = fit_gram(x @ x.T, RidgeProblem.of(y, [100.0, 1.0, 0.01]))
    >>> fit.alpha, fit.selection, np.round((x.T @ fit.coef).ravel(), 1)
    (0.01, 'loo', array([ 1.,  2., -1.]))
    """
    alpha = problem.single_alpha
    if alpha is None:
        return Spectrum.of_gram(gram, problem).fit()

    # one penalty: Cholesky, unless the penalty is within the rounding of the matrix
    matrix, centre, mean_square = weighed_and_centred(gram, problem)
    largest = largest_eigenvalue(matrix)
    if alpha > EPS * len(problem) * largest:
        raised = largest if problem.fit_intercept else 0.0
        factor = positive_factor(_regularised(matrix, alpha, raised, problem))
        if factor is not None:
            warn_of_small_penalty(alpha, largest, len(problem))
            inverse = inverse_of_factor(factor)
            return InverseFactor(
                alpha=alpha,
                problem=problem,
                inverse=inverse,
                centre=centre,
                mean_square=mean_square,
                raised=raised,
            ).fit()
    return Spectrum.of_centred(matrix, centre, mean_square, problem).fit()


def fit_features(row_blocks: Callable[[], Iterable[Any]], problem: RidgeProblem) -> RidgeFit:
    """Ridge on features (n, p) that come in blocks of rows, read twice; p × p matrices only.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((40, 3))
    >>> y = x @ [[1.0], [2.0], [-1.0]] + 5
    >>> fit = fit_features(lambda: [x[:30], x[30:]], RidgeProblem.of(y, [1e-3]))
    >>> np.round(fit.coef.ravel(), 1), np.round(fit.intercept, 1)
    (array([ 1.,  2., -1.]), array([5.]))
    """
    alpha = problem.single_alpha
    if alpha is None:
        return Spectrum.of_features(row_blocks, problem).fit()
    sums = Sums.of_blocks(row_blocks(), problem)
    gram = sums.gram_copy()
    largest = largest_eigenvalue(gram)
    if not alpha > EPS * len(problem) * largest:
        return Spectrum.of_features(row_blocks, problem).fit()
    warn_of_small_penalty(alpha, largest, len(problem))
    factor = positive_factor(with_penalty(gram, alpha))
    if factor is None:
        return Spectrum.of_features(row_blocks, problem).fit()

    # the samples in coordinates in which the regularised matrix is the identity
    basis = solve_lower(factor, identity(len(factor), factor)).T
    scaled = []
    start = 0
    for block in row_blocks():
        roots = as_like(np.sqrt(problem.weights[start : start + len(block)]), basis)
        start += len(block)
        scaled.append(roots[:, None] * ((as_float64(block) - sums.means) @ basis))
    coordinates = CoordinateFactor(
        alpha=alpha,
        problem=problem,
        basis=basis,
        centre=sums.means,
        scaled=_joined(scaled),
        gains=as_like(np.ones(len(factor)), basis),
        is_whitened=True,
    )
    theta = basis.T @ sums.cross
    coef = basis @ theta
    roots = np.sqrt(problem.weights)[:, None]
    residuals = problem.centred - on_host(coordinates.scaled @ theta) / roots
    return _one_penalty(
        coordinates,
        coef=on_host(coef),
        intercept=problem.y_mean - on_host(sums.means @ coef),
        residuals=residuals,
    )


@dataclass(frozen=True)
class InverseFactor:
    """A fit at one penalty from B⁻¹ of a Gram matrix; a `problem.Factor`. ``raised`` is c."""

    alpha: float
    problem: RidgeProblem
    inverse: Any = field(repr=False)
    centre: Any = field(repr=False)
    mean_square: float
    raised: float = 0.0

    def fit(self) -> RidgeFit:
        """Coefficients and residuals of the samples left out."""
        problem = self.problem
        roots = np.sqrt(problem.weights)[:, None]
        dual = self.inverse @ as_like(roots * problem.centred, self.inverse)
        coef = roots * on_host(dual)
        return _one_penalty(
            self,
            coef=coef,
            intercept=problem.y_mean - on_host(self.centre) @ coef,
            residuals=self.alpha * on_host(dual) / roots,
        )

    def hat(self, compared: Any) -> Float[np.ndarray, "m n"]:
        """h_j(x) = s_j (κ S B⁻¹)_j + w_j/w̄, κ being centred rows of the kernel."""
        problem = self.problem
        roots = np.sqrt(problem.weights)
        hat = on_host(self._scaled_rows(compared) @ self.inverse) * roots
        if problem.fit_intercept:
            hat += problem.weights / problem.total_weight
        return hat

    def variance(self, compared: Any, squares: Float[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
        """v(x) = |φ − φ̄|² − κ S B⁻¹ S κᵀ + α/w̄."""
        problem = self.problem
        rows = self._scaled_rows(compared)
        explained = on_host(((rows @ self.inverse) * rows).sum(1))
        norms = squares
        if problem.fit_intercept:
            shares = problem.weights / problem.total_weight
            norms = squares - 2.0 * on_host(compared) @ shares + self.mean_square
        variance = np.maximum(norms - explained, 0.0)
        if problem.fit_intercept:
            variance += self.alpha / problem.total_weight
        return variance

    def _scaled_rows(self, compared: Any) -> Any:
        """κ S, rows of the kernel less their mean over samples and that of the samples' rows."""
        problem = self.problem
        rows = as_float64(compared) - self.centre
        if problem.fit_intercept:
            shares = as_like(problem.weights / problem.total_weight, rows)
            rows = rows - (rows @ shares)[:, None]
        return rows * as_like(np.sqrt(problem.weights), rows)

    def complements(self) -> Float[np.ndarray, " n"]:
        """α B⁻¹_ii − α/(α + c) w_i/w̄."""
        complements = self.alpha * on_host(self.inverse.diagonal())
        if self.problem.fit_intercept:
            shares = self.problem.weights / self.problem.total_weight
            complements = complements - self.alpha / (self.alpha + self.raised) * shares
        return np.asarray(complements)

    def complement(self, rows: Int[np.ndarray, " g"]) -> Float[np.ndarray, "g g"]:
        """α B⁻¹_gg − α/(α + c) s_g s_gᵀ/w̄."""
        complement = self.alpha * on_host(self.inverse[rows][:, rows])
        if self.problem.fit_intercept:
            roots = np.sqrt(self.problem.weights[rows])
            shares = np.outer(roots, roots) / self.problem.total_weight
            complement = complement - self.alpha / (self.alpha + self.raised) * shares
        return np.asarray(complement)


def _regularised(matrix: Any, alpha: float, raised: float, problem: RidgeProblem) -> Any:
    """B, in memory of its own."""
    regularised = with_penalty(matrix, alpha)
    if raised:
        roots = as_like(np.sqrt(raised * problem.weights / problem.total_weight), matrix)
        regularised += roots[:, None] * roots[None, :]
    return regularised


def _one_penalty(
    factor: Any,
    *,
    coef: Float[np.ndarray, "q t"],
    intercept: Float[np.ndarray, " t"],
    residuals: Float[np.ndarray, "n t"],
) -> RidgeFit:
    """The fit at one penalty, with the residuals of the samples, or groups, left out."""
    problem = factor.problem
    if len(problem) < 2:
        left_out = np.full(problem.y.shape, np.nan)
    elif problem.groups is None:
        left_out = without_each(residuals, factor.complements())
    else:
        left_out = without_groups(factor, residuals)
    scores = problem.scores(left_out[None])
    return RidgeFit(
        alphas=np.array([factor.alpha]),
        errors=scores.errors,
        scores=scores.criterion,
        best=0,
        coef=coef,
        intercept=intercept,
        left_out=left_out,
        selection="loo" if problem.groups is None else "groups",
        is_log_loss=scores.is_log_loss,
        factor=factor,
    )


def without_groups(factor: Any, residuals: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
    """e_g = S_g⁻¹ (I − H)_gg⁻¹ S_g r_g of every group."""
    problem = factor.problem
    roots = np.sqrt(problem.weights)[:, None]
    left_out = np.empty_like(residuals)
    for stack in group_stacks(problem.groups, len(residuals)):
        for rows in stack:
            solved = solve_stack(factor.complement(rows), roots[rows] * residuals[rows])
            left_out[rows] = solved / roots[rows]
    return left_out


def largest_eigenvalue(matrix: Any) -> float:
    """λ_max of a positive semi-definite matrix, from below, by a few power iterations."""
    vector = as_like(np.random.default_rng(0).standard_normal(len(matrix)), matrix)
    size = 0.0
    for _ in range(POWER_STEPS):
        length = float((vector @ vector) ** 0.5)
        if not length > 0:
            return 0.0
        image = matrix @ (vector / length)
        size = float((image @ image) ** 0.5)
        vector = image
    return size
