"""Heads that are learned: the gradient, the descent, and what is said of it."""

import numpy as np
import pytest
from paper import PAPER_LAYER

import keyhole as kh
from keyhole.attention.gradient import Task, error_gradient
from keyhole.attention.heads import FittedHeads
from keyhole.registry import ACTIVATIONS

WITH_SLOPE = [name for name, record in ACTIVATIONS.items() if record.slope is not None]
N = 12


def make_task(rng, activation="relu", *, grouped=False, weighted=False, query=True, extras=0):
    """Ragged sets in float64, so that differences can be compared with the gradient."""
    keys = [rng.normal(size=(int(rng.integers(1, 5)), 2)) for _ in range(N)]
    return Task(
        sets=kh.SetBatch(keys, rng.normal(size=(N, 2)) if query else None),
        outputs=rng.normal(size=(N, 2)),
        weights=rng.uniform(0.5, 2.0, N) if weighted else None,
        groups=np.arange(N) % 4 if grouped else None,
        extras=rng.normal(size=(N, extras)),
        activation=activation,
    )


def check_by_differences(task, hops, heads, alpha=0.4):
    """The gradient along random directions, beside differences of the error."""
    rng = np.random.default_rng(1)
    gradient = error_gradient(task, hops, heads, alpha)
    slopes = [gradient.heads, *gradient.hops]
    places = [heads, *hops]
    for slope, place in zip(slopes, places, strict=True):
        direction = rng.normal(size=place.shape)

        def error(size, place=place, direction=direction):
            moved = [other + size * direction if other is place else other for other in places]
            return error_gradient(task, moved[1:], moved[0], alpha).error

        difference = (error(1e-6) - error(-1e-6)) / 2e-6
        assert (slope * direction).sum() == pytest.approx(difference, rel=1e-4, abs=1e-8)
    in_alpha = [error_gradient(task, hops, heads, alpha * np.exp(s)).error for s in (-1e-5, 1e-5)]
    difference = (in_alpha[1] - in_alpha[0]) / 2e-5
    assert gradient.log_alpha == pytest.approx(difference, rel=1e-4, abs=1e-8)
    return gradient


# ---- the gradient


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("activation", WITH_SLOPE)
def test_the_gradient_in_the_heads(activation, grouped, rng):
    task = make_task(rng, activation, grouped=grouped, weighted=True, extras=2)
    check_by_differences(task, [], 0.5 * rng.normal(size=(6, 3, 3)))


@pytest.mark.parametrize("activation", ["relu", "softmax"])
def test_the_gradient_without_a_query_is_in_the_last_row(activation, rng):
    task = make_task(rng, activation, query=False)
    check_by_differences(task, [], 0.5 * rng.normal(size=(6, 1, 3)))


@pytest.mark.parametrize("activation", ["relu", "softmax"])
def test_the_gradient_in_hops_and_in_the_heads_behind_them(activation, rng):
    task = make_task(rng, activation, grouped=True)
    # queries of 2 coordinates and one; 4 and one after a pattern of 2; 8 and one after two
    hops = [0.5 * rng.normal(size=(1, 3, 3)), 0.5 * rng.normal(size=(2, 5, 3))]
    check_by_differences(task, hops, 0.5 * rng.normal(size=(6, 9, 3)))


def test_a_gradient_that_forgets_the_hops_is_seen(rng, monkeypatch):
    task = make_task(rng)
    hops = [0.5 * rng.normal(size=(1, 3, 3))]
    heads = 0.5 * rng.normal(size=(6, 5, 3))
    monkeypatch.setattr(
        "keyhole.attention.gradient._back_through_hops",
        lambda task, passed, hops, in_query: [np.zeros_like(hop) for hop in hops],
    )
    with pytest.raises(AssertionError):
        check_by_differences(task, hops, heads)


def test_torch_has_the_gradient_of_numpy(rng):
    torch = pytest.importorskip("torch", reason="compared where torch is installed")
    task = make_task(rng, "softmax", weighted=True)
    hops = [0.5 * rng.normal(size=(1, 3, 3))]
    heads = 0.5 * rng.normal(size=(6, 5, 3))
    expected = error_gradient(task, hops, heads, 0.4)
    placed = Task(
        sets=task.sets.to("cpu"),
        outputs=task.outputs,
        weights=task.weights,
        groups=None,
        extras=task.extras,
        activation="softmax",
    )
    found = error_gradient(
        placed, [torch.as_tensor(hop) for hop in hops], torch.as_tensor(heads), 0.4
    )
    assert found.error == pytest.approx(expected.error)
    assert np.allclose(found.heads, expected.heads, atol=1e-10)
    assert np.allclose(found.hops[0], expected.hops[0], atol=1e-10)


