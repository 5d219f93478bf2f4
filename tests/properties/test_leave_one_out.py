"""Leave-one-out in closed form is n refits: e_i = r_i / (1 − h_i), on every route."""

import numpy as np
import pytest
from ridges import design_path, gram_fixed, gram_path
from sklearn.linear_model import Ridge

ALPHAS = [0.03, 1.0, 20.0]


def problem(rng, n, p, weighted):
    design = rng.standard_normal((n, p)) @ np.diag(np.geomspace(1, 0.05, p)) + rng.standard_normal(
        p
    )
    y = rng.standard_normal((n, 2)) * [1.0, 30.0] + [5.0, -100.0]
    weights = rng.uniform(0.05, 5.0, n) if weighted else None
    return design, y, weights


def refits(design, y, alpha, fit_intercept, weights):
    """y_i minus the prediction of scikit-learn's Ridge fitted without sample i."""
    left = np.empty_like(y)
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        model = Ridge(alpha=alpha, fit_intercept=fit_intercept, solver="svd")
        model.fit(design[rest], y[rest], sample_weight=None if weights is None else weights[rest])
        left[i] = y[i] - model.predict(design[i : i + 1])[0]
    return left


def closed_forms(design, y, fit_intercept, weights):
    """(route, residuals at each of ALPHAS, mean squares) by every route there is."""
    options = {"fit_intercept": fit_intercept, "weights": weights}
    gram = design @ design.T
    with_zero = gram_path(gram, y, [*ALPHAS, 0.0], **options)
    paths = [
        gram_path(gram, y, ALPHAS, **options),
        with_zero,
        design_path(design, y, ALPHAS, **options),
    ]
    assert [path.route for path in paths] == ["tridiagonal", "eigen", "design"]
    for path in paths:
        yield path.route, [path.at(i) for i in range(len(ALPHAS))]
    yield "cholesky", [gram_fixed(gram, y, alpha, **options) for alpha in ALPHAS]


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("n", "p"), [(24, 6), (16, 30), (7, 1)])
def test_closed_form_is_n_refits(rng, n, p, weighted, fit_intercept):
    design, y, weights = problem(rng, n, p, weighted)
    wanted = [refits(design, y, alpha, fit_intercept, weights) for alpha in ALPHAS]
    for route, fits in closed_forms(design, y, fit_intercept, weights):
        for fit, truth in zip(fits, wanted, strict=True):
            assert fit.route == route
            off = np.abs(fit.left_out - truth).max() / np.abs(truth).max()
            assert off < 1e-8, f"{route} at alpha {fit.alpha}: off by {off:.1e}"
            mean_square = np.average(np.square(truth).mean(axis=1), weights=weights)
            assert fit.error == pytest.approx(mean_square, rel=1e-8)


def forgetful(gram, y, alpha, weights, *, project):
    """The closed form with one thing forgotten: the intercept's own leverage, or the weights."""
    n = len(y)
    roots = np.ones(n) if weights is None else np.sqrt(weights)
    scaled = roots[:, None] * gram * roots
    centre = np.eye(n) - np.outer(roots, roots) / (roots @ roots)
    inverse = np.linalg.inv(centre @ scaled @ centre + alpha * np.eye(n))
    target = centre @ (roots[:, None] * y)
    kept = alpha * inverse @ centre if project else alpha * inverse
    return alpha * inverse @ target / roots[:, None] / np.diag(kept)[:, None]


@pytest.mark.parametrize("broken", ["no leverage of the intercept", "no weights"])
def test_a_forgetful_closed_form_is_caught(rng, broken):
    design, y, weights = problem(rng, 24, 6, weighted=True)
    truth = refits(design, y, 1.0, True, weights)
    gram = design @ design.T
    assert (
        np.abs(forgetful(gram, y, 1.0, weights, project=True) - truth).max()
        < 1e-8 * np.abs(truth).max()
    )
    if broken == "no weights":
        wrong = forgetful(gram, y, 1.0, None, project=True)
    else:
        wrong = forgetful(gram, y, 1.0, weights, project=False)
    assert np.abs(wrong - truth).max() > 1e-3 * np.abs(truth).max()
