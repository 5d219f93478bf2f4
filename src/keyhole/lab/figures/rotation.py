"""Figure 3.

Rotation away from the identity f_{3,γ}: where the advantage of the identity mean ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.lab.cells import Cell, Row
from keyhole.lab.curves import (
    DEVIATION,
    MODELS,
    Curve,
    Estimate,
    above,
    below,
    deviation_text,
    resample,
    rises_through,
    state_of,
)
from keyhole.lab.figures.learning_curves import CurveConfig, predicted_series, table_of
from keyhole.lab.report.document import Chart, Section, Series, Verdict

RULE = (
    "The number is the error of biased over that of zero-mean heads at the largest n. Holds if the "
    "95 % interval of its growth from the first turn to the last lies above 0, and that of the "
    "number at the first turn below 1; partly if it only grows; does not show if the interval of "
    "the growth lies below 0; not sure if 0 is inside."
)


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


def notation(gamma: float) -> str:
    """f_{3,γ} in words that can be read back."""
    return f"rotated({gamma:g})^3 * token"


def cells(config: Config) -> list[Cell]:
    """What has to be measured."""
    return config.cells([notation(gamma) for gamma in config.gammas], config.shown)


def section(config: Config, rows: Sequence[Row]) -> Section:
    """The figure and its verdict."""
    table_rows: list[Row] = []
    for gamma in config.gammas:
        for row in table_of(config, rows, notation(gamma), config.shown):
            table_rows.append({"gamma": gamma, **row})
    error_charts = [_error_chart(config, rows, n, table_rows) for n in reversed(config.shown)]
    return Section(
        slug="rotation",
        title="Rotation away from the identity",
        claim=(
            "The advantage of heads whose mean is the identity fades as the correlation turns away "
            "from it, f_{3,γ} = (1/N) Σ ⟨x₀, S_{γ} xᵢ⟩^{3} ⟨β, xᵢ⟩ with S_{γ} = (1 − γ) I + γ P, P "
            "a rotation without fixed directions."
        ),
        blocks=[_ratio_chart(config, rows, table_rows), *error_charts],
        verdict=verdict(config, rows, deviation_text(table_rows)),
        settings=config.describe(),
        rule=RULE,
    )


def _curve(config: Config, rows: Sequence[Row], model: str, n: int, *, exact: bool) -> Curve:
    """Error against γ at one n, in the repetitions that reach this n."""
    columns = [
        config.curve(rows, model, notation(gamma), exact=exact).at(n).runs
        for gamma in config.gammas
    ]
    table = np.concatenate(columns, axis=1)
    return Curve(np.array(config.gammas), table[np.isfinite(table).all(axis=1)])


def _pair(config: Config, rows: Sequence[Row], n: int, exact: bool) -> list[np.ndarray]:
    """Errors of biased and of zero-mean heads: repetitions by turns."""
    return [_curve(config, rows, model, n, exact=exact).runs for model in ("biased", "attention")]


def _mean_ratio(tables: list[np.ndarray]) -> np.ndarray:
    """Mean error of biased over that of zero-mean heads, at every turn."""
    return np.asarray(tables[0].mean(axis=0) / tables[1].mean(axis=0))


def _crossing(config: Config, rows: Sequence[Row], n: int, exact: bool) -> Estimate:
    """The turn from which on biased heads have the larger error."""
    turns = np.array(config.gammas)

    def statistic(tables: list[np.ndarray]) -> float | None:
        return rises_through(turns, _mean_ratio(tables), 1.0)

    return resample(statistic, _pair(config, rows, n, exact), config.seed)


def _ratio_at_turn(config: Config, rows: Sequence[Row], n: int, turn: int) -> Estimate:
    """Ratio of errors at one of the turns."""

    def statistic(tables: list[np.ndarray]) -> float:
        return float(_mean_ratio(tables)[turn])

    return resample(statistic, _pair(config, rows, n, exact=False), config.seed)


def _growth(config: Config, rows: Sequence[Row], n: int) -> Estimate:
    """How much the ratio of errors grows from the first turn to the last."""

    def statistic(tables: list[np.ndarray]) -> float:
        ratios = _mean_ratio(tables)
        return float(ratios[-1] - ratios[0])

    return resample(statistic, _pair(config, rows, n, exact=False), config.seed)


def _ratio_chart(config: Config, rows: Sequence[Row], table_rows: list[Row]) -> Chart:
    """The ratio of errors against γ, at every n shown, for finitely and infinitely many heads."""
    series: list[Series] = []
    for exact in (False, True):
        heads = "∞" if exact else config.n_heads
        for n in config.shown:
            biased, zero_mean = _pair(config, rows, n, exact)
            curve = Curve(np.array(config.gammas), biased / zero_mean)
            name = f"n = {n}, {heads} heads"
            series.append(curve.series(name, f"n = {n}", "thin" if exact else "points"))
    return Chart(
        name="rotation-ratio",
        title="Error of biased over zero-mean heads",
        x_label="turn γ",
        y_label="ratio of test errors",
        series=series,
        rows=table_rows,
        note=(
            "Below 1 the identity mean helps, above it is a handicap. Means of the ratios of "
            "single repetitions. Thin: infinitely many heads."
        ),
        marks={"equal": 1.0},
    )


def _error_chart(config: Config, rows: Sequence[Row], n: int, table_rows: list[Row]) -> Chart:
    """Errors of all models against γ at one n."""
    series = []
    for model, words in MODELS.items():
        series.append(_curve(config, rows, model, n, exact=False).series(words, model))
        # what theory predicts, where its spectrum is fine enough
        errors = {}
        for gamma in config.gammas:
            predicted = config.predicted(model, notation(gamma), exact=False, sizes=(n,))
            if n in predicted:
                errors[gamma] = predicted[n]
        if errors:
            series.append(predicted_series(errors, words, model))
        limit = _curve(config, rows, model, n, exact=True)
        series.append(limit.series(f"{words}, ∞ heads", model, "line"))
    return Chart(
        name=f"rotation-n{n}",
        title=f"Error against the turn at n = {n}",
        x_label="turn γ",
        y_label="relative test error",
        series=series,
        rows=[row for row in table_rows if row["n"] == n],
        note=(
            "Dashed: theory; line: infinitely many heads. In even dimension S_{γ} is a multiple of "
            "a rotation, so theory gives zero-mean heads and the MLP one error for all γ."
        ),
    )


def verdict(config: Config, rows: Sequence[Row], deviation: str) -> Verdict:
    """The `RULE` at the largest n."""
    n = config.shown[-1]
    first = f"γ = {config.gammas[0]:g}"
    last = f"γ = {config.gammas[-1]:g}"
    start = _ratio_at_turn(config, rows, n, 0)
    end = _ratio_at_turn(config, rows, n, -1)
    growth = _growth(config, rows, n)
    crossing = _crossing(config, rows, n, exact=False)
    numbers = {
        f"ratio at {first}, n = {n}": start.text(),
        f"ratio at {last}, n = {n}": end.text(),
        "growth of the ratio": growth.text(),
        f"crossing at n = {n}": crossing.text(),
        f"crossing at n = {n}, ∞ heads": _crossing(config, rows, n, exact=True).text(),
        DEVIATION: deviation,
    }
    sentence = (
        f"At n = {n} biased heads have {start.text()} times the error of zero-mean heads at "
        f"{first} and {end.text()} times at {last}."
    )
    if crossing.value is None:
        sentence += " Between these turns they do not become a handicap at this size."
    else:
        sentence += f" They become a handicap at γ = {crossing.text(2)}."
        if not above(end, 1.0):
            sentence += " At the last turn it is not sure that there is one."
    grows = above(growth, 0.0)
    state = state_of([grows, below(start, 1.0)]) if grows else state_of([grows])
    return Verdict(state, sentence, numbers)
