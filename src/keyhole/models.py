"""`save` and `load`: a model as one safetensors file with a JSON description.

Nothing in a file is ever executed.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import __version__
from keyhole._checks import check_choice
from keyhole.attention.activations import check_activation
from keyhole.attention.heads import HeadDraw
from keyhole.attention.learned import UnfittedHeads
from keyhole.choose import Candidate
from keyhole.data.schema import Coding, Schema
from keyhole.data.sets import PooledSets, SampleBatch, SetBatch
from keyhole.data.tokens import TokenRule
from keyhole.estimators.attention import AttentionClassifier, AttentionRegressor
from keyhole.estimators.batches import N_KEPT, resume_stream, solved_twin
from keyhole.estimators.features import AttentionFeatures
from keyhole.estimators.norm_ball import NormBallClassifier, NormBallRegressor
from keyhole.estimators.selection import Selection
from keyhole.estimators.uncertainty import TrainingRecord
from keyhole.key_selection import KeySelection
from keyhole.packing import (
    PRECISIONS,
    Packer,
    Unpacker,
    check_array,
    damaged,
    heads_fit,
    known,
    newer_writer,
    read_container,
    refuse_if,
    write_container,
)
from keyhole.solvers.layers import FiniteLayer, KernelLayer, PrunedLayer
from keyhole.streaming import LayerSums
from keyhole.training import TrainingSet

ESTIMATORS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        AttentionRegressor,
        AttentionClassifier,
        AttentionFeatures,
        NormBallRegressor,
        NormBallClassifier,
    )
}
_NOTE = re.compile(r"[a-z][a-z0-9_]{0,60}_")  # names of fitted attributes
LARGEST_TRIAL = 4_000_000  # entries of a head drawn while loading
_BUILT = {
    "layer_",
    "values_",
    "drawn_heads_",
    "n_heads_",
    "dual_coef_",
    "active_heads_",
    "stream_",
    "training_",
}
"""Attributes that are parts of the layer: stored once, as the layer."""


_OF_SAMPLES = {"loo_predictions_", "loo_decision_"}
"""Attributes of the size of the training set that no prediction needs."""
UNREADABLE = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)
"""What building an estimator from a description may raise."""


@dataclass(frozen=True)
class SavedModel:
    """What a file holds: a fitted estimator and the schema of its input."""

    estimator: Any
    schema: Schema


def save(
    estimator: Any,
    path: Any,
    *,
    keep: str = "all",
    schema: Schema | None = None,
    overwrite: bool = False,
) -> None:
    """Save a fitted estimator as one file: arrays as safetensors, all else as JSON in its header.

    Parameters
    ----------
    estimator : a fitted estimator of keyhole
        It may have finitely or infinitely many heads, and any head distribution of keyhole.
    path : str or Path
        The file appears whole or not at all.
    keep : "all" or "predict"
        "all" keeps what later calls need. For a model fitted in batches these are its sums, p × p
        numbers: ``partial_fit`` continues exactly where it stopped. For any other model these are
        the training samples: intervals and novelty need leave-one-out fits. "predict" leaves out
        the sums, the training samples of finitely many heads, and leave-one-out predictions. A
        model loaded from such a file predicts, has intervals of the plain jackknife only, and
        cannot continue with ``partial_fit``.
    schema : Schema, optional
        What `read_table` learned about columns (``data.schema``), to read tables the same way when
        they are predicted; made from the estimator if not given.
    overwrite : bool
        Whether a file of that name may be replaced.

    Notes
    -----
    Heads are stored as head distribution and seed, not as matrices. With infinitely many heads the
    training sets are part of the model, and so of the file. A model fitted on a device is loaded as
    one that predicts by NumPy, with the same numbers up to rounding. A generator given as
    ``random_state`` is stored as the seed that was drawn from it, and a callback of a head
    distribution is not stored. What could not be loaded again is not written.

    Examples
    --------
    >>> import tempfile
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(60, n_keys=4, dim=3, seed=0)
    >>> model = kh.AttentionRegressor(20, random_state=0).fit(
    ...     sets, kh.targets.TokenPower(2, dim=3)(sets)
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kh.save(model, f"{folder}/model.keyhole")
    ...     same = kh.load(f"{folder}/model.keyhole")
    >>> bool((same.predict(sets) == model.predict(sets)).all())
    True
    """
    # refuse what is no fitted estimator of ours, and what is no name of a file
    kind = type(estimator).__name__
    path = Path(path)
    check_choice(keep, "keep", ("all", "predict"))
    if not known(ESTIMATORS, estimator):
        raise TypeError(
            f"`estimator` must be one of keyhole's, {', '.join(ESTIMATORS)}: got {kind}."
        )
    if not hasattr(estimator, "n_features_in_"):
        raise ValueError(
            f"`estimator` must be fitted before it is saved: this {kind} is not. Call fit first."
        )
    if path.is_dir():
        raise ValueError(
            f"`path` must name a file: {path.name!r} is a folder. Add a file name, such as "
            "model.keyhole."
        )
    if schema is None:
        names = tuple(str(name) for name in getattr(estimator, "feature_names_in_", ()))
        schema = Schema(int(estimator.n_features_in_), bool(estimator.has_query_), names)

    # describe it: parameters, layer, fitted attributes, schema
    estimator = solved_twin(estimator)
    packer = Packer()
    parameters = {name: packer.pack(value, name) for name, value in _parameters(estimator).items()}
    layer = _pack_layer(packer, estimator)
    unsaved = _BUILT if keep == "all" else _BUILT | _OF_SAMPLES
    fitted = {
        name: packer.pack(value, name)
        for name, value in vars(estimator).items()
        if _NOTE.fullmatch(name) and name not in unsaved
    }
    document = {
        "keyhole": __version__,
        "estimator": kind,
        "parameters": parameters,
        "layer": layer,
        "fitted": fitted,
        "schema": {
            "names": list(schema.names),
            "target": schema.target,
            "columns": [list(pair) for pair in schema.columns],
            "codings": [coding.as_list() for coding in schema.codings],
        },
    }

    # what later batches, or leave-one-out fits, are made from
    if keep == "all":
        stream = vars(estimator).get("stream_")
        if stream is not None:
            document["stream"] = packer.pack(stream.sums, "sums")
        training = vars(estimator).get("training_")
        if training is not None:
            document["training"] = packer.pack(training.data, "training samples")
            document["training_intercept"] = training.spec.fit_intercept

    # load it from memory before anything is written
    try:
        _restore(json.loads(json.dumps(document)), Unpacker(packer.arrays))
    except UNREADABLE as error:
        raise ValueError(
            f"a model is saved only if it can be loaded again: this {kind} has {_words(error)}. "
            "Were fitted attributes changed? Fit it anew."
        ) from None
    write_container(path, document, packer.arrays, overwrite=overwrite)


def load(path: Any, *, return_schema: bool = False) -> Any:
    """Load an estimator that `save` wrote; its predictions are the same to the last bit.

    Parameters
    ----------
    path : str or Path
    return_schema : bool
        Whether to return (estimator, schema): ``schema.read(table)`` makes sets of a table as the
        training table was read.

    Raises
    ------
    ValueError
        If the file is not a complete and unchanged model file of a version we know. Nothing in it
        is executed, and nothing is allocated that the file is too small to fill.
    """
    saved = read_model(path)
    if return_schema:
        return saved.estimator, saved.schema
    return saved.estimator


def read_model(path: Any) -> SavedModel:
    """Load an estimator together with the schema of its input. See `load`."""
    path = Path(path)
    refuse_if(path.is_dir(), f"`path` must name a model file: {path.name!r} is a folder.")
    document, arrays = read_container(path)
    try:
        return _restore(document, Unpacker(arrays))
    except UNREADABLE as error:
        writer = newer_writer(document)
        if writer is not None:
            raise ValueError(
                f"a model file is read by the keyhole that wrote it, or a newer one: {path.name!r} "
                f"was written by {writer}, and this is keyhole {__version__}, to which it has "
                f"{_words(error)}. Install {writer}, or a newer one."
            ) from None
        raise damaged(
            path, "a model file describes an estimator that this keyhole knows", _words(error)
        ) from None


def _words(error: BaseException) -> str:
    """An error in words that follow "it has"; a KeyError names what is missing."""
    words = f"no {error}" if isinstance(error, KeyError) else str(error)
    return words[:300]


def _parameters(estimator: Any) -> dict[str, Any]:
    """The parameters, with the seed that a generator drew and a dtype by its name."""
    # the seed: that of the heads of the layer, or of those that features are made with
    parameters = dict(estimator.get_params(deep=False))
    if not isinstance(parameters["random_state"], (int, type(None))):
        heads = getattr(estimator, "drawn_heads_", None)
        if heads is None:
            heads = getattr(getattr(estimator, "layer_", None), "heads", None)
        parameters["random_state"] = None if heads is None else heads.seed

    # NumPy's types are no JSON
    if not isinstance(parameters["dtype"], str):
        parameters["dtype"] = np.dtype(parameters["dtype"]).name
    return parameters


def _pack_layer(packer: Packer, estimator: Any) -> Any:
    """JSON of the layer of an estimator, or of the heads of one that has features only."""
    if isinstance(estimator, AttentionFeatures):
        return packer.pack(estimator.drawn_heads_, "drawn_heads_")
    # of a norm ball: which heads are active, and the values of all heads, zero for the others
    layer = estimator.layer_
    if isinstance(layer, PrunedLayer):
        return {
            "heads": packer.pack(layer.heads, "drawn_heads_"),
            "active": packer.pack(layer.active, "active_heads_"),
            "values": packer.pack(estimator.values_, "values_"),
            "intercept": packer.pack(layer.intercept, "intercept_"),
            "extras_values": packer.pack(layer.extras_values, "extras_values"),
            "activation": layer.activation,
            "dtype": layer.dtype,
        }
    return packer.pack(layer, "layer_")


def _restore(document: dict[str, Any], unpacker: Unpacker) -> SavedModel:
    """The estimator and the schema that a document describes, every part checked."""
    estimator = _with_parameters(document, unpacker)

    # attributes and layer, each checked on its own
    for name, value in document["fitted"].items():
        refuse_if(not _NOTE.fullmatch(name) or name in _BUILT, f"a fitted attribute {name!r:.60}")
        setattr(estimator, name, unpacker.unpack(value))
    _check_dimensions(estimator)
    _attach_layer(estimator, document["layer"], unpacker)

    # then attributes and layer against each other
    _check_extras(estimator)
    _check_fitted(estimator, list(document["fitted"]))

    # sums to go on with, and samples of the leave-one-out fits
    if "stream" in document:
        _resume(estimator, unpacker.unpack(document["stream"]))
    if "training" in document:
        training = unpacker.unpack(document["training"])
        _check_training(estimator, training)
        fit_intercept = document["training_intercept"]
        refuse_if(type(fit_intercept) is not bool, "no word about the intercept of its fit")
        estimator.training_ = _training_record(estimator, training, fit_intercept)
    return SavedModel(estimator=estimator, schema=_schema_of(estimator, document["schema"]))


def _with_parameters(document: dict[str, Any], unpacker: Unpacker) -> Any:
    """An unfitted estimator with the parameters of a document."""
    kind = ESTIMATORS[document["estimator"]]
    parameters = {
        str(name): unpacker.unpack(value) for name, value in document["parameters"].items()
    }
    estimator = kind(**parameters)  # an unknown parameter is a TypeError
    try:
        estimator._validate_params()
        _check_unfitted_heads(estimator.heads)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a parameter that no fit takes ({error})") from None
    return estimator


def _check_dimensions(estimator: Any) -> None:
    """Raise unless the dimensions of tokens, queries and extras are numbers that agree."""
    # tokens
    dim = estimator.n_features_in_
    has_query = estimator.has_query_
    if type(dim) is not int or type(has_query) is not bool:
        raise ValueError("no token dimension, or no word about queries")
    refuse_if(dim < 1, f"tokens of dimension {dim}")

    # queries: of dimension zero where there are none
    query_dim = estimator.n_query_features_in_
    if type(query_dim) is not int or query_dim < 0 or (query_dim > 0) != has_query:
        raise ValueError(f"queries of dimension {query_dim!r:.40}")

    # extras
    n_extras = estimator.n_extras_in_
    refuse_if(type(n_extras) is not int or n_extras < 0, f"{n_extras!r:.40} columns of extras")


def _check_extras(estimator: Any) -> None:
    """Raise unless the layer has values, and the rule a centre, for every column of extras."""
    if isinstance(estimator, AttentionFeatures):
        return
    n_extras = estimator.tokens_.n_extras(estimator.n_extras_in_, estimator.n_features_in_)
    for part in (estimator.layer_.extras_values, estimator.tokens_.extras_centre):
        length = 0 if part is None else len(part)
        if length != n_extras:
            raise ValueError(f"values or a rule that do not fit {n_extras} columns of extras")


def _schema_of(estimator: Any, described: Any) -> Schema:
    """The schema of the input of an estimator, from a description that may be anything."""
    schema = Schema(
        estimator.n_features_in_,
        estimator.has_query_,
        tuple(str(name) for name in described["names"]),
        str(described["target"]),
        tuple((str(option), _option(value)) for option, value in described["columns"]),
        tuple(Coding.of_list(coding) for coding in described["codings"]),
    )
    coded_columns = {coding.column for coding in schema.codings}
    refuse_if(len(coded_columns) < len(schema.codings), "two codings of one column")
    return schema


def _check_unfitted_heads(distribution: Any) -> None:
    """Raise for a parameter of a learned head distribution that is of a wrong kind.

    Which numbers it takes is checked when it is fitted, with the samples at hand.
    """
    if not isinstance(distribution, UnfittedHeads):
        return
    # a parameter is of the kind of its default; None, and arrays, only where they are named here
    for name, parameter in inspect.signature(type(distribution).__init__).parameters.items():
        value = getattr(distribution, name, None)
        default = parameter.default
        if name == "pairs":
            fits = value is None or _is_integers(value, n_axes=2)
        elif isinstance(default, tuple):
            items = list(value) if isinstance(value, (tuple, list, np.ndarray)) else []
            fits = len(items) > 0 and all(np.ndim(item) == 0 for item in items)
        elif isinstance(default, (bool, int, float, str)):
            fits = isinstance(value, (bool, int, float, str, np.number, np.bool_))
        else:
            fits = True
        if not fits:
            raise TypeError(
                f"`{name}` of {type(distribution).__name__} must be like {default!r}: got "
                f"{value!r:.60}"
            )


def _is_integers(value: Any, n_axes: int) -> bool:
    """Whether ``value`` is an array, or sequences, of integers with so many axes."""
    try:
        array = np.asarray(value)
    except ValueError:
        return False
    return array.dtype.kind in "iu" and array.ndim == n_axes


def _option(value: Any) -> Any:
    """How a table was read: a name, names, or a number."""
    if isinstance(value, list) and value and all(isinstance(name, str) for name in value):
        return tuple(value)
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        raise ValueError(f"an option {value!r:.60} for reading tables")
    return value


def _attach_layer(estimator: Any, described: Any, unpacker: Unpacker) -> None:
    """Build the layer, or the heads of an estimator that has features only, and check it."""
    # features have heads and no values
    if isinstance(estimator, AttentionFeatures):
        heads = unpacker.unpack(described)
        _attach_hops(estimator, heads)
        _check_heads(heads, estimator)
        check_activation(estimator.activation_)
        check_choice(estimator.dtype_, "dtype", PRECISIONS)
        estimator.drawn_heads_ = heads
        return

    # a norm ball prunes heads
    if isinstance(estimator, (NormBallRegressor, NormBallClassifier)):
        parts = {name: unpacker.unpack(value) for name, value in described.items()}
        _attach_pruned(estimator, parts)
        return

    # ridge: heads with values, or the kernel of infinitely many heads with dual coefficients
    layer = unpacker.unpack(described)
    is_single = _is_single(estimator)
    estimator.layer_ = layer
    _attach_hops(estimator, getattr(layer, "heads", layer))
    if isinstance(layer, FiniteLayer):
        _check_heads(layer.heads, estimator)
        estimator.n_heads_ = layer.heads.n_heads
        estimator.values_ = layer.values[..., 0] if is_single else layer.values
    elif isinstance(layer, KernelLayer):
        _check_training_sets(estimator, layer.sets)
        if not heads_fit(layer.distribution, (layer.sets.query_dim + 1, layer.sets.dim + 1)):
            raise ValueError(
                f"a kernel that does not fit tokens of dimension {estimator.n_features_in_}"
            )
        estimator.n_heads_ = math.inf
        estimator.dual_coef_ = layer.dual[..., 0] if is_single else layer.dual
    else:
        raise ValueError("no layer")


def _resume(estimator: Any, sums: Any) -> None:
    """Attach the sums of a model fitted in batches, checked against its layer."""
    takes_batches = isinstance(estimator, (AttentionRegressor, AttentionClassifier))
    if not isinstance(sums, LayerSums) or not takes_batches:
        raise ValueError("sums that are none, or of an estimator that has none")
    layer = estimator.layer_
    moments = sums.moments
    kept = sums.kept
    n_outputs = len(layer.intercept)

    # moments: as many features and outputs as the layer, of no more samples than were seen
    n_columns = -1
    if isinstance(layer, FiniteLayer):
        n_extras = estimator.tokens_.n_extras(estimator.n_extras_in_, estimator.n_features_in_)
        n_columns = layer.values[..., 0].size + n_extras
    if moments.cross.shape != (n_columns, n_outputs):
        raise ValueError(f"sums of shape {moments.cross.shape}, which are not those of the layer")
    if not moments.count <= estimator.n_samples_seen_:
        raise ValueError(
            f"sums over {moments.count} samples, of which {estimator.n_samples_seen_} were seen"
        )

    # samples kept
    is_classifier = isinstance(estimator, AttentionClassifier)
    if kept.limit != N_KEPT or kept.columns.shape[1] != n_outputs:
        raise ValueError("samples kept that are not those of the layer")
    if is_classifier and (kept.sets is None or not (np.abs(kept.columns) == 1).all()):
        raise ValueError("no samples to calibrate on, or of other labels")
    if kept.sets is not None:
        _check_input(estimator, kept.sets, "samples to calibrate on")
    resume_stream(estimator, sums)


def _training_record(estimator: Any, data: TrainingSet, fit_intercept: bool) -> TrainingRecord:
    """What the leave-one-out fits of a loaded model are made from."""
    layer = estimator.layer_
    spec = replace(
        estimator.layer_spec(None),
        heads=estimator.heads_,
        n_heads=estimator.n_heads_,
        activation=layer.activation,
        fit_intercept=fit_intercept,
    )
    if isinstance(estimator, AttentionClassifier):
        spec = replace(spec, loss=estimator.loss_)
    if isinstance(layer, FiniteLayer):
        spec = replace(spec, seed=layer.heads.seed)
    return TrainingRecord(data, spec, estimator.tokens_, float(estimator.alpha_))


def _check_input(estimator: Any, samples: SampleBatch, what: str) -> None:
    """Samples must be such as the model takes."""
    refuse_if(samples.dim != estimator.n_features_in_, f"{what} of another dimension")
    query_dim = 0 if samples.query is None else samples.query_dim
    if query_dim != estimator.n_query_features_in_:
        raise ValueError(f"{what} with queries and training sets without, or the other way round")
    n_extras = 0 if samples.extras is None else samples.extras.shape[1]
    if n_extras != estimator.n_extras_in_:
        raise ValueError(f"{what} with other extras than the training sets")


def _check_training(estimator: Any, training: Any) -> None:
    """Samples that the leave-one-out fits are made from, checked against the layer."""
    has_samples = isinstance(estimator, (AttentionRegressor, AttentionClassifier))
    if not isinstance(training, TrainingSet) or not has_samples or estimator.solver_ == "cg":
        raise ValueError("training samples that are none, or of a model that has none")
    _check_input(estimator, training.samples, "training samples")
    if training.outputs.shape[1] != len(estimator.layer_.intercept):
        raise ValueError("training samples with other outputs than the layer")
    if isinstance(estimator, AttentionClassifier) and not (np.abs(training.outputs) == 1).all():
        raise ValueError("training samples of other labels")


def _check_training_sets(estimator: Any, sets: SetBatch | PooledSets) -> None:
    """Training sets must be what the rule for tokens makes of new ones.

    Otherwise a kernel cannot compare the two.
    """
    rule = estimator.tokens_
    refuse_if(not isinstance(rule, TokenRule), "no rule for tokens")
    base = sets.unpooled
    plain = base.is_plain
    refuse_if(base.extras is not None, "training sets with extras, whose part is in the values")
    refuse_if(sets.dim != estimator.n_features_in_, "a kernel that does not fit the tokens")

    has_each_query = plain and rule.query == "each"
    same_pooling = sets.pooling == rule.pooling_of_sets and sets.each == has_each_query
    # hops extend the query that is given, or the constant one
    uses_given_query = estimator.has_query_ and rule.query == "given"
    has_query = rule.query == "mean" or bool(rule.hops) or uses_given_query
    same_query = base.query_dim == _query_dim(estimator) and (base.query is not None) == has_query
    rule_takes_groups = plain or rule.query == "given"
    if not same_pooling or not same_query or not rule_takes_groups:
        raise ValueError("training sets pooled or queried otherwise than new ones")


def _attach_pruned(estimator: Any, parts: dict[str, Any]) -> None:
    """Build the layer of a norm-ball estimator, of which few heads are active, and check it."""
    heads = parts["heads"]
    active = parts["active"]
    values = parts["values"]
    intercept = parts["intercept"]
    extras_values = parts.get("extras_values")
    _attach_hops(estimator, heads)
    _check_heads(heads, estimator)
    activation = check_activation(parts["activation"])
    dtype = check_choice(parts["dtype"], "dtype", PRECISIONS)
    for array in (active, values, intercept):
        if not isinstance(array, np.ndarray) or not np.isfinite(array).all():
            raise ValueError("a layer without values")

    # values (M, D) or (M, D, t)
    shape = (heads.n_heads, heads.dim + 1)
    has_wrong_axes = values.shape[:2] != shape or values.ndim > 3 or 0 in values.shape
    if has_wrong_axes or values.dtype.kind != "f":
        raise ValueError(
            f"values of shape {values.shape} for {heads.n_heads} heads of width {heads.dim + 1}"
        )
    values_of_outputs = values.reshape(*shape, -1)

    # active heads are some of them in order, and the values of all others are zero
    if active.ndim != 1 or active.dtype.kind != "i" or (np.diff(active) <= 0).any():
        raise ValueError("active heads that are no increasing numbers")
    refuse_if(
        len(active) and not 0 <= active[0] <= active[-1] < heads.n_heads,
        "active heads that do not exist",
    )
    inactive_values = np.delete(values_of_outputs, active, axis=0)
    refuse_if(inactive_values.any(), "values of heads that are not active")

    if intercept.shape != values_of_outputs.shape[2:] or intercept.dtype.kind != "f":
        raise ValueError("an intercept that does not fit the values")
    if extras_values is not None:
        check_array(extras_values, 2, "extras_values")
        refuse_if(
            extras_values.shape[1:] != intercept.shape,
            "values of extras that do not fit the intercept",
        )
    estimator.active_heads_ = active
    estimator.values_ = values
    estimator.layer_ = PrunedLayer(
        heads=heads,
        active=active,
        values=values_of_outputs[active],
        intercept=intercept,
        activation=activation,
        dtype=dtype,
        extras_values=extras_values,
    )


def _attach_hops(estimator: Any, heads: Any) -> None:
    """Give the rule for tokens the hops of the head distribution, where a file holds them."""
    refuse_if(not isinstance(estimator.tokens_, TokenRule), "no rule for tokens")
    estimator.tokens_ = estimator.tokens_.with_hops_of(getattr(heads, "distribution", None))


def _query_dim(estimator: Any) -> int:
    """The dimension of the queries that the layer sees.

    They are given, or made of keys, and extended by what hops find.
    """
    rule = estimator.tokens_
    dim = int(estimator.n_features_in_)
    query_dim = dim
    if estimator.has_query_ and rule.query == "given":
        query_dim = int(estimator.n_query_features_in_)
    n_patterns = sum(len(hop) for hop in rule.hops)
    return query_dim + n_patterns * dim


def _distribution_of(estimator: Any) -> Any:
    """The head distribution that a model draws from, or has the kernel of."""
    if isinstance(estimator, AttentionFeatures):
        return estimator.drawn_heads_.distribution
    layer = estimator.layer_
    if isinstance(layer, KernelLayer):
        return layer.distribution
    return layer.heads.distribution


def _check_heads(heads: Any, estimator: Any) -> None:
    """Raise unless heads fit the tokens and can be drawn."""
    shape = (_query_dim(estimator) + 1, estimator.n_features_in_ + 1)
    fits = (
        isinstance(heads, HeadDraw)
        and (heads.query_dim + 1, heads.dim + 1) == shape
        and heads_fit(heads.distribution, shape)
    )
    if not fits:
        raise ValueError(f"heads that do not fit tokens of dimension {estimator.n_features_in_}")
    refuse_if(
        isinstance(heads.distribution, UnfittedHeads),
        "heads of a head distribution that was never fitted",
    )
    # a head distribution that cannot be drawn from says so; a small file must not make us draw a
    # large matrix
    rank = getattr(heads.distribution, "rank", 0)
    is_small = math.prod(shape) + sum(shape) * rank <= LARGEST_TRIAL
    refuse_if(is_small and not np.isfinite(heads.block(0, 1)).all(), "heads that are not finite")


def _is_single(estimator: Any) -> bool:
    """Whether a model has one output; a classifier has one for two labels."""
    if isinstance(estimator, AttentionClassifier):
        estimator.single_output_ = len(estimator.classes_) == 2
    single = estimator.single_output_
    refuse_if(type(single) is not bool, "no word about whether there is one output")
    return bool(single)


def _check_labels(estimator: Any) -> None:
    """Raise unless labels are sorted and all different, with as many scores as they need."""
    classes = estimator.classes_
    refuse_if(
        not isinstance(classes, np.ndarray) or classes.ndim != 1 or len(classes) < 2,
        "no labels to choose from",
    )
    refuse_if(
        classes.dtype.kind == "f" and not np.isfinite(classes).all(), "labels that are not finite"
    )
    labels = classes.tolist()
    refuse_if(labels != sorted(set(labels)), "labels that are not sorted, or not all different")
    n_scores = len(estimator.layer_.intercept)
    n_scores_needed = 1 if len(labels) == 2 else len(labels)
    refuse_if(n_scores != n_scores_needed, f"{n_scores} scores for {len(labels)} labels")


def _check_fitted(estimator: Any, names: Collection[str]) -> None:
    """Every fitted attribute that the file names, on its own and against the layer."""
    required = {"n_features_in_", "has_query_"}
    if isinstance(estimator, (AttentionRegressor, AttentionClassifier)):
        required |= {"heads_", "tokens_", "alpha_", "solver_", "selection_", "intercept_"}
    if isinstance(estimator, (AttentionClassifier, NormBallClassifier)):
        required |= {"classes_"}
        _check_labels(estimator)
    if isinstance(estimator, AttentionClassifier):
        required |= {"temperature_"}
    missing = required - set(names)
    refuse_if(missing, f"no {', '.join(sorted(missing))}")
    for name in names:
        if not _fits(name, getattr(estimator, name), estimator):
            raise ValueError(f"{name} that is no such thing, {getattr(estimator, name)!r:.60}")


def _fits(name: str, value: Any, estimator: Any) -> bool:
    """Whether a fitted attribute has the type, the shape and the range that it has after a fit."""
    match name:
        case (
            "n_features_in_"
            | "n_query_features_in_"
            | "n_extras_in_"
            | "has_query_"
            | "single_output_"
            | "classes_"
            | "activation_"
            | "dtype_"
        ):
            return True  # checked before the layer, or with it
        case "has_set_groups_":
            return type(value) is bool
        case "class_has_weight_":
            return _is_array(value, "b", estimator.classes_.shape) and bool(value.sum() >= 2)
        case "loss_":
            if isinstance(estimator, AttentionClassifier):
                return value in ("squared_error", "log_loss")
            return isinstance(estimator, NormBallClassifier) and value in ("logistic", "hinge")
        case "feature_names_in_":
            return _is_array(value, "OU", (estimator.n_features_in_,))
        case "heads_":
            return _same_distribution(value, _distribution_of(estimator))
        case "tokens_":
            return isinstance(value, TokenRule) and _rule_fits(value, estimator)
        case "key_selection_":
            return isinstance(value, KeySelection) and _selection_fits(value, estimator)
        case "intercept_":
            intercept = estimator.layer_.intercept
            is_regressor = not hasattr(estimator, "classes_")
            if is_regressor and getattr(estimator, "single_output_", False):
                is_number = isinstance(value, float) and intercept.shape == (1,)
                return is_number and value == float(intercept[0])
            return _is_array(value, "f", intercept.shape) and np.array_equal(value, intercept)
        case "alpha_" | "temperature_":
            return isinstance(value, (float, np.floating)) and bool(0 <= value < math.inf)
        case "group_radius_" | "ball_radius_":
            return isinstance(value, (float, np.floating)) and bool(value >= 0)
        case "loo_error_" | "residual_" | "objective_" | "duality_gap_":
            # NaN where there was nothing to leave out
            return isinstance(value, (float, np.floating))
        case "n_iter_" | "n_samples_seen_" | "n_held_out_":
            is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            return is_integer and bool(value >= 0)
        case "solver_":
            if isinstance(estimator.layer_, KernelLayer):
                return bool(value == "kernel")
            return value in ("primal", "dual", "cg")
        case "selection_":
            return isinstance(value, Selection)
        case "loo_predictions_" | "loo_decision_":
            if _is_single(estimator):
                return _is_array(value, "f", (None,))
            return _is_array(value, "f", (None, len(estimator.layer_.intercept)))
        case "jackknife_errors_":
            is_classifier = hasattr(estimator, "classes_")
            n_errors = 1 if is_classifier else len(estimator.layer_.intercept)
            return _is_array(value, "f", (None, n_errors)) and bool((value >= 0).all())
        case "candidates_":
            return isinstance(value, tuple) and all(isinstance(v, Candidate) for v in value)
        case "cv_results_":
            is_dict = isinstance(value, dict)
            return is_dict and all(isinstance(column, np.ndarray) for column in value.values())
    # what somebody else noted, as long as it hides nothing of ours
    return not hasattr(type(estimator), name)


def _rule_fits(rule: TokenRule, estimator: Any) -> bool:
    """Whether the centres of a rule are of the dimensions of keys and of queries."""
    if rule.centre is None:
        return True
    if len(rule.centre) != estimator.n_features_in_:
        return False
    if rule.query != "given" or not estimator.has_query_:
        return True
    if rule.query_centre is None:  # queries are centred as keys are
        return bool(estimator.n_query_features_in_ == estimator.n_features_in_)
    return bool(estimator.n_query_features_in_ == len(rule.query_centre))


def _selection_fits(selection: KeySelection, estimator: Any) -> bool:
    """Whether the scoring layer of a selection of keys takes the keys and queries of a model."""
    query_dim = estimator.n_features_in_
    if estimator.has_query_:
        query_dim = estimator.n_query_features_in_
    heads = selection.layer.heads
    same_dimensions = heads.dim == estimator.n_features_in_ and heads.query_dim == query_dim
    return same_dimensions and _rule_fits(selection.standard, estimator)


def _is_array(value: Any, kinds: str, shape: tuple[int | None, ...]) -> bool:
    """Whether a value is an array of such kinds and shape; None in the shape is any length."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
        return False
    if value.ndim != len(shape):
        return False
    return all(length in (None, size) for length, size in zip(shape, value.shape, strict=True))


def _same_distribution(one: Any, other: Any) -> bool:
    """Whether the head distribution that is shown is the one that heads are drawn from."""
    if type(one) is not type(other):
        return False

    # hops are tuples of arrays
    hops = getattr(one, "hops_", ())
    other_hops = getattr(other, "hops_", ())
    if len(hops) != len(other_hops):
        return False
    if not all(np.array_equal(a, b) for a, b in zip(hops, other_hops, strict=True)):
        return False

    # everything else is equal as arrays are, and of the same type
    for name, value in vars(one).items():
        other_value = vars(other)[name]
        if name == "hops_":
            continue
        if type(value) is not type(other_value) or not np.array_equal(value, other_value):
            return False
    return True
