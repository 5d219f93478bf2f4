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
from keyhole.ball_layer import PrunedLayer
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
from keyhole.packing import (
    PRECISIONS,
    Packer,
    Unpacker,
    check_array,
    damaged,
    heads_fit,
    known,
    read_container,
    refuse_if,
    write_container,
)
from keyhole.solvers.layers import FiniteLayer, KernelLayer
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
        Fitted; finite or infinitely many heads, with any head distribution of keyhole's.
    path : str or Path
        The file appears whole or not at all.
    keep : "all" or "predict"
        "all" keeps the sums of a model fitted in batches, p × p numbers, so that ``partial_fit``
        goes on after loading exactly where it was; and the training samples of any other, so that
        its leave-one-out fits are made anew for intervals and novelty. "predict" is the lean file:
        without the sums, the training samples of finitely many heads and their leave-one-out
        predictions. A model loaded from it predicts, has intervals of the plain jackknife only, and
        refuses to go on.
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
    kind, path = type(estimator).__name__, Path(path)
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
    estimator = solved_twin(estimator)
    packer = Packer()
    document = {
        "keyhole": __version__,
        "estimator": kind,
        "parameters": {
            name: packer.pack(value, name) for name, value in _parameters(estimator).items()
        },
        "layer": _pack_layer(packer, estimator),
        "fitted": {
            name: packer.pack(value, name)
            for name, value in vars(estimator).items()
            if _NOTE.fullmatch(name)
            and name not in _BUILT
            and (keep == "all" or name not in _OF_SAMPLES)
        },
        "schema": {
            "names": list(schema.names),
            "target": schema.target,
            "columns": [list(pair) for pair in schema.columns],
            "codings": [coding.as_list() for coding in schema.codings],
        },
    }
    stream = vars(estimator).get("stream_")
    training = vars(estimator).get("training_")
    if keep == "all" and stream is not None:
        document["stream"] = packer.pack(stream.sums, "sums")
    if keep == "all" and training is not None:
        document["training"] = packer.pack(training.data, "training samples")
        document["training_intercept"] = training.spec.fit_intercept
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
        raise damaged(
            path, "a model file describes an estimator that this keyhole knows", _words(error)
        ) from None


def _words(error: BaseException) -> str:
    return f"no {error}"[:300] if isinstance(error, KeyError) else str(error)[:300]


def _parameters(estimator: Any) -> dict[str, Any]:
    parameters = dict(estimator.get_params(deep=False))
    if not isinstance(parameters["random_state"], (int, type(None))):
        heads = getattr(estimator, "drawn_heads_", None)
        if heads is None:
            heads = getattr(getattr(estimator, "layer_", None), "heads", None)
        parameters["random_state"] = None if heads is None else heads.seed
    if not isinstance(parameters["dtype"], str):
        parameters["dtype"] = np.dtype(parameters["dtype"]).name
    return parameters


