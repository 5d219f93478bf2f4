"""Every backend knows every activation that the registry says it knows.

An activation that is added to the registry and forgotten in a backend fails here.
"""

from typing import get_args, get_type_hints

import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.activations import gaussian_moment
from keyhole.attention.features import attention_features, attention_weights, plain_features
from keyhole.attention.gradient import Task, error_gradient
from keyhole.attention.heads import HeadArray
from keyhole.registry import ACTIVATIONS, POINTWISE, POOLINGS, QUERIES, SCALINGS

torch = pytest.importorskip("torch", reason="the backend of devices is tested where torch is")

WITH_SLOPE = [name for name, record in ACTIVATIONS.items() if record.slope is not None]


@pytest.fixture
def sets(rng):
    keys = [rng.normal(size=(length, 2)) for length in (1, 3, 3, 5)]
    return kh.SetBatch(keys, rng.normal(size=(4, 2)))


@pytest.fixture
def heads(rng):
    return 0.5 * rng.normal(size=(6, 3, 3))


def features_by_the_record(sets, heads, activation):
    """φ of every set from the value of the record alone."""
    record = ACTIVATIONS[activation]
    rows = []
    for one in sets:
        query = one.extended_query()[0]
        keys = one.extended_keys()
        weights = record.value(np, np.einsum("d,mde,ke->mk", query, heads, keys))
        if record.is_pointwise:
            weights = weights / len(keys)
        rows.append((weights @ keys).ravel())
    return np.array(rows) / np.sqrt(len(heads))


def quadrature_moment(activation, h, k, rho):
    """E[σ(u)σ(v)] of unit deviations and means h and k, by a fine grid in both directions."""
    value = ACTIVATIONS[activation].value
    z = np.linspace(-9.0, 9.0, 4001)
    density = np.exp(-z * z / 2)
    density /= density.sum()
    u = h + z[:, None]
    v = k + rho * z[:, None] + np.sqrt(1 - rho * rho) * z
    return float(density @ (value(np, u) * value(np, v)) @ density)


# ---- values


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_compiled_loop_knows_it(activation, sets, heads):
    expected = features_by_the_record(sets, heads, activation)
    assert np.allclose(attention_features(sets, heads, activation), expected, rtol=1e-10)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_plain_numpy_knows_it(activation, sets, heads):
    expected = features_by_the_record(sets, heads, activation)
    features = plain_features(sets, heads, activation) / np.sqrt(len(heads))
    assert np.allclose(features, expected, rtol=1e-10)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_torch_knows_it(activation, sets, heads):
    expected = features_by_the_record(sets, heads, activation)
    features = attention_features(sets.to("cpu"), heads, activation)
    assert isinstance(features, torch.Tensor)
    assert np.allclose(features.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_attention_weights_are_its_values(activation, sets, heads):
    record = ACTIVATIONS[activation]
    first = sets[1]
    scores = np.einsum("d,mde,ke->mk", first.extended_query()[0], heads, first.extended_keys())
    weights = record.value(np, scores)
    if record.is_pointwise:
        weights = weights / 3
    found = attention_weights(first, HeadArray(heads), activation, 1)
    assert np.allclose(found[:, 0], weights.mean(axis=0))


# ---- moments and kernels


@pytest.mark.parametrize("activation", POINTWISE)
@pytest.mark.parametrize(("h", "k", "rho"), [(0.0, 0.0, 0.6), (0.7, -0.4, -0.3)])
def test_its_moment_is_the_integral_of_its_values(activation, h, k, rho):
    expected = quadrature_moment(activation, h, k, rho)
    assert float(gaussian_moment(activation, h, k, 1.0, 1.0, rho)) == pytest.approx(
        expected, rel=2e-3
    )


@pytest.mark.parametrize("activation", [name for name in POINTWISE if name != "exp"])
def test_the_power_is_how_its_moment_grows_with_the_deviation(activation):
    record = ACTIVATIONS[activation]
    one = float(gaussian_moment(activation, 0.0, 0.0, 1.0, 1.0, 0.5))
    three = float(gaussian_moment(activation, 0.0, 0.0, 3.0, 3.0, 0.5))
    assert three == pytest.approx(one * 9.0**record.power)


@pytest.mark.parametrize("activation", POINTWISE)
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_kernels_of_host_and_torch_are_its_moments(activation, mean, sets):
    distribution = kh.GaussianHeads(mean=mean)
    expected = np.zeros((4, 4))
    for i, a in enumerate(sets):
        for j, b in enumerate(sets):
            (u_0,), (v_0,) = a.extended_query(), b.extended_query()
            u, v = a.extended_keys(), b.extended_keys()
            covariance = 0.25 * (u_0 @ v_0) * (u @ v.T)
            std_u = 0.5 * np.linalg.norm(u_0) * np.linalg.norm(u, axis=1)
            std_v = 0.5 * np.linalg.norm(v_0) * np.linalg.norm(v, axis=1)
            moments = gaussian_moment(
                activation,
                mean * (u[:, :-1] @ u_0[:-1])[:, None],
                mean * (v[:, :-1] @ v_0[:-1])[None, :],
                std_u[:, None],
                std_v[None, :],
                np.clip(covariance / np.outer(std_u, std_v), -1.0, 1.0),
            )
            expected[i, j] = (moments * (u @ v.T)).mean()
    host = kh.attention_kernel(sets, heads=distribution, activation=activation)
    assert np.allclose(host, expected, rtol=1e-9)
    tensor = kh.attention_kernel(sets.to("cpu"), heads=distribution, activation=activation)
    assert np.allclose(tensor.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name not in POINTWISE])
