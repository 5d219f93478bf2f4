"""Learning curves of given features: against exact spectra, cross-validation and fits."""

import math

import numpy as np
import pytest

import keyhole as kh
from keyhole.theory import conditional_curve, curve_from_spectrum

EIGENVALUES = np.array([1.0] * 5 + [0.1] * 25)
POWERS = np.array([0.5] * 2 + [0.0] * 3 + [0.04] * 5 + [0.0] * 20)


def gaussian_sets(rng, n_sets):
    """Gaussian features with known eigenvalues, and a target with known powers on them."""
    eigenfunctions = rng.standard_normal((n_sets, len(EIGENVALUES)))
    features = eigenfunctions * np.sqrt(EIGENVALUES)
    return features, eigenfunctions @ np.sqrt(POWERS)


def exact_curve(n_samples, ridge, noise=0.0):
    """The same curve from the spectrum itself."""
    return curve_from_spectrum(
        EIGENVALUES, np.ones(len(EIGENVALUES)), POWERS, n_samples, ridge, noise=noise
    )


@pytest.mark.parametrize("n_sets", [60, 200, 2000])
def test_the_bias_of_few_sets_is_taken_out(n_sets, rng):
    n_samples = [10, 25, 50, 200]
    curves = []
    for _ in range(40):
        features, y = gaussian_sets(rng, n_sets)
        y = y + 0.3 * rng.standard_normal(n_sets)
        curves.append(conditional_curve(features, y, n_samples, ridge=0.02))
    mean = np.mean(curves, axis=0)
    standard_error = np.std(curves, axis=0, ddof=1) / math.sqrt(len(curves))
    exact = exact_curve(n_samples, ridge=0.02, noise=0.09)
    assert np.all(np.abs(mean - exact) <= 5 * standard_error + 0.06 * exact * 60 / n_sets)


def test_the_plain_formula_on_few_sets_is_biased(rng):
    """Broken variant: eigenvalues and powers of the sample, taken for those of the kernel."""
    plain_curves = []
    for _ in range(40):
        features, y = gaussian_sets(rng, 60)
        y = y + 0.3 * rng.standard_normal(60)
        values, vectors = np.linalg.eigh(features @ features.T / 60)
        powers = np.square(vectors.T @ y) / 60
        curve = curve_from_spectrum(np.maximum(values, 0), np.ones(60), powers, 50, 0.02)
        plain_curves.append(curve)
    exact = exact_curve(50, ridge=0.02, noise=0.09)
    assert np.mean(plain_curves) < 0.7 * exact


def test_what_the_features_cannot_express_is_noise(rng):
    features, y = gaussian_sets(rng, 20_000)
    unexplained = 0.3 * rng.standard_normal(len(y))
    curve = conditional_curve(features, y + unexplained, [40, 400], ridge=0.02)
    np.testing.assert_allclose(curve, exact_curve([40, 400], 0.02, noise=0.09), rtol=0.05)


def test_as_many_samples_as_sets_is_generalised_cross_validation(rng):
    features, y = gaussian_sets(rng, 80)
    y = y + rng.standard_normal(80)
    hat = features @ np.linalg.solve(features.T @ features + 80 * 0.05 * np.eye(30), features.T)
    residuals = y - hat @ y
    cross_validation = np.mean(residuals**2) / (1 - np.trace(hat) / 80) ** 2
    prediction = conditional_curve(features, y, 80, ridge=0.05)
    assert math.isclose(float(prediction), cross_validation, rel_tol=1e-9)


def test_more_features_than_sets_use_the_gram_matrix(rng):
    """The same features, written with 300 redundant coordinates."""
    features, y = gaussian_sets(rng, 100)
    rotation = np.linalg.qr(rng.standard_normal((300, 30)))[0]
    np.testing.assert_allclose(
        conditional_curve(features @ rotation.T, y, [10, 90], 0.02, fit_intercept=True),
        conditional_curve(features, y, [10, 90], 0.02, fit_intercept=True),
        rtol=1e-8,
    )


