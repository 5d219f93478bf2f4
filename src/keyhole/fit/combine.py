"""Combining members: non-negative weights on their leave-one-out predictions.

    f(x) = b + Σ_c w_c f_c(x),   w ≥ 0,   w = argmin Σ_i loss(y_i, b + Σ_c w_c f_{c,−i}(x_i))

For squared errors these are non-negative least squares. For classes it is logistic regression on
the scores of the members, with one weight for each and a free intercept for each class, which
calibrates
at the same time. Most weights are zero; members of little influence leave, and the weights of those
that stay are solved for again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.linalg
from jaxtyping import Float, Int
from scipy.optimize import minimize, nnls

from keyhole.fit.member import Member
from keyhole.fit.samples import TrainingSet
from keyhole.solve.calibration import class_scores, fit_temperature, labels_of

LEAST_INFLUENCE = 0.02
"""Share of w_c·sd(f_c) in their sum below which a member leaves."""

MOST_MEMBERS = 6

WEIGHT_RIDGE = 1e-3
"""Ridge on the weights of a logistic combination, per sample, for scores of size one.

Without it separable scores send the weights to infinity.
"""


@dataclass
class Combination:
    """Members with their weights; a single member has weight 1 and no intercept of its own.

    Attributes
    ----------
    members : tuple of Member
    weights : array (c,)
    intercept : array (t,)
    held_out : array (n, t)
        Predictions of the training samples without them: Σ w_c f_{c,−i}(x_i) + b.
    temperature : float or None
        What turns the scores of a single classifier into logits; None where scores are logits.
    tried : tuple of Member
        All members that were fitted, with those that have weight 0; a model file has only those
        that have weight.
    n_tried : int
        How many there were.
    """

    members: tuple[Member, ...]
    weights: Float[np.ndarray, " c"]
    intercept: Float[np.ndarray, " t"]
    held_out: Float[np.ndarray, "n t"] = field(repr=False)
    temperature: float | None = None
    tried: tuple[Member, ...] = field(default=(), repr=False)
    n_tried: int = 0

    def __post_init__(self) -> None:
        self.n_tried = max(self.n_tried, len(self.tried))

    @property
    def is_single(self) -> bool:
        """Whether one member was fitted, and nothing combined."""
        return self.n_tried <= 1

    def predict(self, samples: Any) -> Float[np.ndarray, "n t"]:
        """f of samples as they were given."""
        outputs = np.tile(self.intercept, (len(samples), 1))
        for weight, member in zip(self.weights, self.members, strict=True):
            outputs = outputs + weight * member.predict(samples)
        return outputs

    def contributions(
        self, samples: Any
    ) -> tuple[Float[np.ndarray, "k t"], Float[np.ndarray, "n t"]]:
        """What every key adds to f, and what is left of f for every sample: weighted sums."""
        rest = np.tile(self.intercept, (len(samples), 1))
        parts: Any = 0.0
        for weight, member in zip(self.weights, self.members, strict=True):
            of_keys, of_samples = member.contributions(samples)
            parts = parts + weight * of_keys
            rest = rest + weight * of_samples
        return parts, rest

    def logits(self, scores: Float[np.ndarray, "*m t"]) -> Float[np.ndarray, "*m c"]:
        """Logits of the classes, from the scores of `predict`."""
        if self.temperature is not None:
            return class_scores(scores) * self.temperature
        if scores.shape[-1] == 1:
            return np.concatenate([np.zeros_like(scores), scores], axis=-1)
        return scores


def single(member: Member, data: TrainingSet, *, classifies: bool) -> Combination:
    """One member by itself: its predictions are what it predicts."""
    temperature = None
    if classifies:
        temperature = fit_temperature(
            class_scores(member.held_out), labels_of(data.outputs), data.shares * len(data)
        )
    return Combination(
        members=(member,),
        weights=np.ones(1),
        intercept=np.zeros(data.outputs.shape[1]),
        held_out=member.held_out,
        temperature=temperature,
        tried=(member,),
    )


def combine(members: Sequence[Member], data: TrainingSet, *, classifies: bool) -> Combination:
    """Weights of least loss, of the members that have influence."""
    predictions = np.stack([member.held_out for member in members])
    kept, weights, intercept = weights_of(predictions, data, classifies=classifies)
    return Combination(
        members=tuple(members[position] for position in kept),
        weights=weights,
        intercept=intercept,
        held_out=intercept + np.einsum("c,cnt->nt", weights, predictions[kept]),
        tried=tuple(members),
    )


def weights_of(
    predictions: Float[np.ndarray, "c n t"], data: TrainingSet, *, classifies: bool
) -> tuple[list[int], Float[np.ndarray, " k"], Float[np.ndarray, " t"]]:
    """Which members stay, their weights w ≥ 0, and the intercept of least loss.

    ``predictions`` are held-out predictions of every member. One that is not known for every sample
    is left out.
    """
    known = [i for i in range(len(predictions)) if np.isfinite(predictions[i]).all()]
    if not known:
        raise ValueError(
            "none of the layers can be judged: under each, some sample is fitted exactly within "
            "rounding. Pass a positive number as `alpha`, or more samples."
        )
    weights, intercept = _least_loss(predictions[known], data, classifies=classifies)

    # members of little influence leave, and at most six stay
    centred = predictions[known] - np.einsum("n,cnt->ct", data.shares, predictions[known])[:, None]
    spreads = np.sqrt(np.einsum("n,cnt->c", data.shares, np.square(centred)))
    influence = weights * spreads
    order = np.argsort(-influence, kind="stable")[:MOST_MEMBERS]
    least = LEAST_INFLUENCE * influence.sum()
    kept = sorted(known[position] for position in order if influence[position] > least)
    if not kept:
        # nothing says anything of y: the first member, at weight 0, stands for the constant
        kept = [known[0]]
    if len(kept) < len(known):
        weights, intercept = _least_loss(predictions[kept], data, classifies=classifies)
    return kept, weights, intercept


def _least_loss(
    predictions: Float[np.ndarray, "c n t"], data: TrainingSet, *, classifies: bool
) -> tuple[Float[np.ndarray, " c"], Float[np.ndarray, " t"]]:
    """The weights w ≥ 0 and the intercept of least loss on held-out predictions."""
    if classifies:
        return non_negative_logistic(predictions, labels_of(data.outputs), data.shares)
    return non_negative_least_squares(predictions, data.outputs, data.shares)


def non_negative_least_squares(
    predictions: Float[np.ndarray, "c n t"],
    y: Float[np.ndarray, "n t"],
    shares: Float[np.ndarray, " n"],
) -> tuple[Float[np.ndarray, " c"], Float[np.ndarray, " t"]]:
    """w ≥ 0 and b: the least Σ_i s_i |y_i − b − Σ_c w_c P_ci|², outputs in units of their spread.

    >>> P = np.array([[[0.0], [1.0], [2.0]], [[5.0], [5.0], [-1.0]]])
    >>> w, b = non_negative_least_squares(P, np.array([[1.0], [3.0], [5.0]]), np.full(3, 1 / 3))
    >>> w.round(3), b.round(3)
    (array([2., 0.]), array([1.]))
    """
    y_mean = shares @ y
    means = np.einsum("n,cnt->ct", shares, predictions)
    spread = np.sqrt(shares @ np.square(y - y_mean))
    units = np.sqrt(shares)[:, None] / np.where(spread > 0, spread, 1.0)
    design = (units * (predictions - means[:, None, :])).reshape(len(predictions), -1)
    target = (units * (y - y_mean)).ravel()

    # a Cholesky factor of the c × c moments is all that NNLS needs
    moments = design @ design.T
    moments[np.diag_indices(len(moments))] += 1e-10 * max(float(moments.diagonal().mean()), 1e-300)
    factor = scipy.linalg.cholesky(moments)
    right = scipy.linalg.solve_triangular(factor, design @ target, trans="T")
    weights, _ = nnls(factor, right)
    return weights, y_mean - weights @ means


def non_negative_logistic(
    predictions: Float[np.ndarray, "c n t"],
    labels: Int[np.ndarray, " n"],
    shares: Float[np.ndarray, " n"],
) -> tuple[Float[np.ndarray, " c"], Float[np.ndarray, " t"]]:
    """w ≥ 0 and b: logits b_k + Σ_c w_c P_ck of the classes, of least log-loss.

    Two classes have one output, the logit of the second. Labels are trusted as in Platt's scaling:
    a sample of class k counts as (n_k + 1)/(n_k + 2) of that class.
    """
    n_members, n, n_outputs = predictions.shape
    size = math.sqrt(float(np.mean(np.square(predictions)))) or 1.0
    scores = predictions / size
    if n_outputs == 1:
        scores = np.concatenate([np.zeros_like(scores), scores], axis=2)
    n_classes = scores.shape[2]
    counts = np.bincount(labels, weights=shares * n, minlength=n_classes)
    doubt = 1.0 / (counts[labels] + 2.0)
    targets = np.repeat((doubt / (n_classes - 1))[:, None], n_classes, axis=1)
    targets[np.arange(n), labels] = 1.0 - doubt

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        logits = np.einsum("c,cnk->nk", x[:n_members], scores) + x[n_members:]
        logits -= logits.max(axis=1, keepdims=True)
        log_sums = np.log(np.exp(logits).sum(axis=1))
        gaps = np.exp(logits - log_sums[:, None]) - targets
        value = shares @ (log_sums - np.sum(logits * targets, axis=1))
        weighted_gaps = shares[:, None] * gaps
        of_weights = np.einsum("cnk,nk->c", scores, weighted_gaps)
        penalty = np.concatenate([WEIGHT_RIDGE * x[:n_members], np.zeros(n_classes)])
        gradient = np.concatenate([of_weights, weighted_gaps.sum(axis=0)]) + penalty
        return float(value + 0.5 * x @ penalty), gradient

    start = np.concatenate([np.full(n_members, 1.0 / n_members), np.zeros(n_classes)])
    bounds = [(0.0, None)] * n_members + [(None, None)] * n_classes
    found = minimize(
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 1000, "ftol": 1e-12, "gtol": 1e-8},
    )
    weights = found.x[:n_members] / size
    intercept = found.x[n_members:] - found.x[n_members:].mean()
    if n_outputs == 1:
        intercept = intercept[1:] - intercept[:1]
    return weights, intercept
