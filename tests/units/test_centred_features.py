"""The constant that the dual route takes off all features: nothing may depend on how it is taken.

With an intercept any constant may be taken off, and the fit is the same. The diagonal of the Gram
matrix is not. It says how far rounding moves predictions, and so which penalties are allowed: the
constant has to be a property of the samples, whatever their order.
"""

import numpy as np
import pytest
from layers import fit_layer

import keyhole as kh
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDraw
from keyhole.attention.host_backend import HostBackend

N_SAMPLES = 170
HEADS = HeadDraw(kh.GaussianHeads(1.0), 16, 3, 0)


@pytest.fixture
def sets(rng):
    """Sets of four keys, of which one coordinate is a thousand times as large as the others."""
    tokens = rng.standard_normal((N_SAMPLES, 4, 3)) * [1000.0, 1.0, 1.0]
    return kh.SetBatch(list(tokens), rng.standard_normal((N_SAMPLES, 3)))


@pytest.fixture
def groups(rng):
    """Groups of about three samples, which the dual route alone can leave out."""
    return rng.integers(0, N_SAMPLES // 3, size=N_SAMPLES)


@pytest.fixture
def labels(rng):
    return np.where(rng.standard_normal((N_SAMPLES, 1)) > 0, 1.0, -1.0)


def fits_in_two_orders(sets, labels, groups, rng, **settings):
    """One fit, and one to the same samples in another order."""
    order = rng.permutation(N_SAMPLES)
    one = fit_layer(sets, labels, HEADS, groups=groups, **settings)
    other = fit_layer(sets[order], labels[order], HEADS, groups=groups[order], **settings)
    return one.ridge, other.ridge


def check_same_judgement(one, other):
    """Raise unless the same penalties were tried, and rounding moves both fits as far."""
    np.testing.assert_allclose(one.alphas, other.alphas, rtol=1e-9)
    np.testing.assert_allclose(one.floor, other.floor, rtol=1e-9)
    np.testing.assert_allclose(one.moved, other.moved, rtol=1e-5)


@pytest.mark.parametrize("criterion", ["squared_error", "log_loss"])
def test_how_far_rounding_moves_a_fit_does_not_depend_on_the_order(
    criterion, sets, labels, groups, rng
):
    one, other = fits_in_two_orders(sets, labels, groups, rng, criterion=criterion)
    check_same_judgement(one, other)


def test_the_mean_of_some_samples_would_depend_on_the_order(sets, labels, groups, rng, monkeypatch):
    products = HostBackend.products

    def products_about_few(self, *arguments, centred_rows, **settings):
        return products(self, *arguments, centred_rows=centred_rows[::5], **settings)

    monkeypatch.setattr(HostBackend, "products", products_about_few)
    one, other = fits_in_two_orders(sets, labels, groups, rng)
    with pytest.raises(AssertionError):
        check_same_judgement(one, other)


def test_newton_steps_have_the_same_floor_in_every_order(sets, labels, groups, rng):
    one, other = fits_in_two_orders(sets, labels, groups, rng, loss="log_loss")
    np.testing.assert_allclose(one.alphas, other.alphas, rtol=1e-9)
    np.testing.assert_allclose(one.floor, other.floor, rtol=1e-9)


@pytest.mark.parametrize("keep_factor", [False, True])
def test_the_centre_is_the_mean_of_all_samples_of_positive_weight(
    keep_factor, sets, labels, groups, rng
):
    weights = rng.integers(0, 3, size=N_SAMPLES).astype(float)
    fit = fit_layer(
        sets,
        labels,
        HEADS,
        np.array([1.0, 1e6]),
        weights=weights,
        groups=groups,
        keep_factor=keep_factor,
    )
    features = attention_features(sets[np.flatnonzero(weights)], HEADS, "relu")
    np.testing.assert_allclose(fit.centre, features.mean(axis=0), rtol=1e-12)


def test_nothing_is_taken_off_without_an_intercept(sets, labels, groups):
    fit = fit_layer(sets, labels, HEADS, groups=groups, fit_intercept=False)
    assert fit.centre is None
