"""The projection x of a is the point of the ball with <a − x, u − x> ≤ 0 for every u of the ball.

No reference solution is needed: the law is tested against all u at once through the support function, and
against points u of the ball drawn at random, which trust nothing but the definition of the ball.
"""

import math

import numpy as np

from keyhole.ball.projection import group_norms, norm_ball_support, project_norm_ball


def draw(rng, m=40, d=3):
    """A point, and radii that bind in every combination."""
    values = rng.standard_normal((m, d)) * 10.0 ** rng.uniform(-1, 1, (m, 1))
    norms = group_norms(values)
    group_radius = norms.sum() * rng.uniform(0.05, 1.1)
    ball_radius = np.linalg.norm(norms) * rng.uniform(0.05, 1.1)
    return values, float(group_radius), float(ball_radius)


def feasible(rng, shape, group_radius, ball_radius):
    """A point of the ball, many of them on its boundary, without any projection: scaled into it."""
    point = rng.standard_normal(shape) * (rng.uniform(size=(shape[0], 1)) < rng.uniform(0.02, 1))
    norms = np.linalg.norm(point, axis=1)
    if not norms.any():
        return point
    return point * min(group_radius / norms.sum(), ball_radius / np.linalg.norm(norms))


def violation(values, point, group_radius, ball_radius, rng):
    """max over u of <a − x, u − x> relative to |a|²: all u by the support function, and random u."""
    step = values - point
    by_support = norm_ball_support(group_norms(step), group_radius, ball_radius)[0] - np.vdot(step, point)
    at_random = max(
        float(np.vdot(step, feasible(rng, values.shape, group_radius, ball_radius) - point)) for _ in range(50)
    )
    assert at_random <= by_support + 1e-12 * np.vdot(values, values)  # the support function is an upper bound
    return by_support / np.vdot(values, values)


def alternating(values, group_radius, ball_radius, rounds):
    """The twin: project onto one ball, then onto the other, and so on until tired."""
    for _ in range(rounds):
        values = project_norm_ball(values, group_radius, math.inf)
        values = project_norm_ball(values, math.inf, ball_radius)
    return values


def test_variational_inequality(rng):
    caught = 0
    for _ in range(60):
        values, group_radius, ball_radius = draw(rng)
        point = project_norm_ball(values, group_radius, ball_radius)
        assert violation(values, point, group_radius, ball_radius, rng) <= 1e-14
        twin = alternating(values, group_radius, ball_radius, rounds=20)
        caught += violation(values, twin, group_radius, ball_radius, rng) > 1e-4
    assert caught > 5  # where both constraints bind, going to and fro ends elsewhere


def test_projecting_twice_changes_nothing(rng):
    for _ in range(20):
        values, group_radius, ball_radius = draw(rng)
        once = project_norm_ball(values, group_radius, ball_radius)
        assert np.allclose(project_norm_ball(once, group_radius, ball_radius), once, rtol=1e-13, atol=0)


def test_projections_do_not_move_apart(rng):
    """|x − x'|² ≤ <x − x', a − a'> for projections x, x' of a, a'; scaling into the ball fails it."""

    def excess(project, a, b):
        x, y = project(a), project(b)
        return (np.vdot(x - y, x - y) - np.vdot(x - y, a - b)) / np.vdot(a - b, a - b)

    caught = 0
    for _ in range(60):
        values, group_radius, ball_radius = draw(rng)
        other = values + rng.standard_normal(values.shape)
        assert excess(lambda v: project_norm_ball(v, group_radius, ball_radius), values, other) <= 1e-13  # noqa: B023

        def scaled(v):
            return v * min(1.0, group_radius / group_norms(v).sum())  # noqa: B023

        caught += excess(scaled, values, other) > 1e-6
    assert caught > 0


def test_support_function_is_attained_by_far_projections(rng):
    """<g, x> for the projection x of s·g rises to the support function as s grows: two codes, one number.

    Since |s g − x|² ≤ |s g − u|² for all u of the ball, the shortfall is at most R²/(2 s), its unit here.
    """
    for _ in range(30):
        gradient, group_radius, ball_radius = draw(rng)
        support, _ = norm_ball_support(group_norms(gradient), group_radius, ball_radius)
        far = 1e6 * max(group_radius, ball_radius) / np.linalg.norm(gradient)
        attained = np.vdot(gradient, project_norm_ball(far * gradient, group_radius, ball_radius))
        unit = min(group_radius, ball_radius) ** 2 / (2 * far)
        assert -1e-12 * support <= support - attained <= unit + 1e-12 * support


def test_support_is_less_than_each_ball_gives(rng):
    """The twin: the smaller of the two balls' own support functions is not that of their intersection."""
    loose = 0
    for _ in range(60):
        gradient, group_radius, ball_radius = draw(rng)
        norms = group_norms(gradient)
        support, _ = norm_ball_support(norms, group_radius, ball_radius)
        alone = min(group_radius * norms.max(), ball_radius * np.linalg.norm(norms))
        assert support <= alone * (1 + 1e-14)
        loose += support < 0.99 * alone
    assert loose > 5
