"""Ridge at every penalty from one eigendecomposition, of features or of a Gram matrix.

With s = √w, w̄ = Σw and centred rows, S Φ̄ = U √L Vᵀ. A sample has the coordinates T = (φ − φ̄)V, in
which the fit is f(x) = ȳ + T(x)·θ with θ = z/(L + α) and z = Tᵀ W (y − ȳ). From a Gram matrix the
same coordinates are T = (k − k̄) S U/√L, k being a row of it and k̄ their weighted mean. So features
and Gram matrices differ in two arrays only: what is compared is centred, and multiplied by a basis,

    T(x) = (compared − centre) basis,        coef = basis θ,        b = ȳ − centre · coef.

The hat matrix of s·y is H = S T diag(1/(L + α)) Tᵀ S + s sᵀ/w̄.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import blocks
from keyhole.solve.matrices import (
    as_float64,
    as_like,
    column_of,
    eigen,
    identity,
    on_host,
    solve_stack,
)
from keyhole.solve.problem import (
    EPS,
    LEAST_ALPHA,
    RidgeFit,
    RidgeProblem,
    SmallPenaltyWarning,
    check_gram_size,
    choose_penalty,
)

EXACT = 8.0
"""A sample is fitted exactly where 1 − h is below so many units of ε·√n."""

ROUNDING = 4.0
"""Eigenvalues below so many units of ε·λ_max times the order of the problem are taken for zeros."""

STACK_NUMBERS = 2**23
"""Numbers, 8 bytes each, in a stack of groups that are left out together."""


@dataclass
class Spectrum:
    """Samples along their principal axes; `of_features` and `of_gram` make one.

    Arrays are NumPy's, or torch's where the features or the Gram matrix are tensors.

    Attributes
    ----------
    problem : RidgeProblem
    values : array (r,)
        L, the eigenvalues above rounding, largest first.
    basis, centre : arrays (q, r) and (q,)
        What makes coordinates of features (q = p), or of rows of the kernel (q = n).
    scores : array (r, t)
        z.
    scaled : array (n, r)
        S T of the samples.
    left_singular : array (n, r) or None
        U, known to full precision from a Gram matrix only.
    mean_square : float or None
        What centring a Gram matrix has removed: its weighted mean, 0 without an intercept; None
        for features.
    """

    problem: RidgeProblem
    values: Any
    basis: Any
    centre: Any
    scores: Any
    scaled: Any
    left_singular: Any = None
    mean_square: float | None = None

    @classmethod
    def of_features(
        cls, row_blocks: Callable[[], Iterable[Any]], problem: RidgeProblem
    ) -> Spectrum:
        """From p × p sums over blocks of rows, which are read twice. 2np² + 9p³ operations."""
        from keyhole.solve.sums import Sums

        sums = Sums.of_blocks(row_blocks(), problem)
        values, basis = sums.eigenpairs()
        centre = sums.means
        scores = basis.T @ sums.cross
        scaled = []
        start = 0
        for block in row_blocks():
            rows = slice(start, start + len(block))
            start += len(block)
            roots = as_like(np.sqrt(problem.weights[rows]), block)
            scaled.append(roots[:, None] * ((as_float64(block) - centre) @ basis))
        return cls(
            problem=problem,
            values=values,
            basis=basis,
            centre=centre,
            scores=scores,
            scaled=_joined(scaled),
        )

    @classmethod
    def of_gram(cls, gram: Any, problem: RidgeProblem) -> Spectrum:
        """From a Gram matrix, both triangles, which is overwritten if it is float64. 9n³."""
        matrix, centre, mean_square = weighed_and_centred(gram, problem)
        return cls.of_centred(matrix, centre, mean_square, problem)

    @classmethod
    def of_centred(
        cls, matrix: Any, centre: Any, mean_square: float, problem: RidgeProblem
    ) -> Spectrum:
        """From what `weighed_and_centred` makes of a Gram matrix; it is overwritten."""
        values, vectors = eigen(matrix)
        # what centring has removed leaves rounding of its own size behind
        removed = mean_square * problem.total_weight
        values, vectors = _above_rounding(values, vectors, len(problem), removed)
        roots = as_like(np.sqrt(problem.weights), vectors)
        root_values = values**0.5
        targets = as_like(np.sqrt(problem.weights)[:, None] * problem.centred, vectors)
        return cls(
            problem=problem,
            values=values,
            basis=roots[:, None] * vectors / root_values,
            centre=centre,
            scores=root_values[:, None] * (vectors.T @ targets),
            scaled=vectors * root_values,
            left_singular=vectors,
            mean_square=mean_square,
        )

    @property
    def largest(self) -> float:
        """λ_max; 0 where nothing varies."""
        return float(self.values[0]) if len(self.values) else 0.0

    def grid(self) -> Float[np.ndarray, " a"]:
        """The penalties to try."""
        return self.problem.grid(self.largest, len(self.problem))

    def fit(self) -> RidgeFit:
        """Judge the penalties by the samples left out, choose one, and solve.

        One penalty alone is used whatever its error.
        """
        problem = self.problem
        alphas = self.grid()
        if len(problem) < 2:
            left_out = np.full((len(alphas), *problem.y.shape), np.nan)
        elif problem.groups is None:
            left_out = self.leave_one_out(alphas)
        else:
            left_out = self.leave_groups_out(alphas)
        scores = problem.scores(left_out)
        best = choose_penalty(alphas, scores.criterion)
        warn_of_small_penalty(float(alphas[best]), self.largest, len(problem))
        factor = self.factor(float(alphas[best]))
        coef, intercept = self.solution(float(alphas[best]))
        return RidgeFit(
            alphas=alphas,
            errors=scores.errors,
            scores=scores.criterion,
            best=best,
            coef=coef,
            intercept=intercept,
            left_out=left_out[best],
            selection="loo" if problem.groups is None else "groups",
            is_log_loss=scores.is_log_loss,
            factor=factor,
        )

    def solution(self, alpha: float) -> tuple[Float[np.ndarray, "q t"], Float[np.ndarray, " t"]]:
        """Coefficients and intercept at one penalty."""
        theta = self.scores / (self.values + alpha)[:, None]
        coef = self.basis @ theta
        intercept = self.problem.y_mean - on_host(self.centre @ coef)
        return on_host(coef), intercept

    def factor(self, alpha: float) -> CoordinateFactor:
        """The fit at one penalty as a linear map."""
        return CoordinateFactor(
            alpha=alpha,
            problem=self.problem,
            basis=self.basis,
            centre=self.centre,
            scaled=self.scaled,
            gains=1.0 / (self.values + alpha),
            mean_square=self.mean_square,
        )

    def leave_one_out(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n t"]:
        """y_i − f_{−i}(x_i) at every penalty: r_i / (1 − h_i), infinite where h_i is 1."""
        residuals, complements = self._residuals_and_complements(alphas)
        return without_each(residuals, complements)

    def _residuals_and_complements(
        self, alphas: Float[np.ndarray, " a"]
    ) -> tuple[Float[np.ndarray, "a n t"], Float[np.ndarray, "a n"]]:
        """r = y − f and 1 − h of every sample at every penalty."""
        problem = self.problem
        roots = np.sqrt(problem.weights)
        on_mean = problem.weights / problem.total_weight if problem.fit_intercept else 0.0
        penalties = as_like(alphas, self.values)
        inverse = 1.0 / (self.values[:, None] + penalties)  # (r, a)
        targets = as_like(roots[:, None] * problem.centred, self.values)

        # from a Gram matrix, what no axis explains and what the penalty leaves unexplained of the
        # rest: a sum of positive numbers, in which tiny residuals keep their digits
        if self.left_singular is not None:
            U = self.left_singular
            along = U.T @ targets
            shrunk = penalties * inverse
            rest = on_host(targets - U @ along)
            residuals = on_host(_times_each(U, shrunk, along)) + rest
            squares = U * U
            inside = on_host(squares.sum(1)) + on_mean
            outside = np.maximum(1.0 - inside, 0.0)
            outside[outside < EXACT * EPS * math.sqrt(len(problem))] = 0.0
            complements = outside + on_host(squares @ shrunk).T
            return residuals / roots[:, None], complements

        # from features, by difference
        fitted = on_host(_times_each(self.scaled, inverse, self.scores))
        residuals = on_host(targets) - fitted
        leverages = on_host((self.scaled * self.scaled) @ inverse).T + on_mean
        return residuals / roots[:, None], 1.0 - leverages

    def leave_groups_out(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a n t"]:
        """y_i − f_{−g}(x_i) at every penalty, g being the group of sample i.

        (I − H_gg) e_g = r_g in the scale of s·y. Groups of one size are solved as one stack; those
        of more samples than there are axes by Woodbury's formula, in the dimension of the axes.
        """
        problem = self.problem
        assert problem.groups is not None
        roots = np.sqrt(problem.weights)
        targets = as_like(roots[:, None] * problem.centred, self.values)
        directions = self.scaled
        if problem.fit_intercept:
            directions = column_of(self.scaled, as_like(roots, self.values))
        n_directions = directions.shape[1]

        # gains of the axes, and of the mean, at every penalty; and residuals of the fit
        gains = []
        residuals = []
        for alpha in alphas:
            gain = on_host(1.0 / (self.values + float(alpha)))
            fitted = self.scaled @ (self.scores / (self.values + float(alpha))[:, None])
            residuals.append(targets - fitted)
            if problem.fit_intercept:
                gain = np.append(gain, 1.0 / problem.total_weight)
            gains.append(as_like(gain, self.values))

        # only of a tiny penalty can I − H_gg be singular: such a group is fitted exactly
        exact = EXACT * EPS * math.sqrt(len(problem))
        may_be_exact = alphas / (alphas + self.largest) <= exact

        left_out = np.empty((len(alphas), *problem.y.shape))
        for rows in group_stacks(problem.groups, STACK_NUMBERS // max(1, n_directions)):
            size = rows.shape[1]
            part = directions[rows]  # (groups, size, r)
            transposed = part.swapaxes(1, 2)
            for i in range(len(alphas)):
                of_group = residuals[i][rows]
                if may_be_exact[i]:
                    hat = on_host((part * gains[i]) @ transposed)
                    errors = _left_out_safely(np.eye(size) - hat, on_host(of_group), exact)
                    left_out[i][rows] = errors / roots[rows][:, :, None]
                    continue
                if size <= n_directions:
                    hat = (part * gains[i]) @ transposed
                    solved = solve_stack(identity(size, hat) - hat, of_group)
                else:
                    inner = identity(n_directions, part) / gains[i] - transposed @ part
                    solved = of_group + part @ solve_stack(inner, transposed @ of_group)
                left_out[i][rows] = on_host(solved) / roots[rows][:, :, None]
        return left_out


@dataclass(frozen=True)
class CoordinateFactor:
    """A fit at one penalty in coordinates T of its samples: H = S T G Tᵀ S + s sᵀ/w̄.

    It is a `problem.Factor`. ``gains`` are the diagonal of G; ``is_whitened`` says that the
    coordinates are those of a Cholesky factor of the regularised matrix, where G is the identity.
    """

    alpha: float
    problem: RidgeProblem
    basis: Any = field(repr=False)
    centre: Any = field(repr=False)
    scaled: Any = field(repr=False)
    gains: Any = field(repr=False)
    mean_square: float | None = None
    is_whitened: bool = False

    def hat(self, compared: Any) -> Float[np.ndarray, "m n"]:
        """h_j(x) = s_j T(x) G (S T)_jᵀ + w_j/w̄."""
        problem = self.problem
        coordinates = (as_float64(compared) - self.centre) @ self.basis
        hat = on_host((coordinates * self.gains) @ self.scaled.T) * np.sqrt(problem.weights)
        if problem.fit_intercept:
            hat += problem.weights / problem.total_weight
        return hat

    def variance(self, compared: Any, squares: Float[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
        """v(x) = |φ − φ̄|² − Σ T² L/(L + α) + α/w̄, without loss of digits along the axes."""
        problem = self.problem
        centred = as_float64(compared) - self.centre
        coordinates = centred @ self.basis
        along = coordinates * coordinates
        variance = on_host(along @ (self.alpha * self.gains))
        if not self.is_whitened:
            # what no axis reaches keeps its prior variance
            if self.mean_square is None:
                norms = on_host((centred * centred).sum(1))
            else:
                shares = problem.weights / problem.total_weight
                means = on_host(compared) @ shares if problem.fit_intercept else 0.0
                norms = squares - 2.0 * means + self.mean_square
            variance += np.maximum(norms - on_host(along.sum(1)), 0.0)
        if problem.fit_intercept:
            variance += self.alpha / problem.total_weight
        return variance

    def complements(self) -> Float[np.ndarray, " n"]:
        """1 − H_ii."""
        leverages = on_host((self.scaled * self.scaled) @ self.gains)
        if self.problem.fit_intercept:
            leverages = leverages + self.problem.weights / self.problem.total_weight
        return np.asarray(1.0 - leverages)

    def complement(self, rows: Int[np.ndarray, " g"]) -> Float[np.ndarray, "g g"]:
        """(I − H)_gg."""
        part = self.scaled[rows]
        hat = on_host((part * self.gains) @ part.T)
        if self.problem.fit_intercept:
            roots = np.sqrt(self.problem.weights[rows])
            hat = hat + np.outer(roots, roots) / self.problem.total_weight
        return np.eye(len(rows)) - hat


def axes_of_scatter(scatter: Any, count: int, mean_square: float) -> tuple[Any, Any]:
    """Eigenpairs above rounding of Σ w (φ − φ̄)(φ − φ̄)ᵀ, p × p; ``mean_square`` is Σ w |φ̄|².

    A centred feature carries rounding in units of its mean, the scatter the square of that.
    """
    values, vectors = eigen(scatter)
    order = max(count, len(values))
    return _above_rounding(values, vectors, order, removed=ROUNDING * EPS * mean_square)


def weighed_and_centred(gram: Any, problem: RidgeProblem) -> tuple[Any, Any, float]:
    """S (K − 1 k̄ᵀ − k̄ 1ᵀ + m) S, k̄ and m: the rows' weighted mean, and the mean of that.

    In place where the matrix is float64. Without an intercept nothing is subtracted.
    """
    check_gram_size(on_host(gram.diagonal()))
    matrix = as_float64(gram)
    shares = as_like(problem.weights / problem.total_weight, matrix)
    centre = 0.0 * shares
    mean_square = 0.0
    if problem.fit_intercept:
        centre = matrix @ shares
        mean_square = float(shares @ centre)
        matrix -= centre[:, None]
        matrix -= centre[None, :]
        matrix += mean_square
    if (problem.weights != 1.0).any():
        roots = as_like(np.sqrt(problem.weights), matrix)
        matrix *= roots[:, None]
        matrix *= roots[None, :]
    return matrix, centre, mean_square


def without_each(
    residuals: Float[np.ndarray, "*a n t"], complements: Float[np.ndarray, "*a n"]
) -> Float[np.ndarray, "*a n t"]:
    """r_i / (1 − h_i), infinite where 1 − h_i is 0 within rounding."""
    is_judged = complements > EXACT * EPS * math.sqrt(complements.shape[-1])
    divisor = np.where(is_judged, complements, np.nan)[..., None]
    return np.where(is_judged[..., None], residuals / divisor, np.inf)


def _left_out_safely(
    complements: Float[np.ndarray, "g k k"], residuals: Float[np.ndarray, "g k t"], exact: float
) -> Float[np.ndarray, "g k t"]:
    """(I − H_gg)⁻¹ r_g, infinite for groups whose I − H_gg is singular within rounding."""
    is_judged = np.linalg.eigvalsh(complements)[:, 0] > exact
    errors = np.full(residuals.shape, np.inf)
    errors[is_judged] = np.linalg.solve(complements[is_judged], residuals[is_judged])
    return errors


def warn_of_small_penalty(alpha: float, largest: float, order: int) -> None:
    """Say so if a penalty is so small beside the matrix that rounding shows in predictions.

    Without a penalty, directions within rounding are left out instead.
    """
    # half of the least penalty of an automatic grid, which itself is nothing to warn of
    least = 0.5 * LEAST_ALPHA * EPS * order * largest
    if 0 < alpha < least:
        warnings.warn(
            f"alpha = {alpha:.3g} is below {least:.3g}, {0.5 * LEAST_ALPHA:.0f}·ε·n times the "
            "largest eigenvalue of the kernel of the samples: rounding shows in predictions. Use "
            "alpha='loo', a larger "
            "number, or scaling='standard' if tokens are far from zero.",
            SmallPenaltyWarning,
            stacklevel=3,
        )


def group_stacks(groups: Int[np.ndarray, " n"], most: int) -> Iterator[Int[np.ndarray, "g k"]]:
    """The members of groups of one size, a row per group; about ``most`` members at a time."""
    # rows in the order of their groups, and where in that order each group starts
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    sizes = np.diff(starts, append=len(groups))
    for size in np.unique(sizes).tolist():
        first_positions = starts[sizes == size]
        members = order[first_positions[:, None] + np.arange(size)]
        for stack in blocks(len(members), max(1, most // size)):
            yield members[stack]


def _above_rounding(values: Any, vectors: Any, order: int, removed: float = 0.0) -> tuple[Any, Any]:
    """Eigenpairs above 4·ε·n times the largest eigenvalue, or times ``removed`` if larger."""
    scale = max(float(values[0]), removed, 1e-300)
    n_kept = int((values > ROUNDING * EPS * order * scale).sum())
    return values[:n_kept], vectors[:, :n_kept]


def _times_each(left: Any, factors: Any, columns: Any) -> Any:
    """left @ (factors of one penalty · columns) for every penalty: (a, n, t)."""
    n_axes, n_alphas = factors.shape
    n_outputs = columns.shape[1]
    combined = (factors[:, :, None] * columns[:, None, :]).reshape(n_axes, n_alphas * n_outputs)
    products = (left @ combined).reshape(len(left), n_alphas, n_outputs)
    return products.swapaxes(0, 1)


def _joined(parts: list[Any]) -> Any:
    """Blocks of rows end to end."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(parts)
