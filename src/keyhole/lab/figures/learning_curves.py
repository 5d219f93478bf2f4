"""What figures 1 to 3 share.

Test error against n for attention, biased attention and an MLP of as many parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keyhole.lab.cells import Cell, RidgeCell, Row
from keyhole.lab.curves import MODELS, Curve, curve_of, curve_rows
from keyhole.lab.predictions import predicted_error
from keyhole.lab.report.document import Chart, Series


@dataclass(frozen=True)
class CurveConfig:
    """Sizes of learning curves."""

    dim: int = 16
    n_keys: int = 16
    n_heads: int = 1000
    smallest: int = 16
    largest: int = 8192
    repetitions: int = 3
    more_up_to: int = 4096
    """Further repetitions go up to this n only: what they cost falls with its cube."""
    more_repetitions: int = 4
    n_test: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.smallest <= self.largest:
            raise ValueError(
                "`smallest` and `largest` must satisfy 2 ≤ smallest ≤ largest: got "
                f"{self.smallest} and {self.largest}."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of samples, each twice the one before, ending at the largest."""
        count = 1 + int(math.log2(self.largest / self.smallest))
        return tuple(sorted(self.largest >> k for k in range(count)))

    def describe(self) -> str:
        """The settings in a sentence or two."""
        more = ""
        if self.more_repetitions:
            more = f", {self.more_repetitions} more up to n = {self.more_up_to}"
        return (
            f"Our settings: query and keys uniform on the unit sphere, d = {self.dim}, N = "
            f"{self.n_keys}, M = {self.n_heads} heads, MLP of width M(d+1) = "
            f"{self.n_heads * (self.dim + 1)}; {self.repetitions} repetitions (sets, heads) up to "
            f"n = {self.largest}{more}; no label noise; relative error = mean squared error over "
            f"Var f* on {self.n_test} test sets. Ridge with an intercept, in float64; the penalty "
            "is chosen by leave-one-out on the training sets."
        )

    def reach(self, model: str, *, exact: bool) -> int:
        """The largest n at which a model is run."""
        return self.largest

    def cells(self, targets: Sequence[str], sizes: Sequence[int] = ()) -> list[Cell]:
        """Every model, finite and infinite, on all targets, sizes and repetitions."""
        cells: list[Cell] = []
        for exact in (False, True):
            for model in MODELS:
                for repetition in range(self.repetitions + self.more_repetitions):
                    # the first repetitions go all the way, the others end earlier
                    most = self.reach(model, exact=exact)
                    if repetition >= self.repetitions:
                        most = min(self.more_up_to, most)
                    cell_sizes = tuple(n for n in sizes or self.sizes if n <= most)
                    if cell_sizes:
                        cells.append(
                            RidgeCell(
                                model=model,
                                targets=tuple(targets),
                                dim=self.dim,
                                n_keys=self.n_keys,
                                heads=(None if exact else self.n_heads,),
                                sizes=cell_sizes,
                                n_test=self.n_test,
                                seed=self.seed,
                                repetition=repetition,
                            )
                        )
        return cells

    def curve(self, rows: Sequence[Row], model: str, target: str, *, exact: bool) -> Curve:
        """Error against n of one model on one target."""
        heads = None if exact else self.n_heads
        return curve_of(rows, "n", model=model, target=target, M=heads)

    def predicted(
        self, model: str, target: str, *, exact: bool, sizes: Sequence[int] = ()
    ) -> dict[float, float]:
        """Relative error predicted at the best ridge, by n, where theory has a prediction."""
        heads = math.inf if exact else self.n_heads
        errors: dict[float, float] = {}
        for n in sizes or self.sizes:
            error = predicted_error(target, self.dim, self.n_keys, n, heads, model)
            if error is not None:
                errors[n] = error
        return errors


def table_of(
    config: CurveConfig, rows: Sequence[Row], target: str, sizes: Sequence[int] = ()
) -> list[Row]:
    """One row per model, finite and infinite, and n: measured and predicted."""
    table: list[Row] = []
    for model, words in MODELS.items():
        for exact in (False, True):
            table += curve_rows(
                config.curve(rows, model, target, exact=exact),
                "n",
                {
                    "target": target,
                    "model": words,
                    "heads": "∞" if exact else str(config.n_heads),
                },
                config.predicted(model, target, exact=exact, sizes=sizes),
            )
    return table


def curve_chart(
    config: CurveConfig, rows: Sequence[Row], target: str, name: str, title: str, level: float
) -> Chart:
    """Error against n of all models: measured, predicted, and infinitely many heads."""
    series = []
    for model, words in MODELS.items():
        series.append(config.curve(rows, model, target, exact=False).series(words, model))
        # theory may keep no spectrum fine enough for any of the sizes
        predicted = config.predicted(model, target, exact=False)
        if predicted:
            series.append(predicted_series(predicted, words, model))
        unit = "units" if model == "mlp" else "heads"
        limit = config.curve(rows, model, target, exact=True)
        series.append(limit.series(f"{words}, ∞ {unit}", model, "line"))
    return Chart(
        name=name,
        title=title,
        x_label="training sets n",
        y_label="relative test error",
        series=series,
        rows=table_of(config, rows, target),
        x_log=True,
        y_log=True,
        note=(
            "Points: mean over repetitions, bars one standard error. In the colour of each: "
            "dashed, theory, nothing fitted to the points; line, infinitely many heads or units."
        ),
        marks={f"{level:.0%} of Var f*": level},
    )


def predicted_series(errors: dict[float, float], words: str, model: str) -> Series:
    """What theory predicts for a model, error by abscissa: a dashed curve in its colour."""
    return Series(
        f"{words}, predicted", list(errors), list(errors.values()), look="dashed", role=model
    )


def power(base: str, exponent: int) -> str:
    """A power as a reader writes it.

    >>> power("⟨β, xᵢ⟩", 2), power("⟨β, xᵢ⟩", 1)
    ('⟨β, xᵢ⟩^{2}', '⟨β, xᵢ⟩')
    """
    return base if exponent == 1 else f"{base}^{{{exponent}}}"
