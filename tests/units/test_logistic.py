"""Logistic regression by Newton steps, against scikit-learn, the textbook and plain refits."""

from dataclasses import dataclass

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from keyhole import textbook
from keyhole.logistic import LogisticProblem, logistic_gram, logistic_rows
from keyhole.logistic.gram import GramSystem, HostGram
from keyhole.logistic.problem import working_problem

ALPHA = 0.5


@dataclass(frozen=True)
class Task:
    """Features and targets ±1 that a noisy linear rule decides."""

    features: np.ndarray
    y: np.ndarray
    weights: np.ndarray

    @property
    def gram(self) -> np.ndarray:
        return self.features @ self.features.T


@pytest.fixture
def task(seed: int) -> Task:
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((120, 4)) * [0.3, 1.0, 2.0, 1.0] + 1.0
    signal = features[:, :1] + features[:, 1:2] - 1.3
    y = np.where(signal + rng.logistic(size=(120, 1)) > 0, 1.0, -1.0)
    return Task(features, y, rng.uniform(0.2, 3.0, size=120))


def fit_without(task: Task, held_out: np.ndarray, alpha: float) -> np.ndarray:
    """Logits of the held-out samples by a fit of scikit-learn's to the others."""
    kept = np.setdiff1d(np.flatnonzero(task.weights > 0), held_out)
    learner = LogisticRegression(C=1 / alpha, tol=1e-10, max_iter=2000)
    learner.fit(task.features[kept], task.y[kept, 0], sample_weight=task.weights[kept])
    return learner.decision_function(task.features[held_out])


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_both_routes_have_the_coefficients_of_scikit_learn(task: Task, fit_intercept: bool) -> None:
    problem = LogisticProblem.of(task.y, [ALPHA], weights=task.weights, fit_intercept=fit_intercept)
    reference = LogisticRegression(
        C=1 / ALPHA, tol=1e-10, max_iter=2000, fit_intercept=fit_intercept
    ).fit(task.features, task.y[:, 0], sample_weight=task.weights)

    dual = logistic_gram(task.gram, problem)
    primal = logistic_rows(lambda: [task.features[:50], task.features[50:]], problem)

    assert np.allclose(task.features.T @ dual.coef, reference.coef_.T, atol=1e-4)
    assert np.allclose(dual.intercept, reference.intercept_, atol=1e-4)
    assert np.allclose(primal.coef, task.features.T @ dual.coef, atol=1e-9)
    assert np.allclose(primal.left_out, dual.left_out, atol=1e-8)


def test_the_textbook_has_the_same_fit_and_the_same_left_out_logits(task: Task) -> None:
    a, b, left_out = textbook.logistic(task.gram, task.y[:, 0], ALPHA)
    fit = logistic_gram(task.gram, LogisticProblem.of(task.y, [ALPHA]))
    assert np.allclose(fit.coef[:, 0], a, atol=1e-8)
    assert np.isclose(fit.intercept[0], b, atol=1e-8)
    assert np.allclose(task.y[:, 0] - fit.left_out[:, 0], left_out, atol=1e-7)


def left_out_error(task: Task, logits: np.ndarray, alpha: float) -> float:
    """The largest difference to refits, as a share of what leaving a sample out changes."""
    refits = np.concatenate(
        [fit_without(task, np.array([i]), alpha) for i in range(0, len(task.y), 4)]
    )
    fitted = logistic_gram(task.gram, LogisticProblem.of(task.y, [alpha], weights=task.weights))
    outputs = task.gram @ fitted.coef[:, 0] + fitted.intercept
    change = np.abs(refits - outputs[::4]).max()
    return float(np.abs(refits - logits[::4]).max() / change)


def test_left_out_logits_are_those_of_refits_up_to_a_tenth_of_the_change(task: Task) -> None:
    fit = logistic_gram(task.gram, LogisticProblem.of(task.y, [ALPHA], weights=task.weights))
    assert left_out_error(task, task.y[:, 0] - fit.left_out[:, 0], ALPHA) < 0.1


