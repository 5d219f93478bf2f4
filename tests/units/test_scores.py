"""Accuracy, AUC and log-loss beside a constant guess, in `keyhole fit`."""

import math

import numpy as np
import pytest
from paper import PAPER_LAYER
from sklearn.metrics import log_loss, r2_score, roc_auc_score

import keyhole as kh
from keyhole.cli.fit import _held_out_line, _test_line
from keyhole.data import Dataset
from keyhole.estimators import scores


def drawn(rng, n_classes, n=90):
    """Labels, and probabilities that know something of them."""
    labels = np.arange(n) % n_classes
    noisy = rng.normal(size=(n, n_classes)) + 1.5 * (labels[:, None] == np.arange(n_classes))
    powers = np.exp(noisy)
    return labels, powers / powers.sum(axis=1, keepdims=True)


def test_measures_of_two_classes_are_those_of_scikit_learn(rng):
    labels, probabilities = drawn(rng, 2)
    found = scores.class_measures(labels, probabilities)
    assert found.accuracy == np.mean(probabilities.argmax(axis=1) == labels)
    assert found.auc == pytest.approx(roc_auc_score(labels, probabilities[:, 1]))
    assert found.log_loss == pytest.approx(log_loss(labels, probabilities))


def test_auc_of_several_classes_is_the_mean_of_one_against_the_rest(rng):
    labels, probabilities = drawn(rng, 4)
    found = scores.class_measures(labels, probabilities)
    expected = roc_auc_score(labels, probabilities, multi_class="ovr", average="macro")
    assert found.auc == pytest.approx(expected)
    assert "mean over classes, one against the rest" in found.words(4)
    assert "mean over classes" not in found.words(2)


def test_what_is_not_defined_is_not_a_number(rng):
    labels, probabilities = drawn(rng, 2)
    of_one_class = scores.class_measures(np.zeros_like(labels), probabilities)
    assert math.isnan(of_one_class.auc)
    assert math.isfinite(of_one_class.log_loss)
    labels[0] = -1  # a class that the training part did not have
    unknown = scores.class_measures(labels, probabilities)
    assert math.isnan(unknown.log_loss)
    assert math.isfinite(unknown.auc)
    assert "log-loss –" in unknown.words()
    assert math.isnan(scores.number_measures(np.ones(4), np.zeros(4)).r2)


def test_a_sure_mistake_has_a_finite_log_loss():
    sure = np.array([[1.0, 0.0], [0.0, 1.0]])
    assert 10 < scores.class_measures(np.array([1, 1]), sure).log_loss < 40


def test_the_constant_guess_is_the_share_of_each_class():
    training = np.array([0, 0, 0, 1])
    guess = scores.constant_class_guess(np.array([0, 1]), training, 2)
    assert guess.accuracy == 0.5
    assert guess.auc == 0.5
    assert guess.log_loss == pytest.approx(-(math.log(0.75) + math.log(0.25)) / 2)


@pytest.fixture
def bags(rng):
    """Sets whose mean says which of two or three classes they are, with a test part."""
    sets = kh.SetBatch(rng.normal(size=(80, 3, 2)) + rng.normal(size=(80, 1, 2)))
    split = (np.arange(80) >= 60).astype(int)
    return Dataset(sets, None, split=split), sets.tokens.reshape(80, 3, 2).mean(axis=1)[:, 0]


def fitted(estimator, data):
    return estimator.fit(data.train.sets, data.train.target)


@pytest.mark.parametrize("cuts", [[0.0], [-0.4, 0.4]])
def test_fit_says_auc_and_log_loss_beside_a_constant_guess(cuts, bags):
    data, mean = bags
    labels = np.digitize(mean, cuts)
    data = Dataset(data.sets, labels, split=data.split)
    model = fitted(kh.AttentionClassifier(8, random_state=0, **PAPER_LAYER), data)

    said = _held_out_line(model, data, "classification")
    probabilities = model.held_out_predictions_
    train = labels[:60]
    shares = np.tile(np.bincount(train) / 60, (60, 1))
    assert f"log-loss {log_loss(train, probabilities):.3f}, {len(cuts) + 1} classes" in said
    constant = f"a constant guess: accuracy {100 * np.mean(train == shares[0].argmax()):.1f} %"
    assert f"{constant}, AUC 0.500, log-loss {log_loss(train, shares):.3f}" in said

    said = _test_line(model, data, "classification")
    probabilities = model.predict_proba(data.test.sets)
    by_class = probabilities[:, 1] if len(cuts) == 1 else probabilities
    area = roc_auc_score(labels[60:], by_class, multi_class="ovr")
    assert f"AUC {area:.3f}" in said
    assert f"log-loss {log_loss(labels[60:], probabilities):.3f} on the 20 sets" in said
    assert "a constant guess: accuracy" in said


def test_fit_says_r2_beside_a_constant_guess(bags):
    data, mean = bags
    data = Dataset(data.sets, mean, split=data.split)
    model = fitted(kh.AttentionRegressor(8, random_state=0, **PAPER_LAYER), data)
    said = _held_out_line(model, data, "regression")
    r2 = r2_score(mean[:60], model.held_out_predictions_)
    assert f"R² {r2:.3f}; a constant guess: RMSE" in said
    assert f"RMSE {mean[:60].std():.4g}"[:8] in said
    said = _test_line(model, data, "regression")
    assert f"R² {model.score(data.test.sets, mean[60:]):.3f} on the 20 sets" in said
    assert "; a constant guess: RMSE" in said
