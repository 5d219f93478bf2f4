"""Parquet and Arrow files as batches of sets: every layout of lists, parts, errors that name the
column.
"""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import keyhole as kh
from keyhole.data.batches import Batch, as_batch
from keyhole.data.columns import Place, SchemaError, numbers
from keyhole.data.reader import ParquetSets, read_table
from keyhole.data.sets import concatenate
from keyhole.data.writer import write_parquet


@pytest.fixture
def sets(rng):
    keys = [rng.normal(size=(rng.integers(1, 6), 3)) for _ in range(50)]
    return kh.SetBatch(keys, rng.normal(size=(50, 3)))


@pytest.fixture
def path(sets, tmp_path):
    write_parquet(tmp_path / "sets.parquet", [(sets, sets.query[:, 0])], row_group_size=20)
    return tmp_path / "sets.parquet"


def equal(a, b):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_array_equal(a.offsets, b.offsets)
    assert (a.query is None) == (b.query is None)
    if a.query is not None:
        np.testing.assert_array_equal(a.query, b.query)


def whole(source):
    parts = list(source)
    y = None if parts[0].y is None else np.concatenate([b.y for b in parts])
    return concatenate([b.sets for b in parts]), y


def rewrite(path, **columns):
    table = pq.read_table(path)
    for name, column in columns.items():
        table = table.set_column(table.schema.names.index(name), name, column)
    pq.write_table(table, path, row_group_size=20)
    return path


@pytest.mark.parametrize("batch_size", [None, 1, 7, 1000])
def test_what_is_written_is_read(sets, path, batch_size):
    source = ParquetSets(path, batch_size=batch_size)
    for _ in range(2):  # as often as one likes
        got, y = whole(source)
        equal(got, sets)
        np.testing.assert_array_equal(y, sets.query[:, 0])
    assert (source.n_rows, source.n_groups) == (50, 3)
    assert max(len(b.sets) for b in source) <= min(batch_size or 20, 20)


def test_reading_ahead_changes_nothing(sets, path, monkeypatch):
    monkeypatch.setattr("keyhole.data.reader.thread_count", lambda: 2)
    source = ParquetSets(path, batch_size=6)
    for left, right in zip(
        source, source, strict=True
    ):  # two readers of one file, each in a thread
        equal(left.sets, right.sets)
    equal(whole(source)[0], sets)
    first = iter(source)
    next(first)
    first.close()  # a reader that is left early does not hang
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match="does not read"):  # nor does it swallow what goes wrong
        list(pickle.loads(pickle.dumps(source)))


LAYOUTS = {
    "list of lists": pa.list_(pa.list_(pa.float64())),
    "large list of lists": pa.large_list(pa.large_list(pa.float64())),
    "list of fixed lists": pa.list_(pa.list_(pa.float64(), 3)),
    "integers": pa.list_(pa.list_(pa.int64())),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_lists_is_read(sets, path, layout):
    rows = [sets[i].tokens.round().tolist() for i in range(50)]
    query = pa.array(sets.query.tolist(), pa.list_(pa.float64()))
    rewrite(path, keys=pa.array(rows, LAYOUTS[layout]), query=query)
    got, _ = whole(ParquetSets(path, batch_size=9))
    equal(got, kh.SetBatch([np.array(r, dtype=float) for r in rows], sets.query))


def test_flat_lists_need_their_dimension(sets, path):
    rewrite(path, keys=pa.array([sets[i].tokens.ravel().tolist() for i in range(50)]))
    got, _ = whole(ParquetSets(path, dim=3))
    equal(got, sets)
    with pytest.raises(
        SchemaError,
        match=r"'keys' must hold sets of keys: found type list<.*double> in sets.parquet.*--dim",
    ):
        whole(ParquetSets(path))
    with pytest.raises(SchemaError, match="whole keys of `dim` = 2 coordinates: row"):
        whole(ParquetSets(path, dim=2))


def test_fixed_shapes_are_read(rng, tmp_path):
    keys = rng.normal(size=(10, 4, 3))
    flat = pa.FixedSizeListArray.from_arrays(pa.array(keys.ravel()), 12)
    nested = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(keys.ravel()), 3), 4
    )
    for name, column, dim in (("flat", flat, 3), ("nested", nested, None)):
        pq.write_table(pa.table({"keys": column}), tmp_path / f"{name}.parquet")
        got, y = whole(ParquetSets(tmp_path / f"{name}.parquet", dim=dim))
        equal(got, kh.SetBatch(keys))
        assert y is None


