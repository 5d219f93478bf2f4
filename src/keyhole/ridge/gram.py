"""Ridge from a Gram matrix: the dual route over heads and the exact kernel alike.

One penalty is a Cholesky factorisation in place, O(n³/3) twice. A path of penalties is one
reduction of the matrix to a tridiagonal form, 8n³/3, and a sweep through that form for each
penalty. A penalty below the numerical floor, and groups that are left out together, take the
eigenvectors of that form.
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
from keyhole.solve.matrices import factorise_lower, invert_lower, mirror_lower, solve_factor
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

# entries (penalties × samples) of a tile of the sweep: fits the second-level cache, and takes far
# longer than a call costs
TILE = 40_000

# bytes of a panel in passes over an n × n matrix: beyond the cache, small beside any large matrix
PANEL = 2**25

# bytes of the columns of a triangle that are read several times
IN_CACHE = 2**21

# penalties of the automatic grid where groups are left out together
N_GROUP_ALPHAS = 20

# least penalty of that grid as a share of λ_max: blocks of an inverse lose digits in proportion to
# its condition, and nine digits are enough to lose
LEAST_GROUP_ALPHA = 1e-9

# a leave-one-out residual is not used where rounding may have made this share of it, or more
HIDDEN_SHARE = 0.1

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
    unit of rounding of the arithmetic that computed it, by default that of its dtype. ``dtype`` is
    the precision of the reduction behind a path, repeated in float64 if it fails in float32. If
    ``overwrite_gram``, no second n × n matrix is allocated above the numerical floor;
    ``memory_budget`` bounds all other temporaries. ``keep_factor`` lets the fit be solved for other
    penalties of its path.

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
    if rounding is None:
        rounding = float(np.finfo(gram.dtype).eps)
    if problem.groups is not None:
        return _leave_groups_out(gram, problem, rounding, keep_factor=keep_factor)

    matrix, weighing = weigh_gram(gram, problem, overwrite=overwrite_gram)
    path_dtype = gram.dtype if dtype is None else np.dtype(dtype)

    # one penalty: a Cholesky factorisation, unless the penalty is below the numerical floor
    if problem.alphas is not None and len(problem.alphas) == 1:
        route = cholesky_route(
            matrix,
            weighing,
            problem.alphas,
            rounding,
            memory_budget,
            keep_factor=keep_factor,
        )
        if route is not None:
            return problem.fit(route, keep_factor=keep_factor)
        path_dtype = matrix.dtype

    # several penalties, or one that Cholesky cannot take
    path = path_route(matrix, weighing, rounding, path_dtype, memory_budget)
    return problem.fit(path, keep_factor=keep_factor)


@dataclass(frozen=True)
class Weighing:
    """How a ridge problem on a Gram matrix was scaled by √w and reflected, and the way back.

    With s = √w and S = diag s, the matrix S K S is reflected by H = I − 2uuᵀ, which takes s to the
    first axis: the direction of the intercept is then row and column 0, which are emptied.

    Attributes
    ----------
    problem : RidgeProblem
    normal : array (n,) or None
        The unit vector u, None without an intercept.
    gram_mean : array (n,)
        S K w / Σw, from which the intercept follows.
    removed : float
        sᵀ S K S s / Σw: the size of what centring removed, and so of the rounding that remains.
    diagonal : array (n,)
        K(x_i, x_i) of the matrix as it was given.
    """

    problem: RidgeProblem
    normal: Float[np.ndarray, " n"] | None
    gram_mean: Float[np.ndarray, " n"]
    removed: float
    diagonal: Float[np.ndarray, " n"]

    def reflect(self, x: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
        """H x; x itself without an intercept."""
        if self.normal is None:
            return x
        return x - np.outer(2 * self.normal, self.normal @ x)

    def unscale(self, dual: Float[np.ndarray, "n t"]) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients a = S c and intercept b from the scaled ones c.

        They are those of f(x) = Σ a_i K(x, x_i) + b.
        """
        coef = self.problem.roots[:, None] * dual
        intercept = self.problem.y_mean - self.gram_mean @ dual
        return coef, intercept

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
        dual coefficients is y/α: for a kernel of low rank this grows without bound as α falls. So
        does that of samples whose K(x_i, x_i) is far below α, if others are far above.
        """
        problem = self.problem
        total_weight = problem.weights.sum()
        mean_diagonal = problem.weights @ self.diagonal / total_weight

        # variances of a prediction by the rounding of the kernel and of the factorisation
        with np.errstate(over="ignore"):
            squares = np.square(dual)
            weighted_diagonal = problem.weights * self.diagonal
            of_kernel = mean_diagonal * np.einsum("n,ant->at", weighted_diagonal, squares)
            of_factor = (FACTOR_SHARE * size) ** 2 / total_weight * squares.sum(axis=1)
            deviations = np.sqrt(np.maximum(of_kernel + of_factor, 0.0))

        # relative to the spread of each output; a constant output has none, and does not move
        spread = problem.spread
        shares = np.divide(deviations, spread, out=np.zeros_like(deviations), where=spread > 0)
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
    panels = list(blocks(n, block_size(n * matrix.itemsize, PANEL)))

    # NaN and infinity are reported before any long work
    for columns in panels:
        if not np.isfinite(matrix[columns.start :, columns]).all():
            check_finite(np.tril(matrix), "gram")

    # S K S
    if problem.weighted:
        scale = problem.roots.astype(matrix.dtype)
        for columns in panels:
            matrix[:, columns] *= scale[columns]
            matrix[:, columns] *= scale[:, None]

    # H S K S H, if there is an intercept to separate
    if problem.fit_intercept:
        normal, gram_mean, removed = _reflect_in_place(matrix, problem.roots)
    else:
        normal = None
        gram_mean = np.zeros(n)
        removed = 0.0
    weighing = Weighing(
        problem=problem,
        normal=normal,
        gram_mean=gram_mean,
        removed=removed,
        diagonal=diagonal,
    )
    return matrix, weighing


def _fortran_lower(gram: Float[np.ndarray, "n n"], *, overwrite: bool) -> Float[np.ndarray, "n n"]:
    """The matrix in Fortran order: the array itself if it may be overwritten, else a copy."""
    # the transpose of a C-ordered array is Fortran-ordered, and the matrix is symmetric
    if not gram.flags.f_contiguous and gram.flags.c_contiguous:
        gram = gram.T
    if overwrite and gram.flags.f_contiguous and gram.flags.writeable:
        return gram
    return np.array(gram, order="F")


def _reflect_in_place(
    matrix: Float[np.ndarray, "n n"], roots: Float[np.ndarray, " n"]
) -> tuple[np.ndarray, np.ndarray, float]:
    """Replace K~ by H K~ H without row and column 0; return u, K~s/Σw and sᵀK~s/Σw.

    Costs two passes over the matrix. With p = K~u, H K~ H = K~ − u qᵀ − q uᵀ, q = 2 (p − (uᵀp) u).
    """
    symv, syr2 = get_blas_funcs(("symv", "syr2"), (matrix,))

    # d = s/|s| and its image K~d, the first pass
    length = np.linalg.norm(roots)
    direction = roots / length
    image = symv(1.0, matrix, direction.astype(matrix.dtype), lower=1).astype(np.float64)

    # u is the unit vector along d + e_0: nothing cancels, since every root is positive
    normal = direction.copy()
    normal[0] += 1.0
    normal_length = np.linalg.norm(normal)
    normal /= normal_length

    # K~u from K~d and the first column, then the rank-two update, the second pass
    first_column = matrix[:, 0].astype(np.float64)
    product = (image + first_column) / normal_length
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

    It is recovered from the numerical floor, which is a multiple of it.
    """
    unit_floor = numerical_floor(1.0, len(route.weighing.diagonal), route.rounding)
    return route.floor / unit_floor


