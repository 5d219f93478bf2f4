"""`keyhole predict`: Parquet to Parquet, interrupted and resumed, never half-written."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli import app
from keyhole.sources import write_parquet

runner = CliRunner()


@pytest.fixture
def sets(seed):
    return kh.targets.sphere_sets(90, n_keys=4, dim=3, seed=seed)


@pytest.fixture
def files(sets, tmp_path, monkeypatch):
    """An input of four row groups, and a model that `kh.load` finds."""
    write_parquet(tmp_path / "in.parquet", [sets], row_group_size=25, extra={"id": np.arange(90) + 1000})
    (tmp_path / "model").write_text("a model")
    model = kh.AttentionRegressor(10, random_state=0).fit(sets, sets.query[:, 0])
    monkeypatch.setattr(kh, "load", lambda _: model, raising=False)
    return model, tmp_path


def invoke(folder, *options, code=0):
    arguments = [str(folder / name) for name in ("model", "in.parquet", "out.parquet")]
    result = runner.invoke(app, ["predict", *arguments, *options])
    assert result.exit_code == code, result.output
    return result


def test_predictions_follow_the_rows(files, sets):
    model, folder = files
    result = invoke(folder, "--id", "id", "--batch-size", "7")
    table = pq.read_table(folder / "out.parquet")
    np.testing.assert_array_equal(table["prediction"], model.predict(sets))
    assert table["id"].to_pylist() == list(range(1000, 1090))
    assert "90 predictions" in result.output
    assert "row groups" not in result.output  # no bar where there is no terminal
    assert not (folder / "out.parquet.parts").exists()


def test_an_interrupted_run_goes_on(files, sets, monkeypatch):
    model, folder = files
    calls = []
    plain = type(model).predict

    def failing(self, batch):
        calls.append(len(batch))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, batch)

    monkeypatch.setattr(type(model), "predict", failing)
    result = invoke(folder, code=130)
    assert "run the same command to go on" in result.stderr
    assert not (folder / "out.parquet").exists()
    invoke(folder)
    assert calls == [25, 25, 25, 25, 15], "two row groups, the interrupted one, and the two that were left"
    np.testing.assert_array_equal(pq.read_table(folder / "out.parquet")["prediction"], plain(model, sets))


def test_an_existing_file_is_kept_unless_told(files):
    _, folder = files
    (folder / "out.parquet").write_text("precious")
    assert "--overwrite" in invoke(folder, code=2).stderr
    assert (folder / "out.parquet").read_text() == "precious"
    invoke(folder, "--overwrite")
    assert pq.read_table(folder / "out.parquet").num_rows == 90


def test_parts_of_another_model_are_not_mixed_in(files, monkeypatch):
    model, folder = files
    monkeypatch.setattr(type(model), "predict", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    invoke(folder, code=130)
    monkeypatch.undo()
    monkeypatch.setattr(kh, "load", lambda _: model, raising=False)
    (folder / "model").write_text("another model")
    assert "model changed since" in invoke(folder, code=2).stderr
    invoke(folder, "--overwrite")


def test_classes_have_probabilities(files, sets, monkeypatch):
    _, folder = files
    label = np.where(sets.query[:, 0] > 0, "up", "down")
    model = kh.AttentionClassifier(10, random_state=0).fit(sets, label)
    assert "--proba needs a classifier" in invoke(folder, "--proba", code=2).stderr
    monkeypatch.setattr(kh, "load", lambda _: model, raising=False)
    invoke(folder, "--proba")
    table = pq.read_table(folder / "out.parquet")
    assert table.schema.names == ["prediction", "probability_down", "probability_up"]
    assert table["prediction"].to_pylist() == model.predict(sets).tolist()


def test_slips_are_refused(files):
    _, folder = files
    assert "no column 'bags'" in invoke(folder, "--keys", "bags", code=2).stderr
    assert "no column 'name'" in invoke(folder, "--id", "name", code=2).stderr
