"""One layer, all settings given: ridge on the features of frozen heads, or on their kernel."""

import math

import numpy as np
import pytest
from paper import PAPER_LAYER, paper_classifier, paper_regressor
from sklearn import config_context
from sklearn.linear_model import Ridge
from sklearn.metrics import log_loss

import keyhole as kh
from keyhole.solve.problem import SmallPenaltyWarning

N_HEADS = [4, 30, math.inf, kh.Landmarks(12)]


@pytest.fixture
def sets(rng):
    keys = [rng.normal(size=(rng.integers(1, 6), 3)) for _ in range(40)]
    return kh.SetBatch(keys, rng.normal(size=(40, 3)))


@pytest.fixture
def y(sets, rng):
    return kh.targets.Correlation(1, 3)(sets) + 0.1 * rng.normal(size=len(sets))


@pytest.mark.parametrize("n_heads", [4, 30])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_finite_heads_are_ridge_on_their_features(n_heads, fit_intercept, sets, y):
    distribution = kh.GaussianHeads(mean=0.5)
    features = kh.attention_features(sets, distribution.sample(n_heads, 3, 7))
    ridge = Ridge(alpha=0.2, fit_intercept=fit_intercept).fit(features, y)
    model = paper_regressor(
        n_heads, heads=distribution, alpha=0.2, fit_intercept=fit_intercept, random_state=7
    ).fit(sets, y)
    assert np.allclose(model.predict(sets), ridge.predict(features), atol=1e-8)
    assert np.allclose(model.values_.ravel(), ridge.coef_, atol=1e-8)
    assert model.values_.shape == (n_heads, 4)
    assert model.intercept_ == pytest.approx(ridge.intercept_, abs=1e-8)


def test_an_exact_kernel_has_one_coefficient_for_each_sample(sets, y):
    model = paper_regressor(math.inf, alpha=0.2).fit(sets, y)
    assert not hasattr(model, "values_")
    predicted = kh.attention_kernel(sets) @ model.dual_coef_ + model.intercept_
    assert np.allclose(model.predict(sets), predicted)


def test_landmarks_of_all_samples_are_the_exact_kernel(sets, y):
    exact = paper_regressor(math.inf, alpha=0.2).fit(sets, y).predict(sets)
    landmarks = paper_regressor(kh.Landmarks(40), alpha=0.2, random_state=0).fit(sets, y)
    assert np.allclose(landmarks.predict(sets), exact, atol=1e-6)


def test_many_heads_approach_infinitely_many(sets, y):
    limit = paper_regressor(math.inf, alpha=1.0).fit(sets, y).predict(sets)

    def distance(n_heads):
        model = paper_regressor(n_heads, alpha=1.0, random_state=0).fit(sets, y)
        return np.abs(model.predict(sets) - limit).max()

    assert distance(10_000) < distance(10) / 5


def test_other_random_states_draw_a_seed(sets, y):
    first, second = (paper_regressor(5).fit(sets, y).predict(sets) for _ in range(2))
    assert not np.array_equal(first, second)
    for make in (np.random.RandomState, np.random.default_rng):
        first, second = (
            paper_regressor(5, random_state=make(3)).fit(sets, y).predict(sets) for _ in range(2)
        )
        assert np.array_equal(first, second)


@pytest.mark.parametrize("n_heads", N_HEADS, ids=str)
def test_several_outputs_are_fitted_together(n_heads, sets, y):
    both = np.column_stack([y, -2 * y + 1])
    model = paper_regressor(n_heads, alpha=0.1, random_state=0)
    expected = model.fit(sets, y).predict(sets)
    together = model.fit(sets, both)
    assert together.loo_predictions_.shape == (40, 2)
    assert together.intercept_.shape == (2,)
    assert np.allclose(
        together.predict(sets), np.column_stack([expected, -2 * expected + 1]), atol=1e-8
    )


@pytest.mark.parametrize("n_heads", N_HEADS, ids=str)
def test_a_sequence_is_chosen_from_by_leave_one_out(n_heads, sets, y):
    grid = [10.0, 0.1, 1e-3]
    model = paper_regressor(n_heads, alpha=grid, random_state=0).fit(sets, y)
    alone = [
        paper_regressor(n_heads, alpha=a, random_state=0).fit(sets, y).loo_error_ for a in grid
    ]
    assert np.allclose(model.selection_.errors, alone, rtol=1e-6)
    assert model.alpha_ == grid[int(np.argmin(alone))]


