"""From training sets to a fitted layer: scaling and queries by leave-one-out, the law, the values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.base import BaseEstimator
from sklearn.utils.class_weight import compute_sample_weight

from keyhole._checks import check_choice
from keyhole.estimators._input import as_sets
from keyhole.groups import POOLINGS, PooledSets, SetGroups
from keyhole.heads import GaussianHeads, HeadDraw, HeadLaw
from keyhole.large_layer import exceeds_memory, fit_large_layer
from keyhole.layer import LayerFit, fit_finite_layer, fit_kernel_layer
from keyhole.sets import SetBatch
from keyhole.tokens import QUERIES, SCALINGS, TokenRule


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
    solver: str = "auto"
    hold_out: bool = False

    def fitted_law(self, batch: SetBatch | PooledSets, columns: np.ndarray) -> HeadLaw:
        """The law itself, or what its ``fit`` makes of the training set."""
        fit: Callable[..., HeadLaw] | None = getattr(self.law, "fit", None)
        if fit is None:
            return self.law
        names = ("activation", "fit_intercept", "weights")
        return fit(batch, columns, seed=self.seed, **{name: self.options[name] for name in names})

    def fit(self, batch: SetBatch | PooledSets, columns: np.ndarray, law: HeadLaw) -> LayerFit:
        """Solve for the values of this law."""
        if self.n_heads is None:
            if self.solver == "cg":
                raise ValueError("solver='cg' is for finitely many heads: `n_heads` is infinite. Use solver='direct'.")
            return fit_kernel_layer(batch, columns, law, self.penalties, **self.options)
        draw = HeadDraw(law, self.n_heads, batch.dim, self.seed)
        large = exceeds_memory(len(batch), self.n_heads * (batch.dim + 1), self.dtype)
        if self.solver == "cg" or (self.solver == "auto" and large):
            options = {**self.options, "dtype": self.dtype, "hold_out": self.hold_out}
            return fit_large_layer(batch, columns, draw, self.penalties, **options)
        return fit_finite_layer(batch, columns, draw, self.penalties, dtype=self.dtype, **self.options)


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
    """Choose the token rule if asked to, fit the law if it wants to be, solve for the values."""
    pooling = check_choice(pooling, "pooling", POOLINGS)
    rules = [
        TokenRule.learn(batch, s, q, pooling)
        for s in _candidates(scaling, "scaling", SCALINGS, SCALINGS)
        for q in _candidates(query, "query", QUERIES, _queries_worth_trying(batch))
    ]
    rule, tried = rules[0], {}
    if len(rules) > 1:
        # a law that is learned is learned once, under the rule that suits heads around zero
        law = GaussianHeads() if hasattr(plan.law, "fit") else plan.law
        draft = replace(plan, penalties=None, solver="direct")
        errors = [draft.fit(r.apply(batch), columns, law).loo_error for r in rules]
        tried = {(r.scaling, r.query): e for r, e in zip(rules, errors, strict=True)}
        rule = rules[int(np.argmin(errors))]
    ready = rule.apply(batch)
    law = plan.fitted_law(ready, columns)
    return SetFit(plan.fit(ready, columns, law), rule, law, tried)


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
