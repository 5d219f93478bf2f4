"""Large sets take shortcuts: every one gives what the plain route gives, within rounding.

Sets count as large from some megabytes on. Here they do from the first byte on, so that small sets
go the same way.
"""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from devices import DEVICE
from sklearn.base import clone

import keyhole as kh
from keyhole.attention import features
from keyhole.attention.activations import ACTIVATIONS
from keyhole.data import sources
from keyhole.data.sets import SetBatch
from keyhole.data.summaries import plain_statistics, statistics_of_sets
from keyhole.data.tokens import (
    POOLINGS,
    QUERIES,
    SCALINGS,
    SetStatistics,
    TokenRule,
    standardisation,
    standardisation_of_sets,
)

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
    settings = [(query, pooling) for query in QUERIES for pooling in POOLINGS]
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


def test_default_settings_choose_the_same(as_if_large, bags):
    sets, y = bags
    plain = kh.AttentionRegressor(heads=kh.GaussianHeads(), random_state=0).fit(sets, y)
    as_if_large()
    large = kh.AttentionRegressor(heads=kh.GaussianHeads(), random_state=0)
    large.fit(sets, y)
    assert large.chosen_params_.keys() == plain.chosen_params_.keys()
    for name, value in plain.chosen_params_.items():
        if name not in ("heads", "extras_scale"):
            assert large.chosen_params_[name] == value
    np.testing.assert_allclose(large.predict(sets), plain.predict(sets), rtol=1e-5, atol=1e-7)


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


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_device_predicts_the_same_under_every_setting(bags, scaling, activation):
    pytest.importorskip("torch", reason="devices are those of torch")
    sets, y = bags
    sets, y = sets[:8], y[:8]
    for query in QUERIES:
        for pooling in POOLINGS:
            host = fitted(sets, y, scaling, query, pooling, activation)
            device = clone(host).set_params(device=DEVICE).fit(sets, y)
            assert device.layer_.device == DEVICE
            expected = host.predict(sets)
            np.testing.assert_allclose(
                device.predict(sets),
                expected,
                rtol=0,
                atol=1e-7 * np.abs(expected).max(),
                err_msg=f"{query} {pooling}",
            )


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_a_device_gives_what_the_host_gives(
    as_if_large, bags, scaling, query, pooling, monkeypatch
):
    """On the device at once, and streamed through one that is too small for all sets."""
    pytest.importorskip("torch", reason="devices are those of torch")
    from keyhole.attention import torch_backend

    sets, y = bags
    host = fitted(sets, y, scaling, query, pooling)
    as_if_large()
    # a set of any length is long enough for the contributions of a device
    monkeypatch.setattr("keyhole.solvers.layers.LONG_SET", 1)
    for room in (2**40, 20_000):
        monkeypatch.setattr(torch_backend, "free_bytes", lambda device, room=room: room)
        model = clone(host).set_params(device=DEVICE).fit(sets, y)
        np.testing.assert_allclose(model.predict(sets), host.predict(sets), rtol=1e-7)
        contributions = np.concatenate(host.contributions(sets))
        np.testing.assert_allclose(
            np.concatenate(model.contributions(sets)),
            contributions,
            rtol=1e-6,
            atol=1e-9 * np.abs(contributions).max(),
        )


def test_sets_that_a_device_cannot_hold_move_there_in_parts(as_if_large, bags, monkeypatch):
    pytest.importorskip("torch", reason="devices are those of torch")
    from keyhole.attention import torch_backend
    from keyhole.attention.heads import HeadDraw

    monkeypatch.setattr(torch_backend, "free_bytes", lambda device: 20_000)
    as_if_large()
    products = torch_backend.DeviceProducts(
        samples=bags[0],
        dtype="float64",
        heads=HeadDraw(kh.GaussianHeads(), 5, 3, 0),
        activation="relu",
        device=DEVICE,
        memory_budget=2**20,
    )
    assert len(products.parts) > 1
    assert products.samples.device is None


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


@pytest.mark.parametrize(("n_heads", "keys"), [(8, "all"), (8, 4), (np.inf, "all")])
def test_sets_move_to_a_device_once_and_never_come_back(moves, n_heads, keys):
    """For all that is chosen and fitted there: every draft shares the tokens on the device.

    The exact kernel compares new sets with the training sets, so that its model keeps these on the
    host: they come back once, at the end.
    """
    bags = kh.datasets.make_bags(30, (60, 80), dim=20, share=0.2, random_state=0)
    n_numbers = bags.sets.tokens.size
    model = kh.AttentionClassifier(
        n_heads, heads=kh.GaussianHeads(), keys=keys, random_state=0, device=DEVICE
    )
    model.fit(bags.sets, bags.target)
    came_back = [size for size in moves["back"] if size >= n_numbers]
    assert len(model.candidates_) > 5
    assert moves["there"].count(n_numbers) == 1
    is_exact = n_heads == np.inf
    assert came_back == [n_numbers] * is_exact
    if is_exact:
        return

    moves["there"].clear()
    moves["back"].clear()
    model.predict(bags.sets)
    model.contributions(bags.sets)
    assert moves["there"].count(n_numbers) == 2
    # contributions, and statistics of sets: 4 × 20 numbers of each
    assert max(moves["back"]) <= n_numbers // 10


