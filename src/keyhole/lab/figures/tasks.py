"""Figure 9.

What one layer learns: the tasks of the literature against eleven learners, and a verdict for each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from keyhole.lab.cells import Cell
from keyhole.lab.figures.task_findings import (
    FINDINGS,
    LEVEL,
    Check,
    TaskResults,
    state_of,
)
from keyhole.lab.measured import CellSweep, Curve, Estimate, Results, deviation_text
from keyhole.lab.measured import samples_measured as crossing
from keyhole.lab.report.document import (
    Chart,
    HeatMap,
    Look,
    Row,
    Section,
    Series,
    State,
    Table,
    Verdict,
)
from keyhole.lab.task_learners import (
    CLOSED_FORM,
    NAMES,
    NEEDS_TORCH,
    PREDICTED,
    find_task,
    has_torch,
    is_defined,
)
from keyhole.theory.tasks import TASKS

SENSITIVITY = "word-sensitivity"
"""The name of the diagnostic among the tasks."""

SENSITIVE = ("mlp", "relu", "softmax", "softmax-biased")
"""Feature maps whose word sensitivity is measured."""

COLUMNS = (
    "relu",
    "relu-biased",
    "softmax",
    "softmax-biased",
    "linear",
    "learned",
    "two-hops",
    "mlp",
    "pooled",
    "deep-sets",
    "trained",
)
"""The learners of the matrix, in its order."""


@dataclass(frozen=True)
class Config:
    """Tasks and learners of the matrix, and the sizes they are measured at."""

    tasks: tuple[str, ...] = (*TASKS, SENSITIVITY)
    learners: tuple[str, ...] = COLUMNS
    sizes: tuple[int, ...] = (50, 100, 200, 400, 800)
    repetitions: int = 5
    descent_sizes: tuple[int, ...] = (50, 100, 200, 400)
    """Of learned heads and two hops."""
    network_sizes: tuple[int, ...] = (100, 800, 6400)
    """Of networks, whose time is that of their steps and hardly depends on n."""
    n_heads: int = 256
    n_test: int = 1000
    predicted: tuple[str, ...] = ("relu",)
    """Learners with a prediction; each of `PREDICTED` may have one."""
    theory_sets: int = 1600
    """Sets that a prediction is made of."""
    sensitivity_keys: tuple[int, ...] = (8, 32, 128, 512)
    seed: int = 0

    def __post_init__(self) -> None:
        known_tasks = (*TASKS, SENSITIVITY)
        _check_known(self.tasks, known_tasks, "tasks")
        _check_known(self.learners, COLUMNS, "learners")
        _check_known(self.predicted, PREDICTED, "predicted")
        for name in ("sizes", "descent_sizes", "network_sizes", "sensitivity_keys"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)):
                raise ValueError(f"`{name}` must grow from one to the next: got {values}.")
        if self.theory_sets <= self.sizes[-1]:
            raise ValueError(
                f"`theory_sets` must be above the largest size: got {self.theory_sets} and "
                f"{self.sizes[-1]}."
            )

    def describe(self) -> str:
        """The settings in a few sentences."""
        sizes = ", ".join(map(str, self.sizes))
        learned = ", ".join(map(str, self.descent_sizes))
        networks = ", ".join(map(str, self.network_sizes))
        return (
            f"Our settings: n = {sizes}; learned heads n = {learned}; networks n = {networks}. "
            f"{self.repetitions} repetitions; {self.n_test} test sets and {self.n_heads} heads. "
            "Penalties, means (1, 3 or 10 times the identity) and scales of softmax heads (0.5 or "
            "3) are chosen by leave-one-out. "
            "Learned heads and networks stop by samples that they hold out of their training "
            f"samples. A task is learned where the error is at most {LEVEL:g} Var y above its "
            "floor."
        )

    @property
    def set_tasks(self) -> tuple[str, ...]:
        """The tasks without the diagnostic."""
        return tuple(name for name in self.tasks if name != SENSITIVITY)

    def learners_of(self, task: str) -> tuple[str, ...]:
        """The learners of the matrix that are measured on a task."""
        return tuple(
            learner
            for learner in self.learners
            if is_defined(learner, task) and (learner not in NEEDS_TORCH or has_torch())
        )

    def sweep(self, task: str, learner: str) -> CellSweep:
        """Errors of a learner against n."""
        if learner in NEEDS_TORCH:
            sizes = self.network_sizes
        elif learner in ("learned", "two-hops"):
            sizes = self.descent_sizes
        else:
            sizes = self.sizes
        largest = max(sizes[-1], self.sizes[-1])
        cell = self._cell(task, learner, "task", largest, self.n_test)
        return CellSweep.over(cell, "n_samples", sizes, self.repetitions)

    def theory_sweep(self, task: str, learner: str) -> CellSweep:
        """What theory predicts of a learner against n: one curve."""
        cell = self._cell(task, learner, "task-theory", self.sizes[-1], self.theory_sets)
        return CellSweep.over(cell, "n_samples", self.sizes, repetitions=1)

    def sensitivity_cells(self, model: str, n_keys: int) -> list[Cell]:
        """The word sensitivity of a feature map, once for every repetition."""
        return [
            Cell(
                model=model,
                target=SENSITIVITY,
                dim=16,
                n_keys=n_keys,
                n_heads=200,
                n_samples=2,
                most_samples=2,
                n_test=100,
                seed=self.seed,
                repetition=repetition,
                learner="sensitivity",
            )
            for repetition in range(self.repetitions)
        ]

    def _cell(self, task: str, learner: str, kind: str, largest: int, n_test: int) -> Cell:
        one_set, _ = find_task(task).draw(1, seed=0)
        has_heads = learner not in ("mlp", "pooled", *NEEDS_TORCH)
        return Cell(
            model=learner,
            target=task,
            dim=one_set.dim,
            n_keys=len(one_set.tokens),
            n_heads=self.n_heads if has_heads else None,
            n_samples=largest,
            most_samples=largest,
            n_test=n_test,
            seed=self.seed,
            repetition=0,
            learner=kind,
        )


def _check_known(names: tuple[str, ...], known: tuple[str, ...], field: str) -> None:
    """Raise where a name is unknown."""
    for name in names:
        if name not in known:
            raise ValueError(f"`{field}` must be of {', '.join(known)}: got {name!r}.")


PRESETS = {
    "quick": Config(
        tasks=("similarity", "nearest-key", "lookup", "counting", "majority", "pairs"),
        learners=CLOSED_FORM,
        sizes=(50, 100, 200, 400),
        repetitions=3,
        n_test=500,
        predicted=("relu",),
        theory_sets=1000,
    ),
    "full": Config(),
}


def controls(config: Config) -> list[tuple[str, str]]:
    """Tasks and learners beyond the matrix that a verdict asks for."""
    pairs = []
    if "counting" in config.tasks:
        pairs.append(("counting", "softmax-sharp"))
    if "position" in config.tasks:
        for learner in ("relu", "learned", "trained"):
            is_measured = learner in config.learners_of("position")
            if is_measured:
                pairs += [("position-only", learner), ("meaning-only", learner)]
    return pairs


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    wanted = []
    for task in config.set_tasks:
        for learner in config.learners_of(task):
            wanted += config.sweep(task, learner).cells
            if learner in config.predicted:
                wanted += config.theory_sweep(task, learner).cells
    for task, learner in controls(config):
        wanted += config.sweep(task, learner).cells
    if SENSITIVITY in config.tasks:
        for model in SENSITIVE:
            for n_keys in config.sensitivity_keys:
                wanted += config.sensitivity_cells(model, n_keys)
    return wanted


# ---------------------------------------------------------------- what was measured


def measured_results(config: Config, results: Results) -> TaskResults:
    """Curves of all tasks and learners, and the word sensitivities."""
    pairs = [(task, learner) for task in config.set_tasks for learner in config.learners_of(task)]
    curves = {}
    for task, learner in [*pairs, *controls(config)]:
        curves[task, learner] = config.sweep(task, learner).curve(results)
    sensitivities = {}
    if SENSITIVITY in config.tasks:
        for model in SENSITIVE:
            columns = []
            for n_keys in config.sensitivity_keys:
                cells = config.sensitivity_cells(model, n_keys)
                columns.append([results[cell]["sensitivity"] for cell in cells])
            sensitivities[model] = Curve(
                np.array(config.sensitivity_keys, dtype=np.float64), np.array(columns).T
            )
    return TaskResults(curves=curves, sensitivities=sensitivities)


def section(config: Config, results: Results) -> Section:
    """The matrix, a panel for each task, and the verdicts."""
    measured = measured_results(config, results)
    rows: list[Row] = []
    panels: list[Chart] = []
    for task in config.set_tasks:
        chart = _panel(config, results, measured, task)
        panels.append(chart)
        rows += chart.rows
    checks = {task: _checks(task, measured) for task in config.tasks}
    blocks: list[Chart | HeatMap | Table] = [
        _matrix(config, measured),
        _verdict_table(checks),
        *panels,
    ]
    if SENSITIVITY in config.tasks:
        blocks.append(_sensitivity_chart(measured))
    return Section(
        slug="tasks",
        title="What one attention layer learns",
        claim=(
            "The tasks that the literature poses to a single attention layer, each with the "
            "finding that is claimed or proved for it."
        ),
        blocks=blocks,
        verdict=_verdict(checks, deviation_text(rows)),
        settings=config.describe(),
    )


def samples_needed(curve: Curve, floor: float, seed: int) -> Estimate:
    """Samples at which the mean error falls to the floor and a tenth of the variance.

    The first size where it is below from the start; no value where it never is.
    """
    level = floor + LEVEL
    if curve.mean[0] <= level:
        return Estimate(float(curve.x[0]), math.nan)
    return crossing(curve, level, seed)


# ---------------------------------------------------------------- the matrix


def _matrix(config: Config, measured: TaskResults) -> HeatMap:
    """Samples needed: a row for each task, a column for each learner."""
    columns = [
        learner
        for learner in config.learners
        if any((task, learner) in measured.curves for task in config.set_tasks)
    ]
    values = []
    words = []
    rows: list[Row] = []
    for task in config.set_tasks:
        floor = find_task(task).floor
        entries = []
        for learner in columns:
            curve = measured.curves.get((task, learner))
            entries.append(_entry(curve, floor, config.seed))
            if curve is not None:
                rows.append(_matrix_row(task, learner, curve, floor, config.seed))
        values.append([value for value, _ in entries])
        words.append([text for _, text in entries])
    return HeatMap(
        name="tasks-matrix",
        title=f"Samples needed to come within {100 * LEVEL:g} % of the variance above the floor",
        x_label="learner",
        y_label="task",
        columns=[NAMES[learner] for learner in columns],
        index=list(config.set_tasks),
        values=values,
        rows=rows,
        words=words,
        note=(
            "Colour is the logarithm of the number of samples, read between the sizes run. “✕ "
            "0.43” is not learned at the largest n, and the share of the variance above the "
            "floor that is left there. An empty cell is a learner that is the same as another "
            "without a query, or that was not run."
        ),
    )


def _entry(curve: Curve | None, floor: float, seed: int) -> tuple[float, str]:
    """Colour and words of a cell of the matrix."""
    if curve is None:
        return math.nan, ""
    needed = samples_needed(curve, floor, seed)
    if needed.value is None:
        left = float(curve.mean[-1]) - floor
        return math.nan, f"✕ {left:.2f}"
    if needed.value <= curve.x[0]:
        return math.log10(needed.value), f"≤ {curve.x[0]:.0f}"
    return math.log10(needed.value), f"{needed.value:.0f}"


def _matrix_row(task: str, learner: str, curve: Curve, floor: float, seed: int) -> Row:
    """The same as numbers, with their errors."""
    needed = samples_needed(curve, floor, seed)
    spread = needed.spread if needed.value is not None and math.isfinite(needed.spread) else None
    error = float(curve.error[-1])
    return {
        "task": task,
        "learner": NAMES[learner],
        "floor": floor,
        "samples": needed.value,
        "standard_error": spread,
        "largest_n": int(curve.x[-1]),
        "error_there": float(curve.mean[-1]),
        "its_standard_error": error if math.isfinite(error) else None,
        "repetitions": int(np.isfinite(curve.runs[:, -1]).sum()),
    }


# ---------------------------------------------------------------- a panel for each task


def _panel(config: Config, results: Results, measured: TaskResults, task: str) -> Chart:
    """Learning curves of all learners on one task, with what theory predicts."""
    description = find_task(task)
    series: list[Series] = []
    rows: list[Row] = []
    for learner in config.learners_of(task):
        curve = measured.curves[task, learner]
        role = ROLES.get(learner, learner)
        series.append(drawable(curve.series(NAMES[learner], role)))
        predicted: dict[float, float] = {}
        if learner in config.predicted:
            prediction = config.theory_sweep(task, learner).curve(results)
            predicted = dict(zip(prediction.x.tolist(), prediction.mean.tolist(), strict=True))
            look: Look = "dashed"
            line = prediction.series(f"{NAMES[learner]}, predicted", role, look)
            series.append(drawable(line))
        common = {"task": task, "learner": NAMES[learner]}
        rows += curve.rows("n", common, predicted)
    return Chart(
        name=f"tasks-{task}",
        title=f"{task}: {description.formula}",
        x_label="samples n",
        y_label="test error over Var y",
        series=series,
        rows=rows,
        x_log=True,
        y_log=True,
        note=f"{description.finding} ({description.source})",
        marks={"learned": description.floor + LEVEL},
    )


ROLES = {"relu": "attention", "relu-biased": "biased"}
"""Learners that have the colours of other figures under another name."""

LEAST_DRAWN = 1e-4
"""Errors below are drawn there: several learners are exact to rounding."""


def drawable(series: Series) -> Series:
    """The curve with errors below 1e-4 drawn at 1e-4."""
    y = [max(value, LEAST_DRAWN) for value in series.y]
    if series.low is None or series.high is None:
        return replace(series, y=y)
    low = [max(value, LEAST_DRAWN) for value in series.low]
    high = [max(value, LEAST_DRAWN) for value in series.high]
    return replace(series, y=y, low=low, high=high)


def _sensitivity_chart(measured: TaskResults) -> Chart:
    """Word sensitivity of feature maps against N."""
    names = {
        "mlp": "random features of the flattened input",
        "relu": "ReLU/N attention",
        "softmax": "softmax attention, zero mean",
        "softmax-biased": "softmax attention, mean 3",
    }
    series = []
    rows: list[Row] = []
    for model, curve in measured.sensitivities.items():
        series.append(curve.series(names[model], ROLES.get(model, model)))
        rows += curve.rows("N", {"features": names[model]}, {})
    return Chart(
        name="tasks-word-sensitivity",
        title="Word sensitivity: largest relative change when one key is replaced",
        x_label="keys N",
        y_label="relative change of the features",
        series=series,
        rows=rows,
        x_log=True,
        y_log=True,
        note=(
            "Random features fall like 1/√N, softmax attention stays of order 1 (Bombari and "
            "Mondelli 2024, arXiv:2402.02969)."
        ),
    )


# ---------------------------------------------------------------- verdicts


def _checks(task: str, measured: TaskResults) -> list[Check]:
    """Every part of the literature's finding that was measured."""
    checks = [finding.check(task, measured) for finding in FINDINGS[task]]
    return [check for check in checks if check.holds is not None]


