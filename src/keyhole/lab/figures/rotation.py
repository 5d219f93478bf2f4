"""Figure 3.

Rotation away from the identity f_{3,γ}: where the advantage of the identity mean ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np

from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import (
    DEVIATION,
    MODELS,
    CurveConfig,
    curve_cells,
    curve_rows,
    predicted_curve,
    predicted_series,
)
from keyhole.lab.measured import Curve, Estimate, Results, deviation_text, resample, rises_through
from keyhole.lab.report.document import Chart, Look, Row, Section, State, Table, Verdict


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
    rows: list[Row] = []
    for gamma in config.gammas:
        for row in curve_rows(config, results, notation(gamma), config.shown):
            rows.append({"gamma": gamma, **row})
    crossings = {}
    for n, exact in product(config.shown, (False, True)):
        crossings[n, exact] = _crossing(config, results, n, exact)
    table = Table(
        name="rotation-crossings",
        title="The turn γ at which biased heads become a handicap",
        rows=[_crossing_row(config, results, n, crossings) for n in config.shown],
        note=(
            "Where the mean error of biased heads overtakes that of zero-mean heads, read between "
            "the turns run; ± standard error over resampled repetitions that have a crossing. The "
            "last columns are the ratio of errors at the last turn."
        ),
    )
    error_charts = [_error_chart(config, results, n, rows) for n in reversed(config.shown)]
    return Section(
        slug="rotation",
        title="Rotation away from the identity",
        claim=(
            "The advantage of heads whose mean is the identity fades as the correlation turns away "
            "from it, f_{3,γ} = (1/N) Σ ⟨x₀, S_{γ} xᵢ⟩^{3} ⟨β, xᵢ⟩ with S_{γ} = (1 − γ) I + γ P, P "
            "a rotation without fixed directions."
        ),
        blocks=[_ratio_chart(config, results, rows), *error_charts, table],
        verdict=_verdict(config, results, crossings, deviation_text(rows)),
        settings=config.describe(),
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
    columns = []
    for gamma in config.gammas:
        sweep = config.sweep(model, notation(gamma), (n,), exact=exact)
        columns.append(sweep.curve(results, name).runs[:, 0])
    table = np.stack(columns, axis=1)
    # the repetitions that reach this n, of all turns
    is_complete = np.isfinite(table).all(axis=1)
    return Curve(np.array(config.gammas), table[is_complete])


def _pair(config: Config, results: Results, n: int, exact: bool) -> list[np.ndarray]:
    """Errors of biased and of zero-mean heads: repetitions by turns."""
    return [
        _curve(config, results, model, n, exact=exact).runs for model in ("biased", "attention")
    ]


def _mean_ratio(tables: list[np.ndarray]) -> np.ndarray:
    """Mean error of biased over that of zero-mean heads, at every turn."""
    return np.asarray(tables[0].mean(axis=0) / tables[1].mean(axis=0))


def _crossing(config: Config, results: Results, n: int, exact: bool) -> Estimate:
    """The turn from which on biased heads have the larger error."""
    turns = np.array(config.gammas)

    def statistic(tables: list[np.ndarray]) -> float | None:
        return rises_through(turns, _mean_ratio(tables), 1.0)

    return resample(statistic, _pair(config, results, n, exact), config.seed)


def _ratio(config: Config, results: Results, n: int, exact: bool, turn: int = -1) -> Estimate:
    """Ratio of errors at one of the turns."""

    def statistic(tables: list[np.ndarray]) -> float:
        return float(_mean_ratio(tables)[turn])

    return resample(statistic, _pair(config, results, n, exact), config.seed)


def _ratio_chart(config: Config, results: Results, rows: list[Row]) -> Chart:
    """The ratio of errors against γ, at every n shown, for finitely and infinitely many heads."""
    series = []
    looks: dict[bool, Look] = {False: "points", True: "thin"}
    for exact, look in looks.items():
        heads = "∞" if exact else config.n_heads
        for n in config.shown:
            biased, zero_mean = _pair(config, results, n, exact)
            curve = Curve(np.array(config.gammas), biased / zero_mean)
            series.append(curve.series(f"n = {n}, {heads} heads", f"n = {n}", look))
    return Chart(
        name="rotation-ratio",
        title="Error of biased over zero-mean heads",
        x_label="turn γ",
        y_label="ratio of test errors",
        series=series,
        rows=rows,
        note=(
            "Below 1 the identity mean helps, above it is a handicap. Means of the ratios of "
            "single repetitions."
        ),
        marks={"equal": 1.0},
    )


def _error_chart(config: Config, results: Results, n: int, rows: list[Row]) -> Chart:
    """Errors of all models against γ at one n."""
    measured = []
    predicted = []
    others = []
    for model, words in MODELS.items():
        measured.append(_curve(config, results, model, n).series(words, model))

        # what theory predicts, where its spectrum is fine enough
        errors = {}
        for gamma in config.gammas:
            error = predicted_curve(config, model, notation(gamma), sizes=(n,)).get(n)
            if error is not None:
                errors[gamma] = error
        if errors:
            predicted.append(predicted_series(errors, words, model))

        limit = _curve(config, results, model, n, exact=True)
        others.append(limit.series(f"{words}, ∞ heads", model, "line"))
        oracle = _curve(config, results, model, n, name="oracle")
        others.append(oracle.series(f"{words}, oracle penalty", model, "thin"))
    return Chart(
        name=f"rotation-n{n}",
        title=f"Error against the turn at n = {n}",
        x_label="turn γ",
        y_label="relative test error",
        series=[*measured, *predicted, *others],
        rows=[row for row in rows if row["n"] == n],
        note=(
            "In even dimension S_{γ} is a multiple of a rotation, so theory gives zero-mean heads "
            "and the MLP one error for all γ."
        ),
    )


def _crossing_row(
    config: Config, results: Results, n: int, crossings: dict[tuple[int, bool], Estimate]
) -> Row:
    """Crossing and last ratio at one n, of finitely and infinitely many heads."""
    last = f"ratio at γ = {config.gammas[-1]:g}"
    return {
        "n": n,
        f"crossing, {config.n_heads} heads": crossings[n, False].text(),
        "crossing, ∞ heads": crossings[n, True].text(),
        f"{last}, {config.n_heads} heads": _ratio(config, results, n, exact=False).text(),
        f"{last}, ∞ heads": _ratio(config, results, n, exact=True).text(),
    }


def _verdict(
    config: Config, results: Results, crossings: dict[tuple[int, bool], Estimate], deviation: str
) -> Verdict:
    """The claim holds where biased heads help at the first turn and their advantage fades.

    It fades where the ratio of errors grows by more than two standard errors.
    """
    # the ratio at both ends, at the largest n
    n = config.shown[-1]
    first = f"γ = {config.gammas[0]:g}"
    last = f"γ = {config.gammas[-1]:g}"
    start = _ratio(config, results, n, exact=False, turn=0)
    end = _ratio(config, results, n, exact=False, turn=-1)
    numbers = {
        f"ratio at {first}, n = {n}": start.text(),
        f"ratio at {last}, n = {n}": end.text(),
    }
    for size in config.shown:
        numbers[f"crossing at n = {size}"] = crossings[size, False].text()
    numbers[f"crossing at n = {n}, ∞ heads"] = crossings[n, True].text()
    numbers[DEVIATION] = deviation

    # the state
    # an unknown spread is NaN, and nothing exceeds it
    spread = math.hypot(start.spread, end.spread)
    fades = (end.value or 0.0) - (start.value or 0.0) > 2 * spread
    state: State
    if start.upper < 1 and fades:
        state = "holds"
    elif fades:
        state = "partly"
    else:
        state = "does not show"

    # the sentence
    sentence = (
        f"At n = {n} biased heads have {start.text()} times the error of zero-mean heads at "
        f"{first} and {end.text()} times at {last}."
    )
    crossing = crossings[n, False]
    if crossing.value is None:
        sentence += " Between these turns they do not become a handicap at this size."
    else:
        sentence += f" They become a handicap at γ = {crossing.text(2)}"
        is_sure = math.isfinite(end.low) and end.low > 1
        if not is_sure:
            sentence += "; at the last turn it is still within error bars of none."
        elif (end.value or 0.0) <= SMALL:
            sentence += ", a small one."
        else:
            sentence += "."
    return Verdict(state, sentence, numbers)
