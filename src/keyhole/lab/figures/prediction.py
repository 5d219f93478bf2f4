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
from itertools import product
from typing import Any

import numpy as np

from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import DEVIATION, MODELS, predicted_samples
from keyhole.lab.jobs import DISTRIBUTIONS, HEADS_DRAWN, read_target, target_variance
from keyhole.lab.measured import (
    CellSweep,
    Estimate,
    Results,
    apart,
    count_text,
    deviation_text,
    falls_to,
    quotient,
    resample,
)
from keyhole.lab.report.document import Chart, Row, Section, Series, State, Table, Verdict, bars
from keyhole.theory.curves import learning_curve

TARGETS = {"f_{1,2}": "token^2", "f_{2,1}": "corr * token", "f_{2,3}": "corr^3 * token"}
"""The targets of the grid, by the names a reader sees."""

NO_RIDGE = (0.0, 1e-6)
"""Penalties of which samples are counted with the better one; the theory says none."""


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
    factors: tuple[float, ...] = (0.75, 0.9, 1.05, 1.25)
    """Sizes run for that, in units of the predicted number of samples."""
    attention_repetitions: int = 24
    mlp_repetitions: int = 6
    ratio_test: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        pairs = sorted(zip(self.sizes, self.repetitions, strict=False))
        if len(self.sizes) != len(self.repetitions) or pairs != sorted(
            pairs, key=lambda pair: (-pair[1], pair[0])
        ):
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
        counts = {
            n: c
            for n, c in sorted(zip(self.sizes, self.repetitions, strict=True))
            if n * n_keys <= self.most_keys
        }
        runs = []
        for r in range(max(counts.values(), default=0)):
            own = [n for n, count in counts.items() if r < count]
            base, rest = (target, dim, n_keys, heads), (own[-1], self.n_test, self.seed, r)
            cells = (
                Cell(model, *base, n, *rest, "fixed", noise=noise, ridge=ridge, mean=mean)
                for n in own
            )
            runs.append(tuple(cells))
        return CellSweep(tuple(counts), tuple(runs))

    def ratio_sweeps(self, model: str, n_keys: int) -> list[CellSweep]:
        """Mean squared error against n around the samples predicted for a level.

        For each of two penalties.
        """
        target, dim = TARGETS["f_{1,2}"], self.ratio_dim
        predicted = predicted_samples(target, dim, n_keys, self.level, model)
        if predicted is None:
            return []
        sizes = sorted({max(2, round(factor * predicted)) for factor in self.factors})
        most = sizes[-1]
        repetitions = self.attention_repetitions if model == "attention" else self.mlp_repetitions
        options = (most, most, self.ratio_test, self.seed, 0, "fixed")
        cells = [
            Cell(model, target, dim, n_keys, None, *options, ridge=ridge) for ridge in NO_RIDGE
        ]
        return [CellSweep.over(cell, "n_samples", sizes, repetitions) for cell in cells]


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
    return 0.20 if dim < 8 else 0.12


def _grid(config: Config) -> list[tuple[Any, ...]]:
    """(model, d, N, name of the target, heads, λ, share of noise)."""
    zero = (config.dims, config.keys, TARGETS, (*config.heads, None), config.ridges, config.noises)
    dims = tuple(
        dim for dim in config.dims if dim > 1
    )  # there is no mean to speak of in one dimension
    biased = (
        dims,
        config.keys,
        TARGETS,
        (*config.heads[-1:], None),
        config.ridges,
        config.noises[:1],
    )
    return [*product(("attention",), *zero), *product(("biased",), *biased)]


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    sweeps = [
        config.sweep(model, d, n, TARGETS[name], *rest)
        for model, d, n, name, *rest in _grid(config)
    ]
    for n_keys in config.ratio_keys:
        sweeps += [*config.ratio_sweeps("attention", n_keys), *config.ratio_sweeps("mlp", n_keys)]
    return [cell for sweep in sweeps for cell in sweep.cells]


