"""The environment: nothing can be written, the disk is full, text is ASCII, the clock jumps, two
run at a time.

Each process costs a second to start, so one does as much as it can. What others fit is compared by
bits.
"""

import concurrent.futures
import hashlib
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jaxtyping
import numpy as np
import pyarrow.parquet as pq
import pytest
from paper import paper_regressor

import keyhole as kh
from keyhole import _compiled
from keyhole.data import write_parquet

NOWHERE = "/dev/null/home"
"""A folder that nobody can make, root included."""
PACKAGE = Path(kh.__file__).parent


def run(*command, **more):
    environment = {
        k: v for k, v in os.environ.items() if k not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
    }
    environment |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent), **more}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, timeout=120
    )


LOOPS = """
import numpy as np, keyhole as kh
import keyhole.attention.compiled_features, keyhole.attention.compiled_gram
for _ in range(2):
    print(kh.mlp_kernel(kh.SetBatch(np.ones((3, 2, 2)))).shape)
"""


def test_without_a_cache_loops_are_compiled_in_memory_and_one_line_says_so(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "keyhole", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "keyhole" / "attention" / "__pycache__").write_text(
        ""
    )  # a file where the folder should be
    done = run("-c", LOOPS, HOME=NOWHERE, XDG_CACHE_HOME=NOWHERE, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().split() == ["(3,", "3)"] * 2
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith("keyhole:")]
    assert len(lines) == 1
    assert "in memory" in lines[0]
    assert "NUMBA_CACHE_DIR" in lines[0]


def test_a_disk_that_fills_while_the_cache_is_written_stops_no_fit(capsys, monkeypatch):
    monkeypatch.setattr(_compiled, "_SAID", set())
    for step in ("load", "save"):

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(f"numba.core.caching.IndexDataCacheFile.{step}", full)
    assert [_compiled.cached_njit()(lambda x, k=k: x + k)(1) for k in range(2)] == [1, 2]
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_without_beartype_tests_run_and_shapes_go_unchecked():
    """A machine with a GPU may lack what only tests need."""
    one = f"{Path(__file__).parents[1]}/units/test_notation.py"
    hidden = (
        "import sys; sys.modules['beartype'] = None; import pytest; sys.exit(pytest.main(['--co', "
        f"{one!r}]))"
    )
    done = run("-c", hidden)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    assert "shapes are not checked" in done.stdout.decode()


def test_the_first_calls_of_a_function_have_their_shapes_checked():
    shapecheck = pytest.importorskip("shapecheck")

    @jaxtyping.jaxtyped(typechecker=shapecheck.checker)
    def rows(a: jaxtyping.Float[np.ndarray, "n d"], b: jaxtyping.Float[np.ndarray, " n"]) -> int:
        return len(a) + len(b)

    with pytest.raises(jaxtyping.TypeCheckError):
        rows(np.ones((3, 2)), np.ones(4))
    assert all(rows(np.ones((3, 2)), np.ones(3)) == 6 for _ in range(shapecheck.CHECKED_CALLS))
    assert rows(np.ones((3, 2)), np.ones(4)) == 7


def test_the_first_definitions_of_an_inner_function_have_their_shapes_checked():
    """It is defined anew by each call of the outer one, and a checker takes longer to make than
    most calls take.
    """
    shapecheck = pytest.importorskip("shapecheck")

    def outer():
        @jaxtyping.jaxtyped(typechecker=shapecheck.checker)
        def inner(a: jaxtyping.Float[np.ndarray, "n n"]) -> int:
            return len(a)

        return inner

    for _ in range(shapecheck.CHECKED_DEFINITIONS):
        with pytest.raises(jaxtyping.TypeCheckError):
            outer()(np.ones((3, 2)))
    assert outer()(np.ones((3, 2))) == 3


def test_the_first_objects_of_a_dataclass_have_their_fields_checked():
    shapecheck = pytest.importorskip("shapecheck")

    @jaxtyping.jaxtyped(typechecker=shapecheck.checker)
    @dataclass(frozen=True)
    class Square:
        sides: jaxtyping.Float[np.ndarray, "n n"]

    with pytest.raises(jaxtyping.TypeCheckError):
        Square(np.ones((3, 2)))
    for _ in range(shapecheck.CHECKED_CALLS):
        Square(np.ones((3, 3)))
    assert Square(np.ones((3, 2))).sides.shape == (3, 2)


FIT = """
import hashlib, sys
import numpy as np
import keyhole as kh
sets = kh.targets.sphere_sets(40, n_keys=3, dim=2, seed=5)
model = kh.AttentionRegressor(6, random_state=0).fit(sets, sets.query[:, 0])
numbers = model.predict(sets).tobytes() + model.held_out_predictions_.tobytes()
sys.stdout.write(hashlib.sha256(numbers).hexdigest() + "\\n")
"""


