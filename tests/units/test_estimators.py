import math

import numpy as np
import pytest
from paper import paper_classifier, paper_regressor
from sklearn import config_context
from sklearn.linear_model import Ridge
from sklearn.metrics import log_loss

import keyhole as kh
from keyhole.attention.heads import HeadDraw
from keyhole.ridge.calibration import fit_temperature
from keyhole.solvers.layers import check_finite_predictions


@pytest.fixture
def sets(rng):
    keys = [rng.normal(size=(rng.integers(1, 6), 3)) for _ in range(40)]
    return kh.SetBatch(keys, rng.normal(size=(40, 3)))


@pytest.fixture
def y(sets, rng):
    return kh.targets.Correlation(1, 3)(sets) + 0.1 * rng.normal(size=len(sets))


ROUTES = [(4, "primal"), (30, "dual"), (math.inf, "kernel")]


@pytest.mark.parametrize(("n_heads", "route"), ROUTES)
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_leave_one_out_is_n_refits(n_heads, route, fit_intercept, weighted, sets, y, rng):
    w = rng.uniform(0.5, 2.0, size=len(y)) if weighted else None
    model = paper_regressor(n_heads, alpha=0.3, fit_intercept=fit_intercept, random_state=0)
    fitted = model.fit(sets, y, sample_weight=w)
    assert fitted.solver_ == route
    left_out = np.array(fitted.loo_predictions_)
    error = fitted.loo_error_
    refits = np.empty_like(y)
    for i in range(len(y)):
        others = np.arange(len(y)) != i
        model.fit(sets[others], y[others], sample_weight=None if w is None else w[others])
        refits[i] = model.predict(sets[[i]])[0]
    np.testing.assert_allclose(left_out, refits, atol=1e-8)
    np.testing.assert_allclose(error, np.average((y - refits) ** 2, weights=w), rtol=1e-8)


@pytest.mark.parametrize("n_heads", [4, 30])
def test_finite_heads_are_ridge_on_their_features(n_heads, sets, y):
    features = kh.AttentionFeatures(n_heads, random_state=7).fit_transform(sets)
    ridge = Ridge(alpha=0.2).fit(features, y)
    model = paper_regressor(n_heads, alpha=0.2, random_state=7).fit(sets, y)
    np.testing.assert_allclose(model.predict(sets), ridge.predict(features), atol=1e-8)
    np.testing.assert_allclose(model.values_.ravel(), ridge.coef_, atol=1e-8)
    np.testing.assert_allclose(model.intercept_, ridge.intercept_, atol=1e-8)
    assert model.values_.shape == (n_heads, 4)


def test_an_integer_random_state_names_the_heads(sets, y):
    distribution = kh.GaussianHeads(mean=0.5)
    model = kh.AttentionRegressor(
        5,
        heads=distribution,
        alpha=1.0,
        random_state=11,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).fit(sets, y)
    heads = distribution.sample(5, 3, 11)
    np.testing.assert_array_equal(model.layer_.heads.block(0, 5), heads)
    phi = kh.attention_features(sets, heads)
    np.testing.assert_allclose(
        phi @ model.values_.ravel() + model.intercept_, model.predict(sets), atol=1e-12
    )


def test_other_random_states_draw_a_seed(sets, y):
    first, second = (paper_regressor(5).fit(sets, y).predict(sets) for _ in range(2))
    assert not np.array_equal(first, second)
    for make in (np.random.RandomState, np.random.default_rng):
        first, second = (
            paper_regressor(5, random_state=make(3)).fit(sets, y).predict(sets) for _ in range(2)
        )
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(("n_heads", "route"), ROUTES)
def test_several_outputs_are_fitted_together(n_heads, route, sets, y):
    both = np.column_stack([y, -2 * y + 1])
    model = paper_regressor(n_heads, alpha=0.1, random_state=0)
    expected = model.fit(sets, y).predict(sets)
    together = model.fit(sets, both)
    assert together.predict(sets).shape == (40, 2)
    assert together.loo_predictions_.shape == (40, 2)
    assert together.intercept_.shape == (2,)
    np.testing.assert_allclose(
        together.predict(sets), np.column_stack([expected, -2 * expected + 1]), atol=1e-8
    )


