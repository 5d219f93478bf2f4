"""The gradient of attention features with respect to their heads, pulled back from a gradient in the features."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, run_threads
from keyhole._checks import check_choice
from keyhole.sets import SetBatch

DIFFERENTIABLE = ("relu", "softmax", "linear", "square", "exp")
"""Activations whose heads have a gradient; that of "step" is zero almost everywhere."""


def attention_pullback(
    batch: SetBatch,
    heads: Float[np.ndarray, "m e e"],
    cotangent: Float[np.ndarray, "n p"],
    activation: str = "relu",
    *,
    n_means: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "k e e"]:
    """Return the gradient of Σ <cotangent, Φ> in the means that the heads share out among themselves.

    With a_m = cotangent_m / √M and g_mi = <a_m, x~_i>, the gradient in the score s_mi is σ'(s_mi) g_mi / N, or
    w_mi (g_mi − Σ_j w_mj g_mj) for softmax weights w; that in W_m is Σ_i ∂s_mi x~_0 x~_iᵀ, summed over sets.

    Parameters
    ----------
    batch : SetBatch
        n sets.
    heads : array (M, D, D)
        W_m = U_k + noise with k = m mod K.
    cotangent : array (n, M·D)
        Gradient in the features, column m·D + e for coordinate e of head m.
    activation : {"relu", "softmax", "linear", "square", "exp"}
    n_means : int, optional
        K; M by default, which gives the gradient in every head.
    memory_budget : int
        Bound in bytes on temporaries.

    Returns
    -------
    array (K, D, D)
        The gradient in U, in the precision of ``heads``.

    Notes
    -----
    Cost: 2MD² + 6MD·N_i operations for a set of N_i keys: about that of the features themselves. Sets of equal
    length are stacked, so nothing is padded.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> batch = kh.SetBatch(np.ones((2, 3, 2)), query=np.ones((2, 2)))
    >>> heads = np.full((1, 3, 3), 0.1)
    >>> attention_pullback(batch, heads, np.ones((2, 3)))[0, 0]      # 2 sets, σ' = 1, <1, x~> = 3
    array([6., 6., 6.])
    """
    check_choice(activation, "activation", DIFFERENTIABLE)
    n_heads, width = heads.shape[:2]
    n_means = n_heads if n_means is None else n_means
    wide = np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(width, n_heads * width)
    parts = list(_stacks(batch, n_heads, width, heads.itemsize, memory_budget // 16))
    keys, queries = batch.extended_keys().astype(heads.dtype), batch.extended_query().astype(heads.dtype)
    # one place for each part, summed in their order: the same bits whichever thread is done first
    totals = [np.zeros(0)] * len(parts)

    def work(number: int) -> None:
        rows = parts[number]
        length = batch.lengths[rows[0]]
        stack = keys[batch.offsets[rows][:, None] + np.arange(length)]  # (b, N, D)
        query = queries[rows]
        projected = (query @ wide).reshape(len(rows), n_heads, width)
        scores = projected @ stack.transpose(0, 2, 1)
        pulled = cotangent[rows].reshape(len(rows), n_heads, width).astype(heads.dtype, copy=False)
        slopes = pulled @ stack.transpose(0, 2, 1)
        _through_weights(activation, scores, slopes)
        shared = _sum_shared(slopes, n_means)  # (b, K, N)
        lines = (shared @ stack).reshape(len(rows), n_means * width)
        totals[number] = query.T @ lines

    run_threads(work, range(len(parts)))
    total = np.sum(totals, axis=0) / math.sqrt(n_heads)
    return np.ascontiguousarray(total.reshape(width, n_means, width).transpose(1, 0, 2))


def _stacks(batch: SetBatch, n_heads: int, width: int, itemsize: int, budget: int) -> Iterator[Int[np.ndarray, " b"]]:
    """Rows of sets of equal length, as many at a time as fit the budget."""
    lengths = batch.lengths
    order = np.argsort(lengths, kind="stable")
    cuts = np.flatnonzero(np.diff(lengths[order])) + 1
    for same in np.split(order, cuts):
        length = int(lengths[same[0]])
        each = itemsize * (n_heads * (2 * width + 3 * length) + 2 * length * width)
        for part in blocks(len(same), min(block_size(each, budget), 256)):
            yield same[part]


def _through_weights(activation: str, scores: Float[np.ndarray, "b m k"], slopes: Float[np.ndarray, "b m k"]) -> None:
    """Turn the gradient in the weights, in place, into that in the scores; ``scores`` is scratch afterwards."""
    if activation == "softmax":
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=2, keepdims=True)
        slopes -= np.einsum("bmk,bmk->bm", scores, slopes)[:, :, None]
        slopes *= scores
        return
    if activation == "relu":
        slopes *= scores > 0
    elif activation == "square":
        scores *= 2
        slopes *= scores
    elif activation == "exp":
        slopes *= np.exp(scores, out=scores)
    slopes /= scores.shape[2]


def _sum_shared(slopes: Float[np.ndarray, "b m k"], n_means: int) -> Float[np.ndarray, "b g k"]:
    """Sum over the heads m, m + K, m + 2K … that share a mean."""
    n_heads = slopes.shape[1]
    if n_means == n_heads:
        return slopes
    whole = n_heads // n_means * n_means
    summed = slopes[:, :whole].reshape(len(slopes), -1, n_means, slopes.shape[2]).sum(axis=1)
    summed[:, : n_heads - whole] += slopes[:, whole:]
    return np.asarray(summed)
