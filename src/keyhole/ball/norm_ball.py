"""Empirical risk minimisation over the norm ball {Σ_m |v_m| ≤ K_1, |v| ≤ R_2}: the paper's own learner.

    min over v, b of  Σ_i w_i ℓ(y_i, Φ_i v + b)   subject to   Σ_m |v_m| ≤ K_1  and  (Σ_m |v_m|²)^{1/2} ≤ R_2

with Σ w = 1. Group m owns ``group_size`` consecutive columns of Φ; with several outputs its norm is that of
the whole block. The intercept b is free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._checks import check_number
from keyhole.ball.central_path import newton_start, suits_newton
from keyhole.ball.design import SelectableDesign
from keyhole.ball.losses import LOSSES
from keyhole.ball.projection import NormBall
from keyhole.ball.solver import BallRisk, Solution, minimise


def check_radius(radius: Any, name: str) -> float:
    """Return a radius as a float: nonnegative, infinity allowed."""
    unbounded = isinstance(radius, (float, np.floating)) and radius == math.inf
    return math.inf if unbounded else check_number(radius, name, minimum=0.0)


def check_radii(group_radius: Any, ball_radius: Any) -> tuple[float, float]:
    """Return both radii, at least one of them finite."""
    pair = check_radius(group_radius, "group_radius"), check_radius(ball_radius, "ball_radius")
    if pair == (math.inf, math.inf):
        raise ValueError(
            "`group_radius` and `ball_radius` must not both be infinite: nothing would bound the values. Give one of "
            "them a number, or use ridge regression, kh.AttentionRegressor."
        )
    return pair


@dataclass(frozen=True)
class BallSetup:
    """What is minimised, over one ball or another: all but the ball.

    ``targets`` are real numbers, labels ±1 for "logistic" and "hinge", rows on the simplex for "multinomial", and every
    class has weight; ``weights`` add up to one. Inner iterations are in ``dtype``; objective and gap in float64 on the
    design as given. Beyond ``memory_budget`` the columns at hand are not copied.

    >>> from keyhole.ball.design import DenseDesign
    >>> rng = np.random.default_rng(0)
    >>> design = rng.standard_normal((100, 20 * 3))                       # 20 groups of 3
    >>> targets = design[:, :3] @ [[1.0], [-2.0], [2.0]] + 5.0
    >>> given = np.full(100, 0.01), "huber", 3, True, np.dtype(np.float64), 2**30
    >>> setup = BallSetup(DenseDesign(design, 3), targets, *given)
    >>> found = setup.minimise(NormBall(2.0, math.inf), setup.zeros, 1e-6, 20_000)
    >>> found.values[:3, 0].round(2), found.certificate.intercept.round(1), int((found.values != 0).sum())
    (array([ 0.73, -1.38,  1.25]), array([5.]), 3)
    """

    design: SelectableDesign
    targets: Float[np.ndarray, "n t"]
    weights: Float[np.ndarray, " n"]
    loss: str
    group_size: int
    fit_intercept: bool
    dtype: np.dtype
    memory_budget: int

    @property
    def zeros(self) -> Float[np.ndarray, "p t"]:
        """Values to start from."""
        return np.zeros((self.design.shape[1], self.targets.shape[1]))

    def risk(self, ball: NormBall) -> BallRisk:
        """What is minimised over one ball."""
        loss = LOSSES[self.loss]
        return BallRisk(self.targets, self.weights, loss, ball, self.group_size, self.fit_intercept)

    def minimise(self, ball: NormBall, start: Float[np.ndarray, "p t"], tol: float, max_iter: int) -> Solution:
        """Minimise over one ball, until gap ≤ tol · max(objective, 1e-3 · loss of the best constant).

        From ``start``, projected onto the ball, by accelerated projected gradient with restarts on a working set of
        groups; losses with kinks by the proximal point method on the dual: see `AcceleratedDescent`, `Smoothed` and
        `keyhole.ball.solver.minimise`. An iteration costs 4·n·q flops for q columns in the working set, and their
        number grows with the condition of its columns. Small problems (some 250 unknowns) take a few dozen Newton steps
        instead, which do not mind badly scaled columns and need no start: see `CentralPath`. Whatever these leave to
        do, e.g. because rounding stopped them, gradient steps take up.
        """
        problem, dual, n_iter = self.risk(ball), None, 0
        if suits_newton(problem, self.design, self.memory_budget):
            start, dual, n_iter = newton_start(problem, self.design, tol, max_iter)
        options: dict[str, Any] = {"dtype": self.dtype, "memory_budget": self.memory_budget}
        solution = minimise(problem, self.design, start, dual=dual, tol=tol, max_iter=max_iter - n_iter, **options)
        return replace(solution, n_iter=solution.n_iter + n_iter)
