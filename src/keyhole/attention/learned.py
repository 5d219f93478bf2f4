"""Head distributions that a training set chooses: IdentityHeads, LearnedHeads.

The head distribution is learned, the heads stay random. `search` says how, `descent` has the steps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import one_blas_thread
from keyhole._checks import (
    as_groups,
    check_choice,
    check_count,
    check_no_mask,
    check_number,
    check_seed,
)
from keyhole.attention.backends import backend_for
from keyhole.attention.descent import DescentSettings, HostSamples, LearningPlan
from keyhole.attention.features import DIFFERENTIABLE, narrow
from keyhole.attention.head_error import Task, rows_with_weight
from keyhole.attention.heads import FittedHeads, HeadParameters, Pairs
from keyhole.attention.hops import Ages, Start
from keyhole.attention.search import (
    SCREENING_STEPS,
    Learned,
    Screening,
    choose_identity,
    held_out_turns,
    learn,
    screen,
)
from keyhole.data.sets import SampleBatch


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
    The first strength and scale are preferred: others replace them only if their leave-one-out
    error is lower by more than one standard error of the paired difference.

    Parameters
    ----------
    strengths : sequence of float
        c to choose from, the preferred one first.
    scales : sequence of float
        Standard deviations to choose from, the preferred one first.
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
        groups: Sequence[Any] | np.ndarray | None = None,
        seed: int = 0,
    ) -> FittedHeads:
        """Choose; return a head distribution to sample from. The estimators call this first."""
        task = Task.of(
            batch=batch,
            columns=check_outputs(y).reshape(len(batch), -1),
            weights=weights,
            activation=activation,
            fit_intercept=fit_intercept,
            groups=as_groups(groups, batch, weights),
        )
        max_samples = check_count(self.max_samples, "max_samples")
        return choose_identity(
            HostSamples(task),
            task.drawn(np.arange(len(task)), max_samples, seed),
            strengths=_numbers(self.strengths, "strengths"),
            scales=_positive_numbers(self.scales, "scales"),
            n_heads=check_count(self.n_heads, "n_heads"),
            seed=seed,
            pairs=self.pairs,
        )


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


MIN_HEADS_TO_JUDGE = 32
MAX_HEADS_TO_JUDGE = 256
"""Bounds on the heads that give four times as many features as samples. A head distribution is
judged with that many heads, or with those of the layer if these are fewer; never with fewer than a
step has."""

MIN_HEADS_PER_STEP = 16
MAX_HEADS_PER_STEP = 256
"""Bounds on the heads of a step when their number is automatic; of several hops the last has the
larger matrices, and the lower bound is shared out among them."""

MAX_HOPS = 3
"""Hops that are tried when their number is automatic."""


class LearnedHeads(UnfittedHeads):
    """Heads W_m = U_k + scale·A G_m B, k = m mod n_means, fitted to the training set.

    The means U and the diagonal matrices A and B are fitted. docs/explanation/learned_heads.md
    explains how, and when not to use it.

    The values of random heads are solved for in closed form, and so are the n fits that each leave
    a sample out. So the leave-one-out error is a function of the head distribution alone. Adam
    follows its exact gradient (variable projection). Every step draws new noise G, so that a
    distribution is learned, not a particular set of heads.

    Several hops are for questions that need two or more facts, each of which leads to the next. A
    hop before the last has softmax weights with a learned matrix, and extends the query by what it
    finds. The random heads are those of the last hop.

    A part of the training set is kept out of every descent. It decides which start, how many hops
    and how many steps are best, and whether to keep the result. Then a few more steps use all
    samples. Below 300 samples several descents leave out a part each, so that every sample is held
    out once, and a new descent uses all samples.

    Parameters
    ----------
    n_means : int
        Number of means K. Head m has mean m mod K.
    hops : int or "auto"
        Number of hops. "auto" tries 1, 2 and 3. After a fifth and two fifths of the steps the
        better half of the descents continues, at least two. Of those that run to their end, the one
        with the fewest hops is kept that the best does not beat by more than one standard error on
        the held-out part (two below 300 samples). Without a query there is one hop.
    patterns : int
        Number of things P that each hop before the last finds at once.
    scale : float
        Standard deviation of the entries around the means.
    max_iter : int
        Steps of a descent that nothing else beats, unless its held-out error diverges, or is below
        2 % of the variance and hardly falls any more. 0 chooses among multiples of the identity
        only.
    validation_fraction : float
        Share of the samples that is held out of each descent.
    verbose : bool
        Print one line for every descent, and one for the choice.

    Notes
    -----
    One step costs n²p + n³ operations for n = min(samples, 600) and p = heads of a step · D, and
    6 n p D_H for the last of H hops, D_H = d_q + (H−1)·P·d + 1. With H hops n is at most 600/√H. A
    step sees at most 256 keys of a set, drawn anew; held-out errors are those of all keys. Up to
    seven descents are begun, until the held-out error is below 2 % of the variance. The result
    is a deterministic function of the data, the parameters and the seed, which is that of the
    estimator. With ``device`` of the estimator a GPU does it, with the same numbers up to the
    rounding of float32.

    The values are optimal for the head distribution. It is kept only if it is better on the
    held-out part than one without learning, by more than two standard errors. The error is not
    convex in the head distribution, so the descent may find a local minimum.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(300, n_keys=4, dim=3, seed=0)
    >>> y = kh.targets.RotatedCorrelation(1.0, dim=3, seed=0)(sets)
    >>> heads = kh.LearnedHeads(hops=1, max_iter=10)
    >>> model = kh.AttentionRegressor(64, heads=heads, random_state=0).fit(sets, y)
    >>> model.heads_.hops, len(model.heads_.history)
    (1, 3)
    """

    def __init__(
        self,
        n_means: int = 2,
        hops: int | Literal["auto"] = "auto",
        patterns: int = 1,
        scale: float = 0.25,
        max_iter: int = 300,
        validation_fraction: float = 0.2,
        verbose: bool = False,
    ) -> None:
        self.n_means = n_means
        self.hops = hops
        self.patterns = patterns
        self.scale = scale
        self.max_iter = max_iter
        self.validation_fraction = validation_fraction
        self.verbose = verbose

    def fit(
        self,
        batch: SampleBatch,
        y: Float[np.ndarray, "n ..."],
        *,
        activation: str = "relu",
        fit_intercept: bool = True,
        weights: Float[np.ndarray, " n"] | None = None,
        groups: Sequence[Any] | np.ndarray | None = None,
        seed: int = 0,
        n_heads: int | None = None,
        device: str | None = None,
    ) -> FittedHeads:
        """Learn the head distribution of a training set, on a device if torch has it.

        ``y`` has one column of ±1 per class to classify. Samples of one of the ``groups`` are left
        out, and held out, together. ``n_heads`` is that of the layer that the head distribution is
        for: head distributions are judged with about as many (`MAX_HEADS_TO_JUDGE`), because one
        that makes the best of few heads need not be the best for many.
        """
        learned = self.learn(
            batch,
            y,
            activation=activation,
            fit_intercept=fit_intercept,
            weights=weights,
            groups=as_groups(groups, batch, weights),
            seed=seed,
            n_heads=n_heads,
            device=device,
        )
        assert isinstance(learned.heads, FittedHeads)
        return learned.heads

    def learn(
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
        settings: DescentSettings | None = None,
        starts: tuple[Start, ...] = (),
    ) -> Learned:
        """What `fit` returns, and the samples that were held out, for errors that a new one sees.

        The estimators call this first. ``settings`` are what is otherwise decided inside, and
        ``starts`` those of a `screen` that are affordable: only from these are descents tried.
        """
        outputs = check_outputs(y).reshape(len(batch), -1)
        batch = backend_for(device).placed(batch)
        task = Task.of(
            batch=batch,
            columns=outputs,
            weights=weights,
            activation=activation,
            fit_intercept=fit_intercept,
            groups=groups,
        )
        given_rows = rows_with_weight(len(batch), weights)
        plan = self.plan(task, check_seed(seed), n_heads, device, settings or DescentSettings())
        plan = replace(plan, starts=starts, holds_out_runs=not starts)
        if plan.steps and activation not in DIFFERENTIABLE:
            check_choice(activation, "activation", DIFFERENTIABLE)
        # float32 has digits enough to steer by
        task = task.with_sets(narrow(task.batch.sets, np.dtype(np.float32)))
        with one_blas_thread():
            return learn(task, plan, given_rows)

    def screen(
        self,
        batch: SampleBatch,
        y: Float[np.ndarray, "n t"],
        *,
        activation: str,
        fit_intercept: bool,
        weights: Float[np.ndarray, " n"] | None,
        groups: Int[np.ndarray, " n"] | None,
        seed: int,
        settings: DescentSettings,
        device: str | None = None,
    ) -> Screening | None:
        """Whether learning may pay, from short descents, and from which starts.

        It takes `SCREENING_STEPS` steps from each start. None if all samples are of two groups, of
        which none can be held out.
        """
        batch = backend_for(device).placed(batch)
        task = Task.of(
            batch=batch,
            columns=y,
            weights=weights,
            activation=activation,
            fit_intercept=fit_intercept,
            groups=groups,
        )
        given_rows = rows_with_weight(len(batch), weights)
        plan = self.plan(task, seed, None, device, settings)
        plan = replace(plan, steps=SCREENING_STEPS, holds_out_runs=False)
        task = task.with_sets(narrow(task.batch.sets, np.dtype(np.float32)))
        with one_blas_thread():
            return screen(task, plan, given_rows)

    def plan(
        self,
        task: Task,
        seed: int,
        n_heads: int | None,
        device: str | None,
        settings: DescentSettings,
    ) -> LearningPlan:
        """The parameters, checked, for some samples and a layer of ``n_heads`` heads."""
        n_means = check_count(self.n_means, "n_means")
        hops = self._hops(task.batch)

        # heads: so many for a step, and perhaps more to judge head distributions with
        n_samples = min(len(task), settings.max_samples)
        width = task.batch.dim + 1
        heads_per_step = {}
        for count in hops:
            samples_per_step = min(n_samples, round(settings.max_samples / math.sqrt(count)))
            heads_per_step[count] = settings.heads_per_step or max(
                n_means,
                MIN_HEADS_PER_STEP // count,
                min(MAX_HEADS_PER_STEP, -(-samples_per_step // width)),
            )
        # four times as many features as samples are enough to judge by
        enough = -(-4 * n_samples // width)
        enough = max(MIN_HEADS_TO_JUDGE, min(MAX_HEADS_TO_JUDGE, enough))
        judge_heads = max(*heads_per_step.values(), min(n_heads or 0, enough), n_means)
        return LearningPlan(
            n_means=n_means,
            scale=check_number(self.scale, "scale", minimum=0.0, exclusive=True),
            steps=check_count(self.max_iter, "max_iter", minimum=0),
            hops=tuple(hops),
            patterns=check_count(self.patterns, "patterns"),
            validation=self._validation(),
            settings=settings,
            ages=Ages.of(task.batch.sets),
            heads_per_step=heads_per_step,
            judge_heads=judge_heads,
            seed=seed,
            device=device,
            tell=self._tell,
        )

    def n_held_out_parts(self, n_samples: int) -> int:
        """How many parts of so many samples are held out in turn, each with heads of its own."""
        return held_out_turns(n_samples, self._validation())

    def _validation(self) -> float:
        """The share of samples that is held out, checked."""
        validation = check_number(
            self.validation_fraction, "validation_fraction", minimum=0.0, exclusive=True
        )
        if validation >= 1:
            raise ValueError(
                f"`validation_fraction` must be a share between 0 and 1: got {validation:g}."
            )
        return validation

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

    def _tell(self, text: str) -> None:
        """Report a descent, or a choice, to a caller who wants to hear of it."""
        if self.verbose:
            print(text, file=sys.stderr, flush=True)  # noqa: T201
