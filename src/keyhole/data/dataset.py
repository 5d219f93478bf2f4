"""What a table becomes: sets with their targets, and all that was learned on the way."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from keyhole.data.rules import MIN_ROWS, MOST_CATEGORIES
from keyhole.data.schema import Coding, Schema
from keyhole.data.sets import SetBatch, SetGroups


@dataclass(frozen=True, eq=False)
class Dataset:
    """Sets with their targets, and the names of their coordinates.

    Attributes
    ----------
    sets : SetBatch or SetGroups
        n samples.
    target : array (n,) or (n, t), or None
        Numbers, or labels.
    names : tuple of d strings
        Names of the coordinates of a token.
    description : str
        Where the sets come from and what was done to them.
    target_name : str
    split : array (n,) or None
        0 for training, 1 for testing, where the source says so.
    columns : tuple of (str, value)
        The options that read a table, resolved: pass them again to read another table in the same
        way.
    ids : array (n,) or None
        What a table with one row per token calls its sets.
    weights, groups, time : array (n,) or None
        Weights of samples, their groups (for ``fit(…, groups=data.groups)``), and when they were,
        where columns were named for these.
    query_names, extra_names : tuple of str
        Names of the coordinates of a query, and of the sample-level features.
    codings : tuple of Coding
        How columns that are no plain numbers became such.
    left_out : tuple of str
        Columns that were not taken for coordinates, each with the reason in words.

    Examples
    --------
    >>> Dataset(SetBatch(np.zeros((2, 3, 1))), np.array(["a", "b"]), ("x",), "two sets of zeros")
    Dataset(2 sets: two sets of zeros)
    """

    sets: SetBatch | SetGroups
    target: Shaped[np.ndarray, " n *outputs"] | None
    names: tuple[str, ...] = ()
    description: str = ""
    target_name: str = ""
    split: Shaped[np.ndarray, " n"] | None = None
    columns: tuple[tuple[str, Any], ...] = ()
    ids: Shaped[np.ndarray, " n"] | None = None
    weights: Float[np.ndarray, " n"] | None = None
    groups: Shaped[np.ndarray, " n"] | None = None
    time: Float[np.ndarray, " n"] | None = None
    query_names: tuple[str, ...] = ()
    extra_names: tuple[str, ...] = ()
    codings: tuple[Coding, ...] = field(default=(), repr=False)
    left_out: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, rows: Any) -> Dataset:
        """Some of the samples: a slice, integers, or a mask."""

        def chosen(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[rows]

        return replace(
            self,
            sets=self.sets[rows],
            target=chosen(self.target),
            split=chosen(self.split),
            ids=chosen(self.ids),
            weights=chosen(self.weights),
            groups=chosen(self.groups),
            time=chosen(self.time),
        )

    def __repr__(self) -> str:
        return f"Dataset({len(self)} sets: {self.description})"

    @property
    def schema(self) -> Schema:
        """What was learned about columns.

        ``schema.read(table)`` reads another table in the same way.
        """
        sets = self.sets.sets
        return Schema(
            dim=sets.dim,
            has_query=sets.query is not None,
            names=self.names,
            target=self.target_name,
            columns=self.columns,
            codings=self.codings,
        )

    @property
    def train(self) -> Dataset:
        """The training part; all of it where there is no split."""
        if self.split is None:
            return self
        return self[np.flatnonzero(self.split == 0)]

    @property
    def test(self) -> Dataset:
        """The part for testing."""
        if self.split is None:
            raise ValueError(
                "this data comes without a split of its own: split it yourself, by indexing, or "
                "name a column with `split` or `time`."
            )
        return self[np.flatnonzero(self.split == 1)]


def warn_of_leaks(data: Dataset) -> None:
    """Name the columns that are the target, or a factor of it plus a number, in all samples.

    Of labels the ones that say whether a sample has a label are meant. Fewer than `MIN_ROWS`
    samples show nothing.
    """
    if data.target is None or len(data) < MIN_ROWS:
        return
    targets = np.asarray(data.target)
    if targets.dtype.kind in "US":
        targets = (targets[:, None] == np.unique(targets)[:MOST_CATEGORIES]).astype(np.float64)
    targets = targets.reshape(len(data), -1).astype(np.float64)

    # columns of tokens must say the same in all tokens of a sample, so that the first stands for it
    sets = data.sets.sets
    suspects = []
    for j, name in enumerate(data.names):
        values = sets.tokens[:, j]
        of_samples = values[sets.offsets[:-1]]
        if _says_target(of_samples, targets):
            if np.array_equal(values, np.repeat(of_samples, np.diff(sets.offsets))):
                suspects.append(name)
    for names, values in ((data.query_names, sets.query), (data.extra_names, sets.extras)):
        if values is not None and len(names) == values.shape[1]:
            suspects += [
                n for n, v in zip(names, values.T, strict=True) if _says_target(v, targets)
            ]
    for name in dict.fromkeys(suspect.partition("=")[0] for suspect in suspects):
        warnings.warn(
            f"column {name!r} gives the target {data.target_name!r} away: in all {len(data)} "
            "samples it is the target, or a factor times it plus a number. Leave it out by naming "
            "`keys` (--keys), unless it is known when a prediction is made.",
            UserWarning,
            stacklevel=3,
        )


def _says_target(values: Float[np.ndarray, " n"], targets: Float[np.ndarray, "n t"]) -> bool:
    """Whether values are an affine function of one of the targets."""
    return any(_is_affine(values, target) for target in targets.T)


def _is_affine(values: Float[np.ndarray, " n"], target: Float[np.ndarray, " n"]) -> bool:
    """Whether values are a·target + b with a ≠ 0, up to the rounding of float32."""
    low, high = int(target.argmin()), int(target.argmax())
    rise = float(target[high] - target[low])
    difference = float(values[high]) - float(values[low])
    if rise == 0 or difference == 0:
        return False
    expected = float(values[low]) + difference / rise * (target - target[low])
    return bool((np.abs(values - expected) <= 1e-6 * abs(difference)).all())
