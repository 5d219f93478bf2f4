"""Head distributions that a training set chooses: IdentityHeads, LearnedHeads.

The head distribution is learned, the heads stay random.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float, Int
from threadpoolctl import threadpool_limits

from keyhole._checks import check_choice, check_count, check_no_mask, check_number, check_seed
from keyhole.attention.backends import DescentPart, backend_for
from keyhole.attention.features import DIFFERENTIABLE, narrow
from keyhole.attention.head_error import (
    HeadGradient,
    Judgement,
    Task,
    gradient_in_heads,
    held_out_parts,
    improvement,
    judge,
)
from keyhole.attention.heads import (
    FittedHeads,
    GaussianHeads,
    HeadParameters,
    Pairs,
    Step,
    head_normals,
    identity_mean,
)
from keyhole.attention.hops import START_NOISE, Ages, UsedCoordinates, newer_first, starting_hops
from keyhole.data.sets import SampleBatch, SetBatch

Augmentation = Callable[[SetBatch, np.random.Generator], SetBatch]
"""What a caller may do to the sets of a step; it keeps their number and their dimensions."""


def check_outputs(y: Any) -> Float[np.ndarray, "n ..."]:
    """Return outputs in float64; refuse masked entries."""
    check_no_mask(y, "y")
    return np.asarray(y, dtype=np.float64)


class UnfittedHeads(HeadParameters):
    """A head distribution that a training set has to choose first, by ``fit``."""

    def sample(
        self, n_heads: int, dim: int, seed: int, query_dim: int | None = None, *, start: int = 0
    ) -> Float[np.ndarray, "m f e"]:
        """Raise: heads can be drawn only after `fit` has returned a head distribution."""
        name = type(self).__name__
        raise ValueError(
            f"{name} has no heads before it has seen a training set. Pass it as `heads` to "
            "kh.AttentionRegressor or kh.AttentionClassifier, which fit it first; or call "
            f"{name}(…).fit(sets, y) and use the head distribution that returns."
        )


class IdentityHeads(UnfittedHeads):
    """Heads W = c·W_0 + scale·G; leave-one-out on the training set chooses c and the scale.

    W_0 = [[I, 0], [0, 0]], so that the mean score is c·<x_0, x_i>: keys that resemble the query.
    The first pair is the incumbent: another takes its place only if its leave-one-out error is
    lower by more than a standard error of the difference, sample by sample.

    Parameters
    ----------
    strengths : sequence of float
        c to choose from, the incumbent first.
    scales : sequence of float
        Standard deviations to choose from, the incumbent first.
    n_heads : int
        Heads drawn to compare with.
    max_samples : int
        Samples used to compare, a random part if there are more.
    pairs : sequence of (query coordinate, key coordinate), optional
        What W_0 pairs: by default what the training sets pair (``SetBatch.pairs``), else coordinate
        i of both, for as many as both have.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(300, n_keys=5, dim=6, seed=0)
    >>> y = kh.targets.Correlation(3, dim=6)(sets)
    >>> model = kh.AttentionRegressor(100, heads=kh.IdentityHeads(), random_state=0).fit(sets, y)
    >>> model.heads_.chosen, model.heads_.strength > 0
    ('identity', True)
    """

    def __init__(
        self,
        strengths: Sequence[float] | Float[np.ndarray, " c"] = (0.0, 1.0, 3.0, 10.0, 30.0),
        scales: Sequence[float] | Float[np.ndarray, " c"] = (0.5,),
        n_heads: int = 128,
        max_samples: int = 1000,
        pairs: Pairs | None = None,
    ) -> None:
        self.strengths = strengths
        self.scales = scales
        self.n_heads = n_heads
        self.max_samples = max_samples
        self.pairs = pairs

    def fit(
        self,
        batch: SampleBatch,
        y: Float[np.ndarray, "n ..."],
        *,
        activation: str = "relu",
        fit_intercept: bool = True,
        weights: Float[np.ndarray, " n"] | None = None,
        groups: Int[np.ndarray, " n"] | None = None,
        seed: int = 0,
    ) -> FittedHeads:
        """Choose; return a head distribution to sample from. The estimators call this first."""
        task = Task.of(
            batch=batch,
            columns=check_outputs(y).reshape(len(batch), -1),
            weights=weights,
            activation=activation,
            fit_intercept=fit_intercept,
            groups=groups,
        )
        max_samples = check_count(self.max_samples, "max_samples")
        distribution, _ = choose_identity(
            task.at_most(max_samples, seed),
            strengths=_numbers(self.strengths, "strengths"),
            scales=_positive_numbers(self.scales, "scales"),
            n_heads=check_count(self.n_heads, "n_heads"),
            seed=seed,
            pairs=self.pairs,
        )
        return distribution


def choose_identity(
    task: Task,
    strengths: Sequence[float],
    scales: Sequence[float],
    n_heads: int,
    seed: int,
    pairs: Pairs | None = None,
) -> tuple[FittedHeads, Judgement]:
    """The pair (c, scale) of least leave-one-out error, and its judgement.

    The first pair stays unless the best one is better by more than one standard error. ``pairs``
    says what W_0 pairs; by default what the batch pairs.
    """
    if pairs is None:
        pairs = task.batch.sets.pairs

    # the leave-one-out error of every candidate, the incumbent first
    candidates = [(strength, scale) for scale in scales for strength in strengths]
    judgements = [
        judge(task, GaussianHeads(strength, scale, pairs), n_heads, seed)
        for strength, scale in candidates
    ]
    errors = [float(np.average(each.loo, weights=task.weights)) for each in judgements]

    # the incumbent stays unless the gain exceeds its standard error
    best = int(np.argmin(errors))
    gain, standard_error = improvement(
        judgements[0].loo, judgements[best].loo, task.weights, task.groups
    )
    if gain <= standard_error:
        best = 0

    first_strength, first_scale = candidates[0]
    strength, scale = candidates[best]
    distribution = FittedHeads(
        means_=strength * identity_mean(task.batch.dim, task.batch.query_dim, pairs)[None],
        scale=scale,
        chosen="identity" if strength else "zero-mean",
        strength=strength,
        reason=(
            f"leave-one-out error {errors[best]:.3g} of the variance, {errors[0]:.3g} for c = "
            f"{first_strength:g}, scale {first_scale:g}"
        ),
    )
    return distribution, judgements[best]


def _check_not_empty(values: Any, name: str) -> None:
    """Raise unless a value is a sequence of at least one item."""
    if np.ndim(values) != 1 or len(values) == 0:
        raise ValueError(f"`{name}` must be a sequence of at least one number: got {values!r}.")


def _numbers(values: Any, name: str) -> list[float]:
    """A sequence of finite numbers, checked one by one."""
    _check_not_empty(values, name)
    return [check_number(value, f"{name}[{i}]") for i, value in enumerate(values)]


def _positive_numbers(values: Any, name: str) -> list[float]:
    """A sequence of positive numbers, checked one by one."""
    _check_not_empty(values, name)
    return [
        check_number(value, f"{name}[{i}]", minimum=0.0, exclusive=True)
        for i, value in enumerate(values)
    ]


_KEPT_SHARE = 0.8
"""Share of the running average of the means that a step keeps: about five steps, enough to calm
fresh noise.
"""

_PENALTY_RATE = 0.1
"""Learning rate of the logarithm of the penalty."""

_MAX_RAISES = 60
"""How often a penalty that float32 cannot carry is raised by a factor e: 26 decades."""


_LEAST_SLOPE = 1e-4
"""Share of the largest size of a gradient below which entries hardly move: what is zero but for the
rounding of float32 (softmax does not see a number added to all scores) would otherwise move as far
as what matters."""


@dataclass
class Adam:
    """First and second moments of a gradient."""

    rate: float
    first: np.ndarray = field(default_factory=lambda: np.zeros(()))
    second: np.ndarray = field(default_factory=lambda: np.zeros(()))
    count: int = 0

    def move(self, gradient: np.ndarray) -> np.ndarray:
        """What to add to the parameter."""
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.99 * self.second + 0.01 * np.square(gradient)
        mean = self.first / (1 - 0.9**self.count)
        size = np.sqrt(self.second / (1 - 0.99**self.count))
        return np.asarray(-self.rate * mean / (size + _LEAST_SLOPE * size.max() + 1e-12))


@dataclass(frozen=True)
class HostSamples:
    """Training samples in host memory, of which every step of a descent takes some."""

    task: Task
    prepares_ahead: ClassVar[bool] = False

    def part(self, rows: Int[np.ndarray, " r"], plan: LearningPlan, count: int) -> HostPart:
        """Some samples, as step number ``count`` of a plan sees them."""
        task = self.task
        if len(rows) < len(task):
            task = task.take(rows)
        return HostPart(plan.augmented(task, count))


@dataclass(frozen=True)
class HostPart:
    """The samples of one step, in host memory."""

    task: Task

    def gradient_in_heads(
        self,
        means: Float[np.ndarray, "k f e"],
        noise: Float[np.ndarray, "m f e"],
        alpha: float,
        *,
        scales: bool = False,
        hops: Sequence[np.ndarray] = (),
    ) -> HeadGradient:
        """`head_error.gradient_in_heads` of these samples."""
        return gradient_in_heads(self.task, means, noise, alpha, scales=scales, hops=hops)


def judge_drawn(
    seen: Task,
    unseen: Task,
    seed: int,
    distribution: FittedHeads,
    heads: np.ndarray,
    alpha: float | None,
) -> Judgement:
    """The errors of drawn heads of a head distribution, by a fit to ``seen``."""
    return judge(
        seen,
        distribution,
        n_heads=len(heads),
        seed=seed,
        held_out=unseen,
        alpha=alpha,
        heads=heads,
    )


class HeadDescent:
    """A descent on a head distribution: matrices of all hops, scales, penalty and their moments.

    `step` moves it, `distribution` is where it is.

    Every step draws fresh noise and, of many samples, a fresh part: what falls is the error of the
    head distribution, not that of some heads of it. ``start`` has the matrices of every hop, the
    means of the last one last.
    """

    def __init__(
        self,
        task: Task,
        start: Sequence[np.ndarray],
        alpha: float,
        plan: LearningPlan,
        began: FittedHeads | None = None,
    ) -> None:
        """Descend from ``start``, or from a head distribution that was reached from there."""
        self.task = task
        self.plan = plan
        self.anchors = list(start)
        self.log_alpha = math.log(alpha)
        self.count = 0

        # matrices of all hops, and logarithms of the scales: the query's coordinates, then the
        # key's
        n_scales = sum(start[-1].shape[1:])
        if began is None:
            self.matrices = [matrix.copy() for matrix in self.anchors]
            self.scales = np.zeros(n_scales)
        else:
            self.matrices = [matrix.copy() for matrix in (*began.hops_, began.means_)]
            if began.query_scales_ is None or began.key_scales_ is None:
                self.scales = np.zeros(n_scales)
            else:
                self.scales = np.log(np.concatenate([began.query_scales_, began.key_scales_]))

        # running averages, which are what a descent returns
        self.averages = [matrix.copy() for matrix in self.matrices]
        self.average_scales = self.scales.copy()

        # one optimizer for each kind of parameter
        self.adams = [Adam(plan.rate) for _ in start]
        self.adam_of_scales = Adam(plan.rate)
        self.adam_of_penalty = Adam(_PENALTY_RATE)

        # the samples where steps are computed; if that is not the host, a helper thread prepares
        # the next step while the device computes. A caller's `augment` runs in the caller's thread
        # alone, so it is not prepared ahead
        self.samples = backend_for(plan.device).descent_samples(task)
        self.next_step: Future[tuple[DescentPart, np.ndarray]] | None = None
        self.helper: ThreadPoolExecutor | None = None
        if self.samples.prepares_ahead and plan.augment is None:
            self.helper = ThreadPoolExecutor(1)

    def distribution(
        self,
        *,
        strength: float = 0.0,
        steps: int = 0,
        history: tuple[Step, ...] = (),
        reason: str = "",
    ) -> FittedHeads:
        """The head distribution of the running averages, with what is known about it."""
        query_scales = None
        key_scales = None
        if self.plan.learn_scales:
            query_scales, key_scales = self._query_and_key(self.average_scales)
        *hops, means = self.averages
        return FittedHeads(
            means_=means,
            scale=self.plan.scale,
            strength=strength,
            steps=steps,
            history=history,
            reason=reason,
            query_scales_=query_scales,
            key_scales_=key_scales,
            hops_=tuple(hops),
        )

    @property
    def alpha(self) -> float:
        """The penalty it is at."""
        return math.exp(self.log_alpha)

    def _query_and_key(self, log_scales: Float[np.ndarray, " g"]) -> tuple[np.ndarray, np.ndarray]:
        """The scales of the query and of the key, out of their logarithms."""
        n_query = self.matrices[-1].shape[1]
        return np.exp(log_scales[:n_query]), np.exp(log_scales[n_query:])

    def step(self) -> float:
        """One step; returns the leave-one-out error before it."""
        plan = self.plan

        # samples and noise of this step, prepared ahead or now
        if self.next_step is None:
            part, noise = self._prepare(self.count)
        else:
            part, noise = self.next_step.result()
        if self.helper is not None:
            self.next_step = self.helper.submit(self._prepare, self.count + 1)

        # the gradient at heads W = U + scale · A G B
        query_scales, key_scales = self._query_and_key(self.scales)
        noise *= np.outer(query_scales, key_scales).astype(np.float32)
        gradient = self._gradient(part, noise)

        # Adam moves matrices, scales and penalty; averages follow: the mean of the first five
        # steps, an exponential average later
        self.count += 1
        keep = min(_KEPT_SHARE, 1.0 - 1.0 / self.count)
        for i, in_matrix in enumerate([*gradient.hops, gradient.means]):
            pull = 2.0 * plan.shrinkage * (self.matrices[i] - self.anchors[i])
            self.matrices[i] += self.adams[i].move(in_matrix + pull)
            self.averages[i] = keep * self.averages[i] + (1.0 - keep) * self.matrices[i]
        if gradient.scales is not None:
            self.scales += self.adam_of_scales.move(gradient.scales)
            self.average_scales = keep * self.average_scales + (1.0 - keep) * self.scales
        self.log_alpha += float(self.adam_of_penalty.move(np.array(gradient.log_alpha)))
        return gradient.error

    def _prepare(self, count: int) -> tuple[DescentPart, np.ndarray]:
        """The samples that step number ``count`` sees, and its noise before the scales."""
        plan = self.plan
        n_hops = len(self.matrices)

        # a fresh part of the samples: fewer for more hops, whose steps are more expensive
        n_samples = max(2, round(plan.max_samples / math.sqrt(n_hops)))
        rows = self.task.rows(n_samples, plan.seed + count)
        part = self.samples.part(rows, plan, count)

        # fresh noise: what falls is the error of the head distribution, not of some heads
        shape = (plan.n_heads[n_hops], *self.matrices[-1].shape[1:])
        noise = np.random.default_rng([plan.seed, count]).standard_normal(shape, dtype=np.float32)
        noise *= np.float32(plan.scale)
        return part, noise

    def _gradient(self, part: DescentPart, noise: np.ndarray) -> HeadGradient:
        """The gradient on some samples, at a penalty that is raised until float32 carries it."""
        *hops, means = self.matrices
        learn_scales = self.plan.learn_scales
        for _ in range(_MAX_RAISES):
            try:
                return part.gradient_in_heads(
                    means, noise, self.alpha, scales=learn_scales, hops=hops
                )
            except np.linalg.LinAlgError:
                # K + α is not positive definite in float32: α is below the rounding of K
                self.log_alpha += 1.0
        raise ValueError(
            "the Gram matrix of the features is not finite in float32, so a head distribution "
            "cannot be descended on. Scale the tokens down, for example with scaling='standard'."
        )


MIN_SAMPLES_TO_DESCEND = 50
"""Samples below which nothing is descended on: ten held out could not tell a better head
distribution from a worse.
"""

MIN_SAMPLES_FOR_ONE_SPLIT = 250
"""Samples below which every one is held out in turn, and one more hop must be better by two
standard errors instead of one."""

STANDARD_ERRORS_TO_LEARN = 2
"""By how many standard errors a learned head distribution must beat the one without learning: the
best of twenty checks is a lucky one.
"""

MIN_HEADS_TO_JUDGE = 32
MAX_HEADS_TO_JUDGE = 256
"""Heads that a head distribution is judged with: as many as the layer will have, if four times as
many features as samples or more take that many; so many at least, and at most."""

MIN_HEADS_PER_STEP = 16
MAX_HEADS_PER_STEP = 256
"""Bounds on the heads of a step when their number is automatic; of several hops the last has the
larger matrices, and the lower bound is shared out among them."""

MAX_SAMPLES_TO_START = 400
"""Samples that the head distribution without learning, where a descent starts, is chosen by."""

MAX_FIRST_PENALTY = 0.3
"""The penalty that a descent starts with at most, as a share of the mean squared length of a
feature vector: a start that explains nothing would have an infinite one, and no slope."""

CHECKS = 20
"""How often, at least, a descent of all its steps is checked on the held-out part; never more often
than every fifth step."""

MAX_CHECKS_WITHOUT_GAIN = 7
"""Checks without a new best after which a descent ends."""

SHARE_TO_GO_ON = 0.25
"""Steps, as a share of those of the best check, that all samples take from the head distribution it
found.
"""

MAX_HOPS = 3
"""Hops that are tried when their number is automatic."""


class LearnedHeads(UnfittedHeads):
    """Heads W_m = U_k + scale·A G_m B, k = m mod n_means, fitted to the training set.

    What is fitted is their head distribution: U, A and B.

    The values of random heads are solved for in closed form, and so are the n fits that each leave
    a sample out; what remains is a function of the head distribution alone, the leave-one-out
    error, and Adam descends it along its exact gradient (variable projection). Every step draws
    fresh noise G, so that a head distribution is learned and not a set of heads. A part of the
    training set that the descent never sees says after how many steps to stop, and whether to keep
    the result at all; then all samples take a few more steps. Below 250 samples several descents
    leave out a part each, so that every sample is held out once, and all samples descend anew.

    With several hops (``hops``) the query is extended, hop by hop, by what softmax attention with a
    learned matrix finds, and these heads are those of the last hop: for questions that need two
    facts, the second of which follows from the first.

    Parameters
    ----------
    n_means : int
        K, the number of means that the heads share out among themselves.
    scale : float
        Standard deviation of the entries around the means.
    steps : int
        Most steps of a descent. 0 chooses among multiples of the identity only.
    n_heads : int or "auto"
        Heads drawn at each step: as many features as samples, 16 to 256 heads (from 8 with two
        hops, 5 with three).
    covariance : {"auto", "diagonal", "none"}
        "diagonal" also learns how far the heads vary in each coordinate of the query (A) and of the
        key (B), two diagonal matrices; "none" keeps them at the identity, which infinitely many
        heads need. "auto" is "diagonal" for finitely many heads.
    learning_rate : float
        Of Adam, in units of entries of W, and of logarithms of A and B.
    shrinkage : float
        Weight of |U − U_start|², summed over all matrices, in what is descended on; the error is in
        units of the variance of the target.
    hops : int or "auto"
        Hops. "auto" tries 1, 2 and 3 (the third only if the second was worth it) and keeps the
        fewest that no larger number beats by more than one standard error on the held-out part, two
        below 250 samples. Without a query there is one.
    patterns : int
        P, what each hop before the last finds at a time.
    ages : "auto", None or sequence of int
        Coordinates of keys, zeros and a one, that say how old a key is, newest first, as
        `kh.tokens.with_ages` makes them; "auto" finds such. Hops then start with new keys, and with
        keys just older than what was found.
    jitter : float
        Probability with which, at every step, a while passes before a key, so that it and all older
        ones are one age older: ages are not learned by heart.
    augment : callable, optional
        Called with the sets of a step, a SetBatch, and a NumPy generator; the step sees the
        SetBatch that it returns. It must keep the number of sets and what the output depends on.
    strengths : sequence of float
        Multiples c of the identity to start from, chosen by leave-one-out, 0 first; and with them
        the scale of the head distribution if nothing is learned, from 0.5, ``scale`` and 0.1
        (softmax weights close to a plain mean).
    validation : float
        Share of the samples that the first descent does not see.
    max_samples : int
        Samples that one step uses, a fresh part if there are more; with H hops 1/√H of them.
    seconds : float, optional
        Time after which to stop, approximately; the result then depends on the machine.
    callback : callable, optional
        Called with a `Step` at every check on the held-out part.
    verbose : bool
        Print one line for every such check.

    Notes
    -----
    Costs n²p + n³ operations a step for n = min(samples, max_samples) and p = n_heads·D, and 6 n p
    D_H for the last of H hops, D_H = d_q + (H−1)·P·d + 1. The result is a deterministic function of
    the data, the parameters and the seed, which is that of the estimator. With ``device`` of the
    estimator a GPU does it, with the same numbers up to the rounding of float32.

    Guaranteed: values are optimal for the head distribution at hand, and the head distribution is
    kept only if it beat the head distribution without learning on the held-out part by more than
    two standard errors. Not guaranteed: the error is not convex in the head distribution, and the
    descent finds a local minimum.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(300, n_keys=4, dim=3, seed=0)
    >>> y = kh.targets.RotatedCorrelation(1.0, dim=3, seed=0)(sets)
    >>> model = kh.AttentionRegressor(64, heads=kh.LearnedHeads(steps=10), random_state=0).fit(
    ...     sets, y
    ... )
    >>> model.heads_.means_.shape, len(model.heads_.history)
    ((1, 4, 4), 3)
    """

    def __init__(
        self,
        n_means: int = 1,
        scale: float = 0.25,
        steps: int = 100,
        *,
        n_heads: int | Literal["auto"] = "auto",
        covariance: Literal["auto", "diagonal", "none"] = "auto",
        learning_rate: float = 0.1,
        shrinkage: float = 1e-4,
        hops: int | Literal["auto"] = 1,
        patterns: int = 1,
        ages: Literal["auto"] | Sequence[int] | Int[np.ndarray, " a"] | None = "auto",
        jitter: float = 0.1,
        augment: Augmentation | None = None,
        strengths: Sequence[float] | Float[np.ndarray, " c"] = (0.0, 1.0, 3.0),
        validation: float = 0.2,
        max_samples: int = 600,
        seconds: float | None = None,
        callback: Callable[[Step], object] | None = None,
        verbose: bool = False,
    ) -> None:
        self.n_means = n_means
        self.scale = scale
        self.steps = steps
        self.n_heads = n_heads
        self.covariance = covariance
        self.learning_rate = learning_rate
        self.shrinkage = shrinkage
        self.hops = hops
        self.patterns = patterns
        self.ages = ages
        self.jitter = jitter
        self.augment = augment
        self.strengths = strengths
        self.validation = validation
        self.max_samples = max_samples
        self.seconds = seconds
        self.callback = callback
        self.verbose = verbose

    def fit(
        self,
        batch: SampleBatch,
        y: Float[np.ndarray, "n ..."],
        *,
        activation: str = "relu",
        fit_intercept: bool = True,
        weights: Float[np.ndarray, " n"] | None = None,
        groups: Int[np.ndarray, " n"] | None = None,
        seed: int = 0,
        n_heads: int | None = None,
        device: str | None = None,
    ) -> FittedHeads:
        """Learn the head distribution of a training set, on a device if torch has it.

        The estimators call this first.

        ``y`` has one column of ±1 per class to classify. Samples of one of the ``groups`` are left
        out, and held out, together. ``n_heads`` is that of the layer that the head distribution is
        for: head distributions are judged with as many (256 at most), because one that makes the
        best of few heads need not be the best for many.
        """
        task = Task.of(
            batch=batch,
            columns=check_outputs(y).reshape(len(batch), -1),
            weights=weights,
            activation=activation,
            fit_intercept=fit_intercept,
            groups=groups,
        )
        plan = replace(self._plan(task, check_seed(seed), n_heads), device=device)
        if plan.steps and activation not in DIFFERENTIABLE:
            check_choice(activation, "activation", DIFFERENTIABLE)
        # float32 has digits enough to steer by
        task = task.with_sets(narrow(task.batch.sets, np.dtype(np.float32)))
        # threads of BLAS wait in loops, in the way of ours
        with threadpool_limits(1, user_api="blas"):
            return self._fitted(task, plan)

    @staticmethod
    def _fitted(task: Task, plan: LearningPlan) -> FittedHeads:
        """A head distribution learned in the coordinates that the training set uses, among all."""
        if plan.augment is not None:  # a caller's function may use any coordinate
            return _fit(task, plan)
        sets = task.batch.sets

        # learn without the coordinates that are zero in every sample
        used = UsedCoordinates.of(sets, plan.ages)
        distribution = _fit(
            task.with_sets(used.of_sets(sets)),
            replace(plan, ages=used.of_ages(plan.ages)),
        )

        # the entries of the other coordinates are where a descent in all of them would start
        identity = identity_mean(task.batch.dim, task.batch.query_dim, sets.pairs)
        base = FittedHeads(distribution.strength * identity[None], distribution.scale)
        if distribution.chosen == "learned":
            start = plan.start(base, task, distribution.hops)
        else:
            start = [base.means_]
        return used.among_all(distribution, start, task.batch.query_dim)

    def _plan(self, task: Task, seed: int, meant_for: int | None) -> LearningPlan:
        """The parameters, checked, for some samples and a layer of ``meant_for`` heads."""
        # shares, functions and time
        validation = check_number(self.validation, "validation", minimum=0.0, exclusive=True)
        if validation >= 1:
            raise ValueError(f"`validation` must be a share between 0 and 1: got {validation:g}.")
        jitter = check_number(self.jitter, "jitter", minimum=0.0)
        if jitter >= 1:
            raise ValueError(f"`jitter` must be a probability below 1: got {jitter:g}.")
        if self.augment is not None and not callable(self.augment):
            raise TypeError(
                "`augment` must be a function of sets and a generator, or None: got "
                f"{self.augment!r}."
            )
        seconds = math.inf
        if self.seconds is not None:
            seconds = check_number(self.seconds, "seconds", minimum=0.0, exclusive=True)

        # heads: so many for a step, and perhaps more to judge head distributions with
        n_means = check_count(self.n_means, "n_means")
        max_samples = check_count(self.max_samples, "max_samples", minimum=2)
        hops = self._hops(task.batch)
        n_samples = min(len(task), max_samples)
        width = task.batch.dim + 1
        n_heads = {}
        for count in hops:
            samples_per_step = min(n_samples, round(max_samples / math.sqrt(count)))
            n_heads[count] = self._heads_per_step(count, n_means, samples_per_step, width)
        # four times as many features as samples are enough to judge by
        enough = -(-4 * n_samples // width)
        enough = max(MIN_HEADS_TO_JUDGE, min(MAX_HEADS_TO_JUDGE, enough))
        judge_heads = max(*n_heads.values(), min(meant_for or 0, enough))

        covariance = check_choice(self.covariance, "covariance", ("auto", "diagonal", "none"))
        return LearningPlan(
            n_means=n_means,
            scale=check_number(self.scale, "scale", minimum=0.0, exclusive=True),
            steps=check_count(self.steps, "steps", minimum=0),
            n_heads=n_heads,
            judge_heads=judge_heads,
            learn_scales=covariance != "none",
            rate=check_number(self.learning_rate, "learning_rate", minimum=0.0, exclusive=True),
            shrinkage=check_number(self.shrinkage, "shrinkage", minimum=0.0),
            hops=hops,
            patterns=check_count(self.patterns, "patterns"),
            ages=Ages.of(task.batch.sets, self.ages),
            jitter=jitter,
            augment=self.augment,
            strengths=_numbers(self.strengths, "strengths"),
            validation=validation,
            max_samples=max_samples,
            deadline=time.monotonic() + seconds,
            seconds=seconds,
            tell=self._tell,
            seed=seed,
        )

    def _heads_per_step(self, hops: int, n_means: int, n_samples: int, width: int) -> int:
        """Heads of a step of ``n_samples`` samples; "auto" is as many features as samples."""
        if isinstance(self.n_heads, str):
            check_choice(self.n_heads, "n_heads", ("auto",))
            as_many_as_samples = -(-n_samples // width)
            return max(
                n_means,
                MIN_HEADS_PER_STEP // hops,
                min(MAX_HEADS_PER_STEP, as_many_as_samples),
            )
        n_heads = check_count(self.n_heads, "n_heads")
        if n_heads < n_means:
            raise ValueError(
                f"`n_heads` must be at least `n_means` = {n_means}, so that each has a head: got "
                f"{n_heads}."
            )
        return n_heads

    def _hops(self, batch: SampleBatch) -> list[int]:
        """The numbers of hops to try, fewest first."""
        has_query = batch.sets.query is not None
        if isinstance(self.hops, str):
            check_choice(self.hops, "hops", ("auto",))
            return list(range(1, MAX_HOPS + 1)) if has_query else [1]
        hops = check_count(self.hops, "hops")
        if hops > 1 and not has_query:
            reason = "these samples have none"
            if getattr(batch, "each", False):
                reason = "every key is the query in turn"
            raise ValueError(
                f"`hops` = {hops} needs a query of each set, to be extended by what a hop finds: "
                f"{reason}. Give one, let query='mean' make one, or use hops=1 (or 'auto')."
            )
        return [hops]

    def _tell(self, step: Step) -> None:
        """Report a check on the held-out part, as far as the caller wants to hear of it."""
        if self.verbose:
            print(  # noqa: T201
                f"step {step.step:4d}: leave-one-out {step.loo_error:.4f}, held out "
                f"{step.held_out_error:.4f}",
                file=sys.stderr,
                flush=True,
            )
        if self.callback is not None:
            self.callback(step)


@dataclass(frozen=True)
class LearningPlan:
    """The parameters of `LearnedHeads`, checked; ``n_heads`` of a step for each number of hops."""

    n_means: int
    scale: float
    steps: int
    n_heads: dict[int, int]
    judge_heads: int
    learn_scales: bool
    rate: float
    shrinkage: float
    hops: list[int]
    patterns: int
    ages: Ages | None
    jitter: float
    augment: Augmentation | None = field(repr=False)
    strengths: list[float]
    validation: float
    max_samples: int
    deadline: float
    seconds: float
    tell: Callable[[Step], None] = field(repr=False)
    seed: int
    device: str | None = None

    def scales(self) -> list[float]:
        """Noise to choose from without learning.

        The paper's, that of the descent, and next to none.
        """
        return list(dict.fromkeys([0.5, self.scale, 0.1]))

    def start(self, base: FittedHeads, task: Task, hops: int) -> list[np.ndarray]:
        """The matrices of all hops at the start of a descent, the means of the last one last.

        A single hop starts from the head distribution without learning, ``base``.
        """
        dim = task.batch.dim
        query_dim = task.batch.query_dim
        if hops > 1:
            return starting_hops(
                query_dim=query_dim,
                dim=dim,
                hops=hops,
                patterns=self.patterns,
                n_means=self.n_means,
                ages=self.ages,
                pairs=task.batch.sets.pairs,
                seed=self.seed,
            )
        means = np.repeat(base.means_, self.n_means, axis=0)
        means[:, -1] += newer_first(dim, self.ages)
        if self.n_means > 1:
            # equal means would have equal gradients and stay equal
            means += START_NOISE * head_normals(self.n_means, dim, self.seed + 1, query_dim)
        return [means]

    def generator(self, count: int) -> np.random.Generator:
        """What step number ``count`` changes samples by."""
        return np.random.default_rng([self.seed, count, 1])

    def augmented(self, task: Task, count: int) -> Task:
        """The samples as step number ``count`` sees them."""
        sets = task.batch.sets
        rng = self.generator(count)
        if self.ages is not None and self.jitter:
            sets = self.ages.moved(sets, self.jitter, rng)
        if self.augment is not None:
            sets = _check_augmented(self.augment(sets, rng), sets)
        if sets is task.batch.sets:
            return task
        return task.with_sets(sets)

    def judge_of(
        self, seen: Task, unseen: Task
    ) -> Callable[[FittedHeads, float | None], Judgement]:
        """A function that judges a head distribution by a fit to the samples that are ``seen``.

        The fit is at a penalty if one is given, and predicts the ``unseen`` samples.
        """
        # every head distribution is judged with the same noise, drawn once for each shape of W
        normals: dict[tuple[int, ...], np.ndarray] = {}

        judge_drawn = backend_for(self.device).judge_of(seen, unseen, self.seed)

        def judge_heads(distribution: FittedHeads, alpha: float | None) -> Judgement:
            rows, width = distribution.means_.shape[1:]
            if (rows, width) not in normals:
                normals[rows, width] = head_normals(
                    self.judge_heads, width - 1, self.seed, rows - 1
                )
            heads = distribution.around(normals[rows, width].copy())
            return judge_drawn(distribution, heads, alpha)

        return judge_heads


def _check_augmented(augmented: Any, sets: SetBatch) -> SetBatch:
    """The sets that a caller's function returned, if they have the shape of those it was given."""
    fits = isinstance(augmented, SetBatch) and (
        len(augmented) == len(sets)
        and augmented.dim == sets.dim
        and augmented.query_dim == sets.query_dim
    )
    if not fits:
        raise ValueError(
            "`augment` must return a SetBatch of as many sets of the same dimensions: got "
            f"{augmented!r:.200} for {sets!r}."
        )
    narrowed: SetBatch = augmented.astype(np.float32)
    return narrowed


