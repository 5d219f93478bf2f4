"""Laws that a training set chooses: IdentityHeads, LearnedHeads. The law is learned, the heads stay random."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole._checks import check_choice, check_count, check_number, check_seed
from keyhole.attention.features import DIFFERENTIABLE, attention_features, attention_pullback
from keyhole.attention.heads import (
    FittedHeads,
    GaussianHeads,
    HeadDraw,
    HeadLaw,
    Step,
    _Params,
    head_normals,
    identity_mean,
)
from keyhole.data.sets import SampleBatch
from keyhole.ridge.gradient import LooGradient, loo_gradient
from keyhole.ridge.gram import ridge_gram
from keyhole.ridge.problem import RidgeProblem

_HELD_OUT_RUNS = 100
"""The held-out part is made of runs of consecutive samples, a hundredth of them each: neighbours in a table are often
related (questions about one story), and a sample held out beside its sibling is not held out."""


@dataclass(frozen=True)
class Task:
    """Training samples with the options of the layer that will be fitted to them.

    ``columns`` are outputs, centred and scaled so that their mean square is 1; samples of one of the ``groups`` are
    left out together.
    """

    batch: SampleBatch = field(repr=False)
    columns: Float[np.ndarray, "n t"] = field(repr=False)
    weights: Float[np.ndarray, " n"] | None = field(repr=False)
    activation: str
    fit_intercept: bool
    groups: Int[np.ndarray, " n"] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        batch: SampleBatch,
        columns: Float[np.ndarray, "n t"],
        weights: Float[np.ndarray, " n"] | None,
        activation: str,
        fit_intercept: bool,
        groups: Int[np.ndarray, " n"] | None = None,
    ) -> Task:
        """Centre and scale the outputs; drop samples of weight zero."""
        if weights is not None and not (weights > 0).all():
            kept = np.flatnonzero(weights > 0)
            batch, columns, weights = batch[kept], columns[kept], weights[kept]
            groups = None if groups is None else groups[kept]
        centre = np.average(columns, axis=0, weights=weights) if fit_intercept else 0.0
        centred = columns - centre
        size = float(np.sqrt(np.average(np.square(centred).mean(axis=1), weights=weights)))
        return cls(batch, centred / (size or 1.0), weights, activation, fit_intercept, groups)

    def __len__(self) -> int:
        return len(self.columns)

    def take(self, rows: Int[np.ndarray, " r"]) -> Task:
        """Some of the samples."""
        weights = None if self.weights is None else self.weights[rows]
        groups = None if self.groups is None else self.groups[rows]
        return replace(self, batch=self.batch[rows], columns=self.columns[rows], weights=weights, groups=groups)

    def at_most(self, count: int, seed: int) -> Task:
        """At most ``count`` of the samples, drawn at random, in their order."""
        if len(self) <= count:
            return self
        return self.take(np.sort(np.random.default_rng([seed, count]).permutation(len(self))[:count]))

    @property
    def extras(self) -> Float[np.ndarray, "n c"]:
        """Columns of the samples themselves in float32, none of them perhaps."""
        extras = self.batch.extras
        return (np.zeros((len(self), 0)) if extras is None else extras).astype(np.float32)

    def features(self, heads: Float[np.ndarray, "m f e"]) -> Float[np.ndarray, "n p"]:
        """Features in float32: an error only steers the search, and the values are fitted afresh afterwards."""
        return attention_features(self.batch, heads, self.activation, dtype=np.float32)


def held_out_parts(
    n: int, share: float, seed: int, groups: Int[np.ndarray, " n"] | None = None, turns: int = 1
) -> list[Bool[np.ndarray, " n"]]:
    """Disjoint masks of about ``share·n`` samples each: whole groups, or without groups runs of n/100 consecutive ones.

    ``turns`` of them, or as many as there are samples for; never all samples in one.

    >>> sum(held_out_parts(90, 0.2, seed=0, turns=5)).tolist() == [1] * 90
    True
    """
    rng = np.random.default_rng(seed)
    if groups is None:
        groups = np.arange(n) // max(1, n // _HELD_OUT_RUNS)
    _, member, counts = np.unique(groups, return_inverse=True, return_counts=True)
    order = rng.permutation(len(counts))
    ends = np.cumsum(counts[order])
    # groups in random order until they have the share, then the next
    part = np.minimum((ends - counts[order]) / (share * n), len(counts)).astype(int)
    masks = [np.isin(member, order[part == turn]) for turn in range(turns)]
    if masks[0].all():
        masks[0] = np.isin(member, order[:-1])
    return [mask for mask in masks if mask.any()]


@dataclass(frozen=True)
class Judgement:
    """Squared errors of a law, sample by sample, averaged over outputs."""

    loo: Float[np.ndarray, " n"] = field(repr=False)
    held_out: Float[np.ndarray, " h"] = field(repr=False)
    alpha: float


def judge(task: Task, law: HeadLaw, n_heads: int, seed: int, held_out: Task | None = None) -> Judgement:
    """Fit the values of ``n_heads`` heads of a law to ``task`` with a penalty by leave-one-out, and predict.

    O(n²p + n³) with p = n_heads · D.
    """
    heads = HeadDraw(law, n_heads, task.batch.dim, seed, task.batch.query_dim).block(0, n_heads)
    features = task.features(heads)
    centre = features.mean(axis=0) if task.fit_intercept else np.zeros(features.shape[1], features.dtype)
    features -= centre
    options: dict[str, Any] = {"fit_intercept": task.fit_intercept, "weights": task.weights, "groups": task.groups}
    gram = features @ features.T
    gram += task.extras @ task.extras.T
    few = None
    if task.groups is not None:
        # a few, from what float32 carries up, will do to compare laws
        few = (float(np.linalg.norm(gram)) or 1.0) * np.geomspace(4e-6, 1.0, 7)
    fit = ridge_gram(gram, RidgeProblem.of(task.columns, few, **options), dtype=np.float64)
    assert fit.left_out is not None
    ahead = np.zeros(0)
    if held_out is not None:
        values = features.T @ fit.coef.astype(features.dtype)
        predicted = (held_out.features(heads) - centre) @ values + fit.intercept
        predicted = predicted + held_out.extras @ (task.extras.T @ fit.coef)
        ahead = np.square(held_out.columns - predicted).mean(axis=1)
    return Judgement(np.square(fit.left_out).mean(axis=1), ahead, fit.alpha)


def improvement(
    before: Float[np.ndarray, " n"],
    after: Float[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"] | None,
    groups: Int[np.ndarray, " n"] | None = None,
) -> tuple[float, float]:
    """Mean of the paired differences before − after, and its standard error; members of a group are not independent."""
    w = np.ones(len(before)) if weights is None else weights
    difference = before - after
    mean = float(np.average(difference, weights=w))
    excess = w * (difference - mean)
    if groups is not None:
        excess = np.bincount(np.unique(groups, return_inverse=True)[1], weights=excess)
    return mean, float(np.sqrt(np.square(excess).sum()) / w.sum())


class UnfittedLaw(_Params):
    """A law that a training set has to choose first, by ``fit``."""

    def sample(
        self, n_heads: int, dim: int, seed: int, query_dim: int | None = None, *, start: int = 0
    ) -> Float[np.ndarray, "m f e"]:
        """Raise: there is no law before a training set has spoken."""
        name = type(self).__name__
        raise ValueError(
            f"{name} has no heads before it has seen a training set. Pass it as `law` to kh.AttentionRegressor or "
            f"kh.AttentionClassifier, which fit it first; or call {name}(…).fit(sets, y) and use the law that returns."
        )


class IdentityHeads(UnfittedLaw):
    """Heads W = c·W_0 + scale·G whose strength c, and scale, are chosen by leave-one-out on the training set.

    W_0 = [[I, 0], [0, 0]], so that the mean score is c·<x_0, x_i>: keys that resemble the query. The first pair
    is the incumbent: another takes its place only if its leave-one-out error is lower by more than a standard
    error of the difference, sample by sample.

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
        What W_0 pairs: by default what the training sets pair (``SetBatch.pairs``), else coordinate i of both, for as
        many as both have.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(300, n_keys=5, dim=6, seed=0)
    >>> y = kh.targets.Correlation(3, dim=6)(sets)
    >>> model = kh.AttentionRegressor(100, law=kh.IdentityHeads(), random_state=0).fit(sets, y)
    >>> model.law_.chosen, model.law_.strength > 0
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
        """Choose; return a law to sample from. The estimators call this first."""
        task = Task.of(
            batch, np.asarray(y, dtype=float).reshape(len(batch), -1), weights, activation, fit_intercept, groups
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
    task: Task, strengths: Sequence[float], scales: Sequence[float], n_heads: int, seed: int, pairs: Any = None
) -> tuple[FittedHeads, Judgement]:
    """The pair of least leave-one-out error if that is beyond doubt, else the first pair; ``pairs`` or the batch's."""
    pairs = task.batch.sets.pairs if pairs is None else pairs
    laws = [(c, s) for s in scales for c in strengths]
    judged = [judge(task, GaussianHeads(c, s, pairs), n_heads, seed) for c, s in laws]
    best = int(np.argmin([np.average(j.loo, weights=task.weights) for j in judged]))
    gain, error = improvement(judged[0].loo, judged[best].loo, task.weights, task.groups)
    if gain <= error:
        best = 0
    strength, scale = laws[best]
    identity = identity_mean(task.batch.dim, task.batch.query_dim, pairs)
    reason = (
        f"leave-one-out error {np.average(judged[best].loo, weights=task.weights):.3g} of the variance, "
        f"{np.average(judged[0].loo, weights=task.weights):.3g} for c = {laws[0][0]:g}, scale {laws[0][1]:g}"
    )
    chosen = "identity" if strength else "zero-mean"
    law = FittedHeads(strength * identity[None], scale, chosen, strength, reason=reason)
    return law, judged[best]


