import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from jaxtyping import config

import keyhole as kh
from keyhole._checks import FeatureOverflowError
from keyhole.attention.activations import POINTWISE, SOFTMAX
from keyhole.attention.features import (
    TiledLayer,
    apply_values,
    attention_features,
    attention_weights,
    feature_blocks,
    key_contributions,
)
from keyhole.attention.heads import GaussianHeads, HeadArray, HeadDraw, sample_mlp_weights
from keyhole.attention.mlp import mlp_features

ACTIVATIONS = (*POINTWISE, SOFTMAX)
SIGMA = {
    "relu": lambda s: np.maximum(s, 0),
    "linear": lambda s: s,
    "square": np.square,
    "step": lambda s: np.where(s > 0, 1.0, 0.0),
    "exp": np.exp,
}


def draw_batch(rng, lengths, dim, query=True, scale=1.0):
    keys = [scale * rng.normal(size=(k, dim)) / np.sqrt(dim) for k in lengths]
    return kh.SetBatch(
        keys, scale * rng.normal(size=(len(keys), dim)) / np.sqrt(dim) if query else None
    )


def formula(batch, heads, activation):
    """φ as SPEC writes it, set by set, and the size of the terms that are summed to it."""
    rows, sizes = [], []
    for one in batch:
        query, keys = one.extended_query()[0].astype(float), one.extended_keys().astype(float)
        scores = np.einsum("d,mde,ke->mk", query, heads, keys)
        size = np.einsum("d,mde,ke->mk", abs(query), abs(heads), abs(keys))
        if activation == SOFTMAX:
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            # d softmax = softmax · (ds − its mean)
            change = weights * (1 + 2 * size.max(axis=1, keepdims=True))
        else:
            weights = SIGMA[activation](scores) / len(keys)
            slope = {
                "relu": 1,
                "linear": 1,
                "square": 2 * abs(scores),
                "step": 1,
                "exp": np.exp(scores),
            }
            change = (abs(SIGMA[activation](scores)) + slope[activation] * size) / len(keys)
        rows.append(np.einsum("mk,ke->me", weights, keys).ravel())
        sizes.append(np.einsum("mk,ke->me", change, abs(keys)).ravel())
    return np.array(rows) / np.sqrt(len(heads)), np.array(sizes) / np.sqrt(len(heads))


def roundings(found, batch, heads, activation):
    """Largest error of ``found``, in units of the rounding of the terms that make it up."""
    expected, size = formula(batch, heads, activation)
    unit = np.finfo(found.dtype).eps * np.sqrt(batch.dim + 1 + batch.lengths)[:, None]
    return float((abs(found - expected) / (unit * size)).max())


# ---- attention_features: the formula -------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "step"])
def test_features_are_the_formula(rng, activation, dtype):
    # lengths about the 32 keys handled at a time, numbers of heads about a vector and a tile of
    # them
    for dim, n_heads, query in [
        (1, 1, True),
        (3, 5, False),
        (7, 16, True),
        (8, 17, True),
        (16, 130, True),
        (20, 9, False),
    ]:
        batch = draw_batch(rng, [1, 2, 3, 31, 32, 33, 70, 4, 5], dim, query)
        heads = GaussianHeads(1.0).sample(n_heads, dim, int(rng.integers(2**31)))
        found = attention_features(batch, heads, activation, dtype=dtype)
        assert found.dtype == dtype
        assert found.shape == (9, n_heads * (dim + 1))
        exact = batch.astype(dtype).astype("float64")  # rounding of the input is not our error
        assert roundings(found, exact, heads.astype(dtype).astype(float), activation) < 4


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_another_activation_is_not_within_rounding(rng, activation):
    batch, heads = draw_batch(rng, [4, 5], 3), GaussianHeads().sample(7, 3, 0)
    for other in set(ACTIVATIONS) - {activation}:
        assert roundings(attention_features(batch, heads, other), batch, heads, activation) > 1e6


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("activation", ["relu", "linear", "square", "step"])
def test_small_integers_are_exact_and_a_score_of_zero_is_not_positive(rng, activation, dtype):
    keys = rng.integers(-2, 3, size=(6, 4, 3))
    batch = kh.SetBatch(keys, rng.integers(-2, 3, size=(6, 3)))
    heads = rng.integers(-2, 3, size=(16, 4, 4)).astype(float)
    scores = np.einsum(
        "nd,mde,nke->nmk",
        batch.extended_query(),
        heads,
        np.pad(keys, [(0, 0)] * 2 + [(0, 1)], constant_values=1),
    )
    assert (scores == 0).any()
    found = attention_features(batch, heads, activation, dtype=dtype)
    assert np.array_equal(
        found, formula(batch, heads, activation)[0]
    )  # N = 4 and M = 16 are powers of two


