"""ReLU features on CUDA in one kernel, which uses the place of the features for the projected queries.

x~_0ᵀ W_m of all sets and heads has the size of the features themselves. A program computes it for some sets and heads,
puts it where their features belong, and then goes through its sets: it reads the projected queries back, which are
still in cache, takes their scores against the keys, and puts the features in the same place. The appended one stays
outside of the products, so that d = 16 is a whole number of steps of the tensor cores.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from keyhole._torch.arrays import as_tensor
from keyhole._torch.features import extended_query


@triton.jit
def _split(x):
    """x rounded to 11 bits, which tf32 holds exactly, and the rest."""
    high = ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    return high, x - high


@triton.jit
def _product(a, b):
    """a @ b in three passes of tf32: all but low · low, which is 2⁻²² of the whole."""
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    total = tl.dot(a_low, b_high, input_precision="tf32")
    total = tl.dot(a_high, b_low, total, input_precision="tf32")
    return tl.dot(a_high, b_high, total, input_precision="tf32")


@triton.jit
def relu_features_kernel(
    out, queries, tokens, offsets, heads, heads_last, n_sets, n_heads, stride, scale,
    DIM: tl.constexpr, PADDED: tl.constexpr, DEPTH: tl.constexpr, SETS: tl.constexpr, HEADS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """scale/N Σ_i relu(x~_0ᵀ W_m x~_i) x~_i for SETS sets and HEADS heads.

    ``heads`` is (D, M, DIM) and ``heads_last`` (D, M): W_m[d, e] for e < DIM, and its last column.
    """
    first_set, first_head = tl.program_id(1) * SETS, tl.program_id(0) * HEADS
    sets, head = first_set + tl.arange(0, SETS), first_head + tl.arange(0, HEADS)
    depth, coordinate = tl.arange(0, DEPTH), tl.arange(0, PADDED)
    set_here, head_here, deep = sets < n_sets, head < n_heads, depth < DIM + 1
    known = coordinate < DIM
    query = tl.load(
        queries + sets[:, None] * (DIM + 1) + depth[None, :], mask=set_here[:, None] & deep[None, :], other=0.0
    )
    flat = tl.arange(0, HEADS * PADDED)
    flat_head, flat_coordinate = first_head + flat // PADDED, flat % PADDED
    flat_here = (flat_head < n_heads) & (flat_coordinate < DIM)
    matrix = tl.load(
        heads + depth[:, None] * (n_heads * DIM) + (flat_head * DIM + flat_coordinate)[None, :],
        mask=deep[:, None] & flat_here[None, :],
        other=0.0,
    )
    row = out + sets.to(tl.int64) * stride
    where = row[:, None] + (flat_head * (DIM + 1) + flat_coordinate)[None, :]
    tl.store(where, _product(query, matrix), mask=set_here[:, None] & flat_here[None, :])
    column = tl.load(
        heads_last + depth[:, None] * n_heads + head[None, :], mask=deep[:, None] & head_here[None, :], other=0.0
    )
    where = row[:, None] + (head * (DIM + 1) + DIM)[None, :]
    tl.store(where, _product(query, column), mask=set_here[:, None] & head_here[None, :])
    tl.debug_barrier()  # what one thread wrote another reads
    base = out + first_set.to(tl.int64) * stride + head * (DIM + 1)
    for i in range(tl.minimum(SETS, n_sets - first_set)):
        a_set = first_set + i
        place = base + i * stride
        block = place[:, None] + coordinate[None, :]
        inside = head_here[:, None] & known[None, :]
        projected = tl.load(block, mask=inside, other=0.0)
        constant = tl.load(place + DIM, mask=head_here, other=0.0)
        first, last = tl.load(offsets + a_set), tl.load(offsets + a_set + 1)
        total = tl.zeros((HEADS, PADDED), tl.float32)
        mass = tl.zeros((HEADS,), tl.float32)
        for start in range(first, last, KEYS):
            key = start + tl.arange(0, KEYS)
            present = key < last
            x = tl.load(
                tokens + key[:, None] * DIM + coordinate[None, :], mask=present[:, None] & known[None, :], other=0.0
            )
            scores = _product(projected, x.T) + constant[:, None]
            weights = tl.where(present[None, :], tl.maximum(scores, 0.0), 0.0)
            total += _product(weights, x)
            mass += tl.sum(weights, axis=1)
        factor = scale / (last - first).to(tl.float32)
        tl.store(block, total * factor, mask=inside)
        tl.store(place + DIM, mass * factor, mask=head_here)


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
    warps: int = 1,
) -> torch.Tensor:
    """Fill ``out`` (n, M·D), float32 on CUDA with contiguous rows, with scale · (1/N) Σ_i relu(s_mi) x~_i."""
    n, dim = len(offsets) - 1, tokens.shape[1]
    keys = min(64, _power_of_two(int(np.diff(offsets).max())))
    by_depth = heads.to(torch.float32).permute(1, 0, 2)
    grid = (-(-len(heads) // heads_at_once), -(-n // sets_at_once))
    relu_features_kernel[grid](
        out, extended_query(query, n, tokens), tokens, as_tensor(offsets.astype(np.int64), tokens),
        by_depth[:, :, :-1].contiguous(), by_depth[:, :, -1].contiguous(), n, len(heads), out.stride(0), scale,
        DIM=dim, PADDED=_power_of_two(dim), DEPTH=_power_of_two(dim + 1), SETS=sets_at_once, HEADS=heads_at_once,
        KEYS=keys, num_warps=warps if dim <= 32 else 4,
    )  # fmt: skip
    return out


def _power_of_two(size: int) -> int:
    """The next power of two, 16 at least: what a product of tiles takes."""
    return max(16, 1 << (size - 1).bit_length())
