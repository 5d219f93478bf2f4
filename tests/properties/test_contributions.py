"""What keys and columns of extras add to a prediction, with the intercept, is the prediction: in
every setting.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from configurations import CHOICES, ROUTES, Configuration, decisions, fit, penalties, pose

import keyhole as kh


def check_sums(model, sets, expected, allowed, rounding=0.0):
    """Contributions of keys, of extras and the intercept add up to what is expected, in units of
    their sizes.

    With infinitely many heads predictions are sums Σ_j a_j K(x, x_j) that may cancel: both have the
    rounding of these.
    """
    parts, extras = model.contributions(sets), model.extras_contributions(sets)
    assert [len(part) for part in parts] == sets.token_counts.tolist()
    found = np.array([part.sum(axis=0) for part in parts]) + extras.sum(axis=1) + model.intercept_
    sizes = np.array([np.abs(part).sum(axis=0) for part in parts]) + np.abs(extras).sum(axis=1)
    most = allowed * (sizes + np.abs(model.intercept_)).reshape(expected.shape)
    if math.isinf(model.n_heads_):
        layer = replace(model.layer_, device=None)
        kernel = kh.attention_kernel(
            model.tokens_.apply(sets), layer.sets, layer.distribution, layer.activation
        )
        most += 32 * rounding * (np.abs(kernel) @ np.abs(layer.dual))
    assert (np.abs(found.reshape(expected.shape) - expected) <= most).all()


def configurations(rng):
    """Two of every route; every value of every other option, dealt out at random."""
    dealt = {
        name: rng.permutation(np.resize(list(dict.fromkeys(v)), 14)).tolist()
        for name, v in CHOICES.items()
    }
    for i, route in enumerate(2 * ROUTES):
        options = {name: values[i] for name, values in dealt.items()}
        yield replace(Configuration.draw(rng), **{**options, "route": route}).settled()


@pytest.mark.filterwarnings(
    "ignore"
)  # of penalties that conjugate gradients cannot solve far, and of few samples
def test_contributions_add_up_to_the_prediction(rng):
    for config in configurations(rng):
        problem = pose(config)
        model = fit(problem, penalties(problem, config.n))
        allowed = 1e-5 if config.dtype == "float32" else 1e-12
        try:
            check_sums(model, problem.new, decisions(model, problem.new), allowed, config.rounding)
        except AssertionError as error:
            raise AssertionError(f"{error} for pose({config})") from None


def draw(rng, n=12, dim=3, longest=5, extras=None):
    keys = [rng.standard_normal((int(rng.integers(1, longest + 1)), dim)) for _ in range(n)]
    return kh.SetBatch(keys, rng.standard_normal((n, 2)), extras)


@pytest.mark.parametrize("activation", ["relu", "softmax", "linear", "square", "step", "exp"])
@pytest.mark.parametrize(
    ("pooling", "query"), [("mean", "given"), ("sum", "mean"), ("mean", "each"), ("sum", "each")]
)
def test_contributions_are_the_formula(activation, pooling, query, rng):
    """c_i = Σ_m M^{-1/2} w_mi <v_m, x~_i>, summed over queries; also for sets of more keys than are
    done at once.
    """
    sets, y = draw(rng, longest=80 if query == "given" else 5), rng.standard_normal((12, 2))
    options = {
        "pooling": pooling,
        "query": query,
        "scaling": "none",
        "alpha": 1.0,
        "heads": kh.GaussianHeads(scale=0.2),
    }
    model = kh.AttentionRegressor(9, activation=activation, random_state=0, **options).fit(sets, y)
    heads = model.layer_.heads.block(0, 9)
    for one, found in zip(sets, model.contributions(sets), strict=True):
        n = len(one.tokens)
        queries = {"given": one.query, "mean": one.tokens.mean(axis=0)[None], "each": one.tokens}[
            query
        ]
        asked, keys = (np.hstack([x, np.ones((len(x), 1))]) for x in (queries, one.tokens))
        scores = np.einsum("qd,mde,ke->qmk", asked, heads, keys)
        if activation == "softmax":
            weights = np.exp(scores - scores.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
        else:
            sigma = {
                "relu": lambda s: np.maximum(s, 0),
                "linear": lambda s: s,
                "square": np.square,
                "exp": np.exp,
            }
            weights = sigma.get(activation, lambda s: (s > 0).astype(float))(scores) / n
        weights *= n if pooling == "sum" else 1 / len(queries)
        expected = np.einsum("qmk,ke,met->kt", weights, keys, model.values_) / 3
        np.testing.assert_allclose(found, expected, atol=1e-12 * np.abs(expected).max(), rtol=1e-9)


@pytest.mark.parametrize("n_heads", [20, math.inf])
@pytest.mark.parametrize(
    "distribution", [kh.GaussianHeads(1.0), kh.LearnedHeads(max_iter=2, hops=1)]
)
def test_of_sums_a_contribution_is_the_effect_of_removal(n_heads, distribution, rng):
    """And of means it is not: the others then weigh more."""
    extras = rng.standard_normal((12, 2))
    sets, y = draw(rng, extras=extras), rng.standard_normal(12)
    options = {
        "activation": "relu",
        "scaling": "standard",
        "query": "given",
        "random_state": 0,
        "alpha": 0.1,
    }
    model = kh.AttentionRegressor(n_heads, distribution, pooling="sum", **options).fit(sets, y)
    shares = kh.AttentionRegressor(n_heads, distribution, pooling="mean", **options).fit(sets, y)
    i = int(np.argmax(sets.lengths))
    keys = sets[i].tokens
    for k, part in enumerate(model.contributions(sets[i])[0]):
        without = kh.SetBatch([np.delete(keys, k, axis=0)], sets[i].query, extras[i : i + 1])
        assert model.predict(sets[i]) - model.predict(without) == pytest.approx(part, abs=1e-10)
        alone = kh.SetBatch(keys[None, k : k + 1], sets[i].query, extras[i : i + 1])
        rest = shares.intercept_ + shares.extras_contributions(alone).sum()
        assert (shares.predict(alone)[0] - rest) / len(keys) == pytest.approx(
            shares.contributions(sets[i])[0][k]
        )


def test_several_hops_add_up_too(rng):
    sets, y = draw(rng, n=20), rng.standard_normal(20)
    distribution = kh.LearnedHeads(max_iter=2, hops=2)
    model = kh.AttentionRegressor(
        10, distribution, activation="softmax", alpha=1.0, random_state=0
    ).fit(sets, y)
    check_sums(model, sets, decisions(model, sets), 1e-12)
    assert model.predict_interval(sets, 0.5).shape == (20, 2)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_norm_ball_models_are_sums_over_keys(loss, rng):
    sets = draw(rng, n=20, extras=rng.standard_normal((20, 1)))
    kind, y = kh.NormBallRegressor, rng.standard_normal((20, 2))
    if loss == "logistic":
        kind, y = kh.NormBallClassifier, np.arange(20) % 3
    model = kind(
        15, loss=loss, group_radius=3.0, ball_radius=1.0, random_state=0, scaling="standard"
    ).fit(sets, y)
    assert model.active_heads_.size < 15 or model.values_.any()
    model.n_heads_ = 15
    check_sums(model, sets, decisions(model, sets), 1e-12)


def test_a_loaded_model_and_one_of_one_key_per_set_explain_the_same(tmp_path, rng):
    table, y = rng.standard_normal((15, 3)), np.arange(15) % 2
    model = kh.AttentionClassifier(10, random_state=0).fit(table, y)
    kh.save(model, tmp_path / "model", keep="predict")
    again = kh.load(tmp_path / "model").contributions(table)
    assert all((a == b).all() for a, b in zip(model.contributions(table), again, strict=True))
    np.testing.assert_allclose(np.ravel(again) + model.intercept_, model.decision_function(table))
    assert model.extras_contributions(table).shape == (15, 0)
