"""Shared work is separate work: a cell has the same bits whatever is computed beside it."""

import dataclasses
import math
import random
import signal

import numpy as np
import pytest
from paper import paper_regressor
from ridges import gram_path

from keyhole.attention.features import attention_features, mlp_features
from keyhole.attention.heads import GaussianHeads, sample_mlp_weights
from keyhole.attention.kernels import attention_kernel
from keyhole.lab.cells import Cell
from keyhole.lab.jobs import (
    HEAD_BLOCK,
    Draw,
    FactorisedGram,
    Job,
    WorkerPool,
    compute,
    group,
    nested_grams,
    read_target,
    worker_count,
)

SIZES, HEADS, TARGETS = (8, 20, 40), (3, HEAD_BLOCK, 70, None), ("token^2", "corr * token")


def all_cells(seed, model):
    return [
        Cell(model, target, 3, 4, m, n, 40, 30, seed, 0, noise=noise)
        for target in TARGETS
        for m in HEADS
        for n in SIZES
        for noise in (0.0, 0.2)
    ]


@pytest.mark.parametrize(
    ("model", "learner"),
    [("attention", "ridge"), ("biased", "ridge"), ("mlp", "ridge"), ("attention", "fixed")],
)
def test_a_cell_has_the_same_bits_alone(seed, model, learner):
    ridge = 1e-3 if learner == "fixed" else None
    cells = [
        dataclasses.replace(cell, learner=learner, ridge=ridge) for cell in all_cells(seed, model)
    ]
    together = {cell: values for job in group(cells) for cell, values, _ in compute(job)}
    assert set(together) == set(cells)
    for cell in random.Random(seed).sample(cells, 6):
        [(_, alone, _)] = compute(Job((cell,)))
        assert alone == together[cell]


def test_jobs_do_not_depend_on_the_order_of_cells(seed):
    cells = [cell for model in ("attention", "mlp") for cell in all_cells(seed, model)]
    shuffled = random.Random(seed).sample(cells, len(cells))
    assert group(cells) == group(shuffled) == group(cells + cells)
    # finite and infinite heads of two models
    assert len(group(cells)) == 4


def test_a_resumed_job_gives_only_what_is_missing(seed):
    [job] = group(cell for cell in all_cells(seed, "attention") if cell.n_heads is not None)
    whole = {cell: values for cell, values, _ in compute(job)}
    wanted = set(random.Random(seed).sample(job.cells, 5))
    assert {cell: values for cell, values, _ in compute(job, wanted)} == {
        cell: whole[cell] for cell in wanted
    }
    assert list(compute(job, ())) == []


@pytest.mark.parametrize("model", ["attention", "mlp"])
def test_nested_heads_are_the_features_of_each_draw(seed, model):
    draw = Draw.of(Cell(model, "token", 3, 4, 3, 12, 12, 7, seed, 0))
    for m, gram, cross in nested_grams(
        model, draw.train, draw.test, [70, 3, HEAD_BLOCK], draw.head_seed
    ):
        if model == "mlp":
            weights = sample_mlp_weights(4 * m, 4, 3, draw.head_seed)
            features = [mlp_features(sets, weights) for sets in (draw.train, draw.test)]
        else:
            heads = GaussianHeads().sample(m, 3, draw.head_seed)
            features = [attention_features(sets, heads) for sets in (draw.train, draw.test)]
        np.testing.assert_allclose(np.tril(gram), np.tril(features[0] @ features[0].T), atol=1e-12)
        np.testing.assert_allclose(cross, features[1] @ features[0].T, atol=1e-12)


def test_outcome_is_the_ridge_path(seed):
    cell = Cell("biased", "corr * token", 3, 4, None, 40, 40, 30, seed, 0)
    draw = Draw.of(cell)
    [(_, gram, cross)] = nested_grams("biased", draw.train, draw.test, [None], 0)
    target = read_target(cell.target, 3)
    y, truth = target(draw.train), target(draw.test)
    path = gram_path(np.array(gram), y[:, None])
    errors = []
    for i in range(len(path.alphas)):
        fit = path.at(i)
        errors.append(
            np.mean((cross @ fit.coef[:, 0] + fit.intercept[0] - truth) ** 2) / np.var(truth)
        )
    found = FactorisedGram.of(gram).outcome(y, cross, truth)
    assert found["error"] == pytest.approx(errors[path.best], rel=1e-8)
    assert found["alpha"] == pytest.approx(path.alphas[path.best])
    assert found["oracle"] == pytest.approx(min(errors), rel=1e-8)
    assert found["loo"] * np.var(truth) == pytest.approx(path.errors[path.best], rel=1e-8)
    assert found["oracle"] <= found["error"]


