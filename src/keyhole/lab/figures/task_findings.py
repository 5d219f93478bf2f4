"""What the literature claims about each task, as statements that measured curves can refute.

A finding is shown only where the end of a 95 % interval over repetitions is on its side. So it
fails when the opposite is measured, when the difference is too small, and when too little was
measured to tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from keyhole.lab.measured import Curve, falls_to
from keyhole.lab.report.document import State
from keyhole.lab.task_learners import NAMES, find_task

LEVEL = 0.1
"""A task is learned where the error is at most this share of Var y above its floor."""

LEAST_ERROR = 1e-6
"""Smaller errors count as this one where two are compared: both are exact."""


@dataclass(frozen=True)
class TaskResults:
    """Errors by task and learner against n, and word sensitivities by feature map against N."""

    curves: Mapping[tuple[str, str], Curve]
    sensitivities: Mapping[str, Curve] = field(default_factory=dict)

    def last_errors(self, task: str, learner: str) -> Float[np.ndarray, " reps"] | None:
        """Errors of the repetitions at the largest n; None where it was not measured."""
        curve = self.curves.get((task, learner))
        if curve is None:
            return None
        errors = curve.runs[:, -1]
        return np.asarray(errors[np.isfinite(errors)])


@dataclass(frozen=True)
class Check:
    """Whether a finding is shown (None where it was not measured), and the numbers in words."""

    holds: bool | None
    words: str

    def text(self) -> str:
        """The words with a sign before them."""
        return f"✓ {self.words}" if self.holds else f"✕ {self.words}"


NOT_MEASURED = Check(None, "not measured")


class Finding(Protocol):
    """A statement about one task."""

    def check(self, task: str, measured: TaskResults) -> Check:
        """Compare it with what was measured."""


def state_of(checks: list[Check]) -> State:
    """The verdict on a task: all of its findings, some of them, or none."""
    if not checks:
        return "not tested"
    if all(check.holds for check in checks):
        return "holds"
    if any(check.holds for check in checks):
        return "partly"
    return "does not show"


@dataclass(frozen=True)
class Interval:
    """A mean over repetitions with its 95 % interval, infinite for a single repetition."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Float[np.ndarray, " reps"]) -> Interval:
        """By Student's distribution."""
        mean = float(np.mean(values))
        count = len(values)
        if count < 2:
            return cls(mean=mean, low=-math.inf, high=math.inf)
        reach = float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(count))
        return cls(mean=mean, low=mean - reach, high=mean + reach)

    def text(self) -> str:
        """The mean and half the width of the interval."""
        reach = self.high - self.mean
        if not math.isfinite(reach):
            return f"{self.mean:.3f} (one repetition)"
        return f"{self.mean:.3f} ± {reach:.3f}"


# ---------------------------------------------------------------- kinds of findings


@dataclass(frozen=True)
class Learns:
    """The learner comes within a tenth of the variance of the floor at the largest n."""

    learner: str

    def check(self, task: str, measured: TaskResults) -> Check:
        """See `Finding`."""
        errors = measured.last_errors(task, self.learner)
        if errors is None:
            return NOT_MEASURED
        interval = Interval.of(errors)
        is_learned = interval.high <= find_task(task).floor + LEVEL
        return Check(is_learned, f"{NAMES[self.learner]} learns it, {interval.text()}")


@dataclass(frozen=True)
class Fails:
    """The learner stays more than a tenth of the variance above the floor at the largest n."""

    learner: str

    def check(self, task: str, measured: TaskResults) -> Check:
        """See `Finding`."""
        errors = measured.last_errors(task, self.learner)
        if errors is None:
            return NOT_MEASURED
        interval = Interval.of(errors)
        is_not_learned = interval.low > find_task(task).floor + LEVEL
        return Check(is_not_learned, f"{NAMES[self.learner]} does not, {interval.text()}")


@dataclass(frozen=True)
class LearnsNothing:
    """The learner's error at the largest n is the variance itself."""

    learner: str

    def check(self, task: str, measured: TaskResults) -> Check:
        """See `Finding`."""
        errors = measured.last_errors(task, self.learner)
        if errors is None:
            return NOT_MEASURED
        interval = Interval.of(errors)
        is_nothing = interval.low > 0.95
        return Check(is_nothing, f"{NAMES[self.learner]} learns nothing, {interval.text()}")


