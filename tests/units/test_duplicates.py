import itertools

import numpy as np

from keyhole.data.sets import (
    DistinctSamples,
    SetBatch,
    SetGroups,
    distinct_hashes,
    first_occurrences,
    hash_samples,
    sample_order,
    shuffled,
)
from keyhole.streaming import KeptSamples


def test_the_order_of_keys_does_not_hide_a_duplicate(rng):
    sets = [rng.normal(size=(k, 3)) for k in (2, 5, 3)]
    sets += [sets[1][rng.permutation(5)], sets[0]]
    query = rng.normal(size=(3, 3))
    query = np.concatenate([query, query[[1, 0]]])
    assert first_occurrences(SetBatch(sets, query), np.zeros((5, 1))).tolist() == [0, 1, 2, 1, 0]


def test_another_label_or_query_makes_another_sample(rng):
    keys = np.repeat(rng.normal(size=(1, 4, 2)), 4, axis=0)
    query = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    labels = np.array([[0.0], [1.0], [0.0], [0.0]])
    assert first_occurrences(SetBatch(keys, query), labels).tolist() == [0, 1, 2, 0]


def test_multiplicity_of_a_key_counts(rng):
    a, b = rng.normal(size=(2, 3))
    sets = [np.stack([a, a, b]), np.stack([a, b, b]), np.stack([b, a, a])]
    assert first_occurrences(SetBatch(sets), np.zeros((3, 1))).tolist() == [0, 1, 0]


def test_colliding_hashes_are_told_apart(rng, monkeypatch):
    monkeypatch.setattr(
        "keyhole.data.arrays.hash_rows", lambda rows: np.zeros(len(rows), dtype=np.uint64)
    )
    keys = rng.normal(size=(6, 2, 3))
    keys[4] = keys[1]
    assert first_occurrences(SetBatch(keys), np.zeros((6, 1))).tolist() == [0, 1, 2, 3, 1, 5]


