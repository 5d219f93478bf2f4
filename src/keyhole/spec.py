"""The specification of a layer: everything that decides a fit, apart from the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET
from keyhole.attention.heads import GaussianHeads, HeadDistribution, HeadDraw
from keyhole.attention.hops import Start

AUTO = "auto"


@dataclass(frozen=True)
class LayerSpec:
    """What to fit: one attention layer with its settings, and how its values are solved for.

    Fields that hold "auto" (None for ``heads`` and ``extras_scale``) are left to
    `keyhole.choose.choose`, which returns a specification without any; `keyhole.layer.fit` takes
    only such. Samples, weights and groups are data, not specification: they are a
    `keyhole.training.TrainingSet`.

    Attributes
    ----------
    heads : head distribution or None
        The distribution of the query-key matrices W.
    starts : tuple of Start
        Where descents of heads that are to be learned begin, as a screening has found them; all
        starts if empty.
    may_learn : bool
        Whether heads that are left open may be learned, which takes the whole training set at once.
    n_heads : int, math.inf or "auto"
        M; infinity is the exact kernel.
    activation, pooling, scaling, query : str
        As for `keyhole.AttentionRegressor`.
    keys : "all", "auto" or int
        How many keys of each set the layer sees, those that a scoring layer finds to matter most
        (`keyhole.key_selection`).
    extras_scale : float or None
        Scale of the standardised sample-level features beside the features of the heads.
    alphas : array (a,) or None
        Penalties to choose from by leave-one-out; one alone is used as it is; None is an automatic
        grid.
    fit_intercept : bool
    loss : "squared_error", "log_loss" or "auto"
        What the values minimise beside the penalty: squares, in closed form; or the log-loss of
        one-vs-rest targets ±1, by a few Newton steps.
    criterion : "squared_error" or "log_loss"
        What penalties and settings are chosen by; the log-loss is that of calibrated scores of
        classes.
    seed : int
        Of the heads.
    dtype : "float64" or "float32"
        Precision of features and their Gram matrix. Exact kernels are float64, except those of a
        device.
    device : str or None
        Where torch computes; None is NumPy.
    solver : "auto", "direct" or "cg"
        "cg" is conjugate gradients; "auto" takes them only if the smaller Gram matrix exceeds the
        memory.
    classifies : bool
        Whether outputs are one-vs-rest targets ±1 of classes. Samples that choices are made on then
        have some of every class; and conjugate gradients predict a tenth of the samples, held out,
        even if there is nothing to choose, because probabilities are calibrated on them.
    memory_budget : int
        Bound in bytes on any temporary but the Gram matrix, n × n or p × p with p = M·D.
    """

    heads: HeadDistribution | None = None
    starts: tuple[Start, ...] = ()
    may_learn: bool = False
    n_heads: float | str = AUTO
    activation: str = AUTO
    pooling: str = AUTO
    scaling: str = AUTO
    query: str = AUTO
    keys: int | str = AUTO
    extras_scale: float | None = None
    alphas: Float[np.ndarray, " a"] | None = field(default=None, repr=False)
    fit_intercept: bool = True
    loss: str = "squared_error"
    criterion: str = "squared_error"
    seed: int = 0
    dtype: str = "float64"
    device: str | None = None
    solver: str = "auto"
    classifies: bool = False
    memory_budget: int = MEMORY_BUDGET

    @property
    def is_exact(self) -> bool:
        """Whether the layer has infinitely many heads, so that its kernel is used."""
        return isinstance(self.n_heads, float) and math.isinf(self.n_heads)

    @property
    def is_logistic(self) -> bool:
        """Whether the values are those of least log-loss, so that outputs are logits."""
        return self.loss == "log_loss"

    @property
    def learns_heads(self) -> bool:
        """Whether the head distribution has to be fitted to the training set first."""
        return hasattr(self.heads, "fit")

    @property
    def selects_keys(self) -> bool:
        """Whether the layer sees some keys of each set only."""
        return isinstance(self.keys, int)

    @property
    def fixed_heads(self) -> HeadDistribution:
        """The head distribution that drafts are made with.

        Zero mean where it is yet to be chosen or learned.
        """
        if self.heads is None or self.learns_heads:
            return GaussianHeads()
        return self.heads

    def settings(self) -> dict[str, object]:
        """What may be left open, by the names of the parameters of the estimators."""
        return {
            "activation": self.activation,
            "pooling": self.pooling,
            "scaling": self.scaling,
            "query": self.query,
            "heads": self.heads,
            "n_heads": self.n_heads,
            "loss": self.loss,
            "keys": self.keys,
        }

    def draw(self, heads: HeadDistribution, samples: Any) -> HeadDraw | HeadDistribution:
        """M heads for samples like these; or the distribution itself for infinitely many."""
        if self.is_exact:
            return heads
        return HeadDraw(heads, int(self.n_heads), samples.dim, self.seed, samples.query_dim)
