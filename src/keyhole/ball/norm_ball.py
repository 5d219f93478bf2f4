"""Empirical risk minimisation over the norm ball {Σ_m |v_m| ≤ K_1, |v| ≤ R_2}: the paper's own learner.

    min over v, b of  Σ_i w_i ℓ(y_i, Φ_i v + b)   subject to   Σ_m |v_m| ≤ K_1  and  (Σ_m |v_m|²)^{1/2} ≤ R_2

with Σ w = 1. Group m owns ``group_size`` consecutive columns of Φ; with several outputs its norm is that of
the whole block. The intercept b is free. Descent works on the groups that matter and is certified on all of them by a
duality gap.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from keyhole._checks import check_number
from keyhole.ball.design import ColumnBuffer, DenseDesign, Design, SelectableDesign, WorkingColumns
from keyhole.ball.losses import LOSSES, KinkedLoss, Loss, Outputs, PerSample, Samples, Smoothed
from keyhole.ball.projection import NormBall, group_norms

ROUNDING = 64 * float(np.finfo(np.float64).eps)
"""Added to every gap, times the size of the terms it is the difference of: so it stays an upper bound."""


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
        return intercept, self.loss.gradient(self.targets, predictions + intercept)

    def feasible(self, dual: Samples) -> Samples:
        """``dual`` made to satisfy Σ_i w_i a_i = 0 if an intercept is free."""
        return self.loss.balanced(self.targets, dual, self.weights) if self.fit_intercept else dual

    def dual(self, dual: Samples, norms: Float[np.ndarray, " m"]) -> float:
        """D(a), a lower bound of the risk; ``norms`` are the group norms of Φᵀ(w a)."""
        conjugate = float(self.weights @ self.loss.conjugate(self.targets, dual))
        return -conjugate - self.ball.support(norms)[0]


@dataclass(frozen=True)
class GapCertificate:
    """A primal and a dual point with the gap between them, both evaluated in float64 on the whole design.

    ``gap`` is at least the objective less the minimum, and at least 0; ``dual`` (n, t) is balanced, ``scores`` (m,)
    are the group norms of Φᵀ(w a).
    """

    objective: float
    lower_bound: float
    gap: float
    intercept: Outputs
    dual: Samples
    scores: Float[np.ndarray, " m"]


def certify(
    problem: BallRisk, design: Design, values: Float[np.ndarray, "p t"], dual: Samples | None, intercept: Outputs
) -> GapCertificate:
    """Evaluate the risk at (values, best intercept) and its bound at ``dual``, or at the gradient of the loss if None.

    Cost: one product with Φ and one with Φᵀ.
    """
    predictions = design.matvec(values)
    intercept, gradient = problem.settle(predictions, intercept)
    objective = problem.primal(predictions, intercept)
    dual = problem.feasible(gradient if dual is None else dual)
    weighted = dual * problem.weights[:, None]
    scores = group_norms(problem.grouped(design.rmatvec(weighted)))
    lower = problem.dual(dual, scores)
    size = abs(objective) + abs(lower) + float(np.abs(weighted * (predictions + intercept)).sum())
    size += float(np.abs(weighted * problem.targets).sum())
    imbalance = float(np.abs(weighted.sum(axis=0) * intercept).sum()) if problem.fit_intercept else 0.0
    lower -= ROUNDING * size + 2.0 * imbalance
    return GapCertificate(objective, lower, max(objective - lower, 0.0), intercept, dual, scores)


RELAX = 0.95  # the step grows by 1/RELAX an iteration: a failed test costs one product, a timid step many iterations


class AcceleratedDescent:
    """Minimise a smooth loss over the ball, one iteration per `advance`.

    Each iteration is a projected gradient step from a point extrapolated by momentum (FISTA). The momentum is
    dropped when it points uphill (gradient restart of O'Donoghue and Candès). The step 1/L follows the
    curvature met on the way: a step is accepted if <∇F(new) − ∇F(old), new − old> ≤ L |new − old|²; a ``curvature``
    of 0 is measured along the gradient. Cost per iteration: one product with Φ, one with Φᵀ, and a projection.

    ``values``, ``predictions`` and ``intercept`` are the current v, Φv and best b; ``dual``, the gradient of the loss
    at the last extrapolated point, is a dual point.
    """

    def __init__(
        self,
        problem: BallRisk,
        columns: Design,
        values: Float[np.ndarray, "p t"],
        intercept: Outputs,
        curvature: float = 0.0,
    ) -> None:
        self.problem, self.columns = problem, columns
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
        self, start: Float[np.ndarray, "p t"], predictions: Samples, gradient: Float[np.ndarray, "p t"]
    ) -> tuple[Float[np.ndarray, "p t"], Samples]:
        """The projected gradient step from ``start`` with the largest step that passes the curvature test."""
        problem = self.problem
        while True:
            grouped = (start - gradient / self.curvature).reshape(self._groups)
            values = problem.ball.project(grouped).reshape(start.shape)
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


CHECK_EVERY = 5  # iterations between two looks at the gap, which cost O(n log n + m log m) and no product
PATIENCE = 50  # looks without a gap 1 % below the best one before a descent gives up: rounding has the last word
IDLE_MOVES = 5  # moves of the centre in a row without a gap 1 % smaller before a descent gives up
FIRST_WIDTH = 0.3  # first smoothing width, in units of the loss of the best constant: the scale of the residuals
NARROWER = 0.3  # the width shrinks by this factor when moving the centre did not bring the gap below 0.3 of what it was


DescentPoint: TypeAlias = tuple[Float[np.ndarray, "q t"], Outputs, float, Samples]


class GapWatch:
    """The best primal and dual points of a problem met so far on the columns at hand, and how long ago."""

    def __init__(self, problem: BallRisk, values: Float[np.ndarray, "q t"], dual: Samples) -> None:
        self.problem, self.values, self.dual, self.stale = problem, values, dual, 0
        self._objective, self._bound, self._record = np.inf, -np.inf, np.inf

    @property
    def gap(self) -> float:
        """Best objective less best bound."""
        return self._objective - self._bound

    def look(self, descent: AcceleratedDescent, dual: Samples) -> float:
        """Evaluate the problem at the current point of ``descent`` and at ``dual``; return the gap."""
        intercept = self.problem.best_intercept(descent.predictions, descent.intercept)
        objective = self.problem.primal(descent.predictions, intercept)
        if objective < self._objective:
            self._objective, self.values = objective, descent.values
        bound = self.problem.dual(dual, descent.scores)
        if bound > self._bound:
            self._bound, self.dual = bound, dual
        if self.gap < 0.99 * self._record:
            self._record, self.stale = self.gap, 0
        else:
            self.stale += 1
        return self.gap


class BallDescent:
    """Accelerated descent on some columns that can be taken further and further, until it is ``exhausted``.

    ``at`` are values in the ball, of the groups at hand, an intercept, an estimate of L (0 for none) and a feasible
    dual point; ``width`` smooths a loss with kinks, around that point; ``inner`` is the iteration.
    """

    def __init__(self, problem: BallRisk, columns: Design, at: DescentPoint, width: float) -> None:
        self.problem, self.columns, self.width = problem, columns, width
        self.watch = GapWatch(problem, at[0], at[3])
        self.n_iter, self.exhausted = 0, False
        self.inner = self._begin(*at)

    def run(self, target: float, max_iter: int) -> None:
        """Iterate until the gap is at most ``target`` or falls no more, ``max_iter`` times at most."""
        last = self.n_iter + max_iter
        while self.n_iter < last:
            self.inner.advance()
            self.n_iter += 1
            if self.n_iter % CHECK_EVERY == 0 or self.n_iter == last:
                dual = self.problem.feasible(self.inner.dual)
                gap = self.watch.look(self.inner, dual)
                if gap <= target:
                    break
                self._adapt(dual)
                if self.exhausted:
                    break

    def _begin(
        self, values: Float[np.ndarray, "q t"], intercept: Outputs, curvature: float, dual: Samples
    ) -> AcceleratedDescent:
        """The iteration to run: on the problem itself, unless its loss has kinks."""
        return AcceleratedDescent(self.problem, self.columns, values, intercept, curvature)

    def _adapt(self, dual: Samples) -> None:
        """Change the iteration in the light of its current dual point, or find it exhausted."""
        self.exhausted = self.watch.stale > PATIENCE


class KinkedDescent(BallDescent):
    """Accelerated descent on smoothed problems whose centre moves to the dual solution."""

    _before, _idle_moves = math.inf, 0

    def _begin(
        self, values: Float[np.ndarray, "q t"], intercept: Outputs, curvature: float, dual: Samples
    ) -> AcceleratedDescent:
        loss = self.problem.loss
        assert isinstance(loss, KinkedLoss)
        self._centre = dual
        smoothed = replace(self.problem, loss=Smoothed(loss, self.problem.targets, self.width, dual))
        self._inner_watch = GapWatch(smoothed, values, dual)
        return AcceleratedDescent(smoothed, self.columns, values, intercept, curvature)

    def _adapt(self, dual: Samples) -> None:
        """Move the centre once the smoothed problem is solved as well as the centre is known."""
        inner = self.inner
        shift = 0.5 * self.width * float(self.problem.weights @ np.square(dual - self._centre).sum(axis=1))
        if self._inner_watch.look(inner, dual) > 2.0 * shift and self._inner_watch.stale <= PATIENCE:
            return
        self._idle_moves = self._idle_moves + 1 if self.watch.gap > 0.99 * self._before else 0
        self.exhausted = self._idle_moves > IDLE_MOVES
        curvature = inner.curvature
        if self.watch.gap > 0.3 * self._before:
            self.width, curvature = NARROWER * self.width, curvature / NARROWER
        self._before = self.watch.gap
        self.inner = self._begin(inner.values, inner.intercept, curvature, dual)


OBJECTIVE_FLOOR = 1e-3  # the gap is relative to the objective, or to this share of the best constant's loss if larger
ROUNDING_FLOOR = 1e-12  # and never to less than this share of the loss at zero: constant targets are fitted to rounding
STAGE = 0.1  # a stage aims at this share of the certified gap: more would be spent on a working set that may be wrong
SPARE_GROUPS = 10  # groups added to those predicted active, doubled when the prediction was too small
IDLE_STAGES = 2  # stages in a row on the same groups, without a gap 1 % smaller, before a fit gives up: it is rounding


class SolverWarning(UserWarning):
    """A solver stopped before the gap was as small as asked; the message has the number and the remedy."""


@dataclass(frozen=True)
class Solution:
    """The best point found, and the best primal point against the best dual one.

    ``relative_gap`` is the gap over max(objective, floor), as compared with ``tol``.
    """

    values: Float[np.ndarray, "p t"]
    certificate: GapCertificate
    relative_gap: float
    n_iter: int
    converged: bool


class WorkingSet:
    """Which groups are at hand, as ``chosen`` (m,) of bool, and their ``columns``.

    Iterations on these columns alone are 2.0 to 2.8 times as fast as on all of them at n = 1000,
    M = 300 and n = 2000, M = 500 (d = 8; 1.8 for huber at the latter), 0.8 to 1.1 times at n = 300,
    M = 100, and 7 to 15 times where features are computed again for every product:
    ``python benchmarks/ball_working_set.py``.
    """

    def __init__(self, problem: BallRisk, design: SelectableDesign, dtype: np.dtype, memory_budget: int) -> None:
        self._problem, self._design, self._memory_budget = problem, design, memory_budget
        self._buffer = ColumnBuffer(dtype)
        self._whole: Design | None = None
        if isinstance(design, DenseDesign) and design.array.dtype == dtype:
            self._whole = WorkingColumns(design.array)
        self._item_bytes = len(problem.targets) * problem.group_size * dtype.itemsize
        self.chosen = np.zeros(design.shape[1] // problem.group_size, dtype=bool)
        self.columns: Design = design

    def update(self, wanted: Bool[np.ndarray, " m"]) -> None:
        """Have at least the ``wanted`` groups at hand."""
        missing = wanted & ~self.chosen
        if self.chosen.any() and not missing.any():
            return
        fits = int(wanted.sum()) * self._item_bytes <= self._memory_budget
        already_in_memory = self._whole is not None and bool(wanted.all())
        if fits and not already_in_memory:
            self.chosen = wanted
            groups = np.flatnonzero(wanted)
            self.columns = self._buffer.fill(self._design, groups, self._problem.group_size)
        else:
            # without columns at hand the design streams them anew at every product
            self.chosen = np.ones_like(wanted)
            self.columns = self._whole or self._design

    def restrict(self, values: Float[np.ndarray, "p t"]) -> Float[np.ndarray, "q t"]:
        """The values of the chosen groups, side by side."""
        return np.asarray(self._problem.grouped(values)[self.chosen].reshape(-1, values.shape[1]))

    def extend(self, values: Float[np.ndarray, "q t"]) -> Float[np.ndarray, "p t"]:
        """Values of all groups: zero outside the chosen ones."""
        whole = np.zeros((len(self.chosen), values.size // max(1, int(self.chosen.sum()))))
        whole[self.chosen] = self._problem.grouped(values)
        return whole.reshape(-1, values.shape[1])


def minimise(
    problem: BallRisk,
    design: SelectableDesign,
    start: Float[np.ndarray, "p t"],
    *,
    tol: float,
    max_iter: int,
    dtype: np.dtype,
    memory_budget: int,
) -> Solution:
    """Minimise the risk from ``start``, projected onto the ball, until the certified relative gap is at most ``tol``.

    The first dual point is the gradient of the loss at ``start``. Iterations are in ``dtype``,
    certificates in float64. The columns at hand are copied if that takes no more than
    ``memory_budget`` bytes, and streamed from the design otherwise.
    """
    start = problem.ball.project(problem.grouped(start)).reshape(start.shape)
    constant, null, floor = null_model(problem)
    best = certify(problem, design, start, None, constant)
    working = WorkingSet(problem, design, dtype, memory_budget)
    values, curvature, width = start, 0.0, FIRST_WIDTH * max(null, floor)
    spare, n_iter, idle, exhausted = SPARE_GROUPS, 0, 0, False
    descent: BallDescent | None = None
    while True:
        scale = max(best.objective, floor)
        converged = best.gap <= tol * scale
        if converged or n_iter >= max_iter or exhausted:
            break
        working.update(_predict_active(problem, values, best.scores, spare))
        moved = descent is None or descent.columns is not working.columns
        if descent is None or moved:
            if descent is not None:
                curvature, width = descent.inner.curvature, descent.width
            at = working.restrict(values), best.intercept, curvature, best.dual
            suited = KinkedDescent if isinstance(problem.loss, KinkedLoss) else BallDescent
            descent = suited(problem, working.columns, at, width)
        target, before = max(0.7 * tol * scale, STAGE * best.gap), descent.n_iter
        descent.run(target, max_iter - n_iter)
        n_iter += descent.n_iter - before
        candidate = working.extend(descent.watch.values)
        certificate = certify(problem, design, candidate, descent.watch.dual, descent.inner.intercept)
        if certificate.objective <= best.objective:
            values = candidate
        gap, best = best.gap, _merge(best, certificate)
        idle = idle + 1 if best.gap > 0.99 * gap and not moved else 0
        exhausted = idle > IDLE_STAGES or (descent.exhausted and best.gap > 0.5 * gap)
        # the gap on the working set was below target: what is left is due to groups outside it
        spare = 2 * spare if best.gap > 3.0 * target else spare
    return Solution(values, best, best.gap / scale if scale > 0 else 0.0, n_iter, converged)


def warn_if_short(
    solution: Solution,
    tol: float,
    max_iter: int,
    dtype: Any,
    *,
    who: str,
    category: type[SolverWarning],
    stacklevel: int,
) -> None:
    """Warn if ``solution`` did not reach ``tol``: the gap it reached, and what to change."""
    if solution.converged:
        return
    if solution.n_iter >= max_iter:
        remedy = "raise `max_iter`, or `tol` if that gap will do"
    elif np.dtype(dtype) == np.float32:
        remedy = "float32 has no more digits to give: use float64, or raise `tol`"
    else:
        remedy = "rounding has the last word here: raise `tol`"
    warnings.warn(
        f"{who} stopped after {solution.n_iter} iterations at a relative duality gap of {solution.relative_gap:.2e}, "
        f"where `tol` asked for {tol:.2e}: {remedy}. Columns of very different size slow it down: bring the "
        "coordinates of tokens to a similar scale, for example with scaling='standard'.",
        category,
        stacklevel=stacklevel + 1,
    )


def null_model(problem: BallRisk) -> tuple[Float[np.ndarray, " t"], float, float]:
    """The best intercept without values, its loss, and the floor below which a relative gap means nothing."""
    nothing = np.zeros_like(problem.targets)
    constant = problem.best_intercept(nothing, np.zeros(problem.targets.shape[1]))
    null = float(problem.weights @ problem.loss.value(problem.targets, nothing + constant))
    zero = float(problem.weights @ problem.loss.value(problem.targets, nothing))
    return constant, null, max(OBJECTIVE_FLOOR * null, ROUNDING_FLOOR * zero)


def _merge(old: GapCertificate, new: GapCertificate) -> GapCertificate:
    """The better primal point with the better dual point."""
    primal = new if new.objective <= old.objective else old
    dual = new if new.lower_bound >= old.lower_bound else old
    gap = max(primal.objective - dual.lower_bound, 0.0)
    return GapCertificate(primal.objective, dual.lower_bound, gap, primal.intercept, dual.dual, dual.scores)


def _predict_active(
    problem: BallRisk, values: Float[np.ndarray, "p t"], scores: Float[np.ndarray, " m"], spare: int
) -> Bool[np.ndarray, " m"]:
    """Groups that are active, or that the dual point says should be, and the next best ones."""
    chosen = group_norms(problem.grouped(values)) > 0
    chosen |= scores > problem.ball.support(scores)[1]
    size = math.ceil(1.25 * chosen.sum()) + spare
    ranked = np.argsort(np.where(chosen, np.inf, scores))[::-1]
    chosen[ranked[:size]] = True
    return chosen


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
        `keyhole.ball.norm_ball.minimise`. An iteration costs 4·n·q flops for q columns in the working set, and their
        number grows with the condition of its columns.
        """
        return minimise(
            self.risk(ball),
            self.design,
            start,
            tol=tol,
            max_iter=max_iter,
            dtype=self.dtype,
            memory_budget=self.memory_budget,
        )
