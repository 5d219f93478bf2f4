"""The exact spectrum of the attention kernel against its integrals, its trace, and Gram
matrices.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import beta

from keyhole.attention.kernels import attention_kernel
from keyhole.textbook import arc_cosine
from keyhole.theory.harmonics import gegenbauer
from keyhole.theory.pairs import pair_eigenvalues
from keyhole.theory.spectrum import attention_spectrum, attention_trace
from keyhole.theory.targets import sphere_sets

LEVELS = 9


def pair_integral(dim, k, l):  # noqa: E741
    """μ_kl as the double integral that defines it, by Gauss–Legendre in the angles."""
    nodes, weights = np.polynomial.legendre.leggauss(400)
    angles, weights = math.pi / 2 * (nodes + 1), math.pi / 2 * weights
    weights = weights * np.sin(angles) ** (dim - 2) / beta(0.5, (dim - 1) / 2)
    cosines = np.cos(angles)
    zonal = np.array([gegenbauer(max(k, l), t, dim) for t in cosines])
    kernel = arc_cosine(np.outer(1 + cosines, 1 + cosines) / 4) * (1 + cosines)
    return float((weights * zonal[:, k]) @ kernel @ (weights * zonal[:, l]))


@pytest.mark.parametrize(
    ("dim", "k", "l"), [(2, 3, 2), (3, 0, 1), (3, 5, 4), (8, 2, 3), (16, 1, 1)]
)
def test_eigenvalues_are_their_integrals(dim, k, l):  # noqa: E741
    value = pair_eigenvalues(dim, 6)[k, l]
    assert math.isclose(value, pair_integral(dim, k, l), rel_tol=1e-9)
    # broken twin: the factor 1 + t of the pair kernel tells the key from the query
    assert k == l or not math.isclose(pair_eigenvalues(dim, 6)[l, k], value, rel_tol=0.05)


def test_values_of_the_specification():
    """d = N = 8. The specification's trace, 0.4121, is the sum of levels up to degree six."""
    spectrum = attention_spectrum(8, 8)
    listed = {
        tuple(degree): value
        for degree, value in zip(spectrum.degrees.tolist(), spectrum.eigenvalues, strict=True)
    }
    for degree, value in {
        (0, 0): 0.2373,
        (1, 0): 0.01054,
        (0, 1): 0.004735,
        (1, 1): 3.107e-4,
        (0, 2): 2.498e-4,
    }.items():
        assert math.isclose(listed[degree], value, rel_tol=5e-4)
    assert round(spectrum.trace, 4) == 0.4123
    six = attention_spectrum(8, 8, max_degree=6)
    assert round(six.trace - six.remainder, 4) == 0.4121


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 8, 64, 512])
def test_trace_is_the_mean_diagonal(dim):
    """E K(x,x) = 1/N + (1−1/N) E κ((1+t)/2)(1+t), by quadrature, to 1e-10."""
    if dim == 1:
        between = 0.5
    else:
        between, _ = quad(
            lambda a: (
                float(arc_cosine((1 + math.cos(a)) / 2))
                * (1 + math.cos(a))
                * math.sin(a) ** (dim - 2)
            ),
            0,
            math.pi,
            epsabs=1e-14,
            epsrel=1e-12,
            limit=200,
        )
        between /= beta(0.5, (dim - 1) / 2)
    for n_keys in (1, 7, 4096):
        want = 1 / n_keys + (1 - 1 / n_keys) * between
        assert abs(attention_trace(dim, n_keys) - want) < 1e-10


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_eigenvalues_add_up_to_the_trace(dim):
    """Σ N_k N_l μ_kl = 1: partial sums to degree K, and their own extrapolation in 1/K, reach it to
    1e-10.
    """
    degrees = np.array([64, 96, 128, 192, 256, 384, 512])
    values = pair_eigenvalues(dim, int(degrees[-1]))
    counts = np.array([attention_multiplicity(dim, k) for k in range(degrees[-1] + 1)])
    sums = [float(counts[: K + 1] @ values[: K + 1, : K + 1] @ counts[: K + 1]) for K in degrees]
    assert np.all(np.diff(sums) > 0)
    assert sums[-1] < 1
    # the tail is a series in 1/(K + d/2), beginning with the third power: the cusp (1−ρ)^{3/2} of κ
    x = 1 / (degrees + dim / 2)
    design = np.stack([np.ones_like(x), *(x**p for p in range(3, 3 + len(degrees) - 1))], axis=1)
    assert abs(np.linalg.solve(design, sums)[0] - 1) < 1e-10


