"""`keyhole fit` and `keyhole lens` at the door: what they write, and what they say of broken
input.
"""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.data import read_table
from keyhole.state import read_model

FAST = ("--n-heads", "4", "--heads", "zero-mean", "--scaling", "none", "--make-query", "given")


def invoke(*arguments, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    # a refusal is a message, not a traceback
    assert result.exception is None or isinstance(result.exception, SystemExit)
    if code:
        assert len(result.stderr) > 30
        assert "Traceback" not in result.stderr
    return result


@pytest.fixture
def tables(rng, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = [rng.normal(size=(rng.integers(1, 4), 2)) for _ in range(30)]
    label = ["yes" if k[:, 0].mean() > 0 else "no" for k in keys]
    size = [float(k[:, 1].max()) for k in keys]
    nested = pa.table({"keys": [k.tolist() for k in keys], "label": label, "size": size})
    parquet.write_table(nested, "sets.parquet")
    rows = [(f"s{i}", *t, label[i]) for i, k in enumerate(keys) for t in k]
    names = ("set", "x", "y", "label")
    csv.write_csv(pa.table({n: [row[j] for row in rows] for j, n in enumerate(names)}), "sets.csv")
    np.savez("sets.npz", X=np.concatenate(keys), ptr=np.cumsum([0, *map(len, keys)]), y=size)
    return tmp_path


def test_from_a_table_to_a_saved_model(tables):
    output = invoke("fit", "sets.csv", "a.keyhole", "--target", "label", *FAST).output
    assert "held out of the whole procedure (ten folds): accuracy" in output
    assert "wrote a.keyhole" in output
    found = read_model("a.keyhole")
    assert found.schema.names == ("x", "y")
    assert found.schema.target == "label"
    again = read_table("sets.csv", **dict(found.schema.columns))
    found.schema.check(again.sets, again.names)
    assert set(found.estimator.predict(again.sets)) <= {"yes", "no"}
    output = invoke("fit", "sets.parquet", "b.keyhole", "--target", "size", *FAST).output
    assert "held out of the whole procedure (ten folds): RMSE" in output
    assert "regression" in output
    assert isinstance(kh.load("b.keyhole"), kh.AttentionRegressor)


def test_every_option_reaches_the_model(tables):
    invoke(
        "fit",
        "sets.npz",
        "m",
        "--n-heads",
        "5",
        "--heads",
        "biased",
        "--alpha",
        "0.5",
        "--activation",
        "softmax",
        "--pooling",
        "sum",
        "--scaling",
        "sphere",
        "--make-query",
        "mean",
        "--seed",
        "3",
        "--task",
        "regression",
    )
    model = kh.load("m")
    assert (model.n_heads, model.heads, model.alpha) == (5, kh.GaussianHeads(1.0), 0.5)
    assert (model.activation, model.pooling, model.scaling) == ("softmax", "sum", "sphere")
    assert (model.query, model.random_state) == ("mean", 3)


def test_a_model_is_not_replaced_unless_asked(tables):
    (tables / "m").write_text("precious")
    assert "--overwrite" in invoke("fit", "sets.npz", "m", *FAST, code=2).stderr
    assert (tables / "m").read_text() == "precious"
    invoke("fit", "sets.npz", "m", "--overwrite", *FAST)
    assert isinstance(kh.load("m"), kh.AttentionRegressor)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing.csv",), "is not there"),
        (("nothing",), "neither a file nor data"),
        (("sets.csv", "--target", "labl"), "'labl' is not in the table"),
        (
            ("sets.csv", "--target", "label", "--split", "x"),
            "'x' must be the same in all rows of a set",
        ),
        (("sets.csv", "--set", "sack"), "'sack' is not in the table"),
        (
            ("sets.csv", "--keys", "x,y", "--query", "x"),
            "'x' must be the same in all rows of a set",
        ),
        (("sets.csv", "--missing", "guess"), "`missing` must be one of"),
        (("sets.csv", "--task", "ranking"), "auto, regression, classification"),
        (("sets.csv", "--target", "label", "--task", "regression"), "target of numbers"),
        (("sets.parquet", "--n-heads", "many"), "--n-heads"),
        (("sets.parquet", "--heads", "64"), "use --n-heads 64"),
        (("sets.parquet", "--n-heads", "0"), "--n-heads"),
        (
            ("sets.parquet", "--heads", "martial"),
            "auto, zero-mean, biased, learned",
        ),
        (("sets.parquet", "--alpha", "x"), "--alpha"),
        (("sets.parquet", "--alpha", "-1"), "alpha"),
        (("sets.parquet", "--activation", "tanh"), "activation"),
        (("sets.parquet", "--pooling", "max"), "pooling"),
        (("sets.parquet", "--scaling", "big"), "scaling"),
        (("sets.parquet", "--make-query", "none"), "query"),
        (("digits", "--keys", "a"), "only tables have columns"),
    ],
)
def test_slips_are_refused_with_their_name(arguments, words, tables):
    before = sorted(os.listdir())
    assert words in invoke("fit", arguments[0], "m", *arguments[1:], code=2).stderr
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "neither a file nor data"),
        (("sets.csv", "--pooling", "max"), "--pooling"),
        (("sets.csv", "--activation", "tanh"), "activation"),
        (("sets.csv", "--keys", "z"), "'z' is not in the table"),
        (("sets.csv", "--out", "sets.npz"), "is a file"),
    ],
)
def test_slips_of_lens(arguments, words, tables):
    before = sorted(os.listdir())
    assert words in invoke("lens", *arguments, code=2).stderr
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("name", ["sets.csv", "sets.parquet", "sets.npz"])
@pytest.mark.parametrize("command", ["fit", "lens"])
def test_broken_files_end_with_a_message(name, command, tables, rng):
    whole = (tables / name).read_bytes()
    for k in range(10):
        broken = bytearray(whole)
        if k % 2:
            del broken[int(rng.integers(len(whole))) :]
        else:
            for place in rng.integers(0, len(whole), 3):
                broken[place] = int(rng.integers(256))
        (tables / name).write_bytes(broken)
        before = sorted(os.listdir())
        arguments = (
            ("fit", name, f"m{k}", *FAST) if command == "fit" else ("lens", name, "--no-report")
        )
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code in (0, 2), result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        if result.exit_code == 2:
            assert result.stderr.startswith("error: ")
            assert sorted(os.listdir()) == before


