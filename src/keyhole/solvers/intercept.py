"""The free intercept: one-dimensional problems that every loss solves exactly, one output at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

MAX_STEPS = 200
"""Guarded Newton steps: bisection alone would need about 60 for each factor 2^60 of the first bracket."""

ROUNDING = 4 * np.finfo(np.float64).eps
"""A weighted mean of slopes below this fraction of their mean size is zero to rounding."""


def monotone_root(
    derivatives: Callable[
        [Float[np.ndarray, "t"]], tuple[Float[np.ndarray, "t"], Float[np.ndarray, "t"], Float[np.ndarray, "t"]]
    ],
    start: Float[np.ndarray, "t"],
) -> Float[np.ndarray, "t"]:
    """Roots of t nondecreasing functions by Newton steps, guarded by a bracket that only shrinks.

    Parameters
    ----------
    derivatives : callable
        b (t,) → (function, derivative, size), each (t,): ``size`` is what the function's rounding error is
        relative to. The functions must change sign.
    start : array (t,)

    Returns
    -------
    array (t,)
        Where |function| ≤ 4 eps · size, or where the bracket cannot be cut further.

    Notes
    -----
    A Newton step is taken when it falls inside the bracket and the function has at least halved since the last
    step; otherwise the bracket is halved, or, while it is open, left in steps that double. Piecewise linear
    functions (Huber's derivative) are solved in finitely many steps, two or three from a warm start.

    Examples
    --------
    >>> import numpy as np
    >>> monotone_root(lambda b: (b**3 - 8, 3 * b**2, np.full(1, 8.0)), np.array([1.0]))
    array([2.])
    """
    b = start.astype(np.float64)
    low, high = np.full_like(b, -np.inf), np.full_like(b, np.inf)
    reach = np.maximum(1.0, np.abs(b))
    last = np.full_like(b, np.inf)
    for _ in range(MAX_STEPS):
        value, slope, size = derivatives(b)
        open_ = np.abs(value) > ROUNDING * size
        low = np.where(value < 0, b, low)
        high = np.where(value > 0, b, high)
        open_ &= np.nextafter(low, np.inf) < high
        if not open_.any():
            break
        newton = b - np.divide(value, slope, out=np.full_like(b, np.nan), where=slope > 0)
        middle = np.where(np.isfinite(low) & np.isfinite(high), 0.5 * (low + high), b - np.sign(value) * reach)
        good = (newton > low) & (newton < high) & (np.abs(value) <= 0.5 * last)
        reach = np.where(good, reach, 2.0 * reach)
        last = np.where(good, np.abs(value), np.inf)
        b = np.where(open_, np.where(good, newton, middle), b)
    return b


def weighted_quantile(
    points: Float[np.ndarray, "n t"], weights: Float[np.ndarray, "n"], level: Float[np.ndarray, "t"]
) -> Float[np.ndarray, "t"]:
    """Per column, the smallest point with at least ``level`` of the weight at or below it.

    It minimises b ↦ Σ_i weights_i |points_i − b| for level 1/2, and every tilted absolute loss for other levels.
    Cost: one sort, O(n log n) per column.

    Examples
    --------
    >>> import numpy as np
    >>> weighted_quantile(np.array([[3.0], [1.0], [2.0]]), np.array([0.2, 0.4, 0.4]), np.array([0.5]))
    array([2.])
    """
    order = np.argsort(points, axis=0, kind="stable")
    mass = np.cumsum(weights[order], axis=0)
    # a level above the whole mass by rounding means the last point that carries weight
    target = np.minimum(level, mass[-1])
    first = np.argmax(mass >= target, axis=0)
    return np.take_along_axis(np.take_along_axis(points, order, axis=0), first[None, :], axis=0)[0]
