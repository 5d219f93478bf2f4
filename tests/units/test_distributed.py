"""A Dask cluster gives the fit of one machine, whatever becomes of its workers."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from paper import paper_classifier, paper_regressor
from sklearn.base import clone

import keyhole as kh
from keyhole.data import ParquetSets, write_parquet
from keyhole.distributed import connected, fit_dask, predict_dask

distributed = pytest.importorskip("distributed")
dask = pytest.importorskip("dask")
# what Dask and its event loops leave behind on their way out is not ours
pytestmark = pytest.mark.filterwarnings("default")

SETS = kh.targets.sphere_sets(240, n_keys=4, dim=3, seed=0)
Y = kh.targets.TokenPower(2, 3)(SETS) + 0.1 * np.random.default_rng(0).standard_normal(240)
MODEL = paper_regressor(8, random_state=0)


def same(a, b, relative=1e-9):
    assert np.abs(np.asarray(a) - b).max() <= relative * np.abs(b).max()


@pytest.fixture(scope="module", autouse=True)
def swept():
    """What clusters leave to the garbage collector is collected here, and not in somebody else's
    test.
    """
    yield
    gc.collect()


@pytest.fixture(scope="module")
def cluster():
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0"
        ) as made,
        distributed.Client(made) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def here():
    """Threads of this process: the same code without the cost of starting processes."""
    options = {
        "n_workers": 1,
        "threads_per_worker": 2,
        "processes": False,
        "dashboard_address": "127.0.0.1:0",
    }
    with distributed.LocalCluster(**options) as made, distributed.Client(made) as client:
        yield client


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "sets.parquet"
    write_parquet(file, [(SETS, Y)], row_group_size=40)
    return file


def test_two_processes_give_the_one_shot_fit(cluster, path):
    whole = clone(MODEL).fit(SETS, Y)
    model = fit_dask(clone(MODEL), ParquetSets(path), cluster)
    assert (model.selection_.method, model.n_samples_seen_) == ("loo", 240)
    same(model.alpha_, whole.alpha_)
    same(model.loo_error_, whole.loo_error_, 1e-8)
    same(model.predict(SETS), whole.predict(SETS))
    parts = list(predict_dask(model, path, cluster))
    assert [len(part) for part in parts] == [40] * 6
    np.testing.assert_array_equal(np.concatenate(parts), model.predict(SETS))


def test_a_worker_killed_midway_changes_nothing(cluster, tmp_path):
    marker = str(tmp_path / "killed")
    pieces = [(SETS[i : i + 40], Y[i : i + 40]) for i in range(0, 240, 40)]

    def partition(i, piece):
        if i == 3 and not os.path.exists(marker):
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return piece

    data = [dask.delayed(partition)(i, piece) for i, piece in enumerate(pieces)]
    model = fit_dask(clone(MODEL), data, cluster)
    assert os.path.exists(marker), "the worker was killed"
    same(model.predict(SETS), clone(MODEL).fit(SETS, Y).predict(SETS))


def test_every_kind_of_collection(here):
    bag = pytest.importorskip("dask.bag")
    frames = pytest.importorskip("dask.dataframe")
    pandas = pytest.importorskip("pandas")
    whole = clone(MODEL).fit(SETS, Y)
    pieces = [(SETS[i : i + 60], Y[i : i + 60]) for i in range(0, 240, 60)]
    frame = pandas.DataFrame(
        {"keys": [s.tokens.tolist() for s in SETS], "query": SETS.query.tolist(), "y": Y}
    )
    with dask.config.set({"dataframe.convert-string": False}):
        table = frames.from_pandas(frame, npartitions=3)
        collections = [
            pieces,
            [pieces[:1], pieces[1:]],
            bag.from_sequence(pieces, npartitions=2),
            table,
        ]
        for data in collections:
            model = fit_dask(clone(MODEL), data, here, selection="gcv")
            assert model.selection_.method == "gcv"
            at_that_penalty = fit_dask(
                clone(MODEL).set_params(alpha=whole.alpha_), data, here, selection="gcv"
            )
            same(at_that_penalty.predict(SETS), whole.predict(SETS))


def test_a_classifier_finds_its_classes(here, path):
    label = np.where(np.median(Y) < Y, "high", "low")
    model = paper_classifier(8, random_state=0, alpha=0.1)
    whole = clone(model).fit(SETS, label)
    pieces = [(SETS[i : i + 60], label[i : i + 60]) for i in range(0, 240, 60)]
    fitted = fit_dask(clone(model), pieces, here)
    same(fitted.decision_function(SETS), whole.decision_function(SETS))
    assert fitted.temperature_ == pytest.approx(whole.temperature_, rel=1e-6)
    got = np.concatenate(list(predict_dask(fitted, pieces, here, method="predict_proba")))
    np.testing.assert_allclose(got, whole.predict_proba(SETS), atol=1e-6)


def test_what_is_sent_is_small(here):
    import pickle

    from keyhole.distributed import light

    model = fit_dask(clone(MODEL).set_params(n_heads=60), [(SETS, Y)], here, selection="gcv")
    assert len(pickle.dumps(light(model))) < 10_000 < len(pickle.dumps(model))


def test_one_batch_is_no_collection(here):
    with pytest.raises(TypeError, match="One batch in memory is fitted by fit"):
        fit_dask(clone(MODEL), (SETS, Y), here)


@pytest.mark.slow
def test_without_a_client_a_local_cluster_is_made(path):
    model = fit_dask(clone(MODEL), str(path))
    same(model.predict(SETS), clone(MODEL).fit(SETS, Y).predict(SETS))
    assert sum(len(part) for part in predict_dask(model, path)) == 240


@pytest.mark.slow
def test_a_scheduler_and_a_worker_from_the_command_line(path, tmp_path):
    file = tmp_path / "scheduler.json"
    run = [sys.executable, "-m"]
    # the worker runs elsewhere, and must find the package that is being tested
    place = {**os.environ, "PYTHONPATH": str(Path(kh.__file__).parents[1])}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": place}
    scheduler = [
        *run,
        "distributed.cli.dask_scheduler",
        "--port",
        "0",
        "--no-dashboard",
        "--scheduler-file",
        str(file),
    ]
    worker = [
        *run,
        "distributed.cli.dask_worker",
        "--scheduler-file",
        str(file),
        "--nthreads",
        "1",
        "--no-dashboard",
    ]
    processes = []
    try:
        for command in (scheduler, worker):
            processes.append(subprocess.Popen(command, cwd=tmp_path, **quiet))
        with distributed.Client(scheduler_file=str(file), timeout=60) as client:
            client.wait_for_workers(1, timeout=60)
            address = client.scheduler.address
        model = fit_dask(clone(MODEL), path, address)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(30)
    same(model.predict(SETS), clone(MODEL).fit(SETS, Y).predict(SETS))


def test_queries_of_their_own_kind_and_extras(here, rng, tmp_path):
    wide = kh.SetBatch(
        SETS.tokens.reshape(240, 4, 3), rng.normal(size=(240, 5)), 50 + rng.normal(size=(240, 2))
    )
    y = Y + wide.extras @ [0.3, -0.2]
    write_parquet(tmp_path / "wide.parquet", [(wide, y)], row_group_size=40)
    model = kh.AttentionRegressor(
        8, random_state=0, heads=kh.GaussianHeads(1.0), scaling="none", alpha=0.1
    )
    for options in ({}, {"extras_scale": 0.7}):
        dask_fit = fit_dask(clone(model).set_params(**options), tmp_path / "wide.parquet", here)
        batches = clone(model).set_params(**options).fit_batches(tmp_path / "wide.parquet")
        same(dask_fit.predict(wide), batches.predict(wide), 1e-7)
        assert dask_fit.tokens_.extras_scale == pytest.approx(batches.tokens_.extras_scale)


# the same fit as fit_batches


@pytest.fixture
def drifting(rng):
    """1,300 samples whose first partitions are unlike the rest, with weights, a fifth of them
    zero.
    """
    size = np.geomspace(0.02, 20, 1300)
    keys = rng.normal(size=(1300, 3, 2)) * size[:, None, None] + [5.0, 0.0]
    sets = kh.SetBatch(keys, rng.normal(size=(1300, 2)), pairs=[(0, 1), (1, 0)])
    y = np.tanh(keys[:, :, 1].mean(axis=1)) + sets.query[:, 0]
    weights = rng.uniform(0.1, 3.0, 1300) * (rng.random(1300) < 0.8)
    weights[:40] = 0.0
    return sets, y, weights


def pieces_of(samples, size):
    return [
        tuple(part[start : start + size] for part in samples)
        for start in range(0, len(samples[1]), size)
    ]


@pytest.mark.parametrize(
    ("size", "n", "weighted"),
    [(20, 400, False), (20, 400, True), (20, 1300, True), (100, 1300, False), (700, 1300, True)],
)
def test_all_choices_are_those_of_fit_batches(here, drifting, size, n, weighted):
    samples = tuple(part[:n] for part in drifting)[: 3 if weighted else 2]
    pieces = pieces_of(samples, size)
    model = kh.AttentionRegressor(6, random_state=0)
    on_one_machine = clone(model).fit_batches(pieces)
    on_a_cluster = fit_dask(clone(model), pieces, here)
    assert on_a_cluster.n_samples_seen_ == on_one_machine.n_samples_seen_ == n
    assert on_a_cluster.candidates_ == on_one_machine.candidates_
    assert on_a_cluster.tokens_.scaling == on_one_machine.tokens_.scaling
    same(on_a_cluster.alpha_, on_one_machine.alpha_, 1e-6)
    same(on_a_cluster.loo_error_, on_one_machine.loo_error_, 1e-6)
    same(on_a_cluster.predict(drifting[0]), on_one_machine.predict(drifting[0]), 1e-6)

    # and both go on alike
    for fitted in (on_a_cluster, on_one_machine):
        fitted.partial_fit(*pieces[0])
    same(on_a_cluster.predict(drifting[0]), on_one_machine.predict(drifting[0]), 1e-6)
    assert on_a_cluster.n_samples_seen_ == n + len(pieces[0][1])


def test_classes_without_weight_and_partitions_without_samples(here, drifting):
    sets, y, weights = drifting
    labels = np.where(y > np.median(y), "high", "low").astype(object)
    labels[::7] = "unknown"
    model = kh.AttentionClassifier(
        6, random_state=0, class_weight={"high": 1.0, "low": 2.0, "unknown": 0.0}
    )
    pieces = pieces_of((sets, labels, weights), 90)
    on_one_machine = clone(model).fit_batches(pieces)
    with_gaps = [[], [], *([piece] for piece in pieces[:3]), [], *pieces[3:], []]
    on_a_cluster = fit_dask(clone(model), with_gaps, here)
    assert on_a_cluster.n_samples_seen_ == 1300
    assert on_a_cluster.candidates_ == on_one_machine.candidates_
    np.testing.assert_allclose(
        on_a_cluster.predict_proba(sets), on_one_machine.predict_proba(sets), atol=1e-6
    )


def test_what_cannot_be_fitted_leaves_the_model_as_it_was(here, monkeypatch):
    model = clone(MODEL).fit(SETS, Y)
    predictions = model.predict(SETS)
    pieces = pieces_of((SETS, Y), 60)
    other_outputs = [*pieces[:3], (SETS[180:], np.column_stack([Y, Y])[180:])]
    with pytest.raises(ValueError, match="outputs of the first"):
        fit_dask(model, other_outputs, here)
    with pytest.raises(ValueError, match="at least one batch"):
        fit_dask(model, [[], []], here)
    with pytest.raises(ValueError, match="one sample of positive weight"):
        fit_dask(model, [(SETS, Y, np.zeros(len(Y)))], here)

    # partitions that give other samples when they are read again
    read_again = []

    def partition(piece):
        return piece if not read_again else tuple(part[:30] for part in piece)

    from keyhole import distributed as ours

    original = ours._error_pass

    def error_pass(*args):
        read_again.append(True)
        return original(*args)

    monkeypatch.setattr(ours, "_error_pass", error_pass)
    with pytest.raises(ValueError, match="got 240 the first time and 120 the second"):
        fit_dask(model, [dask.delayed(partition, pure=False)(piece) for piece in pieces], here)
    np.testing.assert_array_equal(model.predict(SETS), predictions)


def test_a_stream_that_is_not_solved_predicts_on_a_cluster(here):
    model = clone(MODEL).partial_fit(SETS, Y)
    parts = list(predict_dask(model, pieces_of((SETS, Y), 60), here))
    np.testing.assert_array_equal(np.concatenate(parts), model.predict(SETS))


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
