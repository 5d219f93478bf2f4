"""The leave-one-out error of ridge as a function of its Gram matrix, and its gradient.

Values need no derivative: they are eliminated in closed form (variable projection), and so are the
n fits that leave one sample out. The plain version of the error is `keyhole.textbook.ridge`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole.solve.matrices import (
    as_float64,
    as_like,
    copied,
    inverse_of_factor,
    on_host,
    positive_factor,
    solve_stack,
)
from keyhole.solve.spectral import group_stacks


class SingularGramError(ValueError):
    """K + α is not positive definite in the arithmetic at hand: α is below the rounding of K."""


@dataclass(frozen=True)
class LooGradient:
    """Leave-one-out mean squared error E(K, α) = Σ_i w_i |e_i|² / (t Σ w) and its gradient.

    ``gram`` is ∂E/∂K, symmetric: dE = Σ_ij gram_ij dK_ij; ``log_alpha`` that in log α.
    """

    error: float
    gram: Any = field(repr=False)
    log_alpha: float


def loo_gradient(
    gram: Any,
    y: Float[np.ndarray, "n t"],
    alpha: float,
    *,
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    groups: Int[np.ndarray, " n"] | None = None,
) -> LooGradient:
    """Differentiate the leave-one-out error of ridge on a Gram matrix K at one penalty.

    About 5n³ operations.

    ::

        B = A − A11ᵀA/(1ᵀA1),   A = (K + α diag(1/w))⁻¹        (B = A without an intercept)
        β = B y,   e_i = β_i / B_ii,   dB = −B (dK + diag(1/w) dα) B
        ∂E/∂K = B diag(p) B − (B z βᵀ + β zᵀ B)/2
        z_i = 2 w_i e_i / (t Σw B_ii),   p_i = <z_i, e_i>

    With groups g that are left out together, e_g = B_gg⁻¹ β_g, z_g = 2 B_gg⁻¹ w_g e_g / (t Σw), and
    the diagonal matrix becomes one of symmetric blocks (z_g e_gᵀ + e_g z_gᵀ)/2.

    >>> x = np.array([[0.0], [1.0], [3.0], [4.0]])
    >>> here = loo_gradient(x @ x.T, x**2, alpha=0.1)
    >>> nearby = loo_gradient(1.001 * x @ x.T, x**2, alpha=0.1)
    >>> predicted_change = 0.001 * np.sum(here.gram * (x @ x.T))
    >>> bool(np.isclose(nearby.error - here.error, predicted_change, rtol=1e-2))
    True
    """
    w = np.ones(len(y)) if weights is None else weights
    inverse = centred_inverse(gram, alpha / w, fit_intercept=fit_intercept)  # B
    outputs = as_like(y, inverse)
    share = as_like(w / (w.sum() * y.shape[1]), inverse)
    dual = inverse @ outputs  # β

    # e, z, and the first term of the gradient: B diag(p) B, or B times symmetric blocks times B
    if groups is None:
        diagonal = copied(inverse.diagonal())
        residuals = dual / diagonal[:, None]
        z = 2.0 * (share / diagonal)[:, None] * residuals
        p = (z * residuals).sum(1)
        gradient = (inverse * p) @ inverse
    else:
        residuals = 0.0 * dual
        z = 0.0 * dual
        blocks_times_inverse = 0.0 * inverse
        for rows in group_stacks(groups, 2**22 // len(y)):
            block = inverse[rows[:, :, None], rows[:, None, :]]
            of_group = solve_stack(block, dual[rows])
            z_of_group = 2.0 * solve_stack(block, share[rows][:, :, None] * of_group)
            residuals[rows] = of_group
            z[rows] = z_of_group
            outer = z_of_group @ of_group.swapaxes(1, 2)
            blocks_times_inverse[rows] = 0.5 * (outer + outer.swapaxes(1, 2)) @ inverse[rows]
        gradient = inverse @ blocks_times_inverse
    error = float((share @ (residuals * residuals)).sum())

    # the second term, (B z βᵀ + β zᵀ B)/2
    cross = (0.5 * (inverse @ z)) @ dual.T
    gradient = gradient - cross - cross.T
    in_log_alpha = alpha * float((on_host(gradient.diagonal()) / w).sum())
    return LooGradient(error=error, gram=gradient, log_alpha=in_log_alpha)


def centred_inverse(gram: Any, ridge: Float[np.ndarray, " n"], *, fit_intercept: bool) -> Any:
    """B, that is A = (K + diag(ridge))⁻¹ less its part along the intercept, A11ᵀA/(1ᵀA1).

    By Cholesky, in float64. Ridge has coefficients By.
    """
    regularised = copied(as_float64(gram))
    places = np.arange(len(ridge))
    regularised[places, places] += as_like(ridge, regularised)
    factor = positive_factor(regularised)
    if factor is None:
        raise SingularGramError(
            "the Gram matrix of the features is not positive definite at this penalty."
        )
    inverse = inverse_of_factor(factor)
    if fit_intercept:
        sums = inverse.sum(1)
        inverse = inverse - sums[:, None] * (sums / sums.sum())[None, :]
    return inverse
