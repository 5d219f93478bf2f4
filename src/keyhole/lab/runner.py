"""Running jobs: on worker processes of this machine, or on a Dask cluster; either way into one store.

Every worker runs one job at a time on one thread. Nothing is lost by stopping: a cell that was written stays, and a job
that is run again computes only what is missing.
"""

from __future__ import annotations

import importlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

from keyhole.lab.cells import Cell
from keyhole.lab.jobs import Done, Job, compute, group
from keyhole.lab.store import Store

CONNECT_SECONDS = 5.0  # how long a scheduler may take to pick up
POLL_SECONDS = 0.25  # how often the store is asked for news

SINGLE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
"""One thread for every library in a worker: the cores are shared out between jobs."""


class RunError(RuntimeError):
    """A run that could not be finished, in words for the person who started it."""


@dataclass(frozen=True)
class Plan:
    """What there is to do: the cells asked for, those without a result, and the jobs that have some of these."""

    cells: tuple[Cell, ...]
    missing: frozenset[Cell]
    jobs: tuple[Job, ...]  # longest first; a job has all its cells, done or not

    @classmethod
    def of(cls, cells: Collection[Cell], store: Store) -> Plan:
        """Compare what is asked for with what is there."""
        unique = tuple(dict.fromkeys(cells))
        missing = frozenset(unique) - frozenset(store.get(unique))
        jobs = [job for job in group(unique) if not missing.isdisjoint(job.cells)]
        return cls(unique, missing, tuple(jobs))

    def wanted(self, job: Job) -> tuple[Cell, ...]:
        """The cells of a job that are missing."""
        return tuple(cell for cell in job.cells if cell in self.missing)


OnFinished = Callable[[Collection[str]], None]
"""Told the keys of cells that were finished since it was last called; called at least every second or so."""


def run_local(plan: Plan, store: Store, n_workers: int | None, report: OnFinished) -> None:
    """Run the jobs of a plan on worker processes, as many as cores and memory allow; they write the store themselves.

    One worker and one job at a time is done in this process.
    """
    if not plan.jobs:
        return
    workers = worker_count(plan.jobs, n_workers)
    if workers == 1 and n_workers == 1:
        for job in plan.jobs:
            for cell, values, seconds in compute(job, plan.wanted(job)):
                store.put(cell, values, seconds, _here())
                report([cell.key])
        return
    last, _ = store.keys()
    pool = WorkerPool(workers)
    try:
        futures = {pool.submit(_run_into, store.path, job, plan.wanted(job)) for job in plan.jobs}
        while futures:
            done, futures = wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            last, keys = store.keys(last)
            report(keys)
            for future in done:
                future.result()
        report(store.keys(last)[1])
    except BrokenProcessPool as error:
        raise RunError(
            f"a worker process ended without a word, perhaps for want of memory ({workers} at a time). What is "
            "finished is kept: the same command goes on from there; with --jobs 1 it needs least."
        ) from error
    finally:
        pool.stop()


def worker_count(jobs: Sequence[Job], asked: int | None) -> int:
    """Workers at a time: what was asked for or the cores, no more than jobs, and no more than memory holds at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    count = min(asked or cores, len(jobs))
    free = available_memory()
    largest = sorted((job.memory for job in jobs), reverse=True)
    while count > 1 and free is not None and sum(largest[:count]) > 0.8 * free:
        count -= 1
    return max(count, 1)


def available_memory() -> int | None:
    """Bytes that new processes may take, None where the system does not say."""
    limits = []
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            limits += [1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")]
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            limits += [int(text) for text in [file.read().strip()] if text.isdigit()]
    except OSError:
        pass
    return min(limits, default=None)


@contextmanager
def _single_threaded() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in SINGLE}
    os.environ.update(SINGLE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class WorkerPool:
    """Worker processes that can be stopped at once, in the middle of a job."""

    def __init__(self, workers: int) -> None:
        with _single_threaded():  # spawned processes read it when they import BLAS, before any initialiser runs
            self._executor = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker)
            # the processes start with the first submissions: take them while the environment is as they need it
            for future in [self._executor.submit(os.getpid) for _ in range(workers)]:
                future.result()

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Give a worker something to do."""
        return self._executor.submit(work, *arguments)

    def stop(self) -> None:
        """End the workers, whatever they are doing."""
        processes = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the parent decides

    def end_with_parent(parent: Any) -> None:  # even with one killed too fast to say goodbye
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, args=[parent_process()], daemon=True).start()


