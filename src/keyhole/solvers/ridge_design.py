"""Ridge from the design matrix itself, for fewer columns than samples: one p × p eigendecomposition."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole._checks import check_float_array
from keyhole.solvers.moments import DesignMoments
from keyhole.solvers.penalties import Alphas, check_alphas
from keyhole.solvers.principal import PrincipalAxes
from keyhole.solvers.ridge import RidgePath, mean_squares
from keyhole.solvers.weighted_gram import centre_of, centred, check_outputs, check_weights

RowBlocks: TypeAlias = Callable[[], Iterable[np.ndarray]]
"""Gives the row blocks (n_b, p) of the design, in order, every time it is called."""


@dataclass(frozen=True)
class DesignStatistics:
    """What ridge needs to know of a design matrix and its outputs, n of them, to judge its fits by leave-one-out.

    Attributes
    ----------
    moments : DesignMoments
        Sums over samples.
    y : array (n, t)
        y − ȳ.
    weights : array (n,)
        Sample weights.
    """

    moments: DesignMoments
    y: Float[np.ndarray, "n t"]
    weights: Float[np.ndarray, " n"]


def accumulate_design(
    row_blocks: RowBlocks,
    y: Float[np.ndarray, "n t"],
    *,
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
) -> DesignStatistics:
    """Sum the statistics of a design over blocks of rows.

    Each block is centred on its own mean before it is multiplied, and the scatter between blocks is added, so
    that a large common offset costs no digits.

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
    >>> accumulate_design(lambda: [x[:3], x[3:]], y).moments.gram[1, 0]
    np.float64(20.0)
    """
    check_outputs(y)
    w = check_weights(weights, len(y))
    y_mean = centre_of(y, np.sqrt(w)) if fit_intercept else np.zeros(y.shape[1])
    left = centred(y, y_mean)
    moments: DesignMoments | None = None
    for rows, block in _checked_rows(row_blocks, len(y)):
        if moments is None:
            moments = DesignMoments.empty(block.shape[1], y.shape[1], fit_intercept=fit_intercept)
        moments.add_rows(block, left[rows], None if weights is None else w[rows])
    assert moments is not None  # there is an output, so there was a block
    moments.y_mean += y_mean
    moments.y_size = float(np.abs(y).max())
    return DesignStatistics(moments, left, w)


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
    form = PrincipalAxes.of(statistics.moments, overwrite_gram=overwrite_gram)
    if grid is None:
        grid = form.default_alphas()
    complements, output_mse = _judge(form, statistics, grid, row_blocks)

    def solve(alpha: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        coef = form.coef(alpha)
        residuals = np.concatenate(
            [statistics.y[rows] - (b - form.means.astype(b.dtype)) @ coef for rows, b in _rows(row_blocks)]
        )
        return coef, form.intercept(coef), residuals

    return RidgePath(grid, output_mse, "design", form.floor, complements, form.resolution, solve)


def _judge(
    form: PrincipalAxes, statistics: DesignStatistics, alphas: Float[np.ndarray, " a"], row_blocks: RowBlocks
) -> tuple[Float[np.ndarray, "a n"], Float[np.ndarray, "a t"]]:
    """Complements of the leverages, and leave-one-out errors, in one pass over the rows."""
    n, t = statistics.y.shape
    complements, squares = np.empty((len(alphas), n)), np.zeros((len(alphas), t))
    for rows, block in _rows(row_blocks):
        w = statistics.weights[rows]
        complements[:, rows], residuals = form.judge_rows(block, statistics.y[rows], w, alphas)
        squares += [mean_squares(loo, w) * w.sum() for loo in residuals]
    return complements, squares / statistics.weights.sum()


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
