"""Figure 1. Averages of token functions f_{1,p}: attention needs far fewer samples than an MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import (
    DEVIATION,
    MODELS,
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
    quotient,
    samples_measured,
)
from keyhole.lab.report.document import Row, Section, State, Table, Verdict


@dataclass(frozen=True)
class Config(CurveConfig):
    """Powers p of f_{1,p}, and the error at which samples are counted."""

    powers: tuple[int, ...] = (1, 2, 3, 4)
    level: float = 0.3


PRESETS = {
    "quick": Config(10, 10, 300, largest=2048, repetitions=3, more_repetitions=0, n_test=1000),
    "full": Config(),
}

WANTED = 5.0
"""How many times more samples the MLP has to need on f_{1,2} for the claim to hold."""


def notation(p: int) -> str:
    """f_{1,p} in words that can be read back."""
    return power("token", p).replace("{", "").replace("}", "")


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    return curve_cells(config, map(notation, config.powers))


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    charts = []
    for p in config.powers:
        title = f"f_{{1,{p}}}: mean of {power('⟨β, xᵢ⟩', p)}"
        charts.append(
            curve_chart(config, results, notation(p), f"averages-p{p}", title, config.level)
        )
    table = Table(
        "averages-samples",
        f"Samples that bring the relative error to {config.level:.0%}",
        [_row(config, results, p) for p in config.powers],
        note=(
            "Measured: read between the sizes run on logarithmic axes, ± standard error over "
            f"resampled repetitions. “> n” means not reached by n = {config.largest}."
        ),
    )
    deviation = deviation_text([row for chart in charts for row in chart.rows])
    return Section(
        "averages",
        "Averages of token functions",
        "Attention learns averages of token functions, f_{1,p} = (1/N) Σ ⟨β, xᵢ⟩^{p}, from far "
        "fewer samples than a random-feature two-layer network with as many parameters on the "
        "flattened input.",
        [*charts, table],
        _verdict(config, results, deviation),
        config.describe(),
    )


def _samples(config: Config, results: Results, p: int) -> dict[str, Estimate]:
    """Samples that each model needs."""
    curves = {model: measured_curve(config, results, model, notation(p)) for model in MODELS}
    return {
        model: samples_measured(curve, config.level, config.seed) for model, curve in curves.items()
    }


def _row(config: Config, results: Results, p: int) -> Row:
    found, row = _samples(config, results, p), {"target": f"f_{{1,{p}}}"}
    for model, words in MODELS.items():
        row[words] = found[model].text(missing=f"> {config.largest}")
        predicted = predicted_samples(
            notation(p), config.dim, config.n_keys, config.level, model, config.n_heads
        )
        row[f"{words}, predicted"] = count_text(predicted)
    ratio, beyond = _ratio_of_samples(config, found)
    row["MLP / attention"] = f"> {ratio.value:.1f}" if beyond else ratio.text()
    return dict(row)


def _ratio_of_samples(config: Config, found: dict[str, Estimate]) -> tuple[Estimate, bool]:
    """Samples of the MLP over those of attention.

    Where the MLP does not arrive, the bound that its reach gives.
    """
    attention, mlp = found["attention"], found["mlp"]
    if attention.value is None:
        return Estimate(None), False
    if mlp.value is None:
        low = config.largest / max(attention.upper, attention.value)
        return Estimate(config.largest / attention.value, 0.0, low, math.inf), True
    return quotient(mlp, attention), False


def _verdict(config: Config, results: Results, deviation: str) -> Verdict:
    p = 2 if 2 in config.powers else config.powers[0]
    name, level = f"f_{{1,{p}}}", f"{config.level:.0%}"
    found, mlp = _samples(config, results, p), measured_curve(config, results, "mlp", notation(p))
    ratio, beyond = _ratio_of_samples(config, found)
    says = _theory((notation(p), config.dim, config.n_keys, config.level), config.n_heads)
    not_reached = f"> {config.largest} (error there {mlp.mean[-1]:.2f})"
    numbers = {
        f"attention, samples for {level} on {name}": found["attention"].text(),
        f"MLP, samples for {level} on {name}": found["mlp"].text(missing=not_reached),
        DEVIATION: deviation,
    }
    if ratio.value is None:
        sentence = (
            f"Attention does not reach {level} on {name} with {config.largest} samples: nothing "
            "can be compared."
        )
        return Verdict("does not show", sentence + says, numbers)
    numbers["MLP / attention"] = (
        f"> {ratio.value:.1f} (95 %: > {ratio.low:.1f})" if beyond else ratio.text()
    )
    floor = ratio.lower
    if beyond:
        mean, error = mlp.at(config.largest)
        if not mean - 2 * (error if math.isfinite(error) else 0.0) > config.level:
            floor = min(floor, 1.0)  # the MLP may be about to arrive
    more = "more than " if beyond else ""
    sentence = (
        f"On {name} the MLP needs {more}{ratio.value:.1f} times the samples of attention for "
        f"{level} error."
    )
    state: State = "holds" if floor >= WANTED else "partly" if floor > 1 else "does not show"
    if state != "holds":
        sentence += f" At these sizes that is not yet {WANTED:g} times beyond error bars."
    return Verdict(state, sentence + says, numbers)


def _theory(options: tuple[str, int, int, float], heads: int) -> str:
    """What theory says of both models.

    Of an MLP of this width, or of any width where this one never arrives.
    """
    attention, mlp = (predicted_samples(*options, model, heads) for model in ("attention", "mlp"))
    if attention is None:
        return " Theory says that so many heads never reach it."
    if mlp is not None:
        return (
            f" Theory predicts {attention:,} and {mlp:,} samples, {mlp / attention:.0f} times as "
            "many."
        )
    wide = predicted_samples(*options, "mlp")
    if wide is None:
        return (
            f" Theory predicts {attention:,} samples for attention, and that no MLP of this width "
            "arrives."
        )
    return (
        f" Theory predicts {attention:,} samples for attention, that an MLP of this width levels "
        f"off before it arrives, and that one of infinite width needs {wide:,}, "
        f"{wide / attention:.0f} times as many."
    )
