"""The error of ridge on what it leaves out, samples or groups of them: exact, with its exact gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int
from scipy.linalg import get_lapack_funcs

from keyhole._array import blocks
from keyhole.ridge.gram import Spectrum, tridiagonalise
from keyhole.ridge.problem import (
    EPS,
    check_alpha,
    check_outputs,
    check_weights,
    default_alphas,
    mean_squares,
    numerical_floor,
    rounding_of_squares,
    select_alpha,
    weigh_gram,
)


@dataclass(frozen=True)
class LooGradient:
    """Leave-one-out mean squared error E(K, α) and its gradient.

    Attributes
    ----------
    error : float
        E = Σ_i w_i |e_i|² / (t Σ w), e_i the residual of the fit without sample i.
    gram : array (n, n)
        ∂E/∂K, symmetric: dE = Σ_ij gram_ij dK_ij.
    log_alpha : float
        ∂E/∂log α.
    residuals : array (n, t)
        The e_i.
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
    """Differentiate the leave-one-out error of ridge on a Gram matrix K at one penalty.

    ::

        B = A − A11ᵀA/(1ᵀA1),   A = (K + α diag(1/w))⁻¹        (B = A without an intercept)
        β = B y,   e_i = β_i / B_ii,   dB = −B (dK + diag(1/w) dα) B
        ∂E/∂K = B diag(p) B − (B z βᵀ + β zᵀ B)/2,   z_i = 2 w_i e_i / (t Σw B_ii),   p_i = <z_i, e_i>

    With groups g that are left out together, e_g = B_gg⁻¹ β_g, z_g = 2 B_gg⁻¹ w_g e_g / (t Σw), and the diagonal matrix
    becomes one of symmetric blocks (z_g e_gᵀ + e_g z_gᵀ)/2.

    Values need no derivative: they are eliminated in closed form (variable projection), and so are the n fits
    that leave one sample out.

    Parameters
    ----------
    gram : array (n, n)
        K, symmetric and positive semidefinite; centring it changes nothing if there is an intercept.
    y : array (n, t)
        Outputs.
    alpha : float
        The penalty; large enough for K + α to have a Cholesky factor.
    fit_intercept : bool
        Whether the fit has an unpenalised intercept.
    weights : array (n,), optional
        Positive sample weights.
    groups : array (n,), optional
        Samples with the same number are left out together.

    Notes
    -----
    Cost: about 5n³ operations in float64, with three n × n matrices.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[0.0], [1.0], [3.0], [4.0]])
    >>> found = loo_gradient(x @ x.T, x**2, alpha=0.1)
    >>> moved = loo_gradient(1.001 * x @ x.T, x**2, alpha=0.1)
    >>> bool(np.isclose(moved.error - found.error, 0.001 * np.sum(found.gram * (x @ x.T)), rtol=1e-2))
    True
    """
    check_outputs(y)
    w = check_weights(weights, len(y))
    inverse = _eliminate(gram, check_alpha(alpha) / w, fit_intercept)
    dual = inverse @ y
    share = w / (w.sum() * y.shape[1])
    if groups is None:
        diagonal = inverse.diagonal().copy()
        residuals = dual / diagonal[:, None]
        pull = 2.0 * (share / diagonal)[:, None] * residuals
        gradient = (inverse * np.einsum("nt,nt->n", pull, residuals)) @ inverse
    else:
        residuals, pull = np.empty_like(dual), np.empty_like(dual)
        middle = np.empty_like(inverse)  # blocks times the inverse
        for rows in group_stacks(groups):
            block = inverse[rows[:, :, None], rows[:, None, :]]
            residuals[rows] = np.linalg.solve(block, dual[rows])
            pull[rows] = 2.0 * np.linalg.solve(block, share[rows][:, :, None] * residuals[rows])
            outer = pull[rows] @ residuals[rows].transpose(0, 2, 1)
            middle[rows] = 0.5 * (outer + outer.transpose(0, 2, 1)) @ inverse[rows]
        gradient = inverse @ middle
    error = float((share @ np.square(residuals)).sum())
    cross = (inverse @ pull) @ dual.T
    gradient -= 0.5 * (cross + cross.T)
    return LooGradient(error, gradient, float(alpha * (gradient.diagonal() / w).sum()), residuals)


@dataclass(frozen=True)
class GroupPath:
    """Leave-one-group-out for a path of penalties.

    Attributes
    ----------
    alphas, errors : arrays (a,)
        Penalties and the mean squared error of each on the groups it leaves out; infinite where rounding forbids it.
    alpha, error : float
        The one of least error, the largest among equals, and that error. A single penalty is used as it is.
    residuals : array (n, t)
        At that penalty: y_i minus the prediction of the fit without the group of i.
    coef, intercept : arrays (n, t) and (t,)
        The fit to all samples at that penalty, as in `RidgeSolution`; zero for a sample of weight 0.
    """

    alphas: Float[np.ndarray, " a"]
    errors: Float[np.ndarray, " a"]
    alpha: float
    error: float
    residuals: Float[np.ndarray, "n t"] = field(repr=False)
    coef: Float[np.ndarray, "n t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"] = field(repr=False)


