"""How sure a prediction is: intervals, label sets, standard deviations, novelty, importance.

Everything here follows from the factors of the members, kept from their fits: f_{−g}(x) = f(x) −
Σ_{j in g} h_j(x) e_j is the prediction of the fit without the samples g. Of a combination these are
weighted sums of its members'. The estimators have thin methods for all this, whose docstrings say
what is guaranteed; docs/explanation/contributions_and_intervals.md explains it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import log_softmax, softmax

from keyhole._array import block_size, blocks
from keyhole._checks import check_number
from keyhole.fit.combine import Combination
from keyhole.fit.member import Member
from keyhole.fit.samples import TrainingSet

MAX_ERRORS_KEPT = 2048
"""Leave-one-out errors that every model keeps, for intervals without factors; more are drawn from."""

RANK_SLACK = 1e-9
"""Relative slack in comparing sums of shares with a rank: sums of 1/|g| are rounded."""


class PlainJackknifeWarning(UserWarning):
    """Intervals are those of the plain jackknife, which guarantees less than jackknife+."""


@dataclass(frozen=True)
class Groups:
    """Samples of each group; every sample is its own where none were given."""

    numbers: Int[np.ndarray, " n"]
    sizes: Int[np.ndarray, " g"]

    @classmethod
    def of(cls, data: TrainingSet) -> Groups:
        """The groups of training samples."""
        given = np.arange(len(data)) if data.groups is None else data.groups
        _, numbers, sizes = np.unique(given, return_inverse=True, return_counts=True)
        return cls(numbers=numbers, sizes=sizes)

    @property
    def are_single(self) -> bool:
        """Whether every sample is left out by itself."""
        return len(self.sizes) == len(self.numbers)

    @property
    def shares(self) -> Float[np.ndarray, " n"]:
        """What each sample counts in a rank over groups: one over the size of its group."""
        return 1.0 / self.sizes[self.numbers]

    def sums(self, columns: Float[np.ndarray, "*m n"]) -> Float[np.ndarray, "*m n"]:
        """The sum over the group of each sample, along the last axis."""
        if self.are_single:
            return columns
        totals = np.zeros((*columns.shape[:-1], len(self.sizes)))
        order = np.argsort(self.numbers, kind="stable")
        starts = np.concatenate([[0], np.cumsum(self.sizes)[:-1]])
        totals = np.add.reduceat(columns[..., order], starts, axis=-1)
        return np.asarray(totals[..., self.numbers])

    def mean_and_error(self, numbers: Float[np.ndarray, " n"]) -> tuple[float, float]:
        """The mean over groups of numbers of samples, and its standard error."""
        means = np.bincount(self.numbers, weights=numbers * self.shares)
        means = means[np.isfinite(means)]
        return float(means.mean()), float(means.std(ddof=1) / math.sqrt(len(means)))


def without_each(
    combination: Combination, data: TrainingSet, samples: Any, memory_budget: int
) -> Iterator[tuple[slice, Float[np.ndarray, "m t n"]]]:
    """f_{−g}(x) of all outputs by the fit without the group of each training sample, in blocks.

    Members whose heads were learned have no such fits, and predict as they are.
    """
    groups = Groups.of(data)
    n, n_outputs = data.outputs.shape
    n_members = len(combination.members)
    rows_at_once = block_size(8 * n * (3 + 2 * n_outputs) * max(1, n_members), memory_budget)
    for rows in blocks(len(samples), rows_at_once):
        part = samples[rows]
        total = np.zeros((len(part), n_outputs, n))
        total += combination.intercept[None, :, None]
        for weight, member in zip(combination.weights, combination.members, strict=True):
            total += weight * member_without_each(member, data, groups, part)
        yield rows, total


def member_without_each(
    member: Member, data: TrainingSet, groups: Groups, samples: Any
) -> Float[np.ndarray, "m t n"]:
    """f_{−g}(x) = f(x) − Σ_{j in g} h_j(x) e_j of one member."""
    prepared = member.embedding.prepared(samples)
    predicted = member.predict_prepared(prepared)
    n = len(data)
    if member.learned_note or not member.factors:
        return np.repeat(predicted[:, :, None], n, axis=2)
    compared = member.compared(prepared)
    residuals = data.outputs - member.held_out
    if len(member.factors) == 1 and member.loss == "squared_error":
        hat = member.factors[0].hat(compared)
        shifts = hat[:, None, :] * residuals.T
    else:
        # one factor for each output: its working residuals are those of the last Newton step
        shifts = np.empty((len(predicted), data.outputs.shape[1], n))
        for output, factor in enumerate(member.factors):
            hat = factor.hat(compared)
            working: Any = factor
            fitted = factor.hat(_compared_of_training(member)) @ working.problem.y[:, 0]
            working_residuals = _working_residuals(factor, fitted, groups)
            shifts[:, output] = hat * working_residuals
    return predicted[:, :, None] - groups.sums(shifts)


def _compared_of_training(member: Member) -> Any:
    """What the factor compares, of the training samples."""
    return member.compared(member.embedding.train)


def _working_residuals(
    factor: Any, fitted: Float[np.ndarray, " n"], groups: Groups
) -> Float[np.ndarray, " n"]:
    """Residuals of a ridge fit without each sample, or its group."""
    residuals = factor.problem.y[:, 0] - fitted
    if groups.are_single:
        return np.asarray(residuals / np.maximum(factor.complements(), 1e-12))
    roots = np.sqrt(factor.problem.weights)
    left_out = np.empty_like(residuals)
    for number in range(len(groups.sizes)):
        rows = np.flatnonzero(groups.numbers == number)
        solved = np.linalg.solve(factor.complement(rows), roots[rows] * residuals[rows])
        left_out[rows] = solved / roots[rows]
    return left_out


def some_errors(errors: Float[np.ndarray, "k t"]) -> Float[np.ndarray, "l t"]:
    """At most `MAX_ERRORS_KEPT` leave-one-out errors, each output's in order; unknown is infinite."""
    errors = np.where(np.isnan(errors), np.inf, errors)
    if len(errors) > MAX_ERRORS_KEPT:
        rows = np.random.default_rng(0).permutation(len(errors))[:MAX_ERRORS_KEPT]
        errors = errors[rows]
    return np.sort(errors, axis=0)


