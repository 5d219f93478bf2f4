"""Figure 6.

Dimension and length: samples needed against d and N, measured where possible, predicted beyond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from keyhole.lab.cells import Cell, RidgeCell, Row
from keyhole.lab.curves import (
    DEVIATION,
    MODELS,
    Estimate,
    above,
    count_text,
    curve_of,
    deviation_text,
    difference,
    missed_window,
    quotient,
    samples_needed,
    state_of,
)
from keyhole.lab.predictions import predicted_samples
from keyhole.lab.report.document import Chart, Section, Series, Table, Verdict, bars

SHOWN = ("attention", "mlp")

WINDOW = 2.9
"""Sizes run go up to this factor above the prediction: three steps of √2."""

WIDE_WINDOW = 16.0
"""And down to this factor below it: small sizes cost little."""

FASTER = 0.5
"""How much larger the MLP's exponent of N has to be."""

RULE = (
    "The number is the exponent with which the MLP's samples grow with N, less that of attention. "
    f"Holds if its 95 % interval lies above {FASTER:g}, and no predicted number of samples is "
    "contradicted by the sizes run around it; partly if it lies above 0; not sure if the interval "
    "has 0 inside."
)


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
    def shapes(self) -> list[tuple[int, int]]:
        """Every (d, N) that is measured: d varies at one N and N at one d."""
        shapes = [(dim, self.n_keys) for dim in self.dims]
        shapes += [(self.dim, n_keys) for n_keys in self.keys]
        return list(dict.fromkeys(shapes))

    def predicted(self, model: str, dim: int, n_keys: int) -> int | None:
        """The samples that theory asks for."""
        return predicted_samples(self.target, dim, n_keys, self.level, model)

    def sizes(self, model: str, dim: int, n_keys: int) -> tuple[int, ...]:
        """Powers of √2 around the prediction; none if it is out of reach."""
        predicted = self.predicted(model, dim, n_keys)
        if predicted is None or predicted > self.largest:
            return ()
        low = predicted / WIDE_WINDOW
        high = min(predicted * WINDOW, 1.5 * self.largest)
        powers = [round(2 ** (k / 2)) for k in range(4, 60)]
        return tuple(n for n in powers if low <= n <= high)


PRESETS = {
    "quick": Config(
        dims=(4, 6, 8, 12), keys=(2, 4, 8, 16), largest=1024, repetitions=3, n_test=1000
    ),
    "full": Config(),
}


def cells(config: Config) -> list[Cell]:
    """What has to be measured."""
    cells: list[Cell] = []
    for (dim, n_keys), model in product(config.shapes, SHOWN):
        sizes = config.sizes(model, dim, n_keys)
        if sizes:
            cells += [
                RidgeCell(
                    model=model,
                    targets=(config.target,),
                    dim=dim,
                    n_keys=n_keys,
                    heads=(None,),
                    sizes=sizes,
                    n_test=config.n_test,
                    seed=config.seed,
                    repetition=repetition,
                )
                for repetition in range(config.repetitions)
            ]
    return cells


