"""Blocks, memory budgets and threads: how work is cut so that no temporary outgrows its budget."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

MEMORY_BUDGET = 2**30
"""Default bound, in bytes, on any one temporary."""

T = TypeVar("T")


def blocks(total: int, size: int) -> Iterator[slice]:
    """Cut ``range(total)`` into consecutive slices of at most ``size``.

    >>> list(blocks(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def block_size(bytes_per_item: int, memory_budget: int) -> int:
    """The number of items, at least one, whose temporaries fit in ``memory_budget`` bytes.

    >>> block_size(bytes_per_item=100, memory_budget=1000)
    10
    """
    return max(1, memory_budget // max(1, bytes_per_item))


def unit_exponent(array: np.ndarray, axis: int | tuple[int, ...] | None = None) -> np.ndarray:
    """The integer e with 2^e ≤ max |array| < 2^(e+1), along ``axis``; 0 where all is zero.

    ``np.ldexp(array, -e)`` is of size one, and exact: what has units is brought into the middle of
    the range of floats before it is squared or narrowed, and ``np.ldexp(result, e)`` brings the
    result back.

    >>> int(unit_exponent(np.array([3.0, -5.0])))
    2
    """
    largest = np.abs(array).max(axis=axis)
    return np.asarray(np.where(largest > 0, np.frexp(largest)[1] - 1, 0))


def narrowed(columns: np.ndarray, dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray]:
    """Columns, each in a unit that is a power of two, and the exponents of the units.

    For a precision that may not hold them otherwise.

    >>> wide = np.array([[3e-300], [1e-300]])
    >>> narrow, units = narrowed(wide, "float32")
    >>> narrow.dtype
    dtype('float32')
    >>> bool(np.allclose(np.ldexp(narrow.astype(np.float64), units), wide, atol=0))
    True
    """
    units = unit_exponent(columns, axis=0)
    return np.ldexp(columns, -units).astype(dtype), units


def set_blocks(offsets: np.ndarray, n_keys: int) -> list[slice]:
    """Cut sets that begin at ``offsets`` into slices of about ``n_keys`` keys.

    A slice has at least one set.

    >>> set_blocks(np.array([0, 2, 3, 9, 10]), n_keys=3)
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    n_sets = len(offsets) - 1
    slices = []
    start = 0
    while start < n_sets:
        # the last set that ends within n_keys keys of the start, but one set at least
        stop = int(np.searchsorted(offsets, offsets[start] + n_keys, side="right")) - 1
        stop = min(max(stop, start + 1), n_sets)
        slices.append(slice(start, stop))
        start = stop
    return slices


def thread_count() -> int:
    """Threads to use: the cores this process may run on, or fewer where the environment says so.

    ``NUMBA_NUM_THREADS`` and ``OMP_NUM_THREADS`` are honoured because joblib and Dask set them in
    their workers.
    """
    # macOS and Windows do not say which cores a process may use
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
        limit = os.environ.get(name, "")
        if limit.isdigit() and int(limit) > 0:
            count = min(count, int(limit))
    return count


_this_thread = threading.local()


def run_threads(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Call ``work`` on every item, on as many threads as we may use.

    ``work`` must release the GIL to gain by it: the compiled loops do. Plain threads rather than a
    compiled runtime's pool, because they may be started from any thread and survive a fork. Work
    that calls this function again does so in its own thread: all others are busy.
    """
    items = list(items)
    n_threads = min(thread_count(), len(items))
    is_nested = getattr(_this_thread, "is_of_a_pool", False)
    if n_threads <= 1 or is_nested:
        for item in items:
            work(item)
        return

    def mark_thread() -> None:
        _this_thread.is_of_a_pool = True

    with ThreadPoolExecutor(n_threads, initializer=mark_thread) as pool:
        # going through the results raises what a thread raised
        for _ in pool.map(work, items):
            pass


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor. Costs no import: without torch there are no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
