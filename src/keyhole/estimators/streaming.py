"""`partial_fit`, `fit_batches` and `predict_batches`: the estimators on data that never is in memory as a whole."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import column_or_1d

from keyhole._checks import check_choice
from keyhole.attention.heads import GaussianHeads, HeadDraw
from keyhole.data.batches import Batch, as_batch, as_source
from keyhole.data.sets import POOLINGS, SetBatch, SetGroups
from keyhole.data.tokens import QUERIES, SCALINGS, TokenRule
from keyhole.estimators.base import memory_budget, outputs
from keyhole.estimators.inputs import (
    AUTO_HEADS,
    LayerPlan,
    as_columns,
    as_distribution,
    as_extras_scale,
    as_heads,
    as_penalties,
    as_samples,
    as_seed,
    as_weights,
    check_given,
    check_layer_options,
    check_lengths,
    choose_rule,
    class_weights,
)
from keyhole.estimators.states import change, twin_of
from keyhole.layer import FiniteLayer, LayerFit
from keyhole.ridge.calibration import class_scores, fit_temperature, labels_of
from keyhole.ridge.design import PrincipalAxes
from keyhole.ridge.problem import RidgeFit
from keyhole.streaming import (
    CheckedSamples,
    LayerRecipe,
    LayerSums,
    SumSizes,
    Yardstick,
    check_rows,
)

N_KEPT = 2048
"""Samples kept to calibrate probabilities and intervals on."""

N_PENDING = 1024
"""Samples of positive weight that what is automatic is settled on. Later ones are gathered until they
are as many, and added then: p² numbers are gone through at each addition, however few they are."""

SOLVED = (
    "layer_", "alpha_", "alphas_", "selection_", "solver_", "values_", "drawn_heads_", "intercept_", "temperature_",
    "loo_error_", "loo_errors_", "gcv_error_", "gcv_errors_", "holdout_error_", "holdout_errors_",
    "loo_predictions_", "loo_decision_", "residual_", "n_iter_", "log_loss_", "log_losses_", "left_out_errors_",
    "dual_coef_",
)  # fmt: skip
"""What follows from the sums; computed when first asked for."""

OF_A_WHOLE_FIT = ("_training", "_refits", "class_has_weight_")
"""What a fit to all samples at once keeps, for leave-one-out fits, and of classes whose samples all have weight 0."""

SETTLED = ("heads_", "tokens_", "n_heads_", "scaling_errors_")
"""What the first samples decide, and later ones keep."""

MAX_COLUMNS = 2048
"""Columns that ``n_heads="auto"`` makes in batches: matrices of that order are summed, and decomposed in seconds."""


@dataclass(frozen=True)
class SampleForm:
    """What all batches of a stream have in common; ``kind`` is None where it is not known."""

    kind: type | None
    pairs: tuple[tuple[int, int], ...] | None
    n_outputs: int
    single: bool

    @classmethod
    def of(cls, samples: CheckedSamples, *, single: bool) -> SampleForm:
        """The form of some samples; ``single`` says whether y has one axis."""
        return cls(
            kind=type(samples.sets),
            pairs=samples.sets.sets.pairs,
            n_outputs=samples.columns.shape[1],
            single=single,
        )

    def check(self, samples: CheckedSamples, *, single: bool) -> None:
        """Raise unless samples have this form."""
        if samples.columns.shape[1] != self.n_outputs or single != self.single:
            raise ValueError(
                f"every batch must have the outputs of the first: got {samples.columns.shape[1]} "
                f"for {self.n_outputs}, or y of another number of axes. Give y the shape it had."
            )
        if self.kind is None:
            return
        if type(samples.sets) is not self.kind:
            raise ValueError(
                "every batch must be of the kind of the first: got "
                f"{type(samples.sets).__name__} for {self.kind.__name__}. SetGroups(batch, "
                "np.ones(len(batch), int)) makes samples of one set each."
            )
        pairs = samples.sets.sets.pairs
        if pairs != self.pairs:
            raise ValueError(
                "every batch must pair the coordinates of query and key that the first paired: got "
                f"pairs={pairs} for {self.pairs}. Read all batches in the same way, or pass the same "
                "`pairs` to SetBatch."
            )


@dataclass(frozen=True)
class Stream:
    """All that a fit in batches knows of its samples; adding some makes another stream.

    How samples become features, ``recipe``, is settled on the first `N_PENDING` samples, or on fewer
    if values are asked for before that, and stays. Until then ``plan`` says what is asked for, and
    ``trial`` is a recipe that the choice will try on the samples.

    Nothing in a stream is ever written into: a model that fails to add samples still has the stream
    that it had, and copies of a model may share one.
    """

    form: SampleForm
    plan: LayerPlan | None
    trial: LayerRecipe | None = None
    recipe: LayerRecipe | None = None
    sums: LayerSums | None = None
    pending: tuple[CheckedSamples, ...] = ()
    sizes: SumSizes = field(default_factory=SumSizes)
    """Of the sums, and of what is pending as far as it was computed."""
    yardstick: Yardstick = field(default_factory=Yardstick)

    @property
    def n_pending(self) -> int:
        """Samples that wait to be added."""
        return sum(len(samples) for samples in self.pending)

    def put(self, samples: CheckedSamples) -> Stream:
        """The stream with more samples pending. Raise if they could never be added.

        They are looked at now and not when enough are there, so that the batch that is at fault is
        refused and no other. CheckedSamples of weight zero are left out.
        """
        samples = samples.of_positive_weight()
        if len(samples) == 0:
            return self
        if len(samples) >= N_PENDING:
            # it will be added right away, block by block: it fails then, if it does
            return replace(self, pending=(*self.pending, samples))

        yardstick = self.yardstick
        if self.recipe is not None:
            sizes, yardstick = self.recipe.check_addable(samples, self.sizes, yardstick)
        elif self.trial is not None:
            bare = replace(samples, sets=samples.sets.with_extras(None))
            sizes, yardstick = self.trial.check_addable(bare, self.sizes, yardstick)
        else:
            no_features = np.zeros((len(samples), 0))
            sizes = check_rows(no_features, samples, self.sizes)

        # a copy: whoever makes batches may use their memory again
        return replace(
            self, pending=(*self.pending, samples.copy()), sizes=sizes, yardstick=yardstick
        )

    def first_samples(self) -> CheckedSamples:
        """Pending samples, at most `N_PENDING`: what is automatic is settled on them."""
        return CheckedSamples.joined(self.pending)[:N_PENDING]

    def with_recipe(self, recipe: LayerRecipe, sums: LayerSums) -> Stream:
        """The stream with samples made into features otherwise: what was learned of sizes is void."""
        return replace(
            self,
            trial=None,
            recipe=recipe,
            sums=sums,
            sizes=SumSizes.of_moments(sums.moments),
            yardstick=Yardstick(),
        )

    def flushed(self) -> Stream:
        """The stream with all that is pending added to the sums."""
        if not self.pending:
            return self
        assert self.recipe is not None
        assert self.sums is not None
        joint = CheckedSamples.joined(self.pending)
        sums = self.recipe.add(self.sums, joint.sets, joint.columns, joint.weights)
        return replace(self, sums=sums, pending=(), sizes=SumSizes.of_moments(sums.moments))


def gathered(batches: Iterable[CheckedSamples]) -> Iterator[CheckedSamples]:
    """Batches of at least N_PENDING samples, but for the last."""
    parts: list[CheckedSamples] = []
    count = 0
    for samples in batches:
        count += len(samples)
        if count >= N_PENDING:
            yield CheckedSamples.joined([*parts, samples])
            parts = []
            count = 0
        else:
            # a copy: whoever makes batches may use their memory again
            parts.append(samples.copy())
    if parts:
        yield CheckedSamples.joined(parts)


def refusal(model: Any) -> str | None:
    """Why an estimator cannot be fitted in batches, and what to do about it; None if it can."""
    whole = "needs the whole training set at once, and batches never are."
    if isinstance(model.n_heads, float) and math.isinf(model.n_heads):
        reason = f"n_heads=math.inf, the exact kernel, {whole} Use a finite number of heads"
    elif hasattr(model.heads, "fit"):
        reason = f"heads={model.distribution!r} {whole} Fit it on a part of the data first and pass what it became, heads=model.heads_"
    elif model.solver == "cg":
        reason = f"solver='cg' {whole} Leave it at solver='auto'"
    elif model.device not in (None, "auto"):
        reason = f"device={model.device!r} {whole} They are summed by NumPy. Leave `device` out"
    else:
        return None
    return f"{reason}, or use fit."


def _batches_allowed(model: Any) -> bool:
    return refusal(model) is None


class _Streamed:
    """What regression and classification share of fitting in batches.

    Methods that change a model work on a twin of it, a draft: see `keyhole.estimators.states.change`.
    Methods that only read take a `_snapshot` first, so that all they read belongs together.
    """

    layer_: Any
    n_samples_seen_: int
    _stream: Stream

    def fit_batches(self, batches: Any, *, classes: Any = None, selection: str = "auto") -> Any:
        """Fit from batches that are read one at a time.

        Parameters
        ----------
        batches : iterable, or path
            Gives (X, y) or (X, y, sample_weight), each as ``fit`` takes them: a list, a generator, a
            `keyhole.data.ParquetSets`; or the path of a Parquet or Arrow file with columns keys, y and, if
            there are queries, query.
        classes : array, optional
            For a classifier: all labels. Found by reading them first if ``batches`` can be gone through twice.
        selection : "auto", "loo" or "gcv"
            How the penalty is chosen: by exact leave-one-out, which takes another pass over ``batches`` and twice
            the arithmetic of the first; or by exact generalised cross-validation, from the sums alone. "auto" is
            "loo" if ``batches`` can be gone through twice (an iterator, such as a generator, cannot).

        Returns
        -------
        self
            ``selection_`` says which it was: ``loo_error_``, or ``gcv_error_``. Copies of a sample count as
            samples of their own. If anything fails, the model is what it was before.
        """
        source = as_source(batches)
        again = iter(source) is not source
        check_choice(selection, "selection", ("auto", "loo", "gcv"))
        if selection == "loo" and not again:
            raise ValueError(
                "selection='loo' goes through the batches twice, and an iterator such as a generator can be gone "
                "through once. Pass a list or a ParquetSets, or use selection='gcv'."
            )

        # the sums, in a model of their own
        draft = twin_of(self)
        forget_stream(draft)
        draft._begin_classes(source, classes, again)
        for item in source:
            draft._add(as_batch(item))
        if "_stream" not in vars(draft):
            raise ValueError(
                "`batches` must give at least one batch: got none. Was the iterator used up already?"
            )

        # the values, which take another pass for leave-one-out
        error_sums = None
        if again and selection != "gcv":
            error_sums = partial(draft._error_sums, source)
        draft._solve_stream(error_sums)
        adopt(self, draft)
        return self

    def predict_batches(self, batches: Iterable[Any]) -> Iterator[np.ndarray]:
        """Yield the predictions of each batch in turn: of sets alone, or of (X, y) whose y is not looked at."""
        for item in as_source(batches):
            yield self.predict(as_batch(item).sets)

    def _add(self, batch: Batch) -> None:
        """Check a batch and add it to the stream, which the first one opens. To be called on a draft."""
        first = "_stream" not in vars(self)
        if first and "n_samples_seen_" in vars(self):
            raise ValueError(
                f"this model was saved with keep='predict': the sums over its {self.n_samples_seen_} samples are not "
                "in the file, so that none can be added to them. Load a file saved with keep='all', or start over with "
                "fit or fit_batches."
            )
        if first and "layer_" in vars(self):
            warnings.warn(
                "partial_fit starts over: fit keeps no sums that samples could be added to. Use fit_batches for the "
                "first samples to add to them later.",
                stacklevel=3,
            )
        if first:
            forget_stream(self)
        samples, single = self._checked(batch, first=first)
        if first:
            self._open(samples, single)
        else:
            self._stream.form.check(samples, single=single)

        # what was solved for, and what every solve makes anew, is that of fewer samples
        for name in SOLVED:
            vars(self).pop(name, None)
        if self.n_extras_in_:
            vars(self).pop("tokens_", None)

        self._stream = self._stream.put(samples)
        if self._stream.n_pending >= N_PENDING:
            self._flush()
        self.n_samples_seen_ = vars(self).get("n_samples_seen_", 0) + len(samples)

    def _open(self, samples: CheckedSamples, single: bool) -> None:
        """Begin a stream for samples like these. To be called on a draft."""
        plan = _plan(self, samples.sets.dim)
        if self.query != "auto":
            samples.sets.check_query_rule(self.query)
        self._stream = Stream(
            form=SampleForm.of(samples, single=single),
            plan=plan,
            trial=_trial_recipe(self, plan, samples),
        )

    def _flush(self) -> None:
        """Add all that is pending; the first time, settle what is automatic. To be called on a draft."""
        stream = self._stream
        if stream.recipe is None and stream.pending:
            assert stream.plan is not None
            recipe = self._settle(stream.plan, stream.first_samples())
            stream = stream.with_recipe(recipe, recipe.empty())
        self._stream = stream.flushed()

    def _settle(self, plan: LayerPlan, samples: CheckedSamples) -> LayerRecipe:
        """Choose on the first samples what is automatic, and keep it. To be called on a draft."""
        plan = replace(plan, options={**plan.options, "weights": samples.weights})
        choice = choose_rule(
            batch=samples.sets,
            columns=samples.columns,
            plan=plan,
            scaling=self.scaling,
            query=self.query,
            pooling=self.pooling,
        )
        assert plan.n_heads is not None
        heads = HeadDraw(
            choice.distribution,
            plan.n_heads,
            samples.sets.dim,
            plan.seed,
            choice.rule.query_dim(samples.sets),
        )
        self.heads_ = choice.distribution
        self.tokens_ = choice.rule
        self.n_heads_: float = heads.n_heads
        self.scaling_errors_ = choice.tried
        return _recipe(
            plan,
            heads,
            choice.rule,
            n_outputs=samples.columns.shape[1],
            n_kept=N_KEPT,
            n_extras=self.n_extras_in_,
        )

    def _solve_stream(
        self, error_sums: Callable[[PrincipalAxes, np.ndarray], np.ndarray] | None = None
    ) -> None:
        """The values from the sums, at the penalty that the criterion prefers. To be called on a draft.

        By leave-one-out if ``error_sums`` can tell its squared errors; the log-loss is that of the samples kept.
        """
        self._flush()
        stream = self._stream
        if stream.recipe is None or stream.sums is None:
            raise ValueError(
                "a fit needs one sample of positive weight, and two to choose a penalty: got 0. Give "
                "more batches, or one fixed number as `alpha`."
            )

        # extras are standardised among the sums; with their scale the rule for tokens is known
        scale = as_extras_scale(self.extras_scale)
        recipe, moments, axes = stream.recipe.settle(stream.sums.moments, scale)
        sums = LayerSums(moments=moments, kept=stream.sums.kept)
        if recipe is not stream.recipe:
            self._stream = stream.with_recipe(recipe, sums)
        self.tokens_ = recipe.rule

        # the penalty, and the values at it
        penalties = as_penalties(self.alpha)
        alphas = axes.default_alphas() if penalties is None else penalties
        errors = None if error_sums is None else error_sums(axes, alphas)
        kept = None
        if getattr(self, "criterion", "squared_error") == "log_loss":
            kept = sums.kept
        self._finish(recipe.fit(axes, alphas, errors, kept), axes)

    def _error_sums(
        self, source: Iterable[Any], axes: PrincipalAxes, alphas: np.ndarray
    ) -> np.ndarray:
        """Sums of squared leave-one-out errors, by another pass over the batches."""
        recipe = self._stream.recipe
        assert recipe is not None
        sums = np.zeros((len(alphas), self._stream.form.n_outputs))
        count = 0
        for samples in gathered(self._checked(as_batch(item), first=False)[0] for item in source):
            sums += recipe.error_sums(axes, alphas, samples.sets, samples.columns, samples.weights)
            count += len(samples)
        check_second_pass(self.n_samples_seen_, count)
        return sums

    def _finish(self, fit: LayerFit, axes: PrincipalAxes) -> None:
        """Store what a fit from sums found. To be called on a draft."""
        assert isinstance(fit.layer, FiniteLayer)
        ridge = fit.ridge
        self.layer_ = fit.layer
        self.alpha_ = ridge.alpha
        self.alphas_ = ridge.alphas
        self.selection_ = ridge.selection
        setattr(self, f"{ridge.selection}_errors_", ridge.errors)
        setattr(self, f"{ridge.selection}_error_", ridge.error)
        store_log_losses(self, ridge)
        self.solver_ = fit.route
        self.drawn_heads_ = fit.layer.heads
        self.values_ = outputs(fit.layer.values, self._stream.form.single)
        self._finish_outputs(fit, axes)

    def _ensure_settled(self) -> None:
        """Settle what is automatic on the samples so far, if that was not done."""
        with change(self) as draft:
            if "heads_" not in vars(draft):
                draft._flush()

    def _ensure_solved(self) -> Any:
        """Solve for the values if samples came since the last time: one thread does, others wait for it.

        Returns
        -------
        A twin of the model right then: samples may have come before the caller looks at the model.
        """
        with change(self) as draft:
            if "_stream" in vars(draft) and "layer_" not in vars(draft):
                draft._solve_stream()
        return draft

    def _snapshot(self) -> Any:
        """The model with its values, as it is now: what comes later does not show in it.

        The model itself unless samples are added to it. Sums are not part of a snapshot.
        """
        if "_stream" not in vars(self):
            return self
        model = twin_of(self)
        if "layer_" not in vars(model):
            model = self._ensure_solved()
        vars(model).pop("_stream", None)
        return model

    def __getattr__(self, name: str) -> Any:
        if name == "partial_fit":
            raise AttributeError(refusal(self))
        if name in (*SOLVED, *SETTLED) and "_stream" in vars(self):
            if name in SOLVED or (name == "tokens_" and self.n_extras_in_):
                state = vars(self._ensure_solved())
            else:
                self._ensure_settled()
                state = vars(self)
            if name in state:
                return state[name]
            if name.startswith("loo_"):
                raise AttributeError(
                    f"{name!r} takes another pass over the data, and this fit had one: it has gcv_error_, exact "
                    "generalised cross-validation. fit_batches on a list or a ParquetSets passes twice."
                )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _begin_classes(self, source: Any, classes: Any, again: bool) -> None:
        if classes is not None:
            raise ValueError(
                "`classes` is for classifiers: this is a regressor, whose y are numbers."
            )


class StreamedRegressor(_Streamed):
    """Regression in batches."""

    @available_if(_batches_allowed)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Add samples to those seen so far; the same fit as on all of them at once.

        The values are solved for when they are first asked for, so that many calls cost little more than one.
        The penalty is chosen by exact generalised cross-validation (``gcv_error_``): leave-one-out takes another
        pass over the data, which `fit_batches` makes.

        A batch is added whole or, if it is refused or the call is interrupted, not at all. Threads may
        add and predict at the same time: a prediction is that of the samples of one moment.
        """
        with change(self) as draft:
            draft._add(Batch(X, y, sample_weight))
        return self

    def _checked(self, batch: Batch, *, first: bool) -> tuple[CheckedSamples, bool]:
        sets = as_samples(self, batch.sets, reset=first).numpy()
        columns = as_columns(self, batch.y, sets)
        weights = _batch_weights(batch.weights, sets)
        samples = CheckedSamples(sets=sets, columns=columns, weights=weights)
        return samples, np.asarray(batch.y).ndim == 1

    def _finish_outputs(self, fit: LayerFit, axes: PrincipalAxes) -> None:
        stream = self._stream
        assert stream.recipe is not None
        assert stream.sums is not None
        self._single = stream.form.single
        self.intercept_ = float(fit.layer.intercept[0]) if self._single else fit.layer.intercept
        kept = stream.sums.kept
        if kept.sets is not None:
            predictions = stream.recipe.left_out(axes, kept, fit.ridge.alpha)
            self._keep_errors(np.abs(kept.columns - predictions))


