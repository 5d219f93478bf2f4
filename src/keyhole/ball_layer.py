"""The layer whose values lie in a norm ball.

Radii, cross-validation, and the layer of active heads.

The ball and its solver are `keyhole.ball`; here they meet heads and samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole._array import MEMORY_BUDGET, block_size, blocks, unit_exponent
from keyhole._checks import check_float_array, check_number
from keyhole.attention.features import apply_values, attention_features, key_contributions
from keyhole.attention.heads import HeadDraw
from keyhole.ball.design import DenseDesign, StreamedDesign
from keyhole.ball.losses import LOSSES
from keyhole.ball.norm_ball import (
    OBJECTIVE_FLOOR,
    BallSetup,
    Solution,
    check_radii,
    check_radius,
    null_model,
)
from keyhole.ball.projection import NormBall, group_norms
from keyhole.data.sets import SampleBatch
from keyhole.solvers.layers import extras_outputs
from keyhole.solvers.solve import beside, extras_or_none
from keyhole.training import TrainingSet

Pair = tuple[float, float]


@dataclass(frozen=True)
class Ray:
    """Norm balls of radii (K_1, R_2) within fixed ones, and within growing ones times a scale.

    Inf bounds nothing.
    """

    fixed: Pair = (math.inf, math.inf)
    growing: Pair = (math.inf, math.inf)

    @property
    def grows(self) -> bool:
        """Whether this is more than a single pair of radii."""
        return min(self.growing) < math.inf

    def in_units(self, exponent: int) -> Ray:
        """The same ball for outputs 2^exponent times as large; what grows finds its own scale."""
        group_radius, ball_radius = self.fixed
        fixed = (math.ldexp(group_radius, exponent), math.ldexp(ball_radius, exponent))
        return replace(self, fixed=fixed)

    def at(self, scale: float) -> Pair:
        """The radii at this scale."""
        group_radius = min(self.fixed[0], scale * self.growing[0])
        ball_radius = min(self.fixed[1], scale * self.growing[1])
        return group_radius, ball_radius


@dataclass(frozen=True)
class Theory:
    """K_1 = c √B and √(K_2/M) with K_2 = c B/δ: the radii of the paper's theorem.

    ``complexity`` is B; None if it is not known. The ratio of the two radii at c = 1, (δM)^{-1/2},
    needs no B.
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
                f"`{name}='theory'` needs the complexity B of the target: `complexity` is None. "
                "Pass complexity=kh.theory.paper_complexity(target) for a known target, or let "
                f"cross-validation choose with {name}='cv'."
            )
        if name == "group_radius":
            return self.constant * math.sqrt(self.complexity)
        return math.sqrt(self.constant * self.complexity / (self.delta * self.n_heads))


def candidate_balls(group_radius: Any, ball_radius: Any, theory: Theory) -> list[Ray]:
    """Return the balls that the two parameters of an estimator name, smallest first.

    "cv" for the group radius makes it grow. "matched" makes the ball radius follow it at the
    theory's ratio, and "cv" tries three shapes: the group norm alone, the theory's ratio, the ball
    alone.
    """
    group_radii = _as_radii(group_radius, "group_radius", ("cv", "theory"), theory)
    ball_radii = _as_radii(ball_radius, "ball_radius", ("matched", "cv", "theory"), theory)
    rays: list[Ray] = []
    for group in [None] if group_radii is None else group_radii:
        if ball_radii is not None and group is None:
            # numbers for the ball, within which the group radius grows
            rays += [Ray(fixed=(math.inf, ball), growing=(1.0, math.inf)) for ball in ball_radii]
        elif ball_radii is not None and group is not None:
            # numbers for both
            rays += [Ray(fixed=check_radii(group, ball)) for ball in ball_radii]
        elif group is not None and math.isinf(group):
            # no group radius to follow: the ball radius grows alone
            if ball_radius == "matched":
                raise ValueError(
                    "`ball_radius='matched'` follows `group_radius`, which is infinite. Give "
                    "`ball_radius` a number or 'cv'."
                )
            rays.append(Ray(growing=(math.inf, 1.0)))
        else:
            rays += _rays_of_ratios(group, theory, matched=ball_radius == "matched")
    return sorted(rays, key=lambda ray: ray.at(1.0))


