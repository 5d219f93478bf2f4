"""Ridge from a Gram matrix: the dual route over heads and the exact kernel alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float
from scipy.linalg import eigvalsh_tridiagonal, get_blas_funcs, get_lapack_funcs

from keyhole._array import MEMORY_BUDGET, block_size, blocks, run_threads
from keyhole.ridge.banded import Banded, BandedSweep, to_band
from keyhole.ridge.matrices import factorise_lower, invert_lower, mirror_lower, solve_factor
from keyhole.ridge.problem import (
    Alphas,
    RidgePath,
    RidgeSolution,
    Weighing,
    check_alpha,
    check_alphas,
    default_alphas,
    leave_one_out,
    mean_squares,
    numerical_floor,
    rounding_of_squares,
    weigh_gram,
)

TILE = 40_000
"""Entries (penalties × samples) of a tile of the sweep: fits the second-level cache, dwarfs a call's cost."""


@runtime_checkable
class Form(Protocol):
    """K = Q T Qᵀ on the span of the columns of Q, with T of any shape that is easy to diagonalise."""

    @property
    def basis(self) -> Float[np.ndarray, "n m"]:
        """Q."""

    def eigenpairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues and eigenvectors of T."""


@dataclass(frozen=True)
class Tridiagonal:
    """K = Q T Qᵀ on the span of the columns of Q.

    Attributes
    ----------
    basis : array (n, m)
        Q, orthonormal columns in Fortran order; m = n, or n − 1 without the direction of the intercept.
    diagonal, beside : arrays (m,) and (m − 1,)
        Entries of T, in float64.
    """

    basis: Float[np.ndarray, "n m"]
    diagonal: Float[np.ndarray, " m"]
    beside: Float[np.ndarray, " edges"]

    def largest(self) -> float:
        """The largest eigenvalue."""
        m = len(self.diagonal)
        if m < 2:
            return float(self.diagonal.max(initial=0.0))
        # bisection squares the entries: in units of the largest, that neither overflows nor vanishes
        scale = max(float(np.abs(self.diagonal).max()), float(np.abs(self.beside).max())) or 1.0
        units = self.diagonal / scale, self.beside / scale
        top = eigvalsh_tridiagonal(*units, select="i", select_range=(m - 1, m - 1))
        return scale * float(top[0])

    def eigenpairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues (float64) and eigenvectors of T in the precision of the basis, in float64 if that fails."""
        if len(self.diagonal) < 2:
            return self.diagonal.copy(), np.ones((len(self.diagonal),) * 2)
        for dtype in dict.fromkeys((self.basis.dtype, np.dtype(np.float64))):
            values, vectors, info = _stevd(self.diagonal.astype(dtype), self.beside.astype(dtype))
            if info == 0 and np.isfinite(values).all() and np.isfinite(vectors).all():
                return values.astype(np.float64), vectors
        raise np.linalg.LinAlgError(
            f"the eigendecomposition of the {self.basis.shape} Gram matrix did not converge in float64 (info "
            f"{info}). Use penalties above the numerical floor, which need none."
        )


def tridiagonalise(matrix: Float[np.ndarray, "n n"], normal: Float[np.ndarray, " n"] | None, dtype: Any) -> Tridiagonal:
    """Reduce ``matrix`` (Fortran order, lower), in place if it is of ``dtype``.

    A reduction that fails in float32 is repeated on the float64 matrix, if that is what was given. ``normal``
    is the unit vector u of the reflection I − 2uuᵀ that emptied row and column 0, None if there was none.

    Cost: 8n³/3 operations, a quarter of them bound by memory; no second n × n matrix of its dtype.
    """
    reduced = _reduce(matrix.astype(dtype, order="F", copy=False), normal)
    if reduced is None and np.dtype(dtype) != matrix.dtype:
        reduced = _reduce(matrix, normal)
    if reduced is None:
        raise np.linalg.LinAlgError(
            f"the tridiagonal reduction of the {matrix.shape} Gram matrix overflowed in {matrix.dtype}. "
            "Pass it in float64, or divide it and the penalties by a common factor."
        )
    return reduced