@dataclass(frozen=True)
class GramSmoother:
    """A fit from a Gram matrix as a linear map of its outputs, `Smoother`.

    With S = diag √w and s = √w, ``root`` R is a root of the inverse: RᵀR = C − C s sᵀC / sᵀCs with
    C = (S K S + α)⁻¹, or C itself without an intercept. With t(x) = S (k(x) − K w/Σw),

        h(x) = w/Σw + S Rᵀ R t(x),    Q = S Rᵀ R S,    v(x) = k̄(x, x) − |R t(x)|² + α/Σw

    where k̄ is the kernel about its mean over the samples; without an intercept t = S k(x), k̄ = k
    and the terms in Σw are not there. The inverse itself is never computed: v(x) is a small
    difference, which |R t|² leaves with the rounding of the kernel, 7e-14 at α = 5e-13 and K of
    size one, and tᵀ(RᵀR)t with that of RᵀR, 4e-7.
    """

    weighing: Weighing
    alpha: float
    root: Float[np.ndarray, "m n"]

    def apply(
        self, compared: Float[np.ndarray, "m n"], self_kernel: Float[np.ndarray, " m"]
    ) -> tuple[Float[np.ndarray, "m n"], Float[np.ndarray, " m"]]:
        """h(x) and v(x) from K(x, x_j) and K(x, x). 4n² operations for a sample."""
        problem = self.weighing.problem
        weights = problem.weights
        total_weight = weights.sum()

        # t(x), R t(x), and the parts of h and v that do not depend on an intercept
        about_mean = problem.roots * compared - self.weighing.gram_mean
        half_solved = about_mean @ self.root.T
        hat = problem.roots * (half_solved @ self.root)
        variance = self_kernel - np.einsum("mn,mn->m", half_solved, half_solved)

        # k̄(x, x) instead of k(x, x), and the terms in Σw
        if problem.fit_intercept:
            hat += weights / total_weight
            of_mean = self.weighing.removed + self.alpha - 2 * (compared @ weights)
            variance += of_mean / total_weight

        # v(x) is the least of |φ(x) − Σ_j h_j φ_j|² + α Σ_j h_j² / w_j over h, so that it is never
        # below the second term, whatever rounding says
        least = self.alpha * np.einsum("mn,n->m", np.square(hat), 1 / weights)
        return hat, np.maximum(variance, least)

    def precision(self, rows: Int[np.ndarray, " g"]) -> Float[np.ndarray, "g g"]:
        """Q_gg."""
        columns = self.root[:, rows] * self.weighing.problem.roots[rows]
        return np.asarray(columns.T @ columns)

    def precisions(self) -> Float[np.ndarray, " n"]:
        """The diagonal of Q."""
        diagonal = np.einsum("mn,mn->n", self.root, self.root)
        return np.asarray(self.weighing.problem.weights * diagonal)


