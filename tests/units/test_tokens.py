import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from paper import PAPER_LAYER, paper_classifier, paper_regressor
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import keyhole as kh
from keyhole.data import sources
from keyhole.data import tokens as tokens_module
from keyhole.data.tokens import TokenRule, drop_missing


@pytest.fixture
def sets(rng):
    return kh.SetBatch(
        [rng.normal(size=(rng.integers(1, 6), 3)) * 5 + 2 for _ in range(40)],
        rng.normal(size=(40, 3)),
    )


@pytest.fixture
def y(sets, rng):
    return np.add.reduceat(sets.tokens[:, 0], sets.offsets[:-1]) + 0.1 * rng.normal(size=40)


def test_sphere_has_length_one_and_zeros_stay(sets):
    keys = [
        *np.split(sets.tokens, sets.offsets[1:-1]),
        np.zeros((1, 3)),
        np.array([[1e200, 0, 1e-200]]),
    ]
    found = TokenRule.learn(sets, "sphere").apply(kh.SetBatch(keys)).tokens
    lengths = np.linalg.norm(found, axis=1)
    np.testing.assert_allclose(np.delete(lengths, -2), 1.0)
    assert lengths[-2] == 0.0


def test_standard_tokens_have_mean_zero_and_length_one_on_average(sets):
    found = TokenRule.learn(sets, "standard").apply(sets).tokens
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(np.square(found).sum(axis=1).mean(), 1.0)


def test_a_coordinate_that_never_moves_becomes_zero():
    tokens = np.column_stack([np.arange(6.0), np.full(6, 1e9)])[:, None, :]
    found = TokenRule.learn(kh.SetBatch(tokens), "standard").apply(kh.SetBatch(tokens)).tokens
    np.testing.assert_array_equal(found[:, 1], 0.0)
    np.testing.assert_allclose(np.square(found).sum(axis=1).mean(), 1.0)


@pytest.mark.parametrize(("width", "moves"), [(3e-12, True), (1.5e-12, False)])
def test_a_coordinate_moves_if_its_deviation_is_a_trillionth_of_its_size(width, moves):
    tokens = np.array([[[-1.0, 0.0]], [[-1.0 - width, 2.0]]])  # of deviation width/2 and 1
    rule = TokenRule.learn(kh.SetBatch(tokens), "standard")
    found = rule.apply(kh.SetBatch(tokens)).tokens
    np.testing.assert_allclose(rule.spread[1], np.sqrt(2.0) if moves else 1.0)
    np.testing.assert_allclose(np.abs(found[:, 1]), np.sqrt(0.5) if moves else 1.0)
    np.testing.assert_allclose(
        np.abs(found[:, 0]), np.sqrt(0.5) if moves else 0.0, rtol=1e-3, atol=1e-9
    )


@pytest.mark.parametrize("scale", [1.0, 1e-300, 1e300])
def test_the_mean_of_keys_is_the_same_bits_in_any_order(scale, rng):
    keys = -np.abs(rng.normal(size=(31, 2))) * 10.0 ** rng.uniform(-12, 0, size=(31, 2)) * scale
    keys[7] *= -0.5
    orders = [rng.permutation(31) for _ in range(8)]
    rule = TokenRule("none", "mean", "mean")
    found = rule.apply(kh.SetBatch([keys[order] for order in orders] + [keys[:1]])).query
    assert (found[:-1] == found[0]).all()
    np.testing.assert_array_equal(found[-1], keys[0])
    exact = [math.fsum(column / scale) / 31 * scale for column in keys.T]
    np.testing.assert_allclose(found[0], exact, rtol=4e-16)
    small = np.array([[1.0, -3.0], [-1.0, 1.0], [3e-18, 2.0]])  # what is left of a sum is not lost
    np.testing.assert_allclose(
        rule.apply(kh.SetBatch(small[None])).query, [[1e-18, 0.0]], rtol=1e-10
    )


def test_weights_scale_as_copies_do(sets):
    counts = np.arange(40) % 3
    rows = np.repeat(np.arange(40), counts)
    weighted = TokenRule.learn(sets, "standard", weights=counts.astype(float))
    repeated = TokenRule.learn(sets[rows], "standard")
    np.testing.assert_allclose(weighted.centre, repeated.centre)
    np.testing.assert_allclose(weighted.spread, repeated.spread)


