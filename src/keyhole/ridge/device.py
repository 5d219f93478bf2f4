"""Ridge with exact leave-one-out from a Gram matrix on a device.

The steps are those of `weigh_gram` and `cholesky_route` of gram.py: Cholesky in float64, in place,
tile by tile. Tiles keep every call to the libraries within 32-bit sizes, and left-looking updates
are one long product per tile. A path of penalties is one factorisation each: 2n³/3 operations at
the rate of matrix products, where one eigendecomposition takes 25 times as long (n = 8192, H200).

Matrices may have a leading axis, one matrix for each of several penalties: the many small calls
that a small matrix takes are made once for all of them.
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
STACK_BYTES = 2**26
"""Bytes of the matrices of several penalties that are factorised at once. On an H200 all 30 of 400
samples take 17 ms in the place of 56; from 2,000 samples on, one after the other is as fast."""

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

    ``rounding`` is that of the arithmetic that computed it. If any penalty is below the numerical
    floor, or has no Cholesky factor, all of them are solved on the host. Without room for a copy,
    the matrix of a single penalty is factorised in place.
    """
    ridge = DeviceRidge.of(gram, problem)

    # the floor from λ_max, of which a bound is enough for one penalty
    single = problem.alphas is not None and len(problem.alphas) == 1
    largest = ridge.size() if single else ridge.largest()
    floor = numerical_floor(max(largest, ridge.weighing.removed), len(gram), rounding)
    alphas = problem.grid(largest, floor)
    in_place = single and not room_for_a_copy

    # one factorisation for each penalty, as long as they succeed; several at once of small matrices
    above_floor = bool(alphas.min() > 0 and alphas.min() >= floor)
    at_once = max(1, STACK_BYTES // (8 * len(gram) ** 2))
    solved: list[tuple[np.ndarray, np.ndarray]] = []
    if above_floor:
        for block in blocks(len(alphas), at_once):
            solutions = ridge.solve(alphas[block], overwrite=in_place)
            if solutions is None:
                break
            duals, complements = solutions
            solved += zip(duals.cpu().numpy(), complements.cpu().numpy(), strict=True)
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
        """H x for a matrix x, or for several; x itself without an intercept."""
        if self.normal is None:
            return x
        return x - 2.0 * self.normal[:, None] * (self.normal @ x).unsqueeze(-2)

    def solve(
        self, alphas: np.ndarray, *, overwrite: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(K~ + alpha)⁻¹ y and 1 − h = alpha diag (K~ + alpha)⁻¹, a row for each penalty.

        None if one of them has no Cholesky factor. ``overwrite`` is for a single penalty.
        """
        has_intercept = self.normal is not None
        penalties = torch.as_tensor(alphas, device=self.matrix.device)[:, None]

        # the Cholesky factors of K~ + alpha, (a, n, n); the direction of the intercept is decoupled
        # from the rest, and left out of every sum below
        if overwrite:
            factors = self.matrix[None]
        else:
            factors = self.matrix.repeat(len(alphas), 1, 1)
        factors.diagonal(dim1=1, dim2=2).add_(penalties)
        if has_intercept:
            factors[:, 0, 0] = 1.0
        if not factorise_lower(factors):
            return None

        # dual coefficients, in the coordinates of the samples
        target = self.reflect(self.y)
        if has_intercept:
            target[0] = 0.0
        duals = self.reflect(solve_factor(factors, target))

        # complements of the leverages
        invert_lower(factors)
        if has_intercept:
            factors[:, 0, 0] = 0.0
        return duals, penalties * inverse_diagonal(factors, self.normal)


def factorise_lower(matrix: torch.Tensor) -> bool:
    """Replace the lower triangles of symmetric matrices (…, n, n) by their Cholesky factors.

    False if one of them has none. n³/3 operations each. Outside of the tiles on the diagonal the
    upper triangle stays as it is.
    """
    n = matrix.shape[-1]
    for column in blocks(n, SIDE):
        # left-looking: the columns of tiles before this one are final, and taken off in one product
        before = slice(0, column.start)
        from_here = slice(column.start, n)
        if column.start > 0:
            row_of_tile = matrix[..., column, before]
            matrix[..., from_here, column] -= matrix[..., from_here, before] @ row_of_tile.mT

        # the tile on the diagonal
        corner, info = torch.linalg.cholesky_ex(matrix[..., column, column])
        is_finite = torch.isfinite(corner.diagonal(dim1=-2, dim2=-1)).all()
        if not bool((info == 0).all() & is_finite):
            return False
        matrix[..., column, column] = corner

        # the tiles below it
        if column.stop < n:
            below = slice(column.stop, n)
            matrix[..., below, column] = torch.linalg.solve_triangular(
                corner.mT, matrix[..., below, column], upper=True, left=False
            )
    return True


def solve_factor(factor: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(L Lᵀ)⁻¹ targets, (…, n, t), for lower triangular matrices L, (…, n, n), and targets (n, t).

    The upper triangle is not read. 2n²t operations each.
    """
    solution = targets.expand(*factor.shape[:-2], *targets.shape).clone()
    tiles = list(blocks(factor.shape[-1], SIDE))
    # forward substitution by L
    for row in tiles:
        before = factor[..., row, : row.start] @ solution[..., : row.start, :]
        part = solution[..., row, :] - before
        corner = torch.tril(factor[..., row, row])
        solution[..., row, :] = torch.linalg.solve_triangular(corner, part, upper=False)
    # back substitution by Lᵀ
    for row in reversed(tiles):
        after = factor[..., row.stop :, row].mT @ solution[..., row.stop :, :]
        part = solution[..., row, :] - after
        corner = torch.tril(factor[..., row, row])
        solution[..., row, :] = torch.linalg.solve_triangular(corner.mT, part, upper=True)
    return solution


def invert_lower(factor: torch.Tensor) -> None:
    """Replace lower triangular matrices (…, n, n) by their inverses, in place.

    The upper triangle is not read. n³/3 operations each.
    """
    for row in blocks(factor.shape[-1], SIDE):
        # the tile on the diagonal
        corner = torch.tril(factor[..., row, row])
        eye = torch.eye(corner.shape[-1], dtype=corner.dtype, device=corner.device)
        inverse = torch.linalg.solve_triangular(corner, eye, upper=False)

        # the tiles before it: −L_rr⁻¹ L_r X, where the rows X above hold their inverse already.
        # Four columns of tiles at a time, so that zeros above a column of X are mostly left out
        if row.start > 0:
            before = factor[..., row, : row.start].clone()
            for columns in blocks(row.start, 4 * SIDE):
                above = _lower_part(factor, columns, row.start)
                product = before[..., columns.start :] @ above
                factor[..., row, columns] = -(inverse @ product)
        factor[..., row, row] = inverse


def _lower_part(factor: torch.Tensor, columns: slice, stop: int) -> torch.Tensor:
    """Rows from the first of ``columns`` on, with zeros above the diagonal."""
    width = columns.stop - columns.start
    part = factor[..., columns.start : stop, columns].clone()
    part[..., :width, :] = torch.tril(part[..., :width, :])
    return part


def inverse_diagonal(inverse: torch.Tensor, normal: torch.Tensor | None) -> torch.Tensor:
    """Diagonals of H XᵀX H, (…, n), for lower triangular matrices X, (…, n, n).

    They are the squared lengths of the columns of X − 2 (X u) uᵀ.
    """
    n = inverse.shape[-1]
    result = inverse.new_empty(inverse.shape[:-1])
    if normal is None:
        for columns in blocks(n, SIDE):
            panel = _lower_part(inverse, columns, n)
            result[..., columns] = panel.square().sum(dim=-2)
        return result

    # the shift −2 X u: column j of X is moved by u_j times it
    shift = torch.zeros_like(result)
    for row in blocks(n, SIDE):
        before = inverse[..., row, : row.start] @ normal[: row.start]
        of_corner = torch.tril(inverse[..., row, row]) @ normal[row]
        shift[..., row] = -2.0 * (before + of_corner)

    # above the panel X is zero, and only the shift counts: Σ shift_i² over the rows above each row
    squares_above = torch.nn.functional.pad(torch.cumsum(shift.square(), -1), (1, 0))
    for columns in blocks(n, SIDE):
        panel = _lower_part(inverse, columns, n)
        panel += shift[..., columns.start :, None] * normal[columns]
        above = squares_above[..., columns.start, None] * normal[columns].square()
        result[..., columns] = panel.square().sum(dim=-2) + above
    return result
