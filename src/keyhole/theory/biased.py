"""The biased head distribution W = c W_0 + noise, and the norms of targets in its RKHS.

Functions of <x_0, x_i> have norms there that do not grow with the dimension.

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
dimension. Those with a > 0 pay the coefficient norm of μ^a Q, which grows like d^a, and are worth
it in low dimension only.

With constant coefficients alone powers of μ are limits only. For Σ_k c_k h_k(cμ) = E[σ(cμ+z) ψ(z)],
ψ = Σ_k c_k He_k, has the second derivative c² ψ(−cμ) φ(cμ); were that a polynomial, ψ would grow
like exp(z²/2), while Σ_k c_k² k! 4^k < ∞ allows it exp(z²/10) at most. Hence the `error` below. In
the whole space powers of μ have a norm, finite wherever :func:`keyhole.theory.rkhs_norm` finds one.
It grows with d, since the last digits of accuracy are what functions free of the dimension cannot
give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from scipy.special import roots_jacobi

from keyhole._checks import check_number
from keyhole.theory.activations import hermite_moments
from keyhole.theory.harmonics import power_moment
from keyhole.theory.moments import log_choose
from keyhole.theory.targets import PAIR, Factor, Polynomial, Term, symmetric_product

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
    """Bound the squared norm, in the RKHS of biased heads, of a function near the target.

    Every matrix of the target is split into a multiple of the identity and a rest, which makes F a
    sum of g(<x_0, x_i>) Q with Q free of <x_0, x_i>. Each g is fitted by the functions of this
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
    # the roots of the errors add up at worst: n groups may have error/n² each
    group_error = error / max(len(groups), 1) ** 2
    fits = [_fit(group, target.dim, group_error, mean) for group in groups]
    return BiasedNorm(norm=_squared_norm(groups, fits, target.dim), error=error, mean=mean)


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
        if a == 0:
            return self.rest
        correlation = Factor(PAIR, None)
        return self.rest.times(Term(coefficient=1.0, powers=((correlation, a),)))


def _groups(target: Polynomial) -> list[_Group]:
    """Write F as Σ_j g_j(μ) Q_j."""
    groups: dict[frozenset[tuple[Factor, int]], _Group] = {}
    for term in target.terms:
        # the term as a sum of parts μ^p Q: the product of the expansions of its factors
        parts = [(0, Term(coefficient=term.coefficient, powers=()))]
        for factor, power in term.powers:
            expansion = _expansion(factor, power, target.dim)
            parts = [(p + e, part.times(more)) for p, part in parts for e, more in expansion]

        # parts with the same Q share a polynomial g
        for power, part in parts:
            if part.monomial not in groups:
                rest = Term(coefficient=1.0, powers=part.powers)
                groups[part.monomial] = _Group(rest=rest, coefficients={})
            coefficients = groups[part.monomial].coefficients
            coefficients[power] = coefficients.get(power, 0.0) + part.coefficient
    return list(groups.values())


def _expansion(factor: Factor, power: int, dim: int) -> list[tuple[int, Term]]:
    """A factor's power as Σ μ^e · rest.

    <x_0, A x_i> = c μ + <x_0, (A − cI) x_i> with c = tr A / d.
    """
    if factor.kind != PAIR:
        return [(0, Term(coefficient=1.0, powers=((factor, power),)))]
    if factor.array is None:
        return [(power, Term(coefficient=1.0, powers=()))]

    # the binomial formula, without the terms that vanish
    scale = float(np.trace(factor.array)) / dim
    traceless = factor.array - scale * np.eye(dim)
    traceless.flags.writeable = False
    rest = Factor(PAIR, traceless)
    expansion = []
    for e in range(power + 1):
        weight = math.comb(power, e) * scale**e
        if weight == 0.0:
            continue
        if e == power:
            expansion.append((e, Term(coefficient=weight, powers=())))
        elif traceless.any():
            expansion.append((e, Term(coefficient=weight, powers=((rest, power - e),))))
    return expansion


