"""The layer of the paper: zero-mean Gaussian heads, tokens and queries as they are given.

Most tests use the default settings. These helpers are for those that compare with a formula, which
needs a layer about which nothing is chosen.
"""

from typing import Any

import keyhole as kh


def paper_regressor(n_heads: Any = "auto", **settings: Any) -> kh.AttentionRegressor:
    """An `AttentionRegressor` that leaves tokens, queries and head distribution alone."""
    return kh.AttentionRegressor(
        n_heads, heads=kh.GaussianHeads(), scaling="none", query="given", **settings
    )


def paper_classifier(n_heads: Any = "auto", **settings: Any) -> kh.AttentionClassifier:
    """An `AttentionClassifier` that leaves tokens, queries and head distribution alone."""
    return kh.AttentionClassifier(
        n_heads, heads=kh.GaussianHeads(), scaling="none", query="given", **settings
    )
