"""What users pass to `fit` and `predict`, checked and turned into sets, columns, weights, penalties and seeds."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import validate_data

from keyhole._checks import check_choice, check_count, check_float_array, check_number, check_seed
from keyhole.activations import check_activation
from keyhole.heads import GaussianHeads, HeadLaw
from keyhole.sets import SetBatch


def as_sets(estimator: BaseEstimator, X: Any, *, reset: bool) -> SetBatch:
    """Return ``X`` as a SetBatch, and record (``reset``) or compare its dimension and whether it has queries.

    ``X`` is a SetBatch; or tokens as `SetBatch.from_tokens` takes them; or an (n, d) table, one key per set.
    """
    if isinstance(X, SetBatch):
        batch = X
        if len(batch) == 0:
            raise ValueError("`X` must hold at least one set: got a SetBatch of 0 sets (0 sample(s)).")
    elif _holds_token_arrays(X):
        batch = SetBatch.from_tokens(X)
    else:
        table = validate_data(estimator, X, reset=reset, dtype=(np.float64, np.float32))
        batch = SetBatch(table[:, None, :])
    has_query = batch.query is not None
    if reset:
        estimator.n_features_in_ = batch.dim
        estimator.has_query_ = has_query
        return batch
    if batch.dim != estimator.n_features_in_:
        raise ValueError(
            f"X has {batch.dim} features, but {type(estimator).__name__} is expecting "
            f"{estimator.n_features_in_} features as input: tokens must have the dimension they had in fit."
        )
    if has_query != estimator.has_query_:
        fitted, given = ("with", "without") if estimator.has_query_ else ("without", "with")
        raise ValueError(
            f"`X` must carry queries exactly if the training sets did: {type(estimator).__name__} was fitted "
            f"{fitted} queries and got sets {given}. Build both batches the same way."
        )
    return batch


def _holds_token_arrays(X: Any) -> bool:
    """Whether ``X`` is three levels deep: sets of tokens of coordinates."""
    if hasattr(X, "iloc") or hasattr(X, "toarray"):
        return False  # a table: a data frame or a sparse matrix
    if hasattr(X, "ndim") and X.ndim != 1:
        return bool(X.ndim == 3)
    if not hasattr(X, "__len__") or isinstance(X, (str, bytes, dict)) or len(X) == 0:
        return False
    try:
        return np.ndim(X[0]) == 2
    except (ValueError, TypeError, KeyError, IndexError):
        return False


def as_columns(estimator: BaseEstimator, y: Any, batch: Sized) -> Float[np.ndarray, "n t"]:
    """Return a regression target as float64 columns, one per output."""
    check_given(estimator, y)
    y = np.asarray(y)
    if y.ndim not in (1, 2):
        raise ValueError(f"`y` must have shape (n,) or (n, outputs): got shape {y.shape}.")
    y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y", estimator=estimator)
    check_lengths(batch, y, "y")
    return np.asarray(y.reshape(len(y), -1))


def check_given(estimator: BaseEstimator, y: Any) -> None:
    """Raise if there is no target."""
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None.")


def check_lengths(batch: Sized, values: Any, name: str) -> None:
    """Raise unless ``values`` has one entry per set."""
    if len(values) != len(batch):
        raise ValueError(
            f"`{name}` must have one entry per set: got inconsistent numbers of samples, "
            f"{len(batch)} sets and {len(values)} entries of `{name}`."
        )


def as_weights(sample_weight: Any, batch: Sized) -> Float[np.ndarray, " n"] | None:
    """Return checked sample weights, or None."""
    if sample_weight is None:
        return None
    sample_weight = np.asarray(sample_weight)
    if sample_weight.ndim == 0:
        sample_weight = np.full(len(batch), sample_weight)
    if sample_weight.ndim != 1:
        # "1D" is what scikit-learn's own checks look for
        raise ValueError(
            "Sample weights must be 1D array or scalar: `sample_weight` has shape "
            f"{sample_weight.shape} for {len(batch)} sets."
        )
    weights = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
    check_lengths(batch, weights, "sample_weight")
    if weights.min() < 0:
        i = int(weights.argmin())
        raise ValueError(
            f"`sample_weight` must not be negative: sample {i} has weight {weights[i]:g}. Use 0 to leave a sample out."
        )
    if not weights.any():
        raise ValueError("`sample_weight` must have a positive entry: all weights are zero.")
    return np.asarray(weights)


def as_penalties(alpha: Any) -> Float[np.ndarray, " a"] | None:
    """Return the penalties to choose from, or None for the automatic grid of ``alpha="loo"``."""
    if isinstance(alpha, str):
        if alpha != "loo":
            raise ValueError(f"`alpha` must be 'loo', a number or a sequence of numbers: got {alpha!r}.")
        return None
    if np.ndim(alpha) == 0:
        return np.array([check_number(alpha, "alpha", minimum=0.0)])
    penalties = check_float_array(alpha, "alpha").astype(np.float64)
    if penalties.ndim != 1 or len(penalties) == 0:
        raise ValueError(f"`alpha` must be a non-empty sequence: got shape {penalties.shape}.")
    for i, penalty in enumerate(penalties):
        check_number(float(penalty), f"alpha[{i}]", minimum=0.0)
    return penalties


def as_heads(n_heads: Any) -> int | None:
    """Return the number of heads, or None for infinitely many."""
    if isinstance(n_heads, (float, np.floating)) and math.isinf(n_heads) and n_heads > 0:
        return None
    try:
        return check_count(n_heads, "n_heads")
    except TypeError:
        raise TypeError(
            f"`n_heads` must be a positive integer, or math.inf for the exact kernel: got {n_heads!r}."
        ) from None


def as_law(law: Any) -> HeadLaw:
    """Return the law of the heads; None means zero-mean Gaussian heads."""
    if law is None:
        return GaussianHeads()
    if isinstance(law, type) or not isinstance(law, HeadLaw):
        raise TypeError(f"`law` must be a law of heads such as kh.GaussianHeads(mean=1.0) or None: got {law!r}.")
    return law


def as_seed(random_state: Any) -> int:
    """Return the seed of the heads: an integer as it is, otherwise one drawn from the generator or from entropy."""
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        return check_seed(random_state, "random_state")
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1, np.uint32)[0] >> 1)
    return int(check_random_state(random_state).randint(2**31 - 1))


def check_layer_options(activation: Any, dtype: Any) -> tuple[str, str]:
    """Return the activation and the dtype of the features, checked."""
    if not isinstance(dtype, str):
        dtype = np.dtype(dtype).name
    return check_activation(activation), check_choice(dtype, "dtype", ("float64", "float32"))
