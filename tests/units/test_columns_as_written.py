"""Ids are what is written, a schema decides the type of a column, and what looks wrong is said."""

import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.data.columns import SchemaError

ODD_IDS = [
    "9999999999999999991",
    "9999999999999999992",
    "12e4",
    "120000",
    "00.5",
    "0.5",
    "007",
    "7",
]


def write(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_ids_of_a_text_file_are_the_texts_that_are_written(suffix, tmp_path):
    comma = {"csv": ",", "tsv": "\t"}[suffix]
    rows = [f"{name}{comma}{i}.5{comma}{i}" for i, name in enumerate(ODD_IDS)]
    header = comma.join(["set", "x", "y"])
    data = kh.read_table(write(tmp_path / f"t.{suffix}", "\n".join([header, *rows]) + "\n"))
    assert data.ids.tolist() == ODD_IDS
    assert data.sets.lengths.tolist() == [1] * 8


def test_groups_of_a_text_file_are_the_texts_that_are_written(tmp_path):
    rows = [f"s{i},{name},{i}.5,{i}" for i, name in enumerate(ODD_IDS)]
    path = write(tmp_path / "t.csv", "\n".join(["set,ward,x,y", *rows]) + "\n")
    assert kh.read_table(path, groups="ward", keys="x").groups.tolist() == ODD_IDS


def test_long_ids_of_two_text_files_are_joined_as_written(tmp_path):
    samples = write(tmp_path / "samples.csv", "user,y\n" + "".join(f"{i},1\n" for i in ODD_IDS))
    tokens = "user,x\n" + "".join(f"{name},{k}.5\n" for k, name in enumerate(ODD_IDS))
    data = kh.read_table(samples, tokens=write(tmp_path / "t.csv", tokens), set_id="user")
    assert data.sets.tokens[:, 0].tolist() == [k + 0.5 for k in range(8)]
    assert data.sets.lengths.tolist() == [1] * 8


def test_text_ids_are_joined_with_whole_numbers_of_another_table(tmp_path):
    samples = write(tmp_path / "samples.csv", "user,y\n7,1\n12,2\n")
    tokens = pd.DataFrame({"user": [12, 7, 7], "x": [1.0, 2.0, 3.0]})
    data = kh.read_table(samples, tokens=tokens, set_id="user")
    assert data.sets.tokens[:, 0].tolist() == [2, 3, 1]


def test_every_set_of_long_ids_gets_its_prediction(tmp_path):
    """Sixty ids of 20 digits were one set, and one prediction."""
    rng = np.random.default_rng(0)
    ids = [f"99999999999999999{i:03}" for i in range(60)]
    rows = "".join(
        f"{name},{x:.3f},{abs(x):.3f}\n" for name, x in zip(ids, rng.normal(size=60), strict=True)
    )
    path = write(tmp_path / "t.csv", "set,x,y\n" + rows)
    data = kh.read_table(path, keys="x", target="y")
    model = kh.AttentionRegressor(4, kh.GaussianHeads(), random_state=0)
    kh.save(model.fit(data.sets, data.target), tmp_path / "model", schema=data.schema)
    places = [str(tmp_path / name) for name in ("model", "t.csv", "out.parquet")]
    done = CliRunner().invoke(app, ["predict", *places])
    assert done.exit_code == 0, done.output
    assert pq.read_table(tmp_path / "out.parquet")["set"].to_pylist() == ids


@pytest.mark.parametrize("option", ["set_id", "groups"])
def test_float_ids_that_may_have_merged_are_refused(option):
    frame = pd.DataFrame({"set": [1, 2], "x": [1.0, 2.0], "y": [0.0, 1.0]})
    frame["code"] = [2.0**53, 1.5]
    options = {"set_id": "set", "keys": "x", option: "code"}
    with pytest.raises(SchemaError, match=r"'code'.*row 0 is 9007199254740992.*as text"):
        kh.read_table(frame, **options)
    frame["code"] = [2.0**52, 1.5]
    assert len(kh.read_table(frame, **options)) == 2


def test_a_schema_decides_that_a_column_is_text(tmp_path):
    trained = write(
        tmp_path / "a.csv", "set,smokes,x,y\na,true,1,0\nb,false,2,1\nc,maybe,3,2\nd,1,4,3\n"
    )
    schema = kh.read_table(trained, keys="smokes,x", target="y").schema
    assert schema.names == ("smokes=1", "smokes=false", "smokes=maybe", "smokes=true", "x")
    only = write(tmp_path / "b.csv", "set,smokes,x\na,true,1\nb,false,2\n")
    assert schema.read(only).sets.tokens[:, :4].tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    digits = write(tmp_path / "c.csv", "set,smokes,x\na,1,1\n")
    assert schema.read(digits).sets.tokens.tolist() == [[1, 0, 0, 0, 1]]


def test_columns_of_pandas_may_be_named_by_numbers():
    frame = pd.DataFrame([["a", 1.5, 0.0], ["a", 2.5, 0.0], ["b", 3.5, 1.0]], columns=[1, 5, 2])
    data = kh.read_table(frame, set_id=1, target=2)
    assert (data.names, data.target.tolist()) == (("5",), [0, 1])
    assert kh.read_table(frame, set_id=1, keys=5, target=[2]).sets.lengths.tolist() == [2, 1]


def test_lists_may_have_a_column_that_names_their_set():
    table = pa.table({"visit": ["v1", "v2"], "x": [[1.0, 2.0], [3.0]], "y": [0.0, 1.0]})
    data = kh.read_table(table, set_id="visit")
    assert (data.ids.tolist(), data.names) == (["v1", "v2"], ("x",))
    assert dict(data.columns)["set_id"] == "visit"
    assert data.schema.read(table).ids.tolist() == ["v1", "v2"]


def test_decimal_commas_are_refused(tmp_path):
    path = write(tmp_path / "t.tsv", "set\tx\ty\na\t1,5\t0\nb\t2\t1\n")
    with pytest.raises(
        ValueError, match=r"column 'x' of 't\.tsv' has commas, row 0 .*'1,5'.*decim"
    ):
        kh.read_table(path)


def long_frame(n_sets=30):
    rng = np.random.default_rng(0)
    y = np.repeat(rng.normal(size=n_sets), 2)
    return pd.DataFrame(
        {"set": np.repeat(np.arange(n_sets), 2), "x": rng.normal(size=2 * n_sets), "y": y}
    )


@pytest.mark.parametrize(
    "change", [lambda y: y, lambda y: 2 * y + 1, lambda y: -y.astype("float32")]
)
def test_a_column_that_says_the_target_is_named(change):
    frame = long_frame()
    frame["copy"] = change(frame["y"])
    with pytest.warns(UserWarning, match=r"'copy' gives the target 'y' away"):
        kh.read_table(frame, keys="x,copy", target="y")
    with pytest.warns(UserWarning, match=r"'copy' gives the target 'y' away"):
        kh.read_table(frame, keys="x", extras="copy", target="y")


def test_a_category_that_says_the_label_is_named():
    frame = long_frame().assign(label=lambda t: np.where(t["y"] > 0, "yes", "no"))
    frame["outcome"] = np.where(frame["label"] == "yes", "good", "bad")
    with pytest.warns(UserWarning, match=r"'outcome' gives the target 'label' away"):
        kh.read_table(frame, keys="x,outcome", target="label")


def test_an_honest_column_is_not_named():
    frame = long_frame()
    frame["near"] = frame["y"] + 1e-4 * np.sin(np.arange(60))
    frame["one"] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kh.read_table(frame, keys="x,near,one", target="y")


def test_a_long_frame_given_to_fit_is_pointed_to_read_table():
    frame = long_frame()
    model = kh.AttentionRegressor(4, kh.GaussianHeads(), random_state=0)
    with pytest.warns(
        UserWarning, match=r"each row of `X` is a set of its own: column 'set'.*read_table"
    ):
        model.fit(frame[["set", "x"]], frame["y"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(frame[["x"]], frame["y"])


def test_a_partition_of_no_sets_is_refused_by_its_number():
    distributed = pytest.importorskip("distributed")
    from keyhole.distributed import fit_dask, predict_dask

    sets = kh.targets.sphere_sets(40, n_keys=3, dim=2, seed=0)
    y = sets.query[:, 0]
    parts = [(sets[:20], y[:20]), (sets[20:], y[20:]), (sets[:0], y[:0])]
    model = kh.AttentionRegressor(4, kh.GaussianHeads(), random_state=0)
    local = {"n_workers": 1, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Dask leaves behind
        with distributed.LocalCluster(**local) as cluster, distributed.Client(cluster) as client:
            with pytest.raises(ValueError, match="partition 2 has one of 0 sets"):
                fit_dask(model, parts, client)
            fit_dask(model, [*parts[:2], []], client)
            with pytest.raises(ValueError, match="partition 2 has one of 0 sets"):
                list(predict_dask(model, parts, client))


def test_copied_columns_of_a_text_file_are_written_as_they_were(tmp_path):
    rows = "".join(f"s{i},9999999999999999{i:04},{i}.5,{i * i}\n" for i in range(20))
    path = write(tmp_path / "t.csv", "set,order,x,y\n" + rows)
    data = kh.read_table(path, keys="x", target="y")
    model = kh.AttentionRegressor(4, kh.GaussianHeads(), random_state=0)
    kh.save(model.fit(data.sets, data.target), tmp_path / "model", schema=data.schema)
    places = [str(tmp_path / name) for name in ("model", "t.csv", "out.parquet")]
    done = CliRunner().invoke(app, ["predict", *places, "--id", "order"])
    assert done.exit_code == 0, done.output
    written = pq.read_table(tmp_path / "out.parquet")["order"].to_pylist()
    assert written == [f"9999999999999999{i:04}" for i in range(20)]
