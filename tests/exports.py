"""Models with finitely many heads, their samples, and what both exports are compared by."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

import keyhole as kh
from keyhole.attention.heads import FittedHeads

DIM = 3
N_TRAIN = 40
N_NEW = 7
PAPER = {"scaling": "none", "query": "given", "random_state": 0}


def draw_sets(n: int, *, query_dim: int = DIM, n_extras: int = 0, seed: int = 0) -> kh.SetBatch:
    """Sets of one to five keys."""
    rng = np.random.default_rng([n, query_dim, n_extras, seed])
    keys = [rng.normal(size=(rng.integers(1, 6), DIM)) for _ in range(n)]
    query = rng.normal(size=(n, query_dim)) if query_dim else None
    extras = rng.normal(size=(n, n_extras)) if n_extras else None
    return kh.SetBatch(keys, query, extras)


def first_coordinate(sets: kh.SetBatch) -> np.ndarray:
    """The mean of the first coordinate of each set."""
    return np.array([one.tokens[:, 0].mean() for one in sets])


def three_labels(sets: kh.SetBatch) -> np.ndarray:
    """Labels by the size of the first coordinate."""
    return np.array(["high", "low", "middle"])[np.digitize(first_coordinate(sets), [-0.3, 0.3])]


def learned_heads(n_hops: int) -> FittedHeads:
    """Heads as `LearnedHeads` leaves them: means of their own, after hops that extend the query."""
    rng = np.random.default_rng(n_hops)
    hops = []
    query_width = DIM + 1
    for _ in range(n_hops):
        hops.append(rng.normal(size=(1, query_width, DIM + 1)))
        query_width += DIM
    return FittedHeads(rng.normal(size=(2, query_width, DIM + 1)), 0.3, hops_=tuple(hops))


def regressor(heads: Any = None, *, n_extras: int = 0, query_dim: int = DIM, **settings: Any):
    """A regressor of 12 heads on samples of its kind, and new samples."""
    sets = draw_sets(N_TRAIN, query_dim=query_dim, n_extras=n_extras)
    new = draw_sets(N_NEW, query_dim=query_dim, n_extras=n_extras, seed=1)
    model = kh.AttentionRegressor(12, heads or kh.GaussianHeads(), **(PAPER | settings))
    return model.fit(sets, first_coordinate(sets)), new


def classifier(heads: Any = None, **settings: Any):
    sets = draw_sets(N_TRAIN)
    model = kh.AttentionClassifier(12, heads or kh.GaussianHeads(), **(PAPER | settings))
    return model.fit(sets, three_labels(sets)), draw_sets(N_NEW, seed=1)


def regressor_of_outputs():
    sets = draw_sets(N_TRAIN)
    y = first_coordinate(sets)
    model = kh.AttentionRegressor(12, random_state=0).fit(sets, np.column_stack([y, np.cos(y)]))
    return model, draw_sets(N_NEW, seed=1)


def norm_ball(estimator: type, y_of: Callable, **settings: Any):
    sets = draw_sets(N_TRAIN, n_extras=1)
    model = estimator(20, group_radius=3.0, ball_radius=1.0, random_state=0, **settings)
    return model.fit(sets, y_of(sets)), draw_sets(N_NEW, n_extras=1, seed=1)


FINITE = {
    "default": lambda: regressor(),
    "matrix of means, float32": lambda: regressor(
        kh.GaussianHeads(mean=np.arange(16.0).reshape(4, 4) / 8, scale=0.3), dtype="float32"
    ),
    "query-key": lambda: regressor(kh.QueryKeyHeads(rank=2)),
    "extras": lambda: regressor(n_extras=2),
    "query of another dimension": lambda: regressor(query_dim=2, scaling="standard"),
    "identity": lambda: regressor(kh.IdentityHeads(strengths=(0.0, 3.0)), activation="softmax"),
    "learned": lambda: regressor(learned_heads(0), activation="softmax"),
    "hops": lambda: regressor(learned_heads(2), activation="softmax"),
    "classifier": lambda: classifier(loss="squared_error"),
    "classifier of log loss": lambda: classifier(loss="log_loss"),
    "classifier with hops": lambda: classifier(learned_heads(1), activation="softmax"),
    "several outputs": regressor_of_outputs,
    "norm ball": lambda: norm_ball(kh.NormBallRegressor, first_coordinate, loss="squared"),
    "norm ball classifier": lambda: norm_ball(
        kh.NormBallClassifier, three_labels, scaling="standard", query="mean"
    ),
}
"""What every export must carry: a model with finitely many heads of each kind."""


@cache
def finite_model(name: str) -> tuple[Any, kh.SetBatch]:
    """A fitted model, and samples that it has not seen."""
    return FINITE[name]()


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