def grid_rows(config: Config, results: Results) -> list[dict[str, Any]]:
    """One row per cell of the grid.

    With the mean of its repetitions and the standard error of that.
    """
    rows = []
    for model, dim, n_keys, name, heads, ridge, share in _grid(config):
        target = read_target(TARGETS[name], dim)
        spread = target_variance(target, n_keys)
        noise, many = share * spread, math.inf if heads is None else heads
        curve = config.sweep(model, dim, n_keys, TARGETS[name], heads, ridge, share).curve(
            results, "mean_square"
        )
        for i, n in enumerate(map(int, curve.x)):
            predicted = float(
                learning_curve(target, n, n_keys, ridge, noise, many, heads=DISTRIBUTIONS[model])
            )
            mean = float(curve.mean[i]) + noise
            rows.append(
                {
                    "model": MODELS[model],
                    "d": dim,
                    "N": n_keys,
                    "target": name,
                    "n": n,
                    "M": "inf" if heads is None else heads,
                    "ridge": ridge,
                    "noise": noise,
                    "predicted": predicted,
                    "measured": mean,
                    "standard_error": float(curve.error[i]),
                    "repetitions": int(np.isfinite(curve.runs[:, i]).sum()),
                    "deviation": predicted / mean - 1,
                    "excess_deviation": (predicted - noise) / (mean - noise) - 1,
                    "relative_error": mean / spread,
                }
            )
    return rows


def outliers(rows: Sequence[Row]) -> list[Row]:
    """Cells beyond the tolerance of their dimension, worst first."""
    beyond = [row for row in rows if abs(row["deviation"]) > tolerance(row["d"])]  # type: ignore[arg-type]
    return sorted(beyond, key=lambda row: -abs(row["deviation"]))  # type: ignore[arg-type]


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
    off = np.abs([row["deviation"] for row in rows])
    shares = {
        "median": np.median(off),
        "90 %": np.quantile(off, 0.9),
        "worst": off.max(),
        "within": 1 - len(outliers(rows)) / len(rows),
        "no floor": np.median(np.abs([row["excess_deviation"] for row in rows])),
        "s.e.": np.median([row["standard_error"] / row["measured"] for row in rows]),
    }
    return {
        "cells": name,
        "number": str(len(rows)),
        **{key: f"{100 * v:.1f} %" for key, v in shares.items()},
    }


