import pickle

import numpy as np
import pytest
from paper import paper_regressor

import keyhole as kh
from keyhole.data.sets import SetBatch, concatenate


def ragged(rng, lengths=(3, 1, 5, 2), dim=4):
    return [rng.normal(size=(k, dim)) for k in lengths], rng.normal(size=(len(lengths), dim))


# ---- what a batch holds --------------------------------------------------------------------------


def test_keys_are_stored_end_to_end(rng):
    keys, query = ragged(rng)
    batch = SetBatch(keys, query)
    assert np.array_equal(batch.tokens, np.concatenate(keys))
    assert batch.offsets.tolist() == [0, 3, 4, 9, 11]
    assert batch.lengths.tolist() == [3, 1, 5, 2]
    assert np.array_equal(batch.query, query)
    assert (len(batch), batch.dim, batch.shape, batch.dtype) == (4, 4, (4, 4), np.float64)


def test_a_long_set_costs_the_others_nothing(rng):
    lengths = [4] * 99 + [1000]
    batch = SetBatch([rng.normal(size=(k, 8)) for k in lengths])
    assert batch.nbytes == sum(lengths) * 8 * 8 + 101 * 8
    assert batch.with_query(np.zeros((100, 8))).nbytes == batch.nbytes + 100 * 8 * 8


def test_an_array_is_not_copied(rng):
    keys = rng.normal(size=(5, 3, 2))
    assert np.shares_memory(SetBatch(keys).tokens, keys)


def test_the_batch_is_read_only(rng):
    batch = SetBatch(*ragged(rng))
    for array in (batch.tokens, batch.offsets, batch.query):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_dense_and_ragged_input_agree(rng):
    keys, query = rng.normal(size=(4, 3, 2)), rng.normal(size=(4, 2))
    dense, listed = SetBatch(keys, query), SetBatch(list(keys), query.tolist())
    assert np.array_equal(dense.tokens, listed.tokens)
    assert np.array_equal(dense.offsets, listed.offsets)
    assert np.array_equal(dense.query, listed.query)


def test_from_tokens_takes_the_query_from_row_zero(rng):
    x = [rng.normal(size=(1 + k, 3)) for k in (2, 1, 4)]
    batch = SetBatch.from_tokens(x)
    assert np.array_equal(batch.query, [a[0] for a in x])
    assert np.array_equal(batch.tokens, np.concatenate([a[1:] for a in x]))
    assert batch.lengths.tolist() == [2, 1, 4]
    dense = rng.normal(size=(5, 1 + 2, 3))
    assert np.array_equal(SetBatch.from_tokens(dense).tokens, dense[:, 1:].reshape(-1, 3))


@pytest.mark.parametrize(
    ("keys_type", "query_type", "held"),
    [
        ("float32", "float32", "float32"),
        ("float32", "float64", "float64"),
        ("float64", "float32", "float64"),
        ("int64", "float32", "float64"),
        ("float32", "bool", "float64"),
        ("float16", "float16", "float64"),
        ("uint8", "int8", "float64"),
    ],
)
def test_float32_stays_and_all_else_becomes_float64(keys_type, query_type, held):
    keys, query = np.ones((2, 3, 4), keys_type), np.ones((2, 4), query_type)
    batch = SetBatch(keys, query)
    assert batch.tokens.dtype == batch.query.dtype == batch.dtype == held
    assert SetBatch([keys[0], keys[1].astype(np.float64)]).dtype == np.float64


def test_object_arrays_of_numbers_are_numbers():
    batch = SetBatch(np.array([[[1, 2.5]], [[3, True]]], dtype=object))
    assert batch.tokens.tolist() == [[1.0, 2.5], [3.0, 1.0]]
    sets = np.empty(2, dtype=object)
    sets[:] = [np.ones((1, 2)), np.ones((3, 2))]
    assert SetBatch(sets).lengths.tolist() == [1, 3]


def test_extended_tokens_end_in_one(rng):
    batch = SetBatch(*ragged(rng))
    assert np.array_equal(batch.extended_keys(), np.c_[batch.tokens, np.ones(11)])
    assert np.array_equal(batch.extended_query(), np.c_[batch.query, np.ones(4)])


