"""What a fit has tried and kept, in words: the table of members, `summary`, lines as it goes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.fit.combine import Combination
from keyhole.fit.member import Member
from keyhole.fit.samples import TrainingSet
from keyhole.fit.settings import Landmarks, LayerSettings
from keyhole.solve.calibration import labels_of


@dataclass(frozen=True)
class MemberRow:
    """One layer of a fit: its settings, its weight and its loss.

    Attributes
    ----------
    name : str
    weight : float
        In the combination; 0 where it was tried and not kept, 1 where nothing was combined.
    loss : float
        Mean squared error of its own leave-one-out predictions; of classes, of their one-vs-rest
        targets ±1. NaN for several layers of a fit in batches, which share one ridge.
    alpha : float
        Its penalty.
    n_heads : int, math.inf or Landmarks
    heads : head distribution
        Fitted, if it was learned.
    values : array or None
        Coefficients: of features for finitely many heads, of training samples for a kernel.
    params : dict
        For ``set_params``: an estimator with these settings fits this layer alone.
    note : str
        What learning its heads has gained, if they were learned.
    """

    name: str
    weight: float
    loss: float
    alpha: float
    n_heads: float | Landmarks
    heads: Any
    values: Float[np.ndarray, "..."] | None = field(repr=False)
    params: dict[str, Any] = field(repr=False)
    note: str = ""


class MemberTable(tuple[MemberRow, ...]):
    """The members of a fit, those with the largest weight first; it prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(table_lines(self))

    def __repr__(self) -> str:
        return str(self)


def member_table(combination: Combination, data: TrainingSet) -> MemberTable:
    """The rows of all members that were tried."""
    weights = {
        id(member): float(weight)
        for member, weight in zip(combination.members, combination.weights, strict=True)
    }
    rows = [
        MemberRow(
            name=member.name,
            weight=weights.get(id(member), 0.0),
            loss=member_loss(member, data),
            alpha=member.alpha,
            n_heads=member.settings.n_heads,
            heads=member.settings.heads,
            values=member.coef if id(member) in weights else None,
            params=params_of(member.settings),
            note=member.learned_note,
        )
        for member in combination.tried
    ]
    return MemberTable(sorted(rows, key=lambda row: -row.weight))


def member_loss(member: Member, data: TrainingSet) -> float:
    """The mean squared error of held-out predictions, averaged over outputs.

    NaN for one of several layers that were fitted in batches together: they have none of their own.
    """
    if len(member.held_out) != len(data):
        return math.nan
    squares = np.square(data.outputs - member.held_out).mean(axis=1)
    return float(data.shares @ squares)


def params_of(settings: LayerSettings) -> dict[str, Any]:
    """The parameters of an estimator that fits this layer alone."""
    params: dict[str, Any] = {
        "heads": settings.heads,
        "n_heads": settings.n_heads,
        "activation": settings.activation,
        "pooling": settings.pooling,
        "scaling": settings.scaling,
        "query": settings.query,
        "mlp": "none",
        "mlp_width": None,
    }
    if settings.mlp_width is not None:
        params["mlp"] = "only"
        params["mlp_width"] = settings.mlp_width
    return params


def table_lines(rows: Sequence[MemberRow]) -> list[str]:
    """A table of at most 100 columns: weight, layer, heads, penalty, leave-one-out error."""
    cells = [("weight", "layer", "heads", "penalty", "leave-one-out error")]
    for row in rows:
        weight = f"{row.weight:.3g}" if row.weight else "–"
        loss = "–" if math.isnan(row.loss) else f"{row.loss:.4g}"
        cells.append((weight, row.name, heads_words(row), f"{row.alpha:.2g}", loss))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = []
    for line in cells:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append("  ".join(padded).rstrip()[:100])
    return lines


def heads_words(row: MemberRow) -> str:
    """How many heads, in words."""
    if row.params["pooling"] in ("statistics", "extras"):
        return "none"
    if isinstance(row.n_heads, Landmarks):
        return f"{row.n_heads.count} landmarks"
    if math.isinf(row.n_heads):
        return "infinite"
    return f"{int(row.n_heads)}"


def layer_words(settings: LayerSettings) -> str:
    """The settings of one layer in words."""
    if settings.pooling == "statistics":
        words = "statistics of the rows"
    elif settings.pooling == "extras":
        words = "sample-level features alone"
    else:
        count = "infinitely many"
        if isinstance(settings.n_heads, Landmarks):
            count = f"the kernel at {settings.n_heads.count} landmarks of infinitely many"
        elif not math.isinf(settings.n_heads):
            count = f"{int(settings.n_heads)}"
        words = (
            f"{count} heads of {settings.heads!r}, {settings.activation} weights, pooling "
            f"{settings.pooling}, scaling {settings.scaling}, query {settings.query}"
        )
    if settings.mlp_width is not None:
        words += f", then a second kernel of width {settings.mlp_width:g}"
    return words


def summary_of(model: Any) -> str:
    """What was fitted, how good it is on samples that were held out, and what was tried."""
    rows = model.members_
    kept = [row for row in rows if row.weight]
    if len(rows) == 1:
        lines = [f"{type(model).__name__}: one layer, {layer_words(model._settings_of_layer())}."]
        lines.append(f"Penalty {rows[0].alpha:.3g}.")
    else:
        lines = [f"{type(model).__name__}: {len(kept)} of {len(rows)} layers, combined."]
    lines.append(f"{model.held_out_words_}.")
    for row in rows:
        if row.note:
            lines.append(f"{row.name}: {row.note}.")
    if model.not_tried_:
        lines.append(f"Not tried, because too expensive: {', '.join(model.not_tried_)}.")
    return "\n".join([*lines, "", *table_lines(rows)])


def held_out_scores(
    combination: Combination, data: TrainingSet, *, classifies: bool, loss: str
) -> dict[str, float]:
    """The criterion on held-out predictions, and a robust number beside it."""
    shares = data.shares
    if not classifies:
        residuals = data.outputs - combination.held_out
        return {
            "mean squared error": float(shares @ np.square(residuals).mean(axis=1)),
            "median absolute error": float(np.median(np.abs(residuals))),
        }
    labels = labels_of(data.outputs)
    logits = combination.logits(combination.held_out)
    largest = logits.max(axis=1, keepdims=True)
    log_sums = largest[:, 0] + np.log(np.exp(logits - largest).sum(axis=1))
    of_label = np.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    accuracy = float(shares @ (logits.argmax(axis=1) == labels))
    # scores of a combination are logits, to which targets of ±1 say nothing
    if loss == "squared_error" and combination.is_single:
        squares = np.square(data.outputs - combination.held_out).mean(axis=1)
        return {"mean squared error": float(shares @ squares), "accuracy": accuracy}
    return {"log-loss": float(shares @ (log_sums - of_label)), "accuracy": accuracy}


def tell_member(member: Member) -> None:
    """Print one member as soon as it is fitted."""
    say(f"fitted {member.name}: {layer_words(member.settings)}; penalty {member.alpha:.3g}")


def say(words: str) -> None:
    """Print a line at once, on standard output as other estimators with ``verbose`` do."""
    print(words, file=sys.stdout, flush=True)  # noqa: T201