@dataclass(frozen=True)
class SolvedRoute:
    """Penalties that were factorised one by one.

    ``solved`` holds the dual coefficients and 1 − h of every sample, for each penalty. ``inverse``,
    if it was kept, is the inverse of the Cholesky factor of the only penalty, in its lower
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
        """Coefficients, intercept, leave-one-out residuals."""
        dual, complement = self.solved[i]
        coef, intercept = self.weighing.unscale(dual)
        residuals = float(self.alphas[i]) * dual / self.weighing.problem.roots[:, None]
        return coef, intercept, leave_one_out(residuals, complement)

    def smoother(self, i: int) -> GramSmoother:
        """The fit as a linear map: L⁻¹ of the factor, reflected back. 4n² operations."""
        assert self.inverse is not None
        root = np.tril(self.inverse).astype(np.float64)
        normal = self.weighing.normal
        if normal is not None:
            root -= np.outer(root @ normal, 2 * normal)
        return GramSmoother(weighing=self.weighing, alpha=float(self.alphas[i]), root=root)


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

    2n³/3 operations. None, and the matrix as it was, if the penalty may be below the floor or there
    is no factor.
    """
    alpha = float(alphas[0])
    floor = _floor_bound(matrix, weighing, rounding)
    if not alpha > 0 or alpha < floor:
        return None
    has_intercept = weighing.normal is not None

    # K~ + α. The factorisation overwrites the lower triangle: the upper one keeps a copy, in case
    # it fails
    mirror_lower(matrix)
    diagonal = matrix.diagonal().copy()
    np.fill_diagonal(matrix, diagonal + matrix.dtype.type(alpha))
    if has_intercept:
        # the direction of the intercept is decoupled from the rest, and left out of every sum below
        matrix[0, 0] = 1.0
    if not factorise_lower(matrix):
        mirror_lower(matrix.T)
        np.fill_diagonal(matrix, diagonal)
        return None

    # dual coefficients (K~ + α)⁻¹ y, in the coordinates of the samples
    target = weighing.reflect(weighing.problem.scaled)
    if has_intercept:
        target[0] = 0.0
    dual = weighing.reflect(solve_factor(matrix, target).astype(np.float64))

    # complements of the leverages, 1 − h = α diag (K~ + α)⁻¹
    invert_lower(matrix)
    if has_intercept:
        matrix[0, 0] = 0.0
    complement = alpha * _inverse_diagonal(matrix, weighing.normal, memory_budget)
    return SolvedRoute(
        name="cholesky",
        alphas=alphas,
        floor=floor,
        rounding=rounding,
        weighing=weighing,
        solved=[(dual, complement)],
        inverse=matrix if keep_factor else None,
    )


def _inverse_diagonal(
    inverse: Float[np.ndarray, "n n"], normal: Float[np.ndarray, " n"] | None, memory_budget: int
) -> Float[np.ndarray, " n"]:
    """Diagonal of H XᵀX H for a lower triangular X.

    They are the squared lengths of the columns of X − 2 (X u) uᵀ.
    """
    # the shift −2 X u: column j of X is moved by u_j times it
    n = len(inverse)
    if normal is None:
        u = np.zeros(n, dtype=inverse.dtype)
        shift = np.zeros(n, dtype=inverse.dtype)
    else:
        (trmv,) = get_blas_funcs(("trmv",), (inverse,))
        u = normal.astype(inverse.dtype)
        shift = -2 * trmv(inverse, u, lower=1)

    # above the panel X is zero, and only the shift counts: Σ shift_i² over the rows above each row
    squares_above = np.concatenate([[0.0], np.cumsum(np.square(shift, dtype=np.float64))])

    result = np.empty(n)
    panel_width = block_size(2 * n * inverse.itemsize, min(memory_budget, IN_CACHE))
    for columns in blocks(n, panel_width):
        start = columns.start
        width = columns.stop - start
        panel = inverse[start:, columns].copy(order="F")
        panel[:width] = np.tril(panel[:width])
        if normal is not None:
            panel += shift[start:, None] * u[columns]
        below = np.einsum("ij,ij->j", panel, panel)
        above = squares_above[start] * np.square(u[columns], dtype=np.float64)
        result[columns] = below + above
    return result


@dataclass(frozen=True)
class GramRoute:
    """A path of penalties from one factorisation of the matrix.

    ``factor`` is a sweep through a tridiagonal form of it, or its spectrum. ``complements`` are
    1 − h, the complements of the leverages; 0 where they are within rounding of it. At a penalty
    below the floor of a matrix of full rank, where they vanish with the penalty, they are given in
    proportion to it, as the residuals then are.
    """

    name: str
    alphas: Float[np.ndarray, " a"]
    floor: float
    rounding: float
    weighing: Weighing
    factor: Sweep | GramSpectrum
    complements: Float[np.ndarray, "a n"]
    memory_budget: int

    def left_out(self) -> Iterator[LeftOut]:
        """Leave-one-out residuals of as many penalties at a time as fit the budget."""
        problem = self.weighing.problem
        # the residuals (n, t) of a penalty, and four temporaries of their size, in float64
        bytes_per_penalty = 5 * 8 * problem.y.size
        for penalties in blocks(
            len(self.alphas), block_size(bytes_per_penalty, self.memory_budget)
        ):
            dual, residuals = self.factor.solve(self.alphas[penalties])
            unweighted = residuals / problem.roots[:, None]
            yield LeftOut(
                penalties=penalties,
                rows=slice(None),
                residuals=leave_one_out(unweighted, self.complements[penalties]),
                amplification=self.weighing.amplification(dual, matrix_size(self)),
            )

    def solve(self, i: int) -> Solution:
        """Coefficients, intercept, leave-one-out residuals. O(n²t)."""
        duals, residuals = self.factor.solve(self.alphas[i : i + 1])
        coef, intercept = self.weighing.unscale(duals[0])
        unweighted = residuals[0] / self.weighing.problem.roots[:, None]
        return coef, intercept, leave_one_out(unweighted, self.complements[i])

    def smoother(self, i: int) -> GramSmoother:
        """The fit as a linear map. Up to n³ operations."""
        root = self.factor.root(self.alphas[i : i + 1])
        return GramSmoother(weighing=self.weighing, alpha=float(self.alphas[i]), root=root)


