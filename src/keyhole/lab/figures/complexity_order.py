"""Figure 5.

Sample size against complexity: the n that reaches a fixed error, for many targets, against theory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy.stats import rankdata

from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import DEVIATION, predicted_samples
from keyhole.lab.jobs import read_target, target_variance
from keyhole.lab.measured import (
    RESAMPLES,
    CellSweep,
    Estimate,
    Results,
    apart,
    deviation_text,
    log_chart,
    samples_row,
    samples_text,
    series_from_rows,
)
from keyhole.lab.report.document import Chart, Row, Section, Series, State, Table, Verdict
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
is too.
"""

TRIVIAL = {"inverse_variance": "1/Var f*", "degree": "degree of f*"}
"""Predictors that know no complexity: what a small variance or a high degree alone would tell."""


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

    @property
    def problems(self) -> list[tuple[str, int, int]]:
        """Every (target, d, N)."""
        return [(target, d, n) for d in self.dims for n in self.keys for target in self.targets]

    def sweep(self, target: str, dim: int, n_keys: int) -> CellSweep:
        """Error against n."""
        cell = Cell(
            model="attention",
            target=target,
            dim=dim,
            n_keys=n_keys,
            n_heads=None,
            n_samples=self.largest,
            most_samples=self.largest,
            n_test=self.n_test,
            seed=self.seed,
            repetition=0,
        )
        return CellSweep.over(cell, "n_samples", self.sizes, self.repetitions)


PRESETS = {
    "quick": Config(dims=(4, 6), keys=(4,), largest=1024, repetitions=3, n_test=1000),
    "full": Config(),
}


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    cells = []
    for target, dim, n_keys in config.problems:
        cells += config.sweep(target, dim, n_keys).cells
    return cells


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    rows = [_row(config, results, target, dim, n_keys) for target, dim, n_keys in config.problems]
    reached = [row for row in rows if row["measured"] is not None]
    ranks = {name: _rank(reached, name, config.seed) for name in (*MEASURES, *TRIVIAL)}
    trivial = max(TRIVIAL, key=lambda name: ranks[name].value or 0.0)
    margins = {name: _margin(reached, name, trivial, config.seed) for name in MEASURES}
    charts = [_chart(config, reached, name) for name in MEASURES]
    ranks_table = Table(
        name="complexity-ranks",
        title="Which complexity puts the targets in the order of their sample sizes",
        rows=[
            {
                "complexity": words,
                "rank correlation": ranks[name].text(),
                f"more than {TRIVIAL[trivial]}": margins[name].text() if name in margins else "–",
                "points": len(reached),
            }
            for name, words in {**MEASURES, **TRIVIAL}.items()
        ],
        note=(
            "Spearman's rank correlation over the targets that reach the error, ± standard error "
            f"by resampling targets. {TRIVIAL[trivial]} is the better of two trivial predictors; "
            "differences are over the same resampled targets."
        ),
    )
    targets_table = Table("complexity-targets", "Every target", [_readable(row) for row in rows])
    return Section(
        slug="complexity",
        title="Sample size against complexity",
        claim=(
            "The complexity of a target orders the number of samples it takes to learn it, better "
            "than its variance or its degree alone."
        ),
        blocks=[*charts, ranks_table, targets_table],
        verdict=_verdict(rows, reached, ranks, margins, TRIVIAL[trivial]),
        settings=config.describe(),
    )


def _row(config: Config, results: Results, target: str, dim: int, n_keys: int) -> Row:
    """Samples measured and predicted for a problem, and its complexities over Var f*."""
    polynomial = read_target(target, dim)
    variance = target_variance(polynomial, n_keys)
    sweep = config.sweep(target, dim, n_keys)
    return {
        "target": target,
        "d": dim,
        "N": n_keys,
        **samples_row(sweep, results, config.level, config.seed),
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
        **samples_text(row, missing="not reached"),
        "exact norm / Var": f"{float(row['norm'] or 0):.3g}",
        "bound / Var": f"{float(row['bound'] or 0):.3g}",
        "B / Var": f"{float(row['paper'] or 0):.3g}",
    }


def _rank(rows: list[Row], name: str, seed: int) -> Estimate:
    """Rank correlation of a complexity with the samples measured, by resampling targets."""
    return _resampled(_columns(rows, name, "measured"), _spearman, seed)


