"""The solver over the norm ball: against a generic conic solver, at its edges, and in its words."""

import contextlib
import math
import re
import tracemalloc
import warnings

import cvxpy as cp
import numpy as np
import pytest
from balls import fit_norm_ball

from keyhole.ball.descent import AcceleratedDescent
from keyhole.ball.design import DenseDesign, StreamedDesign
from keyhole.ball.losses import LOSSES as LOSS
from keyhole.ball.norm_ball import SolverWarning, check_radii
from keyhole.ball.projection import NormBall
from keyhole.ball.risk import BallRisk, certify

LOSSES = ("absolute", "huber", "squared", "logistic", "hinge", "multinomial")
N_PROBLEMS = 20


def random_problem(rng, loss, n=None, n_groups=None, size=5):
    """A design, targets that a few groups explain up to noise, and radii from tight to loose."""
    n = n or int(rng.integers(15, 61))
    n_groups = n_groups or int(rng.integers(2, 41))
    design = rng.standard_normal((n, n_groups * size)) * rng.uniform(0.3, 3.0)
    truth = np.zeros((n_groups, size))
    truth[:3] = rng.standard_normal(truth[:3].shape)
    signal = design @ truth.ravel()
    signal = signal + signal.std() * rng.standard_normal(n) + rng.uniform(-2, 2)
    targets = {
        "logistic": lambda: np.where(signal > np.median(signal), 1.0, -1.0),
        "hinge": lambda: np.where(signal > np.median(signal), 1.0, -1.0),
        "multinomial": lambda: np.eye(3)[np.digitize(signal, np.quantile(signal, [0.3, 0.6]))],
    }.get(loss, lambda: signal)()
    norms = np.linalg.norm(truth, axis=1)
    if loss in ("logistic", "hinge", "multinomial"):  # labels have no scale: margins of about one
        norms = norms / signal.std()
    radii = norms.sum() * rng.uniform(0.1, 0.8), np.linalg.norm(norms) * rng.uniform(0.1, 0.8)
    return design, targets, radii


def cvxpy_loss(loss, y, z):
    return {
        "absolute": lambda: cp.sum(cp.abs(z - y), axis=1),
        "huber": lambda: cp.sum(0.5 * cp.huber(z - y, 1), axis=1),
        "squared": lambda: cp.sum(0.5 * cp.square(z - y), axis=1),
        "logistic": lambda: cp.sum(cp.logistic(-cp.multiply(y, z)), axis=1),
        "hinge": lambda: cp.sum(cp.pos(1 - cp.multiply(y, z)), axis=1),
        "multinomial": lambda: cp.log_sum_exp(z, axis=1) - cp.sum(cp.multiply(y, z), axis=1),
    }[loss]()


def solve_by_cvxpy(design, targets, loss, size, constraints):
    """Minimum of the mean loss, and how far to trust it; None if the solver gives up."""
    y = targets.reshape(len(targets), -1)
    weights = np.full(len(y), 1 / len(y))
    values = cp.Variable((design.shape[1], y.shape[1]))
    bias = cp.Variable((1, y.shape[1]))
    norms = cp.hstack([cp.norm(values[i : i + size], "fro") for i in range(0, design.shape[1], size)])
    objective = weights @ cvxpy_loss(loss, y, design @ values + np.ones((len(y), 1)) @ bias)
    problem = cp.Problem(cp.Minimize(objective), constraints(norms, values))
    for accuracy in (1e-10, 1e-9, 1e-8):  # as tight as it will go
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Solution may be inaccurate")
            with contextlib.suppress(cp.SolverError):
                problem.solve(solver=cp.CLARABEL, tol_gap_abs=accuracy, tol_gap_rel=accuracy, tol_feas=accuracy)
        if problem.status == cp.OPTIMAL:
            return float(problem.value), 10 * accuracy * max(1.0, float(problem.value))
    return None


def mean_loss(loss, design, targets, values, intercept, weights=None):
    """The objective, written out here once more."""
    y = targets.reshape(len(targets), -1)
    z = design @ values.reshape(design.shape[1], -1) + intercept
    r = np.abs(z - y)
    per_sample = {
        "absolute": lambda: r.sum(1),
        "huber": lambda: np.where(r <= 1, r**2 / 2, r - 0.5).sum(1),
        "squared": lambda: (r**2 / 2).sum(1),
        "logistic": lambda: np.log1p(np.exp(-y * z)).sum(1),
        "hinge": lambda: np.maximum(0, 1 - y * z).sum(1),
        "multinomial": lambda: np.log(np.exp(z).sum(1)) - (y * z).sum(1),
    }[loss]()
    return float(np.average(per_sample, weights=weights))