def path_route(
    matrix: Float[np.ndarray, "n n"],
    weighing: Weighing,
    rounding: float,
    dtype: np.dtype[Any],
    memory_budget: int,
) -> GramRoute:
    """Reduce a matrix that is weighed already, for the leave-one-out errors of every penalty.

    The matrix may be overwritten.
    """
    n = len(matrix)
    problem = weighing.problem
    rounding = max(rounding, float(np.finfo(dtype).eps))

    # reduce in ``dtype``; if that overflows, again in the matrix' own precision
    form: Tridiagonal | None = None
    for precision in dict.fromkeys((dtype, matrix.dtype)):
        with np.errstate(over="ignore", invalid="ignore"):
            narrowed = matrix.astype(precision, order="F", copy=False)
            form = tridiagonalise(narrowed, weighing.normal)
        if form is not None:
            break
    if form is None:
        raise np.linalg.LinAlgError(
            f"the reduction of the {matrix.shape} Gram matrix overflowed in {matrix.dtype}. Pass "
            "it in float64, or divide it and the penalties by a common factor."
        )

    # the numerical floor, and the penalties of an automatic grid, follow from λ_max; what centring
    # has removed was part of the sums that were rounded, and counts for the floor too
    largest = form.largest()
    scale = max(largest, weighing.removed)
    floor = numerical_floor(scale, n, rounding)
    alphas = problem.grid(largest, floor)

    # above the floor: a sweep through the form gives 1 − h, the complements of the leverages,
    # unless rounding made it indefinite
    above_floor = alphas.min() > 0 and alphas.min() >= floor
    if above_floor:
        sweep = Sweep.of(form, problem.scaled)
        complements = sweep.complements(alphas)
        if complements is not None:
            return GramRoute(
                name="tridiagonal",
                alphas=alphas,
                floor=floor,
                rounding=rounding,
                weighing=weighing,
                factor=sweep,
                complements=complements,
                memory_budget=memory_budget,
            )

    # everything else: the eigenvectors of the form
    spectrum = GramSpectrum.of(form, problem.scaled, floor, rounding * scale)
    return GramRoute(
        name="eigen",
        alphas=alphas,
        floor=floor,
        rounding=rounding,
        weighing=weighing,
        factor=spectrum,
        complements=spectrum.complements(alphas, memory_budget),
        memory_budget=memory_budget,
    )


def _floor_bound(matrix: Float[np.ndarray, "n n"], weighing: Weighing, rounding: float) -> float:
    """A number that the numerical floor cannot exceed.

    The Frobenius norm, read from the lower triangle, bounds λ_max.
    """
    lower = 0.0
    for columns in blocks(len(matrix), 32):
        part = np.tril(matrix[columns.start :, columns])
        # in float64: squares may outgrow float32
        lower += float(np.square(part, dtype=np.float64).sum())
    of_diagonal = float(np.square(matrix.diagonal(), dtype=np.float64).sum())
    frobenius = np.sqrt(2 * lower - of_diagonal)
    return numerical_floor(max(frobenius, weighing.removed), len(matrix), rounding)


