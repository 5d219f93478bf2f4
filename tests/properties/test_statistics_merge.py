"""Sums over samples add: any cut, any order, any bracketing gives the moments, and the fit, of all
samples at once.
"""

from dataclasses import replace

import numpy as np
import pytest
from ridges import design_path

import keyhole as kh
from keyhole.attention.heads import HeadDraw
from keyhole.data.tokens import TokenRule
from keyhole.ridge.design import DesignMoments, PrincipalAxes
from keyhole.streaming import LayerRecipe, merge
from keyhole.training import TrainingSet

ALPHAS = [0.01, 1.0, 100.0]


def problem(rng, n=120, p=9, t=2, offset=1e3):
    design = rng.standard_normal((n, p)) @ np.diag(
        np.geomspace(1, 0.05, p)
    ) + offset * rng.standard_normal(p)
    y = rng.standard_normal((n, t)) + design @ rng.standard_normal((p, t)) + 50
    return design, y, rng.uniform(0.1, 3.0, n)


def moments_of(design, y, weights, rows, fit_intercept=True):
    moments = DesignMoments.empty(design.shape[1], y.shape[1], fit_intercept=fit_intercept)
    moments.add_rows(design[rows], y[rows], None if weights is None else weights[rows])
    return moments


def difference(a, b):
    """Largest relative difference of two sums, each part by its own size."""
    parts = [(np.tril(a.gram), np.tril(b.gram))]
    parts += [
        (getattr(a, n), getattr(b, n))
        for n in ("cross", "squares", "means", "y_mean", "weight", "count")
    ]
    return max(np.abs(np.subtract(x, z)).max() / max(np.abs(z).max(), 1e-300) for x, z in parts)


def cuts(rng, n, count):
    order = rng.permutation(n)
    return np.split(order, np.sort(rng.choice(np.arange(1, n), count - 1, replace=False)))


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_moments_add_in_any_order_and_bracketing(rng, fit_intercept, weighted):
    design, y, weights = problem(rng)
    weights = weights if weighted else None
    whole = moments_of(design, y, weights, np.arange(120), fit_intercept)
    a, b, c, d = (moments_of(design, y, weights, rows, fit_intercept) for rows in cuts(rng, 120, 4))
    for total in (((a + b) + c) + d, a + (b + (c + d)), (d + c) + (b + a), (c + a) + (d + b)):
        assert difference(total, whole) < 1e-9
    assert difference(a + b, b + a) < 1e-9
    nothing = DesignMoments.empty(9, 2, fit_intercept=fit_intercept)
    assert difference(nothing + a, a) == 0.0
    assert difference(a + nothing, a) == 0.0


def test_only_moments_of_one_kind_add():
    one = DesignMoments.empty(3, 2)
    for other in (
        DesignMoments.empty(4, 2),
        DesignMoments.empty(3, 1),
        DesignMoments.empty(3, 2, fit_intercept=False),
    ):
        with pytest.raises(
            ValueError,
            match=r"same features and outputs, with or without an intercept alike: got \(p",
        ):
            one += other


def test_the_size_of_outputs_and_the_coarsest_rounding_are_remembered(rng):
    """What the resolution of errors is made of: the largest |y| of any batch, the largest unit of
    any dtype.
    """
    first, second = DesignMoments.empty(2, 1), DesignMoments.empty(2, 1)
    rows = rng.standard_normal((3, 2))
    first.add_rows(rows, np.array([[1.0], [-7.0], [2.0]]))
    first.add_rows(rows, np.array([[5.0], [0.0], [2.0]]))
    second.add_rows(rows.astype(np.float32), np.array([[0.5], [0.5], [0.0]]))
    assert (first.y_size, second.y_size) == (7.0, 0.5)
    assert (first.rounding, second.rounding) == (2.0**-52, 2.0**-23)
    for total in (first + second, second + first):
        assert (total.y_size, total.rounding, total.count, total.weight) == (7.0, 2.0**-23, 9, 9.0)
        assert PrincipalAxes.of(total).resolution == (4 * 2.0**-23 * 7.0) ** 2


@pytest.mark.parametrize("forgotten", ["the scatter between", "the weights of the means"])
def test_a_forgetful_merge_is_caught(rng, forgotten):
    design, y, weights = problem(rng)
    whole = moments_of(design, y, weights, np.arange(120))
    a, b = (moments_of(design, y, weights, rows) for rows in cuts(rng, 120, 2))
    wrong = a.copy()
    if forgotten == "the scatter between":
        wrong.gram += b.gram
        wrong.cross += b.cross
    else:
        a.weight = b.weight = 1.0
        wrong = a + b
    assert difference(wrong, whole) > 1e-3


