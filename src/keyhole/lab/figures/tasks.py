"""Figure 9.

What one layer learns: the tasks of the literature against eleven learners, and a verdict for each.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from keyhole.lab.cells import Cell, Row
from keyhole.lab.curves import (
    Curve,
    Estimate,
    above,
    below,
    curve_of,
    curve_rows,
    deviation_text,
    falls_to,
    mean_estimate,
    samples_needed,
    state_of,
)
from keyhole.lab.report.document import Chart, HeatMap, Section, Series, Table, Verdict
from keyhole.lab.task_learners import (
    CLOSED_FORM,
    NAMES,
    NEEDS_TORCH,
    PREDICTED,
    SensitivityCell,
    TaskCell,
    TaskTheoryCell,
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

LEVEL = 0.1
"""A task is learned where the error is at most this share of Var y above its floor."""

LEAST_ERROR = 1e-6
"""Smaller errors count as this one where two are compared: both are exact."""

LEAST_DRAWN = 1e-4
"""Errors below are drawn there: several learners are exact to rounding."""

ROLES = {"relu": "attention", "relu-biased": "biased"}
"""Learners that have the colours of other figures under another name."""

RULE = (
    "Each task has the parts of the literature's finding. A part is shown if the 95 % interval "
    "over repetitions ends on its side, refuted if it ends on the other side, and else not sure. A "
    "task holds if all parts are shown, partly if some are. The whole holds if all tasks do, "
    "partly if some do."
)


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
        vocabulary = {
            "tasks": (*TASKS, SENSITIVITY),
            "learners": COLUMNS,
            "predicted": PREDICTED,
        }
        for field, known in vocabulary.items():
            for name in getattr(self, field):
                if name not in known:
                    raise ValueError(f"`{field}` must be of {', '.join(known)}: got {name!r}.")
        for field in ("sizes", "descent_sizes", "network_sizes", "sensitivity_keys"):
            values = getattr(self, field)
            if list(values) != sorted(set(values)):
                raise ValueError(f"`{field}` must grow from one to the next: got {values}.")
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

    def sizes_of(self, learner: str) -> tuple[int, ...]:
        """The sizes that a learner is measured at."""
        if learner in NEEDS_TORCH:
            return self.network_sizes
        if learner in ("learned", "two-hops"):
            return self.descent_sizes
        return self.sizes


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
            if learner in config.learners_of("position"):
                pairs += [("position-only", learner), ("meaning-only", learner)]
    return pairs


def cells(config: Config) -> list[Cell]:
    """What has to be measured."""
    pairs = [(task, learner) for task in config.set_tasks for learner in config.learners_of(task)]
    cells: list[Cell] = []
    for task, learner in [*pairs, *controls(config)]:
        sizes = config.sizes_of(learner)
        for repetition in range(config.repetitions):
            cells.append(
                TaskCell(
                    task=task,
                    learner=learner,
                    sizes=sizes,
                    most_samples=max(sizes[-1], config.sizes[-1]),
                    n_heads=config.n_heads,
                    n_test=config.n_test,
                    seed=config.seed,
                    repetition=repetition,
                )
            )
    for task, learner in pairs:
        if learner in config.predicted:
            cells.append(
                TaskTheoryCell(
                    task=task,
                    learner=learner,
                    sizes=config.sizes,
                    n_heads=config.n_heads,
                    n_sets=config.theory_sets,
                    seed=config.seed,
                )
            )
    if SENSITIVITY in config.tasks:
        for features in SENSITIVE:
            for n_keys in config.sensitivity_keys:
                for repetition in range(config.repetitions):
                    cells.append(
                        SensitivityCell(
                            features=features,
                            dim=16,
                            n_keys=n_keys,
                            n_heads=200,
                            n_sets=100,
                            seed=config.seed,
                            repetition=repetition,
                        )
                    )
    return cells


@dataclass(frozen=True)
class TaskResults:
    """Errors by task and learner against n, and word sensitivities by feature map against N."""

    curves: Mapping[tuple[str, str], Curve]
    predicted: Mapping[tuple[str, str], Mapping[float, float]]
    sensitivities: Mapping[str, Curve]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> TaskResults:
        """The rows of all cells, sorted."""
        errors: dict[tuple[str, str], list[Row]] = {}
        predicted: dict[tuple[str, str], dict[float, float]] = {}
        sensitivities: dict[str, list[Row]] = {}
        for row in rows:
            if "error" in row:
                errors.setdefault((row["task"], row["learner"]), []).append(row)
            elif "predicted" in row:
                predicted.setdefault((row["task"], row["learner"]), {})[row["n"]] = row["predicted"]
            else:
                sensitivities.setdefault(row["features"], []).append(row)
        return cls(
            curves={pair: curve_of(of_pair, "n") for pair, of_pair in errors.items()},
            predicted=predicted,
            sensitivities={
                name: curve_of(of_map, "N", "sensitivity") for name, of_map in sensitivities.items()
            },
        )

    def last_error(self, task: str, learner: str) -> Estimate | None:
        """The error at the largest n; None where it was not measured."""
        curve = self.curves.get((task, learner))
        return None if curve is None else mean_estimate(curve.runs[:, -1])


# ---------------------------------------------------------------- findings of the literature


@dataclass(frozen=True)
class Check:
    """Whether a finding is shown, None where that is not sure, and the numbers in words."""

    is_shown: bool | None
    words: str

    def text(self) -> str:
        """The words with a sign before them."""
        sign = {True: "✓", False: "✕", None: "?"}[self.is_shown]
        return f"{sign} {self.words}"


class Finding(ABC):
    """A statement about one task that measured curves can refute."""

    @abstractmethod
    def check(self, task: str, measured: TaskResults) -> Check | None:
        """Compare it with what was measured; None where that is missing."""


@dataclass(frozen=True)
class Learns(Finding):
    """The learner comes within a tenth of the variance of the floor at the largest n."""

    learner: str

    def check(self, task: str, measured: TaskResults) -> Check | None:
        """See `Finding`."""
        error = measured.last_error(task, self.learner)
        if error is None:
            return None
        is_learned = below(error, find_task(task).floor + LEVEL)
        return Check(is_learned, f"{NAMES[self.learner]} learns it, {error.text()}")


@dataclass(frozen=True)
class Fails(Finding):
    """The learner stays more than a tenth of the variance above the floor at the largest n."""

    learner: str

    def check(self, task: str, measured: TaskResults) -> Check | None:
        """See `Finding`."""
        error = measured.last_error(task, self.learner)
        if error is None:
            return None
        is_missed = above(error, find_task(task).floor + LEVEL)
        return Check(is_missed, f"{NAMES[self.learner]} does not, {error.text()}")


@dataclass(frozen=True)
class LearnsNothing(Finding):
    """The learner's error at the largest n is the variance itself."""

    learner: str

    def check(self, task: str, measured: TaskResults) -> Check | None:
        """See `Finding`."""
        error = measured.last_error(task, self.learner)
        if error is None:
            return None
        return Check(above(error, 0.95), f"{NAMES[self.learner]} learns nothing, {error.text()}")


