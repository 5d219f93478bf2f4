"""Ridge by preconditioned conjugate gradients.

For designs whose n × n and p × p matrices are both too large.

The design is known by its products only, so that it can be computed anew, block by block, each time
it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from scipy.linalg import eigh

from keyhole._array import block_size, blocks
from keyhole.ridge.problem import RidgeFit, RidgeProblem, check_gram_size

ROUNDS = 4
"""Fresh starts from the true residual, for as long as each lowers it: a recurrence drifts away from
the truth.
"""


class ResidualWarning(UserWarning):
    """The iterations ended before the residual was as small as asked for."""


@runtime_checkable
class ProductDesign(Protocol):
    """A design Φ (n, p) that can be multiplied with. All products are float64."""

    @property
    def shape(self) -> tuple[int, int]:
        """(n, p)."""

    def matvec(self, values: Float[np.ndarray, "p c"]) -> Float[np.ndarray, "n c"]:
        """Φ v."""

    def rmatvec(self, dual: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "p c"]:
        """Φᵀ a."""

    def gram_product(self, dual: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "n c"]:
        """ΦΦᵀ a, in one pass over Φ."""


@dataclass(frozen=True)
class Preconditioner:
    """An approximate inverse of A + alpha for any alpha, from A ≈ U diag(values) Uᵀ of low rank.

    The columns of U, ``basis``, are orthonormal; the least of ``values``, all positive, stands for
    those of A beyond.
    """

    basis: Float[np.ndarray, "m r"] = field(repr=False)
    values: Float[np.ndarray, " r"] = field(repr=False)

    @classmethod
    def of_factor(cls, factor: Float[np.ndarray, "m r"]) -> Preconditioner:
        """From A ≈ F Fᵀ. F is overwritten. 3mr² operations."""
        return cls._whiten(factor, np.eye(factor.shape[1]))

    @classmethod
    def of_columns(
        cls, columns: Float[np.ndarray, "m r"], square: Float[np.ndarray, "r r"]
    ) -> Preconditioner:
        """From r columns C of A and the r × r block B where they cross: A ≈ C B⁻¹ Cᵀ (Nyström).

        C is overwritten.
        """
        check_gram_size(square.diagonal())
        sizes, turn = eigh(square)
        kept = sizes > 16 * np.finfo(columns.dtype).eps * sizes[-1]
        if not kept.any():  # one sample, or copies of it: centring leaves nothing
            return cls(columns[:, :0], np.zeros(0))
        return cls._whiten(columns, turn[:, kept] / np.sqrt(sizes[kept]))

    @classmethod
    def _whiten(cls, columns: np.ndarray, map_: np.ndarray) -> Preconditioner:
        """The eigenvectors of (C T)(C T)ᵀ, in the memory of C."""
        products = (columns.T @ columns).astype(np.float64)
        check_gram_size(products.diagonal())
        square = map_.T @ products @ map_
        values, turn = eigh(square)
        kept = values > 16 * np.finfo(columns.dtype).eps * max(values[-1], 0.0)
        if not kept.any():
            return cls(columns[:, :0], np.zeros(0))
        turn = (map_ @ (turn[:, kept] / np.sqrt(values[kept]))).astype(columns.dtype)
        rank = turn.shape[1]
        for rows in blocks(len(columns), block_size(columns.shape[1] * columns.itemsize, 2**24)):
            columns[rows, :rank] = columns[rows] @ turn
        return cls(columns[:, :rank], values[kept])

    def apply(
        self, residuals: Float[np.ndarray, "m c"], alphas: Float[np.ndarray, " c"]
    ) -> Float[np.ndarray, "m c"]:
        """(U diag(values) Uᵀ + alpha)⁻¹ r, the part outside of U taken for the least value.

        4mrc operations.
        """
        rest = 1.0 / (alphas + (self.values[0] if len(self.values) else 0.0))
        inside = 1.0 / (self.values[:, None] + alphas) - rest
        along = (self.basis.T @ residuals.astype(self.basis.dtype)).astype(np.float64) * inside
        return np.asarray(residuals * rest + self.basis @ along.astype(self.basis.dtype))


Product = Callable[[Float[np.ndarray, "m c"]], Float[np.ndarray, "m c"]]


def ridge_cg(
    design: ProductDesign,
    problem: RidgeProblem,
    preconditioner: Preconditioner,
    *,
    primal: bool | None = None,
    tol: float = 1e-8,
    max_iter: int = 500,
) -> list[RidgeFit]:
    """Ridge by conjugate gradients: one fit for each penalty of the problem.

    All in the same passes over the design.

    ``residual`` of a fit is a certificate: |√w (f − f*)| ≤ residual · |√w (y − ȳ)| for the fitted
    values f and the exact ones f*. It is the residual r of the linear system, computed afresh at
    the end: relative |r| in dual form, because ΦΦᵀ (ΦΦᵀ + alpha)⁻¹ shortens it; |r| / 2√alpha in
    primal form, because Φ (ΦᵀΦ + alpha)⁻¹ lengthens it by no more than that. Errors are NaN:
    nothing is left out.

    Penalties must be positive. The preconditioner is one of S C ΦΦᵀ C S in dual, of Φᵀ S C S Φ in
    primal form: S = diag √w, C takes the mean off. Primal form solves for p unknowns rather than n,
    by default if p < n. The number of iterations grows like the square root of (λ_{r+1} +
    alpha)/alpha, λ_{r+1} being what a preconditioner of rank r has left.
    """
    given, t = problem.alphas, problem.y.shape[1]
    if given is None or given.min() <= 0:
        raise ValueError(
            "conjugate gradients need a positive penalty: got 0, where the system may have no "
            "unique solution."
        )
    n, p = design.shape
    primal = p < n if primal is None else primal
    alphas = np.repeat(given, t)
    roots, fit_intercept = problem.roots[:, None], problem.fit_intercept
    target = np.tile(problem.scaled, (1, len(given)))

    def centre(x: np.ndarray) -> np.ndarray:
        return x - roots @ (roots.T @ x) / np.square(roots).sum() if fit_intercept else x

    def dual_product(x: np.ndarray) -> np.ndarray:
        return centre(roots * design.gram_product(roots * centre(x)))

    def primal_product(v: np.ndarray) -> np.ndarray:
        return design.rmatvec(roots * centre(roots * design.matvec(v)))

    shares = np.square(roots) / np.square(roots).sum()
    size = np.linalg.norm(target, axis=0)
    if primal:
        both = design.rmatvec(np.concatenate([roots * target, shares], axis=1))
        right, means = both[:, :-1], both[:, -1]
        size = 2 * np.sqrt(alphas) * size
        coef, residual, n_iter = _refined(
            primal_product, right, size, alphas, preconditioner, tol, max_iter
        )
    else:
        dual, residual, n_iter = _refined(
            dual_product, target, size, alphas, preconditioner, tol, max_iter
        )
        both = design.rmatvec(np.concatenate([roots * centre(dual), shares], axis=1))
        coef, means = both[:, :-1], both[:, -1]
    intercept = np.tile(problem.y_mean, len(given)) - (means @ coef if fit_intercept else 0.0)
    columns = [slice(i * t, (i + 1) * t) for i in range(len(given))]
    unknown = np.full(len(given), np.nan)
    return [
        RidgeFit(
            given,
            unknown,
            i,
            coef[:, part],
            intercept[part],
            None,
            "cg",
            "holdout",
            residual=residual,
            n_iter=n_iter,
        )
        for i, part in enumerate(columns)
    ]


def _refined(
    product: Product,
    right: Float[np.ndarray, "m c"],
    size: Float[np.ndarray, " c"],
    alphas: Float[np.ndarray, " c"],
    preconditioner: Preconditioner,
    tol: float,
    max_iter: int,
) -> tuple[Float[np.ndarray, "m c"], float, int]:
    """Conjugate gradients, started again from the true residual.

    Until that is tol · size or stays.
    """
    size = np.where(size > 0, size, 1.0)
    solution, residual, n_iter = np.zeros_like(right), right, 0
    worst = float((np.linalg.norm(residual, axis=0) / size).max())
    for _ in range(ROUNDS):
        if worst <= tol or n_iter >= max_iter:
            break
        step, taken = _conjugate_gradients(
            product, residual, alphas, preconditioner, 0.5 * tol * size, max_iter - n_iter
        )
        n_iter += taken
        better = solution + step
        left = right - product(better) - alphas * better
        now = float((np.linalg.norm(left, axis=0) / size).max())
        if now >= worst:
            break
        stalled = now > 0.3 * worst
        solution, residual, worst = better, left, now
        if stalled:
            break
    return solution, worst, n_iter


def _conjugate_gradients(
    product: Product,
    right: Float[np.ndarray, "m c"],
    alphas: Float[np.ndarray, " c"],
    preconditioner: Preconditioner,
    goal: Float[np.ndarray, " c"],
    max_iter: int,
) -> tuple[Float[np.ndarray, "m c"], int]:
    """Solve (A + alpha) x = right column by column, all in the same passes.

    Columns that are done stand still.
    """
    x, residual = np.zeros_like(right), right.copy()
    z = preconditioner.apply(residual, alphas)
    direction = z.copy()
    rho = np.einsum("mc,mc->c", residual, z)
    for taken in range(max_iter):
        active = np.linalg.norm(residual, axis=0) > goal
        if not active.any():
            return x, taken
        image = product(direction) + alphas * direction
        curvature = np.einsum("mc,mc->c", direction, image)
        active &= curvature > 0
        step = np.divide(rho, curvature, out=np.zeros_like(rho), where=active)
        x += step * direction
        residual -= step * image
        z = preconditioner.apply(residual, alphas)
        fresh = np.einsum("mc,mc->c", residual, z)
        direction = (
            z + np.divide(fresh, rho, out=np.zeros_like(rho), where=active & (rho > 0)) * direction
        )
        direction[:, ~active] = 0.0
        rho = fresh
        if not active.any():
            return x, taken + 1
    return x, max_iter
