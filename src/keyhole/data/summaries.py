"""Statistics of the keys of every set, in one pass over them.

Those of tensors are computed where these live, and are those of NumPy within rounding.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import blocks, is_tensor, run_threads, thread_count
from keyhole.data import arrays


def statistics_of_sets(
    tokens: Float[Any, "t d"], offsets: Int[np.ndarray, " o"]
) -> Float[np.ndarray, "n 4 d"]:
    """Mean, standard deviation, least and largest value of every coordinate of each set.

    The order of the keys does not matter. 240 MB of float32 in sets of 1,560 keys take 0.3 s of one
    core; sorting every coordinate, for the same bits in any order, took 29 s.
    """
    if is_tensor(tokens):
        return arrays.of_tensors().statistics_of_sets(tokens, offsets)
    from keyhole._compiled import announce_compilation
    from keyhole.data.compiled_tokens import set_statistics

    announce_compilation(set_statistics)
    n_sets = len(offsets) - 1
    mean, deviation, least, largest = np.empty((4, n_sets, tokens.shape[1]))
    # numba compiles read-only and strided arrays separately
    keys = np.ascontiguousarray(tokens)
    starts = offsets.copy()

    def work(sets: slice) -> None:
        set_statistics(keys, starts, sets.start, sets.stop, mean, deviation, least, largest)

    run_threads(work, blocks(n_sets, -(-n_sets // thread_count())))
    return np.stack([mean, deviation, least, largest], axis=1)


def plain_statistics(
    tokens: Float[np.ndarray, "t d"], offsets: Int[np.ndarray, " o"]
) -> Float[np.ndarray, "n 4 d"]:
    """`statistics_of_sets` in NumPy, set by set."""
    rows = []
    for start, stop in pairwise(offsets):
        keys = tokens[start:stop].astype(np.float64)
        rows.append([keys.mean(axis=0), keys.std(axis=0), keys.min(axis=0), keys.max(axis=0)])
    return np.array(rows)