class StreamedClassifier(_Streamed):
    """Classification in batches."""

    @available_if(_batches_allowed)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Any:
        """Add samples to those seen so far; ``classes``, all labels there will be, is needed in the first call.

        As for `AttentionRegressor`. Probabilities are calibrated on the exact leave-one-out scores of some 2000
        samples that are kept for it.
        """
        with change(self) as draft:
            draft._take_classes(classes)
            draft._add(Batch(X, y, sample_weight))
        return self

    def _take_classes(self, classes: Any) -> None:
        """The labels of a stream that begins, or a check that they are still the same."""
        if "_stream" not in vars(self):
            if classes is None and "layer_" in vars(self):
                classes = self.classes_
            if classes is None:
                raise ValueError(
                    "classes must be passed on the first call to partial_fit: all labels there will be."
                )
            self._set_classes(classes)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"`classes` must be the same in every call: got {np.unique(classes)}, it was {self.classes_}. Labels "
                "cannot be added later."
            )

    def _begin_classes(self, source: Any, classes: Any, again: bool) -> None:
        if classes is None:
            if not again:
                raise ValueError(
                    "`classes` must be given with batches that can be gone through only once: all labels there will be."
                )
            find = getattr(source, "labels", None)
            labels = [np.unique(as_batch(item).y) for item in source] if find is None else [find()]
            classes = np.concatenate(labels)
        self._set_classes(classes)

    def _set_classes(self, classes: Any) -> None:
        self.classes_ = np.unique(column_or_1d(classes))
        if len(self.classes_) < 2:
            raise ValueError(
                f"`classes` must hold at least two labels: got {len(self.classes_)} class(es)."
            )

    def _checked(self, batch: Batch, *, first: bool) -> tuple[CheckedSamples, bool]:
        sets = as_samples(self, batch.sets, reset=first).numpy()
        check_given(self, batch.y)
        labels = column_or_1d(batch.y, warn=True)
        check_lengths(sets, labels, "y")
        unknown = ~np.isin(labels, self.classes_)
        if unknown.any():
            raise ValueError(
                f"every label must be one of `classes`, {self.classes_}: sample {int(np.flatnonzero(unknown)[0])} of "
                f"this batch has {str(labels[unknown][0])!r}."
            )
        if isinstance(self.class_weight, str):
            raise ValueError(
                f"class_weight={self.class_weight!r} needs the whole training set: pass a dict of weights to fit in "
                "batches."
            )
        weights = class_weights(self.class_weight, labels, _batch_weights(batch.weights, sets))
        columns = np.where(labels[:, None] == self.classes_, 1.0, -1.0)
        single = len(self.classes_) == 2
        if single:
            columns = columns[:, 1:]
        return CheckedSamples(sets=sets, columns=columns, weights=weights), single

    def _finish_outputs(self, fit: LayerFit, axes: PrincipalAxes) -> None:
        stream = self._stream
        assert stream.recipe is not None
        assert stream.sums is not None
        self.intercept_ = fit.layer.intercept
        kept = stream.sums.kept
        scores = stream.recipe.left_out(axes, kept, fit.ridge.alpha)
        self.temperature_ = fit_temperature(
            class_scores(scores), labels_of(kept.columns), kept.weights
        )
        self._keep_label_errors(scores, kept.columns)


