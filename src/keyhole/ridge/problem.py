"""Ridge regression with exact leave-one-out: one problem, any route, one result.

All routes solve, for a design Φ (n, p), outputs y (n, t), weights w (n,) and a penalty alpha,

    min over v, b of  Σ_i w_i |y_i − φ_iᵀv − b|² + alpha |v|²

with b free, or zero when ``fit_intercept`` is False, and judge it by the residuals of the n fits
that each leave one sample out altogether, without refitting: e_i = r_i / (1 − h_i), r the
residuals, h the leverages.

A `RidgeProblem` holds outputs, weights, intercept and penalties. A `Route` is a way to solve it:
gram.py, design.py, iterative.py and device.py each hold one or a few. `RidgeProblem.fit` chooses
the penalty by the residuals of the samples that the route leaves out, and returns a `RidgeFit`,
whatever the route.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole._checks import (
    FeatureOverflowError,
    NoPenaltyError,
    check_count,
    check_finite,
    check_weight_sizes,
)
from keyhole.ridge.calibration import PathLosses

EPS = float(np.finfo(np.float64).eps)  # unit of rounding of float64, the reference precision

GUARD = 16.0
"""Floor in units of the rounding of the Gram matrix. The computed eigenvalues of attention Gram
matrices (n = 1000 … 4000, float32 products) were off by at most 1.2 units; this leaves a decade."""

N_ALPHAS = 30  # penalties of an automatic grid
N_DRAFT_ALPHAS = 8  # penalties of the grid of a draft, a fit that is only compared with others
LEAST_DRAFT_ALPHA = 1e-9  # the least penalty of a draft, as a share of λ_max
FLAT = 1e-9  # relative difference of errors below which two penalties count as equally good

# largest entry of a Gram matrix: its square, times the number of samples, is still finite
LARGEST_GRAM = 1e150

STEADY = 1e-9
"""Share of the spread of the outputs by which rounding may move predictions, in float64, at a
penalty that we choose among several. Over 3,000 random fits predictions one by one, and sums of
contributions, then differed from predictions in a batch by at most 1.0e-9 of the largest. Of 400
fits, 175 of them without noise, one had a test error more than 0.01 % above that without this
limit, and three had less than 98 % of it."""

UNSTEADY = 1e-4
"""Share of the spread of the outputs from which on a `RoundingWarning` says that rounding shows."""

Alphas: TypeAlias = Sequence[float | int] | Float[np.ndarray, " a"]

Solution: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Coefficients, intercept (t,), leave-one-out residuals (n, t)."""


class RoundingWarning(UserWarning):
    """The penalty is so small that rounding shows in predictions."""


@dataclass(frozen=True)
class LeftOut:
    """Leave-one-out residuals of a route, for a part of its penalties and of its samples.

    Attributes
    ----------
    penalties, rows : slice
        Which penalties and which samples.
    residuals : array (a, n, t)
        Outputs less the predictions of the fits without the sample, or its group; infinite where
        rounding hides them.
    amplification : array (a,)
        How far one unit of rounding moves predictions at each of the penalties, as a share of the
        spread of the outputs: large where large terms cancel.
    """

    penalties: slice
    rows: slice
    residuals: Float[np.ndarray, "a n t"] = field(repr=False)
    amplification: Float[np.ndarray, " a"]


@runtime_checkable
class Route(Protocol):
    """A way to solve a ridge problem at a few penalties, and to predict samples without them."""

    @property
    def name(self) -> str:
        """As in `RidgeFit.route`."""

    @property
    def alphas(self) -> Float[np.ndarray, " a"]:
        """The penalties."""

    @property
    def floor(self) -> float:
        """Eigenvalues below this carry no information."""

    @property
    def rounding(self) -> float:
        """Unit of rounding of the arithmetic behind it all."""

    def left_out(self) -> Iterator[LeftOut]:
        """Leave-one-out residuals, for a part of the penalties or of the samples at a time."""

    def solve(self, i: int) -> Solution:
        """The fit at ``alphas[i]``."""

    def smoother(self, i: int) -> Smoother:
        """The fit at ``alphas[i]`` as a linear map of its outputs.

        Of a route whose factor was kept.
        """


