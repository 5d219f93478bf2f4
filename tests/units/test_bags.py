"""Synthetic bags: what is drawn, and what is refused."""

import numpy as np
import pytest

import keyhole as kh


@pytest.fixture
def bags():
    """Twelve small bags, of which six have signal keys."""
    return kh.datasets.make_bags(12, (60, 90), dim=5, share=0.1, n_types=4, random_state=3)


def test_bags_of_label_one_have_the_share_of_signal_keys(bags):
    assert bags.target.sum() == 6
    for label, is_signal in zip(bags.target, bags.is_signal, strict=True):
        expected = round(0.1 * len(is_signal)) if label else 0
        assert is_signal.sum() == expected


def test_bags_are_as_large_as_asked(bags):
    assert bags.sets.dtype == np.float32
    assert bags.sets.dim == 5
    assert bags.sets.lengths.min() >= 60
    assert bags.sets.lengths.max() <= 90
    of_one_size = kh.datasets.make_bags(3, 7, dim=2)
    assert of_one_size.sets.lengths.tolist() == [7, 7, 7]


def test_keys_lie_on_a_grid_and_signal_keys_next_to_each_other(bags):
    for i in np.flatnonzero(bags.target):
        places = bags.coordinates[i]
        assert len(np.unique(places, axis=0)) == len(places)
        # the signal keys are a disc: none is farther from their middle than a disc of twice their
        # number reaches
        signal = places[bags.is_signal[i]]
        distances = np.linalg.norm(signal - signal.mean(axis=0), axis=1)
        assert distances.max() <= 2 + np.sqrt(2 * len(signal))


def test_keys_scatter_about_the_centre_of_their_type():
    bags = kh.datasets.make_bags(4, 50, dim=3, n_types=2, noise=0.0, random_state=1)
    tokens, types = bags.sets.tokens, np.concatenate(bags.types)
    for tissue in np.unique(types):
        of_type = tokens[types == tissue]
        assert (of_type == of_type[0]).all()
    noisy = kh.datasets.make_bags(4, 2000, dim=3, n_types=1, share=0, noise=0.5, random_state=1)
    assert noisy.sets.tokens.std(axis=0) == pytest.approx(0.5, rel=0.1)


def test_one_seed_is_one_draw(bags):
    again = kh.datasets.make_bags(12, (60, 90), dim=5, share=0.1, n_types=4, random_state=3)
    other = kh.datasets.make_bags(12, (60, 90), dim=5, share=0.1, n_types=4, random_state=4)
    assert np.array_equal(bags.sets.tokens, again.sets.tokens)
    assert not np.array_equal(bags.sets.lengths, other.sets.lengths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_bags": 0}, "n_bags"),
        ({"n_keys": (5, 3)}, r"least, most.*\(5, 3\)"),
        ({"n_keys": (5, 6, 7)}, "3 numbers"),
        ({"share": 1.5}, "from 0 to 1: got 1.5"),
        ({"noise": -1.0}, "noise"),
        ({"dtype": "int8"}, "dtype"),
    ],
)
def test_impossible_bags_are_refused(arguments, message):
    settings = {"n_bags": 3, "n_keys": 4, "dim": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        kh.datasets.make_bags(**settings)


def test_tokens_that_lie_end_to_end_are_not_copied():
    tokens = np.arange(14.0, dtype=np.float32).reshape(7, 2)
    batch = kh.SetBatch.from_flat(tokens, [2, 5], query=np.zeros((2, 2), np.float32))
    assert np.shares_memory(batch.tokens, tokens)
    assert batch.lengths.tolist() == [2, 5]
    assert batch.query.shape == (2, 2)


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        (np.zeros(4), [4], "a row per key"),
        (np.zeros((4, 1)), [2, 1], "add up to the rows of `tokens`: got 3 for 4"),
        (np.zeros((4, 1)), [4, 0], "set 1 has no keys"),
        (np.zeros((4, 1)), [5, -1], "set 1 has no keys"),
        (np.zeros((4, 1)), [4.0], "vector of integers"),
        (np.full((4, 1), np.nan), [4], "NaN"),
    ],
)
def test_tokens_end_to_end_must_fit_their_lengths(tokens, lengths, message):
    with pytest.raises(ValueError, match=message):
        kh.SetBatch.from_flat(tokens, lengths)
