"""The projection against independent solutions, on random inputs and on those that break projections."""

import math

import cvxpy as cp
import numpy as np
import pytest

from keyhole.ball.projection import group_norms, norm_ball_support, project_norm_ball, project_norms


def project_by_bisection(norms, group_radius, ball_radius):
    """The same projection by another road: given the multiplier of the sum, that of the ball is explicit.

    x(λ) = (a − λ)₊ / max(1, |(a − λ)₊| / R) minimises over the ball alone, and Σ x(λ) falls with λ.
    """

    def point(shift):
        kept = np.maximum(norms - shift, 0.0)
        length = math.sqrt(math.fsum(kept**2))
        return kept * (ball_radius / length if length > ball_radius else 1.0)

    low, high = 0.0, float(norms.max())
    if math.fsum(point(0.0)) <= group_radius:
        return point(0.0)
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if math.fsum(point(middle)) > group_radius else (low, middle)
    return point(high)


def cases(rng):
    """Named inputs (norms, K, R), one for every branch and every way to break it."""
    a = np.abs(rng.standard_normal(30)) + 0.1
    total, length = a.sum(), np.linalg.norm(a)
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
    yield "ties at the top", np.array([4.0, 4.0, 4.0, 1.0, 0.5]), 1.8, 1.0
    yield "ties at the top, ratio at their number", np.array([4.0, 4.0, 4.0, 1.0, 0.5]), math.sqrt(3.0), 1.0
    yield "ties at the threshold", np.array([3.0, 2.0, 2.0, 2.0, 1.0]), 3.0, 2.5
    yield "zero groups", np.concatenate([a, np.zeros(10)]), 0.2 * total, 0.35 * length
    yield "nearly tied", 1000.0 + 1e-9 * a, 2.0, 0.6
    yield "large", 1e150 * a, 1e149 * total, 0.3e150 * length
    yield "small", 1e-150 * a, 1e-151 * total, 0.3e-150 * length
    yield "one giant", np.concatenate([[1e8], a]), 3.0, 2.5


def test_every_case_against_bisection(rng):
    for name, norms, group_radius, ball_radius in cases(rng):
        found = project_norms(norms, group_radius, ball_radius)
        if 0.0 in (group_radius, ball_radius):
            expected = np.zeros_like(norms)
        else:
            expected = project_by_bisection(norms, group_radius, ball_radius)
        scale = max(float(norms.max()), 1e-300)
        assert np.abs(found - expected).max() / scale <= 1e-10, name
        assert found.sum() <= group_radius * (1 + 1e-14), name
        assert np.linalg.norm(found) <= ball_radius * (1 + 1e-14), name


def test_random_inputs_against_bisection(rng):
    for _ in range(200):
        norms = np.abs(rng.standard_normal(rng.integers(1, 60))) * 10 ** rng.uniform(-3, 3)
        norms = np.round(norms, 1) if rng.uniform() < 0.3 else norms  # ties and zeros
        total, length = norms.sum() + 1e-3, np.linalg.norm(norms) + 1e-3
        ball_radius = length * rng.uniform(0.05, 1.1)
        group_radius = total * rng.uniform(0.05, 1.1)
        found = project_norms(norms, group_radius, ball_radius)
        expected = project_by_bisection(norms, group_radius, ball_radius)
        assert np.abs(found - expected).max() <= 1e-10 * max(1.0, norms.max())


def test_against_a_conic_solver(rng):
    for name, norms, group_radius, ball_radius in cases(rng):
        if norms.max() > 100 or norms.max() < 1e-3 or 0.0 in (group_radius, ball_radius):
            continue
        values = norms[:, None] * np.array([0.6, 0.8])
        point = cp.Variable(values.shape)
        limits = []
        if math.isfinite(group_radius):
            limits.append(cp.sum(cp.norm(point, axis=1)) <= group_radius)
        if math.isfinite(ball_radius):
            limits.append(cp.norm(point, "fro") <= ball_radius)
        cp.Problem(cp.Minimize(cp.sum_squares(point - values)), limits).solve(solver=cp.CLARABEL)
        assert np.abs(project_norm_ball(values, group_radius, ball_radius) - point.value).max() <= 1e-4, name


def test_group_directions_are_kept(rng):
    values = rng.standard_normal((20, 7))
    found = project_norm_ball(values, 5.0, 2.0)
    norms = group_norms(found)
    assert np.allclose(norms, project_norms(group_norms(values), 5.0, 2.0))
    kept = norms > 0
    cosines = np.sum(found * values, axis=1)[kept] / (norms * group_norms(values))[kept]
    assert np.allclose(cosines, 1.0)
    assert not found[~kept].any()


def test_a_point_inside_is_returned_as_it_is(rng):
    values = rng.standard_normal((5, 3))
    assert project_norm_ball(values, 1e3, math.inf) is values


def test_float32_costs_float32_rounding(rng):
    values = rng.standard_normal((200, 5))
    single = project_norm_ball(values.astype(np.float32), 20.0, 3.0)
    assert single.dtype == np.float32
    error = np.abs(single - project_norm_ball(values, 20.0, 3.0)).max()
    assert error <= 8 * np.finfo(np.float32).eps * np.abs(values).max()


def test_nan_is_named():
    with pytest.raises(ValueError, match=r"`values` must be finite: found NaN"):
        project_norm_ball(np.array([[math.nan, 1.0]]), 1.0, 1.0)


def test_support_by_hand():
    norms = np.array([3.0, 4.0])
    assert norm_ball_support(norms, math.inf, 2.0) == (10.0, 0.0)
    assert norm_ball_support(norms, 2.0, math.inf) == (8.0, 4.0)
    assert norm_ball_support(norms, 0.5, 1.0) == (2.0, 4.0)  # the ball of radius 1 contains the diamond
    assert norm_ball_support(np.zeros(3), 1.0, 1.0)[0] == 0.0
    assert norm_ball_support(norms, 0.0, 1.0)[0] == 0.0
    assert norm_ball_support(np.zeros(3), math.inf, math.inf)[0] == 0.0


def test_support_against_a_fine_grid_of_thresholds(rng):
    for _, norms, group_radius, ball_radius in cases(rng):
        if not 0 < norms.max() < 100 or math.inf in (group_radius, ball_radius):
            continue
        found = norm_ball_support(norms, group_radius, ball_radius)[0]
        thresholds = np.concatenate([np.linspace(0, norms.max(), 2001), norms])
        rest = np.linalg.norm(np.maximum(norms[:, None] - thresholds, 0.0), axis=0)
        grid = (group_radius * thresholds + ball_radius * rest).min()
        assert found <= grid * (1 + 1e-14)
        assert found >= grid * (1 - 1e-4)
