"""The biased head distribution W = c W_0 + noise.

Targets of <x_0, x_i> whose norm does not grow with the dimension.

With unit tokens the scores are u = cμ + z and v = cν + z', μ = <x_0, x_i>, z and z' standard normal
with correlation ρ. Expanding σ(cμ + z) in Hermite polynomials of z, for which E[He_j(z) He_k(z')] =
δ_jk k! ρ^k, gives

    E[σ(cμ+z) σ(cν+z')] = Σ_k ρ^k/k! · h_k(cμ) h_k(cν),
    h_k(m) = E[σ(m+z) He_k(z)] = E[σ^(k)(m+z)],

for ReLU h_0 = mΦ + φ, h_1 = Φ and h_k = (−1)^k He_{k−2} φ. With ρ = (1+u)(1+t)/4 and the factor 1+t
of the pair kernel, the k-th summand is h_k(cμ) h_k(cν) times a polynomial kernel in which u^r t^s
has the coefficient 4^{−k} C(k,r) C(k+1,s)/k!. So a function Σ_k h_k(cμ) G_k(x_0, x_i) with
polynomials G_k has

    |Σ_k h_k(cμ) G_k|²_H ≤ Σ_k k! 4^k Σ_rs |G_k,rs|² / (C(k,r) C(k+1,s)).

For a target g(μ) Q(x_0, x_i) we take G_k = Σ_a c_ka μ^a Q. The terms with a = 0 are free of the
dimension; those with a > 0 pay the coefficient norm of μ^a Q, which grows like d^a, and are worth
it in low dimension only.

With constant coefficients alone powers of μ are limits only. For Σ_k c_k h_k(cμ) = E[σ(cμ+z) ψ(z)],
ψ = Σ_k c_k He_k, has the second derivative c² ψ(−cμ) φ(cμ); were that a polynomial, ψ would grow
like exp(z²/2), while Σ_k c_k² k! 4^k < ∞ allows it exp(z²/10) at most. Hence the `error` below. In
the whole space powers of μ have a norm, finite wherever :func:`keyhole.theory.rkhs_norm` finds one;
it grows with d, since the last digits of accuracy are what functions free of the dimension cannot
give.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr, roots_jacobi

from keyhole._checks import check_number
from keyhole.theory.harmonics import power_moment
from keyhole.theory.moments import log_choose
from keyhole.theory.targets import KEY, PAIR, QUERY, Factor, Polynomial, Term, symmetric_product

_TERMS = 60
"""Functions h_k used: their weights shrink like 2^{−k}, so later ones do not matter in double
precision.
"""


@dataclass(frozen=True)
class BiasedNorm:
    """An explicit function of the biased RKHS near the target, and its squared norm.

    Attributes
    ----------
    norm : float
        An upper bound on |f|²_H of a function f with E (f − f*)² ≤ ``error`` under the sphere
        distribution, for any N.
    error : float
        The squared error that was allowed.
    mean : float
        c: heads have mean c·W_0.
    """

    norm: float
    error: float
    mean: float


def biased_norm_bound(
    target: Polynomial, error: float | int, mean: float | int = 1.0
) -> BiasedNorm:
    """Bound the squared norm of a function within ``error`` of the target.

    The norm is that of the RKHS of biased heads.

    Every matrix of the target is split into a multiple of the identity and a rest, which makes F a
    sum of g(<x_0, x_i>) Q with Q free of <x_0, x_i>; each g is fitted by the functions of this
    module, as cheaply as its share of the error allows.

    Parameters
    ----------
    target : Polynomial
    error : float
        Squared error E (f − f*)² allowed under the sphere distribution, larger than 0.
    mean : float
        c, the strength of the bias: ``GaussianHeads(mean=c)``.

    Returns
    -------
    BiasedNorm

    Notes
    -----
    Cost: a least-squares problem of a few hundred functions on 120 nodes for every Q.

    Examples
    --------
    >>> from keyhole.theory.targets import Correlation
    >>> from keyhole.theory import rkhs_norm
    >>> for dim in (8, 64, 512):
    ...     target = Correlation(q=3, dim=dim)
    ...     allowed = 0.01 * 15 / (dim**2 * (dim + 2) * (dim + 4))    # one percent of E F²
    ...     print(dim, f"{biased_norm_bound(target, allowed).norm:.1e}", f"{rkhs_norm(target):.1e}")
    8 9.1e+02 2.3e+04
    64 2.6e+03 1.1e+07
    512 4.2e+03 5.7e+09
    """
    error = check_number(error, "error", minimum=0.0, exclusive=True)
    mean = check_number(mean, "mean")
    groups = _groups(target)
    share = error / max(len(groups), 1) ** 2  # errors add up at worst, so their roots do
    fitted = [_fit(group, target.dim, share, mean) for group in groups]
    return BiasedNorm(_squared_norm(groups, fitted, target.dim), error, mean)


_SECONDS = 1e-4
"""Seconds of a symmetric product for each pair of states of its two terms: a fifth to twice that
was measured.
"""


def biased_norm_seconds(target: Polynomial) -> float:
    """Seconds that `biased_norm_bound` takes, roughly, from counting states; takes far less.

    >>> from keyhole.theory.notation import parse_target
    >>> short, long = (parse_target(f"token * rotated(0.5)^{p}", dim=8).target for p in (3, 12))
    >>> biased_norm_seconds(short) < 1, biased_norm_seconds(long) > 20
    (True, True)
    """
    states: Counter[tuple[int, int]] = Counter()
    for group in _groups(target):
        for term in (group.raised(a) for a in range(group.extra + 1)):
            states[term.degrees] += math.prod(power + 1 for _, power in term.powers)
    return _SECONDS * sum(count**2 for count in states.values()) / 2


def hermite_moments(m: Float[np.ndarray, " q"], n_terms: int) -> Float[np.ndarray, "k q"]:
    """h_k(m)/√k! for k < K, with h_k(m) = E[ReLU^(k)(m + z)].

    >>> h = hermite_moments(np.zeros(1), 5)[:, 0]
    >>> (h**2 * np.array([2 * np.pi, 4, 4 * np.pi, 1, 48 * np.pi])).round(12)    # κ's coefficients
    array([1., 1., 1., 0., 1.])
    """
    m = np.asarray(m, dtype=np.float64)
    density = np.exp(-m * m / 2) / math.sqrt(2 * math.pi)
    values = np.empty((max(n_terms, 2), len(m)))
    values[0] = m * ndtr(m) + density
    values[1] = ndtr(m)
    # He_j/√j! by its recurrence; h_k = (−1)^k He_{k−2} φ
    before, hermite = np.zeros_like(m), np.ones_like(m)
    for k in range(2, n_terms):
        values[k] = (-1) ** k * hermite * density / math.sqrt(k * (k - 1))
        j = k - 2
        before, hermite = hermite, (m * hermite - math.sqrt(j) * before) / math.sqrt(j + 1)
    return values[:n_terms]


@dataclass(frozen=True)
class _Group:
    """g(μ) · Q(x_0, x_i) with g(μ) = Σ_p coefficients[p] μ^p."""

    rest: Term
    coefficients: dict[int, float]

    @property
    def extra(self) -> int:
        """The highest power a of μ that G_k = Σ_a c_ka μ^a Q may use."""
        return max(self.coefficients) + 2

    def raised(self, a: int) -> Term:
        """μ^a Q."""
        return self.rest.times(Term(1.0, ((Factor(PAIR, None), a),))) if a else self.rest


def _groups(target: Polynomial) -> list[_Group]:
    """Write F as Σ_j g_j(μ) Q_j."""
    collected: dict[frozenset[tuple[Factor, int]], tuple[Term, dict[int, float]]] = {}
    for term in target.terms:
        parts = [(0, Term(term.coefficient, ()))]
        for factor, power in term.powers:
            expanded = _expansion(factor, power, target.dim)
            parts = [(p + e, part.times(more)) for p, part in parts for e, more in expanded]
        for power, part in parts:
            _, coefficients = collected.setdefault(part.monomial, (Term(1.0, part.powers), {}))
            coefficients[power] = coefficients.get(power, 0.0) + part.coefficient
    return [_Group(rest, coefficients) for rest, coefficients in collected.values()]


def _expansion(factor: Factor, power: int, dim: int) -> list[tuple[int, Term]]:
    """A factor's power as Σ μ^e · rest.

    <x_0, A x_i> = c μ + <x_0, (A − cI) x_i> with c = tr A / d.
    """
    if factor.kind != PAIR:
        return [(0, Term(1.0, ((factor, power),)))]
    if factor.array is None:
        return [(power, Term(1.0, ()))]
    scale = float(np.trace(factor.array)) / dim
    traceless = factor.array - scale * np.eye(dim)
    traceless.flags.writeable = False
    rest = Factor(PAIR, traceless)
    expanded = []
    for e in range(power + 1):
        weight = math.comb(power, e) * scale**e
        if weight != 0.0 and (e == power or traceless.any()):
            expanded.append((e, Term(weight, ((rest, power - e),) if power > e else ())))
    return expanded


def _squared_norm(groups: list[_Group], fitted: list[np.ndarray], dim: int) -> float:
    """Σ_k k! 4^k Σ_rs |G_k,rs|² / (C(k,r) C(k+1,s)).

    Parts of one degree are added before the norm is taken.
    """
    parts = [
        (group.raised(a), coefficients[a] / length)
        for group, coefficients in zip(groups, fitted, strict=True)
        for a, length in enumerate(_lengths(group, dim))
    ]
    total = 0.0
    for i, (first, of_first) in enumerate(parts):
        for second, of_second in parts[i:]:
            if second.degrees == first.degrees and of_first.any() and of_second.any():
                overlap = (
                    _squared_length(first, dim)
                    if second is first
                    else symmetric_product(first, second, dim)
                )
                both = min(len(of_first), len(of_second))
                total += (
                    (1.0 if second is first else 2.0)
                    * overlap
                    * float(of_first[:both] @ of_second[:both])
                )
    return total


def _fit(group: _Group, dim: int, allowed: float, mean: float) -> Float[np.ndarray, "a k"]:
    """The cheapest b with E (Σ_ak b_ak h_k(cμ) μ^a/√w_ak − g(μ))² E Q² ≤ allowed."""
    allowed /= _mean_square(group.rest, dim)
    nodes, weights = _nodes(dim)
    root = np.sqrt(weights)
    target = root * sum(c * nodes**p for p, c in group.coefficients.items())
    features = fitted_functions(group, nodes, dim, mean)
    shape = features.shape[:2]
    design = root[:, None] * features.reshape(-1, len(nodes)).T
    left, scales, right = np.linalg.svd(design, full_matrices=False)
    # what lies in directions below rounding is out of reach
    keep = scales > 1e-13 * scales[0]
    left, scales, right = left[:, keep], scales[keep], right[keep]
    projected = left.T @ target
    unreachable = max(float(target @ target - projected @ projected), 0.0)

    def misfit(log_ridge: float) -> float:
        ridge = math.exp(log_ridge)
        return unreachable + float(np.sum((projected * ridge / (scales**2 + ridge)) ** 2))

    low, high = math.log(scales[-1] ** 2) - 30.0, math.log(scales[0] ** 2) + 30.0
    if misfit(low) > allowed:
        raise ValueError(
            "`error` must leave room for rounding: no function of the biased space was found "
            f"nearer than {misfit(low):.1e} where {allowed:.1e} was asked for. Allow a larger "
            "error."
        )
    if misfit(high) <= allowed:
        return np.zeros(shape)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if misfit(middle) <= allowed else (low, middle)
    return np.asarray(right.T @ (projected * scales / (scales**2 + math.exp(low)))).reshape(shape)


def fitted_functions(
    group: _Group, mu: Float[np.ndarray, " q"], dim: int, mean: float
) -> Float[np.ndarray, "a k q"]:
    """h_k(cμ) μ^a/√w_ak for all k and a, w_ak = k! 4^k |μ^a Q|² / (C(k,r+a) C(k+1,s+a)).

    Zero where k is too low for μ^a Q. Multiplied by Q they have norm at most one in the biased
    space.
    """
    r, s = group.rest.degrees
    n_terms = _TERMS + max(r, s) + group.extra
    moments = hermite_moments(mean * mu, n_terms)
    k = np.arange(n_terms)
    features = np.zeros((group.extra + 1, n_terms, len(mu)))
    for a, length in enumerate(_lengths(group, dim)):
        able = (k >= r + a) & (k + 1 >= s + a)
        some = k[able].astype(np.float64)
        log = (log_choose(some, r + a) + log_choose(some + 1, s + a)) / 2 - some * math.log(2)
        features[a, able] = moments[able] * np.exp(log)[:, None] * mu**a / length
    return features


def _lengths(group: _Group, dim: int) -> list[float]:
    """|μ^a Q| for every a."""
    return [math.sqrt(_squared_length(group.raised(a), dim)) for a in range(group.extra + 1)]


@lru_cache(maxsize=1024)
def _squared_length(term: Term, dim: int) -> float:
    return symmetric_product(term, term, dim)


def _nodes(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Quadrature for the distribution τ of <x_0, x_i>."""
    if dim == 1:
        return np.array([-1.0, 1.0]), np.array([0.5, 0.5])
    nodes, weights = roots_jacobi(120, (dim - 3) / 2, (dim - 3) / 2)
    return nodes, weights / weights.sum()


def _mean_square(rest: Term, dim: int) -> float:
    """E[Q²] where Q does not depend on μ, otherwise sup Q².

    It does not if it has keys only, or the query only.
    """
    kinds = {factor.kind for factor, _ in rest.powers}
    sizes = [
        (float(np.linalg.norm(f.array, 2)) if f.array is not None else 1.0, p)
        for f, p in rest.powers
    ]
    supremum = math.prod(size ** (2 * power) for size, power in sizes)
    if len(rest.powers) == 1 and kinds <= {KEY, QUERY}:
        return supremum * power_moment(2 * rest.powers[0][1], 0, dim)
    return supremum
