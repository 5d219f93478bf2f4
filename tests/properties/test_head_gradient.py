"""The gradient that a head distribution is learned along is that of the leave-one-out error,
whatever the activation.
"""

import numpy as np
import pytest
from ridges import gram_path

import keyhole as kh
from keyhole.attention.features import (
    DIFFERENTIABLE,
    attention_features,
    attention_pullback,
)
from keyhole.attention.head_error import Task, gradient_in_heads
from keyhole.attention.hops import HopTrace
from keyhole.data.sets import PooledSets
from keyhole.ridge.gram import loo_gradient, ridge_gram
from keyhole.ridge.problem import RidgeProblem

STEP = 1e-6


def sets(rng, n=12, dim=3):
    keys = [rng.normal(size=(rng.integers(1, 5), dim)) for _ in range(n)]
    return kh.SetBatch(keys, rng.normal(size=(n, dim)))


def slope(function, direction):
    return (function(STEP * direction) - function(-STEP * direction)) / (2 * STEP)


@pytest.mark.parametrize("activation", DIFFERENTIABLE)
@pytest.mark.parametrize("n_means", [1, 2, 5])
def test_pullback_is_the_transposed_derivative_of_the_features(activation, n_means, rng):
    batch, heads = sets(rng), 0.3 * rng.normal(size=(5, 4, 4))
    cotangent, direction = rng.normal(size=(12, 20)), rng.normal(size=(n_means, 4, 4))
    found = attention_pullback(batch, heads, cotangent, activation, n_means=n_means)

    def value(shift):
        return np.sum(
            cotangent * attention_features(batch, heads + shift[np.arange(5) % n_means], activation)
        )

    np.testing.assert_allclose(
        np.sum(found * direction), slope(value, direction), rtol=1e-5, atol=1e-6
    )


def test_broken_twin_a_softmax_that_forgets_its_normalisation_is_seen(rng, monkeypatch):
    from keyhole.attention import features as room

    def forgetful(activation, scores, slopes):
        slopes *= scores  # the weights

    monkeypatch.setattr(room, "through_weights", forgetful)
    with pytest.raises(AssertionError):
        test_pullback_is_the_transposed_derivative_of_the_features("softmax", 1, rng)


@pytest.mark.parametrize("each", [False, True])
def test_pooling_is_pulled_back_too(each, rng):
    batch = PooledSets(sets(rng), "sum", each)
    heads, cotangent, direction = (
        0.3 * rng.normal(size=(3, 4, 4)),
        rng.normal(size=(12, 12)),
        rng.normal(size=(3, 4, 4)),
    )
    found = attention_pullback(batch, heads, cotangent, "softmax")

    def value(shift):
        return np.sum(cotangent * attention_features(batch, heads + shift, "softmax"))

    np.testing.assert_allclose(
        np.sum(found * direction), slope(value, direction), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_left_out_groups_are_refits_and_have_their_gradient(fit_intercept, weighted, rng):
    n, alpha = 12, 0.6
    design, y = rng.normal(size=(n, 5)), rng.normal(size=(n, 2))
    gram, groups = design @ design.T, np.array([0, 1, 0, 2, 2, 1, 3, 0, 3, 3, 4, 4])
    weights = rng.uniform(0.5, 2.0, size=n) if weighted else None
    options = {"fit_intercept": fit_intercept, "weights": weights}
    found = loo_gradient(gram, y, alpha, groups=groups, **options)
    for group in range(5):
        others, out = groups != group, groups == group
        part = None if weights is None else weights[others]
        fit = gram_path(
            gram[np.ix_(others, others)],
            y[others],
            [alpha],
            fit_intercept=fit_intercept,
            weights=part,
        )
        predicted = gram[np.ix_(out, others)] @ fit.coef + fit.intercept
        np.testing.assert_allclose(found.residuals[out], y[out] - predicted, atol=1e-9)
    shift = rng.normal(size=(n, n))
    shift = shift + shift.T
    in_gram = slope(
        lambda move: loo_gradient(gram + move, y, alpha, groups=groups, **options).error, shift
    )
    np.testing.assert_allclose(np.sum(found.gram * shift), in_gram, rtol=1e-5)
    path = ridge_gram(gram, RidgeProblem.of(y, [1e3, alpha], groups=groups, **options))
    assert path.selection == "groups"
    np.testing.assert_allclose(path.errors[1], found.error)
    alone = loo_gradient(gram, y, alpha, groups=np.arange(n), **options)
    np.testing.assert_allclose(alone.gram, loo_gradient(gram, y, alpha, **options).gram, atol=1e-9)


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_leave_one_out_error_and_its_gradient_in_gram_and_penalty(fit_intercept, weighted, rng):
    n = 10
    design = rng.normal(size=(n, 6))
    gram, y = design @ design.T, rng.normal(size=(n, 2))
    weights = rng.uniform(0.5, 2.0, size=n) if weighted else None
    options = {"fit_intercept": fit_intercept, "weights": weights}
    found = loo_gradient(gram, y, 0.7, **options)
    exact = gram_path(gram, y, [0.7], **options)
    np.testing.assert_allclose(found.residuals, exact.left_out, rtol=1e-8)
    np.testing.assert_allclose(found.error, exact.error, rtol=1e-8)
    shift = rng.normal(size=(n, n))
    shift = shift + shift.T
    in_gram = slope(lambda move: loo_gradient(gram + move, y, 0.7, **options).error, shift)
    np.testing.assert_allclose(np.sum(found.gram * shift), in_gram, rtol=1e-5)
    in_alpha = slope(lambda move: loo_gradient(gram, y, 0.7 * np.exp(move), **options).error, 1.0)
    np.testing.assert_allclose(found.log_alpha, in_alpha, rtol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "softmax"])
