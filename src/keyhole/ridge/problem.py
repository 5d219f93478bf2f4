"""Ridge regression with exact leave-one-out: the problem, its penalties, and the answers that every route gives.

All routes solve, for a design Φ (n, p), outputs y (n, t), weights w (n,) and a penalty alpha,

    min over v, b of  Σ_i w_i |y_i − φ_iᵀv − b|² + alpha |v|²

with b free, or zero when ``fit_intercept`` is False, and judge it by the residuals of the n fits that each
leave one sample out altogether, without refitting: e_i = r_i / (1 − h_i), r the residuals, h the leverages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from jaxtyping import Float
from scipy.linalg import get_blas_funcs

from keyhole._array import block_size, blocks
from keyhole._checks import check_count, check_finite, check_number

EPS = float(np.finfo(np.float64).eps)
"""Unit of rounding of float64, the reference precision."""

GUARD = 16.0
"""Floor in units of the rounding of the Gram matrix. The computed eigenvalues of attention Gram matrices
(n = 1000 … 4000, float32 products) were off by at most 1.2 units; this leaves a decade."""

FLAT = 1e-9
"""Relative difference of leave-one-out errors below which two penalties count as equally good."""

Alphas: TypeAlias = Sequence[float | int] | Float[np.ndarray, " a"]


def numerical_floor(scale: float, n: int, rounding: float = EPS) -> float:
    """The size below which an eigenvalue of a Gram matrix carries no information.

    ``max(16·rounding, n·ε)·scale`` with ε of float64, so n·ε·λ_max for a float64 matrix of order n ≥ 16. For
    a float32 one n·ε would discard what can still be seen (at n = 4000 half the spectrum of attention
    features): 16 units leave out what rounding made, and no more.

    Parameters
    ----------
    scale : float
        Largest eigenvalue, or the larger part that centring removed.
    n : int
        Order of the matrix.
    rounding : float
        Unit of rounding of the arithmetic that made the matrix: 2.2e-16 for float64, 1.2e-7 for float32.

    Examples
    --------
    >>> numerical_floor(scale=10.0, n=1000) == 1000 * EPS * 10.0
    True
    >>> round(numerical_floor(scale=1.0, n=1000, rounding=2**-23), 8)
    1.91e-06
    """
    return max(GUARD * rounding, n * EPS) * scale


def default_alphas(largest: float, floor: float, count: int = 30) -> Float[np.ndarray, " a"]:
    """The grid tried when nobody names one: from just above the numerical floor to ten times λ_max.

    Parameters
    ----------
    largest : float
        Largest eigenvalue λ_max of the (weighted, centred) Gram matrix.
    floor : float
        Its ``numerical_floor``.
    count : int
        Number of penalties.

    Examples
    --------
    >>> grid = default_alphas(largest=5.0, floor=1e-12)
    >>> len(grid), float(grid[0]), float(grid[-1])
    (30, 2e-12, 50.0)
    """
    count = check_count(count, "count")
    if not largest > 0:
        largest = 1.0  # a zero Gram matrix: every penalty gives the same answer
    low = max(2 * floor, EPS * largest)
    return np.geomspace(low, max(10 * largest, 10 * low), count)


def check_alphas(alphas: Alphas) -> Float[np.ndarray, " a"]:
    """Return the penalties as a float64 vector in the order given; the message names the offender."""
    try:
        values = np.array(alphas, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`alphas` must be numbers: got {alphas!r} ({error}).") from error
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"`alphas` must be a sequence of at least one penalty: got shape {values.shape}.")
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"every penalty of `alphas` must be finite and at least 0: got {values[i]:g} at position {i}. "
            "Use 0 for the minimum-norm fit without penalty."
        )
    return values


def check_alpha(alpha: float) -> float:
    """Return one penalty as a finite float of at least 0."""
    return check_number(alpha, "alpha", minimum=0.0)


def select_alpha(alphas: Float[np.ndarray, " a"], loo_mse: Float[np.ndarray, " a"], resolution: float = 0.0) -> int:
    """The position of the penalty with the smallest leave-one-out error; among equals, the largest penalty.

    Parameters
    ----------
    alphas : array (a,)
        Penalties, in any order, repeated or not.
    loo_mse : array (a,)
        Leave-one-out mean squared error of each; infinite where rounding forbids a judgement.
    resolution : float
        Errors below this are rounding: as good as zero, and equal to each other.

    Examples
    --------
    >>> select_alpha(np.array([0.1, 1.0, 10.0]), np.array([0.5, 0.4, 0.7]))
    1
    >>> select_alpha(np.array([0.1, 1.0, 10.0]), np.array([0.4, 0.4, np.inf]))   # a tie goes to the larger
    1
    """
    judged = np.isfinite(loo_mse)
    if not judged.any():
        raise ValueError(
            f"leave-one-out cannot choose among the {len(alphas)} penalties from {alphas.min():g} to "
            f"{alphas.max():g}: under each, some sample is fitted exactly within rounding (leverage 1), or "
            "there is 1 sample only. Add larger penalties, or fit with one fixed penalty."
        )
    best = max(float(loo_mse[judged].min()), resolution)
    equals = np.flatnonzero(judged & (loo_mse <= best * (1 + FLAT)))
    return int(equals[np.argmax(alphas[equals])])


PANEL = 2**25
"""Bytes of a panel in passes over an n × n matrix: beyond the cache, small beside any matrix that matters."""


LARGEST_GRAM = 1e150
"""Largest entry of a Gram matrix: its square, times the number of samples, is still finite."""


@dataclass(frozen=True)
class Weighing:
    """How a ridge problem on a Gram matrix was scaled by √w and reflected, and the way back.

    Attributes
    ----------
    y : array (n, t)
        S (y − ȳ), not reflected.
    roots : array (n,)
        √w.
    normal : array (n,) or None
        The unit vector u of the reflection, None without an intercept.
    y_mean : array (t,)
        Weighted mean of y; zero without an intercept.
    gram_mean : array (n,)
        S K w / Σw, from which the intercept follows.
    removed : float
        sᵀ S K S s / Σw, the size of what centring took away and so of the rounding it left.
    y_size : float
        Largest |y|, before centring.
    """

    y: Float[np.ndarray, "n t"]
    roots: Float[np.ndarray, " n"]
    normal: Float[np.ndarray, " n"] | None
    y_mean: Float[np.ndarray, " t"]
    gram_mean: Float[np.ndarray, " n"]
    removed: float
    y_size: float

    @property
    def weights(self) -> Float[np.ndarray, " n"]:
        """The weights w = s²."""
        return np.asarray(np.square(self.roots))

    def reflect(self, x: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
        """H x; x itself without an intercept."""
        if self.normal is None:
            return x
        return x - np.outer(2 * self.normal, self.normal @ x)

    def unscale(self, dual: Float[np.ndarray, "n t"]) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients a = S c and intercept b of f(x) = Σ a_i K(x, x_i) + b from the scaled ones c."""
        return self.roots[:, None] * dual, self.y_mean - self.gram_mean @ dual


