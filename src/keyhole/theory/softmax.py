"""Softmax heads: an approximation of their spectrum for many keys.

The weight of key i is e^{<w,x_i>}/Σ_j e^{<w,x_j>} with w = Wᵀx~_0; the constant coordinate of the
keys cancels. For many keys in high dimension the normaliser is near its mean, and up to terms of
order 1/N the kernel of two sets is

    K ≈ 1 + (1/NN') Σ_ij e^{g(1+s)t} t,    g = scale², s = <x_0, x'_0>, t = <x_i, x'_j>,

the 1 being the product of the constant coordinates of the values. By degrees (k, l) in query and
key, with j_n and r_k(n) of :mod:`keyhole.theory.pairs`,

    μ_kl = Σ_n (2g)^n/n! · j_n r_k(n) E[t^{n+1} P_l(t)],

undivided for l = 0 and divided by N for l ≥ 1. It was compared with fits of 150 heads at d = 4, 8,
16, N = 8 … 64, scale 0.25, 0.5 and 0.7: at d = 16, N = 32, scale up to 0.5, predicted errors of a
tenth of E f*² and more are within 16 %, and d = 8 or N = 8 miss by 40 % and more. Hence the rule of
:func:`check_softmax`.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln

from keyhole.attention.heads import GaussianHeads
from keyhole.theory.harmonics import power_moment
from keyhole.theory.moments import harmonic_ratios, log_moment

LEAST_DIMENSION = 16
LEAST_KEYS_PER_DIMENSION = 2
LARGEST_SCALE = 0.5
LEAST_SHARE = 0.1
"""Predicted errors below this share of E f*² are refused."""

_TERMS = 60
"""Terms of the series: (2g)^n/n! with 2g ≤ 1/2."""


def check_softmax(heads: object, dim: int, n_keys: int, *, query: bool) -> float:
    """The scale of softmax heads for which the approximation holds; a ValueError for others."""
    if heads is None:
        heads = GaussianHeads()
    problem = ""
    if not query:
        problem = "the sets have no query"
    elif not isinstance(heads, GaussianHeads):
        problem = f"`heads` is {heads!r}"
    else:
        mean, scale = heads.moments(dim)
        if mean is not None:
            problem = "the heads have a mean"
        elif scale > LARGEST_SCALE:
            problem = f"the scale is {scale:g}"
        elif dim < LEAST_DIMENSION:
            problem = f"d is {dim}"
        elif n_keys < LEAST_KEYS_PER_DIMENSION * dim:
            problem = f"N is {n_keys} at d = {dim}"
    if not problem:
        return scale
    raise ValueError(
        "softmax weights have no exact spectrum, and their approximation holds for zero-mean "
        f"GaussianHeads of scale {LARGEST_SCALE:g} at most, d of {LEAST_DIMENSION} at least and N "
        f"of {LEAST_KEYS_PER_DIMENSION}d at least, sets with a query: here {problem}. Use "
        "kh.theory.conditional_curve on features of such sets, which has no such limits."
    )


def softmax_eigenvalues(dim: int, max_degree: int, scale: float) -> Float[np.ndarray, "k l"]:
    """μ_kl for k, l ≤ K, the 1 of the constant coordinates in μ_00."""
    g = scale**2
    order = np.arange(float(_TERMS))
    weights = np.exp(log_moment(order, dim) + order * math.log(2 * g) - gammaln(order + 1))
    query_part = harmonic_ratios(order, dim, max_degree) * weights
    key_part = np.array(
        [
            [power_moment(n + 1, degree, dim) for n in range(_TERMS)]
            for degree in range(max_degree + 1)
        ]
    )
    table = np.asarray(query_part @ key_part.T)
    table[0, 0] += 1.0
    return table


def softmax_trace(dim: int, n_keys: int, scale: float) -> float:
    """E K(x, x): the constant, a key with itself, and two different keys."""
    g = scale**2
    same_key = math.exp(2 * g)
    # E[t e^{2gt}], by powers of t
    two_keys = sum(
        math.exp(n * math.log(2 * g) - math.lgamma(n + 1)) * power_moment(n + 1, 0, dim)
        for n in range(_TERMS)
    )
    return 1 + same_key / n_keys + (1 - 1 / n_keys) * two_keys
