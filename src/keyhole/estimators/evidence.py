"""What speaks for a prediction and what against it: contributions as displays show them.

`keyhole.estimators.base.SetModel.contributions` compares a prediction with the intercept, the
model's answer to a set without keys. That is no set anybody has, and where one label is rare its
score is far below zero: the key of largest contribution then often argues against the label that
was predicted. Displays therefore

- give every key an equal share of the intercept, c_i + b/N, which for ``pooling="mean"`` and a
  given query is f({x_i})/N, the prediction for the key alone divided by the number of keys; and
- take the side of the label that was predicted, so that positive numbers speak for it.

With extras they add up to the prediction: to f(x) of a regressor, to ±decision_function of two
labels, and of more labels to the lead of the one that was predicted over the one that came second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.estimators.classes import scores_per_class, without_weightless


@dataclass(frozen=True)
class Evidence:
    """What every key and every sample-level feature says about one output of some samples.

    Attributes
    ----------
    keys : list of n arrays (N_i,)
        In the order of the keys; the intercept is shared equally among them.
    extras : array (n, features)
    labels : array (n,) or None
        Of a classifier, the labels that were predicted: positive numbers speak for them.
    others : array (n,) or None
        The labels that negative numbers speak for: the other one of two, the second best of more.
    """

    keys: list[Float[np.ndarray, " _"]]
    extras: Float[np.ndarray, "n c"]
    labels: np.ndarray | None = None
    others: np.ndarray | None = None


def evidence_of_predictions(model: Any, X: Any) -> list[Evidence]:
    """One `Evidence` for each output of a regressor; of a classifier one for the labels predicted.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(100, n_keys=4, dim=3, seed=0)
    >>> size = kh.targets.TokenPower(2, dim=3)(sets)
    >>> model = kh.AttentionClassifier(50, random_state=0).fit(sets, size > 0.3)
    >>> (evidence,) = evidence_of_predictions(model, sets[:2])
    >>> totals = [part.sum() for part in evidence.keys]
    >>> bool(np.allclose(totals, np.abs(model.decision_function(sets[:2]))))
    True
    """
    # contributions (N_i, t) of keys and (n, c, t) of extras, always with an axis of outputs
    intercept = np.atleast_1d(model.intercept_)
    n_outputs = len(intercept)
    of_keys = []
    for part in model.contributions(X):
        part = part.reshape(len(part), n_outputs)
        of_keys.append(part + intercept / len(part))
    extras = model.extras_contributions(X)
    of_extras = extras.reshape(*extras.shape[:2], n_outputs)

    # numbers: every output as it is
    if not hasattr(model, "classes_"):
        outputs = range(n_outputs)
        return [
            Evidence(keys=[part[:, j] for part in of_keys], extras=of_extras[:, :, j])
            for j in outputs
        ]

    # labels: the one predicted, and the one it is compared with
    scores = scores_per_class(model.decision_function(X))
    scores = without_weightless(scores, getattr(model, "class_has_weight_", None))
    best = scores.argmax(axis=1)
    rows = np.arange(len(scores))
    scores[rows, best] = -np.inf
    second = scores.argmax(axis=1)

    # the difference of their outputs; two labels share one, which is the score of the second label
    directions = np.zeros((len(scores), n_outputs))
    if n_outputs == 1:
        directions[:, 0] = np.where(best == 1, 1.0, -1.0)
    else:
        directions[rows, best] = 1.0
        directions[rows, second] = -1.0
    return [
        Evidence(
            keys=[part @ direction for part, direction in zip(of_keys, directions, strict=True)],
            extras=np.einsum("nct,nt->nc", of_extras, directions),
            labels=model.classes_[best],
            others=model.classes_[second],
        )
    ]