def _numbers(values: Any, name: str) -> list[float]:
    if np.ndim(values) != 1 or len(values) == 0:
        raise ValueError(f"`{name}` must be a sequence of at least one number: got {values!r}.")
    minimum = 0.0 if name == "scales" else -np.inf
    return [check_number(v, f"{name}[{i}]", minimum=minimum, exclusive=name == "scales") for i, v in enumerate(values)]


_KEPT_SHARE = 0.8
"""Share of the running average of the means that a step keeps: about five steps, enough to calm fresh noise."""

_MAX_RAISES = 60
"""How often a penalty that float32 cannot carry is raised by a factor e: 26 decades."""


@dataclass(frozen=True)
class LawGradient:
    """The leave-one-out error of some heads, and its gradient in their law.

    ``means`` is (K, D_q, D); ``scales`` (D_q + D,), in the logarithms of the scales of query and key, or None.
    """

    left_out: LooGradient
    means: Float[np.ndarray, "k f e"] = field(repr=False)
    scales: Float[np.ndarray, " g"] | None = field(repr=False)


def gradient_in_law(
    task: Task,
    means: Float[np.ndarray, "k f e"],
    noise: Float[np.ndarray, "m f e"],
    alpha: float,
    dtype: str = "float32",
    *,
    scales: bool = False,
) -> LawGradient:
    """The leave-one-out error of heads W_m = means[m mod K] + noise_m, and its gradient in their law.

    Values are solved for, not descended on: the error is that of ridge at penalty ``alpha``, a function of the Gram
    matrix ΦΦᵀ alone. O(n²p + n³ + tokens·p) for p = M·D. Where noise_ij is a_i b_j times something fixed, the gradient
    in log a_i is Σ_mj ∂E/∂W_mij noise_mij, and that in log b_j the sum over m and i.
    """
    heads = (noise + means[np.arange(len(noise)) % len(means)]).astype(dtype)
    features = attention_features(task.batch, heads, task.activation, dtype=dtype)
    if task.fit_intercept:  # the intercept makes up for it, and float32 keeps its digits
        features -= features.mean(axis=0)
    gram = features @ features.T
    gram += (task.extras @ task.extras.T).astype(dtype)
    options: dict[str, Any] = {"fit_intercept": task.fit_intercept, "weights": task.weights, "groups": task.groups}
    found = loo_gradient(gram, task.columns, alpha, **options)
    cotangent = found.gram.astype(dtype) @ features
    cotangent *= 2
    n_means = len(heads) if scales else len(means)
    pulled = attention_pullback(task.batch, heads, cotangent, task.activation, n_means=n_means).astype(np.float64)
    if not scales:
        return LawGradient(found, pulled, None)
    moved = pulled * noise
    in_means = np.zeros(means.shape)
    np.add.at(in_means, np.arange(len(heads)) % len(means), pulled)
    return LawGradient(found, in_means, np.concatenate([moved.sum(axis=(0, 2)), moved.sum(axis=(0, 1))]))


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
        return np.asarray(-self.rate * mean / (size + 1e-12))


