"""A loss, its gradient and its conjugate are one object: each follows from the others.

Every property below is a function that returns by how much it is violated. It is applied to the
loss, which must satisfy it, and to a variant with one thing broken, which must not.
"""

import math

import numpy as np
import pytest

from keyhole.ball.losses import (
    LOSSES,
    Absolute,
    Hinge,
    Huber,
    Logistic,
    Multinomial,
    Smoothed,
    Squared,
)

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


def lipschitz_violation(loss, y, z, other):
    """|ℓ(z) − ℓ(z')| ≤ L |z − z'|: by which factor it is exceeded.

    A scalar loss is summed over its t outputs, which multiplies the constant by √t.
    """
    constant = loss.lipschitz
    if loss.name != "multinomial":
        constant *= math.sqrt(y.shape[1])
    rise = np.abs(loss.value(y, z) - loss.value(y, other)) / np.linalg.norm(z - other, axis=1)
    return rise.max() / constant - 1


def smoothness_violation(loss, y, z, other):
    """|∇ℓ(z) − ∇ℓ(z')| ≤ β |z − z'|: by which factor it is exceeded."""
    turn = np.linalg.norm(loss.gradient(y, z) - loss.gradient(y, other), axis=1)
    return (turn / np.linalg.norm(z - other, axis=1)).max() / loss.smoothness - 1


def broken(loss, **changes):
    """The same loss with some of its parts replaced."""
    return type("Broken", (type(loss),), changes)()


@pytest.mark.parametrize("name", LOSSES)
def test_fenchel_young(name, rng):
    loss = LOSSES[name]
    y, z = sample(name, rng)
    assert young_violation(loss, y, z, dual_points(loss, y, rng)) <= 1e-12
    assert equality_violation(loss, y, z) <= 1e-11

    louder = broken(loss, conjugate=lambda self, y, a: loss.conjugate(y, a) - 1e-3)
    assert young_violation(louder, y, z, loss.gradient(y, z)) > 1e-4
    assert equality_violation(louder, y, z) > 1e-4


def test_fenchel_young_catches_huber_without_its_quadratic_part(rng):
    y, z = sample("huber", rng)
    straight = broken(Huber(), conjugate=Absolute.conjugate, slopes=Absolute.slopes)
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
    tilted = broken(loss, gradient=lambda self, y, z: 1.001 * loss.gradient(y, z))
    assert difference_violation(tilted, y, z, rng) > 5


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "squared"])
def test_lipschitz_constant(name, rng):
    loss = LOSSES[name]
    y, z = sample(name, rng)
    other = z + 10.0 ** rng.uniform(-3, 1, (len(z), 1)) * rng.standard_normal(z.shape)
    assert lipschitz_violation(loss, y, z, other) <= 1e-9
    # the constant is attained: go far out, where every output disagrees with its target
    if name == "multinomial":
        y = np.eye(4)[y.argmax(axis=1)]
        far = 40.0 * (np.roll(y, 1, axis=1) - y)
    else:
        far = np.where(y > 0.5, -20.0, 20.0)
    assert lipschitz_violation(loss, y, far, 1.01 * far) > -0.01
    timid = broken(loss, lipschitz=0.9 * loss.lipschitz)
    assert lipschitz_violation(timid, y, far, 1.01 * far) > 0.05


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
    timid = broken(loss, smoothness=0.9 * loss.smoothness)
    assert smoothness_violation(timid, y, bent, bent + nudge) > 0.05


@pytest.mark.parametrize("base", [Absolute(), Hinge()])
def test_smoothing_lies_below_and_touches_where_the_centre_is_the_gradient(base, rng):
    y, z = sample(base.name, rng)
    width = 0.3
    centre = dual_points(base, y, rng)
    smoothed = Smoothed(base, y, width, centre)
    room = base.value(y, z) - smoothed.value(y, z)
    largest_room = 0.5 * width * np.sum((base.gradient(y, z) - centre) ** 2, axis=1)
    assert room.min() >= -1e-12
    assert (room <= largest_room + 1e-12).all()
    assert equality_violation(smoothed, y, z) <= 1e-12
    assert smoothness_violation(smoothed, y, z, z + 0.1 * rng.standard_normal(z.shape)) <= 1e-9

    exact = Smoothed(base, y, width, base.gradient(y, z))
    assert np.allclose(exact.value(y, z), base.value(y, z), atol=1e-12)
    wrong = Smoothed(base, y, width, np.zeros_like(y))
    assert np.abs(wrong.value(y, z) - base.value(y, z)).max() > 0.01


@pytest.mark.parametrize("name", LOSSES)
def test_balancing_keeps_the_dual_point_feasible(name, rng):
    """After balancing, Σ w a = 0 and the conjugate is finite; a balanced point stays as it is."""
    loss = LOSSES[name]
    y, z = sample(name, rng, n=60)
    weights = rng.dirichlet(np.ones(len(y)))
    dual = loss.gradient(y, z)
    balanced = loss.balanced(y, dual, weights)
    assert np.abs(weights @ balanced).max() <= 1e-15
    assert np.isfinite(loss.conjugate(y, balanced)).all()
    assert np.abs(weights @ dual).max() > 1e-3  # the point before balancing does not satisfy it
    assert np.allclose(loss.balanced(y, balanced, weights), balanced, atol=1e-12)
    # only the shares of the weights count
    heavier = loss.balanced(y, dual, 3.0 * weights)
    assert np.allclose(heavier, balanced, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_best_intercept_balances_the_gradient(name, rng):
    """At the best intercept the mean loss rises both ways; a shifted intercept is caught."""
    loss = LOSSES[name]
    y, z = sample(name, rng, n=60)
    weights = rng.dirichlet(np.ones(len(y)))

    def excess(b):
        mean = weights @ loss.value(y, z + b)
        least = math.inf
        for size in np.repeat([1e-5, 1e-2, 1.0], 20):
            nearby = b + size * rng.standard_normal(y.shape[1])
            least = min(least, weights @ loss.value(y, z + nearby))
        return mean - least

    best = loss.best_intercept(y, z, weights, np.full(y.shape[1], 3.0))
    assert excess(best) <= 1e-14
    assert excess(best + 0.3 * np.arange(1, y.shape[1] + 1)) > 1e-5
    if name in SMOOTH:
        assert np.abs(weights @ loss.gradient(y, z + best)).max() <= 1e-14


def test_the_losses_are_the_six():
    assert [type(loss) for loss in LOSSES.values()] == [
        Absolute,
        Huber,
        Squared,
        Logistic,
        Hinge,
        Multinomial,
    ]
