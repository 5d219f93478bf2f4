"""The exact ReLU Gram matrix on CUDA: inner products, moments and sums over pairs in one kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from keyhole._array import block_size, blocks
from keyhole._tensors import as_tensor
from keyhole.attention.device_kernels import TensorPanel, normal_density, rectified_mean

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
# mypy: disable-error-code="misc,operator,var-annotated"


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
    h = tl.abs(h)
    y = tl.abs(y)
    small = tl.minimum(h, y)
    large = tl.maximum(h, y)
    ratio = small / large
    total = tl.zeros_like(h)
    for i in tl.static_range(COUNT):
        part = ratio * NODES[0][i]
        square = 1.0 + part * part
        total += NODES[1][i] * (tl.exp(-0.5 * (large * large) * square) / square)
    total *= ratio * _PER_TWO_PI
    beyond_h = _mass(-h)
    beyond_y = _mass(-y)
    swapped = 0.5 * (beyond_h + beyond_y) - beyond_h * beyond_y - total
    return odd * tl.where(y <= h, total, swapped)


@triton.jit
def _moment(h, k, rho, NODES: tl.constexpr, COUNT: tl.constexpr):
    """E(h + U)_+(k + V)_+ for every correlation."""
    h = tl.where(tl.abs(h) < _TINY, _TINY, h)
    k = tl.where(tl.abs(k) < _TINY, _TINY, k)
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
    row = tl.load(rows + tl.program_id(0))
    column = tl.load(columns + tl.program_id(0))
    query = tl.load(row_query + row * width) * tl.load(column_query + column * width)
    for e in range(1, width):
        query += tl.load(row_query + row * width + e) * tl.load(column_query + column * width + e)
    row_last = tl.load(row_offsets + row + 1)
    column_last = tl.load(column_offsets + column + 1)
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
            h_all = h[:, None] + tl.zeros_like(cosine)
            k_all = k[None, :] + tl.zeros_like(cosine)
            moment = _moment(h_all, k_all, query * cosine, NODES, COUNT)
            total += (moment * cosine) * (i_weight[:, None] * j_weight[None, :])
    value = tl.sum(tl.sum(total, axis=1), axis=0).to(out.dtype.element_ty)
    tl.store(out + row * stride + column, value)
    if SYMMETRIC:
        tl.store(out + column * stride + row, value)


def fill_entries(
    left: TensorPanel,
    right: TensorPanel,
    rows: torch.Tensor,
    columns: torch.Tensor,
    out: torch.Tensor,
    *,
    symmetric: bool,
) -> None:
    """Write K[rows[e], columns[e]] into ``out``, and K[columns[e], rows[e]] if symmetric."""
    sides = [
        (
            p.unit.contiguous(),
            p.query.contiguous(),
            p.shift,
            p.weight,
            as_tensor(p.offsets.astype(np.int64), p.unit),
        )
        for p in (left, right)
    ]
    entry_kernel[(len(rows),)](
        *sides[0],
        *sides[1],
        rows.contiguous(),
        columns.contiguous(),
        out,
        out.stride(0),
        left.unit.shape[1],
        NODES=_legendre(),
        COUNT=_COUNT,
        SYMMETRIC=symmetric,
        SIZE=16,
        num_warps=2,
    )


TOLERANCE = 3e-7
"""Estimated error of the quadrature, relative to its entry of K, beyond which an entry is computed
again.
"""

QUADRATURES = (3, 4, 6, 8)
"""Numbers of nodes to choose from around a mean."""

PAD = 128
"""Rows of zeros after the last, so that the last tile reads within the array; no tile is longer."""

_SCANNED = 2**29
"""Entries looked through at a time for those to be computed again: torch counts them in 32 bits."""

_LOG2_E = 1.0 / math.log(2.0)


# --- kernels --------------------------------------------------------------------------------------


@triton.jit
def _load_tile(
    base, row, DEPTH: tl.constexpr, COLUMN: tl.constexpr, SIZE: tl.constexpr, SLICE: tl.constexpr
):
    """Rows ``row … row + SIZE − 1`` of a (·, DEPTH) array, SLICE columns of them."""
    inner = tl.arange(0, SIZE)[:, None] * DEPTH + (COLUMN + tl.arange(0, SLICE))[None, :]
    return tl.load(base + row.to(tl.int64) * DEPTH + inner)


@triton.jit
def _cosines(
    a,
    row,
    b,
    column,
    DEPTH: tl.constexpr,
    SLICE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Inner products of consecutive rows of ``a`` with consecutive rows of ``b``.

    The last coordinates are left out.
    """
    total = tl.dot(
        _load_tile(a, row, DEPTH, 0, ROWS, SLICE), _load_tile(b, column, DEPTH, 0, COLUMNS, SLICE).T
    )
    for k in tl.static_range(SLICE, DEPTH, SLICE):
        left = _load_tile(a, row, DEPTH, k, ROWS, SLICE)
        right = _load_tile(b, column, DEPTH, k, COLUMNS, SLICE)
        total = tl.fma(
            tl.dot(left, right.T), 1.0, total
        )  # a plain sum would be made, and truncated, by the tensor cores
    return total


