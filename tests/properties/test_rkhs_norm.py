"""yᵀK⁻¹y rises to the exact norm from below; the norm never exceeds the bound with named
constants.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.linalg import cholesky, solve_triangular

from keyhole.attention.kernels import attention_kernel
from keyhole.theory.complexity import (
    kernel_coefficient,
    paper_complexity,
    rkhs_norm,
    rkhs_norm_bound,
)
from keyhole.theory.targets import (
    Correlation,
    QueryPower,
    RotatedCorrelation,
    TokenPower,
    monomial,
    sphere_sets,
)


def families(dim):
    return [
        QueryPower(1, dim),
        QueryPower(2, dim),
        TokenPower(1, dim),
        TokenPower(2, dim),
        TokenPower(3, dim),
        Correlation(1, dim),
        Correlation(2, dim),
        RotatedCorrelation(0.3, dim, seed=0),
    ]


def interpolation_norms(targets, dim, sizes, seed, n_keys=1):
    """yᵀK⁻¹y for every target at growing n; the jitter of 1e-13 can only lower it."""
    n = max(sizes)
    batch = sphere_sets(n, n_keys, dim, seed)
    factor = cholesky(attention_kernel(batch) + 1e-13 * np.eye(n), lower=True)
    found = []
    for target in targets:
        # forward substitution nests: the first n entries belong to the first n samples
        squares = np.cumsum(solve_triangular(factor, target(batch), lower=True) ** 2)
        found.append([float(squares[size - 1]) for size in sizes])
    return found


def check_convergence(dim, sizes, seed, scale=1.0):
    """Return how many targets had converged; each of them must be within three percent of scale ×
    norm.
    """
    converged = 0
    targets = families(dim)
    for target, values in zip(targets, interpolation_norms(targets, dim, sizes, seed), strict=True):
        norm = scale * rkhs_norm(target)
        assert all(a <= b for a, b in pairwise(values))
        assert values[-1] <= norm * (1 + 1e-6), (
            f"{target} interpolates at {values[-1]}, above its norm {norm}"
        )
        if (
            values[-1] - values[-2] < 0.03 * values[-1]
        ):  # doubling n moved it by less than three percent
            converged += 1
            assert values[-1] > 0.97 * norm, (
                f"{target} has converged to {values[-1]}, not to {norm}"
            )
    return converged


@pytest.mark.parametrize(("dim", "at_least"), [(2, 7), (3, 5), (4, 4)])
def test_interpolation_rises_to_the_norm(dim, at_least, seed):
    assert check_convergence(dim, (250, 500, 1000), seed) >= at_least


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "at_least"), [(2, 8), (3, 7), (4, 6)])
def test_interpolation_of_2000_samples_rises_to_the_norm(dim, at_least, seed):
    assert check_convergence(dim, (250, 500, 1000, 2000), seed) >= at_least


@pytest.mark.parametrize("scale", [0.9, 1.1])
def test_a_wrong_norm_is_noticed(scale, seed):
    """Broken twin: ten percent less is exceeded, ten percent more is not reached."""
    with pytest.raises(AssertionError):
        check_convergence(2, (250, 500), seed, scale)


def test_norm_does_not_depend_on_the_number_of_keys(seed):
    target = TokenPower(1, 2)
    ((one,), (four,)) = (
        interpolation_norms([target], 2, (400,), seed, n_keys)[0] for n_keys in (1, 4)
    )
    assert math.isclose(one, rkhs_norm(target), rel_tol=0.01)
    assert math.isclose(four, rkhs_norm(target), rel_tol=0.05)


def test_on_the_line_the_norm_is_reached_exactly(seed):
    """d = 1 has four functions of (x_0, x_i): finitely many samples are enough."""
    batch = sphere_sets(50, 1, 1, seed)
    gram = attention_kernel(batch)
    for target in families(1):
        y = target(batch)
        value = float(y @ np.linalg.lstsq(gram, y, rcond=1e-10)[0])
        assert math.isclose(value, rkhs_norm(target), rel_tol=1e-9)


def test_values_of_the_specification():
    assert round(rkhs_norm(TokenPower(1, 3)), 4) == 3.2339
    assert round(rkhs_norm(Correlation(1, 3)), 3) == 18.489
    assert round(rkhs_norm_bound(TokenPower(1, 3)), 4) == 3.3421
    assert round(rkhs_norm_bound(Correlation(1, 3)), 3) == 21.403
    wanted = {(0, 0): 0.226655, (0, 1): 0.299209, (1, 0): 0.0725538, (1, 2): 0.0934431}
    for (r, s), value in wanted.items():
        assert math.isclose(kernel_coefficient(r, s), value, rel_tol=2e-6)


@pytest.mark.parametrize("dim", [1, 2, 3, 8, 64, 512])
def test_bound_is_never_below_the_norm(dim, rng):
    b, g = rng.standard_normal((2, dim)) / math.sqrt(dim)
    others = [
        monomial(dim, 1.0, [(None, 1)], [(b, 2)], [(g, 1)])
        + TokenPower(2, dim)
        - 3 * QueryPower(1, dim)
    ]
    for target in [
        *families(dim),
        *others,
        QueryPower(0, dim),
        TokenPower(7, dim),
        Correlation(6, dim),
    ]:
        assert rkhs_norm(target) <= rkhs_norm_bound(target) * (1 + 1e-9)


def test_paper_complexity_against_the_bound():
    """B ÷ bound over the families: it does not depend on d, and is below one only where C_1 = 4 <
    1/b_10.
    """
    ratios = {}
    for dim in (4, 64):
        for target in (
            QueryPower(1, dim),
            TokenPower(1, dim),
            TokenPower(2, dim),
            Correlation(1, dim),
            Correlation(3, dim),
        ):
            ratio = paper_complexity(target) / rkhs_norm_bound(target)
            name = repr(target).split(",")[0]
            assert math.isclose(ratios.setdefault(name, ratio), ratio, rel_tol=1e-9)
    rounded = [round(value, 2) for value in ratios.values()]
    assert rounded == [0.29, 1.2, 28.13, 33.83, 127.82]