@pytest.mark.parametrize(("n_heads", "route"), ROUTES)
def test_a_sequence_is_chosen_from_by_leave_one_out(n_heads, route, sets, y):
    grid = [10.0, 0.1, 1e-3]
    model = paper_regressor(n_heads, alpha=grid, random_state=0).fit(sets, y)
    np.testing.assert_array_equal(model.selection_.alphas, grid)
    alone = [
        paper_regressor(n_heads, alpha=a, random_state=0).fit(sets, y).loo_error_ for a in grid
    ]
    np.testing.assert_allclose(model.selection_.errors, alone, rtol=1e-6)
    assert model.alpha_ == grid[int(np.argmin(alone))]
    assert model.loo_error_ == model.selection_.errors.min()


@pytest.mark.parametrize(("n_heads", "route"), ROUTES)
def test_a_small_memory_budget_changes_nothing(n_heads, route, sets, y):
    model = paper_regressor(n_heads, random_state=0)
    expected = model.fit(sets, y).predict(sets)
    alpha = model.alpha_
    with config_context(working_memory=0.002):  # two kilobytes: a few rows at a time
        np.testing.assert_allclose(model.fit(sets, y).predict(sets), expected, atol=1e-7)
    np.testing.assert_allclose(model.alpha_, alpha, rtol=1e-9)


@pytest.mark.parametrize(("n_heads", "route"), ROUTES)
def test_copies_weights_and_zeros_agree(n_heads, route, sets, y):
    counts = np.arange(40) % 3
    rows = np.repeat(np.arange(40), counts)
    model = paper_regressor(n_heads, random_state=0)
    weighted = model.fit(sets, y, sample_weight=counts).predict(sets)
    left_out = model.loo_predictions_
    repeated = model.fit(sets[rows], y[rows]).predict(sets)
    np.testing.assert_allclose(weighted, repeated, atol=1e-7)
    np.testing.assert_allclose(model.loo_predictions_, left_out[rows], atol=1e-7)
    np.testing.assert_allclose(left_out[counts == 0], weighted[counts == 0], atol=1e-9)


def test_float32_features_are_close_to_float64(sets, y):
    exact = paper_regressor(30, alpha=0.1, random_state=0).fit(sets, y)
    single = paper_regressor(30, alpha=0.1, random_state=0, dtype="float32").fit(sets, y)
    assert single.predict(sets).dtype == np.float64
    np.testing.assert_allclose(single.predict(sets), exact.predict(sets), atol=1e-4)


def test_many_heads_approach_infinitely_many(sets, y):
    limit = paper_regressor(math.inf, alpha=1.0).fit(sets, y).predict(sets)
    far, near = (
        np.abs(
            paper_regressor(m, alpha=1.0, random_state=0).fit(sets, y).predict(sets) - limit
        ).max()
        for m in (10, 10_000)
    )
    assert near < far / 5


@pytest.mark.parametrize("activation", ["relu", "softmax", "linear", "square", "step", "exp"])
def test_every_activation_can_be_fitted(activation, sets, y):
    model = kh.AttentionRegressor(
        20,
        heads=kh.GaussianHeads(scale=0.2),
        activation=activation,
        random_state=0,
        scaling="none",
        query="given",
        pooling="mean",
    )
    assert np.isfinite(model.fit(sets, y).predict(sets)).all()


def test_labels_may_be_words_and_many(rng):
    centres = rng.normal(size=(7, 4)) * 3
    words = np.array(["ant", "bee", "cat", "dog", "elk", "fox", "gnu"])
    which = rng.integers(7, size=210)
    keys = [centres[c] + rng.normal(size=(rng.integers(1, 5), 4)) for c in which]
    X = kh.SetBatch(keys)
    model = paper_classifier(100, random_state=0).fit(X[:140], words[which[:140]])
    assert list(model.classes_) == sorted(set(words[which[:140]]))
    assert model.decision_function(X).shape == (210, len(model.classes_))
    assert model.score(X[140:], words[which[140:]]) > 0.7
    probabilities = model.predict_proba(X[140:])
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    np.testing.assert_array_equal(
        model.classes_[probabilities.argmax(axis=1)], model.predict(X[140:])
    )


