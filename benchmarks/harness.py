"""What every benchmark shares: best time, peak memory, and the ceilings of this machine, measured
in this run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Row = dict[str, Any]
"""name, seconds, ratio (rival seconds over ours), peak_mib, ceiling_share, note; None where it
makes no sense.
"""


def row(
    name: str,
    seconds: float,
    ratio: float | None = None,
    peak_mib: float | None = None,
    ceiling_share: float | None = None,
    note: str = "",
) -> Row:
    return {
        "name": name,
        "seconds": seconds,
        "ratio": ratio,
        "peak_mib": peak_mib,
        "ceiling_share": ceiling_share,
        "note": note,
    }


def header() -> str:
    return f"  {'':46}{'time':>10}{'ratio':>9}{'peak':>10}{'ceiling':>9}"


def line(row: Row) -> str:
    """A row for the terminal."""
    seconds = row["seconds"]
    time_text = f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
    ratio = f"{row['ratio']:.2f}×" if row["ratio"] is not None else ""
    peak = f"{row['peak_mib']:.0f} MiB" if row["peak_mib"] is not None else ""
    share = f"{row['ceiling_share']:.0%}" if row["ceiling_share"] is not None else ""
    return f"  {row['name']:46}{time_text:>10}{ratio:>9}{peak:>10}{share:>9}  {row['note']}"


def threads() -> int:
    from keyhole._array import thread_count

    return thread_count()


def best_seconds(work: Callable[[], Any], repeat: int = 3, warm: bool = True) -> float:
    """The best of ``repeat`` runs, after one to warm up (compiled loops, thread pools, page
    tables).
    """
    if warm:
        work()
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def interleaved_seconds(works: dict[str, Callable[[], Any]], repeat: int = 3) -> dict[str, float]:
    """The best of ``repeat`` rounds for each, taken in turns so that a noisy moment hits all
    alike.
    """
    for work in works.values():
        work()
    best = dict.fromkeys(works, float("inf"))
    for _ in range(repeat):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def peak_mib(work: Callable[[], Any]) -> float:
    """Highest resident size while ``work`` runs, over what it was before, in MiB; sampled every
    2 ms.
    """
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * page

    before = highest = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return (max(highest, resident()) - before) / 2**20


@cache
def gemm_rate(dtype: str) -> float:
    """FLOP/s of a 3000³ matrix product: the ceiling of arithmetic."""
    a = np.random.default_rng(0).standard_normal((3000, 3000)).astype(dtype)
    return 2 * 3000**3 / best_seconds(lambda: a @ a, repeat=3)


@cache
def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of copying 512 MiB: the ceiling of memory."""
    a = np.ones(2**26)
    b = np.empty_like(a)
    return 2 * a.nbytes / best_seconds(lambda: np.copyto(b, a), repeat=3)
