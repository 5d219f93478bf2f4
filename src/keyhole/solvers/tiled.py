"""Cholesky of large matrices in place, tile by tile, on the lower triangle of a Fortran-ordered array.

Up to LARGEST rows LAPACK does it whole. Beyond, its threaded routines are not to be trusted: `dpotrf` and `dsyrk` of
the OpenBLAS that SciPy 1.17.1 carries write outside of a matrix of order 20,000. Tiles need only products of tiles, and
LAPACK on one tile at a time.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.linalg import get_lapack_funcs, solve_triangular

from keyhole._array import blocks
from keyhole.solvers.inplace import solve_factored

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
