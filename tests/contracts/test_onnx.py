"""`keyhole export`: a graph that onnxruntime runs, with the outputs of the model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from exported import CONFIGURATIONS, QUICK, Configuration, layer, outputs_of, padded
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.export import save_onnx, to_onnx

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

EXAMPLE = Path(__file__).parents[2] / "examples" / "score_onnx.py"

# an export takes some seconds: one of every kind of graph in every run
SLOW = [
    pytest.param(name, marks=[] if name in QUICK[1:4:2] else pytest.mark.slow)
    for name in CONFIGURATIONS
]


def run(document, samples):
    """Outputs of a graph, by their names."""
    session = onnxruntime.InferenceSession(
        document.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    available = padded(samples)
    inputs = {}
    for node in session.get_inputs():
        values = available[node.name]
        inputs[node.name] = values if node.name == "mask" else values.astype(np.float32)
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
@pytest.mark.parametrize("name", SLOW)
def test_a_graph_has_the_outputs_of_its_model(name):
    """At batch and set sizes unlike those that were traced."""
    configuration = CONFIGURATIONS[name]
    model = configuration.fitted()
    document = to_onnx(model)
    batches = configuration.new_samples()
    spread = outputs_of(model, batches[0]).std()
    for samples in batches:
        outputs = run(document, samples)
        expected = outputs_of(model, samples)
        if not hasattr(model, "classes_"):
            assert list(outputs) == ["prediction"]
            np.testing.assert_allclose(outputs["prediction"], expected, rtol=0, atol=5e-5 * spread)
            continue
        assert list(outputs) == ["scores", "probabilities"]
        np.testing.assert_allclose(outputs["scores"], expected, rtol=0, atol=5e-5 * spread)
        np.testing.assert_allclose(
            outputs["probabilities"], model.predict_proba(samples), rtol=0, atol=5e-5
        )


def classifier():
    return Configuration(target="two labels", parameters=layer(random_state=0)).fitted()


def test_the_command_writes_a_graph_that_a_script_without_keyhole_runs(tmp_path):
    model = classifier()
    kh.save(model, tmp_path / "model.keyhole")
    out = tmp_path / "model.onnx"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "model.keyhole"), str(out)])
    assert done.exit_code == 0, done.output
    assert "keys (n, N, 3)" in done.output
    assert "mask (n, N)" in done.output

    import onnx

    (entry,) = onnx.load(out).metadata_props
    assert json.loads(entry.value) == ["low", "middle"]

    sets = Configuration().samples(20, 5, seed=2)
    np.savez(tmp_path / "sets.npz", X=sets.tokens, ptr=sets.offsets)
    script = subprocess.run(
        [sys.executable, str(EXAMPLE), str(out), str(tmp_path / "sets.npz")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "probabilities" in script.stdout


def test_the_command_names_the_columns(tmp_path):
    rng = np.random.default_rng(0)
    table = pd.DataFrame(
        {"set": np.repeat(np.arange(30), 2), "a": rng.normal(size=60), "b": rng.normal(size=60)}
    )
    table["y"] = table.groupby("set")["a"].transform("mean")
    data = kh.read_table(table)
    model = kh.AttentionRegressor(**layer(random_state=0)).fit(data.sets, data.target)
    kh.save(model, tmp_path / "model.keyhole", schema=data.schema)
    done = CliRunner().invoke(
        app, ["export", str(tmp_path / "model.keyhole"), str(tmp_path / "model.onnx")]
    )
    assert "keys (n, N, 2): a, b" in done.output


def test_a_file_is_replaced_only_if_asked(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(FileExistsError, match="not replaced unless asked"):
        save_onnx(classifier(), tmp_path / "model.onnx")
    with pytest.raises(ValueError, match=r"must end in \.onnx"):
        save_onnx(classifier(), tmp_path / "model")


def test_a_model_without_a_graph_is_refused_before_any_work(tmp_path):
    parameters = layer(n_heads=np.inf, heads=kh.GaussianHeads(mean=1.0))
    model = Configuration(query=3, parameters=parameters).fitted()
    kh.save(model, tmp_path / "model.keyhole")
    out = tmp_path / "model.onnx"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "model.keyhole"), str(out)])
    assert done.exit_code != 0
    assert "n_heads=" in " ".join(done.output.split())
    assert not out.exists()
