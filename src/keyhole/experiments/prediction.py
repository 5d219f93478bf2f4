"""Predicted against measured test error: ridge regression fitted over a grid, beside the learning curve theory.

What the theory describes is fitted, and nothing else: ridge without intercept on the raw kernel or features (the
constant is an eigenfunction like any other), α = nλ, on the sphere law. Settings are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float
from scipy.linalg import cho_factor, cho_solve

from keyhole.experiments.tables import Row, markdown, write_csv, write_text
from keyhole.features import attention_features
from keyhole.heads import GaussianHeads
from keyhole.kernels import attention_kernel
from keyhole.plotting import plot_prediction
from keyhole.sets import SetBatch
from keyhole.targets import Correlation, Polynomial, TokenPower, sphere_sets
from keyhole.theory import learning_curve, pair_powers

TOLERANCE = {4: 0.20, 8: 0.12, 16: 0.12}
"""How far a prediction may be off, by dimension: the theory is asymptotic in the number of eigenfunctions."""


@dataclass(frozen=True)
class Config:
    """The grid: every combination of its fields, but for sets too large (``most_keys``)."""

    dims: tuple[int, ...] = (4, 8, 16)
    n_keys: tuple[int, ...] = (4, 16)
    sizes: tuple[tuple[int, int], ...] = ((100, 32), (400, 16), (1600, 6), (4000, 3))
    """(n, repetitions). A repetition serves all sizes that have it: smaller ones are its first rows."""
    heads: tuple[float, ...] = (20, 60, 200, math.inf)
    ridges: tuple[float, ...] = (1e-5, 1e-3)
    noise_shares: tuple[float, ...] = (0.0, 0.25)
    """Noise variance as a share of Var f*."""
    heads_drawn: int = 80
    """Few heads are drawn more than once in a repetition, until this many have been: their luck is averaged out."""
    n_test: int = 1000
    most_keys: int = 25_600
    """Cells with more than this many training keys nN are left out: the exact kernel costs (nN)²."""
    seed: int = 0

    def draws(self, heads: float) -> int:
        """How often heads are drawn in one repetition."""
        return max(1, round(self.heads_drawn / heads))

    def sizes_for(self, n_keys: int) -> list[tuple[int, int]]:
        """The (n, repetitions) that are run with sets of this many keys."""
        return [(n, repeats) for n, repeats in self.sizes if n * n_keys <= self.most_keys]


PRESETS = {
    "quick": Config(dims=(4, 8), n_keys=(4,), sizes=((100, 8), (400, 4)), heads=(20, math.inf)),
    "full": Config(),
}

Cell = tuple[int, int, str, int, float, float, float]
"""(d, N, target, n, heads, ridge, noise share)."""


def grid_targets(dim: int) -> dict[str, Polynomial]:
    """The targets of the grid, by the names of the specification."""
    return {"f_{1,2}": TokenPower(2, dim), "f_{2,1}": Correlation(1, dim), "f_{2,3}": Correlation(3, dim)}


def variance(target: Polynomial, n_keys: int) -> float:
    """Var f* under the sphere law.

    Examples
    --------
    >>> round(variance(TokenPower(1, dim=8), n_keys=4), 6)    # 1/(dN)
    0.03125
    """
    powers = pair_powers(target)
    return float(powers[1:, 0].sum() + powers[:, 1:].sum() / n_keys)


def run(config: Config, progress: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Fit the grid; return one row per cell, with the mean of its repetitions and the standard error of that."""
    measured: dict[Cell, list[float]] = {}
    for dim in config.dims:
        for n_keys in config.n_keys:
            repeats = max((count for _, count in config.sizes_for(n_keys)), default=0)
            for repeat in range(repeats):
                progress(f"d = {dim}, N = {n_keys}: repetition {repeat + 1} of {repeats}")
                for cell, error in _repetition(config, dim, n_keys, repeat):
                    measured.setdefault(cell, []).append(error)
    return [_row(cell, np.array(errors)) for cell, errors in measured.items()]


def _repetition(config: Config, dim: int, n_keys: int, repeat: int) -> Iterator[tuple[Cell, float]]:
    """All cells of one (d, N) on one draw of sets, heads and noise."""
    sizes = [n for n, count in config.sizes_for(n_keys) if repeat < count]
    seeds = np.random.SeedSequence([config.seed, dim, n_keys, repeat]).generate_state(4)
    train_seed, test_seed, head_seed, noise_seed = (int(s) for s in seeds)
    train = sphere_sets(max(sizes), n_keys, dim, train_seed)
    test = sphere_sets(config.n_test, n_keys, dim, test_seed)
    targets = grid_targets(dim)
    noise = np.random.default_rng(noise_seed).standard_normal(len(train))
    labels = [(name, share) for name in targets for share in config.noise_shares]
    variances = np.array([share * variance(targets[name], n_keys) for name, share in labels])
    clean, truth = (np.stack([targets[name](sets) for name, _ in labels], axis=1) for sets in (train, test))
    y = clean + np.sqrt(variances) * noise[:, None]
    for heads in config.heads:
        draws = config.draws(heads)
        errors: dict[tuple[int, float], np.ndarray] = {}
        for draw in range(draws):
            for n, ridge, fitted in _fits(train, test, heads, head_seed + draw, sizes, config.ridges, y):
                error = np.mean((fitted - truth) ** 2, axis=0) + variances
                errors[n, ridge] = errors.get((n, ridge), 0.0) + error / draws
        for (n, ridge), means in errors.items():
            for (name, share), mean in zip(labels, means, strict=True):
                yield (dim, n_keys, name, n, heads, ridge, share), float(mean)


