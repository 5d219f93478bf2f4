"""One prediction taken apart: which columns of the table made it, and which rows of the set.

The effect of a column, and what a row adds, are those of `keyhole.estimators.evidence`.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from keyhole._files import write_whole
from keyhole.data.schema import Schema
from keyhole.estimators.evidence import (
    NOVEL,
    Evidence,
    effects_of_columns,
    evidence_of_predictions,
    table_columns,
)
from keyhole.lab.written import MISSING, WrittenSet, as_text

MAX_ROWS = 10
"""Rows that are listed, those of largest contribution; `keyhole predict --explain` writes all."""
MAX_CATEGORIES = 3
MAX_NUMBERS = 3
MAX_LABEL = 50
"""Characters of a label in a picture, which has room for no more."""


@dataclass(frozen=True)
class Account:
    """What one output of a prediction is made of: columns and rows, the largest first.

    Attributes
    ----------
    speaks : str
        What a number is added to: "for left, against stayed", or "to the prediction".
    of_rows : str
        What the rows are rows of, and how many there are.
    columns : list of (name, effect, what the set has in it)
        Empty where the model has no training samples, whose means effects are measured from.
    rows : list of (number in the file, what it adds, its values by column)
    """

    speaks: str
    of_rows: str
    columns: list[tuple[str, float, str]]
    rows: list[tuple[str, float, dict[str, str]]]


@dataclass(frozen=True)
class Explanation:
    """A prediction in words, and an account for each of its outputs."""

    name: str
    sentence: str
    accounts: list[Account] = field(default_factory=list)


def explain_prediction(
    model: Any,
    sample: Any,
    schema: Schema,
    written: WrittenSet | None,
    name: str,
    truth: Any,
    coverage: float,
) -> Explanation:
    """Take apart the prediction of one sample, a batch of one, under a fitted estimator.

    ``written`` is the set as its file writes it, None for data without columns; ``truth`` is the
    outcome, None where nobody knows it.
    """
    # the prediction, and how sure it is
    sentence = f"The model predicts {_words(model.predict(sample)[0])} for {name}."
    if truth is not None:
        sentence += f" It was {_words(truth)}."
    sentence += _sureness(model, sample, coverage)

    # its columns and its rows
    columns = table_columns(schema, sample)
    if written is None:
        written = _numbers_as_written(sample, columns)
    evidence_of_outputs = evidence_of_predictions(model, sample)
    effects_of_outputs = effects_of_columns(model, sample, columns, evidence_of_outputs)
    accounts = []
    for number, evidence in enumerate(evidence_of_outputs):
        effects: list[tuple[str, float, str]] = []
        if effects_of_outputs is not None:
            for column, effect in zip(columns, effects_of_outputs[number][0], strict=True):
                label = column.name if column.of != "query" else f"{column.name} (query)"
                if column.of == "rows":
                    values = summary(written.rows.get(column.name, []))
                else:
                    values = written.sample.get(column.name, "")
                effects.append((label, float(effect), values))
        effects.sort(key=lambda one: -abs(one[1]))
        accounts.append(
            Account(
                speaks=_speaks(evidence, number, len(evidence_of_outputs)),
                of_rows=f"{len(written.numbers)} rows, of {written.source}",
                columns=effects,
                rows=_strongest_rows(evidence, written, [name for name, _, _ in effects]),
            )
        )
    return Explanation(name=name, sentence=sentence, accounts=accounts)


def _numbers_as_written(sample: Any, columns: Sequence[Any]) -> WrittenSet:
    """Data without columns: its keys and their coordinates, as numbers."""
    sets = sample.sets
    rows = {}
    values = {}
    for column in columns:
        if column.of == "rows":
            rows[column.name] = [_list_words(key[column.coordinates]) for key in sets.tokens]
        elif column.of == "query":
            values[column.name] = _list_words(sets.query[0, column.coordinates])
        else:
            values[column.name] = _list_words(sample.extras[0, column.coordinates])
    return WrittenSet("the set", list(range(len(sets.tokens))), rows, values)


def _list_words(numbers: np.ndarray) -> str:
    """The numbers of a column of lists in one row, the first of them."""
    words = ", ".join(as_text(float(number)) for number in numbers[:MAX_NUMBERS])
    return words if len(numbers) <= MAX_NUMBERS else f"{words}, …"


def summary(cells: Sequence[str]) -> str:
    """What the rows of a set have in one column: a range of numbers or dates, or counts of text.

    >>> summary(["3", "12", "-1"]), summary(["web", "app", "web"]), summary(["–", "2.5"])
    ('-1 to 12', 'web 2×, app', '2.5, – 1×')
    >>> summary(["2024-11-05", "2024-02-01"])
    '2024-02-01 to 2024-11-05'
    """
    present = [cell for cell in cells if cell != MISSING]
    ordered = _in_order(present)
    if ordered is None or not present:
        counts = Counter(cells).most_common()
        words = ", ".join(
            cell if count == 1 else f"{cell} {count}×" for cell, count in counts[:MAX_CATEGORIES]
        )
        return words if len(counts) <= MAX_CATEGORIES else f"{words}, …"
    words = ordered[0]
    if ordered[-1] != ordered[0]:
        words += f" to {ordered[-1]}"
    n_missing = len(cells) - len(present)
    return words if not n_missing else f"{words}, {MISSING} {n_missing}×"


def _in_order(cells: Sequence[str]) -> list[str] | None:
    """Numbers, or dates, by size; None of other texts."""
    kinds: tuple[Callable[[str], Any], ...] = (float, datetime.fromisoformat)
    for kind in kinds:
        with contextlib.suppress(ValueError):
            return sorted(cells, key=kind)
    return None


def _speaks(evidence: Evidence, output: int, n_outputs: int) -> str:
    """What positive numbers do."""
    if evidence.labels is not None and evidence.others is not None:
        return f"for {_words(evidence.labels[0])}, against {_words(evidence.others[0])}"
    if n_outputs > 1:
        return f"to output {output}"
    return "to the prediction"


def _strongest_rows(
    evidence: Evidence, written: WrittenSet, order_of_columns: Sequence[str]
) -> list[tuple[str, float, dict[str, str]]]:
    """The rows of largest contribution, their columns by the effects of these."""
    parts = evidence.keys[0]
    names = sorted(
        written.rows,
        key=lambda name: order_of_columns.index(name) if name in order_of_columns else 0,
    )
    strongest = np.argsort(-np.abs(parts), kind="stable")[:MAX_ROWS]
    return [
        (str(written.numbers[k]), float(parts[k]), {name: written.rows[name][k] for name in names})
        for k in strongest
    ]


def _sureness(model: Any, sample: Any, coverage: float) -> str:
    """Interval or set of labels, and novelty, in words; nothing where a model has neither."""
    method = getattr(model, "interval_method", None)
    if method is None:
        return ""
    if hasattr(model, "classes_"):
        labels = model.classes_[model.predict_set(sample, coverage)[0]]
        plausible = ", ".join(_words(label) for label in labels) or "none"
        words = f" Labels that are plausible at {coverage:.0%}: {plausible} ({method})."
    else:
        ends = model.predict_interval(sample, coverage).reshape(-1, 2)
        spans = "; ".join(f"from {low:.4g} to {high:.4g}" for low, high in ends)
        words = f" At {coverage:.0%} coverage the outcome is expected {spans} ({method})."
    if getattr(model, "_training", None) is not None:
        novelty = float(model.novelty(sample)[0])
        words += f" Its novelty is {novelty:.2f}, a rank among the training sets"
        if novelty > NOVEL:
            words += ": one in a hundred ordinary sets is as far out; the model may extrapolate."
        else:
            words += "."
    return words


def _words(value: Any) -> str:
    """A label, or numbers to four digits."""
    numbers = np.ravel(value)
    if numbers.dtype.kind == "f":
        return ", ".join(f"{v:.4g}" if math.isfinite(v) else str(v) for v in numbers)
    return ", ".join(str(v) for v in numbers)


def save_picture(explanation: Explanation, path: Path, *, overwrite: bool) -> None:
    """Draw the columns and the rows as bars, into a file whose ending says the format."""
    from matplotlib.figure import Figure

    # a row of two panels for each output: columns on the left, rows on the right
    accounts = explanation.accounts
    height = max(max(len(account.columns), len(account.rows)) for account in accounts)
    figure = Figure(figsize=(11, (0.32 * height + 1.1) * len(accounts) + 0.4), layout="constrained")
    figure.suptitle(_label(explanation.name))
    panels = figure.subplots(len(accounts), 2, squeeze=False)
    for (of_columns, of_rows), account in zip(panels, accounts, strict=True):
        labels = [f"{name}: {values}" for name, _, values in account.columns]
        _draw_bars(of_columns, labels, [effect for _, effect, _ in account.columns])
        of_columns.set(title="columns", xlabel=_label(f"effect {account.speaks}"))
        labels = [f"{row}: {', '.join(list(cells.values())[:4])}" for row, _, cells in account.rows]
        _draw_bars(of_rows, labels, [adds for _, adds, _ in account.rows])
        of_rows.set(title=_label(account.of_rows), xlabel=_label(f"adds {account.speaks}"))

    # the whole file or none
    file_format = path.suffix.lower().removeprefix(".")
    write_whole(
        lambda draft: figure.savefig(draft, format=file_format, dpi=150), path, overwrite=overwrite
    )


def _draw_bars(ax: Any, labels: Sequence[str], values: Sequence[float]) -> None:
    """Bars from zero, the first on top."""
    colours = ["tab:blue" if value >= 0 else "tab:red" for value in values]
    ax.barh(range(len(values)), values, color=colours)
    ax.set_yticks(range(len(values)), [_label(label) for label in labels])
    ax.axvline(0.0, color="0.6", lw=0.8)
    ax.invert_yaxis()


def _label(text: str) -> str:
    """A text that can be drawn: of one line, without control characters; $ starts no formula."""
    if not text.isprintable():
        text = text.encode("unicode_escape").decode("ascii")
    return text[:MAX_LABEL].replace("$", r"\$")