@dataclass(frozen=True)
class Beats(Finding):
    """One learner has less than ``factor`` times the error of another.

    At the largest n that both have, in the same repetitions.
    """

    better: str
    worse: str
    factor: float = 1.0

    def check(self, task: str, measured: TaskResults) -> Check | None:
        """See `Finding`."""
        better = measured.curves.get((task, self.better))
        worse = measured.curves.get((task, self.worse))
        if better is None or worse is None:
            return None
        common = set(better.x.tolist()) & set(worse.x.tolist())
        if not common:
            return None
        n = max(common)
        count = min(len(better.runs), len(worse.runs))
        errors = np.maximum(better.at(n).runs[:count, 0], LEAST_ERROR)
        other_errors = np.maximum(worse.at(n).runs[:count, 0], LEAST_ERROR)
        ratio = mean_estimate(np.log(errors / other_errors))
        words = (
            f"{NAMES[self.better]} has {math.exp(ratio.value or 0.0):.2g} times the error of "
            f"{NAMES[self.worse]} at n = {n:.0f}"
        )
        if self.factor != 1:
            words += f" (asked: {self.factor:g})"
        # equal errors do not show that one is better
        is_better = above(_negative(ratio), -math.log(self.factor))
        return Check(is_better, words)


def _negative(estimate: Estimate) -> Estimate:
    """The same number with the other sign."""
    return Estimate(-(estimate.value or 0.0), estimate.spread, -estimate.high, -estimate.low)


