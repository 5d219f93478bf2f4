"""Features of samples that stand for one set or several: computed set by set, then added up with coefficients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET
from keyhole.features._tiles import check_dtype
from keyhole.features.attention import apply_values, attention_features, feature_blocks
from keyhole.features.pullback import attention_pullback
from keyhole.groups import PooledSets
from keyhole.heads import HeadDraw
from keyhole.sets import SetBatch

_TOKENS = 200_000
"""Tokens written out at a time: enough to occupy every thread, little memory."""


def pooled_features(
    batch: SetBatch | PooledSets, heads: HeadDraw | np.ndarray, activation: str = "relu", *, dtype: Any = None
) -> Float[np.ndarray, "n p"]:
    """Return Φ, one row per sample: Φ_i = Σ_j c_j φ(set j) over the sets of sample i.

    Parameters as for `attention_features`, and the same as it for a SetBatch.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> sets, heads = kh.SetBatch([np.ones((2, 3)), np.ones((5, 3))]), kh.GaussianHeads().sample(4, 3, seed=0)
    >>> total, mean = pooled_features(PooledSets(sets, "sum"), heads), kh.attention_features(sets, heads)
    >>> bool(np.allclose(total, sets.lengths[:, None] * mean))
    True
    """
    if isinstance(batch, SetBatch):
        return attention_features(batch, heads, activation, dtype=dtype)
    out = np.empty((len(batch), len(heads) * (batch.dim + 1)), check_dtype(dtype))
    for rows in _row_blocks(batch, out.shape[1] * out.itemsize):
        sets, starts, coefficients = batch[rows].flat()
        features = attention_features(sets, heads, activation, dtype=dtype)
        features *= coefficients[:, None].astype(features.dtype)
        out[rows] = np.add.reduceat(features, starts, axis=0)
    return out


def pooled_feature_blocks(
    batch: SetBatch | PooledSets,
    heads: HeadDraw,
    activation: str = "relu",
    *,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
    reuse_buffer: bool = False,
    centre: np.ndarray | None = None,
) -> Iterator[tuple[slice, Float[np.ndarray, "n p"]]]:
    """Yield the features block by block of heads, as `feature_blocks` does."""
    if isinstance(batch, SetBatch):
        options: dict[str, Any] = {"memory_budget": memory_budget, "reuse_buffer": reuse_buffer, "centre": centre}
        yield from feature_blocks(batch, heads, activation, dtype=dtype, **options)
        return
    width = batch.dim + 1
    size = max(1, memory_budget // (2 * len(batch) * width * check_dtype(dtype).itemsize))
    for start in range(0, heads.n_heads, size):
        part = slice(start, min(start + size, heads.n_heads))
        block = heads.block(part.start, part.stop)
        features = pooled_features(batch, block, activation, dtype=dtype)
        # the scaling M^{-1/2} is that of all heads
        features *= np.sqrt(len(block) / heads.n_heads)
        if centre is not None:
            features -= centre[part.start * width : part.stop * width].astype(features.dtype)
        yield part, features


def pooled_values(
    batch: SetBatch | PooledSets,
    heads: HeadDraw | np.ndarray,
    values: np.ndarray,
    activation: str = "relu",
    *,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "n t"]:
    """Return Φ·values, as `apply_values` does, without ever forming Φ."""
    options: dict[str, Any] = {"dtype": dtype, "memory_budget": memory_budget}
    if isinstance(batch, SetBatch):
        return apply_values(batch, heads, values, activation, **options)
    pieces = []
    for rows in _row_blocks(batch, 8 * values.shape[-1]):
        sets, starts, coefficients = batch[rows].flat()
        outputs = apply_values(sets, heads, values, activation, **options)
        pieces.append(np.add.reduceat(outputs * coefficients[:, None], starts, axis=0))
    return np.concatenate(pieces)


def pooled_pullback(
    batch: SetBatch | PooledSets,
    heads: Float[np.ndarray, "m e e"],
    cotangent: Float[np.ndarray, "n p"],
    activation: str = "relu",
    *,
    n_means: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "k e e"]:
    """Return the gradient of Σ <cotangent, Φ> in the means of the heads, as `attention_pullback` does."""
    options: dict[str, Any] = {"n_means": n_means, "memory_budget": memory_budget}
    if isinstance(batch, SetBatch):
        return attention_pullback(batch, heads, cotangent, activation, **options)
    total = np.zeros((n_means or len(heads), *heads.shape[1:]), heads.dtype)
    for rows in _row_blocks(batch, cotangent.shape[1] * cotangent.itemsize):
        sets, starts, coefficients = batch[rows].flat()
        counts = np.diff(np.append(starts, len(sets)))
        spread = np.repeat(cotangent[rows], counts, axis=0)
        spread *= coefficients[:, None].astype(spread.dtype)
        total += attention_pullback(sets, heads, spread, activation, **options)
    return total


def _row_blocks(batch: PooledSets, bytes_per_set: int) -> Iterator[slice]:
    """Runs of samples that write out to few enough tokens, and whose sets have few enough features."""
    cost = np.cumsum(batch.weights_of_sets * max(1, bytes_per_set * _TOKENS // (MEMORY_BUDGET // 4) // 8))
    start = 0
    while start < len(batch):
        before = cost[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(cost, before + _TOKENS, side="right")))
        yield slice(start, stop)
        start = stop
