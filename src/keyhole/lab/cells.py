"""The unit of work of `keyhole reproduce`.

One learner on one target at one size, and the key its result is kept under.

A cell knows nothing of figures: two figures that ask for the same cell share its result. Its
numbers are a function of its fields alone, to the last bit (one BLAS thread, fixed blocks),
whatever else is computed beside it. Finished cells are in one SQLite file, the `Store`: one
transaction each, safe to share, exported in a fixed order.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keyhole._files import write_whole
from keyhole.lab.report.document import csv_bytes

Values = dict[str, float]  # what a cell comes to, by name; every number is finite

TASK_LEARNERS = ("task", "task-theory", "sensitivity")
"""What is measured of a task of the literature: the error of a fit, what theory predicts for it,
and the sensitivity of a feature map to one key."""

ARITHMETIC = {
    "ridge": 1,
    "fixed": 1,
    "absolute": 3,
    "huber": 3,
    "task": 2,
    "task-theory": 1,
    "sensitivity": 1,
}
"""Version of the computation behind each learner, part of every key.

Raise it whenever a change anywhere (features, kernels, solvers, draws) moves the numbers of a cell.
It is written by hand and not a hash of sources, because a docstring would then throw away an hour
of work; so that nobody forgets, `tests/units/test_cells.py` pins the numbers of a few cells and
names this table when they move.
"""

LEARNERS = tuple(ARITHMETIC)
MODELS = ("attention", "biased", "mlp")
TASK_MODELS = (
    "relu",
    "relu-biased",
    "softmax",
    "softmax-biased",
    "softmax-sharp",
    "linear",
    "learned",
    "two-hops",
    "mlp",
    "pooled",
    "deep-sets",
    "trained",
)
"""Models of the tasks of the literature; `keyhole.lab.task_learners` has them."""


@dataclass(frozen=True)
class Cell:
    """One learner on one target at one size.

    The first ``n_samples`` sets of a draw of ``most_samples``.
    """

    model: str
    """"attention" (heads of mean zero), "biased" (of mean W_0) or "mlp" (width M(d+1)); for tasks
    of the literature one of `TASK_MODELS`."""
    target: str
    """In the notation of `keyhole.theory.notation`; for tasks the name of one."""
    dim: int
    n_keys: int
    n_heads: int | None  # None for infinitely many
    n_samples: int
    most_samples: int  # cells that share it share features, Gram matrix and factorisation
    n_test: int
    seed: int
    repetition: int  # with the seed it names the draw of sets, heads and noise
    learner: str = "ridge"
    """"ridge" with its penalty chosen by leave-one-out; "fixed", ridge with the penalty ``ridge``
    and no intercept; "absolute" or "huber", the constrained learner of the theorems with that
    loss; one of `TASK_LEARNERS` for the tasks of the literature."""
    noise: float = 0.0  # variance of the noise in the labels, as a share of Var f*
    # share of the labels that are off by ± ``outlier_size`` standard deviations of f*
    outliers: float = 0.0
    outlier_size: float = 0.0
    # λ of the learner "fixed", α = nλ; None for the others, which choose theirs
    ridge: float | None = None
    mean: float = 1.0  # c of W_0 = c·I, for biased heads of the learner "fixed"

    def __post_init__(self) -> None:
        # names and sizes
        models = TASK_MODELS if self.learner in TASK_LEARNERS else MODELS
        if self.learner not in LEARNERS or self.model not in models:
            raise ValueError(
                f"a cell's learner must be one of {', '.join(LEARNERS)} and its model one of "
                f"{', '.join(models)}: got {self.learner!r} and {self.model!r}."
            )
        if not 2 <= self.n_samples <= self.most_samples:
            raise ValueError(
                f"a cell needs between 2 and `most_samples` = {self.most_samples} samples, because "
                f"it takes the first of that draw: got n_samples = {self.n_samples}."
            )
        # fields that belong to one kind of cell only
        is_fixed = self.learner == "fixed"
        if is_fixed != (self.ridge is not None):
            raise ValueError(
                f"`ridge` belongs to the learner fixed: got {self.learner!r} with ridge = "
                f"{self.ridge}."
            )
        has_mean = is_fixed and self.model == "biased"
        if self.mean != 1.0 and not has_mean:
            raise ValueError(
                f"`mean` belongs to biased heads of the learner fixed: got {self.learner}, "
                f"{self.model}."
            )
        if is_fixed and self.model == "mlp" and self.n_heads is not None:
            raise ValueError(
                "the learner fixed knows the MLP of infinite width only: n_heads must be None."
            )

    @property
    def config(self) -> str:
        """The fields as canonical JSON: sorted names, no spaces, shortest exact numbers.

        A mean of 1 is left out: cells in stores had no other before there was a field for it.
        """
        # all fields are numbers and text: `asdict` would spend 0.1 ms on copying them deeply
        fields = dict(vars(self))
        if self.mean == 1.0:
            del fields["mean"]
        return canonical(fields)

    @property
    def key(self) -> str:
        """SHA-256 of the configuration and of the version of the arithmetic behind it."""
        text = f"{self.learner}/{ARITHMETIC[self.learner]}\n{self.config}"
        return hashlib.sha256(text.encode()).hexdigest()


def canonical(fields: dict[str, Any]) -> str:
    """JSON in which equal contents are equal text; infinities and NaN are refused.

    >>> canonical({"b": 1, "a": 0.5})
    '{"a":0.5,"b":1}'
    """
    return json.dumps(
        fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


# how long a writer waits for another one; a transaction of ours takes milliseconds
BUSY_SECONDS = 60.0

_TABLES = {
    "results": (
        "CREATE TABLE results (key TEXT PRIMARY KEY, config TEXT NOT NULL, result TEXT NOT NULL)"
    ),
    "timings": (
        "CREATE TABLE timings (key TEXT PRIMARY KEY, seconds REAL NOT NULL, worker TEXT NOT NULL)"
    ),
}


class StoreError(ValueError):
    """A store that cannot be read or written, in words for the person who started the run."""


class Store:
    """Results of cells in one SQLite file (WAL), keyed by `Cell.key`.

    Timings in a table of their own.

    Several processes may read and write one file at once. A result is written in one transaction
    and never changed: whoever comes second with the same cell has the same bits. Use it as a
    context manager, or call ``close``.

    Why not one small file per cell: writing 500 cells takes 0.13 ms of CPU each, against 0.49 ms as
    files that are renamed once they are complete, and reading 0.04 against 0.05 ms.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # transactions are opened by hand: `isolation_level=None` keeps Python from opening others
        self._db = sqlite3.connect(
            self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            with self._in_words():
                self._db.execute(f"PRAGMA busy_timeout = {int(1000 * BUSY_SECONDS)}")
                self._db.execute("PRAGMA trusted_schema = OFF")
                self._check_schema()
                self._db.execute("PRAGMA journal_mode = WAL")
                # in WAL this loses nothing to a killed process, and the last few cells but no more
                # to a power cut
                self._db.execute("PRAGMA synchronous = NORMAL")
                with self._transaction():
                    for statement in _TABLES.values():
                        self._db.execute(statement.replace("TABLE", "TABLE IF NOT EXISTS", 1))
        except BaseException:
            self._db.close()
            raise

    def _check_schema(self) -> None:
        """A file from elsewhere may hold views and triggers, which run whenever we read and write.

        None are ours.
        """
        for name, kind, sql in self._db.execute(
            "SELECT name, type, sql FROM sqlite_master WHERE sql IS NOT NULL"
        ):
            if kind != "table" or sql != _TABLES.get(name):
                raise self._error(f"it has the {kind!s:.20} {name!r:.60}, as no store of ours has")
        # a damaged index hides cells that are there: milliseconds for thousands of them
        [(verdict,)] = self._db.execute("PRAGMA integrity_check(1)")
        if verdict != "ok":
            raise self._error(f"it is damaged ({verdict!s:.100})")

    def _error(self, evidence: str) -> StoreError:
        return StoreError(
            f"{self.path} must be a store of cells, an SQLite file that can be written: "
            f"{evidence}. Move it away, or choose another folder with --out."
        )

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """Raise what SQLite raises as a `StoreError`."""
        try:
            yield
        except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
            raise self._error(f"{error!s:.200}") from error

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit what is done inside, or roll it back."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def put(self, cell: Cell, values: Values, seconds: float, worker: str = "") -> None:
        """Write one result and its timing in one transaction.

        A cell that is there stays as it is.
        """
        row = (cell.key, cell.config, canonical(values))
        with self._in_words(), self._transaction():
            self._db.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?)", row)
            self._db.execute(
                "INSERT OR IGNORE INTO timings VALUES (?, ?, ?)", (cell.key, seconds, worker)
            )

    def get(self, cells: Iterable[Cell]) -> dict[Cell, Values]:
        """Results of those of the cells that are there."""
        results = {}
        for cell in cells:
            with self._in_words():
                row = self._db.execute(
                    "SELECT result FROM results WHERE key = ?", (cell.key,)
                ).fetchone()
            if row is not None:
                results[cell] = self._values(row[0])
        return results

    def _values(self, text: Any) -> Values:
        """The numbers in the text of a result; a file from elsewhere may hold anything."""
        values: Any = None
        if isinstance(text, str):
            with suppress(ValueError, RecursionError):
                values = json.loads(text)
        is_result = isinstance(values, dict) and all(
            _is_result(name, value) for name, value in values.items()
        )
        if not is_result:
            raise self._error(f"a result there is {text!r:.60}, and not numbers by name")
        numbers: Values = values
        return numbers

    def keys(self, after: int = 0) -> tuple[int, list[str]]:
        """Keys written since the row ``after``, and the number of the last one.

        What progress is read from.
        """
        with self._in_words():
            rows = self._db.execute(
                "SELECT rowid, key FROM results WHERE rowid > ? ORDER BY rowid", (after,)
            ).fetchall()
        last = after
        if rows:
            last, _ = rows[-1]
        return last, [key for _, key in rows]


