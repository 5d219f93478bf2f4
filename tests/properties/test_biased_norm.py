"""Biased heads: the moment E[σ(μ+u)σ(ν+v)] = Σ ρ^k/k! h_k(μ) h_k(ν), and norms that do not grow
with d.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import ndtr

from keyhole.theory.biased import (
    _fit,
    _Group,
    _groups,
    _nodes,
    biased_norm_bound,
    fitted_functions,
    hermite_moments,
)
from keyhole.theory.complexity import kernel_coefficient, rkhs_norm, rkhs_norm_bound
from keyhole.theory.harmonics import pair_powers
from keyhole.theory.notation import parse_target
from keyhole.theory.targets import Correlation, RotatedCorrelation, TokenPower, sphere_sets


def relu_moment(h, k, rho):
    """E[ReLU(h+u) ReLU(k+v)] for unit variances and correlation ρ, in closed form."""

    def density(r):
        return math.exp(-(h * h - 2 * r * h * k + k * k) / (2 * (1 - r * r))) / (
            2 * math.pi * math.sqrt(1 - r * r)
        )

    joint = ndtr(h) * ndtr(k) + quad(density, 0, rho, epsabs=1e-14)[0]
    r = math.sqrt(1 - rho**2)
    edges = [
        x * math.exp(-y * y / 2) / math.sqrt(2 * math.pi) * ndtr((x - rho * y) / r)
        for x, y in ((h, k), (k, h))
    ]
    return (h * k + rho) * joint + sum(edges) + r * r * density(rho)


def series(h, k, rho, n_terms=120):
    values = hermite_moments(np.array([h, k]), n_terms)
    return float(np.sum(rho ** np.arange(n_terms) * values[:, 0] * values[:, 1]))


@pytest.mark.parametrize("rho", [-0.3, 0.0, 0.25, 0.6])
def test_the_moment_is_its_series(rho, rng):
    for h, k in rng.uniform(-1.5, 1.5, size=(4, 2)):
        assert abs(series(h, k, rho) - relu_moment(h, k, rho)) < 1e-10
        # broken twin: without the first Hermite term
        first = hermite_moments(np.array([h, k]), 2)[1]
        assert (
            rho == 0 or abs(series(h, k, rho) - rho * first.prod() - relu_moment(h, k, rho)) > 1e-6
        )


def test_moments_are_derivatives(rng):
    """h_k' = h_{k+1}."""
    m, step = rng.uniform(-1, 1, 5), 1e-5
    scale = np.sqrt([math.factorial(k) for k in range(8)])[:, None]
    values = [hermite_moments(m + shift, 8) * scale for shift in (-step, 0.0, step)]
    np.testing.assert_allclose((values[2] - values[0])[:-1] / (2 * step), values[1][1:], atol=1e-7)


def biased_gram(batch, n_terms):
    """The biased kernel for one key per set, cut after n_terms of its series."""
    h = hermite_moments(np.einsum("nd,nd->n", batch.query, batch.tokens), n_terms)
    t = 1 + batch.tokens @ batch.tokens.T
    rho = (1 + batch.query @ batch.query.T) * t / 4
    return sum(np.outer(h[k], h[k]) * rho**k for k in range(n_terms)) * t


@pytest.mark.parametrize("q", [1, 2])
def test_the_function_behind_the_bound_has_that_norm_and_that_error(q, seed):
    """The bound comes with a function: it is within the error of the target and its norm within the
    bound.
    """
    dim, n = 3, 600
    target = Correlation(q, dim)
    allowed = 0.01 * pair_powers(target).sum()
    bound = biased_norm_bound(target, allowed).norm
    (group,) = _groups(target)
    weights = _fit(group, dim, allowed, mean=1.0)
    assert math.isclose(float(np.sum(weights**2)), bound, rel_tol=1e-9)
    batch = sphere_sets(n, 1, dim, seed)
    mu = np.einsum("nd,nd->n", batch.query, batch.tokens)
    functions = fitted_functions(group, mu, dim, mean=1.0)
    assert functions.any(axis=(1, 2)).tolist() == [True] * (
        q + 3
    )  # μ^a Q for a up to two more than F has
    y = np.einsum("ak,akn->n", weights, functions) * batch.tokens[:, 0]
    squares = (y - target(batch)) ** 2
    assert squares.mean() < allowed + 6 * squares.std() / math.sqrt(n)
    gram = biased_gram(batch, functions.shape[1]) + 1e-10 * np.eye(n)
    interpolated = [float(y[:m] @ np.linalg.solve(gram[:m, :m], y[:m])) for m in (150, n)]
    assert interpolated[0] <= interpolated[1] <= bound
    # broken twin: less than half of the bound would not do
    assert interpolated[1] > 0.4 * bound


