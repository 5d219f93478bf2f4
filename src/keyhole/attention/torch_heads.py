"""Learning a head distribution on a device.

The gradient and the judgement of `head_error` in plain torch; tokens stay on the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from keyhole._array import block_size
from keyhole._tensors import as_array, check_device
from keyhole.attention.descent import LearningPlan
from keyhole.attention.head_error import (
    HeadGradient,
    Judgement,
    Outcomes,
    Task,
    drawn_heads,
    hops_of,
    penalties_to_compare,
)
from keyhole.attention.heads import HeadDistribution
from keyhole.attention.hops import ages_of
from keyhole.data.arrays import gathered
from keyhole.ridge.device import ridge_device
from keyhole.ridge.gram import group_stacks
from keyhole.ridge.problem import (
    check_gram_size,
    choose_penalty,
    errors_in_own_units,
    numerical_floor,
)

BLOCK_BYTES = 2**30
"""Bytes of padded keys, scores and weights of the samples whose features are made at a time."""

FLOAT32_EPS = float(np.finfo(np.float32).eps)

NOT_POSITIVE_DEFINITE = "the Gram matrix plus the penalty must be positive definite."

_LOCK = threading.Lock()
"""Held where torch sets something up for the whole process: its factorisations, a capture."""

MAX_PADDING = 4
"""Places for each sample up to which groups of different sizes are padded to the largest."""


class DeviceSamples:
    """Samples of one set each on a device; ``part`` takes some of them, padded to the longest.

    Arithmetic is float32 for features and float64 for ridge, as on the host. Tokens that are on the
    device already are not moved.
    """

    steps_on_device = True

    def __init__(self, task: Task, device: str) -> None:
        self.task = task
        self.device = check_device(device)
        moved = task.batch.sets.to(str(self.device), "float32")
        self.tokens = moved.tokens

        # x_0, and the number appended to it: 1, or √2 for the constant query, which has no x_0
        if moved.query is None:
            self.query = self.tokens.new_zeros(len(task), 0)
            self.last = math.sqrt(2.0)
        else:
            self.query = moved.query
            self.last = 1.0

        # outputs, weights and extras, of which steps take rows
        weights = task.weights
        if weights is None:
            weights = np.ones(len(task))
        self.columns = self.put(task.columns, torch.float64)
        self.weights = self.put(weights, torch.float64)
        self.extras = self.put(task.extras)
        self.ages: np.ndarray | None = None

        # the number of groups and the size of the largest; (0, 0) without groups
        self.group_shape = (0, 0)
        if task.groups is not None:
            _, sizes = np.unique(task.groups, return_counts=True)
            self.group_shape = (len(sizes), int(sizes.max()))

        # captured gradients by the shapes of what they are given; only CUDA has such graphs
        self.uses_graphs = self.device.type == "cuda"
        self.graphs: dict[Any, GradientGraph] = {}

        # the stream that prepares steps: on the one of gradients, every copy would wait until the
        # gradient before it is there. Streams of this priority come from a pool of their own, so
        # that it is never one that a graph is captured on
        self.stream: Any = None
        if self.uses_graphs:
            self.stream = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

        # torch loads its factorisations at the first call, and fails if two threads make it at
        # once ("lazy wrapper should be called at most once"), as two fits in threads would
        with _LOCK:
            torch.linalg.cholesky_ex(torch.ones(1, 1, device=self.device))

    def put(self, array: Any, dtype: Any = None) -> Any:
        """An array on the device."""
        return torch.as_tensor(np.ascontiguousarray(array), device=self.device, dtype=dtype)

    def part(self, rows: np.ndarray, plan: LearningPlan, count: int) -> DevicePart:
        """Some samples, as step number ``count`` of a plan sees them."""
        if self.stream is None:
            return DevicePart(self, rows, self._padded(rows, plan, count))
        with torch.cuda.stream(self.stream):
            part = DevicePart(self, rows, self._padded(rows, plan, count))
            part.is_ready = self.stream.record_event()
        return part

    def _padded(
        self, rows: np.ndarray, plan: LearningPlan | None = None, count: int = 0
    ) -> PaddedPart:
        """Some sets, as step number ``count`` of a plan sees them if there is one."""
        sets = self.task.batch.sets
        lengths = sets.lengths[rows]
        # where the keys of these sets stand among all; a step sees some of those of large sets
        offsets, seen_keys = gathered(sets.offsets, rows)
        if plan is not None:
            is_seen = plan.keys_of_step(lengths, count)
            lengths = np.add.reduceat(is_seen, offsets[:-1], dtype=int)
            seen_keys = seen_keys[is_seen]

        # keys x~_i = [x_i; 1] of these sets, (n, longest, D). Places beyond the end of a set hold
        # the first key of all, to which `PaddedPart` gives no weight
        longest = int(lengths.max())
        if plan is not None and self.uses_graphs:
            # one shape for all steps, so that one graph can be replayed for them
            longest = min(int(sets.lengths.max()), plan.settings.max_keys)
        inside = np.arange(longest) < lengths[:, None]
        places = np.zeros(inside.shape, np.int64)
        places[inside] = seen_keys
        keys = torch.nn.functional.pad(self.tokens[self.put(places)], (0, 1), value=1.0)

        # some keys become older, as in `Ages.moved`
        if plan is not None and plan.ages is not None and plan.settings.jitter:
            if self.ages is None:
                self.ages = ages_of(as_array(self.tokens), plan.ages.hot)
            moved, values = plan.ages.older(
                self.ages[places[inside]],
                lengths,
                plan.settings.jitter,
                plan.generator(count),
            )
            moved_places = self.put(np.flatnonzero(inside)[moved])
            flat = keys.view(-1, keys.shape[2])
            flat[moved_places[:, None], self.put(plan.ages.columns)] = self.put(values)
        return PaddedPart(
            activation=self.task.activation,
            keys=keys,
            inside=self.put(inside),
            query=self.query[self.put(rows)],
            last=self.last,
        )

    def features(self, rows: np.ndarray, hops: Sequence[Any], heads: Any) -> Any:
        """Φ of some samples after some hops, (r, M·D): sets of similar length at a time."""
        lengths = self.task.batch.sets.lengths[rows]
        by_length = np.argsort(lengths, kind="stable")
        out = self.tokens.new_empty(len(rows), len(heads) * heads.shape[2])

        # a set takes its padded keys, and scores and weights of every head
        widest = max(len(matrix) for matrix in (*hops, heads))
        bytes_per_key = 4 * (2 * heads.shape[2] + 3 * widest)
        keys_at_once = block_size(bytes_per_key, BLOCK_BYTES)
        for block in padded_blocks(lengths[by_length], keys_at_once):
            chosen = by_length[block]
            out[self.put(chosen)] = self._padded(rows[chosen]).features(hops, heads)
        return out

    def judge(
        self,
        distribution: HeadDistribution,
        seen: np.ndarray,
        *,
        n_heads: int,
        seed: int,
        heads: np.ndarray | None = None,
        unseen: np.ndarray | None = None,
        alpha: float | None = None,
    ) -> Judgement:
        """`head_error.judge` on the device."""
        if heads is None:
            heads = drawn_heads(self.task.batch, distribution, n_heads, seed)
        hops = [self.put(hop, torch.float32) for hop in hops_of(distribution)]
        drawn = self.put(heads, torch.float32)
        seen_there = self.put(seen)
        with torch.no_grad():
            # centred features and their Gram matrix
            features = self.features(seen, hops, drawn)
            centre = features.new_zeros(features.shape[1])
            if self.task.fit_intercept:
                centre = features.mean(0)
            features = features - centre
            extras = self.extras[seen_there]
            gram = features @ features.T + extras @ extras.T
            squared_lengths = as_array(gram.diagonal())
            check_gram_size(squared_lengths)
            spread = float(squared_lengths.mean())

            # ridge, at a penalty that is chosen or given
            ridge = DescentRidge(self, seen)
            if alpha is None:
                outcomes = self.task.outcomes(seen)
                fit = ridge.fit_at_best_penalty(gram.to(torch.float64), outcomes)
            else:
                fit = ridge.fit_at(gram.to(torch.float64), alpha)
            loo = as_array(fit.residuals.square().mean(1))

            # errors of the held-out samples, in float64
            held_out = np.zeros(0)
            if unseen is not None:
                unseen_there = self.put(unseen)
                values = features.to(torch.float64).T @ fit.dual
                shifted = self.features(unseen, hops, drawn) - centre
                predicted = shifted.to(torch.float64) @ values + fit.intercept
                of_extras = (self.extras[unseen_there] @ extras.T).to(torch.float64)
                predicted = predicted + of_extras @ fit.dual
                held_out = as_array((self.columns[unseen_there] - predicted).square().mean(1))
        return Judgement(loo=loo, held_out=held_out, alpha=fit.alpha, spread=spread)


@dataclass(frozen=True)
class RidgeValues:
    """A ridge fit on a device: dual coefficients, intercept and leave-one-out residuals."""

    dual: torch.Tensor
    intercept: torch.Tensor
    residuals: torch.Tensor
    alpha: float


class DescentRidge:
    """Ridge on a Gram matrix of some samples on a device: its values, and its gradient.

    The formulas are those of `ridge.gram.centred_inverse`, `left_out_residuals` and
    `loo_gradient`.
    """

    def __init__(self, samples: DeviceSamples, rows: np.ndarray) -> None:
        self.fit_intercept = samples.task.fit_intercept
        rows_there = samples.put(rows)
        self.columns = samples.columns[rows_there]
        self.weights = samples.weights[rows_there]

        # members of each group, and ones where groups are padded; and whether these have the same
        # shape for any other samples, if they are as many
        self.groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.has_one_shape = True
        if samples.task.groups is not None:
            self.has_one_shape = fits_one_table(samples.group_shape, len(rows))
            for members in _group_rows(samples.task.groups[rows], samples.group_shape):
                padding = samples.put(members == len(rows), torch.float64)
                self.groups.append((samples.put(members), padding))

    def tensors(self) -> list[torch.Tensor]:
        """What differs between steps, in one order."""
        return [self.columns, self.weights, *(each for pair in self.groups for each in pair)]

    def fit_at_best_penalty(self, gram: Any, outcomes: Outcomes) -> RidgeValues:
        """`head_error.ridge_values` at the penalty that leave-one-out chooses.

        The Gram matrix is overwritten.
        """
        if outcomes.groups is None:
            fit = ridge_device(gram, outcomes.problem(None), rounding=FLOAT32_EPS)
            assert fit.left_out is not None
            return RidgeValues(
                dual=torch.as_tensor(fit.coef, device=gram.device),
                intercept=torch.as_tensor(fit.intercept, device=gram.device),
                residuals=torch.as_tensor(fit.left_out, device=gram.device),
                alpha=fit.alpha,
            )

        # with groups, a few penalties; every output counts in units of its own spread
        alphas = penalties_to_compare(float(torch.linalg.matrix_norm(gram)))
        fits = [self.fit_at(gram, alpha) for alpha in alphas.tolist()]
        shares = self.weights / self.weights.sum()
        errors = as_array(torch.stack([shares @ fit.residuals.square() for fit in fits]))
        relative_errors = errors_in_own_units(errors, outcomes.problem(alphas).spread)
        if relative_errors is None:
            relative_errors = errors.mean(axis=1)
        return fits[choose_penalty(alphas, relative_errors)]

    def fit_at(self, gram: Any, alpha: float) -> RidgeValues:
        """`head_error.ridge_values` at a penalty.

        It is raised to what the rounding of K in float32 carries, if it is smaller.
        """
        inverse, failed = self._inverse(gram, alpha)
        if int(failed):
            alpha = max(alpha, self._carried_penalty(gram))
            inverse, failed = self._inverse(gram, alpha)
            if int(failed):
                raise np.linalg.LinAlgError(NOT_POSITIVE_DEFINITE)
        dual = inverse @ self.columns
        intercept = dual.new_zeros(dual.shape[1])
        if self.fit_intercept:
            # y − K a − α a / w is the intercept, the same for every sample
            level = self.columns - gram @ dual - alpha * dual / self.weights[:, None]
            intercept = (self.weights @ level) / self.weights.sum()
        residuals, _, _ = self._residuals_and_pulls(inverse, dual, self.weights)
        return RidgeValues(dual=dual, intercept=intercept, residuals=residuals, alpha=alpha)

    def loo_gradient(self, gram: Any, alpha: Any) -> tuple[Any, Any]:
        """`ridge.gram.loo_gradient` of a Gram matrix.

        Returns whether it failed, the error E and ∂E/∂log α as one tensor, for which the host waits
        once; and ∂E/∂K.
        """
        inverse, failed = self._inverse(gram, alpha)
        dual = inverse @ self.columns
        share = self.weights / (self.weights.sum() * self.columns.shape[1])
        residuals, pull, middle = self._residuals_and_pulls(inverse, dual, share)

        # ∂E/∂K = B P B − (B z βᵀ + β zᵀ B)/2, where `middle` is P B: P is diagonal, or has a block
        # for each group
        gradient = inverse @ middle
        cross = (inverse @ pull) @ dual.T
        gradient -= 0.5 * (cross + cross.T)
        error = (share @ residuals.square()).sum()
        in_log_alpha = alpha * (gradient.diagonal() / self.weights).sum()
        return torch.stack([failed, error, in_log_alpha]), gradient

    def _inverse(self, gram: Any, alpha: Any) -> tuple[Any, Any]:
        """B = A − A11ᵀA/(1ᵀA1) for A = (K + α diag(1/w))⁻¹, and whether that failed.

        Without an intercept B = A.
        """
        factor, failed = torch.linalg.cholesky_ex(gram + torch.diag(alpha / self.weights))
        # A = L⁻ᵀL⁻¹ by a triangular solve and a product: 0.3 ms for 600 samples, and
        # cholesky_inverse takes 0.6 (H200)
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        factor_inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        inverse = factor_inverse.T @ factor_inverse
        if self.fit_intercept:
            sums = inverse.sum(1)
            inverse -= torch.outer(sums, sums / sums.sum())
        return inverse, failed

    def _carried_penalty(self, gram: Any) -> float:
        """The least α for which K + α diag(1/w) is positive definite, for K made in float32."""
        largest = float(torch.linalg.matrix_norm(gram)) or 1.0
        return numerical_floor(largest, len(gram), FLOAT32_EPS) * float(self.weights.max())

    def _residuals_and_pulls(self, inverse: Any, dual: Any, share: Any) -> tuple[Any, Any, Any]:
        """Leave-one-out residuals e_g = B_gg⁻¹β_g, and what their gradient needs.

        That is z_g = 2 B_gg⁻¹ s_g e_g for the share s of each sample in the error, and P B, where P
        has the symmetric parts of z_g e_gᵀ as blocks.
        """
        # a sample alone is a group of one, and B_gg a number
        if not self.groups:
            diagonal = inverse.diagonal()[:, None]
            residuals = dual / diagonal
            pull = 2 * share[:, None] * residuals / diagonal
            return residuals, pull, (pull * residuals).sum(1)[:, None] * inverse

        # groups are padded with the number after the last sample: one row more, of zeros
        inverse = torch.nn.functional.pad(inverse, (0, 1, 0, 1))
        dual = torch.nn.functional.pad(dual, (0, 0, 0, 1))
        share = torch.nn.functional.pad(share, (0, 1))

        residuals = torch.zeros_like(dual)
        pull = torch.zeros_like(dual)
        middle = torch.zeros_like(inverse)
        # (several empty places write to that row, and all write zeros)
        for rows, padding in self.groups:
            # ones on the diagonal of the padding, so that every block has an inverse
            block = inverse[rows[:, :, None], rows[:, None, :]] + torch.diag_embed(padding)
            block_inverse = torch.linalg.inv_ex(block)[0]
            residuals_of_group = block_inverse @ dual[rows]
            pull_of_group = 2 * block_inverse @ (share[rows][:, :, None] * residuals_of_group)
            outer = pull_of_group @ residuals_of_group.transpose(1, 2)
            residuals[rows] = residuals_of_group
            pull[rows] = pull_of_group
            middle[rows] = 0.5 * (outer + outer.transpose(1, 2)) @ inverse[rows]
        return residuals[:-1], pull[:-1], middle[:-1, :-1]


@dataclass(frozen=True)
class PaddedPart:
    """Some sets on a device, all padded to the longest.

    ``keys`` are x~_i, (n, longest, D), and ``inside`` says which of them belong to the set;
    ``query`` is x_0, and ``last`` the number appended to it.
    """

    activation: str
    keys: torch.Tensor
    inside: torch.Tensor
    query: torch.Tensor
    last: float

    def features(self, hops: Sequence[Any], heads: Any) -> Any:
        """Φ after some hops, (n, M·D)."""
        # −∞ is added to the scores of padding, so that softmax gives it no weight
        padding = torch.where(self.inside, 0.0, -torch.inf)[:, None]
        query = self.query
        one = query.new_full((len(query), 1), self.last)
        for hop in hops:
            scores = self._scores(torch.cat([query, one], dim=1), hop) + padding
            found = torch.softmax(scores, dim=2) @ self.keys[:, :, :-1]
            query = torch.cat([query, found.flatten(1)], dim=1)

        # weights of the last hop, and the keys they average
        scores = self._scores(torch.cat([query, one], dim=1), heads)
        if self.activation == "softmax":
            weights = torch.softmax(scores + padding, dim=2)
        else:
            # masked before as well: where exp overflows, its slope times zero is NaN
            inside = self.inside[:, None]
            scores = torch.where(inside, scores, 0.0)
            activated = torch.where(inside, _POINTWISE[self.activation](scores), 0.0)
            weights = activated / inside.sum(2, keepdim=True)
        return (weights @ self.keys).flatten(1) / math.sqrt(len(heads))

    def _scores(self, query: Any, heads: Any) -> Any:
        """x~_0ᵀ W_m x~_i, (n, M, keys)."""
        wide = heads.permute(1, 0, 2).reshape(heads.shape[1], -1)
        return (query @ wide).view(len(query), len(heads), -1) @ self.keys.transpose(1, 2)


class DevicePart:
    """The samples of one step on a device, with what a gradient of theirs needs."""

    def __init__(self, samples: DeviceSamples, rows: np.ndarray, sets: PaddedPart) -> None:
        self.samples = samples
        self.sets = sets
        self.put = samples.put
        self.fit_intercept = samples.task.fit_intercept
        self.ridge = DescentRidge(samples, rows)
        self.extras = samples.extras[samples.put(rows)]
        self.is_ready: Any = None
        """What a gradient waits for, where another stream prepared this part."""

    def gradient_in_heads(
        self,
        means: np.ndarray,
        noise: np.ndarray,
        alpha: float,
        *,
        scales: bool = False,
        hops: Sequence[np.ndarray] = (),
    ) -> HeadGradient:
        """`head_error.gradient_in_heads` of these samples."""
        # this part's memory belongs to the stream that prepared it, which may use it again once it
        # is freed: the caller holds the part while the host waits for the gradient below
        if self.is_ready is not None:
            torch.cuda.current_stream(self.samples.device).wait_event(self.is_ready)
        matrices = self._moved([noise, means, *hops])
        penalty = torch.tensor(alpha, dtype=torch.float64, device=self.extras.device)
        if self.samples.uses_graphs and self.ridge.has_one_shape:
            flat = self.replayed_gradient(matrices, penalty)
        else:
            flat = self.flat_gradient(matrices, penalty)

        # the host waits for the gradient here. CUDA factorises NaN without saying that it failed
        numbers = as_array(flat)
        failed, error, in_log_alpha = numbers[:3].tolist()
        if failed or not math.isfinite(error):
            raise np.linalg.LinAlgError(NOT_POSITIVE_DEFINITE)
        position = 3
        in_matrices = []
        for matrix in (means, *hops):
            end = position + matrix.size
            in_matrices.append(numbers[position:end].reshape(matrix.shape))
            position = end
        return HeadGradient(
            error=error,
            log_alpha=in_log_alpha,
            means=in_matrices[0],
            scales=numbers[position:] if scales else None,
            hops=in_matrices[1:],
        )

    def _moved(self, matrices: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """Matrices on the device in float32, end to end in one piece of memory."""
        flat = np.concatenate([matrix.ravel() for matrix in matrices], dtype=np.float32)
        pieces = torch.split(self.put(flat), [matrix.size for matrix in matrices])
        return [piece.view(matrix.shape) for piece, matrix in zip(pieces, matrices, strict=True)]

    def tensors(self) -> list[torch.Tensor]:
        """What differs between steps, in one order."""
        sets = self.sets
        return [sets.keys, sets.inside, sets.query, self.extras, *self.ridge.tensors()]

    def replayed_gradient(self, matrices: list[Any], alpha: Any) -> Any:
        """`flat_gradient` by the graph of its shapes, captured when they are first seen."""
        shapes = tuple(tensor.shape for tensor in (*matrices, *self.tensors()))
        if shapes not in self.samples.graphs:
            self.samples.graphs[shapes] = GradientGraph(self, matrices, alpha)
        return self.samples.graphs[shapes].replayed(self, matrices, alpha)

    def flat_gradient(self, matrices: list[Any], alpha: Any) -> Any:
        """All numbers of a gradient end to end, in float64; matrices are noise, means and hops.

        They are whether it failed, the error, the gradient in log α, in the means, in each hop, and
        in the logarithms of the scales of query and key.
        """
        # features of W_m = means[m mod K] + noise_m after the hops
        noise, means = matrices[:2]
        n_means = len(means)
        owner = torch.arange(len(noise), device=noise.device) % n_means
        heads = (noise + means[owner]).requires_grad_()
        hops = [hop.detach().requires_grad_() for hop in matrices[2:]]
        centred = self.sets.features(hops, heads)
        if self.fit_intercept:
            centred = centred - centred.mean(0)

        # ∂E/∂Φ = 2 ∂E/∂K Φ, which torch takes back through heads and hops
        features = centred.detach()
        gram = features @ features.T + self.extras @ self.extras.T
        numbers, in_gram = self.ridge.loo_gradient(gram.to(torch.float64), alpha)
        in_features = 2 * in_gram.to(torch.float32) @ features
        *in_hops, in_heads = torch.autograd.grad(centred, [*hops, heads], in_features)

        # heads of one mean add up, and so do entries of one coordinate
        of_means = [in_heads[mean::n_means].sum(0) for mean in range(n_means)]
        in_log_scales = in_heads * noise
        pieces = [*of_means, *in_hops, in_log_scales.sum((0, 2)), in_log_scales.sum((0, 1))]
        slopes = torch.cat([piece.flatten() for piece in pieces])
        return torch.cat([numbers, slopes.to(torch.float64)])


class GradientGraph:
    """`DevicePart.flat_gradient` as a CUDA graph, replayed for other numbers of the same shapes.

    A gradient is a chain of 130 small kernels. From the first launch to the last result it takes
    3.6 ms one by one, and 0.6 ms as a graph (three hops, 346 samples, H200).

    The tensors of the first step belong to the graph from then on: those of later steps are copied
    into them. A result is to be read before the next replay, which overwrites it.
    """

    def __init__(self, part: DevicePart, matrices: list[Any], alpha: Any) -> None:
        self.inputs = self._inputs(part, matrices, alpha)
        self.graph, self.result = captured(
            lambda: part.flat_gradient(matrices, alpha), alpha.device
        )

    def replayed(self, part: DevicePart, matrices: list[Any], alpha: Any) -> Any:
        """The gradient of other samples at other matrices."""
        for kept, given in zip(self.inputs, self._inputs(part, matrices, alpha), strict=True):
            kept.copy_(given)
        self.graph.replay()
        return self.result

    def _inputs(self, part: DevicePart, matrices: list[Any], alpha: Any) -> list[Any]:
        """All that a gradient depends on, in one order."""
        return [*part.tensors(), *matrices, alpha]


def captured(compute: Callable[[], Any], device: torch.device) -> tuple[Any, Any]:
    """A CUDA graph of what a function computes, and the tensor that its replays write to."""
    with _LOCK, torch.cuda.device(device):
        # torch wants a few rounds on a stream apart, in which libraries set up what they need; the
        # same stream is captured, because the one that torch would take belongs to one device
        apart = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        apart.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(apart):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(apart)

        # what is launched on the stream of the capture is captured, by the thread of autograd too;
        # helper threads may meanwhile allocate and copy
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=apart, capture_error_mode="thread_local"):
            result = compute()
    return graph, result


def padded_blocks(lengths: np.ndarray, n_keys: int) -> list[slice]:
    """Cut sets, the shortest first, into blocks that hold so many keys once they are padded.

    A block has one set at least.
    """
    cut = []
    start = 0
    for stop in range(1, len(lengths) + 1):
        # with one set more, all would be padded to that set
        is_last = stop == len(lengths)
        if is_last or (stop + 1 - start) * lengths[stop] > n_keys:
            cut.append(slice(start, stop))
            start = stop
    return cut


def fits_one_table(shape: tuple[int, int], n_samples: int) -> bool:
    """Whether groups, so many of such a size at most, are padded to one table."""
    n_groups, longest = shape
    return min(n_groups, n_samples) * longest <= MAX_PADDING * n_samples


def _group_rows(groups: np.ndarray, shape: tuple[int, int]) -> list[np.ndarray]:
    """The members of groups: one table (groups, longest), or one for each size of a group.

    ``shape`` is that of the groups of all samples. Empty places of one table hold n, the number
    after the last sample here: `_residuals_and_pulls` appends a row of zeros.
    """
    n_samples = len(groups)
    if not fits_one_table(shape, n_samples):
        return list(group_stacks(groups))
    padded = np.full((min(shape[0], n_samples), shape[1]), n_samples)
    first = 0
    for rows in group_stacks(groups):
        n_rows, size = rows.shape
        padded[first : first + n_rows, :size] = rows
        first += n_rows
    return [padded]


_POINTWISE: dict[str, Any] = {
    "relu": torch.relu,
    "linear": lambda s: s,
    "square": torch.square,
    "exp": torch.exp,
}
