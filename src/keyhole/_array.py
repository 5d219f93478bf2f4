"""Blocks, memory budgets and threads: how work is cut so that no temporary outgrows its budget."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike
from threadpoolctl import ThreadpoolController

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


@cache
def _blas_libraries() -> list[Any]:
    """The BLAS libraries of NumPy and SciPy: looking for them takes 2 ms."""
    libraries = ThreadpoolController().lib_controllers
    return [library for library in libraries if library.user_api == "blas"]


def _set_blas_threads(numbers: Sequence[int]) -> None:
    """Give each BLAS library a number of threads, from whichever thread."""
    for library, number in zip(_blas_libraries(), numbers, strict=True):
        # since threadpoolctl 3.8, only the thread that set a number first may change it, as long as
        # that thread lives
        may_refuse = hasattr(library, "clear_controlling_thread")
        if may_refuse:
            library.clear_controlling_thread(force=True)
        library.set_num_threads(number)
        if may_refuse:
            library.clear_controlling_thread(force=True)


class _BlasLimit:
    """Limits BLAS to one thread, in the whole process, while any thread needs it.

    Two `threadpool_limits` that overlap would leave BLAS with one thread for good: the second to
    enter saves 1 as the number to restore, and restores it last.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while numbers of threads change, and while the process forks."""
        self.n_holders = 0
        self.threads_before: list[int] | None = None
        """The numbers of threads to go back to; None while there is no limit."""

    def take(self) -> None:
        """Set the limit, unless it is set already."""
        with self.lock:
            if self.threads_before is None:
                threads_now = [library.num_threads for library in _blas_libraries()]
                _set_blas_threads([1] * len(threads_now))
                self.threads_before = threads_now
            self.n_holders += 1
            _this_thread.n_blas_holds = _blas_holds_of_this_thread() + 1

    def give_back(self) -> None:
        """Lift the limit, unless somebody else still needs it."""
        with self.lock:
            self.n_holders -= 1
            _this_thread.n_blas_holds = _blas_holds_of_this_thread() - 1
            if self.n_holders == 0 and self.threads_before is not None:
                _set_blas_threads(self.threads_before)
                self.threads_before = None

    def wait_before_fork(self) -> None:
        """Let no other thread change the number of threads while the process forks.

        Otherwise the child could inherit a lock inside of BLAS that no thread of its own will
        release, and wait for it at its first matrix product.
        """
        self.lock.acquire()

    def go_on_in_parent(self) -> None:
        """After a fork, in the process that forked."""
        self.lock.release()

    def go_on_in_child(self) -> None:
        """After a fork, in the new process: of all threads only the one that forked is there.

        If another thread of the parent needed the limit, the child keeps it until its own next
        `take` and `give_back`. It is not lifted here, in the middle of the fork, because a call to
        BLAS could wait for ever.
        """
        self.lock = threading.RLock()
        self.n_holders = _blas_holds_of_this_thread()


def _blas_holds_of_this_thread() -> int:
    """How often this thread has taken the limit, and not given it back yet."""
    return getattr(_this_thread, "n_blas_holds", 0)


_blas_limit = _BlasLimit()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_blas_limit.wait_before_fork,
        after_in_parent=_blas_limit.go_on_in_parent,
        after_in_child=_blas_limit.go_on_in_child,
    )


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS uses one thread inside: for small matrices, where its threads are in the way of ours.

    A thread of BLAS that has nothing to do waits for the next call in a loop, on a core that ours
    could use. A default fit of 180 bags of the data set elephant takes 0.55 s with two threads of
    BLAS on two cores, and 0.22 s with one.

    Several threads may be inside at once: the first sets the limit, and the last lifts it. In the
    OpenBLAS of NumPy's and SciPy's wheels the number of threads belongs to the process. An OpenBLAS
    that was built with OpenMP has a number for each thread: there, only the first is limited.
    """
    _blas_limit.take()
    try:
        yield
    finally:
        _blas_limit.give_back()


WORTH_BLAS_THREADS = 2000
"""Rows of a square matrix from which on several threads of BLAS factorise it sooner than one."""


def blas_threads_for(n_rows: int) -> AbstractContextManager[None]:
    """As many threads of BLAS as pay for square matrices of so many rows: one for small ones."""
    if n_rows < WORTH_BLAS_THREADS:
        return one_blas_thread()
    return nullcontext()


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor. Costs no import: without torch there are no tensors."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
