"""Fit on the groups that matter, certify on all of them.

A stage iterates on a working set of groups, whose columns are copied side by side; then the gap is computed
on the whole design, in float64. Groups left out cost two products a stage instead of two an iteration.
Nothing rests on the choice of the working set but speed: the gap that is reported has seen every group.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from keyhole.solvers.descent import FIRST_WIDTH, Descent, Start, begin_descent
from keyhole.solvers.design import ColumnBuffer, DenseDesign, Design, SelectableDesign, WorkingColumns
from keyhole.solvers.dual_gap import Certificate, Problem, certify
from keyhole.solvers.losses import Samples
from keyhole.solvers.projection import group_norms

OBJECTIVE_FLOOR = 1e-3
"""The gap is relative to the objective, or to this share of the best constant's loss where that is larger."""

ROUNDING_FLOOR = 1e-12
"""And never to less than this share of the loss at zero: constant targets are fitted to rounding only."""

STAGE = 0.1
"""A stage aims at this share of the certified gap: more would be spent on a working set that may be wrong."""

SPARE_GROUPS = 10
"""Groups added to those predicted active, doubled when the prediction was too small."""

COPYING = 12.0
"""What copying columns costs, in iterations on them: about 20 into fresh memory, 2 into used memory."""

SHORT_STAGE = 10
"""Iterations that a first stage is expected to take; a later one is expected to be like the one before."""

IDLE_STAGES = 2
"""Stages in a row on the same groups, without a gap 1 % smaller, before a fit gives up: it is rounding."""

WORTH_SHRINKING = 0.7
"""Share of the columns at hand below which a smaller working set is worth a copy and the loss of momentum."""


class SolverWarning(UserWarning):
    """A solver stopped before the gap was as small as asked; the message has the number and the remedy."""


@dataclass(frozen=True)
class Solution:
    """The best point found, with its certificate.

    Attributes
    ----------
    values : array (p, t)
    certificate : Certificate
        The best primal point against the best dual point.
    relative_gap : float
        Gap over max(objective, floor), as compared with ``tol``.
    n_iter : int
    converged : bool
    """

    values: Float[np.ndarray, "p t"]
    certificate: Certificate
    relative_gap: float
    n_iter: int
    converged: bool


