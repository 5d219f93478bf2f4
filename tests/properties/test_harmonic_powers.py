"""Pair powers |P_kl F|² add up to E F² and are the kernel averages N_k N_l E[F F' P_k P_l]."""

import math

import numpy as np
import pytest

from keyhole.theory.harmonics import (
    _closed_products,
    _harmonic_transform,
    _term_products,
    gegenbauer,
    harmonic_count,
    pair_powers,
)
from keyhole.theory.targets import (
    Correlation,
    QueryPower,
    RotatedCorrelation,
    TokenPower,
    joinings,
    monomial,
    sphere_sets,
)


def general_powers(target):
    """The joining algorithm, without the closed forms of the families."""
    (term,) = target.terms
    (r, s), d = term.degrees, target.dim
    return _harmonic_transform(r, r, d) @ joinings(term, term, d).T @ _harmonic_transform(s, s, d).T


def mixed_target(rng, dim):
    A, B = rng.standard_normal((2, dim, dim)) / math.sqrt(dim)
    b, c, g, h = rng.standard_normal((4, dim)) / math.sqrt(dim)
    target = monomial(dim, 1.0, [(A, 1), (B, 1)], [(b, 1)], [(g, 1)]) - monomial(
        dim, 1.0, [(None, 1)], [(b, 1)]
    )
    return (
        target + monomial(dim, 0.7, [], [(b, 1), (c, 2)], [(h, 1)]) + 0.3 * TokenPower(2, dim) + 0.1
    )


def standard_errors_off(target, powers, rng):
    """How far the powers are from N_k N_l E[F(x) F(x') P_k(<x_0,x_0'>) P_l(<x_i,x_i'>)], by Monte
    Carlo.
    """
    n, d = 4000, target.dim
    a, b = (sphere_sets(n, 1, d, seed=int(s)) for s in rng.integers(2**31, size=2))
    product = target(a) * target(b)
    u = np.einsum("nd,nd->n", a.query, b.query)
    t = np.einsum("nd,nd->n", a.tokens, b.tokens)
    tables = [np.array([gegenbauer(max(powers.shape) - 1, x, d) for x in xs]) for xs in (u, t)]
    off = []
    for (k, l), power in np.ndenumerate(powers):  # noqa: E741
        draws = (
            product
            * tables[0][:, k]
            * tables[1][:, l]
            * harmonic_count(d, k)
            * harmonic_count(d, l)
        )
        off.append((draws.mean() - power) / (draws.std() / math.sqrt(len(draws))))
    return np.abs(off)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64])
def test_closed_forms_agree_with_joinings(dim):
    for target in (
        QueryPower(3, dim),
        TokenPower(4, dim),
        Correlation(1, dim),
        Correlation(4, dim),
    ):
        np.testing.assert_allclose(
            pair_powers(target), general_powers(target), rtol=1e-9, atol=1e-16
        )


@pytest.mark.parametrize("dim", [2, 3, 7])
def test_closed_products_of_two_terms_agree_with_joinings(dim, rng):
    """Directions of any length and angle, of the query and of the key, and correlations, each
    against each.
    """
    b, c = 0.3 * rng.standard_normal((2, dim))
    targets = [
        TokenPower(0, dim),
        TokenPower(2, dim, b),
        TokenPower(3, dim, c),
        TokenPower(4, dim, 5 * c),
    ]
    targets += [
        QueryPower(2, dim, b),
        QueryPower(4, dim, c),
        QueryPower(3, dim, c),
        QueryPower(3, dim, 4 * b),
    ]
    targets += [
        monomial(dim, 1.0, [(None, q)], [(beta, 1)])
        for q, beta in ((1, b), (2, c), (3, 3 * c), (4, b))
    ]
    compared = 0
    for first in targets:
        for second in targets:
            (one,), (other,) = first.terms, second.terms
            (r, s), (r2, s2) = one.degrees, other.degrees
            found = _closed_products(one, other, dim)
            if found is None or (r - r2) % 2 or (s - s2) % 2:
                continue
            sums = joinings(one, other, dim)
            want = _harmonic_transform(r, r2, dim) @ sums.T @ _harmonic_transform(s, s2, dim).T
            assert found.shape <= want.shape
            padded = np.zeros(want.shape)
            padded[: found.shape[0], : found.shape[1]] = found
            np.testing.assert_allclose(padded, want, rtol=1e-9, atol=1e-12 * np.abs(want).max())
            compared += 1
    assert compared >= 20


