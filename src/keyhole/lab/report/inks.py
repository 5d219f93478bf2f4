"""Colour and marker of every curve, alike in the browser and on paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from keyhole.lab.report.document import Series


class Ink(NamedTuple):
    """A colour that can be read on light and on dark ground, and a marker beside it."""

    colour: str
    marker: str
    """As plotly names it."""


# after Okabe and Ito, whose colours people with any common colour blindness tell apart
KNOWN = {
    "attention": Ink("#1f82c0", "circle"),
    "biased": Ink("#dd6a12", "square"),
    "mlp": Ink("#7c8793", "triangle-up"),
    "kernel": Ink("#0fa37a", "diamond"),
    "ridge": Ink("#bd649a", "triangle-down"),
    "ball": Ink("#c98f0a", "cross"),
    "softmax": Ink("#4ba3df", "pentagon"),
    "prediction": Ink("#68727f", "circle"),
    "oracle": Ink("#8a929c", "circle"),
    "null": Ink("#8a929c", "circle"),
}
"""Roles that have the same ink everywhere."""

SPARE = (
    *(KNOWN[role] for role in ("attention", "biased", "kernel", "ridge", "ball", "mlp")),
    Ink("#7a6fd0", "pentagon"),
    Ink("#a8643a", "star"),
    Ink("#d23c74", "triangle-up"),
    Ink("#6f8f1a", "triangle-down"),
)
"""Inks of the other roles, in turn."""


def role_of(series: Series) -> str:
    """The role of a curve; a curve without one goes by its name."""
    return series.role or series.name


def inks_of(curves: Sequence[Series]) -> dict[str, Ink]:
    """The ink of every role, in the order in which they appear.

    Roles that are not `KNOWN` take the spare inks in turn, first those that no known role has.

    >>> list(inks_of([Series("first", [], []), Series("second", [], [], role="attention")]))
    ['first', 'attention']
    """
    roles = list(dict.fromkeys(role_of(series) for series in curves))
    used = {KNOWN[role] for role in roles if role in KNOWN}
    spare = [ink for ink in SPARE if ink not in used] + [ink for ink in SPARE if ink in used]
    inks = {}
    n_spare = 0
    for role in roles:
        if role in KNOWN:
            inks[role] = KNOWN[role]
        else:
            inks[role] = spare[n_spare % len(spare)]
            n_spare += 1
    return inks