def test_the_column_of_coordinate_e_of_head_m_is_m_times_width_plus_e(rng):
    batch, heads = draw_batch(rng, [3, 4], 2), GaussianHeads().sample(5, 2, 0)
    whole = attention_features(batch, heads).reshape(2, 5, 3)
    for m in range(5):
        alone = attention_features(batch, heads[m : m + 1])
        assert np.allclose(whole[:, m] * np.sqrt(5), alone, rtol=1e-14)
    # the last coordinate belongs to the appended one: the mean weight of the keys
    scores = np.einsum(
        "d,mde,ke->mk", batch[0].extended_query()[0], heads, batch[0].extended_keys()
    )
    assert np.allclose(whole[0, :, 2], np.maximum(scores, 0).mean(axis=1) / np.sqrt(5))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_weights_of_keys_are_means_over_the_heads_of_each_mean(rng, activation):
    batch, draw = draw_batch(rng, [1, 2, 5, 2], 3), HeadDraw(GaussianHeads(1.0), 50, 3, seed=0)
    found = attention_weights(batch, draw, activation, 3)
    heads = draw.block(0, 50)
    for one, weights in zip(batch, np.split(found, batch.offsets[1:-1]), strict=True):
        scores = np.einsum("d,mde,ke->mk", one.extended_query()[0], heads, one.extended_keys())
        if activation == SOFTMAX:
            each = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        else:
            each = SIGMA[activation](scores) / len(weights)
        np.testing.assert_allclose(
            weights.T, [each[k::3].mean(axis=0) for k in range(3)], rtol=1e-10
        )


def test_softmax_weights_sum_to_one(rng):
    batch, heads = draw_batch(rng, [1, 5, 90], 3), GaussianHeads(scale=5.0).sample(20, 3, 0)
    features = attention_features(batch, heads, "softmax").reshape(3, 20, 4)
    assert np.allclose(features[:, :, -1], 1 / np.sqrt(20), rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_softmax_is_stable(dtype):
    # scores rise by 1000 with each key, so every new group of keys has to shrink all sums before it
    keys = np.arange(100.0)[:, None]
    batch = kh.SetBatch([keys, keys[::-1]], np.zeros((2, 1)))
    heads = np.array([[[0.0, 0.0], [1000.0, 0.0]], [[0.0, 0.0], [-1000.0, 1e6]]])
    features = attention_features(batch, heads, "softmax", dtype=dtype).reshape(2, 2, 2) * np.sqrt(
        2
    )
    assert np.allclose(features, [[[99, 1], [0, 1]]] * 2, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 700.0), ("float32", 80.0)])
def test_the_exponential_is_right_to_the_last_place(rng, dtype, limit):
    scores = rng.uniform(-limit, limit, size=5000).astype(dtype)
    scores[:3] = [0.0, limit, -limit]
    # one key at the origin and the zero query: the score is the last entry of W, the feature its
    # exponential
    heads = np.zeros((5000, 2, 2), dtype)
    heads[:, 1, 1] = scores
    batch = kh.SetBatch(np.zeros((1, 1, 1)), np.zeros((1, 1)))
    found = attention_features(batch, heads, "exp", dtype=dtype).reshape(5000, 2)[:, 1]
    expected = np.exp(scores.astype(np.longdouble)) / np.sqrt(np.longdouble(5000))
    assert float((abs(found - expected) / expected).max()) < 2.0 * np.finfo(dtype).eps


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_exponentials_underflow_to_zero(dtype):
    heads = np.zeros((3, 2, 2))
    heads[:, 1, 1] = [-800.0, -1e6, -110.0]
    found = attention_features(kh.SetBatch(np.zeros((1, 1, 1))), heads, "exp", dtype=dtype)
    assert found[0, 1] == found[0, 3] == 0.0
    assert (found[0, 5] == 0.0) == (dtype == "float32")


