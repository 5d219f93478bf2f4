"""`save` and `load`: estimators as one file each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import __version__
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
from keyhole.heads import HeadDraw, HeadLaw
from keyhole.layer import FiniteLayer, KernelLayer
from keyhole.persistence.codec import Packer, Unpacker, known
from keyhole.persistence.container import damaged, read_container, write_container
from keyhole.persistence.schema import Schema
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
    _attach_layer(estimator, document["layer"], unpacker)
    _check_labels(estimator)
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
        estimator.heads_ = heads
    elif isinstance(estimator, (NormBallRegressor, NormBallClassifier)):
        _attach_pruned(estimator, {name: unpacker.unpack(value) for name, value in described.items()})
    else:
        layer = unpacker.unpack(described)
        if not isinstance(estimator.tokens_, TokenRule):
            raise ValueError("no rule for tokens")
        check_activation(layer.activation)
        single = _is_single(estimator)
        estimator.layer_ = layer
        if isinstance(layer, FiniteLayer):
            _check_heads(layer.heads, estimator)
            estimator.heads_ = layer.heads
            estimator.values_ = layer.values[..., 0] if single else layer.values
        elif isinstance(layer, KernelLayer):
            if not isinstance(layer.law, HeadLaw) or layer.sets.dim != estimator.n_features_in_:
                raise ValueError("a kernel that does not fit the tokens")
            _check_pooling(estimator, layer)
            estimator.dual_coef_ = layer.dual[..., 0] if single else layer.dual
        else:
            raise ValueError("no layer")


def _check_pooling(estimator: Any, layer: KernelLayer) -> None:
    rule, sets = estimator.tokens_, layer.sets
    if isinstance(sets, PooledSets) and sets.pooling != rule.pooling:
        raise ValueError("training sets pooled otherwise than new ones")


def _attach_pruned(estimator: Any, parts: dict[str, Any]) -> None:
    heads, active, values, intercept = (parts[k] for k in ("heads", "active", "values", "intercept"))
    _check_heads(heads, estimator)
    if not all(isinstance(a, np.ndarray) for a in (active, values, intercept)):
        raise ValueError("a layer without values")
    if values.shape[:2] != (heads.n_heads, heads.dim + 1) or values.dtype.kind != "f":
        raise ValueError(f"values of shape {values.shape} for {heads.n_heads} heads of width {heads.dim + 1}")
    kept = values.reshape(heads.n_heads, heads.dim + 1, -1)
    if active.ndim != 1 or active.dtype.kind != "i" or (np.diff(active) <= 0).any():
        raise ValueError("active heads that are no increasing numbers")
    if len(active) and not 0 <= active[0] <= active[-1] < heads.n_heads:
        raise ValueError("active heads that do not exist")
    if intercept.shape != kept.shape[2:] or parts["dtype"] not in ("float32", "float64"):
        raise ValueError("an intercept that does not fit the values")
    estimator.heads_, estimator.active_heads_, estimator.values_ = heads, active, values
    activation = check_activation(parts["activation"])
    estimator.layer_ = PrunedLayer(heads, active, kept[active], intercept, activation, parts["dtype"])


def _check_heads(heads: Any, estimator: Any) -> None:
    if not isinstance(heads, HeadDraw) or heads.dim != estimator.n_features_in_:
        raise ValueError(f"heads that do not fit tokens of dimension {estimator.n_features_in_}")
    width = heads.dim + 1
    # a law that cannot be drawn from says so; a small file must not make us draw a large matrix
    if width * (width + 2 * getattr(heads.law, "rank", 0)) <= LARGEST_TRIAL:
        heads.block(0, 1)


def _is_single(estimator: Any) -> bool:
    if isinstance(estimator, AttentionClassifier):
        return len(estimator.classes_) == 2
    return bool(estimator._single)


def _check_labels(estimator: Any) -> None:
    """A classifier has as many columns of scores as its labels need."""
    if not isinstance(estimator, (AttentionClassifier, NormBallClassifier)):
        return
    classes = estimator.classes_
    if not isinstance(classes, np.ndarray) or classes.ndim != 1 or len(classes) < 2:
        raise ValueError("no labels to choose from")
    columns = 1 if len(classes) == 2 else len(classes)
    if len(estimator.layer_.intercept) != columns:
        raise ValueError(f"{len(estimator.layer_.intercept)} columns of scores for {len(classes)} labels")
    if isinstance(estimator, AttentionClassifier) and not isinstance(estimator.temperature_, (float, np.floating)):
        raise ValueError("no temperature")
