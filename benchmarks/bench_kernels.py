"""Exact Gram matrices against the formula as a reader of the paper would write it, in NumPy and in
torch.

    python benchmarks/bench_kernels.py [paper|small]

d = N = 16, tokens on the sphere, float64. Rivals compute the whole matrix block by block, as
broadcasts do; ours computes one triangle. Every rival's numbers are compared with ours in the run.
The ceiling of a Gram matrix is the time its multiply-adds take at the rate of a matrix product plus
the time its evaluations of κ take at the rate of a bare loop, both measured here.
"""

from __future__ import annotations

import sys

import harness
import numpy as np
import torch
from harness import Row, gemm_rate, interleaved_seconds, peak_mib, row
from scipy.special import ndtr, owens_t

import keyhole as kh
from keyhole._array import run_threads, thread_count
from keyhole.attention.activations import gaussian_moment

SIZES = {"paper": 1000, "small": 100}
"""Sets; N = d = 16."""

N_KEYS = DIM = 16


def sphere_tokens(n: int, seed: int = 0) -> np.ndarray:
    tokens = np.random.default_rng(seed).standard_normal((n, 1 + N_KEYS, DIM))
    return np.asarray(tokens / np.linalg.norm(tokens, axis=-1, keepdims=True))


# --- rivals ---------------------------------------------------------------------------------------


def numpy_gram(tokens: np.ndarray, block: int = 8) -> np.ndarray:
    """K for zero mean, a few rows at a time so that no array of pairs outgrows the cache by
    much.
    """
    n = len(tokens)
    extended = np.concatenate([tokens, np.ones((n, 1 + N_KEYS, 1))], axis=-1)
    query, keys = extended[:, 0], extended[:, 1:]
    query_norm, key_norm = np.linalg.norm(query, axis=-1), np.linalg.norm(keys, axis=-1)
    flat, flat_norm = keys.reshape(n * N_KEYS, -1), key_norm.ravel()
    out = np.empty((n, n))
    for start in range(0, n, block):
        rows = slice(start, start + block)
        inner = keys[rows] @ flat.T  # (block, N, n·N)
        cosine = inner / (key_norm[rows][:, :, None] * flat_norm)
        query_cosine = (query[rows] @ query.T) / np.outer(query_norm[rows], query_norm)
        rho = np.clip(np.repeat(query_cosine, N_KEYS, axis=1)[:, None, :] * cosine, -1, 1)
        kappa = (np.sqrt(1 - rho**2) + (np.pi - np.arccos(rho)) * rho) / (2 * np.pi)
        std = 0.25 * query_norm[rows][:, None, None] * key_norm[rows][:, :, None]
        moments = std * np.repeat(query_norm, N_KEYS) * flat_norm * kappa
        pairs = (moments * inner).reshape(-1, N_KEYS, n, N_KEYS)
        out[rows] = pairs.mean(axis=(1, 3))
    return out


def torch_gram(tokens: np.ndarray, block: int = 8) -> np.ndarray:
    """The same in torch, on as many threads as we use."""
    x = torch.from_numpy(tokens)
    n = len(x)
    extended = torch.cat([x, torch.ones(n, 1 + N_KEYS, 1, dtype=x.dtype)], dim=-1)
    query, keys = extended[:, 0], extended[:, 1:]
    query_norm, key_norm = query.norm(dim=-1), keys.norm(dim=-1)
    flat, flat_norm = keys.reshape(n * N_KEYS, -1), key_norm.ravel()
    out = torch.empty(n, n, dtype=x.dtype)
    for start in range(0, n, block):
        rows = slice(start, start + block)
        inner = keys[rows] @ flat.T
        cosine = inner / (key_norm[rows][:, :, None] * flat_norm)
        query_cosine = (query[rows] @ query.T) / torch.outer(query_norm[rows], query_norm)
        rho = (query_cosine.repeat_interleave(N_KEYS, dim=1)[:, None, :] * cosine).clamp(-1, 1)
        kappa = (torch.sqrt(1 - rho**2) + (torch.pi - torch.arccos(rho)) * rho) / (2 * torch.pi)
        std = 0.25 * query_norm[rows][:, None, None] * key_norm[rows][:, :, None]
        moments = std * query_norm.repeat_interleave(N_KEYS) * flat_norm * kappa
        pairs = (moments * inner).reshape(-1, N_KEYS, n, N_KEYS)
        out[rows] = pairs.mean(dim=(1, 3))
    return out.numpy()