@dataclass(frozen=True)
class Tridiagonal:
    """K = Q T Qᵀ on the span of the columns of Q, orthonormal and in Fortran order.

    Entries of T are in float64: ``diagonal``, and ``beside`` it. m = n, or n − 1 without the
    direction of the intercept.
    """

    basis: Float[np.ndarray, "n m"]
    diagonal: Float[np.ndarray, " m"]
    beside: Float[np.ndarray, " edges"]

    def largest(self) -> float:
        """The largest eigenvalue."""
        m = len(self.diagonal)
        if m < 2:
            return float(self.diagonal.max(initial=0.0))
        # bisection squares the entries: in units of the largest one they neither overflow nor
        # vanish
        scale = max(float(np.abs(self.diagonal).max()), float(np.abs(self.beside).max())) or 1.0
        last = m - 1
        top = eigvalsh_tridiagonal(
            self.diagonal / scale, self.beside / scale, select="i", select_range=(last, last)
        )
        return scale * float(top[0])

    def eigenpairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Eigenvalues (float64) and eigenvectors of T.

        In the precision of the basis, or in float64 if that fails.
        """
        m = len(self.diagonal)
        if m < 2:
            return self.diagonal.copy(), np.ones((m, m))
        for dtype in dict.fromkeys((self.basis.dtype, np.dtype(np.float64))):
            values, vectors, info = _stevd(self.diagonal.astype(dtype), self.beside.astype(dtype))
            finite = np.isfinite(values).all() and np.isfinite(vectors).all()
            if info == 0 and finite:
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

    # T, and the reflectors that lead to it
    lwork = int(sytrd_lwork(n, lower=1)[0])
    matrix, diagonal, beside, tau, _ = sytrd(matrix, lower=1, lwork=lwork, overwrite_a=1)
    if not (np.isfinite(diagonal).all() and np.isfinite(beside).all()):
        return None
    diagonal = diagonal.astype(np.float64)
    beside = beside.astype(np.float64)

    # Q: sytrd stores its reflectors as a Hessenberg reduction does, for which LAPACK forms Q at the
    # speed of matrix products
    if n == 1:
        basis = np.ones_like(matrix)
    else:
        lwork = int(orghr_lwork(n, lo=0, hi=n - 1)[0])
        basis, _ = orghr(matrix, tau, lo=0, hi=n - 1, lwork=lwork, overwrite_a=1)
    if normal is None:
        return Tridiagonal(basis=basis, diagonal=diagonal, beside=beside)

    # row and column 0 were empty, so that T starts with a lone 0 and Q with the first axis: leave
    # both out, and reflect the other columns of Q back
    basis = basis[:, 1:]
    if n > 1:
        (ger,) = get_blas_funcs(("ger",), (basis,))
        u = normal.astype(basis.dtype)
        ger(-2.0, u, basis.T @ u, a=basis, overwrite_a=1)
    return Tridiagonal(basis=basis, diagonal=diagonal[1:], beside=beside[1:])


@dataclass(frozen=True)
class Sweep:
    """(K + alpha)⁻¹ for penalties above the numerical floor, by Gaussian elimination in T + alpha.

    Everything is held in units of ``scale``, so that float32 neither overflows nor underflows.

    `GramSpectrum` says the same of these penalties, but needs three n × n matrices where this one
    needs the matrix alone: it stays as the only way within that memory. A path from
    ``scipy.linalg.eigh(driver="evd")`` took 1.1, 1.2 and 1.3 times its processor time at n = 500,
    1,000 and 2,500, one thread, 30 penalties.
    """

    form: Tridiagonal
    outputs: Float[np.ndarray, "m t"]
    scale: float

    @classmethod
    def of(cls, form: Tridiagonal, y: Float[np.ndarray, "n t"]) -> Sweep:
        """Prepare for the scaled outputs ``y``."""
        outputs = (form.basis.T @ y.astype(form.basis.dtype)).astype(np.float64)
        scale = max(np.abs(form.diagonal).max(initial=0.0), np.abs(form.beside).max(initial=0.0))
        return cls(form=form, outputs=outputs, scale=float(scale) or 1.0)

    def factors(self, alphas: Float[np.ndarray, " a"]) -> tuple[np.ndarray, np.ndarray] | None:
        """Pivots D (a, m) and multipliers l (a, edges) of T + alpha = L D Lᵀ.

        L has ones on its diagonal and the multipliers below them. None if a pivot is not positive:
        then K has an eigenvalue below −alpha.
        """
        (pttrf,) = get_lapack_funcs(("pttrf",), (self.form.diagonal,))
        m = len(self.form.diagonal)
        diagonal = self.form.diagonal / self.scale
        # LAPACK takes no empty vector: a matrix of one row has an edge of zero
        beside = np.zeros(max(m - 1, 1))
        beside[: len(self.form.beside)] = self.form.beside / self.scale

        pivots = np.empty((len(alphas), m))
        multipliers = np.empty((len(alphas), len(beside)))
        for i, alpha in enumerate(alphas):
            pivots[i], multipliers[i], info = pttrf(diagonal + alpha / self.scale, beside)
            if info != 0 or not (pivots[i] > 0).all():
                return None
        return pivots, multipliers

    def _positive_factors(self, alphas: Float[np.ndarray, " a"]) -> tuple[np.ndarray, np.ndarray]:
        """The same for penalties at which `complements` has seen that all pivots are positive."""
        factors = self.factors(alphas)
        if factors is None:
            raise np.linalg.LinAlgError(
                "T + alpha must be positive definite: ask `complements` first."
            )
        return factors

    def complements(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n"] | None:
        """1 − h = alpha diag (K + alpha)⁻¹, each a sum of squares.

        None where T + alpha is not positive.

        Column by column, u_k = q_k − l_k u_{k−1} is the forward substitution of Qᵀ for all
        penalties at once, and the diagonal is Σ_k u_k² / D_k. Cost: 5 n m a operations in cache.
        """
        factors = self.factors(alphas)
        if factors is None:
            return None
        pivots, multipliers = factors
        basis = self.form.basis
        n, m = basis.shape

        # of step k, one number for each penalty: (m, a, 1), the first step has no multiplier
        steps = np.zeros((m, len(alphas), 1), dtype=basis.dtype)
        steps[1:, :, 0] = multipliers[:, : max(m - 1, 0)].T
        shares = (alphas / self.scale / pivots.T).astype(basis.dtype)[:, :, None]
        result = np.empty((len(alphas), n))

        def sweep(rows: slice) -> None:
            # all operations in place: the arrays of a tile stay in cache for its m steps
            substituted = np.zeros((len(alphas), rows.stop - rows.start), dtype=basis.dtype)
            term = np.empty_like(substituted)
            total = np.zeros_like(substituted)
            for k in range(m):
                # u_k = q_k − l_k u_{k−1}
                np.multiply(substituted, steps[k], out=substituted)
                np.subtract(basis[rows, k], substituted, out=substituted)
                # total += alpha u_k² / D_k
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
        pivots, multipliers = self._positive_factors(alphas)
        root = self.form.basis.T.astype(np.float64)
        for k in range(1, len(root)):
            root[k] -= multipliers[0, k - 1] * root[k - 1]
        root /= np.sqrt(pivots[0] * self.scale)[:, None]
        return root

    def solve(
        self, alphas: Float[np.ndarray, " a"]
    ) -> tuple[Float[np.ndarray, "a n t"], Float[np.ndarray, "a n t"]]:
        """(K + alpha)⁻¹ y for each penalty, and the residuals, alpha times that.

        Cost: 2 n m a t operations.
        """
        pivots, multipliers = self._positive_factors(alphas)
        (pttrs,) = get_lapack_funcs(("pttrs",), (pivots,))

        # x = (T + alpha)⁻¹ Qᵀy, then Q x
        m, t = self.outputs.shape
        x = np.empty((m, len(alphas), t))
        for i in range(len(alphas)):
            x[:, i], _ = pttrs(pivots[i], multipliers[i], self.outputs)
        dual = _times_basis(self.form.basis, x / self.scale)
        return dual, alphas[:, None, None] * dual


def _times_basis(
    basis: Float[np.ndarray, "n m"], x: Float[np.ndarray, "m a t"]
) -> Float[np.ndarray, "a n t"]:
    """Q x for each penalty, all in one product, in the precision of the basis."""
    m, a, t = x.shape
    product = basis @ x.reshape(m, a * t).astype(basis.dtype)
    by_penalty = product.reshape(len(basis), a, t).transpose(1, 0, 2)
    return np.ascontiguousarray(by_penalty, dtype=np.float64)


@dataclass(frozen=True)
class GramSpectrum:
    """K = V Λ Vᵀ, for paths that reach below the floor.

    To a penalty below the floor, eigenvalues below it are zeros. To a penalty above it they are
    what they are, so that what is said of one penalty does not depend on the others. Negative ones
    are zeros always. ``outputs`` are Vᵀy, ``noise`` is the rounding error of an eigenvalue: one
    unit of rounding times the largest.
    """

    vectors: Float[np.ndarray, "n m"]
    values: Float[np.ndarray, " m"]
    outputs: Float[np.ndarray, "m t"]
    floor: float
    noise: float

    @classmethod
    def of(
        cls, form: Tridiagonal, y: Float[np.ndarray, "n t"], floor: float, noise: float
    ) -> GramSpectrum:
        """Decompose T and rotate Q. Cost: up to 14n³/3 operations and two more n × n matrices."""
        values, rotation = form.eigenpairs()
        vectors = form.basis @ rotation.astype(form.basis.dtype, copy=False)
        outputs = (vectors.T @ y.astype(vectors.dtype)).astype(np.float64)
        return cls(vectors=vectors, values=values, outputs=outputs, floor=floor, noise=noise)

    @property
    def has_full_rank(self) -> bool:
        """Whether no eigenvalue counts as zero."""
        return bool((self.values > self.floor).all())

    def inverse(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "m a"]:
        """1 / (λ + alpha), and 0 for an eigenvalue that counts as zero.

        A penalty below the floor has to take such an eigenvalue for zero.
        """
        values = np.maximum(self.values, 0.0)[:, None]
        above_floor = (alphas >= self.floor) & (alphas > 0)
        counts = (values > self.floor) | above_floor
        return np.asarray(np.divide(1.0, values + alphas, out=np.zeros(counts.shape), where=counts))

    def shrinkage(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "m a"]:
        """The share of each eigenvector that remains in a residual: alpha / (λ + alpha).

        1 for λ = 0, also at alpha = 0. If no eigenvalue counts as zero, residuals vanish with a
        penalty below the floor, and so do the complements of the leverages. Leave-one-out is their
        ratio, which has a limit: both are then given as multiples of the largest share.
        """
        inverse = self.inverse(alphas)
        shares = np.where(inverse > 0, alphas * inverse, 1.0)
        if self.has_full_rank and len(self.values):
            relative = inverse / inverse.max(axis=0)
            shares = np.where(alphas < self.floor, relative, shares)
        return np.asarray(shares)

    def complements(
        self, alphas: Float[np.ndarray, " a"], memory_budget: int
    ) -> Float[np.ndarray, "a n"]:
        """1 − h = Σ_j V_ij² alpha/(λ_j + alpha), or in proportion to it as ``shrinkage`` is.

        0 where rounding hides `HIDDEN_SHARE` of the residual or more.
        """
        # the shares of all penalties and the tilt are summed by one product
        columns = np.column_stack([self.shrinkage(alphas), self.tilt()])
        n, m = self.vectors.shape
        result = np.empty((len(alphas), n))
        for rows in blocks(n, block_size(m * 24, memory_budget)):
            squares = np.square(self.vectors[rows], dtype=np.float64)
            sums = squares @ columns
            complements = sums[:, :-1]
            leak = sums[:, -1:]

            # below the floor rounding may hide what a sample keeps, or the floor be that of a
            # sample itself
            too_noisy = self.hidden(alphas, complements, leak) > HIDDEN_SHARE * complements
            unknown = too_noisy | self.sets_the_floor(squares)[:, None]
            result[:, rows] = np.where(unknown & (alphas < self.floor), 0.0, complements).T
        return result

    def hidden(
        self, alphas: Float[np.ndarray, " a"], complements: np.ndarray, leak: np.ndarray
    ) -> np.ndarray:
        """What rounding may have added to the complements 1 − h, or taken from them.

        ``leak`` is the part of a sample that rounding puts into the null space, `tilt`. It moves
        1 − h by 2 √(leak (1 − h)) + leak, and the residual by √leak |r|, r the residuals of all
        samples. The latter is compared with (1 − h) |y| / √n, the residual of a sample that is
        predicted as badly as most.
        """
        # |r| / |y| of every penalty, the largest over the outputs
        output_norms = np.linalg.norm(self.outputs, axis=0)
        residuals = self.shrinkage(alphas)[:, :, None] * self.outputs[:, None, :]
        norms = np.linalg.norm(residuals, axis=0)
        shares = np.divide(norms, output_norms, out=np.zeros_like(norms), where=output_norms > 0)

        of_complements = 2 * np.sqrt(leak * complements) + leak
        of_residuals = np.sqrt(len(self.vectors) * leak) * shares.max(axis=1)
        return np.asarray(np.maximum(of_complements, of_residuals))

    def tilt(self) -> Float[np.ndarray, " m"]:
        """How far rounding tilts each eigenvector into the null space, squared.

        About noise/λ_j each, which leaks Σ_j V_ij² (noise/λ_j)² of sample i into it. Zero if the
        null space is empty.
        """
        tilt = np.zeros(len(self.values))
        if not self.has_full_rank:
            nonzero = self.values > self.floor
            tilt[nonzero] = np.square(self.noise / self.values[nonzero])
        return tilt

    def sets_the_floor(self, squares: Float[np.ndarray, "k m"]) -> Bool[np.ndarray, " k"]:
        """Whether the floor is that of one sample, or group.

        Without it, eigenvalues taken for zero would count. ``squares`` are its squared coordinates
        along the eigenvectors, a row for each. Without the sample the largest eigenvalue is at
        least λ_j (1 − squares_j), for every j.
        """
        if self.has_full_rank:
            return np.zeros(len(squares), dtype=bool)
        values = np.maximum(self.values, 0.0)
        largest_without = (values * np.maximum(1.0 - squares, 0.0)).max(axis=1)
        return np.asarray(largest_without < 0.1 * self.values.max())

    def root(self, alphas: Float[np.ndarray, " 1"]) -> Float[np.ndarray, "m n"]:
        """R with RᵀR = (K + alpha)⁻¹ on the span of the eigenvectors, at one penalty."""
        return np.asarray(np.sqrt(self.inverse(alphas)) * self.vectors.T)

    def residuals(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n t"]:
        """Outputs minus fit, for each penalty, or in proportion to it as ``shrinkage`` is."""
        return self._rotated_back(self.shrinkage(alphas))

    def solve(
        self, alphas: Float[np.ndarray, " a"]
    ) -> tuple[Float[np.ndarray, "a n t"], Float[np.ndarray, "a n t"]]:
        """(K + alpha)⁻¹ y and residuals.

        Eigenvalues taken for zero add nothing to the former, since they carry no function.
        """
        dual = self._rotated_back(self.inverse(alphas))
        return dual, self.residuals(alphas)

    def _rotated_back(self, factors: Float[np.ndarray, "m a"]) -> Float[np.ndarray, "a n t"]:
        """V diag(factors) Vᵀ y for each penalty."""
        return _times_basis(self.vectors, factors[:, :, None] * self.outputs[:, None, :])


def _stevd(diagonal: np.ndarray, beside: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """LAPACK's divide and conquer for a tridiagonal matrix."""
    (stevd,) = get_lapack_funcs(("stevd",), (diagonal,))
    values, vectors, info = stevd(diagonal, beside)
    return values, vectors, int(info)


