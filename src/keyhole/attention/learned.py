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
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from threadpoolctl import threadpool_limits

from keyhole._checks import check_choice, check_count, check_no_mask, check_number, check_seed
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
    Step,
    _Params,
    head_normals,
    identity_mean,
)
from keyhole.attention.hops import START_NOISE, Ages, UsedCoordinates, newer_first, starting_hops
from keyhole.data.sets import SampleBatch, SetBatch


def check_outputs(y: Any) -> Float[np.ndarray, "n ..."]:
    """Return outputs in float64; what is masked is refused."""
    check_no_mask(y, "y")
    return np.asarray(y, dtype=np.float64)


class UnfittedHeads(_Params):
    """A head distribution that a training set has to choose first, by ``fit``."""

    def sample(
        self, n_heads: int, dim: int, seed: int, query_dim: int | None = None, *, start: int = 0
    ) -> Float[np.ndarray, "m f e"]:
        """Raise: there is no head distribution before a training set has spoken."""
        name = type(self).__name__
        raise ValueError(
            f"{name} has no heads before it has seen a training set. Pass it as `heads` to "
            "kh.AttentionRegressor or kh.AttentionClassifier, which fit it first; or call "
            f"{name}(…).fit(sets, y) and use the head distribution that returns."
        )


class IdentityHeads(UnfittedHeads):
    """Heads W = c·W_0 + scale·G whose strength c and scale are chosen.

    By leave-one-out on the training set.

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
        strengths: Any = (0.0, 1.0, 3.0, 10.0, 30.0),
        scales: Any = (0.5,),
        n_heads: Any = 128,
        max_samples: Any = 1000,
        pairs: Any = None,
    ) -> None:
        self.pairs = pairs
        self.strengths = strengths
        self.scales = scales
        self.n_heads = n_heads
        self.max_samples = max_samples

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
            batch,
            check_outputs(y).reshape(len(batch), -1),
            weights,
            activation,
            fit_intercept,
            groups,
        )
        return choose_identity(
            task.at_most(check_count(self.max_samples, "max_samples"), seed),
            _numbers(self.strengths, "strengths"),
            _numbers(self.scales, "scales"),
            check_count(self.n_heads, "n_heads"),
            seed,
            self.pairs,
        )[0]


def choose_identity(
    task: Task,
    strengths: Sequence[float],
    scales: Sequence[float],
    n_heads: int,
    seed: int,
    pairs: Any = None,
) -> tuple[FittedHeads, Judgement]:
    """The pair of least leave-one-out error if that is beyond doubt, else the first pair.

    ``pairs`` or the batch's.
    """
    pairs = task.batch.sets.pairs if pairs is None else pairs
    distributions = [(c, s) for s in scales for c in strengths]
    judged = [judge(task, GaussianHeads(c, s, pairs), n_heads, seed) for c, s in distributions]
    best = int(np.argmin([np.average(j.loo, weights=task.weights) for j in judged]))
    gain, error = improvement(judged[0].loo, judged[best].loo, task.weights, task.groups)
    if gain <= error:
        best = 0
    strength, scale = distributions[best]
    identity = identity_mean(task.batch.dim, task.batch.query_dim, pairs)
    reason = (
        f"leave-one-out error {np.average(judged[best].loo, weights=task.weights):.3g} of the "
        f"variance, {np.average(judged[0].loo, weights=task.weights):.3g} for c = "
        f"{distributions[0][0]:g}, scale {distributions[0][1]:g}"
    )
    chosen = "identity" if strength else "zero-mean"
    distribution = FittedHeads(strength * identity[None], scale, chosen, strength, reason=reason)
    return distribution, judged[best]


def _numbers(values: Any, name: str) -> list[float]:
    if np.ndim(values) != 1 or len(values) == 0:
        raise ValueError(f"`{name}` must be a sequence of at least one number: got {values!r}.")
    minimum = 0.0 if name == "scales" else -np.inf
    return [
        check_number(v, f"{name}[{i}]", minimum=minimum, exclusive=name == "scales")
        for i, v in enumerate(values)
    ]


_KEPT_SHARE = 0.8
"""Share of the running average of the means that a step keeps: about five steps, enough to calm
fresh noise.
"""

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


class HeadDescent:
    """A descent on a head distribution: matrices of all hops, scales, penalty and their moments.

    `step` moves it, `heads` is there.

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
        self.task, self.plan, self.anchors = task, plan, list(start)
        matrices = self.anchors if began is None else [*began.hops_, began.means_]
        self.matrices = [matrix.copy() for matrix in matrices]
        self.log_alpha = math.log(alpha)
        self.scales = np.zeros(
            sum(start[-1].shape[1:])
        )  # logarithms, of the query's and of the key's coordinates
        if began is not None and began.query_scales_ is not None and began.key_scales_ is not None:
            self.scales = np.log(np.concatenate([began.query_scales_, began.key_scales_]))
        self.adams = [Adam(plan.rate) for _ in start]
        self.adam_of_scales, self.penalty = Adam(plan.rate), Adam(0.1)
        self.count = 0
        self.averages = [matrix.copy() for matrix in self.matrices]
        self.average_scales = self.scales.copy()
        self.on_device: Any = None
        self.ahead: Future[tuple[Any, np.ndarray]] | None = None
        if plan.device is not None:
            from keyhole.attention.torch_heads import DeviceTask

            self.on_device, self.helper = DeviceTask(task, plan.device), ThreadPoolExecutor(1)

    def distribution(self, **about: Any) -> FittedHeads:
        """The head distribution of the running averages."""
        query, key = self._parts(self.average_scales) if self.plan.learn_scales else (None, None)
        *hops, means = self.averages
        about |= {"query_scales_": query, "key_scales_": key, "hops_": tuple(hops)}
        return FittedHeads(means, self.plan.scale, **about)

    @property
    def alpha(self) -> float:
        """The penalty it is at."""
        return math.exp(self.log_alpha)

    def _parts(self, scales: Float[np.ndarray, " g"]) -> tuple[np.ndarray, np.ndarray]:
        """The scales of the query and of the key, out of their logarithms."""
        rows = self.matrices[-1].shape[1]
        return np.exp(scales[:rows]), np.exp(scales[rows:])

    def step(self) -> float:
        """One step; returns the leave-one-out error before it."""
        plan = self.plan
        part, noise = self._prepared(self.count) if self.ahead is None else self.ahead.result()
        if (
            self.on_device is not None and plan.augment is None
        ):  # the next step is made ready while a device computes
            self.ahead = self.helper.submit(self._prepared, self.count + 1)
        noise *= np.outer(*self._parts(self.scales)).astype(np.float32)
        found = self._gradient(part, noise)
        self.count += 1
        keep = min(_KEPT_SHARE, 1.0 - 1.0 / self.count)
        gradients = [*found.hops, found.means]
        for i, gradient in enumerate(gradients):
            pull = 2.0 * plan.shrinkage * (self.matrices[i] - self.anchors[i])
            self.matrices[i] += self.adams[i].move(gradient + pull)
            self.averages[i] = keep * self.averages[i] + (1.0 - keep) * self.matrices[i]
        if found.scales is not None:
            self.scales += self.adam_of_scales.move(found.scales)
            self.average_scales = keep * self.average_scales + (1.0 - keep) * self.scales
        self.log_alpha += float(self.penalty.move(np.array(found.log_alpha)))
        return found.error

    def _prepared(self, count: int) -> tuple[Any, np.ndarray]:
        """The samples that step number ``count`` sees, and its noise before the scales."""
        plan = self.plan
        few = max(2, round(plan.max_samples / math.sqrt(len(self.matrices))))
        rows = self.task.rows(few, plan.seed + count)
        if self.on_device is None:
            part = plan.augmented(
                self.task if len(rows) == len(self.task) else self.task.take(rows), count
            )
        else:
            part = self.on_device.part(rows, plan, count)
        shape = (plan.n_heads[len(self.matrices)], *self.matrices[-1].shape[1:])
        noise = np.random.default_rng([plan.seed, count]).standard_normal(shape, dtype=np.float32)
        noise *= np.float32(plan.scale)
        return part, noise

    def _gradient(self, part: Any, noise: np.ndarray) -> HeadGradient:
        *hops, means = self.matrices
        compute = gradient_in_heads if self.on_device is None else type(part).gradient_in_heads
        for _ in range(_MAX_RAISES):
            try:
                found: HeadGradient = compute(
                    part, means, noise, self.alpha, scales=self.plan.learn_scales, hops=hops
                )
                return found
            except np.linalg.LinAlgError:  # below the floor of float32: a little more penalty
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
standard errors and not by one."""

STANDARD_ERRORS_TO_LEARN = 2
"""By how many of them a head distribution must beat the head distribution without learning to be
kept: the best of twenty checks is a lucky one.
"""

MIN_HEADS_TO_JUDGE, MAX_HEADS_TO_JUDGE = 32, 256
"""Heads that a head distribution is judged with: as many as the layer will have, if four times as
many features as samples or more take that many; so many at least, and at most."""

MIN_HEADS_PER_STEP, MAX_HEADS_PER_STEP = 16, 256
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
    leave out a part each, so that all samples have a say, and all samples descend anew.

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
        SetBatch that it returns. It must keep the number of sets and what the answer depends on.
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
        Called with a `Step` at every look at the held-out part.
    verbose : bool
        Print those lines.

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
        n_means: Any = 1,
        scale: Any = 0.25,
        steps: Any = 100,
        *,
        n_heads: Any = "auto",
        covariance: Any = "auto",
        learning_rate: Any = 0.1,
        shrinkage: Any = 1e-4,
        hops: Any = 1,
        patterns: Any = 1,
        ages: Any = "auto",
        jitter: Any = 0.1,
        augment: Any = None,
        strengths: Any = (0.0, 1.0, 3.0),
        validation: Any = 0.2,
        max_samples: Any = 600,
        seconds: Any = None,
        callback: Any = None,
        verbose: Any = False,
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
        columns = check_outputs(y).reshape(len(batch), -1)
        task = Task.of(batch, columns, weights, activation, fit_intercept, groups)
        plan = replace(self._plan(task, check_seed(seed), n_heads), device=device)
        if plan.steps and activation not in DIFFERENTIABLE:
            check_choice(activation, "activation", DIFFERENTIABLE)
        # float32 has digits enough to steer by
        task = task.with_sets(narrow(task.batch.sets, np.dtype(np.float32)))
        with threadpool_limits(1, user_api="blas"):  # its threads wait in loops, in the way of ours
            return self._fitted(task, plan)

    @staticmethod
    def _fitted(task: Task, plan: LearningPlan) -> FittedHeads:
        """A head distribution learned in the coordinates that the training set uses, among all."""
        if plan.augment is not None:  # a caller's function knows all coordinates
            return _fit(task, plan)
        used = UsedCoordinates.of(task.batch.sets, plan.ages)
        distribution = _fit(
            task.with_sets(used.of_sets(task.batch.sets)),
            replace(plan, ages=used.of_ages(plan.ages)),
        )
        identity = identity_mean(task.batch.dim, task.batch.query_dim, task.batch.sets.pairs)
        base = FittedHeads(distribution.strength * identity[None], distribution.scale)
        start = (
            plan.start(base, task, distribution.hops)
            if distribution.chosen == "learned"
            else [base.means_]
        )
        return used.among_all(distribution, start, task.batch.query_dim)

    def _plan(self, task: Task, seed: int, meant_for: int | None) -> LearningPlan:
        share = check_number(self.validation, "validation", minimum=0.0, exclusive=True)
        if share >= 1:
            raise ValueError(f"`validation` must be a share between 0 and 1: got {share:g}.")
        jitter = check_number(self.jitter, "jitter", minimum=0.0)
        if jitter >= 1:
            raise ValueError(f"`jitter` must be a probability below 1: got {jitter:g}.")
        if self.augment is not None and not callable(self.augment):
            raise TypeError(
                "`augment` must be a function of sets and a generator, or None: got "
                f"{self.augment!r}."
            )
        seconds = (
            None
            if self.seconds is None
            else check_number(self.seconds, "seconds", minimum=0.0, exclusive=True)
        )
        n_means, most = (
            check_count(self.n_means, "n_means"),
            check_count(self.max_samples, "max_samples", minimum=2),
        )
        hops = self._hops(task.batch)
        n, width = min(len(task), most), task.batch.dim + 1
        each = {h: min(n, round(most / math.sqrt(h))) for h in hops}
        if isinstance(self.n_heads, str):
            check_choice(self.n_heads, "n_heads", ("auto",))
            # as many features as samples
            n_heads = [
                max(n_means, MIN_HEADS_PER_STEP // h, min(MAX_HEADS_PER_STEP, -(-each[h] // width)))
                for h in hops
            ]
        else:
            n_heads = [check_count(self.n_heads, "n_heads")] * len(hops)
        if min(n_heads) < n_means:
            raise ValueError(
                f"`n_heads` must be at least `n_means` = {n_means}, so that each has a head: got "
                f"{n_heads[0]}."
            )
        enough = max(MIN_HEADS_TO_JUDGE, min(MAX_HEADS_TO_JUDGE, -(-4 * n // width)))
        return LearningPlan(
            n_means=n_means,
            scale=check_number(self.scale, "scale", minimum=0.0, exclusive=True),
            steps=check_count(self.steps, "steps", minimum=0),
            n_heads=dict(zip(hops, n_heads, strict=True)),
            judge_heads=max(*n_heads, min(meant_for or 0, enough)),
            learn_scales=check_choice(self.covariance, "covariance", ("auto", "diagonal", "none"))
            != "none",
            rate=check_number(self.learning_rate, "learning_rate", minimum=0.0, exclusive=True),
            shrinkage=check_number(self.shrinkage, "shrinkage", minimum=0.0),
            hops=hops,
            patterns=check_count(self.patterns, "patterns"),
            ages=Ages.of(task.batch.sets, self.ages),
            jitter=jitter,
            augment=self.augment,
            strengths=_numbers(self.strengths, "strengths"),
            validation=share,
            max_samples=most,
            deadline=math.inf if seconds is None else time.monotonic() + seconds,
            seconds=seconds or math.inf,
            tell=self._tell(),
            seed=seed,
        )

    def _hops(self, batch: SampleBatch) -> list[int]:
        """The numbers of hops to try, fewest first."""
        asks = batch.sets.query is not None
        if isinstance(self.hops, str):
            check_choice(self.hops, "hops", ("auto",))
            return list(range(1, MAX_HOPS + 1)) if asks else [1]
        hops = check_count(self.hops, "hops")
        if hops > 1 and not asks:
            reason = (
                "every key is the query in turn"
                if getattr(batch, "each", False)
                else "these samples have none"
            )
            raise ValueError(
                f"`hops` = {hops} needs a query of each set, to be extended by what a hop finds: "
                f"{reason}. Give one, let query='mean' make one, or use hops=1 (or 'auto')."
            )
        return [hops]

    def _tell(self) -> Callable[[Step], None]:
        def tell(step: Step) -> None:
            if self.verbose:
                print(  # noqa: T201
                    f"step {step.step:4d}: leave-one-out {step.loo_error:.4f}, held out "
                    f"{step.held_out_error:.4f}",
                    file=sys.stderr,
                    flush=True,
                )
            if self.callback is not None:
                self.callback(step)

        return tell


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
    augment: Callable[[SetBatch, np.random.Generator], SetBatch] | None = field(repr=False)
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
        """The matrices of all looks at the start.

        The last hop of one starts from the head distribution without learning.
        """
        dim, asked = task.batch.dim, task.batch.query_dim
        if hops > 1:
            counts = hops, self.patterns, self.n_means
            return starting_hops(asked, dim, *counts, self.ages, task.batch.sets.pairs, self.seed)
        means = np.repeat(base.means_, self.n_means, axis=0)
        means[:, -1] += newer_first(dim, self.ages)
        if self.n_means > 1:  # several need a little of their own to part ways
            means += START_NOISE * head_normals(self.n_means, dim, self.seed + 1, asked)
        return [means]

    def generator(self, count: int) -> np.random.Generator:
        """What step number ``count`` changes samples by."""
        return np.random.default_rng([self.seed, count, 1])

    def augmented(self, task: Task, count: int) -> Task:
        """The samples as step number ``count`` sees them."""
        sets, rng = task.batch.sets, self.generator(count)
        if self.ages is not None and self.jitter:
            sets = self.ages.moved(sets, self.jitter, rng)
        if self.augment is not None:
            sets = _check_augmented(self.augment(sets, rng), sets)
        return task if sets is task.batch.sets else task.with_sets(sets)

    def judge_of(
        self, seen: Task, unseen: Task
    ) -> Callable[[FittedHeads, float | None], Judgement]:
        """What judges head distributions by a fit to some samples.

        At a penalty if one is given, and by its predictions of others.
        """
        normals: dict[tuple[int, ...], np.ndarray] = {}  # the noise is drawn once
        there: Any = None
        if self.device is not None:
            from keyhole.attention.torch_heads import judge_on_device

            there = judge_on_device(seen, unseen, self.device)

        def judge_heads(distribution: FittedHeads, alpha: float | None) -> Judgement:
            rows, width = shape = distribution.means_.shape[1:]
            if shape not in normals:
                normals[shape] = head_normals(self.judge_heads, width - 1, self.seed, rows - 1)
            heads = distribution.around(normals[shape].copy())
            if there is None or alpha is None:
                return judge(seen, distribution, self.judge_heads, self.seed, unseen, alpha, heads)
            loo, ahead = there(distribution, heads, alpha)
            return Judgement(loo, ahead, alpha)

        return judge_heads


def _check_augmented(found: Any, sets: SetBatch) -> SetBatch:
    """What a caller's function made of sets, as long as it is sets of their kind."""
    if not isinstance(found, SetBatch) or (len(found), found.dim, found.query_dim) != (
        len(sets), sets.dim, sets.query_dim
    ):  # fmt: skip
        raise ValueError(
            "`augment` must return a SetBatch of as many sets of the same dimensions: got "
            f"{found!r:.200} for {sets!r}."
        )
    return found.astype(np.float32)


