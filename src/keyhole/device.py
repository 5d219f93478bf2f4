"""The layer fitted on a device by torch: the fits of layer.py with features, kernel and Cholesky on the device.

Samples, penalties and answers are those of layer.py, as NumPy arrays in host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole.features import attention_features
from keyhole.groups import PooledSets
from keyhole.heads import HeadDraw, HeadLaw
from keyhole.kernels import attention_kernel, tensor_kernel
from keyhole.layer import (
    FiniteLayer,
    KernelLayer,
    LayerFit,
    Samples,
    Solved,
    assemble,
    check_enough_samples,
    distinct_samples,
    fit_finite_layer,
)
from keyhole.sets import SetBatch
from keyhole.solvers.penalties import EPS, default_alphas, numerical_floor, select_alpha
from keyhole.solvers.ridge import RidgeSolution, leave_one_out, mean_squares, rounding_of_squares
from keyhole.solvers.ridge_gram import weighed_path
from keyhole.solvers.weighted_gram import Weighing, centre_of, centred, check_outputs, check_weights


def pick_device(device: Any, batch: SetBatch) -> str | None:
    """The device asked for, that of the batch for None, or the first GPU if there is one for "auto"."""
    if device is None:
        return batch.device
    from keyhole._torch.arrays import check_device, gpu_or_none

    return gpu_or_none() if device == "auto" else str(check_device(device))


def plain_sets(batch: SetBatch | PooledSets) -> SetBatch:
    """Return the batch if every sample is one set, the mean over its keys; devices know no other pooling."""
    if not isinstance(batch, SetBatch):
        raise ValueError(
            "a device takes one set per sample and the mean over its keys: pooling='sum', query='each' and SetGroups "
            "are computed by NumPy. Leave `device` out."
        )
    return batch


@dataclass(frozen=True)
class DeviceKernelLayer(KernelLayer):
    """A `KernelLayer` whose kernel is evaluated on a device, in float32 or float64."""

    device: str = "cpu"
    dtype: str = "float64"

    def predict(self, batch: SetBatch | PooledSets, *, memory_budget: int = MEMORY_BUDGET) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``, in blocks of rows of the kernel."""
        from keyhole._torch.arrays import as_array, to_device

        batch, given = plain_sets(batch), plain_sets(self.sets)
        sets, dual = given.astype(self.dtype).to(self.device), to_device(self.dual, self.device)
        scores = np.empty((len(batch), self.dual.shape[1]))
        for rows in blocks(len(batch), block_size(16 * len(sets), memory_budget)):
            part = batch[rows].numpy().astype(self.dtype).to(self.device)
            kernel = attention_kernel(part, sets, self.law, self.activation, memory_budget=memory_budget)
            scores[rows] = as_array(kernel.to(dual.dtype) @ dual)
        return np.asarray(scores + self.intercept)