def resume_stream(model: Any, sums: LayerSums, *, single: bool) -> None:
    """Go on from sums that were saved, of a model whose layer was solved from them."""
    layer = model.layer_
    recipe = LayerRecipe(
        heads=layer.heads,
        rule=model.tokens_,
        n_outputs=len(layer.intercept),
        n_kept=sums.kept.limit,
        activation=layer.activation,
        dtype=layer.dtype,
        fit_intercept=sums.moments.fit_intercept,  # that of the fit, whatever the parameter is now
        memory_budget=memory_budget(),
        n_extras=model.n_extras_in_,
    )
    kept = sums.kept.sets
    form = SampleForm(
        kind=None if kept is None else type(kept),
        pairs=None if kept is None else kept.sets.pairs,
        n_outputs=recipe.n_outputs,
        single=single,
    )
    model._stream = Stream(form=form, plan=None).with_recipe(recipe, sums)


def store_log_losses(model: Any, ridge: RidgeFit) -> None:
    """What a classifier that chooses by the log-loss chose by."""
    if ridge.log_losses is not None:
        model.log_losses_, model.log_loss_ = ridge.log_losses, float(ridge.log_losses[ridge.best])


def forget_stream(model: Any) -> None:
    """Start over: drop the sums, and everything that was solved from them."""
    for name in ("_stream", "n_samples_seen_", *OF_A_WHOLE_FIT, *SETTLED, *SOLVED):
        model.__dict__.pop(name, None)


