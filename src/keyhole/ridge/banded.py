"""A symmetric matrix as K = Q B Qᵀ with B banded: the ridge path of a large matrix.

Half of a tridiagonal reduction multiplies the whole matrix by single vectors, and waits for memory.
A reduction to a band of WIDTH does the same work by products of matrices. It is enough for a ridge
path above the numerical floor, since (B + alpha)⁻¹ costs little more for a band than for three
diagonals. Threads are ours, each with one BLAS thread: blocks this thin are too small for BLAS to
share out.

A path of 20 penalties through three diagonals with one BLAS thread took 0.8, 1.0 and 1.3 times the
processor time of this one at n = 2048, 3000 and 4096, and 1.3 to 1.7 times as long at n = 4096 on
two busy cores, which it cannot share out; with BLAS threads as they come it took 5 to 6 times as
long at n = 2048, since they wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.linalg import eigh, get_blas_funcs, get_lapack_funcs
from scipy.sparse import block_array, coo_array
from scipy.sparse.linalg import eigsh
from threadpoolctl import threadpool_limits

from keyhole._array import blocks, run_threads, thread_count
from keyhole.ridge.matrices import multiply_add, multiply_symmetric

# rows of a block: wide enough for products at speed, narrow enough that a solve with the band is
# cheap
WIDTH = 48
TILE = 256  # columns that one product of the reduction takes: stays in cache between its two uses

PARTS = 4
"""Number of parts of a product of the reduction, each one task of a thread.

It is fixed, so that sums do not depend on the number of threads.
"""

ROWS = 128  # samples that one thread carries through the sweep at a time


@dataclass(frozen=True)
class Banded:
    """K = Q B Qᵀ on the span of the columns of Q, orthonormal and in Fortran order.

    m = n, or n − 1 without the direction of the intercept. ``diagonal`` are the blocks of B on its
    diagonal and ``beside`` those below them, (b, b) in float64; the last may be smaller.
    """

    basis: Float[np.ndarray, "n m"]
    diagonal: list[np.ndarray]
    beside: list[np.ndarray]

    def largest(self) -> float:
        """The largest eigenvalue, by Lanczos iteration on the band."""
        band = self._sparse()
        m = band.shape[0]
        if m < 3:
            return float(np.linalg.eigvalsh(band.toarray()).max(initial=0.0))
        top = eigsh(band, k=1, which="LA", v0=np.ones(m), return_eigenvectors=False)
        return float(top[0])

    def eigenpairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues of B in float64, and eigenvectors in the precision of the basis."""
        values, vectors = eigh(self._sparse().toarray(), overwrite_a=True, check_finite=False)
        return values, vectors.astype(self.basis.dtype, copy=False)

    def _sparse(self) -> Any:
        """B as a sparse matrix."""
        grid: list[list[Any]] = [[None] * len(self.diagonal) for _ in self.diagonal]
        for k, block in enumerate(self.diagonal):
            grid[k][k] = coo_array(block)
        for k, block in enumerate(self.beside):
            grid[k + 1][k] = coo_array(block)
            grid[k][k + 1] = coo_array(block.T)
        return block_array(grid, format="csr")


def to_band(
    matrix: Float[np.ndarray, "n n"], normal: Float[np.ndarray, " n"] | None
) -> Banded | None:
    """Reduce ``matrix`` (Fortran order, lower) in place; None if anything is not finite.

    ``normal`` is the unit vector u of the reflection I − 2uuᵀ that emptied row and column 0, None
    if there was none. Cost: 8n³/3 operations; no second n × n matrix.
    """
    # the band and then Q, in the place of the matrix without the direction of the intercept
    start = 0 if normal is None else 1
    with threadpool_limits(1, user_api="blas"), np.errstate(over="ignore", invalid="ignore"):
        reduced = _reduce(matrix[start:, start:])
        if reduced is None:
            return None
        diagonal, beside, triangles = reduced
        _form_basis(matrix[start:, start:], triangles)
    basis = matrix[:, start:]

    # Q in the coordinates of the samples: reflected back
    if normal is not None:
        basis[0] = 0.0
        (ger,) = get_blas_funcs(("ger",), (basis,))
        u = normal.astype(basis.dtype)
        ger(-2.0, u, basis.T @ u, a=basis, overwrite_a=1)
    return Banded(basis=basis, diagonal=diagonal, beside=beside)