def test_float32_and_words_and_several_targets(sets, tmp_path):
    small = sets.astype("float32")
    words = np.where(sets.query[:, 0] > 0, "up", "down")
    extra = {"label": words, "a": sets.query[:, 0], "b": sets.query[:, 1], "w": np.arange(50.0)}
    write_parquet(tmp_path / "s.parquet", [small[:30], small[30:]], extra=extra)
    source = ParquetSets(tmp_path / "s.parquet", target="label", weight="w")
    got, labels = whole(source)
    assert got.dtype == np.float32
    assert (labels == words).all()
    assert source.labels().tolist() == ["down", "up"]
    assert next(iter(source)).weights[3] == 3.0
    _, both = whole(ParquetSets(tmp_path / "s.parquet", target=["a", "b"]))
    np.testing.assert_array_equal(both, sets.query[:, :2])


def test_arrow_files_are_views(sets, path, tmp_path):
    table = pq.read_table(path)
    with (
        pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=20)
    source = ParquetSets(tmp_path / "s.arrow", batch_size=8)
    got, _ = whole(source)
    equal(got, sets)
    before = pa.total_allocated_bytes()
    batch = next(iter(source))
    assert len(batch.sets) == 8
    assert pa.total_allocated_bytes() == before  # memory-mapped, not read


def test_parts_travel_and_resume(sets, path, tmp_path):
    source = ParquetSets(path)
    parts = pickle.loads(pickle.dumps(source.parts()))
    assert [p.n_rows for p in parts] == [20, 20, 10]
    equal(concatenate([whole(p)[0] for p in parts]), sets)
    equal(whole(ParquetSets(path, start=1))[0], sets[20:])
    equal(whole(ParquetSets(path, start=1, stop=2))[0], sets[20:40])
    assert sorted(p.n_groups for p in source.parts(2)) == [1, 2]
    equal(whole(source[1:][:1])[0], sets[20:40])
    with pytest.raises(ValueError, match="in order"):
        source[::2]
    write_parquet(tmp_path / "tail.parquet", [(sets[:5], np.zeros(5))])
    both = ParquetSets([path, tmp_path / "tail.parquet"])
    assert (both.n_rows, both.n_groups) == (55, 4)
    assert ParquetSets(tmp_path).n_rows == 55
    assert "and 1 more" in repr(both)


def test_errors_name_column_type_and_remedy(sets, path, tmp_path):
    with pytest.raises(
        SchemaError, match=r"'bags' is not in the table sets.parquet. It has 'keys', 'query', 'y'"
    ):
        ParquetSets(path, keys="bags")
    with pytest.raises(SchemaError, match="'y' must hold sets of keys: found type double"):
        whole(ParquetSets(path, keys="y"))
    assert whole(ParquetSets(path, query="y", target=()))[0].query_dim == 1, (
        "queries may be of another dimension"
    )
    rewrite(path, y=pa.array([None, *range(49)]))
    with pytest.raises(
        SchemaError,
        match=r"'y' must be known in every row: row 0 of row group 0 of sets\.parquet is empty",
    ):
        whole(ParquetSets(path))
    rewrite(path, keys=pa.array([[[1.0, 2.0, np.nan]]] * 50))
    with pytest.raises(
        SchemaError, match=r"'keys\[2\]' is missing in row 0 of row group 0 of sets\.parquet"
    ):
        whole(ParquetSets(path, target=()))
    rewrite(path, keys=pa.array([[[1.0, 2.0, 3.0]]] * 49 + [[]]))
    with pytest.raises(SchemaError, match=r"row 9 of row group 2 of sets\.parquet has none"):
        whole(ParquetSets(path, target=()))
    rewrite(path, keys=pa.array([[[1.0, 2.0, 3.0], [1.0]]] * 50))
    with pytest.raises(
        SchemaError, match=r"token 1 of row 0 of row group 0 of sets\.parquet has 1"
    ):
        whole(ParquetSets(path, target=()))
    rewrite(path, keys=pa.array([[["a"]]] * 50))
    with pytest.raises(
        SchemaError, match="must hold lists of numbers: it holds lists of string in row group 0"
    ):
        whole(ParquetSets(path, target=()))
    (tmp_path / "no.parquet").write_text("a,b\n1,2")
    with pytest.raises(
        SchemaError, match="must be a Parquet file or an Arrow file: it begins with"
    ):
        ParquetSets(tmp_path / "no.parquet")
    with pytest.raises(FileNotFoundError):
        ParquetSets(tmp_path / "nowhere.parquet")


def test_a_file_that_cannot_be_finished_does_not_appear(sets, tmp_path):
    def broken():
        yield sets
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_parquet(tmp_path / "s.parquet", broken())
    with pytest.raises(ValueError, match="at least one batch"):
        write_parquet(tmp_path / "s.parquet", [])
    assert list(tmp_path.iterdir()) == []


