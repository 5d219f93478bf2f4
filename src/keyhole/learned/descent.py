"""Adam on the means of the heads and the scales around them, along the exact gradient of the leave-one-out error."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.features import pooled_features, pooled_pullback
from keyhole.heads import standard_normals
from keyhole.learned.fitted import FittedHeads
from keyhole.learned.identity import shrink
from keyhole.learned.judge import Task
from keyhole.solvers.left_out import LooGradient, loo_gradient

_MEMORY = 0.8
"""Share of the running average of the means that a step keeps: about five steps, enough to calm fresh noise."""

_RAISES = 60
"""How often a penalty that float32 cannot carry is raised by a factor e: 26 decades."""


@dataclass(frozen=True)
class LawGradient:
    """The leave-one-out error of some heads, and its gradient in their law.

    ``means`` is (K, D, D); ``scales`` (2, D), in the logarithms of the scales of query and key, or None.
    """

    left_out: LooGradient
    means: Float[np.ndarray, "k e e"] = field(repr=False)
    scales: Float[np.ndarray, "2 e"] | None = field(repr=False)


def gradient_in_law(
    task: Task,
    means: Float[np.ndarray, "k e e"],
    noise: Float[np.ndarray, "m e e"],
    alpha: float,
    dtype: str = "float32",
    *,
    scales: bool = False,
) -> LawGradient:
    """The leave-one-out error of heads W_m = means[m mod K] + noise_m, and its gradient in their law.

    Values are solved for, not descended on: the error is that of ridge at penalty ``alpha``, a function of the Gram
    matrix ΦΦᵀ alone. O(n²p + n³ + tokens·p) for p = M·D. Where noise_ij is a_i b_j times something fixed, the gradient
    in log a_i is Σ_mj ∂E/∂W_mij noise_mij, and that in log b_j the sum over m and i.
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
    n_means = len(heads) if scales else len(means)
    pulled = pooled_pullback(task.batch, heads, cotangent, task.activation, n_means=n_means).astype(np.float64)
    if not scales:
        return LawGradient(found, pulled, None)
    moved = pulled * noise
    in_means = np.zeros(means.shape)
    np.add.at(in_means, np.arange(len(heads)) % len(means), pulled)
    return LawGradient(found, in_means, np.stack([moved.sum(axis=(0, 2)), moved.sum(axis=(0, 1))]))


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
    """The state of a descent: means, scales, penalty and their moments; `step` moves it, `law` is where it is.

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
        learn_scales: bool,
        n_heads: int,
        rate: float,
        shrinkage: float,
        max_samples: int,
        seed: int,
    ) -> None:
        self.task, self.means, self.anchor = task, start.copy(), start
        self.scale, self.log_alpha = scale, math.log(alpha)
        self.scales = np.zeros((2, start.shape[1]))  # logarithms, of the query's and of the key's coordinates
        self.learn_scales = learn_scales
        self.n_heads, self.shrinkage, self.max_samples, self.seed = n_heads, shrinkage, max_samples, seed
        self.adam, self.adam_of_scales, self.penalty = Adam(rate), Adam(rate), Adam(0.1)
        self.count = 0
        self.average = start.copy()
        self.average_scales = self.scales.copy()

    def law(self, **about: Any) -> FittedHeads:
        """The law of the running averages."""
        query, key = np.exp(self.average_scales) if self.learn_scales else (None, None)
        return FittedHeads(self.average, self.scale, **about, query_scales_=query, key_scales_=key)

    def step(self) -> float:
        """One step; returns the leave-one-out error before it."""
        width = self.means.shape[1]
        noise = standard_normals(self.n_heads, width * width, self.seed, start=self.count * self.n_heads)
        noise = self.scale * noise.reshape(self.n_heads, width, width)
        noise *= np.outer(*np.exp(self.scales))
        part = shrink(self.task, self.max_samples, self.seed + self.count)
        found = self._gradient(part, noise)
        self.count += 1
        back = self.adam.rate * self.shrinkage
        self.means += self.adam.move(found.means)
        self.means -= back * (self.means - self.anchor)
        if found.scales is not None:
            self.scales += self.adam_of_scales.move(found.scales)
            self.scales -= back * self.scales
        self.log_alpha += float(self.penalty.move(np.array(found.left_out.log_alpha)))
        keep = min(_MEMORY, 1.0 - 1.0 / self.count)
        self.average = keep * self.average + (1.0 - keep) * self.means
        self.average_scales = keep * self.average_scales + (1.0 - keep) * self.scales
        return found.left_out.error

    def _gradient(self, part: Task, noise: np.ndarray) -> LawGradient:
        for _ in range(_RAISES):
            try:
                return gradient_in_law(part, self.means, noise, math.exp(self.log_alpha), scales=self.learn_scales)
            except np.linalg.LinAlgError:  # below the floor of float32: a little more penalty
                self.log_alpha += 1.0
        raise ValueError(
            "the Gram matrix of the features is not finite in float32, so a law cannot be descended on. "
            "Scale the tokens down, for example with scaling='standard'."
        )