def test_float32_differs_from_float64_by_its_rounding(rng):
    batch, heads = draw_batch(rng, [16] * 50, 16), GaussianHeads().sample(60, 16, 0)
    exact, found = (
        attention_features(batch, heads),
        attention_features(batch, heads, dtype=np.float32),
    )
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    assert 1e-9 < error < 1e-6
    assert attention_features(batch.astype("float32"), heads).dtype == np.float64


def test_a_draw_gives_the_features_of_its_heads(rng, seed):
    batch, distribution = draw_batch(rng, [2, 7], 4), GaussianHeads(1.0)
    draw = HeadDraw(distribution, n_heads=40, dim=4, seed=seed)
    assert np.array_equal(
        attention_features(batch, draw), attention_features(batch, distribution.sample(40, 4, seed))
    )


def test_no_sets_have_no_features(rng):
    none, heads = draw_batch(rng, [2, 7], 4)[:0], GaussianHeads().sample(3, 4, 0)
    assert attention_features(none, heads).shape == (0, 15)
    assert apply_values(none, heads, np.ones((15, 2))).shape == (0, 2)
    assert [phi.shape for _, phi in feature_blocks(none, heads)] == [(0, 15)]
    assert mlp_features(none, np.ones((6, 13))).shape == (0, 6)


def test_one_huge_set_among_small_ones(rng):
    batch, heads = draw_batch(rng, [1, 20_000, 2], 3), GaussianHeads().sample(300, 3, 0)
    found = attention_features(batch, heads)
    assert roundings(found, batch, heads, "relu") < 4


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_number_of_threads_changes_no_bit(rng, monkeypatch, threads):
    batch, heads = (
        draw_batch(rng, rng.integers(1, 40, size=60), 5),
        GaussianHeads().sample(200, 5, 0),
    )
    expected = [attention_features(batch, heads), apply_values(batch, heads, np.ones((1200, 1)))]
    monkeypatch.setattr("keyhole.attention.features.thread_count", lambda: threads)
    monkeypatch.setattr("keyhole._array.thread_count", lambda: threads)
    monkeypatch.setattr("keyhole.attention.features._TASK", 1e5)
    found = [attention_features(batch, heads), apply_values(batch, heads, np.ones((1200, 1)))]
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_features_may_be_asked_for_from_several_threads_at_once(rng):
    batches = [draw_batch(rng, rng.integers(1, 9, size=30), 4) for _ in range(4)]
    heads = GaussianHeads().sample(50, 4, 0)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda b: attention_features(b, heads), batches))
    assert all(
        np.array_equal(a, attention_features(b, heads)) for a, b in zip(found, batches, strict=True)
    )


# ---- feature_blocks ------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 10_000, 40_000, 2**30])
def test_blocks_are_columns_of_the_whole(rng, seed, budget):
    batch, draw = draw_batch(rng, [3, 9, 1], 4), HeadDraw(GaussianHeads(), 33, 4, seed)
    whole, seen = attention_features(batch, draw), 0
    for part, phi in feature_blocks(batch, draw, memory_budget=budget):
        assert part.start == seen
        assert phi.flags.c_contiguous
        assert np.array_equal(phi, whole[:, part.start * 5 : part.stop * 5])
        seen = part.stop
    assert seen == 33


