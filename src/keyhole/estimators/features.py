"""Attention features as a scikit-learn transformer."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from keyhole._checks import check_choice
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDraw
from keyhole.data.sets import PooledSets, SetBatch
from keyhole.data.tokens import QUERIES, SCALINGS, TokenRule
from keyhole.estimators.base import (
    LESS_FOR_A_PREDICTION,
    SetEstimator,
    explained_memory_errors,
    finite_heads,
)
from keyhole.estimators.inputs import (
    as_distribution,
    as_seed,
    as_sets,
    check_layer_options,
    check_random_state,
)
from keyhole.layer import beside


class AttentionFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SetEstimator):
    """Turn sets with a query into the features of M frozen random attention heads.

    φ_m(x) = M^{-1/2} (1/N) Σ_i σ(x~_0ᵀ W_m x~_i) x~_i, so M·(d+1) columns, ready for any learner on tables.

    Parameters
    ----------
    n_heads : int
        M.
    heads : head distribution, optional
        ``kh.GaussianHeads()`` if None.
    activation : str
        "relu", "softmax", "linear", "square", "step" or "exp".
    random_state : int, RandomState, Generator or None
        An integer s means the heads ``heads.sample(n_heads, d, s)``.
    dtype : "float64" or "float32"
        Precision of the features.
    scaling : "none", "sphere" or "standard"
        What is done to tokens first, learned on the training sets: nothing; each to length one; or every coordinate
        centred and divided by √d times its standard deviation. There is no "auto": choosing needs a target.
    query : "given", "mean" or "each"
        The query of each set, or the constant one; the mean of its keys; each key in turn, features averaged.

    Attributes
    ----------
    tokens_ : TokenRule
        Scaling and query used; extras are left as they are.
    drawn_heads_ : HeadDraw
        The heads, regenerated from their seed as needed.
    activation_, dtype_ : str
        Those of the fit: other parameters take effect with the next one.
    n_features_in_ : int
        Token dimension d.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> import keyhole as kh
    >>> rng = np.random.default_rng(0)
    >>> bags = [rng.normal(size=(rng.integers(2, 9), 3)) for _ in range(200)]
    >>> far = np.array([np.linalg.norm(bag, axis=1).mean() > 1.6 for bag in bags])
    >>> model = make_pipeline(kh.AttentionFeatures(64, random_state=0), LogisticRegression(C=100))
    >>> bool(model.fit(kh.SetBatch(bags[:150]), far[:150]).score(kh.SetBatch(bags[150:]), far[150:]) > 0.8)
    True
    """

    def __init__(
        self,
        n_heads: Any = 512,
        heads: Any = None,
        activation: Any = "relu",
        random_state: Any = None,
        *,
        dtype: Any = "float64",
        scaling: Any = "none",
        query: Any = "given",
    ) -> None:
        self._store_parameters(locals())

    def _check_parameters(self) -> None:
        """Raise for a parameter that no fit takes, whatever the samples."""
        check_layer_options(self.activation, self.dtype)
        check_choice(self.scaling, "scaling", SCALINGS)
        check_choice(self.query, "query", QUERIES)
        check_random_state(self.random_state)
        as_distribution(self.heads)
        self._finite_heads()

    def _finite_heads(self) -> int:
        """The number of heads, or an error that says why it must be finite."""
        return finite_heads(
            self.n_heads,
            "AttentionFeatures: infinitely many heads have infinitely many columns. Use kh.attention_kernel, or "
            "AttentionRegressor(n_heads=math.inf).",
        )

    def fit(self, X: Any, y: Any = None) -> AttentionFeatures:
        """Draw the heads. ``X`` gives the token dimension, and the means and deviations of scaling="standard"."""
        self._check_parameters()
        activation, dtype = check_layer_options(self.activation, self.dtype)
        n_heads = self._finite_heads()
        batch = as_sets(self, X, reset=True)
        learned_on = batch.numpy() if self.scaling == "standard" else batch
        distribution = as_distribution(self.heads)
        self.tokens_ = TokenRule.learn(
            learned_on.with_extras(None), self.scaling, self.query
        ).with_hops_of(distribution)
        query_dim = self.tokens_.query_dim(batch)
        self.drawn_heads_ = HeadDraw(
            distribution, n_heads, batch.dim, as_seed(self.random_state), query_dim
        )
        self.activation_ = activation
        self.dtype_ = dtype
        return self

    def transform(self, X: Any) -> Float[np.ndarray, "n p"]:
        """Return the features, (n, M·D): column m·D + e is coordinate e of head m; extras, as they are, come last."""
        check_is_fitted(self)
        batch: SetBatch | PooledSets = as_sets(self, X, reset=False)
        if (self.tokens_.scaling, self.tokens_.query, self.tokens_.hops) != (
            "none",
            "given",
            (),
        ):  # done in NumPy
            batch = self.tokens_.apply(batch.sets.numpy())
        with explained_memory_errors("transform", batch, None, LESS_FOR_A_PREDICTION):
            features = attention_features(
                batch, self.drawn_heads_, self.activation_, dtype=self.dtype_
            )
            return features if batch.extras is None else beside(features, batch.extras)

    @property
    def _n_features_out(self) -> int:
        return int(self.drawn_heads_.n_heads * (self.drawn_heads_.dim + 1) + self.n_extras_in_)
