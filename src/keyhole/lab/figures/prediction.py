"""Figure 8.

Predicted against measured test error: a grid of fitted layers, and how many more samples an MLP
needs.

What the theory describes is fitted, and nothing else: ridge without intercept on the raw kernel or
features (the constant is an eigenfunction like any other), α = nλ, on the sphere distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads
from keyhole.data.sets import SetBatch
from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import DEVIATION, MODELS, predicted_samples
from keyhole.lab.jobs import DISTRIBUTIONS, HEADS_DRAWN, read_target, target_variance
from keyhole.lab.measured import (
    CellSweep,
    Curve,
    Estimate,
    Results,
    apart,
    count_text,
    deviation_text,
    falls_to,
    missed_window,
    quotient,
    resample,
)
from keyhole.lab.report.document import Chart, Row, Section, Series, State, Table, Verdict, bars
from keyhole.theory.conditional import conditional_curve
from keyhole.theory.curves import learning_curve
from keyhole.theory.targets import sphere_sets

TARGETS = {"f_{1,2}": "token^2", "f_{2,1}": "corr * token", "f_{2,3}": "corr^3 * token"}
"""The targets of the grid, by the names a reader sees."""

NO_RIDGE = (0.0, 1e-6)
"""Penalties of which samples are counted with the better one; the theory says none."""


@dataclass(frozen=True)
class GridSetting:
    """One setting of the grid: a learning curve of `Config.sizes`."""

    model: str
    dim: int
    n_keys: int
    target: str
    """By the name a reader sees, a key of `TARGETS`."""
    heads: int | None
    ridge: float
    noise: float
    """Its variance as a share of Var f*."""


@dataclass(frozen=True)
class Config:
    """The grid is every combination of its settings.

    Dims, keys, targets, sizes, heads (and infinitely many), ridges and noise.

    Biased heads: the last number of heads and infinitely many, the first noise.
    """

    dims: tuple[int, ...] = (4, 8, 16)
    keys: tuple[int, ...] = (4, 16)
    sizes: tuple[int, ...] = (100, 400, 1600, 4000)
    repetitions: tuple[int, ...] = (32, 16, 6, 3)
    """Of each size. A repetition serves all sizes that have it: smaller ones are its first rows."""
    heads: tuple[int, ...] = (20, 60, 200)
    ridges: tuple[float, ...] = (1e-5, 1e-3)
    noises: tuple[float, ...] = (0.0, 0.25)
    """Noise variance as a share of Var f*."""
    n_test: int = 1000
    most_keys: int = 25_600
    """Sizes with more than this many training keys nN are left out: the exact kernel costs
    (nN)².
    """
    ratio_dim: int = 8
    ratio_keys: tuple[int, ...] = (4, 8)
    """Sets on which the samples of attention and of an MLP are counted, target f_{1,2}, no
    noise.
    """
    level: float = 0.1
    """The error at which they are counted, as a share of Var f*."""
    factors: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.05, 1.25, 1.6)
    """Sizes run for that, in units of the predicted number of samples: far enough below and above
    that a wrong prediction shows.
    """
    attention_repetitions: int = 24
    mlp_repetitions: int = 6
    ratio_test: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        has_pairs = len(self.sizes) == len(self.repetitions)
        pairs = sorted(zip(self.sizes, self.repetitions, strict=False))
        fewer_with_size = all(
            repetitions >= next_repetitions
            for (_, repetitions), (_, next_repetitions) in pairwise(pairs)
        )
        if not has_pairs or not fewer_with_size:
            raise ValueError(
                "`sizes` and `repetitions` must be as many, and a larger size may not have more "
                f"repetitions: got {self.sizes} and {self.repetitions}."
            )

    def describe(self) -> str:
        """The settings in a sentence or two."""
        return (
            "Our settings: sphere distribution; ridge with α = nλ and no intercept, on the raw "
            f"kernel or features; sizes {', '.join(map(str, self.sizes))} with "
            f"{', '.join(map(str, self.repetitions))} repetitions (sets, heads and noise drawn "
            f"anew; heads drawn again until {HEADS_DRAWN} have been); {self.n_test} test sets."
        )

    def sweep(
        self,
        model: str,
        dim: int,
        n_keys: int,
        target: str,
        heads: int | None,
        ridge: float,
        noise: float,
        mean: float = 1.0,
    ) -> CellSweep:
        """Mean squared error against n."""
        # the sizes that are not too expensive, with their numbers of repetitions
        counts = {
            n: count
            for n, count in sorted(zip(self.sizes, self.repetitions, strict=True))
            if n * n_keys <= self.most_keys
        }
        runs = []
        for repetition in range(max(counts.values(), default=0)):
            # larger sizes have fewer repetitions, so a repetition has the first few sizes
            sizes = [n for n, count in counts.items() if repetition < count]
            run = [
                Cell(
                    model=model,
                    target=target,
                    dim=dim,
                    n_keys=n_keys,
                    n_heads=heads,
                    n_samples=n,
                    most_samples=sizes[-1],
                    n_test=self.n_test,
                    seed=self.seed,
                    repetition=repetition,
                    learner="fixed",
                    noise=noise,
                    ridge=ridge,
                    mean=mean,
                )
                for n in sizes
            ]
            runs.append(tuple(run))
        return CellSweep(x=tuple(counts), runs=tuple(runs))

    def setting_sweep(self, setting: GridSetting) -> CellSweep:
        """The same for a setting of the grid."""
        return self.sweep(
            model=setting.model,
            dim=setting.dim,
            n_keys=setting.n_keys,
            target=TARGETS[setting.target],
            heads=setting.heads,
            ridge=setting.ridge,
            noise=setting.noise,
        )

    def ratio_sweeps(self, model: str, n_keys: int) -> list[CellSweep]:
        """Mean squared error against n around the samples predicted for a level.

        For each of two penalties.
        """
        target = TARGETS["f_{1,2}"]
        predicted = predicted_samples(target, self.ratio_dim, n_keys, self.level, model)
        if predicted is None:
            return []
        sizes = sorted({max(2, round(factor * predicted)) for factor in self.factors})
        if model == "attention":
            repetitions = self.attention_repetitions
        else:
            repetitions = self.mlp_repetitions
        sweeps = []
        for ridge in NO_RIDGE:
            cell = Cell(
                model=model,
                target=target,
                dim=self.ratio_dim,
                n_keys=n_keys,
                n_heads=None,
                n_samples=sizes[-1],
                most_samples=sizes[-1],
                n_test=self.ratio_test,
                seed=self.seed,
                repetition=0,
                learner="fixed",
                ridge=ridge,
            )
            sweeps.append(CellSweep.over(cell, "n_samples", sizes, repetitions))
        return sweeps


PRESETS = {
    "quick": Config(
        dims=(4, 8),
        keys=(4,),
        sizes=(100, 400),
        repetitions=(8, 4),
        heads=(20,),
        ratio_keys=(4,),
        level=0.2,
        attention_repetitions=12,
        mlp_repetitions=4,
        ratio_test=1000,
    ),
    "full": Config(),
}


def tolerance(dim: int) -> float:
    """How far a prediction may be off: the theory is asymptotic in the number of eigenfunctions."""
    if dim < 8:
        return 0.20
    return 0.12


def _grid(config: Config) -> list[GridSetting]:
    """Every combination for zero-mean heads, fewer for biased ones."""
    zero_mean = product(
        config.dims, config.keys, TARGETS, (*config.heads, None), config.ridges, config.noises
    )
    # there is no mean to speak of in one dimension
    biased_dims = [dim for dim in config.dims if dim > 1]
    biased_heads = (*config.heads[-1:], None)
    biased = product(
        biased_dims, config.keys, TARGETS, biased_heads, config.ridges, config.noises[:1]
    )
    settings = []
    for model, combinations in (("attention", zero_mean), ("biased", biased)):
        for dim, n_keys, target, heads, ridge, noise in combinations:
            settings.append(
                GridSetting(
                    model=model,
                    dim=dim,
                    n_keys=n_keys,
                    target=target,
                    heads=heads,
                    ridge=ridge,
                    noise=noise,
                )
            )
    return settings


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    sweeps = [config.setting_sweep(setting) for setting in _grid(config)]
    for n_keys in config.ratio_keys:
        sweeps += config.ratio_sweeps("attention", n_keys)
        sweeps += config.ratio_sweeps("mlp", n_keys)
    return [cell for sweep in sweeps for cell in sweep.cells]


def grid_rows(config: Config, results: Results) -> list[dict[str, Any]]:
    """One row per cell of the grid.

    With the mean of its repetitions and the standard error of that.
    """
    rows = []
    for setting in _grid(config):
        target = read_target(TARGETS[setting.target], setting.dim)
        variance = target_variance(target, setting.n_keys)
        noise = setting.noise * variance
        n_heads = math.inf if setting.heads is None else setting.heads
        curve = config.setting_sweep(setting).curve(results, "mean_square")
        for i, n in enumerate(map(int, curve.x)):
            predicted = float(
                learning_curve(
                    target,
                    n,
                    setting.n_keys,
                    setting.ridge,
                    noise=noise,
                    n_heads=n_heads,
                    heads=DISTRIBUTIONS[setting.model],
                )
            )
            # the error of a cell is against f*, the prediction is against noisy labels
            measured = float(curve.mean[i]) + noise
            conditional = _conditional_error(setting, n, noise)
            conditional_deviation = None
            if conditional is not None:
                conditional_deviation = conditional / measured - 1
            rows.append(
                {
                    "model": MODELS[setting.model],
                    "d": setting.dim,
                    "N": setting.n_keys,
                    "target": setting.target,
                    "n": n,
                    "M": "inf" if setting.heads is None else setting.heads,
                    "ridge": setting.ridge,
                    "noise": noise,
                    "predicted": predicted,
                    "measured": measured,
                    "standard_error": float(curve.error[i]),
                    "repetitions": int(np.isfinite(curve.runs[:, i]).sum()),
                    "deviation": predicted / measured - 1,
                    "conditional": conditional,
                    "conditional_deviation": conditional_deviation,
                    "excess_deviation": (predicted - noise) / (measured - noise) - 1,
                    "relative_error": measured / variance,
                }
            )
    return rows


FEW_FEATURES = 600
"""Layers with at most this many features are predicted from drawn heads too."""

CONDITIONAL_DRAWS = 4
"""Draws of heads that such a prediction is a mean over, as the measured errors are over many."""

CONDITIONAL_SETS = 2000
"""Sets without labels that it uses."""


def _conditional_error(setting: GridSetting, n: int, noise: float) -> float | None:
    """The test error by `conditional_curve`, mean over draws of heads; None for many heads."""
    if setting.heads is None or setting.heads * (setting.dim + 1) > FEW_FEATURES:
        return None
    target = read_target(TARGETS[setting.target], setting.dim)
    errors = []
    for draw in range(CONDITIONAL_DRAWS):
        sets, features = _drawn_features(
            setting.model, setting.dim, setting.n_keys, setting.heads, draw
        )
        curve = conditional_curve(features, target(sets), n, setting.ridge, noise=noise)
        errors.append(float(curve))
    return float(np.mean(errors))


@lru_cache(maxsize=16)
def _drawn_features(
    model: str, dim: int, n_keys: int, n_heads: int, draw: int
) -> tuple[SetBatch, Float[np.ndarray, "m p"]]:
    """Sets of the sphere distribution, and the features of heads that were drawn."""
    distribution = DISTRIBUTIONS[model] or GaussianHeads()
    sets = sphere_sets(CONDITIONAL_SETS, n_keys, dim, seed=10_000 + draw)
    features = attention_features(sets, distribution.sample(n_heads, dim, seed=20_000 + draw))
    return sets, np.asarray(features, dtype=np.float64)


def outliers(rows: Sequence[Row]) -> list[Row]:
    """Cells beyond the tolerance of their dimension, worst first."""

    def deviation(row: Row) -> float:
        return abs(float(row["deviation"] or 0.0))

    beyond = [row for row in rows if deviation(row) > tolerance(int(row["d"] or 0))]
    return sorted(beyond, key=lambda row: -deviation(row))


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Deviations over the whole grid, then by each of its axes."""
    groups: list[tuple[str, Sequence[Row]]] = [
        ("all cells", rows),
        ("d ≥ 8", [r for r in rows if int(r["d"] or 0) >= 8]),
    ]
    for axis in ("model", "d", "N", "target", "n", "M", "ridge"):
        for value in dict.fromkeys(row[axis] for row in rows):
            groups.append((f"{axis} = {value}", [row for row in rows if row[axis] == value]))
    groups.append(("noise", [row for row in rows if row["noise"]]))
    groups.append(("no noise", [row for row in rows if not row["noise"]]))
    return [_summary(name, group) for name, group in groups if group]