def one_of_each_group(data: TrainingSet) -> Int[np.ndarray, " g"]:
    """All samples, or one of each group, drawn at random and always the same."""
    if data.groups is None:
        return np.arange(len(data))
    order = np.random.default_rng(0).permutation(len(data))
    _, first = np.unique(data.groups[order], return_index=True)
    return np.sort(order[first])


def check_coverage(coverage: Any) -> float:
    """Return a share strictly between 0 and 1."""
    value = check_number(coverage, "coverage", minimum=0.0, exclusive=True)
    if value >= 1:
        raise ValueError(
            f"`coverage` must be between 0 and 1, the share of outcomes inside: got {value:g}. Try "
            "0.9."
        )
    return value


def upper_ends(
    values: Float[np.ndarray, "*m n"], shares: Float[np.ndarray, " n"], coverage: float
) -> Float[np.ndarray, "*m"]:
    """The largest of ``values`` below which shares of less than coverage·(G + 1) lie.

    The shares add up to G, the number of groups. Of n values with a share of one each, this is the
    ⌈coverage·(n + 1)⌉-th smallest; ∞ where there is none. NaN, of a fit that is not known, counts
    as ∞.

    >>> upper_ends(np.arange(10.0, 20.0), np.ones(10), 0.8)
    array(18.)
    """
    # too few samples for that coverage
    total = float(shares.sum())
    rank = (coverage - RANK_SLACK) * (total + 1)
    if total < rank:
        return np.full(values.shape[:-1], np.inf)
    if (shares == shares[0]).all():
        # equal shares: the value of one rank, which needs no full sort; NaN comes last
        position = math.ceil(rank / float(shares[0])) - 1
        ends = np.partition(values, position, axis=-1)[..., position]
    else:
        # the last value, in order, before which the shares add up to less than the rank
        order = np.argsort(values, axis=-1, kind="stable")
        share_below = np.cumsum(shares[order], axis=-1) - shares[order]
        position = (share_below < rank).sum(axis=-1)[..., None] - 1
        last = np.take_along_axis(order, position, axis=-1)
        ends = np.take_along_axis(values, last, axis=-1)[..., 0]
    return np.asarray(np.where(np.isnan(ends), np.inf, ends))


