import math
from types import SimpleNamespace

import numpy as np
import pytest
from devices import DEVICE

import keyhole as kh
from keyhole.attention.descent import DescentSettings
from keyhole.attention.features import key_stacks
from keyhole.attention.head_error import Task
from keyhole.attention.heads import FittedHeads
from keyhole.attention.hops import (
    CHAIN,
    SIMILAR,
    Ages,
    HopTrace,
    Start,
    UsedCoordinates,
    rarity_of,
    starting_hops,
)
from keyhole.attention.search import TaskView
from keyhole.data.tokens import pass_hops, weights_of_hop

HEADS = {"max_iter": 60, "hops": 2, "scale": 0.1}
OPTIONS = {
    "activation": "softmax",
    "pooling": "mean",
    "scaling": "none",
    "query": "given",
    "random_state": 0,
}


def carried(rng, n=160):
    """Three things, each carried by somebody, and three people, each somewhere: where is the thing
    asked for?
    """
    eye = np.eye(3)
    who, where = rng.integers(3, size=(2, n, 3))
    things = np.concatenate(
        [np.broadcast_to(eye, (n, 3, 3)), eye[who], np.zeros((n, 3, 3))], axis=2
    )
    people = np.concatenate(
        [np.zeros((n, 3, 3)), np.broadcast_to(eye, (n, 3, 3)), eye[where]], axis=2
    )
    asked, rows = rng.integers(3, size=n), np.arange(n)
    sets = kh.SetBatch(np.concatenate([things, people], axis=1), eye[asked])
    return sets, where[rows, who[rows, asked]], asked, 3 + who[rows, asked]


def two_hops(rng, dim=3, asked=2, patterns=2):
    hops = (rng.normal(size=(patterns, asked + 1, dim + 1)),)
    means = rng.normal(size=(2, asked + patterns * dim + 1, dim + 1))
    return FittedHeads(means, 0.3, hops_=hops)


@pytest.fixture
def sets(rng):
    return kh.SetBatch(
        [rng.normal(size=(k, 3)) for k in rng.integers(1, 5, 30)], rng.normal(size=(30, 2))
    )


def test_two_facts_need_two_hops_and_are_shown(rng):
    sets, y, thing, person = carried(rng, 300)
    two, one = (
        kh.AttentionClassifier(16, kh.LearnedHeads(**HEADS | {"hops": hops}), **OPTIONS).fit(
            sets[:250], y[:250]
        )
        for hops in (2, 1)
    )
    assert (two.heads_.hops, two.heads_.chosen) == (2, "learned")
    assert two.loo_error_ < 0.5 * one.loo_error_
    assert two.score(sets[250:], y[250:]) > 0.85
    first, last = two.hop_weights(sets)
    np.testing.assert_allclose([w.sum() for w in first], 1.0)
    assert np.mean([w[0].argmax() for w in first] == thing) > 0.9, "the first hop finds who has it"
    assert np.mean([w[0].argmax() for w in last] == person) > 0.9, (
        "the last one finds where they are"
    )


def test_layers_and_searches_look_alike(sets, rng):
    """The queries that a fitted model extends, in float64, are those that the gradient goes
    through.
    """
    distribution = two_hops(rng)
    stacks, seen = key_stacks(sets, 1, sets.dtype), pass_hops(sets, distribution.hops_)
    trace = HopTrace.of(sets, distribution.hops_, stacks)
    np.testing.assert_allclose(seen.query, trace.sets.query, rtol=1e-6, atol=1e-6)
    weights = weights_of_hop(sets, distribution.hops_[0])
    for (rows, _), stacked in zip(stacks, trace.weights[0], strict=True):
        own = [weights[slice(*sets.offsets[row : row + 2])].T for row in rows]
        np.testing.assert_allclose(stacked, own, atol=1e-12)
    by_hand = np.exp(
        sets.extended_query()[4] @ distribution.hops_[0][1] @ sets[4].extended_keys().T
    )
    np.testing.assert_allclose(weights[slice(*sets.offsets[4:6]), 1], by_hand / by_hand.sum())
    np.testing.assert_allclose(
        trace.sets.query[4, 5:], by_hand / by_hand.sum() @ sets[4].tokens, atol=1e-12
    )


