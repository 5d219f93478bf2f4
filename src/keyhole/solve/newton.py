"""Other losses by a few Newton steps, in the coordinates of a `spectral.Spectrum`.

With T the coordinates of the samples, f = Tθ + b, every output solves

    min over θ, b of  Σ_i w_i loss(y_i, f_i) + alpha/2 |θ|².

With slopes g and curvatures D of the loss, weights included, a step is

    (Zᵀ D Z + alpha) step = Zᵀ g + alpha θ,        Z = [T, 1], b without penalty,

and, with h_i = Z_i (Zᵀ D Z + alpha)⁻¹ Z_iᵀ at the solution, one step towards the fit without sample
i gives the approximate leave-one-out predictions

    f_{−i}(x_i) ≈ f_i + h_i g_i / (1 − h_i D_i),

for groups f_{−g} ≈ f_g + (I − H_gg D_g)⁻¹ H_gg g_g. They choose the penalty. The plain version is
`keyhole.textbook.logistic`; docs/explanation/logistic.md has the measured error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import scipy.linalg
from jaxtyping import Float
from scipy.special import expit

from keyhole.solve.matrices import on_host
from keyhole.solve.problem import RidgeFit, RidgeProblem, choose_penalty
from keyhole.solve.spectral import Spectrum, group_stacks

LEAST_CURVATURE = 1e-12
"""Floor of the curvature of a sample's loss, so that a sample far on its side keeps a step."""

LEAST_ALPHA = 1e-7
"""The least penalty of an automatic path, as a share of the largest."""

MIN_DECADES = 5
"""Decades of penalties that an automatic path goes down at least: directions of much variance may
say nothing of the classes, and their noise raises the loss before others lower it."""

PATIENCE = 2
"""Further decades without a gain after which the path ends."""

PATH_TOLERANCE = 0.03
"""Change of the outputs, beside 1 and their size, at which a penalty is judged. Newton's method
squares its error: the next step would change them by about a thousandth."""

FINAL_TOLERANCE = 1e-9
"""The same for the penalty that was chosen."""

NEGLIGIBLE = 1e-3
"""Share of its fit that a direction may lose in the path: those below are left out, which makes
large penalties cheap. The final fit has all directions."""

MAX_STEPS = 50
MAX_HALVINGS = 30


@dataclass(frozen=True)
class SmoothLoss:
    """A convex loss of one output, with its derivatives in f.

    Attributes
    ----------
    name : str
    value, slope, curvature : functions of (y, f)
    constant : function of (y, weights)
        The best constant f.
    """

    name: str
    value: Callable[[np.ndarray, np.ndarray], np.ndarray]
    slope: Callable[[np.ndarray, np.ndarray], np.ndarray]
    curvature: Callable[[np.ndarray, np.ndarray], np.ndarray]
    constant: Callable[[np.ndarray, np.ndarray], float]


def _logit_of_share(y: np.ndarray, weights: np.ndarray) -> float:
    """The logit of the weighted share of positive targets, 0 if there is one class only."""
    share = float(weights @ (y > 0) / weights.sum())
    if not 0 < share < 1:
        return 0.0
    return math.log(share / (1 - share))


LOG_LOSS = SmoothLoss(
    name="log_loss",
    value=lambda y, f: np.logaddexp(0.0, -y * f),
    slope=lambda y, f: -y * expit(-y * f),
    curvature=lambda y, f: expit(f) * expit(-f),
    constant=_logit_of_share,
)
"""log(1 + exp(−y f)) of targets ±1."""


@dataclass(frozen=True)
class NewtonPoint:
    """A fit of one output at one penalty.

    Attributes
    ----------
    theta : array (r,)
    intercept : float
    outputs : array (n,)
        f of the samples.
    held_out : array (n,)
        Approximate predictions without each sample, or group.
    """

    theta: Float[np.ndarray, " r"] = field(repr=False)
    intercept: float
    outputs: Float[np.ndarray, " n"] = field(repr=False)
    held_out: Float[np.ndarray, " n"] = field(repr=False)


