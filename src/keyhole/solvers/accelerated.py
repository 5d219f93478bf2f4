"""Accelerated proximal gradient steps with restarts, on the loss with its intercept minimised out.

F(v) = min_b Σ_i w_i ℓ(y_i, Φ_i v + b) is convex, its gradient is Φᵀ(w a) with a the gradient of the loss at
the best b, and it is no steeper than the loss at fixed b: the intercept costs O(n) a step and removes the
mean of the columns, which is the worst direction of most designs.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float

from keyhole.solvers.design import Design, WorkingColumns
from keyhole.solvers.dual_gap import Problem
from keyhole.solvers.losses import Outputs, Samples
from keyhole.solvers.projection import group_norms

RELAX = 0.95
"""The step grows by 1/RELAX an iteration: a failed test costs one product, a timid step many iterations."""


class AcceleratedDescent:
    """Minimise F(v) + Ω(v) for a smooth loss, one iteration per `advance`.

    Each iteration is a proximal gradient step from a point extrapolated by momentum (FISTA). The momentum is
    dropped when it points uphill (gradient restart of O'Donoghue and Candès). The step 1/L follows the
    curvature met on the way: a step is accepted if <∇F(new) − ∇F(old), new − old> ≤ L |new − old|². Cost per
    iteration: one product with Φ, one with Φᵀ, and a proximal map.

    Parameters
    ----------
    problem : Problem
    columns : Design
        Φ, restricted to the groups at hand.
    values : array (p, t)
        Starting point, a value of the proximal map.
    intercept : array (t,)
    curvature : float
        First guess of L; 0 measures it along the gradient.

    Attributes
    ----------
    values, predictions, intercept
        The current v, Φv and best b.
    dual
        The gradient of the loss at the last extrapolated point: a dual point.
    """

    def __init__(
        self,
        problem: Problem,
        columns: Design,
        values: Float[np.ndarray, "p t"],
        intercept: Outputs,
        curvature: float = 0.0,
    ) -> None:
        self.problem = problem
        self.columns = columns
        self.values = self._last_values = values
        self.predictions = self._last_predictions = columns.matvec(values)
        self.intercept, self.dual = problem.settle(self.predictions, intercept)
        self._weights = problem.weights[:, None]
        self._groups = (values.shape[0] // problem.group_size, -1)
        self._gradient = columns.rmatvec(self._weights * self.dual)
        self.curvature = curvature or self._curvature_along(self._gradient)
        self._momentum = 1.0
        precision = columns.array.dtype if isinstance(columns, WorkingColumns) else np.dtype(np.float64)
        self._noise = 8.0 * float(np.finfo(precision).eps)

    @property
    def scores(self) -> Float[np.ndarray, " m"]:
        """The group norms of Φᵀ(w dual)."""
        return group_norms(self.problem.grouped(self._gradient))

    def advance(self) -> None:
        """One iteration."""
        momentum = 0.5 * (1.0 + math.sqrt(1.0 + 4.0 * self._momentum**2))
        push = (self._momentum - 1.0) / momentum
        ahead = self.values + push * (self.values - self._last_values)
        ahead_predictions = self.predictions + push * (self.predictions - self._last_predictions)
        _, self.dual = self.problem.settle(ahead_predictions, self.intercept)
        self._gradient = self.columns.rmatvec(self._weights * self.dual)

        values, predictions = self._step(ahead, ahead_predictions, self._gradient)
        if float(np.vdot(ahead - values, values - self.values)) > 0.0:
            momentum = 1.0
        self._last_values, self._last_predictions = self.values, self.predictions
        self.values, self.predictions, self._momentum = values, predictions, momentum

    def _step(
        self,
        start: Float[np.ndarray, "p t"],
        predictions: Samples,
        gradient: Float[np.ndarray, "p t"],
    ) -> tuple[Float[np.ndarray, "p t"], Samples]:
        """The proximal gradient step from ``start`` with the largest step that passes the curvature test."""
        problem = self.problem
        while True:
            grouped = (start - gradient / self.curvature).reshape(self._groups)
            values = problem.regulariser.prox(grouped, 1.0 / self.curvature).reshape(start.shape)
            move = values - start
            reached = self.columns.matvec(values)
            change = reached - predictions
            self.intercept, dual = problem.settle(reached, self.intercept)
            turn = self._weights * (dual - self.dual)
            bend = float(np.vdot(turn, change))
            size = float(np.vdot(move, move))
            # what rounding in the products alone could add to `bend`
            allowance = self._noise * float(np.linalg.norm(turn) * np.linalg.norm(reached))
            if bend <= self.curvature * size + allowance or size == 0.0:
                # where rounding decided the test, it says nothing about longer steps
                self.curvature *= RELAX if bend > allowance else 1.0
                return values, reached
            self.curvature = max(2.0 * self.curvature, 1.1 * bend / size)

    def _curvature_along(self, direction: Float[np.ndarray, "p t"]) -> float:
        """A first L: the largest curvature the loss could have along ``direction``."""
        size = float(np.vdot(direction, direction))
        if size == 0.0:
            return 1.0
        change = self.columns.matvec(direction)
        if self.problem.fit_intercept:
            change = change - self.problem.weights @ change
        bend = float(self.problem.weights @ np.square(change).sum(axis=1))
        return self.problem.loss.smoothness * bend / size or 1.0
