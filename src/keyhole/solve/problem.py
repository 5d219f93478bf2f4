"""Ridge regression with exact leave-one-out: what is asked, and what comes back.

For features Φ (n, p) or their Gram matrix K = ΦΦᵀ, outputs y (n, t), weights w (n,) and a penalty
alpha, every solver of this subpackage minimises

    Σ_i w_i |y_i − φ_iᵀv − b|² + alpha |v|²        over v and b,

with b free, or zero when ``fit_intercept`` is False. It is judged by the residuals of the n fits
that each leave one sample out, or one group, without refitting.

A `RidgeProblem` holds outputs, weights, groups and penalties; a `RidgeFit` the penalty of least
error, the solution at it, and the `Factor` from which everything else follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float, Int

from keyhole._checks import FeatureOverflowError, NoPenaltyError, check_finite, check_weight_sizes
from keyhole.solve.calibration import path_log_losses

EPS = float(np.finfo(np.float64).eps)

N_ALPHAS = 30
"""Penalties of an automatic grid."""

N_DRAFT_ALPHAS = 8
"""Penalties of the grid of a draft, a fit that is only compared with others."""

LEAST_DRAFT_ALPHA = 1e-9
"""The least penalty of a draft, as a share of the largest eigenvalue."""

LEAST_ALPHA = 100.0
"""The least penalty of an automatic grid, in units of ε·n·λ_max; below, 1 − h is rounding."""

FLAT = 1e-9
"""Relative difference of errors below which two penalties count as equally good."""

LARGEST_GRAM = 1e150
"""Largest entry of a Gram matrix: its square, times the number of samples, is still finite."""

Alphas: TypeAlias = Sequence[float | int] | Float[np.ndarray, " a"]


class SmallPenaltyWarning(UserWarning):
    """A given penalty is so small that rounding shows in predictions."""


@dataclass(frozen=True)
class RidgeProblem:
    """Outputs, weights, intercept and penalties of a ridge fit, checked (`RidgeProblem.of`).

    Attributes
    ----------
    y : array (n, t)
    weights : array (n,)
        All positive.
    alphas : array (a,) or None
        The penalties; None for a grid that follows the spectrum.
    fit_intercept : bool
    groups : integer array (n,) or None
        Samples of one number are left out together.
    criterion : "squared_error" or "log_loss"
        What the penalty is chosen by; for the latter y are one-vs-rest targets ±1.
    y_mean : array (t,)
        ȳ, zeros without an intercept.
    draft : bool
        Whether the fit only serves to be compared with others: its automatic grid is coarse.
    """

    y: Float[np.ndarray, "n t"] = field(repr=False)
    weights: Float[np.ndarray, " n"] = field(repr=False)
    alphas: Float[np.ndarray, " a"] | None
    fit_intercept: bool
    groups: Int[np.ndarray, " n"] | None = field(repr=False)
    criterion: str
    y_mean: Float[np.ndarray, " t"]
    draft: bool = False

    @classmethod
    def of(
        cls,
        y: Float[np.ndarray, "n t"],
        alphas: Alphas | None = None,
        *,
        fit_intercept: bool = True,
        weights: Float[np.ndarray, " n"] | None = None,
        groups: Int[np.ndarray, " n"] | None = None,
        criterion: str = "squared_error",
        draft: bool = False,
    ) -> RidgeProblem:
        """Check everything, and compute the mean of the outputs if there is an intercept."""
        if y.size == 0:
            raise ValueError(
                f"`y` must hold at least one sample and one output: got shape {y.shape}."
            )
        check_finite(y, "y")
        checked_alphas = None
        if alphas is not None:
            checked_alphas = check_alphas(alphas)
        checked_weights = check_weights(weights, len(y))
        y_mean = np.zeros(y.shape[1])
        if fit_intercept:
            y_mean = checked_weights @ y / checked_weights.sum()
        return cls(
            y=y.astype(np.float64, copy=False),
            weights=checked_weights,
            alphas=checked_alphas,
            fit_intercept=fit_intercept,
            groups=groups,
            criterion=criterion,
            y_mean=y_mean,
            draft=draft,
        )

    def __len__(self) -> int:
        return len(self.y)

    @property
    def total_weight(self) -> float:
        """Σ w."""
        return float(self.weights.sum())

    @property
    def centred(self) -> Float[np.ndarray, "n t"]:
        """y − ȳ."""
        return self.y - self.y_mean

    @property
    def single_alpha(self) -> float | None:
        """The penalty, where there is nothing to choose."""
        if self.alphas is None or len(self.alphas) > 1:
            return None
        return float(self.alphas[0])

    def grid(self, largest: float, order: int) -> Float[np.ndarray, " a"]:
        """The penalties to try: those given, or the default ones of a matrix of this order.

        ``largest`` is the largest eigenvalue of the matrix.
        """
        if self.alphas is not None:
            return self.alphas
        if self.draft:
            return default_alphas(largest, order, N_DRAFT_ALPHAS, LEAST_DRAFT_ALPHA)
        return default_alphas(largest, order)

    def scores(self, residuals: Float[np.ndarray, "a n t"]) -> PenaltyScores:
        """What every penalty is judged by, from the residuals of the samples left out."""
        weights = self.weights / self.total_weight
        squares = np.einsum("n,ant->at", weights, np.square(residuals))
        log_losses = None
        if self.criterion == "log_loss":
            log_losses = path_log_losses(self.y - residuals, self.y, self.weights)
        variances = weights @ np.square(self.centred)
        return PenaltyScores.of(squares, variances, log_losses)


@dataclass(frozen=True)
class PenaltyScores:
    """Errors of a grid of penalties, and the criterion they are compared by."""

    errors: Float[np.ndarray, " a"]
    criterion: Float[np.ndarray, " a"]
    is_log_loss: bool = False

    @classmethod
    def of(
        cls,
        squares: Float[np.ndarray, "a t"],
        variances: Float[np.ndarray, " t"],
        log_losses: Float[np.ndarray, " a"] | None = None,
    ) -> PenaltyScores:
        """From the mean squared error of every output; several count in units of their variance."""
        errors = squares.mean(axis=1)
        if log_losses is not None:
            return cls(errors=errors, criterion=log_losses, is_log_loss=True)
        varies = variances > 0
        criterion = errors
        if squares.shape[1] > 1 and varies.any():
            criterion = (squares[:, varies] / variances[varies]).mean(axis=1)
        return cls(errors=errors, criterion=criterion)


@runtime_checkable
class Factor(Protocol):
    """A fit at one penalty as what it is, linear in its outputs: f(x) = Σ_j h_j(x) y_j.

    ``compared`` are the features φ(x) of new samples to a factor of features, and K(x, x_j) to one
    of a Gram matrix. With the hat matrix H of the samples and s = √w, what leaves samples g out
    follows from C = S (I − H) S⁻¹, which is symmetric:

        e_g = S_g⁻¹ C_gg⁻¹ (S r)_g                         residuals of the fit without g
        f_{−g}(x) = f(x) − Σ_{j in g} h_j(x) e_j           its prediction
        v_{−g}(x) = v(x) + alpha h_gᵀ S_g⁻¹ C_gg⁻¹ S_g⁻¹ h_g      and its posterior variance
    """

    @property
    def alpha(self) -> float:
        """The penalty."""

    @property
    def problem(self) -> RidgeProblem:
        """Outputs and weights that were fitted: of the log-loss, those of the last step."""

    def hat(self, compared: Float[np.ndarray, "m q"]) -> Float[np.ndarray, "m n"]:
        """h_j(x) of some samples."""

    def variance(
        self, compared: Float[np.ndarray, "m q"], squares: Float[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        """v(x), the posterior variance under noise alpha; ``squares`` are K(x, x)."""

    def complements(self) -> Float[np.ndarray, " n"]:
        """The diagonal of C, one less the leverages."""

    def complement(self, rows: Int[np.ndarray, " g"]) -> Float[np.ndarray, "g g"]:
        """C_gg."""


@dataclass(frozen=True)
class RidgeFit:
    """The ridge fit at one penalty, how it predicts samples that it leaves out, and all penalties.

    Attributes
    ----------
    alphas : array (a,)
        The penalties tried.
    errors : array (a,)
        Their weighted mean squared errors on the samples left out, averaged over outputs; infinite
        where a sample is fitted exactly.
    scores : array (a,)
        What they were compared by: errors, for several outputs in units of their variances, or the
        log-losses of classes.
    best : int
        Position of the only penalty, or of that of least score; among equals, of the largest.
    coef : array (n, t) or (p, t)
        From a Gram matrix, the dual coefficients a of f(x) = Σ_i a_i K(x, x_i) + b, so that
        v = Φᵀa; from features, the values v themselves.
    intercept : array (t,)
        b.
    left_out : array (n, t) or None
        y_i less the prediction for i of the fit without sample i, or without its group: infinite
        where the leverage is 1 within rounding. None where nobody went over the samples again.
    selection : "loo", "groups" or "gcv"
        What the errors are: leave-one-out, leave-one-group-out, or generalised cross-validation.
    is_log_loss : bool
        Whether scores are log-losses.
    factor : Factor or None
        The fit as a linear map of its outputs.
    """

    alphas: Float[np.ndarray, " a"]
    errors: Float[np.ndarray, " a"]
    scores: Float[np.ndarray, " a"]
    best: int
    coef: Float[np.ndarray, "rows t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    left_out: Float[np.ndarray, "n t"] | None = field(repr=False)
    selection: str = "loo"
    is_log_loss: bool = False
    factor: Factor | None = field(default=None, repr=False, compare=False)

    @property
    def alpha(self) -> float:
        """The penalty used."""
        return float(self.alphas[self.best])

    @property
    def error(self) -> float:
        """The error at the penalty used."""
        return float(self.errors[self.best])

    @property
    def loss(self) -> float:
        """What the penalty used was chosen by, at that penalty."""
        return float(self.scores[self.best])


def default_alphas(
    largest: float, order: int, count: int = N_ALPHAS, least_share: float = 0.0
) -> Float[np.ndarray, " a"]:
    """The grid tried when none is given: from 100·ε·n·λ_max to ten times λ_max.

    >>> grid = default_alphas(largest=5.0, order=100)
    >>> len(grid), float(grid[0]) / EPS, float(grid[-1])
    (30, 50000.0, 50.0)
    """
    # every penalty gives the same fit to a Gram matrix of zeros
    if not largest > 0:
        return np.ones(1)
    least = max(LEAST_ALPHA * EPS * order, least_share) * largest
    return np.geomspace(least, 10 * largest, count)


def choose_penalty(alphas: Float[np.ndarray, " a"], scores: Float[np.ndarray, " a"]) -> int:
    """Position of the penalty to use: the one of least score, and among equals the largest.

    >>> choose_penalty(np.array([0.1, 1.0, 10.0]), np.array([0.4, 0.4, np.inf]))
    1
    """
    if len(alphas) == 1:
        return 0
    candidates = np.isfinite(scores)
    if not candidates.any():
        raise NoPenaltyError(
            f"leave-one-out cannot choose among the {len(alphas)} penalties from {alphas.min():g} "
            f"to {alphas.max():g}: under each, some sample is fitted exactly within rounding "
            "(leverage 1), or there is 1 sample only. Add larger penalties, or fit with one fixed "
            "penalty."
        )
    least = float(scores[candidates].min())
    equals = np.flatnonzero(candidates & (scores <= least * (1 + FLAT)))
    return int(equals[np.argmax(alphas[equals])])


def check_alphas(alphas: Any) -> Float[np.ndarray, " a"]:
    """Return the penalties as a float64 vector in the order given; name one that is none."""
    try:
        values = np.array(alphas, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`alphas` must be numbers: got {alphas!r} ({error}).") from error
    if values.ndim != 1 or values.size == 0:
        raise ValueError(
            f"`alphas` must be a sequence of at least one penalty: got shape {values.shape}."
        )
    is_wrong = ~(np.isfinite(values) & (values >= 0))
    if is_wrong.any():
        i = int(np.flatnonzero(is_wrong)[0])
        raise ValueError(
            f"every penalty of `alphas` must be finite and at least 0: got {values[i]:g} at "
            f"position {i}. Use 0 for the minimum-norm fit without penalty."
        )
    return values


def check_weights(weights: Float[np.ndarray, " n"] | None, n: int) -> Float[np.ndarray, " n"]:
    """Return positive weights in float64, ones if there are none."""
    if weights is None:
        return np.ones(n)
    if weights.shape != (n,):
        raise ValueError(
            f"`weights` must have one entry per sample: got shape {weights.shape} for {n} samples."
        )
    check_finite(weights, "weights")
    if not weights.min() > 0:
        i = int(weights.argmin())
        raise ValueError(
            f"`weights` must be positive: got {weights[i]:g} for sample {i}. Drop samples of "
            "weight zero."
        )
    check_weight_sizes(weights, "weights")
    return weights.astype(np.float64)


def check_gram_size(diagonal: Float[np.ndarray, " n"]) -> None:
    """Raise if a Gram matrix is so large that its squares overflow, or has overflowed already."""
    largest = math.inf
    if np.isfinite(diagonal).all():
        largest = float(np.abs(diagonal).max(initial=0.0))
    if not largest < LARGEST_GRAM:
        raise FeatureOverflowError(
            f"features and kernels must have squares below {LARGEST_GRAM:.0e}, so that sums of "
            f"their products fit float64: the largest on the diagonal of `gram` is {largest:.3g}. "
            "Scale the tokens down, for instance by scaling='standard'; if they are of ordinary "
            "size, use another activation, dtype='float64', or smaller sample weights."
        )
