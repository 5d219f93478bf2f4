"""Activations and poolings: frozen records that everything else reads.

Constraints of estimators, help texts, kernels, exports and the parametrisation of tests go by these
records. Compiled loops branch on the number of an activation, its place among `ACTIVATIONS`, and
end in an error for one that they do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Activation:
    """What turns the scores of a head into weights of the rows of a set.

    Attributes
    ----------
    name : str
    value : function of (namespace, scores)
        σ of scores (…, keys), for NumPy or torch; of softmax, the weights themselves.
    slope : function of (namespace, scores, gradient) or None
        The gradient in the scores from that in the weights σ(s); None where there is none.
    is_pointwise : bool
        Whether it acts on one score at a time; the weight of a row is then σ(s)/N.
    has_moment : bool
        Whether E[σ(u)σ(v)] has a closed form for Gaussian u and v, so that there is a kernel.
    power : int
        The power of the standard deviation of scores that a kernel takes out of the moment.
    help : str
    """

    name: str
    value: Callable[[Any, Any], Any]
    slope: Callable[[Any, Any, Any], Any] | None
    is_pointwise: bool
    has_moment: bool
    power: int
    help: str


def _relu(xp: Any, scores: Any) -> Any:
    return xp.where(scores > 0, scores, xp.zeros_like(scores))


def _step(xp: Any, scores: Any) -> Any:
    return xp.where(scores > 0, xp.ones_like(scores), xp.zeros_like(scores))


def _softmax(xp: Any, scores: Any) -> Any:
    powers = xp.exp(scores - xp.amax(scores, -1)[..., None])
    return powers / powers.sum(-1)[..., None]


def _softmax_slope(xp: Any, scores: Any, gradient: Any) -> Any:
    weights = _softmax(xp, scores)
    mean = (weights * gradient).sum(-1)[..., None]
    return weights * (gradient - mean)


ACTIVATIONS: dict[str, Activation] = {
    activation.name: activation
    for activation in (
        Activation(
            name="relu",
            value=_relu,
            slope=lambda xp, s, g: xp.where(s > 0, g, xp.zeros_like(g)),
            is_pointwise=True,
            has_moment=True,
            power=1,
            help="each row weighs its score where that is positive",
        ),
        Activation(
            name="linear",
            value=lambda xp, s: s,
            slope=lambda xp, s, g: g,
            is_pointwise=True,
            has_moment=True,
            power=1,
            help="each row weighs its score",
        ),
        Activation(
            name="square",
            value=lambda xp, s: s * s,
            slope=lambda xp, s, g: 2 * s * g,
            is_pointwise=True,
            has_moment=True,
            power=2,
            help="each row weighs the square of its score",
        ),
        Activation(
            name="step",
            value=_step,
            slope=None,
            is_pointwise=True,
            has_moment=True,
            power=0,
            help="each row of positive score weighs the same",
        ),
        Activation(
            name="exp",
            value=lambda xp, s: xp.exp(s),
            slope=lambda xp, s, g: xp.exp(s) * g,
            is_pointwise=True,
            has_moment=True,
            power=0,
            help="each row weighs the exponential of its score",
        ),
        Activation(
            name="softmax",
            value=_softmax,
            slope=_softmax_slope,
            is_pointwise=False,
            has_moment=False,
            power=0,
            help="the weights of the rows of a set sum to one",
        ),
    )
}
"""All activations; the place of one is its number in compiled loops."""

POINTWISE = tuple(name for name, record in ACTIVATIONS.items() if record.has_moment)
"""Activations of one score with a closed-form moment."""


@dataclass(frozen=True)
class Pooling:
    """How the features of rows become those of a sample.

    Attributes
    ----------
    name : str
    is_sum : bool
        Whether the features of rows are added up, and not averaged.
    has_heads : bool
        Whether rows are seen by heads.
    adds : str
        Sample-level features that are made of the rows: "", "size", "statistics" (number, mean,
        standard deviation, least and largest value) or "quantiles" (these, second extremes and
        quantiles).
    help : str
    """

    name: str
    is_sum: bool
    has_heads: bool
    adds: str
    help: str


POOLINGS: dict[str, Pooling] = {
    pooling.name: pooling
    for pooling in (
        Pooling("mean", False, True, "", "the mean over rows"),
        Pooling("mean+size", False, True, "size", "the mean over rows, and their number"),
        Pooling(
            "mean+statistics",
            False,
            True,
            "statistics",
            "the mean over rows, their spread and range",
        ),
        Pooling("sum", True, True, "", "the sum over rows, for targets that grow with the set"),
        Pooling("statistics", False, False, "quantiles", "statistics of the rows, without heads"),
        Pooling("extras", False, False, "", "the sample-level features alone"),
    )
}


SCALINGS: dict[str, str] = {
    "none": "rows as they are",
    "sphere": "each row divided by its length",
    "standard": "each column centred and divided by its spread",
}
"""Settings of ``scaling``: what is done to rows first."""

QUERIES: dict[str, str] = {
    "given": "the query of the set, or a constant where it has none",
    "mean": "the mean of its rows",
    "each": "each row in turn",
}
"""Settings of ``query``: what scores compare a row with."""
