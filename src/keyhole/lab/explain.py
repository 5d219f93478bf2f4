"""One prediction taken apart.

A page with its keys as bars, its query, its interval and how novel it is.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole import __version__
from keyhole.estimators.evidence import Evidence, evidence_of_predictions
from keyhole.lab.report.document import Chart, Report, Row, Scalar, Section, Series, Table, Verdict

MAX_KEYS_LISTED = 200
"""Keys in the table of a page, those that add most first; the chart and its rows have all."""
MAX_COORDINATES_LISTED = 12
NOVEL = 0.99
"""Novelty above which a sample is named. By construction one in a hundred ordinary samples is as
far out, so that a single one proves no extrapolation.
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
    # what every key says, a section for each output
    keys = sample.sets.tokens
    coordinates = list(names)
    if len(coordinates) != keys.shape[1]:
        coordinates = [f"x{j}" for j in range(keys.shape[1])]
    evidence_of_outputs = evidence_of_predictions(model, sample)
    sections = []
    for number, evidence in enumerate(evidence_of_outputs):
        if evidence.labels is not None:
            words = _words_of_labels(evidence)
        else:
            words = _words_of_numbers(evidence, number, len(evidence_of_outputs))
        sections.append(_section(words, evidence, keys, coordinates))

    # the prediction, and how sure it is
    sureness, numbers = _sureness(model, sample, coverage)
    lead = f"The model predicts {_text(model.predict(sample)[0])}."
    if truth is not None:
        lead += f" It was {_text(truth)}."
    lead += f" {sureness}"

    # the query
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


@dataclass(frozen=True)
class _Words:
    """How a section speaks of its numbers: its titles, and the sentence that sums it up."""

    title: str
    of_chart: str
    of_positive: str
    of_negative: str
    sentence: str


def _words_of_labels(evidence: Evidence) -> _Words:
    """Positive numbers speak for the label that was predicted, negative ones for another."""
    assert evidence.labels is not None
    assert evidence.others is not None
    label = _text(evidence.labels[0])
    other = _text(evidence.others[0])
    parts = evidence.keys[0]
    best = int(np.argmax(parts))
    worst = int(np.argmin(parts))
    n_for = int((parts > 0).sum())
    n_against = int((parts < 0).sum())

    # counts, then the one key that says most on either side
    sentence = (
        f"{n_for} of {len(parts)} keys speak for {label} ({parts[parts > 0].sum():.4g} in all), "
        f"{n_against} for {other} ({parts[parts < 0].sum():.4g}){_sum_of_extras(evidence)}: "
        f"{_total(evidence):.4g} for {label}."
    )
    if n_for:
        sentence += f" Key {best + 1} speaks most for it, {parts[best]:.4g}."
    if n_against:
        sentence += f" Key {worst + 1} speaks most against it, {parts[worst]:.4g}."
    return _Words(
        title=f"What speaks for {label}, and what for {other}",
        of_chart=f"How much each key speaks for {label}",
        of_positive=f"The keys that speak for {label}",
        of_negative=f"The keys that speak for {other}",
        sentence=sentence,
    )


def _words_of_numbers(evidence: Evidence, output: int, n_outputs: int) -> _Words:
    """Numbers add up to the prediction."""
    title = "What the keys add"
    if n_outputs > 1:
        title += f" to output {output}"
    parts = evidence.keys[0]
    best = int(np.argmax(parts))
    worst = int(np.argmin(parts))
    sentence = (
        f"The {len(parts)} keys add {parts.sum():.4g}{_sum_of_extras(evidence)}: "
        f"{_total(evidence):.4g} in all. Key {best + 1} adds most, {parts[best]:.4g}; "
        f"key {worst + 1} least, {parts[worst]:.4g}."
    )
    return _Words(
        title=title,
        of_chart="What each key adds to the prediction",
        of_positive="The keys that raise the prediction",
        of_negative="The keys that lower the prediction",
        sentence=sentence,
    )


def _sum_of_extras(evidence: Evidence) -> str:
    """What all extras add, in words; nothing where there are none."""
    if evidence.extras.shape[1] == 0:
        return ""
    return f", its extras add {evidence.extras[0].sum():.4g}"


def _total(evidence: Evidence) -> float:
    """What all keys and extras say together."""
    return float(evidence.keys[0].sum() + evidence.extras[0].sum())


def _section(words: _Words, evidence: Evidence, keys: np.ndarray, names: list[str]) -> Section:
    """A chart of all keys, and tables of those on either side, the strongest first."""
    parts = evidence.keys[0]
    rows: list[dict[str, Scalar]] = [
        {"key": k + 1, "adds": float(c), **{n: float(v) for n, v in zip(names, key, strict=True)}}
        for k, (c, key) in enumerate(zip(parts, keys, strict=True))
    ]
    shown = [
        ", ".join(f"{n} {v:.3g}" for n, v in list(zip(names, key, strict=True))[:4]) for key in keys
    ]
    chart = Chart(
        name="keys",
        title=words.of_chart,
        x_label="key",
        y_label="adds",
        series=steps("keys", parts.tolist(), "attention", shown),
        rows=rows,
    )
    blocks: list[Chart | Table] = [chart]

    # the keys on either side
    strongest_first = np.argsort(-np.abs(parts), kind="stable")
    positive = [k for k in strongest_first if parts[k] >= 0][:MAX_KEYS_LISTED]
    negative = [k for k in strongest_first if parts[k] < 0][:MAX_KEYS_LISTED]
    sides = (("positive", words.of_positive, positive), ("negative", words.of_negative, negative))
    for slug, title, numbers in sides:
        listed: list[Row] = [
            dict(list(rows[k].items())[: 2 + MAX_COORDINATES_LISTED]) for k in numbers
        ]
        if listed:
            blocks.append(Table(slug, title, listed, note=_more(len(names), "coordinates")))
    if evidence.extras.shape[1]:
        columns: list[Row] = [
            {"column": j, "adds": float(v)} for j, v in enumerate(evidence.extras[0])
        ]
        blocks.append(Table("extras", "What its extras add", columns))
    claim = (
        "A layer is a sum over keys, so that these numbers add up exactly; every key has an equal "
        "share of the intercept. They say how this model made this prediction, and nothing about "
        "causes; whether one is also what would be missing without its key depends on the pooling "
        "(see model.contributions, which leaves the intercept out)."
    )
    return Section("keys", words.title, claim, blocks, Verdict("information", words.sentence))


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
    if hasattr(model, "training_"):
        novelty = float(model.novelty(sample)[0])
        says += f" Its novelty is {novelty:.2f}, a rank among the training sets"
        says += (
            ": one in a hundred ordinary sets is as far out; the model may extrapolate."
            if novelty > NOVEL
            else "."
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
