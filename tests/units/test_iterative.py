"""Conjugate gradients: the direct solution without its matrices, and a certificate of how near."""

import numpy as np
import pytest
from layers import fit_layer
from paper import PAPER_LAYER, paper_classifier, paper_regressor
from ridges import design_path
from sklearn.base import clone

import keyhole as kh
from keyhole.attention.heads import HeadDraw
from keyhole.ridge.iterative import Preconditioner, ResidualWarning, ridge_cg
from keyhole.ridge.problem import RidgeProblem
from keyhole.solvers import gradients as gradient_solver
from keyhole.solvers import solve as solvers
from keyhole.solvers.gradients import HeadDesign
from keyhole.spec import LayerSpec
from keyhole.training import SolvedSamples, TrainingSet


class Plain:
    """A matrix as a design, counting its passes."""

    def __init__(self, array):
        self.array, self.passes = array, 0

    @property
    def shape(self):
        return self.array.shape

    def matvec(self, v):
        return self.array @ v

    def rmatvec(self, a):
        return self.array.T @ a

    def gram_product(self, a):
        self.passes += 1
        return self.array @ (self.array.T @ a)


def no_preconditioner(size):
    return Preconditioner(np.zeros((size, 0)), np.zeros(0))


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("n", "p"), [(50, 80), (80, 30)])
def test_it_is_the_direct_solution(rng, n, p, fit_intercept, weighted):
    design = rng.standard_normal((n, p)) @ np.diag(np.geomspace(1, 0.01, p)) + 0.5
    y = rng.standard_normal((n, 2)) + 7
    weights = rng.uniform(0.2, 3.0, n) if weighted else None
    alphas = np.array([0.01, 1.0])
    path = design_path(design, y, alphas, fit_intercept=fit_intercept, weights=weights)
    for primal in (False, True):
        problem = RidgeProblem.of(y, alphas, fit_intercept=fit_intercept, weights=weights)
        fits = ridge_cg(
            Plain(design), problem, no_preconditioner(p if primal else n), primal=primal, tol=1e-10
        )
        for i, fit in enumerate(fits):
            assert fit.residual <= 1e-10
            assert fit.alpha == alphas[i]
            direct = path.at(i)
            expected = design @ direct.coef + direct.intercept
            off = np.abs(design @ fit.coef + fit.intercept - expected).max()
            assert off < 1e-7 * np.abs(y - y.mean(axis=0)).max()


@pytest.mark.parametrize("primal", [True, False])
@pytest.mark.parametrize(("n", "p"), [(60, 90), (90, 60)])
def test_the_certificate_bounds_the_error(rng, n, p, primal):
    design = rng.standard_normal((n, p)) @ np.diag(np.geomspace(1, 1e-2, p))
    y, weights = rng.standard_normal((n, 1)), rng.uniform(0.2, 2.0, n)
    exact = design_path(design, y, [1e-2], weights=weights).at(0)
    plain = no_preconditioner(p if primal else n)
    for tol in (0.1, 1e-3, 1e-9):
        problem = RidgeProblem.of(y, [1e-2], weights=weights)
        [fit] = ridge_cg(Plain(design), problem, plain, primal=primal, tol=tol)
        off = np.sqrt(weights)[:, None] * (
            design @ (fit.coef - exact.coef) + fit.intercept - exact.intercept
        )
        spread = np.sqrt(weights @ np.square(y[:, 0] - np.average(y[:, 0], weights=weights)))
        assert fit.residual <= tol
        assert np.linalg.norm(off) <= (fit.residual + 1e-10) * spread


