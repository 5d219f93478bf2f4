"""How sure a prediction is: intervals, label sets, standard deviations, novelty, importance.

Everything here is a function of exact leave-one-out fits (`keyhole.refits.Refits`), or of the
leave-one-out errors that every model keeps. The estimators have thin methods for them, whose
docstrings say what is guaranteed. The plain version of an interval is
`keyhole.textbook.jackknife_interval`; docs/explanation/contributions_and_intervals.md explains
all of them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.special import log_softmax, softmax

from keyhole._checks import check_number
from keyhole.attention.backends import backend_for
from keyhole.data.tokens import TokenRule
from keyhole.estimators.base import LESS_FOR_REFITS, explained_memory_errors
from keyhole.estimators.classes import without_weightless
from keyhole.refits import Refits, logistic_refits
from keyhole.ridge.calibration import class_scores, labels_of
from keyhole.solvers.layers import Layer
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet

MAX_ERRORS_KEPT = 2048
"""Leave-one-out errors that every model keeps, for intervals where there is no factor; more are
drawn from at random.
"""

RANK_SLACK = 1e-9
"""Relative slack in comparing sums of shares with a rank: sums of 1/|g| are rounded."""


class PlainJackknifeWarning(UserWarning):
    """Intervals are those of the plain jackknife, which guarantees less than jackknife+."""


@dataclass(frozen=True)
class TrainingRecord:
    """What a fit used, frozen with it: nothing that is changed later moves an interval.

    Its leave-one-out fits are made on first use, and kept.
    """

    data: TrainingSet
    spec: LayerSpec
    tokens: TokenRule
    alpha: float
    _cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def prepared_data(self) -> TrainingSet:
        """The samples as the layer saw them, where it is computed."""
        samples = backend_for(self.spec.device).placed(self.data.samples)
        return self.data.with_samples(samples).prepared(self.tokens)

    def refits(self) -> Refits:
        """All leave-one-out fits."""
        # one thread makes them, others wait for it
        with self._lock:
            if "refits" not in self._cache:
                samples = self.data.samples
                with explained_memory_errors("leave-one-out fits", samples, None, LESS_FOR_REFITS):
                    ready = self.prepared_data()
                    self._cache["refits"] = Refits.of(self.spec, ready, self.alpha)
            refits: Refits = self._cache["refits"]
            return refits

    def output_refits(self, layer: Layer) -> tuple[Refits, ...]:
        """The leave-one-out fits of all outputs together, or of each of those of a logistic layer.

        Outputs of ridge share their fits; those of a logistic layer have weights of their own.
        """
        if not self.spec.is_logistic:
            return (self.refits(),)
        with self._lock:
            if "output_refits" not in self._cache:
                samples = self.data.samples
                with explained_memory_errors("leave-one-out fits", samples, None, LESS_FOR_REFITS):
                    ready = self.prepared_data()
                    logits = layer.predict(ready.samples)
                    self._cache["output_refits"] = logistic_refits(
                        self.spec, ready, self.alpha, logits
                    )
            fits: tuple[Refits, ...] = self._cache["output_refits"]
            return fits

    def targets(self, refits: Refits) -> Float[np.ndarray, "n t"]:
        """The outputs, as they were given, of the samples of some leave-one-out fits."""
        return self.data.outputs[refits.rows]

    def __getstate__(self) -> dict[str, Any]:
        """Without the lock and the fits, which are made anew."""
        return {"data": self.data, "spec": self.spec, "tokens": self.tokens, "alpha": self.alpha}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # past the frozen dataclass, which forbids plain assignment
        for name, value in state.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_cache", {})
        object.__setattr__(self, "_lock", threading.Lock())


def some_errors(errors: Float[np.ndarray, "k t"]) -> Float[np.ndarray, "l t"]:
    """At most `MAX_ERRORS_KEPT` leave-one-out errors, each output's in order.

    One that rounding hides (NaN) counts as infinite.
    """
    errors = np.where(np.isnan(errors), np.inf, errors)
    if len(errors) > MAX_ERRORS_KEPT:
        rows = np.random.default_rng(0).permutation(len(errors))[:MAX_ERRORS_KEPT]
        errors = errors[rows]
    return np.sort(errors, axis=0)


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
    refits: Refits, samples: Any, coverage: float, *, adaptive: bool, memory_budget: int
) -> Float[np.ndarray, "m t 2"]:
    """Lower and upper ends for every sample and output, from all leave-one-out fits.

    The plain version, of constant width, is `keyhole.textbook.jackknife_interval`.
    """
    # |e_i|, (outputs, n); for adaptive widths in units of the standard deviation at x_i
    sizes = np.abs(refits.residuals).T
    if adaptive:
        sizes = sizes / np.sqrt(refits.own_variances() + refits.alpha)

    intervals = np.empty((len(samples), len(sizes), 2))
    blocks_of_samples = refits.predictions(samples, memory_budget, variances=adaptive)
    for rows, predicted, hat, variance in blocks_of_samples:
        # f_{−i}(x), and the half-width that sample i suggests: in units of the deviation at x
        without_each = refits.without(predicted, hat)
        spread = sizes
        if adaptive:
            variances = refits.variances_without(hat, variance)
            spread = sizes * np.sqrt(variances + refits.alpha)[:, None, :]

        # ranks of f_{−i}(x) + spread from below, and of f_{−i}(x) − spread from above
        intervals[rows, :, 1] = upper_ends(without_each + spread, refits.shares, coverage)
        intervals[rows, :, 0] = -upper_ends(spread - without_each, refits.shares, coverage)
    return intervals


def plain_intervals(
    predicted: Float[np.ndarray, "m t"], errors: Float[np.ndarray, "k t"], coverage: float
) -> Float[np.ndarray, "m t 2"]:
    """f(x) plus and minus a quantile of the leave-one-out errors: the plain jackknife."""
    size = upper_ends(errors.T, np.ones(len(errors)), coverage)
    return np.stack([predicted - size, predicted + size], axis=2)


@dataclass(frozen=True)
class Calibration:
    """What makes probabilities of scores: softmax(temperature · scores).

    Classes without weight have probability 0.
    """

    temperature: float
    has_weight: Bool[np.ndarray, " c"] | None = None

    def probabilities(self, scores: Float[np.ndarray, "*m t"]) -> Float[np.ndarray, "*m c"]:
        """Probabilities of the classes, from the outputs of the layer."""
        per_class = without_weightless(class_scores(scores), self.has_weight)
        return np.asarray(softmax(per_class * self.temperature, axis=-1))

    def log_probabilities(self, scores: Float[np.ndarray, "*m t"]) -> Float[np.ndarray, "*m c"]:
        """Their logarithms, without underflow."""
        per_class = without_weightless(class_scores(scores), self.has_weight)
        return np.asarray(log_softmax(per_class * self.temperature, axis=-1))

    def label_errors(
        self, scores: Float[np.ndarray, "k t"], outputs: Float[np.ndarray, "k t"]
    ) -> Float[np.ndarray, "k 1"]:
        """One less the probability of the right label; 1 for a score that rounding hides (NaN)."""
        probabilities = self.probabilities(scores)
        of_label = np.take_along_axis(probabilities, labels_of(outputs)[:, None], axis=1)
        return np.where(np.isnan(of_label), 1.0, 1 - of_label)


def left_out_scores(parts: Sequence[Refits]) -> Float[np.ndarray, "n t"]:
    """The prediction of every training sample by the fit without it, or without its group."""
    return np.concatenate([refits.outputs - refits.residuals for refits in parts], axis=1)


def scores_without_each(
    parts: Sequence[Refits], samples: Any, memory_budget: int
) -> Iterator[tuple[slice, Float[np.ndarray, "m t n"]]]:
    """f_{−i}(x) of all outputs, for some new samples at a time and every training sample i."""
    blocks_of_parts = [
        refits.predictions(samples, memory_budget, variances=False) for refits in parts
    ]
    for blocks in zip(*blocks_of_parts, strict=True):
        scores = []
        for refits, (_, predicted, hat, _) in zip(parts, blocks, strict=True):
            scores.append(refits.without(predicted, hat))
        rows = blocks[0][0]
        yield rows, np.concatenate(scores, axis=1)


def jackknife_plus_label_sets(
    parts: Sequence[Refits],
    targets: Float[np.ndarray, "n t"],
    samples: Any,
    coverage: float,
    calibration: Calibration,
    n_classes: int,
    memory_budget: int,
) -> Bool[np.ndarray, "m c"]:
    """Which labels are plausible, from all leave-one-out fits.

    Label y is plausible for x unless c(n+1) of the training samples, or groups, have
    p_{−i}(x_i, y_i) > p_{−i}(x, y), a higher leave-one-out probability of their own label.
    """
    # p_{−i}(x_i, y_i), and how many training samples may exceed p_{−i}(x, y)
    refits = parts[0]
    of_training = 1 - calibration.label_errors(left_out_scores(parts), targets)
    limit = coverage * (len(refits.starts) + 1) * (1 - RANK_SLACK)
    plausible = np.empty((len(samples), n_classes), bool)
    for rows, scores in scores_without_each(parts, samples, memory_budget):
        # p_{−i}(x, y) of all labels, (new samples, training samples, classes)
        of_new = calibration.probabilities(np.moveaxis(scores, 1, 2))
        share_more_at_home = np.einsum("n,mnc->mc", refits.shares, of_training > of_new)
        plausible[rows] = share_more_at_home < limit
    return plausible


def plain_label_sets(
    probabilities: Float[np.ndarray, "m c"], errors: Float[np.ndarray, "k 1"], coverage: float
) -> Bool[np.ndarray, "m c"]:
    """Which labels are plausible by the plain jackknife.

    p(x, y) of the model itself is compared with p_{−i}(x_i, y_i) of the training samples.
    """
    of_training = np.sort(1 - errors[:, 0])
    n = len(of_training)
    more_at_home = n - np.searchsorted(of_training, probabilities, side="right")
    return np.asarray(more_at_home < coverage * (n + 1) * (1 - RANK_SLACK))


def posterior_std(refits: Refits, samples: Any, memory_budget: int) -> Float[np.ndarray, "m t"]:
    """√(A (v(x) + alpha)), the amplitude A of each output fitted to the leave-one-out errors."""
    # samples whose leave-one-out error rounding does not hide
    is_known = np.isfinite(refits.residuals).all(axis=1)
    if not is_known.any():
        return np.full((len(samples), refits.residuals.shape[1]), np.inf)
    shares = refits.shares[is_known]
    errors = refits.residuals[is_known]

    # A = mean of e_i² / (v_{−i}(x_i) + alpha), in units of the largest error, so that squares
    # neither overflow nor vanish
    exponent = int(np.frexp(np.abs(errors).max(initial=0.0))[1])
    squares = np.square(np.ldexp(errors, -exponent))
    scaled = squares / (refits.own_variances()[is_known] + refits.alpha)[:, None]
    amplitude = shares @ scaled / shares.sum()

    # at the new samples, and back to the units of y
    variance = variances_of(refits, samples, memory_budget)
    return np.ldexp(np.sqrt(amplitude * (variance[:, None] + refits.alpha)), exponent)


def mean_squared_error(refits: Refits) -> float:
    """The mean of e_i² over samples, or groups; those that rounding hides (NaN) do not count."""
    is_known = np.isfinite(refits.residuals).all(axis=1)
    squares = np.square(refits.residuals[is_known]).mean(axis=1)
    return float(np.average(squares, weights=refits.shares[is_known]))


def laplace_std(
    parts: Sequence[Refits], samples: Any, memory_budget: int
) -> Float[np.ndarray, "m t"]:
    """√(v(x)/alpha) of every output: the posterior deviation of a logit, by Laplace's method.

    The penalty alpha/2 |v|² is a Gaussian prior whose covariance is K/alpha, and the curvature of
    the log-loss at the fit, w_i, is the precision of the working response of sample i.
    """
    deviations = []
    for refits in parts:
        variance = variances_of(refits, samples, memory_budget)
        deviations.append(np.sqrt(variance / refits.alpha))
    return np.stack(deviations, axis=1)


def novelty_ranks(refits: Refits, samples: Any, memory_budget: int) -> Float[np.ndarray, " m"]:
    """The share of training samples, or groups, of smaller posterior variance than the new one."""
    # share_below[k] is the share of the k training samples of least variance
    of_training = refits.own_variances()
    order = np.argsort(of_training)
    share_below = np.concatenate([[0.0], np.cumsum(refits.shares[order])])
    of_new = variances_of(refits, samples, memory_budget)
    positions = np.searchsorted(of_training[order], of_new)
    return np.asarray(share_below[positions] / len(refits.starts))


def variances_of(refits: Refits, samples: Any, memory_budget: int) -> Float[np.ndarray, " m"]:
    """Posterior variances v(x) of new samples."""
    parts = [
        variance for *_, variance in refits.predictions(samples, memory_budget, variances=True)
    ]
    return np.concatenate(parts)


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
        The leave-one-out squared error itself; of a logistic layer, its log-loss.
    """

    names: tuple[str, ...]
    within: Float[np.ndarray, " c"]
    within_error: Float[np.ndarray, " c"]
    across: Float[np.ndarray, " c"]
    across_error: Float[np.ndarray, " c"]
    baseline: float


