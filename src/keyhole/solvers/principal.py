"""Ridge along the principal axes of a design: every penalty from one eigendecomposition of its moments."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float
from scipy.linalg import eigh

from keyhole._checks import check_finite
from keyhole.solvers.moments import DesignMoments
from keyhole.solvers.penalties import default_alphas, numerical_floor
from keyhole.solvers.ridge import leave_one_out, mean_squares, rounding_of_squares
from keyhole.solvers.weighted_gram import check_gram_size


@dataclass
class PrincipalAxes:
    """The design along its principal axes. Eigenvalues below the floor are zeros to a penalty below it.

    Attributes
    ----------
    values : array (p,)
        Eigenvalues λ of the centred Gram matrix, ascending, not negative.
    axes : array (p, p)
        Their eigenvectors, in columns.
    scores : array (p, t)
        axesᵀ Σ w (φ − φ̄)(y − ȳ)ᵀ.
    means, y_mean, squares, weight, count, y_size, rounding, fit_intercept
        As in `DesignMoments`.
    floor : float
        Eigenvalues below this carry no information.
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
        """Decompose. 9p³ operations; three p × p matrices beside the moments, one less if they may be overwritten."""
        check_gram_size(moments.gram.diagonal())
        check_finite(moments.gram, "design")
        p = len(moments.means)
        options = {"overwrite_a": overwrite_gram, "check_finite": False}
        values, axes = eigh(moments.gram, lower=True, driver="evd", **options)
        largest = float(max(values[-1], 0.0))
        floor = numerical_floor(largest, max(moments.count, p), moments.rounding)
        return cls(
            np.maximum(values, 0.0),
            axes,
            axes.T @ moments.cross,
            moments.means,
            moments.y_mean,
            moments.squares,
            moments.weight,
            moments.count,
            moments.y_size,
            moments.rounding,
            moments.fit_intercept,
            floor,
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
        """1 / (λ + alpha), and 0 for an eigenvalue that a penalty below the floor has to take for zero."""
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
        """Complements 1 − h of the leverages of some samples, and their leave-one-out residuals. 2bp² operations.

        ``block`` are their features, ``left`` their outputs less ȳ: samples that are behind the moments.
        """
        scores = (block - self.means.astype(block.dtype)) @ self._axes_in(block.dtype)
        scores = scores.astype(np.float64, copy=False)
        coefs = self.inverse(alphas)[:, :, None] * self.scores[:, None, :]
        fitted = (scores @ coefs.reshape(len(coefs), -1)).reshape(len(left), len(alphas), left.shape[1])
        complements = self._complements(np.square(scores) * weights[:, None], alphas, weights).T
        residuals = [leave_one_out(left - fitted[:, i], complements[i]) for i in range(len(alphas))]
        return complements, np.asarray(residuals)

    def error_sums(
        self,
        block: Float[np.ndarray, "b p"],
        left: Float[np.ndarray, "b t"],
        weights: Float[np.ndarray, " b"],
        alphas: Float[np.ndarray, " a"],
    ) -> Float[np.ndarray, "a t"]:
        """Σ w e² over some samples, e their leave-one-out residuals: these add up, block by block, in any order."""
        _, residuals = self.judge_rows(block, left, weights, alphas)
        return np.asarray([mean_squares(loo, weights) * weights.sum() for loo in residuals])

    def generalised_errors(self, alphas: Float[np.ndarray, " a"]) -> Float[np.ndarray, "a t"]:
        """Generalised cross-validation, exact from the moments alone: Σ w r² / Σ w over (1 − tr H / n)².

        Leave-one-out with every leverage replaced by their mean tr H / n (Golub, Heath and Wahba 1979). The
        residual sum is a difference of numbers of the size of Σ w (y − ȳ)²; what rounding may have taken from it,
        ε (4 Σ w (y − ȳ)² + 3 λ_max |v|²), is added, so that a fit it cannot tell from perfect is not preferred
        for that.
        """
        inverse = self.inverse(alphas)
        energy = np.square(self.scores)
        explained = 2 * inverse - self.values[:, None] * np.square(inverse)
        residual = np.maximum(self.squares - explained.T @ energy, 0.0)
        residual += self.rounding * (4 * self.squares + 3 * self.largest * (np.square(inverse).T @ energy))
        known = self.values > self.floor
        # n − tr H: directions that no axis explains, and what the penalty keeps of those that one does
        freedom = self.count - float(self.fit_intercept) - known.sum()
        freedom = freedom + np.where(known[:, None], alphas * inverse, -self.values[:, None] * inverse).sum(axis=0)
        shrink = freedom / self.count
        judged = np.repeat((shrink > 4 * self.rounding * len(known))[:, None], len(self.squares), axis=1)
        errors = np.full(residual.shape, np.inf)
        np.divide(residual / self.weight, np.square(shrink)[:, None], out=errors, where=judged)
        return errors

    def generalised_resolution(self) -> float:
        """Generalised errors below this are rounding."""
        return float(max(self.resolution, 8 * self.rounding * self.squares.mean() / self.weight))

    def _complements(
        self, squares: Float[np.ndarray, "b p"], alphas: Float[np.ndarray, " a"], w: Float[np.ndarray, " b"]
    ) -> Float[np.ndarray, "b a"]:
        """1 − h: what no axis explains, plus what the penalty keeps unexplained; 0 if rounding hides it.

        ``squares`` are the squared scores of the samples on each axis, so squares/λ is the share of a sample
        that a fit without penalty explains by it.
        """
        mean_share = w / self.weight if self.fit_intercept else 0 * w
        inverse = self.inverse(alphas)
        # Only where a penalty is the smaller is 1 − λ/(λ + alpha) worth taking apart; and below the floor λ is too
        # small to divide by
        values = self.values[:, None]
        apart = (values > self.floor) & (values > alphas)
        shares = np.divide(1.0, values, out=np.zeros(apart.shape), where=apart)
        unexplained = np.maximum(1 - mean_share[:, None] - squares @ shares, 0.0)
        kept = unexplained + squares @ np.where(apart, shares * alphas * inverse, -inverse)
        noise = self.rounding * self.largest
        hidden = 4 * self.rounding + squares @ (2 * noise * np.square(np.where(apart, shares, inverse)))
        return np.where(hidden > 0.1 * kept, 0.0, kept)

    def _axes_in(self, dtype: np.dtype) -> np.ndarray:
        """The axes in the precision of a block, converted once."""
        if dtype == self.axes.dtype:
            return self.axes
        if dtype.name not in self._narrow:
            self._narrow[dtype.name] = self.axes.astype(dtype)
        return self._narrow[dtype.name]
