"""Learning a head distribution on a device.

The gradient and the judgement of `head_error` in plain torch; tokens stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from keyhole._tensors import as_array, check_device
from keyhole.attention.descent import LearningPlan
from keyhole.attention.head_error import HeadGradient, Task
from keyhole.attention.heads import FittedHeads
from keyhole.attention.hops import ages_of
from keyhole.data.arrays import gathered
from keyhole.ridge.gram import group_stacks
from keyhole.ridge.problem import numerical_floor

MAX_PADDING = 4
"""Places for each sample up to which groups of different sizes are padded to one."""


class DeviceTask:
    """Samples of one set each on a device; ``part`` takes some of them, padded to the longest.

    Arithmetic is float32 for features and float64 for ridge, as on the host.
    """

    prepares_ahead = True

    def __init__(self, task: Task, device: str) -> None:
        self.task = task
        self.device = check_device(device)
        sets = task.batch.sets

        # x~_i = [x_i; 1], and a row of zeros at the end for padding
        keys = np.zeros((len(sets.tokens) + 1, sets.dim + 1), np.float32)
        keys[:-1, :-1] = sets.tokens
        keys[:-1, -1] = 1.0
        self.keys = self.put(keys)

        # x_0, and the number appended to it: 1, or √2 for the constant query, which has no x_0
        query = sets.seen_query()
        self.query = self.put(query[:, :-1].astype(np.float32))
        self.last = float(query[0, -1])
        self.ages: np.ndarray | None = None

    def put(self, array: Any, dtype: Any = None) -> Any:
        """An array on the device."""
        return torch.as_tensor(np.ascontiguousarray(array), device=self.device, dtype=dtype)

    def part(
        self, rows: np.ndarray, plan: LearningPlan | None = None, count: int = 0
    ) -> DevicePart:
        """Some samples, as step number ``count`` of a plan sees them if there is one."""
        sets = self.task.batch.sets
        lengths = sets.lengths[rows]
        # where the keys of these sets stand among all; a step sees some of those of large sets
        offsets, seen_keys = gathered(sets.offsets, rows)
        if plan is not None:
            is_seen = plan.keys_of_step(lengths, count)
            lengths = np.add.reduceat(is_seen, offsets[:-1], dtype=int)
            seen_keys = seen_keys[is_seen]

        # keys of these sets, (n, longest, D); places beyond the end of a set hold the row of zeros
        inside = np.arange(int(lengths.max())) < lengths[:, None]
        places = np.full(inside.shape, sets.n_tokens)
        places[inside] = seen_keys
        keys = self.keys[self.put(places)]

        # some keys become older, as in `Ages.moved`
        if plan is not None and plan.ages is not None and plan.settings.jitter:
            if self.ages is None:
                self.ages = ages_of(sets.tokens, plan.ages.hot)
            moved, values = plan.ages.older(
                self.ages[places[inside]],
                lengths,
                plan.settings.jitter,
                plan.generator(count),
            )
            moved_places = self.put(np.flatnonzero(inside)[moved])
            flat = keys.view(-1, keys.shape[2])
            flat[moved_places[:, None], self.put(plan.ages.columns)] = self.put(values)
        return DevicePart(self, rows, keys, self.put(inside))


class DevicePart:
    """Some samples on a device, with what a gradient of theirs needs.

    ``keys`` are (n, longest, D), padded, and ``inside`` says which of them belong to the set.
    """

    def __init__(
        self, home: DeviceTask, rows: np.ndarray, keys: torch.Tensor, inside: torch.Tensor
    ) -> None:
        task = home.task
        self.put = home.put
        self.last = home.last
        self.keys = keys
        self.inside = inside
        self.query = home.query[self.put(rows)]
        self.activation = task.activation
        self.fit_intercept = task.fit_intercept
        self.columns = self.put(task.columns[rows], torch.float64)
        weights = np.ones(len(rows)) if task.weights is None else task.weights[rows]
        self.weights = self.put(weights, torch.float64)
        self.extras = self.put(task.extras[rows])

        # members of each group, and ones where groups are padded
        self.groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        if task.groups is not None:
            for members in _group_rows(task.groups[rows]):
                padding = self.put(members == len(rows), torch.float64)
                self.groups.append((self.put(members), padding))

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
            inside = self.inside[:, None]
            activated = torch.where(inside, _POINTWISE[self.activation](scores), 0.0)
            weights = activated / inside.sum(2, keepdim=True)
        return (weights @ self.keys).flatten(1) / math.sqrt(len(heads))

    def _scores(self, query: Any, heads: Any) -> Any:
        """x~_0ᵀ W_m x~_i, (n, M, keys)."""
        wide = heads.permute(1, 0, 2).reshape(heads.shape[1], -1)
        return (query @ wide).view(len(query), len(heads), -1) @ self.keys.transpose(1, 2)

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
        # features of W_m = means[m mod K] + noise_m after the hops
        hop_matrices = [self.put(hop, torch.float32).requires_grad_() for hop in hops]
        owner = self.put(np.arange(len(noise)) % len(means))
        heads = self.put(noise, torch.float32) + self.put(means, torch.float32)[owner]
        heads = heads.requires_grad_()
        features = self.features(hop_matrices, heads)
        centred = features - features.mean(0) if self.fit_intercept else features

        # ∂E/∂Φ = 2 ∂E/∂K Φ, which torch takes back through heads and hops
        numbers, in_gram = self._loo_gradient(centred.detach(), alpha)
        in_features = 2 * in_gram.to(torch.float32) @ centred.detach()
        slopes = torch.autograd.grad(centred, [*hop_matrices, heads], in_features)

        # the host waits for the device here, and nowhere before
        failed, error, in_alpha = numbers.tolist()
        if failed:
            raise np.linalg.LinAlgError(
                "the Gram matrix plus the penalty must be positive definite."
            )
        *in_hops, in_heads = (as_array(slope) for slope in slopes)
        gradient = HeadGradient.of_heads(
            error=error,
            log_alpha=in_alpha,
            heads=in_heads,
            noise=noise,
            n_means=len(means),
            hops=in_hops,
        )
        if not scales:
            gradient = replace(gradient, scales=None)
        return gradient

    def _inverse(self, features: Any, alpha: float) -> tuple[Any, Any, Any]:
        """The Gram matrix K, B = A − A11ᵀA/(1ᵀA1) for A = (K + α diag(1/w))⁻¹, and if that failed.

        Without an intercept B = A.
        """
        gram = (features @ features.T + self.extras @ self.extras.T).to(torch.float64)
        factor, failed = torch.linalg.cholesky_ex(gram + torch.diag(alpha / self.weights))
        inverse = torch.cholesky_inverse(factor)
        if self.fit_intercept:
            sums = inverse.sum(1)
            inverse -= torch.outer(sums, sums / sums.sum())
        return gram, inverse, failed

    def _carried_penalty(self, gram: Any) -> float:
        """The least α for which K + α diag(1/w) is positive definite, for K made in float32."""
        largest = float(torch.linalg.matrix_norm(gram)) or 1.0
        rounding = float(np.finfo(np.float32).eps)
        return numerical_floor(largest, len(gram), rounding) * float(self.weights.max())

    def _pulls(self, inverse: Any, dual: Any, share: Any) -> tuple[Any, Any, Any]:
        """Leave-one-out residuals e_g = B_gg⁻¹β_g, and what their gradient needs.

        That is z_g = 2B_gg⁻¹w_g e_g, and the symmetric part of z_g e_gᵀ, times B.
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

    def _loo_gradient(self, features: Any, alpha: float) -> tuple[Any, Any]:
        """`ridge.gram.loo_gradient` of a Gram matrix: three numbers, and the gradient in it.

        The numbers are whether it failed, the error, and the gradient in log α.
        """
        _, inverse, failed = self._inverse(features, alpha)
        dual = inverse @ self.columns
        share = self.weights / (self.weights.sum() * self.columns.shape[1])
        residuals, pull, middle = self._pulls(inverse, dual, share)

        # ∂E/∂K = B diag(p) B − (B z βᵀ + β zᵀ B)/2
        gradient = inverse @ middle
        cross = (inverse @ pull) @ dual.T
        gradient -= 0.5 * (cross + cross.T)
        error = (share @ residuals.square()).sum()
        in_log_alpha = alpha * (gradient.diagonal() / self.weights).sum()
        return torch.stack([failed, error, in_log_alpha]), gradient

    def judge(
        self, hops: Sequence[np.ndarray], heads: np.ndarray, alpha: float, held_out: DevicePart
    ) -> tuple[np.ndarray, np.ndarray]:
        """Squared leave-one-out errors of these samples, and errors of others by the fit to these.

        Both are averaged over outputs.
        """
        with torch.no_grad():
            # features of both, centred by the mean of these
            hop_matrices = [self.put(hop, torch.float32) for hop in hops]
            drawn = self.put(heads, torch.float32)
            features = self.features(hop_matrices, drawn)
            held_out_features = held_out.features(hop_matrices, drawn)
            if self.fit_intercept:
                centre = features.mean(0)
                features = features - centre
                held_out_features = held_out_features - centre

            # as in `head_error.ridge_values`, α is raised to what the rounding of K carries
            gram, inverse, failed = self._inverse(features, alpha)
            if int(failed):
                alpha = max(alpha, self._carried_penalty(gram))
                gram, inverse, _ = self._inverse(features, alpha)

            # predictions for the others, in float64
            dual = inverse @ self.columns
            values = features.to(torch.float64).T @ dual
            predicted = held_out_features.to(torch.float64) @ values
            predicted = predicted + (held_out.extras @ self.extras.T).to(torch.float64) @ dual
            if self.fit_intercept:
                # y − K a − α a / w is the intercept, the same for every sample
                level = self.columns - gram @ dual - alpha * dual / self.weights[:, None]
                predicted = predicted + (self.weights @ level) / self.weights.sum()

            residuals, _, _ = self._pulls(inverse, dual, self.weights)
            loo = residuals.square().mean(1)
            held_out_errors = (held_out.columns - predicted).square().mean(1)
            return as_array(loo), as_array(held_out_errors)