def test_left_out_logits_without_the_intercept_are_caught(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken variant: leverages that forget that the intercept is fitted too."""
    monkeypatch.setattr(GramSystem, "_intercept_part", lambda system: np.zeros(len(system.roots)))
    fit = logistic_gram(task.gram, LogisticProblem.of(task.y, [ALPHA], weights=task.weights))
    assert left_out_error(task, task.y[:, 0] - fit.left_out[:, 0], ALPHA) > 0.1


def test_groups_are_left_out_whole_and_predict_their_members_of_weight_0(task: Task) -> None:
    groups = np.arange(len(task.y)) // 3
    weights = task.weights.copy()
    weights[7] = 0.0
    task = Task(task.features, task.y, weights)
    problem = LogisticProblem.of(task.y, [ALPHA], weights=weights, groups=groups)
    fit = logistic_gram(task.gram, problem)
    assert fit.selection == "groups"
    logits = task.y[:, 0] - fit.left_out[:, 0]
    outputs = task.gram @ fit.coef[:, 0] + fit.intercept
    error = 0.0
    change = 0.0
    for group in [2, *range(0, 40, 5)]:  # group 2 has the sample of weight 0
        members = np.flatnonzero(groups == group)
        refit = fit_without(task, members, ALPHA)
        error = max(error, float(np.abs(logits[members] - refit).max()))
        change = max(change, float(np.abs(outputs[members] - refit).max()))
    assert error < 0.2 * change


def test_a_weight_of_two_is_the_sample_given_twice(task: Task) -> None:
    weights = np.ones(len(task.y))
    weights[:10] = 2.0
    weighted = logistic_gram(task.gram, LogisticProblem.of(task.y, [ALPHA], weights=weights))
    rows = np.concatenate([np.arange(len(task.y)), np.arange(10)])
    repeated = logistic_rows(
        lambda: [task.features[rows]], LogisticProblem.of(task.y[rows], [ALPHA])
    )
    assert np.allclose(task.features.T @ weighted.coef, repeated.coef, atol=1e-8)


def test_classes_are_one_vs_rest_at_one_penalty(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((150, 3))
    labels = (features + 0.5 * rng.standard_normal((150, 3))).argmax(axis=1)
    y = np.where(labels[:, None] == np.arange(3), 1.0, -1.0)
    joint = logistic_gram(features @ features.T, LogisticProblem.of(y))
    for output in range(3):
        alone = logistic_gram(
            features @ features.T, LogisticProblem.of(y[:, [output]], [joint.alpha])
        )
        assert np.allclose(joint.coef[:, [output]], alone.coef, atol=1e-7)


def test_a_given_grid_keeps_its_order_and_the_best_penalty_is_that_of_least_loss(
    task: Task,
) -> None:
    alphas = [0.1, 1000.0, 1.0, 10.0]
    fit = logistic_gram(task.gram, LogisticProblem.of(task.y, alphas))
    assert fit.alphas.tolist() == alphas
    assert fit.log_losses is not None
    assert fit.loss <= fit.log_losses.min() + 1e-3
    alone = logistic_gram(task.gram, LogisticProblem.of(task.y, [fit.alpha]))
    assert np.allclose(fit.coef, alone.coef, atol=1e-7)
    assert np.isclose(fit.loss, alone.loss, atol=1e-6)


def test_an_automatic_path_finds_what_a_fine_grid_finds(task: Task) -> None:
    automatic = logistic_gram(task.gram, LogisticProblem.of(task.y))
    fine = logistic_gram(task.gram, LogisticProblem.of(task.y, np.geomspace(1e-3, 1e3, 49)))
    assert automatic.loss <= fine.loss + 2e-3


def test_classes_that_can_be_told_apart_have_finite_logits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((60, 2))
    y = np.where(features[:, :1] > 0, 1.0, -1.0)
    fit = logistic_gram(features @ features.T, LogisticProblem.of(y))
    assert np.isfinite(fit.coef).all()
    assert np.isfinite(fit.left_out).all()
    assert fit.loss < 0.2


def test_features_that_do_not_vary_give_the_base_rate() -> None:
    y = np.array([[1.0], [1.0], [1.0], [-1.0]])
    fit = logistic_gram(np.ones((4, 4)), LogisticProblem.of(y))
    assert np.isclose(fit.intercept[0], np.log(3.0))
    assert np.abs(fit.coef.sum(axis=0)) < 1e-9


def test_a_penalty_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="positive penalty: got alpha = 0"):
        LogisticProblem.of(np.array([[1.0], [-1.0]]), [1.0, 0.0])


def test_rounding_does_not_decide_how_far_a_path_of_penalties_goes(seed: int) -> None:
    """The order of the samples moves the trace of a Gram matrix by rounding.

    Dividing the largest penalty by ten, seven times, and multiplying it by 1e-7 differ by as much.
    """
    rng = np.random.default_rng([51, seed])
    features = rng.standard_normal((6, 2))
    problem = LogisticProblem.of(np.where(features[:, :1] > 0, 1.0, -1.0))
    system = GramSystem(HostGram(features @ features.T), problem, rounding=1e-16)
    lengths = []
    for factor in rng.uniform(0.1, 1.0, size=200):
        system.largest = factor
        lengths.append(len(problem.decades(system)))
    assert lengths == [8] * 200


def test_steps_go_on_where_the_objective_cannot_tell_them(seed: int) -> None:
    """Classes that can be told apart have logits beyond 100, and losses of 1e-40.

    Steps that still matter then change the objective by less than rounding. The reference takes
    every step whole.
    """
    rng = np.random.default_rng([52, seed])
    features = rng.standard_normal((24, 12))
    y = np.where(features[:, :1] + 0.3 * features[:, 1:2] > 0, 1.0, -1.0)
    gram = features @ features.T
    problem = LogisticProblem.of(y, [1e-7])

    system = GramSystem(HostGram(gram), problem, rounding=1e-16)
    point = system.constant(0.0)
    for _ in range(100):
        curvature, responses = working_problem(point.outputs, y[:, 0])
        point = system.solve(1e-7, curvature, responses)

    fit = logistic_gram(gram, problem)
    logits = gram @ fit.coef[:, 0] + fit.intercept
    np.testing.assert_allclose(logits, point.outputs, rtol=1e-6)
