"""The exact Gram matrix, tile by tile: cosines of keys, their Gaussian moments and the sum over pairs in one pass.

A tile is some sets of a (rows) against some sets of b (columns). Columns are taken in chunks of WIDTH keys, whatever
sets they belong to, so that vectors are long for sets of one key and buffers small for sets of a million. For each
row key, rows.py adds w_i c_ij m(ρ_ij) to a running total over the chunk; once a set of rows is done, its totals are
weighted by w_j and summed over each set of columns.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import njit

from keyhole._fused.moments import OPTIONS, RELU, STEP, entry_point
from keyhole._fused.rows import (
    ORDER,
    arc_rows,
    dots,
    may_oppose,
    mend_rows,
    plain_rows,
    rectified_rows,
    series_coefficients,
    series_floor,
)

WIDTH = 128  # columns per chunk: with d = 16 the chunk and the row buffers fill a 32 KiB L1 cache
BLOCK = 512  # row keys per pass over the columns
FULL, UPPER, DIAGONAL = range(3)


class Panel(NamedTuple):
    """What the loops need of a batch. Unit vectors hold the appended one first, then d coordinates and zeros."""

    unit: np.ndarray  # (t, 1 + 4⌈d/4⌉) extended keys, scaled to unit length
    query: np.ndarray  # (n, 1 + 4⌈d/4⌉) extended queries, scaled to unit length
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

    512-bit loads off the line straddle two of them (the series is then 20 % slower), and rows a power of two apart
    would share few cache sets, hence the 8.
    """
    stride = WIDTH + 8
    flat = np.empty(count * stride + 8)
    skip = (64 - flat.ctypes.data % 64) % 64 // 8
    return flat[skip : skip + count * stride].reshape((count, stride))


@njit(**OPTIONS)
def _buffers(width, biased):
    order, block = (0, 0) if biased is None else (ORDER, BLOCK)
    r = _aligned(2 * width + 24 + order)
    k = 2 * width
    return Buffers(
        r[:width], r[width:k], r[k : k + 4], r[k + 4 : k + 8], r[k + 8 : k + 12], r[k + 12 : k + 16],
        r[k + 16 : k + 20], r[k + 20 : k + 24], np.empty(WIDTH), r[k + 24 :], _aligned(block),
    )  # fmt: skip


@njit(**OPTIONS)
def _least_first(vectors, start, stop):
    """The least of the first coordinates."""
    least = 1.0
    for i in range(start, stop):
        least = min(least, vectors[i, 0])
    return least


@njit(**OPTIONS)
def _transpose(source, start, stop, out):
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
def _end_group(mode, total, weight, owner, first, n_sets, out, origin, stride):
    """K[i, s] += Σ_j w_j total_j over the columns of each set s that the mode asks for."""
    for i in range(first, first + n_sets):
        for j in range(owner.size):
            value = weight[j] * total[i - first, j]
            if mode == FULL or (mode == UPPER and owner[j] >= i):
                out[origin + i * stride + owner[j]] += value
            elif mode == DIAGONAL and owner[j] == i:
                out[origin + i * stride] += value


