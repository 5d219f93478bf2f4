"""The regularised mean loss, its dual, and the gap between them, on which every solver here stops.

    primal   P(v, b) = Σ_i w_i ℓ(y_i, Φ_i v + b) + Ω(v),                 Σ w = 1
    dual     D(a)    = −Σ_i w_i ℓ*(y_i, a_i) − Ω*(Φᵀ(w a)),              Σ_i w_i a_i = 0 if b is free

P(v, b) ≥ D(a) for every v, b and every such a, so P − D bounds what is left to gain. Ω is even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from keyhole.solvers.design import Design
from keyhole.solvers.losses import (
    Absolute,
    Hinge,
    Huber,
    Logistic,
    Loss,
    Outputs,
    PerSample,
    Samples,
    Squared,
)
from keyhole.solvers.multinomial import Multinomial
from keyhole.solvers.projection import group_norms

LOSSES: dict[str, Loss] = {
    loss.name: loss for loss in (Absolute(), Huber(), Squared(), Logistic(), Hinge(), Multinomial())
}
"""Every loss by its name."""

ROUNDING = 64 * float(np.finfo(np.float64).eps)
"""Added to every gap, times the size of the terms it is the difference of: so it stays an upper bound."""


@runtime_checkable
class Regulariser(Protocol):
    """Ω(v), a convex even function of the group norms, 0 at 0."""

    def prox(self, values: Float[np.ndarray, "m e"], step: float) -> Float[np.ndarray, "m e"]:
        """The minimiser u of step · Ω(u) + |u − values|²/2."""
        ...

    def value(self, norms: Float[np.ndarray, " m"]) -> float:
        """Ω at a point that `prox` returned, from its group norms."""
        ...

    def conjugate(self, norms: Float[np.ndarray, " m"]) -> float:
        """Ω*(g) from the group norms of g; inf outside its domain."""
        ...

    def threshold(self, norms: Float[np.ndarray, " m"]) -> float:
        """Groups of g shorter than this are zero in the maximiser of <g, v> − Ω(v)."""
        ...

    def dual_scales(self, norms: Float[np.ndarray, " m"]) -> tuple[float, ...]:
        """Factors in [0, 1] to try on a dual point whose gradient has these norms; one makes Ω* finite."""
        ...


@dataclass(frozen=True)
class Problem:
    """A loss on given targets, a regulariser, and whether an intercept is free.

    Parameters
    ----------
    targets : array (n, t)
    weights : array (n,)
        Nonnegative, sum one.
    loss : Loss
    regulariser : Regulariser
    group_size : int
        Columns of the design per group.
    fit_intercept : bool
    """

    targets: Samples
    weights: PerSample
    loss: Loss
    regulariser: Regulariser
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

    def primal(
        self,
        predictions: Samples,
        intercept: Outputs,
        values: Float[np.ndarray, "p t"],
    ) -> float:
        """P(v, b) from Φv."""
        mean = float(self.weights @ self.loss.value(self.targets, predictions + intercept))
        return mean + self.regulariser.value(group_norms(self.grouped(values)))

    def dual_point(self, predictions: Samples, intercept: Outputs) -> Samples:
        """The gradient of the loss: in the domain of ℓ*, and balanced if ``intercept`` is the best one."""
        return self.loss.gradient(self.targets, predictions + intercept)

    def settle(self, predictions: Samples, start: Outputs) -> tuple[Outputs, Samples]:
        """The best intercept for Φv = ``predictions``, and the gradient of the loss there."""
        intercept = self.best_intercept(predictions, start)
        return intercept, self.loss.gradient(self.targets, predictions + intercept)

    def feasible(self, dual: Samples) -> Samples:
        """``dual`` made to satisfy Σ_i w_i a_i = 0 if an intercept is free."""
        return self.loss.balanced(self.targets, dual, self.weights) if self.fit_intercept else dual

    def weighted(self, dual: Samples) -> Samples:
        """The product w a, to which Φᵀ is applied."""
        return dual * self.weights[:, None]

    def dual(self, dual: Samples, norms: Float[np.ndarray, " m"]) -> tuple[float, float]:
        """The best D(s·a) over the scales s to try, and that s; ``norms`` are the group norms of Φᵀ(w a)."""
        best, best_scale = -np.inf, 0.0
        for scale in self.regulariser.dual_scales(norms):
            conjugate = float(self.weights @ self.loss.conjugate(self.targets, scale * dual))
            value = -conjugate - self.regulariser.conjugate(scale * norms)
            if value > best:
                best, best_scale = value, scale
        return best, best_scale


@dataclass(frozen=True)
class Certificate:
    """A primal and a dual point with the gap between them, both evaluated in float64 on the whole design.

    Attributes
    ----------
    objective : float
        P(v, b).
    lower_bound : float
        D(a), less its rounding.
    gap : float
        At least P(v, b) − min P, and at least 0.
    intercept : array (t,)
    dual : array (n, t)
        a, balanced and scaled.
    scores : array (m,)
        Group norms of Φᵀ(w a).
    """

    objective: float
    lower_bound: float
    gap: float
    intercept: Outputs
    dual: Samples
    scores: Float[np.ndarray, " m"]


def certify(
    problem: Problem,
    design: Design,
    values: Float[np.ndarray, "p t"],
    dual: Samples | None,
    intercept: Outputs,
) -> Certificate:
    """Evaluate P at (values, best intercept) and D at ``dual``.

    Without a ``dual`` point the gradient of the loss at the primal point is one.

    Cost: one product with Φ and one with Φᵀ.
    """
    predictions = design.matvec(values)
    intercept = problem.best_intercept(predictions, intercept)
    objective = problem.primal(predictions, intercept, values)
    dual = problem.feasible(problem.dual_point(predictions, intercept) if dual is None else dual)
    weighted = problem.weighted(dual)
    scores = group_norms(problem.grouped(design.rmatvec(weighted)))
    lower, scale = problem.dual(dual, scores)
    dual, weighted, scores = scale * dual, scale * weighted, scale * scores
    size = abs(objective) + abs(lower) + float(np.abs(weighted * (predictions + intercept)).sum())
    size += float(np.abs(weighted * problem.targets).sum())
    imbalance = float(np.abs(weighted.sum(axis=0) * intercept).sum()) if problem.fit_intercept else 0.0
    lower -= ROUNDING * size + 2.0 * imbalance
    gap = max(objective - lower, 0.0)
    return Certificate(objective, lower, gap, intercept, dual, scores)
