"""`save` and `load`: estimators as one file each."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import __version__
from keyhole._checks import check_choice
from keyhole.activations import check_activation
from keyhole.estimators import (
    AttentionClassifier,
    AttentionFeatures,
    AttentionRegressor,
    NormBallClassifier,
    NormBallRegressor,
)
from keyhole.estimators._ball_fit import PrunedLayer
from keyhole.groups import PooledSets
from keyhole.heads import HeadDraw
from keyhole.layer import FiniteLayer, KernelLayer
from keyhole.learned.identity import UnfittedLaw
from keyhole.persistence.codec import PRECISIONS, Packer, Unpacker, known, law_width
from keyhole.persistence.container import damaged, read_container, write_container
from keyhole.persistence.schema import Schema
from keyhole.sets import SetBatch
from keyhole.tokens import TokenRule

ESTIMATORS: dict[str, type] = {
    kind.__name__: kind
    for kind in (AttentionRegressor, AttentionClassifier, AttentionFeatures, NormBallRegressor, NormBallClassifier)
}
_NOTE = re.compile(r"[a-z][a-z0-9_]{0,60}_|_single")
"""Names of fitted attributes."""
LARGEST_TRIAL = 4_000_000
"""Entries of a head drawn while loading."""
_BUILT = {"layer_", "values_", "heads_", "dual_coef_", "active_heads_"}
"""Attributes that are parts of the layer: stored once, as the layer."""


@dataclass(frozen=True)
class SavedModel:
    """What a file holds: a fitted estimator and the schema of its input."""

    estimator: Any
    schema: Schema
    written_by: str = field(default="")


def save(estimator: Any, path: Any, *, schema: Schema | None = None, overwrite: bool = False) -> None:
    """Save a fitted estimator as one file: arrays as safetensors, all else as JSON in its header.

    Parameters
    ----------
    estimator : AttentionRegressor, AttentionClassifier, AttentionFeatures, NormBallRegressor or NormBallClassifier
        Fitted; finite or infinitely many heads, with any law of keyhole's.
    path : str or Path
        The file appears whole or not at all.
    schema : Schema, optional
        Names of coordinates and columns, to be checked when a table is predicted; made from the estimator if not
        given.
    overwrite : bool
        Whether a file of that name may be replaced.

    Notes
    -----
    Heads are stored as law and seed, not as matrices. With infinitely many heads the training sets are part of the
    model, and so of the file. A generator given as ``random_state`` is stored as the seed that was drawn from it, and
    a callback of a law is not stored.

    Examples
    --------
    >>> import tempfile
    >>> import keyhole as kh
    >>> sets = kh.targets.sphere_sets(60, n_keys=4, dim=3, seed=0)
    >>> model = kh.AttentionRegressor(20, random_state=0).fit(sets, kh.targets.TokenPower(2, dim=3)(sets))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     kh.save(model, f"{folder}/model.keyhole")
    ...     same = kh.load(f"{folder}/model.keyhole")
    >>> bool((same.predict(sets) == model.predict(sets)).all())
    True
    """
    kind = type(estimator).__name__
    if not known(ESTIMATORS, estimator):
        raise TypeError(f"`estimator` must be one of keyhole's, {', '.join(ESTIMATORS)}: got {kind}.")
    if not hasattr(estimator, "n_features_in_"):
        raise ValueError(f"`estimator` must be fitted before it is saved: this {kind} is not. Call fit first.")
    if schema is None:
        names = tuple(str(name) for name in getattr(estimator, "feature_names_in_", ()))
        schema = Schema(int(estimator.n_features_in_), bool(estimator.has_query_), names)
    packer = Packer()
    document = {
        "keyhole": __version__,
        "estimator": kind,
        "parameters": {name: packer.pack(value, name) for name, value in _parameters(estimator).items()},
        "fitted": {
            name: packer.pack(value, name)
            for name, value in vars(estimator).items()
            if _NOTE.fullmatch(name) and name not in _BUILT
        },
        "layer": _pack_layer(packer, estimator),
        "schema": {
            "names": list(schema.names),
            "target": schema.target,
            "columns": [list(pair) for pair in schema.columns],
        },
    }
    write_container(Path(path), document, packer.arrays, overwrite=overwrite)


def load(path: Any) -> Any:
    """Load an estimator that `save` wrote; its predictions are the same to the last bit.

    Parameters
    ----------
    path : str or Path

    Raises
    ------
    ValueError
        If the file is not a complete and unchanged model file of a version we know. Nothing in it is executed, and
        nothing is allocated that the file is too small to fill.
    """
    return read_model(path).estimator


def read_model(path: Any) -> SavedModel:
    """Load an estimator together with the schema of its input. See `load`."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"`path` must name a model file: {path.name!r} is a folder.")
    document, arrays = read_container(path)
    try:
        return _restore(document, Unpacker(arrays))
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        words = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise damaged(path, "a model file describes an estimator that this keyhole knows", words[:300]) from None


