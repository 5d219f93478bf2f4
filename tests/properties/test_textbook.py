"""Every fast route computes what `keyhole.textbook` writes out in plain NumPy.

The textbook is the oracle here; its own claims (leave-one-out is n refits, the closed form of the
kernel is an expectation) are tested first.
"""

import math

import cvxpy
import numpy as np
import pytest
from devices import DEVICE

import keyhole as kh
from keyhole import textbook
from keyhole.attention.activations import gaussian_moment

DIM = 3
N_SAMPLES = 23
ALPHA = 0.3
PAPER = {
    "activation": "relu",
    "pooling": "mean",
    "scaling": "none",
    "query": "given",
    "random_state": 5,
}
"""The paper's layer: tokens as they are, and heads of a fixed seed."""

ZERO = np.zeros((DIM + 1, DIM + 1))
BIASED = np.diag([1.0] * DIM + [0.0])
MEANS = {"zero": ZERO, "biased": BIASED, "any": np.linspace(-1.0, 1.0, 16).reshape(4, 4)}


def samples_of(sets):
    """A SetBatch as the textbook writes samples: pairs of a query and the keys."""
    return [(None if one.query is None else one.query[0], one.tokens) for one in sets]


def assert_close(result, expected, tolerance=1e-10):
    """Agreement within a share of the largest number."""
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def draw_sets(rng, n):
    """Ragged sets with a query."""
    keys = [rng.normal(size=(rng.integers(1, 6), DIM)) for _ in range(n)]
    return kh.SetBatch(keys, rng.normal(size=(n, DIM)))


@pytest.fixture
def train(rng):
    return draw_sets(rng, N_SAMPLES)


@pytest.fixture
def new(rng):
    return draw_sets(rng, 5)


@pytest.fixture(params=["query", "no query"])
def sets(request, train):
    """With and without a query; the last set is the first once more, its keys in another order."""
    keys = [*(one.tokens for one in train), train[0].tokens[::-1]]
    if request.param == "no query":
        return kh.SetBatch(keys)
    return kh.SetBatch(keys, np.vstack([train.query, train.query[:1]]))


@pytest.fixture
def y(train, rng):
    means = np.array([one.tokens[:, 0].mean() for one in train])
    return 5.0 + means**2 + 0.1 * rng.normal(size=len(means))


class TextbookFit:
    """The textbook's fit of some sets, with heads W or, for ``W=None``, infinitely many."""

    def __init__(self, train, y, W, mean=ZERO, alpha=ALPHA):
        self.train = samples_of(train)
        self.y, self.W, self.mean, self.alpha = y, W, mean, alpha
        self.K = self.kernel(self.train)
        self.a, self.b, self.e = textbook.ridge(self.K, y, alpha)

    def kernel(self, samples):
        """K of some samples and the training samples."""
        if self.W is None:
            return textbook.kernel(samples, self.train, self.mean)
        return textbook.features(samples, self.W) @ textbook.features(self.train, self.W).T

    @property
    def v(self):
        return (textbook.features(self.train, self.W).T @ self.a).reshape(self.W.shape[:2])

    def predict(self, sets):
        if self.W is None:
            return self.b + self.kernel(samples_of(sets)) @ self.a
        return textbook.predict(samples_of(sets), self.W, self.v, self.b)

    def intervals(self, sets, coverage):
        rows = self.kernel(samples_of(sets))
        return [textbook.jackknife_interval(k, self.K, self.y, self.alpha, coverage) for k in rows]


def fit_by(route, train, y, mean, alpha=ALPHA):
    """A regressor of the library fitted by one route, and the textbook's fit of the same layer."""
    n_heads = {"primal": 3, "dual": 40, "kernel": math.inf}[route.split()[-1]]
    device = DEVICE if "torch" in route else None
    heads = kh.GaussianHeads(mean)
    model = kh.AttentionRegressor(n_heads, heads, alpha, device=device, **PAPER)
    if "streamed" in route:
        batches = [(train[:9], y[:9]), (train[9:], y[9:])]
        model = kh.AttentionRegressor(n_heads, heads, alpha, **PAPER).fit_batches(batches)
    else:
        model.fit(train, y)
    W = None if math.isinf(n_heads) else textbook.draw_heads(n_heads, mean, PAPER["random_state"])
    return model, TextbookFit(train, y, W, mean, ALPHA)


