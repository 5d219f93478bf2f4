"""A loss, its gradient and its conjugate are one object: each follows from the others.

Every property below is a function that returns by how much it is violated. It is applied to the
loss, which must satisfy it, and to a variant with one thing broken, which must not.
"""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.solve.ball import LOSSES, smoothed

SMOOTH = ("huber", "squared", "logistic", "multinomial")
N = 400


def sample(name, rng, n=N):
    """Targets, and predictions on both sides of every corner."""
    outputs = 4 if name == "multinomial" else 2
    z = 2.5 * rng.standard_normal((n, outputs))
    if name in ("logistic", "hinge"):
        return rng.choice([-1.0, 1.0], z.shape), z
    if name == "multinomial":
        y = np.eye(outputs)[rng.integers(outputs, size=n)]
        y[n // 2 :] = rng.dirichlet(np.ones(outputs), n - n // 2)
        return y, z
    return rng.standard_normal(z.shape), z


def dual_points(loss, y, rng):
    """Points of the domain of the conjugate: subgradients of the loss, shrunk towards zero."""
    spread = loss.gradient(y, 3.0 * rng.standard_normal(y.shape))
    return spread * rng.uniform(0, 1, (len(y), 1))


def young_violation(loss, y, z, dual):
    """ℓ(z) + ℓ*(a) ≥ <a, z> for all z and a: how far below."""
    return (np.sum(dual * z, axis=1) - loss.value(y, z) - loss.conjugate(y, dual)).max()


def equality_violation(loss, y, z):
    """ℓ(z) + ℓ*(a) = <a, z> where a is the gradient at z."""
    dual = loss.gradient(y, z)
    return np.abs(loss.value(y, z) + loss.conjugate(y, dual) - np.sum(dual * z, axis=1)).max()


def difference_violation(loss, y, z, rng, step=1e-5):
    """Central differences against the gradient, in units of the error of central differences."""
    direction = rng.standard_normal(z.shape)
    ahead = loss.value(y, z + step * direction)
    behind = loss.value(y, z - step * direction)
    slope = (ahead - behind) / (2 * step)
    claimed = np.sum(loss.gradient(y, z) * direction, axis=1)
    # Huber's corner at |r| = 1 costs up to step/2 · |direction|², the rest is of higher order
    return (np.abs(slope - claimed) / (step * np.sum(direction**2, axis=1))).max()


def smoothness_violation(loss, y, z, other):
    """|∇ℓ(z) − ∇ℓ(z')| ≤ β |z − z'|: by which factor it is exceeded."""
    turn = np.linalg.norm(loss.gradient(y, z) - loss.gradient(y, other), axis=1)
    return (turn / np.linalg.norm(z - other, axis=1)).max() / loss.smoothness - 1


@pytest.mark.parametrize("name", LOSSES)
def test_fenchel_young(name, rng):
    loss = LOSSES[name]
    y, z = sample(name, rng)
    assert young_violation(loss, y, z, dual_points(loss, y, rng)) <= 1e-12
    assert equality_violation(loss, y, z) <= 1e-11

    louder = replace(loss, conjugate=lambda y, a: loss.conjugate(y, a) - 1e-3)
    assert young_violation(louder, y, z, loss.gradient(y, z)) > 1e-4
    assert equality_violation(louder, y, z) > 1e-4


def test_fenchel_young_catches_huber_without_its_quadratic_part(rng):
    y, z = sample("huber", rng)
    straight = replace(LOSSES["huber"], conjugate=LOSSES["absolute"].conjugate)
    assert equality_violation(straight, y, z) > 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_conjugate_is_infinite_outside_its_domain(name, rng):
    loss = LOSSES[name]
    y, _ = sample(name, rng)
    far = np.full_like(y, 1.5) * np.where(y > 0, 1.0, -1.0)
    assert np.isfinite(loss.conjugate(y, far)).all() == (name == "squared")


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_by_differences(name, rng):
    loss = LOSSES[name]
    y, z = sample(name, rng)
    assert difference_violation(loss, y, z, rng) <= 0.51
    tilted = replace(loss, gradient=lambda y, z: 1.001 * loss.gradient(y, z))
    assert difference_violation(tilted, y, z, rng) > 5


@pytest.mark.parametrize("name", SMOOTH)
def test_smoothness_constant(name, rng):
    loss = LOSSES[name]
    y, z = sample(name, rng)
    assert smoothness_violation(loss, y, z, z + rng.standard_normal(z.shape)) <= 1e-9
    # the constant is attained: at small residuals, or with all mass on two classes in equal parts
    if name in ("huber", "squared"):
        bent = y
    elif name == "multinomial":
        bent = np.zeros_like(y) + np.array([30.0, 30.0, 0.0, 0.0])
    else:
        bent = np.zeros_like(y)
    nudge = np.zeros_like(y)
    nudge[:, 0] = 1e-4
    nudge[:, 1] = -1e-4
    assert smoothness_violation(loss, y, bent, bent + nudge) == pytest.approx(0.0, abs=1e-6)
    timid = replace(loss, smoothness=0.9 * loss.smoothness)
    assert smoothness_violation(timid, y, bent, bent + nudge) > 0.05


@pytest.mark.parametrize("name", ["absolute", "hinge"])
def test_smoothing_lies_below_and_touches_where_the_centre_is_the_gradient(name, rng):
    base = LOSSES[name]
    y, z = sample(name, rng)
    width = 0.3
    centre = dual_points(base, y, rng)
    smooth = smoothed(base, width, centre)
    room = base.value(y, z) - smooth.value(y, z)
    largest_room = 0.5 * width * np.sum((base.gradient(y, z) - centre) ** 2, axis=1)
    assert room.min() >= -1e-12
    assert (room <= largest_room + 1e-12).all()
    assert equality_violation(smooth, y, z) <= 1e-12
    assert smoothness_violation(smooth, y, z, z + 0.1 * rng.standard_normal(z.shape)) <= 1e-9

    exact = smoothed(base, width, base.gradient(y, z))
    assert np.allclose(exact.value(y, z), base.value(y, z), atol=1e-12)
    wrong = smoothed(base, width, np.zeros_like(y))
    assert np.abs(wrong.value(y, z) - base.value(y, z)).max() > 0.01


@pytest.mark.parametrize("name", LOSSES)
def test_balancing_keeps_the_dual_point_feasible(name, rng):
    """After balancing, Σ w a = 0 and the conjugate is finite; a balanced point stays as it is."""
    loss = LOSSES[name]
    y, z = sample(name, rng, n=60)
    weights = rng.dirichlet(np.ones(len(y)))
    dual = loss.gradient(y, z)
    balanced = loss.balance(y, dual, weights)
    assert np.abs(weights @ balanced).max() <= 1e-15
    assert np.isfinite(loss.conjugate(y, balanced)).all()
    assert np.abs(weights @ dual).max() > 1e-3  # the point before balancing does not satisfy it
    assert np.allclose(loss.balance(y, balanced, weights), balanced, atol=1e-12)
