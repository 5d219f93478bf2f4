"""Spherical harmonics in the query and in a key: how much of a target lies in each degree.

P_k is the Gegenbauer polynomial of degree k on the unit sphere of R^d with P_k(1) = 1, N_k the
number of harmonics of degree k, τ the distribution of <u, v> for independent uniform u, v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln

from keyhole._checks import check_count
from keyhole.theory.targets import KEY, PAIR, QUERY, Polynomial, Term, joinings


def harmonic_count(dim: int, degree: int) -> int:
    """N_k = C(k+d−1, k) − C(k+d−3, k−2).

    The number of harmonics of degree k on the sphere of R^d, exactly.

    Examples
    --------
    >>> [harmonic_count(dim=3, degree=k) for k in range(4)]
    [1, 3, 5, 7]
    >>> [harmonic_count(dim=1, degree=k) for k in range(4)]    # on {−1, 1} only 1 and x
    [1, 1, 0, 0]
    """
    dim = check_count(dim, "dim")
    degree = check_count(degree, "degree", minimum=0)
    if dim == 1:
        return int(degree < 2)
    count = math.comb(degree + dim - 1, degree)
    if degree >= 2:
        count -= math.comb(degree + dim - 3, degree - 2)
    return count


def _shared(p: int, q: int, degree: int, dim: int) -> float:
    """N_k ∫ t^p P_k dτ ∫ t^q P_k dτ, in logarithms because N_k alone may overflow."""
    log_moments = _log_power_moment(p, degree, dim) + _log_power_moment(q, degree, dim)
    if log_moments == -math.inf:
        return 0.0
    return math.exp(log_moments + math.log(harmonic_count(dim, degree)))


def power_moment(power: int, degree: int, dim: int) -> float:
    """∫ t^p P_k(t) τ(dt), which is zero unless p − k is even and non-negative.

    With j = (p−k)/2 it is p! Γ(d/2) / (2^p j! Γ(d/2+k+j)): no cancellation at any degree.

    >>> round(power_moment(power=2, degree=0, dim=5), 12)    # E <u,v>² = 1/d
    0.2
    """
    return math.exp(_log_power_moment(power, degree, dim))


def _log_power_moment(power: int, degree: int, dim: int) -> float:
    """The logarithm of `power_moment`, −∞ where that is zero."""
    has_no_harmonics = dim == 1 and degree > 1
    if power < degree or (power - degree) % 2 or has_no_harmonics:
        return -math.inf
    j = (power - degree) // 2
    half = dim / 2
    log = (
        gammaln(power + 1)
        - power * math.log(2)
        - gammaln(j + 1)
        + gammaln(half)
        - gammaln(half + degree + j)
    )
    return float(log)


@lru_cache(maxsize=64)
def pair_powers(target: Polynomial) -> Float[np.ndarray, "r s"]:
    """|P_kl F|² under the sphere distribution: the power of F in query degree k and key degree l.

    Parameters
    ----------
    target : Polynomial
        f*(x) = (1/N) Σ_i F(x_0, x_i).

    Returns
    -------
    array (r+1, s+1)
        r and s are the highest degrees of F in the query and in the key. The entries sum to E F².
        The power of f* itself in (k, l) is the entry (k, 0), and the entry (k, l) divided by N for
        l ≥ 1.

    Raises
    ------
    ValueError
        Where rounding would drown the answer: terms of high degree that no closed form covers.

    Notes
    -----
    Powers of one direction, and <x_0,x_i>^q <β,x_i>, have closed forms of positive terms.
    Everything else comes from the joinings of a term with itself and with the others
    (:mod:`keyhole.theory.targets`): a homogeneous polynomial is Σ_j |x|^{2j} h_{s−2j} with h
    harmonic, Laplacians are joints inside a term, and the inner products of the h solve a
    triangular system. Cost: one joining per pair of terms.

    Examples
    --------
    >>> from keyhole.theory.targets import Correlation, TokenPower
    >>> pair_powers(TokenPower(p=2, dim=3)).round(6)      # <β,x>² = 1/3 + a harmonic of degree 2
    array([[0.111111, 0.      , 0.088889]])
    >>> float(pair_powers(Correlation(q=1, dim=3)).sum().round(6))    # E <x_0,x_i>² <β,x_i>² = 1/9
    0.111111
    """
    query_degree, key_degree = target.degrees
    total = np.zeros((query_degree + 1, key_degree + 1))
    size = np.zeros((query_degree + 1, key_degree + 1))

    # |Σ_a T_a|² = Σ_a <T_a, T_a> + 2 Σ_{a<b} <T_a, T_b> in every degree, and the size of what is
    # added up, against which rounding is judged
    for a, first in enumerate(target.terms):
        for second in target.terms[a:]:
            multiplicity = 1.0 if first is second else 2.0
            weight = first.coefficient * second.coefficient * multiplicity
            product, magnitude = _term_products(first, second, target.dim)
            rows, columns = product.shape
            total[:rows, :columns] += weight * product
            size[:rows, :columns] += abs(weight) * magnitude
    _check_rounding(target, total, size)

    # the result is shared by all callers through the cache
    total = np.maximum(total, 0.0)
    total.flags.writeable = False
    return total


def target_variance(target: Polynomial, n_keys: int) -> float:
    """Var f* under the sphere distribution.

    >>> from keyhole.theory.targets import TokenPower
    >>> round(target_variance(TokenPower(1, dim=8), n_keys=4), 6)    # 1/(dN)
    0.03125
    """
    powers = pair_powers(target)
    return float(powers[1:, 0].sum() + powers[:, 1:].sum() / n_keys)


def _check_rounding(target: Polynomial, total: np.ndarray, size: np.ndarray) -> None:
    """Refuse powers that are not a million times larger than their rounding."""
    rounding = 64 * np.finfo(float).eps * size.max()
    if size.max() > 0 and rounding > 1e-6 * total.max():
        raise ValueError(
            f"the harmonic parts of {target!r} in dimension {target.dim} cannot be told from "
            f"rounding: they add up terms of size {size.max():.1e} to powers of at most "
            f"{total.max():.1e}. rkhs_norm_bound(target) needs no harmonics and stays exact."
        )


def _term_products(first: Term, second: Term, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """<P_kl T_1, P_kl T_2> for all (k, l), and the size of what was added up for it.

    Coefficients are left out.
    """
    closed = _closed_products(first, second, dim)
    if closed is not None:
        return closed, np.abs(closed)

    # terms of different parity are orthogonal
    r, s = first.degrees
    r2, s2 = second.degrees
    if (r - r2) % 2 or (s - s2) % 2:
        zero = np.zeros((1, 1))
        return zero, zero

    # joinings, by joints inside the first term, to harmonic parts: in the query and in the key
    sums = joinings(first, second, dim)
    query_transform = _harmonic_transform(r, r2, dim)
    key_transform = _harmonic_transform(s, s2, dim)
    product = query_transform @ sums.T @ key_transform.T
    magnitude = np.abs(query_transform) @ np.abs(sums).T @ np.abs(key_transform).T
    return product, magnitude


def _closed_products(first: Term, second: Term, dim: int) -> np.ndarray | None:
    """The products where a formula gives them, else None."""
    product = _direction_products(first, second, dim)
    if product is None:
        product = _correlation_products(first, second, dim)
    return product


@dataclass(frozen=True, eq=False)
class _DirectionPower:
    """A term <β, x>^p of one direction, x the query or a key; a constant has p = 0 and no β."""

    kind: str
    direction: Float[np.ndarray, " d"] | None
    power: int

    @classmethod
    def of(cls, term: Term) -> _DirectionPower | None:
        """The term as a power of one direction, or None if it is none."""
        if not term.powers:
            return cls(kind="constant", direction=None, power=0)
        factor, power = term.powers[0]
        if len(term.powers) > 1 or factor.kind == PAIR:
            return None
        return cls(kind=factor.kind, direction=factor.array, power=power)

    @property
    def scale(self) -> float:
        """|β|^p."""
        if self.direction is None:
            return 1.0
        return float(np.linalg.norm(self.direction)) ** self.power


def _direction_products(first: Term, second: Term, dim: int) -> np.ndarray | None:
    """Two powers of directions, <β,x>^p and <γ,x>^q; None for other terms.

    Where both are of the query, or both of the key, the Funk–Hecke formula gives
    |β|^p |γ|^q P_k(cos(β, γ)) N_k ∫ t^p P_k dτ ∫ t^q P_k dτ in degree k.
    """
    a = _DirectionPower.of(first)
    b = _DirectionPower.of(second)
    if a is None or b is None:
        return None

    # one of the query and one of the key are independent: only their means meet
    kinds = {a.kind, b.kind} - {"constant"}
    if len(kinds) == 2:
        mean_a = a.scale * power_moment(a.power, 0, dim)
        mean_b = b.scale * power_moment(b.power, 0, dim)
        return np.array([[mean_a * mean_b]])

    highest = min(a.power, b.power)
    zonal = gegenbauer(highest, _cosine(a.direction, b.direction), dim)
    products = np.empty(highest + 1)
    for k in range(highest + 1):
        products[k] = a.scale * b.scale * zonal[k] * _shared(a.power, b.power, k, dim)
    if kinds == {QUERY}:
        return products[:, None]
    return products[None, :]


def _cosine(beta: Float[np.ndarray, " d"] | None, gamma: Float[np.ndarray, " d"] | None) -> float:
    """cos(β, γ): exactly one for equal directions, and for constants, which have none."""
    if beta is None or gamma is None or np.array_equal(beta, gamma):
        return 1.0
    lengths = float(np.linalg.norm(beta)) * float(np.linalg.norm(gamma))
    if lengths == 0:
        return 0.0
    return float(beta @ gamma) / lengths


def _correlation_products(first: Term, second: Term, dim: int) -> np.ndarray | None:
    """<x_0,x_i>^q <β,x_i> against <x_0,x_i>^q' <β',x_i>; None for other terms.

    The formula follows from t P_k = A_k P_{k+1} + B_k P_{k−1}, A_k + B_k = 1.
    """
    first_form = _correlation_form(first)
    second_form = _correlation_form(second)
    if first_form is None or second_form is None:
        return None
    q, beta = first_form
    q2, beta2 = second_form
    degree = min(q, q2)
    products = np.zeros((degree + 1, degree + 2))
    overlap = float(beta @ beta2) / dim
    for k in range(degree + 1):
        common = _shared(q, q2, k, dim) * overlap
        up = 1.0 if k == 0 else (k + dim - 2) / (2 * k + dim - 2)
        products[k, k + 1] = common * up
        if k > 0:
            products[k, k - 1] = common * (1.0 - up)
    return products


def _correlation_form(term: Term) -> tuple[int, np.ndarray] | None:
    """(q, β) of a term <x_0,x_i>^q <β,x_i>, or None if the term has another form."""
    power = 0
    beta = None
    for factor, exponent in term.powers:
        if factor.kind == PAIR and factor.array is None:
            power = exponent
        elif factor.kind == KEY and exponent == 1 and beta is None:
            beta = factor.array
        else:
            return None
    if beta is None:
        return None
    return power, beta


def gegenbauer(max_degree: int, t: float, dim: int) -> Float[np.ndarray, " k"]:
    """P_0(t), …, P_K(t) on the sphere of R^d by their three-term recurrence, for |t| ≤ 1.

    >>> gegenbauer(max_degree=3, t=0.5, dim=3)    # Legendre
    array([ 1.    ,  0.5   , -0.125 , -0.4375])
    """
    values = np.ones(max_degree + 1)
    if max_degree >= 1:
        values[1] = t
    for k in range(1, max_degree):
        divisor = max(k + dim - 2, 1)
        values[k + 1] = ((2 * k + dim - 2) * t * values[k] - k * values[k - 1]) / divisor
    return values


@lru_cache(maxsize=256)
def _harmonic_transform(s: int, s2: int, dim: int) -> np.ndarray:
    """The matrix from joinings, by number i of joints inside the first term, to harmonic parts.

    Its rows are the degrees l of the harmonic parts h_l of homogeneous p and q of degrees s and s'.
    For homogeneous p of degree s, Δ^i p = Σ_l (c_jl / c_{j−i,l}) |x|^{2(j−i)} h_l with j = (s−l)/2
    and c_jl = Π_{a≤j} 2a(2a+2l+d−2). In the Fischer product, where |x|² is adjoint to Δ, this gives
    [Δ^i p, Δ^i' q] = Σ_{l≤m} c_jl c_j'l / c_{(m−l)/2,l} [h_l(p), h_l(q)] with m = s−2i = s'−2i' the
    slots left over. On the sphere E h_l(p) h_l(q) = [h_l(p), h_l(q)] / (d (d+2) ⋯ (d+2l−2)). The
    system is solved in rational numbers.
    """
    # forward substitution in the triangular system: row m has the unknowns of degrees l ≤ m
    degrees = list(range(s % 2, min(s, s2) + 1, 2))
    solution: list[list[Fraction]] = []
    for row, m in enumerate(degrees):
        i = (s - m) // 2
        i2 = (s2 - m) // 2

        # i unordered joints are 2^i i! times one Laplacian power, and joinings come divided by s!
        joint_orders = 2 ** (i + i2) * math.factorial(i) * math.factorial(i2)
        right = [Fraction(0)] * len(degrees)
        right[row] = Fraction(joint_orders * math.factorial(s))

        # less the parts of lower degree, which are solved already
        for column, lower in enumerate(degrees[:row]):
            j = (s - lower) // 2
            j2 = (s2 - lower) // 2
            factor = Fraction(
                _laplace(j, lower, dim) * _laplace(j2, lower, dim),
                _laplace((m - lower) // 2, lower, dim),
            )
            right = [a - factor * b for a, b in zip(right, solution[column], strict=True)]
        diagonal = Fraction(_laplace(i, m, dim) * _laplace(i2, m, dim))
        solution.append([a / diagonal for a in right])

    # from Fischer's product to the mean over the sphere
    transform = np.zeros((min(s, s2) + 1, s // 2 + 1))
    for row, degree in enumerate(degrees):
        if harmonic_count(dim, degree) == 0:
            # on {−1, 1} a degree above one has no harmonics: what is left there is rounding
            continue
        volume = math.prod(dim + 2 * a for a in range(degree))
        for column, m in enumerate(degrees):
            transform[degree, (s - m) // 2] = float(solution[row][column] / volume)
    return transform


def _laplace(j: int, degree: int, dim: int) -> int:
    """c_jl: Δ^j |x|^{2j} h = c_jl h for a harmonic h of degree l."""
    return math.prod(2 * a * (2 * a + 2 * degree + dim - 2) for a in range(1, j + 1))
