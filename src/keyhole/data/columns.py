"""One column of a table as numbers, labels or ids; every refusal names the column and the row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float, Int, Shaped

from keyhole.data.rules import MAX_COUNTED, MOST_CATEGORIES, WORDS_OF_KINDS, kind_of, rules_for
from keyhole.data.schema import HASHED, Coding


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


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def inner_type(kind: pa.DataType) -> pa.DataType:
    """The type of what lists hold, or of the column itself."""
    return kind.value_type if is_list(kind) else kind


def plain_column(column: Any, *, keeps_dictionary: bool = False) -> Any:
    """A column in one piece and, unless it is kept, without a dictionary: the values themselves."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_dictionary(column.type) and not keeps_dictionary:
        return column.cast(column.type.value_type)
    return column


# ---------------------------------------------------------------- numbers and lists of them


def numbers(column: Any, name: str, place: Place, *, lists: str = "") -> Float[np.ndarray, " r"]:
    """A column as float32 or float64, NaN where an entry is missing."""
    # a column of missing values only is of any kind
    if pa.types.is_null(column.type):
        column = column.cast(pa.float64())
    kind = column.type
    if kind_of(kind) != "number":
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
    """The values of a column of lists end to end, and where each row begins; a null has none."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return column.flatten(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def misfit_of(offsets: Int[np.ndarray, " o"]) -> tuple[int, int] | None:
    """The first list that is empty or not as long as the first one, and its length; or None."""
    lengths = np.diff(offsets)
    is_misfit = (lengths != lengths[:1]) | (lengths == 0)
    if not is_misfit.any():
        return None
    row = int(is_misfit.argmax())
    return row, int(lengths[row])


def matrix(column: Any, name: str, place: Place, what: str) -> Float[np.ndarray, "n d"]:
    """Lists of equal length, one for each row, as the rows of a matrix."""
    if column.null_count:
        row = int(column.is_valid().to_numpy(zero_copy_only=False).argmin())
        raise SchemaError(
            f"column {name!r} must have a list in every row: {place.row(row)} is empty. Drop the "
            "row."
        )
    flat, offsets = unlisted(column)
    misfit = misfit_of(offsets)
    if misfit is not None:
        row, length = misfit
        raise SchemaError(
            f"all {what} of column {name!r} must have as many coordinates, at least one: that of "
            f"{place.row(0)} has {offsets[1]} and that of {place.row(row)} has {length}. Pad or "
            "cut them."
        )
    return numbers(flat, name, place, lists="lists of ").reshape(len(column), -1)


# ---------------------------------------------------------------- what columns of samples say


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
    if kind_of(column.type) != "date":
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


def _missing_rows(column: Any) -> Int[np.ndarray, " g"]:
    """Rows that say nothing. In CSV a missing text is an empty one."""
    is_missing = column.is_null()
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind_of(kind) == "text":
        is_blank = pc.equal(pc.utf8_trim_whitespace(column.cast(kind)), "")
        is_missing = pc.or_(is_missing, pc.fill_null(is_blank, False))
    return np.flatnonzero(is_missing.to_numpy(zero_copy_only=False))


def _values(column: Any, name: str, place: Place, what: str) -> Shaped[np.ndarray, " r"]:
    """Text, whole numbers or finite numbers as an array of their kind; none is missing."""
    column = plain_column(column)
    kind = column.type
    if kind_of(kind) == "text":
        return np.array(column.to_pylist(), dtype=np.str_)
    if kind_of(kind) != "number":
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


def time_zone(kind: pa.DataType) -> str | None:
    """The time zone of a column of dates or times, None where it has none."""
    return kind.tz if pa.types.is_timestamp(kind) else None


_SECONDS = {"D": 86400.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def seconds(column: Any) -> Float[np.ndarray, " r"]:
    """Durations in seconds, dates in seconds since 1970; NaN where one is missing."""
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan)
    array = column.to_numpy(zero_copy_only=False)
    values = array.astype(np.int64) * _SECONDS[np.datetime_data(array.dtype)[0]]
    return np.where(np.isnat(array), np.nan, values)


def days(column: Any) -> Float[np.ndarray, " r"]:
    """Dates in days since 1970, NaN where one is missing."""
    if pa.types.is_null(column.type):
        return np.full(len(column), np.nan)
    array = column.to_numpy(zero_copy_only=False)
    per_day = _SECONDS[np.datetime_data(array.dtype)[0]] / 86400.0
    return np.where(np.isnat(array), np.nan, array.astype(np.int64) * per_day)


def texts(column: Any) -> tuple[list[str], Int[np.ndarray, " r"]]:
    """Different texts of a column, and which of them each row has.

    The last, "", stands for missing values; blanks are "" too.
    """
    codes = column.cast(pa.large_string()).dictionary_encode()
    different = [text if text.strip() else "" for text in codes.dictionary.to_pylist()]
    rows = codes.indices.fill_null(len(different)).to_numpy(zero_copy_only=False)
    return [*different, ""], rows


class ColumnSummary:
    """What the rows of a column hold, seen piece by piece: enough to choose and to code it.

    >>> column = ColumnSummary("colour", "text")
    >>> column.add(pa.array(["red", "blue", None]))
    >>> column.coding(impute=False).names
    ('colour=blue', 'colour=red')
    """

    def __init__(self, name: str, kind: str, *, counts_ages: bool = False) -> None:
        self.name = name
        self.kind = kind
        self.counts_ages: bool = counts_ages
        """Whether dates become ages, which have no first day."""
        self.n_rows: int = 0
        self.n_known: int = 0
        self.distinct: set[Any] = set()
        """Different texts, or numbers; no more are added once there are more than are counted."""
        self.has_missing_text = False
        self.low: float = np.inf
        self.high: float = -np.inf
        self.total: float = 0.0
        self.is_whole: bool = True
        self.steps_by_one: bool = True
        self.never_falls: bool = True
        self._last: float = np.nan

    def add(self, column: Any) -> None:
        """Look at the next rows; a piece of another kind is refused where the column is read."""
        column = plain_column(column)
        self.n_rows += len(column)
        if kind_of(column.type) != self.kind:
            return
        if self.kind == "text":
            self._add_texts(column)
        elif self.kind == "date":
            self._add_values(days(column))
        elif self.kind == "duration":
            self._add_values(seconds(column))
        else:
            self._add_values(numbers(column, self.name, Place()))

    def _add_texts(self, column: Any) -> None:
        if len(self.distinct) > MAX_COUNTED:
            return
        different, rows = texts(column)
        present = {different[i] for i in np.unique(rows)}
        self.has_missing_text |= "" in present
        self.distinct |= present - {""}

    def _add_values(self, values: Float[np.ndarray, " r"]) -> None:
        values = values[np.isfinite(values)].astype(np.float64)
        if not len(values):
            return
        # the step from the last number of the piece before is one of the steps
        previous = [self._last] if self.n_known else []
        steps = np.diff(np.concatenate([previous, values]))
        self.steps_by_one &= bool((steps == 1).all())
        self.never_falls &= bool((steps >= 0).all())
        self.is_whole &= bool((values == np.rint(values)).all())
        self.low = min(self.low, float(values.min()))
        self.high = max(self.high, float(values.max()))
        self._last = float(values[-1])
        self.add_sum(float(values.sum()), len(values))
        if self.is_whole and len(self.distinct) <= MOST_CATEGORIES:
            self.distinct |= set(np.unique(values)[: MOST_CATEGORIES + 1].tolist())

    def add_sum(self, total: float, count: int) -> None:
        """Count further values by their sum: ages, which no column holds."""
        self.total += total
        self.n_known += count

    @property
    def is_settled(self) -> bool:
        """Whether no further row changes what it is taken for."""
        if self.kind == "text":
            return len(self.distinct) > MAX_COUNTED
        return self.kind == "number" and self.n_known > 0 and not rules_for(self)

    def coding(self, *, impute: bool) -> Coding:
        """How the column becomes numbers; missing values are filled in only if ``impute``."""
        if self.kind == "text":
            categories = sorted(self.distinct)
            if not categories and not self.has_missing_text:
                return Coding(column=self.name, kind="hashed")
            if impute and self.has_missing_text:
                categories = ["", *categories]
            if not categories or len(categories) > MOST_CATEGORIES:
                return Coding(column=self.name, kind="hashed")
            return Coding(column=self.name, kind="one-hot", categories=tuple(categories))

        # the mean fills in what is missing, where there is one
        fill = None
        if impute and self.n_known and np.isfinite(self.total):
            fill = self.total / self.n_known
        if self.kind != "date" or self.counts_ages:
            kind = "age" if self.kind == "date" else self.kind
            return Coding(column=self.name, kind=kind, fill=fill)

        # dates are counted from the first one
        start = self.low if self.n_known else 0.0
        if fill is not None:
            fill -= start
        return Coding(column=self.name, kind="date", start=start, fill=fill)


# ---------------------------------------------------------------- codings


KIND_OF_CODING = {"one-hot": "text", "hashed": "text", "age": "date"}
"""What a column must hold to be coded, where the coding has another name."""


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
    column = plain_column(column)
    kind = KIND_OF_CODING.get(coding.kind, coding.kind)
    if pa.types.is_null(column.type) and kind == "text":
        column = column.cast(pa.string())
    if not pa.types.is_null(column.type) and kind_of(column.type) != kind:
        raise SchemaError(
            f"column {coding.column!r} must hold {lists}{WORDS_OF_KINDS[kind]}, as it did in the "
            f"table it was learned from: it holds {lists}{column.type}{place.inside}. Convert it."
        )
    if kind == "text":
        return _coded_texts(coding, column, place, impute=impute, unknown=unknown)

    # numbers, dates and durations are one coordinate each
    if coding.kind == "age":
        return days(column)[:, None]
    if kind == "number":
        values = numbers(column, coding.column, place, lists=lists)
    elif kind == "date":
        values = days(column) - coding.start
    else:
        values = seconds(column)
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
        "Correct it, or have it read as none of them with unknown='ignore' (in Python)."
    )


def _hashed(different: list[str]) -> Float[np.ndarray, "u w"]:
    """A sign at a place that the hash of a text names; zeros for an empty text."""
    from sklearn.feature_extraction import FeatureHasher

    hasher = FeatureHasher(HASHED, input_type="string", dtype=np.float32)
    return np.asarray(hasher.transform([[text] if text else [] for text in different]).toarray())
