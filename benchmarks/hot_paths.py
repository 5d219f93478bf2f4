"""Every hot path of a fit beside its baselines, in one run; `make bench`.

    python benchmarks/hot_paths.py [--size paper|small|tiny] [--only gram features fit ball]

Sets have N = 16 keys in d = 16 dimensions, on the sphere. Baselines are the formulas as a reader of
the paper would write them in NumPy and torch, scikit-learn on features that are ready, and CVXPY.
Ours and baselines take turns and each keeps its best time, so that a busy moment hits all alike.
Every baseline's numbers are compared with ours in the run. Public functions alone are timed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import numpy as np
from harness import best_seconds, interleaved_seconds, peak_mib
from scipy.special import ndtr, owens_t
from sklearn.linear_model import Ridge, RidgeCV

import keyhole as kh

DIM = N_KEYS = 16
WIDTH = DIM + 1
ALPHAS = np.geomspace(1e-4, 1e3, 20)
PAPER_LAYER = {
    "heads": kh.GaussianHeads(),
    "scaling": "none",
    "query": "given",
    "activation": "relu",
    "pooling": "mean",
    "random_state": 0,
}


@dataclass(frozen=True)
class Size:
    """How many sets and heads each path gets, and how often it runs."""

    gram_sets: int
    fit_sets: int
    n_heads: int
    ball_sets: int
    ball_heads: int
    repeat: int


SIZES = {
    "paper": Size(1000, 4000, 1000, 2000, 500, repeat=3),
    "small": Size(100, 400, 200, 200, 100, repeat=5),
    "tiny": Size(20, 40, 10, 40, 10, repeat=1),
}


def sphere_tokens(n: int) -> np.ndarray:
    """Query and keys of each set, (n, 1 + N, d)."""
    tokens = np.random.default_rng(0).standard_normal((n, 1 + N_KEYS, DIM))
    return tokens / np.linalg.norm(tokens, axis=-1, keepdims=True)


def extended(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Query (n, d + 1) and keys (n, N, d + 1), a one appended to each."""
    ones = np.ones((*tokens.shape[:2], 1), tokens.dtype)
    with_one = np.concatenate([tokens, ones], axis=-1)
    return with_one[:, 0], with_one[:, 1:]


def difference(theirs: np.ndarray, ours: np.ndarray, allowed: float) -> str:
    """How far two results are apart, as a share of the largest number; an error if too far."""
    apart = float(np.abs(theirs - ours).max() / np.abs(ours).max())
    if apart > allowed:
        raise AssertionError(f"the numbers differ by {apart:.1e}, {allowed:.0e} allowed")
    return f"agrees to {apart:.0e}"


# --------------------------------------------------------------------------------------------------
# exact Gram matrix


def numpy_gram(tokens: np.ndarray, xp: Any = np, block: int = 8) -> Any:
    """K for zero mean by broadcasting, a few rows at a time; ``xp`` is numpy or torch."""
    query, keys = extended(tokens)
    if xp is not np:
        query, keys = xp.from_numpy(query), xp.from_numpy(keys)
    n = len(query)
    query_norm = xp.sqrt((query**2).sum(-1))
    key_norm = xp.sqrt((keys**2).sum(-1))
    flat, flat_norm = keys.reshape(n * N_KEYS, -1), key_norm.reshape(-1)
    each_key = xp.arange(n * N_KEYS) // N_KEYS
    gram = xp.empty((n, n), dtype=query.dtype)
    for start in range(0, n, block):
        rows = slice(start, start + block)
        inner = keys[rows] @ flat.T
        cosine = inner / (key_norm[rows][:, :, None] * flat_norm)
        query_cosine = (query[rows] @ query.T) / (query_norm[rows][:, None] * query_norm)
        rho = xp.clip(query_cosine[:, each_key][:, None, :] * cosine, -1, 1)
        kappa = (xp.sqrt(1 - rho**2) + (math.pi - xp.arccos(rho)) * rho) / (2 * math.pi)
        std = 0.25 * query_norm[rows][:, None, None] * key_norm[rows][:, :, None]
        moments = std * query_norm[each_key] * flat_norm * kappa
        gram[rows] = (moments * inner).reshape(-1, N_KEYS, n, N_KEYS).mean((1, 3))
    return gram


