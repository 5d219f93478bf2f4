"""Compiled loops of the finite-head features.

Vectorised across heads, one tile of heads in cache at a time.

All arithmetic is "few rows times a wide matrix whose columns are heads", C (R × w) = A (R × K) · B
(K × w):

    queries   rows are sets,        K = D coordinates of x~_0,  columns (coordinate, head)
    scores    rows are keys,        K = D coordinates of x~_i,  columns are heads
    values    rows are coordinates, K = keys,                   columns are heads

so one register kernel serves all three. It is written as LLVM vectors: on a Zen 4 core, at 16 ×
16 × 64 in float32, loops left to the compiler's vectoriser reached 38 GFLOP/s, this 105, a large
matrix product 106.

All compiled code of the features is in this one file, because numba's cache notices a change of the
file it compiled from and of no other.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from keyhole._compiled import cached_njit

VECTOR_BYTES = 64
"""Heads are handled 64 bytes at a time: one register of AVX-512, two of AVX2, four of NEON."""

GROUP = 12
"""Sets whose queries are projected together, so that a tile of heads is read once for all of
them.
"""

CHUNK = 32
"""Keys whose scores are held at a time, so that a set of any size needs the same small
workspace.
"""

# the numbers of the activations: their places in registry.ACTIVATIONS
RELU, LINEAR, SQUARE, STEP, EXP, SOFTMAX = range(6)

# Contraction to fused multiply-adds and free order of sums; NaN and infinity keep their meaning.
_compiled = cached_njit(nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})
# The exponential splits its argument exactly, so the order of its sums is part of it.
_ordered = cached_njit(nogil=True, error_model="numpy", fastmath={"contract"})


class _Lanes:
    """What the vector kernels share: vectors of one array's numbers, loaded, stored and spread."""

    def __init__(self, context, builder, array_type):
        self.builder = builder
        self.number = context.get_value_type(array_type.dtype)
        self.size = array_type.dtype.bitwidth // 8
        self.count = VECTOR_BYTES // self.size
        self.vector = ir.VectorType(self.number, self.count)

    def load(self, base, offset):
        pointer = self.builder.bitcast(self.builder.gep(base, [offset]), self.vector.as_pointer())
        return self.builder.load(pointer, align=self.size)

    def store(self, value, base, offset):
        pointer = self.builder.bitcast(self.builder.gep(base, [offset]), value.type.as_pointer())
        self.builder.store(value, pointer, align=self.size)

    def spread(self, scalar):
        undefined = ir.Constant(self.vector, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        return self.shuffle(first, undefined, [0] * self.count)

    def shuffle(self, x, y, order):
        return self.builder.shuffle_vector(
            x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order)
        )

    def plus(self, start, stride, times):
        """``start + stride · times``, where ``times`` is a Python int."""
        return self.builder.add(start, self.builder.mul(stride, ir.Constant(stride.type, times)))


def _array(context, builder, array_type, value):
    return cgutils.create_struct_proxy(array_type)(context, builder, value=value)


