"""Cells: keys that mean the same settings and the same arithmetic, and nothing else."""

import csv
import dataclasses
import json
import sqlite3
import subprocess
import sys
from contextlib import closing

import pyarrow.parquet as pq
import pytest

from keyhole.lab import cells as module
from keyhole.lab.cells import ARITHMETIC, Cell, Store, export
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
    others += [
        dataclasses.replace(CELL, **fixed),
        dataclasses.replace(CELL, **fixed, model="biased", mean=0.5),
    ]
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
        ({"learner": "task"}, "its model one of relu"),
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
    Cell("attention", "token", 3, 2, 6, 24, 24, 50, 0, 0, "huber", 0.1, 0.1, 5.0): 1.54354972,
    Cell("softmax-biased", "nearest-key", 6, 10, 20, 24, 24, 50, 0, 0, "task"): 0.149952556,
    Cell("relu", "average", 6, 10, 20, 24, 24, 50, 0, 0, "task-theory"): 1.03950808,
}


def test_the_numbers_behind_a_key_do_not_move():
    """If this fails, a change moved what stored results mean: raise ARITHMETIC of the learner, then
    pin anew.
    """
    found = {
        cell: values.get("error", values.get("mean_square"))
        for job in group(PINNED)
        for cell, values, _ in compute(job)
    }
    for cell, error in PINNED.items():
        assert found[cell] == pytest.approx(error, rel=1e-3 if cell.learner == "huber" else 1e-6), (
            cell
        )


CELLS = [
    Cell("mlp", "token", 3, 2, m, n, 32, 5, seed=0, repetition=0)
    for m in (None, 4)
    for n in (8, 16, 32)
]


def values_of(cell):
    return {"error": 1 / 3 / cell.n_samples, "alpha": 1e-300}


def test_results_come_back_to_the_last_bit(tmp_path):
    with Store(tmp_path / "cells.sqlite") as store:
        for cell in CELLS:
            store.put(cell, values_of(cell), seconds=0.5)
        store.put(CELLS[0], {"error": 9.0}, seconds=0.1)
        last, keys = store.keys()
        assert len(keys) == len(CELLS)
        assert store.keys(last) == (last, [])
    with Store(tmp_path / "cells.sqlite") as store:
        assert store.get([*CELLS, Cell("mlp", "token", 3, 2, 5, 8, 8, 5, 0, 0)]) == {
            c: values_of(c) for c in CELLS
        }


def test_exports_are_the_same_bytes_in_any_order(tmp_path):
    forward = {cell: values_of(cell) for cell in CELLS}
    backward = {cell: dict(reversed(values_of(cell).items())) for cell in reversed(CELLS)}
    for name, results in (("a", forward), ("b", backward)):
        export(results, tmp_path / name)
    for file in ("cells.csv", "cells.parquet"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"cells.csv", "cells.parquet"}
    table = pq.read_table(tmp_path / "a" / "cells.parquet").to_pylist()
    with (tmp_path / "a" / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in table] == [row["key"] for row in rows]
    assert [row["error"] for row in table] == [float(row["error"]) for row in rows]
    assert {row["n_heads"] for row in table} == {None, 4}


WRITER = """
import sys
from pathlib import Path
from keyhole.lab.cells import Cell
from keyhole.lab.cells import Store
with Store(Path(sys.argv[1])) as store:
    for n in range(2, 52):
        cell = Cell("mlp", "token", 3, 2, None, n, 64, 5, 0, 0)
        store.put(cell, {"error": 1 / n}, seconds=float(sys.argv[2]))
"""


def test_processes_share_a_file(tmp_path):
    path = tmp_path / "cells.sqlite"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(i)]) for i in range(3)
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0, 0]
    cells = [Cell("mlp", "token", 3, 2, None, n, 64, 5, 0, 0) for n in range(2, 52)]
    with Store(path) as store:
        assert store.get(cells) == {cell: {"error": 1 / cell.n_samples} for cell in cells}
        assert len(store.keys()[1]) == 50


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "cells.sqlite"
    path.write_text("not a database, and long enough that nobody takes it for an empty one" * 20)
    with pytest.raises(ValueError, match="must be a store of cells"):
        Store(path)


def test_a_number_that_is_none_is_refused(tmp_path):
    with Store(tmp_path / "cells.sqlite") as store:
        with pytest.raises(ValueError, match="JSON"):
            store.put(CELLS[0], {"error": float("nan")}, seconds=0.0)
        assert store.get(CELLS) == {}


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE results SET result = '{\"error\": 1e999}'",
        "UPDATE results SET result = '[]'",
        "UPDATE results SET result = '{'",
        "UPDATE results SET result = x'ff00'",
        "DROP TABLE results; CREATE VIEW results AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL "
        "SELECT x + 1 FROM c) SELECT x AS key, x AS config, x AS result FROM c",
        "CREATE TRIGGER t AFTER INSERT ON results BEGIN DELETE FROM results; END",
    ],
)
def test_a_store_from_elsewhere_is_refused_in_words(change, tmp_path):
    path = tmp_path / "cells.sqlite"
    with Store(path) as store:
        store.put(CELLS[0], {"error": 0.5}, seconds=0.1)
    with closing(sqlite3.connect(path)) as db:
        db.executescript(change)
    with (
        pytest.raises(ValueError, match=r"must be a store of cells.*Move it away"),
        Store(path) as store,
    ):
        store.get([CELLS[0]])