def ball(radii):
    def constraints(norms, values):
        return [cp.sum(norms) <= radii[0], cp.norm(values, "fro") <= radii[1]]

    return constraints


@pytest.mark.parametrize("loss", LOSSES)
def test_agrees_with_a_conic_solver(loss, rng):
    compared = 0
    for _ in range(N_PROBLEMS + 5):  # the interior-point method gives up on some problems of its own
        design, targets, radii = random_problem(rng, loss)
        trusted = solve_by_cvxpy(design, targets, loss, 5, ball(radii))
        if trusted is None:
            continue
        compared += 1
        reference, slack = trusted
        fit = fit_norm_ball(
            design, targets, group_size=5, group_radius=radii[0], ball_radius=radii[1], loss=loss, tol=8e-7
        )
        norms = np.linalg.norm(fit.values.reshape(len(fit.values), -1), axis=1)
        true_gap = fit.objective - reference
        again = mean_loss(loss, design, targets, fit.values, fit.intercept)
        assert fit.converged
        assert fit.objective == pytest.approx(again, rel=1e-12)
        assert abs(true_gap) <= 1e-6 * reference + slack
        assert norms.sum() <= radii[0] * (1 + 1e-9)
        assert np.linalg.norm(norms) <= radii[1] * (1 + 1e-9)
        assert fit.duality_gap >= true_gap - slack
        assert true_gap >= -slack
        assert np.array_equal(fit.active, norms > 0)
        if compared == N_PROBLEMS:
            break
    assert compared == N_PROBLEMS


@pytest.mark.parametrize("loss", ["huber", "absolute"])
def test_several_outputs_share_their_groups(loss, rng):
    design, _, radii = random_problem(rng, loss, n=40, n_groups=8)
    targets = design[:, :5] @ rng.standard_normal((5, 3)) + rng.standard_normal((40, 3))
    fit = fit_norm_ball(design, targets, group_size=5, group_radius=radii[0], ball_radius=radii[1], loss=loss, tol=1e-6)
    assert fit.values.shape == (8, 5, 3)
    assert fit.intercept.shape == (3,)
    assert fit.dual.shape == (40, 3)
    reference, slack = solve_by_cvxpy(design, targets, loss, 5, ball(radii)) or (fit.objective, 0.0)
    assert -slack <= fit.objective - reference <= 1e-6 * reference + slack


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_are_repetitions_and_intercepts_optional(loss, rng):
    design, targets, radii = random_problem(rng, loss, n=30, n_groups=6)
    counts = rng.integers(0, 4, 30)
    counts[:5] = 1  # so that every class carries weight
    options = {"group_size": 5, "group_radius": radii[0], "ball_radius": radii[1], "loss": loss, "tol": 1e-6}
    for intercept in (True, False):
        weighted = fit_norm_ball(design, targets, sample_weight=counts, fit_intercept=intercept, **options)
        repeated = fit_norm_ball(
            np.repeat(design, counts, axis=0),
            np.repeat(targets, counts, axis=0),
            fit_intercept=intercept,
            **options,
        )
        assert weighted.objective == pytest.approx(repeated.objective, rel=2e-6)
        assert weighted.intercept.any() == intercept


def test_zero_radius_fits_the_intercept_alone(rng):
    design, targets, _ = random_problem(rng, "huber", n=31)
    for loss, best in (("absolute", np.median(targets)), ("squared", targets.mean())):
        for radii in ((0.0, 1.0), (1.0, 0.0)):
            fit = fit_norm_ball(design, targets, group_size=5, group_radius=radii[0], ball_radius=radii[1], loss=loss)
            assert not fit.values.any()
            assert not fit.active.any()
            assert float(fit.intercept) == pytest.approx(best)
            assert fit.converged


@pytest.mark.parametrize("loss", ["absolute", "huber", "squared"])
def test_constant_targets_cost_nothing(loss, rng):
    design = rng.standard_normal((20, 10))
    for level in (0.0, 3.3, -1e6):
        fit = fit_norm_ball(design, np.full(20, level), group_size=5, group_radius=1.0, loss=loss)
        assert fit.converged
        assert float(fit.intercept) == pytest.approx(level, abs=1e-9 * abs(level))
        assert fit.objective <= 1e-9 * (1 + abs(level))


