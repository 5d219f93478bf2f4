"""Tensors are computed on with torch, by the code of the host: the CPU stands for any device."""

import math

import numpy as np
import pytest
from paper import PAPER_LAYER

import keyhole as kh
from keyhole.registry import ACTIVATIONS, POINTWISE

torch = pytest.importorskip("torch", reason="the device route is tested where torch is installed")

N = 24
QUERIES = ["with query", "without"]
MEANS = [0.0, 1.0, "matrix"]


def make_sets(rng, query="with query", extras=None):
    keys = [rng.normal(size=(int(rng.integers(1, 6)), 3)) / 2 for _ in range(N)]
    return kh.SetBatch(keys, rng.normal(size=(N, 3)) / 2 if query == "with query" else None, extras)


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_features(activation, query, rng):
    sets = make_sets(rng, query)
    heads = kh.GaussianHeads(mean=1.0).sample(7, 3, 0)
    expected = kh.attention_features(sets, heads, activation)
    tensors = kh.attention_features(sets.to("cpu"), heads, activation)
    assert np.allclose(tensors.numpy(), expected, rtol=1e-10)
    narrow = kh.attention_features(sets.astype("float32").to("cpu"), heads, activation)
    assert narrow.dtype == torch.float32
    if activation != "step":
        assert np.allclose(narrow.numpy(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("activation", POINTWISE)
def test_kernels(activation, mean, query, rng):
    sets = make_sets(rng, query)
    mean = rng.normal(size=(4, 4)) / 2 if mean == "matrix" else mean
    heads = kh.GaussianHeads(mean=mean)
    expected = kh.attention_kernel(sets, sets[:5], heads, activation)
    placed = sets.to("cpu")
    found = kh.attention_kernel(placed, placed[:5], heads, activation)
    assert np.allclose(found.numpy(), expected, rtol=1e-9)
    square = kh.attention_kernel(placed, None, heads, activation).numpy()
    assert np.allclose(square[:, :5], expected, rtol=1e-9)
    assert np.allclose(square, square.T, rtol=1e-12)


@pytest.mark.parametrize(
    ("pooling", "scaling"),
    [("mean", "standard"), ("mean+size", "sphere"), ("sum", "none"), ("statistics", "none")],
)
@pytest.mark.parametrize("query", ["given", "none", "mean", "each"])
@pytest.mark.parametrize("n_heads", [3, 30, math.inf, kh.Landmarks(9)], ids=str)
def test_fits_of_one_layer(n_heads, query, pooling, scaling, rng):
    sets = make_sets(rng, "with query" if query == "given" else "without", rng.normal(size=(N, 1)))
    query = "given" if query == "none" else query
    y = rng.normal(size=N)
    model = kh.AttentionRegressor(
        n_heads,
        heads=kh.GaussianHeads(),
        activation="relu",
        pooling=pooling,
        scaling=scaling,
        query=query,
        alpha=0.5,
        random_state=0,
    )
    expected = model.fit(sets, y)
    host = expected.predict(sets)
    left_out = expected.loo_predictions_
    found = model.set_params(device="cpu").fit(sets, y)
    assert np.allclose(found.predict(sets), host, rtol=1e-7, atol=1e-8)
    assert np.allclose(found.loo_predictions_, left_out, rtol=1e-6, atol=1e-7)


def test_all_that_a_layer_says(rng):
    sets, y = make_sets(rng), rng.normal(size=N)
    host, device = (
        kh.AttentionRegressor(30, alpha=0.5, random_state=0, device=device, **PAPER_LAYER)
        for device in (None, "cpu")
    )
    host.fit(sets, y)
    device.fit(sets, y)
    assert np.allclose(device.predict_std(sets), host.predict_std(sets), rtol=1e-7)
    assert np.allclose(device.novelty(sets), host.novelty(sets))
    assert np.allclose(device.predict_interval(sets, 0.8), host.predict_interval(sets, 0.8))
    for one, other in zip(device.contributions(sets), host.contributions(sets), strict=True):
        assert np.allclose(one, other, atol=1e-10)


@pytest.mark.parametrize("loss", ["log_loss", "squared_error"])
@pytest.mark.parametrize("n_heads", [3, math.inf])
def test_classifiers(loss, n_heads, rng):
    sets, y = make_sets(rng), np.arange(N) % 3
    model = kh.AttentionClassifier(n_heads, alpha=0.5, loss=loss, random_state=0, **PAPER_LAYER)
    host = model.fit(sets, y).predict_proba(sets)
    device = model.set_params(device="cpu").fit(sets, y).predict_proba(sets)
    assert np.allclose(device, host, atol=1e-6)


def test_combinations_follow_the_tensors_they_are_given(rng):
    sets = make_sets(rng)
    y = np.tanh(sets.query[:, 0]) + 0.1 * rng.normal(size=N)
    model = kh.AttentionRegressor(
        16, pooling="mean", query="given", scaling="standard", random_state=0
    )
    host = model.fit(sets, y).predict(sets)
    device = model.fit(sets.to("cpu"), y)
    assert len(device.members_) > 4
    # nearly equal layers share their weight in ways that rounding decides
    assert np.allclose(device.predict(sets), host, atol=1e-3)
    assert np.allclose(device.predict(sets.to("cpu")), device.predict(sets))


def test_devices_that_are_not_there_are_refused(rng):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((ValueError, RuntimeError), match="cuda"):
        kh.AttentionRegressor(8, device="cuda").fit(make_sets(rng), rng.normal(size=N))
    host = kh.AttentionRegressor(8, device="auto", alpha=1.0, random_state=0, **PAPER_LAYER)
    assert np.isfinite(host.fit(make_sets(rng), rng.normal(size=N)).loo_error_)
