"""What figures 1 to 3 share.

Test error against n for attention, biased attention and an MLP of as many parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from keyhole.attention.heads import GaussianHeads
from keyhole.lab.cells import Cell
from keyhole.lab.jobs import DISTRIBUTIONS, read_target, target_variance
from keyhole.lab.measured import CellSweep, Curve, Results, log_chart
from keyhole.lab.report.document import Chart, Row, Series
from keyhole.theory.bounds import samples_needed
from keyhole.theory.curves import best_ridge_curve

MODELS = {"attention": "attention", "biased": "biased attention", "mlp": "MLP"}
"""Models by the names a reader sees."""

DEVIATION = "median deviation of prediction"
"""Among the numbers of every verdict."""


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

    def sweep(
        self, model: str, target: str, sizes: Sequence[int], *, exact: bool = False
    ) -> CellSweep:
        """Error against n of one model on one target, in every repetition up to its largest n."""
        n_heads = None if exact else self.n_heads
        reach = self.reach(model, exact=exact)
        runs = []
        for repetition in range(self.repetitions + self.more_repetitions):
            # the first repetitions go all the way, the others end earlier
            most_samples = reach
            if repetition >= self.repetitions:
                most_samples = min(self.more_up_to, reach)
            run = [
                Cell(
                    model=model,
                    target=target,
                    dim=self.dim,
                    n_keys=self.n_keys,
                    n_heads=n_heads,
                    n_samples=n,
                    most_samples=most_samples,
                    n_test=self.n_test,
                    seed=self.seed,
                    repetition=repetition,
                )
                for n in sizes
                if n <= most_samples
            ]
            runs.append(tuple(run))
        return CellSweep(x=tuple(n for n in sizes if n <= reach), runs=tuple(runs))


def curve_cells(
    config: CurveConfig, targets: Iterable[str], sizes: Sequence[int] | None = None
) -> list[Cell]:
    """Every model, finite and infinite, on every target, size and repetition."""
    cells = []
    for target, exact, model in product(targets, (False, True), MODELS):
        cells += config.sweep(model, target, sizes or config.sizes, exact=exact).cells
    return cells


def measured_curve(
    config: CurveConfig,
    results: Results,
    model: str,
    target: str,
    *,
    exact: bool = False,
    name: str = "error",
) -> Curve:
    """Error against n of one model on one target."""
    return config.sweep(model, target, config.sizes, exact=exact).curve(results, name)


def predicted_curve(
    config: CurveConfig,
    model: str,
    target: str,
    *,
    exact: bool = False,
    sizes: Sequence[int] | None = None,
) -> dict[float, float]:
    """Relative error predicted from exact spectra at the best ridge, by n.

    Sizes for which theory keeps no spectrum fine enough are left out.
    """
    n_heads = math.inf if exact else config.n_heads
    errors: dict[float, float] = {}
    for n in sizes or config.sizes:
        error = predicted_error(target, config.dim, config.n_keys, n, n_heads, model)
        if error is not None:
            errors[n] = error
    return errors


@lru_cache(maxsize=16384)
def predicted_error(
    target: str,
    dim: int,
    n_keys: int,
    n: float,
    heads: float,
    model: str = "attention",
    noise: float = 0.0,
) -> float | None:
    """Test error over Var f* at the best ridge, label noise of ``noise`` Var f* taken off.

    None where the finest spectrum that is kept is not fine enough for so many samples.
    """
    polynomial = read_target(target, dim)
    variance = target_variance(polynomial, n_keys)
    kind, distribution = _theory_of(model)
    try:
        best = best_ridge_curve(
            polynomial,
            n,
            n_keys,
            noise=noise * variance,
            n_heads=heads,
            model=kind,
            heads=distribution,
        )
    except ValueError:
        return None
    return float(best.error) / variance - noise


@lru_cache(maxsize=4096)
def predicted_samples(
    target: str, dim: int, n_keys: int, level: float, model: str, heads: float = math.inf
) -> int | None:
    """Samples predicted to reach a share of Var f*.

    None where theory finds none or keeps no spectrum fine enough.
    """
    polynomial = read_target(target, dim)
    error = level * target_variance(polynomial, n_keys)
    kind, distribution = _theory_of(model)
    try:
        return samples_needed(
            polynomial, n_keys, error, model=kind, n_heads=heads, heads=distribution
        )
    except ValueError:
        return None


def _theory_of(model: str) -> tuple[str, GaussianHeads | None]:
    """A model as the theory names it, and its head distribution."""
    if model == "mlp":
        return "mlp", None
    return "attention", DISTRIBUTIONS[model]


def curve_rows(
    config: CurveConfig, results: Results, target: str, sizes: Sequence[int] | None = None
) -> list[Row]:
    """One row per model, finite and infinite, and n: measured, oracle, predicted."""
    rows: list[Row] = []
    for model, words in MODELS.items():
        for exact in (False, True):
            sweep = config.sweep(model, target, sizes or config.sizes, exact=exact)
            measured = sweep.curve(results)
            oracle = sweep.curve(results, "oracle")
            predicted = predicted_curve(config, model, target, exact=exact, sizes=sizes)
            heads = "∞" if exact else str(config.n_heads)
            common = {"target": target, "model": words, "heads": heads}
            rows += measured.rows("n", common, predicted, oracle)
    return rows


def predicted_series(errors: Mapping[float, float], words: str, model: str) -> Series:
    """What theory predicts for a model, error by abscissa: a dashed curve in its colour."""
    return Series(
        name=f"{words}, predicted",
        x=list(errors),
        y=list(errors.values()),
        look="dashed",
        role=model,
    )


def curve_chart(
    config: CurveConfig, results: Results, target: str, name: str, title: str, level: float
) -> Chart:
    """Error against n of all models: measured, oracle, predicted, and infinitely many heads."""
    measured = []
    predicted = []
    limits = []
    oracles = []
    for model, words in MODELS.items():
        measured.append(measured_curve(config, results, model, target).series(words, model))

        # theory may keep no spectrum fine enough for any of the sizes
        errors = predicted_curve(config, model, target)
        if errors:
            predicted.append(predicted_series(errors, words, model))

        limit = measured_curve(config, results, model, target, exact=True)
        unit = "units" if model == "mlp" else "heads"
        limits.append(limit.series(f"{words}, ∞ {unit}", model, "line"))
        oracle = measured_curve(config, results, model, target, name="oracle")
        oracles.append(oracle.series(f"{words}, oracle penalty", model, "thin"))
    return log_chart(
        name,
        title,
        "training sets n",
        "relative test error",
        [*measured, *predicted, *limits, *oracles],
        rows=curve_rows(config, results, target),
        note=(
            "Points: mean over repetitions, bars one standard error. Dashed: theory, nothing "
            "fitted to the points."
        ),
        marks={f"{level:.0%} of Var f*": level},
    )


def power(base: str, exponent: int) -> str:
    """A power as a reader writes it.

    >>> power("⟨β, xᵢ⟩", 2), power("⟨β, xᵢ⟩", 1)
    ('⟨β, xᵢ⟩^{2}', '⟨β, xᵢ⟩')
    """
    if exponent == 1:
        return base
    return f"{base}^{{{exponent}}}"
