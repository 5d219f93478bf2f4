"""The lens on data whose truth is known: rows on the same folds, and answers that follow."""

import json

import numpy as np
import pytest
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.data import Dataset
from keyhole.lab.lens import CONSTANT, DEFAULT, HALF, LINEAR, _folds


def says(found):
    return {name: answer.says for name, answer in found.answers.items()}


@pytest.fixture(scope="module")
def found_where_the_query_matters():
    sets = kh.targets.sphere_sets(120, n_keys=4, dim=3, seed=0)
    return kh.lens(sets, kh.targets.Correlation(1, dim=3)(sets))


@pytest.fixture(scope="module")
def classes():
    rng = np.random.default_rng(4)
    sets = kh.SetBatch(rng.normal(size=(60, 3, 2)) + rng.normal(size=(60, 1, 2)))
    labels = np.where(sets.tokens.reshape(60, 3, 2).mean(axis=1)[:, 0] > 0, "up", "down")
    return sets, labels


@pytest.fixture(scope="module")
def found_in_classes(classes):
    return kh.lens(*classes)


def test_attention_and_the_query_pay_where_the_target_is_of_both(found_where_the_query_matters):
    answers = says(found_where_the_query_matters)
    assert answers["attention"] == "yes"
    assert answers["query"] == "yes"


def test_attention_does_not_pay_where_the_mean_tells_all(rng):
    keys = rng.normal(size=(100, 4, 3))
    y = keys.mean(axis=1)[:, 0] + rng.normal(size=100)
    answers = says(kh.lens(keys, y))
    assert answers["attention"] == "no"
    assert "query" not in answers


def test_noise_is_called_noise(rng):
    found = kh.lens(rng.normal(size=(60, 2, 2)), rng.choice(["a", "b"], 60))
    assert "yes" not in says(found).values()


def test_rows_are_losses_of_held_out_samples(found_in_classes, classes):
    _, labels = classes
    row = next(row for row in found_in_classes.rows if row.name == CONSTANT)
    losses = []
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    for train, test in folds.split(np.zeros(60), labels):
        shares = (np.unique(labels[train], return_counts=True)[1] + 1) / (len(train) + 2)
        losses.append(
            log_loss(labels[test], np.tile(shares, (len(test), 1)), labels=["down", "up"])
        )
    assert row.error == pytest.approx(np.mean(losses))


@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
def test_the_code_of_a_row_gives_its_error(found_in_classes, classes):
    """Of default settings, and of the best layer by itself."""
    sets, labels = classes
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    coded = [row for row in found_in_classes.rows if row.code.startswith("kh.")]
    default = next(row for row in coded if row.name == DEFAULT)
    layer = next(row for row in coded if not row.name.startswith("default"))
    for row in (default, layer):
        losses = []
        for train, test in folds.split(np.zeros(60), labels):
            model = eval(row.code, {"kh": kh, "math": np})
            if model.random_state is None:
                model.set_params(random_state=0)
            model.fit(sets[train], labels[train])
            losses.append(log_loss(labels[test], model.predict_proba(sets[test])))
        # an estimator of its own calibrates on ten folds, a row of the table by leave-one-out
        assert row.error == pytest.approx(np.mean(losses), rel=0.1), row.name


def test_answers_and_the_recommendation_are_those_of_the_table(found_where_the_query_matters):
    found = found_where_the_query_matters
    errors = [row.error for row in found.rows]
    assert errors == sorted(errors)
    best = next(row for row in found.rows if row.name != HALF)
    assert found.recommendation == best.code
    assert found.answers["settings"].says == best.name
    for row in found.rows:
        assert row.name in str(found)
    default = next(row for row in found.rows if row.name == DEFAULT)
    assert f"{default.error:.4g} with {DEFAULT}" in found.answers["attention"].sentence
    assert {row["learner"] for row in found.table} == {row.name for row in found.rows}
    assert sum(member.weight > 0 for member in found.members) >= 1


