"""Figure 2. Correlation-weighted functions f_{2,q}: heads whose mean is the identity need fewer samples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

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
from keyhole.lab.jobs import read_target, target_variance
from keyhole.lab.measured import (
    Estimate,
    Results,
    count_text,
    deviation_text,
    ratio_at,
    samples_measured,
    samples_saved,
)
from keyhole.lab.report.document import Row, Section, State, Table, Verdict
from keyhole.theory.biased import biased_norm_bound
from keyhole.theory.complexity import rkhs_norm


@dataclass(frozen=True)
class Config(CurveConfig):
    """Powers q of f_{2,q}, where the models are compared, and the error at which samples are counted."""

    powers: tuple[int, ...] = (1, 2, 3)
    compare_at: int = 4096
    level: float = 0.4

    @property
    def compared_at(self) -> int:
        """The largest size run that is not above the one wanted."""
        return max((n for n in self.sizes if n <= self.compare_at), default=self.sizes[0])


PRESETS = {
    "quick": Config(
        n_heads=400, largest=2048, repetitions=3, more_repetitions=0, n_test=1000, spectrum_sets=2048, compare_at=2048
    ),
    "full": Config(),
}

WANTED = 0.6
"""The error of biased heads over that of zero-mean heads on f_{2,1} below which the claim holds."""


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
        charts.append(curve_chart(config, results, notation(q), f"correlation-q{q}", title, config.level))
    at = config.compared_at
    ratios, saved = {}, {}
    for q in config.powers:
        for exact in (False, True):
            biased, zero = (
                measured_curve(config, results, model, notation(q), exact=exact) for model in ("biased", "attention")
            )
            ratios[q, exact] = ratio_at(biased, zero, at, config.seed)
            if not exact:
                saved[q] = samples_saved(biased, zero, at, config.seed)
    table = Table(
        "correlation-ratios",
        f"Error of biased over zero-mean heads at n = {at}, and what theory says of the norms",
        [_row(config, results, q, ratios, saved[q]) for q in config.powers],
        note="Norms are squared RKHS norms over Var f*: exact for zero-mean heads; for biased heads an upper bound "
        "for a function within 10 % of f*.",
    )
    return Section(
        "correlation",
        "Correlation-weighted functions",
        "Heads with a non-zero mean, E W = W_0, learn correlation-weighted functions f_{2,q} = (1/N) Σ ⟨x₀, xᵢ⟩^{q} "
        "⟨β, xᵢ⟩ from fewer samples than heads of mean zero, and the more so the higher q.",
        [*charts, table],
        _verdict(config, ratios, saved, deviation_text([row for chart in charts for row in chart.rows])),
        config.describe(),
    )


def _norms(config: Config, q: int) -> tuple[float, float]:
    """Squared norms over Var f*: of f* for zero-mean heads, of a function within 10 % of it for biased ones."""
    target = read_target(notation(q), config.dim)
    spread = target_variance(target, config.n_keys)
    return rkhs_norm(target) / spread, biased_norm_bound(target, 0.1 * spread).norm / spread


def _row(config: Config, results: Results, q: int, ratios: dict[tuple[int, bool], Estimate], saved: Estimate) -> Row:
    row: dict[str, str] = {"target": f"f_{{2,{q}}}"}
    for exact in (False, True):
        row[f"biased / zero-mean, {'∞' if exact else config.n_heads} heads"] = ratios[q, exact].text()
    row["times fewer samples for the same error"] = saved.text()
    for model, words in (("attention", "zero-mean"), ("biased", "biased")):
        found = samples_measured(measured_curve(config, results, model, notation(q)), config.level, config.seed)
        row[f"samples for {config.level:.0%}, {words}"] = found.text(missing=f"> {config.largest}")
    predicted = predicted_samples(notation(q), config.dim, config.n_keys, config.level, "attention", config.n_heads)
    row[f"samples for {config.level:.0%}, zero-mean, predicted"] = count_text(predicted)
    row["norm, zero-mean"], row["norm, biased"] = (f"{norm:.3g}" for norm in _norms(config, q))
    return dict(row)


def _verdict(
    config: Config, ratios: dict[tuple[int, bool], Estimate], saved: dict[int, Estimate], deviation: str
) -> Verdict:
    q, at = config.powers[0], config.compared_at
    first = ratios[q, False]
    values = [ratios[p, False].value or math.nan for p in config.powers]
    numbers = {
        **{f"biased / zero-mean on f_{{2,{p}}} at n = {at}": ratios[p, False].text() for p in config.powers},
        **{f"the same, ∞ heads, f_{{2,{p}}}": ratios[p, True].text() for p in config.powers},
        **{f"times fewer samples for the same error, f_{{2,{p}}}": saved[p].text() for p in config.powers},
        DEVIATION: deviation,
    }
    state: State = "holds" if first.upper <= WANTED else "partly" if first.upper < 1 else "does not show"
    sentence = f"At n = {at} biased heads have {first.value:.2f} times the error of zero-mean heads on f_{{2,{q}}}."
    if len(values) < 2:
        return Verdict(state, sentence, numbers)
    fewer = [saved[p].value or 0.0 for p in config.powers]
    if all(b <= a for a, b in pairwise(values)) or all(a <= b for a, b in pairwise(fewer)):
        return Verdict(state, sentence + " The advantage grows with q.", numbers)
    listed = ", ".join(f"{value:.2f} (q = {p})" for p, value in zip(config.powers, values, strict=True))
    sentence += f" It does not grow with q throughout at these sizes: the ratios are {listed}. {_promise(config)}"
    return Verdict("partly" if state == "holds" else state, sentence, numbers)


def _promise(config: Config) -> str:
    """What theory says of q where the sizes run do not show it: norms, and the samples that zero-mean heads need."""
    ratios = [zero / biased for zero, biased in (_norms(config, q) for q in config.powers)]
    needed = [predicted_samples(notation(q), config.dim, config.n_keys, 0.3, "attention") for q in config.powers]
    grows = "and grows" if all(a < b for a, b in pairwise(ratios)) else "which does not grow"
    return (
        f"The squared norm of f* over that of its biased stand-in is {', '.join(f'{r:.0f}' for r in ratios)} for these "
        f"q, {grows} with q; zero-mean heads are predicted to reach 30 % at n = {', '.join(map(count_text, needed))}, "
        "and there the difference has to show."
    )
