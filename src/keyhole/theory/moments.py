"""The arc-cosine kernel as a power series, and sums over it that are exact where it is slow.

κ(ρ) = [√(1−ρ²) + (π − arccos ρ) ρ]/2π = Σ_n a_n ρ^n has a_0 = 1/2π, a_1 = 1/4, no other odd term,
and for even n = 2m ≥ 2 the positive coefficients a_n = Γ(m−½) / (2 π^{3/2} Γ(m) (2m−1) 2m), which
fall like n^{−5/2}.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln


def series_coefficients(order: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """a_n of κ(ρ) = Σ a_n ρ^n; for real n ≥ 2 the smooth function through the even coefficients.

    >>> series_coefficients(np.array([0.0, 1.0, 2.0, 4.0])) * np.array(
    ...     [2 * np.pi, 4, 4 * np.pi, 48 * np.pi]
    ... )
    array([1., 1., 1., 1.])
    """
    # Γ(m−½) / (2 π^{3/2} Γ(m) (2m−1) 2m) with m = n/2 ≥ 1
    half = np.maximum(order, 2.0) / 2
    gamma_ratio = np.exp(log_gamma_ratio(half - 0.5, 0.5))
    coefficients = gamma_ratio / (2 * math.pi**1.5 * (2 * half - 1) * 2 * half)
    # the first two have their own values
    coefficients = np.where(order == 1, 0.25, coefficients)
    return np.where(order == 0, 1 / (2 * math.pi), coefficients)


def whole_coefficients(order: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """a_n for whole n, the zeros at odd n > 1 included."""
    is_zero = (order > 1) & (order % 2 == 1)
    return np.where(is_zero, 0.0, series_coefficients(order))


def log_choose(n: Float[np.ndarray, " n"], k: int) -> Float[np.ndarray, " n"]:
    """The logarithm of C(n, k)."""
    return np.asarray(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def log_gamma_ratio(x: Float[np.ndarray, " n"], shift: float) -> Float[np.ndarray, " n"]:
    """The difference log Γ(x) − log Γ(x + shift) for x > 0, shift ≥ 0, accurate at any x.

    A difference of two log Γ loses x log x · ε; here x is first moved beyond 30 by the recurrence,
    and then Stirling's series is subtracted term by term.

    >>> float(np.exp(log_gamma_ratio(np.array([4.0]), 2.0))[0].round(12))    # 3!/5! = 1/20
    0.05
    """
    x = np.array(x, dtype=np.float64)
    log = np.zeros_like(x)

    # Γ(x)/Γ(x+shift) = (1 + shift/x) Γ(x+1)/Γ(x+1+shift), until x ≥ 30
    small = np.flatnonzero(x < 30)
    while len(small):
        log[small] += np.log1p(shift / x[small])
        x[small] += 1
        small = small[x[small] < 30]

    # the leading terms of Stirling's series, subtracted by hand, then its corrections
    y = x + shift
    log += (0.5 - x) * np.log1p(shift / x) - shift * np.log(y) + shift
    return np.asarray(log + _stirling(x) - _stirling(y))


def _stirling(x: np.ndarray) -> np.ndarray:
    """Stirling's log Γ(x) − [(x−½) log x − x + ½ log 2π] for x ≥ 30."""
    inverse = 1 / (x * x)
    return np.asarray((1 / 12 - inverse * (1 / 360 - inverse * (1 / 1260 - inverse / 1680))) / x)


def tail_nodes(start: int) -> tuple[Float[np.ndarray, " q"], Float[np.ndarray, " q"]]:
    """Nodes n and weights w with Σ_{m≥0} f(start+2m) = Σ w f(n), for smooth f like n^{−j/2}.

    Gregory's formula: the sum is half the integral plus differences of f at its lower end. The
    integral is taken in v = √(start/n), where f with an expansion in half-integer powers is a
    smooth function on (0, 1].
    """
    # half the integral over n = start/v², dn = −2 start/v³ dv, by Gauss and Legendre on (0, 1)
    nodes, weights = _gauss_legendre(120)
    v = (nodes + 1) / 2
    dv = weights / 2
    integral_nodes = start / v**2
    integral_weights = 0.5 * 2 * start / v**3 * dv

    # the differences at the lower end
    end_nodes = start + 2.0 * np.arange(_GREGORY)
    all_nodes = np.concatenate([end_nodes, integral_nodes])
    all_weights = np.concatenate([_gregory_weights(), integral_weights])
    return all_nodes, all_weights


_GREGORY = 9
"""Values at the lower end that Gregory's formula uses."""

# computing the nodes takes 5 ms, and every spectrum needs them
_gauss_legendre = lru_cache(maxsize=1)(np.polynomial.legendre.leggauss)


@lru_cache(maxsize=1)
def _gregory_weights() -> np.ndarray:
    """Weights of f_0, f_1, … in Σ_{m≥0} f_m − ∫_0^∞ f = Σ_j G_{j+1} Δ^j f_0.

    G are the Gregory coefficients.
    """
    # x / log(1+x) = Σ_j G_j x^j is the inverse of the series log(1+x)/x = Σ_j (−x)^j/(j+1)
    series = [Fraction((-1) ** j, j + 1) for j in range(_GREGORY + 1)]
    gregory = [Fraction(1)]
    for j in range(1, _GREGORY + 1):
        products = [series[i] * gregory[j - i] for i in range(1, j + 1)]
        gregory.append(-sum(products, Fraction(0)))

    # Δ^j f_0 = Σ_i (−1)^{j−i} C(j, i) f_i
    weights = [Fraction(0)] * _GREGORY
    for j in range(_GREGORY):
        for i in range(j + 1):
            weights[i] += gregory[j + 1] * (-1) ** (j - i) * math.comb(j, i)
    return np.array([float(weight) for weight in weights])


def series_nodes(start: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders n and weights w with Σ_n a_n f(n) = Σ w f(n).

    Orders up to ``start`` are single terms, those beyond the nodes of an integral.
    """
    tail, tail_weight = tail_nodes(start)
    order = np.concatenate([[0.0, 1.0], np.arange(2.0, start, 2.0), tail])
    weight = np.ones(len(order))
    weight[-len(tail) :] = tail_weight
    return order, weight * series_coefficients(order)


def log_moment(order: np.ndarray, dim: int) -> np.ndarray:
    """The logarithm of ∫ ((1+s)/2)^n τ(ds): the moments of a Beta(h, h) variable, h = (d−1)/2."""
    h = (dim - 1) / 2
    ratios = log_gamma_ratio(np.append(order + h, h), h)
    return np.asarray(ratios[:-1] - ratios[-1])


def harmonic_ratios(order: np.ndarray, dim: int, max_degree: int) -> np.ndarray:
    """r_k(n) for k = 0 … K, shape (K+1, nodes)."""
    ratios = np.empty((max_degree + 1, len(order)))
    ratios[0] = 1.0
    for i in range(max_degree):
        ratios[i + 1] = ratios[i] * (np.maximum(order - i, 0.0) / (order + i + dim - 1))
    return ratios
