"""Jobs: cells that share sets, features and a Gram matrix.

They are computed together with the bits they have alone.

They run on worker processes of this machine, or on a Dask cluster; either way into one store. Every
worker runs one job at a time on one thread. Nothing is lost by stopping: a cell that was written
stays, and a job that is run again computes only what is missing.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import connection, get_context, parent_process, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.attention.features import attention_features, mlp_features
from keyhole.attention.heads import GaussianHeads, sample_mlp_weights
from keyhole.attention.kernels import attention_kernel, mlp_kernel
from keyhole.data.sets import SetBatch
from keyhole.lab.cells import TASK_LEARNERS, Cell, Store, Values
from keyhole.lab.factorised import FactorisedGram
from keyhole.lab.task_learners import compute_tasks, task_cost
from keyhole.ridge.design import ridge_rows
from keyhole.ridge.gram import ridge_gram
from keyhole.solve.matrices import add_outer
from keyhole.ridge.problem import RidgeProblem
from keyhole.theory.harmonics import pair_powers
from keyhole.theory.notation import parse_target
from keyhole.theory.targets import Polynomial, sphere_sets

HEAD_BLOCK = 64
"""Heads added to the Gram matrix at a time. A fixed number, so that the sum of the first M heads is
one sequence of operations whatever M comes after; a square, so that the scale M^{-1/2} of a block
is taken off without rounding."""

DISTRIBUTIONS = {"attention": GaussianHeads(), "biased": GaussianHeads(mean=1.0)}


def nested_grams(
    model: str, train: SetBatch, test: SetBatch, heads: Sequence[int | None], seed: int
) -> Iterator[tuple[int | None, Float[np.ndarray, "n n"], Float[np.ndarray, "test n"]]]:
    """Yield M, the Gram matrix of the training sets and the kernel of test sets.

    For each M wanted; the kernel is that of test against training sets.

    ``heads`` has None for the exact kernel; the first M of a draw are the draw of M. Of the Gram
    matrix only the lower triangle in Fortran order is meant to be read. Cost: the n²MD operations
    of the largest M, and those of the last M mod 64 heads of each other.
    """
    if None in heads:
        yield None, *exact_kernels(model, train, test)
    finite = sorted({m for m in heads if m is not None})
    n = len(train) if finite else 0
    gram = np.zeros((n, n), order="F")
    cross = np.zeros((len(test), n))
    done = 0  # heads in the running sums
    for m in finite:
        # whole blocks go into the running sums
        while done + HEAD_BLOCK <= m:
            _add_heads(model, gram, cross, train, test, seed, done, done + HEAD_BLOCK)
            done += HEAD_BLOCK
        # the remaining heads go into copies, which a larger M does not see
        if m == finite[-1]:
            full = gram
            of_test = cross
        else:
            full = gram.copy(order="F")
            of_test = cross.copy()
        if done < m:
            _add_heads(model, full, of_test, train, test, seed, done, m)
        full *= 1.0 / m
        of_test *= 1.0 / m
        yield m, full, of_test


def exact_kernels(
    model: str, train: SetBatch, test: SetBatch, distribution: GaussianHeads | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The kernel of infinitely many heads among training sets, and of test against these.

    The first is in Fortran order.
    """
    if model == "mlp":
        return mlp_kernel(train).T, mlp_kernel(test, train)
    distribution = distribution or DISTRIBUTIONS[model]
    among_train = attention_kernel(train, heads=distribution).T
    of_test = attention_kernel(test, train, heads=distribution)
    return among_train, of_test


def _add_heads(
    model: str,
    gram: np.ndarray,
    cross: np.ndarray,
    train: SetBatch,
    test: SetBatch,
    seed: int,
    start: int,
    stop: int,
) -> None:
    """Add heads ``start … stop − 1`` without any M^{-1/2}.

    Of the MLP, as many hidden units as these heads have values.
    """
    count = stop - start
    width = train.dim + 1
    if model == "mlp":
        n_keys = int(train.lengths[0])
        weights = sample_mlp_weights(count * width, n_keys, train.dim, seed, start=start * width)
        # the MLP's own scale is (M(d+1))^{-1/2}, of which M^{-1/2} is taken off
        features = mlp_features(train, weights)
        of_test = mlp_features(test, weights)
    else:
        heads = DISTRIBUTIONS[model].sample(count, train.dim, seed, start=start)
        features = attention_features(train, heads)
        of_test = attention_features(test, heads)
    features *= math.sqrt(count)
    of_test *= math.sqrt(count)
    add_outer(gram, features)
    cross += of_test @ features.T