def _is_result(name: str, value: Any) -> bool:
    """A finite number under a name that can head a column beside the fields of a cell."""
    is_taken = name == "key" or name in Cell.__dataclass_fields__
    is_number = type(value) in (int, float) and math.isfinite(value)
    return name.isidentifier() and not is_taken and is_number


def export(results: Mapping[Cell, Values], folder: Path) -> list[Path]:
    """Write the results as CSV and Parquet, a row per cell in the order of their configurations.

    The same results are the same bytes, whoever computed them and when: floats read back to the
    same bits, and nothing of timings, machines or dates is in the files.
    """
    # every row has a column for every name that any result has
    names = sorted({name for values in results.values() for name in values})
    no_values = dict.fromkeys(names)
    rows = []
    for cell in sorted(results, key=lambda cell: cell.config):
        rows.append({"key": cell.key, **asdict(cell), **no_values, **results[cell]})

    columns = ["key", *Cell.__dataclass_fields__, *names]
    return [
        write_whole(csv_bytes(rows), folder / "cells.csv"),
        write_whole(_parquet(rows, columns), folder / "cells.parquet"),
    ]


def _parquet(rows: list[dict[str, Any]], columns: list[str]) -> bytes:
    """Rows as Parquet: the types of a cell's fields, and floats for the values."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow_types = {"int": pa.int64(), "int | None": pa.int64(), "str": pa.string()}
    field_types = {"key": "str"}
    for name, field in Cell.__dataclass_fields__.items():
        field_types[name] = str(field.type)
    schema = pa.schema(
        [(name, arrow_types.get(field_types.get(name, ""), pa.float64())) for name in columns]
    )
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    return sink.getvalue()