def adopt(model: Any, draft: Any) -> None:
    """Make a model what a draft of it has become, in the place of any fit before."""
    with change(model) as current:
        forget_stream(current)
        vars(current).update(vars(draft))


def solved_twin(model: Any) -> Any:
    """A twin with everything solved for and with its sums, all of one moment: what a file holds."""
    if "_stream" not in vars(model):
        return model
    return model._ensure_solved()


def check_second_pass(first: int, second: int) -> None:
    """Raise unless both passes over the batches gave as many samples."""
    if first != second:
        raise ValueError(
            "`batches` must give the same samples every time they are gone through: got "
            f"{first} the first time and {second} the second. Use selection='gcv', which needs "
            "one pass."
        )


def _batch_weights(sample_weight: Any, sets: SetBatch | SetGroups) -> np.ndarray | None:
    """Checked weights; unlike those of a whole training set, those of a batch may all be zero."""
    if (
        sample_weight is not None
        and np.size(sample_weight) == len(sets)
        and not np.any(sample_weight)
    ):
        return np.zeros(len(sets))
    return as_weights(sample_weight, sets)


def _recipe(
    plan: LayerPlan,
    heads: HeadDraw,
    rule: TokenRule,
    *,
    n_outputs: int,
    n_kept: int = 0,
    n_extras: int = 0,
) -> LayerRecipe:
    """The recipe of a plan whose heads and rule for tokens are known."""
    return LayerRecipe(
        heads=heads,
        rule=rule,
        n_outputs=n_outputs,
        n_kept=n_kept,
        activation=plan.options["activation"],
        dtype=plan.options["dtype"],
        fit_intercept=plan.options["fit_intercept"],
        memory_budget=plan.options["memory_budget"],
        n_extras=n_extras,
    )


