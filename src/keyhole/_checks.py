"""Checks that raise: every message gives the rule, the evidence and the remedy."""

from __future__ import annotations

import math
import operator
from collections.abc import Sized
from typing import Any

import numpy as np
from jaxtyping import Float, Int


class FeatureOverflowError(ValueError, OverflowError):
    """Features or kernels are beyond the range of floating point."""


class NoPenaltyError(ValueError):
    """Leave-one-out can judge none of the penalties: rounding hides the fits without a sample."""


def check_finite(array: np.ndarray, name: str) -> None:
    """Raise if ``array`` holds NaN or infinity; the message names the first offender."""
    finite = np.isfinite(array)
    if finite.all():
        return
    where = tuple(int(i) for i in np.argwhere(~finite)[0])
    if np.isnan(array[where]):
        kind = "NaN"
    else:
        kind = "infinity"
    raise ValueError(
        f"`{name}` must be finite: found {kind} (NaN or inf) at index {where}, "
        f"{int((~finite).sum())} such entries in all. Impute or drop them before fitting."
    )


def check_no_mask(value: Any, name: str) -> None:
    """Raise if an entry of ``value``, an array or a sequence of arrays, is masked.

    NumPy would read it all the same.
    """
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            check_no_mask(item, f"{name}[{i}]")
    if not isinstance(value, np.ma.MaskedArray):
        return
    masked = np.ma.getmaskarray(value)
    count = int(masked.sum())
    if count == 0:
        return
    first = tuple(int(i) for i in np.argwhere(masked)[0])
    if count == 1:
        are = "is"
    else:
        are = "are"
    raise ValueError(
        f"`{name}` must have no masked entries: {count} of {masked.size} {are} masked, the first "
        f"at index {first}. What is under a mask is no data. Fill them in (np.ma.filled), or leave "
        "those samples out; kh.tokens.drop_missing drops masked tokens."
    )


def check_float_array(value: Any, name: str) -> np.ndarray:
    """Return ``value`` as a float32 or float64 array.

    Integers and numeric objects become float64.
    """
    check_no_mask(value, name)

    # rows of different lengths are no array
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ValueError(
            f"`{name}` must be an array of numbers: its rows have different lengths ({error}). "
            "Give every row the same length."
        ) from error

    # objects that are numbers, such as Decimal
    if array.dtype == object:
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            # scikit-learn's own wording for the type error, which its checks look for
            raise type(error)(
                f"`{name}` must hold numbers: argument must be a string or a real number, and an "
                f"element of the object array of shape {array.shape} is not ({error}). Convert it "
                "to floating point first."
            ) from error

    # numbers that are no real numbers, and what is no number at all
    if np.iscomplexobj(array):
        raise ValueError(
            f"`{name}` must be real. Complex data not supported: got dtype {array.dtype}. "
            "Pass real and imaginary parts as separate coordinates."
        )
    if array.dtype.kind not in "fiub":
        raise ValueError(
            f"`{name}` must hold numbers: got dtype {array.dtype}. Encode text or dates as numbers "
            "first."
        )

    # integers, flags and half precision
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float64)
    return array


LARGEST_COUNT = 2**63 - 1
"""The largest number that arrays, tables and files count to."""


WEIGHT_UNITS = 1e-30, 1e30
"""Bounds on the largest weight of a sample: its product with a squared feature is then a number of
float32 too.
"""

LEAST_WEIGHT = 1e-100
"""Bound on every positive weight: its square, and what is divided by its root, are then numbers of
float64.
"""


def check_weight_sizes(weights: np.ndarray, name: str) -> None:
    """Raise if a weight is outside of the range that floats leave room for.

    The largest weight, or a positive one.
    """
    if not weights.any():
        return
    low, high = WEIGHT_UNITS
    sample = int(weights.argmax())
    if low <= weights[sample] <= high:
        too_small = np.flatnonzero((weights > 0) & (weights < LEAST_WEIGHT))
        if not len(too_small):
            return
        sample = int(too_small[0])
    raise ValueError(
        f"the largest entry of `{name}` must lie between {low:.0e} and {high:.0e}, and no positive "
        f"one below {LEAST_WEIGHT:.0e}, because penalties and squared errors are in proportion to "
        f"them: sample {sample} has weight {weights[sample]:.3g}. Divide all of them by a common "
        "factor, or use 0 to leave a sample out."
    )