def test_a_large_offset_costs_no_digits(rng):
    design, y, _ = problem(rng)
    plain = moments_of(design, y, None, np.arange(120))
    far = merge_all([moments_of(design + 1e6, y, None, rows) for rows in cuts(rng, 120, 12)])
    assert np.abs(np.tril(far.gram - plain.gram)).max() < 1e-9 * np.abs(plain.gram).max()
    # sums about zero, subtracted at the end, lose what sums about the mean keep
    shifted = design + 1e6
    naive = shifted.T @ shifted - 120 * np.outer(shifted.mean(0), shifted.mean(0))
    assert np.abs(np.tril(naive - plain.gram)).max() > 1e-7 * np.abs(plain.gram).max()


def merge_all(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_the_fit_from_sums_is_the_fit_from_the_design(rng, fit_intercept):
    # without an intercept an offset is an eigenvalue of its size squared, and costs every route
    # those digits
    design, y, weights = problem(rng, offset=1e3 if fit_intercept else 1.0)
    path = design_path(design, y, ALPHAS, fit_intercept=fit_intercept, weights=weights)
    axes = PrincipalAxes.of(
        merge_all(
            [moments_of(design, y, weights, rows, fit_intercept) for rows in cuts(rng, 120, 7)]
        )
    )
    sums = sum(
        axes.error_sums(design[rows], y[rows] - axes.y_mean, weights[rows], np.array(ALPHAS))
        for rows in cuts(rng, 120, 5)
    )
    for i, alpha in enumerate(ALPHAS):
        fit = path.at(i)
        coef = axes.coef(alpha)
        np.testing.assert_allclose(coef, fit.coef, rtol=0, atol=1e-9 * np.abs(fit.coef).max())
        np.testing.assert_allclose(
            design @ coef + axes.intercept(coef), design @ fit.coef + fit.intercept, rtol=1e-9
        )
    np.testing.assert_allclose(sums.mean(axis=1) / axes.weight, path.errors, rtol=1e-8)


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize(("n", "p"), [(60, 8), (20, 35)])
def test_generalised_cross_validation_is_its_definition(rng, n, p, fit_intercept):
    design, y, weights = (
        rng.standard_normal((n, p)) + 1,
        rng.standard_normal((n, 2)) + 3,
        rng.uniform(0.2, 2, n),
    )
    axes = PrincipalAxes.of(moments_of(design, y, weights, np.arange(n), fit_intercept))
    roots = np.sqrt(weights)
    scaled = roots[:, None] * design
    centre = np.eye(n) - np.outer(roots, roots) / (roots @ roots) if fit_intercept else np.eye(n)
    for alpha, got in zip(ALPHAS, axes.generalised_errors(np.array(ALPHAS)), strict=True):
        inner = centre @ scaled @ scaled.T @ centre
        hat = inner @ np.linalg.inv(inner + alpha * np.eye(n)) + (np.eye(n) - centre)
        residual = (np.eye(n) - hat) @ (roots[:, None] * y)
        wanted = np.square(residual).sum(axis=0) / weights.sum() / (1 - np.trace(hat) / n) ** 2
        # what rounding may have taken from the residual sum is added to it
        lost = 2.0**-52 * (
            4 * axes.squares + 3 * axes.largest * np.square(axes.coef(alpha)).sum(axis=0)
        )
        allowed = 2 * lost / weights.sum() / (1 - np.trace(hat) / n) ** 2
        assert (np.abs(got - wanted) < 1e-9 * wanted + allowed).all()
        forgetful = (
            np.square(residual).sum(axis=0) / weights.sum()
        )  # the residuals of a fit flatter it
        assert (np.abs(forgetful / wanted - 1) > 1e-3).all()


def test_generalised_errors_have_room_for_the_rounding_of_their_sums(rng):
    """ε (4 Σ w (y − ȳ)² + 3 λ_max |v|²) is added to the residual sum; where n − tr H is lost to it,
    nothing is said.
    """
    design, y, weights = problem(rng)
    plain = PrincipalAxes.of(moments_of(design, y, weights, np.arange(120)))
    alphas, exact = np.array([0.1, 10.0]), replace(plain, rounding=0.0)
    rough = replace(plain, rounding=1e-4)
    coefs = [plain.coef(float(alpha)) for alpha in alphas]
    room = [4 * plain.squares + 3 * plain.largest * np.square(coef).sum(axis=0) for coef in coefs]
    freedom = [120 - 1 - (plain.values / (plain.values + alpha)).sum() for alpha in alphas]
    want = [1e-4 * r / plain.weight / (f / 120) ** 2 for r, f in zip(room, freedom, strict=True)]
    added = rough.generalised_errors(alphas) - exact.generalised_errors(alphas)
    np.testing.assert_allclose(added, want, rtol=1e-6)
    # n − tr H is about 110 of 120: known to more than 4 · 9 units of it, or not
    assert np.isfinite(replace(plain, rounding=0.025).generalised_errors(alphas)).all()
    assert np.isinf(replace(plain, rounding=0.026).generalised_errors(alphas[:1])).all()
    assert plain.generalised_resolution() == max(
        plain.resolution, 8 * plain.rounding * plain.squares.mean() / plain.weight
    )
    huge = replace(plain, y_size=1e12)
    assert huge.generalised_resolution() == huge.resolution == (4 * huge.rounding * 1e12) ** 2


def test_a_perfect_fit_is_not_preferred_for_its_rounding(rng):
    """A noiseless target: generalised errors of tiny penalties are rounding, and the largest of
    equals is taken.
    """
    design = rng.standard_normal((300, 5))
    axes = PrincipalAxes.of(
        moments_of(design, design @ rng.standard_normal((5, 1)) + 2, None, np.arange(300))
    )
    errors = axes.generalised_errors(axes.default_alphas())
    assert (errors > 0).all()
    assert errors.min() < 1e-13


def test_float32_products_in_float64_sums_keep_their_digits(rng):
    """Features in float32: the sum over many blocks is no worse than that of one, because it is
    float64.
    """
    design = rng.standard_normal((4000, 20)).astype(np.float32) + np.float32(3)
    y = rng.standard_normal((4000, 1))
    exact = moments_of(design.astype(np.float64), y, None, np.arange(4000)).gram
    blocked = merge_all(
        [moments_of(design, y, None, rows) for rows in np.split(np.arange(4000), 40)]
    )
    off = np.abs(np.tril(blocked.gram - exact)).max() / np.abs(exact).max()
    assert off < 4 * 2.0**-24
    single = np.zeros_like(design[:20].T @ design[:20])
    for row in design - design.mean(axis=0):
        single += np.outer(row, row)  # the twin: a float32 running sum
    assert (
        np.abs(single - np.tril(exact) - np.tril(exact, -1).T).max() / np.abs(exact).max() > 2 * off
    )


def test_kept_samples_are_a_random_part_of_all_batches(rng, seed):
    sets = kh.targets.sphere_sets(90, n_keys=3, dim=2, seed=seed)
    y = rng.standard_normal((90, 1))
    recipe = LayerRecipe(
        HeadDraw(kh.GaussianHeads(), 2, 2, 0), TokenRule("none", "given", "mean"), 1, n_kept=20
    )
    whole = recipe.add(recipe.empty(), TrainingSet(sets, y)).kept
    parts = [
        recipe.add(recipe.empty(), TrainingSet(sets[rows], y[rows])) for rows in cuts(rng, 90, 6)
    ]
    merged = merge(parts).kept
    assert len(merged.priorities) == 20
    assert (np.diff(merged.priorities) >= 0).all()
    kept_of_parts = [part.kept for part in parts]
    least = np.sort(np.concatenate([kept.priorities for kept in kept_of_parts]))[:20]
    np.testing.assert_array_equal(merged.priorities, least)
    # added one after the other, the same samples are kept whatever the batches
    sums = recipe.empty()
    for rows in np.array_split(np.arange(90), 6):
        sums = recipe.add(sums, TrainingSet(sets[rows], y[rows]))
    np.testing.assert_array_equal(sums.kept.priorities, whole.priorities)
    np.testing.assert_array_equal(sums.kept.columns, whole.columns)


def test_axes_without_length_are_none_to_a_penalty_of_zero(rng):
    """Where two columns are equal one axis has no length: without a penalty its inverse is 0, as
    that of pinv.
    """
    design = rng.normal(size=(20, 3))[:, [0, 1, 1]]
    y = rng.normal(size=(20, 1))
    axes = PrincipalAxes.of(moments_of(design, y, np.ones(20), np.arange(20), False))
    inverse = axes.inverse(np.array([0.0, 1.0]))
    assert inverse[0, 0] == 0.0
    np.testing.assert_allclose(inverse[:, 1], 1 / (axes.values + 1.0), rtol=1e-12)
    found = axes.axes @ (inverse[:, :1] * axes.scores)
    np.testing.assert_allclose(found, np.linalg.pinv(design) @ y, atol=1e-10)


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_the_first_part_may_be_one_sample(fit_intercept, rng):
    design, y = rng.normal(size=(9, 3)) + 5.0, rng.normal(size=(9, 2)) - 2.0
    whole, parts = (DesignMoments.empty(3, 2, fit_intercept=fit_intercept) for _ in range(2))
    whole.add_rows(design, y)
    for rows in (slice(0, 1), slice(1, 2), slice(2, 9)):
        parts.add_rows(design[rows], y[rows])
    for name in ("means", "y_mean", "cross", "squares", "weight", "count"):
        np.testing.assert_allclose(
            getattr(parts, name), getattr(whole, name), rtol=1e-12, atol=1e-12
        )
    np.testing.assert_allclose(np.tril(parts.gram), np.tril(whole.gram), rtol=1e-12, atol=1e-12)
