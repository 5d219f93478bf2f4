"""The problem that a lens is given: samples, targets, and the parts that are held out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from keyhole.data.layout import Dataset
from keyhole.data.sets import SetBatch, SetGroups
from keyhole.ridge.problem import RidgeProblem
from keyhole.training import TrainingSet

N_FOLDS = 5
MIN_TESTED = 10  # samples that a test part must have to count as one

Fold = tuple[np.ndarray, np.ndarray]
"""Row numbers to train on, and row numbers to test on."""


@dataclass(frozen=True, eq=False)
class LensProblem:
    """Samples with their targets, and the folds that are held out in turn.

    Samples stand in a random order in which the first k samples, for every k, have about their
    share of each class and of each part of a split. A learner that is given fewer samples takes
    the first ones.
    """

    sets: SetBatch | SetGroups
    columns: Float[np.ndarray, "n t"] = field(repr=False)
    """Regression: the target, centred and of unit variance.

    Classification: one-vs-rest targets ±1, one output for two classes.
    """
    # numbers of the classes; None for regression
    labels: Int[np.ndarray, " n"] | None = field(repr=False)
    folds: tuple[Fold, ...] = field(repr=False)
    # numbers of the groups; None if no two samples share a group
    groups: Int[np.ndarray, " n"] | None = field(default=None, repr=False)
    # how the folds were chosen, in words
    held: str = "5 folds held out in turn"
    # row numbers of the samples in the data
    rows: Int[np.ndarray, " n"] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def batch(self) -> SetBatch:
        """All sets, whichever sample they belong to."""
        return self.sets.sets

    @property
    def has_query(self) -> bool:
        """Whether queries were given."""
        return self.batch.query is not None

    @property
    def tokens(self) -> int:
        """Number of keys in all sets together."""
        return len(self.batch.tokens)

    def losses(
        self, rows: Int[np.ndarray, " r"], scores: Float[np.ndarray, "r t"]
    ) -> Float[np.ndarray, " u"]:
        """Squared errors in units of the target's variance, or 1 for each wrong class.

        One number per sample. Where there are groups, one number per group, because samples of
        one group are not independent; the mean stays that over samples.
        """
        if self.labels is None:
            losses = np.asarray(np.square(self.columns[rows] - scores).mean(axis=1))
        else:
            if scores.shape[1] == 1:
                predicted = (scores[:, 0] > 0).astype(int)
            else:
                predicted = scores.argmax(axis=1)
            losses = np.asarray((predicted != self.labels[rows]).astype(np.float64))
        if self.groups is None:
            return losses

        # sums over groups, scaled so that their mean is the mean over samples
        _, group_of_row = np.unique(self.groups[rows], return_inverse=True)
        sums = np.bincount(group_of_row, losses)
        return np.asarray(sums * (len(sums) / len(rows)))

    def groups_of(self, rows: Int[np.ndarray, " r"]) -> Int[np.ndarray, " r"] | None:
        """The groups of some samples; None where no two samples share a group."""
        if self.groups is None:
            return None
        return self.groups[rows]

    def training_set(self, rows: Int[np.ndarray, " r"]) -> TrainingSet:
        """Some samples in the form that a fit takes."""
        return TrainingSet(self.sets[rows], self.columns[rows], groups=self.groups_of(rows))

    def ridge(self, rows: Int[np.ndarray, " r"]) -> RidgeProblem:
        """Ridge on some samples; the penalty is chosen by leaving out samples, or whole groups."""
        return RidgeProblem.of(self.columns[rows], groups=self.groups_of(rows))

    def fold(self, k: int, size: int) -> tuple[Int[np.ndarray, " a"], Int[np.ndarray, " b"]]:
        """A fold of the first ``size`` samples: row numbers to train on and to test on."""
        train, test = self.folds[k]
        return train[train < size], test[test < size]

    def trained_on(self, size: int) -> int:
        """Samples that the folds of the first ``size`` train on, on average."""
        counts = [len(self.fold(k, size)[0]) for k in range(len(self.folds))]
        return round(float(np.mean(counts)))


def pose(data: Dataset, kind: str, most: int, seed: int) -> LensProblem:
    """The problem of a dataset, or of ``most`` of its samples."""
    target = np.asarray(data.target)
    is_regression = kind == "regression"

    # classes by number
    labels = None
    n_classes = 0
    if not is_regression:
        classes, labels = np.unique(target, return_inverse=True)
        n_classes = len(classes)
        if n_classes < 2:
            raise ValueError(
                f"the target must have two classes at least: all are {classes[0]!s:.40}."
            )

    # a random order that spreads classes, and the two parts of a split, evenly
    parts = np.zeros(len(data), dtype=np.int64) if labels is None else labels
    if data.split is not None:
        parts = 2 * parts + (data.split == 1)
    rows = balanced_order(parts, seed)[:most]

    # the outputs that ridge is fitted to
    if labels is None:
        columns = _standardised_target(target[rows].astype(np.float64))
    else:
        labels = labels[rows]
        columns = _class_targets(labels, n_classes)

    # groups by number; groups of one sample each are no groups
    groups = None
    if data.groups is not None:
        names, groups = np.unique(data.groups[rows], return_inverse=True)
        if len(names) == len(rows):
            groups = None

    split = None if data.split is None else data.split[rows]
    time = None if data.time is None else data.time[rows]
    folds, held = make_folds(len(rows), labels, split, groups, time)
    return LensProblem(
        sets=data.sets[rows],
        columns=columns,
        labels=labels,
        folds=folds,
        groups=groups,
        held=held,
        rows=rows,
    )


def _standardised_target(y: Float[np.ndarray, " n"]) -> Float[np.ndarray, "n 1"]:
    """A target of mean zero and unit variance, as one output."""
    spread = float(y.std())
    if not spread > 0:
        raise ValueError(
            f"the target must vary: all {len(y)} values are {y[0]:g}. There is nothing to learn."
        )
    return np.asarray(((y - y.mean()) / spread)[:, None])


def _class_targets(labels: Int[np.ndarray, " n"], n_classes: int) -> Float[np.ndarray, "n t"]:
    """One-vs-rest targets: 1 for the class of a sample, −1 for others. Two classes: one output."""
    targets = np.where(labels[:, None] == np.arange(n_classes), 1.0, -1.0)
    if n_classes == 2:
        return targets[:, 1:]
    return targets


def balanced_order(parts: Int[np.ndarray, " n"], seed: int) -> Int[np.ndarray, " n"]:
    """All rows in random order, every beginning with about its share of each part.

    >>> balanced_order(np.repeat([0, 1], [4, 2]), seed=0)[:3] < 4
    array([ True, False,  True])
    """
    rng = np.random.default_rng([seed, len(parts)])
    place = np.empty(len(parts))
    for part in np.unique(parts):
        # the rows of one part, shuffled, stand at equal distances between 0 and 1
        rows = rng.permutation(np.flatnonzero(parts == part))
        place[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    return np.argsort(place, kind="stable")


def make_folds(
    n: int,
    labels: np.ndarray | None,
    split: np.ndarray | None,
    groups: np.ndarray | None,
    time: np.ndarray | None,
) -> tuple[tuple[Fold, ...], str]:
    """Row numbers to train on and to test on, and how they were chosen, in words.

    1. The split that the data brings, if both of its parts have ten samples or more.
    2. Forward in time, if there are times: the later half in five parts, each predicted from all
       that came before it. This also replaces a split that only separates early from late.
    3. Five folds of whole groups, or of samples with classes spread evenly.

    A group is never on both sides.
    """
    if split is not None and _is_usable_split(split, time):
        folds = [(np.flatnonzero(split == 0), np.flatnonzero(split == 1))]
        held = "the data's own test part held out"
    elif time is not None:
        folds = _forward_folds(time)
        held = (
            f"{len(folds)} parts of the later half held out, each predicted from what came before "
            "it"
        )
    else:
        if groups is not None:
            fold_of_row = _folds_of_groups(groups)
            held = f"{N_FOLDS} folds of whole groups held out in turn"
        else:
            fold_of_row = _folds_of_samples(n, labels)
            held = f"{N_FOLDS} folds held out in turn"
        folds = [
            (np.flatnonzero(fold_of_row != k), np.flatnonzero(fold_of_row == k))
            for k in range(N_FOLDS)
        ]

    # training samples whose group is also tested would give the test away
    if groups is not None:
        folds = [(train[~np.isin(groups[train], groups[test])], test) for train, test in folds]

    smallest = min((min(len(train), len(test)) for train, test in folds), default=0)
    if smallest < 2:
        raise ValueError(
            f"what is held out must leave something to train on and to test on: {held}, and a part "
            f"has {smallest} samples. Use more groups, or times that differ."
        )
    return tuple(folds), held


def _is_usable_split(split: np.ndarray, time: np.ndarray | None) -> bool:
    """Whether both parts are large enough and do more than separate early from late."""
    is_train = split == 0
    is_test = split == 1
    if min(is_train.sum(), is_test.sum()) < MIN_TESTED:
        return False
    if time is None:
        return True
    separates_by_time = bool(time[is_train].max() <= time[is_test].min())
    return not separates_by_time


def _forward_folds(time: np.ndarray) -> list[Fold]:
    """The later half of the samples in five parts, each with all samples before it to train on."""
    n = len(time)
    order = np.argsort(time, kind="stable")
    positions = np.linspace(n // 2, n, N_FOLDS + 1)[:-1].astype(int)
    # boundaries are times, not positions: samples of one moment stay together
    boundaries = [float(time[order[k]]) for k in positions] + [math.inf]
    folds = []
    for start, end in pairwise(boundaries):
        train = np.flatnonzero(time < start)
        test = np.flatnonzero((time >= start) & (time < end))
        if len(train) and len(test):
            folds.append((train, test))
    return folds


def _folds_of_groups(groups: np.ndarray) -> np.ndarray:
    """The fold of every sample: the largest groups first, each to the fold with fewest samples."""
    group_sizes = np.bincount(groups)
    fold_sizes = np.zeros(N_FOLDS)
    fold_of_group = np.empty(len(group_sizes), dtype=np.int64)
    for group in np.argsort(-group_sizes, kind="stable"):
        smallest = int(fold_sizes.argmin())
        fold_of_group[group] = smallest
        fold_sizes[smallest] += group_sizes[group]
    return np.asarray(fold_of_group[groups])


def _folds_of_samples(n: int, labels: np.ndarray | None) -> np.ndarray:
    """The fold of every sample: in turn, class by class."""
    in_turn = np.arange(n) % N_FOLDS
    if labels is None:
        return in_turn
    fold_of_row = np.empty_like(in_turn)
    fold_of_row[np.argsort(labels, kind="stable")] = in_turn
    return fold_of_row
