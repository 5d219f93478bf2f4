"""Figure 5.

Sample size against complexity: the n that reaches a fixed error, for many targets, against theory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy.stats import rankdata

from keyhole.lab.cells import Cell, RidgeCell, Row, read_target, target_variance
from keyhole.lab.curves import (
    DEVIATION,
    RESAMPLES,
    Estimate,
    above,
    count_text,
    curve_of,
    deviation_text,
    samples_needed,
    state_of,
)
from keyhole.lab.predictions import predicted_samples
from keyhole.lab.report.document import Chart, Section, Series, Table, Verdict, bars
from keyhole.theory.complexity import paper_complexity, rkhs_norm, rkhs_norm_bound

TARGETS = (
    *("query", "query^2", "query^3", "token", "token^2", "token^3", "token^4"),
    *("query * token", "query * token^2", "query^2 * token", "corr", "corr^2"),
    *("corr * token", "corr^2 * token", "corr^3 * token", "rotated(1) * token"),
    *("token + token^2", "token + corr * token"),
)
"""Targets of every family of the paper, products, and sums of an easy and a hard part."""

MEASURES = {
    "predicted": "predicted n",
    "norm": "exact norm",
    "bound": "norm bound",
    "paper": "paper's B(f*)",
}
"""Complexities by name, each a field of a row; norms and B are divided by Var f*, since the error
is too."""

COMPLEXITIES = ("norm", "bound", "paper")
"""Those that the claim is about."""

TRIVIAL = {"inverse_variance": "1/Var f*", "degree": "degree of f*"}
"""Predictors that know no complexity: what a small variance or a high degree alone would tell."""

RULE = (
    "The number is how much more the rank correlation of a complexity with the samples is than "
    "that of the better trivial predictor, 1/Var f* or the degree. Holds if its 95 % interval over "
    "resampled targets lies above 0 for the exact norm, the norm bound and the paper's B(f*); "
    "partly if for some of these or for the predicted n; not sure if intervals have 0 inside and "
    "none lies above."
)


@dataclass(frozen=True)
class Config:
    """Sizes: every target in every (d, N), with the exact kernel of infinitely many heads."""

    dims: tuple[int, ...] = (4, 6, 8)
    keys: tuple[int, ...] = (4, 8)
    targets: tuple[str, ...] = TARGETS
    smallest: int = 8
    largest: int = 2896
    level: float = 0.25
    repetitions: int = 4
    n_test: int = 2000
    seed: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of samples, each √2 times the one before, ending at the largest."""
        count = 1 + int(2 * math.log2(self.largest / self.smallest))
        return tuple(sorted({max(2, round(self.largest * 2 ** (-k / 2))) for k in range(count)}))

    def describe(self) -> str:
        """The settings in a sentence or two."""
        return (
            f"Our settings: sphere distribution, d in {{{', '.join(map(str, self.dims))}}}, N in "
            f"{{{', '.join(map(str, self.keys))}}}; exact kernel of zero-mean heads; n up to "
            f"{self.largest} in steps of √2; {self.repetitions} repetitions; {self.n_test} test "
            "sets."
        )


PRESETS = {
    "quick": Config(dims=(4, 6), keys=(4,), largest=1024, repetitions=3, n_test=1000),
    "full": Config(),
}


def cells(config: Config) -> list[Cell]:
    """What has to be measured."""
    return [
        RidgeCell(
            model="attention",
            targets=config.targets,
            dim=dim,
            n_keys=n_keys,
            heads=(None,),
            sizes=config.sizes,
            n_test=config.n_test,
            seed=config.seed,
            repetition=repetition,
        )
        for dim in config.dims
        for n_keys in config.keys
        for repetition in range(config.repetitions)
    ]


def section(config: Config, rows: Sequence[Row]) -> Section:
    """The figure and its verdict."""
    table = [
        _target_row(config, rows, target, dim, n_keys)
        for dim in config.dims
        for n_keys in config.keys
        for target in config.targets
    ]
    reached = [row for row in table if row["measured"] is not None]
    targets_table = Table("complexity-targets", "Every target", [_readable(row) for row in table])
    return Section(
        slug="complexity",
        title="Sample size against complexity",
        claim=(
            "The complexity of a target orders the number of samples it takes to learn it, better "
            "than its variance or its degree alone."
        ),
        blocks=[
            *(_chart(config, reached, name) for name in MEASURES),
            targets_table,
        ],
        verdict=verdict(table, config.seed),
        settings=config.describe(),
        rule=RULE,
    )


def _target_row(config: Config, rows: Sequence[Row], target: str, dim: int, n_keys: int) -> Row:
    """Samples measured and predicted for a target, and its complexities over Var f*."""
    polynomial = read_target(target, dim)
    variance = target_variance(polynomial, n_keys)
    curve = curve_of(rows, "n", target=target, d=dim, N=n_keys)
    samples = samples_needed(curve, config.level, config.seed)
    is_known = samples.value is not None and math.isfinite(samples.spread)
    return {
        "target": target,
        "d": dim,
        "N": n_keys,
        "measured": samples.value,
        "standard_error": samples.spread if is_known else None,
        "interval": samples.text(missing="not reached"),
        "predicted": predicted_samples(target, dim, n_keys, config.level, "attention"),
        "norm": rkhs_norm(polynomial) / variance,
        "bound": rkhs_norm_bound(polynomial) / variance,
        "paper": paper_complexity(polynomial) / variance,
        "inverse_variance": 1 / variance,
        "degree": float(max(sum(degrees) for degrees in polynomial.coefficient_norms())),
    }


