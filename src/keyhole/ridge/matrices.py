"""Gram matrices summed in blocks, Cholesky in tiles, BLAS in place: matrices too large to copy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.linalg import cython_blas, cython_lapack, get_blas_funcs, get_lapack_funcs, solve_triangular

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole._checks import check_count, check_float_array
from keyhole.ridge.problem import check_weights

Block = Float[np.ndarray, "_ _"]


@cache
def _routine(name: str) -> Any:
    """The Fortran routine ``name``, every argument by reference. Calls release the GIL."""
    table = cython_blas.__pyx_capi__ if name in cython_blas.__pyx_capi__ else cython_lapack.__pyx_capi__
    capsule, api = table[name], ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
    return ctypes.CFUNCTYPE(None)(address)


def _call(name: str, dtype: np.dtype[Any], *arguments: Any) -> None:
    """Call s``name`` or d``name``; str, int, float and arrays in Fortran order become references."""
    prefix, real = ("d", ctypes.c_double) if dtype == np.float64 else ("s", ctypes.c_float)
    references: list[Any] = []
    for argument in arguments:
        if isinstance(argument, str):
            references.append(ctypes.c_char_p(argument.encode()))
        elif isinstance(argument, int):
            references.append(ctypes.byref(ctypes.c_int(argument)))
        elif isinstance(argument, float):
            references.append(ctypes.byref(real(argument)))
        elif isinstance(argument, np.ndarray):
            references.append(ctypes.c_void_p(argument.ctypes.data))
        else:
            references.append(ctypes.byref(argument))
    _routine(prefix + name)(*references)


def _lead(block: Block) -> int:
    """Distance between columns; rows must be adjacent."""
    rows, columns = block.shape
    if rows > 1 and block.strides[0] != block.itemsize:
        raise ValueError(f"a block must be in Fortran order: its rows are {block.strides[0]} bytes apart.")
    return max(1, rows, block.strides[1] // block.itemsize if columns > 1 else rows)


def multiply_add(total: Block, a: Block, b: Block, *, scale: float = 1.0, keep: float = 1.0, trans: str = "NN") -> None:
    """total ← keep · total + scale · op(a) op(b), with op transposing where ``trans`` says T."""
    m, n = total.shape
    k = a.shape[1] if trans[0] == "N" else a.shape[0]
    sizes = (m, n, k, scale, a, _lead(a), b, _lead(b), keep, total, _lead(total))
    _call("gemm", total.dtype, trans[0], trans[1], *sizes)


def multiply_symmetric(total: Block, a: Block, b: Block) -> None:
    """total ← total + a b for a symmetric matrix of which the lower triangle is read."""
    m, n = b.shape
    _call("symm", total.dtype, "L", "L", m, n, 1.0, a, _lead(a), b, _lead(b), 1.0, total, _lead(total))


def solve_factored(factor: Block, targets: Block) -> None:
    """targets ← (L Lᵀ)⁻¹ targets for a lower triangular factor L; the upper triangle is not read."""
    info = ctypes.c_int(0)
    sizes = (len(factor), targets.shape[1], factor, _lead(factor), targets, _lead(targets))
    _call("potrs", factor.dtype, "L", *sizes, info)


CHUNK = 2**26
"""Bytes of the centred copy of a few columns: wide enough that the symmetric update runs at full speed."""

TILE = 4096
"""Order of the float32 tiles that are added to a float64 sum: 64 MiB each."""


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
    feature_blocks: Iterable[Float[np.ndarray, "n _"]],
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
        Blocks of columns of Φ, float32 or float64, never modified. Products are made in the dtype of the
        block.
    n : int
        Number of samples.
    dtype : float32 or float64
        Precision of the sum. float32 products summed in float64 take twice the memory and gain little: on
        attention features (n = 2000, p = 17000) the error falls from 0.15 to 0.11 units of rounding of λ_max.
    centre : bool
        Subtract the weighted mean from each column first. For a fit with an intercept this changes nothing in
        exact arithmetic, and keeps the rounding of the products in proportion to what varies: on the same
        features in float32 the error falls from 1.4 to 0.15 units. Costs one more pass over the block.
    weights : array (n,), optional
        Weights of the means.
    memory_budget : int
        Bound in bytes on any temporary.

    Returns
    -------
    AccumulatedGram
        With ``centre``, dual coefficients a found from it give v = Φᵀa as always, and the intercept b found
        with them belongs to the centred features: f(x) = (φ(x) − means)ᵀv + b.

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
    (k, n) one to BLAS. Beyond TILE rows, and for a float32 factor of a float64 total, products are made tile by tile in
    the dtype of the factor and then added. Tiles are not only for the cache: one rank-419 update of a matrix of order
    20,000 by the OpenBLAS that SciPy 1.17.1 carries wrote outside of it.
    """
    if len(total) <= TILE and not (factor.dtype == np.float32 and total.dtype == np.float64):
        _rank_update(total, factor.astype(total.dtype, copy=False), beta=1.0)
        return
    for columns in blocks(len(total), TILE):
        width = columns.stop - columns.start
        square = np.zeros((width, width), dtype=factor.dtype, order="F")
        _rank_update(square, factor[columns], beta=0.0)
        total[columns, columns] += square
        for rows in blocks(len(total) - columns.stop, TILE):
            below = slice(columns.stop + rows.start, columns.stop + rows.stop)
            # transposed, because the product is C-ordered and the total is not
            total[below, columns].T[...] += factor[columns] @ factor[below].T


