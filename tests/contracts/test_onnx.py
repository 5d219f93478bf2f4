"""`keyhole export`: a graph that onnxruntime runs, with the outputs of the model."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from exports import FINITE, FIXTURES, assert_close, padded, scores_of, stored_samples
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
    model = kh.load(FIXTURES / f"{name}.keyhole")
    sets = stored_samples(name)
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


def test_what_cannot_be_exported_is_refused(ragged, tmp_path):
    y = ragged.lengths.astype(float)
    kh.save(paper_regressor(3, alpha=0.1).fit(ragged, y), tmp_path / "model")
    assert "ends in .onnx" in export(tmp_path / "model", tmp_path / "out.pt", code=2)
    (tmp_path / "out.onnx").write_text("precious")
    assert "--overwrite" in export(tmp_path / "model", tmp_path / "out.onnx", code=2)
    assert (tmp_path / "out.onnx").read_text() == "precious"
    export(tmp_path / "model", tmp_path / "out.onnx", "--overwrite")
    exact = paper_regressor(float("inf"), alpha=0.1).fit(ragged, y)
    with pytest.raises(ValueError, match="finitely many heads"):
        save_onnx(exact, tmp_path / "exact.onnx")
    with pytest.raises(TypeError, match="no layer that predicts"):
        to_onnx(kh.AttentionFeatures(2).fit(ragged))
