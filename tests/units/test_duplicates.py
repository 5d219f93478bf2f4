"""A sample is a row: equal sets are samples of their own, whatever their targets."""

import numpy as np
import pytest
from paper import PAPER_LAYER
from sklearn.metrics import log_loss

import keyhole as kh


@pytest.fixture
def token(seed):
    """One binary number for each of 400 samples; its label agrees with it four times of five."""
    rng = np.random.default_rng([seed, 21])
    x = rng.integers(0, 2, (400, 1, 1)).astype(float)
    agrees = rng.random(400) < 0.8
    return x, np.where(agrees, x[:, 0, 0], 1 - x[:, 0, 0]).astype(int)


def test_probabilities_of_equal_sets_are_the_shares_of_their_labels(token):
    x, y = token
    model = kh.AttentionClassifier(random_state=0).fit(x, y)
    probability_of_one = model.predict_proba([[[0.0]], [[1.0]]])[:, 1]
    shares = [y[x[:, 0, 0] == value].mean() for value in (0.0, 1.0)]
    np.testing.assert_allclose(probability_of_one, shares, atol=0.02)


def test_groups_of_one_sample_each_change_nothing(token):
    x, y = token
    alone = kh.AttentionClassifier(random_state=0).fit(x, y).predict_proba(x)
    grouped = kh.AttentionClassifier(random_state=0).fit(x, y, groups=np.arange(400))
    assert log_loss(y, alone) == pytest.approx(log_loss(y, grouped.predict_proba(x)), abs=0.01)


@pytest.mark.parametrize("n_heads", [3, 40, np.inf])
def test_one_of_several_equal_samples_is_left_out_alone(rng, n_heads):
    """Three rows with equal keys and equal targets: the fit without one has seen the other two."""
    x = rng.normal(size=(20, 3, 2))
    y = rng.normal(size=20)
    x[1] = x[2] = x[0]
    y[1] = y[2] = y[0]
    model = kh.AttentionRegressor(
        n_heads, **{**PAPER_LAYER, "heads": kh.GaussianHeads(), "alpha": 0.1}, random_state=0
    )
    model.fit(x, y)
    left_out = model.loo_predictions_[0]
    errors = model.jackknife_errors_
    without_first = model.fit(x[1:], y[1:])
    assert left_out == pytest.approx(without_first.predict(x[:1])[0], rel=1e-7)
    assert len(errors) == 20
