"""Figure 2.

Correlation-weighted functions f_{2,q}: heads whose mean is the identity need fewer samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import (
    DEVIATION,
    CurveConfig,
    curve_cells,
    curve_chart,
    measured_curve,
    power,
    predicted_samples,
)
from keyhole.lab.measured import (
    Estimate,
    Results,
    count_text,
    deviation_text,
    samples_measured,
    samples_ratio,
)
from keyhole.lab.report.document import Chart, Row, Section, Series, State, Table, Verdict, bars

BOTH = ("attention", "biased")
"""The models compared: heads of mean zero, and of mean W_0."""


@dataclass(frozen=True)
class Config(CurveConfig):
    """Powers q of f_{2,q}, and the error at which samples are counted.

    And where theory is asked beside.
    """

    dim: int = 5
    n_keys: int = 8
    smallest: int = 24
    largest: int = 12_288
    more_up_to: int = 3072
    others_up_to: int = 3072
    """The MLP and finitely many heads end here: the verdict is read with infinitely many."""
    powers: tuple[int, ...] = (1, 2, 3)
    level: float = 0.05
    far_dims: tuple[int, ...] = (16, 64)

    def reach(self, model: str, *, exact: bool) -> int:
        """The largest n at which a model is run."""
        return self.largest if exact and model in BOTH else min(self.others_up_to, self.largest)


PRESETS = {
    "quick": Config(
        n_heads=400,
        largest=3072,
        repetitions=3,
        more_repetitions=0,
        n_test=1000,
        others_up_to=768,
        powers=(1, 2),
        level=0.1,
    ),
    "full": Config(),
}


def notation(q: int) -> str:
    """f_{2,q} in words that can be read back."""
    return "corr * token" if q == 1 else f"corr^{q} * token"


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    return curve_cells(config, map(notation, config.powers))


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    charts = []
    for q in config.powers:
        title = f"f_{{2,{q}}}: mean of {power('⟨x₀, xᵢ⟩', q)} ⟨β, xᵢ⟩"
        charts.append(
            curve_chart(config, results, notation(q), f"correlation-q{q}", title, config.level)
        )
    ratios = {q: _ratio(config, results, q) for q in config.powers}
    rows = [
        _row(config, results, dim, q, ratios[q])
        for dim in (config.dim, *config.far_dims)
        for q in config.powers
    ]
    table = Table(
        "correlation-samples",
        f"Samples for {config.level:.0%} error, infinitely many heads, N = {config.n_keys}",
        rows,
        note=(
            "Measured: read between the sizes run on logarithmic axes, ± standard error over "
            "resampled repetitions. Each power is read at the sample size that it needs. Other "
            "dimensions: theory."
        ),
    )
    return Section(
        "correlation",
        "Correlation-weighted functions",
        "Heads with a non-zero mean, E W = W_0, learn correlation-weighted functions f_{2,q} = "
        "(1/N) Σ ⟨x₀, xᵢ⟩^{q} ⟨β, xᵢ⟩ from fewer samples than heads of mean zero, and the more so "
        "the higher q.",
        [_ratio_chart(config, ratios, rows), *charts, table],
        _verdict(config, ratios, deviation_text([row for chart in charts for row in chart.rows])),
        config.describe(),
    )


def _ratio(config: Config, results: Results, q: int) -> Estimate:
    """Samples of zero-mean heads over those of biased ones, on the same sets.

    Heads are infinitely many of both.
    """
    zero, biased = (
        measured_curve(config, results, model, notation(q), exact=True) for model in BOTH
    )
    return samples_ratio(zero, biased, config.level, config.seed)


def _predicted(config: Config, q: int, dim: int) -> list[int | None]:
    return [
        predicted_samples(notation(q), dim, config.n_keys, config.level, model) for model in BOTH
    ]


def _predicted_ratio(config: Config, q: int, dim: int) -> float | None:
    zero, biased = _predicted(config, q, dim)
    return zero / biased if zero and biased else None


def _row(config: Config, results: Results, dim: int, q: int, ratio: Estimate) -> Row:
    row: dict[str, str] = {"d": str(dim), "target": f"f_{{2,{q}}}"}
    here = dim == config.dim
    for model, words, told in zip(
        BOTH, ("zero-mean", "biased"), _predicted(config, q, dim), strict=True
    ):
        found = samples_measured(
            measured_curve(config, results, model, notation(q), exact=True), config.level
        )
        row[words] = found.text(missing=f"> {config.largest}") if here else "–"
        row[f"{words}, predicted"] = count_text(told)
    told_ratio = _predicted_ratio(config, q, dim)
    row["ratio"] = ratio.text() if here else "–"
    return {**row, "ratio, predicted": "–" if told_ratio is None else f"{told_ratio:.3g}"}


def _ratio_chart(config: Config, ratios: dict[int, Estimate], rows: list[Row]) -> Chart:
    found = {q: ratio for q, ratio in ratios.items() if ratio.value is not None}
    values, spreads = (
        [float(getattr(r, name) or 0.0) for r in found.values()] for name in ("value", "spread")
    )
    series = [
        bars(
            f"measured, d = {config.dim}",
            list(found),
            values,
            np.nan_to_num(spreads).tolist(),
            "biased",
        )
    ]
    for dim in (config.dim, *config.far_dims):
        told = {
            q: ratio
            for q in config.powers
            if (ratio := _predicted_ratio(config, q, dim)) is not None
        }
        role = "biased" if dim == config.dim else f"d = {dim}"
        series.append(
            Series(
                f"predicted, d = {dim}", list(told), list(told.values()), look="dashed", role=role
            )
        )
    return Chart(
        "correlation-ratio",
        f"How many times the samples of biased heads zero-mean heads need, {config.level:.0%} "
        "error",
        "power q",
        "ratio of samples",
        [one for one in series if len(one.x)],
        rows=rows,
        y_log=True,
        note=(
            "Infinitely many heads. Above 1 the mean helps. Bars are one standard error; dashed: "
            "theory."
        ),
        marks={"equal": 1.0},
    )


def _verdict(config: Config, ratios: dict[int, Estimate], deviation: str) -> Verdict:
    numbers = {}
    for q, ratio in ratios.items():
        told = _predicted_ratio(config, q, config.dim)
        beside = "no prediction" if told is None else f"predicted {told:.2f}"
        numbers[f"samples of zero-mean over biased heads, f_{{2,{q}}}"] = (
            f"{ratio.text()} ({beside})"
        )
    numbers[DEVIATION] = deviation
    missing = [q for q, ratio in ratios.items() if ratio.value is None]
    if missing or len(ratios) < 2:
        needed = (
            ", ".join(count_text(n) for n in _predicted(config, missing[0], config.dim))
            if missing
            else ""
        )
        sentence = (
            f"{config.level:.0%} error is not measured by both kinds of heads up to n = "
            f"{config.largest} on f_{{2,{missing[0]}}}, for which theory asks {needed} samples."
            if missing
            else "Growth with q needs more than one power."
        )
        return Verdict("not tested", sentence, numbers)
    values = [ratio.value or 0.0 for ratio in ratios.values()]
    first, last = (list(ratios.values())[i] for i in (0, -1))
    grows = all(a < b for a, b in pairwise(values))
    sure = last.lower > max(first.upper, 1.0)
    state: State = (
        "holds"
        if grows and sure
        else "partly"
        if values[-1] > max(values[0], 1.0)
        else "does not show"
    )
    listed = ", ".join(f"{value:.2f} (q = {q})" for q, value in zip(ratios, values, strict=True))
    sentence = (
        f"For {config.level:.0%} error zero-mean heads need {listed} times the samples of biased "
        "heads: at the size that each power needs the advantage "
        f"{'grows with q' if grows else 'does not grow with q throughout'}."
    )
    return Verdict(state, sentence, numbers)