def _group_rows(groups: np.ndarray) -> list[np.ndarray]:
    """The members of groups: all padded to the largest if that is cheap, else apart by size.

    The padding is the number after the last sample.
    """
    stacks = list(group_stacks(groups))
    longest = max(rows.shape[1] for rows in stacks)
    n_groups = sum(len(rows) for rows in stacks)
    if n_groups * longest > MAX_PADDING * len(groups):
        return stacks
    padded = []
    for rows in stacks:
        missing = longest - rows.shape[1]
        padded.append(np.pad(rows, ((0, 0), (0, missing)), constant_values=len(groups)))
    return [np.concatenate(padded)]


def judge_on_device(
    seen: Task, unseen: Task, device: str
) -> Callable[[FittedHeads, np.ndarray, float], tuple[np.ndarray, np.ndarray]]:
    """A function that judges heads of a head distribution at a penalty: `head_error.judge`."""
    seen_part = DeviceTask(seen, device).part(np.arange(len(seen)))
    unseen_part = DeviceTask(unseen, device).part(np.arange(len(unseen)))

    def judge_heads(
        distribution: FittedHeads, heads: np.ndarray, alpha: float
    ) -> tuple[np.ndarray, np.ndarray]:
        return seen_part.judge(distribution.hops_, heads, alpha, unseen_part)

    return judge_heads


_POINTWISE: dict[str, Any] = {
    "relu": torch.relu,
    "linear": lambda s: s,
    "square": torch.square,
    "exp": torch.exp,
}
