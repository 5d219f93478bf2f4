import math
import os
import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import keyhole as kh
import keyhole.solvers.solve
from keyhole._array import (
    WORTH_BLAS_THREADS,
    blas_threads_for,
    one_blas_thread,
    run_threads,
)


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


# --- threads of BLAS ------------------------------------------------------------------------------


def blas_threads():
    """Threads of the BLAS library that has most of them: one that scs brings never has two."""
    return max(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")


@pytest.fixture
def two_blas_threads():
    """What a user has on two cores; the tests themselves run with one."""
    with threadpool_limits(2, user_api="blas"):
        yield


def test_blas_has_one_thread_inside_and_what_it_had_outside(two_blas_threads):
    with one_blas_thread():
        assert blas_threads() == 1
        with one_blas_thread():
            assert blas_threads() == 1
        assert blas_threads() == 1
    assert blas_threads() == 2


def test_an_error_inside_lifts_the_limit(two_blas_threads):
    with pytest.raises(ZeroDivisionError), one_blas_thread():
        raise ZeroDivisionError
    assert blas_threads() == 2


def test_the_last_of_several_threads_lifts_the_limit(two_blas_threads):
    """The first to enter leaves first: each by itself would restore what it had found."""
    first_is_inside = threading.Event()
    second_is_inside = threading.Event()

    def first():
        with one_blas_thread():
            first_is_inside.set()
            assert second_is_inside.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_inside.wait(10)
    with one_blas_thread():
        second_is_inside.set()
        thread.join(10)
        assert blas_threads() == 1
    assert blas_threads() == 2


def status_of_child(work):
    """Fork, run ``work`` in the child, and return the number that it gives."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_lifts_a_limit_that_another_thread_of_its_parent_held(two_blas_threads):
    is_inside = threading.Event()
    may_leave = threading.Event()

    def hold():
        with one_blas_thread():
            is_inside.set()
            assert may_leave.wait(10)

    def enter_and_leave():
        with one_blas_thread():
            pass
        return blas_threads()

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_inside.wait(10)
    threads_in_child = status_of_child(enter_and_leave)
    may_leave.set()
    thread.join(10)
    assert threads_in_child == 2
    assert blas_threads() == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_that_was_forked_inside_lifts_the_limit_when_it_leaves(two_blas_threads):
    def fork_inside():
        limit = one_blas_thread()
        limit.__enter__()

        def leave():
            inside = blas_threads()
            limit.__exit__(None, None, None)
            return 10 * inside + blas_threads()

        status = status_of_child(leave)
        limit.__exit__(None, None, None)
        return status

    assert fork_inside() == 12
    assert blas_threads() == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_no_fork_happens_while_another_thread_changes_the_number_of_threads(monkeypatch):
    """The child would wait for ever for a lock of BLAS that the other thread held."""
    is_changing = threading.Event()
    may_go_on = threading.Event()
    events = []

    def change_slowly(numbers):
        events.append("begins")
        is_changing.set()
        may_go_on.wait(10)
        events.append("ends")

    def enter_and_leave():
        with one_blas_thread():
            pass

    monkeypatch.setattr("keyhole._array._set_blas_threads", change_slowly)
    thread = threading.Thread(target=enter_and_leave)
    thread.start()
    assert is_changing.wait(10)
    threading.Timer(0.2, may_go_on.set).start()
    assert status_of_child(lambda: len(events)) % 2 == 0, "it forked between changes"
    thread.join(10)


def test_large_matrices_keep_the_threads_of_blas(two_blas_threads):
    with blas_threads_for(WORTH_BLAS_THREADS):
        assert blas_threads() == 2
    with blas_threads_for(WORTH_BLAS_THREADS - 1):
        assert blas_threads() == 1


def test_small_fits_use_one_thread_of_blas(two_blas_threads, monkeypatch):
    """Two threads of BLAS wait for each other in loops, in the way of ours."""
    seen = []
    solve = keyhole.solvers.solve.solve_kernel

    def solve_and_look(problem, backend):
        seen.append(blas_threads())
        return solve(problem, backend)

    monkeypatch.setattr(keyhole.solvers.solve, "solve_kernel", solve_and_look)
    sets = kh.targets.sphere_sets(30, n_keys=3, dim=3, seed=0)
    y = kh.targets.TokenPower(2, dim=3)(sets)
    kh.AttentionRegressor(n_heads=math.inf, heads=kh.GaussianHeads(), alpha=0.1).fit(sets, y)
    assert seen
    assert all(threads == 1 for threads in seen)
    assert blas_threads() == 2
