"""Ridge solvers: what they refuse, what they do at the edges, and what they leave alone."""

import tracemalloc

import numpy as np
import pytest
from ridges import design_path, gram_fixed, gram_path

from keyhole.ridge import gram as tridiagonal
from keyhole.ridge.design import ridge_rows
from keyhole.ridge.gram import Sweep, Tridiagonal, _inverse, ridge_gram, tridiagonalise
from keyhole.solve.matrices import add_outer, mirror_lower
from keyhole.ridge.problem import (
    N_DRAFT_ALPHAS,
    RidgeProblem,
    check_alphas,
    check_weights,
    choose_penalty,
    default_alphas,
    numerical_floor,
)


@pytest.fixture
def design(rng):
    return rng.standard_normal((30, 8)) + 2


@pytest.fixture
def y(rng, design):
    return design @ rng.standard_normal((8, 3)) + 0.1 * rng.standard_normal((30, 3))


@pytest.fixture
def gram(design):
    return design @ design.T


def every_route(design, y, alphas, **options):
    """One path or one-penalty fit of every kind."""
    gram = design @ design.T
    return [
        gram_path(gram, y, alphas, **options),
        gram_path(gram, y, [*alphas, 0.0], **options),
        design_path(design, y, alphas, **options),
    ], [gram_fixed(gram, y, alpha, **options) for alpha in alphas]