@pytest.mark.parametrize("n_heads", [20, math.inf])
@pytest.mark.parametrize("scaling", ["sphere", "standard"])
@pytest.mark.parametrize("query", ["given", "mean"])
def test_options_are_what_one_would_do_by_hand(n_heads, scaling, query, sets, y):
    model = paper_regressor(n_heads, scaling=scaling, query=query, alpha=0.1, random_state=0).fit(
        sets, y
    )
    scaled = model.tokens_.apply(sets)
    if query == "mean":
        np.testing.assert_allclose(scaled.query[3], scaled[3].tokens.mean(axis=0))
    by_hand = paper_regressor(n_heads, alpha=0.1, random_state=0).fit(scaled, y)
    np.testing.assert_allclose(model.predict(sets), by_hand.predict(scaled), atol=1e-10)


def test_the_papers_layer_sees_tokens_as_they_are(sets, y):
    model = paper_regressor(20, random_state=0).fit(sets, y)
    assert model.tokens_.apply(sets) is sets
    assert model.heads_ == kh.GaussianHeads()


def test_sums_learn_what_grows_with_the_set(rng):
    X = kh.SetBatch([rng.normal(size=(rng.integers(1, 9), 3)) for _ in range(200)])
    y = np.add.reduceat(np.square(X.tokens).sum(axis=1), X.offsets[:-1])
    total, mean = (
        paper_regressor(60, pooling=how, random_state=0)
        .fit(X[:150], y[:150])
        .score(X[150:], y[150:])
        for how in ("sum", "mean")
    )
    assert total > 0.9 > mean


def test_class_weights_are_sample_weights(sets, rng):
    y = np.array(["a", "b", "b", "b"] * 10)
    own = rng.uniform(0.5, 1.5, size=40)
    half = own.sum() / 2  # of the total weight, which two classes share in equal parts
    balanced = {label: half / own[y == label].sum() for label in "ab"}
    for class_weight, by_class in (
        ("balanced", balanced),
        ({"a": 3.0, "b": 1.0}, {"a": 3.0, "b": 1.0}),
    ):
        weights = np.array([by_class[label] for label in y])
        by_option = paper_classifier(20, class_weight=class_weight, random_state=0).fit(
            sets, y, own
        )
        by_weight = paper_classifier(20, random_state=0).fit(sets, y, own * weights)
        np.testing.assert_allclose(
            by_option.decision_function(sets), by_weight.decision_function(sets)
        )


@pytest.mark.parametrize(
    ("option", "value"),
    [("pooling", "max"), ("scaling", "minmax"), ("query", "last"), ("class_weight", "fair")],
)
def test_unknown_options_are_named(option, value, sets):
    y = np.arange(40) % 2
    with pytest.raises(ValueError, match=option):
        kh.AttentionClassifier(
            8,
            **{**PAPER_LAYER, **{option: value}},
        ).fit(sets, y)


def test_missing_tokens_are_an_error_unless_dropped():
    keys = [np.array([[1.0, np.nan], [1.0, 2.0]]), np.array([[np.nan, np.nan]])]
    with pytest.raises(ValueError, match="NaN"):
        kh.SetBatch(keys)
    batch = kh.SetBatch(drop_missing(keys))
    np.testing.assert_array_equal(batch.tokens, [[1.0, 2.0], [0.0, 0.0]])


def test_windows_cover_a_series_to_its_end_and_can_be_put_together_again(rng):
    series = [rng.normal(size=(11, 2)), rng.normal(size=(4, 2))]
    plain = kh.tokens.windows(series, width=4, stride=3, split=False)
    assert [len(cut) for cut in plain] == [4, 1]
    np.testing.assert_array_equal(plain[0][-1].reshape(2, 4).T, series[0][-4:])
    apart = kh.tokens.windows(series, width=4, stride=3)[0].reshape(-1, 2, 6)
    shape, level, amplitude = apart[:, :, :4], apart[:, :, 4:5], apart[:, :, 5:]
    np.testing.assert_allclose(shape * amplitude + level, plain[0].reshape(-1, 2, 4))
    with pytest.raises(ValueError, match=r"T ≥ width = 5: series 1 has shape \(4, 2\)"):
        kh.tokens.windows(series, width=5)
    for wrong in (np.zeros((5, 2, 2)), np.float64(3.0)):
        with pytest.raises(
            ValueError, match=r"shape \(T,\) or \(T, channels\).*series 0 has shape"
        ):
            kh.tokens.windows([wrong], width=2)


def test_still_windows_have_no_shape():
    np.testing.assert_array_equal(
        kh.tokens.windows([np.full(3, 7.0)], width=3), [[[0, 0, 0, 7, 0]]]
    )


