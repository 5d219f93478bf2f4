"""Biased heads, predicted before training and measured: test errors of ridge over a grid of
settings.

    PYTHONPATH=src python benchmarks/biased_grid.py --out out/biased_grid --device cuda
        --seconds 420

d, N, the mean c, the power q of f_{2,q}, heads M (and infinitely many), penalty and n: every
combination. What the theory describes is fitted: ridge without intercept, α = nλ, no noise, query
and keys on the sphere. A draw has 4096 training sets; smaller n are disjoint parts of it, so that
they are repeated within a draw; finite heads are drawn three times on it. All settings are drawn
once, then again as long as there is time. Everything is float64. Predictions are made beside on
other cores. Writes rows.csv (predicted, measured, its standard error) and prints how far off they
are.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # for the workers; on this side torch does the work

import numpy as np
import torch

import keyhole as kh
from keyhole.theory import learning_curve
from keyhole.theory.targets import Correlation, sphere_sets

FULL = {
    "dims": (4, 6, 8, 16),
    "keys": (4, 8, 16),
    "means": (0.5, 1.0, 3.0),
    "sizes": (64, 256, 1024, 4096),
}
QUICK = {"dims": (4, 8), "keys": (4,), "means": (1.0,), "sizes": (64, 256)}
POWERS, HEADS, RIDGES = (0, 1, 2, 3), (60, 200, math.inf), (1e-6, 1e-5, 1e-3)
N_TEST, MOST_PARTS, HEAD_DRAWS = 2048, 32, 3

Key = tuple[int, int, float, int, float, float, int]
"""(d, N, c, q, M, λ, n)."""


def predictions(dim: int, mean: float, grid: dict[str, Any]) -> dict[Key, float]:
    """All predictions of one (d, c), NaN where the theory refuses: its blocks are made once."""
    told = {}
    for n_keys, q, m, ridge, n in product(grid["keys"], POWERS, HEADS, RIDGES, grid["sizes"]):
        try:
            distribution = kh.GaussianHeads(mean=mean)
            error = float(
                learning_curve(Correlation(q, dim), n, n_keys, ridge, n_heads=m, heads=distribution)
            )
        except ValueError:
            error = math.nan
        told[dim, n_keys, mean, q, m, ridge, n] = error
    return told


def measured(
    dim: int, n_keys: int, mean: float, draw: int, sizes: tuple[int, ...], device: str
) -> Iterator[tuple[Key, list[float]]]:
    """Test errors of one draw of sets, and of heads: a list per setting, one entry for every
    disjoint part.
    """
    distribution, most = kh.GaussianHeads(mean=mean), max(sizes)
    train, test, head_seed = (
        int(s) for s in np.random.SeedSequence([dim, n_keys, draw]).generate_state(3)
    )
    sets = [sphere_sets(most, n_keys, dim, train), sphere_sets(N_TEST, n_keys, dim, test)]
    targets = [Correlation(q, dim) for q in POWERS]
    y, truth = (
        torch.as_tensor(np.stack([t(s) for t in targets], axis=1), device=device) for s in sets
    )
    batches = sets if device == "cpu" else [s.to(device) for s in sets]
    for m, again in product(HEADS, range(HEAD_DRAWS)):
        if math.isinf(m) and again:
            continue
        if math.isinf(m):
            gram = kh.attention_kernel(batches[0], heads=distribution)
            cross = kh.attention_kernel(batches[1], batches[0], heads=distribution)
        else:
            heads = distribution.sample(int(m), dim, head_seed + again)
            phi, of_test = (kh.attention_features(batch, heads) for batch in batches)
            gram, cross = phi @ phi.T, of_test @ phi.T
        gram, cross = (
            torch.as_tensor(matrix, dtype=torch.float64, device=device) for matrix in (gram, cross)
        )
        for n, ridge in product(sizes, RIDGES):
            errors = [
                fitted_errors(gram[part, part], cross[:, part], y[part], truth, ridge)
                for part in (slice(i * n, (i + 1) * n) for i in range(min(most // n, MOST_PARTS)))
            ]
            for q, column in zip(POWERS, zip(*errors, strict=True), strict=True):
                yield (dim, n_keys, mean, q, m, ridge, n), list(column)


def fitted_errors(gram: Any, cross: Any, y: Any, truth: Any, ridge: float) -> list[float]:
    """Mean squared test errors, one per target."""
    n = len(y)
    factor = torch.linalg.cholesky(
        gram + n * ridge * torch.eye(n, dtype=gram.dtype, device=gram.device)
    )
    fitted = cross @ torch.cholesky_solve(y, factor)
    return [float(e) for e in (fitted - truth).square().mean(dim=0).tolist()]


def rows_of(found: dict[Key, list[list[float]]], told: dict[Key, float]) -> list[dict[str, Any]]:
    """One row per setting.

    The standard error is that of the means of the draws, or of the parts of a single one.
    """
    rows = []
    for key, draws in found.items():
        means = [float(np.mean(draw)) for draw in draws]
        spread = means if len(means) > 1 else draws[0]
        error = (
            float(np.std(spread, ddof=1)) / math.sqrt(len(spread)) if len(spread) > 1 else math.nan
        )
        dim, n_keys, mean, q, m, ridge, n = key
        row = {
            "d": dim,
            "N": n_keys,
            "c": mean,
            "q": q,
            "M": m,
            "ridge": ridge,
            "n": n,
            "k/n": m * (dim + 1) / n,
        }
        row |= {"predicted": told[key], "measured": float(np.mean(means)), "standard_error": error}
        rows.append(row | {"draws": len(draws), "ratio": told[key] / float(np.mean(means))})
    return rows


def summary(name: str, rows: list[dict[str, Any]]) -> None:
    """A line: how many, how many refused, and quantiles of |predicted/measured − 1|."""
    known = [row for row in rows if math.isfinite(row["ratio"])]
    if not known:
        return
    off = np.abs([row["ratio"] - 1 for row in known])
    noise = np.nanmedian([row["standard_error"] / row["measured"] for row in known])
    low, high = np.quantile([row["ratio"] for row in known], (0.05, 0.95))
    print(
        f"{name:34} {len(rows):5} cells, {len(rows) - len(known):4} refused; median "
        f"{np.median(off):6.1%}, 90 % {np.quantile(off, 0.9):6.1%}, worst {off.max():6.1%}; ratio "
        f"5 … 95 % {low:.2f} … {high:.2f}; s.e. {noise:.1%}"
    )


def report(rows: list[dict[str, Any]]) -> None:
    """Infinitely many heads by dimension, finite heads apart, and where these are off."""
    for heads, words in (((math.inf,), "∞ heads"), (HEADS[:-1], "finite heads")):
        own = [row for row in rows if row["M"] in heads]
        summary(words, own)
        summary(f"  {words}, d ≥ 8", [row for row in own if row["d"] >= 8])
        summary(f"  {words}, d < 8", [row for row in own if row["d"] < 8])
        for axis in ("d", "N", "c", "q", "M", "ridge", "n"):
            for value in dict.fromkeys(row[axis] for row in own):
                summary(f"    {axis} = {value:g}", [row for row in own if row[axis] == value])
        if heads != (math.inf,):
            for low, high in ((0, 0.5), (0.5, 2), (2, 8), (8, math.inf)):
                for ridge in RIDGES:
                    near = [
                        row for row in own if low <= row["k/n"] < high and row["ridge"] == ridge
                    ]
                    summary(f"    k/n in [{low}, {high}), λ = {ridge:g}", near)
    worst = sorted(
        (r for r in rows if math.isfinite(r["ratio"])), key=lambda r: -abs(math.log(r["ratio"]))
    )[:15]
    for row in worst:
        print("  worst:", {k: round(v, 6) if isinstance(v, float) else v for k, v in row.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/biased_grid"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="no setting is begun later than this"
    )
    parser.add_argument("--jobs", type=int, default=12, help="processes for predictions")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    grid, start = QUICK if options.quick else FULL, time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    settings = sorted(product(grid["dims"], grid["keys"], grid["means"]), key=lambda s: s[1])
    found: dict[Key, list[list[float]]] = defaultdict(list)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        # low dimensions and large means take longest
        pairs = sorted(product(grid["dims"], grid["means"]), key=lambda pair: (pair[0], -pair[1]))
        asked = [pool.submit(predictions, dim, mean, grid) for dim, mean in pairs]
        for draw, setting in product(range(100), settings):
            if time.monotonic() - start > options.seconds:
                print(f"stopped at draw {draw + 1} before d, N, c = {setting}", flush=True)
                break
            for key, errors in measured(*setting, draw, grid["sizes"], options.device):
                found[key].append(errors)
            if setting == settings[-1]:
                print(f"draw {draw + 1} done after {time.monotonic() - start:.0f} s", flush=True)
        told = {key: error for future in asked for key, error in future.result().items()}
    print(f"{time.monotonic() - start:.0f} s in all", flush=True)
    rows = rows_of(found, told)
    with (options.out / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    report(rows)


if __name__ == "__main__":
    main()
