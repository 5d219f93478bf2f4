"""The solver over the norm ball: against a generic conic solver, at its edges, and in its words."""

import math
import warnings

import cvxpy as cp
import numpy as np
import pytest

from keyhole.solvers.design import DenseDesign, StreamedDesign
from keyhole.solvers.group_lasso import fit_group_lasso
from keyhole.solvers.norm_ball import SolverWarning, fit_norm_ball, norm_ball_path

LOSSES = ("absolute", "huber", "squared", "logistic", "hinge", "multinomial")
N_PROBLEMS = 20


def random_problem(rng, loss, n=None, n_groups=None, size=5):
    """A design, targets that a few groups explain up to noise, and radii from tight to loose."""
    n = n or int(rng.integers(15, 61))
    n_groups = n_groups or int(rng.integers(2, 41))
    design = rng.standard_normal((n, n_groups * size)) * rng.uniform(0.3, 3.0)
    truth = np.zeros((n_groups, size))
    truth[:3] = rng.standard_normal(truth[:3].shape)
    signal = design @ truth.ravel()
    signal = signal + signal.std() * rng.standard_normal(n) + rng.uniform(-2, 2)
    targets = {
        "logistic": lambda: np.where(signal > np.median(signal), 1.0, -1.0),
        "hinge": lambda: np.where(signal > np.median(signal), 1.0, -1.0),
        "multinomial": lambda: np.eye(3)[np.digitize(signal, np.quantile(signal, [0.3, 0.6]))],
    }.get(loss, lambda: signal)()
    norms = np.linalg.norm(truth, axis=1)
    if loss in ("logistic", "hinge", "multinomial"):  # labels have no scale: margins of about one
        norms = norms / signal.std()
    radii = norms.sum() * rng.uniform(0.1, 0.8), np.linalg.norm(norms) * rng.uniform(0.1, 0.8)
    return design, targets, radii


def cvxpy_loss(loss, y, z):
    return {
        "absolute": lambda: cp.sum(cp.abs(z - y), axis=1),
        "huber": lambda: cp.sum(0.5 * cp.huber(z - y, 1), axis=1),
        "squared": lambda: cp.sum(0.5 * cp.square(z - y), axis=1),
        "logistic": lambda: cp.sum(cp.logistic(-cp.multiply(y, z)), axis=1),
        "hinge": lambda: cp.sum(cp.pos(1 - cp.multiply(y, z)), axis=1),
        "multinomial": lambda: cp.log_sum_exp(z, axis=1) - cp.sum(cp.multiply(y, z), axis=1),
    }[loss]()


def solve_by_cvxpy(design, targets, loss, size, constraints=None, penalty=None, weights=None, intercept=True):
    """Minimum of the weighted mean loss plus penalty by an interior-point method, and how far to trust it."""
    y = targets.reshape(len(targets), -1)
    weights = np.full(len(y), 1 / len(y)) if weights is None else weights / weights.sum()
    values = cp.Variable((design.shape[1], y.shape[1]))
    bias = cp.Variable((1, y.shape[1])) if intercept else np.zeros((1, y.shape[1]))
    norms = cp.hstack([cp.norm(values[i : i + size], "fro") for i in range(0, design.shape[1], size)])
    objective = weights @ cvxpy_loss(loss, y, design @ values + np.ones((len(y), 1)) @ bias)
    if penalty is not None:
        objective += penalty(norms, values)
    problem = cp.Problem(cp.Minimize(objective), constraints(norms, values) if constraints else [])
    for accuracy in (1e-10, 1e-9, 1e-8):  # as tight as it can be brought to agree to
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Solution may be inaccurate")
            problem.solve(
                solver=cp.CLARABEL, tol_gap_abs=accuracy, tol_gap_rel=accuracy, tol_feas=accuracy
            )
        if problem.status == "optimal":
            return float(problem.value), 10 * accuracy * max(1.0, float(problem.value))
    raise AssertionError(f"the reference solver failed: {problem.status}")


def mean_loss(loss, design, targets, values, intercept, weights=None):
    """The objective, written out here once more."""
    y = targets.reshape(len(targets), -1)
    z = design @ values.reshape(design.shape[1], -1) + intercept
    r = np.abs(z - y)
    per_sample = {
        "absolute": lambda: r.sum(1),
        "huber": lambda: np.where(r <= 1, r**2 / 2, r - 0.5).sum(1),
        "squared": lambda: (r**2 / 2).sum(1),
        "logistic": lambda: np.log1p(np.exp(-y * z)).sum(1),
        "hinge": lambda: np.maximum(0, 1 - y * z).sum(1),
        "multinomial": lambda: np.log(np.exp(z).sum(1)) - (y * z).sum(1),
    }[loss]()
    return float(np.average(per_sample, weights=weights))


def ball(radii):
    def constraints(norms, values):
        return [cp.sum(norms) <= radii[0], cp.norm(values, "fro") <= radii[1]]

    return constraints


@pytest.mark.parametrize("loss", LOSSES)
def test_agrees_with_a_conic_solver(loss, rng):
    for _ in range(N_PROBLEMS):
        design, targets, radii = random_problem(rng, loss)
        fit = fit_norm_ball(
            design, targets, group_size=5, group_radius=radii[0], ball_radius=radii[1], loss=loss, tol=8e-7
        )
        reference, slack = solve_by_cvxpy(design, targets, loss, 5, ball(radii))
        norms = np.linalg.norm(fit.values.reshape(len(fit.values), -1), axis=1)
        true_gap = fit.objective - reference
        assert fit.converged
        assert fit.objective == pytest.approx(
            mean_loss(loss, design, targets, fit.values, fit.intercept), rel=1e-12
        )
        assert abs(true_gap) <= 1e-6 * reference + slack
        assert norms.sum() <= radii[0] * (1 + 1e-9)
        assert np.linalg.norm(norms) <= radii[1] * (1 + 1e-9)
        assert fit.duality_gap >= true_gap - slack
        assert true_gap >= -slack
        assert np.array_equal(fit.active, norms > 0)
