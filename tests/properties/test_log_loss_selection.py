"""Classifiers choose by the log-loss of calibrated left-out scores: the same as refits, one
temperature at a time.
"""

import numpy as np
import pytest
from paper import PAPER_LAYER, paper_classifier
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from sklearn.linear_model import Ridge

import keyhole as kh
from keyhole.ridge import calibration
from keyhole.ridge.calibration import calibrate
from keyhole.ridge.design import ridge_rows
from keyhole.ridge.gram import ridge_gram
from keyhole.ridge.problem import RidgeProblem

ALPHAS = [0.03, 1.0, 20.0]


def problem(rng, n_classes, weighted):
    n, p = 30, 6
    design = rng.standard_normal((n, p)) @ np.diag(np.geomspace(1, 0.05, p))
    labels = np.argmax(design[:, :n_classes] + rng.standard_normal((n, n_classes)), axis=1)
    labels[:n_classes] = np.arange(n_classes)
    columns = np.where(labels[:, None] == np.arange(n_classes), 1.0, -1.0)
    weights = rng.uniform(0.2, 4.0, n) if weighted else None
    return design, labels, columns[:, 1:] if n_classes == 2 else columns, weights


def refit_scores(design, columns, alpha, weights, groups):
    """Scores of every sample by scikit-learn's Ridge, fitted without its group."""
    scores = np.empty(columns.shape)
    for i in range(len(columns)):
        rest = groups != groups[i]
        model = Ridge(alpha=alpha, solver="svd")
        model.fit(
            design[rest], columns[rest], sample_weight=None if weights is None else weights[rest]
        )
        scores[i] = model.predict(design[i : i + 1])[0]
    return scores


def log_loss_at_best_temperature(scores, labels, weights):
    """By a search over log c, with labels that are trusted (n_k + 1)/(n_k + 2)."""
    scores = np.hstack([-scores, scores]) if scores.shape[1] == 1 else scores
    weights = np.ones(len(labels)) if weights is None else weights / weights.mean()
    doubt = 1 / (np.bincount(labels, weights=weights)[labels] + 2)
    truth = np.repeat((doubt / (scores.shape[1] - 1))[:, None], scores.shape[1], axis=1)
    truth[np.arange(len(labels)), labels] = 1 - doubt

    def doubted(log_c):
        return -weights @ (truth * log_softmax(np.exp(log_c) * scores, axis=1)).sum(axis=1)

    c = np.exp(
        minimize_scalar(doubted, bounds=(-8, 8), method="bounded", options={"xatol": 1e-10}).x
    )
    chances = log_softmax(c * scores, axis=1)[np.arange(len(labels)), labels]
    return -np.average(chances, weights=weights)


@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_choice_by_log_loss_is_brute_force_over_refits(rng, n_classes, weighted, grouped):
    design, labels, columns, weights = problem(rng, n_classes, weighted)
    groups = np.arange(30) // 3 if grouped else np.arange(30)
    wanted = [
        log_loss_at_best_temperature(
            refit_scores(design, columns, alpha, weights, groups), labels, weights
        )
        for alpha in ALPHAS
    ]
    options = {"weights": weights, "groups": groups if grouped else None, "criterion": "log_loss"}
    task = RidgeProblem.of(columns, ALPHAS, **options)
    fits = [ridge_gram(design @ design.T, task)]
    if not grouped:
        fits.append(ridge_rows(lambda: [design[:7], design[7:]], task))
    for fit in fits:
        np.testing.assert_allclose(fit.log_losses, wanted, rtol=1e-6)
        assert fit.best == int(np.argmin(wanted))


def test_temperatures_of_a_path_are_those_of_its_parts(rng):
    labels, weights = rng.integers(3, size=40), rng.uniform(size=40)
    truth = np.eye(3)[labels]
    # noise alone, little and much of the truth, nothing but the truth, the opposite, and no scores
    # at all
    shares = [0.0, 0.3, 3.0, 1e6, -1.0]
    scores = np.array(
        [share * truth + rng.standard_normal((40, 3)) for share in shares] + [np.zeros((40, 3))]
    )
    together = calibrate(scores, labels, weights)
    for i, one in enumerate(scores):
        alone = calibrate(one[None], labels, weights)
        np.testing.assert_allclose(together[0][i], alone[0][0], rtol=1e-9)
        np.testing.assert_allclose(together[1][i], alone[1][0], rtol=1e-9, atol=1e-12)
        slope = np.array(
            [calibrate_objective(one, labels, weights, alone[0][0] * f) for f in (0.99, 1.0, 1.01)]
        )
        if 0 < i < 4:
            assert slope[1] <= slope[[0, 2]].min()
    assert together[0][4] * np.ptp(scores[4], axis=1).max() == pytest.approx(1e-6)
    assert together[0][5] == 1.0


