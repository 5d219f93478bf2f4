"""Memory that runs out: the error says what was asked for, what takes the memory, and what to
do.
"""

import math
import pickle

import numpy as np
import pytest
import sklearn

import keyhole as kh
from keyhole import choose
from keyhole.estimators import norm_ball
from keyhole.refits import Refits
from keyhole.solvers.layers import FiniteLayer


@pytest.fixture
def samples(rng):
    sets = kh.SetBatch(rng.normal(size=(20, 3, 2)))
    return sets, sets.tokens[::3, 0].copy()


def out_of_memory(*_, **__):
    """What NumPy raises for an array that is too large."""
    np.empty((2**30, 2**27))


@pytest.mark.parametrize("n_heads", [math.inf, 10])
def test_a_fit_says_what_takes_memory_and_what_takes_less(n_heads, samples, monkeypatch):
    monkeypatch.setattr(choose, "fit", out_of_memory)
    with sklearn.config_context(working_memory=64), pytest.raises(MemoryError) as caught:
        kh.AttentionRegressor(n_heads, random_state=0).fit(*samples)
    words = str(caught.value)
    assert "memory ran out in fit: 20 samples of 60 keys in all, of dimension 2" in words
    assert "working_memory (64 MiB)" in words
    heads = "infinitely many heads" if math.isinf(n_heads) else "10 heads"
    matrix = "20 × 20" if math.isinf(n_heads) else "20 × 20 or 30 × 30"
    assert heads in words
    assert f"Gram matrix of {matrix} numbers" in words
    assert "fit_batches" in words
    assert "solver='cg'" in words
    assert caught.value.__cause__ is not None
    assert str(pickle.loads(pickle.dumps(caught.value))) == words, "it travels between processes"


def test_a_norm_ball_says_so_too(samples, monkeypatch):
    monkeypatch.setattr(norm_ball, "fit_ball_layer", out_of_memory)
    with pytest.raises(
        MemoryError, match=r"memory ran out in fit: 20 samples.*10 heads.*fewer heads"
    ):
        kh.NormBallRegressor(10, random_state=0).fit(*samples)


def test_predictions_say_to_predict_in_parts(samples, monkeypatch):
    models = [
        kh.AttentionRegressor(10, random_state=0).fit(*samples),
        kh.NormBallRegressor(10, group_radius=1.0, ball_radius=1.0, random_state=0).fit(*samples),
    ]
    for model in models:
        monkeypatch.setattr(type(model.layer_), "predict", out_of_memory)
        with pytest.raises(MemoryError, match=r"memory ran out in predict: 20 samples.*in parts"):
            model.predict(samples[0])


def test_contributions_and_features_say_to_go_in_parts(samples, monkeypatch):
    model = kh.AttentionRegressor(10, random_state=0).fit(*samples)
    monkeypatch.setattr(FiniteLayer, "contributions", out_of_memory)
    with pytest.raises(MemoryError, match=r"memory ran out in contributions: 20 samples.*in parts"):
        model.contributions(samples[0])
    transformer = kh.AttentionFeatures(10, random_state=0).fit(samples[0])
    monkeypatch.setattr("keyhole.estimators.features.attention_features", out_of_memory)
    with pytest.raises(MemoryError, match=r"memory ran out in transform: 20 samples.*in parts"):
        transformer.transform(samples[0])


def test_intervals_say_that_they_take_a_matrix_of_all_pairs(samples, monkeypatch):
    model = kh.AttentionRegressor(10, random_state=0).fit(*samples)
    monkeypatch.setattr(Refits, "of", out_of_memory)
    with pytest.raises(
        MemoryError, match=r"memory ran out in leave-one-out fits: 20 samples.*fewer samples"
    ):
        model.predict_interval(samples[0])


def test_other_errors_pass_unchanged(samples, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("as it is")

    monkeypatch.setattr(choose, "fit", fail)
    with pytest.raises(ZeroDivisionError, match="as it is"):
        kh.AttentionRegressor(10, random_state=0).fit(*samples)