class LawDescent:
    """A descent on the law of heads: means, scales, penalty and their moments; `step` moves it, `law` is where it is.

    Every step draws fresh noise and, of many samples, a fresh part: what falls is the error of the law, not that
    of some heads of it.
    """

    def __init__(self, task: Task, start: Float[np.ndarray, "k f e"], alpha: float, plan: LearningPlan) -> None:
        self.task, self.plan, self.means, self.anchor = task, plan, start.copy(), start
        self.log_alpha = math.log(alpha)
        self.scales = np.zeros(sum(start.shape[1:]))  # logarithms, of the query's and of the key's coordinates
        self.adam, self.adam_of_scales, self.penalty = Adam(plan.rate), Adam(plan.rate), Adam(0.1)
        self.count = 0
        self.average = start.copy()
        self.average_scales = self.scales.copy()

    def law(self, **about: Any) -> FittedHeads:
        """The law of the running averages."""
        query, key = self._parts(self.average_scales) if self.plan.learn_scales else (None, None)
        return FittedHeads(self.average, self.plan.scale, **about, query_scales_=query, key_scales_=key)

    def _parts(self, scales: Float[np.ndarray, " g"]) -> tuple[np.ndarray, np.ndarray]:
        """The scales of the query and of the key, out of their logarithms."""
        rows = self.means.shape[1]
        return np.exp(scales[:rows]), np.exp(scales[rows:])

    def step(self) -> float:
        """One step; returns the leave-one-out error before it."""
        plan, batch = self.plan, self.task.batch
        start = self.count * plan.n_heads
        noise = plan.scale * head_normals(plan.n_heads, batch.dim, plan.seed, batch.query_dim, start=start)
        noise *= np.outer(*self._parts(self.scales))
        part = self.task.at_most(plan.max_samples, plan.seed + self.count)
        found = self._gradient(part, noise)
        self.count += 1
        back = plan.rate * plan.shrinkage
        self.means += self.adam.move(found.means)
        self.means -= back * (self.means - self.anchor)
        if found.scales is not None:
            self.scales += self.adam_of_scales.move(found.scales)
            self.scales -= back * self.scales
        self.log_alpha += float(self.penalty.move(np.array(found.left_out.log_alpha)))
        keep = min(_KEPT_SHARE, 1.0 - 1.0 / self.count)
        self.average = keep * self.average + (1.0 - keep) * self.means
        self.average_scales = keep * self.average_scales + (1.0 - keep) * self.scales
        return found.left_out.error

    def _gradient(self, part: Task, noise: np.ndarray) -> LawGradient:
        for _ in range(_MAX_RAISES):
            try:
                alpha = math.exp(self.log_alpha)
                return gradient_in_law(part, self.means, noise, alpha, scales=self.plan.learn_scales)
            except np.linalg.LinAlgError:  # below the floor of float32: a little more penalty
                self.log_alpha += 1.0
        raise ValueError(
            "the Gram matrix of the features is not finite in float32, so a law cannot be descended on. "
            "Scale the tokens down, for example with scaling='standard'."
        )


