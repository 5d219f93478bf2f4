"""Default settings: a list of layers, fitted and combined by non-negative weights."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from paper import PAPER_LAYER
from sklearn.base import clone
from sklearn.metrics import log_loss, mean_squared_error
from sklearn.model_selection import KFold

import keyhole as kh
from keyhole.estimators.attention import ClippedWarning
from keyhole.fit import members
from keyhole.fit.combine import non_negative_least_squares, non_negative_logistic
from keyhole.fit.members import Given, Shape, entries_for, plan_layers

BAGS = Shape(n_samples=100, n_keys=400, dim=3, query_dim=3, has_query=False, n_extras=0)
ASKED = Shape(n_samples=100, n_keys=400, dim=3, query_dim=3, has_query=True, n_extras=0)
WITH_EXTRAS = Shape(n_samples=100, n_keys=400, dim=3, query_dim=3, has_query=False, n_extras=2)
MANY = Shape(n_samples=400, n_keys=1600, dim=3, query_dim=3, has_query=False, n_extras=0)
SHAPES = {"bags": BAGS, "queries": ASKED, "extras": WITH_EXTRAS, "many": MANY}


# ---- the list


@pytest.mark.parametrize("name", SHAPES)
def test_every_entry_says_what_it_is_for_and_has_a_name_of_its_own(name):
    entries = entries_for(SHAPES[name])
    assert all(entry.purpose for entry in entries)
    names = [layer.name for layer in plan_layers(Given(), SHAPES[name]).layers]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("heads", kh.GaussianHeads(mean=2.0)),
        ("n_heads", 16),
        ("n_heads", kh.Landmarks(30)),
        ("activation", "softmax"),
        ("activation", "square"),
        ("pooling", "sum"),
        ("pooling", "statistics"),
        ("scaling", "sphere"),
        ("query", "given"),
    ],
)
def test_a_setting_that_is_given_is_that_of_every_layer(setting, value, shape):
    plan = plan_layers(Given(**{setting: value}), shape)
    assert plan.layers
    for layer in plan.layers:
        is_without_heads = not layer.has_heads and setting == "scaling"
        assert getattr(layer, setting) == value or is_without_heads


@pytest.mark.parametrize(
    "given",
    [{"pooling": "sum"}, {"scaling": "sphere"}, {"scaling": "none"}, {"activation": "softmax"}],
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_no_layer_is_tried_twice_under_two_names(given, shape):
    layers = [replace(layer, name="") for layer in plan_layers(Given(**given), shape).layers]
    assert all(layer not in layers[:i] for i, layer in enumerate(layers))


def test_sample_level_features_get_a_layer_of_their_own():
    assert any(layer.pooling == "extras" for layer in plan_layers(Given(), WITH_EXTRAS).layers)
    assert not any(layer.pooling == "extras" for layer in plan_layers(Given(), BAGS).layers)


def test_second_kernels_are_tried_never_or_alone():
    def widths(**given):
        return {layer.mlp_width for layer in plan_layers(Given(**given), BAGS).layers}

    assert widths() == {None, 1.0}
    assert widths(mlp="none") == {None}
    assert widths(mlp="only", mlp_width=0.3) == {0.3}


def test_all_settings_together_are_one_layer_which_is_not_clipped():
    given = Given(kh.GaussianHeads(), 8, "relu", "mean", "none", "given")
    (layer,) = plan_layers(given, BAGS).layers
    assert layer.mlp_width is None
    assert not layer.clips
    assert all(layer.clips for layer in plan_layers(Given(), BAGS).layers)


def test_heads_are_learned_from_three_hundred_samples_on_where_that_is_affordable(monkeypatch):
    monkeypatch.setattr(members, "ALLOWANCE", math.inf)

    def learns(n):
        shape = Shape(n, 4 * n, 3, 3, has_query=True, n_extras=0)
        return any(layer.learns_heads for layer in plan_layers(Given(), shape).layers)

    assert learns(300)
    assert not learns(299)


def test_few_samples_are_fitted_by_one_layer():
    assert len(plan_layers(Given(), Shape(7, 28, 3, 3, has_query=False, n_extras=0)).layers) == 1


def test_kernels_are_exact_up_to_a_thousand_samples_and_seen_through_heads_or_landmarks_above():
    def first(n, *, has_query):
        shape = Shape(n, 4 * n, 3, 3, has_query=has_query, n_extras=0)
        return plan_layers(Given(), shape).layers[0].n_heads

    assert first(1000, has_query=False) == math.inf
    assert first(1001, has_query=False) == 256
    assert first(1001, has_query=True) == kh.Landmarks(640)


def test_layers_that_cost_too_much_are_not_tried_and_named(monkeypatch, rng):
    x, y = rng.normal(size=(20, 4, 2)), rng.normal(size=20)
    monkeypatch.setattr(members, "ALLOWANCE", 2e4)
    model = kh.AttentionRegressor(random_state=0).fit(x, y)
    assert "each as query" in model.not_tried_
    assert "each as query" not in str(model.members_)
    assert f"Not tried, because too expensive: {', '.join(model.not_tried_)}." in model.summary()


# ---- the weights


def test_weights_of_squares_are_non_negative_least_squares_with_an_intercept(rng):
    predictions = rng.normal(size=(3, 200, 2))
    noise = 0.01 * rng.normal(size=(200, 2))
    y = 2.0 + 0.7 * predictions[0] - 0.5 * predictions[1] + 0.2 * predictions[2] + noise
    weights, intercept = non_negative_least_squares(predictions, y, np.full(200, 1 / 200))
    assert weights[1] == 0
    rest = predictions[[0, 2]].reshape(2, -1).T
    columns = np.kron(np.ones((200, 1)), np.eye(2))  # one intercept for each output
    units = np.tile(y.std(axis=0), 200)
    design = np.hstack([rest, columns]) / units[:, None]
    expected = np.linalg.lstsq(design, y.ravel() / units, rcond=None)[0]
    assert np.allclose([*weights[[0, 2]], *intercept], expected, rtol=1e-6)


def test_weights_of_classes_are_least_of_the_loss_around_them(rng):
    labels = rng.integers(0, 3, 150)
    good = np.eye(3)[labels] + 0.8 * rng.normal(size=(150, 3))
    predictions = np.stack([good, -good, rng.normal(size=(150, 3))])
    shares = np.full(150, 1 / 150)
    weights, intercept = non_negative_logistic(predictions, labels, shares)
    assert weights[0] > 0
    assert weights[1] == 0

    def loss(weights, intercept):
        logits = np.einsum("c,cnk->nk", weights, predictions) + intercept
        powers = np.exp(logits)
        return log_loss(labels, powers / powers.sum(axis=1, keepdims=True))

    least = loss(weights, intercept)
    assert loss(0.7 * weights, intercept) > least
    assert loss(1.5 * weights, intercept) > least
    assert loss(weights, intercept + np.array([0.3, 0.0, 0.0])) > least


# ---- what a fit says


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    sets = kh.SetBatch(rng.normal(size=(320, 3, 2)))
    size = np.square(sets.tokens[:, 0]).reshape(320, 3).mean(axis=1)
    return sets, size + 0.1 * rng.normal(size=320)


@pytest.fixture(scope="module")
def combined(problem):
    """The default list without learned heads, which take longer than all others together."""
    return kh.AttentionRegressor(heads=kh.GaussianHeads(), random_state=0).fit(*problem)


def test_weights_are_not_negative_at_most_six_and_the_largest_come_first(combined):
    weights = [row.weight for row in combined.members_]
    assert min(weights) >= 0
    assert weights == sorted(weights, reverse=True)
    assert 2 <= sum(weight > 0 for weight in weights) <= 6
    assert len(weights) == len({row.name for row in combined.members_}) > 6


def test_predictions_are_weighted_sums_over_the_members(combined, problem):
    sets, _ = problem
    combination = combined.combination_
    total = combination.intercept[0]
    for weight, member in zip(combination.weights, combination.members, strict=True):
        total = total + weight * member.predict(sets[:20])[:, 0]
    assert np.allclose(combined.predict(sets[:20]), total, rtol=1e-12)


def test_a_combination_is_no_worse_than_each_of_its_layers(combined):
    assert combined.held_out_loss_ <= min(row.loss for row in combined.members_)


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_row_of_the_table_is_a_layer_that_can_be_fitted_alone(place, combined, problem):
    row = combined.members_[place]
    alone = clone(combined).set_params(**row.params).fit(*problem)
    assert len(alone.members_) == 1
    assert alone.alpha_ == pytest.approx(row.alpha)
    assert alone.loo_error_ == pytest.approx(row.loss, rel=1e-6)


def test_what_is_of_one_layer_says_so_in_a_combination(combined):
    for name in ("alpha_", "heads_", "n_heads_", "values_", "intercept_", "loo_error_"):
        with pytest.raises(AttributeError, match=f"'{name}' is of one layer.*see members_"):
            getattr(combined, name)


def test_the_summary_has_the_table_and_where_its_number_comes_from(combined):
    lines = combined.summary().splitlines()
    assert max(len(line) for line in lines) <= 100
    assert "samples left out one by one: mean squared error" in combined.summary()
    for row in combined.members_:
        assert any(row.name in line for line in lines)


def test_many_samples_are_judged_by_leave_one_out(combined, problem):
    _, y = problem
    combination = combined.combination_
    left_out = combination.intercept[0]
    for weight, member in zip(combination.weights, combination.members, strict=True):
        left_out = left_out + weight * member.held_out[:, 0]
    assert np.allclose(combined.held_out_predictions_, left_out)
    assert combined.held_out_loss_ == pytest.approx(mean_squared_error(y, left_out))


@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
def test_few_samples_are_judged_by_ten_folds_of_the_whole_procedure(problem):
    sets, y = problem[0][:60], problem[1][:60]
    model = kh.AttentionRegressor(pooling="statistics", random_state=3).fit(sets, y)
    assert len(model.members_) > 1
    expected = np.empty(60)
    for rest, fold in KFold(10, shuffle=True, random_state=3).split(y):
        expected[fold] = clone(model).fit(sets[rest], y[rest]).predict(sets[fold])
    # kernels of the folds are those of all samples, whose standardisation a refit finds anew
    assert np.abs(model.held_out_predictions_ - expected).mean() < 0.1 * np.std(y)
    held_out = model.held_out_predictions_
    assert model.held_out_loss_ == pytest.approx(mean_squared_error(y, held_out))
    assert "held out of the whole procedure, in ten folds" in model.summary()


@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
def test_folds_keep_groups_together(problem):
    sets, y = problem[0][:60], problem[1][:60]
    groups = np.arange(60) // 6
    model = kh.AttentionRegressor(pooling="statistics", random_state=0)
    model.fit(sets, y, groups=groups)
    # ten groups, ten folds: each group is predicted by a fit without it
    for group in (0, 7):
        is_other = groups != group
        without = clone(model).fit(sets[is_other], y[is_other], groups=groups[is_other])
        expected = without.predict(sets[~is_other])
        assert np.abs(model.held_out_predictions_[~is_other] - expected).mean() < 0.1 * np.std(y)


def test_probabilities_of_few_samples_are_calibrated_on_the_folds(problem):
    sets, y = problem[0][:80], problem[1][:80] > np.median(problem[1][:80])
    model = kh.AttentionClassifier(pooling="statistics", random_state=0).fit(sets, y)
    assert model.held_out_loss_ == pytest.approx(log_loss(y, model.held_out_predictions_))
    # sharper or blunter scores would have a larger loss
    logits = np.log(model.held_out_predictions_[:, 1] / model.held_out_predictions_[:, 0])
    for factor in (0.5, 2.0):
        assert log_loss(y, 1 / (1 + np.exp(-factor * logits))) > model.held_out_loss_


def test_a_combination_of_classes_is_judged_by_the_log_loss_whatever_its_layers_minimise(problem):
    sets, y = problem[0][:80], problem[1][:80] > np.median(problem[1][:80])
    settings = {"pooling": "statistics", "random_state": 0, "loss": "squared_error"}
    model = kh.AttentionClassifier(**settings).fit(sets, y)
    assert not model.combination_.is_single
    assert model.held_out_loss_ == pytest.approx(log_loss(y, model.held_out_predictions_))
    assert "log-loss" in model.summary()


def test_nothing_to_learn_is_the_mean(rng):
    x, y = rng.normal(size=(320, 2, 2)), rng.normal(size=320)
    model = kh.AttentionRegressor(pooling="statistics", random_state=0).fit(x, y)
    assert np.std(model.predict(x)) < 0.3 * np.std(y)
    assert model.held_out_loss_ < 1.02 * np.var(y)


def test_the_same_seed_is_the_same_model(problem):
    sets, y = problem[0][:40], problem[1][:40]
    one, other = (
        kh.AttentionRegressor(16, query="given", random_state=4).fit(sets, y) for _ in range(2)
    )
    assert (one.predict(sets) == other.predict(sets)).all()


def test_verbose_prints_a_line_for_every_layer(problem, capsys):
    sets, y = problem[0][:30], problem[1][:30]
    model = kh.AttentionRegressor(pooling="statistics", random_state=0, verbose=True).fit(sets, y)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "fitted statistics",
        "fitted statistics, then MLP",
    ]
    assert len(model.members_) == 2


# ---- clipping


@pytest.fixture
def clipping(rng):
    """A model of rows between 0 and 1, a sample far beyond, and the same sample clipped."""
    x = rng.uniform(size=(60, 2, 2))
    x[0, 0], x[0, 1] = 0.0, 1.0
    model = kh.AttentionRegressor(pooling="statistics", mlp="auto", random_state=0)
    model.fit(x, x[:, :, 0].sum(axis=1))
    far, clipped = np.full((1, 2, 2), 0.5), np.full((1, 2, 2), 0.5)
    far[0, 1, 1], clipped[0, 1, 1] = 1e6, 1.1
    return model, far, clipped


def test_rows_are_clipped_to_the_training_range_widened_by_a_tenth(clipping):
    model, far, clipped = clipping
    with pytest.warns(ClippedWarning, match=r"1 of 1 samples have rows beyond the range"):
        predicted = model.predict(far)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert predicted == pytest.approx(model.predict(clipped))


def test_novelty_sees_rows_as_they_are(clipping):
    model, far, clipped = clipping
    assert model.novelty(far) == 1.0
    assert model.novelty(far) >= model.novelty(clipped)


def test_one_explicit_layer_clips_nothing(rng):
    x = rng.uniform(size=(40, 2, 2))
    model = kh.AttentionRegressor(8, alpha=1.0, random_state=0, **PAPER_LAYER)
    model.fit(x, x.sum(axis=(1, 2)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        near, far, farther = model.predict([[[1.0, 1.0]], [[1e3, 1e3]], [[1e4, 1e4]]])
    assert abs(farther) > 5 * abs(far) > 50 * abs(near)