def jackknife_plus_intervals(
    combination: Combination,
    data: TrainingSet,
    samples: Any,
    coverage: float,
    *,
    adaptive: bool,
    memory_budget: int,
) -> Float[np.ndarray, "m t 2"]:
    """Lower and upper ends for every sample and output, from all leave-one-out fits."""
    groups = Groups.of(data)
    sizes = np.abs(data.outputs - combination.held_out).T  # (t, n)
    if adaptive:
        sizes = sizes / training_deviations(combination, data)
    intervals = np.empty((len(samples), len(sizes), 2))
    for rows, without in without_each(combination, data, samples, memory_budget):
        spread = sizes[None]
        if adaptive:
            spread = spread * deviations_of(combination, samples[rows])[:, None, None]
        # ranks of f_{−i}(x) + spread from below, and of f_{−i}(x) − spread from above
        intervals[rows, :, 1] = upper_ends(without + spread, groups.shares, coverage)
        intervals[rows, :, 0] = -upper_ends(spread - without, groups.shares, coverage)
    return intervals


def plain_intervals(
    predicted: Float[np.ndarray, "m t"], errors: Float[np.ndarray, "k t"], coverage: float
) -> Float[np.ndarray, "m t 2"]:
    """f(x) plus and minus a quantile of the errors of samples that were held out."""
    size = upper_ends(errors.T, np.ones(len(errors)), coverage)
    return np.stack([predicted - size, predicted + size], axis=2)


def probabilities_of(
    combination: Combination, scores: Float[np.ndarray, "*m t"]
) -> Float[np.ndarray, "*m c"]:
    """Probabilities of the classes."""
    return np.asarray(softmax(combination.logits(scores), axis=-1))


def log_probabilities_of(
    combination: Combination, scores: Float[np.ndarray, "*m t"]
) -> Float[np.ndarray, "*m c"]:
    """Their logarithms, without underflow."""
    return np.asarray(log_softmax(combination.logits(scores), axis=-1))


def label_errors(
    combination: Combination, scores: Float[np.ndarray, "k t"], labels: Int[np.ndarray, " k"]
) -> Float[np.ndarray, "k 1"]:
    """One less the probability of the right label; 1 for a score that is not known."""
    probabilities = probabilities_of(combination, scores)
    of_label = np.take_along_axis(probabilities, labels[:, None], axis=1)
    return np.where(np.isnan(of_label), 1.0, 1 - of_label)


def jackknife_plus_label_sets(
    combination: Combination,
    data: TrainingSet,
    labels: Int[np.ndarray, " n"],
    samples: Any,
    coverage: float,
    memory_budget: int,
) -> Bool[np.ndarray, "m c"]:
    """Which labels are plausible, from all leave-one-out fits.

    Label y is plausible for x unless c(n+1) of the training samples, or groups, have
    p_{−i}(x_i, y_i) > p_{−i}(x, y), a higher leave-one-out probability of their own label.
    """
    groups = Groups.of(data)
    of_training = 1 - label_errors(combination, combination.held_out, labels)
    limit = coverage * (len(groups.sizes) + 1) * (1 - RANK_SLACK)
    plausible = []
    for _, without in without_each(combination, data, samples, memory_budget):
        # p_{−i}(x, y) of all labels, (new samples, training samples, classes)
        of_new = probabilities_of(combination, np.moveaxis(without, 1, 2))
        share_above = np.einsum("n,mnc->mc", groups.shares, of_training > of_new)
        plausible.append(share_above < limit)
    return np.concatenate(plausible)


def plain_label_sets(
    probabilities: Float[np.ndarray, "m c"], errors: Float[np.ndarray, "k 1"], coverage: float
) -> Bool[np.ndarray, "m c"]:
    """Which labels are plausible: p(x, y) is compared with the held-out p(x_i, y_i)."""
    of_training = np.sort(1 - errors[:, 0])
    n = len(of_training)
    n_above = n - np.searchsorted(of_training, probabilities, side="right")
    return np.asarray(n_above < coverage * (n + 1) * (1 - RANK_SLACK))


# ---- variances