def test_probabilities_are_calibrated_on_the_left_out(seed):
    sets = kh.targets.sphere_sets(700, n_keys=4, dim=3, seed=seed)
    score = 6 * kh.targets.TokenPower(1, 3)(sets)
    rng = np.random.default_rng(seed)
    label = (rng.uniform(size=700) < 1 / (1 + np.exp(-score))).astype(int)
    model = paper_classifier(60, random_state=seed).fit(sets[:350], label[:350])
    test, truth = sets[350:], label[350:]
    held_out = log_loss(truth, model.predict_proba(test))
    assert held_out < log_loss(truth, np.full(350, label[:350].mean())) - 0.05, (
        "better than knowing nothing"
    )
    # no temperature does much better on data it was not fitted to
    decision = model.decision_function(test)
    best = min(log_loss(truth, 1 / (1 + np.exp(-c * decision))) for c in np.geomspace(0.05, 50, 60))
    assert held_out < best + 0.03
    too_sure = log_loss(truth, 1 / (1 + np.exp(-30 * model.temperature_ * decision)))
    assert too_sure > held_out + 0.1, "the test must notice a wrong temperature"


def test_fitted_heads_are_a_draw_not_an_array(sets, y):
    model = paper_regressor(6, random_state=1).fit(sets, y)
    assert isinstance(model.layer_.heads, HeadDraw)
    kernel = paper_regressor(math.inf).fit(sets, y)
    assert not hasattr(kernel, "values_")
    assert kernel.dual_coef_.shape == (40,)


def test_logarithms_of_probabilities_do_not_underflow(rng):
    sets = kh.SetBatch(rng.normal(size=(30, 2, 3)))
    model = paper_classifier(20, random_state=0).fit(sets, rng.random(30) < 0.5)
    model.temperature_ = 1e6
    found = model.predict_log_proba(sets)
    assert np.isfinite(found).all()
    scores = 2e6 * model.decision_function(sets)
    np.testing.assert_allclose(found[:, 1] - found[:, 0], scores)


@pytest.mark.parametrize("n_heads", [math.inf, 200, 5])
def test_a_classifier_without_penalty_is_calibrated(n_heads):
    sets = kh.targets.sphere_sets(60, n_keys=4, dim=3, seed=0)
    y = kh.targets.TokenPower(2, 3)(sets)
    label = y > np.median(y)
    model = paper_classifier(n_heads, alpha=0, random_state=0).fit(sets[:40], label[:40])
    near = paper_classifier(n_heads, alpha=1e-9, random_state=0).fit(sets[:40], label[:40])
    np.testing.assert_allclose(model.predict_proba(sets), near.predict_proba(sets), atol=1e-2)
    assert np.ptp(model.predict_proba(sets[40:])[:, 1]) > 0.1


def test_scores_that_say_nothing_are_left_out_of_calibration():
    scores = np.array([[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]])
    labels = np.array([0, 0, 1, 1])
    unknown = np.concatenate([scores, [[np.inf, -np.inf], [np.nan, np.nan]]])
    assert fit_temperature(unknown, np.append(labels, [0, 1])) == fit_temperature(scores, labels)
    with pytest.warns(UserWarning, match="probabilities are not calibrated"):
        assert fit_temperature(unknown[4:], np.array([0, 1])) == 1.0


def test_a_prediction_that_outgrows_floating_point_is_named():
    fine = np.array([[1.0, -1e308], [0.0, 3.0]])
    assert check_finite_predictions(fine) is fine
    for wrong in (np.inf, np.nan):
        with pytest.raises(ValueError, match=r"that of sample 1 is .*\(2 in all\)"):
            check_finite_predictions(np.array([[1.0, 2.0], [0.0, wrong], [wrong, wrong]]))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_sets_that_are_all_alike_are_fitted_without_a_warning(value, rng):
    """Nothing varies but rounding: the penalty is so large that predictions are the mean of y."""
    sets = np.full((60, 3, 2), value)
    y = rng.normal(size=60)
    model = kh.AttentionRegressor(random_state=0).fit(sets, y)
    np.testing.assert_allclose(model.predict(sets), y.mean(), rtol=1e-6)
