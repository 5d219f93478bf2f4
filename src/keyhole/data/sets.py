"""Samples: sets of keys, each with a query, stored end to end without padding.

Samples that own several sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from keyhole._array import block_size, is_tensor, set_blocks
from keyhole._checks import (
    as_sequence,
    check_float_array,
    check_no_mask,
    check_pairs,
    column_names,
    is_table,
)
from keyhole.data import arrays, sources
from keyhole.data.sources import (
    TokenSource,
    changed,
    fill_rows,
    gathered_rows,
    in_memory,
    is_on_disk,
    joined,
    part_of,
    runs_of,
    token_rows,
)
from keyhole.data.summaries import statistics_of_sets

SET_POOLINGS = ("mean", "sum")


class SampleBatch:
    """n samples, each standing for one or more sets of keys.

    What every kind of batch answers for itself.

    The features of a sample are Φ_i = Σ_j c_j φ(set j) over its sets j. Whoever computes with
    samples asks for their sets `written_out`, and never what kind they are.
    """

    __slots__ = ()
    # a batch compares by identity and holds arrays: not hashable by content
    __hash__ = None  # type: ignore[assignment]

    pooling: str = "mean"
    """"mean" over the keys of a set and over the sets of a sample, or "sum" over both."""
    each: bool = False
    """Whether every key of a set is its query in turn."""

    @property
    def unpooled(self) -> SampleBatch:
        """The samples before they were pooled in another way than by means."""
        return self

    @property
    def sets(self) -> SetBatch:
        """All sets that are held, sample after sample."""
        raise NotImplementedError

    @property
    def set_offsets(self) -> Int[np.ndarray, " o"]:
        """Sample i owns ``sets[set_offsets[i] : set_offsets[i+1]]``."""
        raise NotImplementedError

    @property
    def set_counts(self) -> Int[np.ndarray, " n"]:
        """Sets that each sample stands for."""
        return np.diff(self.set_offsets)

    @property
    def token_counts(self) -> Int[np.ndarray, " n"]:
        """Keys that each sample takes once its sets are written out: what blocks are cut by."""
        return np.diff(self.sets.offsets[self.set_offsets])

    @property
    def is_plain(self) -> bool:
        """Whether every sample is one set, averaged over its keys.

        Its features are those of ``sets``.
        """
        return False

    @property
    def has_own_queries(self) -> bool:
        """Whether queries came with the sets, so that none need be made of their keys."""
        return self.sets.query is not None

    @property
    def dim(self) -> int:
        """The token dimension d."""
        return self.sets.dim

    @property
    def query(self) -> Float[Any, "s q"] | None:
        """The queries of all sets, or None."""
        return self.sets.query

    @property
    def has_query(self) -> bool:
        """Whether sets have a query once they are written out.

        Given with them, or made of their keys.
        """
        return self.each or self.sets.query is not None

    @property
    def query_dim(self) -> int:
        """The dimension d_q of a query; that of a key where queries are constant, or are keys."""
        if self.each or self.sets.query is None:
            return self.dim
        return int(self.sets.query.shape[1])

    @property
    def extras(self) -> Float[np.ndarray, "n c"] | None:
        """Sample-level features, in float64 and in host memory always; None if there are none."""
        raise NotImplementedError

    def with_extras(self, extras: Any) -> Any:
        """The same samples with other sample-level features, (n, c); or without, for None."""
        raise NotImplementedError

    @property
    def device(self) -> str | None:
        """Where torch tensors live, such as "cpu" or "cuda:0"; None for NumPy arrays."""
        return self.sets.device

    @property
    def shape(self) -> tuple[int, int]:
        """(n, d), so that scikit-learn can slice the batch as it slices an array."""
        return len(self), self.dim

    def with_sets(self, sets: SetBatch) -> Any:
        """The same samples with other sets instead of theirs, as many and in their order."""
        raise NotImplementedError

    def numpy(self) -> Any:
        """Return the samples in host memory, as NumPy arrays; themselves if they are there."""
        if self.device is None:
            return self
        return self.with_sets(self.sets.numpy())

    def astype(self, dtype: Any) -> Any:
        """Return the samples in float32 or float64."""
        return self.with_sets(self.sets.astype(dtype))

    def to(self, device: str, dtype: Any = None) -> Any:
        """Return the samples as torch tensors on a device, in float32 or float64 if given."""
        return self.with_sets(self.sets.to(device, dtype))

    @property
    def set_coefficients(self) -> Float[np.ndarray, " s"]:
        """c_j of every set that is held: the features of a sample are Σ_j c_j φ(set j).

        φ is a mean over keys; where every key is a query, over these too.
        """
        counts = self.set_counts
        return np.repeat(1.0 / counts, counts)

    def pooled(self, pooling: str, *, each: bool = False) -> Any:
        """The samples as a layer sees them, sets where that is all they are.

        With ``each``, every key is a query.
        """
        pooled = PooledSets(base=self, pooling=pooling, each=each)
        if pooled.is_plain:
            return self.sets
        return pooled

    def written_out(self) -> WrittenSets:
        """The sets that the samples stand for, and the coefficient c_j of each."""
        counts = self.set_counts
        return WrittenSets(
            sets=self.sets,
            offsets=self.set_offsets,
            coefficients=np.repeat(1.0 / counts, counts),
        )

    def check_query_rule(self, query: str) -> None:
        """Raise if these samples cannot have their queries made in that way."""

    @classmethod
    def _joined(cls, batches: Sequence[Any]) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.set_offsets) - 1

    def __getitem__(self, rows: Any) -> Any:
        raise NotImplementedError

    def _row_numbers(self, rows: Any) -> Int[np.ndarray, " r"]:
        """The numbers of the samples that a slice, integers or a mask name."""
        if isinstance(rows, tuple) and len(rows) == 2 and rows[1] is Ellipsis:
            rows = rows[0]  # scikit-learn writes X[rows, ...]
        if isinstance(rows, slice):
            return np.arange(*rows.indices(len(self)))
        check_no_mask(rows, "rows")
        # a tuple addresses several axes in NumPy, and a batch has one: it is refused below
        index = np.asarray(None if isinstance(rows, tuple) else rows)

        # a mask
        if index.dtype == bool:
            if index.shape != (len(self),):
                raise IndexError(
                    f"a mask must have one entry per set: got shape {index.shape} for {len(self)} "
                    "sets."
                )
            return np.flatnonzero(index)

        # integers, negative ones counting from the end
        if index.size == 0:
            index = index.astype(np.intp)
        if index.dtype.kind not in "iu" or index.ndim > 1:
            raise IndexError(
                f"a {type(self).__name__} is indexed by a slice, a list or array of integers, or a "
                f"mask: got {type(rows).__name__} of dtype {index.dtype} and shape {index.shape}."
            )
        index = np.atleast_1d(index).astype(np.intp)
        is_outside = (index < -len(self)) | (index >= len(self))
        if is_outside.any():
            raise IndexError(
                f"set {int(index[is_outside][0])} is out of range for a batch of {len(self)} sets."
            )
        return np.where(index < 0, index + len(self), index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """An (n, d) array of objects.

        Entry (i, j) is coordinate j of sample i, as a batch of one sample.

        scikit-learn's ensembles choose rows and columns of it, and `samples_in` makes samples of
        what they chose. A table of numbers it is not.
        """
        if dtype is not None and np.dtype(dtype) != object:
            raise TypeError(
                f"a {type(self).__name__} is no table of numbers, and cannot be read as "
                f"{np.dtype(dtype)}. Give it to an estimator of keyhole, or make features of it "
                "first: kh.AttentionFeatures(n_heads).fit_transform(X)."
            )
        cells = np.empty(self.shape, dtype=object)
        for j in range(self.dim):
            # queries may have more coordinates than keys, or fewer: the last column has the rest of
            # theirs
            is_last = j + 1 == self.dim
            query_end = None if is_last and self.query_dim > self.dim else j + 1
            query = None
            if self.sets.query is not None:
                query = self.sets.query[:, j:query_end]
            coordinate = self.sets.mapped(itemgetter((slice(None), slice(j, j + 1))))
            column = self.with_sets(coordinate.with_query(query))
            for i in range(len(self)):
                cells[i, j] = column[i : i + 1]
        return cells


@dataclass(frozen=True)
class WrittenSets:
    """The sets of some samples end to end.

    With the coefficient of each in the features of its sample.
    """

    sets: SetBatch
    offsets: Int[np.ndarray, " o"]
    coefficients: Float[np.ndarray, " s"]
    repeated: bool = False
    """Whether the sets of a sample hold the same keys in the same order, each being the query in
    turn.
    """

    def pool(self, numbers: Float[Any, "a b"], axis: int = 0) -> Float[Any, "c e"]:
        """Numbers of sets along ``axis``, which are overwritten, as numbers of samples.

        Σ_j c_j x_j.
        """
        return arrays.weighted_sums(numbers, self.coefficients, self.offsets, axis)

    def spread(self, numbers: Float[np.ndarray, "n p"]) -> Float[np.ndarray, "s p"]:
        """The transpose of `pool`: rows of samples as rows of their sets, c_j x_i."""
        rows = np.repeat(numbers, np.diff(self.offsets), axis=0)
        rows *= self.coefficients[:, None].astype(rows.dtype)
        return rows

    def of_keys(self, numbers: Float[np.ndarray, "k t"]) -> Float[np.ndarray, "l t"]:
        """Numbers of keys written out, which are overwritten, as numbers of the keys held.

        Σ_j c_j x_j over duplicates.
        """
        lengths = self.sets.lengths
        numbers *= np.repeat(self.coefficients, lengths)[:, None]
        if not self.repeated:
            return numbers
        # a sample has as many sets as keys, so that its first set, and its first key, have the same
        # number
        first = np.repeat(self.offsets[:-1], np.diff(self.offsets))
        key_held = np.arange(len(numbers)) - np.repeat(self.sets.offsets[:-1] - first, lengths)
        return np.stack([np.bincount(key_held, weights=column) for column in numbers.T], axis=1)


def check_samples(value: Any, name: str) -> None:
    """Raise if ``value`` is not a batch of samples."""
    if not isinstance(value, SampleBatch):
        raise TypeError(
            f"`{name}` must be a SetBatch: got {type(value).__name__}. Wrap arrays in "
            "kh.SetBatch(keys, query), or in kh.SetBatch.from_tokens(x) if row 0 of each set is "
            "its query."
        )


def check_sets(value: Any, name: str) -> None:
    """Raise if ``value`` is not a batch of samples of one set each, averaged over its keys."""
    check_samples(value, name)
    if not value.is_plain:
        raise TypeError(
            f"`{name}` must be a SetBatch, one set per sample: got {type(value).__name__}. Its "
            f"sets are `{name}.sets`."
        )


def samples_in(value: Any) -> SampleBatch | None:
    """A batch of samples as it is, or chosen coordinates of an array joined.

    None for anything else.
    """
    if isinstance(value, SampleBatch):
        return value
    if not isinstance(value, np.ndarray) or value.dtype != object:
        return None
    if value.ndim != 2 or value.size == 0:
        return None
    if not all(isinstance(cell, SampleBatch) for cell in value.flat):
        return None

    # every column holds one coordinate of all samples, whose sets must have the same sizes in all
    columns = [concatenate(list(column)) for column in value.T]
    sizes = [np.split(column.sets.lengths, column.set_offsets[1:-1]) for column in columns]
    for j, i in np.ndindex(len(columns), len(value)):
        if not np.array_equal(sizes[0][i], sizes[j][i]):
            raise ValueError(
                f"the coordinates of a sample must come from sets of one size: sample {i} has "
                f"{sizes[0][i].tolist()} keys in coordinate 0 and {sizes[j][i].tolist()} in "
                f"coordinate {j}. To permute coordinates, as permutation_importance does, use "
                "samples of one size; or compare fits with and without them."
            )
    first = columns[0]
    return first.with_sets(first.sets.beside([column.sets for column in columns[1:]]))


@dataclass(frozen=True, eq=False, repr=False, init=False, slots=True)
class SetBatch(SampleBatch):
    """A batch of n sets of keys, each with an optional query.

    Set i has keys x_1 … x_N in R^d, N ≥ 1 and different from set to set, and one query x_0 in
    R^{d_q}. The order of the keys never matters. Keys are stored end to end, so a long set costs
    the others nothing.

    Parameters
    ----------
    keys : array (n, N, d), or sequence of n arrays (N_i, d)
        The keys of each set.
    query : array (n, d_q), optional
        One query per set, of the kind of the keys (d_q = d) or of its own: a candidate is not a
        past purchase. Without it every set has the constant query x~_0 = [0; √2], whose length is
        that of a unit token [x; 1].
    extras : array (n, c), optional
        Sample-level features, such as a user's mean rating: estimators solve for their
        coefficients in the same ridge as for the values of the heads.
        ``kh.tokens.with_size(batch)`` adds the number of keys.
    pairs : sequence of (query coordinate, key coordinate), optional
        Coordinates that mean the same, for queries of their own kind: `read_table` pairs columns of
        one name. A head distribution that is chosen or learned on the batch has them meet; else
        coordinate i of both does, for as many as both have.

    Attributes
    ----------
    tokens : array (Σ N_i, d)
        All keys, set after set. Read-only.
    stored : array, tensor or TokenSource
        The same, or where it comes from: large sets that were chosen or scaled are not copied.
    offsets : array (n + 1,)
        Set i owns rows ``offsets[i]:offsets[i+1]`` of ``tokens``.
    query, extras, pairs : as given, or None

    Notes
    -----
    float32 input stays float32, everything else becomes float64. Arrays are copied only where that
    is needed to join or convert them. What the batch holds is read-only, but may share memory with
    the arrays it was made from: writing to those later shows in the batch.

    torch tensors stay tensors, on the device they are on, and so does what is computed from the
    batch; offsets and lengths are NumPy arrays always. `numpy` and `to` move a batch.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> batch = kh.SetBatch([np.ones((2, 3)), np.ones((5, 3))], query=np.zeros((2, 3)))
    >>> batch
    SetBatch(2 sets, 2–5 keys each (7 in all), dim 3, with query, float64)
    >>> batch.lengths
    array([2, 5])
    >>> batch[1:]
    SetBatch(1 set, 5 keys, dim 3, with query, float64)
    >>> kh.SetBatch(np.ones((2, 9, 3)), query=np.zeros((2, 5)), extras=np.zeros((2, 1)))
    SetBatch(2 sets, 9 keys each (18 in all), dim 3, with query of dim 5, 1 extra, float64)
    """

    # an array, a tensor, or a `sources.TokenSource`
    stored: Any
    offsets: Int[np.ndarray, " o"]
    query: Float[Any, "n q"] | None
    extras: Float[np.ndarray, "n c"] | None
    pairs: tuple[tuple[int, int], ...] | None
    # what was computed of the tokens of every set, a row each: kept, because it takes a pass over
    # all of them
    summaries: dict[str, np.ndarray]

    def __init__(
        self,
        keys: ArrayLike | Sequence[ArrayLike],
        query: ArrayLike | None = None,
        extras: ArrayLike | None = None,
        *,
        pairs: ArrayLike | None = None,
    ) -> None:
        tokens, offsets = _join_sets(keys, "keys")
        # queries in the type of the keys, the wider of the two
        n_sets = len(offsets) - 1
        queries = None
        query_dim = 0
        if query is not None:
            queries = arrays.check_numbers(query, "query")
            arrays.check_query(queries, n=n_sets)
            tokens, queries = arrays.alike(tokens, queries)
            arrays.check_all_finite(queries, "query")
            query_dim = int(queries.shape[1])
        self._store(
            tokens=tokens,
            offsets=offsets,
            query=queries,
            extras=arrays.check_extras(extras, n_sets),
            pairs=check_pairs(pairs, query_dim, int(tokens.shape[1])),
        )

    def _store(
        self,
        tokens: Any,
        offsets: np.ndarray,
        query: Any,
        extras: np.ndarray | None,
        pairs: Any,
        summaries: dict[str, np.ndarray] | None = None,
    ) -> None:
        """Set the fields of a frozen object, once; arrays become read-only."""
        if not isinstance(tokens, TokenSource):
            tokens = arrays.frozen(tokens)
        object.__setattr__(self, "stored", tokens)
        object.__setattr__(self, "offsets", arrays.frozen(offsets))
        object.__setattr__(self, "query", None if query is None else arrays.frozen(query))
        object.__setattr__(self, "extras", None if extras is None else arrays.frozen(extras))
        object.__setattr__(self, "pairs", pairs)
        object.__setattr__(self, "summaries", {} if summaries is None else summaries)

    @property
    def tokens(self) -> Float[Any, "t d"]:
        """All keys, set after set, in one array: a copy where large sets were scaled or chosen."""
        return in_memory(self.stored)

    def token_rows(self, start: int, stop: int) -> Float[Any, "r d"]:
        """Rows of ``tokens``; of large sets only these are scaled, or read."""
        return token_rows(self.stored, start, stop)

    def fill_rows(self, start: int, stop: int, out: Float[np.ndarray, "r d"]) -> None:
        """Write rows of ``tokens`` to an array, which may have another precision."""
        fill_rows(self.stored, start, stop, out)

    def keys_of(self, i: int) -> Float[Any, "k d"]:
        """The keys of set i."""
        return self.token_rows(int(self.offsets[i]), int(self.offsets[i + 1]))

    @property
    def n_tokens(self) -> int:
        """The keys of all sets together."""
        return int(self.offsets[-1])

    @property
    def is_large(self) -> bool:
        """Whether keys in host memory are so many that they are not copied."""
        return not is_tensor(self.stored) and self.nbytes >= sources.LAZY_BYTES

    @property
    def is_on_disk(self) -> bool:
        """Whether keys are read from files whenever they are asked for."""
        return is_on_disk(self.stored)

    def statistics(self) -> Float[np.ndarray, "n 4 d"]:
        """Mean, standard deviation, least and largest value of each coordinate of each set.

        They are computed once, and kept.
        """
        if "statistics" not in self.summaries:
            parts = []
            block_bytes = DEVICE_BLOCK_BYTES if is_tensor(self.stored) else BLOCK_BYTES
            for rows in set_blocks(self.offsets, block_size(self.dim * 8, block_bytes)):
                block = self[rows]
                parts.append(statistics_of_sets(block.tokens, block.offsets))
            self.summaries["statistics"] = np.concatenate(parts)
        return self.summaries["statistics"]

    @classmethod
    def from_tokens(cls, x: Any) -> SetBatch:
        """Build a batch from token arrays whose row 0 is the query: the paper's x_{0:N}.

        Parameters
        ----------
        x : array (n, 1+N, d), or sequence of n arrays (1+N_i, d)
            Row 0 of each set is its query, the other rows are its keys.

        Examples
        --------
        >>> import numpy as np
        >>> SetBatch.from_tokens(np.zeros((4, 1 + 6, 3)))
        SetBatch(4 sets, 6 keys each (24 in all), dim 3, with query, float64)
        """
        tokens, offsets = _join_sets(x, "x")
        lengths = np.diff(offsets)
        if lengths.min() < 2:
            i = int(lengths.argmin())
            raise ValueError(
                f"each set of `x` must have a query (row 0) and at least one key: set {i} has no "
                "keys, only its query. Drop such sets, or use SetBatch(keys) if your sets carry no "
                "query."
            )
        is_key = np.ones(len(tokens), dtype=bool)
        is_key[offsets[:-1]] = False
        queries = tokens[arrays.like(offsets[:-1], tokens)]
        return cls._from_flat(
            tokens[arrays.like(is_key, tokens)], offsets - np.arange(len(offsets)), queries
        )

    @classmethod
    def from_flat(
        cls,
        tokens: Any,
        lengths: ArrayLike,
        query: ArrayLike | None = None,
        extras: ArrayLike | None = None,
    ) -> SetBatch:
        """Build a batch from keys that lie end to end already: large sets need not be copied.

        Parameters
        ----------
        tokens : array (Σ N_i, d)
            The keys of all sets, set after set. The batch shares its memory.
        lengths : array (n,) of int
            The number of keys of each set.
        query, extras : as for `SetBatch`

        Examples
        --------
        >>> import numpy as np
        >>> SetBatch.from_flat(np.zeros((7, 3)), lengths=[2, 5])
        SetBatch(2 sets, 2–5 keys each (7 in all), dim 3, no query, float64)
        """
        keys = arrays.check_numbers(tokens, "tokens")
        counts = np.asarray(lengths)
        if keys.ndim != 2:
            raise ValueError(
                f"`tokens` must have shape (Σ N_i, d), a row per key: got {tuple(keys.shape)}."
            )
        if counts.ndim != 1 or counts.dtype.kind not in "iu":
            raise ValueError(
                "`lengths` must be a vector of integers, one per set: got shape "
                f"{counts.shape}, {counts.dtype}."
            )
        arrays.check_sizes(len(counts), counts, int(keys.shape[1]), "tokens")
        if int(counts.sum()) != len(keys):
            raise ValueError(
                f"`lengths` must add up to the rows of `tokens`: got {int(counts.sum())} for "
                f"{len(keys)} rows."
            )
        arrays.check_all_finite(keys, "tokens")
        without_query = cls._from_flat(
            keys, arrays.offsets_of(counts), None, arrays.check_extras(extras, len(counts))
        )
        if query is None:
            return without_query
        queries = arrays.check_numbers(query, "query")
        arrays.check_query(queries, n=len(counts))
        keys, queries = arrays.alike(keys, queries)
        arrays.check_all_finite(queries, "query")
        return cls._from_flat(keys, without_query.offsets, queries, without_query.extras)

    @classmethod
    def from_source(cls, tokens: TokenSource, lengths: Int[np.ndarray, " n"]) -> SetBatch:
        """Build a batch of keys that are read as they are asked for, known to be valid."""
        return cls._from_flat(tokens, arrays.offsets_of(lengths), None)

    def loaded(self) -> SetBatch:
        """The same sets with their keys in memory."""
        return self._from_flat(
            self.tokens, self.offsets, self.query, self.extras, self.pairs, self.summaries
        )

    @classmethod
    def _from_flat(
        cls,
        tokens: Any,
        offsets: np.ndarray,
        query: Any,
        extras: Any = None,
        pairs: Any = None,
        summaries: dict[str, np.ndarray] | None = None,
    ) -> SetBatch:
        """Wrap arrays that are known to be valid."""
        batch = cls.__new__(cls)
        batch._store(tokens, offsets, query, extras, pairs, summaries)
        return batch

    def with_extras(self, extras: Any) -> SetBatch:
        """The same sets with other sample-level features, (n, c); or without, for None."""
        extras = arrays.check_extras(extras, len(self))
        return self._from_flat(
            self.stored, self.offsets, self.query, extras, self.pairs, self.summaries
        )

    @property
    def dim(self) -> int:
        """The token dimension d."""
        return int(self.stored.shape[1])

    @property
    def lengths(self) -> Int[np.ndarray, " n"]:
        """The number of keys of each set."""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64, as NumPy names them."""
        return np.dtype(str(self.stored.dtype).removeprefix("torch."))

    @property
    def device(self) -> str | None:
        """Where torch tensors live, such as "cpu" or "cuda:0"; None for NumPy arrays."""
        return str(self.stored.device) if is_tensor(self.stored) else None

    @property
    def sets(self) -> SetBatch:
        """The batch itself."""
        return self

    @property
    def set_offsets(self) -> Int[np.ndarray, " o"]:
        """Sample i owns set i alone."""
        return np.arange(len(self) + 1)

    @property
    def is_plain(self) -> bool:
        """Every sample is one set, averaged over its keys."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes held by the batch; of files, those that their keys would take in memory."""
        held = (self.stored, self.offsets, self.query, self.extras)
        return sum(int(array.nbytes) for array in held if array is not None)

    def astype(self, dtype: Any) -> SetBatch:
        """Return the batch in float32 or float64."""
        if np.dtype(dtype) not in (np.float32, np.float64):
            raise ValueError(f"`dtype` must be float32 or float64: got {np.dtype(dtype)}.")
        if self.dtype == np.dtype(dtype):
            return self
        query = self.query
        if query is not None:
            query = arrays.astype(query, dtype)
        if is_tensor(self.stored):
            tokens = arrays.astype(self.stored, dtype)
        else:
            tokens = changed(self.stored, _as_given, dtype)
        return self._from_flat(tokens, self.offsets, query, self.extras, self.pairs)

    def copy(self) -> SetBatch:
        """The same sets in memory of their own; keys on a disk stay there."""
        tokens = self.stored
        if not self.is_on_disk:
            tokens = arrays.copied(self.tokens)
        query = None if self.query is None else arrays.copied(self.query)
        return self._from_flat(tokens, self.offsets, query, self.extras, self.pairs, self.summaries)

    def numpy(self) -> SetBatch:
        """Return the batch in host memory, as NumPy arrays; itself if it is there."""
        if self.device is None:
            return self
        from keyhole._tensors import as_array

        return self._moved(as_array(self.stored), as_array)

    def to(self, device: str, dtype: Any = None) -> SetBatch:
        """Return the batch as torch tensors on a device: "cpu", "cuda" or "cuda:1".

        In float32 or float64, that of the batch unless given. Keys of large sets are scaled, or
        read, as they move: the host holds some megabytes of them at a time.
        """
        from keyhole import _tensors

        number = self.dtype if dtype is None else np.dtype(dtype)
        batch = self.astype(number)
        if not batch.is_large and not isinstance(batch.stored, TokenSource):
            tokens = _tensors.to_device(batch.stored, device)
        else:
            tokens = _tensors.filled_on_device(
                (self.n_tokens, self.dim), number.name, device, self.fill_rows
            )
        return batch._moved(tokens, lambda query: _tensors.to_device(query, device))

    def _moved(self, tokens: Any, move: Callable[[Any], Any]) -> SetBatch:
        """The same sets in another place: what is known of their keys stays known."""
        query = None if self.query is None else move(self.query)
        return self._from_flat(tokens, self.offsets, query, self.extras, self.pairs, self.summaries)

    def mapped(
        self, change: Callable[[Any], Any], of_query: Callable[[Any], Any] | None = None
    ) -> SetBatch:
        """The same sets with keys and queries that ``change`` makes of theirs, row by row.

        ``of_query`` of queries.
        """
        query = self.query
        if query is not None:
            change_query = of_query or change
            query = change_query(query)
        return self._from_flat(change(self.tokens), self.offsets, query, self.extras, self.pairs)

    def scaled(
        self, change: Callable[[Any], Any], of_query: Callable[[Any], Any] | None = None
    ) -> SetBatch:
        """The same sets with keys, and queries, that were scaled row by row.

        Keys of large sets are scaled as they are asked for, never all at once.
        """
        query = self.query
        if query is not None:
            change_query = of_query or change
            query = change_query(query)
        tokens = changed(self.stored, change, self.dtype)
        return self._from_flat(tokens, self.offsets, query, self.extras, self.pairs)

    def with_query(self, query: Float[Any, "n q"] | None) -> SetBatch:
        """The same sets with other queries, or none, that are known to fit.

        What was paired is not any more.
        """
        return self._from_flat(
            self.stored, self.offsets, query, self.extras, summaries=self.summaries
        )

    def with_pairs(self, pairs: tuple[tuple[int, int], ...] | None) -> SetBatch:
        """The same sets with other coordinates of query and key that mean the same."""
        return self._from_flat(
            self.stored, self.offsets, self.query, self.extras, pairs, self.summaries
        )

    def with_coordinates(
        self,
        of_keys: Float[np.ndarray, "t c"],
        of_query: Float[np.ndarray, "n c"],
        pairs: tuple[tuple[int, int], ...] | None,
    ) -> SetBatch:
        """The same sets with further coordinates of keys and queries, known to be finite, last.

        ``pairs`` are those of all coordinates. The sets must have queries.
        """
        return self._from_flat(
            tokens=arrays.with_columns(self.tokens, of_keys),
            offsets=self.offsets,
            query=arrays.with_columns(self.query, of_query),
            extras=self.extras,
            pairs=pairs,
        )

    def beside(self, others: Sequence[SetBatch]) -> SetBatch:
        """The same sets with the coordinates of sets of the same sizes after theirs."""
        batches = (self, *others)
        tokens = np.concatenate([batch.tokens for batch in batches], axis=1)
        query = None
        if self.query is not None:
            query = np.concatenate([batch.query for batch in batches], axis=1)
            if query.shape[1] == 0:
                query = None
        return self._from_flat(tokens, self.offsets, query, self.extras)

    def with_kept_keys(self, is_kept: Bool[np.ndarray, " t"]) -> SetBatch:
        """The same sets with some of their keys, at least one of each set."""
        kept_before = np.concatenate([[0], np.cumsum(is_kept)])
        if self.is_on_disk:
            # the kept keys of some megabytes of keys after the other: files are read in order
            pieces = []
            for rows in set_blocks(self.offsets, block_size(self.dim * 8, BLOCK_BYTES)):
                keys = slice(int(self.offsets[rows.start]), int(self.offsets[rows.stop]))
                pieces.append(self.token_rows(keys.start, keys.stop)[is_kept[keys]])
            tokens = np.concatenate(pieces)
        else:
            tokens = gathered_rows(self.stored, np.flatnonzero(is_kept))
        return self._from_flat(
            tokens=tokens,
            offsets=kept_before[self.offsets],
            query=self.query,
            extras=self.extras,
            pairs=self.pairs,
        )

    def with_sets(self, sets: SetBatch) -> SetBatch:
        """Those sets."""
        return sets

    def each_key_as_query(self) -> SetBatch:
        """Every key of every set as the query of a copy of its set."""
        copies = self[np.repeat(np.arange(len(self)), self.lengths)]
        return self._from_flat(copies.tokens, copies.offsets, self.tokens)

    def merged(self, set_offsets: Int[np.ndarray, " o"]) -> SetBatch:
        """All keys of runs of sets as one set each, without queries."""
        return self._from_flat(self.stored, self.offsets[set_offsets], None)

    def single_keys(self) -> SetBatch:
        """Every key as a set of its own, with the query of its set."""
        query = None
        if self.query is not None:
            query = np.repeat(self.query, self.lengths, axis=0)
        return self._from_flat(self.stored, np.arange(self.n_tokens + 1), query)

    def extended_keys(self) -> Float[Any, "t e"]:
        """All keys with a one appended: x~ = [x; 1]."""
        return arrays.with_last(self.tokens, 1.0)

    def extended_query(self) -> Float[Any, "n e"]:
        """Queries with a one appended, or the constant query [0; √2] for every set."""
        if self.query is None:
            zeros = np.zeros((len(self), self.dim), dtype=self.dtype)
            return arrays.with_last(arrays.like(zeros, self.stored), np.sqrt(2.0))
        return arrays.with_last(self.query, 1.0)

    def seen_query(self) -> Float[Any, "n e"]:
        """The same without the zeros of a constant query: (n, 1).

        To be multiplied with the last rows of heads.
        """
        if self.query is not None:
            return self.extended_query()
        return arrays.like(np.full((len(self), 1), np.sqrt(2.0), self.dtype), self.stored)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[SetBatch]:
        return (self[i : i + 1] for i in range(len(self)))

    def __getitem__(self, rows: Any) -> SetBatch:
        """Return the sets that ``rows`` names: a slice, integers, or a mask.

        One integer gives a batch of one set.
        """
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._contiguous(start, max(start, stop))
        return self._gather(self._row_numbers(rows))

    def _contiguous(self, start: int, stop: int) -> SetBatch:
        """Sets that follow each other: views of the arrays."""
        if (start, stop) == (0, len(self)):
            return self
        offsets = self.offsets[start : stop + 1]
        first = offsets[0]
        return self._from_flat(
            tokens=part_of(self.stored, int(first), int(offsets[-1])),
            offsets=offsets - first,
            query=None if self.query is None else self.query[start:stop],
            extras=None if self.extras is None else self.extras[start:stop],
            pairs=self.pairs,
            summaries={name: rows[start:stop] for name, rows in self.summaries.items()},
        )

    def _gather(self, rows: np.ndarray) -> SetBatch:
        """Sets in any order: copies, or where their keys are if they are large.

        On a device sets that follow each other are not copied either, of any size.
        """
        n_bytes = int(self.lengths[rows].sum()) * self.dim * self.dtype.itemsize
        is_large = n_bytes >= sources.LAZY_BYTES
        follow_each_other = len(rows) > 0 and bool((np.diff(rows) == 1).all())
        may_share = is_large or is_tensor(self.stored)
        if may_share and follow_each_other:
            return self._contiguous(int(rows[0]), int(rows[0]) + len(rows))

        query = self.query
        if query is not None:
            query = query[arrays.like(rows, self.stored)]
        if is_tensor(self.stored) or not is_large:
            offsets, source = arrays.gathered(self.offsets, rows)
            tokens = gathered_rows(self.stored, source)
        else:
            offsets = arrays.offsets_of(self.lengths[rows])
            tokens = runs_of(self.stored, self.offsets[rows], self.offsets[rows + 1])
        return self._from_flat(
            tokens=tokens,
            offsets=offsets,
            query=query,
            extras=None if self.extras is None else self.extras[rows],
            pairs=self.pairs,
            summaries={name: kept[rows] for name, kept in self.summaries.items()},
        )

    @classmethod
    def _joined(cls, batches: Sequence[SetBatch]) -> SetBatch:
        dims = {batch.dim for batch in batches}
        if len(dims) > 1:
            raise ValueError(f"`batches` must share their token dimension: got {sorted(dims)}.")
        # queries, extras and pairs: all batches have them, and alike, or none has
        query = arrays.joined_rows([batch.query for batch in batches], "a query")
        extras = arrays.joined_rows([batch.extras for batch in batches], "extras")
        if len({batch.pairs for batch in batches}) > 1:
            raise ValueError(
                "`batches` must pair the same coordinates of query and key: they pair different "
                "ones."
            )
        # in one array; tokens that are not in memory stay where they are
        if any(isinstance(batch.stored, TokenSource) for batch in batches):
            tokens = joined([batch.stored for batch in batches])
        else:
            tokens = arrays.concatenated([batch.tokens for batch in batches])
        return cls._from_flat(
            tokens=tokens,
            offsets=arrays.offsets_of(np.concatenate([batch.lengths for batch in batches])),
            query=query,
            extras=extras,
            pairs=batches[0].pairs,
        )

    def __repr__(self) -> str:
        # how many sets and keys
        n_sets = len(self)
        if n_sets == 0:
            sizes = "0 sets"
        else:
            span = _span(self.lengths)
            plural = "key" if span == "1" else "keys"
            if n_sets == 1:
                sizes = f"1 set, {span} {plural}"
            else:
                sizes = f"{n_sets} sets, {span} {plural} each ({self.n_tokens} in all)"

        # what they hold besides
        parts = [sizes, f"dim {self.dim}"]
        query = "no query" if self.query is None else "with query"
        if self.query_dim != self.dim:
            query += f" of dim {self.query_dim}"
        parts.append(query)
        if self.extras is not None:
            count = self.extras.shape[1]
            parts.append("1 extra" if count == 1 else f"{count} extras")
        parts.append(str(self.dtype))
        if self.device is not None:
            parts.append(f"torch on {self.device}")
        if self.is_on_disk:
            parts.append("on disk")
        return f"SetBatch({', '.join(parts)})"


