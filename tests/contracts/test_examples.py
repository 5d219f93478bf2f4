"""Every example runs, in a small form, on files of the kind it names."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def figures(shown: str) -> dict[str, float]:
    """Name → score, from the lines of the table that an example ends with."""
    found = re.findall(r"^(\S.*?)\s{2,}([\d.]+) (?:% )?±", shown, flags=re.MULTILINE)
    return {name: float(number) for name, number in found}


def test_bags(tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    """A bag is positive if one of its instances lies far out."""
    lines = []
    for bag in range(40):
        keys = rng.normal(size=(rng.integers(2, 6), 3))
        keys[0, 0] += 8 * (bag % 2)
        lines += [f"{bag % 2},{bag},{','.join(map(str, key))}" for key in keys]
    (tmp_path / "bags.csv").write_text("\n".join(lines))
    example("bags").main(tmp_path / "bags.csv", repeats=2, folds=2)
    assert figures(capsys.readouterr().out)["attention, default settings"] > 80


def test_gestures(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    """Waves of two frequencies, of any length."""
    for part in ("TRAIN", "TEST"):
        rows = []
        for k in range(16):
            steps = np.arange(rng.integers(20, 30))
            wave = np.sin(steps * (0.3 if k % 2 else 0.9)) + 0.05 * rng.normal(size=len(steps))
            rows.append(",".join(map(str, wave)) + (":a" if k % 2 else ":b"))
        (tmp_path / f"{part}.ts").write_text(
            "@univariate true\n@classLabel true a b\n@data\n" + "\n".join(rows)
        )
    example("gestures").main(tmp_path / "TRAIN.ts", tmp_path / "TEST.ts", repeats=2)
    scores = figures(capsys.readouterr().out)
    assert len(scores) == 2
    assert min(scores.values()) > 80


def test_molecules(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    """Energies of pairs that fall with the distance: no count of elements tells them."""
    for k in range(60):
        charge, place = rng.choice(["H", "C"], 4), rng.normal(size=(4, 3)) * 1.5
        apart = np.linalg.norm(place[:, None] - place, axis=2)
        energy = -np.exp(-(apart**2) / 4).sum()
        rows = "\n".join(f"{z} {x} {y} {w}" for z, (x, y, w) in zip(charge, place, strict=True))
        (tmp_path / f"{k}.xyz").write_text(f"4\nenergy={energy}\n{rows}\n")
    example("molecules").main(tmp_path, train=45, test=15, n_heads=8)
    errors = figures(capsys.readouterr().out)
    assert errors["attention, 8 heads"] < errors["counts of elements, ridge"]


def test_movielens(rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
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
    movielens = example("movielens")
    movielens.main(frame, {}, n_heads=8)
    errors = figures(capsys.readouterr().out)
    assert list(errors) == ["ridge on aggregates", "attention", "attention, aggregates as extras"]
    data = movielens.read(frame)
    assert errors["attention"] < 0.8 * data.target[data.split == 1].std()
    assert data.sets.lengths.min() == 5


def test_stories(
    tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]
) -> None:
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
        (tmp_path / f"qa2_x_{part}.txt").write_text("\n".join(lines))
    example("stories").main(tmp_path, max_iter=5, n_heads=16)
    shown = capsys.readouterr().out
    assert figures(shown)["attention, one hop"] > 80
    assert "hop 1: sentence" in shown
