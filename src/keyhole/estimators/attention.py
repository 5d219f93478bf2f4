"""One attention layer with frozen random heads, fitted in closed form, for numbers and labels.

The plain version of what these classes compute is `keyhole.textbook`
(docs/explanation/textbook.md). A fit is `keyhole.choose.choose`, then `keyhole.layer.fit`; the
classes check what users pass, and store what comes back.
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
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.utils._param_validation import HasMethods, Interval, Options, StrOptions
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from keyhole._checks import as_groups, check_choice, check_count, check_seed
from keyhole.attention.activations import ACTIVATIONS, Activation
from keyhole.attention.backends import backend_for, pick_device
from keyhole.attention.heads import HeadDistribution
from keyhole.choose import choose
from keyhole.costs import warn_if_long
from keyhole.data.tokens import POOLINGS, QUERIES, SCALINGS
from keyhole.estimators import batches as in_batches
from keyhole.estimators.base import (
    LESS_FOR_A_FIT,
    SetModel,
    explained_memory_errors,
    memory_budget,
    without_output_axis,
)
from keyhole.estimators.classes import (
    SCORE_WITHOUT_WEIGHT,
    WeightedClasses,
    classes_with_weight,
    number_labels,
    one_vs_rest,
    scores_per_class,
    without_weightless,
)
from keyhole.estimators.explanations import weights_of_hops
from keyhole.estimators.procedure import ProcedureLoss, loss_of_procedure
from keyhole.estimators.report import (
    say,
    settings_line,
    summary_of,
    tell_candidate,
    why_not_learned,
)
from keyhole.estimators.selection import Selection
from keyhole.estimators.uncertainty import (
    Calibration,
    CoordinateImportance,
    PlainJackknifeWarning,
    TrainingRecord,
    check_coverage,
    importance_of_coordinates,
    jackknife_plus_intervals,
    jackknife_plus_label_sets,
    laplace_std,
    mean_squared_error,
    novelty_ranks,
    plain_intervals,
    plain_label_sets,
    posterior_std,
    some_errors,
)
from keyhole.estimators.validation import (
    as_alphas,
    as_distribution,
    as_dtype,
    as_keys,
    as_n_heads,
    as_outputs,
    as_samples,
    as_seed,
    as_weights,
    check_target_given,
    class_weights,
)
from keyhole.key_selection import ALL_KEYS
from keyhole.layer import FittedLayer
from keyhole.refits import Refits
from keyhole.ridge.calibration import fit_temperature
from keyhole.solvers.layers import FiniteLayer, KernelLayer
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet


class AttentionModel(SetModel):
    """What `AttentionRegressor` and `AttentionClassifier` share.

    The parameters, the fit, fits in batches, and what is said of the certainty of predictions.
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "n_heads": [
            Interval(Integral, 1, None, closed="left"),
            Options(Real, {math.inf}),
            StrOptions({"auto"}),
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
        "keys": [StrOptions({"all", "auto"}), Interval(Integral, 1, None, closed="left")],
        "device": [str, None],
        "solver": [StrOptions({"auto", "direct", "cg"})],
        "extras_scale": [StrOptions({"loo"}), Interval(Real, 0, None, closed="neither")],
        "verbose": ["verbose"],
    }

    heads_: HeadDistribution
    alpha_: float
    solver_: str
    selection_: Selection
    jackknife_errors_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> Any:
        """Choose what is automatic on the training set, then solve for the values.

        Parameters
        ----------
        X : SetBatch, SetGroups, array (n, N, d), list of arrays (N_i, d), or table (n, d)
            Sets; see `keyhole.SetBatch` for queries and sample-level features.
        y : array (n,) or (n, outputs)
            Numbers for a regressor, labels for a classifier.
        sample_weight : array (n,), optional
            Weighs the squared error of each sample.
        groups : array (n,), optional
            Samples of one group (questions about one story, measurements of one patient) are left
            out together. Penalty and settings are then chosen by the error on whole groups left
            out, and ``loo_error_`` and leave-one-out predictions are of whole groups left out.

        Returns
        -------
        self
        """
        # check what was passed; y becomes outputs, labels become one-vs-rest targets
        self._validate_params()
        in_batches.forget(self)
        samples = as_samples(self, X, reset=True)
        weights = self._training_weights(y, as_weights(sample_weight, samples))
        outputs = self._training_outputs(y, samples, weights)
        data = TrainingSet(
            samples=samples,
            outputs=outputs,
            weights=weights,
            groups=as_groups(groups, samples, weights),
        )

        # settings, then values; a draft that used everything is the fit already. Samples move to a
        # device once, for all of it
        spec = self.layer_spec(samples)
        with explained_memory_errors("fit", samples, spec.n_heads, LESS_FOR_A_FIT):
            placed = data.with_samples(backend_for(spec.device).placed(samples))
            choice = choose(spec, placed, tell=tell_candidate if self.verbose else None)
            if choice.final is None:
                warn_if_long(choice.spec, data)
            fitted = choice.fit(placed)

        # what the layer was fitted to: of large sets, maybe some keys only
        if fitted.selected is not None:
            data = data.with_samples(fitted.selected.data.samples)

        # fitted attributes; classes without weight had no part in the fit, and get their place back
        fitted, data = self._with_every_output(fitted, data)
        self._store_fit(fitted)
        self.candidates_ = choice.candidates
        self._store_training(fitted, data)
        self._store_left_out(fitted, data, labels=y)
        if self.verbose:
            say(f"chosen: {settings_line(self)}")
            remark = why_not_learned(self)
            if remark is not None:
                say(remark)
        return self

    @property
    def chosen_params_(self) -> dict[str, Any]:
        """The settings that a fit has used, for ``set_params``: another fit then chooses nothing.

        The penalty is not among them, because the best one depends on the number of samples. Heads
        that are learned are learned again.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> x = np.random.default_rng(0).uniform(-1, 1, size=(50, 3, 1))
        >>> model = kh.AttentionRegressor(random_state=0).fit(x, x.max(axis=1)[:, 0])
        >>> twin = kh.AttentionRegressor(random_state=0).set_params(**model.chosen_params_)
        >>> twin.fit(x, x.max(axis=1)[:, 0]).candidates_
        ()
        """
        check_is_fitted(self)
        model = self._snapshot()
        rule = model.tokens_
        heads = model.heads_
        if hasattr(model.heads, "fit"):
            heads = model.heads
        keys: int | str = ALL_KEYS
        if model.key_selection_ is not None:
            keys = model.key_selection_.n_keys
        return {
            "heads": heads,
            "n_heads": model.n_heads_,
            "activation": model.layer_.activation,
            "pooling": rule.pooling,
            "scaling": rule.scaling,
            "query": rule.query,
            "keys": keys,
            "extras_scale": float(rule.extras_scale),
            **self._chosen_loss(model),
        }

    def _chosen_loss(self, model: Any) -> dict[str, Any]:
        """The loss that the values minimise, where an estimator has that parameter."""
        return {}

    def procedure_loss(self, n_folds: int = 10) -> ProcedureLoss:
        """Return the loss of the whole procedure, choices included, on samples held out of it.

        ``loo_error_`` and the loss in `summary` are exact leave-one-out losses of the settings that
        were chosen. These settings were the best of many on the same samples, so that their loss is
        too low if samples are few. On the 92 bags of musk1 it is a log-loss of .230, and the
        procedure has .375 ± .089. Here settings are chosen again without each fold. The cost is
        that of ``n_folds`` fits, each with its choices.

        Groups are held out whole, and weights weigh the loss.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> rng = np.random.default_rng(0)
        >>> x = rng.normal(size=(40, 3, 2))
        >>> model = kh.AttentionRegressor(random_state=0).fit(x, rng.normal(size=40))
        >>> result = model.procedure_loss(n_folds=5)
        >>> bool(result.loss > model.loo_error_)  # y is noise: what was chosen is luck
        True
        """
        n_folds = check_count(n_folds, "n_folds", minimum=2)
        model = self._snapshot()
        check_is_fitted(model)
        if model.interval_method != "jackknife+":
            raise ValueError(
                f"procedure_loss repeats the fit on parts of its samples, and "
                f"{model._why_no_refits()} sklearn.model_selection.cross_validate does the same "
                "with any samples."
            )
        if model.key_selection_ is not None:
            raise ValueError(
                "procedure_loss repeats the fit on parts of its samples, and this model has kept "
                f"the {model.key_selection_.n_keys} keys of each set alone that it sees. Use "
                "sklearn.model_selection.cross_validate with the samples themselves."
            )
        return loss_of_procedure(model.layer_spec(None), model.training_.data, n_folds)

    def summary(self) -> str:
        """Return what was tried, its loss and its cost, and what was chosen: a table to print."""
        check_is_fitted(self)
        return summary_of(self._snapshot())

    def _training_outputs(
        self, y: Any, samples: Any, weights: np.ndarray | None
    ) -> Float[np.ndarray, "n t"]:
        """Check y, and return the outputs to fit."""
        raise NotImplementedError

    def _training_weights(self, y: Any, weights: np.ndarray | None) -> np.ndarray | None:
        """Sample weights, times those of the classes."""
        return weights

    def _with_every_output(
        self, fitted: FittedLayer, data: TrainingSet
    ) -> tuple[FittedLayer, TrainingSet]:
        """The fit and its samples, with the outputs that had no part in the fit added."""
        return fitted, data

    def _store_left_out(self, fitted: FittedLayer, data: TrainingSet, labels: Any) -> None:
        """Store leave-one-out predictions, and what follows from them."""
        raise NotImplementedError

    def layer_spec(self, samples: Any) -> LayerSpec:
        """The specification that the parameters stand for, for samples like these.

        ``samples=None`` is for work on the host. What is left open, None or "auto", is filled in by
        `keyhole.choose.choose`.
        """
        heads = None
        if self.heads is not None:
            heads = as_distribution(self.heads)
        extras_scale = None
        if not isinstance(self.extras_scale, str):
            extras_scale = float(self.extras_scale)
        device = None
        if samples is not None:
            device = pick_device(self.device, samples.sets)

        # a classifier needs scores of samples that were held out to fit its temperature to
        is_classifier = isinstance(self, ClassifierMixin)
        return LayerSpec(
            heads=heads,
            n_heads=as_n_heads(self.n_heads),
            activation=self.activation,
            pooling=self.pooling,
            scaling=self.scaling,
            query=self.query,
            keys=as_keys(self.keys),
            extras_scale=extras_scale,
            alphas=as_alphas(self.alpha),
            fit_intercept=bool(self.fit_intercept),
            criterion=getattr(self, "criterion", "squared_error"),
            seed=as_seed(self.random_state),
            dtype=as_dtype(self.dtype),
            device=device,
            solver=self.solver,
            classifies=is_classifier,
            may_learn=True,
            memory_budget=memory_budget(),
        )

    def _store_fit(self, fitted: FittedLayer) -> None:
        """Store the fitted attributes that every fit has."""
        # what was used
        layer = fitted.layer
        ridge = fitted.ridge
        self.heads_ = fitted.heads
        self.tokens_ = fitted.tokens
        self.layer_ = layer
        if fitted.selected is not None:
            self.key_selection_ = fitted.selected.selection

        # the penalty, and how it was chosen
        self.alpha_ = ridge.alpha
        self.solver_ = fitted.solved.route
        self.selection_ = Selection.of(ridge)
        if self.selection_.method == "loo":
            self.loo_error_ = fitted.error
        self.n_held_out_ = 0
        if fitted.held_out_error is not None:
            self.n_held_out_ = len(fitted.solved.judged_rows())
        if self.solver_ == "cg":
            self.residual_ = ridge.residual
            self.n_iter_ = ridge.n_iter

        # the coefficients. A kernel compares every new set with the training sets, so it has a copy
        # of them in host memory: what the user gave may be changed later
        single = self._has_one_output()
        if isinstance(layer, KernelLayer):
            layer = replace(layer, sets=layer.sets.numpy()[np.arange(len(layer.sets))])
            self.layer_ = layer
            self.n_heads_: float = math.inf
            self.dual_coef_ = without_output_axis(layer.dual, single)
        else:
            self.n_heads_ = layer.heads.n_heads
            self.values_ = without_output_axis(layer.values, single)

    def _store_training(self, fitted: FittedLayer, data: TrainingSet) -> None:
        """Keep the samples if a factor of their fit is within the memory budget.

        Intervals and variances are made from the factor, which has n × n or n × p numbers.
        """
        # the columns of the factor: p where that is less than n and the primal route is open. A
        # logistic layer has a factor for each output
        n = len(data)
        width = n
        layer = fitted.layer
        if isinstance(layer, FiniteLayer) and data.groups is None:
            width = min(n, layer.values[..., 0].size)
        n_factors = 1
        if fitted.spec.is_logistic:
            n_factors = data.outputs.shape[1]
        is_too_large = 8 * n * width * n_factors > memory_budget()
        if self.solver_ == "cg" or is_too_large:
            return

        # a copy, unless sets are large: what was given may be changed later
        self.training_ = TrainingRecord(
            data=data.kept(),
            spec=fitted.spec,
            tokens=fitted.tokens,
            alpha=float(fitted.ridge.alpha),
        )

    def solve(self) -> Any:
        """Solve for the values of a model that was given batches by ``partial_fit``.

        Every prediction does this first. Call it to read ``alpha_``, ``values_`` and other
        attributes before a prediction. It does nothing if no batch was added since.
        """
        in_batches.ensure_solved(self)
        return self

    def _snapshot(self) -> Any:
        """The model with its values, as it is now, for a method that only reads."""
        return in_batches.snapshot(self)

    def __getattr__(self, name: str) -> Any:
        """Raise for an attribute that is not there.

        The message has the reason where a model was, or cannot be, given batches.
        """
        if name == "partial_fit":
            raise AttributeError(in_batches.why_not_in_batches(self))
        is_missing_in_stream = name in in_batches.OF_A_STREAM and "stream_" in vars(self)
        if is_missing_in_stream:
            if "layer_" not in vars(self):
                raise AttributeError(
                    f"{name!r} follows from sums that have not been solved yet: samples came by "
                    "partial_fit since. Call solve() first, or any method that predicts."
                )
            if name.startswith("loo_"):
                raise AttributeError(
                    f"{name!r} takes another pass over the data, and this fit had one: its "
                    "selection_ is by generalised cross-validation. fit_batches on a list or a "
                    "ParquetSets passes twice."
                )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ----------------------------------------------------------------------------------------------
    # batches

    def fit_batches(self, batches: Any, *, classes: Any = None, selection: str = "auto") -> Any:
        """Fit from batches that are read one at a time.

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
            ``batches`` and twice the arithmetic of the first. "gcv" is exact generalised
            cross-validation, from the sums alone. "auto" is "loo" if ``batches`` can be read twice
            (an iterator, such as a generator, cannot).

        Returns
        -------
        self
            ``selection_.method`` says which it was.

        Notes
        -----
        Sums over batches hold p × p numbers with p = M·D. From 64 coordinates on,
        ``n_heads="auto"`` would allow fewer than 32 heads for them. Then the keys are written to
        the disk as they come, and up to 10,000 samples are fitted by their n × n matrix, as ``fit``
        does. Such a model starts over with ``partial_fit``.
        """
        self._validate_params()
        return in_batches.fit_batches(self, batches, classes, selection)

    def predict_batches(self, batches: Iterable[Any]) -> Iterator[np.ndarray]:
        """Yield the predictions of each batch in turn.

        A batch is sets alone, or (X, y) whose y is not used.
        """
        return in_batches.predict_batches(self, batches)

    # ----------------------------------------------------------------------------------------------
    # how sure

    @property
    def interval_method(self) -> str:
        """How intervals and label sets are made.

        "jackknife+" is the usual method. It is "jackknife" if the training samples are not kept, so
        that there are no leave-one-out fits. It is "held-out" if heads were learned: the errors are
        then those of samples that were held out of the learning too.
        """
        if getattr(self, "n_held_out_", 0):
            return "held-out"
        if "training_" in vars(self):
            return "jackknife+"
        return "jackknife"

    def predict_std(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return the standard deviation of a new outcome, (n,) or (n, outputs).

        It is that of a Gaussian process, √(A (v(x) + alpha)): v(x) is the posterior variance
        under the prior whose covariance is the kernel of the layer, with noise alpha and a free
        intercept (docs/explanation/contributions_and_intervals.md). The amplitude A, one for each
        output, is fitted to the leave-one-out errors: A = mean of e_i² / (v_{−i}(x_i) + alpha).
        For a classifier it is the standard deviation of ``decision_function``; with the log-loss,
        the posterior one of the logits by Laplace's method, √(v(x)/alpha). It is a model of the
        errors without a guarantee; intervals have one.

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
        model = self._snapshot()
        samples = model._prepared(X)
        parts = model._refits_with_variance("predict_std")
        if model.training_.spec.is_logistic:
            deviations = laplace_std(parts, samples, memory_budget())
        else:
            deviations = posterior_std(parts[0], samples, memory_budget())
            if model.interval_method == "held-out":
                # heads that were learned make leave-one-out errors too small
                deviations *= math.sqrt(model.loo_error_ / mean_squared_error(parts[0]))
        return without_output_axis(deviations, model._has_one_output())

    def novelty(self, X: Any) -> Float[np.ndarray, " n"]:
        """Return how unlike the training samples each sample is, as a rank between 0 and 1.

        It is the share of training samples (or groups, if there were any) whose posterior variance,
        under the fit without them, is below that of the new sample. A typical sample has 0.5. By
        construction one in a hundred ordinary samples is above 0.99, and so is every sample that is
        unlike all that the model has seen. It depends on X alone: it does not say whether the
        outcome is unusual. With the log-loss the variance is that of the logits, and the rank is a
        mean over outputs.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> rng = np.random.default_rng(0)
        >>> x = rng.uniform(-1, 1, size=(50, 1))
        >>> y = np.sin(3 * x[:, 0]) + 0.1 * rng.standard_normal(50)
        >>> kh.AttentionRegressor(random_state=0).fit(x, y).novelty([[0.2], [4.0]]).round(1)
        array([0.1, 1. ])
        """
        model = self._snapshot()
        samples = model._prepared(X)
        parts = model._refits_with_variance("novelty")
        # of several outputs those that vary: a class without weight has nothing to rank by
        targets = model.training_.targets(parts[0])
        ranks = []
        for refits, target in zip(parts, targets.T, strict=False):
            if len(parts) == 1 or np.ptp(target) > 0:
                ranks.append(novelty_ranks(refits, samples, memory_budget()))
        return np.asarray(np.mean(ranks, axis=0))

    def coordinate_importance(
        self, n_repeats: int = 3, random_state: int = 0
    ) -> CoordinateImportance:
        """Return what each coordinate and each extra is worth.

        A coordinate of the training samples is permuted, and every sample is predicted by the exact
        fit without it (or without its group). The worth of the coordinate is the growth of the
        error on these samples, which the fit has not seen. Nothing is refitted. For a classifier
        the error is the squared error of its one-vs-rest targets, or their log-loss if that is what
        its values minimise.

        A coordinate that matters through its mean over the keys has a worth across sets and none
        within them. One that says which keys matter has both. Two coordinates that carry the same
        information share their worth, and may both seem worthless. The cost is one prediction of
        all samples for each coordinate and repeat.

        Examples
        --------
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(80, n_keys=4, dim=3, seed=0)
        >>> y = kh.targets.QueryPower(1, dim=3)(sets)  # the first coordinate of the query
        >>> model = kh.AttentionRegressor(30, random_state=0, query="given").fit(sets, y)
        >>> importance = model.coordinate_importance()
        >>> importance.names[int(importance.across.argmax())], len(importance.names)
        ('query 0', 6)
        """
        model = self._snapshot()
        if "training_" not in vars(model):
            raise ValueError(
                f"coordinate_importance takes all leave-one-out fits, and {model._why_no_refits()}"
            )
        return importance_of_coordinates(
            model.training_,
            model.layer_,
            n_repeats=check_count(n_repeats, "n_repeats"),
            seed=check_seed(random_state, "random_state"),
            memory_budget=memory_budget(),
        )

    def _refits_with_variance(self, purpose: str) -> tuple[Refits, ...]:
        """The leave-one-out fits of all outputs together, or of each, if they have variances."""
        if "training_" not in vars(self):
            raise ValueError(
                f"{purpose} takes the posterior variance of all leave-one-out fits, and "
                f"{self._why_no_refits()}"
            )
        parts = self.training_.output_refits(self.layer_)
        if not all(refits.has_variance for refits in parts):
            raise ValueError(
                f"{purpose} needs a positive penalty, larger than rounding errors: alpha is "
                f"{self.alpha_:g}. Use alpha='loo', or a larger number."
            )
        return parts

    def _why_no_refits(self) -> str:
        """Why there are no leave-one-out fits, and what to do about it."""
        if self.solver_ == "cg":
            return "conjugate gradients make no factor of it. Fit with solver='direct'."
        if "n_samples_seen_" in vars(self):
            return (
                "a fit in batches keeps sums, and not its samples. Use fit, on a part of the "
                "samples if need be."
            )
        return (
            "this model has no samples to make them from: it was loaded from a file saved with "
            "keep='predict', or they were too many for a matrix of all pairs within the memory "
            "budget. Save with keep='all', raise scikit-learn's working_memory setting, or fit "
            "fewer samples."
        )

    def _warn_of_plain_jackknife(self, what: str) -> None:
        """Say that there are no leave-one-out fits.

        Raise if there are no leave-one-out errors either.
        """
        if not len(getattr(self, "jackknife_errors_", ())):
            raise ValueError(
                f"{what} take errors of samples that were left out, and this model has none: "
                f"{self._why_no_refits()} With a few numbers as `alpha`, conjugate gradients hold "
                "out a tenth."
            )
        warnings.warn(
            f"{what} are those of the plain jackknife, the prediction and the spread of "
            f"{len(self.jackknife_errors_)} leave-one-out errors: jackknife+ takes all "
            f"leave-one-out fits, and {self._why_no_refits()}",
            PlainJackknifeWarning,
            stacklevel=3,
        )

    # ----------------------------------------------------------------------------------------------
    # evidence

    def hop_weights(self, X: Any) -> list[list[Float[np.ndarray, "p k"]]]:
        """Return how much each hop of the model weighs each key: the evidence of a prediction.

        The plain version, for one hop of ReLU heads, is the mean over heads of
        `keyhole.textbook.attention_weights`.

        Parameters
        ----------
        X : samples as `fit` takes them
            For SetGroups, all their sets one after the other.

        Returns
        -------
        list, one entry per hop, of n arrays (patterns, N_i)
            A hop before the last has softmax weights, with a row for each of its patterns. The last
            hop is that of the random heads. It has a row for each mean of the head distribution,
            with the mean weight of the heads around it (256 heads are drawn if there are infinitely
            many). A model with one hop has this entry alone.

        Examples
        --------
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(80, n_keys=3, dim=2, seed=0)
        >>> model = kh.AttentionRegressor(32, kh.GaussianHeads(), "loo", "softmax", random_state=0)
        >>> (last,) = model.fit(sets, kh.targets.TokenPower(2, dim=2)(sets)).hop_weights(sets[:2])
        >>> [weights.shape for weights in last], bool(abs(last[0].sum() - 1) < 1e-12)
        ([(1, 3), (1, 3)], True)
        """
        model = self._snapshot()
        check_is_fitted(model)
        samples = as_samples(model, X, reset=False).numpy()
        if model.key_selection_ is not None:
            samples = model.key_selection_.apply(samples)
        return weights_of_hops(samples, model.tokens_, model.layer_, model.heads_, memory_budget())


class AttentionRegressor(MultiOutputMixin, RegressorMixin, AttentionModel):
    """Regression on sets by one attention layer with frozen random heads and ridge values.

    A set may have a query. The layer is f(x) = Σ_m <v_m, φ_m(x)> + b with features φ_m of M random
    heads. The values v minimise Σ_i (y_i − f(x_i))² + α|v|², and the intercept b is free. With
    default settings everything is chosen on the training set (docs/explanation/defaults.md). The
    paper's layer is ``n_heads=512, heads=kh.GaussianHeads(), activation="relu", pooling="mean",
    scaling="none", query="given"``. `keyhole.textbook` has the same in a few lines of NumPy:
    `features`, `ridge` and `predict`.

    Parameters
    ----------
    n_heads : int, math.inf or "auto"
        Number of heads M; ``math.inf`` is the exact kernel of infinitely many heads. "auto" takes
        the exact kernel where it is predicted, from sizes alone, to be faster than 512 heads, and
        512 heads elsewhere. Their number is halved while a fit is predicted to take more than 120 s
        of one core. In batches, as many as make 2048 features, 512 at most.
    heads : head distribution, optional
        What the query-key matrices are drawn from. None tries ``kh.GaussianHeads()`` first, and
        with a query also means that are multiples of the identity. Under softmax it tries
        ``kh.GaussianHeads((0.3, 20.0), 0.1)`` too, which draws a multiple for each coordinate. From
        300 samples on it tries ``kh.LearnedHeads()``, which is fitted to the training set.
        ``kh.GaussianHeads(mean=1.0)`` favours targets that depend on <x_0, x_i>.
    alpha : "loo", number or sequence of numbers
        Ridge penalty; "loo" chooses from an automatic grid, a sequence from itself, both by exact
        leave-one-out.
    activation : "relu", "softmax", "linear", "square", "step", "exp" or "auto"
        What turns scores into weights: ReLU(s)/N, softmax over the set, and so on. "auto" is ReLU
        unless softmax is better by more than two standard errors of the leave-one-out losses.
        Softmax is tried at three scales of the heads.
    fit_intercept : bool
        Whether f has an intercept b.
    random_state : int, RandomState, Generator or None
        An integer s means the heads ``heads.sample(n_heads, d, s)``.
    dtype : "float64" or "float32"
        Precision of the features and their Gram matrix. Kernels are always float64, except those of
        a device.
    pooling : "mean", "mean+size", "mean+statistics", "sum" or "auto"
        How the features of keys become those of a sample. "mean" averages them, and "sum" adds them
        up, for targets that grow with the set. "mean+size" averages, and has the number of keys as
        a sample-level feature. "mean+statistics" also has the mean, standard deviation, least and
        largest value of every coordinate. "auto" averages unless another is clearly better; with
        `LearnedHeads` it always averages.
    scaling : "none", "sphere", "standard" or "auto"
        What is done to tokens first. "sphere" divides each by its length. "standard" centres every
        coordinate and divides it by √d times its standard deviation on the training sets. "auto"
        takes the one with the lowest leave-one-out loss. Automatic settings are chosen on 128 to
        500 samples.
    query : "given", "mean", "each" or "auto"
        Where the query of a set comes from. "given" is the query of the set, or a constant one
        where it has none. "mean" is the mean of its keys. "each" takes each key in turn and pools
        over them. "auto" tries "given" and "mean" on sets without a query, and "each" where it is
        affordable. In batches automatic settings are chosen on the first 1024 samples, or on fewer
        if values are needed before that, and then kept.
    keys : int, "all" or "auto"
        How many keys of each set the layer sees. With a number k it sees the k keys of each set
        whose contributions to a small scoring layer differ most from the mean of the set. Training
        samples are scored by layers that were fitted without them. "auto" tries 8 keys if the
        median set has 32 keys or more and something else is automatic too. It takes them if they
        are better by more than two standard errors on five held-out folds.
    device : None, "auto", "cuda", "cuda:1", … or "cpu"
        Where torch fits and predicts (docs/howto/gpu.md); "auto" is the first GPU, if any. None
        follows ``X``: torch where it holds tensors, NumPy otherwise. Fitted attributes and
        predictions are NumPy arrays always.
    solver : "auto", "direct" or "cg"
        "direct" factorises the smaller of the n × n and p × p Gram matrices, p = M·(d+1). "cg"
        makes neither: it is preconditioned conjugate gradients over heads that are drawn anew in
        each iteration. It takes a fixed ``alpha``, or a few to choose from on a tenth of the
        samples. "auto" is "cg" only if the matrix exceeds the memory.
    extras_scale : "loo" or number
        Scale s of the sample-level features z. Features become [φ; s·z~], kernels K + s²·<z~, z~'>.
        z~ is z less its training mean, divided by its standard deviation (without an intercept,
        divided by its root mean square). "loo" takes the best of four scales on at most 500
        samples; in batches by generalised cross-validation. ``tokens_.extras_scale`` is s, and
        ``layer_.extras_values`` are the coefficients.
    verbose : bool
        Whether to print every candidate that is tried, and what was chosen.

    Attributes
    ----------
    heads_ : head distribution
        ``heads``, or what was chosen or learned on the training set; ``layer_.heads`` are the drawn
        matrices.
    tokens_ : TokenRule
        Scaling, query and pooling used.
    key_selection_ : KeySelection or None
        What selects the keys that the layer sees; None where it sees all of them.
    candidates_ : tuple of Candidate
        Every setting tried, with its leave-one-out loss; empty if there was nothing to choose.
    n_heads_ : int or math.inf
        Heads used; infinity for the exact kernel.
    alpha_ : float
        The penalty used.
    loo_error_ : float
        Leave-one-out mean squared error at ``alpha_``, of the settings that were chosen: too low
        where they are the best of many on few samples (see `procedure_loss`). Not after a fit in
        one pass over batches, nor after "cg". Where heads were learned it is that of the
        ``n_held_out_`` samples that neither heads nor values have seen.
    n_held_out_ : int
        Samples that were held out while heads were learned; 0 where none were learned.
    selection_ : Selection
        How the penalty was chosen: method, criterion, penalties tried, their scores.
    loo_predictions_ : array (n,) or (n, outputs)
        Prediction for each training sample by the model fitted without it; where heads were
        learned, NaN for samples that they were learned from.
    jackknife_errors_ : array (k, outputs)
        Absolute leave-one-out errors of up to 2048 samples, sorted for each output. A group has
        one. `predict_interval` uses them where there are no leave-one-out fits. There are few or
        none after "cg".
    intercept_ : float or array (outputs,)
        b.
    values_ : array (M, D) or (M, D, outputs)
        v, for finite heads.
    layer_ : FiniteLayer or KernelLayer
        What predicts; for finite heads ``layer_.heads.block(0, M)`` draws the query-key matrices.
    dual_coef_ : array (n', outputs)
        For infinite heads: f(x) = Σ_i dual_coef_i K(x, x_i) + b over the n' training samples that
        have weight.
    solver_ : str
        "primal", "dual", "kernel" or "cg".
    residual_ : float
        After "cg": fitted values are off, in root mean square, by at most this share of the
        standard deviation of y. A ``ResidualWarning`` says so if it is above 1e-8 (float32: 1e-6).
    n_iter_ : int
        After "cg": iterations.
    n_features_in_ : int
        Token dimension d.
    n_query_features_in_ : int
        Dimension of the queries; 0 without.
    n_extras_in_ : int
        Number of sample-level features.

    See Also
    --------
    AttentionClassifier : The same layer for labels.
    AttentionFeatures : Its features, for any other estimator.
    NormBallRegressor : Huber or absolute loss over a norm ball.

    Notes
    -----
    A sample is a row, and leave-one-out leaves out one at a time: give copies of one observation
    the same label in ``groups``. Temporaries stay within
    scikit-learn's ``working_memory`` setting (1 GiB); the n × n or p × p Gram matrix comes on top.
    A fit keeps a copy of its training samples for `predict_interval` and the like, unless their
    factor, n × n or n × p numbers, would exceed ``working_memory``.

    Examples
    --------
    >>> import keyhole as kh
    >>> target = kh.targets.TokenPower(2, dim=4)
    >>> train = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=0)
    >>> test = kh.targets.sphere_sets(300, n_keys=6, dim=4, seed=1)
    >>> model = kh.AttentionRegressor(n_heads=100, random_state=0).fit(train, target(train))
    >>> bool(model.score(test, target(test)) > 0.97)
    True
    >>> model.solver_, model.values_.shape
    ('dual', (100, 5))
    """

    def __init__(
        self,
        n_heads: int | float | Literal["auto"] = "auto",
        heads: HeadDistribution | None = None,
        alpha: float | Sequence[float] | np.ndarray | Literal["loo"] = "loo",
        activation: Activation | Literal["auto"] = "auto",
        fit_intercept: bool = True,
        random_state: int | np.random.RandomState | np.random.Generator | None = None,
        *,
        dtype: Literal["float64", "float32"] | type | np.dtype = "float64",
        pooling: Literal["mean", "mean+size", "mean+statistics", "sum", "auto"] = "auto",
        scaling: Literal["none", "sphere", "standard", "auto"] = "auto",
        query: Literal["given", "mean", "each", "auto"] = "auto",
        keys: int | Literal["all", "auto"] = "auto",
        device: str | None = None,
        solver: Literal["auto", "direct", "cg"] = "auto",
        extras_scale: float | Literal["loo"] = "loo",
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
        self.keys = keys
        self.device = device
        self.solver = solver
        self.extras_scale = extras_scale
        self.verbose = verbose

    def _has_one_output(self) -> bool:
        return self.single_output_

    def _training_outputs(
        self, y: Any, samples: Any, weights: np.ndarray | None
    ) -> Float[np.ndarray, "n t"]:
        outputs = as_outputs(self, y, samples)
        self.single_output_ = np.asarray(y).ndim == 1
        return outputs

    def _store_left_out(self, fitted: FittedLayer, data: TrainingSet, labels: Any) -> None:
        intercept = fitted.layer.intercept
        if self.single_output_:
            self.intercept_: Any = float(intercept[0])
        else:
            self.intercept_ = intercept
        if self.selection_.method == "loo":
            self.loo_predictions_ = without_output_axis(fitted.predictions, self.single_output_)

        # sizes of leave-one-out errors, for intervals where no leave-one-out fits can be made
        errors = np.abs(data.outputs - fitted.predictions)
        rows = fitted.solved.judged_rows()
        self.jackknife_errors_ = some_errors(errors[rows])

    @available_if(in_batches.can_fit_batches)
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> AttentionRegressor:
        """Add samples to those seen so far; the same fit as on all of them at once.

        The values are solved for by the next prediction, or by `solve`, so that many calls cost
        little more than one. The penalty is chosen by exact generalised cross-validation:
        leave-one-out takes another pass over the data, which `fit_batches` makes.
        """
        in_batches.take(self, X, y, sample_weight)
        return self

    def predict(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return predictions, shape (n,) or (n, outputs) as ``y`` had.

        The plain version is `keyhole.textbook.predict`.
        """
        model = self._snapshot()
        outputs = model._layer_outputs(X)
        return without_output_axis(outputs, model.single_output_)

    def predict_interval(
        self, X: Any, coverage: float = 0.9, *, width: Literal["constant", "adaptive"] = "constant"
    ) -> Float[np.ndarray, "n ..."]:
        """Return intervals for new outcomes by jackknife+, from all leave-one-out fits.

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
            "adaptive" divides |e_i| by √(v_{−i}(x_i) + alpha) and multiplies by √(v_{−i}(x) +
            alpha), v_{−i} being the posterior variance without sample i: intervals are wider where
            training samples are few. Choose before you see the result: choosing by it breaks the
            guarantee.

        Returns
        -------
        array (n, 2) or (n, outputs, 2)
            Lower and upper end, each output by itself.

        Notes
        -----
        If training samples and new ones are exchangeable, a share of at least 2c − 1 of new
        outcomes is inside, on average over training sets. In practice it is about c. Nothing is
        guaranteed for one particular x, or if new samples come from elsewhere (see `novelty`).
        Penalty, scaling and heads were chosen on the same samples, which weakens the guarantee.

        ``sample_weight`` weighs the fit, but not the ranks:
        all samples of positive weight count equally. With ``groups`` the fits leave out whole
        groups, each sample counts as one over the size of its group, and the guarantee is for a
        sample of a new group.

        There are no leave-one-out fits after a fit in batches or by conjugate gradients, for a
        model from a file without training samples, and with too many samples. Then the interval is
        that of the plain jackknife, f(x) plus and minus a quantile of |e|, and a
        `PlainJackknifeWarning` says so. If heads were learned, the errors are those of samples that
        neither heads nor values have seen, and the interval is f(x) plus and minus their quantile.
        ``interval_method`` names the method.

        The leave-one-out fits are computed on first use, which takes about as long as a fit at one
        penalty. They are kept, as n × n or n × p numbers.

        Examples
        --------
        >>> import numpy as np
        >>> import keyhole as kh
        >>> sets = kh.targets.sphere_sets(300, n_keys=4, dim=3, seed=0)
        >>> y = kh.targets.TokenPower(2, dim=3)(sets) + 0.1 * np.random.default_rng(
        ...     0
        ... ).standard_normal(300)
        >>> model = kh.AttentionRegressor(random_state=0).fit(sets[:200], y[:200])
        >>> low, high = model.predict_interval(sets[200:], coverage=0.8).T
        >>> float(((low <= y[200:]) & (y[200:] <= high)).mean())
        0.76
        """
        coverage = check_coverage(coverage)
        adaptive = check_choice(width, "width", ("constant", "adaptive")) == "adaptive"
        model = self._snapshot()
        samples = model._prepared(X)
        if adaptive:  # raises where there are no variances
            model._refits_with_variance("width='adaptive'")
            if model.interval_method == "held-out":
                raise ValueError(
                    "width='adaptive' takes leave-one-out errors, and heads that were learned make "
                    f"those too small: {model.heads_.reason}. Use width='constant'."
                )
        if model.interval_method == "jackknife+":
            intervals = jackknife_plus_intervals(
                model.training_.refits(),
                samples,
                coverage,
                adaptive=adaptive,
                memory_budget=memory_budget(),
            )
        else:
            if model.interval_method == "jackknife":
                model._warn_of_plain_jackknife("intervals")
            predicted = model.layer_.predict(samples, memory_budget=memory_budget())
            intervals = plain_intervals(predicted, model.jackknife_errors_, coverage)
        if model.single_output_:
            return intervals[:, 0]
        return intervals


class AttentionClassifier(ClassifierMixin, AttentionModel):
    """Classification of sets by one attention layer with frozen random heads and fitted values.

    A set may have a query. The values are those of ridge on one-vs-rest targets ±1, one output per
    class (a single one for two classes), as scikit-learn's ``RidgeClassifier`` has them. With
    ``loss="log_loss"`` they are those of logistic regression, and scores are logits. Probabilities
    are softmax(c · scores) with the temperature c fitted to the leave-one-out scores. The plain
    version of the scores of one class is `keyhole.textbook.ridge`, or `keyhole.textbook.logistic`,
    on its targets ±1.

    Parameters
    ----------
    n_heads : int, math.inf or "auto"
        Number of heads M; see `AttentionRegressor`.
    heads : head distribution, optional
        What the query-key matrices are drawn from; None chooses. See `AttentionRegressor`.
    alpha : "loo", number or sequence of numbers
        Ridge penalty; "loo" chooses from an automatic grid by leave-one-out.
    activation : "relu", "softmax", "linear", "square", "step", "exp" or "auto"
        What turns scores into weights; see `AttentionRegressor`.
    fit_intercept : bool
        Whether scores have an intercept.
    random_state : int, RandomState, Generator or None
        Seed of the heads.
    dtype : "float64" or "float32"
        Precision of the features and their Gram matrix.
    pooling : "mean", "mean+size", "mean+statistics", "sum" or "auto"
        How the features of keys become those of a sample; see `AttentionRegressor`.
    scaling : "none", "sphere", "standard" or "auto"
        What is done to tokens first; see `AttentionRegressor`.
    query : "given", "mean", "each" or "auto"
        Where the query of a set comes from; see `AttentionRegressor`.
    keys : int, "all" or "auto"
        How many keys of each set the layer sees; see `AttentionRegressor`.
    device : None, "auto", "cuda", "cuda:1", … or "cpu"
        Where torch fits and predicts; None follows ``X``.
    solver : "auto", "direct" or "cg"
        How the values are solved for; see `AttentionRegressor`.
    extras_scale : "loo" or number
        Scale of the sample-level features; see `AttentionRegressor`.
    verbose : bool
        Whether to print every candidate that is tried, and what was chosen.
    class_weight : None, "balanced" or dict
        Weight of the samples of each class; "balanced" gives every class that has weight the same
        total weight.
    criterion : "log_loss" or "squared_error"
        What the penalty, and all else that is automatic, is chosen by: the log-loss of the
        calibrated leave-one-out scores, or the squared error of the one-vs-rest targets. Fits in
        batches have the log-loss of the samples they keep for calibration. `IdentityHeads` and
        `LearnedHeads` are fitted by the squared error, whose gradient is exact, in either case:
        head distributions know nothing of classes.
    loss : "squared_error", "log_loss" or "auto"
        What the values minimise, beside the penalty: squared errors, in closed form; or the
        log-loss, by a few Newton steps (docs/explanation/logistic.md). The log-loss is the better
        one for rare classes, and takes a few times as long. Several classes are one-vs-rest
        problems, at one penalty. The penalty is chosen by approximate leave-one-out. "auto" is the
        squared error unless the log-loss is clearly better and affordable. With numbers as
        ``alpha``, with ``solver="cg"``, in batches and with ``criterion="squared_error"`` it is the
        squared error. With "log_loss" a device makes the Gram matrix and predicts, and the host
        makes the Newton steps.

    Attributes
    ----------
    classes_ : array (classes,)
        The labels of y, sorted. A class whose samples all have weight 0 keeps its place: its score
        is −1, its probability 0, and it is never predicted. All else is as without those samples.
    class_has_weight_ : bool array (classes,)
        Which classes have a sample of positive weight.
    loss_ : "squared_error" or "log_loss"
        What the values minimise.
    loo_error_ : float
        Leave-one-out mean squared error of the one-vs-rest targets at ``alpha_``; with the
        log-loss, of 2p − 1 with the probability p of each output. Where heads were learned it is
        that of the ``n_held_out_`` samples that neither heads nor values have seen.
    n_held_out_ : int
        Samples that were held out while heads were learned; 0 where none were learned.
    loo_decision_ : array (n,) or (n, classes)
        Leave-one-out decision function of the training samples; with the log-loss, approximately.
        Where heads were learned, NaN for samples that they were learned from.
    temperature_ : float
        The factor c that turns scores into probabilities.
    jackknife_errors_ : array (k, 1)
        One less the leave-one-out probability of the right label, of up to 2048 samples, in order.
    selection_ : Selection
        With ``criterion="log_loss"`` its scores are mean log-losses, each penalty's at the
        temperature that suits it.
    heads_ : head distribution
        ``heads``, or what was chosen or learned on the training set.
    tokens_ : TokenRule
        Scaling, query and pooling used.
    candidates_ : tuple of Candidate
        Every setting tried, with its leave-one-out loss; empty if there was nothing to choose.
    n_heads_ : int or math.inf
        Heads used; infinity for the exact kernel.
    alpha_ : float
        The penalty used.
    intercept_ : array (1,) or (classes,)
        b, an entry per one-vs-rest target.
    values_ : array (M, D), or (M, D, classes) for more than two classes
        v, for finite heads.
    dual_coef_ : array (n',) or (n', classes)
        For infinite heads, over the n' training samples that have weight.
    layer_ : FiniteLayer or KernelLayer
        What predicts.
    solver_ : str
        "primal", "dual", "kernel" or "cg".
    residual_ : float
        After "cg": a certificate; see `AttentionRegressor`.
    n_iter_ : int
        After "cg": iterations.
    n_features_in_ : int
        Token dimension d.
    n_query_features_in_ : int
        Dimension of the queries; 0 without.
    n_extras_in_ : int
        Number of sample-level features.

    See Also
    --------
    AttentionRegressor : The same layer for numbers; its page explains every parameter.
    NormBallClassifier : Logistic or hinge loss over a norm ball.

    Examples
    --------
    >>> import numpy as np
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(400, n_keys=5, dim=4, seed=0)
    >>> score = kh.targets.TokenPower(2, dim=4)(sets)
    >>> label = np.where(score > np.median(score), "wide", "narrow")
    >>> model = kh.AttentionClassifier(n_heads=100, random_state=0).fit(sets[:300], label[:300])
    >>> bool(model.score(sets[300:], label[300:]) > 0.8)
    True
    >>> model.predict_proba(sets[300:]).shape
    (100, 2)
    """

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **AttentionModel._parameter_constraints,
        "class_weight": [dict, StrOptions({"balanced"}), None],
        "criterion": [StrOptions({"squared_error", "log_loss"})],
        "loss": [StrOptions({"squared_error", "log_loss", "auto"})],
    }

    def __init__(
        self,
        n_heads: int | float | Literal["auto"] = "auto",
        heads: HeadDistribution | None = None,
        alpha: float | Sequence[float] | np.ndarray | Literal["loo"] = "loo",
        activation: Activation | Literal["auto"] = "auto",
        fit_intercept: bool = True,
        random_state: int | np.random.RandomState | np.random.Generator | None = None,
        *,
        dtype: Literal["float64", "float32"] | type | np.dtype = "float64",
        pooling: Literal["mean", "mean+size", "mean+statistics", "sum", "auto"] = "auto",
        scaling: Literal["none", "sphere", "standard", "auto"] = "auto",
        query: Literal["given", "mean", "each", "auto"] = "auto",
        keys: int | Literal["all", "auto"] = "auto",
        device: str | None = None,
        solver: Literal["auto", "direct", "cg"] = "auto",
        extras_scale: float | Literal["loo"] = "loo",
        class_weight: dict[Any, float] | Literal["balanced"] | None = None,
        criterion: Literal["log_loss", "squared_error"] = "log_loss",
        loss: Literal["squared_error", "log_loss", "auto"] = "auto",
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
        self.keys = keys
        self.device = device
        self.solver = solver
        self.extras_scale = extras_scale
        self.verbose = verbose
        self.class_weight = class_weight
        self.criterion = criterion
        self.loss = loss

    def _has_one_output(self) -> bool:
        return len(self.classes_) == 2

    def _training_outputs(
        self, y: Any, samples: Any, weights: np.ndarray | None
    ) -> Float[np.ndarray, "n t"]:
        self.classes_, labels = number_labels(self, y, samples)
        self.class_has_weight_ = classes_with_weight(self.classes_, labels, weights)
        self.single_output_ = len(self.classes_) == 2
        weighted = self._weighted_classes()
        return one_vs_rest(weighted.numbers(labels), weighted.count)

    def layer_spec(self, samples: Any) -> LayerSpec:
        """As for every model, with the loss that the values minimise."""
        spec = super().layer_spec(samples)
        if self.criterion == "log_loss":
            return replace(spec, loss=self.loss)
        if self.loss == "log_loss":
            raise ValueError(
                "loss='log_loss' has logits as scores, and squared errors of logits mean nothing: "
                "got criterion='squared_error'. Use criterion='log_loss', or loss='squared_error'."
            )
        return replace(spec, loss="squared_error")

    def _chosen_loss(self, model: Any) -> dict[str, Any]:
        return {"loss": model.loss_}

    def _store_fit(self, fitted: FittedLayer) -> None:
        super()._store_fit(fitted)
        self.loss_ = fitted.spec.loss

    def _weighted_classes(self) -> WeightedClasses:
        """The classes that the fit is about: all, unless samples of some have weight 0."""
        return WeightedClasses(self.class_has_weight_, first_of_two=-1.0)

    def _with_every_output(
        self, fitted: FittedLayer, data: TrainingSet
    ) -> tuple[FittedLayer, TrainingSet]:
        if self.class_has_weight_.all():
            return fitted, data
        # a class whose samples all have weight 0 had no output: it gets values 0 and the score −1
        weighted = self._weighted_classes()
        solved = replace(
            fitted.solved,
            layer=weighted.of_layer(fitted.layer),
            predictions=weighted.of_all_classes(fitted.predictions, SCORE_WITHOUT_WEIGHT),
        )
        outputs = weighted.of_all_classes(data.outputs, SCORE_WITHOUT_WEIGHT)
        return replace(fitted, solved=solved), replace(data, outputs=outputs)

    def _training_weights(self, y: Any, weights: np.ndarray | None) -> np.ndarray | None:
        check_target_given(self, y)
        return class_weights(self.class_weight, np.asarray(y), weights)

    def _store_left_out(self, fitted: FittedLayer, data: TrainingSet, labels: Any) -> None:
        self.intercept_ = fitted.layer.intercept
        scores = fitted.predictions
        if self.selection_.method == "loo":
            self.loo_decision_ = without_output_axis(scores, self._has_one_output())

        # the temperature, on every sample of a class with weight that was left out or held out
        labels = np.searchsorted(self.classes_, np.asarray(labels).ravel())
        numbers = self._weighted_classes().numbers(labels)
        has_scores = np.isfinite(scores).all(axis=1)
        of_weighted_class = numbers >= 0
        rows = np.flatnonzero(has_scores & of_weighted_class)
        weighted_scores = scores_per_class(scores[rows])[:, self.class_has_weight_]
        weights = None
        if data.weights is not None:
            weights = data.weights[rows]
        self.temperature_ = fit_temperature(weighted_scores, numbers[rows], weights)

        # one less the probability of the right label, for label sets without leave-one-out fits
        rows = fitted.solved.judged_rows()
        errors = self._calibration().label_errors(scores[rows], data.outputs[rows])
        self.jackknife_errors_ = some_errors(errors)

    def _calibration(self) -> Calibration:
        """What makes probabilities of scores."""
        has_weight = getattr(self, "class_has_weight_", None)
        return Calibration(self.temperature_, has_weight)

    @available_if(in_batches.can_fit_batches)
    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None
    ) -> AttentionClassifier:
        """Add samples to those seen so far.

        ``classes``, all labels there will be, is needed in the first call.

        As for `AttentionRegressor`. Probabilities are calibrated on the exact leave-one-out scores
        of some 2000 samples that are kept for it.
        """
        in_batches.take(self, X, y, sample_weight, classes)
        return self

    def decision_function(self, X: Any) -> Float[np.ndarray, "n ..."]:
        """Return scores: (n,) for two classes, positive for ``classes_[1]``.

        Otherwise (n, classes).
        """
        model = self._snapshot()
        outputs = model._layer_outputs(X)
        return without_output_axis(outputs, model._has_one_output())

    def predict(self, X: Any) -> np.ndarray:
        """Return the label with the highest score."""
        # a class without weight is never predicted
        model = self._snapshot()
        scores = scores_per_class(model.decision_function(X))
        scores = without_weightless(scores, getattr(model, "class_has_weight_", None))
        return np.asarray(model.classes_[scores.argmax(axis=1)])

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return probabilities, calibrated on the leave-one-out scores."""
        model = self._snapshot()
        outputs = model._layer_outputs(X)
        return model._calibration().probabilities(outputs)

    def predict_log_proba(self, X: Any) -> Float[np.ndarray, "n c"]:
        """Return the logarithms of `predict_proba`, without underflow."""
        model = self._snapshot()
        outputs = model._layer_outputs(X)
        return model._calibration().log_probabilities(outputs)

    def predict_set(self, X: Any, coverage: float = 0.9) -> Bool[np.ndarray, "n c"]:
        """Return which labels are plausible for each sample, by jackknife+.

        Let p_{−i} be the probabilities of the fit without sample i, at the temperature of the
        model. Label y is in the set of x if #{i : p_{−i}(x_i, y_i) > p_{−i}(x, y)} < c(n+1): few
        training samples have a higher probability of their own label than x has of y.

        Returns
        -------
        bool array (n, classes)
            In the order of ``classes_``. A set may be empty: then no label is as probable for x as
            their own label was for most of the training samples.

        Notes
        -----
        The guarantee is that of `AttentionRegressor.predict_interval`: for exchangeable samples, a
        share of at least 2c − 1 of new samples has its label in its set, and about c in practice.
        It holds over all labels together, not for each label. The temperature was fitted to all
        training samples, as penalty, scaling and heads were. With the log-loss the leave-one-out
        fits are approximate: one Newton step from the fit. Without leave-one-out fits the plain
        jackknife compares p(x, y) of the model with the leave-one-out p_{−i}(x_i, y_i), and a
        warning says so.

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
        model = self._snapshot()
        samples = model._prepared(X)
        if model.interval_method == "jackknife+":
            parts = model.training_.output_refits(model.layer_)
            return jackknife_plus_label_sets(
                parts,
                model.training_.targets(parts[0]),
                samples,
                coverage,
                model._calibration(),
                n_classes=len(model.classes_),
                memory_budget=memory_budget(),
            )

        # without leave-one-out fits: the probabilities of the model instead of p_{−i}(x, y)
        if model.interval_method == "jackknife":
            model._warn_of_plain_jackknife("sets")
        scores = model.layer_.predict(samples, memory_budget=memory_budget())
        probabilities = model._calibration().probabilities(scores)
        return plain_label_sets(probabilities, model.jackknife_errors_, coverage)
