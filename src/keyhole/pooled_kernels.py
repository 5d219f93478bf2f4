"""Exact kernels of samples that stand for one set or several, under laws of one Gaussian component or several."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole.groups import PooledSets
from keyhole.heads import HeadLaw
from keyhole.kernels import attention_kernel
from keyhole.sets import SetBatch


def pooled_kernel(
    a: SetBatch | PooledSets,
    b: SetBatch | PooledSets | None = None,
    law: HeadLaw | None = None,
    activation: str = "relu",
    *,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "n m"]:
    """Return K_ij = Σ c_s c_t K(set s, set t) over the sets s of sample i and t of sample j.

    Parameters as for `attention_kernel`, and the same as it for a SetBatch. A law whose heads are shared out among
    several means has the average of their kernels.

    Notes
    -----
    Cost: that of the kernel of all sets. With each key as the query in turn that is N²N'² evaluations for two sets
    of N and N' keys.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> sets = kh.SetBatch([np.eye(3)[:2], np.eye(3)])
    >>> (pooled_kernel(PooledSets(sets, "sum")) / kh.attention_kernel(sets)).round(6)
    array([[4., 6.],
           [6., 9.]])
    """
    parts = getattr(law, "components", None)
    components = (law,) if parts is None else parts(a.dim)
    total = _kernel(a, b, components[0], activation, memory_budget)
    for component in components[1:]:
        total += _kernel(a, b, component, activation, memory_budget)
    if len(components) > 1:
        total /= len(components)
    return total


def _kernel(
    a: SetBatch | PooledSets,
    b: SetBatch | PooledSets | None,
    law: HeadLaw | None,
    activation: str,
    memory_budget: int,
) -> Float[np.ndarray, "n m"]:
    if isinstance(a, SetBatch) and (b is None or isinstance(b, SetBatch)):
        return attention_kernel(a, b, law, activation, memory_budget=memory_budget)
    # a set among samples of several is a sample of one
    a = PooledSets(a, "mean") if isinstance(a, SetBatch) else a
    columns_of = PooledSets(b, "mean") if isinstance(b, SetBatch) else b if b is not None else a
    out = np.empty((len(a), len(columns_of)))
    most = max(int(batch.sets_of_samples.max()) for batch in (a, columns_of))
    # a tile of samples is a matrix of all pairs of their sets
    size = max(1, math.isqrt(block_size(8 * most**2, min(memory_budget // 4, 2**26))))
    for rows in blocks(len(a), size):
        left, starts, left_weights = a[rows].flat()
        for columns in blocks(len(columns_of), size):
            if b is None and columns.start < rows.start:
                continue
            same = b is None and columns == rows
            right, ends, right_weights = (left, starts, left_weights) if same else columns_of[columns].flat()
            pairs = attention_kernel(left, None if same else right, law, activation, memory_budget=memory_budget)
            pairs *= left_weights[:, None]
            pairs *= right_weights
            tile = np.add.reduceat(np.add.reduceat(pairs, starts, axis=0), ends, axis=1)
            out[rows, columns] = tile
            if b is None:
                out[columns, rows] = tile.T
    return out
