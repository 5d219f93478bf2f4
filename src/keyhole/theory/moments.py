"""The arc-cosine kernel as a power series.

And sums over it that stay exact where the series is slow.

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
    half = np.maximum(order, 2.0) / 2
    smooth = np.exp(log_gamma_ratio(half - 0.5, 0.5)) / (
        2 * math.pi**1.5 * (2 * half - 1) * 2 * half
    )
    return np.where(order == 0, 1 / (2 * math.pi), np.where(order == 1, 0.25, smooth))


def whole_coefficients(order: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """a_n for whole n, the zeros at odd n > 1 included."""
    return np.where((order > 1) & (order % 2 == 1), 0.0, series_coefficients(order))


def log_choose(n: Float[np.ndarray, " n"], k: int) -> Float[np.ndarray, " n"]:
    """The logarithm of C(n, k)."""
    return np.asarray(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def log_gamma_ratio(x: Float[np.ndarray, " n"], shift: float) -> Float[np.ndarray, " n"]:
    """The difference log Γ(x) − log Γ(x + shift) for x > 0, shift ≥ 0.

    Accurate to rounding at any x.

    A difference of two log Γ loses x log x · ε; here x is first moved beyond 30 by the recurrence,
    and then Stirling's series is subtracted term by term.

    >>> float(np.exp(log_gamma_ratio(np.array([4.0]), 2.0))[0].round(12))    # 3!/5! = 1/20
    0.05
    """
    x = np.asarray(x, dtype=np.float64)
    log = np.zeros_like(x)
    while (x < 30).any():
        small = x < 30
        log = np.where(small, log + np.log1p(shift / x), log)
        x = np.where(small, x + 1, x)
    y = x + shift
    log += (0.5 - x) * np.log1p(shift / x) - shift * np.log(y) + shift
    return np.asarray(log + _stirling(x) - _stirling(y))


def _stirling(x: np.ndarray) -> np.ndarray:
    """Stirling's log Γ(x) − [(x−½) log x − x + ½ log 2π] for x ≥ 30."""
    inverse = 1 / (x * x)
    return np.asarray((1 / 12 - inverse * (1 / 360 - inverse * (1 / 1260 - inverse / 1680))) / x)


def tail_nodes(start: int) -> tuple[Float[np.ndarray, " q"], Float[np.ndarray, " q"]]:
    """Nodes n and weights w with Σ_{m≥0} f(start+2m) = Σ w f(n).

    For smooth f that falls like n^{−j/2}.

    Gregory's formula: the sum is half the integral plus differences of f at its lower end. The
    integral is taken in v = √(start/n), where f with an expansion in half-integer powers is a
    smooth function on (0, 1].
    """
    nodes, weights = _gauss_legendre(120)
    v, dv = (nodes + 1) / 2, weights / 2
    integral_nodes = start / v**2
    integral_weights = 0.5 * 2 * start / v**3 * dv
    ends, end_weights = start + 2.0 * np.arange(_GREGORY), _gregory_weights()
    return np.concatenate([ends, integral_nodes]), np.concatenate([end_weights, integral_weights])


_GREGORY = 9
_gauss_legendre = lru_cache(maxsize=1)(
    np.polynomial.legendre.leggauss
)  # 5 ms, and asked for by every spectrum


@lru_cache(maxsize=1)
def _gregory_weights() -> np.ndarray:
    """Weights of f_0, f_1, … in Σ_{m≥0} f_m − ∫_0^∞ f = Σ_j G_{j+1} Δ^j f_0.

    G are the Gregory coefficients.
    """
    # x / log(1+x) = Σ_j G_j x^j
    series = [Fraction((-1) ** j, j + 1) for j in range(_GREGORY + 1)]
    inverse = [Fraction(1)]
    for j in range(1, _GREGORY + 1):
        inverse.append(-sum((series[i] * inverse[j - i] for i in range(1, j + 1)), Fraction(0)))
    weights = [Fraction(0)] * _GREGORY
    for j in range(_GREGORY):
        for i in range(j + 1):
            weights[i] += inverse[j + 1] * (-1) ** (j - i) * math.comb(j, i)
    return np.array([float(w) for w in weights])