def test_without_a_moment_there_is_no_kernel(activation, sets):
    with pytest.raises(ValueError, match=f"'{activation}'.*Use finite heads"):
        kh.attention_kernel(sets, activation=activation)
    with pytest.raises(ValueError, match=f"'{activation}'.*Use finite heads"):
        kh.attention_kernel(sets.to("cpu"), activation=activation)


# ---- slopes


@pytest.mark.parametrize("activation", WITH_SLOPE)
def test_its_slope_is_the_derivative_of_its_values(activation, rng):
    record = ACTIVATIONS[activation]
    scores, gradient, step = rng.normal(size=(3, 2, 5))
    change = record.value(np, scores + 1e-6 * step) - record.value(np, scores - 1e-6 * step)
    expected = (gradient * change).sum() / 2e-6
    slope = record.slope(np, scores, gradient)
    assert (slope * step).sum() == pytest.approx(expected, rel=1e-6)
    tensors = record.slope(torch, torch.tensor(scores), torch.tensor(gradient))
    assert np.allclose(tensors.numpy(), slope)


@pytest.mark.parametrize("activation", WITH_SLOPE)
def test_heads_are_learned_under_it(activation, sets, heads, rng):
    for device in (None, "cpu"):
        placed = sets if device is None else sets.to(device)
        task = Task(
            sets=placed,
            outputs=rng.normal(size=(4, 1)),
            weights=None,
            groups=None,
            extras=np.zeros((4, 0)),
            activation=activation,
        )
        placed_heads = heads if device is None else torch.as_tensor(heads)
        gradient = error_gradient(task, [], placed_heads, 0.5)
        assert gradient.heads.any()


def test_without_a_slope_heads_are_not_learned(sets):
    for activation in set(ACTIVATIONS) - set(WITH_SLOPE):
        with pytest.raises(ValueError, match=f"must have a slope.*got '{activation}'"):
            kh.LearnedHeads().fit(sets, np.arange(4.0), activation=activation)


# ---- estimators


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_estimators_take_it_under_every_pooling(activation, pooling, rng):
    extras = rng.normal(size=(12, 1))
    sets = kh.SetBatch(rng.normal(size=(12, 3, 2)) / 2, extras=extras)
    model = kh.AttentionRegressor(
        n_heads=8,
        heads=kh.GaussianHeads(),
        activation=activation,
        pooling=pooling,
        scaling="standard",
        query="given",
        alpha=1.0,
        random_state=0,
    )
    parts, rest = model.fit(sets, rng.normal(size=12)).contributions(sets, return_rest=True)
    totals = [part.sum() for part in parts] + rest
    assert np.allclose(totals, model.predict(sets), atol=1e-10)


@pytest.mark.parametrize("estimator", [kh.AttentionRegressor, kh.AttentionClassifier])
@pytest.mark.parametrize(
    ("parameter", "names"),
    [
        ("activation", ACTIVATIONS),
        ("pooling", POOLINGS),
        ("scaling", SCALINGS),
        ("query", QUERIES),
    ],
)
def test_signatures_and_docstrings_have_all_names(estimator, parameter, names):
    hint = get_type_hints(estimator.__init__)[parameter]
    words = {word for part in [hint, *get_args(hint)] for word in get_args(part) or [part]}
    assert {word for word in words if isinstance(word, str)} == {*names, "auto"}
    described = estimator.__doc__.split(f"\n    {parameter} : ")[1].split("\n")[0]
    for name in names:
        assert f'"{name}"' in described


def test_an_unknown_activation_is_refused_by_name(sets, heads):
    for call in (
        lambda: attention_features(sets, heads, "tanh"),
        lambda: attention_features(sets.to("cpu"), heads, "tanh"),
        lambda: kh.attention_kernel(sets, activation="tanh"),
    ):
        with pytest.raises(ValueError, match=r"`activation` must be one of 'relu'.*got 'tanh'"):
            call()