def _parameters(estimator: Any) -> dict[str, Any]:
    parameters = dict(estimator.get_params(deep=False))
    if not isinstance(parameters["random_state"], (int, type(None))):
        heads = getattr(estimator, "heads_", None)
        parameters["random_state"] = None if heads is None else heads.seed
    if not isinstance(parameters["dtype"], str):
        parameters["dtype"] = np.dtype(parameters["dtype"]).name
    return parameters


def _pack_layer(packer: Packer, estimator: Any) -> Any:
    if isinstance(estimator, AttentionFeatures):
        return packer.pack(estimator.heads_, "heads_")
    layer = estimator.layer_
    if isinstance(layer, PrunedLayer):
        return {
            "heads": packer.pack(layer.heads, "heads_"),
            "active": packer.pack(layer.active, "active_heads_"),
            "values": packer.pack(estimator.values_, "values_"),
            "intercept": packer.pack(layer.intercept, "intercept_"),
            "activation": layer.activation,
            "dtype": layer.dtype,
        }
    return packer.pack(layer, "layer_")


def _restore(document: dict[str, Any], unpacker: Unpacker) -> SavedModel:
    kind = ESTIMATORS[document["estimator"]]
    parameters = {str(name): unpacker.unpack(value) for name, value in document["parameters"].items()}
    estimator = kind(**parameters)  # an unknown parameter is a TypeError
    for name, value in document["fitted"].items():
        if not _NOTE.fullmatch(name) or name in _BUILT:
            raise ValueError(f"a fitted attribute {name!r:.60}")
        setattr(estimator, name, unpacker.unpack(value))
    if type(estimator.n_features_in_) is not int or type(estimator.has_query_) is not bool:
        raise ValueError("no token dimension, or no word about queries")
    if estimator.n_features_in_ < 1:
        raise ValueError(f"tokens of dimension {estimator.n_features_in_}")
    _attach_layer(estimator, document["layer"], unpacker)
    _check_fitted(estimator, list(document["fitted"]))
    found = document["schema"]
    schema = Schema(
        estimator.n_features_in_,
        estimator.has_query_,
        tuple(str(name) for name in found["names"]),
        str(found["target"]),
        tuple((str(option), str(column)) for option, column in found["columns"]),
    )
    return SavedModel(estimator, schema, str(document["keyhole"])[:40])


def _attach_layer(estimator: Any, described: Any, unpacker: Unpacker) -> None:
    if isinstance(estimator, AttentionFeatures):
        heads = unpacker.unpack(described)
        _check_heads(heads, estimator)
        check_activation(estimator.activation)
        check_choice(estimator.dtype, "dtype", PRECISIONS)
        estimator.heads_ = heads
    elif isinstance(estimator, (NormBallRegressor, NormBallClassifier)):
        _attach_pruned(estimator, {name: unpacker.unpack(value) for name, value in described.items()})
    else:
        layer = unpacker.unpack(described)
        single = _is_single(estimator)
        estimator.layer_ = layer
        if isinstance(layer, FiniteLayer):
            _check_heads(layer.heads, estimator)
            estimator.heads_ = layer.heads
            estimator.values_ = layer.values[..., 0] if single else layer.values
        elif isinstance(layer, KernelLayer):
            _check_training_sets(estimator, layer.sets)
            if law_width(layer.law) not in (None, estimator.n_features_in_ + 1):
                raise ValueError(f"a kernel that does not fit tokens of dimension {estimator.n_features_in_}")
            estimator.dual_coef_ = layer.dual[..., 0] if single else layer.dual
        else:
            raise ValueError("no layer")