BASE_MEMORY = 2**28
"""Bytes of a worker process before it holds any matrix."""

HEADS_DRAWN = 80
"""The learner "fixed" draws its heads again until this many have been drawn: the luck of few heads
is averaged out.
"""

Done = tuple[Cell, Values, float]
"""A cell, what it came to, and the seconds since the one before it."""

_Label = tuple[str, float, float, float]


@dataclass(frozen=True)
class Job:
    """Cells that share a draw.

    Nested n and M, all targets and labels, one model, one repetition.
    """

    cells: tuple[Cell, ...]
    """In the order they are computed: by M, then by n, so that the costliest comes last."""

    @property
    def name(self) -> str:
        """A line for people."""
        first = self.cells[0]
        if first.n_heads is None:
            heads = "∞ heads"
        else:
            heads = f"{max(cell.n_heads or 0 for cell in self.cells)} heads"
        sizes = f"d = {first.dim}, N = {first.n_keys}, n ≤ {max(c.n_samples for c in self.cells)}"
        return (
            f"{first.model}, {first.learner}, {heads}, {sizes}, repetition {first.repetition + 1}"
        )

    @property
    def cost(self) -> float:
        """Seconds on one core, roughly: what schedules long jobs first and tells the time left."""
        return sum(cell_costs(self.cells).values())

    @property
    def memory(self) -> int:
        """Bytes that computing it takes at most.

        Two n × n matrices, the test kernel, a block of features.
        """
        first = self.cells[0]
        n = first.most_samples
        largest = max(cell.n_samples for cell in self.cells)
        # the running sum, a copy where other M follow, and the copy that is factorised
        has_other_counts = len({cell.n_heads for cell in self.cells}) > 1
        sums = 2 if has_other_counts else 1
        squares = sums * n * n + largest * largest
        features = 3 * HEAD_BLOCK * (first.dim + 1) * (n + first.n_test)
        return 8 * (squares + 2 * n * first.n_test + features) + BASE_MEMORY


def group(cells: Iterable[Cell]) -> list[Job]:
    """Join cells into jobs, longest first; the same cells in any order give the same jobs."""
    shared: dict[tuple[object, ...], list[Cell]] = {}
    ordered = sorted(set(cells), key=lambda cell: (cell.n_heads or 0, cell.n_samples, cell.config))
    for cell in ordered:
        shared.setdefault(_shared(cell), []).append(cell)
    jobs = [Job(tuple(members)) for members in shared.values()]
    return sorted(jobs, key=lambda job: (-job.cost, job.name))


def _shared(cell: Cell) -> tuple[object, ...]:
    """What cells of one job have in common."""
    if cell.learner in TASK_LEARNERS:
        # a job of its own for every task, learner and repetition: its sizes share what they can
        return (cell.learner, cell.model, cell.target, cell.n_keys, cell.n_heads, cell.repetition)
    draw = (
        cell.learner,
        cell.model,
        cell.dim,
        cell.n_keys,
        cell.most_samples,
        cell.n_test,
        cell.seed,
        cell.repetition,
    )
    if cell.learner == "fixed":
        return (*draw, cell.n_heads, cell.mean)
    if cell.learner == "ridge":
        # finite and infinite heads share nothing but the sets
        return (*draw, cell.n_heads is None)
    # the constrained learner shares nothing at all
    return (*draw, cell.config)


