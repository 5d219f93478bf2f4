"""Figure 6.

Dimension and length: samples needed against d and N, measured where possible, predicted beyond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import DEVIATION, MODELS, predicted_samples
from keyhole.lab.measured import (
    CellSweep,
    Results,
    deviation_text,
    log_chart,
    samples_row,
    samples_text,
    series_from_rows,
)
from keyhole.lab.report.document import Chart, Row, Section, State, Table, Verdict

SHOWN = ("attention", "mlp")


@dataclass(frozen=True)
class Config:
    """What is measured around (d, N) = (dim, n_keys), and how far prediction goes."""

    target: str = "token^2"
    dim: int = 8
    n_keys: int = 8
    dims: tuple[int, ...] = (4, 6, 8, 10, 12, 16)
    keys: tuple[int, ...] = (2, 4, 8, 16, 32)
    far_dims: tuple[int, ...] = (24, 32, 48, 64, 96, 128)
    far_keys: tuple[int, ...] = (64, 128, 256, 512)
    level: float = 0.25
    largest: int = 4096
    repetitions: int = 4
    n_test: int = 2000
    seed: int = 0

    def describe(self) -> str:
        """The settings in a sentence or two."""
        return (
            f"Our settings: `{self.target}` under the sphere distribution, relative error "
            f"{self.level:.0%}; d varies at N = {self.n_keys} and N at d = {self.dim}; exact "
            "kernels of infinitely many heads and hidden units; measured where the prediction is "
            f"at most n = {self.largest}, {self.repetitions} repetitions, sizes in steps of √2 "
            "around the prediction."
        )

    def sweep(self, model: str, dim: int, n_keys: int) -> CellSweep:
        """Error against n, at powers of √2 around the prediction; at none if it is out of reach."""
        predicted = predicted_samples(self.target, dim, n_keys, self.level, model)
        if predicted is None or predicted > self.largest:
            return CellSweep((), ())
        powers = [round(2 ** (k / 2)) for k in range(4, 60)]
        sizes = [
            n
            for n in powers
            if predicted / WINDOW <= n <= min(predicted * WINDOW, 1.5 * self.largest)
        ]
        most = max(sizes)
        cell = Cell(model, self.target, dim, n_keys, None, most, most, self.n_test, self.seed, 0)
        return CellSweep.over(cell, "n_samples", sizes, self.repetitions)


PRESETS = {
    "quick": Config(
        dims=(4, 6, 8, 12), keys=(2, 4, 8, 16), largest=1024, repetitions=3, n_test=1000
    ),
    "full": Config(),
}

WINDOW = 2.9
"""Sizes run are within this factor of the prediction: seven steps of √2, which hold it though it be
off by twice.
"""


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    shapes = dict.fromkeys(
        [*((d, config.n_keys) for d in config.dims), *((config.dim, n) for n in config.keys)]
    )
    return [
        cell for shape in shapes for model in SHOWN for cell in config.sweep(model, *shape).cells
    ]


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    by_dim = [
        _row(config, results, model, d, config.n_keys)
        for model in SHOWN
        for d in (*config.dims, *config.far_dims)
    ]
    by_keys = [
        _row(config, results, model, config.dim, n)
        for model in SHOWN
        for n in (*config.keys, *config.far_keys)
    ]
    charts = [
        _chart(config, by_dim, "d", f"Against the dimension, N = {config.n_keys}", "dimension d"),
        _chart(config, by_keys, "N", f"Against the length, d = {config.dim}", "keys N"),
    ]
    table = Table(
        "dimension-samples",
        f"Samples for {config.level:.0%} relative error on `{config.target}`",
        [{"model": MODELS[str(row["model"])], **samples_text(row)} for row in (*by_dim, *by_keys)],
    )
    return Section(
        "dimension",
        "Dimension and length",
        "Attention reads a set token by token, so that its need for samples hardly depends on how "
        "many tokens there are; an MLP on the flattened input has to learn every place anew.",
        [*charts, table],
        _verdict(config, by_dim, by_keys),
        config.describe(),
    )


def _row(config: Config, results: Results, model: str, dim: int, n_keys: int) -> Row:
    sweep = config.sweep(model, dim, n_keys)
    if len(sweep.x) < 2 or not all(cell in results for cell in sweep.cells):
        sweep = CellSweep((), ())
    return {
        "model": model,
        "d": dim,
        "N": n_keys,
        **samples_row(sweep, results, config.level, config.seed),
        "predicted": predicted_samples(config.target, dim, n_keys, config.level, model),
    }


def _chart(config: Config, rows: list[Row], axis: str, title: str, label: str) -> Chart:
    series = []
    for model in SHOWN:
        own, words = [row for row in rows if row["model"] == model], MODELS[model]
        series.append(
            series_from_rows(own, axis, "measured", words, role=model, error="standard_error")
        )
        series.append(
            series_from_rows(own, axis, "predicted", f"{words}, predicted", "dashed", model)
        )
        series.append(
            series_from_rows(own, axis, "oracle", f"{words}, oracle penalty", "thin", model)
        )
    return log_chart(
        f"dimension-{axis}",
        title,
        label,
        f"samples for {config.level:.0%} error",
        series,
        rows=rows,
        note=(
            f"Not measured where theory asks for more than {config.largest} samples, the most run "
            "here."
        ),
    )


def _growth(rows: list[Row], model: str, axis: str, column: str) -> float | None:
    """Exponent between the ends of what is known."""
    known = [row for row in rows if row["model"] == model and row[column] is not None]
    if len(known) < 2:
        return None
    ends = [(float(row[axis] or 1), float(row[column] or 1)) for row in (known[0], known[-1])]
    return math.log(ends[1][1] / ends[0][1]) / math.log(ends[1][0] / ends[0][0])


def _verdict(config: Config, by_dim: list[Row], by_keys: list[Row]) -> Verdict:
    numbers = {}
    growth = {}
    for axis, rows in (("d", by_dim), ("N", by_keys)):
        for model in SHOWN:
            for column in ("measured", "predicted"):
                value = growth[axis, model, column] = _growth(rows, model, axis, column)
                name = f"n grows like {axis} to the power, {MODELS[model]}, {column}"
                numbers[name] = "–" if value is None else f"{value:.2f}"
    numbers[DEVIATION] = deviation_text([*by_dim, *by_keys])
    far = {
        row["model"]: row
        for row in by_keys
        if row["N"] == max(config.far_keys, default=max(config.keys))
    }
    attention, mlp = (growth["N", model, "measured"] for model in SHOWN)
    if attention is None or mlp is None:
        sentence = (
            "Too few sizes are within reach to tell how the samples grow with N for both models; "
            "the prediction is drawn."
        )
        return Verdict("not tested", sentence, numbers)
    sentence = (
        f"Measured, the samples grow like N^{{{attention:.2f}}} for attention and N^{{{mlp:.2f}}} "
        "for the MLP."
    )
    predicted = [far.get(model, {}).get("predicted") for model in SHOWN]
    if all(value is not None for value in predicted):
        n_keys = max(config.far_keys, default=max(config.keys))
        sentence += (
            f" At N = {n_keys} theory asks for {int(predicted[0] or 0):,} and "
            f"{int(predicted[1] or 0):,}."
        )
    state: State = (
        "holds" if mlp > attention + 0.5 else "partly" if mlp > attention else "does not show"
    )
    return Verdict(state, sentence, numbers)
