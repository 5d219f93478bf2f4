"""Finite heads: the features φ of one attention layer, and of the MLP baseline.

`attention_features` returns all features, `feature_blocks` yields them block by block of heads,
and `apply_values` contracts them with the values v without ever storing them. `textbook.py` has
the same formulas in a few lines of NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, run_threads, set_blocks, thread_count
from keyhole._checks import (
    FeatureOverflowError,
    check_choice,
    check_count,
    check_finite,
    check_float_array,
)
from keyhole.attention.activations import ACTIVATIONS, SOFTMAX, check_activation
from keyhole.attention.backends import backend_for
from keyhole.attention.heads import DRAWN_BYTES, HeadArray, HeadDraw, check_heads
from keyhole.data import arrays
from keyhole.data.sets import SampleBatch, SetBatch, WrittenSets, check_samples, check_sets

# Bytes of heads worked on at a time: a quarter of a second-level cache.
_TILE = 2**18
# Bytes of heads gone through for each group of sets: twice that cache, a part of the third level.
_CACHE = 2**21
# Operations that are worth handing to another thread.
_TASK = 2e7


_KEYS = 2**25
"""Bytes of extended keys that are laid out at a time: keys of large sets are never all copied."""


@dataclass(frozen=True)
class KeyChunk:
    """The extended keys of consecutive sets, end to end, for the compiled loops.

    ``offsets`` are those of all sets of the batch, relative to the first key here: set i of the
    batch, which must be one of ``rows``, has the keys ``offsets[i]`` … ``offsets[i+1] − 1``.
    """

    rows: slice
    keys: Float[np.ndarray, " k"]
    offsets: Int[np.ndarray, " o"]


_KEYS_TO_PROJECT = 32
"""Keys of a set, on average, from which projecting the queries of wide heads first pays."""


_PROJECTED_HEADS = 16
"""Heads at least whose projected queries must fit a quarter of the memory budget."""


@dataclass(frozen=True)
class PackedHeads:
    """A block of heads in tiles, for the compiled loops.

    The tiles are the same for all sets, (tiles, D_q, D, lanes), and meet the queries of all sets.
    Or every set has tiles of its own, (n, tiles, 1, D, lanes), in which its query is projected
    already, and ``queries`` is the number 1.
    """

    n_heads: int
    tiles: Float[np.ndarray, "... e lanes"]
    queries: Float[np.ndarray, " q"]

    def __len__(self) -> int:
        return self.n_heads

    @property
    def are_projected(self) -> bool:
        """Whether every set has tiles of its own."""
        return self.tiles.ndim == 5

    @property
    def n_tiles(self) -> int:
        """Tiles that hold all heads."""
        return self.tiles.shape[-4]

    @property
    def lanes(self) -> int:
        """Heads of a tile."""
        return self.tiles.shape[-1]

    def tiles_of(self, sets: tuple[int, int]) -> Float[np.ndarray, "tiles _ e lanes"]:
        """The tiles of a range of sets, which is one set where each has its own."""
        if self.are_projected:
            return self.tiles[sets[0]]
        return self.tiles


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
    def activation_code(self) -> int:
        """The number of σ in the compiled loops."""
        return ACTIVATIONS.index(self.activation)

    @property
    def scale(self) -> float:
        """M^{-1/2}, where M counts all heads and not those of one block."""
        return 1.0 / math.sqrt(len(self.heads))

    def head_blocks(
        self, memory_budget: int, bytes_per_head: int = 0, *, in_cache: bool = False
    ) -> Iterator[tuple[slice, PackedHeads]]:
        """Cut the heads so that a block fits the budget.

        What it takes to draw and pack the block counts too, and ``bytes_per_head`` of results. With
        ``in_cache`` the block fits the cache as well; heads that are projected always do.
        """
        if self.projects_first:
            yield from self._projected_blocks(memory_budget, bytes_per_head)
            return
        size = block_size(bytes_per_head + DRAWN_BYTES * self.entries, memory_budget)
        if in_cache:
            size = min(size, block_size(self.entries * self.dtype.itemsize, _CACHE))
        for part, block in self.heads.blocks(size):
            used = block[:, self.used]
            _, lanes = self._tiling(len(used), used[0].size)
            tiles = _heads_last(used, lanes, self.dtype)
            yield part, PackedHeads(n_heads=len(block), tiles=tiles, queries=self.queries)

    @property
    def projects_first(self) -> bool:
        """Whether x~_0ᵀ W of every set is computed by matrix products, before the compiled loops.

        Each set then has heads of one row, its own. The loops would read every W again for each few
        sets, which is slow where one SIMD vector of heads outgrows the cache. At 150 sets of 1,500
        keys, d = 768 and 128 heads, a fit takes 8.5 s of process time this way, and 22 s
        in the loops.
        """
        from keyhole.attention.compiled_features import VECTOR_BYTES

        n_sets = len(self.batch)
        if self.batch.query is None or n_sets == 0:
            return False
        n_rows = len(self.queries) // n_sets
        outgrows_cache = VECTOR_BYTES * n_rows * self.width > _CACHE
        has_large_sets = self.batch.n_tokens >= _KEYS_TO_PROJECT * n_sets
        bytes_per_head = n_sets * self.width * self.dtype.itemsize
        fits = _PROJECTED_HEADS * bytes_per_head <= MEMORY_BUDGET // 4
        return outgrows_cache and has_large_sets and fits

    def _projected_blocks(
        self, memory_budget: int, bytes_per_head: int
    ) -> Iterator[tuple[slice, PackedHeads]]:
        """`head_blocks` with x~_0ᵀ W_m of all sets, by one product for each head."""
        n_sets = len(self.batch)
        queries = self.queries.reshape(n_sets, -1)
        one = np.ones(1, self.dtype)
        projected_bytes = n_sets * self.width * self.dtype.itemsize
        # half of the budget is for what is projected, half for heads as they are drawn
        size = block_size(bytes_per_head + projected_bytes, memory_budget // 2)
        drawn_heads = self.heads.blocks(block_size(DRAWN_BYTES * self.entries, memory_budget // 2))
        heads = (head for _, block in drawn_heads for head in block[:, self.used])
        for part in blocks(len(self.heads), size):
            n_heads = part.stop - part.start
            n_tiles, lanes = self._tiling(n_heads, self.width)
            tiles = np.zeros((n_sets, n_tiles, 1, self.width, lanes), self.dtype)
            with np.errstate(over="ignore", invalid="ignore"):  # overflow shows in the features
                for m in range(n_heads):
                    head = next(heads).astype(self.dtype, copy=False)
                    tiles[:, m // lanes, 0, :, m % lanes] = queries @ head
            yield part, PackedHeads(n_heads=n_heads, tiles=tiles, queries=one)

    def write(
        self,
        out: Float[np.ndarray, "n p"],
        column: int,
        heads: PackedHeads,
        rows: slice,
        centre: Float[np.ndarray, "m e"] | None = None,
    ) -> None:
        """Write the features of the sets ``rows`` under a block of heads, less ``centre``.

        They go to the columns of ``out`` from ``column`` on. Subtracting here is free, because a
        feature is still in a register's reach; a pass over all of them is not.
        """
        from keyhole._compiled import announce_compilation
        from keyhole.attention.compiled_features import workspace, write_features

        announce_compilation(write_features)
        n_tiles = heads.n_tiles

        # The centre in the layout of the tiles; an empty one means that nothing is subtracted.
        if centre is None:
            centre_tiles = np.zeros((n_tiles, 0), self.dtype)
        else:
            centre_last = _heads_last(centre[:, None], heads.lanes, self.dtype)
            centre_tiles = centre_last.reshape(n_tiles, -1)

        # The compiled loop counts places in the flat output itself, from where the features of
        # set 0 would begin.
        flat = out.reshape(-1)
        row_length = out.shape[1]
        start = column - rows.start * row_length
        overflown_sets: list[int] = []

        def work(chunk: KeyChunk, task: tuple[tuple[int, int], tuple[int, int]]) -> None:
            sets, tile_range = task
            tiles = heads.tiles_of(sets)
            overflown = write_features(
                tiles,
                heads.queries,
                chunk.keys,
                chunk.offsets,
                sets,
                tile_range,
                len(heads),
                self.activation_code,
                self.scale,
                centre_tiles,
                flat,
                start,
                row_length,
                workspace(tiles),
            )
            if overflown >= 0:
                overflown_sets.append(overflown)

        # A task is a range of sets times a range of tiles. The tiles are cut too where the heads
        # outgrow the cache, and where there are fewer ranges of sets than threads.
        for chunk in self.key_chunks(rows):
            set_ranges = self._set_ranges(chunk.rows, heads)
            bytes_of_heads = heads.tiles_of((chunk.rows.start, chunk.rows.start + 1)).nbytes
            parts_for_cache = -(-bytes_of_heads // _CACHE)
            parts_for_threads = -(-thread_count() // max(1, len(set_ranges)))
            n_parts = min(max(parts_for_cache, parts_for_threads), n_tiles)
            tile_ranges = _ranges(np.linspace(0, n_tiles, n_parts + 1))
            run_threads(partial(work, chunk), product(set_ranges, tile_ranges))
            if overflown_sets:
                raise self.overflow(min(overflown_sets))

    def add_outputs(
        self,
        out: Float[np.ndarray, "n t"],
        heads: PackedHeads,
        values: Float[np.ndarray, "m e t"],
    ) -> None:
        """Add the outputs of a block of heads to ``out``."""
        from keyhole._compiled import announce_compilation
        from keyhole.attention.compiled_features import add_outputs, workspace

        announce_compilation(add_outputs)

        # The values in the layout of the features of a tile: coordinates, then heads.
        n_outputs = values.shape[2]
        values_last = _heads_last(values.transpose(0, 2, 1), heads.lanes, self.dtype)
        table = values_last.reshape(heads.n_tiles, n_outputs, self.width * heads.lanes)

        def work(chunk: KeyChunk, sets: tuple[int, int]) -> None:
            tiles = heads.tiles_of(sets)
            add_outputs(
                tiles,
                table,
                heads.queries,
                chunk.keys,
                chunk.offsets,
                sets,
                self.activation_code,
                self.scale,
                out,
                workspace(tiles),
            )

        for chunk in self.key_chunks(slice(0, len(self.batch))):
            run_threads(partial(work, chunk), self._set_ranges(chunk.rows, heads))

    def add_contributions(
        self,
        out: Float[np.ndarray, "k t"],
        heads: PackedHeads,
        values: Float[np.ndarray, "m e t"],
    ) -> None:
        """Add what every key adds to the outputs of a block of heads to ``out``."""
        from keyhole._compiled import announce_compilation
        from keyhole.attention.compiled_features import CHUNK, add_contributions, workspace

        announce_compilation(add_contributions)
        table = self._contribution_values(heads, values)

        def work(chunk: KeyChunk, sets: tuple[int, int]) -> None:
            mixed = np.empty((CHUNK, table.shape[-1]), self.dtype)
            tiles = heads.tiles_of(sets)
            add_contributions(
                tiles,
                table,
                heads.queries,
                chunk.keys,
                chunk.offsets,
                sets,
                self.activation_code,
                self.scale,
                out[self.offsets[chunk.rows.start] :],
                mixed,
                workspace(tiles),
            )

        for chunk in self.key_chunks(slice(0, len(self.batch))):
            run_threads(partial(work, chunk), self._set_ranges(chunk.rows, heads))

    def _contribution_values(
        self, heads: PackedHeads, values: Float[np.ndarray, "m e t"]
    ) -> Float[np.ndarray, "tiles _ _"]:
        """The values as the compiled `add_contributions` reads them.

        One output: (tiles, D, lanes), heads last. Several: (tiles, lanes, D·t), one row for each
        head, with zeros up to a whole number of vectors.
        """
        from keyhole.attention.compiled_features import VECTOR_BYTES

        n_tiles = heads.n_tiles
        lanes = heads.lanes
        n_heads, width, n_outputs = values.shape
        if n_outputs == 1:
            return _heads_last(values.transpose(0, 2, 1), lanes, self.dtype)[:, 0]

        n_columns = width * n_outputs
        vector_length = VECTOR_BYTES // self.dtype.itemsize
        padded_columns = -(-n_columns // vector_length) * vector_length
        table = np.zeros((n_tiles * lanes, padded_columns), self.dtype)
        with np.errstate(over="ignore"):  # what overflows here shows in the sums
            table[:n_heads, :n_columns] = values.reshape(n_heads, n_columns)
        return table.reshape(n_tiles, lanes, padded_columns)

    def overflow(self, i: int) -> FeatureOverflowError:
        """Return the error that says that set ``i`` has features that are not finite."""
        query = self.batch[i].seen_query().astype(np.float64)
        keys = self.batch[i].extended_keys().astype(np.float64)

        # The largest score of the set is the evidence that the message gives.
        with np.errstate(all="ignore"):
            size = block_size(DRAWN_BYTES * self.entries, MEMORY_BUDGET)
            peaks = [np.abs(query @ block @ keys.T).max() for _, block in self.heads.blocks(size)]
        peak = float(np.nan_to_num(peaks, nan=np.inf, posinf=np.inf).max())

        remedy = "Scale the tokens or the heads down"
        if self.activation == "exp":
            remedy += ", or use activation='softmax'"
        elif self.dtype == np.float32:
            remedy += ", or use dtype='float64'"
        return FeatureOverflowError(
            f"features must be finite: those of set {i} overflow {self.dtype} under activation "
            f"{self.activation!r}, with scores of size up to {peak:.3g}. {remedy}."
        )

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
        """Cut sets into ranges of equal work; into single sets where each has tiles of its own.

        4MD·N_i operations for scores and values, 2MD_qD for a query.
        """
        if heads.are_projected:
            return [(i, i + 1) for i in range(rows.start, rows.stop)]

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


# Up to so many outputs, contracting the features in cache beats a matrix product with features in
# memory.
_FUSED_OUTPUTS = 16


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
    Without a query 4MD·N_i, and of a ``HeadDraw`` the last rows are drawn, MD numbers.
    The features of a set are computed in the same order whatever else
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
    return backend_for(batch.device).features(batch, heads, activation, dtype)


def heads_seen_by(
    batch: SampleBatch, heads: Any, *, keep_tensor: bool = False
) -> HeadDraw | HeadArray:
    """The heads, checked against the samples.

    Of heads for samples without a query, the last rows.
    """
    return check_heads(
        heads, batch.dim, batch.query_dim, query=batch.has_query, keep_tensor=keep_tensor
    )


_TOKENS = 200_000
"""Tokens of pooled samples written out at a time: enough to occupy every thread, little memory."""


def pooled_features(
    batch: SampleBatch, heads: HeadDraw | HeadArray, activation: str, dtype: Any
) -> Float[np.ndarray, "n p"]:
    """Φ_i = Σ_j c_j φ(set j) over the sets of sample i, by NumPy.

    These are written out for a few samples at a time.
    """
    out = np.empty((len(batch), len(heads) * (batch.dim + 1)), check_dtype(dtype))
    for rows, written in written_blocks(batch, out.shape[1] * out.itemsize):
        out[rows] = written.pool(attention_features(written.sets, heads, activation, dtype=dtype))
    return out


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


def feature_blocks(
    batch: SampleBatch,
    heads: Any,
    activation: str = "relu",
    *,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
    reuse_buffer: bool = False,
    centre: np.ndarray | None = None,
) -> Iterator[tuple[slice, Float[np.ndarray, "n p"]]]:
    """Yield (heads, features) block by block of heads, within ``memory_budget`` bytes.

    Φ never exists as a whole.

    Columns ``part.start·D … part.stop·D − 1`` of Φ, scaled by M^{-1/2} of all heads, less those of
    ``centre`` (M·D,), which costs nothing as they are written. With ``reuse_buffer`` every block is
    written into the same memory, which saves the system's work of handing out new pages: it is
    overwritten when the next is asked for.
    """
    # Checked here and not in the generators, so that a mistake shows where it is made.
    check_samples(batch, "batch")
    heads = heads_seen_by(batch, heads)
    memory_budget = check_count(memory_budget, "memory_budget")
    if centre is not None:
        centre = np.asarray(centre).reshape(len(heads), batch.dim + 1)
    if not batch.is_plain:
        return _pooled_blocks(batch, heads, activation, check_dtype(dtype), memory_budget, centre)
    layer = TiledLayer.of(batch.sets, heads, activation, dtype)
    return _feature_blocks(layer, memory_budget, reuse_buffer, centre)


def _pooled_blocks(
    batch: SampleBatch,
    heads: HeadDraw | HeadArray,
    activation: str,
    dtype: np.dtype[Any],
    memory_budget: int,
    centre: Float[np.ndarray, "m e"] | None,
) -> Iterator[tuple[slice, Float[np.ndarray, "n p"]]]:
    """`feature_blocks` of samples of several sets."""
    # a block of features, and as much again for what it takes to compute them
    bytes_per_head = 2 * len(batch) * (batch.dim + 1) * dtype.itemsize
    for part, block in heads.blocks(block_size(bytes_per_head, memory_budget)):
        features = attention_features(batch, block, activation, dtype=dtype)
        # the scaling M^{-1/2} is that of all heads, not of the block
        features *= math.sqrt(len(block) / len(heads))
        if centre is not None:
            features -= centre[part].reshape(-1).astype(dtype)
        yield part, features


def _feature_blocks(
    layer: TiledLayer,
    memory_budget: int,
    reuse_buffer: bool,
    centre: Float[np.ndarray, "m e"] | None,
) -> Iterator[tuple[slice, Float[np.ndarray, "n p"]]]:
    """`feature_blocks` of samples of one set each."""
    n_sets = len(layer.batch)
    bytes_per_head = n_sets * layer.width * layer.dtype.itemsize
    n_heads = len(layer.heads)

    # All features, where they fit: heads that outgrow the budget while they are drawn are still
    # drawn in blocks, but once only.
    if bytes_per_head * n_heads <= memory_budget:
        all_features = np.empty((n_sets, n_heads * layer.width), layer.dtype)
        for part, block in layer.head_blocks(memory_budget // 4):
            block_centre = None if centre is None else centre[part]
            layer.write(
                all_features, part.start * layer.width, block, slice(0, n_sets), block_centre
            )
        yield slice(0, n_heads), all_features
        return

    buffer = np.empty(0, layer.dtype)
    for part, block in layer.head_blocks(memory_budget, bytes_per_head):
        n_columns = len(block) * layer.width
        size = n_sets * n_columns
        if size > len(buffer) or not reuse_buffer:
            buffer = np.empty(size, layer.dtype)
        features = buffer[:size].reshape(n_sets, n_columns)
        block_centre = None
        if centre is not None:
            block_centre = centre[part]
        layer.write(features, 0, block, slice(0, n_sets), block_centre)
        yield part, features


def apply_values(
    batch: SampleBatch,
    heads: Any,
    values: np.ndarray,
    activation: str = "relu",
    *,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "n t"]:
    """Return Φ·values (n, t) without ever forming Φ.

    They are the outputs f(x) = Σ_m <v_m, φ_m(x)> of the layer.

    ``values`` is (M·D, t) or (M, D, t). Cost: that of the features without writing them, and 2MD·t
    operations per set.
    """
    check_samples(batch, "batch")
    heads = heads_seen_by(batch, heads)
    memory_budget = check_count(memory_budget, "memory_budget")
    table = _check_values(values, len(heads), batch.dim + 1)
    n_outputs = table.shape[2]

    # Samples of several sets: outputs are linear in the features, so they are pooled alike.
    if not batch.is_plain:
        pooled = np.empty((len(batch), n_outputs))
        for rows, written in written_blocks(batch, 8 * n_outputs):
            outputs = apply_values(
                written.sets, heads, table, activation, dtype=dtype, memory_budget=memory_budget
            )
            pooled[rows] = written.pool(outputs.astype(np.float64))
        return pooled

    # Few outputs are contracted in cache, many by matrix products.
    layer = TiledLayer.of(batch.sets, heads, activation, dtype)
    out = np.zeros((len(batch), n_outputs), layer.dtype)
    if n_outputs <= _FUSED_OUTPUTS:
        for part, block in layer.head_blocks(memory_budget, in_cache=True):
            layer.add_outputs(out, block, table[part])
    else:
        _add_products(layer, table, out, memory_budget)
    finite = np.isfinite(out).all(axis=1)
    if not finite.all():
        raise layer.overflow(int(np.flatnonzero(~finite)[0]))
    return out


def key_contributions(
    batch: SampleBatch,
    heads: Any,
    values: np.ndarray,
    activation: str = "relu",
    *,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "k t"]:
    """Return what every key adds to Φ·values, sample after sample.

    c_i = M^{-1/2} Σ_m w_mi <v_m, x~_i>.

    w_mi are the weights of the layer, σ(s_mi)/N or softmax, times the coefficient of the set in its
    sample. Where every key is a query in turn, those of a key are added up over queries. Sums over
    a sample are `apply_values`. 2MD(1 + t) operations for a key, where `apply_values` takes 4MD;
    sets of more than 32 keys under softmax 2MD more.
    """
    check_samples(batch, "batch")
    heads = heads_seen_by(batch, heads)
    memory_budget = check_count(memory_budget, "memory_budget")
    table = _check_values(values, len(heads), batch.dim + 1)
    n_outputs = table.shape[2]
    contributions = []
    for _, written in written_blocks(batch, 8 * n_outputs):
        # what every key of the written sets adds, block by block of heads
        layer = TiledLayer.of(written.sets, heads, activation, dtype)
        out = np.zeros((written.sets.n_tokens, n_outputs), layer.dtype)
        for part, block in layer.head_blocks(memory_budget, in_cache=True):
            layer.add_contributions(out, block, table[part])

        overflown_keys = np.flatnonzero(~np.isfinite(out).all(axis=1))
        if len(overflown_keys):
            set_number = int(np.searchsorted(layer.offsets, overflown_keys[0], side="right")) - 1
            raise layer.overflow(set_number)

        # a key that was written out several times gets the sum
        contributions.append(written.of_keys(out.astype(np.float64)))
    return np.concatenate(contributions)


def _add_products(
    layer: TiledLayer,
    table: Float[np.ndarray, "m e t"],
    out: Float[np.ndarray, "n t"],
    memory_budget: int,
) -> None:
    """Add Φ·values to ``out`` by matrix products with blocks of features."""
    bytes_per_feature = layer.width * layer.dtype.itemsize
    # as many sets as leave room for 256 heads, so that neither sets nor heads are done one by one
    n_rows = max(1, min(len(out), memory_budget // (256 * bytes_per_feature)))
    for part, block in layer.head_blocks(memory_budget, n_rows * bytes_per_feature):
        values = table[part].reshape(-1, table.shape[2]).astype(layer.dtype, copy=False)
        buffer = np.empty((n_rows, len(values)), layer.dtype)
        for rows in blocks(len(out), n_rows):
            features = buffer[: rows.stop - rows.start]
            layer.write(features, 0, block, rows)
            out[rows] += features @ values


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


DIFFERENTIABLE = ("relu", "softmax", "linear", "square", "exp")
"""Activations whose heads have a gradient; that of "step" is zero almost everywhere."""


def attention_pullback(
    batch: SampleBatch,
    heads: Float[np.ndarray, "m f e"],
    cotangent: Float[np.ndarray, "n p"],
    activation: str = "relu",
    *,
    n_means: int | None = None,
    queries: Float[np.ndarray, "s f"] | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "k f e"]:
    """Return the gradient (K, D_q, D) of Σ <cotangent, Φ> in the means U.

    W_m = U_k + noise with k = m mod K.

    With a_m = cotangent_m / √M and g_mi = <a_m, x~_i>, the gradient in the score s_mi is σ'(s_mi)
    g_mi / N, or w_mi (g_mi − Σ_j w_mj g_mj) for softmax weights w. That in W_m is Σ_i ∂s_mi x~_0
    x~_iᵀ, summed over sets. K = M unless given. Into ``queries``, a row for each of ``batch.sets``,
    goes the gradient in their x~_0, Σ_mi ∂s_mi W_m x~_i, if it is given. Samples whose every key is
    the query in turn have none. Cost: 2MD² + 6MD·N_i operations for a set of N_i keys, about that
    of the features themselves. Sets of equal length are stacked, so nothing is padded.
    """
    check_choice(activation, "activation", DIFFERENTIABLE)
    if n_means is None:
        n_means = len(heads)
    gradient = np.zeros((n_means, *heads.shape[1:]), heads.dtype)
    query_gradient = None

    # Samples of one set each: as many sets at a time as leave room for the scores of their keys.
    if batch.is_plain:
        keys_at_once = block_size(heads.itemsize * len(heads), memory_budget // 4)
        for rows in set_blocks(batch.sets.offsets, keys_at_once):
            if queries is not None:
                query_gradient = queries[rows]
            trace = FeatureTrace.of(
                batch.sets[rows], heads, activation, memory_budget=memory_budget
            )
            gradient += trace.pullback(cotangent[rows], n_means, query_gradient)
        return gradient

    # Samples of several sets: the cotangent of a sample is spread over its sets.
    for rows, written in written_blocks(batch, cotangent.shape[1] * cotangent.itemsize):
        if queries is not None:
            sets = slice(batch.set_offsets[rows.start], batch.set_offsets[rows.stop])
            query_gradient = queries[sets]
        trace = FeatureTrace.of(written.sets, heads, activation, memory_budget=memory_budget)
        gradient += trace.pullback(written.spread(cotangent[rows]), n_means, query_gradient)
    return gradient


@dataclass(frozen=True)
class FeatureTrace:
    """The features of sets by matrix products, and the scores that their gradient needs again."""

    batch: SetBatch
    activation: str
    queries: Float[np.ndarray, "n f"] = field(repr=False)
    # the heads side by side
    wide: Float[np.ndarray, "f c"] = field(repr=False)
    width: int
    stacks: list[KeyStack] = field(repr=False)
    # (sets, heads, keys) for each stack; for softmax the weights themselves
    scores: list[Any] = field(repr=False)

    @classmethod
    def of(
        cls,
        batch: SetBatch,
        heads: Float[np.ndarray, "m f e"],
        activation: str,
        *,
        stacks: list[KeyStack] | None = None,
        memory_budget: int = MEMORY_BUDGET,
    ) -> FeatureTrace:
        """Compute all scores, in the precision of the heads.

        ``stacks`` are the keys of the batch as `key_stacks` returns them, if they are there
        already.
        """
        n_heads, rows, width = heads.shape
        if stacks is None:
            stacks = key_stacks(batch, n_heads, heads.dtype, memory_budget)

        # x~_0ᵀ W_m of all sets and heads in one matrix product
        wide = np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(rows, n_heads * width)
        # sets without a query may be given the last rows of heads alone
        if rows == 1:
            queries = batch.seen_query().astype(heads.dtype, copy=False)
        else:
            queries = batch.extended_query().astype(heads.dtype, copy=False)
        projected = (queries @ wide).reshape(len(batch), n_heads, width)

        trace = cls(
            batch=batch,
            activation=activation,
            queries=queries,
            wide=wide,
            width=width,
            stacks=stacks,
            scores=[np.zeros(0)] * len(stacks),
        )

        def work(number: int) -> None:
            set_rows, keys = trace.stacks[number]
            scores = projected[set_rows] @ keys.transpose(0, 2, 1)
            if activation == SOFTMAX:
                scores = softmax(scores)
            trace.scores[number] = scores

        trace._each(work)
        return trace

    def _each(self, work: Callable[[int], None]) -> None:
        """Do all stacks, on several threads if that is worth their while."""
        numbers = range(len(self.stacks))
        if self.batch.n_tokens * self.wide.shape[1] >= _TASK:
            run_threads(work, numbers)
        else:
            for number in numbers:
                work(number)

    @staticmethod
    def fits(batch: SampleBatch, n_heads: int, memory_budget: int = MEMORY_BUDGET) -> bool:
        """Whether samples have a trace.

        One set each, whose scores in float32 take a quarter of the budget at most.
        """
        return batch.is_plain and 4 * n_heads * batch.sets.n_tokens <= memory_budget // 4

    @property
    def n_heads(self) -> int:
        """M."""
        return self.wide.shape[1] // self.width

    def features(self) -> Float[np.ndarray, "n p"]:
        """Φ, as `attention_features` has it."""
        out = np.empty((len(self.batch), self.wide.shape[1]), self.wide.dtype)

        def work(number: int) -> None:
            set_rows, keys = self.stacks[number]
            weights = self.scores[number]
            if self.activation != SOFTMAX:
                weights = _weights_of(self.activation, weights)
            out[set_rows] = (weights @ keys).reshape(len(set_rows), -1)

        self._each(work)
        out /= math.sqrt(self.n_heads)
        return out

    def pullback(
        self,
        cotangent: Float[np.ndarray, "n p"],
        n_means: int,
        queries: Float[np.ndarray, "n f"] | None = None,
    ) -> Float[np.ndarray, "k f e"]:
        """`attention_pullback` of these features; the scores are scratch afterwards."""
        # Σ_i ∂s_mi x~_i, summed over the heads of each mean: all that the gradient in U needs
        mean_lines = np.empty((len(self.batch), n_means, self.width), self.wide.dtype)

        # The gradient in the queries needs the same for every single head. Where each head has a
        # mean of its own, that is one array.
        needs_head_lines = queries is not None and n_means != self.n_heads
        if needs_head_lines:
            head_lines = np.empty_like(cotangent, self.wide.dtype)
        else:
            head_lines = mean_lines

        def work(number: int) -> None:
            set_rows, keys = self.stacks[number]
            n_sets = len(set_rows)
            stack_cotangent = cotangent[set_rows].reshape(n_sets, self.n_heads, self.width)
            stack_cotangent = stack_cotangent.astype(self.wide.dtype, copy=False)
            # the gradient in the weights of the keys, then in place that in their scores
            slopes = stack_cotangent @ keys.transpose(0, 2, 1)
            through_weights(self.activation, self.scores[number], slopes)
            mean_lines[set_rows] = _sum_shared(slopes, n_means) @ keys
            if needs_head_lines:
                head_lines[set_rows] = (slopes @ keys).reshape(n_sets, -1)

        self._each(work)
        mean_lines /= math.sqrt(self.n_heads)

        # the gradient in x~_0: Σ_m W_m Σ_i ∂s_mi x~_i
        if queries is not None:
            queries[:] = head_lines.reshape(len(head_lines), -1) @ self.wide.T
            if needs_head_lines:
                queries /= math.sqrt(self.n_heads)

        # the gradient in U_k: Σ x~_0 (Σ_i ∂s_mi x~_i)ᵀ over the sets
        total = self.queries.T @ mean_lines.reshape(len(mean_lines), -1)
        gradient = total.reshape(len(self.wide), n_means, self.width)
        return np.ascontiguousarray(gradient.transpose(1, 0, 2))


def attention_weights(
    sets: SetBatch,
    heads: HeadDraw | HeadArray,
    activation: str,
    n_means: int = 1,
    *,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "t k"]:
    """The weight of every key, averaged over the heads of each mean.

    The weight is σ(s_mi)/N, or softmax_i(s_mi); mean k has the heads k, k + K, k + 2K ….

    A row for each of ``sets.tokens``. O(M (D_q D + D N)) operations for each set of N keys.
    """
    heads = heads_seen_by(sets, heads)
    queries = sets.seen_query().astype(np.float64)
    totals = np.zeros((sets.n_tokens, n_means))

    # Blocks of a multiple of n_means heads, stacks of sets of equal length.
    heads_at_once = n_means * block_size(64 * heads.entries * n_means, memory_budget)
    for part, block in heads.blocks(heads_at_once):
        n_heads, rows, width = block.shape
        wide = np.ascontiguousarray(block.transpose(1, 0, 2)).reshape(rows, -1)
        for set_rows, keys in key_stacks(sets, n_heads, np.dtype(np.float64), memory_budget):
            projected = (queries[set_rows] @ wide).reshape(len(set_rows), n_heads, width)
            weights = _weights_of(activation, projected @ keys.transpose(0, 2, 1))
            # where the keys of these sets stand among all tokens
            places = sets.offsets[set_rows][:, None] + np.arange(keys.shape[1])
            for mean in range(n_means):
                first_head = (mean - part.start) % n_means
                totals[places, mean] += weights[:, first_head::n_means].sum(axis=1)

    heads_per_mean = np.bincount(np.arange(len(heads)) % n_means, minlength=n_means)
    return totals / heads_per_mean


def softmax(scores: Float[np.ndarray, "b m k"]) -> Float[np.ndarray, "b m k"]:
    """Softmax over the keys, in place."""
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=2, keepdims=True)
    return scores


def _weights_of(activation: str, scores: Float[np.ndarray, "b m k"]) -> Float[np.ndarray, "b m k"]:
    """Weights of keys from their scores: σ(s)/N, or softmax over the set."""
    if activation == SOFTMAX:
        return softmax(scores)
    if activation == "relu":
        weights = np.maximum(scores, 0)
    elif activation == "linear":
        weights = scores
    elif activation == "square":
        weights = np.square(scores)
    elif activation == "exp":
        weights = np.exp(scores)
    else:  # step
        weights = (scores > 0).astype(scores.dtype)
    return np.asarray(weights / scores.shape[2])


KeyStack = tuple[Int[np.ndarray, " _"], Float[np.ndarray, "_ _ e"]]
"""Rows of sets of equal length, and their extended keys one set upon the other."""


def key_stacks(
    batch: SetBatch, n_heads: int, dtype: np.dtype[Any], memory_budget: int = MEMORY_BUDGET
) -> list[KeyStack]:
    """The extended keys of all sets, in stacks of sets of equal length.

    A stack is small enough for what ``n_heads`` heads compute from it.
    """
    lengths = batch.lengths
    width = batch.dim + 1

    # groups of sets of one length
    tokens = batch.tokens
    order = np.argsort(lengths, kind="stable")
    length_changes = np.flatnonzero(np.diff(lengths[order])) + 1
    stacks = []
    for equal_sets in np.split(order, length_changes):
        length = int(lengths[equal_sets[0]])
        # for each head two vectors and three numbers per key, and the keys twice
        numbers_per_set = n_heads * (2 * width + 3 * length) + 2 * length * width
        stack_size = block_size(dtype.itemsize * numbers_per_set, memory_budget // 16)
        for part in blocks(len(equal_sets), min(stack_size, 256)):
            rows = equal_sets[part]
            first_key = int(batch.offsets[rows[0]])
            if rows[-1] - rows[0] == len(rows) - 1:
                # sets that follow each other, whose keys are copied once only
                given = tokens[first_key : first_key + len(rows) * length]
                given = given.reshape(len(rows), length, width - 1)
            else:
                given = tokens[batch.offsets[rows][:, None] + np.arange(length)]
            keys = np.empty((len(rows), length, width), dtype)
            keys[:, :, :-1] = given
            keys[:, :, -1] = 1.0
            stacks.append((rows, keys))
    return stacks


def through_weights(
    activation: str, scores: Float[np.ndarray, "b m k"], slopes: Float[np.ndarray, "b m k"]
) -> None:
    """Turn the gradient in the weights, in place, into that in the scores.

    ``scores`` is scratch afterwards. For softmax it holds the weights, not the scores.
    """
    if activation == SOFTMAX:
        slopes -= np.einsum("bmk,bmk->bm", scores, slopes)[:, :, None]
        slopes *= scores
        return
    if activation == "relu":
        slopes *= scores > 0
    elif activation == "square":
        scores *= 2
        slopes *= scores
    elif activation == "exp":
        slopes *= np.exp(scores, out=scores)
    slopes /= scores.shape[2]


def _sum_shared(slopes: Float[np.ndarray, "b m k"], n_means: int) -> Float[np.ndarray, "b g k"]:
    """Sum over the heads m, m + K, m + 2K … that share a mean."""
    n_heads = slopes.shape[1]
    if n_means == n_heads:
        return slopes
    # whole rounds over the means first, then the heads of the last, incomplete round
    whole = n_heads // n_means * n_means
    summed = slopes[:, :whole].reshape(len(slopes), -1, n_means, slopes.shape[2]).sum(axis=1)
    summed[:, : n_heads - whole] += slopes[:, whole:]
    return np.asarray(summed)


def mlp_features(
    batch: SetBatch, weights: np.ndarray, *, dtype: Any = None
) -> Float[np.ndarray, "n p"]:
    """Return the features of the baseline: a random ReLU layer on the flattened input.

    ::

        φ(x) = p^{-1/2} max(0, W z),     z = [x_0; x_1; …; x_N; 1]

    Keys enter in their order, so these features do depend on it. Without a query, x_0 is the zero
    vector.

    Parameters
    ----------
    batch : SetBatch
        n sets of equal length N and dimension d.
    weights : array (p, (N+1)·d + 1)
        One row per hidden unit, as ``heads.sample_mlp_weights`` draws them.
    dtype : "float64" or "float32", optional
        Type of the arithmetic and of the result, float64 unless given.

    Returns
    -------
    array (n, p)

    Notes
    -----
    Cost: one matrix product, 2p((N+1)d + 1) operations per set.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> from keyhole.attention.heads import sample_mlp_weights
    >>> batch = kh.SetBatch(np.ones((4, 2, 3)))
    >>> kh.mlp_features(batch, sample_mlp_weights(width=7, n_keys=2, dim=3, seed=0)).shape
    (4, 7)
    """
    check_sets(batch, "batch")
    number = check_dtype(dtype)
    if len(batch) == 0:
        return np.empty((0, len(weights)), number)
    tokens = narrow(batch, number)
    weights = _check_weights(weights, batch, number)
    scale = number.type(1.0 / math.sqrt(len(weights)))
    out = np.empty((len(batch), len(weights)), number)
    sets_at_once = block_size(2 * weights.shape[1] * number.itemsize, MEMORY_BUDGET)
    for rows in blocks(len(batch), sets_at_once):
        # ReLU is homogeneous: scaling the inputs, which are fewer, saves a pass over the outputs
        flat = flatten_sets(tokens[rows])
        flat *= scale
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(flat, weights.T, out=out[rows])
        _check_overflow(flat, weights, out[rows])
    run_threads(lambda part: np.maximum(part, 0, out=part), np.array_split(out, 8))
    return out


def check_equal_lengths(batches: dict[str, SetBatch]) -> int:
    """Return N, the number of keys that all sets of the batches, given by name, share."""
    (name, first), *_ = batches.items()
    n_keys = int(first.lengths[0])
    for other, batch in batches.items():
        different = np.flatnonzero(batch.lengths != n_keys)
        if different.size:
            i = int(different[0])
            raise ValueError(
                "the MLP sees the keys as one long vector, so all sets must have the same number "
                f"of keys: set 0 of `{name}` has {n_keys} and set {i} of `{other}` has "
                f"{batch.lengths[i]}. Use attention_features or attention_kernel for sets of "
                "different sizes, or bring them to one size."
            )
    return n_keys


def flatten_sets(batch: SetBatch) -> Float[np.ndarray, "n z"]:
    """Return z = [x_0; x_1; …; x_N; 1] of every set, with zeros for x_0 where there is no query."""
    n_sets = len(batch)
    query_dim = batch.query_dim
    keys = batch.tokens.reshape(n_sets, -1)
    flat = np.ones((n_sets, query_dim + keys.shape[1] + 1), batch.dtype)
    if batch.query is None:
        flat[:, :query_dim] = 0
    else:
        flat[:, :query_dim] = batch.query
    flat[:, query_dim:-1] = keys
    return flat


def _check_overflow(
    flat: Float[np.ndarray, "n z"], weights: Float[np.ndarray, "p z"], units: np.ndarray
) -> None:
    """Raise if a unit is not finite; look at them only where the sizes of both factors allow it."""
    largest_input = float(max(flat.max(), -flat.min()))
    largest_weight = float(max(weights.max(), -weights.min()))
    bound = flat.shape[1] * (largest_input * largest_weight)
    if bound < float(np.finfo(units.dtype).max) or np.isfinite(units).all():
        return
    remedy = "Scale the tokens or the weights down"
    if units.dtype == np.float32:
        remedy += ", or use dtype='float64'"
    raise ValueError(
        f"features must be finite: these overflow {units.dtype}, with units of size up to "
        f"{bound:.3g}. {remedy}."
    )


def _check_weights(
    weights: np.ndarray, batch: SetBatch, dtype: np.dtype[Any]
) -> Float[np.ndarray, "p z"]:
    """Return the weights of the MLP in ``dtype``, checked against the batch."""
    n_keys = check_equal_lengths({"batch": batch})
    weights = check_float_array(weights, "weights")
    columns = batch.query_dim + n_keys * batch.dim + 1
    if weights.ndim != 2 or weights.shape[1] != columns or len(weights) == 0:
        raise ValueError(
            f"`weights` must have shape (p, (N+1)·d + 1) = (p, {columns}) for sets of {n_keys} "
            f"keys of dimension {batch.dim}: got shape {weights.shape}. "
            f"heads.sample_mlp_weights(p, {n_keys}, {batch.dim}, seed) draws such weights."
        )
    check_finite(weights, "weights")
    with np.errstate(over="ignore"):  # what overflows here shows in the features
        return weights.astype(dtype, copy=False)
