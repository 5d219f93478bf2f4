"""How many times more samples an MLP needs than attention: predicted, and measured, on f_{1,2} without noise.

Both are kernel limits with the ridge that is best (the theory says none). The number of samples at which the mean
test error crosses a share of Var f* is read off between the sizes run, on logarithmic axes; its standard error is
that of resampled repetitions. Settings are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from keyhole.experiments.prediction import ridge_solve, variance
from keyhole.experiments.tables import Row, markdown, write_csv, write_text
from keyhole.kernels import attention_kernel, mlp_kernel
from keyhole.targets import Polynomial, TokenPower, sphere_sets
from keyhole.theory import samples_needed

KERNELS = {"attention": attention_kernel, "mlp": mlp_kernel}


@dataclass(frozen=True)
class Config:
    """What is run."""

    dim: int = 8
    n_keys: tuple[int, ...] = (4, 8)
    share: float = 0.1
    """The error at which samples are counted, as a share of Var f*."""
    factors: tuple[float, ...] = (0.75, 0.9, 1.05, 1.25)
    """Sizes run, in units of the predicted number of samples."""
    ridges: tuple[float, ...] = (0.0, 1e-6)
    repeats: tuple[tuple[str, int], ...] = (("attention", 24), ("mlp", 6))
    n_test: int = 2000
    seed: int = 0


PRESETS = {
    "quick": Config(n_keys=(4,), share=0.2, repeats=(("attention", 12), ("mlp", 4)), n_test=1000),
    "full": Config(),
}


def run(config: Config, progress: Callable[[str], None] = lambda text: None) -> list[Row]:
    """One row per N: predicted and measured samples of both models, and their ratio."""
    rows = []
    for n_keys in config.n_keys:
        target = TokenPower(2, config.dim)
        row: Row = {"d": config.dim, "N": n_keys, "share": config.share}
        for model, repeats in config.repeats:
            progress(f"samples needed by {model}, N = {n_keys}")
            predicted = samples_needed(target, n_keys, config.share * variance(target, n_keys), model)
            sizes, errors = _errors(config, target, n_keys, model, predicted, repeats)
            measured, uncertainty = crossing(sizes, errors, config.share, config.seed)
            row |= {f"{model}_predicted": predicted, f"{model}_measured": measured}
            row |= {f"{model}_standard_error": uncertainty * measured}
        ratio = row["mlp_measured"] / row["attention_measured"]
        relative = math.hypot(
            *(row[f"{model}_standard_error"] / row[f"{model}_measured"] for model in ("attention", "mlp"))
        )
        row |= {"ratio_predicted": row["mlp_predicted"] / row["attention_predicted"]}
        rows.append({**row, "ratio_measured": ratio, "ratio_standard_error": ratio * relative})
    return rows


def _errors(
    config: Config, target: Polynomial, n_keys: int, model: str, predicted: int, repeats: int
) -> tuple[Float[np.ndarray, " sizes"], Float[np.ndarray, "repeats ridges sizes"]]:
    """Sizes, and test errors over Var f* for every repetition, ridge and size."""
    sizes = [max(2, round(factor * predicted)) for factor in config.factors]
    errors = np.empty((repeats, len(config.ridges), len(sizes)))
    kernel = KERNELS[model]
    for repeat in range(repeats):
        words = [config.seed, n_keys, repeat, len(model)]
        train_seed, test_seed = (int(s) for s in np.random.SeedSequence(words).generate_state(2))
        train = sphere_sets(max(sizes), n_keys, config.dim, train_seed)
        test = sphere_sets(config.n_test, n_keys, config.dim, test_seed)
        gram, cross = kernel(train), kernel(test, train)
        y, truth = target(train)[:, None], target(test)[:, None]
        for i, n in enumerate(sizes):
            for j, ridge in enumerate(config.ridges):
                fitted = cross[:, :n] @ ridge_solve(gram[:n, :n], n * ridge, y[:n])
                errors[repeat, j, i] = np.mean((fitted - truth) ** 2) / variance(target, n_keys)
    return np.array(sizes, dtype=np.float64), errors


def crossing(
    sizes: Float[np.ndarray, " sizes"],
    errors: Float[np.ndarray, "repeats ridges sizes"],
    share: float,
    seed: int,
) -> tuple[float, float]:
    """Where the mean error, best ridge, falls to ``share``; and the relative standard error of that, resampled.

    Examples
    --------
    >>> import numpy as np
    >>> sizes = np.array([100.0, 200.0, 400.0])
    >>> errors = np.tile(10 / sizes, (3, 1, 1))
    >>> n, relative = crossing(sizes, errors, share=0.04, seed=0)
    >>> round(n, 6), round(relative, 6)
    (250.0, 0.0)
    """
    repeats, rng = len(errors), np.random.default_rng(seed)
    draws = [errors[rng.integers(repeats, size=repeats)] for _ in range(200)]
    resampled = np.array([_crossing(sizes, draw, share) for draw in draws])
    spread = float(np.std(np.log(resampled)))
    # a resampled mean varies by (r−1)/r of the true variance
    return _crossing(sizes, errors, share), spread * math.sqrt(repeats / max(repeats - 1, 1))


def _crossing(sizes: np.ndarray, errors: np.ndarray, share: float) -> float:
    x, y = np.log(sizes), np.log(errors.mean(axis=0).min(axis=0))
    below = int(np.argmax(y <= math.log(share))) if (y <= math.log(share)).any() else len(x) - 1
    i = max(below, 1)  # beyond the sizes run, the nearest segment goes on
    slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
    return math.exp(x[i] + (math.log(share) - y[i]) / slope)


def readable(rows: Sequence[Row]) -> list[Row]:
    """Rows as text for a table."""
    return [
        {
            "N": str(row["N"]),
            **{
                f"{model}, {kind}": f"{row[f'{model}_predicted']}"
                if kind == "predicted"
                else f"{row[f'{model}_measured']:.0f} ± {row[f'{model}_standard_error']:.0f}"
                for model in ("attention", "mlp")
                for kind in ("predicted", "measured")
            },
            "ratio, predicted": f"{row['ratio_predicted']:.2f}",
            "ratio, measured": f"{row['ratio_measured']:.2f} ± {row['ratio_standard_error']:.2f}",
        }
        for row in rows
    ]


def write_tables(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write the rows as CSV and as a Markdown table."""
    text = markdown(readable(rows)) + "\n"
    return [write_csv(rows, folder / "sample_ratio.csv"), write_text(text, folder / "sample_ratio.md")]
