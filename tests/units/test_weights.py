"""Weights: as in `Ridge` with a given penalty, up to a factor in all that is automatic."""

import numpy as np
import pytest
from sklearn.base import clone

import keyhole as kh

N = 60


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


AUTOMATIC = {
    "regressor": kh.AttentionRegressor(random_state=0),
    "classifier": kh.AttentionClassifier(random_state=0),
    "log-loss": kh.AttentionClassifier(16, loss="log_loss", random_state=0),
    "selected keys": kh.AttentionClassifier(8, keys=2, random_state=0),
    "norm ball": kh.NormBallClassifier(4, n_folds=2, tol=0.01, random_state=0),
}


def targets_for(model, y):
    """Two classes for a classifier."""
    if hasattr(model, "predict_proba"):
        return np.where(y > 0, "high", "low")
    return y


@pytest.mark.parametrize("name", AUTOMATIC)
def test_a_common_factor_changes_nothing(name, sets, y, weights):
    model = AUTOMATIC[name]
    target = targets_for(model, y)
    expected = numbers(clone(model).fit(sets, target, sample_weight=weights), sets)
    for factor in (1000.0, 1.0 / weights.sum()):
        scaled = clone(model).fit(sets, target, sample_weight=factor * weights)
        np.testing.assert_allclose(numbers(scaled, sets), expected, rtol=1e-9, atol=1e-9)


def test_a_common_factor_of_the_classes_changes_nothing(sets, y):
    labels = (y > 0).astype(int)
    plain = kh.AttentionClassifier(16, random_state=0).fit(sets, labels)
    small = kh.AttentionClassifier(16, class_weight={0: 0.01, 1: 0.01}, random_state=0)
    small.fit(sets, labels)
    np.testing.assert_allclose(
        small.predict_proba(sets), plain.predict_proba(sets), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", ["regressor", "classifier"])
def test_a_common_factor_changes_nothing_in_batches(name, sets, y, weights):
    model = AUTOMATIC[name]
    target = targets_for(model, y)
    results = []
    for factor in (1.0, 1000.0, 1.0 / weights.sum()):
        stream = clone(model)
        for number, rows in enumerate((slice(0, 25), slice(25, N))):
            options = {}
            if name == "classifier" and number == 0:
                options = {"classes": ["high", "low"]}
            stream.partial_fit(
                sets[rows], target[rows], sample_weight=factor * weights[rows], **options
            )
        results.append(numbers(stream, sets))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-9, atol=1e-9)


FIXED = {
    "heads": kh.GaussianHeads(),
    "alpha": 0.5,
    "activation": "relu",
    "pooling": "mean",
    "scaling": "standard",
    "query": "given",
    "random_state": 0,
}


@pytest.mark.parametrize("n_heads", [4, 40, np.inf])
@pytest.mark.parametrize("kind", [kh.AttentionRegressor, kh.AttentionClassifier])
def test_with_a_given_penalty_a_weight_of_two_is_two_rows(kind, n_heads, sets, y):
    model = kind(n_heads, **FIXED)
    target = targets_for(model, y)
    weights = 1.0 + (np.arange(N) % 3 == 0)
    rows = np.repeat(np.arange(N), weights.astype(int))
    weighted = clone(model).fit(sets, target, sample_weight=weights)
    repeated = clone(model).fit(sets[rows], target[rows])
    use = "decision_function" if hasattr(model, "predict_proba") else "predict"
    np.testing.assert_allclose(
        getattr(weighted, use)(sets), getattr(repeated, use)(sets), rtol=1e-9, atol=1e-9
    )
