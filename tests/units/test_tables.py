"""Tables of sets: every form gives the same sets, and errors name the column and the remedy."""

import io
import os
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import csv, feather, parquet

import keyhole as kh
from keyhole.data import read_table

DIM = 2
needs_arrow_26 = pytest.mark.skipif(
    int(pa.__version__.partition(".")[0]) < 26,
    reason="pyarrow before 26 neither writes nor reads nulls among lists of one size",
)


def example(rng, n=12, dim=DIM):
    keys = [rng.normal(size=(rng.integers(1, 5), dim)) for _ in range(n)]
    return keys, rng.normal(size=(n, dim)), np.array(["a", "b"])[np.arange(n) % 2]


def long_table(keys, query, y, *, role):
    rows = {"set": [], "role": [], "x0": [], "x1": [], "q0": [], "q1": [], "label": []}
    for i, tokens in enumerate(keys):
        parts = [("query", query[i])] * role + [("key", t) for t in tokens]
        for kind, token in parts:
            values = (f"s{i}", kind, *token.tolist(), *query[i].tolist(), str(y[i]))
            for name, value in zip(rows, values, strict=True):
                rows[name].append(value)
    return pa.table(rows)


def same(data, keys, query, y):
    assert np.array_equal(data.sets.tokens, np.concatenate(keys))
    assert np.array_equal(data.sets.lengths, [len(k) for k in keys])
    assert data.sets.query is None if query is None else np.array_equal(data.sets.query, query)
    assert np.array_equal(data.target, y)


def shuffled(table, rng):
    """Rows in another order; the first row of each set keeps the order of sets."""
    order = rng.permutation(table.num_rows)
    ids = np.array(table.column("set").to_pylist())[order]
    rank = {s: i for i, s in enumerate(dict.fromkeys(ids.tolist()))}
    return table.take(pa.array(order)), rank


def test_one_row_per_token(rng, tmp_path):
    keys, query, y = example(rng)
    table = long_table(keys, query, y, role=False)
    csv.write_csv(table, tmp_path / "t.csv")
    csv.write_csv(table, tmp_path / "t.tsv", csv.WriteOptions(delimiter="\t"))
    parquet.write_table(table, tmp_path / "t.parquet")
    for name in ("t.csv", "t.tsv", "t.parquet"):
        data = read_table(tmp_path / name, keys="x0,x1", query="q0,q1", target="label")
        same(data, keys, query, y)
        assert (data.names, data.target_name) == (("x0", "x1"), "label")
        again = read_table(tmp_path / name, **dict(data.columns))
        same(again, keys, query, y)


def test_the_query_may_be_a_row(rng, tmp_path):
    keys, query, y = example(rng)
    csv.write_csv(long_table(keys, query, y, role=True), tmp_path / "t.csv")
    same(read_table(tmp_path / "t.csv", keys=["x0", "x1"]), keys, query, y)


def test_rows_of_a_set_need_not_be_together(rng, tmp_path):
    keys, query, y = example(rng)
    table, rank = shuffled(long_table(keys, query, y, role=False), rng)
    csv.write_csv(table, tmp_path / "t.csv")
    data = read_table(tmp_path / "t.csv", keys="x0,x1")
    for i, tokens in enumerate(keys):
        found = data.sets[rank[f"s{i}"]]
        assert np.array_equal(np.sort(found.tokens, axis=0), np.sort(tokens, axis=0))
        assert data.target[rank[f"s{i}"]] == y[i]


@pytest.mark.parametrize(
    "write", [parquet.write_table, feather.write_feather], ids=["parquet", "arrow"]
)
def test_one_row_per_set(write, rng, tmp_path):
    keys, query, y = example(rng)
    path = tmp_path / ("t.parquet" if write is parquet.write_table else "t.arrow")
    nested = pa.table(
        {"keys": [k.tolist() for k in keys], "query": query.tolist(), "y": y.tolist()}
    )
    write(nested, path)
    same(read_table(path), keys, query, y)
    fixed = pa.array([k.tolist() for k in keys], pa.list_(pa.list_(pa.float64(), DIM)))
    write(pa.table({"stuff": fixed, "y": y.tolist()}), path)
    same(read_table(path, keys="stuff"), keys, None, y)
    apart = {f"x{j}": [k[:, j].tolist() for k in keys] for j in range(DIM)}
    apart |= {f"q{j}": query[:, j].tolist() for j in range(DIM)}
    write(pa.table({**apart, "label": y.tolist()}), path)
    data = read_table(path, query="q0,q1")
    same(data, keys, query, y)
    assert data.names == ("x0", "x1")


