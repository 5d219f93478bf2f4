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
from jaxtyping import Bool, Float

from keyhole._array import MEMORY_BUDGET
from keyhole._checks import check_choice, check_count, check_finite, check_float_array, check_number
from keyhole.ball.central_path import newton_start, suits_newton
from keyhole.ball.design import Design, check_design
from keyhole.ball.losses import LOSSES
from keyhole.ball.projection import NormBall, group_norms
from keyhole.ball.solver import BallRisk, Solution, minimise, warn_if_short


@dataclass(frozen=True)
class NormBallFit:
    """A solution over the norm ball and the certificate of its quality.

    Pruned groups of ``values`` are exactly zero, ``active`` are the others; ``intercept`` is the best one for these
    values. ``objective`` is the weighted mean loss, ``duality_gap`` at least objective − minimum and at least 0.
    ``dual`` is the point a that proves the gap: Σ w a = 0 if there is an intercept, and objective − duality_gap ≤ −Σ w
    ℓ*(y, a) − max over the ball of <Φᵀ(w a), v>, but for rounding. An iteration is one product with the columns at hand
    and one with their transpose, or one Newton step where the problem is small.
    """

    values: Float[np.ndarray, "m d *t"]
    intercept: Float[np.ndarray, "*t"]
    objective: float
    duality_gap: float
    n_iter: int
    converged: bool
    active: Bool[np.ndarray, " m"]
    dual: Float[np.ndarray, " n *t"]


def fit_norm_ball(
    design: Any,
    targets: Any,
    *,
    group_size: int,
    group_radius: float = math.inf,
    ball_radius: float = math.inf,
    loss: str = "huber",
    fit_intercept: bool = True,
    sample_weight: Any = None,
    start: Any = None,
    tol: float = 1e-4,
    max_iter: int = 20_000,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
) -> NormBallFit:
    """Minimise the mean loss over the norm ball, until gap ≤ tol · max(objective, 1e-3 · loss of the best constant).

    ``design`` (n, p) is an array, or an operator with shape, matvec and rmatvec; with ``take(groups)`` as well, as
    `StreamedDesign` has, few active groups make it fast. ``targets`` are real numbers, labels ±1 for "logistic" and
    "hinge", rows on the simplex for "multinomial". One radius may be infinite. ``start`` is projected onto the ball
    first. Inner iterations are in ``dtype``, by default that of the design; objective and gap in float64 on the design
    as given. Beyond ``memory_budget`` the columns at hand are not copied. Warns (SolverWarning) if it stops before
    ``tol``.

    Accelerated projected gradient with restarts on a working set of groups; losses with kinks by the proximal point
    method on the dual: see `AcceleratedDescent`, `Smoothed` and `minimise`. An iteration costs 4·n·q flops for q
    columns in the working set, and their number grows with the condition of its columns. Small problems (some 250
    unknowns) take a few dozen Newton steps instead, which do not mind badly scaled columns and need no start: see
    `CentralPath`.

    >>> rng = np.random.default_rng(0)
    >>> design = rng.standard_normal((100, 20 * 3))                       # 20 groups of 3
    >>> targets = design[:, :3] @ [1.0, -2.0, 2.0] + 5.0
    >>> fit = fit_norm_ball(design, targets, group_size=3, group_radius=2.0, tol=1e-6)
    >>> fit.values[0].round(2), float(fit.intercept.round(1)), int(fit.active.sum())
    (array([ 0.73, -1.38,  1.25]), 5.0, 1)
    """
    setup = check_problem(design, targets, group_size, loss, fit_intercept, sample_weight, dtype, memory_budget)
    tol, max_iter = check_number(tol, "tol", minimum=0.0, exclusive=True), check_count(max_iter, "max_iter")
    ball, values = NormBall(*check_radii(group_radius, ball_radius)), setup.check_start(start)
    solution = setup.minimise(ball, values, tol, max_iter)
    warn_if_short(solution, tol, max_iter, setup.dtype, stacklevel=2)
    return setup.report(solution)


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
    """Checked inputs of a fit, all but the ball."""

    design: Design
    targets: Float[np.ndarray, "n t"]
    weights: Float[np.ndarray, " n"]
    loss: str
    group_size: int
    fit_intercept: bool
    one_output: bool
    dtype: np.dtype
    memory_budget: int

    @property
    def value_shape(self) -> tuple[int, ...]:
        """(M, D) or (M, D, t)."""
        n_groups = self.design.shape[1] // self.group_size
        return (n_groups, self.group_size) if self.one_output else (n_groups, self.group_size, self.targets.shape[1])

    def risk(self, ball: NormBall) -> BallRisk:
        """What is minimised over one ball."""
        loss = LOSSES[self.loss]
        return BallRisk(self.targets, self.weights, loss, ball, self.group_size, self.fit_intercept)

    def minimise(self, ball: NormBall, start: Float[np.ndarray, "p t"], tol: float, max_iter: int) -> Solution:
        """Minimise over one ball, from ``start`` or, where the problem is small, from the end of its central path.

        Whatever the Newton steps leave to do, e.g. because rounding stopped them, gradient steps take up.
        """
        problem, dual, n_iter = self.risk(ball), None, 0
        if suits_newton(problem, self.design, self.memory_budget):
            start, dual, n_iter = newton_start(problem, self.design, tol, max_iter)
        options: dict[str, Any] = {"dtype": self.dtype, "memory_budget": self.memory_budget}
        solution = minimise(problem, self.design, start, dual=dual, tol=tol, max_iter=max_iter - n_iter, **options)
        return replace(solution, n_iter=solution.n_iter + n_iter)

    def check_start(self, start: Any) -> Float[np.ndarray, "p t"]:
        """``start`` as (p, t), or zeros."""
        flat = (self.design.shape[1], self.targets.shape[1])
        if start is None:
            return np.zeros(flat)
        values = check_float_array(start, "start")
        if values.shape != self.value_shape:
            raise ValueError(
                f"`start` must have the shape of the values, {self.value_shape}: got {values.shape}. "
                "Pass the `values` of a fit on the same groups and outputs."
            )
        check_finite(values, "start")
        return values.astype(np.float64).reshape(flat)

    def report(self, solution: Solution) -> NormBallFit:
        """A solution in the shapes of the targets."""
        values = solution.values.reshape(self.value_shape)
        best = solution.certificate
        tail = self.value_shape[2:]
        return NormBallFit(
            values=values,
            intercept=best.intercept.reshape(tail),
            objective=best.objective,
            duality_gap=best.gap,
            n_iter=solution.n_iter,
            converged=solution.converged,
            active=group_norms(values.reshape(len(values), -1)) > 0,
            dual=best.dual.reshape(-1, *tail),
        )


