"""Cells on all cores: finished ones are kept in a folder, and are not computed again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import joblib
from joblib import register_store_backend
from joblib._store_backends import FileSystemStoreBackend
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from threadpoolctl import threadpool_limits

from keyhole import __version__
from keyhole._files import write_whole
from keyhole.lab.cells import Cell, Row


class JsonStore(FileSystemStoreBackend):  # type: ignore[misc]
    """joblib's folder of results with JSON instead of pickles: nothing in it is executed."""

    def _path(self, call_id: Sequence[str]) -> Path:
        return Path(self.location, *call_id, "rows.json")

    def contains_item(self, call_id: Sequence[str]) -> bool:
        """Whether a result is there."""
        return self._path(call_id).is_file()

    def dump_item(self, call_id: Sequence[str], item: Any, *_: Any, **__: Any) -> None:
        """Write a result, whole or not at all."""
        write_whole(json.dumps(item).encode(), self._path(call_id))

    def load_item(self, call_id: Sequence[str], *_: Any, **__: Any) -> Any:
        """Read a result."""
        return json.loads(self._path(call_id).read_text(encoding="utf-8"))


register_store_backend("keyhole-json", JsonStore)

IDLE_SECONDS = 10
"""After which a worker without work ends."""


def rows_of(cell: Cell) -> list[Row]:
    """The rows of a cell, on one thread of BLAS: the other cores have cells of their own."""
    with threadpool_limits(limits=1):
        return cell.rows()


def compute(
    cells: Sequence[Cell], folder: Path, n_jobs: int, console: Console | None = None
) -> tuple[dict[Cell, list[Row]], int]:
    """Rows of all cells, and how many cells were computed now.

    Cells that are finished in ``folder`` are read; those of another version of keyhole do not
    count. Stop at any time: the same call goes on with what is missing.
    """
    memory = joblib.Memory(folder / __version__, backend="keyhole-json", verbose=0)
    kept = memory.cache(rows_of)
    unique = list(dict.fromkeys(cells))
    missing = [cell for cell in unique if not kept.check_call_in_cache(cell)]
    # the expensive ones first, so that none is left over at the end
    missing.sort(key=lambda cell: -cell.cost)
    if missing:
        # so that the workers of a run that was killed do not stay
        with joblib.parallel_config(
            "loky", n_jobs=n_jobs, inner_max_num_threads=1, idle_worker_timeout=IDLE_SECONDS
        ):
            finished = joblib.Parallel(return_as="generator_unordered")(
                joblib.delayed(_cost_of)(kept, cell) for cell in missing
            )
            _show_progress(finished, missing, console)
    return {cell: kept(cell) for cell in unique}, len(missing)


def _cost_of(kept: Any, cell: Cell) -> float:
    """Compute and keep a cell; its cost says how much of the work that was."""
    kept(cell)
    return cell.cost


def _show_progress(
    finished: Iterator[float], cells: Sequence[Cell], console: Console | None
) -> None:
    """Wait for all cells, with a bar and the time left on a terminal."""
    columns = (
        TextColumn("{task.fields[count]} of {task.fields[all]} cells"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    total = sum(cell.cost for cell in cells)
    with Progress(*columns, console=console, disable=console is None) as progress:
        task = progress.add_task("", total=total, count=0, all=len(cells))
        for count, cost in enumerate(finished, start=1):
            progress.update(task, advance=cost, count=count)
