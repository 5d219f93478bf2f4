"""The free intercept: one-dimensional convex problems, solved to rounding, one output at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

MAX_STEPS = 200
"""Guarded Newton steps; bisection alone needs about 60 once both ends are known."""


def monotone_roots(
    derivatives: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], start: Float[np.ndarray, " t"], tolerance: float
) -> Float[np.ndarray, " t"]:
    """The roots of t nondecreasing functions by Newton steps, each guarded by a bracket that only shrinks.

    Parameters
    ----------
    derivatives : callable
        b (t,) → (functions (t,), their derivatives (t,)); function k depends on b_k alone and must change sign.
        All are evaluated together: a call costs more than the arithmetic when samples are few.
    start : array (t,)
    tolerance : float
        A value of the function that is zero to rounding.

    Returns
    -------
    array (t,)
        Where |function| ≤ tolerance, or where the bracket cannot be cut further.

    Notes
    -----
    A Newton step is taken when it falls inside the bracket and the function has at least halved since the
    step before; otherwise the bracket is halved, or, while it is open, left in steps that double. Piecewise
    linear functions (the derivative of Huber's loss) take finitely many steps, one or two from a warm start.

    Examples
    --------
    >>> import numpy as np
    >>> monotone_roots(lambda b: (b**3 - [8, 27], 3 * b**2), start=np.ones(2), tolerance=1e-14)
    array([2., 3.])
    """
    roots = start.tolist()
    found = [False] * len(roots)
    low, high, last = [-math.inf] * len(roots), [math.inf] * len(roots), [math.inf] * len(roots)
    reach = [max(1.0, abs(b)) for b in roots]
    for _ in range(MAX_STEPS):
        values, slopes = derivatives(np.array(roots))
        for k, (value, slope) in enumerate(zip(values.tolist(), slopes.tolist(), strict=True)):
            if found[k]:
                continue
            b = roots[k]
            if value < 0.0:
                low[k] = b
            else:
                high[k] = b
            if abs(value) <= tolerance or math.nextafter(low[k], math.inf) >= high[k]:
                found[k] = True
                continue
            newton = b - value / slope if slope > 0.0 else math.nan
            if low[k] < newton < high[k] and abs(value) <= 0.5 * last[k]:
                roots[k], last[k] = newton, abs(value)
            elif math.isfinite(low[k]) and math.isfinite(high[k]):
                roots[k], last[k] = 0.5 * (low[k] + high[k]), math.inf
            else:
                roots[k], last[k] = b - math.copysign(reach[k], value), math.inf
                reach[k] *= 2.0
        if all(found):
            break
    return np.array(roots)


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