def cell_costs(cells: Collection[Cell]) -> dict[Cell, float]:
    """Seconds on one core for each cell, roughly.

    What is shared is counted with the first that needs it.
    """
    costs: dict[Cell, float] = {}
    seen: set[tuple[object, ...]] = set()
    for cell in cells:
        n = cell.n_samples
        most = cell.most_samples
        pairs = cell.n_keys**2 * (cell.dim + 4) / 20

        # the tasks of the literature
        if cell.learner in TASK_LEARNERS:
            costs[cell] = task_cost(cell)
            continue

        # the norm-ball learner
        if cell.learner in ("absolute", "huber"):
            per_number = 6e-5 if cell.learner == "absolute" else 9e-6
            costs[cell] = per_number * n * (cell.n_heads or 1) * (cell.dim + 1)
            continue

        # the exact kernel, once for all cells of a draw
        cost = 3e-3
        shared = _shared(cell)
        if shared not in seen and cell.n_heads is None:
            if cell.model == "mlp":
                per_entry = 2e-8
            elif cell.model == "biased":
                per_entry = 2e-9 * pairs * 3
            else:
                per_entry = 2e-9 * pairs
            cost += (most * most / 2 + most * cell.n_test) * per_entry

        # the Gram matrix of M heads, once for every M
        if cell.n_heads is not None and (*shared, cell.n_heads) not in seen:
            width = cell.n_heads * (cell.dim + 1)
            cost += (most * most + 2 * most * cell.n_test) * width / 4e10

        # the factorisation, once for every M and n
        if (*shared, cell.n_heads, n, cell.ridge) not in seen:
            if cell.ridge is None:
                order = 8 * n**3
            else:
                order = _head_draws(cell) * min(n, (cell.n_heads or n) * cell.dim) ** 3
            cost += order / 3 / 1.5e10 + 1e-3
        seen |= {shared, (*shared, cell.n_heads), (*shared, cell.n_heads, n, cell.ridge)}
        costs[cell] = cost
    return costs


def compute(job: Job, wanted: Collection[Cell] | None = None) -> Iterator[Done]:
    """Compute the cells of a job, or those wanted of them.

    What they share is made anew, with the same bits.

    BLAS is held to one thread: how it splits a sum over several is its own affair, and would show
    in the last digit.
    """
    from threadpoolctl import ThreadpoolController

    cells = [cell for cell in job.cells if wanted is None or cell in wanted]
    if not cells:
        return
    if cells[0].learner in ("absolute", "huber", *TASK_LEARNERS):
        import keyhole.estimators  # noqa: F401  (whatever BLAS it brings along has to be seen by the next line)
    libraries = ThreadpoolController()
    steps = _steps(cells)
    start = time.perf_counter()
    while True:
        # the limit is set for each step and not around the loop: whoever drives this generator has
        # threads of its own
        with libraries.limit(limits=1):
            step = next(steps, None)
        if step is None:
            return
        now = time.perf_counter()
        yield *step, now - start
        start = now


def _steps(cells: list[Cell]) -> Iterator[tuple[Cell, Values]]:
    """What computes the cells of a job, by the learner that they have in common."""
    learner = cells[0].learner
    if learner == "ridge":
        return _ridge(cells)
    if learner == "fixed":
        return _fixed_ridge(cells)
    if learner in TASK_LEARNERS:
        return compute_tasks(cells)
    return _ball(cells)