def pair_eigenvalues(dim: int, max_degree: int) -> Float[np.ndarray, "k l"]:
    """μ_kl = ∫∫ κ((1+s)(1+t)/4) (1+t) P_k(s) P_l(t) τ(ds) τ(dt), for k, l ≤ K.

    By Rodrigues' formula ∫ ((1+s)/2)^n P_k(s) τ(ds) = j_n r_k(n), with j_n = Π_{i<n}
    (d−1+2i)/(2(d−1+i)) and r_k(n) = Π_{i<k} (n−i)/(n+i+d−1), so that with κ = Σ a_n ρ^n

        μ_kl = 2 Σ_n a_n j_n j_{n+1} r_k(n) r_l(n+1).

    Every term is positive, so every eigenvalue has full relative accuracy at any d and degree. The
    terms fall like n^{−d−3/2} only; beyond 10 K the sum over n is done as an integral with end
    corrections.

    Examples
    --------
    >>> pair_eigenvalues(dim=8, max_degree=1).round(6)
    array([[0.237284, 0.03788 ],
           [0.010545, 0.002486]])
    """
    if dim == 1:  # tokens are ±1, the pair kernel is 1 at (1, 1), 1/π at (−1, 1) and 0 at t = −1
        of_query = (1.0 + (-1.0) ** np.arange(max_degree + 1) / math.pi) / 4
        return np.tile(of_query[:, None], (1, max_degree + 1))
    order, weight = _pair_nodes(dim, max_degree)
    return np.asarray(
        (harmonic_ratios(order, dim, max_degree) * weight)
        @ harmonic_ratios(order + 1, dim, max_degree).T
    )


def largest_of_degree(dim: int, degree: int) -> tuple[float, float]:
    """μ_k0 and μ_0k for one degree k and d ≥ 2, without the table below them."""
    order, weight = _pair_nodes(dim, degree)
    of_query, of_key = (
        float(weight @ harmonic_ratios(n, dim, degree)[degree]) for n in (order, order + 1)
    )
    return of_query, of_key


def _pair_nodes(dim: int, max_degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders n, and weights 2 a_n j_n j_{n+1}, of the sum for eigenvalues up to a degree."""
    order, weight = series_nodes(2 * (5 * max_degree + 2 * dim + 100))
    return order, 2 * weight * np.exp(log_moment(order, dim) + log_moment(order + 1, dim))


def series_nodes(start: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders n and weights w with Σ_n a_n f(n) = Σ w f(n).

    Single terms up to ``start``, then an integral.
    """
    tail, tail_weight = tail_nodes(start)
    order = np.concatenate([[0.0, 1.0], np.arange(2.0, start, 2.0), tail])
    weight = np.ones(len(order))
    weight[-len(tail) :] = tail_weight
    return order, weight * series_coefficients(order)


def log_moment(order: np.ndarray, dim: int) -> np.ndarray:
    """The logarithm of ∫ ((1+s)/2)^n τ(ds): the moments of a Beta(h, h) variable, h = (d−1)/2."""
    h = (dim - 1) / 2
    at_zero = log_gamma_ratio(np.array([h]), h)
    return np.asarray(log_gamma_ratio(order + h, h) - at_zero)


def harmonic_ratios(order: np.ndarray, dim: int, max_degree: int) -> np.ndarray:
    """r_k(n) for k = 0 … K, shape (K+1, nodes)."""
    ratios = np.empty((max_degree + 1, len(order)))
    ratios[0] = 1.0
    for i in range(max_degree):
        ratios[i + 1] = ratios[i] * (np.maximum(order - i, 0.0) / (order + i + dim - 1))
    return ratios
