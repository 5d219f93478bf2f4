"""The banded form behind large ridge paths."""

import numpy as np
import pytest
from ridges import gram_path

from keyhole.ridge import banded
from keyhole.ridge import gram as ridge_gram
from keyhole.ridge.banded import WIDTH, BandedSweep, to_band

ALPHAS = np.array([1e-3, 0.1, 10.0])


SIZES = [(n, banded.TILE) for n in (1, 2, WIDTH - 1, WIDTH, WIDTH + 1, 3 * WIDTH, 5 * WIDTH + 7)]
SIZES += [
    (5 * WIDTH + 7, WIDTH),
    (5 * WIDTH + 7, WIDTH // 2 + 1),
]  # many tiles, for every part of the work


@pytest.fixture(params=SIZES)
def matrix(request, rng, monkeypatch):
    n, tile = request.param
    monkeypatch.setattr(banded, "TILE", tile)
    design = rng.standard_normal((n, n))
    return np.asfortranarray(design @ design.T / n)


def dense(form):
    return form._sparse().toarray()


def test_the_form_is_the_matrix(matrix):
    form = to_band(matrix.copy(order="F"), None)
    n = len(matrix)
    assert np.abs(form.basis.T @ form.basis - np.eye(n)).max() < 1e-13 * max(n, 10)
    assert np.abs(form.basis @ dense(form) @ form.basis.T - matrix).max() < 1e-13 * max(n, 10)
    band = dense(form)
    assert not np.tril(band, -2 * WIDTH).any()


def test_threads_change_no_bit(rng, monkeypatch):
    design = rng.standard_normal((700, 700))
    matrix, y = np.asfortranarray(design @ design.T), rng.standard_normal((700, 1))
    found = []
    for threads in ("1", "2", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        sweep = BandedSweep.of(to_band(matrix.copy(order="F"), None), y)
        found.append((sweep.complements(ALPHAS), sweep.form.basis))
    assert all(
        np.array_equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def test_only_the_lower_triangle_is_read(matrix, rng):
    noisy = np.asfortranarray(np.tril(matrix) + np.triu(rng.standard_normal(matrix.shape), 1))
    form, plain = to_band(noisy, None), to_band(matrix.copy(order="F"), None)
    assert np.allclose(dense(form), dense(plain), atol=1e-12)


def test_solutions_and_leverages(matrix, rng):
    y = rng.standard_normal((len(matrix), 3))
    sweep = BandedSweep.of(to_band(matrix.copy(order="F"), None), y)
    inverses = [np.linalg.inv(matrix + alpha * np.eye(len(matrix))) for alpha in ALPHAS]
    for i, alpha in enumerate(ALPHAS):
        assert np.allclose(
            sweep.solve(ALPHAS)[0][i],
            inverses[i] @ y,
            rtol=1e-8,
            atol=1e-8 * np.abs(inverses[i] @ y).max(),
        )
        assert np.allclose(sweep.complements(ALPHAS)[i], alpha * inverses[i].diagonal(), rtol=1e-9)


def test_a_matrix_of_low_rank_and_an_empty_one(rng):
    n = 2 * WIDTH + 5
    column = rng.standard_normal((n, 1))
    for matrix in (column @ column.T, np.zeros((n, n))):
        form = to_band(np.asfortranarray(matrix), None)
        assert np.allclose(form.basis @ dense(form) @ form.basis.T, matrix, atol=1e-12 * n)


def test_largest_eigenvalue(matrix):
    form = to_band(matrix.copy(order="F"), None)
    assert form.largest() == pytest.approx(np.linalg.eigvalsh(matrix).max(), rel=1e-10)


def test_not_positive_is_told(rng):
    matrix = np.asfortranarray(np.diag(np.linspace(-1.0, 1.0, 100)))
    sweep = BandedSweep.of(to_band(matrix, None), np.ones((100, 1)))
    assert sweep.complements(np.array([0.5])) is None
    with pytest.raises(np.linalg.LinAlgError, match="positive definite"):
        sweep.solve(np.array([0.5]))


def test_float32_that_overflows_is_repeated_in_float64(rng, monkeypatch):
    monkeypatch.setattr(ridge_gram, "MIN_ROWS_FOR_A_BAND", 1)
    design = rng.standard_normal((60, 60))
    gram, y = design @ design.T * 1e37, rng.standard_normal((60, 1))
    fit = gram_path(gram, y, [1e36, 1e37], dtype=np.float32)
    assert fit.factor.factor.form.basis.dtype == np.float64
    assert np.isfinite(fit.errors).all()
    with np.errstate(all="ignore"):
        assert to_band(np.full((60, 60), np.inf, np.float32, order="F"), None) is None


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_path_does_not_depend_on_the_form(rng, monkeypatch, fit_intercept, weighted):
    n = 3 * WIDTH + 11
    design = rng.standard_normal((n, 40))
    gram, y = design @ design.T, rng.standard_normal((n, 2)) + 5
    weights = rng.uniform(0.5, 2.0, n) if weighted else None
    alphas = np.array([1e-6, 1e-2, 1.0, 100.0])
    options = {"fit_intercept": fit_intercept, "weights": weights}
    plain = gram_path(gram, y, alphas, **options)
    monkeypatch.setattr(ridge_gram, "MIN_ROWS_FOR_A_BAND", 1)
    monkeypatch.setattr(banded, "ROWS", 50)
    form = gram_path(gram, y, alphas, **options)
    assert (plain.route, form.route) == ("tridiagonal", "banded")
    assert np.allclose(form.errors, plain.errors, rtol=1e-7)
    assert np.allclose(form.at(2).coef, plain.at(2).coef, rtol=1e-7)
    assert np.allclose(form.at(2).intercept, plain.at(2).intercept)
    # a default grid, penalties below the floor, and a matrix with a negative eigenvalue
    assert gram_path(gram, y, None, **options).route == "banded"
    assert gram_path(gram, y, [0.0, 1.0], **options).route == "eigen"
    indefinite = gram - 1e-3 * np.eye(n)
    found = gram_path(indefinite, y, alphas[1:] * 0.05, **options)
    monkeypatch.setattr(ridge_gram, "MIN_ROWS_FOR_A_BAND", 10**9)
    wanted = gram_path(indefinite, y, alphas[1:] * 0.05, **options)
    assert found.route == wanted.route == "eigen"
    assert np.allclose(found.errors, wanted.errors, rtol=1e-6)
