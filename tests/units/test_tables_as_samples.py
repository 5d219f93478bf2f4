"""Tables given to an estimator: one row is one sample, whatever the library; what is no table of
numbers is told so.
"""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import keyhole as kh

COLUMNS = ("width", "height", "weight")


@pytest.fixture
def numbers(rng):
    return rng.normal(size=(30, 3))


@pytest.fixture
def y(numbers, rng):
    return numbers[:, 0] + 0.1 * rng.normal(size=30)


def polars_table(columns):
    return pytest.importorskip("polars").DataFrame(columns)


TABLES = {"pandas": pd.DataFrame, "polars": polars_table, "arrow": pa.table}


def columns_of(numbers):
    return {name: numbers[:, j] for j, name in enumerate(COLUMNS)}


@pytest.mark.parametrize("library", TABLES)
def test_a_table_of_numbers_is_one_key_per_row(library, numbers, y):
    table = TABLES[library](columns_of(numbers))
    model = kh.AttentionRegressor(8, random_state=0).fit(table, y)
    expected = kh.AttentionRegressor(8, random_state=0).fit(numbers, y).predict(numbers)
    np.testing.assert_array_equal(model.predict(table), expected)
    ball = kh.NormBallRegressor(8, group_radius=1.0, ball_radius=1.0, random_state=0).fit(table, y)
    assert ball.predict(table).shape == (30,)
    assert kh.AttentionFeatures(4, random_state=0).fit_transform(table).shape == (30, 16)


@pytest.mark.parametrize("library", TABLES)
def test_a_column_of_text_is_named_with_the_way_to_read_it(library, numbers, y):
    table = TABLES[library]({**columns_of(numbers), "colour": ["red"] * 29 + ["blue"]})
    for model in (kh.AttentionRegressor(8), kh.NormBallRegressor(8), kh.AttentionFeatures(8)):
        with pytest.raises(
            ValueError, match=r"`X` must hold numbers: column 'colour' holds 'red'.*kh\.read_table"
        ):
            model.fit(table, y)


@pytest.mark.parametrize("library", TABLES)
def test_a_missing_number_of_a_table_is_refused(library, numbers, y):
    holes = columns_of(numbers)
    holes["height"] = [None, *holes["height"][1:]]
    with pytest.raises(ValueError, match=r"NaN|missing"):
        kh.AttentionRegressor(8).fit(TABLES[library](holes), y)


def test_a_lazy_table_is_collected_by_its_owner(numbers, y):
    lazy = polars_table(columns_of(numbers)).lazy()
    with pytest.raises(TypeError, match=r"`X` must be a table in memory: got LazyFrame.*collect"):
        kh.AttentionRegressor(8).fit(lazy, y)


@pytest.mark.parametrize("library", TABLES)
def test_a_table_is_no_batch_of_sets(library, numbers):
    table = TABLES[library](columns_of(numbers))
    for made in (kh.SetBatch, kh.SetBatch.from_tokens):
        with pytest.raises(
            TypeError, match=r"must be an array or a sequence of arrays: got a table.*read_table"
        ):
            made(table)


def test_columns_and_records_are_told_how_to_become_a_table(numbers, y):
    columns = columns_of(numbers)
    records = [dict(zip(COLUMNS, row, strict=True)) for row in numbers.tolist()]
    for wrong in (columns, records):
        with pytest.raises(TypeError, match=r"`X` must be sets, or a table of numbers: got .*dict"):
            kh.AttentionRegressor(8).fit(wrong, y)
    with pytest.raises(TypeError, match=r"`keys` must be .*: got dict"):
        kh.SetBatch(columns)
    fields = np.zeros(30, dtype=[("width", float), ("height", float)])
    with pytest.raises(
        TypeError, match="`X` must be sets, or a table of numbers: got an array of fields width, h"
    ):
        kh.AttentionRegressor(8).fit(fields, y)


def test_a_series_of_sets_is_taken_in_its_order_and_not_by_its_labels(rng):
    keys = [rng.normal(size=(3, 2)) for _ in range(10)]
    order = rng.permutation(10)
    series = pd.Series(keys)[order]
    np.testing.assert_array_equal(
        kh.SetBatch(series).tokens, kh.SetBatch([keys[i] for i in order]).tokens
    )
    tokens = kh.SetBatch.from_tokens(series)
    np.testing.assert_array_equal(tokens.query, np.stack([keys[i][0] for i in order]))
    model = kh.AttentionRegressor(4, random_state=0).fit(series, np.arange(10.0))
    batch = kh.SetBatch([keys[i] for i in order])
    np.testing.assert_array_equal(model.predict(series), model.predict(batch))
    for change in (kh.tokens.drop_missing, lambda sets: kh.tokens.with_ages(sets, 2)):
        np.testing.assert_array_equal(change(series)[0], change([keys[order[0]]])[0])
    windows = kh.tokens.windows(series, width=2, split=False)
    np.testing.assert_array_equal(
        windows[0], kh.tokens.windows([keys[order[0]]], width=2, split=False)[0]
    )


MISSING = {"None": None, "NaN": np.nan, "pandas' NA": pd.NA, "NaT": pd.NaT}


@pytest.mark.parametrize("name", MISSING)
def test_a_sample_without_a_group_is_named(name, numbers, y):
    groups = np.array(["a"] * 10 + ["b"] * 20, dtype=object)
    groups[[4, 7]] = MISSING[name]
    with pytest.raises(
        ValueError,
        match=r"`groups` must name the group of every sample: sample 4 has .* \(2 in all\)",
    ):
        kh.AttentionRegressor(8).fit(numbers, y, groups=groups)


def test_groups_that_cannot_be_sorted_are_refused_and_numbers_that_are_missing_too(numbers, y):
    mixed = np.array(["a"] * 10 + [3] * 20, dtype=object)
    with pytest.raises(
        ValueError, match=r"labels of `groups` must be of one kind: got int and str"
    ):
        kh.AttentionRegressor(8).fit(numbers, y, groups=mixed)
    with pytest.raises(
        ValueError, match=r"`groups` must name the group of every sample: sample 2 has nan"
    ):
        kh.AttentionRegressor(8).fit(
            numbers, y, groups=np.where(np.arange(30) == 2, np.nan, np.arange(30) // 5)
        )


@pytest.mark.parametrize("kind", [kh.AttentionClassifier, kh.NormBallClassifier])
def test_labels_that_are_missing_or_cannot_be_sorted_are_refused(kind, numbers):
    mixed = np.array(["a"] * 10 + [3] * 20, dtype=object)
    with pytest.raises(ValueError, match=r"labels of `y` must be of one kind: got int and str"):
        kind(8).fit(numbers, mixed)
    mixed[10:] = None
    with pytest.raises(
        ValueError,
        match=r"`y` must name the class of every sample: sample 10 has None \(20 in all\)",
    ):
        kind(8).fit(numbers, mixed)
