"""What `keyhole explore` measures: layers that are fitted, and the errors they have.

A `Run` is one repetition at several sizes. Its errors follow from its fields alone, and are kept
in a file of their own under the folder --out, whole or not at all. Points are means over finished
runs. A report of `keyhole reproduce` in the same folder has points too: `reproduced_points` reads
its tables.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
from jaxtyping import Float

from keyhole._files import write_whole
from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads
from keyhole.attention.kernels import attention_kernel, mlp_kernel
from keyhole.data.sets import SetBatch
from keyhole.lab.theory_answers import Question, read_notation
from keyhole.theory.targets import sphere_sets

VERSION = 1
"""Of the computation: raise it whenever the errors of a run change."""

REPETITIONS = {25: 8, 50: 8, 100: 8, 200: 8, 400: 4, 800: 4}
"""Sizes of a measured curve, and how often each is measured: larger ones vary less."""

MOST_KEYS = 25_600
"""Sizes with more than this many keys nN are left out: the exact kernel costs (nN)²."""

N_TEST = 1000

HEADS_DRAWN = 80
"""Few heads are drawn again until so many have been: the luck of a draw is averaged out."""

HEAD_BLOCK = 256
"""Heads whose features are held at a time."""


@dataclass(frozen=True)
class MeasuredLayer:
    """Ridge without intercept on sphere sets: what the theory describes, and nothing else."""

    model: str
    """"attention" or "mlp"."""
    target: str
    """In the notation of `keyhole theory --target`, multiplied out."""
    dim: int
    n_keys: int
    n_heads: int | None
    """None for infinitely many."""
    mean: float
    """c of the heads."""
    ridge: float
    noise: float
    """Its variance as a share of Var f*."""


@dataclass(frozen=True)
class MeasuredTask:
    """A learner on a task of the literature, by their names in `keyhole.lab.task_learners`."""

    task: str
    learner: str


@dataclass(frozen=True)
class Run:
    """One repetition: its sets, noise and heads serve all sizes."""

    subject: MeasuredLayer | MeasuredTask
    sizes: tuple[int, ...]
    repetition: int

    @property
    def name(self) -> str:
        """Of its file: runs with equal fields have equal names."""
        fields = {"version": VERSION, "kind": type(self.subject).__name__, **asdict(self)}
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32] + ".json"

    def errors(self) -> list[float]:
        """Mean squared error at every size; of a task as a share of Var y."""
        if isinstance(self.subject, MeasuredTask):
            return _task_errors(self.subject, self.sizes, self.repetition)
        return _layer_errors(self.subject, self.sizes, self.repetition)


@dataclass(frozen=True)
class MeasuredPoint:
    """What was measured at one size."""

    n: int
    error: float
    """Mean over the repetitions, of test sets without noise."""
    standard_error: float
    repetitions: int


def runs_of(
    subject: MeasuredLayer | MeasuredTask, repetitions: dict[int, int], n_keys: int = 1
) -> list[Run]:
    """The runs of a curve; a repetition has the sizes that are measured so often."""
    runs = []
    for repetition in range(max(repetitions.values())):
        sizes = tuple(
            n for n, count in repetitions.items() if repetition < count and n * n_keys <= MOST_KEYS
        )
        if sizes:
            runs.append(Run(subject=subject, sizes=sizes, repetition=repetition))
    return runs


# ---- finished runs -------------------------------------------------------------------------------


class Results:
    """Errors of finished runs, a file each in the folder ``explore`` of --out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._errors: dict[Run, list[float]] = {}  # of runs whose file was read

    def keep(self, run: Run, errors: list[float]) -> None:
        """Write the errors of a finished run."""
        text = json.dumps({**asdict(run), "errors": errors})
        write_whole(text.encode(), self.folder / "explore" / run.name)

    def errors(self, run: Run) -> list[float] | None:
        """The errors of a run; None where it is not finished."""
        if run not in self._errors:
            path = self.folder / "explore" / run.name
            if not path.exists():
                return None
            self._errors[run] = _read_errors(path, len(run.sizes))
        return self._errors[run]

    def missing(self, runs: list[Run]) -> list[Run]:
        """The runs that are not finished, and have a point that `keyhole reproduce` has not."""
        reproduced = reproduced_points(self.folder)
        return [
            run
            for run in runs
            if self.errors(run) is None
            and any((run.subject, n) not in reproduced for n in run.sizes)
        ]

    def points(self, runs: list[Run]) -> list[MeasuredPoint]:
        """The sizes of a curve that are measured twice at least, smallest first."""
        # the errors at each size
        errors_at: dict[int, list[float]] = {}
        for run in runs:
            errors = self.errors(run)
            for n, error in zip(run.sizes, errors or [], strict=False):
                errors_at.setdefault(n, []).append(error)
        points = {}
        for n, errors in errors_at.items():
            if len(errors) < 2:
                continue
            spread = float(np.std(errors, ddof=1))
            points[n] = MeasuredPoint(
                n=n,
                error=float(np.mean(errors)),
                standard_error=spread / math.sqrt(len(errors)),
                repetitions=len(errors),
            )

        # those of `keyhole reproduce`, where they have more repetitions
        reproduced = reproduced_points(self.folder)
        for run in runs:
            for n in run.sizes:
                other = reproduced.get((run.subject, n))
                has_more = n not in points or (
                    other is not None and other.repetitions > points[n].repetitions
                )
                if other is not None and has_more:
                    points[n] = other
        return [points[n] for n in sorted(points)]