def test_what_key_and_query_share_needs_one_kind(rng):
    with pytest.raises(ValueError, match=r"set 0 has shape \(2, 3\), `query` \(1, 2\)"):
        kh.tokens.with_shared([rng.normal(size=(2, 3))], rng.normal(size=(1, 2)))
    with pytest.raises(ValueError, match="one row per set: got 2 rows for 1 sets"):
        kh.tokens.with_shared([rng.normal(size=(2, 3))], rng.normal(size=(2, 3)))


def test_extras_are_counted_from_their_centre_in_their_spread(rng):
    sets = kh.SetBatch(rng.normal(size=(4, 2, 3)), extras=rng.normal(size=(4, 2)))
    rule = TokenRule("none", "given", "mean")
    np.testing.assert_array_equal(rule.apply(sets).extras, sets.extras)
    centre, spread = np.array([1.0, -2.0]), np.array([2.0, 0.5])
    found = replace(rule, extras_centre=centre, extras_spread=spread).apply(sets).extras
    np.testing.assert_allclose(found, (sets.extras - centre) / spread, rtol=1e-15)


@pytest.fixture
def compared():
    """Two ragged sets whose similarities to their queries can be read off."""
    keys = [np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([[0.0, 0.0], [-2.0, 0.0], [1.0, 1.0]])]
    return kh.SetBatch(keys, query=np.array([[0.0, 1.0], [2.0, 0.0]]), extras=[[7.0], [8.0]])


@pytest.mark.parametrize(
    ("measure", "of_keys", "of_queries"),
    [
        ("cosine", [0.8, 1.0, 0.0, -1.0, np.sqrt(0.5)], [1.0, 1.0]),
        ("dot", [4.0, 2.0, 0.0, -4.0, 2.0], [1.0, 4.0]),
        ("euclidean", [-np.sqrt(18), -1.0, -2.0, -4.0, -np.sqrt(2)], [0.0, 0.0]),
    ],
)
def test_every_key_gets_its_similarity_to_the_query(measure, of_keys, of_queries, compared):
    with_it = kh.tokens.with_similarity(compared, measure)
    np.testing.assert_array_equal(with_it.tokens[:, :2], compared.tokens)
    np.testing.assert_allclose(with_it.tokens[:, 2], of_keys, atol=1e-15)
    # the query has what it has with itself, so that it stays of the kind of the keys
    np.testing.assert_array_equal(with_it.query[:, :2], compared.query)
    np.testing.assert_allclose(with_it.query[:, 2], of_queries)
    np.testing.assert_array_equal(with_it.offsets, compared.offsets)
    np.testing.assert_array_equal(with_it.extras, compared.extras)
    assert with_it.pairs is None


def test_cosine_is_the_default_and_several_measures_follow_each_other(compared):
    default = kh.tokens.with_similarity(compared)
    np.testing.assert_array_equal(
        default.tokens, kh.tokens.with_similarity(compared, "cosine").tokens
    )
    several = kh.tokens.with_similarity(compared, ["dot", "euclidean"])
    for place, measure in enumerate(("dot", "euclidean")):
        one = kh.tokens.with_similarity(compared, measure)
        np.testing.assert_array_equal(several.tokens[:, 2 + place], one.tokens[:, 2])


def test_similarity_of_paired_coordinates(rng):
    """Queries of another kind: the coordinates that mean the same are compared, and stay paired."""
    keys = rng.normal(size=(5, 4, 3))
    query = rng.normal(size=(5, 6))
    pairs = [(4, 0), (1, 2)]
    batch = kh.SetBatch(keys, query, pairs=pairs)
    with_it = kh.tokens.with_similarity(batch, "dot")
    by_hand = np.einsum("nkd,nd->nk", keys[:, :, [0, 2]], query[:, [4, 1]])
    np.testing.assert_allclose(with_it.tokens[:, 3], by_hand.ravel())
    assert with_it.pairs == ((4, 0), (1, 2), (6, 3))
    # the same pairs, said for this once
    said = kh.tokens.with_similarity(kh.SetBatch(keys, query), "dot", pairs=pairs)
    np.testing.assert_array_equal(said.tokens, with_it.tokens)
    assert said.pairs == with_it.pairs


def test_similarity_keeps_types_and_groups(rng):
    atoms = kh.SetBatch(rng.normal(size=(5, 2, 3)), rng.normal(size=(5, 3))).astype(np.float32)
    molecules = kh.SetGroups(atoms, [3, 2], extras=np.ones((2, 1)))
    with_it = kh.tokens.with_similarity(molecules)
    assert with_it.sets.dtype == np.float32
    assert with_it.counts.tolist() == [3, 2]
    assert with_it.extras is molecules.extras
    np.testing.assert_array_equal(with_it.sets.tokens, kh.tokens.with_similarity(atoms).tokens)