def _reduce(
    a: Float[np.ndarray, "m m"],
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] | None:
    """Blocks of B on and below its diagonal, and the triangular factors T of block reflections.

    A panel of columns is emptied below its first rows by H = I − V T Vᵀ; the rest becomes Hᵀ A H =
    A − V Wᵀ − W Vᵀ with W = Y − V Tᵀ(VᵀY)/2, Y = A V T. The vectors V stay below the band of ``a``.
    """
    m = len(a)
    diagonal: list[np.ndarray] = []
    beside: list[np.ndarray] = []
    triangles: list[np.ndarray] = []
    for start in range(0, m, WIDTH):
        # the block on the diagonal is final
        stop = min(start + WIDTH, m)
        corner = np.tril(a[start:stop, start:stop]).astype(np.float64)
        if not np.isfinite(corner).all():
            return None
        diagonal.append(corner + np.tril(corner, -1).T)
        if stop == m:
            break

        # the panel below it becomes a triangle, the block beside the diagonal
        vectors, triangle, top = _panel(a[stop:, start:stop])
        beside.append(top.astype(np.float64))
        triangles.append(triangle)

        # the rest, from both sides: Y, then W in its place, then the update
        rest = a[stop:, stop:]
        product = _symmetric_product(rest, vectors) @ triangle
        product -= vectors @ (0.5 * triangle.T @ (vectors.T @ product))
        _rank_two_update(rest, vectors, product)
        a[stop:, start:stop] = vectors
    return diagonal, beside, triangles