def _summary(name: str, rows: Sequence[Any]) -> Row:
    """Deviations of some cells in per cent."""
    deviations = np.abs([row["deviation"] for row in rows])
    excess_deviations = np.abs([row["excess_deviation"] for row in rows])
    relative_errors = [row["standard_error"] / row["measured"] for row in rows]
    shares = {
        "median": np.median(deviations),
        "90 %": np.quantile(deviations, 0.9),
        "worst": deviations.max(),
        "within": 1 - len(outliers(rows)) / len(rows),
        "no floor": np.median(excess_deviations),
        "s.e.": np.median(relative_errors),
    }
    percents = {key: f"{100 * share:.1f} %" for key, share in shares.items()}
    return {"cells": name, "number": str(len(rows)), **percents}


def _readable(row: Any) -> Row:
    """A row of the grid as text."""
    return {
        "model": str(row["model"]),
        "d": str(row["d"]),
        "N": str(row["N"]),
        "target": str(row["target"]),
        "n": str(row["n"]),
        "M": str(row["M"]),
        "ridge": f"{row['ridge']:g}",
        "noise": f"{row['noise']:.2g}",
        "predicted": f"{row['predicted']:.3g}",
        "measured": f"{row['measured']:.3g} ± {row['standard_error']:.1g}",
        "deviation": f"{100 * row['deviation']:+.0f} %",
    }


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    rows = grid_rows(config, results)
    ratios = ratio_rows(config, results)
    charts = [_chart(rows, name, MODELS[model]) for model, name in product(DISTRIBUTIONS, TARGETS)]
    tables = [
        Table(
            name="prediction-summary",
            title="Predicted against measured",
            rows=summarise(rows),
            note=(
                "Number of cells; median of |predicted/measured − 1|; what 90 % of the cells stay "
                "below; the worst; the share within the tolerance of their dimension "
                "(20 % below d = 8, 12 % from there on); the median with the noise floor taken off "
                "both; the median standard error of a measured mean."
            ),
        ),
        Table(
            name="prediction-outliers",
            title="Cells beyond the tolerance",
            rows=[_readable(row) for row in outliers(rows)],
        ),
        Table(
            name="prediction-ratio",
            title=f"Samples for {config.level:.0%} error on f_{{1,2}}, d = {config.ratio_dim}, "
            "kernel limits",
            rows=ratios,
            note=(
                "Read between the sizes run on logarithmic axes, ± standard error over resampled "
                "repetitions."
            ),
        ),
    ]
    return Section(
        slug="prediction",
        title="Test errors before any training",
        claim=(
            "The spectrum of the kernel and the target's power in each eigenspace tell the test "
            "error of ridge for any number of samples, heads, any penalty and noise."
        ),
        blocks=[*charts, *(table for table in tables if table.rows)],
        verdict=_verdict(rows, ratios),
        settings=config.describe(),
    )


