"""Ridge and the norm ball on the same target and the same heads, with clean labels and with some wild ones.

Settings are ours. Ridge chooses its penalty by leave-one-out, the norm ball its radii by cross-validation, both on the
training sets alone; test errors are against the target without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.estimators import AttentionRegressor, NormBallRegressor
from keyhole.experiments.tables import write_csv
from keyhole.plotting import plot_learning_curves
from keyhole.targets import Correlation, sphere_sets

Row = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """Sizes of the comparison. Labels have unit variance before noise."""

    dim: int = 4
    n_keys: int = 6
    n_heads: int = 100
    sizes: tuple[int, ...] = (64, 128, 256, 512)
    repeats: int = 3
    n_test: int = 1000
    noise: float = 0.3
    outliers: float = 0.05
    outlier_size: float = 10.0
    seed: int = 0

    def describe(self) -> str:
        """Return the settings in a line."""
        return f"⟨x₀,xᵢ⟩⟨β,xᵢ⟩, d = {self.dim}, N = {self.n_keys}, M = {self.n_heads} heads, noise {self.noise:g}"


def labels_of(config: Config) -> dict[str, float]:
    """The share of wild labels in each panel, by its title."""
    return {"clean labels": 0.0, f"{config.outliers:.0%} of labels off by ±{config.outlier_size:g}": config.outliers}


def run(config: Config, progress: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Fit everything; return one row per panel, model, size and repetition."""
    target = Correlation(1, config.dim)
    rows: list[Row] = []
    for repeat in range(config.repeats):
        draw = 2 * (config.seed * config.repeats + repeat)
        train = sphere_sets(config.sizes[-1], config.n_keys, config.dim, seed=draw)
        test = sphere_sets(config.n_test, config.n_keys, config.dim, seed=draw + 1)
        scale = target(test).std()
        truth = target(test) / scale
        for panel, share in labels_of(config).items():
            y = target(train) / scale + _disturbance(config, share, draw)
            for n in config.sizes:
                for name, model in _models(config, draw).items():
                    progress(f"repetition {repeat + 1} of {config.repeats}: {panel}, {name}, n = {n}")
                    model.fit(train[:n], y[:n])
                    error = float(np.mean((model.predict(test) - truth) ** 2) / truth.var())
                    heads = len(getattr(model, "active_heads_", range(config.n_heads)))
                    cell = {"target": panel, "model": name, "exact": False, "n": n, "repeat": repeat}
                    rows.append({**cell, "error": error, "heads": heads})
    return rows


def _disturbance(config: Config, share: float, seed: int) -> np.ndarray:
    """Gaussian noise on every label, and a jump of either sign on a share of them."""
    rng = np.random.default_rng(seed)
    n = config.sizes[-1]
    noise = config.noise * rng.standard_normal(n)
    jumps = config.outlier_size * rng.choice([-1.0, 1.0], size=n)
    return np.asarray(noise + np.where(rng.random(n) < share, jumps, 0.0))


def _models(config: Config, seed: int) -> dict[str, Any]:
    options: dict[str, Any] = {"random_state": seed}
    return {
        "ridge": AttentionRegressor(config.n_heads, **options),
        "norm ball, squared": NormBallRegressor(config.n_heads, loss="squared", tol=0.01, **options),
        "norm ball, Huber": NormBallRegressor(config.n_heads, loss="huber", tol=0.01, **options),
    }


def write_rows(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the rows behind the figure as CSV, whole or not at all."""
    return [write_csv(rows, folder / "norm_ball.csv")]


def plot(rows: Sequence[Row], config: Config, folder: Path) -> list[Path]:
    """Draw the figure."""
    return plot_learning_curves(rows, folder / "norm_ball", title=f"Ridge or norm ball: {config.describe()}")
