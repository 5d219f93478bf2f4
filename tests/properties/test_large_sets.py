"""Large sets take shortcuts: every one gives what the plain route gives, within rounding.

Sets count as large from some megabytes on. Here they do from the first byte on, so that small sets
go the same way.
"""

import tracemalloc

import numpy as np
import pytest
from devices import DEVICE
from sklearn.base import clone

import keyhole as kh
from keyhole.attention import features
from keyhole.data import sources
from keyhole.data.sets import SetBatch
from keyhole.data.summaries import plain_statistics, statistics_of_sets
from keyhole.data.tokens import (
    SetStatistics,
    TokenRule,
    standardisation,
    standardisation_of_sets,
)
from keyhole.registry import ACTIVATIONS, POOLINGS, QUERIES, SCALINGS

ROUNDING = 1e-9


@pytest.fixture
def as_if_large(monkeypatch):
    """Every batch is scaled and chosen as it is read, and laid out a set or two at a time."""

    def switch() -> None:
        monkeypatch.setattr(sources, "LAZY_BYTES", 0)
        monkeypatch.setattr(sources, "CHUNK_BYTES", 200)
        monkeypatch.setattr(features, "_KEYS", 1000)

    return switch


@pytest.fixture
def bags(rng):
    """Thirty ragged sets of long and short rows, without queries, and a target."""
    keys = [3.0 + rng.normal(size=(k, 3)) for k in rng.integers(17, 25, 30)]
    sets = SetBatch(keys)
    return sets, np.array([np.maximum(key @ [1.0, -1.0, 0.5], 0).mean() for key in keys])


def fitted(sets, y, scaling="standard", query="given", pooling="mean", activation="relu"):
    # sums are means times the number of keys, and of queries: the penalty that does the same has
    # the square of these units
    unit = 1.0
    if pooling == "sum":
        unit *= sets.lengths.mean()
    if pooling == "sum" and query == "each":
        unit *= sets.lengths.mean()
    model = kh.AttentionRegressor(
        n_heads=12,
        heads=kh.GaussianHeads(scale=0.1),
        activation=activation,
        pooling=pooling,
        scaling=scaling,
        query=query,
        alpha=1e-3 * unit**2,
        random_state=0,
    )
    return model.fit(sets, y)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_setting_predicts_the_same(as_if_large, bags, scaling, activation):
    sets, y = bags
    sets, y = sets[:8], y[:8]
    poolings = [pooling for pooling in POOLINGS if pooling != "extras"]
    settings = [(query, pooling) for query in QUERIES for pooling in poolings]
    plain = [fitted(sets, y, scaling, *each, activation).predict(sets) for each in settings]
    as_if_large()
    for each, expected in zip(settings, plain, strict=True):
        predictions = fitted(sets, y, scaling, *each, activation).predict(sets)
        np.testing.assert_allclose(
            predictions, expected, rtol=0, atol=1e-7 * np.abs(expected).max(), err_msg=str(each)
        )


@pytest.mark.parametrize("scaling", SCALINGS)
def test_keys_contribute_the_same(as_if_large, bags, scaling):
    model = fitted(*bags, scaling)
    plain = np.concatenate(model.contributions(bags[0]))
    as_if_large()
    np.testing.assert_allclose(
        np.concatenate(model.contributions(bags[0])), plain, rtol=ROUNDING, atol=ROUNDING
    )


def test_a_scaling_that_is_forgotten_shows(as_if_large, bags, monkeypatch):
    """The tests above can fail: tokens that are not scaled give other predictions."""
    plain = fitted(*bags).predict(bags[0])
    as_if_large()
    monkeypatch.setattr(
        sources.ChangedTokens,
        "fill",
        lambda self, start, stop, out: sources.fill_rows(self.base, start, stop, out),
    )
    assert np.abs(fitted(*bags).predict(bags[0]) - plain).max() > 1e-3 * np.abs(plain).max()


def test_default_settings_do_the_same(as_if_large, bags):
    sets, y = bags
    model = kh.AttentionRegressor(scaling="standard", query="given", random_state=0)
    plain = clone(model).fit(sets, y)
    as_if_large()
    large = model.fit(sets, y)
    np.testing.assert_allclose(large.predict(sets), plain.predict(sets), rtol=1e-6)
    assert large.held_out_loss_ == pytest.approx(plain.held_out_loss_, rel=1e-6)


