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
from keyhole.attention.heads import HeadDraw
from keyhole.data.batches import Batch, as_batch, as_source
from keyhole.data.sets import POOLINGS, SetBatch, SetGroups, concatenate
from keyhole.data.tokens import QUERIES, SCALINGS
from keyhole.estimators.base import memory_budget, outputs
from keyhole.estimators.inputs import (
    AUTO_HEADS,
    LayerPlan,
    as_columns,
    as_extras_scale,
    as_heads,
    as_law,
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
from keyhole.layer import LayerFit
from keyhole.ridge.calibration import class_scores, fit_temperature, labels_of
from keyhole.ridge.design import PrincipalAxes
from keyhole.ridge.problem import RidgeFit
from keyhole.streaming import LayerRecipe, LayerSums

N_KEPT = 2048
"""Samples kept to calibrate probabilities and intervals on."""

N_PENDING = 1024
"""Samples gathered before they are added: p² numbers are gone through at each addition, however few they are."""

SOLVED = (
    "layer_", "alpha_", "alphas_", "selection_", "solver_", "values_", "heads_", "intercept_", "temperature_",
    "loo_error_", "loo_errors_", "gcv_error_", "gcv_errors_", "holdout_error_", "holdout_errors_",
    "loo_predictions_", "loo_decision_", "residual_", "n_iter_", "log_loss_", "log_losses_", "left_out_errors_",
)  # fmt: skip
"""What follows from the sums; computed when first asked for."""

OF_A_WHOLE_FIT = ("_training", "_refits", "class_has_weight_")
"""What a fit to all samples at once keeps, for leave-one-out fits, and of classes whose samples all have weight 0."""

SETTLED = ("law_", "tokens_", "n_heads_", "scaling_errors_")
"""What the first samples decide, and later ones keep."""

MAX_COLUMNS = 2048
"""Columns that ``n_heads="auto"`` makes in batches: matrices of that order are summed, and decomposed in seconds."""

Checked = tuple[SetBatch | SetGroups, np.ndarray, np.ndarray | None]


@dataclass
class PendingBatches:
    """Batches gathered until they hold N_PENDING samples; copies, because whoever makes them may reuse their memory."""

    parts: list[Checked] = field(default_factory=list)

    def put(self, samples: Checked) -> list[Checked]:
        """Take a batch; return all so far as one if they are enough, and nothing otherwise."""
        sets, columns, weights = samples
        if len(columns) + sum(len(part[1]) for part in self.parts) >= N_PENDING:
            self.parts.append(samples)
            return self.flush()
        self.parts.append((sets[np.arange(len(sets))], columns.copy(), None if weights is None else weights.copy()))
        return []

    def flush(self) -> list[Checked]:
        """All that is pending as one batch, if there is any."""
        parts, self.parts = self.parts, []
        if len(parts) < 2:
            return parts
        sets, columns, weights = zip(*parts, strict=True)
        joint = None
        if any(w is not None for w in weights):
            joint = np.concatenate([np.ones(len(c)) if w is None else w for c, w in zip(columns, weights, strict=True)])
        return [(concatenate(sets), np.concatenate(columns), joint)]


@dataclass
class Stream:
    """Sums so far, samples not yet added to them, and whether the values have been solved for since.

    How samples become features is settled, by ``settle``, on the first `N_PENDING` samples or on fewer if values are
    asked for before that, and stays.
    """

    settle: Callable[[Checked], LayerRecipe]
    n_outputs: int
    single: bool
    recipe: Any = None
    sums: Any = None
    pending: PendingBatches = field(default_factory=PendingBatches)
    solved: bool = False

    def put(self, samples: Checked) -> None:
        """Add samples, or hold them until there are enough."""
        self.solved = False
        self._add(self.pending.put(samples))

    def flush(self) -> None:
        """Add what is pending."""
        self._add(self.pending.flush())

    def _add(self, batches: list[Checked]) -> None:
        for samples in batches:
            if self.recipe is None:
                self.recipe = self.settle(samples)
                self.sums = self.recipe.empty()
            self.recipe.add(self.sums, *samples)


def gathered(batches: Iterable[Checked]) -> Iterator[Checked]:
    """Batches of at least N_PENDING samples, but for the last."""
    pending = PendingBatches()
    for batch in batches:
        yield from pending.put(batch)
    yield from pending.flush()


def refusal(model: Any) -> str | None:
    """Why an estimator cannot be fitted in batches, and what to do about it; None if it can."""
    whole = "needs the whole training set at once, and batches never are."
    if isinstance(model.n_heads, float) and math.isinf(model.n_heads):
        reason = f"n_heads=math.inf, the exact kernel, {whole} Use a finite number of heads"
    elif hasattr(model.law, "fit"):
        reason = f"law={model.law!r} {whole} Fit it on a part of the data first and pass what it became, law=model.law_"
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
    """What regression and classification share of fitting in batches."""

    layer_: Any
    n_samples_seen_: int

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
            samples of their own.
        """
        source = as_source(batches)
        again = iter(source) is not source
        check_choice(selection, "selection", ("auto", "loo", "gcv"))
        if selection == "loo" and not again:
            raise ValueError(
                "selection='loo' goes through the batches twice, and an iterator such as a generator can be gone "
                "through once. Pass a list or a ParquetSets, or use selection='gcv'."
            )
        forget_stream(self)
        self._begin_classes(source, classes, again)
        for item in source:
            self._take(as_batch(item))
        stream = self.__dict__.get("_stream")
        if stream is None:
            raise ValueError("`batches` must give at least one batch: got none. Was the iterator used up already?")
        stream.flush()
        self._solve_stream(partial(self._error_sums, source) if again and selection != "gcv" else None)
        return self

    def predict_batches(self, batches: Iterable[Any]) -> Iterator[np.ndarray]:
        """Yield the predictions of each batch in turn: of sets alone, or of (X, y) whose y is not looked at."""
        for item in as_source(batches):
            yield self.predict(as_batch(item).sets)

    def _take(self, batch: Batch) -> None:
        """Check a batch and put it on the stream, which the first one opens."""
        first = "_stream" not in self.__dict__
        if first and "n_samples_seen_" in self.__dict__:
            raise ValueError(
                f"this model was saved with keep='predict': the sums over its {self.n_samples_seen_} samples are not "
                "in the file, so that none can be added to them. Load a file saved with keep='all', or start over with "
                "fit or fit_batches."
            )
        if first and "layer_" in self.__dict__:
            warnings.warn(
                "partial_fit starts over: fit keeps no sums that samples could be added to. Use fit_batches for the "
                "first samples to add to them later.",
                stacklevel=3,
            )
        samples, single = self._checked(batch, first=first)
        if first:
            self._open(samples, single)
        elif samples[1].shape[1] != self._stream.n_outputs or single != self._stream.single:
            raise ValueError(
                f"every batch must have the outputs of the first: got {samples[1].shape[1]} for "
                f"{self._stream.n_outputs}, or y of another number of axes."
            )
        for name in (*SOLVED, *OF_A_WHOLE_FIT):
            self.__dict__.pop(name, None)
        self._stream.put(samples)
        self.n_samples_seen_ = getattr(self, "n_samples_seen_", 0) + len(samples[1])

    def _open(self, samples: Checked, single: bool) -> None:
        """Begin a stream for samples like these."""
        plan = _plan(self, samples[0].dim)
        self._stream = Stream(partial(self._settle, plan), samples[1].shape[1], single)

    def _settle(self, plan: LayerPlan, samples: Checked) -> LayerRecipe:
        """Choose on the first samples what is automatic, and keep it."""
        sets, columns, weights = samples
        heard = weights if weights is not None and weights.any() else None
        plan = replace(plan, options={**plan.options, "weights": heard})
        pooling = check_choice(self.pooling, "pooling", POOLINGS)
        scaling, query = self.scaling, self.query
        choice = choose_rule(sets, columns, plan, scaling, query, pooling)
        assert plan.n_heads is not None
        heads = HeadDraw(choice.law, plan.n_heads, sets.dim, plan.seed, choice.rule.query_dim(sets))
        self.law_, self.tokens_ = choice.law, choice.rule
        self.n_heads_: float = heads.n_heads
        self.scaling_errors_ = choice.tried
        given = plan.options
        options = given["activation"], given["dtype"], given["fit_intercept"], given["memory_budget"], self.n_extras_in_
        return LayerRecipe(heads, choice.rule, columns.shape[1], N_KEPT, *options)

    def _solve_stream(self, error_sums: Callable[[PrincipalAxes, np.ndarray], np.ndarray] | None = None) -> None:
        """The values from the sums, at the penalty that the criterion prefers.

        By leave-one-out if ``error_sums`` can tell its squared errors; the log-loss is that of the samples kept.
        """
        stream: Stream = self._stream
        stream.flush()
        # extras are standardised among the sums; with their scale the rule for tokens is known
        stream.recipe, axes = stream.recipe.settle(stream.sums.moments, as_extras_scale(self.extras_scale))
        self.tokens_ = stream.recipe.rule
        penalties = as_penalties(self.alpha)
        alphas = axes.default_alphas() if penalties is None else penalties
        errors = None if error_sums is None else error_sums(axes, alphas)
        kept = stream.sums.kept if getattr(self, "criterion", "squared_error") == "log_loss" else None
        self._finish(stream.recipe.fit(axes, alphas, errors, kept), axes)

    def _error_sums(self, source: Iterable[Any], axes: PrincipalAxes, alphas: np.ndarray) -> np.ndarray:
        """Sums of squared leave-one-out errors, by another pass over the batches."""
        sums, count = np.zeros((len(alphas), self._stream.n_outputs)), 0
        for samples in gathered(self._checked(as_batch(item), first=False)[0] for item in source):
            sums += self._stream.recipe.error_sums(axes, alphas, *samples)
            count += len(samples[1])
        if count != self.n_samples_seen_:
            raise ValueError(
                "`batches` must give the same samples every time they are gone through: got "
                f"{self.n_samples_seen_} the first time and {count} the second. Use selection='gcv', which needs "
                "one pass."
            )
        return sums

    def _finish(self, fit: LayerFit, axes: PrincipalAxes) -> None:
        """Store what a fit from sums found."""
        stream: Stream = self._stream
        stream.solved = True
        self.layer_, ridge = fit.layer, fit.ridge
        self.alpha_, self.alphas_, self.selection_ = ridge.alpha, ridge.alphas, ridge.selection
        setattr(self, f"{ridge.selection}_errors_", ridge.errors)
        setattr(self, f"{ridge.selection}_error_", ridge.error)
        store_log_losses(self, ridge)
        self.solver_, self.heads_ = fit.route, self.layer_.heads
        self.values_ = outputs(self.layer_.values, stream.single)
        self._finish_outputs(fit, axes)

    def __getattr__(self, name: str) -> Any:
        stream = self.__dict__.get("_stream")
        if name == "partial_fit":
            raise AttributeError(refusal(self))
        if name in (*SOLVED, *SETTLED) and stream is not None:
            if name in SETTLED:
                stream.flush()
            elif not stream.solved:
                self._solve_stream()
            if name in self.__dict__:
                return self.__dict__[name]
            if name.startswith("loo_"):
                raise AttributeError(
                    f"{name!r} takes another pass over the data, and this fit had one: it has gcv_error_, exact "
                    "generalised cross-validation. fit_batches on a list or a ParquetSets passes twice."
                )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _begin_classes(self, source: Any, classes: Any, again: bool) -> None:
        if classes is not None:
            raise ValueError("`classes` is for classifiers: this is a regressor, whose y are numbers.")


class StreamedRegressor(_Streamed):
    """Regression in batches."""

    @available_if(_batches_allowed)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Add samples to those seen so far; the same fit as on all of them at once.

        The values are solved for when they are first asked for, so that many calls cost little more than one.
        The penalty is chosen by exact generalised cross-validation (``gcv_error_``): leave-one-out takes another
        pass over the data, which `fit_batches` makes.
        """
        self._take(Batch(X, y, sample_weight))
        return self

    def _checked(self, batch: Batch, *, first: bool) -> tuple[Checked, bool]:
        sets = as_samples(self, batch.sets, reset=first).numpy()
        columns = as_columns(self, batch.y, sets)
        return (sets, columns, _batch_weights(batch.weights, sets)), np.asarray(batch.y).ndim == 1

    def _finish_outputs(self, fit: LayerFit, axes: PrincipalAxes) -> None:
        self._single = self._stream.single
        self.intercept_ = float(fit.layer.intercept[0]) if self._single else fit.layer.intercept
        kept = self._stream.sums.kept
        if kept.sets is not None:
            self._keep_errors(np.abs(kept.columns - self._stream.recipe.left_out(axes, kept, fit.ridge.alpha)))


class StreamedClassifier(_Streamed):
    """Classification in batches."""

    @available_if(_batches_allowed)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Any:
        """Add samples to those seen so far; ``classes``, all labels there will be, is needed in the first call.

        As for `AttentionRegressor`. Probabilities are calibrated on the exact leave-one-out scores of some 2000
        samples that are kept for it.
        """
        if "_stream" not in self.__dict__:
            if classes is None and "layer_" in self.__dict__:
                classes = self.classes_
            if classes is None:
                raise ValueError("classes must be passed on the first call to partial_fit: all labels there will be.")
            self._set_classes(classes)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"`classes` must be the same in every call: got {np.unique(classes)}, it was {self.classes_}. Labels "
                "cannot be added later."
            )
        self._take(Batch(X, y, sample_weight))
        return self

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
            raise ValueError(f"`classes` must hold at least two labels: got {len(self.classes_)} class(es).")

    def _checked(self, batch: Batch, *, first: bool) -> tuple[Checked, bool]:
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
        return (sets, columns[:, 1:] if single else columns, weights), single

    def _finish_outputs(self, fit: LayerFit, axes: PrincipalAxes) -> None:
        self.intercept_ = fit.layer.intercept
        kept = self._stream.sums.kept
        scores = self._stream.recipe.left_out(axes, kept, fit.ridge.alpha)
        self.temperature_ = fit_temperature(class_scores(scores), labels_of(kept.columns), kept.weights)
        self._keep_label_errors(scores, kept.columns)


