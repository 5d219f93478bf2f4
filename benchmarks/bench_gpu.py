"""The GPU beside its baselines, every number checked in the run that gives it.

    python benchmarks/bench_gpu.py [--out out/gpu] [--only gram features ridge]
        [--size full|quick|tiny] [--device cuda]

d = N = 16, tokens on the sphere, drawn afresh from --seed. Baselines are the formulas as one would
write them in torch, in float32: eager, and through torch.compile. Times are medians of runs; errors
are relative to the same computation in float64 on the host. ``--size tiny --device cpu`` starts
everywhere, and measures nothing of interest.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import keyhole as kh

N_KEYS = DIM = 16
SIZES = {
    # sets of the Gram matrix, of features and of ridge; heads
    "full": (8192, 4000, 50_000, 1000),
    "quick": (1024, 500, 4000, 1000),
    "tiny": (32, 32, 60, 8),
}
PAPER_LAYER = {
    "heads": kh.GaussianHeads(),
    "scaling": "none",
    "query": "given",
    "activation": "relu",
    "pooling": "mean",
}
ROWS: list[dict[str, Any]] = []


def report(name: str, milliseconds: float, **figures: float) -> None:
    """Print a row, and keep it for the files."""
    ROWS.append({"name": name, "ms": milliseconds, **figures})
    rest = "  ".join(f"{key} {value:.4g}" for key, value in figures.items())
    print(f"  {name:48}{milliseconds:12.3f} ms  {rest}", flush=True)


def check(error: float, allowed: float, what: str) -> float:
    """The error, or an AssertionError where it is too large or no number."""
    if not error <= allowed:
        raise AssertionError(f"{what}: error {error:.3g}, {allowed:.0e} allowed")
    return error


def median_ms(work: Callable[[], Any], device: str, repeat: int) -> float:
    """Median wall time of a call and its wait for the device, after two to warm up."""

    def wait() -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    times = []
    for run in range(repeat + 2):
        wait()
        start = time.perf_counter()
        work()
        wait()
        if run >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def sphere(n: int, seed: int, device: str) -> kh.SetBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(n, 1 + N_KEYS, DIM, generator=generator, dtype=torch.float64)
    tokens /= tokens.norm(dim=-1, keepdim=True)
    return kh.SetBatch.from_tokens(tokens.float().to(device))


def extended(batch: kh.SetBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Query (n, d + 1) and keys (n, N, d + 1), a one appended to each."""
    keys = batch.tokens.view(len(batch), N_KEYS, DIM)
    ones = torch.ones(len(batch), N_KEYS, 1, device=keys.device)
    return torch.cat([batch.query, ones[:, 0]], dim=1), torch.cat([keys, ones], dim=2)


# --------------------------------------------------------------------------------------------------
# the formulas in torch


def broadcast_block(
    query: Any, unit: Any, weight: Any, queries: Any, units: Any, weights: Any
) -> torch.Tensor:
    """Rows of K for zero mean: unit queries (b, D) and unit keys (b·N, D) against all others."""
    b, n = len(query), len(queries)
    cosine = (unit @ units.T).view(b, N_KEYS, n, N_KEYS)
    rho = ((query @ queries.T)[:, None, :, None] * cosine).clamp(-1, 1)
    kappa = (torch.sqrt(1 - rho * rho) + (torch.pi - torch.arccos(rho)) * rho) / (2 * torch.pi)
    pairs = kappa * cosine * weight.view(b, N_KEYS, 1, 1) * weights.view(1, 1, n, N_KEYS)
    return pairs.sum(dim=(1, 3))


def broadcast_gram(
    block: Callable[..., torch.Tensor], batch: kh.SetBatch, size: int = 128
) -> torch.Tensor:
    query, keys = extended(batch)
    keys = keys.flatten(0, 1)
    query_norm, norm = query.norm(dim=-1, keepdim=True), keys.norm(dim=-1)
    weight = 0.5 * query_norm.repeat_interleave(N_KEYS, dim=0)[:, 0] * norm**2 / N_KEYS
    query, unit = query / query_norm, keys / norm[:, None]
    gram = torch.empty(len(batch), len(batch), device=query.device)
    for start in range(0, len(batch), size):
        sets, tokens = slice(start, start + size), slice(start * N_KEYS, (start + size) * N_KEYS)
        gram[sets] = block(query[sets], unit[tokens], weight[tokens], query, unit, weight)
    return gram


def einsum_features(batch: kh.SetBatch, heads: torch.Tensor) -> torch.Tensor:
    query, keys = extended(batch)
    scores = torch.einsum("nme,nke->nmk", torch.einsum("nd,mde->nme", query, heads), keys)
    features = torch.einsum("nmk,nke->nme", torch.relu(scores), keys)
    return (features / (N_KEYS * math.sqrt(len(heads)))).reshape(len(batch), -1)


