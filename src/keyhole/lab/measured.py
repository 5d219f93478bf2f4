"""From finished cells to curves with error bars.

Means over repetitions, crossings, and how sure they are.

Nothing here fits a model; it reads results and does arithmetic on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Float
from scipy.special import stdtrit

from keyhole.lab.cells import Cell, Values
from keyhole.lab.report.document import Chart, Look, Row, Series, bars

Results = Mapping[Cell, Values]
Entry = TypeVar("Entry")

RESAMPLES = 400  # draws of repetitions behind an uncertainty
log_chart = partial(Chart, x_log=True, y_log=True)  # a chart with logarithmic axes


@dataclass(frozen=True)
class CellSweep:
    """Cells along an axis: ``runs[r]`` are those of repetition r, for the first points of ``x``."""

    x: tuple[float, ...]
    runs: tuple[tuple[Cell, ...], ...]

    @classmethod
    def over(cls, cell: Cell, field: str, values: Sequence[Any], repetitions: int) -> CellSweep:
        """A cell with each of the values in one of its fields, in every repetition."""
        runs = []
        for repetition in range(repetitions):
            run = [_with(cell, field, value, repetition) for value in values]
            runs.append(tuple(run))
        # None stands for infinitely many heads
        x = tuple(math.inf if value is None else value for value in values)
        return cls(x=x, runs=tuple(runs))

    @property
    def cells(self) -> list[Cell]:
        """All of them."""
        return [cell for run in self.runs for cell in run]

    def curve(self, results: Results, name: str = "error") -> Curve:
        """One value of the cells as a curve."""
        table = np.full((len(self.runs), len(self.x)), np.nan)
        for row, cells in zip(table, self.runs, strict=True):
            row[: len(cells)] = [value_of(results, cell, name) for cell in cells]
        return Curve(np.array(self.x, dtype=np.float64), table)


def _with(cell: Cell, field: str, value: Any, repetition: int) -> Cell:
    """A repetition of a cell with another number of samples or of heads."""
    if field == "n_samples":
        return replace(cell, repetition=repetition, n_samples=value)
    if field == "n_heads":
        return replace(cell, repetition=repetition, n_heads=value)
    raise ValueError(f"a sweep goes over n_samples or n_heads: got {field!r}.")


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

    def at(self, x: float) -> tuple[float, float]:
        """Mean and standard error at one of the points."""
        i = int(np.flatnonzero(self.x == x)[0])
        return float(self.mean[i]), float(self.error[i])

    def series(self, name: str, role: str, look: Look = "points") -> Series:
        """To be drawn: bars of one standard error where there are several repetitions."""
        x = self.x.tolist()
        mean = self.mean.tolist()
        errors = np.nan_to_num(self.error)
        if look == "points" and errors.any():
            return bars(name, x, mean, errors.tolist(), role)
        return Series(name, x, mean, look=look, role=role)

    def rows(
        self,
        axis: str,
        common: Row,
        predicted: Mapping[int, Any] | Mapping[float, Any],
        oracle: Curve | None = None,
    ) -> list[Row]:
        """One row per point.

        What is common to all, where it is, and what was measured and predicted there.
        """
        rows: list[Row] = []
        means = self.mean
        errors = self.error
        repetitions = np.isfinite(self.runs).sum(axis=0)
        for i, x in enumerate(self.x.tolist()):
            error = float(errors[i])
            rows.append(
                {
                    **common,
                    axis: "∞" if math.isinf(x) else int(x),
                    "measured": float(means[i]),
                    "standard_error": error if math.isfinite(error) else None,
                    "repetitions": int(repetitions[i]),
                    "oracle": None if oracle is None else float(oracle.mean[i]),
                    "predicted": predicted.get(x),
                }
            )
        return rows


def value_of(results: Results, cell: Cell, name: str = "error") -> float:
    """One value of a cell; a ValueError if it has none of that name."""
    values = results[cell]
    if name not in values:
        raise ValueError(
            f"a result of {cell.learner!r} must have {name!r}: one in the store has "
            f"{', '.join(values) or 'nothing'}. The store was changed by others: move it away, or "
            "choose another folder with --out."
        )
    return values[name]


def _mean(runs: np.ndarray) -> np.ndarray:
    """Mean over repetitions, NaN where no repetition has the point."""
    is_measured = np.isfinite(runs)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(is_measured, runs, 0.0).sum(axis=0) / is_measured.sum(axis=0))


@dataclass(frozen=True)
class Estimate:
    """A number with its uncertainty; ``value`` is None where it lies beyond what was measured."""

    value: float | None
    spread: float = 0.0  # standard error
    # ends of a 95 % interval by Student's distribution, whose tails say how few repetitions there
    # are
    low: float = math.nan
    high: float = math.nan

    @property
    def lower(self) -> float:
        """What it surely exceeds: the end of the interval, −∞ where there is none.

        One repetition has no interval. It is the least certain case and proves nothing.
        """
        return -math.inf if math.isnan(self.low) else self.low

    @property
    def upper(self) -> float:
        """What it surely stays below: the end of the interval, ∞ where there is none."""
        return math.inf if math.isnan(self.high) else self.high

    def text(self, digits: int = 3, missing: str = "–") -> str:
        """Value ± standard error, or what stands for a missing one.

        >>> Estimate(674.2, 12.34).text(), Estimate(1.01234, 0.0012).text(), Estimate(None).text()
        ('674 ± 12', '1.012 ± 0.001', '–')
        """
        # without a value, without an error, or without decimals to count
        if self.value is None:
            return missing
        if not math.isfinite(self.spread):
            return f"{self.value:.{digits}g}"
        if self.value == 0 or not math.isfinite(self.value):
            return f"{self.value:g} ± {self.spread:.2g}"

        # as many decimals as the value has digits, or as the first digit of its error needs:
        # an error that rounds to zero says nothing
        places = max(0, digits - 1 - math.floor(math.log10(abs(self.value))))
        if self.spread > 0:
            first_digit = -math.floor(math.log10(self.spread))
            places = min(max(places, first_digit), 6)
        return f"{self.value:.{places}f} ± {self.spread:.{places}f}"


def count_text(count: int | None) -> str:
    """A whole number, or a dash.

    >>> count_text(12345), count_text(None)
    ('12,345', '–')
    """
    return "–" if count is None else f"{count:,}"


def series_from_rows(
    rows: Sequence[Row],
    x: str,
    y: str,
    name: str,
    look: Look = "points",
    role: str = "",
    error: str = "",
) -> Series:
    """A curve through the rows that have both columns.

    With bars where there is a column of errors.
    """
    complete = [row for row in rows if row[x] is not None and row[y] is not None]
    x_values = [float(row[x] or 0) for row in complete]
    y_values = [float(row[y] or 0) for row in complete]
    if error:
        errors = [float(row[error] or 0) for row in complete]
        return bars(name, x_values, y_values, errors, role)
    return Series(name, x_values, y_values, look=look, role=role)


def resample(
    statistic: Callable[[list[np.ndarray]], float | None], tables: Sequence[np.ndarray], seed: int
) -> Estimate:
    """A statistic of tables (repetitions, points), and how it varies.

    Whole repetitions are drawn with replacement.

    All tables are resampled alike, because their repetitions share their sets. Repetitions that
    reach equally far are drawn among each other, so that every point stays measured. A resampled
    mean of r varies by (r−1)/r of the true variance, which is put right.
    """
    value = statistic(list(tables))
    if value is None:
        return Estimate(None)

    # strata: the repetitions that have equally many points
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

    # one repetition does not vary, and a statistic that often does not exist has no spread
    smallest = min(len(stratum) for stratum in strata)
    if smallest < 2 or len(draws) < RESAMPLES // 2:
        return Estimate(value, math.nan)

    # the standard error, corrected by r/(r−1), and a 95 % interval by Student's distribution
    spread = float(np.std(draws)) * math.sqrt(smallest / (smallest - 1))
    freedom = sum(len(stratum) - 1 for stratum in strata)
    reach = float(stdtrit(freedom, 0.975)) * spread
    return Estimate(value=value, spread=spread, low=value - reach, high=value + reach)


def falls_to(x: np.ndarray, y: np.ndarray, level: float) -> float | None:
    """Where a curve first falls to a level, on logarithmic axes between points.

    None if it does not.

    >>> round(falls_to(np.array([100.0, 200.0, 400.0]), np.array([0.4, 0.2, 0.1]), 0.2), 6)
    200.0
    """
    is_measured = np.isfinite(y)
    x = x[is_measured]
    y = y[is_measured]
    below = np.flatnonzero(y <= level)
    if len(below) == 0 or below[0] == 0:
        return None

    # straight between the last point above the level and the first one below
    i = int(below[0])
    log_x_above = math.log(x[i - 1])
    log_x_below = math.log(x[i])
    log_y_above = math.log(y[i - 1])
    log_y_below = math.log(max(y[i], 1e-300))
    share = (log_y_above - math.log(level)) / (log_y_above - log_y_below)
    return float(math.exp(log_x_above + share * (log_x_below - log_x_above)))


def rises_through(x: np.ndarray, y: np.ndarray, level: float) -> float | None:
    """Where a curve first rises through a level, on plain axes; None if it does not.

    >>> round(rises_through(np.array([0.0, 0.5, 1.0]), np.array([0.5, 0.9, 1.1]), 1.0), 6)
    0.75
    """
    above = np.flatnonzero(y > level)
    if len(above) == 0 or above[0] == 0:
        return None
    i = int(above[0])
    share = (level - y[i - 1]) / (y[i] - y[i - 1])
    return float(x[i - 1] + share * (x[i] - x[i - 1]))


def samples_measured(curve: Curve, level: float, seed: int = 0) -> Estimate:
    """The number of samples at which the mean error falls to a level."""
    return resample(lambda tables: falls_to(curve.x, _mean(tables[0]), level), [curve.runs], seed)


def samples_row(
    sweep: CellSweep, results: Results, level: float, seed: int
) -> dict[str, float | None]:
    """Samples measured at a level, their standard error, and the samples of the oracle.

    None what is not known.
    """
    samples = Estimate(None)
    oracle = Estimate(None)
    if sweep.x:
        samples = samples_measured(sweep.curve(results, "error"), level, seed)
        oracle = samples_measured(sweep.curve(results, "oracle"), level, seed)
    standard_error = None
    if samples.value is not None and math.isfinite(samples.spread):
        standard_error = samples.spread
    return {
        "measured": samples.value,
        "standard_error": standard_error,
        "oracle": oracle.value,
    }


def missed_window(curve: Curve, level: float) -> str | None:
    """Where a curve that was run around a prediction does not fall to the level.

    None where it does; else a sentence's end: by all sizes run the prediction is wrong.

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