def _check_training_sets(estimator: Any, sets: SetBatch | PooledSets) -> None:
    """Training sets must be what the rule for tokens makes of new ones, or a kernel cannot compare the two."""
    rule = estimator.tokens_
    if not isinstance(rule, TokenRule):
        raise ValueError("no rule for tokens")
    base = sets.base if isinstance(sets, PooledSets) else sets
    plain = isinstance(base, SetBatch)
    if sets.dim != estimator.n_features_in_:
        raise ValueError("a kernel that does not fit the tokens")
    if isinstance(sets, PooledSets):
        fits = sets.pooling == rule.pooling and sets.each == (plain and rule.query == "each")
    else:
        fits = rule.pooling == "mean" and rule.query != "each"
    has_query = estimator.has_query_ or rule.query == "mean"
    if not fits or (not plain and rule.query != "given") or (base.query is not None) != has_query:
        raise ValueError("training sets pooled or queried otherwise than new ones")


def _attach_pruned(estimator: Any, parts: dict[str, Any]) -> None:
    heads, active, values, intercept = (parts[k] for k in ("heads", "active", "values", "intercept"))
    _check_heads(heads, estimator)
    activation, dtype = check_activation(parts["activation"]), check_choice(parts["dtype"], "dtype", PRECISIONS)
    if not all(isinstance(a, np.ndarray) and np.isfinite(a).all() for a in (active, values, intercept)):
        raise ValueError("a layer without values")
    shape = (heads.n_heads, heads.dim + 1)
    if values.shape[:2] != shape or values.ndim > 3 or values.dtype.kind != "f" or 0 in values.shape:
        raise ValueError(f"values of shape {values.shape} for {heads.n_heads} heads of width {heads.dim + 1}")
    kept = values.reshape(*shape, -1)
    if active.ndim != 1 or active.dtype.kind != "i" or (np.diff(active) <= 0).any():
        raise ValueError("active heads that are no increasing numbers")
    if len(active) and not 0 <= active[0] <= active[-1] < heads.n_heads:
        raise ValueError("active heads that do not exist")
    if np.delete(kept, active, axis=0).any():
        raise ValueError("values of heads that are not active")
    if intercept.shape != kept.shape[2:] or intercept.dtype.kind != "f":
        raise ValueError("an intercept that does not fit the values")
    estimator.heads_, estimator.active_heads_, estimator.values_ = heads, active, values
    estimator.layer_ = PrunedLayer(heads, active, kept[active], intercept, activation, dtype)


def _check_heads(heads: Any, estimator: Any) -> None:
    width = estimator.n_features_in_ + 1
    if not isinstance(heads, HeadDraw) or heads.dim + 1 != width or law_width(heads.law) not in (None, width):
        raise ValueError(f"heads that do not fit tokens of dimension {estimator.n_features_in_}")
    if isinstance(heads.law, UnfittedLaw):
        raise ValueError("heads of a law that was never fitted")
    # a law that cannot be drawn from says so; a small file must not make us draw a large matrix
    if (
        width * (width + 2 * getattr(heads.law, "rank", 0)) <= LARGEST_TRIAL
        and not np.isfinite(heads.block(0, 1)).all()
    ):
        raise ValueError("heads that are not finite")


def _is_single(estimator: Any) -> bool:
    if isinstance(estimator, AttentionClassifier):
        return len(estimator.classes_) == 2
    if type(estimator._single) is not bool:
        raise ValueError("no word about whether there is one output")
    return bool(estimator._single)


def _check_labels(estimator: Any) -> None:
    """Labels are sorted and all different, and a classifier has as many columns of scores as its labels need."""
    classes = estimator.classes_
    if not isinstance(classes, np.ndarray) or classes.ndim != 1 or len(classes) < 2:
        raise ValueError("no labels to choose from")
    if classes.dtype.kind == "f" and not np.isfinite(classes).all():
        raise ValueError("labels that are not finite")
    if not (classes[:-1] < classes[1:]).all() and classes.dtype.kind != "b":
        raise ValueError("labels that are not sorted, or not all different")
    if classes.dtype.kind == "b" and classes.tolist() != [False, True]:
        raise ValueError("labels that are not sorted, or not all different")
    columns = 1 if len(classes) == 2 else len(classes)
    if len(estimator.layer_.intercept) != columns:
        raise ValueError(f"{len(estimator.layer_.intercept)} columns of scores for {len(classes)} labels")


