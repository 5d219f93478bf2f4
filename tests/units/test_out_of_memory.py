"""Memory that runs out: the error says what was asked for, what takes the memory, and what to
do.
"""

import math
import pickle

import numpy as np
import pytest
import sklearn
from typer.testing import CliRunner

import keyhole as kh
from keyhole import choose
from keyhole.cli import app
from keyhole.estimators import norm_ball
from keyhole.refits import Refits
from keyhole.solvers.layers import FiniteLayer
from keyhole.streaming import LayerRecipe


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
    monkeypatch.setattr(norm_ball, "minimise", out_of_memory)
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


@pytest.mark.parametrize("out_of", ["features", "fit"])
def test_a_fit_in_batches_says_what_its_sums_take(out_of, samples, monkeypatch):
    sets, y = samples
    sums_in_words = (
        r"memory ran out in a fit in batches.*four p × p matrices.*p = 30 features.*fewer heads"
    )
    streamed = kh.AttentionRegressor(10, random_state=0).partial_fit(sets, y)
    monkeypatch.setattr(LayerRecipe, out_of, out_of_memory)
    with pytest.raises(MemoryError, match=sums_in_words):
        kh.AttentionRegressor(10, random_state=0).fit_batches([(sets, y)])
    with pytest.raises(MemoryError, match=sums_in_words):
        streamed.solve()
    with pytest.raises(MemoryError, match=sums_in_words):
        streamed.predict(sets)


def test_a_batch_that_is_added_says_what_its_sums_take(samples, monkeypatch):
    sets, y = samples
    enough = np.tile(np.arange(20), 60)  # samples that are added at once
    monkeypatch.setattr(LayerRecipe, "features", out_of_memory)
    model = kh.AttentionRegressor(10, random_state=0)
    with pytest.raises(MemoryError, match=r"memory ran out in a fit in batches.*smaller batches"):
        model.partial_fit(sets[enough], y[enough])


def test_commands_end_with_a_sentence(samples, monkeypatch, tmp_path):
    sets, y = samples
    kh.data.write_parquet(tmp_path / "table.parquet", [(sets, y)])
    kh.save(kh.AttentionRegressor(10, random_state=0).fit(sets, y), tmp_path / "model")
    monkeypatch.setattr(choose, "fit", out_of_memory)
    monkeypatch.setattr(FiniteLayer, "predict", out_of_memory)
    commands = {
        "fit": ["fit", str(tmp_path / "table.parquet"), str(tmp_path / "new")],
        "predict": [
            "predict",
            *(str(tmp_path / name) for name in ("model", "table.parquet", "out.csv")),
        ],
    }
    for name, arguments in commands.items():
        ended = CliRunner().invoke(app, arguments)
        assert ended.exit_code == 2, name
        assert f"error: memory ran out in {name}: " in ended.output, name


def test_a_command_adds_a_remedy_to_what_a_library_says(monkeypatch, tmp_path):
    monkeypatch.setattr("keyhole.cli.fit.read_data", out_of_memory)
    ended = CliRunner().invoke(app, ["fit", str(tmp_path / "table.csv"), str(tmp_path / "new")])
    assert ended.exit_code == 2
    assert "error: memory ran out: Unable to allocate 1.00 EiB" in ended.output
    assert "Use fewer samples" in ended.output


def test_other_errors_pass_unchanged(samples, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("as it is")

    monkeypatch.setattr(choose, "fit", fail)
    with pytest.raises(ZeroDivisionError, match="as it is"):
        kh.AttentionRegressor(10, random_state=0).fit(*samples)
