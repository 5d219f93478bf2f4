"""Which descent a head distribution is learned by: several starts, judged by held-out samples.

    learn(task, plan)  =  choose among multiples of the identity, without learning
                          → descend from each start, apart from held-out samples; the better half
                            goes on, and again, until two are left, which run to their end
                          → keep the fewest hops that nothing else clearly beats
                          → go on with all samples

A descent is not ended because it has not gained yet: held-out errors often rise before they fall.
Several starts are tried, because one that finds nothing says little of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole._array import blocks, run_threads
from keyhole.attention.backends import DescentSamples, backend_for
from keyhole.attention.descent import HeadDescent, LearningPlan
from keyhole.attention.head_error import Judgement, Task, held_out_parts, improvement
from keyhole.attention.heads import (
    FittedHeads,
    GaussianHeads,
    HeadDistribution,
    Pairs,
    Step,
    identity_mean,
)
from keyhole.attention.hops import CHAIN, Start, UsedCoordinates

MIN_SAMPLES_TO_DESCEND = 50
"""Samples below which nothing is descended on: ten held out could not tell a better head
distribution from a worse.
"""

MIN_SAMPLES_FOR_ONE_SPLIT = 300
"""Samples below which every one is held out in turn: a fifth of fewer could not judge alone."""

STANDARD_ERRORS_TO_LEARN = 2
"""By how many standard errors a learned head distribution must beat the one without learning: the
best of twenty checks is a lucky one.
"""

STANDARD_ERRORS_FOR_A_HOP = 1
STANDARD_ERRORS_FOR_A_HOP_OF_FEW = 2
"""By how many standard errors a descent must beat one of fewer hops; two where every sample is held
out in turn, which are few samples."""

MAX_SAMPLES_TO_START = 400
"""Samples that the head distribution without learning, where a descent starts, is chosen by."""

MAX_FIRST_PENALTY = 0.3
"""The penalty that a descent starts with at most, as a share of the mean squared length of a
feature vector: a start that explains nothing would have an infinite one, and no slope."""

CHECKS = 15
"""How often a descent is checked on the held-out part; never more often than every fifth step."""

DIVERGED = 1.5
"""A descent ends early if its held-out error exceeds so many times the larger of its first one and
that without learning. On the way over a plateau it was seen to rise by up to 1.3 times."""

RACE = (0.2, 0.4, 1.0)
"""Shares of the steps after which descents are compared: of those that are left, the better half
goes on, two at least. On long stories this takes half the time
of running all to their end, and the winner was the same."""

BEGIN_AT_ONCE = 2
"""Descents that begin together. The number is fixed, so that which descents there are does not
depend on the machine."""

LEAST_IN_RACE = 2
"""Descents at least that run to their end, where there are as many."""

SOLVED = 0.02
"""Held-out error, as a share of the variance, that is so small that no further start is tried."""

STALLED = 0.8
"""A descent that has solved the task ends at the first check whose held-out error exceeds this
share of that of its best check before."""

SCREENING_STEPS = 20
"""Steps of a descent that only says whether a longer one may pay. On the tuning tasks of
benchmarks/stories.py every task that 300 steps solve has gained after so many from some start."""

SHARE_TO_GO_ON = 0.25
"""Steps, as a share of those of the best check, that all samples take from the head distribution it
found.
"""


def starts_of(plan: LearningPlan) -> list[Start]:
    """The starts to try, in this order, until one solves the task.

    Those of ``plan.starts``, where a screening has ordered them; else all of them.

    First every number of hops from the same strengths. Then again with hops that move on, and with
    hops that know nothing of ages: on tasks where order means nothing, ages are memorised.
    """
    if plan.starts:
        return list(plan.starts)
    several_hops = [hops for hops in plan.hops if hops > 1]
    starts = [Start(hops) for hops in plan.hops]
    starts += [Start(hops, CHAIN) for hops in several_hops]
    # coordinates that are ignored have noise of scale 0, which takes scales of coordinates
    if plan.ages is not None and plan.settings.learn_scales:
        starts += [Start(hops, CHAIN, ignores_ages=True) for hops in several_hops]
    return starts


@dataclass(frozen=True)
class TaskView:
    """A task in the coordinates that a descent uses, and the plan for them.

    ``samples`` are those of the task where steps are computed.
    """

    task: Task
    plan: LearningPlan
    coordinates: UsedCoordinates
    samples: DescentSamples = field(repr=False)

    @classmethod
    def of(cls, task: Task, plan: LearningPlan, *, ignores_ages: bool) -> TaskView:
        """Without the coordinates that are zero in every sample, and perhaps without ages."""
        sets = task.batch.sets
        coordinates = UsedCoordinates.of(
            sets, plan.ages, has_query=task.batch.has_query, ignore_ages=ignores_ages
        )
        ages = None
        if not ignores_ages:
            ages = coordinates.of_ages(plan.ages)
        in_use = task.with_sets(coordinates.of_sets(sets))
        return cls(
            task=in_use,
            plan=replace(plan, ages=ages),
            coordinates=coordinates,
            samples=backend_for(plan.device).descent_samples(in_use),
        )

    def rows_to_start(self) -> Int[np.ndarray, " r"]:
        """The samples that the head distribution of a start is judged by."""
        count = min(self.plan.settings.max_samples, MAX_SAMPLES_TO_START)
        return self.task.drawn(np.arange(len(self.task)), count, self.plan.seed)

    def choose_identity(self) -> FittedHeads:
        """The head distribution without learning, in the rows that queries meet.

        One hop starts from it, and descents must beat it.
        """
        plan = self.plan
        base = choose_identity(
            self.samples,
            self.rows_to_start(),
            strengths=plan.settings.strengths,
            scales=plan.scales(),
            n_heads=max(plan.heads_per_step.values()),
            seed=plan.seed,
        )
        if not self.task.batch.has_query:
            base = replace(base, means_=base.means_[:, -1:])
        return base

    def among_all(self, distribution: FittedHeads, start: Start, task: Task) -> FittedHeads:
        """A head distribution of this view, in all coordinates of the task itself.

        The entries of the other coordinates are where a descent in all of them would start.
        """
        batch = task.batch
        identity = identity_mean(batch.dim, batch.query_dim, batch.sets.pairs)
        base = FittedHeads(distribution.strength * identity[None], distribution.scale)
        starting_matrices = [base.means_]
        if distribution.chosen == "learned":
            # ages need no start: where they are used the learned entries are written over it, and
            # where they are ignored their entries are zero
            plan = replace(self.plan, ages=None)
            starting_matrices = plan.start(base, task, start)
        return self.coordinates.among_all(distribution, starting_matrices, batch.query_dim)


@dataclass(frozen=True)
class HeldOutPart:
    """Samples that a head distribution has not seen: it was learned on all others.

    ``rows`` are their numbers among the samples that were given.
    """

    heads: FittedHeads
    rows: np.ndarray = field(repr=False)


@dataclass(frozen=True)
class Learned:
    """A head distribution, and what tells how well it does on samples it has not seen.

    ``held_out`` is empty if nothing was learned: leave-one-out is then what a new sample sees.
    """

    heads: HeadDistribution
    held_out: tuple[HeldOutPart, ...] = ()


@dataclass(frozen=True)
class Descended:
    """A descent apart from the held-out samples: its checks on these, and the best of them.

    ``errors`` are those of the best check, one for each held-out sample; ``gain`` is how far their
    mean is below that of the head distribution without learning, and ``standard_error`` is that of
    the gain. ``distributions`` are where the descents were at the best check, one for each held-out
    part; ``alpha`` is the penalty of the first of them.
    """

    start: Start
    view: TaskView = field(repr=False)
    matrices: list[np.ndarray] = field(repr=False)
    history: tuple[Step, ...]
    errors: Float[np.ndarray, " h"] = field(repr=False)
    gain: float
    standard_error: float
    distributions: list[FittedHeads] = field(repr=False)
    alpha: float
    finished: bool = True
    """Whether it was run to its end; others were dropped on the way."""

    @property
    def best(self) -> Step:
        """The best check."""
        return min(self.history, key=lambda step: step.held_out_error)


def held_out_turns(n_samples: int, share: float) -> int:
    """How many parts are held out in turn: one of many samples; of few, parts that make up all.

    >>> held_out_turns(1000, 0.2), held_out_turns(100, 0.2), held_out_turns(100, 0.3)
    (1, 5, 4)
    """
    if n_samples >= MIN_SAMPLES_FOR_ONE_SPLIT:
        return 1
    return math.ceil(1 / share)


@dataclass(frozen=True)
class Split:
    """Which samples each descent does not see, and how many standard errors more hops must gain.

    ``masks`` are all samples that a descent does not see. Of these a check predicts ``judged``, by
    a fit to the samples ``fitted``, which are some that the descent sees. ``weights`` and
    ``groups`` are those of all judged samples, end to end. A descent with more hops than another
    must beat it by ``standard_errors``.
    """

    masks: list[Bool[np.ndarray, " n"]] = field(repr=False)
    fitted: list[Int[np.ndarray, " _"]] = field(repr=False)
    judged: list[Int[np.ndarray, " _"]] = field(repr=False)
    standard_errors: int
    weights: Float[np.ndarray, " h"] | None = field(repr=False)
    groups: np.ndarray | None = field(repr=False)

    @classmethod
    def of(cls, task: Task, plan: LearningPlan) -> Split | None:
        """One held-out part of many samples; of few, every sample is held out in turn.

        None if all samples are of two groups.
        """
        turns = held_out_turns(len(task), plan.validation)
        standard_errors = STANDARD_ERRORS_FOR_A_HOP
        if turns > 1:
            standard_errors = STANDARD_ERRORS_FOR_A_HOP_OF_FEW
        return cls.of_turns(task, plan, turns, standard_errors)

    @classmethod
    def of_turns(
        cls, task: Task, plan: LearningPlan, turns: int, standard_errors: int
    ) -> Split | None:
        """So many parts that are held out in turn; None if all samples are of two groups.

        Of each part ``max_samples`` are judged at most, by a fit to twice as many others.
        """
        max_samples = plan.settings.max_samples
        masks = held_out_parts(len(task), plan.validation, plan.seed, task.groups, turns)
        if not masks:
            return None
        judged = [task.drawn(np.flatnonzero(mask), max_samples, plan.seed) for mask in masks]
        all_judged = np.concatenate(judged)
        return cls(
            masks=masks,
            fitted=[
                task.drawn(np.flatnonzero(~mask), 2 * max_samples, plan.seed) for mask in masks
            ],
            judged=judged,
            standard_errors=standard_errors,
            weights=None if task.weights is None else task.weights[all_judged],
            groups=None if task.groups is None else task.groups[all_judged],
        )


def choose_identity(
    samples: DescentSamples,
    rows: Int[np.ndarray, " r"],
    strengths: Sequence[float],
    scales: Sequence[float],
    n_heads: int,
    seed: int,
    pairs: Pairs | None = None,
) -> FittedHeads:
    """The head distribution whose pair (c, scale) has least leave-one-out error on some samples.

    The first pair stays unless the best one is better by more than one standard error. ``pairs``
    says what W_0 pairs; by default what the batch pairs.
    """
    batch = samples.task.batch
    outcomes = samples.task.outcomes(rows)
    if pairs is None:
        pairs = batch.sets.pairs

    # without a query W_0 meets zeros alone, and all strengths are the same
    if not batch.has_query:
        strengths = strengths[:1]

    # the leave-one-out error of every candidate, the incumbent first
    candidates = [(strength, scale) for scale in scales for strength in strengths]
    judgements = [
        samples.judge(GaussianHeads(strength, scale, pairs), rows, n_heads=n_heads, seed=seed)
        for strength, scale in candidates
    ]
    errors = [float(np.average(each.loo, weights=outcomes.weights)) for each in judgements]

    # the incumbent stays unless the gain exceeds its standard error
    best = int(np.argmin(errors))
    gain, standard_error = improvement(
        judgements[0].loo, judgements[best].loo, outcomes.weights, outcomes.groups
    )
    if gain <= standard_error:
        best = 0

    first_strength, first_scale = candidates[0]
    strength, scale = candidates[best]
    return FittedHeads(
        means_=strength * identity_mean(batch.dim, batch.query_dim, pairs)[None],
        scale=scale,
        chosen="identity" if strength else "zero-mean",
        strength=strength,
        reason=(
            f"leave-one-out error {errors[best]:.3g} of the variance, {errors[0]:.3g} for c = "
            f"{first_strength:g}, scale {first_scale:g}"
        ),
    )


def learn(task: Task, plan: LearningPlan, given_rows: np.ndarray) -> Learned:
    """Learn a head distribution, or return the one without learning if that is no worse.

    ``given_rows`` are the numbers of the samples of the task among those that were given.
    """
    # the head distribution without learning: where one hop starts and what descents must beat
    view = TaskView.of(task, plan, ignores_ages=False)
    base = view.choose_identity()
    if plan.steps == 0 or len(task) < MIN_SAMPLES_TO_DESCEND:
        return Learned(view.among_all(base, Start(1), task))

    # descend apart from held-out samples, which say how many steps help, and whether any do
    split = Split.of(task, plan)
    if split is None:
        reason = f"nothing learned: of two groups none can be held out; {base.reason}"
        plan.tell(reason)
        return Learned(view.among_all(replace(base, reason=reason), Start(1), task))
    descents = race_from_all_starts(task, view, plan, split, base, rounds=RACE)
    finished = [descended for descended in descents if descended.finished]
    best = best_of_fewest_hops(finished, split)
    summary = summary_of(descents, best)
    if best.best.step == 0 or best.gain <= STANDARD_ERRORS_TO_LEARN * best.standard_error:
        reason = (
            f"nothing learned by more than {STANDARD_ERRORS_TO_LEARN} standard errors: {summary}; "
            f"{base.reason}"
        )
        plan.tell(reason)
        unlearned = replace(base, history=best.history, reason=reason)
        return Learned(view.among_all(unlearned, Start(1), task))

    # then descend with all samples, and give all head distributions in all coordinates
    plan.tell(summary)
    final = go_on_with_all(best, anew=len(split.masks) > 1)
    heads = replace(
        final,
        strength=base.strength,
        steps=best.best.step,
        history=best.history,
        reason=summary,
    )
    parts = []
    for distribution, mask in zip(best.distributions, split.masks, strict=True):
        of_part = best.view.among_all(
            replace(distribution, strength=base.strength), best.start, task
        )
        parts.append(HeldOutPart(heads=of_part, rows=given_rows[mask]))
    return Learned(best.view.among_all(heads, best.start, task), tuple(parts))


@dataclass(frozen=True)
class Screening:
    """What short descents found.

    ``starts`` are those that were tried, that of least held-out error first: none is tried any more
    after one that solves the task. ``gains`` says whether any of them beat heads without learning
    by more than two standard errors. ``error`` is the least of these errors,
    as a share of the variance, on the samples ``rows`` of those that were given.
    """

    starts: tuple[Start, ...]
    gains: bool
    error: float
    rows: np.ndarray = field(repr=False)


def screen(task: Task, plan: LearningPlan, given_rows: np.ndarray) -> Screening | None:
    """Descend a little from every start, until one solves the task, and say whether any gained.

    ``given_rows`` are the numbers of the samples of the task among those that were given. None if
    these are of two groups, of which none can be held out.
    """
    view = TaskView.of(task, plan, ignores_ages=False)
    base = view.choose_identity()
    # one held-out part says enough to go on or not, and all starts take all of the few steps
    split = Split.of_turns(task, plan, turns=1, standard_errors=STANDARD_ERRORS_FOR_A_HOP)
    if split is None:
        return None
    descents = race_from_all_starts(task, view, plan, split, base, rounds=(1.0,))
    ordered = sorted(descents, key=lambda descended: descended.best.held_out_error)
    gains = any(
        descended.gain > STANDARD_ERRORS_TO_LEARN * descended.standard_error
        for descended in descents
    )
    return Screening(
        starts=tuple(descended.start for descended in ordered),
        gains=gains,
        error=ordered[0].best.held_out_error,
        rows=given_rows[split.masks[0]],
    )


def race_from_all_starts(
    task: Task,
    view: TaskView,
    plan: LearningPlan,
    split: Split,
    base: FittedHeads,
    rounds: Sequence[float],
) -> list[Descended]:
    """Descents from all starts; after each of the ``rounds`` the better half of them goes on.

    After a descent that solves the task in the first round no other begins; from the next round on
    it alone goes on, because its error may still fall. ``rounds`` are cumulative shares of the
    steps, rounded up to the next check: (0.2, 0.4, 1.0) stops after a fifth, after two fifths and
    at the end. ``view`` has the ages, and ``base`` is its head distribution without learning.

    Descents do not know of each other, and those of a round share the threads. In the first round
    two begin at a time, whatever the number of threads; where the first of them solves the task,
    the second is dropped, as if it had not begun.
    """
    # views of the task by whether ages are ignored; another is made when a start needs it
    views = {False: SplitView.of(view, split)}
    incumbent = views[False].judge_incumbent(base)

    # the first round, in which descents begin, until one has solved the task
    descents: list[RunningDescent] = []
    starts = starts_of(plan)
    try:
        for pair in blocks(len(starts), BEGIN_AT_ONCE):
            for start in starts[pair]:
                if start.ignores_ages not in views:
                    other_view = TaskView.of(task, plan, ignores_ages=start.ignores_ages)
                    views[start.ignores_ages] = SplitView.of(other_view, split)
                descents.append(RunningDescent(start, views[start.ignores_ages], base, incumbent))
            side_by_side(methodcaller("go_on", rounds[0]), descents[pair], view.samples)
            solved = [i for i, descent in enumerate(descents) if descent.has_solved]
            if solved:
                for descent in descents[solved[0] + 1 :]:
                    descent.stop()
                descents = descents[: solved[0] + 1]
                break

        # the better half goes on, or that alone which has solved the task; others free memory
        still_running = descents
        for share in rounds[1:]:
            ranking = sorted(still_running, key=lambda each: each.descended.best.held_out_error)
            n_kept = 1 if ranking[0].has_solved else n_that_go_on(len(still_running))
            for descent in ranking[n_kept:]:
                descent.stop()
            still_running = ranking[:n_kept]
            side_by_side(methodcaller("go_on", share), still_running, view.samples)
    finally:
        # also where a step raised: helper threads would go on to prepare the next ones
        for descent in descents:
            descent.stop()

    # in the order in which they began
    results = []
    for descent in descents:
        result = replace(descent.descended, finished=descent in still_running)
        results.append(result)
        plan.tell(
            f"{result.start.name}: held-out error {result.best.held_out_error:.4f} after "
            f"{result.best.step} of {result.history[-1].step} steps"
        )
    return results


def side_by_side(
    work: Callable[[Any], None], items: Sequence[Any], samples: DescentSamples
) -> None:
    """Do some work on every item, on the threads of `run_threads`.

    One after the other where a device does the work: threads would wait for each other to launch
    its kernels.
    """
    if samples.steps_on_device:
        for item in items:
            work(item)
    else:
        run_threads(work, items)


def n_that_go_on(n_descents: int) -> int:
    """How many descents of a round go on to the next one: the better half, two at least.

    >>> [n_that_go_on(n) for n in (1, 2, 3, 5, 7)]
    [2, 2, 2, 3, 4]
    """
    return max(LEAST_IN_RACE, math.ceil(n_descents / 2))


def race_cost(costs: Sequence[float]) -> float:
    """What a race costs at most, from what each descent would cost if it were run to its end.

    >>> race_cost([10.0])
    10.0
    >>> race_cost([10.0, 10.0, 10.0, 10.0])  # four for 20 %, then two
    24.0
    """
    left = sorted(costs, reverse=True)
    total = 0.0
    share_before = 0.0
    for share in RACE:
        total += (share - share_before) * sum(left)
        share_before = share
        left = left[: n_that_go_on(len(left))]
    return total


@dataclass(frozen=True)
class SplitView:
    """A view of a task, with what descents see of it and what judges them, for each held-out part.

    Descents from several starts share it.
    """

    view: TaskView
    split: Split
    judges: list[Callable[[FittedHeads, float | None], Judgement]] = field(repr=False)
    fitted_weights: Float[np.ndarray, " s"] | None = field(repr=False)

    @classmethod
    def of(cls, view: TaskView, split: Split) -> SplitView:
        """The view of a task, split as said."""
        weights = view.task.weights
        return cls(
            view=view,
            split=split,
            judges=[
                view.plan.judge_of(view.samples, fitted, judged)
                for fitted, judged in zip(split.fitted, split.judged, strict=True)
            ],
            fitted_weights=None if weights is None else weights[np.concatenate(split.fitted)],
        )

    def judge_incumbent(self, base: FittedHeads) -> list[Judgement]:
        """The errors of the head distribution without learning on every held-out part."""
        return [judge_heads(base, None) for judge_heads in self.judges]


class RunningDescent:
    """A descent from one start, apart from each held-out part, that is checked on it.

    All parts step together; a check joins the held-out errors of all. ``descended`` is what it came
    to so far.
    """

    def __init__(
        self,
        start: Start,
        split_view: SplitView,
        base: FittedHeads,
        incumbent: list[Judgement],
    ) -> None:
        view = split_view.view
        split = split_view.split
        plan = view.plan
        self.split_view = split_view
        self.plan = plan

        # the incumbent is step 0
        self.errors_before = np.concatenate([judgement.held_out for judgement in incumbent])
        first_step = _step_of(0, incumbent, split_view.fitted_weights, split.weights)

        # the start, and the penalty that leave-one-out chooses there, bounded so that there is a
        # slope
        matrices = plan.start(base, view.task, start)
        *hops, means = matrices
        at_start = view.samples.judge(
            FittedHeads(means_=means, scale=plan.scale, hops_=tuple(hops)),
            view.rows_to_start(),
            n_heads=max(plan.heads_per_step.values()),
            seed=plan.seed,
        )
        first_alpha = min(at_start.alpha, MAX_FIRST_PENALTY * at_start.spread)
        self.descents = [
            HeadDescent(view.samples, np.flatnonzero(~mask), matrices, first_alpha, plan)
            for mask in split.masks
        ]
        self.count = 0
        self.steps_between_checks = max(5, plan.steps // CHECKS)
        self.limit = np.inf
        self.has_ended = False
        self.descended = Descended(
            start=start,
            view=view,
            matrices=matrices,
            history=(first_step,),
            errors=self.errors_before,
            gain=0.0,
            standard_error=0.0,
            distributions=[base] * len(split.masks),
            alpha=first_alpha,
        )

    def go_on(self, share: float) -> None:
        """Step until this share of all steps is done, unless it ends before.

        It ends where its held-out error diverges, or hardly falls any more and is small.
        """
        n_checks = math.ceil(share * self.plan.steps / self.steps_between_checks)
        until = min(self.plan.steps, n_checks * self.steps_between_checks)
        while self.count < until and not self.has_ended:
            samples = self.split_view.view.samples
            side_by_side(lambda descent: descent.step(), self.descents, samples)
            self.count += 1
            is_last = self.count == self.plan.steps
            if self.count % self.steps_between_checks == 0 or is_last:
                self.check()

    def check(self) -> None:
        """Judge where it is on the held-out parts; of equal errors the earlier is the best."""
        split = self.split_view.split
        distributions = [descent.distribution(steps=self.count) for descent in self.descents]
        judgements = [
            judge_heads(distribution, descent.alpha)
            for judge_heads, distribution, descent in zip(
                self.split_view.judges, distributions, self.descents, strict=True
            )
        ]
        step = _step_of(self.count, judgements, self.split_view.fitted_weights, split.weights)
        history = self.descended.history
        first_step = history[0]
        if len(history) == 1:
            # this is the first check after step 0
            self.limit = DIVERGED * max(first_step.held_out_error, step.held_out_error)
        if step.held_out_error < self.descended.best.held_out_error:
            errors = np.concatenate([judgement.held_out for judgement in judgements])
            gain, standard_error = improvement(
                self.errors_before, errors, split.weights, split.groups
            )
            self.descended = replace(
                self.descended,
                errors=errors,
                gain=gain,
                standard_error=standard_error,
                distributions=distributions,
                alpha=self.descents[0].alpha,
            )
        # an error that is not a number has diverged too
        has_diverged = not step.held_out_error <= self.limit
        # it must have solved the task itself: step 0 is the head distribution without learning
        errors_after_steps = [earlier.held_out_error for earlier in history[1:]]
        best_before = min(errors_after_steps, default=np.inf)
        has_stalled = best_before <= SOLVED and step.held_out_error > STALLED * best_before
        self.has_ended = has_diverged or has_stalled
        self.descended = replace(self.descended, history=(*history, step))

    @property
    def has_solved(self) -> bool:
        """Whether its held-out error is so small that nothing else need be tried.

        A head distribution without learning that solves the task, step 0, ends a race too.
        """
        return self.descended.best.held_out_error <= SOLVED

    def stop(self) -> None:
        """Let go of what only further steps need."""
        for descent in self.descents:
            descent.stop()
        self.descents = []


def best_of_fewest_hops(descents: list[Descended], split: Split) -> Descended:
    """The descent of fewest hops that the best one does not clearly beat.

    Clearly is by more standard errors than ``split.standard_errors``. Of several such descents with
    as many hops it is the best.
    """
    best = min(descents, key=lambda descended: descended.best.held_out_error)
    close = []
    for descended in descents:
        gain, standard_error = improvement(
            descended.errors, best.errors, split.weights, split.groups
        )
        if descended is best or gain <= split.standard_errors * standard_error:
            close.append(descended)
    fewest = min(descended.start.hops for descended in close)
    of_fewest = [descended for descended in close if descended.start.hops == fewest]
    return min(of_fewest, key=lambda descended: descended.best.held_out_error)


def summary_of(descents: list[Descended], best: Descended) -> str:
    """What was gained and what was tried, in one sentence."""
    others = [
        f"{descended.start.name} {descended.best.held_out_error:.3g}"
        for descended in descents
        if descended is not best
    ]
    summary = (
        f"{best.start.name}: held-out error {best.best.held_out_error:.3g} of the variance, "
        f"less by {best.gain:.3g} ± {best.standard_error:.3g} than without learning, in "
        f"{best.best.step} steps"
    )
    if others:
        summary += f" (tried: {', '.join(others)})"
    return summary


def go_on_with_all(best: Descended, *, anew: bool) -> FittedHeads:
    """Descend with all samples, those that were held out too.

    Anew if every sample was held out in turn, because no single descent was judged by all of them;
    else a little further from where the best descent was.
    """
    view = best.view
    rows = np.arange(len(view.task))
    if anew:
        descent = HeadDescent(view.samples, rows, best.matrices, best.alpha, view.plan)
        steps = best.best.step
    else:
        found = best.distributions[0]
        descent = HeadDescent(view.samples, rows, best.matrices, best.alpha, view.plan, found)
        steps = max(1, round(SHARE_TO_GO_ON * best.best.step))
    try:
        for _ in range(steps):
            descent.step()
    finally:
        descent.stop()
    return descent.distribution()


def _step_of(
    count: int,
    judgements: list[Judgement],
    fitted_weights: np.ndarray | None,
    judged_weights: np.ndarray | None,
) -> Step:
    """The average errors after ``count`` steps, over all parts."""
    loo = np.concatenate([judgement.loo for judgement in judgements])
    held_out = np.concatenate([judgement.held_out for judgement in judgements])
    return Step(
        step=count,
        loo_error=float(np.average(loo, weights=fitted_weights)),
        held_out_error=float(np.average(held_out, weights=judged_weights)),
    )