@dataclass(frozen=True)
class DeviceFiniteLayer(FiniteLayer):
    """A `FiniteLayer` whose features are computed on a device."""

    device: str = "cpu"

    def predict(self, batch: SetBatch | PooledSets, *, memory_budget: int = MEMORY_BUDGET) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``, in blocks of sets."""
        from keyhole._torch.arrays import as_array, to_device

        batch = plain_sets(batch)
        values = to_device(self.values.reshape(-1, self.values.shape[2]), self.device)
        scores = np.empty((len(batch), values.shape[1]))
        for rows in blocks(len(batch), block_size(16 * len(values), memory_budget)):
            part = batch[rows].numpy().astype(self.dtype).to(self.device)
            scores[rows] = as_array(attention_features(part, self.heads, self.activation).to(values.dtype) @ values)
        return np.asarray(scores + self.intercept)


def fit_kernel_on_device(
    batch: SetBatch,
    columns: Float[np.ndarray, "n t"],
    law: HeadLaw,
    penalties: Float[np.ndarray, " a"] | None = None,
    *,
    device: str,
    dtype: str = "float64",
    activation: str = "relu",
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> LayerFit:
    """Fit infinitely many heads on a device: the kernel in ``dtype``, the factorisation in float64.

    Parameters as for `layer.fit_kernel_layer`. Penalties below the numerical floor, which is higher for a float32
    kernel, are left to the host. Cost: tokens²/2 pairs, 2n³/3 operations per penalty, two n × n matrices of float64 on
    the device, or one if two do not fit and there is one penalty.
    """
    samples = distinct_samples(batch.numpy(), columns, weights)
    check_enough_samples(samples, penalties)
    sets = samples.batch.astype(dtype).to(device)
    gram = tensor_kernel(sets, law, activation, "float64", memory_budget)
    rounding = float(np.finfo(dtype).eps)
    best, alphas, errors = _solve(gram, samples, penalties, fit_intercept, rounding, memory_budget)
    layer = DeviceKernelLayer(law, samples.batch, best.coef, best.intercept, activation, device, dtype)
    return assemble(layer, Solved(best, alphas, errors), samples, batch, "kernel", memory_budget)


def fit_finite_on_device(
    batch: SetBatch,
    columns: Float[np.ndarray, "n t"],
    heads: HeadDraw,
    penalties: Float[np.ndarray, " a"] | None = None,
    *,
    device: str,
    dtype: str = "float64",
    activation: str = "relu",
    fit_intercept: bool = True,
    weights: Float[np.ndarray, " n"] | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> LayerFit:
    """Fit M heads on a device through ΦΦᵀ, summed in float64; on the host if n × n matrices do not fit the device.

    Parameters as for `layer.fit_finite_layer`.
    """
    from keyhole._torch.arrays import as_array, free_bytes, to_device, zeros

    samples = distinct_samples(batch.numpy(), columns, weights)
    check_enough_samples(samples, penalties)
    n, width = len(samples.batch), heads.dim + 1
    if 3 * 8 * n * n > free_bytes(device):
        options: dict[str, Any] = {"activation": activation, "fit_intercept": fit_intercept, "weights": weights}
        return fit_finite_layer(
            batch.numpy(), columns, heads, penalties, dtype=dtype, memory_budget=memory_budget, **options
        )
    sets = samples.batch.astype(dtype).to(device)

    def head_blocks() -> Iterator[tuple[slice, Any]]:
        for part in blocks(heads.n_heads, block_size(16 * n * width, max(memory_budget, free_bytes(device) // 8))):
            yield part, _features(sets, heads, part, activation)

    gram = zeros(n, n, device)
    for _, block in head_blocks():
        gram.addmm_(block, block.T)
    best, alphas, errors = _solve(gram, samples, penalties, fit_intercept, EPS, memory_budget)
    dual = to_device(best.coef, device)
    values = np.empty((heads.n_heads, width, dual.shape[1]))
    for part, block in head_blocks():
        values[part] = as_array(block.T @ dual).reshape(-1, width, dual.shape[1])
    layer = DeviceFiniteLayer(heads, values, best.intercept, activation, dtype, device)
    return assemble(layer, Solved(best, alphas, errors), samples, batch, "dual", memory_budget)


def _features(sets: SetBatch, heads: HeadDraw, part: slice, activation: str) -> Any:
    """Columns of Φ under some of the heads, in float64 on the device of the sets."""
    from keyhole._torch.arrays import astype

    block = astype(attention_features(sets, heads.block(part.start, part.stop), activation), "float64")
    return block.mul_(((part.stop - part.start) / heads.n_heads) ** 0.5)  # M^{-1/2} is that of all heads


def _solve(
    gram: Any,
    samples: Samples,
    penalties: Float[np.ndarray, " a"] | None,
    fit_intercept: bool,
    rounding: float,
    memory_budget: int,
) -> tuple[RidgeSolution, np.ndarray, np.ndarray]:
    """Ridge on a float64 Gram matrix on a device, which is overwritten: the best fit, the penalties, their errors."""
    from keyhole._torch.arrays import as_array, as_tensor, free_bytes
    from keyhole._torch.ridge import DeviceRidge

    y = samples.columns
    check_outputs(y)
    given = check_weights(samples.weights, len(y))
    y_mean = centre_of(y, np.sqrt(given)) if fit_intercept else np.zeros(y.shape[1])
    weights = None if samples.weights is None else as_tensor(given, gram)
    tensors = as_tensor(centred(y, y_mean), gram), weights, as_tensor(y_mean, gram)
    problem = DeviceRidge.of(gram, *tensors, fit_intercept)
    single = penalties is not None and len(penalties) == 1
    largest = problem.size() if single else problem.largest()
    scale = max(largest, problem.removed)
    floor = numerical_floor(scale, len(y), rounding)
    alphas = default_alphas(largest, floor) if penalties is None else penalties
    tight = 8 * gram.shape[0] ** 2 > free_bytes(str(gram.device))
    solved: list[tuple[np.ndarray, np.ndarray]] = []
    if alphas.min() > 0 and alphas.min() >= floor:
        for alpha in alphas:
            found = problem.solve(float(alpha), overwrite=single and tight)
            if found is None:
                break
            solved.append((as_array(found[0]), as_array(found[1])))
    if len(solved) < len(alphas):
        return _solve_on_host(
            problem, given, alphas, y, rounding, memory_budget, lost=single and tight and alphas[0] >= floor
        )
    roots = np.sqrt(given)[:, None]
    loos = [leave_one_out(alpha * dual / roots, kept) for alpha, (dual, kept) in zip(alphas, solved, strict=True)]
    errors = np.array([float(mean_squares(loo, given).mean()) for loo in loos])
    resolution = rounding_of_squares(float(np.abs(y).max()), rounding)
    i = 0 if single else select_alpha(alphas, errors, resolution)
    coef, intercept = (as_array(x) for x in problem.unscale(as_tensor(solved[i][0], gram)))
    return RidgeSolution(float(alphas[i]), coef, intercept, loos[i], float(errors[i]), "cholesky"), alphas, errors


def _solve_on_host(
    problem: Any,
    weights: np.ndarray,
    alphas: np.ndarray,
    y: np.ndarray,
    rounding: float,
    memory_budget: int,
    lost: bool,
) -> tuple[RidgeSolution, np.ndarray, np.ndarray]:
    """The path by NumPy, for penalties below the numerical floor."""
    from keyhole._torch.arrays import as_array

    if lost:
        raise np.linalg.LinAlgError(
            f"the kernel plus alpha = {alphas[0]:g} is not positive definite in float64, and the device is too small "
            "to keep a copy of it. Use a larger alpha, dtype='float64', or device=None."
        )
    normal = None if problem.normal is None else as_array(problem.normal)
    host = Weighing(
        as_array(problem.y), np.sqrt(weights), normal, as_array(problem.y_mean), as_array(problem.gram_mean),
        problem.removed, float(np.abs(y).max()),
    )  # fmt: skip
    matrix = np.asfortranarray(as_array(problem.matrix))
    path = weighed_path(
        matrix, host, alphas, rounding=rounding, dtype=np.dtype(np.float64), memory_budget=memory_budget
    )
    return path.solution(0 if len(alphas) == 1 else None), path.alphas, path.loo_mse
