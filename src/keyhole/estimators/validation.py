"""What users pass to `fit` and `predict`, checked.

Samples, outputs, weights, groups, penalties, heads, seeds.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import validate_data

from keyhole._checks import (
    as_sequence,
    check_choice,
    check_count,
    check_float_array,
    check_lengths,
    check_no_mask,
    check_number,
    check_seed,
    check_weight_sizes,
    column_names,
    is_table,
)
from keyhole.attention.heads import GaussianHeads, HeadDistribution
from keyhole.data.layout import SET_NAMES, Dataset
from keyhole.data.sets import SetBatch, SetGroups, check_sets, samples_in


def as_sets(estimator: BaseEstimator, X: Any, *, reset: bool) -> SetBatch:
    """Return ``X`` as a SetBatch: `as_samples` where a sample is one set."""
    samples = as_samples(estimator, X, reset=reset)
    check_sets(samples, "X")
    return samples.sets


def as_samples(estimator: BaseEstimator, X: Any, *, reset: bool) -> SetBatch | SetGroups:
    """Return ``X`` as sets, or as the groups of sets it is.

    ``reset`` records what samples are like, as in `fit`; otherwise they are checked against that.
    """
    samples: Any = samples_in(X)
    if samples is None:
        samples = _as_sets(estimator, X, reset=reset)
    else:
        _as_sets(estimator, samples.sets, reset=reset)
    _check_extras(estimator, samples, reset=reset)
    if reset:
        estimator.has_set_groups_ = isinstance(samples, SetGroups)
    return samples


def _check_extras(estimator: BaseEstimator, samples: SetBatch | SetGroups, *, reset: bool) -> None:
    """Record (``reset``) or compare the number of sample-level features."""
    count = 0
    if samples.extras is not None:
        count = samples.extras.shape[1]
    if reset:
        estimator.n_extras_in_ = count
    elif count != estimator.n_extras_in_:
        raise ValueError(
            f"X has {count} columns of extras, but {type(estimator).__name__} is expecting "
            f"{estimator.n_extras_in_}: samples must have the extras they had in fit. Pass them as "
            "SetBatch(keys, query, extras)."
        )


def _as_sets(estimator: BaseEstimator, X: Any, *, reset: bool) -> SetBatch:
    """Return ``X`` as a SetBatch; record (``reset``) or compare its dimension and its queries.

    ``X`` is a SetBatch; or n sets of keys without a query, as an array (n, N, d) or a list of
    arrays or data frames (N_i, d); or an (n, d) table, one key per set.
    """
    # whatever X is, as sets; names of columns are those of this fit
    X = as_sequence(X)
    if reset:
        vars(estimator).pop("feature_names_in_", None)
    if isinstance(X, SetBatch):
        batch = X
        if len(batch) == 0:
            raise ValueError(
                "`X` must hold at least one set: got a SetBatch of 0 sets (0 sample(s))."
            )
    elif _holds_token_arrays(X):
        batch = SetBatch(X)
        if is_table(X[0]):
            # scikit-learn's check of names, in their order; those of all sets are the same
            validate_data(estimator, X[0], reset=reset, skip_check_array=True)
    else:
        batch = SetBatch(_as_numbers(estimator, X, reset=reset)[:, None, :])
        if reset and is_table(X):
            _warn_of_long_table(X)

    has_query = batch.query is not None
    n_query_features = 0
    if has_query:
        n_query_features = batch.query_dim

    # in fit: what sets are like is recorded
    if reset:
        estimator.n_features_in_ = batch.dim
        estimator.has_query_ = has_query
        estimator.n_query_features_in_ = n_query_features
        return batch

    # later: they must be like those of the fit
    if batch.dim != estimator.n_features_in_:
        raise ValueError(
            f"X has {batch.dim} features, but {type(estimator).__name__} is expecting "
            f"{estimator.n_features_in_} features as input: tokens must have the dimension they "
            "had in fit."
        )
    if has_query != estimator.has_query_:
        if has_query:
            difference = "was fitted without queries and got sets with"
        else:
            difference = "was fitted with queries and got sets without"
        raise ValueError(
            f"`X` must carry queries exactly if the training sets did: {type(estimator).__name__} "
            f"{difference}. Build both batches the same way."
        )
    if has_query and n_query_features != estimator.n_query_features_in_:
        raise ValueError(
            f"X has queries of {n_query_features} features, but {type(estimator).__name__} is "
            f"expecting {estimator.n_query_features_in_}: queries must have the dimension they had "
            "in fit."
        )
    return batch


def _warn_of_long_table(table: Any) -> None:
    """Say so if a table of one set per row has a column that looks like the name of a set."""
    for name in column_names(table):
        looks_like_set = str(name) in SET_NAMES or str(name).endswith("_id")
        if looks_like_set and len(set(np.asarray(table[name]).tolist())) < len(table[name]):
            warnings.warn(
                f"each row of `X` is a set of its own: column {name!r} repeats, and looks like the "
                "name of a set with several rows. If it is, read the table with "
                f"kh.read_table(table, set_id={name!r}, target=…), and fit to its sets.",
                UserWarning,
                stacklevel=2,
            )
            return


def _as_numbers(estimator: BaseEstimator, X: Any, *, reset: bool) -> Float[np.ndarray, "n d"]:
    """Return a table as an array of numbers, checked as scikit-learn checks tables."""
    # things that scikit-learn would refuse with a message about something else
    check_no_mask(X, "X")
    rule = "`X` must be sets, or a table of numbers"
    remedy = (
        "Pass an array, a data frame of numbers or a SetBatch; kh.read_table makes sets of tables "
        "with text."
    )
    fields = getattr(getattr(X, "dtype", None), "names", None)
    if fields:
        raise TypeError(f"{rule}: got an array of fields {', '.join(fields)}. {remedy}")
    if isinstance(X, dict) and not hasattr(X, "toarray"):  # a sparse matrix may be one too
        raise TypeError(f"{rule}: got a dict. {remedy}")
    if isinstance(X, (list, tuple)):
        _check_rows(X, rule, remedy)
    if isinstance(X, Dataset):
        raise TypeError(f"{rule}: got a Dataset. Pass its `sets`, and its `target` as y.")
    if is_table(X) and hasattr(X, "collect"):
        raise TypeError(
            f"`X` must be a table in memory: got {type(X).__name__}, which is not computed yet. "
            "Call its collect method."
        )

    # scikit-learn's own checks; where text is at fault, its column is named
    try:
        return np.asarray(validate_data(estimator, X, reset=reset, dtype=(np.float64, np.float32)))
    except (TypeError, ValueError) as error:
        text = _first_text(X)
        if text is None:
            raise
        column, value = text
        raise ValueError(
            f"`X` must hold numbers: column {column!r} holds {value!r:.40}. Leave it out or encode "
            "it; kh.read_table encodes text and dates as it makes sets of a table."
        ) from error


def _check_rows(rows: Sequence[Any], rule: str, remedy: str) -> None:
    """Raise where a list is no table: without rows, of dicts, or of rows of several lengths."""
    if len(rows) == 0:
        raise ValueError(f"{rule}: got an empty list. Pass at least one set.")
    if isinstance(rows[0], dict):
        raise TypeError(f"{rule}: got a list of dicts. {remedy}")
    flat_rows = [
        row for row in rows if isinstance(row, (list, tuple)) or getattr(row, "ndim", 0) == 1
    ]
    lengths = {len(row) for row in flat_rows}
    if len(lengths) > 1:
        raise ValueError(
            f"{rule}: got rows of {min(lengths)} to {max(lengths)} numbers. If each is a set of "
            "keys of one coordinate, pass it as x[:, None]."
        )


def _first_text(X: Any) -> tuple[str, str] | None:
    """The name of the first column of a table that holds text, and that text; None without text."""
    if not is_table(X):
        return None
    for name in column_names(X):
        values = np.asarray(X[name])
        may_hold_text = values.dtype.kind in "OUST"  # objects, and three kinds of strings
        if not may_hold_text:
            continue
        for value in values.tolist():
            if isinstance(value, str):
                return str(name), value
    return None


def _holds_token_arrays(X: Any) -> bool:
    """Whether ``X`` is three levels deep: sets of tokens of coordinates."""
    # a data frame or a sparse matrix has two levels
    if is_table(X) or hasattr(X, "toarray"):
        return False
    # an array; one of one axis may hold arrays as objects
    if hasattr(X, "ndim") and X.ndim != 1:
        return bool(X.ndim == 3)
    # a sequence: its first item says what all are
    if not hasattr(X, "__len__") or isinstance(X, (str, bytes, dict)) or len(X) == 0:
        return False
    try:
        return np.ndim(X[0]) == 2
    except (ValueError, TypeError, KeyError, IndexError):
        return False


def as_outputs(estimator: BaseEstimator, y: Any, batch: Sized) -> Float[np.ndarray, "n t"]:
    """Return a regression target as float64 columns, one per output."""
    check_target_given(estimator, y)
    y = np.asarray(y)
    if y.ndim not in (1, 2):
        raise ValueError(f"`y` must have shape (n,) or (n, outputs): got shape {y.shape}.")
    y = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y", estimator=estimator)
    check_lengths(batch, y, "y")
    return np.asarray(y.reshape(len(y), -1))


def check_target_given(estimator: BaseEstimator, y: Any) -> None:
    """Raise if there is no target, or one that is masked."""
    if y is None:
        raise ValueError(
            f"{type(estimator).__name__} requires y to be passed, but the target y is None."
        )
    check_no_mask(y, "y")


def as_weights(
    sample_weight: Any, batch: Sized, *, may_be_zero: bool = False
) -> Float[np.ndarray, " n"] | None:
    """Return checked sample weights, or None; all of them may be zero in one batch of several."""
    if sample_weight is None:
        return None

    # the form: one number for all samples, or one per sample
    check_no_mask(sample_weight, "sample_weight")
    sample_weight = np.asarray(sample_weight)
    if sample_weight.ndim == 0:
        sample_weight = np.full(len(batch), sample_weight)
    if sample_weight.ndim != 1:
        # "1D" is what scikit-learn's own checks look for
        raise ValueError(
            "Sample weights must be 1D array or scalar: `sample_weight` has shape "
            f"{sample_weight.shape} for {len(batch)} sets."
        )
    weights = check_array(
        sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight"
    )
    check_lengths(batch, weights, "sample_weight")

    # the numbers: none negative, not all zero, all within the range that floats leave room for
    if weights.min() < 0:
        sample = int(weights.argmin())
        raise ValueError(
            f"`sample_weight` must not be negative: sample {sample} has weight "
            f"{weights[sample]:g}. Use 0 to leave a sample out."
        )
    if not weights.any():
        if may_be_zero:
            return np.asarray(weights)
        raise ValueError("`sample_weight` must have a positive entry: all weights are zero.")
    check_weight_sizes(weights, "sample_weight")
    return np.asarray(weights)


def as_alphas(alpha: Any) -> Float[np.ndarray, " a"] | None:
    """Return the penalties to choose from, or None for the automatic grid of ``alpha="loo"``."""
    if isinstance(alpha, str):
        if alpha != "loo":
            raise ValueError(
                f"`alpha` must be 'loo', a number or a sequence of numbers: got {alpha!r}."
            )
        return None
    penalties = check_float_array(alpha, "alpha").astype(np.float64)
    if penalties.ndim == 0:
        return np.array([check_number(alpha, "alpha", minimum=0.0)])
    if penalties.ndim != 1 or len(penalties) == 0:
        raise ValueError(f"`alpha` must be a non-empty sequence: got shape {penalties.shape}.")
    for i, penalty in enumerate(penalties):
        check_number(float(penalty), f"alpha[{i}]", minimum=0.0)
    return penalties


def as_n_heads(n_heads: Any) -> float | str:
    """Return the number of heads, math.inf for infinitely many, or "auto"."""
    if isinstance(n_heads, str):
        return check_choice(n_heads, "n_heads", ("auto",))
    is_float = isinstance(n_heads, (float, np.floating))
    if is_float and n_heads == math.inf:
        return math.inf
    try:
        return check_count(n_heads, "n_heads")
    except TypeError:
        raise TypeError(
            "`n_heads` must be a positive integer, math.inf for the exact kernel, or 'auto': "
            f"got {n_heads!r}."
        ) from None


def as_keys(keys: Any) -> int | str:
    """Return the number of keys of each set that a layer sees, "all" or "auto"."""
    if isinstance(keys, str):
        return check_choice(keys, "keys", ("all", "auto"))
    return check_count(keys, "keys")


def as_finite_n_heads(n_heads: Any, reason: str) -> int:
    """Return a finite number of heads.

    Infinitely many are refused; the message ends in ``reason``, which says what to do instead.
    """
    count = as_n_heads(n_heads)
    if isinstance(count, str) or math.isinf(count):
        raise ValueError(f"`n_heads` must be finite for {reason}")
    return int(count)


def as_distribution(distribution: Any) -> HeadDistribution:
    """Return a copy of the head distribution; None means zero-mean Gaussian heads.

    Heads are drawn whenever they are needed: a distribution that is changed after the fit must not
    change them. One that learns is the parameter itself, whose ``fit`` makes another distribution.
    """
    if distribution is None:
        return GaussianHeads()
    if isinstance(distribution, type) or not isinstance(distribution, HeadDistribution):
        raise TypeError(
            "`heads` must be a head distribution such as kh.GaussianHeads(mean=1.0) or None: got "
            f"{distribution!r}."
        )
    if hasattr(distribution, "fit"):
        return distribution
    return copy.deepcopy(distribution)


def as_seed(random_state: Any) -> int:
    """Return the seed of the heads.

    An integer is the seed itself; otherwise a seed is drawn from the generator, or from entropy.
    """
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        return check_seed(random_state, "random_state")
    if random_state is None:  # 31 bits of entropy
        return int(np.random.SeedSequence().generate_state(1, np.uint32)[0] >> 1)
    return int(check_random_state(random_state).randint(2**31 - 1))


def as_dtype(dtype: Any) -> str:
    """Return the precision of the features, "float64" or "float32"."""
    if isinstance(dtype, str):
        name = dtype
    else:
        name = np.dtype(dtype).name
    return check_choice(name, "dtype", ("float64", "float32"))


def class_weights(
    class_weight: Any, labels: np.ndarray, weights: np.ndarray | None
) -> np.ndarray | None:
    """Sample weights times those of the classes: None if both are None.

    "balanced" counts a sample of weight two as two, and one of weight 0 as none: the classes that
    have weight share the total weight in equal parts.
    """
    if class_weight is None:
        return weights
    if weights is None:
        sample_weights = np.ones(len(labels))
    else:
        sample_weights = weights

    # what the class of each sample weighs
    if isinstance(class_weight, str):
        # balanced: an equal share of the total weight, divided by the weight of the class
        _, class_number = np.unique(labels, return_inverse=True)
        totals = np.bincount(class_number, weights=sample_weights)
        has_weight = totals > 0
        share = sample_weights.sum() / has_weight.sum()
        by_class = np.divide(share, totals, out=np.zeros_like(totals), where=has_weight)
        weight_of_class = by_class[class_number]
    else:
        weight_of_class = compute_sample_weight(class_weight, labels)
        if (weight_of_class < 0).any():
            sample = int(weight_of_class.argmin())
            raise ValueError(
                f"`class_weight` must not be negative: class {labels[sample]!s:.40} has "
                f"{weight_of_class[sample]:g}. Use 0 to leave a class out."
            )
    check_weight_sizes(weight_of_class, "class_weight")

    # both together
    products = np.asarray(weight_of_class * sample_weights)
    check_weight_sizes(products, "sample_weight times class_weight")
    return products