# ---- what a descent finds


@pytest.fixture(scope="module")
def rotated():
    """Sets whose target is a correlation after a rotation that random heads do not know."""
    sets = kh.targets.sphere_sets(600, n_keys=4, dim=6, seed=0)
    y = kh.targets.RotatedCorrelation(1.0, dim=6, seed=0)(sets)
    return sets, y / y.std()


def fit_one_layer(heads, sets, y, **fit_options):
    model = kh.AttentionRegressor(64, random_state=0, **{**PAPER_LAYER, "heads": heads})
    return model.fit(sets, y, **fit_options)


@pytest.fixture(scope="module")
def learned(rotated):
    sets, y = rotated
    return fit_one_layer(kh.LearnedHeads(hops=1, max_iter=60), sets[:300], y[:300])


def test_learning_finds_what_random_heads_do_not(learned, rotated):
    sets, y = rotated
    random = fit_one_layer(kh.GaussianHeads(), sets[:300], y[:300])
    of_learned = np.mean(np.square(learned.predict(sets[300:]) - y[300:]))
    of_random = np.mean(np.square(random.predict(sets[300:]) - y[300:]))
    assert of_learned < 0.8 * of_random
    assert learned.heads_.chosen == "learned"
    assert "less by" in learned.summary()


def test_held_out_numbers_are_of_heads_that_have_not_seen_the_samples(learned, rotated):
    sets, y = rotated
    on_test = np.mean(np.square(learned.predict(sets[300:]) - y[300:]))
    assert 0.5 * on_test < learned.held_out_loss_ < 3 * on_test
    assert learned.interval_method == "held-out"
    low, high = learned.predict_interval(sets[300:], 0.8).T
    assert 0.6 < np.mean((low <= y[300:]) & (y[300:] <= high)) < 0.95


def test_nothing_gained_is_said(rng, capsys):
    sets = kh.SetBatch(rng.normal(size=(80, 3, 2)), rng.normal(size=(80, 2)))
    heads = kh.LearnedHeads(hops=1, max_iter=15, verbose=True)
    model = fit_one_layer(heads, sets, rng.normal(size=80))
    assert model.heads_.chosen in ("identity", "zero-mean")
    assert "nothing gained by learning" in model.summary()
    assert "nothing gained by learning" in capsys.readouterr().out


def test_few_samples_are_not_descended_on(rng):
    sets = kh.SetBatch(rng.normal(size=(40, 3, 2)), rng.normal(size=(40, 2)))
    heads = kh.LearnedHeads().fit(sets, rng.normal(size=40))
    assert heads.steps == 0
    assert heads.reason.startswith("nothing learned: too few samples")


def test_two_facts_need_two_hops(rng):
    """The query names a row, and that row names the one whose value is asked for."""
    n, n_names = 400, 4
    names = np.array([rng.permutation(n_names) for _ in range(n)])
    following = np.array([rng.permutation(n_names) for _ in range(n)])
    values = rng.normal(size=(n, n_names))
    one_hot = np.eye(n_names)
    # rows that say "a leads to b", and rows that say "b has this value"
    leads = np.concatenate([one_hot[names], one_hot[following], np.zeros((n, 4, 5))], axis=2)
    has = np.concatenate([np.zeros((n, 4, 8)), one_hot[names], values[:, :, None]], axis=2)
    asked = rng.integers(0, n_names, n)
    query = np.zeros((n, 13))
    query[np.arange(n), asked] = 1.0
    sets = kh.SetBatch(np.concatenate([leads, has], axis=1), query)
    heads = kh.LearnedHeads(hops=2, max_iter=2).fit(sets, values[:, 0], activation="softmax")
    assert heads.hops in (1, 2)
    assert heads.sample(5, 13, 0).shape[0] == 5