def _panel(rows):
    """Return the register kernel for ``rows`` rows and one vector of columns."""

    @intrinsic
    def panel(typing, a, start, row, step, b, c, r, h, add):
        """C[r:r+rows, h:h+lanes] = (that, if ``add``) + A·B.

        With A[i, k] = a[start + i·row + k·step].
        """
        signature = types.void(a, start, row, step, b, c, r, h, add)

        def generate(context, builder, signature, args):
            lanes = _Lanes(context, builder, signature.args[0])
            _, start, row, step, _, _, r, h, add = args
            a, b, c = (_array(context, builder, signature.args[i], args[i]) for i in (0, 4, 5))
            depth, width = cgutils.unpack_tuple(builder, b.shape, 2)

            # where each row of C begins, and a register for its sums
            corner = builder.add(builder.mul(r, width), h)
            targets = [lanes.plus(corner, width, i) for i in range(rows)]
            sums = [cgutils.alloca_once(builder, lanes.vector) for _ in range(rows)]

            # start from C where `add`, else from zero
            is_adding = builder.icmp_signed("!=", add, ir.Constant(add.type, 0))
            with builder.if_else(is_adding) as (then, otherwise):
                with then:
                    for total, target in zip(sums, targets, strict=True):
                        builder.store(lanes.load(c.data, target), total)
                with otherwise:
                    for total in sums:
                        builder.store(ir.Constant(lanes.vector, None), total)

            # one vector of B for all rows: row i adds A[i, k] times it
            with cgutils.for_range(builder, depth) as loop:
                wide = lanes.load(b.data, builder.add(builder.mul(loop.index, width), h))
                along = builder.add(start, builder.mul(loop.index, step))
                for i, total in enumerate(sums):
                    scalar = builder.load(builder.gep(a.data, [lanes.plus(along, row, i)]))
                    product = builder.fmul(lanes.spread(scalar), wide, flags=("contract",))
                    builder.store(
                        builder.fadd(builder.load(total), product, flags=("contract",)), total
                    )

            for total, target in zip(sums, targets, strict=True):
                lanes.store(builder.load(total), c.data, target)
            return context.get_dummy_value()

        return signature, generate

    return panel


def _turn(rows):
    """Return the kernel that writes ``rows`` rows of one vector of heads.

    They are written as so many columns of the output.
    """

    @intrinsic
    def turn(typing, a, corner, width, out, start, stride):
        """out[start + i·stride + j] = a[corner + j·width + i] for j < rows and every lane i."""
        signature = types.void(a, corner, width, out, start, stride)

        def generate(context, builder, signature, args):
            lanes = _Lanes(context, builder, signature.args[0])
            _, corner, width, _, start, stride = args
            a, out = (_array(context, builder, signature.args[i], args[i]) for i in (0, 3))
            block = [lanes.load(a.data, lanes.plus(corner, width, j)) for j in range(rows)]

            # transpose every rows × rows square, exchanging ever smaller quarters
            half = rows // 2
            while half:
                low = [i if not i & half else lanes.count + i - half for i in range(lanes.count)]
                high = [i + half if not i & half else lanes.count + i for i in range(lanes.count)]
                for j in range(rows):
                    if not j & half:
                        x = block[j]
                        y = block[j + half]
                        block[j] = lanes.shuffle(x, y, low)
                        block[j + half] = lanes.shuffle(x, y, high)
                half //= 2

            # row i of the transposed square is a piece of one vector
            for i in range(lanes.count):
                square, j = divmod(i, rows)
                piece = lanes.shuffle(
                    block[j], block[j], list(range(square * rows, (square + 1) * rows))
                )
                lanes.store(piece, out.data, lanes.plus(start, stride, i))
            return context.get_dummy_value()

        return signature, generate

    return turn


# six rows: twelve sums in the sixteen registers of AVX2 (eight spill, at half the speed), six of
# AVX-512's
_panel_6 = _panel(6)
_panel_4 = _panel(4)
_panel_2 = _panel(2)
_panel_1 = _panel(1)
_turn_8 = _turn(8)
_turn_4 = _turn(4)


@_compiled
def _multiply(a, start, row, step, b, c, rows, add):
    """Rows of C = A·B, or of C += A·B where ``add``.

    A[i, k] = a[start + i·row + k·step], a flat.
    """
    lanes = VECTOR_BYTES // a.itemsize
    for h in range(0, b.shape[1], lanes):
        r = 0
        while r + 6 <= rows:
            _panel_6(a, start + r * row, row, step, b, c, r, h, add)
            r += 6
        if r + 4 <= rows:
            _panel_4(a, start + r * row, row, step, b, c, r, h, add)
            r += 4
        if r + 2 <= rows:
            _panel_2(a, start + r * row, row, step, b, c, r, h, add)
            r += 2
        if r < rows:
            _panel_1(a, start + r * row, row, step, b, c, r, h, add)