def bivariate_normal(h: np.ndarray, k: np.ndarray, rho: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Φ₂(h, k; ρ) by Owen's T function; h and k not zero."""
    sides = owens_t(h, (k - rho * h) / (h * r)) + owens_t(k, (h - rho * k) / (k * r))
    return (ndtr(h) + ndtr(k)) / 2 - sides - np.where(h * k < 0, 0.5, 0.0)


def numpy_biased_gram(tokens: np.ndarray, block: int = 8) -> np.ndarray:
    """K around the identity mean by the closed form with Φ₂; the diagonal, where it divides by
    zero, is left out.
    """
    n = len(tokens)
    extended = np.concatenate([tokens, np.ones((n, 1 + N_KEYS, 1))], axis=-1)
    query, keys = extended[:, 0], extended[:, 1:]
    flat = keys.reshape(n * N_KEYS, -1)
    shift = np.einsum("nd,nkd->nk", tokens[:, 0], tokens[:, 1:])  # unit tokens: unit variance
    out = np.empty((n, n))
    for start in range(0, n, block):
        rows = slice(start, start + block)
        inner = keys[rows] @ flat.T
        query_cosine = np.repeat(query[rows] @ query.T / 2, N_KEYS, axis=1)[:, None, :]
        rho = np.clip(query_cosine * inner / 2, -1, 1)
        h, k = np.broadcast_arrays(shift[rows][:, :, None], shift.ravel())
        r = np.sqrt(np.maximum(1 - rho**2, 1e-300))
        density_h, density_k = (np.exp(-x * x / 2) / np.sqrt(2 * np.pi) for x in (h, k))
        corner = r / (2 * np.pi) * np.exp(-(h * h - 2 * rho * h * k + k * k) / (2 * r * r))
        sides = h * density_k * ndtr((h - rho * k) / r) + k * density_h * ndtr((k - rho * h) / r)
        moments = (h * k + rho) * bivariate_normal(h, k, rho, r) + sides + corner
        out[rows] = (moments * inner).reshape(-1, N_KEYS, n, N_KEYS).mean(axis=(1, 3))
    np.fill_diagonal(out, 0.0)
    return out


def numpy_mlp(tokens: np.ndarray) -> np.ndarray:
    z = np.concatenate([tokens.reshape(len(tokens), -1), np.ones((len(tokens), 1))], axis=1)
    norm = np.linalg.norm(z, axis=1)
    scale = np.outer(norm, norm)
    rho = np.clip(z @ z.T / scale, -1, 1)
    return np.asarray(
        scale / (N_KEYS + 2) * (np.sqrt(1 - rho**2) + (np.pi - np.arccos(rho)) * rho) / (2 * np.pi)
    )


# --- measuring ------------------------------------------------------------------------------------


def check_agreement(ours: np.ndarray, theirs: np.ndarray, allowed: float) -> str:
    """Say how far two matrices are apart, and raise if it is too far."""
    apart = float(np.max(np.abs(ours - theirs)) / np.max(np.abs(ours)))
    if apart > allowed:
        raise AssertionError(f"the numbers differ by {apart:.1e}, {allowed:.0e} allowed")
    return f"agrees to {apart:.0e}"


def kappa_rate() -> float:
    """Evaluations of κ per second in a bare loop over arrays that fit the cache, on all threads."""
    from keyhole.attention.compiled_moments import fill_relu_arc

    n_threads, ones = thread_count(), np.ones(1024)
    buffers = [np.random.default_rng(i).uniform(-1, 1, (4, 1024)) for i in range(n_threads)]

    def work(buffer: np.ndarray) -> None:
        for _ in range(400):
            fill_relu_arc(buffer, 0, ones[:4], ones)

    best = interleaved_seconds({"kappa": lambda: run_threads(work, buffers)}, repeat=3)["kappa"]
    return n_threads * 400 * 4096 / best


def ragged_sets(n: int) -> kh.SetBatch:
    """Sets of 16 keys in the mean and 128 at most."""
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.geometric(1 / N_KEYS, n), 128)
    tokens = [
        x / np.linalg.norm(x, axis=-1, keepdims=True)
        for x in (rng.standard_normal((1 + k, DIM)) for k in lengths)
    ]
    return kh.SetBatch.from_tokens(tokens)


def key_pairs(sets: kh.SetBatch) -> float:
    """Pairs of keys in one triangle of the Gram matrix."""
    return (len(sets.tokens) ** 2 + float(np.sum(sets.lengths**2))) / 2


def run(size: str) -> list[Row]:
    """Measure all rows at one size."""
    n = SIZES[size]
    torch.set_num_threads(thread_count())
    return [*zero_mean_rows(n), *biased_rows(n), *mlp_rows(n)]


