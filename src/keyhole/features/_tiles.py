"""A batch and its heads as the compiled loops take them: one type, heads last, cut for caches and threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, run_threads, thread_count
from keyhole._checks import check_finite, check_float_array
from keyhole.activations import POINTWISE, SOFTMAX, check_activation
from keyhole.heads import HeadDraw
from keyhole.sets import SetBatch

_TILE = 2**18  # bytes of heads worked on at a time: a quarter of a second-level cache
_CACHE = 2**21  # bytes of heads gone through for each group of sets: twice that cache, so a part of the third level
_TASK = 2e7  # operations that are worth handing to another thread
_DRAW = 40  # bytes that one entry of W takes while it is drawn, converted and packed


@dataclass(frozen=True)
class TiledLayer:
    """A batch and its heads, checked; ``of`` makes one."""

    batch: SetBatch
    heads: HeadDraw | np.ndarray
    activation: str
    dtype: np.dtype[Any]
    queries: Float[np.ndarray, " q"]  # x~_0 of every set end to end, or of one set that stands for all
    keys: Float[np.ndarray, " k"]  # every x~_i end to end
    offsets: Int[np.ndarray, " o"]

    @classmethod
    def of(cls, batch: SetBatch, heads: HeadDraw | np.ndarray, activation: str, dtype: Any) -> TiledLayer:
        """Check the arguments that all attention features share."""
        batch, activation, number = check_batch(batch), check_activation(activation), check_dtype(dtype)
        heads = check_heads(heads, batch.dim)
        tokens = narrow(batch, number)
        # sets without a query share one, which is then projected once for a group of them
        queries = (tokens if batch.query is not None else tokens[:1]).extended_query().reshape(-1)
        keys = tokens.extended_keys().reshape(-1)
        # a copy, because read-only arrays are another type to compile for, and a batch read from a pickle
        # has writable ones
        return cls(batch, heads, activation, number, queries, keys, batch.offsets.copy())

    @property
    def width(self) -> int:
        """D = d + 1."""
        return self.batch.dim + 1

    @property
    def weighting(self) -> tuple[int, float]:
        """The code of σ in the compiled loops, and M^{-1/2}, M being all heads and not those of one block."""
        return (*POINTWISE, SOFTMAX).index(self.activation), 1.0 / math.sqrt(len(self.heads))

    def head_blocks(
        self, memory_budget: int, bytes_per_head: int = 0, *, in_cache: bool = False
    ) -> Iterator[tuple[slice, Float[np.ndarray, "m e e"]]]:
        """Cut the heads so that a block, with what it takes to draw and pack it, fits the budget."""
        size = block_size(bytes_per_head + _DRAW * self.width**2, memory_budget)
        if in_cache:
            size = min(size, block_size(self.width**2 * self.dtype.itemsize, _CACHE))
        for part in blocks(len(self.heads), size):
            heads = self.heads
            yield part, heads.block(part.start, part.stop) if isinstance(heads, HeadDraw) else heads[part]

    def write(
        self,
        out: Float[np.ndarray, "n p"],
        column: int,
        block: Float[np.ndarray, "m e e"],
        rows: slice,
        centre: Float[np.ndarray, "m e"] | None = None,
    ) -> None:
        """Write the features of the sets ``rows`` under a block of heads, less ``centre``, from column ``column`` on.

        Subtracting here is free, because a feature is still in a register's reach; a pass over all of them is not.
        """
        from keyhole._fused import announce_compilation
        from keyhole._fused.features import workspace, write_features

        announce_compilation(write_features)
        packed = self._pack(block)
        level = np.zeros((len(packed), 0), self.dtype)
        if centre is not None:
            level = _heads_last(centre[:, None], packed.shape[-1], self.dtype).reshape(len(packed), -1)
        flat, row = out.reshape(-1), out.shape[1]
        start = column - rows.start * row  # where the features of set 0 would begin
        wrong: list[int] = []

        def work(task: tuple[tuple[int, int], tuple[int, int]]) -> None:
            inputs = (packed, self.queries, self.keys, self.offsets, *task)
            found = write_features(*inputs, len(block), *self.weighting, level, flat, start, row, workspace(packed))
            if found >= 0:
                wrong.append(found)

        sets = self._set_ranges(rows, len(block))
        # heads that outgrow the cache are gone through in parts; so are those of a few sets, or of a huge one
        n_parts = max(-(-packed.nbytes // _CACHE), -(-thread_count() // max(1, len(sets))))
        run_threads(work, product(sets, _ranges(np.linspace(0, len(packed), min(n_parts, len(packed)) + 1))))
        if wrong:
            raise self.overflow(min(wrong))

    def add_outputs(
        self,
        out: Float[np.ndarray, "n t"],
        block: Float[np.ndarray, "m e e"],
        values: Float[np.ndarray, "m e t"],
    ) -> None:
        """Add the outputs of a block of heads to ``out``."""
        from keyhole._fused import announce_compilation
        from keyhole._fused.features import add_outputs, workspace

        announce_compilation(add_outputs)
        packed = self._pack(block)
        table = _heads_last(values.transpose(0, 2, 1), packed.shape[-1], self.dtype)
        table = table.reshape(len(packed), values.shape[2], self.width * packed.shape[-1])

        def work(sets: tuple[int, int]) -> None:
            inputs = (packed, table, self.queries, self.keys, self.offsets, sets)
            add_outputs(*inputs, *self.weighting, out, workspace(packed))

        run_threads(work, self._set_ranges(slice(0, len(out)), len(block)))

    def overflow(self, i: int) -> ValueError:
        """Return the error that says that set ``i`` has features that are not finite."""
        query = self.batch[i].extended_query().astype(np.float64)
        keys = self.batch[i].extended_keys().astype(np.float64)
        with np.errstate(all="ignore"):
            peaks = [np.abs(query @ block @ keys.T).max() for _, block in self.head_blocks(MEMORY_BUDGET)]
        peak = float(np.nan_to_num(peaks, nan=np.inf, posinf=np.inf).max())
        remedy = "Scale the tokens or the heads down"
        if self.activation == "exp":
            remedy += ", or use activation='softmax'"
        elif self.dtype == np.float32:
            remedy += ", or use dtype='float64'"
        return ValueError(
            f"features must be finite: those of set {i} overflow {self.dtype} under activation "
            f"{self.activation!r}, with scores of size up to {peak:.3g}. {remedy}."
        )

    def _pack(self, block: Float[np.ndarray, "m e e"]) -> Float[np.ndarray, "tiles e e lanes"]:
        """Tiles of heads of equal width, small enough for the cache and a whole number of vectors wide."""
        from keyhole._fused.features import VECTOR_BYTES

        lanes = VECTOR_BYTES // self.dtype.itemsize
        most = lanes * min(8, max(1, _TILE // (VECTOR_BYTES * self.width**2)))
        n_tiles = -(-len(block) // most)
        return _heads_last(block, lanes * -(-len(block) // (n_tiles * lanes)), self.dtype)

    def _set_ranges(self, rows: slice, n_heads: int) -> list[tuple[int, int]]:
        """Cut sets into ranges of equal work: 4MD·N_i operations for scores and values, 2MD² for a query."""
        offsets = self.offsets[rows.start : rows.stop + 1]
        cost = offsets - offsets[0] + self.width / 2 * np.arange(len(offsets))
        n_parts = min(8 * thread_count(), 1 + int(4 * n_heads * self.width * cost[-1] / _TASK))
        return _ranges(rows.start + np.searchsorted(cost, np.linspace(0, cost[-1], n_parts + 1)))


def _heads_last(
    array: Float[np.ndarray, "m a b"], lanes: int, dtype: np.dtype[Any]
) -> Float[np.ndarray, "tiles a b lanes"]:
    """Cut axis 0 into tiles and put it last, with zeros after the last head."""
    tiles = np.zeros((-(-len(array) // lanes), *array.shape[1:], lanes), dtype)
    with np.errstate(over="ignore"):  # what overflows here shows in the features
        for tile, part in zip(tiles, blocks(len(array), lanes), strict=True):
            tile[..., : part.stop - part.start] = np.moveaxis(array[part], 0, -1)
    return tiles


def _ranges(cuts: np.ndarray) -> list[tuple[int, int]]:
    """Return (first, last) between consecutive different cuts."""
    cuts = np.unique(cuts.astype(np.int64))
    return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))


def check_batch(batch: SetBatch) -> SetBatch:
    """Return ``batch`` if it is a SetBatch."""
    if not isinstance(batch, SetBatch):
        raise TypeError(
            f"`batch` must be a SetBatch: got {type(batch).__name__}. Wrap arrays: kh.SetBatch(keys, query)."
        )
    return batch


def check_dtype(dtype: Any) -> np.dtype[Any]:
    """Return float32 or float64, the latter for None."""
    try:
        number = np.dtype(np.float64 if dtype is None else dtype)
    except TypeError:
        number = np.dtype(object)
    if number not in (np.float32, np.float64):
        raise ValueError(f"`dtype` must be 'float32' or 'float64': got {dtype!r}.")
    return number


def narrow(batch: SetBatch, dtype: np.dtype[Any]) -> SetBatch:
    """Return the batch in ``dtype``, if its tokens fit."""
    with np.errstate(over="ignore"):
        tokens = batch.astype(dtype)
    arrays = (tokens.tokens,) if tokens.query is None else (tokens.tokens, tokens.query)
    if tokens is not batch and not all(np.isfinite(array).all() for array in arrays):
        raise ValueError(
            f"tokens must fit {dtype}, whose largest number is {np.finfo(dtype).max:.3g}: some of `batch` do "
            "not. Scale them down, or use dtype='float64'."
        )
    return tokens


def check_heads(heads: HeadDraw | np.ndarray, dim: int) -> HeadDraw | np.ndarray:
    """Return a draw, or an array (M, D, D), that fits tokens of dimension ``dim``."""
    if isinstance(heads, HeadDraw):
        if heads.dim != dim:
            raise ValueError(
                f"`heads` must be drawn for the dimension of the tokens: the draw is for {heads.dim}, the "
                f"tokens have {dim}. Draw them with HeadDraw(law, n_heads, dim={dim}, seed=…)."
            )
        return heads
    heads = check_float_array(heads, "heads")
    if heads.ndim != 3 or heads.shape[1:] != (dim + 1, dim + 1) or len(heads) == 0:
        raise ValueError(
            f"`heads` must have shape (M, D, D) with M ≥ 1 and D = d + 1 = {dim + 1} for tokens of dimension "
            f"{dim}: got shape {heads.shape}. The last row and column belong to the appended one; "
            f"law.sample(n_heads, dim={dim}, seed=…) draws such heads."
        )
    check_finite(heads, "heads")
    return heads
