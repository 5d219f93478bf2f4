"""Intervals, label sets, deviations and novelty, beside fits without each sample or group."""

import math

import numpy as np
import pytest
from paper import PAPER_LAYER, paper_classifier, paper_regressor
from scipy.special import softmax
from sklearn.base import clone

import keyhole as kh

N, ALPHA = 15, 0.3
GROUPS = np.arange(N) % 5
SETTINGS = [(None, None), ("weights", None), (None, "groups"), ("weights", "groups")]


@pytest.fixture
def sets(rng):
    keys = [rng.normal(size=(int(rng.integers(1, 4)), 2)) for _ in range(N + 4)]
    return kh.SetBatch(keys, rng.normal(size=(N + 4, 2)))


@pytest.fixture(params=SETTINGS, ids=lambda s: "-".join(filter(None, s)) or "plain")
def setting(request, rng):
    """Weights of the samples and their groups, or None."""
    weighted, grouped = request.param
    weights = rng.uniform(0.3, 3.0, N) if weighted else None
    return weights, GROUPS if grouped else None


def without(rows, model, sets, y, weights):
    """The same layer, heads and penalty, fitted without some samples."""
    rest = np.setdiff1d(np.arange(N), rows)
    part = None if weights is None else weights[rest]
    return clone(model).fit(sets[rest], y[rest], sample_weight=part)


def refits(model, sets, y, weights, groups):
    """For every sample, the fit without its group."""
    groups = np.arange(N) if groups is None else groups
    by_group = {
        group: without(np.flatnonzero(groups == group), model, sets, y, weights)
        for group in np.unique(groups)
    }
    return [by_group[group] for group in groups]


def rank_of_shares(values, shares, coverage):
    """The least value up to which shares of at least coverage·(G + 1) lie."""
    order = np.argsort(values)
    reached = np.cumsum(shares[order]) >= coverage * (shares.sum() + 1) - 1e-9
    return values[order][np.argmax(reached)] if reached.any() else math.inf


def shares_of(groups):
    if groups is None:
        return np.ones(N)
    return 1.0 / np.bincount(groups)[groups]


@pytest.mark.parametrize("n_heads", [2, 40, math.inf])
def test_intervals_are_ranks_over_all_refits(n_heads, setting, sets, rng):
    weights, groups = setting
    y = rng.normal(size=N)
    model = paper_regressor(n_heads, alpha=ALPHA, random_state=0)
    model.fit(sets[:N], y, sample_weight=weights, groups=groups)
    assert model.interval_method == "jackknife+"
    others = refits(model, sets, y, weights, groups)
    errors = [abs(y[i] - others[i].predict(sets[i])[0]) for i in range(N)]
    predictions = np.array([other.predict(sets[N:]) for other in others])
    shares = shares_of(groups)
    intervals = model.predict_interval(sets[N:], coverage=0.6)
    for new, (low, high) in enumerate(intervals):
        upper = predictions[:, new] + errors
        lower = predictions[:, new] - errors
        assert high == pytest.approx(rank_of_shares(upper, shares, 0.6), rel=1e-7)
        assert low == pytest.approx(-rank_of_shares(-lower, shares, 0.6), rel=1e-7)
    assert np.isinf(model.predict_interval(sets[N:], coverage=0.99)).all()


def test_an_interval_of_unshifted_predictions_is_not_jackknife_plus(sets, rng):
    """The broken variant, f(x) plus and minus a quantile, differs by more than rounding."""
    y = rng.normal(size=N)
    model = paper_regressor(40, alpha=ALPHA, random_state=0).fit(sets[:N], y)
    errors = np.abs(y - model.loo_predictions_)
    naive = model.predict(sets[N:]) + rank_of_shares(errors, np.ones(N), 0.6)
    assert np.abs(naive - model.predict_interval(sets[N:], 0.6)[:, 1]).max() > 1e-3


