"""Batches that are put on a disk as they come, to be fitted as one training set."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.data import arrays
from keyhole.data.bag_files import COORDINATES, FEATURES, BagFile, FileTokens, open_bag
from keyhole.data.batches import Batch
from keyhole.data.sets import SetBatch, concatenate


class SpooledBatches:
    """Samples of batches: their keys in files of a temporary folder, all else in memory.

    The files live as long as the object, which is used in a ``with`` statement.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="keyhole-")
        self._paths: list[Path] = []
        self._batches: list[SetBatch] = []
        self._targets: list[Any] = []
        self._weights: list[Any] = []

    def __enter__(self) -> SpooledBatches:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def __len__(self) -> int:
        return sum(len(batch) for batch in self._batches)

    def put(self, sets: SetBatch, y: Any, weights: Any) -> None:
        """Add the samples of a batch, whose memory may then be used again."""
        path = Path(self._folder.name, f"{len(self._paths):06d}.npy")
        np.save(path, sets.tokens)
        bag = open_bag(path, FEATURES, COORDINATES)
        # the batch again, with its keys in the file
        on_disk = SetBatch.from_source(_tokens_of([path], [bag]), sets.lengths)
        query = None if sets.query is None else arrays.copied(sets.query)
        on_disk = on_disk.with_query(query).with_extras(sets.extras).with_pairs(sets.pairs)
        self._paths.append(path)
        self._batches.append(on_disk)
        self._targets.append(np.array(y))
        self._weights.append(None if weights is None else np.array(weights))

    def __iter__(self) -> Iterator[Batch]:
        """The batches again, one after the other."""
        for sets, y, weights in zip(self._batches, self._targets, self._weights, strict=True):
            yield Batch(sets.loaded(), y, weights)

    def joined(self) -> Batch:
        """All samples as one batch, whose keys are on the disk."""
        sets = concatenate(self._batches)
        weights = None
        if any(part is not None for part in self._weights):
            parts = []
            for batch, part in zip(self._batches, self._weights, strict=True):
                ones = np.ones(len(batch))
                parts.append(ones if part is None else np.broadcast_to(part, len(batch)))
            weights = np.concatenate(parts)
        return Batch(sets, np.concatenate(self._targets), weights)


def _tokens_of(paths: list[Path], bags: list[BagFile]) -> FileTokens:
    """The keys of files of one width and type."""
    return FileTokens(
        paths=tuple(paths),
        files=tuple(bags),
        offsets=arrays.offsets_of(np.array([bag.shape[0] for bag in bags])),
        dim=int(bags[0].shape[1]),
        number=bags[0].dtype,
    )
