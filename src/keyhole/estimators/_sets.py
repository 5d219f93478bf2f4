"""From training sets to a fitted layer: scaling and queries by leave-one-out, the law, the values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.base import BaseEstimator
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import column_or_1d

from keyhole._array import unit_exponent
from keyhole._checks import check_choice
from keyhole.activations import check_pointwise
from keyhole.device import fit_finite_on_device, fit_kernel_on_device, plain_sets
from keyhole.estimators._input import as_sets, check_lengths
from keyhole.groups import POOLINGS, PooledSets, SetGroups
from keyhole.heads import GaussianHeads, HeadDraw, HeadLaw
from keyhole.large_layer import exceeds_memory, fit_large_layer
from keyhole.layer import LayerFit, distinct_samples, fit_finite_layer, fit_kernel_layer
from keyhole.learned.law import MOST_TO_JUDGE, LearnedHeads
from keyhole.sets import SetBatch
from keyhole.tokens import QUERIES, SCALINGS, TokenRule

MOST_TO_CHOOSE_BY = 500
"""Samples that scaling and query are chosen by: six fits cost n³ each, and rules that so many cannot tell apart may as
well be exchanged (on digits "standard" and "none" are, and a thousand samples do not settle it either)."""


def as_samples(estimator: BaseEstimator, X: Any, *, reset: bool) -> SetBatch | SetGroups:
    """Return ``X`` as sets, or as the groups of sets it is, checked against what `fit` saw unless ``reset``."""
    if isinstance(X, SetGroups):
        as_sets(estimator, X.sets, reset=reset)
        return X
    return as_sets(estimator, X, reset=reset)


@dataclass(frozen=True)
class LayerPlan:
    """How to fit a layer once its samples are ready; ``n_heads`` None means infinitely many.

    ``hold_out`` asks for predictions of samples that were not fitted even where leave-one-out has none.
    """

    n_heads: int | None
    law: HeadLaw
    penalties: Float[np.ndarray, " a"] | None = field(repr=False)
    seed: int
    dtype: str
    options: dict[str, Any] = field(repr=False)
    groups: Int[np.ndarray, " n"] | None = field(default=None, repr=False)
    device: str | None = None
    solver: str = "auto"
    hold_out: bool = False

    def fitted_law(self, batch: SetBatch | PooledSets, columns: np.ndarray) -> HeadLaw:
        """The law itself, or what its ``fit`` makes of the training set."""
        law = self.law if self.n_heads is not None else self._law_with_a_kernel()
        fit: Callable[..., HeadLaw] | None = getattr(law, "fit", None)
        if fit is None:
            return self.law
        options = {name: self.options[name] for name in ("activation", "fit_intercept")}
        if isinstance(law, LearnedHeads):
            options["n_heads"] = MOST_TO_JUDGE if self.n_heads is None else self.n_heads
        if self.groups is not None:
            kept = self._kept(len(batch))
            weights = self._weights(kept)
            return fit(batch[kept], columns[kept], weights=weights, groups=self.groups[kept], seed=self.seed, **options)
        # copies count as one sample of their joint weight, here as in the layer
        samples = distinct_samples(batch, columns, self.options["weights"])
        return fit(samples.batch, samples.columns, weights=samples.weights, seed=self.seed, **options)

    def _law_with_a_kernel(self) -> HeadLaw:
        """The law, for infinitely many heads: what has no kernel is said before the work, not after."""
        if hasattr(self.law, "fit"):
            check_pointwise(self.options["activation"])
        covariance = getattr(self.law, "covariance", "none")
        if covariance == "auto":
            law = copy.copy(self.law)
            law.covariance = "none"  # type: ignore[attr-defined]
            return law
        if covariance != "none":
            raise ValueError(
                f"infinitely many heads need noise of one scale: got {self.law}. Use covariance='none', or a finite "
                "`n_heads`."
            )
        return self.law

    def fit(self, batch: SetBatch | PooledSets, columns: np.ndarray, law: HeadLaw) -> LayerFit:
        """Solve for the values of this law."""
        heads = law if self.n_heads is None else HeadDraw(law, self.n_heads, batch.dim, self.seed)
        if self.groups is None:
            return self._solve(batch, columns, heads, self.penalties)
        options = {**self.options, "groups": self.groups}
        if isinstance(heads, HeadDraw):
            fit = fit_finite_layer(batch, columns, heads, self.penalties, dtype=self.dtype, **options)
        else:
            fit = fit_kernel_layer(batch, columns, heads, self.penalties, **options)
        if self.device is None and self.solver != "cg":
            return fit
        final = self._solve(batch, columns, heads, np.array([fit.alpha]))
        return replace(fit, layer=final.layer, route=final.route, certificate=final.certificate)

    def draft(self, n: int) -> tuple[Int[np.ndarray, " r"], LayerPlan]:
        """At most `MOST_TO_CHOOSE_BY` samples, and this plan for them, its penalty free."""
        rows = np.sort(np.random.default_rng(self.seed).permutation(n)[:MOST_TO_CHOOSE_BY])
        weights = None if self.options["weights"] is None else self.options["weights"][rows]
        groups = None if self.groups is None else self.groups[rows]
        options = {**self.options, "weights": weights}
        return rows, replace(self, penalties=None, options=options, groups=groups, solver="direct")

    def _solve(
        self, batch: SetBatch | PooledSets, columns: np.ndarray, heads: HeadLaw | HeadDraw, penalties: Any
    ) -> LayerFit:
        if self.device is not None:
            return self._solve_on_device(batch, columns, heads, penalties)
        if not isinstance(heads, HeadDraw):
            if self.solver == "cg":
                raise ValueError("solver='cg' is for finitely many heads: `n_heads` is infinite. Use solver='direct'.")
            return fit_kernel_layer(batch, columns, heads, penalties, **self.options)
        large = exceeds_memory(len(batch), heads.n_heads * (batch.dim + 1), self.dtype)
        if self.solver == "cg" or (self.solver == "auto" and large):
            options = {**self.options, "dtype": self.dtype, "hold_out": self.hold_out}
            return fit_large_layer(batch, columns, heads, penalties, **options)
        return fit_finite_layer(batch, columns, heads, penalties, dtype=self.dtype, **self.options)

    def _solve_on_device(
        self, batch: SetBatch | PooledSets, columns: np.ndarray, heads: HeadLaw | HeadDraw, penalties: Any
    ) -> LayerFit:
        batch = plain_sets(batch)
        options = {**self.options, "device": self.device, "dtype": self.dtype}
        if isinstance(heads, HeadDraw):
            return fit_finite_on_device(batch, columns, heads, penalties, **options)
        return fit_kernel_on_device(batch, columns, heads, penalties, **options)

    def _kept(self, n: int) -> Int[np.ndarray, " k"]:
        """Samples that have weight."""
        weights = self.options["weights"]
        return np.arange(n) if weights is None else np.flatnonzero(weights > 0)

    def _weights(self, kept: Int[np.ndarray, " k"]) -> Float[np.ndarray, " k"] | None:
        weights = self.options["weights"]
        return None if weights is None else np.asarray(weights[kept])


@dataclass(frozen=True)
class SetFit:
    """A fitted layer with the rule for its tokens, its law, and the leave-one-out error of every rule tried."""

    fit: LayerFit
    rule: TokenRule
    law: HeadLaw
    tried: dict[tuple[str, str], float]


def fit_sets(
    batch: SetBatch | SetGroups, columns: np.ndarray, plan: LayerPlan, scaling: Any, query: Any, pooling: Any
) -> SetFit:
    """Choose the token rule if asked to, fit the law if it wants to be, solve for the values.

    All of it in units of y, a power of two, in which y is of size one: squares of errors then neither overflow nor
    vanish, and the answer follows the units of y to the last digit.
    """
    weights = plan.options["weights"]
    units = int(unit_exponent(columns if weights is None else columns[weights > 0]))
    with np.errstate(over="ignore"):  # outputs of weight 0 may be of any size
        columns = np.ldexp(columns, -units)
    found = _fit_unit_columns(batch, columns, plan, scaling, query, pooling)
    with np.errstate(over="ignore", under="ignore"):
        tried = {rule: float(np.ldexp(error, 2 * units)) for rule, error in found.tried.items()}
    return replace(found, fit=found.fit.in_units(units), tried=tried)


def _fit_unit_columns(
    batch: SetBatch | SetGroups, columns: np.ndarray, plan: LayerPlan, scaling: Any, query: Any, pooling: Any
) -> SetFit:
    pooling = check_choice(pooling, "pooling", POOLINGS)
    as_given = (scaling, query, pooling) == ("none", "given", "mean")
    if isinstance(batch, SetBatch) and (not as_given or plan.groups is not None or hasattr(plan.law, "fit")):
        batch = batch.numpy()  # tokens are prepared, and laws learned, in NumPy
    rules = [
        TokenRule.learn(batch, s, q, pooling, plan.options["weights"])
        for s in _candidates(scaling, "scaling", SCALINGS, SCALINGS)
        for q in _candidates(query, "query", QUERIES, _queries_worth_trying(batch))
    ]
    rule, tried = rules[0], {}
    if len(rules) > 1:
        # a law that is learned is learned once, under the rule that suits heads around zero
        law = GaussianHeads() if hasattr(plan.law, "fit") else plan.law
        rows, draft = plan.draft(len(batch))
        part = batch[rows]
        drafts = (draft.fit(r.apply(part), columns[rows], law) for r in rules)
        best: LayerFit | None = None
        for candidate, fit in zip(rules, drafts, strict=True):
            tried[candidate.scaling, candidate.query] = fit.loo_error
            if best is None or fit.loo_error < best.loo_error:
                best, rule = fit, candidate
        settled = len(rows) == len(batch) and plan.penalties is None and law is plan.law and plan.solver != "cg"
        if best is not None and settled:  # the draft was no draft
            return SetFit(best, rule, law, tried)
    ready = rule.apply(batch)
    law = plan.fitted_law(ready, columns)
    return SetFit(plan.fit(ready, columns, law), rule, law, tried)


def as_groups(
    groups: Any, batch: Sized, weights: Float[np.ndarray, " n"] | None = None
) -> Int[np.ndarray, " n"] | None:
    """Number the groups, or None; at least two of them must have weight."""
    if groups is None:
        return None
    groups = column_or_1d(groups)
    check_lengths(batch, groups, "groups")
    _, numbers = np.unique(groups, return_inverse=True)
    heard = groups if weights is None else groups[weights > 0]
    names = np.unique(heard)
    if len(names) < 2:
        raise ValueError(
            f"`groups` must name at least two groups, so that one can be left out: got {names.tolist()[0]!r} for all "
            f"{len(heard)} samples of positive weight. Leave `groups` out to leave samples out one by one."
        )
    return np.asarray(numbers)


def _candidates(value: Any, name: str, choices: tuple[str, ...], automatic: tuple[str, ...]) -> tuple[str, ...]:
    return automatic if check_choice(value, name, (*choices, "auto")) == "auto" else (value,)


def _queries_worth_trying(batch: SetBatch | SetGroups) -> tuple[str, ...]:
    """A query that was given is meant; without one, the mean of the keys may be worth having."""
    return ("given",) if isinstance(batch, SetGroups) or batch.query is not None else ("given", "mean")


def class_weights(class_weight: Any, labels: np.ndarray, weights: np.ndarray | None) -> np.ndarray | None:
    """Sample weights times those of the classes, scaled to keep their sum: None if both are None."""
    if class_weight is None:
        return weights
    by_class = compute_sample_weight(class_weight, labels)
    return np.asarray(by_class if weights is None else by_class * weights)