@pytest.mark.parametrize("alpha", [0.04, 9.0])
def test_the_certificate_is_the_residual_of_the_system(rng, alpha):
    """|r| / (2 √alpha |√w (y − ȳ)|) for p unknowns, |r| / |√w (y − ȳ)| for n; the worst of the
    outputs.
    """
    design, y, weights = (
        rng.standard_normal((30, 12)),
        rng.standard_normal((30, 3)),
        rng.uniform(0.2, 2.0, 30),
    )
    y[:, 2] = 5.0  # constant: nothing to solve for, and nothing to divide by
    roots = np.sqrt(weights)[:, None]
    centred = roots * (y - np.average(y, axis=0, weights=weights))
    phi = roots * (design - np.average(design, axis=0, weights=weights))
    sizes = np.linalg.norm(centred[:, :2], axis=0)
    problem = RidgeProblem.of(y, [alpha], weights=weights)
    [fit] = ridge_cg(Plain(design), problem, no_preconditioner(12), primal=True, max_iter=3)
    left = phi.T @ centred - (phi.T @ phi + alpha * np.eye(12)) @ fit.coef
    want = (np.linalg.norm(left[:, :2], axis=0) / (2 * np.sqrt(alpha) * sizes)).max()
    assert fit.n_iter == 3
    assert fit.residual == pytest.approx(want, rel=1e-6)
    [fit] = ridge_cg(Plain(design), problem, no_preconditioner(30), primal=False, max_iter=3)
    # what is known of the dual solution is Φᵀa, and Φ times the residual: Φᵀ r = Φᵀ y −
    # (ΦᵀΦ + alpha) v
    left = phi.T @ centred - (phi.T @ phi + alpha * np.eye(12)) @ fit.coef
    least = (np.linalg.norm(left[:, :2], axis=0) / np.linalg.norm(phi, 2) / sizes).max()
    assert least * (1 - 1e-9) <= fit.residual <= 1.0
    assert (fit.coef[:, 2] == 0).all()


def test_a_preconditioner_saves_iterations(rng):
    design = rng.standard_normal((200, 300)) @ np.diag(np.geomspace(10, 1e-2, 300))
    problem = RidgeProblem.of(rng.standard_normal((200, 1)), [1.0])
    gram = design @ design.T
    gram -= gram.mean(axis=0)
    gram -= gram.mean(axis=1)[:, None]
    chosen = np.arange(0, 200, 3)
    nystrom = Preconditioner.of_columns(gram[:, chosen].copy(), gram[np.ix_(chosen, chosen)])
    factor = Preconditioner.of_factor(design[:, :150] - design[:, :150].mean(axis=0))
    [plain] = ridge_cg(Plain(design), problem, no_preconditioner(200))
    for better in (nystrom, factor):
        [fit] = ridge_cg(Plain(design), problem, better)
        assert fit.residual <= 1e-8
        assert fit.n_iter < plain.n_iter / 2
        np.testing.assert_allclose(fit.coef, plain.coef, atol=1e-5 * np.abs(plain.coef).max())


def test_too_few_iterations_are_not_called_converged(rng):
    design = rng.standard_normal((60, 90)) @ np.diag(np.geomspace(10, 1e-4, 90))
    problem = RidgeProblem.of(rng.standard_normal((60, 1)), [1e-9])
    [fit] = ridge_cg(Plain(design), problem, no_preconditioner(60), max_iter=3)
    assert fit.residual > 1e-8
    assert fit.n_iter == 3
    with pytest.raises(ValueError, match="positive penalty"):
        ridge_cg(Plain(design), RidgeProblem.of(np.ones((60, 1)), [0.0]), no_preconditioner(60))


@pytest.fixture
def sets(rng):
    keys = [rng.normal(size=(rng.integers(1, 6), 3)) for _ in range(120)]
    return kh.SetBatch(keys, rng.normal(size=(120, 3)))


@pytest.fixture
def y(sets, rng):
    return kh.targets.Correlation(1, 3)(sets) + 0.1 * rng.normal(size=len(sets))


