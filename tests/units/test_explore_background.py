"""Answers that take seconds: kept, shared, and cancelled when nobody waits for them."""

import threading
import time

import pytest

from keyhole.lab.explore.background import Background
from keyhole.theory.limits import check_limits

LONG = 30.0


def soon():
    """A deadline that is never met in a test that passes."""
    return time.monotonic() + LONG


def now():
    return time.monotonic()


def wait_until(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def never():
    raise AssertionError("computed again")


def test_an_answer_is_kept():
    background = Background(n_threads=1)
    assert background.ask("key", "subject", lambda: 7, soon()) == 7
    assert background.ask("key", "subject", never, now()) == 7


def test_what_is_not_ready_is_asked_for_again():
    background = Background(n_threads=1)
    ready = threading.Event()
    assert background.ask("key", "subject", lambda: ready.wait(LONG), now()) is None
    assert background.ask("key", "subject", never, now()) is None
    ready.set()
    assert background.ask("key", "subject", never, soon()) is True


def test_a_question_that_nobody_asks_again_is_cancelled():
    background = Background(n_threads=1, abandoned_seconds=0.05)
    started, ended = threading.Event(), threading.Event()

    def work():
        started.set()
        try:
            while True:
                check_limits()
                time.sleep(0.001)
        finally:
            ended.set()

    assert background.ask("slow", "subject", work, now()) is None
    assert started.wait(LONG)
    assert ended.wait(LONG)
    wait_until(lambda: len(background) == 0)
    # whoever comes back later is answered
    assert background.ask("slow", "subject", lambda: "done", soon()) == "done"


def test_a_question_that_waits_for_a_thread_is_dropped_when_nobody_wants_it():
    background = Background(n_threads=1, abandoned_seconds=0.05)
    ready = threading.Event()
    background.ask("first", "subject", lambda: ready.wait(LONG), now())
    background.ask("second", "another", never, now())
    time.sleep(0.1)
    ready.set()
    wait_until(lambda: len(background) == 0)


def test_another_subject_does_not_wait():
    """Two questions about one subject keep one of two threads."""
    background = Background(n_threads=2)
    ready, second_started = threading.Event(), threading.Event()
    background.ask("first", "target", lambda: ready.wait(LONG), now())
    background.ask("second", "target", lambda: second_started.set() or 2, now())
    assert background.ask("third", "another target", lambda: 3, soon()) == 3
    assert not second_started.is_set()
    ready.set()
    assert background.ask("second", "target", never, soon()) == 2


def test_an_answer_that_is_known_needs_no_thread():
    background = Background(n_threads=1)
    ready = threading.Event()
    background.ask("known", "target", lambda: 1, soon())
    background.ask("slow", "another", lambda: ready.wait(LONG), now())
    assert background.ask("known", "target", never, now()) == 1
    ready.set()


def test_an_error_reaches_whoever_asks():
    background = Background(n_threads=1)

    def work():
        raise ZeroDivisionError("a slip of ours")

    with pytest.raises(ZeroDivisionError, match="a slip of ours"):
        background.ask("key", "subject", work, soon())
    assert background.ask("key", "subject", lambda: 1, soon()) == 1


def test_everything_ends_with_the_server():
    background = Background(n_threads=1)

    def work():
        while True:
            check_limits()

    background.ask("slow", "subject", work, now())
    background.ask("waiting", "another", never, now())
    background.cancel_all()
    wait_until(lambda: len(background) == 0)


def test_no_thread_keeps_the_program_from_ending():
    background = Background(n_threads=1)
    background.ask("key", "subject", lambda: 1, soon())
    assert all(thread.daemon for thread in background._threads)
