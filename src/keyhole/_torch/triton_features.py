# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""ReLU features on CUDA: the projected queries go straight into the output, and one pass turns them into features.

x~_0ᵀ W_m of all sets and heads has the size of the features themselves. It is written where they belong, and a kernel
then reads a block of heads of one set, takes its scores against the keys, and puts the features in the same place:
three passes over the output and nothing else of its size. (Projecting in the same kernel saves a pass and was slower:
0.70 ms against 0.46 at n = 4000, M = 1000 on an H200, as the larger program leaves few of them running at a time.)
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from keyhole._torch.arrays import as_tensor
from keyhole._torch.features import extended_query, project_queries


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
    out, tokens, offsets, n_heads, stride, scale,
    DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Replace x~_0ᵀ W_m by scale/N Σ_i relu(x~_0ᵀ W_m x~_i) x~_i for one set and a block of heads.

    The appended one stays outside of the products, so that d = 16 is a whole number of steps of the tensor cores.
    """
    a_set = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    coordinate = tl.arange(0, PADDED)
    here, known = head < n_heads, coordinate < DIM
    row = out + a_set * stride + head * (DIM + 1)
    block = row[:, None] + coordinate[None, :]
    inside = here[:, None] & known[None, :]
    projected = tl.load(block, mask=inside, other=0.0)
    constant = tl.load(row + DIM, mask=here, other=0.0)
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
    tl.store(row + DIM, mass * factor, mask=here)


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
) -> torch.Tensor:
    """Fill ``out`` (n, M·D), float32 on CUDA with contiguous rows, with scale · (1/N) Σ_i relu(s_mi) x~_i."""
    n, dim = len(offsets) - 1, tokens.shape[1]
    project_queries(extended_query(query, n, tokens), heads.to(torch.float32), out)
    keys = min(64, _power_of_two(int(np.diff(offsets).max())))
    relu_features_kernel[(-(-len(heads) // heads_at_once), n)](
        out, tokens, as_tensor(offsets.astype(np.int64), tokens), len(heads), out.stride(0), scale,
        DIM=dim, PADDED=_power_of_two(dim), HEADS=heads_at_once, KEYS=keys, num_warps=warps if dim <= 32 else 4,
    )  # fmt: skip
    return out


def _power_of_two(size: int) -> int:
    """The next power of two, 16 at least: what a product of tiles takes."""
    return max(16, 1 << (size - 1).bit_length())