def test_separable_labels_within_the_ball_give_zero_hinge(rng):
    design = rng.standard_normal((20, 100))
    targets = np.where(design[:, 0] > 0, 1.0, -1.0)
    fit = fit_norm_ball(design, targets, group_size=5, group_radius=1e3, ball_radius=1e3, loss="hinge")
    assert fit.converged
    assert fit.objective <= 1e-7


def test_small_group_radius_prunes_and_large_does_not(rng):
    design, targets, _ = random_problem(rng, "huber", n=60, n_groups=30)
    pruned = fit_norm_ball(design, targets, group_size=5, group_radius=0.5)
    spread = fit_norm_ball(design, targets, group_size=5, ball_radius=0.5)
    assert pruned.active.sum() < 15
    assert spread.active.all()
    assert not pruned.values[~pruned.active].any()


def test_every_kind_of_design_gives_the_same_solution(rng):
    design, targets, radii = random_problem(rng, "huber", n=50, n_groups=30)
    calls = []

    def columns(groups):
        calls.append(len(groups))
        return design.reshape(50, 30, 5)[:, groups].reshape(50, -1)

    # room for seven groups in a block, and then for two
    streamed = StreamedDesign(columns, 50, 30, 5, memory_budget=8 * 50 * 5 * 7)
    options = {"group_size": 5, "group_radius": radii[0], "ball_radius": radii[1], "tol": 1e-9}
    expected = fit_norm_ball(design, targets, **options)
    for other in (
        np.asfortranarray(design),
        streamed,
        DenseDesign(design, 5),
        StreamedDesign(columns, 50, 30, 5, memory_budget=8 * 50 * 5 * 2),
    ):
        fit = fit_norm_ball(other, targets, **options)
        assert fit.objective == pytest.approx(expected.objective, rel=1e-8)
        assert np.allclose(fit.values, expected.values, atol=1e-3 * np.abs(expected.values).max())
    assert max(calls) <= 30