def fingerprint():
    """What `FIT` prints, made here."""
    sets = kh.targets.sphere_sets(40, n_keys=3, dim=2, seed=5)
    model = kh.AttentionRegressor(6, random_state=0).fit(sets, sets.query[:, 0])
    return hashlib.sha256(
        model.predict(sets).tobytes() + model.held_out_predictions_.tobytes()
    ).hexdigest()


MAIN = ("-c", "from keyhole.cli import main; main()")


def start(*command, **options):
    """Start a Python process that has no terminal, and nothing to read."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options["env"] = environment | options.pop("env", {})
    return subprocess.Popen([sys.executable, *map(str, command)], **pipes, **options)


def ended(process, *codes):
    """What a process said by the time it ended as it should: in sentences."""
    out, err = (stream.decode() for stream in process.communicate(timeout=120))
    assert process.returncode in (codes or (0,)), out + err
    assert "Traceback" not in err
    assert process.returncode == 0 or len(err) > 30
    return out, err


@pytest.fixture
def files(tmp_path):
    """A model, and a table to predict in ten row groups."""
    sets = kh.targets.sphere_sets(200, n_keys=3, dim=2, seed=0)
    write_parquet(tmp_path / "in.parquet", [sets], row_group_size=20, extra={"y": sets.query[:, 0]})
    kh.save(
        paper_regressor(6, random_state=0).fit(sets, sets.query[:, 0]),
        tmp_path / "model",
    )
    return tmp_path, sets


def test_files_follow_a_strict_umask(files):
    """A model is for its owner alone if the umask says so."""
    folder, sets = files
    arguments = (
        "fit",
        folder / "in.parquet",
        folder / "new",
        "--target",
        "y",
        "--n-heads",
        "4",
        "--heads",
        "zero-mean",
    )
    fitting = start(*MAIN, *arguments, umask=0o077)
    predicting = start(
        *MAIN, "predict", folder / "model", folder / "in.parquet", folder / "out", umask=0o027
    )
    assert "wrote" in ended(fitting)[0]
    ended(predicting)
    assert (folder / "new").stat().st_mode & 0o777 == 0o600
    assert (folder / "out").stat().st_mode & 0o777 == 0o640
    assert len(kh.load(folder / "new").predict(sets)) == 200


def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(files):
    """A limit on the size of files stands for the disk: what was there stays as it was."""
    folder, sets = files
    kept = (folder / "model").read_bytes()
    many = paper_regressor(4000, alpha=1.0, random_state=0).fit(sets[:20], sets.query[:20, 0])
    before = sorted(folder.iterdir())
    # Python leaves the signal of this limit at "ignore", so that writing fails with an OSError, as
    # on a full disk
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            kh.save(many, folder / "model", overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert (folder / "model").read_bytes() == kept
    assert sorted(folder.iterdir()) == before
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))}
    _, err = ended(
        start(*MAIN, "predict", folder / "model", folder / "in.parquet", folder / "out", **small), 2
    )
    assert "too large" in err
    assert not (folder / "out").exists()


def test_eight_threads_and_forked_and_spawned_workers_agree_by_bits():
    wanted = fingerprint()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert {f.result() for f in [threads.submit(fingerprint) for _ in range(24)]} == {wanted}
    spawned = start("-c", FIT)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe()
    child = context.Process(target=lambda: sender.send(fingerprint()))
    child.start()
    assert receiver.poll(60)
    assert receiver.recv() == wanted
    child.join(10)
    assert ended(spawned)[0].strip() == wanted


def test_two_of_a_command_on_one_output(files):
    """One of the two at least writes the file, whole; the other writes the same, or refuses in a
    sentence.
    """
    folder, sets = files
    fit = (
        "fit",
        folder / "in.parquet",
        folder / "new",
        "--target",
        "y",
        "--n-heads",
        "4",
        "--heads",
        "zero-mean",
    )
    predict = ("predict", folder / "model", folder / "in.parquet", folder / "out")
    for pair in [[start(*MAIN, *arguments) for _ in range(2)] for arguments in (fit, predict)]:
        for process in pair:
            ended(process, 0, 2)
        assert 0 in [process.returncode for process in pair]
    assert {path.name for path in folder.iterdir()} == {"in.parquet", "model", "new", "out"}
    assert len(kh.load(folder / "new").predict(sets)) == 200
    found = pq.read_table(folder / "out")["prediction"].to_numpy()
    np.testing.assert_array_equal(found, kh.load(folder / "model").predict(sets))
