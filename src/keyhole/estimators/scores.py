"""How good held-out predictions are, beside those of a constant guess.

Classes: accuracy, area under the ROC curve (AUC) and log-loss. Numbers: RMSE and R². The measures
are those of scikit-learn. A constant guess is what the training samples say without looking at the
sets: the share of each class, or the mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.special import softmax
from sklearn.metrics import log_loss, r2_score, roc_auc_score

from keyhole.solve.calibration import class_scores

PROBABILITY_FLOOR = float(np.finfo(np.float64).eps)  # as in scikit-learn's log-loss


@dataclass(frozen=True)
class ClassMeasures:
    """Measures of predicted classes; NaN where one is not defined."""

    accuracy: float
    auc: float
    log_loss: float

    def words(self, n_classes: int = 2, standard_error: float | None = None) -> str:
        """In words: of more than two classes the AUC is a mean, which is said.

        ``standard_error`` is that of the accuracy.
        """
        kind = "" if n_classes == 2 else " (mean over classes, one against the rest)"
        spread = "" if standard_error is None else f" ± {100 * standard_error:.1f}"
        return (
            f"accuracy {100 * self.accuracy:.1f} %{spread}, AUC {_short(self.auc)}{kind}, "
            f"log-loss {_short(self.log_loss)}"
        )


@dataclass(frozen=True)
class NumberMeasures:
    """Measures of predicted numbers; R² is NaN where the target does not vary."""

    rmse: float
    r2: float


def _short(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def auc(labels: Int[np.ndarray, " n"], scores: Float[np.ndarray, "n c"]) -> float:
    """The area under the ROC curve: of the second of two classes, else the mean over classes.

    The mean is macro, one against the rest: every class that is there counts alike. NaN where all
    samples are of one class.

    Parameters
    ----------
    labels : integer array (n,)
        Column of the true class; −1 for a class that has no column.
    scores : array (n, classes)
        Probabilities, or any scores that are larger for likelier classes.

    Examples
    --------
    >>> auc(np.array([0, 1, 1, 0]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.4, 0.6]]))
    0.75
    """
    classes = range(scores.shape[1])
    if scores.shape[1] == 2:
        classes = range(1, 2)
    areas = []
    for c in classes:
        is_class = labels == c
        if is_class.any() and not is_class.all():
            areas.append(float(roc_auc_score(is_class, scores[:, c])))
    return float(np.mean(areas)) if areas else math.nan


def class_measures(
    labels: Int[np.ndarray, " n"], probabilities: Float[np.ndarray, "n c"]
) -> ClassMeasures:
    """Accuracy, AUC and log-loss of probabilities; see `auc` for the arguments.

    The log-loss is NaN where a sample has a class that has no column.
    """
    loss = math.nan
    if len(labels) and labels.min() >= 0:
        columns = np.arange(probabilities.shape[1])
        clipped = np.maximum(probabilities, PROBABILITY_FLOOR)
        clipped /= clipped.sum(axis=1, keepdims=True)
        loss = float(log_loss(labels, clipped, labels=columns))
    return ClassMeasures(
        accuracy=float((probabilities.argmax(axis=1) == labels).mean()),
        auc=auc(labels, probabilities),
        log_loss=loss,
    )


def constant_class_guess(
    labels: Int[np.ndarray, " n"], training_labels: Int[np.ndarray, " m"], n_classes: int
) -> ClassMeasures:
    """The same of a guess that is the share of each class among the training samples."""
    shares = np.bincount(training_labels, minlength=n_classes) / len(training_labels)
    return class_measures(labels, np.tile(shares, (len(labels), 1)))


def probabilities_of(decision: np.ndarray, temperature: float) -> Float[np.ndarray, "n c"]:
    """Scores of a classifier as probabilities; one column of scores stands for two classes."""
    per_class = class_scores(decision.reshape(len(decision), -1))
    return np.asarray(softmax(temperature * per_class, axis=1))


def number_measures(target: np.ndarray, predictions: np.ndarray) -> NumberMeasures:
    """RMSE and R² of predictions; of several outputs the mean of their R²."""
    rmse = float(np.sqrt(np.square(target - predictions).mean()))
    r2 = math.nan
    if len(target) > 1 and bool((target.var(axis=0) > 0).all()):
        r2 = float(r2_score(target, predictions))
    return NumberMeasures(rmse=rmse, r2=r2)
