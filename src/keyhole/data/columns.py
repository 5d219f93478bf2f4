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
    """A column that cannot be read as what it is named for."""


class Place(NamedTuple):
    """Where some rows are, for messages: "row 9 of row group 2 of sets.parquet"."""

    words: str = ""
    first: int = 0
    rows: Any = None

    def row(self, i: Any) -> str:
        """Entry i in words: row i, or the one of ``rows`` that it comes from."""
        row = int(i)
        if self.rows is not None:
            row = int(self.rows[row])
        return f"row {self.first + row}{self.inside.replace(' in ', ' of ', 1)}"

    @property
    def inside(self) -> str:
        """The place in words, after a space."""
        return f" in {self.words}" if self.words else ""


def is_readable(kind: pa.DataType) -> bool:
    """Whether pyarrow has arrays of a type, and of all types inside of it.

    Files may have types that Arrow defines and pyarrow lacks, such as intervals of months.
    """
    try:
        pa.nulls(0, kind)
    except KeyError:
        return False
    types_inside = [kind.field(i).type for i in range(kind.num_fields)]
    if pa.types.is_dictionary(kind):
        types_inside.append(kind.value_type)
    return all(is_readable(each) for each in types_inside)


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
    # a column of missing values only is of any kind
    if pa.types.is_null(column.type):
        column = column.cast(pa.float64())
    kind = column.type
    if not is_number(kind):
        raise SchemaError(
            f"column {name!r} must hold {lists}numbers: it holds {lists}{kind}{place.inside}. "
            "Leave it out, or convert it."
        )
    # NumPy has no decimals, and takes booleans with missing values for objects
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif pa.types.is_boolean(kind):
        column = column.cast(pa.int8())
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype not in (np.float32, np.float64):
        return np.asarray(array, dtype=np.float64)
    return np.require(array, requirements="A")  # a buffer of a file may begin at any byte


