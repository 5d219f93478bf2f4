"""Adam on the means of the heads, along the exact gradient of the leave-one-out error."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.features import pooled_features, pooled_pullback
from keyhole.heads import standard_normals
from keyhole.learned.identity import shrink
from keyhole.learned.judge import Task
from keyhole.solvers.left_out import LooGradient, loo_gradient

_MEMORY = 0.8
"""Share of the running average of the means that a step keeps: about five steps, enough to calm fresh noise."""

_RAISES = 60
"""How often a penalty that float32 cannot carry is raised by a factor e: 26 decades."""


def gradient_in_means(
    task: Task,
    means: Float[np.ndarray, "k e e"],
    noise: Float[np.ndarray, "m e e"],
    alpha: float,
    dtype: str = "float32",
) -> tuple[LooGradient, Float[np.ndarray, "k e e"]]:
    """The leave-one-out error of heads W_m = means[m mod K] + noise_m, and its gradient in the means.

    Values are solved for, not descended on: the error is that of ridge at penalty ``alpha``, a function of the Gram
    matrix ΦΦᵀ alone. O(n²p + n³ + tokens·p) for p = M·D.
    """
    heads = (noise + means[np.arange(len(noise)) % len(means)]).astype(dtype)
    features = pooled_features(task.batch, heads, task.activation, dtype=dtype)
    if task.fit_intercept:  # the intercept makes up for it, and float32 keeps its digits
        features -= features.mean(axis=0)
    gram = features @ features.T
    options: dict[str, Any] = {"fit_intercept": task.fit_intercept, "weights": task.weights, "groups": task.groups}
    found = loo_gradient(gram, task.columns, alpha, **options)
    cotangent = found.gram.astype(dtype) @ features
    cotangent *= 2
    pulled = pooled_pullback(task.batch, heads, cotangent, task.activation, n_means=len(means))
    return found, pulled.astype(np.float64)


@dataclass
class Adam:
    """First and second moments of a gradient."""

    rate: float
    first: np.ndarray = field(default_factory=lambda: np.zeros(()))
    second: np.ndarray = field(default_factory=lambda: np.zeros(()))
    count: int = 0

    def move(self, gradient: np.ndarray) -> np.ndarray:
        """What to add to the parameter."""
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.99 * self.second + 0.01 * np.square(gradient)
        mean = self.first / (1 - 0.9**self.count)
        size = np.sqrt(self.second / (1 - 0.99**self.count))
        return np.asarray(-self.rate * mean / (size + 1e-12))


class Descent:
    """The state of a descent: means, penalty and their moments; `step` moves it.

    Every step draws fresh noise and, of many samples, a fresh part: what falls is the error of the law, not that
    of some heads of it.
    """

    def __init__(
        self,
        task: Task,
        start: Float[np.ndarray, "k e e"],
        scale: float,
        alpha: float,
        *,
        n_heads: int,
        rate: float,
        shrinkage: float,
        max_samples: int,
        seed: int,
    ) -> None:
        self.task, self.means, self.anchor = task, start.copy(), start
        self.scale, self.log_alpha = scale, math.log(alpha)
        self.n_heads, self.shrinkage, self.max_samples, self.seed = n_heads, shrinkage, max_samples, seed
        self.adam, self.penalty = Adam(rate), Adam(0.1)
        self.count = 0
        self.average = start.copy()

    def step(self) -> float:
        """One step; returns the leave-one-out error before it."""
        width = self.means.shape[1]
        noise = standard_normals(self.n_heads, width * width, self.seed, start=self.count * self.n_heads)
        noise = self.scale * noise.reshape(self.n_heads, width, width)
        part = shrink(self.task, self.max_samples, self.seed + self.count)
        found, gradient = self._gradient(part, noise)
        self.count += 1
        rate = self.adam.rate
        self.means += self.adam.move(gradient)
        self.means -= rate * self.shrinkage * (self.means - self.anchor)
        self.log_alpha += float(self.penalty.move(np.array(found.log_alpha)))
        keep = min(_MEMORY, 1.0 - 1.0 / self.count)
        self.average = keep * self.average + (1.0 - keep) * self.means
        return found.error

    def _gradient(self, part: Task, noise: np.ndarray) -> tuple[LooGradient, np.ndarray]:
        for _ in range(_RAISES):
            try:
                return gradient_in_means(part, self.means, noise, math.exp(self.log_alpha))
            except np.linalg.LinAlgError:  # below the floor of float32: a little more penalty
                self.log_alpha += 1.0
        raise ValueError(
            "the Gram matrix of the features is not finite in float32, so a law cannot be descended on. "
            "Scale the tokens down, for example with scaling='standard'."
        )
