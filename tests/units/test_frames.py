"""From a table in memory to sets: text, dates and gaps; two tables joined; what was learned reads
another table.
"""

import datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import keyhole as kh
from keyhole.data.columns import SchemaError
from keyhole.data.schema import MOST_CATEGORIES, Coding
from keyhole.state import read_model

DAY = datetime.date(2024, 1, 1)


def baskets(n=24, tables=pd.DataFrame):
    """Products in baskets: a price, a colour, a day, whether on offer; the cost of the basket."""
    rng = np.random.default_rng(0)
    basket = np.repeat(np.arange(n), 3)
    days = [DAY + datetime.timedelta(days=int(d)) for d in rng.integers(0, 9, 3 * n)]
    columns = {
        "basket": basket,
        "price": rng.random(3 * n),
        "colour": np.array(["red", "blue", "green"])[np.arange(3 * n) % 3].tolist(),
        "sold": pd.to_datetime(days) if tables is pd.DataFrame else days,
        "offer": (rng.random(3 * n) > 0.5).tolist(),
        "cost": basket * 0.5,
    }
    return tables(columns)


def polars_frame(columns):
    return pytest.importorskip("polars").DataFrame(columns)


@pytest.mark.parametrize(
    "tables", [pd.DataFrame, pa.table, polars_frame], ids=["pandas", "arrow", "polars"]
)
def test_text_dates_and_booleans_become_numbers(tables, tmp_path):
    frame = baskets(tables=tables)
    data = kh.read_table(frame, set_id="basket", keys="price,colour,sold,offer", target="cost")
    assert data.names == ("price", "colour=blue", "colour=green", "colour=red", "sold", "offer")
    assert data.sets.tokens[:3, 1:4].tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert data.sets.tokens[:, 4].min() == 0
    assert set(data.sets.tokens[:, 4]) <= set(range(9))
    assert set(data.sets.tokens[:, 5]) == {0, 1}
    pa.parquet.write_table(
        kh.data.reader.table_of(frame, "source"), tmp_path / "t.parquet", row_group_size=7
    )
    source = kh.data.ParquetSets(
        tmp_path / "t.parquet", set_id="basket", keys=data.columns[1][1], target="cost"
    )
    parts = kh.concatenate([batch.sets for batch in source])
    assert np.array_equal(parts.tokens, data.sets.tokens)
    again = data.schema.read(tmp_path / "t.parquet")
    assert np.array_equal(again.sets.tokens, data.sets.tokens)
    assert again.schema == data.schema


def test_columns_that_nobody_named():
    frame = baskets().assign(name=[f"product {i}" for i in range(72)])
    data = kh.read_table(frame, set_id="basket", target="cost")
    assert data.names == ("price", "colour=blue", "colour=green", "colour=red", "offer")
    words = "; ".join(data.left_out)
    assert "'sold' looks like a time, because it holds dates" in words
    assert "'name' looks like a name, with 72 different texts" in words
    named = kh.read_table(frame, set_id="basket", keys="price,name", target="cost")
    assert named.sets.dim == 1 + 32
    assert set(np.abs(named.sets.tokens[:, 1:]).sum(axis=1)) == {1}


def test_many_categories_are_hashed_the_same_way_everywhere():
    frame = baskets().assign(name=[f"product {i}" for i in range(72)])
    data = kh.read_table(frame, set_id="basket", keys="name", target="cost")
    other = data.schema.read(pd.DataFrame({"basket": [1, 1], "name": ["product 5", "never seen"]}))
    assert np.array_equal(other.sets.tokens[0], data.sets.tokens[5])
    few = frame.assign(name=[f"product {i % MOST_CATEGORIES}" for i in range(72)])
    assert kh.read_table(few, set_id="basket", keys="name").codings[0].kind == "one-hot"