def test_groups_are_held_out_whole(rng):
    """A number of each group that no other group has: nothing there is to be learned."""
    groups = np.arange(90) % 15
    sets = kh.SetBatch(rng.normal(size=(15, 3, 3))[groups], rng.normal(size=(15, 3))[groups])
    y = rng.normal(size=15)[groups]
    heads = kh.LearnedHeads(hops=1, max_iter=20).fit(sets, y, groups=groups)
    assert heads.chosen != "learned"
    model = fit_one_layer(kh.LearnedHeads(hops=1, max_iter=10), sets, y, groups=groups)
    assert model.held_out_loss_ > 0.7 * np.var(y)


def test_the_same_data_and_seed_are_the_same_heads(rotated):
    sets, y = rotated
    heads = kh.LearnedHeads(hops=1, max_iter=8)
    one, other = (heads.fit(sets[:120], y[:120], seed=2) for _ in range(2))
    assert (one.means_ == other.means_).all()
    assert (one.sample(5, 6, 0) == other.sample(5, 6, 0)).all()


# ---- fitted heads


def test_fitted_heads_share_out_their_means_and_nest(rng):
    means = rng.normal(size=(2, 3, 3))
    heads = FittedHeads(means_=means, scale=1e-9)
    drawn = heads.sample(5, 2, 0)
    assert np.allclose(drawn, means[[0, 1, 0, 1, 0]], atol=1e-6)
    assert (heads.sample(3, 2, 0) == drawn[:3]).all()


def test_hop_weights_are_the_softmax_of_each_hop_and_the_mean_weights_of_the_heads(rng):
    sets = kh.SetBatch(rng.normal(size=(20, 3, 2)), rng.normal(size=(20, 2)))
    hop = rng.normal(size=(1, 3, 3))
    heads = FittedHeads(means_=np.zeros((1, 5, 3)), scale=0.5, hops_=(hop,))
    model = kh.AttentionRegressor(
        9,
        random_state=0,
        alpha=1.0,
        **{
            **PAPER_LAYER,
            "heads": heads,
            "activation": "softmax",
        },
    )
    model.fit(sets, rng.normal(size=20))
    first, last = model.hop_weights(sets)
    for one, of_hop, of_heads in zip(sets, first, last, strict=True):
        scores = one.extended_keys() @ (one.extended_query()[0] @ hop[0])
        powers = np.exp(scores)
        assert np.allclose(of_hop[0], powers / powers.sum())
        found = of_hop[0] @ one.tokens
        query = np.concatenate([one.query[0], found, [1.0]])
        drawn = heads.sample(9, 2, 0, 4)
        scores = np.einsum("d,mde,ke->mk", query, drawn, one.extended_keys())
        powers = np.exp(scores)
        weights = powers / powers.sum(axis=1, keepdims=True)
        assert np.allclose(of_heads[0], weights.mean(axis=0))
    parts, rest = model.contributions(sets, return_rest=True)
    assert np.allclose([part.sum() for part in parts] + rest, model.predict(sets))


# ---- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_means": 0}, "`n_means` must be at least 1"),
        ({"hops": 0}, "`hops` must be at least 1"),
        ({"hops": "many"}, "`hops` must be one of 'auto'"),
        ({"patterns": 0}, "`patterns` must be at least 1"),
        ({"scale": 0.0}, "`scale` must be larger than 0"),
        ({"max_iter": -1}, "`max_iter` must be at least 0"),
        ({"validation_fraction": 0.5}, "`validation_fraction` must be below 0.5"),
    ],
)
def test_wrong_parameters_are_named(options, words, rotated):
    sets, y = rotated
    with pytest.raises(ValueError, match=words):
        kh.LearnedHeads(**options).fit(sets[:60], y[:60])


def test_what_cannot_be_learned_from_is_refused(rng):
    plain = kh.SetBatch(rng.normal(size=(60, 2, 2)))
    y = rng.normal(size=60)
    with pytest.raises(ValueError, match=r"`hops` extend a query, and these sets have none"):
        kh.LearnedHeads(hops=2).fit(plain, y)
    with pytest.raises(ValueError, match=r"`activation` must have a slope.*got 'step'"):
        kh.LearnedHeads().fit(plain, y, activation="step")
    with pytest.raises(ValueError, match=r"fitted to a training set first"):
        kh.LearnedHeads().sample(3, 2, 0)
    model = kh.AttentionRegressor(8, **{**PAPER_LAYER, "heads": kh.LearnedHeads(), "query": "each"})
    with pytest.raises(ValueError, match=r"samples of one set each.*Use pooling='mean'"):
        model.fit(plain, y)