@dataclass(frozen=True)
class Draw:
    """The sets, heads and noise of one repetition."""

    train: SetBatch
    test: SetBatch
    head_seed: int
    noise_seed: int

    @classmethod
    def of(cls, cell: Cell) -> Draw:
        """The draw of a cell: one for all models, so that they are compared on the same sets."""
        words = [cell.seed, cell.dim, cell.n_keys, cell.repetition]
        train, test, heads, noise = (
            int(s) for s in np.random.SeedSequence(words).generate_state(4)
        )
        return cls(
            train=sphere_sets(cell.most_samples, cell.n_keys, cell.dim, train),
            test=sphere_sets(cell.n_test, cell.n_keys, cell.dim, test),
            head_seed=heads,
            noise_seed=noise,
        )

    def labels(self, cell: Cell) -> np.ndarray:
        """f* on all training sets, with the noise and the outliers that the cell asks for."""
        target = read_target(cell.target, cell.dim)
        y = target(self.train)
        if cell.noise == 0.0 and cell.outliers == 0.0:
            return y
        # the order of the draws is part of every stored result
        rng = np.random.default_rng(self.noise_seed)
        noise = rng.standard_normal(len(y))
        signs = rng.choice([-1.0, 1.0], size=len(y))
        is_outlier = rng.random(len(y)) < cell.outliers
        scale = np.sqrt(target_variance(target, cell.n_keys))
        jumps = np.where(is_outlier, cell.outlier_size * signs, 0.0)
        return np.asarray(y + scale * (np.sqrt(cell.noise) * noise + jumps))

    def all_labels(
        self, cells: list[Cell]
    ) -> tuple[dict[_Label, np.ndarray], dict[str, np.ndarray]]:
        """Labels by what makes them differ, and f* on the test sets by target."""
        labels = {_label(cell): cell for cell in cells}
        truths = {
            cell.target: read_target(cell.target, cell.dim)(self.test) for cell in labels.values()
        }
        return {label: self.labels(cell) for label, cell in labels.items()}, truths


@lru_cache(maxsize=256)
def read_target(text: str, dim: int) -> Polynomial:
    """The polynomial of a notation."""
    return parse_target(text, dim).target


def target_variance(target: Polynomial, n_keys: int) -> float:
    """Var f* under the sphere distribution.

    >>> from keyhole.theory.targets import TokenPower
    >>> round(target_variance(TokenPower(1, dim=8), n_keys=4), 6)    # 1/(dN)
    0.03125
    """
    powers = pair_powers(target)
    return float(powers[1:, 0].sum() + powers[:, 1:].sum() / n_keys)


def _ridge(cells: list[Cell]) -> Iterator[tuple[Cell, Values]]:
    draw = Draw.of(cells[0])
    labels, truths = draw.all_labels(cells)
    heads = list(dict.fromkeys(cell.n_heads for cell in cells))
    for m, gram, cross in nested_grams(
        cells[0].model, draw.train, draw.test, heads, draw.head_seed
    ):
        for n in dict.fromkeys(cell.n_samples for cell in cells if cell.n_heads == m):
            factorised = FactorisedGram.of(gram[:n, :n])
            for cell in cells:
                if cell.n_heads == m and cell.n_samples == n:
                    y = labels[_label(cell)][:n]
                    yield cell, factorised.outcome(y, cross[:, :n], truths[cell.target])
            del factorised


def _head_draws(cell: Cell) -> int:
    """How often the heads of a cell are drawn: once for the exact kernel."""
    if cell.n_heads is None:
        return 1
    return max(1, round(HEADS_DRAWN / cell.n_heads))


def _fixed_ridge(cells: list[Cell]) -> Iterator[tuple[Cell, Values]]:
    """What the theory describes: no intercept, the raw kernel or features, α = nλ.

    Errors are mean squares over the test sets, averaged over draws of the heads.
    """
    first = cells[0]
    draw = Draw.of(first)
    labels, truths = draw.all_labels(cells)
    n_draws = _head_draws(first)
    errors = dict.fromkeys(cells, 0.0)
    for number in range(n_draws):
        learner = _learner_of(first, draw, number)
        # one cell at a time, so that its bits do not depend on its neighbours
        for cell in cells:
            n = cell.n_samples
            y = labels[_label(cell)][:n, None]
            problem = RidgeProblem.of(y, [n * (cell.ridge or 0.0)], fit_intercept=False)
            predicted = learner.predictions(problem)[:, 0]
            mean_square = float(np.mean(np.square(predicted - truths[cell.target])))
            errors[cell] += mean_square / n_draws
    for cell, error in errors.items():
        yield cell, {"mean_square": error}


@dataclass(frozen=True)
class KernelLearner:
    """Ridge on a kernel among training sets, nested in their number."""

    gram: Float[np.ndarray, "n n"]
    cross: Float[np.ndarray, "test n"]

    def predictions(self, problem: RidgeProblem) -> Float[np.ndarray, "test t"]:
        """Predictions for the test sets, of a fit to the first of the training sets."""
        n = len(problem.y)
        fit = ridge_gram(np.array(self.gram[:n, :n], order="F"), problem, overwrite_gram=True)
        return np.asarray(self.cross[:, :n] @ fit.coef)