@runtime_checkable
class Smoother(Protocol):
    """A fit as what it is, linear in its outputs, f(x) = Σ_j h_j(x) y_j, and its variance v(x).

    v(x) is the posterior variance under the prior whose covariance is K = ΦΦᵀ, noise alpha/w_j in
    output j and a free intercept. With ``precision`` Q, both follow for every fit that leaves out
    some samples g, of residuals e_g:

        f_{−g}(x) = f(x) − Σ_{j in g} h_j(x) e_j          v_{−g}(x) = v(x) + h_gᵀ Q_gg⁻¹ h_g
        v_{−g}(x_i) = (Q_gg⁻¹)_ii − alpha/w_i             for i in g
    """

    def apply(
        self, compared: Float[np.ndarray, "m q"], self_kernel: Float[np.ndarray, " m"]
    ) -> tuple[Float[np.ndarray, "m n"], Float[np.ndarray, " m"]]:
        """h(x) and v(x) of some samples.

        To a route from a Gram matrix ``compared`` are K(x, x_j) with the samples of the fit, and
        ``self_kernel`` is K(x, x), zeros where v(x) is of no interest. To a route from a design
        ``compared`` are the features φ(x), which are all it reads.
        """

    def precision(self, rows: Int[np.ndarray, " g"]) -> Float[np.ndarray, "g g"]:
        """Q_gg, 1/alpha times √w (I − H) √w."""

    def precisions(self) -> Float[np.ndarray, " n"]:
        """The diagonal of Q."""


