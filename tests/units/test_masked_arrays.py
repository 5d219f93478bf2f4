"""A masked entry has no value: it is refused wherever arrays enter, and never read from under its
mask.
"""

import numpy as np
import pytest

import keyhole as kh

SAMPLES, KEYS = 12, 3

MODELS = {
    "regressor": lambda: kh.AttentionRegressor(4, random_state=0),
    "classifier": lambda: kh.AttentionClassifier(4, random_state=0),
    "norm ball": lambda: kh.NormBallRegressor(4, random_state=0, group_radius=1.0, ball_radius=1.0),
    "norm ball of classes": lambda: kh.NormBallClassifier(
        4, random_state=0, group_radius=1.0, ball_radius=1.0
    ),
}
STREAMED = ("regressor", "classifier")


def masked(array):
    """The array with a huge number under a mask at its fifth place."""
    array = np.ma.array(array, copy=True)
    place = np.unravel_index(4, array.shape)
    if array.dtype.kind == "f":
        array[place] = 1e6
    array[place] = np.ma.masked
    return array


def unmasked(array):
    """A masked array in which nothing is masked."""
    return np.ma.array(array, mask=np.zeros(np.shape(array), bool))


@pytest.fixture
def keys(rng):
    return rng.normal(size=(SAMPLES, KEYS, 2))


@pytest.fixture
def table(rng):
    return rng.normal(size=(SAMPLES, 2))


def outputs(name, table):
    """What the named model is fitted to."""
    if "class" in name:
        return (np.arange(SAMPLES) % 2).astype(float)
    return table[:, 0].copy()


@pytest.mark.parametrize("name", MODELS)
def test_a_masked_entry_of_x_is_refused(name, keys, table):
    y = outputs(name, table)
    for X in (
        masked(table),
        masked(keys),
        list(masked(table)),
        list(masked(keys)),
        masked(table).astype(np.float32),
    ):
        with pytest.raises(ValueError, match=r"must have no masked entries.*1 of \d+"):
            MODELS[name]().fit(X, y)
    model = MODELS[name]().fit(table, y)
    with pytest.raises(ValueError, match="`X` must have no masked entries"):
        model.predict(masked(table))


@pytest.mark.parametrize("name", MODELS)
def test_a_masked_entry_of_y_is_refused(name, table):
    y = outputs(name, table)
    for given in (masked(y), masked(y[:, None]), masked(np.where(y > 0, "a", "b"))):
        with pytest.raises(
            ValueError, match=r"`y` must have no masked entries: 1 of 12 is masked.*index \(4"
        ):
            MODELS[name]().fit(table, given)


@pytest.mark.parametrize("name", MODELS)
def test_a_masked_weight_is_refused(name, table):
    with pytest.raises(ValueError, match="`sample_weight` must have no masked entries"):
        MODELS[name]().fit(table, outputs(name, table), masked(np.ones(SAMPLES)))


@pytest.mark.parametrize("name", STREAMED)
def test_a_masked_group_is_refused(name, table):
    with pytest.raises(ValueError, match="`groups` must have no masked entries"):
        MODELS[name]().fit(table, outputs(name, table), groups=masked(np.arange(SAMPLES)))


@pytest.mark.parametrize("name", STREAMED)
def test_batches_with_masked_entries_are_refused(name, table):
    y = outputs(name, table)
    for batch in ((masked(table), y), (table, masked(y)), (table, y, masked(np.ones(SAMPLES)))):
        with pytest.raises(ValueError, match="must have no masked entries"):
            MODELS[name]().fit_batches([batch])


def test_sets_with_masked_entries_are_refused(keys, table):
    ragged = [masked(keys[0]), *keys[1:]]
    for arguments in (
        (masked(keys),),
        (ragged,),
        (keys, masked(table)),
        (keys, table, masked(table)),
    ):
        with pytest.raises(
            ValueError, match=r"`(keys|keys\[0\]|query|extras)` must have no masked entries"
        ):
            kh.SetBatch(*arguments)
    with pytest.raises(ValueError, match="`x` must have no masked entries"):
        kh.SetBatch.from_tokens(masked(keys))
    sets = kh.SetBatch(keys)
    with pytest.raises(ValueError, match="`extras` must have no masked entries"):
        sets.with_extras(masked(table))
    with pytest.raises(ValueError, match="`counts` must have no masked entries"):
        kh.SetGroups(sets, masked(np.ones(SAMPLES, int)))
    with pytest.raises(ValueError, match="`pairs` must have no masked entries"):
        kh.SetBatch(keys, table, pairs=masked(np.array([[0, 0], [0, 1], [1, 1]])))
    with pytest.raises(ValueError, match="`rows` must have no masked entries"):
        sets[masked(np.ones(SAMPLES, bool))]


def test_masked_penalties_and_head_distributions_are_refused(table):
    with pytest.raises(ValueError, match="`alpha` must have no masked entries"):
        kh.AttentionRegressor(4, alpha=masked(np.ones(6))).fit(table, table[:, 0])
    with pytest.raises(ValueError, match="must have no masked entries"):
        kh.AttentionRegressor(4, kh.GaussianHeads(masked(np.eye(3)))).fit(table, table[:, 0])


def test_a_mask_that_hides_nothing_changes_nothing(keys, table):
    y = table[:, 0]
    weights = np.ones(SAMPLES)
    plain = kh.AttentionRegressor(4, random_state=0).fit(
        kh.SetBatch(keys, table, table), y, weights
    )
    sets = kh.SetBatch(unmasked(keys), unmasked(table), unmasked(table))
    model = kh.AttentionRegressor(4, random_state=0).fit(sets, unmasked(y), unmasked(weights))
    assert type(sets.tokens) is np.ndarray
    np.testing.assert_array_equal(model.predict(sets), plain.predict(sets))


def test_masked_tokens_are_missing_tokens(keys):
    """What drop_missing does to NaN it does to what is masked: a token with a masked coordinate is
    dropped.
    """
    padded = masked(keys)
    holes = keys.copy()
    holes[0, 2, 0] = np.nan
    for tokens in (padded, list(padded)):
        found = kh.tokens.drop_missing(tokens)
        assert [len(part) for part in found] == [KEYS - 1] + [KEYS] * (SAMPLES - 1)
        for one, other in zip(found, kh.tokens.drop_missing(holes), strict=True):
            assert type(one) is np.ndarray
            np.testing.assert_array_equal(one, other)
    whole = kh.tokens.drop_missing(np.ma.masked_all((1, 2, 3)))
    np.testing.assert_array_equal(whole[0], np.zeros((1, 3)))
    counts = np.ma.array([[[1], [2]]], mask=[[[True], [False]]])
    np.testing.assert_array_equal(kh.tokens.drop_missing(counts)[0], [[2.0]])