def test_arrow_streams(rng, tmp_path):
    keys, _, y = example(rng)
    table = pa.table({"keys": [k.tolist() for k in keys], "y": y.tolist()})
    with pa.ipc.new_stream(tmp_path / "t.arrow", table.schema) as sink:
        sink.write_table(table)
    same(read_table(tmp_path / "t.arrow"), keys, None, y)


def test_npz(rng, tmp_path):
    keys, query, y = example(rng)
    ptr = np.cumsum([0, *map(len, keys)])
    np.savez(
        tmp_path / "a.npz",
        X=np.concatenate(keys),
        ptr=ptr,
        y=y,
        query=query,
        split=np.arange(12) % 2,
    )
    data = read_table(tmp_path / "a.npz")
    same(data, keys, query, y)
    assert (len(data.train), len(data.test)) == (6, 6)
    dense = rng.normal(size=(5, 3, DIM)).astype(np.float32)
    np.savez_compressed(tmp_path / "b.npz", keys=np.asfortranarray(dense), y=np.arange(5.0))
    data = read_table(tmp_path / "b.npz")
    assert np.array_equal(data.sets.tokens, dense.reshape(-1, DIM))
    assert data.sets.dtype == np.float32


def test_gaps(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("set,x,y,target\na,1,2,0\na,,4,0\nb,,6,1\n")
    with pytest.raises(ValueError, match=r"'x' is missing in row 1, 2 such.*missing='drop'"):
        read_table(path, target="target")
    data = read_table(path, target="target", missing="drop")
    assert data.sets.tokens.tolist() == [[1, 2], [0, 0]]


CSV_ERRORS = {
    "set,x,target\na,1,2\n": (
        {"keys": "x,z"},
        r"`keys` must name columns.*'z' is not in the table.*'set', 'x'",
    ),
    "a,b\n1,2\n": ({}, r"which set a row belongs to.*--set"),
    "set,x,target\na,1,p\na,2,q\n": (
        {},
        r"'target' must be the same in all rows of a set: row 1 says q",
    ),
    "set,when\na,2020-01-01\n": (
        {},
        r"a column of numbers, or of few texts, for the keys.*'when' looks like a time",
    ),
    "set,role,x\na,key,1\nb,query,1\nb,key,2\n": (
        {},
        r"one row whose role is 'query'.*set number 0 has 0",
    ),
    "set,role,x\na,value,1\n": ({}, r"'role' must say 'key' or 'query'"),
    "set,role,x\na,query,1\n": ({}, r"set 0 has no keys"),
    "set,x,target\na,1,\n": ({}, r"must be known in every row: row 0|it holds null"),
    "set,x\n": ({}, r"at least one row|a column of numbers"),
    "": ({}, r"does not read"),
    "set,x\na,1,2\n": ({}, r"does not read"),
    "set,x\na,inf\n": ({}, r"infinite in row 0"),
    "set,x,x\na,1,2\n": ({"keys": "x"}, r"there 2 times"),
}


@pytest.mark.parametrize("text", CSV_ERRORS)
def test_errors_name_the_column(text, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(text)
    options, words = CSV_ERRORS[text]
    with pytest.raises(ValueError, match=words):
        read_table(path, **options)


LIST_ERRORS = [
    (
        {"keys": [[[1.0, 2.0]], [[1.0]]]},
        r"as many coordinates.*the first has 2, and token 0 of row 1 has 1",
    ),
    ({"keys": [[[1.0]], []]}, r"set 1 has no keys"),
    ({"keys": [[[1.0]], None]}, r"a list in every row: row 1"),
    ({"keys": [[["a"]]]}, r"lists of numbers: it holds lists of string"),
    ({"a": [[1.0, 2.0]], "b": [[1.0]]}, r"in row 0 column 'a' has 2 and 'b' has 1"),
    ({"keys": [[[float("nan")]]]}, r"'keys\[0\]' is missing in row 0, 1 such"),
    ({"keys": [[[1.0]]], "y": [None]}, r"target column 'y'"),
]


@pytest.mark.parametrize(("columns", "words"), LIST_ERRORS)
def test_errors_of_list_columns(columns, words, tmp_path):
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=words):
        read_table(tmp_path / "t.parquet")


def test_errors_of_npz(tmp_path):
    path = tmp_path / "a.npz"
    for arrays, words in (
        ({"X": np.zeros((3, 2))}, "must hold 'ptr'"),
        ({"X": np.zeros((3, 2)), "ptr": np.array([0, 4])}, "must rise from 0 to the 3 rows"),
        ({"X": np.zeros((3, 2)), "ptr": np.array([0, 0, 3])}, "set 0 has no keys"),
        ({"Z": np.zeros((3, 2))}, "must hold 'X': it holds 'Z'"),
        ({"keys": np.zeros((3, 2, 1)), "y": np.zeros(2)}, "one number or text per set"),
        ({"keys": np.array([["a"]])}, "must hold numbers"),
    ):
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=words):
            read_table(path)
    np.savez(path, keys=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        read_table(path)


def test_arrow_lists_are_read_in_a_fresh_process(rng, tmp_path):
    keys, _, y = example(rng)
    feather.write_feather(
        pa.table({"keys": [k.tolist() for k in keys], "y": y}), tmp_path / "t.arrow"
    )
    code = f"import keyhole as kh; print(len(kh.read_table({str(tmp_path / 't.arrow')!r}).sets))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "12", done.stderr


@pytest.mark.parametrize("set_id", ["s", "1", "1.5"])
def test_rows_without_a_set_are_refused(set_id, tmp_path):
    """They were one set of their own."""
    rows = [f"{set_id},1", ",2", f"{set_id},3", *[" ,4"] * (set_id == "s"), *[",5"] * 9]
    (tmp_path / "t.csv").write_text("\n".join(["set,x", *rows]) + "\n")
    words = (
        "column 'set' must say of every row which set it belongs to: rows 1, 3, 4, 5, 6 … are empty"
    )
    with pytest.raises(ValueError, match=words):
        read_table(tmp_path / "t.csv")


def test_rows_without_a_label_are_refused(tmp_path):
    (tmp_path / "t.csv").write_text("set,x,label\na,1,yes\nb,2,\n")
    with pytest.raises(
        ValueError, match=r"target column 'label' must be known in every row: row 1 is empty"
    ):
        read_table(tmp_path / "t.csv")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(pa.list_(pa.float64(), 2), marks=needs_arrow_26),
        pa.list_(pa.float64()),
        pa.large_list(pa.float64()),
    ],
)
def test_nulls_in_lists_of_tokens(kind, tmp_path):
    rows = [[[1, 2], None, [3, 4]], None, [[5, None], [6, 7]], [None]]
    table = pa.table({"keys": pa.array(rows, pa.list_(kind)), "y": [1.0, 2.0, 3.0, 4.0]})
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(
        ValueError, match=r"'keys' must have a list in every row: row 1 is empty.*missing='drop'"
    ):
        read_table(tmp_path / "t.parquet")
    data = read_table(tmp_path / "t.parquet", missing="drop")
    assert [s.tolist() for s in np.split(data.sets.tokens, data.sets.offsets[1:-1])] == [
        [[1, 2], [3, 4]],
        [[0, 0]],
        [[6, 7]],
        [[0, 0]],
    ]
    parquet.write_table(table.slice(2), tmp_path / "t.parquet")
    with pytest.raises(
        ValueError, match=r"'keys' must hold lists of tokens: row 1 has one that is empty.*='drop'"
    ):
        read_table(tmp_path / "t.parquet")


