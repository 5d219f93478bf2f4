"""Gram matrices summed in blocks, and Cholesky in tiles: matrices too large to copy.

Tiles are not only for the cache: the OpenBLAS that SciPy 1.17.1 carries writes outside of matrices
of order 20,000, in a rank-419 update as in a Cholesky factorisation.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.linalg import get_blas_funcs, get_lapack_funcs, solve_triangular

from keyhole._array import blocks

TILE = 4096  # order of the float32 tiles that are added to a float64 sum: 64 MiB each


def add_outer(total: Float[np.ndarray, "n n"], factor: Float[np.ndarray, "n k"]) -> None:
    """``total += factor @ factor.T`` on the lower triangle of a Fortran-ordered total, in place.

    No copy of a contiguous factor is made, whatever its order: a C-ordered (n, k) array is a
    Fortran-ordered (k, n) one to BLAS. Beyond TILE rows, and for a float32 factor of a float64
    total, products are computed tile by tile in the dtype of the factor and then added.
    """
    n = len(total)
    narrow = factor.dtype == np.float32 and total.dtype == np.float64
    if not narrow:
        factor = factor.astype(total.dtype, copy=False)
    (syrk,) = get_blas_funcs(("syrk",), (factor,))

    # small enough for one call, which adds in place
    if n <= TILE and not narrow:
        rows_first = factor.flags.c_contiguous
        fortran_factor = factor.T if rows_first else factor
        syrk(1.0, fortran_factor, 1.0, total, trans=rows_first, lower=1, overwrite_c=1)
        return

    # tile of columns by tile: the tile on the diagonal, then those below it
    for columns in blocks(n, TILE):
        part = factor[columns]
        rows_first = part.flags.c_contiguous
        fortran_part = part.T if rows_first else part
        total[columns, columns] += syrk(1.0, fortran_part, trans=rows_first, lower=1)
        for rows in blocks(n - columns.stop, TILE):
            below = slice(columns.stop + rows.start, columns.stop + rows.stop)
            # transposed, because the product is C-ordered and the total is not
            total[below, columns].T[...] += part @ factor[below].T


def mirror_lower(gram: Float[np.ndarray, "n n"]) -> Float[np.ndarray, "n n"]:
    """Copy the lower triangle onto the upper, in place and block by block.

    Return the same array.
    """
    n = len(gram)
    width = 128  # a pair of blocks fits the first-level caches
    for columns in blocks(n, width):
        square = gram[columns, columns]
        square[:] = np.tril(square) + np.tril(square, -1).T
        for rows in blocks(n - columns.stop, width):
            below = slice(columns.stop + rows.start, columns.stop + rows.stop)
            gram[columns, below] = gram[below, columns].T
    return gram


LARGEST = 8192  # rows up to which LAPACK factorises the whole
SIDE = 2048  # rows of a tile


def factorise_lower(matrix: Float[np.ndarray, "n n"]) -> bool:
    """Replace the lower triangle of a symmetric matrix by its Cholesky factor.

    False if it has none. n³/3 flops.
    """
    (potrf,) = get_lapack_funcs(("potrf",), (matrix,))
    if len(matrix) <= LARGEST:
        _, info = potrf(matrix, lower=1, clean=0, overwrite_a=1)
        return bool(info == 0 and np.isfinite(matrix.diagonal()).all())

    tiles = list(blocks(len(matrix), SIDE))
    for k, column in enumerate(tiles):
        # the tile on the diagonal
        corner, info = potrf(matrix[column, column], lower=1, clean=0)
        if info != 0 or not np.isfinite(corner.diagonal()).all():
            return False
        matrix[column, column] = corner
        # the tiles below it, each of which is at once taken off the tiles to its right
        for i, row in enumerate(tiles[k + 1 :], start=k + 1):
            panel = _solve_lower(corner, matrix[row, column].T).T
            matrix[row, column] = panel
            for other in tiles[k + 1 : i + 1]:
                matrix[row, other] -= panel @ matrix[other, column].T
    return True


def solve_factor(
    factor: Float[np.ndarray, "n n"], targets: Float[np.ndarray, "n t"]
) -> Float[np.ndarray, "n t"]:
    """(L Lᵀ)⁻¹ targets for a lower triangular L; the upper triangle is not read.

    2n²t operations.
    """
    solution = np.array(targets, dtype=factor.dtype, order="F")
    if len(factor) <= LARGEST:
        (potrs,) = get_lapack_funcs(("potrs",), (factor,))
        potrs(factor, solution, lower=1, overwrite_b=1)
        return solution

    tiles = list(blocks(len(factor), SIDE))
    # forward substitution by L
    for k, row in enumerate(tiles):
        for column in tiles[:k]:
            solution[row] -= factor[row, column] @ solution[column]
        solution[row] = _solve_lower(factor[row, row], solution[row])
    # back substitution by Lᵀ
    for k, row in reversed(list(enumerate(tiles))):
        for below in tiles[k + 1 :]:
            solution[row] -= factor[below, row].T @ solution[below]
        solution[row] = _solve_lower(factor[row, row], solution[row], transposed=True)
    return solution


def invert_lower(factor: Float[np.ndarray, "n n"]) -> None:
    """Replace a lower triangular matrix by its inverse, in place. n³/3 operations."""
    (trtri,) = get_lapack_funcs(("trtri",), (factor,))
    if len(factor) <= LARGEST:
        trtri(factor, lower=1, overwrite_c=1)
        return

    # column of tiles by column from the left: what lies to the right is still L, and so is the
    # diagonal below
    tiles = list(blocks(len(factor), SIDE))
    for k, column in enumerate(tiles):
        corner, _ = trtri(np.tril(factor[column, column]), lower=1)
        for i, row in enumerate(tiles[k + 1 :], start=k + 1):
            # −L_ii⁻¹ Σ_j L_ij X_jk over the tiles j of this column that are inverted already
            total = factor[row, column] @ corner
            for between in tiles[k + 1 : i]:
                total += factor[row, between] @ factor[between, column]
            factor[row, column] = -_solve_lower(factor[row, row], total)
        factor[column, column] = corner


def _solve_lower(lower: np.ndarray, targets: np.ndarray, *, transposed: bool = False) -> np.ndarray:
    """L⁻¹ targets, or L⁻ᵀ targets."""
    trans = "T" if transposed else "N"
    return np.asarray(solve_triangular(lower, targets, lower=True, trans=trans, check_finite=False))