def test_copies_remain_copies_whatever_the_order_of_their_keys(rng):
    keys, query = rng.normal(size=(1, 9, 3)), rng.normal(size=(1, 2))
    distribution = two_hops(rng)
    first, second = (
        pass_hops(kh.SetBatch(k, query), distribution.hops_) for k in (keys, keys[:, ::-1])
    )
    np.testing.assert_array_equal(first.query, second.query)


@pytest.mark.parametrize("kind", [kh.AttentionRegressor, kh.AttentionClassifier])
@pytest.mark.parametrize("n_heads", [16, math.inf])
def test_fixed_heads_of_two_hops_predict_stream_and_are_saved(kind, n_heads, sets, rng, tmp_path):
    distribution = two_hops(rng)
    y = rng.integers(3, size=30)
    options = {
        "alpha": 0.3,
        "random_state": 0,
        "activation": "relu",
        "pooling": "mean",
        "scaling": "standard",
        "query": "given",
    }
    model = kind(n_heads, distribution, **options).fit(sets, y)
    assert all(map(np.array_equal, model.tokens_.hops, distribution.hops_))
    kh.save(model, tmp_path / "m.keyhole")
    again = kh.load(tmp_path / "m.keyhole")
    np.testing.assert_array_equal(again.predict(sets), model.predict(sets))
    for mine, theirs in zip(model.hop_weights(sets[:3]), again.hop_weights(sets[:3]), strict=True):
        assert [w.shape for w in mine] == [(2, n) for n in sets.lengths[:3]]
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    if n_heads == 16:
        streamed = kind(n_heads, distribution, **options).fit_batches([(sets, y)])
        score = "predict" if kind is kh.AttentionRegressor else "decision_function"
        np.testing.assert_allclose(
            getattr(streamed, score)(sets), getattr(model, score)(sets), atol=1e-6
        )


def test_a_damaged_hop_is_refused(sets, rng, tmp_path):
    distribution = two_hops(rng)
    model = kh.AttentionRegressor(
        8,
        distribution,
        alpha=0.3,
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    )
    model.fit(sets, rng.normal(size=30))
    for hops in (
        (distribution.hops_[0][:1],),
        (distribution.hops_[0][:, :2],),
        distribution.hops_ * 2,
        (np.full_like(distribution.hops_[0], np.nan),),
    ):
        broken = FittedHeads(distribution.means_, 0.3, hops_=hops)
        model.heads_ = broken
        with pytest.raises(ValueError, match="saved only if it can be loaded again"):
            kh.save(model, tmp_path / "m.keyhole")


def test_other_estimators_take_heads_of_two_hops(sets, rng):
    distribution = two_hops(rng)
    features = kh.AttentionFeatures(6, distribution, random_state=0).fit(sets).transform(sets)
    expected = kh.attention_features(
        pass_hops(sets, distribution.hops_), distribution.sample(6, 3, 0, 8)
    )
    np.testing.assert_allclose(features, expected)
    ball = kh.NormBallRegressor(
        6, distribution, random_state=0, scaling="none", query="given", group_radius=1.0
    )
    assert np.isfinite(ball.fit(sets, rng.normal(size=30)).predict(sets)).all()


def test_weights_of_the_last_hop_are_those_of_the_heads(sets, rng):
    distribution = two_hops(rng)
    for activation in ("relu", "softmax"):
        model = kh.AttentionRegressor(
            7,
            distribution,
            0.3,
            activation,
            random_state=0,
            scaling="none",
            query="given",
            pooling="mean",
        )
        model.fit(sets, rng.normal(size=30))
        seen, heads = pass_hops(sets, distribution.hops_), distribution.sample(7, 3, 0, 8)
        scores = seen.extended_query()[2] @ heads @ sets[2].extended_keys().T
        weights = (
            np.maximum(scores, 0) / sets.lengths[2] if activation == "relu" else np.exp(scores)
        )
        weights = weights if activation == "relu" else weights / weights.sum(axis=1, keepdims=True)
        expected = [weights[::2].mean(axis=0), weights[1::2].mean(axis=0)]
        np.testing.assert_allclose(model.hop_weights(sets)[-1][2], expected, atol=1e-10)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hops": 0}, "`hops` must be at least 1"),
        ({"hops": "many"}, "`hops` must be one of 'auto'"),
        ({"patterns": 0}, "`patterns` must be at least 1"),
    ],
)
def test_wrong_parameters_are_named(wrong, message, rng):
    sets = kh.SetBatch(rng.normal(size=(60, 2, 3)), rng.normal(size=(60, 3)))
    with pytest.raises((ValueError, TypeError), match=message):
        kh.LearnedHeads(**{"max_iter": 1, "hops": 2} | wrong).fit(sets, rng.normal(size=60))


