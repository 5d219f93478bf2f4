"""`keyhole predict`: Parquet to Parquet, never half-written."""

import os
import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from paper import paper_classifier, paper_regressor
from pyarrow import csv
from typer.testing import CliRunner

import keyhole as kh
from keyhole import state
from keyhole.cli._app import app
from keyhole.data import writer
from keyhole.data.writer import write_parquet

runner = CliRunner()


@pytest.fixture
def sets(seed):
    return kh.targets.sphere_sets(90, n_keys=4, dim=3, seed=seed)


@pytest.fixture
def files(sets, tmp_path):
    """An input of four row groups, and a model."""
    write_parquet(
        tmp_path / "in.parquet", [sets], row_group_size=25, extra={"id": np.arange(90) + 1000}
    )
    model = paper_regressor(10, random_state=0).fit(sets, sets.query[:, 0])
    kh.save(model, tmp_path / "model")
    return model, tmp_path


def invoke(folder, *options, code=0):
    arguments = [str(folder / name) for name in ("model", "in.parquet", "out.parquet")]
    result = runner.invoke(app, ["predict", *arguments, *options])
    assert result.exit_code == code, result.output
    return result


def test_predictions_follow_the_rows(files, sets):
    model, folder = files
    result = invoke(folder, "--id", "id")
    table = pq.read_table(folder / "out.parquet")
    np.testing.assert_allclose(table["prediction"], model.predict(sets), rtol=1e-12)
    assert table["id"].to_pylist() == list(range(1000, 1090))
    assert "90 predictions" in result.output
    assert "row groups" not in result.output  # no bar where there is no terminal


def test_an_interrupted_run_leaves_nothing(files, sets, monkeypatch):
    model, folder = files
    plain = type(model).predict
    before = sorted(os.listdir(folder))

    def interrupted(self, batch):
        if len(batch) == 15:  # the last row group
            raise KeyboardInterrupt
        return plain(self, batch)

    monkeypatch.setattr(type(model), "predict", interrupted)
    assert "interrupted" in invoke(folder, code=130).stderr
    assert sorted(os.listdir(folder)) == before


def test_an_existing_file_is_kept_unless_told(files):
    _, folder = files
    (folder / "out.parquet").write_text("precious")
    assert "--overwrite" in invoke(folder, code=2).stderr
    assert (folder / "out.parquet").read_text() == "precious"
    invoke(folder, "--overwrite")
    assert pq.read_table(folder / "out.parquet").num_rows == 90


def test_classes_have_probabilities(files, sets):
    _, folder = files
    label = np.where(sets.query[:, 0] > 0, "up", "down")
    model = paper_classifier(10, random_state=0).fit(sets, label)
    assert "--proba needs a classifier" in invoke(folder, "--proba", code=2).stderr
    kh.save(model, folder / "model", overwrite=True)
    invoke(folder, "--proba")
    table = pq.read_table(folder / "out.parquet")
    assert table.schema.names == ["prediction", "probability_down", "probability_up"]
    assert table["prediction"].to_pylist() == model.predict(sets).tolist()


def test_slips_are_refused(files):
    _, folder = files
    assert "'bags' is not in the table" in invoke(folder, "--keys", "bags", code=2).stderr
    assert "'name' is not in the table" in invoke(folder, "--id", "name", code=2).stderr


def test_copied_columns_are_not_lost_to_predictions(files, sets):
    _, folder = files
    extra = {name: np.arange(90) for name in ("prediction", "prediction_1", "probability_up")}
    write_parquet(folder / "in.parquet", [sets], row_group_size=25, extra=extra)
    words = "--id 'prediction' is also a column of the predictions"
    assert words in invoke(folder, "--id", "prediction", code=2).stderr
    assert not (folder / "out.parquet").exists()
    invoke(folder, "--id", "prediction_1", "--id", "probability_up")
    assert pq.read_table(folder / "out.parquet").schema.names == [
        "prediction_1",
        "probability_up",
        "prediction",
    ]
    kh.save(
        paper_regressor(10).fit(sets, sets.query[:, :2]),
        folder / "model",
        overwrite=True,
    )
    assert (
        "--id 'prediction_1' is also"
        in invoke(folder, "--overwrite", "--id", "prediction_1", code=2).stderr
    )
    label = np.where(sets.query[:, 0] > 0, "up", "down")
    kh.save(
        paper_classifier(10).fit(sets, label),
        folder / "model",
        overwrite=True,
    )
    chosen = ("--overwrite", "--proba", "--id", "probability_up")
    assert "--id 'probability_up' is also" in invoke(folder, *chosen, code=2).stderr


