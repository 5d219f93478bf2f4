"""Values over the norm ball: the heads' design, radii by cross-validation, and a layer of the active heads.

Everything is in the paper's scaling: φ_m(x) = (1/N) Σ_i σ(s_mi) x~_i without M^{-1/2}, f(x) = Σ_m <v_m, φ_m(x)> + b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, unit_exponent
from keyhole.estimators._radii import Pair, Ray
from keyhole.features import apply_values, attention_features
from keyhole.heads import HeadDraw
from keyhole.layer import Samples, distinct_samples
from keyhole.sets import SetBatch
from keyhole.solvers.design import DenseDesign, StreamedDesign
from keyhole.solvers.dual_gap import LOSSES
from keyhole.solvers.norm_ball import NormBall, NormBallFit, Setup, check_problem, minimise_over_ball
from keyhole.solvers.projection import group_norms, norm_ball_support
from keyhole.solvers.working_set import OBJECTIVE_FLOOR, Solution

CHOOSING_TOL = 2e-2
"""Fits that only serve to compare radii have gaps of this share of the held-out loss; so close, radii are equal."""

LOOSEST_TOL = 0.5
"""And never a gap of more than this share of their own loss."""

GROWTH = 2.0
"""From one radius of an automatic path to the next."""

PATIENCE = 2
"""Radii in a row with the same held-out loss after which a path ends; one with a larger loss ends it at once."""

LONGEST_PATH = 30
"""Radii of an automatic path at most: a factor of 10^9."""


@dataclass(frozen=True)
class PrunedLayer:
    """A layer that keeps its active heads only; they are regenerated from their seed as needed.

    Attributes
    ----------
    heads : HeadDraw
        All M heads.
    active : array (k,)
        Which of them have v_m ≠ 0.
    values : array (k, D, t)
        Their values.
    intercept : array (t,)
    activation, dtype : str
    """

    heads: HeadDraw
    active: Int[np.ndarray, " k"] = field(repr=False)
    values: Float[np.ndarray, "k e t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    activation: str
    dtype: str

    def predict(self, batch: SetBatch, *, memory_budget: int = MEMORY_BUDGET) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``. O(tokens · k · D), no temporary beyond the budget."""
        scores = np.zeros((len(batch), len(self.intercept)))
        # values have the units of y, which may be beyond the range of float32
        units = unit_exponent(self.values, axis=(0, 1)) if len(self.values) else np.zeros(len(self.intercept), int)
        size = block_size(100 * (self.heads.dim + 1) ** 2, memory_budget // 2)
        for part in blocks(len(self.active), size):
            heads = draw_heads(self.heads, self.active[part])
            # apply_values carries the M^{-1/2} of the heads it is given
            values = math.sqrt(len(heads)) * np.ldexp(self.values[part], -units)
            scores += apply_values(
                batch, heads, values, self.activation, dtype=self.dtype, memory_budget=memory_budget // 2
            )
        return np.asarray(np.ldexp(scores, units) + self.intercept)


@dataclass(frozen=True)
class BallFit:
    """A layer fitted over the norm ball.

    Attributes
    ----------
    layer : PrunedLayer
    fit : NormBallFit
        Values, intercept and certificate as the solver reports them.
    relative_gap : float
        The gap as compared with ``tol``.
    radii : (float, float)
        K_1 and R_2 used.
    trials : tuple of Trial
        The radii tried; those used alone, with losses that are NaN, if there was nothing to choose.
    """

    layer: PrunedLayer
    fit: NormBallFit
    relative_gap: float
    radii: Pair
    trials: tuple[Trial, ...] = field(repr=False)


@dataclass(frozen=True)
class Trial:
    """Cross-validation at one pair of radii: the loss of each fold and of all held-out samples together."""

    radii: Pair
    fold_losses: tuple[float, ...]
    mean_loss: float
    n_active: float


def draw_heads(heads: HeadDraw, which: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k e e"]:
    """Draw some heads of a draw, run by run of consecutive ones.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> draw = HeadDraw(kh.GaussianHeads(), n_heads=10, dim=3, seed=0)
    >>> bool((draw_heads(draw, np.array([1, 4, 5])) == draw.block(0, 10)[[1, 4, 5]]).all())
    True
    """
    runs = np.split(which, np.flatnonzero(np.diff(which) != 1) + 1)
    return np.concatenate([heads.block(int(run[0]), int(run[-1]) + 1) for run in runs])


def head_design(
    batch: SetBatch, heads: HeadDraw, activation: str, dtype: str, memory_budget: int, *, centre: bool
) -> DenseDesign | StreamedDesign:
    """The features of all heads without M^{-1/2}: in memory if they fit the budget, else streamed by blocks of heads.

    With ``centre`` the mean of every column is taken off. A free intercept makes up for it, and then has little
    left to do: the solver looks for it at every step.
    """

    def columns(which: HeadDraw | np.ndarray) -> Float[np.ndarray, "n q"]:
        features = attention_features(batch, which, activation, dtype=dtype)
        features *= math.sqrt(which.n_heads if isinstance(which, HeadDraw) else len(which))
        if centre:
            features -= features.mean(axis=0, dtype=np.float64).astype(features.dtype)
        return features

    width = heads.dim + 1
    if len(batch) * heads.n_heads * width * np.dtype(dtype).itemsize <= memory_budget:
        return DenseDesign(columns(heads), width, memory_budget)
    # a block is drawn, packed and converted beside the block itself
    share = max(1, memory_budget // 4)
    return StreamedDesign(lambda which: columns(draw_heads(heads, which)), len(batch), heads.n_heads, width, share)


@dataclass(frozen=True)
class BallProblem:
    """What is minimised over the ball, and how hard to try."""

    loss: str
    fit_intercept: bool
    tol: float
    max_iter: int
    n_folds: int


def fit_ball_layer(
    batch: SetBatch,
    columns: Float[np.ndarray, "n t"],
    heads: HeadDraw,
    rays: Sequence[Ray],
    problem: BallProblem,
    *,
    activation: str = "relu",
    weights: Float[np.ndarray, " n"] | None = None,
    dtype: str = "float64",
    memory_budget: int = MEMORY_BUDGET,
) -> BallFit:
    """Fit the values of M heads over a norm ball; among several balls, that of least cross-validated loss.

    Parameters
    ----------
    batch : SetBatch
        n sets.
    columns : array (n, t)
        Targets as the loss takes them.
    heads : HeadDraw
    rays : sequence of Ray
        The balls to choose from; a single fixed one is used as it is.
    problem : BallProblem
    activation : str
    weights : array (n,), optional
    dtype : "float64" or "float32"
        Of the features and the inner iterations; gaps are computed in float64.
    memory_budget : int
        Half of it for the design, half for the solver's copy of the columns at hand.

    Notes
    -----
    4·n·q·t flops an iteration on q columns at hand. Samples are put in an order of their own, so that neither
    folds nor rounding depend on the order in which they are given.
    """
    samples = in_canonical_order(distinct_samples(batch, columns, weights))
    units = OutputUnits.of(samples, problem)
    samples, rays = replace(samples, columns=units.enter(samples.columns)), [ray.in_units(-units.exponent) for ray in rays]
    share = max(1, memory_budget // 2)
    design = head_design(samples.batch, heads, activation, dtype, share, centre=problem.fit_intercept)
    targets = samples.columns[:, 0] if columns.shape[1] == 1 else samples.columns
    setup = check_problem(
        design,
        targets,
        heads.dim + 1,
        problem.loss,
        problem.fit_intercept,
        samples.weights,
        np.dtype(dtype),
        share,
    )
    if len(rays) == 1 and rays[0].fixed:
        trials, start = [Trial(rays[0].at(1.0), (), math.nan, math.nan)], setup.check_start(None)
        best = trials[0]
    else:
        trials, best, start = choose_radii(setup, rays, problem, share)
    solution = solve(setup, best.radii, start, problem.tol, problem.max_iter, share)
    fit = NormBallFit(**setup.fields(solution))
    layer = _prune(fit, heads, activation, dtype)
    if problem.fit_intercept:  # the columns were centred
        offset = layer.intercept - layer.predict(samples.batch, memory_budget=memory_budget).mean(axis=0)
        layer = replace(layer, intercept=layer.intercept + offset)
    return units.leave(BallFit(layer, fit, solution.relative_gap, best.radii, tuple(trials)))


DEGREES = {"squared": 2, "absolute": 1}
"""Losses with L(a r) = a^k L(r), and their k: they follow the units of y."""

OF_DIFFERENCES = ("squared", "absolute", "huber")
"""Losses of y − f alone: with a free intercept they do not know where y has its zero."""


@dataclass(frozen=True)
class OutputUnits:
    """Where y is counted from, and the power of two it is counted in, while a layer is fitted.

    A loss of y − f with a free intercept is the same for y less any constant, and one of degree k scales: neither an
    offset nor the unit of y may cost digits. Huber's loss has a size of its own, and labels are no quantities: those
    keep their units.

    Attributes
    ----------
    origin : array (t,)
        Taken off y; zero without an intercept.
    exponent : int
        y is divided by 2^exponent, and so are values and radii.
    degree : int
        k.
    """

    origin: Float[np.ndarray, " t"]
    exponent: int
    degree: int

    @classmethod
    def of(cls, samples: Samples, problem: BallProblem) -> OutputUnits:
        """Units in which the outputs of some samples are centred and of size one, as far as the loss allows."""
        y = samples.columns
        origin = np.zeros(y.shape[1])
        if problem.fit_intercept and problem.loss in OF_DIFFERENCES:
            origin = np.median(y, axis=0)  # an output itself or nearly, so that little is rounded
        degree = DEGREES.get(problem.loss, 0)
        return cls(origin, int(unit_exponent(y - origin)) if degree else 0, degree)

    def enter(self, y: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n t"]:
        """y in these units."""
        return np.asarray(np.ldexp(y - self.origin, -self.exponent))

    def leave(self, fit: BallFit) -> BallFit:
        """A fit in the units of y as it was given."""
        layer, inner = fit.layer, fit.fit
        origin = self.origin.reshape(inner.intercept.shape)
        layer = replace(layer, values=self._linear(layer.values), intercept=self._linear(layer.intercept) + self.origin)
        inner = replace(
            inner,
            values=self._linear(inner.values),
            intercept=np.asarray(self._linear(inner.intercept) + origin),
            objective=self._loss(inner.objective),
            duality_gap=self._loss(inner.duality_gap),
            # a dual point is a derivative of the loss
            dual=np.ldexp(inner.dual, (self.degree - 1) * self.exponent),
        )
        trials = tuple(
            replace(
                trial,
                radii=self._radii(trial.radii),
                fold_losses=tuple(self._loss(loss) for loss in trial.fold_losses),
                mean_loss=self._loss(trial.mean_loss),
            )
            for trial in fit.trials
        )
        return BallFit(layer, inner, fit.relative_gap, self._radii(fit.radii), trials)

    def _linear(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(np.ldexp(array, self.exponent))

    def _radii(self, radii: Pair) -> Pair:
        return math.ldexp(radii[0], self.exponent), math.ldexp(radii[1], self.exponent)

    def _loss(self, loss: float) -> float:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.ldexp(loss, self.degree * self.exponent))


def _prune(fit: NormBallFit, heads: HeadDraw, activation: str, dtype: str) -> PrunedLayer:
    active = np.flatnonzero(fit.active)
    kept = fit.values.reshape(heads.n_heads, heads.dim + 1, -1)[active]
    return PrunedLayer(heads, active, kept, fit.intercept.reshape(-1), activation, dtype)


def solve(
    setup: Setup,
    radii: Pair,
    start: Float[np.ndarray, "p t"],
    tol: float,
    max_iter: int,
    memory_budget: int,
) -> Solution:
    """Minimise over one ball, from ``start`` projected onto it.

    A solver that believes itself at the end of its digits is started afresh from where it stopped, for as long
    as that lowers the gap by a tenth.
    """
    values, n_iter, gap = start, 0, math.inf
    while True:
        solution = minimise_over_ball(setup, NormBall(*radii), values, tol, max_iter - n_iter, memory_budget)
        values, n_iter = solution.values, n_iter + solution.n_iter
        if solution.converged or n_iter >= max_iter or solution.certificate.gap > 0.9 * gap:
            return replace(solution, n_iter=n_iter)
        gap = solution.certificate.gap


def in_canonical_order(samples: Samples) -> Samples:
    """Sort the samples by target, then by the sums of their keys, then by query."""
    batch = samples.batch
    sums = np.add.reduceat(batch.tokens, batch.offsets[:-1], axis=0)
    parts = [samples.columns, sums] + ([] if batch.query is None else [batch.query])
    order = np.lexsort(np.concatenate(parts, axis=1).T[::-1])
    weights = None if samples.weights is None else samples.weights[order]
    return Samples(batch[order], samples.columns[order], weights, samples.owner)


def deal_folds(setup: Setup, n_folds: int) -> Int[np.ndarray, " n"]:
    """The fold of each sample. Samples are sorted by target, so dealing them in turn balances the folds.

    The only sample of a class is in no fold (−1): a fit without it would not know the class.
    """
    n = len(setup.targets)
    if n < 2:
        raise ValueError(
            "cross-validation needs at least two samples: got 1 sample (copies and samples of weight 0 do "
            "not count). Give more samples, or fixed numbers as `group_radius` and `ball_radius`."
        )
    folds = np.arange(n) % min(n_folds, n)
    if setup.loss in ("logistic", "multinomial", "hinge"):
        _, label, counts = np.unique(setup.targets, axis=0, return_inverse=True, return_counts=True)
        folds[counts[label.reshape(-1)] == 1] = -1
        if (folds < 0).all():
            raise ValueError(
                "cross-validation needs a class with at least two samples: every class has one. Give more "
                "samples, or fixed numbers as `group_radius` and `ball_radius`."
            )
    return folds


def best_constant(setup: Setup) -> tuple[Float[np.ndarray, " t"], float]:
    """The best prediction without values, and its loss."""
    loss, constant = LOSSES[setup.loss], np.zeros(setup.targets.shape[1])
    flat = np.zeros_like(setup.targets)
    if setup.fit_intercept:
        constant = loss.best_intercept(setup.targets, flat, setup.weights, constant)
    return constant, float(setup.weights @ loss.value(setup.targets, flat + constant))


def radius_scale(setup: Setup, unit: Pair) -> float:
    """The scale below which no ball of this shape can bring the training loss to zero.

    By convexity the loss of the best constant falls by at most the support function of the ball at its
    gradient: the scale is their ratio, and follows the units of targets and features.
    """
    constant, null = best_constant(setup)
    flat = np.zeros_like(setup.targets) + constant
    slope = LOSSES[setup.loss].gradient(setup.targets, flat)
    slopes = setup.design.rmatvec(setup.weights[:, None] * slope).reshape(setup.value_shape[0], -1)
    support, _ = norm_ball_support(group_norms(slopes), *unit)
    return null / support if null > 0 and support > 0 else 1.0


def choose_radii(
    setup: Setup, rays: Sequence[Ray], problem: BallProblem, memory_budget: int
) -> tuple[list[Trial], Trial, Float[np.ndarray, "p t"]]:
    """Cross-validate every ball; return all trials, the best, and values near its solution to start from."""
    validation = CrossValidation(
        setup, deal_folds(setup, problem.n_folds), problem.tol, problem.max_iter, memory_budget
    )
    trials: list[Trial] = []
    best: Trial | None = None
    start = setup.check_start(None)
    for ray in rays:
        scales = [1.0]
        if ray.fixed:  # warm values will do, but the ball need not hold the one before
            validation.leader = math.inf
        else:
            first = radius_scale(setup, ray.unit) / GROWTH
            scales = [first * GROWTH**k for k in range(LONGEST_PATH)]
            validation.forget()
        leader: Trial | None = None
        since_best = 0
        for scale in scales:
            trial = validation.trial(ray.at(scale))
            trials.append(trial)
            since_best += 1
            if leader is None or trial.mean_loss < (1.0 - CHOOSING_TOL) * leader.mean_loss:
                leader, since_best = trial, 0
                if best is None or leader.mean_loss < best.mean_loss:
                    best, start = leader, validation.values[0]
            risen = trial.mean_loss > (1.0 + CHOOSING_TOL) * leader.mean_loss
            if risen or since_best >= PATIENCE or validation.interpolates:
                break
    assert best is not None  # every ray has a first scale
    return trials, best, start


class CrossValidation:
    """One fit per fold, each started from its own solution at the radii before.

    A fold is left out by weights of zero, so that all folds share one design.
    """

    def __init__(
        self, setup: Setup, folds: Int[np.ndarray, " n"], tol: float, max_iter: int, memory_budget: int
    ) -> None:
        self.setup = setup
        self.held_out: list[Bool[np.ndarray, " n"]] = [folds == k for k in np.unique(folds[folds >= 0])]
        self.tol = tol
        self.max_iter = max_iter
        self.memory_budget = memory_budget
        self.floor = OBJECTIVE_FLOOR * best_constant(setup)[1]
        self.forget()

    def forget(self) -> None:
        """Start from zero again."""
        self.values = [self.setup.check_start(None) for _ in self.held_out]
        self.objectives = [math.inf] * len(self.held_out)
        self.leader = math.inf

    @property
    def interpolates(self) -> bool:
        """Whether no fold has a training loss left that a larger ball could lower by more than the gap."""
        return max(self.objectives) <= self.floor

    def trial(self, radii: Pair) -> Trial:
        """Fit all folds at ``radii``."""
        setup = self.setup
        losses, shares, active = [], [], []
        for k, out in enumerate(self.held_out):
            solution = self._solve_without(out, radii, k)
            predictions = setup.design.matvec(solution.values) + solution.certificate.intercept
            loss = LOSSES[setup.loss].value(setup.targets[out], predictions[out])
            shares.append(float(setup.weights[out].sum()))
            losses.append(float(setup.weights[out] @ loss) / shares[-1])
            active.append(int((group_norms(solution.values.reshape(setup.value_shape[0], -1)) > 0).sum()))
        mean = float(np.average(losses, weights=shares))
        self.leader = min(self.leader, mean)
        return Trial(radii, tuple(losses), mean, float(np.mean(active)))

    def _solve_without(self, out: Bool[np.ndarray, " n"], radii: Pair, k: int) -> Solution:
        weights = np.where(out, 0.0, self.setup.weights)
        kept = replace(self.setup, weights=weights / weights.sum())
        tol = CHOOSING_TOL
        if math.isfinite(self.leader) and self.floor > 0:
            # the solver's gap is relative to a loss no larger than that of the smaller ball before
            tol *= self.leader / max(self.objectives[k], self.floor)
        tol = min(max(tol, self.tol), LOOSEST_TOL)
        solution = solve(kept, radii, self.values[k], tol, self.max_iter, self.memory_budget)
        self.values[k], self.objectives[k] = solution.values, solution.certificate.objective
        return solution


def tabulate(trials: Sequence[Trial]) -> dict[str, np.ndarray]:
    """Trials as columns of a table."""
    losses = np.array([trial.fold_losses for trial in trials])
    return {
        "group_radius": np.array([trial.radii[0] for trial in trials]),
        "ball_radius": np.array([trial.radii[1] for trial in trials]),
        "mean_test_loss": np.array([trial.mean_loss for trial in trials]),
        "fold_test_losses": losses,
        "mean_active_heads": np.array([trial.n_active for trial in trials]),
    }
