"""Descend on the columns at hand until the duality gap there is below a target, and further if asked.

Smooth losses descend by themselves. Losses with kinks are smoothed around a dual point that moves to the dual
solution (`Smoothed`): the proximal point method on the dual, which needs no vanishing width to be exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from keyhole.solvers.accelerated import AcceleratedDescent
from keyhole.solvers.design import Design
from keyhole.solvers.dual_gap import Problem
from keyhole.solvers.losses import KinkedLoss, Outputs, Samples
from keyhole.solvers.smoothing import Smoothed

CHECK_EVERY = 5
"""Iterations between two looks at the gap, which cost O(n log n + m log m) and no product."""

PATIENCE = 50
"""Looks without a gap 1 % below the best one before a descent gives up: rounding has the last word."""

IDLE_MOVES = 5
"""Moves of the centre in a row without a gap 1 % smaller before a descent gives up."""

FIRST_WIDTH = 0.3
"""First smoothing width, in units of the loss of the best constant: the scale of the residuals."""

NARROWER = 0.3
"""The width shrinks by this factor when moving the centre did not bring the gap below 0.3 of what it was."""


@dataclass(frozen=True)
class Start:
    """Where a descent begins.

    Attributes
    ----------
    values : array (q, t)
        Of the groups at hand; a value of the proximal map.
    intercept : array (t,)
    dual : array (n, t)
        A dual point, feasible; the first centre of the smoothing of a loss with kinks.
    curvature : float
        Estimate of L, 0 when there is none.
    width : float
        Smoothing width, of use to losses with kinks only.
    """

    values: Float[np.ndarray, "q t"]
    intercept: Outputs
    dual: Samples
    curvature: float
    width: float


class GapWatch:
    """The best primal and dual points of a problem met so far on the columns at hand, and how long ago."""

    def __init__(self, problem: Problem, values: Float[np.ndarray, "q t"], dual: Samples) -> None:
        self.problem = problem
        self.values = values
        self.dual = dual
        self.stale = 0
        self._objective, self._bound, self._record = np.inf, -np.inf, np.inf

    @property
    def gap(self) -> float:
        """Best objective less best bound."""
        return self._objective - self._bound

    def look(self, descent: AcceleratedDescent, dual: Samples) -> float:
        """Evaluate the problem at the current point of ``descent`` and at ``dual``; return the gap."""
        intercept = self.problem.best_intercept(descent.predictions, descent.intercept)
        objective = self.problem.primal(descent.predictions, intercept, descent.values)
        if objective < self._objective:
            self._objective, self.values = objective, descent.values
        bound, scale = self.problem.dual(dual, descent.scores)
        if bound > self._bound:
            self._bound, self.dual = bound, scale * dual
        if self.gap < 0.99 * self._record:
            self._record, self.stale = self.gap, 0
        else:
            self.stale += 1
        return self.gap


class Descent(ABC):
    """A descent on some columns that can be taken further and further.

    Attributes
    ----------
    watch : GapWatch
        The best points so far.
    n_iter : int
        Iterations so far.
    exhausted : bool
        Whether the gap falls no more.
    """

    def __init__(self, problem: Problem, columns: Design, start: Start) -> None:
        self.problem = problem
        self.columns = columns
        self.width = start.width
        self.watch = GapWatch(problem, start.values, start.dual)
        self.n_iter = 0
        self.exhausted = False
        self._inner = self._begin(start)

    @property
    def intercept(self) -> Outputs:
        """The intercept of the last iterate."""
        return self._inner.intercept

    @property
    def curvature(self) -> float:
        """The current estimate of L."""
        return self._inner.curvature

    def run(self, target: float, max_iter: int) -> None:
        """Iterate until the gap is at most ``target`` or falls no more, ``max_iter`` times at most."""
        last = self.n_iter + max_iter
        while self.n_iter < last:
            self._inner.advance()
            self.n_iter += 1
            if self.n_iter % CHECK_EVERY == 0 or self.n_iter == last:
                dual = self.problem.feasible(self._inner.dual)
                gap = self.watch.look(self._inner, dual)
                if gap <= target:
                    break
                self._adapt(dual)
                if self.exhausted:
                    break

    @abstractmethod
    def _begin(self, start: Start) -> AcceleratedDescent:
        """The iteration to run."""

    @abstractmethod
    def _adapt(self, dual: Samples) -> None:
        """Change the iteration in the light of its current dual point, or find it exhausted."""


class SmoothDescent(Descent):
    """Accelerated descent on the problem itself."""

    def _begin(self, start: Start) -> AcceleratedDescent:
        return AcceleratedDescent(self.problem, self.columns, start.values, start.intercept, start.curvature)

    def _adapt(self, dual: Samples) -> None:
        self.exhausted = self.watch.stale > PATIENCE


class KinkedDescent(Descent):
    """Accelerated descent on smoothed problems whose centre moves to the dual solution."""

    def _begin(self, start: Start) -> AcceleratedDescent:
        self._before = np.inf
        self._idle_moves = 0
        return self._recentre(start.values, start.intercept, start.curvature, start.dual)

    def _recentre(
        self, values: Float[np.ndarray, "q t"], intercept: Outputs, curvature: float, centre: Samples
    ) -> AcceleratedDescent:
        loss = self.problem.loss
        assert isinstance(loss, KinkedLoss)
        self._centre = centre
        smoothed = replace(self.problem, loss=Smoothed(loss, self.problem.targets, self.width, centre))
        self._inner_watch = GapWatch(smoothed, values, centre)
        return AcceleratedDescent(smoothed, self.columns, values, intercept, curvature)

    def _adapt(self, dual: Samples) -> None:
        """Move the centre once the smoothed problem is solved as well as the centre is known."""
        inner = self._inner
        shift = 0.5 * self.width * float(self.problem.weights @ np.square(dual - self._centre).sum(axis=1))
        if self._inner_watch.look(inner, dual) > 2.0 * shift and self._inner_watch.stale <= PATIENCE:
            return
        self._idle_moves = self._idle_moves + 1 if self.watch.gap > 0.99 * self._before else 0
        self.exhausted = self._idle_moves > IDLE_MOVES
        curvature = inner.curvature
        if self.watch.gap > 0.3 * self._before:
            self.width, curvature = NARROWER * self.width, curvature / NARROWER
        self._before = self.watch.gap
        self._inner = self._recentre(inner.values, inner.intercept, curvature, dual)


def begin_descent(problem: Problem, columns: Design, start: Start) -> Descent:
    """The descent that suits the loss."""
    kinked = isinstance(problem.loss, KinkedLoss)
    return KinkedDescent(problem, columns, start) if kinked else SmoothDescent(problem, columns, start)
