"""A Dask cluster gives the fit of one machine, whatever becomes of its workers."""

import gc
import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
from paper import paper_classifier, paper_regressor
from sklearn.base import clone

import keyhole as kh
from keyhole.data import ParquetSets, write_parquet
from keyhole.distributed import connected, fit_dask, predict_dask, without_training
from keyhole.fit import second_kernel, streams

distributed = pytest.importorskip("distributed")
dask = pytest.importorskip("dask")
# what Dask and its event loops leave behind on their way out is not ours
pytestmark = pytest.mark.filterwarnings("default")

N = 240
SETS = kh.targets.sphere_sets(N, n_keys=4, dim=3, seed=0)
Y = kh.targets.TokenPower(2, 3)(SETS) + 0.1 * np.random.default_rng(0).standard_normal(N)
MODEL = paper_regressor(8, random_state=0)


def pieces_of(size, *arrays):
    return [tuple(array[i : i + size] for array in arrays) for i in range(0, N, size)]


def same(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)


@pytest.fixture(autouse=True)
def settled_early(monkeypatch):
    """Layers are settled on sixty sets instead of two thousand, second kernels on fifty of them."""
    monkeypatch.setattr(streams, "N_FIRST", 60)
    monkeypatch.setattr(second_kernel, "MOST_EXACT", 50)
    monkeypatch.setattr(second_kernel, "CENTRES", 50)


@pytest.fixture(scope="module")
def cluster():
    """Two processes of this machine."""
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as made,
        distributed.Client(made) as client,
    ):
        yield client
    gc.collect()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "sets.parquet"
    write_parquet(file, [(SETS, Y)], row_group_size=40)
    return file


# ---- the same numbers


@pytest.mark.parametrize("selection", ["loo", "gcv"])
def test_two_processes_give_the_fit_of_one_machine(selection, cluster, path):
    one = clone(MODEL).fit_batches(path, selection=selection)
    many = fit_dask(clone(MODEL), ParquetSets(path), cluster, selection=selection)
    assert (many.selection_.selection, many.n_samples_seen_) == (selection, N)
    same(many.selection_.errors, one.selection_.errors)
    same(many.predict(SETS), one.predict(SETS))
    parts = list(predict_dask(many, path, cluster))
    assert [len(part) for part in parts] == [40] * 6
    same(np.concatenate(parts), many.predict(SETS))

    # and both go on alike
    for model in (one, many):
        model.partial_fit(SETS[:50], -Y[:50])
    same(many.predict(SETS), one.predict(SETS))


def test_default_layers_are_settled_on_the_first_sets_of_weight(cluster, rng):
    weights = rng.uniform(0.5, 2.0, N) * (rng.random(N) < 0.7)
    weights[:50] = 0.0  # all of the first partition
    pieces = pieces_of(50, SETS, Y, weights)
    one = kh.AttentionRegressor(random_state=0).fit_batches(pieces)
    many = fit_dask(kh.AttentionRegressor(random_state=0), pieces, cluster)
    assert [row.params for row in many.members_] == [row.params for row in one.members_]
    same(many.predict(SETS), one.predict(SETS))


def test_few_sets_are_fitted_as_fit_does(cluster):
    model = fit_dask(clone(MODEL), [(SETS[:20], Y[:20]), (SETS[20:50], Y[20:50])], cluster)
    same(model.predict(SETS), clone(MODEL).fit(SETS[:50], Y[:50]).predict(SETS))


def test_a_classifier_finds_its_classes_also_where_partitions_are_empty_lists(cluster):
    labels = np.where(np.median(Y) < Y, "high", "low").astype(object)
    labels[::7] = "unknown"
    model = paper_classifier(
        8, random_state=0, alpha=0.1, class_weight={"high": 1.0, "low": 2.0, "unknown": 0.0}
    )
    pieces = pieces_of(60, SETS, labels)
    one = clone(model).fit_batches(pieces)
    many = fit_dask(clone(model), [[], *pieces[:2], [], pieces[2:]], cluster)
    assert many.classes_.tolist() == ["high", "low", "unknown"]
    same(many.predict_proba(SETS), one.predict_proba(SETS))
    parts = predict_dask(many, pieces, cluster, method="predict_proba")
    same(np.concatenate(list(parts)), one.predict_proba(SETS))