def _read_errors(path: Path, count: int) -> list[float]:
    """The errors in a file, which somebody else may have written."""
    try:
        errors = json.loads(path.read_bytes())["errors"]
        is_valid = len(errors) == count and all(
            type(error) is float and math.isfinite(error) for error in errors
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{path} must hold the errors of a fit at {count} sizes, and does not. Remove the file."
        )
    return list(errors)


def reproduced_points(
    folder: Path,
) -> dict[tuple[MeasuredLayer | MeasuredTask, int], MeasuredPoint]:
    """The points of a run of `keyhole reproduce` in a folder, by what was fitted and n.

    They are read from the table of the figure "prediction", which has a row for every setting.
    """
    paths = sorted((folder / "charts").glob("prediction-*.csv"))
    stamps = tuple((str(path), path.stat().st_mtime_ns) for path in paths)
    return _points_of_tables(stamps)


TARGETS = {"f_{1,2}": "token^2", "f_{2,1}": "corr * token", "f_{2,3}": "corr^3 * token"}
"""The targets of that figure, by the names in its table."""


COLUMNS = {"model", "d", "N", "target", "n", "M", "ridge", "noise", "measured", "standard_error"}
COLUMNS |= {"repetitions"}
"""What is read of a table."""


@lru_cache(maxsize=2)
def _points_of_tables(
    stamps: tuple[tuple[str, int], ...],
) -> dict[tuple[MeasuredLayer | MeasuredTask, int], MeasuredPoint]:
    """The points of tables as they are now, which their times of change stand for."""
    points: dict[tuple[MeasuredLayer | MeasuredTask, int], MeasuredPoint] = {}
    for path, _ in stamps:
        with open(path, newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                # other tables of that figure have other columns
                if not row.keys() >= COLUMNS or row["target"] not in TARGETS:
                    continue
                layer, point = _read_row(row)
                points[layer, point.n] = point
    return points


def _read_row(row: dict[str, Any]) -> tuple[MeasuredLayer, MeasuredPoint]:
    """What was fitted, and the point; the errors of the table have the noise in them."""
    dim = int(row["d"])
    n_keys = int(row["N"])
    target = TARGETS[row["target"]]
    variance = Question(target=target, dim=dim, n_keys=n_keys).variance
    noise = float(row["noise"])
    layer = MeasuredLayer(
        model="attention",
        target=target,
        dim=dim,
        n_keys=n_keys,
        n_heads=None if row["M"] == "inf" else int(row["M"]),
        mean=1.0 if row["model"].startswith("biased") else 0.0,
        ridge=float(row["ridge"]),
        noise=round(noise / variance, 12),
    )
    point = MeasuredPoint(
        n=int(row["n"]),
        error=float(row["measured"]) - noise,
        standard_error=float(row["standard_error"]),
        repetitions=int(row["repetitions"]),
    )
    return layer, point


# ---- fitting -------------------------------------------------------------------------------------


def _layer_errors(layer: MeasuredLayer, sizes: tuple[int, ...], repetition: int) -> list[float]:
    """Mean squared errors against f* on test sets; smaller sizes are the first training sets."""
    # sets and labels: one draw for all layers, so that they are compared on the same sets
    words = [layer.dim, layer.n_keys, repetition]
    seeds = np.random.SeedSequence(words).generate_state(4).tolist()
    train = sphere_sets(max(sizes), layer.n_keys, layer.dim, seeds[0])
    test = sphere_sets(N_TEST, layer.n_keys, layer.dim, seeds[1])
    target = read_notation(layer.target, layer.dim).target
    truth = target(test)
    variance = Question(target=layer.target, dim=layer.dim, n_keys=layer.n_keys).variance
    noise = np.random.default_rng(seeds[2]).standard_normal(len(train))
    y = target(train) + math.sqrt(layer.noise * variance) * noise

    # kernel ridge with α = nλ, for every draw of the heads
    n_draws = 1
    if layer.n_heads is not None:
        n_draws = max(1, HEADS_DRAWN // layer.n_heads)
    errors = np.zeros(len(sizes))
    for draw in range(n_draws):
        gram, of_test = _kernels(layer, train, test, seeds[3] + draw)
        for i, n in enumerate(sizes):
            penalised = gram[:n, :n] + n * layer.ridge * np.eye(n)
            coefficients = scipy.linalg.solve(penalised, y[:n], assume_a="pos")
            predicted = of_test[:, :n] @ coefficients
            errors[i] += np.mean(np.square(predicted - truth)) / n_draws
    return errors.tolist()


def _kernels(
    layer: MeasuredLayer, train: SetBatch, test: SetBatch, seed: int
) -> tuple[Float[np.ndarray, "n n"], Float[np.ndarray, "test n"]]:
    """The kernel of a layer among training sets, and of test sets against these."""
    if layer.model == "mlp":
        return mlp_kernel(train), mlp_kernel(test, train)
    distribution = GaussianHeads(mean=layer.mean)
    if layer.n_heads is None:
        among_train = attention_kernel(train, heads=distribution)
        return among_train, attention_kernel(test, train, heads=distribution)

    # the mean over the heads, some of them at a time
    gram = np.zeros((len(train), len(train)))
    of_test = np.zeros((len(test), len(train)))
    for start in range(0, layer.n_heads, HEAD_BLOCK):
        count = min(HEAD_BLOCK, layer.n_heads - start)
        heads = distribution.sample(count, layer.dim, seed, start=start)
        features = attention_features(train, heads)
        share = count / layer.n_heads
        gram += share * (features @ features.T)
        of_test += share * (attention_features(test, heads) @ features.T)
    return gram, of_test


def _task_errors(subject: MeasuredTask, sizes: tuple[int, ...], repetition: int) -> list[float]:
    """Errors of a learner on a task of the literature."""
    from keyhole.lab.task_learners import LEARNERS, TaskDraw, find_task

    words = [0, repetition, *subject.task.encode()]
    train_seed, test_seed, fit_seed = np.random.SeedSequence(words).generate_state(3).tolist()
    task = find_task(subject.task)
    train, y = task.draw(max(sizes), train_seed)
    test, truth = task.draw(N_TEST // 2, test_seed)
    draw = TaskDraw(train=train, y=y, test=test, truth=truth, fit_seed=fit_seed)
    return LEARNERS[subject.learner](draw, sizes, 256)