def _as_given(tokens: Float[np.ndarray, "r d"]) -> Float[np.ndarray, "r d"]:
    """The tokens themselves: only their precision changes."""
    return tokens


BLOCK_BYTES = 2**25
"""Bytes of keys that are summarised at a time."""

DEVICE_BLOCK_BYTES = 2**30
"""The same on a device, which needs much work at a time to be busy."""


def _span(counts: Int[np.ndarray, " n"]) -> str:
    """The smallest and the largest of some counts, in words: "3–5", or "4" if they are equal."""
    low = int(counts.min())
    high = int(counts.max())
    return f"{low}" if low == high else f"{low}–{high}"


def concatenate(batches: Sequence[Any]) -> Any:
    """Join batches end to end.

    All must have the same dimensions, and all or none a query, and extras.

    Parameters
    ----------
    batches : sequence of SetBatch, or of SetGroups

    Examples
    --------
    >>> import numpy as np
    >>> concatenate([SetBatch(np.zeros((2, 3, 4))), SetBatch(np.zeros((1, 8, 4)))])
    SetBatch(3 sets, 3–8 keys each (14 in all), dim 4, no query, float64)
    """
    batches = list(batches)
    if not batches:
        raise ValueError("`batches` must hold at least one SetBatch: got none.")
    for batch in batches:
        check_samples(batch, "batches")
    kinds = {type(batch) for batch in batches}
    if len(kinds) > 1:
        raise ValueError(
            "`batches` must all be of one kind: got "
            f"{' and '.join(sorted(kind.__name__ for kind in kinds))}. SetGroups(batch, "
            "np.ones(len(batch), int)) makes samples of one set each."
        )
    return kinds.pop()._joined(batches)


