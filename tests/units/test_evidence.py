"""What displays say of a prediction: for the label that was predicted, and for no empty set."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.data.writer import write_parquet
from keyhole.estimators.evidence import evidence_of_predictions

runner = CliRunner()


@pytest.fixture
def bags(seed):
    """Bags of four keys, of which one in five is positive: it has one key far to the right."""
    rng = np.random.default_rng([31, seed])
    keys = rng.normal(size=(150, 4, 2))
    is_positive = np.arange(150) % 5 == 0
    keys[is_positive, 0, 0] += 8.0
    return kh.SetBatch(keys), is_positive


@pytest.fixture
def rare(bags):
    """A model of a rare label: its answer to a set without keys is far below zero."""
    sets, is_positive = bags
    labels = np.where(is_positive, "witness", "none")
    return kh.AttentionClassifier(50, scaling="standard", query="given", random_state=0).fit(
        sets, labels
    )


def test_evidence_for_two_labels_adds_up_to_the_score_of_the_predicted_one(rare, bags):
    sets, _ = bags
    (evidence,) = evidence_of_predictions(rare, sets)
    totals = np.array([part.sum() for part in evidence.keys])
    np.testing.assert_allclose(totals, np.abs(rare.decision_function(sets)), rtol=1e-9)
    assert evidence.labels.tolist() == rare.predict(sets).tolist()
    assert (evidence.labels != evidence.others).all()


def test_the_key_that_speaks_most_for_a_rare_label_is_its_witness(rare, bags):
    sets, is_positive = bags
    (evidence,) = evidence_of_predictions(rare, sets[is_positive])
    assert {int(part.argmax()) for part in evidence.keys} == {0}


def test_evidence_among_three_labels_is_the_lead_over_the_second(seed):
    sets = kh.targets.sphere_sets(120, n_keys=4, dim=3, seed=seed)
    labels = np.array(["a", "b", "c"])[np.argsort(np.argsort(sets.query[:, 0])) // 40]
    model = kh.AttentionClassifier(40, query="given", random_state=0).fit(sets, labels)
    (evidence,) = evidence_of_predictions(model, sets)
    _, second, first = np.sort(model.decision_function(sets), axis=1).T
    totals = np.array([part.sum() for part in evidence.keys])
    np.testing.assert_allclose(totals, first - second, rtol=1e-9, atol=1e-9)


def test_evidence_for_numbers_adds_up_to_each_output(seed):
    rng = np.random.default_rng([32, seed])
    sets = kh.SetBatch(rng.normal(size=(60, 3, 2)), extras=rng.normal(size=(60, 2)))
    y = np.stack([sets.extras[:, 0] + 5.0, sets.tokens[::3, 0]], axis=1)
    model = kh.AttentionRegressor(30, random_state=0).fit(sets, y)
    for j, evidence in enumerate(evidence_of_predictions(model, sets)):
        totals = np.array([part.sum() for part in evidence.keys]) + evidence.extras.sum(axis=1)
        np.testing.assert_allclose(totals, model.predict(sets)[:, j], rtol=1e-9, atol=1e-9)


def test_predict_writes_what_speaks_for_the_predicted_label(rare, bags, tmp_path):
    sets, is_positive = bags
    kh.save(rare, tmp_path / "model")
    write_parquet(tmp_path / "in.parquet", [sets])
    places = [str(tmp_path / name) for name in ("model", "in.parquet", "out.parquet")]
    result = runner.invoke(app, ["predict", *places, "--explain"])
    assert result.exit_code == 0, result.output
    table = pq.read_table(tmp_path / "out.parquet")
    parts = np.array(table["evidence"].to_pylist())
    np.testing.assert_allclose(parts.sum(axis=1), np.abs(rare.decision_function(sets)), rtol=1e-9)
    assert (parts[is_positive].argmax(axis=1) == 0).all()
    assert table["evidence_against"].to_pylist() == [
        "none" if label == "witness" else "witness" for label in rare.predict(sets)
    ]
