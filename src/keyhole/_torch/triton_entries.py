# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Single entries of the ReLU Gram matrix around a mean, in float64 on CUDA: for those that a few nodes cannot serve.

One program per entry, every pair of keys by the closed form with Owen's T (see moments.py), which holds for all ρ.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from keyhole._torch.arrays import as_tensor
from keyhole._torch.gram import Panel

_COUNT = 10  # nodes on [0, 1] for Owen's T: error 1e-13
_TINY = tl.constexpr(1e-150)
_HALF_ROOT = tl.constexpr(math.sqrt(0.5))
_PER_ROOT_TWO_PI = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
_PER_TWO_PI = tl.constexpr(0.5 / math.pi)


def _legendre() -> tuple[tuple[float, ...], tuple[float, ...]]:
    nodes, weights = np.polynomial.legendre.leggauss(_COUNT)
    return tuple(float(x) for x in 0.5 + 0.5 * nodes), tuple(float(x) for x in 0.5 * weights)


@triton.jit
def _mass(x):
    """Φ(x), to 1e-16."""
    return 0.5 + 0.5 * tl.erf(x * _HALF_ROOT)


@triton.jit
def _owen(h, y, NODES: tl.constexpr, COUNT: tl.constexpr):
    """Owen's T(h, y/h)."""
    odd = tl.where((h >= 0.0) == (y >= 0.0), 1.0, -1.0)
    h, y = tl.abs(h), tl.abs(y)
    small, large = tl.minimum(h, y), tl.maximum(h, y)
    ratio = small / large
    total = tl.zeros_like(h)
    for i in tl.static_range(COUNT):
        part = ratio * NODES[0][i]
        square = 1.0 + part * part
        total += NODES[1][i] * (tl.exp(-0.5 * (large * large) * square) / square)
    total *= ratio * _PER_TWO_PI
    beyond_h, beyond_y = _mass(-h), _mass(-y)
    swapped = 0.5 * (beyond_h + beyond_y) - beyond_h * beyond_y - total
    return odd * tl.where(y <= h, total, swapped)


@triton.jit
def _moment(h, k, rho, NODES: tl.constexpr, COUNT: tl.constexpr):
    """E(h + U)_+(k + V)_+ for every correlation."""
    h, k = tl.where(tl.abs(h) < _TINY, _TINY, h), tl.where(tl.abs(k) < _TINY, _TINY, k)
    rho = tl.minimum(tl.maximum(rho, -1.0), 1.0)
    gap = 1.0 - tl.abs(rho)
    sign = tl.where(rho >= 0.0, 1.0, -1.0)
    r = tl.maximum(tl.sqrt(gap * (2.0 - gap)), _TINY)
    k_given = ((k - sign * h) + sign * gap * h) / r
    h_given = ((h - sign * k) + sign * gap * k) / r
    opposed = tl.where((h >= 0.0) == (k >= 0.0), 0.0, 0.5)
    both = 0.5 * (_mass(h) + _mass(k)) - opposed
    both = tl.maximum(both - _owen(h, k_given, NODES, COUNT) - _owen(k, h_given, NODES, COUNT), 0.0)
    density = tl.exp(-0.5 * (h * h + k_given * k_given)) * r * _PER_TWO_PI
    tails = h * tl.exp(-0.5 * k * k) * _mass(h_given) + k * tl.exp(-0.5 * h * h) * _mass(k_given)
    return tl.maximum((h * k + rho) * both + tails * _PER_ROOT_TWO_PI + density, 0.0)


@triton.jit
def entry_kernel(
    row_unit, row_query, row_shift, row_weight, row_offsets,
    column_unit, column_query, column_shift, column_weight, column_offsets,
    rows, columns, out, stride, width,
    NODES: tl.constexpr, COUNT: tl.constexpr, SYMMETRIC: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """out[rows[e], columns[e]] for entry e, and its mirror image in the symmetric case."""
    row, column = tl.load(rows + tl.program_id(0)), tl.load(columns + tl.program_id(0))
    query = tl.load(row_query + row * width) * tl.load(column_query + column * width)
    for e in range(1, width):
        query += tl.load(row_query + row * width + e) * tl.load(column_query + column * width + e)
    row_last, column_last = tl.load(row_offsets + row + 1), tl.load(column_offsets + column + 1)
    total = tl.zeros((SIZE, SIZE), tl.float64)
    for start in range(tl.load(row_offsets + row), row_last, SIZE):
        i = start + tl.arange(0, SIZE)
        i_here = i < row_last
        h = tl.load(row_shift + i, mask=i_here, other=0.0)
        i_weight = tl.load(row_weight + i, mask=i_here, other=0.0)
        for other in range(tl.load(column_offsets + column), column_last, SIZE):
            j = other + tl.arange(0, SIZE)
            j_here = j < column_last
            k = tl.load(column_shift + j, mask=j_here, other=0.0)
            j_weight = tl.load(column_weight + j, mask=j_here, other=0.0)
            cosine = tl.zeros((SIZE, SIZE), tl.float64)
            for e in range(width):
                left = tl.load(row_unit + i * width + e, mask=i_here, other=0.0)
                right = tl.load(column_unit + j * width + e, mask=j_here, other=0.0)
                cosine += left[:, None] * right[None, :]
            h_all, k_all = h[:, None] + tl.zeros_like(cosine), k[None, :] + tl.zeros_like(cosine)
            moment = _moment(h_all, k_all, query * cosine, NODES, COUNT)
            total += (moment * cosine) * (i_weight[:, None] * j_weight[None, :])
    value = tl.sum(tl.sum(total, axis=1), axis=0).to(out.dtype.element_ty)
    tl.store(out + row * stride + column, value)
    if SYMMETRIC:
        tl.store(out + column * stride + row, value)


def fill_entries(
    left: Panel, right: Panel, rows: torch.Tensor, columns: torch.Tensor, out: torch.Tensor, *, symmetric: bool
) -> None:
    """Write K[rows[e], columns[e]] into ``out``, and K[columns[e], rows[e]] if symmetric."""
    sides = [
        (p.unit.contiguous(), p.query.contiguous(), p.shift, p.weight, as_tensor(p.offsets.astype(np.int64), p.unit))
        for p in (left, right)
    ]
    entry_kernel[(len(rows),)](
        *sides[0], *sides[1], rows.contiguous(), columns.contiguous(), out, out.stride(0), left.unit.shape[1],
        NODES=_legendre(), COUNT=_COUNT, SYMMETRIC=symmetric, SIZE=16, num_warps=2,
    )  # fmt: skip