def fit_newton(spectrum: Spectrum, loss: SmoothLoss = LOG_LOSS) -> RidgeFit:
    """Judge a path of penalties by the samples left out, choose one, and solve.

    One penalty alone is used whatever its loss. A grid that was given is tried as it is. An
    automatic one goes down decade by decade until `PATIENCE` of them brought no gain; then, unless
    the fit is a draft, half a decade to either side of the best.

    >>> from keyhole.solve.problem import RidgeProblem
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((200, 2))
    >>> y = np.where(x[:, :1] + rng.logistic(size=(200, 1)) > 0, 1.0, -1.0)
    >>> problem = RidgeProblem.of(y, criterion="log_loss")
    >>> fit = fit_newton(Spectrum.of_features(lambda: [x], problem))
    >>> fit.selection, np.round(fit.coef.ravel(), 1)
    ('loo', array([ 1., -0.]))
    """
    path = NewtonPath(spectrum, loss)
    problem = spectrum.problem
    if problem.alphas is not None:
        _check_positive(problem)
        for alpha in np.sort(problem.alphas)[::-1]:
            path.add(float(alpha))
    else:
        for alpha in path.decades():
            if path.is_over:
                break
            path.add(alpha)
        if not problem.draft:
            middle = path.best_alpha
            path.add(middle * math.sqrt(10.0))
            if middle / math.sqrt(10.0) >= min(path.alphas):
                path.add(middle / math.sqrt(10.0))
    return path.result()


