"""Figure 1. Averages of token functions f_{1,p}: attention needs far fewer samples than an MLP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keyhole.lab.cells import Cell, Row
from keyhole.lab.curves import (
    DEVIATION,
    MODELS,
    Estimate,
    above,
    count_text,
    deviation_text,
    samples_needed,
    samples_ratio,
    state_of,
)
from keyhole.lab.figures.learning_curves import CurveConfig, curve_chart, power
from keyhole.lab.predictions import predicted_samples
from keyhole.lab.report.document import Section, Table, Verdict

WANTED = 5.0
"""How many times more samples the MLP has to need on f_{1,2} for the claim to hold."""

RULE = (
    f"Holds if the MLP needs at least {WANTED:g} times the samples of attention for 30 % error on "
    "f_{1,2}, by the whole 95 % interval; partly if more samples by the whole interval; not sure "
    "if the interval has 1 inside."
)


@dataclass(frozen=True)
class Config(CurveConfig):
    """Powers p of f_{1,p}, and the error at which samples are counted."""

    powers: tuple[int, ...] = (1, 2, 3, 4)
    level: float = 0.3


PRESETS = {
    "quick": Config(
        dim=10,
        n_keys=10,
        n_heads=300,
        largest=2048,
        repetitions=3,
        more_repetitions=0,
        n_test=1000,
    ),
    "full": Config(),
}


def notation(p: int) -> str:
    """f_{1,p} in words that can be read back."""
    return "token" if p == 1 else f"token^{p}"


def cells(config: Config) -> list[Cell]:
    """What has to be measured."""
    return config.cells([notation(p) for p in config.powers])


def section(config: Config, rows: Sequence[Row]) -> Section:
    """The figure and its verdict."""
    charts = []
    for p in config.powers:
        title = f"f_{{1,{p}}}: mean of {power('⟨β, xᵢ⟩', p)}"
        charts.append(curve_chart(config, rows, notation(p), f"averages-p{p}", title, config.level))
    table = Table(
        name="averages-samples",
        title=f"Samples that bring the relative error to {config.level:.0%}",
        rows=[_samples_row(config, rows, p) for p in config.powers],
        note=(
            "Measured: read between the sizes run on logarithmic axes, with 95 % intervals over "
            f"resampled repetitions. “> n” means not reached by n = {config.largest}."
        ),
    )
    deviation = deviation_text([row for chart in charts for row in chart.rows])
    return Section(
        slug="averages",
        title="Averages of token functions",
        claim=(
            "Attention learns averages of token functions, f_{1,p} = (1/N) Σ ⟨β, xᵢ⟩^{p}, from far "
            "fewer samples than a random-feature two-layer network with as many parameters on the "
            "flattened input."
        ),
        blocks=[*charts, table],
        verdict=verdict(config, rows, deviation),
        settings=config.describe(),
        rule=RULE,
    )


def _samples(config: Config, rows: Sequence[Row], p: int) -> dict[str, Estimate]:
    """Samples that each model needs."""
    return {
        model: samples_needed(
            config.curve(rows, model, notation(p), exact=False), config.level, config.seed
        )
        for model in MODELS
    }


def _samples_row(config: Config, rows: Sequence[Row], p: int) -> Row:
    """Samples that each model needs, measured and predicted, and their ratio."""
    samples = _samples(config, rows, p)
    row: Row = {"target": f"f_{{1,{p}}}"}
    for model, words in MODELS.items():
        row[words] = samples[model].text(missing=f"> {config.largest}")
        predicted = predicted_samples(
            notation(p), config.dim, config.n_keys, config.level, model, config.n_heads
        )
        row[f"{words}, predicted"] = count_text(predicted)
    row["MLP / attention"] = _ratio(config, rows, samples, p).text()
    return row


def _ratio(config: Config, rows: Sequence[Row], samples: dict[str, Estimate], p: int) -> Estimate:
    """Samples of the MLP over those of attention.

    Where the MLP does not arrive, the ratio at its largest n is a lower bound.
    """
    attention = samples["attention"]
    if attention.value is None or samples["mlp"].value is not None:
        mlp_curve = config.curve(rows, "mlp", notation(p), exact=False)
        attention_curve = config.curve(rows, "attention", notation(p), exact=False)
        return samples_ratio(mlp_curve, attention_curve, config.level, config.seed)
    bound = config.largest / attention.value
    low = math.nan
    last = config.curve(rows, "mlp", notation(p), exact=False).at(config.largest)
    is_far = last.mean[0] - 2 * float(last.error[0]) > config.level
    if is_far and math.isfinite(attention.high):
        low = config.largest / attention.high
    return Estimate(bound, math.nan, low, math.inf)


def verdict(config: Config, rows: Sequence[Row], deviation: str) -> Verdict:
    """The `RULE` on f_{1,2}, or on the first power that was run."""
    p = 2 if 2 in config.powers else config.powers[0]
    name = f"f_{{1,{p}}}"
    level = f"{config.level:.0%}"
    samples = _samples(config, rows, p)
    ratio = _ratio(config, rows, samples, p)
    numbers = {
        f"attention, samples for {level} on {name}": samples["attention"].text(),
        f"MLP, samples for {level} on {name}": samples["mlp"].text(missing=f"> {config.largest}"),
        "MLP / attention": ratio.text(),
        DEVIATION: deviation,
    }
    if ratio.value is None:
        sentence = (
            f"Attention does not reach {level} on {name} with {config.largest} samples: nothing "
            "can be compared."
        )
        return Verdict("not tested", sentence + _theory(config, notation(p)), numbers)
    state = state_of([above(ratio, WANTED), above(ratio, 1.0)])
    more = "more than " if math.isinf(ratio.high) else ""
    sentence = (
        f"On {name} the MLP needs {more}{ratio.value:.1f} times the samples of attention for "
        f"{level} error."
    )
    return Verdict(state, sentence + _theory(config, notation(p)), numbers)


def _theory(config: Config, target: str) -> str:
    """What theory says of both models: of an MLP of this width, or else of infinite width."""

    def predicted(model: str, heads: float) -> int | None:
        return predicted_samples(target, config.dim, config.n_keys, config.level, model, heads)

    attention = predicted("attention", config.n_heads)
    if attention is None:
        return " Theory says that so many heads never reach it."
    mlp = predicted("mlp", config.n_heads)
    if mlp is not None:
        return (
            f" Theory predicts {attention:,} and {mlp:,} samples, {mlp / attention:.0f} times as "
            "many."
        )
    wide_mlp = predicted("mlp", math.inf)
    if wide_mlp is None:
        return (
            f" Theory predicts {attention:,} samples for attention, and that no MLP of this width "
            "arrives."
        )
    return (
        f" Theory predicts {attention:,} samples for attention, that an MLP of this width levels "
        f"off before it arrives, and that one of infinite width needs {wide_mlp:,}, "
        f"{wide_mlp / attention:.0f} times as many."
    )
