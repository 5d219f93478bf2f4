"""Ridge and Newton on features or Gram matrices, beside scikit-learn and plain refits."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression, Ridge

from keyhole import textbook
from keyhole._checks import NoPenaltyError
from keyhole.solve.cholesky import fit_features, fit_gram
from keyhole.solve.newton import fit_newton, working_problem
from keyhole.solve.problem import RidgeProblem, SmallPenaltyWarning, choose_penalty, default_alphas
from keyhole.solve.spectral import Spectrum, group_stacks
from keyhole.solve.sums import Sums

ALPHAS = [20.0, 1.0, 0.03]
SHAPES = [(24, 6), (16, 30), (7, 1)]


def in_blocks(features):
    """Features in two blocks of rows, as the solvers read them."""
    half = len(features) // 2
    return lambda: [features[:half], features[half:]]


def make_problem(rng, n, p, *, weighted=False, n_groups=None):
    """Features far from zero of different scales, two outputs, weights and groups."""
    scales = np.geomspace(1, 0.05, p)
    features = rng.standard_normal((n, p)) * scales + rng.standard_normal(p)
    y = rng.standard_normal((n, 2)) * [1.0, 30.0] + [5.0, -100.0]
    weights = rng.uniform(0.05, 5.0, n) if weighted else None
    groups = rng.integers(0, n_groups, n) if n_groups else None
    return features, y, weights, groups


def refits(features, y, alpha, fit_intercept, weights, groups):
    """y_i less the prediction of scikit-learn's Ridge fitted without the group of sample i."""
    left_out = np.empty_like(y)
    for group in np.unique(groups):
        rest = groups != group
        model = Ridge(alpha=alpha, fit_intercept=fit_intercept, solver="svd")
        model.fit(features[rest], y[rest], None if weights is None else weights[rest])
        left_out[~rest] = y[~rest] - model.predict(features[~rest])
    return left_out


def fits_of_every_route(features, problem_of):
    """(route, fit, what it compares) at every penalty: from features and from a Gram matrix, by an
    eigendecomposition and by Cholesky.
    """
    gram = features @ features.T
    for i, alpha in enumerate(ALPHAS):
        alone = problem_of([alpha])
        yield i, "features, Cholesky", fit_features(in_blocks(features), alone), features
        yield i, "gram, Cholesky", fit_gram(gram.copy(), alone), gram
        yield i, "features, axes", Spectrum.of_features(in_blocks(features), alone).fit(), features
        yield i, "gram, axes", Spectrum.of_gram(gram.copy(), alone).fit(), gram


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n_groups", [None, 5])
@pytest.mark.parametrize(("n", "p"), SHAPES)
def test_every_route_is_ridge_and_leaves_out_as_refits_do(
    rng, n, p, n_groups, weighted, fit_intercept
):
    features, y, weights, groups = make_problem(rng, n, p, weighted=weighted, n_groups=n_groups)
    one_each = np.arange(n) if groups is None else groups

    def problem_of(alphas):
        return RidgeProblem.of(
            y, alphas, fit_intercept=fit_intercept, weights=weights, groups=groups
        )

    for i, route, fit, compared in fits_of_every_route(features, problem_of):
        model = Ridge(alpha=ALPHAS[i], fit_intercept=fit_intercept, solver="svd")
        wanted = model.fit(features, y, weights).predict(features)
        predicted = compared @ fit.coef + fit.intercept
        assert np.abs(predicted - wanted).max() < 1e-8 * np.abs(wanted).max(), route
        left_out = refits(features, y, ALPHAS[i], fit_intercept, weights, one_each)
        assert np.abs(fit.left_out - left_out).max() < 1e-8 * np.abs(left_out).max(), route
        mean_square = np.average(np.square(left_out).mean(axis=1), weights=weights)
        assert fit.error == pytest.approx(mean_square, rel=1e-8), route
        assert np.allclose(fit.factor.hat(compared) @ y, wanted, rtol=1e-8), route


def test_leaving_out_without_the_leverage_of_the_intercept_is_caught(rng, monkeypatch):
    features, y, _, _ = make_problem(rng, 24, 6)
    wanted = refits(features, y, 1.0, True, None, np.arange(24))
    problem = RidgeProblem.of(y, [1.0])
    right = fit_gram(features @ features.T, problem).left_out
    assert np.abs(right - wanted).max() < 1e-8 * np.abs(wanted).max()
    # the broken variant: what is centred by hand is fitted without an intercept
    centred = features - features.mean(axis=0)
    blind = RidgeProblem.of(y - y.mean(axis=0), [1.0], fit_intercept=False)
    wrong = fit_gram(centred @ centred.T, blind).left_out
    assert np.abs(wrong - wanted).max() > 1e-3 * np.abs(wanted).max()


