"""The settings of one layer and the options of a fit: everything that decides it, but the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.attention.heads import GaussianHeads, HeadDistribution
from keyhole.registry import POOLINGS

LINEAR = None
"""``mlp_width`` of a member whose readout is linear."""


@dataclass(frozen=True)
class Landmarks:
    """The exact kernel, seen through its columns at ``count`` of the training samples (Nyström).

    For many samples under a query or in many dimensions, where random heads converge slowly.

    >>> Landmarks(512)
    Landmarks(count=512)
    """

    count: int


@dataclass(frozen=True)
class LayerSettings:
    """One layer: what sets become, and what reads it out.

    Attributes
    ----------
    heads : head distribution
        Of the query-key matrices; one with a method ``fit`` is fitted to the training set first.
    n_heads : int, math.inf or Landmarks
        M; infinity is the exact kernel.
    activation, pooling, scaling, query : str
        As for `keyhole.AttentionRegressor`. ``pooling="statistics"`` has no heads.
    mlp_width : float or None
        Width τ of the second kernel on the pooled vector; None is a linear readout.
    clips : bool
        Whether tokens are clipped to the training range, widened by a tenth.
    name : str
        What the member is called in tables.
    """

    heads: HeadDistribution = field(default_factory=GaussianHeads)
    n_heads: float | Landmarks = math.inf
    activation: str = "relu"
    pooling: str = "mean"
    scaling: str = "standard"
    query: str = "given"
    mlp_width: float | None = LINEAR
    clips: bool = False
    name: str = field(default="layer", compare=False)

    @property
    def is_exact(self) -> bool:
        """Whether it has infinitely many heads, so that its kernel is used."""
        return isinstance(self.n_heads, float) and math.isinf(self.n_heads)

    @property
    def has_landmarks(self) -> bool:
        """Whether its kernel is seen through landmarks."""
        return isinstance(self.n_heads, Landmarks)

    @property
    def has_heads(self) -> bool:
        """Whether it looks at the keys by heads, and not by sample-level features alone."""
        return POOLINGS[self.pooling].has_heads

    @property
    def learns_heads(self) -> bool:
        """Whether the head distribution has to be fitted to the training set first."""
        return hasattr(self.heads, "fit")

    def embedding(self) -> LayerSettings:
        """The same layer with a linear readout: members that share it share their kernel."""
        return replace(self, mlp_width=LINEAR, name="layer")


@dataclass(frozen=True)
class FitOptions:
    """What all members of a fit share.

    Attributes
    ----------
    alphas : array (a,) or None
        Penalties to choose from by leave-one-out; one alone is used as it is; None is an automatic
        grid.
    fit_intercept : bool
    seed : int
        Of the heads and the folds.
    dtype : "float64" or "float32"
        Precision of features.
    device : str or None
        Where torch computes; None is NumPy.
    classifies : bool
        Whether outputs are one-vs-rest targets ±1 of classes.
    loss : "squared_error" or "log_loss"
        What the values of a single member minimise.
    memory_budget : int
        Bytes of blocks of features.
    keeps_grams : bool
        Whether members keep the Gram matrix that they were fitted to, so that the procedure can be
        repeated on folds.
    tell : function of a member, or None
        Called with every member as soon as it is fitted.
    """

    alphas: Float[np.ndarray, " a"] | None = field(default=None, repr=False)
    fit_intercept: bool = True
    seed: int = 0
    dtype: str = "float64"
    device: str | None = None
    classifies: bool = False
    loss: str = "squared_error"
    memory_budget: int = 2**30
    keeps_grams: bool = False
    tell: Callable[[Any], None] | None = None
