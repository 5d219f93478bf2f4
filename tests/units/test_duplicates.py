import numpy as np

from keyhole.data.sets import SetBatch, first_occurrences


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
    monkeypatch.setattr("keyhole.data.sets._hash_rows", lambda rows: np.zeros(len(rows), dtype=np.uint64))
    keys = rng.normal(size=(6, 2, 3))
    keys[4] = keys[1]
    assert first_occurrences(SetBatch(keys), np.zeros((6, 1))).tolist() == [0, 1, 2, 3, 1, 5]


def test_colliding_hashes_hide_no_label_query_or_length(rng, monkeypatch):
    monkeypatch.setattr("keyhole.data.sets._hash_rows", lambda rows: np.zeros(len(rows), dtype=np.uint64))
    keys = rng.normal(size=(2, 3))
    sets = SetBatch(
        [keys, keys, keys, keys[:1], keys], np.array([[0.0] * 3, [0.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3])
    )
    labels = np.array([[0.0], [1.0], [0.0], [0.0], [0.0]])
    assert first_occurrences(sets, labels).tolist() == [0, 1, 2, 3, 0]