def test_the_constant_query_is_as_long_as_a_unit_token(rng):
    keys = rng.normal(size=(3, 5, 4))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    batch = SetBatch(keys)
    assert batch.query is None
    assert np.array_equal(batch.extended_query(), np.tile([0, 0, 0, 0, np.sqrt(2)], (3, 1)))
    assert np.allclose(np.linalg.norm(batch.extended_keys(), axis=1), np.sqrt(2))


def test_astype(rng):
    batch = SetBatch(*ragged(rng))
    assert batch.astype("float64") is batch
    small = batch.astype(np.float32)
    assert small.dtype == small.query.dtype == np.float32
    assert np.array_equal(small.offsets, batch.offsets)
    with pytest.raises(ValueError, match="`dtype` must be float32 or float64: got int64"):
        batch.astype(int)


def test_a_batch_survives_pickling(rng):
    batch = SetBatch(*ragged(rng))
    copy = pickle.loads(pickle.dumps(batch))
    assert np.array_equal(copy.tokens, batch.tokens)
    assert repr(copy) == repr(batch)


# ---- slicing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_query", [True, False])
def test_every_index_picks_the_sets_that_numpy_would(rng, with_query):
    keys, query = ragged(rng, lengths=rng.integers(1, 6, size=7))
    batch = SetBatch(keys, query if with_query else None)
    mask = rng.random(7) < 0.5
    indices = [
        slice(2, 5),
        slice(None, None, 2),
        slice(None, None, -1),
        slice(5, 2),
        slice(-3, None),
    ]
    indices += [
        [3, 0, 3],
        np.array([6, -1, -7]),
        mask,
        mask.tolist(),
        np.zeros(7, bool),
        [],
        np.uint8([2]),
    ]
    for index in indices:
        picked = batch[index]
        rows = np.arange(7)[
            np.asarray(index, dtype=int) if isinstance(index, list) and not index else index
        ]
        assert picked.lengths.tolist() == [len(keys[i]) for i in rows]
        assert np.array_equal(
            picked.tokens, np.concatenate([np.empty((0, 4)), *(keys[i] for i in rows)])
        )
        assert (picked.query is not None) == with_query
        if with_query:
            assert np.array_equal(picked.query, query[rows])


def test_one_integer_gives_a_batch_of_one_set(rng):
    keys, query = ragged(rng)
    batch = SetBatch(keys, query)
    for i in (0, 2, -1, np.int64(1)):
        assert np.array_equal(batch[i].tokens, keys[i])
        assert np.array_equal(batch[i].query, query[i][None])
    assert [np.array_equal(one.tokens, k) for one, k in zip(batch, keys, strict=True)] == [True] * 4


def test_a_slice_of_consecutive_sets_is_a_view(rng):
    batch = SetBatch(*ragged(rng))
    assert np.shares_memory(batch[1:3].tokens, batch.tokens)
    assert not np.shares_memory(batch[[1, 2]].tokens, batch.tokens)


def test_scikit_learn_writes_an_ellipsis(rng):
    batch = SetBatch(*ragged(rng))
    assert batch[[2, 0], ...].lengths.tolist() == [5, 3]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (4, "set 4 is out of range for a batch of 4 sets"),
        ([0, -5], "set -5 is out of range for a batch of 4 sets"),
        ([True, False], r"a mask must have one entry per set: got shape \(2,\) for 4 sets"),
        (True, r"a mask must have one entry per set: got shape \(\) for 4 sets"),
        (
            1.0,
            (
                "indexed by a slice, a list or array of integers, or a mask: got float of dtype "
                "float64"
            ),
        ),
        (None, "indexed by a slice, a list or array of integers, or a mask: got NoneType"),
        ([[0, 1]], r"indexed by a slice.*shape \(1, 2\)"),
        ("ab", "indexed by a slice.*got str"),
        ((0, 1), "indexed by a slice.*got tuple"),
        ((slice(0, 1), slice(0, 1)), "indexed by a slice.*got tuple"),
    ],
)
def test_a_wrong_index_is_named(rng, index, message):
    with pytest.raises(IndexError, match=message):
        SetBatch(*ragged(rng))[index]


