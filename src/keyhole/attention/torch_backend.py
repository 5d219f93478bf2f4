"""The backend of torch: any device of torch's, with fused triton kernels on CUDA.

What touches tokens is computed on the device in the precision that was asked for; Gram matrices
and their factorisation are float64. Imported only where a device is asked for. docs/howto/gpu.md
has the routes; the plain version is `keyhole.textbook`, as for the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from keyhole._array import MEMORY_BUDGET, block_size, blocks, set_blocks
from keyhole._checks import FeatureOverflowError
from keyhole._tensors import as_array, astype, free_bytes, is_on, to_device, zeros
from keyhole.attention import dispatch
from keyhole.attention.activations import check_activation
from keyhole.attention.backends import Backend, backend_for
from keyhole.attention.features import attention_features, check_dtype, heads_seen_by
from keyhole.attention.head_error import Task
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.attention.kernels import attention_kernel, tensor_kernel
from keyhole.attention.torch_heads import DeviceSamples
from keyhole.data.sets import SampleBatch
from keyhole.logistic.device import logistic_device
from keyhole.logistic.gram import logistic_gram
from keyhole.logistic.problem import LogisticProblem
from keyhole.ridge.device import ridge_device
from keyhole.ridge.gram import ridge_gram
from keyhole.ridge.problem import EPS, RidgeFit, RidgeProblem

SHARE_OF_SETS = 4
"""A device holds sets that take 1/SHARE_OF_SETS of its free memory in float64; others are streamed.

