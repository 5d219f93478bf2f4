"""`keyhole export`: a graph that onnxruntime runs, with the outputs of the model."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from exports import (
    FINITE,
    assert_close,
    finite_model,
    padded,
    scores_of,
    selecting_model,
)
from paper import paper_classifier, paper_regressor
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.export import save_onnx, to_onnx

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


EXAMPLE = Path(__file__).parents[2] / "examples" / "score_onnx.py"


def run(model, sets):
    """Outputs of the graph of a model, by their names."""
    session = onnxruntime.InferenceSession(
        to_onnx(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    keys, mask = padded(sets)
    available = {"keys": keys, "query": sets.query, "extras": sets.extras}
    inputs = {"mask": mask}
    for node in session.get_inputs():
        if node.name != "mask":
            inputs[node.name] = np.asarray(available[node.name]).astype(model.dtype)
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


@pytest.mark.parametrize("name", FINITE)
def test_a_graph_has_the_outputs_of_its_model(name):
    model, sets = finite_model(name)
    tolerance = 1e-12
    if model.dtype == "float32":
        tolerance = 1e-5
    elif model.tokens_.hops:
        tolerance = 1e-6
    outputs = run(model, sets)
    if not hasattr(model, "classes_"):
        assert list(outputs) == ["prediction"]
        assert_close(outputs["prediction"], model.predict(sets), tolerance)
        return
    assert_close(outputs["scores"], scores_of(model, sets), tolerance)
    assert outputs["label"].tolist() == model.predict(sets).tolist()
    if hasattr(model, "predict_proba"):
        assert_close(outputs["probabilities"], model.predict_proba(sets), 10 * tolerance)


@pytest.fixture
def ragged(seed):
    rng = np.random.default_rng([32, seed])
    keys = [rng.normal(size=(rng.integers(1, 6), 2)) for _ in range(30)]
    return kh.SetBatch(keys)


@pytest.mark.parametrize("activation", ["relu", "linear", "square", "step", "exp", "softmax"])
def test_every_activation(ragged, activation):
    model = kh.AttentionRegressor(
        4, kh.GaussianHeads(), 0.1, activation, scaling="sphere", query="mean", random_state=0
    ).fit(ragged, ragged.lengths.astype(float))
    assert_close(run(model, ragged)["prediction"], model.predict(ragged), 1e-12)


@pytest.fixture
def sets_with_query(seed):
    """Of 1 to 8 keys, with queries of another dimension and extras."""
    rng = np.random.default_rng([33, seed])
    keys = [rng.normal(size=(rng.integers(1, 9), 3)) for _ in range(40)]
    return kh.SetBatch(keys, rng.normal(size=(40, 2)), rng.normal(size=(40, 2)))


@pytest.mark.parametrize("n_keys", [1, 3, 20])
def test_a_graph_selects_the_keys_that_the_model_selects(sets_with_query, n_keys):
    """Some sets have fewer keys than are kept; 20 is more than any has."""
    model = selecting_model(sets_with_query, n_keys)
    assert_close(run(model, sets_with_query)["prediction"], model.predict(sets_with_query), 1e-12)


@pytest.mark.parametrize("pooling", ["mean", "mean+size", "mean+statistics", "sum"])
@pytest.mark.parametrize("query", ["given", "mean", "each"])
def test_whatever_the_layer_makes_of_the_selected_keys(sets_with_query, query, pooling):
    """Sizes and statistics are those of the selected keys; a query is always judged by."""
    model = selecting_model(sets_with_query, 3, query=query, pooling=pooling)
    assert_close(run(model, sets_with_query)["prediction"], model.predict(sets_with_query), 1e-11)


@pytest.mark.parametrize(("dim", "longest"), [(1, 6), (2, 2)])
def test_a_graph_breaks_ties_as_the_model_does(dim, longest, seed):
    """Keys of one coordinate are ±1 to the scoring layer; two keys are equally far from their mean.

    So the one key that is kept of each set is often chosen by its place.
    """
    rng = np.random.default_rng([34, seed])
    lengths = rng.integers(1, longest + 1, size=60)
    sets = kh.SetBatch([rng.normal(size=(length, dim)) for length in lengths])
    model = selecting_model(sets, 1)
    assert_close(run(model, sets)["prediction"], model.predict(sets), 1e-12)


def test_a_float32_graph_selects_keys_in_float64(sets_with_query):
    model = selecting_model(sets_with_query, 2, dtype="float32")
    assert_close(run(model, sets_with_query)["prediction"], model.predict(sets_with_query), 1e-5)


def test_a_classifier_with_automatic_keys(seed, monkeypatch):
    """Labels and probabilities of what `keys="auto"` has chosen, 8 keys of 33 to 40."""
    monkeypatch.setattr("keyhole.choose.improvement", lambda *_losses: (math.inf, 0.0))
    rng = np.random.default_rng([35, seed])
    labels = np.arange(60) % 2
    bags = [rng.normal(size=(rng.integers(33, 41), 4)) for _ in labels]
    for bag, label in zip(bags, labels, strict=True):
        bag[:2] += 3.0 * label
    model = kh.AttentionClassifier(16, kh.GaussianHeads(), activation="relu", random_state=0)
    model.set_params(query="given", pooling="mean", loss="squared_error").fit(bags, labels)
    assert model.key_selection_.n_keys == 8
    short = [bag[: 1 + i % 40] for i, bag in enumerate(bags)]
    outputs = run(model, kh.SetBatch(short))
    assert outputs["label"].tolist() == model.predict(short).tolist()
    assert_close(outputs["scores"], model.decision_function(short), 1e-11)
    assert_close(outputs["probabilities"], model.predict_proba(short), 1e-10)


@pytest.mark.parametrize("labels", [[False, True], [3, 7], ["ja", "nein"], [1.0, 2.0]])
def test_labels_of_every_kind(ragged, labels):
    y = np.array(labels)[(ragged.lengths > 2).astype(int)]
    model = paper_classifier(6, alpha=0.1, random_state=0).fit(ragged, y)
    outputs = run(model, ragged)
    assert outputs["label"].tolist() == model.predict(ragged).tolist()
    assert outputs["probabilities"].shape == (30, 2)


def test_the_graph_states_its_opset(ragged):
    model = paper_regressor(3, alpha=0.1, random_state=0).fit(ragged, ragged.lengths.astype(float))
    graph = to_onnx(model)
    assert [(entry.domain, entry.version) for entry in graph.opset_import] == [("", 17)]


def export(*arguments, code=0):
    result = CliRunner().invoke(app, ["export", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_and_a_scorer_without_keyhole(ragged, tmp_path):
    """The scorer runs where `import keyhole` fails."""
    model = paper_regressor(3, alpha=0.1, random_state=0).fit(ragged, ragged.lengths.astype(float))
    kh.save(model, tmp_path / "model.keyhole")
    path = tmp_path / "model.onnx"
    assert "opset 17" in export(tmp_path / "model.keyhole", path)
    np.savez(tmp_path / "sets.npz", X=ragged.tokens, ptr=ragged.offsets)
    code = (
        "import runpy, sys; sys.modules['keyhole'] = None; import numpy as np; "
        f"score = runpy.run_path({str(EXAMPLE)!r})['score']; "
        f"outputs = score({str(path)!r}, dict(np.load({str(tmp_path / 'sets.npz')!r}))); "
        f"np.save({str(tmp_path / 'out.npy')!r}, outputs['prediction'])"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert_close(np.load(tmp_path / "out.npy"), model.predict(ragged), 1e-12)


@pytest.fixture
def shop(seed):
    """Samples with a city and an age, and what they bought."""
    rng = np.random.default_rng([37, seed])
    people = pd.DataFrame(
        {
            "user": range(30),
            "age": rng.integers(20, 70, 30),
            "city": ["Bonn", "Ulm"] * 15,
            "target": rng.normal(size=30),
        }
    )
    bought = pd.DataFrame(
        {
            "user": np.repeat(np.arange(30), 2),
            "price": rng.gamma(2, size=60),
            "kind": ["a", "b"] * 30,
        }
    )
    return people, bought


def test_the_command_says_which_number_stands_where(shop, tmp_path):
    people, bought = shop
    data = kh.read_table(
        people, tokens=bought, set_id="user", query=["city", "age"], extras=["age", "city"]
    )
    model = paper_regressor(3, alpha=0.1, random_state=0).fit(data.sets, data.target)
    kh.save(model, tmp_path / "model.keyhole", schema=data.schema)
    lines = export(tmp_path / "model.keyhole", tmp_path / "model.onnx").splitlines()
    assert lines[1:] == [
        "keys (samples, keys, 3): price, kind=a, kind=b",
        "mask (samples, keys)",
        "query (samples, 3): city=Bonn, city=Ulm, age",
        "extras (samples, 3): age, city=Bonn, city=Ulm",
    ]


def test_a_query_among_the_rows_of_keys_has_their_names():
    table = pd.DataFrame({"set": [0, 0, 1, 1], "role": ["query", "key"] * 2, "x": [1.0, 2, 3, 4]})
    schema = kh.read_table(table.assign(y=[0.0, 0.0, 1.0, 1.0])).schema
    assert schema.names_of("query") == schema.names == ("x",)
    assert schema.names_of("extras") == ()


def test_what_cannot_be_exported_is_refused(ragged, tmp_path):
    y = ragged.lengths.astype(float)
    kh.save(paper_regressor(3, alpha=0.1).fit(ragged, y), tmp_path / "model")
    assert "ends in .onnx: got 'out.pt'. Use 'out.onnx'" in export(
        tmp_path / "model", tmp_path / "out.pt", code=2
    )
    (tmp_path / "out.onnx").write_text("precious")
    assert "--overwrite" in export(tmp_path / "model", tmp_path / "out.onnx", code=2)
    assert (tmp_path / "out.onnx").read_text() == "precious"
    export(tmp_path / "model", tmp_path / "out.onnx", "--overwrite")
    exact = paper_regressor(float("inf"), alpha=0.1).fit(ragged, y)
    with pytest.raises(ValueError, match="finitely many heads"):
        save_onnx(exact, tmp_path / "exact.onnx")
    with pytest.raises(TypeError, match="no layer that predicts"):
        to_onnx(kh.AttentionFeatures(2).fit(ragged))
