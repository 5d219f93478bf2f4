"""Losses with kinks, smoothed around a dual point: exact again once that point is the dual solution."""

from __future__ import annotations

import numpy as np

from keyhole.solvers.losses import PerSample, ProximalLoss, Samples, ScalarLoss


class Smoothed(ScalarLoss):
    """ℓ_μ(y, z) = max_a a z − ℓ*(y, a) − μ (a − c)²/2: the loss ``base``, smoothed with width μ around centre
    c.

    It lies below ℓ, by at most μ (a − c)²/2 with a the gradient of ℓ: when c is a dual solution nothing is
    lost, and the smoothed problem has the solutions of the original one at any width. Moving c to the dual
    solution of the smoothed problem, again and again, is the proximal point method on the dual (the method of
    multipliers).

    Parameters
    ----------
    base : ProximalLoss
    width : float
        μ > 0; the smoothness constant is 1/μ.
    centre : array (n, t)
        c, in the domain of the conjugate of ``base``.

    Examples
    --------
    >>> import numpy as np
    >>> from keyhole.solvers.losses import Absolute
    >>> loss = Smoothed(Absolute(), width=0.1, centre=np.zeros((2, 1)))
    >>> loss.value(np.zeros((2, 1)), np.array([[1.0], [0.05]]))     # |z| − μ/2, then z²/2μ
    array([0.95  , 0.0125])
    """

    def __init__(self, base: ProximalLoss, width: float, centre: Samples) -> None:
        self.base = base
        self.width = width
        self.centre = centre
        self.name = f"smoothed {base.name}"
        self.lipschitz = base.lipschitz
        self.smoothness = 1.0 / width

    def check_targets(self, y: Samples, weights: PerSample, intercept: bool) -> None:
        """The targets of ``base``."""
        self.base.check_targets(y, weights, intercept)

    def value(self, y: Samples, z: Samples) -> PerSample:
        """a z − ℓ*(y, a) − μ (a − c)²/2 at the maximiser a."""
        dual = self.gradient(y, z)
        return (dual * z).sum(axis=1) - self.conjugate(y, dual)

    def gradient(self, y: Samples, z: Samples) -> Samples:
        """The maximiser a, a proximal step on ℓ* from c + z/μ."""
        return self.base.conjugate_prox(y, self.centre + z / self.width, 1.0 / self.width)

    def curvature(self, y: Samples, z: Samples) -> Samples:
        """1/μ where the maximiser is inside the domain of ℓ* (exact where ℓ* is linear there), zero on its edge."""
        return self.base.interior(y, self.gradient(y, z)) / self.width

    def mean_derivatives(self, y: Samples, z: Samples, weights: PerSample) -> tuple[float, float]:
        """Weighted sums of the first and of the second derivative; the maximiser is found once for both."""
        dual = self.gradient(y, z)
        inside = weights @ self.base.interior(y, dual)
        return float((weights @ dual).sum()), float(inside.sum()) / self.width

    def column(self, output: int) -> ScalarLoss:
        """The loss of one output by itself."""
        if self.centre.shape[1] == 1:
            return self
        return Smoothed(self.base, self.width, self.centre[:, output : output + 1])

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """ℓ*(y, a) + μ (a − c)²/2."""
        return self.base.conjugate(y, dual) + 0.5 * self.width * np.square(dual - self.centre).sum(axis=1)
