import math

import numpy as np
import pytest

from keyhole.theory.blocks import Bias
from keyhole.theory.harmonics import gegenbauer, harmonic_count, power_moment
from keyhole.theory.mlp import MAX_LEVELS, highest_total_degree, mlp_levels, mlp_spectrum
from keyhole.theory.moments import (
    log_gamma_ratio,
    series_coefficients,
    tail_nodes,
)
from keyhole.theory.pairs import pair_eigenvalues
from keyhole.theory.spectrum import attention_spectrum, degree_ladder


@pytest.mark.parametrize(
    "build", [lambda: attention_spectrum(3, 4, 6), lambda: mlp_spectrum(3, 4, 6)]
)
def test_levels_are_sorted_and_of_one_length(build):
    spectrum = build()
    levels = len(spectrum.eigenvalues)
    assert spectrum.multiplicities.shape == (levels,)
    assert spectrum.degrees.shape[0] == levels
    assert np.all(np.diff(spectrum.eigenvalues) <= 0)
    assert np.all(spectrum.eigenvalues > 0)
    assert spectrum.remainder > 0
    assert "levels from" in repr(spectrum)
    with pytest.raises(ValueError, match="read-only"):
        spectrum.eigenvalues[0] = 1.0


def test_degree_zero_is_the_constant_alone():
    for spectrum in (attention_spectrum(3, 4, 0), mlp_spectrum(3, 4, 0)):
        assert spectrum.multiplicities.tolist() == [1.0]
        assert not spectrum.degrees.any()


def test_adaptive_spectra_meet_their_tolerance():
    for dim in (2, 8, 512):
        spectrum = attention_spectrum(dim, 8)
        assert spectrum.remainder <= 1e-4 * spectrum.trace
        assert mlp_spectrum(dim, 8).remainder <= 0.05 * 0.5


def test_tolerances_out_of_reach_are_refused():
    with pytest.raises(ValueError, match=r"degree 32 leaves .* of the trace"):
        mlp_spectrum(8, 1, tolerance=1e-9)
    with pytest.raises(ValueError, match="`tolerance` must be larger than 0"):
        attention_spectrum(8, 8, tolerance=0.0)


def test_dimension_one_has_four_eigenfunctions():
    spectrum = attention_spectrum(1, 3)
    assert spectrum.degrees.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert spectrum.multiplicities.tolist() == [1, 1, 1, 1]
    assert math.isclose(spectrum.eigenvalues.sum(), spectrum.trace, rel_tol=1e-14)


def test_one_key():
    """With N = 1 nothing is divided: the levels are the pair eigenvalues."""
    spectrum = attention_spectrum(3, 1, 2)
    values = pair_eigenvalues(3, 2)
    for (k, l), value in zip(spectrum.degrees, spectrum.eigenvalues, strict=True):  # noqa: E741
        assert value == values[k, l]
    assert spectrum.trace == 1.0


def test_multiplicities_are_exact_until_floats_end():
    assert attention_spectrum(512, 4096, 8).multiplicities.max() == float(
        harmonic_count(512, 8) ** 2
    )
    assert mlp_spectrum(512, 4096, 2).multiplicities.tolist()[:2] == [1.0, 4097.0 * 512.0]
    with pytest.raises(
        ValueError, match=r"in dimension 512 the number of harmonics of degree \d+ has 15\d digits"
    ):
        attention_spectrum(512, 8, 400)


def test_huge_degree_is_accurate_on_the_sphere():
    """Eigenvalues do not depend on how many are asked for, at 1e-12 relative."""
    few, many = pair_eigenvalues(3, 20), pair_eigenvalues(3, 600)
    np.testing.assert_allclose(few, many[:21, :21], rtol=1e-12)
    assert np.all(np.diff(many, axis=0) < 0)
    assert np.all(many > 0)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="`dim` must be at least 1: got 0"):
        attention_spectrum(0, 1)
    with pytest.raises(ValueError, match="`n_keys` must be at least 1"):
        mlp_spectrum(2, 0)
    with pytest.raises(ValueError, match=r"total degree over tokens, at most 16 .*got 40"):
        mlp_spectrum(8, 8, max_degree=40)


def test_partitions_are_counted_right():
    assert len(mlp_levels(8, 100, 6)) == sum((1, 1, 2, 3, 5, 7, 11))
    assert len(mlp_levels(8, 1, 6)) == sum(m // 2 + 1 for m in range(7))  # at most two parts
    assert mlp_levels(1, 2, 6) == [(), (1,), (1, 1), (1, 1, 1)]
    assert highest_total_degree(8, 8) == 16
    highest = {n_keys: highest_total_degree(8, n_keys) for n_keys in (3, 4, 6)}
    assert {degree % 2 for degree in highest.values()} == {0, 1}
    for n_keys, degree in highest.items():
        assert len(mlp_levels(8, n_keys, degree)) <= MAX_LEVELS
        assert len(mlp_levels(8, n_keys, degree + 1)) > MAX_LEVELS


def test_harmonics_are_counted_right():
    assert [harmonic_count(4, k) for k in range(5)] == [(k + 1) ** 2 for k in range(5)]
    assert [harmonic_count(2, k) for k in range(4)] == [1, 2, 2, 2]
    assert harmonic_count(512, 1) == 512


def test_power_moments_are_gegenbauer_coefficients(rng):
    """t^p = Σ_k N_k m_pk P_k(t)."""
    for dim in (2, 3, 7):
        t, p = float(rng.uniform(-1, 1)), 7
        zonal = gegenbauer(p, t, dim)
        total = sum(
            harmonic_count(dim, k) * power_moment(p, k, dim) * zonal[k] for k in range(p + 1)
        )
        assert math.isclose(total, t**p, rel_tol=1e-9, abs_tol=1e-12)


def test_log_gamma_ratio_is_exact_for_whole_shifts():
    x = np.array([0.5, 3.0, 29.5, 1e3, 1e8])
    for shift in (1, 3):
        want = -sum(np.log(x + i) for i in range(shift))
        np.testing.assert_allclose(log_gamma_ratio(x, float(shift)), want, rtol=1e-13)


def test_tail_nodes_sum_what_they_promise():
    """Σ_{m≥0} (200+2m)^{−7/2} against two million terms and an integral for the rest."""
    nodes, weights = tail_nodes(200)
    last = 4_000_000
    brute = np.sum(np.arange(200.0, last, 2) ** -3.5) + (last - 1.0) ** -2.5 / 5
    assert math.isclose(float(weights @ nodes**-3.5), brute, rel_tol=1e-12)


def test_series_coefficients_sum_to_one_half():
    """κ(1) = 1/2."""
    nodes, weights = tail_nodes(200)
    order = np.concatenate([[0.0, 1.0], np.arange(2.0, 200, 2)])
    total = series_coefficients(order).sum() + weights @ series_coefficients(nodes)
    assert math.isclose(float(total), 0.5, rel_tol=1e-13)


def test_the_spectrum_of_long_wide_sets():
    spectrum = attention_spectrum(512, 4096, 32)
    assert (spectrum.eigenvalues > 0).all()
    assert spectrum.eigenvalues @ spectrum.multiplicities <= spectrum.trace * (1 + 1e-9)


def test_ever_finer_spectra_double_their_degree():
    assert list(degree_ladder(Bias())) == [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert list(degree_ladder(Bias(), 100)) == [128, 256, 512, 1024]


def test_tokens_of_one_coordinate_have_a_table_like_any_other():
    assert pair_eigenvalues(1, 3).shape == pair_eigenvalues(2, 3).shape == (4, 4)
