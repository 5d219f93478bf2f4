"""ReLU features on CUDA in one kernel: projected queries, scores and weighted sums of keys, written once.

A program takes some sets and some heads. x~_0ᵀ W_m is one product for all of them; the scores of each set against its
own keys, and the sums over keys, are products batched over the sets. The appended one stays outside of the products, so
that d = 16 is a whole number of steps of the tensor cores. They work in three passes of tf32, which keeps float32.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from keyhole._torch.arrays import as_tensor
from keyhole._torch.features import extended_query


@triton.jit
def relu_features_kernel(
    out, queries, tokens, offsets, heads, heads_last, n_sets, n_heads, stride, scale,
    DIM: tl.constexpr, PADDED: tl.constexpr, DEPTH: tl.constexpr, SETS: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """scale/N Σ_i relu(x~_0ᵀ W_m x~_i) x~_i for SETS sets and HEADS heads.

    ``heads`` is (D, M, DIM) and ``heads_last`` (D, M): W_m[d, e] for e < d, and its last column.
    """
    sets = tl.program_id(1) * SETS + tl.arange(0, SETS)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    depth, coordinate = tl.arange(0, DEPTH), tl.arange(0, PADDED)
    set_here, head_here, deep = sets < n_sets, head < n_heads, depth < DIM + 1
    query = tl.load(
        queries + sets[:, None] * (DIM + 1) + depth[None, :], mask=set_here[:, None] & deep[None, :], other=0.0
    )
    flat = tl.arange(0, HEADS * PADDED)
    flat_head, flat_coordinate = tl.program_id(0) * HEADS + flat // PADDED, flat % PADDED
    matrix = tl.load(
        heads + depth[:, None] * (n_heads * DIM) + (flat_head * DIM + flat_coordinate)[None, :],
        mask=deep[:, None] & ((flat_head < n_heads) & (flat_coordinate < DIM))[None, :],
        other=0.0,
    )
    projected = tl.reshape(tl.dot(query, matrix, input_precision=PRECISION), (SETS, HEADS, PADDED))
    column = tl.load(
        heads_last + depth[:, None] * n_heads + head[None, :], mask=deep[:, None] & head_here[None, :], other=0.0
    )
    constant = tl.dot(query, column, input_precision=PRECISION)
    first = tl.load(offsets + sets, mask=set_here, other=0)
    length = tl.load(offsets + sets + 1, mask=set_here, other=0) - first
    total = tl.zeros((SETS, HEADS, PADDED), tl.float32)
    mass = tl.zeros((SETS, HEADS), tl.float32)
    for start in range(0, tl.max(length, axis=0), KEYS):
        key = start + tl.arange(0, KEYS)
        present = key[None, :] < length[:, None]
        where = (first[:, None] + key[None, :])[:, :, None] * DIM + coordinate[None, None, :]
        x = tl.load(tokens + where, mask=present[:, :, None] & (coordinate < DIM)[None, None, :], other=0.0)
        scores = tl.dot(projected, tl.permute(x, (0, 2, 1)), input_precision=PRECISION) + constant[:, :, None]
        weights = tl.where(present[:, None, :], tl.maximum(scores, 0.0), 0.0)
        total += tl.dot(weights, x, input_precision=PRECISION)
        mass += tl.sum(weights, axis=2)
    factor = scale / tl.maximum(length, 1).to(tl.float32)
    row = out + sets.to(tl.int64)[:, None] * stride + head[None, :] * (DIM + 1)
    here = set_here[:, None] & head_here[None, :]
    tl.store(
        row[:, :, None] + coordinate[None, None, :],
        total * factor[:, None, None],
        mask=here[:, :, None] & (coordinate < DIM)[None, None, :],
    )
    tl.store(row + DIM, mass * factor[:, None], mask=here)


def fill_relu_features(
    tokens: torch.Tensor,
    offsets: np.ndarray,
    query: torch.Tensor | None,
    heads: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    sets_at_once: int = 16,
    heads_at_once: int = 16,
    warps: int = 4,
    precision: str = "tf32x3",
) -> torch.Tensor:
    """Fill ``out`` (n, M·D), float32 on CUDA with contiguous rows, with scale · (1/N) Σ_i relu(s_mi) x~_i."""
    n, dim = len(offsets) - 1, tokens.shape[1]
    padded, depth = _power_of_two(dim), _power_of_two(dim + 1)
    keys = min(32, _power_of_two(int(np.diff(offsets).max())))
    # what a program holds of each set and head grows with d
    heads_at_once = max(16, min(heads_at_once, 256 // padded))
    sets_at_once = max(16, min(sets_at_once, 4096 // (16 * padded)))
    # sets in the order of their lengths would save a little more; only the longest of a few costs
    by_depth = heads.to(torch.float32).permute(1, 0, 2)
    queries = extended_query(query, n, tokens)
    grid = (-(-len(heads) // heads_at_once), -(-n // sets_at_once))
    relu_features_kernel[grid](
        out, queries, tokens, as_tensor(offsets.astype(np.int64), tokens), by_depth[:, :, :-1].contiguous(),
        by_depth[:, :, -1].contiguous(), n, len(heads), out.stride(0), scale,
        DIM=dim, PADDED=padded, DEPTH=depth, SETS=sets_at_once, HEADS=heads_at_once, KEYS=keys, PRECISION=precision,
        num_warps=warps,
    )  # fmt: skip
    return out


def _power_of_two(size: int) -> int:
    """The next power of two, 16 at least: what a product of tiles takes."""
    return max(16, 1 << (size - 1).bit_length())