def _here() -> str:
    return f"{socket.gethostname()}:{os.getpid()}"


def _run_into(path: Path, job: Job, wanted: tuple[Cell, ...]) -> None:
    """What a local worker does: every cell into the store as soon as it is known."""
    with Store(path) as store:
        for cell, values, seconds in compute(job, wanted):
            store.put(cell, values, seconds, _here())


def _run_away(job: Job, wanted: tuple[Cell, ...]) -> tuple[str, list[Done]]:
    """What a Dask worker does: the results travel back to the one who writes the store."""
    with _single_threaded():
        return _here(), list(compute(job, wanted))


def check_scheduler(address: str) -> None:
    """Raise unless something listens at the address, so that a slip costs seconds and no foreign traceback."""
    parts = re.fullmatch(r"(?:(tcp|tls)://)?(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    if parts is None or not 0 < int(parts[3]) < 2**16:
        raise RunError(
            f"--scheduler takes the address of a Dask scheduler, such as tcp://127.0.0.1:8786: got {address!r:.200}."
        )
    try:
        socket.create_connection((parts[2].strip("[]"), int(parts[3])), timeout=CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise _no_scheduler(address, error) from error


def _no_scheduler(address: str, error: Exception) -> RunError:
    return RunError(
        f"no Dask scheduler answers at {address!r:.200} ({type(error).__name__}: {error}). Start one with `dask "
        "scheduler` and workers with `dask worker ADDRESS`, and pass the address that the scheduler prints."
    )


def run_dask(plan: Plan, store: Store, address: str, report: OnFinished, patience: float = 10.0) -> None:
    """Run the jobs of a plan on a Dask cluster; this process writes the results.

    Jobs are submitted longest first. A worker that dies has its job given to another, up to ten times. ``address`` is
    that of the scheduler, such as tcp://127.0.0.1:8786, which is given ``patience`` seconds to answer.
    """
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise RunError(
            "--scheduler needs dask.distributed, which is not installed here. Install keyhole with its extra `dask` "
            "(pip install 'keyhole[dask]'), on the workers too, or leave --scheduler out to use the cores of this "
            "machine."
        ) from error
    check_scheduler(address)
    try:
        client = distributed.Client(address, timeout=patience, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise _no_scheduler(address, error) from error
    futures: list[Any] = []
    try:
        options: dict[str, Any] = {"retries": 10, "pure": False}
        futures = [
            client.submit(_run_away, job, plan.wanted(job), priority=-i, **options) for i, job in enumerate(plan.jobs)
        ]
        finished = distributed.as_completed(futures, loop=client.loop, with_results=True, raise_errors=False)
        for future, answer in finished:
            if future.status == "error":
                raise RunError(f"a job failed on the cluster, and again when it was tried anew: {future.exception()}")
            worker, done = answer
            for cell, values, seconds in done:
                store.put(cell, values, seconds, worker)
            report([cell.key for cell, _, _ in done])
            future.release()
    finally:
        client.cancel(futures)
        client.close()


class Timer:
    """Cells done, rate and time left, from costs rather than counts: the last cells of a job are its longest."""

    def __init__(self, plan: Plan, costs: dict[str, float]) -> None:
        self.costs, self.total = costs, len(plan.missing)
        self.done, self.spent, self.all = 0, 0.0, sum(costs.values())
        self.start = time.monotonic()

    def finish(self, keys: Collection[str]) -> None:
        """Count finished cells; those of other runs on the same store do not count."""
        for key in keys:
            cost = self.costs.pop(key, None)
            if cost is not None:
                self.done += 1
                self.spent += cost

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    @property
    def rate(self) -> float:
        """Cells per second."""
        return self.done / max(self.seconds, 1e-9)

    @property
    def left(self) -> float | None:
        """Seconds left, None before anything is known."""
        return self.seconds * (self.all / self.spent - 1) if self.spent > 0 else None
