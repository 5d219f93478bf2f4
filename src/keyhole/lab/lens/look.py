"""The run of a lens: which learners are fitted, on how many sets, within which budget.

`lens` checks what a user gives and calls `look`. `look` poses the problem, chooses the scaling of
tokens, and hands over to `LensRun`, which fits the learners and measures what the four questions
need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._checks import (
    check_choice,
    check_count,
    check_float_array,
    check_no_mask,
    check_number,
    check_seed,
)
from keyhole.attention.activations import ACTIVATIONS, SOFTMAX
from keyhole.attention.descent import DescentSettings
from keyhole.attention.heads import GaussianHeads, HeadDraw
from keyhole.attention.learned import LearnedHeads
from keyhole.choose import choose, procedure_seconds
from keyhole.data.layout import Dataset
from keyhole.data.tokens import POOLINGS, TokenRule, pass_hops
from keyhole.estimators.attention import AttentionRegressor
from keyhole.estimators.classes import TASKS, likely_task
from keyhole.estimators.scores import class_measures, constant_class_guess, probabilities_of
from keyhole.estimators.validation import as_samples
from keyhole.lab.lens.choice import (
    MOST,
    TokenChoice,
    default_estimator_line,
    default_spec,
    estimator_line,
    has_mean,
    make_choice,
)
from keyhole.lab.lens.costs import MOST_PER_STEP, Costs, share_out
from keyhole.lab.lens.findings import (
    Findings,
    HeldOutCurve,
    LensConfig,
    Measured,
    TakenApart,
    answer_all,
    difference,
    judge,
)
from keyhole.lab.lens.fits import (
    Gram,
    held_out_losses,
    held_out_scores,
    learning_curve,
    linear_gram,
    make_gram,
    mlp_gram,
    nested_head_grams,
    pooled_numbers,
    spectrum_of,
    theory_curve,
)
from keyhole.lab.lens.problem import LensProblem, pose
from keyhole.ridge.calibration import class_scores, fit_temperature
from keyhole.solvers.solve import solve_values
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet

MIN_SETS = 40
WIDTH = 1024  # units of the MLP
STATISTICS_RIDGE = "pooled statistics, ridge"
STATISTICS_MLP = "pooled statistics, MLP"
DEFAULT_SETTINGS = "default settings, chosen on each fold"
DEFAULT_FOLDS = 2  # folds on which settings are chosen anew
TWO_HOPS = "head distribution of two hops, learned"
TWO_HOPS_COST = 2  # what learning two hops costs, relative to one

HALVINGS = 2  # how often the samples of a learner are halved before it is skipped
MIN_HALVED = 100  # samples below which they are not halved
STEPS = (100, 50, 25, 10)  # steps of a descent to fall back to
LEARNED_FOLDS = 2  # folds on which a head distribution is learned
HEAD_COUNTS = (4, 16, 64)  # numbers of heads tried, besides the number in use
HEAD_COUNT_FOLDS = 3  # folds on which the number of heads is varied

FOR_LEARNERS = 2 / 3  # share of the budget after the choice; the rest is for the questions
CHEAP = 1 / 10  # share of what remains that a last question may take to be reserved for

MOST_FOR_SPECTRUM = 1000  # samples
MAX_EXAMPLES = 2  # samples taken apart of those that were right, and of those that were wrong


def look(
    data: Dataset, config: LensConfig, progress: Callable[[str], None] = lambda text: None
) -> Findings:
    """Fit everything that the budget allows, and answer the four questions.

    ``progress`` is told what is being done.

    Every learner is ridge on a Gram matrix, its penalty chosen by leave-one-out inside the training
    part. Which learners, on how many sets, follows from sizes and predicted costs before anything
    is fitted: same data, same seed, same findings on any machine. What the budget does not allow is
    skipped and named.
    """
    n = len(data)
    if n < MIN_SETS:
        raise ValueError(
            f"a look needs at least {MIN_SETS} sets to hold some out: got {n}. Gather more."
        )
    progress("choosing how to scale tokens")
    problem = pose(data, config.kind, min(n, config.max_samples), config.seed)
    open_spec = default_spec(problem, config)
    choice = make_choice(problem, config)
    config = replace(config, activation=choice.activation, pooling=choice.rule.pooling)
    keys_per_set = problem.tokens / len(problem)
    if choice.rule.query == "each":  # every key is a query in turn
        keys_per_set = keys_per_set**2
    costs = Costs(
        keys=keys_per_set,
        dim=problem.batch.dim,
        activation=config.activation,
        grouped=problem.groups is not None,
        n_folds=len(problem.folds),
        has_query=problem.has_query or choice.rule.query != "given",
        sets=len(problem.batch) / len(problem),
    )
    return LensRun(data, problem, open_spec, choice, costs, config, progress).run()


def lens(
    X: Any,
    y: Any = None,
    *,
    task: str = "auto",
    groups: Any = None,
    time: Any = None,
    split: Any = None,
    budget: float = 60.0,
    n_heads: int = 256,
    activation: str = "auto",
    pooling: str = "auto",
    seed: int = 0,
) -> Findings:
    """What one attention layer can learn from these sets.

    Learners side by side, and four questions in plain words.

    Parameters
    ----------
    X : SetBatch, SetGroups, or tokens as the estimators take them; or a Dataset
        A Dataset brings its own target and split.
    y : array (n,)
        Numbers or labels.
    task : "auto", "regression" or "classification"
        "auto" takes text, booleans, and few different whole numbers for classes.
    groups : array (n,), optional
        Samples of one group (questions about one story, visits of one patient) are held out
        together.
    time : array (n,) of numbers, optional
        The later half is held out in five parts, each predicted from all that came before it.
    split : array (n,) of 0 and 1, optional
        Where given, the samples of 1 are held out.
    budget : float
        Seconds of one core for fitting, predicted from sizes: same data, same seed, same findings
        on any machine.
    n_heads, activation, pooling
        Of the attention layers, as in `AttentionRegressor`.
    seed : int

    Returns
    -------
    Findings
        With ``table``, ``answers`` and ``save(folder)``.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(120, n_keys=4, dim=3, seed=0)
    >>> found = kh.lens(sets, kh.targets.Correlation(1, dim=3)(sets), budget=5.0, n_heads=32)
    >>> found.answers["attention"].says, found.answers["query"].says
    ('yes', 'yes')
    """
    # the samples, and their target
    if isinstance(X, Dataset):
        data = X
        if y is None:
            y = X.target
    else:
        data = Dataset(as_samples(AttentionRegressor(), X, reset=True), None)
    for name, values in {"y": y, "split": split, "groups": groups, "time": time}.items():
        check_no_mask(values, name)
    target = _check_target(y, len(data.sets))
    kind = check_choice(task, "task", TASKS)
    if kind == "auto":
        kind = likely_task(target)
    if kind == "regression" and target.dtype.kind in "UO":
        raise ValueError(
            f"task='regression' needs a target of numbers: got labels such as {target[0]!r:.40}."
        )

    # what decides which samples are held out; arguments win over what a dataset brings
    split = _per_sample(split, "split", len(target))
    groups = _per_sample(groups, "groups", len(target))
    time = _per_sample(time, "time", len(target))
    if split is not None and not np.isin(split, (0, 1)).all():
        raise ValueError("`split` must be 0 (train) or 1 (test) for every sample.")
    if time is not None:
        time = check_float_array(time, "time").astype(np.float64)
    data = replace(
        data,
        target=target,
        split=data.split if split is None else split,
        groups=data.groups if groups is None else groups,
        time=data.time if time is None else time,
    )

    config = LensConfig(
        kind=kind,
        budget=check_number(budget, "budget", minimum=0.0, exclusive=True),
        n_heads=check_count(n_heads, "n_heads"),
        activation=check_choice(activation, "activation", (*ACTIVATIONS, "auto")),
        pooling=check_choice(pooling, "pooling", (*POOLINGS, "auto")),
        seed=check_seed(seed),
    )
    return look(data, config)


def _check_target(y: Any, n_samples: int) -> np.ndarray:
    """A target as an array of one finite number or one label per sample."""
    target = np.asarray(y)
    if target.shape != (n_samples,):
        raise ValueError(
            f"`y` must have one value per sample: got shape {target.shape} for {n_samples} samples."
        )
    has_good_type = target.dtype.kind in "biufUO"
    if not has_good_type or (target.dtype.kind == "f" and not np.isfinite(target).all()):
        raise ValueError(
            f"`y` must hold finite numbers or labels: got {target.dtype} with "
            f"{target[:3].tolist()!r:.60}."
        )
    return target


def _per_sample(values: Any, name: str, n_samples: int) -> np.ndarray | None:
    """Values as an array of one per sample; None if not given."""
    if values is None:
        return None
    array = np.asarray(values)
    if array.shape != (n_samples,):
        raise ValueError(
            f"`{name}` must have one value per sample: got {array.shape} for {n_samples} samples."
        )
    return array


@dataclass(frozen=True)
class PlannedFit:
    """A way to fit a learner: predicted seconds, samples, and steps if its heads are learned."""

    seconds: float
    n_samples: int
    steps: int = 0


@dataclass(frozen=True, eq=False)
class HeldOutPredictions:
    """Predictions for the samples of a test part, and how good each of them is."""

    classes: Int[np.ndarray, " r"]  # column of the scores that was predicted; 0 for regression
    texts: tuple[str, ...] = field(repr=False)
    margins: Float[np.ndarray, " r"]  # the larger, the better the prediction
    is_right: np.ndarray
    unit: float  # of a score, in units of the target


class LensRun:
    """The state of a run: Gram matrices so far, findings so far, predicted seconds that remain."""

    def __init__(
        self,
        data: Dataset,
        problem: LensProblem,
        open_spec: LayerSpec,
        choice: TokenChoice,
        costs: Costs,
        config: LensConfig,
        progress: Callable[[str], None],
    ) -> None:
        self.problem = problem
        self.open_spec = open_spec
        self.choice = choice
        self.costs = costs
        self.config = config
        self.progress = progress
        self.target = np.asarray(data.target)
        self.folds = range(len(problem.folds))
        self.has_kernel = config.activation != SOFTMAX  # in closed form
        self.remaining = config.budget - choice.seconds
        self.reserved = 0.0  # part of the remaining seconds that is kept for the last questions
        self.grams: dict[str, Gram] = {}
        self.findings = Findings(
            config=config,
            description=data.description,
            n_given=len(data),
            names=data.names,
        )
        if not choice.is_measured:
            self._skip(
                "choosing how to scale tokens: takes too long even on a few sets. They are scaled "
                "to 'standard'."
            )

        # which learners are fitted, and the different numbers of samples among them
        self.plan = self._make_plan()
        self.tiers = sorted({fit.n_samples for fit in self.plan.values()}) or [len(problem)]
        self.findings.n_used = self.tiers[-1]
        self.findings.n_train = problem.trained_on(self.tiers[-1])
        self.findings.settings = self._describe_settings()

    def run(self) -> Findings:
        """Fit the learners, then measure what the questions need, then answer them."""
        self._fit_constant()
        self._fit_pooled()
        self._fit_fixed_heads()
        self._fit_default_settings()
        self._fit_learned_heads()

        # the last two questions are cheap: what they take is kept, however much the others want
        self.reserved = sum(
            seconds for seconds in self._last_seconds() if seconds <= CHEAP * self.remaining
        )
        self._measure_curves()
        self._measure_query()
        self._fit_learned_infinite()
        self._measure_heads()
        self.reserved = 0.0
        self._measure_spectra()
        self._take_examples_apart()

        self.findings.cost = self.config.budget - self.remaining
        self.findings.answers = answer_all(self.findings)
        return self.findings

    # --- the plan and the budget ---

    def _make_plan(self) -> dict[str, PlannedFit]:
        """For every learner that the budget allows, how it is fitted."""
        costs = self.costs
        n_heads = self.config.n_heads
        n = len(self.problem)
        sizes = [n]
        for k in range(1, HALVINGS + 1):
            if n >> k >= MIN_HALVED:
                sizes.append(n >> k)

        # learners on pooled input
        options: dict[str, list[PlannedFit]] = {}
        options[self._pool_name()] = [
            PlannedFit(costs.pooled(size) + costs.folds(size), size) for size in sizes
        ]
        options[STATISTICS_RIDGE] = [
            PlannedFit(costs.pooled(size, statistics=True) + costs.folds(size), size)
            for size in sizes
        ]
        options[STATISTICS_MLP] = [
            PlannedFit(costs.pooled(size, statistics=True, hidden=WIDTH) + costs.folds(size), size)
            for size in sizes
        ]

        # fixed head distributions
        for name, (distribution, heads) in self._fixed_distributions().items():
            biased = has_mean(distribution)
            options[name] = [
                PlannedFit(costs.gram(size, heads, biased) + costs.folds(size), size)
                for size in sizes
            ]

        # the estimator as users get it
        n_chosen = min(DEFAULT_FOLDS, costs.n_folds)
        options[DEFAULT_SETTINGS] = [
            PlannedFit(n_chosen * self._default_seconds(size), size) for size in sizes
        ]

        # learned head distributions: first fewer steps, then fewer samples
        if self.config.steps:
            n_learned = min(LEARNED_FOLDS, costs.n_folds)
            rungs = [(n, min(steps, self.config.steps)) for steps in STEPS]
            rungs += [(size, STEPS[-1]) for size in sizes[1:]]
            learning_costs = {self._learned_name(n_heads): 1}
            if self._sets_have_queries():
                learning_costs[TWO_HOPS] = TWO_HOPS_COST
            for name, multiple in learning_costs.items():
                options[name] = []
                for size, steps in rungs:
                    learning = multiple * costs.learn(size, steps)
                    fitting = costs.gram(size, n_heads) + costs.fit(0.8 * size)
                    seconds = n_learned * (learning + fitting)
                    options[name].append(PlannedFit(seconds, size, steps))

        shares = share_out(
            FOR_LEARNERS * self.remaining,
            {name: [(fit.seconds, fit) for fit in fits] for name, fits in options.items()},
        )
        for name, fits in options.items():
            if name not in shares:
                smallest = fits[-1]
                self._skip(
                    f"{name}: takes about {smallest.seconds:.2g} s even on {smallest.n_samples} "
                    "sets."
                )
        return {name: fit for name, (_, fit) in shares.items()}

    def _default_seconds(self, size: int) -> float:
        """What choosing all settings and fitting takes, on the training part of a fold."""
        train, _ = self.problem.fold(0, size)
        return procedure_seconds(self.open_spec, self.problem.training_set(train))

    def _pool_name(self) -> str:
        if self.config.pooling == "sum":
            return "sum pool, ridge"
        return "mean pool, ridge"

    def _learned_name(self, heads: float) -> str:
        count = "infinite" if math.isinf(heads) else heads
        return f"learned head distribution, {count} heads"

    def _fixed_distributions(self) -> dict[str, tuple[GaussianHeads, float]]:
        """Head distributions that are not learned, with numbers of heads, by names of learners."""
        distributions = {"zero-mean attention": self.choice.zero_mean}
        if self.choice.biased is not None:
            distributions["biased attention"] = self.choice.biased
        counts = {f"{self.config.n_heads} heads": float(self.config.n_heads)}
        if self.has_kernel:
            counts["infinite heads"] = math.inf
        return {
            f"{name}, {count}": (distribution, heads)
            for name, distribution in distributions.items()
            for count, heads in counts.items()
        }

    def _sets_have_queries(self) -> bool:
        """Whether every set brings its own query, which further hops extend."""
        return self.choice.rule.query == "given" and self.problem.sets.has_own_queries

    def _describe_settings(self) -> str:
        """The settings of the run as one sentence of the report."""
        rule = self.choice.rule
        config = self.config
        n_used = self.findings.n_used
        n_given = self.findings.n_given
        if n_used == n_given:
            samples = f"all {n_used} sets"
        else:
            samples = f"{n_used} of {n_given} sets, drawn at random"
        if len(self.tiers) > 1:
            samples += f" ({self.tiers[0]} for the most expensive learner)"
        bias = ""
        if self.choice.biased is not None:
            mean = self.choice.biased.mean
            if isinstance(mean, tuple):
                low, high = mean
                strength = f"{low:g} to {high:g}"
            else:
                strength = f"{mean:g}"
            bias = f", biased heads of strength {strength}"
        if self.choice.is_measured:
            chosen = f"chosen on {MOST} training sets at most"
        else:
            chosen = "the default settings: the budget is too small to choose"
        return (
            f"{samples}, {self.problem.held}; tokens {rule.scaling}, query {rule.query}, pooling "
            f"{rule.pooling}, {config.activation} weights{bias} ({chosen}); {config.n_heads} heads "
            f"where finite; seed {config.seed}; {config.budget:g} predicted seconds"
        )

    def _estimator_line(self, heads: Any, n_heads: float) -> str:
        """The estimator whose heads are these, with all other settings of the run."""
        return estimator_line(
            classifies=self.problem.labels is not None,
            heads=heads,
            n_heads=n_heads,
            activation=self.config.activation,
            rule=self.choice.rule,
        )

    def _skip(self, reason: str) -> None:
        self.findings.skipped.append(reason)

    def _afford(self, step: str, seconds: float) -> bool:
        """Spend the seconds and report the step; or note that too few remain, and return False."""
        available = self.remaining - self.reserved
        if seconds > available:
            self._skip(f"{step}: takes about {seconds:.2g} s, {max(available, 0):.2g} s are left.")
            return False
        self.remaining -= seconds
        self.progress(step)
        return True

    # --- the learners ---

    def _ready(self, size: int, sets: Any = None, rule: TokenRule | None = None) -> Any:
        """The first samples, or those of other sets, scaled by the rule that was chosen."""
        if sets is None:
            sets = self.problem.sets
        if rule is None:
            rule = self.choice.rule
        return rule.apply(sets[:size])

    def _evaluate(self, m: Measured, gram: Gram, folds: Sequence[int] | None = None) -> Measured:
        """Measure held-out losses on all samples of a Gram matrix, and on fewer.

        The smaller numbers of samples are those that other learners were given: learners are
        compared on as many samples as both have.
        """
        if folds is None:
            folds = self.folds
        n = len(gram.matrix)
        for size in [*(tier for tier in self.tiers if tier < n), n]:
            for k in folds:
                train, test = self.problem.fold(k, size)
                if min(len(train), len(test)) > 1:
                    scores, temperature = held_out_scores(gram, self.problem, train, test)
                    m.at.setdefault(size, {})[k] = self.problem.losses(test, scores)
                    if size == n and self.problem.labels is not None:
                        probabilities = probabilities_of(scores, temperature)
                        measures = class_measures(self.problem.labels[test], probabilities)
                        m.class_measures[k] = (measures, len(test))
        return m

    def _fit(self, m: Measured, make: Callable[[int], Gram]) -> None:
        """Fit a learner on as many samples as the plan gives it, if it is in the plan."""
        if m.name not in self.plan:
            return
        planned = self.plan[m.name]
        self._afford(m.name, planned.seconds)
        m.seconds = planned.seconds
        self.grams[m.name] = make(planned.n_samples)
        self.findings.learners.append(self._evaluate(m, self.grams[m.name]))

    def _fit_constant(self) -> None:
        """The mean of the training part, or its most frequent class."""
        m = Measured("a constant guess", "constant", "null")
        for size in self.tiers:
            for k in self.folds:
                train, test = self.problem.fold(k, size)
                if min(len(train), len(test)) > 1:
                    mean = self.problem.columns[train].mean(axis=0)
                    guesses = np.tile(mean, (len(test), 1))
                    m.at.setdefault(size, {})[k] = self.problem.losses(test, guesses)
                    if size == self.tiers[-1] and self.problem.labels is not None:
                        labels = self.problem.labels
                        measures = constant_class_guess(
                            labels[test], labels[train], int(labels.max()) + 1
                        )
                        m.class_measures[k] = (measures, len(test))
        self.findings.learners.append(m)

    def _fit_pooled(self) -> None:
        """Ridge on the mean of the keys, ridge on their statistics, an MLP on these."""

        def numbers(size: int, *, statistics: bool) -> np.ndarray:
            sets = self.problem.sets[:size]
            return pooled_numbers(sets, statistics=statistics, pooling=self.config.pooling)

        def mean_gram(size: int) -> Gram:
            return linear_gram(numbers(size, statistics=False))

        def statistics_gram(size: int) -> Gram:
            return linear_gram(numbers(size, statistics=True))

        def network_gram(size: int) -> Gram:
            return mlp_gram(numbers(size, statistics=True), WIDTH, self.config.seed)

        self._fit(Measured(self._pool_name(), "pooled", "ridge"), mean_gram)
        self._fit(Measured(STATISTICS_RIDGE, "pooled", "statistics"), statistics_gram)
        self._fit(Measured(STATISTICS_MLP, "pooled", "mlp"), network_gram)

    def _fit_fixed_heads(self) -> None:
        """Attention whose heads are drawn from a fixed distribution."""
        for name, (distribution, heads) in self._fixed_distributions().items():
            m = Measured(
                name=name,
                family="attention",
                role="biased" if has_mean(distribution) else "attention",
                distribution=distribution,
                heads=heads,
                line=self._estimator_line(distribution, heads),
            )

            def attention_gram(size: int, m: Measured = m) -> Gram:
                return make_gram(self._ready(size), m.distribution, m.heads, self.config)

            self._fit(m, attention_gram)
        if self.choice.biased is None:
            self._skip("biased attention: without a query there is nothing for keys to resemble.")
        if not self.has_kernel:
            self._skip("infinite heads: softmax weights have no kernel in closed form.")

    def _fit_default_settings(self) -> None:
        """The estimator with default settings, which it chooses on the training part of each fold.

        So "no" means that an estimator without settings does not gain either.
        """
        if DEFAULT_SETTINGS not in self.plan:
            return
        planned = self.plan[DEFAULT_SETTINGS]
        self._afford(DEFAULT_SETTINGS, planned.seconds)
        m = Measured(
            name=DEFAULT_SETTINGS,
            family="attention",
            role="default",
            seconds=planned.seconds,
            line=default_estimator_line(self.open_spec),
        )
        for k in self.folds[:DEFAULT_FOLDS]:
            train, test = self.problem.fold(k, planned.n_samples)
            if min(len(train), len(test)) < 2:
                continue
            data = self.problem.training_set(train)
            choice = choose(self.open_spec, data)
            fitted = choice.fit(data)
            scores = fitted.predict(self.problem.sets[test])
            m.at.setdefault(planned.n_samples, {})[k] = self.problem.losses(test, scores)
            if self.problem.labels is not None:
                left_out_scores = class_scores(fitted.predictions)
                temperature = fit_temperature(left_out_scores, self.problem.labels[train])
                probabilities = probabilities_of(scores, temperature)
                measures = class_measures(self.problem.labels[test], probabilities)
                m.class_measures[k] = (measures, len(test))
        self.findings.learners.append(m)

    def _fit_learned_heads(self) -> None:
        """Attention whose head distribution is learned on the training part of each of two folds.

        Where sets have queries, a distribution of two hops too.
        """
        if self.config.steps == 0:
            self._skip("learned head distribution: none was asked for.")
        roles = {self._learned_name(self.config.n_heads): "learned", TWO_HOPS: "hops"}
        for name, role in roles.items():
            if name not in self.plan:
                continue
            planned = self.plan[name]
            m = Measured(
                name=name,
                family="attention",
                role=role,
                distribution={},  # one for every fold
                heads=self.config.n_heads,
                seconds=planned.seconds,
                line=self._estimator_line(self._learned_heads(name), self.config.n_heads),
            )
            self.remaining -= planned.seconds
            ready = self._ready(planned.n_samples)
            for k in self.folds[:LEARNED_FOLDS]:
                self.progress(f"{name} on fold {k + 1}")
                distribution = self._learn(ready, k, name)
                m.distribution[k] = distribution
                after_hops = ready.with_sets(pass_hops(ready.sets, distribution.hops_))
                self._evaluate(m, make_gram(after_hops, distribution, m.heads, self.config), [k])
            self.findings.learners.append(m)
        learned = self._learned()
        if learned is not None:
            self.findings.distribution = learned.distribution[0]

    def _learn(self, ready: Any, k: int, name: str) -> Any:
        """A head distribution for the training part of a fold.

        Where the same distribution is also shown with infinitely many heads, its noise has one
        scale: the exact kernel needs that.
        """
        settings = DescentSettings(max_samples=MOST_PER_STEP)
        if name != TWO_HOPS:
            settings = DescentSettings(max_samples=MOST_PER_STEP, learn_scales=not self.has_kernel)
        train, _ = self.problem.fold(k, self.plan[name].n_samples)
        learned = self._learned_heads(name).learn(
            ready[train],
            self.problem.columns[train],
            groups=self.problem.groups_of(train),
            activation=self.config.activation,
            seed=self.config.seed,
            settings=settings,
        )
        return learned.heads

    def _learned_heads(self, name: str) -> LearnedHeads:
        """The head distribution, yet to be learned, of a learner by its name."""
        hops = 2 if name == TWO_HOPS else 1
        return LearnedHeads(hops=hops, max_iter=self.plan[name].steps)

    def _fit_learned_infinite(self) -> None:
        """The learned head distributions with infinitely many heads."""
        learned = self._learned()
        if learned is None or not self.has_kernel:
            return
        size = learned.size
        seconds = len(learned.distribution) * (
            self.costs.gram(size, math.inf, biased=True) + self.costs.fit(size)
        )
        name = self._learned_name(math.inf)
        if not self._afford(name, seconds):
            return
        heads = self._learned_heads(self._learned_name(self.config.n_heads))
        m = replace(
            learned,
            name=name,
            heads=math.inf,
            at={},
            class_measures={},
            seconds=seconds,
            line=self._estimator_line(heads, math.inf),
        )
        ready = self._ready(size)
        for k, distribution in m.distribution.items():
            self._evaluate(m, make_gram(ready, distribution, math.inf, self.config), [k])
        self.findings.learners.append(m)

    def _learned(self) -> Measured | None:
        """Attention with a learned head distribution of one hop and finitely many heads."""
        return next((m for m in self.findings.learners if m.role == "learned"), None)

    def _best_fixed(self) -> Measured | None:
        """The best attention whose head distribution is fixed."""
        fixed = [
            m for m in self.findings.learners if m.name in self.grams and m.family == "attention"
        ]
        return min(fixed, key=self.findings.error_of, default=None)

    def _best_finite(self) -> Measured | None:
        """The best attention whose head distribution is fixed, of finitely many heads."""
        finite = [
            m for m in self.findings.learners if m.name in self.grams and math.isfinite(m.heads)
        ]
        return min(finite, key=self.findings.error_of, default=None)

    def _leader(self) -> Measured | None:
        """The best fixed heads, or learned heads that beat them by more than 3 standard errors."""
        fixed = self._best_fixed()
        learned = self._learned()
        if learned is None:
            return fixed
        if fixed is None or judge(difference(fixed, learned)) == "yes":
            return learned
        return fixed

    # --- what the questions need ---

    def _measure_query(self) -> None:
        """The error without the query, and with the queries of other sets."""
        best = self._best_fixed()
        leader = self._leader()
        if best is None or leader is None:
            return
        if not self.problem.has_query:
            self._measure_mean_query(best)
            return

        # two Gram matrices: one without a query, one with shuffled queries
        bare_costs = replace(self.costs, has_query=False)
        bare_seconds = bare_costs.gram(best.size, best.heads)
        if leader is best:
            shuffled_seconds = self.costs.gram(best.size, best.heads, best.role == "biased")
        else:
            # a head distribution is learned anew on the first fold
            shuffled_seconds = leader.seconds / len(leader.distribution)
        fit_seconds = 2 * self.costs.folds(best.size)
        seconds = bare_seconds + shuffled_seconds + fit_seconds
        if not self._afford("the query taken away, and shuffled", seconds):
            return
        self.findings.query.append(replace(leader, name="with its query", role="with"))

        # without a query
        bare = self._ready(best.size, _with_query(self.problem.sets, None))
        gram = make_gram(bare, self.choice.zero_mean, best.heads, self.config)
        without = Measured("without a query", "attention", "without")
        self.findings.query.append(self._evaluate(without, gram))

        # with the query of another set
        query = self.problem.batch.query
        assert query is not None  # has_query
        order = np.random.default_rng(self.config.seed).permutation(len(query))
        swapped = self._ready(leader.size, _with_query(self.problem.sets, query[order]))
        folds: list[int] | None
        if leader is best:
            distribution = best.distribution
            folds = None
        else:
            distribution = self._learn(swapped, 0, leader.name)
            folds = [0]
        gram = make_gram(swapped, distribution, leader.heads, self.config)
        shuffled = Measured("with the query of another set", "attention", "shuffled")
        self.findings.query.append(self._evaluate(shuffled, gram, folds))

    def _measure_mean_query(self, best: Measured) -> None:
        """Where no query was given: the error with the mean of the keys as query, and without."""
        if self.problem.sets.has_own_queries:
            return
        # the best learner has a query made of the keys, or none; the other one is measured
        makes_query = self.choice.rule.query != "given"
        other_rule = replace(self.choice.rule, query="given" if makes_query else "mean")
        costs = replace(self.costs, has_query=not makes_query)
        seconds = costs.gram(best.size, best.heads) + costs.folds(best.size)
        if not self._afford("a query made of the keys", seconds):
            return
        ready = self._ready(best.size, rule=other_rule)
        gram = make_gram(ready, self.choice.zero_mean, best.heads, self.config)
        other = self._evaluate(Measured("", "attention", ""), gram)
        made_name = "the mean of the keys as query"
        if self.choice.rule.query == "each":
            made_name = "each key as query in turn"
        if makes_query:
            without = other
            with_made = best
        else:
            without = best
            with_made = other
        self.findings.query += [
            replace(without, name="without a query", role="without"),
            replace(with_made, name=made_name, role="made"),
        ]

    def _measure_heads(self) -> None:
        """The error against the number of heads, for the head distribution that did best."""
        leader = self._leader()
        if leader is None:
            return
        is_learned = leader.role == "learned"

        # numbers of heads up to the one in use, and beyond it
        n_heads = self.config.n_heads
        counts = [count for count in HEAD_COUNTS if count < n_heads] + [n_heads]
        infinite = [
            m
            for m in self.findings.learners
            if m.distribution is leader.distribution and math.isinf(m.heads)
        ]
        if not infinite:
            counts.append(4 * n_heads)

        # as many samples as half of what remains allows, of those that the leader has losses for
        folds = [k for k in self.folds[:HEAD_COUNT_FOLDS] if k in leader.losses]
        n_draws = len(folds) if is_learned else 1

        def seconds(size: int) -> float:
            features = n_draws * self.costs.gram(size, counts[-1])
            return features + len(counts) * len(folds) * self.costs.fit(0.8 * size)

        sizes = sorted((s for s in leader.at if all(s in m.at for m in infinite)), reverse=True)
        limit = (self.remaining - self.reserved) / 2
        size = next((s for s in sizes if seconds(s) <= limit), sizes[-1])
        if not self._afford("the number of heads", seconds(size)):
            return

        # a learned distribution differs from fold to fold, a fixed one does not
        finite = [Measured(f"{c} heads", "attention", "finite", heads=c) for c in counts]
        ready = self._ready(size)
        grams: list[Gram] = []
        for k in folds:
            if is_learned or not grams:
                grams = nested_head_grams(
                    ready,
                    leader.distribution[k] if is_learned else leader.distribution,
                    tuple(counts),
                    self.config.activation,
                    self.config.seed,
                )
            train, test = self.problem.fold(k, size)
            for m, gram in zip(finite, grams, strict=True):
                m.at.setdefault(size, {})[k] = held_out_losses(gram, self.problem, train, test)
        self.findings.heads = finite

        # infinitely many heads, on the same folds as the others
        for m in infinite:
            losses = {k: m.at[size][k] for k in folds if k in m.at[size]}
            self.findings.heads.append(
                replace(m, name="infinite heads", role="infinite", at={size: losses})
            )

    def _measure_curves(self) -> None:
        """Held-out error against training samples, on the same held-out samples throughout.

        The last point of a curve is the error in the table.
        """
        for m in self._best_of_both():
            n = self.problem.trained_on(m.size)
            if not self._afford(f"learning curve of {m.name}", self.costs.curve(n)):
                continue
            sizes, losses = learning_curve(self.grams[m.name], self.problem, self.config.seed)
            end = np.concatenate(list(m.losses.values()))
            self.findings.curves.append(
                HeldOutCurve(
                    name=m.name,
                    role="pooled" if m.family == "pooled" else m.role,
                    sizes=(*sizes, n),
                    losses=(*losses, end),
                    predicted=self._predicted_curve(m, (*sizes, n)),
                )
            )

    def _predicted_curve(self, m: Measured, sizes: tuple[int, ...]) -> tuple[float, ...]:
        """What theory says of a learning curve; nothing for classes, groups and many samples."""
        is_regression = self.problem.labels is None and self.problem.groups is None
        gram = self.grams[m.name]
        n_samples = min(m.size, len(gram.matrix))
        if not is_regression or n_samples > MOST_FOR_SPECTRUM:
            return ()
        if not self._afford(f"predicted curve of {m.name}", 2 * self._spectrum_seconds(m)):
            return ()
        matrix = gram.matrix[:n_samples, :n_samples]
        return theory_curve(replace(gram, matrix=matrix), self.problem.columns[:n_samples], sizes)

    def _measure_spectra(self) -> None:
        """How the target loads on the kernels of the best learners."""
        for m in self._best_of_both():
            gram = self.grams[m.name].matrix[:MOST_FOR_SPECTRUM, :MOST_FOR_SPECTRUM]
            if self._afford(f"spectrum of {m.name}", self._spectrum_seconds(m)):
                columns = self.problem.columns[: len(gram)]
                self.findings.spectra.append(spectrum_of(m, gram, columns))

    def _best_of_both(self) -> list[Measured]:
        """The best fixed heads and the best learner on pooled input, as far as there are."""
        best = (self._best_fixed(), self.findings.best("pooled"))
        return [m for m in best if m is not None]

    def _last_seconds(self) -> list[float]:
        """What the spectra and the samples taken apart will take, predicted."""
        seconds = [self._spectrum_seconds(m) for m in reversed(self._best_of_both())]
        best = self._best_finite()
        if best is not None:
            seconds.append(self._examples_seconds(best))
        return seconds

    def _spectrum_seconds(self, m: Measured) -> float:
        return 4 * self.costs.fit(min(m.size, MOST_FOR_SPECTRUM))

    def _examples_seconds(self, best: Measured) -> float:
        return 2 * self.costs.gram(best.size, best.heads)

    def _take_examples_apart(self) -> None:
        """Take held-out samples apart key by key.

        Those that the best finite heads predicted best, and those that they predicted worst.
        """
        best = self._best_finite()
        if best is None or not self._afford("which keys did it", self._examples_seconds(best)):
            return
        problem = self.problem
        assert problem.rows is not None  # of a dataset

        # a layer fitted on the first fold, and its predictions
        ready = self._ready(best.size)
        train, test = problem.fold(0, best.size)
        heads = HeadDraw(
            best.distribution, int(best.heads), ready.dim, self.config.seed, ready.query_dim
        )
        spec = LayerSpec(activation=self.config.activation, pooling=self.config.pooling)
        data = TrainingSet(ready[train], problem.columns[train], groups=problem.groups_of(train))
        layer = solve_values(spec, data, heads).layer
        predictions = self._predictions(test, layer.predict(ready[test]))

        # the best of those that are right, and the worst of those that are wrong
        worst_first = np.argsort(predictions.margins, kind="stable")
        is_right = predictions.is_right[worst_first]
        shown_right = worst_first[is_right][::-1][:MAX_EXAMPLES]
        shown_wrong = worst_first[~is_right][:MAX_EXAMPLES]
        for i in (*shown_right, *shown_wrong):
            sample = test[i : i + 1]
            contributions = self._scores_by_class(layer.contributions(ready[sample]))
            row = int(problem.rows[test[i]])
            self.findings.examples.append(
                TakenApart(
                    row=row,
                    right=bool(predictions.is_right[i]),
                    truth=_brief(self.target[row]),
                    said=predictions.texts[i],
                    keys=problem.sets[sample].sets.tokens,
                    parts=contributions[:, predictions.classes[i]] * predictions.unit,
                )
            )

    def _scores_by_class(self, outputs: Float[np.ndarray, "r t"]) -> Float[np.ndarray, "r c"]:
        """One score per class: of two classes, the one output and its negative."""
        has_two_classes = self.problem.labels is not None and outputs.shape[1] == 1
        if has_two_classes:
            return np.hstack([-outputs, outputs])
        return outputs

    def _predictions(
        self, test: Int[np.ndarray, " r"], outputs: Float[np.ndarray, "r t"]
    ) -> HeldOutPredictions:
        """What the outputs of a layer predict for a test part, and how well."""
        problem = self.problem
        scores = self._scores_by_class(outputs)
        if problem.labels is None:
            # right is what is closer to the truth than the median
            target = self.target[problem.rows]
            unit = float(target.std())
            margins = -np.abs(scores - problem.columns[test])[:, 0]
            is_right = margins >= np.median(margins)
            classes = np.zeros(len(test), dtype=int)
            values = target.mean() + unit * scores[:, 0]
        else:
            # by how much the score of the true class exceeds the largest other score
            is_true_class = np.arange(scores.shape[1]) == problem.labels[test][:, None]
            largest_other = np.where(is_true_class, -math.inf, scores).max(axis=1)
            unit = 1.0
            margins = scores[is_true_class] - largest_other
            is_right = margins > 0
            classes = scores.argmax(axis=1)
            values = np.unique(self.target)[classes]
        return HeldOutPredictions(
            classes=classes,
            texts=tuple(_brief(value) for value in values),
            margins=margins,
            is_right=is_right,
            unit=unit,
        )


def _brief(value: Any) -> str:
    """A target as a few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)[:40]


def _with_query(sets: Any, query: np.ndarray | None) -> Any:
    """The same sets with other queries, or none."""
    return sets.with_sets(sets.sets.with_query(query))
