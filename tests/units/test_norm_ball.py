"""The solver over the norm ball: against other solvers, at its edges, and in its words."""

import contextlib
import math
import re
import tracemalloc
import warnings

import cvxpy as cp
import numpy as np
import pytest
from balls import fit_norm_ball, mean_loss, projected_gradient

from keyhole.ball.descent import AcceleratedDescent
from keyhole.ball.design import DenseDesign, StreamedDesign
from keyhole.ball.losses import LOSSES
from keyhole.ball.norm_ball import SolverWarning, check_radii
from keyhole.ball.projection import NormBall
from keyhole.ball.risk import BallRisk, certify

LABELS = ("logistic", "hinge", "multinomial")


def targets_from(signal, loss):
    """The signal itself, or labels cut from it."""
    if loss in ("logistic", "hinge"):
        return np.where(signal > np.median(signal), 1.0, -1.0)
    if loss == "multinomial":
        return np.eye(3)[np.digitize(signal, np.quantile(signal, [0.3, 0.6]))]
    return signal


def random_problem(rng, loss, n=None, n_groups=None, size=5):
    """A design, targets that a few groups explain up to noise, and radii from tight to loose."""
    n = n or int(rng.integers(15, 61))
    n_groups = n_groups or int(rng.integers(2, 41))
    design = rng.standard_normal((n, n_groups * size)) * rng.uniform(0.3, 3.0)
    truth = np.zeros((n_groups, size))
    truth[:3] = rng.standard_normal(truth[:3].shape)
    signal = design @ truth.ravel()
    signal = signal + signal.std() * rng.standard_normal(n) + rng.uniform(-2, 2)
    targets = targets_from(signal, loss)

    norms = np.linalg.norm(truth, axis=1)
    if loss in LABELS:  # labels have no scale: margins of about one
        norms = norms / signal.std()
    group_radius = norms.sum() * rng.uniform(0.1, 0.8)
    ball_radius = np.linalg.norm(norms) * rng.uniform(0.1, 0.8)
    return design, targets, (group_radius, ball_radius)


def cvxpy_loss(loss, y, z):
    """The loss of each sample, in the words of CVXPY."""
    if loss == "absolute":
        return cp.sum(cp.abs(z - y), axis=1)
    if loss == "huber":
        return cp.sum(0.5 * cp.huber(z - y, 1), axis=1)
    if loss == "squared":
        return cp.sum(0.5 * cp.square(z - y), axis=1)
    if loss == "logistic":
        return cp.sum(cp.logistic(-cp.multiply(y, z)), axis=1)
    if loss == "hinge":
        return cp.sum(cp.pos(1 - cp.multiply(y, z)), axis=1)
    return cp.log_sum_exp(z, axis=1) - cp.sum(cp.multiply(y, z), axis=1)


def solve_by_cvxpy(design, targets, loss, size, radii):
    """Minimum of the mean loss, and how far to trust it; None if the solver gives up."""
    y = targets.reshape(len(targets), -1)
    weights = np.full(len(y), 1 / len(y))
    values = cp.Variable((design.shape[1], y.shape[1]))
    bias = cp.Variable((1, y.shape[1]))
    groups = [values[i : i + size] for i in range(0, design.shape[1], size)]
    norms = cp.hstack([cp.norm(group, "fro") for group in groups])
    constraints = [cp.sum(norms) <= radii[0], cp.norm(values, "fro") <= radii[1]]
    objective = weights @ cvxpy_loss(loss, y, design @ values + np.ones((len(y), 1)) @ bias)
    problem = cp.Problem(cp.Minimize(objective), constraints)
    for accuracy in (1e-10, 1e-9, 1e-8):  # as tight as it will go
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Solution may be inaccurate")
            with contextlib.suppress(cp.SolverError):
                problem.solve(
                    solver=cp.CLARABEL,
                    tol_gap_abs=accuracy,
                    tol_gap_rel=accuracy,
                    tol_feas=accuracy,
                )
        if problem.status == cp.OPTIMAL:
            minimum = float(problem.value)
            return minimum, 10 * accuracy * max(1.0, minimum)
    return None