def test_without_a_query_there_is_one_hop(rng):
    sets = kh.SetBatch(rng.normal(size=(60, 2, 3)))
    assert kh.LearnedHeads(max_iter=1, hops="auto").fit(sets, rng.normal(size=60)).hops == 1
    with pytest.raises(ValueError, match="`hops` = 2 needs a query of each set"):
        kh.LearnedHeads(hops=2).fit(sets, rng.normal(size=60))
    with pytest.raises(ValueError, match="every key is the query in turn"):
        kh.AttentionRegressor(8, kh.LearnedHeads(hops=2), query="each").fit(
            sets, rng.normal(size=60)
        )
    with pytest.raises(ValueError, match="further hops extend a query"):
        kh.AttentionRegressor(
            8,
            two_hops(rng, asked=3),
            query="each",
            scaling="none",
            activation="relu",
            pooling="mean",
        ).fit(sets, rng.normal(size=60))


# ---- ages ----------------------------------------------------------------------------------------


def aged(rng, n=40, n_ages=5):
    keys = [(rng.random((k, 3)) < 0.5).astype(float) for k in rng.integers(2, n_ages + 1, n - 1)]
    keys = kh.tokens.with_ages([*keys, np.ones((n_ages, 3))], n_ages)
    keys = [np.column_stack([k, 0.5 ** k[:, 3:].argmax(axis=1)]) for k in keys]
    return kh.SetBatch(
        [np.vstack([k[rng.permutation(len(k))], np.zeros(k.shape[1])]) for k in keys],
        np.ones((n, 3)),
    )


def test_ages_are_found_with_all_that_follows_from_them(rng):
    sets = aged(rng)
    ages = Ages.of(sets)
    assert ages.hot.tolist() == [3, 4, 5, 6, 7]
    assert ages.columns.tolist() == [3, 4, 5, 6, 7, 8]
    np.testing.assert_array_equal(ages.table, np.column_stack([np.eye(5), 0.5 ** np.arange(5)]))
    words = kh.SetBatch([k.tokens[:, :3] for k in sets])
    assert Ages.of(words) is None
    assert Ages.of(kh.SetBatch(rng.normal(size=(9, 3, 4)))) is None
    hot = np.repeat(np.eye(3)[None], 9, axis=0)
    assert Ages.of(kh.SetBatch(hot)).hot.tolist() == [0, 1, 2]
    longer = np.concatenate([np.eye(4), np.full((4, 1), 0.5), np.eye(4)[:, :3]], axis=1)
    assert Ages.of(kh.SetBatch(np.repeat(longer[None], 9, axis=0))).hot.tolist() == [0, 1, 2, 3], (
        "the longest run"
    )
    hot[0, 1, 2], hot[0, 2, 2] = 1.0, 0.0
    assert Ages.of(kh.SetBatch(hot)) is None, "a key of two ages"


def test_where_all_is_zero_one_coordinate_is_used():
    used = UsedCoordinates.of(
        kh.SetBatch(np.zeros((3, 2, 1)), np.zeros((3, 1))), None, has_query=True
    )
    assert (used.keys.tolist(), used.query.tolist()) == ([0], [0])


def test_a_while_passes_before_some_keys(rng):
    """Keys keep their order; one becomes older only if all older ones do; words and the empty token
    stay.
    """
    sets = aged(rng)
    ages = Ages.of(sets)
    moved = ages.moved(sets, 0.3, rng)
    old, new = (
        np.where(s.tokens[:, 3:8].any(axis=1), s.tokens[:, 3:8].argmax(axis=1), -1)
        for s in (sets, moved)
    )
    np.testing.assert_array_equal(moved.tokens[:, :3], sets.tokens[:, :3])
    np.testing.assert_array_equal(new < 0, old < 0)
    np.testing.assert_allclose(moved.tokens[new >= 0, 8], 0.5 ** new[new >= 0], rtol=1e-6)
    for start, stop in zip(sets.offsets[:-1], sets.offsets[1:], strict=True):
        order = np.argsort(old[start:stop])
        passed = (new - old)[start:stop][order]
        inside = new[start:stop][order] < 4  # the oldest age is the last
        assert (np.diff(passed[inside]) >= 0).all()
    share = np.mean((new - old)[old == 0] > 0)
    assert 0 < share < 0.7
    np.testing.assert_array_equal(ages.moved(sets, 0.0, rng).tokens, sets.tokens)