def _reduce(matrix: Float[np.ndarray, "n n"], normal: Float[np.ndarray, " n"] | None) -> Tridiagonal | None:
    """Q and T of ``matrix``, overwritten by Q; None if anything is not finite."""
    sytrd, sytrd_lwork, orghr, orghr_lwork = get_lapack_funcs(
        ("sytrd", "sytrd_lwork", "orghr", "orghr_lwork"), (matrix,)
    )
    n = len(matrix)
    work = int(sytrd_lwork(n, lower=1)[0])
    matrix, diagonal, beside, tau, _ = sytrd(matrix, lower=1, lwork=work, overwrite_a=1)
    if not (np.isfinite(diagonal).all() and np.isfinite(beside).all()):
        return None
    if n == 1:
        basis = np.ones_like(matrix)
    else:
        # sytrd stores its reflectors as a Hessenberg reduction does, whose Q LAPACK forms at GEMM speed
        work = int(orghr_lwork(n, lo=0, hi=n - 1)[0])
        basis, _ = orghr(matrix, tau, lo=0, hi=n - 1, lwork=work, overwrite_a=1)
    diagonal, beside = diagonal.astype(np.float64), beside.astype(np.float64)
    if normal is None:
        return Tridiagonal(basis, diagonal, beside)
    # row and column 0 were empty, so T starts with a lone 0 and Q with the first axis: leave both out
    basis = basis[:, 1:]
    if n > 1:
        (ger,) = get_blas_funcs(("ger",), (basis,))
        u = normal.astype(basis.dtype)
        ger(-2.0, u, basis.T @ u, a=basis, overwrite_a=1)
    return Tridiagonal(basis, diagonal[1:], beside[1:])


