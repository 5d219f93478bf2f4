"""Dates as ages: days before the sample's own date, `read_table(reference_date=…)`."""

import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import keyhole as kh
from keyhole.data.columns import SchemaError
from keyhole.data.schema import Coding
from keyhole.state import read_model


def dates(*days):
    return pd.to_datetime(list(days))


@pytest.fixture
def purchases():
    """Three tokens of two users; the spare one belongs to no sample."""
    return pd.DataFrame(
        {
            "user": ["a", "b", "b", "z"],
            "bought": dates("2024-02-28", "2024-03-01", "2024-03-10", "2020-01-01"),
            "price": [1.0, 2.0, 3.0, 9.0],
        }
    )


@pytest.fixture
def visits():
    """Samples: user a is there twice, at different dates, with the same token."""
    return pd.DataFrame(
        {
            "user": ["a", "b", "a"],
            "asof": dates("2024-03-01", "2024-03-11", "2024-03-06"),
            "joined": dates("2024-02-20", "2024-03-01", "2024-02-20"),
            "churned": [0, 1, 1],
        }
    )


READ = {"set_id": "user", "target": "churned", "reference_date": "asof"}
AGES = [2.0, 10.0, 1.0, 7.0]  # 2024 has a 29 February


def test_a_date_is_the_days_before_that_of_its_sample(visits, purchases):
    data = kh.read_table(visits, tokens=purchases, keys="price,bought", **READ)
    assert data.names == ("price", "bought (age)")
    assert data.sets.tokens[:, 1].tolist() == AGES
    assert data.codings == (Coding("bought", "age"),)
    assert dict(data.columns)["reference_date"] == "asof"


def test_the_same_with_one_row_per_token_and_with_lists(visits, purchases, tmp_path):
    # the second visit of user a is a set of its own where a row is a token
    rows = pd.DataFrame(
        {
            "set": [0, 1, 1, 2],
            "bought": purchases["bought"].to_numpy()[[0, 1, 2, 0]],
            "asof": visits["asof"].to_numpy()[[0, 1, 1, 2]],
            "churned": [0, 1, 1, 1],
        }
    )
    by_row = kh.read_table(rows, target="churned", reference_date="asof")
    assert by_row.sets.tokens[:, 0].tolist() == AGES
    lists = pa.table(
        {
            "bought": [list(part) for _, part in rows.groupby("set")["bought"]],
            "asof": visits["asof"],
            "churned": visits["churned"],
        }
    )
    by_list = kh.read_table(lists, target="churned", reference_date="asof")
    assert by_list.sets.tokens[:, 0].tolist() == AGES
    # in parts, and from CSV, whose dates are days rather than times
    path = tmp_path / "rows.parquet"
    rows.to_parquet(path, row_group_size=2)
    source = kh.data.ParquetSets(path, target="churned", reference_date="asof")
    assert kh.concatenate([b.sets for b in source]).tokens[:, 0].tolist() == AGES
    rows.to_csv(tmp_path / "rows.csv", index=False)
    text = kh.read_table(tmp_path / "rows.csv", target="churned", reference_date="asof")
    assert text.sets.tokens[:, 0].tolist() == AGES


def test_rows_of_a_set_must_have_one_reference_date(visits):
    rows = pd.DataFrame(
        {"set": [0, 0], "bought": visits["joined"][:2], "asof": visits["asof"][:2], "y": [1, 1]}
    )
    with pytest.raises(SchemaError, match="'asof' must be the same in all rows of a set: row 1"):
        kh.read_table(rows, reference_date="asof")


def test_dates_are_left_out_without_it_and_are_keys_with_it(visits, purchases):
    without = kh.read_table(visits, tokens=purchases, set_id="user", target="churned")
    assert without.names == ("price",)
    words = "; ".join(without.left_out)
    assert "'bought' looks like a time, because it holds dates" in words
    assert "reference_date (--reference-date)" in words
    assert kh.read_table(visits, tokens=purchases, **READ).names == ("bought (age)", "price")
    named = {"set_id": "user", "target": "churned", "keys": "bought"}
    days = kh.read_table(visits, tokens=purchases, **named).sets.tokens[:, 0]
    assert days.tolist() == [1519, 1521, 1530, 1519], "the default counts from the first date"


