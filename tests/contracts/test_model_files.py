"""Model files of earlier versions load, and predict what they predicted when they were saved.

`tests/fixtures/models-VERSION/` holds files that keyhole VERSION wrote; `write_models.py` beside
it says what is in them. They are never written anew: what a user has saved must go on working.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

import keyhole as kh
from keyhole import packing
from keyhole.cli._app import app
from keyhole.models import read_model

FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = sorted(FIXTURES.glob("models-*/*.keyhole"))
STREAMS = [path for path in FILES if path.stem.startswith("stream-")]
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
"""Largest error allowed, as a share of the largest number of a result."""


def name_of(path):
    return f"{path.parent.name}/{path.stem}"


def read_samples(arrays, prefix=""):
    """The samples that `write_models.sample_arrays` stored."""
    parts = {
        name: arrays[prefix + name]
        for name in ("keys", "lengths", "query", "extras", "counts")
        if prefix + name in arrays
    }
    keys = np.split(parts["keys"], np.cumsum(parts["lengths"])[:-1])
    sets = kh.SetBatch(keys, parts.get("query"))
    if "counts" in parts:
        return kh.SetGroups(sets, parts["counts"], parts.get("extras"))
    return sets.with_extras(parts.get("extras"))


def result_of(model, method, samples):
    """What a method returns, in the form in which the file beside the model holds it."""
    if method == "hop_weights":
        hops = model.hop_weights(samples)
        return np.concatenate([weights.ravel() for hop in hops for weights in hop])
    if method in ("predict_interval", "predict_set"):
        return getattr(model, method)(samples, 0.8)
    result = getattr(model, method)(samples)
    if isinstance(result, list):
        return np.concatenate(result)
    return result


def assert_same(result, expected, tolerance):
    assert result.shape == expected.shape
    if expected.dtype.kind == "f":
        allowed = tolerance * np.abs(expected).max()
        np.testing.assert_allclose(result, expected, rtol=0, atol=allowed)
    else:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_model_predicts_what_it_predicted_when_it_was_saved(path):
    model = kh.load(path)
    arrays = np.load(path.with_suffix(".npz"))
    samples = read_samples(arrays)
    methods = [name.removeprefix("expected_") for name in arrays if name.startswith("expected_")]
    assert methods
    for method in methods:
        result = result_of(model, method, samples)
        assert_same(result, arrays[f"expected_{method}"], TOLERANCE[model.dtype])


@pytest.mark.parametrize("path", STREAMS, ids=name_of)
def test_a_stream_goes_on_after_loading(path):
    model = kh.load(path)
    arrays = np.load(path.with_suffix(".npz"))
    if path.stem == "stream-predict":
        samples = read_samples(arrays)
        with pytest.raises(ValueError, match=r"saved with keep='predict'.*keep='all'"):
            model.partial_fit(samples, np.zeros(len(samples)))
        return
    model.partial_fit(read_samples(arrays, "more_"), arrays["more_y"])
    result = model.predict(read_samples(arrays))
    assert_same(result, arrays["after_predict"], TOLERANCE[model.dtype])


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_loaded_model_can_be_saved_again(path, tmp_path):
    model = kh.load(path)
    kh.save(model, tmp_path / "again.keyhole")
    again = kh.load(tmp_path / "again.keyhole")
    samples = read_samples(np.load(path.with_suffix(".npz")))
    method = "transform" if hasattr(model, "transform") else "predict"
    before = result_of(model, method, samples)
    np.testing.assert_array_equal(result_of(again, method, samples), before)


@pytest.mark.parametrize("folder", sorted(FIXTURES.glob("models-*")), ids=lambda path: path.name)
def test_a_model_of_a_table_still_reads_tables(folder, tmp_path):
    expected = np.load(folder / "table.npz")
    saved = read_model(folder / "table.keyhole")
    table = saved.schema.read(folder / "table.csv")
    np.testing.assert_array_equal(table.sets.tokens, expected["keys"])
    np.testing.assert_array_equal(table.sets.lengths, expected["lengths"])

    # and so does the command
    files = [folder / "table.keyhole", folder / "table.csv", tmp_path / "out.parquet"]
    result = CliRunner().invoke(app, ["predict", *map(str, files)])
    assert result.exit_code == 0, result.output
    predictions = pq.read_table(tmp_path / "out.parquet")["prediction"].to_numpy()
    assert_same(predictions, expected["expected_predict"], TOLERANCE["float64"])


def test_every_estimator_is_among_the_files_which_are_small():
    kinds = {type(kh.load(path)).__name__ for path in FILES}
    assert kinds == {
        "AttentionRegressor",
        "AttentionClassifier",
        "AttentionFeatures",
        "NormBallRegressor",
        "NormBallClassifier",
    }
    for folder in FIXTURES.glob("models-*"):
        assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000


def test_a_prediction_one_part_in_a_billion_off_would_be_seen():
    path = FIXTURES / "models-0.1.0" / "regressor-default.keyhole"
    arrays = np.load(path.with_suffix(".npz"))
    expected = arrays["expected_predict"]
    off = expected + 1e-9 * np.abs(expected).max()
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same(off, expected, TOLERANCE["float64"])


def rewritten(path, target, *, change, version=None):
    """The same file with its description changed, and its digest made anew."""
    with safe_open(str(path), framework="numpy") as file:
        metadata = dict(file.metadata())
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    document = json.loads(metadata["document"])
    change(document)
    metadata["document"] = json.dumps(document)
    metadata["version"] = version or metadata["version"]
    metadata["sha256"] = packing._digest(metadata["document"], arrays)
    save_file(arrays, target, metadata)
    return target


@pytest.fixture
def model_file(tmp_path):
    sets = kh.targets.sphere_sets(20, n_keys=2, dim=2, seed=0)
    model = kh.AttentionRegressor(2, alpha=1.0, random_state=0).fit(sets, sets.query[:, 0])
    kh.save(model, tmp_path / "model.keyhole")
    return tmp_path / "model.keyhole"


def test_a_file_of_a_newer_form_names_the_keyhole_to_install(model_file, tmp_path):
    newer = rewritten(
        model_file,
        tmp_path / "newer.keyhole",
        change=lambda document: document.update(keyhole="9.1.0"),
        version="7",
    )
    with pytest.raises(ValueError, match=r"has version '7', written by keyhole 9\.1\.0\. Install"):
        kh.load(newer)


def test_a_newer_setting_names_the_keyhole_to_install(model_file, tmp_path):
    """Its form is known, what it says is not: that is no damage."""

    def change(document):
        document["keyhole"] = "9.1.0"
        document["parameters"]["of_the_future"] = 1

    newer = rewritten(model_file, tmp_path / "newer.keyhole", change=change)
    with pytest.raises(ValueError, match=r"written by keyhole 9\.1\.0.*Install keyhole 9\.1\.0"):
        kh.load(newer)


@pytest.mark.parametrize("release", ["", "9", "9.1.0; rm", None, 9.1, "x" * 500, ["9.1.0"]])
def test_what_is_no_release_is_not_recommended(model_file, tmp_path, release):
    newer = rewritten(
        model_file,
        tmp_path / "newer.keyhole",
        change=lambda document: document.update(keyhole=release),
        version="7",
    )
    with pytest.raises(ValueError, match=r"Install a newer keyhole, or"):
        kh.load(newer)
