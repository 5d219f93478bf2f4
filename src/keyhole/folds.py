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

from keyhole.ridge.calibration import labels_of
from keyhole.training import TrainingSet

N_FOLDS = 5
"""Folds, where there are as many samples, or groups, with weight."""


@dataclass(frozen=True)
class Folds:
    """A division of samples into folds.

    Samples of one group are in one fold.

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
    def of(
        cls, data: TrainingSet, n_folds: int = N_FOLDS, *, seed: int = 0, classifies: bool = False
    ) -> Folds:
        """Deal samples out to folds; of every class about as many to each, where there are any."""
        # what cannot be divided: a group, or a sample
        if data.groups is None:
            unit_of_sample = np.arange(len(data))
        else:
            _, unit_of_sample = np.unique(data.groups, return_inverse=True)
        n_units = int(unit_of_sample.max()) + 1

        # units with weight in random order, each with one of its samples
        units, position = np.unique(unit_of_sample[data.positive_rows], return_index=True)
        order = np.random.default_rng(seed).permutation(len(units))
        units = units[order]
        representative = data.positive_rows[position[order]]

        # class after class, dealt out in turn
        if classifies:
            by_class = np.argsort(labels_of(data.outputs)[representative], kind="stable")
            units = units[by_class]
        count = max(1, min(n_folds, len(units)))
        fold_of_unit = np.zeros(n_units, int)
        fold_of_unit[units] = np.arange(len(units)) % count
        return cls(numbers=fold_of_unit[unit_of_sample], count=count)

    def splits(self) -> Iterator[tuple[Int[np.ndarray, " r"], Int[np.ndarray, " h"]]]:
        """For each fold, the rows of all other samples, and its own."""
        for fold in range(self.count):
            is_held_out = self.numbers == fold
            yield np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
