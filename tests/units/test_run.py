"""Cells on all cores: computed once, kept as JSON, one thread of BLAS each."""

import json
from dataclasses import dataclass
from pathlib import Path

from threadpoolctl import threadpool_info

from keyhole.lab.cells import Cell
from keyhole.lab.run import compute


@dataclass(frozen=True)
class Counted(Cell):
    """A cell that leaves a mark in a file each time it is computed."""

    number: int
    marks: Path

    @property
    def cost(self):
        return 1.0

    def rows(self):
        with self.marks.open("a") as file:
            file.write(f"{self.number}\n")
        threads = [pool["num_threads"] for pool in threadpool_info()]
        return [{"number": self.number, "third": 1 / 3, "most_threads": max(threads)}]


def computed(marks):
    return sorted(int(line) for line in marks.read_text().split()) if marks.exists() else []


def test_a_finished_cell_is_not_computed_again(tmp_path):
    marks = tmp_path / "marks"
    cells = [Counted(k, marks) for k in range(4)]
    results, count = compute(cells[:2], tmp_path / "cells", 2)
    assert (list(results), count) == (cells[:2], 2)
    results, count = compute([*cells, cells[0]], tmp_path / "cells", 2)
    assert count == 2
    assert computed(marks) == [0, 1, 2, 3]
    # numbers come back to the last bit, from this process and from a file
    assert [rows[0]["third"] for rows in results.values()] == [1 / 3] * 4
    again, count = compute(cells, tmp_path / "cells", 1)
    assert (again, count) == (results, 0)


def test_every_worker_has_one_thread(tmp_path):
    results, _ = compute([Counted(0, tmp_path / "m"), Counted(1, tmp_path / "m")], tmp_path, 2)
    assert [rows[0]["most_threads"] for rows in results.values()] == [1, 1]
    [rows] = compute([Counted(2, tmp_path / "m")], tmp_path, 1)[0].values()
    assert rows[0]["most_threads"] == 1


def test_nothing_in_the_folder_can_be_executed(tmp_path):
    """Results are JSON, not pickles; one that is damaged is computed again."""
    marks = tmp_path / "marks"
    cell = Counted(5, marks)
    compute([cell], tmp_path / "cells", 1)
    kept = [path for path in (tmp_path / "cells").rglob("*") if path.is_file()]
    names = {path.name for path in kept}
    assert names <= {"rows.json", "metadata.json", "func_code.py", ".gitignore"}  # all are text
    [result] = [path for path in kept if path.name == "rows.json"]
    assert json.loads(result.read_text())[0]["number"] == 5
    result.write_bytes(b"\x80\x04cos\nsystem\n")
    assert compute([cell], tmp_path / "cells", 1)[0][cell][0]["number"] == 5
    assert computed(marks) == [5, 5]


def test_another_version_computes_anew(tmp_path, monkeypatch):
    marks = tmp_path / "marks"
    compute([Counted(1, marks)], tmp_path / "cells", 1)
    monkeypatch.setattr("keyhole.lab.run.__version__", "0.0.0")
    _, count = compute([Counted(1, marks)], tmp_path / "cells", 1)
    assert count == 1