def test_samples_and_tokens_are_joined_by_id():
    tokens = pd.DataFrame(
        {"user": ["b", "a", "b", "z"], "genre": ["x", "y", "y", "x"], "year": [1.0, 2.0, 3.0, 9.0]}
    )
    samples = pd.DataFrame(
        {
            "user": ["a", "b", "a"],
            "year": [5, 6, 7],
            "genre": ["y", "y", "x"],
            "age": [20, 30, 21],
            "liked": [1.0, 2.0, 3.0],
            "note": ["-", "-", "-"],
        }
    )
    data = kh.read_table(
        samples,
        tokens=tokens,
        set_id="user",
        keys="year,genre",
        query="genre,year",
        extras="age",
        target="liked",
    )
    assert data.sets.lengths.tolist() == [1, 2, 1]
    assert data.sets.tokens[:, 0].tolist() == [2, 1, 3, 2]
    assert data.sets.query.tolist() == [[0, 1, 5], [0, 1, 6], [1, 0, 7]]
    assert data.sets.extras[:, 0].tolist() == [20, 30, 21]
    assert (data.names, data.query_names) == (
        ("year", "genre=x", "genre=y"),
        ("genre=x", "genre=y", "year"),
    )
    assert data.sets.pairs == ((0, 1), (1, 2), (2, 0))
    assert data.ids.tolist() == ["a", "b", "a"]
    assert data.left_out[-1] == "1 tokens, whose 'user' no sample has"
    assert "'note' of the samples is neither query nor extra" in data.left_out
    new = data.schema.read(samples.drop(columns=["liked", "note"]).iloc[1:], tokens=tokens)
    assert new.target is None
    assert np.array_equal(new.sets.tokens, data.sets[1:].tokens)
    with pytest.raises(SchemaError, match="every sample must have tokens: 'user' is c in row 1"):
        data.schema.read(samples.assign(user=["a", "c", "b"]), tokens=tokens)
    with pytest.raises(SchemaError, match="must hold the same ids in both tables"):
        data.schema.read(samples.assign(user=[1.5, 2, 3]), tokens=tokens)
    with pytest.raises(SchemaError, match=r"'year' is not in the table\. It has .*`tokens`"):
        kh.read_table(samples[["user", "liked"]], set_id="user", keys="year", target="liked")
    with pytest.raises(
        SchemaError, match="'year' holds numbers among tokens and text among samples"
    ):
        kh.read_table(
            samples.assign(year=["a", "b", "c"]),
            tokens=tokens,
            set_id="user",
            keys="year",
            query="year",
            missing="impute",
        )


