"""Heads that are fitted to the training set: one descent on the exact leave-one-out error.

W_m = U_k + scale·A G_m B with k = m mod n_means: means U and the diagonal matrices A and B are
learned, and the matrices of the hops before the last. At every step fresh noise G is drawn, values
are solved for in closed form, and Adam follows the gradient of the leave-one-out error
(gradient.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole._array import one_blas_thread
from keyhole._checks import as_groups, check_choice, check_count, check_number, check_seed
from keyhole.attention.gradient import Task, error_gradient, forward
from keyhole.attention.heads import (
    FittedHeads,
    HeadParameters,
    Step,
    head_normals,
    identity_mean,
)
from keyhole.attention.hops import (
    CHAIN,
    SIMILAR,
    START_NOISE,
    Ages,
    Start,
    newer_first,
    rarity_of,
    rows_of_found_ages,
    starting_hops,
)
from keyhole.data.sets import SampleBatch, SetBatch
from keyhole.registry import ACTIVATIONS
from keyhole.solve.cholesky import fit_gram
from keyhole.solve.gradient import SingularGramError
from keyhole.solve.matrices import as_float64, as_like, on_host
from keyhole.solve.problem import RidgeProblem

MIN_SAMPLES_TO_DESCEND = 50
"""Samples below which nothing is descended on: ten held out could not tell better from worse."""

MAX_SAMPLES = 600
"""Samples that one step uses, a fresh part if there are more; with H hops 1/√H of them."""

MAX_KEYS = 256
"""Keys of a set that one step uses, a fresh part if there are more."""

MAX_JUDGED_HEADS = 256
"""Heads that a head distribution is judged with, at most."""

RATE = 0.05
STEADY_SHARE = 0.6
LAST_RATE = 0.1
"""Learning rate of Adam in units of entries of W: steady for this share of the steps, then falling
linearly to this share of it."""

PENALTY_RATE = 0.1
"""Learning rate of the logarithm of the penalty."""

SHRINKAGE = 1e-4
"""Weight of |U − U_start|², summed over all matrices, beside the error in units of the variance."""

JITTER = 0.1
"""Probability with which, at every step, a while passes before a key whose age is known: it and all
older ones are one age older, so that ages are not memorised."""

STRENGTHS = (0.0, 1.0, 3.0)
"""Multiples of the identity that a single hop may start from; leave-one-out chooses."""

KEPT_SHARE = 0.8
"""Share of the running average of the matrices that a step keeps: about five steps."""

CHECKS = 15
"""How often a descent is checked on the held-out part; never more often than every fifth step."""

DIVERGED = 1.5
"""A descent ends where its held-out error exceeds so many times the larger of its first two."""

SOLVED = 0.02
"""Held-out error, as a share of the variance, that is so small that no other start is tried."""

FIRST_STEPS = 20
"""Steps from every start, after which one must have gained a standard error for any to go on."""

MOST_DESCENTS = 3
"""Descents that run to their end, at most."""

PATIENCE = 6
"""A descent ends after so many checks without a new best: held-out errors often rise at first."""

STALLED = 0.8
"""A descent that has solved the task ends at the first check above so much of the best before."""

STANDARD_ERRORS_TO_LEARN = 2.0
"""By how many standard errors learned heads must beat those without learning to be kept."""

MAX_FIRST_PENALTY = 0.3
"""The penalty that a descent starts with at most, as a share of the mean squared length of φ."""

SHARE_TO_GO_ON = 0.25
"""Steps, as a share of those of the best check, that all samples take from what was found."""

LEAST_SLOPE = 1e-4
"""Share of the largest size of a gradient below which entries hardly move: what is zero but for the
rounding of float32 would otherwise move as far as what matters."""


class LearnedHeads(HeadParameters):
    """Heads W_m = U_k + scale·A G_m B, k = m mod n_means, fitted to the training set.

    docs/explanation/learned_heads.md explains how, and when not to use it. The values of random
    heads are solved for in closed form, and so are the n fits that each leave a sample out. So the
    leave-one-out error is a function of the head distribution alone, and Adam follows its exact
    gradient. Every step draws new noise G: a distribution is learned, not a particular set of
    heads.

    Several hops are for questions that need two or more facts, each of which leads to the next. A
    hop before the last has softmax weights with a learned matrix, and extends the query by what it
    finds. The random heads are those of the last hop.

    A part of the training set is kept out of every descent: it decides which start, how many hops
    and how many steps are best, and whether to keep the result. Then a few more steps use all
    samples.

    Parameters
    ----------
    n_means : int
        Number of means K. Head m has mean m mod K.
    hops : int or "auto"
        Number of hops. "auto" takes a few steps from up to four starts, of one, two and three hops,
        runs three of them to their end, until one has solved the task, and keeps the best on the
        held-out part. Without a query there is one hop.
    patterns : int
        Number of things P that each hop before the last finds at once.
    scale : float
        Standard deviation of the entries around the means.
    max_iter : int
        Steps of a descent, unless its held-out error diverges. 0 chooses among multiples of the
        identity only.
    validation_fraction : float
        Share of the samples that is held out of each descent.
    verbose : bool
        Print one line for every descent, and one for the choice.

    Notes
    -----
    One step costs n²p + 5n³ operations for n = min(samples, 600) and p = heads of a step · D. The
    result is a deterministic function of the data, the parameters and the seed, which is that of
    the estimator. Samples of several sets each are refused, and so is ``query="each"``.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(300, n_keys=4, dim=3, seed=0)
    >>> y = kh.targets.RotatedCorrelation(1.0, dim=3, seed=0)(sets)
    >>> heads = kh.LearnedHeads(hops=1, max_iter=10).fit(sets, y)
    >>> heads.hops, heads.chosen in ("learned", "identity", "zero-mean")
    (1, True)
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

    def sample(self, n_heads: int, dim: int, seed: int, *, start: int = 0) -> np.ndarray:
        """Raise: there are no heads before ``fit``."""
        raise ValueError(
            "LearnedHeads() is fitted to a training set first: pass it to an estimator, whose "
            "heads_ or members_ then have the fitted distribution, or call its fit."
        )

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
        like: FittedHeads | None = None,
    ) -> FittedHeads:
        """Learn the head distribution of a training set.

        ``y`` has one column of ±1 per class to classify. Samples of one of the ``groups`` are left
        out, and held out, together. With heads that were learned from other samples, ``like`` them:
        one descent on all samples, from the start that those chose and of as many steps.
        """
        plan = self._plan(batch, activation, seed)
        task = make_task(
            batch,
            y,
            activation=activation,
            fit_intercept=fit_intercept,
            weights=weights,
            groups=as_groups(groups, batch, weights),
        )
        # two BLAS threads spin on matrices as small as those of a step
        with one_blas_thread():
            if like is not None and like.chosen == "learned":
                return learn_like(task, plan, like)
            return learn(task, plan)

    def _plan(self, batch: SampleBatch, activation: str, seed: int) -> Plan:
        """The parameters, checked."""
        if not batch.is_plain:
            raise ValueError(
                "heads are learned from samples of one set each, averaged, with one query: these "
                "have several sets, sums, or every row as a query. Use pooling='mean' and "
                "query='given' or 'mean', or heads=None."
            )
        record = ACTIVATIONS[check_choice(activation, "activation", tuple(ACTIVATIONS))]
        if record.slope is None:
            raise ValueError(
                f"`activation` must have a slope for heads to be learned: got {activation!r}. Use "
                "'relu' or 'softmax'."
            )
        hops: tuple[int, ...] = (1,)
        has_query = batch.sets.query is not None
        if isinstance(self.hops, str):
            check_choice(self.hops, "hops", ("auto",))
            hops = (1, 3, 2) if has_query else (1,)
        else:
            hops = (check_count(self.hops, "hops"),)
            if hops[0] > 1 and not has_query:
                raise ValueError(
                    "`hops` extend a query, and these sets have none: use hops=1, or give them one."
                )
        share = check_number(
            self.validation_fraction, "validation_fraction", minimum=0.0, exclusive=True
        )
        if share >= 0.5:
            raise ValueError(f"`validation_fraction` must be below 0.5: got {share:g}.")
        return Plan(
            n_means=check_count(self.n_means, "n_means"),
            hops=hops,
            patterns=check_count(self.patterns, "patterns"),
            scale=check_number(self.scale, "scale", minimum=0.0, exclusive=True),
            steps=check_count(self.max_iter, "max_iter", minimum=0),
            validation=share,
            seed=check_seed(seed),
            ages=Ages.of(batch.sets) if has_query else None,
            tell=_say if self.verbose else _nothing,
        )