@dataclass(frozen=True)
class IsLearnedBefore(Finding):
    """A learner needs fewer samples for one task than for another.

    Where it learns neither, it has less error on the first at the largest n.
    """

    learner: str
    first: str
    second: str

    def check(self, task: str, measured: TaskResults) -> Check | None:
        """See `Finding`."""
        first = measured.curves.get((self.first, self.learner))
        second = measured.curves.get((self.second, self.learner))
        if first is None or second is None:
            return None
        first_samples = _samples_of_runs(first, find_task(self.first).floor + LEVEL)
        second_samples = _samples_of_runs(second, find_task(self.second).floor + LEVEL)
        name = NAMES[self.learner]

        # where neither is learned in all repetitions, errors at the largest n decide
        learns_either = np.isfinite(first_samples).all() or np.isfinite(second_samples).all()
        if not learns_either:
            errors = first.runs[:, -1]
            other_errors = second.runs[:, -1]
            ratio = mean_estimate(np.log(errors / other_errors))
            words = (
                f"{name}: error {float(errors.mean()):.3f} on {self.first}, "
                f"{float(other_errors.mean()):.3f} on {self.second}"
            )
            return Check(above(_negative(ratio), 0.0), words)

        # a task that is not learned counts as learned at twice the largest n
        beyond = 2 * max(first.x[-1], second.x[-1])
        counts = np.where(np.isfinite(first_samples), first_samples, beyond)
        other_counts = np.where(np.isfinite(second_samples), second_samples, beyond)
        ratio = mean_estimate(np.log(counts / other_counts))
        words = (
            f"{name} needs {_count_text(first_samples, first.x[-1])} samples for {self.first}, "
            f"{_count_text(second_samples, second.x[-1])} for {self.second}"
        )
        return Check(above(_negative(ratio), 0.0), words)


def _count_text(samples: Float[np.ndarray, " reps"], largest: float) -> str:
    """The mean number of samples, or that there were not enough of them."""
    if np.isfinite(samples).all():
        return f"{float(samples.mean()):.0f}"
    return f"more than {largest:.0f}"


def _samples_of_runs(curve: Curve, level: float) -> Float[np.ndarray, " reps"]:
    """The samples at which each repetition falls to a level: ∞ where it does not."""
    samples = []
    for run in curve.runs:
        crossing = falls_to(curve.x, run, level)
        if run[0] <= level:
            samples.append(float(curve.x[0]))
        else:
            samples.append(math.inf if crossing is None else crossing)
    return np.array(samples)


@dataclass(frozen=True)
class SensitivityFalls(Finding):
    """Word sensitivity is N to a power between two numbers."""

    features: str
    least: float
    most: float

    def check(self, task: str, measured: TaskResults) -> Check | None:
        """See `Finding`."""
        curve = measured.sensitivities.get(self.features)
        if curve is None:
            return None
        log_keys = np.log(curve.x)
        powers = np.array([np.polyfit(log_keys, np.log(run), 1)[0] for run in curve.runs])
        power = mean_estimate(powers)
        is_inside: bool | None = None
        if above(power, self.least) and below(power, self.most):
            is_inside = True
        elif below(power, self.least) or above(power, self.most):
            is_inside = False
        return Check(is_inside, f"{NAMES[self.features]}: N to the power {power.text()}")


