"""Finite heads: the features φ of one attention layer, whole, in blocks, or contracted with values.

The MLP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from keyhole.attention.activations import POINTWISE, SOFTMAX, check_activation
from keyhole.attention.heads import DRAWN_BYTES, HeadArray, HeadDraw, check_heads
from keyhole.data.sets import SampleBatch, SetBatch, WrittenSets, check_samples, check_sets

_TILE = 2**18  # bytes of heads worked on at a time: a quarter of a second-level cache
# bytes of heads gone through for each group of sets: twice that cache, so a part of the third level
_CACHE = 2**21
_TASK = 2e7  # operations that are worth handing to another thread


@dataclass(frozen=True)
class TiledLayer:
    """A batch and its heads, checked; ``of`` makes one."""

    batch: SetBatch
    heads: HeadDraw | HeadArray
    activation: str
    dtype: np.dtype[Any]
    used: Int[np.ndarray, " _"] | slice  # the coordinates of queries that are not zero throughout
    queries: Float[
        np.ndarray, " q"
    ]  # these of x~_0 of every set end to end, or of one set that stands for all
    keys: Float[np.ndarray, " k"]  # every x~_i end to end
    offsets: Int[np.ndarray, " o"]

    @classmethod
    def of(
        cls, batch: SetBatch, heads: HeadDraw | HeadArray, activation: str, dtype: Any
    ) -> TiledLayer:
        """Check the arguments that all attention features share."""
        batch, activation, number = batch.numpy(), check_activation(activation), check_dtype(dtype)
        tokens = narrow(batch, number)
        # sets without a query share one, of one coordinate, which is then projected once for a
        # group of them
        queries = (tokens if batch.query is not None else tokens[:1]).seen_query()
        some = np.flatnonzero(queries.any(axis=0))
        # what is multiplied by zero in every set is left out, which no bit of a sum notices
        used = some if 0 < 4 * len(some) < 3 * queries.shape[1] else slice(None)
        queries = np.ascontiguousarray(queries[:, used]).reshape(-1)
        keys = tokens.extended_keys().reshape(-1)
        # a copy, because read-only arrays are another type to compile for, and a batch read from a
        # pickle has writable ones
        return cls(batch, heads, activation, number, used, queries, keys, batch.offsets.copy())

    @property
    def width(self) -> int:
        """D = d + 1."""
        return self.batch.dim + 1

    @property
    def entries(self) -> int:
        """D_q·D, the numbers of one head: D_q = d_q + 1, or 1 without a query."""
        return self.heads.entries

    @property
    def weighting(self) -> tuple[int, float]:
        """The code of σ in the compiled loops, and M^{-1/2}.

        M is all heads and not those of one block.
        """
        return (*POINTWISE, SOFTMAX).index(self.activation), 1.0 / math.sqrt(len(self.heads))

    def head_blocks(
        self, memory_budget: int, bytes_per_head: int = 0, *, in_cache: bool = False
    ) -> Iterator[tuple[slice, Float[np.ndarray, "m f e"]]]:
        """Cut the heads so that a block fits the budget.

        What it takes to draw and pack the block counts too.
        """
        size = block_size(bytes_per_head + DRAWN_BYTES * self.entries, memory_budget)
        if in_cache:
            size = min(size, block_size(self.entries * self.dtype.itemsize, _CACHE))
        return self.heads.blocks(size)

    def write(
        self,
        out: Float[np.ndarray, "n p"],
        column: int,
        block: Float[np.ndarray, "m f e"],
        rows: slice,
        centre: Float[np.ndarray, "m e"] | None = None,
    ) -> None:
        """Write the features of the sets ``rows`` under a block of heads, less ``centre``.

        From column ``column`` on.

        Subtracting here is free, because a feature is still in a register's reach; a pass over all
        of them is not.
        """
        from keyhole.attention.compiled import announce_compilation
        from keyhole.attention.compiled_features import workspace, write_features

        announce_compilation(write_features)
        packed = self._pack(block)
        level = np.zeros((len(packed), 0), self.dtype)
        if centre is not None:
            level = _heads_last(centre[:, None], packed.shape[-1], self.dtype).reshape(
                len(packed), -1
            )
        flat, row = out.reshape(-1), out.shape[1]
        start = column - rows.start * row  # where the features of set 0 would begin
        wrong: list[int] = []

        def work(task: tuple[tuple[int, int], tuple[int, int]]) -> None:
            inputs = (packed, self.queries, self.keys, self.offsets, *task)
            found = write_features(
                *inputs, len(block), *self.weighting, level, flat, start, row, workspace(packed)
            )
            if found >= 0:
                wrong.append(found)

        sets = self._set_ranges(rows, len(block))
        # heads that outgrow the cache are gone through in parts; so are those of a few sets, or of
        # a huge one
        n_parts = max(-(-packed.nbytes // _CACHE), -(-thread_count() // max(1, len(sets))))
        run_threads(
            work, product(sets, _ranges(np.linspace(0, len(packed), min(n_parts, len(packed)) + 1)))
        )
        if wrong:
            raise self.overflow(min(wrong))

    def add_outputs(
        self,
        out: Float[np.ndarray, "n t"],
        block: Float[np.ndarray, "m f e"],
        values: Float[np.ndarray, "m e t"],
    ) -> None:
        """Add the outputs of a block of heads to ``out``."""
        from keyhole.attention.compiled import announce_compilation
        from keyhole.attention.compiled_features import add_outputs, workspace

        announce_compilation(add_outputs)

        def table(packed: np.ndarray) -> np.ndarray:
            found = _heads_last(values.transpose(0, 2, 1), packed.shape[-1], self.dtype)
            return found.reshape(len(packed), values.shape[2], self.width * packed.shape[-1])

        def add(packed: np.ndarray, *inputs: Any) -> None:
            add_outputs(packed, *inputs, *self.weighting, out, workspace(packed))

        self._add(block, table, add)

    def add_contributions(
        self,
        out: Float[np.ndarray, "k t"],
        block: Float[np.ndarray, "m f e"],
        values: Float[np.ndarray, "m e t"],
    ) -> None:
        """Add what every key adds to the outputs of a block of heads to ``out``."""
        from keyhole.attention.compiled import announce_compilation
        from keyhole.attention.compiled_features import (
            CHUNK,
            VECTOR_BYTES,
            add_contributions,
            workspace,
        )

        announce_compilation(add_contributions)

        def table(packed: np.ndarray) -> np.ndarray:
            if values.shape[2] == 1:
                return _heads_last(values.transpose(0, 2, 1), packed.shape[-1], self.dtype)[:, 0]
            columns, lanes = values.shape[1] * values.shape[2], VECTOR_BYTES // self.dtype.itemsize
            found = np.zeros(
                (len(packed) * packed.shape[-1], -(-columns // lanes) * lanes), self.dtype
            )
            with np.errstate(over="ignore"):  # shows in the sums
                found[: len(values), :columns] = values.reshape(len(values), columns)
            return found.reshape(len(packed), packed.shape[-1], found.shape[1])

        def add(packed: np.ndarray, values: np.ndarray, *inputs: Any) -> None:
            mixed = np.empty((CHUNK, values.shape[-1]), self.dtype)
            add_contributions(
                packed, values, *inputs, *self.weighting, out, mixed, workspace(packed)
            )

        self._add(block, table, add)

    def _add(
        self,
        block: np.ndarray,
        table_of: Callable[[np.ndarray], np.ndarray],
        add: Callable[..., None],
    ) -> None:
        """Call ``add`` for all sets, range by range.

        It gets a block of heads, their values and the tokens.
        """
        packed = self._pack(block)
        table = table_of(packed)

        def work(sets: tuple[int, int]) -> None:
            add(packed, table, self.queries, self.keys, self.offsets, sets)

        run_threads(work, self._set_ranges(slice(0, len(self.batch)), len(block)))

    def overflow(self, i: int) -> FeatureOverflowError:
        """Return the error that says that set ``i`` has features that are not finite."""
        query = self.batch[i].seen_query().astype(np.float64)
        keys = self.batch[i].extended_keys().astype(np.float64)
        with np.errstate(all="ignore"):
            peaks = [
                np.abs(query @ block @ keys.T).max() for _, block in self.head_blocks(MEMORY_BUDGET)
            ]
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

    def _pack(self, block: Float[np.ndarray, "m _ e"]) -> Float[np.ndarray, "tiles _ e lanes"]:
        """Tiles of heads of equal width.

        Small enough for the cache and a whole number of vectors wide.
        """
        from keyhole.attention.compiled_features import VECTOR_BYTES

        block = block[:, self.used]
        lanes = VECTOR_BYTES // self.dtype.itemsize
        most = lanes * min(8, max(1, _TILE // (VECTOR_BYTES * block[0].size)))
        n_tiles = -(-len(block) // most)
        return _heads_last(block, lanes * -(-len(block) // (n_tiles * lanes)), self.dtype)

    def _set_ranges(self, rows: slice, n_heads: int) -> list[tuple[int, int]]:
        """Cut sets into ranges of equal work.

        4MD·N_i operations for scores and values, 2MD_qD for a query.
        """
        offsets = self.offsets[rows.start : rows.stop + 1]
        cost = offsets - offsets[0] + self.entries / self.width / 2 * np.arange(len(offsets))
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
            f"tokens must fit {dtype}, whose largest number is {np.finfo(dtype).max:.3g}: some of "
            "`batch` do not. Scale them down, or use dtype='float64'."
        )
    return tokens


# Up to so many outputs, contracting the features in cache beats a matrix product with features in
# memory.
_FUSED_OUTPUTS = 16


def attention_features(
    batch: SampleBatch, heads: Any, activation: str = "relu", *, dtype: Any = None
) -> Float[Any, "n p"]:
    """Return the features of an attention layer with frozen heads.

    ::

        φ_m(x) = M^{-1/2} (1/N) Σ_i σ(s_mi) x~_i,     s_mi = x~_0ᵀ W_m x~_i,     x~ = [x; 1]

    and for ``activation="softmax"`` softmax_i(s_mi) in the place of σ(s_mi)/N.

    Parameters
    ----------
    batch : SetBatch
        n sets of keys of dimension d. Sets without a query have the constant query x~_0 = [0; √2].
        For `SetGroups` the features of a sample are the mean of those of its sets, by NumPy
        wherever they live.
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
    Cost: 2MD_qD + 4MD·N_i operations for a set of N_i keys, whatever the lengths of the others;
    without a query 4MD·N_i, and of a ``HeadDraw`` the last rows are drawn, MD numbers
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
    heads = heads_seen_by(batch, heads, keep_tensor=batch.is_plain and batch.device is not None)
    if not batch.is_plain:
        return _pooled_features(batch, heads, activation, dtype)
    if batch.device is not None:
        from keyhole.attention import dispatch

        sets = batch.sets if dtype is None else batch.sets.astype(check_dtype(dtype))
        return dispatch.attention_features(sets, heads, check_activation(activation), MEMORY_BUDGET)
    layer = TiledLayer.of(batch.sets, heads, activation, dtype)
    out = np.empty((len(batch), len(heads) * layer.width), layer.dtype)
    for part, block in layer.head_blocks(MEMORY_BUDGET):
        layer.write(out, part.start * layer.width, block, slice(0, len(batch)))
    return out


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