@dataclass(frozen=True)
class Search:
    """A descent apart from the held-out samples: its checks on these, and the best of them.

    ``errors`` are those of the best head distribution, one for each held-out sample; ``gain`` is
    how far their mean is below that of the head distribution without learning, and ``doubt`` its
    standard error. ``distribution`` and ``alpha`` are where the first descent, from ``start``, was
    at the best check.
    """

    start: list[np.ndarray] = field(repr=False)
    history: tuple[Step, ...]
    errors: Float[np.ndarray, " h"] = field(repr=False)
    gain: float
    doubt: float
    distribution: FittedHeads
    alpha: float

    @property
    def hops(self) -> int:
        """The number of hops."""
        return len(self.start)

    @property
    def best(self) -> Step:
        """The best check."""
        return min(self.history, key=lambda step: step.held_out_error)


def _fit(task: Task, plan: LearningPlan) -> FittedHeads:
    """Learn a head distribution, or return the one without learning if that is no worse."""
    # the head distribution without learning: where descents start and what they must beat
    sample = task.at_most(min(plan.max_samples, MAX_SAMPLES_TO_START), plan.seed)
    base, judgement = choose_identity(
        sample,
        strengths=plan.strengths,
        scales=plan.scales(),
        n_heads=max(plan.n_heads.values()),
        seed=plan.seed,
    )
    if plan.steps == 0 or len(task) < MIN_SAMPLES_TO_DESCEND:
        return base

    # descend apart from held-out samples, which say how many steps help, and whether any do
    is_small = len(task) < MIN_SAMPLES_FOR_ONE_SPLIT
    search, summary = _fewest_hops(
        task, sample, base, judgement.alpha, plan, every_sample_held_out=is_small
    )
    best = search.best
    if best.step == 0 or search.gain <= STANDARD_ERRORS_TO_LEARN * search.doubt:
        reason = f"nothing learned beyond doubt: {summary}; {base.reason}"
        return replace(base, history=search.history, reason=reason)

    # then descend with all samples: anew if every one was held out in turn, because no single
    # descent was judged by all of them; else a little further from where the search ended
    if is_small:
        descent = HeadDescent(task, search.start, search.alpha, plan)
        steps = best.step
    else:
        descent = HeadDescent(task, search.start, search.alpha, plan, search.distribution)
        steps = max(1, round(SHARE_TO_GO_ON * best.step))
    for _ in range(steps):
        descent.step()
    return descent.distribution(
        strength=base.strength, steps=best.step, history=search.history, reason=summary
    )