@dataclass(frozen=True)
class Beats:
    """One learner has less than ``factor`` times the error of another.

    At the largest n that both have, in the same repetitions.
    """

    better: str
    worse: str
    factor: float = 1.0

    def check(self, task: str, measured: TaskResults) -> Check:
        """See `Finding`."""
        better = measured.curves.get((task, self.better))
        worse = measured.curves.get((task, self.worse))
        if better is None or worse is None:
            return NOT_MEASURED
        n = max(set(better.x.tolist()) & set(worse.x.tolist()), default=None)
        if n is None:
            return NOT_MEASURED
        count = min(len(better.runs), len(worse.runs))
        errors = _at(better, n)[:count]
        other_errors = _at(worse, n)[:count]
        ratios = np.log(np.maximum(errors, LEAST_ERROR) / np.maximum(other_errors, LEAST_ERROR))
        interval = Interval.of(ratios)
        is_better = interval.high < math.log(self.factor)
        words = (
            f"{NAMES[self.better]} has {math.exp(interval.mean):.2g} times the error of "
            f"{NAMES[self.worse]} at n = {n:.0f}"
        )
        if self.factor != 1:
            words += f" (asked: {self.factor:g})"
        return Check(is_better, words)


def _at(curve: Curve, n: float) -> np.ndarray:
    """The errors of all repetitions at one n."""
    return np.asarray(curve.runs[:, int(np.flatnonzero(curve.x == n)[0])])


@dataclass(frozen=True)
class IsLearnedBefore:
    """A learner needs fewer samples for one task than for another.

    Where it learns neither, it has less error on the first at the largest n.
    """

    learner: str
    first: str
    second: str

    def check(self, task: str, measured: TaskResults) -> Check:
        """See `Finding`."""
        first = measured.curves.get((self.first, self.learner))
        second = measured.curves.get((self.second, self.learner))
        if first is None or second is None:
            return NOT_MEASURED
        first_samples = _samples_of_runs(first, find_task(self.first).floor + LEVEL)
        second_samples = _samples_of_runs(second, find_task(self.second).floor + LEVEL)
        name = NAMES[self.learner]

        # where neither is learned in all repetitions, errors at the largest n decide
        learns_either = np.isfinite(first_samples).all() or np.isfinite(second_samples).all()
        if not learns_either:
            errors = first.runs[:, -1]
            other_errors = second.runs[:, -1]
            interval = Interval.of(np.log(errors / other_errors))
            words = (
                f"{name}: error {float(errors.mean()):.3f} on {self.first}, "
                f"{float(other_errors.mean()):.3f} on {self.second}"
            )
            return Check(interval.high < 0, words)

        # a task that is not learned counts as learned at twice the largest n
        beyond = 2 * max(first.x[-1], second.x[-1])
        counts = np.where(np.isfinite(first_samples), first_samples, beyond)
        other_counts = np.where(np.isfinite(second_samples), second_samples, beyond)
        interval = Interval.of(np.log(counts / other_counts))
        words = (
            f"{name} needs {_count_text(first_samples, first.x[-1])} samples for {self.first}, "
            f"{_count_text(second_samples, second.x[-1])} for {self.second}"
        )
        return Check(interval.high < 0, words)


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
        elif crossing is None:
            samples.append(math.inf)
        else:
            samples.append(crossing)
    return np.array(samples)


@dataclass(frozen=True)
class SensitivityFalls:
    """Word sensitivity is N to a power between two numbers."""

    features: str
    least: float
    most: float

    def check(self, task: str, measured: TaskResults) -> Check:
        """See `Finding`."""
        curve = measured.sensitivities.get(self.features)
        if curve is None:
            return NOT_MEASURED
        log_keys = np.log(curve.x)
        powers = np.array([np.polyfit(log_keys, np.log(run), 1)[0] for run in curve.runs])
        interval = Interval.of(powers)
        is_inside = self.least <= interval.low and interval.high <= self.most
        words = f"{NAMES[self.features]}: N to the power {interval.text()}"
        return Check(is_inside, words)


# ---------------------------------------------------------------- the literature

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