def test_every_kind_of_collection(cluster):
    bag = pytest.importorskip("dask.bag")
    frames = pytest.importorskip("dask.dataframe")
    pandas = pytest.importorskip("pandas")
    pieces = pieces_of(60, SETS, Y)
    frame = pandas.DataFrame(
        {"keys": [s.tokens.tolist() for s in SETS], "query": SETS.query.tolist(), "y": Y}
    )
    model = clone(MODEL).set_params(alpha=0.1)
    whole = clone(model).fit(SETS, Y)
    with dask.config.set({"dataframe.convert-string": False}):
        collections = [
            pieces,
            [pieces[:1], pieces[1:]],
            [dask.delayed(piece) for piece in pieces],
            bag.from_sequence(pieces, npartitions=2),
            frames.from_pandas(frame, npartitions=3),
        ]
        for data in collections:
            fitted = fit_dask(clone(model), data, cluster, selection="gcv")
            same(fitted.predict(SETS), whole.predict(SETS))


# ---- workers that die


@pytest.mark.parametrize("fatal_read", [1, 2])
def test_a_worker_killed_midway_changes_nothing(fatal_read, cluster, tmp_path):
    """The last partition is read for the sums, and once more for leave-one-out."""

    def partition(i, piece):
        if i == 5:
            n_reads = len(list(tmp_path.iterdir()))
            (tmp_path / str(n_reads)).touch()
            if n_reads + 1 == fatal_read:
                os.kill(os.getpid(), signal.SIGKILL)
        return piece

    data = [dask.delayed(partition)(i, piece) for i, piece in enumerate(pieces_of(40, SETS, Y))]
    model = fit_dask(clone(MODEL), data, cluster)
    assert len(list(Path(tmp_path).iterdir())) > fatal_read, "a worker was killed"
    same(model.predict(SETS), clone(MODEL).fit_batches(pieces_of(40, SETS, Y)).predict(SETS))


# ---- refusals


def test_what_cannot_be_fitted_leaves_the_model_as_it_was(cluster):
    model = clone(MODEL).fit(SETS, Y)
    before = model.predict(SETS)
    pieces = pieces_of(60, SETS, Y)
    two_outputs = (SETS[180:], np.column_stack([Y, Y])[180:])
    with pytest.raises(TypeError, match="One batch in memory is fitted by fit"):
        fit_dask(model, (SETS, Y), cluster)
    with pytest.raises(ValueError, match="outputs of the first"):
        fit_dask(model, [*pieces[:3], two_outputs], cluster)
    with pytest.raises(ValueError, match="at least one batch"):
        fit_dask(model, [[], []], cluster)
    with pytest.raises(ValueError, match="samples of positive weight"):
        fit_dask(model, [(SETS, Y, np.zeros(N))], cluster)
    with pytest.raises(AttributeError, match=r"Landmarks\(512\), or use fit"):
        fit_dask(clone(model).set_params(n_heads=np.inf), pieces, cluster)
    np.testing.assert_array_equal(model.predict(SETS), before)


def test_a_partition_of_no_sets_is_refused_by_its_number(cluster):
    pieces = [*pieces_of(120, SETS, Y), (SETS[:0], Y[:0])]
    with pytest.raises(ValueError, match="partition 2 has one of 0 sets"):
        fit_dask(clone(MODEL), pieces, cluster)
    model = clone(MODEL).fit(SETS, Y)
    with pytest.raises(ValueError, match="partition 2 has one of 0 sets"):
        list(predict_dask(model, pieces, cluster))


def test_partitions_that_change_between_two_passes_are_refused(cluster, tmp_path):
    def partition(i, piece):
        if i == 3:
            n_reads = len(list(tmp_path.iterdir()))
            (tmp_path / str(n_reads)).touch()
            if n_reads == 1:
                return tuple(part[:10] for part in piece)
        return piece

    data = [dask.delayed(partition)(i, piece) for i, piece in enumerate(pieces_of(60, SETS, Y))]
    with pytest.raises(ValueError, match="got 240 the first time and 190 the second"):
        fit_dask(clone(MODEL), data, cluster)


# ---- what is sent, and where a cluster listens


def test_what_is_sent_is_small(path):
    model = kh.AttentionRegressor(60, mlp="none", random_state=0).fit_batches(path)
    assert len(pickle.dumps(without_training(model))) < 30_000 < len(pickle.dumps(model))


def test_a_local_cluster_listens_on_the_loopback_interface_only(monkeypatch):
    psutil = pytest.importorskip("psutil")
    monkeypatch.setattr("keyhole.distributed.thread_count", lambda: 1)

    def listening():
        me = psutil.Process()
        return {
            (connection.laddr.ip, connection.laddr.port)
            for process in (me, *me.children(recursive=True))
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }

    before = listening()
    with connected(None) as client:
        client.submit(sum, [1, 2]).result()
        opened = listening() - before
    assert len(opened) >= 2  # a scheduler and a worker
    assert {address for address, _ in opened} == {"127.0.0.1"}