FINDINGS: dict[str, tuple[Finding, ...]] = {
    "average": (
        Beats("relu", "mlp", factor=0.5),
        Beats("relu", "relu-biased"),
    ),
    "correlation": (Beats("relu-biased", "relu"),),
    "similarity": (
        Learns("softmax-biased"),
        Beats("softmax-biased", "relu-biased", factor=0.5),
    ),
    "nearest-key": (
        Fails("relu"),
        Fails("relu-biased"),
        Beats("softmax-biased", "relu-biased", factor=0.5),
        Learns("trained"),
    ),
    "single-location": (
        Learns("trained"),
        Fails("linear"),
    ),
    "sparse-selection": (
        Learns("linear"),
        Learns("trained"),
        Fails("mlp"),
    ),
    "sparse-classes": (
        Beats("learned", "linear"),
        Beats("trained", "linear"),
    ),
    "in-context": (
        Learns("linear"),
        LearnsNothing("mlp"),
    ),
    "lookup": (
        Learns("relu"),
        Learns("relu-biased"),
        Fails("mlp"),
    ),
    "counting": (
        Learns("relu"),
        Learns("linear"),
        Fails("softmax-sharp"),
    ),
    "majority": (
        Fails("relu"),
        Fails("softmax"),
        Fails("linear"),
        Fails("learned"),
        Fails("trained"),
    ),
    "maximum": (
        Learns("softmax"),
        Fails("relu"),
        Fails("linear"),
    ),
    "pairs": (
        LearnsNothing("relu"),
        LearnsNothing("linear"),
        Beats("softmax", "relu"),
    ),
    "two-hops": (
        Fails("relu"),
        Fails("relu-biased"),
        Fails("linear"),
        Learns("two-hops"),
    ),
    "position": (
        Learns("learned"),
        IsLearnedBefore("relu", "position-only", "meaning-only"),
        IsLearnedBefore("trained", "position-only", "meaning-only"),
        IsLearnedBefore("learned", "position-only", "meaning-only"),
    ),
    "word-sensitivity": (
        SensitivityFalls("mlp", least=-0.65, most=-0.35),
        SensitivityFalls("relu", least=-1.2, most=-0.4),
        SensitivityFalls("softmax-biased", least=-0.2, most=0.2),
    ),
}
"""What the literature says of each task, in parts that are checked one by one."""


def checks_of(task: str, measured: TaskResults) -> list[Check]:
    """Every part of the literature's finding that was measured."""
    checks = [finding.check(task, measured) for finding in FINDINGS[task]]
    return [check for check in checks if check is not None]


# ---------------------------------------------------------------- the figure


def section(config: Config, rows: Sequence[Row]) -> Section:
    """The matrix, a panel for each task, and the verdicts."""
    measured = TaskResults.of(rows)
    panels = [_panel(config, measured, task) for task in config.set_tasks]
    checks = {task: checks_of(task, measured) for task in config.tasks}
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
        verdict=verdict(checks, deviation_text([row for chart in panels for row in chart.rows])),
        settings=config.describe(),
        rule=RULE,
    )


def samples_for(curve: Curve, floor: float, seed: int) -> Estimate:
    """Samples at which the mean error falls to the floor and a tenth of the variance.

    The first size where it is below from the start; no value where it never is.
    """
    level = floor + LEVEL
    if curve.mean[0] <= level:
        return Estimate(float(curve.x[0]), math.nan)
    return samples_needed(curve, level, seed)


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
        numbers = []
        texts = []
        for learner in columns:
            curve = measured.curves.get((task, learner))
            row = None if curve is None else _matrix_row(task, learner, curve, floor, config.seed)
            number, text = matrix_entry(row)
            numbers.append(number)
            texts.append(text)
            if row is not None:
                rows.append(row)
        values.append(numbers)
        words.append(texts)
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


def _matrix_row(task: str, learner: str, curve: Curve, floor: float, seed: int) -> Row:
    """Samples that a learner needs, and its error at the largest n."""
    needed = samples_for(curve, floor, seed)
    is_known = needed.value is not None and math.isfinite(needed.spread)
    error = float(curve.error[-1])
    return {
        "task": task,
        "learner": NAMES[learner],
        "floor": floor,
        "samples": needed.value,
        "standard_error": needed.spread if is_known else None,
        "smallest_n": int(curve.x[0]),
        "largest_n": int(curve.x[-1]),
        "error_there": float(curve.mean[-1]),
        "its_standard_error": error if math.isfinite(error) else None,
        "repetitions": int(np.isfinite(curve.runs[:, -1]).sum()),
    }