def _rays_of_ratios(group: float | None, theory: Theory, *, matched: bool) -> list[Ray]:
    """Balls whose ball radius is a multiple of the group radius; that grows if it is None."""
    ratios = [theory.ratio]
    if not matched:
        ball_alone = 1.0 / math.sqrt(theory.n_heads)
        ratios = [math.inf, theory.ratio, ball_alone]
    unit = 1.0 if group is None else group
    rays: list[Ray] = []
    for ratio in ratios:
        # zero times infinity is not a number, and a group radius of zero is bound enough
        ball = math.inf if math.isinf(ratio) else unit * ratio
        if group is None:
            rays.append(Ray(growing=(unit, ball)))
        else:
            rays.append(Ray(fixed=(unit, ball)))
    return rays


def _as_radii(radius: Any, name: str, words: tuple[str, ...], theory: Theory) -> list[float] | None:
    """The numbers that ``radius`` stands for; None for a word that stands for a family."""
    if isinstance(radius, str):
        if radius not in words:
            listed = ", ".join(repr(word) for word in words)
            raise ValueError(
                f"`{name}` must be a number, a sequence of numbers or one of {listed}: got "
                f"{radius!r}."
            )
        if radius == "theory":
            return [theory.radius(name)]
        return None
    radii = check_float_array(radius, name).astype(np.float64)
    if radii.ndim == 0:
        return [check_radius(radius, name)]
    if radii.ndim != 1 or len(radii) == 0:
        raise ValueError(
            f"`{name}` must be a non-empty sequence of numbers: got shape {radii.shape}."
        )
    return [check_radius(float(value), f"{name}[{i}]") for i, value in enumerate(radii)]


CHOOSING_TOL = 2e-2
"""Duality gap of fits that only serve to compare radii, as a share of the held-out loss. Radii
whose losses are so close count as equal.
"""

LOOSEST_TOL = 0.5
"""The largest duality gap of such a fit, as a share of its training loss."""

GROWTH = 2.0
"""From one radius of an automatic path to the next."""

