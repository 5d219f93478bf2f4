"""Figure 8.

Predicted against measured test error: a grid of fitted layers, and how many more samples an MLP
needs.

What the theory describes is fitted, and nothing else: ridge without intercept on the raw kernel or
features (the constant is an eigenfunction like any other), α = nλ, on the sphere distribution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

import numpy as np
from jaxtyping import Float

from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads
from keyhole.data.sets import SetBatch
from keyhole.lab.cells import (
    DISTRIBUTIONS,
    HEADS_DRAWN,
    Cell,
    FixedCell,
    Row,
    read_target,
    target_variance,
)
from keyhole.lab.curves import (
    DEVIATION,
    MODELS,
    Curve,
    Estimate,
    count_text,
    curve_of,
    deviation_text,
    falls_to,
    missed_window,
    quotient,
    resample,
)
from keyhole.lab.predictions import predicted_samples
from keyhole.lab.report.document import Chart, Section, Series, State, Table, Verdict, bars
from keyhole.theory.conditional import conditional_curve
from keyhole.theory.curves import learning_curve
from keyhole.theory.targets import sphere_sets

TARGETS = {"f_{1,2}": "token^2", "f_{2,1}": "corr * token", "f_{2,3}": "corr^3 * token"}
"""The targets of the grid, by the names a reader sees."""

NO_RIDGE = (0.0, 1e-6)
"""Penalties of which samples are counted with the better one; the theory says none."""

MEDIAN = 0.06
"""The largest median of |predicted/measured − 1| for the claim to hold."""

SHARE = 0.9
"""The least share of settings within the tolerance of their dimension."""

RULE = (
    f"The number is |predicted/measured − 1|. Holds if its median over the settings is {MEDIAN:.0%}"
    f" or less, {SHARE:.0%} of the settings are within 12 % (20 % below d = 8), and no predicted "
    "number of samples is contradicted by the sizes run around it; partly if half of the settings "
    f"are within; not sure if the standard errors of the measured means are above {MEDIAN:.0%} in "
    "the median."
)

FEW_FEATURES = 600
"""Layers with at most this many features are predicted from drawn heads too."""

CONDITIONAL_DRAWS = 4
"""Draws of heads that such a prediction is a mean over, as the measured errors are over many."""

CONDITIONAL_SETS = 2000
"""Sets without labels that it uses."""


@dataclass(frozen=True)
class Config:
    """The grid is every combination of its settings.

    Biased heads: the last number of heads and infinitely many, the first noise.
    """

    dims: tuple[int, ...] = (4, 8, 16)
    keys: tuple[int, ...] = (4, 16)
    sizes: tuple[int, ...] = (100, 400, 1600, 4000)
    repetitions: tuple[int, ...] = (32, 16, 6, 3)
    """Of each size. A repetition serves all sizes that have it: smaller ones are its first rows."""
    heads: tuple[int, ...] = (20, 60, 200)
    """And infinitely many."""
    ridges: tuple[float, ...] = (1e-5, 1e-3)
    noises: tuple[float, ...] = (0.0, 0.25)
    """Noise variance as a share of Var f*."""
    n_test: int = 1000
    most_keys: int = 25_600
    """Sizes with more training keys nN than this are left out: the exact kernel costs (nN)²."""
    ratio_dim: int = 8
    ratio_keys: tuple[int, ...] = (4, 8)
    """Sets on which the samples of attention and of an MLP are counted, target f_{1,2}, no
    noise."""
    level: float = 0.1
    """The error at which they are counted, as a share of Var f*."""
    factors: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9, 1.05, 1.25, 1.6)
    """Sizes run for that, in units of the predicted number of samples: far enough below and above
    that a wrong prediction shows."""
    attention_repetitions: int = 24
    mlp_repetitions: int = 6
    ratio_test: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        has_pairs = len(self.sizes) == len(self.repetitions)
        pairs = sorted(zip(self.sizes, self.repetitions, strict=False))
        falls = all(count >= next_count for (_, count), (_, next_count) in pairwise(pairs))
        if not has_pairs or not falls:
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

    def counts(self, n_keys: int) -> dict[int, int]:
        """Repetitions of the sizes that are not too expensive."""
        return {
            n: count
            for n, count in sorted(zip(self.sizes, self.repetitions, strict=True))
            if n * n_keys <= self.most_keys
        }

    def ratio_sizes(self, model: str, n_keys: int) -> tuple[int, ...]:
        """Sizes around the samples predicted for the level; none without a prediction."""
        target = TARGETS["f_{1,2}"]
        predicted = predicted_samples(target, self.ratio_dim, n_keys, self.level, model)
        if predicted is None:
            return ()
        return tuple(sorted({max(2, round(factor * predicted)) for factor in self.factors}))


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


def cells(config: Config) -> list[Cell]:
    """What has to be measured."""
    return [*_grid_cells(config), *_ratio_cells(config)]


def _grid_cells(config: Config) -> list[Cell]:
    """Every combination for zero-mean heads, fewer for biased ones."""
    cells: list[Cell] = []
    for model, dim, n_keys in product(("attention", "biased"), config.dims, config.keys):
        heads: tuple[int | None, ...] = (*config.heads, None)
        noises = config.noises
        if model == "biased":
            heads = (*config.heads[-1:], None)
            noises = config.noises[:1]
            # there is no mean to speak of in one dimension
            if dim == 1:
                continue
        counts = config.counts(n_keys)
        for count, repetition in product(heads, range(max(counts.values(), default=0))):
            # larger sizes have fewer repetitions, so a repetition has the first few sizes
            cell = FixedCell(
                model=model,
                targets=tuple(TARGETS.values()),
                dim=dim,
                n_keys=n_keys,
                heads=count,
                sizes=tuple(n for n, most in counts.items() if repetition < most),
                ridges=config.ridges,
                noises=noises,
                n_test=config.n_test,
                seed=config.seed,
                repetition=repetition,
            )
            cells.append(cell)
    return cells


def _ratio_cells(config: Config) -> list[Cell]:
    """Both models around the samples predicted for a level, at both penalties of `NO_RIDGE`."""
    cells: list[Cell] = []
    counts = {"attention": config.attention_repetitions, "mlp": config.mlp_repetitions}
    for n_keys, (model, count) in product(config.ratio_keys, counts.items()):
        sizes = config.ratio_sizes(model, n_keys)
        if sizes:
            cell = FixedCell(
                model=model,
                targets=(TARGETS["f_{1,2}"],),
                dim=config.ratio_dim,
                n_keys=n_keys,
                heads=None,
                sizes=sizes,
                ridges=NO_RIDGE,
                noises=(0.0,),
                n_test=config.ratio_test,
                seed=config.seed,
                repetition=0,
            )
            cells += [replace(cell, repetition=repetition) for repetition in range(count)]
    return cells


# ---------------------------------------------------------------- the grid


def grid_rows(config: Config, rows: Sequence[Row]) -> list[Row]:
    """A row for each setting and size of the grid: predicted, measured, and how far apart."""
    names = ("model", "d", "N", "target", "M", "ridge", "noise", "n")
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row["ridge"] in config.ridges and row["n"] in config.sizes:
            groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return [_grid_row(group) for group in groups.values()]


def _grid_row(group: Sequence[Row]) -> Row:
    """One setting: its repetitions beside the prediction."""
    setting = group[0]
    model, dim, n_keys, target_text = (setting[name] for name in ("model", "d", "N", "target"))
    n, heads, ridge = (setting[name] for name in ("n", "M", "ridge"))
    squares = np.array([row["mean_square"] for row in group])
    target = read_target(target_text, dim)
    variance = target_variance(target, n_keys)
    noise = setting["noise"] * variance
    predicted = float(
        learning_curve(
            target,
            n,
            n_keys,
            ridge,
            noise=noise,
            n_heads=math.inf if heads is None else heads,
            heads=DISTRIBUTIONS[model],
        )
    )
    # the measured error is against f*, the prediction is against noisy labels
    measured = float(squares.mean()) + noise
    error = math.nan
    if len(squares) > 1:
        error = float(squares.std(ddof=1) / math.sqrt(len(squares)))
    conditional = None
    if heads is not None and heads * (dim + 1) <= FEW_FEATURES:
        conditional = _conditional_error(model, dim, n_keys, target_text, heads, n, ridge, noise)
    return {
        "model": MODELS[model],
        "d": dim,
        "N": n_keys,
        "target": next(name for name, text in TARGETS.items() if text == target_text),
        "n": n,
        "M": "inf" if heads is None else heads,
        "ridge": ridge,
        "noise": noise,
        "predicted": predicted,
        "measured": measured,
        "standard_error": error,
        "repetitions": len(squares),
        "deviation": predicted / measured - 1,
        "conditional": conditional,
        "conditional_deviation": None if conditional is None else conditional / measured - 1,
        "excess_deviation": (predicted - noise) / (measured - noise) - 1,
        "relative_error": measured / variance,
    }


def _conditional_error(
    model: str,
    dim: int,
    n_keys: int,
    target_text: str,
    heads: int,
    n: int,
    ridge: float,
    noise: float,
) -> float:
    """The test error by `conditional_curve`, mean over draws of heads."""
    target = read_target(target_text, dim)
    errors = []
    for draw in range(CONDITIONAL_DRAWS):
        sets, features = _drawn_features(model, dim, n_keys, heads, draw)
        errors.append(float(conditional_curve(features, target(sets), n, ridge, noise=noise)))
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
    """Settings beyond the tolerance of their dimension, worst first."""
    beyond = [row for row in rows if abs(row["deviation"]) > tolerance(row["d"])]
    return sorted(beyond, key=lambda row: -abs(row["deviation"]))


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Deviations over the whole grid, then by each of its axes."""
    groups: list[tuple[str, Sequence[Row]]] = [
        ("all settings", rows),
        ("d ≥ 8", [row for row in rows if row["d"] >= 8]),
    ]
    for axis in ("model", "d", "N", "target", "n", "M", "ridge"):
        for value in dict.fromkeys(row[axis] for row in rows):
            groups.append((f"{axis} = {value}", [row for row in rows if row[axis] == value]))
    groups.append(("noise", [row for row in rows if row["noise"]]))
    groups.append(("no noise", [row for row in rows if not row["noise"]]))
    return [_summary(name, group) for name, group in groups if group]


