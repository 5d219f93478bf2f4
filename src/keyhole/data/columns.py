"""One column of a table as numbers, labels or ids; every refusal names the column and the row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int, Shaped

from keyhole.data.schema import HASHED, MOST_CATEGORIES, Coding


class SchemaError(ValueError):
    """A column that cannot be read as what it was asked for."""


class Place(NamedTuple):
    """Where some rows are, for messages: "row 9 of row group 2 of sets.parquet"."""

    words: str = ""
    first: int = 0
    rows: Any = None

    def row(self, i: Any) -> str:
        """Entry i in words: row i, or the one of ``rows`` that it comes from."""
        row = int(i) if self.rows is None else int(self.rows[int(i)])
        return f"row {self.first + row}{self.inside.replace(' in ', ' of ', 1)}"

    @property
    def inside(self) -> str:
        """The place in words, after a space."""
        return f" in {self.words}" if self.words else ""


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def is_number(kind: pa.DataType) -> bool:
    """Whether a column holds numbers."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in kinds)


def numbers(column: Any, name: str, place: Place, *, lists: str = "") -> Float[np.ndarray, " r"]:
    """A column as float32 or float64, NaN where an entry is missing.

    It shares memory where that is possible.
    """
    kind = column.type
    if not is_number(kind):
        raise SchemaError(
            f"column {name!r} must hold {lists}numbers: it holds {lists}{kind}{place.inside}. "
            "Leave it out, or convert it."
        )
    if pa.types.is_boolean(kind) or pa.types.is_decimal(kind):
        column = column.cast(pa.float64() if pa.types.is_decimal(kind) else pa.int8())
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype not in (np.float32, np.float64):
        return np.asarray(array, dtype=np.float64)
    return np.require(array, requirements="A")  # a buffer of a file may begin at any byte


