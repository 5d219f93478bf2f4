"""Predicted test errors against fitted kernel ridge regression, attention heads and MLPs, on the
sphere.
"""

import math

import numpy as np
import pytest

from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads
from keyhole.attention.kernels import attention_kernel, mlp_kernel
from keyhole.theory.curves import (
    best_ridge_curve,
    curve_from_spectrum,
    empirical_curve,
    learning_curve,
)
from keyhole.theory.harmonics import pair_powers
from keyhole.theory.spectrum import attention_spectrum
from keyhole.theory.targets import Correlation, TokenPower, sphere_sets

# the theory is asymptotic in the number of eigenfunctions; at d = 8 it is held to twelve percent
THEORY = 0.12


def gram_errors(gram, target, n, n_keys, ridge, noise, fits, seed):
    """Test errors, noise floor included, of kernel ridge regression on independent samples."""
    errors = []
    for fit in range(fits):
        batch = sphere_sets(n + 500, n_keys, target.dim, 1000 * seed + fit)
        train, test = batch[:n], batch[n:]
        rng = np.random.default_rng([seed, fit])
        y = target(train) + math.sqrt(noise) * rng.standard_normal(n)
        weights = np.linalg.solve(gram(train, train) + n * ridge * np.eye(n), y)
        errors.append(np.mean((gram(test, train) @ weights - target(test)) ** 2) + noise)
    return np.array(errors)


def head_errors(target, n, n_keys, n_heads, ridge, fits, seed):
    errors = []
    for fit in range(fits):
        batch = sphere_sets(n + 500, n_keys, target.dim, 1000 * seed + fit)
        phi = attention_features(
            batch, GaussianHeads().sample(n_heads, target.dim, 1000 * seed + fit)
        )
        train, y = phi[:n], target(batch)
        weights = np.linalg.solve(train @ train.T + n * ridge * np.eye(n), y[:n])
        errors.append(np.mean((phi[n:] @ (train.T @ weights) - y[n:]) ** 2))
    return np.array(errors)


def deviation(predicted, errors):
    """How far the prediction is off, as a share, beyond five standard errors of the measured
    mean.
    """
    mean, standard_error = errors.mean(), errors.std(ddof=1) / math.sqrt(len(errors))
    return max(abs(predicted - mean) - 5 * standard_error, 0.0) / mean


CASES = [
    ("attention", TokenPower(2, 8), 4, 300, 1e-4, 0.0),
    ("attention", Correlation(1, 8), 4, 300, 1e-3, 0.0),
    ("attention", Correlation(1, 8), 4, 150, 1e-4, 0.01),
    ("attention", TokenPower(2, 16), 4, 200, 0.0, 0.0),
    ("mlp", TokenPower(2, 8), 4, 300, 1e-4, 0.0),
    ("mlp", Correlation(1, 8), 4, 300, 0.0, 0.001),
]


@pytest.mark.parametrize(("model", "target", "n_keys", "n", "ridge", "noise"), CASES)
def test_prediction_meets_fitted_models(model, target, n_keys, n, ridge, noise, seed):
    gram = attention_kernel if model == "attention" else mlp_kernel
    errors = gram_errors(gram, target, n, n_keys, ridge, noise, fits=6, seed=seed)
    predicted = float(learning_curve(target, n, n_keys, ridge, noise, model=model))
    assert deviation(predicted, errors) < THEORY


def test_the_other_model_is_told_apart(seed):
    """Broken twin: the MLP's prediction for attention's fits."""
    _, target, n_keys, n, ridge, noise = CASES[0]
    errors = gram_errors(attention_kernel, target, n, n_keys, ridge, noise, fits=6, seed=seed)
    assert (
        deviation(float(learning_curve(target, n, n_keys, ridge, noise, model="mlp")), errors)
        > THEORY
    )


def listed(target, n_keys, max_degree):
    """The spectrum up to a degree, and the target's power in each of its levels."""
    spectrum = attention_spectrum(target.dim, n_keys, max_degree)
    powers = np.zeros((max_degree + 1, max_degree + 1))
    known = pair_powers(target)
    powers[: known.shape[0], : known.shape[1]] = known
    powers[:, 1:] /= n_keys
    return spectrum, powers[spectrum.degrees[:, 0], spectrum.degrees[:, 1]]


