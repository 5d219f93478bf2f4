"""The multinomial logistic loss: several classes at once, labels as distributions over them."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import entr

from keyhole.solvers.losses import DOMAIN_SLACK, Loss, Outputs, PerSample, Samples

ROUNDING = 2 * float(np.finfo(np.float64).eps)
"""A mean gradient smaller than this is zero."""

NEAR = 1e-12
"""A predicted fall of the loss that the loss itself, with its 16 digits, can no longer show."""

MAX_STEPS = 100
"""Newton steps for the intercepts; a warm start needs two or three."""


class Multinomial(Loss):
    """log Σ_k exp z_k − <y, z> for y on the simplex of t classes: one-hot labels, or soft ones.

    The gradient is softmax(z) − y, at most √2 long, and turns no faster than 1/2: the Hessian diag(q) − qqᵀ
    of a softmax q has eigenvalues of at most 1/2. The conjugate is Σ_k q_k log q_k at q = dual + y on the
    simplex.
    """

    name = "multinomial"
    lipschitz = math.sqrt(2.0)
    smoothness = 0.5

    def check_targets(self, y: Samples, weights: PerSample, intercept: bool) -> None:
        """Rows of y lie on the simplex; with free intercepts every class must carry weight."""
        if y.shape[1] < 2:
            raise ValueError(
                f"the multinomial loss needs at least two classes: got targets of shape {y.shape}. Pass one "
                "column per class, one-hot."
            )
        wrong = np.flatnonzero((y < 0).any(axis=1) | (np.abs(y.sum(axis=1) - 1.0) > 1e-9))
        if len(wrong):
            raise ValueError(
                "the multinomial loss needs targets that are distributions over the classes, one-hot or not: "
                f"row {wrong[0]} is {y[wrong[0]]}, {len(wrong)} such rows in all. Pass "
                "np.eye(n_classes)[labels]."
            )
        absent = np.flatnonzero(weights @ y == 0.0)
        if intercept and len(absent):
            raise ValueError(
                "the multinomial loss with free intercepts needs every class to occur: class "
                f"{absent[0]} has no weight, and its intercept would fall for ever. Drop its column, or fit "
                "without an intercept."
            )

    def value(self, y: Samples, z: Samples) -> PerSample:
        """The loss log Σ_k exp z_k − <y, z>, without overflow."""
        by_class = np.ascontiguousarray(z.T)
        top = by_class.max(axis=0)
        return top + np.log(np.exp(by_class - top).sum(axis=0)) - np.einsum("nt,nt->n", y, z)

    def gradient(self, y: Samples, z: Samples) -> Samples:
        """softmax(z) − y."""
        return _softmax(z) - y

    def relaxed_derivatives(self, y: Samples, z: Samples, mu: float) -> tuple[Samples, np.ndarray]:
        """softmax(z) − y and diag(q) − q qᵀ, with q = softmax(z)."""
        q = _softmax(z)
        return q - y, q[:, :, None] * (np.eye(q.shape[1]) - q[:, None, :])

    def conjugate(self, y: Samples, dual: Samples) -> PerSample:
        """−H(q), the entropy of q = dual + y on the simplex, with a minus sign."""
        q = dual + y
        outside = (q < -DOMAIN_SLACK).any(axis=1) | (np.abs(q.sum(axis=1) - 1.0) > DOMAIN_SLACK * q.shape[1])
        return np.where(outside, math.inf, -entr(np.maximum(q, 0.0)).sum(axis=1))

    def best_intercept(self, y: Samples, z: Samples, weights: PerSample, start: Outputs) -> Outputs:
        """The minimiser b of Σ_i weights_i ℓ(y_i, z_i + b) with Σ b = 0, by damped Newton steps.

        Far from it the loss must fall at every step. Where the predicted fall drowns in rounding, full steps
        are taken for as long as they halve the mean gradient, which they square until rounding stops them.
        """
        b = start - start.mean()
        last = math.inf
        for _ in range(MAX_STEPS):
            q = _softmax(z + b)
            slope = weights @ (q - y)
            size = float(np.abs(slope).max())
            if size <= ROUNDING:
                break
            step = self._newton_step(q, weights, slope)
            fall = float(slope @ step)
            if fall <= NEAR:
                if size > 0.5 * last:
                    break
                b, last = b - step, size
                continue
            scale, wanted = 1.0, float(weights @ self.value(y, z + b)) - 0.1 * fall
            while float(weights @ self.value(y, z + b - scale * step)) > wanted and scale > 1e-9:
                scale *= 0.5
                wanted += 0.1 * scale * fall
            b = b - scale * step
        return b

    def _newton_step(self, q: Samples, weights: PerSample, slope: Outputs) -> Outputs:
        """H⁻¹ slope for the Hessian H = Σ_i weights_i (diag(q_i) − q_i q_iᵀ), on vectors that sum to zero."""
        # H takes constant vectors to zero: the rank-one term makes it definite there and is zero elsewhere
        hessian = np.diag(weights @ q) - (q * weights[:, None]).T @ q + 1.0 / q.shape[1]
        try:
            step = np.linalg.solve(hessian, slope)
        except np.linalg.LinAlgError:  # a class that no sample is in any doubt about
            step = np.linalg.lstsq(hessian, slope, rcond=None)[0]
        return np.asarray(step - step.mean())

    def balanced(self, y: Samples, dual: Samples, weights: PerSample) -> Samples:
        """Mix q = dual + y with one constant distribution, as little of it as gives q the class weights of y.

        The mean of q must be π, the mean of y. With share s of a distribution c it is (1 − s) q̄ + s c, and c
        ≥ 0 asks for s ≥ 1 − π_k/q̄_k in every class k; near a minimiser over the intercepts s is of the order
        of rounding.
        """
        q = np.maximum(dual + y, 0.0)
        q /= q.sum(axis=1, keepdims=True)
        total = weights.sum()
        wanted, mean = weights @ y / total, weights @ q / total
        excess = 1.0 - np.divide(wanted, mean, out=np.ones_like(mean), where=mean > 0)
        share = min(float(excess.max()), 1.0)
        constant = np.maximum(wanted - (1.0 - share) * mean, 0.0)
        missing = float(constant.sum())
        if share <= 0.0 or missing == 0.0:
            return q - y
        return (1.0 - share) * q + (share / missing) * constant - y


def _softmax(z: Samples) -> Samples:
    """exp z_k / Σ_j exp z_j of every row, without overflow."""
    # classes first: sums over a few adjacent numbers take five times as long as sums of whole rows
    weights = np.array(z.T, order="C")
    weights -= weights.max(axis=0)
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=0)
    return weights.T
