"""Features of the MLP baseline: a random ReLU layer on the flattened input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks, run_threads
from keyhole._checks import check_finite, check_float_array
from keyhole.attention.features import check_dtype, narrow
from keyhole.data.sets import SetBatch, check_sets


def mlp_features(
    batch: SetBatch, weights: np.ndarray, *, dtype: Any = None
) -> Float[np.ndarray, "n p"]:
    """Return the features of the baseline: a random ReLU layer on the flattened input.

    ::

        φ(x) = p^{-1/2} max(0, W z),     z = [x_0; x_1; …; x_N; 1]

    Keys enter in their order, so these features do depend on it. Without a query, x_0 is the zero
    vector.

    Parameters
    ----------
    batch : SetBatch
        n sets of equal length N and dimension d.
    weights : array (p, (N+1)·d + 1)
        One row per hidden unit, as ``heads.sample_mlp_weights`` draws them.
    dtype : "float64" or "float32", optional
        Type of the arithmetic and of the result, float64 unless given.

    Returns
    -------
    array (n, p)

    Notes
    -----
    Cost: one matrix product, 2p((N+1)d + 1) operations per set.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> from keyhole.attention.heads import sample_mlp_weights
    >>> batch = kh.SetBatch(np.ones((4, 2, 3)))
    >>> kh.mlp_features(batch, sample_mlp_weights(width=7, n_keys=2, dim=3, seed=0)).shape
    (4, 7)
    """
    check_sets(batch, "batch")
    number = check_dtype(dtype)
    if len(batch) == 0:
        return np.empty((0, len(weights)), number)
    tokens = narrow(batch, number)
    weights = _check_weights(weights, batch, number)
    scale = number.type(1.0 / math.sqrt(len(weights)))
    out = np.empty((len(batch), len(weights)), number)
    sets_at_once = block_size(2 * weights.shape[1] * number.itemsize, MEMORY_BUDGET)
    for rows in blocks(len(batch), sets_at_once):
        # ReLU is homogeneous: scaling the inputs, which are fewer, saves a pass over the outputs
        flat = flatten_sets(tokens[rows])
        flat *= scale
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(flat, weights.T, out=out[rows])
        _check_overflow(flat, weights, out[rows])
    run_threads(lambda part: np.maximum(part, 0, out=part), np.array_split(out, 8))
    return out


def check_equal_lengths(batches: dict[str, SetBatch]) -> int:
    """Return N, the number of keys that all sets of the batches, given by name, share."""
    (name, first), *_ = batches.items()
    n_keys = int(first.lengths[0])
    for other, batch in batches.items():
        different = np.flatnonzero(batch.lengths != n_keys)
        if different.size:
            i = int(different[0])
            raise ValueError(
                "the MLP sees the keys as one long vector, so all sets must have the same number "
                f"of keys: set 0 of `{name}` has {n_keys} and set {i} of `{other}` has "
                f"{batch.lengths[i]}. Use attention_features or attention_kernel for sets of "
                "different sizes, or bring them to one size."
            )
    return n_keys


def flatten_sets(batch: SetBatch) -> Float[np.ndarray, "n z"]:
    """Return z = [x_0; x_1; …; x_N; 1] of every set, with zeros for x_0 where there is no query."""
    n_sets = len(batch)
    query_dim = batch.query_dim
    keys = batch.tokens.reshape(n_sets, -1)
    flat = np.ones((n_sets, query_dim + keys.shape[1] + 1), batch.dtype)
    if batch.query is None:
        flat[:, :query_dim] = 0
    else:
        flat[:, :query_dim] = batch.query
    flat[:, query_dim:-1] = keys
    return flat


def _check_overflow(
    flat: Float[np.ndarray, "n z"], weights: Float[np.ndarray, "p z"], units: np.ndarray
) -> None:
    """Raise if a unit is not finite; look at them only where the sizes of both factors allow it."""
    largest_input = float(max(flat.max(), -flat.min()))
    largest_weight = float(max(weights.max(), -weights.min()))
    bound = flat.shape[1] * (largest_input * largest_weight)
    if bound < float(np.finfo(units.dtype).max) or np.isfinite(units).all():
        return
    remedy = "Scale the tokens or the weights down"
    if units.dtype == np.float32:
        remedy += ", or use dtype='float64'"
    raise ValueError(
        f"features must be finite: these overflow {units.dtype}, with units of size up to "
        f"{bound:.3g}. {remedy}."
    )


def _check_weights(
    weights: np.ndarray, batch: SetBatch, dtype: np.dtype[Any]
) -> Float[np.ndarray, "p z"]:
    """Return the weights of the MLP in ``dtype``, checked against the batch."""
    n_keys = check_equal_lengths({"batch": batch})
    weights = check_float_array(weights, "weights")
    columns = batch.query_dim + n_keys * batch.dim + 1
    if weights.ndim != 2 or weights.shape[1] != columns or len(weights) == 0:
        raise ValueError(
            f"`weights` must have shape (p, (N+1)·d + 1) = (p, {columns}) for sets of {n_keys} "
            f"keys of dimension {batch.dim}: got shape {weights.shape}. "
            f"heads.sample_mlp_weights(p, {n_keys}, {batch.dim}, seed) draws such weights."
        )
    check_finite(weights, "weights")
    with np.errstate(over="ignore"):  # what overflows here shows in the features
        return weights.astype(dtype, copy=False)
