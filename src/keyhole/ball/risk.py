"""The risk over a norm ball, its dual, and the duality gap that certifies a solution.

    min over v, b of  Σ_i w_i ℓ(y_i, Φ_i v + b)   subject to   Σ_m |v_m| ≤ K_1  and  |v| ≤ R_2

with Σ w = 1. Its dual is

    max over a of  D(a) = −Σ_i w_i ℓ*(y_i, a_i) − max over the ball of <Φᵀ(w a), u>

where Σ_i w_i a_i = 0 if the intercept b is free. D(a) is at most the risk, for every such a.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from keyhole.ball.design import Design
from keyhole.ball.losses import Loss, Outputs, PerSample, Samples
from keyhole.ball.projection import NormBall, group_norms

ROUNDING = 64 * float(np.finfo(np.float64).eps)
"""Added to every gap, times the size of the terms it is the difference of: it stays a bound."""


@dataclass(frozen=True)
class BallRisk:
    """The mean loss on given targets (n, t) with weights (n,) of sum one, over a ball of values."""

    targets: Samples
    weights: PerSample
    loss: Loss
    ball: NormBall
    group_size: int
    fit_intercept: bool

    def grouped(self, values: Float[np.ndarray, "p t"]) -> Float[np.ndarray, "m e"]:
        """Values with one row per group, all outputs of a group side by side."""
        return values.reshape(values.shape[0] // self.group_size, -1)

    def best_intercept(self, predictions: Samples, start: Outputs) -> Outputs:
        """The best intercept for Φv = ``predictions``, or zeros if none is free."""
        if not self.fit_intercept:
            return np.zeros_like(start)
        return self.loss.best_intercept(self.targets, predictions, self.weights, start)

    def primal(self, predictions: Samples, intercept: Outputs) -> float:
        """The risk, from Φv."""
        return float(self.weights @ self.loss.value(self.targets, predictions + intercept))

    def settle(self, predictions: Samples, start: Outputs) -> tuple[Outputs, Samples]:
        """The best intercept for Φv = ``predictions``, and the gradient of the loss there."""
        intercept = self.best_intercept(predictions, start)
        gradient = self.loss.gradient(self.targets, predictions + intercept)
        return intercept, gradient

    def feasible(self, dual: Samples) -> Samples:
        """``dual`` made to satisfy Σ_i w_i a_i = 0 if an intercept is free."""
        if not self.fit_intercept:
            return dual
        return self.loss.balanced(self.targets, dual, self.weights)

    def dual(self, dual: Samples, norms: Float[np.ndarray, " m"]) -> float:
        """D(a), a lower bound of the risk; ``norms`` are the group norms of Φᵀ(w a)."""
        conjugate = float(self.weights @ self.loss.conjugate(self.targets, dual))
        support, _ = self.ball.support(norms)
        return -conjugate - support


@dataclass(frozen=True)
class GapCertificate:
    """A primal and a dual point with the gap between them, in float64 on the whole design.

    ``gap`` is at least the objective less the minimum, and at least 0; ``dual`` (n, t) is balanced,
    ``scores`` (m,) are the group norms of Φᵀ(w a).
    """

    objective: float
    lower_bound: float
    gap: float
    intercept: Outputs
    dual: Samples
    scores: Float[np.ndarray, " m"]

    def improved_by(self, newer: GapCertificate) -> GapCertificate:
        """The better of two primal points with the better of two dual points."""
        primal = newer if newer.objective <= self.objective else self
        dual = newer if newer.lower_bound >= self.lower_bound else self
        return GapCertificate(
            objective=primal.objective,
            lower_bound=dual.lower_bound,
            gap=max(primal.objective - dual.lower_bound, 0.0),
            intercept=primal.intercept,
            dual=dual.dual,
            scores=dual.scores,
        )


def certify(
    problem: BallRisk,
    design: Design,
    values: Float[np.ndarray, "p t"],
    dual: Samples | None,
    intercept: Outputs,
) -> GapCertificate:
    """Evaluate the risk at (values, best intercept), and its bound at ``dual``.

    The dual point is the gradient of the loss if ``dual`` is None. ``intercept`` is where the
    search for the best intercept starts. Cost: one product with Φ and one with Φᵀ.
    """
    # the primal point
    predictions = design.matvec(values)
    intercept, gradient = problem.settle(predictions, intercept)
    objective = problem.primal(predictions, intercept)

    # the dual point
    if dual is None:
        dual = gradient
    dual = problem.feasible(dual)
    weighted_dual = dual * problem.weights[:, None]
    scores = group_norms(problem.grouped(design.rmatvec(weighted_dual)))
    lower_bound = problem.dual(dual, scores)

    # room for rounding: of all terms that cancel in the gap, and of the balance of the dual point
    size = abs(objective) + abs(lower_bound)
    size += float(np.abs(weighted_dual * (predictions + intercept)).sum())
    size += float(np.abs(weighted_dual * problem.targets).sum())
    imbalance = 0.0
    if problem.fit_intercept:
        imbalance = float(np.abs(weighted_dual.sum(axis=0) * intercept).sum())
    lower_bound -= ROUNDING * size + 2.0 * imbalance

    return GapCertificate(
        objective=objective,
        lower_bound=lower_bound,
        gap=max(objective - lower_bound, 0.0),
        intercept=intercept,
        dual=dual,
        scores=scores,
    )