def unlisted(column: Any) -> tuple[Any, Int[np.ndarray, " o"]]:
    """The values of a column of lists end to end, and where each row begins.

    A row that is null has none.
    """
    if not len(column):  # its offsets may lead anywhere: nobody has looked at them
        return column.values.slice(0, 0), np.zeros(1, np.int64)
    if pa.types.is_fixed_size_list(column.type):
        known = (
            column.is_valid().to_numpy(zero_copy_only=False)
            if column.null_count
            else np.ones(len(column), bool)
        )
        return column.flatten(), np.concatenate([[0], np.cumsum(known)]) * column.type.list_size
    if column.null_count:
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        return column.flatten(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    offsets = column.offsets.to_numpy().astype(np.int64)
    return column.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets - offsets[0]


def same_lengths(column: Any) -> tuple[Any, int, tuple[int, int] | None]:
    """The values of lists end to end, and their length.

    With the first list of another length or of none.
    """
    if (
        len(column)
        and pa.types.is_fixed_size_list(column.type)
        and not column.null_count
        and column.type.list_size
    ):
        return column.flatten(), int(column.type.list_size), None
    flat, offsets = unlisted(column)
    lengths = np.diff(offsets)
    length = int(lengths[0]) if len(lengths) else 0
    odd = (lengths != length) | (lengths == 0)
    return flat, length, (int(odd.argmax()), int(lengths[odd.argmax()])) if odd.any() else None


def matrix(column: Any, name: str, place: Place, what: str) -> Float[np.ndarray, "n d"]:
    """Lists of equal length, one for each row, as the rows of a matrix."""
    if column.null_count:
        row = int(column.is_valid().to_numpy(zero_copy_only=False).argmin())
        raise SchemaError(
            f"column {name!r} must have a list in every row: {place.row(row)} is empty. Drop the "
            "row."
        )
    flat, width, odd = same_lengths(column)
    if odd is not None:
        raise SchemaError(
            f"all {what} of column {name!r} must have as many coordinates, at least one: that of "
            f"{place.row(0)} has {width} and that of {place.row(odd[0])} has {odd[1]}. Pad or cut "
            "them."
        )
    return numbers(flat, name, place, lists="lists of ").reshape(len(column), -1)


def labels(column: Any, name: str, place: Place) -> np.ndarray:
    """A target: integers, numbers, booleans or text without gaps, or lists of numbers.

    A list has one number for each output.
    """
    if is_list(column.type):
        found = matrix(column, name, place, "targets")
        refuse_gaps(found, (name,), place, "target")
        return found
    gaps = _gaps(column)
    if len(gaps):
        raise SchemaError(
            f"target column {name!r} must be known in every row: {place.row(gaps[0])} is empty "
            f"({len(gaps)} in all). Drop such rows first."
        )
    return _values(column, name, place, "target column")


def set_ids(
    column: Any, name: str, place: Place, what: str = "which set"
) -> Shaped[np.ndarray, " r"]:
    """Which set, or group, each row belongs to: every row says so."""
    gaps = _gaps(column)
    if len(gaps):
        some = ", ".join(str(place.first + int(i)) for i in gaps[:5])
        rows = (
            f"rows {some}{' …' if len(gaps) > 5 else ''} are"
            if len(gaps) > 1
            else f"{place.row(gaps[0])} is"
        )
        raise SchemaError(
            f"column {name!r} must say of every row {what} it belongs to: {rows} empty "
            f"({len(gaps)} in all). Fill in the {what.split()[-1]}s, or drop such rows."
        )
    return _values(column, name, place, f"{what.split()[-1]} column")


def instants(column: Any, name: str, place: Place) -> Float[np.ndarray, " r"]:
    """When each row was: dates in days, or numbers; every row says so."""
    found = days(column) if kind_of(column.type) == "date" else numbers(column, name, place)
    refuse_gaps(found[:, None], (name,), place, "time")
    return found


def parts_of_split(column: Any, name: str, place: Place) -> Int[np.ndarray, " r"]:
    """0 for training and 1 for testing, from numbers, booleans or words."""
    train, test = (
        ("0", "0.0", "false", "train", "training"),
        ("1", "1.0", "true", "test", "testing"),
    )
    words = dict.fromkeys(train, 0) | dict.fromkeys(test, 1)
    said = [str(value).strip().lower() for value in column.to_pylist()]
    for row, word in enumerate(said):
        if word not in words:
            raise SchemaError(
                f"column {name!r} must say train or test, or 0 or 1: {place.row(row)} says "
                f"{word!r:.40}. Name another column, or change it."
            )
    return np.array([words[word] for word in said], dtype=np.int64)


def _gaps(column: Any) -> Int[np.ndarray, " g"]:
    """Rows that say nothing. In CSV a gap among texts is an empty text."""
    empty = column.is_null()
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        blank = pc.equal(pc.utf8_trim_whitespace(column.cast(kind)), "")
        empty = pc.or_(empty, pc.fill_null(blank, False))
    return np.flatnonzero(empty.to_numpy(zero_copy_only=False))


def _values(column: Any, name: str, place: Place, what: str) -> Shaped[np.ndarray, " r"]:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return np.array(column.to_pylist(), dtype=np.str_)
    if not is_number(kind):
        raise SchemaError(
            f"{what} {name!r} must hold numbers or text: it holds {kind}{place.inside}. Convert it "
            "first."
        )
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return np.asarray(column.to_numpy(zero_copy_only=False))
    values = numbers(column, name, place)
    if not np.isfinite(values).all():
        row = int((~np.isfinite(values)).argmax())
        raise SchemaError(
            f"{what} {name!r} must be finite: {place.row(row)} is {values[row]}. Drop such rows "
            "first."
        )
    return values


PLURALS = {
    "token": "tokens",
    "query": "queries",
    "target": "targets",
    "extra": "extras",
    "time": "times",
}


def refuse_gaps(
    values: np.ndarray, names: Sequence[str], place: Place, what: str, owner: Any = None
) -> None:
    """Raise if numbers are missing or infinite.

    ``owner`` is the row of each if that is not its place.
    """
    finite = np.isfinite(values)
    if finite.all():
        return
    i, column = (int(k) for k in np.argwhere(~finite)[0])
    if len(names) == values.shape[1]:  # the coordinates of one text count as one entry
        finite = finite[:, [k for k, name in enumerate(names) if name not in names[:k]]]
    missing = np.isnan(values[i, column])
    fill = ", have them filled by the mean with missing='impute' (--missing impute)"
    fill = "" if what in ("target", "time") else fill
    drop = (
        ", or drop the tokens that have one with missing='drop' (--missing drop)"
        if what == "token"
        else ""
    )
    raise SchemaError(
        f"{PLURALS[what]} must be known: {names[min(column, len(names) - 1)]!r} is "
        f"{'missing' if missing else 'infinite'} in {place.row(i if owner is None else owner[i])}, "
        f"{int((~finite).sum())} such entries in all. Fill them in{fill + drop if missing else ''}."
    )


# ---------------------------------------------------------------- text and dates as numbers


def kind_of(kind: pa.DataType) -> str:
    """What a column holds that can become numbers: "number", "text" or "date".

    It is "" for anything else.
    """
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if is_number(kind):
        return "number"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or str(kind) == "string_view":
        return "text"
    tests = (pa.types.is_date, pa.types.is_timestamp, pa.types.is_duration)
    return "date" if any(test(kind) for test in tests) else ""


_SECONDS = {"D": 86400.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def days(column: Any) -> Float[np.ndarray, " r"]:
    """Dates, times and durations in days, since 1970 if they are dates.

    NaN where one is missing.
    """
    array = column.to_numpy(zero_copy_only=False)
    unit = _SECONDS[np.datetime_data(array.dtype)[0]]
    found = array.astype(np.int64) * (unit / 86400.0)
    return np.where(np.isnat(array), np.nan, found)


def texts(column: Any) -> tuple[list[str], Int[np.ndarray, " r"]]:
    """Different texts of a column, and which of them each row has.

    The last, "", stands for gaps and blanks.
    """
    codes = column.cast(pa.large_string()).dictionary_encode()
    found = [text if text.strip() else "" for text in codes.dictionary.to_pylist()]
    return [*found, ""], codes.indices.fill_null(len(found)).to_numpy(zero_copy_only=False)


def plain_values(column: Any) -> Any:
    """A column without a dictionary: the values themselves."""
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


class Study:
    """What is learned about one column, piece by piece."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self._texts: set[str] = set()
        self._start, self._sum, self._count = np.inf, 0.0, 0

    def add(self, column: Any, place: Place, lists: str = "") -> None:
        """Look at some rows."""
        column = plain_values(column)
        if self.kind == "text":
            found, rows = texts(column)
            self._texts |= (
                {found[i] for i in np.unique(rows)}
                if len(self._texts) <= MOST_CATEGORIES + 1
                else set()
            )
            return
        values = (
            days(column) if self.kind == "date" else numbers(column, self.name, place, lists=lists)
        )
        values = values[np.isfinite(values)]
        if len(values):
            self._start = min(self._start, float(values.min()))
            self._sum, self._count = (
                self._sum + float(values.sum(dtype=np.float64)),
                self._count + len(values),
            )

    def coding(self, *, impute: bool) -> Coding:
        """What was learned; gaps are filled only if asked for."""
        if self.kind == "text":
            found = sorted(self._texts if impute else self._texts - {""})
            if not found or len(found) > MOST_CATEGORIES:
                return Coding(self.name, "hashed")
            return Coding(self.name, "one-hot", tuple(found))
        mean = self._sum / self._count if self._count else 0.0
        fill = mean if impute and self._count and np.isfinite(mean) else None
        if self.kind == "number":
            return Coding(self.name, "number", fill=fill)
        start = self._start if self._count else 0.0
        return Coding(self.name, "date", start=start, fill=None if fill is None else fill - start)


HOLDS = {"number": "numbers", "text": "text", "date": "dates"}


def coded(
    coding: Coding,
    column: Any,
    place: Place,
    *,
    lists: str = "",
    impute: bool = False,
    unknown: str = "error",
) -> Float[np.ndarray, "r w"]:
    """A column as numbers, one row for each entry; NaN where one is missing and not imputed."""
    column, name = plain_values(column), coding.column
    wanted = {"one-hot": "text", "hashed": "text"}.get(coding.kind, coding.kind)
    if pa.types.is_null(column.type):  # nothing but gaps
        column = column.cast(
            {"number": pa.float64(), "text": pa.string(), "date": pa.timestamp("s")}[wanted]
        )
    if kind_of(column.type) != wanted:
        raise SchemaError(
            f"column {name!r} must hold {lists}{HOLDS[wanted]}, as it did in the table it was "
            f"learned from: it holds {lists}{column.type}{place.inside}. Convert it."
        )
    if wanted != "text":
        values = (
            numbers(column, name, place, lists=lists)
            if wanted == "number"
            else days(column) - coding.start
        )
        if impute and coding.fill is not None:
            values = np.where(np.isnan(values), np.asarray(coding.fill, values.dtype), values)
        return values[:, None]
    found, rows = texts(column)
    table = np.array(
        [[text == known for known in coding.categories] for text in found], dtype=np.float32
    )
    if coding.kind == "hashed":
        table = _hashed(found)
    if coding.kind == "one-hot" and unknown == "error":
        strange = np.array([bool(text) and text not in coding.categories for text in found])[rows]
        if strange.any():
            row = int(strange.argmax())
            known = ", ".join(repr(category)[:40] for category in coding.categories[:12])
            if len(coding.categories) > 12:
                known += " …"
            raise SchemaError(
                f"column {name!r} must hold categories that were there before: {place.row(row)} "
                f"says {found[rows[row]]!r:.60}, known are "
                f"{known}. "
                "Correct it, or have it read as none of them with unknown='ignore' "
                "(--unknown ignore)."
            )
    if not impute:
        table[[not text for text in found]] = np.nan
    return table[rows]


def _hashed(found: list[str]) -> Float[np.ndarray, "u w"]:
    from sklearn.feature_extraction import FeatureHasher

    hasher = FeatureHasher(HASHED, input_type="string", dtype=np.float32)
    return np.asarray(hasher.transform([[text] if text else [] for text in found]).toarray())


# ---------------------------------------------------------------- what a column seems to be

_WORDS = {
    "an id": {
        "id",
        "ids",
        "idx",
        "index",
        "uid",
        "uuid",
        "guid",
        "row",
        "rowid",
        "key",
        "nr",
        "number",
        "unnamed",
    },
    "a time": {"time", "timestamp", "date", "datetime", "year", "month", "day", "epoch", "ts"},
    "a split": {"split", "fold", "folds", "train", "test", "partition", "subset", "holdout"},
}


MIN_ROWS = 20
"""Entries from which on their order, or how many texts differ, says what a column is."""
MAX_SPLIT_VALUES = 10  # different numbers up to which a column may be a split
MAX_COUNTED_TEXTS = (
    1000  # different texts that are counted; of more it is only said that there are more
)


class NumberEvidence:
    """Whether a column of numbers is a coordinate or something else, by its name and all numbers.

    Both have to say that it is something else: an id is whole numbers; a time is a date or rises
    through the whole table; a split is a few whole numbers. Numbers that count the rows are an id
    under any name. The numbers come piece by piece, and every sign can only be lost: once all of
    them are, the column is a coordinate whatever else it holds.

    >>> evidence = NumberEvidence("customer_id")
    >>> evidence.add(np.array([7.0, 9.0]))
    >>> evidence.reason()
    'an id, by its name and whole numbers'
    >>> evidence.add(np.array([7.5]))
    >>> evidence.reason(), evidence.is_coordinate()
    ('', True)
    """

    def __init__(self, name: str) -> None:
        words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
        if not words:  # pandas writes its index without a name
            words = ["index"]
        lowered = {word.lower() for word in words}
        self._use = next((use for use, signs in _WORDS.items() if signs & lowered), "")
        self._count = 0
        self._last = np.nan
        self._low = np.inf
        self._high = -np.inf
        self._is_whole = True
        self._steps_by_one = True
        self._never_falls = True
        self._values: set[float] = set()

    def add(self, values: Float[np.ndarray, " r"]) -> None:
        """Look at the next numbers of the column; missing ones say nothing."""
        values = np.asarray(values, dtype=np.float64)
        values = values[np.isfinite(values)]
        if not len(values):
            return
        # the step from the last number of the piece before is one of the steps
        previous = [self._last] if self._count else []
        steps = np.diff(np.concatenate([previous, values]))
        self._steps_by_one = self._steps_by_one and bool((steps == 1).all())
        self._never_falls = self._never_falls and bool((steps >= 0).all())
        self._is_whole = self._is_whole and bool((values == np.rint(values)).all())
        self._low = min(self._low, float(values.min()))
        self._high = max(self._high, float(values.max()))
        self._last = float(values[-1])
        self._count += len(values)
        if self._use == "a split" and len(self._values) <= MAX_SPLIT_VALUES:
            self._values |= set(np.unique(values)[: MAX_SPLIT_VALUES + 1].tolist())

    def _holds_dates(self) -> bool:
        """Whole numbers that may be seconds since 1970, days written as 20240131, or years."""
        are_seconds = self._low >= 1e8
        are_days = self._low >= 19000101 and self._high <= 21001231
        are_years = self._low >= 1900 and self._high <= 2100
        return self._is_whole and (are_seconds or are_days or are_years)

    def _is_few_values(self) -> bool:
        return self._is_whole and len(self._values) <= MAX_SPLIT_VALUES

    def is_coordinate(self) -> bool:
        """Whether no further number can make it anything else."""
        if self._count == 0:
            return False
        counts_the_rows = self._is_whole and self._steps_by_one
        is_id = self._use == "an id" and self._is_whole
        is_time = self._use == "a time" and (self._holds_dates() or self._never_falls)
        is_split = self._use == "a split" and self._is_few_values()
        return not (counts_the_rows or is_id or is_time or is_split)

    def reason(self) -> str:
        """What the column seems to be other than a coordinate, and why; "" for nothing."""
        if self._count == 0:
            return ""
        if self._is_whole and self._steps_by_one and self._count >= MIN_ROWS:
            return "an id, because it counts the rows"
        if self._use == "an id" and self._is_whole:
            return "an id, by its name and whole numbers"
        if self._use == "a time" and self._holds_dates():
            return "a time, by its name and because it holds dates"
        rises = self._never_falls and self._low < self._high and self._count >= MIN_ROWS
        if self._use == "a time" and rises:
            return "a time, by its name and because it rises through the whole table"
        if self._use == "a split" and self._is_few_values():
            return "a split, by its name and few values"
        return ""


class TextEvidence:
    """Whether a column of texts is a coordinate or something else, by how many texts differ.

    >>> evidence = TextEvidence()
    >>> evidence.add(pa.array(["red", "red"]))
    >>> evidence.reason()
    'nothing to learn from, with one text'
    >>> evidence.add(pa.array(["blue"]))
    >>> evidence.reason()
    ''
    """

    def __init__(self) -> None:
        self._count = 0
        self._texts: set[str] = set()

    def add(self, column: Any) -> None:
        """Look at the next texts of the column; missing ones and blanks count as rows only."""
        self._count += len(column)
        different, _ = texts(column)
        self._texts |= set(different) - {""}

    def is_name(self) -> bool:
        """Whether there are more texts than are counted: no further row changes the reason."""
        return len(self._texts) > MAX_COUNTED_TEXTS

    def reason(self) -> str:
        """What the column seems to be other than a coordinate, and why; "" for nothing."""
        if self.is_name():
            return f"a name, with more than {MAX_COUNTED_TEXTS} different texts"
        # in a short table texts are names already where there are half as many of them as rows
        is_short = MIN_ROWS <= self._count <= 2 * MOST_CATEGORIES
        most = self._count / 2 if is_short else MOST_CATEGORIES
        if len(self._texts) > most:
            return f"a name, with {len(self._texts)} different texts"
        if len(self._texts) < 2 and self._count > 1:
            return f"nothing to learn from, with {'one' if self._texts else 'no'} text"
        return ""


def one_piece(column: Any) -> Any:
    """A column in one piece, which it is in already or is copied to."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