def test_a_smaller_budget_makes_more_blocks(rng):
    batch, heads = draw_batch(rng, [2] * 100, 3), GaussianHeads().sample(200, 3, 0)
    sizes = [
        max(phi.nbytes for _, phi in feature_blocks(batch, heads, memory_budget=b))
        for b in (2**14, 2**17, 2**30)
    ]
    assert sizes[0] <= 2**14
    assert 2**16 < sizes[1] <= 2**17
    assert sizes[2] == 100 * 800 * 8


def test_blocks_share_a_buffer_only_when_told_to(rng):
    batch, heads = draw_batch(rng, [2] * 100, 3), GaussianHeads().sample(50, 3, 0)
    own = [phi for _, phi in feature_blocks(batch, heads, memory_budget=2**16)]
    assert len(own) > 2
    assert not np.shares_memory(own[0], own[1])
    assert np.array_equal(np.hstack(own), attention_features(batch, heads))
    shared = [
        phi for _, phi in feature_blocks(batch, heads, memory_budget=2**16, reuse_buffer=True)
    ]
    assert all(np.shares_memory(shared[0], phi) for phi in shared)


def test_blocks_are_checked_before_the_first_is_asked_for(rng):
    batch = draw_batch(rng, [2], 3)
    with pytest.raises(ValueError, match=r"`heads` must have shape"):
        feature_blocks(batch, np.ones((2, 3, 3)))
    with pytest.raises(ValueError, match="`memory_budget` must be at least 1: got 0"):
        feature_blocks(batch, np.ones((2, 4, 4)), memory_budget=0)


