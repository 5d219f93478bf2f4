"""The fits that leave samples out, all at once and for new samples, without refitting.

Intervals, label sets and variances are made of them. The plain version for one new sample is
`keyhole.textbook.jackknife_interval`, where f_{−i}(x) = f(x) − h_i(x) e_i;
docs/explanation/contributions_and_intervals.md, "The formulas", has those of groups and variances.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole.attention.backends import backend_for
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.attention.kernels import attention_kernel
from keyhole.data.arrays import on_host
from keyhole.data.sets import SampleBatch
from keyhole.logistic.problem import working_problem
from keyhole.ridge.problem import Smoother
from keyhole.solvers.solve import beside, solve_values
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet

SETS_SQUARED = 16
"""Sets whose kernels with themselves are computed at a time, all pairs of them: few beside the
samples of a fit.
"""

LEAST_LEVERAGE = 1e-6
"""Leverages below this are not taken as what is left of 1, which would cost more than six of their
digits.
"""


@dataclass(frozen=True)
class Refits:
    """All the fits that leave out one sample, or one group; see `ridge.problem.Smoother`.

    Attributes
    ----------
    batch : SetBatch or PooledSets
        The n' samples of positive weight that were fitted, those of a group next to each other.
    smoother : Smoother
    outputs, residuals : arrays (n', t)
        Outputs, and outputs less the prediction without the sample or its group; infinite where
        rounding hides it.
    coef, intercept : arrays
        Of the fit itself: dual coefficients, or values on the primal route.
    starts : array (G,)
        The first sample of each of the G groups, of one sample each where there are none.
    rows : array (n',)
        Where each stood among the samples given.
    centre : array (M·D,) or None
        What is taken off features before they are compared, as the fit does: ``coef`` and
        ``intercept`` are about it.
    """

    heads: HeadDraw | HeadDistribution
    activation: str
    route: str
    batch: Any
    smoother: Smoother = field(repr=False)
    outputs: Float[np.ndarray, "n t"] = field(repr=False)
    residuals: Float[np.ndarray, "n t"] = field(repr=False)
    coef: Float[np.ndarray, "q t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    weights: Float[np.ndarray, " n"] = field(repr=False)
    starts: Int[np.ndarray, " g"] = field(repr=False)
    rows: Int[np.ndarray, " n"] = field(repr=False)
    alpha: float
    has_variance: bool
    centre: Float[np.ndarray, " p"] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, spec: LayerSpec, data: TrainingSet, alpha: float) -> Refits:
        """Factorise the fit at one penalty, in float64.

        Costs at most what a fit that chooses a penalty does. ``data`` are prepared samples. A
        device makes the Gram matrix, which the host factorises.
        """
        # samples with weight, those of a group next to each other
        rows = data.positive_rows
        if data.groups is not None:
            rows = rows[np.argsort(data.groups[rows], kind="stable")]
        data = data[rows]

        # solve at that penalty, and keep the factorisation: directly, in float64, in units of y in
        # which squares neither overflow nor vanish, as in the fit
        exponent = data.output_exponent()
        spec = replace(
            spec,
            alphas=np.array([alpha]),
            criterion="squared_error",
            loss="squared_error",
            dtype="float64",
            solver="direct",
        )
        assert spec.heads is not None
        heads = spec.draw(spec.heads, data.samples)
        fit = solve_values(spec, data.with_outputs_in_units(exponent), heads, keep_factor=True)
        ridge = fit.ridge
        assert fit.samples is not None
        assert ridge.factor is not None
        assert ridge.left_out is not None

        # the samples, where new ones are compared with them
        backend = backend_for(fit.layer.device)
        solved = fit.samples.data
        solved = solved.with_samples(backend.placed(solved.samples))

        # a group starts where its number differs from that of the sample before
        if solved.groups is None:
            group_of_sample = np.arange(len(solved))
        else:
            group_of_sample = solved.groups
        starts = np.flatnonzero(np.diff(group_of_sample, prepend=-1))

        # back to the units of y
        return cls(
            heads=heads,
            activation=spec.activation,
            route=fit.route,
            batch=solved.samples,
            smoother=ridge.factor.smoother(0),
            outputs=np.ldexp(solved.outputs, exponent),
            residuals=np.ldexp(ridge.left_out, exponent),
            coef=np.ldexp(ridge.coef, exponent),
            intercept=np.ldexp(ridge.intercept, exponent),
            weights=solved.weights_or_ones(),
            starts=starts,
            rows=rows[fit.samples.rows],
            alpha=alpha,
            has_variance=bool(alpha > 0 and alpha >= ridge.floor),
            centre=fit.centre,
        )

    @property
    def has_groups(self) -> bool:
        """Whether some samples are left out together."""
        return len(self.starts) < len(self.outputs)

    @property
    def sizes(self) -> Int[np.ndarray, " g"]:
        """Samples of each group."""
        return np.diff(self.starts, append=len(self.outputs))

    @property
    def shares(self) -> Float[np.ndarray, " n"]:
        """What each sample counts in a rank over groups: one over the size of its group."""
        return np.repeat(1.0 / self.sizes, self.sizes)

    def members(self) -> list[Int[np.ndarray, " g"]]:
        """The samples of each group."""
        return np.split(np.arange(len(self.outputs)), self.starts[1:])

    def mean_and_error(self, numbers: Float[np.ndarray, " n"]) -> tuple[float, float]:
        """The mean over groups of numbers of samples, and its standard error.

        Of those that are finite.
        """
        means = np.add.reduceat(numbers * self.shares, self.starts)
        means = means[np.isfinite(means)]
        return float(means.mean()), float(means.std(ddof=1) / math.sqrt(len(means)))

    def without(
        self, outputs: Float[np.ndarray, "m t"], hat: Float[np.ndarray, "m n"]
    ) -> Float[np.ndarray, "m t n"]:
        """f_{−g}(x) = f(x) − Σ_{j in g} h_j(x) e_j, by the fit without the group g of each sample.

        NaN where rounding hides that fit.
        """
        residuals = np.where(np.isfinite(self.residuals), self.residuals, np.nan)
        shifts = hat[:, None, :] * residuals.T
        if self.has_groups:
            of_groups = np.add.reduceat(shifts, self.starts, axis=2)
            shifts = np.repeat(of_groups, self.sizes, axis=2)
        return np.subtract(outputs[:, :, None], shifts, out=shifts)

    def predictions(
        self, batch: SampleBatch, memory_budget: int, *, variances: bool
    ) -> Iterator[
        tuple[slice, Float[np.ndarray, "m t"], Float[np.ndarray, "m n"], Float[np.ndarray, " m"]]
    ]:
        """f(x), h(x) and v(x) of some samples at a time; v(x) is of no use unless ``variances``."""
        # a few arrays of one row per new sample: h(x), K(x, x_j), and f_{−i}(x) of every output
        n, n_outputs = self.outputs.shape
        bytes_per_sample = 8 * 4 * n * (2 + n_outputs)
        if self.route == "primal" and isinstance(self.heads, HeadDraw):
            bytes_per_sample += 8 * self.heads.n_heads * (self.heads.dim + 1)
        batch = backend_for(self.batch.device).placed(batch)
        for rows in blocks(len(batch), block_size(bytes_per_sample, memory_budget)):
            compared, squares = self._compared(batch[rows], memory_budget, variances=variances)
            hat, variance = self.smoother.apply(compared, squares)
            predicted = compared @ self.coef + self.intercept
            yield rows, predicted, hat, variance

    def _compared(
        self, batch: SampleBatch, memory_budget: int, *, variances: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the smoother needs of new samples: K(x, x_j) and K(x, x), or features and zeros."""
        # primal: features, beside the extras
        extras = batch.extras
        if self.route == "primal":
            features = attention_features(batch, self.heads, self.activation)
            if extras is not None:
                features = beside(features, extras)
            return features, np.zeros(len(batch))

        # dual: kernels of heads, plus the linear kernel of the extras
        if isinstance(self.heads, HeadDraw):
            cross, squares = self._compared_by_heads(batch, memory_budget, variances=variances)
        else:
            cross, squares = self._compared_by_kernel(batch, memory_budget, variances=variances)
        if extras is not None:
            cross += extras @ self.batch.extras.T
            squares += np.einsum("nc,nc->n", extras, extras)
        return cross, squares

    def _compared_by_heads(
        self, batch: SampleBatch, memory_budget: int, *, variances: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """K(x, x_j) and K(x, x) as sums over blocks of heads."""
        assert isinstance(self.heads, HeadDraw)
        cross = np.zeros((len(batch), len(self.batch)))
        squares = np.zeros(len(batch))

        # blocks of heads whose features, of new and fitted samples, are within half the memory
        heads = self.heads.seen_by(query=self.batch.has_query)
        width = heads.dim + 1
        bytes_per_head = 8 * (len(batch) + len(self.batch)) * width
        for part in blocks(heads.n_heads, block_size(bytes_per_head, memory_budget // 2)):
            drawn = heads.block(part.start, part.stop)
            new = attention_features(batch, drawn, self.activation, dtype="float64")
            fitted = attention_features(self.batch, drawn, self.activation, dtype="float64")

            # features carry the scale M^{-1/2} of the block's heads: products of them count by the
            # share of the block, and the centre, in the scale of all heads, is divided by its root
            share = len(drawn) / heads.n_heads
            if self.centre is not None:
                columns = slice(part.start * width, part.stop * width)
                centre = self.centre[columns] / math.sqrt(share)
                new -= centre
                fitted -= centre
            cross += share * on_host(new @ fitted.T)
            if variances:
                squares += share * on_host((new * new).sum(axis=1))
        return cross, squares

    def _compared_by_kernel(
        self, batch: SampleBatch, memory_budget: int, *, variances: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """K(x, x_j) and K(x, x) by the exact kernel."""
        assert not isinstance(self.heads, HeadDraw)
        # a device computes in the precision of its tensors
        batch = batch.astype("float64")
        fitted = self.batch.astype("float64")
        cross = on_host(
            attention_kernel(
                batch, fitted, self.heads, self.activation, memory_budget=memory_budget
            )
        )
        # K(x, x) is the diagonal of the kernel of the new samples: few at a time, because all pairs
        # of them are computed
        squares = np.zeros(len(batch))
        if variances:
            for rows in blocks(len(batch), SETS_SQUARED):
                kernel = attention_kernel(
                    batch[rows], None, self.heads, self.activation, memory_budget=memory_budget
                )
                squares[rows] = on_host(kernel).diagonal()
        return cross, squares

    def own_variances(self) -> Float[np.ndarray, " n"]:
        """v_{−g}(x_i), the variance of each sample under the fit without its group; made once."""
        return self._own_variances

    @cached_property
    def _own_variances(self) -> Float[np.ndarray, " n"]:
        """The diagonal of H_gg Q_gg⁻¹ for each group g, infinite where nothing is known without it.

        H is the hat matrix, h_j(x_i) in row i, and I − H = α W⁻¹ Q: most of H follows from Q, which
        is at hand. Leverages H_ii far below 1 are lost in that difference, and made from H itself.
        """
        # leverages from Q, and the hat matrix itself where some are lost in the difference
        precisions = self.smoother.precisions()
        leverages = 1.0 - self.alpha * precisions / self.weights
        is_lost = leverages < LEAST_LEVERAGE
        hat_matrix = None
        if is_lost.any():
            hat_matrix = self._hat_matrix()

        # every sample by itself: H_ii/Q_ii
        if not self.has_groups:
            if hat_matrix is not None:
                leverages[is_lost] = hat_matrix[is_lost, is_lost]
            variances = np.full(len(precisions), np.inf)
            np.divide(leverages, precisions, out=variances, where=precisions > 0)
            return np.maximum(variances, 0.0)

        # whole groups: (Q_gg⁻¹)_ii − α/w_i, or H_gg Q_gg⁻¹ where that difference loses digits
        parts = []
        for rows in self.members():
            inverse = np.linalg.inv(self.smoother.precision(rows))
            if hat_matrix is None or not is_lost[rows].any():
                parts.append(inverse.diagonal() - self.alpha / self.weights[rows])
            else:
                parts.append(np.einsum("ij,ji->i", hat_matrix[np.ix_(rows, rows)], inverse))
        return np.maximum(np.concatenate(parts), 0.0)

    def _hat_matrix(self) -> Float[np.ndarray, "n n"]:
        """h_j(x_i) of the samples that were fitted, in rows."""
        blocks_of_rows = self.predictions(self.batch, MEMORY_BUDGET, variances=False)
        return np.concatenate([hat for _, _, hat, _ in blocks_of_rows])

    def variances_without(
        self, hat: Float[np.ndarray, "m n"], variance: Float[np.ndarray, " m"]
    ) -> Float[np.ndarray, "m n"]:
        """v_{−g}(x) = v(x) + h_gᵀ Q_gg⁻¹ h_g of new samples, g being the group of each sample."""
        if not self.has_groups:
            with np.errstate(divide="ignore"):
                return np.asarray(variance[:, None] + np.square(hat) / self.smoother.precisions())
        result = np.empty_like(hat)
        for rows in self.members():
            solved = np.linalg.solve(self.smoother.precision(rows), hat[:, rows].T).T
            growth = np.einsum("mg,mg->m", solved, hat[:, rows])
            result[:, rows] = (variance + growth)[:, None]
        return result


def logistic_refits(
    spec: LayerSpec, data: TrainingSet, alpha: float, logits: Float[np.ndarray, "n t"]
) -> tuple[Refits, ...]:
    """The fits that leave samples out, approximately, of every output of a logistic fit.

    A logistic fit is the ridge fit to its own working responses (logistic/problem.py): what follows
    for that ridge fit exactly holds for the logistic one up to one Newton step. ``data`` are
    prepared samples with targets ±1, ``logits`` those of the fit.
    """
    fits = []
    for output in range(data.outputs.shape[1]):
        curvature, responses = working_problem(logits[:, output], data.outputs[:, output])
        working_data = replace(
            data, outputs=responses[:, None], weights=data.weights_or_ones() * curvature
        )
        fits.append(Refits.of(spec, working_data, alpha))
    return tuple(fits)
