"""Dense symmetric matrices, as NumPy arrays on the host or torch tensors on a device.

On the host large matrices are worked on in tiles. Tiles are not only for the cache: the OpenBLAS
that SciPy 1.17.1 carries writes outside of matrices of order 20,000, in a rank-419 update as in a
Cholesky factorisation.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import scipy.linalg
from jaxtyping import Float
from scipy.linalg import get_blas_funcs, get_lapack_funcs, solve_triangular

from keyhole._array import blocks


def is_tensor(array: Any) -> bool:
    """Whether an array is a torch tensor; torch is not imported to tell."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def as_like(array: np.ndarray, other: Any) -> Any:
    """A NumPy array in float64, where ``other`` lives."""
    if not is_tensor(other):
        return np.asarray(array, dtype=np.float64)
    import torch

    # torch warns of memory that it may not write to
    writable = np.require(array, requirements=["C", "W"])
    return torch.as_tensor(writable, dtype=torch.float64, device=other.device)


def as_float64(array: Any) -> Any:
    """The array in float64, itself if it is."""
    if is_tensor(array):
        return array.double()
    return array.astype(np.float64, copy=False)


def copied(array: Any) -> Any:
    """An array or a tensor in memory of its own."""
    if is_tensor(array):
        return array.clone()
    return array.copy(order="K")


def on_host(array: Any) -> np.ndarray:
    """A NumPy array of the same numbers."""
    if is_tensor(array):
        return np.asarray(array.detach().cpu().numpy())
    return np.asarray(array)


def eigen(matrix: Any) -> tuple[Any, Any]:
    """Eigenvalues of a symmetric matrix, largest first, and its eigenvectors in columns.

    About 9n³ operations. A NumPy matrix is overwritten, and its lower triangle is read.
    """
    if is_tensor(matrix):
        import torch

        values, vectors = torch.linalg.eigh(matrix)
        return values.flip(0), vectors.flip(1)
    # of LAPACK's drivers "evd" is the fastest for all eigenvectors
    values, vectors = scipy.linalg.eigh(
        matrix, lower=True, driver="evd", overwrite_a=True, check_finite=False
    )
    return values[::-1], vectors[:, ::-1]


def with_penalty(matrix: Any, alpha: float) -> Any:
    """A copy of a square matrix with alpha added to its diagonal."""
    if is_tensor(matrix):
        regularised = matrix.clone()
        regularised.diagonal().add_(alpha)
        return regularised
    regularised = np.array(matrix, order="F")
    regularised.ravel(order="K")[:: len(matrix) + 1] += alpha
    return regularised


def positive_factor(matrix: Any) -> Any:
    """The lower Cholesky factor L of a matrix, None if it has none. n³/3 operations.

    A NumPy matrix is overwritten: the factor is in its lower triangle, and the upper is zero.
    """
    if is_tensor(matrix):
        import torch

        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor if int(info) == 0 else None
    lower = np.asfortranarray(matrix)
    if not factorise_lower(lower):
        return None
    return lower


def inverse_of_factor(factor: Any) -> Any:
    """(L Lᵀ)⁻¹, both triangles, from a lower Cholesky factor. 2n³/3 operations."""
    if is_tensor(factor):
        import torch

        return torch.cholesky_inverse(factor)
    if len(factor) <= LARGEST:
        (potri,) = get_lapack_funcs(("potri",), (factor,))
        inverse, _ = potri(factor, lower=1, overwrite_c=1)
        return mirror_lower(inverse)
    invert_lower(factor)
    lower = np.tril(factor)
    return lower.T @ lower


def solve_lower(factor: Any, targets: Any) -> Any:
    """L⁻¹ targets for a lower triangular L."""
    if is_tensor(factor):
        import torch

        return torch.linalg.solve_triangular(factor, targets, upper=False)
    return scipy.linalg.solve_triangular(factor, targets, lower=True, check_finite=False)


def solve_stack(matrices: Any, targets: Any) -> Any:
    """Solutions of a stack of linear systems."""
    if is_tensor(matrices):
        import torch

        return torch.linalg.solve(matrices, targets)
    return np.linalg.solve(matrices, targets)


def identity(order: int, other: Any) -> Any:
    """The identity matrix, where ``other`` lives."""
    return as_like(np.eye(order), other)


def column_of(array: Any, other: Any) -> Any:
    """Two arrays side by side, the second as a column."""
    if is_tensor(array):
        import torch

        return torch.cat([array, other[:, None]], dim=1)
    return np.concatenate([array, other[:, None]], axis=1)

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
