import math

import numpy as np
import pytest

import keyhole as kh
from keyhole.theory.biased import biased_norm_bound
from keyhole.theory.blocks import bias_of
from keyhole.theory.bounds import (
    approximation_bound,
    heads_needed,
    heads_predicted,
    kernel_risk_bound,
    risk_bound,
    samples_needed,
)
from keyhole.theory.complexity import paper_complexity, rkhs_norm
from keyhole.theory.curves import best_ridge_curve, learning_curve
from keyhole.theory.targets import Correlation, QueryPower, RotatedCorrelation, TokenPower


def test_the_papers_bound_term_by_term():
    target, n, heads, delta = TokenPower(2, 8), 10_000, 500, 0.1
    complexity = paper_complexity(target)
    bound = risk_bound(target, n, heads, delta, constant=2.0)
    assert math.isclose(bound.estimation, 2 * math.sqrt(complexity * math.log(8 * heads) / n))
    assert math.isclose(
        bound.approximation, 2 * math.sqrt(complexity * (64 + math.log(heads)) / (delta * heads))
    )
    assert bound.total == bound.approximation + bound.estimation
    assert "constant 2" in str(bound)
    assert "probability 0.9" in str(bound)


def test_infinite_sizes_make_their_term_vanish():
    """Infinitely many heads need no approximation, but log(dM) makes the estimation infinite."""
    assert risk_bound(TokenPower(2, 8), 100, math.inf).approximation == 0.0
    assert risk_bound(TokenPower(2, 8), 100, math.inf).estimation == math.inf
    assert risk_bound(TokenPower(2, 8), math.inf, 100).estimation == 0.0
    assert risk_bound(TokenPower(1, 1), 10, 1).estimation == 0.0  # log(dM) = 0


def test_the_explicit_bound_has_no_hidden_constant():
    bound = kernel_risk_bound(TokenPower(2, 8), 1000, 8, delta=0.01)
    assert bound.approximation == 0.0
    assert bound.constant == 1.0
    assert "no hidden constant" in str(bound)
    factor = 2 * math.sqrt(0.41232089773844) + math.sqrt(8 * math.log(100))
    assert math.isclose(
        bound.total, math.sqrt(rkhs_norm(TokenPower(2, 8)) / 1000) * factor, rel_tol=1e-9
    )


def test_samples_needed_inverts_the_curve():
    target = TokenPower(2, 8)
    for noise in (0.0, 0.01):
        n = samples_needed(target, 8, 1e-3, noise=noise)
        at, before = best_ridge_curve(target, [n, n - 1], 8, noise).error - noise
        assert at <= 1e-3 < before


def test_an_mlp_needs_more_samples_and_more_with_more_keys():
    target = TokenPower(2, 8)
    ratios = []
    for n_keys in (4, 8):
        error = 1e-3 / n_keys  # the same share of E f*², which falls like 1/N
        ratios.append(
            samples_needed(target, n_keys, error, "mlp") / samples_needed(target, n_keys, error)
        )
    assert 1 < ratios[0] < ratios[1]


def test_heads_needed_inverts_the_bound():
    target = Correlation(1, 4)
    heads = heads_needed(target, 10.0, delta=0.1, constant=0.5)
    assert (
        approximation_bound(target, heads, 0.1, 0.5)
        <= 10.0
        < approximation_bound(target, heads - 1, 0.1, 0.5)
    )


def test_heads_predicted_inverts_the_curve():
    target = TokenPower(1, 8)
    heads = heads_predicted(target, 8, 1e-3, n_samples=10_000)
    assert float(best_ridge_curve(target, 10_000, 8, n_heads=heads).error) <= 1e-3
    assert heads < heads_needed(target, 1e-3)


def test_unreachable_errors_are_refused():
    with pytest.raises(
        ValueError, match=r"no number of samples for an error of 1e-09 with 2 heads.*more heads"
    ):
        samples_needed(TokenPower(2, 8), 8, 1e-9, n_heads=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: samples_needed(TokenPower(1, 3), 2, 0.0), "`error` must be larger than 0"),
        (lambda: risk_bound(TokenPower(1, 3), 0, 10), "`n_samples` must be at least 1"),
        (
            lambda: risk_bound(TokenPower(1, 3), 10, 10, delta=1.0),
            "`delta` is a probability of failure",
        ),
        (
            lambda: risk_bound(TokenPower(1, 3), 10, 10, constant=0.0),
            "`constant` must be larger than 0",
        ),
        (lambda: biased_norm_bound(TokenPower(1, 3), 0.0), "`error` must be larger than 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_zero_target_costs_nothing():
    zero = RotatedCorrelation(0.5, 1, seed=0)  # S = (1−γ) − γ = 0
    assert rkhs_norm(zero) == 0.0
    assert biased_norm_bound(zero, 0.1).norm == 0.0
    assert float(learning_curve(zero, 10, 2, 0.1)) == 0.0
    assert float(learning_curve(QueryPower(1, 2) - QueryPower(1, 2), 10, 2, 0.1)) == 0.0


def test_the_largest_biased_kernel_is_that_of_a_key_that_is_its_query(rng):
    points = rng.normal(size=(200, 1, 5))
    points /= np.linalg.norm(points, axis=-1, keepdims=True)
    keys = np.concatenate([points, points[::-1]], axis=1)
    distribution = kh.GaussianHeads(mean=1.0)
    same = np.diag(kh.attention_kernel(kh.SetBatch(points, points[:, 0]), None, distribution))
    largest = bias_of(distribution, 5).largest_diagonal
    np.testing.assert_allclose(same, largest, rtol=1e-12)
    assert (
        np.diag(kh.attention_kernel(kh.SetBatch(keys, points[:, 0]), None, distribution)).max()
        < largest
    )
    for slope, corner in (
        (0.7, 0.4),
        (0.7, -0.3),
        (-0.6, 0.2),
    ):  # against its query, if that is what scores count
        distribution = kh.GaussianHeads(mean=np.diag([slope] * 5 + [corner]), scale=0.4)
        same = np.diag(
            kh.attention_kernel(
                kh.SetBatch(np.sign(slope) * points, points[:, 0]), None, distribution
            )
        )
        np.testing.assert_allclose(same, bias_of(distribution, 5).largest_diagonal, rtol=1e-12)
