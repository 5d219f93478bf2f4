import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from keyhole.theory import curves
from keyhole.theory.complexity import rkhs_norm
from keyhole.theory.curves import (
    EigenProblem,
    TheoryLayer,
    _crossing,
    best_ridge_curve,
    curve_from_spectrum,
    empirical_curve,
    learning_curve,
    learning_surface,
    problems,
)
from keyhole.theory.harmonics import pair_powers
from keyhole.theory.targets import Correlation, QueryPower, RotatedCorrelation, TokenPower, monomial


def specification_error(problem, n, k, ridge, noise):
    """The two equations of the specification in κ and γ, solved by plain bisection."""
    values, counts, powers = problem.eigenvalues, problem.multiplicities, problem.powers

    def mismatch(gamma):
        z = np.sum(counts * values / (values + gamma))
        kappa = gamma * (1 - z / k)
        return z + n * ridge / kappa - n if kappa > 0 and z < n else math.inf

    low, high = 1e-14, 1e4
    for _ in range(300):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if mismatch(middle) > 0 else (low, middle)
    gamma = high
    learned = values / (values + gamma)
    z, q = np.sum(counts * learned), np.sum(counts * learned**2)
    kappa = gamma * (1 - z / k)
    bias = np.sum(
        powers * (gamma / (values + gamma) - kappa * values / (values + gamma) ** 2 * k / (k - q))
    )
    return (bias + noise) / (1 - (q * (k - 2 * z) + z**2) / (n * (k - q)))


def some_problem(rng, levels=12):
    values = np.sort(10.0 ** rng.uniform(-5, 0, levels))[::-1]
    return EigenProblem(values, np.arange(1.0, levels + 1), rng.uniform(0, 1, levels))


@pytest.mark.parametrize(("n", "k"), [(30, 1e12), (30, 50), (300, 50), (60, 60)])
def test_rewritten_equations_are_those_of_the_specification(n, k, rng):
    problem = some_problem(rng)
    for ridge, noise in ((1e-2, 0.0), (1e-4, 0.3)):
        got = curve_from_spectrum(
            problem.eigenvalues, problem.multiplicities, problem.powers, n, ridge, noise, int(k)
        )
        assert math.isclose(
            float(got), specification_error(problem, n, k, ridge, noise), rel_tol=1e-6
        )


def test_many_features_are_the_kernel_limit(rng):
    problem = some_problem(rng)
    levels = problem.eigenvalues, problem.multiplicities, problem.powers
    np.testing.assert_allclose(
        curve_from_spectrum(*levels, [5, 50], 1e-3, n_features=10**12),
        curve_from_spectrum(*levels, [5, 50], 1e-3),
        rtol=1e-8,
    )


def test_ridge_roots_hold_over_hundreds_of_orders():
    for exponent in (-250, -100, 0, 100):
        scale = 10.0**exponent
        problem = EigenProblem(
            np.array([1.0, 1e-3, 1e-9]) * scale, np.array([1.0, 10.0, 1e6]), np.ones(3)
        )
        for ridge in (0.0, 1e-30, 1e-6, 1.0):
            [gamma] = curves.implicit_ridges(problem, np.array([50.0]), 200.0, ridge * scale)
            z, _ = problem.freedom(gamma)
            assert z <= 50 * (1 + 1e-9)
            left = gamma * (1 - z / 200) * max(1 - z / 50, 0.0)
            assert math.isclose(left / scale, ridge, rel_tol=1e-5, abs_tol=1e-11 * gamma / scale)


def test_least_squares_in_closed_form():
    """p = 50 equal eigenvalues, no ridge: n/(n−p) σ² above p, infinite at p, 1 − n/p of the target
    below.
    """
    one = np.ones(1)
    for n, noise, want in (
        (100, 1.0, 2.0),
        (100, 0.0, 0.0),
        (50, 1.0, math.inf),
        (50, 0.0, 0.0),
        (25, 0.0, 0.5),
    ):
        got = float(curve_from_spectrum(one, 50 * one, one, n, 0.0, noise))
        assert got == pytest.approx(want, rel=1e-9)