@dataclass(frozen=True)
class FeatureLearner:
    """Ridge on features of training sets, by the smaller of the two Gram matrices."""

    features: Float[np.ndarray, "n p"]
    of_test: Float[np.ndarray, "test p"]

    def predictions(self, problem: RidgeProblem) -> Float[np.ndarray, "test t"]:
        """Predictions for the test sets, of a fit to the first of the training sets."""
        n = len(problem.y)
        features = self.features[:n]
        if features.shape[1] < n:
            fit = ridge_rows(lambda: iter([features]), problem)
            return np.asarray(self.of_test @ fit.coef)
        learner = KernelLearner(features @ features.T, self.of_test @ features.T)
        return learner.predictions(problem)


def _learner_of(cell: Cell, draw: Draw, number: int) -> KernelLearner | FeatureLearner:
    """The learner of a cell on the sets of a draw, with one of several draws of its heads."""
    distribution = GaussianHeads(mean=cell.mean) if cell.model == "biased" else GaussianHeads()
    if cell.n_heads is None:
        gram, cross = exact_kernels(cell.model, draw.train, draw.test, distribution)
        return KernelLearner(gram=gram, cross=cross)
    heads = distribution.sample(cell.n_heads, cell.dim, draw.head_seed + number)
    return FeatureLearner(
        features=attention_features(draw.train, heads),
        of_test=attention_features(draw.test, heads),
    )


def _label(cell: Cell) -> _Label:
    return cell.target, cell.noise, cell.outliers, cell.outlier_size


def _ball(cells: list[Cell]) -> Iterator[tuple[Cell, Values]]:
    import warnings

    from keyhole.estimators.norm_ball import NormBallRegressor, NormBallWarning

    for cell in cells:
        draw = Draw.of(cell)
        target = read_target(cell.target, cell.dim)
        truth = target(draw.test)
        y = draw.labels(cell)[: cell.n_samples]
        # the Huber loss bends at 1: labels in units of f*
        scale = np.sqrt(target_variance(target, cell.n_keys))
        model = NormBallRegressor(
            cell.n_heads or 1,
            heads=DISTRIBUTIONS[cell.model],
            loss=cell.learner,  # type: ignore[arg-type]
            tol=0.01,
            random_state=draw.head_seed,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NormBallWarning)  # the gap it stopped at is kept below
            model.fit(draw.train[: cell.n_samples], y / scale)
        error = float(np.mean((model.predict(draw.test) * scale - truth) ** 2) / np.var(truth))
        values = {
            "error": error,
            "gap": float(model.duality_gap_),
            "active_heads": float(len(model.active_heads_)),
            "radius": float(model.group_radius_),
        }
        yield cell, values


CONNECT_SECONDS = 5.0  # how long a scheduler may take to pick up
POLL_SECONDS = 0.25  # how often the store is asked for news

SINGLE = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)
"""One thread for every library in a worker: the cores are shared out between jobs."""


class RunError(RuntimeError):
    """A run that could not be finished, in words for the person who started it."""


@dataclass(frozen=True)
class Plan:
    """What there is to do.

    The cells asked for, those without a result, and the jobs that have some of these.
    """

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
"""Told the keys of cells that were finished since it was last called; called at least every second
or so.
"""


def run_local(plan: Plan, store: Store, n_workers: int | None, report: OnFinished) -> None:
    """Run the jobs of a plan on worker processes, as many as cores and memory allow.

    They write the store themselves.

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
            f"a worker process ended without a word, perhaps for want of memory ({workers} at a "
            "time). What is finished is kept: the same command goes on from there; with --jobs 1 "
            "it needs least."
        ) from error
    finally:
        pool.stop()


def worker_count(jobs: Sequence[Job], asked: int | None) -> int:
    """Workers at a time: what was asked for or the cores.

    No more than jobs, and no more than memory holds at once.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
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
            limits += [
                1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")
            ]
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


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C waits until the end, and processes that start inside never see it.

    It reaches the whole process group, and a process that is starting would print a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # the tracker starts with the first process, and lets interrupts through again: start it before
    resource_tracker.ensure_running()
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