def check_problem(
    design: Any,
    targets: Any,
    group_size: int,
    loss: str,
    fit_intercept: bool,
    sample_weight: Any,
    dtype: Any,
    memory_budget: int,
) -> BallSetup:
    """Check everything but the ball, and bring it into one shape."""
    loss = check_choice(loss, "loss", tuple(LOSSES))
    group_size = check_count(group_size, "group_size")
    operator = check_design(design, group_size, memory_budget)
    n = operator.shape[0]
    y = check_float_array(targets, "targets").astype(np.float64)
    if y.ndim not in (1, 2) or y.shape[0] != n or y.size == 0:
        raise ValueError(
            "`targets` must have shape (n,) or (n, t) with one row per row of the design: got shape "
            f"{y.shape} for a design of shape {operator.shape}."
        )
    check_finite(y, "targets")
    weights = _check_weights(sample_weight, n)
    one_output = y.ndim == 1
    y = y.reshape(n, -1)
    LOSSES[loss].check_targets(y, weights, fit_intercept)
    if dtype is None:
        array = getattr(operator, "array", None)
        dtype = array.dtype if isinstance(array, np.ndarray) else np.float64
    if np.dtype(dtype) not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise ValueError(f"`dtype` must be float32 or float64: got {np.dtype(dtype)}.")
    return BallSetup(
        operator, y, weights, loss, group_size, bool(fit_intercept), one_output, np.dtype(dtype), memory_budget
    )


def _check_weights(sample_weight: Any, n: int) -> Float[np.ndarray, " n"]:
    if sample_weight is None:
        return np.full(n, 1.0 / n)
    weights = check_float_array(sample_weight, "sample_weight").astype(np.float64)
    if weights.shape != (n,):
        raise ValueError(f"`sample_weight` must have shape ({n},), one per sample: got shape {weights.shape}.")
    check_finite(weights, "sample_weight")
    if weights.min() < 0 or weights.sum() == 0:
        raise ValueError(
            f"`sample_weight` must be nonnegative and not all zero: the smallest is {weights.min():g} and "
            f"they sum to {weights.sum():g}. A weight of zero leaves its sample out."
        )
    return np.asarray(weights / weights.sum())
