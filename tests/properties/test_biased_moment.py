"""The moment of rectified Gaussians around any mean, and the kernels made of it, equal their double
integrals.
"""

import mpmath
import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.activations import gaussian_moment
from keyhole.textbook import relu_moment

ALLOWED = 1e-10  # relative, on the kernels
ALLOWED_PAIR = 1e-11  # relative, on a single pair, where the integral itself is good to 1e-13


def rule(edges, n_nodes):
    """Gauss–Legendre nodes and weights on consecutive intervals."""
    nodes, weights = np.polynomial.legendre.leggauss(n_nodes)
    widths = np.diff(edges)[:, None]
    return (edges[:-1, None] + widths * (nodes + 1) / 2).ravel(), (widths * weights / 2).ravel()


INNER_NODES, INNER_WEIGHTS = rule(np.array([0.0, 0.05, 0.15, 0.3, 0.5, 0.7, 1.0]), 12)


def double_integral(h, k, one_minus, one_plus, power=1):
    """E[(h+U)_+^p (k+V)_+^p], p = 1 or 0, by Gauss–Legendre in both variables.

    All terms are positive.

    With y = (h+U)/r and x = (k+V)/r the weight is exp(−(ry−h)²/2 − (x−w)²/2), w = (k−ρh)/r + ρy. It
    has four special places along y (zero, its two centres and the kink w = 0), around each of which
    the intervals shrink geometrically; along x the intervals follow the one peak there is.
    """
    rho, r = (one_plus - one_minus) / 2, np.sqrt(one_minus * one_plus)
    if rho > 0.5:
        start, centre = ((k - h) + h * one_minus) / r, ((h - k) + k * one_minus) / r
    elif rho < -0.5:
        start, centre = ((k + h) - h * one_plus) / r, ((h + k) - k * one_plus) / r
    else:
        start, centre = (k - rho * h) / r, (h - rho * k) / r
    end = (abs(h) + abs(k) + 12.0) / r
    steps = 2.0 ** np.arange(-9, np.ceil(np.log2(end)) + 1)
    places = np.array([0.0, centre, h / r, -start / rho if rho else 0.0])[:, None]
    edges = np.unique(
        np.clip(np.concatenate([places, places - steps, places + steps], axis=1), 0.0, end)
    )
    y, y_weights = rule(edges, 12)
    w = (start + rho * y)[:, None]
    low = np.maximum(-w, -11.0)
    width = np.where(w < 0, 120.0 / (np.abs(w) + np.sqrt(w * w + 120.0)), 11.0 - low)
    noise = low + width * INNER_NODES
    x = np.where(w < 0, width * INNER_NODES, w + noise)
    exponent = -0.5 * ((r * y - h) ** 2)[:, None] - 0.5 * noise**2
    top = exponent.max()
    weights = y_weights[:, None] * width * INNER_WEIGHTS * (x * y[:, None]) ** power
    return float(
        (weights * np.exp(exponent - top)).sum() * np.exp(top) * r ** (2 * power + 1) / (2 * np.pi)
    )


def random_pair(rng):
    """A mean, another and a correlation, biased towards every corner: tails, ρ near ±1 and 0, h
    near ±k.
    """
    h, k = rng.normal(size=2) * rng.choice([0.5, 1.0, 3.0, 10.0, 25.0])
    gap = 10.0 ** rng.uniform(-15.5, 0.0)
    corner = rng.integers(6)
    if corner == 0:
        return h, k, rng.uniform(-1, 1)
    if corner in (1, 2):
        sign = 1.0 if corner == 1 else -1.0
        return h, k, sign * (1 - gap)
    if corner in (3, 4):
        sign = 1.0 if corner == 3 else -1.0
        return (
            h,
            sign * h + np.sqrt(gap) * rng.normal() * rng.choice([0.1, 1.0, 10.0]),
            sign * (1 - gap),
        )
    return h, k, rng.choice([-1.0, 1.0]) * gap


def worst_error(moments, pairs, power):
    """The largest relative error over pairs whose moment does not underflow."""
    worst = 0.0
    for value, (h, k, rho) in zip(moments, pairs, strict=True):
        reference = double_integral(h, k, 1 - rho, 1 + rho, power)
        if reference > 1e-290:
            worst = max(worst, abs(value / reference - 1))
    return worst


