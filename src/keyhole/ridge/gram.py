"""Ridge from a Gram matrix: the dual route over heads and the exact kernel alike.

One penalty is a Cholesky factorisation in place, O(n³/3) twice; a path of penalties one reduction
of the matrix to a tridiagonal or banded form, 8n³/3, and a sweep; a penalty below the numerical
floor, and groups left out together, take the eigenvectors of that form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.linalg import eigvalsh_tridiagonal, get_blas_funcs, get_lapack_funcs

from keyhole._array import MEMORY_BUDGET, block_size, blocks, run_threads
from keyhole._checks import check_finite
from keyhole.ridge.banded import Banded, BandedSweep, to_band
from keyhole.ridge.matrices import factorise_lower, invert_lower, mirror_lower, solve_factor
from keyhole.ridge.problem import (
    EPS,
    LeftOut,
    RidgeFit,
    RidgeProblem,
    Solution,
    check_gram_size,
    leave_one_out,
    numerical_floor,
)

# entries (penalties × samples) of a tile of the sweep: fits the second-level cache, dwarfs a call's
# cost
TILE = 40_000
# bytes of a panel in passes over an n × n matrix: beyond the cache, small beside any matrix that
# matters
PANEL = 2**25
IN_CACHE = 2**21  # bytes of a few columns that are gone through several times
MIN_ROWS_FOR_A_BAND = 2048  # samples from which a banded form is made sooner than a tridiagonal one
MAX_ROWS_OF_A_SMALL_DRAFT = (
    512  # samples up to which eigenvectors take less time than a sweep's many small steps
)

TINY = float(np.finfo(np.float64).tiny)

FACTOR_SHARE = 0.01
"""Share of the rounding of a factorisation that counts beside that of the kernel where a penalty is
chosen. It moves a fit once and for all, so that ways to predict still agree: a hundred times as
much is allowed, 1e-7 of the spread of y. Without it the kernel of exp, whose samples differ by up
to 50 orders, was fitted at its floor, and predictions were 1.7e-4 from 19 digits; counted in full,
4 of 400 fits without much noise were worse by 100 % and more."""


def ridge_gram(
    gram: Float[np.ndarray, "n n"],
    problem: RidgeProblem,
    *,
    rounding: float | None = None,
    dtype: Any = None,
    overwrite_gram: bool = False,
    keep_factor: bool = False,
    memory_budget: int = MEMORY_BUDGET,
) -> RidgeFit:
    """Ridge on a Gram matrix, with exact leave-one-out at every penalty, from one factorisation.

    Of ``gram``, K = ΦΦᵀ or an exact kernel matrix, one triangle is read: the lower of a
    Fortran-ordered, the upper of a C-ordered array; both if there are groups. ``rounding`` is the
    unit of rounding of the arithmetic that made it, by default that of its dtype; ``dtype`` the
    precision of the reduction behind a path, repeated in float64 if it fails in float32. If
    ``overwrite_gram``, no second n × n matrix is made above the numerical floor; ``memory_budget``
    bounds all other temporaries. ``keep_factor`` lets the fit be solved for other penalties of its
    path.

    One penalty is solved by Cholesky, 2n³/3 operations. A path takes 8n³/3 once, then 5n² + 2n²t
    for each penalty; if one is below the floor, about 5n³ more and three n × n matrices in all.
    Eigenvalues below the floor count as exact zeros to a penalty below it, so that alpha → 0 is the
    minimum-norm least-squares fit on the others.

    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((40, 3))
    >>> y = x @ [[1.0], [2.0], [-1.0]] + 0.1 * rng.standard_normal((40, 1)) + 5
    >>> fit = ridge_gram(x @ x.T, RidgeProblem.of(y, [100.0, 1.0, 0.01]))
    >>> fit.alpha, fit.route, fit.selection, np.round((x.T @ fit.coef).ravel(), 1)
    (0.01, 'tridiagonal', 'loo', array([ 1.,  2., -1.]))
    """
    rounding = float(np.finfo(gram.dtype).eps) if rounding is None else rounding
    if problem.groups is not None:
        return _leave_groups_out(gram, problem, rounding, keep_factor=keep_factor)
    matrix, weighing = weigh_gram(gram, problem, overwrite=overwrite_gram)
    route: SolvedRoute | GramRoute | None = None
    if problem.alphas is not None and len(problem.alphas) == 1:
        dtype = matrix.dtype
        route = cholesky_route(
            matrix, weighing, problem.alphas, rounding, memory_budget, keep_factor=keep_factor
        )
    if route is None:
        route = path_route(
            matrix,
            weighing,
            rounding,
            gram.dtype if dtype is None else np.dtype(dtype),
            memory_budget,
        )
    return problem.fit(route, keep_factor=keep_factor)


@dataclass(frozen=True)
class Weighing:
    """How a ridge problem on a Gram matrix was scaled by √w and reflected, and the way back.

    With s = √w and S = diag s, the matrix S K S is reflected by H = I − 2uuᵀ, which takes s to the
    first axis: the direction of the intercept is then row and column 0, which are emptied.
    """

    problem: RidgeProblem
    normal: Float[np.ndarray, " n"] | None  # the unit vector u, None without an intercept
    gram_mean: Float[np.ndarray, " n"]  # S K w / Σw, from which the intercept follows
    removed: (
        float  # sᵀ S K S s / Σw, the size of what centring took away and so of the rounding it left
    )
    diagonal: Float[np.ndarray, " n"]  # K(x_i, x_i), before anything was done to it

    def reflect(self, x: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
        """H x; x itself without an intercept."""
        if self.normal is None:
            return x
        return x - np.outer(2 * self.normal, self.normal @ x)

    def unscale(self, dual: Float[np.ndarray, "n t"]) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients a = S c and intercept b from the scaled ones c.

        They are those of f(x) = Σ a_i K(x, x_i) + b.
        """
        return self.problem.roots[:, None] * dual, self.problem.y_mean - self.gram_mean @ dual

    def amplification(
        self, dual: Float[np.ndarray, "a n t"], size: float
    ) -> Float[np.ndarray, " a"]:
        """How far one unit of rounding moves predictions, over the spread of the outputs.

        f(x) = Σ_i a_i K(x, x_i) + b with K(x, x_i)² ≤ K(x, x) K(x_i, x_i), so that independent
        rounding errors in K(x, x_i) add up to √(Σ_i a_i² K(x_i, x_i) K(x, x)), K(x, x) taken as
        large as it is on average. Those of the factorisation are of the ``size`` of the weighed
        matrix in every entry: they move f(x) by size |c̃| |ã|, ã = a/√w, with |c̃|² = 1/Σw, that of a
        mean, and count for `FACTOR_SHARE`. Of several outputs the largest share counts.

        The part of y outside of the span of K is noise that no prediction sees, and its part of the
        dual coefficients is y/α: of a kernel of low rank this grows without bound as α falls. So
        does that of samples whose K(x_i, x_i) is far below α, if others are far above.
        """
        problem = self.problem
        total = problem.weights.sum()
        average = problem.weights @ self.diagonal / total
        with np.errstate(over="ignore"):
            squares = np.square(dual)
            of_kernel = average * np.einsum("n,ant->at", problem.weights * self.diagonal, squares)
            of_factor = (FACTOR_SHARE * size) ** 2 / total * squares.sum(axis=1)
            sizes = np.sqrt(np.maximum(of_kernel + of_factor, 0.0))
        spread = problem.spread
        shares = np.divide(sizes, spread, out=np.zeros_like(sizes), where=spread > 0)
        return np.asarray(shares.max(axis=1))