def member_variances(member: Member, samples: Any) -> Float[np.ndarray, " m"]:
    """v(x) + alpha of new samples, averaged over outputs where each has a factor of its own."""
    prepared = member.embedding.prepared(samples)
    compared = member.compared(prepared)
    squares = member.squares(prepared)
    variances = [factor.variance(compared, squares) + factor.alpha for factor in member.factors]
    return np.asarray(np.mean(variances, axis=0))


def own_variances(member: Member, data: TrainingSet) -> Float[np.ndarray, " n"]:
    """v_{−g}(x_i) + alpha of each training sample under the fit without its group.

    With C = S (I − H) S⁻¹ and noise alpha/w_i of sample i, v_{−g}(x_i) = alpha (C_gg⁻¹ − 1)_ii / w_i;
    of the log-loss w_i is the weight times the curvature of the last Newton step.
    """
    groups = Groups.of(data)
    variances = []
    for factor in member.factors:
        # of the log-loss, those of the last Newton step
        weights = factor.problem.weights
        if groups.are_single:
            complements = np.maximum(factor.complements(), 1e-300)
            own = factor.alpha / weights * (1.0 - complements) / complements
            variances.append(own + factor.alpha)
            continue
        of_factor = np.empty(len(data))
        for number in range(len(groups.sizes)):
            rows = np.flatnonzero(groups.numbers == number)
            inverse = np.linalg.inv(factor.complement(rows))
            of_factor[rows] = factor.alpha / weights[rows] * (inverse.diagonal() - 1.0)
        variances.append(of_factor + factor.alpha)
    return np.asarray(np.mean(variances, axis=0))


def deviations_of(combination: Combination, samples: Any) -> Float[np.ndarray, " m"]:
    """Σ_c w_c √(v_c(x) + α_c): how widely outcomes are spread at new samples, up to a factor."""
    total = np.zeros(len(samples))
    for weight, member in zip(combination.weights, combination.members, strict=True):
        total += weight * np.sqrt(member_variances(member, samples))
    return total


def training_deviations(combination: Combination, data: TrainingSet) -> Float[np.ndarray, " n"]:
    """The same of every training sample, by the fits without it, or without its group."""
    total = np.zeros(len(data))
    for weight, member in zip(combination.weights, combination.members, strict=True):
        total += weight * np.sqrt(own_variances(member, data))
    return total


def posterior_std(
    combination: Combination, data: TrainingSet, samples: Any
) -> Float[np.ndarray, "m t"]:
    """The deviations at new samples, times an amplitude fitted to the leave-one-out errors."""
    errors = data.outputs - combination.held_out
    is_known = np.isfinite(errors).all(axis=1)
    scaled = errors[is_known] / training_deviations(combination, data)[is_known, None]
    shares = Groups.of(data).shares[is_known]
    amplitude = shares @ np.square(scaled) / shares.sum()
    return np.sqrt(amplitude) * deviations_of(combination, samples)[:, None]


def novelty_ranks(
    combination: Combination, data: TrainingSet, samples: Any
) -> Float[np.ndarray, " m"]:
    """The share of training samples, or groups, of smaller posterior variance than the new one.

    Rows are seen as they are, before clipping; the ranks of members are averaged by their weights.
    """
    shares = Groups.of(data).shares
    ranks = np.zeros(len(samples))
    weights = combination.weights / max(float(combination.weights.sum()), 1e-300)
    for weight, member in zip(weights, combination.members, strict=True):
        rule = replace(
            member.embedding.rule, low=None, high=None, query_low=None, query_high=None
        )
        seeing_all = replace(member, embedding=replace(member.embedding, rule=rule))
        of_training = own_variances(member, data)
        order = np.argsort(of_training)
        share_below = np.concatenate([[0.0], np.cumsum(shares[order])])
        of_new = member_variances(seeing_all, samples)
        positions = np.searchsorted(of_training[order], of_new)
        ranks += weight * share_below[positions] / share_below[-1]
    return ranks


# ---- importance of coordinates


@dataclass(frozen=True)
class CoordinateImportance:
    """What each coordinate is worth: the growth of the leave-one-out error where it is permuted.

    Attributes
    ----------
    names : tuple of str
        "key 0", …, "query 0", …, "extra 0", ….
    within, within_error : arrays (c,)
        Permuted among the keys of each set: what is lost is which key has which value. NaN for
        queries and extras.
    across, across_error : arrays (c,)
        Permuted among all keys of all sets, or all samples: everything it says is lost. Each with
        its standard error over samples, or groups.
    baseline : float
        The leave-one-out squared error itself; of classes, of their one-vs-rest targets or scores.
    """

    names: tuple[str, ...]
    within: Float[np.ndarray, " c"]
    within_error: Float[np.ndarray, " c"]
    across: Float[np.ndarray, " c"]
    across_error: Float[np.ndarray, " c"]
    baseline: float


