"""A fit over one norm ball, from plain arrays: what the solver and its laws are tested on."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole._array import MEMORY_BUDGET
from keyhole.ball.design import DenseDesign
from keyhole.ball.norm_ball import BallSetup, SolverWarning, check_radii, warn_if_short
from keyhole.ball.projection import NormBall, group_norms


@dataclass(frozen=True)
class NormBallFit:
    """A solution in the shapes of the targets, and the certificate of its quality."""

    values: Any
    intercept: Any
    objective: float
    duality_gap: float
    n_iter: int
    converged: bool
    active: Any
    dual: Any


def fit_norm_ball(
    design,
    targets,
    *,
    group_size,
    group_radius=math.inf,
    ball_radius=math.inf,
    loss="huber",
    fit_intercept=True,
    sample_weight=None,
    start=None,
    tol=1e-4,
    max_iter=20_000,
    dtype=None,
    memory_budget=MEMORY_BUDGET,
):
    """Minimise the mean loss over one ball; ``design`` is an array, or a design with columns to take."""
    if isinstance(design, np.ndarray):
        design = DenseDesign(design, group_size, memory_budget)
    (n, p), tail = design.shape, np.shape(targets)[1:]
    dtype = np.dtype(dtype or getattr(getattr(design, "array", None), "dtype", np.float64))
    weights = np.full(n, 1 / n) if sample_weight is None else np.asarray(sample_weight, float) / np.sum(sample_weight)
    y = np.asarray(targets, float).reshape(n, -1)
    setup = BallSetup(design, y, weights, loss, group_size, fit_intercept, dtype, memory_budget)
    begin = setup.zeros if start is None else start.reshape(p, -1)
    solution = setup.minimise(NormBall(*check_radii(group_radius, ball_radius)), begin, tol, max_iter)
    warn_if_short(solution, tol, max_iter, dtype, who="fit_norm_ball", category=SolverWarning, stacklevel=2)
    best, values = solution.certificate, solution.values.reshape(-1, group_size, *tail)
    return NormBallFit(
        values,
        best.intercept.reshape(tail),
        best.objective,
        best.gap,
        solution.n_iter,
        solution.converged,
        group_norms(values.reshape(len(values), -1)) > 0,
        best.dual.reshape(-1, *tail),
    )
