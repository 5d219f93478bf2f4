"""The penalised sibling of the norm ball: group lasso plus ridge, with the same machinery.

    min over v, b of  Σ_i w_i ℓ(y_i, Φ_i v + b) + λ_1 Σ_m |v_m| + (λ_2/2) Σ_m |v_m|²,   Σ w = 1

Every solution over a norm ball solves it for some λ_1, λ_2: the multipliers of the two constraints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from keyhole._array import MEMORY_BUDGET
from keyhole._checks import check_count, check_number
from keyhole.ball.norm_ball import check_problem
from keyhole.ball.projection import group_norms
from keyhole.ball.solver import minimise, warn_if_short


@dataclass(frozen=True)
class GroupPenalty:
    """λ_1 Σ_m |v_m| + (λ_2/2) Σ_m |v_m|²."""

    group_penalty: float
    ridge_penalty: float

    def prox(self, values: Float[np.ndarray, "m e"], step: float) -> Float[np.ndarray, "m e"]:
        """Shorten every group by step · λ_1, then shrink by 1/(1 + step · λ_2)."""
        norms = group_norms(values)
        kept = np.maximum(norms - step * self.group_penalty, 0.0) / (1.0 + step * self.ridge_penalty)
        return values * np.divide(kept, norms, out=np.zeros_like(norms), where=norms > 0)[:, None]

    def value(self, norms: Float[np.ndarray, " m"]) -> float:
        """The penalty itself."""
        return float(self.group_penalty * norms.sum() + 0.5 * self.ridge_penalty * np.square(norms).sum())

    def conjugate(self, norms: Float[np.ndarray, " m"]) -> float:
        """Σ_m (|g_m| − λ_1)₊² / (2 λ_2); without ridge, zero if every |g_m| ≤ λ_1 and inf otherwise."""
        excess = np.maximum(norms - self.group_penalty, 0.0)
        if self.ridge_penalty > 0.0:
            return float(np.square(excess).sum() / (2.0 * self.ridge_penalty))
        return 0.0 if excess.max(initial=0.0) <= 1e-15 * self.group_penalty else math.inf

    def threshold(self, norms: Float[np.ndarray, " m"]) -> float:
        """λ_1: groups of g shorter than it are zero in the maximiser."""
        return self.group_penalty

    def dual_scales(self, norms: Float[np.ndarray, " m"]) -> tuple[float, ...]:
        """One, and the factor that brings every |g_m| down to λ_1."""
        top = float(norms.max(initial=0.0))
        inside = 1.0 if top <= self.group_penalty else self.group_penalty / top
        return (1.0, inside) if self.ridge_penalty > 0.0 else (inside,)


@dataclass(frozen=True)
class GroupLassoFit:
    """A solution of the penalised problem and the certificate of its quality.

    Attributes
    ----------
    values : array (M, D), or (M, D, t) for targets of shape (n, t)
        v. Pruned groups are exactly zero.
    intercept : array () or (t,)
    objective : float
        Weighted mean loss plus penalty.
    duality_gap : float
        At least objective − minimum, and at least 0.
    n_iter : int
    converged : bool
    active : array (M,) of bool
        Groups with v_m ≠ 0.
    dual : array (n,) or (n, t)
        The dual point that proves the gap.
    """

    values: Float[np.ndarray, "m d *t"]
    intercept: Float[np.ndarray, "*t"]
    objective: float
    duality_gap: float
    n_iter: int
    converged: bool
    active: Bool[np.ndarray, " m"]
    dual: Float[np.ndarray, " n *t"]


def fit_group_lasso(
    design: Any,
    targets: Any,
    *,
    group_size: int,
    group_penalty: float,
    ridge_penalty: float = 0.0,
    loss: str = "squared",
    fit_intercept: bool = True,
    sample_weight: Any = None,
    start: Any = None,
    tol: float = 1e-4,
    max_iter: int = 20_000,
    dtype: Any = None,
    memory_budget: int = MEMORY_BUDGET,
) -> GroupLassoFit:
    """Minimise mean loss + λ_1 Σ_m |v_m| + (λ_2/2) Σ_m |v_m|², to a duality gap computed on the way.

    Parameters
    ----------
    group_penalty, ridge_penalty : float
        λ_1 and λ_2, at least 0 and not both 0. The loss is a mean over samples, so they do not grow with n.
    design, targets, group_size, loss, fit_intercept, sample_weight, start, tol, max_iter, dtype,
    memory_budget
        As for `fit_norm_ball`; the squared loss is r²/2.

    Returns
    -------
    GroupLassoFit

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> design = rng.standard_normal((100, 20 * 3))
    >>> targets = design[:, :3] @ [1.0, -2.0, 2.0] + 5.0
    >>> fit = fit_group_lasso(design, targets, group_size=3, group_penalty=0.5, tol=1e-6)
    >>> fit.values[0].round(2), int(fit.active.sum())
    (array([ 0.88, -1.71,  1.63]), 1)
    """
    setup = check_problem(design, targets, group_size, loss, fit_intercept, sample_weight, dtype, memory_budget)
    penalty = GroupPenalty(
        check_number(group_penalty, "group_penalty", minimum=0.0),
        check_number(ridge_penalty, "ridge_penalty", minimum=0.0),
    )
    if penalty == GroupPenalty(0.0, 0.0):
        raise ValueError(
            "`group_penalty` and `ridge_penalty` must not both be 0: without a penalty nothing bounds the "
            "gap. Give one of them a positive number."
        )
    tol = check_number(tol, "tol", minimum=0.0, exclusive=True)
    max_iter = check_count(max_iter, "max_iter")
    solution = minimise(
        setup.problem(penalty),
        setup.design,
        setup.check_start(start),
        tol=tol,
        max_iter=max_iter,
        dtype=setup.dtype,
        memory_budget=memory_budget,
    )
    warn_if_short(solution, tol, max_iter, setup.dtype, stacklevel=3)
    return GroupLassoFit(**setup.fields(solution))
