"""Measurements of `keyhole explore`: one at a time, in a process of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from keyhole.lab.explore.fits import Results, Run
from keyhole.lab.explore.worker import Worker, WorkerEndedError

MEASURE_SECONDS = 600.0  # of a measurement


def fit_run(run: Run, folder: Path) -> None:
    """Fit, and keep the errors."""
    Results(folder).keep(run, run.errors())


class Measurement:
    """Fits runs in a process of its own, one after the other; one measurement at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._worker = Worker()
        self._lock = threading.Lock()  # of everything below
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._message = ""
        self._started = 0.0
        self._done = 0
        self._total = 0
        self._finished = 0  # runs since the server started

    def start(self, runs: list[Run]) -> None:
        """Fit the runs; a ValueError where a measurement is going on."""
        with self._lock:
            if self._thread is not None:
                raise ValueError(
                    "one measurement runs at a time: stop the one that does, or wait for it."
                )
            self._is_stopped = False
            self._message = ""
            self._started = time.monotonic()
            self._done = 0
            self._total = len(runs)
            self._thread = threading.Thread(target=self._fit, args=(runs,), daemon=True)
            self._thread.start()

    def _fit(self, runs: list[Run]) -> None:
        """What the thread of a measurement does."""
        message = ""
        try:
            for run in runs:
                if self._is_stopped:
                    break
                left = self._started + MEASURE_SECONDS - time.monotonic()
                if left <= 0:
                    message = f"stopped after {MEASURE_SECONDS:g} s: what is finished is kept"
                    break
                self._worker.ask(fit_run, run, self.folder, seconds=left)
                with self._lock:
                    self._done += 1
                    self._finished += 1
        except (ValueError, WorkerEndedError) as error:
            message = f"a fit has failed: {error}"
        with self._lock:
            self._message = "stopped" if self._is_stopped else message
            self._thread = None

    def stop(self) -> None:
        """End the measurement; runs that are finished stay."""
        with self._lock:
            thread = self._thread
            self._is_stopped = True
        while thread is not None and thread.is_alive():
            self._worker.stop()
            thread.join(0.05)

    def close(self) -> None:
        """Stop, and measure no more."""
        self._worker.close()
        self.stop()

    def news(self) -> dict[str, Any]:
        """How far it is: what every tab asks for."""
        with self._lock:
            left = None
            if self._done:
                seconds = time.monotonic() - self._started
                left = seconds / self._done * (self._total - self._done)
            return {
                "running": self._thread is not None,
                "message": self._message,
                "finished": self._finished,
                "done": self._done,
                "total": self._total,
                "left": left,
            }
