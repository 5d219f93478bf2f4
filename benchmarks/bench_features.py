"""Features of finite heads against what a reader of the paper would write, in NumPy and in torch,
in one run.

    python benchmarks/bench_features.py [paper|small] [float32|float64]

Work: 2nMD² operations for the queries and 4nMND for scores and values, and n·M·D numbers written.
`ceiling_share` is the part of this machine's GEMM rate that these operations reach; notes give the
share of the ceiling that also counts the writing, at memory bandwidth. Both ceilings are measured
in the same run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import numpy as np
from harness import interleaved_seconds, peak_mib, row

from keyhole._array import thread_count
from keyhole.attention.features import (
    apply_values,
    attention_features,
    feature_blocks,
    mlp_features,
)
from keyhole.attention.heads import GaussianHeads, sample_mlp_weights
from keyhole.data.sets import SetBatch

DIM = N_KEYS = 16
N_HEADS = 1000
N_SETS = {"paper": 4000, "small": 400}
ROUNDS = {"paper": 5, "small": 15}
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
TORCH_SOFTMAX = "torch softmax, heads last, its own layout"
Work = Callable[[], Any]


# ---- the rivals ----------------------------------------------------------------------------------


def by_einsum(query: np.ndarray, keys: np.ndarray, heads: np.ndarray, optimize: bool) -> np.ndarray:
    """The formula, as a reader of the paper would write it."""
    scores = np.einsum("nd,mde,nke->nmk", query, heads, keys, optimize=optimize)
    weights = np.maximum(scores, 0) / keys.shape[1]
    features = np.einsum("nmk,nke->nme", weights, keys, optimize=optimize)
    return features.reshape(len(query), -1) / query.dtype.type(math.sqrt(len(heads)))


def by_plain_matmul(query: np.ndarray, keys: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """The same as batched matrix products, line by line."""
    n, width, m = *query.shape, len(heads)
    projected = (query @ heads.transpose(1, 0, 2).reshape(width, m * width)).reshape(n, m, width)
    weights = np.maximum(projected @ keys.transpose(0, 2, 1), 0) / keys.shape[1]
    return (weights @ keys).reshape(n, -1) / query.dtype.type(math.sqrt(m))


def by_matmul(query: np.ndarray, keys: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """The same, in place where it can be."""
    n, width, m = *query.shape, len(heads)
    projected = (query @ heads.transpose(1, 0, 2).reshape(width, m * width)).reshape(n, m, width)
    scores = projected @ keys.transpose(0, 2, 1)
    np.maximum(scores, 0, out=scores)
    scores *= scores.dtype.type(1 / (keys.shape[1] * math.sqrt(m)))
    return (scores @ keys).reshape(n, -1)


def by_torch(query: Any, keys: Any, heads: Any) -> Any:
    """The same in torch."""
    import torch

    n, width, m = *query.shape, len(heads)
    projected = (query @ heads.permute(1, 0, 2).reshape(width, m * width)).view(n, m, width)
    scores = (
        torch.bmm(projected, keys.transpose(1, 2)).relu_().mul_(1 / (keys.shape[1] * math.sqrt(m)))
    )
    return torch.bmm(scores, keys).view(n, -1)


def by_chunks(
    query: Any, keys: Any, heads_last: Any, order: str, chunk: int, softmax: bool = False
) -> Any:
    """Torch at its best: chunks of sets that stay in cache, heads last, scaling on the small side.

    ``order`` is "heads last" for its natural (n, D, M), "ours" for (n, M, D): the documented
    columns.
    """
    import torch

    n, width = query.shape
    m = heads_last.shape[1] // width
    out = torch.empty((n, width, m) if order == "heads last" else (n, m, width), dtype=query.dtype)
    scaled = keys * (1 / (math.sqrt(m) * (1 if softmax else keys.shape[1])))
    for start in range(0, n, chunk):
        part = slice(start, start + chunk)
        projected = torch.mm(query[part], heads_last).view(-1, width, m)
        scores = torch.bmm(keys[part], projected)
        weights = scores.softmax(dim=1) if softmax else scores.relu_()
        if order == "heads last":
            torch.bmm(scaled[part].transpose(1, 2), weights, out=out[part])
        else:
            torch.bmm(weights.transpose(1, 2), scaled[part], out=out[part])
    return out


def torch_rivals(query: np.ndarray, keys: np.ndarray, heads: np.ndarray) -> dict[str, Work]:
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(thread_count())
    q, k, w = (torch.from_numpy(np.ascontiguousarray(x)) for x in (query, keys, heads))
    last = w.permute(1, 2, 0).reshape(w.shape[1], -1).contiguous()
    rivals: dict[str, Work] = {"torch bmm": lambda: by_torch(q, k, w)}
    for order in ("heads last", "ours"):
        trial = {
            c: (lambda c=c, o=order: by_chunks(q, k, last, o, int(c)))
            for c in ("8", "16", "32", "64")
        }
        times = interleaved_seconds(trial, 2)
        chunk = min(times, key=times.__getitem__)
        where = "its own layout" if order == "heads last" else "our columns"
        rivals[f"torch bmm, heads last, chunks of {chunk}, {where}"] = trial[chunk]
        if order == "heads last":
            rivals[TORCH_SOFTMAX] = lambda c=int(chunk): by_chunks(
                q, k, last, "heads last", c, softmax=True
            )
    return rivals


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is computed: sets of 16 keys and ragged ones, heads, one output's values."""

    size: str
    dtype: str
    batch: SetBatch
    ragged: SetBatch
    heads: np.ndarray
    values: np.ndarray

    @classmethod
    def draw(cls, size: str, dtype: str) -> Case:
        rng, n = np.random.default_rng(0), N_SETS[size]
        lengths = np.minimum(rng.geometric(1 / N_KEYS, size=n), 128)
        lengths[0] = 128
        batch = SetBatch(sphere(rng, n, N_KEYS, DIM), sphere(rng, n, DIM))
        ragged = SetBatch([sphere(rng, k, DIM) for k in lengths], sphere(rng, n, DIM))
        heads = GaussianHeads().sample(N_HEADS, DIM, seed=0).astype(dtype)
        values = rng.standard_normal((N_HEADS * (DIM + 1), 1)).astype(dtype)
        return cls(size, dtype, batch.astype(dtype), ragged.astype(dtype), heads, values)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys = self.batch.extended_keys().reshape(len(self.batch), N_KEYS, DIM + 1)
        return self.batch.extended_query(), keys, self.heads

    def ours(self) -> dict[str, Work]:
        batch, heads, dtype = self.batch, self.heads, self.dtype

        def blocks() -> None:
            for _ in feature_blocks(
                batch, heads, dtype=dtype, memory_budget=2**26, reuse_buffer=True
            ):
                pass

        return {
            "ours": lambda: attention_features(batch, heads, dtype=dtype),
            "blocks": blocks,
            "ragged": lambda: attention_features(self.ragged, heads, dtype=dtype),
            "softmax": lambda: attention_features(batch, heads, "softmax", dtype=dtype),
            "apply": lambda: apply_values(batch, heads, self.values, dtype=dtype),
            "features, then product": lambda: (
                attention_features(batch, heads, dtype=dtype) @ self.values
            ),
        }

    def rivals(self) -> dict[str, Work]:
        query, keys, heads = self.arrays
        plain = {"NumPy einsum, plain": lambda: by_einsum(query, keys, heads, False)}
        return {
            "NumPy einsum, optimize=True": lambda: by_einsum(query, keys, heads, True),
            **(plain if self.size == "small" else {}),
            "NumPy matmul": lambda: by_plain_matmul(query, keys, heads),
            "NumPy matmul, in place": lambda: by_matmul(query, keys, heads),
            **torch_rivals(query, keys, heads),
        }

    def ceilings(self) -> dict[str, Work]:
        a, b = np.ones((2500, 2500), self.dtype), np.empty(2**25)
        return {"gemm": lambda: a @ a, "fill": lambda: b.fill(1.0)}