def matrix_entry(row: Row | None) -> tuple[float, str]:
    """Colour and words of a cell of the matrix."""
    if row is None:
        return math.nan, ""
    if row["samples"] is None:
        return math.nan, f"✕ {row['error_there'] - row['floor']:.2f}"
    colour = math.log10(row["samples"])
    if row["samples"] <= row["smallest_n"]:
        return colour, f"≤ {row['smallest_n']}"
    return colour, f"{row['samples']:.0f}"


def _panel(config: Config, measured: TaskResults, task: str) -> Chart:
    """Learning curves of all learners on one task, with what theory predicts."""
    description = find_task(task)
    series: list[Series] = []
    rows: list[Row] = []
    for learner in config.learners_of(task):
        curve = measured.curves[task, learner]
        role = ROLES.get(learner, learner)
        series.append(drawable(curve.series(NAMES[learner], role)))
        predicted = measured.predicted.get((task, learner), {})
        if predicted:
            name = f"{NAMES[learner]}, predicted"
            line = Series(name, list(predicted), list(predicted.values()), look="dashed", role=role)
            series.append(drawable(line))
        rows += curve_rows(curve, "n", {"task": task, "learner": NAMES[learner]}, predicted)
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


def drawable(series: Series) -> Series:
    """The curve with errors below 1e-4 drawn at 1e-4."""

    def raised(values: Sequence[float] | None) -> list[float] | None:
        return None if values is None else [max(value, LEAST_DRAWN) for value in values]

    return replace(
        series, y=raised(series.y) or [], low=raised(series.low), high=raised(series.high)
    )


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
    for features, curve in measured.sensitivities.items():
        series.append(curve.series(names[features], ROLES.get(features, features)))
        rows += curve_rows(curve, "N", {"features": names[features]}, {})
    return Chart(
        name=f"tasks-{SENSITIVITY}",
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


def _verdict_table(checks: Mapping[str, Sequence[Check]]) -> Table:
    """A row for each task: the finding, what was measured, whether they agree."""
    rows: list[Row] = []
    for task, parts in checks.items():
        finding = "random features fall like 1/√N, softmax attention stays"
        if task != SENSITIVITY:
            finding = TASKS[task].finding
        rows.append(
            {
                "task": task,
                "the literature": finding,
                "measured": "; ".join(part.text() for part in parts) or "nothing",
                "verdict": state_of([part.is_shown for part in parts]),
            }
        )
    return Table(
        name="tasks-verdicts",
        title="Each task against the literature",
        rows=rows,
        note=(
            "Errors have 95 % intervals over repetitions. ✓: the interval ends on the finding's "
            "side, ✕: on the other side, ?: not sure."
        ),
    )


def verdict(checks: Mapping[str, Sequence[Check]], deviation: str) -> Verdict:
    """The `RULE` on all tasks together."""
    states = {task: state_of([part.is_shown for part in parts]) for task, parts in checks.items()}
    tested = {task: state for task, state in states.items() if state != "not tested"}
    is_held = {"holds": True, "partly": False, "does not show": False, "not sure": None}
    state = state_of([is_held[of_task] for of_task in tested.values()])
    agreeing = [task for task, of_task in tested.items() if of_task == "holds"]
    differing = [f"{task} ({of_task})" for task, of_task in tested.items() if of_task != "holds"]
    sentence = f"{len(agreeing)} of {len(tested)} tasks come out as the literature says."
    if differing:
        sentence += f" Not, or not surely: {', '.join(differing)}; the table says where."
    numbers: dict[str, str] = {task: str(of_task) for task, of_task in states.items()}
    numbers["predicted/measured, frozen heads"] = deviation
    return Verdict(state, sentence, numbers)
