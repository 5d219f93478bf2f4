"""Every example runs: those of the gallery as they are, the others on small files of their kind."""

from __future__ import annotations

import ast
import importlib.util
import os
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
GALLERY = sorted(EXAMPLES.glob("plot_*.py"))
PUBLIC = sorted(path for path in (EXAMPLES / "public_data").glob("*.py") if path.stem != "loaders")


@pytest.fixture(autouse=True)
def _no_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are drawn into memory, and closed."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "show", lambda: pyplot.close("all"))


@pytest.fixture
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where examples look for their data."""
    monkeypatch.setenv("KEYHOLE_DATA", str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLES / "public_data"))
    return tmp_path


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------
# form


@pytest.mark.parametrize("path", [*GALLERY, *PUBLIC], ids=lambda path: path.stem)
def test_an_example_has_a_title_cells_and_advice(path: Path) -> None:
    text = path.read_text()
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring is not None
    title, underline = docstring.splitlines()[:2]
    assert set(underline) == {"="}
    assert len(underline) == len(title)
    assert text.count("# %%") >= 4
    assert "# What to change for your data" in text
    assert "baseline" in text.lower()


@pytest.mark.parametrize(
    "path", [*sorted(EXAMPLES.glob("*.py")), *PUBLIC], ids=lambda path: path.stem
)
def test_lines_of_examples_fit_the_page(path: Path) -> None:
    too_long = [line for line in path.read_text().splitlines() if len(line) > 88]
    assert not too_long


# ------------------------------------------------------------------------------------------------
# the gallery


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_an_example_of_the_gallery_runs(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.argv", [path.name, "60", "60", "6"]
    )  # sizes, where an example has some
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# public data


@pytest.mark.usefixtures("data_folder")
def test_missing_data_is_explained() -> None:
    with pytest.raises(SystemExit, match=r"needs the file 'musk1.csv'.*KEYHOLE_DATA.*mil"):
        load(EXAMPLES / "public_data" / "musk.py")


def write_musk(folder: Path, rng: np.random.Generator) -> None:
    """A bag is positive if one of its instances lies far out."""
    lines = []
    for bag in range(40):
        keys = rng.normal(size=(rng.integers(2, 6), 3))
        keys[0, 0] += 8 * (bag % 2)
        lines += [f"{bag % 2},{bag},{','.join(map(str, key))}" for key in keys]
    (folder / "musk1.csv").write_text("\n".join(lines))


def test_musk(
    data_folder: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    write_musk(data_folder, rng)
    module = load(EXAMPLES / "public_data" / "musk.py")
    assert module.model.score(module.X_test, module.y_test) > 0.7
    assert "accuracy of logistic regression" in capsys.readouterr().out


def write_gestures(folder: Path, rng: np.random.Generator) -> None:
    """Waves of two frequencies, of any length."""
    for part in ("TRAIN", "TEST"):
        rows = []
        for k in range(16):
            steps = np.arange(rng.integers(20, 30))
            wave = np.sin(steps * (0.3 if k % 2 else 0.9)) + 0.05 * rng.normal(size=len(steps))
            rows.append(",".join(map(str, wave)) + (":a" if k % 2 else ":b"))
        header = "@univariate true\n@classLabel true a b\n@data\n"
        file = folder / f"PickupGestureWiimoteZ_{part}.ts"
        file.write_text(header + "\n".join(rows))


def test_gestures(
    data_folder: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gestures(data_folder, rng)
    module = load(EXAMPLES / "public_data" / "gestures.py")
    assert module.model.score(module.new, module.test.target) > 0.8
    assert "nearest neighbour" in capsys.readouterr().out


def write_molecules(folder: Path, rng: np.random.Generator) -> None:
    """Energies of pairs that fall with the distance: no count of elements tells them."""
    atoms, ends, energies = [], [0], []
    for _ in range(60):
        place = rng.normal(size=(4, 3)) * 1.5
        apart = np.linalg.norm(place[:, None] - place, axis=2)
        energies.append(-np.exp(-(apart**2) / 4).sum())
        atoms.append(np.column_stack([rng.choice([1.0, 6.0], 4), place]))
        ends.append(ends[-1] + 4)
    arrays = {"X": np.concatenate(atoms), "ptr": np.array(ends), "y": np.array(energies)}
    np.savez(folder / "qm7.npz", **arrays)


def test_molecules(data_folder: Path, rng: np.random.Generator) -> None:
    write_molecules(data_folder, rng)
    module = load(EXAMPLES / "public_data" / "molecules.py")
    assert module.errors.mean() < module.baseline.mean()


def test_movielens(rng: np.random.Generator) -> None:
    """Users who like some genres, and whose mood of the moment shows in what they rated last."""
    users, films, n = 6, 30, 200
    genre = np.array(["Drama|War", "Comedy", "Comedy|War"])[np.arange(films) % 3]
    user, film = rng.integers(1, users + 1, n), rng.integers(films, size=n)
    taste = rng.normal(size=(users + 1, 3))[user, film % 3]
    ratings = {
        "userId": user,
        "movieId": film,
        "genres": genre[film],
        "year": 1990.0 + film,
        "timestamp": np.arange(n),
    }
    ratings["rating"] = 3.5 + taste + 0.1 * rng.normal(size=n)
    frame = pd.DataFrame(ratings)
    frame.loc[3, "year"] = None  # as in the real table
    movielens = load(EXAMPLES / "public_data" / "movielens.py")
    table = movielens.main(frame, n_heads=8).set_index("model")["RMSE"]
    data = movielens.read_sets(frame)
    assert table["attention"] < 0.8 * data.target[data.split == 1].std()
    assert data.sets.lengths.min() == 5


def write_stories(folder: Path, rng: np.random.Generator) -> None:
    """Two people go to two places; who is asked for?"""
    for part in ("train", "test"):
        lines = []
        for _ in range(40):
            at = rng.choice(["garden", "kitchen"], 2)
            asked = int(rng.integers(2))
            lines += [
                f"{i + 1} {name} went to the {at[i]}." for i, name in enumerate(("mary", "john"))
            ]
            lines.append(f"3 where is {('mary', 'john')[asked]}?\t{at[asked]}\t{asked + 1}")
        (folder / f"qa2_x_{part}.txt").write_text("\n".join(lines))
    with tarfile.open(folder / "tasks_1-20_v1-2.tar.gz", "w:gz") as archive:
        for part in ("train", "test"):
            archive.add(folder / f"qa2_x_{part}.txt", f"en/qa2_x_{part}.txt")


def test_stories(
    data_folder: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    write_stories(data_folder, rng)
    source = (EXAMPLES / "public_data" / "stories.py").read_text()
    small = source.replace("STEPS = 300", "STEPS = 5").replace("N_HEADS = 256", "N_HEADS = 16")
    path = data_folder / "stories.py"
    path.write_text(small)
    module = load(path)
    assert module.models["one hop"].score(module.data.sets, module.data.target) > 0.8
    assert "bags of words: accuracy" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# benchmarks, and examples that are no part of the gallery, at their smallest size

BENCHMARKS = EXAMPLES.parent / "benchmarks"
SMALLEST = {
    "benchmarks/bench_after.py": "coverage --only diabetes --splits 1 --out OUT",
    "benchmarks/bench_gpu.py": "--size tiny --device cpu --out OUT",
    "benchmarks/bench_scale.py": "--sets 2000 --heads 4 --dask-sets 64",
    "benchmarks/best_bias.py": "--settings 1 --out OUT",
    "benchmarks/defaults.py": "--size 0.1 --jobs majority --out OUT",
    "benchmarks/example_bags.py": "DATA/musk1.csv 2 2",
    "benchmarks/example_gestures.py": (
        "DATA/PickupGestureWiimoteZ_TRAIN.ts DATA/PickupGestureWiimoteZ_TEST.ts 2"
    ),
    "benchmarks/example_molecules.py": "DATA/qm7.npz 40 20 4",
    "benchmarks/example_stories.py": "DATA/tasks_1-20_v1-2.tar.gz 2 5 8",
    "benchmarks/gallery.py": "bags DATA/musk1.csv 2 2 --out OUT",
    "benchmarks/hot_paths.py": "--size tiny",
    "benchmarks/large_sets.py": "keys --quick",
    "benchmarks/logistic_loo.py": "--seeds 1 --samples 40",
    "benchmarks/pairs.py": "ROOT ROOT --rounds 1 --only gram",
    "benchmarks/prediction_accuracy.py": "--settings 1 --kinds infinite --budget 0.1 --out OUT",
    "benchmarks/real.py": (
        "--data DATA --only digits --methods mean-pool --seeds 1 --out OUT/real.csv"
    ),
    "benchmarks/stories.py": "",
    "examples/finetune.py": "2",
    "benchmarks/duplicates.py": "--sizes 40 --seeds 1",
    "benchmarks/guards.py": "--save guards.npz",
    "benchmarks/bench_norm_ball.py": "",
    "benchmarks/explain.py": "--seeds 1 --customers 200",
}
"""Arguments of every script that no quick test starts."""
STARTED_ELSEWHERE = {"score_onnx.py": "test_onnx.py", "service.py": "test_service.py"}


def test_every_script_is_started_by_a_test() -> None:
    scripts = [*BENCHMARKS.glob("*.py"), *EXAMPLES.glob("*.py")]
    for path in scripts:
        is_script = '__name__ == "__main__"' in path.read_text() or path.parent == EXAMPLES
        is_started = path in GALLERY or f"{path.parent.name}/{path.name}" in SMALLEST
        if is_script and not is_started:
            other_test = Path(__file__).parent / STARTED_ELSEWHERE[path.name]
            assert path.name in other_test.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("script", SMALLEST)
def test_a_script_runs_at_its_smallest_size(
    script: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for write in (write_musk, write_gestures, write_molecules, write_stories):
        write(data, rng)
    root = EXAMPLES.parent
    places = {"DATA": str(data), "OUT": str(tmp_path / "out"), "ROOT": str(root)}
    (tmp_path / "out").mkdir()
    arguments = SMALLEST[script]
    for name, place in places.items():
        arguments = arguments.replace(name, place)
    command = [sys.executable, str(root / script), *arguments.split()]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout
