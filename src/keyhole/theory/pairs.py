"""Eigenvalues of the kernel of a pair, query and key, under the sphere distribution.

With s = <x_0, x'_0>, t = <x_i, x'_j> and κ(ρ) = Σ_n a_n ρ^n of the activation the kernel of a pair
of zero-mean heads is κ((1+s)(1+t)/4) (1+t). By Rodrigues' formula ∫ ((1+s)/2)^n P_k(s) τ(ds) =
j_n r_k(n), with j_n = Π_{i<n} (d−1+2i)/(2(d−1+i)) and r_k(n) = Π_{i<k} (n−i)/(n+i+d−1), so that

    μ_kl = 2 Σ_n a_n j_n j_{n+1} r_k(n) r_l(n+1).

A set without a query has the constant query of the same length: s = 1, and μ_l = 2 Σ_n a_n j_{n+1}
r_l(n+1).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from jaxtyping import Float

from keyhole.theory.activations import RELU, ScoreActivation
from keyhole.theory.moments import harmonic_ratios, log_moment


def pair_eigenvalues(
    dim: int, max_degree: int, activation: ScoreActivation = RELU
) -> Float[np.ndarray, "k l"]:
    """μ_kl = ∫∫ κ((1+s)(1+t)/4) (1+t) P_k(s) P_l(t) τ(ds) τ(dt), for k, l ≤ K.

    Every term of the series is positive, so every eigenvalue has full relative accuracy at any d
    and degree. For ReLU the terms fall like n^{−d−3/2} only; beyond 10 K the sum over n is done as
    an integral with end corrections.

    Examples
    --------
    >>> pair_eigenvalues(dim=8, max_degree=1).round(6)
    array([[0.237284, 0.03788 ],
           [0.010545, 0.002486]])
    """
    # tokens are ±1, and the pair kernel is 2κ(1) at (1, 1), 2κ(0) at (−1, 1) and 0 at t = −1
    if dim == 1:
        signs = (-1.0) ** np.arange(max_degree + 1)
        of_query = (activation.at_one + signs * activation.at_zero) / 2
        return np.tile(of_query[:, None], (1, max_degree + 1))

    order, weight = _pair_nodes(dim, max_degree, activation)
    query_ratios = harmonic_ratios(order, dim, max_degree)
    key_ratios = harmonic_ratios(order + 1, dim, max_degree)
    return np.asarray((query_ratios * weight) @ key_ratios.T)


def key_eigenvalues(
    dim: int, max_degree: int, activation: ScoreActivation = RELU
) -> Float[np.ndarray, " l"]:
    """μ_l of sets without a query, for l ≤ K."""
    # tokens are ±1: the kernel is 2κ(1) at t = 1 and 0 at t = −1
    if dim == 1:
        return np.full(max_degree + 1, activation.at_one)
    order, weight = _key_nodes(dim, max_degree, activation)
    return np.asarray(harmonic_ratios(order + 1, dim, max_degree) @ weight)


def largest_of_degree(
    dim: int, degree: int, activation: ScoreActivation = RELU
) -> tuple[float, float]:
    """μ_k0 and μ_0k for one degree k and d ≥ 2, without the table below them."""
    order, weight = _pair_nodes(dim, degree, activation)
    query_ratios = harmonic_ratios(order, dim, degree)[degree]
    key_ratios = harmonic_ratios(order + 1, dim, degree)[degree]
    return float(weight @ query_ratios), float(weight @ key_ratios)


def mean_of_two_keys(dim: int, activation: ScoreActivation = RELU) -> float:
    """∫ κ((1+t)/2) (1+t) τ(dt) = 2 Σ_n a_n j_{n+1}: the kernel of two keys of one query."""
    return float(key_eigenvalues(dim, 0, activation)[0])


@lru_cache(maxsize=256)
def _pair_nodes(
    dim: int, max_degree: int, activation: ScoreActivation
) -> tuple[np.ndarray, np.ndarray]:
    """Orders n, and weights 2 a_n j_n j_{n+1}, of the sum for eigenvalues up to a degree."""
    order, key_weight = _key_nodes(dim, max_degree, activation)
    weight = key_weight * np.exp(log_moment(order, dim))
    weight.flags.writeable = False
    return order, weight


@lru_cache(maxsize=256)
def _key_nodes(
    dim: int, max_degree: int, activation: ScoreActivation
) -> tuple[np.ndarray, np.ndarray]:
    """Orders n, and weights 2 a_n j_{n+1}."""
    order, coefficients = activation.series_nodes(2 * (5 * max_degree + 2 * dim + 100))
    weight = 2 * coefficients * np.exp(log_moment(order + 1, dim))
    # both are shared by all callers through the cache
    order.flags.writeable = False
    weight.flags.writeable = False
    return order, weight
