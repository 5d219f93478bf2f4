import threading

import numpy as np
import pytest

from keyhole._array import run_threads


def test_work_is_shared_out_among_threads(monkeypatch):
    monkeypatch.setattr("keyhole._array.thread_count", lambda: 2)
    both_have_begun = threading.Barrier(2, timeout=10)
    # each item waits for the other: one thread alone would never end
    run_threads(lambda item: both_have_begun.wait(), range(2))


def test_work_that_shares_out_work_again_stays_in_its_thread(monkeypatch):
    monkeypatch.setattr("keyhole._array.thread_count", lambda: 2)
    threads_of_item = np.empty((2, 3), dtype=object)

    def outer(i):
        run_threads(lambda j: inner(i, j), range(3))

    def inner(i, j):
        threads_of_item[i, j] = threading.get_ident()

    run_threads(outer, range(2))
    assert all(len(set(row)) == 1 for row in threads_of_item)


def test_what_a_thread_raises_is_raised(monkeypatch):
    monkeypatch.setattr("keyhole._array.thread_count", lambda: 2)

    def fail(item):
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        run_threads(fail, range(3))
