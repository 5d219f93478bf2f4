"""Figure 4.

How many heads: test error against M at fixed n, beside the finite-head prediction and the kernel
limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
        most = max(self.sizes)
        cell = Cell(model, target, self.dim, self.n_keys, None, n, most, self.n_test, self.seed, 0)
        return CellSweep.over(cell, "n_heads", sorted(self.heads), self.repetitions)

    def limit(self, model: str, target: str, n: int) -> CellSweep:
        """The same with infinitely many heads."""
        cell = self.sweep(model, target, n).cells[0]
        return CellSweep.over(cell, "n_heads", [None], self.repetitions)

    def slope_sweep(self, target: str) -> CellSweep:
        """Error against M where features are few.

        Few enough for the samples to show their approximation error.
        """
        dim, n = self.slope_dim, self.slope_samples
        heads = [m for m in sorted(self.slope_heads) if PLENTY * m * (dim + 1) <= n]
        cell = Cell("attention", target, dim, dim, None, n, n, self.n_test, self.seed, 0)
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
    asked = [
        (model, t, n)
        for model in ("attention", "biased")
        for t in config.targets
        for n in config.sizes
    ]
    sweeps = [sweep for name in asked for sweep in (config.sweep(*name), config.limit(*name))]
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
        return f"{self.heads[0]} … {self.heads[-1]}" if self.heads else "–"


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    charts = [
        _error_chart(config, results, target, n)
        for target in config.targets
        for n in sorted(config.sizes)
    ]
    charts += [_approximation_chart(config, results, target) for target in config.targets]
    slopes = {target: _slopes(config, results, target) for target in config.targets}
    table = Table(
        "heads-slopes",
        "How fast the approximation error falls with the number of heads",
        [
            {
                "target": f"`{target}`",
                "slope, measured": found.measured.text(),
                "slope, predicted": f"{found.predicted:.2f}",
                "slope of the theorem": "-1",
                "heads": found.range,
            }
            for target, found in slopes.items()
        ],
        note=(
            "Slopes on logarithmic axes, from the first M that explains half of the target to the "
            f"last for which n = {config.slope_samples} is at least {PLENTY} times the number "
            "M(d+1) of features."
        ),
    )
    return Section(
        "head-count",
        "How many heads",
        "M random heads approximate a target with a squared error that falls like 1/M; beyond "
        "that, more heads bring a finite layer to its infinite-head kernel.",
        [*charts, table],
        _verdict(
            config, results, slopes, deviation_text([row for chart in charts for row in chart.rows])
        ),
        config.describe(),
    )


def _error_chart(config: Config, results: Results, target: str, n: int) -> Chart:
    heads = sorted(config.heads)
    series: list[Series] = []
    rows: list[Row] = []
    for model in ("attention", "biased"):
        words, sweep = MODELS[model], config.sweep(model, target, n)
        curve, oracle = sweep.curve(results), sweep.curve(results, "oracle")
        limit = config.limit(model, target, n).curve(results)
        series.append(curve.series(words, model))
        asked = {
            m: predicted_error(target, config.dim, config.n_keys, n, m, model)
            for m in (*heads, math.inf)
        }
        known = {m: error for m, error in asked.items() if error is not None}
        told = [known.get(m, math.nan) for m in heads]
        series.append(Series(f"{words}, predicted", heads, told, look="dashed", role=model))
        series.append(oracle.series(f"{words}, oracle penalty", model, "thin"))
        ends, level = [heads[0], heads[-1]], float(limit.mean[0])
        series.append(Series(f"{words}, ∞ heads", ends, [level, level], look="line", role=model))
        common: Row = {"target": target, "model": words, "n": n}
        rows += [*curve.rows("heads", common, known, oracle), *limit.rows("heads", common, known)]
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
    first = (
        int(np.argmax(curve.mean <= EXPLAINED)) if (curve.mean <= EXPLAINED).any() else len(curve.x)
    )
    kept = Curve(curve.x[first:], curve.runs[:, first:])
    if len(kept.x) < 2:
        return Slopes(Estimate(None), math.nan, [])
    predicted = [_approximation(config, target, int(m)) for m in kept.x]
    told = float(np.polyfit(np.log(kept.x), np.log(predicted), 1)[0])
    return Slopes(slope(kept, config.seed), told, [int(m) for m in kept.x])


def _approximation(config: Config, target: str, heads: int, n: float = ENDLESS) -> float:
    error = predicted_error(target, config.slope_dim, config.slope_dim, n, heads)
    return math.nan if error is None else error


def _approximation_chart(config: Config, results: Results, target: str) -> Chart:
    heads, dim, n = sorted(config.slope_heads), config.slope_dim, config.slope_samples
    polynomial = read_target(target, dim)
    curve = config.slope_sweep(target).curve(results)
    here, limit = (
        [_approximation(config, target, m, size) for m in heads] for size in (n, ENDLESS)
    )
    bounds = [approximation_bound(polynomial, m) / target_variance(polynomial, dim) for m in heads]
    start = float(curve.mean[0])
    series = [
        curve.series(f"measured at n = {n}", "attention"),
        Series(f"predicted at n = {n}", heads, here, look="dashed", role="attention"),
        Series("predicted for n → ∞", heads, limit, look="dashed", role="prediction"),
        Series(
            "slope of 1/M", heads, [start * heads[0] / m for m in heads], look="thin", role="oracle"
        ),
    ]
    rows: list[Row] = [
        {
            "target": target,
            "heads": m,
            "measured": float(curve.mean[i]) if i < len(curve.x) else None,
            "predicted": here[i],
            "predicted_limit": limit[i],
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
    return "".join(c if c.isalnum() else "-" for c in target).strip("-").replace("---", "-")


def _verdict(
    config: Config, results: Results, slopes: dict[str, Slopes], deviation: str
) -> Verdict:
    numbers = {
        f"slope on `{target}`, M = {found.range}": (
            f"{found.measured.text()} (predicted {found.predicted:.2f})"
        )
        for target, found in slopes.items()
    }
    n, most = max(config.sizes), max(config.heads)
    gaps = []
    for target in config.targets:
        finite, _ = config.sweep("attention", target, n).curve(results).at(most)
        gaps.append(finite / float(config.limit("attention", target, n).curve(results).mean[0]))
        numbers[f"{most} heads over ∞ heads on `{target}`, n = {n}"] = f"{gaps[-1]:.2f}"
    numbers[DEVIATION] = deviation
    known = [found.measured for found in slopes.values() if found.measured.value is not None]
    if not known:
        sentence = (
            "No number of heads here explains half of a target and has few enough features for n "
            "to show its slope."
        )
        return Verdict("not tested", sentence, numbers)
    values = [estimate.value or 0.0 for estimate in known]
    shallowest = max(estimate.upper for estimate in known)
    state: State = (
        "holds" if shallowest <= -1 else "partly" if max(values) <= -1 else "does not show"
    )
    sentence = (
        "Once half of the target is explained, the approximation error falls with slopes between "
        f"{min(values):.2f} and {max(values):.2f} in M, where the theorem's bound has −1; with "
        f"{most} heads the error at n = {n} is {min(gaps):.2f} to {max(gaps):.2f} times that of "
        "infinitely many."
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

    def steep(target: str, m: int) -> bool:
        return 2 * _approximation(config, target, 2 * m) < _approximation(config, target, m)

    return next(2**k for k in range(1, 40) if all(steep(target, 2**k) for target in config.targets))
