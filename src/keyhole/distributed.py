"""Fitting and predicting on a Dask cluster: the reduction of `keyhole.streaming`, its sums made where the data is.

Heads travel as a seed. A partition becomes sums of p × p numbers, and sums are added in a tree; what a worker that dies
had made is made again by another, from its partitions.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from keyhole._array import thread_count
from keyhole._checks import check_choice
from keyhole.data.batches import Batch, as_batch
from keyhole.data.reader import ParquetSets
from keyhole.estimators.streaming import N_PENDING, PendingBatches, Stream, forget_stream, gathered
from keyhole.ridge.design import PrincipalAxes
from keyhole.streaming import LayerRecipe, LayerSums, merge

FAN_IN = 4  # sums that one task adds
RETRIES = 3  # times that a task is tried again, on whatever worker is left


def fit_dask(
    estimator: Any,
    data: Any,
    client: Any = None,
    *,
    classes: Any = None,
    selection: str = "auto",
    partitions: int | None = None,
) -> Any:
    """Fit an estimator on a Dask cluster; the same numbers as `fit_batches` on one machine.

    Parameters
    ----------
    estimator : AttentionRegressor or AttentionClassifier
        Fitted in place.
    data : ParquetSets, path, dask Bag, dask DataFrame, or list of partitions
        A Bag of batches (X, y) or (X, y, sample_weight); a DataFrame with columns keys, y and, if there are any,
        query and weight, or any that `read_table` reads; a list whose items are batches, lists of batches, or
        dask Delayed objects of these.
    client : distributed.Client, str, or None
        A client, the address of a scheduler, or None for a local cluster of one process per core, which ends
        with the fit. A script that starts one needs ``if __name__ == "__main__":``, as all that start processes.
    classes : array, optional
        For a classifier, all labels; found by a pass over them otherwise.
    selection : "auto", "loo" or "gcv"
        As for `fit_batches`; "auto" is "loo", because a cluster can read its partitions twice.
    partitions : int, optional
        For Parquet files, tasks to cut them into; by default four for each thread of the cluster.

    Returns
    -------
    The estimator.

    Notes
    -----
    n (M (2D² + 4DN) + p²) operations, shared out; p² numbers for each task travel up the tree. For leave-one-out
    the p × p axes go to every worker, and 2np² operations follow.
    """
    check_choice(selection, "selection", ("auto", "loo", "gcv"))
    with connected(client) as cluster:
        parts = _partitions(data, partitions or 4 * _threads(cluster))
        forget_stream(estimator)
        if classes is None and hasattr(estimator, "decision_function"):
            found = _gather(cluster, [_delayed(_labels)(part) for part in parts])
            classes = np.unique(np.concatenate(found))
        if classes is not None:
            estimator._begin_classes(None, classes, again=True)
        first, *more = _gather(cluster, [_delayed(_peek)(parts[0])])[0]
        samples, single = estimator._checked(first, first=True)
        estimator._open(samples, single)
        stream = estimator._stream
        seen = PendingBatches([samples, *(estimator._checked(batch, first=False)[0] for batch in more)])
        stream.recipe = stream.settle(seen.flush()[0])
        template = light(estimator)
        leaves = [_delayed(_summarise)(template, stream.recipe, part) for part in parts]
        stream.sums = _gather(cluster, [_tree(leaves, merge)])[0]
        estimator.n_samples_seen_ = stream.sums.moments.count
        errors = partial(_error_pass, cluster, parts, template, stream)
        estimator._solve_stream(None if selection == "gcv" else errors)
    return estimator


def predict_dask(estimator: Any, data: Any, client: Any = None, *, method: str = "predict") -> Iterator[np.ndarray]:
    """Yield the predictions of each partition of ``data`` in order, made on a Dask cluster.

    Parameters as for `fit_dask`; partitions of Parquet files are their row groups. ``method`` may be
    "predict_proba" or "decision_function". No more partitions than twice the threads of the cluster are under way.
    """
    with connected(client) as cluster:
        parts, waiting = _partitions(data, None), deque[Any]()
        model = cluster.scatter(light(estimator), broadcast=True, hash=False)
        ahead = 2 * _threads(cluster)
        for part in parts:
            waiting.append(cluster.compute(_delayed(_predict)(model, method, part), retries=RETRIES))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def connected(client: Any) -> Iterator[Any]:
    """A client for a client, the address of a scheduler, or None: a local cluster that ends with the work."""
    import distributed

    package: Any = distributed  # its types are incomplete
    if isinstance(client, str):
        with package.Client(client) as made:
            yield made
    elif client is None:
        options = {"n_workers": thread_count(), "threads_per_worker": 1, "processes": True, "dashboard_address": ":0"}
        with package.LocalCluster(**options) as cluster, package.Client(cluster) as made:
            yield made
    else:
        yield client


def light(estimator: Any) -> Any:
    """A copy without the sums, which no worker needs."""
    twin = copy.copy(estimator)
    twin.__dict__.pop("_stream", None)
    return twin


def _partitions(data: Any, count: int | None) -> list[Any]:
    """Partitions: things that `_batches` understands, or Delayed objects of them."""
    if isinstance(data, str) or hasattr(data, "__fspath__"):
        data = ParquetSets(data)
    if isinstance(data, ParquetSets):
        return list(data.parts(count))
    if hasattr(data, "to_delayed"):  # a Bag or a DataFrame
        return list(data.to_delayed())
    if isinstance(data, Sequence) and not isinstance(data, (str, tuple)) and len(data):
        return list(data)
    raise TypeError(
        "`data` must be a ParquetSets, a path, a dask Bag or DataFrame, or a list of partitions: got "
        f"{type(data).__name__}. One batch in memory is fitted by fit."
    )


def _batches(part: Any) -> Iterator[Batch]:
    """The batches of a partition, whatever it is."""
    if hasattr(part, "iloc"):
        yield from ParquetSets(part, weight="weight" if "weight" in part.columns else None)
    elif isinstance(part, (ParquetSets, list, Iterator)):
        for item in part:
            yield as_batch(item)
    else:
        yield as_batch(part)


def _peek(part: Any) -> list[Batch]:
    """The first samples, which say what all are like, and choose what is automatic."""
    held: list[Batch] = []
    for sets, y, weights in _batches(part):
        left = N_PENDING - sum(len(batch.y) for batch in held)
        held.append(Batch(sets[:left], y[:left], None if weights is None else weights[:left]))
        if len(y) >= left:
            break
    return held


def _labels(part: Any) -> np.ndarray:
    if isinstance(part, ParquetSets):
        return part.labels()
    return np.unique(np.concatenate([np.unique(batch.y) for batch in _batches(part)]))


def _summarise(template: Any, recipe: LayerRecipe, part: Any) -> LayerSums:
    sums = recipe.empty()
    for samples in gathered(template._checked(batch, first=False)[0] for batch in _batches(part)):
        recipe.add(sums, *samples)
    return sums


def _error_sums(template: Any, recipe: LayerRecipe, axes: PrincipalAxes, alphas: np.ndarray, part: Any) -> np.ndarray:
    total = np.zeros((len(alphas), recipe.n_outputs))
    for samples in gathered(template._checked(batch, first=False)[0] for batch in _batches(part)):
        total += recipe.error_sums(axes, alphas, *samples)
    return total


def _predict(model: Any, method: str, part: Any) -> np.ndarray:
    return np.concatenate([getattr(model, method)(batch.sets) for batch in _batches(part)])


def _tree(leaves: list[Any], add: Callable[[list[Any]], Any]) -> Any:
    """Add in a tree, so that no task waits for more than FAN_IN others."""
    while len(leaves) > 1:
        leaves = [_delayed(add)(leaves[i : i + FAN_IN]) for i in range(0, len(leaves), FAN_IN)]
    return leaves[0]


def _error_pass(
    cluster: Any, parts: list[Any], template: Any, stream: Stream, axes: PrincipalAxes, alphas: np.ndarray
) -> np.ndarray:
    """Sums of squared leave-one-out errors. The axes are sent out again should all workers that hold them die."""
    from distributed import CancelledError, KilledWorker

    for attempt in range(RETRIES + 1):
        try:
            shared = cluster.scatter(axes, broadcast=True, hash=False)
            leaves = [_delayed(_error_sums)(template, stream.recipe, shared, alphas, part) for part in parts]
            return np.asarray(_gather(cluster, [_tree(leaves, partial(np.sum, axis=0))])[0])
        except (CancelledError, KilledWorker, TimeoutError):
            if attempt == RETRIES:
                raise
    raise AssertionError("unreachable")


def _delayed(function: Callable[..., Any]) -> Any:
    from dask.delayed import delayed

    return delayed(function, pure=False, traverse=True)


def _gather(cluster: Any, tasks: list[Any]) -> list[Any]:
    return list(cluster.gather(cluster.compute(tasks, retries=RETRIES)))


def _threads(cluster: Any) -> int:
    return max(1, sum(cluster.nthreads().values()))