def _check_fitted(estimator: Any, names: Collection[str]) -> None:
    """Every fitted attribute that the file names, on its own and against the layer."""
    required = {"n_features_in_", "has_query_"}
    if isinstance(estimator, (AttentionRegressor, AttentionClassifier)):
        required |= {"law_", "tokens_", "alpha_", "solver_", "selection_", "intercept_"}
    if isinstance(estimator, (AttentionClassifier, NormBallClassifier)):
        required |= {"classes_"}
        _check_labels(estimator)
    if isinstance(estimator, AttentionClassifier):
        required |= {"temperature_"}
    if missing := required - set(names):
        raise ValueError(f"no {', '.join(sorted(missing))}")
    for name in names:
        if not _fits(name, getattr(estimator, name), estimator):
            raise ValueError(f"{name} that is no such thing, {getattr(estimator, name)!r:.60}")


def _fits(name: str, value: Any, estimator: Any) -> bool:
    """Whether a fitted attribute has the type, the shape and the range that it has after a fit."""
    match name:
        case "n_features_in_" | "has_query_" | "_single" | "classes_":
            return True  # checked before the layer, or with it
        case "feature_names_in_":
            return _is_array(value, "OU", (estimator.n_features_in_,))
        case "law_":
            return _same_law(value, getattr(estimator, "heads_", estimator.layer_).law)
        case "tokens_":
            centre = getattr(value, "centre", None)
            return isinstance(value, TokenRule) and (centre is None or len(centre) == estimator.n_features_in_)
        case "intercept_":
            intercept = estimator.layer_.intercept
            if getattr(estimator, "_single", False):
                return isinstance(value, float) and intercept.shape == (1,) and value == float(intercept[0])
            return _is_array(value, "f", intercept.shape) and np.array_equal(value, intercept)
        case "alpha_" | "temperature_":
            return isinstance(value, (float, np.floating)) and bool(0 <= value < math.inf)
        case "group_radius_" | "ball_radius_":
            return isinstance(value, (float, np.floating)) and bool(value >= 0)
        case "alphas_":
            return _is_array(value, "f", (None,)) and bool((value >= 0).all())
        case "loo_errors_" | "gcv_errors_" | "holdout_errors_":
            return _is_array(value, "f", estimator.alphas_.shape)
        case "loo_error_" | "gcv_error_" | "holdout_error_" | "residual_" | "objective_" | "duality_gap_":
            return isinstance(value, (float, np.floating))  # NaN where there was nothing to leave out
        case "n_iter_" | "n_samples_seen_":
            return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)
        case "solver_":
            exact = isinstance(estimator.layer_, KernelLayer)
            return value == "kernel" if exact else value in ("primal", "dual", "cg")
        case "selection_":
            return value in ("loo", "gcv", "holdout")
        case "loo_predictions_" | "loo_decision_":
            outputs = () if _is_single(estimator) else (len(estimator.layer_.intercept),)
            return _is_array(value, "f", (None, *outputs))
        case "scaling_errors_":
            return isinstance(value, dict) and all(isinstance(v, float) for v in value.values())
        case "cv_results_":
            return isinstance(value, dict) and all(isinstance(v, np.ndarray) for v in value.values())
    return not hasattr(type(estimator), name)  # what somebody else noted, as long as it hides nothing of ours


def _is_array(value: Any, kinds: str, shape: tuple[int | None, ...]) -> bool:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or value.ndim != len(shape):
        return False
    return all(wanted in (None, found) for wanted, found in zip(shape, value.shape, strict=True))


def _same_law(one: Any, other: Any) -> bool:
    """Whether the law that is shown is the law that is drawn from."""
    return type(one) is type(other) and all(_same(v, vars(other)[k]) for k, v in vars(one).items())


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(np.array_equal(one, other))
