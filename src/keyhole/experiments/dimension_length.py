"""Figure 6. Dimension and length: samples needed against d and N, measured where possible, predicted beyond."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keyhole.experiments.cells import Cell
from keyhole.experiments.learning_curves import MODELS, predicted_samples
from keyhole.experiments.measured import Estimate, Results, deviation_text, read_curve, samples_measured
from keyhole.report.document import Chart, Row, Section, Series, State, Table, Verdict

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
            f"Our settings: `{self.target}` under the sphere law, relative error {self.level:.0%}; d varies at N = "
            f"{self.n_keys} and N at d = "
            f"{self.dim}; exact kernels of infinitely many heads and hidden units; measured where the prediction is "
            "at most "
            f"n = {self.largest}, {self.repetitions} repetitions, sizes in steps of √2 around the prediction."
        )


PRESETS = {
    "quick": Config(dims=(4, 6, 8, 12), keys=(2, 4, 8, 16), largest=1024, repetitions=3, n_test=1000),
    "full": Config(),
}

WINDOW = 2.9
"""Sizes run are within this factor of the prediction: seven steps of √2, which hold it though it be off by twice."""


def cells(config: Config) -> list[Cell]:
    """What has to be known."""
    shapes = dict.fromkeys([*((d, config.n_keys) for d in config.dims), *((config.dim, n) for n in config.keys)])
    return [cell for d, n in shapes for model in SHOWN for run in _runs(config, model, d, n) for cell in run]


def _sizes(config: Config, model: str, dim: int, n_keys: int) -> tuple[int, ...]:
    """Powers of √2 around the prediction, none if it is out of reach."""
    predicted = predicted_samples(config.target, dim, n_keys, config.level, model)
    if predicted is None or predicted > config.largest:
        return ()
    powers = [round(2 ** (k / 2)) for k in range(4, 60)]
    return tuple(n for n in powers if predicted / WINDOW <= n <= min(predicted * WINDOW, 1.5 * config.largest))


def _runs(config: Config, model: str, dim: int, n_keys: int) -> list[list[Cell]]:
    sizes = _sizes(config, model, dim, n_keys)
    rest = (max(sizes, default=0), config.n_test, config.seed)
    return [
        [Cell(model, config.target, dim, n_keys, None, n, *rest, r) for n in sizes] for r in range(config.repetitions)
    ]


def section(config: Config, results: Results) -> Section:
    """The figure and its verdict."""
    by_dim = [
        _row(config, results, model, d, config.n_keys) for model in SHOWN for d in (*config.dims, *config.far_dims)
    ]
    by_keys = [_row(config, results, model, config.dim, n) for model in SHOWN for n in (*config.keys, *config.far_keys)]
    charts = [
        _chart(config, by_dim, "d", f"Against the dimension, N = {config.n_keys}", "dimension d"),
        _chart(config, by_keys, "N", f"Against the length, d = {config.dim}", "keys N"),
    ]
    table = Table(
        "dimension-samples",
        f"Samples for {config.level:.0%} relative error on `{config.target}`",
        [_readable(row) for row in [*by_dim, *by_keys]],
    )
    return Section(
        "dimension",
        "Dimension and length",
        "Attention reads a set token by token, so that its need for samples hardly depends on how many tokens there "
        "are; an MLP on the "
        "flattened input has to learn every place anew.",
        [*charts, table],
        _verdict(config, by_dim, by_keys),
        config.describe(),
    )


def _row(config: Config, results: Results, model: str, dim: int, n_keys: int) -> Row:
    sizes = _sizes(config, model, dim, n_keys)
    runs = _runs(config, model, dim, n_keys)
    found, oracle = Estimate(None), Estimate(None)
    if len(sizes) > 1 and all(cell in results for run in runs for cell in run):
        found = samples_measured(read_curve(results, sizes, runs), config.level, config.seed)
        oracle = samples_measured(read_curve(results, sizes, runs, "oracle"), config.level, config.seed)
    return {
        "model": model,
        "d": dim,
        "N": n_keys,
        "measured": found.value,
        "standard_error": found.spread if found.value is not None and math.isfinite(found.spread) else None,
        "oracle": oracle.value,
        "predicted": predicted_samples(config.target, dim, n_keys, config.level, model),
    }


def _readable(row: Row) -> Row:
    measured = (
        Estimate(None)
        if row["measured"] is None
        else Estimate(float(row["measured"]), float(row["standard_error"] or math.nan))
    )
    return {
        "model": MODELS[str(row["model"])],
        "d": row["d"],
        "N": row["N"],
        "n, measured": measured.text(),
        "n, predicted": "–" if row["predicted"] is None else f"{row['predicted']:,}",
    }


def _chart(config: Config, rows: list[Row], axis: str, title: str, label: str) -> Chart:
    series: list[Series] = []
    for model in SHOWN:
        own = [row for row in rows if row["model"] == model]
        seen = [row for row in own if row["measured"] is not None]
        y, bars = [float(row["measured"] or 0) for row in seen], [float(row["standard_error"] or 0) for row in seen]
        low, high = ([a + sign * b for a, b in zip(y, bars, strict=True)] for sign in (-1, 1))
        series.append(Series(MODELS[model], [float(row[axis] or 0) for row in seen], y, low, high, "points", model))
        told = [row for row in own if row["predicted"] is not None]
        points = [float(row[axis] or 0) for row in told], [float(row["predicted"] or 0) for row in told]
        series.append(Series(f"{MODELS[model]}, predicted", *points, look="dashed", role=model))
        oracles = [row for row in own if row["oracle"] is not None]
        points = [float(row[axis] or 0) for row in oracles], [float(row["oracle"] or 0) for row in oracles]
        series.append(Series(f"{MODELS[model]}, oracle penalty", *points, look="thin", role=model))
    return Chart(
        f"dimension-{axis}",
        title,
        label,
        f"samples for {config.level:.0%} error",
        series,
        rows=rows,
        x_log=True,
        y_log=True,
        note=f"Not measured where theory asks for more than {config.largest} samples, the largest Gram matrix run "
        "here.",
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
                growth[axis, model, column] = _growth(rows, model, axis, column)
                value = growth[axis, model, column]
                numbers[f"n grows like {axis} to the power, {MODELS[model]}, {column}"] = (
                    "–" if value is None else f"{value:.2f}"
                )
    numbers["median deviation of prediction"] = deviation_text([*by_dim, *by_keys])
    far = {row["model"]: row for row in by_keys if row["N"] == max(config.far_keys, default=max(config.keys))}
    attention, mlp = (growth["N", model, "measured"] for model in SHOWN)
    if attention is None or mlp is None:
        sentence = (
            "Too few sizes are within reach to tell how the samples grow with N for both models; the "
            "prediction is drawn."
        )
        return Verdict("not tested", sentence, numbers)
    sentence = f"Measured, the samples grow like N^{{{attention:.2f}}} for attention and N^{{{mlp:.2f}}} for the MLP."
    predicted = [far.get(model, {}).get("predicted") for model in SHOWN]
    if all(value is not None for value in predicted):
        n_keys = max(config.far_keys, default=max(config.keys))
        sentence += f" At N = {n_keys} theory asks for {int(predicted[0] or 0):,} and {int(predicted[1] or 0):,}."
    state: State = "holds" if mlp > attention + 0.5 else "partly" if mlp > attention else "does not show"
    return Verdict(state, sentence, numbers)
