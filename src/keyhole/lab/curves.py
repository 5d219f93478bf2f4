"""From the rows of cells to curves, crossings and intervals.

Nothing here fits a model. Every estimate has a 95 % interval, and a rule of a verdict asks where
the whole interval lies: `above` and `below` say yes, no, or that it is not sure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from keyhole.lab.cells import Row
from keyhole.lab.report.document import Look, Series, State, bars

RESAMPLES = 400
"""Draws of repetitions behind an interval."""

MODELS = {"attention": "attention", "biased": "biased attention", "mlp": "MLP"}
"""Models by the names a reader sees."""

DEVIATION = "median deviation of prediction"
"""Among the numbers of verdicts."""


# ---------------------------------------------------------------- estimates and verdicts


@dataclass(frozen=True)
class Estimate:
    """A number that was measured: None where it does not exist, with its standard error.

    ``low`` and ``high`` end the 95 % interval; NaN where one repetition tells of none.
    """

    value: float | None
    spread: float = 0.0
    low: float = math.nan
    high: float = math.nan

    @property
    def reach(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2

    def text(self, digits: int = 3, missing: str = "–") -> str:
        """Value and 95 % interval.

        >>> Estimate(1.01234, 0.0012, 1.0034, 1.0213).text(), Estimate(1674.2).text()
        ('1.01 (1 to 1.02)', '1,674')
        >>> Estimate(None).text(), Estimate(7.5, 1.0, 5.5, math.inf).text()
        ('–', '7.5 (5.5 to ∞)')
        """
        if self.value is None:
            return missing
        if math.isnan(self.low):
            return _short(self.value, digits)
        ends = f"{_short(self.low, digits)} to {_short(self.high, digits)}"
        return f"{_short(self.value, digits)} ({ends})"


def _short(value: float, digits: int) -> str:
    """A number to so many digits, without powers of ten up to a million."""
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.{digits}g}"


def above(estimate: Estimate, level: float) -> bool | None:
    """Whether a number is above a level: None where its interval has both sides of it.

    >>> [above(Estimate(2.0, 0.1, low, 2.2), 1.0) for low in (1.8, 0.9)]
    [True, None]
    """
    if estimate.value is None or math.isnan(estimate.low):
        return None
    if estimate.low > level:
        return True
    if estimate.high <= level:
        return False
    return None


def below(estimate: Estimate, level: float) -> bool | None:
    """Whether a number is at most a level: None where its interval has both sides of it."""
    is_above = above(estimate, level)
    return None if is_above is None else not is_above


def all_of(parts: Sequence[bool | None]) -> bool | None:
    """Whether all parts are shown: False where one is refuted, else None where one is not sure."""
    if False in parts:
        return False
    return None if None in parts else True


def state_of(parts: Sequence[bool | None]) -> State:
    """The state of a claim of several parts.

    >>> [state_of(p) for p in ([True, True], [True, None], [None, False], [False, False], [])]
    ['holds', 'partly', 'not sure', 'does not show', 'not tested']
    """
    if not parts:
        return "not tested"
    if all(parts):
        return "holds"
    if any(parts):
        return "partly"
    return "not sure" if None in parts else "does not show"


# ---------------------------------------------------------------- curves


@dataclass(frozen=True)
class Curve:
    """Repeated measurements at several points; NaN where a repetition has no such point."""

    x: Float[np.ndarray, " points"]
    runs: Float[np.ndarray, "reps points"]

    @property
    def mean(self) -> Float[np.ndarray, " points"]:
        """Mean over the repetitions that have the point."""
        return _mean(self.runs)

    @property
    def error(self) -> Float[np.ndarray, " points"]:
        """Standard error of the mean; NaN where there is one repetition only."""
        count = np.isfinite(self.runs).sum(axis=0)
        centred = np.where(np.isfinite(self.runs), self.runs - self.mean, 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.sqrt(np.square(centred).sum(axis=0) / (count - 1) / count))

    def at(self, x: float) -> Curve:
        """One of its points."""
        return Curve(self.x[self.x == x], self.runs[:, self.x == x])

    def series(self, name: str, role: str, look: Look = "points") -> Series:
        """To be drawn: bars of one standard error where there are several repetitions."""
        x = self.x.tolist()
        mean = self.mean.tolist()
        errors = np.nan_to_num(self.error)
        if look == "points" and errors.any():
            return bars(name, x, mean, errors.tolist(), role)
        return Series(name, x, mean, look=look, role=role)


def _mean(table: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(table, axis=0) / np.isfinite(table).sum(axis=0))


def curve_of(rows: Sequence[Row], x: str, y: str = "error", **where: Any) -> Curve:
    """One number of the rows that are as asked, against another, in every repetition.

    >>> rows = [{"n": n, "repetition": r, "error": r + 1 / n} for n in (1, 2) for r in (0, 1)]
    >>> curve_of(rows, "n").mean.tolist()
    [1.5, 1.0]
    """
    chosen = [row for row in rows if all(row[name] == value for name, value in where.items())]
    points = sorted({row[x] for row in chosen})
    repetitions = sorted({row["repetition"] for row in chosen})
    table = np.full((len(repetitions), len(points)), np.nan)
    for row in chosen:
        table[repetitions.index(row["repetition"]), points.index(row[x])] = row[y]
    return Curve(np.array(points, dtype=np.float64), table)


def curve_rows(
    curve: Curve, x: str, common: Row, predicted: Mapping[float, float | None]
) -> list[Row]:
    """A row for each point: what is common to all, what was measured, and what was predicted."""
    errors = [error if math.isfinite(error) else None for error in curve.error.tolist()]
    repetitions = np.isfinite(curve.runs).sum(axis=0)
    return [
        {
            **common,
            x: int(point),
            "measured": float(curve.mean[i]),
            "standard_error": errors[i],
            "repetitions": int(repetitions[i]),
            "predicted": predicted.get(point),
        }
        for i, point in enumerate(curve.x.tolist())
    ]


def deviation_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Median of |predicted/measured − 1| over rows that have both, with their number.

    >>> deviation_text([{"predicted": 1.1, "measured": 1.0}, {"predicted": None, "measured": 1.0}])
    '10.0 % (1 points)'
    """
    both = [row for row in rows if row["predicted"] is not None and row["measured"] is not None]
    if not both:
        return "no prediction"
    deviations = [abs(float(row["predicted"]) / float(row["measured"]) - 1) for row in both]
    return f"{100 * float(np.median(deviations)):.1f} % ({len(both)} points)"


