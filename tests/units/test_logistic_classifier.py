"""One layer of least log-loss: what a logistic last layer gives, and what it refuses."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from paper import PAPER_LAYER
from sklearn.linear_model import LogisticRegression

import keyhole as kh


@dataclass(frozen=True)
class Bags:
    """Sets with queries and extras, and labels that a mean and an extra decide with some noise."""

    train: kh.SetBatch
    y: np.ndarray
    test: kh.SetBatch


def draw_bags(seed, n_classes):
    rng = np.random.default_rng(seed)
    keys = [rng.normal(size=(rng.integers(2, 6), 3)) for _ in range(130)]
    extras = rng.normal(size=(130, 2))
    sets = kh.SetBatch(keys, rng.normal(size=(130, 3)), extras)
    means = np.array([key.mean(axis=0) for key in keys])
    scores = np.column_stack([2 * means[:, :2], extras[:, 0]])[:, :n_classes]
    scores = scores + 0.3 * rng.normal(size=scores.shape)
    y = (scores[:, 0] > 0).astype(int) if n_classes == 2 else scores.argmax(axis=1)
    return Bags(sets[:90], y[:90], sets[90:])


@pytest.fixture(params=[2, 3], ids=["two labels", "three labels"])
def bags(seed, request):
    return draw_bags(seed, request.param)


def logistic_model(n_heads=30, **options):
    """A model with nothing to choose but the penalty and the scale of extras."""
    return kh.AttentionClassifier(n_heads, random_state=0, **PAPER_LAYER, **options)


@pytest.mark.parametrize("n_heads", [4, 60, math.inf], ids=["primal", "dual", "kernel"])
def test_scores_are_the_logits_of_scikit_learn_on_the_same_features(n_heads, seed):
    bags = draw_bags(seed, 2)
    train, test = bags.train.with_extras(None), bags.test.with_extras(None)
    model = logistic_model(n_heads, alpha=0.01).fit(train, bags.y)
    # features whose products are the kernel: those of the heads, or a root of the exact kernel
    everything = kh.concatenate([train, test])
    if math.isinf(n_heads):
        values, vectors = np.linalg.eigh(kh.attention_kernel(everything))
        features = vectors * np.sqrt(np.maximum(values, 0.0))
    else:
        features = kh.attention_features(everything, kh.GaussianHeads().sample(n_heads, 3, 0))
    learner = LogisticRegression(C=100.0, tol=1e-10, max_iter=10_000).fit(features[:90], bags.y)
    reference = learner.decision_function(features[90:])
    assert np.allclose(model.decision_function(test), reference, atol=2e-3)


def test_probabilities_are_those_of_the_logits(bags):
    model = logistic_model().fit(bags.train, bags.y)
    probabilities = model.predict_proba(bags.test)
    assert np.allclose(probabilities.sum(axis=1), 1.0)
    assert (model.classes_[probabilities.argmax(axis=1)] == model.predict(bags.test)).all()
    assert model.score(bags.train, bags.y) > 0.7


def test_scores_left_out_are_those_of_refits_up_to_a_fifth_of_the_change(seed):
    bags = draw_bags(seed, 2)
    train = bags.train.with_extras(None)
    model = logistic_model(alpha=0.3).fit(train, bags.y)
    fitted = model.decision_function(train)
    errors, changes = [], []
    for i in range(0, 90, 9):
        rest = np.arange(90) != i
        refit = logistic_model(alpha=0.3).fit(train[rest], bags.y[rest])
        score = refit.decision_function(train[[i]])[0]
        errors.append(abs(model.loo_decision_[i] - score))
        changes.append(abs(fitted[i] - score))
    assert max(errors) < 0.2 * max(changes)


def test_groups_are_left_out_whole(seed):
    bags = draw_bags(seed, 2)
    train = bags.train.with_extras(None)
    groups = np.arange(90) // 3
    model = logistic_model(alpha=0.05).fit(train, bags.y, groups=groups)
    alone = logistic_model(alpha=0.05).fit(train, bags.y)
    test = bags.test.with_extras(None)
    assert np.allclose(model.decision_function(test), alone.decision_function(test), atol=1e-6)
    errors, changes = [], []
    for group in (0, 9, 20):
        rest = groups != group
        refit = logistic_model(alpha=0.05).fit(train[rest], bags.y[rest])
        scores = refit.decision_function(train[~rest])
        errors.append(np.abs(model.loo_decision_[~rest] - scores).max())
        changes.append(np.abs(model.decision_function(train[~rest]) - scores).max())
    assert max(errors) < 0.4 * max(changes)


@pytest.mark.parametrize("grouped", [False, True])
def test_label_sets_are_made_of_the_fits_without_each_sample(grouped, seed):
    """f_{−i}(x_i) of the fits behind label sets are the leave-one-out scores."""
    from keyhole.estimators.uncertainty import without_each

    bags = draw_bags(seed, 2)
    groups = np.arange(90) // 3 if grouped else None
    model = logistic_model(alpha=0.05).fit(bags.train, bags.y, groups=groups)
    for rows, without in without_each(model.combination_, model._training, bags.train, 2**30):
        numbers = np.arange(90)[rows]
        own = without[np.arange(len(numbers)), 0, numbers]
        assert np.allclose(own, model.loo_decision_[rows], atol=1e-3)


def test_label_sets_hold_the_label_as_often_as_promised(seed):
    bags = draw_bags(seed, 2)
    sets = kh.concatenate([bags.train, bags.test])
    rng = np.random.default_rng(seed)
    means = np.add.reduceat(sets.tokens[:, 0], sets.offsets[:-1]) / sets.lengths
    y = (means + 0.3 * rng.normal(size=len(sets)) > 0).astype(int)
    model = logistic_model().fit(sets[:90], y[:90])
    assert model.interval_method == "jackknife+"
    plausible = model.predict_set(sets[90:], coverage=0.9)
    # 2c − 1 is 0.8, less two standard errors of 40 samples
    assert plausible[np.arange(40), y[90:]].mean() >= 0.7


def test_deviations_and_novelty_grow_away_from_the_training_samples(seed):
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(80, 1))
    model = logistic_model(math.inf).fit(x, x[:, 0] + 0.3 * rng.normal(size=80) > 0)
    usual, unusual = model.novelty([[0.1], [5.0]])
    assert unusual > max(usual, 0.95)


def test_importance_is_the_growth_of_the_log_loss(seed):
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(150, 4, 2))
    y = keys[:, :, 0].mean(axis=1) + 0.1 * rng.normal(size=150) > 0
    importance = logistic_model().fit(keys, y).coordinate_importance()
    assert importance.names[int(importance.across.argmax())] == "key 0"
    assert 0 < importance.baseline < math.log(2)


def test_a_penalty_of_zero_is_refused(seed):
    bags = draw_bags(seed, 2)
    with pytest.raises(ValueError, match="positive penalty"):
        logistic_model(alpha=0.0).fit(bags.train, bags.y)