def test_row_groups_without_rows_are_passed_over(files, sets):
    model, folder = files
    table = pq.read_table(folder / "in.parquet")
    with pq.ParquetWriter(folder / "in.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table.slice(0, 40), table.slice(0, 0), table.slice(40)):
            writer.write_table(part)
    assert pq.ParquetFile(folder / "in.parquet").num_row_groups == 4
    invoke(folder, "--id", "id")
    np.testing.assert_array_equal(
        pq.read_table(folder / "out.parquet")["prediction"], model.predict(sets)
    )
    pq.write_table(table.slice(0, 0), folder / "in.parquet")
    assert "'in.parquet' has no rows" in invoke(folder, "--overwrite", code=2).stderr


def test_copied_columns_have_one_type(files, sets):
    _, folder = files
    (folder / "many").mkdir()
    write_parquet(folder / "many" / "a.parquet", [sets], extra={"id": np.arange(90)})
    write_parquet(folder / "many" / "b.parquet", [sets], extra={"id": np.arange(90).astype(str)})
    arguments = [str(folder / name) for name in ("model", "many", "out.parquet")]
    result = runner.invoke(app, ["predict", *arguments, "--id", "id"])
    assert result.exit_code == 2
    assert (
        "column 'id' must have one type: it is int64 in a.parquet and string in b.parquet"
        in result.stderr
    )


NAMES = ("model", "in.parquet", "out.parquet")


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_places_that_cannot_be_written(command, files):
    _, folder = files
    (folder / "folder").mkdir()
    (folder / "file").write_text("precious")
    first = ["predict", str(folder / "model"), str(folder / "in.parquet")]
    if command == "fit":
        first = [
            "fit",
            str(folder / "in.parquet"),
        ]  # without a target: the place is looked at before the data
    for place, words in (
        ("folder", "is a folder"),
        ("file/out", "Not a directory"),
        ("x" * 300, "File name too long"),
        (os.fsdecode(b"caf\xe9"), "must be text in UTF-8"),
    ):
        result = runner.invoke(app, [*first, str(folder / place), "--overwrite"])
        assert result.exit_code == 2, (place, result.output, result.exception)
        assert words in result.stderr, result.stderr
    assert (folder / "file").read_text() == "precious"
    for place in ("x" * 300, os.fsdecode(b"caf\xe9")):
        for given in ([place, "in.parquet"], ["model", place])[: 1 + (command == "predict")]:
            result = runner.invoke(
                app, [command, *(str(folder / name) for name in given), str(folder / "new")][:4]
            )
            assert result.exit_code == 2, (place, result.output, result.exception)
            assert isinstance(result.exception, SystemExit)


def test_inputs_are_not_outputs(files, sets):
    _, folder = files
    write_parquet(folder / "in.parquet", [(sets, sets.query[:, 0])])
    (folder / "link.parquet").symlink_to(folder / "in.parquet")
    before = {name: (folder / name).read_bytes() for name in ("model", "in.parquet")}
    for arguments in (
        ("predict", "model", "in.parquet", "in.parquet"),
        ("predict", "model", "link.parquet", "in.parquet"),
        ("predict", "model", "in.parquet", "model"),
        ("predict", "model", ".", "in.parquet"),
        ("fit", "in.parquet", "in.parquet"),
    ):
        places = [str(folder / name) for name in arguments[1:]]
        result = runner.invoke(app, [arguments[0], *places, "--overwrite"])
        assert result.exit_code == 2, (arguments, result.output)
        assert "must not be one of the files that are read" in result.stderr
    assert before == {name: (folder / name).read_bytes() for name in before}


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_devices_are_not_replaced(command, files):
    _, folder = files
    os.mkfifo(folder / "pipe")
    first = {"fit": ["in.parquet"], "predict": ["model", "in.parquet"]}[command]
    result = runner.invoke(
        app, [command, *(str(folder / name) for name in (*first, "pipe")), "--overwrite"]
    )
    assert result.exit_code == 2
    assert "is not an ordinary file" in result.stderr


def test_brackets_in_names_are_brackets(files, sets):
    _, folder = files
    write_parquet(folder / "in.parquet", [(sets, sets.query[:, 0])])
    result = runner.invoke(
        app, ["fit", str(folder / "in.parquet"), str(folder / "a[/b]"), "--n-heads", "4"]
    )
    assert result.exit_code == 0, result.exception
    assert "a[/b]" in result.output


@pytest.mark.parametrize("command", ["fit", "predict"])
def test_a_full_disk_is_said(command, files, sets, monkeypatch):
    """A limit on the size of files stands for the disk, from the moment when the output is
    written.
    """
    _, folder = files
    write_parquet(folder / "in.parquet", [(sets, sets.query[:, 0])], row_group_size=25)
    names = {"predict": NAMES, "fit": ("in.parquet", "new")}[command]
    place, name = {"predict": (writer, "write_tables"), "fit": (state, "save")}[command]
    plain, before = getattr(place, name), resource.getrlimit(resource.RLIMIT_FSIZE)
    files_before = sorted(os.listdir(folder))

    def full(*given, **options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
        try:
            return plain(*given, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(place, name, full)
    arguments = [
        command,
        *(str(folder / name) for name in names),
        *["--n-heads=4"] * (command == "fit"),
    ]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.exception
    assert "File too large" in result.stderr
    assert sorted(os.listdir(folder)) == files_before


def test_sets_unlike_those_of_the_fit_are_refused(files, seed):
    _, folder = files
    write_parquet(folder / "in.parquet", [kh.targets.sphere_sets(5, n_keys=4, dim=2, seed=seed)])
    assert (
        "tokens must have the 3 coordinates the model was fitted to: got 2"
        in invoke(folder, code=2).stderr
    )


def test_from_one_row_per_token_to_predictions(tmp_path, rng):
    """`keyhole fit` remembers its columns, and `keyhole predict` reads the next table the same
    way.
    """
    rows = ["basket,a,b,price"]
    for i in range(60):
        price = rng.normal()
        rows += [f"{i},{rng.normal() + price},{rng.normal()},{price}" for _ in range(1 + i % 4)]
    (tmp_path / "in.csv").write_text("\n".join(rows) + "\n")
    arguments = ["--set", "basket", "--keys", "a,b", "--target", "price", "--n-heads", "20"]
    done = runner.invoke(
        app, ["fit", str(tmp_path / "in.csv"), str(tmp_path / "model"), *arguments]
    )
    assert done.exit_code == 0, done.output
    done = runner.invoke(
        app, ["predict", *(str(tmp_path / n) for n in ("model", "in.csv", "out.parquet"))]
    )
    assert done.exit_code == 0, done.output
    sets = kh.read_table(tmp_path / "in.csv", set_id="basket", keys="a,b", target="price").sets
    np.testing.assert_array_equal(
        pq.read_table(tmp_path / "out.parquet")["prediction"],
        kh.load(tmp_path / "model").predict(sets),
    )
    done = runner.invoke(
        app, ["predict", *(str(tmp_path / n) for n in ("model", "missing.csv", "other.parquet"))]
    )
    assert done.exit_code == 2


def shapes(rng, n=30):
    """The same kinds of sets in every form that `keyhole fit` reads: file name, table, options."""
    keys = [rng.normal(size=(1 + i % 3, 2)) for i in range(n)]
    query = rng.normal(size=(n, 2))
    y = pa.array(query[:, 0] + [k[:, 1].mean() for k in keys])
    lists = {"a": [k[:, 0].tolist() for k in keys], "b": [k[:, 1].tolist() for k in keys], "y": y}
    asked = {"q0": query[:, 0], "q1": query[:, 1]}
    gaps = {"keys": [[*k.tolist(), None, [1.0, None]] for k in keys[:-1]] + [None], "y": y}
    rows = [(i, *t, *query[i], y[i].as_py()) for i, k in enumerate(keys) for t in k]
    names = ("basket", "a", "b", "q0", "q1", "price")
    tokens = {name: [row[j] for row in rows] for j, name in enumerate(names)}
    chosen = ("--set", "basket", "--keys", "a,b", "--query", "q0,q1", "--target", "price")
    flat = {"keys": [k.ravel().tolist() for k in keys], "y": y}
    return {
        "a list per coordinate": ("in.parquet", lists, ()),
        "query columns": ("in.parquet", {**lists, **asked}, ("--query", "q0,q1")),
        "dropped gaps": ("in.parquet", gaps, ("--missing", "drop")),
        "arrow stream": ("in.arrow", lists, ()),
        "flat lists": ("in.parquet", flat, ("--dim", "2")),
        "tokens": ("in.parquet", tokens, chosen),
        "tokens of a stream": ("in.arrow", tokens, chosen),
        "csv": ("in.csv", tokens, chosen),
    }


@pytest.mark.parametrize("shape", shapes(np.random.default_rng(0)))
def test_whatever_fit_reads_predict_reads(shape, rng, tmp_path):
    name, columns, options = shapes(rng)[shape]
    table = pa.table(columns)
    if name.endswith(".parquet"):
        pq.write_table(table, tmp_path / name, row_group_size=7)
    elif name.endswith(".csv"):
        csv.write_csv(table, tmp_path / name)
    else:
        with (
            pa.OSFile(str(tmp_path / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table, max_chunksize=7)
    places = [str(tmp_path / n) for n in ("model", name, "out.parquet")]
    done = runner.invoke(app, ["fit", places[1], places[0], *options, "--n-heads", "5"])
    assert done.exit_code == 0, done.output
    done = runner.invoke(app, ["predict", *places])
    assert done.exit_code == 0, done.output
    saved = state.read_model(tmp_path / "model")
    data = kh.read_table(tmp_path / name, **dict(saved.schema.columns))
    found = pq.read_table(tmp_path / "out.parquet")
    np.testing.assert_allclose(found["prediction"], saved.estimator.predict(data.sets), rtol=1e-12)
    if "basket" in columns:  # predictions say which set they are for
        names = [str(i) if name.endswith(".csv") else i for i in range(30)]
        assert found["basket"].to_pylist() == names
        assert found.column_names == ["basket", "prediction"]


def test_gaps_of_new_data_are_dropped_where_asked(files, sets):
    model, folder = files
    table = pq.read_table(folder / "in.parquet")
    rows = [[*row[:-1], [np.nan] * 3] for row in table["keys"].to_pylist()]
    pq.write_table(table.set_column(0, "keys", pa.array(rows)), folder / "in.parquet")
    assert "--missing drop" in invoke(folder, code=2).stderr
    invoke(folder, "--missing", "drop")
    few = kh.SetBatch([s.tokens[:-1] for s in sets], sets.query)
    np.testing.assert_array_equal(
        pq.read_table(folder / "out.parquet")["prediction"], model.predict(few)
    )


def test_columns_of_tokens_are_copied_where_a_set_has_one_value(tmp_path):
    text = "set,x,shop,day,target\n" + "".join(
        f"{i // 2},{i % 5},s{i // 2},{i},{i // 2}\n" for i in range(20)
    )
    (tmp_path / "in.csv").write_text(text)
    places = [str(tmp_path / n) for n in ("model", "in.csv", "out.parquet")]
    done = runner.invoke(app, ["fit", places[1], places[0], "--keys", "x", "--n-heads", "3"])
    assert done.exit_code == 0, done.output
    done = runner.invoke(app, ["predict", *places, "--id", "shop"])
    assert done.exit_code == 0, done.output
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["shop"].to_pylist() == [f"s{i}" for i in range(10)]
    done = runner.invoke(app, ["predict", *places, "--id", "day", "--overwrite"])
    assert "'day' must be the same in all rows of a set: row 1 of in.csv says 1" in done.stderr


def test_intervals_novelty_and_what_each_key_adds(files, sets):
    model, folder = files
    result = invoke(folder, "--interval", "0.8", "--explain")
    table = pq.read_table(folder / "out.parquet")
    ends = model.predict_interval(sets, 0.8)
    np.testing.assert_allclose(np.stack([table["lower"], table["upper"]], axis=1), ends, rtol=1e-9)
    np.testing.assert_allclose(
        table["novelty"], model.novelty(sets), atol=0.02
    )  # ranks, which rounding may turn
    parts = table["evidence"].to_pylist()
    np.testing.assert_allclose(np.sum(parts, axis=1), table["prediction"], rtol=1e-9)
    assert "extrapolates" not in result.output  # the training sets are like the training sets
    far = kh.SetBatch(50 * sets.tokens.reshape(90, 4, 3), sets.query)
    write_parquet(folder / "in.parquet", [far])
    assert (
        "warning: 90 of 90 sets are more novel"
        in invoke(folder, "--interval", "0.8", "--overwrite").output
    )
    kh.save(model, folder / "model", keep="predict", overwrite=True)
    assert "plain jackknife" in invoke(folder, "--interval", "0.8", "--overwrite").output
    assert "novelty" not in pq.read_table(folder / "out.parquet").column_names
    ball = kh.NormBallRegressor(5, group_radius=1.0, ball_radius=1.0, random_state=0).fit(
        sets, sets.query[:, 0]
    )
    kh.save(ball, folder / "model", overwrite=True)
    assert (
        "--interval needs an attention"
        in invoke(folder, "--interval", "0.8", "--overwrite", code=2).output
    )


def test_keys_keep_their_ids(tmp_path):
    """One row per token, in any order; a table of tokens of its own; lists beside lists: parts
    stand as the ids do.
    """
    names = [f"{'ab'[i % 2]}{i}" for i in range(40)]
    rows = {
        "set": [i * 7 % 10 for i in range(40)],
        "x": [float(i % 9) for i in range(40)],
        "name": names,
    }
    both = pa.table({**rows, "target": [float(s) for s in rows["set"]]})
    sets = list(dict.fromkeys(rows["set"]))
    grouped = {s: [i for i in range(40) if rows["set"][i] == s] for s in sets}
    lists = {
        "keys": [[[rows["x"][i]] for i in grouped[s]] for s in sets],
        "target": [float(s) for s in sets],
    }
    lists["name"] = [[names[i] for i in grouped[s]] for s in sets]
    pq.write_table(both, tmp_path / "in.parquet")
    pq.write_table(both.drop_columns(["target"]), tmp_path / "tokens.parquet")
    pq.write_table(pa.table({"set": sets, "target": lists["target"]}), tmp_path / "samples.parquet")
    pq.write_table(pa.table(lists), tmp_path / "lists.parquet")
    expected = None
    for source, more in (
        ("in.parquet", ["--keys", "x", "--set", "set"]),
        (
            "samples.parquet",
            ["--keys", "x", "--set", "set", "--tokens", str(tmp_path / "tokens.parquet")],
        ),
        ("lists.parquet", ["--keys", "keys"]),
    ):
        places = [str(tmp_path / n) for n in (source, "model")]
        fit = [
            "fit",
            *places,
            *more,
            "--n-heads",
            "3",
            "--task",
            "regression",
            "--target",
            "target",
            "--overwrite",
        ]
        done = runner.invoke(app, fit)
        assert done.exit_code == 0, done.output
        out = tmp_path / f"out-{source}"
        ask = [
            "predict",
            places[1],
            places[0],
            str(out),
            *more[4:],
            "--explain",
            "--key-id",
            "name",
        ]
        done = runner.invoke(app, ask)
        assert done.exit_code == 0, done.output
        found = pq.read_table(out)
        assert found["name"].to_pylist() == lists["name"]
        parts = found["evidence"].to_pylist()
        assert [len(part) for part in parts] == [len(ids) for ids in lists["name"]]
        expected = parts if expected is None else expected
        np.testing.assert_allclose(np.concatenate(parts), np.concatenate(expected), rtol=1e-9)
    done = runner.invoke(app, [*ask[:-1], "target", "--overwrite"])
    assert "'target' must have an id for each key" in done.output


def test_plausible_labels_and_what_speaks_for_the_one_that_won(sets, tmp_path):
    y = np.array(["a", "b", "c"])[np.argsort(np.argsort(sets.query[:, 0])) // 30]
    model = kh.AttentionClassifier(10, random_state=0, alpha=1.0).fit(sets, y)
    kh.save(model, tmp_path / "model")
    write_parquet(tmp_path / "in.parquet", [sets])
    invoke(tmp_path, "--interval", "0.9", "--explain", "--proba")
    table = pq.read_table(tmp_path / "out.parquet")
    expected = [model.classes_[row].tolist() for row in model.predict_set(sets, 0.9)]
    assert table["labels"].to_pylist() == expected
    # the lead of the label that won over the second
    scores = np.sort(model.decision_function(sets), axis=1)
    leads = np.sum(table["evidence"].to_pylist(), axis=1)
    np.testing.assert_allclose(leads, scores[:, 2] - scores[:, 1], rtol=1e-9, atol=1e-12)
