"""Ridge with exact leave-one-out from a Gram matrix on a device.

The steps are those of `weigh_gram` and `cholesky_route` of gram.py: Cholesky in float64, in place,
tile by tile. Tiles keep every call to the libraries within 32-bit sizes, and left-looking updates
are one long product per tile. A path of penalties is one factorisation each: 2n³/3 operations at
the rate of matrix products, where one eigendecomposition takes 25 times as long (n = 8192, H200).
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

    ``rounding`` is that of the arithmetic that computed it. Penalties below the numerical floor are
    left to the host. Without room for a copy, the matrix of one penalty is factorised in place.
    """
    ridge = DeviceRidge.of(gram, problem)

    # the floor from λ_max, of which a bound is enough for one penalty
    single = problem.alphas is not None and len(problem.alphas) == 1
    largest = ridge.size() if single else ridge.largest()
    floor = numerical_floor(max(largest, ridge.weighing.removed), len(gram), rounding)
    alphas = problem.grid(largest, floor)
    in_place = single and not room_for_a_copy

    # one factorisation for each penalty, as long as they succeed
    above_floor = bool(alphas.min() > 0 and alphas.min() >= floor)
    solved: list[tuple[np.ndarray, np.ndarray]] = []
    if above_floor:
        for alpha in alphas:
            solution = ridge.solve(float(alpha), overwrite=in_place)
            if solution is None:
                break
            dual, complement = solution
            solved.append((dual.cpu().numpy(), complement.cpu().numpy()))
    if len(solved) == len(alphas):
        route = SolvedRoute(
            name="device",
            alphas=alphas,
            floor=floor,
            rounding=rounding,
            weighing=ridge.weighing,
            solved=solved,
        )
        return problem.fit(route)

    # everything else on the host, unless the factorisation has overwritten the matrix
    if above_floor and in_place:
        raise np.linalg.LinAlgError(
            f"the kernel plus alpha = {alphas[0]:g} is not positive definite in float64, and the "
            "device is too small to keep a copy of it. Use a larger alpha, dtype='float64', or "
            "device=None."
        )
    matrix = np.asfortranarray(ridge.matrix.cpu().numpy())
    path = path_route(matrix, ridge.weighing, rounding, np.dtype(np.float64), memory_budget)
    return problem.fit(path)


@dataclass(frozen=True)
class DeviceRidge:
    """H S K S H on a device, as `weigh_gram` computes it: both triangles, in float64.

    ``y`` are the outputs S (y − ȳ), ``normal`` the unit vector u of H on the device, and
    ``weighing`` the way back.
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

        # S K S
        if problem.weighted:
            for rows in blocks(len(gram), SIDE):
                gram[rows] *= roots[rows, None]
                gram[rows] *= roots
        if not problem.fit_intercept:
            weighing = Weighing(
                problem=problem,
                normal=None,
                gram_mean=np.zeros(len(gram)),
                removed=0.0,
                diagonal=diagonal,
            )
            return cls(matrix=gram, y=y, normal=None, weighing=weighing)

        # d = s/|s|, its image, and u along d + e_0: nothing cancels, since every root is positive
        length = torch.linalg.vector_norm(roots)
        direction = roots / length
        image = gram @ direction
        normal = direction.clone()
        normal[0] += 1.0
        normal_length = torch.linalg.vector_norm(normal)
        normal /= normal_length

        # H S K S H by a rank-two update, some rows at a time; row and column 0 are emptied
        product = (image + gram[:, 0]) / normal_length
        update = 2.0 * (product - (normal @ product) * normal)
        for rows in blocks(len(gram), SIDE):
            gram[rows].addr_(normal[rows], update, alpha=-1.0)
            gram[rows].addr_(update[rows], normal, alpha=-1.0)
        gram[0] = 0.0
        gram[:, 0] = 0.0
        weighing = Weighing(
            problem=problem,
            normal=normal.cpu().numpy(),
            gram_mean=(image / length).cpu().numpy(),
            removed=float(direction @ image),
            diagonal=diagonal,
        )
        return cls(matrix=gram, y=y, normal=normal, weighing=weighing)

    def size(self) -> float:
        """An upper bound of the largest eigenvalue, by the Frobenius norm.

        What centring removed takes its place if that is larger.
        """
        squares = 0.0
        for rows in blocks(len(self.matrix), SIDE):
            squares += float(self.matrix[rows].square().sum())
        return max(squares**0.5, self.weighing.removed)

    def largest(self) -> float:
        """The largest eigenvalue, by Lanczos steps with full orthogonalisation."""
        # a start that has a part along every eigenvector, and a large one along the outputs
        n = len(self.matrix)
        ramp = torch.linspace(1.0, 2.0, n, dtype=torch.float64, device=self.matrix.device)
        start = ramp.sin() + self.y.sum(dim=1)
        basis = [start / torch.linalg.vector_norm(start)]
        diagonal: list[float] = []
        beside: list[float] = []
        for _ in range(min(_LANCZOS, n)):
            image = self.matrix @ basis[-1]
            diagonal.append(float(image @ basis[-1]))
            # orthogonal to all vectors so far; the second time removes the rounding of the first
            vectors = torch.stack(basis)
            for _ in range(2):
                image -= vectors.T @ (vectors @ image)
            norm = float(torch.linalg.vector_norm(image))
            exhausted = norm <= 1e-14 * max(map(abs, diagonal))
            if exhausted or len(basis) == n:
                break
            beside.append(norm)
            basis.append(image / norm)
        values = eigvalsh_tridiagonal(diagonal, beside[: len(diagonal) - 1])
        return max(0.0, float(values[-1]))

    def reflect(self, x: torch.Tensor) -> torch.Tensor:
        """H x; x itself without an intercept."""
        if self.normal is None:
            return x
        return x - torch.outer(2.0 * self.normal, self.normal @ x)

    def solve(self, alpha: float, *, overwrite: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(K~ + alpha)⁻¹ y and 1 − h = alpha diag (K~ + alpha)⁻¹.

        None if there is no Cholesky factor.
        """
        has_intercept = self.normal is not None

        # the Cholesky factor of K~ + alpha; the direction of the intercept is decoupled from the
        # rest, and left out of every sum below
        factor = self.matrix if overwrite else self.matrix.clone()
        factor.diagonal().add_(alpha)
        if has_intercept:
            factor[0, 0] = 1.0
        if not factorise_lower(factor):
            return None

        # dual coefficients, in the coordinates of the samples
        target = self.reflect(self.y)
        if has_intercept:
            target[0] = 0.0
        dual = self.reflect(solve_factor(factor, target))

        # complements of the leverages
        invert_lower(factor)
        if has_intercept:
            factor[0, 0] = 0.0
        return dual, alpha * inverse_diagonal(factor, self.normal)


