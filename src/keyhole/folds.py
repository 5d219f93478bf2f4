"""Folds: which samples are held out together, so that a whole procedure is judged on new ones.

Ridge on fixed features has exact leave-one-out for nothing. Whatever is fitted before the ridge,
such as learned heads or a selection of keys, has seen the sample that would be left out: it is
fitted anew without each fold, and judged on that fold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from keyhole.data.sets import first_in_group, first_occurrences
from keyhole.ridge.calibration import labels_of
from keyhole.training import TrainingSet

N_FOLDS = 5
"""Folds, where there are as many samples, or groups, with weight."""


@dataclass(frozen=True)
class Folds:
    """A division of samples into folds.

    Samples of one group are in one fold, and so are duplicates of a sample. What is drawn belongs
    to the samples, by the hashes behind their ranks: neither their order, nor duplicates, nor
    samples of weight 0, nor the units of y change which samples are held out together.

    Attributes
    ----------
    numbers : array (n,)
        The fold of each sample.
    count : int
        How many folds there are; 1 where fewer than two samples, or groups, have weight, so that
        nothing can be held out.
    """

    numbers: Int[np.ndarray, " n"] = field(repr=False)
    count: int

    @classmethod
    def of(cls, data: TrainingSet, n_folds: int = N_FOLDS, *, classifies: bool = False) -> Folds:
        """Deal samples out to folds; of every class about as many to each, where there are any."""
        if data.ranks is None:
            data = data.with_ranks(data.distinct())
        assert data.ranks is not None

        # what cannot be divided: a group, or the duplicates of one sample
        if data.groups is not None:
            _, unit_of_sample = np.unique(data.groups, return_inverse=True)
        else:
            first = first_in_group(first_occurrences(data.samples, data.outputs), None)
            _, unit_of_sample = np.unique(first, return_inverse=True)
        n_units = int(unit_of_sample.max()) + 1

        # the sample of least rank stands for its unit; the rank of samples without weight is n
        by_rank = np.argsort(data.ranks, kind="stable")
        representative = np.full(n_units, -1)
        representative[unit_of_sample[by_rank[::-1]]] = by_rank[::-1]
        has_weight = np.bincount(unit_of_sample, weights=data.weights_or_ones()) > 0
        units = np.flatnonzero(has_weight)

        # class after class, each in the order of ranks, and dealt out in turn
        order_keys = [data.ranks[representative[units]]]
        if classifies:
            order_keys.append(labels_of(data.outputs)[representative[units]])
        dealt = units[np.lexsort(order_keys)]
        count = max(1, min(n_folds, len(dealt)))
        fold_of_unit = np.zeros(n_units, int)
        fold_of_unit[dealt] = np.arange(len(dealt)) % count
        return cls(numbers=fold_of_unit[unit_of_sample], count=count)

    def splits(self) -> Iterator[tuple[Int[np.ndarray, " r"], Int[np.ndarray, " h"]]]:
        """For each fold, the rows of all other samples, and its own."""
        for fold in range(self.count):
            is_held_out = self.numbers == fold
            yield np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
