"""Attention features as a scikit-learn transformer."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils.validation import check_is_fitted

from keyhole.attention.activations import Activation
from keyhole.attention.features import attention_features
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.data.sets import PooledSets, SetBatch
from keyhole.data.tokens import TokenRule
from keyhole.estimators.validation import (
    as_distribution,
    as_dtype,
    as_finite_n_heads,
    as_seed,
    as_sets,
)
from keyhole.registry import ACTIVATIONS, QUERIES, SCALINGS


class AttentionFeatures(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Turn sets with a query into the features of M frozen random attention heads.

    φ_m(x) = M^{-1/2} (1/N) Σ_i σ(x~_0ᵀ W_m x~_i) x~_i, so M·(d+1) columns, ready for any learner on
    tables. The plain version is `keyhole.textbook.features`.

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
        What is done to tokens first, learned on the training sets: nothing; each to length one; or
        every coordinate centred and divided by √d times its standard deviation. There is no "auto":
        choosing needs a target.
    query : "given", "mean" or "each"
        The query of each set, or the constant one; the mean of its keys; each key in turn, features
        averaged.

    Attributes
    ----------
    tokens_ : TokenRule
        Scaling and query used; extras are left as they are.
    drawn_heads_ : HeadDraw
        The heads, regenerated from their seed as needed.
    heads_ : head distribution
        What they were drawn from.
    activation_ : str
        The activation of the fit.
    dtype_ : dtype
        The precision of the fit.
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
    >>> bool(
    ...     model.fit(kh.SetBatch(bags[:150]), far[:150]).score(kh.SetBatch(bags[150:]), far[150:])
    ...     > 0.8
    ... )
    True
    """

    _parameter_constraints: ClassVar[dict[str, list[Any]]] = {
        "n_heads": [Interval(Integral, 1, None, closed="left"), Real],
        "heads": [HasMethods("sample"), None],
        "activation": [StrOptions(set(ACTIVATIONS))],
        "random_state": ["random_state", np.random.Generator],
        "dtype": [StrOptions({"float64", "float32"}), type, np.dtype],
        "scaling": [StrOptions(set(SCALINGS))],
        "query": [StrOptions(set(QUERIES))],
    }

    def __init__(
        self,
        n_heads: int = 512,
        heads: HeadDistribution | None = None,
        activation: Activation = "relu",
        random_state: int | np.random.RandomState | np.random.Generator | None = None,
        *,
        dtype: Literal["float64", "float32"] | type | np.dtype = "float64",
        scaling: Literal["none", "sphere", "standard"] = "none",
        query: Literal["given", "mean", "each"] = "given",
    ) -> None:
        self.n_heads = n_heads
        self.heads = heads
        self.activation = activation
        self.random_state = random_state
        self.dtype = dtype
        self.scaling = scaling
        self.query = query

    def fit(self, X: Any, y: Any = None) -> AttentionFeatures:
        """Draw the heads.

        ``X`` gives the token dimension, and the means and deviations of scaling="standard".
        """
        self._validate_params()
        n_heads = as_finite_n_heads(
            self.n_heads,
            "AttentionFeatures: infinitely many heads have infinitely many features. Use "
            "kh.attention_kernel, or AttentionRegressor(n_heads=math.inf).",
        )
        batch = as_sets(self, X, reset=True)
        heads = as_distribution(self.heads)

        # the token rule; means and deviations are learned on the host
        learned_on = batch
        if self.scaling == "standard":
            learned_on = batch.numpy()
        rule = TokenRule.learn(learned_on.with_extras(None), self.scaling, self.query)
        self.tokens_ = rule.with_hops_of(heads)

        # the heads, and the parameters that `transform` needs as they are now
        self.heads_ = heads
        self.drawn_heads_ = HeadDraw(
            heads, n_heads, batch.dim, as_seed(self.random_state), self.tokens_.query_dim(batch)
        )
        self.activation_ = self.activation
        self.dtype_ = as_dtype(self.dtype)
        return self

    def transform(self, X: Any) -> Float[np.ndarray, "n p"]:
        """Return the features, (n, M·D): column m·D + e is coordinate e of head m.

        Extras, as they are, come last.
        """
        check_is_fitted(self)
        batch: SetBatch | PooledSets = as_sets(self, X, reset=False)

        # tokens are prepared on the host; if there is nothing to do, tensors stay on their device
        rule = self.tokens_
        leaves_tokens_alone = (rule.scaling, rule.query, rule.hops) == ("none", "given", ())
        if not leaves_tokens_alone:
            batch = rule.apply(batch.sets.numpy())
        features = attention_features(
            batch.with_extras(None), self.drawn_heads_, self.activation_, dtype=self.dtype_
        )
        if batch.extras is None:
            return features
        return np.concatenate([features, batch.extras], axis=1, dtype=features.dtype)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    @property
    def _n_features_out(self) -> int:
        return int(self.drawn_heads_.n_heads * (self.drawn_heads_.dim + 1) + self.n_extras_in_)
