"""The look itself: the question a table asks, what to fit, in which order, and what there is time for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole.attention.activations import SOFTMAX
from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads, HeadDraw
from keyhole.attention.kernels import attention_kernel
from keyhole.attention.learned import LearnedHeads
from keyhole.data.sets import PooledSets, SetBatch, SetGroups
from keyhole.data.tokens import SCALINGS, TokenRule
from keyhole.lab.lens.findings import (
    Findings,
    HeldOutCurve,
    LensConfig,
    Measured,
    TargetLoading,
    answer_all,
    difference,
    judge,
)
from keyhole.ridge.gram import ridge_gram
from keyhole.ridge.problem import RidgeProblem

N_FOLDS = 5


@dataclass(frozen=True, eq=False)
class LensProblem:
    """Samples with targets as columns, and the folds that take turns at being held out."""

    sets: SetBatch | SetGroups
    columns: Float[np.ndarray, "n t"] = field(repr=False)
    """Regression: the target, centred and of unit variance. Classification: ±1 per class, one column for two."""
    labels: Int[np.ndarray, " n"] | None = field(repr=False)  # classes by number
    folds: tuple[tuple[np.ndarray, np.ndarray], ...] = field(repr=False)  # row numbers to train on and to test on

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def batch(self) -> SetBatch:
        """All sets, whoever owns them."""
        return self.sets.sets

    @property
    def has_query(self) -> bool:
        """Whether queries were given."""
        return self.batch.query is not None

    @property
    def tokens(self) -> int:
        """Keys in all."""
        return len(self.batch.tokens)

    def losses(self, rows: Int[np.ndarray, " r"], scores: Float[np.ndarray, "r t"]) -> Float[np.ndarray, " r"]:
        """Squared error in units of the variance of the target; or 1 where the wrong class wins."""
        if self.labels is None:
            return np.asarray(np.square(self.columns[rows] - scores).mean(axis=1))
        won = (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(axis=1)
        return np.asarray((won != self.labels[rows]).astype(np.float64))


def pose(data: Any, kind: str, rows: Int[np.ndarray, " n"], seed: int) -> LensProblem:
    """The problem of some rows of a dataset; the data's own split is the only fold where it has one."""
    target = np.asarray(data.target)[rows]
    split = None if data.split is None else data.split[rows]
    if kind == "regression":
        y = target.astype(np.float64)
        spread = float(y.std())
        if not spread > 0:
            raise ValueError(f"the target must vary: all {len(y)} values are {y[0]:g}. There is nothing to learn.")
        columns, labels = ((y - y.mean()) / spread)[:, None], None
    else:
        classes, labels = np.unique(target, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"the target must have two classes at least: all are {classes[0]!s:.40}.")
        columns = np.where(labels[:, None] == np.arange(len(classes)), 1.0, -1.0)
        columns = columns[:, 1:] if len(classes) == 2 else columns
    return LensProblem(data.sets[rows], columns, labels, make_folds(len(rows), labels, split, seed))