def _pack_layer(packer: Packer, estimator: Any) -> Any:
    if isinstance(estimator, AttentionFeatures):
        return packer.pack(estimator.drawn_heads_, "drawn_heads_")
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
    for name, value in document["fitted"].items():
        refuse_if(not _NOTE.fullmatch(name) or name in _BUILT, f"a fitted attribute {name!r:.60}")
        setattr(estimator, name, unpacker.unpack(value))
    if type(estimator.n_features_in_) is not int or type(estimator.has_query_) is not bool:
        raise ValueError("no token dimension, or no word about queries")
    refuse_if(estimator.n_features_in_ < 1, f"tokens of dimension {estimator.n_features_in_}")
    if not hasattr(
        estimator, "n_query_features_in_"
    ):  # a file of 0.1.0: queries have the dimension of keys
        estimator.n_query_features_in_ = estimator.n_features_in_ if estimator.has_query_ else 0
    asked = estimator.n_query_features_in_
    if type(asked) is not int or (asked > 0) != estimator.has_query_ or asked < 0:
        raise ValueError(f"queries of dimension {asked!r:.40}")
    if not hasattr(estimator, "n_extras_in_"):
        estimator.n_extras_in_ = 0
    if not hasattr(estimator, "tokens_"):
        estimator.tokens_ = TokenRule("none", "given", "mean")
    # older files say this in the parameters alone
    for name in ("activation", "dtype") if isinstance(estimator, AttentionFeatures) else ():
        estimator.__dict__.setdefault(f"{name}_", getattr(estimator, name))
    if isinstance(estimator, NormBallClassifier):
        estimator.__dict__.setdefault("loss_", estimator.loss)
    count = estimator.n_extras_in_
    refuse_if(type(count) is not int or count < 0, f"{count!r:.40} columns of extras")
    _attach_layer(estimator, document["layer"], unpacker)
    if "heads_" not in vars(estimator):  # files of version 1 have it for two estimators only
        estimator.heads_ = _distribution_of(estimator)
    if isinstance(estimator, (AttentionRegressor, AttentionClassifier)):
        estimator.__dict__.setdefault("candidates_", ())
    values, rule = (
        getattr(getattr(estimator, "layer_", None), "extras_values", None),
        getattr(estimator, "tokens_", None),
    )
    centre = None if rule is None else rule.extras_centre
    if not isinstance(estimator, AttentionFeatures) and any(
        (0 if a is None else len(a)) != count for a in (values, centre)
    ):
        raise ValueError(f"values or a rule that do not fit {count} columns of extras")
    _check_fitted(estimator, list(document["fitted"]))
    if "stream" in document:
        _resume(estimator, unpacker.unpack(document["stream"]))
    if "training" in document:
        training = unpacker.unpack(document["training"])
        _check_training(estimator, training)
        fit_intercept = document.get("training_intercept", estimator.fit_intercept)
        refuse_if(type(fit_intercept) is not bool, "no word about the intercept of its fit")
        estimator.training_ = _training_record(estimator, training, fit_intercept)
    found = document["schema"]
    schema = Schema(
        estimator.n_features_in_,
        estimator.has_query_,
        tuple(str(name) for name in found["names"]),
        str(found["target"]),
        tuple((str(option), _option(value)) for option, value in found["columns"]),
        tuple(Coding.of_list(coding) for coding in found.get("codings", ())),
    )
    refuse_if(
        len({coding.column for coding in schema.codings}) < len(schema.codings),
        "two codings of one column",
    )
    return SavedModel(estimator, schema)


def _check_unfitted_heads(distribution: Any) -> None:
    """Raise for a parameter of a learned head distribution that is of a wrong kind.

    Which numbers it takes is checked when it is fitted, with the samples at hand.
    """
    if not isinstance(distribution, UnfittedHeads):
        return
    for name, parameter in inspect.signature(type(distribution).__init__).parameters.items():
        value = getattr(distribution, name, None)
        default = parameter.default
        if name == "ages":
            fits = value is None or isinstance(value, str) or _is_integers(value, n_axes=1)
        elif name == "pairs":
            fits = value is None or _is_integers(value, n_axes=2)
        elif isinstance(default, tuple):
            items = list(value) if isinstance(value, (tuple, list, np.ndarray)) else []
            fits = len(items) > 0 and all(np.ndim(item) == 0 for item in items)
        elif name == "seconds":
            fits = value is None or isinstance(value, (int, float, np.number))
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
    if isinstance(estimator, AttentionFeatures):
        heads = unpacker.unpack(described)
        _attach_hops(estimator, heads)
        _check_heads(heads, estimator)
        check_activation(estimator.activation_)
        check_choice(estimator.dtype_, "dtype", PRECISIONS)
        estimator.drawn_heads_ = heads
    elif isinstance(estimator, (NormBallRegressor, NormBallClassifier)):
        _attach_pruned(
            estimator, {name: unpacker.unpack(value) for name, value in described.items()}
        )
    else:
        layer = unpacker.unpack(described)
        single = _is_single(estimator)
        estimator.layer_ = layer
        _attach_hops(estimator, getattr(layer, "heads", layer))
        if isinstance(layer, FiniteLayer):
            _check_heads(layer.heads, estimator)
            estimator.n_heads_ = layer.heads.n_heads
            estimator.values_ = layer.values[..., 0] if single else layer.values
        elif isinstance(layer, KernelLayer):
            _check_training_sets(estimator, layer.sets)
            if not heads_fit(layer.distribution, (layer.sets.query_dim + 1, layer.sets.dim + 1)):
                raise ValueError(
                    f"a kernel that does not fit tokens of dimension {estimator.n_features_in_}"
                )
            estimator.n_heads_ = math.inf
            estimator.dual_coef_ = layer.dual[..., 0] if single else layer.dual
        else:
            raise ValueError("no layer")