def fit_in_ball(design, targets, loss, size, radii, tol):
    """The solver under test, given the radii as the solvers that it is compared with are."""
    group_radius, ball_radius = radii
    return fit_norm_ball(
        design,
        targets,
        group_size=size,
        group_radius=group_radius,
        ball_radius=ball_radius,
        loss=loss,
        tol=tol,
    )


@pytest.mark.parametrize("radii", [(1.0, 0.6), (1.0, math.inf), (math.inf, 0.6)])
@pytest.mark.parametrize("loss", ["huber", "squared", "logistic", "multinomial"])
def test_agrees_with_plain_projected_gradient(loss, radii, rng):
    design = rng.standard_normal((60, 12))  # four groups of three
    signal = design[:, :3] @ rng.standard_normal(3) + rng.standard_normal(60)
    targets = targets_from(signal, loss)
    values, intercept = projected_gradient(design, targets, loss, 3, radii, n_steps=400)
    expected = mean_loss(loss, design, targets, values, intercept)

    fit = fit_in_ball(design, targets, loss, size=3, radii=radii, tol=1e-9)
    assert fit.objective == pytest.approx(expected, rel=2e-9)
    np.testing.assert_allclose(fit.values.reshape(values.shape), values, atol=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("n_problems", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_agrees_with_a_conic_solver(n_problems, loss, rng):
    n_compared = 0
    for _ in range(n_problems + 5):  # the interior-point method gives up on some problems
        design, targets, radii = random_problem(rng, loss)
        trusted = solve_by_cvxpy(design, targets, loss, 5, radii)
        if trusted is None:
            continue
        n_compared += 1
        reference, slack = trusted
        fit = fit_in_ball(design, targets, loss, size=5, radii=radii, tol=8e-7)
        norms = np.linalg.norm(fit.values.reshape(len(fit.values), -1), axis=1)
        true_gap = fit.objective - reference
        by_definition = mean_loss(loss, design, targets, fit.values, fit.intercept)
        assert fit.converged
        assert fit.objective == pytest.approx(by_definition, rel=1e-12)
        assert abs(true_gap) <= 1e-6 * reference + slack
        assert norms.sum() <= radii[0] * (1 + 1e-9)
        assert np.linalg.norm(norms) <= radii[1] * (1 + 1e-9)
        assert fit.duality_gap >= true_gap - slack
        assert true_gap >= -slack
        assert np.array_equal(fit.active, norms > 0)
        if n_compared == n_problems:
            break
    assert n_compared == n_problems


@pytest.mark.parametrize("loss", ["huber", "absolute"])
def test_several_outputs_share_their_groups(loss, rng):
    design, _, radii = random_problem(rng, loss, n=40, n_groups=8)
    targets = design[:, :5] @ rng.standard_normal((5, 3)) + rng.standard_normal((40, 3))
    fit = fit_in_ball(design, targets, loss, size=5, radii=radii, tol=1e-6)
    assert fit.values.shape == (8, 5, 3)
    assert fit.intercept.shape == (3,)
    assert fit.dual.shape == (40, 3)
    trusted = solve_by_cvxpy(design, targets, loss, 5, radii)
    if trusted is not None:
        reference, slack = trusted
        assert -slack <= fit.objective - reference <= 1e-6 * reference + slack


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_are_repetitions_and_intercepts_optional(loss, fit_intercept, rng):
    design, targets, radii = random_problem(rng, loss, n=30, n_groups=6)
    counts = rng.integers(0, 4, 30)
    counts[:5] = 1  # so that every class carries weight
    options = {
        "group_size": 5,
        "group_radius": radii[0],
        "ball_radius": radii[1],
        "loss": loss,
        "fit_intercept": fit_intercept,
        "tol": 1e-6,
    }
    weighted = fit_norm_ball(design, targets, sample_weight=counts, **options)
    repeated_design = np.repeat(design, counts, axis=0)
    repeated_targets = np.repeat(targets, counts, axis=0)
    repeated = fit_norm_ball(repeated_design, repeated_targets, **options)
    assert weighted.objective == pytest.approx(repeated.objective, rel=2e-6)
    assert weighted.intercept.any() == fit_intercept


@pytest.mark.parametrize("radii", [(0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize(("loss", "best_constant"), [("absolute", np.median), ("squared", np.mean)])
def test_zero_radius_fits_the_intercept_alone(loss, best_constant, radii, rng):
    design, targets, _ = random_problem(rng, "huber", n=31)
    fit = fit_norm_ball(
        design,
        targets,
        group_size=5,
        group_radius=radii[0],
        ball_radius=radii[1],
        loss=loss,
    )
    assert not fit.values.any()
    assert not fit.active.any()
    assert float(fit.intercept) == pytest.approx(best_constant(targets))
    assert fit.converged


@pytest.mark.parametrize("level", [0.0, 3.3, -1e6])
@pytest.mark.parametrize("loss", ["absolute", "huber", "squared"])
def test_constant_targets_cost_nothing(loss, level, rng):
    design = rng.standard_normal((20, 10))
    fit = fit_norm_ball(design, np.full(20, level), group_size=5, group_radius=1.0, loss=loss)
    assert fit.converged
    assert float(fit.intercept) == pytest.approx(level, abs=1e-9 * abs(level))
    assert fit.objective <= 1e-9 * (1 + abs(level))


def test_separable_labels_within_the_ball_give_zero_hinge(rng):
    design = rng.standard_normal((20, 100))
    targets = np.where(design[:, 0] > 0, 1.0, -1.0)
    fit = fit_norm_ball(
        design,
        targets,
        group_size=5,
        group_radius=1e3,
        ball_radius=1e3,
        loss="hinge",
    )
    assert fit.converged
    assert fit.objective <= 1e-7


def test_small_group_radius_prunes_and_large_does_not(rng):
    design, targets, _ = random_problem(rng, "huber", n=60, n_groups=30)
    pruned = fit_norm_ball(design, targets, group_size=5, group_radius=0.5)
    spread = fit_norm_ball(design, targets, group_size=5, ball_radius=0.5)
    assert pruned.active.sum() < 15
    assert spread.active.all()
    assert not pruned.values[~pruned.active].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_a_working_set_ends_where_all_groups_do(loss, rng):
    """Without memory for a copy there is no working set, and iterations are on all groups."""
    design, targets, radii = random_problem(rng, loss, n=60, n_groups=40)
    options = {"group_size": 5, "group_radius": radii[0], "loss": loss, "tol": 1e-5}
    on_some_groups = fit_norm_ball(design, targets, **options)
    on_all_groups = fit_norm_ball(DenseDesign(design, 5), targets, memory_budget=0, **options)
    assert on_some_groups.converged
    assert on_all_groups.converged
    assert on_some_groups.active.sum() < 30
    lower_bound = on_some_groups.objective - on_some_groups.duality_gap
    assert on_all_groups.objective >= lower_bound
    lower_bound = on_all_groups.objective - on_all_groups.duality_gap
    assert on_some_groups.objective >= lower_bound


def test_every_kind_of_design_gives_the_same_solution(rng):
    design, targets, radii = random_problem(rng, "huber", n=50, n_groups=30)
    block_lengths = []

    def columns(groups):
        block_lengths.append(len(groups))
        return design.reshape(50, 30, 5)[:, groups].reshape(50, -1)

    group_bytes = 8 * 50 * 5
    options = {"group_size": 5, "group_radius": radii[0], "ball_radius": radii[1], "tol": 1e-9}
    expected = fit_norm_ball(design, targets, **options)
    for other in (
        np.asfortranarray(design),
        DenseDesign(design, 5),
        StreamedDesign(columns, 50, 30, 5, memory_budget=7 * group_bytes),
        StreamedDesign(columns, 50, 30, 5, memory_budget=2 * group_bytes),
    ):
        fit = fit_norm_ball(other, targets, **options)
        assert fit.objective == pytest.approx(expected.objective, rel=1e-8)
        largest = np.abs(expected.values).max()
        assert np.allclose(fit.values, expected.values, atol=1e-3 * largest)
    assert max(block_lengths) <= 30


@pytest.mark.parametrize("n_outputs", [1, 2])
@pytest.mark.parametrize("groups_per_block", [1, 2, 4])
def test_products_of_a_streamed_design_are_those_of_its_columns(groups_per_block, n_outputs, rng):
    """Also with groups that are zero in part, or altogether."""
    array = rng.standard_normal((7, 12)).astype(np.float32)
    residuals = rng.standard_normal((7, n_outputs))
    values = rng.standard_normal((12, n_outputs))
    values[3:6] = 0.0  # a whole group
    values[6] = 0.0
    values[9:11] = 0.0

    def columns(groups):
        return array.reshape(7, 4, 3)[:, groups].reshape(7, -1)

    exact = array.astype(np.float64)
    group_bytes = 8 * 7 * 3
    streamed = StreamedDesign(columns, 7, 4, 3, memory_budget=groups_per_block * group_bytes)
    dense = DenseDesign(array, 3, memory_budget=8 * 12 * 2)
    for design in (streamed, dense):
        np.testing.assert_allclose(design.matvec(values), exact @ values, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(
            design.rmatvec(residuals), exact.T @ residuals, rtol=1e-12, atol=1e-14
        )
    np.testing.assert_array_equal(dense.take(np.array([2, 0])), array[:, [6, 7, 8, 0, 1, 2]])


@pytest.mark.parametrize("name", ["matvec", "rmatvec"])
def test_products_of_float32_make_no_float64_copy_of_the_design(name, rng):
    array = rng.standard_normal((1000, 300)).astype(np.float32)
    design = DenseDesign(array, 3, memory_budget=2**16)
    matrix = array.astype(np.float64)
    if name == "rmatvec":
        matrix = matrix.T
    operand = np.ones((matrix.shape[1], 1))

    tracemalloc.start()
    product = getattr(design, name)(operand)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.2 * array.nbytes
    np.testing.assert_allclose(product, matrix @ operand, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_a_certificate_leaves_room_for_the_rounding_of_what_it_subtracts(rng, fit_intercept):
    """64 units of all terms: loss, bound, and the products a(Φv + b) and a·y that cancel."""
    design = rng.standard_normal((6, 4))
    weights = rng.dirichlet(np.ones(6))
    targets = 100.0 + rng.standard_normal((6, 2))
    values = 0.1 * rng.standard_normal((4, 2))
    dual = rng.standard_normal((6, 2))
    problem = BallRisk(
        targets=targets,
        weights=weights,
        loss=LOSSES["squared"],
        ball=NormBall(1.0, 0.8),
        group_size=2,
        fit_intercept=fit_intercept,
    )
    certificate = certify(problem, DenseDesign(design, 2), values, dual, np.zeros(2))

    # the primal point, written out
    b = np.zeros(2)
    if fit_intercept:
        b = weights @ (targets - design @ values)
    z = design @ values + b
    objective = 0.5 * weights @ np.square(z - targets).sum(axis=1)
    assert certificate.objective == pytest.approx(objective, rel=1e-14)
    np.testing.assert_allclose(certificate.intercept, b)

    # the dual point
    a = problem.feasible(dual)
    weighted = weights[:, None] * a
    scores = np.linalg.norm((design.T @ weighted).reshape(2, 4), axis=1)
    bound = -weights @ (a * (targets + 0.5 * a)).sum(axis=1) - problem.ball.support(scores)[0]
    np.testing.assert_allclose(certificate.scores, scores)

    # the room
    size = abs(objective) + abs(bound)
    size += np.abs(weighted * z).sum() + np.abs(weighted * targets).sum()
    imbalance = 2 * np.abs(weighted.sum(axis=0) * b).sum()
    room = bound - certificate.lower_bound
    assert room == pytest.approx(64 * np.finfo(float).eps * size + imbalance, rel=0.1)
    assert certificate.gap == certificate.objective - certificate.lower_bound


def test_memory_stays_within_its_budget(rng):
    """A budget too small for the working set falls back on the streamed design, block by block."""
    design, targets, _ = random_problem(rng, "huber", n=50, n_groups=40)
    block_lengths = []

    def columns(groups):
        block_lengths.append(len(groups))
        return design.reshape(50, 40, 5)[:, groups].reshape(50, -1)

    budget = 3 * 8 * 50 * 5  # three groups
    streamed = StreamedDesign(columns, 50, 40, 5, memory_budget=budget)
    fit = fit_norm_ball(streamed, targets, group_size=5, ball_radius=0.5, memory_budget=budget)
    assert fit.converged
    assert max(block_lengths) <= 3


def test_float32_iterations_with_a_float64_certificate(rng):
    design, targets, radii = random_problem(rng, "huber", n=60, n_groups=40)
    options = {"group_size": 5, "group_radius": radii[0], "ball_radius": radii[1]}
    double = fit_norm_ball(design, targets, tol=1e-9, **options)
    single = fit_norm_ball(design, targets, tol=1e-5, dtype=np.float32, **options)
    assert single.converged
    assert double.objective * (1 - 1e-8) <= single.objective <= double.objective * (1 + 1e-5)
    assert single.duality_gap >= single.objective - double.objective
    # a design that is float32 to begin with: its numbers are the problem, and are certified as such
    design = design.astype(np.float32)
    rounded = fit_norm_ball(design, targets, tol=1e-5, **options)
    exact = fit_norm_ball(design.astype(np.float64), targets, tol=1e-9, **options)
    assert rounded.objective == pytest.approx(exact.objective, rel=1e-5)
    assert rounded.duality_gap >= rounded.objective - exact.objective


def test_float32_says_when_it_has_no_more_digits(rng):
    design, targets, radii = random_problem(rng, "huber", n=20, n_groups=6)
    words = "float32 has no more digits to give: use float64, or raise `tol`"
    with pytest.warns(SolverWarning, match=words):
        fit_norm_ball(
            design,
            targets,
            group_size=5,
            group_radius=radii[0],
            ball_radius=radii[1],
            tol=1e-15,
            dtype="float32",
        )


@pytest.mark.parametrize(
    ("dtype", "remedy", "rounding"),
    [
        ("float64", "the gap no longer falls", 1e-12),
        ("float32", "float32 has no more digits", 1e-5),
    ],
)
@pytest.mark.parametrize("loss", ["huber", "squared", "absolute"])
def test_a_tolerance_below_rounding_ends_at_rounding_and_soon(loss, dtype, remedy, rounding, rng):
    """It goes on while the gap falls, and not for all of its iterations once it does not."""
    design = rng.standard_normal((20, 15))
    targets = design[:, :5] @ rng.standard_normal(5) + rng.standard_normal(20)
    with pytest.warns(SolverWarning, match=remedy):
        fit = fit_norm_ball(
            design,
            targets,
            group_size=5,
            group_radius=0.5,
            loss=loss,
            tol=1e-18,
            dtype=dtype,
        )
    assert fit.n_iter < 15_000  # of 20,000
    assert fit.duality_gap < rounding * fit.objective


def test_stopping_early_warns_with_the_number_and_the_remedy(rng):
    design, targets, _ = random_problem(rng, "huber", n=60, n_groups=40)
    words = r"after 3 iterations at a relative duality gap of (\S+),.*raise `max_iter`"
    with pytest.warns(SolverWarning, match=words) as warned:
        fit = fit_norm_ball(
            design,
            targets,
            group_size=5,
            group_radius=5.0,
            tol=1e-8,
            max_iter=3,
        )
    stated_gap = float(re.search(words, str(warned[0].message), re.DOTALL)[1])
    assert math.isclose(stated_gap, fit.duality_gap / fit.objective, rel_tol=1e-2)
    assert not fit.converged
    assert fit.n_iter == 3
    assert fit.duality_gap > 1e-8 * fit.objective


def test_momentum_is_dropped_where_it_points_uphill(rng):
    """Least squares at a condition of 900, 300 iterations: 1e-9 of the loss is left at most.

    Without momentum 1e-4 would be left, and 1e-7 if momentum were never dropped.
    """
    orthogonal = np.linalg.qr(rng.standard_normal((40, 20)))[0]
    design = orthogonal * np.geomspace(1, 1 / 30, 20)
    problem = BallRisk(
        targets=design @ rng.choice([-1.0, 1.0], (20, 1)),
        weights=np.full(40, 1 / 40),
        loss=LOSSES["squared"],
        ball=NormBall(1e3, 1e3),
        group_size=5,
        fit_intercept=False,
    )
    descent = AcceleratedDescent(problem, DenseDesign(design, 5), np.zeros((20, 1)), np.zeros(1))
    before = problem.primal(descent.predictions, np.zeros(1))
    for _ in range(300):
        descent.advance()
    assert problem.primal(descent.predictions, np.zeros(1)) < 3e-9 * before


def test_columns_of_very_different_size_warn_truthfully_and_scaled_ones_converge(rng):
    """Tokens near 100 give one head columns with singular values like 1800, 160 and 0.2."""
    scales = np.array([200.0, 18.0, 0.025])
    design = rng.standard_normal((80, 3)) * scales
    labels = np.where(design[:, 2] / scales[2] + rng.standard_normal(80) > 0, 1.0, -1.0)
    options = {"group_size": 3, "group_radius": 20.0, "loss": "hinge", "tol": 0.02}
    words = r"relative duality gap of .*similar scale, for example with scaling='standard'"
    with pytest.warns(SolverWarning, match=words):
        rough = fit_norm_ball(design, labels, max_iter=500, **options)
    trusted = solve_by_cvxpy(design, labels, "hinge", 3, (20.0, 1e9))
    if trusted is not None:  # the gap it reports is an upper bound of the true one
        reference, slack = trusted
        assert rough.objective - rough.duality_gap <= reference + slack
    assert fit_norm_ball(design / scales, labels, **options).converged


def test_path_starts_each_fit_from_the_one_before(rng):
    design, targets, _ = random_problem(rng, "huber", n=60, n_groups=60)
    options = {"group_size": 5, "ball_radius": 2.0, "tol": 1e-7}
    path = []
    cold_starts = []
    start = None
    for group_radius in np.linspace(1.0, 4.0, 10):
        fit = fit_norm_ball(design, targets, group_radius=group_radius, start=start, **options)
        path.append(fit)
        start = fit.values
        cold_starts.append(fit_norm_ball(design, targets, group_radius=group_radius, **options))
    objectives = [fit.objective for fit in cold_starts]
    assert [fit.objective for fit in path] == pytest.approx(objectives, rel=2e-7)
    assert sum(fit.n_iter for fit in path) < sum(fit.n_iter for fit in cold_starts)
    options["tol"] = 1e-6
    again = fit_norm_ball(design, targets, group_radius=4.0, start=start, **options)
    assert again.n_iter <= path[-1].n_iter


def test_the_same_call_gives_the_same_numbers(rng):
    design, targets, radii = random_problem(rng, "absolute")
    options = {"group_size": 5, "group_radius": radii[0], "loss": "absolute"}
    first = fit_norm_ball(design, targets, **options)
    second = fit_norm_ball(design, targets, **options)
    assert np.array_equal(first.values, second.values)
    assert first.duality_gap == second.duality_gap


def test_one_radius_must_bound_the_values():
    with pytest.raises(ValueError, match="must not both be infinite"):
        check_radii(math.inf, math.inf)
    with pytest.raises(ValueError, match="`group_radius` must be at least 0: got -1"):
        check_radii(-1.0, 1.0)
    with pytest.raises(ValueError, match="`ball_radius` must be finite: got nan"):
        check_radii(1.0, math.nan)
