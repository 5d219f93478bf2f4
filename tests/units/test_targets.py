import numpy as np
import pytest

import keyhole as kh
from keyhole.theory import targets as polynomial_module
from keyhole.theory.targets import (
    Correlation,
    Polynomial,
    QueryPower,
    RotatedCorrelation,
    TokenPower,
    fixed_free_rotation,
    monomial,
    sphere_sets,
)


def ragged(rng, dim, lengths=(1, 4, 2, 7)):
    keys = [rng.standard_normal((n, dim)) for n in lengths]
    return kh.SetBatch(keys, rng.standard_normal((len(lengths), dim)))


def by_hand(batch, pair_function):
    return np.array([np.mean([pair_function(s.query[0], key) for key in s.tokens]) for s in batch])


def test_families_agree_with_their_formulas_on_ragged_sets(rng):
    d = 5
    batch, beta = ragged(rng, d), rng.standard_normal(d)
    rotated = RotatedCorrelation(0.3, d, seed=1, beta=beta)
    formulas = {
        QueryPower(3, d, beta): lambda q, k: (beta @ q) ** 3,
        TokenPower(2, d, beta): lambda q, k: (beta @ k) ** 2,
        Correlation(2, d, beta): lambda q, k: (q @ k) ** 2 * (beta @ k),
        rotated: lambda q, k: (q @ rotated.rotation @ k) ** 3 * (beta @ k),
    }
    for target, formula in formulas.items():
        np.testing.assert_allclose(target(batch), by_hand(batch, formula), rtol=1e-10)


def test_beta_is_the_first_basis_vector_by_default(rng):
    batch = ragged(rng, 3)
    np.testing.assert_allclose(TokenPower(1, 3)(batch), by_hand(batch, lambda q, k: k[0]))


def test_monomials_multiply_their_factors(rng):
    d = 3
    batch = ragged(rng, d)
    A, b, g = rng.standard_normal((d, d)), rng.standard_normal(d), rng.standard_normal(d)
    target = monomial(d, -2.0, pairs=[(A, 2), (None, 1)], keys=[(b, 1)], query=[(g, 3)])
    want = by_hand(batch, lambda q, k: -2 * (q @ A @ k) ** 2 * (q @ k) * (b @ k) * (g @ q) ** 3)
    np.testing.assert_allclose(target(batch), want, rtol=1e-10)
    assert target.terms[0].degrees == (6, 4)


def test_algebra_agrees_with_values(rng):
    d = 4
    batch = ragged(rng, d)
    f, g, h = Correlation(1, d), TokenPower(2, d), QueryPower(1, d)
    values = {t: t(batch) for t in (f, g, h)}
    np.testing.assert_allclose((f + 2 * g - 3)(batch), values[f] + 2 * values[g] - 3)
    np.testing.assert_allclose((1 - f / 4)(batch), 1 - values[f] / 4)
    np.testing.assert_allclose((h * f * h)(batch), values[h] ** 2 * values[f])
    assert f - f == Polynomial(d, [])
    assert (f - f).degrees == (0, 0)
    assert (f - f)(batch).tolist() == [0.0] * 4
    assert f + g == g + f
    assert hash(f + g) == hash(g + f)


def test_pairwise_product_multiplies_before_averaging(rng):
    d = 3
    batch = ragged(rng, d)
    product = Correlation(1, d).pairwise(TokenPower(2, d))
    np.testing.assert_allclose(
        product(batch), by_hand(batch, lambda q, k: (q @ k) * k[0] ** 3), rtol=1e-10
    )


def test_product_of_two_averages_says_why_it_leaves_the_class():
    with pytest.raises(ValueError, match=r"average over pairs of keys.*pairwise"):
        TokenPower(1, 3) * Correlation(1, 3)


def test_targets_of_different_dimension_do_not_mix():
    with pytest.raises(ValueError, match="dim 3 and dim 4"):
        TokenPower(1, 3) + TokenPower(1, 4)


def test_dimension_of_batch_is_checked():
    with pytest.raises(ValueError, match=r"target has dim 3, the batch\s+4"):
        TokenPower(1, 3)(sphere_sets(2, 2, 4, seed=0))