# --------------------------------------------------------------------------------------------------
# measurements


def bench_gram(n: int, seed: int, device: str, repeat: int) -> None:
    print(f"exact Gram matrix, n = {n}, float32")
    batch = sphere(n, seed, device)
    part = batch.numpy().astype("float64")[: min(n, 500)]
    baselines = {
        "zero mean, torch eager broadcast": broadcast_block,
        "zero mean, torch.compile of it": torch.compile(broadcast_block, dynamic=False),
    }
    if device == "cpu":
        del baselines["zero mean, torch.compile of it"]  # needs a compiler of C++
    theirs = {
        name: median_ms(lambda b=block: broadcast_gram(b, batch), device, 3)
        for name, block in baselines.items()
    }
    for name, heads in (
        ("zero mean", kh.GaussianHeads()),
        ("around a mean", kh.GaussianHeads(mean=1.0)),
    ):
        gram = kh.attention_kernel(batch, None, heads)
        exact = kh.attention_kernel(part, None, heads)
        ours = gram[: len(part), : len(part)].cpu().numpy()
        error = check(float(np.abs(ours / exact - 1).max()), 1e-5, name)
        milliseconds = median_ms(
            lambda h=heads: kh.attention_kernel(batch, None, h), device, repeat
        )
        report(name, milliseconds, error=error)
        if name == "zero mean":
            for baseline, their_time in theirs.items():
                report(f"  {baseline}", their_time, ratio=their_time / milliseconds)


def bench_features(n: int, n_heads: int, seed: int, device: str, repeat: int) -> None:
    print(f"features, n = {n}, M = {n_heads}, float32")
    batch = sphere(n, seed, device)
    generator = torch.Generator().manual_seed(seed)
    heads = torch.randn(n_heads, DIM + 1, DIM + 1, generator=generator).to(device) / 2
    ours = kh.attention_features(batch, heads)
    exact = kh.attention_features(batch.numpy().astype("float64"), heads.double().cpu().numpy())
    error = np.abs(ours.cpu().numpy() - exact).max() / np.abs(exact).max()
    milliseconds = median_ms(lambda: kh.attention_features(batch, heads), device, repeat)
    report("ours", milliseconds, error=check(float(error), 1e-5, "features"))
    eager = median_ms(lambda: einsum_features(batch, heads), device, repeat)
    report("  torch eager einsum", eager, ratio=eager / milliseconds)


def bench_ridge(n: int, seed: int, device: str) -> None:
    print(f"exact kernel ridge with leave-one-out, n = {n}, one penalty, float32 kernel")
    sets = sphere(n, seed, "cpu").numpy()
    noise = np.random.default_rng(seed).standard_normal(n)
    y = kh.targets.Correlation(2, dim=DIM)(sets) + 0.01 * noise
    model = kh.AttentionRegressor(math.inf, alpha=1.0, device=device, dtype="float32")
    model.set_params(**PAPER_LAYER)
    few = slice(0, min(n, 1000))
    model.fit(sets[few], y[few])  # compiles, and makes handles
    host = kh.AttentionRegressor(math.inf, alpha=1.0, **PAPER_LAYER).fit(sets[few], y[few])
    error = np.abs(model.loo_predictions_ - host.loo_predictions_).max() / np.abs(y).max()
    start = time.perf_counter()
    model.fit(sets, y)
    milliseconds = 1e3 * (time.perf_counter() - start)
    figures = {"error": check(float(error), 1e-3, "leave-one-out")}
    if device.startswith("cuda"):
        figures["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    report("fit, from NumPy arrays to NumPy arrays", milliseconds, **figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["gram", "features", "ridge"])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    arguments = parser.parse_args()
    device = arguments.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("bench_gpu.py measures a CUDA device, and torch sees none here.")
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "host"
    print(f"{name}, torch {torch.__version__}, seed {arguments.seed}")
    gram_sets, feature_sets, ridge_sets, n_heads = SIZES[arguments.size]
    repeat = 1 if arguments.size == "tiny" else 15
    if "gram" in arguments.only:
        bench_gram(gram_sets, arguments.seed, device, repeat)
    if "features" in arguments.only:
        bench_features(feature_sets, n_heads, arguments.seed, device, repeat)
    if "ridge" in arguments.only:
        bench_ridge(ridge_sets, arguments.seed, device)
    arguments.out.mkdir(parents=True, exist_ok=True)
    figures = {"device": name, "torch": torch.__version__, "seed": arguments.seed, "rows": ROWS}
    path = arguments.out / "gpu.json"
    path.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
