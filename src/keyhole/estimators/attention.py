"""Attention layers with frozen random heads, fitted in closed form, for numbers and labels.

The plain version of one layer is `keyhole.textbook` (docs/explanation/textbook.md). A fit checks
what was passed, plans the layers to try (`keyhole.fit.members`), and fits and combines them
(`keyhole.fit.fit`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float
from sklearn.base import BaseEstimator, ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils._param_validation import HasMethods, Interval, Options, StrOptions
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from keyhole._checks import as_groups, check_choice, check_count, check_seed
from keyhole.attention.activations import Activation
from keyhole.attention.devices import pick_device, placed
from keyhole.attention.heads import HeadDistribution
from keyhole.estimators import batches as in_batches
from keyhole.estimators.base import memory_budget, without_output_axis
from keyhole.estimators.classes import check_weighted_classes, number_labels, one_vs_rest
from keyhole.estimators.explanations import weights_of_hops
from keyhole.estimators.report import (
    MemberTable,
    held_out_scores,
    member_table,
    summary_of,
    tell_member,
)
from keyhole.estimators.uncertainty import (
    CoordinateImportance,
    PlainJackknifeWarning,
    check_coverage,
    importance_of_coordinates,
    jackknife_plus_intervals,
    jackknife_plus_label_sets,
    label_errors,
    log_probabilities_of,
    novelty_ranks,
    one_of_each_group,
    plain_intervals,
    plain_label_sets,
    posterior_std,
    probabilities_of,
    some_errors,
)
from keyhole.estimators.validation import (
    as_alphas,
    as_distribution,
    as_dtype,
    as_n_heads,
    as_outputs,
    as_samples,
    as_seed,
    as_weights,
    check_target_given,
    class_weights,
)
from keyhole.fit.combine import Combination
from keyhole.fit.fit import fit_combination
from keyhole.fit.honest import FEW_SAMPLES, with_honest_predictions
from keyhole.fit.member import Member
from keyhole.fit.members import Given, Plan, Shape, plan_layers
from keyhole.fit.samples import TrainingSet
from keyhole.fit.settings import FitOptions, Landmarks, LayerSettings
from keyhole.registry import ACTIVATIONS, POOLINGS, QUERIES, SCALINGS

OF_ONE_LAYER = (
    "alpha_",
    "heads_",
    "n_heads_",
    "values_",
    "dual_coef_",
    "intercept_",
    "layer_",
    "tokens_",
    "selection_",
    "loo_error_",
    "loo_predictions_",
    "loo_decision_",
)
"""Fitted attributes that exist where one layer was fitted."""


class ClippedWarning(UserWarning):
    """New rows were beyond the range of the training rows, and were clipped to it."""


class AttentionModel(BaseEstimator):
    """What `AttentionRegressor` and `AttentionClassifier` share."""

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "n_heads": [
            Interval(Integral, 1, None, closed="left"),
            Options(Real, {math.inf}),
            StrOptions({"auto"}),
            Landmarks,
        ],
        "heads": [HasMethods("sample"), None],
        "alpha": [StrOptions({"loo"}), Interval(Real, 0, None, closed="left"), "array-like"],
        "activation": [StrOptions({*ACTIVATIONS, "auto"})],
        "fit_intercept": ["boolean"],
        "random_state": ["random_state", np.random.Generator],
        "dtype": [StrOptions({"float64", "float32"}), type, np.dtype],
        "pooling": [StrOptions({*POOLINGS, "auto"})],
        "scaling": [StrOptions({*SCALINGS, "auto"})],
        "query": [StrOptions({*QUERIES, "auto"})],
        "mlp": [StrOptions({"auto", "none", "only"})],
        "mlp_width": [Interval(Real, 0, None, closed="neither"), None],
        "device": [str, None],
        "verbose": ["verbose"],
    }

    n_features_in_: int
    combination_: Combination
    _training: TrainingSet | None = None

    # ---- scikit-learn

    def __sklearn_is_fitted__(self) -> bool:
        return "combination_" in vars(self) or "stream_" in vars(self)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def __getattr__(self, name: str) -> Any:
        """Raise for an attribute that is not there, with the reason where there is one."""
        if name == "partial_fit":
            raise AttributeError(in_batches.why_not_in_batches(self))
        if name in OF_ONE_LAYER and "combination_" in vars(self):
            raise AttributeError(
                f"{name!r} is of one layer, and this fit combines {len(self.combination_.members)}"
                ": see members_ for the settings, penalty, heads and values of each. With heads, "
                "activation, pooling, scaling and query all given, one layer is fitted."
            )
        if (
            name in in_batches.SOLVED
            and "stream_" in vars(self)
            and "combination_" not in vars(self)
        ):
            raise AttributeError(
                f"{name!r} is solved for from the batches so far: call solve() first, or predict."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ---- fitting

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> Any:
        """Fit the layers that the settings leave open, and combine them.

        Parameters
        ----------
        X : SetBatch, SetGroups, array (n, N, d), list of arrays (N_i, d), or table (n, d)
            Sets; see `keyhole.SetBatch` for queries and sample-level features.
        y : array (n,) or (n, outputs)
            Numbers for a regressor, labels for a classifier.
        sample_weight : array (n,), optional
            Weighs the error of each sample. With a given ``alpha`` a weight of two is the sample
            given twice. In all that is automatic weights are divided by their mean, so that a
            common factor changes nothing.
        groups : array (n,), optional
            Samples of one group (questions about one story, measurements of one patient) are left
            out together: penalties, weights and everything that is shown are then about whole
            groups left out.

        Returns
        -------
        self
        """
        self._validate_params()
        in_batches.forget(self)
        samples = as_samples(self, X, reset=True)
        weights = self._training_weights(y, as_weights(sample_weight, samples))
        outputs = self._training_outputs(y, samples, weights)
        group_numbers = as_groups(groups, samples, weights)

        # samples of weight 0 have no part in anything
        rows = np.arange(len(samples))
        if weights is not None:
            rows = np.flatnonzero(weights > 0)
            weights = weights[rows]
            if isinstance(self.alpha, str):
                weights = weights / weights.mean()
            if (weights == 1.0).all():
                weights = None
        if len(rows) < len(samples):
            samples = samples[rows]
        data = TrainingSet(
            samples=placed(samples, pick_device(self.device, samples.sets)),
            outputs=outputs[rows],
            weights=weights,
            groups=None if group_numbers is None else group_numbers[rows],
        )
        if len(data) < 2 and (isinstance(self.alpha, str) or np.ndim(self.alpha) > 0):
            raise ValueError(
                "leave-one-out needs at least two samples: got 1 sample of positive weight. Give "
                "more samples, or one fixed number as `alpha`."
            )

        self._fit_data(data, rows, len(outputs))
        return self

    def _fit_data(self, data: TrainingSet, rows: np.ndarray, n_given: int) -> None:
        """Plan the layers to try, fit and combine them, and store the result.

        ``rows`` are the numbers of the samples among the ``n_given`` that were passed.
        """
        plan = plan_layers(self._given(), Shape.of(data.samples))
        options = self._options(pick_device(self.device, data.samples.sets))
        is_repeated = len(plan.layers) > 1 and len(data) < FEW_SAMPLES
        options = replace(options, keeps_grams=is_repeated)
        combination = fit_combination(plan.layers, data, options)
        if is_repeated:
            combination = with_honest_predictions(combination, data, options)
        self._store(combination, data, plan, rows, n_given)

    def _given(self) -> Given:
        """The settings that were given; what is automatic is None."""

        def or_none(value: Any) -> Any:
            return None if isinstance(value, str) and value == "auto" else value

        n_heads = or_none(self.n_heads)
        if n_heads is not None and not isinstance(n_heads, Landmarks):
            n_heads = as_n_heads(n_heads)
        return Given(
            heads=None if self.heads is None else as_distribution(self.heads),
            n_heads=n_heads,
            activation=or_none(self.activation),
            pooling=or_none(self.pooling),
            scaling=or_none(self.scaling),
            query=or_none(self.query),
            mlp=self.mlp,
            mlp_width=self.mlp_width,
        )

    def _options(self, device: str | None) -> FitOptions:
        """What all layers of the fit share."""
        return FitOptions(
            alphas=as_alphas(self.alpha),
            fit_intercept=bool(self.fit_intercept),
            seed=as_seed(self.random_state),
            dtype=as_dtype(self.dtype),
            device=device,
            classifies=isinstance(self, ClassifierMixin),
            loss=self.loss,
            memory_budget=memory_budget(),
            tell=tell_member if self.verbose else None,
        )

    def _training_weights(self, y: Any, weights: np.ndarray | None) -> np.ndarray | None:
        """Sample weights, times those of the classes."""
        return weights

    def _training_outputs(
        self, y: Any, samples: Any, weights: np.ndarray | None
    ) -> Float[np.ndarray, "n t"]:
        """Check y, and return the outputs to fit."""
        raise NotImplementedError

    def _has_one_output(self) -> bool:
        """Whether predictions have no axis of outputs."""
        raise NotImplementedError

    def _store(
        self,
        combination: Combination,
        data: TrainingSet,
        plan: Plan,
        rows: np.ndarray,
        n_given: int,
    ) -> None:
        """Store the fitted attributes."""
        self.combination_ = combination
        self._training = data
        self.not_tried_ = plan.left_out
        self.members_: MemberTable = member_table(combination, data)
        scores = held_out_scores(
            combination, data, classifies=isinstance(self, ClassifierMixin), loss=self.loss
        )
        (criterion, loss), (robust, robust_loss) = scores.items()
        self.held_out_loss_ = loss
        self.held_out_scores_ = scores
        left_out = "samples" if data.groups is None else "groups"
        if "stream_" in vars(self) and self.stream_.recipe is not None:
            left_out = f"the first {len(data):,} samples"
        how = f"{left_out} left out one by one"
        if not combination.is_single and len(data) < FEW_SAMPLES:
            how = f"{left_out} held out of the whole procedure, in ten folds"
        self.held_out_words_ = f"On {how}: {criterion} {loss:.4g}, {robust} {robust_loss:.4g}"

        # samples of weight 0 were not fitted, and have no held-out prediction
        held_out = np.full((n_given, combination.held_out.shape[1]), np.nan)
        held_out[rows] = combination.held_out
        self._store_held_out(held_out, data)
        if combination.is_single:
            self._store_layer(combination.members[0], held_out)

    def _store_layer(self, member: Member, held_out: Float[np.ndarray, "n t"]) -> None:
        """Store what one layer has, and a combination has not."""
        single = self._has_one_output()
        self.layer_ = member
        self.tokens_ = member.embedding.rule
        self.heads_ = member.settings.heads
        self.n_heads_ = member.settings.n_heads
        self.alpha_ = member.alpha
        self.selection_ = member.ridge
        self.loo_error_ = self.members_[0].loss
        self.intercept_: Any = member.intercept
        if single and not isinstance(self, ClassifierMixin):
            self.intercept_ = float(member.intercept[0])
        draw = member.embedding.draw
        if draw is None or not member.is_linear:
            self.dual_coef_ = without_output_axis(member.coef, single)
            return
        width = draw.dim + 1
        values = member.coef[: draw.n_heads * width].reshape(draw.n_heads, width, -1)
        self.values_ = without_output_axis(values, single)

    def _store_held_out(self, held_out: Float[np.ndarray, "n t"], data: TrainingSet) -> None:
        """Store predictions of samples that were held out, and their errors."""
        raise NotImplementedError

    def _settings_of_layer(self) -> LayerSettings:
        """The settings of the only layer."""
        return self.combination_.members[0].settings

    def summary(self) -> str:
        """Return what was fitted, how good it is on held-out samples, and what was tried."""
        check_is_fitted(self)
        return summary_of(self._solved())

    # ---- predicting

    def _solved(self) -> Any:
        """The model with its values: itself, unless batches came since the last solve."""
        in_batches.ensure_solved(self)
        return self

    def _samples(self, X: Any) -> Any:
        """Checked samples, where the layers are computed; a warning where rows will be clipped."""
        check_is_fitted(self)
        self._solved()
        samples = as_samples(self, X, reset=False)
        device = self.combination_.members[0].embedding.options.device
        samples = placed(samples, device)
        rule = self.combination_.members[0].embedding.rule
        if rule.low is not None:
            is_outside = rule.is_outside(samples)
            if is_outside.any():
                warnings.warn(
                    f"{int(is_outside.sum())} of {len(samples)} samples have rows beyond the range "
                    "of the training rows by more than a tenth of it; they were clipped to it. "
                    "novelty(X) says how unlike the training samples each sample is.",
                    ClippedWarning,
                    stacklevel=4,
                )
        return samples

    def _scores(self, X: Any) -> Float[np.ndarray, "n t"]:
        """f of every sample, all outputs."""
        # checked first: samples that came in batches are solved for there
        samples = self._samples(X)
        scores = self.combination_.predict(samples)
        is_finite = np.isfinite(scores).all(axis=1)
        if not is_finite.all():
            first = int(np.flatnonzero(~is_finite)[0])
            raise ValueError(
                f"predictions must be finite: that of sample {first} is {scores[first]} "
                f"({int((~is_finite).sum())} in all). Its tokens are too large for float64. Scale "
                "them, or fit anew."
            )
        return scores

    def predict_batches(self, batches: Iterable[Any]) -> Iterator[np.ndarray]:
        """Yield the predictions of each batch in turn.

        A batch is sets alone, or (X, y) whose y is not used.
        """
        return in_batches.predict_batches(self, batches)

    def contributions(self, X: Any, *, return_rest: bool = False) -> Any:
        """Return what each row adds to the prediction of its sample.

        The plain version for one layer is `keyhole.textbook.contributions`;
        docs/explanation/contributions_and_intervals.md says how to read them. Contributions and
        what is left of each sample (``return_rest``) add up to `predict`, for a classifier to
        ``decision_function``.

        Parameters
        ----------
        X : samples, as for `predict`
        return_rest : bool
            Whether to return what is left as well: the intercept and what sample-level features
            add. With a second kernel, it is the prediction for the mean training embedding.

        Returns
        -------
        list of n arrays (N_i,) or (N_i, outputs)
            In the order of the rows; of SetGroups, those of all sets of a sample. With
            ``query="each"`` the part of a row is summed over all queries.
        array (n,) or (n, outputs)
            With ``return_rest``.

        Notes
        -----
        One layer with weights σ(s)/N is additive in the rows: f(x) = b + Σ_i c_i(x) with
        c_i = (1/N) Σ_m M^{-1/2} σ(s_mi) <v_m, x~_i>. Under softmax its weights replace σ(s_mi)/N,
        and c_i is the share of a row in this prediction. With infinitely many heads c_i is the
        prediction for the row alone, divided by N. Through a second kernel contributions are those
        of Aumann and Shapley, along the way from the mean training embedding. With
        ``pooling="statistics"`` a statistic belongs to the rows that set it; what "mean+size" and
        "mean+statistics" add to the mean is part of what is left. Those of a combination are
        weighted sums over its layers.

        With ``pooling="sum"``, another activation than "softmax" and a query that does not depend
        on the rows, c_i of one linear layer is exactly what removing row i takes away.
        Contributions do not say what causes y.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(200, n_keys=3, dim=4, seed=0)
        >>> # the mean of x² over the rows, x their first coordinate
        >>> y = kh.targets.TokenPower(2, dim=4)(sets)
        >>> model = kh.AttentionRegressor(random_state=0).fit(sets, y)
        >>> parts, rest = model.contributions(sets, return_rest=True)
        >>> totals = [part.sum() for part in parts] + rest
        >>> bool(np.allclose(totals, model.predict(sets)))
        True
        """
        samples = self._samples(X)
        parts, rest = self.combination_.contributions(samples)
        single = self._has_one_output()
        parts = without_output_axis(parts, single)
        ends = np.cumsum(samples.token_counts)
        per_sample = np.split(parts, ends[:-1])
        if return_rest:
            return per_sample, without_output_axis(rest, single)
        return per_sample

    def extras_contributions(self, X: Any) -> Float[np.ndarray, "n c ..."]:
        """Return what each sample-level feature adds: (n, features) or (n, features, outputs).

        It is the coefficient times the feature as it is scaled, so that a feature at its training
        mean adds 0. Of a combination it is the weighted sum over its linear layers; with a second
        kernel sample-level features act together, and are refused.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> sets = kh.SetBatch(np.ones((20, 2, 3)), extras=np.arange(20.0)[:, None])
        >>> model = kh.AttentionRegressor(mlp="none", random_state=0)
        >>> model = model.fit(sets, 5 * np.arange(20.0))
        >>> model.extras_contributions(sets[[0, 19]]).round(0).ravel()
        array([-47.,  47.])
        """
        samples = self._samples(X)
        n_given = 0 if samples.extras is None else samples.extras.shape[1]
        total = np.zeros((len(samples), n_given, self.combination_.held_out.shape[1]))
        for weight, member in zip(
            self.combination_.weights, self.combination_.members, strict=True
        ):
            if not member.is_linear and n_given:
                raise ValueError(
                    f"extras_contributions are of linear layers, and {member.name!r} has a second "
                    "kernel, in which sample-level features and rows act together: contributions("
                    "X, return_rest=True) has what they add. Fit with mlp='none'."
                )
            values = member.extras_values
            if values is not None and n_given:
                extras = member.embedding.prepared(samples).extras
                assert extras is not None
                total += weight * extras[:, :n_given, None] * values[:n_given]
        return without_output_axis(total, self._has_one_output())

    def hop_weights(self, X: Any) -> list[list[Float[np.ndarray, "p k"]]]:
        """Return how much each hop of the model weighs each row: the evidence of a prediction.

        Parameters
        ----------
        X : samples as `fit` takes them
            For SetGroups, all their sets one after the other.

        Returns
        -------
        list, one entry per hop, of n arrays (patterns, N_i)
            A hop before the last has softmax weights, with a row for each of its patterns. The last
            hop is that of the random heads. It has a row for each mean of the head distribution,
            with the mean weight of the heads around it. A model with one hop has this entry alone.

        Examples
        --------
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(80, n_keys=3, dim=2, seed=0)
        >>> model = kh.AttentionRegressor(
        ...     32, kh.GaussianHeads(), activation="softmax", pooling="mean", scaling="none",
        ...     query="given", random_state=0,
        ... )
        >>> (last,) = model.fit(sets, kh.targets.TokenPower(2, dim=2)(sets)).hop_weights(sets[:2])
        >>> [weights.shape for weights in last], bool(abs(last[0].sum() - 1) < 1e-12)
        ([(1, 3), (1, 3)], True)
        """
        samples = self._samples(X).numpy()
        with_heads = [member for member in self.combination_.members if member.settings.has_heads]
        with_hops = [member for member in with_heads if member.embedding.rule.hops]
        chosen = with_hops or with_heads
        if len(chosen) != 1:
            raise ValueError(
                f"hop_weights are of one layer, and this fit combines {len(chosen)} with heads: "
                "fit one of them alone, model.set_params(**model.members_[0].params)."
            )
        return weights_of_hops(samples, chosen[0])

    def to_torch(self) -> Any:
        """Return the fitted model as a ``torch.nn.Module``, with the same outputs to rounding.

        ``module(keys, mask, query, extras)`` takes padded sets (docs/howto/deploy.md).
        """
        from keyhole.export import to_torch

        check_is_fitted(self)
        return to_torch(self._solved())

    # ---- how sure

    @property
    def interval_method(self) -> str:
        """How intervals and label sets are made.

        "jackknife+" takes all leave-one-out fits. "held-out" takes the errors of samples that were
        held out of everything: for combinations of fewer than 300 samples, and where heads were
        learned. "jackknife" takes leave-one-out errors where there are no leave-one-out fits: after
        a fit in batches, and for a model from a file saved with ``keep="predict"``.
        """
        members = self._solved().combination_.members
        if any(member.learned_note for member in members):
            return "held-out"
        if not self.combination_.is_single and len(self.combination_.held_out) < FEW_SAMPLES:
            return "held-out"
        has_factors = all(member.factors for member in members)
        if self._training is None or not has_factors:
            return "jackknife"
        return "jackknife+"

    def _warn_of_plain_jackknife(self, what: str) -> None:
        """Say that there are no leave-one-out fits; raise if there are no errors either."""
        why = (
            "this model has no training samples to make them from: it was fitted in batches, or "
            "loaded from a file saved with keep='predict'."
        )
        if not len(getattr(self, "jackknife_errors_", ())):
            raise ValueError(
                f"{what} take errors of samples that were left out, and this model has none: {why} "
                "Use fit on a part of the samples, or save with keep='all'."
            )
        warnings.warn(
            f"{what} are those of the plain jackknife, the prediction and the spread of "
            f"{len(self.jackknife_errors_)} leave-one-out errors: jackknife+ takes all "
            f"leave-one-out fits, and {why}",
            PlainJackknifeWarning,
            stacklevel=4,
        )

    def _with_factors(self, purpose: str) -> TrainingSet:
        """The training samples, if all members have factors with a positive penalty."""
        members = self.combination_.members
        if self._training is None or not all(member.factors for member in members):
            raise ValueError(
                f"{purpose} takes the leave-one-out fits of the training samples, and this model "
                "has none: it was fitted in batches, or loaded from a file saved with "
                "keep='predict'. Use fit, and save with keep='all'."
            )
        for member in members:
            if not member.alpha > 0:
                raise ValueError(
                    f"{purpose} needs a positive penalty: that of {member.name!r} is "
                    f"{member.alpha:g}. Use alpha='loo', or a positive number."
                )
        return self._training

    def predict_std(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return the standard deviation of a new outcome, (n,) or (n, outputs).

        Of one layer it is that of a Gaussian process, √(A (v(x) + alpha)): v(x) is the posterior
        variance under the prior whose covariance is the kernel of the layer, with noise alpha and a
        free intercept (docs/explanation/contributions_and_intervals.md). The amplitude A, one for
        each output, is fitted to the leave-one-out errors. Of a combination √(v + alpha) is the
        weighted sum over its layers. It is a model of the errors without a guarantee; intervals
        have one.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> x = np.random.default_rng(0).uniform(-1, 1, size=(50, 1))
        >>> model = kh.AttentionRegressor(
        ...     heads=kh.GaussianHeads(), activation="relu", pooling="mean", scaling="standard",
        ...     query="given", random_state=0,
        ... ).fit(x, np.sin(3 * x[:, 0]))
        >>> near, far = model.predict_std([[0.1], [4.0]])
        >>> bool(far > 3 * near)
        True
        """
        samples = self._samples(X)
        data = self._with_factors("predict_std")
        deviations = posterior_std(self.combination_, data, samples)
        return without_output_axis(deviations, self._has_one_output())

    def novelty(self, X: Any) -> Float[np.ndarray, " n"]:
        """Return how unlike the training samples each sample is, as a rank between 0 and 1.

        It is the share of training samples (or groups, if there were any) whose posterior variance,
        under the fit without them, is below that of the new sample. A typical sample has 0.5. By
        construction one in a hundred ordinary samples is above 0.99, and so is every sample that is
        unlike all that the model has seen. It depends on X alone, and sees rows as they are, before
        any clipping. Of a combination it is the weighted mean of its layers'.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, size=(50, 1))
        >>> y = np.sin(3 * x[:, 0]) + 0.1 * rng.standard_normal(50)
        >>> kh.AttentionRegressor(random_state=0).fit(x, y).novelty([[4.0]])
        array([1.])
        """
        check_is_fitted(self)
        self._solved()
        data = self._with_factors("novelty")
        samples = as_samples(self, X, reset=False)
        device = self.combination_.members[0].embedding.options.device
        return novelty_ranks(self.combination_, data, placed(samples, device))

    def coordinate_importance(
        self, n_repeats: int = 3, random_state: int = 0
    ) -> CoordinateImportance:
        """Return what each coordinate and each extra is worth.

        A coordinate of the training samples is permuted, and every sample is predicted by the fit
        without it (or without its group). The worth of the coordinate is the growth of the error on
        these samples, which the fit has not seen. Nothing is refitted. For a classifier the error
        is the log-loss.

        A coordinate that matters through its mean over the rows has a worth across sets and none
        within them. One that says which rows matter has both. Two coordinates that carry the same
        information share their worth, and may both seem worthless. The cost is one prediction of
        all samples for each coordinate and repeat.

        Examples
        --------
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(80, n_keys=4, dim=3, seed=0)
        >>> y = kh.targets.QueryPower(1, dim=3)(sets)  # the first coordinate of the query
        >>> model = kh.AttentionRegressor(
        ...     heads=kh.GaussianHeads(), activation="relu", pooling="mean", scaling="none",
        ...     query="given", random_state=0,
        ... ).fit(sets, y)
        >>> importance = model.coordinate_importance()
        >>> importance.names[int(importance.across.argmax())], len(importance.names)
        ('query 0', 6)
        """
        check_is_fitted(self)
        self._solved()
        data = self._with_factors("coordinate_importance")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ClippedWarning)
            return importance_of_coordinates(
                self.combination_,
                data,
                classifies=isinstance(self, ClassifierMixin),
                n_repeats=check_count(n_repeats, "n_repeats"),
                seed=check_seed(random_state, "random_state"),
                memory_budget=memory_budget(),
            )

    # ---- batches

    def fit_batches(self, batches: Any, *, classes: Any = None, selection: str = "auto") -> Any:
        """Fit from batches that are read one at a time.

        The layers are settled on the first 2,000 sets. Their features, side by side, are summed
        over all batches, and one ridge is solved from the sums.

        Parameters
        ----------
        batches : iterable, or path
            Gives (X, y) or (X, y, sample_weight), each as ``fit`` takes them: a list, a generator,
            a `keyhole.data.ParquetSets`. A path names a Parquet or Arrow file with columns keys,
            y and, if there are queries, query.
        classes : array, optional
            For a classifier: all labels. Found by reading them first if ``batches`` can be read
            twice.
        selection : "auto", "loo" or "gcv"
            How the penalty is chosen. "loo" is exact leave-one-out, which takes another pass over
            ``batches``. "gcv" is generalised cross-validation, from the sums alone. "auto" is "loo"
            if ``batches`` can be read twice (an iterator, such as a generator, cannot).

        Returns
        -------
        self
        """
        self._validate_params()
        return in_batches.fit_batches(self, batches, classes, selection)

    def solve(self) -> Any:
        """Solve for the values of a model that was given batches by ``partial_fit``.

        Every prediction does this first. It does nothing if no batch was added since.
        """
        in_batches.ensure_solved(self)
        return self