def test_fit_says_which_columns_are_keys(tables, rng):
    """Ids, times and splits are no coordinates unless they are named."""
    n = 60
    rows = {
        "set": np.arange(n) // 2,
        "customer_id": rng.integers(0, 9, n),
        "timestamp": 1_700_000_000 + rng.integers(0, 10**6, n),
        "split": rng.integers(0, 2, n),
        "line": np.arange(n),
        "time": rng.random(n),
        "x": rng.normal(size=n),
        "shop": ["a"] * n,
        "target": rng.normal(size=n // 2).repeat(2),
    }
    csv.write_csv(pa.table(rows), "t.csv")
    output = invoke("fit", "t.csv", "m", *FAST).output
    assert "keys: time, x\n" in output
    for words in (
        "'shop' looks like nothing to learn from, with one text",
        "'customer_id' looks like an id, by its name and whole numbers",
        "'timestamp' looks like a time, by its name and because it holds dates",
        "'split' looks like a split, by its name and few values",
        "'line' looks like an id, because it counts the rows",
        "--keys",
    ):
        assert words in output
    output = invoke("fit", "t.csv", "n", "--keys", "x,line,split", *FAST).output
    assert "keys: x, line, split\n" in output
    assert "left out" not in output
    assert read_model("n").schema.names == ("x", "line", "split")
    csv.write_csv(pa.table({name: rows[name] for name in ("set", "split", "target")}), "u.csv")
    assert "none is left in u.csv" in (said := invoke("fit", "u.csv", "o", *FAST, code=2).stderr)
    assert "'split' looks like a split" in said


def test_names_with_commas_are_kept(tables, rng):
    table = pa.table(
        {
            "set": ["a", "a", "b", "c"],
            "x, in mm": rng.normal(size=4),
            "z": rng.normal(size=4),
            "y": [1.0, 1.0, 2.0, 3.0],
        }
    )
    csv.write_csv(table, "t.csv")
    invoke("fit", "t.csv", "m", *FAST)
    assert dict(read_model("m").schema.columns)["keys"] == ("x, in mm", "z")
    invoke("predict", "m", "t.csv", "out.parquet")
    assert parquet.read_table("out.parquet")["set"].to_pylist() == ["a", "b", "c"]
    data = read_table("t.csv", keys="x, in mm")  # one column, not two
    assert data.names == ("x, in mm",)


@pytest.fixture
def shop(rng, tmp_path, monkeypatch):
    """Purchases (tokens), offers (samples) and both in one table: text, dates, gaps, and columns
    for holding out.
    """
    monkeypatch.chdir(tmp_path)
    user = np.repeat(np.arange(30), 3)
    tokens = pa.table({
        "user": user,
        "price": rng.random(90),
        "colour": np.array(["red", "blue", "green"])[rng.integers(3, size=90)],
        "sold": [f"2024-01-{1 + i % 28:02d}" for i in range(90)],
    })  # fmt: skip
    price = tokens["price"].to_numpy().reshape(30, 3).mean(axis=1)
    samples = pa.table(
        {
            "user": np.arange(30),
            "colour": np.array(["red", "blue"])[np.arange(30) % 2],
            "age": np.arange(30) % 7 + 20.0,
            "town": [f"town {i % 4}" for i in range(30)],
            "day": np.arange(30),
            "part": np.where(np.arange(30) < 22, "train", "test"),
            "cost": price,
        }
    )
    csv.write_csv(tokens, "tokens.csv")
    csv.write_csv(samples, "samples.csv")
    return samples


JOINED = ("--set", "user", "--tokens", "tokens.csv")
READ = (
    *JOINED,
    "--keys",
    "price,colour,sold",
    "--query",
    "colour",
    "--extras",
    "age",
    "--target",
    "cost",
)


def test_two_tables_of_text_and_dates_go_from_fit_to_predict(shop):
    samples = shop
    output = invoke(
        "fit", "samples.csv", "m", *READ, "--time", "day", "--groups", "town", *FAST
    ).output
    assert "held out of the whole procedure (ten folds): RMSE" in output
    assert "6 newest sets, kept for testing" in output
    found = read_model("m")
    assert found.schema.names == ("price", "colour=blue", "colour=green", "colour=red", "sold")
    csv.write_csv(samples.drop_columns(["cost", "town", "part", "day"]), "new.csv")
    invoke("predict", "m", "new.csv", "out.parquet", "--tokens", "tokens.csv")
    predicted = parquet.read_table("out.parquet")
    assert predicted["user"].to_pylist() == [str(i) for i in range(30)]
    expected = found.estimator.predict(found.schema.read("new.csv", tokens="tokens.csv").sets)
    np.testing.assert_array_equal(predicted["prediction"], expected)
    strange = samples.set_column(
        1, "colour", pa.array(["mauve", *samples["colour"].to_pylist()[1:]])
    )
    csv.write_csv(strange, "strange.csv")
    again = ("predict", "m", "strange.csv", "out2.parquet", "--tokens", "tokens.csv")
    assert (
        "'colour' must hold categories that were there before: row 0"
        in invoke(*again, code=2).stderr
    )
    csv.write_csv(samples.drop_columns(["colour"]), "short.csv")
    short = ("predict", "m", "short.csv", "out3.parquet", "--tokens", "tokens.csv")
    assert "column 'colour' is not in the table" in invoke(*short, code=2).stderr
    assert "--tokens" in invoke("predict", "m", "new.csv", "out3.parquet", code=2).stderr


def test_dates_are_counted_from_that_of_the_sample_in_every_command(shop):
    """The column that ages are counted from is stored with the model, and predict uses it."""
    asof = [f"2024-02-{1 + i % 28:02d}" for i in range(30)]
    samples = shop.append_column("asof", pa.array(asof))
    csv.write_csv(samples, "samples.csv")
    without = invoke("fit", "samples.csv", "n", *READ, *FAST).output
    assert "dates: sold in days after the first one (--reference-date counts" in without
    dated = ("--reference-date", "asof")
    output = invoke("fit", "samples.csv", "m", *READ, *dated, *FAST).output
    assert "dates: sold in days before asof" in output
    schema = read_model("m").schema
    assert dict(schema.columns)["reference_date"] == "asof"
    assert schema.names[-1] == "sold (age)"

    # a later table of the same ages has the same predictions
    with_tokens = ("--tokens", "tokens.csv")
    invoke("predict", "m", "samples.csv", "out.parquet", *with_tokens)
    for name in ("tokens", "samples"):
        text = Path(f"{name}.csv").read_text().replace("2024-0", "2034-0")
        Path(f"later-{name}.csv").write_text(text.replace("asof", "when"))
    later = ("later-samples.csv", "later.parquet", "--tokens", "later-tokens.csv")
    assert "'asof' is not in the table" in invoke("predict", "m", *later, code=2).stderr
    invoke("predict", "m", *later, "--reference-date", "when")
    outputs = [parquet.read_table(name)["prediction"] for name in ("out.parquet", "later.parquet")]
    np.testing.assert_array_equal(*outputs)
    said = invoke("lens", "digits", *dated, "--no-report", code=2).stderr
    assert "only tables have columns to choose: 'digits' takes no reference_date" in said


def test_a_column_may_split_the_data(shop):
    output = invoke("fit", "samples.csv", "m", *READ, "--split", "part", *FAST).output
    assert "on the 8 sets that the data sets apart" in output
    assert "22 sets in" in output
    assert (
        "must say train or test"
        in invoke("fit", "samples.csv", "n", *READ, "--split", "town", code=2).stderr
    )
    said = invoke("fit", "samples.csv", "n", *READ, "--time", "nothing", code=2).stderr
    assert "'nothing' is not in the table" in said


def test_a_folder_of_series_is_one_data_set(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "series").mkdir()
    for part in ("TRAIN", "TEST"):
        series = [
            ",".join(f"{x:.3f}" for x in rng.normal(size=rng.integers(2, 6))) for _ in range(20)
        ]
        rows = "".join(f"{one}:{'ab'[i % 2]}\n" for i, one in enumerate(series))
        text = f"@univariate true\n@classLabel true a b\n@data\n{rows}"
        (tmp_path / "series" / f"Tiny_{part}.ts").write_text(text)
    output = invoke("fit", "series", "m", *FAST).output
    assert "on the 20 sets that the data sets apart" in output
    invoke("predict", "m", "series", "all.parquet")
    assert parquet.read_table("all.parquet").num_rows == 40
    invoke("predict", "m", "series/Tiny_TEST.ts", "test.parquet")
    predicted = [
        parquet.read_table(name)["prediction"].to_pylist()
        for name in ("all.parquet", "test.parquet")
    ]
    assert predicted[0][20:] == predicted[1]
