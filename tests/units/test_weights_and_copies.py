"""A sample is a row; weights are as in `Ridge` where the penalty is given, else up to a factor."""

import numpy as np
import pytest
from paper import PAPER_LAYER
from sklearn.base import clone
from sklearn.metrics import log_loss

import keyhole as kh

N = 60


# ---- copies


@pytest.fixture
def token(seed):
    """One binary number for each of 400 samples; its label agrees with it four times of five."""
    rng = np.random.default_rng([seed, 21])
    x = rng.integers(0, 2, (400, 1, 1)).astype(float)
    agrees = rng.random(400) < 0.8
    return x, np.where(agrees, x[:, 0, 0], 1 - x[:, 0, 0]).astype(int)


@pytest.fixture
def baskets(seed):
    """One to three of four items; a basket with the first item is bought three times of four."""
    rng = np.random.default_rng([seed, 22])
    items = [rng.permutation(4)[: rng.integers(1, 4)] for _ in range(600)]
    chance = np.array([0.75 if 0 in item else 0.3 for item in items])
    sets = [np.eye(4)[item] for item in items]
    return sets, (rng.random(600) < chance).astype(int), chance


def classifier(**settings):
    """The default list but learned heads, which say nothing of copies."""
    return kh.AttentionClassifier(heads=kh.GaussianHeads(), random_state=0, **settings)


def test_probabilities_of_equal_sets_are_the_shares_of_their_labels(token):
    x, y = token
    model = classifier().fit(x, y)
    shares = [y[x[:, 0, 0] == value].mean() for value in (0.0, 1.0)]
    assert np.allclose(model.predict_proba([[[0.0]], [[1.0]]])[:, 1], shares, atol=0.02)
    # the reported loss is that of such probabilities
    assert model.held_out_loss_ == pytest.approx(log_loss(y, model.predict_proba(x)), abs=0.02)


def test_baskets_get_their_chances(baskets):
    sets, y, chance = baskets
    probabilities = classifier().fit(sets[:300], y[:300]).predict_proba(sets[300:])[:, 1]
    best = log_loss(y[300:], chance[300:])
    assert log_loss(y[300:], probabilities) < best + 0.05


def test_groups_of_one_sample_each_change_nothing(token):
    x, y = token
    alone = classifier().fit(x, y).predict_proba(x)
    grouped = classifier().fit(x, y, groups=np.arange(400)).predict_proba(x)
    assert log_loss(y, alone) == pytest.approx(log_loss(y, grouped), abs=0.01)


@pytest.mark.parametrize("n_heads", [3, 40, np.inf])
def test_one_of_several_equal_samples_is_left_out_alone(n_heads, rng):
    x, y = rng.normal(size=(20, 3, 2)), rng.normal(size=20)
    x[1] = x[2] = x[0]
    y[1] = y[2] = y[0]
    model = kh.AttentionRegressor(n_heads, alpha=0.1, random_state=0, **PAPER_LAYER).fit(x, y)
    left_out, n_errors = model.loo_predictions_[0], len(model.jackknife_errors_)
    without_first = model.fit(x[1:], y[1:])
    assert left_out == pytest.approx(without_first.predict(x[:1])[0], rel=1e-7)
    assert n_errors == 20


# ---- weights


@pytest.fixture
def sets(rng):
    return kh.SetBatch(rng.normal(size=(N, 4, 3)), query=rng.normal(size=(N, 3)))


@pytest.fixture
def y(sets, rng):
    return sets.tokens[::4, 0] + sets.query[:, 0] + 0.5 * rng.normal(size=N)


@pytest.fixture
def weights(rng):
    return rng.uniform(0.2, 3.0, N)


def numbers(model, sets):
    """Predictions of a regressor, probabilities of a classifier."""
    if hasattr(model, "predict_proba"):
        return model.predict_proba(sets)
    return model.predict(sets)


def targets_for(model, y):
    """Two classes for a classifier."""
    if hasattr(model, "predict_proba"):
        return np.where(y > 0, "high", "low")
    return y


