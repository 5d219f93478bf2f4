"""Leave-one-out is not fooled by rounding: the penalty it chooses predicts as well as the best of a
grid.
"""

import mpmath
import numpy as np
import pytest
from ridges import design_path, gram_fixed, gram_path

import keyhole as kh
from keyhole.ridge.problem import RoundingWarning

GRID = np.concatenate([[0.0], np.geomspace(1e-20, 1e3, 47)])
GRIDS = pytest.mark.parametrize("alphas", [GRID, None], ids=["down to zero", "default grid"])
EXACT = 1e-18
"""Test errors below this part of the variance count as exact recovery: rounding decides among
them.
"""
N_TEST = 400


def low_rank(rng, n, rank, offset=0.0):
    """Noiseless linear targets of 200 features that span ``rank`` directions; the last rows are for
    tests.
    """
    mix = rng.standard_normal((rank, 200)) * np.geomspace(1, 0.1, rank)[:, None] / np.sqrt(200)
    design = rng.standard_normal((n + N_TEST, rank)) @ mix + offset
    return design, design @ rng.standard_normal((200, 20)) + 3


def smooth_kernel(rng, n):
    """Noiseless smooth targets on the sphere; the eigenvalues of exp(<x, x'>) fall through the
    floor.
    """
    x, centres = rng.standard_normal((n + N_TEST, 3)), rng.standard_normal((40, 3))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    return np.exp(x @ x.T), np.exp(2 * x @ centres.T)


CASES = {
    "more samples than rank": lambda rng: low_rank(rng, 150, 60),
    "more samples than rank, far from the origin": lambda rng: low_rank(rng, 150, 60, offset=30.0),
    "fewer samples than rank": lambda rng: low_rank(rng, 120, 190),
}


def predict_off(features, y, fits):
    """Test error of each fit (coefficients, intercept), in units of the variance of the test
    outputs.
    """
    square = [np.mean((features @ coef + b - y) ** 2) for coef, b in fits]
    return np.array(square) / y.var(axis=0).mean()


def chosen_over_best(path, features, y):
    """Test error at the chosen penalty over the smallest of the path."""
    fits = [path.at(i) for i in range(len(path.alphas))]
    errors = predict_off(features, y, [(fit.coef, fit.intercept) for fit in fits])
    return (errors[path.best] + EXACT) / (errors.min() + EXACT)


@GRIDS
@pytest.mark.parametrize("case", CASES)
def test_choice_is_within_a_tenth_of_the_best(rng, case, alphas):
    design, y = CASES[case](rng)
    n = len(y) - N_TEST
    gram = design @ design[:n].T
    assert chosen_over_best(gram_path(gram[:n], y[:n], alphas), gram[n:], y[n:]) < 1.1


@GRIDS
def test_choice_from_the_design_is_within_a_tenth_of_the_best(rng, alphas):
    design, y = low_rank(rng, 250, 60)
    assert chosen_over_best(design_path(design[:250], y[:250], alphas), design[250:], y[250:]) < 1.1


@GRIDS
def test_choice_is_within_a_tenth_of_the_best_for_a_kernel_that_decays_fast(rng, alphas):
    gram, y = smooth_kernel(rng, 150)
    path = gram_path(gram[:150, :150], y[:150], alphas)
    assert chosen_over_best(path, gram[150:, :150], y[150:]) < 1.1


def naive_over_best(gram, y, *, subtract):
    """The same choice from eigenvalues as they come: residuals over 1 − h, or the ratio of
    inverses.
    """
    n = gram.shape[1]
    train, target = gram[:n], y[:n]
    centre = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(centre @ train @ centre)
    left = target - target.mean(axis=0)
    scores, fits = [], []
    for alpha in GRID[1:]:
        inverse = 1 / (values + alpha)
        dual = vectors @ (inverse[:, None] * (vectors.T @ left))
        if subtract:
            leverage = np.square(vectors) @ (values * inverse) + 1 / n
            loo = (left - centre @ train @ centre @ dual) / (1 - leverage)[:, None]
        else:
            diagonal = np.square(vectors) @ inverse - vectors @ (inverse * vectors.sum(axis=0)) / n
            loo = dual / diagonal[:, None]
        scores.append(np.mean(loo**2))
        fits.append((dual, target.mean(axis=0) - train.mean(axis=0) @ dual))
    errors = predict_off(gram[n:], y[n:], fits)
    return (errors[np.nanargmin(scores)] + EXACT) / (np.nanmin(errors) + EXACT)


@pytest.mark.parametrize("subtract", [True, False], ids=["one minus leverage", "ratio of inverses"])
def test_eigenvalues_taken_as_they_come_are_fooled(rng, subtract):
    design, y = low_rank(rng, 150, 60)
    with np.errstate(all="ignore"):
        assert naive_over_best(design @ design[:150].T, y, subtract=subtract) > 1e3


def exact_loo(gram, y, alpha):
    """Leave-one-out residuals with intercept in 60 digits, from the inverse of the bordered
    matrix.
    """
    n = len(y)
    with mpmath.workdps(60):
        bordered = mpmath.matrix(n + 1, n + 1)
        for i in range(n):
            for j in range(n):
                bordered[i, j] = mpmath.mpf(float(gram[i, j]))
            bordered[i, i] += mpmath.mpf(float(alpha))
            bordered[i, n] = bordered[n, i] = 1
        inverse = bordered**-1
        dual = inverse[:n, :n] * mpmath.matrix(y.tolist())
        return np.array([float(dual[i] / inverse[i, i]) for i in range(n)])


