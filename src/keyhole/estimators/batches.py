"""Fitting in batches, as functions of an estimator: what `partial_fit` and `fit_batches` do.

Layers are settled on the first 2,000 sets; later ones are summed (`keyhole.fit.streams`) and never
held as a whole. Fewer sets are fitted as ``fit`` fits them. A model that was given batches has
``stream_``, all that is known of its samples; its values are solved for by `ensure_solved`, which
every method that predicts calls first.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.utils.validation import column_or_1d

from keyhole._checks import check_choice, check_lengths
from keyhole.data.batches import Batch, as_batch, as_source
from keyhole.data.statistics import NAMES as STATISTICS
from keyhole.estimators.classes import one_vs_rest
from keyhole.estimators.report import MemberTable
from keyhole.estimators.validation import (
    as_outputs,
    as_samples,
    as_weights,
    check_target_given,
    class_weights,
)
from keyhole.fit.members import (
    FEWEST_HEADS,
    MOST_SUMMED_FEATURES,
    SUMMED_FEATURES,
    Plan,
    Shape,
    plan_layers,
)
from keyhole.fit.samples import TrainingSet
from keyhole.fit.second_kernel import CENTRES
from keyhole.fit.settings import Landmarks, LayerSettings
from keyhole.fit.streams import Stream

MANY_SAMPLES = 100_000
"""Samples that layers for batches are planned for: their number is not known."""

LARGEST_VALUE = 1e100
"""Tokens and outputs in batches are smaller: sums of their products are finite."""


SOLVED = (
    "combination_", "members_", "held_out_loss_", "held_out_scores_", "held_out_words_",
    "held_out_predictions_", "jackknife_errors_", "alpha_", "heads_", "n_heads_", "values_",
    "dual_coef_", "intercept_", "layer_", "tokens_", "selection_", "temperature_", "loo_error_",
    "loo_predictions_", "loo_decision_",
)  # fmt: skip
"""Fitted attributes that wait for the next prediction after a batch."""


def why_not_in_batches(model: Any) -> str | None:
    """Why an estimator cannot be fitted in batches, and what to do about it; None if it can."""
    whole = "needs the whole training set at once, and batches never are."
    if isinstance(model.n_heads, float) and math.isinf(model.n_heads):
        return (
            f"n_heads=math.inf, the exact kernel, {whole} Use a finite number of heads, or "
            "kh.Landmarks(512), or use fit."
        )
    if hasattr(model.heads, "fit"):
        return (
            f"heads={model.heads!r} {whole} Fit it on a part of the data first and pass what it "
            "became, heads=model.heads_, or use fit."
        )
    if model.device not in (None, "auto"):
        return (
            f"device={model.device!r} is for fit: batches are summed by NumPy. Leave `device` out."
        )
    if getattr(model, "class_weight", None) == "balanced":
        return f"class_weight='balanced' {whole} Pass the weights of the classes, or use fit."
    return None


def can_fit_batches(model: Any) -> bool:
    """Whether an estimator can be fitted in batches; otherwise an error that says why not."""
    reason = why_not_in_batches(model)
    if reason is not None:
        raise AttributeError(reason)
    return True


def forget(model: Any) -> None:
    """Drop all that was learned."""
    for name in list(vars(model)):
        if name.endswith("_") and not name.startswith("_"):
            delattr(model, name)
    vars(model).pop("_training", None)


def take(model: Any, X: Any, y: Any, sample_weight: Any, classes: Any = None) -> None:
    """Add a batch to a model, whole or not at all: what `partial_fit` does."""
    model._validate_params()
    draft = copy.copy(model)
    if "combination_" in vars(draft) and "stream_" not in vars(draft):
        if "n_samples_seen_" in vars(draft):
            raise ValueError(
                f"this model was saved with keep='predict': the sums over its "
                f"{draft.n_samples_seen_} samples are not in the file. Load a file saved with "
                "keep='all', or start over with fit or fit_batches."
            )
        warnings.warn(
            "partial_fit starts over: fit keeps no sums that samples could be added to. Use "
            "fit_batches for the first samples to add to them later.",
            stacklevel=3,
        )
        if classes is None:
            classes = vars(draft).get("classes_")
        forget(draft)
    if is_classifier(draft):
        name_classes(draft, classes)
    _add(draft, Batch(X, y, sample_weight))
    adopt(model, draft)


def adopt(model: Any, draft: Any) -> None:
    """Make a model what its draft became, once nothing can fail any more."""
    vars(model).clear()
    vars(model).update(vars(draft))


def name_classes(draft: Any, classes: Any) -> None:
    """The labels that there will be, which the first batch must be told."""
    if classes is not None:
        named = np.unique(column_or_1d(classes))
        if "classes_" in vars(draft) and not np.array_equal(named, draft.classes_):
            raise ValueError(
                f"`classes` must be those of the first batch, {draft.classes_}: got {named}."
            )
        if len(named) < 2:
            raise ValueError(f"`classes` must name at least two labels: got {named}.")
        draft.classes_ = named
    elif "classes_" not in vars(draft):
        raise ValueError(
            "the first call of partial_fit needs `classes`, all labels there will be: pass "
            "classes=np.unique(y) of all data."
        )


def _add(draft: Any, batch: Batch) -> None:
    """Check a batch and add it to the stream, which the first one opens."""
    is_first = "stream_" not in vars(draft)
    data = checked(draft, batch, is_first=is_first)
    stream = Stream() if is_first else draft.stream_
    for name in SOLVED:
        vars(draft).pop(name, None)
    draft.n_samples_seen_ = vars(draft).get("n_samples_seen_", 0) + len(data)
    if len(data):
        stream = stream.put(data)
    if stream.should_settle:
        stream = settled(draft, stream)
    draft.stream_ = stream


def checked(draft: Any, batch: Batch, *, is_first: bool) -> TrainingSet:
    """A batch as a training set, without samples of weight 0."""
    samples = as_samples(draft, batch.sets, reset=is_first).numpy()
    weights = as_weights(batch.weights, samples, may_be_zero=True)
    if is_classifier(draft):
        check_target_given(draft, batch.y)
        labels = column_or_1d(batch.y, warn=True)
        check_lengths(samples, labels, "y")
        is_unknown = ~np.isin(labels, draft.classes_)
        if is_unknown.any():
            i = int(np.flatnonzero(is_unknown)[0])
            raise ValueError(
                f"every label must be one of `classes`, {draft.classes_}: sample {i} of this batch "
                f"has {labels[i]!s:.40}."
            )
        weights = class_weights(draft.class_weight, labels, weights)
        outputs = one_vs_rest(np.searchsorted(draft.classes_, labels), len(draft.classes_))
    else:
        outputs = as_outputs(draft, batch.y, samples)
        single = np.ndim(batch.y) == 1
        if not is_first and (
            single != draft.single_output_ or outputs.shape[1] != draft.n_outputs_
        ):
            raise ValueError(
                f"every batch must have the outputs of the first: got {outputs.shape[1]} for "
                f"{draft.n_outputs_}, or y of another number of axes. Give y the shape it had."
            )
        draft.single_output_ = single
        draft.n_outputs_ = outputs.shape[1]
    rows = np.arange(len(samples))
    if weights is not None:
        rows = np.flatnonzero(weights > 0)
        weights = weights[rows]
    numbers = {"y": outputs}
    if not samples.sets.is_on_disk:
        numbers["X"] = samples.sets.tokens
    for name, values in numbers.items():
        largest = float(np.abs(values).max(initial=0.0))
        if largest > LARGEST_VALUE:
            raise ValueError(
                f"numbers in batches must be below {LARGEST_VALUE:.0e}, so that sums of their "
                f"products fit float64: `{name}` has {largest:.3g}. Divide it by its size."
            )
    # a copy: whoever makes batches may use their memory again
    return TrainingSet(samples=samples[rows], outputs=outputs[rows], weights=weights)


def _plan_for_batches(draft: Any, samples: Any) -> Plan:
    """The layers to settle on: none that needs all samples at once, and each with few features.

    A number of heads that was given stays as it is.
    """
    shape = replace(Shape.of(samples), n_samples=MANY_SAMPLES, in_batches=True)
    shape = replace(shape, n_keys=int(samples.token_counts.mean() * MANY_SAMPLES))
    given = draft._given()
    plan = plan_layers(given, shape)
    if len(plan.layers) == 1:
        return plan
    layers: list[LayerSettings] = []
    left_out = list(plan.left_out)
    has_wide_heads = False
    for layer in plan.layers:
        if layer.learns_heads:
            left_out.append(f"{layer.name} (learned from all samples at once)")
            continue
        if _n_features(layer, shape) > MOST_SUMMED_FEATURES and given.n_heads is None:
            left_out.append(f"{layer.name} (too many features for sums)")
            continue
        # in many dimensions a head or two are all the features there is room for: once is enough
        if _has_wide_heads(layer, shape) and given.n_heads is None:
            if has_wide_heads:
                left_out.append(f"{layer.name} (too many features for sums)")
                continue
            has_wide_heads = True
        layers.append(layer)
    if not layers:
        raise ValueError(
            "no layer is left that could be summed over batches: "
            f"{', '.join(left_out)}. Pass n_heads=kh.Landmarks(512), or use fit."
        )
    return Plan(layers=tuple(layers), left_out=tuple(left_out))


def _n_features(layer: LayerSettings, shape: Shape) -> float:
    """Features of a layer, at most."""
    if layer.mlp_width is not None:
        return CENTRES
    if not layer.has_heads:
        return len(STATISTICS) * shape.dim + shape.n_extras
    if isinstance(layer.n_heads, Landmarks):
        return layer.n_heads.count + shape.n_extras
    return layer.n_heads * (shape.dim + 1) + shape.n_extras


def _has_wide_heads(layer: LayerSettings, shape: Shape) -> bool:
    """Whether it has heads, and few of them already have as many features as a layer may have."""
    if not layer.has_heads or isinstance(layer.n_heads, Landmarks):
        return False
    return layer.mlp_width is None and FEWEST_HEADS * (shape.dim + 1) > SUMMED_FEATURES


def settled(draft: Any, stream: Stream) -> Stream:
    """The stream with its layers settled on its first samples."""
    plan = _plan_for_batches(draft, stream.first_samples().samples)
    stream = stream.settled(plan.layers, draft._options(None))
    assert stream.recipe is not None
    draft.not_tried_ = (*plan.left_out, *stream.recipe.left_out)
    return stream


def ensure_solved(model: Any, squared_errors: Any = None) -> None:
    """Solve for the values of a model that was given batches, unless that was done."""
    if "stream_" not in vars(model) or "combination_" in vars(model):
        return
    stream = model.stream_
    if stream.count == 0:
        raise ValueError(
            "a fit needs samples of positive weight: all batches so far had none. Add some."
        )
    if stream.recipe is None:
        # few samples are fitted as `fit` fits them
        data = TrainingSet.joined(stream.pending)
        if data.weights is not None and isinstance(model.alpha, str):
            data = replace(data, weights=data.weights / data.weights.mean())
        model._fit_data(data, np.arange(len(data)), len(data))
        return
    combination, ridge = stream.recipe.solve(stream.sums, stream.first, squared_errors)
    plan = Plan(layers=(), left_out=model.not_tried_)
    model._store(combination, stream.first, plan, np.arange(len(stream.first)), len(stream.first))
    # the first samples are judged above, and the penalty by all
    model.selection_ = ridge
    if combination.is_single:
        model.loo_error_ = ridge.error
        model.members_ = MemberTable([replace(model.members_[0], loss=ridge.error)])
    model._training = None


def fit_batches(model: Any, batches: Any, classes: Any, selection: str) -> Any:
    """Fit from batches that are read one at a time; see `AttentionRegressor.fit_batches`."""
    can_fit_batches(model)
    source = as_source(batches)
    can_read_twice = iter(source) is not source
    check_choice(selection, "selection", ("auto", "loo", "gcv"))
    if selection == "loo" and not can_read_twice:
        raise ValueError(
            "selection='loo' reads the batches twice, and an iterator such as a generator can be "
            "read once. Pass a list or a ParquetSets, or use selection='gcv'."
        )
    draft = copy.copy(model)
    forget(draft)
    if is_classifier(draft):
        source = _with_classes(draft, source, classes, can_read_twice)
    for item in source:
        _add(draft, as_batch(item))
    if "stream_" not in vars(draft):
        raise ValueError(
            "`batches` must give at least one batch: got none. Was the iterator used up already?"
        )
    squared_errors = None
    if can_read_twice and selection != "gcv":
        squared_errors = _SecondPass(draft, source)
    ensure_solved(draft, squared_errors)
    adopt(model, draft)
    return model


def _with_classes(draft: Any, source: Any, classes: Any, can_read_twice: bool) -> Any:
    """The labels: those named, or found by reading them first."""
    if classes is not None:
        name_classes(draft, classes)
        return source
    if not can_read_twice:
        first = next(iter(source), None)
        raise ValueError(
            "a classifier needs `classes`, all labels there will be, where batches can be read "
            f"once only{'' if first is None else ', as a generator can'}. Pass classes=[…]."
        )
    labels: list[Any] = []
    for item in source:
        labels.extend(np.unique(column_or_1d(as_batch(item).y)).tolist())
    name_classes(draft, np.array(sorted(set(labels))))
    return source


class _SecondPass:
    """Sums of squared leave-one-out errors, by another pass over the batches."""

    def __init__(self, draft: Any, source: Iterable[Any]) -> None:
        self.draft = draft
        self.source = source

    def __call__(self, axes: Any, alphas: np.ndarray) -> np.ndarray:
        recipe = self.draft.stream_.recipe
        total = np.zeros((len(alphas), recipe.n_outputs))
        count = 0
        draft = copy.copy(self.draft)
        for item in self.source:
            data = checked(draft, as_batch(item), is_first=False)
            if len(data):
                total += recipe.squared_errors(axes, alphas, data)
            count += len(data)
        check_second_pass(self.draft.stream_.count, count)
        return total


def check_second_pass(n_first: int, n_second: int) -> None:
    """Raise if another pass has seen other samples."""
    if n_first != n_second:
        raise ValueError(
            "`batches` must give the same samples every time they are read: got "
            f"{n_first} the first time and {n_second} the second. Use selection='gcv', which needs "
            "one pass."
        )


def predict_batches(model: Any, batches: Iterable[Any]) -> Iterator[np.ndarray]:
    """Yield the predictions of each batch in turn."""
    for item in as_source(batches):
        yield model.predict(as_batch(item).sets)
