"""LearnedHeads: the law of the heads is descended on, their values are solved for, the heads stay random."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._checks import check_choice, check_count, check_number, check_seed
from keyhole.features.pullback import DIFFERENTIABLE
from keyhole.groups import PooledSets
from keyhole.heads import standard_normals
from keyhole.learned.descent import Descent
from keyhole.learned.fitted import FittedHeads, Step
from keyhole.learned.identity import UnfittedLaw, choose_identity, shrink
from keyhole.learned.judge import Task, held_out_parts, improvement, judge
from keyhole.sets import SetBatch

FEWEST = 50
"""Samples below which nothing is descended on: ten held out could not tell a better law from a worse."""

FEW_SAMPLES = 250
"""Samples below which every one is held out in turn, and a law must be better by two standard errors and not by one:
the best of twenty looks at few samples is a lucky one."""

MOST_TO_JUDGE = 256
"""Heads that a law is judged with at most."""

FEW_AND_MANY = (32, 256)
"""Bounds on the heads of a step when their number is automatic."""

EVERY = 5
"""Steps between looks at the held-out part."""

PATIENCE = 5
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
        batch: SetBatch | PooledSets,
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

        Parameters
        ----------
        batch : SetBatch
            n sets.
        y : array (n,) or (n, t)
            Outputs; one column of ±1 per class to classify.
        activation : {"relu", "softmax", "linear", "square", "exp"}
        fit_intercept : bool
        weights : array (n,), optional
        groups : array (n,), optional
            Samples with the same number are left out, and held out, together.
        seed : int
        n_heads : int, optional
            Heads of the layer that the law is for. Laws are judged with as many (256 at most), because one that makes
            the best of few heads need not be the best for many.
        """
        columns = np.asarray(y, dtype=np.float64).reshape(len(batch), -1)
        task = Task.of(batch, columns, weights, activation, fit_intercept, groups)
        plan = self._plan(len(task), batch.dim, check_seed(seed), n_heads)
        if plan.steps and activation not in DIFFERENTIABLE:
            check_choice(activation, "activation", DIFFERENTIABLE)
        return _fit(task, plan)

    def _plan(self, n: int, dim: int, seed: int, meant_for: int | None) -> _Plan:
        share = check_number(self.validation, "validation", minimum=0.0, exclusive=True)
        if share >= 1:
            raise ValueError(f"`validation` must be a share between 0 and 1: got {share:g}.")
        seconds = None if self.seconds is None else check_number(self.seconds, "seconds", minimum=0.0, exclusive=True)
        n_means, most = check_count(self.n_means, "n_means"), check_count(self.max_samples, "max_samples", minimum=2)
        if isinstance(self.n_heads, str):
            check_choice(self.n_heads, "n_heads", ("auto",))
            n_heads = max(n_means, FEW_AND_MANY[0], min(FEW_AND_MANY[1], -(-2 * min(n, most) // (dim + 1))))
        else:
            n_heads = check_count(self.n_heads, "n_heads")
        if n_heads < n_means:
            raise ValueError(
                f"`n_heads` must be at least `n_means` = {n_means}, so that each has a head: got {n_heads}."
            )
        return _Plan(
            n_means=n_means,
            scale=check_number(self.scale, "scale", minimum=0.0, exclusive=True),
            steps=check_count(self.steps, "steps", minimum=0),
            n_heads=n_heads,
            judge_heads=max(n_heads, min(meant_for or 0, MOST_TO_JUDGE)),
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
class _Plan:
    """The parameters, checked."""

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

    def descent(self, task: Task, start: np.ndarray, alpha: float) -> Descent:
        return Descent(
            task,
            start,
            self.scale,
            alpha,
            learn_scales=self.learn_scales,
            n_heads=self.n_heads,
            rate=self.rate,
            shrinkage=self.shrinkage,
            max_samples=self.max_samples,
            seed=self.seed,
        )

    def scales(self) -> list[float]:
        """Noise to choose from without learning: the paper's, that of the descent, and next to none."""
        return list(dict.fromkeys([0.5, self.scale, 0.1]))

    def start(self, base: FittedHeads) -> np.ndarray:
        """The base mean for all; several need a little of their own to part ways."""
        width = base.means_.shape[1]
        start = np.repeat(base.means_, self.n_means, axis=0)
        if self.n_means > 1:
            own = standard_normals(self.n_means, width * width, self.seed + 1)
            start += self.rate * own.reshape(start.shape)
        return start


def _fit(task: Task, plan: _Plan) -> FittedHeads:
    """Choose the law without learning; descend apart from the held-out part; keep what it says; descend on all."""
    sample = shrink(task, plan.max_samples, plan.seed)
    base, judged = choose_identity(sample, plan.strengths, plan.scales(), plan.n_heads, plan.seed)
    if plan.steps == 0 or len(task) < FEWEST:
        return base
    few = len(task) < FEW_SAMPLES
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
    descent = plan.descent(task, start, judged.alpha)
    for _ in range(best.step):
        descent.step()
    return descent.law(strength=base.strength, steps=best.step, history=tuple(history), reason=doubt)


def _search(
    pairs: list[tuple[Task, Task]], base: FittedHeads, start: np.ndarray, alpha: float, plan: _Plan
) -> tuple[list[Step], float, float]:
    """Descend on what is seen of each pair; return the looks at what is not, the best gain over the base, its error."""
    seen = [shrink(task, 2 * plan.max_samples, plan.seed) for task, _ in pairs]
    unseen = [shrink(task, plan.max_samples, plan.seed) for _, task in pairs]

    def look(laws: list[FittedHeads]) -> tuple[float, np.ndarray]:
        """The leave-one-out error of the laws, each where it is from, and their errors on what they have not seen."""
        judged = [judge(a, law, plan.judge_heads, plan.seed, b) for a, law, b in zip(seen, laws, unseen, strict=True)]
        return _average([j.loo for j in judged], seen), np.concatenate([j.held_out for j in judged])

    weights, groups = _joined([task.weights for task in unseen]), _joined([task.groups for task in unseen])
    loo, before = look([base] * len(pairs))
    history = [Step(0, loo, float(np.average(before, weights=weights)))]
    plan.tell(history[0])
    descents = [plan.descent(task, start, alpha) for task, _ in pairs]
    best, gain, error, since = history[0].held_out_error, 0.0, 0.0, 0
    began = time.monotonic()
    for count in range(1, plan.steps + 1):
        for descent in descents:
            descent.step()
        # the descent on all samples takes as long as one of these
        late = (1 + 1 / len(pairs)) * (time.monotonic() - began) + began > plan.deadline
        if count % EVERY and count < plan.steps and not late:
            continue
        loo, now = look([descent.law() for descent in descents])
        history.append(Step(count, loo, float(np.average(now, weights=weights))))
        plan.tell(history[-1])
        since += 1
        if history[-1].held_out_error < best:
            best, since = history[-1].held_out_error, 0
            gain, error = improvement(before, now, weights, groups)
        if since >= PATIENCE or late:
            break
    return history, gain, error


def _joined(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """One array, or None if there is none."""
    given = [part for part in parts if part is not None]
    return np.concatenate(given) if given else None


def _average(values: list[np.ndarray], tasks: list[Task]) -> float:
    return float(np.average(np.concatenate(values), weights=_joined([task.weights for task in tasks])))