def test_concatenate(rng):
    keys, query = ragged(rng)
    whole = SetBatch(keys, query)
    joined = concatenate([whole[:1], whole[1:3], whole[3:]])
    assert np.array_equal(joined.tokens, whole.tokens)
    assert np.array_equal(joined.offsets, whole.offsets)
    assert np.array_equal(joined.query, whole.query)
    mixed = concatenate([whole.astype("float32"), whole])
    assert mixed.dtype == mixed.query.dtype == np.float64
    assert concatenate([SetBatch(keys), SetBatch(keys)]).query is None


def test_concatenate_names_what_does_not_fit(rng):
    keys, query = ragged(rng)
    with pytest.raises(ValueError, match="`batches` must hold at least one SetBatch: got none"):
        concatenate([])
    with pytest.raises(
        ValueError, match=r"`batches` must share their token dimension: got \[2, 4\]"
    ):
        concatenate([SetBatch(keys), SetBatch(np.ones((1, 1, 2)))])
    with pytest.raises(ValueError, match="must all carry a query, or none: 1 of 2 do"):
        concatenate([SetBatch(keys), SetBatch(keys, query)])


# ---- repr ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "query", "text"),
    [
        (
            np.ones((2, 3, 4)),
            None,
            "SetBatch(2 sets, 3 keys each (6 in all), dim 4, no query, float64)",
        ),
        (
            np.ones((1, 1, 4), "f4"),
            np.ones((1, 4), "f4"),
            "SetBatch(1 set, 1 key, dim 4, with query, float32)",
        ),
        (
            [np.ones((2, 1)), np.ones((9, 1))],
            None,
            "SetBatch(2 sets, 2–9 keys each (11 in all), dim 1, no query, float64)",
        ),
    ],
)
def test_repr_says_what_is_in_the_batch(keys, query, text):
    assert repr(SetBatch(keys, query)) == text


def test_repr_of_no_sets():
    assert repr(SetBatch(np.ones((2, 3, 4)))[:0]) == "SetBatch(0 sets, dim 4, no query, float64)"


# ---- bad input: rule, evidence, remedy -----------------------------------------------------------

DENSE = np.ones((3, 2, 4))


