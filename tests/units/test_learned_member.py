"""Learned heads as a layer among others: when they are tried, and under which settings."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.data.tokens import with_ages
from keyhole.fit.members import Given, Shape, plan_layers

SHAPE = Shape(n_samples=600, n_keys=6000, dim=10, query_dim=10, has_query=True, n_extras=0)


def learned_layers(shape, **given):
    return [layer for layer in plan_layers(Given(**given), shape).layers if layer.learns_heads]


def shape_of(**changes):
    return Shape(**{**vars(SHAPE), **changes})


@pytest.mark.parametrize("n_samples", [300, 1_000, 20_000])
def test_defaults_learn_from_three_hundred_samples_on(n_samples):
    keys = 10 * n_samples
    assert len(learned_layers(shape_of(n_samples=n_samples, n_keys=keys))) == 1
    assert learned_layers(shape_of(n_samples=299)) == []


def test_heads_that_would_take_too_long_are_named():
    plan = plan_layers(Given(), shape_of(dim=2_000, query_dim=2_000))
    assert "learned heads" in plan.left_out


@pytest.mark.parametrize("given", [{"pooling": "sum"}, {"query": "each"}, {"activation": "step"}])
def test_nothing_is_learned_where_it_cannot_be(given):
    assert learned_layers(shape_of(has_query="query" not in given), **given) == []
    assert learned_layers(shape_of(is_plain=False)) == []


def test_heads_to_be_learned_are_one_layer():
    (layer,) = plan_layers(Given(heads=kh.LearnedHeads()), SHAPE).layers
    assert layer.activation == "softmax"
    (layer,) = plan_layers(Given(heads=kh.LearnedHeads()), shape_of(has_query=False)).layers
    assert layer.activation == "relu"


def test_ages_are_left_as_they_are():
    keys = with_ages([np.ones((4, 2))] * 300, n_ages=4)
    shape = Shape.of(kh.SetBatch(keys, np.ones((300, 6))))
    assert shape.has_ages
    (layer,) = learned_layers(shape_of(has_ages=True))
    assert layer.scaling == "none"


def test_a_default_fit_with_sample_level_features_learns():
    rng = np.random.default_rng(0)
    sets = kh.SetBatch(rng.normal(size=(300, 2, 2)), extras=rng.normal(size=(300, 1)))
    y = sets.extras[:, 0] + 0.1 * rng.normal(size=300)
    model = kh.AttentionRegressor(random_state=0, mlp="none").fit(sets, y)
    assert model.score(sets, y) > 0.9