def test_least_squares_with_as_many_features_as_directions_and_with_a_direction_out_of_reach():
    one = np.ones(1)
    assert float(
        curve_from_spectrum(one, 50 * one, one, 100, 0.0, 1.0, n_features=50)
    ) == pytest.approx(2.0)
    # an eigenvalue 0: its power is noise to the others
    got = curve_from_spectrum([1.0, 0.0], [50.0, 1.0], [1.0, 0.25], [75, 100], 0.0)
    np.testing.assert_allclose(got, [0.75, 0.5])


def test_a_handicap_begins_where_errors_cross_those_without_a_bias():
    """Between two means by the logarithms of the errors."""
    means = np.array([0.0, 1.0, 3.0, 4.0])
    for errors, want in (
        ([1.0, 0.5, 2.0, 4.0], 2.0),
        ([2.0, 1.0, 1.5, 2 * 4**0.25], 3.0 + math.log(4 / 3) / math.log(4**0.25 / 0.75)),
        ([1.0, 2.0, 3.0, 4.0], 0.0),
        ([1.0, 2.0, 1.0, 4.0], 3.0),
        ([0.0, 0.0, 1.0, 2.0], 1.0),
    ):
        assert _crossing(means, np.array(errors)) == pytest.approx(want)
    assert math.isnan(_crossing(means, np.array([1.0, 2.0, 3.0, 0.9])))


def test_infinite_data_leaves_the_approximation_error_of_the_features():
    """k features of 50 equal directions keep a share 1 − k/50 of the target."""
    one = np.ones(1)
    got = curve_from_spectrum(one, 50 * one, one, 10**9, 0.0, n_features=20)
    assert float(got) == pytest.approx(0.6, rel=1e-6)
    assert math.isinf(float(curve_from_spectrum(one, 50 * one, one, 20, 0.0, n_features=20)))


@pytest.mark.parametrize("dim", [1, 3])
def test_finer_problems_hold_the_same_target(dim):
    """Powers add up to E f², and over eigenvalues to its norm, also where degrees lie beyond the
    listed levels.
    """
    first = np.eye(dim)[0]
    target = monomial(dim, 1.0, [], [(first, 1)], [(first, 7)]) + monomial(
        dim, 0.5, [], [(first, 6)], []
    )
    target = (
        target
        + monomial(dim, 2.0, [], [], [(first, 9)])
        + monomial(dim, 0.3, [], [(first, 7)], [(first, 6)])
    )
    powers = pair_powers(target)
    want = powers[:, 0].sum() + powers[:, 1:].sum() / 5
    for problem in itertools.islice(problems(target, TheoryLayer(5)), 3):
        assert math.isclose(problem.powers.sum(), want, rel_tol=1e-9)
        there = problem.powers > 0
        norm = (problem.powers[there] / problem.eigenvalues[there]).sum()
        assert math.isclose(norm, rkhs_norm(target), rel_tol=1e-9)


def test_shapes_follow_the_samples():
    target = TokenPower(1, 4)
    assert learning_curve(target, 10, 2, 0.1).shape == ()
    assert learning_curve(target, [[10, 20], [30, 40]], 2, 0.1).shape == (2, 2)
    assert learning_surface(target, [10, 20, 30], [5, math.inf], 2, 0.1).shape == (3, 2)


def test_no_samples_to_speak_of_predict_the_power():
    target = Correlation(1, 8)
    power = pair_powers(target)[:, 0].sum() + pair_powers(target)[:, 1:].sum() / 8
    assert float(learning_curve(target, 1, 8, ridge=1e6)) == pytest.approx(power, rel=1e-4)


