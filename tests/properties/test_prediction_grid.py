"""Predicted test errors over a grid of fitted models: within the tolerance of the dimension and
sampling error.
"""

import math
from dataclasses import replace

import numpy as np
import pytest

from keyhole.attention.heads import GaussianHeads
from keyhole.attention.kernels import attention_kernel
from keyhole.lab.cells import read_target
from keyhole.lab.figures import prediction
from keyhole.theory.curves import learning_curve
from keyhole.theory.targets import Correlation, sphere_sets

SMALL = prediction.Config(
    dims=(8,),
    keys=(4,),
    sizes=(100, 300),
    repetitions=(10, 10),
    heads=(20,),
    ridges=(1e-4,),
    n_test=500,
    ratio_keys=(),
)


def computed(config):
    return [row for cell in prediction.cells(config) for row in cell.rows()]


def beyond(row, predicted):
    """How far a prediction is off, as a share of the measured mean, beyond five standard errors of
    that.
    """
    off = abs(predicted - row["measured"]) - 5 * row["standard_error"]
    return max(off, 0.0) / row["measured"]


def repredicted(row, **changes):
    """The prediction for a cell with some of its settings changed."""
    target = read_target(prediction.TARGETS[row["target"]], row["d"])
    settings = {
        "n_heads": math.inf if row["M"] == "inf" else row["M"],
        "noise": row["noise"],
        "ridge": row["ridge"],
        "heads": GaussianHeads(mean=1.0 if row["model"] == "biased attention" else 0.0),
    }
    settings |= changes
    return float(learning_curve(target, row["n"], row["N"], **settings))


@pytest.fixture(scope="module", params=[8, pytest.param(4, marks=pytest.mark.slow)])
def rows(request):
    seed = int(request.config.getoption("--seed"))
    config = replace(SMALL, dims=(request.param,), seed=seed)
    return prediction.grid_rows(config, computed(config))


def test_predictions_meet_fits(rows):
    assert len(rows) == 2 * 2 * 3 * (2 + 1)  # biased heads: without noise only
    assert all(repredicted(row) == row["predicted"] for row in rows)
    worst = max(
        rows, key=lambda row: beyond(row, row["predicted"]) / prediction.tolerance(row["d"])
    )
    assert beyond(worst, worst["predicted"]) <= prediction.tolerance(worst["d"]), worst


def test_heads_may_not_be_ignored(rows):
    """Broken twin: infinitely many heads predicted where there are twenty."""
    few = [row for row in rows if row["M"] == 20 and row["n"] == 300]
    missed = [
        beyond(row, repredicted(row, n_heads=math.inf)) > prediction.tolerance(row["d"])
        for row in few
    ]
    assert np.mean(missed) > 0.5


def test_the_mean_may_not_be_forgotten(rows):
    """Broken twin: zero-mean heads predicted where there are biased ones."""
    biased = [
        row for row in rows if row["model"] == "biased attention" and row["target"] != "f_{1,2}"
    ]
    forgotten, known = (
        np.mean(
            [
                abs(math.log(repredicted(row, heads=distribution) / row["measured"]))
                for row in biased
            ]
        )
        for distribution in (None, GaussianHeads(mean=1.0))
    )
    assert forgotten > 1.5 * known


def test_alpha_is_not_the_ridge(rows):
    """Broken twin: α = nλ put where λ belongs."""
    missed = [
        beyond(row, repredicted(row, ridge=row["ridge"] * row["n"]))
        > prediction.tolerance(row["d"])
        for row in rows
    ]
    assert np.mean(missed) > 0.3


def test_a_summary_counts_its_cells(rows):
    summary = {row["settings"]: row for row in prediction.summarise(rows)}
    assert summary["all settings"]["number"] == str(len(rows))
    assert (
        int(summary["noise"]["number"])
        == int(summary["model = biased attention"]["number"])
        == len(rows) // 3
    )
    listed = prediction.outliers(
        [row | {"deviation": 0.5 * i / len(rows)} for i, row in enumerate(rows)]
    )
    assert [row["deviation"] for row in listed] == sorted(
        (row["deviation"] for row in listed), reverse=True
    )
    assert all(row["deviation"] > prediction.tolerance(row["d"]) for row in listed)


def gaussian_feature_errors(target, n_keys, n, n_features, ridge, seed, fits=10):
    """Test errors of ridge on Gaussian random functions whose covariance is the attention
    kernel.
    """
    errors = []
    for fit in range(fits):
        batch = sphere_sets(n + 400, n_keys, target.dim, 1000 * seed + fit)
        root = np.linalg.cholesky(attention_kernel(batch) + 1e-10 * np.eye(len(batch)))
        draws = np.random.default_rng([seed, fit]).standard_normal((len(batch), n_features))
        phi, y = root @ draws / math.sqrt(n_features), target(batch)
        weights = np.linalg.solve(phi[:n] @ phi[:n].T + n * ridge * np.eye(n), y[:n])
        errors.append(np.mean((phi[n:] @ (phi[:n].T @ weights) - y[n:]) ** 2))
    return np.array(errors)


def test_gaussian_features_are_predicted_where_few_heads_are_not(seed):
    """The outliers of the grid: heads are no Gaussian functions.

    Gaussian ones with their kernel fit the theory.
    """
    target, n_keys, n, n_heads, ridge = Correlation(1, 16), 16, 100, 20, 1e-5
    predicted = float(learning_curve(target, n, n_keys, ridge, n_heads=n_heads))
    errors = gaussian_feature_errors(target, n_keys, n, n_heads * 17, ridge, seed)
    off = abs(predicted - errors.mean()) - 5 * errors.std(ddof=1) / math.sqrt(len(errors))
    assert off < 0.05 * errors.mean()


@pytest.mark.slow
def test_the_whole_grid(seed):
    """What the documentation states: median 6 %; 90 % of the cells within 12 % at d ≥ 8, and 20 %
    at d = 4.
    """
    config = replace(prediction.PRESETS["full"], seed=seed, ratio_keys=())
    rows = prediction.grid_rows(config, computed(config))
    off = {
        dims: np.abs([r["deviation"] for r in rows if r["d"] in dims])
        for dims in ((4,), (8, 16), (4, 8, 16))
    }
    assert np.median(off[4, 8, 16]) <= 0.06
    assert np.quantile(off[8, 16], 0.9) <= 0.12
    assert np.quantile(off[4,], 0.9) <= 0.20


@pytest.mark.slow
def test_the_mlp_needs_as_many_more_samples_as_predicted(seed):
    config = replace(prediction.PRESETS["full"], seed=seed, dims=(), ratio_keys=(4,))
    [row] = prediction.ratio_rows(config, computed(config))
    predicted = float(row["ratio, predicted"])
    measured = float(row["ratio, measured"].partition(" ")[0])
    low, high = map(float, row["ratio, measured"].partition("(")[2].rstrip(")").split(" to "))
    assert abs(predicted - measured) < 1.5 * (high - low) + 0.1 * measured
    # broken twin: equal needs
    assert measured - 1.5 * (high - low) > 1