def test_dates_of_query_and_extras_are_ages_too_but_for_the_reference_itself(visits, purchases):
    visits["bought"] = dates("2024-02-29", "2024-03-11", "2024-03-01")
    data = kh.read_table(
        visits,
        tokens=purchases,
        keys="price,bought",
        query="bought",
        extras="joined,asof",
        **READ,
    )
    assert data.sets.query[:, 0].tolist() == [1, 0, 5]
    assert data.sets.pairs == ((0, 1),)
    assert data.sets.extras.tolist() == [[10, 0], [10, 10], [15, 5]]
    assert data.extra_names == ("joined (age)", "asof")


def test_a_saved_schema_reads_another_table_by_its_own_dates(visits, purchases, tmp_path):
    data = kh.read_table(visits, tokens=purchases, **READ)
    model = kh.AttentionRegressor(4, random_state=0).fit(data.sets, data.target)
    kh.save(model, tmp_path / "m.keyhole", schema=data.schema)
    schema = read_model(tmp_path / "m.keyhole").schema
    assert schema == data.schema
    # ten years later, the same ages
    later = pd.DateOffset(years=8)
    new_visits = visits.assign(asof=visits["asof"] + later).drop(columns="churned")
    new_purchases = purchases.assign(bought=purchases["bought"] + later)
    again = schema.read(new_visits, tokens=new_purchases)
    np.testing.assert_array_equal(again.sets.tokens, data.sets.tokens)
    with pytest.raises(SchemaError, match=r"`reference_date` must name .*'asof' is not in"):
        schema.read(new_visits.drop(columns="asof"), tokens=new_purchases)
    # under another name in the new table
    renamed = new_visits.rename(columns={"asof": "when"})
    source = kh.data.ParquetSets(
        renamed, tokens=new_purchases, schema=schema, reference_date="when"
    )
    np.testing.assert_array_equal(source.whole().sets.tokens, data.sets.tokens)


def test_a_schema_that_counts_from_the_first_date_takes_no_reference(visits, purchases):
    data = kh.read_table(visits, tokens=purchases, set_id="user", target="churned", keys="bought")
    with pytest.raises(SchemaError, match="learned without `reference_date`"):
        kh.data.ParquetSets(visits, tokens=purchases, schema=data.schema, reference_date="asof")


def test_times_of_day_and_time_zones_count(visits, purchases):
    in_berlin = visits.assign(asof=visits["asof"].dt.tz_localize("Europe/Berlin"))
    in_utc = purchases.assign(bought=purchases["bought"].dt.tz_localize("UTC"))
    data = kh.read_table(in_berlin, tokens=in_utc, keys="bought", **READ)
    np.testing.assert_allclose(data.sets.tokens[:, 0], np.array(AGES) - 1 / 24)
    with pytest.raises(
        SchemaError, match=r"'asof' has one \(Europe/Berlin\) and 'bought' has none.*tz_localize"
    ):
        kh.read_table(in_berlin, tokens=purchases, keys="bought", **READ)
    with pytest.raises(SchemaError, match=r"'asof' has none and 'bought' has one \(UTC\)"):
        kh.read_table(visits, tokens=in_utc, keys="bought", **READ)


def test_dates_after_the_reference_have_a_negative_age_and_that_is_said(visits, purchases):
    purchases.loc[1, "bought"] += pd.Timedelta(days=12)
    words = r"'bought' lie after .*'asof' \(row 1 .*1 of 4 entries .*negative\. Drop"
    with pytest.warns(UserWarning, match=words):
        data = kh.read_table(visits, tokens=purchases, keys="bought", **READ)
    assert data.sets.tokens[:, 0].tolist() == [2.0, -2.0, 1.0, 7.0]


