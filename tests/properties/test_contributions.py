"""What rows add to a prediction, with what is left of the sample, is the prediction."""

import math

import numpy as np
import pytest

import keyhole as kh
from keyhole.fit.second_kernel import nodes_needed
from keyhole.registry import ACTIVATIONS, POINTWISE, POOLINGS

N = 14


def make_sets(rng, query):
    """Ragged sets with sample-level features; a query of another dimension than the rows."""
    keys = [rng.normal(size=(int(rng.integers(1, 5)), 3)) / 2 for _ in range(N)]
    queries = rng.normal(size=(N, 2)) if query == "with query" else None
    return kh.SetBatch(keys, queries, rng.normal(size=(N, 2)))


def make_groups(rng, query):
    """Samples of one to three sets each."""
    keys = [rng.normal(size=(int(rng.integers(1, 4)), 3)) / 2 for _ in range(2 * N)]
    queries = rng.normal(size=(2 * N, 2)) if query == "with query" else None
    return kh.SetGroups(kh.SetBatch(keys, queries), [1, 3] * (N // 2), rng.normal(size=(N, 2)))


def layer(n_heads, activation, pooling="mean", query="given", **settings):
    options = {"heads": kh.GaussianHeads(mean=0.5, scale=0.3), "scaling": "standard"}
    return kh.AttentionRegressor(
        n_heads,
        activation=activation,
        pooling=pooling,
        query=query,
        alpha=0.5,
        random_state=0,
        **{**options, **settings},
    )


def check_sums(model, sets):
    """Contributions of each sample, and what is left of it, add up to 1e-9 of their size."""
    decide = getattr(model, "decision_function", model.predict)
    predicted = decide(sets)
    parts, rest = model.contributions(sets, return_rest=True)
    assert [len(part) for part in parts] == sets.token_counts.tolist()
    totals = np.array([part.sum(axis=0) for part in parts]) + rest
    sizes = np.array([np.abs(part).sum(axis=0) for part in parts]) + np.abs(rest)
    assert (np.abs(totals - predicted) <= 1e-9 * sizes).all()


QUERIES = ["with query", "without", "mean", "each"]


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("mlp", ["none", "only"])
def test_every_activation_and_query_adds_up(activation, query, mlp, rng):
    sets = make_sets(rng, query)
    source = query if query in ("mean", "each") else "given"
    sizes = [9, math.inf, kh.Landmarks(6)] if activation in POINTWISE else [9]
    for n_heads in sizes:
        model = layer(n_heads, activation, query=source, mlp=mlp)
        check_sums(model.fit(sets, rng.normal(size=(N, 2))), sets)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("mlp", ["none", "only"])
@pytest.mark.parametrize("make", [make_sets, make_groups])
def test_every_pooling_adds_up(make, pooling, mlp, rng):
    sets = make(rng, "with query")
    for n_heads in (9, math.inf, kh.Landmarks(6)):
        model = layer(n_heads, "relu", pooling=pooling, mlp=mlp)
        check_sums(model.fit(sets, rng.normal(size=N)), sets)


@pytest.mark.parametrize("query", ["with query", "without"])
def test_combinations_add_up(query, rng):
    sets = make_sets(rng, query)
    check_sums(kh.AttentionRegressor(8, random_state=0).fit(sets, rng.normal(size=N)), sets)
    labels = np.arange(N) % 3
    check_sums(kh.AttentionClassifier(8, random_state=0).fit(sets, labels), sets)


def test_losses_without_a_closed_form_add_up(rng):
    sets = make_sets(rng, "with query")
    model = kh.AttentionClassifier(
        9,
        random_state=0,
        **{
            "heads": kh.GaussianHeads(),
            "activation": "relu",
            "pooling": "mean",
            "scaling": "standard",
            "query": "given",
        },
    )
    check_sums(model.fit(sets, np.arange(N) % 2), sets)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("pooling", "query"), [("mean", "given"), ("sum", "mean"), ("mean", "each"), ("sum", "each")]
)
def test_contributions_of_a_linear_layer_are_the_formula(activation, pooling, query, rng):
    """c_i = Σ_m M^{-1/2} w_mi <v_m, x~_i>, summed over queries."""
    sets = kh.SetBatch(
        [rng.normal(size=(int(rng.integers(1, 6)), 3)) for _ in range(N)], rng.normal(size=(N, 2))
    )
    distribution = kh.GaussianHeads(scale=0.2)
    model = layer(9, activation, pooling, query, heads=distribution, scaling="none")
    model.fit(sets, rng.normal(size=(N, 2)))
    query_dim = 2 if query == "given" else 3
    heads = distribution.sample(9, 3, 0, query_dim)
    value = ACTIVATIONS[activation].value
    for one, found in zip(sets, model.contributions(sets), strict=True):
        n_keys = len(one.tokens)
        queries = {
            "given": one.query,
            "mean": one.tokens.mean(axis=0)[None],
            "each": one.tokens,
        }[query]
        asked, keys = (np.hstack([x, np.ones((len(x), 1))]) for x in (queries, one.tokens))
        weights = value(np, np.einsum("qd,mde,ke->qmk", asked, heads, keys))
        if ACTIVATIONS[activation].is_pointwise:
            weights = weights / n_keys
        weights = weights * (n_keys if pooling == "sum" else 1 / len(queries))
        expected = np.einsum("qmk,ke,met->kt", weights, keys, model.values_) / 3
        assert np.allclose(found, expected, atol=1e-12 * np.abs(expected).max(), rtol=1e-9)


def test_contributions_through_a_second_kernel_are_those_of_aumann_and_shapley(rng):
    """c_i = ∫ <∇f(μ₀ + t(μ − μ₀)), μ_i − μ₀/N> dt, by differences at many steps of the path."""
    sets = kh.SetBatch([rng.normal(size=(length, 2)) for length in (1, 2, 3, 3, 4, 2)])
    y = rng.normal(size=6)
    model = layer(5, "relu", mlp="only", mlp_width=0.5, scaling="none").fit(sets, y)
    heads = kh.GaussianHeads(mean=0.5, scale=0.3).sample(5, 2, 0)
    phi = kh.attention_features(sets, heads)
    squares = np.square(phi[:, None] - phi).sum(axis=2)
    width = 0.5 * np.median(squares[np.triu_indices(6, 1)])

    def f(mu):
        distances = np.square(mu - phi).sum(axis=-1)
        return np.exp(-distances / width) @ model.dual_coef_ + model.intercept_

    assert np.allclose([f(mu) for mu in phi], model.predict(sets))
    start = phi.mean(axis=0)
    middles = (np.arange(2000) + 0.5) / 2000
    parts, rest = model.contributions(sets, return_rest=True)
    for i in (2, 4):
        assert rest[i] == pytest.approx(f(start))
        for key, found in zip(sets[i].tokens, parts[i], strict=True):
            n_keys = len(sets[i].tokens)
            own = kh.attention_features(kh.SetBatch(key[None, None]), heads)[0] / n_keys
            direction = own - start / n_keys
            points = start + middles[:, None] * (phi[i] - start)
            step = 1e-5
            slopes = [
                (f(point + step * direction) - f(point - step * direction)) / (2 * step)
                for point in points
            ]
            assert found == pytest.approx(np.mean(slopes), rel=1e-4, abs=1e-7)


def test_a_statistic_belongs_to_the_rows_that_set_it(rng):
    """Of the largest of the first coordinates, the row that attains it has nearly all."""
    x = rng.normal(size=(200, 4, 2))
    model = layer(8, "relu", pooling="statistics", scaling="none", mlp="none")
    model.set_params(alpha=1e-6).fit(x, x[:, :, 0].max(axis=1))
    largest = x[:, :, 0].argmax(axis=1)
    parts = np.array(model.contributions(x))
    others = parts.sum(axis=1) - parts[np.arange(200), largest]
    assert np.allclose(parts[np.arange(200), largest], x[:, :, 0].max(axis=1), atol=0.05)
    assert np.abs(others).max() < 0.05


@pytest.mark.parametrize("n_heads", [20, math.inf])
def test_of_sums_a_contribution_is_the_effect_of_removal(n_heads, rng):
    sets = make_sets(rng, "with query")
    model = layer(n_heads, "relu", pooling="sum").fit(sets, rng.normal(size=N))
    i = int(np.argmax(sets.lengths))
    keys = sets[i].tokens
    for k, part in enumerate(model.contributions(sets[i])[0]):
        without = kh.SetBatch([np.delete(keys, k, axis=0)], sets[i].query, sets[i].extras)
        assert model.predict(sets[i]) - model.predict(without) == pytest.approx(part, abs=1e-10)


@pytest.mark.parametrize("kappa", [1e6, math.inf, math.nan])
def test_what_is_too_far_away_to_integrate_is_refused(kappa):
    with pytest.raises(ValueError, match="need samples near the training samples"):
        nodes_needed(kappa)
