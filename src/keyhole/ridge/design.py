"""Ridge from sums over samples, which add in any order and on any machine.

One p × p eigendecomposition.

Fits with fewer columns than samples, and streams of them, are both this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

import numpy as np
from jaxtyping import Float, Int
from scipy.linalg import eigh

from keyhole._array import unit_exponent
from keyhole._checks import check_count, check_finite, check_float_array
from keyhole.ridge.matrices import add_outer
from keyhole.ridge.problem import (
    EPS,
    LeftOut,
    RidgeFit,
    RidgeProblem,
    Solution,
    check_gram_size,
    choose,
    default_alphas,
    leave_one_out,
    numerical_floor,
    rounding_of_squares,
    steadiness,
)


@dataclass
class DesignMoments:
    """Second moments of features φ and outputs y about their means.

    A few small arrays, whatever n is.

    They are kept about the means, and two of them are merged by adding the scatter between their
    means (Chan, Golub and LeVeque 1979), so that a large common offset costs no digits. Merging is
    associative and commutative up to rounding.

    >>> x, y = np.arange(8.0).reshape(4, 2), np.arange(4.0)[:, None]
    >>> first, second = DesignMoments.empty(2, 1), DesignMoments.empty(2, 1)
    >>> first.add_rows(x[:3], y[:3])
    >>> second.add_rows(x[3:], y[3:])
    >>> (first + second).gram[1, 0], (second + first).count
    (np.float64(20.0), 4)
    """

    gram: Float[np.ndarray, "p p"] = field(
        repr=False
    )  # Σ w (φ − φ̄)(φ − φ̄)ᵀ, Fortran order, lower triangle
    cross: Float[np.ndarray, "p t"] = field(repr=False)  # Σ w (φ − φ̄)(y − ȳ)ᵀ
    squares: Float[np.ndarray, " t"] = field(repr=False)  # Σ w (y − ȳ)²
    means: Float[np.ndarray, " p"] = field(repr=False)
    y_mean: Float[np.ndarray, " t"]
    weight: float = 0.0  # Σ w
    count: int = 0
    y_size: float = 0.0  # largest |y|
    rounding: float = EPS  # unit of rounding of the products
    fit_intercept: bool = True

    @classmethod
    def empty(cls, n_columns: int, n_outputs: int, *, fit_intercept: bool = True) -> DesignMoments:
        """The moments of no samples: zero, the neutral element of addition."""
        p, t = check_count(n_columns, "n_columns"), check_count(n_outputs, "n_outputs")
        gram = np.zeros((p, p), order="F")
        return cls(
            gram,
            np.zeros((p, t)),
            np.zeros(t),
            np.zeros(p),
            np.zeros(t),
            fit_intercept=fit_intercept,
        )

    def add_rows(
        self,
        rows: Float[np.ndarray, "b p"],
        y: Float[np.ndarray, "b t"],
        weights: Float[np.ndarray, " b"] | None = None,
        *,
        overwrite_rows: bool = False,
    ) -> None:
        """Add samples: features, outputs and positive weights (ones if None). bp² operations.

        The rows are centred on their own mean before they are multiplied, in their own dtype, and
        added in float64. ``overwrite_rows`` lets their memory be used for it.
        """
        weight = float(len(rows)) if weights is None else float(weights.sum())
        self.rounding = max(self.rounding, float(np.finfo(rows.dtype).eps))
        self.y_size = max(self.y_size, float(np.abs(y).max()))
        scaled, mean = scaled_rows(rows, weights, self.fit_intercept, overwrite=overwrite_rows)
        left, y_mean = scaled_rows(y.astype(np.float64, copy=False), weights, self.fit_intercept)
        # between before within: the scatter is then added to a gram that has not yet grown by these
        # rows
        self._shift(mean, y_mean, weight)
        add_outer(self.gram, scaled.T)
        # in units of their own: float32 may not hold the outputs, and a power of two costs no digit
        units = unit_exponent(left, axis=0)
        self.cross += np.ldexp(
            (scaled.T @ np.ldexp(left, -units).astype(rows.dtype)).astype(np.float64), units
        )
        self.squares += np.einsum("it,it->t", left, left)
        self.count += len(rows)

    def _shift(
        self, means: Float[np.ndarray, " p"], y_mean: Float[np.ndarray, " t"], weight: float
    ) -> None:
        """Add the scatter between the means so far and those of new samples, and move the means."""
        total = self.weight + weight
        if self.fit_intercept and self.weight == 0:  # set, not added, so that nothing is rounded
            self.means[:], self.y_mean[:] = means, y_mean
        elif self.fit_intercept:
            apart, y_apart = means - self.means, y_mean - self.y_mean
            scale = self.weight * (weight / total)
            add_outer(self.gram, np.sqrt(scale) * apart[:, None])
            self.cross += np.outer(scale * apart, y_apart)
            self.squares += scale * np.square(y_apart)
            self.means += (weight / total) * apart
            self.y_mean += (weight / total) * y_apart
        self.weight = total

    def __iadd__(self, other: DesignMoments) -> DesignMoments:
        """Add the samples behind ``other``. O(p²)."""
        self._check_kin(other)
        if other.count == 0:
            return self
        self._shift(other.means, other.y_mean, other.weight)
        self.gram += other.gram
        self.cross += other.cross
        self.squares += other.squares
        self.count += other.count
        self.y_size = max(self.y_size, other.y_size)
        self.rounding = max(self.rounding, other.rounding)
        return self

    def __add__(self, other: DesignMoments) -> DesignMoments:
        """The moments of all samples behind both."""
        total = self.copy()
        total += other
        return total

    def rescale(self, columns: slice, factors: Float[np.ndarray, " c"]) -> None:
        """Multiply some columns, and count them from their mean if there is an intercept.

        In place, O(pc).
        """
        self.gram[columns] *= factors[:, None]
        self.gram[:, columns] *= factors
        self.cross[columns] *= factors[:, None]
        self.means[columns] = 0.0

    def copy(self) -> DesignMoments:
        """The same moments in memory of their own."""
        arrays = {
            name: getattr(self, name).copy(order="K")
            for name in ("gram", "cross", "squares", "means", "y_mean")
        }
        return replace(self, **arrays)

    def _check_kin(self, other: DesignMoments) -> None:
        if self.cross.shape != other.cross.shape or self.fit_intercept != other.fit_intercept:
            raise ValueError(
                "moments add only if they are of the same features and outputs, with or without an "
                f"intercept alike: got (p, t) = {self.cross.shape} and {other.cross.shape}, "
                f"fit_intercept {self.fit_intercept} and {other.fit_intercept}."
            )


def scaled_rows(
    block: Float[np.ndarray, "b p"],
    weights: Float[np.ndarray, " b"] | None,
    centre: bool,
    *,
    overwrite: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """√w (φ − mean) of a block in its own dtype, and the mean in float64.

    The mean is zeros unless asked for.
    """
    roots = None if weights is None else np.sqrt(weights).astype(block.dtype)[:, None]
    if not centre:
        return block if roots is None else block * roots, np.zeros(block.shape[1])
    shares = np.full(len(block), 1.0 / len(block)) if weights is None else weights / weights.sum()
    shares = shares.astype(block.dtype)
    mean = shares @ block
    left = np.subtract(block, mean, out=block if overwrite else None)
    # in float32 the first mean is rounded: what it left behind completes it
    mean = mean.astype(np.float64) + (shares @ left).astype(np.float64)
    if roots is not None:
        left *= roots
    return left, mean


@dataclass
class PrincipalAxes:
    """The design along its principal axes.

    Eigenvalues below the floor are zeros to a penalty below it.

    ``values`` are the eigenvalues λ of the centred Gram matrix, ascending and not negative,
    ``axes`` its eigenvectors in columns, ``scores`` = axesᵀ Σ w (φ − φ̄)(y − ȳ)ᵀ; the rest as in
    `DesignMoments`.
    """

    values: Float[np.ndarray, " p"] = field(repr=False)
    axes: Float[np.ndarray, "p p"] = field(repr=False)
    scores: Float[np.ndarray, "p t"] = field(repr=False)
    means: Float[np.ndarray, " p"] = field(repr=False)
    y_mean: Float[np.ndarray, " t"]
    squares: Float[np.ndarray, " t"]
    weight: float
    count: int
    y_size: float
    rounding: float
    fit_intercept: bool
    floor: float
    _narrow: dict[str, np.ndarray] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, moments: DesignMoments, *, overwrite_gram: bool = False) -> PrincipalAxes:
        """Decompose.

        9p³ operations; three p × p matrices beside the moments, one less if they may be
        overwritten.
        """
        check_gram_size(moments.gram.diagonal())
        check_finite(moments.gram, "design")
        p = len(moments.means)
        options = {"overwrite_a": overwrite_gram, "check_finite": False}
        values, axes = eigh(moments.gram, lower=True, driver="evd", **options)
        largest = float(max(values[-1], 0.0))
        floor = numerical_floor(largest, max(moments.count, p), moments.rounding)
        names = (
            "means",
            "y_mean",
            "squares",
            "weight",
            "count",
            "y_size",
            "rounding",
            "fit_intercept",
        )
        known = {name: getattr(moments, name) for name in names}
        return cls(np.maximum(values, 0.0), axes, axes.T @ moments.cross, floor=floor, **known)

    @property
    def largest(self) -> float:
        """λ_max."""
        return float(self.values[-1])

    @property
    def resolution(self) -> float:
        """Mean squared errors below this are rounding."""
        return rounding_of_squares(self.y_size, self.rounding)

    def default_alphas(self) -> Float[np.ndarray, " a"]:
        """The penalties to try when nobody names any."""
        return default_alphas(self.largest, self.floor)

    def inverse(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "p a"]:
        """1 / (λ + alpha), and 0 for an eigenvalue that counts as zero.

        A penalty below the floor has to take such an eigenvalue for zero.
        """
        values = self.values[:, None]
        seen = (values > self.floor) | ((alphas >= self.floor) & (alphas > 0))
        return np.asarray(np.divide(1.0, values + alphas, out=np.zeros(seen.shape), where=seen))

    def coef(self, alpha: float) -> Float[np.ndarray, "p t"]:
        """The weights v at one penalty."""
        return np.asarray(self.axes @ (self.inverse(np.array([alpha])) * self.scores))

    def intercept(self, coef: Float[np.ndarray, "p t"]) -> Float[np.ndarray, " t"]:
        """b = ȳ − φ̄ᵀv."""
        return np.asarray(self.y_mean - self.means @ coef)

    def judge_rows(
        self,
        block: Float[np.ndarray, "b p"],
        left: Float[np.ndarray, "b t"],
        weights: Float[np.ndarray, " b"],
        alphas: Float[np.ndarray, " a"],
    ) -> tuple[Float[np.ndarray, "a b"], Float[np.ndarray, "a b t"]]:
        """Complements 1 − h of the leverages of some samples, and their leave-one-out residuals.

        2bp² operations.

        ``block`` are their features, ``left`` their outputs less ȳ: samples that are behind the
        moments.
        """
        scores = (block - self.means.astype(block.dtype)) @ self._axes_in(block.dtype)
        scores = scores.astype(np.float64, copy=False)
        coefs = self.inverse(alphas)[:, :, None] * self.scores[:, None, :]
        fitted = (scores @ coefs.reshape(len(coefs), -1)).reshape(
            len(left), len(alphas), left.shape[1]
        )
        complements = self._complements(np.square(scores) * weights[:, None], alphas, weights).T
        left_out = [leave_one_out(left - fitted[:, i], complements[i]) for i in range(len(alphas))]
        return complements, np.asarray(left_out)

    def error_sums(
        self,
        block: Float[np.ndarray, "b p"],
        left: Float[np.ndarray, "b t"],
        weights: Float[np.ndarray, " b"],
        alphas: Float[np.ndarray, " a"],
    ) -> Float[np.ndarray, "a t"]:
        """Σ w e² over some samples, e their leave-one-out residuals.

        These add up, block by block, in any order.
        """
        _, left_out = self.judge_rows(block, left, weights, alphas)
        return np.asarray([weights @ np.square(part) for part in left_out])

    def fit(
        self,
        alphas: Float[np.ndarray, " a"] | None,
        error_sums: Float[np.ndarray, "a t"] | None = None,
        log_losses: Float[np.ndarray, " a"] | None = None,
    ) -> RidgeFit:
        """The fit at the penalty of least log-loss, if they are given, or error.

        Errors are those of leave-one-out if their sums are given, else generalised.
        """
        alphas = self.default_alphas() if alphas is None else alphas
        if self.count < 1 or (self.count < 2 and len(alphas) > 1):
            raise ValueError(
                "a fit needs one sample of positive weight, and two to choose a penalty: got "
                f"{self.count}. Give more batches, or one fixed number as `alpha`."
            )
        if error_sums is None:
            selection, resolution = "gcv", self.generalised_resolution()
            errors = self.generalised_errors(alphas).mean(axis=1)
        else:
            selection, resolution = "loo", self.resolution
            errors = error_sums.mean(axis=1) / self.weight
        moved = self.rounding * self.amplification(alphas)
        steady = moved <= steadiness(self.rounding)
        if log_losses is None:
            best = choose(alphas, errors, resolution=resolution, steady=steady)
        else:
            best = choose(alphas, log_losses, steady=steady)
        coef = self.coef(float(alphas[best]))
        return RidgeFit(
            alphas=alphas,
            errors=errors,
            best=best,
            coef=coef,
            intercept=self.intercept(coef),
            left_out=None,
            route="design",
            selection=selection,
            floor=self.floor,
            log_losses=log_losses,
            moved=moved,
        )

    def amplification(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, " a"]:
        """How far one unit of rounding in every feature moves f(x), over the spread of the outputs.

        |φ(x)| |v| with |φ(x)|² as large as it is on average; of several outputs the largest share
        counts. Nothing cancels as in dual form: |v| is at most |y| / 2√α.
        """
        average = self.values.sum() / self.weight + float(self.means @ self.means)
        squares = np.square(self.inverse(alphas)).T @ np.square(self.scores)
        spread = np.sqrt(self.squares / self.weight)
        sizes = np.sqrt(average * squares)
        shares = np.divide(sizes, spread, out=np.zeros_like(sizes), where=spread > 0)
        return np.asarray(shares.max(axis=1))

    def generalised_errors(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a t"]:
        """Generalised cross-validation, exact from the moments alone.

        Σ w r² / Σ w over (1 − tr H / n)².

        Leave-one-out with every leverage replaced by their mean tr H / n (Golub, Heath and Wahba
        1979). The residual sum is a difference of numbers of the size of Σ w (y − ȳ)²; what
        rounding may have taken from it, ε (4 Σ w (y − ȳ)² + 3 λ_max |v|²), is added, so that a fit
        it cannot tell from perfect is not preferred for that.
        """
        inverse = self.inverse(alphas)
        energy = np.square(self.scores)
        explained = 2 * inverse - self.values[:, None] * np.square(inverse)
        residual = np.maximum(self.squares - explained.T @ energy, 0.0)
        residual += self.rounding * (
            4 * self.squares + 3 * self.largest * (np.square(inverse).T @ energy)
        )
        known = self.values > self.floor
        # n − tr H: directions that no axis explains, and what the penalty keeps of those that one
        # does
        freedom = self.count - float(self.fit_intercept) - known.sum()
        freedom = freedom + np.where(
            known[:, None], alphas * inverse, -self.values[:, None] * inverse
        ).sum(axis=0)
        shrink = freedom / self.count
        judged = np.repeat(
            (shrink > 4 * self.rounding * len(known))[:, None], len(self.squares), axis=1
        )
        errors = np.full(residual.shape, np.inf)
        np.divide(residual / self.weight, np.square(shrink)[:, None], out=errors, where=judged)
        return errors

    def generalised_resolution(self) -> float:
        """Generalised errors below this are rounding."""
        return float(max(self.resolution, 8 * self.rounding * self.squares.mean() / self.weight))

    def _complements(
        self,
        squares: Float[np.ndarray, "b p"],
        alphas: Float[np.ndarray, " a"],
        w: Float[np.ndarray, " b"],
    ) -> Float[np.ndarray, "b a"]:
        """1 − h: what no axis explains, plus what the penalty keeps unexplained.

        It is 0 if rounding hides it.

        ``squares`` are the squared scores of the samples on each axis, so squares/λ is the share of
        a sample that a fit without penalty explains by it.
        """
        mean_share = w / self.weight if self.fit_intercept else 0 * w
        inverse = self.inverse(alphas)
        # Only where a penalty is the smaller is 1 − λ/(λ + alpha) worth taking apart; and below the
        # floor λ is too small to divide by
        values = self.values[:, None]
        apart = (values > self.floor) & (values > alphas)
        shares = np.divide(1.0, values, out=np.zeros(apart.shape), where=apart)
        unexplained = np.maximum(1 - mean_share[:, None] - squares @ shares, 0.0)
        kept = unexplained + squares @ np.where(apart, shares * alphas * inverse, -inverse)
        noise = self.rounding * self.largest
        hidden = 4 * self.rounding + squares @ (
            2 * noise * np.square(np.where(apart, shares, inverse))
        )
        return np.where(hidden > 0.1 * kept, 0.0, kept)

    def _axes_in(self, dtype: np.dtype) -> np.ndarray:
        """The axes in the precision of a block, converted once."""
        if dtype == self.axes.dtype:
            return self.axes
        if dtype.name not in self._narrow:
            self._narrow[dtype.name] = self.axes.astype(dtype)
        return self._narrow[dtype.name]


RowBlocks: TypeAlias = Callable[[], Iterable[np.ndarray]]
"""Gives the row blocks (n_b, p) of the design, in order, every time it is called."""


def ridge_rows(
    row_blocks: RowBlocks, problem: RidgeProblem, *, keep_factor: bool = False
) -> RidgeFit:
    """Ridge on a design that is given in blocks of rows, with exact leave-one-out; meant for p < n.

    The same numbers as ``ridge_gram(design @ design.T, …)``, from one p × p eigendecomposition.
    ``row_blocks`` gives arrays (n_b, p), never modified, and the same every time: called once for
    the sums, once for the leave-one-out errors, once for the solution. Products are made in the
    dtype of the block, centred on its own mean, and summed in float64. 3np² + 9p³ operations, then
    2np(1 + t) for each penalty; temporaries are a few times the size of a block. ``keep_factor``
    lets the fit be solved for other penalties.

    >>> x = np.random.default_rng(0).standard_normal((50, 2))
    >>> fit = ridge_rows(
    ...     lambda: [x[:30], x[30:]], RidgeProblem.of(x @ [[3.0], [-1.0]] + 2, [1.0, 1e-6])
    ... )
    >>> fit.alpha, np.round(fit.coef.ravel(), 4), np.round(fit.intercept, 4)
    (1e-06, array([ 3., -1.]), array([2.]))
    """
    moments: DesignMoments | None = None
    for rows, block in _rows(row_blocks, len(problem.y)):
        if moments is None:
            sizes = block.shape[1], problem.y.shape[1]
            moments = DesignMoments.empty(*sizes, fit_intercept=problem.fit_intercept)
        weights = problem.weights[rows] if problem.weighted else None
        moments.add_rows(block, problem.centred[rows], weights)
    assert moments is not None  # there is an output, so there was a block
    moments.y_mean += problem.y_mean
    axes = PrincipalAxes.of(moments, overwrite_gram=True)
    return problem.fit(RowsRoute(axes, problem, row_blocks), keep_factor=keep_factor)


class RowsRoute:
    """A path of penalties from the principal axes of a design, and passes over its rows."""

    name: ClassVar[str] = "design"

    def __init__(self, axes: PrincipalAxes, problem: RidgeProblem, row_blocks: RowBlocks) -> None:
        self.alphas = problem.grid(axes.largest, axes.floor)
        self.floor, self.rounding = axes.floor, axes.rounding
        self.axes, self.problem, self.row_blocks = axes, problem, row_blocks
        self.complements = np.empty((len(self.alphas), len(problem.y)))

    def left_out(self) -> Iterator[LeftOut]:
        """Left-out residuals in one pass over the rows; the leverages are kept."""
        problem = self.problem
        amplification = self.axes.amplification(self.alphas)
        for rows, block in _rows(self.row_blocks, len(problem.y)):
            complements, residuals = self.axes.judge_rows(
                block, problem.centred[rows], problem.weights[rows], self.alphas
            )
            self.complements[:, rows] = complements
            yield LeftOut(
                penalties=slice(None), rows=rows, residuals=residuals, amplification=amplification
            )

    def solve(self, i: int) -> Solution:
        """Values, intercept, left-out residuals, in a pass over the rows."""
        coef, means = self.axes.coef(float(self.alphas[i])), self.axes.means
        blocks = _rows(self.row_blocks, len(self.problem.y))
        fitted = [(block - means.astype(block.dtype)) @ coef for _, block in blocks]
        residuals = self.problem.centred - np.concatenate(fitted)
        return coef, self.axes.intercept(coef), leave_one_out(residuals, self.complements[i])

    def smoother(self, i: int) -> DesignSmoother:
        """The fit as a linear map, in a pass over the rows: 2np² operations, and n × p numbers."""
        scores = np.concatenate(
            [
                (block - self.axes.means) @ self.axes.axes
                for _, block in _rows(self.row_blocks, len(self.problem.y))
            ]
        )
        scores *= np.sqrt(self.axes.inverse(self.alphas[i : i + 1])[:, 0])
        scores *= self.problem.weights[:, None]
        return DesignSmoother(
            self.axes, float(self.alphas[i]), self.problem.weights, self.complements[i], scores
        )


@dataclass(frozen=True)
class DesignSmoother:
    """A fit from a design as a linear map of its outputs, `Smoother`.

    With the scores z of samples on the axes, h_j(x) = w_j/Σw + w_j Σ_k z_k(x_j) z_k(x) /
    (λ_k + alpha), and v(x) = Σ_k alpha/(λ_k + alpha) z_k(x)² + alpha/Σw; without an intercept the
    terms in Σw are not there.
    """

    axes: PrincipalAxes
    alpha: float
    weights: Float[np.ndarray, " n"]
    complements: Float[np.ndarray, " n"]
    scores: Float[np.ndarray, "n p"]  # w z / √(λ + alpha) of the samples

    def apply(
        self, compared: Float[np.ndarray, "m p"], own: Float[np.ndarray, " m"]
    ) -> tuple[Float[np.ndarray, "m n"], Float[np.ndarray, " m"]]:
        """h(x) and v(x) from features; ``own`` is not looked at.

        2p² + 2np operations for a sample.
        """
        scores = (compared - self.axes.means) @ self.axes.axes
        inverse = self.axes.inverse(np.array([self.alpha]))[:, 0]
        variance = np.square(scores) @ np.where(inverse > 0, self.alpha * inverse, 1.0)
        hat = (scores * np.sqrt(inverse)) @ self.scores.T
        if self.axes.fit_intercept:
            hat += self.weights / self.axes.weight
            variance += self.alpha / self.axes.weight
        return hat, variance

    def precision(self, rows: Int[np.ndarray, " g"]) -> Float[np.ndarray, "g g"]:
        """Q_gg."""
        w, own = self.weights[rows], self.scores[rows]
        mean = np.outer(w, w) / self.axes.weight if self.axes.fit_intercept else 0.0
        return np.asarray((np.diag(w) - mean - own @ own.T) / self.alpha)

    def precisions(self) -> Float[np.ndarray, " n"]:
        """The diagonal of Q."""
        return self.weights * self.complements / self.alpha


def _rows(row_blocks: RowBlocks, n: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Blocks with the rows they hold; raises if they do not make up n rows of one width."""
    width, stop = None, 0
    for block in row_blocks():
        block = check_float_array(block, "row_blocks")
        width = block.shape[-1] if width is None else width
        rows = slice(stop, stop + len(block))
        if block.ndim != 2 or block.shape[1] != width or width == 0:
            raise ValueError(
                "every block of rows must have shape (n_b, p) with the same p ≥ 1: the block of "
                f"rows {rows.start} to {rows.stop} has shape {block.shape}, the first had p = "
                f"{width}."
            )
        stop = rows.stop
        if stop <= n:
            yield rows, block
    if stop != n:
        raise ValueError(
            f"the blocks of rows must hold one row per output: got {stop} rows for {n} outputs."
        )