# ---- apply_values --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("n_outputs", [0, 1, 3, 16, 17, 40])
@pytest.mark.parametrize("budget", [1, 50_000, 2**30])
def test_applied_values_are_the_product_with_the_features(rng, n_outputs, budget, dtype):
    # at the smallest budget every set and head is done alone: enough to see that once
    n_sets, n_heads = (25, 70) if budget > 1 else (3, 5)
    batch = draw_batch(rng, rng.integers(1, 40, size=n_sets), 6)
    heads = GaussianHeads().sample(n_heads, 6, 0)
    values = rng.normal(size=(n_heads * 7, n_outputs))
    features = attention_features(batch, heads)
    found = apply_values(batch, heads, values, dtype=dtype, memory_budget=budget)
    assert found.dtype == np.float64
    assert found.shape == (n_sets, n_outputs)
    unit = 20 * np.finfo(dtype).eps * (abs(features) @ abs(values) + 1e-300)
    assert (abs(found - features @ values) < unit).all()
    cube = values.reshape(n_heads, 7, n_outputs)
    assert np.array_equal(
        apply_values(batch, heads, cube, dtype=dtype, memory_budget=budget), found
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_are_applied_under_every_activation(rng, activation):
    batch, values = draw_batch(rng, [1, 40, 7], 3, query=False), rng.normal(size=(12 * 4, 2))
    heads = GaussianHeads().sample(12, 3, 0)
    expected = attention_features(batch, heads, activation) @ values
    assert np.allclose(
        apply_values(batch, heads, values, activation), expected, rtol=1e-11, atol=1e-13
    )


@pytest.mark.parametrize("n_outputs", [1, 30])
def test_applying_values_never_holds_the_features(rng, n_outputs):
    batch, draw = draw_batch(rng, [3] * 400, 7), HeadDraw(GaussianHeads(), 500, 7, 0)
    values = np.ones((500 * 8, n_outputs))
    apply_values(batch[:1], draw, values)  # compiling allocates too
    tracemalloc.start()
    apply_values(batch, draw, values, memory_budget=2**20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20
    assert 400 * 500 * 8 * 8 > 12 * 2**20  # what the features would take


# ---- mlp_features --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("query", [True, False])
def test_mlp_features_are_the_formula(rng, seed, query, dtype):
    batch = draw_batch(rng, [5] * 8, 3, query)
    weights = sample_mlp_weights(40, n_keys=5, dim=3, seed=seed)
    first = batch.query if query else np.zeros((8, 3))  # without a query, x_0 is the zero vector
    flat = np.c_[first, batch.tokens.reshape(8, 15), np.ones(8)]
    found = mlp_features(batch, weights, dtype=dtype)
    assert found.dtype == dtype
    expected = np.maximum(flat @ weights.T, 0) / np.sqrt(40)
    assert (
        abs(found - expected).max() < 8 * np.finfo(dtype).eps * (abs(flat) @ abs(weights.T)).max()
    )


def test_mlp_features_do_not_depend_on_the_budget(rng, monkeypatch):
    batch, weights = draw_batch(rng, [2] * 50, 3), sample_mlp_weights(7, 2, 3, seed=0)
    expected = mlp_features(batch, weights)
    monkeypatch.setattr("keyhole.attention.mlp.MEMORY_BUDGET", 1000)
    assert np.allclose(mlp_features(batch, weights), expected, rtol=1e-13, atol=1e-15)


# ---- bad input -----------------------------------------------------------------------------------

DIM = 3
BATCH = kh.SetBatch(np.ones((4, 2, DIM)))
HEADS = np.ones((5, 4, 4))
VALUES = np.ones((20, 1))
BAD = [
    (
        lambda: attention_features(BATCH, HEADS, "gelu"),
        "`activation` must be one of 'relu', .*: got 'gelu'",
    ),
    (
        lambda: attention_features(BATCH, HEADS, dtype="int32"),
        "must be 'float32' or 'float64': got 'int32'",
    ),
    (
        lambda: attention_features(BATCH, HEADS, dtype="half"),
        "must be 'float32' or 'float64': got 'half'",
    ),
    (
        lambda: attention_features(BATCH, HEADS, dtype="real"),
        "must be 'float32' or 'float64': got 'real'",
    ),
    (
        lambda: attention_features(BATCH, np.ones((5, 3, 3))),
        r"`heads` must have shape \(M, D, D\) .* D = d \+ 1 = 4 .*: got shape \(5, 3, 3\)",
    ),
    (lambda: attention_features(BATCH, np.ones((5, 4, 3))), r"got shape \(5, 4, 3\)"),
    (lambda: attention_features(BATCH, np.ones((4, 4))), r"got shape \(4, 4\)"),
    (lambda: attention_features(BATCH, np.ones((0, 4, 4))), r"M ≥ 1 .* got shape \(0, 4, 4\)"),
    (
        lambda: attention_features(BATCH, HEADS * np.nan),
        r"`heads` must be finite: found NaN .*\(0, 0, 0\)",
    ),
    (lambda: attention_features(BATCH, HEADS + 1j), "`heads` must be real"),
    (lambda: attention_features(BATCH, HEADS.astype(str)), "`heads` must hold numbers: got dtype"),
    (
        lambda: attention_features(BATCH, HeadDraw(GaussianHeads(), 5, 7, 0)),
        (
            "`heads` must be drawn for the dimension of the tokens: the draw is for 7, the tokens "
            "have 3. Draw"
        ),
    ),
    (
        lambda: apply_values(BATCH, HEADS, np.ones(20)),
        (
            r"must have shape \(M·D, t\) = \(20, t\) or \(M, D, t\) = \(5, 4, t\) .*: got shape "
            r"\(20,\). A single"
        ),
    ),
    (lambda: apply_values(BATCH, HEADS, np.ones((19, 1))), r"got shape \(19, 1\)"),
    (lambda: apply_values(BATCH, HEADS, np.ones((4, 5, 1))), r"got shape \(4, 5, 1\)"),
    (
        lambda: apply_values(BATCH, HEADS, VALUES * np.inf),
        r"`values` must be finite: found infinity",
    ),
    (
        lambda: apply_values(BATCH, HEADS, VALUES, memory_budget=0),
        "`memory_budget` must be at least 1",
    ),
    (
        lambda: mlp_features(kh.SetBatch([np.ones((k, 3)) for k in (2, 2, 5)]), np.ones((4, 10))),
        (
            "the same number of keys: set 0 of `batch` has 2 and set 2 of `batch` has 5. Use "
            "attention_features"
        ),
    ),
    (
        lambda: mlp_features(BATCH, np.ones((4, 9))),
        (
            r"`weights` must have shape .* = \(p, 10\) for sets of 2 keys of dimension 3: got "
            r"shape \(4, 9\)"
        ),
    ),
    (lambda: mlp_features(BATCH, np.ones(10)), r"`weights` must have shape .*: got shape \(10,\)"),
    (
        lambda: mlp_features(BATCH, np.ones((0, 10))),
        r"`weights` must have shape .*: got shape \(0, 10\)",
    ),
    (lambda: mlp_features(BATCH, np.full((4, 10), np.nan)), "`weights` must be finite: found NaN"),
    (
        lambda: mlp_features(BATCH, np.ones((4, 10)), dtype="f2"),
        "must be 'float32' or 'float64': got 'f2'",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_arrays_in_the_place_of_a_batch_are_named():
    config.update("jaxtyping_disable", True)
    try:
        for call in (attention_features, feature_blocks, mlp_features):
            with pytest.raises(
                TypeError,
                match=r"`batch` must be a SetBatch: got ndarray. Wrap arrays in kh.SetBatch",
            ):
                call(np.ones((4, 2, 3)), HEADS)
    finally:
        config.update("jaxtyping_disable", False)


def test_integer_and_object_heads_are_numbers():
    expected = attention_features(BATCH, HEADS)
    assert np.array_equal(attention_features(BATCH, HEADS.astype(int)), expected)
    assert np.array_equal(attention_features(BATCH, HEADS.astype(object)), expected)
    assert np.array_equal(
        apply_values(BATCH, HEADS, VALUES.astype(int)), apply_values(BATCH, HEADS, VALUES)
    )


# ---- overflow is never silent --------------------------------------------------------------------


def large(scale, query=1.0):
    """Three sets of which the second is large."""
    keys = np.ones((3, 40, 2))
    keys[1, 35] = scale
    return kh.SetBatch(keys, query * np.ones((3, 2)))


OVERFLOW = [
    (
        1e3,
        1.0,
        "exp",
        "float64",
        "set 1 overflow float64 under activation 'exp', with scores of size up to .*softmax",
    ),
    (1e2, 1.0, "exp", "float32", "set 1 overflow float32 under activation 'exp'"),
    (
        1e20,
        1.0,
        "square",
        "float32",
        "set 1 overflow float32 .*'square'.*Scale the tokens .* or use dtype='float64'",
    ),
    (
        1e160,
        1.0,
        "square",
        "float64",
        "set 1 overflow float64 .*'square'.* Scale the tokens or the heads down.$",
    ),
    (1e30, 1.0, "relu", "float32", "set 1 overflow float32 under activation 'relu'"),
    (1e200, 1e200, "relu", "float64", "set . overflow float64 under activation 'relu'"),
    (1e200, 1.0, "linear", "float64", "set 1 overflow float64"),
    (1e200, 1e200, "softmax", "float64", "set . overflow float64 .* up to inf"),
]


@pytest.mark.parametrize(("scale", "query", "activation", "dtype", "message"), OVERFLOW)
def test_overflow_is_named(scale, query, activation, dtype, message):
    batch = large(scale, query)
    heads = np.array([[[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], np.ones((3, 3))])
    with pytest.raises(ValueError, match="features must be finite: those of " + message):
        attention_features(batch, heads, activation, dtype=dtype)
    with pytest.raises(ValueError, match="features must be finite: those of " + message):
        apply_values(batch, heads, np.ones((6, 1)), activation, dtype=dtype)
    with pytest.raises(ValueError, match="features must be finite: those of " + message):
        apply_values(batch, heads, np.ones((6, 20)), activation, dtype=dtype)


def test_an_infinite_score_may_have_a_finite_feature():
    # the step of a score too large to hold is still 1, and that is the right answer
    batch = kh.SetBatch(np.ones((1, 2, 2)), np.full((1, 2), 1e200))
    heads = 1e200 * np.array([np.ones((3, 3)), -np.ones((3, 3))])
    assert np.array_equal(
        attention_features(batch, heads, "step") * np.sqrt(2), [[1, 1, 1, 0, 0, 0]]
    )


def test_tokens_that_do_not_fit_float32_are_named():
    for batch in (
        kh.SetBatch(np.full((1, 1, 2), 1e300)),
        kh.SetBatch(np.ones((1, 1, 2)), np.full((1, 2), 1e39)),
    ):
        with pytest.raises(
            ValueError, match=r"tokens must fit float32, whose largest number is 3.4e\+38"
        ):
            attention_features(batch, np.ones((1, 3, 3)), dtype="float32")
        with pytest.raises(ValueError, match=r"tokens must fit float32"):
            mlp_features(batch, np.ones((1, 5)), dtype="float32")


def test_overflow_of_the_mlp_is_named():
    batch = kh.SetBatch(np.full((2, 1, 2), 1e30))
    assert np.isfinite(mlp_features(batch, np.ones((3, 5)), dtype="float32")).all()
    with pytest.raises(
        ValueError,
        match=r"features must be finite: these overflow float32, with units of size up to",
    ):
        mlp_features(batch, np.full((3, 5), 1e20), dtype="float32")


@pytest.mark.parametrize("activation", ["relu", SOFTMAX])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_wide_heads_are_the_formula_too(rng, activation, dtype):
    """Heads of 300 × 301 numbers outgrow the cache: each set then has heads of its own."""
    batch = draw_batch(rng, [70, 33, 40, 1, 50], dim=300, scale=3.0)
    heads = rng.normal(size=(19, 301, 301))
    values = rng.normal(size=(19 * 301, 2))
    assert TiledLayer.of(batch, HeadArray(heads), activation, dtype).outgrows_cache

    # in blocks of few heads, and all at once
    expected, size = formula(batch, heads, activation)
    tolerance = 600 * np.finfo(dtype).eps * size
    small_budget = 8 * 5 * 301 * 4
    for budget in (small_budget, 2**30):
        blocks = feature_blocks(batch, heads, activation, dtype=dtype, memory_budget=budget)
        features = np.hstack([features for _, features in blocks])
        assert (abs(features - expected) <= tolerance + 1e-6).all()
    outputs = apply_values(batch, heads, values, activation, dtype=dtype)
    contributions = key_contributions(batch, heads, values, activation, dtype=dtype)
    sums = np.add.reduceat(contributions, batch.offsets[:-1], axis=0)
    share = 1e-11 if dtype == "float64" else 1e-3
    largest = abs(expected @ values).max()
    np.testing.assert_allclose(outputs, expected @ values, rtol=0, atol=share * largest)
    np.testing.assert_allclose(sums, expected @ values, rtol=0, atol=share * largest)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_zeros_in_all_queries_cost_nothing_and_change_no_bit(dtype, rng):
    query = np.zeros((7, 12))
    query[:6, 3:5] = rng.normal(size=(6, 2))
    query[6] = 1.0  # with the last set, no coordinate is zero throughout
    batch, heads = kh.SetBatch(rng.normal(size=(7, 3, 2)), query), rng.normal(size=(5, 13, 3))
    every = kh.attention_features(batch, heads, "softmax", dtype=dtype)
    np.testing.assert_array_equal(
        kh.attention_features(batch[:6], heads, "softmax", dtype=dtype), every[:6]
    )


@pytest.mark.parametrize("activation", ["relu", "step", "linear", "softmax"])
def test_tokens_whose_scores_overflow_are_refused_whatever_the_route(activation):
    """ReLU of a score of minus infinity is zero: features were finite, and outputs were not."""
    rng = np.random.default_rng(0)
    tokens = 1e200 * np.abs(rng.normal(size=(3, 4, 2)))
    batch = kh.SetBatch(list(tokens), tokens[:, 0])
    heads = -np.ones((1, 3, 3))
    values = rng.normal(size=(3, 1))
    with pytest.raises(FeatureOverflowError, match=r"those of set 0 overflow"):
        attention_features(batch, heads, activation)
    with pytest.raises(FeatureOverflowError, match=r"those of set 0 overflow"):
        apply_values(batch, heads, values, activation)
