"""Empirical risk minimisation over the norm ball {Σ_m |v_m| ≤ K_1, |v| ≤ R_2}: the paper's learner.

    min over v, b of  Σ_i w_i ℓ(y_i, Φ_i v + b)   subject to   Σ_m |v_m| ≤ K_1  and  |v| ≤ R_2

with Σ w = 1. Group m owns ``group_size`` consecutive columns of Φ; with several outputs its norm is
that of the whole block. The intercept b is free. `BallSetup.minimise` is the way in. Descent
(`keyhole.ball.descent`) works on the groups that matter, the working set, and is certified on all
groups by a duality gap (`keyhole.ball.risk`).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from keyhole._checks import check_number
from keyhole.ball.descent import NO_PROGRESS, BallDescent, DescentStart, begin_descent
from keyhole.ball.design import (
    ColumnBuffer,
    DenseDesign,
    Design,
    SelectableDesign,
    WorkingColumns,
)
from keyhole.ball.losses import LOSSES
from keyhole.ball.projection import NormBall, group_norms
from keyhole.ball.risk import BallRisk, GapCertificate, certify

OBJECTIVE_FLOOR = 1e-3
"""The gap is relative to the objective, or to this share of the best constant's loss if larger."""

ROUNDING_FLOOR = 1e-12
"""And never to less than this share of the loss at zero: rounding is as good as a fit can be."""

STAGE = 0.1
"""A stage aims at this share of the certified gap: its working set may be wrong."""

MARGIN = 0.7
"""And at no less than this share of the gap asked for: the certificate is a little above it."""

SPARE_GROUPS = 10
"""Groups added to those predicted active, doubled when the prediction was too small."""

FIRST_WIDTH = 0.3
"""First smoothing width, in units of the best constant's loss: the scale of the residuals."""

IDLE_STAGES = 2
"""Stages in a row on the same groups without progress before a fit gives up."""


class SolverWarning(UserWarning):
    """A solver stopped before the gap was as small as asked; the message names the remedy."""


