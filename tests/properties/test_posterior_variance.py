"""Posterior variances do not cancel: beside 40 digits, and beside the least they can be."""

import math

import mpmath
import numpy as np
import pytest
from configurations import solve
from paper import paper_regressor

import keyhole as kh

N_TRAINING = 30
N_NEW = 20
DIGITS = 40
EPS = float(np.finfo(np.float64).eps)


def exact_kernel(a, b):
    """K of two sets of one key on a line and no query, zero-mean ReLU heads of scale 1/2, in
    mpmath.

    x~ = [x; 1] and x~_0 = [0; √2]: m = τ_u τ_v κ(ρ), τ_u = |x~_0| |x~| / 2, ρ = cos(x~, x~').
    """
    length_a = mpmath.sqrt(a * a + 1)
    length_b = mpmath.sqrt(b * b + 1)
    product = a * b + 1
    rho = min(product / (length_a * length_b), mpmath.mpf(1))
    kappa = (mpmath.sqrt(1 - rho * rho) + (mpmath.pi - mpmath.acos(rho)) * rho) / (2 * mpmath.pi)
    return length_a * length_b / 2 * kappa * product


def exact_variances(x, alpha):
    """v(x) of the new samples, and v_{−i}(x_i) of those fitted, from the bordered matrix in 40
    digits.

    With M = [[K + α, 1], [1, 0]] and r = [k(x); 1], v(x) = k(x, x) − rᵀM⁻¹r, and
    v_{−i}(x_i) = 1/(M⁻¹)_ii − α.
    """
    n = N_TRAINING
    with mpmath.workdps(DIGITS):
        tokens = [mpmath.mpf(float(token)) for token in x]
        penalty = mpmath.mpf(float(alpha))
        bordered = mpmath.matrix(n + 1, n + 1)
        for i in range(n):
            for j in range(n):
                bordered[i, j] = exact_kernel(tokens[i], tokens[j])
            bordered[i, i] += penalty
            bordered[i, n] = bordered[n, i] = 1
        inverse = bordered**-1
        variances = []
        for token in tokens[n:]:
            column = mpmath.matrix([exact_kernel(token, other) for other in tokens[:n]] + [1])
            variances.append(float(exact_kernel(token, token) - (column.T * inverse * column)[0]))
        left_out = [float(1 / inverse[i, i] - penalty) for i in range(n)]
    return np.array(variances), np.array(left_out)


def noise_free_fit(seed, alpha):
    """The exact kernel fitted to sin(3x) on a line, and all tokens."""
    x = np.random.default_rng([seed, 6]).uniform(-1, 1, size=(N_TRAINING + N_NEW, 1))
    model = paper_regressor(math.inf, alpha=alpha, random_state=0)
    return model.fit(x[:N_TRAINING], np.sin(3 * x[:N_TRAINING, 0])), x


@pytest.mark.parametrize("alpha", ["loo", 3e-13, 1e-9, 1e-3])
def test_variances_and_novelty_are_those_of_forty_digits(seed, alpha):
    model, x = noise_free_fit(seed, alpha)
    variances, left_out = exact_variances(x[:, 0], model.alpha_)
    refits = model.training_.refits()
    ready = model.tokens_.apply(kh.SetBatch(x[N_TRAINING:, None, :]))
    [(_, _, hat, found)] = refits.predictions(ready, 2**20, variances=True)
    # v(x) = |φ(x) − Σ_i h_i φ_i|² + α |h|²: an error of u in every K, of size one, moves it by u
    # (1 + Σ_i |h_i|)²
    bound = 64 * EPS * np.square(1 + np.abs(hat).sum(axis=1))
    assert (np.abs(found - variances) <= bound).all()
    np.testing.assert_allclose(refits.own_variances(), left_out, rtol=1e-3)
    # ranks among the left-out variances, as far as these can be told from one another
    novelty = model.novelty(x[N_TRAINING:])
    least = [(left_out < 0.999 * (v - u)).mean() for v, u in zip(variances, bound, strict=True)]
    most = [(left_out < 1.001 * (v + u)).mean() for v, u in zip(variances, bound, strict=True)]
    assert (np.array(least) <= novelty).all()
    assert (novelty <= np.array(most)).all()


