"""One batch as it travels: sets, their outputs and their weights."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Some samples: ``sets``, and ``y`` and ``weights`` or None.

    Examples
    --------
    >>> sets, y, weights = Batch("three sets", [1, 2, 3])
    >>> weights is None
    True
    """

    sets: Any
    y: Any = None
    weights: Any = None


def as_batch(item: Any) -> Batch:
    """Return (X, y), (X, y, sample_weight) or sets alone as a Batch.

    Examples
    --------
    >>> as_batch(("sets", "y")).y
    'y'
    """
    if isinstance(item, Batch):
        return item
    if not isinstance(item, tuple):
        return Batch(item)
    if not 1 <= len(item) <= 3:
        raise ValueError(f"a batch must be sets, (X, y) or (X, y, sample_weight): got a tuple of {len(item)}.")
    return Batch(*item)