@pytest.mark.parametrize("n_extras", [0, 2])
def test_products_of_heads_are_those_of_their_features(sets, rng, n_extras):
    draw = HeadDraw(kh.GaussianHeads(), 50, 3, 0)
    centre, extras = rng.standard_normal(200), rng.standard_normal((120, n_extras))
    batch = kh.SetBatch(
        np.split(sets.tokens, sets.offsets[1:-1]), sets.query, extras if n_extras else None
    )
    phi = np.hstack([kh.attention_features(sets, draw) - centre, extras])
    design = HeadDesign(batch, draw, "relu", "float64", 10_000, centre)
    assert design.shape == phi.shape
    a, v = rng.standard_normal((120, 2)), rng.standard_normal((200 + n_extras, 2))
    np.testing.assert_allclose(design.gram_product(a), phi @ (phi.T @ a), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(design.rmatvec(a), phi.T @ a, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(design.matvec(v), phi @ v, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "options", [{}, {"fit_intercept": False}, {"pooling": "sum"}, {"query": "each"}]
)
@pytest.mark.parametrize("n_heads", [12, 60])
def test_the_estimator_predicts_what_the_direct_one_does(sets, y, rng, n_heads, options):
    weights = rng.integers(0, 3, size=120)
    model = kh.AttentionRegressor(
        n_heads,
        alpha=0.05,
        random_state=0,
        **{**PAPER_LAYER, **options},
    )
    direct = clone(model).fit(sets, y, sample_weight=weights)
    large = clone(model).set_params(solver="cg").fit(sets, y, sample_weight=weights)
    assert (large.solver_, large.selection_.method) == ("cg", "holdout")
    assert large.residual_ <= 1e-8
    off = np.abs(large.predict(sets) - direct.predict(sets)).max()
    assert off < 1e-6 * np.ptp(direct.predict(sets))
    assert not hasattr(large, "loo_error_")
    assert not hasattr(large, "loo_predictions_")


def test_a_few_penalties_are_chosen_on_held_out_samples(sets, y):
    model = paper_regressor(60, alpha=[1e-3, 0.1, 1e4], random_state=0, solver="cg").fit(sets, y)
    assert model.alpha_ == model.selection_.alphas[np.argmin(model.selection_.errors)] != 1e4
    assert model.selection_.error == model.selection_.errors.min()
    with pytest.raises(ValueError, match=r"alpha='loo' needs an n × n or a p × p matrix"):
        paper_regressor(60, solver="cg").fit(sets, y)
    with pytest.raises(ValueError, match="finitely many heads"):
        paper_regressor(float("inf"), solver="cg", alpha=1.0).fit(sets, y)
    with pytest.raises(ValueError, match="'solver' parameter of AttentionRegressor must be"):
        paper_regressor(60, solver="magic").fit(sets, y)


def test_a_classifier_calibrates_on_held_out_samples(sets, y):
    label = np.where(y > np.median(y), "high", "low")
    model = paper_classifier(60, alpha=0.1, random_state=0)
    direct, large = (
        clone(model).fit(sets, label),
        clone(model).set_params(solver="cg").fit(sets, label),
    )
    np.testing.assert_allclose(
        large.decision_function(sets), direct.decision_function(sets), atol=1e-6
    )
    assert 0 < large.temperature_ < np.inf
    assert large.predict_proba(sets).shape == (120, 2)


def test_float32_reaches_its_own_tolerance(sets, y):
    model = paper_regressor(60, alpha=0.5, random_state=0, solver="cg", dtype="float32").fit(
        sets, y
    )
    exact = paper_regressor(60, alpha=0.5, random_state=0).fit(sets, y)
    assert model.residual_ <= 1e-6
    assert np.abs(model.predict(sets) - exact.predict(sets)).max() < 1e-4 * np.ptp(y)


def test_a_residual_that_stays_is_told(sets, y, monkeypatch):
    monkeypatch.setattr(gradient_solver, "TOLERANCE", {"float64": 1e-30})
    with pytest.warns(ResidualWarning, match="relative residual of"):
        paper_regressor(30, alpha=0.1, random_state=0, solver="cg").fit(sets, y)


def test_memory_decides_when_nobody_does(sets, y, monkeypatch):
    assert not solvers.exceeds_memory(1000, 10**7, "float64")
    assert solvers.exceeds_memory(10**6, 10**6, "float32")
    monkeypatch.setattr(solvers, "exceeds_memory", lambda *_: True)
    assert paper_regressor(30, alpha=0.1, random_state=0).fit(sets, y).solver_ == "cg"
    assert (
        paper_regressor(30, alpha=0.1, random_state=0, solver="direct").fit(sets, y).solver_
        == "dual"
    )


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("n_heads", [1, 30])
def test_equal_samples_are_enough_for_a_penalty(sets, n_heads, fit_intercept):
    copies = sets[[0, 0, 0]]
    options = {"alpha": 0.5, "random_state": 0, "fit_intercept": fit_intercept}
    direct, large = (
        kh.AttentionRegressor(
            n_heads,
            solver=solver,
            **{**PAPER_LAYER, **options},
        )
        .fit(copies, [2.0, 2.0, 2.0])
        .predict(copies)
        for solver in ("direct", "cg")
    )
    np.testing.assert_allclose(large, direct, rtol=1e-7)


def fitted(sets, y, penalties, n_heads=5, **options):
    heads = HeadDraw(kh.GaussianHeads(), n_heads, 3, 0)
    return fit_layer(sets, y[:, None], heads, np.array(penalties), **options)


@pytest.mark.parametrize("weighted", [True, False])
def test_a_tenth_is_predicted_by_a_fit_to_the_rest(sets, y, rng, weighted):
    sets, y = sets[:43], y[:43]
    weights = np.append(rng.uniform(0.5, 2.0, 42), 0.0) if weighted else None
    has_weight = np.ones(43, bool) if weights is None else weights > 0
    penalties = [10.0, 1.0, 0.1]
    found = fitted(sets, y, penalties, solver="cg", weights=weights)

    # one in ten of the samples with weight, at random
    order = np.random.default_rng(1).permutation(np.flatnonzero(has_weight))
    held = np.sort(order[::10])
    rest = np.setdiff1d(order, held)
    w = np.ones(43) if weights is None else weights
    errors, guesses = [], []
    for alpha in penalties:
        part = fitted(sets[rest], y[rest], [alpha], solver="direct", weights=w[rest])
        guesses.append(part.layer.predict(sets[held])[:, 0])
        errors.append(np.average((y[held] - guesses[-1]) ** 2, weights=w[held]))
    np.testing.assert_allclose(found.ridge.errors, errors, rtol=1e-4)
    best = int(np.argmin(errors))
    assert found.ridge.best == best
    assert found.ridge.alpha == penalties[best]
    wanted = np.full(43, np.nan)
    wanted[held] = guesses[best]
    np.testing.assert_allclose(found.predictions[:, 0], wanted, rtol=1e-4, atol=1e-5)
    alone = fitted(sets, y, [penalties[best]], solver="cg", weights=weights)
    assert np.isnan(alone.predictions).all()
    assert np.isnan(alone.ridge.errors).all()
    np.testing.assert_allclose(found.layer.predict(sets), alone.layer.predict(sets), atol=1e-6)
    asked = fitted(sets, y, [penalties[best]], solver="cg", weights=weights, classifies=True)
    np.testing.assert_allclose(asked.predictions, found.predictions, rtol=1e-4, atol=1e-5)


def test_a_tenth_of_one_sample_is_none(sets, y):
    with pytest.raises(ValueError, match="holding out a tenth needs at least two samples"):
        fitted(sets[:1], y[:1], [0.1, 1.0], solver="cg")
    assert np.isfinite(fitted(sets[[0, 1]], y[[0, 1]], [0.1, 1.0], solver="cg").ridge.errors).all()


@pytest.mark.parametrize("n_heads", [1, 30])
def test_one_sample_has_a_layer_and_nothing_to_leave_out(sets, y, n_heads):
    found = fitted(sets[:1], y[:1], [0.1], n_heads)
    np.testing.assert_allclose(found.layer.predict(sets[:1]), y[:1, None], rtol=1e-9)
    assert np.isnan(found.predictions).all()
    assert np.isnan(found.ridge.errors).all()
    for penalties in ([0.1, 1.0], None):
        with pytest.raises(
            ValueError, match="leave-one-out needs at least two samples: got 1 sample"
        ):
            fit_layer(
                sets[:1], y[:1, None], HeadDraw(kh.GaussianHeads(), n_heads, 3, 0),
                None if penalties is None else np.array(penalties),
            )  # fmt: skip


@pytest.mark.parametrize(
    ("n", "p", "dtype", "needed"),
    [
        (100, 10, "float64", 4 * 100 * 8),
        (100, 10, "float32", 4 * 100 * 4),
        (10, 100, "float64", 1.5 * 100 * 8),
        (10, 10, "float64", 1.5 * 100 * 8),
    ],
)
def test_a_gram_matrix_and_its_factors_may_take_four_fifths_of_the_memory(
    n, p, dtype, needed, monkeypatch
):
    for memory, exceeds in ((needed / 0.8 * 1.001, False), (needed / 0.8 * 0.999, True)):
        asked = {"SC_PHYS_PAGES": memory / 4096, "SC_PAGE_SIZE": 4096}
        monkeypatch.setattr(solvers.os, "sysconf", asked.__getitem__)
        assert solvers.exceeds_memory(n, p, dtype) is exceeds


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_features_are_centred_by_the_mean_of_some_samples(sets, dtype):
    heads = HeadDraw(kh.GaussianHeads(1.0), 9, 3, 0)
    features = kh.attention_features(sets, heads, dtype=dtype).astype(np.float64)
    spec = LayerSpec(activation="relu", pooling="mean", dtype=dtype)
    found = gradient_solver.mean_feature(sets, heads, spec)
    assert (found == found.astype(dtype)).all(), "as it is in the precision of the features"
    off = np.abs(found - features.mean(axis=0))
    assert (off < features.std(axis=0)).all()
    np.testing.assert_allclose(
        gradient_solver.mean_feature(sets[:5], heads, spec), features[:5].mean(axis=0), rtol=1e-6
    )


def test_fewer_heads_have_a_larger_centre(sets, rng):
    draw, some = HeadDraw(kh.GaussianHeads(), 50, 3, 0), HeadDraw(kh.GaussianHeads(), 9, 3, 0)
    centre = rng.standard_normal(200)
    design = HeadDesign(sets, draw, "relu", "float64", 10_000, centre)
    for heads in (draw, some):
        share = np.sqrt(50 / heads.n_heads)
        wanted = kh.attention_features(sets, heads) - share * centre[: heads.n_heads * 4]
        found = np.full_like(wanted, np.nan)
        for columns, block in design.column_blocks(None if heads is draw else heads):
            found[:, columns] = block
        np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert design.shape == (120, 200)


def test_units_of_a_fit(sets, y):
    for heads in (HeadDraw(kh.GaussianHeads(), 5, 3, 0), kh.GaussianHeads()):
        fit = fit_layer(sets, y[:, None], heads, np.array([0.1]))
        larger = fit.in_units(3)
        np.testing.assert_allclose(
            larger.layer.predict(sets), 8 * fit.layer.predict(sets), rtol=1e-12
        )
        np.testing.assert_array_equal(larger.predictions, 8 * fit.predictions)
        np.testing.assert_allclose(larger.ridge.errors, 64 * fit.ridge.errors)


def test_what_has_no_weight_is_left_out_of_the_solve(sets):
    columns = np.arange(6.0)[:, None]
    plain = SolvedSamples.of(TrainingSet(sets[:6], columns))
    assert plain.rows.tolist() == [0, 1, 2, 3, 4, 5]
    weights = np.array([0.0, 0.0, 3.0, 1.0, 0.5, 0.0])
    weighted = SolvedSamples.of(TrainingSet(sets[:6], columns, weights))
    assert weighted.rows.tolist() == [2, 3, 4]
    assert weighted.unsolved_rows.tolist() == [0, 1, 5]
    assert weighted.data.weights.tolist() == [3.0, 1.0, 0.5]
    np.testing.assert_array_equal(weighted.data.samples.tokens, sets[[2, 3, 4]].tokens)
    # samples of weight 0 stay where their group has weight, without their outputs
    grouped = SolvedSamples.of(
        TrainingSet(
            sets[:5],
            columns[:5],
            np.array([0.0, 1.0, 0.0, 2.0, 0.0]),
            np.array([7, 7, 8, 9, 9]),
        )
    )
    assert grouped.rows.tolist() == [0, 1, 3, 4]
    assert grouped.data.groups.tolist() == [7, 7, 9, 9]
    assert grouped.data.outputs.ravel().tolist() == [0.0, 1.0, 3.0, 0.0]
    assert grouped.data.positive_rows.tolist() == [1, 2]


@pytest.mark.parametrize("n_heads", [2, 40])
def test_blocks_of_heads_and_of_samples_give_the_layer_of_all(sets, y, n_heads):
    """In blocks that share their memory, nothing may be kept for later."""
    whole, *cut = (
        fitted(sets[:30], y[:30], [0.1], n_heads, memory_budget=size)
        for size in (2**30, 20_000, 100)
    )
    for part in cut:
        np.testing.assert_allclose(part.layer.values, whole.layer.values, atol=1e-9)
        np.testing.assert_allclose(part.layer.intercept, whole.layer.intercept, atol=1e-9)
        np.testing.assert_allclose(part.predictions, whole.predictions, atol=1e-9)


def test_the_smaller_gram_matrix_is_factorised(sets, y):
    routes = [fitted(sets[:40], y[:40], [0.1], n_heads).route for n_heads in (1, 9, 10, 11)]
    assert routes == ["primal", "primal", "dual", "dual"]  # 4, 36, 40 and 44 columns
