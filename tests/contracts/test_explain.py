"""`keyhole explain`: the columns of the table and the rows of the set, as the file writes them."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from paper import paper_regressor
from typer.testing import CliRunner

import keyhole as kh
from keyhole.cli._app import app
from keyhole.data.schema import Schema
from keyhole.estimators.evidence import (
    effects_of_columns,
    evidence_of_predictions,
    table_columns,
)
from keyhole.lab.written import written_set

runner = CliRunner()


@pytest.fixture
def shop(tmp_path, monkeypatch, seed):
    """Customers who leave if they have refunds of the web shop: a row per purchase."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng([43, seed])
    rows = []
    for customer in range(120):
        for _ in range(int(rng.integers(3, 7))):
            rows.append(
                {
                    "customer": f"c{customer}",
                    "amount": round(float(rng.normal(0, 40)), 2),
                    "shop": str(rng.choice(["web", "town"])),
                    "day": f"2024-0{rng.integers(1, 10)}-1{rng.integers(0, 10)}",
                    "age": 0.5 + customer,
                }
            )
    table = pd.DataFrame(rows)
    refund = table["amount"].clip(upper=0) * (table["shop"] == "web")
    table["left"] = np.where(refund.groupby(table["customer"]).transform("sum") < -40, "yes", "no")
    table.sample(frac=1.0, random_state=seed).to_csv("purchases.csv", index=False)
    options = {"set_id": "customer", "target": "left", "extras": ["age"]}
    data = kh.read_table("purchases.csv", keys=["amount", "shop", "day"], **options)
    model = kh.AttentionClassifier(200, random_state=0).fit(data.sets, data.target)
    kh.save(model, "model", schema=data.schema)
    return pd.read_csv("purchases.csv"), data, model


