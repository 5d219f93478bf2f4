"""Sums over samples, in any order and on any machine: all that ridge in p dimensions needs.

`Sums` hold second moments of features and outputs about their means. Fits with fewer features than
samples, and every fit in batches, are made of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._checks import FeatureOverflowError
from keyhole.solve.matrices import (
    add_outer,
    as_float64,
    as_like,
    copied,
    is_tensor,
    mirror_lower,
    on_host,
)
from keyhole.solve.problem import (
    PenaltyScores,
    RidgeFit,
    RidgeProblem,
    check_gram_size,
    choose_penalty,
    default_alphas,
)
from keyhole.solve.spectral import axes_of_gram, without_each


@dataclass
class Sums:
    """Second moments of features φ and outputs y about their means.

    Two of them are merged by adding the scatter between their means (Chan, Golub and LeVeque 1979),
    so that a large common offset costs no digits.

    Attributes
    ----------
    gram : array (p, p)
        Σ w (φ − φ̄)(φ − φ̄)ᵀ, of which the lower triangle is used.
    cross : array (p, t)
        Σ w (φ − φ̄)(y − ȳ)ᵀ.
    squares : array (t,)
        Σ w (y − ȳ)².
    means, y_mean : arrays (p,) and (t,)
        φ̄ and ȳ, zeros without an intercept.
    weight : float
        Σ w.
    count : int
        The number of samples.

    Examples
    --------
    >>> x, y = np.arange(8.0).reshape(4, 2), np.arange(4.0)[:, None]
    >>> first, second = Sums.empty(2, 1), Sums.empty(2, 1)
    >>> first.add(x[:3], y[:3])
    >>> second.add(x[3:], y[3:])
    >>> first.merged(second).gram[1, 0], second.merged(first).count
    (np.float64(20.0), 4)
    """

    gram: Any = field(repr=False)
    cross: Any = field(repr=False)
    squares: Float[np.ndarray, " t"] = field(repr=False)
    means: Any = field(repr=False)
    y_mean: Float[np.ndarray, " t"]
    weight: float = 0.0
    count: int = 0
    fit_intercept: bool = True

    @classmethod
    def empty(cls, n_features: int, n_outputs: int, *, fit_intercept: bool = True) -> Sums:
        """The sums of no samples."""
        return cls(
            gram=np.zeros((n_features, n_features), order="F"),
            cross=np.zeros((n_features, n_outputs)),
            squares=np.zeros(n_outputs),
            means=np.zeros(n_features),
            y_mean=np.zeros(n_outputs),
            fit_intercept=fit_intercept,
        )

    @classmethod
    def of_blocks(cls, row_blocks: Iterable[Any], problem: RidgeProblem) -> Sums:
        """The sums of all samples of a problem, whose features come in blocks of rows."""
        sums: Sums | None = None
        start = 0
        for block in row_blocks:
            rows = slice(start, start + len(block))
            start += len(block)
            if sums is None:
                n_outputs = problem.y.shape[1]
                sums = cls.empty(
                    block.shape[1], n_outputs, fit_intercept=problem.fit_intercept
                ).placed_like(block)
            sums.add(block, problem.y[rows], problem.weights[rows])
        assert sums is not None
        return sums

    def placed_like(self, block: Any) -> Sums:
        """The same sums where a block of features lives."""
        if not is_tensor(block):
            return self
        return replace(
            self,
            gram=as_like(self.gram, block),
            cross=as_like(self.cross, block),
            means=as_like(self.means, block),
        )

    def add(
        self,
        features: Any,
        y: Float[np.ndarray, "b t"],
        weights: Float[np.ndarray, " b"] | None = None,
    ) -> None:
        """Add samples: features, outputs and positive weights, ones if None. bp² operations.

        Features are centred on their own mean before they are multiplied, in their own precision,
        and added in float64.
        """
        if weights is None:
            weights = np.ones(len(y))
        weight = float(weights.sum())

        # means of these samples
        means = 0.0 * self.means
        y_mean = np.zeros(len(self.y_mean))
        if self.fit_intercept:
            shares = as_like(weights / weight, features)
            means = as_float64(features).T @ shares
            y_mean = (weights / weight) @ y

        # √w (φ − φ̄) and √w (y − ȳ)
        roots = np.sqrt(weights)
        scaled = as_float64(features) - means
        scaled *= as_like(roots, features)[:, None]
        if not is_tensor(features):
            scaled = scaled.astype(features.dtype, copy=False)
        outputs = roots[:, None] * (y - y_mean)

        # the scatter between the means first, because the sums have not grown by these samples yet
        self._shift(means, y_mean, weight)
        if is_tensor(scaled):
            self.gram.addmm_(scaled.T, scaled)
        else:
            add_outer(self.gram, scaled.T)
        self.cross += as_float64(scaled).T @ as_like(outputs, scaled)
        self.squares = self.squares + np.square(outputs).sum(axis=0)
        self.count += len(y)

    def merged(self, other: Sums) -> Sums:
        """The sums of the samples of both; neither is changed."""
        if self.cross.shape != other.cross.shape or self.fit_intercept != other.fit_intercept:
            raise ValueError(
                "sums add only if they are of the same features and outputs, with or without an "
                f"intercept alike: got (p, t) = {tuple(self.cross.shape)} and "
                f"{tuple(other.cross.shape)}, fit_intercept {self.fit_intercept} and "
                f"{other.fit_intercept}."
            )
        total = self.copy()
        if other.count == 0:
            return total
        total._shift(other.means, other.y_mean, other.weight)
        total.gram += other.gram
        total.cross += other.cross
        total.squares = total.squares + other.squares
        total.count += other.count
        return total

    def copy(self) -> Sums:
        """The same sums in memory of their own."""
        return replace(
            self,
            gram=self.gram_copy(),
            cross=copied(self.cross),
            squares=self.squares.copy(),
            means=copied(self.means),
            y_mean=self.y_mean.copy(),
        )

    def gram_copy(self) -> Any:
        """Both triangles of the Gram matrix, in memory of their own."""
        gram = copied(self.gram)
        if is_tensor(gram):
            return gram
        return mirror_lower(gram)

    def _shift(self, means: Any, y_mean: Float[np.ndarray, " t"], weight: float) -> None:
        """Add the scatter between the means so far and those of new samples, and move the means."""
        total = self.weight + weight
        if self.fit_intercept and self.weight == 0:
            # set and not added, so that nothing is rounded
            self.means = copied(means)
            self.y_mean = y_mean.copy()
        elif self.fit_intercept:
            difference = means - self.means
            y_difference = y_mean - self.y_mean
            scale = self.weight * (weight / total)
            self.gram += scale * difference[:, None] * difference[None, :]
            self.cross += scale * difference[:, None] * as_like(y_difference, difference)[None, :]
            self.squares = self.squares + scale * np.square(y_difference)
            self.means = self.means + (weight / total) * difference
            self.y_mean = self.y_mean + (weight / total) * y_difference
        self.weight = total

    def check_sizes(self) -> None:
        """Raise if features or outputs are so large that their squares have overflowed."""
        check_gram_size(on_host(self.gram.diagonal()))
        if not np.isfinite(self.squares).all():
            raise FeatureOverflowError(
                "outputs must have squares that fit float64: their sum has overflowed. Divide `y` "
                "by its size."
            )

    def axes(self, *, weight_unit: float = 1.0) -> Axes:
        """The sums along their principal axes. 9p³ operations.

        All weights are divided by ``weight_unit``.
        """
        self.check_sizes()
        values, basis = axes_of_gram(self.gram_copy(), self.count)
        return Axes(
            values=on_host(values) / weight_unit,
            basis=on_host(basis),
            scores=on_host(basis.T @ self.cross) / weight_unit,
            means=on_host(self.means),
            y_mean=self.y_mean,
            squares=self.squares / weight_unit,
            weight=self.weight / weight_unit,
            weight_unit=weight_unit,
            count=self.count,
            fit_intercept=self.fit_intercept,
        )


@dataclass(frozen=True)
class Axes:
    """Sums along their principal axes: fits at every penalty, without the samples.

    Samples whose features are seen once more are left out exactly (`left_out`); without them
    penalties are judged by generalised cross-validation. Weights of samples are divided by
    ``weight_unit`` in all that the axes are asked.
    """

    values: Float[np.ndarray, " r"] = field(repr=False)
    basis: Float[np.ndarray, "p r"] = field(repr=False)
    scores: Float[np.ndarray, "r t"] = field(repr=False)
    means: Float[np.ndarray, " p"] = field(repr=False)
    y_mean: Float[np.ndarray, " t"]
    squares: Float[np.ndarray, " t"]
    weight: float
    count: int
    fit_intercept: bool
    weight_unit: float = 1.0

    def default_alphas(self) -> Float[np.ndarray, " a"]:
        """The penalties to try when nobody names any."""
        largest = float(self.values[0]) if len(self.values) else 0.0
        return default_alphas(largest, max(self.count, len(self.means)))

    def left_out(
        self,
        features: Float[np.ndarray, "b p"],
        y: Float[np.ndarray, "b t"],
        weights: Float[np.ndarray, " b"],
        alphas: Float[np.ndarray, " a"],
    ) -> Float[np.ndarray, "a b t"]:
        """Residuals of the fits without each of some samples, which are behind the sums."""
        coordinates = (features.astype(np.float64, copy=False) - self.means) @ self.basis
        inverse = 1.0 / (self.values[:, None] + alphas)
        residuals = []
        for i in range(len(alphas)):
            fitted = coordinates @ (inverse[:, i : i + 1] * self.scores)
            residuals.append(y - self.y_mean - fitted)
        scaled = weights[:, None] / self.weight_unit
        leverages = scaled * (np.square(coordinates) @ inverse)
        if self.fit_intercept:
            leverages += scaled / self.weight
        return without_each(np.asarray(residuals), 1.0 - leverages.T)

    def fit(
        self,
        alphas: Float[np.ndarray, " a"] | None = None,
        squared_errors: Float[np.ndarray, "a t"] | None = None,
        log_losses: Float[np.ndarray, " a"] | None = None,
    ) -> RidgeFit:
        """The fit at the penalty of least score.

        ``squared_errors`` are weighted means over samples that were left out, of every output;
        generalised ones if None. ``log_losses``, if given, choose.
        """
        if alphas is None:
            alphas = self.default_alphas()
        if self.count < min(len(alphas), 2):
            raise ValueError(
                "a fit needs one sample of positive weight, and two to choose a penalty: got "
                f"{self.count}. Give more batches, or one fixed number as `alpha`."
            )
        selection = "loo"
        if squared_errors is None:
            selection = "gcv"
            squared_errors = self.generalised_errors(alphas)
        scores = PenaltyScores.of(squared_errors, self.squares / self.weight, log_losses)
        best = choose_penalty(alphas, scores.criterion)
        coef = self.basis @ (self.scores / (self.values + alphas[best])[:, None])
        return RidgeFit(
            alphas=alphas,
            errors=scores.errors,
            scores=scores.criterion,
            best=best,
            coef=coef,
            intercept=self.y_mean - self.means @ coef,
            left_out=None,
            selection=selection,
            is_log_loss=scores.is_log_loss,
        )

    def generalised_errors(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a t"]:
        """Leave-one-out with every leverage replaced by their mean (Golub, Heath, Wahba 1979)."""
        # Σ w r² = Σ w (y − ȳ)² less what the axes explain; rounding leaves no less than ε of it
        inverse = 1.0 / (self.values[:, None] + alphas)
        explained = 2.0 * inverse - self.values[:, None] * np.square(inverse)
        residual_sums = self.squares - explained.T @ np.square(self.scores)
        residual_sums = np.maximum(residual_sums, 4e-16 * self.squares)

        # n − tr H
        traces = (self.values[:, None] * inverse).sum(axis=0) + float(self.fit_intercept)
        freedom = self.count - traces
        is_judged = freedom > 1e-9 * self.count
        shares = np.where(is_judged, freedom / self.count, np.nan)
        errors = residual_sums / self.weight / np.square(shares)[:, None]
        return np.where(is_judged[:, None], errors, np.inf)
