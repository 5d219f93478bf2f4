"""Fitting and predicting on a Dask cluster.

The reduction of `keyhole.streaming`, its sums made where the data is.

Heads travel as a seed. A partition becomes sums of p × p numbers, and sums are added in a tree;
what a worker that dies had made is made again by another, from its partitions.
"""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import thread_count
from keyhole._checks import check_choice
from keyhole.data.batches import Batch, as_batch
from keyhole.data.reader import ParquetSets
from keyhole.data.schema import Schema
from keyhole.estimators.batches import (
    N_PENDING,
    PENDING_BYTES,
    SampleForm,
    adopt,
    begin_all_classes,
    bytes_of,
    check_batch,
    check_second_pass,
    forget,
    gathered,
    open_stream,
    settle,
    snapshot,
    solve_stream,
)
from keyhole.estimators.states import twin_of
from keyhole.ridge.design import PrincipalAxes
from keyhole.streaming import LayerRecipe, LayerSums, merge
from keyhole.training import TrainingSet

FAN_IN = 4  # sums that one task adds
RETRIES = 3  # times that a task is tried again, on whatever worker is left
LOOPBACK = "127.0.0.1"  # where a local cluster listens


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

    The plain version is `fit_batches` on the batches of all partitions;
    docs/howto/out_of_core.md, "On a cluster", says when a cluster pays.

    What is automatic is settled on the first 1024 samples of positive weight, in the order of the
    partitions, as `fit_batches` does. If anything fails, the estimator is what it was before.

    Parameters
    ----------
    estimator : AttentionRegressor or AttentionClassifier
        Fitted in place.
    data : ParquetSets, path, dask Bag, dask DataFrame, or list of partitions
        A Bag of batches (X, y) or (X, y, sample_weight); a DataFrame with columns keys, y and, if
        there are any, query and weight, or any that `read_table` reads; a list whose items are
        batches, lists of batches, or dask Delayed objects of these.
    client : distributed.Client, str, or None
        A client, the address of a scheduler, or None for a local cluster of one process per core,
        which ends with the fit and listens on the loopback interface only. A script that starts one
        needs ``if __name__ == "__main__":``, as all that start processes.
    classes : array, optional
        For a classifier, all labels; found by a pass over them otherwise.
    selection : "auto", "loo" or "gcv"
        As for `fit_batches`; "auto" is "loo", because a cluster can read its partitions twice.
    partitions : int, optional
        For Parquet files, tasks to cut them into; by default four for each thread of the cluster.
    set_id : str, optional
        For a DataFrame with one row per token, the column that says which set a row belongs to; by
        default as `read_table` finds it. A DataFrame whose sets span partitions is shuffled by it;
        a list of tables whose sets do is refused.
    schema : Schema, optional
        How a DataFrame is read, ``kh.read_table(part_of_it).schema``. By default as its first
        partition that has rows: all partitions are read in the same way, and a category that is not
        in that one is refused.

    Returns
    -------
    The estimator.

    Notes
    -----
    n (M (2D² + 4DN) + p²) operations, shared out; p² numbers for each task travel up the tree. For
    leave-one-out the p × p axes go to every worker, and 2np² operations follow.
    """
    check_choice(selection, "selection", ("auto", "loo", "gcv"))
    with connected(client) as cluster:
        # partitions, and a draft: if anything fails, the estimator is what it was
        if not partitions:
            partitions = 4 * _threads(cluster)
        parts = _partitions(data, partitions)
        parts, n_sets = _tables_by_set(
            cluster, data, parts, schema=schema, set_id=set_id, may_shuffle=True
        )
        parts = _numbered(parts)
        draft = twin_of(estimator)
        forget(draft)

        # labels, and what the first sample says of all
        if classes is None and hasattr(estimator, "decision_function"):
            classes = _all_labels(cluster, parts)
        if classes is not None:
            begin_all_classes(draft, None, classes, can_read_twice=True)
        first_sample, single = check_batch(draft, _first_sample(cluster, parts), first=True)
        template = light(draft)  # what workers check their batches by
        open_stream(draft, first_sample, single=single)
        form = draft.stream_.form

        # what is automatic, on the samples that fit_batches settles it on
        first_samples = _first_samples(cluster, parts, template, form)
        recipe = settle(draft, first_samples)

        # the sums of all samples: each partition's where it is, added up in a tree
        leaves = [_delayed(_summarise)(template, form, recipe, part) for part in parts]
        total = _gather(cluster, [_tree(leaves, _merge)])[0]
        if n_sets is not None and total.n_samples != n_sets:
            raise RuntimeError(
                f"every set must be one sample: the {n_sets} sets of `data` were read as "
                f"{total.n_samples} samples. Does reading `data` twice give the same rows? Write "
                "it to Parquet first."
            )
        draft.n_samples_seen_ = total.n_samples
        draft.stream_ = draft.stream_.with_recipe(recipe, total.sums)

        # the values, which take another pass for leave-one-out
        error_sums = None
        if selection != "gcv":
            error_sums = partial(_error_pass, cluster, parts, template, draft)
        solve_stream(draft, error_sums)
        adopt(estimator, draft)
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
    with connected(client) as cluster:
        parts = _partitions(data, None)
        parts, _ = _tables_by_set(
            cluster, data, parts, schema=schema, set_id=set_id, may_shuffle=False
        )
        parts = _numbered(parts)
        model = cluster.scatter(light(estimator), broadcast=True, hash=False)

        # so many partitions are under way at most: predictions that nobody has taken yet are held
        most_waiting = 2 * _threads(cluster)
        waiting = deque[Any]()
        for part in parts:
            task = _delayed(_predict)(model, method, part)
            waiting.append(cluster.compute(task, retries=RETRIES))
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


def light(estimator: Any) -> Any:
    """A copy with its values, and without the sums and training samples, which no worker needs."""
    copied = copy.copy(snapshot(estimator))
    vars(copied).pop("training_", None)
    return copied


def _partitions(data: Any, count: int | None) -> list[Any]:
    """Partitions: things that `_batches` understands, or Delayed objects of them."""
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


@dataclass(frozen=True)
class Partition:
    """A partition with its number, which errors name."""

    number: int
    content: Any


def _numbered(parts: list[Any]) -> list[Any]:
    """Partitions with their numbers."""
    return [_delayed(Partition)(number, part) for number, part in enumerate(parts)]


@dataclass(frozen=True)
class TablePart:
    """A partition that is a table, and how it is read: as all others of the same data."""

    table: Any
    schema: Schema
    set_id: str | None

    def batches(self) -> Iterator[Batch]:
        """Its batches; none where it has no rows."""
        if len(self.table):
            weight = _weight_column(self.table)
            yield from ParquetSets(
                self.table, schema=self.schema, set_id=self.set_id, weight=weight
            )


def _weight_column(table: Any) -> str | None:
    """The column of sample weights of a table, if it has one."""
    if "weight" in table.columns:
        return "weight"
    return None


def _tables_by_set(
    cluster: Any,
    data: Any,
    parts: list[Any],
    *,
    schema: Schema | None,
    set_id: str | None,
    may_shuffle: bool,
) -> tuple[list[Any], int | None]:
    """Partitions that are tables, all read alike, every set in one of them; and how many sets.

    Partitions of another kind are returned as they are. The number is None where rows are sets, and
    nothing can be cut.
    """
    # how tables are read: as the first of them that has rows
    if schema is None:
        for some in _rounds(parts):
            tasks = [_delayed(_schema_of_table)(part, set_id) for part in some]
            schemas = [one for one in _gather(cluster, tasks) if one is not None]
            if schemas:
                schema = schemas[0]
                break
    if schema is None:
        return parts, None
    set_column = set_id or dict(schema.columns).get("set_id")
    tables = [_delayed(_as_table_part)(part, schema, set_column) for part in parts]
    if set_column is None:
        return tables, None

    # one row per token: which sets are in more than one partition
    owners = _SetOwners.of(cluster, parts, set_column)
    if not owners.spanning:
        return tables, owners.n_sets
    if not may_shuffle or not hasattr(data, "shuffle"):
        raise ValueError(owners.message(set_column))

    # rows of one set go to one partition; by tasks, whose results are the same in every pass
    shuffled = list(data.shuffle(on=set_column, shuffle_method="tasks").to_delayed())
    owners_after = _SetOwners.of(cluster, shuffled, set_column)
    if owners_after.spanning or owners_after.n_sets != owners.n_sets:
        raise RuntimeError(
            f"a shuffle must keep the sets: {owners.n_sets} sets became {owners_after.n_sets}, "
            f"{len(owners_after.spanning)} of them in several partitions. Write `data` to Parquet, "
            f"sorted by {set_column!r}, and pass the path."
        )
    tables = [_delayed(_as_table_part)(part, schema, set_column) for part in shuffled]
    return tables, owners.n_sets


@dataclass(frozen=True)
class _SetOwners:
    """In how many partitions each set is."""

    counts: Counter[Any]

    @classmethod
    def of(cls, cluster: Any, parts: list[Any], set_column: str) -> _SetOwners:
        """By a pass over the column of sets; one id per set and partition is sent here."""
        tasks = [_delayed(_ids_of_table)(part, set_column) for part in parts]
        return cls(Counter(chain.from_iterable(_gather(cluster, tasks))))

    @property
    def n_sets(self) -> int:
        return len(self.counts)

    @property
    def spanning(self) -> list[Any]:
        """Ids of the sets that are in several partitions."""
        return [name for name, count in self.counts.items() if count > 1]

    def message(self, set_column: str) -> str:
        """Rule, evidence and remedy."""
        spanning = self.spanning
        return (
            f"all rows of a set must be in one partition: set {spanning[0]!r} of column "
            f"{set_column!r} is in {self.counts[spanning[0]]} of them ({len(spanning)} such sets "
            f"of {self.n_sets}). Shuffle the DataFrame by that column, "
            f"data.shuffle(on={set_column!r}), or set it as a sorted index before it is cut."
        )


def _schema_of_table(part: Any, set_id: str | None) -> Schema | None:
    """How a partition is read, if it is a table with rows."""
    if not hasattr(part, "iloc") or len(part) == 0:
        return None
    source = ParquetSets(part, set_id=set_id, weight=_weight_column(part))
    return source.whole().schema


def _as_table_part(part: Any, schema: Schema, set_id: str | None) -> Any:
    """A partition that is a table, with its schema; another as it is."""
    if not hasattr(part, "iloc"):
        return part
    return TablePart(table=part, schema=schema, set_id=set_id)


def _ids_of_table(part: Any, set_column: str) -> list[Any]:
    """The distinct ids of sets of a partition."""
    if not hasattr(part, "iloc") or len(part) == 0:
        return []
    if set_column not in part.columns:
        raise ValueError(
            f"all partitions must have the columns of the first: one has no {set_column!r}."
        )
    return list(part[set_column].drop_duplicates())


def _batches(part: Partition) -> Iterator[Batch]:
    """The batches of a partition, whatever it is: none, if it is empty."""
    content = part.content
    if isinstance(content, TablePart):
        yield from content.batches()
        return
    items = content if isinstance(content, (ParquetSets, list, Iterator)) else [content]
    for item in items:
        batch = as_batch(item)
        if hasattr(batch.sets, "__len__") and len(batch.sets) == 0:
            raise ValueError(
                f"a batch must have at least one set: partition {part.number} has one of 0 sets. "
                "Leave such batches out; a partition may be an empty list."
            )
        yield batch


def _checked_batches(template: Any, form: SampleForm, part: Partition) -> Iterator[TrainingSet]:
    """The batches of a partition as the estimator takes them; each has the form of the first."""
    for batch in _batches(part):
        data, single = check_batch(template, batch, first=False)
        form.check(data, single=single)
        yield data


def _peek(part: Partition) -> Batch | None:
    """The first sample of a partition, if there is one."""
    for batch in _batches(part):
        weights = batch.weights
        if np.ndim(weights) == 1:  # else None, or one number for all samples
            weights = weights[:1]
        return Batch(sets=batch.sets[:1], y=batch.y[:1], weights=weights)
    return None


def _leading(template: Any, form: SampleForm, count: int, part: Any) -> list[TrainingSet]:
    """The first samples of positive weight of a partition, at most ``count``."""
    leading: list[TrainingSet] = []
    n_missing = count
    for data in _checked_batches(template, form, part):
        with_weight = data.of_positive_weight()
        if len(with_weight) > 0:
            leading.append(with_weight[:n_missing])
            n_missing -= len(leading[-1])
        if n_missing == 0:
            break
    return leading


def _rounds(parts: list[Any]) -> Iterator[list[Any]]:
    """All partitions in order, twice as many in each round: mostly the first few are enough."""
    start = 0
    size = 1
    while start < len(parts):
        yield parts[start : start + size]
        start += size
        size *= 2


def _first_sample(cluster: Any, parts: list[Any]) -> Batch:
    """The first sample of all, which says what samples are like."""
    for parts_of_round in _rounds(parts):
        tasks = [_delayed(_peek)(part) for part in parts_of_round]
        for batch in _gather(cluster, tasks):
            if isinstance(batch, Batch):
                return batch
    raise ValueError(
        f"`data` must hold at least one batch: its {len(parts)} partitions are empty. Give it "
        "some, or see whether a filter left none."
    )


def _first_samples(cluster: Any, parts: list[Any], template: Any, form: SampleForm) -> TrainingSet:
    """The first samples of positive weight, in the order of the partitions.

    They are `N_PENDING`, or fewer that take `PENDING_BYTES`.
    """
    leading: list[TrainingSet] = []
    n_missing = N_PENDING
    for parts_of_round in _rounds(parts):
        # each partition gives as many as are missing, because those before it may give none
        tasks = [_delayed(_leading)(template, form, n_missing, part) for part in parts_of_round]
        for data in chain.from_iterable(_gather(cluster, tasks)):
            leading.append(data[:n_missing])
            n_missing -= len(leading[-1])
            if n_missing == 0 or sum(map(bytes_of, leading)) >= PENDING_BYTES:
                return TrainingSet.joined(leading)
    if not leading:
        raise ValueError(
            "a fit needs one sample of positive weight, and two to choose a penalty: got 0. Give "
            "some samples a positive weight."
        )
    return TrainingSet.joined(leading)


def _all_labels(cluster: Any, parts: list[Any]) -> np.ndarray:
    """The distinct labels of all partitions."""
    labels_of_parts = _gather(cluster, [_delayed(_labels)(part) for part in parts])
    labels = [of_part for of_part in labels_of_parts if of_part is not None]
    return np.unique(np.concatenate(labels))


def _labels(part: Partition) -> np.ndarray | None:
    """The distinct labels of a partition, None if it is empty."""
    if isinstance(part.content, ParquetSets):
        return part.content.labels()
    labels = [np.unique(batch.y) for batch in _batches(part)]
    if not labels:
        return None
    return np.unique(np.concatenate(labels))


@dataclass(frozen=True)
class PartitionSums:
    """The sums over some partitions, and how many samples they have: with those of weight zero."""

    sums: LayerSums
    n_samples: int


def _merge(parts: Iterable[PartitionSums]) -> PartitionSums:
    """The sums over all partitions of some sums."""
    parts = list(parts)
    return PartitionSums(
        sums=merge(part.sums for part in parts),
        n_samples=sum(part.n_samples for part in parts),
    )


def _summarise(template: Any, form: SampleForm, recipe: LayerRecipe, part: Any) -> PartitionSums:
    """The sums over one partition."""
    sums = recipe.empty()
    n_samples = 0
    for data in gathered(_checked_batches(template, form, part)):
        sums = recipe.add(sums, data)
        n_samples += len(data)
    return PartitionSums(sums=sums, n_samples=n_samples)


@dataclass(frozen=True)
class PartitionErrors:
    """Sums of squared leave-one-out errors over some partitions, and how many samples they have."""

    sums: Float[np.ndarray, "a t"]
    n_samples: int


def _merge_errors(parts: Iterable[PartitionErrors]) -> PartitionErrors:
    """The errors over all partitions of some errors."""
    parts = list(parts)
    return PartitionErrors(
        sums=np.sum([part.sums for part in parts], axis=0),
        n_samples=sum(part.n_samples for part in parts),
    )


def _error_sums(
    template: Any,
    form: SampleForm,
    recipe: LayerRecipe,
    axes: PrincipalAxes,
    alphas: np.ndarray,
    part: Any,
) -> PartitionErrors:
    """The leave-one-out errors of one partition."""
    total = np.zeros((len(alphas), recipe.n_outputs))
    n_samples = 0
    for data in gathered(_checked_batches(template, form, part)):
        total += recipe.error_sums(axes, alphas, data)
        n_samples += len(data)
    return PartitionErrors(sums=total, n_samples=n_samples)


def _predict(model: Any, method: str, part: Any) -> np.ndarray:
    """The predictions of one partition, by the method of that name."""
    predict = getattr(model, method)
    return np.concatenate([predict(batch.sets) for batch in _batches(part)])


def _tree(leaves: list[Any], add: Callable[[list[Any]], Any]) -> Any:
    """Add in a tree, so that no task waits for more than FAN_IN others."""
    # every round adds neighbours, FAN_IN at a time, until one sum is left
    while len(leaves) > 1:
        leaves = [_delayed(add)(leaves[i : i + FAN_IN]) for i in range(0, len(leaves), FAN_IN)]
    return leaves[0]


def _error_pass(
    cluster: Any,
    parts: list[Any],
    template: Any,
    draft: Any,
    axes: PrincipalAxes,
    alphas: np.ndarray,
) -> np.ndarray:
    """Sums of squared leave-one-out errors.

    The axes are sent out again should all workers that hold them die.
    """
    from distributed import CancelledError, KilledWorker

    # Dask makes lost results of tasks again, but not what was scattered: hence the attempts
    form = draft.stream_.form
    recipe = draft.stream_.recipe
    for attempt in range(RETRIES + 1):
        try:
            shared = cluster.scatter(axes, broadcast=True, hash=False)
            task = _delayed(_error_sums)
            leaves = [task(template, form, recipe, shared, alphas, part) for part in parts]
            total = _gather(cluster, [_tree(leaves, _merge_errors)])[0]
        except (CancelledError, KilledWorker, TimeoutError):
            if attempt == RETRIES:
                raise
        else:
            check_second_pass(draft.n_samples_seen_, total.n_samples)
            return np.asarray(total.sums)
    raise AssertionError("unreachable")


def _delayed(function: Callable[..., Any]) -> Any:
    """A function whose calls are tasks; ``pure=False``: arguments are not hashed for their name."""
    from dask.delayed import delayed

    return delayed(function, pure=False, traverse=True)


def _gather(cluster: Any, tasks: list[Any]) -> list[Any]:
    """The results of some tasks, in their order."""
    return list(cluster.gather(cluster.compute(tasks, retries=RETRIES)))


def _threads(cluster: Any) -> int:
    """Threads of all workers; 1 while none is there yet."""
    return max(1, sum(cluster.nthreads().values()))
