"""Logistic regression by a few Newton steps, each of which is a weighted ridge fit.

For a design Φ (n, p), targets y = ±1, sample weights s and a penalty alpha, every output solves

    min over v, b of  Σ_i s_i log(1 + exp(−y_i f_i)) + alpha/2 |v|²,     f_i = φ_iᵀv + b

with b free, or zero when ``fit_intercept`` is False. Several outputs are one-vs-rest targets of
classes: each is a problem of its own, and all have the same penalty.

With p_i = 1/(1 + exp(−f_i)) and t_i = (1 + y_i)/2, a Newton step from f is the ridge fit

    min over v, b of  Σ_i w_i (z_i − φ_iᵀv − b)² + alpha |v|²
    w_i = s_i p_i (1 − p_i)          z_i = f_i + (t_i − p_i) / (p_i (1 − p_i))

(iteratively reweighted least squares). At the solution the step leads nowhere, so the solution is
the ridge fit to its own working responses z. The exact leave-one-out predictions of that ridge fit,

    f_{−i}(x_i) ≈ f_i − h_i (z_i − f_i) / (1 − h_i)

with its leverages h, are the approximate leave-one-out predictions of the logistic fit: one Newton
step from the fit towards the fit without sample i. They choose the penalty. The plain version is
`keyhole.textbook.logistic`; docs/explanation/logistic.md has the measured error.

A `WeightedRidge` solves one such step: gram.py from a Gram matrix, design.py from rows of features.
`LogisticProblem.fit` makes the steps, along a path of penalties, and returns a `RidgeFit`: that of
the last step, whose outputs are z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from scipy.special import expit

from keyhole._checks import check_finite
from keyhole.ridge.calibration import calibrate, class_scores, labels_of
from keyhole.ridge.problem import (
    Alphas,
    RidgeFit,
    check_alphas,
    check_weights,
    choose_penalty,
)

LEAST_CURVATURE = 1e-8
"""Floor of p(1 − p), which logits beyond ±18 fall below. Newton's fixed point does not depend on
the curvature, and working responses stay below 1e8, so that leverages keep half of their digits."""

LEAST_ALPHA = 1e-7
"""The least penalty of an automatic grid, as a share of the largest. Dual coefficients are at most
s/alpha, and predictions add them up: they keep half of their digits."""

MIN_DECADES = 5
"""Decades of penalties that an automatic path goes down at least: directions of much variance may
say nothing of the classes, and their noise raises the loss before others lower it."""

PATIENCE = 2
"""Further decades without a gain after which the path ends."""

PATH_TOLERANCE = 0.03
"""Change of the logits, beside 1 and their size, at which a penalty is judged. Newton's method
squares its error: the next step would change them by about a thousandth."""

FINAL_TOLERANCE = 1e-7
"""Change of the logits at which the fit is final. Where logits are so large that `LEAST_CURVATURE`
counts, convergence is only linear: what remains is about as large as the last step."""

SAFE_CHANGE = 0.1
"""Change of the logits up to which a step is taken whole. Along it p(1 − p) changes by a tenth
at most, so that it lowers the objective; where logits are far from zero it does so by less
than rounding, and comparing objectives would stop the steps too early."""

MAX_STEPS = 50
MAX_HALVINGS = 30
"""Newton steps at one penalty, and halvings of one step. Four steps are usual, halvings rare."""


class SingularStepError(ValueError):
    """Rounding has made the matrix of a Newton step singular: the penalty is too small for it."""


@dataclass(frozen=True)
class Point:
    """Where Newton's method stands, for one output.

    Attributes
    ----------
    coef : array (n,) or (p,)
        Dual coefficients a with v = Φᵀa from a Gram matrix; the values v from a design.
    intercept : float
    outputs : array (n,)
        f, the logits of the samples.
    """

    coef: Float[np.ndarray, " rows"] = field(repr=False)
    intercept: float
    outputs: Float[np.ndarray, " n"] = field(repr=False)

    def towards(self, other: Point, share: float) -> Point:
        """The point at some share of the way to another."""
        return Point(
            coef=self.coef + share * (other.coef - self.coef),
            intercept=self.intercept + share * (other.intercept - self.intercept),
            outputs=self.outputs + share * (other.outputs - self.outputs),
        )


@runtime_checkable
class WeightedRidge(Protocol):
    """Ridge fits to other responses, under other weights, again and again."""

    @property
    def largest(self) -> float:
        """The largest penalty of an automatic grid: Σ s |φ − φ̄|², the trace of the Gram matrix."""

    @property
    def floor(self) -> float:
        """Eigenvalues below this carry no information."""

    @property
    def route(self) -> str:
        """As in `RidgeFit.route`."""

    def constant(self, logit: float) -> Point:
        """The point of coefficients 0 and this intercept."""

    def squared_norm(self, point: Point) -> float:
        """|v|²."""

    def solve(
        self, alpha: float, weights: Float[np.ndarray, " n"], responses: Float[np.ndarray, " n"]
    ) -> Point:
        """The minimiser of Σ_i w_i (z_i − φ_iᵀv − b)² + alpha |v|²; its factor is kept."""

    def left_out(self, residuals: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        """f_i − f_{−i}(x_i) of the last `solve`, from its residuals z − f. Its factor is used up.

        With groups f_{−i} is the fit without the group of sample i.
        """


@dataclass(frozen=True)
class NewtonResult:
    """A fit of one output at one penalty, with its leave-one-out logits."""

    point: Point
    left_out: Float[np.ndarray, " n"]
    n_steps: int


@dataclass(frozen=True)
class LogisticProblem:
    """Targets, weights, intercept and penalties of a logistic fit, checked (`LogisticProblem.of`).

    Attributes
    ----------
    y : array (n, t)
        Targets ±1: one-vs-rest, or a single output for two classes.
    weights : array (n,)
        Positive, or 0 for members of a group that the rest of it is to predict.
    alphas : array (a,) or None
        The penalties; None for a grid that follows the size of the features.
    fit_intercept : bool
    groups : integer array (n,) or None
        Samples of one number are left out together.
    draft : bool
        Whether the fit only serves to be compared with others: its automatic grid is coarse.
    """

    y: Float[np.ndarray, "n t"] = field(repr=False)
    weights: Float[np.ndarray, " n"] = field(repr=False)
    alphas: Float[np.ndarray, " a"] | None
    fit_intercept: bool
    groups: Int[np.ndarray, " n"] | None = field(repr=False)
    draft: bool = False

    @classmethod
    def of(
        cls,
        y: Float[np.ndarray, "n t"],
        alphas: Alphas | None = None,
        *,
        fit_intercept: bool = True,
        weights: Float[np.ndarray, " n"] | None = None,
        groups: Int[np.ndarray, " n"] | None = None,
        draft: bool = False,
    ) -> LogisticProblem:
        """Check everything. Of targets only the sign counts: a unit of y means nothing here."""
        if y.size == 0:
            raise ValueError(
                f"`y` must hold at least one sample and one output: got shape {y.shape}."
            )
        check_finite(y, "y")
        checked_alphas = None
        if alphas is not None:
            checked_alphas = check_alphas(alphas)
            if checked_alphas.min() == 0:
                raise ValueError(
                    "loss='log_loss' needs a positive penalty: got alpha = 0. Classes that can be "
                    "told apart without error have no likeliest logits. Use alpha='loo', or a "
                    "positive number."
                )
        return cls(
            y=np.where(y > 0, 1.0, -1.0),
            weights=check_weights(weights, len(y), zero_allowed=groups is not None),
            alphas=checked_alphas,
            fit_intercept=fit_intercept,
            groups=groups,
            draft=draft,
        )

    def fit(self, system: WeightedRidge) -> RidgeFit:
        """Judge a path of penalties by the samples that are left out, choose one, and solve.

        One penalty alone is used whatever its loss. A grid that was given is tried as it is. An
        automatic one goes down decade by decade, until `PATIENCE` of them brought no gain; then,
        unless the fit is a draft, half a decade to either side of the best.
        """
        path = PenaltyPath(self, system)
        if self.alphas is not None:
            for alpha in np.sort(self.alphas)[::-1]:
                path.add(float(alpha))
        else:
            for alpha in self.decades(system):
                if path.is_over:
                    break
                try:
                    path.add(alpha)
                except SingularStepError:
                    # rounding ends the path, unless nothing can be fitted at all
                    if not path.alphas:
                        raise
                    break
            if not self.draft:
                middle = path.best_alpha
                path.add(middle * math.sqrt(10.0))
                if middle / math.sqrt(10.0) >= min(path.alphas):
                    path.add(middle / math.sqrt(10.0))
        return path.result()

    def decades(self, system: WeightedRidge) -> list[float]:
        """The penalties that an automatic path may go down, a decade apart.

        Their number is counted with a leeway, because the order of the samples moves the largest
        penalty by rounding: it must not decide whether the last decade is reached.
        """
        highest = self.largest_penalty(system)
        lowest = max(LEAST_ALPHA * highest, 2 * system.floor)
        n_decades = max(0, math.floor(math.log10(highest / lowest) + 1e-6))
        return [highest / 10**decade for decade in range(n_decades + 1)]

    def largest_penalty(self, system: WeightedRidge) -> float:
        """Where an automatic path starts: the trace of the Hessian at the fit of constants.

        No eigenvalue is larger, so that every direction is fitted by half at most.
        """
        rates = self.base_rates()
        curvature = float((rates * (1 - rates)).max())
        # every penalty gives the same fit to features that do not vary
        if not system.largest * curvature > 0:
            return 1.0
        return system.largest * curvature

    def base_rates(self) -> Float[np.ndarray, " t"]:
        """The weighted share of +1 among the targets of each output."""
        return np.asarray(self.weights @ (self.y > 0) / self.weights.sum())

    def first_points(self, system: WeightedRidge) -> list[Point]:
        """The fits of constants: their logits are those of the base rates, 0 without intercept."""
        points = []
        for rate in self.base_rates():
            logit = 0.0
            if self.fit_intercept and 0 < rate < 1:
                logit = math.log(rate / (1 - rate))
            points.append(system.constant(logit))
        return points

    def log_loss(self, scores: Float[np.ndarray, "n t"]) -> float:
        """The mean log-loss of leave-one-out logits, at the temperature that suits them best."""
        rows = np.flatnonzero(self.weights > 0)
        if not np.isfinite(scores[rows]).all():
            return math.inf
        weights = self.weights[rows]
        stack = class_scores(scores[rows])[None]
        _, losses = calibrate(stack, labels_of(self.y[rows]), weights, 1e-6)
        return float(losses[0] @ weights / weights.sum())

    def squared_error(self, scores: Float[np.ndarray, "n t"]) -> float:
        """The mean of (y − (2p − 1))², p being the probability of an output's leave-one-out logit.

        It is four times the Brier score, and compares with ridge on the same targets ±1.
        """
        squares = np.square(self.y - np.tanh(scores / 2)).mean(axis=1)
        return float(self.weights @ squares / self.weights.sum())


class PenaltyPath:
    """The penalties that were tried, in any order, with the fit and the losses of each."""

    def __init__(self, problem: LogisticProblem, system: WeightedRidge) -> None:
        self.problem = problem
        self.system = system
        self.alphas: list[float] = []
        self.log_losses: list[float] = []
        self.errors: list[float] = []
        self.points: list[list[Point]] = []

    def add(self, alpha: float) -> None:
        """Fit every output at a penalty, from the fit at the next larger one, and judge it."""
        larger = [position for position, other in enumerate(self.alphas) if other >= alpha]
        if larger:
            nearest = min(larger, key=lambda position: self.alphas[position])
            starts = self.points[nearest]
        else:
            starts = self.problem.first_points(self.system)
        results = self._solve(alpha, starts, PATH_TOLERANCE)
        scores = np.stack([result.left_out for result in results], axis=1)
        self.alphas.append(alpha)
        self.log_losses.append(self.problem.log_loss(scores))
        self.errors.append(self.problem.squared_error(scores))
        self.points.append([result.point for result in results])

    def _solve(self, alpha: float, starts: list[Point], tolerance: float) -> list[NewtonResult]:
        """The fit of every output at one penalty."""
        results = []
        for output, start in enumerate(starts):
            y = self.problem.y[:, output]
            results.append(newton(self.system, y, self.problem.weights, alpha, start, tolerance))
        return results

    @property
    def best(self) -> int:
        """Position of the penalty of least loss; among equals, of the largest penalty."""
        return choose_penalty(np.array(self.alphas), np.array(self.log_losses))

    @property
    def best_alpha(self) -> float:
        """The penalty of least loss."""
        return self.alphas[self.best]

    @property
    def is_over(self) -> bool:
        """Whether a path that goes down has gone far enough."""
        n_tried = len(self.alphas)
        return n_tried > MIN_DECADES and n_tried - 1 - self.best >= PATIENCE

    def result(self) -> RidgeFit:
        """The fit at the best penalty, solved to the end; penalties from the smallest upwards.

        Penalties that were given stand in the order in which they were given.
        """
        best = self.best
        results = self._solve(self.alphas[best], self.points[best], FINAL_TOLERANCE)
        scores = np.stack([result.left_out for result in results], axis=1)
        self.log_losses[best] = self.problem.log_loss(scores)
        self.errors[best] = self.problem.squared_error(scores)

        # where each penalty is found among those that were tried
        order = np.argsort(self.alphas)
        if self.problem.alphas is not None:
            places = np.argsort(np.argsort(self.problem.alphas))
            order = order[places]
        return RidgeFit(
            alphas=np.array(self.alphas)[order],
            errors=np.array(self.errors)[order],
            best=int(np.flatnonzero(order == best)[0]),
            coef=np.stack([result.point.coef for result in results], axis=1),
            intercept=np.array([result.point.intercept for result in results]),
            left_out=self.problem.y - scores,
            route=self.system.route,
            selection="loo" if self.problem.groups is None else "groups",
            floor=self.system.floor,
            n_iter=max(result.n_steps for result in results),
            log_losses=np.array(self.log_losses)[order],
            moved=np.zeros(len(order)),
        )


def working_problem(
    outputs: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """p(1 − p) and the working responses z, at some logits: the ridge problem of a Newton step."""
    probability = expit(outputs)
    curvature = np.maximum(probability * (1 - probability), LEAST_CURVATURE)
    slope = np.where(y > 0, expit(-outputs), -probability)  # t − p, without cancellation
    return curvature, outputs + slope / curvature


def newton(
    system: WeightedRidge,
    y: Float[np.ndarray, " n"],
    sample_weights: Float[np.ndarray, " n"],
    alpha: float,
    start: Point,
    tolerance: float,
) -> NewtonResult:
    """Newton steps for one output until a step changes no logit by more than ``tolerance``.

    The tolerance is relative to 1 plus the largest logit. A step of more than `SAFE_CHANGE` that
    does not lower the objective is halved until it does. The objective is convex, so a small enough
    part of the step lowers it, up to rounding; after `MAX_HALVINGS` what is left is taken anyway.
    """

    def objective(point: Point) -> float:
        losses = np.logaddexp(0.0, -y * point.outputs)
        return float(sample_weights @ losses) + alpha / 2 * system.squared_norm(point)

    point = start
    value = objective(point)
    n_steps = 0
    for _ in range(MAX_STEPS):
        n_steps += 1
        # the ridge problem whose solution is the Newton step
        curvature, responses = working_problem(point.outputs, y)
        target = system.solve(alpha, sample_weights * curvature, responses)

        # the whole step, or half of it, or half of that; "not <=" also holds for NaN
        next_point = target
        share = 1.0
        next_value = objective(next_point)
        whole_change = float(np.abs(target.outputs - point.outputs).max())
        is_safe = whole_change <= SAFE_CHANGE
        while not is_safe and not next_value <= value and share > 0.5**MAX_HALVINGS:
            share /= 2
            next_point = point.towards(target, share)
            next_value = objective(next_point)

        change = float(np.abs(next_point.outputs - point.outputs).max())
        size = 1.0 + float(np.abs(point.outputs).max())
        point = next_point
        value = next_value
        if change <= tolerance * size:
            break

    # the exact leave-one-out predictions of the last ridge problem, whose solution ``target`` is
    # the point itself once steps have converged
    left_out = target.outputs - system.left_out(responses - target.outputs)
    return NewtonResult(point=point, left_out=left_out, n_steps=n_steps)
