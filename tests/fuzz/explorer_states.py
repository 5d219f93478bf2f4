"""States of `keyhole explore`: a random one, hostile values included, is answered or refused in
words.

``check_state(Random(seed))`` draws a state of all controls of the page, asks for its view in this
process, and raises an AssertionError where the view takes too much processor time, is no valid
answer, or refuses without words. The message has the state as an address. Whatever else is raised
is a finding too.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from urllib.parse import parse_qsl, urlencode

from keyhole.lab.explore import views
from keyhole.lab.explore.views import (
    VIEWS,
    ExploreState,
    View,
    answer_by,
    background,
    cells_of,
    show,
)
from keyhole.lab.report.document import Chart
from keyhole.lab.report.html import as_json, fragment
from keyhole.lab.task_learners import PARTS
from keyhole.theory.tasks import TASKS

SECONDS = 4.5
"""Processor time of one state, of all threads together."""

TARGET_SECONDS = 1.0
STEP_SECONDS = 0.15
STEP_MEMORY = 2**26
"""What the parts of a target and one step of the theory may take here by estimate.

Less than on the page, for there are many states, and estimates are right within a factor of three.
"""

PATIENCE_SECONDS = 0.05
SENTENCE = 15
"""Characters at least that make a refusal a sentence."""

RANGES = {
    "d": (1, 512),
    "N": (1, 1024),
    "n": (2, 10**7),
    "M": (1, 10**5),
    "c": (0.0, 4.0),
    "ridge": (0.0, 100.0),
    "noise": (0.0, 100.0),
    "top": (100, 10**7),
}
"""Ends of the ranges of the controls that are numbers."""

WHOLE = {"d", "N", "n", "M", "top"}

HOSTILE_NUMBERS = (
    "",
    " ",
    "nan",
    "-nan",
    "inf",
    "-inf",
    "1e400",
    "-1",
    "-0",
    "0",
    "0.0",
    "1e-400",
    "5e-324",
    "1e-300",
    "0x10",
    "1_0",
    " 8 ",
    "8.0",
    "8.5",
    "2e1",
    "--1",
    "1,5",
    "٣",
    "½",
    "9" * 400,
    "8\x00",
    "8\n",
    "None",
    "true",
    "<b>8</b>",
    "$(id)",
    "2147483648",
    "9223372036854775808",
    "1e15",
)

HOSTILE_TARGETS = (
    "",
    " ",
    "\x00",
    "corr\x00",
    "x" * 2000,
    "(" * 200,
    "corr" + "+corr" * 180,
    "<script>alert(1)</script>",
    "../../etc/passwd",
    "corr^999999999999999999999",
    "corr^-1",
    "corr^1.5",
    "corr ** 2",
    "corr^2^2",
    "1e400*corr",
    "1e300*corr",
    "1e-300*corr",
    "5e-324*token",
    "1e200*corr*1e200",
    "0*corr",
    "3",
    "corr-corr",
    "rotated(1e300)",
    "rotated(1e200)^3",
    "rotated(0.5, 99999999999999999999)",
    "rotated(nan)",
    "rotated()",
    "rotated(0.5",
    "(corr+token+query+1)^12",
    "(rotated(0.1)+rotated(0.2)+rotated(0.3)+corr)^5",
    "rotated(0.5)^6",
    "rotated(0.5)^4*token",
    "corr^64",
    "token^64*query^64",
    "corr/0",
    "corr/corr",
    "corr/1e-320",
    "cor",
    "tokеn",
    "__import__('os')",
    "corr\ntoken",
    "٣*corr",
    "corr % token",
    "∞",
    "1e308*corr+1e308*corr",
    "corr*1e-160",
    "corr + 1e-160*token",
    "1e49*corr",
    "1e-49*query^3",
)

HOSTILE_PICKS = (
    "",
    ",",
    "x",
    "10x",
    "x10",
    "10x10x10",
    "1e9x10",
    "-5x5",
    "10x10," * 20,
    "nanxnan",
    "10 x 10",
    "2x1",
)

ATOMS = ("corr", "token", "query", "corr", "token")


def check_state(rng: Random, seconds: float = SECONDS) -> None:
    """Draw a state and ask for its view; an AssertionError says what is wrong with the answer."""
    query = draw_query(rng)
    meets_a_page = rng.random() < 0.5
    # the same limits always: what was refused by one state is remembered for the next
    views.TARGET_SECONDS = TARGET_SECONDS
    views.STEP_SECONDS = views.QUICK_SECONDS = STEP_SECONDS
    views.STEP_MEMORY = STEP_MEMORY
    start = time.process_time()
    try:
        with _limited(seconds):
            _check_query(query, meets_a_page)
    except AssertionError as error:
        raise AssertionError(f"{error} (state ?{urlencode(query, errors='replace')})") from error
    spent = time.process_time() - start
    assert spent <= seconds, (
        f"{spent:.1f} s of processor time for the state ?{urlencode(query, errors='replace')}"
    )


def _check_query(query: dict[str, str], meets_a_page: bool) -> None:
    """Ask as a page does, which waits for nothing, or for everything there is."""
    try:
        state = ExploreState.read(query)
        # the address of a state is a state
        again = ExploreState.read(dict(parse_qsl(state.address)))
        assert again == state, f"the address reads back as {again}"
        if state.view == "tasks":
            # the halves of the task "position" belong to it
            tasks = {*state.tasks, *PARTS} if "position" in state.tasks else set(state.tasks)
            of_this_state = all(cell.target in tasks for cell in cells_of(state))
        else:
            of_this_state = all(cell.dim == state.dim for cell in cells_of(state))
        assert of_this_state, "cells of another state"
        if meets_a_page:
            view = _asked_by_a_page(state)
        else:
            view = show(state, {})
            assert not view.pending, "a view that was waited for is not complete"
    except ValueError as error:
        if len(str(error)) <= SENTENCE:
            raise AssertionError(f"a refusal without words: {error!r}") from error
        return
    _check_view(view, state)


def _asked_by_a_page(state: ExploreState) -> View:
    """What a page gets at once; what it would ask for again is cancelled, and ends."""
    token = answer_by.set(time.monotonic() + PATIENCE_SECONDS)
    try:
        view = show(state, {})
    finally:
        answer_by.reset(token)
        background.cancel_all()
    while len(background):
        background.cancel_all()
        time.sleep(0.001)
    return view


def _check_view(view: View, state: ExploreState) -> None:
    """Whether an answer is one that a page can show."""
    for note in view.notes:
        assert len(note) > SENTENCE, f"a note without words: {note!r}"
    compile("\n".join(view.lines), "<lines>", "exec")
    shown = json.loads(
        as_json({**fragment(view.blocks), "notes": view.notes, "text": state.describe()})
    )
    assert "<script" not in shown["html"], "a script in the page"
    assert view.blocks or view.notes, "an empty view that does not say why"
    for block in view.blocks:
        if isinstance(block, Chart):
            for series in block.series:
                assert len(series.x) == len(series.y), f"{series.name}: points without a place"
                assert not any(math.isnan(value) for value in series.y), (
                    f"{series.name}: a number that is none"
                )


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End a state that takes far too long, where signals reach this thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise AssertionError(f"more than {seconds:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def draw_query(rng: Random) -> dict[str, str]:
    """The part of an address after the ?: each control set or left out, now and then to
    nonsense.
    """
    query: dict[str, str] = {}
    if rng.random() < 0.95:
        query["view"] = rng.choice([*VIEWS, *VIEWS, "data"])
    if rng.random() < 0.02:
        query["view"] = rng.choice(["", "../views", "Curves", "\x00", "__class__"])
    if rng.random() < 0.85:
        query["target"] = _draw_target(rng)
    for name in RANGES:
        if rng.random() < 0.6:
            query[name] = _draw_number(rng, name)
    if rng.random() < 0.3:
        query["picks"] = _draw_picks(rng)
    if rng.random() < 0.3:
        names = [rng.choice([*TASKS]) for _ in range(rng.randint(1, 4))]
        query["tasks"] = ",".join(names)
    if rng.random() < 0.02:
        query["tasks"] = rng.choice(["", ",", "lookup,", "../lookup", "\x00", ",".join(TASKS)])
    if rng.random() < 0.02:
        query[rng.choice(["path", "", "token", "d ", "D", "\x00"])] = rng.choice(HOSTILE_NUMBERS)
    return query


def _draw_number(rng: Random, name: str) -> str:
    low, high = RANGES[name]
    kind = rng.random()
    if kind < 0.01:
        return rng.choice(HOSTILE_NUMBERS)
    if kind < 0.02:
        beyond = [
            low - 1,
            high + 1,
            -high,
            math.nextafter(low, -math.inf),
            math.nextafter(high, math.inf),
        ]
        return repr(rng.choice(beyond))
    if kind < 0.2:
        return repr(rng.choice([low, high]))
    # sizes at equal ratios, small penalties and noises included
    smallest = low if low > 0 else 1e-12
    value = smallest * (high / smallest) ** rng.random()
    if name == "c":
        value = rng.choice([0.0, 0.25, 0.5, 1.0, 2.0, 3.0, round(rng.uniform(low, high), 3)])
    return str(round(value)) if name in WHOLE else repr(value)


def _draw_picks(rng: Random) -> str:
    if rng.random() < 0.2:
        return rng.choice(HOSTILE_PICKS)
    places = [f"{rng.randint(2, 4000)}x{rng.randint(1, 4096)}" for _ in range(rng.randint(1, 12))]
    return ",".join(places)


def _draw_target(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.15:
        return rng.choice(HOSTILE_TARGETS)
    text = _draw_sum(rng, depth=0)
    if kind < 0.25:
        # a slip of the hand
        place = rng.randrange(len(text) + 1)
        slip = rng.choice(
            ["", "(", ")", "^", "*", "+", "-", "/", ".", ",", "x", "0", " ", "\x00", "é"]
        )
        text = text[:place] + slip + text[place + rng.randint(0, 2) :]
    return text


def _draw_sum(rng: Random, depth: int) -> str:
    n_terms = rng.choice([1, 1, 1, 2, 2, 3])
    return rng.choice([" + ", " - ", "+"]).join(_draw_product(rng, depth) for _ in range(n_terms))


def _draw_product(rng: Random, depth: int) -> str:
    return " * ".join(_draw_power(rng, depth) for _ in range(rng.choice([1, 1, 2, 2, 3])))


def _draw_power(rng: Random, depth: int) -> str:
    kind = rng.random()
    if kind < 0.1 and depth < 2:
        atom = f"({_draw_sum(rng, depth + 1)})"
    elif kind < 0.3:
        seed = rng.choice(["", "", f", {rng.randint(0, 9)}"])
        atom = f"rotated({rng.choice([0, 0.25, 0.5, 1, 1.5, 3])}{seed})"
    elif kind < 0.4:
        return rng.choice(["2", "0.5", "1e-3", "7", "1e10", "1e-40", "1e45", ".25", "3e0"])
    else:
        atom = rng.choice(ATOMS)
    power = rng.choice([1, 1, 1, 2, 2, 3, 4, 5, 8])
    if rng.random() < 0.02:
        power = rng.choice([0, 16, 33, 64, 65])
    return atom if power == 1 else f"{atom}^{power}"
