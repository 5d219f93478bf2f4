"""Probabilities from scores: one temperature, fitted to held-out scores by maximum likelihood."""

from __future__ import annotations

import warnings

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import brentq
from scipy.special import softmax


def fit_temperature(
    scores: Float[np.ndarray, "n c"], labels: Int[np.ndarray, " n"], weights: Float[np.ndarray, " n"] | None = None
) -> float:
    """Find the c > 0 that makes softmax(c · scores) the likeliest probabilities of the labels.

    The scores must be held out, such as leave-one-out predictions: scores of the data a model was fitted to are
    too sure of themselves, and so would c be. The log-loss is convex in c. As in Platt's scaling a sample of class
    k counts as (n_k + 1)/(n_k + 2) of that class and the rest spread over the others, n_k being the weight of the
    class, so that separable scores give a finite c.

    Parameters
    ----------
    scores : array (n, classes)
        A row that is not finite, of a sample whose leverage is 1 within rounding, tells nothing and is left out; if
        every row is, c is 1 and a warning says so.
    labels : integer array (n,)
        Column of the true class.
    weights : array (n,), optional

    Returns
    -------
    float
        c. Where the scores tell nothing of the labels it is tiny but positive, so that the likeliest class stays
        the one with the highest score.

    Notes
    -----
    O(n · classes) per evaluation and some 50 of them.

    Examples
    --------
    >>> import numpy as np
    >>> scores = np.array([[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]])
    >>> round(fit_temperature(scores, np.array([0, 0, 1, 1])), 3)  # three of four right, each label trusted 3:1
    0.255
    """
    weights = np.ones(len(scores)) if weights is None else weights
    known = np.isfinite(scores).all(axis=1)
    if not known.any():
        warnings.warn(
            "probabilities are not calibrated: every sample is fitted exactly within rounding, so that leave-one-out says "
            "nothing of it. Use a larger penalty, or alpha='loo'.",
            stacklevel=3,
        )
        return 1.0
    scores, labels, weights = scores[known], labels[known], weights[known]
    n, n_classes = scores.shape
    spread = float(np.ptp(scores, axis=1).max())
    if spread == 0.0:
        return 1.0
    counts = np.bincount(labels, weights=weights, minlength=n_classes)
    doubt = 1.0 / (counts[labels] + 2.0)
    truth = np.repeat((doubt / (n_classes - 1))[:, None], n_classes, axis=1)
    truth[np.arange(n), labels] = 1.0 - doubt
    wanted = weights @ (truth * scores).sum(axis=1)

    def slope(c: float) -> float:
        expected = (softmax(c * scores, axis=1) * scores).sum(axis=1)
        return float(weights @ expected - wanted)

    low, high = 1e-6 / spread, 1.0 / spread
    if slope(low) >= 0.0:
        return low
    while slope(high) < 0.0 and high < 1e12 / spread:
        high *= 4.0
    return float(brentq(slope, low, high, rtol=1e-12)) if slope(high) > 0.0 else high
