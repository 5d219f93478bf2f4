"""Find sets that occur more than once, whatever the order of their keys."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from keyhole.sets import SetBatch

_MIX = np.uint64(0x9E3779B97F4A7C15)


def first_occurrences(batch: SetBatch, labels: Float[np.ndarray, "n t"]) -> Int[np.ndarray, " n"]:
    """For each sample, the number of the first sample that equals it: same keys as a multiset, query and labels.

    Hashes pick the candidates in O(tokens); candidates are then compared entry by entry, so the answer is exact.

    Examples
    --------
    >>> import numpy as np
    >>> a, b = np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]])
    >>> first_occurrences(SetBatch([a, b, a[::-1]]), np.zeros((3, 1)))
    array([0, 1, 0])
    """
    hashes = hash_samples(batch, labels)
    first = np.arange(len(batch))
    order = np.argsort(hashes, kind="stable")
    repeats = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    if len(repeats) == 0:
        return first
    # within a run of equal hashes, compare each sample with the distinct ones before it
    members: dict[int, list[int]] = {}
    for position in repeats:
        members.setdefault(int(hashes[order[position]]), [int(order[position])])
    for position in repeats:
        sample = int(order[position + 1])
        distinct = members[int(hashes[sample])]
        for other in distinct:
            if _same_sample(batch, labels, other, sample):
                first[sample] = other
                break
        else:
            distinct.append(sample)
    return first


def _hash_rows(rows: np.ndarray) -> np.ndarray:
    """One 64-bit hash per row; rows that compare equal hash alike (so −0.0 is made 0.0)."""
    words = np.ascontiguousarray(rows, dtype=np.float64) + 0.0
    hashes = np.zeros(len(words), dtype=np.uint64)
    for column in words.view(np.uint64).T:
        hashes = (hashes ^ column) * _MIX
        hashes ^= hashes >> np.uint64(29)
    return hashes


def hash_samples(batch: SetBatch, labels: np.ndarray) -> np.ndarray:
    """One 64-bit hash per sample, the same for any order of its keys."""
    # a sum over the keys does not see their order
    hashes = np.add.reduceat(_hash_rows(batch.tokens), batch.offsets[:-1])
    if batch.query is not None:
        hashes = hashes * _MIX + _hash_rows(batch.query)
    return np.asarray(hashes * _MIX + _hash_rows(labels))


def _same_sample(batch: SetBatch, labels: np.ndarray, i: int, j: int) -> bool:
    if not np.array_equal(labels[i], labels[j]):
        return False
    if batch.query is not None and not np.array_equal(batch.query[i], batch.query[j]):
        return False
    a, b = (batch.tokens[batch.offsets[s] : batch.offsets[s + 1]] for s in (i, j))
    if a.shape != b.shape:
        return False
    return bool(np.array_equal(a[np.lexsort(a.T)], b[np.lexsort(b.T)]))