def _join_sets(sets: Any, name: str) -> tuple[Any, np.ndarray]:
    """Return (tokens, offsets) for an (n, N, d) array or a sequence of (N_i, d) arrays, checked."""
    # what is something else already
    if isinstance(sets, SampleBatch):
        raise TypeError(
            f"`{name}` is a {type(sets).__name__} already: use it as it is, or pass its arrays."
        )
    if is_table(sets):
        raise TypeError(
            f"`{name}` must be an array or a sequence of arrays: got a table, "
            f"{type(sets).__name__}. A table with a row per key is read by kh.read_table; a row "
            "per set, one key each, is x.to_numpy()[:, None, :]."
        )

    # one array; an array of objects is one too if it has three axes, else a sequence of arrays
    sets = as_sequence(sets)
    is_array = isinstance(sets, np.ndarray)
    if is_tensor(sets) or (is_array and sets.dtype != object):
        return _join_dense(arrays.check_numbers(sets, name), name)
    if is_array and sets.ndim == 3:
        return _join_dense(check_float_array(sets, name), name)

    # a sequence of arrays
    is_scalar = is_array and sets.ndim == 0
    is_sequence = hasattr(sets, "__len__") and hasattr(sets, "__getitem__")
    if is_scalar or isinstance(sets, dict) or not is_sequence:
        raise TypeError(
            f"`{name}` must be an (n, N, d) array or a sequence of n arrays (N_i, d): got "
            f"{type(sets).__name__}."
        )
    return _join_ragged(sets, name)


