"""What the estimators share: their tags, the memory they may take, labels and their scores."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from keyhole.estimators.inputs import as_heads, check_given, check_lengths
from keyhole.ridge import calibration


class SetEstimator(BaseEstimator):
    """An estimator whose samples are sets."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


class LabelScores:
    """Labels from a layer with one column of scores per class, or a single one for two classes."""

    classes_: np.ndarray

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return scores: (n,) for two classes, positive for ``classes_[1]``; otherwise (n, classes)."""
        scores = self._scores(X)  # type: ignore[attr-defined]
        return outputs(scores, len(self.classes_) == 2)

    def predict(self, X: Any) -> Any:
        """Return the label with the highest score."""
        winners = self._class_scores(X).argmax(axis=1)  # first: it says so if nothing was fitted
        return self.classes_[winners]

    def _class_scores(self, X: Any) -> np.ndarray:
        return class_scores(self.decision_function(X))

    def _encode(self, y: Any, batch: Any, weights: np.ndarray | None = None) -> np.ndarray:
        """Number the labels that have weight, sorted, as ``classes_``; the others, if any, are −1."""
        check_given(self, y)
        y = column_or_1d(y, warn=True)
        assert_all_finite(y, input_name="y", estimator_name=type(self).__name__)
        check_classification_targets(y)
        check_lengths(batch, y, "y")
        counted = y if weights is None else y[weights > 0]
        self.classes_ = np.unique(counted)
        if len(self.classes_) < 2:
            raise ValueError(
                f"`y` must have at least two classes: got 1 class, '{self.classes_[0]}', in {len(counted)} samples"
                f"{'' if weights is None else ' of positive weight'}. There is nothing to tell apart."
            )
        places = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        return np.where(self.classes_[places] == y, places, -1)


def class_scores(decision: np.ndarray) -> np.ndarray:
    """One column of scores per class, from a decision function."""
    return calibration.class_scores(decision.reshape(len(decision), -1))


def outputs(array: np.ndarray, single: bool) -> np.ndarray:
    """Drop the last axis, of outputs, if there is just one and nobody asked for the axis."""
    return array[..., 0] if single else array


def finite_heads(n_heads: Any, reason: str) -> int:
    """The number of heads; infinitely many are refused for a reason that ends in what to do."""
    count = as_heads(n_heads)
    if count is None:
        raise ValueError(f"`n_heads` must be finite for {reason}")
    return count


def memory_budget() -> int:
    """scikit-learn's ``working_memory``, in bytes: 1 GiB unless the user says otherwise."""
    return int(get_config()["working_memory"] * 2**20)
