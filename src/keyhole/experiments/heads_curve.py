"""Figure 4. Heads: test error against M at fixed n, beside the finite-head prediction and the kernel limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from keyhole.experiments.cells import Cell
from keyhole.experiments.jobs import read_target
from keyhole.experiments.learning_curves import MODELS
from keyhole.experiments.measured import Curve, Estimate, Results, deviation_text, read_curve, slope
from keyhole.experiments.prediction import variance
from keyhole.report.document import Chart, Row, Section, Series, State, Table, Verdict
from keyhole.theory import approximation_bound, best_ridge_curve


@dataclass(frozen=True)
class Config:
    """Sizes. Heads are nested: the first M of one draw."""

    dim: int = 8
    n_keys: int = 8
    heads: tuple[int, ...] = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    sizes: tuple[int, ...] = (512, 2048)
    targets: tuple[str, ...] = ("token^2", "corr * token")
    slope_dim: int = 4
    """The approximation error is measured at this d = N, where its decline is within reach of the samples."""
    slope_heads: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    slope_samples: int = 2048
    repetitions: int = 5
    n_test: int = 2000
    seed: int = 0

    def describe(self) -> str:
        """The settings in a sentence or two."""
        return (
            f"Our settings: sphere law, d = {self.dim}, N = {self.n_keys}; {self.repetitions} repetitions (sets and "
            "heads drawn "
            f"anew, heads nested); no label noise; {self.n_test} test sets; penalty by leave-one-out. The "
            "approximation error is "
            f"measured at d = N = {self.slope_dim} with n = {self.slope_samples}."
        )


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
"""Samples per feature from which on the error is that of approximation: what is left of estimation is a few percent."""


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    runs = [
        run
        for model in ("attention", "biased")
        for target in config.targets
        for n in config.sizes
        for heads in (config.heads, (None,))
        for run in _runs(config, model, target, n, heads)
    ]
    runs += [run for target in config.targets for run in _slope_runs(config, target)]
    return [cell for run in runs for cell in run]


def _runs(config: Config, model: str, target: str, n: int, heads: Sequence[int | None]) -> list[list[Cell]]:
    rest = (n, max(config.sizes), config.n_test, config.seed)
    return [
        [Cell(model, target, config.dim, config.n_keys, m, *rest, r) for m in sorted(heads, key=lambda m: m or 0)]
        for r in range(config.repetitions)
    ]


def _slope_runs(config: Config, target: str) -> list[list[Cell]]:
    dim, n = config.slope_dim, config.slope_samples
    return [
        [Cell("attention", target, dim, dim, m, n, n, config.n_test, config.seed, r) for m in _reach(config)]
        for r in range(config.repetitions)
    ]


def _reach(config: Config) -> list[int]:
    """Heads whose features are few enough for the samples to show their approximation error."""
    return [m for m in sorted(config.slope_heads) if PLENTY * m * (config.slope_dim + 1) <= config.slope_samples]


EXPLAINED = 0.5
"""The relative error from which on a slope is read."""

ENDLESS = 1e12
"""Samples that stand for n → ∞ in a prediction."""


@dataclass(frozen=True)
class Slopes:
    """How the approximation error falls with M on logarithmic axes: measured, predicted, and over which heads."""

    measured: Estimate
    predicted: float
    heads: list[int]

    @property
    def range(self) -> str:
        """The heads, in words."""
        return f"{self.heads[0]} … {self.heads[-1]}" if self.heads else "–"


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    charts = [_error_chart(config, results, target, n) for target in config.targets for n in sorted(config.sizes)]
    slopes = {target: _slopes(config, results, target) for target in config.targets}
    approximations = [_approximation_chart(config, results, target) for target in config.targets]
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
        note=f"Slopes on logarithmic axes, from the first M that explains half of the target to the last for which n = "
        f"{config.slope_samples} is at least {PLENTY} times the number M(d+1) of features.",
    )
    rows = [row for chart in charts for row in chart.rows]
    rows += [row for chart in approximations for row in chart.rows]
    return Section(
        "heads",
        "How many heads",
        "M random heads approximate a target with a squared error that falls like 1/M; beyond that, more heads bring "
        "a finite "
        "layer to its infinite-head kernel.",
        [*charts, *approximations, table],
        _verdict(config, results, slopes, deviation_text(rows)),
        config.describe(),
    )


def _curve(config: Config, results: Results, model: str, target: str, n: int, name: str = "error") -> Curve:
    return read_curve(results, sorted(config.heads), _runs(config, model, target, n, config.heads), name)


def _limit(config: Config, results: Results, model: str, target: str, n: int) -> Curve:
    return read_curve(results, [math.inf], _runs(config, model, target, n, (None,)))


@lru_cache(maxsize=4096)
def _predicted(target: str, dim: int, n_keys: int, n: float, heads: float) -> float:
    polynomial = read_target(target, dim)
    return float(best_ridge_curve(polynomial, n, n_keys, n_heads=heads).error) / variance(polynomial, n_keys)


def _error_chart(config: Config, results: Results, target: str, n: int) -> Chart:
    heads = sorted(config.heads)
    series: list[Series] = []
    rows: list[Row] = []
    for model in ("attention", "biased"):
        words, curve = MODELS[model], _curve(config, results, model, target, n)
        oracle, limit = _curve(config, results, model, target, n, "oracle"), _limit(config, results, model, target, n)
        series.append(curve.series(words, model))
        series.append(oracle.series(f"{words}, oracle penalty", model, "thin"))
        level = float(limit.mean[0])
        series.append(Series(f"{words}, ∞ heads", [heads[0], heads[-1]], [level, level], look="line", role=model))
        for m, mean, error, best in [
            *zip(heads, curve.mean, curve.error, oracle.mean, strict=True),
            (math.inf, level, limit.error[0], None),
        ]:
            rows.append(
                {
                    "target": target,
                    "model": words,
                    "n": n,
                    "heads": "∞" if m == math.inf else int(m),
                    "measured": float(mean),
                    "standard_error": float(error) if math.isfinite(error) else None,
                    "oracle": None if best is None else float(best),
                    "predicted": _predicted(target, config.dim, config.n_keys, n, m) if model == "attention" else None,
                }
            )
    predicted = [_predicted(target, config.dim, config.n_keys, n, m) for m in heads]
    series.insert(1, Series("attention, predicted", heads, predicted, look="dashed", role="attention"))
    return Chart(
        f"heads-{_slug(target)}-n{n}",
        f"`{target}` at n = {n}",
        "heads M",
        "relative test error",
        series,
        rows=rows,
        x_log=True,
        y_log=True,
        note="The level line is the exact kernel of infinitely many heads. Theory has no closed form for biased heads.",
    )


def _slopes(config: Config, results: Results, target: str) -> Slopes:
    """Slopes from the first M at which half of the variance is explained: before, there is nothing to fall from."""
    curve = read_curve(results, _reach(config), _slope_runs(config, target))
    first = int(np.argmax(curve.mean <= EXPLAINED)) if (curve.mean <= EXPLAINED).any() else len(curve.x)
    kept = Curve(curve.x[first:], curve.runs[:, first:])
    if len(kept.x) < 2:
        return Slopes(Estimate(None), math.nan, [])
    predicted = [_predicted(target, config.slope_dim, config.slope_dim, ENDLESS, int(m)) for m in kept.x]
    told = float(np.polyfit(np.log(kept.x), np.log(predicted), 1)[0])
    return Slopes(slope(kept, config.seed), told, [int(m) for m in kept.x])


def _approximation_chart(config: Config, results: Results, target: str) -> Chart:
    heads, dim = sorted(config.slope_heads), config.slope_dim
    polynomial = read_target(target, dim)
    spread = variance(polynomial, dim)
    curve = read_curve(results, _reach(config), _slope_runs(config, target))
    here, limit = (
        {m: _predicted(target, dim, dim, n, m) for m in heads} for n in (float(config.slope_samples), ENDLESS)
    )
    start = float(curve.mean[0])
    bounds = [approximation_bound(polynomial, m) / spread for m in heads]
    series = [
        curve.series(f"measured at n = {config.slope_samples}", "attention"),
        Series(f"predicted at n = {config.slope_samples}", heads, list(here.values()), look="dashed", role="attention"),
        Series("predicted for n → ∞", heads, list(limit.values()), look="dashed", role="prediction"),
        Series("slope of 1/M", heads, [start * heads[0] / m for m in heads], look="thin", role="oracle"),
    ]
    rows: list[Row] = [
        {
            "target": target,
            "heads": m,
            "measured": float(curve.mean[i]) if i < len(curve.x) else None,
            "predicted": here[m],
            "predicted_limit": limit[m],
            "paper_bound": bounds[i],
        }
        for i, m in enumerate(heads)
    ]
    return Chart(
        f"heads-{_slug(target)}-approximation",
        f"`{target}`: approximation error of M heads, d = N = {dim}",
        "heads M",
        "relative error",
        series,
        rows=rows,
        x_log=True,
        y_log=True,
        note=f"The theorem's bound (d² + log M) B/(δM), with constant 1 and δ = 0.05, is {bounds[0]:.2g} for M = "
        f"{heads[0]} "
        f"and {bounds[-1]:.2g} for M = {heads[-1]}: too far up to draw.",
    )


def _slug(target: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in target).strip("-").replace("---", "-")


def _verdict(config: Config, results: Results, slopes: dict[str, Slopes], deviation: str) -> Verdict:
    numbers = {
        f"slope on `{target}`, M = {found.range}": f"{found.measured.text()} (predicted {found.predicted:.2f})"
        for target, found in slopes.items()
    }
    n, most = max(config.sizes), max(config.heads)
    gaps = []
    for target in config.targets:
        finite, _ = _curve(config, results, "attention", target, n).at(most)
        gaps.append(finite / float(_limit(config, results, "attention", target, n).mean[0]))
        numbers[f"{most} heads over ∞ heads on `{target}`, n = {n}"] = f"{gaps[-1]:.2f}"
    numbers["median deviation of prediction"] = deviation
    known = [found.measured for found in slopes.values() if found.measured.value is not None]
    if not known:
        sentence = (
            "No number of heads here explains half of a target and has few enough features for n to show its slope."
        )
        return Verdict("not tested", sentence, numbers)
    values = [estimate.value or 0.0 for estimate in known]
    ends = [estimate.high if math.isfinite(estimate.high) else estimate.value or 0.0 for estimate in known]
    state: State = "holds" if max(ends) <= -1 else "partly" if max(values) <= -1 else "does not show"
    sentence = (
        f"Once half of the target is explained, the approximation error falls with slopes between {min(values):.2f} "
        "and "
        f"{max(values):.2f} in M, where the theorem's bound has −1; with {most} heads the error at n = {n} is "
        f"{min(gaps):.2f} "
        f"to {max(gaps):.2f} times that of infinitely many."
    )
    if state != "holds":
        sentence += (
            " Over the heads measured that is not steeper than −1 beyond error bars on every target; by theory it is, "
            "on all of "
            f"them, from M = {_steep_from(config)} on."
        )
    return Verdict(state, sentence, numbers)


def _steep_from(config: Config) -> int:
    """The first power of two from which doubling M more than halves every predicted approximation error."""

    def steep(target: str, m: int) -> bool:
        errors = [_predicted(target, config.slope_dim, config.slope_dim, ENDLESS, heads) for heads in (m, 2 * m)]
        return 2 * errors[1] < errors[0]

    return next(2**k for k in range(1, 40) if all(steep(target, 2**k) for target in config.targets))