def leave_groups_out(
    gram: Float[np.ndarray, "n n"],
    y: Float[np.ndarray, "n t"],
    groups: Int[np.ndarray, " n"],
    alphas: Float[np.ndarray, " a"] | None = None,
    *,
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    rounding: float | None = None,
) -> GroupPath:
    """Ridge on a Gram matrix, its penalty chosen by the exact error on groups that are left out whole.

    With I − H = V diag(alpha/(λ + alpha)) Vᵀ of the weighted and centred problem, the residuals of the fit without
    group g are (I − H)_gg⁻¹ r_g. As in `ridge_gram_path`, eigenvalues below the numerical floor are zeros to a penalty
    below it, so that alpha → 0 is the minimum-norm fit.

    Parameters as for `loo_gradient`, with both triangles of ``gram``; ``alphas``, at least 0, are 20 from the numerical
    floor up if not given. ``weights`` may be 0: it is predicted by the fit without its group. ``rounding`` is
    that of the arithmetic that made ``gram``, by default of its dtype. One eigendecomposition, then O(n²) for each
    penalty and member of the largest group.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(12.0)[:, None]
    >>> path = leave_groups_out(x @ x.T, 2 * x + 1, np.arange(12) // 3)
    >>> bool(path.errors.min() < 1e-6), (x.T @ path.coef).round(3)
    (True, array([[2.]]))
    """
    rounding = float(np.finfo(gram.dtype).eps) if rounding is None else rounding
    heard = np.arange(len(y)) if weights is None else np.flatnonzero(weights)
    whole = len(heard) == len(y)
    matrix, problem = weigh_gram(
        gram.astype(np.float64) if whole else gram[np.ix_(heard, heard)].astype(np.float64),
        y if whole else y[heard],
        None if weights is None else weights[heard],
        fit_intercept=fit_intercept,
        overwrite_gram=True,
    )
    form = tridiagonalise(matrix, problem.normal, np.float64)
    del matrix
    largest = form.largest()
    scale = max(largest, problem.removed)
    floor = numerical_floor(scale, len(heard), rounding)
    if alphas is None:
        # blocks of an inverse lose digits in proportion to its condition: nine of them are enough to lose
        alphas = default_alphas(largest, max(floor, 1e-9 * scale), count=20)
    spectrum = Spectrum.of(form, problem.y, floor, rounding * scale)
    members = list(group_stacks(groups[heard]))
    errors, found = np.full(len(alphas), np.inf), []
    for i, alpha in enumerate(alphas):
        residuals = _left_out_residuals(spectrum, float(alpha), members) / problem.roots[:, None]
        errors[i] = mean_squares(residuals, problem.weights).mean()
        found.append(residuals)
    resolution = rounding_of_squares(problem.y_size, rounding)
    best = select_alpha(alphas, errors, resolution) if len(alphas) > 1 else 0
    alpha = float(alphas[best])
    dual = spectrum.solve(alpha)
    left, coef = np.empty(y.shape), np.zeros(y.shape)
    left[heard] = found[best]
    coef[heard], intercept = problem.unscale(dual)
    for i in np.setdiff1d(np.arange(len(y)), heard):
        # leaving a group out is fitting its own left-out predictions in the place of its outputs
        siblings = np.flatnonzero(groups[heard] == groups[i])
        replaced = problem.roots[siblings, None] * found[best][siblings]
        along = spectrum.inverse(np.array([alpha])) * (spectrum.vectors[siblings].T @ replaced)
        coef_without, intercept_without = problem.unscale(dual - spectrum.vectors @ along)
        if fit_intercept:
            intercept_without -= problem.roots[siblings] @ replaced / problem.weights.sum()
        left[i] = y[i] - gram[i, heard] @ coef_without - intercept_without
    return GroupPath(alphas, errors, alpha, float(errors[best]), left, coef, intercept)


def _left_out_residuals(spectrum: Spectrum, alpha: float, members: list[np.ndarray]) -> Float[np.ndarray, "n t"]:
    """(I − H)_gg⁻¹ r_g for every group, infinite where rounding hides a tenth of the residual or more.

    For a group of one this is `Spectrum.complements`; for more, what leaks into the null space is compared with what is
    kept along every eigenvector of (I − H)_gg.
    """
    shares = spectrum.shrinkage(np.array([alpha]))[:, 0]
    below, tilt = alpha < spectrum.floor, spectrum.tilt()
    residuals = spectrum.residuals(np.array([alpha]))[0]
    for rows in members:
        part = spectrum.vectors[rows]
        kept, directions = np.linalg.eigh((part * shares) @ part.transpose(0, 2, 1))
        hidden = rows.shape[1] * EPS * kept[:, -1:]
        outliers = np.zeros(len(rows), dtype=bool)
        if below:
            leak = np.square(directions.transpose(0, 2, 1) @ part) @ tilt
            hidden = hidden + spectrum.hidden(np.array([alpha]), np.maximum(kept, 0.0), leak)
            outliers = spectrum.sets_the_floor(np.square(part).sum(axis=1))
        judged = (hidden <= 0.1 * kept).all(axis=1) & ~outliers
        residuals[rows[~judged]] = np.inf
        along = directions[judged].transpose(0, 2, 1) @ residuals[rows[judged]]
        residuals[rows[judged]] = directions[judged] @ (along / kept[judged][:, :, None])
    return residuals


def group_stacks(groups: Int[np.ndarray, " n"], most: int = 2**22) -> Iterator[Int[np.ndarray, "g k"]]:
    """The members of groups of one size, a row per group; few enough at a time for n numbers each to be ``most``."""
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=groups[order[:1]] - 1))
    sizes = np.diff(starts, append=len(groups))
    for size in np.unique(sizes).tolist():
        members = order[starts[sizes == size][:, None] + np.arange(size)]
        for rows in blocks(len(members), max(1, most // (len(groups) * size))):
            yield members[rows]


def _eliminate(
    gram: Float[np.ndarray, "n n"], ridge: Float[np.ndarray, " n"], fit_intercept: bool
) -> Float[np.ndarray, "n n"]:
    """(K + diag(ridge))⁻¹ less its part along the intercept."""
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
    lower = np.tril(factor)
    return np.asarray(lower + np.tril(lower, -1).T)
