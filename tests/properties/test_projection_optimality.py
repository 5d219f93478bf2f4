"""The projection x of a is the point of the ball with <a − x, u − x> ≤ 0 for every u of the ball.

No reference solution is needed: the inequality is tested against all u at once through the support
function, and against points u of the ball drawn at random, which trust nothing but its definition.
"""

import math

import numpy as np

from keyhole.solve.ball import NormBall, group_norms


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
    """max over u of <a − x, u − x> relative to |a|², by the support function and by random u."""
    step = values - point
    size = np.vdot(values, values)
    support = NormBall(group_radius, ball_radius).support(group_norms(step))
    by_support = support - np.vdot(step, point)
    for _ in range(50):
        other = feasible(rng, values.shape, group_radius, ball_radius)
        # the support function is an upper bound
        assert float(np.vdot(step, other - point)) <= by_support + 1e-12 * size
    return by_support / size


def alternating(values, group_radius, ball_radius, rounds):
    """The broken variant: project onto one ball, then onto the other, ``rounds`` times."""
    for _ in range(rounds):
        values = NormBall(group_radius, math.inf).project(values)
        values = NormBall(math.inf, ball_radius).project(values)
    return values


def test_variational_inequality(rng):
    caught = 0
    for _ in range(60):
        values, group_radius, ball_radius = draw(rng)
        point = NormBall(group_radius, ball_radius).project(values)
        assert violation(values, point, group_radius, ball_radius, rng) <= 1e-14
        wrong = alternating(values, group_radius, ball_radius, rounds=20)
        caught += violation(values, wrong, group_radius, ball_radius, rng) > 1e-4
    assert caught > 5  # where both constraints bind, alternating ends elsewhere


def test_projecting_twice_changes_nothing(rng):
    for _ in range(20):
        values, group_radius, ball_radius = draw(rng)
        once = NormBall(group_radius, ball_radius).project(values)
        twice = NormBall(group_radius, ball_radius).project(once)
        assert np.allclose(twice, once, rtol=1e-13, atol=0)


def test_projections_do_not_move_apart(rng):
    """|x − x'|² ≤ <x − x', a − a'> for projections x, x' of a, a'; scaling into the ball fails."""

    def excess(points, projections):
        distance = points[0] - points[1]
        move = projections[0] - projections[1]
        return (np.vdot(move, move) - np.vdot(move, distance)) / np.vdot(distance, distance)

    caught = 0
    for _ in range(60):
        values, group_radius, ball_radius = draw(rng)
        points = [values, values + rng.standard_normal(values.shape)]
        projections = [NormBall(group_radius, ball_radius).project(point) for point in points]
        assert excess(points, projections) <= 1e-13
        scaled = [point * min(1.0, group_radius / group_norms(point).sum()) for point in points]
        caught += excess(points, scaled) > 1e-6
    assert caught > 0


def test_support_function_is_attained_by_far_projections(rng):
    """<g, x> for the projection x of s·g rises to the support function as s grows.

    Since |s g − x|² ≤ |s g − u|² for all u of the ball, the shortfall is at most R²/(2 s).
    """
    for _ in range(30):
        gradient, group_radius, ball_radius = draw(rng)
        support = NormBall(group_radius, ball_radius).support(group_norms(gradient))
        far = 1e6 * max(group_radius, ball_radius) / np.linalg.norm(gradient)
        projection = NormBall(group_radius, ball_radius).project(far * gradient)
        attained = np.vdot(gradient, projection)
        unit = min(group_radius, ball_radius) ** 2 / (2 * far)
        assert -1e-12 * support <= support - attained <= unit + 1e-12 * support


def test_support_is_less_than_each_ball_gives(rng):
    """The smaller of the two balls' support functions is above that of their intersection."""
    loose = 0
    for _ in range(60):
        gradient, group_radius, ball_radius = draw(rng)
        norms = group_norms(gradient)
        support = NormBall(group_radius, ball_radius).support(norms)
        alone = min(group_radius * norms.max(), ball_radius * np.linalg.norm(norms))
        assert support <= alone * (1 + 1e-14)
        loose += support < 0.99 * alone
    assert loose > 5