def importance_of_coordinates(
    record: TrainingRecord, layer: Layer, n_repeats: int, seed: int, memory_budget: int
) -> CoordinateImportance:
    """Permute one coordinate at a time, and predict every training sample by the fit without it."""
    parts = record.output_refits(layer)
    refits = parts[0]
    targets = record.targets(refits)
    samples = record.data.samples[refits.rows]

    # the coordinates of keys, of queries, and the sample-level features
    counts = {"key": samples.dim}
    if samples.query is not None:
        counts["query"] = samples.query_dim
    if samples.extras is not None:
        counts["extra"] = samples.extras.shape[1]
    names = tuple(f"{kind} {j}" for kind, count in counts.items() for j in range(count))

    # the loss of every sample without its group, as it is and with one coordinate permuted
    usual = _sample_losses(targets, left_out_scores(parts), is_logistic=record.spec.is_logistic)
    rng = np.random.default_rng(seed)

    def growth(name: str, *, within: bool) -> tuple[float, float]:
        losses = []
        for _ in range(n_repeats):
            permuted = _with_permuted_coordinate(samples, name, rng, within=within)
            ready = record.tokens.apply(permuted)
            scores = _scores_without_itself(parts, ready, memory_budget)
            losses.append(_sample_losses(targets, scores, is_logistic=record.spec.is_logistic))
        return refits.mean_and_error(np.mean(losses, axis=0) - usual)

    # the mean growth, and its standard error, of every coordinate
    within = np.full((2, len(names)), np.nan)
    across = np.full((2, len(names)), np.nan)
    for column, name in enumerate(names):
        if name.startswith("key"):
            within[:, column] = growth(name, within=True)
        across[:, column] = growth(name, within=False)
    baseline, _ = refits.mean_and_error(usual)
    return CoordinateImportance(
        names=names,
        within=within[0],
        within_error=within[1],
        across=across[0],
        across_error=across[1],
        baseline=baseline,
    )


def _scores_without_itself(
    parts: Sequence[Refits], ready: Any, memory_budget: int
) -> Float[np.ndarray, "n t"]:
    """Predictions of changed training samples, each by the fit without it or its group."""
    scores = []
    for rows, without_each in scores_without_each(parts, ready, memory_budget):
        # of all leave-one-out fits, each sample takes the one without itself
        numbers = np.arange(rows.start, rows.stop)
        scores.append(without_each[numbers - rows.start, :, numbers])
    return np.concatenate(scores)


def _sample_losses(
    targets: Float[np.ndarray, "n t"], scores: Float[np.ndarray, "n t"], *, is_logistic: bool
) -> Float[np.ndarray, " n"]:
    """The loss of every sample that the layer minimises, averaged over outputs."""
    if is_logistic:
        return np.asarray(np.logaddexp(0.0, -targets * scores).mean(axis=1))
    return np.asarray(np.square(targets - scores).mean(axis=1))


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
    if kind == "query":
        source = sets.query
    else:
        source = sets.tokens
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