# exp(x) = 2^n · exp(r): n is the integer nearest to x / log 2, read from the last bits of x / log
# 2 + SHIFT; log 2 is in two parts so that r is exact, |r| ≤ log(2)/2, and exp(r) is its Taylor
# series. The error stays below 0.7 units in the last place; NaN becomes infinity, which the callers
# report. Written out because a library call for each score does not vectorise.
_SERIES_64 = tuple(1.0 / math.factorial(k) for k in range(13, -1, -1))
_SERIES_32 = tuple(np.float32(1.0 / math.factorial(k)) for k in range(7, -1, -1))
_LOG2_64 = (0.6931471803691238, 1.9082149292705877e-10)
_LOG2_32 = (np.float32(0.693115234375), np.float32(3.1946184945309415e-05))
_INVERSE_64 = 1.0 / math.log(2.0)
_INVERSE_32 = np.float32(1.0 / math.log(2.0))
_SHIFT_64 = 1.5 * 2.0**52
_SHIFT_32 = np.float32(1.5 * 2.0**23)
_SHIFT_BITS_64 = np.float64(_SHIFT_64).view(np.int64)
_SHIFT_BITS_32 = np.float32(_SHIFT_32).view(np.int32)
_RANGE_64 = (-746.0, 710.0)  # beyond: exactly 0, and infinity
_RANGE_32 = (np.float32(-104.0), np.float32(89.0))


@_ordered
def _exp_64(x):
    """exp(x) in float64."""
    # to the range in which the result is neither 0 nor infinity, and just beyond
    x = x if x < _RANGE_64[1] else _RANGE_64[1]
    x = x if x > _RANGE_64[0] else _RANGE_64[0]
    # n and r of x = n log 2 + r
    shifted = x * _INVERSE_64 + _SHIFT_64
    n = shifted - _SHIFT_64
    r = (x - n * _LOG2_64[0]) - n * _LOG2_64[1]
    # exp(r), by Horner's scheme
    series = 0.0
    for c in _SERIES_64:
        series = series * r + c
    # 2^n in two factors, so that neither leaves the range of exponents
    bits = np.float64(shifted).view(np.int64) - _SHIFT_BITS_64
    half = bits >> 1
    rest = bits - half
    return (
        series
        * np.int64((half + 1023) << 52).view(np.float64)
        * np.int64((rest + 1023) << 52).view(np.float64)
    )


@_ordered
def _exp_32(x):
    """exp(x) in float32, step by step as `_exp_64`."""
    x = x if x < _RANGE_32[1] else _RANGE_32[1]
    x = x if x > _RANGE_32[0] else _RANGE_32[0]
    shifted = x * _INVERSE_32 + _SHIFT_32
    n = shifted - _SHIFT_32
    r = (x - n * _LOG2_32[0]) - n * _LOG2_32[1]
    series = np.float32(0.0)
    for c in _SERIES_32:
        series = series * r + c
    bits = np.int32(np.float32(shifted).view(np.int32) - _SHIFT_BITS_32)
    half = np.int32(bits >> np.int32(1))
    rest = np.int32(bits - half)
    bias = np.int32(127)
    mantissa = np.int32(23)
    return (
        series
        * np.int32((half + bias) << mantissa).view(np.float32)
        * np.int32((rest + bias) << mantissa).view(np.float32)
    )


def _exp(x):
    """exp(x) in the type of x, for compiled code only."""


@overload(_exp)
def _choose_exp(x):
    if x == types.float32:
        return lambda x: _exp_32(x)
    return lambda x: _exp_64(x)


