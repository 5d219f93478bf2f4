"""Intervals, sets and variances from one factorisation are those of n fits that leave something
out, everywhere.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from configurations import CHOICES, Configuration, Plain, fit, penalties, pose
from layers import fit_layer
from paper import PAPER_LAYER, paper_regressor

import keyhole as kh
from keyhole.estimators.uncertainty import PlainJackknifeWarning

COVERAGE = 0.6
ROUTES = ("primal", "dual", "kernel", "primal", "dual", "kernel", "torch dual", "torch kernel")


class Refitted:
    """The same model fitted anew without every unit: a sample with its copies, or a group.

    Attributes
    ----------
    shares (k,), columns (k, t), left (k, t), variances (k,): of the samples to rank by
    new (k, m, t), new_variances (k, m): of new sets, by the fit without the unit of each of them
    """

    def __init__(self, model, problem):
        self.model, self.layer = model, model.layer_
        self.ready, self.fresh = (
            model.tokens_.apply(sets.numpy()) for sets in (problem.sets, problem.new)
        )
        self.y = problem.columns
        w = problem.joint_weights
        self.w, known = w, np.flatnonzero(w > 0)
        units = problem.groups if problem.groups is not None else np.arange(len(self.y))
        shares, rows, found = [], [], []
        for unit in np.unique(units[known]):
            members = known[units[known] == unit]
            rest = known[units[known] != unit]
            shares += [1 / len(members)] * len(members)
            rows += members.tolist()
            found += [(rest, member) for member in members]
        self.shares, self.rows = np.array(shares), np.array(rows)
        self.columns = self.y[self.rows]
        answers = [self.without(rest, member) for rest, member in found]
        self.left, self.variances, self.new, self.new_variances = (
            np.array(part) for part in zip(*answers, strict=True)
        )

    def without(self, rest, member):
        heads = getattr(self.layer, "heads", None) or self.layer.distribution
        options = {"activation": self.layer.activation, "fit_intercept": self.model.fit_intercept}
        new = fit_layer(
            self.ready[rest],
            self.y[rest],
            heads,
            np.array([self.model.alpha_]),
            weights=self.w[rest],
            **options,
        )
        own = self.ready[[member]]
        variance, variances = self.variance(rest, own), self.variance(rest, self.fresh)
        return new.layer.predict(own)[0], variance[0], new.layer.predict(self.fresh), variances

    def kernel(self, a, b):
        if hasattr(self.layer, "heads"):
            a_features, b_features = (
                kh.attention_features(x, self.layer.heads, self.layer.activation) for x in (a, b)
            )
            linear = a_features @ b_features.T
        else:
            linear = kh.attention_kernel(a, b, self.layer.distribution, self.layer.activation)
        return linear if a.extras is None else linear + a.extras @ b.extras.T

    def variance(self, rest, batch):
        """v(x) = k(x, x) − kᵀCk + (1 − 1ᵀCk)²/(1ᵀC1), C = (K + alpha/w)⁻¹, of all samples: copies
        are so many.
        """
        train, one = self.ready[rest], np.ones(len(rest))
        inverse = np.linalg.inv(
            self.kernel(train, train) + np.diag(self.model.alpha_ / self.w[rest])
        )
        k = self.kernel(batch, train)
        found = np.diagonal(self.kernel(batch, batch)) - np.einsum("mn,np,mp->m", k, inverse, k)
        if self.model.fit_intercept:
            found = found + np.square(1 - k @ inverse @ one) / (one @ inverse @ one)
        return found

    def ends(self, values):
        """By the definition: the least value above which less than c(G + 1) lie."""
        allowed = [v for v in np.sort(values) if self.shares[values > v].sum() < self.most]
        return allowed[0] if self.shares.sum() < self.most or allowed else -math.inf

    @property
    def most(self):
        return COVERAGE * (self.shares.sum() + 1) - 1e-9

    def interval(self, adaptive):
        alpha = self.model.alpha_
        found = np.empty((self.new.shape[1], self.new.shape[2], 2))
        for x, j in np.ndindex(*found.shape[:2]):
            spread = np.abs(self.columns[:, j] - self.left[:, j])
            if adaptive:
                spread = spread * np.sqrt(
                    (self.new_variances[:, x] + alpha) / (self.variances + alpha)
                )
            if self.shares.sum() < self.most:
                found[x, j] = [-math.inf, math.inf]
                continue
            found[x, j, 0] = self.ends(self.new[:, x, j] - spread)
            found[x, j, 1] = -self.ends(-self.new[:, x, j] - spread)
        return found

    def label_sets(self):
        model = self.model
        labels = (
            (self.columns[:, 0] > 0).astype(int)
            if self.columns.shape[1] == 1
            else self.columns.argmax(axis=1)
        )

        def chances(scores):
            scores = np.concatenate([-scores, scores], axis=-1) if scores.shape[-1] == 1 else scores
            powers = np.exp(model.temperature_ * (scores - scores.max(axis=-1, keepdims=True)))
            return powers / powers.sum(axis=-1, keepdims=True)

        ahead = chances(self.left)[np.arange(len(labels)), labels][:, None, None] - chances(
            self.new
        )
        # where only one sample is left, predictions are its output everywhere: ties, which rounding
        # breaks
        return [
            np.einsum("k,kmc->mc", self.shares, ahead > tie) < self.most for tie in (-1e-9, 1e-9)
        ]


def configurations(rng):
    """Every route, and every value of every other option, dealt out at random; penalties that
    refits can resolve.
    """
    n = len(ROUTES)
    dealt = {
        name: rng.permutation(np.resize(list(dict.fromkeys(v)), n)).tolist()
        for name, v in CHOICES.items()
    }
    for i, route in enumerate(ROUTES):
        options = {name: values[i] for name, values in dealt.items()}
        options |= {
            "route": route,
            "dtype": "float64",
            "decades": rng.uniform(0.7, 1.0),
            "penalty": "fixed",
        }
        yield replace(Configuration.draw(rng), **options).settled()


def check(config):
    problem = pose(config)
    model = fit(problem, penalties(problem, Plain(problem).size))
    expected = Refitted(model, problem)
    if (
        config.activation == "exp"
    ):  # e^s of a new set may outgrow the digits that refits have: of these nothing is compared
        size = np.abs(expected.new).max() / np.abs(problem.columns).max()
        if (
            not 1e-6 < size < 100
            or np.trace(expected.kernel(expected.ready, expected.ready)) > 1e6 * model.alpha_
        ):
            return
    tolerance = {"rtol": 1e-9, "atol": 1e-9 * max(1.0, np.abs(expected.new).max())}
    spread = (
        np.square(expected.columns - expected.left) / (expected.variances + model.alpha_)[:, None]
    )
    amplitude = expected.shares @ spread / expected.shares.sum()
    whole = expected.variance(np.flatnonzero(expected.w > 0), expected.fresh)
    deviation = np.sqrt(amplitude * (whole[:, None] + model.alpha_))
    np.testing.assert_allclose(
        model.predict_std(problem.new).reshape(deviation.shape), deviation, rtol=1e-7
    )
    below = [
        expected.shares[expected.variances < v * (1 - 1e-9)].sum() / expected.shares.sum()
        for v in whole
    ]
    above = [
        expected.shares[expected.variances < v * (1 + 1e-9)].sum() / expected.shares.sum()
        for v in whole
    ]
    novelty = model.novelty(problem.new)
    assert (np.array(below) - 1e-12 <= novelty).all()
    assert (novelty <= np.array(above) + 1e-12).all()
    if hasattr(model, "classes_"):
        least, most = expected.label_sets()
        found = model.predict_set(problem.new, COVERAGE)
        assert (least <= found).all()
        assert (found <= most).all()
        return
    for width in ("constant", "adaptive"):
        found = model.predict_interval(problem.new, COVERAGE, width=width)
        np.testing.assert_allclose(
            found.reshape(-1, 2), expected.interval(width == "adaptive").reshape(-1, 2), **tolerance
        )


def test_one_factorisation_is_all_the_refits(rng):
    for config in configurations(rng):
        try:
            check(config)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error} for check({config})") from error


N = 30


def draw(rng, n=N):
    keys = [rng.standard_normal((int(rng.integers(1, 5)), 2)) for _ in range(n)]
    return kh.SetBatch(keys), np.array([k[:, 0].mean() for k in keys]) + 0.3 * rng.standard_normal(
        n
    )


def plain(model, sets, coverage):
    """f(x) ± the ⌈c(n + 1)⌉-th smallest left-out error."""
    with pytest.warns(PlainJackknifeWarning, match="plain jackknife"):
        found = model.predict_interval(sets, coverage)
    errors = np.sort(model.jackknife_errors_[:, 0])
    size = errors[math.ceil(coverage * (len(errors) + 1)) - 1]
    f = model.predict(sets)
    np.testing.assert_allclose(found, np.stack([f - size, f + size], axis=1), rtol=1e-12)
    assert model.interval_method == "jackknife"
    return size


def test_without_a_factor_the_jackknife_is_plain_and_says_so(tmp_path, rng):
    sets, y = draw(rng)
    options = {**PAPER_LAYER, "random_state": 0}
    whole = kh.AttentionRegressor(5, alpha=1.0, **options).fit(sets, y)
    kh.save(whole, tmp_path / "lean", keep="predict")
    lean = kh.load(tmp_path / "lean")
    stream = (
        kh.AttentionRegressor(5, alpha=1.0, **options)
        .partial_fit(sets[:20], y[:20])
        .partial_fit(sets[20:], y[20:])
    )
    sizes = [plain(model, sets, 0.8) for model in (lean, stream)]
    errors = np.sort(np.abs(y - whole.loo_predictions_))
    np.testing.assert_allclose(sizes, errors[math.ceil(0.8 * (N + 1)) - 1], rtol=1e-9)
    few = kh.AttentionRegressor(5, alpha=[1.0, 2.0], solver="cg", **options).fit(sets, y)
    assert len(few.jackknife_errors_) == N // 10
    plain(few, sets, 0.6)
    for model, why in ((lean, "keep='all'"), (stream, "in batches"), (few, "conjugate gradients")):
        for ask in (
            model.novelty,
            model.predict_std,
            lambda x, m=model: m.predict_interval(x, width="adaptive"),
        ):
            with pytest.raises(ValueError, match=why):
                ask(sets)
    none = kh.AttentionRegressor(5, alpha=1.0, solver="cg", **options).fit(sets, y)
    with pytest.raises(ValueError, match="this model has none"):
        none.predict_interval(sets)


def test_factors_travel_and_go_with_what_they_were_made_from(tmp_path, rng):
    sets, y = draw(rng)
    groups = np.arange(N) // 3
    model = kh.AttentionRegressor(random_state=0).fit(
        sets, y, sample_weight=rng.uniform(0, 2, N), groups=groups
    )
    expected = model.predict_interval(sets, width="adaptive")
    kh.save(model, tmp_path / "all")
    again = kh.load(tmp_path / "all")
    assert again.interval_method == "jackknife+"
    np.testing.assert_array_equal(again.predict_interval(sets, width="adaptive"), expected)
    with pytest.warns(UserWarning, match="starts over"):
        again.set_params(n_heads=5).partial_fit(sets[:20], y[:20])
    before = plain(again, sets, 0.7)
    again.partial_fit(sets[20:], y[20:])
    kh.save(again, tmp_path / "stream")
    assert plain(again, sets, 0.7) != before
    loaded = kh.load(tmp_path / "stream")
    loaded.partial_fit(sets[:5], y[:5] + 1)
    assert len(loaded.solve().jackknife_errors_) == N + 5
    again.fit(sets, y)
    assert again.interval_method == "jackknife+"


def test_labels_without_a_factor(tmp_path, rng):
    x = rng.standard_normal((60, 2))
    y = np.where(x[:, 0] + 0.5 * rng.standard_normal(60) > 0, "yes", "no")
    model = kh.AttentionClassifier(8, alpha=1.0, random_state=0).fit(x, y)
    kh.save(model, tmp_path / "lean", keep="predict")
    with pytest.warns(PlainJackknifeWarning, match="sets are those"):
        found = kh.load(tmp_path / "lean").predict_set(x, 0.7)
    p = model.predict_proba(x)
    expected = [
        [(1 - model.jackknife_errors_ > chance).sum() < 0.7 * 61 for chance in row] for row in p
    ]
    np.testing.assert_array_equal(found, expected)
    # exchangeable samples: the sets of all leave-one-out fits hold the right label about as often
    # as asked for
    assert model.predict_set(x, 0.99).mean() >= model.predict_set(x, 0.7).mean()


def test_precision_of_features_and_penalties_at_the_edge(rng):
    sets, y = draw(rng)
    double, single = (
        kh.AttentionRegressor(9, alpha=0.5, dtype=t, random_state=0).fit(sets, y)
        for t in ("float64", "float32")
    )
    np.testing.assert_allclose(
        single.predict_interval(sets), double.predict_interval(sets), atol=1e-5
    )
    exact = kh.AttentionRegressor(60, alpha=0.0, random_state=0).fit(sets[:10], y[:10])
    assert exact.predict_interval(sets, 0.5).shape == (N, 2)
    with pytest.raises(ValueError, match="larger than rounding errors: alpha is 0"):
        exact.novelty(sets)
    few = double.fit(sets[:4], y[:4])
    assert np.isinf(
        few.predict_interval(sets)
    ).all()  # 90 % of five ranks is more than four samples have
    lone = double.fit(sets[:1], y[:1])  # nothing is left without it
    assert np.isinf(lone.predict_interval(sets, 0.5)).all()
    np.testing.assert_array_equal(lone.novelty(sets), 0.0)
    for wrong in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match="`coverage` must be"):
            few.predict_interval(sets, wrong)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("n_heads", [2, 60, math.inf])  # primal, dual, kernel
def test_variances_of_weighted_samples_are_those_of_fits_without_them(seed, rng, grouped, n_heads):
    """v(x_i) = K_ii − K_iR (K_RR + alpha/w)⁻¹ K_Ri over the rest R, which `novelty` and adaptive
    widths start from.
    """
    sets, weights = (
        kh.targets.sphere_sets(12, n_keys=3, dim=3, seed=seed),
        rng.uniform(0.3, 3.0, 12),
    )
    groups = np.repeat(np.arange(6), 2) if grouped else None
    model = paper_regressor(n_heads, alpha=0.1, fit_intercept=False, random_state=seed)
    model.fit(sets, sets.query[:, 0], sample_weight=weights, groups=groups)
    assert grouped or model.solver_ == {2: "primal", 60: "dual", math.inf: "kernel"}[n_heads]
    if math.isinf(n_heads):
        kernel = kh.attention_kernel(sets)
    else:
        features = kh.attention_features(sets, model.layer_.heads)
        kernel = features @ features.T
    expected = np.empty(12)
    for i in range(12):
        rest = np.arange(12) != i if groups is None else groups != groups[i]
        noisy = kernel[np.ix_(rest, rest)] + 0.1 * np.diag(1 / weights[rest])
        expected[i] = kernel[i, i] - kernel[i, rest] @ np.linalg.solve(noisy, kernel[rest, i])
    assert np.allclose(model.training_.refits().own_variances(), expected, rtol=1e-9)


def test_standard_errors_are_those_of_a_mean(seed, rng):
    sets = kh.targets.sphere_sets(12, n_keys=3, dim=3, seed=seed)
    model = paper_regressor(20, alpha=0.1, random_state=0)
    numbers = rng.normal(size=12)
    mean, error = model.fit(sets, sets.query[:, 0]).training_.refits().mean_and_error(numbers)
    assert (mean, error) == pytest.approx(
        (numbers.mean(), numbers.std(ddof=1) / math.sqrt(12)), rel=1e-12
    )
    groups = np.repeat(np.arange(4), 3)
    mean, error = (
        model.fit(sets, sets.query[:, 0], groups=groups).training_.refits().mean_and_error(numbers)
    )
    means = numbers.reshape(4, 3).mean(axis=1)
    assert (mean, error) == pytest.approx((means.mean(), means.std(ddof=1) / 2), rel=1e-12)


@pytest.mark.parametrize("n_keys", [3, 80])
def test_intervals_are_around_the_predictions_whatever_the_length_of_the_sets(rng, n_keys):
    """Fits to long sets take another constant off all features than fits to short ones."""
    sets = kh.SetBatch(2.0 + rng.normal(size=(90, n_keys, 3)))
    y = np.maximum(sets.tokens[:, 0], 0).reshape(90, n_keys).mean(axis=1)
    model = paper_regressor(40, alpha=0.1, random_state=0).fit(sets, y)
    assert model.solver_ == "dual"
    blocks_of_samples = model.training_.refits().predictions(sets, 2**28, variances=False)
    predicted = np.concatenate([of_block[:, 0] for _, of_block, _, _ in blocks_of_samples])
    np.testing.assert_allclose(predicted, model.predict(sets), rtol=1e-9)
