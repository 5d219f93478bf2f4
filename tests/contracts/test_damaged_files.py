"""Commands given damaged files: they work, or say in a sentence why not, and leave nothing behind.

Every case takes a valid file and changes, cuts off, puts in or repeats some bytes. A command then
ends with exit code 0 and its output, or with exit code 2, a message and no output. Damaged
descriptions of models, with a digest that fits, are in tests/units/test_models.py.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paper import paper_regressor
from pyarrow import csv, parquet
from safetensors.numpy import save_file
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app

pytestmark = pytest.mark.filterwarnings("ignore")

LAYER = ("--n-heads", "4", "--heads", "zero-mean", "--scaling", "none", "--make-query", "given")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Valid files of every kind that a command reads."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 4, 12)
    owner = np.repeat(np.arange(12), lengths)
    table = pa.table(
        {
            "set": [f"s{i}" for i in owner],
            "x": rng.normal(size=len(owner)).round(3),
            "colour": rng.choice(["red", "blue"], len(owner)),
            "y": (owner % 5 + 0.25).astype(float),
        }
    )
    csv.write_csv(table, folder / "table.csv")
    parquet.write_table(table, folder / "table.parquet")
    data = kh.read_table(table, set_id="set", target="y")
    model = paper_regressor(4, alpha=1.0, random_state=0).fit(data.sets, data.target)
    kh.save(model, folder / "model.keyhole", schema=data.schema)
    weights = rng.normal(size=(8, 8)).astype(np.float32)
    names = ("q_proj", "k_proj")
    layers = {f"model.layers.0.self_attn.{name}.weight": weights for name in names}
    save_file(layers, folder / "checkpoint.safetensors")
    return folder


def damages():
    return st.tuples(
        st.sampled_from(["changed", "cut off", "inserted", "repeated"]),
        st.integers(0, 10**6),
        st.binary(min_size=1, max_size=6),
    )


def damaged(content: bytes, damage: tuple[str, int, bytes]) -> bytes:
    kind, place, piece = damage
    start = place % len(content)
    end = start + len(piece)
    return {
        "changed": content[:start] + piece + content[end:],
        "cut off": content[:start],
        "inserted": content[:start] + piece + content[start:],
        "repeated": content[:end] + content[start:],
    }[kind]


def check(folder: Path, name: str, damage: tuple[str, int, bytes], *command: str) -> int:
    """Run a command whose word DAMAGED is a damaged copy of a file, and OUT what it writes."""
    place = folder / f"damaged-{name}"
    place.write_bytes(damaged((folder / name).read_bytes(), damage))
    out = folder / f"out-{command[0]}{'.onnx' if command[0] == 'export' else '.csv'}"
    before = set(folder.iterdir()) - {out}
    words = {"DAMAGED": str(place), "OUT": str(out), "MODEL": str(folder / "model.keyhole")}
    words["TABLE"] = str(folder / "table.csv")
    result = CliRunner().invoke(app, [words.get(word, word) for word in command])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    if result.exit_code == 0:
        assert result.output
    else:
        assert result.exit_code == 2, result.output
        assert len(result.stderr) > 30
        assert not out.exists()
    assert set(folder.iterdir()) - {out} == before
    out.unlink(missing_ok=True)
    return result.exit_code


def few(count: int):
    quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=quiet,
    )


TARGET = ("--set", "set", "--target", "y")


@few(20)
@given(damage=damages())
def test_fit_of_a_damaged_csv_file(folder, damage):
    check(folder, "table.csv", damage, "fit", "DAMAGED", "OUT", *TARGET, *LAYER)


@few(20)
@given(damage=damages())
def test_fit_of_a_damaged_parquet_file(folder, damage):
    check(folder, "table.parquet", damage, "fit", "DAMAGED", "OUT", *TARGET, *LAYER)


@few(20)
@given(damage=damages())
def test_predict_for_a_damaged_table(folder, damage):
    check(folder, "table.csv", damage, "predict", "MODEL", "DAMAGED", "OUT")


@few(20)
@given(damage=damages())
def test_predict_by_a_damaged_model(folder, damage):
    check(folder, "model.keyhole", damage, "predict", "DAMAGED", "TABLE", "OUT")


@few(20)
@given(damage=damages())
def test_export_of_a_damaged_model(folder, damage):
    pytest.importorskip("onnx")
    check(folder, "model.keyhole", damage, "export", "DAMAGED", "OUT")


@few(20)
@given(damage=damages())
def test_heads_of_a_damaged_checkpoint(folder, damage):
    check(folder, "checkpoint.safetensors", damage, "heads", "DAMAGED", "--n-heads", "2")


@few(6)
@given(damage=damages())
def test_lens_of_a_damaged_table(folder, damage):
    check(folder, "table.csv", damage, "lens", "DAMAGED", *TARGET)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("table.csv", ("fit", "DAMAGED", "OUT", *TARGET, *LAYER)),
        ("table.csv", ("predict", "MODEL", "DAMAGED", "OUT")),
        ("model.keyhole", ("export", "DAMAGED", "OUT")),
        ("checkpoint.safetensors", ("heads", "DAMAGED", "--n-heads", "2")),
    ],
)
def test_files_that_are_whole_are_read(folder, name, command):
    nothing_changes = ("repeated", 10**6, b"")
    assert check(folder, name, nothing_changes, *command) == 0
    assert check(folder, name, ("cut off", 5, b""), *command) == 2