@pytest.mark.parametrize("n_heads", N_HEADS, ids=str)
def test_a_small_working_memory_changes_nothing(n_heads, sets, y):
    model = paper_regressor(n_heads, alpha=[10.0, 0.1, 1e-3], random_state=0)
    expected = model.fit(sets, y).predict(sets)
    alpha = model.alpha_
    with config_context(working_memory=0.002):  # two kilobytes: a few rows at a time
        assert np.allclose(model.fit(sets, y).predict(sets), expected, atol=1e-7)
    assert model.alpha_ == pytest.approx(alpha)


def test_float32_features_are_close_to_float64(sets, y):
    exact = paper_regressor(30, alpha=0.1, random_state=0).fit(sets, y)
    single = paper_regressor(30, alpha=0.1, random_state=0, dtype="float32").fit(sets, y)
    assert single.predict(sets).dtype == np.float64
    assert np.allclose(single.predict(sets), exact.predict(sets), atol=1e-4)


def test_a_penalty_within_rounding_is_used_with_a_warning(sets, y):
    with pytest.warns(SmallPenaltyWarning, match="alpha = 1e-16"):
        model = paper_regressor(math.inf, alpha=1e-16).fit(sets, y)
    assert model.alpha_ == 1e-16


# ---- classes


def test_labels_may_be_words_and_many(rng):
    centres = rng.normal(size=(7, 4)) * 3
    words = np.array(["ant", "bee", "cat", "dog", "elk", "fox", "gnu"])
    which = rng.integers(7, size=210)
    sets = kh.SetBatch([centres[c] + rng.normal(size=(rng.integers(1, 5), 4)) for c in which])
    model = paper_classifier(100, random_state=0).fit(sets[:140], words[which[:140]])
    assert list(model.classes_) == sorted(set(words[which[:140]]))
    assert model.decision_function(sets).shape == (210, len(model.classes_))
    assert model.score(sets[140:], words[which[140:]]) > 0.7
    probabilities = model.predict_proba(sets[140:])
    assert np.allclose(probabilities.sum(axis=1), 1.0)
    assert (model.classes_[probabilities.argmax(axis=1)] == model.predict(sets[140:])).all()
    assert np.allclose(np.exp(model.predict_log_proba(sets[140:])), probabilities)


def test_probabilities_are_calibrated_on_the_samples_left_out(seed):
    sets = kh.targets.sphere_sets(700, n_keys=4, dim=3, seed=seed)
    score = 6 * kh.targets.TokenPower(1, 3)(sets)
    rng = np.random.default_rng(seed)
    label = (rng.uniform(size=700) < 1 / (1 + np.exp(-score))).astype(int)
    model = paper_classifier(60, random_state=seed).fit(sets[:350], label[:350])
    test, truth = sets[350:], label[350:]
    held_out = log_loss(truth, model.predict_proba(test))
    # no temperature does much better on data it was not fitted to
    decision = model.decision_function(test)
    best = min(log_loss(truth, 1 / (1 + np.exp(-c * decision))) for c in np.geomspace(0.05, 50, 60))
    assert held_out < best + 0.03
    too_sure = log_loss(truth, 1 / (1 + np.exp(-30 * model.temperature_ * decision)))
    assert too_sure > held_out + 0.1, "the test must notice a wrong temperature"


# ---- what cannot be


def test_a_prediction_that_outgrows_floating_point_is_named(sets, y):
    model = paper_regressor(8, alpha=0.1, random_state=0).fit(sets, y)
    huge = kh.SetBatch(np.full((2, 1, 3), [[[1.0]], [[1e160]]]), np.ones((2, 3)))
    with pytest.raises((ValueError, OverflowError), match=r"must be finite|overflow|too large"):
        model.predict(huge)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_sets_that_are_all_alike_are_predicted_by_the_mean(value, rng):
    y = rng.normal(size=60)
    model = kh.AttentionRegressor(8, scaling="standard", random_state=0)
    model.fit(np.full((60, 3, 2), value), y)
    assert np.allclose(model.predict(np.full((60, 3, 2), value)), y.mean(), rtol=1e-6)


def test_importance_is_the_growth_of_the_error_of_what_matters(rng):
    keys = rng.normal(size=(80, 4, 3))
    model = kh.AttentionRegressor(60, random_state=0, **PAPER_LAYER)
    importance = model.fit(keys, keys[:, :, 1].mean(axis=1)).coordinate_importance()
    assert importance.names[int(importance.across.argmax())] == "key 1"


def test_sample_level_features_that_are_not_there_are_refused(sets, y):
    with pytest.raises(ValueError, match=r"pooling='extras'.*these samples have none"):
        paper_regressor(8, pooling="extras").fit(sets, y)
