"""ReLU features on CUDA: the projected queries go straight into the output, and one pass turns them into features.

The product x~_0ᵀ W_m of all sets and heads has the size of the features themselves. It is written where they belong,
and a kernel then reads a block of heads of one set, takes its scores against the keys, and puts the features in the
same place: three passes over the output and nothing else of its size.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from keyhole._torch.arrays import as_tensor
from keyhole._torch.features import extended_query, project_queries


@triton.jit
def relu_features_kernel(
    out, tokens, offsets, n_heads, stride, scale,
    DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Replace x~_0ᵀ W_m by scale/N Σ_i relu(x~_0ᵀ W_m x~_i) x~_i for one set and a block of heads."""
    a_set = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    coordinate = tl.arange(0, PADDED)
    known = head < n_heads
    row = out + a_set * stride + head * (DIM + 1)
    block = row[:, None] + coordinate[None, :]
    inside = known[:, None] & (coordinate < DIM)[None, :]
    projected = tl.load(block, mask=inside, other=0.0)
    constant = tl.load(row + DIM, mask=known, other=0.0)
    first, last = tl.load(offsets + a_set), tl.load(offsets + a_set + 1)
    total = tl.zeros((HEADS, PADDED), tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    for start in range(first, last, KEYS):
        key = start + tl.arange(0, KEYS)
        present = key < last
        x = tl.load(
            tokens + key.to(tl.int64)[:, None] * DIM + coordinate[None, :],
            mask=present[:, None] & (coordinate < DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(projected, x.T, input_precision=PRECISION) + constant[:, None]
        weights = tl.where(present[None, :], tl.maximum(scores, 0.0), 0.0)
        total = tl.dot(weights, x, total, input_precision=PRECISION)
        mass += tl.sum(weights, axis=1)
    factor = scale / (last - first).to(tl.float32)
    tl.store(block, total * factor, mask=inside)
    tl.store(row + DIM, mass * factor, mask=known)


def fill_relu_features(
    tokens: torch.Tensor,
    offsets: np.ndarray,
    query: torch.Tensor | None,
    heads: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    heads_at_once: int = 16,
    warps: int = 1,
    precision: str = "tf32x3",
) -> torch.Tensor:
    """Fill ``out`` (n, M·D), float32 on CUDA with contiguous rows, with scale · (1/N) Σ_i relu(s_mi) x~_i."""
    n, dim = len(offsets) - 1, tokens.shape[1]
    project_queries(extended_query(query, n, tokens), heads.to(torch.float32), out)
    padded = max(16, 1 << (dim - 1).bit_length())
    longest = int(np.diff(offsets).max())
    keys = min(64, max(16, 1 << (longest - 1).bit_length()))
    grid = (-(-len(heads) // heads_at_once), n)
    relu_features_kernel[grid](
        out, tokens, as_tensor(offsets.astype(np.int64), tokens), len(heads), out.stride(0), scale,
        DIM=dim, PADDED=padded, HEADS=heads_at_once, KEYS=keys, PRECISION=precision, num_warps=warps,
    )  # fmt: skip
    return out