AUTOMATIC = {
    "regressor": kh.AttentionRegressor(pooling="statistics", random_state=0),
    "classifier": kh.AttentionClassifier(pooling="statistics", random_state=0),
    "one layer": kh.AttentionRegressor(16, random_state=0, **PAPER_LAYER),
    "log-loss": kh.AttentionClassifier(16, random_state=0, **PAPER_LAYER),
    "landmarks": kh.AttentionRegressor(kh.Landmarks(20), random_state=0, **PAPER_LAYER),
}


@pytest.mark.parametrize("name", AUTOMATIC)
def test_a_common_factor_changes_nothing(name, sets, y, weights):
    model = AUTOMATIC[name]
    target = targets_for(model, y)
    expected = numbers(clone(model).fit(sets, target, sample_weight=weights), sets)
    for factor in (1000.0, 1.0 / weights.sum()):
        scaled = clone(model).fit(sets, target, sample_weight=factor * weights)
        # weights of a logistic combination are found to 1e-6
        tolerance = 1e-5 if name == "classifier" else 1e-9
        assert np.allclose(numbers(scaled, sets), expected, rtol=tolerance, atol=tolerance)


def test_rounding_of_the_weights_does_not_decide_the_probabilities():
    rng = np.random.default_rng(0)
    sets = kh.SetBatch(rng.normal(size=(N, 4, 3)), query=rng.normal(size=(N, 3)))
    y = sets.tokens[::4, 0] + sets.query[:, 0] + 0.5 * rng.normal(size=N) > 0
    model = kh.AttentionClassifier(pooling="mean", query="given", mlp="none", random_state=0)
    plain = clone(model).fit(sets, y).predict_proba(sets)
    nearly_one = clone(model).fit(sets, y, sample_weight=np.r_[1 + 1e-15, np.ones(N - 1)])
    assert np.allclose(nearly_one.predict_proba(sets), plain, atol=1e-3)


def test_a_common_factor_of_the_classes_changes_nothing(sets, y):
    labels = (y > 0).astype(int)
    plain = AUTOMATIC["classifier"].fit(sets, labels).predict_proba(sets)
    small = clone(AUTOMATIC["classifier"]).set_params(class_weight={0: 0.01, 1: 0.01})
    # weights of the combination are found to 1e-6
    assert np.allclose(small.fit(sets, labels).predict_proba(sets), plain, atol=1e-5)


def test_weights_of_classes_are_weights_of_their_samples(sets, y):
    labels = (y > 0.5).astype(int)
    model = kh.AttentionClassifier(16, random_state=0, **PAPER_LAYER)
    by_class = clone(model).set_params(class_weight="balanced").fit(sets, labels)
    of_samples = (1 / np.bincount(labels))[labels]
    by_sample = clone(model).fit(sets, labels, sample_weight=of_samples)
    assert np.allclose(by_class.predict_proba(sets), by_sample.predict_proba(sets), atol=1e-9)


@pytest.mark.parametrize("n_heads", [4, 40, np.inf])
@pytest.mark.parametrize("kind", [kh.AttentionRegressor, kh.AttentionClassifier])
def test_with_a_given_penalty_a_weight_of_two_is_two_rows(kind, n_heads, sets, y):
    settings = {**PAPER_LAYER, "scaling": "standard"}
    model = kind(n_heads, alpha=0.5, random_state=0, **settings)
    target = targets_for(model, y)
    weights = 1.0 + (np.arange(N) % 3 == 0)
    rows = np.repeat(np.arange(N), weights.astype(int))
    weighted = clone(model).fit(sets, target, sample_weight=weights)
    repeated = clone(model).fit(sets[rows], target[rows])
    use = "decision_function" if hasattr(model, "predict_proba") else "predict"
    assert np.allclose(
        getattr(weighted, use)(sets), getattr(repeated, use)(sets), rtol=1e-8, atol=1e-8
    )


@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
def test_samples_of_weight_zero_have_no_part_in_anything(sets, y, weights):
    weights = np.where(np.arange(N) % 4 == 0, 0.0, weights)
    kept = weights > 0
    model = AUTOMATIC["regressor"]
    some = clone(model).fit(sets, y, sample_weight=weights)
    rest = clone(model).fit(sets[kept], y[kept], sample_weight=weights[kept])
    assert np.allclose(some.predict(sets), rest.predict(sets), rtol=1e-9)
    assert (np.isnan(some.held_out_predictions_) == ~kept).all()
    assert some.held_out_loss_ == pytest.approx(rest.held_out_loss_)