def samples_text(row: Row, missing: str = "–") -> dict[str, Any]:
    """The same beside the prediction, for a table."""
    samples = Estimate(None)
    if row["measured"] is not None:
        samples = Estimate(float(row["measured"]), float(row["standard_error"] or math.nan))
    predicted = row["predicted"]
    return {
        "d": row["d"],
        "N": row["N"],
        "n, measured": samples.text(missing=missing),
        "n, predicted": count_text(None if predicted is None else int(predicted)),
    }


def apart(series: Series) -> Series:
    """The points with missing values between them.

    So that no line joins what has nothing to do with each other.
    """
    return replace(
        series,
        x=_interleaved(series.x, math.nan),
        y=_interleaved(series.y, math.nan),
        low=None if series.low is None else _interleaved(series.low, math.nan),
        high=None if series.high is None else _interleaved(series.high, math.nan),
        hover=None if series.hover is None else _interleaved(series.hover, ""),
    )


def _interleaved(values: Sequence[Entry], between: Entry) -> list[Entry]:
    """The values with another one between every two of them."""
    entries: list[Entry] = []
    for value in values:
        entries += [value, between]
    return entries[:-1]


def ratio_at(upper: Curve, lower: Curve, x: float, seed: int = 0) -> Estimate:
    """Ratio of two mean errors at one point, over the same repetitions."""

    def statistic(tables: list[np.ndarray]) -> float:
        return float(_mean(tables[0])[0] / _mean(tables[1])[0])

    i = int(np.flatnonzero(upper.x == x)[0])
    in_both = np.isfinite(upper.runs[:, i]) & np.isfinite(lower.runs[:, i])
    tables = [upper.runs[in_both, i : i + 1], lower.runs[in_both, i : i + 1]]
    return resample(statistic, tables, seed)


