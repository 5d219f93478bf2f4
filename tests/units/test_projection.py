"""The projection against independent solutions, on random inputs and on extreme ones."""

import math

import cvxpy as cp
import numpy as np
import pytest
from balls import project_by_bisection

from keyhole.solve.ball import NormBall, group_norms


def cases(rng):
    """Named inputs (norms, K, R), one for every branch and every way to break it."""
    a = np.abs(rng.standard_normal(30)) + 0.1
    total = a.sum()
    length = np.linalg.norm(a)
    yield "inside", a, 1.1 * total, 1.1 * length
    yield "on both boundaries", a, total, length
    yield "only the sum", a, 0.3 * total, 2 * length
    yield "only the ball", a, 2 * total, 0.3 * length
    yield "both", a, 0.5 * 0.4 * total, 0.4 * length
    yield "both, few survive", a, 1.3, 1.0
    yield "no ball", a, 0.2 * total, math.inf
    yield "no sum", a, math.inf, 0.2 * length
    yield "zero sum", a, 0.0, 1.0
    yield "zero ball", a, 1.0, 0.0
    yield "nothing there", np.zeros(4), 1.0, 1.0
    yield "one group", np.array([5.0]), 2.0, 1.0
    yield "all tied, sum binds", np.full(9, 2.0), 3.0, 1.5
    yield "all tied, ball binds", np.full(9, 2.0), 3.5, 1.0
    yield "all tied, both bind", np.full(9, 2.0), 3.0, 1.0
    tied_at_top = np.array([4.0, 4.0, 4.0, 1.0, 0.5])
    yield "ties at the top", tied_at_top, 1.8, 1.0
    yield "ties at the top, ratio at their number", tied_at_top, math.sqrt(3.0), 1.0
    yield "ties at the threshold", np.array([3.0, 2.0, 2.0, 2.0, 1.0]), 3.0, 2.5
    yield "zero groups", np.concatenate([a, np.zeros(10)]), 0.2 * total, 0.35 * length
    yield "nearly tied", 1000.0 + 1e-9 * a, 2.0, 0.6
    yield "large", 1e100 * a, 1e99 * total, 0.3e100 * length
    yield "small", 1e-100 * a, 1e-101 * total, 0.3e-100 * length
    yield "one giant", np.concatenate([[1e8], a]), 3.0, 2.5


def test_every_case_against_bisection(rng):
    for name, norms, group_radius, ball_radius in cases(rng):
        projected = NormBall(group_radius, ball_radius).project_norms(norms)
        if 0.0 in (group_radius, ball_radius):
            expected = np.zeros_like(norms)
        else:
            expected = project_by_bisection(norms, group_radius, ball_radius)
        scale = max(float(norms.max()), 1e-300)
        assert np.abs(projected - expected).max() / scale <= 1e-10, name
        assert projected.sum() <= group_radius * (1 + 1e-14), name
        assert np.linalg.norm(projected) <= ball_radius * (1 + 1e-14), name


def test_random_inputs_against_bisection(rng):
    for _ in range(200):
        norms = np.abs(rng.standard_normal(rng.integers(1, 60))) * 10 ** rng.uniform(-3, 3)
        if rng.uniform() < 0.3:  # ties and zeros
            norms = np.round(norms, 1)
        ball_radius = (np.linalg.norm(norms) + 1e-3) * rng.uniform(0.05, 1.1)
        group_radius = (norms.sum() + 1e-3) * rng.uniform(0.05, 1.1)
        projected = NormBall(group_radius, ball_radius).project_norms(norms)
        expected = project_by_bisection(norms, group_radius, ball_radius)
        assert np.abs(projected - expected).max() <= 1e-10 * max(1.0, norms.max())


def test_against_a_conic_solver(rng):
    for name, norms, group_radius, ball_radius in cases(rng):
        is_extreme = norms.max() > 100 or norms.max() < 1e-3
        if is_extreme or 0.0 in (group_radius, ball_radius):
            continue
        values = norms[:, None] * np.array([0.6, 0.8])
        point = cp.Variable(values.shape)
        limits = []
        if math.isfinite(group_radius):
            limits.append(cp.sum(cp.norm(point, axis=1)) <= group_radius)
        if math.isfinite(ball_radius):
            limits.append(cp.norm(point, "fro") <= ball_radius)
        cp.Problem(cp.Minimize(cp.sum_squares(point - values)), limits).solve(solver=cp.CLARABEL)
        projected = NormBall(group_radius, ball_radius).project(values)
        assert np.abs(projected - point.value).max() <= 1e-4, name


def test_group_directions_are_kept(rng):
    values = rng.standard_normal((20, 7))
    projected = NormBall(5.0, 2.0).project(values)
    norms = group_norms(projected)
    assert np.allclose(norms, NormBall(5.0, 2.0).project_norms(group_norms(values)))
    active = norms > 0
    inner_products = np.sum(projected * values, axis=1)
    cosines = inner_products[active] / (norms * group_norms(values))[active]
    assert np.allclose(cosines, 1.0)
    assert not projected[~active].any()


def test_a_point_inside_is_returned_as_it_is(rng):
    values = rng.standard_normal((5, 3))
    assert NormBall(1e3, math.inf).project(values) is values


def test_nan_is_named():
    with pytest.raises(ValueError, match=r"`values` must be finite: found NaN"):
        NormBall(1.0, 1.0).project(np.array([[math.nan, 1.0]]))


def test_support_by_hand():
    norms = np.array([3.0, 4.0])
    assert NormBall(math.inf, 2.0).support(norms) == 10.0
    assert NormBall(2.0, math.inf).support(norms) == 8.0
    assert NormBall(0.5, 1.0).support(norms) == 2.0  # the ball contains the diamond
    assert NormBall(1.0, 1.0).support(np.zeros(3)) == 0.0
    assert NormBall(0.0, 1.0).support(norms) == 0.0
    assert NormBall(math.inf, math.inf).support(np.zeros(3)) == 0.0


def test_support_against_a_fine_grid_of_thresholds(rng):
    for _, norms, group_radius, ball_radius in cases(rng):
        if not 0 < norms.max() < 100 or math.inf in (group_radius, ball_radius):
            continue
        support = NormBall(group_radius, ball_radius).support(norms)
        thresholds = np.concatenate([np.linspace(0, norms.max(), 2001), norms])
        rest = np.linalg.norm(np.maximum(norms[:, None] - thresholds, 0.0), axis=0)
        grid = (group_radius * thresholds + ball_radius * rest).min()
        assert support <= grid * (1 + 1e-14)
        assert support >= grid * (1 - 1e-4)
