"""The look itself.

The question a table asks, what to fit, on how many sets, and what the budget leaves for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
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
from keyhole.attention.activations import SOFTMAX, check_activation
from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads, HeadDraw
from keyhole.attention.kernels import attention_kernel
from keyhole.attention.learned import CHECKS, MIN_SAMPLES_FOR_ONE_SPLIT, LearnedHeads
from keyhole.choose import Choice, choice_seconds, choose, fit_seconds
from keyhole.data.layout import Dataset
from keyhole.data.sets import POOLINGS, PooledSets, SetBatch, SetGroups
from keyhole.data.tokens import TokenRule, pass_hops
from keyhole.estimators.attention import AttentionRegressor
from keyhole.estimators.validation import as_samples
from keyhole.lab.lens.findings import (
    Findings,
    HeldOutCurve,
    LensConfig,
    Measured,
    TakenApart,
    TargetLoading,
    answer_all,
    difference,
    judge,
)
from keyhole.ridge.gram import ridge_gram
from keyhole.ridge.problem import RidgeProblem
from keyhole.solvers.solve import solve_values
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet

N_FOLDS = 5
MAX_EXAMPLES = 2  # samples taken apart of those that were right, and of those that were wrong
MIN_TESTED = 10  # samples that a test part must have to count as one


@dataclass(frozen=True, eq=False)
class LensProblem:
    """Samples with targets as columns, and the folds that take turns at being held out.

    Samples stand in an order drawn at random, in which every beginning has its share of each class,
    and of each part of a split: a learner that is given fewer of them takes the first ones.
    """

    sets: SetBatch | SetGroups
    columns: Float[np.ndarray, "n t"] = field(repr=False)
    """Regression: the target, centred and of unit variance.

    Classification: ±1 per class, one column for two.
    """
    labels: Int[np.ndarray, " n"] | None = field(repr=False)  # classes by number
    folds: tuple[tuple[np.ndarray, np.ndarray], ...] = field(
        repr=False
    )  # row numbers to train on and to test on
    groups: Int[np.ndarray, " n"] | None = field(
        default=None, repr=False
    )  # numbers; None if every sample is its own
    held: str = "5 folds held out in turn"
    rows: Int[np.ndarray, " n"] | None = field(
        default=None, repr=False
    )  # where the samples stood in the data

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

    def losses(
        self, rows: Int[np.ndarray, " r"], scores: Float[np.ndarray, "r t"]
    ) -> Float[np.ndarray, " u"]:
        """Squared error in units of the variance of the target, or 1 where the wrong class wins.

        One number per sample, or per group, whose members are not independent; of the same mean.
        """
        if self.labels is None:
            lost = np.asarray(np.square(self.columns[rows] - scores).mean(axis=1))
        else:
            won = (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(axis=1)
            lost = np.asarray((won != self.labels[rows]).astype(np.float64))
        if self.groups is None:
            return lost
        _, member = np.unique(self.groups[rows], return_inverse=True)
        sums = np.bincount(member, lost)
        return np.asarray(sums * (len(sums) / len(rows)))

    def training_set(self, rows: Int[np.ndarray, " r"]) -> TrainingSet:
        """Some samples as a fit takes them."""
        groups = None if self.groups is None else self.groups[rows]
        return TrainingSet(self.sets[rows], self.columns[rows], groups=groups)

    def fold(self, k: int, size: int) -> tuple[Int[np.ndarray, " a"], Int[np.ndarray, " b"]]:
        """A fold of the first ``size`` samples: row numbers to train on and to test on."""
        train, test = self.folds[k]
        return train[train < size], test[test < size]

    def trained_on(self, size: int) -> int:
        """Samples that the folds of the first ``size`` train on, on average."""
        return round(float(np.mean([len(self.fold(k, size)[0]) for k in range(len(self.folds))])))

    def ridge(self, rows: Int[np.ndarray, " r"]) -> RidgeProblem:
        """Ridge on some samples, its penalty by leaving out samples, or whole groups."""
        return RidgeProblem.of(
            self.columns[rows], groups=None if self.groups is None else self.groups[rows]
        )


def pose(data: Dataset, kind: str, most: int, seed: int) -> LensProblem:
    """The problem of a dataset, or of ``most`` of its samples."""
    target, n, labels = np.asarray(data.target), len(data), None
    if kind != "regression":
        classes, labels = np.unique(target, return_inverse=True)
        if len(classes) < 2:
            raise ValueError(
                f"the target must have two classes at least: all are {classes[0]!s:.40}."
            )
    parts = np.zeros(n, dtype=np.int64) if labels is None else labels
    rows = balanced_order(parts if data.split is None else 2 * parts + (data.split == 1), seed)[
        :most
    ]
    if labels is None:
        y = target[rows].astype(np.float64)
        spread = float(y.std())
        if not spread > 0:
            raise ValueError(
                f"the target must vary: all {len(y)} values are {y[0]:g}. There is nothing to "
                "learn."
            )
        columns = ((y - y.mean()) / spread)[:, None]
    else:
        labels = labels[rows]
        columns = np.where(labels[:, None] == np.arange(len(classes)), 1.0, -1.0)
        columns = columns[:, 1:] if len(classes) == 2 else columns
    split, groups, time = (
        None if x is None else x[rows] for x in (data.split, data.groups, data.time)
    )
    if groups is not None:
        names, groups = np.unique(groups, return_inverse=True)
        groups = None if len(names) == len(rows) else groups
    folds, held = make_folds(len(rows), labels, split, groups, time)
    return LensProblem(data.sets[rows], columns, labels, folds, groups, held, rows)


def balanced_order(parts: Int[np.ndarray, " n"], seed: int) -> Int[np.ndarray, " n"]:
    """All rows in random order, every beginning with about its share of each part.

    >>> balanced_order(np.repeat([0, 1], [4, 2]), seed=0)[:3] < 4
    array([ True, False,  True])
    """
    rng = np.random.default_rng([seed, len(parts)])
    place = np.empty(len(parts))
    for part in np.unique(parts):
        rows = rng.permutation(np.flatnonzero(parts == part))
        place[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    return np.argsort(place, kind="stable")


def make_folds(
    n: int,
    labels: np.ndarray | None,
    split: np.ndarray | None,
    groups: np.ndarray | None,
    time: np.ndarray | None,
) -> tuple[tuple[tuple[np.ndarray, np.ndarray], ...], str]:
    """Row numbers to train on and to test on, and how they were chosen, in words.

    The split that the data brings; or forward in time, the later half in five parts, each predicted
    from all before it, also where the split says no more than that; or five folds of whole groups,
    or of samples with classes spread evenly. A group is never on both sides.
    """
    parted = split is not None and min((split == 0).sum(), (split == 1).sum()) >= MIN_TESTED
    if parted and not (time is not None and time[split == 0].max() <= time[split == 1].min()):
        pairs, held = (
            [(np.flatnonzero(split == 0), np.flatnonzero(split == 1))],
            "the data's own test part held out",
        )
    elif time is not None:
        order = np.argsort(time, kind="stable")
        ends = [
            float(time[order[k]]) for k in np.linspace(n // 2, n, N_FOLDS + 1)[:-1].astype(int)
        ] + [math.inf]
        pairs = [
            (np.flatnonzero(time < low), np.flatnonzero((time >= low) & (time < high)))
            for low, high in pairwise(ends)
        ]
        pairs = [(train, test) for train, test in pairs if len(train) and len(test)]
        held = (
            f"{len(pairs)} parts of the later half held out, each predicted from what came before "
            "it"
        )
    else:
        fold = np.arange(n) % N_FOLDS
        held = f"{N_FOLDS} folds held out in turn"
        if groups is not None:  # the largest groups first, each to the fold that has least
            counts = np.bincount(groups)
            filled, of_group = np.zeros(N_FOLDS), np.empty(len(counts), dtype=np.int64)
            for group in np.argsort(-counts, kind="stable"):
                of_group[group] = int(filled.argmin())
                filled[of_group[group]] += counts[group]
            fold, held = of_group[groups], f"{N_FOLDS} folds of whole groups held out in turn"
        elif labels is not None:
            fold[np.argsort(labels, kind="stable")] = np.arange(n) % N_FOLDS
        pairs = [(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(N_FOLDS)]
    if groups is not None:
        pairs = [(train[~np.isin(groups[train], groups[test])], test) for train, test in pairs]
    few = [min(len(train), len(test)) for train, test in pairs]
    if not pairs or min(few) < 2:
        raise ValueError(
            f"what is held out must leave something to train on and to test on: {held}, and a part "
            f"has {min(few, default=0)} samples. Use more groups, or times that differ."
        )
    return tuple(pairs), held


EPS32 = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, eq=False)
class Gram:
    """K over all samples, and the unit of rounding behind it."""

    matrix: Float[np.ndarray, "n n"] = field(repr=False)
    rounding: float | None = None


def held_out_losses(
    gram: Gram, problem: LensProblem, train: np.ndarray, test: np.ndarray
) -> tuple[Float[np.ndarray, " u"], float]:
    """Fit on ``train`` with the penalty of least leave-one-out error, predict ``test``.

    Losses and penalty.
    """
    own = np.ascontiguousarray(gram.matrix[np.ix_(train, train)])
    fit = ridge_gram(own, problem.ridge(train), rounding=gram.rounding, overwrite_gram=True)
    scores = gram.matrix[np.ix_(test, train)] @ fit.coef + fit.intercept
    return problem.losses(test, scores), fit.alpha


def make_gram(
    ready: SetBatch | PooledSets, distribution: Any, heads: float, config: LensConfig
) -> Gram:
    """Of so many heads, their features in single precision.

    Or exactly of infinitely many; and of extras.
    """
    if math.isinf(heads):
        return Gram(
            attention_kernel(ready, None, distribution, config.activation) + extras_gram(ready)
        )
    draw = HeadDraw(distribution, int(heads), ready.dim, config.seed, ready.query_dim)
    gram = feature_gram(attention_features(ready, draw, config.activation, dtype="float32"))
    return replace(gram, matrix=gram.matrix + extras_gram(ready))


def extras_gram(ready: Any) -> Float[np.ndarray, "n n"] | float:
    """Of the columns of samples, which are solved for beside the heads; 0 without any."""
    return (
        0.0 if ready.extras is None else np.asarray(ready.extras @ ready.extras.T, dtype=np.float64)
    )


def feature_gram(features: np.ndarray) -> Gram:
    """ΦΦᵀ of centred features."""
    centred = features - features.mean(axis=0)
    rounding = EPS32 if features.dtype == np.float32 else None
    return Gram((centred @ centred.T).astype(np.float64), rounding)


def nested_head_grams(
    ready: SetBatch | PooledSets,
    distribution: Any,
    counts: tuple[int, ...],
    activation: str,
    seed: int,
) -> list[Gram]:
    """The Gram matrices of the first M heads of one draw, for increasing M.

    Every head is computed once.
    """
    draw = HeadDraw(distribution, counts[-1], ready.dim, seed, ready.query_dim)
    total: np.ndarray | float = 0.0
    grams, start = [], 0
    for count in counts:
        features = attention_features(ready, draw.block(start, count), activation, dtype="float32")
        total = total + (count - start) * feature_gram(features).matrix
        grams.append(Gram(np.asarray(total / count + extras_gram(ready)), EPS32))
        start = count
    return grams


def pooled_numbers(
    sets: SetBatch | SetGroups, *, statistics: bool, pooling: str
) -> Float[np.ndarray, "n p"]:
    """Mean (or sum) of the keys, query, extras.

    With ``statistics`` the spread, extremes and number of keys as well.
    """
    batch = sets.sets
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
    if sets.extras is not None:
        parts.append(np.asarray(sets.extras, dtype=np.float64))
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
    """Eigenvalues of the centred matrix over n, and the target's power.

    The power is given as its share along each direction.
    """
    centred = gram - gram.mean(axis=0) - gram.mean(axis=1)[:, None] + gram.mean()
    values, vectors = np.linalg.eigh(centred / len(gram))
    target = columns - columns.mean(axis=0)
    power = np.square(vectors.T @ target).sum(axis=1) / np.square(target).sum()
    return TargetLoading(
        m.name,
        "pooled" if m.family == "pooled" else m.role,
        np.maximum(values[::-1], 0.0),
        power[::-1],
    )


MOST = 300  # samples that choices are made on
HALVINGS = (
    2  # how often the samples of a learner are halved to make it cheaper, before it is left out
)
MIN_HALVED = 100  # samples below which they are not
STEPS = (100, 50, 25, 10)  # steps of a descent to fall back to
MOST_PER_STEP = 400  # samples that one step of a descent uses
LOOKS = "head distribution of two looks, learned"
TWO_HOPS = 2  # what a head distribution of two looks costs to learn, in head distributions of one
MOST_FOR_SPECTRUM = 1000
MIN_PILOT = 20  # samples that choices are made on at least
FOR_CHOICE = 1 / 4  # share of the budget that choices may take
FOR_LEARNERS = (
    2 / 3
)  # share of what is left then that goes to learners; the rest is for the questions
CHEAP = (
    1 / 10
)  # share of what is left for the questions that the last of them may take before the others
CALL_SECONDS = 0.006  # that any layer takes, however small
CACHED_WIDTH = 1000  # from which on a head, of D × D numbers, does not stay in a core's memory


@dataclass(frozen=True)
class Costs:
    """Seconds of one core that steps take, predicted from sizes alone, whatever the machine.

    The constants were measured on one core (Zen 4), from 3 to 2,000 coordinates: there predictions
    are between 0.7 and 5 times the seconds that were taken. D = dim + 1 is the width of a head.
    """

    keys: float  # per sample
    dim: int
    activation: str
    grouped: bool = False
    n_folds: int = N_FOLDS
    has_query: bool = True  # without one, a head is a row of W rather than all D of them
    sets: float = 1.0  # per sample

    def tokens(self, n: int) -> float:
        """Scaling the tokens of n samples."""
        return 1e-9 * n * self.keys * (100 + 8 * self.dim)

    def features(self, n: int, heads: float) -> float:
        """Features of so many heads: drawing W, W times the query, scores and sums over keys."""
        width = self.dim + 1
        entries = width**2 if self.has_query else width
        draws = 30 * entries
        queries = 0.2 * n * self.sets * entries
        keys = 0.4 * n * self.keys * width
        out_of_cache = 1.5 if width > CACHED_WIDTH and self.has_query else 1.0
        return CALL_SECONDS + 1e-9 * heads * (out_of_cache * (draws + queries) + keys)

    def kernel(self, n: int, biased: bool = False) -> float:
        """The exact kernel: all pairs of keys; with a mean, 20 ns more each for a kink in σ."""
        pairs = (n * self.keys) ** 2 / 2
        kink = 20.0 if biased and self.activation in ("relu", "step") else 0.0
        return CALL_SECONDS + 1e-9 * pairs * (2.2 + 0.075 * (self.dim + 1) + kink)

    def product(self, n: int, width: float) -> float:
        """A Gram matrix of n rows of so many numbers."""
        return 2.5e-11 * n**2 * width

    def gram(self, n: int, heads: float, biased: bool = False) -> float:
        """A Gram matrix of so many heads, or of infinitely many, tokens being scaled first."""
        if math.isinf(heads):
            return self.tokens(n) + self.kernel(n, biased)
        return self.tokens(n) + self.features(n, heads) + self.product(n, heads * (self.dim + 1))

    def pooled(self, n: int, *, statistics: bool = False, hidden: int = 0) -> float:
        """A Gram matrix of pooled numbers, or of so many hidden units on top of them."""
        per_coordinate = 5 if statistics else 2  # numbers of a sample, the query's among them
        width = per_coordinate * self.dim
        pooling = 1e-9 * (20 * n * width + 5 * n * self.keys * self.dim)
        if not hidden:
            return pooling + self.product(n, width)
        layer = 1e-9 * (15 * width * hidden + 0.04 * n * width * hidden)
        return pooling + layer + self.product(n, hidden)

    def fit(self, n: float) -> float:
        """A ridge path with leave-one-out.

        Leaving groups out takes eigenvectors, thrice as long.
        """
        return (3 if self.grouped else 1) * fit_seconds(
            math.ceil(n), 0, self.dim, math.inf, has_query=False
        )

    def folds(self, n: int) -> float:
        """A fit per fold of n samples.

        And a seventh more for those of half and a quarter of them.
        """
        return 8 / 7 * self.n_folds * self.fit((1 - 1 / N_FOLDS) * n)

    def learn(self, n: int, steps: int) -> float:
        """A head distribution learned from n samples.

        A gradient is three passes through the features, a look one fit.
        """
        part = min(n, MOST_PER_STEP)
        one = self.gram(part, max(32, min(256, 2 * part // (self.dim + 1))))
        descents = 2 if n >= MIN_SAMPLES_FOR_ONE_SPLIT else 6
        return one * (9 + descents * (3 * steps + CHECKS))

    def curve(self, n: float) -> float:
        """The subsets of a learning curve."""
        return self.n_folds * sum(r * self.fit(n * share) for share, r in SUBSETS)


def share_out(
    budget: float, options: Mapping[str, Sequence[tuple[float, Any]]]
) -> dict[str, tuple[float, Any]]:
    """For everyone the first option it can afford: (seconds, what it gets).

    The cheapest come first and take what they need, as far as it is their equal share of what is
    left: nobody has less because another is dear. What is left over goes to those who would have
    more, in the same order; who can afford nothing is left out.

    >>> share_out(
    ...     10.0, {"dear": [(100.0, "all"), (7.0, "some")], "cheap": [(2.0, "all"), (1.0, "some")]}
    ... )
    {'cheap': (2.0, 'all'), 'dear': (7.0, 'some')}
    """
    chosen: dict[str, tuple[float, Any]] = {}
    ordered = sorted(options, key=lambda name: options[name][0][0])
    for share in (*range(len(ordered), 0, -1), *[1] * len(ordered)):
        name, ordered = ordered[0], [*ordered[1:], ordered[0]]
        has = chosen[name][0] if name in chosen else 0.0
        found = next(
            (option for option in options[name] if option[0] <= has + budget / share), None
        )
        if found is not None and found[0] > has:
            chosen[name] = found
            budget -= found[0] - has
    return chosen


@dataclass(frozen=True)
class TokenChoice:
    """What `keyhole.choose.choose` chose on a part of the samples, as for a user without settings.

    The default settings where there was no budget to ask it.

    Attributes
    ----------
    rule : TokenRule
        The scaling of tokens and the query.
    biased : head distribution or None
        The best of the head distributions with a mean, whether or not it was chosen; None where
        there is no query that keys could resemble.
    seconds : float
        What the choice takes, as predicted.
    is_measured : bool
        False for the default settings.
    """

    rule: TokenRule
    biased: GaussianHeads | None
    seconds: float
    is_measured: bool = True


def make_choice(problem: LensProblem, config: LensConfig) -> TokenChoice:
    """Choose scaling, query and head distribution as the estimators do, within the budget.

    The first training samples choose: as many as make the choice cost no more than its share of the
    budget.
    """
    train = problem.folds[0][0]
    spec = LayerSpec(
        n_heads=config.n_heads,
        activation=config.activation,
        pooling=config.pooling,
        criterion="squared_error" if problem.labels is None else "log_loss",
        seed=config.seed,
        extras_scale=1.0,
    )

    # the largest part whose choice is affordable
    n_samples = min(len(train), MOST)
    while n_samples >= MIN_PILOT:
        data = problem.training_set(train[:n_samples])
        seconds = choice_seconds(spec, data)
        if seconds <= FOR_CHOICE * config.budget:
            choice = choose(spec, data)
            rule = choice.token_rule(data)
            return TokenChoice(rule=rule, biased=best_biased(choice), seconds=seconds)
        n_samples //= 2

    # too little for any choice
    data = problem.training_set(train[:MIN_PILOT])
    rule = TokenRule.learn(data.samples, "standard", "given", config.pooling)
    biased = GaussianHeads(1.0) if problem.has_query else None
    return TokenChoice(rule=rule, biased=biased, seconds=0.0, is_measured=False)


def best_biased(choice: Choice) -> GaussianHeads | None:
    """The candidate with a mean of least loss, under the scaling and query that were chosen."""
    best = None
    for candidate in choice.candidates:
        is_chosen_rule = (candidate.scaling, candidate.query) == (
            choice.spec.scaling,
            choice.spec.query,
        )
        heads = candidate.heads
        if is_chosen_rule and isinstance(heads, GaussianHeads) and has_mean(heads):
            if best is None or candidate.loss < best.loss:
                best = candidate
    if best is None:
        return None
    assert isinstance(best.heads, GaussianHeads)
    return best.heads


def has_mean(heads: GaussianHeads) -> bool:
    """Whether a head distribution is around something else than zero."""
    return bool(np.any(np.asarray(heads.mean) != 0.0))


STATISTICS = ("pooled statistics, ridge", "pooled statistics, MLP")
WIDTH = 1024  # units of the MLP
MIN_SETS = 40
SUBSETS = ((2**-0.5, 2), (0.5, 2), (2**-1.5, 2), (0.25, 4))
"""Points of a learning curve below its end: share of a training part, and subsets drawn of each."""
MIN_SUBSET = 8  # samples of the smallest subset


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
    costs = Costs(
        keys=problem.tokens / len(problem),
        dim=problem.batch.dim,
        activation=config.activation,
        grouped=problem.groups is not None,
        n_folds=len(problem.folds),
        has_query=problem.has_query,
        sets=len(problem.batch) / len(problem),
    )
    choice = make_choice(problem, config)
    costs = replace(costs, has_query=problem.has_query or choice.rule.query != "given")
    return _Look(data, problem, choice, costs, config, progress).run()


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
    activation: str = "relu",
    pooling: str = "mean",
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
    data = X if isinstance(X, Dataset) else None
    samples = data.sets if data is not None else as_samples(AttentionRegressor(), X, reset=True)
    target = data.target if data is not None and y is None else y
    for name, values in {"y": target, "split": split, "groups": groups, "time": time}.items():
        check_no_mask(values, name)
    target = np.asarray(target)
    if target.shape != (len(samples),):
        raise ValueError(
            f"`y` must have one value per sample: got shape {target.shape} for {len(samples)} "
            "samples."
        )
    if target.dtype.kind not in "biufUO" or (
        target.dtype.kind == "f" and not np.isfinite(target).all()
    ):
        raise ValueError(
            f"`y` must hold finite numbers or labels: got {target.dtype} with "
            f"{target[:3].tolist()!r:.60}."
        )
    kind = likely_task(target) if check_choice(task, "task", TASKS) == "auto" else task
    if kind == "regression" and target.dtype.kind in "UO":
        raise ValueError(
            f"task='regression' needs a target of numbers: got labels such as {target[0]!r:.40}."
        )
    given = {"split": split, "groups": groups, "time": time}
    asked: dict[str, Any] = {
        name: np.asarray(values) for name, values in given.items() if values is not None
    }
    for name, values in asked.items():
        if values.shape != target.shape:
            raise ValueError(
                f"`{name}` must have one value per sample: got {values.shape} for {len(samples)} "
                "samples."
            )
    if split is not None and not np.isin(split, (0, 1)).all():
        raise ValueError("`split` must be 0 (train) or 1 (test) for every sample.")
    if time is not None:
        asked["time"] = check_float_array(time, "time").astype(np.float64)
    config = LensConfig(
        kind,
        check_number(budget, "budget", minimum=0.0, exclusive=True),
        check_count(n_heads, "n_heads"),
        check_activation(activation),
        check_choice(pooling, "pooling", POOLINGS),
        seed=check_seed(seed),
    )
    about = Dataset(samples, target) if data is None else replace(data, target=target)
    return look(replace(about, **asked), config)


TASKS = ("auto", "regression", "classification")


def likely_task(target: np.ndarray) -> str:
    """Classification where the target is text, yes or no, or a few whole numbers.

    >>> (
    ...     likely_task(np.array([0.5, 1.0])),
    ...     likely_task(np.array(["a", "b"])),
    ...     likely_task(np.arange(100)),
    ... )
    ('regression', 'classification', 'regression')
    """
    kind = target.dtype.kind
    few = kind in "iu" and len(np.unique(target)) <= min(20, max(2, len(target) // 5))
    return "classification" if kind in "UbO" or few else "regression"


class _Look:
    """The state of a look: Gram matrices at hand, findings so far, predicted seconds left."""

    def __init__(
        self,
        data: Any,
        problem: LensProblem,
        choice: TokenChoice,
        costs: Costs,
        config: LensConfig,
        progress: Any,
    ) -> None:
        self.problem, self.choice, self.costs, self.config, self.progress = (
            problem,
            choice,
            costs,
            config,
            progress,
        )
        self.target = np.asarray(data.target)
        self.left = config.budget - choice.seconds
        self.reserved = 0.0  # of what is left, for what comes last
        self.folds = range(len(problem.folds))
        self.exact = config.activation != SOFTMAX
        self.grams: dict[str, Gram] = {}
        self.found = Findings(config, data.description, len(data), names=data.names)
        if not choice.is_measured:
            self._skip(
                "choosing how to scale tokens: takes too long even on a few sets. They are scaled "
                "to 'standard'."
            )
        self.plan = self._plan()
        sizes = [size for _, (size, _) in self.plan.values()]
        self.tiers = sorted(set(sizes)) or [len(problem)]
        self.found.n_used, self.found.n_train = self.tiers[-1], problem.trained_on(self.tiers[-1])
        self.found.settings = self._settings()

    def run(self) -> Findings:
        self._constant()
        self._pooled()
        self._fixed_heads()
        self._learned_heads()
        # what comes last is not left out for want of little, however much is spent before it
        self.reserved = sum(s for s in self._last_seconds() if s <= CHEAP * self.left)
        self._curves()
        self._query()
        self._learned_infinite()
        self._heads()
        self.reserved = 0.0
        self._spectra()
        self._examples()
        self.found.cost = self.config.budget - self.left
        self.found.answers = answer_all(self.found)
        return self.found

    def _plan(self) -> dict[str, tuple[float, tuple[int, int]]]:
        """Who is fitted: its predicted seconds, and on how many samples.

        And the steps of a head distribution that is learned.
        """
        n, costs, config = len(self.problem), self.costs, self.config
        sizes = [n >> k for k in range(HALVINGS + 1) if k == 0 or n >> k >= MIN_HALVED]
        ridge, mlp = STATISTICS
        options: dict[str, Any] = {
            f"{config.pooling} pool, ridge": [
                (costs.pooled(s) + costs.folds(s), (s, 0)) for s in sizes
            ],
            ridge: [(costs.pooled(s, statistics=True) + costs.folds(s), (s, 0)) for s in sizes],
            mlp: [
                (costs.pooled(s, statistics=True, hidden=WIDTH) + costs.folds(s), (s, 0))
                for s in sizes
            ],
        }
        for name, (distribution, heads) in self._distributions().items():
            biased = has_mean(distribution)
            options[name] = [(costs.gram(s, heads, biased) + costs.folds(s), (s, 0)) for s in sizes]
        if config.steps:
            turns = min(2, costs.n_folds)
            rungs = [(n, min(steps, config.steps)) for steps in STEPS] + [
                (s, STEPS[-1]) for s in sizes[1:]
            ]
            for name, dearer in ((self._learned_name(config.n_heads), 1), (LOOKS, TWO_HOPS)):
                if dearer == 1 or self._asks():
                    options[name] = [
                        (
                            turns
                            * (
                                dearer * costs.learn(s, k)
                                + costs.gram(s, config.n_heads)
                                + costs.fit(0.8 * s)
                            ),
                            (s, k),
                        )
                        for s, k in rungs
                    ]
        plan = share_out(FOR_LEARNERS * self.left, options)
        for name in options:
            if name not in plan:
                seconds = options[name][-1][0]
                self._skip(
                    f"{name}: takes about {seconds:.2g} s even on {options[name][-1][1][0]} sets."
                )
        return plan

    def _distributions(self) -> dict[str, tuple[GaussianHeads, float]]:
        """Head distributions that are not learned, by the names of learners.

        The head distribution, and its number of heads.
        """
        distributions = {"zero-mean attention": GaussianHeads()}
        if self.choice.biased is not None:
            distributions["biased attention"] = self.choice.biased
        counts = {f"{self.config.n_heads} heads": float(self.config.n_heads)}
        if self.exact:
            counts["infinite heads"] = math.inf
        return {
            f"{name}, {many}": (distribution, heads)
            for name, distribution in distributions.items()
            for many, heads in counts.items()
        }

    def _learned_name(self, heads: float) -> str:
        return f"learned head distribution, {'infinite' if math.isinf(heads) else heads} heads"

    def _settings(self) -> str:
        rule, config, found = self.choice.rule, self.config, self.found
        used = f"{found.n_used} of {found.n_given} sets, drawn at random"
        if found.n_used == found.n_given:
            used = f"all {found.n_used} sets"
        if len(self.tiers) > 1:
            used += f" ({self.tiers[0]} for the dearest learner)"
        bias = ""
        if self.choice.biased is not None:
            strength = self.choice.biased.mean
            if isinstance(strength, tuple):
                strength = "{:g} to {:g}".format(*strength)
            else:
                strength = f"{strength:g}"
            bias = f", biased heads of strength {strength}"
        chosen = f"chosen on {MOST} training sets at most"
        if not self.choice.is_measured:
            chosen = "the default settings: the budget is too small to choose"
        return (
            f"{used}, {self.problem.held}; tokens {rule.scaling}, query {rule.query}, pooling "
            f"{rule.pooling}, {config.activation} weights{bias} ({chosen}); {config.n_heads} heads "
            f"where finite; seed {config.seed}; {config.budget:g} predicted seconds."
        )

    def _skip(self, words: str) -> None:
        self.found.skipped.append(words)

    def _afford(self, what: str, seconds: float) -> bool:
        """Take the seconds from what is left and say what comes next.

        Or note that there are too few.
        """
        available = self.left - self.reserved
        if seconds > available:
            self._skip(f"{what}: takes about {seconds:.2g} s, {max(available, 0):.2g} s are left.")
            return False
        self.left -= seconds
        self.progress(what)
        return True

    def _ready(self, size: int, sets: Any = None, rule: TokenRule | None = None) -> Any:
        return (rule or self.choice.rule).apply(
            (self.problem.sets if sets is None else sets)[:size]
        )

    def _evaluate(self, m: Measured, gram: Gram, folds: Any = None) -> Measured:
        """Losses of the folds, on all samples of a Gram matrix and on fewer.

        Fewer are as many as those have that were given fewer.
        """
        size = len(gram.matrix)
        for tier in {t for t in self.tiers if t < size} | {size}:
            for k in self.folds if folds is None else folds:
                fold = self.problem.fold(k, tier)
                if min(map(len, fold)) > 1:
                    m.at.setdefault(tier, {})[k], m.alpha = held_out_losses(
                        gram, self.problem, *fold
                    )
        return m

    def _add(self, m: Measured, make: Callable[[int], Gram]) -> None:
        """Fit a learner on the samples that the plan gives it, if it does."""
        if m.name not in self.plan:
            return
        seconds, (size, _) = self.plan[m.name]
        self._afford(m.name, seconds)
        m.seconds = seconds
        self.grams[m.name] = make(size)
        self.found.learners.append(self._evaluate(m, self.grams[m.name]))

    def _constant(self) -> None:
        """The mean of the training part, or its most frequent class."""
        m = Measured("a constant guess", "constant", "null")
        for tier in self.tiers:
            for k in self.folds:
                train, test = self.problem.fold(k, tier)
                if min(len(train), len(test)) > 1:
                    guess = self.problem.columns[train].mean(axis=0)
                    m.at.setdefault(tier, {})[k] = self.problem.losses(
                        test, np.tile(guess, (len(test), 1))
                    )
        self.found.learners.append(m)

    def _pooled(self) -> None:
        pooling, ridge, mlp = self.config.pooling, *STATISTICS

        def numbers(size: int, statistics: bool = True) -> np.ndarray:
            return pooled_numbers(self.problem.sets[:size], statistics=statistics, pooling=pooling)

        self._add(
            Measured(f"{pooling} pool, ridge", "pooled", "ridge"),
            lambda n: linear_gram(numbers(n, False)),
        )
        self._add(Measured(ridge, "pooled", "statistics"), lambda n: linear_gram(numbers(n)))
        self._add(
            Measured(mlp, "pooled", "mlp"), lambda n: mlp_gram(numbers(n), WIDTH, self.config.seed)
        )

    def _fixed_heads(self) -> None:
        for name, (distribution, heads) in self._distributions().items():
            m = Measured(
                name,
                "attention",
                "biased" if has_mean(distribution) else "attention",
                distribution,
                heads,
            )
            self._add(
                m,
                lambda n, distribution=distribution, heads=heads: make_gram(  # type: ignore[misc]
                    self._ready(n), distribution, heads, self.config
                ),
            )
        if self.choice.biased is None:
            self._skip("biased attention: without a query there is nothing for keys to resemble.")
        if not self.exact:
            self._skip("infinite heads: softmax weights have no kernel in closed form.")

    def _asks(self) -> bool:
        """Whether sets come with a query of their own, which further looks extend."""
        return self.choice.rule.query == "given" and self.problem.sets.has_own_queries

    def _learned_heads(self) -> None:
        """Learn a head distribution on the training part of each of a few folds.

        Where there is a query, one of two looks too.
        """
        if self.config.steps == 0:
            self._skip("learned head distribution: none was asked for.")
        for name, role in ((self._learned_name(self.config.n_heads), "learned"), (LOOKS, "looks")):
            if name not in self.plan:
                continue
            m = Measured(name, "attention", role, {}, self.config.n_heads)
            m.seconds, (size, _) = self.plan[name]
            self.left -= m.seconds
            ready = self._ready(size)
            for k in self.folds[:2]:
                self.progress(f"{name} on fold {k + 1}")
                m.distribution[k] = self._learn(ready, k, name)
                seen = ready.with_sets(pass_hops(ready.sets, m.distribution[k].hops_))
                self._evaluate(m, make_gram(seen, m.distribution[k], m.heads, self.config), [k])
            self.found.learners.append(m)
        if (learned := self._learned()) is not None:
            self.found.distribution = learned.distribution[0]

    def _learn(self, ready: Any, k: int, name: str) -> Any:
        """A head distribution for the training part of a fold.

        Its noise has one scale where infinitely many heads of the same head distribution are shown
        beside it, which needs that.
        """
        _, (size, steps) = self.plan[name]
        kind: dict[str, Any] = (
            {"covariance": "none" if self.exact else "auto"} if name != LOOKS else {"hops": 2}
        )
        distribution = LearnedHeads(steps=steps, max_samples=MOST_PER_STEP, **kind)
        rows, groups = self.problem.fold(k, size)[0], self.problem.groups
        options: dict[str, Any] = {"activation": self.config.activation, "seed": self.config.seed}
        columns = self.problem.columns[rows]
        return distribution.fit(
            ready[rows], columns, groups=None if groups is None else groups[rows], **options
        )

    def _learned(self) -> Measured | None:
        return next((m for m in self.found.learners if m.role == "learned"), None)

    def _learned_infinite(self) -> None:
        """The same head distributions with infinitely many heads."""
        learned = self._learned()
        if learned is None or not self.exact:
            return
        m = replace(learned, name=self._learned_name(math.inf), heads=math.inf, at={})
        m.seconds = len(m.distribution) * (
            self.costs.gram(learned.size, math.inf, biased=True) + self.costs.fit(learned.size)
        )
        if self._afford(m.name, m.seconds):
            ready = self._ready(learned.size)
            for k, distribution in m.distribution.items():
                self._evaluate(m, make_gram(ready, distribution, math.inf, self.config), [k])
            self.found.learners.append(m)

    def _best_fixed(self) -> Measured | None:
        fixed = [m for m in self.found.learners if m.name in self.grams and m.family == "attention"]
        return min(fixed, key=self.found.error_of, default=None)

    def _learned_leads(self) -> Measured | None:
        """The learned head distribution, if it beats the best fixed one beyond doubt."""
        fixed, learned = self._best_fixed(), self._learned()
        if learned is None or fixed is None:
            return learned
        return learned if judge(difference(fixed, learned)) == "yes" else None

    def _query(self) -> None:
        best = self._best_fixed()
        if best is None:
            return
        if not self.problem.has_query:
            self._made_query(best)
            return
        leader = self._learned_leads() or best
        size = leader.size
        plain = replace(self.costs, has_query=False).gram(best.size, best.heads)
        again = self.costs.gram(best.size, best.heads, best.role == "biased")
        if leader is not best:  # a head distribution is learned anew on the first fold
            again = leader.seconds / len(leader.distribution)
        if not self._afford(
            "the query taken away, and shuffled", plain + again + 2 * self.costs.folds(best.size)
        ):
            return
        self.found.query.append(replace(leader, name="with its query", role="with"))
        query = self.problem.batch.query
        assert query is not None  # has_query
        bare = self._ready(best.size, _with_query(self.problem.sets, None))
        gram = make_gram(bare, GaussianHeads(), best.heads, self.config)
        self.found.query.append(
            self._evaluate(Measured("without a query", "attention", "without"), gram)
        )
        mixed = query[np.random.default_rng(self.config.seed).permutation(len(query))]
        swapped = self._ready(size, _with_query(self.problem.sets, mixed))
        m = Measured("with the query of another set", "attention", "shuffled")
        distribution, folds = (
            (best.distribution, None)
            if leader is best
            else (self._learn(swapped, 0, leader.name), [0])
        )
        self.found.query.append(
            self._evaluate(m, make_gram(swapped, distribution, leader.heads, self.config), folds)
        )

    def _made_query(self, best: Measured) -> None:
        """Where no query was given: whether the mean of the keys makes one."""
        if self.problem.sets.has_own_queries:
            return
        other = replace(
            self.choice.rule, query="given" if self.choice.rule.query == "mean" else "mean"
        )
        costs = replace(self.costs, has_query=other.query != "given")
        seconds = costs.gram(best.size, best.heads) + costs.folds(best.size)
        if not self._afford("a query made of the keys", seconds):
            return
        gram = make_gram(
            self._ready(best.size, rule=other), GaussianHeads(), best.heads, self.config
        )
        tried = self._evaluate(Measured("", "attention", ""), gram)
        pairs = {other.query: tried, self.choice.rule.query: best}
        self.found.query += [
            replace(pairs["given"], name="without a query", role="without"),
            replace(pairs["mean"], name="the mean of the keys as query", role="made"),
        ]

    def _heads(self) -> None:
        """The error against the number of heads, for the head distribution that did best."""
        leader = self._learned_leads() or self._best_fixed()
        if leader is None:
            return
        used = self.config.n_heads
        counts = tuple(sorted({4, 16, 64, used} - {c for c in (4, 16, 64) if c > used}))
        infinite = [
            m
            for m in self.found.learners
            if m.distribution is leader.distribution and math.isinf(m.heads)
        ]
        counts = counts if infinite else (*counts, 4 * used)
        folds = [k for k in self.folds[:3] if k in leader.losses]
        many = len(folds) if leader.role == "learned" else 1

        def seconds(size: int) -> float:
            return many * self.costs.gram(size, counts[-1]) + len(counts) * len(
                folds
            ) * self.costs.fit(0.8 * size)

        sizes = sorted((s for s in leader.at if all(s in m.at for m in infinite)), reverse=True)
        size = next((s for s in sizes if seconds(s) <= (self.left - self.reserved) / 2), sizes[-1])
        if not self._afford("the number of heads", seconds(size)):
            return
        rows = [Measured(f"{c} heads", "attention", "finite", heads=c) for c in counts]
        ready = self._ready(size)
        for k in folds:
            if leader.role == "learned" or k == folds[0]:
                distribution = (
                    leader.distribution[k] if leader.role == "learned" else leader.distribution
                )
                grams = nested_head_grams(
                    ready, distribution, counts, self.config.activation, self.config.seed
                )
            for m, gram in zip(rows, grams, strict=True):
                m.at.setdefault(size, {})[k] = held_out_losses(
                    gram, self.problem, *self.problem.fold(k, size)
                )[0]
        self.found.heads = rows
        for m in infinite:  # on the same folds as the others
            losses = {k: m.at[size][k] for k in folds if k in m.at[size]}
            self.found.heads.append(
                replace(m, name="infinite heads", role="infinite", at={size: losses})
            )

    def _curves(self) -> None:
        """Held-out error against training samples, which ends where the table is.

        On the same held-out samples throughout.
        """
        pooled, fixed = self.found.best("pooled"), self._best_fixed()
        for m in (fixed, pooled):
            n = 0 if m is None else self.problem.trained_on(m.size)
            if m is None or not self._afford(f"learning curve of {m.name}", self.costs.curve(n)):
                continue
            sizes, losses = learning_curve(self.grams[m.name], self.problem, self.config.seed)
            end = np.concatenate(list(m.losses.values()))
            role = "pooled" if m is pooled else m.role
            self.found.curves.append(HeldOutCurve(m.name, role, (*sizes, n), (*losses, end)))

    def _spectra(self) -> None:
        pooled, fixed = self.found.best("pooled"), self._best_fixed()
        for m in (fixed, pooled):
            if m is None:
                continue
            gram = self.grams[m.name].matrix[:MOST_FOR_SPECTRUM, :MOST_FOR_SPECTRUM]
            if self._afford(f"spectrum of {m.name}", self._spectrum_seconds(m)):
                self.found.spectra.append(spectrum_of(m, gram, self.problem.columns[: len(gram)]))

    def _spectrum_seconds(self, m: Measured) -> float:
        return 4 * self.costs.fit(min(m.size, MOST_FOR_SPECTRUM))

    def _examples_seconds(self, best: Measured) -> float:
        return 2 * self.costs.gram(best.size, best.heads)

    def _last_seconds(self) -> list[float]:
        """What the spectra and the samples taken apart will take, predicted."""
        shown = [m for m in (self.found.best("pooled"), self._best_fixed()) if m is not None]
        seconds = [self._spectrum_seconds(m) for m in shown]
        best = self._best_finite()
        if best is not None:
            seconds.append(self._examples_seconds(best))
        return seconds

    def _best_finite(self) -> Measured | None:
        finite = [m for m in self.found.learners if m.name in self.grams and math.isfinite(m.heads)]
        return min(finite, key=self.found.error_of, default=None)

    def _examples(self) -> None:
        """Held-out samples taken apart key by key.

        Those that the best finite heads got most right and most wrong.
        """
        best = self._best_finite()
        if best is None or not self._afford("which keys did it", self._examples_seconds(best)):
            return
        problem, ready = self.problem, self._ready(best.size)
        assert problem.rows is not None  # of a dataset
        train, test = problem.fold(0, best.size)
        heads = HeadDraw(
            best.distribution, int(best.heads), ready.dim, self.config.seed, ready.query_dim
        )
        groups = None if problem.groups is None else problem.groups[train]
        spec = LayerSpec(activation=self.config.activation)
        data = TrainingSet(ready[train], problem.columns[train], groups=groups)
        layer = solve_values(spec, data, heads).layer

        def of_classes(found: np.ndarray) -> np.ndarray:
            two = problem.labels is not None and found.shape[1] == 1
            return np.hstack([-found, found]) if two else found

        scores, truths = of_classes(layer.predict(ready[test])), self.target[problem.rows]
        if problem.labels is None:
            won, unit, lead = (
                np.zeros(len(test), dtype=int),
                truths.std(),
                -np.abs(scores - problem.columns[test])[:, 0],
            )
            right, said = lead >= np.median(lead), truths.mean() + unit * scores[:, 0]
        else:
            own = np.arange(scores.shape[1]) == problem.labels[test][:, None]
            won, unit, lead = (
                scores.argmax(axis=1),
                1.0,
                scores[own] - np.where(own, -math.inf, scores).max(axis=1),
            )
            right, said = lead > 0, np.unique(self.target)[won]
        order = np.argsort(lead, kind="stable")
        for i in (*order[right[order]][::-1][:MAX_EXAMPLES], *order[~right[order]][:MAX_EXAMPLES]):
            parts = of_classes(layer.contributions(ready[test[i : i + 1]]))[:, won[i]] * unit
            keys = problem.sets[test[i : i + 1]].sets.tokens
            about = (
                int(problem.rows[test[i]]),
                bool(right[i]),
                _brief(truths[test[i]]),
                _brief(said[i]),
            )
            self.found.examples.append(TakenApart(*about, keys, parts))


def _brief(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:40]


def learning_curve(
    gram: Gram, problem: LensProblem, seed: int
) -> tuple[tuple[int, ...], tuple[Float[np.ndarray, " u"], ...]]:
    """Sizes below that of a training part, increasing, and the losses for each.

    Losses are those of all that is held out, fold by fold.

    Every loss is a mean over a few random subsets of the training part of its fold: sub-blocks of
    one Gram matrix, each with a penalty of its own by leave-one-out. Groups are taken whole.
    """
    folds = [problem.fold(k, len(gram.matrix)) for k in range(len(problem.folds))]
    n = problem.trained_on(len(gram.matrix))
    rng = np.random.default_rng([seed, n])
    sizes, curve = [], []
    for share, repeats in reversed(SUBSETS):
        if share * n < MIN_SUBSET:
            continue
        parts = [
            [
                held_out_losses(gram, problem, _subset(train, share, problem, rng), test)[0]
                for _ in range(repeats)
            ]
            for train, test in folds
        ]
        sizes.append(round(share * n))
        curve.append(np.concatenate([np.mean(part, axis=0) for part in parts]))
    return tuple(sizes), tuple(curve)


def _subset(
    train: np.ndarray, share: float, problem: LensProblem, rng: np.random.Generator
) -> np.ndarray:
    """About a share of the rows.

    Whole groups, in an order of which every beginning has its share of each class.
    """
    if problem.groups is not None:
        names = rng.permutation(np.unique(problem.groups[train]))
        return train[np.isin(problem.groups[train], names[: max(2, round(share * len(names)))])]
    parts = np.zeros(len(train), dtype=int) if problem.labels is None else problem.labels[train]
    return np.sort(
        train[balanced_order(parts, int(rng.integers(2**31)))[: round(share * len(train))]]
    )


def _with_query(sets: Any, query: np.ndarray | None) -> Any:
    """The same sets with other queries, or none."""
    return sets.with_sets(sets.sets.with_query(query))
