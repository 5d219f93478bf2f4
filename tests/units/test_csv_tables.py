"""CSV files as people write them: other encodings, and numbers that are codes."""

import pytest

from keyhole import read_table
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