@dataclass(frozen=True)
class RidgeFit:
    """One ridge fit, how it predicts samples that it leaves out, and all penalties tried.

    Attributes
    ----------
    alphas : array (a,)
        The penalties tried.
    errors : array (a,)
        Their weighted mean squared errors, averaged over outputs; infinite where rounding forbids a
        judgement.
    best : int
        Position of the only penalty, or of that of least error among those that are steady: at
        which rounding moves predictions by no more than `steadiness` allows. Among equals, the
        largest penalty.
    coef : array (n, t) or (p, t)
        From a Gram matrix, the dual coefficients a of f(x) = Σ_i a_i K(x, x_i) + b, so that
        v = Φᵀa; from a design, the values v themselves.
    intercept : array (t,)
        b.
    left_out : array (n, t) or None
        y_i minus the prediction for i of the fit without sample i, or without its group, in the
        units of y: infinite where the leverage is 1 within rounding, None if there was no second
        pass over the samples.
    route : str
        The way it was solved: "cholesky", "tridiagonal", "eigen", "design", "device", "cg".
    selection : str
        What the errors are: "loo" (leave-one-out), "groups" (leave-one-group-out), "gcv"
        (generalised cross-validation) or "holdout" (on samples held out).
    floor : float
        Eigenvalues below this carry no information.
    residual : float
        Of an iterative solve: fitted values are off, in root mean square, by at most this share of
        the standard deviation of y.
    n_iter : int
        Iterations of an iterative solve.
    log_losses : array (a,) or None
        Of classes: the weighted mean log-losses of leave-one-out scores, each penalty's at the
        temperature that suits it. If given, ``best`` is the position of their least.
    relative_errors : array (a,) or None
        Of several outputs: their errors, each in units of the variance of its output, averaged. If
        given, and log-losses are not, ``best`` is the position of their least.
    moved : array (a,) or None
        The share of the spread of the outputs by which rounding moves predictions at each penalty.
        None of an iterative solve.
    factor : Route or None
        If kept (n² or p² numbers), it solves for any penalty of ``alphas``, and gives the fit as a
        `Smoother`.
    """

    alphas: Float[np.ndarray, " a"]
    errors: Float[np.ndarray, " a"]
    best: int
    coef: Float[np.ndarray, "rows t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    left_out: Float[np.ndarray, "n t"] | None = field(repr=False)
    route: str
    selection: str = "loo"
    floor: float = 0.0
    residual: float = 0.0
    n_iter: int = 0
    log_losses: Float[np.ndarray, " a"] | None = None
    relative_errors: Float[np.ndarray, " a"] | None = None
    moved: Float[np.ndarray, " a"] | None = None
    factor: Route | None = field(default=None, repr=False, compare=False)

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

    @property
    def scores(self) -> Float[np.ndarray, " a"]:
        """What the penalty used was chosen by: log-losses, errors of several outputs, or errors."""
        if self.log_losses is not None:
            return self.log_losses
        if self.relative_errors is not None:
            return self.relative_errors
        return self.errors

    def at(self, i: int) -> RidgeFit:
        """The fit at ``alphas[i]``, from the factorisation that was kept."""
        if self.factor is None:
            raise ValueError(
                "the factorisation was not kept: fit with keep_factor=True to solve for other "
                "penalties."
            )
        coef, intercept, left_out = self.factor.solve(i)
        return replace(self, best=i, coef=coef, intercept=intercept, left_out=left_out)

    def in_units(self, exponent: int) -> RidgeFit:
        """The fit to outputs 2^exponent times as large.

        Errors are 0 or infinite where float64 has no such squares.
        """
        with np.errstate(over="ignore", under="ignore"):
            left_out = self.left_out
            if left_out is not None:
                left_out = np.ldexp(left_out, exponent)
            return replace(
                self,
                errors=np.ldexp(self.errors, 2 * exponent),
                coef=np.ldexp(self.coef, exponent),
                intercept=np.ldexp(self.intercept, exponent),
                left_out=left_out,
                factor=None,
            )


@dataclass(frozen=True)
class RidgeProblem:
    """Outputs, weights, intercept and penalties of a ridge fit, checked (`RidgeProblem.of`).

    Attributes
    ----------
    y : array (n, t)
    weights : array (n,)
        Positive, or 0 for members of a group that the rest of it is to predict.
    alphas : array (a,) or None
        The penalties; None for a grid that follows the spectrum.
    fit_intercept : bool
    groups : integer array (n,) or None
        Samples of one number are left out together.
    criterion : str
        What the penalty is chosen by, "squared_error" or "log_loss"; for the latter y are ±1
        one-vs-rest targets, or multiples of them.
    y_mean : array (t,)
        ȳ, zeros without an intercept.
    centred : array (n, t)
        y − ȳ in float64, exactly zero for an output that is constant within rounding.
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
    centred: Float[np.ndarray, "n t"] = field(repr=False)
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
        """Check everything, and take the mean off the outputs if there is an intercept."""
        if y.size == 0:
            raise ValueError(
                f"`y` must hold at least one sample and one output: got shape {y.shape}."
            )
        check_finite(y, "y")
        checked_alphas = None if alphas is None else check_alphas(alphas)
        w = check_weights(weights, len(y), zero_allowed=groups is not None)

        # ȳ, in two passes: the second adds the rounding of the first
        mean = np.zeros(y.shape[1])
        if fit_intercept:
            mean = w @ y / w.sum()
            mean = np.asarray(mean + w @ (y - mean) / w.sum(), dtype=np.float64)

        # y − ȳ; of a constant output only rounding remains, which is no signal
        centred = np.asarray(y - mean, dtype=np.float64)
        if fit_intercept:
            constant = np.abs(centred).max(axis=0) <= 4 * EPS * np.abs(mean)
            centred[:, constant] = 0.0
        return cls(
            y=y,
            weights=w,
            alphas=checked_alphas,
            fit_intercept=fit_intercept,
            groups=groups,
            criterion=criterion,
            y_mean=mean,
            centred=centred,
            draft=draft,
        )

    @cached_property
    def roots(self) -> Float[np.ndarray, " n"]:
        """√w."""
        return np.sqrt(self.weights)

    @property
    def scaled(self) -> Float[np.ndarray, "n t"]:
        """√w (y − ȳ)."""
        return self.roots[:, None] * self.centred

    @property
    def weighted(self) -> bool:
        """Whether any weight is not 1."""
        return bool((self.weights != 1.0).any())

    @property
    def spread(self) -> Float[np.ndarray, " t"]:
        """The root mean square of each output about its mean, or about 0 without an intercept."""
        return np.asarray(np.sqrt(self.weights @ np.square(self.centred) / self.weights.sum()))

    def grid(self, largest: float, floor: float, most: int = N_ALPHAS) -> Float[np.ndarray, " a"]:
        """The penalties to try: those given, or the default ones, at ``most`` so many.

        The default penalties are those of a matrix of this largest eigenvalue.
        """
        if self.alphas is not None:
            return self.alphas
        if self.draft:
            # a grid starts at twice the floor
            draft_floor = max(floor, LEAST_DRAFT_ALPHA / 2 * largest)
            return default_alphas(largest, draft_floor, N_DRAFT_ALPHAS)
        return default_alphas(largest, floor, most)

    def resolution(self, rounding: float) -> float:
        """Mean squared errors below this are rounding."""
        return rounding_of_squares(float(np.abs(self.y).max()), rounding)

    def fit(self, route: Route, *, keep_factor: bool = False) -> RidgeFit:
        """Judge the penalties of a route by the samples it leaves out, choose one, and solve.

        One penalty alone is used whatever its error.
        """
        alphas = route.alphas
        totals = np.zeros((len(alphas), self.y.shape[1]))
        moved = np.zeros(len(alphas))
        path_losses: PathLosses | None = None
        if self.criterion == "log_loss":
            path_losses = PathLosses(self.y, self.weights, len(alphas))

        # leave-one-out errors of every penalty, for a part of penalties or samples at a time
        for part in route.left_out():
            weights = self.weights[part.rows]
            totals[part.penalties] += [
                weights @ np.square(residuals) for residuals in part.residuals
            ]
            moved[part.penalties] = route.rounding * part.amplification
            if path_losses is not None:
                path_losses.put(part.penalties, part.rows, part.residuals)
        errors = totals.mean(axis=1) / self.weights.sum()
        relative_errors = errors_in_own_units(totals / self.weights.sum(), self.spread)

        # the penalty of least loss, among those at which rounding does not show, if there are any
        steady = moved <= steadiness(route.rounding)
        log_losses: Float[np.ndarray, " a"] | None = None
        if path_losses is None and relative_errors is not None:
            # errors below this are rounding: four units of the largest output, in its own spread
            sizes = np.abs(self.y).max(axis=0)[self.spread > 0] / self.spread[self.spread > 0]
            resolution = rounding_of_squares(float(sizes.max(initial=0.0)), route.rounding)
            best = choose_penalty(alphas, relative_errors, resolution=resolution, steady=steady)
        elif path_losses is None:
            best = choose_penalty(
                alphas, errors, resolution=self.resolution(route.rounding), steady=steady
            )
        else:
            log_losses = path_losses.losses()
            best = choose_penalty(alphas, log_losses, steady=steady)

        coef, intercept, left_out = route.solve(best)
        return RidgeFit(
            alphas=alphas,
            errors=errors,
            best=best,
            coef=coef,
            intercept=intercept,
            left_out=left_out,
            route=route.name,
            selection="loo" if self.groups is None else "groups",
            floor=route.floor,
            log_losses=log_losses,
            relative_errors=relative_errors,
            moved=moved,
            factor=route if keep_factor else None,
        )


def errors_in_own_units(
    errors: Float[np.ndarray, "a t"], spread: Float[np.ndarray, " t"]
) -> Float[np.ndarray, " a"] | None:
    """Mean over outputs of squared errors, each in units of the variance of its output.

    Outputs in different units then count alike, and constant ones are skipped. None if there is one
    output, or none that varies.

    >>> errors_in_own_units(np.array([[1.0, 1e6]]), np.array([2.0, 1e3]))
    array([0.625])
    """
    varies = spread > 0
    if errors.shape[1] == 1 or not varies.any():
        return None
    return np.asarray((errors[:, varies] / np.square(spread[varies])).mean(axis=1))


def steadiness(rounding: float) -> float:
    """Share of the spread of the outputs by which rounding may move predictions, where we choose.

    In float64 what lets two ways to compute a prediction agree to 1e-8. Coarser arithmetic may lose
    half of its digits.

    >>> steadiness(EPS), round(steadiness(2**-23), 6)
    (1e-09, 0.000345)
    """
    if rounding <= EPS:
        return STEADY
    return math.sqrt(rounding)


def numerical_floor(scale: float, n: int, rounding: float = EPS) -> float:
    """The size below which an eigenvalue of a Gram matrix of order n carries no information.

    ``max(16·rounding, n·ε)·scale`` with ε of float64, so n·ε·λ_max for a float64 matrix of order
    n ≥ 16. For a float32 one n·ε would discard what can still be seen (at n = 4000 half the
    spectrum of attention features): 16 units leave out what rounding made, and no more. ``scale``
    is the largest eigenvalue, or the larger part that centring removed; ``rounding`` that of the
    arithmetic that made the matrix.

    >>> numerical_floor(scale=10.0, n=1000) == 1000 * EPS * 10.0
    True
    >>> round(numerical_floor(scale=1.0, n=1000, rounding=2**-23), 8)
    1.91e-06
    """
    return max(GUARD * rounding, n * EPS) * scale


def default_alphas(largest: float, floor: float, count: int = N_ALPHAS) -> Float[np.ndarray, " a"]:
    """The grid tried when none is given: from twice the numerical floor to ten times λ_max.

    >>> grid = default_alphas(largest=5.0, floor=1e-12)
    >>> len(grid), float(grid[0]), float(grid[-1])
    (30, 2e-12, 50.0)

    Where nothing varies beyond rounding, such as features of sets that are all alike, the grid goes
    up to penalties at which that rounding does not show:

    >>> default_alphas(largest=1e-14, floor=1e-12)[-1] > 1e3
    np.True_
    """
    count = check_count(count, "count")
    if largest <= floor:
        largest = floor / EPS
    # every penalty gives the same fit to a Gram matrix of zeros
    if not largest > 0:
        largest = 1.0
    low = max(2 * floor, EPS * largest)
    high = max(10 * largest, 10 * low)
    return np.geomspace(low, high, count)


def choose_penalty(
    alphas: Float[np.ndarray, " a"],
    errors: Float[np.ndarray, " a"],
    resolution: float = 0.0,
    steady: Bool[np.ndarray, " a"] | None = None,
) -> int:
    """Position of the penalty to use: the only one, or that of least error.

    Among equals, the largest. Errors are infinite where rounding forbids a judgement; those below
    ``resolution`` are as good as zero. Penalties that are not ``steady``, at which rounding shows
    in predictions, are used only where no other can be judged.

    >>> choose_penalty(np.array([0.1, 1.0, 10.0]), np.array([0.4, 0.4, np.inf]))
    1
    >>> alphas, errors = np.array([1e-12, 1e-6, 1e-3]), np.array([0.40001, 0.40002, 0.5])
    >>> choose_penalty(alphas, errors, steady=np.array([False, True, True]))
    1
    """
    if len(alphas) == 1:
        return 0
    candidates = np.isfinite(errors)
    if not candidates.any():
        raise NoPenaltyError(
            f"leave-one-out cannot choose among the {len(alphas)} penalties from {alphas.min():g} "
            f"to {alphas.max():g}: under each, some sample is fitted exactly within rounding "
            "(leverage 1), or there is 1 sample only. Add larger penalties, or fit with one fixed "
            "penalty."
        )
    if steady is not None and (candidates & steady).any():
        candidates = candidates & steady
    least = max(float(errors[candidates].min()), resolution)
    equals = np.flatnonzero(candidates & (errors <= least * (1 + FLAT)))
    return int(equals[np.argmax(alphas[equals])])


def leave_one_out(
    residuals: Float[np.ndarray, "*a n t"], complement: Float[np.ndarray, "*a n"]
) -> Float[np.ndarray, "*a n t"]:
    """Residuals of the fits that leave each sample out.

    r_i / (1 − h_i), infinite where 1 − h_i is 0.
    """
    divisor = complement[..., None]
    infinite = np.full(residuals.shape, np.inf)
    return np.asarray(np.divide(residuals, divisor, out=infinite, where=divisor > 0))


def rounding_of_squares(y_size: float, rounding: float) -> float:
    """Mean squared errors below this are rounding: 4 units on the largest output, squared."""
    return (4 * rounding * y_size) ** 2


def check_alphas(alphas: Any) -> Float[np.ndarray, " a"]:
    """Return the penalties as a float64 vector in the order given.

    The message names the offender.
    """
    try:
        values = np.array(alphas, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise type(error)(f"`alphas` must be numbers: got {alphas!r} ({error}).") from error
    if values.ndim != 1 or values.size == 0:
        raise ValueError(
            f"`alphas` must be a sequence of at least one penalty: got shape {values.shape}."
        )
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"every penalty of `alphas` must be finite and at least 0: got {values[i]:g} at "
            f"position {i}. Use 0 for the minimum-norm fit without penalty."
        )
    return values


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


def check_weights(
    weights: Float[np.ndarray, " n"] | None, n: int, *, zero_allowed: bool = False
) -> Float[np.ndarray, " n"]:
    """Return the weights in float64, ones if there are none.

    All must be positive, unless zero is allowed.
    """
    if weights is None:
        return np.ones(n)
    if weights.shape != (n,):
        raise ValueError(
            f"`weights` must have one entry per sample: got shape {weights.shape} for {n} samples."
        )
    check_finite(weights, "weights")
    least = weights.min()
    forbidden_zero = least == 0 and not zero_allowed
    if least < 0 or forbidden_zero:
        i = int(weights.argmin())
        raise ValueError(
            f"`weights` must be positive: got {weights[i]:g} for sample {i}. Drop samples of "
            "weight zero."
        )
    check_weight_sizes(weights, "weights")
    return weights.astype(np.float64)