def test_nulls_in_lists_of_coordinates(tmp_path):
    table = pa.table(
        {"a": [[1, 2], None, [3, None], [9]], "b": [[1, 2], [5], [5, 6], None], "y": [1, 2, 3, 4]}
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(
        ValueError, match=r"'a' must have a list in every row: row 1 is empty.*missing='drop'"
    ):
        read_table(tmp_path / "t.parquet")
    data = read_table(tmp_path / "t.parquet", missing="drop")
    assert data.sets.tokens.tolist() == [[1, 1], [2, 2], [0, 0], [3, 5], [0, 0]]
    assert data.sets.lengths.tolist() == [2, 1, 1, 1]


@needs_arrow_26
def test_nulls_in_queries_are_refused(tmp_path):
    query = pa.array([[1.0, 2.0], None], pa.list_(pa.float64(), 2))
    parquet.write_table(
        pa.table({"keys": [[[1.0, 2.0]]] * 2, "query": query}), tmp_path / "t.parquet"
    )
    for missing in ("error", "drop"):
        with pytest.raises(
            ValueError,
            match=r"'query' must have a list in every row: row 1 is empty\. Drop the row",
        ):
            read_table(tmp_path / "t.parquet", missing=missing)


@pytest.mark.parametrize("twice", ["keys", "query", "y", "x0", "set", "role", "label"])
def test_columns_that_are_there_twice_are_refused(twice, rng, tmp_path):
    keys, query, y = example(rng)
    nested = pa.table({"keys": [k.tolist() for k in keys], "query": query.tolist(), "y": y})
    table = nested if twice in nested.column_names else long_table(keys, query, y, role=True)
    feather.write_feather(table, tmp_path / "t.arrow")
    read_table(tmp_path / "t.arrow")
    table = table.append_column(twice, table[twice])
    with (
        pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)
    with pytest.raises(ValueError, match=f"{twice!r} is there 2 times.*Rename"):
        read_table(tmp_path / "t.arrow")


def test_names_that_are_not_text(rng, tmp_path):
    (tmp_path / "t.csv").write_bytes(b"set,caf\xe9,y\na,1,2\n")
    with pytest.raises(ValueError, match=r"must be in UTF-8: the name b'caf\\xe9' .*'t\.csv'"):
        read_table(tmp_path / "t.csv")
    odd = tmp_path / os.fsdecode(b"caf\xe9.csv")
    odd.write_text("set,x,y\na,1,2\n")
    with pytest.raises(
        ValueError, match=r"names of files must be text in UTF-8: got 'caf\\udce9\.csv'. Rename"
    ):
        read_table(odd)
    with pytest.raises(OSError, match="name too long"):
        read_table(tmp_path / ("x" * 300 + ".csv"))


def test_names_and_suffixes(tmp_path):
    with pytest.raises(ValueError, match=r"one of \.parquet.*got 'a\.xlsx'"):
        read_table(tmp_path / "a.xlsx")
    with pytest.raises(FileNotFoundError, match=r"'a\.csv' is not there"):
        read_table(tmp_path / "a.csv")
    with pytest.raises(ValueError, match="`keys` must name columns, each once"):
        read_table(tmp_path / "a.csv", keys="a,,b")


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "csv", "npz"])
def test_broken_files_give_a_message(suffix, rng, tmp_path):
    """Cut anywhere or with bytes changed: sets, or a ValueError with words."""
    keys, query, y = example(rng, 6)
    path = tmp_path / f"t.{suffix}"
    nested = pa.table(
        {"keys": [k.tolist() for k in keys], "query": query.tolist(), "y": y.tolist()}
    )
    if suffix == "npz":
        np.savez_compressed(path, X=np.concatenate(keys), ptr=np.cumsum([0, *map(len, keys)]), y=y)
    elif suffix == "csv":
        csv.write_csv(long_table(keys, query, y, role=True), path)
    else:
        (parquet.write_table if suffix == "parquet" else feather.write_feather)(nested, path)
    whole = path.read_bytes()
    for _ in range(120):
        broken = bytearray(whole)
        if rng.random() < 0.5:
            del broken[int(rng.integers(len(whole))) :]
        else:
            for place in rng.integers(0, len(whole), rng.integers(1, 5)):
                broken[place] = int(rng.integers(256))
        path.write_bytes(broken)
        try:
            data = read_table(path)
            assert isinstance(data.sets, kh.SetBatch)
        except ValueError as error:
            assert len(str(error)) > 30  # noqa: PT017


def test_an_array_larger_than_its_file_is_refused_before_it_is_made(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (2**40, 2**10)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("keys.npy", header.getvalue() + b"0" * 64)
    with pytest.raises(ValueError, match=r"an npz file is an archive of arrays.*allocate"):
        read_table(tmp_path / "a.npz")


def polars_series(values):
    return pytest.importorskip("polars").Series("x", values)


@pytest.mark.parametrize("series", [pd.Series, polars_series], ids=["pandas", "polars"])
def test_one_column_is_no_table(series):
    column = series([1.0, 2.0])
    with pytest.raises(TypeError, match=r"`source` must be a path, or a table of .* got Series"):
        read_table(column)
    with pytest.raises(TypeError, match=r"`tokens` must be a path, or a table of .* got Series"):
        read_table(pd.DataFrame({"set": [1], "y": [1.0]}), tokens=column)


@pytest.mark.parametrize("rows", [[{"set": 1, "x": 2}], ({"set": 1, "x": 2},), ["a.csv", 1]])
def test_a_list_of_rows_is_no_table(rows):
    kind = type(rows).__name__
    with pytest.raises(TypeError, match=f"`source` must be a path, or a table of .* got {kind}"):
        read_table(rows)
