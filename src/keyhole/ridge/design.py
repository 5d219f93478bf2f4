"""Ridge from sums over samples, which add in any order and on any machine.

`DesignMoments` are the sums, `PrincipalAxes` their p × p eigendecomposition, which solves for every
penalty. Fits with fewer features than samples, and fits in batches, are both this.
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
from keyhole.solve.matrices import add_outer
from keyhole.ridge.problem import (
    EPS,
    LeftOut,
    RidgeFit,
    RidgeProblem,
    Solution,
    check_gram_size,
    choose_penalty,
    default_alphas,
    errors_in_own_units,
    leave_one_out,
    numerical_floor,
    rounding_of_squares,
    steadiness,
)


@dataclass
class DesignMoments:
    """Second moments of features φ and outputs y about their means.

    A few small arrays, whatever n is. They are kept about the means, and two of them are merged by
    adding the scatter between their means (Chan, Golub and LeVeque 1979), so that a large common
    offset costs no digits. Merging is associative and commutative up to rounding.

    Attributes
    ----------
    gram : array (p, p)
        Σ w (φ − φ̄)(φ − φ̄)ᵀ in Fortran order, of which the lower triangle is used.
    cross : array (p, t)
        Σ w (φ − φ̄)(y − ȳ)ᵀ.
    squares : array (t,)
        Σ w (y − ȳ)².
    means : array (p,)
        φ̄, zeros without an intercept.
    y_mean : array (t,)
        ȳ, zeros without an intercept.
    weight : float
        Σ w.
    count : int
        The number of samples.
    y_size : float
        The largest |y|.
    rounding : float
        Unit of rounding of the products.
    fit_intercept : bool
        Whether the moments are about the means, or about zero.

    Examples
    --------
    >>> x, y = np.arange(8.0).reshape(4, 2), np.arange(4.0)[:, None]
    >>> first, second = DesignMoments.empty(2, 1), DesignMoments.empty(2, 1)
    >>> first.add_rows(x[:3], y[:3])
    >>> second.add_rows(x[3:], y[3:])
    >>> (first + second).gram[1, 0], (second + first).count
    (np.float64(20.0), 4)
    """

    gram: Float[np.ndarray, "p p"] = field(repr=False)
    cross: Float[np.ndarray, "p t"] = field(repr=False)
    squares: Float[np.ndarray, " t"] = field(repr=False)
    means: Float[np.ndarray, " p"] = field(repr=False)
    y_mean: Float[np.ndarray, " t"]
    weight: float = 0.0
    count: int = 0
    y_size: float = 0.0
    rounding: float = EPS
    fit_intercept: bool = True

    @classmethod
    def empty(cls, n_columns: int, n_outputs: int, *, fit_intercept: bool = True) -> DesignMoments:
        """The moments of no samples: zero, the neutral element of addition."""
        p = check_count(n_columns, "n_columns")
        t = check_count(n_outputs, "n_outputs")
        return cls(
            gram=np.zeros((p, p), order="F"),
            cross=np.zeros((p, t)),
            squares=np.zeros(t),
            means=np.zeros(p),
            y_mean=np.zeros(t),
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

        # √w (φ − φ̄) and √w (y − ȳ) about the means of these rows
        features, mean = scaled_rows(rows, weights, self.fit_intercept, overwrite=overwrite_rows)
        wide_y = y.astype(np.float64, copy=False)
        outputs, y_mean = scaled_rows(wide_y, weights, self.fit_intercept)

        # between before within: the scatter between the means is then added to a gram that has not
        # yet grown by these rows
        self._shift(mean, y_mean, weight)
        add_outer(self.gram, features.T)

        # outputs in units of their own: float32 may not hold them, and a power of two costs no
        # digit
        exponents = unit_exponent(outputs, axis=0)
        unit_outputs = np.ldexp(outputs, -exponents).astype(rows.dtype)
        unit_cross = (features.T @ unit_outputs).astype(np.float64)
        self.cross += np.ldexp(unit_cross, exponents)
        self.squares += np.einsum("it,it->t", outputs, outputs)
        self.count += len(rows)

    def _shift(
        self, means: Float[np.ndarray, " p"], y_mean: Float[np.ndarray, " t"], weight: float
    ) -> None:
        """Add the scatter between the means so far and those of new samples, and move the means."""
        total = self.weight + weight
        if self.fit_intercept and self.weight == 0:
            # the first samples: means are set, not added, so that nothing is rounded
            self.means[:] = means
            self.y_mean[:] = y_mean
        elif self.fit_intercept:
            difference = means - self.means
            y_difference = y_mean - self.y_mean
            scale = self.weight * (weight / total)
            add_outer(self.gram, np.sqrt(scale) * difference[:, None])
            self.cross += np.outer(scale * difference, y_difference)
            self.squares += scale * np.square(y_difference)
            self.means += (weight / total) * difference
            self.y_mean += (weight / total) * y_difference
        self.weight = total

    def __iadd__(self, other: DesignMoments) -> DesignMoments:
        """Add the samples behind ``other``. O(p²)."""
        self._check_compatible(other)
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
        return replace(
            self,
            gram=self.gram.copy(order="K"),
            cross=self.cross.copy(order="K"),
            squares=self.squares.copy(),
            means=self.means.copy(),
            y_mean=self.y_mean.copy(),
        )

    def _check_compatible(self, other: DesignMoments) -> None:
        same_sizes = self.cross.shape == other.cross.shape
        if not same_sizes or self.fit_intercept != other.fit_intercept:
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
    """√w (φ − φ̄) of a block in its own dtype, and the mean φ̄ in float64.

    The mean is zero unless ``centre``.
    """
    roots: np.ndarray | None = None
    if weights is not None:
        roots = np.sqrt(weights).astype(block.dtype)[:, None]

    # about zero
    if not centre:
        scaled = block if roots is None else block * roots
        return scaled, np.zeros(block.shape[1])

    # about the mean
    if weights is None:
        shares = np.full(len(block), 1.0 / len(block))
    else:
        shares = weights / weights.sum()
    shares = shares.astype(block.dtype)
    mean = shares @ block
    centred = np.subtract(block, mean, out=block if overwrite else None)

    # in float32 that mean is rounded: the mean of what it left behind completes it
    mean = mean.astype(np.float64) + (shares @ centred).astype(np.float64)
    if roots is not None:
        centred *= roots
    return centred, mean


@dataclass
class PrincipalAxes:
    """The design along its principal axes.

    ``values`` are the eigenvalues λ of the centred Gram matrix, ascending and not negative,
    ``axes`` its eigenvectors in columns, ``scores`` = axesᵀ Σ w (φ − φ̄)(y − ȳ)ᵀ; the rest as in
    `DesignMoments`. Eigenvalues below the ``floor`` are zeros to a penalty below it.
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
        values, axes = eigh(
            moments.gram,
            lower=True,
            driver="evd",
            overwrite_a=overwrite_gram,
            check_finite=False,
        )
        largest = float(max(values[-1], 0.0))
        order = max(moments.count, len(moments.means))
        return cls(
            values=np.maximum(values, 0.0),
            axes=axes,
            scores=axes.T @ moments.cross,
            means=moments.means,
            y_mean=moments.y_mean,
            squares=moments.squares,
            weight=moments.weight,
            count=moments.count,
            y_size=moments.y_size,
            rounding=moments.rounding,
            fit_intercept=moments.fit_intercept,
            floor=numerical_floor(largest, order, moments.rounding),
        )

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
        above_floor = (alphas >= self.floor) & (alphas > 0)
        counts = (values > self.floor) | above_floor
        return np.asarray(np.divide(1.0, values + alphas, out=np.zeros(counts.shape), where=counts))

    def coef(self, alpha: float) -> Float[np.ndarray, "p t"]:
        """The weights v at one penalty."""
        return np.asarray(self.axes @ (self.inverse(np.array([alpha])) * self.scores))

    def intercept(self, coef: Float[np.ndarray, "p t"]) -> Float[np.ndarray, " t"]:
        """b = ȳ − φ̄ᵀv."""
        return np.asarray(self.y_mean - self.means @ coef)

    def judge_rows(
        self,
        block: Float[np.ndarray, "b p"],
        centred: Float[np.ndarray, "b t"],
        weights: Float[np.ndarray, " b"],
        alphas: Float[np.ndarray, " a"],
    ) -> tuple[Float[np.ndarray, "a b"], Float[np.ndarray, "a b t"]]:
        """Complements 1 − h of the leverages of some samples, and their leave-one-out residuals.

        ``block`` are the features of samples that are behind the moments, ``centred`` their outputs
        less ȳ. 2bp² operations.
        """
        # the samples along the axes, in the precision of the block
        scores = (block - self.means.astype(block.dtype)) @ self._axes_in(block.dtype)
        scores = scores.astype(np.float64, copy=False)

        # fitted values of all penalties in one product
        coefs = self.inverse(alphas)[:, :, None] * self.scores[:, None, :]
        products = scores @ coefs.reshape(len(coefs), -1)
        fitted = products.reshape(len(centred), len(alphas), centred.shape[1])

        # residuals without each sample, r / (1 − h)
        squares = np.square(scores) * weights[:, None]
        complements = self._complements(squares, alphas, weights).T
        left_out = [
            leave_one_out(centred - fitted[:, i], complements[i]) for i in range(len(alphas))
        ]
        return complements, np.asarray(left_out)

    def error_sums(
        self,
        block: Float[np.ndarray, "b p"],
        centred: Float[np.ndarray, "b t"],
        weights: Float[np.ndarray, " b"],
        alphas: Float[np.ndarray, " a"],
    ) -> Float[np.ndarray, "a t"]:
        """Σ w e² over some samples, e their leave-one-out residuals.

        These add up, block by block, in any order.
        """
        _, left_out = self.judge_rows(block, centred, weights, alphas)
        return np.asarray([weights @ np.square(residuals) for residuals in left_out])

    def fit(
        self,
        alphas: Float[np.ndarray, " a"] | None,
        error_sums: Float[np.ndarray, "a t"] | None = None,
        log_losses: Float[np.ndarray, " a"] | None = None,
    ) -> RidgeFit:
        """The fit at the penalty of least log-loss, if they are given, or error.

        Errors are those of leave-one-out if their sums are given, else generalised.
        """
        if alphas is None:
            alphas = self.default_alphas()
        too_few_to_choose = self.count < 2 and len(alphas) > 1
        if self.count < 1 or too_few_to_choose:
            raise ValueError(
                "a fit needs one sample of positive weight, and two to choose a penalty: got "
                f"{self.count}. Give more batches, or one fixed number as `alpha`."
            )

        # the error of every penalty
        if error_sums is None:
            selection = "gcv"
            resolution = self.generalised_resolution()
            output_errors = self.generalised_errors(alphas)
        else:
            selection = "loo"
            resolution = self.resolution
            output_errors = error_sums / self.weight
        errors = output_errors.mean(axis=1)
        spread = np.sqrt(self.squares / self.weight)
        relative_errors = errors_in_own_units(output_errors, spread)

        # the penalty of least loss, among those at which rounding does not show
        moved = self.rounding * self.amplification(alphas)
        steady = moved <= steadiness(self.rounding)
        if log_losses is None and relative_errors is not None:
            largest_variance = float(np.square(spread).max())
            relative_resolution = resolution / largest_variance
            best = choose_penalty(
                alphas, relative_errors, resolution=relative_resolution, steady=steady
            )
        elif log_losses is None:
            best = choose_penalty(alphas, errors, resolution=resolution, steady=steady)
        else:
            best = choose_penalty(alphas, log_losses, steady=steady)
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
            relative_errors=relative_errors,
            moved=moved,
        )

    def amplification(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, " a"]:
        """How far one unit of rounding in every feature moves f(x), over the spread of the outputs.

        |φ(x)| |v| with |φ(x)|² as large as it is on average; of several outputs the largest share
        counts. Nothing cancels as in dual form: |v| is at most |y| / 2√α.
        """
        mean_square = self.values.sum() / self.weight + float(self.means @ self.means)
        value_squares = np.square(self.inverse(alphas)).T @ np.square(self.scores)
        deviations = np.sqrt(mean_square * value_squares)
        spread = np.sqrt(self.squares / self.weight)
        shares = np.divide(deviations, spread, out=np.zeros_like(deviations), where=spread > 0)
        return np.asarray(shares.max(axis=1))

    def generalised_errors(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a t"]:
        """Generalised cross-validation, exact from the moments alone.

        Σ w r² / Σ w over (1 − tr H / n)²: leave-one-out with every leverage replaced by their mean
        tr H / n (Golub, Heath and Wahba 1979). The residual sum is a difference of numbers of the
        size of Σ w (y − ȳ)². What rounding may have taken from it, ε (4 Σ w (y − ȳ)² +
        3 λ_max |v|²), is added, so that a fit it cannot tell from perfect is not preferred for
        that.
        """
        residual_sums = self._residual_sums(alphas) + self._residual_rounding(alphas)

        # n − tr H: directions that no axis explains, and what the penalty leaves unexplained of
        # those that one does
        inverse = self.inverse(alphas)
        nonzero = self.values > self.floor
        freedom = self.count - float(self.fit_intercept) - nonzero.sum()
        of_axes = np.where(nonzero[:, None], alphas * inverse, -self.values[:, None] * inverse)
        freedom = freedom + of_axes.sum(axis=0)
        mean_complement = freedom / self.count

        # infinite where the mean leverage is 1 within rounding
        judged = mean_complement > 4 * self.rounding * len(nonzero)
        judged_outputs = np.repeat(judged[:, None], len(self.squares), axis=1)
        errors = np.full(residual_sums.shape, np.inf)
        np.divide(
            residual_sums / self.weight,
            np.square(mean_complement)[:, None],
            out=errors,
            where=judged_outputs,
        )
        return errors

    def generalised_rounding(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a t"]:
        """The share of each generalised error that may be rounding."""
        rounding = self._residual_rounding(alphas)
        return np.asarray(rounding / (self._residual_sums(alphas) + rounding))

    def _residual_sums(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a t"]:
        """Σ w r² = Σ w (y − ȳ)² less what the axes explain; not below 0."""
        inverse = self.inverse(alphas)
        explained = 2 * inverse - self.values[:, None] * np.square(inverse)
        return np.maximum(self.squares - explained.T @ np.square(self.scores), 0.0)

    def _residual_rounding(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a t"]:
        """What rounding may have taken from Σ w r²: ε (4 Σ w (y − ȳ)² + 3 λ_max |v|²)."""
        value_squares = np.square(self.inverse(alphas)).T @ np.square(self.scores)
        return np.asarray(self.rounding * (4 * self.squares + 3 * self.largest * value_squares))

    def generalised_resolution(self) -> float:
        """Generalised errors below this are rounding."""
        return float(max(self.resolution, 8 * self.rounding * self.squares.mean() / self.weight))

    def _complements(
        self,
        squares: Float[np.ndarray, "b p"],
        alphas: Float[np.ndarray, " a"],
        weights: Float[np.ndarray, " b"],
    ) -> Float[np.ndarray, "b a"]:
        """1 − h: what no axis explains, plus what the penalty leaves unexplained.

        It is 0 if rounding hides it. ``squares`` are w times the squared scores of the samples on
        each axis, so squares/λ is the share of a sample that a fit without penalty explains by it.
        """
        # the leverage on the mean
        if self.fit_intercept:
            mean_share = weights / self.weight
        else:
            mean_share = np.zeros(len(weights))

        # 1 − λ/(λ + alpha) is worth writing as (1 − 1) + alpha/(λ + alpha) only where the penalty
        # is smaller than λ; and below the floor λ is too small to divide by
        inverse = self.inverse(alphas)
        values = self.values[:, None]
        separate = (values > self.floor) & (values > alphas)
        shares = np.divide(1.0, values, out=np.zeros(separate.shape), where=separate)
        unexplained = np.maximum(1 - mean_share[:, None] - squares @ shares, 0.0)
        by_penalty = np.where(separate, shares * alphas * inverse, -inverse)
        complements = unexplained + squares @ by_penalty

        # the rounding of an eigenvalue moves 1/λ, or 1/(λ + alpha), by noise times its square; that
        # of a fitted value moves the residual, which is divided by 1 − h
        noise = self.rounding * self.largest
        slopes = np.square(np.where(separate, shares, inverse))
        hidden = 4 * self.rounding + squares @ (2 * noise * slopes)
        hidden += self.rounding * self.amplification(alphas)
        return np.where(hidden > 0.1 * complements, 0.0, complements)

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
    the sums, once for the leave-one-out errors, once for the solution. Products are computed in the
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
    # the moments, in the first pass over the rows
    moments: DesignMoments | None = None
    for rows, block in _rows(row_blocks, len(problem.y)):
        if moments is None:
            moments = DesignMoments.empty(
                block.shape[1], problem.y.shape[1], fit_intercept=problem.fit_intercept
            )
        weights = problem.weights[rows] if problem.weighted else None
        moments.add_rows(block, problem.centred[rows], weights)
    assert moments is not None  # there is an output, so there was a block
    moments.y_mean += problem.y_mean

    # the axes; the route takes the other two passes
    axes = PrincipalAxes.of(moments, overwrite_gram=True)
    return problem.fit(RowsRoute(axes, problem, row_blocks), keep_factor=keep_factor)


class RowsRoute:
    """A path of penalties from the principal axes of a design, and passes over its rows."""

    name: ClassVar[str] = "design"

    def __init__(self, axes: PrincipalAxes, problem: RidgeProblem, row_blocks: RowBlocks) -> None:
        self.axes = axes
        self.problem = problem
        self.row_blocks = row_blocks
        self.floor = axes.floor
        self.rounding = axes.rounding
        self.alphas = problem.grid(axes.largest, axes.floor)
        self.complements = np.empty((len(self.alphas), len(problem.y)))

    def _blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Blocks of features with the rows they hold."""
        return _rows(self.row_blocks, len(self.problem.y))

    def left_out(self) -> Iterator[LeftOut]:
        """Leave-one-out residuals in one pass over the rows; `complements` are stored."""
        problem = self.problem
        amplification = self.axes.amplification(self.alphas)
        for rows, block in self._blocks():
            complements, residuals = self.axes.judge_rows(
                block, problem.centred[rows], problem.weights[rows], self.alphas
            )
            self.complements[:, rows] = complements
            yield LeftOut(
                penalties=slice(None), rows=rows, residuals=residuals, amplification=amplification
            )

    def solve(self, i: int) -> Solution:
        """Values, intercept, leave-one-out residuals, in a pass over the rows."""
        coef = self.axes.coef(float(self.alphas[i]))
        means = self.axes.means
        fitted = [(block - means.astype(block.dtype)) @ coef for _, block in self._blocks()]
        residuals = self.problem.centred - np.concatenate(fitted)
        return coef, self.axes.intercept(coef), leave_one_out(residuals, self.complements[i])

    def smoother(self, i: int) -> DesignSmoother:
        """The fit as a linear map, in a pass over the rows: 2np² operations, and n × p numbers."""
        axes = self.axes
        scores = np.concatenate([(block - axes.means) @ axes.axes for _, block in self._blocks()])
        scores *= np.sqrt(axes.inverse(self.alphas[i : i + 1])[:, 0])
        scores *= self.problem.weights[:, None]
        return DesignSmoother(
            axes=axes,
            alpha=float(self.alphas[i]),
            weights=self.problem.weights,
            complements=self.complements[i],
            scores=scores,
        )


@dataclass(frozen=True)
class DesignSmoother:
    """A fit from a design as a linear map of its outputs, `Smoother`.

    With the scores z of samples on the axes, h_j(x) = w_j/Σw + w_j Σ_k z_k(x_j) z_k(x) /
    (λ_k + alpha), and v(x) = Σ_k alpha/(λ_k + alpha) z_k(x)² + alpha/Σw. Without an intercept the
    terms in Σw are not there. ``scores`` are w z / √(λ + alpha) of the samples.
    """

    axes: PrincipalAxes
    alpha: float
    weights: Float[np.ndarray, " n"]
    complements: Float[np.ndarray, " n"]
    scores: Float[np.ndarray, "n p"]

    def apply(
        self, compared: Float[np.ndarray, "m p"], self_kernel: Float[np.ndarray, " m"]
    ) -> tuple[Float[np.ndarray, "m n"], Float[np.ndarray, " m"]]:
        """h(x) and v(x) from features; ``self_kernel`` is not read.

        2p² + 2np operations for a sample.
        """
        scores = (compared - self.axes.means) @ self.axes.axes
        inverse = self.axes.inverse(np.array([self.alpha]))[:, 0]
        shrinkage = np.where(inverse > 0, self.alpha * inverse, 1.0)
        variance = np.square(scores) @ shrinkage
        hat = (scores * np.sqrt(inverse)) @ self.scores.T
        if self.axes.fit_intercept:
            hat += self.weights / self.axes.weight
            variance += self.alpha / self.axes.weight
        return hat, variance

    def precision(self, rows: Int[np.ndarray, " g"]) -> Float[np.ndarray, "g g"]:
        """Q_gg."""
        weights = self.weights[rows]
        scores = self.scores[rows]
        of_mean: Float[np.ndarray, "g g"] | float = 0.0
        if self.axes.fit_intercept:
            of_mean = np.outer(weights, weights) / self.axes.weight
        return np.asarray((np.diag(weights) - of_mean - scores @ scores.T) / self.alpha)

    def precisions(self) -> Float[np.ndarray, " n"]:
        """The diagonal of Q."""
        return self.weights * self.complements / self.alpha


def _rows(row_blocks: RowBlocks, n: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Blocks with the rows they hold; raises if they do not make up n rows of one width."""
    width: int | None = None
    stop = 0
    for block in row_blocks():
        block = check_float_array(block, "row_blocks")
        if width is None:
            width = block.shape[-1]
        rows = slice(stop, stop + len(block))
        if block.ndim != 2 or block.shape[1] != width or width == 0:
            raise ValueError(
                "every block of rows must have shape (n_b, p) with the same p ≥ 1: the block of "
                f"rows {rows.start} to {rows.stop} has shape {block.shape}, the first had p = "
                f"{width}."
            )
        stop = rows.stop
        # blocks beyond the outputs are counted for the message, and not given away
        if stop <= n:
            yield rows, block
    if stop != n:
        raise ValueError(
            f"the blocks of rows must hold one row per output: got {stop} rows for {n} outputs."
        )
