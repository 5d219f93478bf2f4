"""Matrices too large to copy: sums of products, and Cholesky, in tiles."""

import numpy as np
import pytest

from keyhole.solve import matrices


@pytest.fixture(params=[(4, 3), (4, 100), (100, 100)], ids=["many tiles", "one tile", "whole"])
def sizes(request, monkeypatch):
    largest, side = request.param
    monkeypatch.setattr(matrices, "LARGEST", largest)
    monkeypatch.setattr(matrices, "SIDE", side)


@pytest.fixture
def positive(rng):
    a = rng.normal(size=(17, 40))
    return a @ a.T


def test_the_factor_and_its_inverse_take_the_place_of_the_lower_triangle(sizes, positive, rng):
    matrix = np.asfortranarray(positive)
    assert matrices.factorise_lower(matrix)
    factor = np.tril(matrix)
    np.testing.assert_allclose(factor @ factor.T, positive, rtol=1e-10)
    y = rng.normal(size=(17, 2))
    np.testing.assert_allclose(
        matrices.solve_factor(matrix, y), np.linalg.solve(positive, y), rtol=1e-8
    )
    matrices.invert_lower(matrix)
    np.testing.assert_allclose(np.tril(matrix) @ factor, np.eye(17), atol=1e-10)


def test_an_indefinite_matrix_has_no_factor(sizes, positive):
    positive[9, 9] = -1.0
    assert not matrices.factorise_lower(np.asfortranarray(positive))


@pytest.mark.parametrize("place", [0, 9, 16])
def test_a_matrix_that_has_overflowed_has_no_factor(sizes, positive, place):
    """LAPACK takes the root of infinity for a pivot like any other."""
    positive[place, place] = np.inf
    assert not matrices.factorise_lower(np.asfortranarray(positive))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_tiles_add_up_to_the_whole(dtype, order, rng, monkeypatch):
    monkeypatch.setattr(matrices, "TILE", 7)
    factor = np.asarray(rng.normal(size=(23, 5)), dtype=dtype, order=order)
    total = np.asfortranarray(rng.normal(size=(23, 23)))
    expected = np.tril(total + factor.astype(float) @ factor.astype(float).T)
    matrices.add_outer(total, factor)
    np.testing.assert_allclose(np.tril(total), expected, atol=1e-12 if dtype == "float64" else 1e-5)
