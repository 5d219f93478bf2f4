"""Training samples with their outputs, weights and groups: all the data that a fit is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold

from keyhole.data.sets import SampleBatch, concatenate
from keyhole.solve.calibration import labels_of


@dataclass(frozen=True)
class TrainingSet:
    """n samples and what is known of them.

    Attributes
    ----------
    samples : SetBatch, SetGroups or PooledSets
        The sets, as the user gave them or as a token rule has prepared them.
    outputs : array (n, t)
        Regression targets, or one-vs-rest targets ±1 of classes.
    weights : array (n,) or None
        Positive; None means that every sample has weight 1.
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
            weights=None if self.weights is None else self.weights[rows],
            groups=None if self.groups is None else self.groups[rows],
        )

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

    def weights_or_ones(self) -> Float[np.ndarray, " n"]:
        """The weights as an array, also where every sample has weight 1."""
        if self.weights is None:
            return np.ones(len(self))
        return self.weights

    @property
    def shares(self) -> Float[np.ndarray, " n"]:
        """The weights as shares of their sum."""
        weights = self.weights_or_ones()
        return weights / weights.sum()

    def folds(
        self, n_folds: int, *, classifies: bool, seed: int = 0
    ) -> Iterator[tuple[Int[np.ndarray, " r"], Int[np.ndarray, " h"]]]:
        """Rows of every fold's other samples, and its own; of every class about as many to each.

        Groups stay together. There are fewer folds where there are fewer samples or groups.
        """
        n_units = len(self) if self.groups is None else len(np.unique(self.groups))
        n_folds = max(2, min(n_folds, n_units))
        labels = labels_of(self.outputs) if classifies else None
        is_stratified = labels is not None and np.bincount(labels).min() >= n_folds
        splitter: Any
        if self.groups is None and is_stratified:
            splitter = StratifiedKFold(n_folds, shuffle=True, random_state=seed)
        elif self.groups is None:
            splitter = KFold(n_folds, shuffle=True, random_state=seed)
        elif is_stratified:
            splitter = StratifiedGroupKFold(n_folds, shuffle=True, random_state=seed)
        else:
            splitter = GroupKFold(n_folds)
        return splitter.split(np.zeros(len(self)), labels, self.groups)
