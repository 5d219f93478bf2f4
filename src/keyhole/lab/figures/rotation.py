"""Figure 3.

Rotation away from the identity f_{3,γ}: where the advantage of the identity mean ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import (
    DEVIATION,
    MODELS,
    CurveConfig,
    curve_cells,
    curve_rows,
    predicted_curve,
)
from keyhole.lab.measured import Curve, Estimate, Results, deviation_text, resample, rises_through
from keyhole.lab.report.document import Chart, Look, Row, Section, Series, State, Table, Verdict


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
    rows: list[Row] = [
        {"gamma": gamma, **row}
        for gamma in config.gammas
        for row in curve_rows(config, results, notation(gamma), config.shown)
    ]
    crossings = {
        (n, exact): _crossing(config, results, n, exact)
        for n in config.shown
        for exact in (False, True)
    }
    table = Table(
        "rotation-crossings",
        "The turn γ at which biased heads become a handicap",
        [_crossing_row(config, results, n, crossings) for n in config.shown],
        note=(
            "Where the mean error of biased heads overtakes that of zero-mean heads, read between "
            "the turns run; ± standard error over resampled repetitions that have a crossing. The "
            "last columns are the ratio of errors at the last turn."
        ),
    )
    errors = [_error_chart(config, results, n, rows) for n in reversed(config.shown)]
    return Section(
        "rotation",
        "Rotation away from the identity",
        "The advantage of heads whose mean is the identity fades as the correlation turns away "
        "from it, f_{3,γ} = (1/N) Σ ⟨x₀, S_{γ} xᵢ⟩^{3} ⟨β, xᵢ⟩ with S_{γ} = (1 − γ) I + γ P, P a "
        "rotation without fixed directions.",
        [_ratio_chart(config, results, rows), *errors, table],
        _verdict(config, results, crossings, deviation_text(rows)),
        config.describe(),
    )


def _curve(
    config: Config,
    results: Results,
    model: str,
    n: int,
    *,
    exact: bool = False,
    name: str = "error",
) -> Curve:
    """Error against γ at one n."""
    sweeps = (config.sweep(model, notation(gamma), (n,), exact=exact) for gamma in config.gammas)
    table = np.stack([sweep.curve(results, name).runs[:, 0] for sweep in sweeps], axis=1)
    return Curve(np.array(config.gammas), table[np.isfinite(table).all(axis=1)])


def _pair(config: Config, results: Results, n: int, exact: bool) -> list[np.ndarray]:
    """Errors of biased and of zero-mean heads: repetitions by turns."""
    return [
        _curve(config, results, model, n, exact=exact).runs for model in ("biased", "attention")
    ]


def _mean_ratio(tables: list[np.ndarray]) -> np.ndarray:
    return np.asarray(tables[0].mean(axis=0) / tables[1].mean(axis=0))


def _crossing(config: Config, results: Results, n: int, exact: bool) -> Estimate:
    turns = np.array(config.gammas)
    pair = _pair(config, results, n, exact)
    return resample(
        lambda tables: rises_through(turns, _mean_ratio(tables), 1.0), pair, config.seed
    )


def _ratio(config: Config, results: Results, n: int, exact: bool, turn: int = -1) -> Estimate:
    """Ratio of errors at one of the turns."""
    return resample(
        lambda tables: float(_mean_ratio(tables)[turn]),
        _pair(config, results, n, exact),
        config.seed,
    )


def _ratio_chart(config: Config, results: Results, rows: list[Row]) -> Chart:
    series = []
    looks: dict[bool, Look] = {False: "points", True: "thin"}
    for exact, look in looks.items():
        for n in config.shown:
            biased, zero = _pair(config, results, n, exact)
            heads = "∞" if exact else config.n_heads
            curve = Curve(np.array(config.gammas), biased / zero)
            series.append(curve.series(f"n = {n}, {heads} heads", f"n = {n}", look))
    return Chart(
        "rotation-ratio",
        "Error of biased over zero-mean heads",
        "turn γ",
        "ratio of test errors",
        series,
        rows=rows,
        note=(
            "Below 1 the identity mean helps, above it is a handicap. Means of the ratios of "
            "single repetitions."
        ),
        marks={"equal": 1.0},
    )


def _error_chart(config: Config, results: Results, n: int, rows: list[Row]) -> Chart:
    measured, predicted, others = [], [], []
    for model, words in MODELS.items():
        measured.append(_curve(config, results, model, n).series(words, model))
        told = {
            g: predicted_curve(config, model, notation(g), sizes=(n,)).get(n) for g in config.gammas
        }
        known = {g: value for g, value in told.items() if value is not None}
        if known:
            label = f"{words}, predicted"
            predicted.append(
                Series(label, list(known), list(known.values()), look="dashed", role=model)
            )
        others.append(
            _curve(config, results, model, n, exact=True).series(f"{words}, ∞ heads", model, "line")
        )
        oracle = _curve(config, results, model, n, name="oracle")
        others.append(oracle.series(f"{words}, oracle penalty", model, "thin"))
    return Chart(
        f"rotation-n{n}",
        f"Error against the turn at n = {n}",
        "turn γ",
        "relative test error",
        [*measured, *predicted, *others],
        rows=[row for row in rows if row["n"] == n],
        note=(
            "In even dimension S_{γ} is a multiple of a rotation, so theory gives zero-mean heads "
            "and the MLP one error for all γ."
        ),
    )


def _crossing_row(
    config: Config, results: Results, n: int, crossings: dict[tuple[int, bool], Estimate]
) -> Row:
    heads = {False: str(config.n_heads), True: "∞"}
    last = f"ratio at γ = {config.gammas[-1]:g}"
    return {
        "n": n,
        **{
            f"crossing, {words} heads": crossings[n, exact].text() for exact, words in heads.items()
        },
        **{
            f"{last}, {words} heads": _ratio(config, results, n, exact).text()
            for exact, words in heads.items()
        },
    }


def _verdict(
    config: Config, results: Results, crossings: dict[tuple[int, bool], Estimate], deviation: str
) -> Verdict:
    n = config.shown[-1]
    first, last = (f"γ = {config.gammas[i]:g}" for i in (0, -1))
    start, end = (_ratio(config, results, n, exact=False, turn=i) for i in (0, -1))
    crossing = crossings[n, False]
    numbers = {
        f"ratio at {first}, n = {n}": start.text(),
        f"ratio at {last}, n = {n}": end.text(),
        **{f"crossing at n = {size}": crossings[size, False].text() for size in config.shown},
        f"crossing at n = {n}, ∞ heads": crossings[n, True].text(),
        DEVIATION: deviation,
    }
    spread = math.hypot(
        *(found.spread if math.isfinite(found.spread) else 0.0 for found in (start, end))
    )
    fades = (end.value or 0.0) - (start.value or 0.0) > 2 * spread
    sentence = (
        f"At n = {n} biased heads have {start.text()} times the error of zero-mean heads at "
        f"{first} and {end.text()} times at {last}."
    )
    if crossing.value is None:
        sentence += " Between these turns they do not become a handicap at this size."
    else:
        sentence += f" They become a handicap at γ = {crossing.text(2)}"
        sure = math.isfinite(end.low) and end.low > 1
        size = ", a small one." if (end.value or 0.0) <= SMALL else "."
        sentence += size if sure else "; at the last turn it is still within error bars of none."
    state: State = "holds" if start.upper < 1 and fades else "partly" if fades else "does not show"
    return Verdict(state, sentence, numbers)