def unlisted(column: Any) -> tuple[Any, Int[np.ndarray, " o"]]:
    """The values of a column of lists end to end, and where each row begins.

    A row that is null has none.
    """
    # offsets of a column without rows may lead anywhere: nobody has looked at them
    if not len(column):
        return column.values.slice(0, 0), np.zeros(1, np.int64)

    # lists of one length have no offsets
    if pa.types.is_fixed_size_list(column.type):
        has_list = np.ones(len(column), bool)
        if column.null_count:
            has_list = column.is_valid().to_numpy(zero_copy_only=False)
        lists_before = np.concatenate([[0], np.cumsum(has_list)])
        return column.flatten(), lists_before * column.type.list_size

    # a null may own values, which `flatten` leaves out: offsets are counted anew
    if column.null_count:
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        return column.flatten(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    # a slice of a longer column begins and ends within its values
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.slice(offsets[0], offsets[-1] - offsets[0])
    return values, offsets - offsets[0]


def same_lengths(column: Any) -> tuple[Any, int, tuple[int, int] | None]:
    """The values of lists end to end, their length, and None.

    Instead of None stand the first list that has another length or none, and its length.
    """
    is_fixed = pa.types.is_fixed_size_list(column.type)
    if len(column) and is_fixed and not column.null_count and column.type.list_size:
        return column.flatten(), int(column.type.list_size), None
    flat, offsets = unlisted(column)
    lengths = np.diff(offsets)
    if len(lengths) == 0:
        return flat, 0, None
    length = int(lengths[0])
    is_misfit = (lengths != length) | (lengths == 0)
    if not is_misfit.any():
        return flat, length, None
    misfit = int(is_misfit.argmax())
    return flat, length, (misfit, int(lengths[misfit]))


def matrix(column: Any, name: str, place: Place, what: str) -> Float[np.ndarray, "n d"]:
    """Lists of equal length, one for each row, as the rows of a matrix."""
    if column.null_count:
        row = int(column.is_valid().to_numpy(zero_copy_only=False).argmin())
        raise SchemaError(
            f"column {name!r} must have a list in every row: {place.row(row)} is empty. Drop the "
            "row."
        )
    flat, width, misfit = same_lengths(column)
    if misfit is not None:
        row, length = misfit
        raise SchemaError(
            f"all {what} of column {name!r} must have as many coordinates, at least one: that of "
            f"{place.row(0)} has {width} and that of {place.row(row)} has {length}. Pad or cut "
            "them."
        )
    return numbers(flat, name, place, lists="lists of ").reshape(len(column), -1)


def labels(column: Any, name: str, place: Place) -> np.ndarray:
    """A target: integers, numbers, booleans or text, or lists of numbers; nothing missing.

    A list has one number for each output.
    """
    if is_list(column.type):
        outputs = matrix(column, name, place, "targets")
        refuse_gaps(outputs, (name,), place, "target")
        return outputs
    missing_rows = _missing_rows(column)
    if len(missing_rows):
        raise SchemaError(
            f"target column {name!r} must be known in every row: {place.row(missing_rows[0])} is "
            f"empty ({len(missing_rows)} in all). Drop such rows first."
        )
    return _values(column, name, place, "target column")


def set_ids(
    column: Any, name: str, place: Place, what: str = "which set"
) -> Shaped[np.ndarray, " r"]:
    """Which set, or group, each row belongs to: every row says so."""
    noun = what.split()[-1]
    missing_rows = _missing_rows(column)
    if len(missing_rows) == 0:
        _refuse_merged_ids(column, name, place)
        return _values(column, name, place, f"{noun} column")
    if len(missing_rows) == 1:
        rows = f"{place.row(missing_rows[0])} is"
    else:
        first_rows = ", ".join(str(place.first + int(i)) for i in missing_rows[:5])
        more = " …" if len(missing_rows) > 5 else ""
        rows = f"rows {first_rows}{more} are"
    raise SchemaError(
        f"column {name!r} must say of every row {what} it belongs to: {rows} empty "
        f"({len(missing_rows)} in all). Fill in the {noun}s, or drop such rows."
    )


def _refuse_merged_ids(column: Any, name: str, place: Place) -> None:
    """Raise if ids are floats so large that different whole numbers may have become one."""
    if not pa.types.is_floating(column.type):
        return
    values = column.to_numpy(zero_copy_only=False)
    largest_exact = 2.0 ** (np.finfo(values.dtype).nmant + 1)
    may_have_merged = np.abs(values) >= largest_exact
    if may_have_merged.any():
        row = int(may_have_merged.argmax())
        raise SchemaError(
            f"ids must be told apart: column {name!r} holds {column.type}, and {place.row(row)} is "
            f"{values[row]:.0f}, where several whole numbers become one float. Read the column as "
            "text or whole numbers, for example by dtype=str of pandas.read_csv."
        )


def ids_alike(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids of two tables to be compared: whole numbers as they are written, where others are text.

    >>> ids_alike(np.array(["7", "07"]), np.array([7, 12]))[1].tolist()
    ['7', '12']
    """
    if first.dtype.kind == "U" and second.dtype.kind in "iu":
        return first, second.astype(np.str_)
    if second.dtype.kind == "U" and first.dtype.kind in "iu":
        return first.astype(np.str_), second
    return first, second


def instants(column: Any, name: str, place: Place) -> Float[np.ndarray, " r"]:
    """When each row was: dates in days, or numbers; every row says so."""
    if kind_of(column.type) == "date":
        times = days(column)
    else:
        times = numbers(column, name, place)
    refuse_gaps(times[:, None], (name,), place, "time")
    return times


def reference_days(column: Any, name: str, place: Place) -> Float[np.ndarray, " r"]:
    """The date that each sample counts ages from, in days since 1970; every row says so."""
    if not is_date(column.type):
        raise SchemaError(
            f"the reference date {name!r} must hold dates: it holds {column.type}{place.inside}. "
            "Convert it, for example with pandas.to_datetime, or name another column."
        )
    in_days = days(column)
    refuse_gaps(in_days[:, None], (name,), place, "reference date")
    return in_days


SPLIT_WORDS = {
    "0": 0,
    "0.0": 0,
    "false": 0,
    "train": 0,
    "training": 0,
    "1": 1,
    "1.0": 1,
    "true": 1,
    "test": 1,
    "testing": 1,
}
"""What a column may say of a row, in lower case, and the part that this means."""


def parts_of_split(column: Any, name: str, place: Place) -> Int[np.ndarray, " r"]:
    """0 for training and 1 for testing, from numbers, booleans or words."""
    parts = []
    for row, value in enumerate(column.to_pylist()):
        word = str(value).strip().lower()
        if word not in SPLIT_WORDS:
            raise SchemaError(
                f"column {name!r} must say train or test, or 0 or 1: {place.row(row)} says "
                f"{word!r:.40}. Name another column, or change it."
            )
        parts.append(SPLIT_WORDS[word])
    return np.array(parts, dtype=np.int64)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _missing_rows(column: Any) -> Int[np.ndarray, " g"]:
    """Rows that say nothing. In CSV a missing text is an empty one."""
    is_missing = column.is_null()
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if _is_text(kind):
        is_blank = pc.equal(pc.utf8_trim_whitespace(column.cast(kind)), "")
        is_missing = pc.or_(is_missing, pc.fill_null(is_blank, False))
    return np.flatnonzero(is_missing.to_numpy(zero_copy_only=False))


def _values(column: Any, name: str, place: Place, what: str) -> Shaped[np.ndarray, " r"]:
    """Text, whole numbers or finite numbers as an array of their kind; none is missing."""
    column = plain_values(column)
    kind = column.type
    if _is_text(kind):
        return np.array(column.to_pylist(), dtype=np.str_)
    if not is_number(kind):
        raise SchemaError(
            f"{what} {name!r} must hold numbers or text: it holds {kind}{place.inside}. Convert it "
            "first."
        )
    # whole numbers stay whole: ids of 64 bits would lose digits as floats
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
    "reference date": "reference dates",
}


def refuse_gaps(
    values: np.ndarray,
    names: Sequence[str],
    place: Place,
    what: str,
    owner: Any = None,
    *,
    has_imputed: bool = False,
) -> None:
    """Raise if numbers are missing or infinite.

    ``owner`` is the row of each if that is not its place. ``has_imputed`` says that
    missing='impute' is set, and that the schema has nothing to fill in here.
    """
    is_finite = np.isfinite(values)
    if is_finite.all():
        return

    # the first such entry
    i, column = (int(k) for k in np.argwhere(~is_finite)[0])
    name = names[min(column, len(names) - 1)]
    row = place.row(i if owner is None else owner[i])
    is_missing = np.isnan(values[i, column])

    # how many there are: the coordinates of one text count as one entry
    if len(names) == values.shape[1]:
        first_of_name = [k for k, other in enumerate(names) if other not in names[:k]]
        is_finite = is_finite[:, first_of_name]
    count = int((~is_finite).sum())

    # what can be done: targets and times are not made up, and tokens alone can be dropped
    remedy = "Fill them in"
    if is_missing and has_imputed:
        remedy += (
            ", read the table that the model is fitted to with missing='impute' (--missing impute) "
            "too, so that the mean is known"
        )
    elif is_missing and what not in ("target", "time", "reference date"):
        remedy += ", have them filled by the mean with missing='impute' (--missing impute)"
    if is_missing and what == "token":
        remedy += ", or drop the tokens that have one with missing='drop' (--missing drop)"
    problem = "missing" if is_missing else "infinite"
    raise SchemaError(
        f"{PLURALS[what]} must be known: {name!r} is {problem} in {row}, {count} such entries in "
        f"all. {remedy}."
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
    if _is_text(kind) or str(kind) == "string_view":
        return "text"
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return "date"
    return ""


def is_date(kind: pa.DataType) -> bool:
    """Whether a column holds dates or times, which durations are not."""
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def time_zone(kind: pa.DataType) -> str | None:
    """The time zone of a column of dates or times, None where it has none."""
    return kind.tz if pa.types.is_timestamp(kind) else None


_SECONDS = {"D": 86400.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def days(column: Any) -> Float[np.ndarray, " r"]:
    """Dates, times and durations in days, since 1970 if they are dates.

    NaN where one is missing.
    """
    array = column.to_numpy(zero_copy_only=False)
    unit = _SECONDS[np.datetime_data(array.dtype)[0]]
    in_days = array.astype(np.int64) * (unit / 86400.0)
    return np.where(np.isnat(array), np.nan, in_days)


def texts(column: Any) -> tuple[list[str], Int[np.ndarray, " r"]]:
    """Different texts of a column, and which of them each row has.

    The last, "", stands for missing values; blanks are "" too.
    """
    codes = column.cast(pa.large_string()).dictionary_encode()
    different = [text if text.strip() else "" for text in codes.dictionary.to_pylist()]
    rows = codes.indices.fill_null(len(different)).to_numpy(zero_copy_only=False)
    return [*different, ""], rows


def plain_values(column: Any) -> Any:
    """A column without a dictionary: the values themselves."""
    if pa.types.is_dictionary(column.type):
        return column.cast(column.type.value_type)
    return column


class Study:
    """What is learned about one column, piece by piece."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self._texts: set[str] = set()
        self._start = np.inf
        self._sum = 0.0
        self._count = 0

    def add(self, column: Any, place: Place, lists: str = "") -> None:
        """Look at some rows."""
        column = plain_values(column)
        if self.kind == "text":
            # beyond this number the texts are hashed, and no further one has to be kept
            if len(self._texts) <= MOST_CATEGORIES + 1:
                different, rows = texts(column)
                self._texts |= {different[i] for i in np.unique(rows)}
            return
        if self.kind == "date":
            values = days(column)
        else:
            values = numbers(column, self.name, place, lists=lists)
        values = values[np.isfinite(values)]
        if len(values):
            self._start = min(self._start, float(values.min()))
            self.add_sum(float(values.sum(dtype=np.float64)), len(values))

    def add_sum(self, total: float, count: int) -> None:
        """Count further values by their sum: ages, which no column holds."""
        self._sum += total
        self._count += count

    def coding(self, *, impute: bool) -> Coding:
        """What was learned; missing values are filled in only if ``impute``."""
        if self.kind == "text":
            categories = sorted(self._texts if impute else self._texts - {""})
            if not categories or len(categories) > MOST_CATEGORIES:
                return Coding(column=self.name, kind="hashed")
            return Coding(column=self.name, kind="one-hot", categories=tuple(categories))

        # the mean fills in numbers and dates, where there is one
        fill = None
        if impute and self._count:
            mean = self._sum / self._count
            if np.isfinite(mean):
                fill = mean
        if self.kind in ("number", "age"):
            return Coding(column=self.name, kind=self.kind, fill=fill)

        # dates are counted from the first one
        start = self._start if self._count else 0.0
        if fill is not None:
            fill -= start
        return Coding(column=self.name, kind="date", start=start, fill=fill)


HOLDS = {"number": "numbers", "text": "text", "date": "dates", "age": "dates"}
_ARROW_TYPES = {"number": pa.float64(), "text": pa.string(), "date": pa.timestamp("s")}


def coded(
    coding: Coding,
    column: Any,
    place: Place,
    *,
    lists: str = "",
    impute: bool = False,
    unknown: str = "error",
) -> Float[np.ndarray, "r w"]:
    """A column as numbers, one row for each entry; NaN where one is missing and not imputed.

    Where ages are counted, dates become days since 1970; `ages` makes ages of these, once it is
    known which sample an entry belongs to.
    """
    # the column must be of the kind that was learned; one of missing values only is of any kind
    column = plain_values(column)
    kind = coding.kind
    if kind in ("one-hot", "hashed"):
        kind = "text"
    elif kind == "age":
        kind = "date"
    if pa.types.is_null(column.type):
        column = column.cast(_ARROW_TYPES[kind])
    has_right_kind = kind_of(column.type) == kind
    if coding.kind == "age":
        has_right_kind = is_date(column.type)
    if not has_right_kind:
        raise SchemaError(
            f"column {coding.column!r} must hold {lists}{HOLDS[kind]}, as it did in the table it "
            f"was learned from: it holds {lists}{column.type}{place.inside}. Convert it."
        )
    if kind == "text":
        return _coded_texts(coding, column, place, impute=impute, unknown=unknown)

    # numbers and dates are one coordinate each
    if coding.kind == "age":
        return days(column)[:, None]
    if kind == "number":
        values = numbers(column, coding.column, place, lists=lists)
    else:
        values = days(column) - coding.start
    if impute and coding.fill is not None:
        values = np.where(np.isnan(values), np.asarray(coding.fill, values.dtype), values)
    return values[:, None]


def ages(
    coding: Coding,
    in_days: Float[np.ndarray, " r"],
    reference: Float[np.ndarray, " r"],
    *,
    impute: bool,
) -> Float[np.ndarray, " r"]:
    """Days before the reference date of the sample: negative for later dates.

    NaN where a date is missing and not imputed.
    """
    values = reference - in_days
    if impute and coding.fill is not None:
        values = np.where(np.isnan(values), coding.fill, values)
    return values


def _coded_texts(
    coding: Coding, column: Any, place: Place, *, impute: bool, unknown: str
) -> Float[np.ndarray, "r w"]:
    """Texts as numbers: each different text is coded once, and rows take the code of theirs."""
    different, rows = texts(column)
    if coding.kind == "hashed":
        codes = _hashed(different)
    else:
        if unknown == "error":
            _refuse_unknown_categories(coding, different, rows, place)
        is_category = [[text == category for category in coding.categories] for text in different]
        codes = np.array(is_category, dtype=np.float32)
    if not impute:
        codes[[not text for text in different]] = np.nan
    return codes[rows]


def _refuse_unknown_categories(
    coding: Coding, different: list[str], rows: Int[np.ndarray, " r"], place: Place
) -> None:
    """Raise where a row has a text that is no category; missing ones are not meant."""
    is_unknown = [bool(text) and text not in coding.categories for text in different]
    is_unknown_row = np.array(is_unknown)[rows]
    if not is_unknown_row.any():
        return
    row = int(is_unknown_row.argmax())
    categories = ", ".join(repr(category)[:40] for category in coding.categories[:12])
    if len(coding.categories) > 12:
        categories += " …"
    raise SchemaError(
        f"column {coding.column!r} must hold categories that were there before: {place.row(row)} "
        f"says {different[rows[row]]!r:.60}, known are {categories}. "
        "Correct it, or have it read as none of them with unknown='ignore' "
        "(--unknown ignore)."
    )


def _hashed(different: list[str]) -> Float[np.ndarray, "u w"]:
    """A sign at a place that the hash of a text names; zeros for an empty text."""
    from sklearn.feature_extraction import FeatureHasher

    hasher = FeatureHasher(HASHED, input_type="string", dtype=np.float32)
    return np.asarray(hasher.transform([[text] if text else [] for text in different]).toarray())


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
MAX_SPLIT_VALUES = 10  # different numbers or texts up to which a column may be a split
MAX_COUNTED_TEXTS = (
    1000  # different texts that are counted; of more it is only said that there are more
)


def _use_by_name(name: str) -> str:
    """What the name of a column says that it is: "an id", "a time", "a split", or ""."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)
    if not words:  # pandas writes its index without a name
        words = ["index"]
    lowered = {word.lower() for word in words}
    return next((use for use, signs in _WORDS.items() if signs & lowered), "")


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
        self._use = _use_by_name(name)
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
    """Whether a column of texts is a coordinate or something else.

    Its name says so, as of `NumberEvidence`: an id is any text, a split is a few different texts.
    A time is not told by the name: "Monday" in a column ``day`` is a category. Else the number of
    different texts decides.

    >>> evidence = TextEvidence("colour")
    >>> evidence.add(pa.array(["red", "red"]))
    >>> evidence.reason()
    'nothing to learn from, with one text'
    >>> evidence.add(pa.array(["blue"]))
    >>> evidence.reason()
    ''
    >>> evidence = TextEvidence("patient_id")
    >>> evidence.add(pa.array(["p0", "p1"]))
    >>> evidence.reason()
    'an id, by its name'
    """

    def __init__(self, name: str) -> None:
        # columns of pandas that have numbers for names are not the index, which has no name
        is_numbered = name.strip().isdecimal()
        self._use = "" if is_numbered else _use_by_name(name)
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
        if self._use == "an id" and self._texts:
            return "an id, by its name"
        if self._use == "a split" and 0 < len(self._texts) <= MAX_SPLIT_VALUES:
            return "a split, by its name and few values"
        if self.is_name():
            return f"a name, with more than {MAX_COUNTED_TEXTS} different texts"
        # in a short table texts are names already where there are half as many of them as rows
        largest_count: float = MOST_CATEGORIES
        if MIN_ROWS <= self._count <= 2 * MOST_CATEGORIES:
            largest_count = self._count / 2
        if len(self._texts) > largest_count:
            return f"a name, with {len(self._texts)} different texts"
        if len(self._texts) < 2 and self._count > 1:
            return f"nothing to learn from, with {'one' if self._texts else 'no'} text"
        return ""


def one_piece(column: Any) -> Any:
    """A column in one piece, which it is in already or is copied to."""
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks()
