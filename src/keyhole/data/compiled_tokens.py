"""A compiled loop that reads tokens once, for statistics of sets.

The plain version is `summaries.plain_statistics`.
"""

from __future__ import annotations

import math

import numpy as np

from keyhole._compiled import cached_njit

# no fast mathematics: compensated sums depend on the order of their operations
_compiled = cached_njit(nogil=True, error_model="numpy")


@_compiled
def _add(total, rest, value):
    """The sum of (total, rest) and a value, as a number and what its rounding lost."""
    new = total + value
    moved = new - total
    lost = (total - (new - moved)) + (value - moved)
    return new, rest + lost


@_compiled
def set_statistics(tokens, offsets, first, last, mean, deviation, least, largest):
    """Mean, standard deviation, least and largest value of each coordinate of some sets.

    Sets ``first`` … ``last − 1`` own rows ``offsets[i]:offsets[i+1]`` of ``tokens``. Sums carry
    along what rounding loses, so that they have twice the digits of float64: the order of the keys
    changes no bit of a result but with a probability of some 2^-40.
    """
    dim = tokens.shape[1]
    totals = np.empty(dim)
    rests = np.empty(dim)
    for i in range(first, last):
        start = offsets[i]
        stop = offsets[i + 1]
        n_keys = np.float64(stop - start)

        # the least and the largest value
        for e in range(dim):
            least[i, e] = tokens[start, e]
            largest[i, e] = tokens[start, e]
        for k in range(start + 1, stop):
            for e in range(dim):
                value = np.float64(tokens[k, e])
                least[i, e] = min(least[i, e], value)
                largest[i, e] = max(largest[i, e], value)

        # the mean, of numbers divided by how many there are so that the sum cannot overflow: by a
        # power of two, which is exact
        scale = 2.0 ** -math.ceil(math.log2(n_keys))
        for e in range(dim):
            totals[e] = 0.0
            rests[e] = 0.0
        for k in range(start, stop):
            for e in range(dim):
                totals[e], rests[e] = _add(totals[e], rests[e], np.float64(tokens[k, e]) * scale)
        for e in range(dim):
            average = (totals[e] + rests[e]) / (n_keys * scale)
            # rounding must not carry a mean beyond the numbers it is of
            mean[i, e] = min(max(average, least[i, e]), largest[i, e])

        # the deviation, in units of the largest distance from the mean: squares neither overflow
        # nor vanish
        for e in range(dim):
            totals[e] = 0.0
            rests[e] = 0.0
            # deviation holds 1/unit for now; a coordinate that does not move has 0
            span = max(largest[i, e] * 0.5 - mean[i, e] * 0.5, mean[i, e] * 0.5 - least[i, e] * 0.5)
            deviation[i, e] = 0.0 if span == 0.0 else 0.5 / span
        for k in range(start, stop):
            for e in range(dim):
                distance = (np.float64(tokens[k, e]) - mean[i, e]) * deviation[i, e]
                totals[e], rests[e] = _add(totals[e], rests[e], distance * distance)
        for e in range(dim):
            if deviation[i, e] > 0.0:
                deviation[i, e] = math.sqrt((totals[e] + rests[e]) / n_keys) / deviation[i, e]
