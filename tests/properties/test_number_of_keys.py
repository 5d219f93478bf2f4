"""Poolings that make sample-level features of the keys are "mean" on samples that have them.

"mean+size" has the number of keys, "mean+statistics" also their mean, spread and extremes;
`kh.tokens.with_size` and `with_statistics` add these by hand, after those that are given.
"""

import math

import numpy as np
import pytest
from devices import DEVICE
from paper import paper_classifier, paper_regressor

import keyhole as kh
from keyhole.data.tokens import TokenRule

N_SAMPLES = 40
BY_HAND = {"mean+size": kh.tokens.with_size, "mean+statistics": kh.tokens.with_statistics}
ROUTES = {
    "primal": {"n_heads": 3},
    "dual": {"n_heads": 40},
    "float32": {"n_heads": 40, "dtype": "float32"},
    "kernel": {"n_heads": math.inf},
    "softmax": {"n_heads": 40, "activation": "softmax"},
    "standardised": {"n_heads": 40, "scaling": "standard"},
    "each key a query": {"n_heads": 40, "query": "each"},
    "no intercept": {"n_heads": 40, "fit_intercept": False},
    "a penalty": {"n_heads": 40, "alpha": 0.1},
    "torch dual": {"n_heads": 40, "device": DEVICE},
    "torch kernel": {"n_heads": math.inf, "device": DEVICE},
}


def draw(rng, kind):
    """Samples of different sizes, and a target that grows with the number of keys."""
    n_sets = N_SAMPLES
    if kind == "groups":
        n_sets = 2 * N_SAMPLES
    keys = [rng.normal(size=(int(rng.integers(1, 6)), 3)) for _ in range(n_sets)]
    extras = None
    if kind == "extras":
        extras = rng.normal(size=(N_SAMPLES, 2)) + 10.0
    sets = kh.SetBatch(keys, rng.normal(size=(n_sets, 2)), extras)
    if kind == "groups":
        sets = kh.SetGroups(sets, [2] * N_SAMPLES)
    y = sets.token_counts + 0.1 * rng.normal(size=N_SAMPLES)
    return sets, y


@pytest.fixture(params=["sets", "extras", "groups"])
def samples(request, rng):
    return draw(rng, request.param)


@pytest.mark.parametrize("pooling", BY_HAND)
@pytest.mark.parametrize("route", ROUTES)
def test_the_number_of_keys_is_a_feature_of_the_sample(route, samples, pooling):
    settings = {"random_state": 0, "query": "given", **ROUTES[route]}
    if "device" in settings:
        pytest.importorskip("torch", reason="the torch route is tested where torch is installed")
    sets, y = samples
    is_grouped = isinstance(sets, kh.SetGroups)
    if is_grouped and settings["query"] == "each":
        pytest.skip("a query of every key takes one set per sample")
    with_features = BY_HAND[pooling](sets)
    weights = np.linspace(0.5, 2.0, N_SAMPLES)

    model = paper_regressor(pooling=pooling, **settings).fit(sets, y, weights)
    by_hand = paper_regressor(pooling="mean", **settings).fit(with_features, y, weights)

    # on a device statistics are those of the host within rounding
    rounding = 1e-9 if "device" in settings else 0.0

    def assert_same(numbers, by_hand):
        largest = np.abs(by_hand).max(initial=0.0)
        np.testing.assert_allclose(numbers, by_hand, rtol=0, atol=rounding * largest)

    assert_same(model.alpha_, by_hand.alpha_)
    assert_same(model.predict(sets), by_hand.predict(with_features))
    # those that are made of the keys are part of what `contributions` leaves
    n_given = 0 if sets.extras is None else sets.extras.shape[1]
    assert_same(
        model.extras_contributions(sets), by_hand.extras_contributions(with_features)[:, :n_given]
    )
    assert_same(
        np.concatenate(model.contributions(sets)),
        np.concatenate(by_hand.contributions(with_features)),
    )


