"""Spectra and learning curves of every pointwise activation, of sets without a query, and with an
intercept: against closed-form moments, Gram matrices and fits.
"""

import math

import numpy as np
import pytest

import keyhole as kh
from keyhole import theory
from keyhole.attention.activations import POINTWISE, gaussian_moment
from keyhole.theory.activations import score_activation

CORRELATIONS = np.array([-0.7, 0.2, 0.8])


@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.parametrize("spread", [0.6, 1.0, 1.6])
def test_series_in_the_correlation_are_the_closed_form_moments(name, spread):
    activation, gain = score_activation(name, spread)
    mean, other_mean = 0.7, -0.4
    powers = CORRELATIONS[:, None] ** np.arange(400)

    # two scores with means
    first, second = activation.moments(np.array([mean, other_mean]) / spread, 400).T
    exact = gaussian_moment(name, mean, other_mean, spread, spread, CORRELATIONS)
    np.testing.assert_allclose(gain * powers @ (first * second), exact, rtol=1e-12)

    # zero means, at orders that are single terms, and a score with itself
    order, weight = activation.series_nodes(400)
    is_single = order < 400
    single_powers = CORRELATIONS[:, None] ** order[is_single]
    exact = gaussian_moment(name, 0.0, 0.0, spread, spread, CORRELATIONS)
    np.testing.assert_allclose(gain * single_powers @ weight[is_single], exact, rtol=1e-12)
    square = gain * activation.second_moment(np.array([mean / spread]))[0]
    assert math.isclose(square, gaussian_moment(name, mean, mean, spread, spread, 1.0))


@pytest.mark.parametrize("name", POINTWISE)
def test_the_tail_of_a_series_is_summed_too(name):
    activation, _ = score_activation(name, 1.0)
    _, weight = activation.series_nodes(200)
    assert math.isclose(weight.sum(), activation.at_one, rel_tol=1e-9)


@pytest.mark.parametrize("name", POINTWISE)
def test_bounds_of_terms_hold(name):
    activation, _ = score_activation(name, 1.0)
    means = np.linspace(-2.0, 2.0, 101)
    terms = np.square(activation.moments(means, 200)[3:]).max(axis=1)
    bounds = activation.term_bounds(np.arange(3.0, 200.0), 2.0)
    assert np.all(terms <= bounds * (1 + 1e-9))


@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.parametrize(("dim", "mean"), [(1, 0.0), (3, 0.0), (3, 1.0), (6, -0.5)])
def test_a_gram_matrix_has_the_spectrum(name, dim, mean, seed):
    heads = kh.GaussianHeads(mean=mean, scale=0.4)
    spectrum = theory.attention_spectrum(dim, 3, max_degree=6, heads=heads, activation=name)
    n_sets = 1200
    sets = kh.targets.sphere_sets(n_sets, 3, dim, seed)
    gram = kh.attention_kernel(sets, heads=heads, activation=name) / n_sets
    eigenvalues = np.linalg.eigvalsh(gram)[::-1]

    # sums of the first levels: eigenvalues of a sample spread around those of the kernel
    counts = np.cumsum(spectrum.multiplicities).astype(int)
    n_levels = int(np.count_nonzero(counts <= 12))
    predicted = np.cumsum(spectrum.eigenvalues * spectrum.multiplicities)[:n_levels]
    observed = np.array([eigenvalues[:count].sum() for count in counts[:n_levels]])
    np.testing.assert_allclose(observed, predicted, rtol=0.1)
    assert math.isclose(np.trace(gram), spectrum.trace, rel_tol=0.1)
    if name in ("linear", "square"):
        assert spectrum.remainder < 1e-12 * spectrum.trace
        rank = int(spectrum.multiplicities.sum())
        assert np.all(eigenvalues[rank:] < 1e-10 * eigenvalues[0])


@pytest.mark.parametrize("name", POINTWISE)
def test_a_small_mean_changes_little(name):
    """Blocks of heads with a tiny mean, against the table of zero-mean heads."""
    without_mean = theory.attention_spectrum(5, 3, max_degree=4, activation=name)
    tiny_mean = theory.attention_spectrum(
        5, 3, max_degree=4, heads=kh.GaussianHeads(mean=1e-6), activation=name
    )
    assert math.isclose(tiny_mean.trace, without_mean.trace, rel_tol=1e-5)
    largest = slice(0, 3)
    np.testing.assert_allclose(
        np.unique(tiny_mean.eigenvalues.round(6))[::-1][largest],
        np.unique(without_mean.eigenvalues.round(6))[::-1][largest],
        atol=3e-6 * tiny_mean.eigenvalues[0],
    )