@_compiled
def _weigh(scores, code, scale):
    """σ(s)·scale for every score, in place. Comparisons are such that NaN stays NaN."""
    zero = scores.dtype.type(0)  # an integer 0 would turn float32 into float64
    if code == RELU:
        for i in range(len(scores)):
            scores[i] = zero if scores[i] < zero else scores[i] * scale
    elif code == LINEAR:
        for i in range(len(scores)):
            scores[i] *= scale
    elif code == SQUARE:
        for i in range(len(scores)):
            scores[i] *= scores[i] * scale
    elif code == STEP:
        for i in range(len(scores)):
            scores[i] = scale if scores[i] > zero else (zero if scores[i] <= zero else scores[i])
    elif code == EXP:
        for i in range(len(scores)):
            scores[i] = _exp(scores[i]) * scale
    else:
        raise ValueError("an activation of this number has no compiled loop")


class Workspace(NamedTuple):
    """Arrays that one thread works in.

    They are made outside the compiled code because that compiles faster.
    """

    queries: Any  # (GROUP, D, width): x~_0ᵀ W of a group of sets
    scores: Any  # (CHUNK, width)
    total: Any  # (D · width,): the features of one set, heads last
    peak: Any  # (width,): largest score so far, for softmax
    highest: Any  # (width,)
    norm: Any  # (width,): sum of exp(s − peak)


def workspace(heads: np.ndarray) -> Workspace:
    """Return a workspace for tiles of heads (T, D_q, D, width)."""
    D, width = heads.shape[2:]
    shapes = {
        "queries": (GROUP, D, width),
        "scores": (CHUNK, width),
        "total": (D * width,),
        "peak": (width,),
        "highest": (width,),
        "norm": (width,),
    }

    # All arrays are parts of one buffer that starts on a cache line. Then every row does, because
    # width is a whole number of vectors.
    n_numbers = sum(math.prod(shape) for shape in shapes.values())
    buffer = np.empty(n_numbers * heads.itemsize + VECTOR_BYTES, np.uint8)
    start = -buffer.ctypes.data % VECTOR_BYTES
    arrays = {}
    for name, shape in shapes.items():
        stop = start + math.prod(shape) * heads.itemsize
        arrays[name] = buffer[start:stop].view(heads.dtype).reshape(shape)
        start = stop
    return Workspace(
        queries=arrays["queries"],
        scores=arrays["scores"],
        total=arrays["total"],
        peak=arrays["peak"],
        highest=arrays["highest"],
        norm=arrays["norm"],
    )


@_compiled
def _scale_heads(total, factors):
    """Multiply every coordinate of head h by ``factors[h]``."""
    width = len(factors)
    for start in range(0, len(total), width):
        # a view with indices from 0: an index that might be negative is not vectorised
        row = total[start : start + width]
        for h in range(width):
            row[h] *= factors[h]


@_compiled
def _soften(work, count, first):
    """Turn scores into exp(s − peak), and bring earlier sums to the new peak.

    ``peak`` is the largest so far.
    """
    scores = work.scores
    peak = work.peak
    highest = work.highest
    norm = work.norm
    width = len(peak)

    # the largest score of each head, earlier keys of the set included
    for h in range(width):
        highest[h] = scores[0, h] if first else peak[h]
    for k in range(count):
        for h in range(width):
            highest[h] = scores[k, h] if scores[k, h] > highest[h] else highest[h]

    # what was summed relative to the old peak becomes relative to the new one
    if first:
        norm[:] = 0
    else:
        for h in range(width):
            peak[h] = _exp(peak[h] - highest[h])
            norm[h] *= peak[h]
        _scale_heads(work.total, peak)

    # the weights of these keys before they are normalised
    for k in range(count):
        for h in range(width):
            weight = _exp(scores[k, h] - highest[h])
            scores[k, h] = weight
            norm[h] += weight
    for h in range(width):
        peak[h] = highest[h]