def spoiled(value, index):
    array = DENSE.copy()
    array[index] = value
    return array


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            spoiled(np.nan, (1, 0, 3)),
            r"`keys` must be finite: found NaN .* at index \(1, 0, 3\), 1 such",
        ),
        (
            spoiled(-np.inf, (2, 1)),
            r"`keys` must be finite: found infinity .* at index \(2, 1, 0\), 4 such",
        ),
        (
            list(spoiled(np.nan, (1, 0, 3))),
            r"`keys\[1\]` must be finite: found NaN .* at index \(0, 3\)",
        ),
        ([], r"`keys` must hold at least one set: got none \(0 sample\(s\)\)"),
        (np.ones((0, 2, 4)), "`keys` must hold at least one set: got none"),
        (
            np.ones((3, 0, 4)),
            "every set of `keys` must have at least one key: set 0 has no keys. Drop it",
        ),
        ([np.ones((2, 4)), np.ones((0, 4))], "must have at least one key: set 1 has no keys"),
        (
            np.ones((3, 2, 0)),
            r"tokens of `keys` must have at least one coordinate: got 0 feature\(s\)",
        ),
        (
            np.ones((3, 4)),
            r"`keys` must have shape \(n, N, d\).*\(3, 4\). For one key per set, pass",
        ),
        (np.ones(3), r"`keys` must have shape \(n, N, d\).*: got shape \(3,\)"),
        (np.ones((1, 2, 3, 4)), r"`keys` must have shape \(n, N, d\).*: got shape \(1, 2, 3, 4\)"),
        ([np.ones((2, 4)), np.ones(4)], r"must have shape \(N_i, d\): set 1 has shape \(4,\)"),
        (
            [np.ones((2, 4)), np.ones((2, 4)), np.ones((1, 3))],
            r"must share their last axis .*: set 0 has shape \(2, 4\) and set 2 has shape \(1, 3\)",
        ),
        (DENSE + 1j, "`keys` must be real. Complex data not supported: got dtype complex128"),
        (DENSE.astype(str), "`keys` must hold numbers: got dtype <U"),
        ([np.ones((2, 4)), np.full((2, 4), "a")], r"`keys\[1\]` must hold numbers: got dtype <U1"),
        (
            np.full((1, 1, 1), "a", dtype=object),
            "`keys` must hold numbers: .*object array of shape",
        ),
        ("ab", r"`keys\[0\]` must hold numbers: got dtype <U1"),
        (DENSE.astype("M8[s]"), "`keys` must hold numbers: got dtype datetime64"),
    ],
)
def test_bad_keys_are_named(keys, message):
    with pytest.raises(ValueError, match=message):
        SetBatch(keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            None,
            (
                r"`keys` must be an \(n, N, d\) array or a sequence of n arrays \(N_i, d\): got "
                r"NoneType"
            ),
        ),
        (3.0, "got float"),
        ((x for x in DENSE), "got generator"),
        (np.array(None, dtype=object), "got ndarray"),
        (SetBatch(DENSE), "`keys` is a SetBatch already"),
        (
            np.array([[[{}]]], dtype=object),
            "`keys` must hold numbers: argument must be a string or a real number",
        ),
    ],
)
def test_keys_of_the_wrong_type_are_named(keys, message):
    with pytest.raises(TypeError, match=message):
        SetBatch(keys)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            np.ones((3, 0)),
            r"`query` must have shape \(n, d_q\), one query per set: got shape \(3, 0\)",
        ),
        (np.ones((2, 4)), "`query` must have one row per set: got 2 rows for 3 sets"),
        (
            np.ones(4),
            r"`query` must have shape \(n, d_q\), one query per set: got shape \(4,\) for 3 sets",
        ),
        (np.ones((3, 1, 4)), r"`query` must have shape \(n, d_q\).*got shape \(3, 1, 4\)"),
        (
            np.full((3, 4), np.nan),
            r"`query` must be finite: found NaN .* at index \(0, 0\), 12 such",
        ),
        (np.full((3, 4), np.inf), "`query` must be finite: found infinity"),
        (np.full((3, 4), "a"), "`query` must hold numbers: got dtype <U1"),
        (np.full((3, 4), 1j), "`query` must be real"),
    ],
)
def test_a_bad_query_is_named(query, message):
    with pytest.raises(ValueError, match=message):
        SetBatch(DENSE, query)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            np.ones((3, 1, 4)),
            r"must have a query \(row 0\) and at least one key: set 0 has no keys, only its query",
        ),
        (
            [np.ones((2, 4)), np.ones((1, 4))],
            "set 1 has no keys, only its query. Drop such sets, or use SetBatch",
        ),
        (spoiled(np.nan, (2, 0, 1)), r"`x` must be finite: found NaN .* at index \(2, 0, 1\)"),
        ([], "`x` must hold at least one set"),
    ],
)
def test_bad_tokens_are_named(x, message):
    with pytest.raises(ValueError, match=message):
        SetBatch.from_tokens(x)


def test_a_list_of_batches_is_pointed_to_concatenate():
    batch = kh.SetBatch(np.ones((2, 3, 4)))
    for make in (
        kh.SetBatch,
        kh.SetBatch.from_tokens,
        lambda X: paper_regressor(4).fit(X, np.ones(4)),
    ):
        with pytest.raises(
            TypeError,
            match=r"must hold arrays: \w+\[0\] is a batch. Join batches with kh.concatenate",
        ):
            make([batch, batch])


def test_batches_of_two_kinds_are_not_joined():
    sets = kh.SetBatch(np.ones((2, 3, 4)))
    groups = kh.SetGroups(sets, [2])
    joined = kh.concatenate([groups, groups])
    assert joined.counts.tolist() == [2, 2]
    with pytest.raises(
        ValueError, match=r"of one kind: got SetBatch and SetGroups. SetGroups\(batch, np.ones"
    ):
        kh.concatenate([sets, groups])
    with pytest.raises(TypeError, match="`batches` must be a SetBatch: got ndarray"):
        kh.concatenate([np.ones((2, 3, 4))])