def sphere(rng: np.random.Generator, *shape: int) -> np.ndarray:
    x = rng.standard_normal(shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def differences(case: Case, rivals: dict[str, Work]) -> dict[str, float]:
    """Largest relative difference of every rival from ours; an error if it computes something
    else.
    """
    errors = {}
    for name, work in rivals.items():
        activation = "softmax" if "softmax" in name else "relu"
        ours = attention_features(case.batch, case.heads, activation, dtype=case.dtype)
        theirs = np.asarray(work())
        if "its own layout" in name:
            theirs = theirs.transpose(0, 2, 1)
        errors[name] = float(np.abs(theirs.reshape(ours.shape) - ours).max() / np.abs(ours).max())
        if errors[name] > TOLERANCE[case.dtype]:
            raise AssertionError(
                f"{name} differs by {errors[name]:.2g}; {TOLERANCE[case.dtype]:.2g} is allowed"
            )
    return errors


def attention_rows(size: str, dtype: str) -> list[dict[str, Any]]:
    case = Case.draw(size, dtype)
    ours, rivals = case.ours(), case.rivals()
    errors = differences(case, rivals)
    slow = {name: work for name, work in rivals.items() if "plain" in name}  # ten seconds each time
    quick = {name: work for name, work in rivals.items() if name not in slow}
    times = interleaved_seconds(ours | quick | case.ceilings(), ROUNDS[size]) | interleaved_seconds(
        slow, 1
    )

    n, width = len(case.batch), DIM + 1
    operations = 2 * n * N_HEADS * width**2 + 4 * n * N_HEADS * N_KEYS * width
    arithmetic = operations / (2 * 2500**3) * times["gemm"]
    writing = n * N_HEADS * width * np.dtype(dtype).itemsize / 2**28 * times["fill"]
    whole = {
        k: f"{(arithmetic + writing) / times[k]:.0%} of arithmetic and writing together"
        for k in ours
    }

    def line(name: str, key: str, against: str | None = None, **more: Any) -> dict[str, Any]:
        ratio = times[against] / times[key] if against in times else None
        return row(
            name, times[key], **{"ratio": ratio, "ceiling_share": arithmetic / times[key]} | more
        )

    rows = [
        line(
            f"attention_features, {dtype}",
            "ours",
            peak_mib=peak_mib(ours["ours"]),
            note=whole["ours"],
        )
    ]
    for name, work in rivals.items():
        if "softmax" not in name:
            ratio, note = times[name] / times["ours"], f"agrees to {errors[name]:.1e}"
            rows.append(line(f"  {name}", name, ratio=ratio, peak_mib=peak_mib(work), note=note))
    per_token = [
        times[k] / len(b.tokens) for k, b in (("ours", case.batch), ("ragged", case.ragged))
    ]
    lengths = case.ragged.lengths
    return [
        *rows,
        line(f"feature_blocks, one buffer, {dtype}", "blocks", note=whole["blocks"]),
        row(
            f"attention_features, ragged sets, {dtype}",
            times["ragged"],
            ratio=per_token[0] / per_token[1],
            note=(
                f"mean {lengths.mean():.1f}, max {lengths.max()} keys: {per_token[1] * 1e9:.0f} ns "
                f"per token, {per_token[0] * 1e9:.0f} for equal sets; ratio of these"
            ),
        ),
        line(
            f"attention_features, softmax, {dtype}",
            "softmax",
            TORCH_SOFTMAX,
            note=f"against {TORCH_SOFTMAX}",
        ),
        line(
            f"apply_values, one output, {dtype}",
            "apply",
            "features, then product",
            peak_mib=peak_mib(ours["apply"]),
            note="against features, then product",
        ),
    ]


def mlp_rows(size: str, dtype: str) -> list[dict[str, Any]]:
    case = Case.draw(size, dtype)
    batch, n, width = case.batch, len(case.batch), N_HEADS * (DIM + 1)
    weights = sample_mlp_weights(width, N_KEYS, DIM, seed=0).astype(dtype)

    def plain() -> np.ndarray:
        flat = np.concatenate(
            [batch.query, batch.tokens.reshape(n, -1), np.ones((n, 1), dtype)], axis=1
        )
        return np.maximum(flat @ weights.T, 0) / np.dtype(dtype).type(math.sqrt(width))

    works: dict[str, Work] = {
        "ours": lambda: mlp_features(batch, weights, dtype=dtype),
        "plain": plain,
    }
    error = float(np.abs(works["ours"]() - plain()).max())
    times = interleaved_seconds(works | case.ceilings(), ROUNDS[size] // 2)
    return [
        row(
            f"mlp_features, {dtype}",
            times["ours"],
            ratio=times["plain"] / times["ours"],
            peak_mib=peak_mib(works["ours"]),
            ceiling_share=n * weights.size / 2500**3 * times["gemm"] / times["ours"],
            note=f"against NumPy's formula, {peak_mib(plain):.0f} MiB; agrees to {error:.1e}",
        )
    ]


def run(size: str, dtypes: Sequence[str] = tuple(TOLERANCE)) -> list[dict[str, Any]]:
    """Rows for "paper" (d = N = 16, M = 1000, n = 4000) or "small" (n = 400)."""
    return [r for dtype in dtypes for r in (*attention_rows(size, dtype), *mlp_rows(size, dtype))]


if __name__ == "__main__":
    sizes = [a for a in sys.argv[1:] if a in N_SETS] or ["paper"]
    dtypes = [a for a in sys.argv[1:] if a in TOLERANCE] or list(TOLERANCE)
    print(harness.header())
    for size in sizes:
        for result in run(size, dtypes):
            print(harness.line(result))