def _verdict_table(checks: dict[str, list[Check]]) -> Table:
    """A row for each task: the finding, what was measured, whether they agree."""
    rows: list[Row] = []
    for task, parts in checks.items():
        if task == SENSITIVITY:
            finding = "random features fall like 1/√N, softmax attention stays"
        else:
            finding = TASKS[task].finding
        rows.append(
            {
                "task": task,
                "the literature": finding,
                "measured": "; ".join(part.text() for part in parts) or "nothing",
                "verdict": state_of(parts),
            }
        )
    return Table(
        name="tasks-verdicts",
        title="Each task against the literature",
        rows=rows,
        note=(
            "A part counts as shown (✓) only where the end of a 95 % interval over repetitions is "
            "on its side; ✕ is the opposite, or not certain."
        ),
    )


def _verdict(checks: dict[str, list[Check]], deviation: str) -> Verdict:
    """All tasks together."""
    states = {task: state_of(parts) for task, parts in checks.items()}
    tested = {task: state for task, state in states.items() if state != "not tested"}
    agreeing = [task for task, state in tested.items() if state == "holds"]
    differing = [f"{task} ({state})" for task, state in tested.items() if state != "holds"]
    state: State
    if not tested:
        state = "not tested"
    elif not differing:
        state = "holds"
    elif agreeing:
        state = "partly"
    else:
        state = "does not show"
    sentence = f"{len(agreeing)} of {len(tested)} tasks come out as the literature says."
    if differing:
        sentence += f" Not, or in part only: {', '.join(differing)}; the table says where."
    numbers: dict[str, str] = {task: str(word) for task, word in states.items()}
    numbers["predicted/measured, frozen heads"] = deviation
    return Verdict(state, sentence, numbers)
