"""Every example runs, in a small form, on files of the kind it names."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np
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
def test_an_example_says_what_it_is_and_is_short(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
    assert len(path.read_text().splitlines()) <= 60


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
    assert figures(capsys.readouterr().out)["attention, no settings"] > 80


def test_gestures(tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    """Waves of two frequencies, of any length."""
    for part in ("TRAIN", "TEST"):
        rows = []
        for k in range(16):
            steps = np.arange(rng.integers(20, 30))
            wave = np.sin(steps * (0.3 if k % 2 else 0.9)) + 0.05 * rng.normal(size=len(steps))
            rows.append(",".join(map(str, wave)) + (":a" if k % 2 else ":b"))
        (tmp_path / f"{part}.ts").write_text("@univariate true\n@classLabel true a b\n@data\n" + "\n".join(rows))
    example("gestures").main(tmp_path / "TRAIN.ts", tmp_path / "TEST.ts", repeats=2)
    scores = figures(capsys.readouterr().out)
    assert len(scores) == 2
    assert min(scores.values()) > 80


def test_molecules(tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_stories(tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    """Two people go somewhere, one of them with the milk: where is it?"""
    for part, count in (("train", 80), ("test", 40)):
        lines = []
        for _ in range(count):
            places, who = rng.choice(["garden", "office", "kitchen"], 2), rng.integers(2)
            moves = [f"{name} went to the {place}." for name, place in zip(("Mary", "John"), places, strict=True)]
            story = [f"{('Mary', 'John')[who]} took the milk.", *(moves[k] for k in rng.permutation(2))]
            lines += [f"{k + 1} {line}" for k, line in enumerate(story)] + [f"4 Where is the milk?\t{places[who]}\t1"]
        (tmp_path / f"qa2_two_{part}.txt").write_text("\n".join(lines))
    law = {"steps": 5, "learning_rate": 0.2, "n_heads": 4, "strengths": (1.0,)}
    example("stories").main(tmp_path, 2, questions=1, law=law)
    shown = capsys.readouterr().out
    scores = figures(shown)
    assert len(scores) == 2
    assert min(scores.values()) > 80
    assert "where is the milk?\n  look 1: " in shown