def _summary(name: str, rows: Sequence[Row]) -> Row:
    """Deviations of some settings in per cent."""
    deviations = np.abs([row["deviation"] for row in rows])
    shares = {
        "median": np.median(deviations),
        "90 %": np.quantile(deviations, 0.9),
        "worst": deviations.max(),
        "within": 1 - len(outliers(rows)) / len(rows),
        "no floor": np.median(np.abs([row["excess_deviation"] for row in rows])),
        "s.e.": np.median([row["standard_error"] / row["measured"] for row in rows]),
    }
    percents = {key: f"{100 * share:.1f} %" for key, share in shares.items()}
    return {"settings": name, "number": str(len(rows)), **percents}


# ---------------------------------------------------------------- samples of both models


def ratio_rows(config: Config, rows: Sequence[Row]) -> list[Row]:
    """One row per N: predicted and measured samples of both models, and their ratio."""
    return [_ratio_row(config, rows, n_keys) for n_keys in config.ratio_keys]


def _ratio_row(config: Config, rows: Sequence[Row], n_keys: int) -> Row:
    """Samples of attention and of an MLP, predicted and measured, and their ratio."""
    target = TARGETS["f_{1,2}"]
    row: Row = {"N": str(n_keys)}
    measured = {}
    predicted = {}
    for model in ("attention", "mlp"):
        predicted[model] = predicted_samples(target, config.ratio_dim, n_keys, config.level, model)
        measured[model], miss = _samples(config, rows, model, n_keys)
        row[f"{model}, predicted"] = count_text(predicted[model])
        row[f"{model}, measured"] = measured[model].text(missing=miss or "–")
        row[f"{model}, miss"] = miss
    row["ratio, predicted"] = "–"
    if predicted["attention"] is not None and predicted["mlp"] is not None:
        row["ratio, predicted"] = f"{predicted['mlp'] / predicted['attention']:.2f}"
    row["ratio, measured"] = quotient(measured["mlp"], measured["attention"]).text()
    return row