@dataclass(frozen=True)
class GroupRoute:
    """A path of penalties judged on groups that are left out whole.

    Residuals are (I − H)_gg⁻¹ r_g, from the spectrum. ``members`` are the rows of the groups, in
    stacks of groups of one size (`group_stacks`).
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
        return GramSmoother(weighing=self.weighing, alpha=float(self.alphas[i]), root=root)

    def solve(self, i: int) -> Solution:
        """Coefficients, intercept, residuals of the fits without each group."""
        duals, _ = self.spectrum.solve(self.alphas[i : i + 1])
        coef, intercept = self.weighing.unscale(duals[0])
        return coef, intercept, self._left_out(i)

    def without(
        self, i: int, rows: Int[np.ndarray, " k"], left_out: Float[np.ndarray, "n t"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients and intercept of the fit without the samples ``rows`` of one group.

        ``left_out`` are the residuals of all samples, as `solve` gives them. Leaving a group out is
        fitting the predictions that are made without it instead of its outputs: the outputs
        fall by these residuals, and the fit is linear in them.
        """
        problem = self.weighing.problem
        spectrum = self.spectrum
        alpha = self.alphas[i : i + 1]
        change = problem.roots[rows, None] * left_out[rows]

        # the dual coefficients of all samples less those of the change, V (Λ + α)⁻¹ Vᵀ change
        duals, _ = spectrum.solve(alpha)
        along = spectrum.inverse(alpha) * (spectrum.vectors[rows].T @ change)
        coef, intercept = self.weighing.unscale(duals[0] - spectrum.vectors @ along)

        # the mean of the outputs falls as well
        if problem.fit_intercept:
            intercept = intercept - problem.roots[rows] @ change / problem.weights.sum()
        return coef, intercept

    def _left_out(self, i: int) -> Float[np.ndarray, "n t"]:
        """(I − H)_gg⁻¹ r_g of every group; infinite where rounding hides too much of it.

        For a group of one sample this is `GramSpectrum.complements`. For more, the leak into the
        null space is compared with every eigenvalue of (I − H)_gg.
        """
        spectrum = self.spectrum
        alpha = self.alphas[i : i + 1]
        below_floor = alpha[0] < spectrum.floor
        shares = spectrum.shrinkage(alpha)[:, 0]
        tilt = spectrum.tilt()
        residuals = spectrum.residuals(alpha)[0]
        for rows in self.members:
            # eigenvalues and eigenvectors of (I − H)_gg, for all groups of one size at once
            part = spectrum.vectors[rows]
            complements, directions = np.linalg.eigh((part * shares) @ part.transpose(0, 2, 1))
            into_directions = directions.transpose(0, 2, 1)

            # what rounding may have changed: of eigh itself, and of the null space below the floor
            hidden = rows.shape[1] * EPS * complements[:, -1:]
            sets_the_floor = np.zeros(len(rows), dtype=bool)
            if below_floor:
                leak = np.square(into_directions @ part) @ tilt
                hidden = hidden + spectrum.hidden(alpha, np.maximum(complements, 0.0), leak)
                sets_the_floor = spectrum.sets_the_floor(np.square(part).sum(axis=1))
            visible = (hidden <= HIDDEN_SHARE * complements).all(axis=1)
            judged = visible & ~sets_the_floor

            # (I − H)_gg⁻¹ r_g along the eigenvectors
            residuals[rows[~judged]] = np.inf
            along = into_directions[judged] @ residuals[rows[judged]]
            solved = along / complements[judged][:, :, None]
            residuals[rows[judged]] = directions[judged] @ solved
        return residuals / self.weighing.problem.roots[:, None]


