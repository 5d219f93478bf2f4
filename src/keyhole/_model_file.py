"""The container of a model file: arrays by name and one JSON, with a digest of both.

A tree of dictionaries, lists, numbers, texts and arrays becomes a flat dictionary of arrays, each
named by the way to it ("members.0.coef"), and a JSON in which their places are marked. Nothing in a
file is ever executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import __version__
from keyhole._files import refuse_special_file, write_whole
from keyhole.attention.heads import DrawnHeads, FittedHeads, GaussianHeads
from keyhole.attention.learned import LearnedHeads
from keyhole.fit.settings import Landmarks

FORMAT = "keyhole-model"
VERSION = "3"

DTYPES = ("float64", "float32", "int64", "int32", "bool")
"""Types of arrays in a file."""

HEADS: dict[str, Any] = {
    kind.__name__: kind for kind in (GaussianHeads, LearnedHeads, FittedHeads, DrawnHeads)
}
"""Head distributions that a file describes by their parameters."""

MARK = "!"
"""The key of a JSON object that stands for something else than a dictionary."""

Arrays = dict[str, np.ndarray]


# ---- trees to arrays and JSON, and back ----------------------------------------------------------


def flattened(value: Any, name: str, arrays: Arrays) -> Any:
    """JSON of a tree; its arrays are added to ``arrays``, each under the way to it."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.generic):
        return flattened(value.item(), name, arrays)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {MARK: "number", "value": str(value)}
    if isinstance(value, np.ndarray):
        return _flattened_array(value, name, arrays)
    if isinstance(value, Landmarks):
        return {MARK: "landmarks", "count": value.count}
    if isinstance(value, list):
        return [flattened(item, f"{name}.{i}", arrays) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        items = [flattened(item, f"{name}.{i}", arrays) for i, item in enumerate(value)]
        return {MARK: "tuple", "items": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        prefix = f"{name}." if name else ""
        return {key: flattened(item, f"{prefix}{key}", arrays) for key, item in value.items()}
    if isinstance(value, dict):
        pairs = [list(pair) for pair in value.items()]
        return {MARK: "pairs", "items": flattened(pairs, name, arrays)}
    if type(value) in HEADS.values():
        values = parameters_of_heads(value)
        return {
            MARK: "heads",
            "kind": type(value).__name__,
            "values": flattened(values, name, arrays),
        }
    raise TypeError(
        f"{name} of a type that no model file holds, {type(value).__name__}: a file holds numbers, "
        "texts, arrays of these, and head distributions of keyhole"
    )


def _flattened_array(array: np.ndarray, name: str, arrays: Arrays) -> Any:
    """The mark of an array of numbers, or an array of texts as it is."""
    if array.dtype.name in DTYPES:
        arrays[name] = np.ascontiguousarray(array)
        return {MARK: "array"}
    if array.dtype.kind in "iu":
        arrays[name] = np.ascontiguousarray(array.astype(np.int64))
        return {MARK: "array"}
    items = array.tolist()
    if array.ndim != 1 or not all(isinstance(item, (str, bool, int, float)) for item in items):
        raise TypeError(
            f"{name} with entries that are neither numbers nor texts, of type {array.dtype}"
        )
    dtype = "text" if array.dtype.kind == "U" else "object"
    return {MARK: "items", "dtype": dtype, "items": items}


def restored(value: Any, name: str, arrays: Mapping[str, np.ndarray]) -> Any:
    """The tree that `flattened` was given, from anything that JSON can be."""
    if isinstance(value, list):
        return [restored(item, f"{name}.{i}", arrays) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        prefix = f"{name}." if name else ""
        return {key: restored(item, f"{prefix}{key}", arrays) for key, item in value.items()}
    mark = value[MARK]
    if mark == "array":
        return arrays[name]
    if mark == "number":
        return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[value["value"]]
    if mark == "items":
        return np.array(value["items"], dtype=object if value["dtype"] == "object" else str)
    if mark == "landmarks":
        if type(value["count"]) is not int or value["count"] < 1:
            raise ValueError(f"{value['count']!r:.40} landmarks")
        return Landmarks(value["count"])
    if mark == "tuple":
        return tuple(restored(value["items"], name, arrays))
    if mark == "pairs":
        return dict(restored(value["items"], name, arrays))
    if mark == "heads":
        values = restored(value["values"], name, arrays)
        return HEADS[value["kind"]](**values)
    raise ValueError(f"something called {mark!r:.40}, which no file of this keyhole holds")


def parameters_of_heads(heads: Any) -> dict[str, Any]:
    """What makes a head distribution, by name; records of how it was learned are left out."""
    if not is_dataclass(heads):
        parameters = heads.get_params()
    else:
        parameters = {field.name: getattr(heads, field.name) for field in fields(heads)}
        parameters.pop("history", None)
    return {name: None if callable(value) else value for name, value in parameters.items()}


# ---- files ---------------------------------------------------------------------------------------


def write_container(path: Path, document: Any, arrays: Arrays, *, overwrite: bool) -> None:
    """Write arrays and a document as a file that appears whole or not at all."""
    from safetensors.numpy import save

    stored = {
        name: np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        for name, array in arrays.items()
    }
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "keyhole": __version__,
        "document": text,
        "sha256": digest(text, stored),
    }
    try:
        write_whole(save(stored, metadata), path, overwrite=overwrite)
    except FileExistsError as error:
        raise ValueError(f"{error} Choose another name, or pass overwrite=True.") from None


def read_container(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Read document and arrays, and compare them with their digest.

    Raises ValueError or OSError.
    """
    from safetensors import SafetensorError, safe_open

    refuse_special_file(path)
    if path.is_dir():
        raise ValueError(f"`path` must name a model file: {path.name!r} is a folder.")
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise damaged(
            path, "a model file is safetensors, whole and unchanged", f"{str(error)[:200]!r}"
        ) from None
    if metadata.get("format") != FORMAT:
        raise damaged(path, f"a model file says that its format is {FORMAT!r}", "no such words")
    if metadata.get("version") != VERSION:
        writer = metadata.get("keyhole", "")
        release = f" of keyhole {writer}" if re.fullmatch(r"[0-9][0-9a-z.+]{0,30}", writer) else ""
        raise ValueError(
            f"keyhole {__version__} reads version {VERSION} of its model files: {path.name!r} has "
            f"version {metadata.get('version')!r:.20}{release}. Install the keyhole that wrote it, "
            "or fit anew and save."
        )
    text = metadata.get("document", "")
    if digest(text, arrays) != metadata.get("sha256"):
        raise damaged(
            path, "contents must match the digest that was stored with them", "contents that do not"
        )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "its description must be JSON", f"another ({error!s:.80})") from None
    if not isinstance(document, dict):
        raise damaged(path, "its description must be a JSON object", f"a {type(document).__name__}")
    return document, arrays


def digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of a document and of all arrays, their names, types and shapes."""
    total = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        array = arrays[name]
        total.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


def damaged(path: Path, rule: str, evidence: str) -> ValueError:
    """The error for a file that is no model file, or not as it was written."""
    return ValueError(
        f"{path.name!r} cannot be read as a model: {rule}, and it has {evidence}. Use the file "
        "that kh.save or keyhole fit wrote, or make it anew."
    )
