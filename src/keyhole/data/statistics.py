"""Statistics of the rows of every set: what a layer that averages cannot see."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import set_blocks
from keyhole.data.sets import SampleBatch, SetBatch

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)

NAMES = (
    "mean",
    "standard deviation",
    "least",
    "second least",
    "largest",
    "second largest",
    *(f"quantile {q:g}" for q in QUANTILES),
)
"""Statistics of one coordinate, in the order of their columns."""

KEYS_AT_A_TIME = 2**20


def set_statistics(samples: SampleBatch) -> Float[np.ndarray, "n c"]:
    """Statistics of every coordinate of the keys of each sample, and last their number.

    >>> set_statistics(SetBatch([np.array([[1.0], [3.0], [2.0]])])).round(2)
    array([[2.  , 0.82, 1.  , 2.  , 3.  , 2.  , 1.2 , 1.5 , 2.  , 2.5 , 2.8 ,
            3.  ]])
    """
    sets = sets_of(samples)
    columns = np.empty((len(sets), len(NAMES) * sets.dim + 1))
    for rows, keys in stacks_of_equal_length(sets):
        ordered = np.sort(keys, axis=1)
        n_keys = keys.shape[1]
        parts = [
            keys.mean(axis=1),
            keys.std(axis=1),
            ordered[:, 0],
            ordered[:, min(1, n_keys - 1)],
            ordered[:, -1],
            ordered[:, max(0, n_keys - 2)],
        ]
        for q in QUANTILES:
            low, high, fraction = _places(q, n_keys)
            parts.append((1 - fraction) * ordered[:, low] + fraction * ordered[:, high])
        columns[rows] = np.concatenate([*parts, np.full((len(rows), 1), float(n_keys))], axis=1)
    return columns


def row_shares(samples: SampleBatch) -> Float[np.ndarray, "k c"]:
    """What every key contributes to the statistics of its sample: shares that add up to them.

    An extreme belongs to the key that attains it, a quantile to its two neighbours. Of a mean every
    key has x_i/N; of a standard deviation s its part (x_i − m)²/(N s); of the number of keys, 1.
    """
    sets = sets_of(samples)
    shares = np.zeros((sets.n_tokens, len(NAMES) * sets.dim + 1))
    dim = sets.dim
    for rows, keys in stacks_of_equal_length(sets):
        n_keys = keys.shape[1]
        places = sets.offsets[rows][:, None] + np.arange(n_keys)  # (b, N)
        order = np.argsort(keys, axis=1, kind="stable")  # (b, N, d)
        ordered = np.take_along_axis(keys, order, axis=1)
        mean = keys.mean(axis=1, keepdims=True)
        deviation = keys.std(axis=1, keepdims=True)
        of_spread = np.divide(
            np.square(keys - mean) / n_keys,
            deviation,
            out=np.zeros_like(keys),
            where=deviation > 0,
        )
        shares[places, :dim] = keys / n_keys
        shares[places, dim : 2 * dim] = of_spread

        for statistic, place, part in _parts_of_order_statistics(n_keys):
            columns = np.arange(statistic * dim, (statistic + 1) * dim)
            owners = np.take_along_axis(places[:, :, None], order[:, place : place + 1], axis=1)
            np.add.at(shares, (owners[:, 0], columns[None, :]), part * ordered[:, place])
    shares[:, -1] = 1.0
    return shares


def _parts_of_order_statistics(n_keys: int) -> list[tuple[int, int, float]]:
    """Statistics that are made of keys in their order: which, of which place, how much of it."""
    parts = [
        (2, 0, 1.0),
        (3, min(1, n_keys - 1), 1.0),
        (4, n_keys - 1, 1.0),
        (5, max(0, n_keys - 2), 1.0),
    ]
    for number, q in enumerate(QUANTILES):
        low, high, fraction = _places(q, n_keys)
        parts.append((6 + number, low, 1 - fraction))
        parts.append((6 + number, high, fraction))
    return parts


def sets_of(samples: SampleBatch) -> SetBatch:
    """All keys of a sample as one set, in host memory."""
    samples = samples.unpooled.numpy()
    if len(samples.sets) == len(samples):
        return samples.sets
    return samples.sets.merged(samples.set_offsets)


def stacks_of_equal_length(sets: SetBatch) -> Any:
    """Rows of sets that have one length, with their keys (b, N, d) in float64."""
    lengths = sets.lengths
    order = np.argsort(lengths, kind="stable")
    changes = np.flatnonzero(np.diff(lengths[order])) + 1
    for equal in np.split(order, changes):
        if len(equal) == 0:
            continue
        n_keys = int(lengths[equal[0]])
        offsets = n_keys * sets.dim * np.arange(len(equal) + 1)
        for part in set_blocks(offsets, KEYS_AT_A_TIME):
            rows = equal[part]
            places = sets.offsets[rows][:, None] + np.arange(n_keys)
            yield rows, sets.tokens[places].astype(np.float64)


def _places(q: float, n_keys: int) -> tuple[int, int, float]:
    """The neighbours of a quantile in the order of the keys, and the share of the upper one."""
    place = q * (n_keys - 1)
    low = math.floor(place)
    return low, min(low + 1, n_keys - 1), place - low
