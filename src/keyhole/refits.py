"""The fits that leave samples out, all at once and for new samples: what intervals, sets and variances are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, unit_exponent
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.attention.kernels import attention_kernel
from keyhole.data.sets import PooledSets, SampleBatch, SetBatch
from keyhole.layer import beside, fit_layer
from keyhole.ridge.problem import Smoother

SETS_SQUARED = 16
"""Sets whose kernels with themselves are computed at a time, all pairs of them: few beside the samples of a fit."""


LEAST_LEVERAGE = 1e-6
"""Leverages below this are not taken as what is left of 1, which would cost more than six of their digits."""


@dataclass(frozen=True)
class Refits:
    """All the fits that leave out one sample, or one group, without refitting: see `ridge.problem.Smoother`.

    Attributes
    ----------
    batch : SetBatch or PooledSets
        The n' distinct samples of positive weight that were fitted, those of a group next to each other.
    smoother : Smoother
    columns, residuals : arrays (n', t)
        Outputs, and outputs less the prediction without the sample or its group; infinite where rounding hides it.
    coef, intercept : arrays
        Of the fit itself: dual coefficients, or values on the primal route.
    starts : array (G,)
        The first sample of each of the G groups, of one sample each where there are none.
    rows : array (n',)
        Where each stood among the samples given.
    """

    heads: HeadDraw | HeadDistribution
    activation: str
    route: str
    batch: Any
    smoother: Smoother = field(repr=False)
    columns: Float[np.ndarray, "n t"] = field(repr=False)
    residuals: Float[np.ndarray, "n t"] = field(repr=False)
    coef: Float[np.ndarray, "q t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    weights: Float[np.ndarray, " n"] = field(repr=False)
    starts: Int[np.ndarray, " g"] = field(repr=False)
    rows: Int[np.ndarray, " n"] = field(repr=False)
    alpha: float
    has_variance: bool

    @classmethod
    def of(
        cls,
        batch: SetBatch | PooledSets,
        columns: Float[np.ndarray, "n t"],
        heads: HeadDraw | HeadDistribution,
        alpha: float,
        *,
        weights: Float[np.ndarray, " n"] | None,
        groups: Int[np.ndarray, " n"] | None,
        **options: Any,
    ) -> Refits:
        """Factorise the fit at one penalty, in float64, by NumPy; at most what a fit that chooses a penalty costs."""
        heard = np.arange(len(batch)) if weights is None else np.flatnonzero(weights > 0)
        if groups is not None:
            heard = heard[np.argsort(groups[heard], kind="stable")]
        batch, columns = batch[heard], columns[heard]
        weights, groups = (None if a is None else a[heard] for a in (weights, groups))
        given: dict[str, Any] = {
            "weights": weights,
            "groups": groups,
            "keep_factor": True,
            "solver": "direct",
        }
        units = int(
            unit_exponent(columns)
        )  # as in the fit, so that squares neither overflow nor vanish
        fit = fit_layer(
            batch, np.ldexp(columns, -units), heads, np.array([alpha]), **given, **options
        )
        samples, ridge = fit.samples, fit.ridge
        assert samples is not None
        assert ridge.factor is not None
        assert ridge.left_out is not None
        n = len(samples.batch)
        names = np.arange(n) if samples.groups is None else samples.groups
        return cls(
            heads,
            options["activation"],
            fit.route,
            samples.batch,
            ridge.factor.smoother(0),
            np.ldexp(samples.columns, units),
            np.ldexp(ridge.left_out, units),
            np.ldexp(ridge.coef, units),
            np.ldexp(ridge.intercept, units),
            np.ones(n) if samples.weights is None else samples.weights,
            np.flatnonzero(np.diff(names, prepend=-1)),
            heard[np.unique(samples.owner, return_index=True)[1]],
            alpha,
            bool(alpha > 0 and alpha >= ridge.floor),
        )

    @property
    def sizes(self) -> Int[np.ndarray, " g"]:
        """Samples of each group."""
        return np.diff(self.starts, append=len(self.columns))

    @property
    def shares(self) -> Float[np.ndarray, " n"]:
        """What each sample counts in a rank over groups: one over the size of its group."""
        return np.repeat(1.0 / self.sizes, self.sizes)

    def mean_and_error(self, numbers: Float[np.ndarray, " n"]) -> tuple[float, float]:
        """The mean over groups of numbers of samples, and its standard error; of those that are known."""
        means = np.add.reduceat(numbers * self.shares, self.starts)
        means = means[np.isfinite(means)]
        return float(means.mean()), float(means.std(ddof=1) / math.sqrt(len(means)))

    def without(
        self, outputs: Float[np.ndarray, "m t"], hat: Float[np.ndarray, "m n"]
    ) -> Float[np.ndarray, "m t n"]:
        """Predictions of the fits without each sample's group; NaN of a fit that rounding hides."""
        moved = hat[:, None, :] * np.where(np.isfinite(self.residuals), self.residuals, np.nan).T
        if len(self.starts) < len(self.columns):
            moved = np.repeat(np.add.reduceat(moved, self.starts, axis=2), self.sizes, axis=2)
        return np.subtract(outputs[:, :, None], moved, out=moved)

    def predictions(
        self, batch: SampleBatch, memory_budget: int, *, variances: bool
    ) -> Iterator[
        tuple[slice, Float[np.ndarray, "m t"], Float[np.ndarray, "m n"], Float[np.ndarray, " m"]]
    ]:
        """f(x), h(x) and, if asked for, v(x) of some samples at a time."""
        width = self.heads.n_heads * (self.heads.dim + 1) if isinstance(self.heads, HeadDraw) else 0
        each = 8 * (
            width * (self.route == "primal") + 4 * len(self.columns) * (2 + self.columns.shape[1])
        )
        for rows in blocks(len(batch), block_size(each, memory_budget)):
            compared, own = self._compared(batch[rows], memory_budget, variances=variances)
            yield rows, compared @ self.coef + self.intercept, *self.smoother.apply(compared, own)

    def _compared(
        self, batch: SampleBatch, memory_budget: int, *, variances: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the smoother needs of new samples: K(x, x_j) and K(x, x), or features."""
        extras = batch.extras
        if self.route == "primal":
            features = attention_features(batch, self.heads, self.activation)
            return features if extras is None else beside(features, extras), np.zeros(len(batch))
        cross, own = np.zeros((len(batch), len(self.batch))), np.zeros(len(batch))
        if isinstance(self.heads, HeadDraw):
            heads, width = self.heads.seen_by(query=self.batch.has_query), self.heads.dim + 1
            row = 8 * (len(batch) + len(self.batch)) * width
            for part in blocks(heads.n_heads, block_size(row, memory_budget // 2)):
                drawn = heads.block(part.start, part.stop)
                new, known = (
                    attention_features(b, drawn, self.activation) for b in (batch, self.batch)
                )
                share = len(drawn) / heads.n_heads  # M^{-1/2} is that of all heads
                cross += share * (new @ known.T)
                if variances:
                    own += share * np.einsum("np,np->n", new, new)
        else:
            options: dict[str, Any] = {"memory_budget": memory_budget}
            cross += attention_kernel(batch, self.batch, self.heads, self.activation, **options)
            for rows in blocks(len(batch) if variances else 0, SETS_SQUARED):
                own[rows] = attention_kernel(
                    batch[rows], None, self.heads, self.activation, **options
                ).diagonal()
        if extras is not None:
            cross += extras @ self.batch.extras.T
            own += np.einsum("nc,nc->n", extras, extras)
        return cross, own

    def deviations(self, batch: SampleBatch, memory_budget: int) -> Float[np.ndarray, "m t"]:
        """√(A (v(x) + alpha)) of new samples, with the amplitude A that the left-out errors have for each output.

        A is the mean of e_i² / (v_{−i}(x_i) + alpha) over groups; infinite where no error is known.
        """
        known = np.isfinite(self.residuals).all(axis=1)
        if not known.any():
            return np.full((len(batch), self.residuals.shape[1]), np.inf)
        # in units of the errors, so that their squares neither overflow nor vanish
        units = int(unit_exponent(self.residuals[known]))
        squares = np.square(np.ldexp(self.residuals[known], -units))
        shares = self.shares[known]
        noisy = self.own_variances()[known] + self.alpha
        amplitude = shares @ (squares / noisy[:, None]) / shares.sum()
        parts = [part[3] for part in self.predictions(batch, memory_budget, variances=True)]
        variances = np.concatenate(parts)
        return np.ldexp(np.sqrt(amplitude * (variances[:, None] + self.alpha)), units)

    def own_variances(self) -> Float[np.ndarray, " n"]:
        """v_{−g}(x_i), the variance of each sample under the fit without its group."""
        return self._own_variances

    @cached_property
    def _own_variances(self) -> Float[np.ndarray, " n"]:
        """The diagonal of H_gg Q_gg⁻¹ for each group g, infinite where nothing is known without it.

        H is the hat matrix, h_j(x_i) in row i, and I − H = α W⁻¹ Q: most of H follows from Q, which is
        at hand. Leverages H_ii far below 1 are lost in that difference, and made from H itself.
        """
        precisions = self.smoother.precisions()
        leverages = 1.0 - self.alpha * precisions / self.weights
        lost = leverages < LEAST_LEVERAGE
        if len(self.starts) == len(self.columns):
            if lost.any():
                leverages[lost] = self._hat_matrix()[lost, lost]
            variances = np.full(len(precisions), np.inf)
            np.divide(leverages, precisions, out=variances, where=precisions > 0)
            return np.maximum(variances, 0.0)
        hat = self._hat_matrix() if lost.any() else None
        parts = []
        for group in np.split(np.arange(len(self.columns)), self.starts[1:]):
            inverse = np.linalg.inv(self.smoother.precision(group))
            if hat is None or not lost[group].any():
                parts.append(inverse.diagonal() - self.alpha / self.weights[group])
            else:
                parts.append(np.einsum("ij,ji->i", hat[np.ix_(group, group)], inverse))
        return np.maximum(np.concatenate(parts), 0.0)

    def _hat_matrix(self) -> Float[np.ndarray, "n n"]:
        """h_j(x_i) of the samples that were fitted, in rows."""
        blocks_of_rows = self.predictions(self.batch, MEMORY_BUDGET, variances=False)
        return np.concatenate([hat for _, _, hat, _ in blocks_of_rows])

    def variances_without(
        self, hat: Float[np.ndarray, "m n"], variance: Float[np.ndarray, " m"]
    ) -> Float[np.ndarray, "m n"]:
        """v_{−g}(x) of new samples, for the group of each sample of the fit."""
        if len(self.starts) == len(self.columns):
            with np.errstate(divide="ignore"):
                return np.asarray(variance[:, None] + np.square(hat) / self.smoother.precisions())
        result = np.empty_like(hat)
        for own in np.split(np.arange(len(self.columns)), self.starts[1:]):
            pulled = np.linalg.solve(self.smoother.precision(own), hat[:, own].T).T
            result[:, own] = (variance + np.einsum("mg,mg->m", pulled, hat[:, own]))[:, None]
        return result
