"""Figure 4.

How many heads: test error against M at fixed n, beside the finite-head prediction and the kernel
limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import DEVIATION, MODELS, predicted_error
from keyhole.lab.jobs import read_target, target_variance
from keyhole.lab.measured import (
    CellSweep,
    Curve,
    Estimate,
    Results,
    deviation_text,
    log_chart,
    slope,
)
from keyhole.lab.report.document import Chart, Row, Section, Series, State, Table, Verdict
from keyhole.theory.bounds import approximation_bound


@dataclass(frozen=True)
class Config:
    """Sizes. Heads are nested: the first M of one draw."""

    dim: int = 8
    n_keys: int = 8
    heads: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    sizes: tuple[int, ...] = (512, 2048)
    targets: tuple[str, ...] = ("token^2", "corr * token")
    slope_dim: int = 4
    """The approximation error is measured at this d = N, where its decline is within reach of the
    samples.
    """
    slope_heads: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    slope_samples: int = 2048
    repetitions: int = 5
    n_test: int = 2000
    seed: int = 0

    def describe(self) -> str:
        """The settings in a sentence or two."""
        return (
            f"Our settings: sphere distribution, d = {self.dim}, N = {self.n_keys}; "
            f"{self.repetitions} repetitions (sets and heads drawn anew, heads nested); no label "
            f"noise; {self.n_test} test sets; penalty by leave-one-out. The approximation error is "
            f"measured at d = N = {self.slope_dim} with n = {self.slope_samples}."
        )

    def sweep(self, model: str, target: str, n: int) -> CellSweep:
        """Error against M at one n."""
        cell = Cell(
            model=model,
            target=target,
            dim=self.dim,
            n_keys=self.n_keys,
            n_heads=None,
            n_samples=n,
            most_samples=max(self.sizes),
            n_test=self.n_test,
            seed=self.seed,
            repetition=0,
        )
        return CellSweep.over(cell, "n_heads", sorted(self.heads), self.repetitions)

    def limit(self, model: str, target: str, n: int) -> CellSweep:
        """The same with infinitely many heads."""
        cell = self.sweep(model, target, n).cells[0]
        return CellSweep.over(cell, "n_heads", [None], self.repetitions)

    def slope_sweep(self, target: str) -> CellSweep:
        """Error against M where features are few.

        Few enough for the samples to show their approximation error.
        """
        n = self.slope_samples
        n_features = self.slope_dim + 1  # of a head
        heads = [m for m in sorted(self.slope_heads) if PLENTY * m * n_features <= n]
        cell = Cell(
            model="attention",
            target=target,
            dim=self.slope_dim,
            n_keys=self.slope_dim,
            n_heads=None,
            n_samples=n,
            most_samples=n,
            n_test=self.n_test,
            seed=self.seed,
            repetition=0,
        )
        return CellSweep.over(cell, "n_heads", heads, self.repetitions)


PRESETS = {
    "quick": Config(
        heads=(4, 8, 16, 32, 64, 128, 256, 512),
        sizes=(256, 1024),
        slope_samples=1280,
        repetitions=4,
        n_test=1000,
    ),
    "full": Config(),
}

PLENTY = 4
"""Samples per feature from which on the error is that of approximation: what is left of estimation
is a few percent.
"""
EXPLAINED = 0.5
"""The relative error from which on a slope is read."""
ENDLESS = 1e12
"""Samples that stand for n → ∞ in a prediction."""


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    sweeps = []
    for model, target, n in product(("attention", "biased"), config.targets, config.sizes):
        sweeps.append(config.sweep(model, target, n))
        sweeps.append(config.limit(model, target, n))
    sweeps += [config.slope_sweep(target) for target in config.targets]
    return [cell for sweep in sweeps for cell in sweep.cells]


@dataclass(frozen=True)
class Slopes:
    """How the approximation error falls with M on logarithmic axes.

    Measured, predicted, and over which heads.
    """

    measured: Estimate
    predicted: float
    heads: list[int]

    @property
    def range(self) -> str:
        """The heads, in words."""
        if not self.heads:
            return "–"
        return f"{self.heads[0]} … {self.heads[-1]}"


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    # errors of every target and size, then approximation errors of every target
    charts = []
    for target, n in product(config.targets, sorted(config.sizes)):
        charts.append(_error_chart(config, results, target, n))
    charts += [_approximation_chart(config, results, target) for target in config.targets]

    slopes = {target: _slopes(config, results, target) for target in config.targets}
    slope_rows: list[Row] = [
        {
            "target": f"`{target}`",
            "slope, measured": target_slopes.measured.text(),
            "slope, predicted": f"{target_slopes.predicted:.2f}",
            "slope of the theorem": "-1",
            "heads": target_slopes.range,
        }
        for target, target_slopes in slopes.items()
    ]
    table = Table(
        name="heads-slopes",
        title="How fast the approximation error falls with the number of heads",
        rows=slope_rows,
        note=(
            "Slopes on logarithmic axes, from the first M that explains half of the target to the "
            f"last for which n = {config.slope_samples} is at least {PLENTY} times the number "
            "M(d+1) of features."
        ),
    )
    deviation = deviation_text([row for chart in charts for row in chart.rows])
    return Section(
        slug="head-count",
        title="How many heads",
        claim=(
            "M random heads approximate a target with a squared error that falls like 1/M; beyond "
            "that, more heads bring a finite layer to its infinite-head kernel."
        ),
        blocks=[*charts, table],
        verdict=_verdict(config, results, slopes, deviation),
        settings=config.describe(),
    )


def _error_chart(config: Config, results: Results, target: str, n: int) -> Chart:
    """Error against M at one n, for zero-mean and biased heads."""
    heads = sorted(config.heads)
    series: list[Series] = []
    rows: list[Row] = []
    for model in ("attention", "biased"):
        words = MODELS[model]
        sweep = config.sweep(model, target, n)
        curve = sweep.curve(results)
        oracle = sweep.curve(results, "oracle")
        limit = config.limit(model, target, n).curve(results)

        # what theory predicts, where its spectrum is fine enough
        predicted: dict[float, float] = {}
        for m in (*heads, math.inf):
            error = predicted_error(target, config.dim, config.n_keys, n, m, model)
            if error is not None:
                predicted[m] = error
        predicted_line = [predicted.get(m, math.nan) for m in heads]

        # measured, predicted, with the oracle's penalty, and the level of infinitely many heads
        ends = [heads[0], heads[-1]]
        level = float(limit.mean[0])
        series += [
            curve.series(words, model),
            Series(f"{words}, predicted", heads, predicted_line, look="dashed", role=model),
            oracle.series(f"{words}, oracle penalty", model, "thin"),
            Series(f"{words}, ∞ heads", ends, [level, level], look="line", role=model),
        ]
        common: Row = {"target": target, "model": words, "n": n}
        rows += curve.rows("heads", common, predicted, oracle)
        rows += limit.rows("heads", common, predicted)
    return log_chart(
        f"heads-{_slug(target)}-n{n}",
        f"`{target}` at n = {n}",
        "heads M",
        "relative test error",
        series,
        rows=rows,
        note="The level line is the exact kernel of infinitely many heads. Dashed: theory.",
    )


def _slopes(config: Config, results: Results, target: str) -> Slopes:
    """Slopes from the first M at which half of the variance is explained.

    Before, there is nothing to fall from.
    """
    curve = config.slope_sweep(target).curve(results)
    is_explained = curve.mean <= EXPLAINED
    first = len(curve.x)
    if is_explained.any():
        first = int(np.argmax(is_explained))
    tail = Curve(curve.x[first:], curve.runs[:, first:])
    if len(tail.x) < 2:
        return Slopes(measured=Estimate(None), predicted=math.nan, heads=[])
    heads = [int(m) for m in tail.x]
    errors = [_approximation(config, target, m) for m in heads]
    predicted = float(np.polyfit(np.log(tail.x), np.log(errors), 1)[0])
    return Slopes(measured=slope(tail, config.seed), predicted=predicted, heads=heads)


def _approximation(config: Config, target: str, heads: int, n: float = ENDLESS) -> float:
    """Predicted error of M heads, for n → ∞ that of approximation; NaN where theory has none."""
    error = predicted_error(target, config.slope_dim, config.slope_dim, n, heads)
    if error is None:
        return math.nan
    return error


def _approximation_chart(config: Config, results: Results, target: str) -> Chart:
    """The approximation error against M: measured, predicted, and the slope of the theorem."""
    heads = sorted(config.slope_heads)
    dim = config.slope_dim
    n = config.slope_samples
    polynomial = read_target(target, dim)
    variance = target_variance(polynomial, dim)

    curve = config.slope_sweep(target).curve(results)
    predicted = [_approximation(config, target, m, n) for m in heads]
    predicted_limit = [_approximation(config, target, m) for m in heads]
    bounds = [approximation_bound(polynomial, m) / variance for m in heads]
    start = float(curve.mean[0])
    one_over_heads = [start * heads[0] / m for m in heads]
    series = [
        curve.series(f"measured at n = {n}", "attention"),
        Series(f"predicted at n = {n}", heads, predicted, look="dashed", role="attention"),
        Series("predicted for n → ∞", heads, predicted_limit, look="dashed", role="prediction"),
        Series("slope of 1/M", heads, one_over_heads, look="thin", role="oracle"),
    ]
    rows: list[Row] = [
        {
            "target": target,
            "heads": m,
            "measured": float(curve.mean[i]) if i < len(curve.x) else None,
            "predicted": predicted[i],
            "predicted_limit": predicted_limit[i],
            "paper_bound": bounds[i],
        }
        for i, m in enumerate(heads)
    ]
    return log_chart(
        f"heads-{_slug(target)}-approximation",
        f"`{target}`: approximation error of M heads, d = N = {dim}",
        "heads M",
        "relative error",
        series,
        rows=rows,
        note=(
            "The theorem's bound (d² + log M) B/(δM), with constant 1 and δ = 0.05, is "
            f"{bounds[0]:.2g} for M = {heads[0]} and {bounds[-1]:.2g} for M = {heads[-1]}: too far "
            "up to draw."
        ),
    )


def _slug(target: str) -> str:
    """A target as part of a file's name."""
    return "".join(c if c.isalnum() else "-" for c in target).strip("-").replace("---", "-")


