"""What users pass to `fit` and `predict`, checked and turned into sets, columns, weights, penalties and heads."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.base import BaseEstimator
from sklearn.utils import check_array
from sklearn.utils import check_random_state as as_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import column_or_1d, validate_data

from keyhole._array import thread_count, unit_exponent
from keyhole._checks import (
    as_sequence,
    check_choice,
    check_count,
    check_float_array,
    check_labels,
    check_no_mask,
    check_number,
    check_seed,
    check_weight_sizes,
    is_table,
)
from keyhole.attention.activations import POINTWISE, check_activation, check_pointwise
from keyhole.attention.head_error import improvement
from keyhole.attention.heads import GaussianHeads, HeadDistribution, HeadDraw
from keyhole.attention.learned import MAX_HEADS_TO_JUDGE, LearnedHeads
from keyhole.data.sets import (
    POOLINGS,
    DistinctSamples,
    PooledSets,
    SetBatch,
    SetGroups,
    check_sets,
    samples_in,
)
from keyhole.data.tokens import QUERIES, SCALINGS, TokenRule
from keyhole.layer import LayerFit, choose_extras_scale, distinct_samples, exceeds_memory, fit_layer
from keyhole.ridge.calibration import calibrate, class_scores, labels_of


def as_sets(estimator: BaseEstimator, X: Any, *, reset: bool) -> SetBatch:
    """Return ``X`` as a SetBatch: `as_samples` where a sample is one set."""
    samples = as_samples(estimator, X, reset=reset)
    check_sets(samples, "X")
    return samples.sets


def as_samples(estimator: BaseEstimator, X: Any, *, reset: bool) -> SetBatch | SetGroups:
    """Return ``X`` as sets, or as the groups of sets it is, checked against what `fit` saw unless ``reset``."""
    held: Any = samples_in(X)
    sets = _as_sets(estimator, X if held is None else held.sets, reset=reset)
    samples: SetBatch | SetGroups = sets if held is None else held
    _check_extras(estimator, samples, reset=reset)
    return samples


def _check_extras(estimator: BaseEstimator, samples: SetBatch | SetGroups, *, reset: bool) -> None:
    """Record, or compare, the number of columns that samples have of their own."""
    count = 0 if samples.extras is None else samples.extras.shape[1]
    if reset:
        estimator.n_extras_in_ = count
    elif count != estimator.n_extras_in_:
        raise ValueError(
            f"X has {count} columns of extras, but {type(estimator).__name__} is expecting {estimator.n_extras_in_}: "
            "samples must have the extras they had in fit. Pass them as SetBatch(keys, query, extras)."
        )


def as_extras_scale(scale: Any) -> float | None:
    """Return the scale of extras, or None for one that is chosen by leave-one-out."""
    if isinstance(scale, str):
        check_choice(scale, "extras_scale", ("loo",))
        return None
    return check_number(scale, "extras_scale", minimum=0.0, exclusive=True)


def _as_sets(estimator: BaseEstimator, X: Any, *, reset: bool) -> SetBatch:
    """Return ``X`` as a SetBatch, and record (``reset``) or compare its dimension and whether it has queries.

    ``X`` is a SetBatch; or tokens as `SetBatch.from_tokens` takes them; or an (n, d) table, one key per set.
    """
    X = as_sequence(X)
    if isinstance(X, SetBatch):
        batch = X
        if len(batch) == 0:
            raise ValueError(
                "`X` must hold at least one set: got a SetBatch of 0 sets (0 sample(s))."
            )
    elif _holds_token_arrays(X):
        batch = SetBatch.from_tokens(X)
    else:
        batch = SetBatch(_as_numbers(estimator, X, reset=reset)[:, None, :])
    has_query = batch.query is not None
    if reset:
        estimator.n_features_in_ = batch.dim
        estimator.has_query_ = has_query
        estimator.n_query_features_in_ = batch.query_dim if has_query else 0
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
    if has_query and batch.query_dim != estimator.n_query_features_in_:
        raise ValueError(
            f"X has queries of {batch.query_dim} features, but {type(estimator).__name__} is expecting "
            f"{estimator.n_query_features_in_}: queries must have the dimension they had in fit."
        )
    return batch


def _as_numbers(estimator: BaseEstimator, X: Any, *, reset: bool) -> Float[np.ndarray, "n d"]:
    """Return a table as an array of numbers, checked as scikit-learn checks tables."""
    check_no_mask(X, "X")
    rule = "`X` must be sets, or a table of numbers"
    remedy = "Pass an array, a data frame of numbers or a SetBatch; kh.read_table makes sets of tables with text."
    fields = getattr(getattr(X, "dtype", None), "names", None)
    if fields:
        raise TypeError(f"{rule}: got an array of fields {', '.join(fields)}. {remedy}")
    if isinstance(X, dict) and not hasattr(X, "toarray"):  # a sparse matrix may be one too
        raise TypeError(f"{rule}: got a dict. {remedy}")
    if isinstance(X, (list, tuple)) and len(X) > 0 and isinstance(X[0], dict):
        raise TypeError(f"{rule}: got a list of dicts. {remedy}")
    if is_table(X) and hasattr(X, "collect"):
        raise TypeError(
            f"`X` must be a table in memory: got {type(X).__name__}, which is not computed yet. Call its "
            "collect method."
        )
    try:
        return np.asarray(validate_data(estimator, X, reset=reset, dtype=(np.float64, np.float32)))
    except (TypeError, ValueError) as error:
        text = _first_text(X)
        if text is None:
            raise
        column, value = text
        raise ValueError(
            f"`X` must hold numbers: column {column!r} holds {value!r:.40}. Leave it out or encode it; kh.read_table "
            "encodes text and dates as it makes sets of a table."
        ) from error


def _first_text(X: Any) -> tuple[str, str] | None:
    """The name of the first column of a table that holds text, and that text; None if there is none."""
    if not is_table(X):
        return None
    names = X.column_names if hasattr(X, "column_names") else X.columns
    for name in names:
        values = np.asarray(X[name])
        if values.dtype.kind in "OUST":
            for value in values.tolist():
                if isinstance(value, str):
                    return str(name), value
    return None


def _holds_token_arrays(X: Any) -> bool:
    """Whether ``X`` is three levels deep: sets of tokens of coordinates."""
    if is_table(X) or hasattr(X, "toarray"):
        return False  # a data frame or a sparse matrix
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
    """Raise if there is no target, or one that is masked."""
    if y is None:
        raise ValueError(
            f"{type(estimator).__name__} requires y to be passed, but the target y is None."
        )
    check_no_mask(y, "y")


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
    if weights.min() < 0:
        i = int(weights.argmin())
        raise ValueError(
            f"`sample_weight` must not be negative: sample {i} has weight {weights[i]:g}. Use 0 to leave a sample out."
        )
    if not weights.any():
        raise ValueError("`sample_weight` must have a positive entry: all weights are zero.")
    check_weight_sizes(weights, "sample_weight")
    return np.asarray(weights)


def as_penalties(alpha: Any) -> Float[np.ndarray, " a"] | None:
    """Return the penalties to choose from, or None for the automatic grid of ``alpha="loo"``."""
    if isinstance(alpha, str):
        if alpha != "loo":
            raise ValueError(
                f"`alpha` must be 'loo', a number or a sequence of numbers: got {alpha!r}."
            )
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
            f"`n_heads` must be a positive integer, math.inf for the exact kernel, or 'auto': got {n_heads!r}."
        ) from None


def as_distribution(distribution: Any) -> HeadDistribution:
    """Return the head distribution, a copy of its own; None means zero-mean Gaussian heads.

    Heads are drawn from the head distribution whenever they are needed: a head distribution that is changed after the fit may not change them. One
    that learns is the parameter itself, whose ``fit`` makes another head distribution.
    """
    if distribution is None:
        return GaussianHeads()
    if isinstance(distribution, type) or not isinstance(distribution, HeadDistribution):
        raise TypeError(
            f"`heads` must be a head distribution such as kh.GaussianHeads(mean=1.0) or None: got {distribution!r}."
        )
    if hasattr(distribution, "fit"):
        return distribution
    return copy.deepcopy(distribution)


def as_seed(random_state: Any) -> int:
    """Return the seed of the heads: an integer as it is, otherwise one drawn from the generator or from entropy."""
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        return check_seed(random_state, "random_state")
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1, np.uint32)[0] >> 1)
    return int(as_random_state(random_state).randint(2**31 - 1))


def check_random_state(random_state: Any) -> None:
    """Raise unless heads can be drawn from ``random_state``; nothing is drawn."""
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        check_seed(random_state, "random_state")
    elif random_state is not None and not isinstance(
        random_state, (np.random.Generator, np.random.RandomState)
    ):
        raise TypeError(
            "`random_state` must be an integer, a RandomState, a Generator or None: got "
            f"{random_state!r:.60} of type {type(random_state).__name__}."
        )


def check_class_weight(class_weight: Any) -> None:
    """Raise unless the weights of classes are None, "balanced", or numbers that are not negative."""
    if class_weight is None:
        return
    if isinstance(class_weight, dict):
        for label, weight in class_weight.items():
            check_number(weight, f"class_weight[{label!r}]", minimum=0.0)
    elif not isinstance(class_weight, str) or class_weight != "balanced":
        raise ValueError(
            f"`class_weight` must be None, 'balanced' or a dict of one number per class: got {class_weight!r:.60}."
        )


def check_layer_options(activation: Any, dtype: Any) -> tuple[str, str]:
    """Return the activation and the dtype of the features, checked."""
    if not isinstance(dtype, str):
        dtype = np.dtype(dtype).name
    return check_activation(activation), check_choice(dtype, "dtype", ("float64", "float32"))


SAMPLES_TO_CHOOSE_BY = (500, 350, 250, 180, 128)
"""Samples that scaling, query and head distribution are chosen by: as many of these as let choosing cost no more than a fit. Rules
that five hundred cannot tell apart may as well be exchanged (on digits "standard" and "none" are)."""

MIN_SAMPLES_TO_CHOOSE_BY = 8
"""Distinct samples below which nothing is chosen: tokens stay as they are."""

AUTO_HEADS = 512
"""Heads of ``n_heads="auto"`` where the exact kernel is not cheaper, and a fit takes at most `AUTO_SECONDS`."""

AUTO_SECONDS, FEWEST_AUTO_HEADS = 120.0, 32
"""Predicted seconds of one core that a fit with "auto" heads may take: else these are halved, down to the fewest."""

HEADS_TO_CHOOSE_BY = 64
"""Heads at most that scaling, query and head distribution are chosen with."""

STRENGTHS = (1.0, 3.0, 10.0, 30.0)
"""Multiples of the identity that ``heads=None`` tries as mean of the heads where there is a query."""

DRAWN_STRENGTHS = (0.3, 20.0), 0.1
"""Mean and scale of a head distribution whose heads differ in the columns they compare, which ``heads=None`` tries under softmax: there
the multiple is how sharply a head hops. Chosen on the first 80 % of MovieLens; ReLU gains little by it."""

LONG_FIT = 60.0
"""Predicted seconds above which a fit says so beforehand."""


@dataclass(frozen=True)
class LayerPlan:
    """How to fit a layer once its samples are ready; ``n_heads`` None means infinitely many, ``heads`` None is chosen.

    ``options`` are those of `fit_layer`. ``distinct`` are the distinct samples, if somebody looked for them already.
    """

    n_heads: int | None
    distribution: HeadDistribution | None
    penalties: Float[np.ndarray, " a"] | None = field(repr=False)
    seed: int
    options: dict[str, Any] = field(repr=False)
    extras_scale: float | None = None
    distinct: DistinctSamples | None = field(default=None, repr=False)

    def heads(
        self, distribution: HeadDistribution, batch: SetBatch | PooledSets
    ) -> HeadDraw | HeadDistribution:
        """The heads of a head distribution for samples like these, or the head distribution itself for infinitely many."""
        return (
            distribution
            if self.n_heads is None
            else HeadDraw(distribution, self.n_heads, batch.dim, self.seed, batch.query_dim)
        )

    def with_ranks(self, batch: SetBatch | SetGroups, columns: np.ndarray) -> LayerPlan:
        """The same plan with ranks of the samples where a fit draws some of them, for extras or to hold them out.

        Ranks are made of samples as they were given: tokens that were scaled differ in their last digits.
        """
        solver = self.options["solver"]
        by_gradients = solver == "cg"
        if solver == "auto" and self.n_heads is not None:
            n_columns = self.n_heads * (batch.dim + 1)
            by_gradients = exceeds_memory(len(batch), n_columns, self.options["dtype"])
        draws_samples = (
            by_gradients or self.options["groups"] is not None or batch.extras is not None
        )
        if not draws_samples:
            return self
        groups = self.options["groups"]
        samples = batch.numpy()
        distinct = self.distinct
        if distinct is None:
            distinct = DistinctSamples.of(samples, columns, self.options["weights"], groups)
        ranks = distinct.ranks(samples, columns, 0, groups)
        return replace(self, options={**self.options, "ranks": ranks})

    def with_extras_scale(
        self, rule: TokenRule, batch: SetBatch | SetGroups, columns: np.ndarray
    ) -> TokenRule:
        """The rule with extras of the scale that was given, or of least leave-one-out error.

        Heads that are learned later are learned at the scale that suits heads around zero.
        """
        if batch.extras is None:
            return rule
        if self.extras_scale is not None:
            return rule.with_extras_scale(self.extras_scale)
        assert self.distribution is not None
        distribution = GaussianHeads() if hasattr(self.distribution, "fit") else self.distribution
        ready = rule.apply(batch)
        scale = choose_extras_scale(
            ready, columns, self.heads(distribution, ready), self.penalties, **self.options
        )
        return rule.with_extras_scale(scale)

    def fitted_heads(self, batch: SetBatch | PooledSets, columns: np.ndarray) -> HeadDistribution:
        """The head distribution itself, or what its ``fit`` makes of the training set."""
        assert self.distribution is not None
        distribution = (
            self.distribution if self.n_heads is not None else self._heads_with_a_kernel()
        )
        fit: Callable[..., HeadDistribution] | None = getattr(distribution, "fit", None)
        if fit is None:
            return self.distribution
        options = {name: self.options[name] for name in ("activation", "fit_intercept")}
        if isinstance(distribution, LearnedHeads):
            options["n_heads"] = MAX_HEADS_TO_JUDGE if self.n_heads is None else self.n_heads
            options["device"] = self.options["device"] if batch.is_plain else None
        weights, groups = self.options["weights"], self.options["groups"]
        if groups is not None:
            kept = np.arange(len(batch)) if weights is None else np.flatnonzero(weights > 0)
            weights = None if weights is None else weights[kept]
            return fit(
                batch[kept],
                columns[kept],
                weights=weights,
                groups=groups[kept],
                seed=self.seed,
                **options,
            )
        # copies count as one sample of their joint weight, here as in the layer
        samples = distinct_samples(batch, columns, weights)
        return fit(
            samples.batch, samples.columns, weights=samples.weights, seed=self.seed, **options
        )

    def _heads_with_a_kernel(self) -> HeadDistribution:
        """The head distribution, for infinitely many heads: what has no kernel is said before the work, not after."""
        assert self.distribution is not None
        if hasattr(self.distribution, "fit"):
            check_pointwise(self.options["activation"])
        covariance = getattr(self.distribution, "covariance", "none")
        if covariance == "auto":
            distribution = copy.copy(self.distribution)
            distribution.covariance = "none"  # type: ignore[attr-defined]
            return distribution
        if covariance != "none":
            raise ValueError(
                f"infinitely many heads need noise of one scale: got {self.distribution}. Use covariance='none', or a finite "
                "`n_heads`."
            )
        return self.distribution

    def draft_size(
        self, token_counts: Int[np.ndarray, " n"], dim: int, n_drafts: int
    ) -> tuple[int, int | None]:
        """How many of n distinct samples to choose by, and with how many heads (None: the exact kernel).

        As many as let all drafts together cost what one fit of heads does; by the exact kernel if
        that is what was asked for and cheaper than few heads.
        """
        n = len(token_counts)
        keys_per_sample = float(token_counts.sum()) / n

        def seconds(count: int, n_heads: float) -> float:
            n_tokens = int(count * keys_per_sample)
            return fit_seconds(count, n_tokens, dim, n_heads, has_query=True)

        if self.n_heads is None:
            few_heads = HEADS_TO_CHOOSE_BY
            allowed = seconds(n, AUTO_HEADS)
        else:
            few_heads = min(self.n_heads, HEADS_TO_CHOOSE_BY)
            allowed = seconds(n, self.n_heads)
        for most in SAMPLES_TO_CHOOSE_BY:
            count = min(n, most)
            cost = seconds(count, few_heads)
            by_kernel = self.n_heads is None and seconds(count, math.inf) <= cost
            if by_kernel:
                cost = seconds(count, math.inf)
            if n_drafts * cost <= allowed:
                break
        return count, None if by_kernel else few_heads


@dataclass(frozen=True)
class SetFit:
    """A fitted layer with the rule for its tokens, its head distribution, and the left-out loss of every rule tried."""

    fit: LayerFit
    rule: TokenRule
    distribution: HeadDistribution
    tried: dict[tuple[str, str], float]


def fit_sets(
    batch: SetBatch | SetGroups,
    columns: np.ndarray,
    plan: LayerPlan,
    scaling: Any,
    query: Any,
    pooling: Any,
) -> SetFit:
    """Choose the token rule and the head distribution if asked to, fit the head distribution if it wants to be, solve for the values.

    All of it in units of y, a power of two, in which y is of size one: squares of errors then neither overflow nor
    vanish, and the answer follows the units of y to the last digit.
    """
    weights, pooling = plan.options["weights"], check_choice(pooling, "pooling", POOLINGS)
    units = int(unit_exponent(columns if weights is None else columns[weights > 0]))
    with np.errstate(over="ignore"):  # outputs of weight 0 may be of any size
        columns = np.ldexp(columns, -units)
    as_given = (scaling, query, pooling) == (
        "none",
        "given",
        "mean",
    ) and plan.distribution is not None
    if (
        not batch.is_plain
        or not as_given
        or plan.options["groups"] is not None
        or hasattr(plan.distribution, "fit")
    ):
        batch = batch.numpy()  # tokens are prepared, and head distributions learned, in NumPy
    choice = choose_rule(batch, columns, plan, scaling, query, pooling)
    power = 0 if plan.options["criterion"] == "log_loss" else 2 * units
    with np.errstate(over="ignore", under="ignore"):
        tried = {names: float(np.ldexp(loss, power)) for names, loss in choice.tried.items()}
    rule, distribution, fit = choice.rule, choice.distribution, choice.fit
    if fit is None:
        plan = replace(plan, distribution=choice.distribution).with_ranks(batch, columns)
        rule = plan.with_extras_scale(rule, batch, columns)
        ready = rule.apply(batch)
        distribution = plan.fitted_heads(ready, columns)
        if distribution is not plan.distribution:  # it may hop more than once
            rule = rule.with_hops_of(distribution)
            ready = rule.apply(batch)
        heads = plan.heads(distribution, ready)
        warn_if_long(ready, heads)
        fit = fit_layer(ready, columns, heads, plan.penalties, **plan.options)
    return SetFit(fit.in_units(units), rule, distribution, tried)


@dataclass(frozen=True)
class RuleChoice:
    """A rule for tokens, a head distribution, the left-out loss of every rule tried, and a fit to all samples if one was made."""

    rule: TokenRule
    distribution: HeadDistribution
    tried: dict[tuple[str, str], float]
    fit: LayerFit | None


@dataclass(frozen=True)
class Draft:
    """Some distinct samples, and how layers are fitted to them in order to be compared.

    Attributes
    ----------
    batch, columns : the samples and their outputs
    plan : LayerPlan
        With the heads, and the joint weights and the groups of these samples.
    is_final : bool
        Whether a fit to them already is the final fit: all distinct samples, all heads, nothing left to tune.
    is_given : bool
        Whether they are the samples that were given, one by one, so that its results are theirs.
    """

    batch: SetBatch | SetGroups
    columns: Float[np.ndarray, "n t"]
    plan: LayerPlan
    is_final: bool
    is_given: bool

    @classmethod
    def of(
        cls, batch: SetBatch | SetGroups, columns: np.ndarray, plan: LayerPlan, n_drafts: int
    ) -> Draft:
        """Choose the samples by what they are: neither order, nor duplicates, nor rows of weight 0 change the choice.

        Duplicates are joined to one sample of their joint weight, as the layer joins them, so that a standard error
        counts them once. The samples of a part of all are picked by their hashes.
        """
        groups = plan.options["groups"]
        distinct = plan.distinct
        if distinct is None:
            distinct = DistinctSamples.of(batch, columns, plan.options["weights"], groups)
        # how many samples and heads are affordable
        count, n_heads = plan.draft_size(batch.token_counts[distinct.rows], batch.dim, n_drafts)
        # which ones, in the order in which they were given
        picked = np.arange(len(distinct))
        if count < len(distinct):
            ranks = distinct.ranks(batch, columns, plan.seed, groups)
            picked = np.flatnonzero(ranks[distinct.rows] < count)
        rows = distinct.rows[picked]
        options = {
            **plan.options,
            "weights": None if distinct.weights is None else distinct.weights[picked],
            "groups": None if groups is None else groups[rows],
            "solver": "direct",
        }
        # whether the best draft can be kept
        uses_everything = len(rows) == len(distinct) and n_heads == plan.n_heads
        learns_heads = hasattr(plan.distribution, "fit")
        nothing_to_tune = plan.penalties is None and not learns_heads and batch.extras is None
        is_final = uses_everything and nothing_to_tune and plan.options["solver"] != "cg"
        options["draft"] = not is_final
        return cls(
            batch=batch[rows],
            columns=columns[rows],
            plan=replace(plan, n_heads=n_heads, options=options, distinct=None),
            is_final=is_final,
            is_given=len(rows) == len(batch),
        )

    def fit(self, rule: TokenRule, distribution: HeadDistribution) -> LayerFit:
        """A layer under this rule and this head distribution, with a penalty of its own."""
        ready = rule.apply(self.batch)
        heads = self.plan.heads(distribution, ready)
        return fit_layer(ready, self.columns, heads, None, **self.plan.options)

    def is_clearly_better(self, new: LayerFit, old: LayerFit) -> bool:
        """Whether the left-out loss is lower by more than one standard error of the paired differences."""
        options = self.plan.options
        before = _sample_losses(old, self.columns, options)
        after = _sample_losses(new, self.columns, options)
        gain, error = improvement(before, after, options["weights"], options["groups"])
        return gain > max(error, LOSS_ROUNDING * old.ridge.loss)


LOSS_ROUNDING = 1e-6
"""Share of a loss below which a difference is rounding, and the candidate that comes first is kept: on tokens of length
one "none" and "sphere" are the same rule, and the order of the samples decides the last digits of their losses."""


def is_lower(loss: float, other: float) -> bool:
    """Whether a loss is lower than another by more than rounding."""
    return loss < other - LOSS_ROUNDING * abs(other)


def best_draft(fits: Sequence[LayerFit]) -> int:
    """The number of the fit of least left-out loss; the first of those that differ by rounding alone."""
    best = 0
    for i, fit in enumerate(fits):
        if is_lower(fit.ridge.loss, fits[best].ridge.loss):
            best = i
    return best


def choose_rule(
    batch: SetBatch | SetGroups,
    columns: np.ndarray,
    plan: LayerPlan,
    scaling: Any,
    query: Any,
    pooling: str,
) -> RuleChoice:
    """Choose scaling, query and head distribution, one after the other, by the left-out loss of fits to few samples.

    The scaling of least loss under the query that is given; where coordinates have units of their own, standardised
    tokens unless another scaling is better by more than a standard error. The mean of the keys as query if its loss is
    less; then a multiple of the identity as mean of the head distribution, if that lowers the loss by more than a standard error,
    sample by sample. Multiples grow until one is worse than the last; under softmax, heads that draw a multiple for
    each coordinate are tried too. A head distribution that is learned is learned later, under the rule that suits heads around zero.
    """
    # the candidates
    scalings = _candidates(scaling, "scaling", SCALINGS, SCALINGS)
    own_queries = batch.has_own_queries
    queries = _candidates(query, "query", QUERIES, ("given",) if own_queries else ("given", "mean"))
    distribution = (
        GaussianHeads()
        if plan.distribution is None or hasattr(plan.distribution, "fit")
        else plan.distribution
    )
    may_have_queries = batch.sets.query is not None or queries[-1] != "given"
    chooses_law = plan.distribution is None and may_have_queries
    draws_strengths = chooses_law and plan.options["activation"] not in POINTWISE

    def learn(scaling: str, query: str) -> TokenRule:
        rule = TokenRule.learn(
            batch,
            scaling,
            query,
            pooling,
            weights=plan.options["weights"],
            fit_intercept=plan.options["fit_intercept"],
        )
        return rule.with_hops_of(distribution)

    # nothing to choose, or too few samples to choose by
    n_drafts = len(scalings) + len(queries) - 1 + 2 * chooses_law + draws_strengths
    draft = None
    if n_drafts > 1:
        draft = Draft.of(batch, columns, plan, n_drafts)
    if draft is None or len(draft.columns) < MIN_SAMPLES_TO_CHOOSE_BY:
        rule = learn(scalings[0], queries[0])
        return RuleChoice(
            rule=rule,
            distribution=distribution if plan.distribution is None else plan.distribution,
            tried={},
            fit=None,
        )

    # the scaling
    rules = [learn(name, queries[0]) for name in scalings]
    fits = [draft.fit(rule, distribution) for rule in rules]
    tried = {
        (rule.scaling, rule.query): fit.ridge.loss for rule, fit in zip(rules, fits, strict=True)
    }
    best = best_draft(fits)
    if "standard" in scalings and _mixed_units(draft.batch.sets):
        standard = scalings.index("standard")
        if not draft.is_clearly_better(fits[best], fits[standard]):
            best = standard
    best_rule, best_fit = rules[best], fits[best]

    # the query
    for name in queries[1:]:
        rule = learn(best_rule.scaling, name)
        fit = draft.fit(rule, distribution)
        tried[rule.scaling, rule.query] = fit.ridge.loss
        if is_lower(fit.ridge.loss, best_fit.ridge.loss):
            best_rule, best_fit = rule, fit

    # the head distribution
    has_queries = batch.sets.query is not None or best_rule.query != "given"
    if chooses_law and has_queries:
        pairs = batch.sets.pairs if best_rule.query == "given" else None
        distributions: list[HeadDistribution] = [distribution]
        fits = [best_fit]
        for strength in STRENGTHS:
            distributions.append(GaussianHeads(strength, pairs=pairs))
            fits.append(draft.fit(best_rule, distributions[-1]))
            if not is_lower(fits[-1].ridge.loss, fits[-2].ridge.loss):
                break
        if draws_strengths:
            means, scale = DRAWN_STRENGTHS
            distributions.append(GaussianHeads(means, scale, pairs=pairs))
            fits.append(draft.fit(best_rule, distributions[-1]))
        best = best_draft(fits)
        if draft.is_clearly_better(fits[best], best_fit):
            distribution, best_fit = distributions[best], fits[best]
    return RuleChoice(
        rule=best_rule,
        distribution=distribution if plan.distribution is None else plan.distribution,
        tried=tried,
        fit=best_fit if draft.is_final and draft.is_given else None,
    )


MIXED_UNITS = 100.0
"""Factor between the sizes of the largest coordinate and of the usual one from which on they have units of their own,
years and stars: what is not standardised then hears the largest one alone, and a few samples may not tell."""


def _mixed_units(sets: SetBatch) -> bool:
    """Whether one coordinate of the keys, or of the queries, is that much larger than most."""
    for tokens in filter(lambda t: t is not None, (sets.numpy().tokens, sets.numpy().query)):
        size = np.abs(tokens).max(axis=0)
        size = size[size > 0]
        if len(size) and size.max() > MIXED_UNITS * np.median(size):
            return True
    return False


def _sample_losses(
    fit: LayerFit, columns: np.ndarray, options: dict[str, Any]
) -> Float[np.ndarray, " n"]:
    """The loss of every sample by the fit without it: its squared error, or the log-loss at the best temperature."""
    if options["criterion"] != "log_loss":
        return np.asarray(np.square(columns - fit.predictions).mean(axis=1))
    weights = np.ones(len(columns)) if options["weights"] is None else options["weights"]
    return np.asarray(
        calibrate(class_scores(fit.predictions)[None], labels_of(columns), weights, 1e-6)[1][0]
    )


def fit_seconds(n: int, n_tokens: int, dim: int, n_heads: float, *, has_query: bool) -> float:
    """Seconds of one core that a fit takes, predicted from sizes alone; ``math.inf`` heads are the exact kernel.

    Measured at d = 4 … 400 on one core (Zen 4): pairs of keys take 2.2 + 0.075 D ns, entries of W that are drawn 30 ns,
    features 0.1 ns an operation, products of matrices a fifth of that, a path of penalties n³/4 ns, and 6 ms all else.
    """
    width = dim + 1
    rest, path = 6e6, 0.25 * float(n) ** 3
    if math.isinf(n_heads):
        return 1e-9 * (n_tokens**2 / 2 * (2.2 + 0.075 * width) + path + rest)
    p = n_heads * width
    drawn = width**2 if has_query else width
    features = n_heads * (30 * drawn + 0.1 * (2 * n * drawn + 4 * n_tokens * width))
    return 1e-9 * (
        rest + features + (0.02 * n**2 * p + path if p >= n else 0.06 * n * p**2 + 0.5 * p**3)
    )


def cheaper_heads(
    batch: SetBatch | SetGroups,
    distribution: HeadDistribution | None,
    query: Any,
    options: dict[str, Any],
    distinct: DistinctSamples | None = None,
) -> int | None:
    """None, the exact kernel, where it exists and is predicted to take less time than heads; else how many heads.

    These are `AUTO_HEADS`, halved until a direct fit without a device is predicted to take `AUTO_SECONDS` at most.
    Only the ``distinct`` samples cost time; all of them, if they are not given.
    """
    # the sizes of the fit
    token_counts = batch.token_counts.astype(float)
    if distinct is not None:
        token_counts = token_counts[distinct.rows]
    if query == "each":
        token_counts = token_counts**2
    has_query = batch.sets.query is not None or query != "given"

    def seconds(n_heads: float) -> float:
        return fit_seconds(
            len(token_counts), int(token_counts.sum()), batch.dim, n_heads, has_query=has_query
        )

    # as many heads as a direct fit has time for
    n_heads = AUTO_HEADS
    if options["solver"] != "cg" and options["device"] is None:
        while n_heads > FEWEST_AUTO_HEADS and seconds(n_heads) > AUTO_SECONDS:
            n_heads //= 2
    # the kernel, where there is one
    has_moments = hasattr(distribution, "moments") or hasattr(distribution, "components")
    law_has_kernel = distribution is None or (not hasattr(distribution, "fit") and has_moments)
    draws_strengths = getattr(distribution, "strength_range", None) is not None
    has_kernel = law_has_kernel and not draws_strengths and options["activation"] in POINTWISE
    if has_kernel and options["solver"] != "cg" and seconds(math.inf) <= seconds(n_heads):
        return None
    return n_heads


def warn_if_long(batch: SetBatch | PooledSets, heads: HeadDraw | HeadDistribution) -> None:
    """Say so before a fit that will take long."""
    n_heads = heads.n_heads if isinstance(heads, HeadDraw) else math.inf
    n_tokens = int(batch.token_counts.sum())
    seconds = fit_seconds(len(batch), n_tokens, batch.dim, n_heads, has_query=True) / thread_count()
    if seconds > LONG_FIT and batch.sets.device is None:
        kind = (
            f"{n_heads} heads"
            if math.isfinite(n_heads)
            else "the exact kernel of infinitely many heads"
        )
        remedy = "fewer heads, a fixed alpha" if math.isfinite(n_heads) else "a finite `n_heads`"
        warnings.warn(
            f"this fit will take about {seconds:.0f} s: {kind} on {len(batch)} samples of {n_tokens} keys in all. For "
            f"less, use {remedy}, fewer samples, or a GPU.",
            stacklevel=4,
        )


def as_groups(
    groups: Any, batch: Sized, weights: Float[np.ndarray, " n"] | None = None
) -> Int[np.ndarray, " n"] | None:
    """Number the groups, or None; at least two of them must have weight."""
    if groups is None:
        return None
    check_no_mask(groups, "groups")
    groups = column_or_1d(groups)
    check_lengths(batch, groups, "groups")
    check_labels(groups, "groups", "group")
    _, numbers = np.unique(groups, return_inverse=True)
    has_weight = np.ones(len(groups), bool) if weights is None else weights > 0
    names = np.unique(groups[has_weight])
    if len(names) < 2:
        raise ValueError(
            f"`groups` must name at least two groups, so that one can be left out: got {names.tolist()[0]!r} for all "
            f"{has_weight.sum()} samples of positive weight. Leave `groups` out to leave samples out one by one."
        )
    return np.asarray(numbers)


def _candidates(
    value: Any, name: str, choices: tuple[str, ...], automatic: tuple[str, ...]
) -> tuple[str, ...]:
    return automatic if check_choice(value, name, (*choices, "auto")) == "auto" else (value,)


def class_weights(
    class_weight: Any, labels: np.ndarray, weights: np.ndarray | None
) -> np.ndarray | None:
    """Sample weights times those of the classes: None if both are None.

    "balanced" counts a sample of weight two as two, and one of weight 0 as none: the classes that have weight share the
    total weight in equal parts.
    """
    if class_weight is None:
        return weights
    single = np.ones(len(labels)) if weights is None else weights
    if isinstance(class_weight, str):
        _, member = np.unique(labels, return_inverse=True)
        totals = np.bincount(member, weights=single)
        share = single.sum() / (totals > 0).sum()
        by_class = np.divide(share, totals, out=np.zeros_like(totals), where=totals > 0)
        weight_of_class = by_class[member]
    else:
        weight_of_class = compute_sample_weight(class_weight, labels)
    check_weight_sizes(weight_of_class, "class_weight")
    both = np.asarray(weight_of_class * single)
    check_weight_sizes(both, "sample_weight times class_weight")
    return both
