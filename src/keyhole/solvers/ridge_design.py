"""Ridge from the design matrix itself, for fewer columns than samples: one p × p eigendecomposition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float
from scipy.linalg import eigh

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole._checks import check_finite, check_float_array
from keyhole.solvers.grams import add_outer
from keyhole.solvers.penalties import EPS, Alphas, check_alphas, default_alphas, numerical_floor
from keyhole.solvers.ridge import RidgePath, leave_one_out, mean_squares, rounding_of_squares
from keyhole.solvers.weighted_gram import centre_of, centred, check_outputs, check_weights

RowBlocks: TypeAlias = Callable[[], Iterable[np.ndarray]]
"""Gives the row blocks (n_b, p) of the design, in order, every time it is called."""


@dataclass(frozen=True)
class DesignStatistics:
    """What ridge needs to know of a design matrix to find its weights: sums over samples.

    Attributes
    ----------
    gram : array (p, p)
        Σ w (φ − φ̄)(φ − φ̄)ᵀ in float64, Fortran order, lower triangle; φ̄ = 0 without an intercept.
    cross : array (p, t)
        Σ w (φ − φ̄)(y − ȳ)ᵀ.
    means, y_mean : arrays (p,) and (t,)
        φ̄ and ȳ.
    y : array (n, t)
        y − ȳ.
    weights : array (n,)
        Sample weights.
    fit_intercept : bool
        Whether an intercept was allowed for.
    rounding : float
        Unit of rounding of the products.
    """

    gram: Float[np.ndarray, "p p"]
    cross: Float[np.ndarray, "p t"]
    means: Float[np.ndarray, " p"]
    y_mean: Float[np.ndarray, " t"]
    y: Float[np.ndarray, "n t"]
    weights: Float[np.ndarray, " n"]
    fit_intercept: bool
    rounding: float


def accumulate_design(
    row_blocks: RowBlocks,
    y: Float[np.ndarray, "n t"],
    *,
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
) -> DesignStatistics:
    """Sum the statistics of a design over blocks of rows.

    Each block is centred on its own mean before it is multiplied, and the scatter between blocks is added at
    the end, so that a large common offset costs no digits.

    Parameters
    ----------
    row_blocks : callable
        Called once; gives arrays (n_b, p) in order, float32 or float64, never modified. Products are made in
        the dtype of the block and summed in float64.
    y : array (n, t)
        Outputs of all samples.
    fit_intercept : bool
        Whether the fit will have an unpenalised intercept.
    weights : array (n,), optional
        Positive sample weights.

    Notes
    -----
    Cost: np² operations; one p × p matrix and one centred copy of a block.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.arange(8.0).reshape(4, 2), np.ones((4, 1))
    >>> accumulate_design(lambda: [x[:3], x[3:]], y).gram[1, 0]
    np.float64(20.0)
    """
    check_outputs(y)
    w = check_weights(weights, len(y))
    y_mean = centre_of(y, np.sqrt(w)) if fit_intercept else np.zeros(y.shape[1])
    left = centred(y, y_mean)
    gram, cross, rounding = np.zeros((0, 0)), np.zeros((0, y.shape[1])), EPS
    block_means: list[np.ndarray] = []
    block_weights: list[float] = []
    block_targets: list[np.ndarray] = []
    for rows, block in _checked_rows(row_blocks, len(y)):
        if not block_means:
            gram = np.zeros((block.shape[1], block.shape[1]), order="F")
            cross = np.zeros((block.shape[1], y.shape[1]))
        rounding = max(rounding, float(np.finfo(block.dtype).eps))
        scaled, mean = _scaled_rows(block, w[rows], fit_intercept)
        add_outer(gram, scaled.T)
        cross += scaled.T @ (np.sqrt(w[rows])[:, None] * left[rows]).astype(block.dtype)
        block_means.append(mean)
        block_weights.append(float(w[rows].sum()))
        block_targets.append(w[rows] @ left[rows])
    means = np.average(block_means, axis=0, weights=block_weights)
    if fit_intercept:
        between = (np.asarray(block_means) - means).T
        add_outer(gram, between * np.sqrt(block_weights))
        cross += between @ np.asarray(block_targets)
    return DesignStatistics(gram, cross, means, y_mean, left, w, fit_intercept, rounding)


def ridge_design_path(
    design: Float[np.ndarray, "n p"],
    y: Float[np.ndarray, "n t"],
    alphas: Alphas | None = None,
    *,
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> RidgePath:
    """Ridge on a design matrix for a whole path of penalties, with exact leave-one-out; meant for p < n.

    The same numbers as ``ridge_gram_path(design @ design.T, …)``, from one p × p eigendecomposition.

    Parameters
    ----------
    design : array (n, p)
        Φ, float32 or float64.
    y : array (n, t)
        Outputs.
    alphas : sequence of float, optional
        Penalties, at least 0, in any order; by default ``default_alphas``.
    fit_intercept : bool
        Whether to fit an unpenalised intercept.
    weights : array (n,), optional
        Positive sample weights.
    memory_budget : int
        Bound in bytes on any temporary other than p × p matrices.

    Returns
    -------
    RidgePath
        ``coef`` of its solutions are the weights v of f(x) = φ(x)ᵀv + b.

    Notes
    -----
    Cost: 3np² + 9p³ operations, then 2np(1 + t) for each penalty.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.random.default_rng(0).standard_normal((50, 2))
    >>> path = ridge_design_path(x, x @ [[3.0], [-1.0]] + 2, alphas=[1.0, 1e-6])
    >>> fit = path.solution()
    >>> fit.alpha, np.round(fit.coef.ravel(), 4), np.round(fit.intercept, 4)
    (1e-06, array([ 3., -1.]), array([2.]))
    """
    count = 30 if alphas is None else len(alphas)
    size = block_size(8 * (6 * design.shape[1] + 2 * count * y.shape[1]), memory_budget)

    def row_blocks() -> Iterator[np.ndarray]:
        return (design[rows] for rows in blocks(len(design), size))

    statistics = accumulate_design(row_blocks, y, fit_intercept=fit_intercept, weights=weights)
    return ridge_statistics_path(statistics, row_blocks, alphas, overwrite_gram=True)


def ridge_statistics_path(
    statistics: DesignStatistics,
    row_blocks: RowBlocks,
    alphas: Alphas | None = None,
    *,
    overwrite_gram: bool = False,
) -> RidgePath:
    """Ridge for a whole path of penalties from sums over samples and one more pass over the rows.

    Parameters
    ----------
    statistics : DesignStatistics
        From ``accumulate_design``.
    row_blocks : callable
        Gives the same rows again: called once for the leave-one-out errors, once for each solution.
    alphas : sequence of float, optional
        Penalties, at least 0, in any order; by default ``default_alphas``.
    overwrite_gram : bool
        Whether the memory of ``statistics.gram`` may be used.

    Notes
    -----
    Temporaries are a few times the size of a block of rows.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.arange(10.0).reshape(5, 2) ** 2, np.arange(5.0)[:, None]
    >>> rows = lambda: iter([x[:3], x[3:]])
    >>> ridge_statistics_path(accumulate_design(rows, y), rows, [1.0]).loo_mse.shape
    (1,)
    """
    grid = None if alphas is None else check_alphas(alphas)
    n, p = len(statistics.y), len(statistics.means)
    check_finite(statistics.gram, "design")
    values, vectors = eigh(statistics.gram, lower=True, driver="evd", overwrite_a=overwrite_gram, check_finite=False)
    largest = float(max(values[-1], 0.0))
    floor = numerical_floor(largest, max(n, p), statistics.rounding)
    if grid is None:
        grid = default_alphas(largest, floor)
    form = _Principal(statistics, np.maximum(values, 0.0), vectors, floor, statistics.rounding * largest)
    complements, output_mse = form.judge(grid, row_blocks)

    def solve(alpha: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        coef = form.coef(alpha)
        intercept = statistics.y_mean - statistics.means @ coef
        residuals = np.concatenate(
            [statistics.y[rows] - (b - statistics.means.astype(b.dtype)) @ coef for rows, b in _rows(row_blocks)]
        )
        return coef, intercept, residuals

    resolution = rounding_of_squares(float(np.abs(statistics.y + statistics.y_mean).max()), statistics.rounding)
    return RidgePath(grid, output_mse, "design", floor, complements, resolution, solve)


@dataclass(frozen=True)
class _Principal:
    """The design along its principal axes. Eigenvalues below the floor are zeros to a penalty below it."""

    statistics: DesignStatistics
    values: Float[np.ndarray, " p"]
    axes: Float[np.ndarray, "p p"]
    floor: float
    noise: float

    def inverse(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "p a"]:
        """1 / (λ + alpha), and 0 for an eigenvalue that a penalty below the floor has to take for zero."""
        values = self.values[:, None]
        seen = (values > self.floor) | ((alphas >= self.floor) & (alphas > 0))
        return np.asarray(np.divide(1.0, values + alphas, out=np.zeros(seen.shape), where=seen))

    def coef(self, alpha: float) -> Float[np.ndarray, "p t"]:
        scores = self.inverse(np.array([alpha])) * (self.axes.T @ self.statistics.cross)
        return np.asarray(self.axes @ scores)

    def judge(self, alphas: Float[np.ndarray, " a"], row_blocks: RowBlocks) -> tuple[np.ndarray, np.ndarray]:
        """Complements of the leverages (a, n), and leave-one-out errors (a, t), in one pass over the rows."""
        s = self.statistics
        n, t = s.y.shape
        coefs = self.inverse(alphas)[:, :, None] * (self.axes.T @ s.cross)[:, None, :]
        complements, squares = np.empty((len(alphas), n)), np.zeros((len(alphas), t))
        for rows, block in _rows(row_blocks):
            w = s.weights[rows]
            scores = (block - s.means.astype(block.dtype)) @ self.axes.astype(block.dtype, copy=False)
            scores = scores.astype(np.float64, copy=False)
            fitted = (scores @ coefs.reshape(len(coefs), -1)).reshape(len(w), len(alphas), t)
            complements[:, rows] = self._complements(np.square(scores) * w[:, None], alphas, w).T
            for i in range(len(alphas)):
                loo = leave_one_out(s.y[rows] - fitted[:, i], complements[i, rows])
                squares[i] += mean_squares(loo, w) * w.sum()
        return complements, squares / s.weights.sum()

    def _complements(
        self, squares: Float[np.ndarray, "b p"], alphas: Float[np.ndarray, " a"], w: Float[np.ndarray, " b"]
    ) -> Float[np.ndarray, "b a"]:
        """1 − h: what no axis explains, plus what the penalty keeps unexplained; 0 if rounding hides it.

        ``squares`` are the squared scores of the samples on each axis, so squares/λ is the share of a sample
        that a fit without penalty explains by it.
        """
        mean_share = w / self.statistics.weights.sum() if self.statistics.fit_intercept else 0 * w
        known = self.values > self.floor
        shares = np.divide(1.0, self.values, out=np.zeros(len(known)), where=known)
        unexplained = np.maximum(1 - mean_share - squares @ shares, 0.0)
        inverse = self.inverse(alphas)
        # below the floor λ is too small to divide by: those axes were not counted as explained above
        kept = np.where(known[:, None], shares[:, None] * alphas * inverse, -inverse)
        kept = unexplained[:, None] + squares @ kept
        hidden = 4 * self.statistics.rounding + squares @ (2 * self.noise * np.square(shares))
        return np.where(hidden[:, None] > 0.1 * kept, 0.0, kept)


def _scaled_rows(
    block: Float[np.ndarray, "b p"], weights: Float[np.ndarray, " b"], centre: bool
) -> tuple[np.ndarray, np.ndarray]:
    """√w (φ − mean) of a block in its own dtype, and the mean in float64 (zeros unless asked for)."""
    roots = np.sqrt(weights).astype(block.dtype)[:, None]
    if not centre:
        return block * roots, np.zeros(block.shape[1])
    shares = (weights / weights.sum()).astype(block.dtype)
    mean = shares @ block
    left = block - mean
    mean = mean.astype(np.float64) + (shares @ left).astype(np.float64)
    left *= roots
    return left, mean


def _rows(row_blocks: RowBlocks) -> Iterator[tuple[slice, np.ndarray]]:
    """Blocks with the rows they hold."""
    start = 0
    for block in row_blocks():
        block = check_float_array(block, "row_blocks")
        yield slice(start, start + len(block)), block
        start += len(block)


def _checked_rows(row_blocks: RowBlocks, n: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Blocks with the rows they hold; raises if they do not make up n rows of one width."""
    width, stop = None, 0
    for rows, block in _rows(row_blocks):
        width = block.shape[-1] if width is None else width
        if block.ndim != 2 or block.shape[1] != width or width == 0:
            raise ValueError(
                f"every block of rows must have shape (n_b, p) with the same p ≥ 1: the block of rows "
                f"{rows.start} to {rows.stop} has shape {block.shape}, the first had p = {width}."
            )
        stop = rows.stop
        if stop <= n:
            yield rows, block
    if stop != n:
        raise ValueError(f"the blocks of rows must hold one row per output: got {stop} rows for {n} outputs.")