def _panel(panel: Float[np.ndarray, "r b"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """V (r, b), T (b, b) and the first rows of R, of panel = (I − V T Vᵀ)[R; 0].

    With r < b, zeros fill V.
    """
    # Householder's QR: R above the diagonal, the vectors below it, their scales in tau
    width = panel.shape[1]
    (geqrf,) = get_lapack_funcs(("geqrf",), (panel,))
    factored, tau, _, _ = geqrf(np.array(panel, order="F"), lwork=64 * width, overwrite_a=1)
    top = np.triu(factored[:width])

    # V has ones on its diagonal; a column that was empty already takes no reflection
    count = len(tau)
    vectors = np.zeros_like(factored)
    vectors[:, :count] = np.tril(factored[:, :count], -1)
    vectors[np.arange(count), np.arange(count)] = 1.0
    vectors[:, :count][:, tau == 0] = 0.0

    # T⁻¹ is the strict upper triangle of VᵀV with 1/τ on its diagonal
    inverse = np.triu(vectors.T @ vectors, 1).astype(np.float64)
    scale = np.ones(width)
    scale[:count][tau != 0] = tau[tau != 0]
    inverse[np.arange(width), np.arange(width)] = 1.0 / scale
    return vectors, np.linalg.inv(inverse).astype(panel.dtype), top


def _symmetric_product(
    a: Float[np.ndarray, "r r"], vectors: Float[np.ndarray, "r b"]
) -> Float[np.ndarray, "r b"]:
    """A V from the lower triangle of A, tile of columns by tile."""
    totals = [np.zeros_like(vectors) for _ in range(PARTS)]

    def work(part: int) -> None:
        total = totals[part]
        for columns in _tiles_of_part(len(a), part):
            multiply_symmetric(total[columns], a[columns, columns], vectors[columns])
            # what is below the tile stands for what is to its right as well
            if columns.stop < len(a):
                below = a[columns.stop :, columns]
                multiply_add(total[columns.stop :], below, vectors[columns])
                multiply_add(total[columns], below, vectors[columns.stop :], trans="TN")

    run_threads(work, range(PARTS))
    for total in totals[1:]:
        totals[0] += total
    return totals[0]


def _rank_two_update(
    a: Float[np.ndarray, "r r"], v: Float[np.ndarray, "r b"], w: Float[np.ndarray, "r b"]
) -> None:
    """A ← A − V Wᵀ − W Vᵀ on the lower triangle, tile of columns by tile.

    Entries above it, within a tile, are not defined.
    """
    # V Wᵀ + W Vᵀ = [V W] [W V]ᵀ, one product
    vw = np.asfortranarray(np.hstack([v, w]))
    wv = np.asfortranarray(np.hstack([w, v]))

    def work(part: int) -> None:
        for columns in _tiles_of_part(len(a), part):
            below = slice(columns.start, len(a))
            multiply_add(a[below, columns], vw[below], wv[columns], scale=-1.0, trans="NT")

    run_threads(work, range(PARTS))


def _tiles_of_part(total: int, part: int) -> list[slice]:
    """Tiles of columns of a triangle that belong to a part.

    Parts take turns forth and back, so that all get as much of the triangle.
    """
    turns = [*range(PARTS), *reversed(range(PARTS))]
    tiles = enumerate(blocks(total, TILE))
    return [tile for i, tile in tiles if turns[i % len(turns)] == part]


def _form_basis(a: Float[np.ndarray, "m m"], triangles: list[np.ndarray]) -> None:
    """Replace the vectors V_k below the band by Q, in place.

    Q = (I − V_1 T_1 V_1ᵀ)(I − V_2 T_2 V_2ᵀ)….

    Columns from right to left: a tile of them needs no reflection to its right, and no tile to its
    left needs the vectors it overwrites.
    """
    m = len(a)
    step = WIDTH * max(1, TILE // WIDTH)
    for columns in reversed(list(blocks(m, thread_count() * step))):
        # columns of the identity, to which the reflections are applied
        result = np.zeros((m, columns.stop - columns.start), dtype=a.dtype, order="F")
        diagonal = np.arange(columns.start, columns.stop)
        result[diagonal, diagonal - columns.start] = 1.0

        def work(part: slice, *, first: int = columns.start, target: np.ndarray = result) -> None:
            # reflections that begin left of the last column of the part, ⌈stop/WIDTH⌉ − 1 of them
            n_blocks = -(-(first + part.stop) // WIDTH)
            last = min(len(triangles), n_blocks - 1)
            for k in reversed(range(last)):
                # rows above the reflection stay as they are; columns before its first row are still
                # unit vectors above it
                rows = slice((k + 1) * WIDTH, m)
                begin = max(part.start, rows.start - first)
                if begin >= part.stop:
                    continue
                vectors = a[rows, k * WIDTH : (k + 1) * WIDTH]
                reflected = target[rows, begin : part.stop]
                inner = np.asfortranarray(triangles[k] @ (vectors.T @ reflected))
                multiply_add(reflected, vectors, inner, scale=-1.0)

        run_threads(work, blocks(result.shape[1], step))
        a[:, columns] = result


@dataclass(frozen=True)
class BandedSweep:
    """(K + alpha)⁻¹ for penalties above the numerical floor, by block elimination in B + alpha.

    Everything is held in units of ``scale``, so that float32 neither overflows nor underflows.
    ``last`` keeps the factors of the last penalties: leverages and solutions of a path need the
    same.
    """

    form: Banded
    outputs: Float[np.ndarray, "m t"]
    scale: float
    last: dict[bytes, list[tuple[np.ndarray, np.ndarray]] | None] = field(
        default_factory=dict, repr=False
    )

    @classmethod
    def of(cls, form: Banded, y: Float[np.ndarray, "n t"]) -> BandedSweep:
        """Prepare for the scaled outputs ``y``."""
        outputs = (form.basis.T @ y.astype(form.basis.dtype)).astype(np.float64)
        scale = max(np.abs(block).max() for block in form.diagonal)
        return cls(form=form, outputs=outputs, scale=float(scale) or 1.0)

    def factors(
        self, alphas: Float[np.ndarray, " a"]
    ) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """For each block, L_k⁻¹ and L_k⁻¹C_k (a, b, b) of B + alpha = L Lᵀ.

        C_k is the block of L beside L_k. None if B + alpha is not positive definite: then K has an
        eigenvalue below −alpha.
        """
        key = alphas.tobytes()
        if key not in self.last:
            self.last.clear()
            self.last[key] = self._factorise(alphas)
        return self.last[key]

    def _positive_factors(
        self, alphas: Float[np.ndarray, " a"]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The same for penalties at which `complements` has seen that B + alpha is positive."""
        factors = self.factors(alphas)
        if factors is None:
            raise np.linalg.LinAlgError(
                "B + alpha must be positive definite: ask `complements` first."
            )
        return factors

    def _factorise(
        self, alphas: Float[np.ndarray, " a"]
    ) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """Block Cholesky of B + alpha, from the first block to the last, all penalties at once."""
        factors: list[tuple[np.ndarray, np.ndarray]] = []
        inverse = np.zeros((0, 0, 0))
        for k, block in enumerate(self.form.diagonal):
            # the block of B + alpha, in units of the scale
            width = len(block)
            pivot = np.tile(block / self.scale, (len(alphas), 1, 1))
            pivot[:, np.arange(width), np.arange(width)] += (alphas / self.scale)[:, None]

            # less C_k C_kᵀ, C_k = B_{k,k−1} L_{k−1}⁻ᵀ
            if k == 0:
                beside = np.zeros((len(alphas), width, 0))
            else:
                beside = (self.form.beside[k - 1] / self.scale) @ inverse.transpose(0, 2, 1)
                pivot -= beside @ beside.transpose(0, 2, 1)
            try:
                inverse = np.linalg.inv(np.linalg.cholesky(pivot))
            except np.linalg.LinAlgError:
                return None
            factors.append((inverse, inverse @ beside))
        if not all(np.isfinite(block_inverse).all() for block_inverse, _ in factors):
            return None
        return factors

    def complements(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n"] | None:
        """1 − h = alpha diag (K + alpha)⁻¹, each a sum of squares.

        None where B + alpha is not positive.

        Block by block, u_k = L_k⁻¹(q_k − C_k u_{k−1}) is the forward substitution of Qᵀ, and the
        diagonal is Σ_k |u_k|². Cost: 4 b n m a operations.
        """
        factors = self.factors(alphas)
        if factors is None:
            return None
        basis = self.form.basis
        a = len(alphas)

        # in the precision of the basis; the L_k⁻¹ of all penalties below each other, (a b, b)
        forward = []
        for inverse, beside in factors:
            stacked = inverse.reshape(-1, inverse.shape[2])
            forward.append((stacked.astype(basis.dtype), beside.astype(basis.dtype)))
        result = np.empty((a, len(basis)))

        def work(rows: slice) -> None:
            total = np.zeros((a, rows.stop - rows.start), dtype=basis.dtype)
            previous = total
            first = 0
            for stacked, beside in forward:
                # L_k⁻¹q_k of all penalties in one product
                width = beside.shape[1]
                current = (stacked @ basis[rows, first : first + width].T).reshape(a, width, -1)
                if first > 0:
                    current -= beside @ previous
                total += np.einsum("abn,abn->an", current, current)
                previous = current
                first += width
            result[:, rows] = total

        with threadpool_limits(1, user_api="blas"):
            run_threads(work, blocks(len(basis), ROWS))
        return result * (alphas / self.scale)[:, None]

    def root(self, alphas: Float[np.ndarray, " 1"]) -> Float[np.ndarray, "m n"]:
        """R with RᵀR = (K + alpha)⁻¹ on the span of the basis, at one penalty: L⁻¹ Qᵀ.

        4b nm operations.
        """
        factors = self._positive_factors(alphas)
        forward = self._substitute(factors, self.form.basis.T.astype(np.float64))
        return np.concatenate(forward, axis=1)[0] / np.sqrt(self.scale)

    @staticmethod
    def _substitute(
        factors: list[tuple[np.ndarray, np.ndarray]], right: Float[np.ndarray, "m t"]
    ) -> list[np.ndarray]:
        """L⁻¹ right for each penalty, block by block (a, b, t)."""
        parts: list[np.ndarray] = []
        first = 0
        for inverse, beside in factors:
            width = inverse.shape[1]
            part = inverse @ right[first : first + width]
            if parts:
                part = part - beside @ parts[-1]
            parts.append(part)
            first += width
        return parts

    def solve(
        self, alphas: Float[np.ndarray, " a"]
    ) -> tuple[Float[np.ndarray, "a n t"], Float[np.ndarray, "a n t"]]:
        """(K + alpha)⁻¹ y for each penalty, and the residuals, alpha times that.

        Cost: 2 n m a t operations.
        """
        factors = self._positive_factors(alphas)

        # u = L⁻¹ Qᵀy, then L⁻ᵀ u from the last block to the first
        parts = self._substitute(factors, self.outputs)
        from_below: np.ndarray | None = None
        for k in reversed(range(len(factors))):
            inverse, beside = factors[k]
            part = parts[k]
            if from_below is not None:
                part = part - from_below
            # what this block takes from the one above: C_kᵀ L_k⁻ᵀ u_k = (L_k⁻¹C_k)ᵀ u_k
            if k > 0:
                from_below = beside.transpose(0, 2, 1) @ part
            parts[k] = inverse.transpose(0, 2, 1) @ part
        x = np.concatenate(parts, axis=1) / self.scale

        # Q x, all penalties and outputs in one product
        basis = self.form.basis
        a, m, t = x.shape
        product = basis @ x.transpose(1, 0, 2).reshape(m, a * t).astype(basis.dtype)
        dual = np.ascontiguousarray(
            product.reshape(len(basis), a, t).transpose(1, 0, 2), dtype=np.float64
        )
        return dual, alphas[:, None, None] * dual
