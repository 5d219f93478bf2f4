"""CSV files as people write them: other encodings, and numbers that are codes."""

import pickle

import pytest

from keyhole import read_table
from keyhole.data import ParquetSets
from keyhole.data.reader import table_in_memory

ROWS = "set,city,x,y\na,Bonn,1,5\na,Köln,2,5\nb,Bonn,3,7\n"


@pytest.mark.parametrize("target", ["y", "city"])
def test_cells_that_are_not_utf_8_are_named(target, tmp_path):
    (tmp_path / "t.csv").write_text(ROWS, encoding="latin-1")
    message = (
        r"^a CSV file must be in UTF-8: column 'city' of 't\.csv' is not, row 1 holds "
        r"b'K\\xf6ln'\. Save the file as UTF-8\.$"
    )
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / "t.csv", target=target)
    with pytest.raises(ValueError, match=message):
        table_in_memory((tmp_path / "t.csv").read_bytes(), "t.csv")


def test_names_of_columns_that_are_not_utf_8_are_named(tmp_path):
    (tmp_path / "t.csv").write_text("set,größe,y\na,1,2\n", encoding="latin-1")
    message = (
        r"^a CSV file must be in UTF-8: the name b'gr\\xf6\\xdfe' of a column in the first line "
        r"of 't\.csv' is not\. Save the file as UTF-8\.$"
    )
    with pytest.raises(ValueError, match=message):
        read_table(tmp_path / "t.csv")
    with pytest.raises(ValueError, match=message):
        table_in_memory((tmp_path / "t.csv").read_bytes(), "t.csv")


def test_the_message_about_a_file_that_does_not_read_is_said_once(tmp_path):
    (tmp_path / "t.csv").write_text("set,x,y\na,1\n")
    with pytest.raises(ValueError, match=r"^'t\.csv' must be a table") as refusal:
        read_table(tmp_path / "t.csv")
    assert str(refusal.value).count("must be a table") == 1


def test_utf_8_with_a_mark_at_its_beginning_is_read(tmp_path):
    """Excel writes such a mark."""
    (tmp_path / "t.csv").write_text(ROWS, encoding="utf-8-sig")
    assert read_table(tmp_path / "t.csv").names == ("city=Bonn", "city=Köln", "x")


def codes(table, folder, name="t.csv"):
    (folder / name).write_text(table)
    return folder / name


SHOPS = "set,zip,x,y\n007,01234,0,1\n007,01234,2,1\n7,94110,3,1\n008,,0.5,2\n"


def test_whole_numbers_with_a_leading_zero_are_text(tmp_path):
    """007 and 7 are two sets, and a postcode is no number; 0 and 0.5 are numbers."""
    path = codes(SHOPS, tmp_path)
    data = read_table(path, target="y", keys="zip,x", missing="impute")
    assert data.ids.tolist() == ["007", "7", "008"]
    assert data.names == ("zip=", "zip=01234", "zip=94110", "x")
    assert data.sets.tokens[:, 3].tolist() == [0, 2, 3, 0.5]
    in_memory = table_in_memory(path.read_bytes(), "t.csv")
    assert in_memory["zip"].to_pylist() == ["01234", "01234", "94110", ""]
    assert in_memory["x"].to_pylist() == [0, 2, 3, 0.5]


@pytest.mark.parametrize(
    ("cells", "is_text"),
    [
        (["7", "0", "10"], False),
        (["7", "0.5", "00.5"], False),
        (["7", "2024-01-01", "07:30"], True),  # times of day are text, with or without zeros
        (["7", "07"], True),
        (["7", "00"], True),
        (["7", " 07 "], True),
        (["7", '"07"'], True),
        (["7", ""], False),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_what_a_leading_zero_is(cells, is_text, suffix, tmp_path):
    delimiter = {"csv": ",", "tsv": "\t"}[suffix]
    lines = [f"{cell}{delimiter}1" for cell in cells]
    for line_end in ("\n", "\r\n"):
        content = line_end.join([f"code{delimiter}y", *lines]).encode()
        kind = table_in_memory(content, f"t.{suffix}").schema.field("code").type
        assert (str(kind) == "string") == is_text


def test_a_column_of_codes_is_text_in_all_files(tmp_path):
    """One file has no leading zero; its column is text where that of another is."""
    first = codes("set,x,y\n098,1,1\n099,2,1\n", tmp_path, "a.csv")
    second = codes("set,x,y\n100,1,2\n101,2,2\n", tmp_path, "b.csv")
    for files in ([first, second], [second, first]):
        source = pickle.loads(pickle.dumps(ParquetSets(files, target="y")))
        assert sorted(source.whole().ids) == ["098", "099", "100", "101"]

    # ids of samples and tokens
    samples = codes("set,y\n100,1\n101,2\n", tmp_path, "samples.csv")
    tokens = codes("set,x\n099,1\n100,2\n101,3\n", tmp_path, "tokens.csv")
    data = read_table(samples, tokens=tokens, target="y")
    assert (data.ids.tolist(), data.sets.tokens.tolist()) == (["100", "101"], [[2], [3]])
    samples = codes("set,y\n100,1\n099,2\n", tmp_path, "samples.csv")
    tokens = codes("set,x\n100,2\n101,3\n099,4\n", tmp_path, "tokens.csv")
    data = read_table(samples, tokens=tokens, target="y")
    assert (data.ids.tolist(), data.sets.tokens.tolist()) == (["100", "099"], [[2], [4]])


def test_a_schema_says_whether_a_column_is_text(tmp_path):
    """Rows to predict for may have no leading zero, or the only one."""
    data = read_table(codes(SHOPS, tmp_path), target="y", keys="zip,x", missing="impute")
    without_zero = codes("set,zip,x\n9,94110,02\n", tmp_path, "new.csv")
    assert data.schema.read(without_zero).sets.tokens.tolist() == [[0, 0, 1, 2]]


def test_weights_times_and_splits_are_no_codes(tmp_path):
    table = "set,x,hour,part,w,y\na,1,0930,00,01,1\nb,2,1015,01,02,1\n"
    data = read_table(
        codes(table, tmp_path), target="y", keys="x", time="hour", split="part", weight="w"
    )
    assert data.time.tolist() == [930, 1015]
    assert data.split.tolist() == [0, 1]
    assert data.weights.tolist() == [1, 2]