def _trial_recipe(model: Any, plan: LayerPlan, samples: CheckedSamples) -> LayerRecipe | None:
    """Features of tokens as they are, which must be finite wherever ``scaling`` may leave them so.

    None where tokens will be scaled in any case: what the scale is, all of the first samples decide.
    """
    if model.scaling not in ("none", "auto"):
        return None
    distribution = GaussianHeads() if plan.distribution is None else plan.distribution
    query = "given" if model.query == "auto" else model.query
    rule = TokenRule("none", query, model.pooling).with_hops_of(distribution)
    assert plan.n_heads is not None
    heads = HeadDraw(
        distribution, plan.n_heads, samples.sets.dim, plan.seed, rule.query_dim(samples.sets)
    )
    return _recipe(plan, heads, rule, n_outputs=samples.columns.shape[1])


def _plan(model: Any, dim: int) -> LayerPlan:
    """The plan of an estimator, if it is one that batches allow."""
    activation, dtype = check_layer_options(model.activation, model.dtype)
    check_choice(model.scaling, "scaling", (*SCALINGS, "auto"))
    check_choice(model.query, "query", (*QUERIES, "auto"))
    check_choice(model.pooling, "pooling", POOLINGS)
    distribution = None if model.heads is None else as_distribution(model.heads)
    auto = isinstance(model.n_heads, str) and model.n_heads == "auto"
    n_heads = max(1, min(AUTO_HEADS, MAX_COLUMNS // (dim + 1))) if auto else as_heads(model.n_heads)
    reason = refusal(model)
    if reason is not None or n_heads is None:
        raise ValueError(reason)
    # four p × p matrices: the sums, and their eigendecomposition
    n_columns = n_heads * (dim + 1)
    needed = 4 * 8 * n_columns**2
    memory = (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if hasattr(os, "sysconf")
        else needed
    )
    if needed > memory:
        raise MemoryError(
            f"fitting in batches takes four p × p matrices with p = M·D: {n_columns} columns make "
            f"{needed / 2**30:.0f} GiB, this machine has {memory / 2**30:.0f} GiB. Use fewer heads, or fit with "
            "solver='cg'."
        )
    options: dict[str, Any] = {
        "activation": activation,
        "fit_intercept": bool(model.fit_intercept),
        "weights": None,
        "groups": None,
        "dtype": dtype,
        "device": None,
        "solver": "direct",
        "criterion": getattr(model, "criterion", "squared_error"),
        "memory_budget": memory_budget(),
    }
    return LayerPlan(n_heads, distribution, None, as_seed(model.random_state), options)
