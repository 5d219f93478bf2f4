"""The explicit bound: the Rademacher average of a ball, and the excess risk it controls."""

import math

import numpy as np

from keyhole.attention.kernels import attention_kernel
from keyhole.theory.bounds import kernel_risk_bound
from keyhole.theory.complexity import rkhs_norm
from keyhole.theory.spectrum import attention_trace
from keyhole.theory.targets import TokenPower, sphere_sets


def rademacher_average(dim, n_keys, n, seed, draws=200):
    """E sup_{|f| ≤ 1} (1/n) Σ_i ε_i f(x_i) = E √(εᵀKε) / n, with its standard error."""
    batch = sphere_sets(n, n_keys, dim, seed)
    gram = attention_kernel(batch)
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(draws, n))
    values = np.sqrt(np.einsum("sn,nm,sm->s", signs, gram, signs, optimize=True)) / n
    return values.mean(), values.std() / math.sqrt(draws)


def test_the_ball_has_the_rademacher_average_of_its_trace(seed):
    n = 200
    average, standard_error = rademacher_average(8, 4, n, seed)
    bound = math.sqrt(attention_trace(8, 4) / n)
    assert average < bound + 5 * standard_error
    # broken twin: the trace without the diagonal's own part, 1/N, is too small
    assert average > math.sqrt((attention_trace(8, 4) - 1 / 4) / n) * 0.9
    assert average > 0.5 * bound


def test_the_bound_holds_for_constrained_least_absolute_deviations(seed):
    """Minimise the mean absolute loss in the ball by subgradient steps; its excess risk obeys the
    bound.
    """
    target, n, n_keys = TokenPower(1, 4), 100, 2
    batch = sphere_sets(n + 1000, n_keys, 4, seed)
    train, test = batch[:n], batch[n:]
    rng = np.random.default_rng(seed)
    y = target(train) + rng.laplace(scale=0.3, size=n)
    test_y = target(test) + rng.laplace(scale=0.3, size=1000)
    gram, radius = attention_kernel(train), math.sqrt(rkhs_norm(target))
    weights, average = np.zeros(n), np.zeros(n)
    steps = 2000
    for _ in range(steps):
        weights = weights - radius / math.sqrt(steps) * np.sign(gram @ weights - y) / n
        norm = math.sqrt(max(weights @ gram @ weights, 0.0))
        weights = weights * min(1.0, radius / max(norm, 1e-300))
        average += weights / steps
    risk = (
        np.abs(attention_kernel(test, train) @ average - test_y).mean()
        - np.abs(target(test) - test_y).mean()
    )
    assert risk <= kernel_risk_bound(target, n, n_keys).total


def test_the_bound_falls_like_the_root_of_n():
    target = TokenPower(2, 8)
    ratio = kernel_risk_bound(target, 100, 8).total / kernel_risk_bound(target, 10_000, 8).total
    assert math.isclose(ratio, 10, rel_tol=1e-12)