def make_folds(
    n: int, labels: np.ndarray | None, split: np.ndarray | None, seed: int
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Five folds, classes spread evenly; or the split that the data brings."""
    order = np.random.default_rng([seed, n]).permutation(n)
    if split is not None and min((split == 0).sum(), (split == 1).sum()) >= 10:
        return ((order[split[order] == 0], order[split[order] == 1]),)
    dealt = order if labels is None else order[np.argsort(labels[order], kind="stable")]
    fold = np.empty(n, dtype=np.int64)
    fold[dealt] = np.arange(n) % N_FOLDS
    return tuple((order[fold[order] != k], order[fold[order] == k]) for k in range(N_FOLDS))


def choose_rows(n: int, most: int, split: np.ndarray | None, seed: int) -> Int[np.ndarray, " r"]:
    """At most so many rows, drawn at random, in their order; a split keeps its shares."""
    if n <= most:
        return np.arange(n)
    rng = np.random.default_rng([seed, n, most])
    if split is None:
        return np.sort(rng.permutation(n)[:most])
    parts: Sequence[np.ndarray] = [
        rng.permutation(np.flatnonzero(split == k))[: max(1, round(most * float((split == k).mean())))] for k in (0, 1)
    ]
    return np.sort(np.concatenate(parts))


EPS32 = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, eq=False)
class Gram:
    """K over all samples, and the unit of rounding behind it."""

    matrix: Float[np.ndarray, "n n"] = field(repr=False)
    rounding: float | None = None


def held_out_losses(
    gram: Gram, problem: LensProblem, train: np.ndarray, test: np.ndarray
) -> tuple[Float[np.ndarray, " r"], float]:
    """Fit on ``train`` with the penalty of least leave-one-out error, predict ``test``; losses and penalty."""
    own = np.ascontiguousarray(gram.matrix[np.ix_(train, train)])
    fit = ridge_gram(own, RidgeProblem.of(problem.columns[train]), rounding=gram.rounding, overwrite_gram=True)
    scores = gram.matrix[np.ix_(test, train)] @ fit.coef + fit.intercept
    return problem.losses(test, scores), fit.alpha


def kernel_gram(ready: SetBatch | PooledSets, law: Any, activation: str) -> Gram:
    """Infinitely many heads."""
    return Gram(attention_kernel(ready, None, law, activation))


def head_gram(ready: SetBatch | PooledSets, law: Any, n_heads: int, activation: str, seed: int) -> Gram:
    """M heads, their features in single precision."""
    features = attention_features(
        ready, HeadDraw(law, n_heads, ready.dim, seed, ready.query_dim), activation, dtype="float32"
    )
    return feature_gram(features)


def feature_gram(features: np.ndarray) -> Gram:
    """ΦΦᵀ of centred features."""
    centred = features - features.mean(axis=0)
    rounding = EPS32 if features.dtype == np.float32 else None
    return Gram((centred @ centred.T).astype(np.float64), rounding)


def nested_head_grams(
    ready: SetBatch | PooledSets, law: Any, counts: tuple[int, ...], activation: str, seed: int
) -> list[Gram]:
    """The Gram matrices of the first M heads of one draw, for increasing M; every head is computed once."""
    draw = HeadDraw(law, counts[-1], ready.dim, seed, ready.query_dim)
    total: np.ndarray | float = 0.0
    grams, start = [], 0
    for count in counts:
        features = attention_features(ready, draw.block(start, count), activation, dtype="float32")
        total = total + (count - start) * feature_gram(features).matrix
        grams.append(Gram(np.asarray(total / count), EPS32))
        start = count
    return grams


def pooled_numbers(problem: LensProblem, *, statistics: bool, pooling: str) -> Float[np.ndarray, "n p"]:
    """Mean (or sum) of the keys and the query; with ``statistics`` their spread, extremes and number as well."""
    sets = problem.sets
    batch = problem.batch
    offsets = batch.offsets[sets.set_offsets]
    tokens, lengths = batch.tokens.astype(np.float64), np.diff(offsets)[:, None]
    mean = np.add.reduceat(tokens, offsets[:-1], axis=0) / lengths
    parts = [mean * lengths if pooling == "sum" else mean]
    if statistics:
        square = np.add.reduceat(np.square(tokens), offsets[:-1], axis=0) / lengths
        spread = np.sqrt(np.maximum(square - np.square(mean), 0.0))
        low = np.minimum.reduceat(tokens, offsets[:-1], axis=0)
        high = np.maximum.reduceat(tokens, offsets[:-1], axis=0)
        parts += [spread, low, high, np.log(lengths)]
    if batch.query is not None:
        query = np.add.reduceat(batch.query.astype(np.float64), sets.set_offsets[:-1], axis=0)
        parts.append(query / sets.set_counts[:, None])
    return standardised(np.concatenate(parts, axis=1))


def standardised(numbers: Float[np.ndarray, "n p"]) -> Float[np.ndarray, "n q"]:
    """Columns of mean zero and unit variance; those that never move are left out."""
    centred = numbers - numbers.mean(axis=0)
    spread = centred.std(axis=0)
    moves = spread > 1e-12 * np.maximum(1.0, np.abs(numbers).max(axis=0))
    if not moves.any():
        return np.zeros((len(numbers), 1))
    return np.asarray(centred[:, moves] / spread[moves])


def linear_gram(numbers: Float[np.ndarray, "n p"]) -> Gram:
    """Ridge on the numbers themselves."""
    return Gram(numbers @ numbers.T / numbers.shape[1])


def mlp_gram(numbers: Float[np.ndarray, "n p"], width: int, seed: int) -> Gram:
    """A two-layer network with a random first layer: ReLU of random combinations of the numbers."""
    rng = np.random.default_rng([seed, width])
    p = numbers.shape[1]
    hidden = numbers @ (rng.standard_normal((p, width)) / np.sqrt(p)) + rng.standard_normal(width)
    np.maximum(hidden, 0.0, out=hidden)
    return feature_gram(hidden / np.sqrt(width))


def spectrum_of(m: Measured, gram: np.ndarray, columns: np.ndarray) -> TargetLoading:
    """Eigenvalues of the centred matrix over n, and what share of the target's power lies along each direction."""
    centred = gram - gram.mean(axis=0) - gram.mean(axis=1)[:, None] + gram.mean()
    values, vectors = np.linalg.eigh(centred / len(gram))
    target = columns - columns.mean(axis=0)
    power = np.square(vectors.T @ target).sum(axis=1) / np.square(target).sum()
    return TargetLoading(
        m.name, "pooled" if m.family == "pooled" else m.role, np.maximum(values[::-1], 0.0), power[::-1]
    )


MOST = 300  # samples that choices are made on
MOST_TOKENS = 8000
SIZES = (2000, 1500, 1200, 1000, 800, 600, 500, 400, 300, 200, 150, 100)  # numbers of samples to fall back to
STRENGTHS = (1.0, 3.0, 10.0)
PILOT_HEADS = 64


@dataclass(eq=False)
class Preparation:
    """What a small part spoke for, and the seconds that steps take, measured on it and scaled up."""

    rule: TokenRule
    strength: float | None = None  # of the identity for biased heads; None where there is no query to resemble
    pair: float = 0.0  # of the kernel of zero-mean heads, per pair of tokens
    biased_pair: float = 0.0
    token_head: float = 0.0  # of features, per token, head and coordinate
    solve: float = 0.0  # of a ridge path, per n²

    def kernel(self, tokens: float, biased: bool = False) -> float:
        """A Gram matrix of infinitely many heads."""
        return (self.biased_pair if biased else self.pair) * tokens**2

    def heads(self, tokens: float, n: int, n_heads: int, width: int) -> float:
        """Features of M heads and their Gram matrix."""
        return self.token_head * tokens * n_heads * width + 2e-11 * n * n * n_heads * width

    def fit(self, n: int) -> float:
        """One ridge path with leave-one-out."""
        return max(self.solve * n**2, 2e-10 * n**3) + 0.01


def make_choice(problem: LensProblem, config: LensConfig) -> Preparation:
    """Scaling (and a query made of the keys) by leave-one-out of zero-mean heads; then the strength of a bias."""
    rows = _few(problem, config.seed)
    sets, columns = problem.sets[rows], problem.columns[rows]
    queries = ("given",) if sets.has_own_queries else ("given", "mean")
    found: list[tuple[float, TokenRule]] = []
    for scaling in SCALINGS:
        for query in queries:
            rule = TokenRule.learn(sets, scaling, query, config.pooling)
            gram = _pilot(rule.apply(sets), GaussianHeads(), config)
            found.append((_loo(gram, columns), rule))
    choice = Preparation(min(found, key=lambda pair: pair[0])[1])
    ready = choice.rule.apply(sets)
    if problem.has_query or choice.rule.query != "given":
        grams = [head_gram(ready, GaussianHeads(c), PILOT_HEADS, config.activation, config.seed) for c in STRENGTHS]
        errors = [_loo(gram, columns) for gram in grams]
        choice.strength = STRENGTHS[int(np.argmin(errors))]
    _measure(choice, problem, rows, ready, config)
    return choice


def _few(problem: LensProblem, seed: int) -> Int[np.ndarray, " r"]:
    """Rows of the training part of the first fold, few enough to be quick."""
    train = problem.folds[0][0]
    lengths = problem.tokens / len(problem)
    count = int(min(len(train), MOST, max(20, MOST_TOKENS / lengths)))
    return np.asarray(train[:count])


def _pilot(ready: Any, law: Any, config: LensConfig) -> Gram:
    if config.activation == SOFTMAX:
        return head_gram(ready, law, PILOT_HEADS, config.activation, config.seed)
    return kernel_gram(ready, law, config.activation)


def _loo(gram: Gram, columns: np.ndarray) -> float:
    return ridge_gram(gram.matrix, RidgeProblem.of(columns), rounding=gram.rounding, overwrite_gram=True).error


def _measure(costs: Preparation, problem: LensProblem, rows: np.ndarray, ready: Any, config: LensConfig) -> None:
    """Time each kind of step once more, now that everything is compiled."""
    tokens = problem.tokens * len(rows) / len(problem)
    began = time.perf_counter()
    gram = head_gram(ready, GaussianHeads(), PILOT_HEADS, config.activation, config.seed)
    costs.token_head = (time.perf_counter() - began) / (tokens * PILOT_HEADS * (ready.dim + 1))
    if config.activation != SOFTMAX:
        began = time.perf_counter()
        gram = kernel_gram(ready, GaussianHeads(), config.activation)
        costs.pair = (time.perf_counter() - began) / tokens**2
        few = max(2, len(rows) // 6)  # around a mean a pair can cost thirty times as much
        kernel_gram(ready[:1], GaussianHeads(1.0), config.activation)
        began = time.perf_counter()
        kernel_gram(ready[:few], GaussianHeads(1.0), config.activation)
        costs.biased_pair = (time.perf_counter() - began) / (tokens * few / len(rows)) ** 2
    part = LensProblem(problem.sets[rows], problem.columns[rows], None, ())
    half = np.arange(len(rows))
    began = time.perf_counter()
    held_out_losses(gram, part, half, half[:1])
    costs.solve = (time.perf_counter() - began) / len(rows) ** 2


def affordable(problem: LensProblem, choice: Preparation, config: LensConfig, spent: float) -> tuple[int, int]:
    """Samples and folds whose fits take about three fifths of what is left; the rest is for learning a law."""
    n, biased = len(problem), choice.strength is not None
    left = 0.6 * (config.budget - config.reserve - spent)
    width = problem.batch.dim + 1
    for size in [n, *(s for s in SIZES if s < n)]:
        tokens = problem.tokens * size / n
        kernels = choice.kernel(tokens) * (3 if problem.has_query else 2)
        kernels += choice.heads(tokens, size, config.n_heads, width) * (2 + 2 * biased)
        for folds in (5, 3):
            fits = (7 + biased) * folds + 12
            if kernels + fits * choice.fit(int(0.8 * size)) < left:
                return size, folds
    return min(n, SIZES[-1]), 2


WIDTH = 1024  # units of the MLP
MIN_SETS = 40


def look(data: Any, config: LensConfig, progress: Callable[[str], None] = lambda text: None) -> Findings:
    """Fit everything there is time for, and answer the four questions; ``progress`` is told what is being done.

    Every learner is ridge on a Gram matrix, its penalty chosen by leave-one-out inside the training part; errors are
    of five folds that take turns, or of the split that the data brings. Costs are measured on a small part first;
    then the number of samples is chosen so that all fits the budget, and what does not is skipped and named.
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
    return _Look(data, problem, choice, config, min(n_folds, len(problem.folds)), began, progress).run()


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
        return n_fits * self.choice.fit(self.found.n_train)

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
        costs, tokens, n_heads = self.choice, self.problem.tokens, self.config.n_heads
        for name, role, law in laws:
            seconds = costs.heads(tokens, len(self.problem), n_heads, self.problem.batch.dim + 1)
            if self._afford(f"{name}, {n_heads} heads", seconds + self._fit_cost(len(self.folds))):
                m = Measured(f"{name}, {n_heads} heads", "attention", role, law, n_heads)
                self._add(m, lambda law=law: self._gram(law))  # type: ignore[misc]
            if not self.exact:
                continue
            seconds = costs.kernel(tokens, biased=role == "biased")
            if self._afford(f"{name}, infinite heads", seconds + self._fit_cost(len(self.folds))):
                m = Measured(f"{name}, infinite heads", "attention", role, law, math.inf)
                self._add(m, lambda law=law: self._gram(law, infinite=True))  # type: ignore[misc]
        if not self.exact:
            self.found.skipped.append("infinite heads: softmax weights have no kernel in closed form.")

    def _gram(self, law: Any, *, infinite: bool = False, ready: Any = None) -> Gram:
        ready, config = self.ready if ready is None else ready, self.config
        if infinite:
            return kernel_gram(ready, law, config.activation)
        return head_gram(ready, law, config.n_heads, config.activation, config.seed)

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
            gram = self._gram(m.law[k])
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
        seconds = self.choice.kernel(self.problem.tokens, biased=True) + self._fit_cost(1)
        if not self.exact or not self._afford("learned law, infinite heads", seconds * len(learned.law)):
            return
        m = Measured("learned law, infinite heads", "attention", "learned", learned.law, math.inf)
        m.seconds = learned.seconds
        for k, law in learned.law.items():
            began = time.perf_counter()
            gram = self._gram(law, infinite=True)
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
        costs, tokens = self.choice, self.problem.tokens
        biased = best.role == "biased" and math.isinf(best.heads)
        seconds = costs.kernel(tokens) + costs.kernel(tokens, biased=biased) + 2 * self._fit_cost(len(self.folds))
        if not self._afford("the query taken away, and shuffled", seconds):
            return
        leader = self._learned_leads() or best
        self.found.query.append(replace(leader, name="with its query", role="with"))
        rule, infinite = self.choice.rule, math.isinf(best.heads)
        bare = self._gram(GaussianHeads(), infinite=infinite, ready=rule.apply(_with_query(self.problem.sets, None)))
        self.found.query.append(self._evaluate(Measured("without a query", "attention", "without"), bare))
        query = self.problem.batch.query
        assert query is not None  # has_query
        mixed = query[np.random.default_rng(self.config.seed).permutation(len(query))]
        swapped = _with_query(self.problem.sets, mixed)
        m = Measured("with the query of another set", "attention", "shuffled")
        if leader is best:
            self._evaluate(m, self._gram(best.law, infinite=infinite, ready=rule.apply(swapped)))
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
            self._evaluate(m, self._gram(law, ready=ready), [0])

    def _made_query(self, best: Measured) -> None:
        """Where no query was given: whether the mean of the keys makes one."""
        if self.problem.sets.has_own_queries:
            return
        other = replace(self.choice.rule, query="given" if self.choice.rule.query == "mean" else "mean")
        seconds = self.choice.kernel(self.problem.tokens, biased=False) + self._fit_cost(len(self.folds))
        if not self._afford("a query made of the keys", seconds):
            return
        gram = self._gram(GaussianHeads(), infinite=math.isinf(best.heads), ready=other.apply(self.problem.sets))
        tried = self._evaluate(Measured("", "attention", ""), gram)
        pairs = {other.query: tried, self.choice.rule.query: best}
        self.found.query += [
            replace(pairs["given"], name="without a query", role="without"),
            replace(pairs["mean"], name="the mean of the keys as query", role="made"),
        ]

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
        seconds = self.choice.heads(self.problem.tokens, len(self.problem), counts[-1], width)
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
        parts = ((self.problem.folds[k][0][:size], self.problem.folds[k][1]) for k in folds)
        return np.concatenate([held_out_losses(gram, self.problem, *part)[0] for part in parts])

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
        gram = self._gram(self._learn(self.ready, half, seconds))
        losses = held_out_losses(gram, self.problem, half, test)[0]
        curve = HeldOutCurve(learned.name, "learned", (len(half), len(train)), (losses, learned.losses[0]))
        self.found.curves.insert(0, curve)

    def _spectra(self) -> None:
        pooled, fixed = self.found.best("pooled"), self._best_fixed()
        for m in (fixed, pooled):
            if m is None or not self._afford(f"spectrum of {m.name}", 4 * self._fit_cost(1)):
                continue
            self.found.spectra.append(spectrum_of(m, self.grams[m.name].matrix, self.problem.columns))


def _with_query(sets: Any, query: np.ndarray | None) -> Any:
    """The same sets with other queries, or none."""
    return sets.with_sets(sets.sets.with_query(query))