def _join_dense(array: Any, name: str) -> tuple[Any, np.ndarray]:
    if array.ndim != 3:
        raise ValueError(
            f"`{name}` must have shape (n, N, d), sets × keys × coordinates, or be a list of "
            f"(N_i, d) arrays: got shape {tuple(array.shape)}. For one key per set, pass x[:, "
            "None, :]."
        )
    n, length, dim = array.shape
    arrays.check_sizes(n, np.full(n, length), dim, name)
    arrays.check_all_finite(array, name)
    return array.reshape(n * length, dim), np.arange(0, n * length + 1, length, dtype=np.int64)


def _check_same_columns(first: Any, other: Any, name: str, i: int) -> None:
    """Raise unless two tables have the same columns in one order: they are read by position."""
    columns = column_names(first)
    others = column_names(other)
    if columns != others:
        raise ValueError(
            f"all sets of `{name}` must have the same columns in the same order: set 0 has "
            f"{columns!r:.80} and set {i} has {others!r:.80}."
        )


def _join_ragged(sets: Any, name: str) -> tuple[Any, np.ndarray]:
    """The same for a sequence of arrays."""
    # every set is a matrix of as many columns
    matrices: list[Any] = []
    for i in range(len(sets)):
        if isinstance(sets[i], SampleBatch):
            raise TypeError(
                f"`{name}` must hold arrays: {name}[{i}] is a batch. Join batches with "
                "kh.concatenate."
            )
        if is_table(sets[i]) and is_table(sets[0]):
            _check_same_columns(sets[0], sets[i], name, i)
        array = arrays.check_numbers(sets[i], f"{name}[{i}]")
        if array.ndim != 2:
            raise ValueError(
                f"each set of `{name}` must have shape (N_i, d): set {i} has shape "
                f"{tuple(array.shape)}. A set of one key is x[None, :]."
            )
        if matrices and array.shape[1] != matrices[0].shape[1]:
            raise ValueError(
                f"all sets of `{name}` must share their last axis (the token dimension): set 0 has "
                f"shape {tuple(matrices[0].shape)} and set {i} has shape {tuple(array.shape)}."
            )
        matrices.append(array)
    lengths = np.array([len(array) for array in matrices], dtype=np.int64)
    dim = matrices[0].shape[1] if matrices else 1
    arrays.check_sizes(len(matrices), lengths, dim, name)

    # joined first and checked then, in one pass; if that fails, find out in which set
    tokens = arrays.concatenated(matrices)
    try:
        arrays.check_all_finite(tokens, name)
    except ValueError:
        for i, array in enumerate(matrices):
            arrays.check_all_finite(array, f"{name}[{i}]")
        raise
    return tokens, arrays.offsets_of(lengths)