MIN_SAMPLES_TO_DESCEND = 50
"""Samples below which nothing is descended on: ten held out could not tell a better law from a worse."""

MIN_SAMPLES_FOR_ONE_SPLIT = 250
"""Samples below which every one is held out in turn, and a law must be better by two standard errors and not by one:
the best of twenty looks at few samples is a lucky one."""

MAX_HEADS_TO_JUDGE = 256
"""Heads that a law is judged with at most."""

MIN_HEADS_PER_STEP, MAX_HEADS_PER_STEP = 32, 256
"""Bounds on the heads of a step when their number is automatic."""

STEPS_BETWEEN_LOOKS = 5
"""Steps between looks at the held-out part."""

MAX_LOOKS_WITHOUT_GAIN = 5
"""Looks without a new best after which a descent ends."""


class LearnedHeads(UnfittedLaw):
    """Heads W_m = U_k + scale·A G_m B, k = m mod n_means, whose law (U, A and B) is fitted to the training set.

    The values of random heads are solved for in closed form, and so are the n fits that each leave a sample out;
    what remains is a function of the means alone, the leave-one-out error, and Adam descends it along its exact
    gradient (variable projection). Every step draws fresh noise G, so that a law is learned and not a set of
    heads. A part of the training set that the descent never sees says after how many steps to stop, and whether
    to keep the result at all; then all samples descend that many steps. Below 250 samples several descents leave
    out a part each, so that all samples have a say.

    Parameters
    ----------
    n_means : int
        K, the number of means that the heads share out among themselves.
    scale : float
        Standard deviation of the entries around the means.
    steps : int
        Most steps of a descent. 0 chooses among multiples of the identity only.
    n_heads : int or "auto"
        Heads drawn at each step: twice as many features as samples, 32 to 256 heads.
    covariance : {"auto", "diagonal", "none"}
        "diagonal" also learns how far the heads vary in each coordinate of the query (A) and of the key (B), two
        diagonal matrices; "none" keeps them at the identity, which infinitely many heads need. "auto" is "diagonal"
        for finitely many heads.
    learning_rate : float
        Of Adam, in units of entries of W, and of logarithms of A and B.
    shrinkage : float
        Share of the way back to the start, per step and unit of the learning rate.
    strengths : sequence of float
        Multiples c of the identity to start from, chosen by leave-one-out, 0 first; and with them the scale of the
        law if nothing is learned, from 0.5, ``scale`` and 0.1 (softmax weights close to a plain mean).
    validation : float
        Share of the samples that the first descent does not see.
    max_samples : int
        Samples that one step uses, a fresh part if there are more.
    seconds : float, optional
        Time after which to stop, approximately; the result then depends on the machine.
    callback : callable, optional
        Called with a `Step` at every look at the held-out part.
    verbose : bool
        Print those lines.

    Notes
    -----
    Costs n²p + n³ operations a step for n = min(samples, max_samples) and p = n_heads·D. The result is a
    deterministic function of the data, the parameters and the seed, which is that of the estimator.

    Guaranteed: values are optimal for the law at hand, and the law is kept only if it beat the law without
    learning on the held-out part by more than one standard error, two below 250 samples. Not guaranteed: the error
    is not convex in the law, and the descent finds a local minimum.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(300, n_keys=4, dim=3, seed=0)
    >>> y = kh.targets.RotatedCorrelation(1.0, dim=3, seed=0)(sets)
    >>> model = kh.AttentionRegressor(64, law=kh.LearnedHeads(steps=10), random_state=0).fit(sets, y)
    >>> model.law_.means_.shape, len(model.law_.history)
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
        shrinkage: Any = 0.0,
        strengths: Any = (0.0, 1.0, 3.0),
        validation: Any = 0.2,
        max_samples: Any = 1000,
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
    ) -> FittedHeads:
        """Learn the law of a training set; the estimators call this first.

        ``y`` has one column of ±1 per class to classify. Samples of one of the ``groups`` are left out, and held out,
        together. ``n_heads`` is that of the layer that the law is for: laws are judged with as many (256 at most),
        because one that makes the best of few heads need not be the best for many.
        """
        columns = np.asarray(y, dtype=np.float64).reshape(len(batch), -1)
        task = Task.of(batch, columns, weights, activation, fit_intercept, groups)
        plan = self._plan(len(task), batch.dim, check_seed(seed), n_heads)
        if plan.steps and activation not in DIFFERENTIABLE:
            check_choice(activation, "activation", DIFFERENTIABLE)
        return _fit(task, plan)

    def _plan(self, n: int, dim: int, seed: int, meant_for: int | None) -> LearningPlan:
        share = check_number(self.validation, "validation", minimum=0.0, exclusive=True)
        if share >= 1:
            raise ValueError(f"`validation` must be a share between 0 and 1: got {share:g}.")
        seconds = None if self.seconds is None else check_number(self.seconds, "seconds", minimum=0.0, exclusive=True)
        n_means, most = check_count(self.n_means, "n_means"), check_count(self.max_samples, "max_samples", minimum=2)
        if isinstance(self.n_heads, str):
            check_choice(self.n_heads, "n_heads", ("auto",))
            wanted = -(-2 * min(n, most) // (dim + 1))  # twice as many features as samples
            n_heads = max(n_means, MIN_HEADS_PER_STEP, min(MAX_HEADS_PER_STEP, wanted))
        else:
            n_heads = check_count(self.n_heads, "n_heads")
        if n_heads < n_means:
            raise ValueError(
                f"`n_heads` must be at least `n_means` = {n_means}, so that each has a head: got {n_heads}."
            )
        return LearningPlan(
            n_means=n_means,
            scale=check_number(self.scale, "scale", minimum=0.0, exclusive=True),
            steps=check_count(self.steps, "steps", minimum=0),
            n_heads=n_heads,
            judge_heads=max(n_heads, min(meant_for or 0, MAX_HEADS_TO_JUDGE)),
            learn_scales=check_choice(self.covariance, "covariance", ("auto", "diagonal", "none")) != "none",
            rate=check_number(self.learning_rate, "learning_rate", minimum=0.0, exclusive=True),
            shrinkage=check_number(self.shrinkage, "shrinkage", minimum=0.0),
            strengths=[check_number(c, f"strengths[{i}]") for i, c in enumerate(self.strengths)],
            validation=share,
            max_samples=most,
            deadline=math.inf if seconds is None else time.monotonic() + seconds,
            seconds=seconds or math.inf,
            tell=self._tell(),
            seed=seed,
        )

    def _tell(self) -> Callable[[Step], None]:
        def tell(step: Step) -> None:
            if self.verbose:
                print(  # noqa: T201
                    f"step {step.step:4d}: leave-one-out {step.loo_error:.4f}, held out {step.held_out_error:.4f}",
                    file=sys.stderr,
                    flush=True,
                )
            if self.callback is not None:
                self.callback(step)

        return tell


@dataclass(frozen=True)
class LearningPlan:
    """The parameters of `LearnedHeads`, checked."""

    n_means: int
    scale: float
    steps: int
    n_heads: int
    judge_heads: int
    learn_scales: bool
    rate: float
    shrinkage: float
    strengths: list[float]
    validation: float
    max_samples: int
    deadline: float
    seconds: float
    tell: Callable[[Step], None] = field(repr=False)
    seed: int

    def scales(self) -> list[float]:
        """Noise to choose from without learning: the paper's, that of the descent, and next to none."""
        return list(dict.fromkeys([0.5, self.scale, 0.1]))

    def start(self, base: FittedHeads) -> np.ndarray:
        """The base mean for all; several need a little of their own to part ways."""
        rows, width = base.means_.shape[1:]
        start = np.repeat(base.means_, self.n_means, axis=0)
        if self.n_means > 1:
            start += self.rate * head_normals(self.n_means, width - 1, self.seed + 1, rows - 1)
        return start