def _fewest_hops(
    task: Task,
    sample: Task,
    base: FittedHeads,
    alpha: float,
    plan: LearningPlan,
    *,
    every_sample_held_out: bool,
) -> tuple[Search, str]:
    """The search with the fewest hops that one hop more does not beat, and a summary in words.

    One hop more must be better by more than one standard error, by more than two if every sample
    is held out in turn. ``sample`` is a part of the task, which says what penalty each descent
    begins with; ``alpha`` is the penalty of ``base``, the head distribution without learning.
    """
    # which samples each descent does not see
    if every_sample_held_out:
        turns = round(1 / plan.validation)
        standard_errors = 2
    else:
        turns = 1
        standard_errors = 1
    masks = held_out_parts(len(task), plan.validation, plan.seed, task.groups, turns)
    pairs = [(task.take(np.flatnonzero(~mask)), task.take(np.flatnonzero(mask))) for mask in masks]
    unseen = [held_out.at_most(plan.max_samples, plan.seed) for _, held_out in pairs]
    weights = _joined([part.weights for part in unseen])
    groups = _joined([part.groups for part in unseen])

    best: Search | None = None
    comparisons = []
    for i, hops in enumerate(plan.hops):
        # an equal share of the remaining time for every number of hops not tried yet
        seconds = (plan.deadline - time.monotonic()) / (len(plan.hops) - i)

        # the penalty that leave-one-out chooses at the start, bounded so that there is a slope
        start = plan.start(base, task, hops)
        on_host = replace(plan, device=None)
        at_start = judge(
            sample,
            HeadDescent(sample, start, alpha, on_host).distribution(),
            max(plan.n_heads.values()),
            plan.seed,
        )
        first_alpha = min(at_start.alpha, MAX_FIRST_PENALTY * at_start.spread)

        deadline = time.monotonic() + seconds
        search = _search(pairs, unseen, base, start, first_alpha, plan, deadline)
        if best is not None:
            gain, doubt = improvement(best.errors, search.errors, weights, groups)
            comparisons.append(f"{hops} hops against {best.hops}: {gain:.3g} ± {doubt:.3g}")
            if gain <= standard_errors * doubt:
                break
        best = search
    assert best is not None

    summary = (
        f"held-out error fell by {best.gain:.3g} ± {best.doubt:.3g} of the variance in "
        f"{best.best.step} steps"
    )
    if comparisons:
        summary += f" ({'; '.join(comparisons)})"
    return best, summary