def _chart(rows: list[dict[str, Any]], target: str, model: str) -> Chart:
    """Predicted over measured against the measured error, for one target and model."""
    chart_rows = [row for row in rows if row["target"] == target and row["model"] == model]
    series = []
    for dim in dict.fromkeys(row["d"] for row in chart_rows):
        for is_infinite in (False, True):
            count = "∞" if is_infinite else "finite"
            label = f"d = {dim}, {count} heads"
            label_rows = [
                row for row in chart_rows if row["d"] == dim and (row["M"] == "inf") == is_infinite
            ]
            series.append(_points(label, label_rows))

    # the line on which predictions are right
    errors = [row["relative_error"] for row in chart_rows]
    if errors:
        ends = [min(errors), max(errors)]
        series.append(Series("as predicted", ends, [1.0, 1.0], look="dashed", role="prediction"))

    digits = "".join(character for character in target if character.isdigit())
    prefix = "prediction-biased-" if model == MODELS["biased"] else "prediction-"
    return Chart(
        name=f"{prefix}{digits}",
        title=f"{target}, {model}",
        x_label="measured test error over Var f*",
        y_label="predicted / measured",
        series=series,
        rows=chart_rows,
        x_log=True,
        note="Bars are one standard error. Hover for the cell.",
        marks={"+12%": 1.12, "-12%": 0.88, "+20%": 1.2, "-20%": 0.8},
    )