def importance_of_coordinates(
    combination: Combination,
    data: TrainingSet,
    *,
    classifies: bool,
    n_repeats: int,
    seed: int,
    memory_budget: int,
) -> CoordinateImportance:
    """Permute one coordinate at a time, and predict every training sample by the fit without it."""
    groups = Groups.of(data)
    samples = data.samples
    counts = {"key": samples.dim}
    if samples.query is not None:
        counts["query"] = samples.query_dim
    if samples.extras is not None:
        counts["extra"] = samples.extras.shape[1]
    names = tuple(f"{kind} {j}" for kind, count in counts.items() for j in range(count))

    # the loss of every sample without its group, as it is and with one coordinate permuted
    usual = _sample_losses(combination, data, combination.held_out, classifies=classifies)
    rng = np.random.default_rng(seed)

    def growth(name: str, *, within: bool) -> tuple[float, float]:
        losses = []
        for _ in range(n_repeats):
            permuted = _with_permuted_coordinate(samples, name, rng, within=within)
            scores = _without_itself(combination, data, permuted, memory_budget)
            losses.append(_sample_losses(combination, data, scores, classifies=classifies))
        return groups.mean_and_error(np.mean(losses, axis=0) - usual)

    within = np.full((2, len(names)), np.nan)
    across = np.full((2, len(names)), np.nan)
    for column, name in enumerate(names):
        if name.startswith("key"):
            within[:, column] = growth(name, within=True)
        across[:, column] = growth(name, within=False)
    baseline, _ = groups.mean_and_error(usual)
    return CoordinateImportance(
        names=names,
        within=within[0],
        within_error=within[1],
        across=across[0],
        across_error=across[1],
        baseline=baseline,
    )


def _without_itself(
    combination: Combination, data: TrainingSet, changed: Any, memory_budget: int
) -> Float[np.ndarray, "n t"]:
    """Predictions of changed training samples, each by the fit without it or its group."""
    scores = []
    for rows, without in without_each(combination, data, changed, memory_budget):
        numbers = np.arange(rows.start, rows.stop)
        scores.append(without[numbers - rows.start, :, numbers])
    return np.concatenate(scores)


def _sample_losses(
    combination: Combination,
    data: TrainingSet,
    scores: Float[np.ndarray, "n t"],
    *,
    classifies: bool,
) -> Float[np.ndarray, " n"]:
    """The loss of every sample: squared errors, or the log-loss of classes."""
    if not classifies:
        return np.asarray(np.square(data.outputs - scores).mean(axis=1))
    from keyhole.solve.calibration import labels_of

    labels = labels_of(data.outputs)
    logs = log_probabilities_of(combination, scores)
    return -np.take_along_axis(logs, labels[:, None], axis=1)[:, 0]


def _with_permuted_coordinate(
    samples: Any, name: str, rng: np.random.Generator, *, within: bool
) -> Any:
    """Samples with one coordinate permuted, among the keys of each set or among all."""
    kind, number = name.split()
    column = int(number)
    if kind == "extra":
        extras = samples.extras.copy()
        extras[:, column] = rng.permutation(extras[:, column])
        return samples.with_extras(extras)

    # an order of all rows; within sets, a random order of the keys of each set
    sets = samples.sets
    source = sets.query if kind == "query" else sets.tokens
    order = rng.permutation(len(source))
    if within:
        set_of_key = np.repeat(np.arange(len(sets)), sets.lengths)
        order = np.lexsort([rng.random(len(source)), set_of_key])
    changed = source.copy()
    changed[:, column] = source[order, column]
    if kind == "query":
        return samples.with_sets(sets.with_query(changed))

    # `mapped` would change the queries too: they are taken off meanwhile
    with_changed_keys = sets.with_query(None).mapped(lambda _: changed)
    return samples.with_sets(with_changed_keys.with_query(sets.query))