def _fit(task: Task, plan: LearningPlan) -> FittedHeads:
    """Choose the law without learning; descend apart from the held-out part; keep what it says; descend on all."""
    sample = task.at_most(plan.max_samples, plan.seed)
    base, judged = choose_identity(sample, plan.strengths, plan.scales(), plan.n_heads, plan.seed)
    if plan.steps == 0 or len(task) < MIN_SAMPLES_TO_DESCEND:
        return base
    few = len(task) < MIN_SAMPLES_FOR_ONE_SPLIT
    turns = round(1 / plan.validation) if few else 1
    masks = held_out_parts(len(task), plan.validation, plan.seed, task.groups, turns)
    pairs = [(task.take(np.flatnonzero(~mask)), task.take(np.flatnonzero(mask))) for mask in masks]
    start = plan.start(base)
    history, gain, error = _search(pairs, base, start, judged.alpha, plan)
    best = min(history, key=lambda step: step.held_out_error)
    doubt = f"held-out error fell by {gain:.3g} ± {error:.3g} of the variance in {best.step} steps"
    if best.step == 0 or gain <= (2 if few else 1) * error:
        reason = f"nothing learned beyond doubt: {doubt}; {base.reason}"
        return FittedHeads(base.means_, base.scale, base.chosen, base.strength, 0, tuple(history), reason)
    descent = LawDescent(task, start, judged.alpha, plan)
    for _ in range(best.step):
        descent.step()
    return descent.law(strength=base.strength, steps=best.step, history=tuple(history), reason=doubt)


