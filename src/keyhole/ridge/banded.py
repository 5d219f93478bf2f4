"""A symmetric matrix as K = Q B Qᵀ with B banded.

The ridge path of a large matrix from matrix products alone.

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
"""Into which a product of the reduction is cut.

A fixed number, so that sums do not depend on the number of threads.
"""

ROWS = 128  # samples that one thread carries through the sweep at a time


@dataclass(frozen=True)
class Banded:
    """K = Q B Qᵀ on the span of the columns of Q, orthonormal and in Fortran order.

    m = n, or n − 1 without the direction of the intercept. Blocks of B are on the diagonal and
    below it, (b, b) in float64; the last may be smaller.
    """

    basis: Float[np.ndarray, "n m"]
    diagonal: list[np.ndarray]
    beside: list[np.ndarray]

    def largest(self) -> float:
        """The largest eigenvalue, by Lanczos iteration on the band."""
        band = self._sparse()
        if band.shape[0] < 3:
            return float(np.linalg.eigvalsh(band.toarray()).max(initial=0.0))
        return float(
            eigsh(band, k=1, which="LA", v0=np.ones(band.shape[0]), return_eigenvectors=False)[0]
        )

    def eigenpairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues of B in float64, and eigenvectors in the precision of the basis."""
        values, vectors = eigh(self._sparse().toarray(), overwrite_a=True, check_finite=False)
        return values, vectors.astype(self.basis.dtype, copy=False)

    def _sparse(self) -> Any:
        grid: list[list[Any]] = [[None] * len(self.diagonal) for _ in self.diagonal]
        for k, block in enumerate(self.diagonal):
            grid[k][k] = coo_array(block)
        for k, block in enumerate(self.beside):
            grid[k + 1][k], grid[k][k + 1] = coo_array(block), coo_array(block.T)
        return block_array(grid, format="csr")


def to_band(
    matrix: Float[np.ndarray, "n n"], normal: Float[np.ndarray, " n"] | None
) -> Banded | None:
    """Reduce ``matrix`` (Fortran order, lower) in place; None if anything is not finite.

    ``normal`` is the unit vector u of the reflection I − 2uuᵀ that emptied row and column 0, None
    if there was none. Cost: 8n³/3 operations; no second n × n matrix.
    """
    start = 0 if normal is None else 1
    with threadpool_limits(1, user_api="blas"), np.errstate(over="ignore", invalid="ignore"):
        reduced = _reduce(matrix[start:, start:])
        if reduced is None:
            return None
        diagonal, beside, triangles = reduced
        _form_basis(matrix[start:, start:], triangles)
    basis = matrix[:, start:]
    if normal is not None:
        basis[0] = 0.0
        (ger,) = get_blas_funcs(("ger",), (basis,))
        u = normal.astype(basis.dtype)
        ger(-2.0, u, basis.T @ u, a=basis, overwrite_a=1)
    return Banded(basis, diagonal, beside)


def _reduce(
    a: Float[np.ndarray, "m m"],
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] | None:
    """Blocks of B and the triangular factors of the block reflections.

    Vectors of the reflections stay below the band of ``a``.

    A panel of columns is emptied below its first rows by H = I − V T Vᵀ; the rest becomes Hᵀ A H =
    A − V Wᵀ − W Vᵀ with W = Y − V Tᵀ(VᵀY)/2, Y = A V T.
    """
    m = len(a)
    diagonal, beside, triangles = [], [], []
    for start in range(0, m, WIDTH):
        stop = min(start + WIDTH, m)
        corner = np.tril(a[start:stop, start:stop]).astype(np.float64)
        if not np.isfinite(corner).all():
            return None
        diagonal.append(corner + np.tril(corner, -1).T)
        if stop == m:
            break
        vectors, triangle, top = _panel(a[stop:, start:stop])
        beside.append(top.astype(np.float64))
        triangles.append(triangle)
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
    width = panel.shape[1]
    (geqrf,) = get_lapack_funcs(("geqrf",), (panel,))
    factored, tau, _, _ = geqrf(np.array(panel, order="F"), lwork=64 * width, overwrite_a=1)
    top = np.triu(factored[:width])
    count = len(tau)
    vectors = np.zeros_like(factored)
    vectors[:, :count] = np.tril(factored[:, :count], -1)
    vectors[np.arange(count), np.arange(count)] = 1.0
    vectors[:, :count][:, tau == 0] = 0.0  # a column that was empty already: no reflection
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

    def work(i: int) -> None:
        total = totals[i]
        for columns in _dealt(len(a), i):
            multiply_symmetric(total[columns], a[columns, columns], vectors[columns])
            if columns.stop < len(a):
                below = a[columns.stop :, columns]
                multiply_add(total[columns.stop :], below, vectors[columns])
                multiply_add(total[columns], below, vectors[columns.stop :], trans="TN")

    run_threads(work, range(PARTS))
    for other in totals[1:]:
        totals[0] += other
    return totals[0]