def numpy_biased_gram(tokens: np.ndarray) -> np.ndarray:
    """K around the identity mean by Owen's T; the diagonal, where it divides by zero, is zero."""
    query, keys = extended(tokens)
    n = len(query)
    flat = keys.reshape(n * N_KEYS, -1)
    shift = np.einsum("nd,nkd->nk", tokens[:, 0], tokens[:, 1:])
    gram = np.empty((n, n))
    for i in range(n):
        inner = keys[i] @ flat.T
        query_cosine = np.repeat(query[i] @ query.T / 2, N_KEYS)
        rho = np.clip(query_cosine * inner / 2, -1, 1)
        h, k = np.broadcast_arrays(shift[i][:, None], shift.ravel())
        r = np.sqrt(np.maximum(1 - rho**2, 1e-300))

        # Φ₂(h, k; ρ), and the terms of the moment of ReLU beside it
        sides = owens_t(h, (k - rho * h) / (h * r)) + owens_t(k, (h - rho * k) / (k * r))
        both = (ndtr(h) + ndtr(k)) / 2 - sides - np.where(h * k < 0, 0.5, 0.0)
        density_h = np.exp(-h * h / 2) / math.sqrt(2 * math.pi)
        density_k = np.exp(-k * k / 2) / math.sqrt(2 * math.pi)
        corner = r / (2 * math.pi) * np.exp(-(h * h - 2 * rho * h * k + k * k) / (2 * r * r))
        edges = h * density_k * ndtr((h - rho * k) / r) + k * density_h * ndtr((k - rho * h) / r)
        moments = (h * k + rho) * both + edges + corner
        gram[i] = (moments * inner).reshape(N_KEYS, n, N_KEYS).mean(axis=(0, 2))
    np.fill_diagonal(gram, 0.0)
    return gram


def gram_rows(size: Size) -> Iterator[harness.Row]:
    import torch

    torch.set_num_threads(harness.threads())
    tokens = sphere_tokens(size.gram_sets)
    sets = kh.SetBatch.from_tokens(tokens)
    ours = partial(kh.attention_kernel, sets)
    baselines: dict[str, Callable[[], Any]] = {
        "NumPy broadcast": lambda: numpy_gram(tokens),
        "torch broadcast": lambda: numpy_gram(tokens, torch).numpy(),
    }
    seconds = interleaved_seconds({"ours": ours, **baselines}, size.repeat)
    yield harness.row("Gram matrix, zero mean", seconds["ours"], None, peak_mib(ours))
    for name, work in baselines.items():
        note = difference(work(), ours(), 1e-12)
        yield harness.row(f"  {name}", seconds[name], seconds[name] / seconds["ours"], note=note)

    heads = kh.GaussianHeads(mean=1.0)
    few = tokens[:100]
    some = kh.SetBatch.from_tokens(few)
    biased = best_seconds(lambda: kh.attention_kernel(sets, heads=heads), size.repeat)
    yield harness.row("Gram matrix around a mean", biased)
    found = kh.attention_kernel(some, heads=heads)
    np.fill_diagonal(found, 0.0)
    note = difference(numpy_biased_gram(few), found, 1e-11)
    ours_seconds = best_seconds(lambda: kh.attention_kernel(some, heads=heads), size.repeat)
    theirs_seconds = best_seconds(lambda: numpy_biased_gram(few), 1, warm=False)
    ratio = theirs_seconds / ours_seconds
    yield harness.row(f"  Owen's T, {len(few)} sets", theirs_seconds, ratio, note=note)


# --------------------------------------------------------------------------------------------------
# features of finite heads