def test_an_intercept_learns_the_mean(rng):
    """Least squares with an intercept on n samples has n/(n−p−1) of the noise, nearly."""
    features, y = gaussian_sets(rng, 50_000)
    shifted = features + 3.0
    noisy = y + 10.0 + rng.standard_normal(len(y))
    with_intercept = conditional_curve(shifted, noisy, 100, ridge=0.0, fit_intercept=True)
    assert math.isclose(float(with_intercept), 100 / (100 - 31), rel_tol=0.05)


@pytest.mark.parametrize(
    ("activation", "fit_intercept"), [("relu", False), ("softmax", True), ("exp", True)]
)
def test_predictions_meet_fits_of_few_heads(activation, fit_intercept, seed):
    dim, n_keys, n_samples, ridge = 4, 3, 150, 1e-3
    target = kh.targets.QueryPower(2, dim) + 0.5 * kh.targets.TokenPower(1, dim) + 0.3
    heads = kh.GaussianHeads(mean=0.5).sample(12, dim, seed=seed)
    sets = kh.targets.sphere_sets(4000, n_keys, dim, seed=seed)
    features = kh.attention_features(sets, heads, activation)
    y = target(sets)
    predicted = conditional_curve(features, y, n_samples, ridge, fit_intercept=fit_intercept)

    # twenty fits on disjoint samples, tested on the last thousand sets
    errors = []
    for start in range(0, 3000, n_samples):
        rows = slice(start, start + n_samples)
        errors.append(ridge_error(features, y, rows, ridge, fit_intercept))
    standard_error = np.std(errors, ddof=1) / math.sqrt(len(errors))
    assert abs(predicted - np.mean(errors)) <= 0.15 * np.mean(errors) + 4 * standard_error


def ridge_error(features, y, rows, ridge, fit_intercept):
    """The test error of ridge regression on some rows, on the last thousand."""
    design, labels = features[rows], y[rows]
    offset, mean = np.zeros(design.shape[1]), 0.0
    if fit_intercept:
        offset, mean = design.mean(axis=0), labels.mean()
    gram = (design - offset).T @ (design - offset) + len(labels) * ridge * np.eye(len(offset))
    coefficients = np.linalg.solve(gram, (design - offset).T @ (labels - mean))
    return np.mean(((features[-1000:] - offset) @ coefficients + mean - y[-1000:]) ** 2)


def test_too_few_sets_are_refused(rng):
    features = rng.standard_normal((50, 200))
    y = features[:, 0]
    with pytest.raises(ValueError, match=r"50 sets.*does not show.*500 samples.*ridge above"):
        conditional_curve(features, y, 500, ridge=1e-6)
    assert np.isfinite(conditional_curve(features, y, 49, ridge=0.0))
    with pytest.raises(ValueError, match="more than 50 sets"):
        conditional_curve(features, y, 50, ridge=0.0)


def test_bad_sets_are_refused(rng):
    features = rng.standard_normal((8, 3))
    with pytest.raises(ValueError, match=r"one row and one value per set: got \(8, 3\) and \(7,\)"):
        conditional_curve(features, np.ones(7), 4, 0.1)
    with pytest.raises(ValueError, match="at least 4 sets"):
        conditional_curve(features[:3], np.ones(3), 2, 0.1)
    features[2, 1] = np.nan
    with pytest.raises(ValueError, match=r"`features` must be finite.*\(2, 1\)"):
        conditional_curve(features, np.ones(8), 4, 0.1)


def test_a_target_of_zero_and_features_of_zero():
    assert conditional_curve(np.eye(6), np.zeros(6), 3, 0.1) == 0.0
    assert conditional_curve(np.zeros((6, 2)), np.ones(6), 3, 0.1) == 1.0


def test_an_array_of_ridges_is_one_curve_per_ridge():
    rng = np.random.default_rng(0)
    features = rng.standard_normal((60, 5))
    y = features @ rng.standard_normal(5)
    samples = [10, 40]
    ridges = np.array([[0.01], [1.0]])
    both = conditional_curve(features, y, samples, ridges)
    assert both.shape == (2, 2)
    for row, ridge in zip(both, ridges[:, 0], strict=True):
        np.testing.assert_array_equal(row, conditional_curve(features, y, samples, float(ridge)))
    with pytest.raises(ValueError, match="`ridge` must not be negative: got -1 in the array"):
        conditional_curve(features, y, samples, np.array([0.1, -1.0]))