def _readable(row: Row) -> Row:
    """A row as text."""
    return {
        "target": f"`{row['target']}`",
        "d": row["d"],
        "N": row["N"],
        "n, measured": row["interval"],
        "n, predicted": count_text(row["predicted"]),
        "exact norm / Var": f"{row['norm']:.3g}",
        "bound / Var": f"{row['bound']:.3g}",
        "B / Var": f"{row['paper']:.3g}",
    }


def ranks_of(
    rows: Sequence[Row], seed: int
) -> tuple[dict[str, Estimate], dict[str, Estimate], str]:
    """Rank correlations with the samples, how much more than the better trivial one, and that."""

    def spearman(columns: np.ndarray) -> float:
        return _spearman(columns[:, 0], columns[:, -1])

    def difference(columns: np.ndarray) -> float:
        return spearman(columns) - _spearman(columns[:, 1], columns[:, -1])

    names = (*MEASURES, *TRIVIAL)
    ranks = {name: _resampled(_columns(rows, name, "measured"), spearman, seed) for name in names}
    trivial = max(TRIVIAL, key=lambda name: ranks[name].value or 0.0)
    margins = {
        name: _resampled(_columns(rows, name, trivial, "measured"), difference, seed)
        for name in MEASURES
    }
    return ranks, margins, trivial


def _columns(rows: Sequence[Row], *names: str) -> np.ndarray:
    """Some fields of the rows that have all of them."""
    complete = [row for row in rows if all(row[name] is not None for name in names)]
    return np.array([[float(row[name]) for name in names] for row in complete])


def _resampled(
    columns: np.ndarray, statistic: Callable[[np.ndarray], float], seed: int
) -> Estimate:
    """A statistic of rows with a 95 % interval by resampling them; none for fewer than four."""
    if len(columns) < 4:
        return Estimate(None)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(RESAMPLES):
        drawn_rows = rng.integers(len(columns), size=len(columns))
        draws.append(statistic(columns[drawn_rows]))
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return Estimate(statistic(columns), float(np.nanstd(draws)), float(low), float(high))


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Correlation of the ranks of two columns, NaN where one is constant."""
    ranks = np.stack([rankdata(x), rankdata(y)])
    ranks -= ranks.mean(axis=1, keepdims=True)
    norms = np.linalg.norm(ranks, axis=1)
    if not norms.all():
        return math.nan
    return float(ranks[0] @ ranks[1] / norms.prod())


def _chart(config: Config, rows: Sequence[Row], name: str) -> Chart:
    """Samples measured against one of the complexities, a colour per (d, N)."""
    series = []
    for dim, n_keys in product(config.dims, config.keys):
        points = [
            row for row in rows if (row["d"], row["N"]) == (dim, n_keys) and row[name] is not None
        ]
        points.sort(key=lambda row: row[name])
        label = f"d = {dim}, N = {n_keys}"
        curve = bars(
            label,
            [row[name] for row in points],
            [row["measured"] for row in points],
            [row["standard_error"] or 0.0 for row in points],
            label,
            hover=[row["target"] for row in points],
        )
        series.append(replace(curve, look="dots"))

    # a prediction can be right; the other complexities have other units
    x_label = f"{MEASURES[name]} over Var f*"
    if name == "predicted":
        x_label = "predicted n"
        if rows:
            samples = [row["measured"] for row in rows]
            ends = [min(samples), max(samples)]
            series.append(
                Series("measured = predicted", ends, ends, look="dashed", role="prediction")
            )
    return Chart(
        name=f"complexity-{name}",
        title=f"Samples for {config.level:.0%} error against {MEASURES[name]}",
        x_label=x_label,
        y_label="samples n, measured",
        series=series,
        rows=rows,
        x_log=True,
        y_log=True,
        note="Hover for the target.",
    )


def verdict(rows: Sequence[Row], seed: int) -> Verdict:
    """The `RULE` on a row for each target."""
    reached = [row for row in rows if row["measured"] is not None]
    ranks, margins, trivial_name = ranks_of(reached, seed)
    trivial = TRIVIAL[trivial_name]
    numbers = {}
    for name, words in {**MEASURES, **TRIVIAL}.items():
        numbers[f"rank correlation with {words}"] = ranks[name].text()
    for name, words in MEASURES.items():
        numbers[f"{words} more than {trivial}"] = margins[name].text()
    numbers["targets that reach the error"] = f"{len(reached)} of {len(rows)}"
    numbers[DEVIATION] = deviation_text(reached)

    correlations = {name: value for name in MEASURES if (value := ranks[name].value) is not None}
    if not correlations:
        return Verdict(
            "not tested", "Too few targets reach the error at these sizes to be ranked.", numbers
        )
    is_better = {name: above(margins[name], 0.0) for name in MEASURES}
    parts = [is_better[name] for name in COMPLEXITIES]
    state = state_of(parts)
    if state != "holds" and is_better["predicted"]:
        state = "partly"

    best = max(correlations, key=lambda name: correlations[name])
    best_complexity = max(COMPLEXITIES, key=lambda name: correlations.get(name, 0.0))
    sentence = (
        f"Of all, {MEASURES[best]} orders the {len(reached)} sample sizes best (rank correlation "
        f"{correlations[best]:.3f}); among the complexities it is {MEASURES[best_complexity]} "
        f"({correlations[best_complexity]:.2f}), and the paper's B(f*) has "
        f"{correlations.get('paper', 0.0):.2f}, where {trivial} alone has "
        f"{ranks[trivial_name].value or 0.0:.2f}."
    )
    unsure = [MEASURES[name] for name in COMPLEXITIES if is_better[name] is None]
    if unsure:
        sentence += f" Not sure to be better than {trivial}: {', '.join(unsure)}."
    refuted = [MEASURES[name] for name in COMPLEXITIES if is_better[name] is False]
    if refuted:
        sentence += f" Not better than {trivial}: {', '.join(refuted)}."
    return Verdict(state, sentence, numbers)