def test_batches_are_tuples():
    assert as_batch("sets") == Batch("sets")
    assert as_batch(("sets", "y", "w")) == Batch("sets", "y", "w")
    with pytest.raises(ValueError, match="a tuple of 4"):
        as_batch((1, 2, 3, 4))


def write_arrow(path, table, rows=20):
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def test_offsets_that_lead_out_of_a_file_are_refused(sets, path, tmp_path):
    """Two flipped bits were sets of −899996 keys, or a segmentation fault."""
    write_arrow(tmp_path / "s.arrow", pq.read_table(path))
    content = (tmp_path / "s.arrow").read_bytes()
    offsets = sets.offsets[:21].astype(np.int64).tobytes()
    assert content.count(offsets) == 1
    for wrong in (2**40, -5):
        broken = sets.offsets[:21].astype(np.int64)
        broken[7] = wrong
        (tmp_path / "s.arrow").write_bytes(content.replace(offsets, broken.tobytes()))
        with pytest.raises(ValueError, match=r"'s\.arrow' must be a table .*damaged"):
            list(ParquetSets(tmp_path / "s.arrow"))


def test_errors_of_arrow_itself_name_the_file(sets, path, tmp_path):
    (tmp_path / "cut.parquet").write_bytes(path.read_bytes()[:-30])
    (tmp_path / "cut.arrow").write_bytes(b"ARROW1\0\0" + b"nothing")
    for name in ("cut.parquet", "cut.arrow"):
        with pytest.raises(ValueError, match=f"'{name}' must be a table .*fetch or write it again"):
            ParquetSets(tmp_path / name)
    schema = pa.schema([(b"caf\xe9", pa.float64()), ("keys", pa.list_(pa.list_(pa.float64())))])
    write_arrow(tmp_path / "latin.arrow", pa.table([[1.0], [[[1.0]]]], schema=schema))
    with pytest.raises(ValueError, match=r"'latin\.arrow' must be .*utf-8"):
        ParquetSets(tmp_path / "latin.arrow")


def test_columns_that_are_there_twice_are_refused(path):
    table = pq.read_table(path)
    for name in ("keys", "query", "y"):
        pq.write_table(table.append_column(name, table[name]), path)
        with pytest.raises(
            SchemaError, match=f"column '{name}' is there 2 times in sets.parquet.*Rename"
        ):
            ParquetSets(path)
    pq.write_table(table.append_column("note", table["y"]).append_column("note", table["y"]), path)
    assert ParquetSets(path).n_rows == 50  # what is not read does not matter


def test_every_file_of_a_folder_has_the_columns(path, tmp_path):
    pq.write_table(pq.read_table(path).drop_columns(["y"]), tmp_path / "tail.parquet")
    with pytest.raises(SchemaError, match=r"'y' is not in the table tail\.parquet"):
        ParquetSets(tmp_path)


def test_keys_without_coordinates_are_refused(tmp_path):
    for kind in (pa.list_(pa.list_(pa.float64(), 0)), pa.list_(pa.list_(pa.float64()))):
        write_arrow(tmp_path / "s.arrow", pa.table({"keys": pa.array([[[]], [[], []]], kind)}))
        with pytest.raises(SchemaError, match="'keys' must have as many coordinates, at least one"):
            list(ParquetSets(tmp_path / "s.arrow"))


def test_numbers_that_begin_at_any_byte(rng):
    values = rng.normal(size=5)
    column = pa.Array.from_buffers(
        pa.float64(), 5, [None, pa.py_buffer(b"x" + values.tobytes()).slice(1)]
    )
    found = numbers(column, "a", Place())
    np.testing.assert_array_equal(found, values)
    assert found.flags.aligned  # compiled loops count on it


def test_long_names(sets, tmp_path):
    write_parquet(tmp_path / ("ü" * 120 + ".parquet"), [sets])
    assert ParquetSets(tmp_path).n_rows == 50


def tokens_of(rng, n=15):
    sizes = rng.integers(1, 6, n)
    ids = np.repeat([f"s{i}" for i in range(n)], sizes)
    y = np.repeat(np.arange(n) * 1.0, sizes)
    return pa.table(
        {"set": ids, "x": rng.normal(size=len(ids)), "z": rng.normal(size=len(ids)), "y": y}
    )