def _verdict(
    config: Config, results: Results, slopes: dict[str, Slopes], deviation: str
) -> Verdict:
    """The claim holds where every slope is −1 or steeper by its whole interval."""
    # the numbers: slopes, and how near the largest number of heads comes to infinitely many
    numbers = {}
    for target, target_slopes in slopes.items():
        numbers[f"slope on `{target}`, M = {target_slopes.range}"] = (
            f"{target_slopes.measured.text()} (predicted {target_slopes.predicted:.2f})"
        )
    n = max(config.sizes)
    most = max(config.heads)
    ratios = []
    for target in config.targets:
        finite, _ = config.sweep("attention", target, n).curve(results).at(most)
        infinite = float(config.limit("attention", target, n).curve(results).mean[0])
        ratios.append(finite / infinite)
        numbers[f"{most} heads over ∞ heads on `{target}`, n = {n}"] = f"{ratios[-1]:.2f}"
    numbers[DEVIATION] = deviation

    # the state
    estimates = [item.measured for item in slopes.values() if item.measured.value is not None]
    if not estimates:
        sentence = (
            "No number of heads here explains half of a target and has few enough features for n "
            "to show its slope."
        )
        return Verdict("not tested", sentence, numbers)
    values = [estimate.value or 0.0 for estimate in estimates]
    shallowest = max(estimate.upper for estimate in estimates)
    state: State
    if shallowest <= -1:
        state = "holds"
    elif max(values) <= -1:
        state = "partly"
    else:
        state = "does not show"

    # the sentence
    sentence = (
        "Once half of the target is explained, the approximation error falls with slopes between "
        f"{min(values):.2f} and {max(values):.2f} in M, where the theorem's bound has −1; with "
        f"{most} heads the error at n = {n} is {min(ratios):.2f} to {max(ratios):.2f} times that "
        "of infinitely many."
    )
    if state != "holds":
        sentence += (
            " Over the heads measured that is not steeper than −1 beyond error bars on every "
            f"target; by theory it is, on all of them, from M = {_steep_from(config)} on."
        )
    return Verdict(state, sentence, numbers)


def _steep_from(config: Config) -> int:
    """The first power of two from which on doubling M pays.

    It more than halves every predicted approximation error.
    """

    def is_steep(target: str, m: int) -> bool:
        return 2 * _approximation(config, target, 2 * m) < _approximation(config, target, m)

    powers = (2**k for k in range(1, 40))
    return next(m for m in powers if all(is_steep(target, m) for target in config.targets))