def _margin(rows: list[Row], name: str, trivial: str, seed: int) -> Estimate:
    """How much more a complexity correlates with the samples than a trivial predictor does."""

    def difference(columns: np.ndarray) -> float:
        return _spearman(columns[:, [0, 2]]) - _spearman(columns[:, [1, 2]])

    return _resampled(_columns(rows, name, trivial, "measured"), difference, seed)


def _columns(rows: list[Row], *names: str) -> np.ndarray:
    """Some fields of the rows that have all of them."""
    complete = [row for row in rows if all(row[name] is not None for name in names)]
    return np.array([[float(row[name] or 0) for name in names] for row in complete])


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
    return Estimate(
        value=statistic(columns),
        spread=float(np.nanstd(draws)),
        low=float(low),
        high=float(high),
    )


def _spearman(pairs: np.ndarray) -> float:
    """Correlation of the ranks of two columns, NaN where one is constant."""
    ranks = rankdata(pairs, axis=0)
    ranks -= ranks.mean(axis=0)
    norms = np.linalg.norm(ranks, axis=0)
    if not norms.all():
        return math.nan
    return float(ranks[:, 0] @ ranks[:, 1] / norms.prod())


def _chart(config: Config, rows: list[Row], name: str) -> Chart:
    """Samples measured against one of the complexities, a colour per (d, N)."""
    series = []
    for dim, n_keys in product(config.dims, config.keys):
        shape_rows = [
            row for row in rows if row["d"] == dim and row["N"] == n_keys and row[name] is not None
        ]
        shape_rows.sort(key=lambda row: float(row[name] or 0))
        label = f"d = {dim}, N = {n_keys}"
        curve = series_from_rows(
            shape_rows, name, "measured", label, role=label, error="standard_error"
        )
        series.append(apart(replace(curve, hover=[str(row["target"]) for row in shape_rows])))

    # a prediction can be right; the other complexities have other units
    x_label = f"{MEASURES[name]} over Var f*"
    if name == "predicted":
        x_label = "predicted n"
        if rows:
            samples = [float(row["measured"] or 1) for row in rows]
            ends = [min(samples), max(samples)]
            series.append(
                Series("measured = predicted", ends, ends, look="dashed", role="prediction")
            )
    return log_chart(
        f"complexity-{name}",
        f"Samples for {config.level:.0%} error against {MEASURES[name]}",
        x_label,
        "samples n, measured",
        series,
        rows=rows,
        note="Hover for the target.",
    )


def _verdict(
    rows: list[Row],
    reached: list[Row],
    ranks: dict[str, Estimate],
    margins: dict[str, Estimate],
    trivial: str,
) -> Verdict:
    """The claim holds where every complexity orders the samples better than trivial predictors.

    Better is a difference of rank correlations above 0 by its whole interval; it holds in part
    where some complexity is better.
    """
    numbers = {}
    for name, words in {**MEASURES, **TRIVIAL}.items():
        numbers[f"rank correlation with {words}"] = ranks[name].text()
    for name, words in MEASURES.items():
        numbers[f"{words} more than {trivial}"] = margins[name].text()
    numbers["targets that reach the error"] = f"{len(reached)} of {len(rows)}"
    numbers[DEVIATION] = deviation_text(reached)

    # the best of all, and the best of the complexities
    correlations = {name: value for name in MEASURES if (value := ranks[name].value) is not None}
    if not correlations:
        return Verdict(
            "not tested", "Too few targets reach the error at these sizes to be ranked.", numbers
        )
    complexities = {name: value for name, value in correlations.items() if name != "predicted"}
    best = max(correlations, key=lambda name: correlations[name])
    best_complexity = max(complexities, key=lambda name: complexities[name])
    better = [name for name in complexities if margins[name].lower > 0]
    state: State
    if len(better) == len(complexities):
        state = "holds"
    elif better or margins["predicted"].lower > 0:
        state = "partly"
    else:
        state = "does not show"
    sentence = (
        f"Of all, {MEASURES[best]} orders the {len(reached)} sample sizes best (rank correlation "
        f"{correlations[best]:.3f}); among the complexities it is {MEASURES[best_complexity]} "
        f"({correlations[best_complexity]:.2f}), and the paper's B(f*) has "
        f"{correlations.get('paper', 0.0):.2f}, where {trivial} alone has "
        f"{max(ranks[name].value or 0.0 for name in TRIVIAL):.2f}."
    )
    not_better = [MEASURES[name] for name in complexities if name not in better]
    if not_better:
        sentence += f" Not better than {trivial} beyond error bars: {', '.join(not_better)}."
    return Verdict(state, sentence, numbers)
