"""Objects as JSON and arrays, and back: a fixed table of what a file may hold, each piece checked as it is built."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from keyhole.groups import PooledSets, SetGroups
from keyhole.heads import GaussianHeads, HeadDraw, QueryKeyHeads
from keyhole.layer import FiniteLayer, KernelLayer
from keyhole.learned import FittedHeads, IdentityHeads, LearnedHeads, Step
from keyhole.persistence.container import storable
from keyhole.sets import SetBatch
from keyhole.tokens import TokenRule

LAWS: dict[str, type] = {
    law.__name__: law for law in (GaussianHeads, QueryKeyHeads, IdentityHeads, LearnedHeads, FittedHeads)
}
RECORDS: dict[str, type] = {
    record.__name__: record for record in (TokenRule, FittedHeads, Step, FiniteLayer, KernelLayer, PooledSets)
}
UNSAVED = {"LearnedHeads": {"callback"}}
"""Parameters that are functions, and so no data."""
MOST_HEADS = 10**9
LARGEST_RANK = 2**20


def known(table: dict[str, type], value: Any) -> bool:
    """Whether the type of ``value`` is in the table; a type derived from one that is does not count."""
    return table.get(type(value).__name__) is type(value)


class Packer:
    """Turns objects into JSON; arrays are put aside under numbers."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def pack(self, value: Any, name: str) -> Any:
        """JSON for ``value``; ``name`` is what an error calls it."""
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (np.bool_, np.integer, np.floating)) and not isinstance(value, float):
            return self._array(np.asarray(value), name)
        if isinstance(value, int):
            return int(value) if abs(value) < 2**63 else {"number": str(value)}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"number": repr(float(value))}
        if isinstance(value, np.ndarray):
            return self._array(value, name)
        if isinstance(value, (list, tuple)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self.pack(v, f"{name}[{i}]") for i, v in enumerate(value)]}
        if isinstance(value, dict):
            return {"dict": [[self.pack(k, name), self.pack(v, f"{name}[{k!r}]")] for k, v in value.items()]}
        return self._object(value, name)

    def _array(self, array: np.ndarray, name: str) -> Any:
        if array.dtype.kind == "U" or (array.dtype == object and all(isinstance(v, str) for v in array.ravel())):
            kind = "object" if array.dtype == object else "text"
            return {"strings": [str(v) for v in array.ravel()], "shape": list(array.shape), "as": kind}
        if not storable(array):
            raise ValueError(
                f"a model file holds numbers, booleans and text: {name} is an array of {array.dtype}. Convert it "
                "before fitting, labels for instance to text or integers."
            )
        # the order of an array in memory decides the last bit of a matrix product with it
        turned = array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous
        key = str(len(self.arrays))
        self.arrays[key] = array.T if turned else array
        return {"array": key, "turned": turned}

    def _object(self, value: Any, name: str) -> Any:
        kind = type(value).__name__
        if isinstance(value, SetBatch):
            held: dict[str, Any] = {"tokens": value.tokens, "offsets": value.offsets, "query": value.query}
        elif isinstance(value, SetGroups):
            held = {"sets": value.sets, "counts": value.counts}
        elif isinstance(value, HeadDraw):
            held = {"law": value.law, "n_heads": value.n_heads, "dim": value.dim, "seed": value.seed}
        elif known(RECORDS, value):
            held = {field.name: getattr(value, field.name) for field in fields(value)}
        elif known(LAWS, value):
            parameters: dict[str, Any] = value.get_params(deep=False)
            held = {k: v for k, v in parameters.items() if k not in UNSAVED.get(kind, ())}
        else:
            laws = ", ".join(f"kh.{law}" for law in LAWS if law != "FittedHeads")
            raise ValueError(
                f"a model file holds data, and objects that keyhole knows: {name} is a {kind}. Of laws it knows {laws}."
            )
        return {"object": kind, "with": {k: self.pack(v, f"{name}.{k}") for k, v in held.items()}}


