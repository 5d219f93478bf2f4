"""Ridge with exact leave-one-out from a Gram matrix on a device.

Cholesky in float64, in place, tile by tile.

The steps of `weigh_gram` and `cholesky_route` of gram.py. Tiles keep every call to the libraries
within 32-bit sizes, and left-looking updates are one long product per tile. A path of penalties is
one factorisation each: 2n³/3 operations at the rate of matrix products, where one
eigendecomposition takes 25 times as long (n = 8192, H200).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import eigvalsh_tridiagonal

from keyhole._array import MEMORY_BUDGET, blocks
from keyhole.ridge.gram import SolvedRoute, Weighing, path_route
from keyhole.ridge.problem import RidgeFit, RidgeProblem, numerical_floor

SIDE = 2048  # rows of a tile
_LANCZOS = 80  # steps towards the largest eigenvalue


def ridge_device(
    gram: torch.Tensor,
    problem: RidgeProblem,
    *,
    rounding: float,
    room_for_a_copy: bool = True,
    memory_budget: int = MEMORY_BUDGET,
) -> RidgeFit:
    """Ridge on a float64 Gram matrix on a device, which is overwritten.

    ``rounding`` is that of the arithmetic that made it. Penalties below the numerical floor are
    left to the host. Without room for a copy, one penalty is factorised in the place of the matrix.
    """
    ridge = DeviceRidge.of(gram, problem)
    single = problem.alphas is not None and len(problem.alphas) == 1
    largest = ridge.size() if single else ridge.largest()
    floor = numerical_floor(max(largest, ridge.weighing.removed), len(gram), rounding)
    alphas, in_place = problem.grid(largest, floor), single and not room_for_a_copy
    above = alphas.min() > 0 and alphas.min() >= floor
    solved: list[tuple[np.ndarray, np.ndarray]] = []
    for alpha in alphas if above else ():
        found = ridge.solve(float(alpha), overwrite=in_place)
        if found is None:
            break
        solved.append((found[0].cpu().numpy(), found[1].cpu().numpy()))
    if len(solved) == len(alphas):
        return problem.fit(SolvedRoute("device", alphas, floor, rounding, ridge.weighing, solved))
    if above and in_place:
        raise np.linalg.LinAlgError(
            f"the kernel plus alpha = {alphas[0]:g} is not positive definite in float64, and the "
            "device is too small to keep a copy of it. Use a larger alpha, dtype='float64', or "
            "device=None."
        )
    matrix = np.asfortranarray(ridge.matrix.cpu().numpy())
    return problem.fit(
        path_route(matrix, ridge.weighing, rounding, np.dtype(np.float64), memory_budget)
    )


@dataclass(frozen=True)
class DeviceRidge:
    """H S K S H on a device, as `weigh_gram` makes it: both triangles, in float64.

    S (y − ȳ); and how it was made.
    """

    matrix: torch.Tensor
    y: torch.Tensor
    normal: torch.Tensor | None
    weighing: Weighing

    @classmethod
    def of(cls, gram: torch.Tensor, problem: RidgeProblem) -> DeviceRidge:
        """Weigh and reflect a symmetric float64 matrix, which is overwritten."""
        roots = torch.as_tensor(problem.roots, device=gram.device)
        y = torch.as_tensor(problem.scaled, device=gram.device)
        diagonal = gram.diagonal().cpu().numpy().copy()
        if problem.weighted:
            for rows in blocks(len(gram), SIDE):
                gram[rows] *= roots[rows, None]
                gram[rows] *= roots
        if not problem.fit_intercept:
            weighing = Weighing(problem, None, np.zeros(len(gram)), 0.0, diagonal)
            return cls(gram, y, None, weighing)
        length = torch.linalg.vector_norm(roots)
        direction = roots / length
        image = gram @ direction
        normal = direction.clone()
        normal[0] += 1.0  # no cancellation: every root is positive
        size = torch.linalg.vector_norm(normal)
        normal /= size
        product = (image + gram[:, 0]) / size
        update = 2.0 * (product - (normal @ product) * normal)
        for rows in blocks(len(gram), SIDE):
            gram[rows].addr_(normal[rows], update, alpha=-1.0).addr_(
                update[rows], normal, alpha=-1.0
            )
        gram[0] = 0.0
        gram[:, 0] = 0.0
        mean, removed = (image / length).cpu().numpy(), float(direction @ image)
        return cls(
            gram, y, normal, Weighing(problem, normal.cpu().numpy(), mean, removed, diagonal)
        )

    def size(self) -> float:
        """An upper bound of the largest eigenvalue, by the Frobenius norm.

        What centring removed takes its place if that is larger.
        """
        total = sum(
            float(self.matrix[rows].square().sum()) for rows in blocks(len(self.matrix), SIDE)
        )
        return max(total**0.5, self.weighing.removed)

    def largest(self) -> float:
        """The largest eigenvalue, by Lanczos steps with full orthogonalisation."""
        n = len(self.matrix)
        vector = torch.linspace(
            1.0, 2.0, n, dtype=torch.float64, device=self.matrix.device
        ).sin() + self.y.sum(dim=1)
        basis = [vector / torch.linalg.vector_norm(vector)]
        diagonal, beside = [], []
        for _ in range(min(_LANCZOS, n)):
            image = self.matrix @ basis[-1]
            diagonal.append(float(image @ basis[-1]))
            known = torch.stack(basis)
            for _ in range(2):
                image -= known.T @ (known @ image)
            norm = float(torch.linalg.vector_norm(image))
            if norm <= 1e-14 * max(map(abs, diagonal)) or len(basis) == n:
                break
            beside.append(norm)
            basis.append(image / norm)
        return max(0.0, float(eigvalsh_tridiagonal(diagonal, beside[: len(diagonal) - 1])[-1]))

    def reflect(self, x: torch.Tensor) -> torch.Tensor:
        """H x; x itself without an intercept."""
        return x if self.normal is None else x - torch.outer(2.0 * self.normal, self.normal @ x)

    def solve(self, alpha: float, *, overwrite: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(K~ + alpha)⁻¹ y and 1 − h = alpha diag (K~ + alpha)⁻¹.

        None if there is no Cholesky factor.
        """
        factor = self.matrix if overwrite else self.matrix.clone()
        factor.diagonal().add_(alpha)
        if self.normal is not None:
            factor[0, 0] = (
                1.0  # the direction of the intercept: decoupled, and left out of every sum below
            )
        if not factorise_lower(factor):
            return None
        target = self.reflect(self.y)
        if self.normal is not None:
            target[0] = 0.0
        dual = self.reflect(solve_factor(factor, target))
        invert_lower(factor)
        if self.normal is not None:
            factor[0, 0] = 0.0
        return dual, alpha * inverse_diagonal(factor, self.normal)