@dataclass(frozen=True)
class Sweep:
    """(K + alpha)⁻¹ for penalties above the numerical floor, by Gaussian elimination in T + alpha.

    Everything is held in units of ``scale``, so that float32 neither overflows nor underflows.
    """

    form: Tridiagonal
    outputs: Float[np.ndarray, "m t"]
    scale: float

    @classmethod
    def of(cls, form: Tridiagonal, y: Float[np.ndarray, "n t"]) -> Sweep:
        """Prepare for the scaled outputs ``y``."""
        outputs = (form.basis.T @ y.astype(form.basis.dtype)).astype(np.float64)
        scale = max(np.abs(form.diagonal).max(initial=0.0), np.abs(form.beside).max(initial=0.0))
        return cls(form, outputs, float(scale) or 1.0)

    def pivots(self, alphas: Float[np.ndarray, " a"]) -> tuple[np.ndarray, np.ndarray] | None:
        """Pivots D (m, a) and multipliers l (m, a) of T + alpha = L D Lᵀ, L unit lower bidiagonal.

        None if a pivot is not positive: then K has an eigenvalue below −alpha.
        """
        diagonal = (self.form.diagonal[:, None] + alphas) / self.scale
        beside = self.form.beside / self.scale
        multipliers = np.zeros_like(diagonal)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for k in range(1, len(diagonal)):
                np.divide(beside[k - 1], diagonal[k - 1], out=multipliers[k])
                diagonal[k] -= multipliers[k] * beside[k - 1]
        return (diagonal, multipliers) if (diagonal > 0).all() else None

    def complements(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n"] | None:
        """1 − h = alpha diag (K + alpha)⁻¹, each a sum of squares; None where T + alpha is not positive.

        Column by column, u_k = q_k − l_k u_{k−1} is the forward substitution of Qᵀ for all penalties at once,
        and the diagonal is Σ_k u_k² / D_k. Cost: 5 n m a operations in cache.
        """
        factors = self.pivots(alphas)
        if factors is None:
            return None
        basis = self.form.basis
        n, m = basis.shape
        multipliers = factors[1].astype(basis.dtype)[:, :, None]
        shares = (alphas / self.scale / factors[0]).astype(basis.dtype)[:, :, None]
        result = np.empty((len(alphas), n))

        def sweep(rows: slice) -> None:
            substituted = np.zeros((len(alphas), rows.stop - rows.start), dtype=basis.dtype)
            term, total = np.empty_like(substituted), np.zeros_like(substituted)
            for k in range(m):
                np.multiply(substituted, multipliers[k], out=substituted)
                np.subtract(basis[rows, k], substituted, out=substituted)
                np.multiply(substituted, substituted, out=term)
                np.multiply(term, shares[k], out=term)
                np.add(total, term, out=total)
            result[:, rows] = total

        run_threads(sweep, blocks(n, max(256, TILE // len(alphas))))
        return result

    def solve(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n t"]:
        """(K + alpha)⁻¹ y for each penalty. Cost: 2 n m a t operations."""
        factors = self.pivots(alphas)
        if factors is None:
            raise np.linalg.LinAlgError("T + alpha must be positive definite: ask `complements` first.")
        pivots, multipliers = factors
        (m, a), t = pivots.shape, self.outputs.shape[1]
        x = np.repeat(self.outputs[:, None, :], a, axis=1)
        for k in range(1, m):
            x[k] -= multipliers[k, :, None] * x[k - 1]
        x /= pivots[:, :, None] * self.scale
        for k in range(m - 2, -1, -1):
            x[k] -= multipliers[k + 1, :, None] * x[k + 1]
        basis = self.form.basis
        product = basis @ x.reshape(m, a * t).astype(basis.dtype)
        return np.ascontiguousarray(product.reshape(len(basis), a, t).transpose(1, 0, 2), dtype=np.float64)


@dataclass(frozen=True)
class Spectrum:
    """K = V Λ Vᵀ, for paths that reach below the floor: to a penalty there, eigenvalues below it are zeros.

    To a penalty above the floor they are what they are, so that what is said of one penalty does not depend
    on the others. Negative ones are zeros always.

    Attributes
    ----------
    vectors : array (n, m)
        V.
    values : array (m,)
        Eigenvalues.
    outputs : array (m, t)
        Vᵀy.
    floor : float
        The numerical floor.
    noise : float
        Rounding error of an eigenvalue: one unit of rounding times the largest.
    """

    vectors: Float[np.ndarray, "n m"]
    values: Float[np.ndarray, " m"]
    outputs: Float[np.ndarray, "m t"]
    floor: float
    noise: float

    @classmethod
    def of(cls, form: Form, y: Float[np.ndarray, "n t"], floor: float, noise: float) -> Spectrum:
        """Decompose T and rotate Q. Cost: up to 14n³/3 operations and two more n × n matrices."""
        values, rotation = form.eigenpairs()
        vectors = form.basis @ rotation.astype(form.basis.dtype, copy=False)
        outputs = (vectors.T @ y.astype(vectors.dtype)).astype(np.float64)
        return cls(vectors, values, outputs, floor, noise)

    def inverse(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "m a"]:
        """1 / (λ + alpha), and 0 for an eigenvalue that a penalty below the floor has to take for zero."""
        values = np.maximum(self.values, 0.0)[:, None]
        seen = (values > self.floor) | ((alphas >= self.floor) & (alphas > 0))
        return np.asarray(np.divide(1.0, values + alphas, out=np.zeros(seen.shape), where=seen))

    def shrinkage(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "m a"]:
        """What a residual keeps of each eigenvector: alpha / (λ + alpha); 1 for λ = 0, also at alpha = 0.

        If no eigenvalue counts as zero, residuals vanish with a penalty below the floor, and so do the complements of
        the leverages. Leave-one-out is their ratio, which has a limit: both are given over the most that is kept.
        """
        inverse = self.inverse(alphas)
        kept = np.where(inverse > 0, alphas * inverse, 1.0)
        if (self.values > self.floor).all() and len(self.values):
            kept = np.where(alphas < self.floor, inverse / inverse.max(axis=0), kept)
        return np.asarray(kept)

    def complements(self, alphas: Float[np.ndarray, " a"], memory_budget: int) -> Float[np.ndarray, "a n"]:
        """1 − h = Σ_j V_ij² alpha/(λ_j + alpha), or in proportion to it as ``shrinkage`` is.

        0 where rounding hides a tenth of the residual or more.
        """
        tilt = self.tilt()
        columns = np.column_stack([self.shrinkage(alphas), tilt])
        n, m = self.vectors.shape
        result = np.empty((len(alphas), n))
        for rows in blocks(n, block_size(m * 24, memory_budget)):
            squares = np.square(self.vectors[rows], dtype=np.float64)
            sums = squares @ columns
            kept, leak = sums[:, :-1], sums[:, -1:]
            hidden = (self.hidden(alphas, kept, leak) > 0.1 * kept) | self.sets_the_floor(squares)[:, None]
            result[:, rows] = np.where(hidden & (alphas < self.floor), 0.0, kept).T
        return result

    def hidden(self, alphas: Float[np.ndarray, " a"], kept: np.ndarray, leak: np.ndarray) -> np.ndarray:
        """What rounding may have made of ``kept``, 1 − h, if it leaks so much of a sample into the null space.

        That is 2 √(leak (1 − h)) + leak of 1 − h itself, and √leak |r| of the residual, r those of all samples. The
        latter is compared with (1 − h) |y| / √n, the residual of a sample that is predicted as badly as most.
        """
        sizes = np.linalg.norm(self.outputs, axis=0)
        left = np.linalg.norm(self.shrinkage(alphas)[:, :, None] * self.outputs[:, None, :], axis=0)
        share = np.divide(left, sizes, out=np.zeros_like(left), where=sizes > 0).max(axis=1)
        return np.asarray(np.maximum(2 * np.sqrt(leak * kept) + leak, np.sqrt(len(self.vectors) * leak) * share))

    def tilt(self) -> Float[np.ndarray, " m"]:
        """How far rounding tilts each eigenvector into the null space, squared; nowhere if that is empty.

        About noise/λ_j each, which leaks Σ_j V_ij² (noise/λ_j)² of sample i into it.
        """
        known = self.values > self.floor
        tilt = np.zeros(len(known))
        if not known.all():
            tilt[known] = np.square(self.noise / self.values[known])
        return tilt

    def sets_the_floor(self, squares: Float[np.ndarray, "k m"]) -> Bool[np.ndarray, " k"]:
        """Whether the floor is that of one sample, or group: without it, eigenvalues taken for zero would count.

        ``squares`` are its squared coordinates along the eigenvectors, a row for each. What is left of the largest
        eigenvalue without it is at least that of every eigenvector's rest.
        """
        if (self.values > self.floor).all():
            return np.zeros(len(squares), dtype=bool)
        rest = (np.maximum(self.values, 0.0) * np.maximum(1.0 - squares, 0.0)).max(axis=1)
        return np.asarray(rest < 0.1 * self.values.max())

    def residuals(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n t"]:
        """Outputs minus fit, for each penalty, or in proportion to it as ``shrinkage`` is."""
        m, t = self.outputs.shape
        x = self.shrinkage(alphas)[:, :, None] * self.outputs[:, None, :]
        product = self.vectors @ x.reshape(m, len(alphas) * t).astype(self.vectors.dtype)
        product = product.reshape(len(self.vectors), len(alphas), t)
        return np.ascontiguousarray(product.transpose(1, 0, 2), dtype=np.float64)

    def solve(self, alpha: float) -> Float[np.ndarray, "n t"]:
        """(K + alpha)⁻¹ y; of eigenvalues taken for zero nothing, since they carry no function."""
        inverse = self.inverse(np.array([alpha]))
        product = self.vectors @ (inverse * self.outputs).astype(self.vectors.dtype)
        return np.asarray(product, dtype=np.float64)


def _stevd(diagonal: np.ndarray, beside: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """LAPACK's divide and conquer for a tridiagonal matrix."""
    (stevd,) = get_lapack_funcs(("stevd",), (diagonal,))
    values, vectors, info = stevd(diagonal, beside)
    return values, vectors, int(info)


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
    # the Frobenius norm bounds λ_max from above, so whatever passes is above the floor; squares may outgrow float32
    squares = (np.square(matrix[:, part], dtype=np.float64).sum() for part in blocks(len(y), 64))
    scale = max(math.sqrt(sum(squares)), problem.removed)
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