def test_eigenvalues_beyond_the_list_act_as_ridge():
    """Interpolation with fewer samples than eigenfunctions: without the remainder it is far off."""
    target, n_keys, n = TokenPower(2, 16), 4, 200
    spectrum, powers = listed(target, n_keys, max_degree=3)
    levels = spectrum.eigenvalues, spectrum.multiplicities, powers
    with_it = float(curve_from_spectrum(*levels, n, 0.0, remainder=spectrum.remainder))
    without = float(curve_from_spectrum(*levels, n, 0.0))
    exact = float(learning_curve(target, n, n_keys, ridge=0.0))
    assert math.isclose(with_it, exact, rel_tol=0.005)
    assert abs(without - exact) > 5 * abs(with_it - exact)


def test_heads_count_as_d_plus_one_features(seed):
    target, n_keys, n, ridge, n_heads = TokenPower(2, 8), 4, 200, 1e-4, 60
    errors = head_errors(target, n, n_keys, n_heads, ridge, fits=16, seed=seed)
    assert (
        deviation(float(learning_curve(target, n, n_keys, ridge, n_heads=n_heads)), errors) < THEORY
    )
    # broken twin: one feature per head
    spectrum, powers = listed(target, n_keys, max_degree=8)
    wrong = curve_from_spectrum(
        spectrum.eigenvalues,
        spectrum.multiplicities,
        powers,
        n,
        ridge,
        0.0,
        n_heads,
        spectrum.remainder,
    )
    assert deviation(float(wrong), errors) > THEORY


def test_few_heads_may_not_be_ignored(seed):
    target, n_keys, n, ridge, n_heads = TokenPower(2, 8), 4, 200, 1e-4, 10
    errors = head_errors(target, n, n_keys, n_heads, ridge, fits=16, seed=seed)
    assert (
        deviation(float(learning_curve(target, n, n_keys, ridge, n_heads=n_heads)), errors) < THEORY
    )
    assert (
        deviation(float(learning_curve(target, n, n_keys, ridge)), errors) > THEORY
    )  # broken twin


def test_the_best_ridge_is_best():
    target, n = Correlation(1, 8), [100, 1000]
    best = best_ridge_curve(target, n, n_keys=8, noise=0.01)
    for factor in (0.5, 0.9, 1.1, 2.0):
        for i, size in enumerate(n):
            other = float(
                learning_curve(target, size, 8, float(best.ridge[i]) * factor, noise=0.01)
            )
            assert other >= best.error[i] * (1 - 1e-9)
        at_best = float(learning_curve(target, n[0], 8, float(best.ridge[0]), noise=0.01))
        assert math.isclose(at_best, best.error[0], rel_tol=1e-6)


def test_an_empirical_spectrum_predicts_too(seed):
    """Gram matrices of 400 samples: right to six percent on average, and their standard error is a
    spread.
    """
    target, n_keys, sizes = TokenPower(2, 8), 4, [25, 50, 100]
    exact = learning_curve(target, sizes, n_keys, ridge=1e-4)
    curves = []
    for i in range(8):
        batch = sphere_sets(400, n_keys, 8, 1000 * seed + i)
        curves.append(empirical_curve(attention_kernel(batch), target(batch), sizes, ridge=1e-4))
    errors = np.array([curve.error for curve in curves])
    spread = errors.std(axis=0, ddof=1)
    off = np.abs(errors.mean(axis=0) - exact)
    assert np.all(off < 0.06 * exact + 6 * spread / math.sqrt(8))
    # eight draws know their own spread to a quarter, and the halves know it to a factor of two
    reported = np.mean([curve.standard_error for curve in curves], axis=0)
    assert np.all((reported > spread / 4) & (reported < 4 * spread))
    # broken twin: the plain formula, its bias left in
    plain = np.mean([curve.error + curve.bias for curve in curves], axis=0)
    assert abs(plain[-1] - exact[-1]) > 0.06 * exact[-1] + 6 * spread[-1] / math.sqrt(8)


@pytest.mark.slow
def test_prediction_over_a_grid(seed):
    """d in {8, 16}, three targets, n from 100 to 800: the median deviation of the mean of eight
    fits.
    """
    off = []
    for dim in (8, 16):
        for target in (TokenPower(2, dim), Correlation(1, dim), Correlation(3, dim)):
            for n in (100, 300, 800):
                errors = gram_errors(attention_kernel, target, n, 4, 1e-4, 0.0, fits=8, seed=seed)
                off.append(abs(float(learning_curve(target, n, 4, 1e-4)) / errors.mean() - 1))
    assert np.median(off) < 0.06
    assert np.quantile(off, 0.9) < THEORY
