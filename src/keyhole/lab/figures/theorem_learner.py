"""Figure 7.

The learner of the theorems: a convex loss over a norm ball, against ridge, with noise and outliers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import DEVIATION, predicted_error
from keyhole.lab.measured import CellSweep, Estimate, Results, deviation_text, log_chart, ratio_at
from keyhole.lab.report.document import Chart, Row, Section, Series, State, Table, Verdict

LEARNERS = {
    "ridge": ("ridge", "ridge"),
    "huber": ("norm ball, Huber loss", "ball"),
    "absolute": ("norm ball, absolute loss", "attention"),
}
"""Learners by the name a reader sees and the role that colours them."""


@dataclass(frozen=True)
class Config:
    """Sizes; noise and outliers in units of the variance and the standard deviation of f*."""

    dim: int = 4
    n_keys: int = 6
    n_heads: int = 100
    sizes: tuple[int, ...] = (64, 128, 256, 512)
    targets: tuple[str, ...] = ("token^2", "corr * token")
    repetitions: int = 5
    noise: float = 0.1
    outliers: float = 0.05
    outlier_size: float = 10.0
    n_test: int = 2000
    seed: int = 0

    def describe(self) -> str:
        """The settings in a sentence or two."""
        return (
            f"Our settings: sphere distribution, d = {self.dim}, N = {self.n_keys}, M = "
            f"{self.n_heads} zero-mean heads, the same for all learners; label noise of "
            f"{self.noise:g} Var f*; with outliers, {self.outliers:.0%} of the labels are off by "
            f"±{self.outlier_size:g} standard deviations; {self.repetitions} repetitions; test "
            "error against f* itself. Ridge chooses its penalty by leave-one-out, the norm ball "
            "its radii by cross-validation, on the training sets alone."
        )

    @property
    def panels(self) -> list[tuple[str, float]]:
        """Every target, without and with outliers: their share."""
        return [(target, share) for target in self.targets for share in (0.0, self.outliers)]

    def sweep(self, learner: str, target: str, share: float) -> CellSweep:
        """Error against n of one learner."""
        sizes = sorted(self.sizes)
        shape, rest = (
            (self.dim, self.n_keys, self.n_heads),
            (sizes[-1], sizes[-1], self.n_test, self.seed, 0),
        )
        labels = (self.noise, share, self.outlier_size if share else 0.0)
        return CellSweep.over(
            Cell("attention", target, *shape, *rest, learner, *labels),
            "n_samples",
            sizes,
            self.repetitions,
        )


PRESETS = {
    "quick": Config(
        n_heads=30, sizes=(40, 64, 100, 160), targets=("corr * token",), repetitions=3, n_test=1000
    ),
    "full": Config(),
}


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    return [
        cell
        for learner in LEARNERS
        for panel in config.panels
        for cell in config.sweep(learner, *panel).cells
    ]


def _words(share: float) -> str:
    return "label noise and outliers" if share else "label noise"


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    charts = [_chart(config, results, *panel) for panel in config.panels]
    n, others = max(config.sizes), [learner for learner in LEARNERS if learner != "ridge"]
    ratios = {}
    for panel in config.panels:
        ridge = config.sweep("ridge", *panel).curve(results)
        for learner in others:
            curve = config.sweep(learner, *panel).curve(results)
            ratios[*panel, learner] = ratio_at(curve, ridge, n, config.seed)
    table = Table(
        "learner-ratios",
        f"Error over that of ridge at n = {n}",
        [
            {
                "target": f"`{target}`",
                "labels": _words(share),
                **{
                    LEARNERS[learner][0]: ratios[target, share, learner].text()
                    for learner in others
                },
            }
            for target, share in config.panels
        ],
        note="Below 1 the constrained learner is better. Means over the same sets and heads.",
    )
    return Section(
        "learner",
        "The learner of the theorems",
        "The theorems are about a constrained learner: a convex 1-Lipschitz loss minimised over { "
        "Σ |v_m| ≤ K_1, Σ |v_m|^{2} ≤ K_2/M }. It learns what ridge learns, and its loss shrugs "
        "off wild labels.",
        [*charts, table],
        _verdict(config, ratios, deviation_text([row for chart in charts for row in chart.rows])),
        config.describe(),
    )


def _chart(config: Config, results: Results, target: str, share: float) -> Chart:
    series: list[Series] = []
    rows: list[Row] = []
    # outliers enter the prediction as noise of their variance
    noise = config.noise + share * config.outlier_size**2
    told = {
        n: predicted_error(target, config.dim, config.n_keys, n, config.n_heads, noise=noise)
        for n in sorted(config.sizes)
    }
    predicted = {n: error for n, error in told.items() if error is not None}
    for learner, (label, role) in LEARNERS.items():
        curve = config.sweep(learner, target, share).curve(results)
        series.append(curve.series(label, role))
        common = {"target": target, "labels": _words(share), "learner": label}
        rows += curve.rows("n", common, predicted if learner == "ridge" else {})
    series.append(
        Series(
            "ridge, predicted",
            list(predicted),
            list(predicted.values()),
            look="dashed",
            role="ridge",
        )
    )
    oracle = config.sweep("ridge", target, share).curve(results, "oracle")
    series.append(oracle.series("ridge, oracle penalty", "ridge", "thin"))
    letters = "".join(c for c in target if c.isalnum())
    return log_chart(
        f"learner-{letters}-{'outliers' if share else 'noise'}",
        f"`{target}`, {_words(share)}",
        "training sets n",
        "relative test error",
        series,
        rows=rows,
        note="Outliers enter the prediction as noise of their variance."
        if share
        else "The prediction is that of ridge; theory has none for the norm ball.",
    )


def _verdict(
    config: Config, ratios: dict[tuple[str, float, str], Estimate], deviation: str
) -> Verdict:
    clean, wild = (
        [ratio for (_, share, _), ratio in ratios.items() if bool(share) == outliers]
        for outliers in (False, True)
    )
    numbers = {
        f"{LEARNERS[learner][0]} / ridge on `{target}`, {_words(share)}": ratio.text()
        for (target, share, learner), ratio in ratios.items()
    }
    numbers[DEVIATION] = deviation
    values = [[ratio.value or math.nan for ratio in group] for group in (clean, wild)]
    sentence = (
        f"At n = {max(config.sizes)} with noise alone the constrained learner has "
        f"{min(values[0]):.2f} to {max(values[0]):.2f} times the error of ridge; with outliers "
        f"{min(values[1]):.2f} to {max(values[1]):.2f} times."
    )
    robust, close = all(ratio.upper < 1 for ratio in wild), max(values[0]) <= 1.5
    state: State = "holds" if robust and close else "partly" if robust or close else "does not show"
    return Verdict(state, sentence, numbers)
