"""Figure 4.

How many heads: test error against M at fixed n, beside the finite-head prediction and the kernel
limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from keyhole.lab.cells import Cell, RidgeCell, Row, read_target, target_variance
from keyhole.lab.curves import (
    DEVIATION,
    MODELS,
    Curve,
    Estimate,
    below,
    curve_of,
    curve_rows,
    deviation_text,
    slope,
    state_of,
)
from keyhole.lab.predictions import predicted_error
from keyhole.lab.report.document import Chart, Section, Series, Verdict
from keyhole.theory.bounds import approximation_bound

PLENTY = 4
"""Samples per feature from which on the error is that of approximation: what is left of estimation
is a few percent."""

EXPLAINED = 0.5
"""The relative error from which on a slope is read."""

ENDLESS = 1e12
"""Samples that stand for n → ∞ in a prediction."""

RULE = (
    "The number is the slope of the approximation error against M on logarithmic axes, from the "
    "first M that explains half of the target. Holds if its 95 % interval ends at −1 or below for "
    "every target; partly if for some; not sure if intervals have −1 inside and none ends below."
)


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
    samples."""
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

    @property
    def slope_counts(self) -> tuple[int, ...]:
        """Heads with few enough features for the samples to show their approximation error."""
        n_features = self.slope_dim + 1  # of a head
        return tuple(
            m for m in sorted(self.slope_heads) if PLENTY * m * n_features <= self.slope_samples
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


def cells(config: Config) -> list[Cell]:
    """What has to be measured."""
    cells: list[Cell] = []
    for repetition in range(config.repetitions):
        for model in ("attention", "biased"):
            for heads in (tuple(sorted(config.heads)), (None,)):
                cells.append(
                    RidgeCell(
                        model=model,
                        targets=config.targets,
                        dim=config.dim,
                        n_keys=config.n_keys,
                        heads=heads,
                        sizes=tuple(sorted(config.sizes)),
                        n_test=config.n_test,
                        seed=config.seed,
                        repetition=repetition,
                    )
                )
        cells.append(
            RidgeCell(
                model="attention",
                targets=config.targets,
                dim=config.slope_dim,
                n_keys=config.slope_dim,
                heads=config.slope_counts,
                sizes=(config.slope_samples,),
                n_test=config.n_test,
                seed=config.seed,
                repetition=repetition,
            )
        )
    return cells


@dataclass(frozen=True)
class Slopes:
    """How the approximation error falls with M: measured, predicted, and over which heads."""

    measured: Estimate
    predicted: float
    heads: list[int]

    @property
    def range(self) -> str:
        """The heads, in words."""
        return f"{self.heads[0]} … {self.heads[-1]}" if self.heads else "–"


def section(config: Config, rows: Sequence[Row]) -> Section:
    """The figure and its verdict."""
    # errors of every target and size, then approximation errors of every target
    charts = [
        _error_chart(config, rows, target, n)
        for target, n in product(config.targets, sorted(config.sizes))
    ]
    charts += [_approximation_chart(config, rows, target) for target in config.targets]
    slopes = {target: _slopes(config, rows, target) for target in config.targets}
    deviation = deviation_text([row for chart in charts for row in chart.rows])
    return Section(
        slug="head-count",
        title="How many heads",
        claim=(
            "M random heads approximate a target with a squared error that falls like 1/M; beyond "
            "that, more heads bring a finite layer to its infinite-head kernel."
        ),
        blocks=charts,
        verdict=verdict(config, rows, slopes, deviation),
        settings=config.describe(),
        rule=RULE,
    )


def _curve(config: Config, rows: Sequence[Row], target: str, n: int, model: str) -> Curve:
    """Error against M at one n."""
    finite = [row for row in _of_errors(config, rows) if row["M"] is not None]
    return curve_of(finite, "M", model=model, target=target, n=n)


def _limit(config: Config, rows: Sequence[Row], target: str, n: int, model: str) -> Curve:
    """Error of infinitely many heads at one n."""
    return curve_of(_of_errors(config, rows), "n", model=model, target=target, n=n, M=None)


def _of_errors(config: Config, rows: Sequence[Row]) -> list[Row]:
    """The rows of errors at fixed n, without those of the approximation error."""
    draw = (config.dim, config.n_keys, max(config.sizes))
    return [row for row in rows if (row["d"], row["N"], row["most"]) == draw]


def _approximation_curve(config: Config, rows: Sequence[Row], target: str) -> Curve:
    """Error against M where samples are plenty."""
    n = config.slope_samples
    draw = (config.slope_dim, config.slope_dim, n)
    plenty = [
        row
        for row in rows
        if (row["d"], row["N"], row["most"]) == draw and row["M"] in config.slope_counts
    ]
    return curve_of(plenty, "M", model="attention", target=target, n=n)


def _error_chart(config: Config, rows: Sequence[Row], target: str, n: int) -> Chart:
    """Error against M at one n, for zero-mean and biased heads."""
    heads = sorted(config.heads)
    series: list[Series] = []
    table: list[Row] = []
    for model in ("attention", "biased"):
        words = MODELS[model]
        curve = _curve(config, rows, target, n, model)
        level = float(_limit(config, rows, target, n, model).mean[0])
        predicted = {
            m: predicted_error(target, config.dim, config.n_keys, n, m, model) for m in heads
        }
        line = [math.nan if predicted[m] is None else predicted[m] or 0.0 for m in heads]
        series += [
            curve.series(words, model),
            Series(f"{words}, predicted", heads, line, look="dashed", role=model),
            Series(
                f"{words}, ∞ heads", [heads[0], heads[-1]], [level, level], look="line", role=model
            ),
        ]
        common: Row = {"target": target, "model": words, "n": n}
        table += curve_rows(curve, "heads", common, dict(predicted.items()))
        table.append(
            {
                **common,
                "heads": "∞",
                "measured": level,
                "predicted": predicted_error(target, config.dim, config.n_keys, n, math.inf, model),
            }
        )
    return Chart(
        name=f"heads-{_slug(target)}-n{n}",
        title=f"`{target}` at n = {n}",
        x_label="heads M",
        y_label="relative test error",
        series=series,
        rows=table,
        x_log=True,
        y_log=True,
        note="The level line is the exact kernel of infinitely many heads. Dashed: theory.",
    )


def _slopes(config: Config, rows: Sequence[Row], target: str) -> Slopes:
    """Slopes from the first M at which half of the variance is explained.

    Before, there is nothing to fall from.
    """
    curve = _approximation_curve(config, rows, target)
    is_explained = curve.mean <= EXPLAINED
    first = int(np.argmax(is_explained)) if is_explained.any() else len(curve.x)
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
    return math.nan if error is None else error


def _approximation_chart(config: Config, rows: Sequence[Row], target: str) -> Chart:
    """The approximation error against M: measured, predicted, and the slope of the theorem."""
    heads = sorted(config.slope_heads)
    dim = config.slope_dim
    n = config.slope_samples
    polynomial = read_target(target, dim)
    variance = target_variance(polynomial, dim)

    curve = _approximation_curve(config, rows, target)
    predicted = {m: _approximation(config, target, m, n) for m in heads}
    predicted_limit = {m: _approximation(config, target, m) for m in heads}
    bounds = {m: approximation_bound(polynomial, m) / variance for m in heads}
    start = float(curve.mean[0])
    one_over_heads = [start * heads[0] / m for m in heads]
    series = [
        curve.series(f"measured at n = {n}", "attention"),
        Series(f"predicted at n = {n}", heads, list(predicted.values()), look="dashed",
               role="attention"),
        Series("predicted for n → ∞", heads, list(predicted_limit.values()), look="dashed",
               role="prediction"),
        Series("slope of 1/M", heads, one_over_heads, look="thin", role="oracle"),
    ]  # fmt: skip
    measured = dict(zip(curve.x.tolist(), curve.mean.tolist(), strict=True))
    table: list[Row] = [
        {
            "target": target,
            "heads": m,
            "measured": measured.get(m),
            "predicted": predicted[m],
            "predicted_limit": predicted_limit[m],
            "paper_bound": bounds[m],
        }
        for m in heads
    ]
    return Chart(
        name=f"heads-{_slug(target)}-approximation",
        title=f"`{target}`: approximation error of M heads, d = N = {dim}",
        x_label="heads M",
        y_label="relative error",
        series=series,
        rows=table,
        x_log=True,
        y_log=True,
        note=(
            "The theorem's bound (d² + log M) B/(δM), with constant 1 and δ = 0.05, is "
            f"{bounds[heads[0]]:.2g} for M = {heads[0]} and {bounds[heads[-1]]:.2g} for M = "
            f"{heads[-1]}: too far up to draw."
        ),
    )


def _slug(target: str) -> str:
    """A target as part of a file's name."""
    return "".join(c if c.isalnum() else "-" for c in target).strip("-").replace("---", "-")


def verdict(
    config: Config, rows: Sequence[Row], slopes: Mapping[str, Slopes], deviation: str
) -> Verdict:
    """The `RULE` on the slopes of all targets."""
    # slopes, and how near the largest number of heads comes to infinitely many
    numbers = {}
    for target, target_slopes in slopes.items():
        numbers[f"slope on `{target}`, M = {target_slopes.range}"] = (
            f"{target_slopes.measured.text()}, predicted {target_slopes.predicted:.2f}"
        )
    n = max(config.sizes)
    most = max(config.heads)
    ratios = []
    for target in config.targets:
        finite = float(_curve(config, rows, target, n, "attention").at(most).mean[0])
        infinite = float(_limit(config, rows, target, n, "attention").mean[0])
        ratios.append(finite / infinite)
        numbers[f"{most} heads over ∞ heads on `{target}`, n = {n}"] = f"{ratios[-1]:.2f}"
    numbers[DEVIATION] = deviation

    estimates = [item.measured for item in slopes.values() if item.measured.value is not None]
    if not estimates:
        sentence = (
            "No number of heads here explains half of a target and has few enough features for n "
            "to show its slope."
        )
        return Verdict("not tested", sentence, numbers)
    state = state_of([below(estimate, -1.0) for estimate in estimates])
    values = [estimate.value or 0.0 for estimate in estimates]
    sentence = (
        "Once half of the target is explained, the approximation error falls with slopes between "
        f"{min(values):.2f} and {max(values):.2f} in M, where the theorem's bound has −1; with "
        f"{most} heads the error at n = {n} is {min(ratios):.2f} to {max(ratios):.2f} times that "
        "of infinitely many."
    )
    return Verdict(state, sentence, numbers)
