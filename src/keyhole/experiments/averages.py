"""Figure 1. Averages of token functions f_{1,p}: attention needs far fewer samples than an MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keyhole.experiments.cells import Cell
from keyhole.experiments.learning_curves import (
    MODELS,
    CurveConfig,
    curve_cells,
    curve_chart,
    measured_curve,
    predicted_samples,
)
from keyhole.experiments.measured import Estimate, Results, deviation_text, samples_measured
from keyhole.report.document import Row, Section, Table, Verdict


@dataclass(frozen=True)
class Config(CurveConfig):
    """Powers p of f_{1,p}, and the error at which samples are counted."""

    powers: tuple[int, ...] = (1, 2, 3, 4)
    level: float = 0.3


PRESETS = {
    "quick": Config(10, 10, 300, largest=2048, repetitions=3, more_repetitions=0, n_test=1000, spectrum_sets=2048),
    "full": Config(),
}

WANTED = 5.0
"""How many times more samples the MLP has to need on f_{1,2} for the claim to hold."""


def notation(p: int) -> str:
    """f_{1,p} in words that can be read back."""
    return "token" if p == 1 else f"token^{p}"


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    return curve_cells(config, map(notation, config.powers))


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    charts = [
        curve_chart(
            config, results, notation(p), f"averages-p{p}", f"f_{{1,{p}}}: mean of {power('⟨β, xᵢ⟩', p)}", config.level
        )
        for p in config.powers
    ]
    counts = [_counts(config, results, p) for p in config.powers]
    table = Table(
        "averages-samples",
        f"Samples that bring the relative error to {config.level:.0%}",
        [row for _, row in counts],
        note="Measured: read between the sizes run on logarithmic axes, ± standard error over resampled repetitions. "
        f"“> n” means not reached by n = {config.largest}.",
    )
    deviation = deviation_text([row for chart in charts for row in chart.rows])
    return Section(
        "averages",
        "Averages of token functions",
        "Attention learns averages of token functions, f_{1,p} = (1/N) Σ ⟨β, xᵢ⟩^{p}, from far fewer samples than a "
        "random-feature "
        "two-layer network with as many parameters on the flattened input.",
        [*charts, table],
        _verdict(config, results, deviation),
        config.describe(),
    )


def _counts(config: Config, results: Results, p: int) -> tuple[dict[str, Estimate], Row]:
    found, row = {}, {"target": f"f_{{1,{p}}}"}
    for model, words in MODELS.items():
        curve = measured_curve(config, results, model, notation(p))
        found[model] = samples_measured(curve, config.level, config.seed)
        row[words] = found[model].text() if found[model].value is not None else f"> {config.largest}"
        if model != "biased":
            predicted = predicted_samples(notation(p), config.dim, config.n_keys, config.level, model, config.n_heads)
            row[f"{words}, predicted"] = "–" if predicted is None else f"{predicted:,}"
    ratio, beyond = ratio_of_samples(config, found)
    row["MLP / attention"] = "–" if ratio.value is None else ("> " + f"{ratio.value:.1f}" if beyond else ratio.text())
    return found, dict(row)


def ratio_of_samples(config: CurveConfig, found: dict[str, Estimate]) -> tuple[Estimate, bool]:
    """Samples of the MLP over those of attention; where the MLP does not arrive, the bound that its reach gives."""
    attention, mlp = found["attention"], found["mlp"]
    if attention.value is None:
        return Estimate(None), False
    if mlp.value is None:
        highest = attention.high if math.isfinite(attention.high) else attention.value
        return Estimate(
            config.largest / attention.value, 0.0, config.largest / max(highest, attention.value), math.inf
        ), True
    ratio = mlp.value / attention.value
    spread = ratio * math.hypot(mlp.spread / mlp.value, attention.spread / attention.value)
    return Estimate(ratio, spread, ratio - 2 * spread, ratio + 2 * spread), False


def _verdict(config: Config, results: Results, deviation: str) -> Verdict:
    p = 2 if 2 in config.powers else config.powers[0]
    name = f"f_{{1,{p}}}"
    found, _ = _counts(config, results, p)
    ratio, beyond = ratio_of_samples(config, found)
    options = (notation(p), config.dim, config.n_keys, config.level)
    says = _theory(options, config.n_heads)
    numbers = {
        f"attention, samples for {config.level:.0%} on {name}": found["attention"].text(),
        f"MLP, samples for {config.level:.0%} on {name}": found["mlp"].text()
        if found["mlp"].value is not None
        else f"> {config.largest} (error there {measured_curve(config, results, 'mlp', notation(p)).mean[-1]:.2f})",
        "median deviation of prediction": deviation,
    }
    if ratio.value is None:
        sentence = (
            f"Attention does not reach {config.level:.0%} on {name} with {config.largest} samples, so nothing can "
            "be compared."
        )
        return Verdict("does not show", sentence + says, numbers)
    numbers["MLP / attention"] = f"> {ratio.value:.1f} (95 %: > {ratio.low:.1f})" if beyond else ratio.text()
    floor = ratio.low if math.isfinite(ratio.low) else ratio.value
    if beyond:
        mean, error = measured_curve(config, results, "mlp", notation(p)).at(config.largest)
        if not mean - 2 * (error if math.isfinite(error) else 0.0) > config.level:
            floor = min(floor, 1.0)  # the MLP may be about to arrive
    more = "more than " if beyond else ""
    sentence = (
        f"On {name} the MLP needs {more}{ratio.value:.1f} times the samples of attention for "
        f"{config.level:.0%} relative error."
    )
    state = "holds" if floor >= WANTED else "partly" if floor > 1 else "does not show"
    if state != "holds":
        sentence += f" At these sizes that is not yet {WANTED:g} times beyond error bars."
    return Verdict(state, sentence + says, numbers)  # type: ignore[arg-type]


def _theory(options: tuple[str, int, int, float], heads: int) -> str:
    """What theory says of both models; of an MLP of this width, or of any width where this one never arrives."""
    attention, mlp = (predicted_samples(*options, model, heads) for model in ("attention", "mlp"))
    if attention is None:
        return " Theory says that so many heads never reach it."
    if mlp is not None:
        return f" Theory predicts {attention:,} and {mlp:,} samples, {mlp / attention:.0f} times as many."
    wide = predicted_samples(*options, "mlp")
    if wide is None:
        return f" Theory predicts {attention:,} samples for attention, and that no MLP of this width arrives."
    return (
        f" Theory predicts {attention:,} samples for attention, that an MLP of this width levels off before it "
        "arrives, and "
        f"that one of infinite width needs {wide:,}, {wide / attention:.0f} times as many."
    )


def power(base: str, exponent: int) -> str:
    """A power as a reader writes it.

    >>> power("⟨β, xᵢ⟩", 2), power("⟨β, xᵢ⟩", 1)
    ('⟨β, xᵢ⟩^{2}', '⟨β, xᵢ⟩')
    """
    return base if exponent == 1 else f"{base}^{{{exponent}}}"