def numpy_features(query: Any, keys: Any, heads: np.ndarray, in_place: bool) -> np.ndarray:
    """Batched matrix products, line by line or in place where that can be."""
    n, m = len(query), len(heads)
    weights = heads.transpose(1, 0, 2).reshape(WIDTH, m * WIDTH)
    scores = (query @ weights).reshape(n, m, WIDTH) @ keys.transpose(0, 2, 1)
    factor = scores.dtype.type(1 / (N_KEYS * math.sqrt(m)))
    if in_place:
        np.maximum(scores, 0, out=scores)
        scores *= factor
    else:
        scores = np.maximum(scores, 0) * factor
    return (scores @ keys).reshape(n, -1)


def torch_features(query: Any, keys: Any, heads_last: Any, chunk: int) -> Any:
    """Chunks of sets that stay in cache, heads last: torch at its best, in a layout of its own."""
    import torch

    n, m = len(query), heads_last.shape[1] // WIDTH
    features = torch.empty((n, WIDTH, m), dtype=query.dtype)
    scaled = keys / (N_KEYS * math.sqrt(m))
    for start in range(0, n, chunk):
        part = slice(start, start + chunk)
        projected = torch.mm(query[part], heads_last).view(-1, WIDTH, m)
        weights = torch.bmm(keys[part], projected).relu_()
        torch.bmm(scaled[part].transpose(1, 2), weights, out=features[part])
    return features


def feature_rows(size: Size) -> Iterator[harness.Row]:
    import torch

    torch.set_num_threads(harness.threads())
    tokens = sphere_tokens(size.fit_sets).astype(np.float32)
    sets = kh.SetBatch.from_tokens(tokens)
    heads = kh.GaussianHeads().sample(size.n_heads, DIM, seed=0).astype(np.float32)
    query, keys = extended(tokens)
    last = torch.from_numpy(np.ascontiguousarray(heads.transpose(1, 2, 0).reshape(WIDTH, -1)))
    asked, held = torch.from_numpy(query), torch.from_numpy(np.ascontiguousarray(keys))
    baselines: dict[str, Callable[[], Any]] = {
        "NumPy matmul": lambda: numpy_features(query, keys, heads, in_place=False),
        "NumPy matmul, in place": lambda: numpy_features(query, keys, heads, in_place=True),
        "torch bmm, chunked": lambda: torch_features(asked, held, last, chunk=16),
    }
    ours = partial(kh.attention_features, sets, heads)
    seconds = interleaved_seconds({"ours": ours, **baselines}, size.repeat)
    per_set = 2 * size.n_heads * WIDTH**2 + 4 * size.n_heads * N_KEYS * WIDTH
    share = len(sets) * per_set / seconds["ours"] / harness.gemm_rate("float32")
    yield harness.row("features, float32", seconds["ours"], None, peak_mib(ours), share)
    expected = ours()
    for name, work in baselines.items():
        theirs = np.asarray(work())
        if theirs.ndim == 3:
            theirs = theirs.transpose(0, 2, 1).reshape(expected.shape)
        note = difference(theirs, expected, 2e-5)
        yield harness.row(f"  {name}", seconds[name], seconds[name] / seconds["ours"], note=note)


# --------------------------------------------------------------------------------------------------
# ridge: whole fits, features included, against scikit-learn on ready features


def fit_rows(size: Size) -> Iterator[harness.Row]:
    n = size.fit_sets
    train = kh.targets.sphere_sets(n, n_keys=N_KEYS, dim=DIM, seed=0)
    test = kh.targets.sphere_sets(200, n_keys=N_KEYS, dim=DIM, seed=1)
    y = kh.targets.TokenPower(2, DIM)(train) + 0.05 * np.random.default_rng(0).standard_normal(n)
    heads = kh.GaussianHeads().sample(size.n_heads, DIM, 0)
    kinds = (
        ("20 penalties", ALPHAS, RidgeCV(alphas=ALPHAS)),
        ("one penalty", 1.0, Ridge(alpha=1.0)),
    )
    for label, alpha, baseline in kinds:
        name = type(baseline).__name__
        ready = kh.attention_features(train, heads)
        models = {
            dtype: kh.AttentionRegressor(size.n_heads, alpha=alpha, dtype=dtype, **PAPER_LAYER)
            for dtype in ("float64", "float32")
        }
        works: dict[str, Callable[[], Any]] = {
            dtype: partial(model.fit, train, y) for dtype, model in models.items()
        }
        works[name] = partial(baseline.fit, ready, y)
        seconds = interleaved_seconds(works, size.repeat)
        expected = baseline.predict(kh.attention_features(test, heads))
        for dtype, model in models.items():
            allowed = 1e-6 if dtype == "float64" else 5e-2
            note = difference(model.predict(test), expected, allowed)
            ratio = seconds[name] / seconds[dtype]
            peak = peak_mib(works[dtype])
            share = n * n * ready.shape[1] / seconds[dtype] / harness.gemm_rate(dtype)
            yield harness.row(f"fit, {label}, {dtype}", seconds[dtype], ratio, peak, share, note)
        yield harness.row(f"  {name} on ready features", seconds[name])


