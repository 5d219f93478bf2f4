"""Solving and predicting on a device, by torch: the counterparts of solve.py and layers.py.

What touches tokens is computed on the device in the precision of the specification; Gram matrices
and their factorisation are float64. Imported only where a device is asked for. docs/gpu.md has the
routes; the plain version is `keyhole.textbook`, as for solve.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole._array import block_size, blocks
from keyhole._tensors import as_array, astype, free_bytes, to_device, zeros
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDraw
from keyhole.attention.kernels import attention_kernel, tensor_kernel
from keyhole.ridge.device import ridge_device
from keyhole.ridge.gram import ridge_gram
from keyhole.ridge.problem import EPS, RidgeFit
from keyhole.solvers.layers import FiniteLayer, KernelLayer, Layer
from keyhole.solvers.solve import ValueProblem, plain_sets, solve_dual, solve_primal


def finite_outputs(layer: FiniteLayer, samples: Any, memory_budget: int) -> np.ndarray:
    """Outputs of the heads of a layer, in blocks of sets."""
    device = str(layer.device)
    batch = plain_sets(samples)
    values = to_device(layer.values.reshape(-1, layer.values.shape[2]), device)
    outputs = np.empty((len(batch), values.shape[1]))
    for rows in blocks(len(batch), block_size(16 * len(values), memory_budget)):
        part = batch[rows].numpy().astype(layer.dtype).to(device)
        features = attention_features(part, layer.heads, layer.activation)
        outputs[rows] = as_array(features.to(values.dtype) @ values)
    return outputs


def kernel_outputs(layer: KernelLayer, samples: Any, memory_budget: int) -> np.ndarray:
    """Outputs of infinitely many heads, in blocks of rows of the kernel."""
    device = str(layer.device)
    batch = plain_sets(samples)
    training_sets = plain_sets(layer.sets).astype(layer.dtype).to(device)
    dual = to_device(layer.dual, device)
    outputs = np.empty((len(batch), layer.dual.shape[1]))
    for rows in blocks(len(batch), block_size(16 * len(training_sets), memory_budget)):
        part = batch[rows].numpy().astype(layer.dtype).to(device)
        kernel = attention_kernel(
            part, training_sets, layer.distribution, layer.activation, memory_budget=memory_budget
        )
        outputs[rows] = as_array(kernel.to(dual.dtype) @ dual)
    return outputs


def solve_on_device(problem: ValueProblem, n_features: int) -> tuple[Layer, RidgeFit]:
    """By the kernel, or by ΦΦᵀ; on the host if n × n matrices do not fit the device."""
    if not isinstance(problem.heads, HeadDraw):
        return _solve_kernel(problem)

    # the solve takes about three n × n matrices of float64
    n = len(problem.samples)
    if 3 * 8 * n * n > free_bytes(str(problem.spec.device)):
        on_host = replace(problem, spec=replace(problem.spec, device=None))
        if problem.ridge.groups is None and n_features < n:
            return solve_primal(on_host)
        return solve_dual(on_host)
    return _solve_dual(problem)


def _solve_kernel(problem: ValueProblem) -> tuple[KernelLayer, RidgeFit]:
    """Ridge on the exact kernel: made in the precision of the specification, solved in float64."""
    assert not isinstance(problem.heads, HeadDraw)
    spec = problem.spec
    sets = problem.batch.astype(spec.dtype).to(spec.device)
    gram = tensor_kernel(sets, problem.heads, spec.activation, "float64", spec.memory_budget)
    _add_extras(gram, problem)
    ridge = _solve_ridge(gram, problem, rounding=float(np.finfo(spec.dtype).eps))
    return problem.kernel_layer(ridge), ridge


def _solve_dual(problem: ValueProblem) -> tuple[FiniteLayer, RidgeFit]:
    """ΦΦᵀ summed in float64 on the device, then v = Φᵀa."""
    assert isinstance(problem.heads, HeadDraw)
    spec = problem.spec
    device = str(spec.device)
    heads = problem.heads.seen_by(query=problem.batch.has_query)
    n = len(problem.batch)
    width = heads.dim + 1
    sets = problem.batch.astype(spec.dtype).to(device)

    def blocks_of_heads() -> Iterator[tuple[slice, Any]]:
        budget = max(spec.memory_budget, free_bytes(device) // 8)
        for part in blocks(heads.n_heads, block_size(16 * n * width, budget)):
            features = attention_features(sets, heads.block(part.start, part.stop), spec.activation)
            # the scale M^{-1/2} is that of all heads, not of the block
            share = (part.stop - part.start) / heads.n_heads
            yield part, astype(features, "float64").mul_(share**0.5)

    # K = ΦΦᵀ; a block of all heads is kept for v = Φᵀa
    gram = zeros(n, n, device)
    only_block = []
    for part, features in blocks_of_heads():
        if part == slice(0, heads.n_heads):
            only_block.append((part, features))
        gram.addmm_(features, features.T)
    _add_extras(gram, problem)
    ridge = _solve_ridge(gram, problem, rounding=EPS)

    # v = Φᵀa, over the blocks again unless there was one only; the extras' part on the host
    dual = to_device(ridge.coef, device)
    values = np.empty((heads.n_heads, width, dual.shape[1]))
    for part, features in only_block or blocks_of_heads():
        values[part] = as_array(features.T @ dual).reshape(-1, width, dual.shape[1])
    all_values = np.concatenate([values.reshape(-1, dual.shape[1]), problem.extras.T @ ridge.coef])
    return problem.finite_layer(all_values, ridge.intercept), ridge


def _add_extras(gram: Any, problem: ValueProblem) -> None:
    """Add the linear kernel of the extras to a float64 Gram matrix on a device."""
    if problem.extras.shape[1]:
        extras = to_device(np.ascontiguousarray(problem.extras), str(gram.device))
        gram.addmm_(extras, extras.T)


def _solve_ridge(gram: Any, problem: ValueProblem, rounding: float) -> RidgeFit:
    """Ridge on a float64 Gram matrix on a device, which is overwritten.

    ``rounding`` is the unit of rounding of the arithmetic that made the matrix.
    """
    # whole groups are left out on the host
    memory_budget = problem.spec.memory_budget
    if problem.ridge.groups is not None:
        return ridge_gram(
            as_array(gram),
            problem.ridge,
            rounding=rounding,
            overwrite_gram=True,
            memory_budget=memory_budget,
        )
    room_for_a_copy = 8 * gram.shape[0] ** 2 <= free_bytes(str(gram.device))
    return ridge_device(
        gram,
        problem.ridge,
        rounding=rounding,
        room_for_a_copy=room_for_a_copy,
        memory_budget=memory_budget,
    )
