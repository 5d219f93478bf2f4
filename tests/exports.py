"""Models with finitely many heads, their samples, and what both exports are compared by."""

from pathlib import Path

import numpy as np

import keyhole as kh

FIXTURES = Path(__file__).parents[0] / "fixtures" / "models-0.1.0"
FINITE = [
    "classifier-heads",
    "extras-heads",
    "identity-heads",
    "learned-heads",
    "learned-hops",
    "learned-hops-classifier",
    "norm-ball-classifier",
    "norm-ball-outputs",
    "query-dimension",
    "regressor-lean-float32",
    "regressor-outputs",
    "regressor-paper",
    "regressor-query-key",
]
"""Models of 0.1.0 with finitely many heads: no fit is needed to compare them."""


def stored_samples(name):
    """The samples that are stored beside a model."""
    arrays = np.load(FIXTURES / f"{name}.npz")
    keys = np.split(arrays["keys"], np.cumsum(arrays["lengths"])[:-1])
    query = arrays.get("query")
    extras = arrays.get("extras")
    return kh.SetBatch(keys, query, extras)


def padded(sets, dtype=np.float64):
    """Keys (n, N, d), padded with NaN, and the mask of those that are there."""
    mask = np.arange(sets.lengths.max()) < sets.lengths[:, None]
    keys = np.full((*mask.shape, sets.dim), np.nan, dtype)
    keys[mask] = sets.tokens
    return keys, mask


def selecting_model(sets, n_keys, **settings):
    """A small regressor with two outputs that sees some keys of each set; nothing is open."""
    rng = np.random.default_rng(0)
    chosen = {
        "activation": "relu",
        "scaling": "standard",
        "query": "given",
        "pooling": "mean",
        "extras_scale": 1.0,
    }
    model = kh.AttentionRegressor(
        6, kh.GaussianHeads(), 0.1, keys=n_keys, random_state=0, **{**chosen, **settings}
    )
    return model.fit(sets, rng.normal(size=(len(sets), 2)))


def scores_of(model, sets):
    if hasattr(model, "decision_function"):
        return model.decision_function(sets)
    return model.predict(sets)


def assert_close(result, expected, tolerance):
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * np.abs(expected).max())
