"""Training samples with their outputs, weights and groups, and the same without duplicates.

The plain version, `keyhole.textbook`, has samples as pairs (x_0, x) and outputs y, and neither
weights nor groups nor duplicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import unit_exponent
from keyhole.data.sets import (
    DistinctSamples,
    SampleBatch,
    concatenate,
    first_in_group,
    first_occurrences,
)
from keyhole.data.tokens import TokenRule


@dataclass(frozen=True)
class TrainingSet:
    """n samples and what is known of them: all the data that a fit is given.

    Attributes
    ----------
    samples : SetBatch, SetGroups or PooledSets
        The sets, as the user gave them or as a token rule has prepared them.
    outputs : array (n, t)
        Regression targets, or one-vs-rest targets ±1 of classes.
    weights : array (n,) or None
        Not negative; None means that every sample has weight 1.
    groups : array (n,) of int, or None
        Samples of one group are left out together; None means that every sample is its own group.
    ranks : array (n,) of int, or None
        The place of each sample in a random order of their own, by which samples are drawn: what is
        drawn then does not depend on the order in which samples are given. None where nothing is
        drawn.
    """

    samples: SampleBatch
    outputs: Float[np.ndarray, "n t"] = field(repr=False)
    weights: Float[np.ndarray, " n"] | None = field(default=None, repr=False)
    groups: Int[np.ndarray, " n"] | None = field(default=None, repr=False)
    ranks: Int[np.ndarray, " n"] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, rows: Any) -> TrainingSet:
        return TrainingSet(
            samples=self.samples[rows],
            outputs=self.outputs[rows],
            weights=_rows_or_none(self.weights, rows),
            groups=_rows_or_none(self.groups, rows),
            ranks=_rows_or_none(self.ranks, rows),
        )

    def distinct(self) -> DistinctSamples:
        """Which samples are distinct, and the joint weight of each."""
        return DistinctSamples.of(self.samples, self.outputs, self.weights, self.groups)

    def with_ranks(self, distinct: DistinctSamples, seed: int = 0) -> TrainingSet:
        """The same samples with the ranks by which some of them are drawn."""
        ranks = distinct.ranks(self.samples, self.outputs, seed, self.groups)
        return replace(self, ranks=ranks)

    def of_positive_weight(self) -> TrainingSet:
        """The samples that count: none of the others has any effect on a fit."""
        if self.weights is None or self.weights.all():
            return self
        return self[np.flatnonzero(self.weights)]

    def copy(self) -> TrainingSet:
        """The same samples on the host, in memory of their own."""
        on_host = self.with_samples(self.samples.numpy())
        own = on_host[np.arange(len(self))]
        # large sets are not copied when some of them are chosen
        return own.with_samples(own.samples.with_sets(own.samples.sets.copy()))

    def kept(self) -> TrainingSet:
        """The same samples on the host, in memory of their own where they are small.

        Sets of `sources.LAZY_BYTES` and more are shared with what was given: a copy would double
        the memory of a fit, and writing to such arrays later shows in intervals. Sets on a disk
        stay there.
        """
        sets = self.samples.sets
        if sets.is_large or sets.is_on_disk:
            return self
        return self.copy()

    @classmethod
    def joined(cls, parts: Sequence[TrainingSet]) -> TrainingSet:
        """Samples end to end; a part without weights has ones if another part has weights."""
        if len(parts) == 1:
            return parts[0]
        weights = None
        if any(part.weights is not None for part in parts):
            weights = np.concatenate([part.weights_or_ones() for part in parts])
        return cls(
            samples=concatenate([part.samples for part in parts]),
            outputs=np.concatenate([part.outputs for part in parts]),
            weights=weights,
        )

    def with_samples(self, samples: Any) -> TrainingSet:
        """The same outputs, weights and groups with other samples, as many and in their order."""
        return replace(self, samples=samples)

    def prepared(self, tokens: TokenRule) -> TrainingSet:
        """The same samples with their tokens scaled, with queries, and pooled.

        Samples are duplicates where they are equal as they were given, whatever scaling makes of
        them: hashes are made first, and stay with the sets.
        """
        self.samples.sets.summary("hashes")
        return self.with_samples(tokens.apply(self.samples))

    @property
    def has_extras(self) -> bool:
        """Whether the samples have sample-level features of their own."""
        return self.samples.extras is not None

    def weights_or_ones(self) -> Float[np.ndarray, " n"]:
        """The weights as an array, also where every sample has weight 1."""
        if self.weights is None:
            return np.ones(len(self))
        return self.weights

    @property
    def positive_rows(self) -> Int[np.ndarray, " r"]:
        """The numbers of the samples that have weight."""
        if self.weights is None:
            return np.arange(len(self))
        return np.flatnonzero(self.weights > 0)

    def output_exponent(self) -> int:
        """The power of two, as its exponent, in whose units the outputs are of size one."""
        return int(unit_exponent(self.outputs[self.positive_rows]))

    def with_outputs_in_units(self, exponent: int) -> TrainingSet:
        """The same samples with outputs divided by 2^exponent, which is exact.

        Squares of errors then neither overflow nor vanish, and a fit follows the units of y to the
        last digit.
        """
        with np.errstate(over="ignore"):  # outputs of weight 0 may be of any size
            outputs = np.ldexp(self.outputs, -exponent)
        return replace(self, outputs=outputs)


@dataclass(frozen=True)
class JoinedSamples:
    """The samples that a fit solves for.

    Duplicates joined, samples of weight 0 gone; and who is who.

    Where there are groups, duplicates are joined within their group only, and a sample of weight 0
    stays if its group has weight: it is predicted by the fit without its group.

    Attributes
    ----------
    data : TrainingSet
        The distinct samples; the weight of each is the joint weight of its duplicates, None if all
        are 1.
    owner : array (n,)
        For each sample given, its position among the distinct ones; −1 if it has no weight and no
        place there.
    """

    data: TrainingSet
    owner: Int[np.ndarray, " n"] = field(repr=False)

    @classmethod
    def of(cls, data: TrainingSet) -> JoinedSamples:
        """Join exact duplicates, so that repeating a sample is the same as weighting it."""
        # first[i] is the row where sample i occurs for the first time. The weights of duplicates
        # add up in that row; they are 0 in the rows of all later duplicates
        first = first_in_group(first_occurrences(data.samples, data.outputs), data.groups)
        joint_weights = np.bincount(first, weights=data.weights_or_ones(), minlength=len(data))

        # the rows that stay: first occurrences that have weight. With groups, all first occurrences
        # of a group that has weight: the fit without the group predicts those of weight 0 too
        stays = joint_weights > 0
        if data.groups is not None:
            is_first = first == np.arange(len(data))
            stays = is_first & np.isin(data.groups, data.groups[stays])
        rows = np.flatnonzero(stays)

        # where each sample that was given is found among the rows that stay
        position = np.full(len(data), -1)
        position[rows] = np.arange(len(rows))
        owner = position[first]

        # None stands for weights that are all 1, as everywhere
        weights_of_rows = joint_weights[rows]
        distinct_weights = None
        if not (weights_of_rows == 1.0).all():
            distinct_weights = weights_of_rows

        # slicing copies all tokens, which is spared where there are no duplicates
        distinct = data
        if len(rows) < len(data):
            distinct = data[rows]

        # the output of a sample without weight is never used, and may be of any size
        outputs = np.where(weights_of_rows[:, None] > 0, distinct.outputs, 0.0)
        ranks = _least_ranks(data.ranks, owner, len(rows))
        distinct = replace(distinct, outputs=outputs, weights=distinct_weights, ranks=ranks)
        return cls(data=distinct, owner=owner)

    def __len__(self) -> int:
        return len(self.data)

    def drawn(self, seed: int) -> Int[np.ndarray, " r"]:
        """Positions of the samples of positive weight in random order.

        By rank, or by place if there are no ranks.
        """
        # first into an order that does not depend on how the samples were given, then shuffled
        rows = self.data.positive_rows
        if self.data.ranks is not None:
            rows = rows[np.argsort(self.data.ranks[rows], kind="stable")]
        return np.random.default_rng(seed).permutation(rows)

    @property
    def n_weighted(self) -> int:
        """How many distinct samples have weight."""
        return len(self.data.positive_rows)


def _rows_or_none(array: np.ndarray | None, rows: Any) -> np.ndarray | None:
    """Some rows of an array that may not be there."""
    if array is None:
        return None
    return array[rows]


def _least_ranks(
    ranks: Int[np.ndarray, " n"] | None, owner: Int[np.ndarray, " n"], n_joined: int
) -> Int[np.ndarray, " k"] | None:
    """The rank of each joined sample: the least of its duplicates'."""
    if ranks is None:
        return None
    has_place = owner >= 0
    # the least, because it does not depend on which of the duplicates was given first
    least = np.full(n_joined, np.iinfo(np.int64).max)
    np.minimum.at(least, owner[has_place], ranks[has_place])
    return least
