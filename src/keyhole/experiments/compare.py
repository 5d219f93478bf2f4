"""Attention, biased attention and the MLP baseline, finite and infinite, on one target of each family.

Settings are ours. Each model sees the same sets; penalties are chosen by leave-one-out on the training sets alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.experiments.tables import write_csv
from keyhole.features import attention_features, mlp_features
from keyhole.heads import GaussianHeads, sample_mlp_weights
from keyhole.kernels import attention_kernel, mlp_kernel
from keyhole.plotting import mean_and_error, plot_learning_curves
from keyhole.sets import SetBatch
from keyhole.solvers import ridge_gram_path
from keyhole.targets import Correlation, Polynomial, QueryPower, RotatedCorrelation, TokenPower, sphere_sets

Row = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes of the comparison."""

    dim: int = 16
    n_keys: int = 16
    n_heads: int = 200
    sizes: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    repeats: int = 3
    n_test: int = 1000
    seed: int = 0

    def describe(self) -> str:
        """Return the settings in a line."""
        width = self.n_heads * (self.dim + 1)
        return f"d = {self.dim}, N = {self.n_keys}, M = {self.n_heads} heads, MLP width M(d+1) = {width}"


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """Return five training sizes, each twice the one before, that end at ``largest``.

    >>> sizes_up_to(1024)
    (64, 128, 256, 512, 1024)
    """
    return tuple(sorted({max(2, largest >> k) for k in range(5)}))


def family_targets(dim: int) -> dict[str, Polynomial]:
    """One target of each family, by the name the figure gives it.

    ⟨β,x₀⟩², the mean of ⟨β,xᵢ⟩², the mean of ⟨x₀,xᵢ⟩⟨β,xᵢ⟩, and the mean of ⟨x₀,Sxᵢ⟩³⟨β,xᵢ⟩ with S half-way
    between the identity and a rotation.
    """
    return {
        "query": QueryPower(2, dim),
        "tokens": TokenPower(2, dim),
        "correlation": Correlation(1, dim),
        "half-rotated": RotatedCorrelation(0.5, dim, seed=0),
    }


def run(config: Config, progress: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Fit everything; return one row per model, target, size and repetition."""
    targets = family_targets(config.dim)
    rows: list[Row] = []
    for repeat in range(config.repeats):
        draw = 2 * (config.seed * config.repeats + repeat)
        train = sphere_sets(config.sizes[-1], config.n_keys, config.dim, seed=draw)
        test = sphere_sets(config.n_test, config.n_keys, config.dim, seed=draw + 1)
        y, y_test = (np.column_stack([f(sets) for f in targets.values()]) for sets in (train, test))
        for model, exact, grams in _models(config):
            progress(f"repetition {repeat + 1} of {config.repeats}: {model}{', infinite' if exact else ''}")
            gram, cross = grams(train, test, draw)
            for n in config.sizes:
                errors = _relative_errors(gram[:n, :n], cross[:, :n], y[:n], y_test)
                for name, error in zip(targets, errors, strict=True):
                    cell = {"target": name, "model": model, "exact": exact, "n": n, "repeat": repeat}
                    rows.append({**cell, "error": error})
    return rows


def _relative_errors(gram: np.ndarray, cross: np.ndarray, y: np.ndarray, y_test: np.ndarray) -> list[float]:
    """Mean squared test error of ridge over the variance of the target, each with its own leave-one-out penalty.

    One factorisation serves all targets.
    """
    path = ridge_gram_path(gram, y)
    errors = []
    for t in range(y.shape[1]):
        best = path.solution(path.best_for(t))
        prediction = cross @ best.coef[:, t] + best.intercept[t]
        errors.append(float(np.mean((prediction - y_test[:, t]) ** 2) / np.var(y_test[:, t])))
    return errors


Grams = Callable[[SetBatch, SetBatch, int], tuple[np.ndarray, np.ndarray]]


def _models(config: Config) -> list[tuple[str, bool, Grams]]:
    def finite(features: Callable[[SetBatch, int], np.ndarray]) -> Grams:
        def grams(train: SetBatch, test: SetBatch, seed: int) -> tuple[np.ndarray, np.ndarray]:
            design = features(train, seed)
            return design @ design.T, features(test, seed) @ design.T

        return grams

    def heads_of(law: GaussianHeads) -> Grams:
        return finite(lambda sets, seed: attention_features(sets, law.sample(config.n_heads, config.dim, seed)))

    def kernel_of(law: GaussianHeads) -> Grams:
        return lambda train, test, seed: (attention_kernel(train, law=law), attention_kernel(test, train, law=law))

    width = config.n_heads * (config.dim + 1)
    mlp = finite(lambda sets, seed: mlp_features(sets, sample_mlp_weights(width, config.n_keys, config.dim, seed)))
    zero, biased = GaussianHeads(), GaussianHeads(mean=1.0)
    return [
        ("attention", False, heads_of(zero)),
        ("attention", True, kernel_of(zero)),
        ("biased attention", False, heads_of(biased)),
        ("biased attention", True, kernel_of(biased)),
        ("MLP", False, mlp),
        ("MLP", True, lambda train, test, seed: (mlp_kernel(train), mlp_kernel(test, train))),
    ]


def summarise(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, str]]:
    """Mean ± standard error at the largest n: {(model, heads): {target: text}}."""
    largest = max(row["n"] for row in rows)
    summary: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        key = row["model"], "∞" if row["exact"] else "finite"
        cells = summary.setdefault(key, {})
        if row["target"] not in cells:
            same = [r for r in rows if r["n"] == largest and all(r[k] == row[k] for k in ("model", "exact", "target"))]
            _, mean, error = mean_and_error(same, "n", "error")
            cells[row["target"]] = f"{mean[0]:.3f}±{error[0]:.3f}"
    return summary


def write_rows(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the rows behind the figure as CSV, whole or not at all."""
    return [write_csv(rows, folder / "compare.csv")]


def plot(rows: Sequence[Row], config: Config, folder: Path) -> list[Path]:
    """Draw the figure."""
    title = f"One target of each family: {config.describe()}"
    return plot_learning_curves(rows, folder / "compare", title=title)
