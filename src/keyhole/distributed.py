"""Fits and predictions on a Dask cluster: `fit_batches`, with its sums made where the data is.

Layers are settled here, on the first 2,000 sets in the order of the partitions. Then every
partition becomes sums of p × p numbers on a worker, and sums are merged in a tree. All that a
worker has made follows from the partitions: if it dies, others make it again, and nothing changes.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.base import is_classifier
from sklearn.utils.validation import check_is_fitted, column_or_1d

from keyhole._array import thread_count
from keyhole._checks import check_choice
from keyhole.data.batches import Batch, as_batch
from keyhole.data.reader import ParquetSets
from keyhole.data.schema import Schema
from keyhole.estimators import batches as in_batches
from keyhole.fit import streams
from keyhole.fit.samples import TrainingSet
from keyhole.fit.streams import Recipe, Stream
from keyhole.solve.sums import Axes, Sums

FAN_IN = 4
"""Sums that one task merges."""

RETRIES = 3
"""Times that a task is tried again, on whatever worker is left."""

LOOPBACK = "127.0.0.1"
"""Where a local cluster listens."""


def fit_dask(
    estimator: Any,
    data: Any,
    client: Any = None,
    *,
    classes: Any = None,
    selection: str = "auto",
    partitions: int | None = None,
    set_id: str | None = None,
    schema: Schema | None = None,
) -> Any:
    """Fit an estimator on a Dask cluster; the same numbers as `fit_batches` on one machine.

    The plain version is ``fit_batches`` on the batches of all partitions;
    docs/howto/out_of_core.md, "Dask", says when a cluster pays. Layers are settled on the first
    2,000 sets of positive weight, in the order of the partitions. If anything fails, the estimator
    is what it was before.

    Parameters
    ----------
    estimator : AttentionRegressor or AttentionClassifier
        Fitted in place.
    data : ParquetSets, path, dask Bag, dask DataFrame, or list of partitions
        A Bag of batches (X, y) or (X, y, sample_weight); a DataFrame with columns keys, y and, if
        there are any, query and weight, or any that `read_table` reads; a list whose items are
        batches, lists of batches, tables, or dask Delayed objects of these.
    client : distributed.Client, str, or None
        A client, the address of a scheduler, or None for a local cluster of one process per core,
        which ends with the fit and listens on the loopback interface only. A script that starts one
        needs ``if __name__ == "__main__":``, as all that start processes.
    classes : array, optional
        For a classifier, all labels; found by a pass over them otherwise.
    selection : "auto", "loo" or "gcv"
        As for ``fit_batches``; "auto" is "loo", because a cluster can read its partitions twice.
    partitions : int, optional
        For Parquet files, tasks to cut them into; by default four for each thread of the cluster.
    set_id : str, optional
        For tables with one row per token, the column that says which set a row belongs to; by
        default as `read_table` finds it. A DataFrame whose sets span partitions is shuffled by it;
        a list of tables whose sets do is refused.
    schema : Schema, optional
        How tables are read, ``kh.read_table(part_of_it).schema``. By default as the first one that
        has rows: all are read in the same way, and a category that is not in that one is refused.

    Returns
    -------
    The estimator.

    Notes
    -----
    p² numbers for each task travel up the tree. For leave-one-out the partitions are read a second
    time, and p² numbers go to every worker.
    """
    estimator._validate_params()
    in_batches.can_fit_batches(estimator)
    check_choice(selection, "selection", ("auto", "loo", "gcv"))
    with connected(client) as cluster:
        if partitions is None:
            partitions = 4 * _n_threads(cluster)
        parts = _partitions(
            cluster,
            _pieces(data, partitions),
            shuffle=getattr(data, "shuffle", None),
            schema=schema,
            set_id=set_id,
        )
        draft = copy.copy(estimator)
        in_batches.forget(draft)

        # the first samples; the very first says what all are like
        first = _first_batch(cluster, parts)
        if is_classifier(draft):
            in_batches.name_classes(draft, _all_labels(cluster, parts, classes))
        in_batches.checked(draft, first, is_first=True)
        stream = Stream().put(_first_samples(cluster, parts, draft))
        second_pass = None
        if stream.should_settle:
            # layers are settled on them, and the sums of all samples are made where these are
            worker = _Worker(template=copy.copy(draft))
            stream = in_batches.settled(draft, stream)
            assert stream.recipe is not None
            worker = replace(worker, recipe=stream.recipe.without_samples())
            total = _compute(cluster, _merged_in_tree(worker.sums, parts, Sums.merged))
            sums = total.result()
            stream = replace(stream, sums=sums, count=sums.count)
            if selection != "gcv":
                second_pass = _SecondPass(cluster, worker, parts, total)
        draft.stream_ = stream
        draft.n_samples_seen_ = stream.count
        in_batches.ensure_solved(draft, second_pass)
        in_batches.adopt(estimator, draft)
    return estimator


def predict_dask(
    estimator: Any,
    data: Any,
    client: Any = None,
    *,
    method: str = "predict",
    set_id: str | None = None,
    schema: Schema | None = None,
) -> Iterator[np.ndarray]:
    """Yield the predictions of each partition of ``data`` in order, made on a Dask cluster.

    Parameters as for `fit_dask`; partitions of Parquet files are their row groups. ``method`` may
    be "predict_proba" or "decision_function". No more partitions than twice the threads of the
    cluster are under way. Predictions follow the partitions, so that a DataFrame with one row per
    token whose sets span partitions is refused.
    """
    check_is_fitted(estimator)
    model = without_training(estimator)
    with connected(client) as cluster:
        parts = _partitions(
            cluster, _pieces(data, None), shuffle=None, schema=schema, set_id=set_id
        )
        shared = _delayed(_itself)(model)

        # so many partitions are under way at most: predictions that nobody has taken yet are held
        most_waiting = 2 * _n_threads(cluster)
        waiting = deque[Any]()
        for part in parts:
            waiting.append(_compute(cluster, _delayed(_predict)(shared, method, part)))
            if len(waiting) >= most_waiting:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def connected(client: Any) -> Iterator[Any]:
    """A client, from a client, the address of a scheduler, or None.

    None starts a local cluster, which ends with the work.
    """
    import distributed

    package: Any = distributed  # its types are incomplete
    if isinstance(client, str):
        with package.Client(client) as connection:
            yield connection
    elif client is None:
        # all that listens does so on the loopback interface, the dashboards too
        local_cluster = package.LocalCluster(
            n_workers=thread_count(),
            threads_per_worker=1,
            processes=True,
            host=LOOPBACK,
            dashboard_address=f"{LOOPBACK}:0",
            worker_dashboard_address=f"{LOOPBACK}:0",
        )
        with local_cluster as cluster, package.Client(cluster) as connection:
            yield connection
    else:
        yield client


def without_training(estimator: Any) -> Any:
    """A solved copy without sums and training samples, which no prediction needs."""
    model = copy.copy(estimator._solved())
    combination = model.combination_
    members = tuple(streams.without_samples(member) for member in combination.members)
    model.combination_ = replace(combination, members=members, tried=())
    model._training = None
    for name in ("stream_", "layer_", "members_"):
        vars(model).pop(name, None)
    return model


# ---- partitions


@dataclass(frozen=True)
class Partition:
    """A partition with its number, which errors name, and how it is read if it is a table."""

    number: int
    content: Any
    schema: Schema | None = None
    set_id: str | None = None

    def batches(self) -> Iterator[Batch]:
        """Its batches: none if it is an empty list, or a table without rows."""
        for item in self._items():
            batch = as_batch(item)
            if hasattr(batch.sets, "__len__") and len(batch.sets) == 0:
                raise ValueError(
                    f"a batch must have at least one set: partition {self.number} has one of 0 "
                    "sets. Leave such batches out; a partition may be an empty list."
                )
            yield batch

    def _items(self) -> Any:
        """Whatever its batches are made of."""
        content = self.content
        if _is_table(content):
            if len(content) == 0:
                return []
            if self.schema is None:
                raise ValueError(
                    f"partitions must be tables or batches, all alike: partition {self.number} is "
                    "a table, and the first is none. Read it first, kh.read_table(table)."
                )
            return _source_of(content, self.schema, self.set_id)
        if isinstance(content, (ParquetSets, list, Iterator)):
            return content
        return [content]

    def kind(self) -> Schema | str | None:
        """How it is read if it is a table; None if it is empty."""
        is_empty = hasattr(self.content, "__len__") and len(self.content) == 0
        if is_empty:
            return None
        if not _is_table(self.content):
            return "batches"
        return self.schema or _source_of(self.content, None, self.set_id).whole().schema

    def labels(self) -> np.ndarray:
        """Its distinct labels."""
        if isinstance(self.content, ParquetSets):
            return self.content.labels()
        labels = [np.unique(column_or_1d(batch.y)) for batch in self.batches()]
        return np.unique(np.concatenate(labels)) if labels else np.array([])


def _pieces(data: Any, count: int | None) -> list[Any]:
    """What the data is cut into: contents of partitions, or Delayed objects of them."""
    if isinstance(data, str) or hasattr(data, "__fspath__"):
        data = ParquetSets(data)
    if isinstance(data, ParquetSets):
        return list(data.parts(count))
    if hasattr(data, "to_delayed"):  # a Bag or a DataFrame
        return list(data.to_delayed())
    # a tuple is one batch, (X, y), and not a list of partitions
    is_list = isinstance(data, Sequence) and not isinstance(data, (str, tuple))
    if is_list and len(data) > 0:
        return list(data)
    raise TypeError(
        "`data` must be a ParquetSets, a path, a dask Bag or DataFrame, or a list of partitions: "
        f"got {type(data).__name__}. One batch in memory is fitted by fit."
    )


def _partitions(
    cluster: Any,
    pieces: list[Any],
    *,
    shuffle: Callable[..., Any] | None,
    schema: Schema | None,
    set_id: str | None,
) -> list[Any]:
    """Numbered partitions; tables among them are all read alike, and have each set in one of them.

    ``shuffle`` is that of a DataFrame, None where rows cannot be moved.
    """
    # the first partition that is not empty says whether they are tables, and how these are read
    numbered = [_delayed(Partition)(i, piece, schema, set_id) for i, piece in enumerate(pieces)]
    kinds = _in_order(cluster, Partition.kind, numbered)
    first_kind = next((kind for kind in kinds if kind is not None), None)
    if isinstance(first_kind, Schema):
        schema = first_kind
        set_id = set_id or dict(schema.columns).get("set_id")
        if set_id is not None:
            pieces = _with_whole_sets(cluster, pieces, set_id, shuffle)
    return [
        _delayed(Partition)(number, piece, schema, set_id) for number, piece in enumerate(pieces)
    ]


def _with_whole_sets(
    cluster: Any, pieces: list[Any], set_id: str, shuffle: Callable[..., Any] | None
) -> list[Any]:
    """Tables with one row per token such that every set is in one of them."""
    tasks = [_delayed(_ids_of)(piece, set_id) for piece in pieces]
    counts = Counter(chain.from_iterable(_gather(cluster, tasks)))
    spanning = [name for name, count in counts.items() if count > 1]
    if not spanning:
        return pieces
    if shuffle is None:
        raise ValueError(
            f"all rows of a set must be in one partition: set {spanning[0]!r} of column {set_id!r} "
            f"is in {counts[spanning[0]]} of them ({len(spanning)} such sets of {len(counts)}). "
            f"Shuffle the DataFrame by that column, data.shuffle(on={set_id!r}), or set it as a "
            "sorted index before it is cut."
        )
    # by tasks, whose results are the same in every pass
    return list(shuffle(on=set_id, shuffle_method="tasks").to_delayed())


def _is_table(content: Any) -> bool:
    """Whether a partition is a table of rows."""
    return hasattr(content, "iloc")


def _source_of(table: Any, schema: Schema | None, set_id: str | None) -> ParquetSets:
    """The sets of a table."""
    weight = "weight" if "weight" in table.columns else None
    return ParquetSets(table, schema=schema, set_id=set_id, weight=weight)


def _ids_of(content: Any, set_id: str) -> list[Any]:
    """The distinct ids of the sets of a partition."""
    if not _is_table(content) or len(content) == 0:
        return []
    if set_id not in content.columns:
        raise ValueError(
            f"all partitions must have the columns of the first: one has no {set_id!r}."
        )
    return list(content[set_id].drop_duplicates())


# ---- the first samples


def _first_batch(cluster: Any, parts: list[Any]) -> Batch:
    """The first sample of all."""
    for batch in _in_order(cluster, _first_of, parts):
        if batch is not None:
            return Batch(*batch)
    raise ValueError(
        f"`data` must hold at least one batch: its {len(parts)} partitions are empty. Give it "
        "some, or see whether a filter left none."
    )


def _first_of(part: Partition) -> tuple[Any, Any, Any] | None:
    """The first sample of a partition, if there is one."""
    for batch in part.batches():
        weights = batch.weights
        if np.ndim(weights) == 1:  # else None, or one number for all samples
            weights = weights[:1]
        y = None if batch.y is None else batch.y[:1]
        return batch.sets[:1], y, weights
    return None


def _first_samples(cluster: Any, parts: list[Any], draft: Any) -> TrainingSet:
    """The first samples of positive weight, `streams.N_FIRST` or all there are."""
    worker = _Worker(template=copy.copy(draft), n_first=streams.N_FIRST)
    samples: list[TrainingSet] = []
    n_missing = worker.n_first
    for leading in _in_order(cluster, worker.first_samples, parts):
        for data in leading:
            samples.append(data[:n_missing])
            n_missing -= len(samples[-1])
        if n_missing <= 0:
            break
    return TrainingSet.joined([data for data in samples if len(data)] or samples[:1])


def _all_labels(cluster: Any, parts: list[Any], classes: Any) -> Any:
    """The labels: those named, or found by reading them first."""
    if classes is not None:
        return classes
    labels = _gather(cluster, [_delayed(Partition.labels)(part) for part in parts])
    found = [of_part for of_part in labels if len(of_part)]
    return np.unique(np.concatenate(found)) if found else np.array([])


# ---- what workers do


@dataclass(frozen=True)
class _Worker:
    """What a worker does with a partition, and what it has to know for it.

    Attributes
    ----------
    template : estimator
        What batches are checked by.
    recipe : Recipe or None
        What their features are.
    n_first : int
        How many samples layers are settled on.
    """

    template: Any
    recipe: Recipe | None = None
    n_first: int = 0

    def checked(self, part: Partition) -> Iterator[TrainingSet]:
        """The batches of a partition, each like the first of all."""
        for batch in part.batches():
            yield in_batches.checked(copy.copy(self.template), batch, is_first=False)

    def first_samples(self, part: Partition) -> list[TrainingSet]:
        """As many samples of a partition as may be needed: those before it may have none."""
        samples: list[TrainingSet] = []
        n_missing = self.n_first
        for data in self.checked(part):
            samples.append(data[np.arange(min(n_missing, len(data)))])
            n_missing -= len(samples[-1])
            if n_missing == 0:
                break
        return samples

    def sums(self, part: Partition) -> Sums:
        """The sums over a partition."""
        assert self.recipe is not None
        sums = self.recipe.empty()
        for data in self.checked(part):
            if len(data):
                sums = self.recipe.add(sums, data)
        return sums

    def errors(self, part: Partition, axes: Axes, alphas: np.ndarray) -> _Errors:
        """The squared leave-one-out errors of a partition."""
        assert self.recipe is not None
        total = _Errors(np.zeros((len(alphas), self.recipe.n_outputs)), 0)
        for data in self.checked(part):
            if len(data):
                squares = self.recipe.squared_errors(axes, alphas, data)
                total = total.merged(_Errors(squares, len(data)))
        return total

    def axes(self, sums: Sums) -> Axes:
        """The principal axes of all sums."""
        assert self.recipe is not None
        return self.recipe.axes(sums)


@dataclass(frozen=True)
class _Errors:
    """Σ w e² at every penalty over some samples, and how many samples these are."""

    squares: Float[np.ndarray, "a t"]
    count: int

    def merged(self, other: _Errors) -> _Errors:
        """Those of both."""
        return _Errors(self.squares + other.squares, self.count + other.count)


@dataclass(frozen=True)
class _SecondPass:
    """Sums of squared leave-one-out errors, by another pass over the partitions."""

    cluster: Any
    worker: _Worker
    parts: list[Any]
    total: Any

    def __call__(self, axes: Axes, alphas: np.ndarray) -> np.ndarray:
        # workers make the axes themselves, out of sums that can be made again
        shared = _delayed(_Worker.axes)(_delayed(_itself)(self.worker), self.total)
        task = _merged_in_tree(self.worker.errors, self.parts, _Errors.merged, shared, alphas)
        errors = _compute(self.cluster, task).result()
        in_batches.check_second_pass(axes.count, errors.count)
        return np.asarray(errors.squares)


def _predict(model: Any, method: str, part: Partition) -> np.ndarray:
    """The predictions of one partition, by the method of that name."""
    predictions = [getattr(model, method)(batch.sets) for batch in part.batches()]
    if not predictions:
        return np.empty(0)
    return np.concatenate(predictions)


# ---- tasks


def _in_order(cluster: Any, work: Callable[[Any], Any], parts: list[Any]) -> Iterator[Any]:
    """Results of partitions in order, twice as many in each round: mostly the first are enough."""
    start = 0
    size = 1
    while start < len(parts):
        task = _delayed(work)
        yield from _gather(cluster, [task(part) for part in parts[start : start + size]])
        start += size
        size *= 2


def _merged_in_tree(
    work: Callable[..., Any], parts: list[Any], merge: Callable[..., Any], *arguments: Any
) -> Any:
    """What ``work`` makes of the partitions, merged such that no task waits for many others."""
    shared = _delayed(_itself)(work)
    results = [_delayed(_called)(shared, part, *arguments) for part in parts]
    while len(results) > 1:
        results = [
            _delayed(_merged)(merge, results[i : i + FAN_IN])
            for i in range(0, len(results), FAN_IN)
        ]
    return results[0]


def _called(work: Callable[..., Any], part: Partition, *arguments: Any) -> Any:
    """A function that is the result of a task, called."""
    return work(part, *arguments)


def _itself(value: Any) -> Any:
    """A task of its own for what many tasks take: it travels once to every worker."""
    return value


def _merged(merge: Callable[[Any, Any], Any], results: list[Any]) -> Any:
    """Some results, merged one after the other."""
    total = results[0]
    for result in results[1:]:
        total = merge(total, result)
    return total


def _delayed(function: Callable[..., Any]) -> Any:
    """A function whose calls are tasks; ``pure=False``: arguments are not hashed for their name."""
    from dask.delayed import delayed

    return delayed(function, pure=False, traverse=True)


def _compute(cluster: Any, task: Any) -> Any:
    """The future of a task."""
    with warnings.catch_warnings():
        # what all workers need is sent once, with the tasks
        warnings.filterwarnings("ignore", message="Sending large graph")
        return cluster.compute(task, retries=RETRIES)


def _gather(cluster: Any, tasks: list[Any]) -> list[Any]:
    """The results of some tasks, in their order."""
    return list(cluster.gather(_compute(cluster, tasks)))


def _n_threads(cluster: Any) -> int:
    """Threads of all workers; 1 while none is there yet."""
    return max(1, sum(cluster.nthreads().values()))
