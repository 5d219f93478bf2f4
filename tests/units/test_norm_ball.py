"""The solver over the norm ball: against other solvers, and at its edges."""

import contextlib
import math
import warnings

import cvxpy as cp
import numpy as np
import pytest
from balls import fit_norm_ball, mean_loss, projected_gradient

from keyhole.solve.ball import LOSSES, BallProblem, Descent, Iterate, NormBall

LABELS = ("logistic", "hinge", "multinomial")


def targets_from(signal, loss):
    """The signal itself, or labels cut from it."""
    if loss in ("logistic", "hinge"):
        return np.where(signal > np.median(signal), 1.0, -1.0)
    if loss == "multinomial":
        return np.eye(3)[np.digitize(signal, np.quantile(signal, [0.3, 0.6]))]
    return signal


def random_problem(rng, loss, n=None, n_groups=None, size=5):
    """A design, targets that a few groups explain up to noise, and radii from tight to loose."""
    n = n or int(rng.integers(15, 61))
    n_groups = n_groups or int(rng.integers(2, 41))
    design = rng.standard_normal((n, n_groups * size)) * rng.uniform(0.3, 3.0)
    truth = np.zeros((n_groups, size))
    truth[:3] = rng.standard_normal(truth[:3].shape)
    signal = design @ truth.ravel()
    signal = signal + signal.std() * rng.standard_normal(n) + rng.uniform(-2, 2)
    targets = targets_from(signal, loss)

    norms = np.linalg.norm(truth, axis=1)
    if loss in LABELS:  # labels have no scale: margins of about one
        norms = norms / signal.std()
    group_radius = norms.sum() * rng.uniform(0.1, 0.8)
    ball_radius = np.linalg.norm(norms) * rng.uniform(0.1, 0.8)
    return design, targets, (group_radius, ball_radius)


def cvxpy_loss(loss, y, z):
    """The loss of each sample, in the words of CVXPY."""
    if loss == "absolute":
        return cp.sum(cp.abs(z - y), axis=1)
    if loss == "huber":
        return cp.sum(0.5 * cp.huber(z - y, 1), axis=1)
    if loss == "squared":
        return cp.sum(0.5 * cp.square(z - y), axis=1)
    if loss == "logistic":
        return cp.sum(cp.logistic(-cp.multiply(y, z)), axis=1)
    if loss == "hinge":
        return cp.sum(cp.pos(1 - cp.multiply(y, z)), axis=1)
    return cp.log_sum_exp(z, axis=1) - cp.sum(cp.multiply(y, z), axis=1)


def solve_by_cvxpy(design, targets, loss, size, radii):
    """Minimum of the mean loss, and how far to trust it; None if the solver gives up."""
    y = targets.reshape(len(targets), -1)
    weights = np.full(len(y), 1 / len(y))
    values = cp.Variable((design.shape[1], y.shape[1]))
    bias = cp.Variable((1, y.shape[1]))
    groups = [values[i : i + size] for i in range(0, design.shape[1], size)]
    norms = cp.hstack([cp.norm(group, "fro") for group in groups])
    constraints = [cp.sum(norms) <= radii[0], cp.norm(values, "fro") <= radii[1]]
    objective = weights @ cvxpy_loss(loss, y, design @ values + np.ones((len(y), 1)) @ bias)
    problem = cp.Problem(cp.Minimize(objective), constraints)
    for accuracy in (1e-10, 1e-9, 1e-8):  # as tight as it will go
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Solution may be inaccurate")
            with contextlib.suppress(cp.SolverError):
                problem.solve(
                    solver=cp.CLARABEL,
                    tol_gap_abs=accuracy,
                    tol_gap_rel=accuracy,
                    tol_feas=accuracy,
                )
        if problem.status == cp.OPTIMAL:
            minimum = float(problem.value)
            return minimum, 10 * accuracy * max(1.0, minimum)
    return None


def fit_in_ball(design, targets, loss, size, radii, tol):
    """The solver under test, given the radii as the solvers that it is compared with are."""
    group_radius, ball_radius = radii
    return fit_norm_ball(
        design,
        targets,
        group_size=size,
        group_radius=group_radius,
        ball_radius=ball_radius,
        loss=loss,
        tol=tol,
    )


