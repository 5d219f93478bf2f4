"""Checks that raise: every message gives the rule, the evidence and the remedy."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np


def check_finite(array: np.ndarray, name: str) -> None:
    """Raise if ``array`` holds NaN or infinity; the message names the first offender."""
    finite = np.isfinite(array)
    if finite.all():
        return
    where = tuple(int(i) for i in np.argwhere(~finite)[0])
    kind = "NaN" if np.isnan(array[where]) else "infinity"
    raise ValueError(
        f"`{name}` must be finite: found {kind} (NaN or inf) at index {where}, "
        f"{int((~finite).sum())} such entries in all. Impute or drop them before fitting."
    )


def check_float_array(value: Any, name: str) -> np.ndarray:
    """Return ``value`` as a float32 or float64 array; integers and numeric objects become float64."""
    array = np.asarray(value)
    if array.dtype == object:
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            # scikit-learn's own wording for the type error, which its checks look for
            raise type(error)(
                f"`{name}` must hold numbers: argument must be a string or a real number, and an element of the "
                f"object array of shape {array.shape} is not ({error}). Convert it to floating point first."
            ) from error
    if np.iscomplexobj(array):
        raise ValueError(
            f"`{name}` must be real. Complex data not supported: got dtype {array.dtype}. "
            "Pass real and imaginary parts as separate coordinates."
        )
    if array.dtype.kind not in "fiub":
        raise ValueError(f"`{name}` must hold numbers: got dtype {array.dtype}. Encode text or dates as numbers first.")
    if array.dtype not in (np.float32, np.float64):
        array = array.astype(np.float64)
    return array


LARGEST_COUNT = 2**63 - 1
"""The largest number that arrays, tables and files count to."""


def check_count(value: Any, name: str, minimum: int = 1, maximum: int | None = None) -> int:
    """Return ``value`` as an int of at least ``minimum``, and at most ``maximum`` if given."""
    try:
        if isinstance(value, bool):
            raise TypeError
        count = operator.index(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be an integer of at least {minimum}: got {value!r} of type {type(value).__name__}."
        ) from None
    if count < minimum:
        raise ValueError(f"`{name}` must be at least {minimum}: got {count}.")
    if maximum is not None and count > maximum:
        raise ValueError(
            f"`{name}` must be at most {maximum}: got a number of {count.bit_length()} bits. Choose a smaller one."
        )
    return count


def check_number(value: Any, name: str, *, minimum: float = -math.inf, exclusive: bool = False) -> float:
    """Return ``value`` as a finite float no smaller than (or, if exclusive, larger than) ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"`{name}` must be a number: got {value!r} of type {type(value).__name__}.")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be finite: got {number}.")
    if number < minimum or (exclusive and number == minimum):
        bound = "larger than" if exclusive else "at least"
        raise ValueError(f"`{name}` must be {bound} {minimum:g}: got {number:g}.")
    return number


def check_choice(value: Any, name: str, choices: tuple[str, ...]) -> str:
    """Return ``value`` if it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        known = ", ".join(repr(c) for c in choices)
        raise ValueError(f"`{name}` must be one of {known}: got {value!r}.")
    return value


def check_seed(seed: Any, name: str = "seed") -> int:
    """Return ``seed`` as a non-negative int: the same seed is the same draw on every machine."""
    return check_count(seed, name, minimum=0)


def check_pairs(pairs: Any, query_dim: int, dim: int) -> tuple[tuple[int, int], ...] | None:
    """Return pairs of coordinates as tuples, or None."""
    if pairs is None:
        return None
    stated = np.asarray(pairs)
    if stated.ndim != 2 or stated.shape[1] != 2 or stated.dtype.kind not in "iu" or not len(stated):
        raise ValueError(f"`pairs` must be (query coordinate, key coordinate) pairs of integers: got {pairs!r:.200}.")
    outside = ((stated < 0) | (stated >= [query_dim, dim])).any(axis=1)
    if outside.any():
        raise ValueError(
            f"`pairs` must name coordinates that are there: got {tuple(stated[outside][0].tolist())} for queries of "
            f"dimension {query_dim} and keys of dimension {dim}. Coordinates count from 0."
        )
    return tuple((int(i), int(j)) for i, j in stated)