# ---- the textbook's own claims -------------------------------------------------------------------


def test_leave_one_out_and_jackknife_are_n_refits(train, y, new):
    fit = TextbookFit(train, y, W=None, mean=BIASED)
    k = fit.kernel(samples_of(new[:1]))[0]
    residuals = np.empty(len(y))
    predictions = np.empty(len(y))  # of the new sample
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        a, b, _ = textbook.ridge(fit.K[np.ix_(rest, rest)], y[rest], ALPHA)
        residuals[i] = y[i] - (b + fit.K[i, rest] @ a)
        predictions[i] = b + k[rest] @ a
    np.testing.assert_allclose(fit.e, residuals, rtol=1e-9)
    # 0.7 · 24 = 16.8: the 17th smallest upper end of 23, and the 17th largest lower end
    upper = np.sort(predictions + np.abs(residuals))[16]
    lower = np.sort(predictions - np.abs(residuals))[::-1][16]
    interval = textbook.jackknife_interval(k, fit.K, y, ALPHA, coverage=0.7)
    np.testing.assert_allclose(interval, [lower, upper], rtol=1e-9)


def test_ridge_is_the_minimum(train, y, rng):
    """Any other values and intercept have a larger penalised sum of squares."""
    W = textbook.draw_heads(6, BIASED, seed=0)
    fit = TextbookFit(train, y, W)

    def objective(v, b):
        residuals = y - textbook.predict(samples_of(train), W, v, b)
        return np.sum(residuals**2) + ALPHA * np.sum(v**2)

    least = objective(fit.v, fit.b)
    for size in (1e-3, 1e-1):
        step = size * rng.normal(size=fit.v.shape)
        assert objective(fit.v + step, fit.b) > least
        assert objective(fit.v, fit.b + size) > least
        assert objective(fit.v, fit.b - size) > least


@pytest.mark.parametrize("rho", [-1.0, -0.999, -0.4, 0.0, 1e-9, 0.7, 1 - 1e-9, 1.0])
def test_the_moment_is_right_in_every_corner(rho, rng):
    """Zero means, equal and opposite means, correlations of ±1: against the library's moment."""
    h, k = rng.normal(size=(2, 60)) * 2
    h[:10], k[5:15], k[20:30], k[30:40] = 0.0, 0.0, h[20:30], -h[30:40]
    expected = gaussian_moment("relu", h, k, 1.0, 1.0, rho)
    moments = textbook.relu_moment(h, k, np.full(60, rho))
    np.testing.assert_allclose(moments, expected, rtol=1e-8, atol=1e-10)
    arc = textbook.arc_cosine(np.array([rho]))
    np.testing.assert_allclose(moments[5:10], np.repeat(arc, 5), rtol=1e-12, atol=1e-16)


def test_features_of_many_heads_have_the_kernel(rng):
    """E[ΦΦᵀ] = K: the mean over heads is within five standard errors."""
    samples = [(rng.normal(size=DIM), rng.normal(size=(4, DIM))) for _ in range(4)]
    for mean in MEANS.values():
        n_heads = 5000
        W = textbook.draw_heads(n_heads, mean, seed=int(rng.integers(1000)))
        Phi = textbook.features(samples, W).reshape(4, n_heads, DIM + 1) * math.sqrt(n_heads)
        products = np.einsum("ame,bme->mab", Phi, Phi)
        error = products.std(axis=0) / math.sqrt(n_heads)
        K = textbook.kernel(samples, samples, mean)
        assert (np.abs(products.mean(axis=0) - K) < 5 * error).all()