@pytest.mark.parametrize("n_heads", [40, np.inf], ids=["dual", "kernel"])
def test_newton_steps_on_a_device_leave_its_matrices_there(moves, n_heads, rng):
    """The host makes the choices along the path of penalties from vectors of n numbers."""
    n = 60
    sets = SetBatch(rng.normal(size=(n, 2, 3)), rng.normal(size=(n, 3)))
    y = sets.query[:, 0] + 0.3 * rng.normal(size=n) > 0
    model = kh.AttentionClassifier(
        n_heads,
        heads=kh.GaussianHeads(),
        activation="relu",
        pooling="mean",
        loss="log_loss",
        random_state=0,
        device=DEVICE,
    )
    model.fit(sets, y)
    assert model.solver_ == ("kernel" if n_heads == np.inf else "dual")
    # a step brings back its solution, of two columns, and its logits
    assert moves["back"].count(2 * n) >= 10
    assert moves["back"].count(n) >= 10
    # nothing is larger than the statistics of sets: 4 × 3 numbers of each
    assert max(moves["back"]) <= 12 * n


@pytest.mark.parametrize("estimator", [kh.AttentionRegressor, kh.AttentionClassifier])
def test_default_settings_try_the_same_candidates_on_a_device(bags, estimator):
    pytest.importorskip("torch", reason="devices are those of torch")
    sets, y = bags
    if estimator is kh.AttentionClassifier:
        y = (y > np.median(y)).astype(int)
    host = estimator(heads=kh.GaussianHeads(), random_state=0).fit(sets, y)
    device = clone(host).set_params(device=DEVICE).fit(sets, y)
    assert len(host.candidates_) > 5
    for here, there in zip(host.candidates_, device.candidates_, strict=True):
        assert there.loss == pytest.approx(here.loss, rel=1e-4, abs=1e-9)
        assert replace(there, loss=here.loss) == here


def test_a_device_selects_the_keys_that_the_host_selects(bags):
    pytest.importorskip("torch", reason="devices are those of torch")
    sets, y = bags
    host = fitted(sets, y).set_params(keys=5).fit(sets, y)
    device = clone(host).set_params(device=DEVICE).fit(sets, y)
    assert device.key_selection_.layer.device == DEVICE
    np.testing.assert_array_equal(
        device.key_selection_.kept_keys(sets), host.key_selection_.kept_keys(sets)
    )
    np.testing.assert_allclose(device.predict(sets), host.predict(sets), rtol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tensors_are_summarised_as_arrays_are(rng, dtype):
    pytest.importorskip("torch", reason="devices are those of torch")
    lengths = rng.integers(1, 60, 20)
    size = 10.0 ** rng.integers(-30, 30, 6)
    offset = np.array([0, 1, 1e3, 0, 0, 0])
    tokens = (size * (rng.normal(size=(lengths.sum(), 6)) + offset)).astype(dtype)
    tokens[:, 4] = 0.1
    tokens[3, 5], tokens[4, 5] = 0.0, -0.0
    sets = SetBatch.from_flat(tokens, lengths)
    moved = SetBatch.from_flat(tokens, lengths).to(DEVICE)
    statistics = sets.statistics()
    largest = np.abs(statistics[:, 2:]).max(axis=1, keepdims=True)
    error = np.abs(moved.statistics() - statistics)
    assert (error <= 1e-13 * largest).all()


def test_statistics_of_tensors_are_the_same_in_any_order_of_the_keys(rng):
    pytest.importorskip("torch", reason="devices are those of torch")
    lengths = rng.integers(1, 300, 20)
    tokens = rng.normal(size=(lengths.sum(), 6)) * 10.0 ** rng.integers(-9, 9, 6) + [
        0,
        1,
        9,
        0,
        0,
        1,
    ]
    sets = SetBatch.from_flat(tokens, lengths)
    turned = SetBatch([sets.keys_of(i)[rng.permutation(n)] for i, n in enumerate(lengths)])
    np.testing.assert_array_equal(turned.to(DEVICE).statistics(), sets.to(DEVICE).statistics())


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


@pytest.mark.parametrize("n_heads", [12, np.inf])
@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_intervals_on_a_device_are_those_of_the_host(bags, n_heads, pooling, moves):
    sets, y = bags
    host = fitted(sets, y, pooling=pooling).set_params(n_heads=n_heads, alpha=1.0).fit(sets, y)
    device = clone(host).set_params(device=DEVICE).fit(sets, y)
    moves["back"].clear()
    np.testing.assert_allclose(device.predict_interval(sets), host.predict_interval(sets), 1e-6)
    np.testing.assert_allclose(device.predict_std(sets), host.predict_std(sets), 1e-6)
    # n × n matrices, and no tokens
    assert max(moves["back"]) <= len(sets) ** 2
