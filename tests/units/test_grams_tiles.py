import numpy as np
import pytest

from keyhole.ridge import matrices as grams


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_tiles_add_up_to_the_whole(dtype, order, rng, monkeypatch):
    monkeypatch.setattr(grams, "TILE", 7)
    factor = np.asarray(rng.normal(size=(23, 5)), dtype=dtype, order=order)
    total = np.asfortranarray(rng.normal(size=(23, 23)))
    expected = np.tril(total + factor.astype(float) @ factor.astype(float).T)
    grams.add_outer(total, factor)
    np.testing.assert_allclose(np.tril(total), expected, atol=1e-12 if dtype == "float64" else 1e-5)