def test_colliding_hashes_hide_no_label_query_or_length(rng, monkeypatch):
    monkeypatch.setattr(
        "keyhole.data.arrays.hash_rows", lambda rows: np.zeros(len(rows), dtype=np.uint64)
    )
    keys = rng.normal(size=(2, 3))
    sets = SetBatch(
        [keys, keys, keys, keys[:1], keys],
        np.array([[0.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]),
    )
    labels = np.array([[0.0], [1.0], [0.0], [0.0], [0.0]])
    assert first_occurrences(sets, labels).tolist() == [0, 1, 2, 3, 0]


def test_minus_zero_is_zero():
    keys, query, labels = np.zeros((2, 1, 2)), np.zeros((2, 2)), np.zeros((2, 1))
    for array in (keys, query, labels):
        assert first_occurrences(SetBatch(keys, query), labels).tolist() == [0, 0]
        array[1] = -0.0
        assert first_occurrences(SetBatch(keys, query), labels).tolist() == [0, 0]


def test_duplicates_are_joined_and_what_has_no_weight_is_dropped(rng):
    sets, columns = SetBatch(rng.normal(size=(5, 3, 2))[[0, 1, 0, 2, 3, 4, 4]]), np.zeros((7, 1))
    weights = np.array([0.0, 1.0, 2.0, 0.0, 0.5, 1.0, 1.0])
    found = DistinctSamples.of(sets, columns, weights)
    assert found.rows.tolist() == [0, 1, 4, 5]
    assert found.weights.tolist() == [2.0, 1.0, 0.5, 2.0]
    plain = DistinctSamples.of(sets[:2], columns[:2], None)
    assert plain.weights is None
    assert len(plain) == 2


def test_duplicates_in_two_groups_are_two_samples(rng):
    sets = SetBatch(np.repeat(rng.normal(size=(1, 3, 2)), 4, axis=0))
    found = DistinctSamples.of(sets, np.zeros((4, 1)), None, np.array([1, 0, 1, 1]))
    assert found.rows.tolist() == [0, 1]
    assert found.weights.tolist() == [3.0, 1.0]


def test_samples_are_drawn_alike_in_any_order(rng):
    sets = SetBatch(
        rng.normal(size=(300, 3, 2))[rng.integers(0, 60, 300)], rng.normal(size=(300, 2)).round()
    )
    y, groups = rng.normal(size=(300, 1)), rng.integers(0, 9, 300)
    order = rng.permutation(300)
    for grouped in (None, groups):
        moved = None if grouped is None else grouped[order]
        for seed in range(3):
            one = sample_order(sets, y, seed, grouped)
            other = order[sample_order(sets[order], y[order], seed, moved)]
            np.testing.assert_array_equal(one, other)
            assert sorted(one) == list(range(300))
            np.testing.assert_array_equal(one, sample_order(sets, 1.8 * y + 32.0, seed, grouped))
    members = SetGroups(sets, np.full(100, 3))
    swapped = rng.permutation(100)
    expected = sample_order(members, y[:100], 0)
    np.testing.assert_array_equal(
        swapped[sample_order(members[swapped], y[:100][swapped], 0)], expected
    )


def test_every_seed_draws_a_fair_part_of_its_own(rng):
    """Each of 400 samples, of ten sets, is among the first hundred of 400 orders about a hundred
    times.
    """
    sets, y = (
        SetBatch(np.repeat(rng.normal(size=(10, 2, 2)), 40, axis=0)),
        rng.normal(size=(400, 1)),
    )
    hashes = distinct_hashes(sets, y)
    assert len(np.unique(hashes)) == 400
    drawn = np.zeros(400)
    for seed in range(400):
        drawn[shuffled(hashes, seed)[:100]] += 1
    # standard deviation √(400 · 1/4 · 3/4) = 8.7, six of them
    assert np.abs(drawn - 100).max() < 6 * np.sqrt(75)
    of_sets = drawn.reshape(10, 40).sum(axis=1)
    assert np.abs(of_sets - 4000).max() < 6 * np.sqrt(75 * 40)


def test_hashes_tell_samples_apart_and_fill_their_range(rng):
    keys, query, labels = (
        rng.normal(size=(50, 3, 2)),
        rng.normal(size=(50, 2)),
        rng.normal(size=(50, 2)),
    )
    swapped = keys.copy()
    swapped[:, :, [0, 1]] = keys[:, :, [1, 0]]
    every = [
        hash_samples(SetBatch(keys), labels),
        hash_samples(SetBatch(keys, query), labels),
        hash_samples(SetBatch(keys), np.zeros((50, 1))),
        hash_samples(SetBatch(keys, query[:, ::-1]), labels),
        hash_samples(SetBatch(keys, query), labels[:, ::-1]),
        hash_samples(SetBatch(keys, labels), query),
        hash_samples(SetBatch(swapped, query), labels),
        hash_samples(SetBatch(keys[:, :2], query), labels),
        hash_samples(SetBatch(np.nextafter(keys, 9.0), query), labels),
    ]
    hashes = np.concatenate(every)
    assert len(set(hashes.tolist())) == len(hashes)
    # the least hashes are a fair sample only if every bit is as often 0 as 1
    bits = (hashes[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert (np.abs(bits.mean(axis=0) - 0.5) * 2 * np.sqrt(len(hashes)) < 5).all()
    np.testing.assert_array_equal(hash_samples(SetBatch(keys[:, ::-1], query), labels), every[1])


def test_sets_of_short_numbers_have_hashes_of_their_own():
    """What is kept of a stream tells samples apart by their hashes alone: sums over keys may not be
    regular.
    """
    powers, whole = 2.0 ** np.arange(12), np.arange(-3.0, 4.0)
    for numbers, size in ((powers, 2), (whole, 4), (np.array([0.0, 1.0]), 9)):
        keys = np.array(list(itertools.combinations_with_replacement(numbers, size)))
        for sets in (SetBatch(keys[:, :, None]), SetBatch(np.stack([keys, keys[:, ::-1]], axis=2))):
            assert len(np.unique(hash_samples(sets, np.zeros((len(keys), 1))))) == len(keys)
    grid = SetBatch(np.array(list(itertools.product([-1.0, 0.0, 1.0], repeat=8)))[:, None])
    kept = KeptSamples.none(3**8, 1).put(grid, np.zeros((3**8, 1)), np.ones(3**8))
    assert len(kept.weights) == 3**8
