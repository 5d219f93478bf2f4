"""Drafts that share a Gram matrix: the losses and predictions are those of a fit of their own."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import keyhole as kh
from keyhole.layer import fit, learn_tokens, left_out_predictions
from keyhole.solvers.solve import SharedGrams
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet

HEADS = kh.GaussianHeads()
SETTINGS = list(
    product(
        ("none", "sphere", "standard"),
        ("given", "mean", "each"),
        ("mean", "mean+size", "mean+statistics", "sum"),
    )
)


@pytest.fixture
def keys(rng):
    return [rng.normal(size=(rng.integers(1, 7), 3)) + 1 for _ in range(30)]


@pytest.fixture
def y(keys, rng):
    return np.array([[key[:, 0].mean()] for key in keys]) + 0.1 * rng.normal(size=(30, 1))


def spec_of(**settings):
    first = LayerSpec(
        heads=HEADS,
        n_heads=16,
        activation="relu",
        loss="squared_error",
        keys="all",
        extras_scale=1.0,
        solver="direct",
    )
    return replace(first, **settings)


def agree(spec, data, grams, tokens=None):
    """One draft by a shared matrix, and by a fit of its own."""
    tokens = tokens or learn_tokens(spec, data)
    shared = left_out_predictions(spec, data, tokens, grams)
    own = fit(spec, data, tokens=tokens, draft=True)
    size = np.abs(own.predictions).max()
    np.testing.assert_allclose(shared.predictions, own.predictions, rtol=0, atol=1e-6 * size)
    assert shared.loss == pytest.approx(own.loss, rel=1e-6)


@pytest.mark.parametrize("n_heads", [16, np.inf])
def test_every_setting_has_the_losses_of_its_own_fit(keys, y, n_heads):
    data = TrainingSet(kh.SetBatch(keys), y * 1e30)
    grams = SharedGrams()
    for scaling, query, pooling in SETTINGS:
        agree(spec_of(n_heads=n_heads, scaling=scaling, query=query, pooling=pooling), data, grams)


@pytest.mark.parametrize("activation", ["relu", "softmax"])
def test_queries_extras_weights_and_folds_have_the_losses_of_their_own_fit(
    keys, y, rng, activation
):
    sets = kh.SetBatch(keys, rng.normal(size=(30, 2))).with_extras(rng.normal(size=(30, 2)))
    plain = TrainingSet(sets, y)
    weighted = replace(plain, weights=rng.uniform(0.5, 2, size=30))
    in_folds = replace(plain, groups=np.arange(30) % 5)
    grams = SharedGrams()
    for scaling, _, pooling in SETTINGS:
        spec = spec_of(activation=activation, scaling=scaling, query="given", pooling=pooling)
        for data in (plain, weighted, in_folds):
            agree(spec, data, grams, learn_tokens(spec, plain))


@pytest.mark.parametrize("n_outputs", [1, 3])
def test_classes_have_the_losses_of_their_own_fit(keys, rng, n_outputs):
    labels = rng.integers(0, 2, size=(30, n_outputs)) * 2.0 - 1
    data = TrainingSet(kh.SetBatch(keys), labels)
    grams = SharedGrams()
    for loss, pooling in product(("squared_error", "log_loss"), ("mean", "mean+size", "sum")):
        spec = spec_of(loss=loss, pooling=pooling, scaling="standard", query="mean")
        agree(replace(spec, criterion="log_loss", classifies=True), data, grams)


def test_samples_of_several_sets_have_the_losses_of_their_own_fit(keys, y):
    data = TrainingSet(kh.SetGroups(kh.SetBatch(keys), [1, 2, 3] * 5), y[:15])
    grams = SharedGrams()
    for scaling, _, pooling in SETTINGS:
        agree(spec_of(scaling=scaling, query="given", pooling=pooling), data, grams)


def test_samples_that_differ_in_a_query_that_is_not_used_are_left_out_together(keys, y, rng):
    rows = np.r_[np.arange(30), [4, 4, 7]]
    sets = kh.SetBatch([keys[row] for row in rows], rng.normal(size=(33, 3)))
    data = TrainingSet(sets, y[rows])
    grams = SharedGrams()
    for query in ("given", "mean", "each"):
        agree(spec_of(scaling="none", query=query, pooling="mean"), data, grams)


def test_a_default_fit_makes_every_matrix_once(keys, y, monkeypatch):
    made = []
    make = SharedGrams._made

    def count(self, problem):
        made.append(problem.spec)
        return make(self, problem)

    monkeypatch.setattr(SharedGrams, "_made", count)
    model = kh.AttentionRegressor(heads=kh.GaussianHeads(), n_heads=32, alpha=0.1, random_state=0)
    model.fit(kh.SetBatch(keys), y[:, 0])
    features = {(draft.scaling, draft.query, draft.activation) for draft in model.candidates_}
    assert len(made) == len(features) < len(model.candidates_)


def test_heads_of_the_next_draft_are_not_drawn_again(keys, y, monkeypatch):
    drawn = []
    sample = kh.GaussianHeads.sample

    def count(self, n_heads, *arguments, **options):
        drawn.append(n_heads)
        return sample(self, n_heads, *arguments, **options)

    monkeypatch.setattr(kh.GaussianHeads, "sample", count)
    data = TrainingSet(kh.SetBatch(keys), y)
    grams = SharedGrams()
    for scaling in ("none", "sphere", "standard"):
        spec = spec_of(scaling=scaling, query="mean", pooling="mean")
        left_out_predictions(spec, data, learn_tokens(spec, data), grams)
    assert sum(drawn) == 16
