"""Dataset: sets with their target, and names for what is in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Shaped

from keyhole.groups import SetGroups
from keyhole.sets import SetBatch


@dataclass(frozen=True, eq=False)
class Dataset:
    """Sets, what is to be predicted of them, and names.

    Attributes
    ----------
    sets : SetBatch or SetGroups
        n samples.
    target : array (n,) or None
        Numbers, or labels.
    names : tuple of d strings
        Names of the coordinates of a token.
    description : str
        Where the sets come from and what was done to them.
    target_name : str
    split : array (n,) or None
        0 for training, 1 for testing, where the source says so.
    columns : tuple of (str, str)
        The options that read a table, resolved: pass them again to read another table in the same way.

    Examples
    --------
    >>> Dataset(SetBatch(np.zeros((2, 3, 1))), np.array(["a", "b"]), ("x",), "two sets of zeros")
    Dataset(2 sets: two sets of zeros)
    """

    sets: SetBatch | SetGroups
    target: Shaped[np.ndarray, " n"] | None
    names: tuple[str, ...] = ()
    description: str = ""
    target_name: str = ""
    split: Shaped[np.ndarray, " n"] | None = None
    columns: tuple[tuple[str, str], ...] = field(default=())

    def __len__(self) -> int:
        return len(self.sets)

    def __getitem__(self, rows: Any) -> Dataset:
        """Some of the samples: a slice, integers, or a mask."""
        target = None if self.target is None else self.target[rows]
        split = None if self.split is None else self.split[rows]
        return Dataset(self.sets[rows], target, self.names, self.description, self.target_name, split, self.columns)

    def __repr__(self) -> str:
        return f"Dataset({len(self)} sets: {self.description})"

    @property
    def train(self) -> Dataset:
        """The training part; all of it where there is no split."""
        return self if self.split is None else self[np.flatnonzero(self.split == 0)]

    @property
    def test(self) -> Dataset:
        """The part for testing."""
        if self.split is None:
            raise ValueError("this data comes without a split of its own: split it yourself, by indexing.")
        return self[np.flatnonzero(self.split == 1)]