@pytest.mark.parametrize(("activation", "power"), [("relu", 1), ("step", 0)])
def test_the_moment_is_its_double_integral(activation, power, rng):
    pairs = [random_pair(rng) for _ in range(150)]
    h, k, rho = np.array(pairs).T
    assert (
        worst_error(gaussian_moment(activation, h, k, 1.0, 1.0, rho), pairs, power) < ALLOWED_PAIR
    )


@pytest.mark.parametrize("h", [-37.0, -12.0, -1.0, 0.0, 0.3, 8.0, 40.0])
@pytest.mark.parametrize("k", [-30.0, -3.0, 0.0, 2.0, 10.0])
def test_the_moment_holds_on_a_grid_that_touches_the_branches(h, k):
    rho = [-1 + 1e-12, -0.999, -0.6, -0.2, -1e-9, 0.0, 1e-9, 0.5, 0.8, 0.99, 1 - 1e-6, 1 - 1e-14]
    pairs = [(h, k, value) for value in rho]
    for activation, power in (("relu", 1), ("step", 0)):
        assert (
            worst_error(gaussian_moment(activation, h, k, 1.0, 1.0, rho), pairs, power)
            < ALLOWED_PAIR
        )


def test_the_printed_closed_form_agrees_where_it_is_stable(rng):
    h, k, rho = rng.uniform(-0.9, 0.9, (3, 20))
    expected = gaussian_moment("relu", h, k, 1.0, 1.0, rho)
    np.testing.assert_allclose(relu_moment(h, k, rho), expected, rtol=1e-12)


def test_a_draw_of_pairs_has_the_moment(rng):
    h, k, rho = rng.normal(), rng.normal(), rng.uniform(-0.95, 0.95)
    u = rng.normal(size=400_000)
    v = rho * u + np.sqrt(1 - rho**2) * rng.normal(size=u.size)
    draws = np.maximum(h + u, 0) * np.maximum(k + v, 0)
    error = draws.std() / np.sqrt(draws.size)
    off = abs(draws.mean() - float(gaussian_moment("relu", h, k, 1.0, 1.0, rho))) / error
    assert off < 5, f"off by {off:.1f} standard errors, 5 allowed"


# --- kernels --------------------------------------------------------------------------------------


def exact_kernel(sets, distribution):
    """K by double integrals over correlations known to 40 digits, so that 1 ∓ ρ is right for
    near-duplicates.
    """
    mean, scale = distribution.moments(sets.dim)
    mean = np.zeros((sets.dim + 1, sets.dim + 1)) if mean is None else mean
    with mpmath.workdps(40):
        parts = [exact_set(sets[i], mpmath.matrix(mean.tolist())) for i in range(len(sets))]
        out = np.empty((len(sets), len(sets)))
        for i, (query, keys) in enumerate(parts):
            for j, (other_query, other_keys) in enumerate(parts):
                total = mpmath.fsum(
                    exact_term(query, key, other_query, other_key, scale)
                    for key in keys
                    for other_key in other_keys
                )
                out[i, j] = total / (len(keys) * len(other_keys))
    return out


def exact_set(one, mean):
    """The query and its length, and each key with its length and mean score, in 40 digits."""
    query = mpmath.matrix([*one.query[0].tolist(), 1]) if one.query is not None else None
    if query is None:
        query = mpmath.matrix([0] * one.dim + [mpmath.sqrt(2)])
    pulled = query.T * mean
    keys = [mpmath.matrix(key) for key in one.extended_keys().tolist()]
    return (query, mpmath.norm(query)), [(key, mpmath.norm(key), (pulled * key)[0]) for key in keys]


def exact_term(query, key, other_query, other_key, scale):
    (x0, x0_length), (x, x_length, mean) = query, key
    (y0, y0_length), (y, y_length, other_mean) = other_query, other_key
    inner = (x.T * y)[0]
    rho = (x0.T * y0)[0] * inner / (x0_length * y0_length * x_length * y_length)
    std, other_std = scale * x0_length * x_length, scale * y0_length * y_length
    h, k = float(mean / std), float(other_mean / other_std)
    if min(h, k) < -40:
        return mpmath.mpf(0)
    gap = min(1 - rho, 1 + rho)
    if (
        gap < mpmath.mpf(10) ** -34
    ):  # the same key and query, or the opposite: no double integral left
        return std * other_std * inner * single_integral(h, k, rho > 0)
    return std * other_std * inner * double_integral(h, k, float(1 - rho), float(1 + rho))


