"""Losses with kinks, smoothed around a dual point: exact again once that point is the dual solution."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from keyhole.solvers.losses import ProximalLoss, ScalarLoss


class Smoothed(ScalarLoss):
    """ℓ_μ(y, z) = max_a a z − ℓ*(y, a) − μ (a − c)²/2: the loss ``base``, smoothed with width μ around centre c.

    It lies below ℓ, by at most μ (a − c)²/2 with a the gradient of ℓ: when c is a dual solution nothing is lost, and
    the smoothed problem has the solutions of the original one at any width. Moving c to the dual solution of the
    smoothed problem, again and again, is the proximal point method on the dual (the method of multipliers).

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

    def __init__(self, base: ProximalLoss, width: float, centre: Float[np.ndarray, "n t"]) -> None:
        self.base = base
        self.width = width
        self.centre = centre
        self.name = f"smoothed {base.name}"
        self.lipschitz = base.lipschitz
        self.smoothness = 1.0 / width

    def check_targets(self, y: Float[np.ndarray, "n t"], weights: Float[np.ndarray, "n"], intercept: bool) -> None:
        """The targets of ``base``."""
        self.base.check_targets(y, weights, intercept)

    def value(self, y: Float[np.ndarray, "n t"], z: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n"]:
        """a z − ℓ*(y, a) − μ (a − c)²/2 at the maximiser a."""
        dual = self.gradient(y, z)
        return (dual * z).sum(axis=1) - self.conjugate(y, dual)

    def gradient(self, y: Float[np.ndarray, "n t"], z: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
        """The maximiser a, a proximal step on ℓ* from c + z/μ."""
        return self.base.conjugate_prox(y, self.centre + z / self.width, 1.0 / self.width)

    def curvature(self, y: Float[np.ndarray, "n t"], z: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
        """1/μ where the maximiser is inside the domain of ℓ* (exact where ℓ* is linear there), zero on its edge."""
        return self.base.interior(y, self.gradient(y, z)) / self.width

    def conjugate(self, y: Float[np.ndarray, "n t"], dual: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n"]:
        """ℓ*(y, a) + μ (a − c)²/2."""
        return self.base.conjugate(y, dual) + 0.5 * self.width * np.square(dual - self.centre).sum(axis=1)