@dataclass(frozen=True, eq=False, repr=False, init=False, slots=True)
class SetGroups(SampleBatch):
    """A batch of n samples, each owning one or more sets, whose features are pooled over its sets.

    Use it for keys that depend on the query. The neighbours of an atom, with their distances to it,
    are a set. A molecule is the group of the sets of its atoms.

    Parameters
    ----------
    sets : SetBatch
        All sets, those of one sample next to each other.
    counts : array (n,)
        How many sets each sample owns; at least one.
    extras : array (n, c), optional
        Sample-level features, as in `SetBatch`.

    Examples
    --------
    >>> import numpy as np
    >>> atoms = SetBatch(np.ones((5, 2, 3)), query=np.ones((5, 3)))
    >>> molecules = SetGroups(atoms, [3, 2])
    >>> molecules  # doctest: +ELLIPSIS
    SetGroups(2 samples, 2–3 sets each, of SetBatch(5 sets, 2 keys each (10 in all), ...))
    >>> len(molecules[1:].sets)
    2
    """

    sets: SetBatch
    set_offsets: Int[np.ndarray, " o"]
    extras: Float[np.ndarray, "n c"] | None

    def __init__(self, sets: SetBatch, counts: ArrayLike, extras: ArrayLike | None = None) -> None:
        check_sets(sets, "sets")
        if sets.extras is not None:
            raise ValueError(
                "extras belong to samples, which are groups of sets here: got `sets` that have "
                "them. Pass them as SetGroups(sets.with_extras(None), counts, extras), one row per "
                "sample."
            )
        check_no_mask(counts, "counts")
        # counts: whole numbers of at least one that add up to the sets
        n_sets = np.asarray(counts)
        if n_sets.ndim != 1 or n_sets.dtype.kind not in "iu" or len(n_sets) == 0:
            raise ValueError(
                f"`counts` must be a vector of integers: got shape {n_sets.shape}, {n_sets.dtype}."
            )
        if n_sets.min() < 1:
            i = int(n_sets.argmin())
            raise ValueError(
                f"every sample must own at least one set: sample {i} owns {int(n_sets[i])}."
            )
        if n_sets.sum() != len(sets):
            raise ValueError(
                f"`counts` must add up to the number of sets: got {int(n_sets.sum())} for "
                f"{len(sets)} sets."
            )
        self._store(
            sets=sets,
            offsets=arrays.offsets_of(n_sets),
            extras=arrays.check_extras(extras, len(n_sets)),
        )

    def _store(
        self, sets: SetBatch, offsets: Int[np.ndarray, " o"], extras: np.ndarray | None
    ) -> None:
        """Set the fields of a frozen object, once."""
        object.__setattr__(self, "sets", sets)
        object.__setattr__(self, "set_offsets", offsets)
        object.__setattr__(self, "extras", extras)

    def with_extras(self, extras: Any) -> SetGroups:
        """The same groups with other sample-level features, (n, c); or without, for None."""
        return self._of(self.sets, self.set_offsets, arrays.check_extras(extras, len(self)))

    counts = SampleBatch.set_counts
    """The number of sets of each sample."""

    @property
    def offsets(self) -> Int[np.ndarray, " o"]:
        """Sample i owns sets ``offsets[i]:offsets[i+1]``."""
        return self.set_offsets

    @property
    def has_own_queries(self) -> bool:
        """Yes: the sets of a sample differ by their queries, given or constant."""
        return True

    @classmethod
    def _of(
        cls, sets: SetBatch, offsets: Int[np.ndarray, " o"], extras: np.ndarray | None
    ) -> SetGroups:
        """Wrap what is known to be valid."""
        groups = cls.__new__(cls)
        groups._store(sets, offsets, extras)
        return groups

    @classmethod
    def _joined(cls, batches: Sequence[SetGroups]) -> SetGroups:
        return cls(
            sets=concatenate([batch.sets for batch in batches]),
            counts=np.concatenate([batch.counts for batch in batches]),
            extras=arrays.joined_rows([batch.extras for batch in batches], "extras"),
        )

    def with_sets(self, sets: SetBatch) -> SetGroups:
        """The same groups of other sets."""
        return self._of(sets, self.set_offsets, self.extras)

    def check_query_rule(self, query: str) -> None:
        """Raise unless queries are those given."""
        if query != "given":
            raise ValueError(
                "`query` must be 'given' for SetGroups, whose sets have their own queries: got "
                f"{query!r}. Pass a SetBatch to make queries from keys."
            )

    def __getitem__(self, rows: Any) -> SetGroups:
        """Return the samples that ``rows`` names: a slice, integers, or a mask."""
        numbers = self._row_numbers(rows)
        offsets, source = arrays.gathered(self.set_offsets, numbers)
        extras = None if self.extras is None else self.extras[numbers]
        return self._of(self.sets[source], offsets, extras)

    def __repr__(self) -> str:
        span = _span(self.counts) if len(self) else "0"
        extras = "" if self.extras is None else f", {self.extras.shape[1]} extra(s)"
        return f"SetGroups({len(self)} samples, {span} sets each{extras}, of {self.sets!r})"