def _resume(estimator: Any, sums: Any) -> None:
    """Attach the sums of a model fitted in batches, checked against its layer."""
    if not isinstance(sums, LayerSums) or not isinstance(
        estimator, (AttentionRegressor, AttentionClassifier)
    ):
        raise ValueError("sums that are none, or of an estimator that has none")
    layer, moments, kept = estimator.layer_, sums.moments, sums.kept
    labelled = isinstance(estimator, AttentionClassifier)
    n_columns = (
        layer.values[..., 0].size + estimator.n_extras_in_ if isinstance(layer, FiniteLayer) else -1
    )
    if moments.cross.shape != (n_columns, len(layer.intercept)):
        raise ValueError(f"sums of shape {moments.cross.shape}, which are not those of the layer")
    if not moments.count <= estimator.n_samples_seen_:
        raise ValueError(
            f"sums over {moments.count} samples, of which {estimator.n_samples_seen_} were seen"
        )
    limits = (N_KEPT,) if labelled else (0, N_KEPT)  # regressors of older files keep none
    if kept.limit not in limits or kept.columns.shape[1] != len(layer.intercept):
        raise ValueError("samples kept that are not those of the layer")
    if labelled and (kept.sets is None or not (np.abs(kept.columns) == 1).all()):
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
    if isinstance(layer, FiniteLayer):
        spec = replace(spec, seed=layer.heads.seed)
    return TrainingRecord(data, spec, estimator.tokens_, float(estimator.alpha_))


def _check_input(estimator: Any, samples: SampleBatch, what: str) -> None:
    """Samples must be such as the model takes."""
    refuse_if(samples.dim != estimator.n_features_in_, f"{what} of another dimension")
    if (samples.query_dim if samples.query is not None else 0) != estimator.n_query_features_in_:
        raise ValueError(f"{what} with queries and training sets without, or the other way round")
    if (0 if samples.extras is None else samples.extras.shape[1]) != estimator.n_extras_in_:
        raise ValueError(f"{what} with other extras than the training sets")


def _check_training(estimator: Any, training: Any) -> None:
    """Samples that the leave-one-out fits are made from, checked against the layer."""
    known = isinstance(training, TrainingSet) and isinstance(
        estimator, (AttentionRegressor, AttentionClassifier)
    )
    refuse_if(
        not known or estimator.solver_ == "cg",
        "training samples that are none, or of a model that has none",
    )
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
    fits = sets.pooling == rule.pooling and sets.each == (plain and rule.query == "each")
    # hops extend the query that is given, or the constant one
    has_query = (
        rule.query == "mean" or bool(rule.hops) or (estimator.has_query_ and rule.query == "given")
    )
    fits = fits and base.query_dim == _query_dim(estimator)
    if not fits or (not plain and rule.query != "given") or (base.query is not None) != has_query:
        raise ValueError("training sets pooled or queried otherwise than new ones")