def _points(label: str, rows: list[dict[str, Any]]) -> Series:
    """A point per cell, with the standard error of its mean."""
    ratios = [row["predicted"] / row["measured"] for row in rows]
    errors = [
        ratio * row["standard_error"] / row["measured"]
        for ratio, row in zip(ratios, rows, strict=True)
    ]
    hover = [
        f"N = {row['N']}, n = {row['n']}, M = {row['M']}, λ = {row['ridge']:g}" for row in rows
    ]
    x = [row["relative_error"] for row in rows]
    return apart(bars(label, x, ratios, errors, role=label, hover=hover))


def _samples(config: Config, results: Results, model: str, n_keys: int) -> Estimate:
    """Where the mean error, with the better penalty, falls to the level."""
    sweeps = config.ratio_sweeps(model, n_keys)
    if not sweeps:
        return Estimate(None)
    variance = target_variance(read_target(TARGETS["f_{1,2}"], config.ratio_dim), n_keys)
    curves = [sweep.curve(results, "mean_square") for sweep in sweeps]

    def statistic(tables: list[np.ndarray]) -> float | None:
        means = [table.mean(axis=0) for table in tables]
        return falls_to(curves[0].x, np.min(means, axis=0), config.level * variance)

    return resample(statistic, [curve.runs for curve in curves], config.seed)