def test_chosen_sets_are_the_same_wherever_their_keys_lie(as_if_large, bags):
    sets, _ = bags
    rows = [5, 1, 1, 29, 2, 3, 4]
    copies = sets[rows]
    as_if_large()
    lazy = sets[rows]
    assert isinstance(lazy.stored, sources.TokenRuns)
    np.testing.assert_array_equal(lazy.tokens, copies.tokens)
    np.testing.assert_array_equal(lazy[2:5].tokens, copies[2:5].tokens)
    np.testing.assert_array_equal(lazy[[6, 0]].tokens, copies[[6, 0]].tokens)
    np.testing.assert_array_equal(
        kh.concatenate([lazy, sets]).tokens, kh.concatenate([copies, sets]).tokens
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_statistics_are_those_of_numpy_in_any_order_of_the_keys(rng, dtype):
    lengths = rng.integers(1, 60, 20)
    size = 10.0 ** rng.integers(-30, 30, 6)
    offset = np.array([0, 1, 1e3, 0, 0, 0])
    tokens = (size * (rng.normal(size=(lengths.sum(), 6)) + offset)).astype(dtype)
    tokens[:, 4] = 0.1
    sets = SetBatch.from_flat(tokens, lengths)
    statistics = statistics_of_sets(sets.tokens, sets.offsets)
    np.testing.assert_allclose(
        statistics, plain_statistics(sets.tokens, sets.offsets), rtol=1e-11, atol=1e-13 * size.max()
    )
    turned = SetBatch([sets.keys_of(i)[rng.permutation(n)] for i, n in enumerate(lengths)])
    np.testing.assert_array_equal(statistics, statistics_of_sets(turned.tokens, turned.offsets))


@pytest.mark.parametrize("weighted", [False, True])
def test_means_and_spreads_of_all_keys_follow_from_those_of_sets(rng, weighted):
    lengths = rng.integers(1, 50, 25)
    tokens = rng.normal(size=(lengths.sum(), 5)) * [1, 1e-200, 1e200, 1, 1] + [0, 0, 0, 1e8, 0]
    tokens[:, 4] = 7.0
    weights = None
    if weighted:
        weights = rng.integers(0, 3, 25).astype(float)
    sets = SetBatch.from_flat(tokens, lengths)
    centre, spread = standardisation_of_sets(SetStatistics.of(sets), weights)
    plain_centre, plain_spread = standardisation(tokens, lengths, weights)
    np.testing.assert_allclose(spread, plain_spread, rtol=1e-7)
    allowed = 1e-9 * plain_spread + 4 * np.finfo(float).eps * np.abs(plain_centre)
    assert (np.abs(centre - plain_centre) <= allowed).all()


def test_a_fit_makes_no_copy_of_large_sets():
    bags = kh.datasets.make_bags(40, 4000, dim=128, share=0.1)
    n_bytes = bags.sets.nbytes
    assert n_bytes > sources.LAZY_BYTES
    fitted(bags.sets[:3], bags.target[:3].astype(float))  # compiles
    tracemalloc.start()
    fitted(bags.sets, bags.target.astype(float))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # keys are laid out in float64, _KEYS bytes of them at a time: one piece, the next, and what is
    # scaled for it in float32; all of them would take twice the bytes they have
    assert peak < 3 * features._KEYS
    assert peak < n_bytes * 1.3


# ---- on a device


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("query", ["given", "mean"])
def test_tensors_are_scaled_where_they_are(bags, scaling, query):
    pytest.importorskip("torch", reason="devices are those of torch")
    sets, _ = bags
    moved = sets.to(DEVICE)
    here = TokenRule.learn(sets, scaling, query).apply(sets)
    there = TokenRule.learn(moved, scaling, query).apply(moved)
    assert there.device == DEVICE
    np.testing.assert_allclose(there.numpy().tokens, here.tokens, rtol=1e-12, atol=1e-13)
    if query == "mean":
        np.testing.assert_allclose(there.numpy().query, here.query, rtol=1e-11, atol=1e-13)


@pytest.fixture
def moves(monkeypatch):
    """The sizes of what moves to a device, and of what comes from there."""
    torch = pytest.importorskip("torch", reason="devices are those of torch")
    as_tensor, numpy = torch.as_tensor, torch.Tensor.numpy
    sizes = {"there": [], "back": []}

    def counted_as_tensor(data, *args, **options):
        if isinstance(data, np.ndarray):
            sizes["there"].append(data.size)
        return as_tensor(data, *args, **options)

    def counted_numpy(tensor, *args, **options):
        sizes["back"].append(tensor.numel())
        return numpy(tensor, *args, **options)

    monkeypatch.setattr(torch, "as_tensor", counted_as_tensor)
    monkeypatch.setattr(torch.Tensor, "numpy", counted_numpy)
    return sizes


def test_sets_move_to_a_device_once_and_never_come_back(moves):
    """But for statistics of the rows, which are made on the host."""
    bags = kh.datasets.make_bags(16, (30, 40), dim=8, share=0.2, random_state=0)
    n_numbers = bags.sets.tokens.size
    model = kh.AttentionClassifier(
        8, scaling="standard", query="given", mlp="none", random_state=0, device=DEVICE
    )
    model.fit(bags.sets, bags.target)
    assert len(model.members_) > 3
    assert moves["there"].count(n_numbers) == 1
    assert sum(size >= n_numbers for size in moves["back"]) <= 2