class WorkingSet:
    """Which groups are at hand, and their columns.

    Attributes
    ----------
    chosen : array (m,) of bool
    columns : Design
        The columns of the chosen groups.
    """

    def __init__(self, problem: Problem, design: Design, dtype: np.dtype, memory_budget: int) -> None:
        self._problem = problem
        self._design = design
        self._memory_budget = memory_budget
        self._buffer = ColumnBuffer(dtype)
        self._whole: Design | None = design if not isinstance(design, SelectableDesign) else None
        if isinstance(design, DenseDesign) and design.array.dtype == dtype:
            self._whole = WorkingColumns(design.array)
        self._item_bytes = len(problem.targets) * problem.group_size * dtype.itemsize
        self.chosen = np.zeros(design.shape[1] // problem.group_size, dtype=bool)
        self.columns: Design = design

    def update(self, wanted: Bool[np.ndarray, " m"], n_iter: int) -> None:
        """Have at least the ``wanted`` groups at hand, for a stage of about ``n_iter`` iterations."""
        at_hand = bool(self.chosen.any()) and not bool((wanted & ~self.chosen).any())
        if at_hand and wanted.sum() >= WORTH_SHRINKING * self.chosen.sum():
            return
        share = float(wanted.mean())
        too_large = int(wanted.sum()) * self._item_bytes > self._memory_budget
        if too_large or (self._whole is not None and COPYING * share >= n_iter * (1.0 - share)):
            # without columns at hand the design streams them anew at every product
            self.chosen = np.ones_like(wanted)
            self.columns = self._whole or self._design
        elif isinstance(self._design, SelectableDesign):
            self.chosen = wanted
            self.columns = self._buffer.fill(self._design, np.flatnonzero(wanted), self._problem.group_size)

    def restrict(self, values: Float[np.ndarray, "p t"]) -> Float[np.ndarray, "q t"]:
        """The values of the chosen groups, side by side."""
        return np.asarray(self._problem.grouped(values)[self.chosen].reshape(-1, values.shape[1]))

    def extend(self, values: Float[np.ndarray, "q t"]) -> Float[np.ndarray, "p t"]:
        """Values of all groups: zero outside the chosen ones."""
        whole = np.zeros((len(self.chosen), values.size // max(1, int(self.chosen.sum()))))
        whole[self.chosen] = self._problem.grouped(values)
        return whole.reshape(-1, values.shape[1])


def minimise(
    problem: Problem,
    design: Design,
    start: Float[np.ndarray, "p t"],
    *,
    dual: Samples | None = None,
    tol: float,
    max_iter: int,
    dtype: np.dtype,
    memory_budget: int,
) -> Solution:
    """Minimise the problem from ``start`` until the certified relative gap is at most ``tol``.

    Parameters
    ----------
    problem : Problem
    design : Design
    start : array (p, t)
        A value of the proximal map, e.g. zeros.
    dual : array (n, t), optional
        A dual point to start from; the gradient of the loss at ``start`` by default.
    tol, max_iter
        When to stop.
    dtype : dtype
        Precision of the inner iterations; certificates are in float64 whatever it is.
    memory_budget : int
        Bytes that the copied columns may take; a larger working set is streamed from the design instead.
    """
    constant, null, floor = null_model(problem)
    best = certify(problem, design, start, dual, constant)
    working = WorkingSet(problem, design, dtype, memory_budget)
    values, curvature, width = start, 0.0, FIRST_WIDTH * max(null, floor)
    spare, expected, n_iter, idle, exhausted = SPARE_GROUPS, SHORT_STAGE, 0, 0, False
    descent: Descent | None = None
    while True:
        scale = max(best.objective, floor)
        converged = best.gap <= tol * scale
        if converged or n_iter >= max_iter or exhausted:
            break
        working.update(_predict_active(problem, values, best.scores, spare), expected)
        moved = descent is None or descent.columns is not working.columns
        if descent is None or moved:
            if descent is not None:
                curvature, width = descent.curvature, descent.width
            at = Start(working.restrict(values), best.intercept, best.dual, curvature, width)
            descent = begin_descent(problem, working.columns, at)
        target, before = max(0.7 * tol * scale, STAGE * best.gap), descent.n_iter
        descent.run(target, max_iter - n_iter)
        expected = descent.n_iter - before
        n_iter += expected
        candidate = working.extend(descent.watch.values)
        certificate = certify(problem, design, candidate, descent.watch.dual, descent.intercept)
        if certificate.objective <= best.objective:
            values = candidate
        gap, best = best.gap, _merge(best, certificate)
        idle = idle + 1 if best.gap > 0.99 * gap and not moved else 0
        exhausted = idle > IDLE_STAGES or (descent.exhausted and best.gap > 0.5 * gap)
        # the gap on the working set was below target: what is left is due to groups outside it
        spare = 2 * spare if best.gap > 3.0 * target else spare
    return Solution(values, best, best.gap / scale if scale > 0 else 0.0, n_iter, converged)


def warn_if_short(solution: Solution, tol: float, max_iter: int, dtype: np.dtype, stacklevel: int) -> None:
    """Warn with a `SolverWarning` if ``solution`` did not reach ``tol``: the number, and what to change.

    ``stacklevel`` is that of `warnings.warn`: the warning belongs to the line that asked for the fit.
    """
    if solution.converged:
        return
    if solution.n_iter >= max_iter:
        remedy = "raise `max_iter`, or `tol` if that gap will do"
    elif dtype == np.float32:
        remedy = "float32 has no more digits to give: use float64, or raise `tol`"
    else:
        remedy = "rounding has the last word here: raise `tol`"
    warnings.warn(
        f"stopped after {solution.n_iter} iterations at a relative duality gap of "
        f"{solution.relative_gap:.2e}, where `tol` asked for {tol:.2e}: {remedy}.",
        SolverWarning,
        stacklevel=stacklevel,
    )


def null_model(problem: Problem) -> tuple[Float[np.ndarray, " t"], float, float]:
    """The best intercept without values, its loss, and the floor below which a relative gap means nothing."""
    nothing = np.zeros_like(problem.targets)
    constant = problem.best_intercept(nothing, np.zeros(problem.targets.shape[1]))
    null = float(problem.weights @ problem.loss.value(problem.targets, nothing + constant))
    zero = float(problem.weights @ problem.loss.value(problem.targets, nothing))
    return constant, null, max(OBJECTIVE_FLOOR * null, ROUNDING_FLOOR * zero)


def _merge(old: Certificate, new: Certificate) -> Certificate:
    """The better primal point with the better dual point."""
    primal = new if new.objective <= old.objective else old
    dual = new if new.lower_bound >= old.lower_bound else old
    gap = max(primal.objective - dual.lower_bound, 0.0)
    return Certificate(primal.objective, dual.lower_bound, gap, primal.intercept, dual.dual, dual.scores)


def _predict_active(
    problem: Problem, values: Float[np.ndarray, "p t"], scores: Float[np.ndarray, " m"], spare: int
) -> Bool[np.ndarray, " m"]:
    """Groups that are active, or that the dual point says should be, and the next best ones."""
    chosen = group_norms(problem.grouped(values)) > 0
    chosen |= scores > problem.regulariser.threshold(scores)
    size = math.ceil(1.25 * chosen.sum()) + spare
    ranked = np.argsort(np.where(chosen, np.inf, scores))[::-1]
    chosen[ranked[:size]] = True
    return chosen