def _attach_pruned(estimator: Any, parts: dict[str, Any]) -> None:
    heads, active, values, intercept = (
        parts[k] for k in ("heads", "active", "values", "intercept")
    )
    _attach_hops(estimator, heads)
    _check_heads(heads, estimator)
    activation, dtype = (
        check_activation(parts["activation"]),
        check_choice(parts["dtype"], "dtype", PRECISIONS),
    )
    if not all(
        isinstance(a, np.ndarray) and np.isfinite(a).all() for a in (active, values, intercept)
    ):
        raise ValueError("a layer without values")
    shape = (heads.n_heads, heads.dim + 1)
    if (
        values.shape[:2] != shape
        or values.ndim > 3
        or values.dtype.kind != "f"
        or 0 in values.shape
    ):
        raise ValueError(
            f"values of shape {values.shape} for {heads.n_heads} heads of width {heads.dim + 1}"
        )
    kept = values.reshape(*shape, -1)
    if active.ndim != 1 or active.dtype.kind != "i" or (np.diff(active) <= 0).any():
        raise ValueError("active heads that are no increasing numbers")
    refuse_if(
        len(active) and not 0 <= active[0] <= active[-1] < heads.n_heads,
        "active heads that do not exist",
    )
    refuse_if(np.delete(kept, active, axis=0).any(), "values of heads that are not active")
    if intercept.shape != kept.shape[2:] or intercept.dtype.kind != "f":
        raise ValueError("an intercept that does not fit the values")
    estimator.active_heads_ = active
    estimator.values_ = values
    estimator.layer_ = PrunedLayer(
        heads, active, kept[active], intercept, activation, dtype, parts.get("extras_values")
    )
    if parts.get("extras_values") is not None:
        check_array(parts["extras_values"], 2, "extras_values")
        refuse_if(
            parts["extras_values"].shape[1:] != intercept.shape,
            "values of extras that do not fit the intercept",
        )


def _attach_hops(estimator: Any, heads: Any) -> None:
    """The rule for tokens looks through the hops of the head distribution.

    A file holds these once.
    """
    refuse_if(not isinstance(estimator.tokens_, TokenRule), "no rule for tokens")
    estimator.tokens_ = estimator.tokens_.with_hops_of(getattr(heads, "distribution", None))


def _query_dim(estimator: Any) -> int:
    """The dimension of the queries that the layer sees.

    Those given, or made of keys, and what hops find.
    """
    rule = estimator.tokens_
    given = estimator.has_query_ and rule.query == "given"
    asked = int(estimator.n_query_features_in_ if given else estimator.n_features_in_)
    return asked + sum(len(hop) for hop in rule.hops) * int(estimator.n_features_in_)


def _distribution_of(estimator: Any) -> Any:
    """The head distribution that a model draws from, or has the kernel of."""
    if isinstance(estimator, AttentionFeatures):
        return estimator.drawn_heads_.distribution
    layer = estimator.layer_
    return layer.distribution if isinstance(layer, KernelLayer) else layer.heads.distribution


def _check_heads(heads: Any, estimator: Any) -> None:
    shape = (_query_dim(estimator) + 1, estimator.n_features_in_ + 1)
    if (
        not isinstance(heads, HeadDraw)
        or (heads.query_dim + 1, heads.dim + 1) != shape
        or not heads_fit(heads.distribution, shape)
    ):
        raise ValueError(f"heads that do not fit tokens of dimension {estimator.n_features_in_}")
    refuse_if(
        isinstance(heads.distribution, UnfittedHeads),
        "heads of a head distribution that was never fitted",
    )
    # a head distribution that cannot be drawn from says so; a small file must not make us draw a
    # large matrix
    small = math.prod(shape) + sum(shape) * getattr(heads.distribution, "rank", 0) <= LARGEST_TRIAL
    refuse_if(small and not np.isfinite(heads.block(0, 1)).all(), "heads that are not finite")


def _is_single(estimator: Any) -> bool:
    if isinstance(estimator, AttentionClassifier):
        estimator.single_output_ = len(estimator.classes_) == 2
    single = estimator.single_output_
    refuse_if(type(single) is not bool, "no word about whether there is one output")
    return bool(single)