@dataclass(frozen=True)
class Search:
    """A descent on what is seen: checks on the held-out part, and the best of them.

    ``errors`` are those of the best head distribution, sample by sample held out; ``gain`` and
    ``doubt`` are over the head distribution without learning, and its standard error; ``heads`` and
    ``alpha`` are where the first descent, from ``start``, was then.
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
    """Choose the head distribution without learning.

    Descend apart from the held-out part; keep what it says; go on with all.
    """
    some = task.at_most(min(plan.max_samples, MAX_SAMPLES_TO_START), plan.seed)
    heads = max(plan.n_heads.values())
    base, judged = choose_identity(some, plan.strengths, plan.scales(), heads, plan.seed)
    if plan.steps == 0 or len(task) < MIN_SAMPLES_TO_DESCEND:
        return base
    few = len(task) < MIN_SAMPLES_FOR_ONE_SPLIT
    found, said = _fewest_hops(task, some, base, judged.alpha, plan, few=few)
    best = found.best
    if best.step == 0 or found.gain <= STANDARD_ERRORS_TO_LEARN * found.doubt:
        reason = f"nothing learned beyond doubt: {said}; {base.reason}"
        return replace(base, history=found.history, reason=reason)
    if few:
        descent, steps = HeadDescent(task, found.start, found.alpha, plan), best.step
    else:
        descent = HeadDescent(task, found.start, found.alpha, plan, found.distribution)
        steps = max(1, round(SHARE_TO_GO_ON * best.step))
    for _ in range(steps):
        descent.step()
    return descent.distribution(
        strength=base.strength, steps=best.step, history=found.history, reason=said
    )


def _fewest_hops(
    task: Task, some: Task, base: FittedHeads, alpha: float, plan: LearningPlan, *, few: bool
) -> tuple[Search, str]:
    """The search with the fewest hops, and what it found in words.

    One hop more does not beat it beyond doubt.

    ``some`` samples say which penalty each begins with; ``alpha`` is that of the head distribution
    without learning.
    """
    turns = round(1 / plan.validation) if few else 1
    masks = held_out_parts(len(task), plan.validation, plan.seed, task.groups, turns)
    pairs = [(task.take(np.flatnonzero(~mask)), task.take(np.flatnonzero(mask))) for mask in masks]
    unseen = [held_out.at_most(plan.max_samples, plan.seed) for _, held_out in pairs]
    weights, groups = (
        _joined([part.weights for part in unseen]),
        _joined([part.groups for part in unseen]),
    )
    found: Search | None = None
    against = ""
    for left, hops in zip(range(len(plan.hops), 0, -1), plan.hops, strict=True):
        share = (plan.deadline - time.monotonic()) / left  # of the time that is left
        start = plan.start(base, task, hops)
        distribution = HeadDescent(some, start, alpha, replace(plan, device=None)).distribution()
        at = judge(some, distribution, max(plan.n_heads.values()), plan.seed)
        first = min(at.alpha, MAX_FIRST_PENALTY * at.spread)
        search = _search(pairs, unseen, base, start, first, plan, time.monotonic() + share)
        if found is not None:
            gain, doubt = improvement(found.errors, search.errors, weights, groups)
            more = f"{hops} hops against {found.hops}: {gain:.3g} ± {doubt:.3g}"
            against = f"{against}; {more}" if against else more
            if gain <= (2 if few else 1) * doubt:
                break
        found = search
    assert found is not None
    said = (
        f"held-out error fell by {found.gain:.3g} ± {found.doubt:.3g} of the variance in "
        f"{found.best.step} steps"
    )
    return found, said + (f" ({against})" if against else "")


def _search(
    pairs: list[tuple[Task, Task]],
    unseen: list[Task],
    base: FittedHeads,
    start: list[np.ndarray],
    alpha: float,
    plan: LearningPlan,
    deadline: float,
) -> Search:
    """Descend on what is seen of each pair.

    Return the checks on what is not, and the best of them.
    """
    seen = [task.at_most(2 * plan.max_samples, plan.seed) for task, _ in pairs]
    judges = [plan.judge_of(task, other) for task, other in zip(seen, unseen, strict=True)]

    def check(
        distributions: list[FittedHeads], alphas: list[float | None]
    ) -> tuple[float, np.ndarray]:
        """The leave-one-out error of the head distributions, each where it is from.

        And their errors on what they have not seen.
        """
        judged = [
            one(distribution, alpha)
            for one, distribution, alpha in zip(judges, distributions, alphas, strict=True)
        ]
        return _average([j.loo for j in judged], seen), np.concatenate([j.held_out for j in judged])

    weights, groups = (
        _joined([task.weights for task in unseen]),
        _joined([task.groups for task in unseen]),
    )
    loo, before = check([base] * len(pairs), [None] * len(pairs))
    history = [Step(0, loo, float(np.average(before, weights=weights)))]
    plan.tell(history[0])
    descents = [HeadDescent(task, start, alpha, plan) for task, _ in pairs]
    best = Search(start, (), before, 0.0, 0.0, base, alpha)
    least, since = history[0].held_out_error, 0
    began, apart = time.monotonic(), max(5, plan.steps // CHECKS)
    for count in range(1, plan.steps + 1):
        for descent in descents:
            descent.step()
        # going on with all samples takes as long as one of these
        late = (1 + 1 / len(pairs)) * (time.monotonic() - began) + began > deadline
        if count % apart and count < plan.steps and not late:
            continue
        loo, now = check(
            [descent.distribution() for descent in descents],
            [descent.alpha for descent in descents],
        )
        history.append(Step(count, loo, float(np.average(now, weights=weights))))
        plan.tell(history[-1])
        since += 1
        if history[-1].held_out_error < least:
            least, since = history[-1].held_out_error, 0
            gain, doubt = improvement(before, now, weights, groups)
            best = Search(
                start, (), now, gain, doubt, descents[0].distribution(), descents[0].alpha
            )
        if since >= MAX_CHECKS_WITHOUT_GAIN or late:
            break
    return replace(best, history=tuple(history))


def _joined(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """One array, or None if there is none."""
    given = [part for part in parts if part is not None]
    return np.concatenate(given) if given else None


def _average(values: list[np.ndarray], tasks: list[Task]) -> float:
    return float(
        np.average(np.concatenate(values), weights=_joined([task.weights for task in tasks]))
    )