def _squared_norm(groups: list[_Group], fits: list[np.ndarray], dim: int) -> float:
    """Σ_k k! 4^k Σ_rs |G_k,rs|² / (C(k,r) C(k+1,s)).

    Parts of one degree are added before the norm is taken.
    """
    # the parts μ^a Q of all groups, each with its coefficients over k; unused parts drop out
    parts = []
    for group, fit in zip(groups, fits, strict=True):
        for a, length in enumerate(_lengths(group, dim)):
            coefficients = fit[a] / length
            if coefficients.any():
                parts.append((group.raised(a), coefficients))

    # |Σ_a T_a|² = Σ_a <T_a, T_a> + 2 Σ_{a<b} <T_a, T_b>; parts of different degree are orthogonal
    total = 0.0
    for i, (first, first_coefficients) in enumerate(parts):
        square = float(first_coefficients @ first_coefficients)
        total += _squared_length(first, dim) * square
        for second, second_coefficients in parts[i + 1 :]:
            if second.degrees != first.degrees:
                continue
            overlap = symmetric_product(first, second, dim)
            n_shared = min(len(first_coefficients), len(second_coefficients))
            product = float(first_coefficients[:n_shared] @ second_coefficients[:n_shared])
            total += 2.0 * overlap * product
    return total


def _fit(group: _Group, dim: int, allowed: float, mean: float) -> Float[np.ndarray, "a k"]:
    """The cheapest b with E (Σ_ak b_ak h_k(cμ) μ^a/√w_ak − g(μ))² E Q² ≤ allowed."""
    # least squares on quadrature nodes, weighted by the distribution of μ
    allowed /= _mean_square(group.rest, dim)
    nodes, weights = _nodes(dim)
    root = np.sqrt(weights)
    target = root * sum(c * nodes**p for p, c in group.coefficients.items())
    features = fitted_functions(group, nodes, dim, mean)
    shape = features.shape[:2]
    design = root[:, None] * features.reshape(-1, len(nodes)).T

    # what lies in directions below rounding is out of reach
    left, scales, right = np.linalg.svd(design, full_matrices=False)
    is_reachable = scales > 1e-13 * scales[0]
    left = left[:, is_reachable]
    scales = scales[is_reachable]
    right = right[is_reachable]
    projected = left.T @ target
    unreachable = max(float(target @ target - projected @ projected), 0.0)

    def misfit(log_ridge: float) -> float:
        """The squared error of the ridge solution, which grows with the ridge."""
        ridge = math.exp(log_ridge)
        return unreachable + float(np.sum((projected * ridge / (scales**2 + ridge)) ** 2))

    # the cheapest solution is the one with the largest ridge whose error is allowed
    low = math.log(scales[-1] ** 2) - 30.0
    high = math.log(scales[0] ** 2) + 30.0
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
        if misfit(middle) <= allowed:
            low = middle
        else:
            high = middle
    solution = right.T @ (projected * scales / (scales**2 + math.exp(low)))
    return np.asarray(solution).reshape(shape)


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
        # the k whose polynomial kernel contains the degrees (r+a, s+a); moments have 1/√k! already
        has_degrees = (k >= r + a) & (k + 1 >= s + a)
        order = k[has_degrees].astype(np.float64)
        log_binomials = log_choose(order, r + a) + log_choose(order + 1, s + a)
        scale = np.exp(log_binomials / 2 - order * math.log(2))
        features[a, has_degrees] = moments[has_degrees] * scale[:, None] * mu**a / length
    return features


def _lengths(group: _Group, dim: int) -> list[float]:
    """|μ^a Q| for every a."""
    return [math.sqrt(_squared_length(group.raised(a), dim)) for a in range(group.extra + 1)]


@lru_cache(maxsize=1024)
def _squared_length(term: Term, dim: int) -> float:
    """|T|² of a term without its coefficient."""
    return symmetric_product(term, term, dim)


def _nodes(dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Quadrature for the distribution τ of <x_0, x_i>."""
    if dim == 1:
        return np.array([-1.0, 1.0]), np.array([0.5, 0.5])
    nodes, weights = roots_jacobi(120, (dim - 3) / 2, (dim - 3) / 2)
    return nodes, weights / weights.sum()


def _mean_square(rest: Term, dim: int) -> float:
    """E[Q²] where Q is a power of one direction, which is independent of μ; otherwise sup Q²."""
    supremum = 1.0
    for factor, power in rest.powers:
        if factor.array is not None:
            supremum *= float(np.linalg.norm(factor.array, 2)) ** (2 * power)
    if len(rest.powers) == 1:
        [(factor, power)] = rest.powers
        if factor.kind != PAIR:
            return supremum * power_moment(2 * power, 0, dim)
    return supremum