def _pooled_features(
    batch: SampleBatch, heads: HeadDraw | HeadArray, activation: str, dtype: Any
) -> Float[np.ndarray, "n p"]:
    """Φ_i = Σ_j c_j φ(set j) over the sets of sample i.

    These are written out for a few samples at a time.
    """
    out = np.empty((len(batch), len(heads) * (batch.dim + 1)), check_dtype(dtype))
    for rows, written in written_blocks(batch, out.shape[1] * out.itemsize):
        out[rows] = written.pool(attention_features(written.sets, heads, activation, dtype=dtype))
    return out


def written_blocks(batch: SampleBatch, bytes_per_set: int) -> Iterator[tuple[slice, WrittenSets]]:
    """Runs of samples that write out to few enough tokens.

    Their sets have few enough features.
    """
    batch = batch.numpy()
    cost = np.cumsum(
        batch.token_counts * max(1, bytes_per_set * _TOKENS // (MEMORY_BUDGET // 4) // 8)
    )
    start = 0
    while start < len(batch):
        before = cost[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(cost, before + _TOKENS, side="right")))
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
    # checked here and not in the generators, so that a mistake shows where it is made
    check_samples(batch, "batch")
    heads, memory_budget = heads_seen_by(batch, heads), check_count(memory_budget, "memory_budget")
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
    for part, block in heads.blocks(
        block_size(2 * len(batch) * (batch.dim + 1) * dtype.itemsize, memory_budget)
    ):
        features = attention_features(batch, block, activation, dtype=dtype)
        features *= math.sqrt(len(block) / len(heads))  # the scaling M^{-1/2} is that of all heads
        if centre is not None:
            features -= centre[part].reshape(-1).astype(dtype)
        yield part, features


