"""One colour and one marker per role, the same in every chart of a report, on screen and on paper."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keyhole.report.document import Chart, Report, Series


@dataclass(frozen=True)
class Ink:
    """How a role is drawn: its colour on light and on dark ground, and a marker for eyes that mix colours up."""

    light: str
    dark: str
    marker: str


# Okabe and Ito's colours, which people with any common colour blindness tell apart; the dark ones are lighter twins.
KNOWN: dict[str, Ink] = {
    "attention": Ink("#0072b2", "#5ab4f0", "circle"),
    "biased": Ink("#d55e00", "#ff9350", "square"),
    "mlp": Ink("#66707c", "#a3adba", "triangle"),
    "kernel": Ink("#009e73", "#3fd0a4", "diamond"),
    "ridge": Ink("#b0578d", "#e59ac6", "down"),
    "ball": Ink("#c98a00", "#f2bd4b", "cross"),
    "softmax": Ink("#3a9bd9", "#8fd0ff", "pentagon"),
    "prediction": Ink("#1f2937", "#e5e7eb", "circle"),
    "oracle": Ink("#8a929c", "#8a929c", "circle"),
    "null": Ink("#8a929c", "#8a929c", "circle"),
}
SPARE = (
    Ink("#0072b2", "#5ab4f0", "circle"),
    Ink("#d55e00", "#ff9350", "square"),
    Ink("#009e73", "#3fd0a4", "diamond"),
    Ink("#b0578d", "#e59ac6", "down"),
    Ink("#c98a00", "#f2bd4b", "cross"),
    Ink("#66707c", "#a3adba", "triangle"),
    Ink("#5b4fc4", "#a9a1ff", "pentagon"),
    Ink("#8c4a1f", "#d69a72", "star"),
)


def role_of(series: Series) -> str:
    """The role of a curve; a curve without one goes by its name."""
    return series.role or series.name


def inks_of(report: Report) -> dict[str, Ink]:
    """The ink of every role in the report.

    Known roles have theirs; others take the spare ones in the order in which they appear, those first that no known
    role in the report uses.

    Examples
    --------
    >>> from keyhole.report import Section
    >>> curves = [Series(name, [1.0], [1.0], role=role) for name, role in (("a", "mlp"), ("b", ""), ("c", "attention"))]
    >>> inks = inks_of(Report("", "", [Section("s", "", "", [Chart("c", "", "", "", curves)])]))
    >>> inks["mlp"].light, inks["b"].light
    ('#66707c', '#d55e00')
    """
    roles = list(dict.fromkeys(role_of(series) for series in _all_series(report)))
    taken = {KNOWN[role].light for role in roles if role in KNOWN}
    free = [ink for ink in SPARE if ink.light not in taken] + [ink for ink in SPARE if ink.light in taken]
    unknown = [role for role in roles if role not in KNOWN]
    given = {role: free[k % len(free)] for k, role in enumerate(unknown)}
    return {role: KNOWN.get(role) or given[role] for role in roles}


def _all_series(report: Report) -> Iterable[Series]:
    for section in report.sections:
        for block in section.blocks:
            if isinstance(block, Chart):
                yield from block.series
