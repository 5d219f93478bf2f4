"""Fitting in batches, as functions of an estimator: what `partial_fit` and `fit_batches` do.

Samples are summed (`keyhole.streaming`) and never held as a whole. A model that was given batches
has ``stream_``, all that is known of its samples. Its values are solved for by `ensure_solved`,
which every method that predicts calls first, or by ``model.solve()``. The values are those of the
plain version, `keyhole.textbook.ridge`, on all samples at once; docs/howto/out_of_core.md says
when to use batches, and how the penalty is chosen.

Functions that change a model work on a draft of it (`keyhole.estimators.states.change`): a batch is
added whole or not at all, also between threads. Methods that only read take a `snapshot` first, so
that all they read belongs together.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.utils.validation import column_or_1d

from keyhole._checks import check_choice, check_lengths
from keyhole.attention.heads import HeadDraw
from keyhole.choose import choose, first_settings
from keyhole.costs import AUTO_HEADS, MIN_AUTO_HEADS
from keyhole.data.bag_files import BagFiles
from keyhole.data.batches import Batch, as_batch, as_source
from keyhole.data.sets import SetBatch
from keyhole.data.tokens import TokenRule
from keyhole.estimators.base import explained_memory_errors_of_sums, without_output_axis
from keyhole.estimators.classes import one_vs_rest, scores_per_class
from keyhole.estimators.selection import Selection
from keyhole.estimators.states import change, twin_of
from keyhole.estimators.uncertainty import Calibration, some_errors
from keyhole.estimators.validation import (
    as_outputs,
    as_samples,
    as_weights,
    check_target_given,
    class_weights,
)
from keyhole.key_selection import ALL_KEYS
from keyhole.layer import learn_tokens
from keyhole.ridge.calibration import fit_temperature, labels_of
from keyhole.ridge.design import PrincipalAxes
from keyhole.solvers.layers import FiniteLayer
from keyhole.solvers.solve import LayerFit
from keyhole.spec import LayerSpec
from keyhole.streaming import LayerRecipe, LayerSums, SumSizes, Yardstick, check_rows
from keyhole.training import TrainingSet

N_KEPT = 2048
"""Samples kept to calibrate probabilities and intervals on."""

N_PENDING = 1024
"""Samples of positive weight that what is automatic is settled on. Later ones are gathered until
they are as many, and added then: p² numbers are gone through at each addition, however few they
are."""

MOST_SPOOLED = 10_000
"""Samples of wide tokens, at most, that are fitted by their n × n matrix, which takes 0.8 GB."""

PENDING_BYTES = 2**28
"""Bytes of pending samples that are enough as well: 1,024 slides may be a hundred gigabytes."""

MAX_FEATURES = 2048
"""Features that ``n_heads="auto"`` makes in batches: matrices of that order are summed, and
decomposed in seconds."""

SOLVED = (
    "layer_",
    "alpha_",
    "selection_",
    "solver_",
    "values_",
    "intercept_",
    "temperature_",
    "loss_",
    "loo_error_",
    "loo_predictions_",
    "loo_decision_",
    "residual_",
    "n_iter_",
    "jackknife_errors_",
    "dual_coef_",
)
"""Fitted attributes that follow from the sums."""

SETTLED = ("heads_", "tokens_", "n_heads_", "candidates_")
"""Fitted attributes that the first samples decide, and later ones keep."""

OF_A_STREAM = (*SOLVED, *SETTLED)
"""Fitted attributes that a model may not have yet after `partial_fit`."""


@dataclass(frozen=True)
class SampleForm:
    """What all batches of a stream have in common; ``kind`` is None where it is not known."""

    kind: type | None
    pairs: tuple[tuple[int, int], ...] | None
    n_outputs: int
    single: bool

    @classmethod
    def of(cls, data: TrainingSet, *, single: bool) -> SampleForm:
        """The form of some samples; ``single`` says whether y has one axis."""
        return cls(
            kind=type(data.samples),
            pairs=data.samples.sets.pairs,
            n_outputs=data.outputs.shape[1],
            single=single,
        )

    def check(self, data: TrainingSet, *, single: bool) -> None:
        """Raise unless samples have this form."""
        # outputs
        if data.outputs.shape[1] != self.n_outputs or single != self.single:
            raise ValueError(
                f"every batch must have the outputs of the first: got {data.outputs.shape[1]} "
                f"for {self.n_outputs}, or y of another number of axes. Give y the shape it had."
            )

        # samples; sums that were loaded from a file may not know their kind
        if self.kind is None:
            return
        if type(data.samples) is not self.kind:
            raise ValueError(
                "every batch must be of the kind of the first: got "
                f"{type(data.samples).__name__} for {self.kind.__name__}. SetGroups(batch, "
                "np.ones(len(batch), int)) makes samples of one set each."
            )
        pairs = data.samples.sets.pairs
        if pairs != self.pairs:
            raise ValueError(
                "every batch must pair the coordinates of query and key that the first paired: got "
                f"pairs={pairs} for {self.pairs}. Read all batches in the same way, or pass the "
                "same `pairs` to SetBatch."
            )


@dataclass(frozen=True)
class Stream:
    """All that a fit in batches knows of its samples; adding some makes another stream.

    How samples become features, ``recipe``, is settled on the first `N_PENDING` samples, or on
    fewer if values are asked for before that, and stays. Until then ``spec`` says what is asked
    for, and ``trial`` is a recipe that the choice will try on the samples.

    Nothing in a stream is ever written into: a model that fails to add samples still has the stream
    that it had, and copies of a model may share one.
    """

    form: SampleForm
    spec: LayerSpec | None
    trial: LayerRecipe | None = None
    recipe: LayerRecipe | None = None
    sums: LayerSums | None = None
    pending: tuple[TrainingSet, ...] = ()
    sizes: SumSizes = field(default_factory=SumSizes)
    """Of the sums, and of what is pending as far as it was computed."""
    yardstick: Yardstick = field(default_factory=Yardstick)

    @property
    def n_pending(self) -> int:
        """Samples that wait to be added."""
        return sum(len(data) for data in self.pending)

    @property
    def is_full(self) -> bool:
        """Whether enough samples are pending to be added."""
        return are_enough(self.n_pending, sum(bytes_of(data) for data in self.pending))

    def put(self, data: TrainingSet) -> Stream:
        """The stream with more samples pending. Raise if they could never be added.

        They are checked now and not when enough are there, so that the batch that is at fault is
        refused and no other. Samples of weight zero are left out.
        """
        data = data.of_positive_weight()
        if len(data) == 0:
            return self
        if are_enough(len(data), bytes_of(data)):
            # it will be added right away, block by block: it fails then, if it does
            return replace(self, pending=(*self.pending, data))

        # what can be known now of whether the sums will stay finite: by the recipe if it is
        # settled, by the one that will be tried first, or by outputs and weights alone
        yardstick = self.yardstick
        if self.recipe is not None:
            sizes, yardstick = self.recipe.check_addable(data, self.sizes, yardstick)
        elif self.trial is not None:
            without_extras = data.with_samples(data.samples.with_extras(None))
            sizes, yardstick = self.trial.check_addable(without_extras, self.sizes, yardstick)
        else:
            assert self.spec is not None
            _check_scaled(self.spec, TrainingSet.joined([*self.pending, data]))
            no_features = np.zeros((len(data), 0))
            sizes = check_rows(no_features, data, self.sizes)

        # a copy: whoever makes batches may use their memory again
        pending = (*self.pending, data.copy())
        return replace(self, pending=pending, sizes=sizes, yardstick=yardstick)

    def first_samples(self) -> TrainingSet:
        """Pending samples, at most `N_PENDING`: what is automatic is settled on them."""
        return TrainingSet.joined(self.pending)[:N_PENDING]

    def with_recipe(self, recipe: LayerRecipe, sums: LayerSums) -> Stream:
        """The stream with another recipe, and the sums under it.

        Sizes are those of the new sums: the ones before were of other features.
        """
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
        sums = self.recipe.add(self.sums, TrainingSet.joined(self.pending))
        return replace(self, sums=sums, pending=(), sizes=SumSizes.of_moments(sums.moments))


def are_enough(count: int, n_bytes: int) -> bool:
    """Whether samples need not wait for more of them."""
    return count >= N_PENDING or n_bytes >= PENDING_BYTES


def bytes_of(data: TrainingSet) -> int:
    """Bytes of the sets of some samples."""
    return data.samples.sets.nbytes


def gathered(batches: Iterable[TrainingSet]) -> Iterator[TrainingSet]:
    """Batches of at least `N_PENDING` samples, or `PENDING_BYTES`, except the last."""
    # p² numbers are gone through at each addition to the sums, however few samples are added
    parts: list[TrainingSet] = []
    count = 0
    n_bytes = 0
    for data in batches:
        count += len(data)
        n_bytes += bytes_of(data)
        if are_enough(count, n_bytes):
            yield TrainingSet.joined([*parts, data])
            parts = []
            count = 0
            n_bytes = 0
        else:
            # a copy: whoever makes batches may use their memory again
            parts.append(data.copy())
    if parts:
        yield TrainingSet.joined(parts)


# ---- what is possible ----------------------------------------------------------------------------


def why_not_in_batches(model: Any) -> str | None:
    """Why an estimator cannot be fitted in batches, and what to do about it; None if it can."""
    whole = "needs the whole training set at once, and batches never are."
    if isinstance(model.n_heads, float) and math.isinf(model.n_heads):
        reason = f"n_heads=math.inf, the exact kernel, {whole} Use a finite number of heads"
    elif hasattr(model.heads, "fit"):
        reason = (
            f"heads={model.heads!r} {whole} Fit it on a part of the data first and pass what it "
            "became, heads=model.heads_"
        )
    elif model.solver == "cg":
        reason = f"solver='cg' {whole} Leave it at solver='auto'"
    elif getattr(model, "loss", "squared_error") == "log_loss":
        reason = f"loss='log_loss' {whole} Leave it at loss='auto'"
    elif model.device not in (None, "auto"):
        reason = f"device={model.device!r} {whole} They are summed by NumPy. Leave `device` out"
    elif not isinstance(model.keys, str):
        reason = (
            f"keys={model.keys}, a selection of keys by layers that are fitted without each fold "
            f"of the samples, {whole} Use keys='all'"
        )
    else:
        return None
    return f"{reason}, or use fit."


def can_fit_batches(model: Any) -> bool:
    """Whether an estimator can be fitted in batches; otherwise an error that says why not."""
    reason = why_not_in_batches(model)
    if reason is not None:
        raise AttributeError(reason)
    return True


def batch_spec(model: Any, samples: Any) -> LayerSpec:
    """The specification of an estimator for batches, if they allow it."""
    reason = why_not_in_batches(model)
    if reason is not None:
        raise ValueError(reason)

    # the exact kernel cannot be summed: an automatic number of heads is finite
    spec = model.layer_spec(samples)
    width = samples.dim + 1
    n_heads = spec.n_heads
    if isinstance(n_heads, str):
        n_heads = max(1, min(AUTO_HEADS, MAX_FEATURES // width))

    # four p × p matrices: the sums, and their eigendecomposition
    n_features = int(n_heads) * width
    needed = 4 * 8 * n_features**2
    memory = needed
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise MemoryError(
            f"fitting in batches takes four p × p matrices with p = M·D: {n_features} features "
            f"make {needed / 2**30:.0f} GiB, this machine has {memory / 2**30:.0f} GiB. Use fewer "
            "heads, or fit with solver='cg'."
        )
    # the scale of extras is chosen among the sums, later; sums are those of squared errors
    return replace(
        spec,
        n_heads=n_heads,
        keys=ALL_KEYS,
        device=None,
        solver="direct",
        extras_scale=1.0,
        loss="squared_error",
    )


# ---- whole fits ----------------------------------------------------------------------------------


def fit_batches(model: Any, batches: Any, classes: Any, selection: str) -> Any:
    """Fit from batches that are read one at a time; see `AttentionRegressor.fit_batches`."""
    source = as_source(batches)
    can_read_twice = iter(source) is not source
    check_choice(selection, "selection", ("auto", "loo", "gcv"))
    if selection == "loo" and not can_read_twice:
        raise ValueError(
            "selection='loo' reads the batches twice, and an iterator such as a generator can be "
            "read once. Pass a list or a ParquetSets, or use selection='gcv'."
        )

    # wide tokens have too many features for sums of their squares: p × p is 2 TB at p = 525,000,
    # where the n × n matrix of 60 samples is nothing
    first, source = peek(source, can_read_twice)
    if selection != "gcv" and wants_all_samples(model, first):
        return fit_spooled(model, source, classes, selection)
    return fit_sums(model, source, classes, selection)


def fit_sums(model: Any, source: Any, classes: Any, selection: str) -> Any:
    """Fit from sums over batches, p × p numbers that more samples can be added to later."""
    can_read_twice = iter(source) is not source
    # the sums, in a draft: if a batch is refused, the model is what it was
    draft = twin_of(model)
    forget(draft)
    begin_all_classes(draft, source, classes, can_read_twice)
    for item in source:
        add_batch(draft, as_batch(item))
    if "stream_" not in vars(draft):
        raise ValueError(
            "`batches` must give at least one batch: got none. Was the iterator used up already?"
        )

    # the values, which take another pass for leave-one-out
    error_sums = None
    if can_read_twice and selection != "gcv":
        error_sums = partial(_error_sums, draft, source)
    solve_stream(draft, error_sums)
    adopt(model, draft)
    return model


def peek(source: Any, can_read_twice: bool) -> tuple[Batch | None, Any]:
    """The first batch of a source, and a source that still gives it."""
    iterator = iter(source)
    first = next(iterator, None)
    if first is None:
        return None, source
    if not can_read_twice:
        source = chain([first], iterator)
    return as_batch(first), source


def wants_all_samples(model: Any, first: Batch | None) -> bool:
    """Whether sums would leave an automatic number of heads below `MIN_AUTO_HEADS`.

    Samples of several sets are summed in any case, and so is what fit would refuse to take.
    """
    sets = None if first is None else first.sets
    if not isinstance(sets, SetBatch) or first is None or first.y is None:
        return False
    is_automatic = isinstance(model.n_heads, str)
    heads_of_sums = MAX_FEATURES // (sets.dim + 1)
    return is_automatic and heads_of_sums < MIN_AUTO_HEADS and why_not_in_batches(model) is None


def fit_spooled(model: Any, source: Any, classes: Any, selection: str) -> Any:
    """Put the keys of all batches on the disk, and fit them as one training set.

    That takes an n × n matrix. Where there are more than `MOST_SPOOLED` samples, their sums are
    taken after all, with as many heads as these allow and a warning that says how many.
    """
    from keyhole.data.spool import SpooledBatches

    # bags in files are on a disk already
    if isinstance(source, BagFiles):
        return fit_whole(model, Batch(source.sets, source.target))
    with SpooledBatches() as spool:
        checked = twin_of(model)
        forget(checked)
        for number, item in enumerate(source):
            batch = as_batch(item)
            samples = as_samples(checked, batch.sets, reset=number == 0)
            spool.put(samples.numpy().sets, batch.y, batch.weights)
        everything = spool.joined()
        has_all_classes = classes is None or np.array_equal(
            np.unique(classes), np.unique(everything.y)
        )
        if len(spool) <= MOST_SPOOLED and has_all_classes:
            return fit_whole(model, everything)
        n_heads = max(1, MAX_FEATURES // (everything.sets.dim + 1))
        warnings.warn(
            f"{len(spool)} samples of {everything.sets.dim} coordinates are fitted with {n_heads} "
            f"heads: sums over batches hold {MAX_FEATURES} features. For more, pass `n_heads`, or "
            "use fit.",
            stacklevel=4,
        )
        return fit_sums(model, spool, classes, selection)


def fit_whole(model: Any, everything: Batch) -> Any:
    """Fit a model to samples on a disk, which it will not need again."""
    draft = twin_of(model)
    forget(draft)
    draft.fit(everything.sets, everything.y, sample_weight=everything.weights)
    vars(draft).pop("training_", None)
    adopt(model, draft)
    return model


def predict_batches(model: Any, batches: Iterable[Any]) -> Iterator[np.ndarray]:
    """Yield the predictions of each batch in turn."""
    for item in as_source(batches):
        yield model.predict(as_batch(item).sets)


def _error_sums(
    draft: Any, source: Iterable[Any], axes: PrincipalAxes, alphas: np.ndarray
) -> np.ndarray:
    """Sums of squared leave-one-out errors, by another pass over the batches."""
    recipe = draft.stream_.recipe
    sums = np.zeros((len(alphas), draft.stream_.form.n_outputs))
    n_samples = 0
    checked = (check_batch(draft, as_batch(item), first=False)[0] for item in source)
    for data in gathered(checked):
        sums += recipe.error_sums(axes, alphas, data)
        n_samples += len(data)
    check_second_pass(draft.n_samples_seen_, n_samples)
    return sums


def check_second_pass(first: int, second: int) -> None:
    """Raise unless both passes over the batches gave as many samples."""
    if first != second:
        raise ValueError(
            "`batches` must give the same samples every time they are read: got "
            f"{first} the first time and {second} the second. Use selection='gcv', which needs "
            "one pass."
        )


# ---- one batch -----------------------------------------------------------------------------------


def take(model: Any, X: Any, y: Any, sample_weight: Any, classes: Any = None) -> None:
    """Add a batch to a model, whole or not at all: what `partial_fit` does."""
    with change(model) as draft:
        if is_classifier(draft):
            begin_classes(draft, classes)
        add_batch(draft, Batch(X, y, sample_weight))


def add_batch(draft: Any, batch: Batch) -> None:
    """Check a batch and add it to the stream, which the first one opens.

    To be called on a draft.
    """
    # the first batch starts a new fit, except where that would silently lose samples
    first = "stream_" not in vars(draft)
    if first and "n_samples_seen_" in vars(draft):
        raise ValueError(
            f"this model was saved with keep='predict': the sums over its {draft.n_samples_seen_} "
            "samples are not in the file, so that none can be added to them. Load a file saved "
            "with keep='all', or start over with fit or fit_batches."
        )
    if first and "layer_" in vars(draft):
        warnings.warn(
            "partial_fit starts over: fit keeps no sums that samples could be added to. Use "
            "fit_batches for the first samples to add to them later.",
            stacklevel=4,
        )
    if first:
        forget(draft)

    # its samples must be of the form of the first batch
    data, single = check_batch(draft, batch, first=first)
    if first:
        open_stream(draft, data, single=single)
    else:
        draft.stream_.form.check(data, single=single)

    # values that were solved for are those of fewer samples, and so is the scaling of extras
    for name in SOLVED:
        vars(draft).pop(name, None)
    recipe = draft.stream_.recipe
    if recipe is not None and recipe.n_extras:
        vars(draft).pop("tokens_", None)

    # added to the sums when enough samples have gathered
    with explained_memory_errors_of_sums(n_features_of(draft)):
        draft.stream_ = draft.stream_.put(data)
        if draft.stream_.is_full:
            _flush(draft)
    draft.n_samples_seen_ = vars(draft).get("n_samples_seen_", 0) + len(data)


def check_batch(draft: Any, batch: Batch, *, first: bool) -> tuple[TrainingSet, bool]:
    """A batch as a training set, and whether y has one axis only (or two classes)."""
    samples = as_samples(draft, batch.sets, reset=first).numpy()
    weights = _batch_weights(batch.weights, samples)
    if not is_classifier(draft):
        outputs = as_outputs(draft, batch.y, samples)
        return TrainingSet(samples, outputs, weights), np.ndim(batch.y) == 1

    # labels of a classifier: all must be among the classes that were named at the start
    check_target_given(draft, batch.y)
    labels = column_or_1d(batch.y, warn=True)
    check_lengths(samples, labels, "y")
    is_unknown = ~np.isin(labels, draft.classes_)
    if is_unknown.any():
        raise ValueError(
            f"every label must be one of `classes`, {draft.classes_}: sample "
            f"{int(np.flatnonzero(is_unknown)[0])} of this batch has "
            f"{str(labels[is_unknown][0])!r}."
        )
    if isinstance(draft.class_weight, str):
        raise ValueError(
            f"class_weight={draft.class_weight!r} needs the whole training set: pass a dict of "
            "weights to fit in batches."
        )

    # one-vs-rest targets
    outputs = one_vs_rest(np.searchsorted(draft.classes_, labels), len(draft.classes_))
    weights = class_weights(draft.class_weight, labels, weights)
    return TrainingSet(samples, outputs, weights), len(draft.classes_) == 2


def _batch_weights(sample_weight: Any, samples: Any) -> np.ndarray | None:
    """Checked weights; unlike those of a whole training set, those of a batch may all be zero."""
    has_all_weights = sample_weight is not None and np.size(sample_weight) == len(samples)
    if has_all_weights and not np.any(sample_weight):
        return np.zeros(len(samples))
    return as_weights(sample_weight, samples)


def begin_classes(draft: Any, classes: Any) -> None:
    """The labels of a stream that begins, or a check that they are still the same."""
    # a stream that is under way
    if "stream_" in vars(draft):
        if classes is not None and not np.array_equal(np.unique(classes), draft.classes_):
            raise ValueError(
                f"`classes` must be the same in every call: got {np.unique(classes)}, it was "
                f"{draft.classes_}. Labels cannot be added later."
            )
        return

    # a stream that begins: the classes of an earlier fit, where none are given
    if classes is None and "layer_" in vars(draft):
        classes = draft.classes_
    if classes is None:
        raise ValueError(
            "classes must be passed on the first call to partial_fit: all labels there will be."
        )
    _set_classes(draft, classes)


def begin_all_classes(draft: Any, source: Any, classes: Any, can_read_twice: bool) -> None:
    """The labels of a fit to all batches: given, or found by reading them first."""
    if not is_classifier(draft):
        if classes is not None:
            raise ValueError(
                "`classes` is for classifiers: this is a regressor, whose y are numbers."
            )
        return
    # not given: a pass over all labels, which a file can make without reading its sets
    if classes is None:
        if not can_read_twice:
            raise ValueError(
                "`classes` must be given with batches that can be read only once: all labels there "
                "will be."
            )
        if hasattr(source, "labels"):
            classes = source.labels()
        else:
            classes = np.concatenate([np.unique(as_batch(item).y) for item in source])
    _set_classes(draft, classes)


def _set_classes(draft: Any, classes: Any) -> None:
    """Store the classes, sorted."""
    draft.classes_ = np.unique(column_or_1d(classes))
    if len(draft.classes_) < 2:
        raise ValueError(
            f"`classes` must hold at least two labels: got {len(draft.classes_)} class(es)."
        )


# ---- the stream ----------------------------------------------------------------------------------


def open_stream(draft: Any, data: TrainingSet, *, single: bool) -> None:
    """Begin a stream for samples like these. To be called on a draft."""
    spec = batch_spec(draft, data.samples)
    if spec.query != "auto":
        data.samples.check_query_rule(spec.query)
    draft.single_output_ = single
    draft.stream_ = Stream(
        form=SampleForm.of(data, single=single),
        spec=spec,
        trial=_trial_recipe(spec, data),
    )


def _trial_recipe(spec: LayerSpec, data: TrainingSet) -> LayerRecipe | None:
    """Features of tokens as they are, which must be finite wherever ``scaling`` may leave them so.

    None where tokens will be scaled in any case: what the scale is, all of the first samples
    decide.
    """
    if spec.scaling not in ("none", "auto"):
        return None
    query = spec.query
    if query == "auto":
        query = "given"
    pooling = spec.pooling
    if pooling == "auto":
        pooling = "mean"
    if spec.activation == "auto":
        spec = replace(spec, activation="relu")
    rule = TokenRule("none", query, pooling).with_hops_of(spec.fixed_heads)
    return _recipe(spec, rule, spec.fixed_heads, data, n_kept=0, n_extras=0)


def _check_scaled(spec: LayerSpec, data: TrainingSet) -> None:
    """Raise if samples that wait could not be fitted once their tokens are scaled together.

    Scaled tokens are of size √n at most, which every activation but the exponential turns into
    features of a moderate size. So only that one is tried, on all samples that wait.
    """
    if spec.activation != "exp":
        return
    settings = first_settings(spec)
    data = data.with_samples(data.samples.with_extras(None))
    rule = learn_tokens(settings, data)
    recipe = _recipe(settings, rule, spec.fixed_heads, data, n_kept=0, n_extras=0)
    recipe.check_addable(data, SumSizes(), Yardstick())


def _recipe(
    spec: LayerSpec, rule: TokenRule, heads: Any, data: TrainingSet, *, n_kept: int, n_extras: int
) -> LayerRecipe:
    """How samples like these become features under a token rule and a head distribution."""
    drawn = HeadDraw(
        heads, int(spec.n_heads), data.samples.dim, spec.seed, rule.query_dim(data.samples)
    )
    return LayerRecipe(
        heads=drawn,
        rule=rule,
        n_outputs=data.outputs.shape[1],
        n_kept=n_kept,
        activation=spec.activation,
        dtype=spec.dtype,
        fit_intercept=spec.fit_intercept,
        memory_budget=spec.memory_budget,
        n_extras=n_extras,
    )


def settle(draft: Any, data: TrainingSet) -> LayerRecipe:
    """Choose on the first samples what is automatic, and keep it. To be called on a draft."""
    # sums are of fixed heads, and learning takes the whole training set at once
    choice = choose(replace(draft.stream_.spec, may_learn=False), data)
    rule = choice.token_rule(data)
    recipe = _recipe(
        choice.spec,
        rule,
        choice.spec.heads,
        data,
        n_kept=N_KEPT,
        n_extras=rule.n_extras(draft.n_extras_in_, data.samples.dim),
    )
    draft.heads_ = choice.spec.heads
    draft.tokens_ = rule
    draft.n_heads_ = recipe.heads.n_heads
    draft.candidates_ = choice.candidates
    return recipe


def _flush(draft: Any) -> None:
    """Add all that is pending; the first time, settle what is automatic.

    To be called on a draft.
    """
    stream = draft.stream_
    if stream.recipe is None and stream.pending:
        recipe = settle(draft, stream.first_samples())
        stream = stream.with_recipe(recipe, recipe.empty())
    draft.stream_ = stream.flushed()


# ---- solving -------------------------------------------------------------------------------------


def solve_stream(
    draft: Any, error_sums: Callable[[PrincipalAxes, np.ndarray], np.ndarray] | None = None
) -> None:
    """Solve for the values from the sums, at the penalty of least loss. To be called on a draft.

    The squared error is that of leave-one-out if ``error_sums`` can compute it by another pass over
    the samples, and otherwise that of generalised cross-validation. The log-loss is that of the
    samples that were kept.
    """
    with explained_memory_errors_of_sums(n_features_of(draft)):
        _flush(draft)
        solved, axes = _solve_sums(draft, error_sums)
        _store_solution(draft, solved, axes)


def n_features_of(draft: Any) -> int:
    """p of a stream; without extras as long as its first samples are pending."""
    stream = draft.stream_
    if stream.recipe is not None:
        return int(stream.recipe.n_columns)
    return int(stream.spec.n_heads) * (draft.n_features_in_ + 1)


def _solve_sums(
    draft: Any, error_sums: Callable[[PrincipalAxes, np.ndarray], np.ndarray] | None
) -> tuple[LayerFit, PrincipalAxes]:
    """The values at the penalty of least loss, and the axes of the sums."""
    stream = draft.stream_
    if stream.recipe is None or stream.sums is None:
        raise ValueError(
            "a fit needs one sample of positive weight, and two to choose a penalty: got 0. Give "
            "more batches, or one fixed number as `alpha`."
        )

    # extras are standardised among the sums; with their scale the rule for tokens is known
    spec = draft.layer_spec(None)
    recipe, moments, axes = stream.recipe.settle(stream.sums.moments, spec.extras_scale)
    sums = LayerSums(moments=moments, kept=stream.sums.kept)
    if recipe is not stream.recipe:
        draft.stream_ = stream.with_recipe(recipe, sums)
    draft.tokens_ = recipe.rule

    # the penalties to choose from, and the leave-one-out errors at each
    alphas = spec.alphas
    if alphas is None:
        alphas = axes.default_alphas()
    squared_errors = None
    if error_sums is not None:
        squared_errors = error_sums(axes, alphas)

    # the values at the best penalty
    calibration_samples = None
    if spec.criterion == "log_loss":
        calibration_samples = sums.kept
    return recipe.fit(axes, alphas, squared_errors, calibration_samples), axes


def _store_solution(draft: Any, solved: LayerFit, axes: PrincipalAxes) -> None:
    """Fitted attributes of a fit from sums. To be called on a draft."""
    layer = solved.layer
    assert isinstance(layer, FiniteLayer)
    stream = draft.stream_
    draft.layer_ = layer
    draft.alpha_ = solved.ridge.alpha
    draft.solver_ = solved.route
    draft.selection_ = Selection.of(solved.ridge)
    if draft.selection_.method == "loo":
        draft.loo_error_ = solved.ridge.error
    draft.values_ = without_output_axis(layer.values, stream.form.single)

    # numbers: leave-one-out errors of the samples that were kept, for intervals
    kept = stream.sums.kept
    if not is_classifier(draft):
        draft.intercept_ = layer.intercept
        if stream.form.single:
            draft.intercept_ = float(layer.intercept[0])
        if kept.sets is not None:
            predictions = stream.recipe.left_out(axes, kept, solved.ridge.alpha)
            draft.jackknife_errors_ = some_errors(np.abs(kept.columns - predictions))
        return

    # labels: a temperature from their leave-one-out scores, and errors for label sets
    draft.intercept_ = layer.intercept
    draft.loss_ = "squared_error"
    scores = stream.recipe.left_out(axes, kept, solved.ridge.alpha)
    draft.temperature_ = fit_temperature(
        scores_per_class(scores), labels_of(kept.columns), kept.weights
    )
    calibration = Calibration(draft.temperature_)
    draft.jackknife_errors_ = some_errors(calibration.label_errors(scores, kept.columns))


def ensure_solved(model: Any) -> Any:
    """Solve for the values if samples came since the last time; other threads wait meanwhile.

    Returns
    -------
    A twin of the model right then: samples may have come before the caller reads the model.
    """
    with change(model) as draft:
        if "stream_" in vars(draft) and "layer_" not in vars(draft):
            solve_stream(draft)
    return draft


def snapshot(model: Any) -> Any:
    """The model with its values, as it is now: what comes later does not show in it.

    The model itself unless samples are added to it. Sums are not part of a snapshot.
    """
    if "stream_" not in vars(model):
        return model
    twin = twin_of(model)
    if "layer_" not in vars(twin):
        twin = ensure_solved(model)
    vars(twin).pop("stream_", None)
    return twin


def solved_twin(model: Any) -> Any:
    """A twin with everything solved for and with its sums, all of one moment: what a file holds."""
    if "stream_" not in vars(model):
        return model
    return ensure_solved(model)


def forget(model: Any) -> None:
    """Start over: drop the sums, and everything that was solved from them."""
    of_a_whole_fit = ("training_", "class_has_weight_", "key_selection_")
    for name in ("stream_", "n_samples_seen_", *of_a_whole_fit, *SETTLED, *SOLVED):
        vars(model).pop(name, None)


def adopt(model: Any, draft: Any) -> None:
    """Make a model what a draft of it has become, instead of any fit before."""
    with change(model) as current:
        forget(current)
        vars(current).update(vars(draft))


def resume_stream(model: Any, sums: LayerSums) -> None:
    """Go on from sums that were saved, of a model whose layer was solved from them."""
    layer = model.layer_
    spec = model.layer_spec(None)
    recipe = LayerRecipe(
        heads=layer.heads,
        rule=model.tokens_,
        n_outputs=len(layer.intercept),
        n_kept=sums.kept.limit,
        activation=layer.activation,
        dtype=layer.dtype,
        fit_intercept=sums.moments.fit_intercept,  # that of the fit, whatever the parameter is now
        memory_budget=spec.memory_budget,
        n_extras=model.tokens_.n_extras(model.n_extras_in_, model.n_features_in_),
    )

    # what samples are like is known from those that were kept, if any were
    kind = None
    pairs = None
    if sums.kept.sets is not None:
        kind = type(sums.kept.sets)
        pairs = sums.kept.sets.sets.pairs
    form = SampleForm(
        kind=kind,
        pairs=pairs,
        n_outputs=recipe.n_outputs,
        single=bool(model.single_output_),
    )
    model.stream_ = Stream(form=form, spec=None).with_recipe(recipe, sums)
