"""Convex losses of one prediction: value, gradient or proximal map, conjugate, and the constants of each.

Predictions ``z`` and targets ``y`` are (n, t) arrays in float64. A loss of one number is summed over the t
outputs, so that `value` and `conjugate` are (n,) for every loss and the mean over samples is the same mean
for all of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from jaxtyping import Float
from scipy.special import entr, expit

from keyhole.solvers.intercept import monotone_roots, weighted_quantile

Samples = Float[np.ndarray, "n t"]
PerSample = Float[np.ndarray, " n"]
Outputs = Float[np.ndarray, " t"]

ROUNDING = 2 * float(np.finfo(np.float64).eps)
"""A weighted mean of slopes of size one that is smaller than this is zero."""

DOMAIN_SLACK = 1e-12
"""How far outside the domain of a conjugate rounding may put a point; beyond it the conjugate is infinite."""


class Loss(ABC):
    """A convex loss ℓ(y, z) of a prediction z.

    Its conjugate is ℓ*(y, a) = max_z <a, z> − ℓ(y, z). Every loss here has a = 0 in the domain of its
    conjugate, because ℓ is bounded below: a dual point may always be shrunk.

    Attributes
    ----------
    lipschitz : float
        Largest length of the gradient: of each output for a loss of one number, of all together for the
        multinomial one. Infinite for the squared loss.
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

    def relaxed_value(self, y: Samples, z: Samples, mu: float) -> PerSample:
        """A smooth loss within O(mu) of ℓ, for Newton's method; ℓ itself unless it has a kink."""
        return self.value(y, z)

    @abstractmethod
    def relaxed_derivatives(self, y: Samples, z: Samples, mu: float) -> tuple[Samples, np.ndarray]:
        """The gradient of `relaxed_value`, in the domain of the conjugate, and its second derivative or a bound on it.

        The latter is (n, t), or (n, t, t) where outputs are coupled.
        """

    @abstractmethod
    def best_intercept(self, y: Samples, z: Samples, weights: PerSample, start: Outputs) -> Outputs:
        """A minimiser b of Σ_i weights_i ℓ(y_i, z_i + b), to rounding."""

    @abstractmethod
    def balanced(self, y: Samples, dual: Samples, weights: PerSample) -> Samples:
        """A point near ``dual``, in the domain of the conjugate as it is, with Σ_i weights_i dual_i = 0.

        That sum is the constraint which a free intercept puts on the dual problem. It holds to rounding.
        """


class ScalarLoss(Loss):
    """A loss of one number, applied to every output by itself. ``curvature`` is its second derivative."""

    @abstractmethod
    def curvature(self, y: Samples, z: Samples) -> Samples:
        """The second derivative in z (one of them, where the gradient has a corner)."""

    def relaxed_derivatives(self, y: Samples, z: Samples, mu: float) -> tuple[Samples, np.ndarray]:
        """The derivatives of ℓ."""
        return self.gradient(y, z), self.curvature(y, z)

    def mean_derivatives(self, y: Samples, z: Samples, weights: PerSample) -> tuple[Outputs, Outputs]:
        """Weighted sums over samples of the first and of the second derivative, of each output."""
        return weights @ self.gradient(y, z), weights @ self.curvature(y, z)

    def best_intercept(self, y: Samples, z: Samples, weights: PerSample, start: Outputs) -> Outputs:
        """The root of the monotone derivative of Σ_i weights_i ℓ(y_i, z_i + b), by guarded Newton steps."""
        tolerance = ROUNDING * float(weights.sum()) * min(self.lipschitz, 1.0)
        return monotone_roots(lambda b: self.mean_derivatives(y, z + b, weights), start, tolerance)

    def balanced(self, y: Samples, dual: Samples, weights: PerSample) -> Samples:
        """Shrink the heavier sign of each output until both weigh the same: 0 is inside the domain."""
        upper = weights @ np.maximum(dual, 0.0)
        lower = weights @ np.maximum(-dual, 0.0)
        lighter = np.minimum(upper, lower)
        up = np.divide(lighter, upper, out=np.zeros_like(upper), where=upper > 0)
        down = np.divide(lighter, lower, out=np.zeros_like(lower), where=lower > 0)
        return np.where(dual > 0, dual * up, dual * down)


