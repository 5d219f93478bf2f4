"""The question that a table asks: samples, what to predict of them, and folds to judge by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole.groups import SetGroups
from keyhole.sets import SetBatch

N_FOLDS = 5


@dataclass(frozen=True, eq=False)
class LensProblem:
    """Samples with targets as columns, and the folds that take turns at being held out."""

    sets: SetBatch | SetGroups
    columns: Float[np.ndarray, "n t"] = field(repr=False)
    """Regression: the target, centred and of unit variance. Classification: ±1 per class, one column for two."""
    labels: Int[np.ndarray, " n"] | None = field(repr=False)
    """Classes by number."""
    folds: tuple[tuple[np.ndarray, np.ndarray], ...] = field(repr=False)
    """Row numbers to train on and to test on."""

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def batch(self) -> SetBatch:
        """All sets, whoever owns them."""
        return self.sets.sets if isinstance(self.sets, SetGroups) else self.sets

    @property
    def has_query(self) -> bool:
        """Whether queries were given."""
        return self.batch.query is not None

    @property
    def tokens(self) -> int:
        """Keys in all."""
        return len(self.batch.tokens)

    def losses(self, rows: Int[np.ndarray, " r"], scores: Float[np.ndarray, "r t"]) -> Float[np.ndarray, " r"]:
        """Squared error in units of the variance of the target; or 1 where the wrong class wins."""
        if self.labels is None:
            return np.asarray(np.square(self.columns[rows] - scores).mean(axis=1))
        won = (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(axis=1)
        return np.asarray((won != self.labels[rows]).astype(np.float64))


def pose(data: Any, kind: str, rows: Int[np.ndarray, " n"], seed: int) -> LensProblem:
    """The problem of some rows of a dataset; the data's own split is the only fold where it has one."""
    target = np.asarray(data.target)[rows]
    split = None if data.split is None else data.split[rows]
    if kind == "regression":
        y = target.astype(np.float64)
        spread = float(y.std())
        if not spread > 0:
            raise ValueError(f"the target must vary: all {len(y)} values are {y[0]:g}. There is nothing to learn.")
        columns, labels = ((y - y.mean()) / spread)[:, None], None
    else:
        classes, labels = np.unique(target, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"the target must have two classes at least: all are {classes[0]!s:.40}.")
        columns = np.where(labels[:, None] == np.arange(len(classes)), 1.0, -1.0)
        columns = columns[:, 1:] if len(classes) == 2 else columns
    return LensProblem(data.sets[rows], columns, labels, make_folds(len(rows), labels, split, seed))


def make_folds(
    n: int, labels: np.ndarray | None, split: np.ndarray | None, seed: int
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Five folds, classes spread evenly; or the split that the data brings."""
    order = np.random.default_rng([seed, n]).permutation(n)
    if split is not None and min((split == 0).sum(), (split == 1).sum()) >= 10:
        return ((order[split[order] == 0], order[split[order] == 1]),)
    dealt = order if labels is None else order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(n, dtype=np.int64)
    fold[dealt] = np.arange(n) % N_FOLDS
    return tuple((order[fold[order] != k], order[fold[order] == k]) for k in range(N_FOLDS))


def choose_rows(n: int, most: int, split: np.ndarray | None, seed: int) -> Int[np.ndarray, " r"]:
    """At most so many rows, drawn at random, in their order; a split keeps its shares."""
    if n <= most:
        return np.arange(n)
    rng = np.random.default_rng([seed, n, most])
    if split is None:
        return np.sort(rng.permutation(n)[:most])
    parts: Sequence[np.ndarray] = [
        rng.permutation(np.flatnonzero(split == k))[: max(1, round(most * float((split == k).mean())))] for k in (0, 1)
    ]
    return np.sort(np.concatenate(parts))