@pytest.mark.parametrize("q", [1, 2, 3])
def test_the_bound_does_not_grow_with_the_dimension(q):
    """From d = 64 to 4096 it moves by less than a factor of two; heads without bias pay 64^q."""
    bounds, norms = [], []
    for dim in (64, 512, 4096):
        target = Correlation(q, dim)
        bounds.append(biased_norm_bound(target, 0.01 * pair_powers(target).sum()).norm)
        norms.append(rkhs_norm(target))
    assert max(bounds) < 2 * min(bounds)
    assert norms[-1] / norms[0] > 0.5 * 64**q
    assert bounds[-1] < norms[-1] / 100


def test_bias_helps_less_the_more_the_keys_are_turned():
    ratios = []
    for gamma in (0.0, 0.3, 1.0):
        target = RotatedCorrelation(gamma, 32, seed=0)
        ratios.append(
            biased_norm_bound(target, 0.01 * pair_powers(target).sum()).norm / rkhs_norm(target)
        )
    assert all(a < b for a, b in pairwise(ratios))
    assert ratios[0] < 0.01
    assert ratios[-1] > 1


def test_without_bias_it_is_the_bound_with_named_constants():
    """At c = 0 every h_k is a number, and the cheapest sum of them costs 1/b_rs, less the error's
    due.
    """
    got = biased_norm_bound(TokenPower(2, 8), error=1e-12, mean=0.0).norm
    assert math.isclose(got, 1 / kernel_coefficient(0, 2), rel_tol=1e-4)
    assert biased_norm_bound(Correlation(1, 8), error=1e-12, mean=0.0).norm <= rkhs_norm_bound(
        Correlation(1, 8)
    )


def test_free_of_the_dimension_powers_cost_without_limit_as_the_error_falls():
    """μ is not among Σ c_k h_k(μ): without the terms μ^a, a > 0, each digit of accuracy costs a
    factor.
    """
    nodes = np.linspace(-1, 1, 201)
    functions = fitted_functions(_Group(Correlation(0, 8).terms[0], {1: 1.0}), nodes, 8, 1.0)[0]
    norms = []
    for ridge in (1e-4, 1e-7, 1e-10):
        gram = functions @ functions.T / 201 + ridge * np.eye(len(functions))
        weights = np.linalg.solve(gram, functions @ nodes / 201)
        norms.append(weights @ weights)
    assert norms[1] > 5 * norms[0]
    assert norms[2] > 5 * norms[1]


def test_an_error_well_above_rounding_is_not_refused():
    """Twelve digits cost about twice what eight do."""
    target = Correlation(2, 4)
    norms = [
        biased_norm_bound(target, share * pair_powers(target).sum()).norm for share in (1e-8, 1e-12)
    ]
    assert 1.5 < norms[1] / norms[0] < 4


def test_an_error_below_rounding_is_refused():
    with pytest.raises(ValueError, match=r"`error` must leave room for rounding.*larger error"):
        biased_norm_bound(Correlation(3, 64), error=1e-60)


def test_an_error_as_large_as_the_target_costs_nothing():
    """The function 0 is then near enough, and its norm is 0."""
    assert biased_norm_bound(Correlation(3, 8), error=1.0).norm == 0.0


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_nodes_are_those_of_products_of_unit_vectors(dim):
    nodes, weights = _nodes(dim)
    assert [weights.sum(), weights @ nodes, weights @ nodes**2] == pytest.approx(
        [1.0, 0.0, 1 / dim], abs=1e-13
    )


def test_parts_of_one_degree_from_series_of_two_lengths_are_added():
    """μ^a Q of two groups meet in a degree, and their series differ in length; a smaller error asks
    for more norm.
    """
    target = parse_target("(corr + token + query + 1)^2", 4).target
    near, far = (biased_norm_bound(target, error).norm for error in (1e-4, 1e-2))
    assert near > far > 0
