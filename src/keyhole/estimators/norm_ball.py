"""The paper's own learner: a convex loss minimised over a norm ball of values, for regression and classification."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import log_softmax
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from keyhole._array import MEMORY_BUDGET, block_size, blocks, unit_exponent
from keyhole._checks import check_choice, check_count, check_flag, check_float_array, check_number
from keyhole.attention.features import apply_values, attention_features, key_contributions
from keyhole.attention.heads import HeadDraw
from keyhole.ball.design import DenseDesign, StreamedDesign
from keyhole.ball.losses import LOSSES
from keyhole.ball.norm_ball import (
    OBJECTIVE_FLOOR,
    BallSetup,
    Solution,
    SolverWarning,
    check_radii,
    check_radius,
    null_model,
    warn_if_short,
)
from keyhole.ball.projection import NormBall, group_norms
from keyhole.data.sets import PooledSets, SampleBatch, SetBatch
from keyhole.data.tokens import QUERIES, SCALINGS
from keyhole.estimators.base import (
    LESS_FOR_A_BALL,
    LESS_FOR_A_PREDICTION,
    KeyContributions,
    LabelScores,
    SetEstimator,
    explained_memory_errors,
    finite_heads,
    memory_budget,
    outputs,
)
from keyhole.estimators.inputs import (
    LayerPlan,
    as_columns,
    as_distribution,
    as_seed,
    as_sets,
    as_weights,
    check_layer_options,
    check_random_state,
    choose_rule,
)
from keyhole.layer import Samples, beside, distinct_samples, of_extras

Pair = tuple[float, float]


@dataclass(frozen=True)
class Ray:
    """Norm balls of radii (K_1, R_2) within fixed ones, and within growing ones times a scale; inf bounds nothing."""

    fixed: Pair = (math.inf, math.inf)
    growing: Pair = (math.inf, math.inf)

    @property
    def grows(self) -> bool:
        """Whether this is more than a single pair of radii."""
        return min(self.growing) < math.inf

    def in_units(self, exponent: int) -> Ray:
        """The same ball for outputs 2^exponent times as large; what grows finds its own scale."""
        return replace(
            self, fixed=(math.ldexp(self.fixed[0], exponent), math.ldexp(self.fixed[1], exponent))
        )

    def at(self, scale: float) -> Pair:
        """The radii at this scale."""
        return min(self.fixed[0], scale * self.growing[0]), min(
            self.fixed[1], scale * self.growing[1]
        )


@dataclass(frozen=True)
class Theory:
    """K_1 = c √B and √(K_2/M) with K_2 = c B/δ: the radii of the paper's theorem.

    ``complexity`` is B; None if it is not known. The ratio of the two radii at c = 1, (δM)^{-1/2}, needs no B.
    """

    complexity: float | None
    delta: float
    constant: float
    n_heads: int

    def __post_init__(self) -> None:
        if self.complexity is not None:
            check_number(self.complexity, "complexity", minimum=0.0, exclusive=True)
        if check_number(self.delta, "delta", minimum=0.0, exclusive=True) >= 1.0:
            raise ValueError(
                f"`delta` must be a probability of failure, less than 1: got {self.delta:g}."
            )
        check_number(self.constant, "constant", minimum=0.0, exclusive=True)

    @property
    def ratio(self) -> float:
        """(δM)^{-1/2}."""
        return 1.0 / math.sqrt(self.delta * self.n_heads)

    def radius(self, name: str) -> float:
        """The group radius or the ball radius."""
        if self.complexity is None:
            raise ValueError(
                f"`{name}='theory'` needs the complexity B of the target: `complexity` is None. Pass "
                "complexity=kh.theory.paper_complexity(target) for a known target, or let cross-validation "
                f"choose with {name}='cv'."
            )
        if name == "group_radius":
            return self.constant * math.sqrt(self.complexity)
        return math.sqrt(self.constant * self.complexity / (self.delta * self.n_heads))


def candidate_balls(group_radius: Any, ball_radius: Any, theory: Theory) -> list[Ray]:
    """Return the balls that the two parameters of an estimator name, smallest first.

    "cv" for the group radius makes it grow. "matched" makes the ball radius follow it at the theory's ratio,
    and "cv" tries three shapes: the group norm alone, the theory's ratio, the ball alone.
    """
    groups = _as_radii(group_radius, "group_radius", ("cv", "theory"), theory)
    balls = _as_radii(ball_radius, "ball_radius", ("matched", "cv", "theory"), theory)
    rays: list[Ray] = []
    for group in [None] if groups is None else groups:
        if balls is not None and group is None:
            rays += [Ray((math.inf, ball), growing=(1.0, math.inf)) for ball in balls]
        elif balls is not None and group is not None:
            rays += [Ray(check_radii(group, ball)) for ball in balls]
        elif group is not None and math.isinf(group):
            if ball_radius == "matched":
                raise ValueError(
                    "`ball_radius='matched'` follows `group_radius`, which is infinite. Give `ball_radius` a number "
                    "or 'cv'."
                )
            rays.append(Ray(growing=(math.inf, 1.0)))
        else:
            unit, alone = 1.0 if group is None else group, 1.0 / math.sqrt(theory.n_heads)
            for ratio in (
                [theory.ratio] if ball_radius == "matched" else [math.inf, theory.ratio, alone]
            ):
                # zero times infinity is not a number, and a group radius of zero is all the bound one needs
                pair = unit, math.inf if math.isinf(ratio) else unit * ratio
                rays.append(Ray(growing=pair) if group is None else Ray(pair))
    return sorted(rays, key=lambda ray: ray.at(1.0))


def _as_radii(radius: Any, name: str, words: tuple[str, ...], theory: Theory) -> list[float] | None:
    """The numbers that ``radius`` stands for; None for a word that stands for a family."""
    if isinstance(radius, str):
        if radius not in words:
            listed = ", ".join(repr(word) for word in words)
            raise ValueError(
                f"`{name}` must be a number, a sequence of numbers or one of {listed}: got {radius!r}."
            )
        return [theory.radius(name)] if radius == "theory" else None
    if np.ndim(radius) == 0:
        return [check_radius(radius, name)]
    radii = check_float_array(radius, name).astype(np.float64)
    if radii.ndim != 1 or len(radii) == 0:
        raise ValueError(
            f"`{name}` must be a non-empty sequence of numbers: got shape {radii.shape}."
        )
    return [check_radius(float(value), f"{name}[{i}]") for i, value in enumerate(radii)]


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

    ``active`` (k,) says which of all M ``heads`` have v_m ≠ 0, ``values`` (k, D, t) are theirs.
    """

    heads: HeadDraw
    active: Int[np.ndarray, " k"] = field(repr=False)
    values: Float[np.ndarray, "k e t"] = field(repr=False)
    intercept: Float[np.ndarray, " t"]
    activation: str
    dtype: str
    extras_values: Float[np.ndarray, "c t"] | None = field(default=None, repr=False)

    def predict(
        self, batch: SetBatch | PooledSets, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``. O(tokens · k · D), no temporary beyond the budget."""
        scores = self._sum_over_heads(apply_values, batch, len(batch), memory_budget)
        return np.asarray(scores + self.intercept + of_extras(self, batch))

    def contributions(
        self, batch: SampleBatch, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "k t"]:
        """What every key adds to f, sample after sample."""
        return self._sum_over_heads(
            key_contributions, batch, int(batch.unpooled.token_counts.sum()), memory_budget
        )

    def _sum_over_heads(
        self,
        outputs_of: Callable[..., np.ndarray],
        batch: SampleBatch,
        n_rows: int,
        memory_budget: int,
    ) -> Float[np.ndarray, "k t"]:
        """The outputs of the active heads, some of them at a time."""
        scores = np.zeros((n_rows, len(self.intercept)))
        # values have the units of y, which may be beyond the range of float32
        units = (
            unit_exponent(self.values, axis=(0, 1))
            if len(self.values)
            else np.zeros(len(self.intercept), int)
        )
        heads = self.heads.seen_by(query=batch.has_query)
        size = block_size(100 * heads.entries, memory_budget // 2)
        for part in blocks(len(self.active), size):
            drawn = draw_heads(heads, self.active[part])
            # apply_values carries the M^{-1/2} of the heads it is given
            values = math.sqrt(len(drawn)) * np.ldexp(self.values[part], -units)
            scores += outputs_of(
                batch,
                drawn,
                values,
                self.activation,
                dtype=self.dtype,
                memory_budget=memory_budget // 2,
            )
        return np.ldexp(scores, units)


@dataclass(frozen=True)
class BallFit:
    """A layer fitted over the norm ball of ``radii`` K_1 and R_2, and the radii tried.

    Pruned heads of ``values`` are exactly zero; ``objective`` is the weighted mean loss, at most ``gap`` above the
    minimum. ``trials`` holds the radii used alone, with losses that are NaN, if there was nothing to choose.
    """

    layer: PrunedLayer
    values: Float[np.ndarray, "m e t"] = field(repr=False)
    objective: float
    gap: float
    solution: Solution = field(repr=False)
    radii: Pair
    trials: tuple[Trial, ...] = field(repr=False)


@dataclass(frozen=True)
class Trial:
    """Cross-validation at one pair of radii: the loss of each fold and of all held-out samples together."""

    radii: Pair
    fold_losses: tuple[float, ...]
    mean_loss: float
    n_active: float


def draw_heads(heads: HeadDraw, which: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k f e"]:
    """Draw some heads of a draw, run by run of consecutive ones."""
    runs = np.split(which, np.flatnonzero(np.diff(which) != 1) + 1)
    return np.concatenate([heads.block(int(run[0]), int(run[-1]) + 1) for run in runs])


def head_design(
    batch: SetBatch | PooledSets,
    heads: HeadDraw,
    activation: str,
    dtype: str,
    memory_budget: int,
    *,
    centre: bool,
) -> DenseDesign | StreamedDesign:
    """The features of all heads without M^{-1/2}: in memory if they fit the budget, else streamed by blocks of heads.

    With ``centre`` the mean of every column is taken off. A free intercept makes up for it, and then has little
    left to do: the solver looks for it at every step. Extras are further groups of columns after those of the heads,
    filled up with zeros, and times √M: in proportion to features they are what they are to ridge.
    """
    width, n_groups = heads.dim + 1, heads.n_heads
    extras = np.zeros((len(batch), 0), dtype)
    if batch.extras is not None:
        padded = np.pad(batch.extras, ((0, 0), (0, -batch.extras.shape[1] % width))) * math.sqrt(
            heads.n_heads
        )
        extras = (padded - padded.mean(axis=0) if centre else padded).astype(dtype)
        n_groups += extras.shape[1] // width

    def columns(which: HeadDraw | np.ndarray) -> Float[np.ndarray, "n q"]:
        features = attention_features(batch, which, activation, dtype=dtype)
        features *= math.sqrt(len(which))
        if centre:
            features -= features.mean(axis=0, dtype=np.float64).astype(features.dtype)
        return features

    if len(batch) * heads.n_heads * width * np.dtype(dtype).itemsize <= memory_budget:
        return DenseDesign(beside(columns(heads), extras), width, memory_budget)

    def some(which: Int[np.ndarray, " k"]) -> Float[np.ndarray, "n q"]:
        if n_groups == heads.n_heads:
            return columns(draw_heads(seen, which))
        found = np.empty((len(batch), len(which), width), dtype)
        own = which >= heads.n_heads
        found[:, own] = extras.reshape(len(batch), -1, width)[:, which[own] - heads.n_heads]
        if not own.all():
            found[:, ~own] = columns(draw_heads(seen, which[~own])).reshape(len(batch), -1, width)
        return found.reshape(len(batch), -1)

    seen = heads.seen_by(query=batch.has_query)
    # a block is drawn, packed and converted beside the block itself
    share = max(1, memory_budget // 4)
    return StreamedDesign(some, len(batch), n_groups, width, share)


@dataclass(frozen=True)
class BallSettings:
    """What is minimised over the ball, and how hard to try."""

    loss: str
    fit_intercept: bool
    tol: float
    max_iter: int
    n_folds: int


def fit_ball_layer(
    batch: SetBatch | PooledSets,
    columns: Float[np.ndarray, "n t"],
    heads: HeadDraw,
    rays: Sequence[Ray],
    settings: BallSettings,
    *,
    activation: str = "relu",
    weights: Float[np.ndarray, " n"] | None = None,
    dtype: str = "float64",
    memory_budget: int = MEMORY_BUDGET,
) -> BallFit:
    """Fit the values of M heads over a norm ball; among several balls, that of least cross-validated loss.

    4·n·q·t flops an iteration on q columns at hand; half of the memory is for the design, half for the solver's copy of
    those columns. Samples are put in an order of their own, so that neither folds nor rounding depend on the order in
    which they are given.
    """
    samples = in_canonical_order(distinct_samples(batch, columns, weights))
    units = OutputUnits.of(samples, settings)
    samples = replace(samples, columns=np.ldexp(samples.columns - units.origin, -units.exponent))
    rays = [ray.in_units(-units.exponent) for ray in rays]
    share = max(1, memory_budget // 2)
    design = head_design(
        samples.batch, heads, activation, dtype, share, centre=settings.fit_intercept
    )
    n, width = len(samples.columns), heads.dim + 1
    weights = (
        np.full(n, 1.0 / n) if samples.weights is None else samples.weights / samples.weights.sum()
    )
    problem = settings.loss, width, settings.fit_intercept, np.dtype(dtype), share
    setup = BallSetup(design, samples.columns, weights, *problem)
    if len(rays) == 1 and not rays[0].grows:
        best, start = Trial(rays[0].at(1.0), (), math.nan, math.nan), setup.zeros
        trials = [best]
    else:
        trials, best, start = choose_radii(setup, rays, settings)
    solution = solve(setup, best.radii, start, settings.tol, settings.max_iter)
    values, extras = (
        solution.values[: heads.n_heads * width].reshape(heads.n_heads, width, -1),
        None,
    )
    if samples.batch.extras is not None:
        rest = solution.values[heads.n_heads * width :][: samples.batch.extras.shape[1]]
        extras = math.sqrt(heads.n_heads) * rest
    active = np.flatnonzero(values.any(axis=(1, 2)))
    intercept = solution.certificate.intercept
    layer = PrunedLayer(heads, active, values[active], intercept, activation, dtype, extras)
    if settings.fit_intercept:  # the columns were centred
        offset = layer.intercept - layer.predict(samples.batch, memory_budget=memory_budget).mean(
            axis=0
        )
        layer = replace(layer, intercept=layer.intercept + offset)
    objective, gap = solution.certificate.objective, solution.certificate.gap
    return units.leave(BallFit(layer, values, objective, gap, solution, best.radii, tuple(trials)))


DEGREES = {"squared": 2, "absolute": 1}
"""Losses with L(a r) = a^k L(r), and their k: they follow the units of y."""

OF_DIFFERENCES = ("squared", "absolute", "huber")
"""Losses of y − f alone: with a free intercept they do not know where y has its zero."""


@dataclass(frozen=True)
class OutputUnits:
    """Where y is counted from, and the power of two it is counted in, while a layer is fitted.

    A loss of y − f with a free intercept is the same for y less any constant, and one of degree k scales: neither an
    offset nor the unit of y may cost digits. Huber's loss has a size of its own, and labels are no quantities: those
    keep their units. y less ``origin`` (t,) is divided by 2^``exponent``, and so are values and radii.
    """

    origin: Float[np.ndarray, " t"]
    exponent: int
    degree: int

    @classmethod
    def of(cls, samples: Samples, settings: BallSettings) -> OutputUnits:
        """Units in which the outputs of some samples are centred and of size one, as far as the loss allows."""
        y = samples.columns
        origin = np.zeros(y.shape[1])
        if settings.fit_intercept and settings.loss in OF_DIFFERENCES:
            origin = np.median(y, axis=0)  # an output itself or nearly, so that little is rounded
        degree = DEGREES.get(settings.loss, 0)
        return cls(origin, int(unit_exponent(y - origin)) if degree else 0, degree)

    def leave(self, fit: BallFit) -> BallFit:
        """A fit in the units of y as it was given."""
        layer = fit.layer
        extras = None if layer.extras_values is None else self._linear(layer.extras_values)
        intercept = self._linear(layer.intercept) + self.origin
        layer = replace(
            layer, values=self._linear(layer.values), intercept=intercept, extras_values=extras
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
        objective, gap, radii = (
            self._loss(fit.objective),
            self._loss(fit.gap),
            self._radii(fit.radii),
        )
        values = self._linear(fit.values)
        return replace(
            fit,
            layer=layer,
            values=values,
            objective=objective,
            gap=gap,
            radii=radii,
            trials=trials,
        )

    def _linear(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(np.ldexp(array, self.exponent))

    def _radii(self, radii: Pair) -> Pair:
        return math.ldexp(radii[0], self.exponent), math.ldexp(radii[1], self.exponent)

    def _loss(self, loss: float) -> float:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.ldexp(loss, self.degree * self.exponent))


def solve(
    setup: BallSetup, radii: Pair, start: Float[np.ndarray, "p t"], tol: float, max_iter: int
) -> Solution:
    """Minimise over one ball, from ``start`` projected onto it.

    A solver that believes itself at the end of its digits is started afresh from where it stopped, for as long
    as that lowers the gap by a tenth.
    """
    values, n_iter, gap = start, 0, math.inf
    while True:
        solution = setup.minimise(NormBall(*radii), values, tol, max_iter - n_iter)
        values, n_iter = solution.values, n_iter + solution.n_iter
        if solution.converged or n_iter >= max_iter or solution.certificate.gap > 0.9 * gap:
            return replace(solution, n_iter=n_iter)
        gap = solution.certificate.gap


def in_canonical_order(samples: Samples) -> Samples:
    """Sort the samples by target, then by the sums of their keys, then by query."""
    batch = samples.batch
    sums = np.add.reduceat(batch.sets.tokens, batch.sets.offsets[:-1], axis=0)
    parts = [
        samples.columns,
        sums,
        *(part for part in (batch.sets.query, batch.extras) if part is not None),
    ]
    order = np.lexsort(np.concatenate(parts, axis=1).T[::-1])
    weights = None if samples.weights is None else samples.weights[order]
    return Samples(batch[order], samples.columns[order], weights, samples.owner)


def deal_folds(setup: BallSetup, n_folds: int) -> Int[np.ndarray, " n"]:
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


def radius_scale(setup: BallSetup, unit: Pair) -> float:
    """The scale below which no ball of this shape can bring the training loss to zero.

    By convexity the loss of the best constant falls by at most the support function of the ball at its
    gradient: the scale is their ratio, and follows the units of targets and features.
    """
    risk = setup.risk(NormBall(*unit))
    constant, null, _ = null_model(risk)
    slope = risk.loss.gradient(setup.targets, np.zeros_like(setup.targets) + constant)
    slopes = setup.design.rmatvec(setup.weights[:, None] * slope)
    support, _ = risk.ball.support(group_norms(risk.grouped(slopes)))
    return null / support if null > 0 and support > 0 else 1.0


def choose_radii(
    setup: BallSetup, rays: Sequence[Ray], settings: BallSettings
) -> tuple[list[Trial], Trial, Float[np.ndarray, "p t"]]:
    """Cross-validate every ball; return all trials, the best, and values near its solution to start from."""
    validation = CrossValidation(
        setup, deal_folds(setup, settings.n_folds), settings.tol, settings.max_iter
    )
    trials: list[Trial] = []
    best: Trial | None = None
    start = setup.zeros
    for ray in rays:
        scales = [1.0]
        if not ray.grows:  # warm values will do, but the ball need not hold the one before
            validation.leader = math.inf
        else:
            first = radius_scale(setup, ray.growing) / GROWTH
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
        self, setup: BallSetup, folds: Int[np.ndarray, " n"], tol: float, max_iter: int
    ) -> None:
        self.setup = setup
        self.held_out: list[Bool[np.ndarray, " n"]] = [
            folds == k for k in np.unique(folds[folds >= 0])
        ]
        self.tol, self.max_iter = tol, max_iter
        self.floor = OBJECTIVE_FLOOR * null_model(setup.risk(NormBall(0.0, 0.0)))[1]
        self.forget()

    def forget(self) -> None:
        """Start from zero again."""
        self.values = [self.setup.zeros for _ in self.held_out]
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
            active.append(
                int(
                    solution.values.reshape(-1, setup.group_size * setup.targets.shape[1])
                    .any(axis=1)
                    .sum()
                )
            )
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
        solution = solve(kept, radii, self.values[k], tol, self.max_iter)
        self.values[k], self.objectives[k] = solution.values, solution.certificate.objective
        return solution


def tabulate(trials: Sequence[Trial]) -> dict[str, np.ndarray]:
    """Trials as columns of a table."""
    return {
        "group_radius": np.array([trial.radii[0] for trial in trials]),
        "ball_radius": np.array([trial.radii[1] for trial in trials]),
        "mean_test_loss": np.array([trial.mean_loss for trial in trials]),
        "fold_test_losses": np.array([trial.fold_losses for trial in trials]),
        "mean_active_heads": np.array([trial.n_active for trial in trials]),
    }


class NormBallWarning(SolverWarning, ConvergenceWarning):
    """The solver stopped before the gap was as small as asked; scikit-learn's filters see a ConvergenceWarning."""


class _NormBallModel(KeyContributions, SetEstimator):
    """What regression and classification share: parameters, the fit of columns, and scores."""

    def __init__(
        self,
        n_heads: Any = 512,
        heads: Any = None,
        loss: Any = "huber",
        group_radius: Any = "cv",
        ball_radius: Any = "matched",
        activation: Any = "relu",
        fit_intercept: Any = True,
        random_state: Any = None,
        *,
        complexity: Any = None,
        delta: Any = 0.05,
        constant: Any = 1.0,
        n_folds: Any = 3,
        tol: Any = 1e-3,
        max_iter: Any = 20_000,
        dtype: Any = "float64",
        scaling: Any = "none",
        query: Any = "given",
    ) -> None:
        self._store_parameters(locals())

    def _losses(self) -> tuple[str, ...]:
        """The names of the losses that the estimator has."""
        if isinstance(self, ClassifierMixin):
            return "logistic", "hinge"
        return "huber", "absolute", "squared"

    def _check_parameters(self) -> None:
        """Raise for a parameter that no fit takes, whatever the samples."""
        check_layer_options(self.activation, self.dtype)
        check_choice(self.loss, "loss", self._losses())
        check_flag(self.fit_intercept, "fit_intercept")
        check_choice(self.scaling, "scaling", (*SCALINGS, "auto"))
        check_choice(self.query, "query", (*QUERIES, "auto"))
        check_random_state(self.random_state)
        as_distribution(self.heads)
        n_heads = self._finite_heads()
        candidate_balls(
            self.group_radius,
            self.ball_radius,
            Theory(self.complexity, self.delta, self.constant, n_heads),
        )
        check_number(self.tol, "tol", minimum=0.0, exclusive=True)
        check_count(self.max_iter, "max_iter")
        check_count(self.n_folds, "n_folds", minimum=2)

    def _finite_heads(self) -> int:
        """The number of heads, or an error that says why it must be finite."""
        return finite_heads(
            self.n_heads,
            "the norm ball: it bounds the values of each head. Use a large number, or "
            "kh.AttentionRegressor(n_heads=math.inf) for the exact kernel.",
        )

    def _fit_columns(
        self, batch: SetBatch, columns: np.ndarray, weights: np.ndarray | None, loss: str
    ) -> BallFit:
        self._check_parameters()
        activation, dtype = check_layer_options(self.activation, self.dtype)
        n_heads = self._finite_heads()
        theory = Theory(self.complexity, self.delta, self.constant, n_heads)
        balls = candidate_balls(self.group_radius, self.ball_radius, theory)
        settings = BallSettings(
            loss,
            bool(self.fit_intercept),
            check_number(self.tol, "tol", minimum=0.0, exclusive=True),
            check_count(self.max_iter, "max_iter"),
            check_count(self.n_folds, "n_folds", minimum=2),
        )
        options: dict[str, Any] = {"activation": activation, "weights": weights, "dtype": dtype}
        options["memory_budget"] = memory_budget()
        plan = LayerPlan(
            n_heads,
            as_distribution(self.heads),
            None,
            as_seed(self.random_state),
            self._ridge_options(options),
        )
        with explained_memory_errors("fit", batch, n_heads, LESS_FOR_A_BALL):
            ready = self._choose_tokens(batch, columns, plan)
            heads = HeadDraw(
                as_distribution(self.heads), n_heads, ready.dim, plan.seed, ready.query_dim
            )
            fit = fit_ball_layer(ready, columns, heads, balls, settings, **options)
        self.layer_, self.drawn_heads_, self.active_heads_ = fit.layer, heads, fit.layer.active
        self.values_ = outputs(fit.values, columns.shape[1] == 1)
        self.group_radius_, self.ball_radius_ = fit.radii
        self.objective_, self.duality_gap_, self.n_iter_ = (
            fit.objective,
            fit.gap,
            fit.solution.n_iter,
        )
        self.cv_results_ = tabulate(fit.trials)
        who: dict[str, Any] = {"who": type(self).__name__, "category": NormBallWarning}
        warn_if_short(fit.solution, settings.tol, settings.max_iter, dtype, stacklevel=3, **who)
        return fit

    def _ridge_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of the ridge fits that token rules are compared by."""
        criterion = "log_loss" if isinstance(self, ClassifierMixin) else "squared_error"
        given = {
            "fit_intercept": bool(self.fit_intercept),
            "groups": None,
            "solver": "direct",
            "criterion": criterion,
        }
        return options | given

    def _choose_tokens(
        self, batch: SetBatch, columns: np.ndarray, plan: LayerPlan
    ) -> SetBatch | PooledSets:
        """The samples with tokens and extras scaled as asked, or as suits ridge best; the rule is kept."""
        weights = plan.options["weights"]
        known = columns if weights is None else np.where(weights[:, None] > 0, columns, 0.0)
        known = np.ldexp(known, -int(unit_exponent(known)))
        rule = choose_rule(batch, known, plan, self.scaling, self.query, "mean").rule
        if batch.extras is not None:
            rule = plan.with_ranks(batch, known).with_extras_scale(rule, batch, known)
        self.tokens_ = rule
        return rule.apply(batch)

    def _ready(self, X: Any) -> Any:
        check_is_fitted(self)
        return self.tokens_.apply(as_sets(self, X, reset=False).numpy())

    def _scores(self, X: Any) -> np.ndarray:
        batch = self._ready(X)  # first: it says so if nothing was fitted
        with explained_memory_errors("predict", batch, None, LESS_FOR_A_PREDICTION):
            return np.asarray(self.layer_.predict(batch, memory_budget=memory_budget()))


class NormBallRegressor(MultiOutputMixin, RegressorMixin, _NormBallModel):
    """Regression on sets with a query, by one attention layer with frozen random heads and values in a norm ball.

    The paper's learner, in the paper's scaling: with φ_m(x) = (1/N) Σ_i σ(s_mi) x~_i (no M^{-1/2}) and
    f(x) = Σ_m <v_m, φ_m(x)> + b, it minimises the mean loss of f over

        Σ_m |v_m| ≤ group_radius = K_1     and     (Σ_m |v_m|²)^{1/2} ≤ ball_radius = √(K_2/M),

    b being free. The bound on the sum of norms prunes: heads outside ``active_heads_`` have v_m = 0, and
    predictions do not compute them.

    Parameters
    ----------
    n_heads : int
        M.
    heads : head distribution, optional
        ``kh.GaussianHeads()`` if None.
    loss : "huber", "absolute" or "squared"
        r²/2 up to |r| = 1 and |r| − 1/2 beyond; |r|; r²/2. One is meant in the units of y: scale y so that it
        is the size of a large residual. Summed over outputs.
    group_radius : "cv", "theory", number (math.inf allowed) or sequence of numbers
        K_1. "cv" doubles it until the cross-validated loss rises or stays the same twice, from half the least
        radius at which the training loss could be zero, whatever the scale of y. A sequence is chosen from by
        cross-validation. "theory" is c √B.
    ball_radius : "matched", "cv", "theory", number (math.inf allowed) or sequence of numbers
        √(K_2/M). "matched" is group_radius/√(δM), the ratio of the theory's radii. "cv" chooses among that
        ratio, no bound at all, and group_radius/√M, at which the group norm no longer matters. "theory" is
        √(c B/(δ M)).
    activation : str
        "relu", "softmax", "linear", "square", "step" or "exp".
    fit_intercept : bool
    random_state : int, RandomState, Generator or None
        An integer s means the heads ``heads.sample(n_heads, d, s)``.
    complexity : float, optional
        B of the target, for "theory": ``kh.theory.paper_complexity(target)``.
    delta, constant : float
        δ and c of the theory's radii.
    n_folds : int
        Folds of cross-validation. Samples are sorted by y and dealt in turn, so folds are balanced and do not
        depend on the order of the samples; exact copies stay together.
    tol : float
        Stop when the duality gap is below tol times the loss (or 1e-3 of the best constant's, if larger).
    max_iter : int
    dtype : "float64" or "float32"
        Precision of features and iterations. Gaps are computed in float64.
    scaling : "none", "sphere", "standard" or "auto"
        What is done to tokens first, as for `AttentionRegressor`; "auto" takes the one of least leave-one-out loss of
        ridge fits to 128 to 500 samples. The paper's bounds are for tokens as they come, which is the default.
    query : "given", "mean", "each" or "auto"
        As for `AttentionRegressor`, chosen likewise.

    Attributes
    ----------
    values_ : array (M, D) or (M, D, outputs)
        v; exactly zero for pruned heads.
    active_heads_ : array (k,) of int
        The m with v_m ≠ 0, in increasing order.
    intercept_ : float or array (outputs,)
    group_radius_, ball_radius_ : float
        The radii used.
    objective_ : float
        Mean loss on the training set.
    duality_gap_ : float
        The objective is at most so much above the minimum: certified, not estimated.
    n_iter_ : int
        Iterations of the last fit.
    cv_results_ : dict of arrays
        group_radius, ball_radius, mean_test_loss, fold_test_losses, mean_active_heads of the radii tried.
    drawn_heads_ : HeadDraw
        All heads; ``drawn_heads_.block(0, M)`` draws them.
    tokens_ : TokenRule
        Scaling and query used.
    n_features_in_ : int
        Token dimension d.

    Notes
    -----
    ``X`` as for `AttentionRegressor`. An iteration costs 4·n·q flops for q columns at hand; the features are
    kept if they fit half of scikit-learn's ``working_memory``, and otherwise computed anew, block by block of
    heads, whenever needed. If the solver stops early it warns with a ``ConvergenceWarning``.

    Examples
    --------
    >>> import keyhole as kh
    >>> target = kh.targets.TokenPower(2, dim=4)
    >>> train = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=0)
    >>> test = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=1)
    >>> model = kh.NormBallRegressor(n_heads=100, tol=0.03, random_state=0).fit(train, target(train))
    >>> bool(model.score(test, target(test)) > 0.95)
    True
    >>> model.values_.shape, len(model.active_heads_) < 100
    ((100, 5), True)
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NormBallRegressor:
        """Fit the values. ``sample_weight`` weighs the loss of each sample."""
        loss = check_choice(self.loss, "loss", self._losses())
        batch = as_sets(self, X, reset=True).numpy()
        columns = as_columns(self, y, batch)
        fit = self._fit_columns(batch, columns, as_weights(sample_weight, batch), loss)
        self._single = np.asarray(y).ndim == 1
        self.intercept_ = float(fit.layer.intercept[0]) if self._single else fit.layer.intercept
        if not self._single and columns.shape[1] == 1:
            self.values_ = self.values_[:, :, None]
        return self

    def predict(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return predictions, shape (n,) or (n, outputs) as ``y`` had."""
        return outputs(self._scores(X), self._single)


def _has_probabilities(model: NormBallClassifier) -> bool:
    """Whether the loss of the fit, or the one that a fit would have, has probabilities; else it says so."""
    if getattr(model, "loss_", model.loss) == "hinge":
        raise AttributeError(
            "the hinge loss has no probabilities: use loss='logistic', or decision_function."
        )
    return True


class NormBallClassifier(LabelScores, ClassifierMixin, _NormBallModel):
    """Classification of sets with a query, by one attention layer with frozen random heads and values in a norm ball.

    As `NormBallRegressor`, with a loss for labels. Several classes share the heads and the ball: the norm of a
    head is that of its values for all classes together, so a head is kept or pruned for all of them.

    Parameters
    ----------
    loss : "logistic" or "hinge"
        "logistic" is binary for two classes and multinomial for more; its probabilities are the model's own.
        "hinge" is summed over one-against-the-rest columns for more than two classes.
    n_heads, heads, group_radius, ball_radius, activation, fit_intercept, random_state
        As for `NormBallRegressor`.
    complexity, delta, constant, n_folds, tol, max_iter, dtype, scaling, query
        As for `NormBallRegressor`. The only sample of a class is never held out by cross-validation.

    Attributes
    ----------
    classes_ : array (classes,)
        The labels of y, sorted. One whose samples all have weight 0 keeps its place: its score is −1, its probability
        0, and it is never predicted. All else is as without those samples.
    class_has_weight_ : bool array (classes,)
        Which labels have a sample of positive weight.
    loss_ : str
        The loss of the fit: another parameter takes effect with the next one.
    intercept_ : array (1,) or (classes,)
    values_ : array (M, D), or (M, D, classes) for more than two classes
    active_heads_, group_radius_, ball_radius_, objective_, duality_gap_, n_iter_, cv_results_, drawn_heads_, tokens_,
    n_features_in_
        As for `NormBallRegressor`.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(400, n_keys=5, dim=4, seed=0)
    >>> score = kh.targets.TokenPower(2, dim=4)(sets)
    >>> label = np.where(score > np.median(score), "wide", "narrow")
    >>> model = kh.NormBallClassifier(n_heads=50, tol=0.03, random_state=0).fit(sets[:300], label[:300])
    >>> bool(model.score(sets[300:], label[300:]) > 0.8)
    True
    >>> model.predict_proba(sets[300:]).shape
    (100, 2)
    """

    def __init__(
        self,
        n_heads: Any = 512,
        heads: Any = None,
        loss: Any = "logistic",
        group_radius: Any = "cv",
        ball_radius: Any = "matched",
        activation: Any = "relu",
        fit_intercept: Any = True,
        random_state: Any = None,
        *,
        complexity: Any = None,
        delta: Any = 0.05,
        constant: Any = 1.0,
        n_folds: Any = 3,
        tol: Any = 1e-3,
        max_iter: Any = 20_000,
        dtype: Any = "float64",
        scaling: Any = "none",
        query: Any = "given",
    ) -> None:
        self._store_parameters(locals())

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> NormBallClassifier:
        """Fit the values. ``sample_weight`` weighs the loss of each sample."""
        loss = check_choice(self.loss, "loss", self._losses())
        batch = as_sets(self, X, reset=True).numpy()
        weights = as_weights(sample_weight, batch)
        labels = self._encode(y, batch)
        # columns of the classes that have weight: one per class, or a single one for two
        classes = self._class_columns(labels, weights, first=0.0)
        is_class = classes.numbers(labels)[:, None] == np.arange(classes.has_weight.sum())
        if is_class.shape[1] == 2:
            fit = self._fit_columns(batch, np.where(is_class[:, 1:], 1.0, -1.0), weights, loss)
        elif loss == "hinge":
            fit = self._fit_columns(batch, np.where(is_class, 1.0, -1.0), weights, loss)
        else:
            fit = self._fit_columns(batch, is_class.astype(np.float64), weights, "multinomial")
        self.loss_ = loss
        # one output for every class, those without weight too
        self.class_has_weight_ = classes.has_weight
        self.layer_ = classes.of_layer(fit.layer)
        values = classes.of_all_classes(fit.values, without_weight=0.0)
        self.values_ = outputs(values, len(self.classes_) == 2)
        self.intercept_ = self.layer_.intercept
        return self

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return the model's own probabilities: logistic for two classes, softmax for more."""
        return np.asarray(np.exp(self.predict_log_proba(X)))

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return the logarithms of `predict_proba`, without underflow."""
        return np.asarray(log_softmax(self._class_scores(X), axis=1))

    def _class_scores(self, X: Any) -> np.ndarray:
        """One column of scores per class: the logistic loss of two has one, and zero for the other class."""
        decision = self.decision_function(X)
        if decision.ndim == 1:
            return np.stack([np.zeros_like(decision), decision], axis=1)
        return self._without_weightless(decision)
