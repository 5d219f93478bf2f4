"""The backend of NumPy arrays: loops compiled by numba, and LAPACK.

The plain versions are `features`, `kernel`, `ridge` and `predict` of `keyhole.textbook`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, narrowed, unit_exponent
from keyhole.attention.descent import HostSamples
from keyhole.attention.features import (
    TiledLayer,
    apply_values,
    feature_blocks,
    heads_seen_by,
    key_contributions,
    pooled_features,
)
from keyhole.attention.head_error import Task
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.attention.kernels import attention_kernel, host_kernel
from keyhole.data.sets import SampleBatch
from keyhole.logistic.gram import logistic_gram
from keyhole.ridge.gram import ridge_gram
from keyhole.solve.matrices import add_outer, mirror_lower

DISK_BUDGETS = 2.5
"""Memory budgets that all features may take where every block of them reads the keys from files:
500 bags under 512 heads of 1,025 numbers are 2.1 GB."""


class HostBackend:
    """The operations of `backends.Backend` on NumPy arrays."""

    device = None
    sums_in_float64 = False
    solves_by_rows = True

    contributions = staticmethod(key_contributions)
    kernel = staticmethod(host_kernel)
    ridge = staticmethod(ridge_gram)
    logistic = staticmethod(logistic_gram)

    def placed(self, samples: Any) -> Any:
        """The samples in host memory."""
        return samples.numpy()

    def with_room_for(self, n: int) -> HostBackend:
        """Itself: there is nowhere else to go."""
        return self

    def features(
        self, batch: SampleBatch, heads: Any, activation: str, dtype: Any
    ) -> Float[np.ndarray, "n p"]:
        """Φ (n, M·D), block by block of heads."""
        heads = heads_seen_by(batch, heads)
        if not batch.is_plain:
            return pooled_features(batch, heads, activation, dtype)
        layer = TiledLayer.of(batch.sets, heads, activation, dtype)
        out = np.empty((len(batch), len(heads) * layer.width), layer.dtype)
        for part, block in layer.head_blocks(MEMORY_BUDGET):
            layer.write(out, part.start * layer.width, block, slice(0, len(batch)))
        return out

    def outputs(
        self,
        samples: SampleBatch,
        heads: HeadDraw,
        values: Float[np.ndarray, "m e t"],
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> Float[np.ndarray, "n t"]:
        """Φ·values, without ever forming Φ."""
        # values have the units of y, which may be beyond the range of float32: contract them in
        # units of their own
        exponents = unit_exponent(values, axis=(0, 1))
        outputs = apply_values(
            samples,
            heads,
            np.ldexp(values, -exponents),
            activation,
            dtype=dtype,
            memory_budget=memory_budget,
        )
        with np.errstate(over="ignore"):
            return np.ldexp(outputs.astype(np.float64), exponents)

    def kernel_outputs(
        self,
        samples: SampleBatch,
        training_samples: SampleBatch,
        dual: Float[np.ndarray, "n t"],
        heads: HeadDistribution,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> Float[np.ndarray, "m t"]:
        """K·dual, in blocks of rows of the kernel, which is float64 whatever ``dtype``."""
        outputs = np.empty((len(samples), dual.shape[1]))
        for rows in blocks(len(samples), block_size(8 * len(training_samples), memory_budget)):
            kernel = attention_kernel(
                samples[rows], training_samples, heads, activation, memory_budget=memory_budget
            )
            outputs[rows] = kernel @ dual
        return outputs

    def products(
        self,
        batch: SampleBatch,
        heads: HeadDraw,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
        centred_rows: Int[np.ndarray, " r"] | None,
    ) -> HostProducts:
        """Φ of training samples, less the mean of some rows in every row."""
        return HostProducts(
            batch=batch,
            heads=heads,
            activation=activation,
            dtype=dtype,
            memory_budget=memory_budget,
            centred_rows=centred_rows,
        )

    def kernel_gram(
        self,
        batch: SampleBatch,
        extras: Float[np.ndarray, "n c"],
        heads: HeadDistribution,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> Float[np.ndarray, "n n"]:
        """K + ZZᵀ in float64, whatever ``dtype``."""
        gram = attention_kernel(batch, None, heads, activation, memory_budget=memory_budget)
        # block by block of rows: ZZᵀ as a whole would take as much memory as the kernel
        if extras.shape[1]:
            for rows in blocks(len(gram), block_size(8 * len(gram), memory_budget)):
                gram[rows] += extras[rows] @ extras.T
        return np.asarray(gram)

    def kernel_rounding(self, dtype: str) -> float:
        """That of float64, whatever ``dtype``."""
        return float(np.finfo(np.float64).eps)

    def descent_samples(self, task: Task) -> HostSamples:
        """The samples where they are."""
        return HostSamples(task)


class HostProducts:
    """Φ of training samples, made block by block of heads in ``dtype``.

    From every row the mean of ``centred_rows`` is taken, unless that is None. It is the ``centre``,
    known as soon as the Gram matrix is made.
    """

    def __init__(
        self,
        *,
        batch: SampleBatch,
        heads: HeadDraw,
        activation: str,
        dtype: str,
        memory_budget: int,
        centred_rows: Int[np.ndarray, " r"] | None,
    ) -> None:
        self.batch = batch
        self.heads = heads
        self.activation = activation
        self.dtype = dtype
        self.centre: Float[np.ndarray, " p"] | None = None
        self.centred_rows = centred_rows
        self.rounding = float(np.finfo(dtype).eps)
        self.width = heads.dim + 1
        self._only_block: list[tuple[slice, np.ndarray]] = []

        # all features in one block if they fit; blocks of half the budget are as fast, and leave
        # the rest to the solver. Every block reads all keys, which is expensive from a disk
        n_bytes = len(batch) * heads.n_heads * self.width * np.dtype(dtype).itemsize
        whole_budget = memory_budget
        if batch.sets.is_on_disk:
            whole_budget = int(DISK_BUDGETS * memory_budget)
        if n_bytes <= 0.9 * whole_budget:
            self.block_budget = whole_budget
        else:
            self.block_budget = memory_budget // 2

    def blocks(self) -> Iterator[tuple[slice, Float[np.ndarray, "n p"]]]:
        """Blocks of heads with their features; a block is overwritten when the next is made."""
        return feature_blocks(
            self.batch,
            self.heads,
            self.activation,
            centre=self.centre,
            reuse_buffer=True,
            dtype=self.dtype,
            memory_budget=self.block_budget,
        )

    def gram(
        self, extras: Float[np.ndarray, "n c"], *, both_triangles: bool
    ) -> Float[np.ndarray, "n n"]:
        """ΦΦᵀ + ZZᵀ, of which the lower triangle is filled, or both."""
        n = len(self.batch)
        gram = np.zeros((n, n), self.dtype, order="F")
        found_centre = np.zeros(self.heads.n_heads * self.width)
        for part, features in self.blocks():
            if self.centred_rows is not None:
                columns = slice(part.start * self.width, part.stop * self.width)
                found_centre[columns] = self._subtract_mean(features)
            # a block of all heads is kept for v = Φᵀa
            if part == slice(0, self.heads.n_heads):
                self._only_block.append((part, features))
            add_outer(gram, features)
        if self.centred_rows is not None:
            self.centre = found_centre
        if extras.shape[1]:
            add_outer(gram, np.asfortranarray(extras.astype(self.dtype)))
        if both_triangles:
            mirror_lower(gram)
        return gram

    def _subtract_mean(self, features: Float[np.ndarray, "n q"]) -> Float[np.ndarray, " q"]:
        """Take the mean of ``centred_rows`` from every row, in place, and return it."""
        assert self.centred_rows is not None
        share = np.zeros(len(features))
        share[self.centred_rows] = 1.0 / len(self.centred_rows)
        # a number of the features' precision, so that subtracting it is subtracting the same
        centre = share.astype(self.dtype) @ features
        features -= centre
        return np.asarray(centre, dtype=np.float64)

    def values(self, dual: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "p t"]:
        """v = Φᵀa, over the blocks again unless there was one only."""
        # in units in which a fits the precision of the features
        narrow_dual, exponents = narrowed(dual, self.dtype)
        values = np.empty((self.heads.n_heads * self.width, dual.shape[1]))
        for part, features in self._only_block or self.blocks():
            columns = slice(part.start * self.width, part.stop * self.width)
            values[columns] = features.T @ narrow_dual
        return np.ldexp(values, exponents)