def _feature_blocks(
    layer: TiledLayer,
    memory_budget: int,
    reuse_buffer: bool,
    centre: Float[np.ndarray, "m e"] | None,
) -> Iterator[tuple[slice, Float[np.ndarray, "n p"]]]:
    n_sets = len(layer.batch)
    buffer = np.empty(0, layer.dtype)
    for part, block in layer.head_blocks(
        memory_budget, n_sets * layer.width * layer.dtype.itemsize
    ):
        columns = len(block) * layer.width
        if n_sets * columns > len(buffer) or not reuse_buffer:
            buffer = np.empty(n_sets * columns, layer.dtype)
        features = buffer[: n_sets * columns].reshape(n_sets, columns)
        layer.write(features, 0, block, slice(0, n_sets), None if centre is None else centre[part])
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
    heads, memory_budget = heads_seen_by(batch, heads), check_count(memory_budget, "memory_budget")
    table = _check_values(values, len(heads), batch.dim + 1)
    if not batch.is_plain:
        pooled = np.empty((len(batch), table.shape[2]))
        for rows, written in written_blocks(batch, 8 * table.shape[2]):
            outputs = apply_values(
                written.sets, heads, table, activation, dtype=dtype, memory_budget=memory_budget
            )
            pooled[rows] = written.pool(outputs.astype(np.float64))
        return pooled
    layer = TiledLayer.of(batch.sets, heads, activation, dtype)
    out = np.zeros((len(batch), table.shape[2]), layer.dtype)
    if table.shape[2] <= _FUSED_OUTPUTS:
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
    sample; where every key is a query in turn, those of a key are added up over queries. Sums over
    a sample are `apply_values`. 2MD(1 + t) operations for a key, where `apply_values` takes 4MD;
    sets of more than 32 keys under softmax 2MD more.
    """
    check_samples(batch, "batch")
    heads, memory_budget = heads_seen_by(batch, heads), check_count(memory_budget, "memory_budget")
    table = _check_values(values, len(heads), batch.dim + 1)
    parts = []
    for _, written in written_blocks(batch, 8 * table.shape[2]):
        layer = TiledLayer.of(written.sets, heads, activation, dtype)
        out = np.zeros((len(written.sets.tokens), table.shape[2]), layer.dtype)
        for part, block in layer.head_blocks(memory_budget, in_cache=True):
            layer.add_contributions(out, block, table[part])
        wrong = np.flatnonzero(~np.isfinite(out).all(axis=1))
        if len(wrong):
            raise layer.overflow(int(np.searchsorted(layer.offsets, wrong[0], side="right")) - 1)
        parts.append(written.of_keys(out.astype(np.float64)))
    return np.concatenate(parts)


def _add_products(
    layer: TiledLayer,
    table: Float[np.ndarray, "m e t"],
    out: Float[np.ndarray, "n t"],
    memory_budget: int,
) -> None:
    """Add Φ·values to ``out`` by matrix products with blocks of features."""
    row = layer.width * layer.dtype.itemsize
    # as many sets as leave room for 256 heads, so that neither sets nor heads are done one by one
    n_rows = max(1, min(len(out), memory_budget // (256 * row)))
    for part, block in layer.head_blocks(memory_budget, n_rows * row):
        values = table[part].reshape(-1, table.shape[2]).astype(layer.dtype, copy=False)
        buffer = np.empty((n_rows, len(values)), layer.dtype)
        for rows in blocks(len(out), n_rows):
            features = buffer[: rows.stop - rows.start]
            layer.write(features, 0, block, rows)
            out[rows] += features @ values


def _check_values(values: np.ndarray, n_heads: int, width: int) -> Float[np.ndarray, "m e t"]:
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
    g_mi / N, or w_mi (g_mi − Σ_j w_mj g_mj) for softmax weights w; that in W_m is Σ_i ∂s_mi x~_0
    x~_iᵀ, summed over sets. K = M unless given. Into ``queries``, a row for each of ``batch.sets``,
    goes the gradient in their x~_0, Σ_mi ∂s_mi W_m x~_i, if it is given; samples whose every key is
    the query in turn have none. Cost: 2MD² + 6MD·N_i operations for a set of N_i keys, about that
    of the features themselves. Sets of equal length are stacked, so nothing is padded.
    """
    check_choice(activation, "activation", DIFFERENTIABLE)
    n_means = len(heads) if n_means is None else n_means
    pooled = np.zeros((n_means, *heads.shape[1:]), heads.dtype)
    if batch.is_plain:
        for rows in set_blocks(
            batch.sets.offsets, block_size(heads.itemsize * len(heads), memory_budget // 4)
        ):
            trace = FeatureTrace.of(
                batch.sets[rows], heads, activation, memory_budget=memory_budget
            )
            pooled += trace.pullback(
                cotangent[rows], n_means, None if queries is None else queries[rows]
            )
        return pooled
    for rows, written in written_blocks(batch, cotangent.shape[1] * cotangent.itemsize):
        own = (
            None
            if queries is None
            else queries[batch.set_offsets[rows.start] : batch.set_offsets[rows.stop]]
        )
        trace = FeatureTrace.of(written.sets, heads, activation, memory_budget=memory_budget)
        pooled += trace.pullback(written.spread(cotangent[rows]), n_means, own)
    return pooled


@dataclass(frozen=True)
class FeatureTrace:
    """The features of some sets by matrix products, and the scores behind them.

    Their gradient needs the scores again.
    """

    batch: SetBatch
    activation: str
    queries: Float[np.ndarray, "n f"] = field(repr=False)
    wide: Float[np.ndarray, "f c"] = field(repr=False)  # the heads side by side
    width: int
    stacks: list[KeyStack] = field(repr=False)
    scores: list[Any] = field(
        repr=False
    )  # (sets, heads, keys) for each stack; the weights themselves of softmax

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
        """Go through the scores in the precision of the heads.

        And in that of ``stacks`` of their keys if they are given.
        """
        n_heads, rows, width = heads.shape
        wide = np.ascontiguousarray(heads.transpose(1, 0, 2)).reshape(rows, n_heads * width)
        stacks = (
            key_stacks(batch, n_heads, heads.dtype, memory_budget) if stacks is None else stacks
        )
        queries = batch.extended_query().astype(heads.dtype, copy=False)
        projected = (queries @ wide).reshape(len(batch), n_heads, width)
        trace = cls(batch, activation, queries, wide, width, stacks, [np.zeros(0)] * len(stacks))

        def work(number: int) -> None:
            own, keys = stacks[number]
            scores = projected[own] @ keys.transpose(0, 2, 1)
            trace.scores[number] = softmax(scores) if activation == SOFTMAX else scores

        trace._each(work)
        return trace

    def _each(self, work: Callable[[int], None]) -> None:
        """Do all stacks, on several threads if that is worth their while."""
        numbers = range(len(self.stacks))
        if len(self.batch.tokens) * self.wide.shape[1] >= _TASK:
            run_threads(work, numbers)
        else:
            for number in numbers:
                work(number)

    @staticmethod
    def fits(batch: SampleBatch, n_heads: int, memory_budget: int = MEMORY_BUDGET) -> bool:
        """Whether samples have a trace.

        One set each, whose scores in float32 take a quarter of the budget at most.
        """
        return batch.is_plain and 4 * n_heads * len(batch.sets.tokens) <= memory_budget // 4

    @property
    def n_heads(self) -> int:
        """M."""
        return self.wide.shape[1] // self.width

    def features(self) -> Float[np.ndarray, "n p"]:
        """Φ, as `attention_features` has it."""
        out = np.empty((len(self.batch), self.wide.shape[1]), self.wide.dtype)

        def work(number: int) -> None:
            (own, keys), scores = self.stacks[number], self.scores[number]
            weights = scores if self.activation == SOFTMAX else _weights_of(self.activation, scores)
            out[own] = (weights @ keys).reshape(len(own), -1)

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
        lines = np.empty((len(self.batch), n_means, self.width), self.wide.dtype)  # Σ_i ∂s_mi x~_i
        each = (
            lines
            if n_means == self.n_heads or queries is None
            else np.empty_like(cotangent, self.wide.dtype)
        )

        def work(number: int) -> None:
            own, keys = self.stacks[number]
            pulled = (
                cotangent[own]
                .reshape(len(own), self.n_heads, self.width)
                .astype(self.wide.dtype, copy=False)
            )
            slopes = pulled @ keys.transpose(0, 2, 1)
            through_weights(self.activation, self.scores[number], slopes)
            lines[own] = _sum_shared(slopes, n_means) @ keys
            if each is not lines:
                each[own] = (slopes @ keys).reshape(len(own), -1)

        self._each(work)
        lines /= math.sqrt(self.n_heads)
        if queries is not None:
            queries[:] = each.reshape(len(each), -1) @ self.wide.T
            if each is not lines:
                queries /= math.sqrt(self.n_heads)
        total = (self.queries.T @ lines.reshape(len(lines), -1)).reshape(
            len(self.wide), n_means, self.width
        )
        return np.ascontiguousarray(total.transpose(1, 0, 2))


def attention_weights(
    sets: SetBatch,
    heads: HeadDraw | HeadArray,
    activation: str,
    n_means: int = 1,
    *,
    memory_budget: int = MEMORY_BUDGET,
) -> Float[np.ndarray, "t k"]:
    """The weight of every key, averaged over the heads of each mean.

    σ(s_mi)/N, or softmax_i(s_mi); the heads are m, m + K, m + 2K ….

    A row for each of ``sets.tokens``. O(M (D_q D + D N)) operations for each set of N keys.
    """
    heads, queries = heads_seen_by(sets, heads), sets.seen_query().astype(np.float64)
    totals = np.zeros((len(sets.tokens), n_means))
    for part, block in heads.blocks(
        n_means * block_size(64 * heads.entries * n_means, memory_budget)
    ):
        rows, width = block.shape[1:]
        wide = np.ascontiguousarray(block.transpose(1, 0, 2)).reshape(rows, -1)
        for own, keys in key_stacks(sets, len(block), np.dtype(np.float64), memory_budget):
            places = sets.offsets[own][:, None] + np.arange(keys.shape[1])
            projected = (queries[own] @ wide).reshape(len(own), len(block), width)
            weights = _weights_of(activation, projected @ keys.transpose(0, 2, 1))
            for mean in range(n_means):
                totals[places, mean] += weights[:, (mean - part.start) % n_means :: n_means].sum(
                    axis=1
                )
    return totals / np.bincount(np.arange(len(heads)) % n_means, minlength=n_means)


def softmax(scores: Float[np.ndarray, "b m k"]) -> Float[np.ndarray, "b m k"]:
    """Softmax over the keys, in place."""
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=2, keepdims=True)
    return scores


