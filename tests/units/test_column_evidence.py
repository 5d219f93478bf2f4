"""What a column is taken for is decided on all of its rows, whatever stores the table."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

import keyhole as kh
from keyhole.data.columns import ColumnSummary
from keyhole.data.rules import reason_to_leave_out


def as_files(frame, folder):
    """The same table as every kind of source: in memory, whole files, and files of small pieces."""
    table = pa.Table.from_pandas(frame, preserve_index=False)
    frame.to_csv(folder / "t.csv", index=False)
    parquet.write_table(table, folder / "one_group.parquet")
    parquet.write_table(
        table, folder / "small_groups.parquet", row_group_size=max(7, len(frame) // 20)
    )
    feather.write_feather(table, folder / "t.arrow", chunksize=max(5, len(frame) // 20))
    (folder / "parts").mkdir()
    middle = len(frame) // 2
    parquet.write_table(
        table.slice(0, middle),
        folder / "parts" / "a.parquet",
        row_group_size=max(9, len(frame) // 10),
    )
    parquet.write_table(
        table.slice(middle), folder / "parts" / "b.parquet", row_group_size=max(11, len(frame) // 9)
    )
    names = ("t.csv", "one_group.parquet", "small_groups.parquet", "t.arrow", "parts")
    return {"in memory": frame, **{name: folder / name for name in names}}


def long_frame(n_rows, **columns):
    """One row per token, two tokens per set, and a target that is the same in both."""
    owner = np.arange(n_rows) // 2
    return pd.DataFrame(
        {"set": owner, "x": np.sin(np.arange(n_rows)), **columns, "target": owner % 2}
    )


def test_a_text_that_changes_late_is_a_coordinate(tmp_path):
    """Red in the first 1,500 rows and blue after: two categories, wherever the table is stored."""
    frame = long_frame(3000, colour=np.repeat(["red", "blue"], 1500))
    for name, source in as_files(frame, tmp_path).items():
        data = kh.read_table(source)
        assert data.names == ("x", "colour=blue", "colour=red"), name
        assert data.left_out == (), name


def test_many_texts_are_counted_over_small_row_groups(tmp_path):
    """29 texts in 42 rows are a name: also where no row group has 20 rows."""
    frame = long_frame(42, tag=[f"tag {i % 29}" for i in range(42)], z=np.cos(np.arange(42)))
    for name, source in as_files(frame, tmp_path).items():
        data = kh.read_table(source)
        assert data.sets.tokens.shape == (42, 2), name
        assert data.left_out == ("'tag' looks like a name, with 29 different texts",), name


LATE = 2400  # row at which a column of 3,000 rows shows what it is


def late(before, after):
    return np.where(np.arange(3000) < LATE, before, after)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("line", late(np.arange(3000), np.arange(3000) * 7 % 11)),
        ("customer_id", late(np.arange(3000) % 9, 0.5)),
        ("time", late(np.arange(3000), -5)),
        ("year", late(2000 + np.arange(3000) % 7, 3.25)),
        ("fold", late(np.arange(3000) % 5, np.arange(3000) % 40)),
    ],
)
def test_numbers_that_stop_looking_like_something_else_are_coordinates(column, values, tmp_path):
    frame = long_frame(3000, **{column: values})
    for name, source in as_files(frame, tmp_path).items():
        assert kh.read_table(source).names == ("x", column), name


@pytest.mark.parametrize(
    ("column", "values", "reason"),
    [
        ("line", np.arange(3000), "an id, because it counts the rows"),
        ("customer_id", np.arange(3000) % 9, "an id, by its name and whole numbers"),
        (
            "time",
            np.sqrt(np.arange(3000)),
            "a time, by its name and because it rises through the whole table",
        ),
        ("year", 2000 + np.arange(3000) % 7, "a time, by its name and because it holds dates"),
        ("fold", np.arange(3000) % 5, "a split, by its name and few values"),
        ("fold", np.resize(["train", "test"], 3000), "a split, by its name and few values"),
        ("patient_id", [f"p{i // 100}" for i in range(3000)], "an id, by its name"),
        ("shop", ["a"] * 3000, "nothing to learn from, with one text"),
        ("note", [f"text {i}" for i in range(3000)], "a name, with more than 1000 different texts"),
    ],
)
def test_columns_left_out_for_a_reason_that_holds_in_all_rows(column, values, reason, tmp_path):
    frame = long_frame(3000, **{column: values})
    for name, source in as_files(frame, tmp_path).items():
        data = kh.read_table(source)
        assert data.names == ("x",), name
        assert data.left_out == (f"{column!r} looks like {reason}",), name


@pytest.mark.parametrize(
    ("column", "values", "names"),
    [
        ("fold", [f"f{i % 12}" for i in range(60)], [f"fold=f{i}" for i in range(12)]),
        ("day", np.resize(["Monday", "Sunday"], 60), ["day=Monday", "day=Sunday"]),
        ("residence", np.resize(["flat", "house"], 60), ["residence=flat", "residence=house"]),
        ("0", np.resize(["flat", "house"], 60), ["0=flat", "0=house"]),
    ],
)
def test_texts_whose_name_or_number_says_nothing_are_coordinates(column, values, names):
    """Twelve folds are too many for a split, and a weekday is no date."""
    data = kh.read_table(long_frame(60, **{column: values}))
    assert set(data.names) == {"x", *names}
    assert data.left_out == ()


def test_texts_that_look_like_an_id_or_a_split_are_keys_if_they_are_named():
    frame = long_frame(60, split=np.resize(["train", "test"], 60), shop_id=["a", "b", "c"] * 20)
    data = kh.read_table(frame, keys="x,split,shop_id")
    assert data.names == (
        "x", "split=test", "split=train", "shop_id=a", "shop_id=b", "shop_id=c"
    )  # fmt: skip


def test_the_tokens_of_a_joined_table_are_judged_by_all_rows():
    tokens = pd.DataFrame({"set": np.arange(3000) // 2, "colour": np.repeat(["red", "blue"], 1500)})
    samples = pd.DataFrame({"set": np.arange(1500), "target": np.arange(1500) % 2})
    data = kh.read_table(samples, tokens=tokens)
    assert data.names == ("colour=blue", "colour=red")


def test_lists_are_judged_by_all_rows(tmp_path):
    colours = [["red", "red"]] * 1500 + [["blue"]] * 1500
    table = pa.table(
        {"x": [[0.5, 1.5]] * 1500 + [[2.5]] * 1500, "colour": colours, "y": [0.0, 1.0] * 1500}
    )
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    for source in (table, tmp_path / "t.parquet"):
        assert kh.read_table(source).names == ("x", "colour=blue", "colour=red")


def test_the_width_of_tokens_is_found_behind_rows_without_tokens(tmp_path):
    """With missing='drop' the first row groups may hold no token at all."""
    keys = pa.array([[]] * 1500 + [[[1.0, 2.0]]] * 2, type=pa.list_(pa.list_(pa.float64())))
    table = pa.table({"keys": keys, "y": np.arange(1502.0)})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    for source in (table, tmp_path / "t.parquet"):
        parts = kh.data.ParquetSets(source, missing="drop", batch_size=100)
        assert {batch.sets.dim for batch in parts} == {2}


def test_a_column_that_another_file_lacks_is_refused_by_name(tmp_path):
    frame = long_frame(40, z=np.cos(np.arange(40)))
    parquet.write_table(pa.Table.from_pandas(frame), tmp_path / "a.parquet")
    parquet.write_table(pa.Table.from_pandas(frame.drop(columns="z")), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"column 'z' is not in the table b\.parquet"):
        kh.read_table(tmp_path)


def test_a_column_that_is_left_out_may_be_of_another_kind_in_another_file(tmp_path):
    frame = long_frame(40, line=np.arange(40))
    parquet.write_table(pa.Table.from_pandas(frame), tmp_path / "a.parquet")
    parquet.write_table(pa.Table.from_pandas(frame.assign(line="none")), tmp_path / "b.parquet")
    data = kh.read_table(tmp_path)
    assert data.left_out == ("'line' looks like an id, because it counts the rows",)


PARTS = [1, 3, 20, 1000]


@pytest.mark.parametrize("size", PARTS)
def test_evidence_does_not_depend_on_the_pieces(size, rng):
    columns = {
        "line": np.arange(100.0),
        "time": np.sort(rng.normal(size=100)),
        "x_id": rng.integers(0, 5, 100).astype(float),
        "split": rng.integers(0, 2, 100).astype(float),
        "x": rng.normal(size=100),
    }
    for name, values in columns.items():
        values[rng.integers(0, 100, 5)] = np.nan  # missing values say nothing
        whole = ColumnSummary(name, "number")
        whole.add(pa.array(values))
        parts = ColumnSummary(name, "number")
        for start in range(0, len(values), size):
            parts.add(pa.array(values[start : start + size]))
        assert reason_to_leave_out(parts) == reason_to_leave_out(whole)
        assert parts.is_settled == (reason_to_leave_out(whole) == "")
    texts = ColumnSummary("note", "text")
    for start in range(0, 100, size):
        texts.add(pa.array([f"text {i % 40}" for i in range(start, min(100, start + size))]))
    assert reason_to_leave_out(texts) == "a name, with 40 different texts"