def _fits(
    train: SetBatch,
    test: SetBatch,
    heads: float,
    seed: int,
    sizes: Sequence[int],
    ridges: Sequence[float],
    y: Float[np.ndarray, "n t"],
) -> Iterator[tuple[int, float, Float[np.ndarray, "test t"]]]:
    """Test predictions for every n and ridge: one Gram matrix for all, one factorisation for all outputs."""
    if math.isinf(heads):
        gram, cross = attention_kernel(train), attention_kernel(test, train)
    else:
        law = GaussianHeads().sample(int(heads), train.dim, seed)
        design, of_test = attention_features(train, law), attention_features(test, law)
    for n in sizes:
        if math.isinf(heads):
            matrix, right, left = gram[:n, :n], y[:n], cross[:, :n]
        elif design.shape[1] < n:
            matrix, right, left = design[:n].T @ design[:n], design[:n].T @ y[:n], of_test
        else:
            matrix, right, left = design[:n] @ design[:n].T, y[:n], of_test @ design[:n].T
        for ridge in ridges:
            yield n, ridge, left @ ridge_solve(matrix, n * ridge, right)


def ridge_solve(
    matrix: Float[np.ndarray, "p p"], alpha: float, right: Float[np.ndarray, "p t"]
) -> Float[np.ndarray, "p t"]:
    """(A + αI)⁻¹ B for a symmetric A."""
    shifted = matrix.copy()
    shifted[np.diag_indices_from(shifted)] += alpha
    return np.asarray(cho_solve(cho_factor(shifted, overwrite_a=True, check_finite=False), right))


def _row(cell: Cell, errors: Float[np.ndarray, " repeats"]) -> Row:
    dim, n_keys, name, n, heads, ridge, share = cell
    target = grid_targets(dim)[name]
    spread = variance(target, n_keys)
    noise = share * spread
    predicted = float(learning_curve(target, n, n_keys, ridge, noise, heads))
    mean = float(errors.mean())
    error = float(errors.std(ddof=1) / math.sqrt(len(errors))) if len(errors) > 1 else math.nan
    return {
        "d": dim,
        "N": n_keys,
        "target": name,
        "n": n,
        "M": "inf" if math.isinf(heads) else int(heads),
        "ridge": ridge,
        "noise": noise,
        "predicted": predicted,
        "measured": mean,
        "standard_error": error,
        "repeats": len(errors),
        "deviation": predicted / mean - 1,
        "excess_deviation": (predicted - noise) / (mean - noise) - 1,
        "relative_error": mean / spread,
    }


def within(rows: Sequence[Row]) -> float:
    """Share of the cells whose deviation is within the tolerance of their dimension."""
    return float(np.mean([abs(row["deviation"]) <= TOLERANCE[row["d"]] for row in rows]))


def outliers(rows: Sequence[Row]) -> list[Row]:
    """Cells beyond the tolerance of their dimension, worst first."""
    beyond = [row for row in rows if abs(row["deviation"]) > TOLERANCE[row["d"]]]
    return sorted(beyond, key=lambda row: -abs(row["deviation"]))


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Deviations over the whole grid, then by each of its axes; every entry is text for a table.

    Columns: the median of |predicted/measured − 1|, what 90 % of the cells stay below, the worst, the share within
    the tolerance of their dimension, the median with the noise floor taken off both, and the median standard error
    of the measured mean.
    """
    groups: list[tuple[str, list[Row]]] = [("all cells", list(rows))]
    groups.append(("d ≥ 8", [row for row in rows if row["d"] >= 8]))
    for axis in ("d", "N", "target", "n", "M", "ridge"):
        for value in dict.fromkeys(row[axis] for row in rows):
            groups.append((f"{axis} = {value}", [row for row in rows if row[axis] == value]))
    groups.append(("noise", [row for row in rows if row["noise"] > 0]))
    groups.append(("no noise", [row for row in rows if row["noise"] == 0]))
    return [_summary(name, group) for name, group in groups if group]


def _summary(name: str, rows: Sequence[Row]) -> Row:
    off = np.abs([row["deviation"] for row in rows])
    excess = np.abs([row["excess_deviation"] for row in rows])
    return {
        "cells": name,
        "number": str(len(rows)),
        "median": _percent(np.median(off)),
        "90 %": _percent(np.quantile(off, 0.9)),
        "worst": _percent(off.max()),
        "within": _percent(within(rows)),
        "no floor": _percent(np.median(excess)),
        "s.e.": _percent(np.median([r["standard_error"] / r["measured"] for r in rows])),
    }


def _percent(value: float) -> str:
    return f"{100 * float(value):.1f} %"


def readable(rows: Sequence[Row]) -> list[Row]:
    """Cells as text for a table."""
    return [
        {
            **{key: str(row[key]) for key in ("d", "N", "target", "n", "M")},
            "ridge": f"{row['ridge']:g}",
            "noise": f"{row['noise']:.2g}",
            "predicted": f"{row['predicted']:.3g}",
            "measured": f"{row['measured']:.3g} ± {row['standard_error']:.1g}",
            "deviation": f"{100 * row['deviation']:+.0f} %",
        }
        for row in rows
    ]


def write_tables(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write every cell as CSV, and the summary and the outliers as Markdown."""
    text = markdown(summarise(rows)) + "\n"
    beyond = outliers(rows)
    if beyond:
        text += "\n" + markdown(readable(beyond)) + "\n"
    return [write_csv(rows, folder / "prediction.csv"), write_text(text, folder / "prediction.md")]


def plot(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw predicted against measured, a panel per target."""
    return plot_prediction(rows, folder / "prediction", TOLERANCE)
