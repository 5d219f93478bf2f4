"""Convex losses of one prediction: value, gradient or proximal map, conjugate, and the constants of each.

Predictions ``z`` and targets ``y`` are (n, t) arrays in float64. A loss of one number is summed over the t
outputs, so that `value` and `conjugate` are (n,) for every loss and the mean over samples is the same mean
for all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import entr, expit

from keyhole.solvers.intercept import monotone_root, weighted_quantile

Samples = Float[np.ndarray, "n t"]
PerSample = Float[np.ndarray, " n"]
Outputs = Float[np.ndarray, " t"]

ROUNDING = 2 * float(np.finfo(np.float64).eps)
"""A weighted mean of slopes of size one that is smaller than this is zero."""

DOMAIN_SLACK = 1e-12
"""How far outside the domain of a conjugate a point may lie by rounding; beyond it the conjugate is infinite."""


class Loss(ABC):
    """A convex loss ℓ(y, z) of a prediction z.

    Its conjugate is ℓ*(y, a) = max_z <a, z> − ℓ(y, z). Every loss here has a = 0 in the domain of its
    conjugate, because ℓ is bounded below: a dual point may always be shrunk.

    Attributes
    ----------
    lipschitz : float
        max |gradient|, in the Euclidean norm over outputs; inf for the squared loss.
    smoothness : float
        Lipschitz constant of the gradient; inf where the loss has a kink.
    """

    name: str
    lipschitz: float
    smoothness: float

    @abstractmethod
    def check_targets(self, y: Samples, weights: PerSample, intercept: bool) -> None:
        """Raise unless the loss is defined at ``y`` and, with a free intercept, has a minimiser."""

    @abstractmethod
    def value(self, y: Samples, z: Samples) -> PerSample:
        """ℓ(y, z) of each sample, summed over outputs."""

    @abstractmethod
    def gradient(self, y: Samples, z: Samples) -> Samples:
        """The gradient of ℓ in z; at a kink, the subgradient of smallest length."""

    @abstractmethod
    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """ℓ*(y, dual) of each sample, summed over outputs; inf outside the domain."""

    @abstractmethod
    def best_intercept(self, y: Samples, z: Samples, weights: PerSample, start: Outputs) -> Outputs:
        """A minimiser b of Σ_i weights_i ℓ(y_i, z_i + b), to rounding."""

    @abstractmethod
    def balanced(self, y: Samples, dual: Samples, weights: PerSample) -> Samples:
        """A dual point near ``dual``, in the domain of the conjugate, with Σ_i weights_i dual_i = 0 to
        rounding.

        That sum is the constraint which a free intercept puts on the dual problem. ``dual`` must be in the
        domain.
        """


class ScalarLoss(Loss):
    """A loss of one number, applied to every output by itself. ``curvature`` is its second derivative."""

    @abstractmethod
    def curvature(self, y: Samples, z: Samples) -> Samples:
        """The second derivative in z (one of them, where the gradient has a corner)."""

    def mean_derivatives(self, y: Samples, z: Samples, weights: PerSample) -> tuple[float, float]:
        """Weighted sums of the first and of the second derivative, over samples and outputs."""
        slope, bend = weights @ self.gradient(y, z), weights @ self.curvature(y, z)
        return float(slope.sum()), float(bend.sum())

    def column(self, output: int) -> ScalarLoss:
        """The loss of one output by itself."""
        return self

    def best_intercept(self, y: Samples, z: Samples, weights: PerSample, start: Outputs) -> Outputs:
        """A minimiser of Σ_i weights_i ℓ(y_i, z_i + b): the root of its monotone derivative, by guarded Newton."""
        tolerance = ROUNDING * float(weights.sum()) * min(self.lipschitz, 1.0)
        best = np.empty(y.shape[1])
        for k in range(y.shape[1]):
            loss, targets, predictions = self.column(k), y[:, k : k + 1], z[:, k : k + 1]
            best[k] = monotone_root(
                lambda b: loss.mean_derivatives(targets, predictions + b, weights), float(start[k]), tolerance
            )
        return best

    def balanced(self, y: Samples, dual: Samples, weights: PerSample) -> Samples:
        """Shrink the heavier sign of each output until both signs weigh the same: the domain is an interval around 0."""
        upper = weights @ np.maximum(dual, 0.0)
        lower = weights @ np.maximum(-dual, 0.0)
        lighter = np.minimum(upper, lower)
        up = np.divide(lighter, upper, out=np.zeros_like(upper), where=upper > 0)
        down = np.divide(lighter, lower, out=np.zeros_like(lower), where=lower > 0)
        return np.where(dual > 0, dual * up, dual * down)


class ProximalLoss(ScalarLoss):
    """A scalar loss whose proximal maps have closed forms; `smoothing` builds on them where there are kinks."""

    @abstractmethod
    def prox(self, y: Samples, z: Samples, step: float) -> Samples:
        """The minimiser u of step · ℓ(y, u) + (u − z)²/2."""

    @abstractmethod
    def conjugate_prox(self, y: Samples, dual: Samples, step: float) -> Samples:
        """The minimiser a of step · ℓ*(y, a) + (a − dual)²/2; exactly inside the domain of ℓ*."""

    @abstractmethod
    def interior(self, y: Samples, dual: Samples) -> Bool[np.ndarray, "n t"]:
        """Whether each entry lies strictly inside the domain of ℓ*."""


class ResidualLoss(ProximalLoss):
    """A loss of the residual r = z − y: any real target will do."""

    def check_targets(self, y: Samples, weights: PerSample, intercept: bool) -> None:
        """Every finite target is fine, and a best intercept always exists."""


class Absolute(ResidualLoss):
    """|r|, r = z − y."""

    name = "absolute"
    lipschitz = 1.0
    smoothness = math.inf

    def value(self, y: Samples, z: Samples) -> PerSample:
        """|z − y|."""
        return np.abs(z - y).sum(axis=1)

    def gradient(self, y: Samples, z: Samples) -> Samples:
        """sign(z − y)."""
        return np.sign(z - y)

    def curvature(self, y: Samples, z: Samples) -> Samples:
        """Zero away from the kink."""
        return np.zeros_like(z)

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """a·y for |a| ≤ 1."""
        return _inside(np.abs(dual) - 1.0, dual * y)

    def prox(self, y: Samples, z: Samples, step: float) -> Samples:
        """Move towards y by at most ``step``."""
        return y + np.sign(z - y) * np.maximum(np.abs(z - y) - step, 0.0)

    def conjugate_prox(self, y: Samples, dual: Samples, step: float) -> Samples:
        """Subtract step · y, then clip to [−1, 1]."""
        return np.clip(dual - step * y, -1.0, 1.0)

    def interior(self, y: Samples, dual: Samples) -> Bool[np.ndarray, "n t"]:
        """|a| < 1."""
        return np.abs(dual) < 1.0

    def best_intercept(self, y: Samples, z: Samples, weights: PerSample, start: Outputs) -> Outputs:
        """The weighted median of the residuals."""
        half = 0.5 * float(weights.sum())
        return np.array([weighted_quantile(residuals, weights, half) for residuals in (y - z).T])


class Huber(ResidualLoss):
    """r²/2 up to |r| = 1, then |r| − 1/2, with r = z − y."""

    name = "huber"
    lipschitz = 1.0
    smoothness = 1.0

    def value(self, y: Samples, z: Samples) -> PerSample:
        """r²/2 or |r| − 1/2: both are c(|r| − c/2) with c = min(|r|, 1)."""
        size = np.abs(z - y)
        core = np.minimum(size, 1.0)
        return (core * (size - 0.5 * core)).sum(axis=1)

    def gradient(self, y: Samples, z: Samples) -> Samples:
        """The residual, clipped to [−1, 1]."""
        return np.clip(z - y, -1.0, 1.0)

    def curvature(self, y: Samples, z: Samples) -> Samples:
        """One where |r| < 1, zero beyond."""
        return (np.abs(z - y) < 1.0).astype(z.dtype)

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """a·y + a²/2 for |a| ≤ 1."""
        return _inside(np.abs(dual) - 1.0, dual * (y + 0.5 * dual))

    def prox(self, y: Samples, z: Samples, step: float) -> Samples:
        """Shrink the residual by 1/(1 + step) where it is small, by ``step`` where it is large."""
        return z - step * np.clip((z - y) / (1.0 + step), -1.0, 1.0)

    def conjugate_prox(self, y: Samples, dual: Samples, step: float) -> Samples:
        """(a − step · y)/(1 + step), clipped to [−1, 1]."""
        return np.clip((dual - step * y) / (1.0 + step), -1.0, 1.0)

    def interior(self, y: Samples, dual: Samples) -> Bool[np.ndarray, "n t"]:
        """|a| < 1."""
        return np.abs(dual) < 1.0


class Squared(ResidualLoss):
    """r²/2, r = z − y: half of what scikit-learn calls the squared error, so that it is Huber's loss near zero."""

    name = "squared"
    lipschitz = math.inf
    smoothness = 1.0

    def value(self, y: Samples, z: Samples) -> PerSample:
        """(z − y)²/2."""
        return 0.5 * np.square(z - y).sum(axis=1)

    def gradient(self, y: Samples, z: Samples) -> Samples:
        """The residual."""
        return z - y

    def curvature(self, y: Samples, z: Samples) -> Samples:
        """One."""
        return np.ones_like(z)

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """a·y + a²/2."""
        return (dual * (y + 0.5 * dual)).sum(axis=1)

    def prox(self, y: Samples, z: Samples, step: float) -> Samples:
        """(z + step · y)/(1 + step)."""
        return (z + step * y) / (1.0 + step)

    def conjugate_prox(self, y: Samples, dual: Samples, step: float) -> Samples:
        """(a − step · y)/(1 + step)."""
        return (dual - step * y) / (1.0 + step)

    def interior(self, y: Samples, dual: Samples) -> Bool[np.ndarray, "n t"]:
        """Everywhere."""
        return np.ones(dual.shape, dtype=bool)

    def best_intercept(self, y: Samples, z: Samples, weights: PerSample, start: Outputs) -> Outputs:
        """The weighted mean of the residuals."""
        return weights @ (y - z)


