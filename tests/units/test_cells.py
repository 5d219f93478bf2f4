"""Cells of the experiments: pure functions of their settings, and fits of the library itself."""

import math
from dataclasses import replace

import numpy as np
import pytest
from paper import paper_regressor

from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads
from keyhole.attention.kernels import attention_kernel
from keyhole.lab.cells import BallCell, Draw, FixedCell, Labels, RidgeCell, read_target
from keyhole.lab.figures import tasks

RIDGE = RidgeCell(
    model="attention",
    targets=("token^2", "corr * token"),
    dim=3,
    n_keys=4,
    heads=(5, 30, None),
    sizes=(20, 40),
    n_test=30,
    seed=0,
    repetition=0,
)
FIXED = FixedCell(
    model="biased",
    targets=("token^2", "corr * token"),
    dim=3,
    n_keys=4,
    heads=None,
    sizes=(20, 40),
    ridges=(1e-3, 1e-1),
    noises=(0.0, 0.25),
    n_test=30,
    seed=0,
    repetition=0,
    mean=0.5,
)
BALL = BallCell(
    loss="huber",
    target="token",
    dim=3,
    n_keys=2,
    n_heads=6,
    n_samples=24,
    most_samples=24,
    n_test=50,
    seed=0,
    repetition=0,
    labels=Labels(0.1, 0.1, 5.0),
)


def row_of(rows, **where):
    [row] = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return row


def draw_of(cell):
    n_train = max(cell.sizes)
    return Draw.of(cell.dim, cell.n_keys, n_train, cell.n_test, cell.seed, cell.repetition)


@pytest.mark.parametrize("cell", [RIDGE, replace(RIDGE, model="mlp"), FIXED, BALL])
def test_the_same_settings_are_the_same_rows(cell, seed):
    cell = replace(cell, seed=seed)
    assert cell.rows() == cell.rows()
    assert cell.rows() != replace(cell, seed=seed + 1).rows()
    assert cell.cost > 0


@pytest.mark.parametrize("n_heads", [5, 30, None])
@pytest.mark.parametrize("target", RIDGE.targets)
def test_ridge_rows_are_fits_of_the_estimator(n_heads, target, seed):
    """The figures of the paper are evidence about `AttentionRegressor` itself."""
    cell = replace(RIDGE, seed=seed)
    row = row_of(cell.rows(), M=n_heads, target=target, n=20)
    draw = draw_of(cell)
    model = paper_regressor(
        n_heads=math.inf if n_heads is None else n_heads,
        alpha=row["alpha"],
        random_state=draw.head_seed,
    )
    polynomial = read_target(target, cell.dim)
    model.fit(draw.train[:20], polynomial(draw.train[:20]))
    truth = polynomial(draw.test)
    error = np.mean(np.square(model.predict(draw.test) - truth)) / np.var(truth)
    assert row["error"] == pytest.approx(error, rel=1e-5)
    # the least penalties keep three digits of it on either route
    assert row["loo"] * np.var(truth) == pytest.approx(model.loo_error_, rel=1e-3)


def test_a_target_does_not_depend_on_its_neighbours(seed):
    together = row_of(replace(RIDGE, seed=seed).rows(), M=30, target="token^2", n=40)
    alone = row_of(replace(RIDGE, seed=seed, targets=("token^2",), heads=(30,)).rows(), n=40)
    assert together["error"] == pytest.approx(alone["error"], rel=1e-9)
    assert together["alpha"] == pytest.approx(alone["alpha"])


@pytest.mark.parametrize("n_heads", [None, 40])
def test_fixed_rows_are_ridge_by_hand(n_heads, seed):
    """α = nλ, no intercept, on the kernel or the features of heads with the mean asked for."""
    cell = replace(FIXED, seed=seed, heads=n_heads)
    row = row_of(cell.rows(), target="corr * token", n=20, ridge=1e-1, noise=0.25)
    draw = draw_of(cell)
    heads = GaussianHeads(mean=0.5)
    train = draw.train[:20]
    if n_heads is None:
        gram = attention_kernel(train, heads=heads)
        cross = attention_kernel(draw.test, train, heads=heads)
        kernels = [(gram, cross)]
    else:
        kernels = []
        for number in range(2):  # 80 heads are drawn
            drawn = heads.sample(n_heads, cell.dim, draw.head_seed + number)
            features = attention_features(train, drawn)
            of_test = attention_features(draw.test, drawn)
            kernels.append((features @ features.T, of_test @ features.T))
    target = read_target("corr * token", cell.dim)
    y = Labels(0.25).of(target, draw.train, cell.n_keys, draw.noise_seed)[:20]
    squares = []
    for gram, cross in kernels:
        predicted = cross @ np.linalg.solve(gram + 20 * 1e-1 * np.eye(20), y)
        squares.append(np.mean(np.square(predicted - target(draw.test))))
    assert row["mean_square"] == pytest.approx(np.mean(squares), rel=1e-6)


def test_labels_are_in_units_of_the_target(seed):
    target = read_target("token", 3)
    sets = draw_of(RIDGE).train
    clean = Labels().of(target, sets, 4, seed)
    np.testing.assert_array_equal(clean, target(sets))
    off = Labels(0.3, 0.2, 10.0).of(target, sets, 4, seed) - clean
    spread = math.sqrt(1 / 12)  # Var f* = 1/(dN)
    assert (off != 0).all()
    assert np.abs(off).max() < 16 * spread


def test_the_norm_ball_says_at_which_gap_it_stopped(seed):
    [row] = replace(BALL, seed=seed).rows()
    assert row["error"] > 0
    assert 0 <= row["gap"] < 1


def test_cells_of_a_figure_differ():
    cells = tasks.cells(tasks.PRESETS["full"])
    assert len(set(cells)) == len(cells)
