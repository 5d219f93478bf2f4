"""`keyhole predict` writes what the name of the output says."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from paper import paper_classifier, paper_regressor
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.data.writer import write_parquet

runner = CliRunner()


@pytest.fixture
def sets(seed):
    return kh.targets.sphere_sets(30, n_keys=4, dim=3, seed=seed)


@pytest.fixture
def folder(sets, tmp_path):
    """An input of three row groups, with ids, and a model."""
    names = np.array([f'a, "{i}"' for i in range(30)])
    write_parquet(tmp_path / "in.parquet", [sets], row_group_size=11, extra={"name": names})
    kh.save(paper_regressor(5, random_state=0).fit(sets, sets.query[:, 0]), tmp_path / "model")
    return tmp_path


def predict(folder, out, *options, code=0):
    places = [str(folder / name) for name in ("model", "in.parquet", out)]
    result = runner.invoke(app, ["predict", *places, *options])
    assert result.exit_code == code, result.output
    return result


READERS = {
    "out.parquet": lambda path: pq.read_table(path).to_pandas(),
    "out.pq": lambda path: pq.read_table(path).to_pandas(),
    "out": lambda path: pq.read_table(path).to_pandas(),
    "out.arrow": lambda path: pa.ipc.open_file(path).read_all().to_pandas(),
    "out.feather": lambda path: pa.ipc.open_file(path).read_all().to_pandas(),
    "out.csv": pd.read_csv,
    "out.tsv": lambda path: pd.read_csv(path, sep="\t"),
    "out.jsonl": lambda path: pd.read_json(path, lines=True),
    "out.NDJSON": lambda path: pd.read_json(path, lines=True),
}


@pytest.mark.parametrize("name", READERS)
def test_the_ending_says_what_is_written(folder, sets, name):
    predict(folder, name, "--id", "name", "--explain")
    table = READERS[name](folder / name)
    model = kh.load(folder / "model")
    np.testing.assert_allclose(table["prediction"], model.predict(sets), rtol=1e-9)
    assert table["name"].tolist() == [f'a, "{i}"' for i in range(30)]
    evidence = table["evidence"]
    if isinstance(evidence[0], str):
        evidence = evidence.map(json.loads)
    np.testing.assert_allclose([sum(part) for part in evidence], model.predict(sets), rtol=1e-9)


@pytest.mark.parametrize("name", ["out.xlsx", "out.json", "out.csv.gz", "out.txt"])
def test_other_endings_are_refused_before_any_work(folder, name):
    message = predict(folder, name, code=2).stderr
    assert "one of .parquet" in message
    assert name in message
    assert not (folder / name).exists()
    assert not (folder / f"{name}.parts").exists()


def test_json_has_no_infinity_and_novelty_is_counted_in_every_format(folder, sets):
    """At coverage 0.99 thirty samples are too few: both ends are infinite."""
    far = kh.SetBatch(50 * sets.tokens.reshape(30, 4, 3), sets.query)
    write_parquet(folder / "in.parquet", [far])
    for name in ("out.jsonl", "out.csv", "out.arrow"):
        output = predict(folder, name, "--interval", "0.99").output
        assert "warning: 30 of 30 sets are more novel" in output
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [(row["lower"], row["upper"]) for row in rows] == [(None, None)] * 30
    assert np.isinf(pd.read_csv(folder / "out.csv")["upper"]).all()


def test_labels_are_lists_in_json_and_json_in_csv(folder, sets):
    labels = np.where(sets.query[:, 0] > 0, "up", "down")
    model = paper_classifier(5, random_state=0).fit(sets, labels)
    kh.save(model, folder / "model", overwrite=True)
    expected = [model.classes_[row].tolist() for row in model.predict_set(sets, 0.9)]
    predict(folder, "out.jsonl", "--interval", "0.9")
    predict(folder, "out.csv", "--interval", "0.9")
    assert pd.read_json(folder / "out.jsonl", lines=True)["labels"].tolist() == expected
    assert pd.read_csv(folder / "out.csv")["labels"].map(json.loads).tolist() == expected


@pytest.fixture
def shop(tmp_path):
    """Users and what they bought; the last of the new ones bought nothing."""
    bought = pd.DataFrame({"user": [0, 0, 1, 2, 2, 3, 4], "price": [1.0, 2, 3, 4, 5, 6, 7]})
    users = pd.DataFrame({"user": range(5), "target": [3.0, 3, 9, 6, 7]})
    data = kh.read_table(users, tokens=bought, set_id="user")
    model = paper_regressor(5, alpha=0.1, random_state=0)
    kh.save(model.fit(data.sets, data.target), tmp_path / "model", schema=data.schema)
    bought.to_csv(tmp_path / "bought.csv", index=False)
    pd.DataFrame({"user": [0, 5]}).to_csv(tmp_path / "in.csv", index=False)
    return tmp_path


def test_a_sample_without_tokens_is_scored_as_one_token_of_zeros(shop):
    model, schema = kh.load(shop / "model", return_schema=True)
    table, tokens = pd.read_csv(shop / "in.csv"), pd.read_csv(shop / "bought.csv")
    with pytest.raises(ValueError, match="token of zeros with missing='drop'"):
        schema.read(table, tokens=tokens)
    data = schema.read(table, tokens=tokens, missing="drop")
    np.testing.assert_array_equal(data.sets.tokens.ravel(), [1.0, 2.0, 0.0])
    places = [str(shop / name) for name in ("model", "in.csv", "out.csv")]
    options = ["--tokens", str(shop / "bought.csv"), "--missing", "drop"]
    result = runner.invoke(app, ["predict", *places, *options])
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose(
        pd.read_csv(shop / "out.csv")["prediction"], model.predict(data.sets), rtol=1e-9
    )


def test_explain_takes_the_options_that_messages_recommend(shop):
    """The second sample has no tokens."""
    places = [str(shop / name) for name in ("model", "in.csv")]
    options = ["--tokens", str(shop / "bought.csv"), "--set", "5"]
    refused = runner.invoke(app, ["explain", *places, *options])
    assert refused.exit_code == 2
    assert "--missing drop" in refused.output
    done = runner.invoke(app, ["explain", *places, *options, "--missing", "drop"])
    assert done.exit_code == 0, done.output


def test_an_empty_list_of_tokens_is_scored_too():
    table = pd.DataFrame({"keys": [[[1.0, 2.0]], []], "y": [0.0, 1.0]})
    schema = kh.read_table(table[:1]).schema
    with pytest.raises(ValueError, match="token of zeros with missing='drop'"):
        schema.read(table)
    np.testing.assert_array_equal(
        schema.read(table, missing="drop").sets.tokens, [[1.0, 2.0], [0.0, 0.0]]
    )


def test_a_column_of_missing_values_only_is_missing_and_not_of_another_kind():
    """One row of a service, say: nothing in it tells of which kind the column is."""
    table = pd.DataFrame({"set": [0, 0, 1], "x": [1.0, 2.0, 3.0], "y": [0.0, 0.0, 1.0]})
    row = pa.table({"set": [7], "x": [None]})
    schema = kh.read_table(table).schema
    with pytest.raises(ValueError, match="'x' is missing in row 0"):
        schema.read(row)
    assert schema.read(row, missing="drop").sets.tokens.tolist() == [[0.0]]
    with_mean = kh.read_table(table, missing="impute").schema
    assert with_mean.read(row).sets.tokens.tolist() == [[2.0]]
    # a schema that was learned without means says so, and recommends no more what was tried
    with pytest.raises(ValueError, match="too, so that the mean is known"):
        schema.read(row, missing="impute")