Beside the tokens as they were given there are scaled ones, and those of the precision of a fit."""


@dataclass(frozen=True)
class DeviceBackend:
    """The operations of `backends.Backend` on torch tensors.

    Features and kernels are computed where the tensors live. All other operations take samples
    wherever they are, and return arrays in host memory; between, they are on ``device``. Samples
    that are `placed` there first move once, whatever is done with them.
    """

    device: str
    sums_in_float64: ClassVar[bool] = True
    solves_by_rows: ClassVar[bool] = False

    kernel = staticmethod(dispatch.attention_gram)

    def placed(self, samples: Any) -> Any:
        """The samples on the device, unless they would take too much of what is free there.

        These stay where they are, or go to the host, from where parts of them are moved.
        """
        if is_on(self.device, samples.sets.stored):
            return samples
        if samples.sets.n_tokens * samples.dim * 8 > free_bytes(self.device) // SHARE_OF_SETS:
            return samples.numpy()
        return samples.to(self.device)

    def with_room_for(self, n: int) -> Backend:
        """Itself, or the host: a solve takes about three n × n matrices of float64."""
        if 3 * 8 * n * n > free_bytes(self.device):
            return backend_for(None)
        return self

    def features(self, batch: SampleBatch, heads: Any, activation: str, dtype: Any) -> torch.Tensor:
        """Φ (n, M·D), by torch or triton."""
        heads = heads_seen_by(batch, heads, keep_tensor=True)
        if dtype is not None:
            batch = batch.astype(check_dtype(dtype))
        return dispatch.attention_features(
            batch, heads, check_activation(activation), MEMORY_BUDGET
        )

    def outputs(
        self,
        samples: SampleBatch,
        heads: HeadDraw,
        values: np.ndarray,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> np.ndarray:
        """Φ·values, in blocks of samples."""
        table = to_device(values.reshape(-1, values.shape[2]), self.device)
        outputs = np.empty((len(samples), table.shape[1]))
        for rows in blocks(len(samples), block_size(16 * len(table), memory_budget)):
            part = samples[rows].to(self.device, dtype)
            features = attention_features(part, heads, activation)
            outputs[rows] = as_array(features.to(table.dtype) @ table)
        return outputs

    def contributions(
        self,
        samples: SampleBatch,
        heads: HeadDraw,
        values: np.ndarray,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> np.ndarray:
        """What every key adds to Φ·values, in blocks of sets."""
        sets = samples.sets
        drawn = heads_seen_by(samples, heads)
        key_bytes = 8 * len(drawn) * (2 + 2 * values.shape[2]) + 16 * (sets.dim + 1)
        parts = []
        for rows in set_blocks(sets.offsets, block_size(key_bytes, memory_budget)):
            part = sets[rows].to(self.device, dtype)
            of_keys = dispatch.key_contributions(part, drawn, values, activation, each=samples.each)
            parts.append(as_array(of_keys))
        contributions = np.concatenate(parts).astype(np.float64)
        # sets that are not averaged have coefficients of their own
        contributions *= np.repeat(samples.set_coefficients, sets.lengths)[:, None]
        if not np.isfinite(contributions).all():
            raise FeatureOverflowError(
                f"contributions must be finite: some overflow {dtype} under activation "
                f"{activation!r}. Scale the tokens down, or use dtype='float64'."
            )
        return contributions

    def kernel_outputs(
        self,
        samples: SampleBatch,
        training_samples: SampleBatch,
        dual: np.ndarray,
        heads: HeadDistribution,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> np.ndarray:
        """K·dual, in blocks of rows of the kernel."""
        training_there = training_samples.to(self.device, dtype)
        dual_there = to_device(dual, self.device)
        outputs = np.empty((len(samples), dual.shape[1]))
        for rows in blocks(len(samples), block_size(16 * len(training_there), memory_budget)):
            part = samples[rows].to(self.device, dtype)
            kernel = attention_kernel(
                part, training_there, heads, activation, memory_budget=memory_budget
            )
            outputs[rows] = as_array(kernel.to(dual_there.dtype) @ dual_there)
        return outputs

    def products(
        self,
        batch: SampleBatch,
        heads: HeadDraw,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
        centred_rows: np.ndarray | None,
    ) -> DeviceProducts:
        """Φ of training samples; sums in float64 need no centre."""
        assert centred_rows is None
        return DeviceProducts(
            samples=batch,
            dtype=dtype,
            heads=heads,
            activation=activation,
            device=self.device,
            memory_budget=memory_budget,
        )

    def kernel_gram(
        self,
        batch: SampleBatch,
        extras: np.ndarray,
        heads: HeadDistribution,
        activation: str,
        *,
        dtype: str,
        memory_budget: int,
    ) -> torch.Tensor:
        """K + ZZᵀ: K computed in ``dtype``, stored in float64."""
        there = batch.to(self.device, dtype)
        gram: torch.Tensor
        if there.is_plain:
            gram = tensor_kernel(there.sets, heads, activation, "float64", memory_budget)
        else:
            # pooled kernels are summed in float64
            gram = attention_kernel(there, None, heads, activation, memory_budget=memory_budget)
        _add_outer(gram, extras)
        return gram

    def kernel_rounding(self, dtype: str) -> float:
        """That of ``dtype``."""
        return float(np.finfo(dtype).eps)

    def ridge(
        self,
        gram: torch.Tensor,
        problem: RidgeProblem,
        *,
        rounding: float,
        overwrite_gram: bool,
        keep_factor: bool,
        memory_budget: int,
    ) -> RidgeFit:
        """Ridge on a float64 Gram matrix on the device, which is overwritten."""
        # whole groups are left out on the host, and factorisations kept there
        if problem.groups is not None or keep_factor:
            return ridge_gram(
                as_array(gram),
                problem,
                rounding=rounding,
                overwrite_gram=overwrite_gram,
                keep_factor=keep_factor,
                memory_budget=memory_budget,
            )
        room_for_a_copy = 8 * gram.shape[0] ** 2 <= free_bytes(self.device)
        return ridge_device(
            gram,
            problem,
            rounding=rounding,
            room_for_a_copy=room_for_a_copy,
            memory_budget=memory_budget,
        )

    def logistic(
        self, gram: torch.Tensor, problem: LogisticProblem, *, rounding: float
    ) -> RidgeFit:
        """Newton steps on a float64 Gram matrix on the device; on the host if no room is left."""
        # the Cholesky factor, and as much again for parts of its inverse
        if 2 * 8 * gram.shape[0] ** 2 > free_bytes(self.device):
            return logistic_gram(as_array(gram), problem, rounding=rounding)
        return logistic_device(gram, problem, rounding=rounding)

    def descent_samples(self, task: Task) -> DeviceSamples:
        """The samples on the device."""
        return DeviceSamples(task, self.device)


class DeviceProducts:
    """Φ of training samples on a device, made block by block of heads and cast to float64.

    Samples that are not on the device move there once. Those that would take more than a part of
    what is free there, `SHARE_OF_SETS`, are streamed through it instead, once for every block of
    heads.
    """

    rounding = EPS
    centre = None

    def __init__(
        self,
        *,
        samples: SampleBatch,
        dtype: str,
        heads: HeadDraw,
        activation: str,
        device: str,
        memory_budget: int,
    ) -> None:
        key_bytes = samples.dim * np.dtype(dtype).itemsize
        self.parts = [slice(0, len(samples))]
        self.samples = samples
        room = free_bytes(device) // SHARE_OF_SETS
        is_there = is_on(device, samples.sets.stored)
        self.is_streamed = not is_there and samples.sets.n_tokens * key_bytes > room
        if not self.is_streamed:
            self.samples = samples.to(device, dtype)
        else:
            # runs of samples, by the keys that they hold
            offsets = samples.sets.offsets[samples.unpooled.set_offsets]
            self.parts = set_blocks(offsets, block_size(key_bytes, room // 2))
        self.dtype = dtype
        self.heads = heads
        self.activation = activation
        self.device = device
        self.memory_budget = memory_budget
        self.width = heads.dim + 1
        self._only_block: list[tuple[slice, torch.Tensor]] = []

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Blocks of heads with their features in float64."""
        n_heads = self.heads.n_heads
        budget = max(self.memory_budget, free_bytes(self.device) // 8)
        for part in blocks(n_heads, block_size(16 * len(self.samples) * self.width, budget)):
            block = self.heads.block(part.start, part.stop)
            features = self._features(block)
            # the scale M^{-1/2} is that of all heads, not of the block
            share = (part.stop - part.start) / n_heads
            yield part, astype(features, "float64").mul_(share**0.5)

    def _features(self, block: np.ndarray) -> torch.Tensor:
        """Φ of a block of heads, of samples that are on the device or move there part by part."""
        parts = []
        for rows in self.parts:
            part = self.samples[rows]
            if self.is_streamed:
                part = part.to(self.device, self.dtype)
            parts.append(attention_features(part, block, self.activation))
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)

    def gram(self, extras: np.ndarray, *, both_triangles: bool) -> torch.Tensor:
        """ΦΦᵀ + ZZᵀ, both triangles always."""
        n = len(self.samples)
        gram = zeros(n, n, self.device)
        for part, features in self.blocks():
            # a block of all heads is kept for v = Φᵀa
            if part == slice(0, self.heads.n_heads):
                self._only_block.append((part, features))
            gram.addmm_(features, features.T)
        _add_outer(gram, extras)
        return gram

    def values(self, dual: np.ndarray) -> np.ndarray:
        """v = Φᵀa, over the blocks again unless there was one only."""
        dual_there = to_device(dual, self.device)
        values = np.empty((self.heads.n_heads * self.width, dual.shape[1]))
        for part, features in self._only_block or self.blocks():
            columns = slice(part.start * self.width, part.stop * self.width)
            values[columns] = as_array(features.T @ dual_there)
        return values


def _add_outer(gram: torch.Tensor, extras: np.ndarray) -> None:
    """Add the linear kernel of the extras to a float64 Gram matrix."""
    if extras.shape[1]:
        columns = to_device(np.ascontiguousarray(extras), str(gram.device))
        gram.addmm_(columns, columns.T)