@njit(**OPTIONS)
def _fill_chunk(code, biased, mode, mend, a, block, block_stop, b, chunk, chunk_stop, buffers, out, origin, stride):
    """The row keys block … block_stop − 1 against the columns chunk … chunk_stop − 1."""
    unit, query, cosine, query_dot, query_cosine, total, rho, moment, floors, column_series, row_series = buffers
    count, owner, weight = chunk_stop - chunk, b.owner[chunk:chunk_stop], b.weight[chunk:chunk_stop]
    shifts, stds = b.shift[chunk:chunk_stop], b.std[chunk:chunk_stop]
    n_columns, set_last = owner[count - 1] + 1 - owner[0], a.owner[block_stop - 1] + 1
    power = 1 if code == RELU else 0
    for group in range(a.owner[block], set_last, 4):
        group_last = min(group + 4, set_last)
        if mode != FULL and chunk_stop <= b.offsets[group]:
            break
        if mode == DIAGONAL and b.offsets[group_last] <= chunk:
            continue
        dots(a.query, group, group_last - 1, query, n_columns, query_dot)
        _begin_group(query_dot, owner, group_last - group, query_cosine, total)
        group_stop = min(a.offsets[group_last], block_stop)
        for start in range(max(a.offsets[group], block), group_stop, 4):
            stop = min(start + 4, group_stop)
            dots(a.unit, start, stop - 1, unit, count, cosine)
            if biased is None:
                if code in (RELU, STEP):
                    arc_rows(code, a.owner, a.weight, group, start, stop, cosine, query_cosine, count, total)
                    if mend:
                        mend_rows(code, a, group, start, stop, b, chunk, cosine, query_cosine, count, total)
                else:
                    plain_rows(code, a, group, start, stop, shifts, stds, cosine, query_cosine, count, total)
            else:
                rectified_rows(
                    power, a, group, start, stop, row_series, block, b, chunk, column_series, floors, cosine,
                    query_cosine, count, rho, moment, total,
                )  # fmt: skip
        _end_group(mode, total, weight, owner, group, group_last - group, out, origin, stride)


def _compile_with(stamp):
    """Return `fill_tile`, compiled on its first call or taken from the cache of a call with the same stamp."""

    @entry_point
    def fill_tile(code, biased, mode, a, b, first, last, b_first, b_last, out, origin, stride):
        """Add the sums over pairs of keys to K in rows ``first … last − 1`` and columns ``b_first … b_last − 1``.

        Entry (i, j) of K is ``out[origin + i·stride + j]``. With mode UPPER a is b, and only pairs of sets i ≤ j are
        filled; with mode DIAGONAL only i = j, into column 0. ``biased`` is True for ReLU and step around a mean and
        None otherwise: None is a type of its own, so that the longer code for means is compiled by those who use it.
        """
        _ = stamp
        buffers = _buffers(a.unit.shape[1], biased)
        power = 1 if code == RELU else 0
        for block in range(a.offsets[first], a.offsets[last], BLOCK):
            block_stop = min(block + BLOCK, a.offsets[last])
            set_first, set_last = a.owner[block], a.owner[block_stop - 1] + 1
            least_key, least_query = _least_first(a.unit, block, block_stop), _least_first(a.query, set_first, set_last)
            if biased is not None:
                _fill_row_series(power, a.shift[block:block_stop], buffers.column_series, buffers.row_series)
            columns_start = b.offsets[b_first if mode == FULL else max(b_first, set_first)]
            columns_stop = b.offsets[set_last if mode == DIAGONAL else b_last]
            for chunk in range(columns_start, columns_stop, WIDTH):
                chunk_stop = min(chunk + WIDTH, columns_stop)
                left, right = b.owner[chunk], b.owner[chunk_stop - 1] + 1
                _transpose(b.unit, chunk, chunk_stop, buffers.unit)
                _transpose(b.query, left, right, buffers.query)
                mend = code == STEP or may_oppose(least_key, _least_first(b.unit, chunk, chunk_stop))
                mend = mend or may_oppose(least_query, _least_first(b.query, left, right))
                if biased is not None:
                    series_coefficients(power, b.shift[chunk:chunk_stop], chunk_stop - chunk, buffers.column_series)
                    for j in range(chunk_stop - chunk):
                        buffers.floors[j] = series_floor(b.shift[chunk + j])
                _fill_chunk(
                    code, biased, mode, mend, a, block, block_stop, b, chunk, chunk_stop, buffers, out, origin, stride
                )

    return fill_tile


# numba's cache watches the file of the function that Python calls, and what that function closes over
_SOURCES = [Path(__file__).with_name(name) for name in ("moments.py", "rows.py")]
fill_tile = _compile_with(zlib.crc32(b"".join(path.read_bytes() for path in _SOURCES)))