@pytest.mark.parametrize("model", ["attention", "mlp"])
@pytest.mark.parametrize(("dim", "n_keys"), [(1, 1), (1, 5), (2, 1), (2, 3), (3, 1), (8, 8)])
def test_degenerate_sizes_give_falling_curves(model, dim, n_keys):
    for target in (
        QueryPower(0, dim),
        QueryPower(2, dim),
        TokenPower(3, dim),
        RotatedCorrelation(0.2, dim, seed=0),
    ):
        curve = learning_curve(target, [1, 3, 10, 30], n_keys, ridge=1e-3, noise=0.0, model=model)
        assert np.all(np.isfinite(curve))
        assert np.all(curve >= 0)
        assert curve[-1] < curve[0]
        interpolated = learning_curve(target, [1, 3, 10], n_keys, ridge=0.0, model=model)
        assert np.all(interpolated >= 0)


def test_dimension_one_is_learned_exactly_once_its_functions_are_seen():
    assert float(learning_curve(Correlation(1, 1), 10, 3, ridge=0.0)) == 0.0
    assert float(learning_curve(Correlation(1, 1), 10, 3, ridge=0.0, noise=0.6)) == pytest.approx(
        0.6 * 10 / (10 - 4)
    )


def test_targets_of_huge_degree_are_not_learned():
    target = TokenPower(200, 8)
    curve = learning_curve(target, [10, 10_000], 4, ridge=1e-3)
    power = pair_powers(target)[0, 0] + pair_powers(target)[0, 1:].sum() / 4
    assert 0.3 * power < curve[1] <= curve[0] <= 3 * power


def test_samples_beyond_the_finest_spectrum_are_refused():
    with pytest.raises(
        ValueError, match=r"1e\+09 samples of TokenPower.*finest spectrum.*curve_from_spectrum"
    ):
        learning_curve(TokenPower(1, 2), 10**9, 1, ridge=0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_samples": 0}, "`n_samples` must hold numbers of at least 1: got 0"),
        ({"n_samples": []}, "got none"),
        ({"ridge": -1.0}, "`ridge` must be at least 0"),
        ({"noise": -1.0}, "`noise` must be at least 0"),
        ({"n_heads": 0}, "`n_heads` must be at least 1"),
        ({"n_keys": 0}, "`n_keys` must be at least 1"),
        ({"model": "transformer"}, "`model` must be one of 'attention', 'mlp': got 'transformer'"),
    ],
)
def test_bad_input_is_named(arguments, message):
    settings = {"n_samples": 10, "n_keys": 2, "ridge": 0.1} | arguments
    with pytest.raises(ValueError, match=message):
        learning_curve(TokenPower(1, 3), **settings)


def test_bad_spectra_are_named():
    one = np.ones(1)
    with pytest.raises(ValueError, match="vectors of one length"):
        curve_from_spectrum(one, np.ones(2), one, 10, 0.1)
    with pytest.raises(ValueError, match=r"`eigenvalues` must not be negative: got -1 at level 0"):
        curve_from_spectrum(-one, one, one, 10, 0.1)


def test_large_problems_have_finite_curves():
    n = np.logspace(1, 9, 9)
    for model in ("attention", "mlp"):
        for target in (Correlation(2, 512), RotatedCorrelation(0.5, 512, seed=0)):
            curve = learning_curve(target, n, 4096, ridge=0.0, model=model)
            assert np.all(np.isfinite(curve))


def test_the_best_ridge_has_the_error_that_is_told():
    target = TokenPower(2, 8)
    best = best_ridge_curve(target, [50, 500], 8, noise=0.01, n_heads=40)
    for n, ridge, error in zip((50, 500), best.ridge, best.error, strict=True):
        assert float(learning_curve(target, n, 8, float(ridge), 0.01, 40)) == pytest.approx(
            error, rel=1e-6
        )


def test_best_ridge_without_noise_is_no_worse_than_any():
    target = TokenPower(2, 8)
    best = best_ridge_curve(target, [50, 500], 8, n_heads=40)
    for ridge in (0.0, 1e-6, 1e-4, 1e-2):
        assert np.all(
            best.error <= learning_curve(target, [50, 500], 8, ridge, n_heads=40) * (1 + 1e-6)
        )


