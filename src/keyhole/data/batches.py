"""Batches: what a stream of samples is made of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Batch:
    """Some samples: ``sets``, and ``y`` and ``weights`` or None.

    It unpacks as fits take it: (X, y), or (X, y, sample_weight) where there are weights.

    >>> X, y = Batch("sets", "target")
    >>> X, y, sample_weight = Batch("sets", "target", "weights")
    """

    sets: Any
    y: Any = None
    weights: Any = None

    def __iter__(self) -> Iterator[Any]:
        yield self.sets
        yield self.y
        if self.weights is not None:
            yield self.weights


def as_batch(item: Any) -> Batch:
    """Return (X, y), (X, y, sample_weight) or sets alone as a Batch."""
    if isinstance(item, Batch):
        return item
    if not isinstance(item, tuple):
        return Batch(item)
    if not 1 <= len(item) <= 3:
        raise ValueError(
            f"a batch must be sets, (X, y) or (X, y, sample_weight): got a tuple of {len(item)}."
        )
    return Batch(*item)


def as_source(batches: Any) -> Any:
    """An iterable of batches as it is; the path of a file or folder as a `ParquetSets`."""
    if isinstance(batches, (str, os.PathLike)):
        from keyhole.data.reader import ParquetSets

        return ParquetSets(batches)
    if hasattr(batches, "shape") or not isinstance(batches, Iterable):
        raise TypeError(
            "`batches` must be an iterable of batches such as [(X, y), …], or a path: got "
            f"{type(batches).__name__}. Use fit or predict for one batch."
        )
    return batches
