import numpy as np
import pytest

from keyhole.ridge import matrices as tiled


@pytest.fixture(params=[(4, 3), (4, 100), (100, 100)], ids=["many tiles", "one tile", "whole"])
def sizes(request, monkeypatch):
    largest, side = request.param
    monkeypatch.setattr(tiled, "LARGEST", largest)
    monkeypatch.setattr(tiled, "SIDE", side)


@pytest.fixture
def positive(rng):
    a = rng.normal(size=(17, 40))
    return a @ a.T


def test_the_factor_and_its_inverse_take_the_place_of_the_lower_triangle(sizes, positive, rng):
    matrix = np.asfortranarray(positive)
    assert tiled.factorise_lower(matrix)
    factor = np.tril(matrix)
    np.testing.assert_allclose(factor @ factor.T, positive, rtol=1e-10)
    y = rng.normal(size=(17, 2))
    np.testing.assert_allclose(tiled.solve_factor(matrix, y), np.linalg.solve(positive, y), rtol=1e-8)
    tiled.invert_lower(matrix)
    np.testing.assert_allclose(np.tril(matrix) @ factor, np.eye(17), atol=1e-10)


def test_an_indefinite_matrix_has_no_factor(sizes, positive):
    positive[9, 9] = -1.0
    assert not tiled.factorise_lower(np.asfortranarray(positive))
