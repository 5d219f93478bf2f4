"""The error of ridge on what it leaves out, samples or groups of them: exact, with its exact gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int
from scipy.linalg import eigh, get_lapack_funcs

from keyhole._array import blocks
from keyhole.solvers.penalties import check_alpha, default_alphas, numerical_floor, select_alpha
from keyhole.solvers.weighted_gram import check_outputs, check_weights


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
    alpha : float
        The one of least error, the largest among equals.
    residuals : array (n, t)
        At that penalty: y_i minus the prediction of the fit without the group of i.
    coef, intercept : arrays (n, t) and (t,)
        The fit to all samples at that penalty, as in `RidgeSolution`.
    """

    alphas: Float[np.ndarray, " a"]
    errors: Float[np.ndarray, " a"]
    alpha: float
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
) -> GroupPath:
    """Ridge on a Gram matrix, its penalty chosen by the exact error on groups that are left out whole.

    Parameters as for `loo_gradient`; positive ``alphas`` are 20 from the numerical floor up if not given.
    One eigendecomposition, then O(n²) for each penalty and member of the largest group.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(12.0)[:, None]
    >>> path = leave_groups_out(x @ x.T, 2 * x + 1, np.arange(12) // 3)
    >>> bool(path.errors.min() < 1e-6), (x.T @ path.coef).round(3)
    (True, array([[2.]]))
    """
    check_outputs(y)
    w = check_weights(weights, len(y))
    if alphas is None:
        scale = float(np.linalg.norm(gram))
        floor = numerical_floor(scale, len(y), float(np.finfo(gram.dtype).eps))
        # blocks of an inverse lose digits in proportion to its condition: nine of them are enough to lose
        alphas = default_alphas(scale, max(floor, 1e-9 * scale), count=20)
    members = list(group_stacks(groups))
    # A = W^½ (W^½ K W^½ + α)⁻¹ W^½ for every α from one set of eigenvectors
    roots = np.sqrt(w)
    values, vectors = eigh(roots[:, None] * gram.astype(np.float64) * roots)
    values, vectors = np.maximum(values, 0.0), roots[:, None] * vectors
    along, ones = vectors.T @ y, vectors.sum(axis=0)

    def eliminated(alpha: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """1/(λ + α), By, A1 and 1ᵀA1, the last two zero and one without an intercept."""
        shares = 1.0 / (values + alpha)
        dual = vectors @ (shares[:, None] * along)
        if not fit_intercept:
            return shares, dual, np.zeros(len(y)), 1.0
        sums, total = vectors @ (shares * ones), float(shares @ np.square(ones))
        return shares, dual - np.outer(sums, sums @ y / total), sums, total

    errors = np.full(len(alphas), np.inf)
    found: dict[int, np.ndarray] = {}
    for i, alpha in enumerate(alphas):
        if alpha <= 0:
            continue
        shares, residuals, sums, total = eliminated(float(alpha))
        for rows in members:
            part = vectors[rows]
            along_ones = sums[rows][:, :, None] * (sums[rows] / total)[:, None, :]
            block = (part * shares) @ part.transpose(0, 2, 1) - along_ones
            residuals[rows] = np.linalg.solve(block, residuals[rows])
        errors[i] = (w @ np.square(residuals)).sum() / (w.sum() * y.shape[1])
        found[i] = residuals
    best = select_alpha(alphas, errors)
    alpha = float(alphas[best])
    coef = eliminated(alpha)[1]
    rest = y - gram.astype(np.float64) @ coef - alpha * coef / w[:, None]
    intercept = np.average(rest, axis=0, weights=w) if fit_intercept else np.zeros(y.shape[1])
    return GroupPath(alphas, errors, alpha, found[best], coef, intercept)


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