class AttentionRegressor(MultiOutputMixin, RegressorMixin, AttentionModel):
    """Regression on sets of rows by a combination of attention layers with frozen random heads.

    A set may have a query. A layer is f(x) = Σ_m <v_m, φ_m(x)> + b with features φ_m of M random
    heads; its values v minimise Σ_i (y_i − f(x_i))² + α|v|² in closed form. With default settings
    a list of layers is fitted, some with a second kernel on the pooled vector, and combined by
    non-negative weights on their leave-one-out predictions (docs/explanation/defaults.md). With
    ``heads``, ``activation``, ``pooling``, ``scaling`` and ``query`` all given, one layer is
    fitted. The paper's layer is ``n_heads=512, heads=kh.GaussianHeads(), activation="relu",
    pooling="mean", scaling="none", query="given"``. `keyhole.textbook` has it in a few lines of
    NumPy.

    Parameters
    ----------
    n_heads : int, math.inf, kh.Landmarks or "auto"
        Number of heads M; ``math.inf`` is the exact kernel of infinitely many heads;
        ``kh.Landmarks(m)`` sees that kernel through m of the training samples. "auto" takes the
        exact kernel up to 1,000 samples where it is affordable, heads or landmarks elsewhere.
    heads : head distribution, optional
        What the query-key matrices are drawn from. ``kh.GaussianHeads(mean=1.0)`` favours targets
        that depend on <x_0, x_i>; ``kh.LearnedHeads()`` is fitted to the training set.
    alpha : "loo", number or sequence of numbers
        Ridge penalty; "loo" chooses from an automatic grid, a sequence from itself, both by exact
        leave-one-out.
    activation : "relu", "softmax", "linear", "square", "step", "exp" or "auto"
        What turns scores into weights: ReLU(s)/N, softmax over the set, and so on.
    fit_intercept : bool
        Whether f has an intercept b.
    random_state : int, RandomState, Generator or None
        An integer s means the heads ``heads.sample(n_heads, d, s)``.
    dtype : "float64" or "float32"
        Precision of the features. Kernels on the host and all solves are float64.
    pooling : "mean", "mean+size", "mean+statistics", "sum", "statistics", "extras" or "auto"
        How the features of rows become those of a sample. "mean" averages them, and "sum" adds them
        up, for targets that grow with the set. "mean+size" averages, and has the number of rows as
        a sample-level feature. "mean+statistics" also has the mean, standard deviation, least and
        largest value of every coordinate. "statistics" has these, second extremes and quantiles,
        and no heads; "extras" has the sample-level features alone.
    scaling : "none", "sphere", "standard" or "auto"
        What is done to tokens first. "sphere" divides each by its length. "standard" centres every
        coordinate and divides it by √d times its standard deviation on the training sets.
    query : "given", "mean", "each" or "auto"
        Where the query of a set comes from. "given" is the query of the set, or a constant one
        where it has none. "mean" is the mean of its rows. "each" takes each row in turn and pools
        over them.
    mlp : "auto", "none" or "only"
        Whether layers put a second, Gaussian kernel on the pooled vector: a random MLP behind the
        attention. "auto" tries both for some layers.
    mlp_width : float, optional
        Width of the second kernel, in units of the median squared distance of training samples; 1
        unless given.
    device : None, "auto", "cuda", "cuda:1", … or "cpu"
        Where torch fits and predicts (docs/howto/gpu.md); "auto" is the first GPU, if any. None
        follows ``X``: torch where it holds tensors, NumPy otherwise. Fitted attributes and
        predictions are NumPy arrays always.
    loss : "squared_error"
        What the weights of the layers minimise, and ``held_out_loss_`` is.
    verbose : bool
        Whether to print every layer as it is fitted.

    Attributes
    ----------
    members_ : table
        Every layer that was tried: its settings, weight, leave-one-out error, penalty, number of
        heads, heads and values. ``members_[i].params`` can be passed to ``set_params``.
    held_out_loss_ : float
        Mean squared error on samples (or groups) that were held out: leave-one-out; for
        combinations of fewer than 300 samples, held out of the whole procedure in ten folds.
    held_out_scores_ : dict
        The same by name, with the median absolute error.
    held_out_predictions_ : array (n,) or (n, outputs)
        Predictions of the training samples behind it; NaN for samples of weight 0.
    not_tried_ : tuple of str
        Layers of the list that would have cost too much.
    alpha_, heads_, n_heads_, values_, dual_coef_, intercept_, layer_, tokens_, selection_
        The penalty, heads, values v (M, D) or (M, D, outputs), dual coefficients of infinitely many
        heads, intercept, the layer itself, its token rule, and the penalties tried. They exist
        where one layer was fitted.
    loo_error_, loo_predictions_
        Leave-one-out error and predictions, where one layer was fitted.
    n_features_in_ : int
        Token dimension d.
    n_query_features_in_ : int
        Dimension of the queries; 0 without.
    n_extras_in_ : int
        Number of sample-level features.

    See Also
    --------
    AttentionClassifier : The same for labels.
    AttentionFeatures : Its features, for any other estimator.
    NormBallRegressor : Huber or absolute loss over a norm ball.

    Notes
    -----
    Where several layers are combined, rows are clipped to the training range of every coordinate,
    widened by a tenth; a prediction that was clipped warns. One explicit layer never clips.

    Examples
    --------
    >>> import keyhole as kh
    >>> target = kh.targets.TokenPower(2, dim=4)
    >>> train = kh.targets.sphere_sets(200, n_keys=6, dim=4, seed=0)
    >>> test = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=1)
    >>> model = kh.AttentionRegressor(random_state=0).fit(train, target(train))
    >>> bool(model.score(test, target(test)) > 0.97)
    True
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **AttentionModel._parameter_constraints,
        "loss": [StrOptions({"squared_error"})],
    }

    def __init__(
        self,
        n_heads: int | float | Landmarks | Literal["auto"] = "auto",
        heads: HeadDistribution | None = None,
        alpha: float | Sequence[float] | np.ndarray | Literal["loo"] = "loo",
        activation: Activation | Literal["auto"] = "auto",
        fit_intercept: bool = True,
        random_state: int | np.random.RandomState | np.random.Generator | None = None,
        *,
        dtype: Literal["float64", "float32"] | type | np.dtype = "float64",
        pooling: Literal[
            "mean", "mean+size", "mean+statistics", "sum", "statistics", "extras", "auto"
        ] = "auto",
        scaling: Literal["none", "sphere", "standard", "auto"] = "auto",
        query: Literal["given", "mean", "each", "auto"] = "auto",
        mlp: Literal["auto", "none", "only"] = "auto",
        mlp_width: float | None = None,
        device: str | None = None,
        loss: Literal["squared_error"] = "squared_error",
        verbose: bool | int = False,
    ) -> None:
        self.n_heads = n_heads
        self.heads = heads
        self.alpha = alpha
        self.activation = activation
        self.fit_intercept = fit_intercept
        self.random_state = random_state
        self.dtype = dtype
        self.pooling = pooling
        self.scaling = scaling
        self.query = query
        self.mlp = mlp
        self.mlp_width = mlp_width
        self.device = device
        self.loss = loss
        self.verbose = verbose

    def _has_one_output(self) -> bool:
        return self.single_output_

    def _training_outputs(
        self, y: Any, samples: Any, weights: np.ndarray | None
    ) -> Float[np.ndarray, "n t"]:
        outputs = as_outputs(self, y, samples)
        self.single_output_ = np.asarray(y).ndim == 1
        return outputs

    def _store_held_out(self, held_out: Float[np.ndarray, "n t"], data: TrainingSet) -> None:
        self.held_out_predictions_ = without_output_axis(held_out, self.single_output_)
        if self.combination_.is_single:
            self.loo_predictions_ = self.held_out_predictions_
        errors = np.abs(data.outputs - self.combination_.held_out)
        self.jackknife_errors_ = some_errors(errors[one_of_each_group(data)])

    @available_if(in_batches.can_fit_batches)
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> AttentionRegressor:
        """Add samples to those seen so far; the same fit as on all of them at once.

        The values are solved for by the next prediction, or by `solve`, so that many calls cost
        little more than one. The penalty is chosen by generalised cross-validation.
        """
        in_batches.take(self, X, y, sample_weight)
        return self

    def predict(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return predictions, shape (n,) or (n, outputs) as ``y`` had."""
        scores = self._scores(X)
        return without_output_axis(scores, self.single_output_)

    def predict_interval(
        self, X: Any, coverage: float = 0.9, *, width: Literal["constant", "adaptive"] = "constant"
    ) -> Float[np.ndarray, "n ..."]:
        """Return intervals for new outcomes, by jackknife+ or from held-out errors.

        The plain version is `keyhole.textbook.jackknife_interval`;
        docs/explanation/contributions_and_intervals.md has the formulas. Nothing is refitted.

        f_{−i}(x) = f(x) − h_i(x) e_i is the prediction of the fit without sample i, e_i its error
        there. Jackknife+ (Barber, Candès, Ramdas and Tibshirani 2021) goes from the ⌊(1−c)(n+1)⌋-th
        smallest of f_{−i}(x) − |e_i| to the ⌈c(n+1)⌉-th smallest of f_{−i}(x) + |e_i|, c being
        ``coverage``. An end is infinite where n is too small for c.

        Parameters
        ----------
        X : samples, as for `predict`
        coverage : float
            Share of outcomes that should be inside.
        width : "constant" or "adaptive"
            "adaptive" divides |e_i| by the standard deviation at x_i and multiplies by that at x:
            intervals are wider where training samples are few. Choose before you see the result:
            choosing by it breaks the guarantee.

        Returns
        -------
        array (n, 2) or (n, outputs, 2)
            Lower and upper end, each output by itself.

        Notes
        -----
        For one layer and exchangeable samples a share of at least 2c − 1 of new outcomes is inside,
        on average over training sets, and about c in practice. Penalties and weights were chosen on
        the same samples, which weakens the guarantee. Combinations of fewer than 300 samples, and
        models with learned heads, have f(x) plus and minus a quantile of the errors of samples that
        were held out of everything, without a guarantee of 2c − 1. ``interval_method`` names the
        method. With ``groups`` the fits leave out whole groups, each sample counts as one over the
        size of its group, and the statement is about a sample of a new group.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(300, n_keys=4, dim=3, seed=0)
        >>> noise = 0.1 * np.random.default_rng(0).standard_normal(300)
        >>> y = kh.targets.TokenPower(2, dim=3)(sets) + noise
        >>> model = kh.AttentionRegressor(random_state=0).fit(sets[:200], y[:200])
        >>> low, high = model.predict_interval(sets[200:], coverage=0.8).T
        >>> bool(0.7 < ((low <= y[200:]) & (y[200:] <= high)).mean() < 0.9)
        True
        """
        coverage = check_coverage(coverage)
        adaptive = check_choice(width, "width", ("constant", "adaptive")) == "adaptive"
        samples = self._samples(X)
        method = self.interval_method
        if adaptive:
            data = self._with_factors("width='adaptive'")
            if method != "jackknife+":
                raise ValueError(
                    "width='adaptive' takes all leave-one-out fits, and the errors here are of "
                    "samples held out of the whole procedure. Use width='constant'."
                )
        if method == "jackknife+":
            data = self._with_factors("predict_interval")
            intervals = jackknife_plus_intervals(
                self.combination_,
                data,
                samples,
                coverage,
                adaptive=adaptive,
                memory_budget=memory_budget(),
            )
        else:
            if method == "jackknife":
                self._warn_of_plain_jackknife("intervals")
            predicted = self.combination_.predict(samples)
            intervals = plain_intervals(predicted, self.jackknife_errors_, coverage)
        if self.single_output_:
            return intervals[:, 0]
        return intervals