@pytest.mark.parametrize("n_classes", [2, 3])
def test_label_sets_compare_the_probabilities_of_all_refits(n_classes, setting, sets):
    weights, groups = setting
    y = (np.arange(N) * 7 // 3) % n_classes
    model = paper_classifier(40, alpha=ALPHA, random_state=0)
    model.fit(sets[:N], y, sample_weight=weights, groups=groups)

    def probabilities(other, new):
        scores = other.decision_function(new).reshape(len(new), -1)
        if n_classes == 2:
            scores = np.hstack([-scores, scores])
        return softmax(model.temperature_ * scores, axis=1)

    others = refits(model, sets, y, weights, groups)
    own = np.array([probabilities(others[i], sets[i])[0, y[i]] for i in range(N)])
    of_new = np.array([probabilities(other, sets[N:]) for other in others])
    shares = shares_of(groups)
    above = np.einsum("i,imc->mc", shares, own[:, None, None] > of_new)
    expected = above < 0.7 * (shares.sum() + 1)
    assert (model.predict_set(sets[N:], coverage=0.7) == expected).all()


# ---- deviations and novelty


def variance_by_hand(model, train, new, weights):
    """v(x): least of |φ − Σ h_j φ_j|² + α Σ h_j²/w_j over h that add up to one."""
    n = len(train)
    kernel = kernel_of(model)
    noise = ALPHA / (np.ones(n) if weights is None else weights)
    border = np.ones((n, 1))
    system = np.block(
        [[kernel(train, train) + np.diag(noise), border], [border.T, np.zeros((1, 1))]]
    )
    right = np.vstack([kernel(train, new), np.ones((1, len(new)))])
    own = kernel(new, new).diagonal()
    return own - (right * np.linalg.solve(system, right)).sum(axis=0)


def kernel_of(model):
    if math.isinf(model.n_heads):
        return lambda a, b: kh.attention_kernel(a, b)
    heads = kh.GaussianHeads().sample(model.n_heads, 2, 0)
    return lambda a, b: kh.attention_features(a, heads) @ kh.attention_features(b, heads).T


@pytest.mark.parametrize("n_heads", [2, 40, math.inf])
def test_deviations_and_novelty_are_those_of_the_bordered_matrix(n_heads, setting, sets, rng):
    weights, groups = setting
    train, new, y = sets[:N], sets[N:], rng.normal(size=N)
    model = paper_regressor(n_heads, alpha=ALPHA, random_state=0)
    model.fit(train, y, sample_weight=weights, groups=groups)
    of_new = variance_by_hand(model, train, new, weights) + ALPHA
    deviations = model.predict_std(new)
    # one amplitude stands for all samples
    ratios = np.square(deviations) / of_new
    assert ratios == pytest.approx(np.full(4, ratios[0]), rel=1e-7)
    # each training sample by the fit without its group
    labels = np.arange(N) if groups is None else groups
    own = np.empty(N)
    for i in range(N):
        rest = np.flatnonzero(labels != labels[i])
        part = None if weights is None else weights[rest]
        own[i] = variance_by_hand(model, train[rest], train[i], part)[0] + ALPHA
    shares = shares_of(groups)
    expected = [shares[own < variance].sum() / shares.sum() for variance in of_new]
    assert model.novelty(new) == pytest.approx(expected)


def test_adaptive_intervals_are_wider_where_samples_are_few(rng):
    x = np.concatenate([rng.uniform(-1, 1, 60), [4.0]])[:, None]
    y = np.sin(3 * x[:, 0]) + 0.1 * rng.normal(size=61)
    model = kh.AttentionRegressor(
        math.inf, random_state=0, **{**PAPER_LAYER, "scaling": "standard"}
    )
    model.fit(x, y)
    near, far = np.diff(model.predict_interval([[0.0], [6.0]], 0.8, width="adaptive"))[:, 0]
    assert far > 3 * near


# ---- combinations


@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
def test_combinations_of_few_samples_add_a_quantile_of_held_out_errors(sets, rng):
    y = rng.normal(size=N)
    model = kh.AttentionRegressor(pooling="statistics", random_state=0).fit(sets[:N], y)
    assert model.interval_method == "held-out"
    errors = np.abs(y - model.held_out_predictions_)
    size = rank_of_shares(errors, np.ones(N), 0.6)
    low, high = model.predict_interval(sets[N:], 0.6).T
    assert np.allclose(high - model.predict(sets[N:]), size)
    assert np.allclose(model.predict(sets[N:]) - low, size)
    with pytest.raises(ValueError, match=r"width='adaptive' takes all leave-one-out fits"):
        model.predict_interval(sets[N:], 0.6, width="adaptive")


def test_combinations_of_many_samples_take_the_fits_of_all_members(rng):
    x = rng.normal(size=(310, 2, 1))
    y = x.max(axis=(1, 2)) + 0.1 * rng.normal(size=310)
    model = kh.AttentionRegressor(pooling="statistics", random_state=0).fit(x, y)
    assert not model.combination_.is_single
    assert model.interval_method == "jackknife+"
    intervals = model.predict_interval(x[:5], 0.8)
    assert (intervals[:, 0] < model.predict(x[:5])).all()
    assert (model.predict_std(x[:5]) > 0).all()
    assert ((model.novelty(x[:50]) >= 0) & (model.novelty(x[:50]) <= 1)).all()


# ---- refusals


def test_what_cannot_be_said_is_refused(sets, rng):
    model = paper_regressor(40, alpha=0.0, random_state=0)
    model.fit(sets[:N], rng.normal(size=N))
    with pytest.raises(ValueError, match=r"predict_std needs a positive penalty"):
        model.predict_std(sets[N:])
    for coverage in (0.0, 1.0, -0.5):
        with pytest.raises(ValueError, match="`coverage` must be"):
            model.predict_interval(sets[N:], coverage)


# ---- coverage


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [False, True])
def test_intervals_hold_nine_of_ten_outcomes(grouped, seed):
    rng = np.random.default_rng([seed, 4])
    n, held = 60, []
    for repetition in range(120):
        level = rng.normal(size=2 * n // 4)[np.arange(2 * n) // 4] if grouped else 0.0
        x = rng.normal(size=(2 * n, 3, 2))
        y = np.tanh(x[:, :, 0]).mean(axis=1) + level + 0.3 * rng.normal(size=2 * n)
        model = paper_regressor(20, random_state=repetition)
        model.fit(x[:n], y[:n], groups=np.arange(n) // 4 if grouped else None)
        low, high = model.predict_interval(x[n:], 0.9).T
        held.append(np.mean((low <= y[n:]) & (y[n:] <= high)))
    assert 0.87 < np.mean(held) < 0.94
