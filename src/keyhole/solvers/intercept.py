"""The free intercept: one-dimensional convex problems, solved to rounding, one output at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

MAX_STEPS = 200
"""Guarded Newton steps; bisection alone needs about 60 once both ends are known."""


def monotone_root(derivatives: Callable[[float], tuple[float, float]], start: float, tolerance: float) -> float:
    """The root of a nondecreasing function by Newton steps, guarded by a bracket that only shrinks.

    Parameters
    ----------
    derivatives : callable
        b → (function, its derivative). The function must change sign.
    start : float
    tolerance : float
        A value of the function that is zero to rounding.

    Returns
    -------
    float
        Where |function| ≤ tolerance, or where the bracket cannot be cut further.

    Notes
    -----
    A Newton step is taken when it falls inside the bracket and the function has at least halved since the
    step before; otherwise the bracket is halved, or, while it is open, left in steps that double. Piecewise
    linear functions (the derivative of Huber's loss) take finitely many steps, one or two from a warm start.

    Examples
    --------
    >>> monotone_root(lambda b: (b**3 - 8, 3 * b**2), start=1.0, tolerance=1e-14)
    2.0
    """
    b, low, high, last = start, -math.inf, math.inf, math.inf
    reach = max(1.0, abs(start))
    for _ in range(MAX_STEPS):
        value, slope = derivatives(b)
        if abs(value) <= tolerance:
            break
        if value < 0.0:
            low = b
        else:
            high = b
        if math.nextafter(low, math.inf) >= high:
            break
        newton = b - value / slope if slope > 0.0 else math.nan
        if low < newton < high and abs(value) <= 0.5 * last:
            b, last = newton, abs(value)
        elif math.isfinite(low) and math.isfinite(high):
            b, last = 0.5 * (low + high), math.inf
        else:
            b, last = b - math.copysign(reach, value), math.inf
            reach *= 2.0
    return b


def weighted_quantile(points: Float[np.ndarray, " n"], weights: Float[np.ndarray, " n"], level: float) -> float:
    """The smallest point with at least ``level`` of the weight at or below it.

    With half of the weight as level it minimises b ↦ Σ_i weights_i |points_i − b|; other levels belong to
    tilted absolute losses. Cost: one sort, O(n log n).

    Examples
    --------
    >>> import numpy as np
    >>> weighted_quantile(np.array([3.0, 1.0, 2.0]), np.array([0.2, 0.4, 0.4]), 0.5)
    2.0
    """
    order = np.argsort(points)
    mass = np.cumsum(weights[order])
    # a level above the whole mass by rounding means the last point that carries weight
    first = int(np.searchsorted(mass, min(level, float(mass[-1]))))
    return float(points[order[first]])
