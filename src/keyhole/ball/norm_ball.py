"""Empirical risk minimisation over the norm ball {Σ_m |v_m| ≤ K_1, |v| ≤ R_2}: the paper's own learner.

    min over v, b of  Σ_i w_i ℓ(y_i, Φ_i v + b)   subject to   Σ_m |v_m| ≤ K_1  and  (Σ_m |v_m|²)^{1/2} ≤ R_2

with Σ w = 1. Group m owns ``group_size`` consecutive columns of Φ; with several outputs its norm is that of
the whole block. The intercept b is free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    Attributes
    ----------
    values : array (M, D), or (M, D, t) for targets of shape (n, t)
        v. Pruned groups are exactly zero.
    intercept : array () or (t,)
        b, the best one for these values; zero if none was fitted.
    objective : float
        Weighted mean loss.
    duality_gap : float
        At least objective − minimum, and at least 0.
    n_iter : int
        Iterations; each is one product with the columns at hand and one with their transpose, or one Newton
        step where the problem is small.
    converged : bool
        Whether the gap is as small as asked.
    active : array (M,) of bool
        Groups with v_m ≠ 0.
    dual : array (n,) or (n, t)
        The dual point a that proves the gap: Σ w a = 0 if there is an intercept, and
        objective − duality_gap ≤ −Σ w ℓ*(y, a) − max over the ball of <Φᵀ(w a), v>, but for rounding.
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
    """Minimise the mean loss over the norm ball, to a duality gap computed on the way.

    Parameters
    ----------
    design : array (n, p), or Design
        Φ, in groups of ``group_size`` consecutive columns. An operator needs shape, matvec and rmatvec; with
        ``take(groups)`` as well (as `StreamedDesign` has) few active groups make it fast.
    targets : array (n,) or (n, t)
        Real numbers; labels ±1 for "logistic" and "hinge"; rows on the simplex (one-hot) for "multinomial".
    group_size : int
        D.
    group_radius, ball_radius : float
        K_1 and R_2; one of them may be ``math.inf``.
    loss : str
        "absolute", "huber" (r²/2 up to |r| = 1, then |r| − 1/2), "squared" (r²/2), "logistic", "hinge" or
        "multinomial". Losses of one number are summed over outputs.
    fit_intercept : bool
        Whether b is free; otherwise it is zero.
    sample_weight : array (n,), optional
        Nonnegative; the objective is the weighted mean.
    start : array (M, D) or (M, D, t), optional
        Where to start, e.g. the values of a fit at other radii; projected onto the ball first.
    tol : float
        Stop when gap ≤ tol · max(objective, 1e-3 · loss of the best constant).
    max_iter : int
    dtype : dtype, optional
        Precision of the inner iterations, float32 or float64; that of the design by default. Objective and
        gap are computed in float64 on the design as given, whatever it is.
    memory_budget : int
        Bytes that a copy of the columns at hand may take; beyond it the design is used as it is.

    Returns
    -------
    NormBallFit

    Warns
    -----
    SolverWarning
        If it stops before the gap is as small as asked.

    Notes
    -----
    Accelerated projected gradient with restarts and steps that follow the curvature, the intercept minimised
    out, on a working set of groups; losses with kinks by the proximal point method on the dual. See
    `AcceleratedDescent`, `Smoothed` and `minimise`. An iteration costs 4·n·q flops for q columns in the
    working set, and their number grows with the condition of its columns: bring them to a similar scale. Small
    problems (some 250 unknowns) take a few dozen Newton steps instead, which do not mind badly scaled columns and
    need no start: see `CentralPath`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> design = rng.standard_normal((100, 20 * 3))                       # 20 groups of 3
    >>> targets = design[:, :3] @ [1.0, -2.0, 2.0] + 5.0
    >>> fit = fit_norm_ball(design, targets, group_size=3, group_radius=2.0, tol=1e-6)
    >>> fit.values[0].round(2), float(fit.intercept.round(1)), int(fit.active.sum())
    (array([ 0.73, -1.38,  1.25]), 5.0, 1)
    """
    setup = check_problem(design, targets, group_size, loss, fit_intercept, sample_weight, dtype, memory_budget)
    (fit,) = _fit_path(setup, [(group_radius, ball_radius)], start, tol, max_iter)
    return fit


def norm_ball_path(
    design: Any,
    targets: Any,
    radii: Sequence[tuple[float, float]],
    *,
    group_size: int,
    loss: str = "huber",
    fit_intercept: bool = True,
    sample_weight: Any = None,
    start: Any = None,
    tol: float = 1e-4,
    max_iter: int = 20_000,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
) -> tuple[NormBallFit, ...]:
    """Fit at each pair (group_radius, ball_radius) in turn, each from the solution before it.

    Parameters
    ----------
    radii : sequence of (float, float)
        In the order in which they are to be fitted; from small to large is fastest.
    design, targets, group_size, loss, fit_intercept, sample_weight, start, tol, max_iter, dtype,
    memory_budget
        As for `fit_norm_ball`.

    Returns
    -------
    tuple of NormBallFit
        One per pair.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> design = rng.standard_normal((100, 20 * 3))
    >>> targets = design[:, :3] @ [1.0, -2.0, 2.0] + design[:, 3]
    >>> path = norm_ball_path(design, targets, [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)], group_size=3)
    >>> [round(fit.objective, 2) for fit in path], [int(fit.active.sum()) for fit in path]
    ([1.44, 0.78, 0.26], [1, 2, 2])
    """
    setup = check_problem(design, targets, group_size, loss, fit_intercept, sample_weight, dtype, memory_budget)
    return _fit_path(setup, radii, start, tol, max_iter)


def _fit_path(
    setup: BallSetup,
    radii: Sequence[tuple[float, float]],
    start: Any,
    tol: float,
    max_iter: int,
) -> tuple[NormBallFit, ...]:
    tol = check_number(tol, "tol", minimum=0.0, exclusive=True)
    max_iter = check_count(max_iter, "max_iter")
    values = setup.check_start(start)
    fits = []
    for group_radius, ball_radius in radii:
        ball = NormBall(*check_radii(group_radius, ball_radius))
        solution = setup.minimise(ball, values, tol, max_iter)
        warn_if_short(solution, tol, max_iter, setup.dtype, stacklevel=3)
        values = solution.values
        fits.append(setup.report(solution))
    return tuple(fits)


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
