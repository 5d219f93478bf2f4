"""A scoring service: JSON rows in; predictions, intervals and contributions out.

    python examples/service.py model.keyhole --port 8000
    curl -d '[{"set": 1, "x": 0.5, "y": 2.0}]' localhost:8000/score

Rows are those of a table like the one the model was fitted to, read by the schema that
is stored with the model. A row that does not fit gets status 422 and a message that
says what is wrong with it. The service needs `pip install ".[lab]"`, which has
Starlette and uvicorn.
"""

import argparse
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import keyhole as kh
from keyhole.estimators.evidence import evidence_of_predictions

MOST_ROWS = 10_000
N_KEYS_NAMED = 3


def service(path: str, coverage: float = 0.9) -> Starlette:
    """The application for one model file."""
    model, schema = kh.load(path, return_schema=True)

    def answers(body: bytes) -> list[dict[str, Any]]:
        data = schema.read(table_of_rows(body))
        return [answer(model, data, i, coverage) for i in range(len(data))]

    async def score(request: Request) -> JSONResponse:
        body = await request.body()
        try:
            return JSONResponse(await run_in_threadpool(answers, body))
        except (ValueError, TypeError) as error:
            return JSONResponse({"error": str(error)}, status_code=422)

    return Starlette(routes=[Route("/score", score, methods=["POST"])])


def table_of_rows(body: bytes) -> pa.Table:
    """The rows of a request as a table; a column that a row lacks is empty there."""
    rule = f"a request must be a JSON list of 1 to {MOST_ROWS} objects, its rows"
    try:
        rows = json.loads(body)
    except RecursionError:
        raise ValueError(f"{rule}: this one is nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{rule}: this one is no JSON ({error}).") from None
    is_rows = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    if not is_rows or not 0 < len(rows) <= MOST_ROWS:
        raise ValueError(f"{rule}.")
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pa.array([row.get(name) for row in rows])
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(
                f"column {name!r} must hold values of one kind: {error}."
            ) from None
    return pa.table(columns)


def answer(model: Any, data: Any, i: int, coverage: float) -> dict[str, Any]:
    """What is said of one sample."""
    sample = data.sets[i : i + 1]
    found: dict[str, Any] = {"prediction": model.predict(sample)[0].item()}
    if data.ids is not None:
        found["id"] = data.ids[i].item()

    # how sure: plausible labels, or the ends of an interval, null where one is infinite
    if hasattr(model, "classes_"):
        found["plausible"] = model.classes_[
            model.predict_set(sample, coverage)[0]
        ].tolist()
    else:
        ends = model.predict_interval(sample, coverage)[0].tolist()
        found["interval"] = [end if math.isfinite(end) else None for end in ends]

    # the keys that say most, for the prediction or against it
    evidence = evidence_of_predictions(model, sample)[0].keys[0]
    strongest = np.argsort(-np.abs(evidence))[:N_KEYS_NAMED]
    found["keys"] = [{"key": int(k), "evidence": float(evidence[k])} for k in strongest]
    return found


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    uvicorn.run(service(arguments.model), host="127.0.0.1", port=arguments.port)