def test_above_the_floor_leave_one_out_is_right_to_the_rounding_of_the_gram_matrix(rng):
    x = rng.uniform(-1, 1, (24, 1))
    gram, y = np.exp(-((x - x.T) ** 2) / 2), np.sin(3 * x)
    path = gram_path(gram, y, [1.0])
    alphas = path.floor * np.array([1.0, 10.0, 1e3, 1e6])
    truths = [exact_loo(gram, y[:, 0], alpha) for alpha in alphas]
    for alphas_of_route, route in ((alphas, "tridiagonal"), (np.append(alphas, 0.0), "eigen")):
        path = gram_path(gram, y, alphas_of_route)
        assert path.route == route
        for i, truth in enumerate(truths):
            # one unit of rounding of λ_max moves λ + alpha by this part of itself
            unit = path.floor / 24 / alphas[i]
            off = np.abs(path.at(i).left_out[:, 0] - truth).max() / np.abs(truth).max()
            assert off < 5 * unit, (
                f"{route} at {alphas[i]:.1e}: off by {off / unit:.1f} units of rounding"
            )


def test_a_leverage_within_rounding_of_one_disqualifies_the_penalty(rng):
    # sample 0 has a feature of its own, the others share 3: at alpha = 0 nothing is left of it to
    # judge by
    design = np.zeros((20, 4))
    design[0, 0], design[1:, 1:] = 1.0, rng.standard_normal((19, 3))
    y = rng.standard_normal((20, 1))
    for path in (
        gram_path(design @ design.T, y, [0.0, 1e-3], fit_intercept=False),
        design_path(design, y, [0.0, 1e-3], fit_intercept=False),
    ):
        assert np.isinf(path.errors[0])
        assert np.isfinite(path.errors[1])
        assert path.best == 1
        assert np.isinf(path.at(0).left_out[0]).all()
        assert np.isfinite(path.at(0).left_out[1:]).all()
        # without sample 0 its feature has no weight, so it is predicted by zero
        assert path.at(1).left_out[0] == pytest.approx(y[0])


@pytest.mark.parametrize("n", [30, 90], ids=["interpolation", "regression"])
def test_no_penalty_is_the_minimum_norm_fit(rng, n):
    design, y = low_rank(rng, n, 60)
    design, y = design[:n], y[:n] + rng.standard_normal((n, 20))
    centred = design - design.mean(axis=0)
    wanted = np.linalg.pinv(centred, rcond=1e-7) @ (y - y.mean(axis=0))
    gram = design @ design.T
    for v in (
        design.T @ gram_path(gram, y, [0.0, 1.0]).at(0).coef,
        design.T @ gram_path(gram, y, [1e-30, 1.0]).at(0).coef,
        design.T @ gram_fixed(gram, y, 0.0).coef,
        design_path(design, y, [0.0]).at(0).coef,
    ):
        assert np.abs(v - wanted).max() < 1e-8 * np.abs(wanted).max()


def left_out_by_refits(gram, y, alpha):
    """Leave-one-out residuals by n fits, each with a floor of its own."""
    left = np.empty_like(y)
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        fit = gram_path(gram[np.ix_(rest, rest)], y[rest], [alpha])
        left[i] = y[i] - gram[i, rest] @ fit.coef - fit.intercept
    return left


@pytest.mark.parametrize("alpha", [0.0, 1e-300, 1e-20])
def test_without_penalty_leave_one_out_of_full_rank_is_n_refits(rng, alpha):
    design, y = low_rank(rng, 30, 190)
    gram, y = design[:30] @ design[:30].T, y[:30] + rng.standard_normal((30, 20))
    fit = gram_fixed(gram, y, alpha)
    truth = left_out_by_refits(gram, y, alpha)
    assert np.abs(fit.left_out - truth).max() < 1e-6 * np.abs(truth).max()
    assert fit.error == pytest.approx(np.square(truth).mean(), rel=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 1e-10, 1.0])
def test_below_the_floor_leave_one_out_is_right_within_a_tenth_or_infinite(seed, alpha):
    # samples of a kernel that grows like exp|x|² differ by 30 orders: few are above the floor, one
    # sets it
    judged = 0
    for case in range(30):
        rng = np.random.default_rng([seed, case])
        x = rng.normal(size=(8, 6)) * rng.choice([0.7, 1.0, 1.5])
        gram, y = np.exp(x @ x.T), rng.normal(size=(8, 1))
        found, truth = (
            gram_path(gram, y, [alpha]).at(0).left_out,
            left_out_by_refits(gram, y, alpha),
        )
        finite = np.isfinite(found)
        judged += finite.sum()
        assert (
            np.abs(found - truth)[finite] <= 0.1 * np.maximum(np.abs(truth), 1.0)[finite]
        ).all(), f"case {case}"
    assert judged > 60


def test_a_fixed_penalty_at_which_rounding_shows_is_warned_of(rng):
    x = rng.normal(size=(60, 2))
    y = x[:, 0] + rng.normal(size=60)
    tiny = kh.AttentionRegressor(np.inf, activation="linear", alpha=1e-11, random_state=0)
    with pytest.warns(RoundingWarning, match="alpha = 1e-11 is so small"):
        tiny.fit(x, y)
    tiny.set_params(alpha=1e-3).fit(x, y)
