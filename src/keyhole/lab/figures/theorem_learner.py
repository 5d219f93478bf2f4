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
class LearnerPanel:
    """A target, and the share of its labels that are outliers."""

    target: str
    outliers: float

    @property
    def words(self) -> str:
        """What is wrong with the labels."""
        if self.outliers:
            return "label noise and outliers"
        return "label noise"


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
    def panels(self) -> list[LearnerPanel]:
        """Every target, without and with outliers."""
        panels = []
        for target in self.targets:
            panels.append(LearnerPanel(target=target, outliers=0.0))
            panels.append(LearnerPanel(target=target, outliers=self.outliers))
        return panels

    def sweep(self, learner: str, panel: LearnerPanel) -> CellSweep:
        """Error against n of one learner."""
        sizes = sorted(self.sizes)
        cell = Cell(
            model="attention",
            target=panel.target,
            dim=self.dim,
            n_keys=self.n_keys,
            n_heads=self.n_heads,
            n_samples=sizes[-1],
            most_samples=sizes[-1],
            n_test=self.n_test,
            seed=self.seed,
            repetition=0,
            learner=learner,
            noise=self.noise,
            outliers=panel.outliers,
            outlier_size=self.outlier_size if panel.outliers else 0.0,
        )
        return CellSweep.over(cell, "n_samples", sizes, self.repetitions)


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
        for cell in config.sweep(learner, panel).cells
    ]


CONSTRAINED = ("huber", "absolute")
"""The learners that are compared with ridge."""

Ratios = dict[tuple[LearnerPanel, str], Estimate]
"""Errors over that of ridge, by panel and constrained learner."""


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    charts = [_chart(config, results, panel) for panel in config.panels]

    # errors of the constrained learners over that of ridge, at the largest n
    n = max(config.sizes)
    ratios: Ratios = {}
    rows: list[Row] = []
    for panel in config.panels:
        row = {"target": f"`{panel.target}`", "labels": panel.words}
        ridge = config.sweep("ridge", panel).curve(results)
        for learner in CONSTRAINED:
            curve = config.sweep(learner, panel).curve(results)
            ratio = ratio_at(curve, ridge, n, config.seed)
            ratios[panel, learner] = ratio
            label, _ = LEARNERS[learner]
            row[label] = ratio.text()
        rows.append(dict(row))
    table = Table(
        name="learner-ratios",
        title=f"Error over that of ridge at n = {n}",
        rows=rows,
        note="Below 1 the constrained learner is better. Means over the same sets and heads.",
    )
    deviation = deviation_text([row for chart in charts for row in chart.rows])
    return Section(
        slug="learner",
        title="The learner of the theorems",
        claim=(
            "The theorems are about a constrained learner: a convex 1-Lipschitz loss minimised "
            "over { Σ |v_m| ≤ K_1, Σ |v_m|^{2} ≤ K_2/M }. With radii chosen by cross-validation it "
            "learns what ridge learns, and its loss is robust to outliers. This is a test of the "
            "learner, not of the theorem: its radii K_1 ≍ √B, K_2 ≍ B/δ and its rate are not used."
        ),
        blocks=[*charts, table],
        verdict=_verdict(config, ratios, deviation),
        settings=config.describe(),
    )


def _chart(config: Config, results: Results, panel: LearnerPanel) -> Chart:
    """Error against n of all learners."""
    # theory has a prediction for ridge; outliers enter it as noise of their variance
    noise = config.noise + panel.outliers * config.outlier_size**2
    predicted: dict[float, float] = {}
    for n in sorted(config.sizes):
        error = predicted_error(
            panel.target, config.dim, config.n_keys, n, config.n_heads, noise=noise
        )
        if error is not None:
            predicted[n] = error

    # measured, beside the prediction for ridge and its oracle
    series: list[Series] = []
    rows: list[Row] = []
    for learner, (label, role) in LEARNERS.items():
        curve = config.sweep(learner, panel).curve(results)
        series.append(curve.series(label, role))
        common = {"target": panel.target, "labels": panel.words, "learner": label}
        rows += curve.rows("n", common, predicted if learner == "ridge" else {})
    series.append(
        Series(
            name="ridge, predicted",
            x=list(predicted),
            y=list(predicted.values()),
            look="dashed",
            role="ridge",
        )
    )
    oracle = config.sweep("ridge", panel).curve(results, "oracle")
    series.append(oracle.series("ridge, oracle penalty", "ridge", "thin"))

    letters = "".join(c for c in panel.target if c.isalnum())
    if panel.outliers:
        suffix = "outliers"
        note = "Outliers enter the prediction as noise of their variance."
    else:
        suffix = "noise"
        note = "The prediction is that of ridge; theory has none for the norm ball."
    return log_chart(
        f"learner-{letters}-{suffix}",
        f"`{panel.target}`, {panel.words}",
        "training sets n",
        "relative test error",
        series,
        rows=rows,
        note=note,
    )


def _verdict(config: Config, ratios: Ratios, deviation: str) -> Verdict:
    """The claim holds where the constrained learner is close to ridge, and better with outliers.

    Close is 1.5 times its error at most, and better is a ratio below 1, both by the whole interval.
    """
    # with noise alone, and with outliers
    numbers = {}
    clean = []
    wild = []
    for (panel, learner), ratio in ratios.items():
        label, _ = LEARNERS[learner]
        numbers[f"{label} / ridge on `{panel.target}`, {panel.words}"] = ratio.text()
        if panel.outliers:
            wild.append(ratio)
        else:
            clean.append(ratio)
    numbers[DEVIATION] = deviation

    clean_values = [ratio.value or math.nan for ratio in clean]
    wild_values = [ratio.value or math.nan for ratio in wild]
    sentence = (
        f"At n = {max(config.sizes)} with noise alone the constrained learner has "
        f"{min(clean_values):.2f} to {max(clean_values):.2f} times the error of ridge; with "
        f"outliers {min(wild_values):.2f} to {max(wild_values):.2f} times."
    )
    is_robust = all(ratio.upper < 1 for ratio in wild)
    is_close = all(ratio.upper <= 1.5 for ratio in clean)
    state: State
    if is_robust and is_close:
        state = "holds"
    elif is_robust or is_close:
        state = "partly"
    else:
        state = "does not show"
    return Verdict(state, sentence, numbers)