def single_integral(h, k, same):
    """E(h+U)_+(k±U)_+."""
    low, high = (-min(h, k), max(-min(h, k), 0.0) + 12.0) if same else (-h, k)
    if high <= low:
        return 0.0
    z, weights = rule(np.linspace(low, high, 40), 12)
    return float(
        (weights * (h + z) * (k + (z if same else -z)) * np.exp(-z * z / 2)).sum()
        / np.sqrt(2 * np.pi)
    )


def relative_error(sets, distribution):
    reference = exact_kernel(sets, distribution)
    visible = np.abs(reference) > 1e-290
    assert visible.any()
    kernel = kh.attention_kernel(sets, heads=distribution)
    return np.max(np.abs(kernel - reference)[visible] / np.abs(reference)[visible])


def random_heads(rng, dim):
    """A mean of strength up to 10, of the identity's form or any, and a scale between 0.05
    and 2.
    """
    scale = 10.0 ** rng.uniform(np.log10(0.05), np.log10(2.0))
    strength = 10.0 ** rng.uniform(-1, 1)
    if rng.random() < 0.5:
        return kh.GaussianHeads(mean=strength * rng.choice([-1.0, 1.0]), scale=scale)
    return kh.GaussianHeads(
        mean=strength * rng.normal(size=(dim + 1, dim + 1)) / np.sqrt(dim + 1), scale=scale
    )


def tokens(rng, length):
    """Two sets of two keys in three dimensions, and their queries."""
    keys, query = rng.normal(size=(2, 2, 3)), rng.normal(size=(2, 3))
    return keys * length / np.sqrt(3), query * length / np.sqrt(3)


@pytest.mark.parametrize("length", [0.0, 0.1, 1.0, 10.0, 1e3])
def test_the_kernel_is_its_double_integral(length, rng):
    keys, query = tokens(rng, length)
    for given in (query, None):
        distribution = random_heads(rng, 3)
        assert relative_error(kh.SetBatch(keys, given), distribution) < ALLOWED, distribution


@pytest.mark.parametrize("distance", [1e-3, 1e-5, 1e-7, 1e-9, 1e-12])
def test_near_duplicates_keep_their_digits(distance, rng):
    keys, query = tokens(rng, 1.0)
    near = (
        keys[:1] + distance * rng.normal(size=(1, 2, 3)),
        query[:1] + distance * rng.normal(size=(1, 3)),
    )
    sets = kh.SetBatch(np.concatenate([keys[:1], near[0]]), np.concatenate([query[:1], near[1]]))
    for _ in range(2):
        distribution = random_heads(rng, 3)
        assert relative_error(sets, distribution) < ALLOWED, distribution


def test_opposite_keys_keep_their_digits(rng):
    keys, query = tokens(rng, 100.0)
    sets = kh.SetBatch(np.concatenate([keys[:1, :1], -keys[:1, :1]]), query)
    assert relative_error(sets, kh.GaussianHeads()) < ALLOWED
    assert relative_error(sets, kh.GaussianHeads(mean=0.3)) < ALLOWED


def test_a_moment_off_by_a_part_in_a_billion_is_caught(rng):
    """The broken twin: a kernel whose correlations are rounded to single precision."""
    keys, query = tokens(rng, 1.0)
    distribution = kh.GaussianHeads(mean=1.0)
    exact = exact_kernel(kh.SetBatch(keys, query), distribution)
    rounded = kh.attention_kernel(
        kh.SetBatch(keys.astype(np.float32), query.astype(np.float32)), heads=distribution
    )
    assert np.max(np.abs(rounded / exact - 1)) > ALLOWED


def test_a_wrong_sign_in_the_closed_form_is_caught(rng):
    h, k, rho = rng.uniform(0.2, 0.9, 3)
    phi2 = float(gaussian_moment("step", h, k, 1.0, 1.0, rho))
    broken = relu_moment(h, k, rho) - 2 * rho * phi2  # (hk − ρ) Φ₂
    assert abs(broken / double_integral(h, k, 1 - rho, 1 + rho) - 1) > ALLOWED_PAIR
