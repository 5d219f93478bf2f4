"""Learning a head distribution on a device.

The gradient and the judgement of `head_error` in plain torch, tokens staying there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from keyhole._tensors import as_array, check_device
from keyhole.attention.head_error import HeadGradient, Task
from keyhole.attention.heads import FittedHeads
from keyhole.attention.hops import ages_of
from keyhole.attention.learned import LearningPlan
from keyhole.ridge.gram import group_stacks
from keyhole.ridge.problem import numerical_floor

MAX_PADDING = 4
"""Places for each sample up to which groups of different sizes are padded to one."""


class DeviceTask:
    """Samples of one set each on a device; ``part`` takes some of them, padded to the longest.

    Arithmetic is float32 for features and float64 for ridge, as on the host.
    """

    def __init__(self, task: Task, device: str) -> None:
        self.task, self.device = task, check_device(device)
        sets = task.batch.sets
        keys = np.zeros((len(sets.tokens) + 1, sets.dim + 1), np.float32)  # the last one pads
        keys[:-1, :-1], keys[:-1, -1] = sets.tokens, 1.0
        self.keys = self.put(keys)
        self.query = self.put(sets.extended_query()[:, :-1].astype(np.float32))
        self.last = float(sets.extended_query()[0, -1])  # 1, or √2 for the constant query
        self.ages: np.ndarray | None = None

    def put(self, array: Any, dtype: Any = None) -> Any:
        """An array on the device."""
        return torch.as_tensor(np.ascontiguousarray(array), device=self.device, dtype=dtype)

    def part(
        self, rows: np.ndarray, plan: LearningPlan | None = None, count: int = 0
    ) -> DevicePart:
        """Some samples, as step number ``count`` of a plan sees them if there is one."""
        sets = self.task.batch.sets
        if plan is not None and plan.augment is not None:  # a caller's function knows NumPy alone
            task = plan.augmented(self.task.take(rows), count)
            return DeviceTask(task, str(self.device)).part(np.arange(len(rows)))
        lengths, longest = sets.lengths[rows], int(sets.lengths[rows].max())
        inside = np.arange(longest) < lengths[:, None]
        places = np.where(
            inside, sets.offsets[rows][:, None] + np.arange(longest), len(sets.tokens)
        )
        keys = self.keys[self.put(places)]
        if plan is not None and plan.ages is not None and plan.jitter:
            if self.ages is None:
                self.ages = ages_of(sets.tokens, plan.ages.hot)
            moved, older = plan.ages.older(
                self.ages[places[inside]], lengths, plan.jitter, plan.generator(count)
            )
            where = self.put(np.flatnonzero(inside)[moved])
            flat = keys.view(-1, keys.shape[2])
            flat[where[:, None], self.put(plan.ages.columns)] = self.put(older)
        return DevicePart(self, rows, keys, self.put(inside))


class DevicePart:
    """Some samples on a device, with what a gradient of theirs needs."""

    def __init__(self, home: DeviceTask, rows: np.ndarray, keys: Any, inside: Any) -> None:
        task, put = home.task, home.put
        self.put, self.last, self.keys, self.inside = put, home.last, keys, inside
        self.query = home.query[put(rows)]
        self.activation, self.fit_intercept = task.activation, task.fit_intercept
        self.columns = put(task.columns[rows], torch.float64)
        weights = np.ones(len(rows)) if task.weights is None else task.weights[rows]
        self.weights = put(weights, torch.float64)
        self.extras = put(task.extras[rows])
        groups = [] if task.groups is None else _group_rows(task.groups[rows])
        self.groups = [
            (put(members), put(members == len(rows), torch.float64)) for members in groups
        ]

    def features(self, hops: Sequence[Any], heads: Any) -> Any:
        """Φ after some hops, (n, M·D)."""
        outside = torch.where(self.inside, 0.0, -torch.inf)[:, None]
        query, one = self.query, torch.full_like(self.query[:, :1], self.last)
        for hop in hops:
            scores = self._scores(torch.cat([query, one], dim=1), hop) + outside
            found = torch.softmax(scores, dim=2) @ self.keys[:, :, :-1]
            query = torch.cat([query, found.flatten(1)], dim=1)
        scores = self._scores(torch.cat([query, one], dim=1), heads)
        if self.activation == "softmax":
            weights = torch.softmax(scores + outside, dim=2)
        else:
            inside = self.inside[:, None]
            weights = torch.where(inside, _POINTWISE[self.activation](scores), 0.0) / inside.sum(
                2, keepdim=True
            )
        return (weights @ self.keys).flatten(1) / math.sqrt(len(heads))

    def _scores(self, asked: Any, heads: Any) -> Any:
        wide = heads.permute(1, 0, 2).reshape(heads.shape[1], -1)
        return (asked @ wide).view(len(asked), len(heads), -1) @ self.keys.transpose(1, 2)

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
        moved = [self.put(hop, torch.float32).requires_grad_() for hop in hops]
        owner = self.put(np.arange(len(noise)) % len(means))
        heads = (
            self.put(noise, torch.float32) + self.put(means, torch.float32)[owner]
        ).requires_grad_()
        features = self.features(moved, heads)
        centred = features - features.mean(0) if self.fit_intercept else features
        numbers, in_gram = self._left_out(centred.detach(), alpha)
        slopes = torch.autograd.grad(
            centred, [*moved, heads], 2 * in_gram.to(torch.float32) @ centred.detach()
        )
        failed, error, in_alpha = numbers.tolist()  # the host waits here, and nowhere before
        if failed:
            raise np.linalg.LinAlgError(
                "the Gram matrix plus the penalty must be positive definite."
            )
        *in_hops, in_heads = (as_array(slope) for slope in slopes)
        found = HeadGradient.of_heads(error, in_alpha, in_heads, noise, len(means), in_hops)
        return found if scales else replace(found, scales=None)

    def _inverse(self, features: Any, alpha: float) -> tuple[Any, Any, Any]:
        """The Gram matrix, an inverse, and whether it failed.

        The inverse is that of the matrix plus the penalty, less its part along the intercept.
        """
        gram = (features @ features.T + self.extras @ self.extras.T).to(torch.float64)
        factor, failed = torch.linalg.cholesky_ex(gram + torch.diag(alpha / self.weights))
        inverse = torch.cholesky_inverse(factor)
        if self.fit_intercept:
            sums = inverse.sum(1)
            inverse -= torch.outer(sums, sums / sums.sum())
        return gram, inverse, failed

    def _carried_penalty(self, gram: Any) -> float:
        """The least α for which K + α diag(1/w) is sure to be positive definite.

        For K made in float32.
        """
        largest = float(torch.linalg.matrix_norm(gram)) or 1.0
        rounding = float(np.finfo(np.float32).eps)
        return numerical_floor(largest, len(gram), rounding) * float(self.weights.max())

    def _pulls(self, inverse: Any, dual: Any, share: Any) -> tuple[Any, Any, Any]:
        """Left-out residuals e_g = B_gg⁻¹β_g, and what their gradient needs.

        z_g = 2B_gg⁻¹w_g e_g, and the symmetric part of z_g e_gᵀ, times B.
        """
        if not self.groups:
            own = inverse.diagonal()[:, None]
            residuals = dual / own
            pull = 2 * share[:, None] * residuals / own
            return residuals, pull, (pull * residuals).sum(1)[:, None] * inverse
        # one row more, of zeros, for what groups are padded with
        wide, padded, share = (
            torch.nn.functional.pad(a, p)
            for a, p in ((inverse, (0, 1, 0, 1)), (dual, (0, 0, 0, 1)), (share, (0, 1)))
        )
        residuals, pull, middle = (
            torch.zeros_like(padded),
            torch.zeros_like(padded),
            torch.zeros_like(wide),
        )
        for rows, outside in self.groups:
            block = wide[rows[:, :, None], rows[:, None, :]] + torch.diag_embed(outside)
            solved = torch.linalg.inv_ex(block)[0]
            left = solved @ padded[rows]
            pulled = 2 * solved @ (share[rows][:, :, None] * left)
            outer = pulled @ left.transpose(1, 2)
            residuals[rows], pull[rows] = left, pulled
            middle[rows] = 0.5 * (outer + outer.transpose(1, 2)) @ wide[rows]
        return residuals[:-1], pull[:-1], middle[:-1, :-1]

    def _left_out(self, features: Any, alpha: float) -> tuple[Any, Any]:
        """`ridge.gram.loo_gradient`: if it failed, the error, and its gradients.

        In log α and in the Gram matrix.
        """
        _, inverse, failed = self._inverse(features, alpha)
        dual = inverse @ self.columns
        share = self.weights / (self.weights.sum() * self.columns.shape[1])
        residuals, pull, middle = self._pulls(inverse, dual, share)
        gradient = inverse @ middle
        cross = (inverse @ pull) @ dual.T
        gradient -= 0.5 * (cross + cross.T)
        error = (share @ residuals.square()).sum()
        return torch.stack(
            [failed, error, alpha * (gradient.diagonal() / self.weights).sum()]
        ), gradient

    def judge(
        self, hops: Sequence[np.ndarray], heads: np.ndarray, alpha: float, held_out: DevicePart
    ) -> tuple[np.ndarray, np.ndarray]:
        """Squared left-out errors of these samples, averaged over outputs.

        And those of others by the fit to these.
        """
        with torch.no_grad():
            moved = [self.put(hop, torch.float32) for hop in hops]
            drawn = self.put(heads, torch.float32)
            features, ahead = self.features(moved, drawn), held_out.features(moved, drawn)
            if self.fit_intercept:
                centre = features.mean(0)
                features, ahead = features - centre, ahead - centre
            gram, inverse, failed = self._inverse(features, alpha)
            if int(
                failed
            ):  # as in `head_error.ridge_values`: raised to what the rounding of the matrix carries
                alpha = max(alpha, self._carried_penalty(gram))
                gram, inverse, _ = self._inverse(features, alpha)
            dual = inverse @ self.columns
            predicted = ahead.to(torch.float64) @ (features.to(torch.float64).T @ dual)
            predicted = predicted + (held_out.extras @ self.extras.T).to(torch.float64) @ dual
            if self.fit_intercept:
                level = self.columns - gram @ dual - alpha * dual / self.weights[:, None]
                predicted = predicted + (self.weights @ level) / self.weights.sum()
            left, _, _ = self._pulls(inverse, dual, self.weights)
            return as_array(left.square().mean(1)), as_array(
                (held_out.columns - predicted).square().mean(1)
            )


def _group_rows(groups: np.ndarray) -> list[np.ndarray]:
    """The members of groups, padded or apart by size.

    All are padded to the largest with the number after the last.
    """
    stacks = list(group_stacks(groups))
    longest, count = max(rows.shape[1] for rows in stacks), sum(map(len, stacks))
    if count * longest > MAX_PADDING * len(groups):
        return stacks
    outside = len(groups)
    wide = [
        np.pad(rows, ((0, 0), (0, longest - rows.shape[1])), constant_values=outside)
        for rows in stacks
    ]
    return [np.concatenate(wide)]


def judge_on_device(
    seen: Task, unseen: Task, device: str
) -> Callable[[FittedHeads, np.ndarray, float], tuple[np.ndarray, np.ndarray]]:
    """What judges heads of a head distribution at a penalty: `head_error.judge`."""
    here, there = (DeviceTask(task, device).part(np.arange(len(task))) for task in (seen, unseen))
    return lambda distribution, heads, alpha: here.judge(distribution.hops_, heads, alpha, there)


_POINTWISE: dict[str, Any] = {
    "relu": torch.relu,
    "linear": lambda s: s,
    "square": torch.square,
    "exp": torch.exp,
}