@dataclass(frozen=True)
class Solution:
    """The best point that was found, with a bound on its distance to the minimum.

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
    ``python benchmarks/ball_working_set.py``. Of a whole default fit, whose larger balls have more
    active groups, it takes 1/1.4 to 1/1.1 of the time for a design in memory (n = 500, M = 256 and
    n = 2000, M = 512). It stays for designs that do not fit the memory: n = 1000, M = 256, absolute
    loss, 16 MiB of working memory take 0.9 s with it and 15.7 s without (20 active groups; 1.2
    times as long without where the active groups themselves do not fit).
    """

    def __init__(
        self,
        problem: BallRisk,
        design: SelectableDesign,
        dtype: np.dtype,
        memory_budget: int,
    ) -> None:
        self._problem = problem
        self._design = design
        self._memory_budget = memory_budget
        self._buffer = ColumnBuffer(dtype)
        self._group_bytes = len(problem.targets) * problem.group_size * dtype.itemsize
        # an array in the precision of the iterations needs no copy
        self._whole: WorkingColumns | None = None
        if isinstance(design, DenseDesign) and design.array.dtype == dtype:
            self._whole = WorkingColumns(design.array)
        self.chosen = np.zeros(design.shape[1] // problem.group_size, dtype=bool)
        self.columns: Design = design

    def update(self, wanted: Bool[np.ndarray, " m"]) -> None:
        """Have at least the ``wanted`` groups at hand."""
        missing = wanted & ~self.chosen
        if self.chosen.any() and not missing.any():
            return
        fits = int(wanted.sum()) * self._group_bytes <= self._memory_budget
        already_in_memory = self._whole is not None and bool(wanted.all())
        if fits and not already_in_memory:
            self.chosen = wanted
            groups = np.flatnonzero(wanted)
            self.columns = self._buffer.fill(self._design, groups, self._problem.group_size)
        else:
            # all groups; a design that is not in memory streams them anew at every product
            self.chosen = np.ones_like(wanted)
            self.columns = self._whole or self._design

    def restrict(self, values: Float[np.ndarray, "p t"]) -> Float[np.ndarray, "q t"]:
        """The values of the chosen groups, side by side."""
        grouped = self._problem.grouped(values)
        return np.asarray(grouped[self.chosen].reshape(-1, values.shape[1]))

    def extend(self, values: Float[np.ndarray, "q t"]) -> Float[np.ndarray, "p t"]:
        """Values of all groups: zero outside the chosen ones."""
        n_outputs = values.shape[1]
        whole = np.zeros((len(self.chosen), self._problem.group_size * n_outputs))
        whole[self.chosen] = self._problem.grouped(values)
        return whole.reshape(-1, n_outputs)


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
    """Minimise the risk from ``start``, projected onto the ball, until the gap is small enough.

    The certified relative gap is to be at most ``tol``. The first dual point is the gradient of the
    loss at ``start``. Iterations are in ``dtype``, certificates in float64. The columns at hand are
    copied if that takes no more than ``memory_budget`` bytes, and streamed from the design
    otherwise.
    """
    # certify the start
    values = problem.ball.project(problem.grouped(start)).reshape(start.shape)
    constant, null_loss, floor = null_model(problem)
    best = certify(problem, design, values, None, constant)

    working = WorkingSet(problem, design, dtype, memory_budget)
    descent: BallDescent | None = None
    curvature = 0.0
    width = FIRST_WIDTH * max(null_loss, floor)
    n_spare = SPARE_GROUPS
    n_iter = 0
    n_idle_stages = 0
    exhausted = False
    while True:
        scale = max(best.objective, floor)
        converged = best.gap <= tol * scale
        if converged or n_iter >= max_iter or exhausted:
            break

        # have the groups at hand that the best points call for; new columns need a new descent
        working.update(_predict_active(problem, values, best.scores, n_spare))
        columns_changed = descent is None or descent.columns is not working.columns
        if descent is None or columns_changed:
            if descent is not None:
                curvature = descent.inner.curvature
                width = descent.width
            stage_start = DescentStart(
                values=working.restrict(values),
                intercept=best.intercept,
                dual=best.dual,
                curvature=curvature,
                width=width,
            )
            descent = begin_descent(problem, working.columns, stage_start)

        # a stage: descend on these groups
        target = max(MARGIN * tol * scale, STAGE * best.gap)
        n_iter_before = descent.n_iter
        descent.run(target, max_iter - n_iter)
        n_iter += descent.n_iter - n_iter_before

        # certify it on all groups
        candidate = working.extend(descent.watch.values)
        certificate = certify(
            problem, design, candidate, descent.watch.dual, descent.inner.intercept
        )
        if certificate.objective <= best.objective:
            values = candidate
        gap_before = best.gap
        best = best.improved_by(certificate)

        # give up after stages without progress, or with a descent that gave up itself
        if best.gap > NO_PROGRESS * gap_before and not columns_changed:
            n_idle_stages += 1
        else:
            n_idle_stages = 0
        stage_brought_little = best.gap > 0.5 * gap_before
        exhausted = n_idle_stages > IDLE_STAGES or (descent.exhausted and stage_brought_little)

        # the gap on the working set was below target: what is left is due to groups outside it
        if best.gap > 3.0 * target:
            n_spare *= 2

    relative_gap = 0.0
    if scale > 0:
        relative_gap = best.gap / scale
    return Solution(
        values=values,
        certificate=best,
        relative_gap=relative_gap,
        n_iter=n_iter,
        converged=converged,
    )


def _predict_active(
    problem: BallRisk,
    values: Float[np.ndarray, "p t"],
    scores: Float[np.ndarray, " m"],
    n_spare: int,
) -> Bool[np.ndarray, " m"]:
    """Groups that are active, or that the dual point says should be, and the next best ones."""
    _, threshold = problem.ball.support(scores)
    predicted = (group_norms(problem.grouped(values)) > 0) | (scores > threshold)
    n_wanted = math.ceil(1.25 * predicted.sum()) + n_spare
    # the predicted groups come first, the others by their scores
    ranked = np.argsort(np.where(predicted, np.inf, scores))[::-1]
    predicted[ranked[:n_wanted]] = True
    return predicted


def null_model(problem: BallRisk) -> tuple[Float[np.ndarray, " t"], float, float]:
    """The best intercept without values, its loss, and the floor of relative gaps.

    Below the floor a relative gap means nothing: see `OBJECTIVE_FLOOR` and `ROUNDING_FLOOR`.
    """
    zeros = np.zeros_like(problem.targets)
    no_intercept = np.zeros(problem.targets.shape[1])
    constant = problem.best_intercept(zeros, no_intercept)
    null_loss = problem.primal(zeros, constant)
    loss_at_zero = problem.primal(zeros, no_intercept)
    floor = max(OBJECTIVE_FLOOR * null_loss, ROUNDING_FLOOR * loss_at_zero)
    return constant, null_loss, floor


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
        remedy = "the gap no longer falls: raise `tol`"
    warnings.warn(
        f"{who} stopped after {solution.n_iter} iterations at a relative duality gap of "
        f"{solution.relative_gap:.2e}, where `tol` asked for {tol:.2e}: {remedy}. Columns of very "
        "different size slow it down: bring the coordinates of tokens to a similar scale, for "
        "example with scaling='standard'.",
        category,
        stacklevel=stacklevel + 1,
    )


def check_radius(radius: Any, name: str) -> float:
    """Return a radius as a float: nonnegative, infinity allowed."""
    is_infinite = isinstance(radius, (float, np.floating)) and radius == math.inf
    if is_infinite:
        return math.inf
    return check_number(radius, name, minimum=0.0)


def check_radii(group_radius: Any, ball_radius: Any) -> tuple[float, float]:
    """Return both radii, at least one of them finite."""
    group = check_radius(group_radius, "group_radius")
    ball = check_radius(ball_radius, "ball_radius")
    if math.isinf(group) and math.isinf(ball):
        raise ValueError(
            "`group_radius` and `ball_radius` must not both be infinite: nothing would bound the "
            "values. Give one of them a number, or use ridge regression, kh.AttentionRegressor."
        )
    return group, ball


@dataclass(frozen=True)
class BallSetup:
    """The objective of a norm-ball problem: everything but the radii of the ball.

    ``targets`` are real numbers, labels ±1 for "logistic" and "hinge", rows on the simplex for
    "multinomial", and every class has weight; ``weights`` add up to one. Inner iterations are in
    ``dtype``; objective and gap in float64 on the design as given. Beyond ``memory_budget`` the
    columns at hand are not copied.

    >>> from keyhole.ball.design import DenseDesign
    >>> rng = np.random.default_rng(0)
    >>> features = rng.standard_normal((100, 20 * 3))  # 20 groups of 3
    >>> setup = BallSetup(
    ...     design=DenseDesign(features, group_size=3),
    ...     targets=features[:, :3] @ [[1.0], [-2.0], [2.0]] + 5.0,
    ...     weights=np.full(100, 0.01),
    ...     loss="huber",
    ...     group_size=3,
    ...     fit_intercept=True,
    ...     dtype=np.dtype(np.float64),
    ...     memory_budget=2**30,
    ... )
    >>> ball = NormBall(group_radius=2.0, ball_radius=math.inf)
    >>> solution = setup.minimise(ball, setup.zeros, tol=1e-6, max_iter=20_000)
    >>> solution.values[:3, 0].round(2), int((solution.values != 0).sum())
    (array([ 0.73, -1.38,  1.25]), 3)
    >>> solution.certificate.intercept.round(1)
    array([5.])
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
        return BallRisk(
            targets=self.targets,
            weights=self.weights,
            loss=LOSSES[self.loss],
            ball=ball,
            group_size=self.group_size,
            fit_intercept=self.fit_intercept,
        )

    def minimise(
        self, ball: NormBall, start: Float[np.ndarray, "p t"], tol: float, max_iter: int
    ) -> Solution:
        """Minimise over one ball, until gap ≤ tol · max(objective, 1e-3 · loss of best constant).

        From ``start``, projected onto the ball, by accelerated projected gradient with restarts on
        a working set of groups; losses with kinks by the proximal point method on the dual: see
        `AcceleratedDescent`, `Smoothed` and `keyhole.ball.norm_ball.minimise`. An iteration costs
        4·n·q flops for q columns in the working set, and their number grows with the condition of
        its columns.
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