class KinkedLoss(ScalarLoss):
    """ℓ(y, z) = max of a·(z − y) over low(y) ≤ a ≤ high(y): two straight pieces that meet at z = y.

    A subclass says what the slopes are; all else follows. The conjugate is a·y between them.
    """

    smoothness = math.inf

    @abstractmethod
    def slopes(self, y: Samples) -> tuple[Samples, Samples]:
        """The slope left of the kink, at most 0, and right of it, at least 0."""

    def value(self, y: Samples, z: Samples) -> PerSample:
        """The larger of low · (z − y) and high · (z − y)."""
        low, high = self.slopes(y)
        return np.maximum(low * (z - y), high * (z - y)).sum(axis=1)

    def gradient(self, y: Samples, z: Samples) -> Samples:
        """The slope on this side of the kink; zero on it."""
        low, high = self.slopes(y)
        return np.where(z > y, high, np.where(z < y, low, 0.0))

    def curvature(self, y: Samples, z: Samples) -> Samples:
        """Zero away from the kink."""
        return np.zeros_like(z)

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """The product a·y between the slopes."""
        low, high = self.slopes(y)
        return _inside(np.maximum(low - dual, dual - high), dual * y)

    def prox(self, y: Samples, z: Samples, step: float) -> Samples:
        """Move down the slope by ``step`` times its size, but not beyond the kink."""
        low, high = self.slopes(y)
        return np.where(z > y, np.maximum(z - step * high, y), np.minimum(z - step * low, y))

    def relaxed_value(self, y: Samples, z: Samples, mu: float) -> PerSample:
        """The maximum over slopes a of a·(z − y) + mu·log((a − low)(high − a)), up to a constant."""
        low, high = self.slopes(y)
        half = 0.5 * (high - low) * (z - y)
        reach = mu + np.hypot(mu, half)
        return (0.5 * (low + high) * (z - y) + reach - mu * np.log(2.0 * mu * reach)).sum(axis=1)

    def relaxed_derivatives(self, y: Samples, z: Samples, mu: float) -> tuple[Samples, np.ndarray]:
        """The maximiser a, strictly between the slopes, and how fast it turns."""
        low, high = self.slopes(y)
        width = 0.5 * (high - low)
        half = width * (z - y)
        root = np.hypot(mu, half)
        return 0.5 * (low + high) + width * half / (mu + root), np.square(width) * mu / ((mu + root) * root)

    def conjugate_prox(self, y: Samples, dual: Samples, step: float) -> Samples:
        """Subtract step · y, then clip to the slopes."""
        low, high = self.slopes(y)
        return np.clip(dual - step * y, low, high)

    def best_intercept(self, y: Samples, z: Samples, weights: PerSample, start: Outputs) -> Outputs:
        """A quantile of the residuals y − z: the median for the absolute loss.

        As b passes y_i − z_i the slope of Σ weights_i ℓ(y_i, z_i + b) rises by weights_i (high_i − low_i),
        from Σ weights_i low_i on the far left.
        """
        low, high = self.slopes(y)
        rise, level = weights[:, None] * (high - low), -(weights @ low)
        return np.array([weighted_quantile((y - z)[:, k], rise[:, k], float(level[k])) for k in range(y.shape[1])])


class Absolute(KinkedLoss):
    """|r|, r = z − y."""

    name = "absolute"
    lipschitz = 1.0

    def check_targets(self, y: Samples, weights: PerSample, intercept: bool) -> None:
        """Every finite target is fine, and a best intercept always exists."""

    def slopes(self, y: Samples) -> tuple[Samples, Samples]:
        """−1 and 1."""
        return np.full_like(y, -1.0), np.ones_like(y)


class Hinge(KinkedLoss):
    """max(0, 1 − y z) for labels y = ±1: the kink is at z = y, because y² = 1."""

    name = "hinge"
    lipschitz = 1.0

    def check_targets(self, y: Samples, weights: PerSample, intercept: bool) -> None:
        """Labels are ±1; a best intercept always exists."""
        _check_signs(y, self.name)

    def slopes(self, y: Samples) -> tuple[Samples, Samples]:
        """−1 and 0 for the label 1, 0 and 1 for the label −1."""
        return np.minimum(-y, 0.0), np.maximum(-y, 0.0)