def _rank_update(total: np.ndarray, factor: np.ndarray, *, beta: float) -> None:
    (syrk,) = get_blas_funcs(("syrk",), (total,))
    if factor.flags.c_contiguous:
        syrk(1.0, factor.T, beta=beta, c=total, trans=1, lower=1, overwrite_c=1)
    else:
        syrk(1.0, factor, beta=beta, c=total, lower=1, overwrite_c=1)


def mirror_lower(gram: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Copy the lower triangle onto the upper, in place and block by block; return the same array.

    Examples
    --------
    >>> mirror_lower(np.array([[1.0, 9.0], [2.0, 3.0]]))
    array([[1., 2.],
           [2., 3.]])
    """
    n, width = len(gram), 128  # a pair of blocks fits the first-level caches
    for columns in blocks(n, width):
        square = gram[columns, columns]
        square[:] = np.tril(square) + np.tril(square, -1).T
        for rows in blocks(n - columns.stop, width):
            below = slice(columns.stop + rows.start, columns.stop + rows.stop)
            gram[columns, below] = gram[below, columns].T
    return gram


LARGEST = 8192
"""Rows up to which LAPACK factorises the whole."""

SIDE = 2048
"""Rows of a tile."""


def factorise_lower(matrix: Float[np.ndarray, "n n"]) -> bool:
    """Replace the lower triangle of a symmetric matrix by its Cholesky factor; False if it has none. n³/3 operations.

    Examples
    --------
    >>> import numpy as np
    >>> matrix = np.asfortranarray([[4.0, 0.0], [2.0, 5.0]])
    >>> factorise_lower(matrix), matrix[1, 1]
    (True, np.float64(2.0))
    """
    if len(matrix) <= LARGEST:
        return _factorise_whole(matrix)
    tiles = list(blocks(len(matrix), SIDE))
    for k, column in enumerate(tiles):
        corner = np.asfortranarray(matrix[column, column])
        if not _factorise_whole(corner):
            return False
        matrix[column, column] = corner
        for i, row in enumerate(tiles[k + 1 :], start=k + 1):
            panel = _solve_lower(corner, matrix[row, column].T).T
            matrix[row, column] = panel
            for other in tiles[k + 1 : i + 1]:
                matrix[row, other] -= panel @ matrix[other, column].T
    return True


def solve_factor(factor: Float[np.ndarray, "n n"], targets: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
    """(L Lᵀ)⁻¹ targets for a lower triangular L; the upper triangle is not read. 2n²t operations."""
    solution = np.array(targets, dtype=factor.dtype, order="F")
    if len(factor) <= LARGEST:
        solve_factored(factor, solution)
        return solution
    tiles = list(blocks(len(factor), SIDE))
    for k, row in enumerate(tiles):
        for column in tiles[:k]:
            solution[row] -= factor[row, column] @ solution[column]
        solution[row] = _solve_lower(factor[row, row], solution[row])
    for k, row in reversed(list(enumerate(tiles))):
        for below in tiles[k + 1 :]:
            solution[row] -= factor[below, row].T @ solution[below]
        solution[row] = _solve_lower(factor[row, row], solution[row], transposed=True)
    return solution


def invert_lower(factor: Float[np.ndarray, "n n"]) -> None:
    """Replace a lower triangular matrix by its inverse, in place. n³/3 operations."""
    if len(factor) <= LARGEST:
        _invert_whole(factor)
        return
    tiles = list(blocks(len(factor), SIDE))
    # column by column from the left: what lies to the right is still L, and so is the diagonal below
    for k, column in enumerate(tiles):
        corner = np.tril(factor[column, column]).copy(order="F")
        _invert_whole(corner)
        for i, row in enumerate(tiles[k + 1 :], start=k + 1):
            total = factor[row, column] @ corner
            for between in tiles[k + 1 : i]:
                total += factor[row, between] @ factor[between, column]
            factor[row, column] = -_solve_lower(factor[row, row], total)
        factor[column, column] = corner


def _factorise_whole(matrix: np.ndarray) -> bool:
    (potrf,) = get_lapack_funcs(("potrf",), (matrix,))
    _, info = potrf(matrix, lower=1, clean=0, overwrite_a=1)
    return bool(info == 0 and np.isfinite(matrix.diagonal()).all())


def _invert_whole(matrix: np.ndarray) -> None:
    (trtri,) = get_lapack_funcs(("trtri",), (matrix,))
    trtri(matrix, lower=1, overwrite_c=1)


def _solve_lower(lower: np.ndarray, targets: np.ndarray, *, transposed: bool = False) -> np.ndarray:
    return np.asarray(
        solve_triangular(lower, targets, lower=True, trans="T" if transposed else "N", check_finite=False)
    )
