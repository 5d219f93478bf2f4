import numpy as np

import keyhole as kh
from keyhole.targets import Correlation, QueryPower, RotatedCorrelation, TokenPower, sphere_sets


def test_families_agree_with_their_formulas_on_ragged_sets(rng):
    d = 5
    keys = [rng.standard_normal((n, d)) for n in (1, 4, 2, 7)]
    query = rng.standard_normal((4, d))
    batch = kh.SetBatch(keys, query)
    beta = rng.standard_normal(d)
    rotated = RotatedCorrelation(0.3, d, seed=1, beta=beta)
    for i, (k, q) in enumerate(zip(keys, query, strict=True)):
        want = {
            QueryPower(3, d, beta): (beta @ q) ** 3,
            TokenPower(2, d, beta): np.mean((k @ beta) ** 2),
            Correlation(2, d, beta): np.mean((k @ q) ** 2 * (k @ beta)),
            rotated: np.mean((k @ rotated.rotation.T @ q) ** 3 * (k @ beta)),
        }
        for target, value in want.items():
            assert np.isclose(target(batch)[i], value, rtol=1e-12)


def test_sphere_sets_nest_and_are_unit(seed):
    batch = sphere_sets(7, 3, 4, seed)
    assert np.allclose(np.linalg.norm(batch.tokens, axis=1), 1)
    assert np.array_equal(sphere_sets(3, 3, 4, seed).tokens, batch[:3].tokens)
