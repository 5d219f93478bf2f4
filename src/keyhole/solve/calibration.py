"""Scores of classes as probabilities.

The temperature of leave-one-out scores, and the log-loss they are judged by.
"""

from __future__ import annotations

import warnings

import numpy as np
from jaxtyping import Float, Int

MAX_SCORES = 2**23
"""Leave-one-out scores (penalties × samples × outputs) that penalties are compared by. If there are
more, evenly spaced samples are taken.
"""

# bounds on c, in units of one over the spread of the scores
_LEAST = 1e-6
_MOST = 1e12

# factor by which one step may raise c, and the number of steps: Newton's method takes ten as a rule
_GROWTH = 8.0
_MAX_STEPS = 200

# tolerance of the temperatures by which penalties are compared: 1e-12 of the mean loss
_CHOOSING_TOLERANCE = 1e-6


def labels_of(columns: Float[np.ndarray, "n t"]) -> Int[np.ndarray, " n"]:
    """The class of every row of ±1 targets: one column per class, or a single one for two."""
    if columns.shape[1] == 1:
        return (columns[:, 0] > 0).astype(int)
    return columns.argmax(axis=1)


def class_scores(scores: Float[np.ndarray, "*a t"]) -> Float[np.ndarray, "*a c"]:
    """One column of scores per class; a single one stands for two."""
    if scores.shape[-1] == 1:
        return np.concatenate([-scores, scores], axis=-1)
    return scores


def calibrate(
    scores: Float[np.ndarray, "a n c"],
    labels: Int[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"],
    tolerance: float = 1e-12,
) -> tuple[Float[np.ndarray, " a"], Float[np.ndarray, "a n"]]:
    """The likeliest temperature of every stack of finite scores, and the log-losses at it.

    All stacks at once, by Newton's method on the slope in c, kept between bounds that close in.
    O(a·n·c) a step. A ``tolerance`` of the temperature is, squared, that of the mean loss. Weights
    are divided by the mean of those that are not 0: a factor of all of them changes nothing.
    """
    weights = weights / weights[weights > 0].mean()

    # as in Platt's scaling, a label is trusted up to this doubt
    n_classes = scores.shape[2]
    counts = np.bincount(labels, weights=weights, minlength=n_classes)
    doubt = 1.0 / (counts[labels] + 2.0)

    # scores below the largest of their sample, in units of their spread; classes come first, so
    # that sums over them run along long rows
    relative = np.ascontiguousarray(np.moveaxis(scores, 2, 0))
    relative = relative - relative.max(axis=0)
    spread = -relative.min(axis=(0, 2))
    tells = spread > 0
    unit = np.where(tells, spread, 1.0)
    relative /= unit[:, None]

    # the slope of the log-loss is Σ w (mean score under softmax(c · scores) − expected score)
    of_label = np.moveaxis(relative, 0, 2)[:, np.arange(len(labels)), labels]
    of_others = relative.sum(axis=0) - of_label
    expected = ((1 - doubt) * of_label + doubt / (n_classes - 1) * of_others) @ weights

    low = np.full(len(scores), _LEAST)
    high = np.full(len(scores), _MOST)
    c = np.where(tells, low, 1.0)
    active = np.flatnonzero(tells)
    for _ in range(_MAX_STEPS):
        if len(active) == 0:
            break
        z = relative if len(active) == len(c) else relative[:, active]
        now = c[active]

        # mean and variance of z under softmax(c z): slope and curvature of the log-loss
        powers = z * now[:, None]
        np.exp(powers, out=powers)
        total = powers.sum(axis=0)
        powers *= z
        first_moment = powers.sum(axis=0) / total
        powers *= z
        second_moment = powers.sum(axis=0) / total
        slope = first_moment @ weights - expected[active]
        curvature = (second_moment - np.square(first_moment)) @ weights

        # the bounds close in
        low[active] = np.where(slope < 0, now, low[active])
        high[active] = np.where(slope < 0, high[active], now)
        low_now = low[active]
        high_now = high[active]

        # Newton's step, or their geometric mean where it leaves the bounds
        step = np.divide(-slope, curvature, out=np.full(len(now), np.inf), where=curvature > 0)
        limit = _GROWTH * np.maximum(now, 1.0)
        new = np.minimum(now + step, limit)
        outside = (new <= low_now) | (new >= high_now)
        new = np.where(outside, np.minimum(np.sqrt(low_now * high_now), limit), new)

        # the least c stands for scores that tell nothing; so does the most for those that tell all
        at_least = (slope >= 0) & (now <= _LEAST)
        ended = at_least | (slope == 0) | (now >= _MOST / _GROWTH)
        c[active] = np.where(ended, now, new)
        active = active[~ended & (np.abs(new - now) > tolerance * now)]

    losses = np.log(np.exp(c[:, None] * relative).sum(axis=0)) - c[:, None] * of_label
    return c / unit, losses


def fit_temperature(
    scores: Float[np.ndarray, "n c"],
    labels: Int[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"] | None = None,
) -> float:
    """Find the c > 0 that makes softmax(c · scores) the likeliest probabilities of the labels.

    The scores must be held out, such as leave-one-out predictions: scores of the data a model was
    fitted to are too sure of themselves, and so would c be. The log-loss is convex in c. As in
    Platt's scaling a sample of class k counts as (n_k + 1)/(n_k + 2) of that class and the rest
    spread over the others, n_k being the weight of the class in units of the mean weight, so that
    separable scores give a finite c.

    Parameters
    ----------
    scores : array (n, classes)
        A row that is not finite, of a sample whose leverage is 1 within rounding, tells nothing and
        is left out. If every row is, c is 1 and a warning says so.
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
    if weights is None:
        weights = np.ones(len(scores))
    finite = np.isfinite(scores).all(axis=1)
    if not finite.any():
        warnings.warn(
            "probabilities are not calibrated: every sample is fitted exactly within rounding, so "
            "that leave-one-out says nothing of it. Use a larger penalty, or alpha='loo'.",
            stacklevel=3,
        )
        return 1.0
    temperatures, _ = calibrate(scores[None, finite], labels[finite], weights[finite])
    return float(temperatures[0])


def path_log_losses(
    scores: Float[np.ndarray, "a n t"],
    columns: Float[np.ndarray, "n t"],
    weights: Float[np.ndarray, " n"],
) -> Float[np.ndarray, " a"]:
    """Mean log-loss of the leave-one-out scores of each penalty, at the temperature that suits it.

    Infinite where the score of a sample is not known. ``columns`` are the one-vs-rest targets ±1.
    Of more than `MAX_SCORES` scores evenly spaced samples are taken.
    """
    every = max(1, -(-scores.size // MAX_SCORES))
    judged_scores = scores[:, ::every]
    labels = labels_of(columns[::every])
    shares = weights[::every] / weights[::every].sum()
    is_finite = np.isfinite(judged_scores).all(axis=(1, 2))
    losses = np.full(len(scores), np.inf)
    if is_finite.any():
        of_classes = class_scores(judged_scores[is_finite])
        _, sample_losses = calibrate(of_classes, labels, weights[::every], _CHOOSING_TOLERANCE)
        losses[is_finite] = sample_losses @ shares
    return losses