def count_text(count: float | None) -> str:
    """A whole number, or a dash.

    >>> count_text(12345), count_text(None)
    ('12,345', '–')
    """
    return "–" if count is None else f"{int(count):,}"


# ---------------------------------------------------------------- statistics with intervals


def resample(
    statistic: Callable[[list[np.ndarray]], float | None],
    tables: Sequence[np.ndarray],
    seed: int = 0,
) -> Estimate:
    """A statistic of tables (repetitions, points), and its 95 % interval.

    Whole repetitions are drawn with replacement, alike from all tables, because these share their
    sets; those that reach equally far are drawn among each other, so that every point stays
    measured. A resampled mean of r varies by (r−1)/r of the true variance, which is put right.
    """
    value = statistic(list(tables))
    if value is None:
        return Estimate(None)
    n_points = np.sum([np.isfinite(table).sum(axis=1) for table in tables], axis=0)
    strata = [np.flatnonzero(n_points == level) for level in np.unique(n_points)]

    # the statistic of resampled repetitions, where it exists
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(RESAMPLES):
        rows = np.concatenate([rng.choice(stratum, size=len(stratum)) for stratum in strata])
        draw = statistic([table[rows] for table in tables])
        if draw is not None:
            draws.append(draw)

    # one repetition does not vary, and a statistic that often does not exist has no interval
    smallest = min(len(stratum) for stratum in strata)
    if smallest < 2 or len(draws) < RESAMPLES // 2:
        return Estimate(value, math.nan)

    # the standard error, corrected by r/(r−1), and Student's interval
    spread = float(np.std(draws)) * math.sqrt(smallest / (smallest - 1))
    freedom = sum(len(stratum) - 1 for stratum in strata)
    reach = float(stdtrit(freedom, 0.975)) * spread
    return Estimate(value, spread, value - reach, value + reach)


def mean_estimate(values: Float[np.ndarray, " reps"]) -> Estimate:
    """A mean over repetitions with Student's 95 % interval; none for a single one."""
    count = len(values)
    mean = float(np.mean(values))
    if count < 2:
        return Estimate(mean, math.nan)
    spread = float(np.std(values, ddof=1)) / math.sqrt(count)
    reach = float(stdtrit(count - 1, 0.975)) * spread
    return Estimate(mean, spread, mean - reach, mean + reach)