def weigh_gram(
    gram: Float[np.ndarray, "n n"], problem: RidgeProblem, *, overwrite: bool
) -> tuple[Float[np.ndarray, "n n"], Weighing]:
    """Check the matrix, then scale and reflect it to H S K S H (Fortran order, lower).

    In place if that is allowed.
    """
    n = len(problem.y)
    if gram.shape != (n, n):
        raise ValueError(
            f"`gram` must have one row and one column per output: got shape {gram.shape} for {n} "
            "outputs."
        )
    check_gram_size(gram.diagonal())
    diagonal = gram.diagonal().astype(np.float64)
    matrix = _fortran_lower(gram, overwrite=overwrite)
    panels = [*blocks(n, block_size(n * matrix.itemsize, PANEL))]
    for columns in panels:  # NaN and infinity are found before any long work
        if not np.isfinite(matrix[columns.start :, columns]).all():
            check_finite(np.tril(matrix), "gram")
    if problem.weighted:
        scale = problem.roots.astype(matrix.dtype)
        for columns in panels:
            matrix[:, columns] *= scale[columns]
            matrix[:, columns] *= scale[:, None]
    if not problem.fit_intercept:
        return matrix, Weighing(
            problem, normal=None, gram_mean=np.zeros(n), removed=0.0, diagonal=diagonal
        )
    normal, gram_mean, removed = _reflect_in_place(matrix, problem.roots)
    return matrix, Weighing(problem, normal, gram_mean, removed, diagonal)


def _fortran_lower(gram: Float[np.ndarray, "n n"], *, overwrite: bool) -> Float[np.ndarray, "n n"]:
    """The matrix in Fortran order, itself if it may be overwritten.

    A C-ordered one is its own transpose.
    """
    if not gram.flags.f_contiguous and gram.flags.c_contiguous:
        gram = gram.T
    if overwrite and gram.flags.f_contiguous and gram.flags.writeable:
        return gram
    return np.array(gram, order="F")