class TestRefusals:
    def test_negative_penalty_is_named(self, gram, design, y):
        for solve in (lambda a: gram_path(gram, y, a), lambda a: design_path(design, y, a)):
            with pytest.raises(ValueError, match=r"at least 0: got -0\.5 at position 1"):
                solve([1.0, -0.5])
        with pytest.raises(ValueError, match=r"at least 0: got -2 at position 0"):
            gram_fixed(gram, y, -2.0)

    def test_what_cannot_be_solved_is_told_before_or_instead(self, gram, y):
        with pytest.raises(
            ValueError,
            match=r"one row and one column per output: got shape \(29, 29\) for 30 outputs",
        ):
            ridge_gram(gram[:29, :29], RidgeProblem.of(y, [1.0]))
        with pytest.raises(ValueError, match="`alphas` must be numbers: got"):
            check_alphas(["much"])
        lost = gram.copy()
        lost[3, 5] = lost[5, 3] = np.nan
        for groups in (None, np.arange(30) // 2):
            with pytest.raises(ValueError, match="`gram` must be finite"):
                ridge_gram(lost, RidgeProblem.of(y, [0.1, 1.0], groups=groups, fit_intercept=False))
        with pytest.raises(
            np.linalg.LinAlgError, match="plus the penalty 1 must be positive definite"
        ):
            _inverse(-gram, np.ones(30))

    def test_penalties_must_be_a_sequence_of_finite_numbers(self, gram, y):
        with pytest.raises(ValueError, match="at least one penalty"):
            gram_path(gram, y, [])
        with pytest.raises(ValueError, match="got inf at position 0"):
            gram_path(gram, y, [np.inf])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_what_is_not_finite_is_found_before_any_factorisation(
        self, gram, design, y, bad, monkeypatch
    ):
        monkeypatch.setattr(tridiagonal, "tridiagonalise", lambda *_: pytest.fail("too late"))
        for name, wrong in (("gram", gram.copy()), ("y", y.copy())):
            wrong[7, 2] = bad
            if name == "gram":
                wrong[2, 7] = bad
            arguments = (wrong, y) if name == "gram" else (gram, wrong)
            with pytest.raises(ValueError, match=f"`{name}` must be finite"):
                gram_path(*arguments, [1.0])
            with pytest.raises(ValueError, match=f"`{name}` must be finite"):
                gram_fixed(*arguments, 1.0)
        design[4, 4] = bad
        with (
            pytest.raises(ValueError, match="squares below 1e\\+150"),
            np.errstate(invalid="ignore"),
        ):
            design_path(design, y, [1.0])

    def test_weights_must_be_positive(self, gram, design, y):
        weights = np.ones(30)
        weights[3] = 0.0
        with pytest.raises(
            ValueError, match=r"`weights` must be positive: got 0 for sample 3\. Drop samples"
        ):
            gram_path(gram, y, [1.0], weights=weights)
        with pytest.raises(ValueError, match="must be positive"):
            design_path(design, y, [1.0], weights=-weights)

    def test_weights_must_be_one_per_sample(self, y):
        with pytest.raises(
            ValueError, match=r"one entry per sample: got shape \(29,\) for 30 samples"
        ):
            check_weights(np.ones(29), 30)
        with pytest.raises(ValueError, match="`weights` must be finite"):
            RidgeProblem.of(y, [1.0], weights=np.full(30, np.nan))
        wrong = np.where(np.arange(30) == 2, -1.0, 1.0)
        with pytest.raises(ValueError, match="`weights` must be positive: got -1 for sample 2"):
            RidgeProblem.of(y, [1.0], weights=wrong, groups=np.arange(30))

    def test_blocks_must_fit(self, design, y):
        with pytest.raises(ValueError, match="one row per output: got 20 rows for 30 outputs"):
            ridge_rows(lambda: [design[:20]], RidgeProblem.of(y))
        with pytest.raises(ValueError, match="one row per output: got 40 rows for 30 outputs"):
            ridge_rows(lambda: [design, design[:10]], RidgeProblem.of(y))
        with pytest.raises(
            ValueError, match=r"rows 10 to 30 has shape \(20, 7\), the first had p = 8"
        ):
            ridge_rows(lambda: [design[:10], design[10:, :7]], RidgeProblem.of(y))

    def test_no_samples(self):
        with pytest.raises(ValueError, match="at least one sample"):
            gram_path(np.zeros((0, 0)), np.zeros((0, 1)), [1.0])
        with pytest.raises(ValueError, match="at least one sample"):
            design_path(np.zeros((0, 2)), np.zeros((0, 1)), [1.0])


class TestEdges:
    def test_one_sample_is_fitted_but_cannot_be_left_out(self):
        x, y = np.array([[2.0]]), np.array([[3.0]])
        for solve in (gram_path, gram_fixed, design_path):
            fit = solve(x, y, 1.0 if solve is gram_fixed else [1.0])
            assert fit.intercept == pytest.approx([3.0])
            assert fit.coef == pytest.approx(np.zeros((1, 1)))
            assert np.isinf(fit.error)
        for path in (gram_path, design_path):
            with pytest.raises(ValueError, match="1 sample only"):
                path(x, y, [1.0, 2.0])

    def test_one_sample_without_intercept_is_predicted_by_zero(self):
        paths, fixed = every_route(np.array([[2.0]]), np.array([[3.0]]), [1.0], fit_intercept=False)
        for fit in [path.at(0) for path in paths] + fixed:
            assert fit.left_out == pytest.approx(np.array([[3.0]]))

    @pytest.mark.parametrize("value", [0.0, 0.1, -1e9])
    def test_constant_outputs_take_the_largest_penalty(self, design, value):
        y = np.full((30, 2), value)
        paths, _ = every_route(design, y, [1.0, 100.0, 0.01])
        for path in paths:
            assert (path.errors == 0).all()
            assert path.alphas[path.best] == 100.0
            fit = path
            assert (fit.coef == 0).all()
            assert fit.intercept == pytest.approx([value, value])

    def test_a_zero_gram_matrix_predicts_the_mean(self, y):
        paths, fixed = every_route(np.zeros((30, 2)), y, [1.0, 3.0])
        for path in paths:
            assert path.alphas[path.best] == 3.0
            assert path.errors[0] == pytest.approx(path.errors[1], rel=1e-12)
        for fit in [*paths, *fixed]:
            assert fit.intercept == pytest.approx(y.mean(axis=0))
            assert fit.left_out == pytest.approx((y - y.mean(axis=0)) * 30 / 29)
        assert np.isfinite(gram_path(np.zeros((30, 30)), y).errors).all()

    def test_penalties_keep_their_order(self, gram, y):
        path = gram_path(gram, y, [5.0, 0.1, 5.0, 1.0])
        ordered = gram_path(gram, y, [0.1, 1.0, 5.0])
        assert path.alphas.tolist() == [5.0, 0.1, 5.0, 1.0]
        assert path.errors == pytest.approx(ordered.errors[[2, 0, 2, 1]], rel=1e-12)

    def test_integer_penalties_are_penalties(self, gram, y):
        assert gram_path(gram, y, [1, 10]).errors.shape == (2,)

    def test_very_uneven_weights(self, design, y, rng):
        weights = 10.0 ** rng.uniform(-5, 5, 30)
        roots = np.sqrt(weights)[:, None]
        # least squares on rows √w (φ, 1), and √alpha on the values alone: no Gram matrix, so no
        # digits lost
        rows = np.block([[roots * design, roots], [0.1 * np.eye(8), np.zeros((8, 1))]])
        wanted = np.linalg.lstsq(rows, np.concatenate([roots * y, np.zeros((8, 3))]), rcond=None)[0]
        wanted = design @ wanted[:-1] + wanted[-1]
        paths, fixed = every_route(design, y, [1e-2], weights=weights)
        for fit in [path.at(0) for path in paths] + fixed:
            v = fit.coef if fit.route == "design" else design.T @ fit.coef
            # ε λ_max/alpha is about 1e-16 · 3e7 / 1e-2
            assert np.abs(design @ v + fit.intercept - wanted).max() < 1e-6 * np.abs(wanted).max()

    def test_weights_of_one_are_no_weights(self, gram, y):
        plain, weighted = (
            gram_path(gram, y, [1.0]),
            gram_path(gram, y, [1.0], weights=np.ones(30)),
        )
        assert np.array_equal(plain.errors, weighted.errors)

    def test_one_weight_of_two_among_ones_is_a_copy(self, design, y):
        weights, copied = np.where(np.arange(30) == 3, 2.0, 1.0), np.append(np.arange(30), 3)
        for given, repeated in zip(
            every_route(design, y, [1.0], weights=weights)[1],
            every_route(design[copied], y[copied], [1.0])[1],
            strict=True,
        ):
            v, w = design.T @ given.coef, design[copied].T @ repeated.coef
            np.testing.assert_allclose(v, w, rtol=1e-9)
            np.testing.assert_allclose(given.intercept, repeated.intercept, rtol=1e-9)
        paths = every_route(design, y, [1.0], weights=weights)[0]
        for fit in (paths[0].at(0), paths[1].at(0)):
            np.testing.assert_allclose(design.T @ fit.coef, v, rtol=1e-9)
        np.testing.assert_allclose(paths[2].at(0).coef, v, rtol=1e-9)

    def test_features_of_zeros_leave_the_mean(self, y):
        for alpha in (0.0, 1.0):
            paths, fixed = every_route(np.zeros((30, 8)), y, [alpha])
            for fit in [path.at(0) for path in paths] + fixed:
                np.testing.assert_allclose(fit.intercept, y.mean(axis=0))
                assert np.isfinite(fit.coef).all()
                assert not paths[2].at(0).coef.any()

    def test_a_factorisation_is_kept_where_asked_for(self, gram, design, y):
        problem = RidgeProblem.of(y, [0.1, 1.0])
        for fit in (ridge_gram(gram, problem), ridge_rows(lambda: [design], problem)):
            assert fit.factor is None
            with pytest.raises(ValueError, match="keep_factor=True"):
                fit.at(0)

    def test_all_disqualified(self, rng):
        square = rng.standard_normal((10, 20))
        gram, y = square @ square.T, rng.standard_normal((10, 1))
        gram[:, 3] = gram[3] = 0.0
        gram[3, 3] = 1e30
        with pytest.raises(
            ValueError, match=r"among the 2 penalties from 0 to 1e-20: .* Add larger penalties"
        ):
            gram_path(gram, y, [0.0, 1e-20])
        assert np.isinf(gram_path(gram, y, [0.0]).error)

    @pytest.mark.parametrize("scale", [1.0, 1e-6])
    def test_a_group_that_sets_the_floor_is_not_judged(self, rng, scale):
        """Two copies without equal: without both of them much more would count, without one of them
        not.
        """
        square, y = rng.standard_normal((10, 20)), scale * rng.standard_normal((10, 1))
        square[[3, 4]] = 0.0
        gram = square @ square.T
        gram[3:5, 3:5] = 1e30
        for groups, judged in (
            (np.array([0, 1, 2, 3, 3, 5, 6, 7, 8, 9]), False),
            (np.arange(10), True),
        ):
            problem = RidgeProblem.of(y, [1e-20], fit_intercept=False, groups=groups)
            left_out = ridge_gram(gram, problem).left_out
            assert np.isfinite(left_out[[3, 4]]).all() == judged

    @pytest.mark.parametrize(("share", "judged"), [(0.95, False), (0.5, True)])
    def test_a_group_that_holds_the_largest_eigenvector_is_not_judged(self, rng, share, judged):
        """Without it the largest eigenvalue, and the floor with it, would fall to a twentieth."""
        turn = rng.standard_normal((8, 8))
        turn[:2, 0], turn[2:, 0] = np.sqrt(share / 2), np.sqrt((1 - share) / 6)
        turn = np.linalg.qr(turn)[0]
        gram = turn[:, :5] * [1.0, 0.05, 0.04, 0.03, 0.02] @ turn[:, :5].T
        problem = RidgeProblem.of(
            rng.standard_normal((8, 1)), [0.0], fit_intercept=False, groups=np.arange(8) // 2
        )
        assert np.isfinite(ridge_gram(gram, problem).left_out[:2]).all() == judged

    def test_what_rounding_hides_does_not_depend_on_the_units_of_the_outputs(self, rng):
        vectors = np.linalg.qr(rng.standard_normal((8, 8)))[0]
        values, outputs = (
            np.array([0.0, 0.0, 1e-9, 1e-3, 0.1, 1.0, 2.0, 3.0]),
            rng.standard_normal((8, 2)),
        )
        alphas, kept, leak = np.array([0.0, 1e-12]), np.full((5, 2), 0.3), np.full((5, 1), 1e-8)
        found = []
        for unit in (1.0, 1e-6, 1e6):
            spectrum = tridiagonal.GramSpectrum(vectors, values, unit * outputs, 1e-10, 1e-14)
            found.append(spectrum.hidden(alphas, kept, leak))
        assert found[1] == pytest.approx(found[0], rel=1e-12)
        assert found[2] == pytest.approx(found[0], rel=1e-12)
        assert (
            found[0] > 2 * np.sqrt(leak * kept) + leak
        ).all()  # of the outputs more leaks than of 1 − h

    def test_outputs_far_from_zero_cost_no_digits(self, gram, y):
        near, far = gram_path(gram, y, [1.0]), gram_path(gram, y + 1e6, [1.0])
        assert far.errors == pytest.approx(near.errors, rel=1e-8)
        assert far.at(0).intercept - 1e6 == pytest.approx(near.at(0).intercept, abs=1e-8)

    def test_float32_with_large_or_small_units(self, gram, y):
        wanted = gram_path(gram, y, [1.0]).errors
        for unit in (1e-30, 1e30):
            path = gram_path((gram * unit).astype(np.float32), y, [unit])
            assert path.errors == pytest.approx(wanted, rel=1e-3)


class TestPenalties:
    def test_floor_is_n_units_of_float64_and_sixteen_of_float32(self):
        assert numerical_floor(2.0, 500) == pytest.approx(500 * 2.0**-52 * 2)
        assert numerical_floor(2.0, 500, rounding=2.0**-23) == pytest.approx(16 * 2.0**-23 * 2)

    def test_default_grid_spans_the_spectrum_and_stays_above_the_floor(self, gram, y):
        path = gram_path(gram, y)
        assert path.route == "tridiagonal"
        assert len(path.alphas) == 30
        assert path.alphas.min() > path.floor
        centred = gram - gram.mean(axis=0)
        assert path.alphas.max() == pytest.approx(10 * np.linalg.eigvals(centred).real.max())
        assert np.isfinite(path.errors).all()

    def test_default_grid_of_nothing(self):
        assert (default_alphas(0.0, 0.0) > 0).all()

    def test_choice(self):
        alphas = np.array([3.0, 1.0, 2.0])
        assert choose_penalty(alphas, np.array([np.inf, 1.0, 2.0])) == 1
        assert choose_penalty(alphas, np.array([1.0, 1.0, 1.0])) == 0
        assert choose_penalty(alphas, np.array([1e-3, 1e-32, 1e-31]), resolution=1e-30) == 2


class TestMemory:
    def test_only_one_triangle_is_read(self, gram, y):
        wanted = gram_path(gram, y, [1.0]).errors
        lower = np.asfortranarray(np.tril(gram))
        upper = np.ascontiguousarray(np.triu(gram))
        for half in (lower, upper):
            assert gram_path(half, y, [1.0]).errors == pytest.approx(wanted, rel=1e-12)
            assert gram_fixed(half, y, 1.0).error == pytest.approx(wanted[0], rel=1e-12)

    @pytest.mark.parametrize("order", ["C", "F"])
    def test_input_is_left_alone_unless_offered(self, gram, y, order, rng):
        given = np.array(gram, order=order)
        weights = rng.uniform(1, 2, 30)
        gram_path(given, y, [1.0, 0.0], weights=weights)
        gram_fixed(given, y, 1.0, weights=weights)
        assert np.array_equal(given, gram)

    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    def test_no_second_gram_matrix(self, rng, order, dtype):
        n = 600
        design = rng.standard_normal((n, 50))
        gram = np.array(design @ design.T, order=order, dtype=dtype)
        y = design[:, :1]
        for solve in (
            lambda g: gram_fixed(g, y, 1.0, overwrite_gram=True, memory_budget=2**16),
            lambda g: gram_path(g, y, [1.0, 2.0], overwrite_gram=True, memory_budget=2**16),
        ):
            # the smaller of two peaks: in 2 of 27 runs one had 1.6 MB more, and why is not known; a
            # copy of the matrix would be in both
            peaks = []
            for _ in range(2):
                given = gram.copy(order="K")
                tracemalloc.start()
                solve(given)
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
            peak = min(peaks)
            # LAPACK's work space is 32 to 64 columns; vectors and multipliers are a few columns
            # more
            assert peak < 0.35 * gram.nbytes, f"{peak / gram.nbytes:.2f} of a Gram matrix"

    @pytest.mark.parametrize("order", ["C", "F"])
    @pytest.mark.parametrize(("given", "summed"), [("f8", "f8"), ("f4", "f4"), ("f4", "f8")])
    def test_sums_over_blocks_make_no_copy_of_them(self, rng, order, given, summed):
        n, p = 300, 1500
        design = np.array(rng.standard_normal((n, p)) + 1, order=order, dtype=given)
        gram = np.zeros((n, n), summed, order="F")
        tracemalloc.start()
        add_outer(gram, design)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < (n * n * 4 if given != summed else 0) + 0.15 * design.nbytes
        exact = design.astype(np.float64)
        wanted = exact @ exact.T
        assert (
            np.abs(np.tril(gram - wanted)).max() < (1e-12 if given == "f8" else 1e-5) * wanted.max()
        )
        assert (np.triu(gram, 1) == 0).all() or given != summed

    def test_strided_blocks(self, rng):
        wide = rng.integers(-3, 4, (20, 12)).astype(float)
        gram = np.zeros((20, 20), order="F")
        add_outer(gram, wide[:, ::2])
        add_outer(gram, wide[::-1, 1::2][::-1])
        assert np.array_equal(mirror_lower(gram), wide @ wide.T)

    def test_mirror_over_several_blocks(self, rng):
        gram = rng.standard_normal((1100, 1100))
        wanted = np.tril(gram) + np.tril(gram, -1).T
        assert np.array_equal(mirror_lower(gram), wanted)


class TestPrecision:
    def test_float32_stays_close(self, design, y):
        wanted = gram_path(design @ design.T, y, [0.1, 1.0])
        gram = np.zeros((30, 30), np.float32, order="F")
        add_outer(gram, (design - design.mean(axis=0)).astype(np.float32))
        path = gram_path(gram, y, [0.1, 1.0])
        fixed = gram_fixed(gram, y, 1.0)
        assert path.route == "tridiagonal"
        assert path.errors == pytest.approx(wanted.errors, rel=1e-3)
        assert fixed.error == pytest.approx(wanted.errors[1], rel=1e-3)
        assert design.T @ fixed.coef == pytest.approx(design.T @ wanted.at(1).coef, abs=1e-4)
        primal = design_path(design.astype(np.float32), y, [0.1, 1.0])
        assert primal.errors == pytest.approx(wanted.errors, rel=1e-3)

    @pytest.mark.parametrize("failure", ["no convergence", "not finite"])
    def test_eigenvectors_that_fail_in_float32_are_found_in_float64(
        self, gram, y, monkeypatch, failure
    ):
        tried = []
        honest = tridiagonal._stevd

        def failing(diagonal, beside):
            tried.append(diagonal.dtype)
            values, vectors, info = honest(diagonal, beside)
            if diagonal.dtype == np.float64:
                return values, vectors, info
            return (
                values,
                vectors * (np.nan if failure == "not finite" else 1),
                int(failure == "no convergence"),
            )

        wanted = gram_path(gram, y, [0.0, 1.0]).errors
        monkeypatch.setattr(tridiagonal, "_stevd", failing)
        path = gram_path(gram.astype(np.float32), y, [0.0, 1.0])
        assert tried == [np.float32, np.float64]
        assert path.errors[1] == pytest.approx(wanted[1], rel=1e-3)
        monkeypatch.setattr(tridiagonal, "_stevd", lambda d, e: (d, np.eye(len(d)), 1))
        with pytest.raises(np.linalg.LinAlgError, match="did not converge in float64"):
            gram_path(gram, y, [0.0])

    def test_a_reduction_that_fails_in_float32_is_made_in_float64(self, gram, y, monkeypatch):
        tried = []
        honest = tridiagonal.tridiagonalise

        def failing(matrix, normal):
            tried.append(matrix.dtype)
            return None if matrix.dtype == np.float32 else honest(matrix, normal)

        monkeypatch.setattr(tridiagonal, "tridiagonalise", failing)
        path = gram_path(gram, y, [1.0], dtype=np.float32)
        assert tried == [np.float32, np.float64]
        assert np.isfinite(path.errors).all()
        with pytest.raises(
            np.linalg.LinAlgError, match=r"overflowed in float32\. Pass it in float64"
        ):
            gram_path(gram.astype(np.float32), y, [1.0])

    def test_a_matrix_too_large_for_float32_is_reduced_in_float64(self, gram, y):
        wanted = gram_path(gram, y, [0.1, 1.0])
        path = gram_path(1e38 * gram, y, [1e37, 1e38], dtype=np.float32)
        assert path.factor.factor.form.basis.dtype == np.float64
        assert path.errors == pytest.approx(wanted.errors, rel=1e-6)

    def test_factorising_a_float64_matrix_in_float32(self, gram, y):
        path = gram_path(gram, y, [1.0], dtype=np.float32)
        assert path.errors == pytest.approx(gram_path(gram, y, [1.0]).errors, rel=1e-3)


class TestRouteAtOnePenalty:
    def test_cholesky_above_the_floor_and_eigen_below(self, gram, y):
        assert gram_fixed(gram, y, 1e-3).route == "cholesky"
        assert gram_fixed(gram, y, 0.0).route == "eigen"
        tiny = gram_fixed(gram, y, 1e-18)
        path = gram_path(gram, y, [1e-18])
        assert tiny.route == path.route == "eigen"
        assert tiny.error == pytest.approx(path.errors[0])

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("half", [False, True])
    def test_a_matrix_that_is_not_positive_falls_to_the_eigenvalues(self, gram, y, overwrite, half):
        values, vectors = np.linalg.eigh(gram)
        values[0] = -0.5 * values[-1]
        wrong = (vectors * values) @ vectors.T
        wrong = np.asfortranarray(np.tril(wrong) if half else (wrong + wrong.T) / 2)
        path = gram_path(wrong, y, [1.0])
        fixed = gram_fixed(wrong, y, 1.0, overwrite_gram=overwrite)
        assert path.route == fixed.route == "eigen"
        assert fixed.coef == pytest.approx(path.at(0).coef, abs=1e-10)
        assert fixed.error == pytest.approx(path.errors[0])


def test_a_draft_says_what_a_path_of_its_penalties_says(rng):
    x, y = rng.normal(size=(60, 100)), rng.normal(size=(60, 3))
    draft = ridge_gram(x @ x.T, RidgeProblem.of(y, draft=True))
    path = ridge_gram(x @ x.T, RidgeProblem.of(y, draft.alphas))
    assert draft.route == path.route == "tridiagonal"
    assert len(draft.alphas) == N_DRAFT_ALPHAS
    np.testing.assert_allclose(draft.errors, path.errors, rtol=1e-7)
    np.testing.assert_allclose(draft.left_out, path.left_out, rtol=1e-7)
    assert draft.loss == draft.scores.min()


def test_a_sweep_through_an_indefinite_matrix_is_refused():
    matrix = np.asfortranarray(np.diag(np.linspace(-1.0, 1.0, 20)))
    sweep = Sweep.of(tridiagonalise(matrix, None), np.ones((20, 1)))
    alphas = np.array([0.5])
    assert sweep.complements(alphas) is None
    with pytest.raises(np.linalg.LinAlgError, match="must be positive definite"):
        sweep.solve(alphas)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_the_smallest_tridiagonal_matrices_have_eigenpairs(m):
    form = Tridiagonal(np.asfortranarray(np.eye(m)), np.arange(1.0, m + 1), np.full(m - 1, 0.5))
    values, vectors = form.eigenpairs()
    whole = np.diag(form.diagonal) + np.diag(form.beside, 1) + np.diag(form.beside, -1)
    np.testing.assert_allclose(vectors @ np.diag(values) @ vectors.T, whole, atol=1e-14)
    assert form.largest() == pytest.approx(values[-1], rel=1e-12)