def _readable(row: Any) -> Row:
    return {
        **{key: str(row[key]) for key in ("model", "d", "N", "target", "n", "M")},
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
    tables = [
        Table(
            "prediction-summary",
            "Predicted against measured",
            summarise(rows),
            note=(
                "Number of cells; median of |predicted/measured − 1|; what 90 % of the cells stay "
                "below; the worst; the share within the tolerance of their dimension "
                "(20 % below d = 8, 12 % from there on); the median with the noise floor taken off "
                "both; the median standard error of a measured mean."
            ),
        ),
        Table(
            "prediction-outliers",
            "Cells beyond the tolerance",
            [_readable(row) for row in outliers(rows)],
        ),
        Table(
            "prediction-ratio",
            f"Samples for {config.level:.0%} error on f_{{1,2}}, d = {config.ratio_dim}, kernel "
            "limits",
            ratios,
            note=(
                "Read between the sizes run on logarithmic axes, ± standard error over resampled "
                "repetitions."
            ),
        ),
    ]
    return Section(
        "prediction",
        "Test errors before any training",
        "The spectrum of the kernel and the target's power in each eigenspace tell the test error "
        "of ridge for any number of samples, heads, any penalty and noise.",
        [
            *(_chart(rows, name, MODELS[model]) for model, name in product(DISTRIBUTIONS, TARGETS)),
            *(table for table in tables if table.rows),
        ],
        _verdict(rows, ratios),
        config.describe(),
    )


def _chart(rows: list[dict[str, Any]], target: str, model: str) -> Chart:
    own = [row for row in rows if (row["target"], row["model"]) == (target, model)]
    series = []
    for dim in dict.fromkeys(row["d"] for row in own):
        for infinite in (False, True):
            found = [row for row in own if (row["d"], row["M"] == "inf") == (dim, infinite)]
            x = [row["relative_error"] for row in found]
            y = [row["predicted"] / row["measured"] for row in found]
            error = [
                b * row["standard_error"] / row["measured"] for b, row in zip(y, found, strict=True)
            ]
            hover = [
                f"N = {row['N']}, n = {row['n']}, M = {row['M']}, λ = {row['ridge']:g}"
                for row in found
            ]
            label = f"d = {dim}, {'∞' if infinite else 'finite'} heads"
            series.append(apart(bars(label, x, y, error, label, hover)))
    at = [row["relative_error"] for row in own]
    if own:
        series.append(
            Series("as predicted", [min(at), max(at)], [1.0, 1.0], look="dashed", role="prediction")
        )
    digits = "".join(character for character in target if character.isdigit())
    prefix = "prediction-biased-" if model == MODELS["biased"] else "prediction-"
    return Chart(
        f"{prefix}{digits}",
        f"{target}, {model}",
        "measured test error over Var f*",
        "predicted / measured",
        series,
        rows=own,
        x_log=True,
        note="Bars are one standard error. Hover for the cell.",
        marks={
            f"{sign}{share:.0%}": 1 + float(f"{sign}{share}")
            for share in (0.12, 0.2)
            for sign in "+-"
        },
    )


def _samples(config: Config, results: Results, model: str, n_keys: int) -> Estimate:
    """Where the mean error, with the better penalty, falls to the level."""
    sweeps = config.ratio_sweeps(model, n_keys)
    if not sweeps:
        return Estimate(None)
    spread = target_variance(read_target(TARGETS["f_{1,2}"], config.ratio_dim), n_keys)
    curves = [sweep.curve(results, "mean_square") for sweep in sweeps]

    def statistic(tables: list[np.ndarray]) -> float | None:
        return falls_to(
            curves[0].x,
            np.min([table.mean(axis=0) for table in tables], axis=0),
            config.level * spread,
        )

    return resample(statistic, [curve.runs for curve in curves], config.seed)


def ratio_rows(config: Config, results: Results) -> list[Row]:
    """One row per N: predicted and measured samples of both models, and their ratio."""
    return [_ratio_row(config, results, n_keys) for n_keys in config.ratio_keys]


def _ratio_row(config: Config, results: Results, n_keys: int) -> Row:
    row: dict[str, Any] = {"N": str(n_keys)}
    found, told = [], []
    for model in ("attention", "mlp"):
        found.append(_samples(config, results, model, n_keys))
        told.append(
            predicted_samples(TARGETS["f_{1,2}"], config.ratio_dim, n_keys, config.level, model)
        )
        row |= {f"{model}, predicted": count_text(told[-1]), f"{model}, measured": found[-1].text()}
    row["ratio, predicted"] = "–" if None in told else f"{(told[1] or 0) / (told[0] or 1):.2f}"
    return {**row, "ratio, measured": quotient(found[1], found[0]).text()}


def _verdict(rows: list[dict[str, Any]], ratios: list[Row]) -> Verdict:
    everything = summarise(rows)[0]
    within = 1 - len(outliers(rows)) / len(rows)
    median = float(np.median(np.abs([row["deviation"] for row in rows])))
    numbers = {DEVIATION: deviation_text(rows)}
    numbers |= {key: str(everything[key]) for key in ("90 %", "worst", "within")}
    for row in ratios:
        name = f"samples of the MLP over attention's, N = {row['N']}"
        numbers[name] = f"{row['ratio, measured']} (predicted {row['ratio, predicted']})"
    state: State = (
        "holds"
        if median <= 0.06 and within >= 0.9
        else "partly"
        if within >= 0.5
        else "does not show"
    )
    sentence = (
        f"The test errors of {len(rows)} settings are predicted to {100 * median:.1f} % in the "
        f"median, {within:.0%} of them within 12 % (20 % below d = 8)."
    )
    exact = [abs(row["deviation"]) for row in rows if row["M"] == "inf"]
    if exact:
        sentence += (
            f" With infinitely many heads the median is {100 * float(np.median(exact)):.1f} %."
        )
    biased = [abs(row["deviation"]) for row in rows if row["model"] == MODELS["biased"]]
    if biased:
        sentence += f" With biased heads it is {100 * float(np.median(biased)):.1f} %."
    return Verdict(state, sentence, numbers)