PATIENCE = 2
"""Radii in a row with the same held-out loss after which a path ends; one with a larger loss ends
it at once.
"""

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
    device: ClassVar[None] = None  # always by NumPy

    def predict(
        self, batch: SampleBatch, *, memory_budget: int = MEMORY_BUDGET
    ) -> Float[np.ndarray, "n t"]:
        """Return f on every set of ``batch``. O(tokens · k · D), no temporary beyond the budget."""
        scores = self._sum_over_heads(apply_values, batch, len(batch), memory_budget)
        return np.asarray(scores + self.intercept + extras_outputs(self, batch))

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
        """The outputs of the active heads, a block of heads at a time."""
        n_outputs = len(self.intercept)
        # values have the units of y, which may be beyond the range of float32
        exponents = np.zeros(n_outputs, int)
        if len(self.values):
            exponents = unit_exponent(self.values, axis=(0, 1))

        scores = np.zeros((n_rows, n_outputs))
        heads = self.heads.seen_by(query=batch.has_query)
        size = block_size(100 * heads.entries, memory_budget // 2)
        for part in blocks(len(self.active), size):
            drawn = draw_heads(heads, self.active[part])
            # apply_values multiplies by the M^{-1/2} of the heads it is given
            values = math.sqrt(len(drawn)) * np.ldexp(self.values[part], -exponents)
            scores += outputs_of(
                batch,
                drawn,
                values,
                self.activation,
                dtype=self.dtype,
                memory_budget=memory_budget // 2,
            )
        return np.ldexp(scores, exponents)


@dataclass(frozen=True)
class BallFit:
    """A layer fitted over the norm ball of ``radii`` K_1 and R_2, and the radii tried.

    Pruned heads of ``values`` are exactly zero; ``objective`` is the weighted mean loss, at most
    ``gap`` above the minimum. ``trials`` holds the radii used alone, with losses that are NaN, if
    there was nothing to choose.
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
    """Cross-validation at one pair of radii.

    The loss of each fold and of all held-out samples together.
    """

    radii: Pair
    fold_losses: tuple[float, ...]
    mean_loss: float
    n_active: float


def draw_heads(heads: HeadDraw, which: Int[np.ndarray, " k"]) -> Float[np.ndarray, "k f e"]:
    """Draw some heads of a draw, run by run of consecutive ones."""
    runs = np.split(which, np.flatnonzero(np.diff(which) != 1) + 1)
    return np.concatenate([heads.block(int(run[0]), int(run[-1]) + 1) for run in runs])


def head_design(
    batch: SampleBatch,
    heads: HeadDraw,
    activation: str,
    dtype: str,
    memory_budget: int,
    *,
    centre: bool,
) -> DenseDesign | StreamedDesign:
    """The features of all heads without M^{-1/2}.

    In memory if they fit the budget, else streamed by blocks of heads.

    With ``centre`` the mean of every column is taken off. A free intercept makes up for it, and
    then has little left to do: the solver looks for it at every step. Extras are further groups of
    columns after those of the heads, filled up with zeros, and times √M: in proportion to features
    they are what they are to ridge.
    """
    n = len(batch)
    width = heads.dim + 1

    # extras as whole groups of columns
    n_groups = heads.n_heads
    extras = np.zeros((n, 0), dtype)
    if batch.extras is not None:
        n_missing = -batch.extras.shape[1] % width
        padded = np.pad(batch.extras, ((0, 0), (0, n_missing))) * math.sqrt(heads.n_heads)
        if centre:
            padded = padded - padded.mean(axis=0)
        extras = padded.astype(dtype)
        n_groups += extras.shape[1] // width

    def head_columns(which: HeadDraw | np.ndarray) -> Float[np.ndarray, "n q"]:
        features = attention_features(batch, which, activation, dtype=dtype)
        features *= math.sqrt(len(which))
        if centre:
            features -= features.mean(axis=0, dtype=np.float64).astype(features.dtype)
        return features

    # all columns in memory
    n_bytes = n * heads.n_heads * width * np.dtype(dtype).itemsize
    if n_bytes <= memory_budget:
        return DenseDesign(beside(head_columns(heads), extras), width, memory_budget)

    # columns computed when they are needed
    seen_heads = heads.seen_by(query=batch.has_query)

    def group_columns(which: Int[np.ndarray, " k"]) -> Float[np.ndarray, "n q"]:
        if n_groups == heads.n_heads:
            return head_columns(draw_heads(seen_heads, which))
        columns = np.empty((n, len(which), width), dtype)
        is_extra = which >= heads.n_heads
        extra_groups = extras.reshape(n, -1, width)
        columns[:, is_extra] = extra_groups[:, which[is_extra] - heads.n_heads]
        if not is_extra.all():
            drawn = draw_heads(seen_heads, which[~is_extra])
            columns[:, ~is_extra] = head_columns(drawn).reshape(n, -1, width)
        return columns.reshape(n, -1)

    # a block is drawn, packed and converted beside the block itself
    block_budget = max(1, memory_budget // 4)
    return StreamedDesign(group_columns, n, n_groups, width, block_budget)


@dataclass(frozen=True)
class BallSettings:
    """What is minimised over the ball, and how hard to try."""

    loss: str
    fit_intercept: bool
    tol: float
    max_iter: int
    n_folds: int


def fit_ball_layer(
    data: TrainingSet,
    heads: HeadDraw,
    rays: Sequence[Ray],
    settings: BallSettings,
    *,
    activation: str = "relu",
    dtype: str = "float64",
    memory_budget: int = MEMORY_BUDGET,
) -> BallFit:
    """Fit the values of M heads over a norm ball.

    Among several balls, that of least cross-validated loss.

    4·n·q·t flops an iteration on q columns at hand; half of the memory is for the design, half for
    the solver's copy of those columns. ``data`` are prepared samples.
    """
    # samples with weight, sorted by target, and outputs in units that suit the loss
    data = data.of_positive_weight()
    data = data[np.lexsort(data.outputs.T[::-1])]
    units = OutputUnits.of(data.outputs, settings)
    targets = np.ldexp(data.outputs - units.origin, -units.exponent)
    rays = [ray.in_units(-units.exponent) for ray in rays]
    n = len(data)
    if data.weights is None:
        weights = np.full(n, 1.0 / n)
    else:
        weights = data.weights / data.weights.sum()

    # the problem: features of all heads, in memory or streamed
    share = max(1, memory_budget // 2)
    design = head_design(
        data.samples, heads, activation, dtype, share, centre=settings.fit_intercept
    )
    width = heads.dim + 1
    setup = BallSetup(
        design=design,
        targets=targets,
        weights=weights,
        loss=settings.loss,
        group_size=width,
        fit_intercept=settings.fit_intercept,
        dtype=np.dtype(dtype),
        memory_budget=share,
    )

    # the radii, then the values
    if len(rays) == 1 and not rays[0].grows:
        radii = rays[0].at(1.0)
        best = Trial(radii=radii, fold_losses=(), mean_loss=math.nan, n_active=math.nan)
        trials = [best]
        start = setup.zeros
    else:
        trials, best, start = choose_radii(setup, rays, settings)
    solution = solve(setup, best.radii, start, settings.tol, settings.max_iter)

    # the layer: active heads only; extras were further groups of columns, times √M
    n_of_heads = heads.n_heads * width
    values = solution.values[:n_of_heads].reshape(heads.n_heads, width, -1)
    extras_values = None
    if data.has_extras:
        n_extras = extras_or_none(data.samples).shape[1]
        extras_values = math.sqrt(heads.n_heads) * solution.values[n_of_heads:][:n_extras]
    active = np.flatnonzero(values.any(axis=(1, 2)))
    layer = PrunedLayer(
        heads=heads,
        active=active,
        values=values[active],
        intercept=solution.certificate.intercept,
        activation=activation,
        dtype=dtype,
        extras_values=extras_values,
    )
    if settings.fit_intercept:  # the columns were centred
        mean_prediction = layer.predict(data.samples, memory_budget=memory_budget).mean(axis=0)
        layer = replace(layer, intercept=2 * layer.intercept - mean_prediction)
    fit = BallFit(
        layer=layer,
        values=values,
        objective=solution.certificate.objective,
        gap=solution.certificate.gap,
        solution=solution,
        radii=best.radii,
        trials=tuple(trials),
    )
    return units.leave(fit)


DEGREES = {"squared": 2, "absolute": 1}
"""Losses with L(a r) = a^k L(r), and their k: they follow the units of y."""

OF_DIFFERENCES = ("squared", "absolute", "huber")
"""Losses of y − f alone: with a free intercept they do not know where y has its zero."""


@dataclass(frozen=True)
class OutputUnits:
    """Where y is counted from, and the power of two it is counted in, while a layer is fitted.

    A loss of y − f with a free intercept is the same for y less any constant, and one of degree k
    scales: neither an offset nor the unit of y may cost digits. Huber's loss has a size of its own,
    and labels are no quantities: those keep their units. y less ``origin`` (t,) is divided by
    2^``exponent``, and so are values and radii.
    """

    origin: Float[np.ndarray, " t"]
    exponent: int
    degree: int

    @classmethod
    def of(cls, y: Float[np.ndarray, "n t"], settings: BallSettings) -> OutputUnits:
        """Units in which outputs are centred and of size one, as far as the loss allows."""
        origin = np.zeros(y.shape[1])
        if settings.fit_intercept and settings.loss in OF_DIFFERENCES:
            origin = np.median(y, axis=0)  # an output itself or nearly, so that little is rounded
        degree = DEGREES.get(settings.loss, 0)
        exponent = int(unit_exponent(y - origin)) if degree else 0
        return cls(origin=origin, exponent=exponent, degree=degree)

    def leave(self, fit: BallFit) -> BallFit:
        """A fit in the units of y as it was given."""
        # the layer: everything linear in y, and the origin
        extras_values = fit.layer.extras_values
        if extras_values is not None:
            extras_values = self._linear(extras_values)
        layer = replace(
            fit.layer,
            values=self._linear(fit.layer.values),
            intercept=self._linear(fit.layer.intercept) + self.origin,
            extras_values=extras_values,
        )

        # radii are linear in y, losses of its degree
        trials = [
            replace(
                trial,
                radii=self._radii(trial.radii),
                fold_losses=tuple(self._loss(loss) for loss in trial.fold_losses),
                mean_loss=self._loss(trial.mean_loss),
            )
            for trial in fit.trials
        ]
        return replace(
            fit,
            layer=layer,
            values=self._linear(fit.values),
            objective=self._loss(fit.objective),
            gap=self._loss(fit.gap),
            radii=self._radii(fit.radii),
            trials=tuple(trials),
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

    A solver that believes itself at the end of its digits is started afresh from where it stopped,
    for as long as that lowers the gap by a tenth.
    """
    values = start
    n_iter = 0
    gap = math.inf
    while True:
        solution = setup.minimise(NormBall(*radii), values, tol, max_iter - n_iter)
        values = solution.values
        n_iter += solution.n_iter
        stalled = solution.certificate.gap > 0.9 * gap
        if solution.converged or n_iter >= max_iter or stalled:
            return replace(solution, n_iter=n_iter)
        gap = solution.certificate.gap


def deal_folds(setup: BallSetup, n_folds: int) -> Int[np.ndarray, " n"]:
    """The fold of each sample.

    Samples are sorted by target, so dealing them in turn balances the folds.

    The only sample of a class is in no fold (−1): a fit without it would not know the class.
    """
    n = len(setup.targets)
    if n < 2:
        raise ValueError(
            "cross-validation needs at least two samples: got 1 sample (samples of weight 0 do "
            "not count). Give more samples, or fixed numbers as `group_radius` and `ball_radius`."
        )
    folds = np.arange(n) % min(n_folds, n)
    if setup.loss in ("logistic", "multinomial", "hinge"):
        _, label, counts = np.unique(setup.targets, axis=0, return_inverse=True, return_counts=True)
        folds[counts[label.reshape(-1)] == 1] = -1
        if (folds < 0).all():
            raise ValueError(
                "cross-validation needs a class with at least two samples: every class has one. "
                "Give more samples, or fixed numbers as `group_radius` and `ball_radius`."
            )
    return folds


def radius_scale(setup: BallSetup, unit: Pair) -> float:
    """The scale below which no ball of this shape can bring the training loss to zero.

    By convexity the loss of the best constant falls by at most the support function of the ball at
    its gradient: the scale is their ratio, and follows the units of targets and features.
    """
    risk = setup.risk(NormBall(*unit))
    constant, constant_loss, _ = null_model(risk)
    slope = risk.loss.gradient(setup.targets, np.zeros_like(setup.targets) + constant)
    gradient = setup.design.rmatvec(setup.weights[:, None] * slope)
    support, _ = risk.ball.support(group_norms(risk.grouped(gradient)))
    if constant_loss > 0 and support > 0:
        return constant_loss / support
    return 1.0


def choose_radii(
    setup: BallSetup, rays: Sequence[Ray], settings: BallSettings
) -> tuple[list[Trial], Trial, Float[np.ndarray, "p t"]]:
    """Cross-validate every ball.

    Return all trials, the best, and values near its solution to start from.
    """
    folds = deal_folds(setup, settings.n_folds)
    validation = CrossValidation(setup, folds, settings.tol, settings.max_iter)
    trials: list[Trial] = []
    best: Trial | None = None
    start = setup.zeros
    for ray in rays:
        # a growing ray starts from zero; for a fixed ball warm values will do, but it need not
        # contain the ball before
        if ray.grows:
            first_scale = radius_scale(setup, ray.growing) / GROWTH
            scales = [first_scale * GROWTH**k for k in range(LONGEST_PATH)]
            validation.forget()
        else:
            scales = [1.0]
            validation.leader = math.inf

        # the best of this ray, and of all rays
        leader: Trial | None = None
        since_best = 0
        for scale in scales:
            trial = validation.trial(ray.at(scale))
            trials.append(trial)
            since_best += 1
            if leader is None or trial.mean_loss < (1.0 - CHOOSING_TOL) * leader.mean_loss:
                leader = trial
                since_best = 0
                if best is None or leader.mean_loss < best.mean_loss:
                    best = leader
                    start = validation.values[0]

            # the path ends where the loss rises, stays, or the training loss is zero
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
        self.tol = tol
        self.max_iter = max_iter
        self.held_out: list[Bool[np.ndarray, " n"]] = [
            folds == k for k in np.unique(folds[folds >= 0])
        ]
        _, constant_loss, _ = null_model(setup.risk(NormBall(0.0, 0.0)))
        self.floor = OBJECTIVE_FLOOR * constant_loss
        self.forget()

    def forget(self) -> None:
        """Start from zero again."""
        self.values = [self.setup.zeros for _ in self.held_out]
        self.objectives = [math.inf] * len(self.held_out)
        self.leader = math.inf

    @property
    def interpolates(self) -> bool:
        """Whether a larger ball could not lower the training loss of any fold.

        By more than the gap.
        """
        return max(self.objectives) <= self.floor

    def trial(self, radii: Pair) -> Trial:
        """Fit all folds at ``radii``."""
        setup = self.setup
        values_per_group = setup.group_size * setup.targets.shape[1]
        losses: list[float] = []
        fold_weights: list[float] = []
        active_counts: list[int] = []
        for k, held_out in enumerate(self.held_out):
            solution = self._solve_without(held_out, radii, k)

            # the weighted mean loss of the samples held out
            predictions = setup.design.matvec(solution.values) + solution.certificate.intercept
            loss = LOSSES[setup.loss].value(setup.targets[held_out], predictions[held_out])
            weights = setup.weights[held_out]
            fold_weight = float(weights.sum())
            losses.append(float(weights @ loss) / fold_weight)
            fold_weights.append(fold_weight)

            # heads, or groups of extras, with a value that is not zero
            is_active = solution.values.reshape(-1, values_per_group).any(axis=1)
            active_counts.append(int(is_active.sum()))
        mean_loss = float(np.average(losses, weights=fold_weights))
        self.leader = min(self.leader, mean_loss)
        return Trial(
            radii=radii,
            fold_losses=tuple(losses),
            mean_loss=mean_loss,
            n_active=float(np.mean(active_counts)),
        )

    def _solve_without(self, held_out: Bool[np.ndarray, " n"], radii: Pair, k: int) -> Solution:
        """The solution without fold k, from that at the radii before."""
        weights = np.where(held_out, 0.0, self.setup.weights)
        setup = replace(self.setup, weights=weights / weights.sum())
        tol = CHOOSING_TOL
        if math.isfinite(self.leader) and self.floor > 0:
            # the solver's gap is relative to a loss no larger than that of the smaller ball before
            tol *= self.leader / max(self.objectives[k], self.floor)
        tol = min(max(tol, self.tol), LOOSEST_TOL)
        solution = solve(setup, radii, self.values[k], tol, self.max_iter)
        self.values[k] = solution.values
        self.objectives[k] = solution.certificate.objective
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