# ---- heads, features, kernels --------------------------------------------------------------------


@pytest.mark.parametrize("mean", MEANS)
def test_heads_are_those_of_the_library(mean, seed):
    heads = kh.GaussianHeads(MEANS[mean], scale=0.3)
    W = textbook.draw_heads(11, MEANS[mean], seed, scale=0.3)
    np.testing.assert_array_equal(W, heads.sample(11, DIM, seed))
    np.testing.assert_array_equal(W[:4], textbook.draw_heads(4, MEANS[mean], seed, scale=0.3))
    # queries of another dimension than the keys: W is D_q × D
    wide = textbook.draw_heads(3, np.zeros((7, DIM + 1)), seed)
    np.testing.assert_array_equal(wide, kh.GaussianHeads().sample(3, DIM, seed, query_dim=6))


@pytest.mark.parametrize("mean", MEANS)
def test_features(sets, mean, seed):
    W = textbook.draw_heads(17, MEANS[mean], seed)
    expected = textbook.features(samples_of(sets), W)
    assert_close(kh.attention_features(sets, W), expected, 1e-13)


@pytest.mark.parametrize("mean", MEANS)
def test_kernels(sets, mean):
    heads = kh.GaussianHeads(MEANS[mean], scale=0.4)
    samples = samples_of(sets)
    expected = textbook.kernel(samples, samples, MEANS[mean], scale=0.4)
    assert_close(kh.attention_kernel(sets, heads=heads), expected)
    assert_close(kh.attention_kernel(sets[:3], sets, heads), expected[:3])


# ---- ridge by every route ------------------------------------------------------------------------

ROUTES = ("primal", "dual", "kernel", "torch dual", "torch kernel")


@pytest.mark.parametrize("mean", ["zero", "biased"])
@pytest.mark.parametrize("route", [*ROUTES, "streamed primal"])
def test_predictions(train, y, new, route, mean):
    model, fit = fit_by(route, train, y, MEANS[mean])
    tolerance = 1e-9
    assert_close(model.predict(new), fit.predict(new), tolerance)
    assert model.intercept_ == pytest.approx(fit.b, rel=tolerance)
    if fit.W is not None:
        assert_close(model.values_, fit.v, 10 * tolerance)


@pytest.mark.parametrize("route", ROUTES)
def test_leave_one_out(train, y, route):
    model, fit = fit_by(route, train, y, BIASED)
    assert_close(model.loo_predictions_, y - fit.e, 1e-9)
    assert model.loo_error_ == pytest.approx(np.mean(fit.e**2), rel=1e-8)


@pytest.mark.parametrize("route", [*ROUTES, "streamed primal"])
def test_the_penalty_of_least_leave_one_out_error_is_chosen(train, y, route):
    alphas = [0.001, 0.03, 1.0, 30.0]
    model, fit = fit_by(route, train, y, BIASED, alpha=alphas)
    errors = []
    for alpha in alphas:
        _, _, e = textbook.ridge(fit.K, y, alpha)
        errors.append(np.mean(e**2))
    np.testing.assert_allclose(model.selection_.errors, errors, rtol=1e-7)
    assert model.alpha_ == alphas[int(np.argmin(errors))]


@pytest.mark.parametrize("route", ["primal", "dual", "torch dual", "streamed primal"])
def test_contributions(train, y, new, route):
    model, fit = fit_by(route, train, y, BIASED)
    for sample, parts in zip(samples_of(new), model.contributions(new), strict=True):
        assert_close(parts, textbook.contributions(sample, fit.W, fit.v), 1e-8)


def test_contributions_with_infinitely_many_heads(train, y, new):
    model, fit = fit_by("kernel", train, y, BIASED)
    for (x_0, x), parts in zip(samples_of(new), model.contributions(new), strict=True):
        single_keys = [(x_0, key[None]) for key in x]
        assert_close(parts, fit.kernel(single_keys) @ fit.a / len(x), 1e-8)


