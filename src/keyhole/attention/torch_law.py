"""Learning a law on a device: the gradient and the judgement of `learned` in plain torch, tokens staying there."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from keyhole._tensors import as_array, check_device
from keyhole.attention.heads import FittedHeads
from keyhole.attention.learned import LawGradient, LearningPlan, Task
from keyhole.attention.looks import ages_of
from keyhole.ridge.gram import group_stacks


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

    def part(self, rows: np.ndarray, plan: LearningPlan | None = None, count: int = 0) -> DevicePart:
        """Some samples, as step number ``count`` of a plan sees them if there is one."""
        sets = self.task.batch.sets
        if plan is not None and plan.augment is not None:  # a caller's function knows NumPy alone
            task = plan.augmented(self.task.take(rows), count)
            return DeviceTask(task, str(self.device)).part(np.arange(len(rows)))
        lengths, longest = sets.lengths[rows], int(sets.lengths[rows].max())
        inside = np.arange(longest) < lengths[:, None]
        places = np.where(inside, sets.offsets[rows][:, None] + np.arange(longest), len(sets.tokens))
        keys = self.keys[self.put(places)]
        if plan is not None and plan.ages is not None and plan.jitter:
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            own = ages_of(sets.tokens, plan.ages.hot) if self.ages is None else self.ages
            self.ages = own
            known, older = plan.ages.older(own[places[inside]], offsets, plan.jitter, plan.generator(count))
            where = self.put(np.flatnonzero(inside)[known])
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
        groups = [] if task.groups is None else list(group_stacks(task.groups[rows]))
        self.groups = [put(members) for members in groups]

    def features(self, looks: Sequence[Any], heads: Any) -> Any:
        """Φ after some looks, (n, M·D)."""
        outside = torch.where(self.inside, 0.0, -torch.inf)[:, None]
        query, one = self.query, torch.full_like(self.query[:, :1], self.last)
        for look in looks:
            scores = self._scores(torch.cat([query, one], dim=1), look) + outside
            found = torch.softmax(scores, dim=2) @ self.keys[:, :, :-1]
            query = torch.cat([query, found.flatten(1)], dim=1)
        scores = self._scores(torch.cat([query, one], dim=1), heads)
        if self.activation == "softmax":
            weights = torch.softmax(scores + outside, dim=2)
        else:
            inside = self.inside[:, None]
            weights = torch.where(inside, _POINTWISE[self.activation](scores), 0.0) / inside.sum(2, keepdim=True)
        return (weights @ self.keys).flatten(1) / math.sqrt(len(heads))

    def _scores(self, asked: Any, heads: Any) -> Any:
        wide = heads.permute(1, 0, 2).reshape(heads.shape[1], -1)
        return (asked @ wide).view(len(asked), len(heads), -1) @ self.keys.transpose(1, 2)

    def gradient_in_law(
        self,
        means: np.ndarray,
        noise: np.ndarray,
        alpha: float,
        *,
        scales: bool = False,
        looks: Sequence[np.ndarray] = (),
    ) -> LawGradient:
        """`learned.gradient_in_law` of these samples."""
        moved = [self.put(look, torch.float32).requires_grad_() for look in looks]
        owner = self.put(np.arange(len(noise)) % len(means))
        heads = (self.put(noise, torch.float32) + self.put(means, torch.float32)[owner]).requires_grad_()
        features = self.features(moved, heads)
        centred = features - features.mean(0) if self.fit_intercept else features
        error, in_alpha, in_gram = self._left_out(centred.detach(), alpha)
        slopes = torch.autograd.grad(centred, [*moved, heads], 2 * in_gram.to(torch.float32) @ centred.detach())
        *in_looks, in_heads = (as_array(slope) for slope in slopes)
        found = LawGradient.of_heads(error, in_alpha, in_heads, noise, len(means), in_looks)
        return found if scales else replace(found, scales=None)

    def _inverse(self, features: Any, alpha: float) -> tuple[Any, Any]:
        """The Gram matrix, and the inverse of it and the penalty less its part along the intercept, in float64."""
        gram = (features @ features.T + self.extras @ self.extras.T).to(torch.float64)
        factor, info = torch.linalg.cholesky_ex(gram + torch.diag(alpha / self.weights))
        if int(info) != 0:
            raise np.linalg.LinAlgError("the Gram matrix plus the penalty must be positive definite.")
        inverse = torch.cholesky_inverse(factor)
        if self.fit_intercept:
            sums = inverse.sum(1)
            inverse -= torch.outer(sums, sums / sums.sum())
        return gram, inverse

    def _residuals(self, inverse: Any, dual: Any) -> Any:
        if not self.groups:
            return dual / inverse.diagonal()[:, None]
        residuals = torch.empty_like(dual)
        for rows in self.groups:
            residuals[rows] = torch.linalg.solve(inverse[rows[:, :, None], rows[:, None, :]], dual[rows])
        return residuals

    def _left_out(self, features: Any, alpha: float) -> tuple[float, float, Any]:
        """`ridge.gradient.loo_gradient`: the error, its gradient in log α and in the Gram matrix."""
        _, inverse = self._inverse(features, alpha)
        dual = inverse @ self.columns
        share = self.weights / (self.weights.sum() * self.columns.shape[1])
        residuals = self._residuals(inverse, dual)
        if not self.groups:
            pull = 2 * (share / inverse.diagonal())[:, None] * residuals
            gradient = (inverse * (pull * residuals).sum(1)) @ inverse
        else:
            pull, middle = torch.empty_like(dual), torch.empty_like(inverse)
            for rows in self.groups:
                block = inverse[rows[:, :, None], rows[:, None, :]]
                pull[rows] = 2 * torch.linalg.solve(block, share[rows][:, :, None] * residuals[rows])
                outer = pull[rows] @ residuals[rows].transpose(1, 2)
                middle[rows] = 0.5 * (outer + outer.transpose(1, 2)) @ inverse[rows]
            gradient = inverse @ middle
        cross = (inverse @ pull) @ dual.T
        gradient -= 0.5 * (cross + cross.T)
        error = (share @ residuals.square()).sum()
        found = torch.stack([error, alpha * (gradient.diagonal() / self.weights).sum()]).cpu()
        return float(found[0]), float(found[1]), gradient

    def judge(
        self, looks: Sequence[np.ndarray], heads: np.ndarray, alpha: float, held_out: DevicePart
    ) -> tuple[np.ndarray, np.ndarray]:
        """Squared left-out errors of these samples, and of others by the fit to these, averaged over outputs."""
        with torch.no_grad():
            moved = [self.put(look, torch.float32) for look in looks]
            drawn = self.put(heads, torch.float32)
            features, ahead = self.features(moved, drawn), held_out.features(moved, drawn)
            if self.fit_intercept:
                centre = features.mean(0)
                features, ahead = features - centre, ahead - centre
            gram, inverse = self._inverse(features, alpha)
            dual = inverse @ self.columns
            predicted = ahead.to(torch.float64) @ (features.to(torch.float64).T @ dual)
            predicted = predicted + (held_out.extras @ self.extras.T).to(torch.float64) @ dual
            if self.fit_intercept:
                level = self.columns - gram @ dual - alpha * dual / self.weights[:, None]
                predicted = predicted + (self.weights @ level) / self.weights.sum()
            left = self._residuals(inverse, dual)
            return as_array(left.square().mean(1)), as_array((held_out.columns - predicted).square().mean(1))


def judge_on_device(
    seen: Task, unseen: Task, device: str
) -> Callable[[FittedHeads, np.ndarray, float], tuple[np.ndarray, np.ndarray]]:
    """What judges heads of a law at a penalty: `learned.judge`."""
    here, there = (DeviceTask(task, device).part(np.arange(len(task))) for task in (seen, unseen))
    return lambda law, heads, alpha: here.judge(law.looks_, heads, alpha, there)


_POINTWISE: dict[str, Any] = {"relu": torch.relu, "linear": lambda s: s, "square": torch.square, "exp": torch.exp}