def factorise_lower(matrix: torch.Tensor) -> bool:
    """Replace the lower triangle of a symmetric matrix by its Cholesky factor.

    False if it has none. n³/3 operations.

    The upper triangle keeps what it held, outside of the tiles on the diagonal.
    """
    for column in blocks(len(matrix), SIDE):
        done, below = slice(0, column.start), slice(column.start, len(matrix))
        if column.start:
            matrix[below, column] -= matrix[below, done] @ matrix[column, done].T
        corner, info = torch.linalg.cholesky_ex(matrix[column, column])
        if int(info) != 0 or not bool(torch.isfinite(corner.diagonal()).all()):
            return False
        matrix[column, column] = corner
        rest = slice(column.stop, len(matrix))
        if column.stop < len(matrix):
            panel = matrix[rest, column]
            matrix[rest, column] = torch.linalg.solve_triangular(
                corner.T, panel, upper=True, left=False
            )
    return True


def solve_factor(factor: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(L Lᵀ)⁻¹ targets for a lower triangular L; the upper triangle is not read.

    2n²t operations.
    """
    solution = targets.clone()
    tiles = list(blocks(len(factor), SIDE))
    for row in tiles:
        part = solution[row] - factor[row, : row.start] @ solution[: row.start]
        solution[row] = torch.linalg.solve_triangular(
            torch.tril(factor[row, row]), part, upper=False
        )
    for row in reversed(tiles):
        part = solution[row] - factor[row.stop :, row].T @ solution[row.stop :]
        solution[row] = torch.linalg.solve_triangular(
            torch.tril(factor[row, row]).T, part, upper=True
        )
    return solution


def invert_lower(factor: torch.Tensor) -> None:
    """Replace a lower triangular matrix by its inverse, in place.

    The upper triangle is not read. n³/3 operations.
    """
    for row in blocks(len(factor), SIDE):
        corner = torch.tril(factor[row, row])
        eye = torch.eye(len(corner), dtype=corner.dtype, device=corner.device)
        inverse = torch.linalg.solve_triangular(corner, eye, upper=False)
        if row.start:
            left = factor[row, : row.start].clone()
            # four columns of tiles at a time: what lies above a column of the inverse is zero and
            # left out
            for columns in blocks(row.start, 4 * SIDE):
                product = left[:, columns.start :] @ _lower_part(factor, columns, row.start)
                factor[row, columns] = -(inverse @ product)
        factor[row, row] = inverse


def _lower_part(factor: torch.Tensor, columns: slice, stop: int) -> torch.Tensor:
    """Rows from the first of ``columns`` on, with zeros above the diagonal."""
    width = columns.stop - columns.start
    part = factor[columns.start : stop, columns].clone()
    part[:width] = torch.tril(part[:width])
    return part


def inverse_diagonal(inverse: torch.Tensor, normal: torch.Tensor | None) -> torch.Tensor:
    """Diagonal of H XᵀX H for a lower triangular X.

    Squared lengths of the columns of X − 2 (X u) uᵀ.
    """
    n = len(inverse)
    shift = torch.zeros(n, dtype=inverse.dtype, device=inverse.device)
    if normal is not None:
        for row in blocks(n, SIDE):
            shift[row] = -2.0 * (
                inverse[row, : row.start] @ normal[: row.start]
                + torch.tril(inverse[row, row]) @ normal[row]
            )
    above = torch.nn.functional.pad(torch.cumsum(shift.square(), 0), (1, 0))
    result = torch.empty(n, dtype=inverse.dtype, device=inverse.device)
    for columns in blocks(n, SIDE):
        panel = _lower_part(inverse, columns, n)
        if normal is not None:
            panel += torch.outer(shift[columns.start :], normal[columns])
            result[columns] = (
                panel.square().sum(dim=0) + above[columns.start] * normal[columns].square()
            )
        else:
            result[columns] = panel.square().sum(dim=0)
    return result
