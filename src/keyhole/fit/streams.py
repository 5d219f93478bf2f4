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
from keyhole.fit.members import MOST_SUMMED_FEATURES
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

MOST_SUMMED = 20_000
"""Features at most: four matrices of that order take 13 GB."""


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
    left_out : tuple of str
        Layers that have weight, and more features than there was room for.
    """

    members: tuple[Member, ...]
    scales: Float[np.ndarray, " c"]
    options: FitOptions
    n_outputs: int
    left_out: tuple[str, ...] = ()

    @classmethod
    def settle(
        cls, layers: Sequence[LayerSettings], first: TrainingSet, options: FitOptions
    ) -> Recipe:
        """Fit and combine the layers on the first sets, and keep those of most influence.

        As many are kept as have `MOST_SUMMED_FEATURES` side by side, and one at least.
        """
        # sums hold squared errors; a common factor of the weights changes nothing
        options = replace(options, loss="squared_error")
        if first.weights is not None and options.alphas is None:
            first = replace(first, weights=first.weights / first.weights.mean())
        combination = fit_combination(layers, first, options)
        for member in combination.members:
            member.embedding.forget()

        kept, left_out = _within_features(combination, first)
        members = tuple(combination.members[i] for i in kept)
        # a layer of weight w and penalty α has the prior covariance (w/α) K
        weights = np.maximum(combination.weights[kept], 1e-12)
        alphas = np.maximum([member.alpha for member in members], 1e-200)
        ratios = np.sqrt(weights) / np.sqrt(alphas)
        scales = ratios / ratios.max()
        n_outputs = first.outputs.shape[1]
        recipe = cls(members, scales, options, n_outputs, left_out)
        recipe.check_width()
        return recipe

    def check_width(self) -> None:
        """Raise if the features are too many for sums."""
        n_features = sum(self.widths)
        if n_features > MOST_SUMMED:
            gigabytes = 8 * n_features**2 / 2**30
            raise ValueError(
                f"batches are summed in matrices of p × p numbers, p features in all: these layers "
                f"have p = {n_features:,}, of which one matrix takes {gigabytes:,.0f} GiB. Use "
                "fewer heads, or kh.Landmarks(512)."
            )

    def without_samples(self) -> Recipe:
        """The same recipe without the samples it was settled on: small enough to send around."""
        return replace(self, members=tuple(without_samples(member) for member in self.members))

    def empty(self) -> Sums:
        """The sums of no samples."""
        n_features = sum(self.widths)
        return Sums.empty(n_features, self.n_outputs, fit_intercept=self.options.fit_intercept)

    @property
    def widths(self) -> list[int]:
        """How many features each member has."""
        return [n_features_of(member) for member in self.members]

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
        total.check_sizes()
        return total

    def _row_blocks(self, n: int) -> Iterable[slice]:
        """Blocks of samples whose features are within the memory budget."""
        # a second kernel has features of the pooled vector before its own
        n_features = sum(self.widths) + sum(m.embedding.n_features for m in self.members)
        return blocks(n, block_size(16 * max(1, n_features), self.options.memory_budget // 4))

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

    def axes(self, sums: Sums) -> Axes:
        """The axes of the sums, weights divided by their mean where penalties are automatic."""
        if self.options.alphas is None:
            return sums.axes(weight_unit=sums.weight / sums.count)
        return sums.axes()

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
        axes = self.axes(sums)
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
            log_losses = path_log_losses(
                first.outputs - left_out, first.outputs, first.shares * len(first)
            )
        ridge = axes.fit(alphas, errors, log_losses)
        alpha = np.array([ridge.alpha])
        residuals = axes.left_out(first_features, first.outputs, weights, alpha)[0]
        held_out = first.outputs - residuals
        temperature = None
        if self.options.classifies:
            temperature = fit_temperature(
                class_scores(held_out), labels_of(first.outputs), first.shares * len(first)
            )

        # the coefficients of each member, in its own features; no member of several has held-out
        # predictions of its own
        unknown = np.full(first.outputs.shape, np.nan)
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
                    held_out=unknown,
                    loss="squared_error",
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

    def first_samples(self) -> TrainingSet:
        """What layers are settled on, in memory of its own: however batches were cut, the same."""
        waiting = TrainingSet.joined(self.pending)
        return waiting[np.arange(min(N_FIRST, len(waiting)))]

    @property
    def should_settle(self) -> bool:
        """Whether enough samples wait for the layers to be settled on."""
        return self.recipe is None and self.count >= N_FIRST

    def settled(self, layers: Sequence[LayerSettings], options: FitOptions) -> Stream:
        """The stream with its layers settled on the first samples, and all that waits added."""
        waiting = TrainingSet.joined(self.pending)
        first = self.first_samples()
        recipe = Recipe.settle(layers, first, options)
        sums = recipe.add(recipe.empty(), waiting)
        return replace(self, first=first, recipe=recipe, sums=sums, pending=())


def _within_features(
    combination: Combination, first: TrainingSet
) -> tuple[list[int], tuple[str, ...]]:
    """Which members fit side by side, of most influence first; and the names of the others."""
    influence = []
    for weight, member in zip(combination.weights, combination.members, strict=True):
        mean = first.shares @ member.held_out
        spread = math.sqrt(float((first.shares @ np.square(member.held_out - mean)).sum()))
        influence.append(float(weight) * spread)
    kept: list[int] = []
    left_out = []
    room = MOST_SUMMED_FEATURES
    for i in np.argsort(-np.array(influence), kind="stable"):
        member = combination.members[i]
        n_features = n_features_of(member)
        if kept and n_features > room:
            left_out.append(f"{member.name} (its {n_features:,} features are too many for sums)")
            continue
        kept.append(int(i))
        room -= n_features
    return sorted(kept), tuple(left_out)


def n_features_of(member: Member) -> int:
    """How many features a member has."""
    if member.second is None:
        return member.embedding.n_features
    assert member.second.whitening is not None
    return int(member.second.whitening.shape[1])


def without_samples(member: Member) -> Member:
    """The member without training samples and factors, if it predicts from features alone."""
    second = member.second
    reads_samples = not member.embedding.is_finite
    if second is not None and not second.has_centres:
        reads_samples = True
    if reads_samples:
        return replace(member, factors=(), gram=None)
    # one sample stays: it says how many sample-level features there are
    one = member.embedding.train[np.arange(1)]
    embedding = replace(member.embedding, train=one, cache={})
    if second is not None:
        second = replace(second, embedding=embedding)
    return replace(
        member,
        embedding=embedding,
        second=second,
        held_out=member.held_out[:0],
        factors=(),
        gram=None,
        ridge=replace(member.ridge, left_out=None, factor=None),
    )
