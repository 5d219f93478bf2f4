"""Ridge regression with exact leave-one-out: the answers its solvers give.

All of them solve, for a design Φ (n, p), outputs y (n, t), weights w (n,) and a penalty alpha,

    min over v, b of  Σ_i w_i |y_i − φ_iᵀv − b|² + alpha |v|²

with b free, or zero when ``fit_intercept`` is False, and judge it by the residuals of the n fits that each
leave one sample out altogether, without refitting: e_i = r_i / (1 − h_i), r the residuals, h the leverages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from keyhole.solvers.penalties import select_alpha

Solve: TypeAlias = Callable[[float], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""alpha → coefficients, intercept (t,), residuals (n, t)."""


@dataclass(frozen=True)
class RidgeSolution:
    """One ridge fit and how it predicts the samples it leaves out.

    Attributes
    ----------
    alpha : float
        The penalty.
    coef : array (n, t) or (p, t)
        From a Gram matrix, the dual coefficients a of f(x) = Σ_i a_i K(x, x_i) + b, so that v = Φᵀa; from a
        design matrix, the weights v themselves.
    intercept : array (t,)
        b; zero without an intercept.
    loo_residuals : array (n, t)
        y_i minus the prediction for i of the fit without sample i, in the units of y. Infinite where the
        leverage is 1 within rounding.
    loo_mse : float
        Their weighted mean square, averaged over outputs; infinite if any of them is.
    route : str
        "tridiagonal", "banded", "eigen", "cholesky" or "design": how it was computed.
    """

    alpha: float
    coef: Float[np.ndarray, "rows t"]
    intercept: Float[np.ndarray, " t"]
    loo_residuals: Float[np.ndarray, "n t"]
    loo_mse: float
    route: str


@dataclass(frozen=True)
class RidgePath:
    """Ridge fits for a whole path of penalties from one factorisation.

    It holds on to the factorisation (n² or p² numbers) to give the solution at any penalty of the path; keep
    the solution and drop the path when one is enough.

    Attributes
    ----------
    alphas : array (a,)
        The penalties, in the order given.
    output_mse : array (a, t)
        Leave-one-out mean squared error of each penalty and output; infinite where rounding forbids a judgement.
    route : str
        "tridiagonal", "banded" or "eigen" from a Gram matrix, "design" from a design matrix.
    floor : float
        Eigenvalues below this carry no information.
    complements : array (a, n)
        1 − h, the complements of the leverages; 0 where they are within rounding of it. At a penalty below the floor
        of a matrix of full rank, where they vanish with the penalty, in proportion to it, as the residuals then are.
    """

    alphas: Float[np.ndarray, " a"]
    output_mse: Float[np.ndarray, "a t"]
    route: str
    floor: float
    complements: Float[np.ndarray, "a n"] = field(repr=False)
    resolution: float = field(repr=False)
    _solve: Solve = field(repr=False)

    @property
    def loo_mse(self) -> Float[np.ndarray, " a"]:
        """Leave-one-out mean squared error of each penalty, averaged over outputs."""
        return np.asarray(self.output_mse.mean(axis=1))

    def best_for(self, output: int) -> int:
        """Position of the penalty that leave-one-out prefers for one output: each may have its own."""
        return select_alpha(self.alphas, self.output_mse[:, output], self.resolution)

    @property
    def best(self) -> int:
        """Position of the penalty that leave-one-out prefers; among equals the largest."""
        return select_alpha(self.alphas, self.loo_mse, self.resolution)

    def solution(self, i: int | None = None) -> RidgeSolution:
        """The fit at ``alphas[i]``, by default the best; O(n²t) from a Gram matrix, O(npt) from a design."""
        i = self.best if i is None else i
        alpha = float(self.alphas[i])
        coef, intercept, residuals = self._solve(alpha)
        loo = leave_one_out(residuals, self.complements[i])
        return RidgeSolution(alpha, coef, intercept, loo, float(self.loo_mse[i]), self.route)


def leave_one_out(residuals: Float[np.ndarray, "n t"], complement: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n t"]:
    """Residuals of the fits that leave each sample out: r_i / (1 − h_i), infinite where 1 − h_i is 0."""
    known = complement > 0
    loo = np.full(residuals.shape, np.inf)
    loo[known] = residuals[known] / complement[known, None]
    return loo


def mean_squares(loo: Float[np.ndarray, "n t"], weights: Float[np.ndarray, " n"]) -> Float[np.ndarray, " t"]:
    """Weighted mean over samples of squared leave-one-out residuals, infinite if any of them is."""
    if np.isinf(loo).any():
        return np.full(loo.shape[1], np.inf)
    return np.asarray(weights @ np.square(loo) / weights.sum())


def rounding_of_squares(y_size: float, rounding: float) -> float:
    """Mean squared errors below this are rounding: 4 units on the largest output, squared."""
    return (4 * rounding * y_size) ** 2