N_SAMPLES = [100, 400]
TARGET = kh.targets.Correlation(1, 5) + 0.5 * kh.targets.TokenPower(2, 5) + 0.3


def measured_errors(sets, y, gram, ridge, fit_intercept=False):
    """Test errors of kernel ridge regression at the sizes above, on all sets beyond them."""
    n_test_from = max(N_SAMPLES)
    errors = []
    for n in N_SAMPLES:
        penalised = gram[:n, :n] + n * ridge * np.eye(n)
        inverse_ones = np.linalg.solve(penalised, np.ones(n))
        intercept = 0.0
        if fit_intercept:
            intercept = inverse_ones @ y[:n] / inverse_ones.sum()
        weights = np.linalg.solve(penalised, y[:n] - intercept)
        prediction = gram[n_test_from:, :n] @ weights + intercept
        errors.append(np.mean((prediction - y[n_test_from:]) ** 2))
    return np.array(errors)


def mean_errors(target, n_keys, ridge, seed, *, heads, activation, query=True, intercept=False):
    """Measured errors of four draws: the mean and its standard error."""
    draws = []
    for repetition in range(4):
        sets = kh.targets.sphere_sets(900, n_keys, target.dim, seed=4 * seed + repetition)
        y = target(sets)
        if not query:
            sets = sets.with_query(None)
        gram = kh.attention_kernel(sets, heads=heads, activation=activation)
        draws.append(measured_errors(sets, y, gram, ridge, intercept))
    return np.mean(draws, axis=0), np.std(draws, axis=0, ddof=1) / 2


@pytest.mark.parametrize("name", POINTWISE)
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_predictions_meet_fits(name, mean, seed):
    heads = kh.GaussianHeads(mean=mean)
    predicted = theory.learning_curve(
        TARGET, N_SAMPLES, 4, ridge=1e-4, heads=heads, activation=name
    )
    measured, standard_error = mean_errors(TARGET, 4, 1e-4, seed, heads=heads, activation=name)
    assert np.all(np.abs(predicted - measured) <= 0.2 * measured + 4 * standard_error)

    # broken variant: the curve of another activation is far off
    other = {"relu": "square", "linear": "relu", "square": "step", "step": "exp", "exp": "step"}
    wrong = theory.learning_curve(
        TARGET, N_SAMPLES, 4, ridge=1e-4, heads=heads, activation=other[name]
    )
    assert np.any(np.abs(wrong - measured) > 0.2 * measured + 4 * standard_error)


@pytest.mark.parametrize("name", ["relu", "step", "exp"])
@pytest.mark.parametrize(("query", "intercept"), [(True, True), (False, False), (False, True)])
def test_predictions_without_query_and_with_intercept_meet_fits(name, query, intercept, seed):
    target = kh.targets.TokenPower(2, 5) + 0.5 * kh.targets.TokenPower(1, 5) + 2.0
    heads = kh.GaussianHeads(mean=0.7) if query else None
    predicted = theory.learning_curve(
        target,
        N_SAMPLES,
        4,
        ridge=1e-3,
        heads=heads,
        activation=name,
        query=query,
        fit_intercept=intercept,
    )
    measured, standard_error = mean_errors(
        target,
        4,
        1e-3,
        seed,
        heads=heads or kh.GaussianHeads(),
        activation=name,
        query=query,
        intercept=intercept,
    )
    assert np.all(np.abs(predicted - measured) <= 0.2 * measured + 4 * standard_error)


def test_an_intercept_makes_constants_free():
    """A target with any mean is as easy as one without, for ReLU, for blocks and for the MLP."""
    centred = kh.targets.TokenPower(2, 4) - 0.25
    shifted = centred + 100.0
    for options in ({}, {"heads": kh.GaussianHeads(mean=1.0)}, {"model": "mlp"}):
        errors = [
            theory.learning_curve(target, [50, 500], 3, 1e-3, fit_intercept=True, **options)
            for target in (centred, shifted)
        ]
        np.testing.assert_allclose(errors[0], errors[1], rtol=1e-9)
        without_intercept = theory.learning_curve(shifted, [50, 500], 3, 1e-3, **options)
        assert np.all(without_intercept > 1.5 * errors[1])


