"""Automatic choices pass over candidates that cannot be fitted."""

import numpy as np
import pytest

import keyhole as kh


def test_a_head_distribution_that_overflows_is_passed_over(seed, monkeypatch):
    monkeypatch.setattr("keyhole.choose.STRENGTHS", (1000.0,))
    sets = kh.targets.sphere_sets(40, n_keys=4, dim=3, seed=seed)
    y = sets.tokens[::4, 0].copy()
    settings = {
        "activation": "exp",
        "pooling": "mean",
        "scaling": "none",
        "query": "given",
        "random_state": 0,
    }
    around_identity = kh.AttentionRegressor(8, kh.GaussianHeads(mean=1000.0), **settings)
    with pytest.raises(ValueError, match=r"overflow|squares below"):
        around_identity.fit(sets, y)
    zero_mean = kh.AttentionRegressor(8, kh.GaussianHeads(), **settings).fit(sets, y)
    chosen = kh.AttentionRegressor(8, **settings).fit(sets, y)
    np.testing.assert_array_equal(chosen.predict(sets), zero_mean.predict(sets))
    assert chosen.candidates_[-1].loss == np.inf


def test_a_scaling_that_overflows_is_passed_over_unless_it_was_asked_for(seed):
    rng = np.random.default_rng([seed, 12])
    x = 1e4 * rng.normal(size=(40, 3))
    y = x[:, 0]
    settings = {
        "activation": "exp",
        "heads": kh.GaussianHeads(),
        "query": "given",
        "random_state": 0,
    }
    with pytest.raises(ValueError, match=r"overflow|squares below"):
        kh.AttentionRegressor(8, scaling="none", **settings).fit(x, y)
    chosen = kh.AttentionRegressor(8, **settings).fit(x, y)
    assert chosen.tokens_.scaling != "none"


def test_a_scaling_under_which_no_penalty_can_be_judged_is_passed_over(seed):
    """exp of long tokens: some sample is fitted exactly under each of the penalties given."""
    rng = np.random.default_rng([seed, 13])
    x = 20.0 * rng.normal(size=(40, 3))
    y = x[:, 0]
    settings = {
        "alpha": [0.1, 1.0],
        "activation": "exp",
        "heads": kh.GaussianHeads(),
        "query": "given",
        "random_state": 0,
    }
    with pytest.raises(ValueError, match="cannot choose among the 2 penalties"):
        kh.AttentionRegressor(8, scaling="none", **settings).fit(x, y)
    chosen = kh.AttentionRegressor(8, **settings).fit(x, y)
    assert chosen.tokens_.scaling != "none"
