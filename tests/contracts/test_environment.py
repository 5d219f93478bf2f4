"""The environment: where nothing can be written, where text is ASCII, where a test machine lacks a package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import keyhole
from keyhole import _fused

NOWHERE = "/dev/null/home"
"""A folder that nobody can make, root included."""
PACKAGE = Path(keyhole.__file__).parent


def run(*command, **more):
    environment = {k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent), **more}
    return subprocess.run([sys.executable, *map(str, command)], env=environment, capture_output=True, timeout=120)


LOOPS = """
import numpy as np, keyhole as kh
import keyhole._fused.features, keyhole._fused.gram
for _ in range(2):
    print(kh.kernels.mlp_kernel(kh.SetBatch(np.ones((3, 2, 2)))).shape)
"""


def test_without_a_cache_loops_are_compiled_in_memory_and_one_line_says_so(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "keyhole", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "keyhole" / "_fused" / "__pycache__").write_text("")  # a file where the folder should be
    done = run("-c", LOOPS, HOME=NOWHERE, XDG_CACHE_HOME=NOWHERE, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == ["(3,", "3)"] * 2
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith("keyhole:")]
    assert len(lines) == 1
    assert "in memory" in lines[0]
    assert "NUMBA_CACHE_DIR" in lines[0]


def test_a_disk_that_fills_while_the_cache_is_written_stops_no_fit(capsys, monkeypatch):
    monkeypatch.setattr(_fused, "_SAID", set())
    for step in ("load", "save"):

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(f"numba.core.caching.IndexDataCacheFile.{step}", full)
    assert [_fused.cached_njit()(lambda x, k=k: x + k)(1) for k in range(2)] == [1, 2]
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_without_beartype_tests_run_and_shapes_go_unchecked():
    """A machine with a GPU may lack what only tests need."""
    one = f"{Path(__file__).parents[1]}/units/test_notation.py"
    hidden = f"import sys; sys.modules['beartype'] = None; import pytest; sys.exit(pytest.main(['--co', {one!r}]))"
    done = run("-c", hidden)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert "shapes are not checked" in done.stdout.decode()


def test_an_ascii_terminal_is_shown_numbers_of_what_it_lacks():
    main = "import sys; from keyhole.cli import main; sys.argv = ['keyhole', *sys.argv[1:]]; main()"
    ascii_only = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for arguments in (("theory", "--help"), ("theory", "--dim", "4"), ("theory", "--json", "--dim", "4")):
        done = run("-c", main, *arguments, **ascii_only)
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.isascii()
    assert json.loads(done.stdout)["settings"]["dim"] == 4