def zero_mean_rows(n: int) -> list[Row]:
    tokens = sphere_tokens(n)
    sets, ragged = kh.SetBatch.from_tokens(tokens), ragged_sets(n)
    works = {
        "ours": lambda: kh.attention_kernel(sets),
        "ragged": lambda: kh.attention_kernel(ragged),
        "torch": lambda: torch_gram(tokens),
    }
    best = interleaved_seconds(works, repeat=5 if n > 500 else 20)
    best |= interleaved_seconds({"numpy": lambda: numpy_gram(tokens)}, repeat=1 if n > 500 else 5)
    ours = kh.attention_kernel(sets)
    pairs = key_pairs(sets)
    products, kappas = gemm_rate("float64") / 2, kappa_rate()
    ceiling = pairs * (DIM + 1) / products + pairs / kappas
    per_pair = best["ours"] / pairs * 1e9
    ragged_cost = best["ragged"] / key_pairs(ragged) / (best["ours"] / pairs)
    rates = (
        f"{per_pair:.2f} ns a pair of keys; ceilings {2e-9 * products:.0f} GFLOP/s, "
        f"{1e-9 * kappas:.2f} G κ/s"
    )
    return [
        row(
            "Gram, ours", best["ours"], None, peak_mib(works["ours"]), ceiling / best["ours"], rates
        ),
        row(
            "Gram, ragged (mean 16, max 128)",
            best["ragged"],
            None,
            peak_mib(works["ragged"]),
            None,
            f"{ragged_cost:.2f} times the cost of a pair in equal sets",
        ),
        row(
            "Gram, NumPy broadcast",
            best["numpy"],
            best["numpy"] / best["ours"],
            peak_mib(lambda: numpy_gram(tokens)),
            None,
            check_agreement(ours, numpy_gram(tokens), 1e-13),
        ),
        row(
            "Gram, torch broadcast",
            best["torch"],
            best["torch"] / best["ours"],
            peak_mib(works["torch"]),
            None,
            check_agreement(ours, torch_gram(tokens), 1e-13),
        ),
    ]


def biased_rows(n: int) -> list[Row]:
    tokens = sphere_tokens(n)
    distribution = kh.GaussianHeads(mean=1.0)
    sets, few = kh.SetBatch.from_tokens(tokens), tokens[: min(n, 100)]
    some = sets[: len(few)]
    works = {
        "biased": lambda: kh.attention_kernel(sets, heads=distribution),
        "zero": lambda: kh.attention_kernel(sets),
        "some": lambda: kh.attention_kernel(some, heads=distribution),
    }
    best = interleaved_seconds(works, repeat=3 if n > 500 else 10)
    best |= interleaved_seconds({"numpy": lambda: numpy_biased_gram(few)}, repeat=1)
    ours = kh.attention_kernel(some, heads=distribution)
    np.fill_diagonal(ours, 0.0)
    pairs = 100_000
    rng = np.random.default_rng(0)
    h, k, rho = rng.normal(size=pairs), rng.normal(size=pairs), rng.uniform(-1, 1, pairs)
    scalar = interleaved_seconds(
        {"moment": lambda: gaussian_moment("relu", h, k, 1, 1, rho)}, repeat=3
    )["moment"]
    agreement = check_agreement(ours, numpy_biased_gram(few), 1e-11)
    return [
        row(
            "biased Gram, ours",
            best["biased"],
            None,
            peak_mib(works["biased"]),
            None,
            f"{best['biased'] / best['zero']:.2f} times the zero-mean Gram",
        ),
        row(
            f"biased Gram, Owen's T, first {len(few)} sets",
            best["numpy"],
            best["numpy"] / best["some"],
            None,
            None,
            agreement,
        ),
        row(
            "gaussian_moment, 100 000 pairs",
            scalar,
            None,
            None,
            None,
            f"{scalar / pairs * 1e9:.0f} ns a pair, one thread",
        ),
    ]


def mlp_rows(n: int) -> list[Row]:
    tokens = sphere_tokens(n)
    sets = kh.SetBatch.from_tokens(tokens)
    works = {"ours": lambda: kh.mlp_kernel(sets), "numpy": lambda: numpy_mlp(tokens)}
    best = interleaved_seconds(works, repeat=10)
    return [
        row("MLP Gram, ours", best["ours"], None, peak_mib(works["ours"]), None, ""),
        row(
            "MLP Gram, NumPy",
            best["numpy"],
            best["numpy"] / best["ours"],
            peak_mib(works["numpy"]),
            None,
            check_agreement(kh.mlp_kernel(sets), numpy_mlp(tokens), 1e-13),
        ),
    ]


def main() -> None:
    for size in sys.argv[1:] or SIZES:
        print(f"\nkernels, {size}: n = {SIZES[size]}, d = N = {DIM}, {thread_count()} threads")
        print(harness.header())
        for result in run(size):
            print(harness.line(result), flush=True)


if __name__ == "__main__":
    main()