@dataclass(frozen=True)
class Plan:
    """The parameters of `LearnedHeads`, checked, and the ages of keys if they have any."""

    n_means: int
    hops: tuple[int, ...]
    patterns: int
    scale: float
    steps: int
    validation: float
    seed: int
    ages: Ages | None
    tell: Callable[[str], None] = field(repr=False)

    def starts(self) -> list[Start]:
        """Where descents begin, in the order in which they are tried."""
        starts = []
        for hops in self.hops:
            # of two hops each moves on from what the first found; more look for what is alike
            strengths = CHAIN if hops == 2 else SIMILAR
            starts.append(Start(hops, strengths))
        if len(starts) > 1 and self.ages is not None:
            # where order means nothing, ages would be memorised
            starts.append(Start(3, CHAIN, ignores_ages=True))
        return starts

    def rate_at(self, count: int) -> float:
        """The learning rate of step number ``count``, from 0."""
        progress = min(1.0, count / max(1, self.steps))
        past_steady = max(0.0, progress - STEADY_SHARE) / (1.0 - STEADY_SHARE)
        return RATE * (1.0 - (1.0 - LAST_RATE) * past_steady)


def make_task(
    batch: SampleBatch,
    y: Float[np.ndarray, "n ..."],
    *,
    activation: str,
    fit_intercept: bool,
    weights: Float[np.ndarray, " n"] | None,
    groups: Int[np.ndarray, " n"] | None,
) -> Task:
    """Prepared samples in float32, outputs in units of their spread."""
    outputs = np.asarray(y, dtype=np.float64).reshape(len(batch), -1)
    shares = np.full(len(batch), 1.0 / len(batch)) if weights is None else weights / weights.sum()
    centred = outputs - shares @ outputs if fit_intercept else outputs
    spread = math.sqrt(float((shares @ np.square(centred)).mean()))
    extras = batch.extras
    return Task(
        sets=batch.sets.astype("float32"),
        outputs=centred / (spread if spread > 0 else 1.0),
        weights=weights,
        groups=groups,
        extras=np.zeros((len(batch), 0)) if extras is None else extras,
        activation=activation,
        fit_intercept=fit_intercept,
    )


