"""Exact spectrum of the MLP kernel on the flattened input, under the sphere distribution.

The input is a point on a product of N+1 spheres.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln, zeta

from keyhole._checks import check_count, check_number
from keyhole.theory.harmonics import harmonic_count
from keyhole.theory.moments import whole_coefficients
from keyhole.theory.spectrum import Spectrum

TRACE = 0.5
"""K(x, x) = κ(1) of the MLP kernel for unit tokens."""

MAX_LEVELS = 1000
"""Levels a spectrum may have: total degree 16 for many keys, more for few."""

_ORDERS = (200, 400, 800, 1600)
"""Terms of the power series that are summed until the rest is negligible. After the last of these
orders the rest is extrapolated.
"""

_ORDER = _ORDERS[-1]

_NEGLIGIBLE = 1e-16
"""The share of a sum that what is left out may have."""

_SCALE = 600.0
"""Coefficients of z^n are kept times _SCALE^n, which keeps 1/n! within floating point up to
_ORDER.
"""

Parts = tuple[int, ...]
"""Degrees of the tokens of a level in falling order, zeros left out."""


def mlp_spectrum(
    dim: int, n_keys: int, max_degree: int | None = None, tolerance: float | int = 0.05
) -> Spectrum:
    """Eigenvalues of the MLP kernel κ((Σ_i <x_i, x'_i> + 1)/(N+2)) under the sphere distribution.

    The input is a point on a product of N+1 spheres, not on one large sphere. Eigenfunctions are
    products of harmonics Π_i Y_{l_i}(x_i) over query and keys. The eigenvalue ::

        ν_l = E[κ((1 + Σ_i t_i)/(N+2)) Π_i P_{l_i}(t_i)]
            = Σ_n a_n (N+2)^{−n} n! [z^n] e^z Π_i B_{l_i}(z),
        B_l(z) = ∫ e^{zt} P_l(t) τ(dt) = z^l / (d (d+2) ⋯ (d+2l−2)) · 0F1(; l + d/2; z²/4),

    depends on the degrees only as a multiset, which is what a level is. All terms are positive.

    Parameters
    ----------
    dim, n_keys : int
        d and N.
    max_degree : int, optional
        List the levels of total degree Σ_i l_i ≤ max_degree. By default the smallest for which the
        listed levels hold all but ``tolerance`` of the trace.
    tolerance : float
        Share of the trace that may be left over when ``max_degree`` is None.

    Returns
    -------
    Spectrum
        ``degrees`` has shape (levels, parts): the degrees of the tokens in falling order, padded
        with zeros. The trace is κ(1) = 1/2.

    Notes
    -----
    Cost: one product of power series per level; levels are the partitions of the total degree.

    Examples
    --------
    >>> spectrum = mlp_spectrum(dim=8, n_keys=8, max_degree=2)
    >>> spectrum.degrees.tolist(), spectrum.multiplicities.tolist()
    ([[0, 0], [1, 0], [1, 1], [2, 0]], [1.0, 72.0, 2304.0, 315.0])
    """
    dim = check_count(dim, "dim")
    n_keys = check_count(n_keys, "n_keys")
    highest = highest_total_degree(dim, n_keys)

    # the levels up to a given total degree
    if max_degree is not None:
        degree = check_count(max_degree, "max_degree", minimum=0)
        if degree > highest:
            raise ValueError(
                f"`max_degree` is the total degree over tokens, at most {highest} for dim {dim} "
                f"and {n_keys} keys ({MAX_LEVELS} levels): got {degree}. What lies beyond the "
                "listed levels is `remainder`."
            )
        return _spectrum_up_to(dim, n_keys, degree)

    # or ever more levels, until enough of the trace is in them
    tolerance = check_number(tolerance, "tolerance", minimum=0.0, exclusive=True)
    for degree in range(highest + 1):
        spectrum = _spectrum_up_to(dim, n_keys, degree)
        if spectrum.remainder <= tolerance * TRACE:
            return spectrum
    raise ValueError(
        f"total degree {degree} leaves {spectrum.remainder / TRACE:.2e} of the trace, and "
        f"`tolerance` is {tolerance:.1e}. Raise `tolerance`, or choose `max_degree` and use "
        "`remainder`."
    )


@lru_cache(maxsize=256)
def highest_total_degree(dim: int, n_keys: int) -> int:
    """The largest total degree, at most 32, with no more than MAX_LEVELS levels up to it.

    Beyond 32 the eigenvalues would need more terms of the power series than are summed.

    >>> highest_total_degree(dim=8, n_keys=8), highest_total_degree(dim=8, n_keys=1)
    (16, 32)
    """
    n_levels = 1  # the level of degree zero
    for degree in range(1, 33):
        n_levels += _partition_count(degree, _largest_part(dim, degree), n_keys + 1)
        if n_levels > MAX_LEVELS:
            return degree - 1
    return 32


def _spectrum_up_to(dim: int, n_keys: int, max_degree: int) -> Spectrum:
    """The levels up to a total degree, the largest eigenvalue first."""
    levels = mlp_levels(dim, n_keys, max_degree)
    values = np.array([mlp_eigenvalue(dim, n_keys, parts) for parts in levels])
    multiplicities = np.array([_multiplicity(dim, n_keys, parts) for parts in levels])

    # the degrees of a level, filled up with zeros
    longest = max(1, max(len(parts) for parts in levels))
    degrees = np.zeros((len(levels), longest), dtype=np.int64)
    for row, parts in enumerate(levels):
        degrees[row, : len(parts)] = parts

    order = np.argsort(-values, kind="stable")
    return Spectrum(
        eigenvalues=values[order],
        multiplicities=multiplicities[order],
        degrees=degrees[order],
        trace=TRACE,
    )


def mlp_levels(dim: int, n_keys: int, max_degree: int) -> list[Parts]:
    """All multisets of token degrees that have eigenfunctions, by total up to ``max_degree``."""
    levels: list[Parts] = []
    for total in range(max_degree + 1):
        levels.extend(_partitions(total, _largest_part(dim, total), n_keys + 1))
    return levels


def _largest_part(dim: int, total: int) -> int:
    """The largest degree of a token where the degrees add up to ``total``."""
    # in dimension 1 there are no harmonics of degree 2 or more
    if dim == 1:
        return min(total, 1)
    return total


@lru_cache(maxsize=65536)
def _partition_count(total: int, largest: int, parts: int) -> int:
    """How many partitions `_partitions` has, without listing them.

    >>> _partition_count(6, 6, 6), _partition_count(6, 6, 2)
    (11, 4)
    """
    if total == 0:
        return 1
    if largest == 0 or parts == 0:
        return 0
    # those without the largest part, and those with it once more
    count = _partition_count(total, largest - 1, parts)
    if largest <= total:
        count += _partition_count(total - largest, largest, parts - 1)
    return count


def _partitions(total: int, largest: int, parts: int) -> Iterator[Parts]:
    """Partitions of ``total`` into at most ``parts`` parts, in falling order.

    No part is larger than ``largest``.
    """
    if total == 0:
        yield ()
        return
    if parts == 0:
        return
    for first in range(min(total, largest), 0, -1):
        for rest in _partitions(total - first, first, parts - 1):
            yield (first, *rest)


def _multiplicity(dim: int, n_keys: int, parts: Parts) -> float:
    """Ways to give the degrees to N+1 tokens, times the harmonics of each."""
    ways = math.comb(n_keys + 1, len(parts)) * math.factorial(len(parts))
    for degree in set(parts):
        ways //= math.factorial(parts.count(degree))
    return float(ways * math.prod(harmonic_count(dim, degree) for degree in parts))


@lru_cache(maxsize=65536)
def mlp_eigenvalue(dim: int, n_keys: int, parts: Parts) -> float:
    """ν_l for token degrees ``parts`` in falling order, zeros left out.

    >>> round(mlp_eigenvalue(dim=8, n_keys=8, parts=(1,)), 8)
    0.00332542
    """
    # terms rise to one maximum and from there on fall at least like 1/n²: what follows the last of
    # them adds less than n times that term. The first terms of a high degree are zero
    exponent = 2.5 + (n_keys + 1) * (dim - 1) / 2
    for order in _ORDERS:
        # terms fall like n^{−exponent} in the end, and more slowly before
        may_suffice = order ** (1 - exponent) <= _NEGLIGIBLE
        if not may_suffice and order < _ORDER:
            continue
        terms = _series_terms(dim, n_keys, parts, order)
        total = float(terms.sum())
        if total > 0.0 and terms[-1] * order <= _NEGLIGIBLE * total:
            return total
    return total + _sum_beyond(terms, exponent)


def _series_terms(dim: int, n_keys: int, parts: Parts, order: int) -> Float[np.ndarray, " n"]:
    """The terms of the sum for ν_l up to an even order n."""
    # e^z Π_i B_{l_i} is the series of the idle tokens, of degree zero, times that of the busy ones
    n_idle = n_keys + 1 - len(parts)
    idle_series = _idle_series(dim, n_keys, n_idle, order)
    busy_series = _busy_series(dim, n_keys, parts, order)
    coefficients = _product(idle_series, busy_series, order)
    return coefficients * _series_weights(order)


def _product(
    first: Float[np.ndarray, " i"], second: Float[np.ndarray, " j"], order: int
) -> Float[np.ndarray, " n"]:
    """The product of two power series up to an order."""
    return np.asarray(np.convolve(first, second)[: order + 1])


def _sum_beyond(terms: np.ndarray, exponent: float) -> float:
    """The sum beyond the last term; terms behave like n^{−p} (c_0 + c_1/n + …) over even n."""
    if terms[-1] * _ORDER <= _NEGLIGIBLE * float(terms.sum()):
        return 0.0

    # c_0, c_1, … by least squares on the second half of the terms, in units of n/_ORDER
    order = np.arange(_ORDER // 2, _ORDER + 1, 2)
    x = order / _ORDER
    powers = np.arange(8)
    design = x[:, None] ** -powers
    fitted = np.linalg.lstsq(design, terms[order] * x**exponent, rcond=None)[0]
    # Σ_{n = ORDER+2, +4, …} (n/ORDER)^{−p−j} as a Hurwitz zeta function
    sums = zeta(exponent + powers, _ORDER / 2 + 1) * (_ORDER / 2) ** (exponent + powers)
    return float(fitted @ sums)


@lru_cache(maxsize=len(_ORDERS))
def _series_weights(order: int) -> np.ndarray:
    """a_n n! / _SCALE^n for n up to an order."""
    n = np.arange(order + 1.0)
    log_factor = gammaln(n + 1) - n * math.log(_SCALE)
    return np.asarray(whole_coefficients(n) * np.exp(log_factor))


def _token_series(dim: int, n_keys: int, degree: int, order: int) -> np.ndarray:
    """Coefficients of B_l(z/(N+2)), times _SCALE^n."""
    j = np.arange((order - degree) // 2 + 1)
    n = degree + 2 * j
    log = gammaln(dim / 2) - gammaln(j + 1) - gammaln(dim / 2 + degree + j)
    series = np.zeros(order + 1)
    series[n] = np.exp(log + n * math.log(_SCALE / (2 * (n_keys + 2))))
    return series


@lru_cache(maxsize=256)
def _idle_series(dim: int, n_keys: int, n_idle: int, order: int) -> np.ndarray:
    """Coefficients of e^{z/(N+2)} B_0(z/(N+2))^n_idle, times _SCALE^n, by repeated squaring."""
    n = np.arange(order + 1.0)
    product = np.exp(n * math.log(_SCALE / (n_keys + 2)) - gammaln(n + 1))
    n_squarings = 0
    exponent = n_idle
    while exponent > 0:
        if exponent % 2 == 1:
            product = _product(product, _squared_series(dim, n_keys, n_squarings, order), order)
        n_squarings += 1
        exponent //= 2
    return product


@lru_cache(maxsize=256)
def _squared_series(dim: int, n_keys: int, n_squarings: int, order: int) -> np.ndarray:
    """Coefficients of B_0(z/(N+2)) squared that many times, times _SCALE^n."""
    if n_squarings == 0:
        return _token_series(dim, n_keys, 0, order)
    root = _squared_series(dim, n_keys, n_squarings - 1, order)
    return _product(root, root, order)


@lru_cache(maxsize=4096)
def _busy_series(dim: int, n_keys: int, parts: Parts, order: int) -> np.ndarray:
    """Coefficients of Π_i B_{l_i}(z/(N+2)) over the tokens of positive degree, times _SCALE^n."""
    if not parts:
        return np.ones(1)
    last = _token_series(dim, n_keys, parts[-1], order)
    if len(parts) == 1:
        return last
    # mostly in the cache: levels of lower total degree come first
    others = _busy_series(dim, n_keys, parts[:-1], order)
    return _product(others, last, order)


def mlp_level_powers(powers: Float[np.ndarray, "r s"], n_keys: int) -> dict[Parts, float]:
    """Power of f* = (1/N) Σ_i F in each level of the MLP, from the pair powers |P_kl F|² of F.

    Query and keys are tokens alike here: (k, l) and (l, k) share the level {k, l}. Only one key at
    a time has a positive degree, and the N of them add up as they do for attention: |P_kl F|²/N for
    l ≥ 1.
    """
    level_powers: dict[Parts, float] = {}
    for (k, l), power in np.ndenumerate(powers):  # noqa: E741
        if power <= 0:
            continue
        positive_degrees = [degree for degree in (k, l) if degree > 0]
        parts = tuple(sorted(positive_degrees, reverse=True))
        level_power = float(power)
        if l > 0:
            level_power /= n_keys
        level_powers[parts] = level_powers.get(parts, 0.0) + level_power
    return level_powers