def factorise_lower(matrix: torch.Tensor) -> bool:
    """Replace the lower triangle of a symmetric matrix by its Cholesky factor.

    False if it has none. n³/3 operations. Outside of the tiles on the diagonal the upper triangle
    stays as it is.
    """
    n = len(matrix)
    for column in blocks(n, SIDE):
        # left-looking: the columns of tiles before this one are final, and taken off in one product
        before = slice(0, column.start)
        from_here = slice(column.start, n)
        if column.start > 0:
            matrix[from_here, column] -= matrix[from_here, before] @ matrix[column, before].T

        # the tile on the diagonal
        corner, info = torch.linalg.cholesky_ex(matrix[column, column])
        if int(info) != 0 or not bool(torch.isfinite(corner.diagonal()).all()):
            return False
        matrix[column, column] = corner

        # the tiles below it
        if column.stop < n:
            below = slice(column.stop, n)
            matrix[below, column] = torch.linalg.solve_triangular(
                corner.T, matrix[below, column], upper=True, left=False
            )
    return True


def solve_factor(factor: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(L Lᵀ)⁻¹ targets for a lower triangular L; the upper triangle is not read.

    2n²t operations.
    """
    solution = targets.clone()
    tiles = list(blocks(len(factor), SIDE))
    # forward substitution by L
    for row in tiles:
        part = solution[row] - factor[row, : row.start] @ solution[: row.start]
        corner = torch.tril(factor[row, row])
        solution[row] = torch.linalg.solve_triangular(corner, part, upper=False)
    # back substitution by Lᵀ
    for row in reversed(tiles):
        part = solution[row] - factor[row.stop :, row].T @ solution[row.stop :]
        corner = torch.tril(factor[row, row])
        solution[row] = torch.linalg.solve_triangular(corner.T, part, upper=True)
    return solution


def invert_lower(factor: torch.Tensor) -> None:
    """Replace a lower triangular matrix by its inverse, in place.

    The upper triangle is not read. n³/3 operations.
    """
    for row in blocks(len(factor), SIDE):
        # the tile on the diagonal
        corner = torch.tril(factor[row, row])
        eye = torch.eye(len(corner), dtype=corner.dtype, device=corner.device)
        inverse = torch.linalg.solve_triangular(corner, eye, upper=False)

        # the tiles before it: −L_rr⁻¹ L_r X, where the rows X above hold their inverse already.
        # Four columns of tiles at a time, so that zeros above a column of X are mostly left out
        if row.start > 0:
            before = factor[row, : row.start].clone()
            for columns in blocks(row.start, 4 * SIDE):
                product = before[:, columns.start :] @ _lower_part(factor, columns, row.start)
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

    They are the squared lengths of the columns of X − 2 (X u) uᵀ.
    """
    n = len(inverse)
    result = torch.empty(n, dtype=inverse.dtype, device=inverse.device)
    if normal is None:
        for columns in blocks(n, SIDE):
            panel = _lower_part(inverse, columns, n)
            result[columns] = panel.square().sum(dim=0)
        return result

    # the shift −2 X u: column j of X is moved by u_j times it
    shift = torch.zeros(n, dtype=inverse.dtype, device=inverse.device)
    for row in blocks(n, SIDE):
        before = inverse[row, : row.start] @ normal[: row.start]
        of_corner = torch.tril(inverse[row, row]) @ normal[row]
        shift[row] = -2.0 * (before + of_corner)

    # above the panel X is zero, and only the shift counts: Σ shift_i² over the rows above each row
    squares_above = torch.nn.functional.pad(torch.cumsum(shift.square(), 0), (1, 0))
    for columns in blocks(n, SIDE):
        panel = _lower_part(inverse, columns, n)
        panel += torch.outer(shift[columns.start :], normal[columns])
        above = squares_above[columns.start] * normal[columns].square()
        result[columns] = panel.square().sum(dim=0) + above
    return result