def _weights_of(activation: str, scores: Float[np.ndarray, "b m k"]) -> Float[np.ndarray, "b m k"]:
    """Weights of keys from their scores."""
    if activation == SOFTMAX:
        return softmax(scores)
    σ: dict[str, Any] = {
        "relu": lambda s: np.maximum(s, 0),
        "linear": lambda s: s,
        "square": np.square,
        "exp": np.exp,
    }
    return np.asarray(
        σ.get(activation, lambda s: (s > 0).astype(s.dtype))(scores) / scores.shape[2]
    )


KeyStack = tuple[Int[np.ndarray, " _"], Float[np.ndarray, "_ _ e"]]
"""Rows of sets of equal length, and their extended keys one set upon the other."""


def key_stacks(
    batch: SetBatch, n_heads: int, dtype: np.dtype[Any], memory_budget: int = MEMORY_BUDGET
) -> list[KeyStack]:
    """The keys of all sets, a few sets at a time.

    Few enough for what ``n_heads`` heads make of them.
    """
    lengths, width = batch.lengths, batch.dim + 1
    order = np.argsort(lengths, kind="stable")
    found = []
    for same in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
        length = int(lengths[same[0]])
        each = dtype.itemsize * (n_heads * (2 * width + 3 * length) + 2 * length * width)
        for part in blocks(len(same), min(block_size(each, memory_budget // 16), 256)):
            keys = np.ones((part.stop - part.start, length, width), dtype)
            keys[:, :, :-1] = batch.tokens[batch.offsets[same[part]][:, None] + np.arange(length)]
            found.append((same[part], keys))
    return found


def through_weights(
    activation: str, scores: Float[np.ndarray, "b m k"], slopes: Float[np.ndarray, "b m k"]
) -> None:
    """Turn the gradient in the weights, in place, into that in the scores.

    ``scores`` is scratch afterwards.

    Of softmax it is the weights.
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
    for rows in blocks(
        len(batch), block_size(2 * weights.shape[1] * number.itemsize, MEMORY_BUDGET)
    ):
        # ReLU is homogeneous: scaling the narrow side saves a pass over the wide one
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
    n, dim = len(batch), batch.query_dim
    keys = batch.tokens.reshape(n, -1)
    flat = np.ones((n, dim + keys.shape[1] + 1), batch.dtype)
    flat[:, :dim] = 0 if batch.query is None else batch.query
    flat[:, dim:-1] = keys
    return flat


def _check_overflow(
    flat: Float[np.ndarray, "n z"], weights: Float[np.ndarray, "p z"], units: np.ndarray
) -> None:
    """Raise if a unit is not finite; look at them only where the sizes of both factors allow it."""
    bound = flat.shape[1] * math.prod(float(max(a.max(), -a.min())) for a in (flat, weights))
    if bound < float(np.finfo(units.dtype).max) or np.isfinite(units).all():
        return
    rest = ", or use dtype='float64'" if units.dtype == np.float32 else ""
    raise ValueError(
        f"features must be finite: these overflow {units.dtype}, with units of size up to "
        f"{bound:.3g}. Scale the tokens or the weights down{rest}."
    )


def _check_weights(
    weights: np.ndarray, batch: SetBatch, dtype: np.dtype[Any]
) -> Float[np.ndarray, "p z"]:
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
