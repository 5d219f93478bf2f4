"""Gram matrices summed block by block, so that the whole design matrix never has to exist."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.linalg import get_blas_funcs

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole._checks import check_count, check_float_array
from keyhole.solvers.weighted_gram import PANEL, check_weights

CHUNK = 2**26
"""Bytes of the centred copy of a few columns: wide enough that the symmetric update runs at full speed."""


@dataclass(frozen=True)
class AccumulatedGram:
    """ΦΦᵀ summed over blocks of columns of Φ.

    Attributes
    ----------
    gram : array (n, n)
        Fortran order. The lower triangle holds ΦΦᵀ; the upper is zero until ``mirror_lower``.
    means : array (p,)
        What was subtracted from the columns of Φ: their weighted means, or zeros.
    rounding : float
        Unit of rounding of the products, for ``ridge_gram_path``.
    """

    gram: Float[np.ndarray, "n n"]
    means: Float[np.ndarray, " p"]
    rounding: float


def accumulate_gram(
    feature_blocks: Iterable[Float[np.ndarray, "n p_b"]],
    n: int,
    dtype: Any = np.float64,
    *,
    centre: bool = False,
    weights: Float[np.ndarray, " n"] | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> AccumulatedGram:
    """Sum ΦΦᵀ over blocks Φ_b of columns by symmetric rank-k updates, in place.

    Parameters
    ----------
    feature_blocks : iterable of arrays (n, p_b)
        Blocks of columns of Φ, float32 or float64, never modified. Products are made in the dtype of the block.
    n : int
        Number of samples.
    dtype : float32 or float64
        Precision of the sum. float32 products summed in float64 cost a tenth more than summed in float32.
    centre : bool
        Subtract the weighted mean from each column first. For a fit with an intercept this changes nothing in exact
        arithmetic, and keeps the rounding of the products in proportion to what varies: with attention features
        in float32 the error of the centred Gram matrix falls from 134 to 0.1 units of rounding of λ_max.
    weights : array (n,), optional
        Weights of the means.
    memory_budget : int
        Bound in bytes on any temporary.

    Returns
    -------
    AccumulatedGram
        With ``centre``, dual coefficients a found from it give v = Φᵀa as always, and their intercept belongs to
        the centred features: f(x) = (φ(x) − means)ᵀv + b.

    Notes
    -----
    Cost: n²p operations, half of a general product; one n × n matrix.

    Examples
    --------
    >>> import numpy as np
    >>> phi = np.arange(12.0).reshape(3, 4)
    >>> total = accumulate_gram([phi[:, :2], phi[:, 2:]], n=3)
    >>> bool(np.allclose(mirror_lower(total.gram), phi @ phi.T))
    True
    """
    n = check_count(n, "n")
    gram = np.zeros((n, n), dtype=dtype, order="F")
    shares = None
    if centre:
        shares = check_weights(weights, n)
        shares /= shares.sum()
    rounding, means = float(np.finfo(gram.dtype).eps), [np.zeros(0)]
    for i, block in enumerate(feature_blocks):
        block = check_float_array(block, f"feature_blocks[{i}]")
        if block.ndim != 2 or block.shape[0] != n:
            raise ValueError(
                f"every block of features must have shape (n, p_b) with n = {n} samples: block {i} has "
                f"shape {block.shape}."
            )
        rounding = max(rounding, float(np.finfo(block.dtype).eps))
        if shares is None:
            add_outer(gram, block)
            means.append(np.zeros(block.shape[1]))
            continue
        width = block_size(n * block.itemsize, min(memory_budget, CHUNK))
        scratch = np.empty(n * min(width, block.shape[1]), dtype=block.dtype)
        for columns in blocks(block.shape[1], width):
            chunk, mean = _centred_columns(block[:, columns], shares, scratch)
            add_outer(gram, chunk)
            means.append(mean)
    return AccumulatedGram(gram, np.concatenate(means), rounding)


def _centred_columns(
    columns: Float[np.ndarray, "n c"], shares: Float[np.ndarray, " n"], scratch: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The columns less their weighted means, in ``scratch`` and in their own memory order; and the means."""
    n, width = columns.shape
    scratch = scratch[: n * width]
    row_major = abs(columns.strides[0]) >= abs(columns.strides[1])
    centred = scratch.reshape(n, width) if row_major else scratch.reshape(width, n).T
    shares = shares.astype(columns.dtype)
    mean = shares @ columns
    np.subtract(columns, mean, out=centred)
    # in float32 the first mean is rounded: what it left behind completes it
    return centred, mean.astype(np.float64) + (shares @ centred).astype(np.float64)


def add_outer(total: Float[np.ndarray, "n n"], factor: Float[np.ndarray, "n k"]) -> None:
    """``total += factor @ factor.T`` on the lower triangle of a Fortran-ordered total, in place.

    No copy of a contiguous factor is made, whatever its order: a C-ordered (n, k) array is a Fortran-ordered
    (k, n) one to BLAS. A float32 factor of a float64 total is multiplied in float32 panel by panel, and added in
    float64.
    """
    if factor.dtype == np.float32 and total.dtype == np.float64:
        _add_outer_panels(total, factor)
        return
    factor = factor.astype(total.dtype, copy=False)
    (syrk,) = get_blas_funcs(("syrk",), (total,))
    if factor.flags.c_contiguous:
        syrk(1.0, factor.T, beta=1.0, c=total, trans=1, lower=1, overwrite_c=1)
    else:
        syrk(1.0, factor, beta=1.0, c=total, lower=1, overwrite_c=1)


def _add_outer_panels(total: Float[np.ndarray, "n n"], factor: Float[np.ndarray, "n k"]) -> None:
    upper = total.T  # C-ordered, so that a panel of rows is contiguous
    n = len(total)
    width = min(
        block_size(n * factor.itemsize, PANEL), max(64, n // 16)
    )  # the wasted half-panels stay below 1/16
    for rows in blocks(n, width):
        upper[rows, rows.start :] += factor[rows] @ factor[rows.start :].T


def mirror_lower(gram: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Copy the lower triangle onto the upper, in place and block by block; return the same array.

    Examples
    --------
    >>> mirror_lower(np.array([[1.0, 9.0], [2.0, 3.0]]))
    array([[1., 2.],
           [2., 3.]])
    """
    n, width = len(gram), 512
    for columns in blocks(n, width):
        square = gram[columns, columns]
        square[:] = np.tril(square) + np.tril(square, -1).T
        for rows in blocks(n - columns.stop, width):
            below = slice(columns.stop + rows.start, columns.stop + rows.stop)
            gram[columns, below] = gram[below, columns].T
    return gram
