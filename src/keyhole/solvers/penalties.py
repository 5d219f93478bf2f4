"""Penalties: which alphas to try, which of them rounding lets us judge, and which leave-one-out prefers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_count, check_number

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