class AttentionClassifier(ClassifierMixin, AttentionModel):
    """Classification of sets of rows by a combination of attention layers with frozen random heads.

    A set may have a query. The layers are ridge on one-vs-rest targets ±1, one output per class (a
    single one for two classes). With default settings a list of layers is fitted and combined by
    logistic regression on their leave-one-out scores, with non-negative weights, which calibrates
    probabilities at the same time (docs/explanation/defaults.md). With ``heads``, ``activation``,
    ``pooling``, ``scaling`` and ``query`` all given, one layer is fitted.

    Parameters
    ----------
    n_heads : int, math.inf, kh.Landmarks or "auto"
        Number of heads M; infinity is the exact kernel; "auto" goes by the size of the data.
    heads : head distribution, optional
        What the query-key matrices are drawn from; None tries several.
    alpha : "loo", number or sequence of numbers
        Ridge penalty; "loo" chooses from an automatic grid by leave-one-out.
    activation : "relu", "softmax", "linear", "square", "step", "exp" or "auto"
        What turns scores into weights of rows.
    fit_intercept : bool
        Whether scores have an intercept.
    random_state : int, RandomState, Generator or None
        Seed of the heads.
    dtype : "float64" or "float32"
        Precision of the features.
    pooling : "mean", "mean+size", "mean+statistics", "sum", "statistics", "extras" or "auto"
        How the features of rows become those of a sample.
    scaling : "none", "sphere", "standard" or "auto"
        What is done to tokens first.
    query : "given", "mean", "each" or "auto"
        Where the query of a set comes from.
    mlp : "auto", "none" or "only"
        Whether layers put a second, Gaussian kernel on the pooled vector.
    mlp_width : float, optional
        Width of the second kernel.
    device : None, "auto", "cuda", "cuda:1", … or "cpu"
        Where torch fits and predicts; None follows ``X``.
    loss : "log_loss" or "squared_error"
        Where one layer is fitted, what its values minimise, and ``held_out_loss_`` is: the log-loss
        by a few Newton steps (docs/explanation/logistic.md), or squared errors in closed form. The
        weights of a combination minimise the log-loss, whichever is given.
    class_weight : None, "balanced" or dict
        Weight of the samples of each class; "balanced" gives every class the same total weight.
    verbose : bool
        Whether to print every layer as it is fitted.

    Attributes
    ----------
    classes_ : array (classes,)
        The labels of y, sorted.
    members_ : table
        Every layer that was tried; see `AttentionRegressor`.
    held_out_loss_ : float
        The loss on samples (or groups) that were held out: leave-one-out; for combinations of fewer
        than 300 samples, held out of the whole procedure in ten folds.
    held_out_scores_ : dict
        The same by name, with the accuracy.
    held_out_predictions_ : array (n, classes)
        Probabilities of the training samples behind it; NaN for samples of weight 0.
    not_tried_ : tuple of str
        Layers of the list that would have cost too much.
    temperature_ : float
        Where one layer was fitted: the factor that turns its scores into logits.
    alpha_, heads_, n_heads_, values_, dual_coef_, intercept_, layer_, tokens_, selection_
        As of `AttentionRegressor`, where one layer was fitted.
    loo_error_, loo_decision_
        Leave-one-out squared error of the one-vs-rest targets, and leave-one-out decision function,
        where one layer was fitted.
    n_features_in_, n_query_features_in_, n_extras_in_ : int
        Dimensions of tokens and queries, and the number of sample-level features.

    See Also
    --------
    AttentionRegressor : The same for numbers; its page explains every parameter.
    NormBallClassifier : Logistic or hinge loss over a norm ball.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(300, n_keys=5, dim=4, seed=0)
    >>> score = kh.targets.TokenPower(2, dim=4)(sets)
    >>> label = np.where(score > np.median(score), "wide", "narrow")
    >>> model = kh.AttentionClassifier(random_state=0).fit(sets[:200], label[:200])
    >>> bool(model.score(sets[200:], label[200:]) > 0.8)
    True
    >>> model.predict_proba(sets[200:]).shape
    (100, 2)
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **AttentionModel._parameter_constraints,
        "class_weight": [dict, StrOptions({"balanced"}), None],
        "loss": [StrOptions({"squared_error", "log_loss"})],
    }

    def __init__(
        self,
        n_heads: int | float | Landmarks | Literal["auto"] = "auto",
        heads: HeadDistribution | None = None,
        alpha: float | Sequence[float] | np.ndarray | Literal["loo"] = "loo",
        activation: Activation | Literal["auto"] = "auto",
        fit_intercept: bool = True,
        random_state: int | np.random.RandomState | np.random.Generator | None = None,
        *,
        dtype: Literal["float64", "float32"] | type | np.dtype = "float64",
        pooling: Literal[
            "mean", "mean+size", "mean+statistics", "sum", "statistics", "extras", "auto"
        ] = "auto",
        scaling: Literal["none", "sphere", "standard", "auto"] = "auto",
        query: Literal["given", "mean", "each", "auto"] = "auto",
        mlp: Literal["auto", "none", "only"] = "auto",
        mlp_width: float | None = None,
        device: str | None = None,
        loss: Literal["log_loss", "squared_error"] = "log_loss",
        class_weight: dict[Any, float] | Literal["balanced"] | None = None,
        verbose: bool | int = False,
    ) -> None:
        self.n_heads = n_heads
        self.heads = heads
        self.alpha = alpha
        self.activation = activation
        self.fit_intercept = fit_intercept
        self.random_state = random_state
        self.dtype = dtype
        self.pooling = pooling
        self.scaling = scaling
        self.query = query
        self.mlp = mlp
        self.mlp_width = mlp_width
        self.device = device
        self.loss = loss
        self.class_weight = class_weight
        self.verbose = verbose

    def _has_one_output(self) -> bool:
        return len(self.classes_) == 2

    def _training_weights(self, y: Any, weights: np.ndarray | None) -> np.ndarray | None:
        check_target_given(self, y)
        return class_weights(self.class_weight, np.asarray(y), weights)

    def _training_outputs(
        self, y: Any, samples: Any, weights: np.ndarray | None
    ) -> Float[np.ndarray, "n t"]:
        self.classes_, labels = number_labels(self, y, samples)
        check_weighted_classes(self.classes_, labels, weights)
        return one_vs_rest(labels, len(self.classes_))

    def _store_held_out(self, held_out: Float[np.ndarray, "n t"], data: TrainingSet) -> None:
        from keyhole.solve.calibration import labels_of

        self.held_out_predictions_ = probabilities_of(self.combination_, held_out)
        if self.combination_.is_single:
            self.loo_decision_ = without_output_axis(held_out, self._has_one_output())
            self.temperature_ = self.combination_.temperature
        rows = one_of_each_group(data)
        errors = label_errors(
            self.combination_, self.combination_.held_out[rows], labels_of(data.outputs[rows])
        )
        self.jackknife_errors_ = some_errors(errors)

    @available_if(in_batches.can_fit_batches)
    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> AttentionClassifier:
        """Add samples to those seen so far.

        ``classes``, all labels there will be, is needed in the first call. As for
        `AttentionRegressor`. Probabilities are calibrated on the leave-one-out scores of the first
        samples, which are kept for it.
        """
        in_batches.take(self, X, y, sample_weight, classes)
        return self

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return scores: (n,) for two classes, positive for ``classes_[1]``; else (n, classes)."""
        return without_output_axis(self._scores(X), self._has_one_output())

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label."""
        logits = self.combination_logits(self._scores(X))
        return np.asarray(self.classes_[logits.argmax(axis=1)])

    def combination_logits(self, scores: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "n c"]:
        """Logits of the classes, from all outputs of the layers."""
        return self.combination_.logits(scores)

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return probabilities, calibrated on held-out scores."""
        scores = self._scores(X)
        return probabilities_of(self.combination_, scores)

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return the logarithms of `predict_proba`, without underflow."""
        scores = self._scores(X)
        return log_probabilities_of(self.combination_, scores)

    def predict_set(self, X: Any, coverage: float = 0.9) -> Bool[np.ndarray, "n c"]:
        """Return which labels are plausible for each sample.

        Let p_{−i} be the probabilities of the fit without sample i. Label y is in the set of x if
        #{i : p_{−i}(x_i, y_i) > p_{−i}(x, y)} < c(n+1): few training samples have a higher
        probability of their own label than x has of y.

        Returns
        -------
        bool array (n, classes)
            In the order of ``classes_``. A set may be empty: then no label is as probable for x as
            their own label was for most of the training samples.

        Notes
        -----
        What is guaranteed is said of `AttentionRegressor.predict_interval`, over all labels
        together and not for each label. With the log-loss the leave-one-out fits of one layer are
        approximate: one Newton step from the fit. Combinations of fewer than 300 samples compare
        p(x, y) of the model with the probabilities of samples that were held out of everything.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> rng = np.random.default_rng(0)
        >>> x = rng.standard_normal((200, 2))
        >>> model = kh.AttentionClassifier(random_state=0).fit(
        ...     x, x[:, 0] + 0.3 * rng.standard_normal(200) > 0
        ... )
        >>> model.predict_set([[-2.0, 0.0], [0.0, 0.0], [2.0, 0.0]], coverage=0.95)
        array([[ True, False],
               [ True,  True],
               [False,  True]])
        """
        coverage = check_coverage(coverage)
        samples = self._samples(X)
        if self.interval_method == "jackknife+":
            from keyhole.solve.calibration import labels_of

            data = self._with_factors("predict_set")
            return jackknife_plus_label_sets(
                self.combination_,
                data,
                labels_of(data.outputs),
                samples,
                coverage,
                memory_budget(),
            )
        if self.interval_method == "jackknife":
            self._warn_of_plain_jackknife("sets")
        probabilities = probabilities_of(self.combination_, self.combination_.predict(samples))
        return plain_label_sets(probabilities, self.jackknife_errors_, coverage)
