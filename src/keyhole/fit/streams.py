"""Fits from batches: layers are settled on the first sets, and sums over features do the rest.

Everything that reads data in parts is this one reduction: `partial_fit`, an iterable of batches,
Parquet files, and the partitions of a cluster. Sums add and merge, in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import block_size, blocks
from keyhole.fit.combine import Combination
from keyhole.fit.fit import fit_combination
from keyhole.fit.member import Member
from keyhole.fit.samples import TrainingSet
from keyhole.fit.settings import FitOptions, LayerSettings
from keyhole.solve.calibration import (
    class_scores,
    fit_temperature,
    labels_of,
    path_log_losses,
)
from keyhole.solve.matrices import on_host
from keyhole.solve.problem import RidgeFit
from keyhole.solve.sums import Axes, Sums

N_FIRST = 2000
"""Sets that layers, scales and calibration are settled on."""

MOST_FEATURES = 2500
"""Features of all layers side by side: matrices of that order are summed, and decomposed in
seconds."""


@dataclass(frozen=True)
class Recipe:
    """How samples become features: the layers that were settled, side by side.

    Attributes
    ----------
    members : tuple of Member
    scales : array (c,)
        What the features of each member are multiplied by: one penalty then serves all as it served
        each.
    options : FitOptions
    n_outputs : int
    """

    members: tuple[Member, ...]
    scales: Float[np.ndarray, " c"]
    options: FitOptions
    n_outputs: int

    @classmethod
    def settle(
        cls, layers: Sequence[LayerSettings], first: TrainingSet, options: FitOptions
    ) -> tuple[Recipe, Combination]:
        """Fit and combine the layers on the first sets, and keep those of weight."""
        combination = fit_combination(layers, first, options)
        members = combination.members
        scales = np.ones(len(members))
        if len(members) > 1:
            # a layer of weight w and penalty α has the prior covariance (w/α) K
            ratios = [
                math.sqrt(max(float(weight), 1e-12) / member.alpha)
                for weight, member in zip(combination.weights, members, strict=True)
            ]
            scales = np.array(ratios) / max(ratios)
        return cls(members, scales, options, first.outputs.shape[1]), combination

    def empty(self) -> Sums:
        """The sums of no samples."""
        n_features = sum(self.widths)
        return Sums.empty(n_features, self.n_outputs, fit_intercept=self.options.fit_intercept)

    @property
    def widths(self) -> list[int]:
        """How many features each member has."""
        widths = []
        for member in self.members:
            if member.second is not None:
                assert member.second.whitening is not None
                widths.append(member.second.whitening.shape[1])
            else:
                widths.append(member.embedding.n_features)
        return widths

    def features(self, samples: Any) -> Float[np.ndarray, "n p"]:
        """Features of all members side by side."""
        parts = []
        for member, scale in zip(self.members, self.scales, strict=True):
            prepared = member.embedding.prepared(samples)
            if member.second is not None:
                part = member.second.rows(member.embedding, prepared)
            else:
                part = on_host(member.embedding.features(prepared))
            parts.append(scale * part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def add(self, sums: Sums, data: TrainingSet) -> Sums:
        """The sums with more samples; those given stay as they are."""
        total = sums.copy()
        for rows in self._row_blocks(len(data)):
            part = data[rows]
            total.add(self.features(part.samples), part.outputs, part.weights)
        return total

    def _row_blocks(self, n: int) -> Iterable[slice]:
        """Blocks of samples whose features are within the memory budget."""
        return blocks(n, block_size(16 * max(1, sum(self.widths)), self.options.memory_budget // 4))

    def squared_errors(
        self, axes: Axes, alphas: Float[np.ndarray, " a"], data: TrainingSet
    ) -> Float[np.ndarray, "a t"]:
        """Σ w e² over some samples, e their leave-one-out residuals at every penalty."""
        total = np.zeros((len(alphas), self.n_outputs))
        for rows in self._row_blocks(len(data)):
            part = data[rows]
            weights = part.weights_or_ones()
            residuals = axes.left_out(self.features(part.samples), part.outputs, weights, alphas)
            total += np.einsum("n,ant->at", weights, np.square(residuals))
        return total

    def solve(
        self,
        sums: Sums,
        first: TrainingSet,
        squared_errors: Any = None,
    ) -> tuple[Combination, RidgeFit]:
        """The combination that the sums stand for.

        ``squared_errors(axes, alphas)`` are means over all samples, from another pass; without it
        penalties are judged by generalised cross-validation, those of classes by the log-loss of
        the first samples.
        """
        axes = sums.axes()
        alphas = self.options.alphas
        if alphas is None:
            alphas = axes.default_alphas()
        errors = None
        if squared_errors is not None:
            errors = squared_errors(axes, alphas) / sums.weight
        first_features = self.features(first.samples)
        weights = first.weights_or_ones()
        log_losses = None
        if self.options.classifies:
            left_out = axes.left_out(first_features, first.outputs, weights, alphas)
            log_losses = path_log_losses(first.outputs - left_out, first.outputs, weights)
        ridge = axes.fit(alphas, errors, log_losses)
        residuals = axes.left_out(first_features, first.outputs, weights, np.array([ridge.alpha]))[
            0
        ]
        held_out = first.outputs - residuals
        temperature = None
        if self.options.classifies:
            temperature = fit_temperature(class_scores(held_out), labels_of(first.outputs), weights)

        # the coefficients of each member, in its own features
        members = []
        start = 0
        for member, scale, width in zip(self.members, self.scales, self.widths, strict=True):
            coef = scale * ridge.coef[start : start + width]
            start += width
            members.append(
                replace(
                    member,
                    coef=coef,
                    intercept=np.zeros(self.n_outputs),
                    ridge=ridge,
                    held_out=np.zeros((0, self.n_outputs)),
                    factors=(),
                    compares_features=True,
                )
            )
        if len(members) == 1:
            members[0] = replace(members[0], intercept=ridge.intercept, held_out=held_out)
        combination = Combination(
            members=tuple(members),
            weights=np.ones(len(members)),
            intercept=ridge.intercept if len(members) > 1 else np.zeros(self.n_outputs),
            held_out=held_out,
            temperature=temperature,
            tried=tuple(members),
        )
        return combination, ridge


@dataclass(frozen=True)
class Stream:
    """All that a fit in batches knows of its samples; adding some makes another stream.

    Until `N_FIRST` sets have come they are kept, and fitted as they are.

    Attributes
    ----------
    first : TrainingSet or None
        The first samples: settings and calibration are theirs.
    recipe : Recipe or None
        Settled once there are enough of them.
    sums : Sums or None
    count : int
        Samples of positive weight so far.
    """

    first: TrainingSet | None = None
    recipe: Recipe | None = None
    sums: Sums | None = None
    count: int = 0
    pending: tuple[TrainingSet, ...] = field(default=(), repr=False)

    def put(self, data: TrainingSet) -> Stream:
        """The stream with more samples."""
        count = self.count + len(data)
        if self.recipe is None:
            return replace(self, pending=(*self.pending, data), count=count)
        assert self.sums is not None
        return replace(self, sums=self.recipe.add(self.sums, data), count=count)

    @property
    def should_settle(self) -> bool:
        """Whether enough samples wait for the layers to be settled on."""
        return self.recipe is None and self.count >= N_FIRST

    def settled(self, layers: Sequence[LayerSettings], options: FitOptions) -> Stream:
        """The stream with its layers settled on the first samples, and all that waits added."""
        waiting = TrainingSet.joined(self.pending)
        first = waiting[: min(N_FIRST, len(waiting))]
        recipe, _ = Recipe.settle(layers, first, options)
        sums = recipe.add(recipe.empty(), waiting)
        return replace(self, first=first, recipe=recipe, sums=sums, pending=())

    def merged(self, other: Stream) -> Stream:
        """The samples of both, of which one has the recipe of the other."""
        assert self.sums is not None
        assert other.sums is not None
        return replace(self, sums=self.sums.merged(other.sums), count=self.count + other.count)