@_compiled
def _attend(keys, start, stop, slot, code, scale, work):
    """φ of one set for one tile of heads, into ``work.total``: scale · Σ_i weight_i x~_i.

    Keys are flat.
    """
    total = work.total
    norm = work.norm
    width = len(norm)
    D = len(total) // width
    for first in range(start, stop, CHUNK):
        count = min(CHUNK, stop - first)
        scores = work.scores[:count]
        # s_mi = x~_0ᵀ W_m x~_i, then the weights in their place, then Σ_i weight_i x~_i
        _multiply(keys, first * D, D, 1, work.queries[slot], scores, count, 0)
        if code == SOFTMAX:
            _soften(work, count, first == start)
        else:
            _weigh(scores.reshape(-1), code, norm.dtype.type(scale / (stop - start)))
        _multiply(keys, first * D, 1, D, scores, total, D, first - start)

    # softmax weights sum to one: divide by what they sum to, which is known at the end only
    if code == SOFTMAX:
        for h in range(width):
            norm[h] = norm.dtype.type(scale) / norm[h]
        _scale_heads(total, norm)


@_compiled
def _project(queries, first, count, heads, work):
    """x~_0ᵀ W of ``count`` sets for one tile of heads (D_q, D, width). Queries are flat."""
    rows = heads.shape[0]
    columns = heads.shape[1] * heads.shape[2]
    _multiply(
        queries,
        first * rows,
        rows,
        1,
        heads.reshape(rows, columns),
        work.queries.reshape(GROUP, columns),
        count,
        0,
    )


@_compiled
def _is_finite(total):
    """Whether all numbers are finite."""
    zero = total.dtype.type(0)
    wrong = zero
    for i in range(len(total)):
        wrong += total[i] * zero  # 0, or NaN: one fused multiply-add each
    return wrong == zero


@_compiled
def _write(total, width, n_heads, out, start):
    """Write coordinates × heads as heads × coordinates, from ``out[start]`` on."""
    D = len(total) // width
    lanes = VECTOR_BYTES // total.itemsize
    for h in range(0, n_heads, lanes):
        # whole vectors of heads by transposing registers, eight or four coordinates at a time
        e = 0
        if h + lanes <= n_heads:
            while e + 8 <= D:
                _turn_8(total, e * width + h, width, out, start + h * D + e, D)
                e += 8
            if e + 4 <= D:
                _turn_4(total, e * width + h, width, out, start + h * D + e, D)
                e += 4
        # the rest one by one
        for j in range(e, D):
            for i in range(h, min(h + lanes, n_heads)):
                out[start + i * D + j] = total[j * width + i]


@_compiled
def write_features(
    heads, queries, keys, offsets, sets, tiles, n_heads, code, scale, out, first, row, work
):
    """Write Φ for a range of sets and of tiles of heads.

    heads (T, D_q, D, width), heads last and zeros after the last of ``n_heads``; queries flat
    (n · D_q), or one shared by all sets (D_q); keys flat (Σ N_i · D); ``sets`` and ``tiles``
    (first, last). The features of set i go to the flat ``out`` from ``first + i·row`` on.
    Returns the first set with a feature that is
    not finite, or −1.
    """
    D = heads.shape[2]
    width = heads.shape[3]
    shared = len(queries) == heads.shape[1]
    wrong = -1
    # groups of sets outside, so that a row of the output is written from left to right
    for group in range(sets[0], sets[1], GROUP):
        count = min(GROUP, sets[1] - group)
        # one query that all sets share is projected once
        first_query = 0 if shared else group
        n_queries = 1 if shared else count
        for t in range(tiles[0], tiles[1]):
            _project(queries, first_query, n_queries, heads[t], work)
            for i in range(group, group + count):
                slot = 0 if shared else i - group
                _attend(keys, offsets[i], offsets[i + 1], slot, code, scale, work)
                if wrong < 0 and not _is_finite(work.total):
                    wrong = i
                heads_of_tile = min(width, n_heads - t * width)
                start = first + i * row + t * width * D
                _write(work.total, width, heads_of_tile, out, start)
    return wrong
