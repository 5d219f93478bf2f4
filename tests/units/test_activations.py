"""Activations and their Gaussian moments; the tables behind the moments."""

import mpmath
import numpy as np
import pytest

from keyhole.attention import activations
from keyhole.attention.activations import gaussian_moment
from keyhole.attention.compiled_moments import fill_moments
from keyhole.textbook import arc_cosine

EPS = np.finfo(float).eps


SIGMA = {
    "relu": lambda s: np.maximum(s, 0),
    "linear": lambda s: s,
    "square": np.square,
    "step": lambda s: (s > 0).astype(float),
    "exp": np.exp,
}


def test_names_are_checked():
    with pytest.raises(
        ValueError, match=r"`activation` must be one of 'relu', 'linear'.*: got 'tanh'"
    ):
        activations.check_activation("tanh")
    with pytest.raises(
        ValueError, match=r"closed-form moment here: got 'softmax'.*Use finite heads"
    ):
        gaussian_moment("softmax", 0.0, 0.0, 1.0, 1.0, 0.0)
    assert activations.check_activation("softmax") == "softmax"


def hermite_moment(name, mean_u, mean_v, std_u, std_v, rho):
    """E[σ(u)σ(v)] by Gauss–Hermite in both variables: exact for polynomials, good for entire
    functions.
    """
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    u = mean_u + std_u * nodes[:, None]
    v = mean_v + std_v * (rho * nodes[:, None] + np.sqrt(1 - rho**2) * nodes)
    return weights @ (SIGMA[name](u) * SIGMA[name](v)) @ weights


@pytest.mark.parametrize("name", ["linear", "square", "exp"])
def test_smooth_moments_agree_with_quadrature(name, rng):
    for _ in range(20):
        mean_u, mean_v = rng.normal(size=2)
        std_u, std_v = rng.uniform(0, 1.5, 2)
        rho = rng.uniform(-1, 1)
        expected = hermite_moment(name, mean_u, mean_v, std_u, std_v, rho)
        scale = hermite_moment("square", mean_u, mean_v, std_u, std_v, abs(rho)) ** 0.5
        ours = float(gaussian_moment(name, mean_u, mean_v, std_u, std_v, rho))
        assert abs(ours - expected) < 1e-11 * max(abs(expected), scale)


def test_around_zero_the_relu_moment_is_the_arc_cosine(rng):
    rho = np.concatenate([rng.uniform(-0.99, 1, 50), [0.0, 1.0]])
    np.testing.assert_allclose(
        gaussian_moment("relu", 0, 0, 1, 1, rho), arc_cosine(rho), rtol=1e-12
    )
    np.testing.assert_allclose(
        gaussian_moment("step", 0, 0, 1, 1, rho), 0.25 + np.arcsin(rho) / (2 * np.pi), rtol=1e-12
    )


def test_perfect_correlation_has_its_own_closed_form(rng):
    h, k = np.sort(rng.normal(size=(2, 30)) * 2, axis=0)[::-1]
    mass = np.array([float(mpmath.ncdf(x)) for x in k])
    density = np.exp(-k * k / 2) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(
        gaussian_moment("relu", h, k, 1, 1, 1), (h * k + 1) * mass + h * density, rtol=1e-9
    )
    np.testing.assert_allclose(gaussian_moment("step", h, k, 1, 1, 1), mass, rtol=1e-13)
    # u and −u: both positive only between −h and k
    assert gaussian_moment("relu", -1.0, 0.5, 1, 1, -1) == 0
    assert gaussian_moment("step", -1.0, 0.5, 1, 1, -1) == 0
    band = float(mpmath.ncdf(0.5) - mpmath.ncdf(-1.0))
    assert abs(float(gaussian_moment("step", 1.0, 0.5, 1, 1, -1)) / band - 1) < 1e-14


@pytest.mark.parametrize("name", activations.POINTWISE)
def test_u_and_v_may_be_exchanged(name, rng):
    means, stds, rho = (
        rng.normal(size=(2, 40)),
        rng.uniform(0.1, 2, (2, 40)),
        rng.uniform(-1, 1, 40),
    )
    one = gaussian_moment(name, *means, *stds, rho)
    other = gaussian_moment(name, *means[::-1], *stds[::-1], rho)
    np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize("name", activations.POINTWISE)
def test_a_zero_deviation_is_a_known_score(name, rng):
    mean = rng.normal(size=20)
    known = SIGMA[name](mean)
    np.testing.assert_allclose(
        gaussian_moment(name, mean, mean[::-1], 0, 0, 0.3), known * known[::-1], rtol=4 * EPS
    )
    # one known and one not: the product of σ(mean) and E σ(v)
    single = gaussian_moment(name, mean, 0.7, 0, 1.3, 0.0)
    limit = gaussian_moment(name, mean, 0.7, 1e-9, 1.3, 0.0)
    np.testing.assert_allclose(single, limit, rtol=1e-7, atol=1e-9)


def test_relu_of_both_signs_adds_up_to_the_covariance(rng):
    """E(u_+ − (−u)_+)(v_+ − (−v)_+) = E uv."""
    mean_u, mean_v = rng.normal(size=(2, 50)) * 2
    std_u, std_v, rho = rng.uniform(0.1, 2, 50), rng.uniform(0.1, 2, 50), rng.uniform(-1, 1, 50)
    total = 0.0
    for s in (1, -1):
        for t in (1, -1):
            total = total + s * t * gaussian_moment(
                "relu", s * mean_u, t * mean_v, std_u, std_v, s * t * rho
            )
    np.testing.assert_allclose(total, mean_u * mean_v + rho * std_u * std_v, rtol=1e-12, atol=1e-13)