@pytest.mark.parametrize("scales", [False, True])
def test_gradient_in_the_means(activation, scales, rng):
    task = Task.of(sets(rng, n=20), rng.normal(size=(20, 2)), None, activation, True)
    means, noise, direction = (
        rng.normal(size=(2, 4, 4)),
        0.3 * rng.normal(size=(5, 4, 4)),
        rng.normal(size=(2, 4, 4)),
    )
    found = gradient_in_heads(task, means, noise, 0.05, dtype="float64", scales=scales).means

    def error(move):
        return gradient_in_heads(task, means + move, noise, 0.05, dtype="float64").error

    np.testing.assert_allclose(
        np.sum(found * direction), slope(error, direction), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("activation", ["relu", "softmax"])
def test_gradient_in_the_scales(activation, rng):
    task = Task.of(sets(rng, n=20), rng.normal(size=(20, 2)), None, activation, True)
    means, noise, direction = (
        rng.normal(size=(2, 4, 4)),
        rng.normal(size=(5, 4, 4)),
        rng.normal(size=(2, 4)),
    )
    found = gradient_in_heads(task, means, noise, 0.05, dtype="float64", scales=True).scales

    def error(move):
        spread = np.outer(*np.exp(move))
        return gradient_in_heads(task, means, spread * noise, 0.05, dtype="float64").error

    np.testing.assert_allclose(
        found @ direction.ravel(), slope(error, direction), rtol=1e-4, atol=1e-7
    )


def test_gradient_with_queries_of_their_own_kind_and_extras(rng):
    batch = sets(rng, n=20)
    batch = batch.with_query(rng.normal(size=(20, 5))).with_extras(rng.normal(size=(20, 2)))
    task = Task.of(batch, batch.extras[:, :1] + rng.normal(size=(20, 2)), None, "relu", True)
    means, noise, direction = (rng.normal(size=(k, 6, 4)) for k in (2, 5, 2))
    found = gradient_in_heads(task, means, noise, 0.05, dtype="float64", scales=True)
    assert found.scales.shape == (6 + 4,)

    def error(move):
        return gradient_in_heads(task, means + move, noise, 0.05, dtype="float64").error

    np.testing.assert_allclose(
        np.sum(found.means * direction), slope(error, direction), rtol=1e-4, atol=1e-7
    )


def test_broken_twin_residuals_in_the_place_of_the_gradient_are_seen(rng):
    """Descending along leave-one-out residuals with the values held fixed is not descending the
    error.
    """
    batch = sets(rng, n=20)
    y = rng.normal(size=(20, 1))
    heads = 0.5 * rng.normal(size=(6, 4, 4))
    direction = rng.normal(size=(1, 4, 4))

    def error(shift):
        features = attention_features(batch, heads + shift)
        return loo_gradient(features @ features.T, y, 0.05).error

    features = attention_features(batch, heads)
    fit = gram_path(features @ features.T, y, [0.05])
    values = features.T @ fit.coef
    held = attention_pullback(batch, heads, -2 * fit.left_out @ values.T / 20, n_means=1)
    assert abs(np.sum(held * direction) - slope(error, direction)) > 1e-3 * abs(
        slope(error, direction)
    )


def test_softmax_is_pulled_back_however_large_the_scores(rng):
    """One number added to all scores of a set changes no weight: here 1e4, whose exponential
    overflows.
    """
    batch, heads = sets(rng), 0.3 * rng.normal(size=(5, 4, 4))
    cotangent, higher = rng.normal(size=(12, 20)), heads.copy()
    higher[:, -1, -1] += 1e4
    found = attention_pullback(batch, higher, cotangent, "softmax")
    np.testing.assert_allclose(
        found, attention_pullback(batch, heads, cotangent, "softmax"), atol=1e-9
    )


# ---- several hops --------------------------------------------------------------------------------


def hops_of(rng, asked=2, dim=3, patterns=2, hops=3):
    """Matrices of the hops before the last, and means and noise of the last one."""
    rows = [asked + k * patterns * dim + 1 for k in range(hops)]
    inner = [rng.normal(size=(patterns, f, dim + 1)) for f in rows[:-1]]
    return (
        inner,
        rng.normal(size=(2, rows[-1], dim + 1)),
        0.3 * rng.normal(size=(5, rows[-1], dim + 1)),
    )


@pytest.mark.parametrize("activation", ["relu", "softmax"])
@pytest.mark.parametrize("grouped", [False, True])
def test_gradient_through_all_hops(activation, grouped, rng):
    batch = (
        sets(rng, n=20).with_query(rng.normal(size=(20, 2))).with_extras(rng.normal(size=(20, 2)))
    )
    groups = np.arange(20) // 3 if grouped else None
    task = Task.of(
        batch, rng.normal(size=(20, 2)), rng.uniform(0.5, 2.0, 20), activation, True, groups
    )
    hops, means, noise = hops_of(rng)
    found = gradient_in_heads(task, means, noise, 0.05, dtype="float64", hops=hops)
    towards = [rng.normal(size=matrix.shape) for matrix in (*hops, means)]

    def error(move):
        *moved, last = (m + move * d for m, d in zip((*hops, means), towards, strict=True))
        return gradient_in_heads(task, last, noise, 0.05, dtype="float64", hops=moved).error

    expected = (error(STEP) - error(-STEP)) / (2 * STEP)
    along = sum(np.sum(g * d) for g, d in zip((*found.hops, found.means), towards, strict=True))
    np.testing.assert_allclose(along, expected, rtol=1e-4, atol=1e-7)
    for k in range(2):  # and each hop on its own
        alone = [np.where(j == k, towards[j], 0.0) for j in range(2)]
        pair = [
            gradient_in_heads(
                task,
                means,
                noise,
                0.05,
                dtype="float64",
                hops=[m + s * a for m, a in zip(hops, alone, strict=True)],
            ).error
            for s in (STEP, -STEP)
        ]
        slope_k = (pair[0] - pair[1]) / (2 * STEP)
        np.testing.assert_allclose(
            np.sum(found.hops[k] * towards[k]), slope_k, rtol=1e-4, atol=1e-7
        )


def test_broken_twin_a_hop_whose_query_has_no_gradient_is_seen(rng, monkeypatch):
    """What a later hop says of what an earlier one found is a part of the gradient of the earlier
    one.
    """
    whole = HopTrace.pullback

    def forgetful(self, cotangent):
        found = whole(self, cotangent)
        rows = self.hops[0].shape[1] - 1 + len(self.hops[0]) * self.sets.dim
        last = np.zeros_like(cotangent)
        last[:, :rows] = cotangent[:, :rows]
        return [whole(self, last)[0], found[1]]

    monkeypatch.setattr(HopTrace, "pullback", forgetful)
    with pytest.raises(AssertionError):
        test_gradient_through_all_hops("softmax", False, rng)


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_hops_of_samples_of_several_sets(pooling, rng):
    batch = PooledSets(kh.SetGroups(sets(rng, n=20), np.full(10, 2)), pooling)
    task = Task.of(batch, rng.normal(size=(10, 1)), None, "softmax", True)
    hops, means, noise = hops_of(rng, asked=3, hops=2)
    found = gradient_in_heads(task, means, noise, 0.05, dtype="float64", hops=hops).hops[0]
    direction = rng.normal(size=found.shape)

    def error(move):
        return gradient_in_heads(
            task, means, noise, 0.05, dtype="float64", hops=[hops[0] + move]
        ).error

    np.testing.assert_allclose(
        np.sum(found * direction), slope(error, direction), rtol=1e-4, atol=1e-7
    )


def test_a_hop_that_is_switched_off_changes_nothing(rng):
    """Zeros in the rows of what it finds: the same error and the same gradient as without it, and
    none of its own.
    """
    task = Task.of(sets(rng, n=20), rng.normal(size=(20, 2)), None, "softmax", True)
    hops, means, noise = hops_of(rng, asked=3, hops=2)
    for matrix in (means, noise):
        matrix[:, 3:-1] = 0.0
    with_it = gradient_in_heads(task, means, noise, 0.05, dtype="float64", hops=hops, scales=True)
    kept = np.r_[:3, means.shape[1] - 1]
    without = gradient_in_heads(
        task, means[:, kept], noise[:, kept], 0.05, dtype="float64", scales=True
    )
    np.testing.assert_allclose(with_it.error, without.error, rtol=1e-12)
    np.testing.assert_allclose(with_it.means[:, kept], without.means, atol=1e-12)
    np.testing.assert_allclose(with_it.hops[0], 0.0, atol=1e-12)
