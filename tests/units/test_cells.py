"""Cells: keys that mean the same settings and the same arithmetic, and nothing else."""

import dataclasses
import json

import pytest

from keyhole.lab import cells as module
from keyhole.lab.cells import ARITHMETIC, Cell
from keyhole.lab.jobs import compute, group

CELL = Cell("attention", "token^2", 3, 2, 4, 12, 16, 20, seed=0, repetition=0)


def test_a_key_is_of_the_settings_alone():
    assert CELL.key == dataclasses.replace(CELL).key == Cell(**json.loads(CELL.config)).key
    others = [
        dataclasses.replace(CELL, **{field: value})
        for field, value in [
            ("model", "biased"),
            ("target", "token"),
            ("dim", 4),
            ("n_keys", 3),
            ("n_heads", None),
            ("n_samples", 13),
            ("most_samples", 17),
            ("n_test", 21),
            ("seed", 1),
            ("repetition", 1),
            ("learner", "huber"),
            ("noise", 0.1),
            ("outliers", 0.1),
            ("outlier_size", 1.0),
        ]
    ]
    fixed = {"learner": "fixed", "ridge": 0.1}
    others += [dataclasses.replace(CELL, **fixed), dataclasses.replace(CELL, **fixed, model="biased", mean=0.5)]
    assert len(others) == len(dataclasses.fields(Cell))
    assert len({CELL.key, *(cell.key for cell in others)}) == 1 + len(others)


def test_another_arithmetic_is_another_key(monkeypatch):
    before = CELL.key
    monkeypatch.setitem(module.ARITHMETIC, "huber", ARITHMETIC["huber"] + 1)
    assert CELL.key == before
    monkeypatch.setitem(module.ARITHMETIC, "ridge", ARITHMETIC["ridge"] + 1)
    assert CELL.key != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_samples": 17}, "between 2 and `most_samples` = 16"),
        ({"learner": "lasso"}, "must be one of ridge"),
        ({"ridge": 0.1}, "belongs to the learner fixed"),
        ({"mean": 0.5}, "`mean` belongs to biased heads"),
    ],
)
def test_an_impossible_cell_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CELL, **changes)


PINNED = {
    Cell("attention", "corr * token", 3, 2, 70, 24, 32, 50, 0, 0): 0.474006886,
    Cell("biased", "token^2", 3, 2, None, 24, 32, 50, 0, 0, noise=0.1): 0.785751882,
    Cell("mlp", "token", 3, 2, 10, 24, 32, 50, 0, 0): 0.1516385,
    Cell("attention", "token^2", 3, 2, 40, 24, 32, 50, 0, 0, "fixed", ridge=1e-3): 0.0351995374,
    Cell("attention", "token", 3, 2, 6, 24, 24, 50, 0, 0, "huber", 0.1, 0.1, 5.0): 1.65595059,
}


def test_the_numbers_behind_a_key_do_not_move():
    """If this fails, a change moved what stored results mean: raise ARITHMETIC of the learner, then pin anew."""
    found = {
        cell: values.get("error", values.get("mean_square"))
        for job in group(PINNED)
        for cell, values, _ in compute(job)
    }
    for cell, error in PINNED.items():
        assert found[cell] == pytest.approx(error, rel=1e-3 if cell.learner == "huber" else 1e-6), cell