def test_query_is_asked_for_only_where_it_matters():
    batch = kh.SetBatch(np.ones((2, 3, 4)))
    assert TokenPower(1, 4)(batch).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"depends on the query, and the batch of 2 sets has none"):
        Correlation(1, 4)(batch)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TokenPower(-1, 3), "`p` must be at least 0: got -1"),
        (lambda: monomial(3, keys=[(np.ones(3), -1)]), "power of `keys`` must be at least 0"),
        (lambda: Correlation(1, 0), "`dim` must be at least 1"),
        (lambda: TokenPower(1, 3, beta=np.ones(4)), r"shape \(3,\) for dim 3: got shape \(4,\)"),
        (lambda: TokenPower(1, 2, beta=np.array([1.0, np.nan])), "finite"),
        (lambda: monomial(2, pairs=[(np.eye(3), 1)]), r"shape \(2, 2\) for dim 2"),
        (lambda: sphere_sets(0, 1, 1, seed=0), "`n_sets` must be at least 1"),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises((ValueError, TypeError), match=message):
        build()


def test_an_identity_matrix_is_recognised():
    assert monomial(3, pairs=[(np.eye(3), 2)]) == monomial(3, pairs=[(None, 2)])
    assert monomial(3, keys=[(np.zeros(3), 0)]) == Polynomial(3, monomial(3).terms)


def test_values_do_not_depend_on_the_blocks(rng, monkeypatch):
    batch = ragged(rng, 3, lengths=(5, 1, 1, 9, 2, 2))
    whole = Correlation(2, 3)(batch)
    monkeypatch.setattr(polynomial_module, "MEMORY_BUDGET", 32 * 3 * 4)  # four tokens at a time
    np.testing.assert_allclose(Correlation(2, 3)(batch), whole, rtol=1e-13)


def test_float32_batches_give_float64_values(rng):
    batch = sphere_sets(5, 3, 4, seed=1)
    values = Correlation(1, 4)(batch.astype(np.float32))
    assert values.dtype == np.float64
    np.testing.assert_allclose(values, Correlation(1, 4)(batch), atol=1e-6)


def test_sphere_sets_nest_and_are_unit(seed):
    batch = sphere_sets(7, 3, 4, seed)
    np.testing.assert_allclose(np.linalg.norm(batch.tokens, axis=1), 1)
    np.testing.assert_allclose(np.linalg.norm(batch.query, axis=1), 1)
    assert np.array_equal(sphere_sets(3, 3, 4, seed).tokens, batch[:3].tokens)
    assert not np.array_equal(sphere_sets(3, 3, 4, seed + 1).tokens, batch[:3].tokens)
    assert set(np.unique(sphere_sets(20, 3, 1, seed).tokens)) == {-1.0, 1.0}


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 7, 8])
def test_rotation_has_no_fixed_directions(dim, seed):
    P = fixed_free_rotation(dim, seed)
    np.testing.assert_allclose(P @ P.T, np.eye(dim), atol=1e-12)
    assert np.abs(np.linalg.eigvals(P) - 1).min() > 0.9
    if dim > 1:
        assert abs(np.trace(P)) < 1e-12
    assert np.array_equal(P, fixed_free_rotation(dim, seed))


def test_rotated_correlation_turns_from_correlation_to_rotation():
    assert RotatedCorrelation(0.0, 5, seed=2) == Correlation(3, 5)
    np.testing.assert_allclose(
        RotatedCorrelation(1.0, 5, seed=2).rotation, fixed_free_rotation(5, 2), atol=1e-15
    )


def test_reprs_read_like_calls():
    assert repr(TokenPower(2, 3)) == "TokenPower(p=2, dim=3)"
    assert repr(QueryPower(0, 3)) == "QueryPower(p=0, dim=3)"
    assert (
        repr(RotatedCorrelation(0.5, 3, seed=1)) == "RotatedCorrelation(gamma=0.5, dim=3, seed=1)"
    )
    assert "2 terms of degrees (0, 1), (0, 2)" in repr(TokenPower(1, 3) + TokenPower(2, 3))


def test_rotations_turn_either_way():
    """In the plane there are two rotations without a fixed direction and of trace 0, and a uniform
    draw meets both.
    """
    assert {int(np.sign(fixed_free_rotation(dim=2, seed=seed)[1, 0])) for seed in range(40)} == {
        -1,
        1,
    }