def _miss(config: Config, results: Results, model: str, n_keys: int) -> str:
    """What the sizes run say where the error is not reached among them; a dash without sizes."""
    variance = target_variance(read_target(TARGETS["f_{1,2}"], config.ratio_dim), n_keys)
    curves = [sweep.curve(results, "mean_square") for sweep in config.ratio_sweeps(model, n_keys)]
    if not curves:
        return "–"
    # the better penalty at every size
    best_mean = np.min([curve.mean for curve in curves], axis=0)
    best = Curve(curves[0].x, best_mean[None, :])
    return missed_window(best, config.level * variance) or "–"


def ratio_rows(config: Config, results: Results) -> list[Row]:
    """One row per N: predicted and measured samples of both models, and their ratio."""
    return [_ratio_row(config, results, n_keys) for n_keys in config.ratio_keys]


def _ratio_row(config: Config, results: Results, n_keys: int) -> Row:
    """Samples of attention and of an MLP, predicted and measured, and their ratio."""
    target = TARGETS["f_{1,2}"]
    row: dict[str, Any] = {"N": str(n_keys)}
    measured = {}
    predicted = {}
    for model in ("attention", "mlp"):
        measured[model] = _samples(config, results, model, n_keys)
        predicted[model] = predicted_samples(target, config.ratio_dim, n_keys, config.level, model)
        row[f"{model}, predicted"] = count_text(predicted[model])
        row[f"{model}, measured"] = measured[model].text(
            missing=_miss(config, results, model, n_keys)
        )
    if predicted["attention"] is None or predicted["mlp"] is None:
        row["ratio, predicted"] = "–"
    else:
        row["ratio, predicted"] = f"{predicted['mlp'] / predicted['attention']:.2f}"
    row["ratio, measured"] = quotient(measured["mlp"], measured["attention"]).text()
    return row


def _verdict(rows: list[dict[str, Any]], ratios: list[Row]) -> Verdict:
    """The claim holds where the median is off by 6 % at most and nine in ten cells are within.

    And where the predicted numbers of samples are not contradicted by the sizes run around them.
    """
    everything = summarise(rows)[0]
    within = 1 - len(outliers(rows)) / len(rows)
    median = _median_deviation(rows)

    # the numbers
    numbers = {DEVIATION: deviation_text(rows)}
    for key in ("90 %", "worst", "within"):
        numbers[key] = str(everything[key])
    for row in ratios:
        name = f"samples of the MLP over attention's, N = {row['N']}"
        numbers[name] = f"{row['ratio, measured']} (predicted {row['ratio, predicted']})"

    # the state; a prediction of samples that the sizes run contradict counts too
    contradicted = [
        f"{model} at N = {row['N']}, {row[f'{model}, measured']} ({row[f'{model}, predicted']} "
        "samples were predicted)"
        for row in ratios
        for model in ("attention", "mlp")
        if "n =" in str(row[f"{model}, measured"])
    ]
    state: State
    if median <= 0.06 and within >= 0.9 and not contradicted:
        state = "holds"
    elif within >= 0.5:
        state = "partly"
    else:
        state = "does not show"

    # the sentence
    sentence = (
        f"The test errors of {len(rows)} settings are predicted to {100 * median:.1f} % in the "
        f"median, {within:.0%} of them within 12 % (20 % below d = 8)."
    )
    infinite_rows = [row for row in rows if row["M"] == "inf"]
    if infinite_rows:
        infinite_median = 100 * _median_deviation(infinite_rows)
        sentence += f" With infinitely many heads the median is {infinite_median:.1f} %."
    conditional_rows = [row for row in rows if row["conditional_deviation"] is not None]
    if conditional_rows:
        conditional_median = _median_deviation(conditional_rows, "conditional_deviation")
        formula_median = _median_deviation(conditional_rows)
        sentence += (
            f" With few heads it is {100 * formula_median:.1f} %, and predicted from heads that "
            f"were drawn {100 * conditional_median:.1f} %."
        )
    biased_rows = [row for row in rows if row["model"] == MODELS["biased"]]
    if biased_rows:
        sentence += f" With biased heads it is {100 * _median_deviation(biased_rows):.1f} %."
    for words in contradicted:
        sentence += f" Contradicted: {words}."
    return Verdict(state, sentence, numbers)


def _median_deviation(rows: list[dict[str, Any]], name: str = "deviation") -> float:
    """Median of |predicted/measured − 1|."""
    return float(np.median(np.abs([row[name] for row in rows])))