def test_parts_of_a_table_warn_once(tmp_path):
    days = dates(*["2024-03-02"] * 6)
    frame = pd.DataFrame({"set": range(6), "bought": days, "asof": days, "y": range(6)})
    frame["bought"] += pd.to_timedelta([1, -1, 1, -1, 1, 1], unit="D")
    frame.to_parquet(tmp_path / "t.parquet", row_group_size=2)
    source = kh.data.ParquetSets(tmp_path / "t.parquet", reference_date="asof")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert len(list(source)) == 3
    assert len(said) == 1
    assert "'bought' lie after" in str(said[0].message)


def test_no_warning_where_all_dates_come_before(visits, purchases):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kh.read_table(visits, tokens=purchases, keys="bought", **READ)


@pytest.mark.parametrize("missing", ["error", "drop", "impute"])
def test_a_sample_without_a_date_is_refused(missing, visits, purchases):
    visits.loc[1, "asof"] = pd.NaT
    with pytest.raises(
        SchemaError, match="reference dates must be known: 'asof' is missing in row"
    ):
        kh.read_table(visits, tokens=purchases, keys="bought", missing=missing, **READ)


def test_a_token_without_a_date_is_refused_dropped_or_of_the_mean_age(visits, purchases):
    purchases.loc[1, "bought"] = pd.NaT
    options = {"tokens": purchases, "keys": "bought", **READ}
    with pytest.raises(SchemaError, match="tokens must be known: 'bought' is missing in row 1"):
        kh.read_table(visits, **options)
    dropped = kh.read_table(visits, missing="drop", **options)
    assert dropped.sets.tokens[:, 0].tolist() == [2.0, 1.0, 7.0]
    # the mean over the tokens that samples have: 2, 1 and 7
    imputed = kh.read_table(visits, missing="impute", **options)
    assert imputed.sets.tokens[:, 0].tolist() == [2.0, 10 / 3, 1.0, 7.0]
    assert imputed.codings == (Coding("bought", "age", fill=10 / 3),)
    # the same in one table, row by row and in lists
    rows = pd.DataFrame(
        {
            "set": [0, 1, 1, 2],
            "bought": purchases["bought"].to_numpy()[[0, 1, 2, 0]],
            "asof": visits["asof"].to_numpy()[[0, 1, 1, 2]],
            "y": [0, 1, 1, 1],
        }
    )
    by_row = kh.read_table(rows, missing="impute", reference_date="asof")
    assert by_row.sets.tokens[:, 0].tolist() == [2.0, 10 / 3, 1.0, 7.0]
    bought = [
        [None if pd.isna(d) else d for d in part] for _, part in rows.groupby("set")["bought"]
    ]
    lists = pa.table({"bought": bought, "asof": visits["asof"], "y": [0, 1, 1]})
    by_list = kh.read_table(lists, missing="impute", reference_date="asof")
    assert by_list.sets.tokens[:, 0].tolist() == [2.0, 10 / 3, 1.0, 7.0]


def test_durations_are_seconds_and_say_so(visits, purchases):
    purchases["took"] = pd.to_timedelta([1, 2, 3, 4], unit="D")
    data = kh.read_table(visits, tokens=purchases, keys="bought,took", **READ)
    assert data.names == ("bought (age)", "took (s)")
    assert data.sets.tokens[:, 1].tolist() == [86400, 172800, 259200, 86400]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v, p: (v.assign(asof=[1, 2, 3]), p), "'asof' must hold dates: it holds int64"),
        (lambda v, p: (v.assign(asof=["x", "y", "z"]), p), "'asof' must hold dates: it holds"),
        (lambda v, p: (v, p.drop(columns="bought")), "no column .* holds dates"),
        (lambda v, p: (v.drop(columns="asof"), p), "`reference_date` must name .*'asof' is not"),
    ],
)
def test_what_is_no_reference_date_is_refused(change, words, visits, purchases):
    samples, tokens = change(visits, purchases)
    with pytest.raises(SchemaError, match=words):
        kh.read_table(samples, tokens=tokens, **READ)
