"""Figure 5.

Sample size against complexity: the n that reaches a fixed error, for many targets, against theory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
        most = self.largest
        cell = Cell("attention", target, dim, n_keys, None, most, most, self.n_test, self.seed, 0)
        return CellSweep.over(cell, "n_samples", self.sizes, self.repetitions)


PRESETS = {
    "quick": Config(dims=(4, 6), keys=(4,), largest=1024, repetitions=3, n_test=1000),
    "full": Config(),
}


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    return [cell for problem in config.problems for cell in config.sweep(*problem).cells]


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    rows = [_row(config, results, *problem) for problem in config.problems]
    reached = [row for row in rows if row["measured"] is not None]
    ranks = {name: _rank(reached, name, config.seed) for name in MEASURES}
    table = Table(
        "complexity-ranks",
        "Which complexity puts the targets in the order of their sample sizes",
        [
            {"complexity": words, "rank correlation": ranks[name].text(), "points": len(reached)}
            for name, words in MEASURES.items()
        ],
        note=(
            "Spearman's rank correlation over the targets that reach the error, ± standard error "
            "by resampling."
        ),
    )
    charts = [_chart(config, reached, name) for name in MEASURES]
    details = Table("complexity-targets", "Every target", [_readable(row) for row in rows])
    return Section(
        "complexity",
        "Sample size against complexity",
        "The complexity of a target orders the number of samples it takes to learn it.",
        [*charts, table, details],
        _verdict(config, rows, reached, ranks),
        config.describe(),
    )


def _row(config: Config, results: Results, target: str, dim: int, n_keys: int) -> Row:
    polynomial = read_target(target, dim)
    spread = target_variance(polynomial, n_keys)
    return {
        "target": target,
        "d": dim,
        "N": n_keys,
        **samples_row(config.sweep(target, dim, n_keys), results, config.level, config.seed),
        "predicted": predicted_samples(target, dim, n_keys, config.level, "attention"),
        "norm": rkhs_norm(polynomial) / spread,
        "bound": rkhs_norm_bound(polynomial) / spread,
        "paper": paper_complexity(polynomial) / spread,
    }


def _readable(row: Row) -> Row:
    return {
        "target": f"`{row['target']}`",
        **samples_text(row, missing="not reached"),
        "exact norm / Var": f"{float(row['norm'] or 0):.3g}",
        "bound / Var": f"{float(row['bound'] or 0):.3g}",
        "B / Var": f"{float(row['paper'] or 0):.3g}",
    }


def _rank(rows: list[Row], name: str, seed: int) -> Estimate:
    pairs = np.array(
        [
            [float(row[name] or 0), float(row["measured"] or 0)]
            for row in rows
            if row[name] is not None
        ]
    )
    if len(pairs) < 4:
        return Estimate(None)
    rng = np.random.default_rng(seed)
    draws = [_spearman(pairs[rng.integers(len(pairs), size=len(pairs))]) for _ in range(RESAMPLES)]
    value = _spearman(pairs)
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return Estimate(value, float(np.nanstd(draws)), float(low), float(high))


def _spearman(pairs: np.ndarray) -> float:
    """Correlation of the ranks of two columns, NaN where one is constant."""
    ranks = rankdata(pairs, axis=0)
    ranks -= ranks.mean(axis=0)
    sizes = np.linalg.norm(ranks, axis=0)
    return float(ranks[:, 0] @ ranks[:, 1] / sizes.prod()) if sizes.all() else math.nan


def _chart(config: Config, rows: list[Row], name: str) -> Chart:
    series = []
    for dim in config.dims:
        for n_keys in config.keys:
            own = [
                row
                for row in rows
                if (row["d"], row["N"]) == (dim, n_keys) and row[name] is not None
            ]
            own.sort(key=lambda row: float(row[name] or 0))
            label = f"d = {dim}, N = {n_keys}"
            curve = series_from_rows(
                own, name, "measured", label, role=label, error="standard_error"
            )
            series.append(apart(replace(curve, hover=[str(row["target"]) for row in own])))
    if name == "predicted" and rows:
        found = [float(row["measured"] or 1) for row in rows]
        ends = [min(found), max(found)]
        series.append(Series("measured = predicted", ends, ends, look="dashed", role="prediction"))
    return log_chart(
        f"complexity-{name}",
        f"Samples for {config.level:.0%} error against {MEASURES[name]}",
        "predicted n" if name == "predicted" else f"{MEASURES[name]} over Var f*",
        "samples n, measured",
        series,
        rows=rows,
        note="Hover for the target.",
    )


def _verdict(
    config: Config, rows: list[Row], reached: list[Row], ranks: dict[str, Estimate]
) -> Verdict:
    numbers = {
        f"rank correlation with {words}": ranks[name].text() for name, words in MEASURES.items()
    }
    numbers["targets that reach the error"] = f"{len(reached)} of {len(rows)}"
    numbers[DEVIATION] = deviation_text(reached)
    known = {name: rank for name, rank in ranks.items() if rank.value is not None}
    if not known:
        return Verdict(
            "not tested", "Too few targets reach the error at these sizes to be ranked.", numbers
        )
    best = max(known, key=lambda name: known[name].value or 0.0)
    complexities = [name for name in known if name != "predicted"]
    top = max(complexities, key=lambda name: known[name].value or 0.0)
    paper = known.get("paper", Estimate(0.0))
    positive = all(known[name].low > 0 for name in complexities)
    state: State = "holds" if positive else "partly" if known[best].low > 0 else "does not show"
    sentence = (
        f"Of all, {MEASURES[best]} orders the {len(reached)} sample sizes best (rank correlation "
        f"{known[best].value:.3f}); among the complexities it is {MEASURES[top]} "
        f"({known[top].value:.2f}), and the paper's B(f*) has {paper.value:.2f}."
    )
    return Verdict(state, sentence, numbers)