class ResidualLoss(ScalarLoss):
    """A smooth loss of the residual r = z − y: any real target will do."""

    smoothness = 1.0

    def check_targets(self, y: Samples, weights: PerSample, intercept: bool) -> None:
        """Every finite target is fine, and a best intercept always exists."""

    @abstractmethod
    def prox(self, y: Samples, z: Samples, step: float) -> Samples:
        """The minimiser u of step · ℓ(y, u) + (u − z)²/2."""

    @abstractmethod
    def conjugate_prox(self, y: Samples, dual: Samples, step: float) -> Samples:
        """The minimiser a of step · ℓ*(y, a) + (a − dual)²/2."""


class Huber(ResidualLoss):
    """r²/2 up to |r| = 1, then |r| − 1/2, with r = z − y."""

    name = "huber"
    lipschitz = 1.0

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

    def mean_derivatives(self, y: Samples, z: Samples, weights: PerSample) -> tuple[Outputs, Outputs]:
        """Weighted sums of the clipped residuals and of the ones that are not."""
        residual = z - y
        core = residual.clip(-1.0, 1.0)
        return weights @ core, weights @ (core == residual)

    def relaxed_derivatives(self, y: Samples, z: Samples, mu: float) -> tuple[Samples, np.ndarray]:
        """Beyond the corner a tenth of the curvature of the best parabola above, so that no direction is flat."""
        size = np.abs(z - y)
        return self.gradient(y, z), np.where(size < 1.0, 1.0, 0.1 / np.maximum(size, 1.0))

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """a·y + a²/2 for |a| ≤ 1."""
        return _inside(np.abs(dual) - 1.0, dual * (y + 0.5 * dual))

    def prox(self, y: Samples, z: Samples, step: float) -> Samples:
        """Shrink the residual by 1/(1 + step) where it is small, by ``step`` where it is large."""
        return z - step * np.clip((z - y) / (1.0 + step), -1.0, 1.0)

    def conjugate_prox(self, y: Samples, dual: Samples, step: float) -> Samples:
        """(a − step · y)/(1 + step), clipped to [−1, 1]."""
        return np.clip((dual - step * y) / (1.0 + step), -1.0, 1.0)


class Squared(ResidualLoss):
    """r²/2, r = z − y: half of scikit-learn's squared error, so that it is Huber's loss near zero."""

    name = "squared"
    lipschitz = math.inf

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
                    "the logistic loss with a free intercept needs both labels: every sample of positive "
                    f"weight has label {labels[weights > 0][0]:+g} in output {column}, and the loss falls "
                    "for ever as the intercept grows. Add samples of the other class, or fit without an "
                    "intercept."
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

    def mean_derivatives(self, y: Samples, z: Samples, weights: PerSample) -> tuple[Outputs, Outputs]:
        """Weighted sums of −y q and of q (1 − q), with q = 1/(1 + exp(y z)) found once for both."""
        q = expit(-y * z)
        return weights @ (-y * q), weights @ (q * (1.0 - q))

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """−H(q), the binary entropy of q = −y·a in [0, 1], with a minus sign."""
        q = -y * dual
        inside = np.clip(q, 0.0, 1.0)
        return _inside(np.maximum(-q, q - 1.0), -entr(inside) - entr(1.0 - inside))


def _inside(excess: np.ndarray, value: np.ndarray) -> PerSample:
    """``value`` summed over outputs; inf where the ``excess`` over the domain is more than rounding."""
    total = value.sum(axis=1)
    return np.where((excess > DOMAIN_SLACK).any(axis=1), math.inf, total)


def _check_signs(y: np.ndarray, name: str) -> None:
    wrong = np.argwhere(np.abs(y) != 1.0)
    if len(wrong):
        where = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"the {name} loss needs labels −1 and +1: found {y[where]:g} at index {where}, {len(wrong)} such "
            "labels in all. Encode two classes as 2·(y == positive) − 1."
        )
