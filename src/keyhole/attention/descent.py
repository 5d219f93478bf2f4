"""A descent on a head distribution: what it decides inside, its steps, and how it is judged.

`HeadDescent` follows the exact gradient of the leave-one-out error (`head_error`) from a start that
`hops` makes. Which starts are tried, and which descent is kept, is decided in `search`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole.attention.backends import DescentPart, DescentSamples
from keyhole.attention.head_error import (
    HeadGradient,
    Judgement,
    Task,
    gradient_in_heads,
    judge,
)
from keyhole.attention.heads import FittedHeads, HeadDistribution, head_normals
from keyhole.attention.hops import (
    START_NOISE,
    Ages,
    Start,
    newer_first,
    rarity_of,
    starting_hops,
)

_KEPT_SHARE = 0.8
"""Share of the running average of the means that a step keeps: about five steps, enough to calm
fresh noise.
"""

_PENALTY_RATE = 0.1
"""Learning rate of the logarithm of the penalty."""

_MAX_RAISES = 60
"""How often a penalty that float32 cannot carry is raised by a factor e: 26 decades."""


_STEPS_AHEAD = 2
"""Steps that helper threads prepare while a device computes one: with one, a device waited for a
quarter of the time of a descent (H200)."""

_LEAST_SLOPE = 1e-4
"""Share of the largest size of a gradient below which entries hardly move: what is zero but for the
rounding of float32 (softmax does not see a number added to all scores) would otherwise move as far
as what matters."""


@dataclass(frozen=True)
class DescentSettings:
    """What a descent decides inside: nobody needs to set these, and `LearnedHeads` has no option.

    They were chosen on generated tasks of questions about stories (`benchmarks/stories.py`,
    docs/benchmarks/stories.md says what was compared).

    Attributes
    ----------
    rate : float
        Learning rate of Adam, in units of entries of W, and of logarithms of A and B.
    steady_share, last_rate : float
        The rate is steady for this share of the steps, then falls linearly to this share of it.
    shrinkage : float
        Weight of |U − U_start|², summed over all matrices, in what is descended on; the error is
        in units of the variance of the target.
    jitter : float
        Probability with which, at every step, a while passes before a key whose age is known, so
        that it and all older ones are one age older: ages are not memorised.
    strengths : tuple of float
        Multiples c of the identity; leave-one-out chooses that which a single hop starts from.
    max_samples : int
        Samples that one step uses, a fresh part if there are more; with H hops 1/√H of them.
    max_keys : int
        Keys of a set that one step uses, a fresh part if there are more (`sampled_keys`). All keys
        count where a head distribution is judged.
    heads_per_step : int or None
        Heads drawn at each step; None is as many features as samples, 16 to 256 heads (from 8 with
        two hops, 5 with three).
    learn_scales : bool
        Whether to learn how far heads vary in each coordinate of the query (A) and of the key (B).
        Infinitely many heads need noise of one scale, and have no such scales.
    """

    rate: float = 0.05
    steady_share: float = 0.6
    last_rate: float = 0.1
    shrinkage: float = 1e-4
    jitter: float = 0.1
    strengths: tuple[float, ...] = (0.0, 1.0, 3.0)
    max_samples: int = 600
    max_keys: int = 256
    heads_per_step: int | None = None
    learn_scales: bool = True

    def rate_at(self, count: int, n_steps: int) -> float:
        """The learning rate of step number ``count`` (from 0) of a descent of ``n_steps``.

        >>> settings = DescentSettings(rate=1.0, steady_share=0.5, last_rate=0.1)
        >>> [round(settings.rate_at(count, 10), 2) for count in (0, 5, 10, 20)]
        [1.0, 1.0, 0.1, 0.1]
        """
        progress = min(1.0, count / n_steps)
        past_steady = max(0.0, progress - self.steady_share) / (1.0 - self.steady_share)
        return self.rate * (1.0 - (1.0 - self.last_rate) * past_steady)


@dataclass(frozen=True)
class LearningPlan:
    """The parameters of `LearnedHeads`, checked, and what follows from them for some samples.

    ``heads_per_step`` is that of each number of hops; ``judge_heads`` is how many heads a head
    distribution is judged with; ``starts`` are those to try, all of `search.starts_of` if empty.
    ``holds_out_runs`` says whether runs of consecutive samples are held out where there are no
    groups. They are where the user asks for learned heads, because neighbours in a table are often
    related; default settings hold out samples at random.
    """

    n_means: int
    scale: float
    steps: int
    hops: tuple[int, ...]
    patterns: int
    validation: float
    settings: DescentSettings
    ages: Ages | None
    heads_per_step: dict[int, int]
    judge_heads: int
    seed: int
    starts: tuple[Start, ...] = ()
    holds_out_runs: bool = True
    device: str | None = None
    tell: Callable[[str], None] = field(default=lambda text: None, repr=False)

    def scales(self) -> list[float]:
        """Noise to choose from without learning.

        The paper's, that of the descent, and next to none.
        """
        return list(dict.fromkeys([0.5, self.scale, 0.1]))

    def start(self, base: FittedHeads, task: Task, start: Start) -> list[np.ndarray]:
        """The matrices of all hops at the start of a descent, the means of the last one last.

        A single hop starts from the head distribution without learning, ``base``. Where ages are
        ignored, rare coordinates count more: what links two facts is seldom what they all share.
        """
        dim = task.batch.dim
        query_dim = task.batch.query_dim
        if start.hops > 1:
            rarity = None
            if start.ignores_ages:
                rarity = rarity_of(task.batch.sets)
            return starting_hops(
                query_dim=query_dim,
                dim=dim,
                hops=start.hops,
                patterns=self.patterns,
                n_means=self.n_means,
                strengths=start.strengths,
                ages=self.ages,
                pairs=task.batch.sets.pairs,
                seed=self.seed,
                rarity=rarity,
            )
        means = np.repeat(base.means_, self.n_means, axis=0)
        means[:, -1] += newer_first(dim, self.ages)
        if self.n_means > 1:
            # equal means would have equal gradients and stay equal
            noise = head_normals(self.n_means, dim, self.seed + 1, query_dim)
            means += START_NOISE * noise[:, -means.shape[1] :]
        return [means]

    def generator(self, count: int) -> np.random.Generator:
        """What step number ``count`` changes samples by."""
        return np.random.default_rng([self.seed, count, 1])

    def keys_of_step(self, lengths: Int[np.ndarray, " n"], count: int) -> Bool[np.ndarray, " t"]:
        """Which keys of sets of these lengths step number ``count`` sees."""
        rng = np.random.default_rng([self.seed, count, 2])
        return sampled_keys(lengths, self.settings.max_keys, rng)

    def with_keys_of_step(self, task: Task, count: int) -> Task:
        """The samples with the keys that step number ``count`` sees.

        All of them where a sample is not the average of one set: a sum over some keys is another.
        """
        sets = task.batch.sets
        has_large_sets = int(sets.lengths.max()) > self.settings.max_keys
        if not has_large_sets or not task.batch.is_plain:
            return task
        return task.with_sets(sets.with_kept_keys(self.keys_of_step(sets.lengths, count)))

    def jittered(self, task: Task, count: int) -> Task:
        """The samples as step number ``count`` sees them: some keys a little older."""
        if self.ages is None or not self.settings.jitter:
            return task
        sets = task.batch.sets
        return task.with_sets(self.ages.moved(sets, self.settings.jitter, self.generator(count)))

    def judge_of(
        self, samples: DescentSamples, seen: Int[np.ndarray, " s"], unseen: Int[np.ndarray, " h"]
    ) -> Callable[[FittedHeads, float | None], Judgement]:
        """A function that judges a head distribution by a fit to the samples that are ``seen``.

        The fit is at a penalty if one is given, and predicts the ``unseen`` samples.
        """
        # every head distribution is judged with the same noise, drawn once for each shape of W
        normals: dict[tuple[int, ...], np.ndarray] = {}

        def judge_heads(distribution: FittedHeads, alpha: float | None) -> Judgement:
            rows, width = distribution.means_.shape[1:]
            if (rows, width) not in normals:
                normals[rows, width] = head_normals(
                    self.judge_heads, width - 1, self.seed, rows - 1
                )
            heads = distribution.around(normals[rows, width].copy())
            return samples.judge(
                distribution,
                seen,
                n_heads=self.judge_heads,
                seed=self.seed,
                heads=heads,
                unseen=unseen,
                alpha=alpha,
            )

        return judge_heads


def sampled_keys(
    lengths: Int[np.ndarray, " n"], max_keys: int, rng: np.random.Generator
) -> Bool[np.ndarray, " t"]:
    """Which keys of sets of these lengths are seen: at most ``max_keys`` of each set.

    A larger set is cut into ``max_keys`` stretches, equal but for rounding, and one key of each is
    seen: neighbours are often alike. The first stretch begins anywhere, so that all keys of a set
    are seen equally often.

    >>> rng = np.random.default_rng(0)
    >>> is_seen = sampled_keys(np.array([2, 9]), 4, rng)
    >>> is_seen[:2].tolist(), int(is_seen[2:].sum())
    ([True, True], 4)
    """
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    is_large = lengths > max_keys
    is_seen = np.repeat(~is_large, lengths)
    n_keys = lengths[is_large, None]
    edges = np.arange(max_keys + 1) * n_keys // max_keys
    widths = np.diff(edges, axis=1)
    first_edge = (rng.random(n_keys.shape) * n_keys).astype(np.int64)
    drawn = first_edge + edges[:, :-1] + (rng.random(widths.shape) * widths).astype(np.int64)
    is_seen[offsets[:-1][is_large, None] + drawn % n_keys] = True
    return is_seen


@dataclass
class Adam:
    """First and second moments of a gradient."""

    first: np.ndarray = field(default_factory=lambda: np.zeros(()))
    second: np.ndarray = field(default_factory=lambda: np.zeros(()))
    count: int = 0

    def move(self, gradient: np.ndarray, rate: float) -> np.ndarray:
        """What to add to the parameter, at a learning rate."""
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.99 * self.second + 0.01 * np.square(gradient)
        mean = self.first / (1 - 0.9**self.count)
        size = np.sqrt(self.second / (1 - 0.99**self.count))
        return np.asarray(-rate * mean / (size + _LEAST_SLOPE * size.max() + 1e-12))


@dataclass(frozen=True)
class HostSamples:
    """Training samples in host memory, of which every step of a descent takes some."""

    task: Task
    steps_on_device: ClassVar[bool] = False

    def part(self, rows: Int[np.ndarray, " r"], plan: LearningPlan, count: int) -> HostPart:
        """Some samples, as step number ``count`` of a plan sees them."""
        task = self.task
        if len(rows) < len(task):
            task = task.take(rows)
        task = plan.with_keys_of_step(task, count)
        return HostPart(plan.jittered(task, count))

    def judge(
        self,
        distribution: HeadDistribution,
        seen: Int[np.ndarray, " s"],
        *,
        n_heads: int,
        seed: int,
        heads: Float[np.ndarray, "m f e"] | None = None,
        unseen: Int[np.ndarray, " h"] | None = None,
        alpha: float | None = None,
    ) -> Judgement:
        """`head_error.judge` of a fit to the samples that are ``seen``."""
        held_out = None
        if unseen is not None:
            held_out = self.task.take(unseen)
        return judge(
            self.task.take(seen),
            distribution,
            n_heads=n_heads,
            seed=seed,
            held_out=held_out,
            alpha=alpha,
            heads=heads,
        )


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


class HeadDescent:
    """A descent on a head distribution: matrices of all hops, scales, penalty and their moments.

    `step` moves it, `distribution` is where it is.

    Every step draws fresh noise and, of many samples, a fresh part: what falls is the error of the
    head distribution, not that of some heads of it. It sees ``rows`` of the samples. ``start`` has
    the matrices of every hop, the means of the last one last.
    """

    def __init__(
        self,
        samples: DescentSamples,
        rows: Int[np.ndarray, " s"],
        start: Sequence[np.ndarray],
        alpha: float,
        plan: LearningPlan,
        began: FittedHeads | None = None,
    ) -> None:
        """Descend from ``start``, or from a head distribution that was reached from there.

        The schedule of learning rates goes on where that one was, at its number of steps.
        """
        self.samples = samples
        self.rows = rows
        self.plan = plan
        self.anchors = list(start)
        self.log_alpha = math.log(alpha)
        self.count = 0
        self.steps_before = 0
        if began is not None:
            self.steps_before = began.steps

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
        self.adams = [Adam() for _ in start]
        self.adam_of_scales = Adam()
        self.adam_of_penalty = Adam()

        # if steps are not computed by the host, helper threads prepare the next steps while the
        # device computes
        self.prepared: deque[Future[tuple[DescentPart, np.ndarray]]] = deque()
        self.helpers: ThreadPoolExecutor | None = None
        if self.samples.steps_on_device:
            self.helpers = ThreadPoolExecutor(_STEPS_AHEAD)

    def stop(self) -> None:
        """End the helper threads, and drop the steps that they have prepared."""
        if self.helpers is not None:
            self.helpers.shutdown(cancel_futures=True)
            self.helpers = None
        self.prepared.clear()

    def distribution(self, *, steps: int = 0) -> FittedHeads:
        """The head distribution of the running averages; ``steps`` is what it says it took."""
        query_scales = None
        key_scales = None
        if self.plan.settings.learn_scales:
            query_scales, key_scales = self._query_and_key(self.average_scales)
        *hops, means = self.averages
        return FittedHeads(
            means_=means,
            scale=self.plan.scale,
            steps=steps,
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
        if self.helpers is None:
            part, noise = self._prepare(self.count)
        else:
            part, noise = self._prepared_by(self.helpers)

        # the gradient at heads W = U + scale · A G B
        query_scales, key_scales = self._query_and_key(self.scales)
        noise *= np.outer(query_scales, key_scales).astype(np.float32)
        gradient = self._gradient(part, noise)

        # Adam moves matrices, scales and penalty; averages follow: the mean of the first five
        # steps, an exponential average later
        rate = plan.settings.rate_at(self.steps_before + self.count, plan.steps)
        self.count += 1
        keep = min(_KEPT_SHARE, 1.0 - 1.0 / self.count)
        for i, in_matrix in enumerate([*gradient.hops, gradient.means]):
            pull = 2.0 * plan.settings.shrinkage * (self.matrices[i] - self.anchors[i])
            self.matrices[i] += self.adams[i].move(in_matrix + pull, rate)
            self.averages[i] = keep * self.averages[i] + (1.0 - keep) * self.matrices[i]
        if gradient.scales is not None:
            self.scales += self.adam_of_scales.move(gradient.scales, rate)
            self.average_scales = keep * self.average_scales + (1.0 - keep) * self.scales
        in_log_alpha = np.array(gradient.log_alpha)
        self.log_alpha += float(self.adam_of_penalty.move(in_log_alpha, _PENALTY_RATE))
        return gradient.error

    def _prepared_by(self, helpers: ThreadPoolExecutor) -> tuple[DescentPart, np.ndarray]:
        """What `_prepare` gives for this step; the helpers go on with the two after it."""
        while len(self.prepared) <= _STEPS_AHEAD:
            count = self.count + len(self.prepared)
            self.prepared.append(helpers.submit(self._prepare, count))
        return self.prepared.popleft().result()

    def _prepare(self, count: int) -> tuple[DescentPart, np.ndarray]:
        """The samples that step number ``count`` sees, and its noise before the scales."""
        plan = self.plan
        n_hops = len(self.matrices)

        # a fresh part of the samples: fewer for more hops, whose steps are more expensive
        n_samples = max(2, round(plan.settings.max_samples / math.sqrt(n_hops)))
        rows = self.samples.task.drawn(self.rows, n_samples, plan.seed + count)
        part = self.samples.part(rows, plan, count)

        # fresh noise: what falls is the error of the head distribution, not of some heads
        shape = (plan.heads_per_step[n_hops], *self.matrices[-1].shape[1:])
        noise = np.random.default_rng([plan.seed, count]).standard_normal(shape, dtype=np.float32)
        noise *= np.float32(plan.scale)
        return part, noise

    def _gradient(self, part: DescentPart, noise: np.ndarray) -> HeadGradient:
        """The gradient on some samples, at a penalty that is raised until float32 carries it."""
        *hops, means = self.matrices
        learn_scales = self.plan.settings.learn_scales
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
