"""Whatever a batch of samples carries is the same after it was packed and unpacked."""

import json
from dataclasses import fields

import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.heads import HeadDraw
from keyhole.data.sets import PooledSets, SetBatch, SetGroups
from keyhole.packing import Packer, Unpacker


@pytest.fixture
def sets(rng):
    """Sets with everything that a SetBatch can carry."""
    return kh.SetBatch(
        [rng.normal(size=(size, 3)) for size in (2, 1, 4, 3)],
        rng.normal(size=(4, 2)),
        rng.normal(size=(4, 5)),
        pairs=[(0, 2), (1, 0)],
    )


@pytest.fixture
def groups(sets):
    return kh.SetGroups(sets.with_extras(None), [1, 3], np.ones((2, 2)))


def packed(value):
    packer = Packer()
    text = json.dumps(packer.pack(value, "value"))
    return json.loads(text), packer.arrays


def unpacked(document, arrays):
    return Unpacker(arrays).unpack(document)


def assert_same(one, other):
    """Equal in every field that the class has, whichever these are today."""
    assert type(one) is type(other)
    if hasattr(one, "__dataclass_fields__"):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


def test_the_example_carries_everything(sets, groups):
    """A field that is added to a batch must be given here, and then must be packed."""
    for batch in (sets, groups):
        for field in fields(batch):
            assert getattr(batch, field.name) is not None, field.name


@pytest.mark.parametrize("kind", [SetBatch, SetGroups, PooledSets])
def test_samples_are_the_same_after_packing(sets, groups, kind):
    batch = {
        SetBatch: sets,
        SetGroups: groups,
        PooledSets: PooledSets(sets, pooling="sum", each=True),
    }[kind]
    assert_same(unpacked(*packed(batch)), batch)


def test_heads_are_the_same_after_packing():
    heads = HeadDraw(kh.GaussianHeads(1.0, pairs=[(0, 2)]), 7, 3, seed=5, query_dim=2)
    again = unpacked(*packed(heads))
    assert vars(again).keys() == vars(heads).keys()
    for name, value in vars(heads).items():
        if name != "heads":
            assert getattr(again, name) == value, name
    assert again.distribution.get_params() == heads.distribution.get_params()
    np.testing.assert_array_equal(again.block(0, 7), heads.block(0, 7))


def test_a_field_that_the_reader_does_not_know_is_refused(sets):
    document, arrays = packed(sets)
    document["with"]["colour"] = "red"
    with pytest.raises(ValueError, match=r"a SetBatch with .*'colour'"):
        unpacked(document, arrays)
    del document["with"]["colour"], document["with"]["tokens"]
    with pytest.raises(ValueError, match="a SetBatch with"):
        unpacked(document, arrays)


def test_files_from_before_there_were_pairs_have_none(sets):
    document, arrays = packed(sets)
    del document["with"]["pairs"]
    assert unpacked(document, arrays).pairs is None


@pytest.mark.parametrize(
    "pairs", [[[0, 9]], [[0, 0, 0]], [[-1, 0]], "ab", [["a", "b"]], [[0.5, 1]], []]
)
def test_pairs_that_are_none_are_refused(sets, pairs):
    document, arrays = packed(sets)
    document["with"]["pairs"] = Packer().pack(pairs, "pairs")
    with pytest.raises(ValueError, match="pairs"):
        unpacked(document, arrays)


@pytest.mark.parametrize("in_groups", [False, True])
def test_a_stream_with_pairs_goes_on_after_save_and_load(rng, tmp_path, in_groups):
    sets = kh.SetBatch(
        rng.normal(size=(90, 3, 2)), rng.normal(size=(90, 2)), pairs=[(0, 1), (1, 0)]
    )
    y = sets.query[:, 0] * sets.tokens[::3, 1]
    if in_groups:
        sets = kh.SetGroups(sets, np.ones(90, int))
    model = kh.AttentionRegressor(6, random_state=0).partial_fit(sets[:60], y[:60])
    kh.save(model, tmp_path / "stream.keyhole")
    loaded = kh.load(tmp_path / "stream.keyhole")
    for stream in (model, loaded):
        stream.partial_fit(sets[60:], y[60:])
    for _ in range(2):
        np.testing.assert_array_equal(loaded.predict(sets), model.predict(sets))
    assert loaded.n_samples_seen_ == 90


def test_training_samples_keep_their_pairs(rng, tmp_path):
    sets = kh.SetBatch(rng.normal(size=(40, 3, 2)), rng.normal(size=(40, 2)), pairs=[(0, 1)])
    for n_heads in (6, np.inf):
        model = kh.AttentionRegressor(n_heads, random_state=0).fit(sets, sets.query[:, 0])
        kh.save(model, tmp_path / "model.keyhole", overwrite=True)
        loaded = kh.load(tmp_path / "model.keyhole")
        assert loaded.training_.data.samples.pairs == ((0, 1),)
        np.testing.assert_array_equal(loaded.predict(sets), model.predict(sets))
