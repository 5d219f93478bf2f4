import math
from types import SimpleNamespace

import numpy as np
import pytest

from keyhole.attention.heads import GaussianHeads
from keyhole.theory import complexity
from keyhole.theory.complexity import (
    kernel_coefficient,
    mlp_norm,
    paper_complexity,
    rkhs_norm,
    rkhs_norm_bound,
)
from keyhole.theory.targets import (
    Correlation,
    Polynomial,
    QueryPower,
    RotatedCorrelation,
    TokenPower,
    monomial,
)


def test_constants_of_the_paper():
    """C_k = max(k^4.5 4^k, 1): one for a constant, four for a linear function."""
    assert paper_complexity(QueryPower(0, 5)) == 1.0
    assert paper_complexity(2 * TokenPower(1, 5)) == 16.0
    assert math.isclose(paper_complexity(TokenPower(3, 5)), 3**4.5 * 64)
    assert math.isclose(
        paper_complexity(Correlation(1, 5) + TokenPower(2, 5)), 2**4.5 * 16 * (3 + 1)
    )


@pytest.mark.parametrize("function", [paper_complexity, rkhs_norm_bound, rkhs_norm])
def test_complexities_are_quadratic(function):
    target = Correlation(2, 4) + TokenPower(1, 4)
    assert math.isclose(function(3 * target), 9 * function(target), rel_tol=1e-12)
    assert function(target - target) == 0.0


def test_kernel_coefficients_are_those_of_the_pair_kernel(rng):
    """Σ_rs b_rs u^r t^s = κ((1+u)(1+t)/4)(1+t)."""
    u, t = rng.uniform(-0.3, 0.3, 2)
    table = np.array([[kernel_coefficient(r, s) for s in range(25)] for r in range(25)])
    total = float(u ** np.arange(25) @ table @ t ** np.arange(25))
    rho = (1 + u) * (1 + t) / 4
    kappa = (math.sqrt(1 - rho**2) + (math.pi - math.acos(rho)) * rho) / (2 * math.pi)
    assert math.isclose(total, kappa * (1 + t), rel_tol=1e-9)


def test_degree_zero():
    """The constant 1 has power one in (0, 0)."""
    one = QueryPower(0, 8)
    assert math.isclose(rkhs_norm(one), 1 / 0.23728382243908586, rel_tol=1e-12)
    assert math.isclose(rkhs_norm_bound(one), 1 / kernel_coefficient(0, 0))
    assert TokenPower(0, 8) == one


def test_huge_degrees_give_a_number_or_say_what_to_do():
    assert 0 < rkhs_norm(TokenPower(400, 8)) < rkhs_norm_bound(TokenPower(400, 8)) < math.inf
    with pytest.raises(ValueError, match=r"eigenvalues below 1e-290.*rkhs_norm_bound"):
        rkhs_norm(TokenPower(400, 512))
    with pytest.raises(ValueError, match=r"MLP norm.*eigenvalues below 1e-290"):
        mlp_norm(TokenPower(100, 512), 4096)


def test_a_rotation_does_not_change_the_norm():
    """Zero-mean heads are as good at a rotated correlation as at a plain one, up to its scale."""
    gamma = 0.7
    scale = ((1 - gamma) ** 2 + gamma**2) ** 3
    assert math.isclose(
        rkhs_norm(RotatedCorrelation(gamma, 6, seed=3)),
        scale * rkhs_norm(Correlation(3, 6)),
        rel_tol=1e-9,
    )
    assert math.isclose(
        rkhs_norm(RotatedCorrelation(1.0, 7, seed=3)), rkhs_norm(Correlation(3, 7)), rel_tol=1e-9
    )


def test_mlp_norm_grows_with_the_keys_and_attention_does_not():
    target = TokenPower(2, 8)
    norms = [mlp_norm(target, n_keys) for n_keys in (4, 16, 64)]
    assert norms[0] < norms[1] < norms[2]
    assert rkhs_norm(target) < norms[0]


