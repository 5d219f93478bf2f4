"""Ridge from a Gram matrix at one fixed penalty, within the memory of that matrix."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.linalg import get_blas_funcs

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole.solvers.grams import mirror_lower
from keyhole.solvers.penalties import check_alpha, numerical_floor
from keyhole.solvers.ridge import RidgeSolution, leave_one_out, mean_squares
from keyhole.solvers.ridge_gram import weighed_path
from keyhole.solvers.tiled import factorise_lower, invert_lower, solve_factor
from keyhole.solvers.weighted_gram import Weighing, weigh_gram

IN_CACHE = 2**21
"""Bytes of a few columns that are gone through several times."""


def ridge_gram_fixed(
    gram: Float[np.ndarray, "n n"],
    y: Float[np.ndarray, "n t"],
    alpha: float,
    *,
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    rounding: float | None = None,
    overwrite_gram: bool = False,
    memory_budget: int = MEMORY_BUDGET,
) -> RidgeSolution:
    """Ridge on a Gram matrix at one penalty, with exact leave-one-out, by a Cholesky factorisation in place.

    Parameters
    ----------
    gram : array (n, n)
        K, symmetric and positive semidefinite. Only one triangle is read: the lower of a Fortran-ordered,
        the upper of a C-ordered array.
    y : array (n, t)
        Outputs.
    alpha : float
        The penalty, at least 0.
    fit_intercept : bool
        Whether to fit an unpenalised intercept.
    weights : array (n,), optional
        Positive sample weights.
    rounding : float, optional
        Unit of rounding of the arithmetic that made ``gram``; by default that of its dtype.
    overwrite_gram : bool
        Whether the memory of ``gram`` may be used; then no second n × n matrix is ever made.
    memory_budget : int
        Bound in bytes on any temporary of this route.

    Returns
    -------
    RidgeSolution
        Its route is "cholesky", or that of ``ridge_gram_path`` when ``alpha`` may be below the numerical
        floor or the matrix is not positive semidefinite: slower, and three n × n matrices if it is "eigen".

    Notes
    -----
    Cost: 2n³/3 operations, twice that of the solution alone.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(6.0)[:, None]
    >>> fit = ridge_gram_fixed(x @ x.T, 2 * x + 1, alpha=1e-6)
    >>> np.round(x.T @ fit.coef, 4), np.round(fit.intercept, 4), fit.route
    (array([[2.]]), array([1.]), 'cholesky')
    """
    alpha = check_alpha(alpha)
    rounding = float(np.finfo(gram.dtype).eps) if rounding is None else rounding
    matrix, problem = weigh_gram(gram, y, weights, fit_intercept=fit_intercept, overwrite_gram=overwrite_gram)
    # the factorisation works on the lower triangle: the upper one keeps a copy, in case it fails
    mirror_lower(matrix)
    # the Frobenius norm bounds λ_max from above, so whatever passes is above the floor
    scale = max(float(np.linalg.norm(matrix.ravel(order="K"))), problem.removed)
    if alpha > 0 and alpha >= numerical_floor(scale, len(y), rounding):
        diagonal = matrix.diagonal().copy()
        if _factorise(matrix, problem, alpha):
            return _solve(matrix, problem, alpha, memory_budget)
        mirror_lower(matrix.T)
        np.fill_diagonal(matrix, diagonal)
    path = weighed_path(
        matrix, problem, np.array([alpha]), rounding=rounding, dtype=matrix.dtype, memory_budget=memory_budget
    )
    return path.solution(0)


def _factorise(matrix: Float[np.ndarray, "n n"], problem: Weighing, alpha: float) -> bool:
    """Replace the lower triangle by the Cholesky factor of matrix + alpha; False if it has none."""
    np.fill_diagonal(matrix, matrix.diagonal() + matrix.dtype.type(alpha))
    if problem.normal is not None:
        matrix[0, 0] = 1.0  # the direction of the intercept: decoupled, and left out of every sum below
    return factorise_lower(matrix)


def _solve(factor: Float[np.ndarray, "n n"], problem: Weighing, alpha: float, memory_budget: int) -> RidgeSolution:
    """Dual coefficients, then the inverse of the factor in its own place for the leverages."""
    target = problem.reflect(problem.y)
    if problem.normal is not None:
        target[0] = 0.0
    dual = problem.reflect(solve_factor(factor, target).astype(np.float64))
    invert_lower(factor)
    if problem.normal is not None:
        factor[0, 0] = 0.0
    complement = alpha * _inverse_diagonal(factor, problem.normal, memory_budget)
    coef, intercept = problem.unscale(dual)
    loo = leave_one_out(alpha * dual / problem.roots[:, None], complement)
    return RidgeSolution(alpha, coef, intercept, loo, float(mean_squares(loo, problem.weights).mean()), "cholesky")


def _inverse_diagonal(
    inverse: Float[np.ndarray, "n n"], normal: Float[np.ndarray, " n"] | None, memory_budget: int
) -> Float[np.ndarray, " n"]:
    """Diagonal of H XᵀX H for a lower triangular X: squared lengths of the columns of X − 2 (X u) uᵀ."""
    n = len(inverse)
    shift = np.zeros(n, dtype=inverse.dtype)
    u = np.zeros(n, dtype=inverse.dtype)
    if normal is not None:
        (trmv,) = get_blas_funcs(("trmv",), (inverse,))
        u = normal.astype(inverse.dtype)
        shift = -2 * trmv(inverse, u, lower=1)
    above = np.concatenate([[0.0], np.cumsum(np.square(shift, dtype=np.float64))])
    result = np.empty(n)
    for columns in blocks(n, block_size(2 * n * inverse.itemsize, min(memory_budget, IN_CACHE))):
        start, width = columns.start, columns.stop - columns.start
        panel = inverse[start:, columns].copy(order="F")  # the rows above it are zero in X
        panel[:width] = np.tril(panel[:width])
        if normal is not None:
            panel += shift[start:, None] * u[columns]
        result[columns] = np.einsum("ij,ij->j", panel, panel) + above[start] * np.square(u[columns], dtype=np.float64)
    return result
