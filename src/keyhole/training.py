"""Training samples with their outputs, weights and groups.

The plain version, `keyhole.textbook`, has samples as pairs (x_0, x) and outputs y, and neither
weights nor groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import unit_exponent
from keyhole.data.sets import SampleBatch, concatenate
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
    """

    samples: SampleBatch
    outputs: Float[np.ndarray, "n t"] = field(repr=False)
    weights: Float[np.ndarray, " n"] | None = field(default=None, repr=False)
    groups: Int[np.ndarray, " n"] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, rows: Any) -> TrainingSet:
        return TrainingSet(
            samples=self.samples[rows],
            outputs=self.outputs[rows],
            weights=_rows_or_none(self.weights, rows),
            groups=_rows_or_none(self.groups, rows),
        )

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
        """The same samples with their tokens scaled, with queries, and pooled."""
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

    def shuffled_rows(self, seed: int) -> Int[np.ndarray, " r"]:
        """The numbers of the samples that have weight, in random order."""
        return np.random.default_rng(seed).permutation(self.positive_rows)

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
class SolvedSamples:
    """The samples that a fit solves for: those of weight 0 are gone.

    Where there are groups, a sample of weight 0 stays if its group has weight: it is predicted by
    the fit without its group.

    Attributes
    ----------
    data : TrainingSet
        The n' samples that stay.
    rows : array (n',)
        Where each of them stands among the samples given.
    n_given : int
    """

    data: TrainingSet
    rows: Int[np.ndarray, " k"] = field(repr=False)
    n_given: int

    @classmethod
    def of(cls, data: TrainingSet) -> SolvedSamples:
        """Leave out what has no weight."""
        if data.weights is None:
            return cls(data=data, rows=np.arange(len(data)), n_given=len(data))

        # samples with weight, and all samples of a group that has weight
        has_weight = data.weights > 0
        stays = has_weight
        if data.groups is not None:
            stays = np.isin(data.groups, data.groups[has_weight])
        rows = np.flatnonzero(stays)

        # slicing copies all tokens, which is spared where nothing goes
        solved = data
        if len(rows) < len(data):
            solved = data[rows]

        # the output of a sample without weight is never used, and may be of any size
        assert solved.weights is not None
        outputs = np.where(solved.weights[:, None] > 0, solved.outputs, 0.0)
        solved = replace(solved, outputs=outputs)
        return cls(data=solved, rows=rows, n_given=len(data))

    def __len__(self) -> int:
        return len(self.data)

    @property
    def n_weighted(self) -> int:
        """How many samples have weight."""
        return len(self.data.positive_rows)

    @property
    def unsolved_rows(self) -> Int[np.ndarray, " r"]:
        """Where the samples stood that had no part in the fit."""
        return np.setdiff1d(np.arange(self.n_given), self.rows)


def _rows_or_none(array: np.ndarray | None, rows: Any) -> np.ndarray | None:
    """Some rows of an array that may not be there."""
    if array is None:
        return None
    return array[rows]