def test_the_size_of_a_product_is_that_of_everything_added_up_for_it(rng):
    A, B = rng.standard_normal((2, 3, 3))
    (first,), (second,) = (
        monomial(3, 1.0, [(A, 1), (C, 1)], [(np.ones(3), 1)]).terms for C in (B, -B)
    )
    product, size = _term_products(first, second, 3)
    query, sums, key = (
        _harmonic_transform(2, 2, 3),
        joinings(first, second, 3),
        _harmonic_transform(3, 3, 3),
    )
    addends = query[:, None, :, None] * sums.T[None, None] * key[None, :, None, :]
    np.testing.assert_allclose(product, addends.sum(axis=(2, 3)), atol=1e-12)
    np.testing.assert_allclose(size, np.abs(addends).sum(axis=(2, 3)))
    assert min(query.min(), sums.min(), key.min()) < 0


def test_powers_are_kernel_averages(rng):
    target = mixed_target(rng, 3)
    assert standard_errors_off(target, pair_powers(target), rng).max() < 6


def test_a_lost_factor_is_noticed(rng):
    """Broken twin: powers doubled are many standard errors off."""
    target = mixed_target(rng, 3)
    assert standard_errors_off(target, 2 * pair_powers(target), rng).max() > 6


@pytest.mark.parametrize("dim", [1, 2, 5, 16])
def test_powers_add_up_to_the_second_moment(dim, rng):
    target = mixed_target(rng, dim) + RotatedCorrelation(0.4, dim, seed=1)
    square = target(sphere_sets(40_000, 1, dim, seed=int(rng.integers(2**31)))) ** 2
    standard_error = square.std() / math.sqrt(len(square))
    assert abs(square.mean() - pair_powers(target).sum()) < 6 * standard_error + 1e-12


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 512])
def test_correlation_has_the_moment_of_a_projection(dim):
    """E F² = E <x_0,x_i>^{2q} / d, whose Gaussian-like moments are a product."""
    for q in range(6):
        moment = math.prod((2 * j + 1) / (dim + 2 * j) for j in range(q))
        assert math.isclose(pair_powers(Correlation(q, dim)).sum(), moment / dim, rel_tol=1e-10)


def test_two_directions_meet_at_their_angle(rng):
    """<β,x>² and <γ,x>³ with different β, γ: Funk–Hecke against the joinings of the same
    polynomial.
    """
    dim = 4
    b, c = rng.standard_normal((2, dim))
    square = TokenPower(2, dim, b) + TokenPower(2, dim, c)
    expanded = monomial(dim, 1.0, [], [(b, 2)]) + monomial(dim, 1.0, [], [(c, 1), (c + 0 * b, 1)])
    np.testing.assert_allclose(pair_powers(square), pair_powers(expanded))
    values = square(sphere_sets(50_000, 1, dim, seed=int(rng.integers(2**31)))) ** 2
    assert abs(values.mean() - pair_powers(square).sum()) < 6 * values.std() / math.sqrt(
        len(values)
    )


def test_rounding_is_reported_not_returned():
    """Two targets that differ in the ninth digit: squares of their difference drown in rounding."""
    nearly = (1 + 1e-9) * np.eye(3)
    target = monomial(3, 1.0, [(None, 1)], [(np.ones(3), 2)]) - monomial(
        3, 1.0, [(nearly, 1)], [(np.ones(3), 2)]
    )
    with pytest.raises(ValueError, match=r"cannot be told from rounding.*rkhs_norm_bound"):
        pair_powers(target)
