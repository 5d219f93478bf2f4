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
        name="averages-samples",
        title=f"Samples that bring the relative error to {config.level:.0%}",
        rows=[_row(config, results, p) for p in config.powers],
        note=(
            "Measured: read between the sizes run on logarithmic axes, ± standard error over "
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
        verdict=_verdict(config, results, deviation),
        settings=config.describe(),
    )


def _samples(config: Config, results: Results, p: int) -> dict[str, Estimate]:
    """Samples that each model needs."""
    samples = {}
    for model in MODELS:
        curve = measured_curve(config, results, model, notation(p))
        samples[model] = samples_measured(curve, config.level, config.seed)
    return samples


def _row(config: Config, results: Results, p: int) -> Row:
    """Samples that each model needs, measured and predicted, and their ratio."""
    samples = _samples(config, results, p)
    row = {"target": f"f_{{1,{p}}}"}
    for model, words in MODELS.items():
        row[words] = samples[model].text(missing=f"> {config.largest}")
        predicted = predicted_samples(
            notation(p), config.dim, config.n_keys, config.level, model, config.n_heads
        )
        row[f"{words}, predicted"] = count_text(predicted)
    ratio, is_bound = _ratio_of_samples(config, samples)
    row["MLP / attention"] = f"> {ratio.value:.1f}" if is_bound else ratio.text()
    return dict(row)


def _ratio_of_samples(config: Config, samples: dict[str, Estimate]) -> tuple[Estimate, bool]:
    """Samples of the MLP over those of attention, and whether that is a lower bound only.

    Where the MLP does not arrive, the bound is that of its reach.
    """
    attention = samples["attention"]
    mlp = samples["mlp"]
    if attention.value is None:
        return Estimate(None), False
    if mlp.value is None:
        bound = Estimate(
            value=config.largest / attention.value,
            spread=0.0,
            low=config.largest / max(attention.upper, attention.value),
            high=math.inf,
        )
        return bound, True
    return quotient(mlp, attention), False


def _verdict(config: Config, results: Results, deviation: str) -> Verdict:
    """The claim holds where the MLP needs `WANTED` times the samples by its whole interval."""
    # samples of both on f_{1,2}
    p = 2 if 2 in config.powers else config.powers[0]
    name = f"f_{{1,{p}}}"
    level = f"{config.level:.0%}"
    samples = _samples(config, results, p)
    mlp = measured_curve(config, results, "mlp", notation(p))
    ratio, is_bound = _ratio_of_samples(config, samples)
    theory_words = _theory(config, notation(p))
    not_reached = f"> {config.largest} (error there {mlp.mean[-1]:.2f})"
    numbers = {
        f"attention, samples for {level} on {name}": samples["attention"].text(),
        f"MLP, samples for {level} on {name}": samples["mlp"].text(missing=not_reached),
        DEVIATION: deviation,
    }
    if ratio.value is None:
        sentence = (
            f"Attention does not reach {level} on {name} with {config.largest} samples: nothing "
            "can be compared."
        )
        return Verdict("does not show", sentence + theory_words, numbers)

    # how often the samples of attention the MLP surely needs
    floor = ratio.lower
    if is_bound:
        numbers["MLP / attention"] = f"> {ratio.value:.1f} (95 %: > {ratio.low:.1f})"
        more = "more than "
        mean, error = mlp.at(config.largest)
        if not math.isfinite(error):
            error = 0.0
        is_far = mean - 2 * error > config.level
        if not is_far:
            floor = min(floor, 1.0)  # the MLP may be about to arrive
    else:
        numbers["MLP / attention"] = ratio.text()
        more = ""
    sentence = (
        f"On {name} the MLP needs {more}{ratio.value:.1f} times the samples of attention for "
        f"{level} error."
    )

    state: State
    if floor >= WANTED:
        state = "holds"
    elif floor > 1:
        state = "partly"
    else:
        state = "does not show"
    if state != "holds":
        sentence += f" At these sizes that is not yet {WANTED:g} times beyond error bars."
    return Verdict(state, sentence + theory_words, numbers)


def _theory(config: Config, target: str) -> str:
    """What theory says of both models.

    Of an MLP of this width, or of any width where this one never arrives.
    """

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
