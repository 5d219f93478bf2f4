"""Losses with kinks, smoothed around a dual point: exact again once that point is the dual solution."""

from __future__ import annotations

import numpy as np

from keyhole.solvers.losses import KinkedLoss, Outputs, PerSample, Samples, ScalarLoss


class Smoothed(ScalarLoss):
    """ℓ_μ(y, z) = max_a a z − ℓ*(y, a) − μ (a − c)²/2: a loss ℓ smoothed with width μ around centre c.

    It lies below ℓ, by at most μ (a − c)²/2 with a the gradient of ℓ: when c is a dual solution nothing is
    lost, and the smoothed problem has the solutions of the original one at any width. Moving c to the dual
    solution of the smoothed problem, again and again, is the proximal point method on the dual (the method of
    multipliers).

    Parameters
    ----------
    base : KinkedLoss
    targets : array (n, t)
        The y at which the loss will be evaluated: the slopes depend on them.
    width : float
        μ > 0; the smoothness constant is 1/μ.
    centre : array (n, t)
        c, in the domain of the conjugate of ``base``.

    Examples
    --------
    >>> import numpy as np
    >>> from keyhole.solvers.losses import Absolute
    >>> y, z = np.zeros((2, 1)), np.array([[1.0], [0.05]])
    >>> Smoothed(Absolute(), y, width=0.1, centre=np.zeros((2, 1))).value(y, z)     # |z| − μ/2, then z²/2μ
    array([0.95  , 0.0125])
    """

    def __init__(self, base: KinkedLoss, targets: Samples, width: float, centre: Samples) -> None:
        self.base = base
        self.targets = targets
        self.width = width
        self.centre = centre
        self.name = f"smoothed {base.name}"
        self.lipschitz = base.lipschitz
        self.smoothness = 1.0 / width
        self._low, self._high = base.slopes(targets)

    def check_targets(self, y: Samples, weights: PerSample, intercept: bool) -> None:
        """The targets of ``base``."""
        self.base.check_targets(y, weights, intercept)

    def value(self, y: Samples, z: Samples) -> PerSample:
        """The maximum itself: a z − ℓ*(y, a) − μ (a − c)²/2 at the maximiser a."""
        dual = self.gradient(y, z)
        return (dual * (z - y) - 0.5 * self.width * np.square(dual - self.centre)).sum(axis=1)

    def gradient(self, y: Samples, z: Samples) -> Samples:
        """The maximiser a: c + (z − y)/μ, clipped to the slopes."""
        return np.clip(self.centre + (z - y) / self.width, self._low, self._high)

    def curvature(self, y: Samples, z: Samples) -> Samples:
        """1/μ where the maximiser is strictly between the slopes, zero where it is one of them."""
        dual = self.gradient(y, z)
        return ((dual > self._low) & (dual < self._high)) / self.width

    def mean_derivatives(self, y: Samples, z: Samples, weights: PerSample) -> tuple[Outputs, Outputs]:
        """Weighted sums of the first and of the second derivative; the maximiser is found once for both."""
        free = self.centre + (z - y) / self.width
        dual = free.clip(self._low, self._high)
        return weights @ dual, (weights @ (dual == free)) / self.width

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """ℓ*(y, a) + μ (a − c)²/2."""
        return self.base.conjugate(y, dual) + 0.5 * self.width * np.square(dual - self.centre).sum(axis=1)
