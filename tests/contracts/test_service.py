"""The scoring service of examples/: answers, and what it says of rows that do not fit."""

import asyncio
import importlib.util
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from paper import paper_classifier, paper_regressor

import keyhole as kh

pytest.importorskip("starlette")
EXAMPLE = Path(__file__).parents[2] / "examples" / "service.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_service", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def table(seed):
    """20 sets of two tokens with a number and a colour."""
    rng = np.random.default_rng([33, seed])
    colours = rng.choice(["blue", "red"], 40)
    colours[:2] = ["blue", "red"]
    return pd.DataFrame(
        {
            "set": np.repeat(np.arange(20), 2),
            "x": rng.normal(size=40),
            "colour": colours,
            "target": np.repeat(rng.normal(size=20), 2),
        }
    )


def post(application, body, path="/score"):
    """Status and answer of one request, without a server."""
    messages = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
    }

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        messages.append(message)

    asyncio.run(application(scope, receive, send))
    status = messages[0]["status"]
    content = b"".join(message.get("body", b"") for message in messages)
    return status, json.loads(content) if content[:1] in (b"[", b"{") else content


def rows_of(table):
    return json.dumps(table.drop(columns="target").to_dict("records")).encode()


def test_a_regressor_answers_with_interval_and_keys(example, table, tmp_path):
    data = kh.read_table(table)
    model = paper_regressor(5, alpha=0.1, random_state=0).fit(data.sets, data.target)
    kh.save(model, tmp_path / "model", schema=data.schema)
    status, answers = post(example.service(str(tmp_path / "model"), 0.8), rows_of(table))
    assert status == 200
    np.testing.assert_allclose([a["prediction"] for a in answers], model.predict(data.sets))
    ends = model.predict_interval(data.sets, 0.8)
    np.testing.assert_allclose([a["interval"] for a in answers], ends)
    assert [a["id"] for a in answers] == list(range(20))
    totals = [sum(key["evidence"] for key in a["keys"]) for a in answers]
    np.testing.assert_allclose(totals, model.predict(data.sets))


def test_a_classifier_answers_with_plausible_labels(example, table, tmp_path):
    data = kh.read_table(table)
    labels = np.where(data.target > 0, "up", "down")
    model = paper_classifier(5, alpha=0.1, random_state=0).fit(data.sets, labels)
    kh.save(model, tmp_path / "model", schema=data.schema)
    _, answers = post(example.service(str(tmp_path / "model")), rows_of(table[:2]))
    sample = data.sets[:1]
    assert answers[0]["prediction"] == model.predict(sample)[0]
    assert answers[0]["plausible"] == model.classes_[model.predict_set(sample)[0]].tolist()


def test_rows_that_do_not_fit_get_the_message_of_the_schema(example, table, tmp_path):
    data = kh.read_table(table)
    model = paper_regressor(5, alpha=0.1, random_state=0).fit(data.sets, data.target)
    kh.save(model, tmp_path / "model", schema=data.schema)
    application = example.service(str(tmp_path / "model"))
    cases = {
        b"no json": "a JSON list of 1 to 10000 objects, its rows: this one is no JSON (Expecting",
        100_000 * b"[": "nested too deeply",
        b"[]": "a JSON list of 1 to",
        b"[1, 2]": "a JSON list of 1 to",
        b'{"x": 1}': "a JSON list of 1 to",
        b'[{"set": 1, "x": 2.0}]': "'colour' is not in the table. It has 'set'",
        b'[{"set": 1, "x": 2.0, "colour": "mauve"}]': "mauve",
        b'[{"set": 1, "x": "far", "colour": "red"}]': "'x'",
        b'[{"set": 1, "x": null, "colour": "red"}]': "'x' is missing in row 0",
        b'[{"set": 1, "x": [1], "colour": "red"}]': "'x'",
        b'[{"set": 1, "x": 1, "colour": "red"}, {"set": 1, "x": {}, "colour": "red"}]': "'x'",
        b'[{"set": 1, "x": 123456789012345678901234567890, "colour": "red"}]': "'x'",
        b'[{"set": 1, "x": 1e999, "colour": "red"}]': "'x'",
    }
    for body, message in cases.items():
        status, answer = post(application, body)
        assert status == 422, body
        assert message in answer["error"], body
    assert post(application, rows_of(table))[0] == 200, "it still answers"