def attention_multiplicity(dim, degree):
    return (
        1.0
        if degree == 0
        else (2 * degree + dim - 2) / degree * math.comb(degree + dim - 3, degree - 1)
    )


def expected_eigenvalues(spectrum, n):
    """Levels of a Gram matrix of n samples: second-order perturbation, λ (1 + (1/n) Σ_j
    λ_j/(λ−λ_j)).

    A sample's eigenvalues repel each other; the remainder lifts them all by its n-th part.
    """
    values, counts = spectrum.eigenvalues, spectrum.multiplicities
    expected = []
    for level in range(LEVELS):
        others = np.arange(len(values)) != level
        push = np.sum(counts[others] * values[others] / (values[level] - values[others]))
        expected.append(values[level] * (1 + push / n) + spectrum.remainder / n)
    return np.array(expected)


def empirical_levels(spectrum, dim, n_keys, n, seed):
    batch = sphere_sets(n, n_keys, dim, seed)
    values = np.linalg.eigvalsh(attention_kernel(batch) / n)[::-1]
    edges = np.concatenate([[0], np.cumsum(spectrum.multiplicities[:LEVELS])]).astype(int)
    return np.array([values[a:b].mean() for a, b in pairwise(edges)])


def standard_errors_off(dim, n_keys, n, draws, seed, scale_keys=True):
    spectrum = attention_spectrum(dim, n_keys, max_degree=16)
    levels = np.array(
        [empirical_levels(spectrum, dim, n_keys, n, 1000 * seed + i) for i in range(draws)]
    )
    standard_error = levels.std(axis=0, ddof=1) / math.sqrt(draws)
    expected = expected_eigenvalues(spectrum, n)
    if not scale_keys:
        expected = np.where(spectrum.degrees[:LEVELS, 1] > 0, n_keys * expected, expected)
    return np.abs(levels.mean(axis=0) - expected) / standard_error


# in these three the nine largest levels lie far enough apart for a sample to keep them in order
@pytest.mark.parametrize(("dim", "n_keys", "n"), [(2, 8, 300), (3, 1, 500), (4, 1, 500)])
def test_levels_of_gram_matrices(dim, n_keys, n, seed):
    # the standard error comes from ten draws itself: ten of it are as rare as five of a known one
    assert standard_errors_off(dim, n_keys, n, draws=10, seed=seed).max() < 10


def test_forgetting_the_number_of_keys_is_noticed(seed):
    """Broken twin: μ_kl instead of μ_kl/N."""
    assert standard_errors_off(2, 8, n=300, draws=6, seed=seed, scale_keys=False).max() > 20


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "n_keys"), [(2, 8), (3, 2), (4, 2)])
def test_levels_of_gram_matrices_of_3000_samples(dim, n_keys, seed):
    spectrum = attention_spectrum(dim, n_keys, max_degree=16)
    smaller = [empirical_levels(spectrum, dim, n_keys, 750, 1000 * seed + i) for i in range(10)]
    # the spread falls like n^{-1/2}
    standard_error = np.std(smaller, axis=0, ddof=1) / 2
    levels = empirical_levels(spectrum, dim, n_keys, 3000, 1000 * seed + 500)
    assert np.max(np.abs(levels - expected_eigenvalues(spectrum, 3000)) / standard_error) < 10
