"""The look itself: what to fit, in which order, and what there is time for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from keyhole.activations import SOFTMAX
from keyhole.groups import SetGroups
from keyhole.heads import GaussianHeads
from keyhole.learned import LearnedHeads
from keyhole.lens.answers import answer_all, judge
from keyhole.lens.choice import Preparation, affordable, make_choice
from keyhole.lens.findings import Findings, HeldOutCurve, LensConfig, Measured, difference
from keyhole.lens.learners import (
    Gram,
    head_gram,
    held_out_losses,
    kernel_gram,
    linear_gram,
    mlp_gram,
    nested_head_grams,
    pooled_numbers,
    spectrum_of,
)
from keyhole.lens.problem import LensProblem, choose_rows, pose
from keyhole.sets import SetBatch

WIDTH = 1024
"""Units of the MLP."""
MIN_SETS = 40


def look(data: Any, config: LensConfig, progress: Callable[[str], None] = lambda text: None) -> Findings:
    """Fit everything there is time for, and answer the four questions; ``progress`` is told what is being done.

    Every learner is ridge on a Gram matrix, its penalty chosen by leave-one-out inside the training part; errors are
    of five folds that take turns, or of the split that the data brings. Costs are measured on a small part first;
    then the number of samples is chosen so that all fits the budget, and what does not is skipped and named.

    Examples
    --------
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(120, n_keys=4, dim=3, seed=0)
    >>> data = kh.datasets.Dataset(sets, kh.targets.TokenPower(2, dim=3)(sets))
    >>> found = look(data, LensConfig("regression", budget=20, n_heads=32, steps=0))
    >>> found.answers["query"].says
    'no'
    """
    began = time.perf_counter()
    n = len(data)
    if n < MIN_SETS:
        raise ValueError(f"a look needs at least {MIN_SETS} sets to hold some out: got {n}. Gather more.")
    progress("choosing how to scale tokens, measuring costs")
    rows = choose_rows(n, config.max_samples, data.split, config.seed)
    problem = pose(data, config.kind, rows, config.seed)
    choice = make_choice(problem, config)
    size, n_folds = affordable(problem, choice, config, time.perf_counter() - began)
    if size < len(problem):
        rows = choose_rows(n, size, data.split, config.seed)
        problem = pose(data, config.kind, rows, config.seed)
    return _Look(data, problem, choice, replace(config), min(n_folds, len(problem.folds)), began, progress).run()


class _Look:
    """The state of a look: Gram matrices at hand, findings so far, time left."""

    def __init__(
        self,
        data: Any,
        problem: LensProblem,
        choice: Preparation,
        config: LensConfig,
        n_folds: int,
        began: float,
        progress: Any,
    ) -> None:
        self.problem, self.choice, self.config, self.progress = problem, choice, config, progress
        self.began, self.folds = began, range(n_folds)
        self.ready = choice.rule.apply(problem.sets)
        self.grams: dict[str, Gram] = {}
        self.exact = config.activation != SOFTMAX
        self.found = Findings(
            config, data.description, len(data), len(problem), len(problem.folds[0][0]), n_folds, names=data.names
        )
        self.found.settings = self._settings()

    def run(self) -> Findings:
        self._pooled()
        self._fixed_laws()
        self._curves()
        self._spectra()
        self._learned_law()  # takes what time it is given: whatever is sure to be short comes before
        self._query()
        self._heads()
        self._learned_curve()
        self.found.answers = answer_all(self.found)
        self.found.seconds = time.perf_counter() - self.began
        return self.found

    def _settings(self) -> str:
        rule, config = self.choice.rule, self.config
        used = f"{self.found.n_used} of {self.found.n_given} sets, drawn at random"
        if self.found.n_used == self.found.n_given:
            used = f"all {self.found.n_used} sets"
        own = len(self.problem.folds) == 1
        held = "the data's own test part held out" if own else f"{len(self.folds)} of 5 folds held out in turn"
        bias = "" if self.choice.strength is None else f", biased heads of strength {self.choice.strength:g}"
        return (
            f"{used}, {held}; tokens {rule.scaling}, query {rule.query}, pooling {rule.pooling}, {config.activation} "
            f"weights{bias} (chosen on 300 training sets at most); {config.n_heads} heads where finite; "
            f"seed {config.seed}."
        )

    @property
    def left(self) -> float:
        return self.config.budget - self.config.reserve - (time.perf_counter() - self.began)

    def _afford(self, what: str, seconds: float) -> bool:
        """Say what comes next, or note that there is no time for it, with a quarter to spare."""
        if 1.25 * seconds > self.left:
            self.found.skipped.append(f"{what}: would take about {seconds:.0f} s, {max(self.left, 0):.0f} s are left.")
            return False
        self.progress(f"{what} ({max(self.left, 0):.0f} s left)")
        return True

    def _fit_cost(self, n_fits: int) -> float:
        return n_fits * self.choice.costs.fit(self.found.n_train)

    def _evaluate(self, m: Measured, gram: Gram, folds: Any = None) -> Measured:
        began = time.perf_counter()
        for k in self.folds if folds is None else folds:
            train, test = self.problem.folds[k]
            m.losses[k], m.alpha = held_out_losses(gram, self.problem, train, test)
        m.seconds += time.perf_counter() - began
        return m

    def _add(self, m: Measured, make: Callable[[], Gram]) -> None:
        began = time.perf_counter()
        gram = make()
        m.seconds = time.perf_counter() - began
        self.found.learners.append(self._evaluate(m, gram))
        self.grams[m.name] = gram

    def _pooled(self) -> None:
        self.progress("learners on pooled input")
        self.found.learners.append(self._constant())
        pooling, problem = self.config.pooling, self.problem
        plain = pooled_numbers(problem, statistics=False, pooling=pooling)
        many = pooled_numbers(problem, statistics=True, pooling=pooling)
        for name, role, make in (
            (f"{pooling} pool, ridge", "ridge", lambda: linear_gram(plain)),
            ("pooled statistics, ridge", "statistics", lambda: linear_gram(many)),
            ("pooled statistics, MLP", "mlp", lambda: mlp_gram(many, WIDTH, self.config.seed)),
        ):
            self._add(Measured(name, "pooled", role), make)

    def _constant(self) -> Measured:
        """The mean of the training part, or its most frequent class."""
        m = Measured("a constant guess", "constant", "null")
        for k in self.folds:
            train, test = self.problem.folds[k]
            guess = self.problem.columns[train].mean(axis=0)
            m.losses[k] = self.problem.losses(test, np.tile(guess, (len(test), 1)))
        return m

    def _fixed_laws(self) -> None:
        laws: list[tuple[str, str, Any]] = [("zero-mean attention", "attention", GaussianHeads())]
        if self.choice.strength is None:
            self.found.skipped.append("biased attention: without a query there is nothing for keys to resemble.")
        else:
            laws.append(("biased attention", "biased", GaussianHeads(self.choice.strength)))
        costs, tokens, n_heads = self.choice.costs, self.problem.tokens, self.config.n_heads
        for name, role, law in laws:
            seconds = costs.heads(tokens, len(self.problem), n_heads, self.problem.batch.dim + 1)
            if self._afford(f"{name}, {n_heads} heads", seconds + self._fit_cost(len(self.folds))):
                m = Measured(f"{name}, {n_heads} heads", "attention", role, law, n_heads)
                self._add(m, lambda law=law: self._head_gram(law))  # type: ignore[misc]
            if not self.exact:
                continue
            seconds = costs.kernel(tokens, biased=role == "biased")
            if self._afford(f"{name}, infinite heads", seconds + self._fit_cost(len(self.folds))):
                m = Measured(f"{name}, infinite heads", "attention", role, law, math.inf)
                self._add(m, lambda law=law: kernel_gram(self.ready, law, self.config.activation))  # type: ignore[misc]
        if not self.exact:
            self.found.skipped.append("infinite heads: softmax weights have no kernel in closed form.")

    def _head_gram(self, law: Any) -> Gram:
        return head_gram(self.ready, law, self.config.n_heads, self.config.activation, self.config.seed)

    def _learned_law(self) -> None:
        """Learn a law on the training part of each of a few folds."""
        if self.config.steps == 0:
            self.found.skipped.append("learned law: none was asked for.")
            return
        # as much again for shuffled queries, and for half the samples
        seconds = max(0.0, self.left) * (0.27 if len(self.folds) == 1 else 0.2)
        if seconds < 1.0 or not self._afford("learned law", seconds):
            self.found.skipped.append("learned law: too little time was left to learn one.")
            return
        m = Measured(f"learned law, {self.config.n_heads} heads", "attention", "learned", {}, self.config.n_heads)
        self.found.learners.append(m)
        for k in list(self.folds)[:2]:
            if k and self.left < 1.2 * seconds:
                break
            self.progress(f"learning a law on fold {k + 1} ({max(self.left, 0):.0f} s left)")
            began = time.perf_counter()
            m.law[k] = self._learn(self.ready, self.problem.folds[k][0], seconds)
            gram = self._head_gram(m.law[k])
            m.seconds += time.perf_counter() - began
            self._evaluate(m, gram, [k])
        self.found.law = m.law.get(0)
        self._learned_infinite(m)

    def _learn(self, ready: Any, train: np.ndarray, seconds: float) -> Any:
        """A law for the training part; at most 400 samples a step keep a step short.

        Its noise has one scale where infinitely many heads of the same law are shown beside it, which needs that.
        """
        covariance = "none" if self.exact else "auto"
        law = LearnedHeads(steps=self.config.steps, covariance=covariance, seconds=0.8 * seconds, max_samples=400)
        rows = np.sort(train)
        return law.fit(
            ready[rows], self.problem.columns[rows], activation=self.config.activation, seed=self.config.seed
        )

    def _learned_infinite(self, learned: Measured) -> None:
        seconds = self.choice.costs.kernel(self.problem.tokens, biased=True) + self._fit_cost(1)
        if not self.exact or not self._afford("learned law, infinite heads", seconds * len(learned.law)):
            return
        m = Measured("learned law, infinite heads", "attention", "learned", learned.law, math.inf)
        m.seconds = learned.seconds
        for k, law in learned.law.items():
            began = time.perf_counter()
            gram = kernel_gram(self.ready, law, self.config.activation)
            m.seconds += time.perf_counter() - began
            self._evaluate(m, gram, [k])
        self.found.learners.append(m)

    def _best_fixed(self) -> Measured | None:
        fixed = [m for m in self.found.learners if m.name in self.grams and m.family == "attention"]
        return min(fixed, key=self.found.error_of, default=None)

    def _learned_leads(self) -> Measured | None:
        """The learned law, if it beats the best fixed one beyond doubt."""
        fixed = self._best_fixed()
        learned = [m for m in self.found.learners if m.role == "learned" and m.losses]
        best = min(learned, key=self.found.error_of, default=None)
        if best is None or fixed is None:
            return best
        return best if judge(difference(fixed, best)) == "yes" else None

    def _query(self) -> None:
        best = self._best_fixed()
        if best is None:
            return
        if not self.problem.has_query:
            self._made_query(best)
            return
        costs, tokens = self.choice.costs, self.problem.tokens
        biased = best.role == "biased" and math.isinf(best.heads)
        seconds = costs.kernel(tokens) + costs.kernel(tokens, biased=biased) + 2 * self._fit_cost(len(self.folds))
        if not self._afford("the query taken away, and shuffled", seconds):
            return
        leader = self._learned_leads() or best
        self.found.query.append(_renamed(leader, "with its query", "with"))
        bare = self._variant(_with_query(self.problem.sets, None), GaussianHeads(), math.isinf(best.heads))
        self.found.query.append(self._evaluate(Measured("without a query", "attention", "without"), bare))
        query = self.problem.batch.query
        assert query is not None  # has_query
        mixed = query[np.random.default_rng(self.config.seed).permutation(len(query))]
        swapped = _with_query(self.problem.sets, mixed)
        m = Measured("with the query of another set", "attention", "shuffled")
        if leader is best:
            self._evaluate(m, self._variant(swapped, best.law, math.isinf(best.heads)))
        else:
            self._relearn(m, swapped, leader)
        if m.losses:
            self.found.query.append(m)

    def _relearn(self, m: Measured, sets: Any, leader: Measured) -> None:
        """Learn a law for shuffled queries on the first fold, with the time the leader had."""
        seconds = leader.seconds / max(1, len(leader.law))
        if self._afford("a law learned with shuffled queries", seconds):
            ready = self.choice.rule.apply(sets)
            law = self._learn(ready, self.problem.folds[0][0], seconds)
            gram = head_gram(ready, law, self.config.n_heads, self.config.activation, self.config.seed)
            self._evaluate(m, gram, [0])

    def _made_query(self, best: Measured) -> None:
        """Where no query was given: whether the mean of the keys makes one."""
        if isinstance(self.problem.sets, SetGroups):
            return
        other = replace(self.choice.rule, query="given" if self.choice.rule.query == "mean" else "mean")
        seconds = self.choice.costs.kernel(self.problem.tokens, biased=False) + self._fit_cost(len(self.folds))
        if not self._afford("a query made of the keys", seconds):
            return
        gram = self._variant(self.problem.sets, GaussianHeads(), math.isinf(best.heads), other)
        tried = self._evaluate(Measured("", "attention", ""), gram)
        pairs = {other.query: tried, self.choice.rule.query: best}
        self.found.query += [
            _renamed(pairs["given"], "without a query", "without"),
            _renamed(pairs["mean"], "the mean of the keys as query", "made"),
        ]

    def _variant(self, sets: Any, law: Any, infinite: bool, rule: Any = None) -> Gram:
        ready = (rule or self.choice.rule).apply(sets)
        if infinite:
            return kernel_gram(ready, law, self.config.activation)
        return head_gram(ready, law, self.config.n_heads, self.config.activation, self.config.seed)

    def _heads(self) -> None:
        """The error against the number of heads, for the law that did best."""
        leader = self._learned_leads() or self._best_fixed()
        if leader is None:
            return
        used = self.config.n_heads
        counts = tuple(sorted({4, 16, 64, used} - {c for c in (4, 16, 64) if c > used}))
        counts = counts if self.exact else (*counts, 4 * used)
        folds = [k for k in list(self.folds)[:3] if k in leader.losses]
        width = self.problem.batch.dim + 1
        seconds = self.choice.costs.heads(self.problem.tokens, len(self.problem), counts[-1], width)
        many = len(folds) if leader.role == "learned" else 1
        if not self._afford("the number of heads", many * seconds + self._fit_cost(len(counts) * len(folds))):
            return
        rows = [Measured(f"{c} heads", "attention", "finite", heads=c) for c in counts]
        for k in folds:
            if leader.role == "learned" or k == folds[0]:
                law = leader.law[k] if leader.role == "learned" else leader.law
                grams = nested_head_grams(self.ready, law, counts, self.config.activation, self.config.seed)
            for m, gram in zip(rows, grams, strict=True):
                self._evaluate(m, gram, [k])
        self.found.heads = rows
        same = [m for m in self.found.learners if m.law is leader.law and math.isinf(m.heads)]
        for m in same:  # on the same folds as the others
            losses = {k: m.losses[k] for k in folds if k in m.losses}
            self.found.heads.append(replace(m, name="infinite heads", role="infinite", losses=losses))

    def _curves(self) -> None:
        """Held-out error against training samples, on the same held-out samples."""
        pooled, fixed = self.found.best("pooled"), self._best_fixed()
        folds = list(self.folds)[:3]
        n = self.found.n_train
        sizes = tuple(n >> k for k in (3, 2, 1, 0) if n >> k >= 20)
        for m in (fixed, pooled):
            if m is None or not self._afford(f"learning curve of {m.name}", 1.2 * self._fit_cost(len(folds))):
                continue
            gram = self.grams[m.name]
            losses = [self._losses_at(gram, size, folds) for size in sizes[:-1]]
            losses.append(np.concatenate([m.losses[k] for k in folds]))
            self.found.curves.append(HeldOutCurve(m.name, "pooled" if m is pooled else m.role, sizes, tuple(losses)))

    def _losses_at(self, gram: Gram, size: int, folds: list[int]) -> np.ndarray:
        parts = [
            held_out_losses(gram, self.problem, self.problem.folds[k][0][:size], self.problem.folds[k][1])[0]
            for k in folds
        ]
        return np.concatenate(parts)

    def _learned_curve(self) -> None:
        """Half the samples, and all of them, on the first fold, if the learned law leads: it is learned anew."""
        learned = self._learned_leads()
        if learned is None or 0 not in learned.losses:
            return
        seconds = learned.seconds / max(1, len(learned.law))
        if not self._afford("learning curve of the learned law", seconds):
            return
        train, test = self.problem.folds[0]
        half = train[: len(train) // 2]
        law = self._learn(self.ready, half, seconds)
        gram = self._head_gram(law)
        losses = held_out_losses(gram, self.problem, half, test)[0]
        curve = HeldOutCurve(learned.name, "learned", (len(half), len(train)), (losses, learned.losses[0]))
        self.found.curves.insert(0, curve)

    def _spectra(self) -> None:
        pooled, fixed = self.found.best("pooled"), self._best_fixed()
        for m in (fixed, pooled):
            if m is None or not self._afford(f"spectrum of {m.name}", 4 * self._fit_cost(1)):
                continue
            self.found.spectra.append(spectrum_of(m, self.grams[m.name].matrix, self.problem.columns))


def _renamed(m: Measured, name: str, role: str) -> Measured:
    return replace(m, name=name, role=role)


def _with_query(sets: Any, query: np.ndarray | None) -> Any:
    """The same sets with other queries, or none."""
    if isinstance(sets, SetGroups):
        return SetGroups(_with_query(sets.sets, query), sets.counts)
    return SetBatch._from_flat(sets.tokens, sets.offsets, query)