def test_what_finite_rank_misses_stays():
    """Linear heads have degree 2 in the key at most: the cubic part of token^3 is never learned."""
    cubic = kh.targets.TokenPower(3, 5)
    power_of_degree_three = theory.pair_powers(cubic)[0, 3] / 2
    [error] = theory.learning_curve(cubic, [10**7], 2, ridge=1e-9, activation="linear")
    assert math.isclose(error, power_of_degree_three, rel_tol=1e-3)
    with pytest.raises(ValueError, match="levels off"):
        theory.samples_needed(cubic, 2, power_of_degree_three / 2, activation="linear")


def test_sizes_needed_take_the_activation():
    """Linear heads contain <x_0, x_i><β, x_i> itself and need fewest samples."""
    target = kh.targets.Correlation(1, 8)
    needed = {
        name: theory.samples_needed(target, 8, error=1e-4, activation=name)
        for name in ("linear", "relu", "step")
    }
    assert needed["linear"] < needed["relu"] < needed["step"]
    best = theory.best_bias(target, 300, 8, means=(0.5, 1.0), activation="linear")
    assert best.unbiased == theory.best_ridge_curve(target, 300, 8, activation="linear").error


def test_what_cannot_be_is_refused():
    target = kh.targets.Correlation(1, 3)
    with pytest.raises(ValueError, match="depends on the query, and `query` is False"):
        theory.learning_curve(target, 10, 2, 0.1, query=False)
    with pytest.raises(ValueError, match='"mlp" has ReLU units'):
        theory.learning_curve(target, 10, 2, 0.1, model="mlp", activation="exp")
    with pytest.raises(ValueError, match="at least 2 with an intercept"):
        theory.learning_curve(target, [1, 10], 2, 0.1, fit_intercept=True)
    corner = kh.GaussianHeads(mean=np.diag([1.0, 1.0, 1.0, 0.5]))
    with pytest.raises(ValueError, match="no mean on the constant coordinate"):
        theory.attention_spectrum(3, 2, max_degree=2, heads=corner, query=False)
    with pytest.raises(ValueError, match="`activation` must be one of"):
        theory.learning_curve(target, 10, 2, 0.1, activation="sigmoid")


@pytest.mark.parametrize("intercept", [False, True])
def test_softmax_is_predicted_where_its_approximation_holds(intercept, seed):
    """d = 16, N = 32, 100 heads: what conditional_curve finds on the features themselves."""
    dim, n_keys, n_heads = 16, 32, 100
    target = kh.targets.Correlation(1, dim) + 0.5 * kh.targets.QueryPower(2, dim)
    heads = kh.GaussianHeads(scale=0.5)
    sets = kh.targets.sphere_sets(1200, n_keys, dim, seed=seed)
    features = kh.attention_features(sets, heads.sample(n_heads, dim, seed), "softmax")
    options = {"ridge": 1e-3, "fit_intercept": intercept}
    conditional = theory.conditional_curve(features, target(sets), N_SAMPLES, **options)
    predicted = theory.learning_curve(
        target, N_SAMPLES, n_keys, n_heads=n_heads, heads=heads, activation="softmax", **options
    )
    np.testing.assert_allclose(predicted, conditional, rtol=0.2)

    # softmax heads hardly learn a nonlinear function of the query alone, ReLU heads do
    query_square = kh.targets.QueryPower(2, dim)
    of_softmax, of_relu = (
        theory.learning_curve(query_square, 1000, n_keys, 1e-6, activation=name, fit_intercept=True)
        for name in ("softmax", "relu")
    )
    assert of_softmax > 10 * of_relu


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"heads": kh.GaussianHeads(mean=1.0)}, "the heads have a mean"),
        ({"heads": kh.GaussianHeads(scale=1.0)}, "the scale is 1"),
        ({"dim": 8}, "d is 8"),
        ({"n_keys": 16}, "N is 16 at d = 16"),
        ({"ridge": 1e-9, "n_samples": 10**5}, "holds down to 10%"),
    ],
)
def test_softmax_is_refused_elsewhere(change, reason):
    settings = {"dim": 16, "n_keys": 32, "heads": None, "ridge": 1e-3, "n_samples": 100} | change
    target = kh.targets.Correlation(1, settings["dim"])
    with pytest.raises(ValueError, match=f"{reason}.*conditional_curve"):
        theory.learning_curve(
            target,
            settings["n_samples"],
            settings["n_keys"],
            settings["ridge"],
            heads=settings["heads"],
            activation="softmax",
        )