def quotient(upper: Estimate, lower: Estimate) -> Estimate:
    """The quotient of two independent estimates, with an interval of two standard errors."""
    if upper.value is None or lower.value is None:
        return Estimate(None)
    # relative errors add up in squares
    ratio = upper.value / lower.value
    spread = ratio * math.hypot(upper.spread / upper.value, lower.spread / lower.value)
    return Estimate(value=ratio, spread=spread, low=ratio - 2 * spread, high=ratio + 2 * spread)


def samples_ratio(upper: Curve, lower: Curve, level: float, seed: int = 0) -> Estimate:
    """How many times the samples of one model another needs for the same error.

    Over the same repetitions.
    """

    def statistic(tables: list[np.ndarray]) -> float | None:
        upper_samples = falls_to(upper.x, _mean(tables[0]), level)
        lower_samples = falls_to(lower.x, _mean(tables[1]), level)
        if not upper_samples or not lower_samples:
            return None
        return upper_samples / lower_samples

    return resample(statistic, [upper.runs, lower.runs], seed)


def slope(curve: Curve, seed: int = 0) -> Estimate:
    """Slope of the mean on logarithmic axes, by least squares."""

    def statistic(tables: list[np.ndarray]) -> float | None:
        mean = _mean(tables[0])
        if len(mean) < 2 or not (mean > 0).all():
            return None
        return float(np.polyfit(np.log(curve.x), np.log(mean), 1)[0])

    return resample(statistic, [curve.runs], seed)


def deviation_text(rows: Sequence[Row]) -> str:
    """Median of |predicted/measured − 1| over rows that have both, with their number.

    >>> deviation_text([{"predicted": 1.1, "measured": 1.0}, {"predicted": None, "measured": 1.0}])
    '10.0 % (1 points)'
    """
    deviations = []
    for row in rows:
        predicted = row.get("predicted")
        measured = row.get("measured")
        if predicted is not None and measured is not None:
            deviations.append(abs(float(predicted) / float(measured) - 1))
    if not deviations:
        return "no prediction"
    return f"{100 * float(np.median(deviations)):.1f} % ({len(deviations)} points)"
