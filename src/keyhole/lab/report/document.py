"""What a report consists of: sections with a claim, charts, tables and a verdict.

Data only; nothing here draws.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Scalar = str | int | float | None
Row = Mapping[str, Scalar]
Look = Literal["points", "dots", "line", "dashed", "thin", "band"]
State = Literal["holds", "partly", "does not show", "not sure", "not tested", "information"]


@dataclass(frozen=True)
class Series:
    """One curve: `low` and `high` are the ends of its error bars (or of the band).

    `role` fixes its colour everywhere.

    Looks: "points" measured points with error bars joined by a line, "line" a plain line, "dashed"
    a prediction, "thin" a faint line such as the oracle's, "band" the area between `low` and
    `high`. `hover` has one text per point.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    look: Look = "points"
    role: str = ""
    hover: Sequence[str] | None = None


def bars(
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    errors: Sequence[float],
    role: str = "",
    hover: Sequence[str] | None = None,
    floor: float = -math.inf,
) -> Series:
    """Points with bars of one standard error, no lower than ``floor``.

    >>> bars("error", [1.0], [0.5], [0.75], floor=0.0).low
    [0.0]
    """
    low = [max(floor, value - error) for value, error in zip(y, errors, strict=True)]
    high = [value + error for value, error in zip(y, errors, strict=True)]
    return Series(name=name, x=x, y=y, low=low, high=high, look="points", role=role, hover=hover)


@dataclass(frozen=True)
class Chart:
    """Curves on common axes, with the rows that drew them.

    With ``names``, x counts these from 0: the chart lies on its side, the names one below the
    other, y from zero.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    rows: Sequence[Row] = ()
    x_log: bool = False
    y_log: bool = False
    note: str = ""
    marks: Mapping[str, float] = field(default_factory=dict)  # horizontal levels to mark, by name
    names: Sequence[str] = ()


@dataclass(frozen=True)
class HeatMap:
    """A matrix of numbers over named rows and columns.

    Colours diverge from `centre` when it is given.

    `words` stand in the cells instead of the numbers. Over it lie a line, which has a row for
    each column (None where it has none), and points: column, row and words. Both are counted from
    zero and may fall between.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    index: Sequence[str]
    values: Sequence[Sequence[float]]
    centre: float | None = None
    rows: Sequence[Row] = ()
    note: str = ""
    words: Sequence[Sequence[str]] | None = None
    line: Sequence[float | None] = ()
    points: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True)
class Table:
    """Rows to be read, all with the same keys; text as given, numbers formatted by the report."""

    name: str
    title: str
    rows: Sequence[Row]
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """What came out: a state, a sentence in plain words, and the numbers behind it by name."""

    state: State
    sentence: str
    numbers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """One claim: its words, what tests it, and the verdict. `slug` names files and anchors."""

    slug: str
    title: str
    claim: str
    blocks: Sequence[Chart | HeatMap | Table] = ()
    verdict: Verdict | None = None
    settings: str = ""
    text: Sequence[str] = ()
    rule: str = ""
    """When the claim holds, in words."""


@dataclass(frozen=True)
class Report:
    """The whole: title, a lead paragraph, sections, and where it comes from.

    That is versions, machine, seed, command.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    provenance: Mapping[str, str] = field(default_factory=dict)


def csv_bytes(rows: Sequence[Row]) -> bytes:
    """Rows as CSV, numbers in full; a key that a row lacks is an empty cell.

    >>> csv_bytes([{"n": 1, "error": 0.1}, {"n": 2, "note": None}]).decode().split()
    ['n,error,note', '1,0.1,', '2,,']
    """
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=keys, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
