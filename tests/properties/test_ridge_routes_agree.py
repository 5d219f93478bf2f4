"""Primal = dual over blocks of heads = kernel on ΦΦᵀ = scikit-learn's Ridge, to 1e-8."""

import numpy as np
import pytest
from ridges import design_path, gram_fixed, gram_path
from sklearn.linear_model import Ridge

from keyhole.ridge.design import ridge_rows
from keyhole.solve.matrices import add_outer
from keyhole.ridge.problem import RidgeProblem

# rounding of a Gram matrix moves a fit by ε λ_max/alpha, here at most 1e-15 · 5e4 / 0.1 = 5e-10
ALPHAS = [10.0, 1.0, 0.1]


def routes(design, y, i, fit_intercept, weights):
    """(name, v, b) at ALPHAS[i] by every route."""
    options = {"fit_intercept": fit_intercept, "weights": weights}
    n, p = design.shape
    gram = design @ design.T
    kernel = gram_path(gram, y, ALPHAS, **options).at(i)
    yield "kernel", design.T @ kernel.coef, kernel.intercept
    spectral = gram_path(gram, y, [*ALPHAS, 0.0], **options).at(i)
    yield "eigen", design.T @ spectral.coef, spectral.intercept
    fixed = gram_fixed(gram, y, ALPHAS[i], **options)
    yield "cholesky", design.T @ fixed.coef, fixed.intercept
    columns = [design[:, a : a + 7] for a in range(0, p, 7)]
    # any constant may be taken from a column if there is an intercept
    total, centre = (
        np.zeros((n, n), order="F"),
        design.mean(axis=0) if fit_intercept else np.zeros(p),
    )
    for a, block in zip(range(0, p, 7), columns, strict=True):
        add_outer(total, block - centre[a : a + 7])
    dual = gram_path(total, y, ALPHAS, overwrite_gram=True, **options).at(i)
    v = np.concatenate([block.T @ dual.coef for block in columns])
    if fit_intercept:
        v -= np.outer(centre, dual.coef.sum(axis=0))
    yield "dual over blocks", v, dual.intercept - centre @ v
    primal = design_path(design, y, ALPHAS, memory_budget=20_000, **options).at(i)
    yield "primal", primal.coef, primal.intercept

    def rows():
        return (design[a : a + 5] for a in range(0, n, 5))

    sums = ridge_rows(rows, RidgeProblem.of(y, ALPHAS, **options), keep_factor=True).at(i)
    yield "primal over blocks", sums.coef, sums.intercept


def problem(rng, n, p, weighted):
    design = rng.standard_normal((n, p)) + 3 * rng.standard_normal(p)
    y = design[:, :1] * rng.standard_normal(2) + rng.standard_normal((n, 2)) + 7
    return design, y, rng.uniform(0.05, 5.0, n) if weighted else None


def predictions_off(v, b, design, y, alpha, fit_intercept, weights):
    """Largest difference of predictions and of values to scikit-learn's, each in units of the
    largest.
    """
    model = Ridge(alpha=alpha, fit_intercept=fit_intercept, solver="svd").fit(
        design, y, sample_weight=weights
    )
    wanted = model.predict(design)
    return max(
        np.abs(design @ v + b - wanted).max() / np.abs(wanted).max(),
        np.abs(v - model.coef_.T).max() / np.abs(model.coef_).max(),
    )


@pytest.mark.parametrize("i", range(len(ALPHAS)))
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("n", "p"), [(60, 20), (20, 60), (20, 20), (12, 1)])
def test_routes_agree_with_scikit_learn(rng, n, p, weighted, fit_intercept, i):
    design, y, weights = problem(rng, n, p, weighted)
    for name, v, b in routes(design, y, i, fit_intercept, weights):
        off = predictions_off(v, b, design, y, ALPHAS[i], fit_intercept, weights)
        assert off < 1e-8, f"{name}: off by {off:.1e}"


@pytest.mark.parametrize("broken", ["penalised intercept", "alpha per sample"])
def test_another_ridge_is_caught(rng, broken):
    design, y, _ = problem(rng, 60, 20, weighted=False)
    if broken == "penalised intercept":
        extended = np.column_stack([design, np.ones(60)])
        values = gram_fixed(extended @ extended.T, y, 10.0, fit_intercept=False)
        v = extended.T @ values.coef
        v, b = v[:-1], v[-1]
    else:
        fit = gram_fixed(design @ design.T, y, 10.0 / 60)
        v, b = design.T @ fit.coef, fit.intercept
    assert predictions_off(v, b, design, y, 10.0, True, None) > 1e-3


def test_what_is_said_of_one_penalty_does_not_depend_on_the_others(rng):
    x = rng.uniform(-1, 1, (40, 1))
    gram, y = np.exp(-((x - x.T) ** 2) / 2), np.sin(3 * x)
    alone = gram_path(gram, y, [1e-9])
    among = gram_path(gram, y, [0.0, 1e-20, 1e-9, 5.0])
    assert (alone.route, among.route) == ("tridiagonal", "eigen")
    # rounding moves eigenvalues by 1e-16 λ_max ≈ 4e-15: 4e-6 of this penalty
    assert among.errors[2] == pytest.approx(alone.errors[0], rel=1e-4)
