"""The error of ridge on what it leaves out, samples or groups of them, with its exact gradient: what laws learn by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int
from scipy.linalg import get_lapack_funcs

from keyhole.ridge.gram import group_stacks
from keyhole.ridge.matrices import mirror_lower
from keyhole.ridge.problem import RidgeProblem


@dataclass(frozen=True)
class LooGradient:
    """Leave-one-out mean squared error E(K, α) = Σ_i w_i |e_i|² / (t Σ w) and its gradient.

    ``gram`` is ∂E/∂K, symmetric: dE = Σ_ij gram_ij dK_ij; ``residuals`` are the e_i of the fits without sample i.
    """

    error: float
    gram: Float[np.ndarray, "n n"] = field(repr=False)
    log_alpha: float
    residuals: Float[np.ndarray, "n t"] = field(repr=False)


def loo_gradient(
    gram: Float[np.ndarray, "n n"],
    y: Float[np.ndarray, "n t"],
    alpha: float,
    *,
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    groups: Int[np.ndarray, " n"] | None = None,
) -> LooGradient:
    """Differentiate the leave-one-out error of ridge on a Gram matrix K at one penalty. About 5n³ operations.

    ::

        B = A − A11ᵀA/(1ᵀA1),   A = (K + α diag(1/w))⁻¹        (B = A without an intercept)
        β = B y,   e_i = β_i / B_ii,   dB = −B (dK + diag(1/w) dα) B
        ∂E/∂K = B diag(p) B − (B z βᵀ + β zᵀ B)/2,   z_i = 2 w_i e_i / (t Σw B_ii),   p_i = <z_i, e_i>

    With groups g that are left out together, e_g = B_gg⁻¹ β_g, z_g = 2 B_gg⁻¹ w_g e_g / (t Σw), and the diagonal matrix
    becomes one of symmetric blocks (z_g e_gᵀ + e_g z_gᵀ)/2. Values need no derivative: they are eliminated in closed
    form (variable projection), and so are the n fits that leave one sample out. K + α must have a Cholesky factor.

    >>> x = np.array([[0.0], [1.0], [3.0], [4.0]])
    >>> found, moved = (loo_gradient(scale * x @ x.T, x**2, alpha=0.1) for scale in (1.0, 1.001))
    >>> bool(np.isclose(moved.error - found.error, 0.001 * np.sum(found.gram * (x @ x.T)), rtol=1e-2))
    True
    """
    w = RidgeProblem.of(y, [alpha], weights=weights).weights
    inverse = centred_inverse(gram, alpha / w, fit_intercept=fit_intercept)
    dual = inverse @ y
    share = w / (w.sum() * y.shape[1])
    # products of n × n matrices in the precision of the Gram matrix: float32 steers as well
    narrow = inverse.astype(gram.dtype, copy=False)
    if groups is None:
        diagonal = inverse.diagonal().copy()
        residuals = dual / diagonal[:, None]
        pull = 2.0 * (share / diagonal)[:, None] * residuals
        gradient = (narrow * np.einsum("nt,nt->n", pull, residuals).astype(narrow.dtype)) @ narrow
    else:
        residuals, pull = left_out_residuals(inverse, dual, groups), np.empty_like(dual)
        middle = np.empty_like(narrow)  # blocks times the inverse
        for rows in group_stacks(groups):
            block = inverse[rows[:, :, None], rows[:, None, :]]
            pull[rows] = 2.0 * np.linalg.solve(block, share[rows][:, :, None] * residuals[rows])
            outer = pull[rows] @ residuals[rows].transpose(0, 2, 1)
            middle[rows] = 0.5 * (outer + outer.transpose(0, 2, 1)) @ inverse[rows]
        gradient = narrow @ middle
    error = float((share @ np.square(residuals)).sum())
    along = 0.5 * (inverse @ pull)
    cross = along.astype(narrow.dtype) @ dual.T.astype(narrow.dtype)
    gradient -= cross
    gradient -= cross.T
    return LooGradient(error, gradient, float(alpha * (gradient.diagonal() / w).sum()), residuals)


def left_out_residuals(
    inverse: Float[np.ndarray, "n n"], dual: Float[np.ndarray, "n t"], groups: Int[np.ndarray, " n"] | None
) -> Float[np.ndarray, "n t"]:
    """Residuals of the fits without each sample, or group, from `centred_inverse` B and By: B_gg⁻¹ (By)_g."""
    if groups is None:
        return dual / inverse.diagonal()[:, None]
    residuals = np.empty_like(dual)
    for rows in group_stacks(groups):
        residuals[rows] = np.linalg.solve(inverse[rows[:, :, None], rows[:, None, :]], dual[rows])
    return residuals


def centred_inverse(
    gram: Float[np.ndarray, "n n"], ridge: Float[np.ndarray, " n"], *, fit_intercept: bool
) -> Float[np.ndarray, "n n"]:
    """(K + diag(ridge))⁻¹ by Cholesky, in float64, less its part along the intercept: ridge has coefficients By."""
    inverse = _inverse(gram, ridge)
    if fit_intercept:
        sums = inverse.sum(axis=1)
        inverse -= np.outer(sums, sums / sums.sum())
    return inverse


def _inverse(gram: Float[np.ndarray, "n n"], ridge: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n n"]:
    """(K + diag(ridge))⁻¹ by Cholesky, in float64."""
    matrix = np.array(gram, dtype=np.float64, order="F")
    np.fill_diagonal(matrix, matrix.diagonal() + ridge)
    potrf, potri = get_lapack_funcs(("potrf", "potri"), (matrix,))
    factor, info = potrf(matrix, lower=True, overwrite_a=True)
    if info == 0:
        factor, info = potri(factor, lower=True, overwrite_c=True)
    if info != 0 or not math.isfinite(factor[-1, -1]):
        raise np.linalg.LinAlgError(
            f"the Gram matrix plus the penalty {ridge.min():g} must be positive definite: it is not, within rounding. "
            "Use a larger penalty, at least the numerical floor of the matrix."
        )
    mirror_lower(factor)
    return np.asarray(factor)