def check_count(value: Any, name: str, minimum: int = 1, maximum: int | None = None) -> int:
    """Return ``value`` as an int of at least ``minimum``, and at most ``maximum`` if given."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be an integer of at least {minimum}: got {value!r:.60} of type "
            f"{type(value).__name__}."
        ) from None
    if count < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}: got {count}.")
    if maximum is not None and count > maximum:
        raise ValueError(
            f"`{name}` must be at most {maximum}: got a number of {count.bit_length()} bits. "
            "Choose a smaller one."
        )
    return count


def check_number(
    value: Any, name: str, *, minimum: float = -math.inf, exclusive: bool = False
) -> float:
    """Return ``value`` as a finite float no smaller than ``minimum``.

    If exclusive, larger than ``minimum``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(
            f"`{name}` must be a number: got {value!r:.60} of type {type(value).__name__}."
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be finite: got {number}.")
    if exclusive and number <= minimum:
        raise ValueError(f"`{name}` must be larger than {minimum:g}: got {number:g}.")
    if number < minimum:
        raise ValueError(f"`{name}` must be at least {minimum:g}: got {number:g}.")
    return number


def check_flag(value: Any, name: str) -> bool:
    """Return ``value`` as True or False; 0 and 1 will do, an array or a word will not."""
    is_flag = isinstance(value, (bool, np.bool_))
    is_integer = isinstance(value, (int, np.integer)) and value in (0, 1)
    if not is_flag and not is_integer:
        raise TypeError(
            f"`{name}` must be True or False: got {value!r:.60} of type {type(value).__name__}."
        )
    return bool(value)


def check_choice(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        listing = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` must be one of {listing}: got {value!r:.60}.")
    return value


def check_seed(seed: Any, name: str = "seed") -> int:
    """Return ``seed`` as a non-negative int: the same seed is the same draw on every machine."""
    return check_count(seed, name, minimum=0)


def is_table(value: Any) -> bool:
    """Whether ``value`` is a table with named columns, of any library.

    A data frame, lazy or not, or an Arrow table.
    """
    # looked up on the type, because the columns of a lazy table would be computed
    kind = type(value)
    return hasattr(kind, "__dataframe__") or hasattr(kind, "columns")


def column_names(table: Any) -> list[Any]:
    """The names of the columns of a table: Arrow has column_names, data frames have columns."""
    return list(table.column_names if hasattr(table, "column_names") else table.columns)


def as_sequence(value: Any) -> Any:
    """Return ``value`` so that an integer index is a place.

    A series of pandas is indexed by its labels, which need not be places: it becomes a list.
    """
    is_series = hasattr(value, "iloc") and not is_table(value)
    if is_series:
        return list(value)
    return value


def check_labels(labels: np.ndarray, name: str, what: str) -> None:
    """Raise unless labels can be sorted and none is missing.

    ``what`` they name is said in the message.
    """
    # only objects, floats and dates can be missing
    missing = []
    if labels.dtype.kind in "OfM":
        missing = [i for i, label in enumerate(labels.tolist()) if _is_missing(label)]
    if missing:
        raise ValueError(
            f"`{name}` must name the {what} of every sample: sample {missing[0]} has "
            f"{labels[missing[0]]!s:.40} ({len(missing)} in all). Give them a label, or leave "
            "those samples out."
        )

    # NumPy sorts labels to tell classes apart, which objects of several kinds do not allow
    try:
        np.unique(labels)
    except TypeError:
        kinds = sorted({type(label).__name__ for label in labels.tolist()})
        raise ValueError(
            f"labels of `{name}` must be of one kind: got {' and '.join(kinds)}, which cannot be "
            "sorted. Convert them, for example to text."
        ) from None


def check_lengths(batch: Sized, values: Any, name: str) -> None:
    """Raise unless ``values`` has one entry per set."""
    if len(values) != len(batch):
        raise ValueError(
            f"`{name}` must have one entry per set: got inconsistent numbers of samples, "
            f"{len(batch)} sets and {len(values)} entries of `{name}`."
        )


def as_groups(
    groups: Any, batch: Sized, weights: Float[np.ndarray, " n"] | None = None
) -> Int[np.ndarray, " n"] | None:
    """Return the number of each sample's group, or None without groups.

    At least two groups must have a sample of positive weight.

    >>> as_groups(["story b", "story a", "story b"], batch=range(3)).tolist()
    [1, 0, 1]
    """
    if groups is None:
        return None
    check_no_mask(groups, "groups")
    labels = np.asarray(groups)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise ValueError(
            f"`groups` must be a 1d array, one label for each sample: got shape {labels.shape}."
        )
    check_lengths(batch, labels, "groups")
    check_labels(labels, "groups", "group")
    _, numbers = np.unique(labels, return_inverse=True)

    # a fit without the only group that has weight would have no samples
    labels_with_weight = labels
    if weights is not None:
        labels_with_weight = labels[weights > 0]
    names = np.unique(labels_with_weight)
    if len(names) < 2:
        raise ValueError(
            "`groups` must name at least two groups, so that one can be left out: got "
            f"{names.tolist()[0]!r} for all {len(labels_with_weight)} samples of positive weight. "
            "Leave `groups` out to leave samples out one by one."
        )
    return np.asarray(numbers)


def _is_missing(label: Any) -> bool:
    """Whether a label is None, or no number or date.

    pandas' NA says neither yes nor no when it is compared.
    """
    if label is None:
        return True
    try:
        return bool(label != label)
    except (TypeError, ValueError):
        return True


def check_pairs(pairs: Any, query_dim: int, dim: int) -> tuple[tuple[int, int], ...] | None:
    """Return pairs of coordinates as tuples, or None."""
    if pairs is None:
        return None
    check_no_mask(pairs, "pairs")
    table = np.asarray(pairs)
    has_two_columns = table.ndim == 2 and table.shape[1] == 2 and len(table) > 0
    if not has_two_columns or table.dtype.kind not in "iu":
        raise ValueError(
            "`pairs` must be (query coordinate, key coordinate) pairs of integers: got "
            f"{pairs!r:.200}."
        )
    outside = ((table < 0) | (table >= [query_dim, dim])).any(axis=1)
    if outside.any():
        raise ValueError(
            "`pairs` must name coordinates that are there: got "
            f"{tuple(table[outside][0].tolist())} for queries of dimension {query_dim} and keys "
            f"of dimension {dim}. Coordinates count from 0."
        )
    return tuple((int(i), int(j)) for i, j in table)
