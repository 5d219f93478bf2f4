"""How the penalty of a fit was chosen, as estimators show it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from keyhole.ridge.problem import RidgeFit


@dataclass(frozen=True)
class Selection:
    """The penalties that were tried, with the score of each.

    Attributes
    ----------
    method : "loo", "gcv" or "holdout"
        How the scores were made. "loo" leaves samples (or groups) out one by one. "gcv" is exact
        generalised cross-validation, after a fit in batches that were read once. "holdout" holds
        out a tenth of the samples, after conjugate gradients.
    criterion : "squared_error" or "log_loss"
    alphas : array (a,)
        The penalties tried.
    scores : array (a,)
        The criterion at every penalty, less is better; infinite where rounding makes it
        meaningless. Of several outputs, the squared error of each counts in units of its variance.
    errors : array (a,)
        Mean squared errors at every penalty, in the units of y.
    best : int
        Position of the penalty used.
    """

    method: str
    criterion: str
    alphas: Float[np.ndarray, " a"] = field(repr=False)
    scores: Float[np.ndarray, " a"] = field(repr=False)
    errors: Float[np.ndarray, " a"] = field(repr=False)
    best: int

    @classmethod
    def of(cls, ridge: RidgeFit) -> Selection:
        """What a ridge fit says of its penalties."""
        # whole groups that are left out are leave-one-out too, of groups
        method = ridge.selection
        if method == "groups":
            method = "loo"

        # log-losses are there only where they are the criterion
        criterion = "squared_error"
        if ridge.log_losses is not None:
            criterion = "log_loss"
        return cls(
            method=method,
            criterion=criterion,
            alphas=ridge.alphas,
            scores=ridge.scores,
            errors=ridge.errors,
            best=ridge.best,
        )

    @property
    def alpha(self) -> float:
        """The penalty used."""
        return float(self.alphas[self.best])

    @property
    def score(self) -> float:
        """The criterion at the penalty used."""
        return float(self.scores[self.best])

    @property
    def error(self) -> float:
        """The mean squared error at the penalty used."""
        return float(self.errors[self.best])