def _rank_two_update(
    a: Float[np.ndarray, "r r"], v: Float[np.ndarray, "r b"], w: Float[np.ndarray, "r b"]
) -> None:
    """A ← A − V Wᵀ − W Vᵀ on the lower triangle, tile of columns by tile.

    Above it, within a tile, anything.
    """
    left, right = np.asfortranarray(np.hstack([v, w])), np.asfortranarray(np.hstack([w, v]))

    def work(i: int) -> None:
        for columns in _dealt(len(a), i):
            below = slice(columns.start, len(a))
            multiply_add(a[below, columns], left[below], right[columns], scale=-1.0, trans="NT")

    run_threads(work, range(PARTS))


def _dealt(total: int, part: int) -> list[slice]:
    """Tiles of columns of a triangle that belong to a part.

    Dealt back and forth, so that all parts get as much.
    """
    period = [*range(PARTS), *reversed(range(PARTS))]
    return [tile for i, tile in enumerate(blocks(total, TILE)) if period[i % len(period)] == part]


def _form_basis(a: Float[np.ndarray, "m m"], triangles: list[np.ndarray]) -> None:
    """Replace the vectors V_k below the band by Q, in place.

    Q = (I − V_1 T_1 V_1ᵀ)(I − V_2 T_2 V_2ᵀ)….

    Columns from right to left: a tile of them needs no reflection to its right, and nothing that is
    left needs its own.
    """
    m, n_threads = len(a), thread_count()
    step = WIDTH * max(1, TILE // WIDTH)
    for columns in reversed(list(blocks(m, n_threads * step))):
        result = np.zeros((m, columns.stop - columns.start), dtype=a.dtype, order="F")
        own = np.arange(columns.start, columns.stop)
        result[own, own - columns.start] = 1.0

        def work(part: slice, *, first: int = columns.start, target: np.ndarray = result) -> None:
            last = min(len(triangles), -(-(first + part.stop) // WIDTH) - 1)
            for k in reversed(range(last)):
                # rows above stay as they are; columns before the reflection's own are still unit
                # vectors above it
                rows = slice((k + 1) * WIDTH, m)
                begin = max(part.start, rows.start - first)
                if begin >= part.stop:
                    continue
                vectors, some = (
                    a[rows, k * WIDTH : (k + 1) * WIDTH],
                    target[rows, begin : part.stop],
                )
                inner = np.asfortranarray(triangles[k] @ (vectors.T @ some))
                multiply_add(some, vectors, inner, scale=-1.0)

        run_threads(work, blocks(result.shape[1], step))
        a[:, columns] = result


@dataclass(frozen=True)
class BandedSweep:
    """(K + alpha)⁻¹ for penalties above the numerical floor, by block elimination in B + alpha.

    Everything is held in units of ``scale``, so that float32 neither overflows nor underflows.
    """

    form: Banded
    outputs: Float[np.ndarray, "m t"]
    scale: float
    last: dict[bytes, list[tuple[np.ndarray, np.ndarray]] | None] = field(
        default_factory=dict, repr=False
    )
    """The factors asked for last: leverages and solutions of a path need the same."""

    @classmethod
    def of(cls, form: Banded, y: Float[np.ndarray, "n t"]) -> BandedSweep:
        """Prepare for the scaled outputs ``y``."""
        outputs = (form.basis.T @ y.astype(form.basis.dtype)).astype(np.float64)
        scale = max(np.abs(block).max() for block in form.diagonal)
        return cls(form, outputs, float(scale) or 1.0)

    def factors(
        self, alphas: Float[np.ndarray, " a"]
    ) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """For each block, L_k⁻¹ and L_k⁻¹C_k (a, b, b) of B + alpha = L Lᵀ.

        C_k is the block of L beside L_k.

        None if B + alpha is not positive definite: then K has an eigenvalue below −alpha.
        """
        if alphas.tobytes() not in self.last:
            self.last.clear()
            self.last[alphas.tobytes()] = self._factorise(alphas)
        return self.last[alphas.tobytes()]

    def _factorise(
        self, alphas: Float[np.ndarray, " a"]
    ) -> list[tuple[np.ndarray, np.ndarray]] | None:
        found: list[tuple[np.ndarray, np.ndarray]] = []
        inverse = np.zeros((0, 0, 0))
        for k, block in enumerate(self.form.diagonal):
            pivot = np.tile(block / self.scale, (len(alphas), 1, 1))
            pivot[:, np.arange(len(block)), np.arange(len(block))] += (alphas / self.scale)[:, None]
            left = np.zeros((len(alphas), len(block), 0))
            if k:
                left = (self.form.beside[k - 1] / self.scale) @ inverse.transpose(0, 2, 1)
                pivot -= left @ left.transpose(0, 2, 1)
            try:
                inverse = np.linalg.inv(np.linalg.cholesky(pivot))
            except np.linalg.LinAlgError:
                return None
            found.append((inverse, inverse @ left))
        return found if all(np.isfinite(pair[0]).all() for pair in found) else None

    def complements(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n"] | None:
        """1 − h = alpha diag (K + alpha)⁻¹, each a sum of squares.

        None where B + alpha is not positive.

        Block by block, u_k = L_k⁻¹(q_k − C_k u_{k−1}) is the forward substitution of Qᵀ, and the
        diagonal is Σ_k |u_k|². Cost: 4 b n m a operations.
        """
        factors = self.factors(alphas)
        if factors is None:
            return None
        basis, a = self.form.basis, len(alphas)
        forward = [
            (own.reshape(-1, own.shape[2]).astype(basis.dtype), beside.astype(basis.dtype))
            for own, beside in factors
        ]
        result = np.empty((a, len(basis)))

        def work(rows: slice) -> None:
            total = np.zeros((a, rows.stop - rows.start), dtype=basis.dtype)
            before, first = total, 0
            for own, beside in forward:
                width = beside.shape[1]
                # L_k⁻¹q_k of all penalties in one product
                current = (own @ basis[rows, first : first + width].T).reshape(a, width, -1)
                if first:
                    current -= beside @ before
                total += np.einsum("abn,abn->an", current, current)
                before, first = current, first + width
            result[:, rows] = total

        with threadpool_limits(1, user_api="blas"):
            run_threads(work, blocks(len(basis), ROWS))
        return result * (alphas / self.scale)[:, None]

    def root(self, alphas: Float[np.ndarray, " 1"]) -> Float[np.ndarray, "m n"]:
        """R with RᵀR = (K + alpha)⁻¹ on the span of the basis, at one penalty: L⁻¹ Qᵀ.

        4b nm operations.
        """
        factors = self.factors(alphas)
        if factors is None:
            raise np.linalg.LinAlgError(
                "B + alpha must be positive definite: ask `complements` first."
            )
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
            part = inverse @ right[first : first + inverse.shape[1]]
            if parts:
                part = part - beside @ parts[-1]
            parts.append(part)
            first += inverse.shape[1]
        return parts

    def residuals(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n t"]:
        """y − K (K + alpha)⁻¹ y for each penalty."""
        return self.solve(alphas)[1]

    def solve(
        self, alphas: Float[np.ndarray, " a"]
    ) -> tuple[Float[np.ndarray, "a n t"], Float[np.ndarray, "a n t"]]:
        """(K + alpha)⁻¹ y for each penalty, and the residuals, alpha times that.

        Cost: 2 n m a t operations.
        """
        factors = self.factors(alphas)
        if factors is None:
            raise np.linalg.LinAlgError(
                "B + alpha must be positive definite: ask `complements` first."
            )
        parts = self._substitute(factors, self.outputs)
        later: np.ndarray | None = None
        for k in reversed(range(len(factors))):
            if later is not None:
                parts[k] = parts[k] - later
            # L⁻ᵀ of the block, then what it takes from the block above: C_kᵀ L_k⁻ᵀ u_k =
            # (L_k⁻¹C_k)ᵀ u_k
            later = factors[k][1].transpose(0, 2, 1) @ parts[k] if k else None
            parts[k] = factors[k][0].transpose(0, 2, 1) @ parts[k]
        x = np.concatenate(parts, axis=1) / self.scale
        basis = self.form.basis
        a, m, t = x.shape
        product = basis @ x.transpose(1, 0, 2).reshape(m, a * t).astype(basis.dtype)
        dual = np.ascontiguousarray(
            product.reshape(len(basis), a, t).transpose(1, 0, 2), dtype=np.float64
        )
        return dual, alphas[:, None, None] * dual
