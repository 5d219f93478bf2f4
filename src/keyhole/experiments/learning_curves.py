"""What figures 1 to 3 share: test error against n for attention, biased attention and an MLP of as many parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from keyhole.experiments.cells import Cell
from keyhole.experiments.jobs import read_target
from keyhole.experiments.measured import Curve, Results, read_curve
from keyhole.experiments.prediction import variance
from keyhole.report.document import Chart, Row, Series
from keyhole.theory import best_ridge_curve, samples_needed

MODELS = {"attention": "attention", "biased": "biased attention", "mlp": "MLP"}
"""Models by the names a reader sees."""


@dataclass(frozen=True)
class CurveConfig:
    """Sizes. All figures that agree on them share their jobs."""

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
    spectrum_sets: int = 4096
    """Sets whose Gram matrix stands for the spectrum of biased heads; it predicts up to a quarter of their number."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.smallest <= self.largest:
            raise ValueError(
                f"`smallest` and `largest` must satisfy 2 ≤ smallest ≤ largest: got {self.smallest} and {self.largest}."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of samples, each twice the one before, ending at the largest."""
        count = 1 + int(math.log2(self.largest / self.smallest))
        return tuple(sorted(self.largest >> k for k in range(count)))

    def reach(self, repetition: int) -> int:
        """The largest n of a repetition."""
        return self.largest if repetition < self.repetitions else min(self.more_up_to, self.largest)

    def describe(self) -> str:
        """The settings in a sentence or two."""
        more = f", {self.more_repetitions} more up to n = {self.more_up_to}" if self.more_repetitions else ""
        return (
            f"Our settings: query and keys uniform on the unit sphere, d = {self.dim}, N = {self.n_keys}, M = "
            f"{self.n_heads} "
            f"heads, MLP of width M(d+1) = {self.n_heads * (self.dim + 1)}; {self.repetitions} repetitions (sets, "
            "heads) up "
            f"to n = {self.largest}{more}; no label noise; relative error = mean squared error over Var f* on "
            f"{self.n_test} "
            "test sets. Ridge with an intercept, in float64; the penalty is chosen by leave-one-out on the training "
            "sets."
        )


def curve_cells(config: CurveConfig, targets: Iterable[str], sizes: Sequence[int] | None = None) -> list[Cell]:
    """Every model, finite and infinite, on every target, size and repetition; and the spectrum of biased heads."""
    targets, sizes = tuple(targets), tuple(sizes or config.sizes)
    cells = []
    for model in MODELS:
        for heads in (config.n_heads, None):
            for target in targets:
                for run in _runs(config, model, heads, target, sizes):
                    cells += run
    return cells + [cell for target in targets for cell in _spectrum_cells(config, target, sizes)]


def _runs(config: CurveConfig, model: str, heads: int | None, target: str, sizes: Sequence[int]) -> list[list[Cell]]:
    runs = []
    for repetition in range(config.repetitions + config.more_repetitions):
        reach = config.reach(repetition)
        shape = (config.dim, config.n_keys, heads)
        rest = (reach, config.n_test, config.seed, repetition)
        runs.append([Cell(model, target, *shape, n, *rest) for n in sizes if n <= reach])
    return runs


def _spectrum_cells(config: CurveConfig, target: str, sizes: Sequence[int]) -> list[Cell]:
    most = config.spectrum_sets
    return [
        Cell("biased", target, config.dim, config.n_keys, heads, n, most, 0, config.seed, 0, learner="spectrum")
        for heads in (config.n_heads, None)
        for n in sizes
        if 4 * n <= most
    ]


def measured_curve(
    config: CurveConfig,
    results: Results,
    model: str,
    target: str,
    *,
    exact: bool = False,
    name: str = "error",
    sizes: Sequence[int] | None = None,
) -> Curve:
    """Error against n of one model on one target."""
    sizes = tuple(sizes or config.sizes)
    return read_curve(results, sizes, _runs(config, model, None if exact else config.n_heads, target, sizes), name)


def predicted_curve(
    config: CurveConfig,
    results: Results,
    model: str,
    target: str,
    *,
    exact: bool = False,
    sizes: Sequence[int] | None = None,
) -> dict[int, float]:
    """Relative error predicted at the best ridge, by n: exact spectra for attention and MLP, a sample's for biased."""
    sizes = tuple(sizes or config.sizes)
    if model == "biased":
        heads = None if exact else config.n_heads
        cells = [cell for cell in _spectrum_cells(config, target, sizes) if cell.n_heads == heads]
        return {cell.n_samples: results[cell]["error"] for cell in cells}
    count = math.inf if exact else config.n_heads
    return _predicted(target, config.dim, config.n_keys, sizes, count, model)


@lru_cache(maxsize=4096)
def _predicted(
    target: str, dim: int, n_keys: int, sizes: tuple[int, ...], heads: float | int, model: str
) -> dict[int, float]:
    polynomial = read_target(target, dim)
    spread = variance(polynomial, n_keys)
    predicted = {}
    for n in sizes:
        try:
            predicted[n] = float(best_ridge_curve(polynomial, n, n_keys, n_heads=heads, model=model).error) / spread
        except ValueError:  # the finest spectrum we keep is not fine enough for so many samples
            continue
    return predicted


@lru_cache(maxsize=4096)
def predicted_samples(
    target: str, dim: int, n_keys: int, level: float, model: str, heads: float | int = math.inf
) -> int | None:
    """Samples predicted to reach a share of Var f*; None where theory finds none or keeps no spectrum fine enough."""
    polynomial = read_target(target, dim)
    try:
        return samples_needed(polynomial, n_keys, level * variance(polynomial, n_keys), model, n_heads=heads)
    except ValueError:
        return None


def curve_rows(
    config: CurveConfig,
    results: Results,
    target: str,
    sizes: Sequence[int] | None = None,
    models: Sequence[str] = tuple(MODELS),
) -> list[Row]:
    """One row per model, finite and infinite, and n: measured, oracle, predicted."""
    rows: list[Row] = []
    for model in models:
        for exact in (False, True):
            options = {"exact": exact, "sizes": sizes}
            measured = measured_curve(config, results, model, target, **options)  # type: ignore[arg-type]
            oracle = measured_curve(config, results, model, target, name="oracle", **options)  # type: ignore[arg-type]
            predicted = predicted_curve(config, results, model, target, **options)  # type: ignore[arg-type]
            for i, n in enumerate(map(int, measured.x)):
                rows.append(
                    {
                        "target": target,
                        "model": MODELS[model],
                        "heads": "∞" if exact else str(config.n_heads),
                        "n": n,
                        "measured": float(measured.mean[i]),
                        "standard_error": _finite(measured.error[i]),
                        "repetitions": int(np.isfinite(measured.runs[:, i]).sum()),
                        "oracle": float(oracle.mean[i]),
                        "predicted": predicted.get(n),
                    }
                )
    return rows


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def curve_chart(
    config: CurveConfig, results: Results, target: str, name: str, title: str, level: float | None
) -> Chart:
    """Error against n of all models: measured, oracle, predicted, and infinitely many heads."""
    series: list[Series] = []
    for model, words in MODELS.items():
        series.append(measured_curve(config, results, model, target).series(words, model))
    for model, words in MODELS.items():
        predicted = predicted_curve(config, results, model, target)
        if predicted:
            label = f"{words}, predicted" + (" from a sample's spectrum" if model == "biased" else "")
            series.append(Series(label, list(predicted), list(predicted.values()), look="dashed", role=model))
    for model, words in MODELS.items():
        curve = measured_curve(config, results, model, target, exact=True)
        series.append(curve.series(f"{words}, ∞ {'units' if model == 'mlp' else 'heads'}", model, "line"))
    for model, words in MODELS.items():
        oracle = measured_curve(config, results, model, target, name="oracle")
        series.append(oracle.series(f"{words}, oracle penalty", model, "thin"))
    return Chart(
        name,
        title,
        "training sets n",
        "relative test error",
        series,
        rows=curve_rows(config, results, target),
        x_log=True,
        y_log=True,
        note="Points: mean over repetitions, bars one standard error. Dashed: theory, nothing fitted to the points.",
        marks={} if level is None else {f"{level:.0%} of Var f*": level},
    )