def test_products_of_a_streamed_design_are_those_of_its_columns(rng):
    """Also with groups that are zero in part, or altogether; in blocks of one group, of two and of all."""
    array, values = rng.standard_normal((7, 12)).astype(np.float32), rng.standard_normal((12, 2))
    values[3:6], values[6], values[9:11] = 0.0, 0.0, 0.0
    residuals = rng.standard_normal((7, 2))

    def columns(groups):
        return array.reshape(7, 4, 3)[:, groups].reshape(7, -1)

    exact = array.astype(np.float64)
    for groups_per_block in (1, 2, 4):
        streamed = StreamedDesign(columns, 7, 4, 3, memory_budget=8 * 7 * 3 * groups_per_block)
        for outputs in (1, 2):
            product = streamed.matvec(values[:, :outputs])
            np.testing.assert_allclose(product, exact @ values[:, :outputs], rtol=1e-12, atol=1e-14)
            product = streamed.rmatvec(residuals[:, :outputs])
            np.testing.assert_allclose(product, exact.T @ residuals[:, :outputs], rtol=1e-12, atol=1e-14)
    dense = DenseDesign(array, 3, memory_budget=8 * 12 * 2)
    np.testing.assert_allclose(dense.matvec(values), exact @ values, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(dense.rmatvec(residuals), exact.T @ residuals, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(dense.take(np.array([2, 0])), array[:, [6, 7, 8, 0, 1, 2]])


def test_products_of_float32_make_no_float64_copy_of_the_design(rng):
    design = DenseDesign(rng.standard_normal((1000, 300)).astype(np.float32), 3, memory_budget=2**16)
    exact = design.array.astype(np.float64)
    cases = ((design.matvec, np.ones((300, 1)), exact), (design.rmatvec, np.ones((1000, 1)), exact.T))
    for product, operand, matrix in cases:
        tracemalloc.start()
        found = product(operand)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 0.2 * design.array.nbytes
        np.testing.assert_allclose(found, matrix @ operand, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_a_certificate_leaves_room_for_the_rounding_of_what_it_subtracts(rng, fit_intercept):
    """64 units of all that is added: loss, bound, and the products a(Φv + b) and a·y that cancel between them."""
    design, weights = rng.standard_normal((6, 4)), rng.dirichlet(np.ones(6))
    targets = 100.0 + rng.standard_normal((6, 2))
    problem = BallRisk(targets, weights, LOSS["squared"], NormBall(1.0, 0.8), 2, fit_intercept)
    values, dual = 0.1 * rng.standard_normal((4, 2)), rng.standard_normal((6, 2))
    found = certify(problem, DenseDesign(design, 2), values, dual, np.zeros(2))
    b = weights @ (targets - design @ values) if fit_intercept else np.zeros(2)
    z = design @ values + b
    a = problem.feasible(dual)
    weighted = weights[:, None] * a
    objective = 0.5 * weights @ np.square(z - targets).sum(axis=1)
    scores = np.linalg.norm((design.T @ weighted).reshape(2, 4), axis=1)
    bound = -weights @ (a * (targets + 0.5 * a)).sum(axis=1) - problem.ball.support(scores)[0]
    size = abs(objective) + abs(bound) + np.abs(weighted * z).sum() + np.abs(weighted * targets).sum()
    assert found.objective == pytest.approx(objective, rel=1e-14)
    np.testing.assert_allclose(found.scores, scores)
    np.testing.assert_allclose(found.intercept, b)
    room = bound - found.lower_bound
    imbalance = 2 * np.abs(weighted.sum(axis=0) * b).sum()
    assert room == pytest.approx(64 * np.finfo(float).eps * size + imbalance, rel=0.1)
    assert found.gap == found.objective - found.lower_bound


def test_memory_stays_within_its_budget(rng):
    """A budget too small for the working set falls back on the streamed design, block by block."""
    design, targets, _ = random_problem(rng, "huber", n=50, n_groups=40)
    largest = []

    def columns(groups):
        largest.append(len(groups))
        return design.reshape(50, 40, 5)[:, groups].reshape(50, -1)

    budget = 8 * 50 * 5 * 3
    streamed = StreamedDesign(columns, 50, 40, 5, memory_budget=budget)
    fit = fit_norm_ball(streamed, targets, group_size=5, ball_radius=0.5, memory_budget=budget)
    assert fit.converged
    assert max(largest) <= 3


def test_float32_iterations_with_a_float64_certificate(rng):
    design, targets, radii = random_problem(rng, "huber", n=60, n_groups=40)
    options = {"group_size": 5, "group_radius": radii[0], "ball_radius": radii[1]}
    double = fit_norm_ball(design, targets, tol=1e-9, **options)
    single = fit_norm_ball(design, targets, tol=1e-5, dtype=np.float32, **options)
    assert single.converged
    assert double.objective * (1 - 1e-8) <= single.objective <= double.objective * (1 + 1e-5)
    assert single.duality_gap >= single.objective - double.objective
    # a design that is float32 to begin with: its own numbers are the problem, and are certified as such
    rounded = fit_norm_ball(design.astype(np.float32), targets, tol=1e-5, **options)
    exact = fit_norm_ball(design.astype(np.float32).astype(np.float64), targets, tol=1e-9, **options)
    assert rounded.objective == pytest.approx(exact.objective, rel=1e-5)
    assert rounded.duality_gap >= rounded.objective - exact.objective


def test_float32_says_when_it_has_no_more_digits(rng):
    design, targets, radii = random_problem(rng, "huber", n=20, n_groups=6)
    with pytest.warns(SolverWarning, match=r"float32 has no more digits to give: use float64, or raise `tol`"):
        fit_norm_ball(
            design,
            targets,
            group_size=5,
            group_radius=radii[0],
            ball_radius=radii[1],
            tol=1e-15,
            dtype="float32",
        )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("loss", ["huber", "squared", "absolute"])
def test_a_tolerance_below_rounding_ends_at_rounding_and_soon(loss, dtype, rng):
    """It neither gives up while the gap still falls nor goes on for all of its iterations once it does not."""
    design = rng.standard_normal((20, 15))
    targets = design[:, :5] @ rng.standard_normal(5) + rng.standard_normal(20)
    remedy = "the gap no longer falls" if dtype == "float64" else "float32 has no more digits"
    with pytest.warns(SolverWarning, match=remedy):
        fit = fit_norm_ball(design, targets, group_size=5, group_radius=0.5, loss=loss, tol=1e-18, dtype=dtype)
    assert fit.n_iter < 15_000  # of 20,000
    assert fit.duality_gap < (1e-12 if dtype == "float64" else 1e-5) * fit.objective


def test_stopping_early_warns_with_the_number_and_the_remedy(rng):
    design, targets, _ = random_problem(rng, "huber", n=60, n_groups=40)
    words = r"after 3 iterations at a relative duality gap of (\S+),.*raise `max_iter`"
    with pytest.warns(SolverWarning, match=words) as warned:
        fit = fit_norm_ball(design, targets, group_size=5, group_radius=5.0, tol=1e-8, max_iter=3)
    told = float(re.search(words, str(warned[0].message), re.DOTALL)[1])
    assert math.isclose(told, fit.duality_gap / fit.objective, rel_tol=1e-2)
    assert not fit.converged
    assert fit.n_iter == 3
    assert fit.duality_gap > 1e-8 * fit.objective


def test_momentum_is_dropped_where_it_points_uphill(rng):
    """Least squares at a condition of 900: 300 iterations leave 1e-4 without momentum, 1e-7 if it is never dropped."""
    design = np.linalg.qr(rng.standard_normal((40, 20)))[0] * np.geomspace(1, 1 / 30, 20)
    targets = design @ rng.choice([-1.0, 1.0], (20, 1))
    problem = BallRisk(targets, np.full(40, 1 / 40), LOSS["squared"], NormBall(1e3, 1e3), 5, fit_intercept=False)
    descent = AcceleratedDescent(problem, DenseDesign(design, 5), np.zeros((20, 1)), np.zeros(1))
    before = problem.primal(descent.predictions, np.zeros(1))
    for _ in range(300):
        descent.advance()
    assert problem.primal(descent.predictions, np.zeros(1)) < 3e-9 * before


def test_columns_of_very_different_size_are_certified_as_far_as_they_go_and_scaled_ones_all_the_way(rng):
    """Tokens near 100 give one head columns with singular values like 1800, 160 and 0.2."""
    scales = np.array([200.0, 18.0, 0.025])
    design = rng.standard_normal((80, 3)) * scales
    labels = np.where(design[:, 2] / scales[2] + rng.standard_normal(80) > 0, 1.0, -1.0)
    options = {"group_size": 3, "group_radius": 20.0, "loss": "hinge", "tol": 0.02}
    with pytest.warns(SolverWarning, match=r"relative duality gap of .*bring the coordinates of tokens to a similar"):
        rough = fit_norm_ball(design, labels, max_iter=500, **options)
    trusted = solve_by_cvxpy(design, labels, "hinge", 3, ball((20.0, 1e9)))
    if trusted is not None:
        assert rough.objective - rough.duality_gap <= trusted[0] + trusted[1]  # what it says of itself is true
    assert fit_norm_ball(design / scales, labels, **options).converged


def test_path_starts_each_fit_from_the_one_before(rng):
    design, targets, _ = random_problem(rng, "huber", n=60, n_groups=60)
    radii = [(r, 2.0) for r in np.linspace(1.0, 4.0, 10)]
    path: list = []
    for k, r in radii:
        start = path[-1].values if path else None
        path.append(fit_norm_ball(design, targets, group_size=5, group_radius=k, ball_radius=r, tol=1e-7, start=start))
    alone = [fit_norm_ball(design, targets, group_size=5, group_radius=k, ball_radius=r, tol=1e-7) for k, r in radii]
    assert [fit.objective for fit in path] == pytest.approx([fit.objective for fit in alone], rel=2e-7)
    assert sum(fit.n_iter for fit in path) < sum(fit.n_iter for fit in alone)
    again = fit_norm_ball(
        design, targets, group_size=5, group_radius=4.0, ball_radius=2.0, tol=1e-6, start=path[-1].values
    )
    assert again.n_iter <= path[-1].n_iter


def test_the_same_call_gives_the_same_numbers(rng):
    design, targets, radii = random_problem(rng, "absolute")
    fits = [fit_norm_ball(design, targets, group_size=5, group_radius=radii[0], loss="absolute") for _ in range(2)]
    assert np.array_equal(fits[0].values, fits[1].values)
    assert fits[0].duality_gap == fits[1].duality_gap


def test_one_radius_must_bound_the_values():
    with pytest.raises(ValueError, match="must not both be infinite"):
        check_radii(math.inf, math.inf)
    with pytest.raises(ValueError, match="`group_radius` must be at least 0: got -1"):
        check_radii(-1.0, 1.0)
    with pytest.raises(ValueError, match="`ball_radius` must be finite: got nan"):
        check_radii(1.0, math.nan)