def test_hops_start_from_what_the_coordinates_are(rng):
    ages = Ages.of(aged(rng))
    first, last = starting_hops(9, 9, 2, 1, 2, SIMILAR, ages, None, seed=0)
    assert (first.shape, last.shape) == ((1, 10, 10), (2, 19, 10))
    assert np.abs(first[0][:3, :3] - 3 * np.eye(3)).max() < 0.1, "words like those of the query"
    assert np.abs(last[0][9:12, :3] - 3 * np.eye(3)).max() < 0.1, "words like those found"
    assert (np.diff(first[0][-1, 3:8]) < 0).all(), "newer is better"
    block = last[1][12:17, 3:8]
    assert np.abs(np.tril(block)).max() < 0.1, "nothing newer than what was found"
    assert (block[np.triu_indices(5, 1)] > 0.2).all(), "but what is older, the nearer the better"
    plain = starting_hops(2, 3, 2, 2, 1, SIMILAR, None, [(1, 2)], seed=0)
    assert np.abs(plain[0][0] - 3 * np.eye(3, 4, 1)[[2, 1, 2]] * [[0], [1], [0]]).max() < 0.1, (
        "the pairs stated"
    )
    assert plain[1].shape == (1, 2 + 2 * 3 + 1, 4)


def test_hops_that_move_on_start_away_from_what_they_know(rng):
    first, second, last = starting_hops(3, 3, 3, 1, 1, CHAIN, None, None, seed=0)
    eye = np.eye(3)
    assert np.abs(first[0, :3, :3] - 5 * eye).max() < 0.1, "like the query"
    assert np.abs(second[0, :3, :3] + 4 * eye).max() < 0.1, "then unlike it"
    assert np.abs(second[0, 3:6, :3] - 6 * eye).max() < 0.1, "and like what was found"
    assert np.abs(last[0, 3:6, :3] + 4 * eye).max() < 0.1, "then unlike that"
    assert np.abs(last[0, 6:9, :3] - 6 * eye).max() < 0.1, "and like the newest"


def test_heads_that_ignore_ages_make_nothing_of_them(rng):
    """Entries and noise are zero at the coordinates of ages, in the last hop and before it."""
    sets = aged(rng, 60)
    task = Task(sets, np.zeros((60, 1)), None, "softmax", True)
    plan = kh.LearnedHeads(hops=2).plan(task, 0, None, None, DescentSettings())
    view = TaskView.of(task, plan, ignores_ages=True)
    assert view.coordinates.ignored.tolist() == [3, 4, 5, 6, 7, 8]
    assert view.task.batch.sets.dim == 3
    learned = FittedHeads(
        rng.normal(size=(1, 3 + 3 + 1, 4)),
        0.3,
        hops_=(rng.normal(size=(1, 3 + 1, 4)),),
        query_scales_=np.ones(7),
        key_scales_=np.ones(4),
    )
    heads = view.among_all(learned, Start(2, CHAIN, ignores_ages=True), task)
    drawn = heads.sample(5, 9, seed=0, query_dim=3 + 9)
    assert (drawn[:, :, 3:9] == 0).all(), "no score depends on the age of a key"
    assert (drawn[:, 3 + 3 : 3 + 9] == 0).all(), "nor on the age of what was found"
    assert (heads.hops_[0][:, :, 3:9] == 0).all()
    np.testing.assert_array_equal(heads.hops_[0][0][:, [0, 1, 2, 9]], learned.hops_[0][0])