def test_far_tails_underflow_to_zero_and_never_to_nan():
    means = np.array([-1e300, -1e8, -60.0, -41.0, 60.0, 1e8])
    rho = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])[:, None, None]
    for name in ("relu", "step"):
        values = gaussian_moment(name, means[:, None], means, 1.0, 1.0, rho)
        assert np.isfinite(values).all()
        assert (values >= 0).all()
    assert gaussian_moment("relu", 1e8, 1e8, 1.0, 1.0, -1.0) == 1e16 - 1
    assert np.isfinite(gaussian_moment("relu", 1.0, 1.0, 5e-324, 1.0, 0.5))


def test_arguments_broadcast():
    out = gaussian_moment("relu", np.zeros((3, 1)), np.zeros(4), 1, 2, 0.5)
    assert out.shape == (3, 4)
    assert gaussian_moment("relu", 0, 0, 1, 1, 0).shape == ()
    assert gaussian_moment("relu", np.zeros((0, 2)), 0, 1, 1, 0).shape == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 0, 1, 1, 1.1), r"`correlation` must lie in \[-1, 1\]: got 1.1"),
        ((0, 0, 1, 1, [0.5, -1.2, 1.1]), r"`correlation` must lie in \[-1, 1\]: got -1.2"),
        ((0, 0, 1, 1, -1.1), r"`correlation` must lie in \[-1, 1\]: got -1.1"),
        ((0, 0, -1, 1, 0.5), "`std_u` must be zero or larger: got -1"),
        ((0, 0, 1, [1, -2], 0.5), "`std_v` must be zero or larger: got -2"),
        ((np.nan, 0, 1, 1, 0.5), "`mean_u` must be finite"),
        ((0, np.inf, 1, 1, 0.5), "`mean_v` must be finite"),
    ],
)
def test_bad_moments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        gaussian_moment("relu", *arguments)


# --- the compiled tables, against forty digits ----------------------------------------------------


def test_arcs_are_accurate_to_their_last_digits(rng):
    from keyhole.attention.compiled_moments import relu_arc, step_arc

    gaps = np.concatenate([10.0 ** rng.uniform(-16, 0, 100), [0.0, 1.0]])
    with mpmath.workdps(40):
        for gap in gaps:
            for sign in (-1.0, 1.0):
                rho = sign * (1 - mpmath.mpf(gap))
                angle = mpmath.acos(rho)
                relu = (mpmath.sin(angle) + (mpmath.pi - angle) * rho) / (2 * mpmath.pi)
                step = (mpmath.pi - angle) / (2 * mpmath.pi)
                for ours, exact in (
                    (relu_arc(float(rho), gap), relu),
                    (step_arc(float(rho), gap), step),
                ):
                    assert abs(ours - exact) <= 8 * EPS * abs(exact) + 1e-38


def test_normal_parts_are_accurate_in_both_tails(rng):
    from keyhole.attention.compiled_moments import normal_parts

    points = np.concatenate(
        [rng.uniform(-37, 37, 80), rng.normal(size=40), [0.0, -37.0, 39.0, 41.0]]
    )
    with mpmath.workdps(
        400
    ):  # at −37 the textbook form of E(h+U)²_+ cancels three hundred digits less than it holds
        for h in points:
            x = mpmath.mpf(h)
            density, mass = mpmath.npdf(x), mpmath.erfc(-x / mpmath.sqrt(2)) / 2
            exact = (density, mass, x * mass + density, (1 + x * x) * mass + x * density)
            for ours, value in zip(normal_parts(h), exact, strict=True):
                if value > 1e-300:
                    assert abs(ours / value - 1) < 3e-13


def test_beyond_forty_deviations_nothing_is_left_of_a_tail():
    from keyhole.attention.compiled_moments import normal_parts

    assert normal_parts(-41.0) == (0.0, 0.0, 0.0, 0.0)
    assert normal_parts(41.0) == (0.0, 1.0, 41.0, 1.0 + 41.0**2)


def test_a_known_score_of_zero_is_not_positive():
    assert gaussian_moment("step", 0.0, 1.0, 0.0, 1.0, 0.0) == 0.0
    assert gaussian_moment("step", 1e-300, 1.0, 0.0, 0.0, 0.0) == 1.0


def test_vector_exp_agrees_with_libm(rng):
    from keyhole.attention.compiled_moments import EXP_HIGHEST, EXP_LOWEST, vector_exp

    points = np.concatenate(
        [rng.uniform(EXP_LOWEST, EXP_HIGHEST, 300), [EXP_LOWEST, EXP_HIGHEST, 0.0, -0.0, 1e-320]]
    )
    for x in points:
        assert abs(vector_exp(x) / np.exp(x) - 1) <= 2 * EPS


def test_moments_are_compiled_once_whatever_arrays_may_be_written():
    numbers = np.array([0.25, 0.5])
    frozen = numbers.copy()
    frozen.flags.writeable = False
    for array in (0.5, numbers, frozen, np.broadcast_to(0.5, 2)):
        for other in (0.5, numbers, frozen):
            gaussian_moment("linear", array, other, 1.0, other, array)
    assert len(fill_moments.signatures) == 1
    numbers[0] = 1.0  # the caller's array is his to write to
