"""Accelerated projected gradient over the norm ball, on the columns at hand.

`AcceleratedDescent` is the iteration for a smooth loss. `BallDescent` runs it until the duality gap
on these columns is small enough. `KinkedDescent` does the same for losses with kinks: it smooths
them around a dual point that moves to the solution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from keyhole.ball.design import Design, WorkingColumns
from keyhole.ball.losses import KinkedLoss, Outputs, Samples, Smoothed
from keyhole.ball.projection import group_norms
from keyhole.ball.risk import BallRisk

RELAX = 0.95
"""L falls to this share per iteration: a failed test costs one product, a short step many."""

CHECK_EVERY = 5
"""Iterations between two checks of the gap, which cost O(n log n + m log m) and no product."""

NO_PROGRESS = 0.99
"""A gap above this share of the one before counts as no progress."""

PATIENCE = 50
"""Checks without progress before a descent gives up: rounding stands in the way."""

IDLE_MOVES = 5
"""Moves of the centre in a row without progress before a descent gives up."""

NARROWER = 0.3
"""The smoothing width shrinks by this factor when a move of the centre brought too little."""

ENOUGH_PROGRESS = 0.3
"""A move of the centre brought enough if the gap is below this share of the one before."""


class AcceleratedDescent:
    """Minimise a smooth loss over the ball, one iteration per `advance`.

    Each iteration is a projected gradient step from a point extrapolated by momentum (FISTA). The
    momentum is dropped when it points uphill (gradient restart of O'Donoghue and Candès). The step
    1/L follows the curvature met on the way: a step is accepted if
    <∇F(new) − ∇F(old), new − old> ≤ L |new − old|². A ``curvature`` of 0 as the first L means that
    it is measured along the gradient. Cost per iteration: one product with Φ, one with Φᵀ, and a
    projection.

    ``values``, ``predictions`` and ``intercept`` are the current v, Φv and best b; ``dual``, the
    gradient of the loss at the last extrapolated point, is a dual point.
    """

    def __init__(
        self,
        problem: BallRisk,
        columns: Design,
        values: Float[np.ndarray, "p t"],
        intercept: Outputs,
        curvature: float = 0.0,
    ) -> None:
        self.problem = problem
        self.columns = columns
        self._weights = problem.weights[:, None]
        self._grouped_shape = (values.shape[0] // problem.group_size, -1)

        # the current point and the one before, which momentum extrapolates from
        self.values = values
        self.predictions = columns.matvec(values)
        self._last_values = self.values
        self._last_predictions = self.predictions
        self._momentum = 1.0

        # the dual point, the gradient Φᵀ(w dual), and the first L
        self.intercept, self.dual = problem.settle(self.predictions, intercept)
        self._gradient = columns.rmatvec(self._weights * self.dual)
        self.curvature = curvature
        if curvature == 0.0:
            self.curvature = self._curvature_along(self._gradient)

        # relative rounding of a product
        precision = np.dtype(np.float64)
        if isinstance(columns, WorkingColumns):
            precision = columns.array.dtype
        self._rounding = 8.0 * float(np.finfo(precision).eps)

    @property
    def scores(self) -> Float[np.ndarray, " m"]:
        """The group norms of Φᵀ(w dual)."""
        return group_norms(self.problem.grouped(self._gradient))

    def advance(self) -> None:
        """One iteration."""
        # extrapolate, and take the gradient there
        momentum = 0.5 * (1.0 + math.sqrt(1.0 + 4.0 * self._momentum**2))
        push = (self._momentum - 1.0) / momentum
        ahead = self.values + push * (self.values - self._last_values)
        predictions_change = self.predictions - self._last_predictions
        ahead_predictions = self.predictions + push * predictions_change
        _, self.dual = self.problem.settle(ahead_predictions, self.intercept)
        self._gradient = self.columns.rmatvec(self._weights * self.dual)

        # step from there; momentum that the step turned against is dropped
        values, predictions = self._step(ahead, ahead_predictions, self._gradient)
        points_uphill = float(np.vdot(ahead - values, values - self.values)) > 0.0
        if points_uphill:
            momentum = 1.0

        self._last_values = self.values
        self._last_predictions = self.predictions
        self.values = values
        self.predictions = predictions
        self._momentum = momentum

    def _step(
        self,
        start: Float[np.ndarray, "p t"],
        start_predictions: Samples,
        gradient: Float[np.ndarray, "p t"],
    ) -> tuple[Float[np.ndarray, "p t"], Samples]:
        """The projected gradient step from ``start`` with the largest step that passes the test."""
        problem = self.problem
        while True:
            # the step
            target = start - gradient / self.curvature
            projected = problem.ball.project(target.reshape(self._grouped_shape))
            values = projected.reshape(start.shape)
            predictions = self.columns.matvec(values)
            self.intercept, dual = problem.settle(predictions, self.intercept)

            # the curvature along it: <∇F(new) − ∇F(old), new − old> against |new − old|²
            move = values - start
            move_squared = float(np.vdot(move, move))
            dual_change = self._weights * (dual - self.dual)
            bend = float(np.vdot(dual_change, predictions - start_predictions))

            # what rounding of the products alone could add to `bend`
            allowance = self._rounding * float(
                np.linalg.norm(dual_change) * np.linalg.norm(predictions)
            )
            if bend <= self.curvature * move_squared + allowance or move_squared == 0.0:
                # try a longer step next, unless rounding decided the test and it says nothing
                if bend > allowance:
                    self.curvature *= RELAX
                return values, predictions
            self.curvature = max(2.0 * self.curvature, 1.1 * bend / move_squared)

    def _curvature_along(self, direction: Float[np.ndarray, "p t"]) -> float:
        """A first L: the largest curvature the loss could have along ``direction``."""
        size = float(np.vdot(direction, direction))
        if size == 0.0:
            return 1.0
        change = self.columns.matvec(direction)
        if self.problem.fit_intercept:
            change = change - self.problem.weights @ change
        bend = float(self.problem.weights @ np.square(change).sum(axis=1))
        curvature = self.problem.loss.smoothness * bend / size
        if curvature == 0.0:
            return 1.0
        return curvature


class GapWatch:
    """The best primal and dual points of a problem met so far on the columns at hand.

    ``stale`` counts the checks since the gap last fell by 1 %.
    """

    def __init__(self, problem: BallRisk, values: Float[np.ndarray, "q t"], dual: Samples) -> None:
        self.problem = problem
        self.values = values
        self.dual = dual
        self.stale = 0
        self._objective = np.inf
        self._bound = -np.inf
        self._smallest_gap = np.inf

    @property
    def gap(self) -> float:
        """Best objective less best bound."""
        return self._objective - self._bound

    def check(self, descent: AcceleratedDescent, dual: Samples) -> float:
        """Evaluate the problem at the current point of ``descent`` and at ``dual``: the gap."""
        # the primal point
        intercept = self.problem.best_intercept(descent.predictions, descent.intercept)
        objective = self.problem.primal(descent.predictions, intercept)
        if objective < self._objective:
            self._objective = objective
            self.values = descent.values

        # the dual point
        bound = self.problem.dual(dual, descent.scores)
        if bound > self._bound:
            self._bound = bound
            self.dual = dual

        if self.gap < NO_PROGRESS * self._smallest_gap:
            self._smallest_gap = self.gap
            self.stale = 0
        else:
            self.stale += 1
        return self.gap


@dataclass(frozen=True)
class DescentStart:
    """Where a descent begins.

    ``values`` of the groups at hand lie in the ball, ``dual`` is feasible, ``curvature`` is an
    estimate of L (0 for none). ``width`` smooths a loss with kinks around ``dual``; other losses do
    not read it.
    """

    values: Float[np.ndarray, "q t"]
    intercept: Outputs
    dual: Samples
    curvature: float
    width: float


class BallDescent:
    """Accelerated descent on some columns that can be taken further, until it is ``exhausted``.

    ``inner`` is the iteration, ``watch`` the best points it has met.
    """

    def __init__(self, problem: BallRisk, columns: Design, start: DescentStart) -> None:
        self.problem = problem
        self.columns = columns
        self.width = start.width
        self.watch = GapWatch(problem, start.values, start.dual)
        self.n_iter = 0
        self.exhausted = False
        self.inner = self._begin(start)

    def run(self, target: float, max_iter: int) -> None:
        """Iterate until the gap is at most ``target``, at most ``max_iter`` times.

        A gap that falls no more ends it too: the descent is ``exhausted`` then.
        """
        last = self.n_iter + max_iter
        while self.n_iter < last:
            self.inner.advance()
            self.n_iter += 1
            if self.n_iter % CHECK_EVERY == 0 or self.n_iter == last:
                dual = self.problem.feasible(self.inner.dual)
                gap = self.watch.check(self.inner, dual)
                if gap <= target:
                    break
                self._adapt(dual)
                if self.exhausted:
                    break

    def _begin(self, start: DescentStart) -> AcceleratedDescent:
        """The iteration to run: on the problem itself, unless its loss has kinks."""
        return AcceleratedDescent(
            self.problem,
            self.columns,
            values=start.values,
            intercept=start.intercept,
            curvature=start.curvature,
        )

    def _adapt(self, dual: Samples) -> None:
        """Change the iteration in the light of its current dual point, or find it exhausted."""
        self.exhausted = self.watch.stale > PATIENCE


class KinkedDescent(BallDescent):
    """Accelerated descent on smoothed problems whose centre moves to the dual solution."""

    def __init__(self, problem: BallRisk, columns: Design, start: DescentStart) -> None:
        self._gap_at_last_move = math.inf
        self._idle_moves = 0
        super().__init__(problem, columns, start)

    def _begin(self, start: DescentStart) -> AcceleratedDescent:
        """The iteration on the problem smoothed around the dual point of ``start``."""
        loss = self.problem.loss
        assert isinstance(loss, KinkedLoss)
        self.width = start.width
        self._centre = start.dual
        smoothed_loss = Smoothed(loss, self.problem.targets, start.width, start.dual)
        smoothed = replace(self.problem, loss=smoothed_loss)
        self._smoothed_watch = GapWatch(smoothed, start.values, start.dual)
        return AcceleratedDescent(
            smoothed,
            self.columns,
            values=start.values,
            intercept=start.intercept,
            curvature=start.curvature,
        )

    def _adapt(self, dual: Samples) -> None:
        """Move the centre once the smoothed problem is solved as well as the centre is known."""
        # smoothing costs about `shift`: before the gap is that small, moving would be premature
        distance = float(self.problem.weights @ np.square(dual - self._centre).sum(axis=1))
        shift = 0.5 * self.width * distance
        smoothed_gap = self._smoothed_watch.check(self.inner, dual)
        is_falling = self._smoothed_watch.stale <= PATIENCE
        if smoothed_gap > 2.0 * shift and is_falling:
            return

        # give up after several moves that brought nothing
        gap = self.watch.gap
        if gap > NO_PROGRESS * self._gap_at_last_move:
            self._idle_moves += 1
        else:
            self._idle_moves = 0
        self.exhausted = self._idle_moves > IDLE_MOVES

        # a move that brought too little asks for a narrower smoothing, whose L is larger
        width = self.width
        curvature = self.inner.curvature
        if gap > ENOUGH_PROGRESS * self._gap_at_last_move:
            width = NARROWER * width
            curvature = curvature / NARROWER
        self._gap_at_last_move = gap

        self.inner = self._begin(
            DescentStart(
                values=self.inner.values,
                intercept=self.inner.intercept,
                dual=dual,
                curvature=curvature,
                width=width,
            )
        )


def begin_descent(problem: BallRisk, columns: Design, start: DescentStart) -> BallDescent:
    """The descent that suits the loss of ``problem``."""
    if isinstance(problem.loss, KinkedLoss):
        return KinkedDescent(problem, columns, start)
    return BallDescent(problem, columns, start)
