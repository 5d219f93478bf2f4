"""Samples that own several sets: groups of sets, and each key of a set as the query in turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._duplicates import hash_samples
from keyhole.sets import SetBatch

POOLINGS = ("mean", "sum")


class SetGroups:
    """A batch of n samples, each owning one or more sets, whose features are pooled over its sets.

    For keys that depend on the query: an atom's neighbours with their distances to it are a set, a molecule is
    the group of the sets of its atoms.

    Parameters
    ----------
    sets : SetBatch
        All sets, those of one sample next to each other.
    counts : array (n,)
        How many sets each sample owns; at least one.

    Examples
    --------
    >>> import numpy as np
    >>> atoms = SetBatch(np.ones((5, 2, 3)), query=np.ones((5, 3)))
    >>> molecules = SetGroups(atoms, [3, 2])
    >>> molecules
    SetGroups(2 samples, 2–3 sets each, of SetBatch(5 sets, 2 keys each (10 in all), dim 3, with query, float64))
    >>> len(molecules[1:].sets)
    2
    """

    __slots__ = ("_offsets", "_sets")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, sets: SetBatch, counts: Any) -> None:
        if not isinstance(sets, SetBatch):
            raise TypeError(f"`sets` must be a SetBatch: got {type(sets).__name__}.")
        counts = np.asarray(counts)
        if counts.ndim != 1 or counts.dtype.kind not in "iu" or len(counts) == 0:
            raise ValueError(f"`counts` must be a vector of integers: got shape {counts.shape}, {counts.dtype}.")
        if counts.min() < 1:
            i = int(counts.argmin())
            raise ValueError(f"every sample must own at least one set: sample {i} owns {int(counts[i])}.")
        if counts.sum() != len(sets):
            raise ValueError(
                f"`counts` must add up to the number of sets: got {int(counts.sum())} for {len(sets)} sets."
            )
        self._sets = sets
        self._offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)

    @property
    def sets(self) -> SetBatch:
        """All sets, sample after sample."""
        return self._sets

    @property
    def offsets(self) -> Int[np.ndarray, " offsets"]:
        """Sample i owns sets ``offsets[i]:offsets[i+1]``."""
        return self._offsets

    @property
    def counts(self) -> Int[np.ndarray, " n"]:
        """The number of sets of each sample."""
        return np.diff(self._offsets)

    @property
    def dim(self) -> int:
        """The token dimension d."""
        return self._sets.dim

    @property
    def query(self) -> Float[np.ndarray, "n d"] | None:
        """The queries of all sets, or None."""
        return self._sets.query

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d), so that scikit-learn can slice the batch as it slices an array."""
        return len(self), self.dim

    def numpy(self) -> SetGroups:
        """Return the samples in host memory, as NumPy arrays; themselves if they are there."""
        return self if self._sets.device is None else SetGroups(self._sets.numpy(), self.counts)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, rows: Any) -> SetGroups:
        """Return the samples that ``rows`` names: a slice, integers, or a mask."""
        if isinstance(rows, tuple) and len(rows) == 2 and rows[1] is Ellipsis:
            rows = rows[0]  # scikit-learn writes X[rows, ...]
        chosen = np.atleast_1d(np.arange(len(self))[rows])
        counts = self.counts[chosen]
        starts = np.concatenate([[0], np.cumsum(counts)])[:-1]
        source = np.arange(counts.sum()) + np.repeat(self._offsets[chosen] - starts, counts)
        groups = SetGroups.__new__(SetGroups)
        groups._sets = self._sets[source]
        groups._offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return groups

    def __repr__(self) -> str:
        low, high = (int(self.counts.min()), int(self.counts.max())) if len(self) else (0, 0)
        span = f"{low}" if low == high else f"{low}–{high}"
        return f"SetGroups({len(self)} samples, {span} sets each, of {self._sets!r})"


@dataclass(frozen=True)
class PooledSets:
    """n samples as the layer sees them: Φ_i = Σ_j c_j φ(set j) over the sets j that sample i stands for.

    Attributes
    ----------
    base : SetBatch or SetGroups
    pooling : "mean" or "sum"
        "mean" averages over the keys of a set (ReLU/N) and over the sets of a sample; "sum" adds both up.
    each : bool
        Whether every key of a set of ``base``, a SetBatch, is the query in turn.
    """

    base: SetBatch | SetGroups = field(repr=False)
    pooling: str
    each: bool = False

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, rows: Any) -> PooledSets:
        """Return some of the samples."""
        return PooledSets(self.base[rows], self.pooling, self.each)

    @property
    def dim(self) -> int:
        """The token dimension d."""
        return self.base.dim

    @property
    def weights_of_sets(self) -> Int[np.ndarray, " n"]:
        """Tokens that a sample takes when its sets are written out: what blocks are cut by."""
        if isinstance(self.base, SetGroups):
            ends = np.concatenate([[0], np.cumsum(self.base.sets.lengths)])
            return np.asarray(np.diff(ends[self.base.offsets]))
        return self.base.lengths**2 if self.each else self.base.lengths

    @property
    def sets_of_samples(self) -> Int[np.ndarray, " n"]:
        """Sets that each sample stands for."""
        if isinstance(self.base, SetGroups):
            return self.base.counts
        return self.base.lengths if self.each else np.ones(len(self.base), dtype=np.int64)

    def pairs(self) -> SetBatch:
        """Every sample as one set of its (query, key, hash of the set) triples: equal triples, equal sets.

        Queries and keys alone do not say which keys share a set, and softmax depends on it.
        """
        if not isinstance(self.base, SetGroups):
            return self.base
        sets = self.base.sets
        query = np.zeros((len(sets), sets.dim)) if sets.query is None else sets.query
        hashes = (hash_samples(sets, np.zeros((len(sets), 1))) >> np.uint64(11)).astype(np.float64)
        own = np.concatenate([query, hashes[:, None]], axis=1)
        triples = np.concatenate([np.repeat(own, sets.lengths, axis=0), sets.tokens], axis=1)
        return SetBatch._from_flat(triples, sets.offsets[self.base.offsets], None)

    def flat(self) -> tuple[SetBatch, Int[np.ndarray, " o"], Float[np.ndarray, " s"]]:
        """Write out the sets; return them, the first set of each sample, and the coefficient c_j of each set."""
        if isinstance(self.base, SetGroups):
            sets, starts = self.base.sets, self.base.offsets
        elif self.each:
            sets, starts = _each_key(self.base), self.base.offsets
        else:
            sets, starts = self.base, np.arange(len(self.base) + 1)
        if self.pooling == "sum":
            return sets, starts[:-1], sets.lengths.astype(np.float64)
        counts = np.diff(starts)
        return sets, starts[:-1], np.repeat(1.0 / counts, counts)


def _each_key(batch: SetBatch) -> SetBatch:
    """Every key of every set as the query of a copy of its set."""
    lengths = batch.lengths
    owner = np.repeat(np.arange(len(batch)), lengths)
    copies = batch[owner]
    return SetBatch._from_flat(copies.tokens, copies.offsets, batch.tokens)