def learn(task: Task, plan: Plan) -> FittedHeads:
    """Learn a head distribution, or return the one without learning if that is no worse."""
    base = best_without_learning(task, plan)
    mask = held_out_mask(task, plan)
    if plan.steps == 0 or len(task) < MIN_SAMPLES_TO_DESCEND or mask is None:
        return base.distribution(reason="nothing learned: too few samples, steps or groups")

    # a few steps from every start, apart from the held-out samples
    seen = task[np.flatnonzero(~mask)]
    rng = np.random.default_rng([plan.seed, 5])
    unseen = at_most(task[np.flatnonzero(mask)], MAX_SAMPLES, rng)
    before = judge(base.distribution(), seen, unseen, plan, None)
    descents = [Descent(seen, start, base, plan) for start in plan.starts()]
    for descent in descents:
        descent.begin(before)
        descent.run(unseen, min(FIRST_STEPS, plan.steps))

    # where none has gained by as much as its noise, more steps seldom do
    gains = [has_gained(before, descent, unseen, standard_errors=1.0) for descent in descents]
    if not any(gains):
        reason = f"nothing gained by learning in {FIRST_STEPS} steps"
        plan.tell(reason)
        longest = max(descents, key=lambda descent: descent.count)
        return base.distribution(reason=reason, history=tuple(longest.history))

    # else the best go on, until one has solved the task
    order = sorted(descents, key=lambda descent: descent.history[-1].held_out_error)
    descents = [descent for descent in descents if descent in order[:MOST_DESCENTS]]
    for descent in descents:
        descent.run(unseen, plan.steps)
        plan.tell(f"{descent.start.name}: held-out error {descent.best_error:.3g} of the variance")
        if descent.best_error <= SOLVED:
            break
    best = best_of_fewest_hops(descents, unseen)

    # is it better, by more than its noise?
    gain, standard_error = improvement(before.held_out, best.best_errors, unseen)
    summary = (
        f"{best.start.name}, held-out error {best.best_error:.3g} of the variance, less by "
        f"{gain:.3g} ± {standard_error:.3g} than without learning, in {best.best.steps} steps"
    )
    if not has_gained(before, best, unseen, STANDARD_ERRORS_TO_LEARN):
        reason = f"nothing gained by learning: {summary}"
        plan.tell(reason)
        return base.distribution(reason=reason, history=tuple(best.history))

    # a few more steps with all samples
    plan.tell(summary)
    final = Descent(task, best.start, base, plan)
    final.go_on_from(best)
    for _ in range(round(SHARE_TO_GO_ON * best.best.steps)):
        final.step()
    return replace(
        final.distribution(),
        steps=best.best.steps,
        history=tuple(best.history),
        reason=summary,
        strength=base.strength,
    )