def _leave_groups_out(
    gram: Float[np.ndarray, "n n"], problem: RidgeProblem, rounding: float, *, keep_factor: bool
) -> RidgeFit:
    """Choose the penalty on whole groups.

    A member of weight 0 is predicted by the fit without its group.
    """
    assert problem.groups is not None

    # the problem of the samples of positive weight
    positive = np.flatnonzero(problem.weights)
    groups = problem.groups[positive]
    all_positive = len(positive) == len(problem.groups)
    if all_positive:
        fitted_problem = problem
    else:
        fitted_problem = RidgeProblem.of(
            problem.y[positive],
            problem.alphas,
            fit_intercept=problem.fit_intercept,
            weights=problem.weights[positive],
            groups=groups,
            criterion=problem.criterion,
            draft=problem.draft,
        )

    # its spectrum, in float64
    fitted_gram = gram[np.ix_(positive, positive)].astype(np.float64)
    matrix, weighing = weigh_gram(fitted_gram, fitted_problem, overwrite=True)
    form = tridiagonalise(matrix, weighing.normal)
    assert form is not None  # finite and below 1e150, as `weigh_gram` has seen, and in float64
    largest = form.largest()
    scale = max(largest, weighing.removed)
    floor = numerical_floor(scale, len(positive), rounding)
    spectrum = GramSpectrum.of(form, fitted_problem.scaled, floor, rounding * scale)

    # the penalty that predicts whole groups best
    least_alpha = max(floor, LEAST_GROUP_ALPHA * scale)
    route = GroupRoute(
        alphas=fitted_problem.grid(largest, least_alpha, most=N_GROUP_ALPHAS),
        floor=floor,
        rounding=rounding,
        weighing=weighing,
        spectrum=spectrum,
        members=list(group_stacks(groups)),
    )
    fit = fitted_problem.fit(route, keep_factor=keep_factor)
    if all_positive:
        return fit

    # samples of weight 0 have no coefficient, and the residual of the fit without their group
    assert fit.left_out is not None
    coef = np.zeros(problem.y.shape)
    coef[positive] = fit.coef
    left_out = np.empty(problem.y.shape)
    left_out[positive] = fit.left_out
    for i in np.flatnonzero(problem.weights == 0):
        same_group = np.flatnonzero(groups == problem.groups[i])
        coef_without, intercept = route.without(fit.best, same_group, fit.left_out)
        left_out[i] = problem.y[i] - gram[i, positive] @ coef_without - intercept
    return replace(fit, coef=coef, left_out=left_out)