@pytest.mark.parametrize("activation", ["softmax", "relu"])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_device_takes_the_same_way(activation, grouped, rng):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    sets = aged(rng, 60).with_extras(rng.normal(size=(60, 1)))
    groups = np.arange(60) // 2 if grouped else None
    given = {
        "activation": activation,
        "weights": rng.uniform(0.5, 2.0, 60),
        "groups": groups,
        "n_heads": 8,
    }
    distribution = kh.LearnedHeads(max_iter=5, hops=2, validation_fraction=0.5)
    y = sets.tokens[sets.offsets[:-1], :2]
    host, device = (distribution.fit(sets, y, device=device, **given) for device in (None, DEVICE))
    for mine, theirs in zip(host.history, device.history, strict=True):
        assert theirs.loo_error == pytest.approx(mine.loo_error, rel=1e-3)
        assert theirs.held_out_error == pytest.approx(mine.held_out_error, rel=1e-3)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_graph_is_replayed_for_the_samples_of_every_step(grouped, rng, monkeypatch):
    """Whatever differs between steps is copied to where the graph reads it.

    A host has no graphs: what stands for one there computes again from the same memory.
    """
    torch = pytest.importorskip("torch")
    from keyhole.attention import torch_heads

    def recomputed(compute, device):
        result = compute()
        graph = SimpleNamespace(replay=lambda: result.copy_(compute()))
        return graph, result

    if not torch.cuda.is_available():
        monkeypatch.setattr(torch_heads, "captured", recomputed)
    sets = aged(rng, 90).with_extras(rng.normal(size=(90, 2)))
    groups = np.arange(90) // 3 if grouped else None
    weights = rng.uniform(0.5, 2.0, 90)
    task = Task.of(sets, rng.normal(size=(90, 2)), weights, "softmax", True, groups)
    plan = kh.LearnedHeads(hops=2).plan(task, 0, None, None, DescentSettings())
    dim, query_dim = task.batch.dim, task.batch.query_dim
    samples = torch_heads.DeviceSamples(task, DEVICE)
    in_words = torch_heads.DeviceSamples(task, DEVICE)
    samples.uses_graphs, in_words.uses_graphs = True, False

    for count in range(3):
        rows = np.sort(rng.permutation(90)[:40])
        given = {
            "means": rng.normal(size=(2, query_dim + dim + 1, dim + 1)),
            "noise": 0.3 * rng.normal(size=(5, query_dim + dim + 1, dim + 1)).astype(np.float32),
            "alpha": 0.1 + count,
            "scales": True,
            "hops": [rng.normal(size=(1, query_dim + 1, dim + 1))],
        }
        replayed = samples.part(rows, plan, count).gradient_in_heads(**given)
        expected = in_words.part(rows, plan, count).gradient_in_heads(**given)
        assert replayed.error == pytest.approx(expected.error, rel=1e-6)
        assert replayed.log_alpha == pytest.approx(expected.log_alpha, rel=1e-4)
        for name in ("means", "scales"):
            there = getattr(replayed, name)
            here = getattr(expected, name)
            np.testing.assert_allclose(there, here, rtol=1e-4, atol=1e-5 * np.abs(here).max())
        np.testing.assert_allclose(replayed.hops[0], expected.hops[0], rtol=1e-3, atol=1e-6)
    assert len(samples.graphs) == 1


def test_one_long_set_among_short_ones_is_padded_alone():
    pytest.importorskip("torch")
    from keyhole.attention.torch_heads import padded_blocks

    blocks = padded_blocks(np.array([1, 1, 2, 3, 3, 50]), n_keys=9)
    # three sets of at most 2 keys, two of 3, and one that is longer than all that is allowed
    assert blocks == [slice(0, 3), slice(3, 5), slice(5, 6)]


def test_what_the_sets_pair_is_where_hops_start(rng):
    keys, query = rng.normal(size=(60, 2, 3)), rng.normal(size=(60, 2))
    task = Task(kh.SetBatch(keys, query, pairs=[(1, 2)]), np.zeros((60, 1)), None, "softmax", True)
    plan = kh.LearnedHeads(hops=2).plan(task, 0, None, None, DescentSettings())
    first, _ = plan.start(FittedHeads(np.zeros((1, 3, 4)), 0.5), task, Start(2))
    expected = np.zeros((3, 4))
    expected[1, 2] = 3.0
    np.testing.assert_allclose(first[0], expected, atol=0.15)


def test_what_keys_add_in_the_last_hop_sums_to_the_prediction(sets, rng):
    model = kh.AttentionRegressor(
        8,
        two_hops(rng),
        alpha=0.3,
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    )
    model.fit(sets, rng.normal(size=30))
    parts = model.contributions(sets)
    np.testing.assert_allclose(
        [p.sum() + model.intercept_ for p in parts], model.predict(sets), atol=1e-9
    )


