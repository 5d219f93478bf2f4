"""Labels of classifiers: their numbers, their one-vs-rest targets, and scores of classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.base import BaseEstimator
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import column_or_1d

from keyhole._checks import check_labels, check_lengths
from keyhole.estimators.validation import check_target_given
from keyhole.solve import calibration

TASKS = ("auto", "regression", "classification")


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


def check_weighted_classes(
    classes: np.ndarray, labels: Int[np.ndarray, " n"], weights: Float[np.ndarray, " n"] | None
) -> None:
    """Raise unless there are two classes, and a sample of positive weight of each."""
    if len(classes) < 2:
        raise ValueError(
            f"`y` must have at least two classes: got 1 class, '{classes[0]}', in {len(labels)} "
            "samples. There is nothing to tell apart."
        )
    weighted_labels = labels if weights is None else labels[weights > 0]
    has_weight = np.bincount(weighted_labels, minlength=len(classes)) > 0
    if not has_weight.all():
        absent = classes[int(np.flatnonzero(~has_weight)[0])]
        raise ValueError(
            f"every class must have a sample of positive weight: class {absent!s:.40} has none. "
            "Leave its samples out, or give one of them a weight."
        )


def one_vs_rest(labels: Int[np.ndarray, " n"], n_classes: int) -> Float[np.ndarray, "n t"]:
    """Targets ±1, one output per class; a single output for two classes."""
    targets = np.where(labels[:, None] == np.arange(n_classes), 1.0, -1.0)
    if n_classes == 2:
        return targets[:, 1:]
    return targets


def scores_per_class(decision: np.ndarray) -> np.ndarray:
    """One column of scores per class, from a decision function."""
    return calibration.class_scores(decision.reshape(len(decision), -1))