def test_empirical_input_is_checked(rng):
    gram, y = np.eye(8), np.ones(8)
    with pytest.raises(
        ValueError, match=r"at most a quarter of the 8 samples of `gram`: got 3.*of 12 samples"
    ):
        empirical_curve(gram, y, 3, 0.1)
    with pytest.raises(ValueError, match=r"got \(8, 8\) and \(7,\)"):
        empirical_curve(gram, y[:7], 2, 0.1)
    with pytest.raises(ValueError, match="must be symmetric"):
        empirical_curve(rng.standard_normal((8, 8)), y, 2, 0.1)
    tilted = (
        gram + np.triu(rng.uniform(size=(8, 8)), 1) * 1e-10
    )  # rounding, in units of the largest entry
    for unit in (1e-6, 1e6):
        assert np.isfinite(empirical_curve(unit * tilted, y, 2, 0.1 * unit).error)
        with pytest.raises(ValueError, match="must be symmetric"):
            empirical_curve(unit * (gram + np.eye(8, k=1) * 1e-7), y, 2, 0.1)
    with pytest.raises(ValueError, match="at least 4 samples"):
        empirical_curve(np.eye(3), np.ones(3), 1, 0.1)


def test_an_empirical_curve_is_the_formula_on_the_sample_less_its_bias(rng):
    x = rng.standard_normal((80, 10))
    gram, y = x @ x.T, x[:, 0]
    values, vectors = np.linalg.eigh(gram / 80)
    kept = values > 1e-10
    powers = (vectors.T @ y) ** 2 / 80
    plain = curve_from_spectrum(values[kept], np.ones(kept.sum()), powers[kept], [5, 20], 0.01)
    curve = empirical_curve(gram, y, [5, 20], 0.01)
    np.testing.assert_allclose(curve.error + curve.bias, plain, rtol=1e-8)
    assert curve.standard_error.shape == (2,)


def test_the_trace_counts_what_lies_beyond_the_levels():
    """The finer a spectrum, the less is left beyond it; the sum stays."""
    coarse, fine = itertools.islice(problems(Correlation(1, 3), TheoryLayer(2)), 2)
    assert coarse.remainder > 1.1 * fine.remainder > 0
    assert math.isclose(coarse.trace, fine.trace, rel_tol=1e-9)


@pytest.mark.parametrize("k", [3.0, 90.0, math.inf])
@pytest.mark.parametrize("ridge", [0.0, 1e-12, 1e-4, 10.0])
def test_many_implicit_ridges_solve_their_equation_each_by_itself(k, ridge):
    problem = next(problems(Correlation(1, 8), TheoryLayer(4)))
    samples = np.array([1.0, 2.5, 40.0, 90.0, 1e6, 7.0])
    found = curves.implicit_ridges(problem, samples, k, ridge)
    freedom = np.array([problem.freedom(gamma)[0] for gamma in found])
    left = found * (1 - freedom / k) * (1 - freedom / samples)
    np.testing.assert_allclose(left, ridge, rtol=1e-9, atol=1e-12 * found.max())
    alone = [
        curves.implicit_ridges(problem, samples[[i]], k, ridge)[0] for i in range(len(samples))
    ]
    assert found.tolist() == alone  # to the bit
    heads = k if k == math.inf else int(k)
    several = learning_curve(Correlation(1, 8), np.sort(samples), 4, ridge, n_heads=heads)
    target = Correlation(1, 8)
    assert several[-1] == learning_curve(target, samples.max(), 4, ridge, n_heads=heads)


