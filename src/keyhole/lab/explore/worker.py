"""A process that works for the server, one piece of work at a time, and can be ended at any moment.

Whatever the work does (it computes for minutes, or a damaged file ends its process), the server
goes on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 2**32
"""Bytes of address space of a process, where the system has such a limit."""


class WorkerEndedError(RuntimeError):
    """The process has ended before its work was done."""


@dataclass(frozen=True)
class _Refusal:
    """Instead of an answer: why there is none. Only its words leave the process."""

    words: str


def _serve(connection: Connection) -> None:
    """What the process does: work until nobody asks any more."""
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with suppress(EOFError, OSError):
        while True:
            function, arguments = connection.recv()
            try:
                answer = function(*arguments)
            except MemoryError:
                answer = _Refusal(f"this needs more than the {MEMORY >> 30} GiB that are allowed.")
            except (ValueError, ArithmeticError, OSError) as error:
                answer = _Refusal(str(error) or type(error).__name__)
            connection.send(answer)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process that is started within never hears of Ctrl-C, which is the server's business."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # the process that multiprocessing starts along with the first one lets the signal through again
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker:
    """A process with a pipe to it. It is started by the first work, and again after `stop`."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # held while the process works
        self._state = threading.Lock()  # of what follows
        self._process: Any = None
        self._connection: Connection | None = None
        self._is_closed = False

    def ask(
        self, function: Callable[..., Any], *arguments: Any, seconds: float | None = None
    ) -> Any:
        """What a function of a module returns there; a ValueError where it refuses.

        After so many seconds the process is ended.
        """
        with self._turn:
            connection = self._started()
            try:
                connection.send((function, arguments))
                if not connection.poll(seconds):
                    raise WorkerEndedError(f"it took more than {seconds:g} s.")
                answer = connection.recv()
            except (EOFError, OSError):
                self._end()
                raise WorkerEndedError("its process has ended.") from None
            except WorkerEndedError:
                self._end()
                raise
        if isinstance(answer, _Refusal):
            raise ValueError(answer.words)
        return answer

    def stop(self) -> None:
        """End what is being worked on: whoever asked for it gets a `WorkerEndedError`."""
        with self._state:
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End the process, and start no other."""
        with self._state:
            self._is_closed = True
        self.stop()

    def _started(self) -> Connection:
        """The pipe to a process that lives."""
        with self._state:
            if self._is_closed:
                raise WorkerEndedError("the server has ended.")
            is_running = self._process is not None and self._process.is_alive()
            if self._connection is None or not is_running:
                context = get_context("spawn")
                self._connection, other_end = context.Pipe()
                self._process = context.Process(target=_serve, args=(other_end,), daemon=True)
                with _interrupts_held():
                    self._process.start()
                other_end.close()
            return self._connection

    def _end(self) -> None:
        """Forget a process whose pipe is not to be used again."""
        self.stop()
        with self._state:
            if self._process is not None:
                self._process.join()
            if self._connection is not None:
                self._connection.close()
            self._process = None
            self._connection = None