@pytest.mark.parametrize("radii", [(1.0, 0.6), (1.0, math.inf), (math.inf, 0.6)])
@pytest.mark.parametrize("loss", ["huber", "squared", "logistic", "multinomial"])
def test_agrees_with_plain_projected_gradient(loss, radii, rng):
    design = rng.standard_normal((60, 12))  # four groups of three
    signal = design[:, :3] @ rng.standard_normal(3) + rng.standard_normal(60)
    targets = targets_from(signal, loss)
    values, intercept = projected_gradient(design, targets, loss, 3, radii, n_steps=400)
    expected = mean_loss(loss, design, targets, values, intercept)

    fit = fit_in_ball(design, targets, loss, size=3, radii=radii, tol=1e-9)
    assert fit.objective == pytest.approx(expected, rel=2e-9)
    np.testing.assert_allclose(fit.values.reshape(values.shape), values, atol=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("n_problems", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_agrees_with_a_conic_solver(n_problems, loss, rng):
    n_compared = 0
    for _ in range(n_problems + 5):  # the interior-point method gives up on some problems
        design, targets, radii = random_problem(rng, loss)
        trusted = solve_by_cvxpy(design, targets, loss, 5, radii)
        if trusted is None:
            continue
        n_compared += 1
        reference, slack = trusted
        fit = fit_in_ball(design, targets, loss, size=5, radii=radii, tol=8e-7)
        norms = np.linalg.norm(fit.values.reshape(len(fit.values), -1), axis=1)
        true_gap = fit.objective - reference
        by_definition = mean_loss(loss, design, targets, fit.values, fit.intercept)
        assert fit.converged
        assert fit.objective == pytest.approx(by_definition, rel=1e-12)
        assert abs(true_gap) <= 1e-6 * reference + slack
        assert norms.sum() <= radii[0] * (1 + 1e-9)
        assert np.linalg.norm(norms) <= radii[1] * (1 + 1e-9)
        assert fit.duality_gap >= true_gap - slack
        assert true_gap >= -slack
        assert np.array_equal(fit.active, norms > 0)
        if n_compared == n_problems:
            break
    assert n_compared == n_problems


@pytest.mark.parametrize("binding", ["the group norm", "the length", "nothing"])
@pytest.mark.parametrize("loss", LOSSES)
def test_agrees_with_a_conic_solver_where_a_radius_does_not_bind(loss, binding, rng):
    design, targets, (group_radius, ball_radius) = random_problem(rng, loss, n=60, n_groups=4)
    radii = {
        "the group norm": (group_radius, 100.0),
        "the length": (100.0, ball_radius),
        "nothing": (100.0, 100.0),
    }[binding]
    trusted = solve_by_cvxpy(design, targets, loss, 5, radii)
    assert trusted is not None
    reference, slack = trusted
    fit = fit_in_ball(design, targets, loss, size=5, radii=radii, tol=5e-6)
    assert fit.converged
    assert -slack <= fit.objective - reference <= 1e-5 * reference + slack


@pytest.mark.parametrize("loss", ["huber", "absolute"])
def test_several_outputs_share_their_groups(loss, rng):
    design, _, radii = random_problem(rng, loss, n=40, n_groups=8)
    targets = design[:, :5] @ rng.standard_normal((5, 3)) + rng.standard_normal((40, 3))
    fit = fit_in_ball(design, targets, loss, size=5, radii=radii, tol=1e-6)
    assert fit.values.shape == (8, 5, 3)
    assert fit.intercept.shape == (3,)
    assert fit.dual.shape == (40, 3)
    trusted = solve_by_cvxpy(design, targets, loss, 5, radii)
    if trusted is not None:
        reference, slack = trusted
        assert -slack <= fit.objective - reference <= 1e-6 * reference + slack


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_are_repetitions_and_intercepts_optional(loss, fit_intercept, rng):
    design, targets, radii = random_problem(rng, loss, n=30, n_groups=6)
    counts = rng.integers(0, 4, 30)
    counts[:5] = 1  # so that every class carries weight
    options = {
        "group_size": 5,
        "group_radius": radii[0],
        "ball_radius": radii[1],
        "loss": loss,
        "fit_intercept": fit_intercept,
        "tol": 1e-6,
    }
    weighted = fit_norm_ball(design, targets, sample_weight=counts, **options)
    repeated_design = np.repeat(design, counts, axis=0)
    repeated_targets = np.repeat(targets, counts, axis=0)
    repeated = fit_norm_ball(repeated_design, repeated_targets, **options)
    assert weighted.objective == pytest.approx(repeated.objective, rel=2e-6)
    assert weighted.intercept.any() == fit_intercept


@pytest.mark.parametrize("radii", [(0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize(("loss", "best_constant"), [("absolute", np.median), ("squared", np.mean)])
def test_zero_radius_fits_the_intercept_alone(loss, best_constant, radii, rng):
    design, targets, _ = random_problem(rng, "huber", n=31)
    fit = fit_norm_ball(
        design,
        targets,
        group_size=5,
        group_radius=radii[0],
        ball_radius=radii[1],
        loss=loss,
    )
    assert not fit.values.any()
    assert not fit.active.any()
    best = mean_loss(loss, design, targets, fit.values, best_constant(targets))
    assert fit.objective == pytest.approx(best, rel=1e-4)
    assert fit.converged


@pytest.mark.parametrize("level", [0.0, 3.3, -1e6])
@pytest.mark.parametrize("loss", ["absolute", "huber", "squared"])
def test_constant_targets_cost_nothing(loss, level, rng):
    design = rng.standard_normal((20, 10))
    fit = fit_norm_ball(design, np.full(20, level), group_size=5, group_radius=1.0, loss=loss)
    assert fit.converged
    assert float(fit.intercept) == pytest.approx(level, abs=1e-9 * abs(level))
    assert fit.objective <= 1e-9 * (1 + abs(level))


def test_separable_labels_within_the_ball_give_zero_hinge(rng):
    design = rng.standard_normal((20, 100))
    targets = np.where(design[:, 0] > 0, 1.0, -1.0)
    fit = fit_norm_ball(
        design,
        targets,
        group_size=5,
        group_radius=1e3,
        ball_radius=1e3,
        loss="hinge",
    )
    assert fit.converged
    assert fit.objective <= 1e-7


def test_small_group_radius_prunes_and_large_does_not(rng):
    design, targets, _ = random_problem(rng, "huber", n=60, n_groups=30)
    pruned = fit_norm_ball(design, targets, group_size=5, group_radius=0.5)
    spread = fit_norm_ball(design, targets, group_size=5, ball_radius=0.5)
    assert pruned.active.sum() < 15
    assert spread.active.all()
    assert not pruned.values[~pruned.active].any()


def test_stopping_early_says_so_with_a_gap_that_holds(rng):
    design, targets, _ = random_problem(rng, "huber", n=60, n_groups=40)
    options = {"group_size": 5, "group_radius": 5.0}
    exact = fit_norm_ball(design, targets, tol=1e-8, **options)
    rough = fit_norm_ball(design, targets, tol=1e-8, max_iter=3, **options)
    assert not rough.converged
    assert rough.n_iter == 3
    assert rough.duality_gap >= rough.objective - exact.objective > 1e-8 * exact.objective


@pytest.mark.parametrize("loss", ["huber", "squared", "logistic", "multinomial"])
def test_a_tolerance_below_rounding_ends_at_rounding(loss, rng):
    design, targets, radii = random_problem(rng, loss, n=20, n_groups=4)
    fit = fit_norm_ball(design, targets, group_size=5, group_radius=radii[0], loss=loss, tol=1e-18)
    assert fit.converged
    assert 0.0 < fit.duality_gap < 1e-12 * fit.objective


def test_momentum_is_dropped_where_it_points_uphill(rng):
    """Least squares at a condition of 900, 300 iterations: 1e-9 of the loss is left at most.

    Without momentum 1e-4 would be left, and 1e-7 if momentum were never dropped.
    """
    orthogonal = np.linalg.qr(rng.standard_normal((40, 20)))[0]
    design = orthogonal * np.geomspace(1, 1 / 30, 20)
    problem = BallProblem(
        design=design,
        targets=design @ rng.choice([-1.0, 1.0], (20, 1)),
        weights=np.full(40, 1 / 40),
        loss=LOSSES["squared"],
        ball=NormBall(1e3, 1e3),
        group_size=5,
        fit_intercept=False,
    )
    start = Iterate(np.zeros((20, 1)), np.zeros(1), np.zeros((40, 1)))
    descent = Descent(problem, problem.largest_eigenvalue(), curvature=1.0, start=start)
    before = problem.objective(start.predictions)
    for _ in range(300):
        descent.advance()
    assert problem.objective(descent.point.predictions) < 3e-9 * before


def test_columns_of_very_different_size_stop_truthfully_and_scaled_ones_converge(rng):
    """Tokens near 100 give one head columns with singular values like 1800, 160 and 0.2."""
    scales = np.array([200.0, 18.0, 0.025])
    design = rng.standard_normal((80, 3)) * scales
    labels = np.where(design[:, 2] / scales[2] + rng.standard_normal(80) > 0, 1.0, -1.0)
    options = {"group_size": 3, "group_radius": 20.0, "loss": "hinge", "tol": 0.02}
    rough = fit_norm_ball(design, labels, max_iter=500, **options)
    assert not rough.converged
    trusted = solve_by_cvxpy(design, labels, "hinge", 3, (20.0, 1e9))
    if trusted is not None:  # the gap it reports is an upper bound of the true one
        reference, slack = trusted
        assert rough.objective - rough.duality_gap <= reference + slack
    assert fit_norm_ball(design / scales, labels, **options).converged


def test_path_starts_each_fit_from_the_one_before(rng):
    design, targets, _ = random_problem(rng, "huber", n=60, n_groups=60)
    options = {"group_size": 5, "ball_radius": 2.0, "tol": 1e-7}
    path = []
    cold_starts = []
    start = None
    for group_radius in np.linspace(1.0, 4.0, 10):
        fit = fit_norm_ball(design, targets, group_radius=group_radius, start=start, **options)
        path.append(fit)
        start = fit.solution
        cold_starts.append(fit_norm_ball(design, targets, group_radius=group_radius, **options))
    objectives = [fit.objective for fit in cold_starts]
    assert [fit.objective for fit in path] == pytest.approx(objectives, rel=2e-7)
    assert sum(fit.n_iter for fit in path) < sum(fit.n_iter for fit in cold_starts)
    options["tol"] = 1e-6
    again = fit_norm_ball(design, targets, group_radius=4.0, start=start, **options)
    assert again.n_iter <= path[-1].n_iter


def test_the_same_call_gives_the_same_numbers(rng):
    design, targets, radii = random_problem(rng, "absolute")
    options = {"group_size": 5, "group_radius": radii[0], "loss": "absolute"}
    first = fit_norm_ball(design, targets, **options)
    second = fit_norm_ball(design, targets, **options)
    assert np.array_equal(first.values, second.values)
    assert first.duality_gap == second.duality_gap
