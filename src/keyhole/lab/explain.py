"""One prediction taken apart.

A page with its keys as bars, its query, its interval and how novel it is.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np

from keyhole import __version__
from keyhole.lab.report.document import Chart, Report, Row, Scalar, Section, Series, Table, Verdict

MAX_KEYS_LISTED = 200
"""Keys in the table of a page, those that add most first; the chart and its rows have all."""
MAX_COORDINATES_LISTED = 12
NOVEL = 0.99
"""Novelty above which a prediction is an extrapolation: one in a hundred training samples is as far
out.
"""


def steps(name: str, values: Sequence[float], role: str, hover: Sequence[str]) -> list[Series]:
    """Values as bars of width 0.8 around 1, 2, …: an area with its outline.

    >>> [series.look for series in steps("adds", [1.0, -0.5], "attention", ["a", "b"])]
    ['band', 'thin']
    >>> steps("adds", [1.0], "attention", ["a"])[1].x
    [0.6, 0.6, 1.4, 1.4]
    """
    x = [k + side for k in range(1, len(values) + 1) for side in (-0.4, -0.4, 0.4, 0.4)]
    y = [level for value in values for level in (0.0, float(value), float(value), 0.0)]
    words = [text for text in hover for _ in range(4)]
    area = Series(
        name, x, y, [min(v, 0.0) for v in y], [max(v, 0.0) for v in y], "band", role, words
    )
    return [area, Series(name, x, y, look="thin", role=role, hover=words)]


def explanation(
    model: Any, sample: Any, name: str, names: Sequence[str], truth: Any, coverage: float
) -> Report:
    """The report on one sample, a batch of one, under a fitted attention or norm-ball estimator.

    ``names`` are those of coordinates, ``truth`` is the outcome, None where nobody knows it.
    """
    keys = sample.sets.tokens
    names = list(names) if len(names) == keys.shape[1] else [f"x{j}" for j in range(keys.shape[1])]
    parts, extras = model.contributions(sample)[0], model.extras_contributions(sample)[0]
    sections = []
    for title, column in _columns(model, sample):
        own = parts if parts.ndim == 1 else parts[:, column]
        beside = extras if extras.ndim == 1 else extras[:, column]
        base = float(np.ravel(model.intercept_)[column])
        sections.append(_section(title, keys, names, own, beside, base))
    says, numbers = _sureness(model, sample, coverage)
    predicted = model.predict(sample)[0]
    known = "" if truth is None else f" It was {_text(truth)}."
    lead = f"The model predicts {_text(predicted)}.{known} {says}"
    if sample.query is not None:
        rows: list[Row] = [
            {"set": i, **{f"x{j}": float(v) for j, v in enumerate(q[:MAX_COORDINATES_LISTED])}}
            for i, q in enumerate(sample.query)
        ]
        table = Table("query", "The query", rows, note=_more(sample.query.shape[1], "coordinates"))
        sections.append(
            Section("query", "What was asked", "The scores of keys depend on the query.", [table])
        )
    provenance = {
        "keyhole": __version__,
        "Python": platform.python_version(),
        "model": type(model).__name__,
        **numbers,
    }
    return Report(f"Why {name} is predicted so", lead, sections, provenance)


def _columns(model: Any, sample: Any) -> list[tuple[str, int]]:
    """Outputs to explain.

    Every one of a regression, of a classification the score of the label that won.
    """
    if not hasattr(model, "classes_"):
        n = np.size(model.intercept_)
        return [
            ("What the keys add" if n == 1 else f"What the keys add to output {j}", j)
            for j in range(n)
        ]
    if len(model.classes_) == 2:
        return [(f"What speaks for {model.classes_[1]}, and against {model.classes_[0]}", 0)]
    won = int(np.argmax(model.decision_function(sample)[0]))
    return [(f"What speaks for {model.classes_[won]}", won)]


def _section(
    title: str,
    keys: np.ndarray,
    names: list[str],
    parts: np.ndarray,
    extras: np.ndarray,
    base: float,
) -> Section:
    """A chart of all keys and a table of those that add most."""
    rows: list[dict[str, Scalar]] = [
        {"key": k + 1, "adds": float(c), **{n: float(v) for n, v in zip(names, key, strict=True)}}
        for k, (c, key) in enumerate(zip(parts, keys, strict=True))
    ]
    shown = [
        ", ".join(f"{n} {v:.3g}" for n, v in list(zip(names, key, strict=True))[:4]) for key in keys
    ]
    chart = Chart(
        "keys", "What each key adds to the prediction", "key", "adds",
        steps("keys", parts.tolist(), "attention", shown), rows=rows,
    )  # fmt: skip
    most = np.argsort(-np.abs(parts))[:MAX_KEYS_LISTED]
    brief: list[Row] = [dict(list(rows[k].items())[: 2 + MAX_COORDINATES_LISTED]) for k in most]
    table = Table("most", "The keys that add most", brief, note=_more(len(names), "coordinates"))
    blocks: list[Chart | Table] = [chart, table]
    if len(extras):
        columns: list[Row] = [{"column": j, "adds": float(v)} for j, v in enumerate(extras)]
        blocks.append(Table("extras", "What its extras add", columns))
    total = base + float(parts.sum()) + float(extras.sum())
    sentence = (
        f"Without any key the model says {base:.4g}; its {len(parts)} keys add "
        f"{parts.sum():.4g}{f', its extras {extras.sum():.4g}' if len(extras) else ''}: "
        f"{total:.4g} in all. Key {most[0] + 1} adds most, {parts[most[0]]:.4g}."
    )
    claim = (
        "A layer is a sum over keys, so that these numbers add up exactly. They say how this model "
        "made this prediction, and nothing about causes; whether one is also what would be missing "
        "without its key depends on the pooling (see model.contributions)."
    )
    return Section("keys", title, claim, blocks, Verdict("information", sentence))


def _sureness(model: Any, sample: Any, coverage: float) -> tuple[str, dict[str, str]]:
    """Interval or set, and novelty, in words; nothing where a model has neither."""
    method = getattr(model, "interval_method", None)
    if method is None:
        return "", {}
    if hasattr(model, "classes_"):
        labels = model.classes_[model.predict_set(sample, coverage)[0]]
        says = (
            f"Labels that are plausible at {coverage:.0%}: "
            f"{', '.join(map(_text, labels)) or 'none'} ({method})."
        )
    else:
        ends = model.predict_interval(sample, coverage).reshape(-1, 2)
        spans = "; ".join(f"from {low:.4g} to {high:.4g}" for low, high in ends)
        says = f"At {coverage:.0%} coverage the outcome is expected {spans} ({method})."
    if method == "jackknife+":
        novelty = float(model.novelty(sample)[0])
        says += f" Its novelty is {novelty:.2f}, a rank among the training sets"
        says += (
            ": the model has seen nothing like it, and extrapolates." if novelty > NOVEL else "."
        )
    return says, {"coverage": f"{coverage:g}", "intervals": method}


def _text(value: Any) -> str:
    numbers = np.ravel(value)
    if numbers.dtype.kind == "f":
        return ", ".join(f"{v:.4g}" if math.isfinite(v) else str(v) for v in numbers)
    return ", ".join(str(v) for v in numbers)


def _more(count: int, what: str) -> str:
    return (
        f"The first {MAX_COORDINATES_LISTED} of {count} {what}."
        if count > MAX_COORDINATES_LISTED
        else ""
    )