def test_the_finest_spectrum_is_used_where_it_nearly_suffices(monkeypatch):
    """Finer ones are asked for while more than γ/100 lies beyond; of the last, γ/10 may."""
    coarse = EigenProblem(
        np.array([1.0, 0.1]), np.array([1.0, 9.0]), np.array([1.0, 0.5]), remainder=0.5
    )
    gamma = curves.implicit_ridges(coarse, np.array([20.0]), math.inf, 0.1)

    def error(*beyond):
        chain = [replace(coarse, next_eigenvalue=share * float(gamma[0])) for share in beyond]
        monkeypatch.setattr(curves, "problems", lambda *_: iter(chain))
        learner = curves.Learner(Correlation(1, 3), TheoryLayer(2), math.inf)
        [found] = learner.errors(np.array([20.0]), 0.1, 0.0)
        return pytest.approx(found, rel=1e-12), chain.index(learner.problem)

    [plain] = curves.predicted_errors(coarse, 20.0, math.inf, gamma, 0.0)
    assert error(0.009, 0.0) == (plain, 0)
    assert error(0.011, 0.0) == (plain, 1)
    assert error(0.5, 0.099) == (plain, 1)
    with pytest.raises(ValueError, match="the finest spectrum we keep stops at"):
        error(0.5, 0.101)


def test_the_default_means_are_tried_beside_none(monkeypatch):
    """Errors here are least at a mean of 0.8, and as large as without a mean at 1.6."""

    monkeypatch.setattr(curves, "best_ridge_curve", curve_with_optimum(0.8))
    best = curves.best_bias(Correlation(1, 3), [10, 100], 2)
    assert best.means[0] == 0.0
    assert np.all(np.diff(best.means) > 0)
    assert best.mean.tolist() == [0.75, 0.75]
    np.testing.assert_allclose(best.error, 1 + 0.05**2)
    np.testing.assert_allclose(best.unbiased, 1 + 0.8**2)
    assert (abs(best.handicap - 1.6) < 0.03).all()
    assert not best.at_edge.any()


def curve_with_optimum(mean):
    """A stand-in for `best_ridge_curve` whose error is least at a mean of the heads."""

    def curve(target, samples, *_, heads, **_options):
        return SimpleNamespace(error=np.full(samples.shape, (float(heads.mean) - mean) ** 2 + 1))

    return curve


def test_the_range_of_means_is_extended_until_the_best_is_inside(monkeypatch):
    """The best mean 6 lies beyond the means that are tried first, and 20 beyond all of them."""
    monkeypatch.setattr(curves, "best_ridge_curve", curve_with_optimum(5.5))
    best = curves.best_bias(Correlation(1, 3), [10, 100], 2)
    assert best.mean.tolist() == [6.0, 6.0]
    assert best.means.max() == 8.0
    assert not best.at_edge.any()

    monkeypatch.setattr(curves, "best_ridge_curve", curve_with_optimum(20.0))
    assert curves.best_bias(Correlation(1, 3), [10, 100], 2).at_edge.all()

    # means that were asked for are not extended, and say so
    chosen = curves.best_bias(Correlation(1, 3), [10], 2, means=(1.0, 2.0))
    assert chosen.means.tolist() == [0.0, 1.0, 2.0]
    assert chosen.at_edge.all()


def test_two_halves_are_enough_and_one_is_none(rng):
    x = rng.standard_normal((80, 5))
    assert np.isfinite(
        empirical_curve(x @ x.T, x[:, 0], [10], ridge=0.1, n_halves=2).standard_error
    ).all()
    with pytest.raises(ValueError, match="`n_halves` must be at least 2: got 1"):
        empirical_curve(x @ x.T, x[:, 0], [10], ridge=0.1, n_halves=1)


def test_few_problems_of_a_million_levels_are_kept():
    """32 of them would take 800 MB."""
    assert curves._large_problem.cache_parameters()["maxsize"] <= 4
    target = Correlation(q=1, dim=3)
    before = curves._large_problem.cache_info().currsize
    ladder = problems(target, TheoryLayer(1))
    levels = [len(next(ladder).eigenvalues) for _ in range(7)]
    assert levels[-1] == (curves.LARGE_DEGREE + 1) ** 2
    assert curves._large_problem.cache_info().currsize == before