class Logistic(ScalarLoss):
    """log(1 + exp(−y z)) for labels y = ±1."""

    name = "logistic"
    lipschitz = 1.0
    smoothness = 0.25

    def check_targets(self, y: Samples, weights: PerSample, intercept: bool) -> None:
        """Labels are ±1; with a free intercept both must occur, or the loss falls for ever as b grows."""
        _check_signs(y, self.name)
        for column, labels in enumerate(y.T if intercept else ()):
            if np.unique(labels[weights > 0]).size < 2:
                raise ValueError(
                    "the logistic loss with a free intercept needs both labels: every sample of positive weight "
                    f"has label {labels[weights > 0][0]:+g} in output {column}, and the loss falls for ever as the "
                    "intercept grows. Add samples of the other class, or fit without an intercept."
                )

    def value(self, y: Samples, z: Samples) -> PerSample:
        """log(1 + exp(−y z)), without overflow."""
        return np.logaddexp(0.0, -y * z).sum(axis=1)

    def gradient(self, y: Samples, z: Samples) -> Samples:
        """−y / (1 + exp(y z))."""
        return -y * expit(-y * z)

    def curvature(self, y: Samples, z: Samples) -> Samples:
        """p(1 − p) with p = 1/(1 + exp(−z))."""
        return expit(z) * expit(-z)

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """−H(q), the binary entropy of q = −y·a in [0, 1], with a minus sign."""
        q = -y * dual
        inside = np.clip(q, 0.0, 1.0)
        return _inside(np.maximum(-q, q - 1.0), -entr(inside) - entr(1.0 - inside))


