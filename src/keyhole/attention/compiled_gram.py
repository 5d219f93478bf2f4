"""The exact Gram matrix, tile by tile.

Cosines of keys, their Gaussian moments and the sum over pairs in one pass.

Every `*_rows` function does total[s, j] += w_i c_ij m(ρ_ij) for keys i = start … stop − 1 of a,
owned by set first + s, with c_ij the cosine of the two keys, q_sj that of their queries and ρ_ij =
q_sj c_ij. Two things keep the loops fast: they run from zero, as an index that might be negative
does not vectorise, and they index whole arrays, as each view of a row costs two atomic operations
(60 ns per key when there were views).
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from keyhole.attention.compiled_moments import (
    EXP_HIGHEST,
    EXP_LOWEST,
    LINEAR,
    OPTIONS,
    RELU,
    SQUARE,
    STEP,
    entry_point,
    normal_parts,
    rectified_moment,
    relu_arc,
    step_arc,
    vector_exp,
)

ORDER = 112  # terms of the series in ρ
_CAP = 0.8  # the series serves ρ ≤ CAP: at CAP all ORDER terms are needed
_NEAR = 0.99  # beyond, 1 − |ρ| is taken from differences of unit vectors
_ROOT = np.sqrt(np.arange(ORDER))


@njit(**OPTIONS)
def dots(rows, i, last, columns, count, out):
    """Inner products of rows i … i+3 with the columns of a transposed array.

    Rows are never beyond ``last``.

    Four rows by four coordinates: sixteen multiply-adds per four loads, the column index innermost.
    The first coordinate stands alone, so the number of coordinates is one more than a multiple of
    four.
    """
    i1 = min(i + 1, last)
    i2 = min(i + 2, last)
    i3 = min(i + 3, last)

    # the first coordinate
    a0 = rows[i, 0]
    b0 = rows[i1, 0]
    c0 = rows[i2, 0]
    d0 = rows[i3, 0]
    for j in range(count):
        x0 = columns[0, j]
        out[0, j] = a0 * x0
        out[1, j] = b0 * x0
        out[2, j] = c0 * x0
        out[3, j] = d0 * x0

    # four coordinates at a time: a, b, c, d are the four rows
    for e in range(1, rows.shape[1], 4):
        a0 = rows[i, e]
        a1 = rows[i, e + 1]
        a2 = rows[i, e + 2]
        a3 = rows[i, e + 3]
        b0 = rows[i1, e]
        b1 = rows[i1, e + 1]
        b2 = rows[i1, e + 2]
        b3 = rows[i1, e + 3]
        c0 = rows[i2, e]
        c1 = rows[i2, e + 1]
        c2 = rows[i2, e + 2]
        c3 = rows[i2, e + 3]
        d0 = rows[i3, e]
        d1 = rows[i3, e + 1]
        d2 = rows[i3, e + 2]
        d3 = rows[i3, e + 3]
        for j in range(count):
            x0 = columns[e, j]
            x1 = columns[e + 1, j]
            x2 = columns[e + 2, j]
            x3 = columns[e + 3, j]
            # brackets make it a chain of fused multiply-adds
            out[0, j] = (((out[0, j] + a0 * x0) + a1 * x1) + a2 * x2) + a3 * x3
            out[1, j] = (((out[1, j] + b0 * x0) + b1 * x1) + b2 * x2) + b3 * x3
            out[2, j] = (((out[2, j] + c0 * x0) + c1 * x1) + c2 * x2) + c3 * x3
            out[3, j] = (((out[3, j] + d0 * x0) + d1 * x1) + d2 * x2) + d3 * x3


@njit(**OPTIONS)
def _half_distance(x, i, y, j, sign):
    """|x_i − sign·y_j|²/2, which is 1 − |cosine| of unit vectors without its cancellation."""
    total = 0.0
    for e in range(x.shape[1]):
        total += (x[i, e] - sign * y[j, e]) ** 2
    return 0.5 * total


@njit(**OPTIONS)
def _gap(a, i, b, j, cosine, query_cosine):
    """1 − |ρ| of a pair of keys, accurate relative to its size."""
    keys = _half_distance(a.unit, i, b.unit, j, math.copysign(1.0, cosine))
    queries = _half_distance(
        a.query, a.owner[i], b.query, b.owner[j], math.copysign(1.0, query_cosine)
    )
    return min(1.0, keys + queries - keys * queries)


@njit(**OPTIONS)
def may_oppose(x, y):
    """Whether two unit vectors can have a cosine below −NEAR.

    Their first coordinates are at least x and y (≥ 0).
    """
    return x * y - math.sqrt((1.0 - min(x, 1.0) ** 2) * (1.0 - min(y, 1.0) ** 2)) < -_NEAR


@njit(**OPTIONS)
def arc_rows(code, owner, weight, first, start, stop, cosine, query_cosine, count, total):
    """ReLU and step around mean zero."""
    for i in range(start, stop):
        r = i - start
        s = owner[i] - first
        w = weight[i]
        if code == RELU:
            for j in range(count):
                rho = query_cosine[s, j] * cosine[r, j]
                total[s, j] += w * cosine[r, j] * relu_arc(rho, max(1.0 - abs(rho), 0.0))
        else:
            for j in range(count):
                rho = query_cosine[s, j] * cosine[r, j]
                total[s, j] += w * cosine[r, j] * step_arc(rho, max(1.0 - abs(rho), 0.0))


@njit(**OPTIONS)
def mend_rows(code, a, first, start, stop, b, chunk, cosine, query_cosine, count, total):
    """Correct the terms with ρ near ±1, around mean zero.

    `arc_rows` takes 1 − |ρ| from ρ. This adds what changes if it is taken from differences of unit
    vectors. κ(ρ) vanishes at −1 and the step's arcsine is steep at both ends, so that rounding of
    ρ would show.
    """
    for i in range(start, stop):
        r = i - start
        s = a.owner[i] - first

        # most rows have no such pair, and counting vectorises
        near = 0
        for j in range(count):
            near += abs(query_cosine[s, j] * cosine[r, j]) > _NEAR
        if near == 0:
            continue
        for j in range(count):
            rho = query_cosine[s, j] * cosine[r, j]
            if abs(rho) > _NEAR:
                rough = max(1.0 - abs(rho), 0.0)
                fine = _gap(a, i, b, chunk + j, cosine[r, j], query_cosine[s, j])
                if code == RELU:
                    change = relu_arc(rho, fine) - relu_arc(rho, rough)
                else:
                    change = step_arc(rho, fine) - step_arc(rho, rough)
                total[s, j] += a.weight[i] * cosine[r, j] * change


@njit(**OPTIONS)
def plain_rows(code, a, first, start, stop, shifts, stds, cosine, query_cosine, count, total):
    """Linear, square and exp, whose moments are elementary for any mean."""
    for i in range(start, stop):
        r = i - start
        s = a.owner[i] - first
        w = a.weight[i]
        shift = a.shift[i]
        std = a.std[i]
        if code == LINEAR:
            for j in range(count):
                rho = query_cosine[s, j] * cosine[r, j]
                total[s, j] += w * cosine[r, j] * (shift * shifts[j] + rho)
        elif code == SQUARE:
            for j in range(count):
                rho = query_cosine[s, j] * cosine[r, j]
                both = (1.0 + shift * shift) * (1.0 + shifts[j] * shifts[j])
                total[s, j] += (
                    w * cosine[r, j] * (both + 2.0 * rho * (2.0 * shift * shifts[j] + rho))
                )
        else:
            for j in range(count):
                exponent = shift + shifts[j] + query_cosine[s, j] * cosine[r, j] * std * stds[j]
                value = vector_exp(min(max(exponent, EXP_LOWEST), EXP_HIGHEST))
                total[s, j] += w * cosine[r, j] * (value if exponent <= EXP_HIGHEST else math.inf)


@njit(**OPTIONS)
def series_floor(shift):
    """The lowest ρ at which the series keeps its digits.

    It cancels where both scores are rare and ρ is negative.
    """
    if shift < -3.0:
        return 2.0
    return -0.6 if shift >= -1.0 else -0.2


@njit(**OPTIONS)
def series_coefficients(power, shifts, count, out):
    """Coefficients c_k(h) of E[(h+U)_+^p (k+V)_+^p] = Σ_k ρ^k c_k(h) c_k(k).

    Signs that cancel in the product are left out. For p = 1: ψ(h), Φ(h), then He_{k−2}(h) φ(h)/√k!;
    for p = 0: Φ(h), then He_{k−1}(h) φ(h)/√k!. ``out`` is (ORDER, ≥ count), filled down its
    columns by the recurrence of the normalised Hermite polynomials.
    """
    lead = power + 1  # out[lead − 1 + n] is He_n φ/√n!, n ≥ 1, before it is rescaled
    # ψ, Φ and φ in the first rows
    for j in range(count):
        density, mass, mean, _ = normal_parts(shifts[j])
        out[0, j] = mean
        out[lead - 1, j] = mass
        out[lead, j] = density

    # He_n φ/√n! = (h/√n) He_{n−1} φ/√(n−1)! − √((n−1)/n) He_{n−2} φ/√(n−2)!
    for n in range(1, ORDER - lead):
        slope = 1.0 / _ROOT[n]
        drop = _ROOT[n - 1] / _ROOT[n] if n > 1 else 0.0
        for j in range(count):
            out[lead + n, j] = (
                shifts[j] * slope * out[lead + n - 1, j] - drop * out[lead + n - 2, j]
            )

    # from 1/√n! to 1/√k!
    for k in range(lead, ORDER):
        scale = 1.0 / (_ROOT[k] * _ROOT[k - 1]) if power == 1 else 1.0 / _ROOT[k]
        for j in range(count):
            out[k, j] *= scale


@njit(**OPTIONS)
def _correlate(cosine, r, query_cosine, s, floor, floors, count, rho):
    """Fill row r of ρ; return the largest |ρ| that the series serves, and how many it does not."""
    # the bits of a positive double are ordered as it is, and a maximum of integers vectorises where
    # that of doubles does not
    peak = np.int64(0)
    beyond = np.int64(0)
    for j in range(count):
        value = min(max(query_cosine[s, j] * cosine[r, j], -1.0), 1.0)
        rho[r, j] = value
        served = (value >= max(floor, floors[j])) & (value <= _CAP)
        beyond += np.int64(0) if served else np.int64(1)
        bits = np.float64(abs(value) if served else 0.0).view(np.int64)
        peak = bits if bits > peak else peak
    return np.int64(peak).view(np.float64), beyond


@njit(**OPTIONS)
def _sum_series(order, rows, i, last, columns, rho, count, out):
    """out_rj = Σ_{k<order} ρ_rj^k rows_ik columns_kj for rows i … i+3, never beyond ``last``.

    Order is even.

    Four rows at a time, because the columns come from the second-level cache.
    """
    i1 = min(i + 1, last)
    i2 = min(i + 2, last)
    i3 = min(i + 3, last)
    for r in range(4):
        for j in range(count):
            out[r, j] = 0.0

    # Horner's scheme, two powers at a time, from the highest down
    for step in range(0, order, 2):
        k = order - 2 - step
        a0 = rows[i, k]
        b0 = rows[i1, k]
        c0 = rows[i2, k]
        d0 = rows[i3, k]
        a1 = rows[i, k + 1]
        b1 = rows[i1, k + 1]
        c1 = rows[i2, k + 1]
        d1 = rows[i3, k + 1]
        for j in range(count):
            x0 = columns[k, j]
            x1 = columns[k + 1, j]
            out[0, j] = (out[0, j] * rho[0, j] + a1 * x1) * rho[0, j] + a0 * x0
            out[1, j] = (out[1, j] * rho[1, j] + b1 * x1) * rho[1, j] + b0 * x0
            out[2, j] = (out[2, j] * rho[2, j] + c1 * x1) * rho[2, j] + c0 * x0
            out[3, j] = (out[3, j] * rho[3, j] + d1 * x1) * rho[3, j] + d0 * x0


@njit(**OPTIONS)
def _fill_exact(power, a, i, b, chunk, cosine, r, query_cosine, s, floor, floors, rho, count, out):
    """Overwrite what the series does not serve with the moment computed pair by pair."""
    for j in range(count):
        value = rho[r, j]
        if value >= max(floor, floors[j]) and value <= _CAP:
            continue

        # close to ±1 from differences of unit vectors
        one_minus = 1.0 - value
        one_plus = 1.0 + value
        if abs(value) > _NEAR:
            gap = _gap(a, i, b, chunk + j, cosine[r, j], query_cosine[s, j])
            if value > 0.0:
                one_minus = gap
            else:
                one_plus = gap
        out[r, j] = rectified_moment(
            power, a.shift[i], b.shift[chunk + j], value, one_minus, one_plus
        )


@njit(**OPTIONS)
def rectified_rows(
    power,
    a,
    first,
    start,
    stop,
    row_series,
    block,
    b,
    chunk,
    column_series,
    floors,
    cosine,
    query_cosine,
    count,
    rho,
    moment,
    total,
):
    """ReLU (power 1) and step (power 0) around any mean.

    The series in ρ where it holds, else pair by pair.
    """
    # ρ of all pairs, the largest |ρ| of the series, and how many pairs it does not serve
    peak = 0.0
    beyond = 0
    for i in range(start, stop):
        s = a.owner[i] - first
        floor = series_floor(a.shift[i])
        row_peak, row_beyond = _correlate(
            cosine, i - start, query_cosine, s, floor, floors, count, rho
        )
        peak = max(peak, row_peak)
        beyond += row_beyond

    # the series for all pairs
    if beyond < count * (stop - start):
        # as many terms as give thirteen digits, as the terms fall like ρ^k/k²
        order = min(ORDER, 2 * math.ceil((7.0 - 23.0 / math.log(max(peak, 1e-9))) / 2.0))
        _sum_series(
            order, row_series, start - block, stop - 1 - block, column_series, rho, count, moment
        )

    # the exact moment where the series does not hold, and the sum
    for i in range(start, stop):
        r = i - start
        s = a.owner[i] - first
        w = a.weight[i]
        if beyond > 0:
            floor = series_floor(a.shift[i])
            _fill_exact(
                power, a, i, b, chunk, cosine, r, query_cosine, s, floor, floors, rho, count, moment
            )
        for j in range(count):
            total[s, j] += w * cosine[r, j] * moment[r, j]


WIDTH = 128  # columns per chunk: with d = 16 the chunk and the row buffers fill a 32 KiB L1 cache
BLOCK = 512  # row keys per pass over the columns


class Panel(NamedTuple):
    """What the loops need of a batch.

    Unit vectors hold the appended one first, then d coordinates and zeros.
    """

    unit: np.ndarray  # (t, 1 + 4⌈d/4⌉) extended keys, scaled to unit length
    query: np.ndarray  # (n, 1 + 4⌈d_q/4⌉) extended queries, scaled to unit length
    weight: np.ndarray  # (t,) what multiplies c·m: lengths, standard deviations and 1/N
    shift: np.ndarray  # (t,) mean/std of the score; for exp, mean + std²/2
    std: np.ndarray  # (t,) standard deviation of the score
    owner: np.ndarray  # (t,) the set of each key
    offsets: np.ndarray  # (n + 1,)


class Buffers(NamedTuple):
    """Scratch of a tile. Columns run along the rows of each array, WIDTH of them."""

    unit: np.ndarray  # a chunk of keys, transposed
    query: np.ndarray  # the queries of its sets, transposed
    cosine: np.ndarray  # (4, WIDTH), one row per row key, as are rho and moment
    query_dot: np.ndarray  # (4, WIDTH), one row per row set and one column per set of the chunk
    query_cosine: np.ndarray  # (4, WIDTH), one row per row set, as is total
    total: np.ndarray
    rho: np.ndarray
    moment: np.ndarray
    floors: np.ndarray  # (WIDTH,)
    column_series: np.ndarray  # (ORDER, WIDTH)
    row_series: np.ndarray  # (BLOCK, ORDER)


@njit(**OPTIONS)
def _aligned(count):
    """An uninitialised array (count, WIDTH + 8) whose rows start on cache lines.

    512-bit loads off the line straddle two of them (the series is then 20 % slower), and rows a
    power of two apart would share few cache sets, hence the 8.
    """
    stride = WIDTH + 8
    flat = np.empty(count * stride + 8)
    skip = (64 - flat.ctypes.data % 64) % 64 // 8
    return flat[skip : skip + count * stride].reshape((count, stride))


@njit(**OPTIONS)
def _buffers(width, query_width, biased):
    """Scratch of a tile; the tables of the series are empty unless ``biased``."""
    if biased is None:
        order = 0
        block = 0
    else:
        order = ORDER
        block = BLOCK

    # One array holds all that is WIDTH columns wide: keys, queries, six arrays of four rows, and
    # the series of the columns.
    queries_end = width + query_width
    rows = _aligned(queries_end + 24 + order)
    unit = rows[:width]
    query = rows[width:queries_end]
    cosine = rows[queries_end : queries_end + 4]
    query_dot = rows[queries_end + 4 : queries_end + 8]
    query_cosine = rows[queries_end + 8 : queries_end + 12]
    total = rows[queries_end + 12 : queries_end + 16]
    rho = rows[queries_end + 16 : queries_end + 20]
    moment = rows[queries_end + 20 : queries_end + 24]
    column_series = rows[queries_end + 24 :]
    floors = np.empty(WIDTH)
    row_series = _aligned(block)
    return Buffers(
        unit,
        query,
        cosine,
        query_dot,
        query_cosine,
        total,
        rho,
        moment,
        floors,
        column_series,
        row_series,
    )


@njit(**OPTIONS)
def _least_first(vectors, start, stop):
    """The least of the first coordinates."""
    least = 1.0
    for i in range(start, stop):
        least = min(least, vectors[i, 0])
    return least


@njit(**OPTIONS)
def _transpose(source, start, stop, out):
    """Write the rows ``start … stop − 1`` as columns of ``out``."""
    for j in range(stop - start):
        for e in range(source.shape[1]):
            out[e, j] = source[start + j, e]


@njit(**OPTIONS)
def _fill_row_series(power, shifts, buffer, out):
    """Coefficients of the row keys, one row each, by way of a buffer that vectorises."""
    for start in range(0, shifts.size, WIDTH):
        count = min(WIDTH, shifts.size - start)
        series_coefficients(power, shifts[start : start + count], count, buffer)
        for j in range(count):
            for k in range(ORDER):
                out[start + j, k] = buffer[k, j]


@njit(**OPTIONS)
def _begin_group(query_dot, owner, n_sets, query_cosine, total):
    """Spread the cosines of the queries over the keys of the chunk, and start from zero."""
    for s in range(n_sets):
        for j in range(owner.size):
            query_cosine[s, j] = query_dot[s, owner[j] - owner[0]]
            total[s, j] = 0.0


@njit(**OPTIONS)
def _end_group(upper, total, weight, owner, first, n_sets, out, origin, stride):
    """K[i, s] += Σ_j w_j total_j over the columns of each set s; where ``upper``, of sets s ≥ i."""
    for i in range(first, first + n_sets):
        for j in range(owner.size):
            if not upper or owner[j] >= i:
                out[origin + i * stride + owner[j]] += weight[j] * total[i - first, j]


@njit(**OPTIONS)
def _fill_chunk(
    code,
    biased,
    upper,
    mend,
    a,
    block,
    block_stop,
    b,
    chunk,
    chunk_stop,
    buffers,
    out,
    origin,
    stride,
):
    """The row keys block … block_stop − 1 against the columns chunk … chunk_stop − 1."""
    (
        unit,
        query,
        cosine,
        query_dot,
        query_cosine,
        total,
        rho,
        moment,
        floors,
        column_series,
        row_series,
    ) = buffers
    count = chunk_stop - chunk
    owner = b.owner[chunk:chunk_stop]
    weight = b.weight[chunk:chunk_stop]
    shifts = b.shift[chunk:chunk_stop]
    stds = b.std[chunk:chunk_stop]
    n_columns = owner[count - 1] + 1 - owner[0]
    set_last = a.owner[block_stop - 1] + 1
    power = 1 if code == RELU else 0

    # four sets of rows at a time
    for group in range(a.owner[block], set_last, 4):
        group_last = min(group + 4, set_last)
        if upper and chunk_stop <= b.offsets[group]:
            break  # these columns, and those of later groups, lie below the diagonal
        dots(a.query, group, group_last - 1, query, n_columns, query_dot)
        _begin_group(query_dot, owner, group_last - group, query_cosine, total)

        # and four of their keys at a time: cosines with the columns, then moments and sums
        group_stop = min(a.offsets[group_last], block_stop)
        for start in range(max(a.offsets[group], block), group_stop, 4):
            stop = min(start + 4, group_stop)
            dots(a.unit, start, stop - 1, unit, count, cosine)
            if biased is None:
                if code in (RELU, STEP):
                    arc_rows(
                        code,
                        a.owner,
                        a.weight,
                        group,
                        start,
                        stop,
                        cosine,
                        query_cosine,
                        count,
                        total,
                    )
                    if mend:
                        mend_rows(
                            code,
                            a,
                            group,
                            start,
                            stop,
                            b,
                            chunk,
                            cosine,
                            query_cosine,
                            count,
                            total,
                        )
                else:
                    plain_rows(
                        code,
                        a,
                        group,
                        start,
                        stop,
                        shifts,
                        stds,
                        cosine,
                        query_cosine,
                        count,
                        total,
                    )
            else:
                rectified_rows(
                    power,
                    a,
                    group,
                    start,
                    stop,
                    row_series,
                    block,
                    b,
                    chunk,
                    column_series,
                    floors,
                    cosine,
                    query_cosine,
                    count,
                    rho,
                    moment,
                    total,
                )
        _end_group(upper, total, weight, owner, group, group_last - group, out, origin, stride)


def _compile_with(stamp):
    """Return `fill_tile`, compiled on its first call.

    Or taken from the cache of a call with the same stamp.
    """

    @entry_point
    def fill_tile(code, biased, upper, a, b, first, last, b_first, b_last, out, origin, stride):
        """Add the sums over pairs of keys to a tile of K.

        It has rows ``first … last − 1`` and columns ``b_first … b_last − 1``.

        Entry (i, j) of K is ``out[origin + i·stride + j]``. Where ``upper``, a is b and only pairs
        of sets i ≤ j are filled. ``biased`` is True for ReLU and step around a mean and
        None otherwise: None is a type of its own, so that the longer code for means is compiled by
        those who use it.
        """
        _ = stamp
        buffers = _buffers(a.unit.shape[1], a.query.shape[1], biased)
        power = 1 if code == RELU else 0

        # blocks of row keys
        for block in range(a.offsets[first], a.offsets[last], BLOCK):
            block_stop = min(block + BLOCK, a.offsets[last])
            set_first = a.owner[block]
            set_last = a.owner[block_stop - 1] + 1
            least_key = _least_first(a.unit, block, block_stop)
            least_query = _least_first(a.query, set_first, set_last)
            if biased is not None:
                _fill_row_series(
                    power, a.shift[block:block_stop], buffers.column_series, buffers.row_series
                )

            # against chunks of column keys; where `upper`, from the first set of the block on
            columns_start = b.offsets[max(b_first, set_first) if upper else b_first]
            columns_stop = b.offsets[b_last]
            for chunk in range(columns_start, columns_stop, WIDTH):
                chunk_stop = min(chunk + WIDTH, columns_stop)
                left = b.owner[chunk]
                right = b.owner[chunk_stop - 1] + 1
                _transpose(b.unit, chunk, chunk_stop, buffers.unit)
                _transpose(b.query, left, right, buffers.query)
                # whether a cosine of the chunk can be close enough to −1 to need `mend_rows`
                mend = code == STEP or may_oppose(
                    least_key, _least_first(b.unit, chunk, chunk_stop)
                )
                mend = mend or may_oppose(least_query, _least_first(b.query, left, right))
                if biased is not None:
                    series_coefficients(
                        power, b.shift[chunk:chunk_stop], chunk_stop - chunk, buffers.column_series
                    )
                    for j in range(chunk_stop - chunk):
                        buffers.floors[j] = series_floor(b.shift[chunk + j])
                _fill_chunk(
                    code,
                    biased,
                    upper,
                    mend,
                    a,
                    block,
                    block_stop,
                    b,
                    chunk,
                    chunk_stop,
                    buffers,
                    out,
                    origin,
                    stride,
                )

    return fill_tile


# numba's cache watches the file of the function that Python calls, and what that function closes
# over
_SOURCES = [Path(__file__), Path(__file__).with_name("compiled_moments.py")]
fill_tile = _compile_with(zlib.crc32(b"".join(path.read_bytes() for path in _SOURCES)))