@pytest.mark.parametrize("n_heads", [40, math.inf])
@pytest.mark.parametrize("groups", [None, np.arange(N_TRAINING) // 2])
def test_a_variance_is_at_least_what_the_penalty_makes_it(seed, n_heads, groups):
    """v(x) is the least of |φ(x) − Σ_i h_i φ_i|² + α Σ_i h_i² / w_i, and so at least the second
    term.
    """
    rng = np.random.default_rng([seed, 7])
    x = rng.uniform(-1, 1, size=(N_TRAINING, 2))
    model = paper_regressor(n_heads, random_state=0)
    model.fit(x, np.sin(3 * x[:, 0]), groups=groups)
    refits = model.training_.refits()
    ready = model.tokens_.apply(kh.SetBatch(x[:, None, :]))
    for _, _, hat, variances in refits.predictions(ready, 2**20, variances=True):
        assert (variances >= 0.999 * model.alpha_ * np.square(hat).sum(axis=1)).all()
    assert (model.predict_std(x) > 0).all()


@pytest.mark.parametrize("n_heads", [3, 40, math.inf])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("alpha", [1e8, 1e20])
def test_far_above_the_kernel_variances_are_those_of_the_kernel(seed, n_heads, grouped, alpha):
    """As α grows v_{−i}(x_i) becomes k(x_i, x_i): 1/Q_ii − α loses it, being a difference of
    numbers like α.
    """
    rng = np.random.default_rng([seed, 8])
    x = rng.uniform(-1, 1, size=(N_TRAINING, 2))
    groups = np.arange(N_TRAINING) // 2 if grouped else None
    model = paper_regressor(n_heads, alpha=alpha, fit_intercept=False, random_state=0)
    model.fit(x, x[:, 0], groups=groups)
    sets = kh.SetBatch(x[:, None, :])
    if math.isinf(n_heads):
        expected = kh.attention_kernel(sets).diagonal()
    else:
        expected = np.square(kh.attention_features(sets, model.layer_.heads)).sum(axis=1)
    refits = model.training_.refits()
    np.testing.assert_allclose(refits.own_variances()[np.argsort(refits.rows)], expected, rtol=1e-5)


def test_a_kernel_of_many_sizes_ranks_small_samples_too(seed):
    """The kernel of exp on tokens as they are spans 30 orders: most leverages are below
    rounding.
    """
    rng = np.random.default_rng([seed, 9])
    x = 3.0 * rng.normal(size=(N_TRAINING, 3))
    sizes = kh.attention_kernel(
        kh.SetBatch(x[:, None, :]), None, kh.GaussianHeads(), "exp"
    ).diagonal()
    model = paper_regressor(
        math.inf, alpha=sizes.max(), activation="exp", fit_intercept=False, random_state=0
    ).fit(x, x[:, 0])
    small = np.zeros((1, 3))
    own = kh.attention_kernel(kh.SetBatch(small[:, None, :]), None, kh.GaussianHeads(), "exp")[0, 0]
    assert model.novelty(small)[0] == pytest.approx((sizes < own).mean(), abs=1e-12)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_penalty_that_we_chose_has_variances(seed, grouped):
    """Tokens far from zero: the fit takes the mean off its features, and so do the refits."""
    rng = np.random.default_rng([seed, 10])
    x = 300.0 + rng.uniform(-1, 1, size=(N_TRAINING, 2))
    sets = kh.SetBatch(x[:, None, :])
    groups = np.arange(N_TRAINING) // 2 if grouped else None
    heads = kh.GaussianHeads()
    features = kh.attention_features(sets, heads.sample(60, 2, 0))
    centred = features - features.mean(axis=0)
    y = centred @ rng.normal(size=centred.shape[1])
    model = paper_regressor(60, heads=heads, random_state=0).fit(sets, y, groups=groups)
    # v(x) = min over h with Σ h = 1 of |φ(x) − Σ_i h_i φ_i|² + α |h|², in long doubles
    gram = centred.astype(np.longdouble) @ centred.astype(np.longdouble).T
    expected = longdouble_variances(gram, model.alpha_)
    refits = model.training_.refits()
    ready = model.tokens_.apply(sets)
    found = np.concatenate([part[3] for part in refits.predictions(ready, 2**20, variances=True)])
    # the penalty is near the rounding of what varies, and far below that of the features
    # themselves, which would make some of them hundreds of times as large
    assert (found < 3 * expected).all()
    assert (found > expected / 3).all()
    assert (model.predict_std(sets) > 0).all()


def longdouble_variances(gram, alpha):
    """v(x_i) of the samples fitted, with a free intercept."""
    n = len(gram)
    bordered = np.ones((n + 1, n + 1), np.longdouble)
    bordered[:n, :n] = gram + np.longdouble(alpha) * np.eye(n)
    bordered[n, n] = 0
    right = np.ones((n + 1, n), np.longdouble)
    right[:n] = gram
    hat = solve(bordered, right)[:n]
    apart = gram.diagonal() - 2 * (hat * gram).sum(axis=0) + (hat * (gram @ hat)).sum(axis=0)
    return (apart + np.longdouble(alpha) * np.square(hat).sum(axis=0)).astype(float)