class Hinge(ProximalLoss):
    """max(0, 1 − y z) for labels y = ±1."""

    name = "hinge"
    lipschitz = 1.0
    smoothness = math.inf

    def check_targets(self, y: Samples, weights: PerSample, intercept: bool) -> None:
        """Labels are ±1; a best intercept always exists."""
        _check_signs(y, self.name)

    def value(self, y: Samples, z: Samples) -> PerSample:
        """max(0, 1 − y z)."""
        return np.maximum(0.0, 1.0 - y * z).sum(axis=1)

    def gradient(self, y: Samples, z: Samples) -> Samples:
        """−y where y z < 1, zero elsewhere."""
        return np.where(y * z < 1.0, -y, 0.0)

    def curvature(self, y: Samples, z: Samples) -> Samples:
        """Zero away from the kink."""
        return np.zeros_like(z)

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """y·a for y·a in [−1, 0]."""
        signed = y * dual
        return _inside(np.maximum(-1.0 - signed, signed), signed)

    def prox(self, y: Samples, z: Samples, step: float) -> Samples:
        """Raise the margin y z towards 1, by at most ``step``."""
        return z + y * np.clip(1.0 - y * z, 0.0, step)

    def conjugate_prox(self, y: Samples, dual: Samples, step: float) -> Samples:
        """Subtract step from y·a, then clip it to [−1, 0]."""
        return y * np.clip(y * dual - step, -1.0, 0.0)

    def interior(self, y: Samples, dual: Samples) -> Bool[np.ndarray, "n t"]:
        """−1 < y·a < 0."""
        return (y * dual > -1.0) & (y * dual < 0.0)

    def best_intercept(self, y: Samples, z: Samples, weights: PerSample, start: Outputs) -> Outputs:
        """The quantile of y − z whose level is the weight of the positive class.

        As b passes y_i − z_i the slope of Σ weights_i max(0, 1 − y_i (z_i + b)) rises by weights_i, whatever
        the label, from minus the weight of the positive class.
        """
        levels = weights @ (y > 0)
        return np.array(
            [weighted_quantile(points, weights, float(a)) for points, a in zip((y - z).T, levels, strict=True)]
        )


def _inside(excess: np.ndarray, value: np.ndarray) -> PerSample:
    """``value`` summed over outputs, or inf for a sample whose ``excess`` over its domain is more than rounding."""
    total = value.sum(axis=1)
    return np.where((excess > DOMAIN_SLACK).any(axis=1), math.inf, total)


def _check_signs(y: np.ndarray, name: str) -> None:
    wrong = np.argwhere(np.abs(y) != 1.0)
    if len(wrong):
        where = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"the {name} loss needs labels −1 and +1: found {y[where]:g} at index {where}, {len(wrong)} such labels in "
            "all. Encode two classes as 2·(y == positive) − 1."
        )