def weigh_gram(
    gram: Float[np.ndarray, "n n"],
    y: Float[np.ndarray, "n t"],
    weights: Float[np.ndarray, " n"] | None,
    *,
    fit_intercept: bool,
    overwrite_gram: bool,
) -> tuple[Float[np.ndarray, "n n"], Weighing]:
    """Check the input, then scale and reflect the Gram matrix; in place if it may be overwritten.

    Returns
    -------
    array (n, n)
        H S K S H in Fortran order, lower triangle; with an intercept, row and column 0 are zero.
    Weighing
        The rest of the problem.
    """
    check_outputs(y)
    n = len(y)
    if gram.shape != (n, n):
        raise ValueError(f"`gram` must have one row and one column per output: got shape {gram.shape} for {n} outputs.")
    roots = np.sqrt(check_weights(weights, n))
    matrix = _fortran_lower(gram, overwrite=overwrite_gram)
    panels = [*blocks(n, block_size(n * matrix.itemsize, PANEL))]
    for columns in panels:  # NaN and infinity are found before any long work
        if not np.isfinite(matrix[columns.start :, columns]).all():
            check_finite(np.tril(matrix), "gram")
    check_gram_size(matrix.diagonal())
    if weights is not None:
        scale = roots.astype(matrix.dtype)
        for columns in panels:
            matrix[:, columns] *= scale[columns]
            matrix[:, columns] *= scale[:, None]
    y_mean = centre_of(y, roots) if fit_intercept else np.zeros(y.shape[1])
    scaled = roots[:, None] * centred(y, y_mean)
    y_size = float(np.abs(y).max())
    if not fit_intercept:
        return matrix, Weighing(scaled, roots, None, y_mean, np.zeros(n), 0.0, y_size)
    normal, mean, removed = _reflect_in_place(matrix, roots)
    return matrix, Weighing(scaled, roots, normal, y_mean, mean, removed, y_size)