def _check_labels(estimator: Any) -> None:
    """Labels are sorted and all different.

    A classifier has as many columns of scores as its labels need.
    """
    classes = estimator.classes_
    refuse_if(
        not isinstance(classes, np.ndarray) or classes.ndim != 1 or len(classes) < 2,
        "no labels to choose from",
    )
    refuse_if(
        classes.dtype.kind == "f" and not np.isfinite(classes).all(), "labels that are not finite"
    )
    labels, columns = classes.tolist(), len(estimator.layer_.intercept)
    refuse_if(labels != sorted(set(labels)), "labels that are not sorted, or not all different")
    refuse_if(
        columns != (1 if len(labels) == 2 else len(labels)),
        f"{columns} scores for {len(labels)} labels",
    )


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
    refuse_if(missing := required - set(names), f"no {', '.join(sorted(missing))}")
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
        case "class_has_weight_":
            return _is_array(value, "b", estimator.classes_.shape) and bool(value.sum() >= 2)
        case "loss_":
            return isinstance(estimator, NormBallClassifier) and value in ("logistic", "hinge")
        case "feature_names_in_":
            return _is_array(value, "OU", (estimator.n_features_in_,))
        case "heads_":
            return _same_distribution(value, _distribution_of(estimator))
        case "tokens_":
            if not isinstance(value, TokenRule):
                return False
            asked = (
                estimator.n_features_in_ if value.query_centre is None else len(value.query_centre)
            )
            fits = (
                value.query != "given"
                or not estimator.has_query_
                or asked == estimator.n_query_features_in_
            )
            return value.centre is None or (len(value.centre) == estimator.n_features_in_ and fits)
        case "intercept_":
            intercept = estimator.layer_.intercept
            if getattr(estimator, "single_output_", False) and not hasattr(estimator, "classes_"):
                return (
                    isinstance(value, float)
                    and intercept.shape == (1,)
                    and value == float(intercept[0])
                )
            return _is_array(value, "f", intercept.shape) and np.array_equal(value, intercept)
        case "alpha_" | "temperature_":
            return isinstance(value, (float, np.floating)) and bool(0 <= value < math.inf)
        case "group_radius_" | "ball_radius_":
            return isinstance(value, (float, np.floating)) and bool(value >= 0)
        case "loo_error_" | "residual_" | "objective_" | "duality_gap_":
            # NaN where there was nothing to leave out
            return isinstance(value, (float, np.floating))
        case "n_iter_" | "n_samples_seen_":
            return (
                isinstance(value, (int, np.integer))
                and not isinstance(value, bool)
                and bool(value >= 0)
            )
        case "solver_":
            exact = isinstance(estimator.layer_, KernelLayer)
            return value == "kernel" if exact else value in ("primal", "dual", "cg")
        case "selection_":
            return isinstance(value, Selection)
        case "loo_predictions_" | "loo_decision_":
            outputs = () if _is_single(estimator) else (len(estimator.layer_.intercept),)
            return _is_array(value, "f", (None, *outputs))
        case "jackknife_errors_":
            fits = _is_array(
                value,
                "f",
                (None, 1 if hasattr(estimator, "classes_") else len(estimator.layer_.intercept)),
            )
            return fits and bool((value >= 0).all())
        case "candidates_":
            return isinstance(value, tuple) and all(isinstance(v, Candidate) for v in value)
        case "cv_results_":
            return isinstance(value, dict) and all(
                isinstance(v, np.ndarray) for v in value.values()
            )
    return not hasattr(
        type(estimator), name
    )  # what somebody else noted, as long as it hides nothing of ours


def _is_array(value: Any, kinds: str, shape: tuple[int | None, ...]) -> bool:
    if (
        not isinstance(value, np.ndarray)
        or value.dtype.kind not in kinds
        or value.ndim != len(shape)
    ):
        return False
    return all(wanted in (None, found) for wanted, found in zip(shape, value.shape, strict=True))


def _same_distribution(one: Any, other: Any) -> bool:
    """Whether the head distribution that is shown is the head distribution that is drawn from."""
    if type(one) is not type(other):
        return False
    pairs = [(value, vars(other)[name]) for name, value in vars(one).items() if name != "hops_"]
    hops = [getattr(distribution, "hops_", ()) for distribution in (one, other)]
    same = len(hops[0]) == len(hops[1]) and all(map(np.array_equal, *hops))
    return same and all(type(a) is type(b) and np.array_equal(a, b) for a, b in pairs)