def test_groups_of_more_samples_than_features_are_left_out_in_the_dimension_of_the_features(rng):
    features, y, weights, _ = make_problem(rng, 60, 3, weighted=True)
    groups = np.arange(60) // 20
    wanted = refits(features, y, 1.0, True, weights, groups)
    fit = fit_features(
        in_blocks(features), RidgeProblem.of(y, [1.0], weights=weights, groups=groups)
    )
    path = Spectrum.of_features(
        in_blocks(features), RidgeProblem.of(y, ALPHAS, weights=weights, groups=groups)
    )
    assert np.allclose(fit.left_out, wanted)
    assert np.allclose(path.leave_groups_out(np.array([1.0]))[0], wanted)


def test_groups_that_are_fitted_exactly_disqualify_the_penalty(rng):
    features = rng.normal(size=(12, 40))
    problem = RidgeProblem.of(rng.normal(size=(12, 1)), [0.0, 1.0], groups=np.arange(12) // 2)
    for path in (
        Spectrum.of_features(in_blocks(features), problem),
        Spectrum.of_gram(features @ features.T, problem),
    ):
        assert np.isinf(path.leave_groups_out(np.array([0.0]))).all()
        assert path.fit().alpha == 1.0


@pytest.mark.parametrize("value", [0.1, 1000.0 / 7])
def test_features_that_are_constant_but_for_rounding_have_no_axes(rng, value):
    weights = rng.uniform(0.5, 2.0, 90)
    problem = RidgeProblem.of(rng.normal(size=(90, 1)), [1e-20], weights=weights)
    path = Spectrum.of_features(in_blocks(np.full((90, 7), value)), problem)
    assert len(path.values) == 0


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize(("n", "p"), SHAPES)
def test_posterior_variance_is_that_of_the_bordered_matrix(rng, n, p, fit_intercept):
    features, y, weights, _ = make_problem(rng, n, p, weighted=True)
    new = rng.standard_normal((5, p))
    squares = np.square(new).sum(axis=1)

    # least of |φ − Σ h_j φ_j|² + α Σ h_j²/w_j over h, which add up to 1 if there is an intercept
    def variance_by_hand(alpha):
        matrix = features @ features.T + np.diag(alpha / weights)
        right = features @ new.T
        if fit_intercept:
            matrix = np.block([[matrix, np.ones((n, 1))], [np.ones((1, n)), np.zeros((1, 1))]])
            right = np.concatenate([right, np.ones((1, 5))])
        solved = np.linalg.solve(matrix, right)
        return squares - (right * solved).sum(axis=0)

    def problem_of(alphas):
        return RidgeProblem.of(y, alphas, fit_intercept=fit_intercept, weights=weights)

    for i, route, fit, compared in fits_of_every_route(features, problem_of):
        rows = new if compared is features else new @ features.T
        variance = fit.factor.variance(rows, squares)
        assert np.allclose(variance, variance_by_hand(ALPHAS[i]), rtol=1e-6), route
        hat = fit.factor.hat(compared)
        assert np.allclose(fit.factor.complements(), 1 - hat.diagonal(), atol=1e-9), route
        rows = np.array([0, 3, 5])
        roots = np.sqrt(weights[rows])
        symmetric = np.eye(3) - roots[:, None] * hat[np.ix_(rows, rows)] / roots
        assert np.allclose(fit.factor.complement(rows), symmetric, atol=1e-9), route


def test_a_path_chooses_the_penalty_of_least_leave_one_out_error(rng):
    features, y, weights, _ = make_problem(rng, 40, 5, weighted=True)
    grid = [1e-3, 0.1, 10.0, 1000.0]
    fit = fit_gram(features @ features.T, RidgeProblem.of(y[:, :1], grid, weights=weights))
    errors = []
    for alpha in grid:
        left_out = refits(features, y[:, :1], alpha, True, weights, np.arange(40))
        errors.append(np.average(np.square(left_out[:, 0]), weights=weights))
    assert np.allclose(fit.errors, errors)
    assert fit.alpha == grid[int(np.argmin(errors))]


def test_several_outputs_count_in_units_of_their_variance(rng):
    features, y, _, _ = make_problem(rng, 40, 5)
    fit = fit_gram(features @ features.T, RidgeProblem.of(y * [1.0, 1e6], ALPHAS))
    in_units = fit_gram(features @ features.T, RidgeProblem.of(y, ALPHAS))
    assert np.allclose(fit.scores, in_units.scores)
    assert fit.best == in_units.best


def test_penalties_of_an_automatic_grid_are_above_rounding():
    grid = default_alphas(largest=3.0, order=50)
    assert grid[0] == pytest.approx(100 * 2.0**-52 * 50 * 3.0)
    assert grid[-1] == pytest.approx(30.0)
    assert default_alphas(largest=0.0, order=50).tolist() == [1.0]


def test_among_equal_penalties_the_largest_is_chosen():
    assert choose_penalty(np.array([0.1, 1.0, 10.0]), np.array([0.4, 0.4, 0.5])) == 1
    assert choose_penalty(np.array([0.1]), np.array([np.inf])) == 0
    with pytest.raises(NoPenaltyError, match="cannot choose among the 2 penalties"):
        choose_penalty(np.array([0.1, 1.0]), np.array([np.inf, np.inf]))


@pytest.mark.parametrize("n", [12, 30])
def test_no_penalty_is_the_minimum_norm_fit(rng, n):
    features, y, _, _ = make_problem(rng, n, 20)
    centred = features - features.mean(axis=0)
    wanted = np.linalg.pinv(centred) @ (y - y.mean(axis=0))
    gram = fit_gram(features @ features.T, RidgeProblem.of(y, [0.0]))
    assert np.allclose(features.T @ gram.coef, wanted, atol=1e-6 * np.abs(wanted).max())
    from_features = fit_features(in_blocks(features), RidgeProblem.of(y, [0.0]))
    assert np.allclose(from_features.coef, wanted, atol=1e-6 * np.abs(wanted).max())


def test_a_sample_that_is_fitted_exactly_disqualifies_the_penalty(rng):
    # one sample alone has the second feature: without a penalty it is fitted whatever it is
    features = np.stack([rng.standard_normal(10), np.eye(10)[3]], axis=1)
    y = rng.standard_normal((10, 1))
    fit = fit_gram(features @ features.T, RidgeProblem.of(y, [0.0, 1.0]))
    assert np.isinf(fit.errors[0])
    assert fit.alpha == 1.0


def test_a_penalty_within_rounding_is_used_with_a_warning(rng):
    features, y, _, _ = make_problem(rng, 16, 30)
    with pytest.warns(SmallPenaltyWarning, match=r"alpha = 1e-14 is below .* times the largest"):
        fit = fit_gram(features @ features.T, RidgeProblem.of(y, [1e-14]))
    assert fit.alpha == 1e-14


def test_members_of_groups_come_in_stacks_of_one_size():
    groups = np.array([2, 0, 1, 1, 0, 2, 2])
    stacks = [stack.tolist() for stack in group_stacks(groups, most=100)]
    assert stacks == [[[1, 4], [2, 3]], [[0, 5, 6]]]


def test_log_losses_choose_the_penalty_of_a_classifier(rng):
    features = rng.standard_normal((60, 3))
    y = np.where(features[:, :1] + rng.standard_normal((60, 1)) > 0, 1.0, -1.0)
    fit = fit_gram(features @ features.T, RidgeProblem.of(y, ALPHAS, criterion="log_loss"))
    assert fit.is_log_loss
    losses = []
    for alpha in ALPHAS:
        scores = y - refits(features, y, alpha, True, None, np.arange(60))
        temperatures = np.geomspace(0.01, 100, 4001)
        doubts = 1 / (np.where(y > 0, np.sum(y > 0), np.sum(y < 0))[:, 0] + 2)
        margins = 2 * temperatures[:, None] * (y * scores)[:, 0]
        trusted = np.logaddexp(0, -margins) * (1 - doubts) + np.logaddexp(0, margins) * doubts
        best = trusted.sum(axis=1).argmin()
        losses.append(np.logaddexp(0, -margins[best]).mean())
    assert np.allclose(fit.scores, losses, rtol=1e-3)


# ---- sums


def sums_of(features, y, weights, rows, fit_intercept=True):
    sums = Sums.empty(features.shape[1], y.shape[1], fit_intercept=fit_intercept)
    sums.add(features[rows], y[rows], weights[rows])
    return sums


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_sums_merge_in_any_order_and_keep_their_digits_far_from_zero(rng, fit_intercept, offset):
    features, y, weights, _ = make_problem(rng, 90, 5, weighted=True)
    parts = np.array_split(rng.permutation(90), 3)
    a, b, c = (sums_of(features + offset, y, weights, rows, fit_intercept) for rows in parts)
    one = a.merged(b).merged(c)
    other = c.merged(a.merged(b))
    whole = sums_of(features + offset, y, weights, np.arange(90), fit_intercept)
    for total in (one, other):
        assert np.allclose(np.tril(total.gram), np.tril(whole.gram), rtol=1e-8)
        assert np.allclose(total.cross, whole.cross, rtol=1e-7)
        assert np.allclose(total.squares, whole.squares)
        assert total.count == 90
    assert a.count == len(parts[0])


def test_a_merge_that_forgets_the_scatter_between_the_means_is_caught(rng):
    features, y, weights, _ = make_problem(rng, 90, 5, weighted=True)
    whole = sums_of(features, y, weights, np.arange(90))
    a = sums_of(features, y, weights, np.arange(30))
    b = sums_of(features, y, weights, np.arange(30, 90))
    assert np.allclose(np.tril(a.merged(b).gram), np.tril(whole.gram))
    assert not np.allclose(np.tril(a.gram + b.gram), np.tril(whole.gram))


def test_only_sums_of_one_kind_merge():
    with pytest.raises(ValueError, match=r"same features and outputs.*got \(p, t\) = \(3, 1\)"):
        Sums.empty(3, 1).merged(Sums.empty(4, 1))


def test_fits_of_sums_are_those_of_the_features(rng):
    features, y, weights, _ = make_problem(rng, 40, 5, weighted=True)
    axes = sums_of(features, y, weights, np.arange(40)).axes()
    problem = RidgeProblem.of(y, ALPHAS, weights=weights)
    wanted = fit_features(in_blocks(features), problem)
    left_out = axes.left_out(features, y, weights, np.array(ALPHAS))
    squares = np.einsum("n,ant->at", weights, np.square(left_out)) / weights.sum()
    fit = axes.fit(np.array(ALPHAS), squares)
    assert np.allclose(fit.errors, wanted.errors)
    assert fit.best == wanted.best
    assert np.allclose(fit.coef, wanted.coef)
    assert np.allclose(fit.intercept, wanted.intercept)


def test_generalised_errors_are_their_definition(rng):
    features, y, _, _ = make_problem(rng, 30, 4)
    axes = sums_of(features, y, np.ones(30), np.arange(30)).axes()
    fit = axes.fit(np.array([2.0]))
    assert fit.selection == "gcv"
    model = Ridge(alpha=2.0, solver="svd").fit(features, y)
    centred = features - features.mean(axis=0)
    hat = centred @ np.linalg.solve(centred.T @ centred + 2.0 * np.eye(4), centred.T) + 1 / 30
    residuals = y - model.predict(features)
    wanted = np.square(residuals).mean() / (1 - np.trace(hat) / 30) ** 2
    assert fit.error == pytest.approx(wanted)


# ---- Newton steps


def make_classes(rng, n=120):
    features = rng.standard_normal((n, 4)) * [0.3, 1.0, 2.0, 1.0] + 1.0
    signal = features[:, :1] + features[:, 1:2] - 1.3
    y = np.where(signal + rng.logistic(size=(n, 1)) > 0, 1.0, -1.0)
    return features, y, rng.uniform(0.2, 3.0, n)


def newton_fits(features, problem):
    """The fit from features, and its values; and that from the Gram matrix."""
    from_features = fit_newton(Spectrum.of_features(in_blocks(features), problem))
    yield from_features, from_features.coef
    from_gram = fit_newton(Spectrum.of_gram(features @ features.T, problem))
    yield from_gram, features.T @ from_gram.coef


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_logistic_regression_is_that_of_scikit_learn(rng, fit_intercept):
    features, y, weights = make_classes(rng)
    model = LogisticRegression(C=2.0, tol=1e-10, max_iter=2000, fit_intercept=fit_intercept)
    model.fit(features, y[:, 0], sample_weight=weights)
    problem = RidgeProblem.of(
        y, [0.5], weights=weights, fit_intercept=fit_intercept, criterion="log_loss"
    )
    for fit, values in newton_fits(features, problem):
        assert np.allclose(values, model.coef_.T, atol=1e-5)
        assert np.allclose(fit.intercept, model.intercept_, atol=1e-5)


def test_the_textbook_has_the_same_logits_without_each_sample(rng):
    features, y, _ = make_classes(rng)
    _, _, left_out = textbook.logistic(features @ features.T, y[:, 0], 0.5)
    for fit, _ in newton_fits(features, RidgeProblem.of(y, [0.5], criterion="log_loss")):
        assert np.allclose(y[:, 0] - fit.left_out[:, 0], left_out, atol=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_logits_without_samples_are_those_of_refits_up_to_a_part_of_the_change(rng, size):
    features, y, weights = make_classes(rng)
    groups = np.arange(len(y)) // size
    given = None if size == 1 else groups
    problem = RidgeProblem.of(y, [0.5], weights=weights, groups=given, criterion="log_loss")
    for fit, values in newton_fits(features, problem):
        error = 0.0
        change = 0.0
        for group in range(0, 40, 5):
            members = groups == group
            model = LogisticRegression(C=2.0, tol=1e-10, max_iter=2000)
            model.fit(features[~members], y[~members, 0], sample_weight=weights[~members])
            refit = model.decision_function(features[members])
            logits = (y - fit.left_out)[members, 0]
            whole_fit = (features[members] @ values + fit.intercept)[:, 0]
            error = max(error, np.abs(logits - refit).max())
            change = max(change, np.abs(whole_fit - refit).max())
        assert error < 0.2 * change


def test_an_automatic_path_finds_what_a_fine_grid_finds(rng):
    features, y, _ = make_classes(rng)
    automatic = RidgeProblem.of(y, criterion="log_loss")
    fine = RidgeProblem.of(y, np.geomspace(1e-3, 1e3, 49), criterion="log_loss")
    gram = features @ features.T
    found = fit_newton(Spectrum.of_gram(gram.copy(), automatic))
    wanted = fit_newton(Spectrum.of_gram(gram.copy(), fine))
    assert found.loss <= wanted.loss + 2e-3
    assert fine.alphas.tolist() == wanted.alphas.tolist()


def test_classes_that_can_be_told_apart_have_finite_logits(rng):
    features = rng.standard_normal((60, 2))
    y = np.where(features[:, :1] > 0, 1.0, -1.0)
    for fit, _ in newton_fits(features, RidgeProblem.of(y, criterion="log_loss")):
        assert np.isfinite(fit.coef).all()
        assert np.isfinite(fit.left_out).all()
        assert fit.loss < 0.2


def test_features_that_do_not_vary_give_the_base_rate():
    y = np.array([[1.0], [1.0], [1.0], [-1.0]])
    spectrum = Spectrum.of_gram(np.ones((4, 4)), RidgeProblem.of(y, criterion="log_loss"))
    fit = fit_newton(spectrum)
    assert np.isclose(fit.intercept[0], np.log(3.0))
    assert np.abs(fit.coef.sum(axis=0)) < 1e-9


def test_a_penalty_of_zero_is_refused_by_newton():
    y = np.array([[1.0], [-1.0]])
    spectrum = Spectrum.of_gram(np.eye(2), RidgeProblem.of(y, [1.0, 0.0], criterion="log_loss"))
    with pytest.raises(ValueError, match="positive penalty: got alpha = 0"):
        fit_newton(spectrum)


def test_the_fit_is_the_ridge_fit_to_its_working_responses(rng):
    features, y, _ = make_classes(rng)
    problem = RidgeProblem.of(y, [0.5], criterion="log_loss")
    fit = fit_newton(Spectrum.of_features(in_blocks(features), problem))
    logits = features @ fit.coef + fit.intercept
    curvature, responses = working_problem(logits[:, 0], y[:, 0])
    ridge = fit_features(
        in_blocks(features), RidgeProblem.of(responses[:, None], [0.5], weights=curvature)
    )
    assert np.allclose(ridge.coef, fit.coef, atol=1e-6)


# ---- torch


@pytest.mark.parametrize("alphas", [[1.0], ALPHAS, None])
@pytest.mark.parametrize("n_groups", [None, 5])
def test_tensors_give_the_numbers_of_arrays(rng, alphas, n_groups):
    torch = pytest.importorskip("torch")
    features, y, weights, groups = make_problem(rng, 24, 6, weighted=True, n_groups=n_groups)
    problem = RidgeProblem.of(y, alphas, weights=weights, groups=groups)
    there = torch.as_tensor(features)
    pairs = [
        (fit_features(in_blocks(features), problem), fit_features(in_blocks(there), problem)),
        (fit_gram(features @ features.T, problem), fit_gram(there @ there.T, problem)),
    ]
    new = rng.standard_normal((4, 6))
    for (host, device), rows in zip(pairs, [new, new @ features.T], strict=True):
        assert np.allclose(device.errors, host.errors)
        assert np.allclose(device.coef, host.coef, atol=1e-9)
        assert np.allclose(device.left_out, host.left_out)
        hat = device.factor.hat(torch.as_tensor(rows))
        assert np.allclose(hat, host.factor.hat(rows))
