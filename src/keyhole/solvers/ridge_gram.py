"""Ridge from a Gram matrix: the dual route over heads and the exact kernel alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole.solvers.banded import Banded, BandedSweep, to_band
from keyhole.solvers.penalties import Alphas, check_alphas, default_alphas, numerical_floor
from keyhole.solvers.ridge import RidgePath, leave_one_out, mean_squares, rounding_of_squares
from keyhole.solvers.tridiagonal import Spectrum, Sweep, Tridiagonal, tridiagonalise
from keyhole.solvers.weighted_gram import Weighing, weigh_gram

LARGE = 2048
"""Samples from which a banded form is made sooner than a tridiagonal one."""

TINY = float(np.finfo(np.float64).tiny)


def ridge_gram_path(
    gram: Float[np.ndarray, "n n"],
    y: Float[np.ndarray, "n t"],
    alphas: Alphas | None = None,
    *,
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    rounding: float | None = None,
    dtype: Any = None,
    overwrite_gram: bool = False,
    memory_budget: int = MEMORY_BUDGET,
) -> RidgePath:
    """Ridge on a Gram matrix for a whole path of penalties, with exact leave-one-out, from one factorisation.

    Penalties above the numerical floor are served by a tridiagonal form of the matrix, from LARGE samples on by a
    banded one. If any is below it (0 included), the form is diagonalised and eigenvalues below the floor count as exact
    zeros, so that alpha → 0 is the minimum-norm least-squares fit on the others.

    Parameters
    ----------
    gram : array (n, n)
        K = ΦΦᵀ or an exact kernel matrix, symmetric and positive semidefinite. Only one triangle is read: the
        lower of a Fortran-ordered, the upper of a C-ordered array.
    y : array (n, t)
        Outputs.
    alphas : sequence of float, optional
        Penalties, at least 0, in any order; by default ``default_alphas``.
    fit_intercept : bool
        Whether to fit an unpenalised intercept.
    weights : array (n,), optional
        Positive sample weights.
    rounding : float, optional
        Unit of rounding of the arithmetic that made ``gram``; by default that of its dtype.
    dtype : float32 or float64, optional
        Precision of the factorisation; by default that of ``gram``. One that fails in float32 is repeated in
        float64.
    overwrite_gram : bool
        Whether the memory of ``gram`` may be used; then no second n × n matrix is made above the floor.
    memory_budget : int
        Bound in bytes on temporaries other than n × n matrices.

    Returns
    -------
    RidgePath
        ``coef`` of its solutions are the dual coefficients a of f(x) = Σ a_i K(x, x_i) + b.

    Notes
    -----
    Cost: 8n³/3 operations once, then 5n² + 2n²t for each penalty; below the floor about 5n³ more and three
    n × n matrices in all.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((40, 3))
    >>> y = x @ [[1.0], [2.0], [-1.0]] + 0.1 * rng.standard_normal((40, 1)) + 5
    >>> path = ridge_gram_path(x @ x.T, y, alphas=[100.0, 1.0, 0.01])
    >>> path.alphas[path.best], path.route
    (np.float64(0.01), 'tridiagonal')
    >>> fit = path.solution()
    >>> bool(abs(fit.intercept[0] - 5) < 0.1), np.round((x.T @ fit.coef).ravel(), 1)
    (True, array([ 1.,  2., -1.]))
    """
    grid = None if alphas is None else check_alphas(alphas)
    rounding = float(np.finfo(gram.dtype).eps) if rounding is None else rounding
    dtype = gram.dtype if dtype is None else np.dtype(dtype)
    matrix, problem = weigh_gram(gram, y, weights, fit_intercept=fit_intercept, overwrite_gram=overwrite_gram)
    return weighed_path(matrix, problem, grid, rounding=rounding, dtype=dtype, memory_budget=memory_budget)


def weighed_path(
    matrix: Float[np.ndarray, "n n"],
    problem: Weighing,
    alphas: Float[np.ndarray, " a"] | None,
    *,
    rounding: float,
    dtype: np.dtype[Any],
    memory_budget: int,
) -> RidgePath:
    """The path of a matrix that is weighed already, and overwritten here if it is of ``dtype``."""
    n = len(matrix)
    rounding = max(rounding, float(np.finfo(dtype).eps))
    form: Banded | Tridiagonal
    if n >= LARGE and (alphas is None or alphas.min() >= max(TINY, _floor_bound(matrix, problem, rounding))):
        form = to_band(matrix, problem.normal, dtype)
    else:
        form = tridiagonalise(matrix, problem.normal, dtype)
    del matrix  # what is still needed of it is in the form
    largest = form.largest()
    scale = max(largest, problem.removed)
    floor = numerical_floor(scale, n, rounding)
    if alphas is None:
        alphas = default_alphas(largest, floor)
    resolution = rounding_of_squares(problem.y_size, rounding)
    if alphas.min() > 0 and alphas.min() >= floor:
        sweep = Sweep.of(form, problem.y) if isinstance(form, Tridiagonal) else BandedSweep.of(form, problem.y)
        complements = sweep.complements(alphas)
        if complements is not None:
            return _sweep_path(problem, sweep, alphas, complements, floor, resolution, memory_budget)
    spectrum = Spectrum.of(form, problem.y, floor, rounding * scale)
    return _spectrum_path(problem, spectrum, alphas, floor, resolution, memory_budget)


def _floor_bound(matrix: Float[np.ndarray, "n n"], problem: Weighing, rounding: float) -> float:
    """A number that the numerical floor cannot exceed, from the Frobenius norm of the lower triangle."""
    squares = sum(
        float(np.square(matrix[columns.start :, columns], dtype=np.float64).sum())
        for columns in blocks(len(matrix), 64)
    )
    return numerical_floor(max(np.sqrt(2 * squares), problem.removed), len(matrix), rounding)


def _sweep_path(
    problem: Weighing,
    sweep: Sweep | BandedSweep,
    alphas: Float[np.ndarray, " a"],
    complements: Float[np.ndarray, "a n"],
    floor: float,
    resolution: float,
    memory_budget: int,
) -> RidgePath:
    """The path from Q and what it reduces K to, all penalties above the floor."""
    weights = problem.weights
    output_mse = np.empty((len(alphas), problem.y.shape[1]))
    for part in _parts(alphas, problem.y, memory_budget):
        residuals = alphas[part, None, None] * sweep.solve(alphas[part]) / problem.roots[:, None]
        output_mse[part] = _scores(residuals, complements[part], weights)

    def solve(alpha: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        dual = sweep.solve(np.array([alpha]))[0]
        return *problem.unscale(dual), alpha * dual / problem.roots[:, None]

    route = "tridiagonal" if isinstance(sweep, Sweep) else "banded"
    return RidgePath(alphas, output_mse, route, floor, complements, resolution, solve)


def _spectrum_path(
    problem: Weighing,
    spectrum: Spectrum,
    alphas: Float[np.ndarray, " a"],
    floor: float,
    resolution: float,
    memory_budget: int,
) -> RidgePath:
    """The path from eigenvalues and eigenvectors, for any penalties."""
    weights = problem.weights
    complements = spectrum.complements(alphas, memory_budget)
    output_mse = np.empty((len(alphas), problem.y.shape[1]))
    for part in _parts(alphas, problem.y, memory_budget):
        residuals = spectrum.residuals(alphas[part]) / problem.roots[:, None]
        output_mse[part] = _scores(residuals, complements[part], weights)

    def solve(alpha: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        residuals = spectrum.residuals(np.array([alpha]))[0] / problem.roots[:, None]
        return *problem.unscale(spectrum.solve(alpha)), residuals

    return RidgePath(alphas, output_mse, "eigen", floor, complements, resolution, solve)


def _parts(alphas: np.ndarray, y: np.ndarray, memory_budget: int) -> list[slice]:
    """Runs of penalties whose residuals, and two temporaries of their size, fit the budget."""
    return list(blocks(len(alphas), block_size(3 * 8 * y.size, memory_budget)))


def _scores(residuals: np.ndarray, complements: np.ndarray, weights: np.ndarray) -> list[np.ndarray]:
    return [mean_squares(leave_one_out(r, c), weights) for r, c in zip(residuals, complements, strict=True)]
