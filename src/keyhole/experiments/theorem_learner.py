"""Figure 7. The learner of the theorems: a convex loss over a norm ball, against ridge, with noise and outliers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from keyhole.experiments.cells import Cell
from keyhole.experiments.jobs import read_target
from keyhole.experiments.measured import Curve, Estimate, Results, deviation_text, ratio_at, read_curve
from keyhole.experiments.prediction import variance
from keyhole.report.document import Chart, Row, Section, Series, State, Table, Verdict
from keyhole.theory import best_ridge_curve

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
            f"Our settings: sphere law, d = {self.dim}, N = {self.n_keys}, M = {self.n_heads} zero-mean heads, the "
            "same for all learners; label "
            f"noise of {self.noise:g} Var f*; with outliers, {self.outliers:.0%} of the labels are off by "
            f"±{self.outlier_size:g} standard deviations; "
            f"{self.repetitions} repetitions; test error against f* itself. Ridge chooses its penalty by "
            "leave-one-out, the norm ball its radii by "
            "cross-validation, on the training sets alone."
        )


PRESETS = {
    "quick": Config(n_heads=30, sizes=(40, 64, 100, 160), targets=("corr * token",), repetitions=3, n_test=1000),
    "full": Config(),
}


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    return [
        cell
        for learner in LEARNERS
        for target in config.targets
        for share in _shares(config)
        for run in _runs(config, learner, target, share)
        for cell in run
    ]


def _shares(config: Config) -> dict[float, str]:
    """Shares of outliers, by the words of their panel."""
    return {0.0: "label noise", config.outliers: "label noise and outliers"}


def _runs(config: Config, learner: str, target: str, share: float) -> list[list[Cell]]:
    sizes = sorted(config.sizes)
    shape = (config.dim, config.n_keys, config.n_heads)
    labels = (config.noise, share, config.outlier_size if share else 0.0)
    return [
        [
            Cell("attention", target, *shape, n, sizes[-1], config.n_test, config.seed, r, learner, *labels)
            for n in sizes
        ]
        for r in range(config.repetitions)
    ]


def _curve(config: Config, results: Results, learner: str, target: str, share: float, name: str = "error") -> Curve:
    return read_curve(results, sorted(config.sizes), _runs(config, learner, target, share), name)


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    panels = [(target, share, words) for target in config.targets for share, words in _shares(config).items()]
    charts = [_chart(config, results, *panel) for panel in panels]
    n = max(config.sizes)
    ratios = {
        (target, share, learner): ratio_at(
            _curve(config, results, learner, target, share),
            _curve(config, results, "ridge", target, share),
            n,
            config.seed,
        )
        for target, share, _ in panels
        for learner in LEARNERS
        if learner != "ridge"
    }
    table = Table(
        "learner-ratios",
        f"Error over that of ridge at n = {n}",
        [
            {
                "target": f"`{target}`",
                "labels": words,
                **{LEARNERS[k][0]: ratios[target, share, k].text() for k in LEARNERS if k != "ridge"},
            }
            for target, share, words in panels
        ],
        note="Below 1 the constrained learner is better. Means over the same sets and heads.",
    )
    rows = [row for chart in charts for row in chart.rows]
    return Section(
        "learner",
        "The learner of the theorems",
        "The theorems are about a constrained learner: a convex 1-Lipschitz loss minimised over { Σ |v_m| ≤ K_1, Σ "
        "|v_m|^{2} ≤ K_2/M }. It learns "
        "what ridge learns, and its loss shrugs off wild labels.",
        [*charts, table],
        _verdict(config, ratios, deviation_text(rows)),
        config.describe(),
    )


def _chart(config: Config, results: Results, target: str, share: float, words: str) -> Chart:
    series: list[Series] = []
    rows: list[Row] = []
    predicted = _predicted(config, target, share)
    for learner, (label, role) in LEARNERS.items():
        curve = _curve(config, results, learner, target, share)
        series.append(curve.series(label, role))
        for i, n in enumerate(map(int, curve.x)):
            error = float(curve.error[i])
            rows.append(
                {
                    "target": target,
                    "labels": words,
                    "learner": label,
                    "n": n,
                    "measured": float(curve.mean[i]),
                    "standard_error": error if math.isfinite(error) else None,
                    "predicted": predicted.get(n) if learner == "ridge" else None,
                }
            )
    series.append(Series("ridge, predicted", list(predicted), list(predicted.values()), look="dashed", role="ridge"))
    series.append(
        _curve(config, results, "ridge", target, share, "oracle").series("ridge, oracle penalty", "ridge", "thin")
    )
    slug = "outliers" if share else "noise"
    letters = "".join(c for c in target if c.isalnum())
    note = (
        "Outliers enter the prediction as noise of their variance."
        if share
        else "The prediction is that of ridge; theory has none for the norm ball."
    )
    return Chart(
        f"learner-{letters}-{slug}",
        f"`{target}`, {words}",
        "training sets n",
        "relative test error",
        series,
        rows=rows,
        x_log=True,
        y_log=True,
        note=note,
    )


def _predicted(config: Config, target: str, share: float) -> dict[int, float]:
    """Relative error of ridge at the best penalty, noise floor taken off."""
    polynomial = read_target(target, config.dim)
    spread = variance(polynomial, config.n_keys)
    noise = (config.noise + share * config.outlier_size**2) * spread
    sizes = np.array(sorted(config.sizes))
    errors = best_ridge_curve(polynomial, sizes, config.n_keys, noise, config.n_heads).error
    return {int(n): float(error - noise) / spread for n, error in zip(sizes, errors, strict=True)}


def _verdict(config: Config, ratios: dict[tuple[str, float, str], Estimate], deviation: str) -> Verdict:
    n = max(config.sizes)
    clean = [ratio for (_, share, _), ratio in ratios.items() if share == 0]
    wild = [ratio for (_, share, _), ratio in ratios.items() if share > 0]
    numbers = {
        f"{LEARNERS[learner][0]} / ridge on `{target}`, {_shares(config)[share]}": ratio.text()
        for (target, share, learner), ratio in ratios.items()
    }
    numbers["median deviation of prediction"] = deviation
    values = [[ratio.value or math.nan for ratio in group] for group in (clean, wild)]
    sentence = (
        f"At n = {n} with noise alone the constrained learner has {min(values[0]):.2f} to {max(values[0]):.2f} times "
        "the error of ridge; with outliers "
        f"{min(values[1]):.2f} to {max(values[1]):.2f} times."
    )
    robust = all((ratio.high if math.isfinite(ratio.high) else ratio.value or math.inf) < 1 for ratio in wild)
    close = max(values[0]) <= 1.5
    state: State = "holds" if robust and close else "partly" if robust or close else "does not show"
    return Verdict(state, sentence, numbers)