def test_cosine_neither_overflows_nor_vanishes():
    keys = np.array([[[3e200, 4e200], [3e-200, 4e-200]]])
    with_it = kh.tokens.with_similarity(kh.SetBatch(keys, np.array([[0.0, 1e-300]])))
    np.testing.assert_allclose(with_it.tokens[:, 2], 0.8)
    with pytest.raises(ValueError, match=r"dot.*finite: key 0 of set 0 .*Scale the tokens"):
        kh.tokens.with_similarity(kh.SetBatch(keys, np.array([[0.0, 1e200]])), "dot")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda b: kh.tokens.with_similarity(b.with_query(None)),
            r"must have a query: this SetBatch has none\. Pass .*query",
        ),
        (
            lambda b: kh.tokens.with_similarity(b.with_query(np.ones((2, 5)))),
            r"of one kind: keys have 2, queries 5\. .*pairs",
        ),
        (
            lambda b: kh.tokens.with_similarity(b, "manhattan"),
            r"`measure` must be .*cosine.*dot.*euclidean.*'manhattan'",
        ),
        (lambda b: kh.tokens.with_similarity(b, []), r"`measure` must .*got \[\]"),
        (lambda b: kh.tokens.with_similarity(b, ["dot", "dot"]), r"`measure`.* once: .*'dot'"),
        (
            lambda b: kh.tokens.with_similarity(b, pairs=[(0, 2)]),
            r"`pairs` must name coordinates that are there: got \(0, 2\)",
        ),
    ],
)
def test_similarity_says_what_is_missing(change, words, compared):
    with pytest.raises(ValueError, match=words):
        change(compared)


def test_similarity_of_anything_but_samples_is_refused(rng):
    with pytest.raises(TypeError, match=r"`samples` must be a SetBatch: got list"):
        kh.tokens.with_similarity([rng.normal(size=(2, 3))])


@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
def test_similarity_goes_into_a_pipeline(rng):
    """A label that depends on how alike the nearest key is: softmax finds it in one column."""
    n = 120
    keys = [rng.normal(size=(rng.integers(3, 9), 4)) for _ in range(n)]
    sets = kh.SetBatch(keys, rng.normal(size=(n, 4)))
    y = np.maximum.reduceat(kh.tokens.with_similarity(sets).tokens[:, -1], sets.offsets[:-1])
    layer = kh.AttentionRegressor(32, activation="softmax", random_state=0)
    model = make_pipeline(FunctionTransformer(kh.tokens.with_similarity), layer)
    assert cross_val_score(model, sets, y, cv=3).mean() > 0.5
    model.set_params(functiontransformer__kw_args={"measure": "dot"}).fit(sets, y)
    expected = kh.tokens.with_similarity(sets, "dot")
    np.testing.assert_array_equal(model.predict(sets), model[-1].predict(expected))
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(sets), model.predict(sets))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tokens_of_any_size_are_brought_to_length_one(rng, dtype):
    """Squares of the largest and the smallest rows are not numbers; a row of zeros stays."""
    number = np.finfo(dtype)
    directions = rng.normal(size=(5, 7))
    sizes = np.array([1.0, number.max / 10, number.tiny * 10, 0.0, 1e-12])
    tokens = (directions * sizes[:, None]).astype(dtype)
    rule = TokenRule("sphere", "given", "mean")
    scaled = rule.apply(kh.SetBatch([tokens])).tokens
    expected = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    expected[3] = 0
    np.testing.assert_allclose(scaled, expected, rtol=0, atol=8 * number.eps)
    # a row is what it is, whatever other rows are scaled with it
    np.testing.assert_array_equal(rule.apply(kh.SetBatch([tokens[:1]])).tokens, scaled[:1])


def test_small_parts_of_scaled_sets_are_scaled_in_chunks_of_rows(rng, monkeypatch):
    sets = kh.SetBatch([rng.normal(size=(40, 3)) for _ in range(6)])
    rule = TokenRule.learn(sets, "standard")
    expected = rule.apply(sets).tokens
    seen = []
    standardised = tokens_module._standardised

    def count(tokens, centre, spread):
        seen.append(len(tokens))
        return standardised(tokens, centre, spread)

    monkeypatch.setattr(tokens_module, "_standardised", count)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 10 * 3 * 8)
    np.testing.assert_array_equal(rule.apply(sets).tokens, expected)
    monkeypatch.setattr(sources, "LAZY_BYTES", 6 * 40 * 3 * 8)
    part = rule.apply(sets)[np.array([4, 1])]
    np.testing.assert_array_equal(part.tokens, expected.reshape(6, 40, 3)[[4, 1]].reshape(80, 3))
    assert max(seen) == 10
