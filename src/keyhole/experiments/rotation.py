"""Figure 3. Rotation away from the identity f_{3,γ}: where the advantage of the identity mean ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from keyhole.experiments.cells import Cell
from keyhole.experiments.learning_curves import (
    MODELS,
    CurveConfig,
    curve_cells,
    curve_rows,
    measured_curve,
    predicted_curve,
)
from keyhole.experiments.measured import Curve, Estimate, Results, deviation_text, resample, rises_through
from keyhole.report.document import Chart, Row, Section, Series, State, Table, Verdict


@dataclass(frozen=True)
class Config(CurveConfig):
    """The turns γ, and how many of the largest sizes are shown."""

    gammas: tuple[float, ...] = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
    n_sizes: int = 4

    @property
    def shown(self) -> tuple[int, ...]:
        """The sizes shown."""
        return self.sizes[-self.n_sizes :]


PRESETS = {
    "quick": Config(
        n_heads=400,
        largest=2048,
        repetitions=3,
        more_repetitions=0,
        n_test=1000,
        spectrum_sets=2048,
        gammas=(0.0, 0.25, 0.5, 0.75, 1.0),
        n_sizes=3,
    ),
    "full": Config(),
}


SMALL = 1.1
"""A ratio of errors up to which a handicap is called small."""


def notation(gamma: float) -> str:
    """f_{3,γ} in words that can be read back."""
    return f"rotated({gamma:g})^3 * token"


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    return curve_cells(config, map(notation, config.gammas), config.shown)


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    rows = [row for gamma in config.gammas for row in _rows(config, results, gamma)]
    crossings = {
        (n, exact): _crossing(config, results, n, exact=exact) for n in config.shown for exact in (False, True)
    }
    charts = [
        _ratio_chart(config, results, rows),
        *(_error_chart(config, results, n, rows) for n in reversed(config.shown)),
    ]
    table = Table(
        "rotation-crossings",
        "The turn γ at which biased heads become a handicap",
        [_crossing_row(config, results, n, crossings) for n in config.shown],
        note="Where the mean error of biased heads overtakes that of zero-mean heads, read between the turns run; ± "
        "standard "
        "error over resampled repetitions that have a crossing. The last columns are the ratio of errors at γ = 1.",
    )
    return Section(
        "rotation",
        "Rotation away from the identity",
        "The advantage of heads whose mean is the identity fades as the correlation turns away from it, f_{3,γ} = "
        "(1/N) Σ "
        "⟨x₀, S_{γ} xᵢ⟩^{3} ⟨β, xᵢ⟩ with S_{γ} = (1 − γ) I + γ P, P a rotation without fixed directions.",
        [*charts, table],
        _verdict(config, results, crossings, deviation_text(rows)),
        config.describe(),
    )


def _curve(config: Config, results: Results, model: str, n: int, *, exact: bool = False, name: str = "error") -> Curve:
    """Error against γ at one n."""
    options = {"exact": exact, "name": name, "sizes": (n,)}
    runs = [measured_curve(config, results, model, notation(g), **options).runs[:, 0] for g in config.gammas]  # type: ignore[arg-type]
    table = np.stack(runs, axis=1)
    return Curve(np.array(config.gammas), table[np.isfinite(table).all(axis=1)])


def _mean_ratio(tables: list[np.ndarray]) -> np.ndarray:
    return np.asarray(tables[0].mean(axis=0) / tables[1].mean(axis=0))


def _crossing(config: Config, results: Results, n: int, *, exact: bool) -> Estimate:
    biased, zero = (_curve(config, results, model, n, exact=exact) for model in ("biased", "attention"))
    return resample(
        lambda tables: rises_through(biased.x, _mean_ratio(tables), 1.0), [biased.runs, zero.runs], config.seed
    )


def _end(config: Config, results: Results, n: int, *, exact: bool, index: int = -1) -> Estimate:
    """Ratio of errors at one of the turns."""
    curves = [_curve(config, results, model, n, exact=exact).runs for model in ("biased", "attention")]
    return resample(lambda tables: float(_mean_ratio(tables)[index]), curves, config.seed)


def _ratio_chart(config: Config, results: Results, rows: list[Row]) -> Chart:
    series = []
    for n in config.shown:
        biased, zero = (_curve(config, results, model, n) for model in ("biased", "attention"))
        curve = Curve(biased.x, biased.runs / zero.runs)
        series.append(curve.series(f"n = {n}, {config.n_heads} heads", f"n = {n}"))
    for n in config.shown:
        biased, zero = (_curve(config, results, model, n, exact=True) for model in ("biased", "attention"))
        series.append(Curve(biased.x, biased.runs / zero.runs).series(f"n = {n}, ∞ heads", f"n = {n}", "thin"))
    return Chart(
        "rotation-ratio",
        "Error of biased over zero-mean heads",
        "turn γ",
        "ratio of test errors",
        series,
        rows=rows,
        note="Below 1 the identity mean helps, above it is a handicap. Means of the ratios of single repetitions.",
        marks={"equal": 1.0},
    )


def _error_chart(config: Config, results: Results, n: int, rows: list[Row]) -> Chart:
    series: list[Series] = []
    for model, words in MODELS.items():
        series.append(_curve(config, results, model, n).series(words, model))
    for model, words in MODELS.items():
        predicted = {g: predicted_curve(config, results, model, notation(g), sizes=(n,)).get(n) for g in config.gammas}
        known = {g: value for g, value in predicted.items() if value is not None}
        if known:
            series.append(Series(f"{words}, predicted", list(known), list(known.values()), look="dashed", role=model))
    for model, words in MODELS.items():
        series.append(_curve(config, results, model, n, exact=True).series(f"{words}, ∞ heads", model, "line"))
        series.append(
            _curve(config, results, model, n, name="oracle").series(f"{words}, oracle penalty", model, "thin")
        )
    return Chart(
        f"rotation-n{n}",
        f"Error against the turn at n = {n}",
        "turn γ",
        "relative test error",
        series,
        rows=[row for row in rows if row["n"] == n],
        note="In even dimension S_{γ} is a multiple of a rotation, so theory gives zero-mean heads and the MLP one "
        "error for all γ.",
    )


def _rows(config: Config, results: Results, gamma: float) -> list[Row]:
    return [{"gamma": gamma, **row} for row in curve_rows(config, results, notation(gamma), config.shown)]


def _crossing_row(config: Config, results: Results, n: int, crossings: dict[tuple[int, bool], Estimate]) -> Row:
    row: dict[str, str | int] = {"n": n}
    for exact in (False, True):
        heads = "∞" if exact else str(config.n_heads)
        row[f"crossing, {heads} heads"] = crossings[n, exact].text()
    for exact in (False, True):
        row[f"ratio at γ = {config.gammas[-1]:g}, {'∞' if exact else config.n_heads} heads"] = _end(
            config, results, n, exact=exact
        ).text()
    return dict(row)


def _verdict(config: Config, results: Results, crossings: dict[tuple[int, bool], Estimate], deviation: str) -> Verdict:
    n = config.shown[-1]
    start, end = (_end(config, results, n, exact=False, index=i) for i in (0, -1))
    crossing = crossings[n, False]
    numbers = {
        f"ratio at γ = {config.gammas[0]:g}, n = {n}": start.text(),
        f"ratio at γ = {config.gammas[-1]:g}, n = {n}": end.text(),
        **{f"crossing at n = {size}": crossings[size, False].text() for size in config.shown},
        f"crossing at n = {n}, ∞ heads": crossings[n, True].text(),
        "median deviation of prediction": deviation,
    }
    helps = (start.high if math.isfinite(start.high) else start.value or math.inf) < 1
    fades = (end.value or 0.0) - (start.value or 0.0) > 2 * math.hypot(_known(start.spread), _known(end.spread))
    sentence = (
        f"At n = {n} biased heads have {start.text()} times the error of zero-mean heads at γ = {config.gammas[0]:g} "
        "and "
        f"{end.text()} times at γ = {config.gammas[-1]:g}."
    )
    if crossing.value is None:
        sentence += " Between these turns they do not become a handicap at this size."
    else:
        sentence += f" They become a handicap at γ = {crossing.text(2)}"
        sure = math.isfinite(end.low) and end.low > 1
        size = ", a small one." if (end.value or 0.0) <= SMALL else "."
        sentence += size if sure else "; at the last turn it is still within error bars of none."
    state: State = "holds" if helps and fades else "partly" if fades else "does not show"
    return Verdict(state, sentence, numbers)


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
