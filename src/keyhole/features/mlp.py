"""Features of the baseline: a two-layer network with random first layer, on the flattened input."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks, run_threads
from keyhole._checks import check_finite, check_float_array
from keyhole.features._tiles import check_batch, check_dtype, narrow
from keyhole.sets import SetBatch


def mlp_features(batch: SetBatch, weights: np.ndarray, *, dtype: Any = None) -> Float[np.ndarray, "n p"]:
    """Return the features of the baseline: a random ReLU layer on the flattened input.

    ::

        φ(x) = p^{-1/2} max(0, W z),     z = [x_0; x_1; …; x_N; 1]

    Keys enter in their order, so these features do depend on it. Without a query, x_0 is the zero vector.

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
    >>> from keyhole.heads import sample_mlp_weights
    >>> batch = kh.SetBatch(np.ones((4, 2, 3)))
    >>> kh.mlp_features(batch, sample_mlp_weights(width=7, n_keys=2, dim=3, seed=0)).shape
    (4, 7)
    """
    batch, number = check_batch(batch), check_dtype(dtype)
    if len(batch) == 0:
        return np.empty((0, len(weights)), number)
    tokens = narrow(batch, number)
    weights = _check_weights(weights, batch, number)
    scale = number.type(1.0 / math.sqrt(len(weights)))
    out = np.empty((len(batch), len(weights)), number)
    for rows in blocks(len(batch), block_size(2 * weights.shape[1] * number.itemsize, MEMORY_BUDGET)):
        # ReLU is homogeneous: scaling the narrow side saves a pass over the wide one
        flat = _flatten(tokens[rows])
        flat *= scale
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(flat, weights.T, out=out[rows])
        _check_overflow(flat, weights, out[rows])
    run_threads(lambda part: np.maximum(part, 0, out=part), np.array_split(out, 8))
    return out


def _flatten(batch: SetBatch) -> Float[np.ndarray, "n z"]:
    """Return z = [x_0; x_1; …; x_N; 1] of every set, with zeros for x_0 where there is no query."""
    n, dim = batch.shape
    keys = batch.tokens.reshape(n, -1)
    flat = np.ones((n, dim + keys.shape[1] + 1), batch.dtype)
    flat[:, :dim] = 0 if batch.query is None else batch.query
    flat[:, dim:-1] = keys
    return flat


def _check_overflow(flat: Float[np.ndarray, "n z"], weights: Float[np.ndarray, "p z"], units: np.ndarray) -> None:
    """Raise if a unit is not finite; look at them only where the sizes of both factors allow it."""
    bound = flat.shape[1] * math.prod(float(max(a.max(), -a.min())) for a in (flat, weights))
    if bound < float(np.finfo(units.dtype).max) or np.isfinite(units).all():
        return
    rest = ", or use dtype='float64'" if units.dtype == np.float32 else ""
    raise ValueError(
        f"features must be finite: these overflow {units.dtype}, with units of size up to {bound:.3g}. "
        f"Scale the tokens or the weights down{rest}."
    )


def _check_weights(weights: np.ndarray, batch: SetBatch, dtype: np.dtype[Any]) -> Float[np.ndarray, "p z"]:
    lengths = batch.lengths
    n_keys = int(lengths[0])
    if (lengths != n_keys).any():
        i = int((lengths != n_keys).argmax())
        raise ValueError(
            "the MLP features need sets of equal length, because they flatten the set: set 0 has "
            f"{n_keys} keys and set {i} has {lengths[i]}. Use attention_features, which takes any lengths."
        )
    weights = check_float_array(weights, "weights")
    columns = (n_keys + 1) * batch.dim + 1
    if weights.ndim != 2 or weights.shape[1] != columns or len(weights) == 0:
        raise ValueError(
            f"`weights` must have shape (p, (N+1)·d + 1) = (p, {columns}) for sets of {n_keys} keys of "
            f"dimension {batch.dim}: got shape {weights.shape}. "
            f"heads.sample_mlp_weights(p, {n_keys}, {batch.dim}, seed) draws such weights."
        )
    check_finite(weights, "weights")
    with np.errstate(over="ignore"):  # what overflows here shows in the features
        return weights.astype(dtype, copy=False)