def section(config: Config, rows: Sequence[Row]) -> Section:
    """The figure and its verdict."""
    by_dim = []
    by_keys = []
    for model in SHOWN:
        for dim in (*config.dims, *config.far_dims):
            by_dim.append(samples_row(config, rows, model, dim, config.n_keys))
        for n_keys in (*config.keys, *config.far_keys):
            by_keys.append(samples_row(config, rows, model, config.dim, n_keys))
    charts = [
        _chart(config, by_dim, "d", f"Against the dimension, N = {config.n_keys}", "dimension d"),
        _chart(config, by_keys, "N", f"Against the length, d = {config.dim}", "keys N"),
    ]
    table = Table(
        name="dimension-samples",
        title=f"Samples for {config.level:.0%} relative error on `{config.target}`",
        rows=[
            {
                "model": MODELS[row["model"]],
                "d": row["d"],
                "N": row["N"],
                "n, measured": row["samples"].text(),
                "n, predicted": count_text(row["predicted"]),
            }
            for row in (*by_dim, *by_keys)
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
        verdict=verdict(by_dim, by_keys),
        settings=config.describe(),
        rule=RULE,
    )


def samples_row(config: Config, rows: Sequence[Row], model: str, dim: int, n_keys: int) -> Row:
    """Samples measured, where that is within reach, and predicted."""
    curve = curve_of(rows, "n", model=model, d=dim, N=n_keys)
    samples = Estimate(None)
    if len(curve.x) >= 2:
        samples = samples_needed(curve, config.level, config.seed)
    is_known = samples.value is not None and math.isfinite(samples.spread)
    return {
        "model": model,
        "d": dim,
        "N": n_keys,
        "measured": samples.value,
        "standard_error": samples.spread if is_known else None,
        "samples": samples,
        "predicted": config.predicted(model, dim, n_keys),
        "miss": missed_window(curve, config.level),
    }


def _chart(config: Config, rows: list[Row], axis: str, title: str, label: str) -> Chart:
    """Samples of both models against d or N: measured and predicted."""
    series = []
    for model in SHOWN:
        words = MODELS[model]
        of_model = [row for row in rows if row["model"] == model]
        measured = [row for row in of_model if row["measured"] is not None]
        predicted = [row for row in of_model if row["predicted"] is not None]
        series += [
            bars(
                words,
                [row[axis] for row in measured],
                [row["measured"] for row in measured],
                [row["standard_error"] or 0.0 for row in measured],
                role=model,
            ),
            Series(
                f"{words}, predicted",
                [row[axis] for row in predicted],
                [row["predicted"] for row in predicted],
                look="dashed",
                role=model,
            ),
        ]
    return Chart(
        name=f"dimension-{axis}",
        title=title,
        x_label=label,
        y_label=f"samples for {config.level:.0%} error",
        series=series,
        rows=[{name: row[name] for name in row if name != "samples"} for row in rows],
        x_log=True,
        y_log=True,
        note=(
            f"Dashed: theory. Not measured where "
            f"theory asks for more than {config.largest} samples, the most run here."
        ),
    )


def growth(rows: Sequence[Row], model: str, axis: str, column: str) -> Estimate:
    """Exponent of n against d or N between the ends of what is known."""
    complete = [row for row in rows if row["model"] == model and row[column] is not None]
    if len(complete) < 2:
        return Estimate(None)
    first, last = complete[0], complete[-1]
    log_axis = math.log(last[axis] / first[axis])
    exponent = math.log(last[column] / first[column]) / log_axis
    if column != "measured":
        return Estimate(exponent)
    # errors of logarithms are relative errors
    relative = quotient(last["samples"], first["samples"])
    spread = relative.spread / (relative.value or 1.0) / log_axis
    reach = relative.reach / (relative.value or 1.0) / log_axis
    return Estimate(exponent, spread, exponent - reach, exponent + reach)


def verdict(by_dim: Sequence[Row], by_keys: Sequence[Row]) -> Verdict:
    """The `RULE` on rows along d and along N."""
    numbers = {}
    for axis, rows in (("d", by_dim), ("N", by_keys)):
        for model, column in product(SHOWN, ("measured", "predicted")):
            name = f"n grows like {axis} to the power, {MODELS[model]}, {column}"
            numbers[name] = growth(rows, model, axis, column).text()

    # how the samples grow with N
    attention = growth(by_keys, "attention", "N", "measured")
    mlp = growth(by_keys, "mlp", "N", "measured")
    if attention.value is None or mlp.value is None:
        numbers[DEVIATION] = deviation_text([*by_dim, *by_keys])
        sentence = (
            "Too few sizes are within reach to tell how the samples grow with N for both models; "
            "the prediction is drawn."
        )
        return Verdict("not tested", sentence, numbers)
    more = difference(mlp, attention)
    numbers["exponent of N, MLP less attention"] = more.text()
    numbers[DEVIATION] = deviation_text([*by_dim, *by_keys])
    sentence = (
        f"Measured, the samples grow like N^{{{attention.value:.2f}}} for attention and "
        f"N^{{{mlp.value:.2f}}} for the MLP."
    )

    # what theory asks for at the largest N
    longest = max(row["N"] for row in by_keys)
    far = {row["model"]: row["predicted"] for row in by_keys if row["N"] == longest}
    if None not in far.values():
        sentence += f" At N = {longest} theory asks for {far['attention']:,} and {far['mlp']:,}."

    # predictions that the sizes run contradict
    misses = [row for row in (*by_dim, *by_keys) if row["miss"] is not None]
    for row in misses:
        sentence += (
            f" Contradicted: {MODELS[row['model']]} at d = {row['d']}, N = {row['N']}, predicted "
            f"{count_text(row['predicted'])} samples, {row['miss']}."
        )
    is_faster = above(more, FASTER)
    if misses:
        is_faster = False
    return Verdict(state_of([is_faster, above(more, 0.0)]), sentence, numbers)