@dataclass(frozen=True, eq=False)
class PooledSets(SampleBatch):
    """n samples pooled otherwise than by the mean over one set.

    By sums, over groups, over every key as the query.

    Attributes
    ----------
    base : SetBatch or SetGroups
    pooling : "mean" or "sum"
        "mean" averages over the keys of a set (ReLU/N) and over the sets of a sample; "sum" adds
        both up.
    each : bool
        Whether every key of a set of ``base``, a SetBatch, is the query in turn. Such sets are
        written out as they are asked for: a set of N keys stands for N sets of N.
    """

    base: SampleBatch = field(repr=False)
    pooling: str = "mean"
    each: bool = False

    @property
    def unpooled(self) -> SampleBatch:
        """``base``."""
        return self.base

    @property
    def sets(self) -> SetBatch:
        """All sets that are held, sample after sample."""
        return self.base.sets

    @property
    def set_offsets(self) -> Int[np.ndarray, " o"]:
        """Sample i stands for a run of sets once they are written out.

        Sets ``set_offsets[i] … set_offsets[i+1] − 1``.
        """
        if self.each:
            return self.base.sets.offsets
        return self.base.set_offsets

    @property
    def token_counts(self) -> Int[np.ndarray, " n"]:
        """Keys that each sample takes once its sets are written out."""
        if self.each:
            return self.base.token_counts**2
        return self.base.token_counts

    @property
    def is_plain(self) -> bool:
        """Whether the samples are pooled as a SetBatch is."""
        return self.base.is_plain and self.pooling == "mean" and not self.each

    @property
    def extras(self) -> Float[np.ndarray, "n c"] | None:
        """Those of ``base``."""
        return self.base.extras

    def with_extras(self, extras: Any) -> PooledSets:
        """The same samples with other sample-level features, (n, c); or without, for None."""
        return PooledSets(self.base.with_extras(extras), self.pooling, self.each)

    def with_sets(self, sets: SetBatch) -> PooledSets:
        """Other sets, pooled in the same way."""
        return PooledSets(self.base.with_sets(sets), self.pooling, self.each)

    def written_out(self) -> WrittenSets:
        """The sets that the samples stand for, and the coefficient c_j of each."""
        sets = self.base.sets
        if self.each:
            sets = sets.each_key_as_query()
        offsets = self.set_offsets
        if self.pooling == "sum":
            # a layer averages over the keys of a set: times their number this is their sum
            coefficients = sets.lengths.astype(np.float64)
        else:
            counts = np.diff(offsets)
            coefficients = np.repeat(1.0 / counts, counts)
        return WrittenSets(
            sets=sets, offsets=offsets, coefficients=coefficients, repeated=self.each
        )

    @property
    def set_coefficients(self) -> Float[np.ndarray, " s"]:
        """c_j of every set that is held, for features that are means over keys and queries."""
        if self.pooling == "mean":
            return self.base.set_coefficients
        # means times how much they are means of: keys, and queries if each key is one
        lengths = self.sets.lengths.astype(np.float64)
        if self.each:
            return np.square(lengths)
        return lengths

    @classmethod
    def _joined(cls, batches: Sequence[PooledSets]) -> PooledSets:
        if len({(b.pooling, b.each) for b in batches}) > 1:
            raise ValueError("`batches` must all be pooled in one way.")
        return cls(concatenate([b.base for b in batches]), batches[0].pooling, batches[0].each)

    def __getitem__(self, rows: Any) -> PooledSets:
        """Return some of the samples."""
        return PooledSets(self.base[rows], self.pooling, self.each)