def test_gaps_are_refused_dropped_or_filled():
    frame = pd.DataFrame(
        {"set": [1, 1, 2, 2], "x": [1.0, np.nan, 3.0, 5.0], "c": ["u", "v", None, "u"]}
    )
    frame["sold"] = pd.to_datetime(["2024-01-01", None, "2024-01-03", "2024-01-05"])
    frame["y"] = [0.0, 0.0, 1.0, 1.0]
    read = {"keys": "x,c,sold", "target": "y"}
    with pytest.raises(
        SchemaError, match=r"'x' is missing in row 1, 3 such.*missing='impute'.*missing='drop'"
    ):
        kh.read_table(frame, **read)
    with pytest.raises(SchemaError, match=r"'c' is missing in row 2"):
        kh.read_table(frame, keys="c", target="y")
    dropped = kh.read_table(frame, **read, missing="drop")
    assert dropped.sets.tokens.tolist() == [[1, 1, 0, 0], [5, 1, 0, 4]]
    filled = kh.read_table(frame, **read, missing="impute")
    assert filled.names == ("x", "c=", "c=u", "c=v", "sold")
    assert filled.sets.tokens.tolist() == [
        [1, 0, 1, 0, 0],
        [3, 0, 0, 1, 2],
        [3, 1, 0, 0, 2],
        [5, 0, 1, 0, 4],
    ]
    # the means are those of the table that was learned from
    new = filled.schema.read(pd.DataFrame({"set": [9], "x": [None], "c": [""], "sold": [pd.NaT]}))
    assert new.sets.tokens.tolist() == [[3, 1, 0, 0, 2]]
    with pytest.raises(SchemaError, match="target column 'y' must be known in every row: row 2"):
        kh.read_table(frame.assign(y=[0.0, 0.0, None, None]), **read, missing="impute")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.drop(columns="colour"), "column 'colour' is not in the table"),
        (
            lambda t: t.assign(colour=["mauve", *t.colour[1:]]),
            r"row 0 says 'mauve', known are 'blue', 'green', 'red'",
        ),
        (
            lambda t: t.assign(colour=range(len(t))),
            "'colour' must hold text, as it did .* it holds int64",
        ),
        (lambda t: t.assign(price="cheap"), "'price' must hold numbers: it holds"),
        (lambda t: t.assign(sold=1.5), "'sold' must hold dates, as it did .* it holds double"),
        (lambda t: t.assign(price=[None, *t.price[1:]]), "'price' is missing in row 0"),
        (
            lambda t: t.assign(colour=[1.0, "a", *t.colour[2:]]),
            "one kind of thing: 'colour' does not",
        ),
        (
            lambda t: t.set_axis(["basket", "price", "colour", "sold", "price"], axis=1),
            "'price' is there 2 times",
        ),
        (lambda t: {"basket": [1]}, "got dict"),
    ],
)
def test_another_table_is_held_against_what_was_learned(change, words):
    data = kh.read_table(baskets(), set_id="basket", keys="price,colour,sold", target="cost")
    new = baskets(4)[["basket", "price", "colour", "sold", "offer"]]
    assert len(data.schema.read(new)) == 4
    with pytest.raises((ValueError, TypeError), match=words):
        data.schema.read(change(new))


def test_unknown_categories_may_be_ignored():
    data = kh.read_table(baskets(), set_id="basket", keys="price,colour", target="cost")
    new = pd.DataFrame({"basket": [1], "price": [0.5], "colour": ["mauve"]})
    assert data.schema.read(new, unknown="ignore").sets.tokens.tolist() == [[0.5, 0, 0, 0]]


def test_groups_time_and_split():
    frame = baskets().assign(
        shop=lambda t: "shop " + (t.basket % 4).astype(str),
        when=lambda t: t.basket,
        part=lambda t: np.where(t.basket < 20, "train", "test"),
    )
    read = {"set_id": "basket", "keys": "price", "target": "cost"}
    data = kh.read_table(frame, **read, groups="shop", time="when")
    assert data.groups[:5].tolist() == ["shop 0", "shop 1", "shop 2", "shop 3", "shop 0"]
    assert data.test.time.tolist() == [20, 21, 22, 23]  # the newest fifth of 24
    assert len(kh.read_table(frame, **read, split="part").train) == 20
    model = kh.AttentionRegressor(4, random_state=0).fit(data.sets, data.target, groups=data.groups)
    assert len(model.held_out_predictions_) == 24
    with pytest.raises(
        SchemaError, match="'shop' must say train or test, or 0 or 1: row 0 says 'shop 0'"
    ):
        kh.read_table(frame, **read, split="shop")
    with pytest.raises(
        SchemaError, match="'part' must be the same in all rows of a set: row 1 says test"
    ):
        kh.read_table(frame.assign(part=["train", *["test"] * 71]), **read, split="part")


def test_a_schema_is_stored_with_the_model(tmp_path):
    data = kh.read_table(
        baskets(), set_id="basket", keys="price,colour,sold", target="cost", missing="impute"
    )
    model = kh.AttentionRegressor(4, random_state=0).fit(data.sets, data.target)
    kh.save(model, tmp_path / "m", schema=data.schema)
    found = read_model(tmp_path / "m")
    assert found.schema == data.schema
    again = found.schema.read(baskets().iloc[:15])
    assert np.array_equal(found.estimator.predict(again.sets), model.predict(data.sets[:5]))


