"""The exact spectrum of the MLP kernel on a product of spheres, by quadrature and Gram matrices."""

import math

import numpy as np
import pytest
from scipy.special import roots_jacobi

from keyhole.attention.kernels import mlp_kernel
from keyhole.textbook import arc_cosine
from keyhole.theory import mlp
from keyhole.theory.complexity import mlp_norm, rkhs_norm
from keyhole.theory.harmonics import gegenbauer
from keyhole.theory.mlp import mlp_eigenvalue, mlp_spectrum
from keyhole.theory.targets import Correlation, TokenPower, sphere_sets


def by_quadrature(dim, n_keys, parts):
    """E[κ((1+Σt)/(N+2)) Π P_{l_i}(t_i)] on a grid of Gauss–Jacobi nodes per token."""
    tokens = n_keys + 1
    nodes, weights = roots_jacobi({2: 300, 3: 60}[tokens], (dim - 3) / 2, (dim - 3) / 2)
    weights = weights / weights.sum()
    zonal = np.array([gegenbauer(max(parts, default=0), t, dim) for t in nodes])
    total = np.ones((1,) * tokens)
    kernel_argument = 1.0
    for axis in range(tokens):
        shape = [1] * tokens
        shape[axis] = len(nodes)
        degree = parts[axis] if axis < len(parts) else 0
        total = total * (weights * zonal[:, degree]).reshape(shape)
        kernel_argument = kernel_argument + nodes.reshape(shape)
    return float(np.sum(total * arc_cosine(kernel_argument / (tokens + 1))))


@pytest.mark.parametrize("dim", [2, 3, 5, 8])
@pytest.mark.parametrize("parts", [(), (1,), (1, 1), (2,), (3, 2)])
def test_eigenvalues_are_their_integrals(dim, parts):
    for n_keys in (1, 2):
        got, want = mlp_eigenvalue(dim, n_keys, parts), by_quadrature(dim, n_keys, parts)
        # the quadrature of three tokens on the circle is good to eight digits
        assert math.isclose(got, want, rel_tol=1e-10 if n_keys == 1 or dim > 2 else 1e-7)


def test_a_product_of_spheres_is_not_a_sphere():
    """Broken twin: on one sphere all functions of degree two would share an eigenvalue."""
    assert not math.isclose(mlp_eigenvalue(4, 3, (2,)), mlp_eigenvalue(4, 3, (1, 1)), rel_tol=0.1)


@pytest.mark.parametrize(("dim", "n_keys"), [(1, 1), (1, 4), (1, 8)])
def test_signs_have_a_finite_spectrum_that_adds_up_to_the_trace(dim, n_keys):
    spectrum = mlp_spectrum(dim, n_keys, max_degree=n_keys + 1)
    assert spectrum.multiplicities.sum() == 2 ** (n_keys + 1)
    assert abs(spectrum.eigenvalues @ spectrum.multiplicities - 0.5) < 1e-10


def test_mass_by_total_degree_is_that_of_the_power_series():
    """At large d and N the degree-m levels hold a_m of the trace: 1/2π, 1/4, 1/4π."""
    spectrum = mlp_spectrum(512, 4096, max_degree=4)
    mass = np.bincount(
        spectrum.degrees.sum(axis=1), weights=spectrum.eigenvalues * spectrum.multiplicities
    )
    np.testing.assert_allclose(mass[:3], [1 / (2 * math.pi), 0.25, 1 / (4 * math.pi)], rtol=2e-3)


def test_levels_of_gram_matrices(seed):
    dim, n_keys, n, draws = 4, 2, 500, 10
    spectrum = mlp_spectrum(dim, n_keys, max_degree=6)
    assert spectrum.degrees[:2].tolist() == [[0, 0, 0], [1, 0, 0]]
    counts = spectrum.multiplicities[:2].astype(int)
    found = []
    for i in range(draws):
        batch = sphere_sets(n, n_keys, dim, 1000 * seed + i)
        values = np.linalg.eigvalsh(mlp_kernel(batch) / n)[::-1]
        found.append([values[0], values[1 : 1 + counts[1]].mean()])
    expected = []
    for level in range(2):
        others = np.arange(len(spectrum.eigenvalues)) != level
        value, rest = spectrum.eigenvalues[level], spectrum.eigenvalues[others]
        push = np.sum(spectrum.multiplicities[others] * rest / (value - rest))
        expected.append(value * (1 + push / n) + spectrum.remainder / n)
    standard_error = np.std(found, axis=0, ddof=1) / math.sqrt(draws)
    assert np.max(np.abs(np.mean(found, axis=0) - expected) / standard_error) < 10


def test_norm_is_the_limit_of_interpolation(seed):
    """yᵀK⁻¹y rises to the MLP norm from below."""
    for target in (TokenPower(1, 2), Correlation(1, 2)):
        batch = sphere_sets(800, 1, 2, seed)
        gram, y = mlp_kernel(batch) + 1e-12 * np.eye(800), target(batch)
        values = [float(y[:n] @ np.linalg.solve(gram[:n, :n], y[:n])) for n in (200, 800)]
        assert values[0] <= values[1] <= mlp_norm(target, 1) * (1 + 1e-6)
        assert values[1] > 0.97 * mlp_norm(target, 1)
        assert not math.isclose(values[1], rkhs_norm(target), rel_tol=0.1)


def test_series_of_tokens_are_multiplied_to_their_last_term():
    """e^{z/(N+2)} B_0^idle and Π B_l by repeated squaring and by parts, against one factor after
    the other.
    """
    dim, n_keys, order = 2, 97, 40
    alone = [mlp._token_series(dim, n_keys, degree, order) for degree in range(4)]
    product = (mlp._SCALE / (n_keys + 2)) ** np.arange(41.0) / np.array(
        [math.factorial(n) for n in range(41)], float
    )
    np.testing.assert_allclose(mlp._idle_series(dim, n_keys, 0, order), product, rtol=1e-9)
    for idle in range(1, 7):
        product = np.convolve(product, alone[0])[:41]
        np.testing.assert_allclose(mlp._idle_series(dim, n_keys, idle, order), product, rtol=1e-9)
    busy = np.convolve(np.convolve(alone[3], alone[1])[:41], alone[1])[:41]
    np.testing.assert_allclose(mlp._busy_series(dim, n_keys, (3, 1, 1), order), busy, rtol=1e-9)


@pytest.mark.parametrize(("dim", "n_keys"), [(2, 1), (2, 3), (3, 2), (8, 8), (40, 100)])
def test_eigenvalues_end_where_further_terms_do_not_matter(dim, n_keys):
    """The sum that stops early, against all of its terms."""
    for parts in ((), (1,), (2, 1), (4,), (250,)):
        terms = mlp._series_terms(dim, n_keys, parts, order=1600)
        total = terms.sum() + mlp._sum_beyond(terms, 2.5 + (n_keys + 1) * (dim - 1) / 2)
        assert math.isclose(mlp.mlp_eigenvalue(dim, n_keys, parts), total, rel_tol=1e-14)