def _samples(
    config: Config, rows: Sequence[Row], model: str, n_keys: int
) -> tuple[Estimate, str | None]:
    """Where the mean error, with the better penalty, falls to the level, or how it misses that."""
    sizes = config.ratio_sizes(model, n_keys)
    of_ratio = [row for row in rows if row["n"] in sizes]
    curves = [
        curve_of(
            of_ratio,
            "n",
            "mean_square",
            model=model,
            target=TARGETS["f_{1,2}"],
            d=config.ratio_dim,
            N=n_keys,
            M=None,
            ridge=ridge,
            noise=0.0,
        )
        for ridge in NO_RIDGE
    ]
    if not sizes:
        return Estimate(None), None
    x = curves[0].x
    variance = target_variance(read_target(TARGETS["f_{1,2}"], config.ratio_dim), n_keys)
    level = config.level * variance

    def statistic(tables: list[np.ndarray]) -> float | None:
        means = [table.mean(axis=0) for table in tables]
        return falls_to(x, np.min(means, axis=0), level)

    samples = resample(statistic, [curve.runs for curve in curves], config.seed)
    best_mean = np.min([curve.mean for curve in curves], axis=0)
    return samples, missed_window(Curve(x, best_mean[None, :]), level)


# ---------------------------------------------------------------- the figure