@pytest.mark.parametrize("pooling", BY_HAND)
@pytest.mark.parametrize("n_heads", [3, 40, math.inf])
def test_what_follows_a_fit_knows_the_number_of_keys(n_heads, samples, tmp_path, pooling):
    sets, y = samples
    with_features = BY_HAND[pooling](sets)
    groups = np.arange(N_SAMPLES) // 2
    settings = {"n_heads": n_heads, "random_state": 0}

    model = paper_regressor(pooling=pooling, **settings).fit(sets, y, groups=groups)
    by_hand = paper_regressor(pooling="mean", **settings).fit(with_features, y, groups=groups)
    kh.save(model, tmp_path / "model.keyhole")
    loaded = kh.load(tmp_path / "model.keyhole")

    for fitted in (model, loaded):
        np.testing.assert_array_equal(fitted.predict(sets), by_hand.predict(with_features))
        np.testing.assert_allclose(
            fitted.predict_interval(sets), by_hand.predict_interval(with_features), rtol=1e-9
        )
        np.testing.assert_allclose(
            fitted.predict_std(sets), by_hand.predict_std(with_features), rtol=1e-6
        )
        np.testing.assert_array_equal(fitted.novelty(sets), by_hand.novelty(with_features))
        assert fitted.members_[0].params["pooling"] == pooling


def test_importance_is_of_the_features_that_were_given(samples):
    sets, y = samples
    model = paper_regressor(20, pooling="mean+size", random_state=0).fit(sets, y)
    names = model.coordinate_importance(n_repeats=1).names
    n_given = 0 if sets.extras is None else sets.extras.shape[1]
    assert sum(name.startswith("extra") for name in names) == n_given


@pytest.mark.parametrize("pooling", BY_HAND)
@pytest.mark.parametrize("scaling", ["none", "standard"])
@pytest.mark.parametrize("saves", [False, True])
def test_batches_count_keys(scaling, saves, samples, tmp_path, pooling):
    sets, y = samples
    with_features = BY_HAND[pooling](sets)
    settings = {"n_heads": 4, "scaling": scaling, "random_state": 0}
    model = paper_regressor(pooling=pooling, **settings)
    by_hand = paper_regressor(pooling="mean", **settings)
    for rows in np.split(np.arange(N_SAMPLES), 4):
        model.partial_fit(sets[rows], y[rows])
        by_hand.partial_fit(with_features[rows], y[rows])
        if saves:
            kh.save(model, tmp_path / "model.keyhole", overwrite=True)
            model = kh.load(tmp_path / "model.keyhole")
            by_hand.solve()
    np.testing.assert_allclose(model.predict(sets), by_hand.predict(with_features), rtol=1e-9)


def test_classes_and_tensors(rng):
    torch = pytest.importorskip("torch", reason="tensors are torch's")
    sets, y = draw(rng, "extras")
    labels = np.where(y > np.median(y), "many", "few")
    settings = {"n_heads": 20, "random_state": 0}
    model = paper_classifier(pooling="mean+size", **settings).fit(sets, labels)
    by_hand = paper_classifier(pooling="mean", **settings).fit(kh.tokens.with_size(sets), labels)
    np.testing.assert_array_equal(
        model.predict_proba(sets), by_hand.predict_proba(kh.tokens.with_size(sets))
    )
    tensors = sets.to(DEVICE)
    assert isinstance(tensors.tokens, torch.Tensor)
    on_device = paper_classifier(pooling="mean+size", **settings).fit(tensors, labels)
    np.testing.assert_allclose(
        on_device.predict_proba(tensors), model.predict_proba(sets), atol=1e-6
    )


def test_samples_of_one_size_are_as_without_it(rng):
    """A number of keys that never varies says nothing, and new samples of another size may come."""
    sets = kh.SetBatch(rng.normal(size=(N_SAMPLES, 3, 2)))
    y = rng.normal(size=N_SAMPLES)
    model = paper_regressor(20, pooling="mean+size", random_state=0).fit(sets, y)
    mean = paper_regressor(20, random_state=0).fit(sets, y)
    np.testing.assert_allclose(model.predict(sets), mean.predict(sets), rtol=1e-9, atol=1e-12)
    larger = kh.SetBatch(rng.normal(size=(2, 5, 2)))
    np.testing.assert_allclose(model.predict(larger), mean.predict(larger), rtol=1e-9, atol=1e-12)


def test_a_rule_that_forgets_the_size_is_caught(rng, monkeypatch):
    sets, y = draw(rng, "sets")
    model = paper_regressor(20, pooling="mean+size", random_state=0).fit(sets, y)
    by_hand = paper_regressor(20, random_state=0).fit(kh.tokens.with_size(sets), y)
    assert np.corrcoef(by_hand.predict(kh.tokens.with_size(sets)), y)[0, 1] > 0.9
    monkeypatch.setattr("keyhole.data.tokens.with_size", lambda batch: batch.with_extras(None))
    forgetful = TokenRule.learn(sets, "none", "given", "mean+size")
    assert forgetful.extras_centre is None
    assert model.tokens_.extras_centre is not None
