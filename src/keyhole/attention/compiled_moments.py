"""Gaussian moments E[σ(u)σ(v)], pair by pair: the compiled half of activations.py.

Notation: u ~ h + U, v ~ k + V with U, V standard normal of correlation ρ, r = √(1 − ρ²); φ, Φ the
normal density and distribution; ψ(h) = E(h + U)_+ and χ(h) = E(h + U)²_+. Everything that depends
on how close ρ is to ±1 takes 1 − ρ and 1 + ρ as arguments of their own, because a caller may know
them better than ρ itself tells.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from keyhole._compiled import cached_njit

# `contract` allows fused multiply-adds and nothing else: vector_exp relies on the order of its
# additions.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}
# a sum over nodes may be taken in any order, which lets it vectorise
SUM_OPTIONS: dict[str, Any] = {**OPTIONS, "fastmath": {"contract", "reassoc"}}
# what Python calls is kept on disk, and holds the rest within it
entry_point = cached_njit(**OPTIONS)

RELU, LINEAR, SQUARE, STEP, EXP = range(5)  # the order of activations.POINTWISE

_TWO_PI = 2.0 * math.pi
_ROOT_TWO_PI = math.sqrt(_TWO_PI)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_NODES = (_NODES + 1.0) / 2.0
_WEIGHTS = _WEIGHTS / 2.0
_DECAY = 42.0  # integrands are followed until they have fallen by e⁻⁴²
_SIGMAS = math.sqrt(2.0 * _DECAY)
_FAR = 9.0  # Φ(−9) = 1e-19: beyond it a ReLU never rests
_GONE = -40.0  # ψ(−40) underflows

# Polynomials, highest power first: Chebyshev interpolants computed in 80 digits. With y = 1 − |ρ|
# in [0, 1],
#   (√(1−ρ²) − |ρ| arccos|ρ|) / 2π = y^{3/2} FOLD(y)  and  arccos|ρ| / 2π = y^{1/2} ARC(y),
# whose only singularity is at y = 2, so the relative error is below 4e-16 everywhere, the ends
# included.
_FOLD = np.array(
    [
        1.406847583576847e-07,
        -8.074377748711992e-07,
        2.259408020345355e-06,
        -3.7707703632994593e-06,
        4.374469548189042e-06,
        -3.2848567061200474e-06,
        2.3906484999005695e-06,
        2.431635603627791e-07,
        3.1369341024530587e-06,
        8.084247836295251e-06,
        2.4216853507032594e-05,
        7.770767659681165e-05,
        0.0002791159634959937,
        0.0012057807793053844,
        0.007502635967990798,
        0.15005271935951764,
    ]
)
_ARC = np.array(
    [
        1.2111077232314303e-06,
        -8.315914031053542e-06,
        2.72362035246299e-05,
        -5.459695312131927e-05,
        7.509948021371866e-05,
        -7.342204943017778e-05,
        5.4402161574869036e-05,
        -2.7273762226387332e-05,
        1.6159279111573022e-05,
        6.54543019979364e-06,
        2.5365706266675713e-05,
        6.089654997574378e-05,
        0.00015737420685657647,
        0.00042739516810322455,
        0.0012560216951962384,
        0.004220232730835694,
        0.018756589919950436,
        0.22507907903927651,
    ]
)
# χ(−x)/φ(x) = TAIL((5 − x)/(5 + x)) / (5 + x)³ for all x ≥ 0, relative error 1e-16 before rounding
_TAIL = np.array(
    [
        1.8154753492941033e-09,
        -9.283596480180483e-08,
        3.915163271869033e-08,
        1.017060107935327e-06,
        -7.329398214477368e-07,
        -6.1973613155273175e-06,
        6.346855557973133e-06,
        3.049385819244613e-05,
        -4.054588457975134e-05,
        -0.00014818320503157112,
        0.00021938595154178346,
        0.0007960472879153542,
        -0.0010018680302110745,
        -0.004835916253503339,
        0.0027150297098842823,
        0.030948776100778137,
        0.018803870445709116,
        -0.16926683672149986,
        -0.4392462149053326,
        0.15389997600746355,
        3.647397941509787,
        11.97037891300974,
        24.36839058953287,
        35.72910482197236,
        38.72416714079637,
        29.62123076329952,
        13.010722598209886,
    ]
)
# Taylor coefficients of exp: enough for |x| ≤ log(2)/2
_TAYLOR = np.array([1.0 / math.factorial(i) for i in range(12, -1, -1)])
_LOG2_HIGH = 0.693147180369123816490
_LOG2_LOW = 1.90821492927058770002e-10
_PER_LOG2 = 1.0 / math.log(2.0)
EXP_LOWEST = -708.0
EXP_HIGHEST = 709.4
# adding it rounds a double to the nearest integer, held in its lowest bits
_ROUNDER = 1.5 * 2.0**52


@njit(**OPTIONS)
def vector_exp(x):
    """exp(x) for EXP_LOWEST ≤ x ≤ EXP_HIGHEST, to one unit in the last place.

    Unlike libm's, it vectorises.
    """
    # x = whole · log 2 + rest
    shifted = x * _PER_LOG2 + _ROUNDER
    whole = shifted - _ROUNDER
    rest = (x - whole * _LOG2_HIGH) - whole * _LOG2_LOW
    # exp(rest), by Horner's scheme
    value = _TAYLOR[0]
    for i in range(1, 13):
        value = value * rest + _TAYLOR[i]
    # times 2^whole, by adding to the bits of the exponent
    exponent = np.float64(shifted).view(np.int64) << np.int64(52)
    return np.int64(np.float64(value).view(np.int64) + exponent).view(np.float64)


@njit(**OPTIONS)
def relu_arc(rho, gap):
    """κ(ρ) = E[U_+ V_+], given gap = 1 − |ρ|; accurate relative to its size even as ρ → −1."""
    value = _FOLD[0]
    for i in range(1, 16):
        value = value * gap + _FOLD[i]
    # κ(−ρ) = κ(ρ) − ρ/2
    return 0.5 * max(rho, 0.0) + gap * math.sqrt(gap) * value


@njit(**OPTIONS)
def step_arc(rho, gap):
    """P(U > 0, V > 0) = 1/4 + arcsin(ρ)/2π, given gap = 1 − |ρ|."""
    value = _ARC[0]
    for i in range(1, 18):
        value = value * gap + _ARC[i]
    value *= math.sqrt(gap)
    return 0.5 - value if rho >= 0.0 else value


@njit(**OPTIONS)
def _tail(x):
    """χ(−x)/φ(x) for x ≥ 0, by the table."""
    inverse = 1.0 / (5.0 + x)
    t = (5.0 - x) * inverse
    value = _TAIL[0]
    for i in range(1, 27):
        value = value * t + _TAIL[i]
    return value * inverse * inverse * inverse


@njit(**OPTIONS)
def normal_parts(h):
    """φ(h), Φ(h), ψ(h), χ(h), each accurate relative to its size in both tails."""
    x = abs(h)
    if x > -_GONE:
        return (0.0, 0.0, 0.0, 0.0) if h < 0.0 else (0.0, 1.0, h, 1.0 + h * h)

    # by the tail at |h|, and by symmetry for h > 0
    density = math.exp(-0.5 * x * x) / _ROOT_TWO_PI
    # with χ = φ·c: ψ = φ·(1 − xc)/(1 + x²) and Φ = φ·(c + x·that), where nothing cancels
    tail = _tail(x)
    slope = (1.0 - x * tail) / (1.0 + x * x)
    mills = tail + x * slope
    if h < 0.0:
        return density, density * mills, density * slope, density * tail
    return density, 1.0 - density * mills, h + density * slope, 1.0 + h * h - density * tail


@njit(**OPTIONS)
def _reach(rate):
    """How far to follow exp(−rate·x − x²/2), rate ≥ 0."""
    return 2.0 * _DECAY / (rate + math.sqrt(rate * rate + 2.0 * _DECAY))


@njit(**SUM_OPTIONS)
def _strip_sum(power, lo, hi, width, a, base):
    """∫ (x (width − x))^power exp(−((x − a)² − base)/2) dx over [lo, hi]."""
    total = 0.0
    for i in range(24):
        x = lo + (hi - lo) * _NODES[i]
        weight = _WEIGHTS[i] * x * (width - x) if power == 1 else _WEIGHTS[i]
        total += weight * vector_exp(-0.5 * ((x - a) * (x - a) - base))
    return total * (hi - lo)


@njit(**OPTIONS)
def _strip(power, a, b, width):
    """∫_{−a}^{b} ((a + z)(b − z))^power φ(z) dz, given width = a + b: the moment at ρ = −1."""
    if width <= 0.0:
        return 0.0

    # a closed form where nothing cancels
    if (a >= 1.0 and b >= 1.0) or (a >= 2.0 and b >= 0.0) or (b >= 2.0 and a >= 0.0):
        density_a, mass_a, _, _ = normal_parts(a)
        density_b, mass_b, _, _ = normal_parts(b)
        mass = mass_a + mass_b - 1.0
        return mass if power == 0 else (a * b - 1.0) * mass + b * density_a + a * density_b

    # else by quadrature in x = a + z, from 0 to where the density has fallen by e⁻⁴²
    a = min(a, b)  # z → −z exchanges them
    base = a * a if a < 0.0 else 0.0
    end = min(width, _reach(-a) if a < 0.0 else a + _SIGMAS)
    cut = 0.25 * end
    total = _strip_sum(power, 0.0, cut, width, a, base) + _strip_sum(
        power, cut, end, width, a, base
    )
    return total * math.exp(-0.5 * base) / _ROOT_TWO_PI


@njit(**SUM_OPTIONS)
def _blur_sum(power, lo, hi, eta, base, offset, rho):
    """∫ y^power exp(−((y + η)² − base)/2) t(offset + ρy) dy over [lo, hi]; t as in `_blur`."""
    total = 0.0
    for i in range(24):
        y = lo + (hi - lo) * _NODES[i]
        w = offset + rho * y
        x = abs(w)
        tail = _tail(x)
        slope = (1.0 - x * tail) / (1.0 + x * x)
        mills = tail + x * slope
        weight = y * slope if power == 1 else -math.copysign(mills, w)
        total += _WEIGHTS[i] * weight * vector_exp(-0.5 * ((y + eta) * (y + eta) - base))
    return total * (hi - lo)


@njit(**OPTIONS)
def _blur(power, k, rho, r, eta, offset):
    """E of (h+U)_+^p times what the noise in V given U adds to (k + ρU)_+^p.

    Given U, k + V is r·(w + noise), and E(w + noise)_+ = w_+ + ψ(−|w|), E 1{w + noise > 0} = 1{w >
    0} ± Φ(−|w|): a smooth bump on either side of w = 0. With y = (h + U)/r this is r^{2p+1}
    e^{−k²/2}/2π times ∫_0^∞ y^p e^{−(y+η)²/2} t(w) dy, where w = offset + ρy, η = (ρk − h)/r and
    t = ψ(−|w|)/φ(w) or ±Φ(−|w|)/φ(w).
    """
    # the range [lo, hi] in which the integrand counts, and a cut inside it
    if eta >= 0.0:
        base = eta * eta
        lo = 0.0
        hi = _reach(eta)
        cut = 0.25 * hi
    else:
        base = 0.0
        lo = max(0.0, -eta - _SIGMAS)
        hi = _SIGMAS - eta
        cut = -eta

    # t has a kink at w = 0: a third piece where that lies inside
    kink = -offset / rho if rho != 0.0 else -1.0
    if lo < kink < hi:
        first = min(kink, cut)
        second = max(kink, cut)
        total = _blur_sum(power, first, second, eta, base, offset, rho)
    else:
        first = cut
        second = cut
        total = 0.0
    total += _blur_sum(power, lo, first, eta, base, offset, rho)
    total += _blur_sum(power, second, hi, eta, base, offset, rho)
    scale = r * r * r if power == 1 else r
    return scale * math.exp(-0.5 * (k * k + base)) / _TWO_PI * total


@njit(**OPTIONS)
def _residual(k, h, rho, one_minus, one_plus):
    """Return k − ρh, without cancellation as ρ → ±1 and h → ±k."""
    if rho > 0.5:
        return (k - h) + h * one_minus
    if rho < -0.5:
        return (k + h) - h * one_plus
    return k - rho * h


@njit(**OPTIONS)
def rectified_moment(power, h, k, rho, one_minus, one_plus):
    """E[(h+U)_+^p (k+V)_+^p]: the ReLU moment at p = 1, Φ₂(h, k; ρ) at p = 0.

    Any h, k and −1 ≤ ρ ≤ 1.

    The sum of what remains when V is replaced by its mean ρU given U, in closed form, and of
    `_blur`. For p = 1 both are positive, so nothing cancels: relative error 2e-13 wherever the
    result does not underflow.
    """
    # means so far out that σ never, or always, lets the score through
    if min(h, k) < _GONE:
        return 0.0
    if h > _FAR and k > _FAR:
        return h * k + rho if power == 1 else 1.0

    # the moment with V replaced by ρU
    k_given = _residual(k, h, rho, one_minus, one_plus)
    h_given = _residual(h, k, rho, one_minus, one_plus)
    if rho >= 0.0:
        if max(h, k) > _FAR:
            _, mass, mean, _ = normal_parts(min(h, k))
            return max(h, k) * mean + rho * mass if power == 1 else mass
        # (k + ρU)_+ starts at U = −k/ρ: before (h + U)_+ does, or after
        _, mass, mean, square = normal_parts(h if k_given >= 0.0 else k / rho)
        sharp = abs(k_given) * mean + rho * square if power == 1 else mass
    else:
        sharp = _strip(power, h, -k / rho, -k_given / rho)
        if power == 1:
            sharp *= -rho

    # and what the noise in V adds
    r = math.sqrt(one_minus * one_plus)
    if r == 0.0:
        return sharp
    return sharp + _blur(power, k, rho, r, -h_given / r, k_given / r)


@njit(**OPTIONS)
def _is_certain(mean, std):
    """Whether the deviation is zero, or so small that mean/std may overflow."""
    return std <= 1e-100 * abs(mean) or std == 0.0


@njit(**OPTIONS)
def moment(code, mean_u, mean_v, std_u, std_v, rho):
    """E[σ(u)σ(v)] of one pair of Gaussians.

    A zero standard deviation is a number known for certain.
    """
    if code == LINEAR:
        return mean_u * mean_v + rho * std_u * std_v
    if code == SQUARE:
        covariance = rho * std_u * std_v
        second_u = mean_u * mean_u + std_u * std_u
        second_v = mean_v * mean_v + std_v * std_v
        return second_u * second_v + 2.0 * covariance * (2.0 * mean_u * mean_v + covariance)
    if code == EXP:
        covariance = rho * std_u * std_v
        return math.exp(mean_u + mean_v + 0.5 * (std_u * std_u + std_v * std_v) + covariance)

    # ReLU and step; a number known for certain makes the two independent
    power = 1 if code == RELU else 0
    if _is_certain(mean_u, std_u) or _is_certain(mean_v, std_v):
        value = 1.0
        for mean, std in ((mean_u, std_u), (mean_v, std_v)):
            if _is_certain(mean, std):
                value *= max(mean, 0.0) if power == 1 else 1.0 if mean > 0.0 else 0.0
            else:
                _, mass, rectified, _ = normal_parts(mean / std)
                value *= std * rectified if power == 1 else mass
        return value
    value = rectified_moment(power, mean_u / std_u, mean_v / std_v, rho, 1.0 - rho, 1.0 + rho)
    return value * std_u * std_v if power == 1 else value


@entry_point
def fill_moments(code, mean_u, mean_v, std_u, std_v, rho, out):
    """`moment` over arrays of equal length."""
    for i in range(out.size):
        out[i] = moment(code, mean_u[i], mean_v[i], std_u[i], std_v[i], rho[i])


@entry_point
def fill_relu_arc(cosines, start, row_norms, column_norms):
    """Replace cosines ρ in columns ``start …`` by |z||z'| κ(ρ)."""
    for i in range(cosines.shape[0]):
        row = cosines[i, start : start + column_norms.size]
        for j in range(row.size):
            rho = row[j]
            row[j] = row_norms[i] * column_norms[j] * relu_arc(rho, max(1.0 - abs(rho), 0.0))