def explain(*arguments, code=0):
    result = runner.invoke(app, ["explain", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_an_effect_is_what_the_score_loses_with_the_column_at_its_training_mean(shop):
    _, data, model = shop
    columns = table_columns(data.schema, data.sets)
    assert [(c.name, c.of) for c in columns] == [
        ("amount", "rows"),
        ("shop", "rows"),
        ("day", "rows"),
        ("age", "sample"),
    ]
    sample = data.sets[:1]
    [effects] = effects_of_columns(model, sample, columns, evidence_of_predictions(model, sample))

    # the mean over sets of the share of their rows in each shop, put into every row
    sets = data.sets
    mean = np.mean(
        [keys.mean(axis=0) for keys in np.split(sets.tokens, sets.offsets[1:-1])], axis=0
    )
    changed = sample.tokens.copy()
    changed[:, 1:3] = mean[1:3]
    without_shop = model.decision_function(kh.SetBatch([changed], extras=sample.extras))
    sign = 1 if model.predict(sample)[0] == "yes" else -1
    expected = sign * (model.decision_function(sample) - without_shop)
    np.testing.assert_allclose(effects[:, 1], expected, rtol=1e-6)


def test_the_reason_is_before_decoys_that_are_correlated_with_it(seed):
    """The sum of the values of one kind; `benchmarks/explain.py` has labels that are drawn."""
    rng = np.random.default_rng([44, seed])
    kind = rng.choice([-1.0, 1.0], size=(300, 6))
    value = rng.normal(size=(300, 6))
    label = np.where(rng.random((300, 6)) < 0.7, kind, rng.choice([-1.0, 1.0], size=(300, 6)))
    code = 0.7 * value + np.sqrt(0.51) * rng.normal(size=(300, 6))
    sets = kh.SetBatch(np.stack([label, code, kind, value], axis=2))
    y = np.where(kind > 0, value, 0.0).sum(axis=1)
    model = kh.AttentionRegressor(200, random_state=0).fit(sets[:250], y[:250])
    new = sets[250:]
    largest = int(model.predict(new).argmax())
    sample = new[largest : largest + 1]
    columns = table_columns(Schema(4, False, ("label", "code", "kind", "value")), sample)
    [effects] = effects_of_columns(model, sample, columns, evidence_of_predictions(model, sample))
    order = [columns[c].name for c in np.argsort(-np.abs(effects[0]))]
    assert set(order[:2]) == {"kind", "value"}


def test_the_largest_come_first_with_values_and_rows_as_in_the_file(shop):
    table, data, model = shop
    sure = data.ids[model.decision_function(data.sets).argmax()]
    said = explain("model", "purchases.csv", "--set", sure)
    assert f"The model predicts yes for set {sure}. It was yes." in said
    sample = data.sets[data.ids == sure]
    columns = table_columns(data.schema, data.sets)
    [effects] = effects_of_columns(model, sample, columns, evidence_of_predictions(model, sample))
    in_order = [columns[c].name for c in np.argsort(-np.abs(effects[0]), kind="stable")]
    places = [said.index(f"│ {name} ") for name in in_order]
    assert places == sorted(places)

    # a row of the file for each row of the set, the strongest first
    rows = table.index[table["customer"] == sure]
    for k in rows:
        line = next(line for line in said.splitlines() if line.startswith(f"│ {k} "))
        assert f" {table['amount'][k]} " in line
        assert f" {table['day'][k]} " in line
    parts = evidence_of_predictions(model, sample)[0].keys[0]
    listed = [line.split()[1] for line in said.splitlines() if line.startswith("│ ")][-len(rows) :]
    assert listed == [str(rows[k]) for k in np.argsort(-np.abs(parts))]


def test_a_picture_is_drawn_whole_and_not_over_another_file(shop, tmp_path):
    arguments = ("model", "purchases.csv", "--set", "c7", "--out", "c7.svg")
    explain(*arguments)
    picture = (tmp_path / "c7.svg").read_text()
    assert picture.rstrip().endswith("</svg>")
    assert "'c7.svg' exists" in explain(*arguments, code=2)
    explain(*arguments, "--overwrite")
    assert "must name a picture" in explain(*arguments[:-1], "page", code=2)


def test_predict_adds_the_effects_of_columns(shop):
    _, data, model = shop
    places = ["model", "purchases.csv", "out.parquet"]
    result = runner.invoke(app, ["predict", *places, "--explain"])
    assert result.exit_code == 0, result.output
    table = pq.read_table("out.parquet")
    columns = table_columns(data.schema, data.sets)
    evidence = evidence_of_predictions(model, data.sets)
    [effects] = effects_of_columns(model, data.sets, columns, evidence)
    np.testing.assert_allclose(table["effect_shop"], effects[:, 1], rtol=1e-6, atol=1e-9)
    kh.save(model, "small", schema=data.schema, keep="predict")
    said = runner.invoke(app, ["predict", "small", "purchases.csv", "out2.parquet", "--explain"])
    assert "no effects of columns" in said.output
    assert "effect_shop" not in pq.read_table("out2.parquet").column_names


def test_several_numbers_have_an_account_each_and_other_models_are_refused(tmp_path, rng):
    sets = kh.SetBatch(rng.normal(size=(40, 3, 2)))
    y = np.stack([sets.tokens[::3, 0], sets.tokens[::3, 1]], axis=1)
    kh.save(paper_regressor(10, alpha=1.0, random_state=0).fit(sets, y), tmp_path / "model")
    kh.data.write_parquet(tmp_path / "in.parquet", [sets])
    said = explain(str(tmp_path / "model"), str(tmp_path / "in.parquet"), "--set", "3")
    assert "their effect to output 0" in said
    assert "their effect to output 1" in said
    assert "from 0 to 39" in explain(
        str(tmp_path / "model"), str(tmp_path / "in.parquet"), "--set", "40", code=2
    )
    features = kh.AttentionFeatures(4, random_state=0).fit(sets)
    kh.save(features, tmp_path / "features")
    assert "must predict to be explained" in explain(
        str(tmp_path / "features"), str(tmp_path / "in.parquet"), "--set", "3", code=2
    )


def written(path, n_keys, chosen="a", number=0, tokens=None, **options):
    schema = kh.read_table(path, tokens=tokens, **options).schema
    return written_set(path, tokens, schema, (chosen, number), n_keys)


def test_rows_with_a_missing_value_that_were_dropped_are_not_rows_of_the_set(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("set,x,colour,y\nb,1,red,0\na,2.50,,1\na,3,blue,1\na,,red,1\na,04.0,red,1\n")
    found = written(path, 2, set_id="set", target="y", missing="drop")
    assert found.numbers == [2, 4]
    assert found.rows == {"x": ["3", "04.0"], "colour": ["blue", "red"]}


def test_rows_of_the_role_query_are_no_rows_of_the_set(tmp_path):
    table = pa.table(
        {"set": ["a", "a", "a"], "role": ["query", "key", "key"], "x": [1.0, 2.0, 3.0]}
    )
    pq.write_table(table, tmp_path / "t.parquet")
    found = written(tmp_path / "t.parquet", 2, set_id="set", keys=["x"], target=())
    assert found.numbers == [1, 2]
    assert found.rows == {"x": ["2", "3"]}


def test_rows_in_a_table_of_their_own_and_columns_of_the_sample(tmp_path):
    (tmp_path / "s.csv").write_text("user,city,y\n7,Rome,0\n8,Oslo,1\n")
    (tmp_path / "t.csv").write_text("user,price\n8,1.20\n7,3\n8,5\n")
    found = written(
        tmp_path / "s.csv",
        2,
        chosen="8",
        tokens=str(tmp_path / "t.csv"),
        set_id="user",
        target="y",
        extras=["city"],
    )
    assert found.source == "t.csv"
    assert found.numbers == [0, 2]
    assert found.rows == {"price": ["1.20", "5"]}
    assert found.sample == {"city": "Oslo"}


def test_lists_are_rows_in_their_order(tmp_path):
    table = pa.table(
        {"x": [[1.0], [2.0, 3.0]], "day": [["2024-01-01"], ["2024-01-02", "2024-01-03"]]}
    )
    pq.write_table(table, tmp_path / "t.parquet")
    found = written(tmp_path / "t.parquet", 2, number=1, keys=["x", "day"], target=())
    assert found.source == "the lists in row 1 of t.parquet"
    assert found.rows == {"x": ["2", "3"], "day": ["2024-01-02", "2024-01-03"]}
