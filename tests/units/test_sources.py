"""Parquet and Arrow files as batches of sets: every layout of lists, parts, errors that name the column."""

import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import keyhole as kh
from keyhole.sets import concatenate
from keyhole.sources import Batch, ParquetSets, as_batch, write_parquet
from keyhole.sources.columns import SchemaError
from keyhole.sources.parts import PartedFile, predictions_table


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
    monkeypatch.setattr("keyhole.sources.parquet.thread_count", lambda: 2)
    source = ParquetSets(path, batch_size=6)
    for left, right in zip(source, source, strict=True):  # two readers of one file, each in a thread
        equal(left.sets, right.sets)
    equal(whole(source)[0], sets)
    first = iter(source)
    next(first)
    first.close()  # a reader that is left early does not hang
    source.target = ["nothing"]
    with pytest.raises(SchemaError, match="no column 'nothing'"):  # nor does it swallow what goes wrong
        list(source)


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
    with pytest.raises(SchemaError, match=r"'keys' must hold sets of keys: found type list<.*double> in row group 0"):
        whole(ParquetSets(path))
    with pytest.raises(SchemaError, match="whole keys of `dim` = 2 coordinates: row"):
        whole(ParquetSets(path, dim=2))


def test_fixed_shapes_are_read(rng, tmp_path):
    keys = rng.normal(size=(10, 4, 3))
    flat = pa.FixedSizeListArray.from_arrays(pa.array(keys.ravel()), 12)
    nested = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(pa.array(keys.ravel()), 3), 4)
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
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
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
    with pytest.raises(SchemaError, match=r"no column 'bags' in sets.parquet: it has keys, query, y"):
        ParquetSets(path, keys="bags")
    with pytest.raises(SchemaError, match="'y' must hold sets of keys: found type double"):
        whole(ParquetSets(path, keys="y"))
    with pytest.raises(SchemaError, match="share their token dimension: keys have 3 coordinates and queries 1"):
        whole(ParquetSets(path, query="y"))
    rewrite(path, y=pa.array([None, *range(49)]))
    with pytest.raises(SchemaError, match=r"'y' must not be null: row 0 of row group 0 of sets\.parquet"):
        whole(ParquetSets(path))
    rewrite(path, keys=pa.array([[[1.0, 2.0, np.nan]]] * 50))
    with pytest.raises(SchemaError, match="'keys' must be finite"):
        whole(ParquetSets(path, target=()))
    rewrite(path, keys=pa.array([[[1.0, 2.0, 3.0]]] * 49 + [[]]))
    with pytest.raises(SchemaError, match=r"row 9 of row group 2 of sets\.parquet has none"):
        whole(ParquetSets(path, target=()))
    rewrite(path, keys=pa.array([[[1.0, 2.0, 3.0], [1.0]]] * 50))
    with pytest.raises(SchemaError, match=r"key 1 of row group 0 of sets\.parquet has 1"):
        whole(ParquetSets(path, target=()))
    rewrite(path, keys=pa.array([[["a"]]] * 50))
    with pytest.raises(SchemaError, match="must hold numbers: found type string"):
        whole(ParquetSets(path, target=()))
    (tmp_path / "no.parquet").write_text("a,b\n1,2")
    with pytest.raises(SchemaError, match="must be a Parquet file or an Arrow file: it begins with"):
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


def test_parts_of_a_file(tmp_path):
    out, job = tmp_path / "o.parquet", {"model": "a"}
    file = PartedFile(out, job)
    file.write(1, predictions_table({"prediction": np.array([2.0])}))
    (file.folder / "part-00000002.draft").write_text("half of a part")
    assert PartedFile(out, job).done() == {1}
    with pytest.raises(ValueError, match="parts of another run: model changed since"):
        PartedFile(out, {"model": "b"})
    assert PartedFile(out, {"model": "b"}, overwrite=True).done() == set()
    file = PartedFile(out, {"model": "b"})
    for i in (1, 0):
        file.write(i, predictions_table({"prediction": np.array([i, i])}))
    assert not out.exists()
    assert file.join([0, 1]) == 4
    assert pq.read_table(out)["prediction"].to_pylist() == [0, 0, 1, 1]
    assert os.listdir(tmp_path) == ["o.parquet"]
    with pytest.raises(FileExistsError, match="--overwrite"):
        PartedFile(out, job)
