"""Figure 2.

Correlation-weighted functions f_{2,q}: heads whose mean is the identity need fewer samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from keyhole.lab.cells import Cell, Row
from keyhole.lab.curves import (
    DEVIATION,
    Estimate,
    above,
    all_of,
    below,
    count_text,
    deviation_text,
    samples_needed,
    samples_ratio,
)
from keyhole.lab.figures.learning_curves import CurveConfig, curve_chart, power
from keyhole.lab.predictions import predicted_samples
from keyhole.lab.report.document import Chart, Section, Series, State, Table, Verdict, bars

BOTH = ("attention", "biased")
"""The models compared: heads of mean zero, and of mean W_0."""

RULE = (
    "The number is how many times the samples of biased heads zero-mean heads need on f_{2,q}. "
    "Holds if it grows with q, the 95 % interval of the last q lies above that of the first and "
    "above 1, and that of every q lies above 1; partly if only the last q is so; not sure if "
    "intervals leave that open."
)


@dataclass(frozen=True)
class Config(CurveConfig):
    """Powers q of f_{2,q}, and the error at which samples are counted."""

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
    """Dimensions for which theory is asked too."""

    def reach(self, model: str, *, exact: bool) -> int:
        """The largest n at which a model is run."""
        if exact and model in BOTH:
            return self.largest
        return min(self.others_up_to, self.largest)


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
    """What has to be measured."""
    return config.cells([notation(q) for q in config.powers])


def section(config: Config, rows: Sequence[Row]) -> Section:
    """The figure and its verdict."""
    charts = []
    for q in config.powers:
        title = f"f_{{2,{q}}}: mean of {power('⟨x₀, xᵢ⟩', q)} ⟨β, xᵢ⟩"
        charts.append(
            curve_chart(config, rows, notation(q), f"correlation-q{q}", title, config.level)
        )
    ratios = {q: _ratio(config, rows, q) for q in config.powers}
    table = Table(
        name="correlation-samples",
        title=f"Samples for {config.level:.0%} error, infinitely many heads, N = {config.n_keys}",
        rows=[
            _samples_row(config, rows, dim, q, ratios[q])
            for dim in (config.dim, *config.far_dims)
            for q in config.powers
        ],
        note=(
            "Measured: read between the sizes run on logarithmic axes, with 95 % intervals over "
            "resampled repetitions. Each power is read at the sample size that it needs. Other "
            "dimensions: theory."
        ),
    )
    deviation = deviation_text([row for chart in charts for row in chart.rows])
    return Section(
        slug="correlation",
        title="Correlation-weighted functions",
        claim=(
            "Heads with a non-zero mean, E W = W_{0}, learn correlation-weighted functions "
            "f_{2,q} = (1/N) Σ ⟨x₀, xᵢ⟩^{q} ⟨β, xᵢ⟩ from fewer samples than heads of mean zero, "
            "and the more so the higher q."
        ),
        blocks=[_ratio_chart(config, ratios, table.rows), *charts, table],
        verdict=verdict(config, ratios, deviation),
        settings=config.describe(),
        rule=RULE,
    )


def _ratio(config: Config, rows: Sequence[Row], q: int) -> Estimate:
    """Samples of zero-mean over those of biased heads, infinitely many, on the same sets."""
    zero_mean, biased = (config.curve(rows, model, notation(q), exact=True) for model in BOTH)
    return samples_ratio(zero_mean, biased, config.level, config.seed)


def _predicted(config: Config, q: int, dim: int) -> list[int | None]:
    """Samples predicted for zero-mean and for biased heads."""
    return [
        predicted_samples(notation(q), dim, config.n_keys, config.level, model) for model in BOTH
    ]


def _predicted_ratio(config: Config, q: int, dim: int) -> float | None:
    """Samples predicted for zero-mean heads over those for biased ones, where theory has both."""
    zero_mean, biased = _predicted(config, q, dim)
    if not zero_mean or not biased:
        return None
    return zero_mean / biased


def _samples_row(config: Config, rows: Sequence[Row], dim: int, q: int, ratio: Estimate) -> Row:
    """A row of the table; measured is one dimension only."""
    is_measured = dim == config.dim
    row: Row = {"d": str(dim), "target": f"f_{{2,{q}}}"}
    predicted = _predicted(config, q, dim)
    for model, words, n_predicted in zip(BOTH, ("zero-mean", "biased"), predicted, strict=True):
        row[words] = "–"
        if is_measured:
            curve = config.curve(rows, model, notation(q), exact=True)
            row[words] = samples_needed(curve, config.level).text(missing=f"> {config.largest}")
        row[f"{words}, predicted"] = count_text(n_predicted)
    row["ratio"] = ratio.text() if is_measured else "–"
    predicted_ratio = _predicted_ratio(config, q, dim)
    row["ratio, predicted"] = "–" if predicted_ratio is None else f"{predicted_ratio:.3g}"
    return row


def _ratio_chart(
    config: Config, ratios: Mapping[int, Estimate], rows: Sequence[Mapping[str, Any]]
) -> Chart:
    """The ratio of samples against the power q, measured and predicted."""
    measured = {q: ratio for q, ratio in ratios.items() if ratio.value is not None}
    values = [float(ratio.value or 0.0) for ratio in measured.values()]
    errors = [0.0 if ratio.spread != ratio.spread else ratio.spread for ratio in measured.values()]
    series = [bars(f"measured, d = {config.dim}", list(measured), values, errors, "biased")]
    for dim in (config.dim, *config.far_dims):
        predicted = {q: _predicted_ratio(config, q, dim) for q in config.powers}
        known = {q: ratio for q, ratio in predicted.items() if ratio is not None}
        series.append(
            Series(
                name=f"predicted, d = {dim}",
                x=list(known),
                y=list(known.values()),
                look="dashed",
                role="biased" if dim == config.dim else f"d = {dim}",
            )
        )
    return Chart(
        name="correlation-ratio",
        title=f"How many times the samples of biased heads zero-mean heads need, "
        f"{config.level:.0%} error",
        x_label="power q",
        y_label="ratio of samples",
        series=[curve for curve in series if len(curve.x)],
        rows=rows,
        y_log=True,
        note=(
            "Infinitely many heads. Above 1 the mean helps. Bars are one standard error; dashed: "
            "theory."
        ),
        marks={"equal": 1.0},
    )


def verdict(config: Config, ratios: Mapping[int, Estimate], deviation: str) -> Verdict:
    """The `RULE` on the ratios of samples by power."""
    numbers = {}
    for q, ratio in ratios.items():
        predicted = _predicted_ratio(config, q, config.dim)
        prediction = "no prediction" if predicted is None else f"predicted {predicted:.2f}"
        name = f"samples of zero-mean over biased heads, f_{{2,{q}}}"
        numbers[name] = f"{ratio.text()}, {prediction}"
    numbers[DEVIATION] = deviation

    # what cannot be compared
    missing = [q for q, ratio in ratios.items() if ratio.value is None]
    if missing:
        q = missing[0]
        needed = ", ".join(count_text(n) for n in _predicted(config, q, config.dim))
        sentence = (
            f"{config.level:.0%} error is not measured by both kinds of heads up to n = "
            f"{config.largest} on f_{{2,{q}}}, for which theory asks {needed} samples."
        )
        return Verdict("not tested", sentence, numbers)
    if len(ratios) < 2:
        return Verdict("not tested", "Growth with q needs more than one power.", numbers)

    # the state
    estimates = list(ratios.values())
    first, last = estimates[0], estimates[-1]
    values = [ratio.value or 0.0 for ratio in estimates]
    grows = all(value < next_value for value, next_value in pairwise(values))
    is_more = above(last, max(first.high, 1.0)) if first.high == first.high else None
    if below(last, max(first.low, 1.0)):
        is_more = False
    helps_at_all = all_of([above(ratio, 1.0) for ratio in estimates])
    state: State
    if is_more and grows and helps_at_all:
        state = "holds"
    elif is_more:
        state = "partly"
    elif is_more is None:
        state = "not sure"
    else:
        state = "does not show"

    # the sentence
    listed = ", ".join(f"{value:.2f} (q = {q})" for q, value in zip(ratios, values, strict=True))
    growth = "grows with q" if grows else "does not grow with q throughout"
    sentence = (
        f"For {config.level:.0%} error zero-mean heads need {listed} times the samples of biased "
        f"heads: at the size that each power needs the advantage {growth}."
    )
    for q, ratio in ratios.items():
        if below(ratio, 1.0):
            sentence += f" At q = {q} biased heads need more samples than zero-mean heads."
        elif not above(ratio, 1.0):
            sentence += f" At q = {q} an advantage of biased heads is not sure."
    return Verdict(state, sentence, numbers)
