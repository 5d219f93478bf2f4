"""The lens on data whose truth is known: its four answers must be right."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.data import Dataset
from keyhole.lab.lens.findings import HeldOutCurve, LensConfig, Measured, difference, extrapolate
from keyhole.lab.lens.look import look

DIM, KEYS = 3, 4
# no clock decides in these tests: the budget is far away, and no law is learned unless a test is about that
QUIET = {"budget": 3000.0, "steps": 0}


def data_of(target, seed, n=240, noise=0.0):
    sets = kh.targets.sphere_sets(n, KEYS, DIM, seed)
    y = target(sets)
    y = y / y.std() + noise * np.random.default_rng([seed, n]).standard_normal(n)
    return Dataset(sets, y, ("a", "b", "c"), "sets on a sphere")


def says(found):
    return {name: answer.says for name, answer in found.answers.items()}


def linear(sets):
    return np.add.reduceat(sets.tokens, sets.offsets[:-1], axis=0)[:, 0] / sets.lengths


def test_attention_pays_and_the_query_matters(seed):
    found = look(data_of(kh.targets.Correlation(1, DIM), seed), LensConfig("regression", n_heads=64, **QUIET))
    assert says(found)["attention"] == "yes"
    assert says(found)["query"] == "yes"


def test_attention_pays_and_the_query_does_not_matter(seed):
    # an even power, which no mean of the keys tells
    found = look(data_of(kh.targets.TokenPower(2, DIM), seed, noise=0.3), LensConfig("regression", n_heads=64, **QUIET))
    assert says(found)["query"] == "no"
    pooled, attention = found.best("pooled"), found.best("attention")
    assert attention.error < found.learners[0].error
    assert pooled is not None


def test_attention_does_not_pay_where_the_mean_tells_all(seed):
    found = look(data_of(linear, seed, noise=1.0), LensConfig("regression", n_heads=64, **QUIET))
    assert says(found)["attention"] == "no"
    assert says(found)["query"] == "no"


def test_enough_is_enough(seed):
    """One coordinate, much noise: what there is to know is known from a hundred sets, and by a few heads."""
    rng = np.random.default_rng([seed, 2])
    keys = rng.uniform(-1, 1, size=(400, 3, 1))
    y = keys.mean(axis=(1, 2)) + 0.7 * rng.standard_normal(400)
    found = look(Dataset(kh.SetBatch(keys), y), LensConfig("regression", n_heads=64, **QUIET))
    assert says(found)["data"] != "yes"
    assert says(found)["heads"] != "yes"
    assert says(found)["query"] == "not tested"


def test_more_heads_help_where_there_is_one(seed):
    target = kh.targets.Correlation(1, DIM)
    found = look(data_of(target, seed, n=300), LensConfig("regression", n_heads=1, **QUIET))
    assert says(found)["heads"] == "yes"


def test_more_data_helps_where_the_target_is_hard_and_clean(seed):
    target = kh.targets.Correlation(2, DIM)
    found = look(data_of(target, seed), LensConfig("regression", n_heads=64, **QUIET))
    assert says(found)["data"] == "yes"


def test_noise_is_called_noise(seed):
    sets = kh.targets.sphere_sets(200, KEYS, DIM, seed)
    labels = np.random.default_rng([seed, 1]).choice(["a", "b", "c"], 200)
    found = look(Dataset(sets, labels), LensConfig("classification", n_heads=16, **QUIET))
    assert "yes" not in says(found).values()


def test_a_law_is_learned_and_softmax_has_no_kernel(seed):
    """The query asks with its first coordinate, the keys answer with their second."""
    rng = np.random.default_rng(seed)
    keys, query = rng.uniform(-2, 2, size=(300, 2, 3)), rng.uniform(-2, 2, size=(300, 3))
    y = (query[:, None, 0] * keys[:, :, 1] * keys[:, :, 2]).mean(axis=1)
    config = LensConfig("regression", n_heads=64, budget=3000.0, steps=10, activation="softmax")
    found = look(Dataset(kh.SetBatch(keys, query), y, ("x", "y", "z"), "made"), config)
    learned = next(m for m in found.learners if m.role == "learned")
    assert len(learned.losses) == 2
    assert found.law is not None
    assert says(found)["query"] in ("yes", "perhaps")
    assert any("softmax" in note for note in found.skipped)


def test_a_budget_is_kept_by_leaving_things_out():
    data = data_of(kh.targets.Correlation(1, DIM), 0, n=400)
    found = look(data, LensConfig("regression", budget=0.5))
    assert found.n_used < 400
    assert found.skipped
    assert says(found)["attention"] in ("yes", "perhaps", "no", "not tested")
    assert "of 400 sets, drawn at random" in found.settings


def test_the_split_of_the_data_is_used(seed):
    data = data_of(kh.targets.TokenPower(2, DIM), seed)
    split = (np.arange(240) >= 160).astype(int)
    found = look(Dataset(data.sets, data.target, split=split), LensConfig("regression", n_heads=16, **QUIET))
    assert (found.n_train, found.n_folds) == (160, 1)
    assert "own test part" in found.settings


@pytest.mark.parametrize(
    ("target", "words"), [(np.zeros(60), "must vary"), (np.array(["a"] * 60), "two classes")], ids=["zeros", "one"]
)
def test_nothing_to_learn(target, words):
    sets = kh.targets.sphere_sets(60, 2, 2, seed=0)
    with pytest.raises(ValueError, match=words):
        look(Dataset(sets, target), LensConfig("classification" if target.dtype.kind == "U" else "regression"))
    with pytest.raises(ValueError, match="at least 40 sets"):
        look(Dataset(sets[:10], np.arange(10.0)), LensConfig("regression"))


@pytest.mark.parametrize("shape", [(60, 2, 2), (60, 1, 1)])
def test_sets_that_are_all_alike(shape, seed):
    y = np.random.default_rng(seed).normal(size=60)
    for sets in (kh.SetBatch(np.zeros(shape)), kh.SetBatch(np.ones(shape), np.ones((60, shape[2])))):
        found = look(Dataset(sets, y), LensConfig("regression", n_heads=4, **QUIET))
        assert "yes" not in says(found).values()


def test_the_extrapolation_is_geometric():
    """Errors 9, 5, 3: gains 4, 2, so the next is 1."""
    losses = tuple(np.full(50, e) for e in (9.0, 5.0, 3.0))
    gain, error, now, later = extrapolate(HeldOutCurve("c", "attention", (1, 2, 4), losses))
    assert (gain, error, now, later) == (1.0, 0.0, 3.0, 2.0)
    steep = tuple(np.full(50, e) for e in (9.0, 6.0, 2.0))  # never below zero: a third is left each time
    assert extrapolate(HeldOutCurve("c", "attention", (1, 2, 4), steep))[3] == pytest.approx(2 / 3)


def test_differences_are_paired(rng):
    hard = rng.normal(size=500)
    a = Measured("a", "pooled", "", losses={0: hard + 0.1})
    b = Measured("b", "attention", "", losses={0: hard, 1: rng.normal(size=9)})
    assert difference(a, b).gain == pytest.approx(0.1)
    assert difference(a, b).error < 1e-12


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = data_of(kh.targets.TokenPower(2, DIM), 0, n=80)
    np.savez("sets.npz", keys=data.sets.tokens.reshape(80, KEYS, DIM), query=data.sets.query, y=data.target)
    run = CliRunner().invoke(app, ["lens", "sets.npz", "--budget", "6", "--heads", "16", "--json"])
    assert run.exit_code == 0, run.output
    answer = json.loads(run.stdout)
    assert set(answer["answers"]) == {"attention", "query", "data", "heads"}
    assert answer["task"] == "regression"
    page = (tmp_path / "out/lens/sets/report.html").read_text()
    for words in ("Does attention pay?", "Does the query matter?", "Would more data help?", "Would more heads help?"):
        assert words in page
    before = sorted((tmp_path / "out").rglob("*"))
    run = CliRunner().invoke(app, ["lens", "sets.npz", "--out", "out/lens/sets"])
    assert (run.exit_code, "--overwrite" in run.stderr) == (2, True)
    assert sorted((tmp_path / "out").rglob("*")) == before
