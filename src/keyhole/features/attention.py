"""Features of an attention layer with frozen heads: whole, block by block, or contracted with values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole._checks import check_count, check_finite, check_float_array
from keyhole._torch import is_tensor
from keyhole.activations import check_activation
from keyhole.features._tiles import TiledLayer, check_batch, check_dtype, check_heads
from keyhole.heads import HeadDraw
from keyhole.sets import SetBatch

# Up to so many outputs, contracting the features in cache beats a matrix product with features in memory.
_FUSED_OUTPUTS = 16


def attention_features(
    batch: SetBatch, heads: Any, activation: str = "relu", *, dtype: Any = None
) -> Float[Any, "n p"]:
    """Return the features of an attention layer with frozen heads.

    ::

        φ_m(x) = M^{-1/2} (1/N) Σ_i σ(s_mi) x~_i,     s_mi = x~_0ᵀ W_m x~_i,     x~ = [x; 1]

    and for ``activation="softmax"`` softmax_i(s_mi) in the place of σ(s_mi)/N.

    Parameters
    ----------
    batch : SetBatch
        n sets of keys of dimension d. Sets without a query have the constant query x~_0 = [0; √2].
    heads : array (M, D, D) or HeadDraw
        The frozen W_m, D = d + 1. A ``HeadDraw`` is regenerated block by block, never stored whole.
    activation : {"relu", "linear", "square", "step", "exp", "softmax"}
        σ; "step" is 1 for positive scores.
    dtype : "float64" or "float32", optional
        Type of the arithmetic and of the result, float64 unless given; for torch tensors that of the tensors.

    Returns
    -------
    array (n, M·D)
        Column m·D + e is coordinate e of φ_m. For a batch of torch tensors, a tensor on their device.

    Notes
    -----
    Cost: 2MD² + 4MD·N_i operations for a set of N_i keys, whatever the lengths of the others. The features of
    a set are computed in the same order whatever else is in the batch: slicing it changes no bit of them.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> batch = kh.SetBatch([np.ones((2, 3)), np.ones((5, 3))], query=np.zeros((2, 3)))
    >>> heads = kh.GaussianHeads().sample(n_heads=10, dim=3, seed=0)
    >>> kh.attention_features(batch, heads).shape
    (2, 40)
    """
    if check_batch(batch).device is not None:
        return _tensor_features(batch, heads, activation, dtype)
    layer = TiledLayer.of(batch, heads, activation, dtype)
    out = np.empty((len(batch), len(layer.heads) * layer.width), layer.dtype)
    for part, block in layer.head_blocks(MEMORY_BUDGET):
        layer.write(out, part.start * layer.width, block, slice(0, len(batch)))
    return out


def _tensor_features(batch: SetBatch, heads: Any, activation: str, dtype: Any) -> Any:
    """The features of torch tensors, where they are."""
    from keyhole._torch import dispatch

    activation = check_activation(activation)
    batch = batch if dtype is None else batch.astype(check_dtype(dtype))
    heads = dispatch.check_head_tensor(heads, batch.dim) if is_tensor(heads) else check_heads(heads, batch.dim)
    size = block_size(40 * (batch.dim + 1) ** 2, MEMORY_BUDGET)  # what it takes to draw a head
    parts = (
        (part, heads.block(part.start, part.stop) if isinstance(heads, HeadDraw) else heads[part.start : part.stop])
        for part in blocks(len(heads), size)
    )
    sets = (batch.tokens, batch.offsets, batch.query)
    return dispatch.attention_features(*sets, parts, len(heads), activation, MEMORY_BUDGET)


def feature_blocks(
    batch: SetBatch,
    heads: HeadDraw | np.ndarray,
    activation: str = "relu",
    *,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
    reuse_buffer: bool = False,
    centre: np.ndarray | None = None,
) -> Iterator[tuple[slice, Float[np.ndarray, "n p"]]]:
    """Yield the features block by block of heads, so that Φ never exists as a whole.

    Parameters
    ----------
    batch, heads, activation, dtype
        As for ``attention_features``. The scaling M^{-1/2} is that of all heads.
    memory_budget : int
        Bytes that a block of features and the heads behind it may take together; one head at the least.
    reuse_buffer : bool
        Write every block into the same memory, which saves the system's work of handing out new pages. Each
        block is then overwritten when the next is asked for.
    centre : array (M·D,), optional
        Subtracted from the features of every set as they are written, at no cost.

    Yields
    ------
    part : slice
        The heads of the block.
    features : array (n, m·D)
        Columns ``part.start·D … part.stop·D − 1`` of Φ.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> from keyhole.heads import HeadDraw
    >>> batch = kh.SetBatch(np.ones((4, 2, 3)))
    >>> draw = HeadDraw(kh.GaussianHeads(), n_heads=100, dim=3, seed=0)
    >>> gram = sum(phi @ phi.T for _, phi in feature_blocks(batch, draw, reuse_buffer=True))
    >>> gram.shape
    (4, 4)
    """
    layer = TiledLayer.of(check_batch(batch).numpy(), heads, activation, dtype)
    # checked here and not in the generator, so that a mistake shows where it is made
    if centre is not None:
        centre = np.asarray(centre).reshape(len(layer.heads), layer.width)
    return _feature_blocks(layer, check_count(memory_budget, "memory_budget"), reuse_buffer, centre)


def _feature_blocks(
    layer: TiledLayer, memory_budget: int, reuse_buffer: bool, centre: Float[np.ndarray, "m e"] | None
) -> Iterator[tuple[slice, Float[np.ndarray, "n p"]]]:
    n_sets = len(layer.batch)
    buffer = np.empty(0, layer.dtype)
    for part, block in layer.head_blocks(memory_budget, n_sets * layer.width * layer.dtype.itemsize):
        columns = len(block) * layer.width
        if n_sets * columns > len(buffer) or not reuse_buffer:
            buffer = np.empty(n_sets * columns, layer.dtype)
        features = buffer[: n_sets * columns].reshape(n_sets, columns)
        layer.write(features, 0, block, slice(0, n_sets), None if centre is None else centre[part])
        yield part, features


def apply_values(
    batch: SetBatch,
    heads: HeadDraw | np.ndarray,
    values: np.ndarray,
    activation: str = "relu",
    *,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "n t"]:
    """Return Φ·values, the outputs of the layer, without ever forming Φ.

    Parameters
    ----------
    batch, heads, activation, dtype
        As for ``attention_features``.
    values : array (M·D, t) or (M, D, t)
        One value vector per head and output.
    memory_budget : int
        Bytes that temporaries may take.

    Returns
    -------
    array (n, t)
        f(x) = Σ_m <v_m, φ_m(x)> for each set and output.

    Notes
    -----
    Cost: that of the features without writing them, and 2MD·t operations per set.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> batch = kh.SetBatch(np.ones((4, 2, 3)))
    >>> heads = kh.GaussianHeads().sample(n_heads=10, dim=3, seed=0)
    >>> values = np.ones((40, 1))
    >>> bool(np.allclose(apply_values(batch, heads, values), kh.attention_features(batch, heads) @ values))
    True
    """
    layer = TiledLayer.of(check_batch(batch).numpy(), heads, activation, dtype)
    memory_budget = check_count(memory_budget, "memory_budget")
    table = _check_values(values, len(layer.heads), layer.width)
    out = np.zeros((len(batch), table.shape[2]), layer.dtype)
    if table.shape[2] <= _FUSED_OUTPUTS:
        for part, block in layer.head_blocks(memory_budget, in_cache=True):
            layer.add_outputs(out, block, table[part])
    else:
        _add_products(layer, table, out, memory_budget)
    finite = np.isfinite(out).all(axis=1)
    if not finite.all():
        raise layer.overflow(int(np.flatnonzero(~finite)[0]))
    return out


def _add_products(
    layer: TiledLayer, table: Float[np.ndarray, "m e t"], out: Float[np.ndarray, "n t"], memory_budget: int
) -> None:
    """Add Φ·values to ``out`` by matrix products with blocks of features."""
    row = layer.width * layer.dtype.itemsize
    # as many sets as leave room for 256 heads, so that neither sets nor heads are done one by one
    n_rows = max(1, min(len(out), memory_budget // (256 * row)))
    for part, block in layer.head_blocks(memory_budget, n_rows * row):
        values = table[part].reshape(-1, table.shape[2]).astype(layer.dtype, copy=False)
        buffer = np.empty((n_rows, len(values)), layer.dtype)
        for rows in blocks(len(out), n_rows):
            features = buffer[: rows.stop - rows.start]
            layer.write(features, 0, block, rows)
            out[rows] += features @ values


def _check_values(values: np.ndarray, n_heads: int, width: int) -> Float[np.ndarray, "m e t"]:
    values = check_float_array(values, "values")
    if values.ndim == 2 and len(values) == n_heads * width:
        values = values.reshape(n_heads, width, values.shape[1])
    if values.ndim != 3 or values.shape[:2] != (n_heads, width):
        raise ValueError(
            f"`values` must have shape (M·D, t) = ({n_heads * width}, t) or (M, D, t) = ({n_heads}, {width}, "
            f"t) for t outputs: got shape {values.shape}. A single output is values[:, None]."
        )
    check_finite(values, "values")
    return values