def resume_stream(model: Any, sums: LayerSums, *, single: bool) -> None:
    """Go on from sums that were saved, of a model whose layer was solved from them."""
    layer = model.layer_
    options = layer.activation, layer.dtype, bool(model.fit_intercept), memory_budget(), model.n_extras_in_
    recipe = LayerRecipe(layer.heads, model.tokens_, len(layer.intercept), sums.kept.limit, *options)
    settle = partial(model._settle, None)  # it is settled
    model._stream = Stream(settle, recipe.n_outputs, single, recipe, sums, solved=True)


def store_log_losses(model: Any, ridge: RidgeFit) -> None:
    """What a classifier that chooses by the log-loss chose by."""
    if ridge.log_losses is not None:
        model.log_losses_, model.log_loss_ = ridge.log_losses, float(ridge.log_losses[ridge.best])


def forget_stream(model: Any) -> None:
    """Start over: drop the sums, and everything that was solved from them."""
    for name in ("_stream", "n_samples_seen_", *OF_A_WHOLE_FIT, *SETTLED, *SOLVED):
        model.__dict__.pop(name, None)


def _batch_weights(sample_weight: Any, sets: SetBatch | SetGroups) -> np.ndarray | None:
    """Checked weights; unlike those of a whole training set, those of a batch may all be zero."""
    if sample_weight is not None and np.size(sample_weight) == len(sets) and not np.any(sample_weight):
        return np.zeros(len(sets))
    return as_weights(sample_weight, sets)


def _plan(model: Any, dim: int) -> LayerPlan:
    """The plan of an estimator, if it is one that batches allow."""
    activation, dtype = check_layer_options(model.activation, model.dtype)
    check_choice(model.scaling, "scaling", (*SCALINGS, "auto"))
    check_choice(model.query, "query", (*QUERIES, "auto"))
    law = None if model.law is None else as_law(model.law)
    auto = isinstance(model.n_heads, str) and model.n_heads == "auto"
    n_heads = max(1, min(AUTO_HEADS, MAX_COLUMNS // (dim + 1))) if auto else as_heads(model.n_heads)
    reason = refusal(model)
    if reason is not None or n_heads is None:
        raise ValueError(reason)
    # four p × p matrices: the sums, and their eigendecomposition
    n_columns = n_heads * (dim + 1)
    needed = 4 * 8 * n_columns**2
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else needed
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
    return LayerPlan(n_heads, law, None, as_seed(model.random_state), options)