def _search(
    pairs: list[tuple[Task, Task]],
    unseen: list[Task],
    base: FittedHeads,
    start: list[np.ndarray],
    alpha: float,
    plan: LearningPlan,
    deadline: float,
) -> Search:
    """Descend on the first samples of each pair, and check on ``unseen`` ones of the second.

    All descents step together; a check joins the held-out errors of all.
    """
    seen = [task.at_most(2 * plan.max_samples, plan.seed) for task, _ in pairs]
    judges = [plan.judge_of(task, other) for task, other in zip(seen, unseen, strict=True)]
    seen_weights = _joined([task.weights for task in seen])
    weights = _joined([task.weights for task in unseen])
    groups = _joined([task.groups for task in unseen])

    def check(
        count: int, distributions: list[FittedHeads], alphas: list[float | None]
    ) -> tuple[Step, np.ndarray]:
        """Judge one head distribution for each pair, after ``count`` steps; tell the caller.

        Returns the averages, and the error of every held-out sample.
        """
        judgements = [
            judge_heads(distribution, alpha)
            for judge_heads, distribution, alpha in zip(judges, distributions, alphas, strict=True)
        ]
        loo = np.concatenate([judgement.loo for judgement in judgements])
        held_out = np.concatenate([judgement.held_out for judgement in judgements])
        step = Step(
            step=count,
            loo_error=float(np.average(loo, weights=seen_weights)),
            held_out_error=float(np.average(held_out, weights=weights)),
        )
        plan.tell(step)
        return step, held_out

    # the incumbent: the head distribution without learning, at the penalty that suits it
    first_step, errors_before = check(0, [base] * len(pairs), [None] * len(pairs))
    history = [first_step]
    best = Search(
        start=start,
        history=(),
        errors=errors_before,
        gain=0.0,
        doubt=0.0,
        distribution=base,
        alpha=alpha,
    )
    least_error = first_step.held_out_error

    descents = [HeadDescent(task, start, alpha, plan) for task, _ in pairs]
    steps_between_checks = max(5, plan.steps // CHECKS)
    checks_without_gain = 0
    began = time.monotonic()
    for count in range(1, plan.steps + 1):
        for descent in descents:
            descent.step()

        # the descent on all samples, which follows, takes as long as one of these
        elapsed = time.monotonic() - began
        is_late = (1 + 1 / len(pairs)) * elapsed + began > deadline
        is_last = count == plan.steps or is_late
        if count % steps_between_checks != 0 and not is_last:
            continue

        # a check: a new best counts from the first time its error is reached
        step, errors = check(
            count,
            [descent.distribution() for descent in descents],
            [descent.alpha for descent in descents],
        )
        history.append(step)
        checks_without_gain += 1
        if step.held_out_error < least_error:
            least_error = step.held_out_error
            checks_without_gain = 0
            gain, doubt = improvement(errors_before, errors, weights, groups)
            best = Search(
                start=start,
                history=(),
                errors=errors,
                gain=gain,
                doubt=doubt,
                distribution=descents[0].distribution(),
                alpha=descents[0].alpha,
            )
        if checks_without_gain >= MAX_CHECKS_WITHOUT_GAIN or is_late:
            break
    return replace(best, history=tuple(history))


def _joined(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """All parts as one array; None if they are None."""
    arrays = [part for part in parts if part is not None]
    return np.concatenate(arrays) if arrays else None