def section(config: Config, rows: Sequence[Row]) -> Section:
    """The figure and its verdict."""
    grid = grid_rows(config, rows)
    ratios = ratio_rows(config, rows)
    charts = [_chart(grid, name, MODELS[model]) for model, name in product(DISTRIBUTIONS, TARGETS)]
    tables = [
        Table(
            name="prediction-summary",
            title="Predicted against measured",
            rows=summarise(grid),
            note=(
                "Number of settings; median of |predicted/measured − 1|; what 90 % of the settings "
                "stay below; the worst; the share within the tolerance of their dimension "
                "(20 % below d = 8, 12 % from there on); the median with the noise floor taken off "
                "both; the median standard error of a measured mean."
            ),
        ),
        Table(
            name="prediction-ratio",
            title=f"Samples for {config.level:.0%} error on f_{{1,2}}, d = {config.ratio_dim}, "
            "kernel limits",
            rows=[
                {name: value for name, value in row.items() if not name.endswith("miss")}
                for row in ratios
            ],
            note=(
                "Read between the sizes run on logarithmic axes, with 95 % intervals over "
                "resampled repetitions."
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
        verdict=verdict(grid, ratios),
        settings=config.describe(),
        rule=RULE,
    )


def _chart(rows: Sequence[Row], target: str, model: str) -> Chart:
    """Predicted over measured against the measured error, for one target and model."""
    chart_rows = [row for row in rows if row["target"] == target and row["model"] == model]
    series = []
    for dim in dict.fromkeys(row["d"] for row in chart_rows):
        for count in ("∞", "finite"):
            points = [
                row
                for row in chart_rows
                if row["d"] == dim and (row["M"] == "inf") == (count == "∞")
            ]
            ratios = [row["predicted"] / row["measured"] for row in points]
            curve = bars(
                f"d = {dim}, {count} heads",
                [row["relative_error"] for row in points],
                ratios,
                [
                    ratio * row["standard_error"] / row["measured"]
                    for ratio, row in zip(ratios, points, strict=True)
                ],
                hover=[
                    f"N = {row['N']}, n = {row['n']}, M = {row['M']}, λ = {row['ridge']:g}"
                    for row in points
                ],
            )
            series.append(replace(curve, look="dots"))

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
        note="Bars are one standard error. Hover for the setting.",
        marks={"+12%": 1.12, "-12%": 0.88, "+20%": 1.2, "-20%": 0.8},
    )


def verdict(rows: Sequence[Row], ratios: Sequence[Mapping[str, object]]) -> Verdict:
    """The `RULE` on the grid, and on the predicted numbers of samples."""
    everything = summarise(rows)[0]
    within = 1 - len(outliers(rows)) / len(rows)
    median = _median(rows)
    uncertainty = float(np.median([row["standard_error"] / row["measured"] for row in rows]))
    numbers = {DEVIATION: deviation_text(rows)}
    for key in ("90 %", "worst", "within"):
        numbers[key] = str(everything[key])
    numbers["standard error of a measured mean, median"] = str(everything["s.e."])
    for row in ratios:
        name = f"samples of the MLP over attention's, N = {row['N']}"
        numbers[name] = f"{row['ratio, measured']}, predicted {row['ratio, predicted']}"

    # the state; a prediction of samples that the sizes run contradict counts too
    contradicted = [
        f"{model} at N = {row['N']}, {row[f'{model}, miss']} ({row[f'{model}, predicted']} "
        "samples were predicted)"
        for row in ratios
        for model in ("attention", "mlp")
        if row[f"{model}, miss"]
    ]
    state: State
    if not uncertainty <= MEDIAN:
        state = "not sure"
    elif median <= MEDIAN and within >= SHARE and not contradicted:
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
    infinite = [row for row in rows if row["M"] == "inf"]
    if infinite:
        sentence += f" With infinitely many heads the median is {100 * _median(infinite):.1f} %."
    conditional = [row for row in rows if row["conditional_deviation"] is not None]
    if conditional:
        drawn = 100 * _median(conditional, "conditional_deviation")
        sentence += (
            f" With few heads it is {100 * _median(conditional):.1f} %, and predicted from heads "
            f"that were drawn {drawn:.1f} %."
        )
    biased = [row for row in rows if row["model"] == MODELS["biased"]]
    if biased:
        sentence += f" With biased heads it is {100 * _median(biased):.1f} %."
    for words in contradicted:
        sentence += f" Contradicted: {words}."
    return Verdict(state, sentence, numbers)


def _median(rows: Sequence[Row], name: str = "deviation") -> float:
    """Median of |predicted/measured − 1|."""
    return float(np.median(np.abs([row[name] for row in rows])))
