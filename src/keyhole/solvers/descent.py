"""One stage of a fit: iterate on the columns at hand until the duality gap there is below a target.

Smooth losses descend by themselves. Losses with kinks are smoothed around a dual point that moves to the dual
solution (`Smoothed`): the proximal point method on the dual, which needs no vanishing width to be exact.
"""

from __future__ import annotations

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

PATIENCE = 60
"""Looks without a gap 1 % below the best one before a stage gives up: rounding has the last word."""

FIRST_WIDTH = 0.3
"""First smoothing width, in units of the loss of the best constant: the scale of the residuals."""

NARROWER = 0.3
"""The width shrinks by this factor when moving the centre did not bring the gap below 0.3 of what it was."""


@dataclass(frozen=True)
class Iterate:
    """Where a stage starts and ends.

    Attributes
    ----------
    values : array (q, t)
    intercept : array (t,)
    dual : array (n, t)
        The dual point with the best bound so far on these columns; the centre of the smoothing of a loss with
        kinks.
    curvature : float
        Estimate of L, 0 when there is none.
    width : float
        Smoothing width, of use to losses with kinks only.
    n_iter : int
        Iterations so far, over all stages.
    descent : AcceleratedDescent or None
        The descent that ended here; a stage on the same columns goes on with it and keeps its momentum.
    """

    values: Float[np.ndarray, "q t"]
    intercept: Outputs
    dual: Samples
    curvature: float
    width: float
    n_iter: int
    descent: AcceleratedDescent | None = None


class GapWatch:
    """The best primal and dual points of a problem met so far on the columns at hand, and how long ago."""

    def __init__(self, problem: Problem, dual: Samples) -> None:
        self.problem = problem
        self.objective, self.bound = np.inf, -np.inf
        self.values: np.ndarray | None = None
        self.dual = dual
        self.stale = 0
        self._record = np.inf

    @property
    def gap(self) -> float:
        """Best objective less best bound."""
        return self.objective - self.bound

    def look(self, descent: AcceleratedDescent, dual: Samples) -> float:
        """Evaluate the problem at the current point of ``descent`` and at ``dual``; return the gap."""
        intercept = self.problem.best_intercept(descent.predictions, descent.intercept)
        objective = self.problem.primal(descent.predictions, intercept, descent.values)
        if objective < self.objective:
            self.objective, self.values = objective, descent.values
        bound, scale = self.problem.dual(dual, descent.scores)
        if bound > self.bound:
            self.bound, self.dual = bound, scale * dual
        if self.gap < 0.99 * self._record:
            self._record, self.stale = self.gap, 0
        else:
            self.stale += 1
        return self.gap


def descend(problem: Problem, columns: Design, start: Iterate, target: float, max_iter: int) -> Iterate:
    """Iterate until the gap on ``columns`` is at most ``target``, or falls no more, or max_iter is there."""
    if isinstance(problem.loss, KinkedLoss):
        return _descend_kinked(problem, problem.loss, columns, start, target, max_iter)
    return _descend_smooth(problem, columns, start, target, max_iter)


def _descend_smooth(
    problem: Problem, columns: Design, start: Iterate, target: float, max_iter: int
) -> Iterate:
    descent = start.descent
    if descent is None or descent.columns is not columns:
        descent = AcceleratedDescent(problem, columns, start.values, start.intercept, start.curvature)
    watch = GapWatch(problem, start.dual)
    n_iter = start.n_iter
    while n_iter < max_iter:
        descent.advance()
        n_iter += 1
        if (n_iter - start.n_iter) % CHECK_EVERY and n_iter < max_iter:
            continue
        if watch.look(descent, problem.feasible(descent.dual)) <= target or watch.stale > PATIENCE:
            break
    values = descent.values if watch.values is None else watch.values
    return Iterate(values, descent.intercept, watch.dual, descent.curvature, start.width, n_iter, descent)


def _descend_kinked(
    problem: Problem, loss: KinkedLoss, columns: Design, start: Iterate, target: float, max_iter: int
) -> Iterate:
    watch = GapWatch(problem, start.dual)
    centre, width, curvature = start.dual, start.width, start.curvature
    values, intercept, n_iter = start.values, start.intercept, start.n_iter
    before = np.inf
    while n_iter < max_iter:
        smoothed = replace(problem, loss=Smoothed(loss, problem.targets, width, centre))
        descent = AcceleratedDescent(smoothed, columns, values, intercept, curvature)
        inner = GapWatch(smoothed, centre)
        first = n_iter
        while n_iter < max_iter:
            descent.advance()
            n_iter += 1
            if (n_iter - first) % CHECK_EVERY and n_iter < max_iter:
                continue
            dual = problem.feasible(descent.dual)
            done = watch.look(descent, dual) <= target or watch.stale > PATIENCE
            # the smoothed problem need only be solved as well as the centre is known
            shift = 0.5 * width * float(problem.weights @ np.square(dual - centre).sum(axis=1))
            if done or inner.look(descent, dual) <= 2.0 * shift or inner.stale > PATIENCE:
                break
        values, intercept, curvature, centre = descent.values, descent.intercept, descent.curvature, dual
        if done:
            break
        if watch.gap > 0.3 * before:
            width, curvature = NARROWER * width, curvature / NARROWER
        before = watch.gap
    return Iterate(
        values if watch.values is None else watch.values, intercept, watch.dual, curvature, width, n_iter
    )
