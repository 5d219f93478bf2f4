"""Answers that take seconds: computed in a few threads while the page goes on.

A question stays alive as long as somebody asks for it again and again, as the page does. One that
nobody has asked for in a while is cancelled. Questions about one subject share most of their work
through caches, so that they run one after the other; other subjects need not wait for them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from keyhole.theory.limits import CancelledError, limits

N_THREADS = 2

MOST_QUESTIONS = 32
"""That wait or are being computed; whoever asks one more asks again until there is room."""

MOST_ANSWERS = 1024
"""That are kept, those asked for last."""

ABANDONED_SECONDS = 5.0
"""A question that was not asked for so long is cancelled; the page asks twice a second."""


@dataclass(eq=False)
class _Question:
    """A question that waits for a thread or is being computed."""

    subject: Hashable
    work: Callable[[], Any]
    last_asked: float  # by the monotonic clock
    is_running: bool = False
    is_cancelled: bool = False


@dataclass(frozen=True)
class _Answer:
    """What a question came to: a value, or an error for whoever asks next."""

    value: Any
    error: BaseException | None = None


class Background:
    """Threads that compute answers; none of them keeps the program from ending."""

    def __init__(
        self, n_threads: int = N_THREADS, abandoned_seconds: float = ABANDONED_SECONDS
    ) -> None:
        self.n_threads = n_threads
        self.abandoned_seconds = abandoned_seconds
        # guards all that follows, and wakes those who wait for a question or for an answer
        self._changed = threading.Condition()
        self._questions: OrderedDict[Hashable, _Question] = OrderedDict()  # the oldest first
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()  # asked for longest ago first
        self._threads: list[threading.Thread] = []

    def ask(
        self, key: Hashable, subject: Hashable, work: Callable[[], Any], deadline: float
    ) -> Any | None:
        """What ``work()`` returns, or None where that is not known by the deadline: then ask again.

        Parameters
        ----------
        key : hashable
            Equal keys have equal answers; an answer is kept.
        subject : hashable
            Of several questions about one subject one is computed at a time.
        work : callable
            It must not return None. An exception of it is raised by the next ``ask``.
        deadline : float
            By the monotonic clock.
        """
        with self._changed:
            # have it computed, and wait for it as long as the deadline allows
            if key not in self._answers:
                self._register(key, subject, work)
                self._changed.wait_for(
                    lambda: key in self._answers,
                    timeout=max(0.0, deadline - time.monotonic()),
                )

            # an answer that is asked for is kept longer; an error is told once
            answer = self._answers.get(key)
            if answer is None:
                return None
            self._answers.move_to_end(key)
            if answer.error is not None:
                del self._answers[key]
                raise answer.error
        return answer.value

    def cancel_all(self) -> None:
        """End every question, as soon as its computation looks at its limits."""
        with self._changed:
            for question in self._questions.values():
                question.is_cancelled = True

    def __len__(self) -> int:
        """How many questions are waiting or being computed."""
        return len(self._questions)

    def _register(self, key: Hashable, subject: Hashable, work: Callable[[], Any]) -> None:
        """Note that somebody wants this answer; a new question waits for a thread."""
        # a question that is there stays alive
        now = time.monotonic()
        question = self._questions.get(key)
        if question is not None:
            question.last_asked = now
            return

        # a new one, if there is room for it
        self._drop_abandoned()
        if len(self._questions) >= MOST_QUESTIONS:
            return
        self._questions[key] = _Question(subject=subject, work=work, last_asked=now)

        # a thread to compute it; a process that was forked has none of the threads of its parent
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if len(self._threads) < self.n_threads:
            thread = threading.Thread(
                target=self._compute,
                name=f"theory {len(self._threads)}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        self._changed.notify_all()

    def _is_wanted(self, question: _Question) -> bool:
        """Whether somebody still asks for the answer."""
        is_recent = time.monotonic() - question.last_asked <= self.abandoned_seconds
        return is_recent and not question.is_cancelled

    def _drop_abandoned(self) -> None:
        """Remove questions that wait for a thread and that nobody wants.

        Those that run end by themselves.
        """
        for key, question in list(self._questions.items()):
            if not question.is_running and not self._is_wanted(question):
                del self._questions[key]

    def _next(self) -> tuple[Hashable, _Question] | None:
        """The oldest question whose subject is not being computed."""
        self._drop_abandoned()
        running = {question.subject for question in self._questions.values() if question.is_running}
        for key, question in self._questions.items():
            if not question.is_running and question.subject not in running:
                return key, question
        return None

    def _compute(self) -> None:
        """What a thread does: one question after the other."""
        while True:
            key, question = self._take()
            answer = self._answer(question)
            self._tell(key, answer)

    def _take(self) -> tuple[Hashable, _Question]:
        """The next question, which no other thread takes; wait until there is one."""
        with self._changed:
            chosen = self._next()
            while chosen is None:
                self._changed.wait()
                chosen = self._next()
            key, question = chosen
            question.is_running = True
        return key, question

    def _answer(self, question: _Question) -> _Answer | None:
        """Do the work of a question; None if it was cancelled on the way."""
        try:
            with limits(is_wanted=lambda: self._is_wanted(question)):
                return _Answer(question.work())
        except CancelledError:
            return None
        except BaseException as error:  # whoever asked has to hear of it
            return _Answer(None, error)

    def _tell(self, key: Hashable, answer: _Answer | None) -> None:
        """Keep an answer, the oldest give way to it, and wake those who wait for it."""
        with self._changed:
            del self._questions[key]
            if answer is not None:
                self._answers[key] = answer
                while len(self._answers) > MOST_ANSWERS:
                    self._answers.popitem(last=False)
            self._changed.notify_all()