def group_stacks(
    groups: Int[np.ndarray, " n"], most: int = 2**22
) -> Iterator[Int[np.ndarray, "g k"]]:
    """The members of groups of one size, a row per group.

    So many groups at a time that n numbers for each of their members are at most ``most``.
    """
    # rows in the order of their groups, and where in that order each group starts
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    sizes = np.diff(starts, append=len(groups))
    for size in np.unique(sizes).tolist():
        first_positions = starts[sizes == size]
        members = order[first_positions[:, None] + np.arange(size)]
        for stack in blocks(len(members), max(1, most // (len(groups) * size))):
            yield members[stack]


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
    >>> here = loo_gradient(x @ x.T, x**2, alpha=0.1)
    >>> nearby = loo_gradient(1.001 * x @ x.T, x**2, alpha=0.1)
    >>> predicted_change = 0.001 * np.sum(here.gram * (x @ x.T))
    >>> bool(np.isclose(nearby.error - here.error, predicted_change, rtol=1e-2))
    True
    """
    w = RidgeProblem.of(y, [alpha], weights=weights).weights
    share = w / (w.sum() * y.shape[1])
    inverse = centred_inverse(gram, alpha / w, fit_intercept=fit_intercept)  # B
    dual = inverse @ y  # β
    residuals = left_out_residuals(inverse, dual, groups)  # e
    error = float((share @ np.square(residuals)).sum())

    # products of n × n matrices in the precision of the Gram matrix: float32 steers as well
    narrow = inverse.astype(gram.dtype, copy=False)

    # z, and the first term of the gradient: B diag(p) B, or B times symmetric blocks times B
    if groups is None:
        diagonal = inverse.diagonal().copy()
        z = 2.0 * (share / diagonal)[:, None] * residuals
        p = np.einsum("nt,nt->n", z, residuals)
        gradient = (narrow * p.astype(narrow.dtype)) @ narrow
    else:
        z = np.empty_like(dual)
        blocks_times_inverse = np.empty_like(narrow)
        for rows in group_stacks(groups):
            block = inverse[rows[:, :, None], rows[:, None, :]]
            z[rows] = 2.0 * np.linalg.solve(block, share[rows][:, :, None] * residuals[rows])
            outer = z[rows] @ residuals[rows].transpose(0, 2, 1)
            symmetric = 0.5 * (outer + outer.transpose(0, 2, 1))
            blocks_times_inverse[rows] = symmetric @ inverse[rows]
        gradient = narrow @ blocks_times_inverse

    # the second term, (B z βᵀ + β zᵀ B)/2
    half_image = 0.5 * (inverse @ z)
    cross = half_image.astype(narrow.dtype) @ dual.T.astype(narrow.dtype)
    gradient -= cross
    gradient -= cross.T
    return LooGradient(
        error=error,
        gram=gradient,
        log_alpha=float(alpha * (gradient.diagonal() / w).sum()),
        residuals=residuals,
    )


def left_out_residuals(
    inverse: Float[np.ndarray, "n n"],
    dual: Float[np.ndarray, "n t"],
    groups: Int[np.ndarray, " n"] | None,
) -> Float[np.ndarray, "n t"]:
    """Residuals of the fits without each sample, or group, from `centred_inverse` B and By.

    They are B_gg⁻¹ (By)_g.
    """
    if groups is None:
        return dual / inverse.diagonal()[:, None]
    residuals = np.empty_like(dual)
    for rows in group_stacks(groups):
        block = inverse[rows[:, :, None], rows[:, None, :]]
        residuals[rows] = np.linalg.solve(block, dual[rows])
    return residuals


def centred_inverse(
    gram: Float[np.ndarray, "n n"], ridge: Float[np.ndarray, " n"], *, fit_intercept: bool
) -> Float[np.ndarray, "n n"]:
    """B, that is A = (K + diag(ridge))⁻¹ less its part along the intercept, A11ᵀA/(1ᵀA1).

    By Cholesky, in float64. Ridge has coefficients By.
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
