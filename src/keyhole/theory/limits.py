"""Limits on a question to the theory: what it may cost by estimate, and whether it is still wanted.

Most questions take milliseconds. Blocks of heads with a mean can take minutes and gigabytes. Their
cost is estimated from sizes before they are computed. Whoever cannot wait sets limits around the
question, and a step beyond them is refused with a `CostError`. Without limits all is computed.

>>> with limits(seconds=5.0):
...     check_cost(seconds=0.1, memory=0.0, step="this step")
...     check_cost(seconds=60.0, memory=0.0, step="that step")
Traceback (most recent call last):
keyhole.theory.limits.CostError: that step takes about 60 s, and 5 s are allowed here. ...
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

OVERRUN = 5.0
"""How many times the estimated seconds that are allowed a question may really use its thread."""


class CostError(ValueError):
    """A step of the theory that costs more than is allowed; the message gives its estimate."""


class CancelledError(Exception):
    """A question that was ended because nobody waits for its answer.

    It is no ValueError: a refusal of the theory is an answer, and this is none.
    """


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Limits:
    """What a question may cost.

    Attributes
    ----------
    seconds, memory : float
        Estimated seconds and bytes of one step.
    is_wanted : callable
        Asked now and then while computing; False ends the question with a `CancelledError`.
    thread_end : float
        Where the clock of this thread's own processor time has to stand at most. It ends a question
        whose estimate was far too low.
    remedy : str
        What the person who asked can do to have it computed all the same.
    """

    seconds: float = math.inf
    memory: float = math.inf
    is_wanted: Callable[[], bool] = _always
    thread_end: float = math.inf
    remedy: str = "ask kh.theory in Python, which has no limit"


_current: ContextVar[Limits] = ContextVar("limits", default=Limits())  # noqa: B039 (it is frozen)


@contextmanager
def limits(
    seconds: float = math.inf,
    memory: float = math.inf,
    is_wanted: Callable[[], bool] | None = None,
    remedy: str | None = None,
) -> Iterator[None]:
    """Limit the questions asked within; of limits inside limits the narrower ones hold."""
    outer = _current.get()
    if is_wanted is None:
        is_wanted = outer.is_wanted
    if remedy is None:
        remedy = outer.remedy
    inner = Limits(
        seconds=min(seconds, outer.seconds),
        memory=min(memory, outer.memory),
        is_wanted=is_wanted,
        thread_end=min(time.thread_time() + OVERRUN * seconds, outer.thread_end),
        remedy=remedy,
    )
    token = _current.set(inner)
    try:
        yield
    finally:
        _current.reset(token)


def check_cost(seconds: float, memory: float, step: str) -> None:
    """Raise a `CostError` where a step that is about to be computed costs more than is allowed."""
    allowed = _current.get()
    if seconds > allowed.seconds:
        cost = f"about {seconds:,.0f} s"
        limit = f"{allowed.seconds:g} s are allowed here"
    elif memory > allowed.memory:
        cost = f"about {memory / 2**20:,.0f} MiB"
        limit = f"{allowed.memory / 2**20:,.0f} MiB are allowed here"
    else:
        return
    raise CostError(
        f"{step} takes {cost}, and {limit}. Lower the powers of the target, the mean c or the "
        f"number of samples, or {allowed.remedy}."
    )


def check_limits() -> None:
    """To be called in loops that take long: raise where the question is to end."""
    allowed = _current.get()
    if not allowed.is_wanted():
        raise CancelledError("nobody waits for this answer.")
    if time.thread_time() > allowed.thread_end:
        raise CostError(
            f"this question took more than {OVERRUN:g} times the {allowed.seconds:g} s that are "
            "allowed here. Lower the powers of the target, the mean c or the number of samples, or "
            f"{allowed.remedy}."
        )