@pytest.mark.parametrize(
    "stored",
    [
        ["a", "pickle", [], 0.0, None],
        ["a", "one-hot", [], 0.0, None],
        ["a", "one-hot", ["x", "x"], 0.0, None],
        ["a", "one-hot", [str(i) for i in range(99)], 0.0, None],
        ["a", "number", ["x"], 0.0, None],
        ["a", "date", [], "now", None],
        ["a", "date", [], 0.0, float("nan")],
        [7, "date", [], 0.0, None],
        ["a", "date", [], 0.0],
    ],
)
def test_a_coding_that_anybody_may_have_written_is_checked(stored):
    with pytest.raises((ValueError, TypeError)):
        Coding.of_list(stored)


def test_what_is_not_read_may_be_of_any_kind():
    frame = baskets()[["basket", "price", "cost"]].assign(odd=[1, "a", *[2.5] * 70], cost2=0)
    frame = frame.set_axis(["basket", "price", "cost", "odd", 7], axis=1)
    data = kh.read_table(
        pd.concat([frame, frame[["odd"]]], axis=1), set_id="basket", keys="price", target="cost"
    )
    assert data.sets.dim == 1
    data = kh.read_table(frame, set_id="basket", target="cost")
    assert data.names == ("price",)
    assert data.left_out[0] == "'odd' holds several kinds of things"
    with pytest.raises(SchemaError, match="one kind of thing: 'odd' does not"):
        kh.read_table(frame, set_id="basket", keys="price,odd")
    assert kh.read_table(frame, set_id="basket", keys=["price", "7"], target="cost").sets.dim == 2


def test_lists_of_text_name_the_row():
    table = pa.table(
        {"price": [[1.0, 2.0], [3.0]], "colour": [["red", "blue"], ["red"]], "y": [0.0, 1.0]}
    )
    data = kh.read_table(table)
    assert data.sets.tokens.tolist() == [[1, 0, 1], [2, 1, 0], [3, 0, 1]]
    with pytest.raises(SchemaError, match="row 1 says 'mauve'"):
        data.schema.read(
            pa.table({"price": [[1.0, 2.0], [3.0]], "colour": [["red", "blue"], ["mauve"]]})
        )


ODD = st.sampled_from(
    ["x", "colour", "z", "a,b", "", " ", "é", "y", "role", "query", "keys", "[red]", "x=1", "0"]
)
CELLS = {
    "numbers": st.one_of(st.floats(-9, 9), st.none(), st.just(float("inf")), st.integers(-3, 3)),
    "text": st.sampled_from(["red", "blue", "", " ", "mauve", "1", None, "nan"]),
    "dates": st.sampled_from([DAY, DAY + datetime.timedelta(days=3), None]),
    "flags": st.booleans(),
    "mixed": st.sampled_from([1, "a", None, 2.5, DAY, [1.0], b"x"]),
    "many": st.integers(0, 10**6).map(lambda i: f"name {i}"),
    "big": st.sampled_from([2**63 - 1, -(2**62), 2**70, 0]),
    "lists": st.lists(st.floats(-1, 1), max_size=2),
    "vectors": st.just([0.5, 1.0]),
}


