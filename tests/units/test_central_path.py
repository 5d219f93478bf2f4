"""Newton steps along the central path: where gradient steps fail, and where both must agree."""

import math

import numpy as np
import pytest
from balls import fit_norm_ball

from keyhole.ball import norm_ball
from keyhole.ball.losses import LOSSES
from keyhole.ball.norm_ball import BallRisk, CentralPath, SolverWarning
from keyhole.ball.projection import NormBall


def problem_of(loss, rng, n=40, n_groups=6, size=4):
    design = rng.standard_normal((n, n_groups * size))
    signal = design[:, :size] @ rng.standard_normal(size) + rng.standard_normal(n)
    targets = {
        "logistic": np.where(signal > np.median(signal), 1.0, -1.0),
        "hinge": np.where(signal > np.median(signal), 1.0, -1.0),
        "multinomial": np.eye(3)[np.digitize(signal, np.quantile(signal, [0.3, 0.6]))],
    }.get(loss, signal)
    return design, targets


@pytest.mark.parametrize("radii", [(1.0, 0.6), (1.0, math.inf), (math.inf, 0.6)])
@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_newton_and_gradient_steps_agree_within_their_gaps(loss, radii, rng, monkeypatch):
    design, targets = problem_of(loss, rng)
    options = {"group_size": 4, "group_radius": radii[0], "ball_radius": radii[1], "loss": loss, "tol": 1e-4}
    newton = fit_norm_ball(design, targets, **options)
    monkeypatch.setattr(norm_ball, "LARGEST_SYSTEM", 0)
    gradient = fit_norm_ball(design, targets, **options)
    assert newton.converged
    assert newton.n_iter <= 150
    slack = 1e-9 * gradient.objective
    assert newton.objective - newton.duality_gap <= gradient.objective + slack
    assert gradient.objective - gradient.duality_gap <= newton.objective + slack
    norms = np.linalg.norm(newton.values.reshape(6, -1), axis=1)
    assert norms.sum() <= radii[0] * (1 + 1e-9)
    assert np.linalg.norm(norms) <= radii[1] * (1 + 1e-9)


@pytest.mark.parametrize("loss", ["hinge", "absolute", "huber", "logistic"])
def test_columns_of_very_different_scale_within_a_group(loss, rng, monkeypatch):
    """Tokens near 100 give one head columns with singular values like 1800, 160 and 0.2."""
    design = np.zeros((80, 12))  # four heads of three columns, of which one is alive
    scales = np.array([200.0, 18.0, 0.025])
    design[:, :3] = rng.standard_normal((80, 3)) * scales
    labels = np.where(design[:, 2] / scales[2] + rng.standard_normal(80) > 0, 1.0, -1.0)
    options = {"group_size": 3, "group_radius": 20.0, "ball_radius": 45.0, "loss": loss, "tol": 0.02}
    fit = fit_norm_ball(design, labels, **options)  # a warning would be an error
    assert fit.converged
    assert list(np.flatnonzero(fit.active)) == [0]
    if loss == "hinge":  # gradient steps alone do not get there: the law above bites
        monkeypatch.setattr(norm_ball, "LARGEST_SYSTEM", 0)
        with pytest.warns(SolverWarning, match="relative duality gap"):
            fit_norm_ball(design, labels, **options, max_iter=500)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_system_is_the_derivative_of_the_value(loss, rng):
    design, targets = problem_of(loss, rng)
    y = targets.reshape(len(targets), -1)
    weights = rng.dirichlet(np.ones(len(y)))
    problem = BallRisk(y, weights, LOSSES[loss], NormBall(2.0, 1.5), 4, True)
    path = CentralPath(problem, design, np.zeros(y.shape[1]), 1.0)
    point = path._point.copy()
    point[: path.n_linear] = 0.01 * rng.standard_normal(path.n_linear)
    gradient, hessian = path._system(point)
    direction = rng.standard_normal(len(point)) * 0.1
    step = 1e-5
    ahead, behind = point + step * direction, point - step * direction
    slope = (path._value(ahead) - path._value(behind)) / (2 * step)
    assert slope == pytest.approx(gradient @ direction, rel=1e-6, abs=1e-8)
    if loss != "huber":  # its curvature beyond the corner is a bound
        turn = (path._system(ahead)[0] - path._system(behind)[0]) / (2 * step)
        np.testing.assert_allclose(hessian @ direction, turn, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-9, atol=1e-12)


def test_the_gap_on_the_path_is_what_the_degree_says(rng):
    design, targets = problem_of("hinge", rng)
    problem = BallRisk(targets[:, None], np.full(40, 1 / 40), LOSSES["hinge"], NormBall(1.0, 0.6), 4, True)
    path = CentralPath(problem, design, np.zeros(1), 1.0)
    path.follow(1e-3, 1e-3, 200)
    best = fit_norm_ball(design, targets, group_size=4, group_radius=1.0, ball_radius=0.6, loss="hinge", tol=1e-7)
    excess = path._loss(path._point) - best.objective
    assert 0 <= excess <= path.degree * path.mu
