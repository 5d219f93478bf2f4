"""ReLU features on CUDA, in one pass that writes them and nothing else.

Two kernels. Up to 32 coordinates, a thread has one head and holds x~_0ᵀ W_m and Σ_i relu(s_mi) x~_i of a few sets in
registers: the entries of W_m are read once for these sets, keys are the same for all threads, and every product is a
plain float32 multiply-add. Beyond, registers do not suffice: a matrix product puts the projected queries where the
features belong, and a second kernel replaces them, block by block, with tensor cores (three passes of tf32).
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from keyhole._tensors import as_tensor
from keyhole.attention.torch_features import project_queries, seen_query

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment,misc,operator,var-annotated"


_WARP = 32


def fill_relu_features(
    tokens: torch.Tensor,
    offsets: np.ndarray,
    query: torch.Tensor | None,
    heads: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill ``out`` (n, M·D), float32 on CUDA with contiguous rows, with scale · (1/N) Σ_i relu(s_mi) x~_i."""
    fill = fill_in_registers if tokens.shape[1] <= 32 else fill_in_tiles
    return fill(tokens, offsets, query, heads.to(torch.float32), scale, out)


# --- few coordinates -------------------------------------------------------------------------------------------------


def fill_in_registers(
    tokens: torch.Tensor,
    offsets: np.ndarray,
    query: torch.Tensor | None,
    heads: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    sets_at_once: int | None = None,
    step: int | None = None,
) -> torch.Tensor:
    """One thread per head, ``sets_at_once`` sets at a time."""
    n, dim = len(offsets) - 1, tokens.shape[1]
    tokens = tokens.contiguous()  # the kernel counts addresses itself
    length = int(offsets[1] - offsets[0])
    equal = int(offsets[-1]) == n * length and not (np.diff(offsets) != length).any()
    # without a query x~_0 = [√2]: heads are their last rows, a query of no coordinates
    queries, last = (tokens, 2.0**0.5) if query is None else (query.to(torch.float32).contiguous(), 1.0)
    step = step or next(k for k in (4, 2, 1) if dim % k == 0 and tokens.data_ptr() % (4 * k) == 0)
    at_once = sets_at_once or min(4, max(1, 34 // (dim + 1)))
    relu_in_registers[(-(-n // at_once), -(-len(heads) // _WARP))](
        out, tokens, tokens if equal else as_tensor(offsets.astype(np.int64), tokens), queries, in_warps(heads),
        length if equal else 0, n, len(heads), out.stride(0), scale, last,
        EQUAL=equal, DIM=dim, ASKED=heads.shape[1] - 1, LOG=(dim - 1).bit_length(), HEADS=_WARP,
        SETS=at_once, STEP=step, num_warps=1,
    )  # fmt: skip
    return out


def in_warps(heads: torch.Tensor) -> torch.Tensor:
    """W as (warps, D_q, D, 32): every offset in a warp is known. Beyond the last head stands whatever stood there."""
    n_heads, rows, width = heads.shape
    whole = n_heads // _WARP
    turned = torch.empty(-(-n_heads // _WARP), rows, width, _WARP, dtype=heads.dtype, device=heads.device)
    turned[:whole] = heads[: whole * _WARP].reshape(whole, _WARP, rows, width).permute(0, 2, 3, 1)
    if n_heads % _WARP:
        turned[whole, :, :, : n_heads % _WARP] = heads[whole * _WARP :].permute(1, 2, 0)
    return turned


@triton.jit
def _coordinates(x, DIM: tl.constexpr, STEP: tl.constexpr, HEADS: tl.constexpr):
    """The coordinates of one key as a tuple, the same for all threads; STEP of them in one load."""
    values = ()
    if STEP == 4:
        address = x.to(tl.int64) + tl.zeros((HEADS,), tl.int64)
        for k in tl.static_range(DIM // 4):
            values = values + tl.inline_asm_elementwise(
                "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [address + 16 * k],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
    elif STEP == 2:
        pairs = x.to(tl.pointer_type(tl.int64))
        for k in tl.static_range(DIM // 2):
            both = tl.load(pairs + k)
            values = values + (both.to(tl.int32).to(tl.float32, bitcast=True),)
            values = values + ((both >> 32).to(tl.int32).to(tl.float32, bitcast=True),)
    else:
        for k in tl.static_range(DIM):
            values = values + (tl.load(x + k),)
    return values


@triton.jit
def relu_in_registers(
    out, tokens, offsets, query, weights, length, n_sets, n_heads, stride, scale, last,
    EQUAL: tl.constexpr, DIM: tl.constexpr, ASKED: tl.constexpr, LOG: tl.constexpr, HEADS: tl.constexpr,
    SETS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Features of SETS sets and HEADS heads. Tuples hold coordinate e of set s at e·SETS + s, each a value per head.

    Queries have ASKED coordinates, and heads one row more.
    """
    WIDTH: tl.constexpr = DIM + 1
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    here = head < n_heads
    column = weights + tl.program_id(1).to(tl.int64) * ((ASKED + 1) * WIDTH * HEADS) + tl.arange(0, HEADS)
    projected = ()
    for e in tl.static_range(WIDTH):
        row = tl.load(column + (ASKED * WIDTH + e) * HEADS) * last
        for _ in tl.static_range(SETS):
            projected = projected + (row,)
    for a in range(ASKED):
        asked = ()
        for s in tl.static_range(SETS):
            asked = asked + (tl.load(query + min(tl.program_id(0) * SETS + s, n_sets - 1).to(tl.int64) * ASKED + a),)
        moved = ()
        for e in tl.static_range(WIDTH):
            w = tl.load(column + (a * WIDTH + e) * HEADS)
            for s in tl.static_range(SETS):
                moved = moved + (projected[e * SETS + s] + asked[s] * w,)
        projected = moved

    first, size = (), ()
    longest = length
    for s in tl.static_range(SETS):
        a_set = min(tl.program_id(0) * SETS + s, n_sets - 1).to(tl.int64)
        if EQUAL:
            first, size = first + (a_set * length,), size + (length,)
        else:
            start, stop = tl.load(offsets + a_set), tl.load(offsets + a_set + 1)
            first, size = first + (start,), size + (stop - start,)
            longest = max(longest, (stop - start).to(tl.int32))
    total = ()
    for _ in tl.static_range(WIDTH * SETS):
        total = total + (tl.zeros((HEADS,), tl.float32),)
    for i in range(longest):
        x, weight, grown = (), (), ()
        for s in tl.static_range(SETS):
            key = first[s] + i
            if not EQUAL:  # past the end of a set its last key is read again, and weighs nothing
                key = first[s] + min(i, size[s] - 1)
            x = x + _coordinates(tokens + key * DIM, DIM, STEP, HEADS)
            score = projected[DIM * SETS + s]
            for e in tl.static_range(DIM):
                score += projected[e * SETS + s] * x[s * DIM + e]
            positive = tl.maximum(score, 0.0)
            if not EQUAL:
                positive = tl.where(i < size[s], positive, 0.0)
            weight = weight + (positive,)
        for e in tl.static_range(DIM):
            for s in tl.static_range(SETS):
                grown = grown + (total[e * SETS + s] + weight[s] * x[s * DIM + e],)
        for s in tl.static_range(SETS):
            grown = grown + (total[DIM * SETS + s] + weight[s],)
        total = grown

    coordinate = tl.arange(0, 1 << LOG)
    for s in tl.static_range(SETS):
        a_set = tl.program_id(0) * SETS + s
        factor = scale / size[s]
        start_of = out + a_set.to(tl.int64) * stride + head * WIDTH
        inside = here & (a_set < n_sets)
        parts = ()
        for e in tl.static_range(1 << LOG):
            parts = parts + (total[min(e, DIM - 1) * SETS + s] * factor,)
        for level in tl.static_range(LOG):  # join the coordinates to a table, the highest bit of their number first
            joined = ()
            for k in tl.static_range(1 << (LOG - 1 - level)):
                joined = joined + (tl.join(parts[k], parts[k + (1 << (LOG - 1 - level))]),)
            parts = joined
        table = tl.reshape(parts[0], (HEADS, 1 << LOG))
        tl.store(start_of[:, None] + coordinate[None, :], table, mask=inside[:, None] & (coordinate < DIM)[None, :])
        tl.store(start_of + DIM, total[DIM * SETS + s] * factor, mask=inside)


# --- many coordinates ------------------------------------------------------------------------------------------------


def fill_in_tiles(
    tokens: torch.Tensor,
    offsets: np.ndarray,
    query: torch.Tensor | None,
    heads: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    heads_at_once: int = 16,
) -> torch.Tensor:
    """Project all queries into ``out``, then replace them tile by tile: three passes over ``out``."""
    n, dim = len(offsets) - 1, tokens.shape[1]
    project_queries(seen_query(query, n, tokens), heads, out)
    keys = min(64, _power_of_two(int(np.diff(offsets).max())))
    relu_in_tiles[(n, -(-len(heads) // heads_at_once))](
        out, tokens, as_tensor(offsets.astype(np.int64), tokens), len(heads), out.stride(0), scale,
        DIM=dim, PADDED=_power_of_two(dim), HEADS=heads_at_once, KEYS=keys, num_warps=4,
    )  # fmt: skip
    return out


def _power_of_two(size: int) -> int:
    """The next power of two, 16 at least: what a product of tiles takes."""
    return max(16, 1 << (size - 1).bit_length())


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
def relu_in_tiles(
    out, tokens, offsets, n_heads, stride, scale,
    DIM: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Replace x~_0ᵀ W_m by scale/N Σ_i relu(x~_0ᵀ W_m x~_i) x~_i for one set and a block of heads.

    The appended one stays outside of the products, so that d = 64 is a whole number of steps of the tensor cores.
    """
    a_set = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
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