def learn_like(task: Task, plan: Plan, found: FittedHeads) -> FittedHeads:
    """Descend on all samples from the start that led to ``found``, as many steps as that took."""
    base = best_without_learning(task, plan)
    assert found.key_scales_ is not None
    ignores_ages = plan.ages is not None and not found.key_scales_[plan.ages.columns].any()
    (start,) = [
        start
        for start in plan.starts()
        if start.hops == found.hops and start.ignores_ages == ignores_ages
    ]
    descent = Descent(task, start, base, plan)
    for _ in range(round((1.0 + SHARE_TO_GO_ON) * found.steps)):
        descent.step()
    return replace(descent.distribution(), steps=found.steps, strength=base.strength)


def has_gained(before: Judgement, descent: Descent, unseen: Task, standard_errors: float) -> bool:
    """Whether a descent is better than heads without learning, by so many standard errors."""
    if descent.best.steps == 0:
        return False
    gain, standard_error = improvement(before.held_out, descent.best_errors, unseen)
    return gain > standard_errors * standard_error


def best_of_fewest_hops(descents: list[Descent], unseen: Task) -> Descent:
    """The best descent; one of more hops must be better by more than a standard error."""
    best, *others = sorted(descents, key=lambda descent: descent.start.hops)
    for descent in others:
        gain, standard_error = improvement(best.best_errors, descent.best_errors, unseen)
        needed = standard_error if descent.start.hops > best.start.hops else 0.0
        if gain > needed:
            best = descent
    return best


@dataclass(frozen=True)
class Base:
    """Heads without learning: a multiple of the identity as mean, and the noise around it."""

    mean: Float[np.ndarray, "1 f e"]
    strength: float
    scale: float

    def distribution(self, *, reason: str = "", history: tuple[Step, ...] = ()) -> FittedHeads:
        """The head distribution."""
        return FittedHeads(
            means_=self.mean,
            scale=self.scale,
            chosen="identity" if self.strength else "zero-mean",
            strength=self.strength,
            reason=reason,
            history=history,
        )


def best_without_learning(task: Task, plan: Plan) -> Base:
    """The multiple of the identity, and the noise, of least leave-one-out error."""
    dim = task.sets.dim
    query_dim = dim if task.sets.query is None else int(task.sets.query.shape[1])
    identity = identity_mean(dim, query_dim, task.sets.pairs)
    strengths = STRENGTHS if task.sets.query is not None else (0.0,)
    rng = np.random.default_rng([plan.seed, 3])
    rows = np.sort(rng.permutation(len(task))[:400])
    part = task[rows]
    bases = []
    errors = []
    for strength in strengths:
        for scale in dict.fromkeys([0.5, plan.scale, 0.1]):
            base = Base(mean=strength * identity[None], strength=strength, scale=scale)
            bases.append(base)
            errors.append(judge(base.distribution(), part, None, plan, None).loo)
    return bases[int(np.argmin(errors))]