def falls_to(x: np.ndarray, y: np.ndarray, level: float) -> float | None:
    """Where a curve first falls to a level, on logarithmic axes between points.

    None if it does not, or lies below from the start.

    >>> round(falls_to(np.array([100.0, 200.0, 400.0]), np.array([0.4, 0.2, 0.1]), 0.2), 6)
    200.0
    """
    is_measured = np.isfinite(y)
    x = x[is_measured]
    y = np.maximum(y[is_measured], 1e-300)
    reached = np.flatnonzero(y <= level)
    if len(reached) == 0 or reached[0] == 0:
        return None
    i = int(reached[0])
    share = math.log(y[i - 1] / level) / math.log(y[i - 1] / y[i])
    return float(x[i - 1] * (x[i] / x[i - 1]) ** share)


def rises_through(x: np.ndarray, y: np.ndarray, level: float) -> float | None:
    """Where a curve first rises through a level, on plain axes; None if it does not.

    >>> round(rises_through(np.array([0.0, 0.5, 1.0]), np.array([0.5, 0.9, 1.1]), 1.0), 6)
    0.75
    """
    beyond = np.flatnonzero(y > level)
    if len(beyond) == 0 or beyond[0] == 0:
        return None
    i = int(beyond[0])
    share = (level - y[i - 1]) / (y[i] - y[i - 1])
    return float(x[i - 1] + share * (x[i] - x[i - 1]))


def samples_needed(curve: Curve, level: float, seed: int = 0) -> Estimate:
    """The number of samples at which the mean error falls to a level."""
    return resample(lambda tables: falls_to(curve.x, _mean(tables[0]), level), [curve.runs], seed)


def samples_ratio(upper: Curve, lower: Curve, level: float, seed: int = 0) -> Estimate:
    """How many times the samples of one model another needs for the same error."""

    def statistic(tables: list[np.ndarray]) -> float | None:
        upper_samples = falls_to(upper.x, _mean(tables[0]), level)
        lower_samples = falls_to(lower.x, _mean(tables[1]), level)
        if not upper_samples or not lower_samples:
            return None
        return upper_samples / lower_samples

    return resample(statistic, [upper.runs, lower.runs], seed)


def ratio_of_means(upper: Curve, lower: Curve, seed: int = 0) -> Estimate:
    """Ratio of two mean errors at one point, over the repetitions that both have."""
    in_both = np.isfinite(upper.runs[:, 0]) & np.isfinite(lower.runs[:, 0])
    tables = [upper.runs[in_both], lower.runs[in_both]]
    return resample(lambda t: float(_mean(t[0])[0] / _mean(t[1])[0]), tables, seed)


def slope(curve: Curve, seed: int = 0) -> Estimate:
    """Slope of the mean on logarithmic axes, by least squares."""

    def statistic(tables: list[np.ndarray]) -> float | None:
        mean = _mean(tables[0])
        if len(mean) < 2 or not (mean > 0).all():
            return None
        return float(np.polyfit(np.log(curve.x), np.log(mean), 1)[0])

    return resample(statistic, [curve.runs], seed)


def quotient(upper: Estimate, lower: Estimate) -> Estimate:
    """The quotient of two independent estimates: relative errors add up in squares."""
    if upper.value is None or lower.value is None:
        return Estimate(None)
    ratio = upper.value / lower.value
    spread = ratio * math.hypot(upper.spread / upper.value, lower.spread / lower.value)
    reach = ratio * math.hypot(upper.reach / upper.value, lower.reach / lower.value)
    return Estimate(ratio, spread, ratio - reach, ratio + reach)


def difference(upper: Estimate, lower: Estimate) -> Estimate:
    """The difference of two independent estimates: errors add up in squares."""
    if upper.value is None or lower.value is None:
        return Estimate(None)
    value = upper.value - lower.value
    spread = math.hypot(upper.spread, lower.spread)
    reach = math.hypot(upper.reach, lower.reach)
    return Estimate(value, spread, value - reach, value + reach)


def missed_window(curve: Curve, level: float) -> str | None:
    """Where a curve that was run around a prediction does not fall to the level, else None.

    >>> x = np.array([100.0, 200.0])
    >>> missed_window(Curve(x, np.array([[0.4, 0.3]])), 0.2)
    'not reached at n = 200'
    >>> missed_window(Curve(x, np.array([[0.15, 0.1]])), 0.2)
    'passed before n = 100'
    """
    if len(curve.x) == 0 or falls_to(curve.x, curve.mean, level) is not None:
        return None
    if curve.mean[0] <= level:
        return f"passed before n = {curve.x[0]:.0f}"
    return f"not reached at n = {curve.x[-1]:.0f}"
