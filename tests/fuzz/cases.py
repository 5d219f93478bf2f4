"""What a case of the attack is, and how one is drawn.

A case is files and options that one reader is given. It is drawn in three steps: ``base`` draws a
valid beginning, ``mutate`` changes it once (damages a file, or appends a step to a sequence of
calls), and ``finish`` makes the case of it. Whoever makes a finding smaller leaves out mutations.
"""

from __future__ import annotations

import contextlib
import opcode
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

REFUSALS = (ValueError, TypeError, OSError, OverflowError)
"""Errors by which a call may refuse what it is given."""

SENTENCE = 15
"""Characters at least that make an error a sentence."""


@dataclass
class Case:
    """Files by their names, and what the reader is told."""

    format: str
    reader: str
    files: dict[str, bytes]
    options: dict[str, Any] = field(default_factory=dict)


def nothing_simpler(case: Case) -> Iterator[Case]:
    """No case that is simpler than this one, apart from one with fewer bytes."""
    yield from ()


@dataclass(frozen=True)
class Format:
    """One format or kind of sequence: its share of the cases, and the functions that draw them.

    A case has ``fewest`` mutations at least and ``most`` at most. ``simpler`` gives variants of a
    case that are easier to read, to be tried when a finding is made smaller.
    """

    share: float
    base: Callable[[Random], Any]
    mutate: Callable[[Random, Any], Any]
    finish: Callable[[Random, Any], Case]
    most: int = 4
    fewest: int = 1
    simpler: Callable[[Case], Iterator[Case]] = nothing_simpler


class LateError(Exception):
    """Something that was read and turned out unusable."""


@contextlib.contextmanager
def after_reading() -> Any:
    """What was read must work: no error is excused here, not even one in our words."""
    try:
        yield
    except (AssertionError, MemoryError):
        raise
    except Exception as error:
        raise LateError(f"{type(error).__name__}: {error}") from error


def is_refusal(error: BaseException, packages: tuple[str, ...] = ("keyhole",)) -> bool:
    """Whether an error refuses something, in a sentence that one of the packages wrote."""
    is_sentence = len(str(error)) > SENTENCE
    return isinstance(error, REFUSALS) and is_sentence and raised_by(error, packages)


def raised_by(error: BaseException, packages: tuple[str, ...]) -> bool:
    """Whether a raise statement in one of the packages raised an error.

    A C function called from a package leaves the package's frame innermost as well; the instruction
    that the frame stopped at tells them apart.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    code = trace.tb_frame.f_code
    inside = any(is_in_package(code.co_filename, package) for package in packages)
    return inside and opcode.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def is_in_package(path: str, package: str) -> bool:
    """Whether a source file is one of a package, and not of one installed beneath it."""
    folder = f"{os.sep}{package}{os.sep}"
    return folder in path and "site-packages" not in path.rpartition(package)[2]