@pytest.mark.parametrize("coverage", [0.5, 0.83, 0.99])
@pytest.mark.parametrize("route", ["primal", "dual", "kernel"])
def test_intervals(train, y, new, route, coverage):
    model, fit = fit_by(route, train, y, BIASED)
    expected = np.array(fit.intervals(new, coverage))
    np.testing.assert_allclose(model.predict_interval(new, coverage), expected, rtol=1e-8)
    assert np.isinf(expected).all() == (coverage == 0.99)  # the 24th of 23 ranks


# ---- the norm ball -------------------------------------------------------------------------------


def least_objective(samples, y, W, group_radius, ball_radius):
    """The minimum of the textbook's objective over the textbook's ball, by a general solver."""
    n_heads, width = W.shape[0], W.shape[2]
    Phi = math.sqrt(n_heads) * textbook.features(samples, W)
    v = cvxpy.Variable((n_heads, width))
    b = cvxpy.Variable()
    residuals = y - Phi @ cvxpy.vec(v, order="C") - b
    lengths = cvxpy.norm(v, axis=1)
    ball = [cvxpy.sum(lengths) <= group_radius, cvxpy.norm(v, "fro") <= ball_radius]
    objective = cvxpy.sum(cvxpy.huber(residuals, 1)) / (2 * len(y))  # its huber is twice ours
    return cvxpy.Problem(cvxpy.Minimize(objective), ball).solve(solver=cvxpy.CLARABEL)


@pytest.mark.parametrize("radii", [(2.0, 0.8), (0.5, 10.0), (50.0, 0.3)])
def test_the_norm_ball(train, y, new, radii):
    n_heads = 8
    model = kh.NormBallRegressor(
        n_heads,
        group_radius=radii[0],
        ball_radius=radii[1],
        tol=1e-4,
        random_state=5,
    ).fit(train, 3 * y)
    samples = samples_of(train)
    W = textbook.draw_heads(n_heads, ZERO, seed=5)
    v = model.values_
    b = model.intercept_
    # the objective that is reported, at a point within the ball, near the least there is
    objective = textbook.norm_ball_objective(samples, 3 * y, W, v, b)
    assert model.objective_ == pytest.approx(objective, rel=1e-9)
    assert (np.array(textbook.norms(v)) <= np.array(radii) * (1 + 1e-9)).all()
    least = least_objective(samples, 3 * y, W, *radii)
    rounding = 1e-7 * least
    assert objective - model.duality_gap_ <= least + rounding
    assert least <= objective + rounding
    expected = textbook.predict(samples_of(new), W, math.sqrt(n_heads) * v, b)
    assert_close(model.predict(new), expected, 1e-12)


# ---- deliberately wrong textbooks ----------------------------------------------------------------


def test_a_wrong_textbook_would_be_seen(train, y, new, monkeypatch):
    model, fit = fit_by("dual", train, y, BIASED)
    right = fit.predict(new)
    wrong = {
        "another penalty": TextbookFit(train, y, fit.W, alpha=ALPHA * 1.01),
        "a head too few": TextbookFit(train, y, fit.W[:-1]),
        "other heads": TextbookFit(train, y, textbook.draw_heads(40, BIASED, seed=6)),
    }
    for why, other in wrong.items():
        assert np.abs(other.predict(new) - right).max() > 1e-6 * np.abs(right).max(), why
    # leave-one-out residuals are not those of the fit itself, and intervals need both
    residuals = y - fit.predict(train)
    assert np.abs(residuals - fit.e).max() > 1e-2 * np.abs(fit.e).max()
    with pytest.raises(AssertionError):
        assert_close(model.loo_predictions_, y - residuals)

    # a step in the place of ReLU
    def step_weights(sample, W):
        return (original(sample, W) > 0) / len(sample[1])

    original = textbook.attention_weights
    monkeypatch.setattr(textbook, "attention_weights", step_weights)
    with pytest.raises(AssertionError):
        assert_close(kh.attention_features(new, fit.W), textbook.features(samples_of(new), fit.W))