def _reflect_in_place(
    matrix: Float[np.ndarray, "n n"], roots: Float[np.ndarray, " n"]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Replace K~ by H K~ H without row and column 0; return u, K~s/Σw and sᵀK~s/Σw.

    Costs two passes.
    """
    symv, syr2 = get_blas_funcs(("symv", "syr2"), (matrix,))
    length = np.linalg.norm(roots)
    direction = roots / length
    image = symv(1.0, matrix, direction.astype(matrix.dtype), lower=1).astype(np.float64)
    first = matrix[:, 0].astype(np.float64)
    normal = direction.copy()
    normal[0] += 1.0  # no cancellation: every root is positive
    size = np.linalg.norm(normal)
    normal /= size
    product = (image + first) / size  # K~ u
    update = 2 * (product - (normal @ product) * normal)
    syr2(
        -1.0,
        normal.astype(matrix.dtype),
        update.astype(matrix.dtype),
        lower=1,
        a=matrix,
        overwrite_a=1,
    )
    matrix[:, 0] = 0.0
    return normal, image / length, float(direction @ image)


def matrix_size(route: SolvedRoute | GramRoute | GroupRoute) -> float:
    """The largest eigenvalue of the matrix of a route, or a bound on it.

    What its numerical floor was made from.
    """
    return route.floor / numerical_floor(1.0, len(route.weighing.diagonal), route.rounding)


@dataclass(frozen=True)
class GramSmoother:
    """A fit from a Gram matrix as a linear map of its outputs, `Smoother`.

    With S = diag √w and s = √w, ``root`` R is a root of the inverse: RᵀR = C − C s sᵀC / sᵀCs with
    C = (S K S + α)⁻¹, or C itself without an intercept. With t(x) = S (k(x) − K w/Σw),

        h(x) = w/Σw + S Rᵀ R t(x),    Q = S Rᵀ R S,    v(x) = k̄(x, x) − |R t(x)|² + α/Σw

    where k̄ is the kernel about its mean over the samples; without an intercept t = S k(x), k̄ = k
    and the terms in Σw are not there. The inverse itself is never made: v(x) is a small difference,
    which |R t|² leaves with the rounding of the kernel, 7e-14 at α = 5e-13 and K of size one, and
    tᵀ(RᵀR)t with that of RᵀR, 4e-7.
    """

    weighing: Weighing
    alpha: float
    root: Float[np.ndarray, "m n"]

    def apply(
        self, compared: Float[np.ndarray, "m n"], own: Float[np.ndarray, " m"]
    ) -> tuple[Float[np.ndarray, "m n"], Float[np.ndarray, " m"]]:
        """h(x) and v(x) from K(x, x_j) and K(x, x). 4n² operations for a sample."""
        problem = self.weighing.problem
        weights = problem.weights
        total = weights.sum()
        about_mean = problem.roots * compared - self.weighing.gram_mean
        half_solved = about_mean @ self.root.T
        hat = problem.roots * (half_solved @ self.root)
        variance = own - np.einsum("mn,mn->m", half_solved, half_solved)
        if problem.fit_intercept:
            hat += weights / total
            variance += (self.weighing.removed + self.alpha - 2 * (compared @ weights)) / total
        # v(x) is the least of |φ(x) − Σ_j h_j φ_j|² + α Σ_j h_j² / w_j over h: never below the
        # second term
        least = self.alpha * np.einsum("mn,n->m", np.square(hat), 1 / weights)
        return hat, np.maximum(variance, least)

    def precision(self, rows: Int[np.ndarray, " g"]) -> Float[np.ndarray, "g g"]:
        """Q_gg."""
        columns = self.root[:, rows] * self.weighing.problem.roots[rows]
        return np.asarray(columns.T @ columns)

    def precisions(self) -> Float[np.ndarray, " n"]:
        """The diagonal of Q."""
        return np.asarray(
            self.weighing.problem.weights * np.einsum("mn,mn->n", self.root, self.root)
        )


@dataclass(frozen=True)
class SolvedRoute:
    """Penalties that were factorised one by one.

    Dual coefficients, and 1 − h of every sample, for each.

    ``inverse``, if it was kept, is the inverse of the Cholesky factor of the only one, in its lower
    triangle.
    """

    name: str
    alphas: Float[np.ndarray, " a"]
    floor: float
    rounding: float
    weighing: Weighing
    solved: list[tuple[Float[np.ndarray, "n t"], Float[np.ndarray, " n"]]]
    inverse: Float[np.ndarray, "n n"] | None = None

    def left_out(self) -> Iterator[LeftOut]:
        """Residuals of the fits without each sample, one penalty at a time."""
        for i in range(len(self.alphas)):
            dual, _ = self.solved[i]
            _, _, residuals = self.solve(i)
            yield LeftOut(
                penalties=slice(i, i + 1),
                rows=slice(None),
                residuals=residuals[None],
                amplification=self.weighing.amplification(dual[None], matrix_size(self)),
            )

    def solve(self, i: int) -> Solution:
        """Coefficients, intercept, left-out residuals."""
        dual, complement = self.solved[i]
        residuals = float(self.alphas[i]) * dual / self.weighing.problem.roots[:, None]
        return *self.weighing.unscale(dual), leave_one_out(residuals, complement)

    def smoother(self, i: int) -> GramSmoother:
        """The fit as a linear map: L⁻¹ of the factor, reflected back. 4n² operations."""
        assert self.inverse is not None
        root = np.tril(self.inverse).astype(np.float64)
        normal = self.weighing.normal
        if normal is not None:
            root -= np.outer(root @ normal, 2 * normal)
        return GramSmoother(self.weighing, float(self.alphas[i]), root)


def cholesky_route(
    matrix: Float[np.ndarray, "n n"],
    weighing: Weighing,
    alphas: Float[np.ndarray, " a"],
    rounding: float,
    memory_budget: int,
    *,
    keep_factor: bool = False,
) -> SolvedRoute | None:
    """Factorise for one penalty, solve, and invert the factor in its own place for the leverages.

    2n³/3 operations.

    None, and the matrix as it was, if the penalty may be below the floor or there is no factor.
    """
    floor, alpha = _floor_bound(matrix, weighing, rounding), float(alphas[0])
    if not alpha > 0 or alpha < floor:
        return None
    # the factorisation works on the lower triangle: the upper one keeps a copy, in case it fails
    mirror_lower(matrix)
    diagonal = matrix.diagonal().copy()
    np.fill_diagonal(matrix, diagonal + matrix.dtype.type(alpha))
    if weighing.normal is not None:
        matrix[0, 0] = (
            1.0  # the direction of the intercept: decoupled, and left out of every sum below
        )
    if not factorise_lower(matrix):
        mirror_lower(matrix.T)
        np.fill_diagonal(matrix, diagonal)
        return None
    target = weighing.reflect(weighing.problem.scaled)
    if weighing.normal is not None:
        target[0] = 0.0
    dual = weighing.reflect(solve_factor(matrix, target).astype(np.float64))
    invert_lower(matrix)
    if weighing.normal is not None:
        matrix[0, 0] = 0.0
    complement = alpha * _inverse_diagonal(matrix, weighing.normal, memory_budget)
    kept = matrix if keep_factor else None
    return SolvedRoute("cholesky", alphas, floor, rounding, weighing, [(dual, complement)], kept)


def _inverse_diagonal(
    inverse: Float[np.ndarray, "n n"], normal: Float[np.ndarray, " n"] | None, memory_budget: int
) -> Float[np.ndarray, " n"]:
    """Diagonal of H XᵀX H for a lower triangular X.

    Squared lengths of the columns of X − 2 (X u) uᵀ.
    """
    n = len(inverse)
    shift = np.zeros(n, dtype=inverse.dtype)
    u = np.zeros(n, dtype=inverse.dtype)
    if normal is not None:
        (trmv,) = get_blas_funcs(("trmv",), (inverse,))
        u = normal.astype(inverse.dtype)
        shift = -2 * trmv(inverse, u, lower=1)
    above = np.concatenate([[0.0], np.cumsum(np.square(shift, dtype=np.float64))])
    result = np.empty(n)
    for columns in blocks(n, block_size(2 * n * inverse.itemsize, min(memory_budget, IN_CACHE))):
        start, width = columns.start, columns.stop - columns.start
        panel = inverse[start:, columns].copy(order="F")  # the rows above it are zero in X
        panel[:width] = np.tril(panel[:width])
        if normal is not None:
            panel += shift[start:, None] * u[columns]
        result[columns] = np.einsum("ij,ij->j", panel, panel) + above[start] * np.square(
            u[columns], dtype=np.float64
        )
    return result


@dataclass(frozen=True)
class GramRoute:
    """A path of penalties from a factorisation of the matrix.

    A sweep through a form of it, or its spectrum.
    """

    name: str
    alphas: Float[np.ndarray, " a"]
    floor: float
    rounding: float
    weighing: Weighing
    factor: Sweep | BandedSweep | GramSpectrum
    complements: Float[np.ndarray, "a n"]
    """1 − h, the complements of the leverages; 0 where they are within rounding of it. At a penalty
    below the floor of a matrix of full rank, where they vanish with the penalty, in proportion to
    it, as the residuals then are."""
    memory_budget: int

    def left_out(self) -> Iterator[LeftOut]:
        """Left-out residuals of as many penalties as fit the budget.

        Four temporaries of their size count too.
        """
        problem = self.weighing.problem
        size = block_size(5 * 8 * problem.y.size, self.memory_budget)
        for penalties in blocks(len(self.alphas), size):
            dual, residuals = self.factor.solve(self.alphas[penalties])
            yield LeftOut(
                penalties=penalties,
                rows=slice(None),
                residuals=leave_one_out(
                    residuals / problem.roots[:, None], self.complements[penalties]
                ),
                amplification=self.weighing.amplification(dual, matrix_size(self)),
            )

    def solve(self, i: int) -> Solution:
        """Coefficients, intercept, left-out residuals. O(n²t)."""
        dual, residuals = (x[0] for x in self.factor.solve(self.alphas[i : i + 1]))
        left_out = leave_one_out(
            residuals / self.weighing.problem.roots[:, None], self.complements[i]
        )
        return *self.weighing.unscale(dual), left_out

    def smoother(self, i: int) -> GramSmoother:
        """The fit as a linear map. Up to n³ operations."""
        root = self.factor.root(self.alphas[i : i + 1])
        return GramSmoother(self.weighing, float(self.alphas[i]), root)


def path_route(
    matrix: Float[np.ndarray, "n n"],
    weighing: Weighing,
    rounding: float,
    dtype: np.dtype[Any],
    memory_budget: int,
) -> GramRoute:
    """Reduce a matrix that is weighed already, and judge every penalty.

    It is overwritten if it is of ``dtype``.
    """
    n, problem = len(matrix), weighing.problem
    rounding = max(rounding, float(np.finfo(dtype).eps))
    banded = n >= MIN_ROWS_FOR_A_BAND and (
        problem.alphas is None
        or problem.alphas.min() >= max(TINY, _floor_bound(matrix, weighing, rounding))
    )
    form: Banded | Tridiagonal | None = None
    for attempt in dict.fromkeys((dtype, matrix.dtype)):  # float64 again where float32 overflows
        with np.errstate(over="ignore", invalid="ignore"):
            reduce = to_band if banded else tridiagonalise
            form = reduce(matrix.astype(attempt, order="F", copy=False), weighing.normal)
        if form is not None:
            break
    else:
        raise np.linalg.LinAlgError(
            f"the reduction of the {matrix.shape} Gram matrix overflowed in {matrix.dtype}. Pass "
            "it in float64, or divide it and the penalties by a common factor."
        )
    largest = form.largest()
    scale = max(largest, weighing.removed)
    floor = numerical_floor(scale, n, rounding)
    alphas = problem.grid(largest, floor)
    complements = None
    if (
        alphas.min() > 0
        and alphas.min() >= floor
        and not (problem.draft and n <= MAX_ROWS_OF_A_SMALL_DRAFT)
    ):
        sweep = (
            Sweep.of(form, problem.scaled)
            if isinstance(form, Tridiagonal)
            else BandedSweep.of(form, problem.scaled)
        )
        complements = sweep.complements(alphas)
    if complements is not None:
        name = "banded" if banded else "tridiagonal"
        return GramRoute(name, alphas, floor, rounding, weighing, sweep, complements, memory_budget)
    spectrum = GramSpectrum.of(form, problem.scaled, floor, rounding * scale)
    complements = spectrum.complements(alphas, memory_budget)
    return GramRoute(
        "eigen", alphas, floor, rounding, weighing, spectrum, complements, memory_budget
    )


def _floor_bound(matrix: Float[np.ndarray, "n n"], weighing: Weighing, rounding: float) -> float:
    """A number that the numerical floor cannot exceed.

    The Frobenius norm of the lower triangle bounds λ_max.
    """
    parts = (np.tril(matrix[columns.start :, columns]) for columns in blocks(len(matrix), 32))
    lower = sum(
        float(np.square(part, dtype=np.float64).sum()) for part in parts
    )  # squares may outgrow float32
    squares = 2 * lower - float(np.square(matrix.diagonal(), dtype=np.float64).sum())
    return numerical_floor(max(np.sqrt(squares), weighing.removed), len(matrix), rounding)


@dataclass(frozen=True)
class Tridiagonal:
    """K = Q T Qᵀ on the span of the columns of Q, orthonormal and in Fortran order.

    Entries of T in float64.

    m = n, or n − 1 without the direction of the intercept.
    """

    basis: Float[np.ndarray, "n m"]
    diagonal: Float[np.ndarray, " m"]
    beside: Float[np.ndarray, " edges"]

    def largest(self) -> float:
        """The largest eigenvalue."""
        m = len(self.diagonal)
        if m < 2:
            return float(self.diagonal.max(initial=0.0))
        # bisection squares the entries: in units of the largest, that neither overflows nor
        # vanishes
        scale = max(float(np.abs(self.diagonal).max()), float(np.abs(self.beside).max())) or 1.0
        units = self.diagonal / scale, self.beside / scale
        top = eigvalsh_tridiagonal(*units, select="i", select_range=(m - 1, m - 1))
        return scale * float(top[0])

    def eigenpairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues (float64) and eigenvectors of T.

        In the precision of the basis, or in float64 if that fails.
        """
        if len(self.diagonal) < 2:
            return self.diagonal.copy(), np.ones((len(self.diagonal),) * 2)
        for dtype in dict.fromkeys((self.basis.dtype, np.dtype(np.float64))):
            values, vectors, info = _stevd(self.diagonal.astype(dtype), self.beside.astype(dtype))
            if info == 0 and np.isfinite(values).all() and np.isfinite(vectors).all():
                return values.astype(np.float64), vectors
        raise np.linalg.LinAlgError(
            f"the eigendecomposition of the {self.basis.shape} Gram matrix did not converge in "
            f"float64 (info {info}). Use penalties above the numerical floor, which need none."
        )


def tridiagonalise(
    matrix: Float[np.ndarray, "n n"], normal: Float[np.ndarray, " n"] | None
) -> Tridiagonal | None:
    """Reduce ``matrix`` (Fortran order, lower) in place to Q and T; None if anything is not finite.

    ``normal`` is the unit vector u of the reflection I − 2uuᵀ that emptied row and column 0, None
    if there was none. Cost: 8n³/3 operations, a quarter of them bound by memory; no second n × n
    matrix.
    """
    sytrd, sytrd_lwork, orghr, orghr_lwork = get_lapack_funcs(
        ("sytrd", "sytrd_lwork", "orghr", "orghr_lwork"), (matrix,)
    )
    n = len(matrix)
    work = int(sytrd_lwork(n, lower=1)[0])
    matrix, diagonal, beside, tau, _ = sytrd(matrix, lower=1, lwork=work, overwrite_a=1)
    if not (np.isfinite(diagonal).all() and np.isfinite(beside).all()):
        return None
    if n == 1:
        basis = np.ones_like(matrix)
    else:
        # sytrd stores its reflectors as a Hessenberg reduction does, whose Q LAPACK forms at GEMM
        # speed
        work = int(orghr_lwork(n, lo=0, hi=n - 1)[0])
        basis, _ = orghr(matrix, tau, lo=0, hi=n - 1, lwork=work, overwrite_a=1)
    diagonal, beside = diagonal.astype(np.float64), beside.astype(np.float64)
    if normal is None:
        return Tridiagonal(basis, diagonal, beside)
    # row and column 0 were empty, so T starts with a lone 0 and Q with the first axis: leave both
    # out
    basis = basis[:, 1:]
    if n > 1:
        (ger,) = get_blas_funcs(("ger",), (basis,))
        u = normal.astype(basis.dtype)
        ger(-2.0, u, basis.T @ u, a=basis, overwrite_a=1)
    return Tridiagonal(basis, diagonal[1:], beside[1:])


@dataclass(frozen=True)
class Sweep:
    """(K + alpha)⁻¹ for penalties above the numerical floor, by Gaussian elimination in T + alpha.

    Everything is held in units of ``scale``, so that float32 neither overflows nor underflows.
    """

    form: Tridiagonal
    outputs: Float[np.ndarray, "m t"]
    scale: float

    @classmethod
    def of(cls, form: Tridiagonal, y: Float[np.ndarray, "n t"]) -> Sweep:
        """Prepare for the scaled outputs ``y``."""
        outputs = (form.basis.T @ y.astype(form.basis.dtype)).astype(np.float64)
        scale = max(np.abs(form.diagonal).max(initial=0.0), np.abs(form.beside).max(initial=0.0))
        return cls(form, outputs, float(scale) or 1.0)

    def pivots(self, alphas: Float[np.ndarray, " a"]) -> tuple[np.ndarray, np.ndarray] | None:
        """Pivots D (m, a) and multipliers l (m, a) of T + alpha = L D Lᵀ, L unit lower bidiagonal.

        None if a pivot is not positive: then K has an eigenvalue below −alpha.
        """
        diagonal = (self.form.diagonal[:, None] + alphas) / self.scale
        beside = self.form.beside / self.scale
        multipliers = np.zeros_like(diagonal)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            for k in range(1, len(diagonal)):
                np.divide(beside[k - 1], diagonal[k - 1], out=multipliers[k])
                diagonal[k] -= multipliers[k] * beside[k - 1]
        return (diagonal, multipliers) if (diagonal > 0).all() else None

    def complements(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n"] | None:
        """1 − h = alpha diag (K + alpha)⁻¹, each a sum of squares.

        None where T + alpha is not positive.

        Column by column, u_k = q_k − l_k u_{k−1} is the forward substitution of Qᵀ for all
        penalties at once, and the diagonal is Σ_k u_k² / D_k. Cost: 5 n m a operations in cache.
        """
        factors = self.pivots(alphas)
        if factors is None:
            return None
        basis = self.form.basis
        n, m = basis.shape
        multipliers = factors[1].astype(basis.dtype)[:, :, None]
        shares = (alphas / self.scale / factors[0]).astype(basis.dtype)[:, :, None]
        result = np.empty((len(alphas), n))

        def sweep(rows: slice) -> None:
            substituted = np.zeros((len(alphas), rows.stop - rows.start), dtype=basis.dtype)
            term, total = np.empty_like(substituted), np.zeros_like(substituted)
            for k in range(m):
                np.multiply(substituted, multipliers[k], out=substituted)
                np.subtract(basis[rows, k], substituted, out=substituted)
                np.multiply(substituted, substituted, out=term)
                np.multiply(term, shares[k], out=term)
                np.add(total, term, out=total)
            result[:, rows] = total

        run_threads(sweep, blocks(n, max(256, TILE // len(alphas))))
        return result

    def root(self, alphas: Float[np.ndarray, " 1"]) -> Float[np.ndarray, "m n"]:
        """R with RᵀR = (K + alpha)⁻¹ on the span of the basis, at one penalty: D^{-1/2} L⁻¹ Qᵀ.

        2nm operations.
        """
        factors = self.pivots(alphas)
        if factors is None:
            raise np.linalg.LinAlgError(
                "T + alpha must be positive definite: ask `complements` first."
            )
        pivots, multipliers = factors
        root = self.form.basis.T.astype(np.float64)
        for k in range(1, len(root)):
            root[k] -= multipliers[k, 0] * root[k - 1]
        root /= np.sqrt(pivots * self.scale)
        return root

    def residuals(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n t"]:
        """y − K (K + alpha)⁻¹ y for each penalty."""
        return self.solve(alphas)[1]

    def solve(
        self, alphas: Float[np.ndarray, " a"]
    ) -> tuple[Float[np.ndarray, "a n t"], Float[np.ndarray, "a n t"]]:
        """(K + alpha)⁻¹ y for each penalty, and the residuals, alpha times that.

        Cost: 2 n m a t operations.
        """
        factors = self.pivots(alphas)
        if factors is None:
            raise np.linalg.LinAlgError(
                "T + alpha must be positive definite: ask `complements` first."
            )
        pivots, multipliers = factors
        (m, a), t = pivots.shape, self.outputs.shape[1]
        x = np.repeat(self.outputs[:, None, :], a, axis=1)
        for k in range(1, m):
            x[k] -= multipliers[k, :, None] * x[k - 1]
        x /= pivots[:, :, None] * self.scale
        for k in range(m - 2, -1, -1):
            x[k] -= multipliers[k + 1, :, None] * x[k + 1]
        basis = self.form.basis
        product = basis @ x.reshape(m, a * t).astype(basis.dtype)
        dual = np.ascontiguousarray(
            product.reshape(len(basis), a, t).transpose(1, 0, 2), dtype=np.float64
        )
        return dual, alphas[:, None, None] * dual


@dataclass(frozen=True)
class GramSpectrum:
    """K = V Λ Vᵀ, for paths that reach below the floor.

    To a penalty there, eigenvalues below it are zeros.

    To a penalty above the floor they are what they are, so that what is said of one penalty does
    not depend on the others. Negative ones are zeros always. ``outputs`` are Vᵀy, ``noise`` is the
    rounding error of an eigenvalue: one unit of rounding times the largest.
    """

    vectors: Float[np.ndarray, "n m"]
    values: Float[np.ndarray, " m"]
    outputs: Float[np.ndarray, "m t"]
    floor: float
    noise: float

    @classmethod
    def of(
        cls, form: Banded | Tridiagonal, y: Float[np.ndarray, "n t"], floor: float, noise: float
    ) -> GramSpectrum:
        """Decompose T and rotate Q. Cost: up to 14n³/3 operations and two more n × n matrices."""
        values, rotation = form.eigenpairs()
        vectors = form.basis @ rotation.astype(form.basis.dtype, copy=False)
        outputs = (vectors.T @ y.astype(vectors.dtype)).astype(np.float64)
        return cls(vectors, values, outputs, floor, noise)

    def inverse(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "m a"]:
        """1 / (λ + alpha), and 0 for an eigenvalue that counts as zero.

        A penalty below the floor has to take such an eigenvalue for zero.
        """
        values = np.maximum(self.values, 0.0)[:, None]
        seen = (values > self.floor) | ((alphas >= self.floor) & (alphas > 0))
        return np.asarray(np.divide(1.0, values + alphas, out=np.zeros(seen.shape), where=seen))

    def shrinkage(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "m a"]:
        """What a residual keeps of each eigenvector.

        Alpha / (λ + alpha); 1 for λ = 0, also at alpha = 0.

        If no eigenvalue counts as zero, residuals vanish with a penalty below the floor, and so do
        the complements of the leverages. Leave-one-out is their ratio, which has a limit: both are
        given over the most that is kept.
        """
        inverse = self.inverse(alphas)
        kept = np.where(inverse > 0, alphas * inverse, 1.0)
        if (self.values > self.floor).all() and len(self.values):
            kept = np.where(alphas < self.floor, inverse / inverse.max(axis=0), kept)
        return np.asarray(kept)

    def complements(
        self, alphas: Float[np.ndarray, " a"], memory_budget: int
    ) -> Float[np.ndarray, "a n"]:
        """1 − h = Σ_j V_ij² alpha/(λ_j + alpha), or in proportion to it as ``shrinkage`` is.

        0 where rounding hides a tenth of the residual or more.
        """
        tilt = self.tilt()
        columns = np.column_stack([self.shrinkage(alphas), tilt])
        n, m = self.vectors.shape
        result = np.empty((len(alphas), n))
        for rows in blocks(n, block_size(m * 24, memory_budget)):
            squares = np.square(self.vectors[rows], dtype=np.float64)
            sums = squares @ columns
            kept, leak = sums[:, :-1], sums[:, -1:]
            hidden = (self.hidden(alphas, kept, leak) > 0.1 * kept) | self.sets_the_floor(squares)[
                :, None
            ]
            result[:, rows] = np.where(hidden & (alphas < self.floor), 0.0, kept).T
        return result

    def hidden(
        self, alphas: Float[np.ndarray, " a"], kept: np.ndarray, leak: np.ndarray
    ) -> np.ndarray:
        """What rounding may have made of ``kept``, 1 − h.

        If it leaks so much of a sample into the null space.

        That is 2 √(leak (1 − h)) + leak of 1 − h itself, and √leak |r| of the residual, r those of
        all samples. The latter is compared with (1 − h) |y| / √n, the residual of a sample that is
        predicted as badly as most.
        """
        sizes = np.linalg.norm(self.outputs, axis=0)
        left = np.linalg.norm(self.shrinkage(alphas)[:, :, None] * self.outputs[:, None, :], axis=0)
        share = np.divide(left, sizes, out=np.zeros_like(left), where=sizes > 0).max(axis=1)
        return np.asarray(
            np.maximum(2 * np.sqrt(leak * kept) + leak, np.sqrt(len(self.vectors) * leak) * share)
        )

    def tilt(self) -> Float[np.ndarray, " m"]:
        """How far rounding tilts each eigenvector into the null space, squared.

        Nowhere if that is empty.

        About noise/λ_j each, which leaks Σ_j V_ij² (noise/λ_j)² of sample i into it.
        """
        known = self.values > self.floor
        tilt = np.zeros(len(known))
        if not known.all():
            tilt[known] = np.square(self.noise / self.values[known])
        return tilt

    def sets_the_floor(self, squares: Float[np.ndarray, "k m"]) -> Bool[np.ndarray, " k"]:
        """Whether the floor is that of one sample, or group.

        Without it, eigenvalues taken for zero would count.

        ``squares`` are its squared coordinates along the eigenvectors, a row for each. What is left
        of the largest eigenvalue without it is at least that of every eigenvector's rest.
        """
        if (self.values > self.floor).all():
            return np.zeros(len(squares), dtype=bool)
        rest = (np.maximum(self.values, 0.0) * np.maximum(1.0 - squares, 0.0)).max(axis=1)
        return np.asarray(rest < 0.1 * self.values.max())

    def root(self, alphas: Float[np.ndarray, " 1"]) -> Float[np.ndarray, "m n"]:
        """R with RᵀR = (K + alpha)⁻¹ on the span of the eigenvectors, at one penalty."""
        return np.asarray(np.sqrt(self.inverse(alphas)) * self.vectors.T)

    def residuals(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n t"]:
        """Outputs minus fit, for each penalty, or in proportion to it as ``shrinkage`` is."""
        return self._turned_back(self.shrinkage(alphas))

    def solve(
        self, alphas: Float[np.ndarray, " a"]
    ) -> tuple[Float[np.ndarray, "a n t"], Float[np.ndarray, "a n t"]]:
        """(K + alpha)⁻¹ y and residuals.

        Of eigenvalues taken for zero nothing, since they carry no function.
        """
        return self._turned_back(self.inverse(alphas)), self.residuals(alphas)

    def _turned_back(self, weights: Float[np.ndarray, "m a"]) -> Float[np.ndarray, "a n t"]:
        """V diag(weights) Vᵀ y for each penalty."""
        (m, a), t = weights.shape, self.outputs.shape[1]
        x = weights[:, :, None] * self.outputs[:, None, :]
        product = self.vectors @ x.reshape(m, a * t).astype(self.vectors.dtype)
        return np.ascontiguousarray(product.reshape(-1, a, t).transpose(1, 0, 2), dtype=np.float64)


def _stevd(diagonal: np.ndarray, beside: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """LAPACK's divide and conquer for a tridiagonal matrix."""
    (stevd,) = get_lapack_funcs(("stevd",), (diagonal,))
    values, vectors, info = stevd(diagonal, beside)
    return values, vectors, int(info)


@dataclass(frozen=True)
class GroupRoute:
    """A path of penalties judged on groups that are left out whole.

    Residuals are (I − H)_gg⁻¹ r_g, from the spectrum.
    """

    alphas: Float[np.ndarray, " a"]
    floor: float
    rounding: float
    weighing: Weighing
    spectrum: GramSpectrum
    members: list[np.ndarray]
    name: ClassVar[str] = "eigen"

    def left_out(self) -> Iterator[LeftOut]:
        """Residuals of the fits without each group, one penalty at a time."""
        for i in range(len(self.alphas)):
            dual, _ = self.spectrum.solve(self.alphas[i : i + 1])
            yield LeftOut(
                penalties=slice(i, i + 1),
                rows=slice(None),
                residuals=self._left_out(i)[None],
                amplification=self.weighing.amplification(dual, matrix_size(self)),
            )

    def smoother(self, i: int) -> GramSmoother:
        """The fit as a linear map. n² operations."""
        root = self.spectrum.root(self.alphas[i : i + 1])
        return GramSmoother(self.weighing, float(self.alphas[i]), root)

    def solve(self, i: int) -> Solution:
        """Coefficients, intercept, left-out residuals."""
        return *self.weighing.unscale(
            self.spectrum.solve(self.alphas[i : i + 1])[0][0]
        ), self._left_out(i)

    def without(
        self, i: int, siblings: Int[np.ndarray, " k"], left_out: Float[np.ndarray, "n t"]
    ) -> tuple[Any, Any]:
        """Coefficients and intercept of the fit without some samples.

        ``left_out`` knows the residuals of these samples.

        Leaving a group out is fitting its own left-out predictions in the place of its outputs.
        """
        problem, spectrum, alpha = self.weighing.problem, self.spectrum, self.alphas[i : i + 1]
        replaced = problem.roots[siblings, None] * left_out[siblings]
        along = spectrum.inverse(alpha) * (spectrum.vectors[siblings].T @ replaced)
        coef, intercept = self.weighing.unscale(
            spectrum.solve(alpha)[0][0] - spectrum.vectors @ along
        )
        if problem.fit_intercept:
            intercept = intercept - problem.roots[siblings] @ replaced / problem.weights.sum()
        return coef, intercept

    def _left_out(self, i: int) -> Float[np.ndarray, "n t"]:
        """Infinite where rounding hides a tenth of the residual or more.

        For a group of one this is `GramSpectrum.complements`; for more, what leaks into the null
        space is compared with what is kept along every eigenvector of (I − H)_gg.
        """
        spectrum, alpha = self.spectrum, self.alphas[i : i + 1]
        shares = spectrum.shrinkage(alpha)[:, 0]
        below, tilt = alpha[0] < spectrum.floor, spectrum.tilt()
        residuals = spectrum.residuals(alpha)[0]
        for rows in self.members:
            part = spectrum.vectors[rows]
            kept, directions = np.linalg.eigh((part * shares) @ part.transpose(0, 2, 1))
            hidden = rows.shape[1] * EPS * kept[:, -1:]
            outliers = np.zeros(len(rows), dtype=bool)
            if below:
                leak = np.square(directions.transpose(0, 2, 1) @ part) @ tilt
                hidden = hidden + spectrum.hidden(alpha, np.maximum(kept, 0.0), leak)
                outliers = spectrum.sets_the_floor(np.square(part).sum(axis=1))
            judged = (hidden <= 0.1 * kept).all(axis=1) & ~outliers
            residuals[rows[~judged]] = np.inf
            along = directions[judged].transpose(0, 2, 1) @ residuals[rows[judged]]
            residuals[rows[judged]] = directions[judged] @ (along / kept[judged][:, :, None])
        return residuals / self.weighing.problem.roots[:, None]


def _leave_groups_out(
    gram: Float[np.ndarray, "n n"], problem: RidgeProblem, rounding: float, *, keep_factor: bool
) -> RidgeFit:
    """Choose the penalty on whole groups.

    A member of weight 0 is predicted by the fit without its group.
    """
    groups = problem.groups
    assert groups is not None
    heard = np.flatnonzero(problem.weights)
    own = problem
    if len(heard) < len(groups):
        options: dict[str, Any] = {
            "fit_intercept": problem.fit_intercept,
            "weights": problem.weights[heard],
        }
        options |= {"groups": groups[heard], "criterion": problem.criterion, "draft": problem.draft}
        own = RidgeProblem.of(problem.y[heard], problem.alphas, **options)
    matrix, weighing = weigh_gram(
        gram[np.ix_(heard, heard)].astype(np.float64), own, overwrite=True
    )
    form = tridiagonalise(matrix, weighing.normal)
    assert form is not None  # finite and below 1e150, as `weigh_gram` has seen, and in float64
    largest = form.largest()
    scale = max(largest, weighing.removed)
    floor = numerical_floor(scale, len(heard), rounding)
    # blocks of an inverse lose digits in proportion to its condition: nine of them are enough to
    # lose
    alphas = own.grid(largest, max(floor, 1e-9 * scale), most=20)
    spectrum = GramSpectrum.of(form, own.scaled, floor, rounding * scale)
    route = GroupRoute(
        alphas, floor, rounding, weighing, spectrum, list(group_stacks(groups[heard]))
    )
    fit = own.fit(route, keep_factor=keep_factor)
    if own is problem:
        return fit
    assert fit.left_out is not None
    left, coef = np.empty(problem.y.shape), np.zeros(problem.y.shape)
    left[heard], coef[heard] = fit.left_out, fit.coef
    for i in np.flatnonzero(problem.weights == 0):
        siblings = np.flatnonzero(groups[heard] == groups[i])
        without, intercept = route.without(fit.best, siblings, fit.left_out)
        left[i] = problem.y[i] - gram[i, heard] @ without - intercept
    return replace(fit, coef=coef, left_out=left)


def group_stacks(
    groups: Int[np.ndarray, " n"], most: int = 2**22
) -> Iterator[Int[np.ndarray, "g k"]]:
    """The members of groups of one size, a row per group.

    Few enough at a time for n numbers each to be ``most``.
    """
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=groups[order[:1]] - 1))
    sizes = np.diff(starts, append=len(groups))
    for size in np.unique(sizes).tolist():
        members = order[starts[sizes == size][:, None] + np.arange(size)]
        for rows in blocks(len(members), max(1, most // (len(groups) * size))):
            yield members[rows]


@dataclass(frozen=True)
class LooGradient:
    """Leave-one-out mean squared error E(K, α) = Σ_i w_i |e_i|² / (t Σ w) and its gradient.

    ``gram`` is ∂E/∂K, symmetric: dE = Σ_ij gram_ij dK_ij; ``residuals`` are the e_i of the fits
    without sample i.
    """

    error: float
    gram: Float[np.ndarray, "n n"] = field(repr=False)
    log_alpha: float
    residuals: Float[np.ndarray, "n t"] = field(repr=False)


def loo_gradient(
    gram: Float[np.ndarray, "n n"],
    y: Float[np.ndarray, "n t"],
    alpha: float,
    *,
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    groups: Int[np.ndarray, " n"] | None = None,
) -> LooGradient:
    """Differentiate the leave-one-out error of ridge on a Gram matrix K at one penalty.

    About 5n³ operations.

    ::

        B = A − A11ᵀA/(1ᵀA1),   A = (K + α diag(1/w))⁻¹        (B = A without an intercept)
        β = B y,   e_i = β_i / B_ii,   dB = −B (dK + diag(1/w) dα) B
        ∂E/∂K = B diag(p) B − (B z βᵀ + β zᵀ B)/2
        z_i = 2 w_i e_i / (t Σw B_ii),   p_i = <z_i, e_i>

    With groups g that are left out together, e_g = B_gg⁻¹ β_g, z_g = 2 B_gg⁻¹ w_g e_g / (t Σw), and
    the diagonal matrix becomes one of symmetric blocks (z_g e_gᵀ + e_g z_gᵀ)/2. Values need no
    derivative: they are eliminated in closed form (variable projection), and so are the n fits that
    leave one sample out. K + α must have a Cholesky factor.

    >>> x = np.array([[0.0], [1.0], [3.0], [4.0]])
    >>> found, moved = (loo_gradient(scale * x @ x.T, x**2, alpha=0.1) for scale in (1.0, 1.001))
    >>> bool(
    ...     np.isclose(moved.error - found.error, 0.001 * np.sum(found.gram * (x @ x.T)), rtol=1e-2)
    ... )
    True
    """
    w = RidgeProblem.of(y, [alpha], weights=weights).weights
    inverse = centred_inverse(gram, alpha / w, fit_intercept=fit_intercept)
    dual = inverse @ y
    share = w / (w.sum() * y.shape[1])
    # products of n × n matrices in the precision of the Gram matrix: float32 steers as well
    narrow = inverse.astype(gram.dtype, copy=False)
    if groups is None:
        diagonal = inverse.diagonal().copy()
        residuals = dual / diagonal[:, None]
        pull = 2.0 * (share / diagonal)[:, None] * residuals
        gradient = (narrow * np.einsum("nt,nt->n", pull, residuals).astype(narrow.dtype)) @ narrow
    else:
        residuals, pull = left_out_residuals(inverse, dual, groups), np.empty_like(dual)
        middle = np.empty_like(narrow)  # blocks times the inverse
        for rows in group_stacks(groups):
            block = inverse[rows[:, :, None], rows[:, None, :]]
            pull[rows] = 2.0 * np.linalg.solve(block, share[rows][:, :, None] * residuals[rows])
            outer = pull[rows] @ residuals[rows].transpose(0, 2, 1)
            middle[rows] = 0.5 * (outer + outer.transpose(0, 2, 1)) @ inverse[rows]
        gradient = narrow @ middle
    error = float((share @ np.square(residuals)).sum())
    along = 0.5 * (inverse @ pull)
    cross = along.astype(narrow.dtype) @ dual.T.astype(narrow.dtype)
    gradient -= cross
    gradient -= cross.T
    return LooGradient(error, gradient, float(alpha * (gradient.diagonal() / w).sum()), residuals)


def left_out_residuals(
    inverse: Float[np.ndarray, "n n"],
    dual: Float[np.ndarray, "n t"],
    groups: Int[np.ndarray, " n"] | None,
) -> Float[np.ndarray, "n t"]:
    """Residuals of the fits without each sample, or group, from `centred_inverse` B and By.

    B_gg⁻¹ (By)_g.
    """
    if groups is None:
        return dual / inverse.diagonal()[:, None]
    residuals = np.empty_like(dual)
    for rows in group_stacks(groups):
        residuals[rows] = np.linalg.solve(inverse[rows[:, :, None], rows[:, None, :]], dual[rows])
    return residuals


def centred_inverse(
    gram: Float[np.ndarray, "n n"], ridge: Float[np.ndarray, " n"], *, fit_intercept: bool
) -> Float[np.ndarray, "n n"]:
    """(K + diag(ridge))⁻¹ by Cholesky, in float64, less its part along the intercept.

    Ridge has coefficients By.
    """
    inverse = _inverse(gram, ridge)
    if fit_intercept:
        sums = inverse.sum(axis=1)
        inverse -= np.outer(sums, sums / sums.sum())
    return inverse


def _inverse(
    gram: Float[np.ndarray, "n n"], ridge: Float[np.ndarray, " n"]
) -> Float[np.ndarray, "n n"]:
    """(K + diag(ridge))⁻¹ by Cholesky, in float64."""
    matrix = np.array(gram, dtype=np.float64, order="F")
    np.fill_diagonal(matrix, matrix.diagonal() + ridge)
    potrf, potri = get_lapack_funcs(("potrf", "potri"), (matrix,))
    factor, info = potrf(matrix, lower=True, overwrite_a=True)
    if info == 0:
        factor, info = potri(factor, lower=True, overwrite_c=True)
    if info != 0 or not math.isfinite(factor[-1, -1]):
        raise np.linalg.LinAlgError(
            f"the Gram matrix plus the penalty {ridge.min():g} must be positive definite: it is "
            "not, within rounding. Use a larger penalty, at least the numerical floor of the "
            "matrix."
        )
    mirror_lower(factor)
    return np.asarray(factor)