def check_outputs(y: Float[np.ndarray, "n t"]) -> None:
    """Raise unless there is at least one sample with one output, and all are finite."""
    if y.size == 0:
        raise ValueError(f"`y` must hold at least one sample and one output: got shape {y.shape}.")
    check_finite(y, "y")


def check_gram_size(diagonal: Float[np.ndarray, " n"]) -> None:
    """Raise if a Gram matrix is so large that its squares overflow, or has overflowed already."""
    largest = float(np.abs(diagonal).max(initial=0.0)) if np.isfinite(diagonal).all() else math.inf
    if not largest < LARGEST_GRAM:
        raise ValueError(
            f"features and kernels must have squares below {LARGEST_GRAM:.0e}, so that sums of their products fit "
            f"float64: the largest on the diagonal of `gram` is {largest:.3g}. Scale the tokens down, for instance by "
            "scaling='standard'; if they are of ordinary size, use another activation, or dtype='float64'."
        )


def check_weights(weights: Float[np.ndarray, " n"] | None, n: int) -> Float[np.ndarray, " n"]:
    """Return the weights in float64, ones if there are none; all must be positive."""
    if weights is None:
        return np.ones(n)
    if weights.shape != (n,):
        raise ValueError(f"`weights` must have one entry per sample: got shape {weights.shape} for {n} samples.")
    check_finite(weights, "weights")
    if weights.min() <= 0:
        i = int(weights.argmin())
        raise ValueError(f"`weights` must be positive: got {weights[i]:g} for sample {i}. Drop samples of weight zero.")
    return weights.astype(np.float64)


def centre_of(y: Float[np.ndarray, "n t"], roots: Float[np.ndarray, " n"]) -> Float[np.ndarray, " t"]:
    """Weighted mean of each output."""
    weights = np.square(roots)
    # the second pass removes the rounding of the first
    mean = weights @ y / weights.sum()
    return np.asarray(mean + weights @ (y - mean) / weights.sum(), dtype=np.float64)


def centred(y: Float[np.ndarray, "n t"], mean: Float[np.ndarray, " t"]) -> Float[np.ndarray, "n t"]:
    """Outputs less their mean in float64, exactly zero for one that is constant within rounding."""
    left = np.asarray(y - mean, dtype=np.float64)
    left[:, np.abs(left).max(axis=0) <= 4 * EPS * np.abs(mean)] = 0.0
    return left


def _fortran_lower(gram: Float[np.ndarray, "n n"], *, overwrite: bool) -> Float[np.ndarray, "n n"]:
    """The matrix in Fortran order, itself if it may be overwritten. A C-ordered one is its own transpose."""
    if not gram.flags.f_contiguous and gram.flags.c_contiguous:
        gram = gram.T
    if overwrite and gram.flags.f_contiguous and gram.flags.writeable:
        return gram
    return np.array(gram, order="F")


def _reflect_in_place(
    matrix: Float[np.ndarray, "n n"], roots: Float[np.ndarray, " n"]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Replace K~ by H K~ H without row and column 0; return u, K~s/Σw and sᵀK~s/Σw. Costs two passes."""
    symv, syr2 = get_blas_funcs(("symv", "syr2"), (matrix,))
    length = np.linalg.norm(roots)
    direction = roots / length
    image = symv(1.0, matrix, direction.astype(matrix.dtype), lower=1).astype(np.float64)
    first = matrix[:, 0].astype(np.float64)
    normal = direction.copy()
    normal[0] += 1.0  # no cancellation: every root is positive
    size = np.linalg.norm(normal)
    normal /= size
    product = (image + first) / size  # K~ u
    update = 2 * (product - (normal @ product) * normal)
    syr2(-1.0, normal.astype(matrix.dtype), update.astype(matrix.dtype), lower=1, a=matrix, overwrite_a=1)
    matrix[:, 0] = 0.0
    return normal, image / length, float(direction @ image)


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
