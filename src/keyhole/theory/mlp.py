"""Exact spectrum of the MLP kernel on the flattened input, under the sphere distribution.

A product of N+1 spheres.
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

_ORDER = 1600
"""Terms of the power series that are summed before the rest is extrapolated."""

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
    products of harmonics Π_i Y_{l_i}(x_i) over query and keys; the eigenvalue

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
    dim, n_keys = check_count(dim, "dim"), check_count(n_keys, "n_keys")
    if max_degree is not None:
        degree = check_count(max_degree, "max_degree", minimum=0)
        if degree > highest_total_degree(dim, n_keys):
            raise ValueError(
                "`max_degree` is the total degree over tokens, at most "
                f"{highest_total_degree(dim, n_keys)} for dim {dim} and {n_keys} keys "
                f"({MAX_LEVELS} levels): got {degree}. What lies beyond the listed levels is "
                "`remainder`."
            )
        return _mlp_levels(dim, n_keys, degree)
    tolerance = check_number(tolerance, "tolerance", minimum=0.0, exclusive=True)
    for degree in range(highest_total_degree(dim, n_keys) + 1):
        spectrum = _mlp_levels(dim, n_keys, degree)
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
    degree = 0
    while degree < 32 and len(mlp_levels(dim, n_keys, degree + 1)) <= MAX_LEVELS:
        degree += 1
    return degree


def _mlp_levels(dim: int, n_keys: int, max_degree: int) -> Spectrum:
    levels = mlp_levels(dim, n_keys, max_degree)
    values = np.array([mlp_eigenvalue(dim, n_keys, parts) for parts in levels])
    counts = np.array([_multiplicity(dim, n_keys, parts) for parts in levels])
    width = max(1, max(len(parts) for parts in levels))
    degrees = np.array([[*parts, *(0,) * (width - len(parts))] for parts in levels])
    order = np.argsort(-values, kind="stable")
    return Spectrum(values[order], counts[order], degrees[order], TRACE)


def mlp_levels(dim: int, n_keys: int, max_degree: int) -> list[Parts]:
    """All multisets of token degrees that have eigenfunctions, by total.

    The total is at most ``max_degree``.
    """
    largest = 1 if dim == 1 else max_degree
    return [
        parts
        for total in range(max_degree + 1)
        for parts in _partitions(total, min(total, largest), n_keys + 1)
    ]


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
    idle = n_keys + 1 - len(parts)
    terms = np.convolve(_idle_series(dim, n_keys, idle), _busy_series(dim, n_keys, parts))[
        : _ORDER + 1
    ]
    terms = terms * _series_weights()
    total = float(terms.sum())
    return total + _extrapolated(terms[-1], terms, 2.5 + (n_keys + 1) * (dim - 1) / 2, total)


def _extrapolated(last: float, terms: np.ndarray, exponent: float, total: float) -> float:
    """The sum beyond the last term, which behaves like n^{−p} (c_0 + c_1/n + …) over even n."""
    if last * _ORDER <= 1e-16 * total:
        return 0.0
    order = np.arange(_ORDER // 2, _ORDER + 1, 2)
    x = order / _ORDER
    powers = np.arange(8)
    design = x[:, None] ** -powers
    fitted = np.linalg.lstsq(design, terms[order] * x**exponent, rcond=None)[0]
    # Σ_{n = ORDER+2, +4, …} (n/ORDER)^{−p−j} as a Hurwitz zeta function
    sums = zeta(exponent + powers, _ORDER / 2 + 1) * (_ORDER / 2) ** (exponent + powers)
    return float(fitted @ sums)


@lru_cache(maxsize=1)
def _series_weights() -> np.ndarray:
    """a_n n! / _SCALE^n."""
    order = np.arange(_ORDER + 1.0)
    return np.asarray(
        whole_coefficients(order) * np.exp(gammaln(order + 1) - order * math.log(_SCALE))
    )


def _token_series(dim: int, n_keys: int, degree: int) -> np.ndarray:
    """Coefficients of B_l(z/(N+2)), times _SCALE^n."""
    j = np.arange((_ORDER - degree) // 2 + 1)
    order = degree + 2 * j
    log = gammaln(dim / 2) - gammaln(j + 1) - gammaln(dim / 2 + degree + j)
    series = np.zeros(_ORDER + 1)
    series[order] = np.exp(log + order * math.log(_SCALE / (2 * (n_keys + 2))))
    return series


@lru_cache(maxsize=256)
def _idle_series(dim: int, n_keys: int, idle: int) -> np.ndarray:
    """Coefficients of e^{z/(N+2)} B_0(z/(N+2))^idle, times _SCALE^n, by repeated squaring."""
    order = np.arange(_ORDER + 1.0)
    product = np.exp(order * math.log(_SCALE / (n_keys + 2)) - gammaln(order + 1))
    square = _token_series(dim, n_keys, 0)
    while idle:
        if idle & 1:
            product = np.convolve(product, square)[: _ORDER + 1]
        square = np.convolve(square, square)[: _ORDER + 1]
        idle >>= 1
    return np.asarray(product)


@lru_cache(maxsize=4096)
def _busy_series(dim: int, n_keys: int, parts: Parts) -> np.ndarray:
    """Coefficients of Π_i B_{l_i}(z/(N+2)) over the tokens of positive degree, times _SCALE^n."""
    if not parts:
        return np.ones(1)
    last = _token_series(dim, n_keys, parts[-1])
    if len(parts) == 1:
        return last
    return np.asarray(np.convolve(_busy_series(dim, n_keys, parts[:-1]), last)[: _ORDER + 1])


def mlp_level_powers(powers: Float[np.ndarray, "r s"], n_keys: int) -> dict[Parts, float]:
    """Power of f* = (1/N) Σ_i F in each level of the MLP, from the pair powers |P_kl F|² of F.

    Query and keys are tokens alike here: (k, l) and (l, k) share the level {k, l}. Only one key at
    a time has a positive degree, and the N of them add up as they do for attention: |P_kl F|²/N for
    l ≥ 1.
    """
    shares: dict[Parts, float] = {}
    for (k, l), power in np.ndenumerate(powers):  # noqa: E741
        if power > 0:
            parts = tuple(sorted((degree for degree in (k, l) if degree), reverse=True))
            shares[parts] = shares.get(parts, 0.0) + float(power) / (n_keys if l else 1)
    return shares
