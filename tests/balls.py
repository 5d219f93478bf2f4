"""Fits over one norm ball from plain arrays: by the solver, and by the plain method it must match.

`fit_norm_ball` is the solver as tests call it. `projected_gradient` is the reference: the textbook
iteration with a fixed step, a dozen lines of NumPy. `project_by_bisection` is the reference of the
projection, and `mean_loss` writes the objective out once more.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.solve.ball import LOSSES, BallProblem, NormBall, Solution, minimise


@dataclass(frozen=True)
class NormBallFit:
    """A solution in the shapes of the targets, and the certificate of its quality."""

    values: Any
    intercept: Any
    objective: float
    duality_gap: float
    n_iter: int
    converged: bool
    active: Any
    dual: Any
    solution: Solution


def fit_norm_ball(
    design,
    targets,
    *,
    group_size,
    group_radius=math.inf,
    ball_radius=math.inf,
    loss="huber",
    fit_intercept=True,
    sample_weight=None,
    start=None,
    tol=1e-4,
    max_iter=20_000,
):
    """Minimise the mean loss over one ball."""
    n = len(targets)
    output_shape = np.shape(targets)[1:]
    weights = np.full(n, 1 / n)
    if sample_weight is not None:
        weights = np.asarray(sample_weight, float) / np.sum(sample_weight)
    problem = BallProblem(
        design=design,
        targets=np.asarray(targets, float).reshape(n, -1),
        weights=weights,
        loss=LOSSES[loss],
        ball=NormBall(group_radius, ball_radius),
        group_size=group_size,
        fit_intercept=fit_intercept,
    )
    solution = minimise(problem, tol=tol, max_iter=max_iter, start=start)
    values = solution.values.reshape(-1, group_size, *output_shape)
    return NormBallFit(
        values=values,
        intercept=solution.intercept.reshape(output_shape),
        objective=solution.objective,
        duality_gap=solution.gap,
        n_iter=solution.n_iter,
        converged=solution.converged,
        active=values.reshape(len(values), -1).any(axis=1),
        dual=solution.dual.reshape(-1, *output_shape),
        solution=solution,
    )


PLAIN_GRADIENTS = {
    "huber": lambda y, z: np.clip(z - y, -1.0, 1.0),
    "squared": lambda y, z: z - y,
    "logistic": lambda y, z: -y / (1.0 + np.exp(y * z)),
    "multinomial": lambda y, z: np.exp(z) / np.exp(z).sum(axis=1, keepdims=True) - y,
}
"""The gradients of the smooth losses, none of which is more than 1-Lipschitz."""


def projected_gradient(design, targets, loss, group_size, radii, n_steps):
    """Plain projected gradient for a smooth loss: values (p, t) and intercept (t,).

    v ← P(v − Φᵀs/L) and b ← b − 1ᵀs/L with s = ∇ℓ(y, Φv + b)/n, and L the largest eigenvalue of
    [Φ 1]ᵀ[Φ 1]/n.
    """
    n, p = design.shape
    y = targets.reshape(n, -1)
    lipschitz = np.linalg.norm(np.column_stack([design, np.ones(n)]), 2) ** 2 / n
    values = np.zeros((p, y.shape[1]))
    intercept = np.zeros(y.shape[1])
    for _ in range(n_steps):
        slope = PLAIN_GRADIENTS[loss](y, design @ values + intercept) / n
        target = (values - design.T @ slope / lipschitz).reshape(p // group_size, -1)
        norms = np.linalg.norm(target, axis=1)
        shrunk = project_by_bisection(norms, *radii)
        values = (target * (shrunk / norms)[:, None]).reshape(values.shape)
        intercept = intercept - slope.sum(axis=0) / lipschitz
    return values, intercept


def project_by_bisection(norms, group_radius, ball_radius):
    """The projection of group norms onto {Σ x ≤ K, |x| ≤ R}, by bisection for one multiplier.

    x(λ) = (a − λ)₊ / max(1, |(a − λ)₊| / R) minimises over the ball alone, and Σ x(λ) falls with λ.
    """

    def point(shift):
        above = np.maximum(norms - shift, 0.0)
        length = math.sqrt(math.fsum(above**2))
        if length > ball_radius:
            return above * (ball_radius / length)
        return above

    if math.fsum(point(0.0)) <= group_radius:
        return point(0.0)
    low = 0.0
    high = float(norms.max())
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):  # no float lies between them
            break
        if math.fsum(point(middle)) > group_radius:
            low = middle
        else:
            high = middle
    return point(high)


def mean_loss(loss, design, targets, values, intercept, weights=None):
    """The objective, by the definitions of the losses."""
    y = targets.reshape(len(targets), -1)
    z = design @ values.reshape(design.shape[1], -1) + intercept
    residual = np.abs(z - y)
    if loss == "absolute":
        losses = residual.sum(axis=1)
    elif loss == "huber":
        losses = np.where(residual <= 1, residual**2 / 2, residual - 0.5).sum(axis=1)
    elif loss == "squared":
        losses = (residual**2 / 2).sum(axis=1)
    elif loss == "logistic":
        losses = np.log1p(np.exp(-y * z)).sum(axis=1)
    elif loss == "hinge":
        losses = np.maximum(0, 1 - y * z).sum(axis=1)
    elif loss == "multinomial":
        losses = np.log(np.exp(z).sum(axis=1)) - (y * z).sum(axis=1)
    return float(np.average(losses, weights=weights))
