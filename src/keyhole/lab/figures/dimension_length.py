"""Figure 6.

Dimension and length: samples needed against d and N, measured where possible, predicted beyond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from keyhole.lab.cells import Cell
from keyhole.lab.figures.learning_curves import DEVIATION, MODELS, predicted_samples
from keyhole.lab.measured import (
    CellSweep,
    Results,
    count_text,
    deviation_text,
    log_chart,
    missed_window,
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
            f"from {WIDE_WINDOW:g} times below the prediction to {WINDOW:g} times above it."
        )

    @property
    def longest(self) -> int:
        """The largest N of all, measured or predicted."""
        return max(self.far_keys, default=max(self.keys))

    def sweep(self, model: str, dim: int, n_keys: int) -> CellSweep:
        """Error against n, at powers of √2 around the prediction; at none if it is out of reach."""
        predicted = predicted_samples(self.target, dim, n_keys, self.level, model)
        if predicted is None or predicted > self.largest:
            return CellSweep(x=(), runs=())
        low = predicted / WIDE_WINDOW
        high = min(predicted * WINDOW, 1.5 * self.largest)
        powers = [round(2 ** (k / 2)) for k in range(4, 60)]
        sizes = [n for n in powers if low <= n <= high]
        cell = Cell(
            model=model,
            target=self.target,
            dim=dim,
            n_keys=n_keys,
            n_heads=None,
            n_samples=max(sizes),
            most_samples=max(sizes),
            n_test=self.n_test,
            seed=self.seed,
            repetition=0,
        )
        return CellSweep.over(cell, "n_samples", sizes, self.repetitions)


PRESETS = {
    "quick": Config(
        dims=(4, 6, 8, 12), keys=(2, 4, 8, 16), largest=1024, repetitions=3, n_test=1000
    ),
    "full": Config(),
}

WINDOW = 2.9
"""Sizes run go up to this factor above the prediction: three steps of √2."""

WIDE_WINDOW = 16.0
"""And down to this factor below it: small sizes cost little."""


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    # d varies at one N and N at one d; where the two meet is one shape
    shapes = [(dim, config.n_keys) for dim in config.dims]
    shapes += [(config.dim, n_keys) for n_keys in config.keys]
    cells = []
    for dim, n_keys in dict.fromkeys(shapes):
        for model in SHOWN:
            cells += config.sweep(model, dim, n_keys).cells
    return cells


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    by_dim = []
    by_keys = []
    for model in SHOWN:
        for dim in (*config.dims, *config.far_dims):
            by_dim.append(_row(config, results, model, dim, config.n_keys))
        for n_keys in (*config.keys, *config.far_keys):
            by_keys.append(_row(config, results, model, config.dim, n_keys))
    charts = [
        _chart(config, by_dim, "d", f"Against the dimension, N = {config.n_keys}", "dimension d"),
        _chart(config, by_keys, "N", f"Against the length, d = {config.dim}", "keys N"),
    ]
    table = Table(
        name="dimension-samples",
        title=f"Samples for {config.level:.0%} relative error on `{config.target}`",
        rows=[
            {"model": MODELS[str(row["model"])], **samples_text(row)} for row in (*by_dim, *by_keys)
        ],
    )
    return Section(
        slug="dimension",
        title="Dimension and length",
        claim=(
            "Attention reads a set token by token, so that its need for samples hardly depends on "
            "how many tokens there are; an MLP on the flattened input has to learn every place "
            "anew."
        ),
        blocks=[*charts, table],
        verdict=_verdict(config, by_dim, by_keys),
        settings=config.describe(),
    )


def _row(config: Config, results: Results, model: str, dim: int, n_keys: int) -> Row:
    """Samples measured, where that is within reach, and predicted."""
    sweep = config.sweep(model, dim, n_keys)
    is_measured = len(sweep.x) >= 2 and all(cell in results for cell in sweep.cells)
    if not is_measured:
        sweep = CellSweep(x=(), runs=())
    return {
        "model": model,
        "d": dim,
        "N": n_keys,
        **samples_row(sweep, results, config.level, config.seed),
        "predicted": predicted_samples(config.target, dim, n_keys, config.level, model),
        "miss": missed_window(sweep.curve(results), config.level),
    }


def _chart(config: Config, rows: list[Row], axis: str, title: str, label: str) -> Chart:
    """Samples of both models against d or N: measured, predicted, with the oracle's penalty."""
    series = []
    for model in SHOWN:
        words = MODELS[model]
        model_rows = [row for row in rows if row["model"] == model]
        series += [
            series_from_rows(
                model_rows, axis, "measured", words, role=model, error="standard_error"
            ),
            series_from_rows(
                model_rows, axis, "predicted", f"{words}, predicted", look="dashed", role=model
            ),
            series_from_rows(
                model_rows, axis, "oracle", f"{words}, oracle penalty", look="thin", role=model
            ),
        ]
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
    """Exponent of n against d or N, between the ends of what is known."""
    complete = [row for row in rows if row["model"] == model and row[column] is not None]
    if len(complete) < 2:
        return None
    first = complete[0]
    last = complete[-1]
    growth_of_samples = float(last[column] or 1) / float(first[column] or 1)
    growth_of_axis = float(last[axis] or 1) / float(first[axis] or 1)
    return math.log(growth_of_samples) / math.log(growth_of_axis)


def _verdict(config: Config, by_dim: list[Row], by_keys: list[Row]) -> Verdict:
    """The claim holds where the MLP's samples grow with N faster, by half a power at least.

    It holds in part at most where a prediction is contradicted: the error was not reached near the
    predicted number of samples, above or below.
    """
    numbers = {}
    for axis, rows in (("d", by_dim), ("N", by_keys)):
        for model, column in product(SHOWN, ("measured", "predicted")):
            exponent = _growth(rows, model, axis, column)
            name = f"n grows like {axis} to the power, {MODELS[model]}, {column}"
            numbers[name] = "–" if exponent is None else f"{exponent:.2f}"
    numbers[DEVIATION] = deviation_text([*by_dim, *by_keys])

    # how the samples grow with N
    attention = _growth(by_keys, "attention", "N", "measured")
    mlp = _growth(by_keys, "mlp", "N", "measured")
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

    # what theory asks for at the largest N
    far = {row["model"]: row["predicted"] for row in by_keys if row["N"] == config.longest}
    far_attention = far.get("attention")
    far_mlp = far.get("mlp")
    if far_attention is not None and far_mlp is not None:
        sentence += (
            f" At N = {config.longest} theory asks for {int(far_attention):,} and {int(far_mlp):,}."
        )

    # predictions that the sizes run contradict
    misses = [row for row in (*by_dim, *by_keys) if row["miss"] is not None]
    for row in misses:
        sentence += (
            f" Contradicted: {MODELS[str(row['model'])]} at d = {row['d']}, N = {row['N']}, "
            f"predicted {count_text(int(row['predicted'] or 0))} samples, {row['miss']}."
        )

    state: State
    if mlp > attention + 0.5 and not misses:
        state = "holds"
    elif mlp > attention:
        state = "partly"
    else:
        state = "does not show"
    return Verdict(state, sentence, numbers)
