"""What a fit has tried and chosen, in words: `summary` of a fitted model, and lines as it goes."""

from __future__ import annotations

import math
import sys
from typing import Any

from keyhole.attention.heads import FittedHeads
from keyhole.attention.learned import LearnedHeads
from keyhole.choose import Candidate
from keyhole.costs import AUTO_HEADS, AUTO_SECONDS

COLUMNS = (
    "activation",
    "pooling",
    "scaling",
    "query",
    "keys",
    "heads",
    "drawn",
    "minimises",
    "held out",
    "loss",
    "seconds",
)
"""Titles of the table of candidates."""


def summary_of(model: Any) -> str:
    """The settings that were chosen, and every candidate with its loss and its cost."""
    lines = [f"{type(model).__name__}: {settings_line(model)}"]
    lines += [f"penalty {model.alpha_:.3g}, by {selection_words(model)}"]
    for remark in (why_fewer_heads(model), why_not_learned(model)):
        if remark is not None:
            lines.append(remark)
    if not model.candidates_:
        lines.append("Nothing was left to choose, or there were too few samples to choose by.")
        return "\n".join(lines)

    lines.append(
        "This loss is optimistic, because the same samples chose the settings.\n"
        "procedure_loss() repeats the choice on held-out folds."
    )

    # the candidates in the order in which they were tried
    lines += [
        "",
        f"{len(model.candidates_)} candidates, and their losses on the same samples, by "
        "leave-one-out or by folds:",
    ]
    rows: list[tuple[str, ...]] = [COLUMNS]
    rows += [candidate_cells(candidate) for candidate in model.candidates_]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def settings_line(model: Any) -> str:
    """The settings that a fitted model has, in one line."""
    rule = model.tokens_
    n_heads = "infinitely many heads"
    if not math.isinf(model.n_heads_):
        n_heads = f"{int(model.n_heads_)} heads"
    keys = "all keys"
    if model.key_selection_ is not None:
        keys = f"{model.key_selection_.n_keys} keys of each set"
    return (
        f"{model.layer_.activation} weights, pooling {rule.pooling}, scaling {rule.scaling}, "
        f"query {rule.query}, {keys}, {n_heads} of {model.heads_!r}{log_loss_words(model)}"
    )


def log_loss_words(model: Any) -> str:
    """What is said of values that minimise the log-loss; nothing of others."""
    if getattr(model, "loss_", "squared_error") == "log_loss":
        return ", values of least log-loss"
    return ""


def selection_words(model: Any) -> str:
    """How the penalty was chosen, and the loss at it."""
    selection = model.selection_
    if len(selection.alphas) == 1:
        return "its parameter"
    methods = {
        "loo": "leave-one-out",
        "gcv": "generalised cross-validation",
        "holdout": "a tenth held out",
    }
    criterion = selection.criterion.replace("_", " ")
    return f"{methods[selection.method]}, {criterion} {selection.scores[selection.best]:.4g}"


def why_fewer_heads(model: Any) -> str | None:
    """The reason where an automatic number of heads is less than usual; None where it is not."""
    is_automatic = isinstance(model.n_heads, str)
    if not is_automatic or not model.n_heads_ < AUTO_HEADS:
        return None
    return (
        f"{int(model.n_heads_)} heads instead of {AUTO_HEADS}: with more, a fit is predicted "
        f"to take over {AUTO_SECONDS:.0f} s of one core, or its sums to be too large. Set "
        "`n_heads` to have more."
    )


def why_not_learned(model: Any) -> str | None:
    """That heads which were to be learned gained nothing, and by which errors; None otherwise."""
    # default settings may choose learned heads too
    was_to_learn = model.heads is None or isinstance(model.heads, LearnedHeads)
    fitted = model.heads_
    if not was_to_learn or not isinstance(fitted, FittedHeads) or fitted.chosen == "learned":
        return None
    return (
        "Learning the heads gained nothing: predictions are those of heads without learning "
        f"({fitted.reason})."
    )


def candidate_cells(candidate: Candidate) -> tuple[str, ...]:
    """One row of the table."""
    drawn = "all"
    if not math.isinf(candidate.n_heads):
        drawn = str(int(candidate.n_heads))
    return (
        candidate.activation,
        candidate.pooling,
        candidate.scaling,
        candidate.query,
        str(candidate.keys),
        repr(candidate.heads),
        drawn,
        candidate.objective.replace("_", " "),
        candidate.held_out,
        f"{candidate.loss:.4g}",
        f"{candidate.seconds:.2f}",
    )


def tell_candidate(candidate: Candidate) -> None:
    """Print one candidate as soon as its loss is known."""
    cells = dict(zip(COLUMNS, candidate_cells(candidate), strict=True))
    say(
        f"tried {cells['activation']}, pooling {cells['pooling']}, scaling {cells['scaling']}, "
        f"query {cells['query']}, {cells['keys']} keys, {cells['heads']} ({cells['drawn']} drawn), "
        f"{cells['minimises']}: loss {cells['loss']} of {cells['held out']} held out, in "
        f"{cells['seconds']} s"
    )


def say(words: str) -> None:
    """Print a line at once, on standard output as other estimators with ``verbose`` do."""
    print(words, file=sys.stdout, flush=True)  # noqa: T201
