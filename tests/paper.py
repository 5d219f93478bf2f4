"""The layer of the paper: zero-mean Gaussian heads, tokens and queries as they are given.

Most tests use the default settings. These helpers are for those that compare with a formula, which
needs a layer about which nothing is chosen.
"""

from typing import Any

import keyhole as kh

PAPER_LAYER = {
    "heads": kh.GaussianHeads(),
    "activation": "relu",
    "pooling": "mean",
    "scaling": "none",
    "query": "given",
}


def paper_regressor(n_heads: Any = "auto", **settings: Any) -> kh.AttentionRegressor:
    """An `AttentionRegressor` that leaves tokens, queries and head distribution alone."""
    return kh.AttentionRegressor(n_heads, **(PAPER_LAYER | settings))


def paper_classifier(n_heads: Any = "auto", **settings: Any) -> kh.AttentionClassifier:
    """An `AttentionClassifier` that leaves tokens, queries and heads alone: by ridge."""
    return kh.AttentionClassifier(n_heads, **(PAPER_LAYER | {"loss": "squared_error"} | settings))