def test_a_function_of_the_query_is_as_easy_with_many_keys_for_attention():
    assert (
        rkhs_norm(QueryPower(1, 8)) < mlp_norm(QueryPower(1, 8), 8) < mlp_norm(QueryPower(1, 8), 64)
    )


def test_general_polynomials_have_norms_too(rng):
    A, b, g = rng.standard_normal((5, 5)), rng.standard_normal(5), rng.standard_normal(5)
    target = monomial(5, 1.0, [(A, 1), (None, 1)], [(b, 1)], [(g, 2)]) + Polynomial(
        5, Correlation(1, 5).terms
    )
    assert 0 < rkhs_norm(target) < rkhs_norm_bound(target)


@pytest.fixture
def norms_by_degree(monkeypatch):
    """Let the norm of biased heads be any function of the degree D of its blocks."""

    def pretend(norm, smallest=1.0):
        def single_block(dim, bias, label, degree):
            assert bias.gain == 1.0
            return SimpleNamespace(inverse_form=lambda vectors: 4 * norm(degree))

        monkeypatch.setattr(complexity, "single_block", single_block)
        monkeypatch.setattr(
            complexity, "target_vectors", lambda target, degree: {(0, 0): np.zeros((1, 1))}
        )
        monkeypatch.setattr(
            complexity, "pair_eigenvalues", lambda dim, degree: smallest * np.eye(degree + 1)
        )
        return rkhs_norm(
            TokenPower(1, 4), GaussianHeads(mean=1.0, scale=1.0)
        )  # the scale divides by 4

    return pretend


def test_a_norm_that_rises_geometrically_is_continued_to_its_limit(norms_by_degree):
    """Two rises of which the second is at most half the first tell the limit, once it lies within a
    thousandth.
    """
    asked = []

    def norm(degree):
        asked.append(degree)
        return 7.0 - 0.5 * 0.25 ** (degree / 8)

    assert math.isclose(norms_by_degree(norm), 7.0, rel_tol=1e-12)
    assert asked == [8, 16, 24, 32]  # 2e-3 · 0.25/0.75 of 7 was too much at 24
    assert (
        norms_by_degree(lambda degree: 3.0 + 2e-5 * (degree > 8)) == 3.0 + 2e-5
    )  # settled: no rise worth a name
    assert math.isclose(
        norms_by_degree(lambda degree: 7.0 - 2e-3 * 0.5 ** (degree / 8)), 7.0, rel_tol=1e-12
    )
    rising = {
        8: 0.1,
        16: 1.0,
        24: 6.9,
        32: 7.09,
    }  # 0.19²/(5.9 − 0.19): a thousandth of the last norm, of no earlier one
    assert math.isclose(norms_by_degree(rising.__getitem__), 7.09 + 0.19**2 / 5.71, rel_tol=1e-12)
    for slow in (
        lambda d: 7.0 - 0.02 * 0.6 ** (d / 8),
        lambda d: 7.0 + 1e-3 * d,
        lambda d: 7.0 - 1e-3 * d,
    ):
        with pytest.raises(
            ValueError, match=r"does not settle: it is .* at degrees 8, 16, 24, 32, 40, where"
        ):
            norms_by_degree(slow)


def test_degrees_whose_blocks_are_singular_to_rounding_end_the_sequence(norms_by_degree):
    def norm(degree):
        if degree > 16:
            raise np.linalg.LinAlgError("singular matrix")
        return float(degree)

    with pytest.raises(ValueError, match=r"does not settle: it is 8, 16 at degrees 8, 16, where"):
        norms_by_degree(norm)


def test_degrees_beyond_floating_point_are_not_asked_for(norms_by_degree):
    with pytest.raises(
        ValueError, match=r"does not settle: it is none at degrees none, where floating point ends"
    ):
        norms_by_degree(lambda degree: 1.0, smallest=1e-36)
    assert norms_by_degree(lambda degree: 1.0, smallest=1.1e-36) == 1.0