def test_a_baseline_that_is_best_is_recommended(rng):
    keys = rng.normal(size=(80, 3, 2))
    found = kh.lens(keys, rng.normal(size=80))
    best = next(row for row in found.rows if row.name != HALF)
    assert found.recommendation == best.code
    assert {CONSTANT, LINEAR} <= {row.code for row in found.rows}


def test_sample_level_features_are_heard_by_everyone(rng):
    sets = kh.SetBatch(rng.normal(size=(60, 2, 2)), None, rng.normal(size=(60, 1)))
    found = kh.lens(sets, sets.extras[:, 0])
    for row in found.rows:
        if row.name in (LINEAR, DEFAULT):
            assert row.error < 0.05


def test_groups_stay_whole_and_time_runs_forward(rng):
    groups, moments = rng.integers(0, 12, 90), rng.integers(0, 40, 90).astype(float)
    for train, test in _folds(np.zeros(90), "regression", groups, None, None, 0):
        assert not np.isin(groups[train], groups[test]).any()
    for train, test in _folds(np.zeros(90), "regression", groups, moments, None, 0):
        assert moments[train].max() < moments[test].min()
    split = (np.arange(90) >= 60).astype(int)
    [(train, test)] = _folds(np.zeros(90), "regression", None, None, split, 0)
    np.testing.assert_array_equal(train, np.arange(60))
    np.testing.assert_array_equal(test, np.arange(60, 90))


def test_copies_in_one_group_tell_nothing_of_each_other(rng):
    sets = kh.SetBatch(np.repeat(rng.normal(size=(20, 2, 3)), 3, axis=0))
    y, groups = np.repeat(rng.normal(size=20), 3), np.repeat(np.arange(20), 3)
    found = kh.lens(sets, y, groups=groups)
    assert found.rows[0].error > 0.5
    assert "yes" not in says(found).values()


def test_a_saved_page_is_not_overwritten(found_in_classes, tmp_path):
    page, data = found_in_classes.save(tmp_path)
    assert json.loads(data.read_text()) == json.loads(json.dumps(found_in_classes.as_data()))
    assert "Does attention pay?" in page.read_text()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        found_in_classes.save(tmp_path)
    found_in_classes.save(tmp_path, overwrite=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"y": np.zeros(3)}, r"got shape \(3,\)"),
        ({"y": np.array(["a", "b"] * 30), "task": "regression"}, "numbers: got labels such as"),
        ({"groups": [1, 2]}, "`groups` must have one entry for each of the 60"),
        ({"split": np.arange(60)}, "0 .train. or 1 .test."),
        ({"time": np.zeros(60)}, "must differ between samples"),
        ({"task": "ranking"}, "`task`"),
    ],
)
def test_slips(options, words):
    sets = kh.targets.sphere_sets(60, 2, 2, seed=0)
    with pytest.raises(ValueError, match=words):
        kh.lens(sets, **{"y": sets.query[:, 0], **options})


def test_a_dataset_brings_its_target_and_its_split(classes):
    sets, labels = classes
    split = (np.arange(60) >= 40).astype(int)
    found = kh.lens(Dataset(sets, labels, split=split))
    assert np.isfinite(found.rows[0].losses).sum() == 20


def test_the_command(classes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sets, labels = classes
    np.savez("sets.npz", keys=sets.tokens.reshape(60, 3, 2), y=(labels == "up").astype(float))
    run = CliRunner().invoke(app, ["lens", "sets.npz", "--json"])
    assert run.exit_code == 0, run.output
    answer = json.loads(run.stdout)
    assert {"attention", "samples", "settings"} <= set(answer["answers"])
    before = sorted((tmp_path / "out").rglob("*"))
    assert before
    run = CliRunner().invoke(app, ["lens", "sets.npz", "--out", "out/lens/sets"])
    assert run.exit_code == 2
    assert "--overwrite" in run.stderr
    assert sorted((tmp_path / "out").rglob("*")) == before
