import math

import numpy as np
import pytest
from paper import paper_regressor

import keyhole as kh
from keyhole.attention.features import apply_values, attention_features, feature_blocks
from keyhole.attention.heads import HeadDraw
from keyhole.attention.kernels import attention_kernel
from keyhole.data.sets import PooledSets, SetGroups, check_sets, samples_in


@pytest.fixture
def sets(rng):
    return kh.SetBatch(
        [rng.normal(size=(rng.integers(1, 5), 3)) for _ in range(9)], rng.normal(size=(9, 3))
    )


@pytest.fixture
def groups(sets):
    return SetGroups(sets, [2, 1, 3, 3])


def test_groups_are_sliced_by_sample(groups, sets):
    part = groups[[2, 0]]
    np.testing.assert_array_equal(part.counts, [3, 2])
    np.testing.assert_array_equal(part.sets.tokens, sets[[3, 4, 5, 0, 1]].tokens)
    assert len(groups[np.array([True, False, False, True])]) == 2
    assert groups.shape == (4, 3)


def test_groups_say_how_many_sets_their_samples_have(groups):
    assert repr(groups).startswith("SetGroups(4 samples, 1–3 sets each, of SetBatch(")
    assert repr(groups[2:]).startswith("SetGroups(2 samples, 3 sets each, of SetBatch(")


def test_no_groups_are_shown_as_none(groups):
    assert repr(groups[:0]).startswith("SetGroups(0 samples, 0 sets each, of SetBatch(0 sets")


def test_groups_have_queries_of_their_own(groups, rng):
    """Given or constant: none are made of their keys, even where others are tried."""
    without = SetGroups(kh.SetBatch(rng.normal(size=(9, 2, 3))), groups.counts)
    assert groups.has_own_queries
    assert without.has_own_queries
    many = without[np.resize(np.arange(4), 20)]
    model = kh.AttentionRegressor(8, random_state=0).fit(many, rng.normal(size=20))
    assert {row.params["query"] for row in model.members_} == {"given"}


def test_where_one_set_per_sample_is_needed_groups_are_pointed_to_their_sets(groups, sets):
    check_sets(sets, "X")
    for batch in (groups, PooledSets(sets, "sum")):
        with pytest.raises(
            TypeError, match=rf"`X` must be .* got {type(batch).__name__}. Its sets are `X.sets`"
        ):
            check_sets(batch, "X")


def test_cells_of_samples_are_put_together_again(groups, sets):
    for batch in (groups, sets, PooledSets(groups, "sum")):
        assert samples_in(batch) is batch
    cells = np.asarray(groups)
    chosen = samples_in(cells[[2, 0]][:, [1, 2]])
    np.testing.assert_array_equal(chosen.sets.tokens, groups[[2, 0]].sets.tokens[:, 1:])
    np.testing.assert_array_equal(chosen.sets.query, groups[[2, 0]].sets.query[:, 1:])
    assert chosen.counts.tolist() == [3, 2]
    mixed = cells.copy()
    mixed[1, 1] = 3.0
    for other in (
        mixed,
        cells[0],
        cells[:0],
        cells[None],
        cells.tolist(),
        np.ones((2, 2)),
        np.ones((2, 2), object),
    ):
        assert samples_in(other) is None
    wrong = cells.copy()
    wrong[2, 1] = cells[0, 1]
    with pytest.raises(
        ValueError,
        match=r"of one size: sample 2 has .* keys in coordinate 0 and .* in coordinate 1",
    ):
        samples_in(wrong)


@pytest.mark.parametrize(
    "counts", [[2, 0, 7], [4, 4], [[9]], [4.5, 4.5], [], [-1, 10], [10, -1], np.zeros(0, int)]
)
def test_counts_must_fit(counts, sets):
    with pytest.raises(ValueError, match="must"):
        SetGroups(sets, counts)