def calibrate_objective(scores, labels, weights, c):
    weights = weights / weights.mean()
    doubt = 1 / (np.bincount(labels, weights=weights)[labels] + 2)
    truth = np.repeat((doubt / 2)[:, None], 3, axis=1)
    truth[np.arange(len(labels)), labels] = 1 - doubt
    return -weights @ (truth * log_softmax(c * scores, axis=1)).sum(axis=1)


def classes_of(rng, n, labels="abc"):
    sets = kh.SetBatch(rng.normal(size=(n, 3, 2)))
    return sets, np.array(list(labels))[np.digitize(sets.tokens.reshape(n, -1)[:, 0], [-0.5, 0.5])]


@pytest.mark.parametrize("n_heads", [float("inf"), 8, 40])
def test_a_classifier_tells_the_log_loss_it_chose_by(rng, n_heads):
    sets, y = classes_of(rng, 60)
    model = paper_classifier(n_heads, random_state=0).fit(sets, y)
    chances = log_softmax(model.loo_decision_ * model.temperature_, axis=1)
    told = -chances[np.arange(60), np.searchsorted(model.classes_, y)].mean()
    assert model.selection_.score == pytest.approx(told, rel=1e-6)
    assert model.selection_.score == model.selection_.scores.min()
    squared = paper_classifier(n_heads, random_state=0, criterion="squared_error").fit(sets, y)
    assert squared.selection_.score == squared.selection_.scores.min()
    assert squared.loo_error_ == squared.selection_.error
    assert not hasattr(squared, "log_loss_")
    np.testing.assert_allclose(squared.selection_.errors, model.selection_.errors, rtol=1e-9)


def test_batches_and_hold_out_choose_by_the_same_measure(rng):
    sets, y = classes_of(rng, 80)
    options = {"n_heads": 8, "alpha": ALPHAS, "random_state": 0}
    whole = kh.AttentionClassifier(**{**PAPER_LAYER, "n_heads": 512, **options}).fit(sets, y)
    for selection in ("loo", "gcv"):
        model = kh.AttentionClassifier(**{**PAPER_LAYER, "n_heads": 512, **options}).fit_batches(
            [(sets[:50], y[:50]), (sets[50:], y[50:])], selection=selection
        )
        assert model.selection_.method == selection
        np.testing.assert_allclose(model.selection_.scores, whole.selection_.scores, rtol=1e-6)
        assert model.alpha_ == whole.alpha_
    held = kh.AttentionClassifier(
        **{**PAPER_LAYER, "n_heads": 512, **options},
        solver="cg",
    ).fit(sets, y)
    assert held.selection_.method == "holdout"
    assert held.selection_.score == held.selection_.scores.min() < np.log(3)


def test_very_many_samples_are_judged_by_some_of_them(rng, monkeypatch):
    sets, y = classes_of(rng, 90)
    monkeypatch.setattr(calibration, "MAX_SCORES", 30 * 30 * 3)
    model = paper_classifier(8, random_state=0).fit(sets, y)
    scores = model.loo_decision_[::3]
    labels = np.searchsorted(model.classes_, y)[::3]
    _, losses = calibrate(scores[None], labels, np.ones(30))
    assert model.selection_.score == pytest.approx(losses.mean(), rel=1e-6)
    columns, left_out = np.eye(3)[rng.integers(3, size=90)], rng.normal(size=(30, 90, 3))
    whole, parts = (calibration.PathLosses(columns, np.ones(90), 30) for _ in range(2))
    whole.put(slice(None), slice(None), left_out)
    for start, stop in ((0, 31), (31, 32), (32, 90)):
        parts.put(slice(None), slice(start, stop), left_out[:, start:stop])
    np.testing.assert_array_equal(parts.scores, whole.scores)


@pytest.mark.parametrize("weight", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize("n_of_class", [1, 2, 500])
def test_scores_that_are_always_right_are_as_sure_as_they_are_many(n_of_class, weight):
    """m samples of a class count as (m + 1)/(m + 2) its own, whatever weight all samples have: with
    a margin of one, e^c = m + 1.
    """
    labels = np.repeat([0, 1], n_of_class)
    found, losses = calibrate(np.eye(2)[labels][None], labels, np.full(len(labels), weight))
    np.testing.assert_allclose(found, np.log1p(n_of_class), rtol=1e-9)
    np.testing.assert_allclose(losses, np.log1p(1 / (n_of_class + 1)), rtol=1e-9, atol=1e-15)