@st.composite
def frames(draw, rows=6):
    """A table with an id, and columns of any kind under any names, twice the same perhaps, constant
    in sets perhaps.
    """
    kinds = draw(st.lists(st.sampled_from(list(CELLS)), min_size=1, max_size=4))
    names = draw(
        st.lists(ODD, min_size=len(kinds), max_size=len(kinds), unique=draw(st.integers(0, 4)) > 0)
    )
    cells = [draw(st.lists(CELLS[kind], min_size=rows, max_size=rows)) for kind in kinds]
    cells = [[c[i // 2] for i in range(rows)] if draw(st.booleans()) else c for c in cells]
    columns = [[i // 2 for i in range(rows)], *cells]
    frame = pd.concat([pd.Series(c, dtype=object).infer_objects() for c in columns], axis=1)
    return frame.set_axis(["set", *names], axis=1)


def in_our_words(error):
    """Whether the line that raised is one of keyhole's."""
    place = error.__traceback__
    while place.tb_next is not None:
        place = place.tb_next
    ours = Path(kh.__file__).parent in Path(place.tb_frame.f_code.co_filename).parents
    return ours and isinstance(error, (ValueError, TypeError)) and str(error).rstrip()[-1:] in ".?"


@settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(
    old=frames(), new=frames(), missing=st.sampled_from(["error", "drop", "impute"]), data=st.data()
)
def test_any_table_is_read_or_refused_in_words(old, new, missing, data):
    names = st.sampled_from([str(name) for name in old.columns])
    some = st.one_of(st.none(), st.lists(names, min_size=1, max_size=2, unique=True))
    options = {
        "keys": data.draw(some),
        "query": data.draw(some),
        "extras": data.draw(some),
        "missing": missing,
    }
    options["target"] = data.draw(st.one_of(st.none(), st.just(()), names))
    options |= {name: data.draw(st.one_of(st.none(), names)) for name in ("groups", "time")}
    tokens = data.draw(st.sampled_from([None, old, new]))
    try:
        found = kh.read_table(
            old, tokens=tokens, set_id=data.draw(st.sampled_from([None, "set"])), **options
        )
        assert found.sets.dim == len(found.names) or found.names == ()
        for later in (old, new):
            again = found.schema.read(later, tokens=tokens)
            assert again.names == found.names
            assert np.isfinite(again.sets.tokens).all()
            assert later is new or np.array_equal(again.sets.tokens, found.sets.tokens)
    except Exception as error:
        assert in_our_words(error), repr(error)  # noqa: PT017


def test_columns_of_one_name_are_paired_also_where_they_come_first():
    """A query of fewer columns than the keys says which of theirs it has, so that the two can be
    compared."""
    table = pd.DataFrame(
        {"set": [1, 1, 2], "x": [1.0, 2.0, 3.0], "price": [5.0, 6.0, 7.0], "y": [0.0, 0.0, 1.0]}
    )
    samples = pd.DataFrame({"set": [1, 2], "x": [2.0, 4.0], "y": [0.0, 1.0]})
    data = kh.read_table(samples, tokens=table, keys="x,price", query="x", set_id="set")
    assert data.sets.pairs == ((0, 0),)
    compared = kh.tokens.with_similarity(data.sets, "dot")
    assert compared.tokens[:, 2].tolist() == [2.0, 4.0, 12.0]
    same = kh.read_table(samples, tokens=table, keys="x", query="x", set_id="set")
    assert same.sets.pairs is None


@pytest.mark.parametrize("tables", [pd.DataFrame, polars_frame])
def test_sets_that_are_data_frames_keep_the_order_of_their_columns(tables, rng, tmp_path):
    names = ["width", "height", "depth"]
    arrays = [rng.normal(size=(n_keys, 3)) for n_keys in rng.integers(1, 6, 40)]

    def frames(order):
        return [tables({names[j]: array[:, j] for j in order}) for array in arrays]

    y = np.array([array[:, 0].max() for array in arrays])
    model = kh.AttentionRegressor(16, kh.GaussianHeads(), random_state=0)
    model.fit(frames([0, 1, 2]), y)
    assert model.feature_names_in_.tolist() == names
    expected = kh.AttentionRegressor(16, kh.GaussianHeads(), random_state=0).fit(arrays, y)
    np.testing.assert_array_equal(
        model.predict(frames([0, 1, 2])), expected.predict(kh.SetBatch(arrays))
    )
    kh.save(model, tmp_path / "model")
    for fitted in (model, kh.load(tmp_path / "model")):
        with pytest.raises(ValueError, match=r"same order as they were in fit"):
            fitted.predict(frames([2, 1, 0]))

    # within one list, and after a fit to arrays
    mixed = [*frames([0, 1, 2])[:20], *frames([2, 0, 1])[20:]]
    with pytest.raises(ValueError, match=r"same columns in the same order: set 0 has.*set 20 has"):
        model.fit(mixed, y)
    assert not hasattr(model.fit(arrays, y), "feature_names_in_")