@pytest.mark.parametrize("activation", ["relu", "softmax"])
@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_features_of_a_group_are_pooled_over_its_sets(activation, pooling, groups, sets):
    heads = kh.GaussianHeads().sample(4, 3, seed=0)
    alone = kh.attention_features(sets, heads, activation)
    if pooling == "sum":
        alone = alone * sets.lengths[:, None]
    how = np.sum if pooling == "sum" else np.mean
    expected = np.stack([how(part, axis=0) for part in np.split(alone, groups.set_offsets[1:-1])])
    np.testing.assert_allclose(
        attention_features(PooledSets(groups, pooling), heads, activation), expected, rtol=1e-12
    )


def test_a_layer_sees_sets_where_that_is_all_there_is(groups, sets):
    assert sets.pooled("mean") is sets
    for batch, pooling, each in (
        (sets, "sum", False),
        (sets, "mean", True),
        (groups, "mean", False),
    ):
        seen = batch.pooled(pooling, each=each)
        assert (type(seen), seen.base, seen.pooling, seen.each) == (
            PooledSets,
            batch,
            pooling,
            each,
        )


def test_groups_are_pooled_by_the_mean_unless_told_otherwise(groups):
    heads, mean = kh.GaussianHeads().sample(4, 3, seed=0), PooledSets(groups, "mean")
    np.testing.assert_array_equal(
        kh.attention_features(groups, heads), attention_features(mean, heads)
    )
    np.testing.assert_array_equal(kh.attention_kernel(groups), attention_kernel(mean))
    assert kh.attention_kernel(groups, groups.sets).shape == (4, 9)


def test_sum_is_n_times_mean(sets):
    heads = kh.GaussianHeads().sample(4, 3, seed=0)
    mean, total = (attention_features(PooledSets(sets, how), heads) for how in ("mean", "sum"))
    np.testing.assert_allclose(total, sets.lengths[:, None] * mean)


def test_each_key_as_query_is_written_out_by_hand(sets):
    heads = kh.GaussianHeads().sample(4, 3, seed=0)
    found = attention_features(PooledSets(sets, "mean", each=True), heads)
    for i in range(len(sets)):
        keys = sets[i].tokens
        by_hand = kh.attention_features(kh.SetBatch([keys] * len(keys), keys), heads).mean(axis=0)
        np.testing.assert_allclose(found[i], by_hand, rtol=1e-12)


def test_each_on_sets_of_one_key_is_that_key_as_query(rng):
    keys = rng.normal(size=(6, 1, 3))
    heads = kh.GaussianHeads().sample(4, 3, seed=0)
    found = attention_features(PooledSets(kh.SetBatch(keys), "mean", each=True), heads)
    np.testing.assert_allclose(found, kh.attention_features(kh.SetBatch(keys, keys[:, 0]), heads))


@pytest.mark.parametrize("kind", ["groups", "each", "sum"])
def test_blocks_values_and_kernel_agree_with_the_features(kind, groups, sets):
    batch = {
        "groups": PooledSets(groups, "sum"),
        "each": PooledSets(sets, "mean", True),
        "sum": PooledSets(sets, "sum"),
    }[kind]
    draw = HeadDraw(kh.GaussianHeads(), 20_000, 3, seed=0)
    small = HeadDraw(kh.GaussianHeads(), 50, 3, seed=0)
    features = attention_features(batch, small)
    blocks = list(feature_blocks(batch, small, memory_budget=10_000))
    assert len(blocks) > 1
    np.testing.assert_allclose(
        np.concatenate([block for _, block in blocks], axis=1), features, rtol=1e-9
    )
    values = np.linspace(-1, 1, features.shape[1])[:, None]
    np.testing.assert_allclose(apply_values(batch, small, values), features @ values, atol=1e-9)
    kernel = attention_kernel(batch)
    np.testing.assert_allclose(
        attention_kernel(batch, batch, memory_budget=50_000), kernel, rtol=1e-10
    )
    tiles = {"memory_budget": 40}  # of one sample each
    np.testing.assert_allclose(attention_kernel(batch, **tiles), kernel, rtol=1e-10)
    np.testing.assert_allclose(attention_kernel(batch[1:], batch, **tiles), kernel[1:], rtol=1e-10)
    gram = np.zeros_like(kernel)
    for _, block in feature_blocks(batch, draw, memory_budget=2**24):
        gram += block @ block.T
    assert np.linalg.norm(gram - kernel) < 0.1 * np.linalg.norm(kernel)


