"""The layer from batches.

Features are summed into moments that add, and the values follow from the moments.

Everything that reads data in parts is this one reduction: `partial_fit`, an iterable of batches,
Parquet files, and the partitions of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDraw
from keyhole.choose import EXTRAS_SCALES, extras_unit
from keyhole.data.sets import SampleBatch, concatenate
from keyhole.data.tokens import TokenRule
from keyhole.ridge.calibration import PathLosses
from keyhole.ridge.design import DesignMoments, PrincipalAxes
from keyhole.ridge.problem import LARGEST_GRAM, check_gram_size
from keyhole.solvers.layers import FiniteLayer
from keyhole.solvers.solve import LayerFit, beside
from keyhole.training import TrainingSet

# bytes of a block of features: enough rows that the symmetric update runs at full speed, and no
# more
BLOCK = 2**27

LARGEST_PRODUCT = 1e307
"""Bound on Σ w y² · max(1, Σ w |φ|²): products of both kinds of sums then fit float64."""


@dataclass(frozen=True)
class SumSizes:
    """How large sums of squares are: Σ w |φ|² over features, and Σ w y² over outputs."""

    features: float = 0.0
    outputs: float = 0.0

    @classmethod
    def of_rows(cls, features: Float[np.ndarray, "n p"], data: TrainingSet) -> SumSizes:
        """Sizes of samples and their features, or infinity where a square overflows its dtype."""
        weights = np.ones(len(data)) if data.weights is None else data.weights
        with np.errstate(over="ignore", invalid="ignore"):
            # in the dtype of the features, because that is the dtype their products are made in
            lengths = np.einsum("np,np->n", features, features).astype(np.float64)
            squares = np.square(data.outputs).sum(axis=1)
            return cls(features=float(weights @ lengths), outputs=float(weights @ squares))

    @classmethod
    def of_moments(cls, moments: DesignMoments) -> SumSizes:
        """Sizes of the samples behind some moments."""
        with np.errstate(over="ignore", invalid="ignore"):
            features = moments.gram.trace() + moments.weight * np.square(moments.means).sum()
            outputs = moments.squares.sum() + moments.weight * np.square(moments.y_mean).sum()
        return cls(features=float(features), outputs=float(outputs))

    def __add__(self, other: SumSizes) -> SumSizes:
        return SumSizes(
            features=self.features + other.features, outputs=self.outputs + other.outputs
        )

    def fits(self) -> bool:
        """Whether a fit could be made from sums of this size."""
        product = self.outputs * max(1.0, self.features)
        return self.features < LARGEST_GRAM and product < LARGEST_PRODUCT

    def check(self) -> None:
        """Raise if no fit could be made from sums of this size."""
        check_gram_size(np.array([self.features]))
        if not self.fits():
            raise ValueError(
                "outputs must be such that sums of their squares fit float64, times those of the "
                f"features: the sum of w·y² over the samples is {self.outputs:.3g}, that of the "
                f"features {self.features:.3g}. Divide `y`, or `sample_weight`, by its size."
            )


def check_rows(features: Float[np.ndarray, "n p"], data: TrainingSet, others: SumSizes) -> SumSizes:
    """Sizes of samples and ``others`` together; raise if no fit could be made from both."""
    sizes = others + SumSizes.of_rows(features, data)
    try:
        sizes.check()
    except ValueError:
        # name what is too large: the weights, if the same samples would do without them
        if data.weights is not None:
            unweighted = SumSizes.of_rows(features, replace(data, weights=None))
            if unweighted.fits():
                raise ValueError(
                    "weights must be such that weighted sums of squares fit float64: the largest "
                    f"entry of `sample_weight` is {data.weights.max():.3g}. Divide `sample_weight` "
                    "by its size; a fit has the same values for a penalty divided likewise."
                ) from None
        raise
    return sizes


@dataclass(frozen=True)
class Yardstick:
    """How large the samples are whose features were computed: others no larger need no test.

    ``largest`` is the largest number among their keys, queries and extras, and at least 1;
    ``square`` their largest |φ|².
    """

    largest: float = 0.0
    square: float = 0.0

    def covers(self, largest: float, total_weight: float) -> bool:
        """Whether samples of such numbers and weights must have features and sums that are finite.

        Features are products of at most five numbers of a sample (activation "square"), so that
        numbers 10³ times as large have |φ|² up to 10³⁰ times as large; `LARGEST_GRAM` is 10¹⁵⁰.
        """
        return largest <= 1e3 * self.largest and total_weight * max(1.0, self.square) < 1e100


@dataclass(frozen=True)
class KeptSamples:
    """A random part of the samples: those k of least priority.

    Every sample is given a random number, its priority, as it is added. So two of these merge like
    any sum, and samples that came sorted are still a fair part of all. ``limit`` is k,
    ``priorities`` increase, ``sets`` is None if there are none yet.
    """

    limit: int
    priorities: Float[np.ndarray, " k"] = field(repr=False)
    sets: SampleBatch | None
    columns: Float[np.ndarray, "k t"] = field(repr=False)
    weights: Float[np.ndarray, " k"] = field(repr=False)

    @classmethod
    def none(cls, limit: int, n_outputs: int) -> KeptSamples:
        """None yet, of at most ``limit``."""
        return cls(
            limit=limit,
            priorities=np.zeros(0),
            sets=None,
            columns=np.zeros((0, n_outputs)),
            weights=np.zeros(0),
        )

    def put(self, data: TrainingSet, n_before: int) -> KeptSamples:
        """Keep these samples too, as far as they are among the least; ``n_before`` came before."""
        if self.limit == 0:
            return self
        # the priority of a sample follows from its number, whatever the batches
        generator = np.random.Generator(np.random.PCG64(0).advance(n_before))
        new = KeptSamples(
            limit=self.limit,
            priorities=generator.random(len(data)),
            sets=data.samples,
            columns=data.outputs,
            weights=data.weights_or_ones(),
        )
        return self + new._least()

    def __add__(self, other: KeptSamples) -> KeptSamples:
        """The least of both."""
        if other.sets is None:
            return self
        if self.sets is None:
            return other
        both = KeptSamples(
            limit=self.limit,
            priorities=np.concatenate([self.priorities, other.priorities]),
            sets=concatenate([self.sets, other.sets]),
            columns=np.concatenate([self.columns, other.columns]),
            weights=np.concatenate([self.weights, other.weights]),
        )
        return both._least()

    def _least(self) -> KeptSamples:
        """The samples of least priority, at most ``limit``."""
        assert self.sets is not None
        rows = np.argsort(self.priorities, kind="stable")[: self.limit]
        return KeptSamples(
            limit=self.limit,
            priorities=self.priorities[rows],
            sets=self.sets[rows],
            columns=self.columns[rows],
            weights=self.weights[rows],
        )


@dataclass
class LayerSums:
    """All that a fit needs to know of the samples seen so far: it adds, and never grows.

    Moments of features and outputs, and a few samples kept to calibrate probabilities on.
    """

    moments: DesignMoments
    kept: KeptSamples

    def __iadd__(self, other: LayerSums) -> LayerSums:
        self.moments += other.moments
        self.kept = self.kept + other.kept
        return self

    def __add__(self, other: LayerSums) -> LayerSums:
        return LayerSums(moments=self.moments + other.moments, kept=self.kept + other.kept)


@dataclass(frozen=True)
class LayerRecipe:
    """How samples become features.

    Small enough to send anywhere, because heads are a seed and not arrays.

    ``n_kept`` samples are kept for calibration; ``memory_budget`` bounds temporaries other than p ×
    p matrices, in bytes.

    >>> import keyhole as kh
    >>> batch = kh.targets.sphere_sets(60, n_keys=4, dim=3, seed=0)
    >>> y = kh.targets.TokenPower(2, 3)(batch)[:, None]
    >>> recipe = LayerRecipe(
    ...     HeadDraw(kh.GaussianHeads(), 5, 3, seed=0), TokenRule("none", "given", "mean"), 1
    ... )
    >>> data = TrainingSet(batch, y)
    >>> sums = recipe.add(recipe.empty(), data[:20]) + recipe.add(recipe.empty(), data[20:])
    >>> sums.moments.count, recipe.fit(PrincipalAxes.of(sums.moments), None).ridge.selection
    (60, 'gcv')
    """

    heads: HeadDraw
    rule: TokenRule
    n_outputs: int
    n_kept: int = 0
    activation: str = "relu"
    dtype: str = "float64"
    fit_intercept: bool = True
    memory_budget: int = MEMORY_BUDGET
    n_extras: int = 0

    @property
    def n_columns(self) -> int:
        """p = M·D, and one for each column of extras."""
        return self.heads.n_heads * (self.heads.dim + 1) + self.n_extras

    def empty(self) -> LayerSums:
        """The sums of no samples."""
        moments = DesignMoments.empty(
            self.n_columns, self.n_outputs, fit_intercept=self.fit_intercept
        )
        kept = KeptSamples.none(self.n_kept, self.n_outputs)
        return LayerSums(moments=moments, kept=kept)

    def add(self, sums: LayerSums, data: TrainingSet) -> LayerSums:
        """The sums with more samples. n (M (2D² + 4DN) + p²) operations, and a second p × p matrix.

        ``sums`` stay as they are: if anything fails midway, or is interrupted, nothing was added.
        """
        data = data.of_positive_weight()
        if len(data) == 0:
            return sums
        moments = sums.moments.copy()
        for rows in blocks(len(data), self._rows(copies=2)):
            part = data[rows]
            features = self.features(part.samples)
            moments.add_rows(features, part.outputs, part.weights, overwrite_rows=True)
        SumSizes.of_moments(moments).check()
        kept = sums.kept.put(data, n_before=int(sums.moments.count))
        return LayerSums(moments=moments, kept=kept)

    def check_addable(
        self, data: TrainingSet, sizes: SumSizes, yardstick: Yardstick
    ) -> tuple[SumSizes, Yardstick]:
        """Raise if samples could not be added to sums of some sizes, without adding them.

        Features are computed only where ``yardstick`` does not cover the samples: drawing the heads
        takes ten times as long as all else that is done with a single sample.

        Returns
        -------
        The sizes with these samples, as far as they were computed, and the yardstick with them.
        """
        ready = self.rule.apply(data.samples)
        parts = (ready.sets.tokens, ready.sets.query, ready.extras)
        largest = max(1.0, *(float(np.abs(part).max()) for part in parts if part is not None))
        total_weight = float(len(data))
        if data.weights is not None:
            with np.errstate(over="ignore"):
                total_weight = float(data.weights.sum())

        # under "exp" the direction of a token decides as well as its length
        if self.activation != "exp" and yardstick.covers(largest, total_weight):
            no_features = np.zeros((len(data), 0))
            return check_rows(no_features, data, sizes), yardstick
        features = self._features_of(ready)
        sizes = check_rows(features, data, sizes)
        square = float(np.einsum("np,np->n", features, features).max())
        yardstick = Yardstick(
            largest=max(largest, yardstick.largest), square=max(square, yardstick.square)
        )
        return sizes, yardstick

    def error_sums(
        self, axes: PrincipalAxes, alphas: Float[np.ndarray, " a"], data: TrainingSet
    ) -> Float[np.ndarray, "a t"]:
        """Σ w e² over some samples, e their exact leave-one-out residuals at every penalty.

        2np² operations.
        """
        total = np.zeros((len(alphas), self.n_outputs))
        data = data.of_positive_weight()
        for rows in blocks(len(data), self._rows(copies=5)):
            part = data[rows]
            weights = np.ones(len(part)) if part.weights is None else part.weights
            features = self.features(part.samples)
            total += axes.error_sums(features, part.outputs - axes.y_mean, weights, alphas)
        return total

    def features(self, batch: SampleBatch) -> Float[np.ndarray, "n p"]:
        """Φ of some samples, and their extras beside it."""
        return self._features_of(self.rule.apply(batch))

    def _features_of(self, ready: SampleBatch) -> Float[np.ndarray, "n p"]:
        """Φ of samples as the layer sees them."""
        features = attention_features(ready, self.heads, self.activation, dtype=self.dtype)
        if ready.extras is None:
            return features
        return beside(features, ready.extras)

    def settle(
        self,
        moments: DesignMoments,
        scale: float | None,
    ) -> tuple[LayerRecipe, DesignMoments, PrincipalAxes]:
        """Standardise the extras behind some moments, and choose their scale.

        ``scale`` is used as it is if given, and chosen by generalised cross-validation otherwise.
        The recipe that is returned makes extras as they then are: its rule counts them from the
        mean of all samples so far, in their standard deviations. The moments that were given stay
        as they are; without extras they are those that are returned.
        """
        centre = self.rule.extras_centre
        spread = self.rule.extras_spread
        if not self.n_extras or centre is None or spread is None:
            return self, moments, PrincipalAxes.of(moments)

        # extras to mean 0 and standard deviation 1, over all samples so far
        moments = moments.copy()
        extras = slice(self.n_columns - self.n_extras, None)
        squares = moments.gram.diagonal()
        deviation = np.sqrt(np.maximum(squares[extras] / moments.weight, 0.0))
        deviation = np.where(deviation > 0, deviation, 1.0)
        mean = moments.means[extras].copy()
        moments.rescale(extras, 1.0 / deviation)

        # candidates for the scale, in the unit in which extras weigh as much as features do
        features = float(squares[: extras.start].sum())
        raw_features = features + moments.weight * float(np.square(moments.means).sum())
        unit = extras_unit(features, raw_features, float(squares[extras].sum()))
        if scale is None:
            candidates = [unit * ratio for ratio in EXTRAS_SCALES]
        else:
            candidates = [scale]

        # the candidate of least error; moments are at `current` all the while
        current = 1.0
        best_error = math.inf
        best: tuple[float, PrincipalAxes] | None = None
        for candidate in candidates:
            moments.rescale(extras, np.full(self.n_extras, candidate / current))
            current = candidate
            axes = PrincipalAxes.of(moments)
            error = 0.0
            if len(candidates) > 1:
                errors = axes.generalised_errors(axes.default_alphas())
                error = float(errors.mean(axis=1).min())
            if error < best_error:
                best_error = error
                best = (candidate, axes)
        if best is None:  # no error is finite: the last one is as good as any
            best = (current, axes)
        best_scale, best_axes = best
        moments.rescale(extras, np.full(self.n_extras, best_scale / current))

        # the rule for new samples does to their extras what was done to the moments
        rule = replace(
            self.rule,
            extras_centre=centre + spread * mean,
            extras_spread=spread * deviation / best_scale,
            extras_scale=best_scale,
        )
        return replace(self, rule=rule), moments, best_axes

    def fit(
        self,
        axes: PrincipalAxes,
        alphas: Float[np.ndarray, " a"] | None,
        error_sums: Float[np.ndarray, "a t"] | None = None,
        kept: KeptSamples | None = None,
    ) -> LayerFit:
        """The layer at the penalty of least error.

        The error is that of leave-one-out if ``error_sums`` are given, else generalised
        cross-validation. If samples ``kept`` of classes are given, the penalty is that of least
        log-loss of their exact leave-one-out scores.
        """
        if alphas is None:
            alphas = axes.default_alphas()

        # log-losses along the path of penalties
        losses = None
        if kept is not None and len(kept.columns):
            path = PathLosses(kept.columns, kept.weights, len(alphas))
            for rows, residuals in self._loo_residuals(axes, kept, alphas):
                path.put(slice(None), rows, residuals)
            losses = path.losses()
        ridge = axes.fit(alphas, error_sums, losses)

        # coefficients are the values of all heads, then those of the extras
        n_features = self.n_columns - self.n_extras
        values = ridge.coef[:n_features].reshape(self.heads.n_heads, self.heads.dim + 1, -1)
        extras_values = None
        if self.n_extras:
            extras_values = np.ascontiguousarray(ridge.coef[n_features:])
        layer = FiniteLayer(
            heads=self.heads,
            values=values,
            intercept=ridge.intercept,
            activation=self.activation,
            dtype=self.dtype,
            extras_values=extras_values,
        )
        no_predictions = np.empty((0, self.n_outputs))
        return LayerFit(layer=layer, ridge=ridge, predictions=no_predictions, route="primal")

    def left_out(
        self, axes: PrincipalAxes, kept: KeptSamples, alpha: float
    ) -> Float[np.ndarray, "k t"]:
        """Exact leave-one-out predictions for the samples kept."""
        blocks_of_residuals = self._loo_residuals(axes, kept, np.array([alpha]))
        residuals = np.concatenate([block[0] for _, block in blocks_of_residuals])
        return kept.columns - residuals

    def _loo_residuals(
        self, axes: PrincipalAxes, kept: KeptSamples, alphas: Float[np.ndarray, " a"]
    ) -> Iterator[tuple[slice, Float[np.ndarray, "a b t"]]]:
        """Exact leave-one-out residuals of the samples kept, some rows at a time."""
        assert kept.sets is not None
        centred = kept.columns - axes.y_mean
        for rows in blocks(len(kept.columns), self._rows(copies=5)):
            features = self.features(kept.sets[rows])
            _, residuals = axes.judge_rows(features, centred[rows], kept.weights[rows], alphas)
            yield rows, residuals

    def _rows(self, copies: int) -> int:
        """Rows of features whose copies fit the budget."""
        row = self.n_columns * np.dtype(self.dtype).itemsize
        return block_size(copies * row, min(self.memory_budget, BLOCK))


def merge(parts: Iterable[LayerSums]) -> LayerSums:
    """Add any number of sums; one p × p matrix is made."""
    parts = iter(parts)
    first = next(parts)
    total = LayerSums(moments=first.moments.copy(), kept=first.kept)
    for part in parts:
        total += part
    return total