def test_heads_are_learned_in_the_coordinates_that_are_used(rng):
    """Columns of zeros change nothing that is learned, and stay where the hops start."""
    sets, y, *_ = carried(rng, 80)
    used = np.array([0, 1, 2, 4, 5, 6, 8, 9, 10])  # of eleven; the query has the first three
    keys, query = np.zeros((len(sets.tokens), 11)), np.zeros((80, 11))
    keys[:, used], query[:, :3] = sets.tokens, sets.query
    wide = kh.SetBatch(np.split(keys, sets.offsets[1:-1]), query)
    distribution = kh.LearnedHeads(max_iter=2, hops=2, n_means=1, scale=0.1)
    columns = np.where(y[:, None] == np.arange(3), 1.0, -1.0)
    narrow, found = (
        distribution.fit(batch, columns, activation="softmax") for batch in (sets, wide)
    )
    assert found.history == narrow.history
    assert (found.means_.shape[2], narrow.means_.shape[2]) == (12, 10)

    learned = FittedHeads(
        rng.normal(size=(1, 13, 10)),
        0.1,
        hops_=(rng.normal(size=(1, 4, 10)),),
        key_scales_=rng.uniform(1, 2, 10),
        query_scales_=rng.uniform(1, 2, 13),
    )
    task = Task(wide, columns, None, "softmax", True)
    plan = distribution.plan(task, 0, None, None, DescentSettings())
    found = TaskView.of(task, plan, ignores_ages=False).among_all(learned, Start(2), task)
    across, down = np.append(used, 11), np.concatenate([np.arange(3), 11 + used, [22]])
    np.testing.assert_array_equal(found.means_[:, down[:, None], across], learned.means_)
    np.testing.assert_array_equal(
        found.hops_[0][:, [[0], [1], [2], [11]], across], learned.hops_[0]
    )
    np.testing.assert_array_equal(found.query_scales_[down], learned.query_scales_)
    assert (found.query_scales_[3:11] == 1).all()
    assert np.abs(found.hops_[0][0, 3:11, 3:11] - 3 * np.eye(8)).max() < 0.15, (
        "3 W_0 and a little noise"
    )


def linked_facts():
    """Three facts in each story, of which each leads to the next by one rare word.

    Coordinates are words: four objects, boxes, cupboards and rooms, then "is in", "stands in" and
    "belongs to" as two words each, of which "in" is one. Question: where is the object of the
    first fact? All facts of one kind have their two words in common, and facts that are linked one
    word only, or two with "in".
    """
    words = np.eye(21)
    thing, box, cupboard, room = words[:16].reshape(4, 4, 21)
    is_, stands, belongs, in_, to = words[16:]
    keys = []
    for i in range(4):
        keys += [
            thing[i] + is_ + in_ + box[i],
            box[i] + stands + in_ + cupboard[i],
            cupboard[i] + belongs + to + room[i],
        ]
    return kh.SetBatch([np.array(keys)] * 4, thing)


@pytest.mark.parametrize("by_rarity", [True, False])
def test_rare_words_lead_from_fact_to_fact(by_rarity):
    """Before anything is learned: words that all facts of a kind share do not lead on."""
    sets = linked_facts()
    matrices = starting_hops(
        query_dim=21,
        dim=21,
        hops=3,
        patterns=1,
        n_means=1,
        strengths=CHAIN,
        ages=None,
        pairs=None,
        seed=0,
        rarity=rarity_of(sets) if by_rarity else None,
    )
    # scores of the second hop, of what was found (rows) with every key (columns)
    keys = sets[0].tokens
    scores = keys @ matrices[1][0, 21:42, :21] @ keys.T
    of_kind = np.arange(0, 12, 3)
    linked = scores[of_kind, of_kind + 1]
    of_the_same_kind = scores[of_kind, np.roll(of_kind, 1)]
    assert (linked > of_the_same_kind + 0.3).all() == by_rarity


def test_the_rarity_of_coordinates(rng):
    """−log of the share of keys that have one; 0 for one that all have, or that may be negative."""
    keys = np.zeros((8, 4))
    keys[:, 0] = 1.0
    keys[:4, 1] = 1.0
    keys[:1, 2] = 2.0
    keys[:, 3] = rng.normal(size=8)
    keys[0, 3] = -1.0
    rarity = rarity_of(kh.SetBatch([keys]))
    np.testing.assert_allclose(rarity[[0, 3]], 0.0)
    assert rarity[2] / rarity[1] == pytest.approx(np.log(8) / np.log(2))
    assert np.mean(np.square(keys) @ rarity) == pytest.approx(0.7)
    assert rarity_of(kh.SetBatch([rng.normal(size=(8, 2)) - 9.0])) is None
    assert rarity_of(kh.SetBatch([np.ones((8, 2))])) is None
