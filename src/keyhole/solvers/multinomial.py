"""The multinomial logistic loss: several classes at once, labels as distributions over them."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float
from scipy.special import entr, logsumexp, softmax

from keyhole.solvers.losses import DOMAIN_SLACK, Loss

MAX_STEPS = 100
"""Newton steps for the intercepts; a warm start needs two or three."""


class Multinomial(Loss):
    """log Σ_k exp z_k − <y, z> for y on the simplex of t classes: one-hot labels, or any distribution over them.

    The gradient is softmax(z) − y, at most √2 long, and turns no faster than 1/2: the Hessian diag(q) − qqᵀ of a
    softmax q has eigenvalues of at most 1/2. The conjugate is Σ_k q_k log q_k at q = dual + y on the simplex.
    """

    name = "multinomial"
    lipschitz = math.sqrt(2.0)
    smoothness = 0.5

    def check_targets(self, y: Float[np.ndarray, "n t"], weights: Float[np.ndarray, "n"], intercept: bool) -> None:
        """Rows of y lie on the simplex; with free intercepts every class must carry weight."""
        if y.shape[1] < 2:
            raise ValueError(
                f"the multinomial loss needs at least two classes: got targets of shape {y.shape}. Pass one column per "
                "class, one-hot."
            )
        wrong = np.flatnonzero((y < 0).any(axis=1) | (np.abs(y.sum(axis=1) - 1.0) > 1e-9))
        if len(wrong):
            raise ValueError(
                "the multinomial loss needs targets that are distributions over the classes, one-hot or not: row "
                f"{wrong[0]} is {y[wrong[0]]}, {len(wrong)} such rows in all. Pass np.eye(n_classes)[labels]."
            )
        absent = np.flatnonzero(weights @ y == 0.0)
        if intercept and len(absent):
            raise ValueError(
                f"the multinomial loss with free intercepts needs every class to occur: class {absent[0]} has no "
                "weight, and its intercept would fall for ever. Drop its column, or fit without an intercept."
            )

    def value(self, y: Float[np.ndarray, "n t"], z: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n"]:
        """log Σ_k exp z_k − <y, z>, without overflow."""
        return logsumexp(z, axis=1) - (y * z).sum(axis=1)

    def gradient(self, y: Float[np.ndarray, "n t"], z: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
        """softmax(z) − y."""
        return softmax(z, axis=1) - y

    def conjugate(self, y: Float[np.ndarray, "n t"], dual: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n"]:
        """−H(q), the entropy of q = dual + y on the simplex, with a minus sign."""
        q = dual + y
        outside = (q < -DOMAIN_SLACK).any(axis=1) | (np.abs(q.sum(axis=1) - 1.0) > DOMAIN_SLACK * q.shape[1])
        return np.where(outside, math.inf, -entr(np.maximum(q, 0.0)).sum(axis=1))

    def best_intercept(
        self,
        y: Float[np.ndarray, "n t"],
        z: Float[np.ndarray, "n t"],
        weights: Float[np.ndarray, "n"],
        start: Float[np.ndarray, "t"],
    ) -> Float[np.ndarray, "t"]:
        """The minimiser b of Σ_i weights_i ℓ(y_i, z_i + b) with Σ b = 0, by damped Newton steps.

        Stops when the mean gradient is zero to rounding, or when rounding no longer lets the loss fall.
        """
        n_classes = y.shape[1]
        b = start - start.mean()
        current = float(weights @ self.value(y, z + b))
        for _ in range(MAX_STEPS):
            q = softmax(z + b, axis=1)
            slope = weights @ (q - y)
            if np.abs(slope).max() <= 4 * np.finfo(np.float64).eps:
                break
            # a constant shift changes nothing: the rank-one term makes the Hessian definite across it
            hessian = np.diag(weights @ q) - (q * weights[:, None]).T @ q + 1.0 / n_classes
            step = np.linalg.solve(hessian + 1e-14 * np.eye(n_classes), slope)
            step -= step.mean()
            scale, moved = 1.0, False
            while scale > 1e-10 and not moved:
                trial = b - scale * step
                value = float(weights @ self.value(y, z + trial))
                moved = value <= current - 1e-4 * scale * float(slope @ step)
                scale *= 0.5
            if not moved:
                # the predicted fall is below rounding: the full step is still the better point if its slope is smaller
                full = b - step
                if np.abs(weights @ self.gradient(y, z + full)).max() < 0.5 * np.abs(slope).max():
                    b, current = full, float(weights @ self.value(y, z + full))
                    continue
                break
            b, current = trial, value
        return b

    def balanced(
        self, y: Float[np.ndarray, "n t"], dual: Float[np.ndarray, "n t"], weights: Float[np.ndarray, "n"]
    ) -> Float[np.ndarray, "n t"]:
        """Mix q = dual + y with one constant distribution, as little of it as gives q the class weights of y.

        The mean of q must be π, the mean of y. With share s of a distribution c it is (1 − s) q̄ + s c, and c ≥ 0
        asks for s ≥ 1 − π_k/q̄_k in every class k; near a minimiser over the intercepts s is of the order of
        rounding.
        """
        q = np.maximum(dual + y, 0.0)
        q /= q.sum(axis=1, keepdims=True)
        total = weights.sum()
        wanted, mean = weights @ y / total, weights @ q / total
        excess = 1.0 - np.divide(wanted, mean, out=np.ones_like(mean), where=mean > 0)
        share = float(excess.max())
        if share <= 0.0:
            return q - y
        share = min(share, 1.0)
        constant = np.maximum(wanted - (1.0 - share) * mean, 0.0)
        return (1.0 - share) * q + share * constant / constant.sum() - y
