"""How sure a prediction is: intervals, sets of labels, standard deviations, novelty; by exact leave-one-out fits."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.special import softmax

from keyhole._checks import check_choice, check_count, check_number, check_seed
from keyhole.data.sets import SetBatch, SetGroups
from keyhole.estimators.base import LESS_FOR_REFITS, explained_memory_errors, memory_budget, outputs
from keyhole.refits import Refits
from keyhole.ridge.calibration import class_scores, labels_of

MAX_ERRORS_KEPT = 2048
"""Left-out errors that every model keeps, for intervals where there is no factor: samples drawn at random beyond."""


class PlainJackknifeWarning(UserWarning):
    """Intervals are those of the plain jackknife, for which less is guaranteed than for jackknife+."""


@dataclass(frozen=True)
class TrainingSamples:
    """Samples as they were given to a fit: what its leave-one-out fits are made from, when they are first asked for.

    ``fit_intercept`` is that of the fit; None in older files, where the parameter of the estimator says it.
    """

    batch: SetBatch | SetGroups
    columns: Float[np.ndarray, "n t"]
    weights: Float[np.ndarray, " n"] | None
    groups: Int[np.ndarray, " n"] | None
    fit_intercept: bool | None = None

    def copy(self) -> TrainingSamples:
        """The same in host memory, none of it shared with what was given: that may be changed later."""
        return TrainingSamples(
            batch=self.batch.numpy()[np.arange(len(self.batch))],
            columns=self.columns.copy(),
            weights=None if self.weights is None else self.weights.copy(),
            groups=None if self.groups is None else self.groups.copy(),
            fit_intercept=self.fit_intercept,
        )


@dataclass(frozen=True)
class CoordinateImportance:
    """What each coordinate is worth: by how much the left-out squared error grows where it is permuted.

    Attributes
    ----------
    names : tuple of str
        "key 0", …, "query 0", …, "extra 0", ….
    within, within_error : arrays (c,)
        Permuted among the keys of each set: what is lost is which key has which value. NaN for queries and extras.
    across, across_error : arrays (c,)
        Permuted among all keys of all sets, or all samples: everything it says is lost.
        Each with its standard error over samples, or groups.
    baseline : float
        The left-out squared error itself.
    """

    names: tuple[str, ...]
    within: Float[np.ndarray, " c"]
    within_error: Float[np.ndarray, " c"]
    across: Float[np.ndarray, " c"]
    across_error: Float[np.ndarray, " c"]
    baseline: float


def _permuted(batch: Any, name: str, rng: np.random.Generator, *, within: bool) -> Any:
    """Samples with one coordinate permuted, among the keys of each set or among all."""
    kind, j = name.split()
    if kind == "extra":
        extras = batch.extras.copy()
        extras[:, int(j)] = rng.permutation(extras[:, int(j)])
        return batch.with_extras(extras)
    sets = batch.sets
    source = sets.query if kind == "query" else sets.tokens
    order = rng.permutation(len(source))
    if within:
        owner = np.repeat(np.arange(len(sets)), sets.lengths)
        order = np.lexsort([rng.random(len(source)), owner])
    changed = source.copy()
    changed[:, int(j)] = source[order, int(j)]
    if kind == "query":
        return batch.with_sets(sets.with_query(changed))
    return batch.with_sets(sets.with_query(None).mapped(lambda _: changed).with_query(sets.query))


def upper_ends(
    values: Float[np.ndarray, "*m n"], shares: Float[np.ndarray, " n"], coverage: float
) -> Float[np.ndarray, "*m"]:
    """The largest of ``values`` below which less than coverage·(G + 1) of them lie, in shares that add up to G.

    Of n values with a share of one each, the ⌈coverage·(n + 1)⌉-th smallest; ∞ where there is none. NaN, of a fit that
    is not known, counts as ∞.

    >>> upper_ends(np.arange(10.0, 20.0), np.ones(10), 0.8)
    array(18.)
    """
    total = float(shares.sum())
    most = (coverage - 1e-9) * (total + 1)  # sums of 1/|g| are rounded
    if total < most:
        return np.full(values.shape[:-1], np.inf)
    if (shares == shares[0]).all():
        rank = math.ceil(most / float(shares[0])) - 1
        ends = np.partition(values, rank, axis=-1)[..., rank]  # NaN is sorted last
    else:
        order = np.argsort(values, axis=-1, kind="stable")
        below = np.cumsum(shares[order], axis=-1) - shares[order]
        last = (below < most).sum(axis=-1)[..., None] - 1
        ends = np.take_along_axis(values, np.take_along_axis(order, last, axis=-1), axis=-1)[..., 0]
    return np.asarray(np.where(np.isnan(ends), np.inf, ends))


def _check_coverage(coverage: Any) -> float:
    value = check_number(coverage, "coverage", minimum=0.0, exclusive=True)
    if value >= 1:
        raise ValueError(
            f"`coverage` must be between 0 and 1, the share of outcomes inside: got {value:g}. Try 0.9."
        )
    return value


class LeftOutFits:
    """What regression and classification share: the leave-one-out fits, and variances."""

    layer_: Any
    tokens_: Any
    alpha_: float
    solver_: str
    left_out_errors_: np.ndarray

    def _keep_training(self, samples: TrainingSamples) -> None:
        """Keep the samples if a factor of their fit, n × n or n × p numbers, is within the memory budget."""
        n, values = len(samples.batch), getattr(self.layer_, "values", None)
        width = n if values is None or samples.groups is not None else values[..., 0].size
        if self.solver_ != "cg" and 8 * n * min(n, width) <= memory_budget():
            self._training = samples.copy()

    def _keep_errors(self, errors: Float[np.ndarray, "k t"]) -> None:
        """Keep left-out errors, each output's in order; one that rounding hides counts as infinite."""
        errors = np.where(np.isnan(errors), np.inf, errors)
        if len(errors) > MAX_ERRORS_KEPT:
            # sorted first, so that the order of the samples does not decide which are kept
            errors = errors[np.lexsort(errors.T)]
            errors = errors[np.random.default_rng(0).permutation(len(errors))[:MAX_ERRORS_KEPT]]
        self.left_out_errors_ = np.sort(errors, axis=0)

    @property
    def interval_method(self) -> str:
        """How intervals and sets are made: "jackknife+", or "jackknife" where no leave-one-out fits can be made."""
        return "jackknife+" if "_training" in vars(self) or "_refits" in vars(self) else "jackknife"

    def _left_out_fits(self) -> Refits:
        """All leave-one-out fits; they are made on first use, from what the model keeps."""
        if "_refits" not in vars(self):
            kept: TrainingSamples = self._training
            layer = self.layer_
            fit_intercept = kept.fit_intercept
            if fit_intercept is None:
                fit_intercept = bool(self.fit_intercept)  # type: ignore[attr-defined]
            with explained_memory_errors("leave-one-out fits", kept.batch, None, LESS_FOR_REFITS):
                self._refits = Refits.of(
                    self.tokens_.apply(kept.batch),
                    kept.columns,
                    getattr(layer, "heads", None) or layer.distribution,
                    float(self.alpha_),
                    weights=kept.weights,
                    groups=kept.groups,
                    activation=layer.activation,
                    fit_intercept=fit_intercept,
                    memory_budget=memory_budget(),
                )
        return self._refits

    def _reason(self) -> str:
        """Why there are no leave-one-out fits, and what to do about it."""
        if self.solver_ == "cg":
            return "conjugate gradients make no factor of it. Fit with solver='direct'."
        if "n_samples_seen_" in vars(self):
            return "a fit in batches keeps sums, and not its samples. Use fit, on a part of the samples if need be."
        return (
            "this model has no samples to make them from: it was loaded from a file saved with keep='predict', or they "
            "were too many for a matrix of all pairs within the memory budget. Save with keep='all', raise scikit-"
            "learn's working_memory setting, or fit fewer samples."
        )

    def _warn_plain(self, what: str) -> None:
        """Say that there are no leave-one-out fits; raise if there are no left-out errors either."""
        if not len(getattr(self, "left_out_errors_", ())):
            raise ValueError(
                f"{what} take errors of samples that were left out, and this model has none: {self._reason()} With a "
                "few numbers as `alpha`, conjugate gradients hold out a tenth."
            )
        warnings.warn(
            f"{what} are those of the plain jackknife, the prediction and the spread of {len(self.left_out_errors_)} "
            f"left-out errors: jackknife+ takes all leave-one-out fits, and {self._reason()}",
            PlainJackknifeWarning,
            stacklevel=3,
        )

    def _with_variance(self, what: str) -> Refits:
        """The leave-one-out fits, if they have variances."""
        if self.interval_method != "jackknife+":
            raise ValueError(
                f"{what} takes the posterior variance of all leave-one-out fits, and {self._reason()}"
            )
        refits = self._left_out_fits()
        if not refits.has_variance:
            raise ValueError(
                f"{what} takes a posterior variance, and that a penalty above rounding: alpha is {self.alpha_:g}. Use "
                "alpha='loo', or a larger number."
            )
        return refits

    def predict_std(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return the standard deviation of a new outcome, (n,) or (n, outputs), by the Gaussian process view.

        √(A (v(x) + alpha)): v(x) is the posterior variance under the prior whose covariance is the kernel of the layer,
        with noise alpha and a free intercept; the amplitude A, one for each output, is fitted to the leave-one-out
        errors, A = mean of e_i² / (v_{−i}(x_i) + alpha). Of a classifier, that of ``decision_function``. It is a model
        of the errors, and no guarantee: that is what intervals are for.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> x = np.random.default_rng(0).uniform(-1, 1, size=(50, 1))
        >>> model = kh.AttentionRegressor(random_state=0).fit(x, np.sin(3 * x[:, 0]))
        >>> near, far = model.predict_std([[0.1], [4.0]])
        >>> bool(far > 3 * near)
        True
        """
        batch, refits = self._ready(X), self._with_variance("predict_std")  # type: ignore[attr-defined]
        return outputs(refits.deviations(batch, memory_budget()), self._has_one_output())  # type: ignore[attr-defined]

    def novelty(self, X: Any) -> Float[np.ndarray, " n"]:
        """Return how unlike the training samples each sample is, as a rank between 0 and 1.

        The share of training samples (of groups, where there were any) whose posterior variance, under the fit without
        them, is below that of the new sample: 0.5 is as usual as they are, above 0.99 the model has seen nothing like
        it, and extrapolates. It looks at X alone: whether the outcome is unusual it does not say.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, size=(50, 1))
        >>> model = kh.AttentionRegressor(random_state=0).fit(x, np.sin(3 * x[:, 0]) + 0.1 * rng.standard_normal(50))
        >>> model.novelty([[0.2], [4.0]]).round(1)
        array([0.1, 1. ])
        """
        batch, refits = self._ready(X), self._with_variance("novelty")  # type: ignore[attr-defined]
        own = refits.own_variances()
        order = np.argsort(own)
        below = np.concatenate([[0.0], np.cumsum(refits.shares[order])])
        variance = np.concatenate(
            [v for *_, v in refits.predictions(batch, memory_budget(), variances=True)]
        )
        return np.asarray(below[np.searchsorted(own[order], variance)] / len(refits.starts))

    def coordinate_importance(
        self, n_repeats: int = 3, random_state: int = 0
    ) -> CoordinateImportance:
        """Return what each coordinate of keys and queries, and each extra, is worth on the training samples.

        A coordinate is permuted, and every sample predicted by the exact fit without it (or its group): what grows is
        the error on samples that the fit has not seen, with no refit. Of a classifier, that of its ±1 columns, squared.
        A coordinate that acts alone, through its mean over the keys, shows when it is permuted across sets and not
        within them; one that says which keys to look at shows in both. Two coordinates that say the same share what
        they are worth, and may both hop worthless. One prediction of all samples for each coordinate and repeat.

        Examples
        --------
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(80, n_keys=4, dim=3, seed=0)
        >>> y = kh.targets.QueryPower(1, dim=3)(sets)  # the first coordinate of the query
        >>> model = kh.AttentionRegressor(30, random_state=0, query="given").fit(sets, y)
        >>> found = model.coordinate_importance()
        >>> found.names[int(found.across.argmax())], len(found.names)
        ('query 0', 6)
        """
        if self.interval_method != "jackknife+":
            raise ValueError(
                f"coordinate_importance takes all leave-one-out fits, and {self._reason()}"
            )
        repeats, refits = check_count(n_repeats, "n_repeats"), self._left_out_fits()
        batch = self._training.batch[refits.rows]
        kinds = {"key": batch.dim, "query": 0 if batch.query is None else batch.query_dim}
        kinds["extra"] = 0 if batch.extras is None else batch.extras.shape[1]
        names = tuple(f"{kind} {j}" for kind, count in kinds.items() for j in range(count))
        usual = np.square(refits.residuals).mean(axis=1)
        rng, found = (
            np.random.default_rng(check_seed(random_state, "random_state")),
            np.full((2, 2, len(names)), np.nan),
        )
        for c, name in enumerate(names):
            for way, within in enumerate((True, False)):
                if within and not name.startswith("key"):
                    continue
                grown = [
                    self._left_out_losses(_permuted(batch, name, rng, within=within))
                    for _ in range(repeats)
                ]
                found[way, :, c] = refits.mean_and_error(np.mean(grown, axis=0) - usual)
        (within, within_error), (across, across_error) = found
        level, _ = refits.mean_and_error(usual)
        return CoordinateImportance(names, within, within_error, across, across_error, level)

    def _left_out_losses(self, batch: Any) -> Float[np.ndarray, " n"]:
        """Squared errors of changed training samples, each by the fit without it or its group."""
        refits, losses = self._left_out_fits(), []
        for rows, predicted, hat, _ in refits.predictions(
            self.tokens_.apply(batch), memory_budget(), variances=False
        ):
            own = np.arange(rows.start, rows.stop)
            left = refits.without(predicted, hat)[own - rows.start, :, own]
            losses.append(np.square(refits.columns[rows] - left).mean(axis=1))
        return np.concatenate(losses)


class RegressionIntervals(LeftOutFits):
    """Intervals for the outcomes of a regression."""

    def predict_interval(
        self, X: Any, coverage: float = 0.9, *, width: str = "constant"
    ) -> Float[np.ndarray, "n ..."]:
        """Return intervals for new outcomes by jackknife+, from all leave-one-out fits, without refitting.

        f_{−i}(x) = f(x) − h_i(x) e_i is the prediction of the fit without sample i, e_i its error there. Jackknife+
        (Barber, Candès, Ramdas and Tibshirani 2021) goes from the ⌊(1−c)(n+1)⌋-th smallest of f_{−i}(x) − |e_i| to the
        ⌈c(n+1)⌉-th smallest of f_{−i}(x) + |e_i|, c being ``coverage``; an end is infinite where n is too small for c.

        Parameters
        ----------
        X : samples, as for `predict`
        coverage : float
            Share of outcomes that should be inside.
        width : "constant" or "adaptive"
            "adaptive" divides |e_i| by √(v_{−i}(x_i) + alpha) and multiplies by √(v_{−i}(x) + alpha), v_{−i} being the
            posterior variance without sample i: intervals are wider where training samples are few. Choose before you
            hop: choosing by the result breaks the guarantee.

        Returns
        -------
        array (n, 2) or (n, outputs, 2)
            Lower and upper end, each output by itself.

        Notes
        -----
        What is guaranteed: if training samples and new ones are exchangeable, at least 2c − 1 of new outcomes are
        inside, in the mean over training sets; in practice about c. What is not: anything for one particular x, or
        where new samples come from elsewhere (see `novelty`). Penalty, scaling and head distribution are taken as given, although
        they were chosen on the same samples, which weakens the guarantee a little. Copies of a sample count as one.
        ``sample_weight`` weighs the fit, and not the ranks: samples of positive weight count alike. With ``groups`` the
        fits leave out whole groups, each sample counts one over the size of its group, and ranks are over groups: the
        guarantee is for a sample of a new group.

        Where no leave-one-out fits can be made (after a fit in batches, by conjugate gradients, from a lean file, of
        too many samples) the interval is that of the plain jackknife, f(x) plus and minus a quantile of |e|, and a
        `PlainJackknifeWarning` says so; ``interval_method`` is its name.

        The fits are made on first use, at about the cost of a fit at one penalty, and kept: n × n or n × p numbers.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(300, n_keys=4, dim=3, seed=0)
        >>> y = kh.targets.TokenPower(2, dim=3)(sets) + 0.1 * np.random.default_rng(0).standard_normal(300)
        >>> model = kh.AttentionRegressor(random_state=0).fit(sets[:200], y[:200])
        >>> low, high = model.predict_interval(sets[200:], coverage=0.8).T
        >>> float(((low <= y[200:]) & (y[200:] <= high)).mean())
        0.77
        """
        coverage = _check_coverage(coverage)
        adaptive = check_choice(width, "width", ("constant", "adaptive")) == "adaptive"
        model = self._snapshot()  # type: ignore[attr-defined]
        batch = model._ready(X)
        if adaptive:
            model._with_variance("width='adaptive'")
        if model.interval_method == "jackknife+":
            found = model._jackknife_plus(batch, model._left_out_fits(), coverage, adaptive)
        else:
            model._warn_plain("intervals")
            predicted = model.layer_.predict(batch, memory_budget=memory_budget())
            size = upper_ends(
                model.left_out_errors_.T, np.ones(len(model.left_out_errors_)), coverage
            )
            found = np.stack([predicted - size, predicted + size], axis=2)
        return np.asarray(found[:, 0] if model._has_one_output() else found)

    def _jackknife_plus(
        self, batch: Any, refits: Refits, coverage: float, adaptive: bool
    ) -> Float[np.ndarray, "m t 2"]:
        errors, shares = np.abs(refits.residuals).T, refits.shares
        if adaptive:
            errors = errors / np.sqrt(refits.own_variances() + refits.alpha)
        found = np.empty((len(batch), len(errors), 2))
        for rows, predicted, hat, variance in refits.predictions(
            batch, memory_budget(), variances=adaptive
        ):
            left = refits.without(predicted, hat)
            spread = errors
            if adaptive:
                spread = (
                    errors
                    * np.sqrt(refits.variances_without(hat, variance) + refits.alpha)[:, None, :]
                )
            found[rows, :, 1] = upper_ends(left + spread, shares, coverage)
            found[rows, :, 0] = -upper_ends(spread - left, shares, coverage)
        return found


class ClassificationSets(LeftOutFits):
    """Sets of labels for the samples of a classification."""

    temperature_: float
    classes_: np.ndarray

    def predict_set(self, X: Any, coverage: float = 0.9) -> Bool[np.ndarray, "n c"]:
        """Return which labels are plausible for each sample, by jackknife+ from all leave-one-out fits.

        Label y is in the set of x unless at least c(n+1) of the training samples are more at home with their own label,
        left out, than x is with y: {y : #{i : p_{−i}(x_i, y_i) > p_{−i}(x, y)} < c(n+1)}, with the probabilities p_{−i}
        of the fit without sample i, at the temperature of the model.

        Returns
        -------
        bool array (n, classes)
            In the order of ``classes_``. A set may be empty: then x is less at home with every label than most of the
            training samples were with theirs.

        Notes
        -----
        As for `AttentionRegressor.predict_interval`: at least 2c − 1 of new samples have their label in their set,
        about c in practice, for exchangeable samples, over all labels together and not for each. The temperature has
        seen all training samples, as have penalty, scaling and head distribution. Without leave-one-out fits the plain jackknife
        compares p(x, y) of the model with the left-out p_{−i}(x_i, y_i), and a warning says so.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> rng = np.random.default_rng(0)
        >>> x = rng.standard_normal((200, 2))
        >>> model = kh.AttentionClassifier(random_state=0).fit(x, x[:, 0] + 0.3 * rng.standard_normal(200) > 0)
        >>> model.predict_set([[-2.0, 0.0], [0.0, 0.0], [2.0, 0.0]], coverage=0.95)
        array([[ True, False],
               [ True,  True],
               [False,  True]])
        """
        coverage = _check_coverage(coverage)
        model = self._snapshot()  # type: ignore[attr-defined]
        batch = model._ready(X)
        if model.interval_method != "jackknife+":
            model._warn_plain("sets")
            scores = model.layer_.predict(batch, memory_budget=memory_budget())
            chances, own = model._chances(scores), 1 - model.left_out_errors_[:, 0]
            more = len(own) - np.searchsorted(np.sort(own), chances, side="right")
            return np.asarray(more < coverage * (len(own) + 1) * (1 - 1e-9))
        refits = self._left_out_fits()
        left_out = refits.columns - refits.residuals
        own = np.take_along_axis(
            self._chances(left_out), labels_of(refits.columns)[:, None], axis=1
        )
        found = np.empty((len(batch), len(self.classes_)), bool)
        for rows, scores, hat, _ in refits.predictions(batch, memory_budget(), variances=False):
            chances = self._chances(np.moveaxis(refits.without(scores, hat), 1, 2))
            more = np.einsum("n,mnc->mc", refits.shares, own > chances)
            found[rows] = more < coverage * (len(refits.starts) + 1) * (1 - 1e-9)
        return found

    def _chances(self, scores: Float[np.ndarray, "*m t"]) -> Float[np.ndarray, "*m c"]:
        """Probabilities of the labels, from columns of scores."""
        scores = self._without_weightless(class_scores(scores))  # type: ignore[attr-defined]
        return np.asarray(softmax(scores * self.temperature_, axis=-1))

    def _keep_label_errors(
        self, scores: Float[np.ndarray, "k t"], columns: Float[np.ndarray, "k t"]
    ) -> None:
        """Keep one less the probability of the right label, from left-out scores."""
        own = np.take_along_axis(self._chances(scores), labels_of(columns)[:, None], axis=1)
        # a score that rounding hides tells nothing, and is as wrong as can be
        self._keep_errors(np.where(np.isnan(own), 1.0, 1 - own))