def test_the_kernel_of_shared_means_is_the_average(sets, rng):
    from keyhole.attention.heads import FittedHeads

    means = rng.normal(size=(2, 4, 4))
    distribution = FittedHeads(means, 0.4)
    found = attention_kernel(sets, None, distribution)
    each = [kh.attention_kernel(sets, None, kh.GaussianHeads(mean, 0.4)) for mean in means]
    np.testing.assert_allclose(found, np.mean(each, axis=0))


def test_an_estimator_takes_groups(groups, rng):
    y = rng.normal(size=4)
    for n_heads in (8, math.inf):
        model = paper_regressor(n_heads, pooling="sum", alpha=1e-8, random_state=0).fit(groups, y)
        np.testing.assert_allclose(model.predict(groups[1:3]), y[1:3], atol=1e-3)
    with pytest.raises(ValueError, match="'given' for SetGroups"):
        paper_regressor(8, query="mean").fit(groups, y)


@pytest.mark.parametrize("pooling", ["mean", "sum"])
@pytest.mark.parametrize("n_heads", [8, math.inf])
def test_a_set_among_groups_is_a_group_of_one(n_heads, pooling, groups, sets, rng):
    alone = SetGroups(sets, np.ones(9, dtype=int))
    for training, y in ((groups, rng.normal(size=4)), (sets, rng.normal(size=9))):
        model = paper_regressor(n_heads, alpha=0.1, pooling=pooling, random_state=0).fit(
            training, y
        )
        np.testing.assert_allclose(model.predict(sets), model.predict(alone), rtol=1e-12)


# ---- samples that are left out together


@pytest.fixture
def siblings(rng):
    sets = kh.SetBatch(rng.normal(size=(36, 3, 3)))
    y = np.tanh(sets.tokens).reshape(36, -1).sum(axis=1) + 0.1 * rng.normal(size=36)
    return sets, y, np.arange(36) // 3


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n_heads", [4, 40, math.inf])
def test_samples_of_a_group_are_left_out_together(n_heads, weighted, siblings, rng):
    sets, y, groups = siblings
    weights = rng.uniform(0.5, 2.0, 36) if weighted else np.ones(36)
    model = paper_regressor(n_heads, alpha=0.1, random_state=0)
    plain = model.fit(sets, y, sample_weight=weights).predict(sets)
    model.fit(sets, y, sample_weight=weights, groups=groups)
    assert np.allclose(model.predict(sets), plain)
    left_out = model.loo_predictions_
    assert model.loo_error_ == pytest.approx(np.average(np.square(y - left_out), weights=weights))
    for group in (0, 5):
        rest = groups != group
        model.fit(sets[rest], y[rest], sample_weight=weights[rest])
        assert np.allclose(left_out[~rest], model.predict(sets[~rest]), atol=1e-8)


def test_groups_may_have_any_labels(siblings):
    sets, y, groups = siblings
    model = paper_regressor(8, random_state=0)
    numbers = model.fit(sets, y, groups=groups).loo_predictions_
    names = np.array([f"family {11 - group}" for group in groups])
    assert np.allclose(model.fit(sets, y, groups=names).loo_predictions_, numbers)


def test_a_number_of_each_family_is_not_mistaken_for_signal(rng):
    """Siblings share their rows and their y: left out one by one, they give each other away."""
    groups = np.arange(60) // 5
    sets = kh.SetBatch(rng.normal(size=(12, 2, 4))[groups])
    y = rng.normal(size=12)[groups]
    model = paper_regressor(math.inf, random_state=0)
    assert model.fit(sets, y).loo_error_ < 0.1 * np.var(y)
    assert model.fit(sets, y, groups=groups).loo_error_ > 0.8 * np.var(y)


def test_groups_without_weight_do_not_count(siblings):
    sets, y, groups = siblings
    only_one = (groups == 0).astype(float)
    with pytest.raises(
        ValueError, match=r"at least two groups.*got 0 for all 3 samples of positive weight"
    ):
        paper_regressor(8).fit(sets, y, sample_weight=only_one, groups=groups)