class Unpacker:
    """Builds objects from JSON and arrays; whatever is not in the table is refused."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def unpack(self, value: Any) -> Any:
        """The object that ``value`` describes. Raises ValueError, TypeError or KeyError where it describes none."""
        if value is None or isinstance(value, (bool, str, int, float)):
            return value
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__} where an object is described")
        match value:
            case {"number": str(text)} if len(text) < 1000:
                return float(text) if text in ("inf", "-inf", "nan") else int(text)
            case {"list": list(items)}:
                return [self.unpack(item) for item in items]
            case {"tuple": list(items)}:
                return tuple(self.unpack(item) for item in items)
            case {"dict": list(items)}:
                return {self.unpack(k): self.unpack(v) for k, v in items}
            case {"array": str(key), "turned": bool(turned)}:
                array = self.arrays[key]
                return (array.T if turned else array) if array.ndim else array[()]
            case {"strings": list(items), "shape": list(shape), "as": ("text" | "object") as kind}:
                return _strings(items, shape, kind)
            case {"object": str(kind), "with": dict(held)}:
                return _build(kind, {str(k): self.unpack(v) for k, v in held.items()})
        raise ValueError(f"an unknown description, {str(value)[:60]}")


def _strings(items: list[Any], shape: list[Any], kind: str) -> np.ndarray:
    if not all(isinstance(item, str) for item in items):
        raise ValueError("labels that are not text where text is announced")
    array = np.array(items, dtype=object if kind == "object" else np.str_)
    return array.reshape([int(s) for s in shape])


def _build(kind: str, held: dict[str, Any]) -> Any:
    if kind == "SetBatch":
        return _sets(**held)
    if kind == "SetGroups":
        return SetGroups(held["sets"], held["counts"])
    if kind == "HeadDraw":
        if held["n_heads"] > MOST_HEADS:
            raise ValueError(f"{held['n_heads']:,} heads, of which {MOST_HEADS:,} are allowed")
        return HeadDraw(held["law"], held["n_heads"], held["dim"], held["seed"])
    if kind in RECORDS:
        record = RECORDS[kind]
        wanted = {f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING}
        known = {f.name for f in fields(record)}
        if not wanted <= set(held) <= known:
            raise ValueError(f"a {kind} with {sorted(held)}, which should have {sorted(known)}")
        built = record(**held)
        _check_record(kind, built)
        return built
    if kind in LAWS:
        law = LAWS[kind](**held)
        if kind == "QueryKeyHeads" and not (type(law.rank) is int and 0 < law.rank <= LARGEST_RANK):
            raise ValueError(f"heads of rank {law.rank!r:.40}")
        return law
    raise ValueError(f"an object of the unknown kind {kind!r:.60}")


def _sets(tokens: Any, offsets: Any, query: Any) -> SetBatch:
    _check_array(tokens, 2, "tokens")
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError("sets without offsets")
    if offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 1).any():
        raise ValueError("sets whose offsets do not share out the tokens")
    if query is not None:
        _check_array(query, 2, "query")
        if query.shape != (len(offsets) - 1, tokens.shape[1]) or query.dtype != tokens.dtype:
            raise ValueError(f"queries of shape {query.shape} for {len(offsets) - 1} sets")
    return SetBatch._from_flat(tokens, offsets, query)


def _check_record(kind: str, built: Any) -> None:
    """The shapes that a record's methods rely on."""
    match kind:
        case "TokenRule":
            if built.scaling == "standard":
                _check_array(built.centre, 1, "centre")
                _check_array(built.spread, 1, "spread")
                if built.centre.shape != built.spread.shape or not (built.spread > 0).all():
                    raise ValueError("a token rule whose centre and spread do not fit")
        case "FittedHeads":
            _check_array(built.means_, 3, "means_")
            if not len(built.means_) or built.means_.shape[1] != built.means_.shape[2]:
                raise ValueError(f"means of shape {built.means_.shape}")
            if not (isinstance(built.scale, float) and built.scale > 0 and math.isfinite(built.scale)):
                raise ValueError(f"a scale of {built.scale!r:.40}")
            for name in ("query_scales_", "key_scales_"):
                scales = getattr(built, name)
                if (scales is None) != (built.query_scales_ is None):
                    raise ValueError("scales of the query or of the key, and not of both")
                if scales is not None:
                    _check_array(scales, 1, name)
                    if scales.shape != built.means_.shape[1:2] or not (scales > 0).all():
                        raise ValueError(f"{name} that do not fit the means")
        case "PooledSets":
            if not isinstance(built.base, (SetBatch, SetGroups)) or built.pooling not in ("mean", "sum"):
                raise ValueError("pooled sets that are none")
        case "FiniteLayer":
            _check_array(built.values, 3, "values")
            _check_array(built.intercept, 1, "intercept")
            if not isinstance(built.heads, HeadDraw) or built.dtype not in ("float32", "float64"):
                raise ValueError("a layer without heads or dtype")
            width = built.heads.dim + 1
            if built.values.shape != (built.heads.n_heads, width, len(built.intercept)):
                raise ValueError(
                    f"values of shape {built.values.shape} for {built.heads.n_heads} heads of width {width}"
                )
        case "KernelLayer":
            _check_array(built.dual, 2, "dual")
            _check_array(built.intercept, 1, "intercept")
            if not isinstance(built.sets, (SetBatch, PooledSets)):
                raise ValueError("a kernel without its training sets")
            if built.dual.shape != (len(built.sets), len(built.intercept)):
                raise ValueError(f"dual coefficients of shape {built.dual.shape} for {len(built.sets)} sets")


def _check_array(array: Any, ndim: int, name: str) -> None:
    if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype not in (np.float64, np.float32):
        raise ValueError(f"{name} that are not a float array of {ndim} axes")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} that are not finite")