# --------------------------------------------------------------------------------------------------
# Huber's loss over the norm ball


def cvxpy_objective(
    features: np.ndarray, y: np.ndarray, radii: tuple[float, float], delta: float
) -> float:
    """The smallest mean loss over the ball, by CVXPY with SCS."""
    import cvxpy as cp

    n = len(y)
    values = cp.Variable((features.shape[1] // WIDTH, WIDTH))
    intercept = cp.Variable()
    residual = features @ cp.vec(values, order="C") + intercept - y
    limits = [
        cp.sum(cp.norm(values, 2, axis=1)) <= radii[0],
        cp.norm(values, "fro") <= radii[1],
    ]
    loss = cp.sum(cp.huber(residual, delta)) / (2 * n)
    problem = cp.Problem(cp.Minimize(loss), limits)
    problem.solve(solver="SCS", eps_rel=1e-4, eps_abs=1e-5)
    return float(problem.value)


def ball_rows(size: Size) -> Iterator[harness.Row]:
    """Ours to a relative duality gap of 1e-4, making the features included."""
    n, m = size.ball_sets, size.ball_heads
    sets = kh.targets.sphere_sets(n, n_keys=N_KEYS, dim=DIM, seed=0)
    clean = kh.targets.TokenPower(2, DIM)(sets)
    noise = np.random.default_rng(0).standard_t(3, n)
    y = (clean - clean.mean()) / clean.std() + 0.3 * noise
    radii = (30.0, 3.0)
    layer = {**PAPER_LAYER, "loss": "huber", "tol": 1e-4}
    layer.pop("pooling")
    model = kh.NormBallRegressor(m, group_radius=radii[0], ball_radius=radii[1], **layer)
    seconds = best_seconds(partial(model.fit, sets, y), size.repeat)
    yield harness.row(f"Huber loss over the norm ball, n = {n}", seconds)

    # the ball is over values in the scaling of the paper: features without 1/sqrt(M)
    heads = kh.GaussianHeads().sample(m, DIM, 0)
    features = math.sqrt(m) * kh.attention_features(sets, heads)
    values: list[float] = []
    delta = 1.0
    theirs = best_seconds(
        lambda: values.append(cvxpy_objective(features, y, radii, delta)), 1, warm=False
    )
    off = values[0] / model.objective_ - 1
    note = f"objective off by {off:.0e}"
    yield harness.row("  CVXPY with SCS", theirs, theirs / seconds, note=note)
    if abs(off) > 5e-3:
        raise AssertionError(f"CVXPY and keyhole minimise different things: {note}")


PATHS = {"gram": gram_rows, "features": feature_rows, "fit": fit_rows, "ball": ball_rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="paper")
    parser.add_argument("--only", choices=PATHS, nargs="+", default=list(PATHS))
    arguments = parser.parse_args()
    print(f"{harness.threads()} threads; matrix products run at")
    for dtype in ("float64", "float32"):
        print(f"  {harness.gemm_rate(dtype) / 1e9:6.0f} GFLOP/s in {dtype}")
    print(harness.header())
    for name in arguments.only:
        for row in PATHS[name](SIZES[arguments.size]):
            print(harness.line(row), flush=True)


if __name__ == "__main__":
    main()