class WorkerPool:
    """Worker processes that can be stopped at once, in the middle of a job.

    Why not ``joblib.Parallel``: its workers go on with their job when the process that started them
    is killed. Ours end with it (see `_begin_worker`), and what they have finished is in the store.
    """

    def __init__(self, workers: int) -> None:
        self._executor = ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_begin_worker
        )
        try:
            # spawned processes read the environment when they import BLAS, and may be interrupted,
            # before any initialiser runs
            with _single_threaded(), _interrupts_wait():
                # the processes start with the first submissions: take them while all is as they
                # need it
                for future in [self._executor.submit(os.getpid) for _ in range(workers)]:
                    future.result()
        except BaseException:
            self.stop()
            raise

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
    # Ctrl-C reaches the whole process group: the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # the worker also ends if its parent was killed before it could stop its workers
    def end_with_parent(parent: Any) -> None:
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
    """Raise unless something listens at the address.

    So that a slip costs seconds and no foreign traceback.
    """
    parts = re.fullmatch(r"(?:(tcp|tls)://)?(\[[0-9a-fA-F:]+\]|[^\s:/\[\]]+):(\d{1,5})", address)
    if parts is None or not 0 < int(parts[3]) < 2**16:
        raise RunError(
            "--scheduler takes the address of a Dask scheduler, such as tcp://127.0.0.1:8786: got "
            f"{address!r:.200}."
        )
    host = parts[2].strip("[]")
    port = int(parts[3])
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise _no_scheduler(address, error) from error


def _no_scheduler(address: str, error: Exception) -> RunError:
    return RunError(
        f"no Dask scheduler answers at {address!r:.200} ({type(error).__name__}: {error}). Start "
        "one with `dask scheduler` and workers with `dask worker ADDRESS`, and pass the address "
        "that the scheduler prints."
    )


def run_dask(
    plan: Plan, store: Store, address: str, report: OnFinished, patience: float = 10.0
) -> None:
    """Run the jobs of a plan on a Dask cluster; this process writes the results.

    Jobs are submitted longest first. A worker that dies has its job given to another, up to ten
    times. ``address`` is that of the scheduler, such as tcp://127.0.0.1:8786, which is given
    ``patience`` seconds to answer.
    """
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise RunError(
            "--scheduler needs dask.distributed, which is not installed here. Install keyhole with "
            "its extra `dask` (pip install 'keyhole-ml[dask]', or in a clone "
            "pip install '.[dask]'), on the workers too, or leave "
            "--scheduler out to use the cores of this machine."
        ) from error
    check_scheduler(address)
    try:
        client = distributed.Client(address, timeout=patience, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise _no_scheduler(address, error) from error
    futures: list[Any] = []
    try:
        # the longest jobs first; a job is given to another worker up to ten times
        for i, job in enumerate(plan.jobs):
            future = client.submit(
                _run_away, job, plan.wanted(job), priority=-i, retries=10, pure=False
            )
            futures.append(future)

        # results are written as they arrive
        finished = distributed.as_completed(
            futures, loop=client.loop, with_results=True, raise_errors=False
        )
        for future, result in finished:
            if future.status == "error":
                raise RunError(
                    "a job failed on the cluster, and again when it was tried anew: "
                    f"{future.exception()}"
                )
            worker, done = result
            for cell, values, seconds in done:
                store.put(cell, values, seconds, worker)
            report([cell.key for cell, _, _ in done])
            future.release()
    finally:
        client.cancel(futures)
        client.close()


class Timer:
    """Cells done, rate and time left, from costs rather than counts.

    The last cells of a job are its longest.
    """

    def __init__(self, plan: Plan, costs: dict[str, float]) -> None:
        self.costs = costs
        self.total = len(plan.missing)
        self.done = 0
        self.spent = 0.0
        self.all = sum(costs.values())
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
        if self.spent == 0:
            return None
        return self.seconds * (self.all / self.spent - 1)