@pytest.mark.parametrize("rows", [1, 2, 7, 1000])
def test_tokens_in_parts_are_the_whole(rows, rng, tmp_path):
    """A set belongs to the row group in which it begins, and may go on through the next ones."""
    table = tokens_of(rng)
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=rows)
    write_arrow(tmp_path / "t.arrow", table, rows)
    for name in ("t.parquet", "t.arrow"):
        data = read_table(tmp_path / name)
        source = ParquetSets(tmp_path / name, batch_size=3)
        got, y = whole(source)
        equal(got, data.sets)
        np.testing.assert_array_equal(y, np.arange(15.0))
        assert data.ids.tolist() == [f"s{i}" for i in range(15)]
        assert source.n_rows == 15
        parts = pickle.loads(pickle.dumps(source.parts(4)))
        equal(concatenate([whole(part)[0] for part in parts]), data.sets)
        np.testing.assert_array_equal(source.labels(), np.arange(15.0))


def test_rows_of_a_set_follow_each_other_where_a_table_is_read_in_parts(rng, tmp_path):
    table = tokens_of(rng)
    table = pa.concat_tables([table, table.slice(0, 1)])  # the first set goes on at the end
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=10)
    assert read_table(tmp_path / "t.parquet").sets.lengths[0] > 1
    words = (
        r"must follow each other.*set s0 is in row group 0 of t\.parquet and, after other sets, in "
        r"row group \d of t\.parquet\. Sort the table by 'set'"
    )
    with pytest.raises(SchemaError, match=words):
        list(ParquetSets(tmp_path / "t.parquet"))


def test_every_form_is_read_in_parts(sets, tmp_path, rng):
    """Lists per coordinate, several query columns, gaps, streams, npz: batches are the whole."""
    table = {f"x{j}": [s.tokens[:, j].tolist() for s in sets] for j in range(3)}
    table |= {f"q{j}": sets.query[:, j] for j in range(3)} | {"label": ["a", "b"] * 25}
    table["x0"][4] = None
    pq.write_table(pa.table(table), tmp_path / "t.parquet", row_group_size=20)
    with pa.ipc.new_stream(tmp_path / "t.arrow", pa.table(table).schema) as writer:
        writer.write_table(pa.table(table), max_chunksize=20)
    ptr = sets.offsets
    np.savez(tmp_path / "t.npz", X=sets.tokens, ptr=ptr, query=sets.query, y=np.arange(50))
    options = {"query": ["q0", "q1", "q2"], "missing": "drop"}
    for name, chosen in (("t.parquet", options), ("t.arrow", options), ("t.npz", {})):
        source = ParquetSets(tmp_path / name, batch_size=8, **chosen)
        got, y = whole(pickle.loads(pickle.dumps(source)))
        data = read_table(tmp_path / name, **chosen)
        equal(got, data.sets)
        np.testing.assert_array_equal(y, data.target)
        assert max(len(batch.sets) for batch in source) == 8
    assert data.ids is None
    assert got.lengths[4] == sets.lengths[4]


def test_all_tokens_of_a_batch_may_be_dropped(tmp_path):
    rows = [[[1.0, 2.0]], None, [None], [], [[3.0, 4.0]]]
    pq.write_table(
        pa.table({"keys": pa.array(rows, pa.list_(pa.list_(pa.float64())))}), tmp_path / "t.parquet"
    )
    got, _ = whole(ParquetSets(tmp_path / "t.parquet", missing="drop", batch_size=1))
    assert got.tokens.tolist() == [[1, 2], [0, 0], [0, 0], [0, 0], [3, 4]]


def test_values_repeated_often_do_not_make_a_batch_large(tmp_path, monkeypatch):
    """They take next to nothing in a file, and all their room in memory."""
    monkeypatch.setattr("keyhole.data.blocks.BATCH_BYTES", 2**18)
    column = pa.array([[[0.5] * 8] * 16] * 1000, pa.list_(pa.list_(pa.float64(), 8)))
    pq.write_table(pa.table({"keys": column}), tmp_path / "t.parquet")
    info = pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(0)
    assert info.total_byte_size < 2**17 < 2**18 < column.nbytes
    assert max(batch.sets.nbytes for batch in ParquetSets(tmp_path / "t.parquet")) < 1.1 * 2**18


def test_rows_in_messages_count_from_the_row_group(path):
    rewrite(path, keys=pa.array([[[1.0, 2.0, 3.0]]] * 45 + [[[1.0, np.nan, 3.0]]] * 5))
    with pytest.raises(
        SchemaError, match=r"'keys\[1\]' is missing in row 5 of row group 2 of sets\.parquet"
    ):
        whole(ParquetSets(path, batch_size=2))


def test_lists_called_y_are_a_coordinate(tmp_path):
    pq.write_table(
        pa.table({"x": [[1.0, 2.0], [3.0]], "y": [[4.0, 5.0], [6.0]]}), tmp_path / "t.parquet"
    )
    data = read_table(tmp_path / "t.parquet")
    assert (data.names, data.target) == (("x", "y"), None)