def _search(
    pairs: list[tuple[Task, Task]], base: FittedHeads, start: np.ndarray, alpha: float, plan: LearningPlan
) -> tuple[list[Step], float, float]:
    """Descend on what is seen of each pair; return the looks at what is not, the best gain over the base, its error."""
    seen = [task.at_most(2 * plan.max_samples, plan.seed) for task, _ in pairs]
    unseen = [task.at_most(plan.max_samples, plan.seed) for _, task in pairs]

    def look(laws: list[FittedHeads]) -> tuple[float, np.ndarray]:
        """The leave-one-out error of the laws, each where it is from, and their errors on what they have not seen."""
        judged = [judge(a, law, plan.judge_heads, plan.seed, b) for a, law, b in zip(seen, laws, unseen, strict=True)]
        return _average([j.loo for j in judged], seen), np.concatenate([j.held_out for j in judged])

    weights, groups = _joined([task.weights for task in unseen]), _joined([task.groups for task in unseen])
    loo, before = look([base] * len(pairs))
    history = [Step(0, loo, float(np.average(before, weights=weights)))]
    plan.tell(history[0])
    descents = [LawDescent(task, start, alpha, plan) for task, _ in pairs]
    best, gain, error, since = history[0].held_out_error, 0.0, 0.0, 0
    began = time.monotonic()
    for count in range(1, plan.steps + 1):
        for descent in descents:
            descent.step()
        # the descent on all samples takes as long as one of these
        late = (1 + 1 / len(pairs)) * (time.monotonic() - began) + began > plan.deadline
        if count % STEPS_BETWEEN_LOOKS and count < plan.steps and not late:
            continue
        loo, now = look([descent.law() for descent in descents])
        history.append(Step(count, loo, float(np.average(now, weights=weights))))
        plan.tell(history[-1])
        since += 1
        if history[-1].held_out_error < best:
            best, since = history[-1].held_out_error, 0
            gain, error = improvement(before, now, weights, groups)
        if since >= MAX_LOOKS_WITHOUT_GAIN or late:
            break
    return history, gain, error


def _joined(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """One array, or None if there is none."""
    given = [part for part in parts if part is not None]
    return np.concatenate(given) if given else None


def _average(values: list[np.ndarray], tasks: list[Task]) -> float:
    return float(np.average(np.concatenate(values), weights=_joined([task.weights for task in tasks])))
