"""The layer from batches: features are summed into moments that add, and the values follow from the moments.

Everything that reads data in parts is this one reduction: `partial_fit`, an iterable of batches, Parquet files, and
the partitions of a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float, UInt64

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDraw
from keyhole.data.sets import SetBatch, SetGroups, concatenate, hash_samples
from keyhole.data.tokens import TokenRule
from keyhole.layer import EXTRAS_SCALES, FiniteLayer, LayerFit, beside, extras_unit
from keyhole.ridge.calibration import PathLosses
from keyhole.ridge.design import DesignMoments, PrincipalAxes

BLOCK = 2**27  # bytes of a block of features: enough rows that the symmetric update runs at full speed, and no more


@dataclass(frozen=True)
class KeptSamples:
    """A sample of the samples: those k distinct ones whose hashes are least.

    Which ones they are is a function of the data alone, whatever the batches and their order, so that two of these
    merge like any sum. Copies of a sample are one of their joint weight. ``limit`` is k, ``hashes`` increase, ``sets``
    is None if there are none yet.
    """

    limit: int
    hashes: UInt64[np.ndarray, " k"] = field(repr=False)
    sets: SetBatch | SetGroups | None
    columns: Float[np.ndarray, "k t"] = field(repr=False)
    weights: Float[np.ndarray, " k"] = field(repr=False)

    @classmethod
    def none(cls, limit: int, n_outputs: int) -> KeptSamples:
        """None yet, of at most ``limit``."""
        return cls(limit, np.zeros(0, np.uint64), None, np.zeros((0, n_outputs)), np.zeros(0))

    def put(self, sets: SetBatch | SetGroups, columns: np.ndarray, weights: np.ndarray) -> KeptSamples:
        """Keep these samples too, as far as they are among the least."""
        if self.limit == 0:
            return self
        hashes = hash_samples(sets, columns)
        if len(self.hashes) == self.limit:
            rows = np.flatnonzero(hashes <= self.hashes[-1])
            if not len(rows):
                return self
            hashes, sets, columns, weights = hashes[rows], sets[rows], columns[rows], weights[rows]
        new = KeptSamples(self.limit, hashes, sets, columns, weights)
        return new._least() if self.sets is None else self + new

    def __add__(self, other: KeptSamples) -> KeptSamples:
        """The least of both."""
        if other.sets is None or self.sets is None:
            return self if other.sets is None else other
        both = KeptSamples(
            self.limit,
            np.concatenate([self.hashes, other.hashes]),
            concatenate([self.sets, other.sets]),
            np.concatenate([self.columns, other.columns]),
            np.concatenate([self.weights, other.weights]),
        )
        return both._least()

    def _least(self) -> KeptSamples:
        hashes, first, group = np.unique(self.hashes, return_index=True, return_inverse=True)
        weights = np.bincount(group.reshape(-1), weights=self.weights)[: self.limit]
        rows = first[: self.limit]
        assert self.sets is not None
        return KeptSamples(self.limit, hashes[: self.limit], self.sets[rows], self.columns[rows], weights)


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
        return LayerSums(self.moments + other.moments, self.kept + other.kept)


@dataclass(frozen=True)
class LayerRecipe:
    """How samples become features: small enough to send anywhere, because heads are a seed and not arrays.

    ``n_kept`` samples are kept for calibration; ``memory_budget`` bounds temporaries other than p × p matrices, in
    bytes.

    >>> import keyhole as kh
    >>> batch = kh.targets.sphere_sets(60, n_keys=4, dim=3, seed=0)
    >>> y = kh.targets.TokenPower(2, 3)(batch)[:, None]
    >>> recipe = LayerRecipe(HeadDraw(kh.GaussianHeads(), 5, 3, seed=0), TokenRule("none", "given", "mean"), 1)
    >>> sums = recipe.add(recipe.empty(), batch[:20], y[:20]) + recipe.add(recipe.empty(), batch[20:], y[20:])
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
        moments = DesignMoments.empty(self.n_columns, self.n_outputs, fit_intercept=self.fit_intercept)
        return LayerSums(moments, KeptSamples.none(self.n_kept, self.n_outputs))

    def add(
        self,
        sums: LayerSums,
        batch: SetBatch | SetGroups,
        columns: Float[np.ndarray, "n t"],
        weights: Float[np.ndarray, " n"] | None = None,
    ) -> LayerSums:
        """Add samples to sums in place, without a second p × p matrix. n (M (2D² + 4DN) + p²) operations."""
        for sets, y, w in _weighed(batch, columns, weights):
            for rows in blocks(len(sets), self._rows(copies=2)):
                features = self.features(sets[rows])
                sums.moments.add_rows(features, y[rows], None if w is None else w[rows], overwrite_rows=True)
            sums.kept = sums.kept.put(sets, y, np.ones(len(sets)) if w is None else w)
        return sums

    def error_sums(
        self,
        axes: PrincipalAxes,
        alphas: Float[np.ndarray, " a"],
        batch: SetBatch | SetGroups,
        columns: Float[np.ndarray, "n t"],
        weights: Float[np.ndarray, " n"] | None = None,
    ) -> Float[np.ndarray, "a t"]:
        """Σ w e² over some samples, e their exact leave-one-out residuals at every penalty. 2np² operations."""
        total = np.zeros((len(alphas), self.n_outputs))
        for sets, y, w in _weighed(batch, columns, weights):
            for rows in blocks(len(sets), self._rows(copies=5)):
                some = np.ones(len(y[rows])) if w is None else w[rows]
                total += axes.error_sums(self.features(sets[rows]), y[rows] - axes.y_mean, some, alphas)
        return total

    def features(self, batch: SetBatch | SetGroups) -> Float[np.ndarray, "n p"]:
        """Φ of some samples, and their extras beside it."""
        ready = self.rule.apply(batch)
        features = attention_features(ready, self.heads, self.activation, dtype=self.dtype)
        return features if ready.extras is None else beside(features, ready.extras)

    def settle(self, moments: DesignMoments, scale: float | None) -> tuple[LayerRecipe, PrincipalAxes]:
        """Standardise the extras behind some moments, in place, and choose their scale by generalised cross-validation.

        ``scale`` is used as it is if given. The recipe makes extras as they then are: its rule counts them from the
        mean of all samples so far, in their standard deviations. Without extras nothing happens.
        """
        centre, spread = self.rule.extras_centre, self.rule.extras_spread
        if not self.n_extras or centre is None or spread is None:
            return self, PrincipalAxes.of(moments)
        own = slice(self.n_columns - self.n_extras, None)
        squares = moments.gram.diagonal()
        deviation = np.sqrt(np.maximum(squares[own] / moments.weight, 0.0))
        deviation = np.where(deviation > 0, deviation, 1.0)
        mean = moments.means[own].copy()
        moments.rescale(own, 1.0 / deviation)
        features = float(squares[: own.start].sum())
        unit = extras_unit(features, features + moments.weight * float(np.square(moments.means).sum()),
                           float(squares[own].sum()))  # fmt: skip
        scales = [unit * r for r in EXTRAS_SCALES] if scale is None else [scale]
        best, before, found = math.inf, 1.0, []
        for tried in scales:
            moments.rescale(own, np.full(self.n_extras, tried / before))
            before = tried
            axes = PrincipalAxes.of(moments)
            error = float(axes.generalised_errors(axes.default_alphas()).mean(axis=1).min()) if len(scales) > 1 else 0.0
            if error < best:
                best, found = error, [(tried, axes)]
        chosen, axes = found[0] if found else (before, axes)
        moments.rescale(own, np.full(self.n_extras, chosen / before))
        rule = replace(
            self.rule,
            extras_centre=centre + spread * mean,
            extras_spread=spread * deviation / chosen,
            extras_scale=chosen,
        )
        return replace(self, rule=rule), axes

    def fit(
        self,
        axes: PrincipalAxes,
        alphas: Float[np.ndarray, " a"] | None,
        error_sums: Float[np.ndarray, "a t"] | None = None,
        kept: KeptSamples | None = None,
    ) -> LayerFit:
        """The layer at the penalty of least error: leave-one-out if its sums are given, else generalised.

        If samples ``kept`` of classes are given, that of least log-loss of their exact leave-one-out scores.
        """
        alphas = axes.default_alphas() if alphas is None else alphas
        losses = None
        if kept is not None and len(kept.columns):
            judged = PathLosses(kept.columns, kept.weights, len(alphas))
            for rows, left_out in self._left_out(axes, kept, alphas):
                judged.put(slice(None), rows, left_out)
            losses = judged.losses()
        ridge = axes.fit(alphas, error_sums, losses)
        p = self.n_columns - self.n_extras
        values = ridge.coef[:p].reshape(self.heads.n_heads, self.heads.dim + 1, -1)
        extras = np.ascontiguousarray(ridge.coef[p:]) if self.n_extras else None
        layer = FiniteLayer(self.heads, values, ridge.intercept, self.activation, self.dtype, extras_values=extras)
        return LayerFit(layer, ridge, np.empty((0, self.n_outputs)), "primal")

    def left_out(self, axes: PrincipalAxes, kept: KeptSamples, alpha: float) -> Float[np.ndarray, "k t"]:
        """Exact leave-one-out predictions for the samples kept."""
        pieces = [loo[0] for _, loo in self._left_out(axes, kept, np.array([alpha]))]
        return kept.columns - np.concatenate(pieces)

    def _left_out(
        self, axes: PrincipalAxes, kept: KeptSamples, alphas: Float[np.ndarray, " a"]
    ) -> Iterator[tuple[slice, Float[np.ndarray, "a b t"]]]:
        """Exact leave-one-out residuals of the samples kept, some rows at a time."""
        assert kept.sets is not None
        left = kept.columns - axes.y_mean
        for rows in blocks(len(kept.columns), self._rows(copies=5)):
            yield rows, axes.judge_rows(self.features(kept.sets[rows]), left[rows], kept.weights[rows], alphas)[1]

    def _rows(self, copies: int) -> int:
        """Rows of features whose copies fit the budget."""
        row = self.n_columns * np.dtype(self.dtype).itemsize
        return block_size(copies * row, min(self.memory_budget, BLOCK))


def _weighed(
    batch: SetBatch | SetGroups, columns: np.ndarray, weights: np.ndarray | None
) -> Iterator[tuple[SetBatch | SetGroups, np.ndarray, np.ndarray | None]]:
    """The samples of positive weight, if there are any."""
    if weights is None or weights.all():
        yield batch, columns, weights
    elif weights.any():
        seen = np.flatnonzero(weights)
        yield batch[seen], columns[seen], weights[seen]


def merge(parts: Iterable[LayerSums]) -> LayerSums:
    """Add any number of sums; one p × p matrix is made."""
    parts = iter(parts)
    first = next(parts)
    total = LayerSums(first.moments.copy(), first.kept)
    for part in parts:
        total += part
    return total