@triton.jit
def _column(base, start, SIZE: tl.constexpr):
    """Consecutive numbers as a column."""
    return tl.load(base + start + tl.arange(0, SIZE))[:, None]


@triton.jit
def _row(base, start, SIZE: tl.constexpr):
    """Consecutive numbers as a row."""
    return tl.load(base + start + tl.arange(0, SIZE))[None, :]


@triton.jit
def _add_last(total, left, right):
    """Add left · right.

    As a sum the compiler would hand it to the tensor cores, to be truncated with the rest.
    """
    left = tl.broadcast(left, total)[0]
    right = tl.broadcast(right, total)[0]
    return tl.fma(left, right, total)


@triton.jit
def _load_weight(base, row, position, count, SIZE: tl.constexpr, RAGGED: tl.constexpr):
    """A number of each key of a level, zero for sets that are too short to have one there."""
    weight = tl.load(base + row + tl.arange(0, SIZE))
    if RAGGED:
        weight = tl.where(position + tl.arange(0, SIZE) < count, weight, 0.0)
    return weight


@triton.jit
def _store_tile(
    out, value, row, column, row_order, column_order, n, m, stride,
    SYMMETRIC: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile.

    In the symmetric case what lies on or above the diagonal, and its mirror image.
    """
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    inside = (rows[:, None] < n) & (columns[None, :] < m)
    if SYMMETRIC:
        inside = inside & (rows[:, None] <= columns[None, :])
    row_sets = tl.load(row_order + rows, mask=rows < n, other=0).to(tl.int64)
    column_sets = tl.load(column_order + columns, mask=columns < m, other=0).to(tl.int64)
    tl.store(out + row_sets[:, None] * stride + column_sets[None, :], value, mask=inside)
    if SYMMETRIC:
        there = column_sets[:, None] * stride + row_sets[None, :]
        tl.store(out + there, tl.trans(value), mask=tl.trans(inside))


@triton.jit
def _arc(rho):
    """2 κ(ρ) = max(ρ, 0) + y^{3/2} p(y) with y = 1 − |ρ|.

    The polynomial p is by least squares of the product, with error 8e-9.
    """
    y = tl.abs(1.0 - tl.abs(rho))  # below zero by rounding only, and then y^{3/2} is nothing
    p = 0.00022173397883307189 * y - 0.00017392460722476244
    p = p * y + 0.0008317041210830212
    p = p * y + 0.002299732994288206
    p = p * y + 0.015026639215648174
    p = p * y + 0.3001039922237396
    return tl.maximum(rho, 0.0) + (y * tl.sqrt(y)) * p


@triton.jit
def arc_kernel(
    row_keys,
    row_last,
    row_weight,
    row_query,
    row_query_last,
    row_order,
    row_level,
    column_keys,
    column_last,
    column_weight,
    column_query,
    column_query_last,
    column_order,
    column_level,
    tiles,
    out,
    n,
    m,
    stride,
    SYMMETRIC: tl.constexpr,
    RAGGED: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """K of one tile of sets for zero mean.

    Weights carry lengths, deviations and 1/N; rows' a factor 1/2 as well.
    """
    tile = tiles + 4 * tl.program_id(0)
    row = tl.load(tile) * ROWS
    column = tl.load(tile + 1) * COLUMNS
    query = _cosines(row_query, row, column_query, column, DEPTH, SLICE, ROWS, COLUMNS)
    query = _add_last(
        query, _column(row_query_last, row, ROWS), _row(column_query_last, column, COLUMNS)
    )
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(tl.load(tile + 2)):
        start = tl.load(row_level + i)
        last = _column(row_last, start + row, ROWS)
        row_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.range(tl.load(tile + 3), num_stages=STAGES):
            other = tl.load(column_level + j)
            weight = _load_weight(
                column_weight,
                other + column,
                column,
                tl.load(column_level + j + 1) - other,
                COLUMNS,
                RAGGED,
            )
            cosine = _cosines(
                row_keys, start + row, column_keys, other + column, DEPTH, SLICE, ROWS, COLUMNS
            )
            cosine = _add_last(cosine, last, _row(column_last, other + column, COLUMNS))
            row_sum += (_arc(query * cosine) * cosine) * weight[None, :]
        weight = _load_weight(
            row_weight, start + row, row, tl.load(row_level + i + 1) - start, ROWS, RAGGED
        )
        total += weight[:, None] * row_sum
    _store_tile(
        out, total, row, column, row_order, column_order, n, m, stride, SYMMETRIC, ROWS, COLUMNS
    )


@triton.jit
def _rectified(rho, square, h, k, NODES: tl.constexpr, COUNT: tl.constexpr):
    """∫_0^1 (1 − s) φ₂(h, k; ρs) ds / φ(h)φ(k).

    For h and k in units in which the exponent is one of 2.

    (1 − t²)^{-1/2} 2^{(thk − t²(h² + k²)/2)/(1 − t²)} at t = ρs, by Gauss–Jacobi nodes. Scaling 1 −
    t² by 1/s saves a multiplication: r = √s (1 − t²)^{-1/2}, and the weights carry s^{-1/2}. For
    small s that root is a short series in ρ², which relieves the unit of special functions.
    """
    cross = rho * (h * k)
    spread = square * (0.5 * (h * h) + 0.5 * (k * k))
    total = tl.zeros_like(rho)
    for i in tl.static_range(COUNT):
        if NODES[0][i] < 0.1:
            r = NODES[3][i] + square * (NODES[4][i] + NODES[5][i] * square)
        elif NODES[0][i] < 0.3:
            r = NODES[6][i] + NODES[7][i] * square
            r = NODES[5][i] + r * square
            r = NODES[4][i] + r * square
            r = NODES[3][i] + r * square
        else:
            r = tl.rsqrt(NODES[2][i] - NODES[0][i] * square)
        total += NODES[1][i] * (r * tl.exp2((cross - NODES[0][i] * spread) * (r * r)))
    return total


@triton.jit
def _add_power(total, square, COUNT: tl.constexpr):
    """Add ρ^{4·COUNT}, which the error of COUNT nodes grows like, given ρ²."""
    fourth = square * square
    eighth = fourth * fourth
    if COUNT == 3:
        total += eighth * fourth
    elif COUNT == 4:
        total += eighth * eighth
    elif COUNT == 6:
        total += (eighth * eighth) * eighth
    else:
        total += (eighth * eighth) * (eighth * eighth)
    return total


@triton.jit
def rectified_kernel(
    row_keys,
    row_last,
    row_parts,
    row_query,
    row_query_last,
    row_order,
    row_level,
    row_density,
    row_count,
    column_keys,
    column_last,
    column_parts,
    column_query,
    column_query_last,
    column_order,
    column_level,
    column_density,
    column_count,
    tiles,
    out,
    n,
    m,
    stride,
    error_scale,
    NODES: tl.constexpr,
    COUNT: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    RAGGED: tl.constexpr,
    DEPTH: tl.constexpr,
    SLICE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """K of one tile of sets around a mean.

    m = ψ(h)ψ(k) + ρ Φ(h)Φ(k) + ρ² φ(h)φ(k) ∫ (1 − s) …, see `_rectified`.

    ``parts`` are four vectors over the keys: h, and weight times ψ(h), Φ(h), φ(h). ``density``
    bounds what φ₂(h, k; ρ) can be, one factor for each set. NaN marks entries whose error of
    quadrature may be too large: error_scale · Σ ρ^{4·COUNT} times the densities.
    """
    tile = tiles + 4 * tl.program_id(0)
    row = tl.load(tile) * ROWS
    column = tl.load(tile + 1) * COLUMNS
    query = _cosines(row_query, row, column_query, column, DEPTH, SLICE, ROWS, COLUMNS)
    query = _add_last(
        query, _column(row_query_last, row, ROWS), _row(column_query_last, column, COLUMNS)
    )
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    error = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(tl.load(tile + 2)):
        start = tl.load(row_level + i)
        here = start + row
        present = tl.load(row_level + i + 1) - start
        last = _column(row_last, here, ROWS)
        h = _column(row_parts, here, ROWS)
        h_mean = _load_weight(row_parts + row_count, here, row, present, ROWS, RAGGED)[:, None]
        h_mass = _load_weight(row_parts + 2 * row_count, here, row, present, ROWS, RAGGED)[:, None]
        h_density = _load_weight(row_parts + 3 * row_count, here, row, present, ROWS, RAGGED)[
            :, None
        ]
        row_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        for j in tl.range(tl.load(tile + 3), num_stages=STAGES):
            other = tl.load(column_level + j)
            there = other + column
            known = tl.load(column_level + j + 1) - other
            k = _row(column_parts, there, COLUMNS)
            k_mean = _load_weight(
                column_parts + column_count, there, column, known, COLUMNS, RAGGED
            )[None, :]
            k_mass = _load_weight(
                column_parts + 2 * column_count, there, column, known, COLUMNS, RAGGED
            )[None, :]
            k_density = _load_weight(
                column_parts + 3 * column_count, there, column, known, COLUMNS, RAGGED
            )[None, :]
            cosine = _cosines(row_keys, here, column_keys, there, DEPTH, SLICE, ROWS, COLUMNS)
            cosine = _add_last(cosine, last, _row(column_last, there, COLUMNS))
            rho = query * cosine
            square = tl.minimum(rho * rho, 1.0)
            density = h_density * k_density
            moment = h_mean * k_mean + rho * (h_mass * k_mass)
            moment += (density * square) * _rectified(rho, square, h, k, NODES, COUNT)
            row_sum += moment * cosine
            error = _add_power(error, square, COUNT)
        total += row_sum
    density = _column(row_density, row, ROWS) * _row(column_density, column, COLUMNS)
    total = tl.where(density * (error * error_scale) > tl.abs(total), float("nan"), total)
    _store_tile(
        out, total, row, column, row_order, column_order, n, m, stride, SYMMETRIC, ROWS, COLUMNS
    )


# --- what they are given --------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiling:
    """Sets per tile, warps per program and depth of the pipeline."""

    rows: int = 64
    columns: int = 32
    warps: int = 4
    stages: int = 2
    registers: int | None = 168  # three programs at a time on a multiprocessor


@dataclass(frozen=True)
class Operand:
    """A panel as the kernels take it: sets by length, the longest first, and keys level by level.

    Level j holds key j of every set that has one. Those are the first sets of the order, so that
    key j of the set at position p is row level[j] + p, and a tile of sets reads consecutive rows at
    every level.
    """

    keys: torch.Tensor  # (t + pad, DEPTH) half precision, stacked for the side it stands on
    last: torch.Tensor  # (t + pad,) float32, 1/|x~|
    weight: torch.Tensor  # (t + pad,) or (4, t + pad) float32
    query: torch.Tensor  # (n + pad, DEPTH)
    query_last: torch.Tensor  # (n + pad,)
    order: torch.Tensor  # (n,)
    level: torch.Tensor  # (longest + 1,)
    density: torch.Tensor  # (n + pad,) largest weight times √φ₂ can be, whatever ρ: e^{−h²/4}/√2π
    lengths: np.ndarray  # (n,) by length, on the host

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """As the kernels name them."""
        return (
            self.keys,
            self.last,
            self.weight,
            self.query,
            self.query_last,
            self.order,
            self.level,
        )

    @property
    def ragged(self) -> bool:
        """Whether lengths differ."""
        return bool(self.lengths[0] != self.lengths[-1])


def stack_halves(unit: torch.Tensor, *, right: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[hi, hi, lo], or [hi, lo, hi] on the right; and the last column.

    With zeros up to what the tensor cores take.
    """
    high = unit[:, :-1].to(torch.float16)
    low = (unit[:, :-1] - high).to(torch.float16)
    width = 3 * high.shape[1]
    depth = max(16, 1 << (width - 1).bit_length()) if width <= 64 else 64 * -(-width // 64)
    parts = (high, low, high) if right else (high, high, low)
    stacked = torch.nn.functional.pad(torch.cat(parts, dim=1), (0, depth - width, 0, PAD))
    return stacked, _padded(unit[:, -1])


def _padded(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(vector.to(torch.float32), (0, PAD)).contiguous()


def operand(panel: TensorPanel, *, right: bool, biased: bool) -> Operand:
    """Sort, split and stack a panel."""
    lengths = np.diff(panel.offsets)
    if lengths.min() == lengths.max():
        n = len(lengths)
        longest = int(lengths[0])
        order = np.arange(n)
        level = n * np.arange(longest + 1)
        rows = torch.arange(n * longest, device=panel.unit.device).view(n, longest).T.reshape(-1)
    else:
        order = np.argsort(-lengths, kind="stable")
        lengths = lengths[order]
        level, source = _levels(panel.offsets[:-1][order], lengths)
        rows = as_tensor(source, panel.unit)
    by_length = as_tensor(order, panel.unit)
    if biased:
        parts = _parts(panel)
        weight = parts[:, rows]
        bound = panel.weight * torch.exp(-0.25 * panel.shift.square()) / math.sqrt(2.0 * math.pi)
        density = torch.segment_reduce(bound, "max", offsets=as_tensor(panel.offsets, panel.unit))[
            by_length
        ]
    else:
        weight = (panel.weight if right else 0.5 * panel.weight)[rows]
        density = panel.query[:, 0]  # not read
    return Operand(
        *stack_halves(panel.unit[rows], right=right),
        _padded(weight),
        *stack_halves(panel.query[by_length], right=right),
        by_length.to(torch.int32),
        as_tensor(level.astype(np.int32), panel.unit),
        _padded(density),
        lengths,
    )


def _levels(first: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each level starts, and which token each row is.

    For sets in order of falling lengths.
    """
    n_sets = len(lengths) - np.searchsorted(lengths[::-1], np.arange(lengths[0]), side="right")
    level = np.concatenate([[0], np.cumsum(n_sets)])
    number = np.repeat(np.arange(lengths[0]), n_sets)
    position = np.arange(level[-1]) - level[number]
    return level, first[position] + number


def _parts(panel: TensorPanel) -> torch.Tensor:
    """h scaled so that exponents are of base 2, and the weight times ψ(h), Φ(h), φ(h)."""
    h = panel.shift
    weight = panel.weight
    return torch.stack([
        h.clamp(-12.0, 12.0) * math.sqrt(_LOG2_E),  # beyond, φ(h) = 5e-33 has nothing to weigh
        weight * rectified_mean(h),
        weight * torch.special.ndtr(h),
        weight * normal_density(h),
    ])  # fmt: skip


@cache
def quadrature(count: int) -> tuple[tuple[tuple[float, ...], ...], float]:
    """Constants of `_rectified`, and the largest error over ρ^{4·count} at h = k = 0.

    The constants are s, weights over √s, 1/s, and the series of √s (1 − s²z)^{-1/2} in z.

    Nodes are those of Gauss–Jacobi for the weight 1 − s on [0, 1], from the Jacobi matrix of its
    polynomials.
    """
    i = np.arange(count)
    diagonal = -1.0 / ((2 * i + 1.0) * (2 * i + 3.0))
    i = np.arange(1, count)
    beside = np.sqrt(i * (i + 1.0)) / (2 * i + 1.0)
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    nodes = 0.5 * (1.0 + values)
    weights = 0.5 * vectors[0] ** 2
    rho = np.linspace(0.5, 1.0, 200)  # below, the error is less than 1e-7 anyway
    exact = (np.sqrt(1 - rho**2) - 1 + rho * np.arcsin(rho)) / rho**2
    sums = (weights / np.sqrt(1 - np.square(rho[:, None] * nodes))).sum(axis=1)
    error = np.abs(sums - exact)
    worst = float(np.where(error > 1e-13, error * rho**2 / rho ** (4 * count), 0.0).max())
    roots = [
        np.sqrt(nodes) * c * nodes ** (2 * i)
        for i, c in enumerate((1.0, 1 / 2, 3 / 8, 5 / 16, 35 / 128))
    ]
    constants = (nodes, weights / np.sqrt(nodes), 1.0 / nodes, *roots)
    return tuple(tuple(float(x) for x in row) for row in constants), worst


@lru_cache(maxsize=8)
def _tile_grid(
    n_rows: int, n_columns: int, symmetric: bool, tiling: Tiling
) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = (x.ravel() for x in np.indices((n_rows, n_columns)))
    if not symmetric:
        return rows, columns
    above = (columns + 1) * tiling.columns > rows * tiling.rows
    return rows[above], columns[above]


def _tiles(left: Operand, right: Operand, symmetric: bool, tiling: Tiling) -> torch.Tensor:
    """(tiles, 4): coordinates, and the longest lengths of rows and columns; the most work first."""
    n_rows = -(-len(left.lengths) // tiling.rows)
    n_columns = -(-len(right.lengths) // tiling.columns)
    rows, columns = _tile_grid(n_rows, n_columns, symmetric, tiling)
    longest = left.lengths[rows * tiling.rows]
    widest = right.lengths[columns * tiling.columns]
    tiles = np.stack([rows, columns, longest, widest], axis=1).astype(np.int32)
    if left.ragged or right.ragged:
        tiles = tiles[np.argsort(-longest * widest, kind="stable")]
    return as_tensor(tiles, left.keys)


def launch(
    left: Operand,
    right: Operand,
    out: torch.Tensor,
    *,
    symmetric: bool,
    tiling: Tiling,
    nodes: int | None,
) -> None:
    """Fill ``out`` (n, m) float32; around a mean with so many nodes, NaN where they are too few."""
    tiles = _tiles(left, right, symmetric, tiling)
    depth = left.keys.shape[1]
    shape: dict[str, Any] = {
        "SYMMETRIC": symmetric,
        "RAGGED": left.ragged or right.ragged,
        "DEPTH": depth,
        "SLICE": min(depth, 64),
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "STAGES": tiling.stages,
        "num_warps": tiling.warps,
        "maxnreg": tiling.registers,
    }
    a = left.arguments()
    b = right.arguments()
    size = (len(left.order), len(right.order), out.stride(0))
    if nodes is None:
        arc_kernel[(len(tiles),)](*a, *b, tiles, out, *size, **shape)
        return
    constants, worst = quadrature(nodes)
    rectified_kernel[(len(tiles),)](
        *a,
        left.density,
        len(left.keys),
        *b,
        right.density,
        len(right.keys),
        tiles,
        out,
        *size,
        worst / TOLERANCE,
        NODES=constants,
        COUNT=nodes,
        **shape,
    )


def _of_one_width(panel: TensorPanel) -> TensorPanel:
    """The panel with zeros before the appended one of keys or queries, whichever are narrower.

    No cosine changes.
    """
    short = panel.unit.shape[1] - panel.query.shape[1]
    if short == 0:
        return panel
    vectors = panel.query if short > 0 else panel.unit
    zeros = torch.zeros(len(vectors), abs(short), dtype=vectors.dtype, device=vectors.device)
    padded = torch.cat([vectors[:, :-1], zeros, vectors[:, -1:]], dim=1)
    return replace(panel, query=padded) if short > 0 else replace(panel, unit=padded)


def fused_gram(
    left: TensorPanel,
    right: TensorPanel | None,
    biased: bool,
    out: torch.Tensor,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Fill ``out`` (n, m), float32 on CUDA, with the ReLU kernel.

    Without ``right`` exactly symmetric.
    """
    symmetric = right is None
    left = _of_one_width(left)
    columns = left if right is None else _of_one_width(right)
    tiling = Tiling() if tiling is None else tiling
    a = operand(left, right=False, biased=biased)
    b = operand(columns, right=True, biased=biased)
    if not biased:
        launch(a, b, out, symmetric=symmetric, tiling=tiling, nodes=None)
        return out
    nodes = choose_nodes(left, columns)
    launch(a, b, out, symmetric=symmetric, tiling=tiling, nodes=nodes)
    for part in blocks(len(out), block_size(out.shape[1], _SCANNED)):
        missing = torch.nonzero(torch.isnan(out[part]))
        i = missing[:, 0] + part.start
        j = missing[:, 1]
        if symmetric:
            i, j = i[i <= j], j[i <= j]
        if len(i):
            fill_entries(left, columns, i, j, out, symmetric=symmetric)
    return out


def choose_nodes(
    left: TensorPanel, right: TensorPanel, n_samples: int = 1024, share: float = 1e-3
) -> int:
    """The fewest nodes whose error is small enough on all but ``share`` of some entries.

    Entries are taken at fixed strides.
    """
    n = len(left.offsets) - 1
    m = len(right.offsets) - 1
    device = left.unit.device
    steps = torch.arange(n_samples, device=device)
    rows = (steps * 7919) % n
    columns = (steps * 104729 + 1) % m
    # one key of each set per sample stands for the rest: 32 draws of a pair for each pair of sets
    first = as_tensor(left.offsets, steps)
    second = as_tensor(right.offsets, steps)
    turn = torch.arange(32, device=device)
    i = first[rows][:, None] + (turn * 13) % (first[rows + 1] - first[rows])[:, None]
    j = (
        second[columns][:, None]
        + (turn * 29 + turn // 7) % (second[columns + 1] - second[columns])[:, None]
    )
    query = (left.query[rows] * right.query[columns]).sum(dim=1)
    rho = (left.unit[i] * right.unit[j]).sum(dim=2) * query[:, None]
    h = left.shift[i]
    k = right.shift[j]
    scale = torch.exp(-0.5 * (h * h + k * k)) / (2.0 * math.pi)
    scale = (torch.clamp(h, min=0.0) * torch.clamp(k, min=0.0) + scale).mean(dim=1)
    density = torch.exp(-0.25 * (h * h + k * k)).amax(dim=1) / (2.0 * math.pi)
    shares = [
        (density * (rho ** (4 * count)).mean(dim=1) * (quadrature(count)[1] / TOLERANCE) > scale)
        .double()
        .mean()
        for count in QUADRATURES
    ]
    good = (torch.stack(shares) <= share).cpu().numpy()
    return QUADRATURES[int(np.argmax(good))] if good.any() else QUADRATURES[-1]