class NewtonPath:
    """The penalties that were tried, in any order, with the fit and the losses of each."""

    def __init__(self, spectrum: Spectrum, loss: SmoothLoss) -> None:
        self.problem = spectrum.problem
        self.spectrum = spectrum
        self.loss = loss
        self.values = on_host(spectrum.values)
        roots = np.sqrt(self.problem.weights)[:, None]
        self.coordinates = on_host(spectrum.scaled) / roots
        self.alphas: list[float] = []
        self.scores: list[float] = []
        self.errors: list[float] = []
        self.points: list[list[NewtonPoint]] = []

    def decades(self) -> list[float]:
        """The penalties that an automatic path may go down, a decade apart.

        It starts at the trace of the Hessian at the fit of constants: no eigenvalue is larger, so
        that every direction is fitted by half at most.
        """
        curvatures = []
        for output in range(self.problem.y.shape[1]):
            y = self.problem.y[:, output]
            constant = self._constant(output)
            curvature = self.loss.curvature(y, np.full(len(y), constant))
            curvatures.append(float(curvature @ self.problem.weights / self.problem.total_weight))
        highest = float(self.values.sum()) * max(curvatures)
        # every penalty gives the same fit to features that do not vary
        if not highest > 0:
            highest = 1.0
        n_decades = math.floor(-math.log10(LEAST_ALPHA) + 1e-6)
        return [highest / 10**decade for decade in range(n_decades + 1)]

    def _constant(self, output: int) -> float:
        """The best constant of one output, 0 without an intercept."""
        if not self.problem.fit_intercept:
            return 0.0
        return self.loss.constant(self.problem.y[:, output], self.problem.weights)

    def add(self, alpha: float) -> None:
        """Fit every output at a penalty, from the fit at the next larger one, and judge it."""
        points = self._solve(alpha, self._start(alpha), PATH_TOLERANCE, NEGLIGIBLE)
        self.alphas.append(alpha)
        self.points.append(points)
        score, error = self._judge(points)
        self.scores.append(score)
        self.errors.append(error)

    def _start(self, alpha: float) -> list[NewtonPoint]:
        """The fit at the nearest larger penalty, or that of constants."""
        larger = [position for position, other in enumerate(self.alphas) if other >= alpha]
        if larger:
            return self.points[min(larger, key=lambda position: self.alphas[position])]
        starts = []
        n = len(self.problem)
        for output in range(self.problem.y.shape[1]):
            constant = self._constant(output)
            starts.append(
                NewtonPoint(
                    theta=np.zeros(len(self.values)),
                    intercept=constant,
                    outputs=np.full(n, constant),
                    held_out=np.full(n, np.nan),
                )
            )
        return starts

    def _solve(
        self, alpha: float, starts: list[NewtonPoint], tolerance: float, negligible: float
    ) -> list[NewtonPoint]:
        """The fit of every output at one penalty, in the directions that count at it."""
        # curvatures are at most 1/4 for the log-loss: a direction of L/4 ≪ alpha stays at 0
        n_directions = int(np.sum(self.values > negligible * 4 * alpha))
        points = []
        for output, start in enumerate(starts):
            points.append(
                newton(
                    self.coordinates[:, :n_directions],
                    self.problem.y[:, output],
                    self.problem,
                    self.loss,
                    alpha,
                    start,
                    tolerance,
                )
            )
        return points

    def _judge(self, points: list[NewtonPoint]) -> tuple[float, float]:
        """The criterion of the outputs of samples left out, and their squared error.

        Of classes the error is that of 2p − 1, p being the probability of an output: four times the
        Brier score, which compares with ridge on the same targets ±1.
        """
        problem = self.problem
        held_out = np.stack([point.held_out for point in points], axis=1)
        scores = problem.scores((problem.y - held_out)[None])
        squares = np.square(problem.y - np.tanh(held_out / 2)).mean(axis=1)
        return float(scores.criterion[0]), float(problem.weights @ squares / problem.total_weight)

    @property
    def best(self) -> int:
        """Position of the penalty of least loss; among equals, of the largest penalty."""
        return choose_penalty(np.array(self.alphas), np.array(self.scores))

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
        """The fit at the best penalty, solved to the end in all directions.

        Penalties stand from the smallest upwards, or in the order in which they were given.
        """
        problem = self.problem
        best = self.best
        points = self._solve(self.alphas[best], self.points[best], FINAL_TOLERANCE, 0.0)
        self.scores[best], self.errors[best] = self._judge(points)
        order = np.argsort(self.alphas)
        if problem.alphas is not None:
            order = order[np.argsort(np.argsort(problem.alphas))]

        theta = np.stack([point.theta for point in points], axis=1)
        coef = on_host(self.spectrum.basis) @ theta
        constants = np.array([point.intercept for point in points])
        held_out = np.stack([point.held_out for point in points], axis=1)
        return RidgeFit(
            alphas=np.array(self.alphas)[order],
            errors=np.array(self.errors)[order],
            scores=np.array(self.scores)[order],
            best=int(np.flatnonzero(order == best)[0]),
            coef=coef,
            intercept=constants - on_host(self.spectrum.centre) @ coef,
            left_out=problem.y - held_out,
            selection="loo" if problem.groups is None else "groups",
            is_log_loss=problem.criterion == "log_loss",
        )


def newton(
    coordinates: Float[np.ndarray, "n r"],
    y: Float[np.ndarray, " n"],
    problem: RidgeProblem,
    loss: SmoothLoss,
    alpha: float,
    start: NewtonPoint,
    tolerance: float,
) -> NewtonPoint:
    """Newton steps until one changes no output by more than ``tolerance``, beside 1 and their size.

    A step that does not lower the objective is halved until it does.
    """
    # the intercept is one more coordinate, without a penalty
    n_directions = coordinates.shape[1]
    Z = coordinates
    ridge = np.full(n_directions, alpha)
    theta = start.theta[:n_directions]
    if problem.fit_intercept:
        Z = np.concatenate([coordinates, np.ones((len(y), 1))], axis=1)
        ridge = np.append(ridge, 0.0)
        theta = np.append(theta, start.intercept)
    outputs = Z @ theta

    def objective(theta: np.ndarray, outputs: np.ndarray) -> float:
        losses = loss.value(y, outputs)
        return float(problem.weights @ losses) + 0.5 * float(ridge @ np.square(theta))

    value = objective(theta, outputs)
    for _ in range(MAX_STEPS):
        slope = problem.weights * loss.slope(y, outputs)
        factor = _hessian_factor(Z, ridge, problem.weights * loss.curvature(y, outputs))
        step = scipy.linalg.cho_solve(factor, Z.T @ slope + ridge * theta, check_finite=False)
        change_of_outputs = Z @ step

        # the whole step, or half of it, or half of that
        share = 1.0
        for _ in range(MAX_HALVINGS):
            next_theta = theta - share * step
            next_outputs = outputs - share * change_of_outputs
            next_value = objective(next_theta, next_outputs)
            if next_value <= value + 1e-12 * abs(value):
                break
            share /= 2
        theta = next_theta
        outputs = next_outputs
        value = next_value
        size = 1.0 + float(np.abs(outputs).max())
        if share * float(np.abs(change_of_outputs).max()) <= tolerance * size:
            break

    held_out = _held_out(Z, ridge, y, problem, loss, outputs)
    intercept = 0.0
    if problem.fit_intercept:
        intercept = float(theta[-1])
        theta = theta[:-1]
    all_theta = np.zeros(len(start.theta))
    all_theta[:n_directions] = theta
    return NewtonPoint(theta=all_theta, intercept=intercept, outputs=outputs, held_out=held_out)


