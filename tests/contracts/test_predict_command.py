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
def files(sets, tmp_path):
    """An input of four row groups, and a model."""
    write_parquet(tmp_path / "in.parquet", [sets], row_group_size=25, extra={"id": np.arange(90) + 1000})
    model = kh.AttentionRegressor(10, random_state=0).fit(sets, sets.query[:, 0])
    kh.save(model, tmp_path / "model")
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


def test_parts_of_another_model_are_not_mixed_in(files, sets, monkeypatch):
    model, folder = files
    monkeypatch.setattr(type(model), "predict", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    invoke(folder, code=130)
    monkeypatch.undo()
    other = kh.AttentionRegressor(11, random_state=0).fit(sets, sets.query[:, 0])
    kh.save(other, folder / "model", overwrite=True)
    assert "model changed since" in invoke(folder, code=2).stderr
    invoke(folder, "--overwrite")


def test_classes_have_probabilities(files, sets):
    _, folder = files
    label = np.where(sets.query[:, 0] > 0, "up", "down")
    model = kh.AttentionClassifier(10, random_state=0).fit(sets, label)
    assert "--proba needs a classifier" in invoke(folder, "--proba", code=2).stderr
    kh.save(model, folder / "model", overwrite=True)
    invoke(folder, "--proba")
    table = pq.read_table(folder / "out.parquet")
    assert table.schema.names == ["prediction", "probability_down", "probability_up"]
    assert table["prediction"].to_pylist() == model.predict(sets).tolist()


def test_slips_are_refused(files):
    _, folder = files
    assert "no column 'bags'" in invoke(folder, "--keys", "bags", code=2).stderr
    assert "no column 'name'" in invoke(folder, "--id", "name", code=2).stderr


def test_sets_unlike_those_of_the_fit_are_refused(files, seed):
    _, folder = files
    write_parquet(folder / "in.parquet", [kh.targets.sphere_sets(5, n_keys=4, dim=2, seed=seed)])
    assert "tokens must have the 3 coordinates the model was fitted to: got 2" in invoke(folder, code=2).stderr


def test_from_one_row_per_token_to_predictions(tmp_path, rng):
    """`keyhole fit` remembers its columns, and `keyhole predict` reads the next table the same way."""
    rows = ["basket,a,b,price"]
    for i in range(60):
        price = rng.normal()
        rows += [f"{i},{rng.normal() + price},{rng.normal()},{price}" for _ in range(1 + i % 4)]
    (tmp_path / "in.csv").write_text("\n".join(rows) + "\n")
    arguments = ["--set", "basket", "--keys", "a,b", "--target", "price", "--heads", "20"]
    done = runner.invoke(app, ["fit", str(tmp_path / "in.csv"), str(tmp_path / "model"), *arguments])
    assert done.exit_code == 0, done.output
    done = runner.invoke(app, ["predict", *(str(tmp_path / n) for n in ("model", "in.csv", "out.parquet"))])
    assert done.exit_code == 0, done.output
    sets = kh.tables.read_table(tmp_path / "in.csv", set_id="basket", keys="a,b", target="price").sets
    np.testing.assert_array_equal(
        pq.read_table(tmp_path / "out.parquet")["prediction"], kh.load(tmp_path / "model").predict(sets)
    )
    done = runner.invoke(app, ["predict", *(str(tmp_path / n) for n in ("model", "missing.csv", "other.parquet"))])
    assert done.exit_code == 2
