"""Labels of classifiers: their numbers, their one-vs-rest targets, and scores of classes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.base import BaseEstimator
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import column_or_1d

from keyhole._checks import check_labels, check_lengths
from keyhole.estimators.validation import check_target_given
from keyhole.ridge import calibration

TASKS = ("auto", "regression", "classification")
SCORE_WITHOUT_WEIGHT = -1.0
"""Score of a class whose samples all have weight 0: what ridge predicts for a target of −1."""


def likely_task(target: np.ndarray) -> str:
    """Classification where the target is text, yes or no, or a few whole numbers.

    >>> (
    ...     likely_task(np.array([0.5, 1.0])),
    ...     likely_task(np.array(["a", "b"])),
    ...     likely_task(np.arange(100)),
    ... )
    ('regression', 'classification', 'regression')
    """
    kind = target.dtype.kind
    if kind in "UbO":
        return "classification"
    if kind in "iu":
        most_classes = min(20, max(2, len(target) // 5))
        if len(np.unique(target)) <= most_classes:
            return "classification"
    return "regression"


def number_labels(
    estimator: BaseEstimator, y: Any, samples: Any
) -> tuple[np.ndarray, Int[np.ndarray, " n"]]:
    """The classes of y, sorted, and the number of the class of every sample."""
    # labels are of one axis, finite if numbers, of one kind, not continuous, and one per sample
    check_target_given(estimator, y)
    _refuse_several_labels(estimator, y)
    y = column_or_1d(y, warn=True)
    assert_all_finite(y, input_name="y", estimator_name=type(estimator).__name__)
    check_labels(y, "y", "class")
    check_classification_targets(y)
    check_lengths(samples, y, "y")
    classes, labels = np.unique(y, return_inverse=True)
    return classes, np.asarray(labels)


def _refuse_several_labels(estimator: BaseEstimator, y: Any) -> None:
    """Raise where samples have several labels each, and say what fits these."""
    shape = np.asarray(y).shape
    if len(shape) != 2 or shape[1] < 2:
        return
    kind = type(estimator).__name__
    raise ValueError(
        f"`y` must have one label for each sample: got {shape[1]} columns (shape {shape}, "
        f"{type_of_target(y)!r}). For several labels a sample, fit one classifier to each column "
        f"with sklearn.multioutput.MultiOutputClassifier(kh.{kind}()); for scores that share heads "
        "and penalty, fit kh.AttentionRegressor() to the columns as numbers 0 and 1; for one-hot "
        "classes, pass y.argmax(axis=1)."
    )


def classes_with_weight(
    classes: np.ndarray, labels: Int[np.ndarray, " n"], weights: Float[np.ndarray, " n"] | None
) -> Bool[np.ndarray, " c"]:
    """Which classes have a sample of positive weight. Raise unless there are two of them."""
    if weights is None:
        weighted_labels = labels
        of_weight = ""
    else:
        weighted_labels = labels[weights > 0]
        of_weight = " of positive weight"
    has_weight = np.bincount(weighted_labels, minlength=len(classes)) > 0
    if has_weight.sum() < 2:
        raise ValueError(
            f"`y` must have at least two classes: got 1 class, '{classes[has_weight][0]}', in "
            f"{len(weighted_labels)} samples{of_weight}. There is nothing to tell apart."
        )
    return has_weight


def one_vs_rest(labels: Int[np.ndarray, " n"], n_classes: int) -> Float[np.ndarray, "n t"]:
    """Targets ±1, one output per class; a single output for two classes."""
    targets = np.where(labels[:, None] == np.arange(n_classes), 1.0, -1.0)
    if n_classes == 2:
        return targets[:, 1:]
    return targets


def scores_per_class(decision: np.ndarray) -> np.ndarray:
    """One column of scores per class, from a decision function."""
    return calibration.class_scores(decision.reshape(len(decision), -1))


def without_weightless(
    scores: Float[np.ndarray, "*m c"], has_weight: Bool[np.ndarray, " c"] | None
) -> Float[np.ndarray, "*m c"]:
    """Scores of classes, −∞ for those without weight, which are never predicted.

    ``has_weight=None`` means that all classes have weight.
    """
    if has_weight is None or has_weight.all():
        return scores
    return np.where(has_weight, scores, -np.inf)


@dataclass(frozen=True)
class WeightedClasses:
    """The classes that a fit is about, among all classes of y.

    A fit has one output for each class that has weight, or a single one for two of them. A class
    whose samples all have weight 0 is not part of it, but keeps its place among the classes: its
    values are 0, its score is `SCORE_WITHOUT_WEIGHT`, its probability is 0.

    Attributes
    ----------
    has_weight : bool array (classes,)
    first_of_two : float
        The score of the first of two classes, in units of that of the second: −1 for ridge on ±1,
        0 for the log-odds of the norm ball.
    """

    has_weight: Bool[np.ndarray, " c"]
    first_of_two: float

    @property
    def count(self) -> int:
        """How many classes the fit is about."""
        return int(self.has_weight.sum())

    def numbers(self, labels: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Labels numbered among the classes that have weight; −1 for the others."""
        number = np.cumsum(self.has_weight) - 1
        return np.where(self.has_weight[labels], number[labels], -1)

    def of_all_classes(self, outputs: np.ndarray, without_weight: float) -> np.ndarray:
        """Outputs (…, t) of the fit as outputs (…, classes) of all classes."""
        if self.has_weight.all():
            return outputs
        # two classes share one output: write out that of the first class too
        if outputs.shape[-1] == 1:
            outputs = np.concatenate([self.first_of_two * outputs, outputs], axis=-1)
        expanded = np.full((*outputs.shape[:-1], len(self.has_weight)), without_weight)
        expanded[..., self.has_weight] = outputs
        return expanded

    def of_layer(self, layer: Any) -> Any:
        """A layer of all classes from the layer of the fit, of finitely or infinitely many heads.

        Classes without weight have coefficients 0: their score is the intercept.
        """
        intercept = self.of_all_classes(layer.intercept, SCORE_WITHOUT_WEIGHT)
        extras_values = layer.extras_values
        if extras_values is not None:
            extras_values = self.of_all_classes(extras_values, without_weight=0.0)

        # the coefficients are dual ones where heads are infinitely many
        if hasattr(layer, "dual"):
            dual = self.of_all_classes(layer.dual, without_weight=0.0)
            return replace(layer, dual=dual, intercept=intercept, extras_values=extras_values)
        values = self.of_all_classes(layer.values, without_weight=0.0)
        return replace(layer, values=values, intercept=intercept, extras_values=extras_values)