def held_out_mask(task: Task, plan: Plan) -> Bool[np.ndarray, " n"] | None:
    """The samples that are held out of descents: whole groups; None of fewer than three groups."""
    rng = np.random.default_rng([plan.seed, 4])
    units = np.arange(len(task)) if task.groups is None else task.groups
    names = np.unique(units)
    if len(names) < 3:
        return None
    count = min(max(1, round(plan.validation * len(names))), len(names) - 2)
    held_out = rng.permutation(names)[:count]
    return np.isin(units, held_out)


@dataclass(frozen=True)
class Judgement:
    """Errors of a head distribution, in units of the variance of the outputs."""

    loo: float
    held_out: Float[np.ndarray, " h"]
    alpha: float
    size: float

    @property
    def error(self) -> float:
        """The mean held-out error."""
        return float(self.held_out.mean())


def judge(
    heads: FittedHeads, seen: Task, unseen: Task | None, plan: Plan, alpha: float | None
) -> Judgement:
    """Fit values to the samples seen, at a penalty or the best one, and predict the others."""
    seen = at_most(seen, 2 * MAX_SAMPLES, np.random.default_rng([plan.seed, 6]))
    n_heads = min(MAX_JUDGED_HEADS, max(32, 2 * len(seen) // (seen.sets.dim + 1)))
    drawn = drawn_heads(heads, n_heads, seen, plan.seed)
    n = len(seen)
    features = as_float64(forward(seen.sets, seen.activation, heads.hops_, drawn).features)
    centre = features.mean(0) if seen.fit_intercept else 0.0
    features = features - centre
    problem = RidgeProblem.of(
        seen.outputs,
        None if alpha is None else [alpha],
        fit_intercept=seen.fit_intercept,
        weights=seen.weights,
        groups=seen.groups,
        draft=True,
    )
    gram = features @ features.T + as_like(seen.extras @ seen.extras.T, features)
    size = float(gram.diagonal().sum()) / n
    fit = fit_gram(gram, problem)
    held_out = np.zeros(0)
    if unseen is not None:
        new = as_float64(forward(unseen.sets, unseen.activation, heads.hops_, drawn).features)
        cross = on_host((new - centre) @ features.T) + unseen.extras @ seen.extras.T
        predicted = cross @ on_host(fit.coef) + fit.intercept
        held_out = np.square(unseen.outputs - predicted).mean(axis=1)
    return Judgement(loo=fit.error, held_out=held_out, alpha=fit.alpha, size=size)


def drawn_heads(
    heads: FittedHeads, n_heads: int, task: Task, seed: int
) -> Float[np.ndarray, "m f e"]:
    """Heads of a distribution in float32; their last rows where sets have no query."""
    rows = heads.means_.shape[1]
    dim = task.sets.dim
    noise = head_normals(n_heads, dim, seed, rows - 1)
    drawn = heads.around(noise)
    if task.sets.query is None:
        drawn = drawn[:, -1:]
    return np.ascontiguousarray(drawn, dtype=np.float32)


def improvement(
    before: Float[np.ndarray, " h"], after: Float[np.ndarray, " h"], task: Task
) -> tuple[float, float]:
    """The mean of paired differences of errors, and its standard error over samples or groups."""
    difference = before - after
    if task.groups is not None:
        _, number = np.unique(task.groups, return_inverse=True)
        difference = np.bincount(number, weights=difference) / np.bincount(number)
    if len(difference) < 2:
        return float(difference.mean()), math.inf
    spread = float(difference.std(ddof=1))
    return float(difference.mean()), spread / math.sqrt(len(difference))


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
        return np.asarray(-rate * mean / (size + LEAST_SLOPE * size.max() + 1e-12))


class Descent:
    """A descent on a head distribution: matrices of all hops, scales and penalty.

    `step` moves it; `run` checks it on held-out samples and remembers the best. Rows of matrices
    that meet nothing but zeros, because no question has the word, stay where they start and take
    no part.
    """

    def __init__(self, task: Task, start: Start, base: Base, plan: Plan) -> None:
        self.start = start
        self.plan = plan
        self.ages = plan.ages
        if plan.ages is not None and start.ignores_ages:
            task = replace(task, sets=plan.ages.left_out(task.sets))
            self.ages = None
        self.task = task
        self.count = 0
        self.first_count = 0

        # the matrices at the start, and the rows of each that queries meet
        self.all_rows = self._matrices_at_start(base)
        columns = used_columns(task.sets)
        self.rows = [rows_in_use(columns, matrix.shape[1], task.sets) for matrix in self.all_rows]
        self.part_of_task = task.with_query_columns(columns)
        self.anchors = [
            matrix[:, rows] for matrix, rows in zip(self.all_rows, self.rows, strict=True)
        ]

        # what moves, and its running averages
        self.matrices = [matrix.copy() for matrix in self.anchors]
        self.averages = [matrix.copy() for matrix in self.anchors]
        self.log_scales = np.zeros(sum(self.matrices[-1].shape[1:]))
        self.average_log_scales = self.log_scales.copy()
        judged = judge(self.distribution(), task, None, plan, None)
        alpha = min(judged.alpha, MAX_FIRST_PENALTY * judged.size)
        self.log_alpha = math.log(max(alpha, 1e-12))
        self.adams = [Adam() for _ in self.matrices]
        self.adam_of_scales = Adam()
        self.adam_of_penalty = Adam()

        # the best check
        self.history: list[Step] = []
        self.best = base.distribution()
        self.best_log_alpha = self.log_alpha
        self.best_error = math.inf
        self.best_errors = np.zeros(0)
        self.limit = math.inf
        self.has_ended = False

    def go_on_from(self, other: Descent) -> None:
        """On from the best check of another descent, at its learning rate."""
        best = other.best
        assert best.query_scales_ is not None
        assert best.key_scales_ is not None
        of_all_rows = (*best.hops_, best.means_)
        self.matrices = [
            matrix[:, rows] for matrix, rows in zip(of_all_rows, self.rows, strict=True)
        ]
        scales = np.concatenate([best.query_scales_[self.rows[-1]], best.key_scales_])
        # where ages are ignored they are zero
        self.log_scales = np.log(np.maximum(scales, 1e-9))
        self.log_alpha = other.best_log_alpha
        self.averages = [matrix.copy() for matrix in self.matrices]
        self.average_log_scales = self.log_scales.copy()
        self.first_count = self.count = best.steps

    def _matrices_at_start(self, base: Base) -> list[np.ndarray]:
        """The matrices of all hops before anything is learned, the means of the last one last."""
        plan = self.plan
        sets = self.task.sets
        query_dim = sets.dim if sets.query is None else int(sets.query.shape[1])
        if self.start.hops > 1:
            rarity = rarity_of(sets) if self.start.ignores_ages else None
            return starting_hops(
                query_dim=query_dim,
                dim=sets.dim,
                hops=self.start.hops,
                patterns=plan.patterns,
                n_means=plan.n_means,
                strengths=self.start.strengths,
                ages=self.ages,
                pairs=sets.pairs,
                seed=plan.seed,
                rarity=rarity,
            )
        means = np.repeat(base.mean, plan.n_means, axis=0)
        means[:, -1] += newer_first(sets.dim, self.ages)
        if plan.n_means > 1:
            # equal means would have equal gradients and stay equal
            noise = head_normals(plan.n_means, sets.dim, plan.seed + 1, query_dim)
            means += START_NOISE * noise
        return [means]

    def begin(self, before: Judgement) -> None:
        """Step 0: the heads without learning are the best so far."""
        self.best_error = before.error
        self.best_errors = before.held_out
        self.history.append(Step(0, before.loo, before.error))

    def run(self, unseen: Task, until: int) -> None:
        """Steps until there are so many, with checks on the samples that it has not seen."""
        steps_between = max(5, self.plan.steps // CHECKS)
        while self.count < until and not self.has_ended:
            self.step()
            if self.count % steps_between == 0 or self.count == until:
                self._check(unseen, steps_between)

    def _check(self, unseen: Task, steps_between: int) -> None:
        """Judge where it is; it ends where it diverges, is in vain, or has solved the task."""
        heads = self.distribution()
        judged = judge(heads, self.task, unseen, self.plan, math.exp(self.log_alpha))
        self.history.append(Step(self.count, judged.loo, judged.error))
        if len(self.history) == 2:
            self.limit = DIVERGED * max(self.best_error, judged.error)
        has_stalled = self.best_error <= SOLVED and judged.error > STALLED * self.best_error
        if judged.error < self.best_error:
            self.best = heads
            self.best_log_alpha = self.log_alpha
            self.best_error = judged.error
            self.best_errors = judged.held_out
        is_in_vain = self.count - self.best.steps >= PATIENCE * steps_between
        self.has_ended = has_stalled or is_in_vain or not judged.error <= self.limit

    def step(self) -> None:
        """One step on a fresh part of the samples, with fresh noise."""
        plan = self.plan
        part = self._part(self.count)
        *hops, means = self.matrices
        n_heads = self._heads_per_step(len(part))
        rows, columns = means.shape[1:]
        rng = np.random.default_rng([plan.seed, self.count])
        noise = rng.standard_normal((n_heads, rows, columns), dtype=np.float32)
        scales = np.exp(self.log_scales)
        noise *= np.float32(plan.scale) * np.outer(scales[:rows], scales[rows:]).astype(np.float32)
        owner = np.arange(n_heads) % plan.n_means
        heads = noise + means[owner].astype(np.float32)
        gradient = self._gradient(part, hops, heads)

        # the gradient in every head is that in its mean, and, times the noise, in the scales
        in_means = np.stack([gradient.heads[owner == k].sum(axis=0) for k in range(plan.n_means)])
        along_noise = gradient.heads * noise
        in_scales = np.concatenate([along_noise.sum(axis=(0, 2)), along_noise.sum(axis=(0, 1))])

        # Adam moves matrices, scales and penalty; running averages follow
        rate = plan.rate_at(self.count)
        self.count += 1
        keep = min(KEPT_SHARE, 1.0 - 1.0 / (self.count - self.first_count))
        for i, in_matrix in enumerate([*gradient.hops, in_means]):
            pull = 2.0 * SHRINKAGE * (self.matrices[i] - self.anchors[i])
            self.matrices[i] = self.matrices[i] + self.adams[i].move(in_matrix + pull, rate)
            self.averages[i] = keep * self.averages[i] + (1.0 - keep) * self.matrices[i]
        self.log_scales = self.log_scales + self.adam_of_scales.move(in_scales, rate)
        self.average_log_scales = keep * self.average_log_scales + (1.0 - keep) * self.log_scales
        move = self.adam_of_penalty.move(np.array(gradient.log_alpha), PENALTY_RATE)
        self.log_alpha += float(move)

    def _gradient(self, part: Task, hops: list[np.ndarray], heads: np.ndarray) -> Any:
        """The gradient, at a penalty that is raised until float32 carries it."""
        narrow_hops = [hop.astype(np.float32) for hop in hops]
        for _ in range(60):
            try:
                return error_gradient(part, narrow_hops, heads, math.exp(self.log_alpha))
            except SingularGramError:
                self.log_alpha += 1.0
        raise ValueError(
            "the Gram matrix of the features is not finite in float32, so that heads cannot be "
            "learned. Scale the tokens down, for example with scaling='standard'."
        )

    def _heads_per_step(self, n_samples: int) -> int:
        """As many features as samples, but from 8 heads, 5 with several hops, to 256."""
        least = 8 if self.start.hops == 1 else 5
        wanted = n_samples // (self.task.sets.dim + 1)
        return int(min(256, max(least, wanted)))

    def _part(self, count: int) -> Task:
        """The samples that step number ``count`` sees, some keys of large sets, a little older."""
        plan = self.plan
        rng = np.random.default_rng([plan.seed, count, 1])
        n_samples = max(2, round(MAX_SAMPLES / math.sqrt(self.start.hops)))
        part = at_most(self.part_of_task, n_samples, rng)
        sets = part.sets
        if int(sets.lengths.max()) > MAX_KEYS:
            sets = sets.with_kept_keys(sampled_keys(sets.lengths, MAX_KEYS, rng))
        if self.ages is not None:
            sets = self.ages.moved(sets, JITTER, rng)
        return replace(part, sets=sets)

    def distribution(self) -> FittedHeads:
        """The head distribution of the running averages."""
        matrices = [matrix.copy() for matrix in self.all_rows]
        for matrix, rows, average in zip(matrices, self.rows, self.averages, strict=True):
            matrix[:, rows] = average
        *hops, means = matrices
        n_rows = len(self.rows[-1])
        query_scales = np.ones(means.shape[1])
        query_scales[self.rows[-1]] = np.exp(self.average_log_scales[:n_rows])
        key_scales = np.exp(self.average_log_scales[n_rows:])
        if self.plan.ages is not None and self.start.ignores_ages:
            self._forget_ages(matrices, query_scales, key_scales)
        return FittedHeads(
            means_=means,
            scale=self.plan.scale,
            steps=self.count,
            query_scales_=query_scales,
            key_scales_=key_scales,
            hops_=tuple(hops),
        )

    def _forget_ages(
        self, matrices: list[np.ndarray], query_scales: np.ndarray, key_scales: np.ndarray
    ) -> None:
        """Zero, in place, what meets the ages of keys and of what was found."""
        ages = self.plan.ages
        assert ages is not None
        dim = self.task.sets.dim
        query_dim = matrices[0].shape[1] - 1
        for matrix in matrices:
            matrix[:, rows_of_found_ages(matrix.shape[1], query_dim, dim, ages)] = 0.0
            matrix[:, :, ages.columns] = 0.0
        query_scales[rows_of_found_ages(len(query_scales), query_dim, dim, ages)] = 0.0
        key_scales[ages.columns] = 0.0


def used_columns(sets: SetBatch) -> Int[np.ndarray, " q"]:
    """The coordinates of queries that are not zero throughout; none where there are no queries."""
    if sets.query is None:
        return np.zeros(0, int)
    return np.flatnonzero(on_host((sets.query != 0).any(0)))


def rows_in_use(
    columns: Int[np.ndarray, " q"], n_rows: int, sets: SetBatch
) -> Int[np.ndarray, " r"]:
    """Of the rows of a matrix: those of the query in use, of what was found, and the last."""
    query_dim = n_rows - 1 if sets.query is None else int(sets.query.shape[1])
    return np.concatenate([columns, np.arange(query_dim, n_rows)])


def at_most(task: Task, count: int, rng: np.random.Generator) -> Task:
    """So many samples at random, in their order; all if there are no more."""
    if len(task) <= count:
        return task
    return task[np.sort(_drawn_rows(task, count, rng))]


def _drawn_rows(task: Task, count: int, rng: np.random.Generator) -> Int[np.ndarray, " r"]:
    """Some samples at random; whole groups, until there are enough."""
    if task.groups is None:
        return rng.permutation(len(task))[:count]
    names, sizes = np.unique(task.groups, return_counts=True)
    order = rng.permutation(len(names))
    n_groups = max(2, int(np.searchsorted(np.cumsum(sizes[order]), count, side="right")))
    return np.flatnonzero(np.isin(task.groups, names[order[:n_groups]]))


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


def _say(words: str) -> None:
    """Print a line at once."""
    print(f"learned heads: {words}", flush=True)  # noqa: T201


def _nothing(words: str) -> None:
    """Print nothing."""
