"""Objects as JSON and arrays, and back: a fixed table of what a file may hold, each piece checked as it is built."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from keyhole._checks import check_choice, check_count, check_number
from keyhole.activations import check_activation, check_pointwise
from keyhole.groups import POOLINGS, PooledSets, SetGroups
from keyhole.heads import GaussianHeads, HeadDraw, QueryKeyHeads
from keyhole.layer import FiniteLayer, KernelLayer
from keyhole.learned import FittedHeads, IdentityHeads, LearnedHeads, Step
from keyhole.learned.identity import UnfittedLaw
from keyhole.persistence.container import storable
from keyhole.sets import SetBatch
from keyhole.tokens import QUERIES, SCALINGS, TokenRule

LAWS: dict[str, type] = {
    law.__name__: law for law in (GaussianHeads, QueryKeyHeads, IdentityHeads, LearnedHeads, FittedHeads)
}
RECORDS: dict[str, type] = {
    record.__name__: record for record in (TokenRule, FittedHeads, Step, FiniteLayer, KernelLayer, PooledSets)
}
UNSAVED = {"LearnedHeads": {"callback"}}
"""Parameters that are functions, and so no data."""
PRECISIONS = ("float64", "float32")
CHOICES = ("zero-mean", "identity", "learned")
"""What a fitted law was chosen as."""
MOST_HEADS = 10**9
LARGEST_RANK = 2**20
MOST_PADDING = 2**26
"""Bytes by which the text of a file may grow in memory, where NumPy makes short texts as wide as the longest."""


def known(table: dict[str, type], value: Any) -> bool:
    """Whether the type of ``value`` is in the table; a type derived from one that is does not count."""
    return table.get(type(value).__name__) is type(value)


class Packer:
    """Turns objects into JSON; arrays are put aside under numbers."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._padding = 0

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
            items = [str(v) for v in array.ravel()]
            self._padding += padding_of(items) if kind == "text" else 0
            if self._padding > MOST_PADDING:
                raise ValueError(
                    f"text in a model file may grow by {MOST_PADDING:,} bytes as it is read: {name} takes up "
                    f"{array.nbytes:,} because all its texts are as wide as the longest. Shorten that one, or pass the "
                    "texts as an array of objects."
                )
            return {"strings": items, "shape": list(array.shape), "as": kind}
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
        self._padding = 0

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
                return self._strings(items, shape, kind)
            case {"object": str(kind), "with": dict(held)}:
                return _build(kind, {str(k): self.unpack(v) for k, v in held.items()})
        raise ValueError(f"an unknown description, {str(value)[:60]}")

    def _strings(self, items: list[Any], shape: list[Any], kind: str) -> np.ndarray:
        if not all(isinstance(item, str) for item in items):
            raise ValueError("labels that are not text where text is announced")
        if kind == "text":
            self._padding += padding_of(items)
            if self._padding > MOST_PADDING:
                raise ValueError(f"text that grows by {self._padding:,} bytes as it is read, {MOST_PADDING:,} allowed")
        array = np.array(items, dtype=object if kind == "object" else np.str_)
        return array.reshape([int(s) for s in shape])


def padding_of(items: list[str]) -> int:
    """Bytes of a NumPy array of these texts that hold no character of theirs.

    >>> padding_of(["yes", "no"])
    4
    """
    lengths = [len(item) for item in items]
    return 4 * (len(lengths) * max(lengths, default=0) - sum(lengths))


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
        _check_law(law)
        return law
    raise ValueError(f"an object of the unknown kind {kind!r:.60}")


def _check_law(law: Any) -> None:
    """What drawing heads relies on. A law that a training set has yet to choose is checked when it is fitted."""
    if isinstance(law, UnfittedLaw):
        return
    check_number(law.scale, "scale", minimum=0.0, exclusive=True)
    if isinstance(law, QueryKeyHeads):
        if check_count(law.rank, "rank") > LARGEST_RANK:
            raise ValueError(f"heads of rank {law.rank:,}, of which {LARGEST_RANK:,} are allowed")
    elif np.ndim(law.mean) == 0:
        check_number(law.mean, "mean")
    else:
        _check_array(law.mean, 2, "mean", kinds="fiub")


def law_width(law: Any) -> int | None:
    """D of the heads of a law that has them for one D only."""
    if isinstance(law, FittedHeads):
        return int(law.means_.shape[1])
    mean = getattr(law, "mean", None)
    if mean is None or np.ndim(mean) == 0:
        return None
    rows, columns = np.shape(mean)
    return int(rows) if rows == columns else -1


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
            check_choice(built.scaling, "scaling", SCALINGS)
            check_choice(built.query, "query", QUERIES)
            check_choice(built.pooling, "pooling", POOLINGS)
            if built.scaling == "standard":
                _check_array(built.centre, 1, "centre")
                _check_array(built.spread, 1, "spread")
                if built.centre.shape != built.spread.shape or not (built.spread > 0).all():
                    raise ValueError("a token rule whose centre and spread do not fit")
            elif built.centre is not None or built.spread is not None:
                raise ValueError(f"a token rule with a centre, and the scaling {built.scaling!r}")
        case "Step":
            check_count(built.step, "step", minimum=0)
            if not all(isinstance(error, float) for error in (built.loo_error, built.held_out_error)):
                raise ValueError("a step whose errors are no numbers")
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
            check_choice(built.chosen, "chosen", CHOICES)
            check_number(built.strength, "strength")
            check_count(built.steps, "steps", minimum=0)
            if not isinstance(built.reason, str):
                raise ValueError("a law chosen for no reason in words")
            if not isinstance(built.history, tuple) or not all(isinstance(step, Step) for step in built.history):
                raise ValueError("a history of something else than steps")
        case "PooledSets":
            check_choice(built.pooling, "pooling", POOLINGS)
            if type(built.each) is not bool or not isinstance(
                built.base, SetBatch if built.each else SetBatch | SetGroups
            ):
                raise ValueError("pooled sets that are none")
        case "FiniteLayer":
            _check_array(built.values, 3, "values")
            _check_array(built.intercept, 1, "intercept")
            if not isinstance(built.heads, HeadDraw):
                raise ValueError("a layer without heads")
            check_activation(built.activation)
            check_choice(built.dtype, "dtype", PRECISIONS)
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
            check_pointwise(built.activation)
            if (
                not isinstance(built.law, (GaussianHeads, FittedHeads))
                or getattr(built.law, "query_scales_", None) is not None
            ):
                raise ValueError("a kernel of a law that has none")
            if built.dual.shape != (len(built.sets), len(built.intercept)):
                raise ValueError(f"dual coefficients of shape {built.dual.shape} for {len(built.sets)} sets")


def _check_array(array: Any, ndim: int, name: str, kinds: str = "f") -> None:
    if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype.kind not in kinds:
        raise ValueError(f"{name} that are not an array of numbers with {ndim} axes")
    if array.dtype == np.float16:
        raise ValueError(f"{name} of half precision")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} that are not finite")
