"""What a column is: every rule that decides about one, with its reason, in three tables.

`CELL_RULES` give the columns of text files their types. `KINDS` say how a column of some type
becomes numbers. `LEFT_OUT` names the columns that are no coordinates unless a user names them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from keyhole.data.columns import ColumnSummary

# ---------------------------------------------------------------- types of columns in text files


@dataclass(frozen=True)
class CellRule:
    """A type that a column of a text file has if all its cells read as such."""

    type: pa.DataType
    is_number: bool
    reason: str


CELL_RULES = (
    CellRule(pa.int64(), True, "digits without a leading zero, which would make a code of them"),
    CellRule(pa.float64(), True, "numbers with a decimal point, or too large for 64 bits"),
    CellRule(pa.bool_(), False, "true and false, which become 1 and 0"),
    CellRule(pa.date32(), False, "days, as 2024-01-31"),
    CellRule(pa.timestamp("us"), False, "a day and a time of day, as 2024-01-31 12:30"),
    CellRule(pa.timestamp("us", "UTC"), False, "the same with a time zone, as …T12:30+02:00"),
)
"""Types of columns, the first that all cells have. A column that has none of them is text."""

# ---------------------------------------------------------------- how types become numbers


@dataclass(frozen=True)
class ColumnKind:
    """What columns of some Arrow types become."""

    name: str
    words: str
    holds: Callable[[pa.DataType], bool]
    becomes: str


def _is_number(kind: pa.DataType) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in tests)


def _is_text(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_date(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


KINDS = (
    ColumnKind("number", "numbers", _is_number, "the numbers; yes and no are 1 and 0"),
    ColumnKind("text", "text", _is_text, "0/1 per category, or ±1 at a hashed place of 32"),
    ColumnKind("date", "dates", _is_date, "days after the first date, or before a reference date"),
    ColumnKind("duration", "durations", pa.types.is_duration, "seconds, and its name says so"),
)
"""A column of any other type is refused where it is to be read."""
WORDS_OF_KINDS = {kind.name: kind.words for kind in KINDS}


def kind_of(kind: pa.DataType) -> str:
    """The name of the kind of a type, "" for one that cannot become numbers.

    >>> kind_of(pa.bool_()), kind_of(pa.string()), kind_of(pa.list_(pa.float64()))
    ('number', 'text', '')
    """
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return next((one.name for one in KINDS if one.holds(kind)), "")


# ---------------------------------------------------------------- columns that are no coordinates

MIN_ROWS = 20
"""Entries from which on their order, or how many texts differ, says what a column is."""
MOST_CATEGORIES = 32
"""Different texts of a column up to which each has a coordinate of its own; more are hashed."""
MAX_SPLIT_VALUES = 10
"""Different numbers or texts up to which a column may be a split."""
MAX_COUNTED = 1000
"""Different texts that are counted; of more it is only said that there are more."""

NAMES_OF_USES = {
    "an id": "id ids idx index uid uuid guid row rowid key nr number unnamed",
    "a time": "time timestamp date datetime year month day epoch ts",
    "a split": "split fold folds train test partition subset holdout",
}
"""Words in the name of a column that say what it is used for."""


def use_by_name(name: str) -> str:
    """What the name of a column says that it is: "an id", "a time", "a split", or "".

    >>> use_by_name("customer_id"), use_by_name("residence")
    ('an id', '')
    """
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    if not words:  # pandas writes its index without a name
        words = {"index"}
    return next((use for use, signs in NAMES_OF_USES.items() if words & set(signs.split())), "")


@dataclass(frozen=True)
class LeftOutRule:
    """Why a column is no coordinate unless it is named.

    ``may_hold`` is true until some row disproves it, so that a column need not be read further once
    no rule may hold. ``is_shown`` is asked when all rows have been seen. ``use`` is what the name
    of the column must say, "" for any name.
    """

    kind: str
    use: str
    may_hold: Callable[[ColumnSummary], bool]
    is_shown: Callable[[ColumnSummary], bool]
    reason: str


def _may_be_dates(column: ColumnSummary) -> bool:
    """Whole numbers that may be seconds since 1970, days written as 20240131, or years."""
    are_seconds = column.low >= 1e8
    are_days = column.low >= 19000101 and column.high <= 21001231
    are_years = column.low >= 1900 and column.high <= 2100
    return column.is_whole and (are_seconds or are_days or are_years)


def _is_name(column: ColumnSummary) -> bool:
    """Many different texts; in a short table half as many as there are rows are many."""
    most: float = MOST_CATEGORIES
    if MIN_ROWS <= column.n_rows <= 2 * MOST_CATEGORIES:
        most = column.n_rows / 2
    return len(column.distinct) > most


LEFT_OUT = (
    LeftOutRule(
        "number", "",
        lambda c: c.is_whole and c.steps_by_one, lambda c: c.n_known >= MIN_ROWS,
        "an id, because it counts the rows",
    ),
    LeftOutRule(
        "number", "an id", lambda c: c.is_whole, lambda c: c.n_known > 0,
        "an id, by its name and whole numbers",
    ),
    LeftOutRule(
        "number", "a time", _may_be_dates, lambda c: c.n_known > 0,
        "a time, by its name and because it holds dates",
    ),
    LeftOutRule(
        "number", "a time",
        lambda c: c.never_falls, lambda c: c.low < c.high and c.n_known >= MIN_ROWS,
        "a time, by its name and because it rises through the whole table",
    ),
    LeftOutRule(
        "number", "a split",
        lambda c: c.is_whole and len(c.distinct) <= MAX_SPLIT_VALUES, lambda c: c.n_known > 0,
        "a split, by its name and few values",
    ),
    LeftOutRule(
        "date", "", lambda c: not c.counts_ages, lambda c: True,
        "a time, because it holds dates (its age is a coordinate if reference_date "
        "(--reference-date) names the date of the sample)",
    ),
    LeftOutRule("text", "an id", lambda c: True, lambda c: bool(c.distinct), "an id, by its name"),
    LeftOutRule(
        "text", "a split",
        lambda c: True, lambda c: 0 < len(c.distinct) <= MAX_SPLIT_VALUES,
        "a split, by its name and few values",
    ),
    LeftOutRule(
        "text", "", lambda c: True, lambda c: len(c.distinct) > MAX_COUNTED,
        f"a name, with more than {MAX_COUNTED} different texts",
    ),
    LeftOutRule("text", "", lambda c: True, _is_name, "a name, with {n} different texts"),
    LeftOutRule(
        "text", "", lambda c: True, lambda c: len(c.distinct) == 1 and c.n_rows > 1,
        "nothing to learn from, with one text",
    ),
    LeftOutRule(
        "text", "", lambda c: True, lambda c: not c.distinct and c.n_rows > 1,
        "nothing to learn from, with no text",
    ),
)  # fmt: skip
"""The first rule that holds says why. A weekday in a column ``day`` is a category and no time, so
that a text is no time by its name; columns that a frame numbers are no ids by theirs."""


def rules_for(column: ColumnSummary) -> list[LeftOutRule]:
    """The rules that may hold for a column of its kind and name."""
    use = use_by_name(column.name)
    if column.kind == "text" and column.name.strip().isdecimal():
        use = ""
    return [
        rule
        for rule in LEFT_OUT
        if rule.kind == column.kind and rule.use in ("", use) and rule.may_hold(column)
    ]


def reason_to_leave_out(column: ColumnSummary) -> str:
    """What a column seems to be other than a coordinate, and why; "" for nothing."""
    for rule in rules_for(column):
        if rule.is_shown(column):
            return rule.reason.format(n=len(column.distinct))
    return ""
