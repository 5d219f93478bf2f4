"""Scores of classes as probabilities.

The temperature of left-out scores, and the log-loss they are judged by.
"""

from __future__ import annotations

import warnings

import numpy as np
from jaxtyping import Float, Int

MAX_SCORES = 2**23
"""Left-out scores (penalties × samples × outputs) that penalties are compared by; evenly spaced
samples beyond.
"""

_LEAST, _MOST, _GROWTH, _MAX_STEPS = 1e-6, 1e12, 8.0, 200
"""Bounds on c in units of one over the spread of the scores, and on one step; Newton's method takes
ten as a rule.
"""


def labels_of(columns: Float[np.ndarray, "n t"]) -> Int[np.ndarray, " n"]:
    """The class of every row of ±1 columns: one column per class, or a single one for two."""
    return (columns[:, 0] > 0).astype(int) if columns.shape[1] == 1 else columns.argmax(axis=1)


def class_scores(scores: Float[np.ndarray, "*a t"]) -> Float[np.ndarray, "*a c"]:
    """One column of scores per class; a single one stands for two."""
    return np.concatenate([-scores, scores], axis=-1) if scores.shape[-1] == 1 else scores


def calibrate(
    scores: Float[np.ndarray, "a n c"],
    labels: Int[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"],
    tolerance: float = 1e-12,
) -> tuple[Float[np.ndarray, " a"], Float[np.ndarray, "a n"]]:
    """The likeliest temperature of every stack of finite scores.

    And the log-loss of every sample at it.

    All stacks at once, by Newton's method on the slope in c, kept between bounds that close in.
    O(a·n·c) a step. A ``tolerance`` of the temperature is, squared, that of the mean loss.
    """
    n_classes = scores.shape[2]
    every = np.arange(len(labels))
    counts = np.bincount(labels, weights=weights, minlength=n_classes)
    doubt = 1.0 / (counts[labels] + 2.0)
    below = np.ascontiguousarray(
        np.moveaxis(scores, 2, 0)
    )  # classes first: sums over them run along long rows
    below = below - below.max(axis=0)
    spread = -below.min(axis=(0, 2))
    below /= np.where(spread > 0, spread, 1.0)[:, None]
    own = np.moveaxis(below, 0, 2)[:, every, labels]
    wanted = ((1 - doubt) * own + doubt / (n_classes - 1) * (below.sum(axis=0) - own)) @ weights
    low, high = np.full(len(scores), _LEAST), np.full(len(scores), _MOST)
    c = np.where(spread > 0, low, 1.0)
    active = np.flatnonzero(spread > 0)
    for _ in range(_MAX_STEPS):
        if not len(active):
            break
        z, now = below if len(active) == len(c) else below[:, active], c[active]
        chances = z * now[:, None]
        np.exp(chances, out=chances)
        total = chances.sum(axis=0)
        chances *= z
        first = chances.sum(axis=0) / total
        chances *= z
        second = chances.sum(axis=0) / total
        slope, curvature = first @ weights - wanted[active], (second - np.square(first)) @ weights
        low[active] = np.where(slope < 0, now, low[active])
        high[active] = np.where(slope < 0, high[active], now)
        step = np.divide(-slope, curvature, out=np.full(len(now), np.inf), where=curvature > 0)
        most = _GROWTH * np.maximum(now, 1.0)
        new = np.minimum(now + step, most)
        lo, hi = low[active], high[active]
        new = np.where((new <= lo) | (new >= hi), np.minimum(np.sqrt(lo * hi), most), new)
        # the least c stands for scores that tell nothing; so does the most for those that tell all
        ended = ((slope >= 0) & (now <= _LEAST)) | (slope == 0) | (now >= _MOST / _GROWTH)
        c[active] = np.where(ended, now, new)
        active = active[~ended & (np.abs(new - now) > tolerance * now)]
    losses = np.log(np.exp(c[:, None] * below).sum(axis=0)) - c[:, None] * own
    return c / np.where(spread > 0, spread, 1.0), losses


def fit_temperature(
    scores: Float[np.ndarray, "n c"],
    labels: Int[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"] | None = None,
) -> float:
    """Find the c > 0 that makes softmax(c · scores) the likeliest probabilities of the labels.

    The scores must be held out, such as leave-one-out predictions: scores of the data a model was
    fitted to are too sure of themselves, and so would c be. The log-loss is convex in c. As in
    Platt's scaling a sample of class k counts as (n_k + 1)/(n_k + 2) of that class and the rest
    spread over the others, n_k being the weight of the class, so that separable scores give a
    finite c.

    Parameters
    ----------
    scores : array (n, classes)
        A row that is not finite, of a sample whose leverage is 1 within rounding, tells nothing and
        is left out; if every row is, c is 1 and a warning says so.
    labels : integer array (n,)
        Column of the true class.
    weights : array (n,), optional

    Returns
    -------
    float
        c. Where the scores tell nothing of the labels it is tiny but positive, so that the
        likeliest class stays the one with the highest score.

    Examples
    --------
    >>> import numpy as np
    >>> scores = np.array([[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, -1.0]])
    >>> # three of four right, each label trusted 3:1
    >>> round(fit_temperature(scores, np.array([0, 0, 1, 1])), 3)
    0.255
    """
    weights = np.ones(len(scores)) if weights is None else weights
    known = np.isfinite(scores).all(axis=1)
    if not known.any():
        warnings.warn(
            "probabilities are not calibrated: every sample is fitted exactly within rounding, so "
            "that leave-one-out says nothing of it. Use a larger penalty, or alpha='loo'.",
            stacklevel=3,
        )
        return 1.0
    return float(calibrate(scores[None, known], labels[known], weights[known])[0][0])


class PathLosses:
    """Log-losses of a path of penalties, from left-out scores that come in parts.

    ``every`` is the distance between the samples that are looked at, 1 unless they are very many.
    """

    def __init__(
        self, columns: Float[np.ndarray, "n t"], weights: Float[np.ndarray, " n"], n_alphas: int
    ) -> None:
        self.n, t = columns.shape
        self.every = max(1, -(-n_alphas * self.n * t // MAX_SCORES))
        self.rows = np.arange(0, self.n, self.every)
        self.scores = np.empty((n_alphas, len(self.rows), t))
        self.columns, self.weights = columns[self.rows], weights[self.rows]

    def put(self, penalties: slice, rows: slice, left_out: Float[np.ndarray, "a b t"]) -> None:
        """Left-out residuals of some penalties and some samples."""
        start, stop, _ = rows.indices(self.n)
        held = slice(-(-start // self.every), -(-stop // self.every))
        some = left_out[:, held.start * self.every - start :: self.every]
        self.scores[penalties, held] = self.columns[held] - some

    def losses(self) -> Float[np.ndarray, " a"]:
        """Mean log-loss at the temperature of each penalty.

        Infinite where a sample's score is unknown.
        """
        heard = np.flatnonzero(self.weights > 0)
        labels, weights = labels_of(self.columns)[heard], self.weights[heard]
        result = np.full(len(self.scores), np.inf)
        known = np.flatnonzero(np.isfinite(self.scores[:, heard]).all(axis=(1, 2)))
        if len(known):
            _, losses = calibrate(
                class_scores(self.scores[np.ix_(known, heard)]), labels, weights, 1e-6
            )
            result[known] = losses @ weights / weights.sum()
        return result
