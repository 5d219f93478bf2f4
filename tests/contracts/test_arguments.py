"""Numbers without measure and files that never end are refused in words, at once."""

import contextlib
import os
import signal
import typing

import numpy as np
import pyarrow as pa
import pytest
from paper import paper_regressor
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.data.reader import ParquetSets

REQUIRED = {
    "fit": ("t.csv", "m"),
    "predict": ("m", "t.csv", "o"),
    "export": ("m", "o.onnx"),
    "explain": ("m", "t.csv", "--set", "0"),
    "lens": ("t.csv",),
    "heads": ("c",),
    "reproduce": (),
    "theory": (),
    "explore": (),
}


def integer_options():
    """(command, option, its settings) of all options that are whole numbers."""
    found = []
    for command in app.registered_commands:
        function = command.callback
        hints = typing.get_type_hints(function, include_extras=True)
        hints.pop("return")
        for name, hint in hints.items():
            kind, settings = typing.get_args(hint)
            if kind is int or int in typing.get_args(kind):
                flags = [flag for flag in settings.param_decls or () if flag.startswith("--")]
                option = flags[0] if flags else f"--{name.replace('_', '-')}"
                found.append((command.name or function.__name__, option, settings))
    return found


def refusal(*arguments):
    result = CliRunner().invoke(
        app, [str(argument) for argument in arguments], env={"COLUMNS": "300"}
    )
    assert isinstance(result.exception, SystemExit), (result.output, result.exception)
    assert result.exit_code == 2, result.output
    return result.output


def test_all_commands_are_known_here():
    assert {
        command.name or command.callback.__name__ for command in app.registered_commands
    } == set(REQUIRED)
    assert len(integer_options()) >= 10


def option_name(value):
    """Names of commands and options; their settings print with an address in memory."""
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("command", "option", "settings"), integer_options(), ids=option_name)
def test_whole_numbers_have_bounds(command, option, settings):
    assert settings.min is not None
    assert settings.max is not None
    assert settings.max < 2**63
    for value in (10**20, -(10**20), settings.max + 1, settings.min - 1):
        said = refusal(command, *REQUIRED[command], option, value)
        assert option in said
    assert option in refusal(command, *REQUIRED[command], option, "9" * 5000)


@pytest.mark.parametrize("value", ["99999999999999999999", "9" * 5000, "-1"])
def test_numbers_that_are_read_from_text_have_bounds(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sets = kh.targets.sphere_sets(20, n_keys=2, dim=2, seed=0)
    kh.data.write_parquet("t.parquet", [(sets, sets.query[:, 0])])
    fitted = paper_regressor(2, alpha=1.0, random_state=0)
    kh.save(fitted.fit(sets, sets.query[:, 0]), "m")
    assert "--n-heads must be" in refusal("fit", "t.parquet", "n", "--n-heads", value)
    assert "--n-heads must be" in refusal("theory", "--n-heads", value)
    assert "--set must be" in refusal("explain", "m", "t.parquet", "--set", value)


def test_a_batch_of_more_sets_than_can_be_counted_is_refused():
    table = {"set": [0, 1], "x": [1.0, 2.0]}
    for size in (2**63, 10**20, 10**5000):
        with pytest.raises(ValueError, match="`batch_size` must be at most"):
            ParquetSets(pa.table(table), batch_size=size)
    batches = list(ParquetSets(pa.table(table), batch_size=2**63 - 1))
    assert np.array_equal(batches[0].sets.tokens, [[1.0], [2.0]])


@contextlib.contextmanager
def at_once():
    """An error where something waits for ever: here, for a minute."""

    def stop(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def pipes(tmp_path, monkeypatch):
    """Named pipes that nobody writes to, under names that each promise a file."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes on this system")
    monkeypatch.chdir(tmp_path)
    sets = kh.targets.sphere_sets(20, n_keys=2, dim=2, seed=0)
    kh.data.write_parquet("t.parquet", [(sets, sets.query[:, 0])])
    fitted = paper_regressor(2, alpha=1.0, random_state=0)
    kh.save(fitted.fit(sets, sets.query[:, 0]), "m")
    for name in ("p", "p.csv", "p.parquet", "p.arrow", "p.npz", "p.ts", "p.safetensors"):
        os.mkfifo(name)
    (tmp_path / "folder").mkdir()
    os.mkfifo("folder/a.parquet")
    (tmp_path / "checkpoint").mkdir()
    os.mkfifo("checkpoint/model.safetensors")


TABLES = ["p.csv", "p.parquet", "p.arrow", "p.npz", "p.ts", "folder"]
CASES = [
    ("predict", "p", "t.parquet", "o"),
    ("export", "p", "o.onnx"),
    ("explain", "p", "t.parquet", "--set", "0"),
    *(("fit", table, "n") for table in TABLES),
    *(("lens", table, "--no-report") for table in TABLES),
    *(("predict", "m", table, "o") for table in TABLES),
    *(("explain", "m", table, "--set", "0") for table in TABLES),
    *((*("fit", "t.parquet", "n", "--tokens"), table) for table in TABLES[:4]),
    ("heads", "p.safetensors"),
    ("heads", "checkpoint"),
    ("fit", "t.parquet", "p", "--overwrite"),
    ("predict", "m", "t.parquet", "p", "--overwrite"),
]


def test_a_named_pipe_is_refused_at_once(pipes):
    for case in CASES:
        with at_once():
            said = refusal(*case)
        assert "error: " in said, case
    for case in (*CASES[:3], ("fit", "p.csv", "n"), ("fit", "p.ts", "n")):
        assert "must be an ordinary file: it is a named pipe" in refusal(*case), case
    with (
        at_once(),
        pytest.raises(ValueError, match="'p' must be an ordinary file: it is a named pipe"),
    ):
        kh.load("p")


def test_a_device_is_no_model(pipes):
    assert "must be an ordinary file: it is a device" in refusal(
        "predict", "/dev/null", "t.parquet", "o"
    )