@pytest.mark.parametrize("n_heads", [None, 30])
def test_outcome_is_that_of_the_estimator(n_heads, seed):
    """The figures of the paper are evidence about `AttentionRegressor` itself."""
    cell = Cell("attention", "corr * token", 3, 4, n_heads, 40, 40, 30, seed, 0)
    draw = Draw.of(cell)
    [(_, values, _)] = compute(Job((cell,)))
    model = paper_regressor(
        n_heads=math.inf if n_heads is None else n_heads,
        alpha=values["alpha"],
        random_state=draw.head_seed,
    ).fit(draw.train, draw.labels(cell))
    truth = read_target(cell.target, 3)(draw.test)
    error = np.mean(np.square(model.predict(draw.test) - truth)) / np.var(truth)
    assert values["error"] == pytest.approx(error, rel=1e-6)
    assert values["loo"] * np.var(truth) == pytest.approx(model.loo_error_, rel=1e-6)


def test_models_meet_the_same_sets_and_noise(seed):
    cell = Cell(
        "attention",
        "token",
        3,
        4,
        3,
        12,
        12,
        7,
        seed,
        0,
        noise=0.3,
        outliers=0.2,
        outlier_size=10.0,
    )
    other = dataclasses.replace(cell, model="mlp", n_heads=None, learner="huber")
    assert (Draw.of(cell).labels(cell) == Draw.of(other).labels(other)).all()
    clean = dataclasses.replace(cell, noise=0.0, outliers=0.0)
    spread = math.sqrt(1 / 12)  # Var f* = 1/(dN)
    off = np.abs(Draw.of(cell).labels(cell) - Draw.of(cell).labels(clean)) / spread
    assert (off > 0).all()
    assert off.max() < 16


def test_workers_fit_into_memory(monkeypatch):
    jobs = group(Cell("mlp", "token", 3, 2, None, 4096, 4096, 10, 0, r) for r in range(8))
    monkeypatch.setattr("keyhole.lab.jobs.available_memory", lambda: 2 * jobs[0].memory)
    assert worker_count(jobs, 6) == 1
    monkeypatch.setattr("keyhole.lab.jobs.available_memory", lambda: 100 * jobs[0].memory)
    assert worker_count(jobs, 6) == 6
    assert worker_count(jobs[:2], 6) == 2


def test_memory_is_counted_high_enough():
    """The Gram matrix, the copy that is reduced, and the kernel of the test sets are there at
    once.
    """
    [job] = group([Cell("attention", "token", 3, 2, 5, 1000, 1000, 100, 0, 0)])
    assert job.memory > 8 * (2 * 1000**2 + 1000 * 100)


@pytest.mark.parametrize("n_heads", [None, 40])
def test_biased_cells_have_their_mean(n_heads):
    """Ridge by hand on the kernel or the features of that mean; the job of another mean is
    another.
    """
    cells = [
        Cell("biased", "corr * token", 3, 2, n_heads, 20, 20, 30, 0, 0, "fixed", ridge=1e-3, mean=c)
        for c in (0.5, 2.0)
    ]
    jobs = group(cells)
    assert len(jobs) == 2
    for job in jobs:
        [(cell, values, _)] = compute(job)
        draw, target = Draw.of(cell), read_target(cell.target, cell.dim)
        found = []
        for k in range(1 if n_heads is None else 2):  # 80 heads are drawn in all
            distribution = GaussianHeads(mean=cell.mean)
            if n_heads is None:
                gram, cross = (
                    attention_kernel(draw.train, heads=distribution),
                    attention_kernel(draw.test, draw.train, heads=distribution),
                )
            else:
                heads = distribution.sample(n_heads, cell.dim, draw.head_seed + k)
                features, of_test = (
                    attention_features(draw.train, heads),
                    attention_features(draw.test, heads),
                )
                gram, cross = features @ features.T, of_test @ features.T
            fitted = cross @ np.linalg.solve(gram + 20 * 1e-3 * np.eye(20), target(draw.train))
            found.append(np.mean((fitted - target(draw.test)) ** 2))
        np.testing.assert_allclose(values["mean_square"], np.mean(found), rtol=1e-8)


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="Windows has no signal masks")
def test_workers_start_where_no_interrupt_reaches_them():
    """Ctrl-C reaches the whole process group: a worker that was starting printed a traceback."""
    pool = WorkerPool(1)
    try:
        blocked = pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result()
    finally:
        pool.stop()
    assert signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