def _hessian_factor(
    Z: Float[np.ndarray, "n r"], ridge: Float[np.ndarray, " r"], curvature: Float[np.ndarray, " n"]
) -> tuple[np.ndarray, bool]:
    """The Cholesky factor of Zᵀ D Z + alpha."""
    scaled = Z * np.sqrt(np.maximum(curvature, LEAST_CURVATURE))[:, None]
    hessian = scaled.T @ scaled
    hessian[np.diag_indices(len(hessian))] += ridge
    return scipy.linalg.cho_factor(hessian, lower=True, overwrite_a=True, check_finite=False)


def _held_out(
    Z: Float[np.ndarray, "n r"],
    ridge: Float[np.ndarray, " r"],
    y: Float[np.ndarray, " n"],
    problem: RidgeProblem,
    loss: SmoothLoss,
    outputs: Float[np.ndarray, " n"],
) -> Float[np.ndarray, " n"]:
    """Predictions without each sample, or group: one Newton step from the fit."""
    slope = problem.weights * loss.slope(y, outputs)
    curvature = problem.weights * loss.curvature(y, outputs)
    factor, _ = _hessian_factor(Z, ridge, curvature)
    half = scipy.linalg.solve_triangular(factor, Z.T, lower=True, check_finite=False)

    # one by one
    if problem.groups is None:
        h = np.einsum("rn,rn->n", half, half)
        complement = 1.0 - h * curvature
        is_judged = complement > 1e-12
        shift = np.full(len(y), np.inf)
        np.divide(h * slope, complement, out=shift, where=is_judged)
        return outputs + shift

    # group by group
    held_out = outputs.copy()
    for rows in group_stacks(problem.groups, max(1, 2**23 // max(1, Z.shape[1]))):
        part = half.T[rows]  # (groups, size, r)
        h = part @ part.swapaxes(1, 2)
        complement = np.eye(rows.shape[1]) - h * curvature[rows][:, None, :]
        moved = h @ slope[rows][:, :, None]
        held_out[rows] += np.linalg.solve(complement, moved)[:, :, 0]
    return held_out


def working_problem(
    outputs: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], loss: SmoothLoss = LOG_LOSS
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Curvatures and working responses at some outputs: the ridge problem of a Newton step.

    At the solution the fit is the ridge fit to its own working responses, so that what follows for
    that ridge fit exactly holds for this one up to one Newton step.
    """
    curvature = np.maximum(loss.curvature(y, outputs), 1e-8)
    return curvature, outputs - loss.slope(y, outputs) / curvature


def _check_positive(problem: RidgeProblem) -> None:
    """Raise if a penalty is 0."""
    assert problem.alphas is not None
    if problem.alphas.min() == 0:
        raise ValueError(
            "loss='log_loss' needs a positive penalty: got alpha = 0. Classes that can be told "
            "apart without error have no likeliest outputs. Use alpha='loo', or a positive number."
        )
