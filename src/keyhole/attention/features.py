"""Finite heads: the features φ of one attention layer, their products with values, their parts.

The plain version is `stack_features`, a few lines over NumPy or torch for stacks of sets of equal
length; `textbook.py` has the same in NumPy for a student. Beside it stands one accelerated version,
the compiled loop that `TiledLayer` drives: for NumPy arrays and heads that fit the cache it is three
to four times as fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import (
    MEMORY_BUDGET,
    block_size,
    blocks,
    is_tensor,
    run_threads,
    set_blocks,
    thread_count,
)
from keyhole._checks import FeatureOverflowError, check_count, check_finite, check_float_array
from keyhole.attention.activations import check_activation
from keyhole.attention.heads import DRAWN_BYTES, HeadArray, HeadDraw, check_heads
from keyhole.data import arrays
from keyhole.data.sets import SampleBatch, SetBatch, WrittenSets, check_samples
from keyhole.registry import ACTIVATIONS

_TILE = 2**18
"""Bytes of heads worked on at a time: a quarter of a second-level cache."""

_CACHE = 2**21
"""Bytes of heads gone through for each group of sets: twice that cache, a part of the third level."""

_TASK = 2e7
"""Operations that are worth handing to another thread."""

_KEYS = 2**25
"""Bytes of extended keys that are laid out at a time: keys of large sets are never all copied."""

_TOKENS = 200_000
"""Tokens of pooled samples written out at a time: enough to occupy every thread, little memory."""

_STACK_BYTES = 2**24
"""Bytes of the scores of a stack in the plain version."""


def attention_features(
    batch: SampleBatch, heads: Any, activation: str = "relu", *, dtype: Any = None
) -> Float[Any, "n p"]:
    """Return the features of an attention layer with frozen heads.

    ::

        φ_m(x) = M^{-1/2} (1/N) Σ_i σ(s_mi) x~_i,     s_mi = x~_0ᵀ W_m x~_i,     x~ = [x; 1]

    and for ``activation="softmax"`` softmax_i(s_mi) instead of σ(s_mi)/N.

    Parameters
    ----------
    batch : SetBatch
        n sets of keys of dimension d. Sets without a query have the constant query x~_0 = [0; √2].
        For `SetGroups` the features of a sample are the mean of those of its sets.
    heads : array (M, D_q, D) or HeadDraw
        The frozen W_m, D = d + 1 and D_q = d_q + 1, D where there is no query. A ``HeadDraw`` is
        regenerated block by block, never stored whole.
    activation : {"relu", "linear", "square", "step", "exp", "softmax"}
        σ; "step" is 1 for positive scores.
    dtype : "float64" or "float32", optional
        Type of the arithmetic and of the result, float64 unless given; for torch tensors that of
        the tensors.

    Returns
    -------
    array (n, M·D)
        Column m·D + e is coordinate e of φ_m. For a batch of torch tensors, a tensor on their
        device.

    Notes
    -----
    Cost: 2MD_qD + 4MD·N_i operations for a set of N_i keys, whatever the lengths of the others.
    Without a query 4MD·N_i, and of a ``HeadDraw`` the last rows are drawn, MD numbers
    (benchmarks/bench_wide.py). The features of a set are computed in the same order whatever else
    is in the batch: slicing it changes no bit of them.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> batch = kh.SetBatch([np.ones((2, 3)), np.ones((5, 3))], query=np.zeros((2, 3)))
    >>> heads = kh.GaussianHeads().sample(n_heads=10, dim=3, seed=0)
    >>> kh.attention_features(batch, heads).shape
    (2, 40)
    """
    check_samples(batch, "batch")
    check_activation(activation)
    heads = heads_seen_by(batch, heads, keep_tensor=batch.device is not None)
    parts = [features for _, features in feature_blocks(batch, heads, activation, dtype=dtype)]
    return parts[0] if len(parts) == 1 else _side_by_side(parts)


def heads_seen_by(
    batch: SampleBatch, heads: Any, *, keep_tensor: bool = False
) -> HeadDraw | HeadArray:
    """The heads, checked against the samples.

    Of heads for samples without a query, the last rows.
    """
    return check_heads(
        heads, batch.dim, batch.query_dim, query=batch.has_query, keep_tensor=keep_tensor
    )


def written_blocks(batch: SampleBatch, bytes_per_set: int) -> Iterator[tuple[slice, WrittenSets]]:
    """Yield consecutive samples with their sets written out, block by block.

    A block has about ``_TOKENS`` tokens, fewer where ``bytes_per_set`` of results is large.
    """
    batch = batch.numpy()
    # Where results are large, a token counts as several, so that a block stays within a quarter
    # of the memory budget.
    token_cost = max(1, bytes_per_set * _TOKENS // (MEMORY_BUDGET // 4) // 8)
    cost = np.cumsum(batch.token_counts * token_cost)
    start = 0
    cost_before = 0
    while start < len(batch):
        stop = int(np.searchsorted(cost, cost_before + _TOKENS, side="right"))
        stop = max(start + 1, stop)
        cost_before = cost[stop - 1]
        yield slice(start, stop), batch[start:stop].written_out()
        start = stop


def check_dtype(dtype: Any) -> np.dtype[Any]:
    """Return float32 or float64, the latter for None."""
    if dtype is None:
        return np.dtype(np.float64)
    try:
        number = np.dtype(dtype)
    except TypeError:
        number = np.dtype(object)
    if number not in (np.float32, np.float64):
        raise ValueError(f"`dtype` must be 'float32' or 'float64': got {dtype!r}.")
    return number


def narrow(batch: SetBatch, dtype: np.dtype[Any]) -> SetBatch:
    """Return the batch in ``dtype``, if its tokens fit."""
    if batch.dtype == dtype:
        return batch
    return batch.mapped(partial(_narrow_rows, dtype=dtype))


def _narrow_rows(rows: Float[Any, "n e"], dtype: np.dtype[Any]) -> Float[Any, "n e"]:
    """Rows of tokens, arrays or tensors, in ``dtype``, if they fit."""
    if rows.dtype == dtype:
        return rows
    with np.errstate(over="ignore"):
        narrowed = arrays.astype(rows, dtype)
    if not arrays.all_finite(narrowed):
        raise _too_large_for(dtype)
    return narrowed


def _too_large_for(dtype: np.dtype[Any]) -> ValueError:
    """The error that says that tokens do not fit a precision."""
    return ValueError(
        f"tokens must fit {dtype}, whose largest number is {np.finfo(dtype).max:.3g}: some of "
        "`batch` do not. Scale them down, or use dtype='float64'."
    )


def _largest_size(array: np.ndarray) -> float:
    """The largest absolute value, without a copy of the array; 0 if there is none."""
    return max(float(array.max(initial=0.0)), -float(array.min(initial=0.0)))


@dataclass(frozen=True)
class KeyChunk:
    """The extended keys of consecutive sets, end to end, for the compiled loops.

    ``offsets`` are those of all sets of the batch, relative to the first key here: set i of the
    batch, which must be one of ``rows``, has the keys ``offsets[i]`` … ``offsets[i+1] − 1``.
    """

    rows: slice
    keys: Float[np.ndarray, " k"]
    offsets: Int[np.ndarray, " o"]


@dataclass(frozen=True)
class PackedHeads:
    """A block of heads in tiles (tiles, D_q, D, lanes), heads last, for the compiled loops."""

    n_heads: int
    tiles: Float[np.ndarray, "tiles f e lanes"]

    def __len__(self) -> int:
        return self.n_heads

    @property
    def n_tiles(self) -> int:
        """Tiles that hold all heads."""
        return len(self.tiles)

    @property
    def lanes(self) -> int:
        """Heads of a tile."""
        return self.tiles.shape[-1]


@dataclass(frozen=True)
class TiledLayer:
    """A batch and its heads, checked and laid out for the compiled loops; ``of`` builds one."""

    batch: SetBatch
    heads: HeadDraw | HeadArray
    activation: str
    dtype: np.dtype[Any]
    # the coordinates of queries that are not zero throughout
    used: Int[np.ndarray, " _"] | slice
    # these coordinates of x~_0 of every set end to end, or of one set that stands for all
    queries: Float[np.ndarray, " q"]
    offsets: Int[np.ndarray, " o"]
    # all x~_i, where they take little memory; else they are laid out chunk by chunk
    all_keys: list[KeyChunk]

    @classmethod
    def of(
        cls, batch: SetBatch, heads: HeadDraw | HeadArray, activation: str, dtype: Any
    ) -> TiledLayer:
        """Check the arguments that all attention features share."""
        batch = batch.numpy()
        activation = check_activation(activation)
        number = check_dtype(dtype)

        # Sets without a query share one, of one coordinate. It is projected once for a group of
        # sets, so one set stands for all.
        if batch.query is None:
            queries = _narrow_rows(batch[:1].seen_query(), number)
        else:
            queries = _narrow_rows(batch.seen_query(), number)

        # A coordinate that is zero in every query is left out: adding zeros changes no bit of a
        # sum. Selecting rows of the heads pays where it saves more than a quarter of them.
        nonzero = np.flatnonzero(queries.any(axis=0))
        n_coordinates = queries.shape[1]
        used: Int[np.ndarray, " _"] | slice
        if 0 < 4 * len(nonzero) < 3 * n_coordinates:
            used = nonzero
        else:
            used = slice(None)

        layer = cls(
            batch=batch,
            heads=heads,
            activation=activation,
            dtype=number,
            used=used,
            queries=np.ascontiguousarray(queries[:, used]).reshape(-1),
            # A copy: numba compiles read-only arrays separately, and those of a batch from a
            # pickle are writable.
            offsets=batch.offsets.copy(),
            all_keys=[],
        )
        if batch.n_tokens * layer.width * number.itemsize <= _KEYS:
            layer.all_keys.append(layer._laid_out(slice(0, len(batch))))
        return layer

    def key_chunks(self, rows: slice) -> Iterator[KeyChunk]:
        """The extended keys of some sets, in pieces of `_KEYS` bytes or of one set."""
        if self.all_keys:
            yield replace(self.all_keys[0], rows=rows)
            return
        keys_at_once = block_size(self.width * self.dtype.itemsize, _KEYS)
        offsets = self.offsets[rows.start : rows.stop + 1]
        parts = set_blocks(offsets, keys_at_once)
        # one piece of memory serves for all chunks: the system would have to hand out new pages
        most_keys = max(
            (int(offsets[part.stop] - offsets[part.start]) for part in parts), default=0
        )
        memory = np.empty((most_keys, self.width), self.dtype)
        for part in parts:
            yield self._laid_out(slice(rows.start + part.start, rows.start + part.stop), memory)

    def _laid_out(self, rows: slice, memory: Float[np.ndarray, "m e"] | None = None) -> KeyChunk:
        """[x; 1] of all keys of some sets, in the precision of the features, checked.

        They are written to ``memory``, if there is some.
        """
        first = int(self.offsets[rows.start])
        last = int(self.offsets[rows.stop])
        if memory is None:
            memory = np.empty((last - first, self.width), self.dtype)
        keys = memory[: last - first]
        with np.errstate(over="ignore"):
            self.batch.fill_rows(first, last, keys[:, :-1])
        keys[:, -1] = 1.0
        largest = _largest_size(keys)
        if not math.isfinite(largest):
            raise _too_large_for(self.dtype)
        self._check_score_range(rows, largest)
        return KeyChunk(rows=rows, keys=keys.reshape(-1), offsets=self.offsets - first)

    def _check_score_range(self, rows: slice, largest_key: float) -> None:
        """Raise if a set has a query and keys so large that their scores overflow.

        ReLU turns a score of minus infinity into a weight of zero, so that features can be finite
        where other routes to the same output are not. What is refused must not depend on the route.
        """
        # room for the size of the heads and for the sum over coordinates
        limit = 1e-8 * float(np.finfo(self.dtype).max)
        if _largest_size(self.queries) * largest_key <= limit:
            return
        for i in range(rows.start, rows.stop):
            query = self.batch[i].seen_query().astype(np.float64)
            keys = self.batch[i].extended_keys().astype(np.float64)
            if _largest_size(query) * _largest_size(keys) > limit:
                raise self.overflow(i)

    @property
    def width(self) -> int:
        """D = d + 1."""
        return self.batch.dim + 1

    @property
    def entries(self) -> int:
        """D_q·D, the numbers of one head: D_q = d_q + 1, or 1 without a query."""
        return self.heads.entries

    @property
    def outgrows_cache(self) -> bool:
        """Whether one SIMD vector of heads outgrows the cache.

        The loop would read every W again for each few sets: matrix products are faster there.
        """
        from keyhole.attention.compiled_features import VECTOR_BYTES

        if self.batch.query is None or len(self.batch) == 0:
            return False
        n_rows = len(self.queries) // len(self.batch)
        return VECTOR_BYTES * n_rows * self.width > _CACHE

    @property
    def activation_code(self) -> int:
        """The number of σ in the compiled loops."""
        return tuple(ACTIVATIONS).index(self.activation)

    @property
    def scale(self) -> float:
        """M^{-1/2}, where M counts all heads and not those of one block."""
        return 1.0 / math.sqrt(len(self.heads))

    def head_blocks(
        self, memory_budget: int, bytes_per_head: int = 0
    ) -> Iterator[tuple[slice, PackedHeads]]:
        """Cut the heads so that a block fits the budget, what it takes to draw and pack it too."""
        size = block_size(bytes_per_head + DRAWN_BYTES * self.entries, memory_budget)
        for part, block in self.heads.blocks(size):
            used = np.asarray(block)[:, self.used]
            _, lanes = self._tiling(len(used), used[0].size)
            tiles = _heads_last(used, lanes, self.dtype)
            yield part, PackedHeads(n_heads=len(block), tiles=tiles)

    def write(
        self,
        out: Float[np.ndarray, "n p"],
        column: int,
        heads: PackedHeads,
        rows: slice,
    ) -> None:
        """Write the features of the sets ``rows`` under a block of heads.

        They go to the columns of ``out`` from ``column`` on.
        """
        from keyhole._compiled import announce_compilation
        from keyhole.attention.compiled_features import workspace, write_features

        announce_compilation(write_features)
        n_tiles = heads.n_tiles

        # The compiled loop counts places in the flat output itself, from where the features of
        # set 0 would begin.
        flat = out.reshape(-1)
        row_length = out.shape[1]
        start = column - rows.start * row_length
        overflown_sets: list[int] = []

        def work(chunk: KeyChunk, task: tuple[tuple[int, int], tuple[int, int]]) -> None:
            sets, tile_range = task
            overflown = write_features(
                heads.tiles,
                self.queries,
                chunk.keys,
                chunk.offsets,
                sets,
                tile_range,
                len(heads),
                self.activation_code,
                self.scale,
                flat,
                start,
                row_length,
                workspace(heads.tiles),
            )
            if overflown >= 0:
                overflown_sets.append(overflown)

        # A task is a range of sets times a range of tiles. The tiles are cut too where the heads
        # outgrow the cache, and where there are fewer ranges of sets than threads.
        for chunk in self.key_chunks(rows):
            set_ranges = self._set_ranges(chunk.rows, heads)
            parts_for_cache = -(-heads.tiles.nbytes // _CACHE)
            parts_for_threads = -(-thread_count() // max(1, len(set_ranges)))
            n_parts = min(max(parts_for_cache, parts_for_threads), n_tiles)
            tile_ranges = _ranges(np.linspace(0, n_tiles, n_parts + 1))
            run_threads(partial(work, chunk), product(set_ranges, tile_ranges))
            if overflown_sets:
                raise self.overflow(min(overflown_sets))

    def overflow(self, i: int) -> FeatureOverflowError:
        """Return the error that says that set ``i`` has features that are not finite."""
        query = self.batch[i].seen_query().astype(np.float64)
        keys = self.batch[i].extended_keys().astype(np.float64)

        # The largest score of the set is the evidence that the message gives.
        with np.errstate(all="ignore"):
            size = block_size(DRAWN_BYTES * self.entries, MEMORY_BUDGET)
            peaks = [np.abs(query @ block @ keys.T).max() for _, block in self.heads.blocks(size)]
        peak = float(np.nan_to_num(peaks, nan=np.inf, posinf=np.inf).max())
        return overflow_error(f"those of set {i}", self.activation, self.dtype, peak)

    def _tiling(self, n_heads: int, head_size: int) -> tuple[int, int]:
        """The number of tiles for some heads of this many numbers, and the heads of each tile.

        A tile is small enough for the cache, and a whole number of vectors wide.
        """
        from keyhole.attention.compiled_features import VECTOR_BYTES

        vector_length = VECTOR_BYTES // self.dtype.itemsize
        # at most eight vectors of heads in a tile, fewer where the heads are large
        vectors_per_tile = min(8, max(1, _TILE // (VECTOR_BYTES * head_size)))
        n_tiles = -(-n_heads // (vector_length * vectors_per_tile))
        # the narrowest tiles of which as many hold all heads
        lanes = vector_length * -(-n_heads // (n_tiles * vector_length))
        # narrower tiles may be fewer than before
        return -(-n_heads // lanes), lanes

    def _set_ranges(self, rows: slice, heads: PackedHeads) -> list[tuple[int, int]]:
        """Cut sets into ranges of equal work.

        4MD·N_i operations for scores and values, 2MD_qD for a query.
        """
        # The work of the first i sets, in units of 4MD: a query counts as D_q/2 keys.
        offsets = self.offsets[rows.start : rows.stop + 1]
        query_work = self.entries / self.width / 2
        work_before = offsets - offsets[0] + query_work * np.arange(len(offsets))

        # A few ranges for each thread, but none that is not worth a thread's while.
        operations = 4 * len(heads) * self.width * work_before[-1]
        n_parts = min(8 * thread_count(), 1 + int(operations / _TASK))
        cuts = np.searchsorted(work_before, np.linspace(0, work_before[-1], n_parts + 1))
        return _ranges(rows.start + cuts)


def _heads_last(
    array: Float[np.ndarray, "m a b"], lanes: int, dtype: np.dtype[Any]
) -> Float[np.ndarray, "tiles a b lanes"]:
    """Cut axis 0 into tiles and put it last, with zeros after the last head."""
    n_tiles = -(-len(array) // lanes)
    tiles = np.zeros((n_tiles, *array.shape[1:], lanes), dtype)
    with np.errstate(over="ignore"):  # what overflows here shows in the features
        for tile, part in zip(tiles, blocks(len(array), lanes), strict=True):
            tile[..., : part.stop - part.start] = np.moveaxis(array[part], 0, -1)
    return tiles


def _ranges(cuts: np.ndarray) -> list[tuple[int, int]]:
    """Return (first, last) between consecutive different cuts."""
    cuts = np.unique(cuts.astype(np.int64))
    return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))


def overflow_error(
    what: str, activation: str, dtype: Any, peak: float | None = None
) -> FeatureOverflowError:
    """The error that says that features are not finite."""
    scores = ""
    if peak is not None:
        scores = f", with scores of size up to {peak:.3g}"
    remedy = "Scale the tokens or the heads down"
    if activation == "exp":
        remedy += ", or use activation='softmax'"
    elif "32" in str(dtype):
        remedy += ", or use dtype='float64'"
    return FeatureOverflowError(
        f"features must be finite: {what} overflow {str(dtype).removeprefix('torch.')} under "
        f"activation {activation!r}{scores}. {remedy}."
    )


# ---- the plain version, over NumPy or torch


def namespace_of(array: Any) -> Any:
    """NumPy, or torch where there is a tensor."""
    if not is_tensor(array):
        return np
    import torch

    return torch


def projected_heads(queries: Float[Any, "b f"], heads: Float[Any, "m f e"]) -> Float[Any, "b m e"]:
    """x~_0ᵀ W_m of every query and head, by one matrix product."""
    n_heads, n_rows, width = heads.shape
    side_by_side = heads.swapaxes(0, 1).reshape(n_rows, n_heads * width)
    return (queries @ side_by_side).reshape(len(queries), n_heads, width)


def weights_of_keys(
    activation: str, queries: Float[Any, "b f"], keys: Float[Any, "b k e"], heads: Any
) -> Float[Any, "b m k"]:
    """The weight of every key under every head: σ(s)/N, or softmax over the set."""
    xp = namespace_of(keys)
    record = ACTIVATIONS[activation]
    scores = projected_heads(queries, heads) @ keys.swapaxes(1, 2)
    weights = record.value(xp, scores)
    if record.is_pointwise:
        weights = weights / keys.shape[1]
    return weights


def stack_features(
    activation: str, queries: Float[Any, "b f"], keys: Float[Any, "b k e"], heads: Any
) -> Float[Any, "b m e"]:
    """Σ_i weight_mi x~_i of a stack of sets of one length: features without M^{-1/2}.

    ``queries`` and ``keys`` are extended, [x; 1]; without a query ``queries`` are [√2], and
    ``heads`` the last rows (M, 1, D) of the heads.
    """
    return weights_of_keys(activation, queries, keys, heads) @ keys


@dataclass(frozen=True)
class Stack:
    """Sets of one length: their numbers, extended queries (b, D_q) and extended keys (b, N, D)."""

    rows: Int[np.ndarray, " b"]
    places: Int[np.ndarray, "b k"]
    queries: Any
    keys: Any


def stacks(
    batch: SetBatch, n_heads: int, dtype: Any = None, each: bool = False
) -> Iterator[Stack]:
    """All sets in stacks of equal length, small enough for the scores of so many heads.

    With ``each`` every key of a set is its query in turn: a stack then has a set for each of them.
    """
    lengths = batch.lengths
    order = np.argsort(lengths, kind="stable")
    changes = np.flatnonzero(np.diff(lengths[order])) + 1
    tokens = batch.tokens if dtype is None else arrays.astype(batch.tokens, dtype)
    queries = like_tokens(batch.seen_query(), tokens)
    for equal in np.split(order, changes):
        if len(equal) == 0:
            continue
        n_keys = int(lengths[equal[0]])
        n_queries = n_keys if each else 1
        numbers = n_heads * (2 * (batch.dim + 1) + 2 * n_keys) * n_queries
        for part in blocks(len(equal), block_size(8 * numbers, _STACK_BYTES)):
            rows = equal[part]
            places = batch.offsets[rows][:, None] + np.arange(n_keys)
            keys = arrays.with_last(tokens[places.ravel()], 1.0)
            keys = keys.reshape(len(rows), n_keys, batch.dim + 1)
            yield Stack(rows=rows, places=places, queries=queries[rows], keys=keys)


def tokens_dtype(tokens: Any) -> str:
    """"float32" or "float64"."""
    return str(tokens.dtype).removeprefix("torch.")


def plain_features(
    samples: SampleBatch, heads: Any, activation: str, dtype: Any = None
) -> Float[Any, "n p"]:
    """Φ of a block of heads (m, D_q, D) without M^{-1/2}, pooled over the sets of each sample."""
    sets = samples.sets
    if dtype is None and not is_tensor(sets.stored):
        dtype = np.float64
    n_heads = heads.shape[0]
    width = sets.dim + 1
    features: Any = None
    for stack in stacks(sets, n_heads, dtype, samples.each):
        if features is None:
            heads = like_tokens(heads, stack.keys)
            features = stack.keys.new_empty((len(sets), n_heads * width)) if is_tensor(
                stack.keys
            ) else np.empty((len(sets), n_heads * width), stack.keys.dtype)
        if not samples.each:
            of_stack = stack_features(activation, stack.queries, stack.keys, heads)
        else:
            of_stack = mean_weights(activation, stack.keys, heads) @ stack.keys
        features[stack.rows] = of_stack.reshape(len(stack.rows), -1)
    if samples.is_plain or len(sets) == len(samples) and samples.pooling == "mean":
        return features
    return arrays.weighted_sums(
        features, samples.set_coefficients, samples.unpooled.set_offsets, 0
    )


def mean_weights(
    activation: str, keys: Float[Any, "b k e"], heads: Any
) -> Float[Any, "b m k"]:
    """Weights of the keys, averaged over all keys of their set as queries."""
    n_sets, n_keys, width = keys.shape
    total: Any = 0.0
    for q in range(n_keys):
        total = total + weights_of_keys(activation, keys[:, q], keys, heads)
    return total / n_keys


def like_tokens(heads: Any, tokens: Any) -> Any:
    """Heads, or queries, in the type and the place of tokens."""
    if not is_tensor(tokens):
        return np.asarray(heads, dtype=tokens.dtype)
    import torch

    # torch warns of memory that it may not write to
    array = heads if is_tensor(heads) else np.require(heads, requirements=["C", "W"])
    return torch.as_tensor(array, dtype=tokens.dtype, device=tokens.device)


# ---- all samples, all heads


def feature_blocks(
    batch: SampleBatch,
    heads: Any,
    activation: str = "relu",
    *,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
    reuse_buffer: bool = False,
) -> Iterator[tuple[slice, Float[Any, "n p"]]]:
    """Yield (heads, features) block by block of heads, within ``memory_budget`` bytes.

    Columns ``part.start·D … part.stop·D − 1`` of Φ, scaled by M^{-1/2} of all heads: Φ never exists
    as a whole. With ``reuse_buffer`` every block may be written into the same memory: it is
    overwritten when the next is asked for.
    """
    # checked here and not in the generators, so that a mistake shows where it is made
    check_samples(batch, "batch")
    check_activation(activation)
    heads = heads_seen_by(batch, heads, keep_tensor=batch.device is not None)
    memory_budget = check_count(memory_budget, "memory_budget")
    if is_tensor(batch.sets.stored):
        return _plain_blocks(batch, heads, activation, dtype, memory_budget)
    if not batch.is_plain:
        return _pooled_blocks(batch, heads, activation, check_dtype(dtype), memory_budget)
    layer = TiledLayer.of(batch.sets, heads, activation, dtype)
    if layer.outgrows_cache:
        return _plain_blocks(batch, heads, activation, check_dtype(dtype), memory_budget)
    return _tiled_blocks(layer, memory_budget, reuse_buffer)


def _plain_blocks(
    batch: SampleBatch, heads: Any, activation: str, dtype: Any, memory_budget: int
) -> Iterator[tuple[slice, Float[Any, "n p"]]]:
    """`feature_blocks` by matrix products, wherever the tokens live."""
    bytes_per_head = 2 * 8 * len(batch) * (batch.dim + 1) + DRAWN_BYTES * heads.entries
    for part, block in heads.blocks(block_size(bytes_per_head, memory_budget)):
        features = plain_features(batch, block, activation, dtype)
        features *= 1.0 / math.sqrt(len(heads))
        if not arrays.all_finite(features):
            raise overflow_error("some", activation, features.dtype)
        yield part, features


def _pooled_blocks(
    batch: SampleBatch, heads: Any, activation: str, dtype: Any, memory_budget: int
) -> Iterator[tuple[slice, Float[np.ndarray, "n p"]]]:
    """`feature_blocks` of samples of several sets, which are written out some at a time."""
    width = batch.dim + 1
    bytes_per_head = 2 * len(batch) * width * dtype.itemsize
    for part, block in heads.blocks(block_size(bytes_per_head, memory_budget)):
        features = np.empty((len(batch), len(block) * width), dtype)
        for rows, written in written_blocks(batch, features.shape[1] * features.itemsize):
            of_sets = attention_features(written.sets, block, activation, dtype=dtype)
            features[rows] = written.pool(of_sets)
        # the scaling M^{-1/2} is that of all heads, not of the block
        features *= math.sqrt(len(block) / len(heads))
        yield part, features


def _tiled_blocks(
    layer: TiledLayer, memory_budget: int, reuse_buffer: bool
) -> Iterator[tuple[slice, Float[np.ndarray, "n p"]]]:
    """`feature_blocks` of samples of one set each, by the compiled loop."""
    n_sets = len(layer.batch)
    bytes_per_head = n_sets * layer.width * layer.dtype.itemsize
    n_heads = len(layer.heads)

    # all features, where they fit: heads that outgrow the budget while they are drawn are still
    # drawn in blocks, but once only
    if bytes_per_head * n_heads <= memory_budget:
        all_features = np.empty((n_sets, n_heads * layer.width), layer.dtype)
        for part, block in layer.head_blocks(memory_budget // 4):
            layer.write(all_features, part.start * layer.width, block, slice(0, n_sets))
        yield slice(0, n_heads), all_features
        return

    buffer = np.empty(0, layer.dtype)
    for part, block in layer.head_blocks(memory_budget, bytes_per_head):
        n_columns = len(block) * layer.width
        size = n_sets * n_columns
        if size > len(buffer) or not reuse_buffer:
            buffer = np.empty(size, layer.dtype)
        features = buffer[:size].reshape(n_sets, n_columns)
        layer.write(features, 0, block, slice(0, n_sets))
        yield part, features


def _side_by_side(parts: list[Any]) -> Any:
    """Blocks of columns side by side."""
    if not is_tensor(parts[0]):
        return np.concatenate(parts, axis=1)
    import torch

    return torch.cat(parts, dim=1)


def apply_values(
    batch: SampleBatch,
    heads: Any,
    values: np.ndarray,
    activation: str = "relu",
    *,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "n t"]:
    """Return Φ·values (n, t), the outputs f(x) = Σ_m <v_m, φ_m(x)> of the layer.

    ``values`` is (M·D, t) or (M, D, t). Features are made for some samples and heads at a time.
    """
    check_samples(batch, "batch")
    heads = heads_seen_by(batch, heads, keep_tensor=batch.device is not None)
    width = batch.dim + 1
    table = _check_values(values, len(heads), width).reshape(len(heads) * width, -1)
    outputs = np.zeros((len(batch), table.shape[1]))
    budget = min(memory_budget, _OUTPUT_BYTES)
    rows_at_once = block_size(8 * len(heads) * width, budget)
    for rows in blocks(len(batch), max(rows_at_once, 64)):
        for part, features in feature_blocks(
            batch[rows], heads, activation, dtype=dtype, memory_budget=budget, reuse_buffer=True
        ):
            columns = table[part.start * width : part.stop * width]
            outputs[rows] += arrays.on_host(features @ like_tokens(columns, features))
    return outputs


_OUTPUT_BYTES = 2**27
"""Bytes of features that are made at a time where they are contracted at once."""


def key_contributions(
    batch: SampleBatch,
    heads: Any,
    values: np.ndarray,
    activation: str = "relu",
    *,
    dtype: Any = None,
) -> Float[np.ndarray, "k t"]:
    """Return what every key adds to Φ·values, sample after sample.

    c_i = M^{-1/2} Σ_m w_mi <v_m, x~_i> with w_mi the weights of the layer, σ(s_mi)/N or softmax,
    times the coefficient of the set in its sample. Where every key is a query in turn, those of a
    key are added up over queries. Sums over a sample are `apply_values`.
    """
    check_samples(batch, "batch")
    heads = heads_seen_by(batch, heads)
    width = batch.dim + 1
    table = _check_values(values, len(heads), width)
    number = check_dtype(dtype)
    contributions = []
    for _, written in written_blocks(batch, 8 * table.shape[2]):
        sets = written.sets
        out = np.zeros((sets.n_tokens, table.shape[2]))
        for part, block in heads.blocks(block_size(DRAWN_BYTES * heads.entries, 2**26)):
            drawn = np.asarray(block, dtype=number)
            # (D, m·t): one product with the keys of a set serves all heads and outputs
            of_heads = table[part].transpose(1, 0, 2).astype(number)
            for stack in stacks(sets, len(drawn), number):
                weights = weights_of_keys(activation, stack.queries, stack.keys, drawn)
                products = stack.keys @ of_heads.reshape(width, -1)
                products = products.reshape(*stack.keys.shape[:2], len(drawn), -1)
                out[stack.places] += np.einsum("bmk,bkmt->bkt", weights, products)
        if not np.isfinite(out).all():
            raise overflow_error("contributions", activation, number)
        # a key that was written out several times gets the sum
        contributions.append(written.of_keys(out / math.sqrt(len(heads))))
    return np.concatenate(contributions)


def key_features(
    batch: SampleBatch, heads: Any, activation: str
) -> Float[np.ndarray, "k p"]:
    """The part of every key in Φ: M^{-1/2} w_mi x~_i, sample after sample."""
    heads = heads_seen_by(batch, heads)
    width = batch.dim + 1
    parts = []
    for _, written in written_blocks(batch, 8 * len(heads) * width):
        sets = written.sets
        out = np.empty((sets.n_tokens, len(heads) * width))
        for part, block in heads.blocks(block_size(DRAWN_BYTES * heads.entries, 2**26)):
            columns = slice(part.start * width, part.stop * width)
            drawn = np.asarray(block, dtype=np.float64)
            for stack in stacks(sets, len(drawn) * width, np.float64):
                weights = weights_of_keys(activation, stack.queries, stack.keys, drawn)
                products = weights.swapaxes(1, 2)[:, :, :, None] * stack.keys[:, :, None, :]
                n_columns = columns.stop - columns.start
                out[stack.places, columns] = products.reshape(*stack.places.shape, n_columns)
        parts.append(written.of_keys(out / math.sqrt(len(heads))))
    return np.concatenate(parts)


def attention_weights(
    sets: SetBatch, heads: HeadDraw | HeadArray, activation: str, n_means: int = 1
) -> Float[np.ndarray, "t k"]:
    """The weight of every key, averaged over the heads of each mean; a row for each token.

    The weight is σ(s_mi)/N, or softmax_i(s_mi); mean k has the heads k, k + K, k + 2K ….
    """
    heads = heads_seen_by(sets, heads)
    totals = np.zeros((sets.n_tokens, n_means))
    heads_at_once = n_means * block_size(64 * heads.entries * n_means, MEMORY_BUDGET)
    for part, block in heads.blocks(heads_at_once):
        drawn = np.asarray(block, dtype=np.float64)
        for stack in stacks(sets, len(drawn), np.float64):
            weights = weights_of_keys(activation, stack.queries, stack.keys, drawn)
            for mean in range(n_means):
                first_head = (mean - part.start) % n_means
                totals[stack.places, mean] += weights[:, first_head::n_means].sum(axis=1)
    heads_per_mean = np.bincount(np.arange(len(heads)) % n_means, minlength=n_means)
    return totals / heads_per_mean


def _check_values(values: np.ndarray, n_heads: int, width: int) -> Float[np.ndarray, "m e t"]:
    """Return finite values as an array (M, D, t)."""
    values = check_float_array(values, "values")
    if values.ndim == 2 and len(values) == n_heads * width:
        values = values.reshape(n_heads, width, values.shape[1])
    if values.ndim != 3 or values.shape[:2] != (n_heads, width):
        raise ValueError(
            f"`values` must have shape (M·D, t) = ({n_heads * width}, t) or (M, D, t) = "
            f"({n_heads}, {width}, t) for t outputs: got shape {values.shape}. A single output is "
            "values[:, None]."
        )
    check_finite(values, "values")
    return values
