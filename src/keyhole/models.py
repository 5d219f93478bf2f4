"""`save` and `load`: a model as one safetensors file with a JSON description. Nothing in a file is ever executed."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import __version__
from keyhole._checks import check_choice, check_count, check_number
from keyhole._files import write_whole
from keyhole.attention.activations import check_activation, check_pointwise
from keyhole.attention.heads import FittedHeads, GaussianHeads, HeadDraw, QueryKeyHeads, Step
from keyhole.attention.learned import IdentityHeads, LearnedHeads, UnfittedLaw
from keyhole.data.schema import Coding, Schema
from keyhole.data.sets import POOLINGS, PooledSets, SetBatch, SetGroups
from keyhole.data.tokens import QUERIES, SCALINGS, TokenRule
from keyhole.estimators.attention import AttentionClassifier, AttentionRegressor
from keyhole.estimators.features import AttentionFeatures
from keyhole.estimators.intervals import TrainingSamples
from keyhole.estimators.norm_ball import NormBallClassifier, NormBallRegressor, PrunedLayer
from keyhole.estimators.streaming import N_KEPT, resume_stream
from keyhole.layer import FiniteLayer, KernelLayer
from keyhole.ridge.design import DesignMoments
from keyhole.streaming import KeptSamples, LayerSums

FORMAT, VERSION = "keyhole-model", 1
_NAMES = {
    np.dtype(code): name
    for name, code in {
        "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
        "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
    }.items()
}  # fmt: skip
"""Types of arrays that a model may hold."""


def write_container(path: Path, document: Any, arrays: Mapping[str, np.ndarray], *, overwrite: bool) -> None:
    """Write arrays and a document as a file that appears whole; refuse an existing one unless told otherwise."""
    from safetensors.numpy import save

    stored = {name: np.ascontiguousarray(a, dtype=a.dtype.newbyteorder("<")) for name, a in arrays.items()}
    text = json.dumps(document, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    metadata = {"format": FORMAT, "version": str(VERSION), "document": text, "sha256": _digest(text, stored)}
    try:
        write_whole(save(stored, metadata), path, overwrite=overwrite)
    except FileExistsError as error:
        raise ValueError(f"{error} Choose another name, or pass overwrite=True.") from None


def read_container(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """Read document and arrays, and compare them with their digest. Raises ValueError or OSError."""
    from safetensors import SafetensorError, safe_open

    path.stat()  # a file that is not there is no damaged one
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise damaged(path, "a model file is safetensors, whole and unchanged", f"{str(error)[:200]!r}") from None
    if metadata.get("format") != FORMAT:
        raise damaged(path, f"a model file says that its format is {FORMAT!r}", "no such words")
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"this keyhole reads version {VERSION} of its model files: {path.name!r} has version "
            f"{metadata.get('version')!r:.40}. Use the keyhole that wrote it, or a newer one."
        )
    text = metadata.get("document", "")
    if any(array.dtype not in _NAMES for array in arrays.values()) or _digest(text, arrays) != metadata.get("sha256"):
        raise damaged(path, "contents must match the digest that was stored with them", "contents that do not")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "the description of a model must be JSON", f"another ({str(error)[:80]})") from None
    if not isinstance(document, dict):
        raise damaged(path, "the description of a model must be a JSON object", f"a {type(document).__name__}")
    return document, arrays


def damaged(path: Path, rule: str, evidence: str) -> ValueError:
    """An error with its remedy."""
    return ValueError(
        f"{rule}: {path.name!r} has {evidence}. It is damaged, or was not written by kh.save; fetch it again, or fit "
        "and save the model anew."
    )


def _digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass"))
    for name in sorted(arrays):
        array = arrays[name]
        line = f"\n{name!r} {_NAMES[array.dtype]} {array.shape} {array.nbytes}\n"
        digest.update(line.encode("utf-8", "surrogatepass"))
        digest.update(array.tobytes())
    return digest.hexdigest()


def refuse_if(wrong: Any, words: str) -> None:
    """What is wrong with a description, in words that follow "it has"."""
    if wrong:
        raise ValueError(words)


LAWS: dict[str, type] = {
    law.__name__: law for law in (GaussianHeads, QueryKeyHeads, IdentityHeads, LearnedHeads, FittedHeads)
}
RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (
        TokenRule, FittedHeads, Step, FiniteLayer, KernelLayer, PooledSets, LayerSums, DesignMoments, KeptSamples,
        TrainingSamples,
    )
}  # fmt: skip
UNSAVED = {
    "LearnedHeads": {"callback", "augment"},
    "FiniteLayer": {"device"},
    "KernelLayer": {"device", "dtype"},
    "TokenRule": {"looks"},
}
"""What is not in a file: functions, which are no data; devices, which the reader may not have: NumPy predicts; and the
looks of a rule, which are those of the law."""
PRECISIONS = ("float64", "float32")
CHOICES = ("zero-mean", "identity", "learned")  # what a fitted law was chosen as
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
        if array.dtype.newbyteorder("<") not in _NAMES:
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
            held["extras"] = value.extras
        elif isinstance(value, SetGroups):
            held = {"sets": value.sets, "counts": value.counts, "extras": value.extras}
        elif isinstance(value, HeadDraw):
            held = {"law": value.law, "n_heads": value.n_heads, "dim": value.dim, "seed": value.seed}
            held["query_dim"] = value.query_dim
        elif known(RECORDS, value):
            held = {f.name: getattr(value, f.name) for f in fields(value) if f.name not in UNSAVED.get(kind, ())}
            if isinstance(value, DesignMoments):
                held["gram"] = lower_triangle(value.gram)
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
        refuse_if(not all(isinstance(item, str) for item in items), "labels that are not text where text is announced")
        if kind == "text":
            self._padding += padding_of(items)
            if self._padding > MOST_PADDING:
                raise ValueError(f"text that grows by {self._padding:,} bytes as it is read, {MOST_PADDING:,} allowed")
        array = np.array(items, dtype=object if kind == "object" else np.str_)
        return array.reshape([int(s) for s in shape])


def lower_triangle(matrix: np.ndarray) -> np.ndarray:
    """The columns of the lower triangle end to end: half the size, and nothing about symmetry left to check."""
    return np.concatenate([matrix[k:, k] for k in range(len(matrix))])


def from_lower_triangle(columns: Any) -> np.ndarray:
    """The matrix, its upper triangle zero."""
    _check_array(columns, 1, "sums of products")
    size = math.isqrt(2 * len(columns))
    if size < 1 or size * (size + 1) // 2 != len(columns):
        raise ValueError(f"{len(columns)} sums of products, which make no triangle")
    matrix = np.zeros((size, size), order="F")
    start = 0
    for k in range(size):
        matrix[k:, k] = columns[start : start + size - k]
        start += size - k
    return matrix


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
        return SetGroups(held["sets"], held["counts"], held.get("extras"))
    if kind == "HeadDraw":
        refuse_if(held["n_heads"] > MOST_HEADS, f"{held['n_heads']:,} heads, of which {MOST_HEADS:,} are allowed")
        # files of 0.1.0 say nothing of queries: they have the dimension of keys
        return HeadDraw(held["law"], held["n_heads"], held["dim"], held["seed"], held.get("query_dim"))
    if kind in RECORDS:
        record = RECORDS[kind]
        wanted = {f.name for f in fields(record) if f.default is MISSING and f.default_factory is MISSING}
        known = {f.name for f in fields(record)} - UNSAVED.get(kind, set())
        refuse_if(not wanted <= set(held) <= known, f"a {kind} with {sorted(held)}, which should have {sorted(known)}")
        if record is DesignMoments:
            held["gram"] = from_lower_triangle(held["gram"])
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
    elif not isinstance(law, GaussianHeads) or law.strength_range is None:
        _check_array(law.mean, 2, "mean", kinds="fiub")


def _law_fits(law: Any, shape: tuple[int, int]) -> bool:
    """Whether a law has heads of shape (D_q, D)."""
    if isinstance(law, FittedHeads):
        return bool(law.means_.shape[1:] == shape)
    if isinstance(law, GaussianHeads) and np.ndim(law.mean) < 2 and law.pairs is not None:
        stated = np.asarray(law.pairs)
        return stated.ndim == 2 and stated.dtype.kind in "iu" and bool(((stated >= 0) & (stated + 1 < shape)).all())
    mean = getattr(law, "mean", None)
    return mean is None or np.ndim(mean) < 2 or np.shape(mean) == shape


def _sets(tokens: Any, offsets: Any, query: Any, extras: Any = None) -> SetBatch:
    _check_array(tokens, 2, "tokens")
    if not isinstance(offsets, np.ndarray) or offsets.dtype != np.int64 or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError("sets without offsets")
    if offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 1).any():
        raise ValueError("sets whose offsets do not share out the tokens")
    if query is not None:
        _check_array(query, 2, "query")
        if len(query) != len(offsets) - 1 or not query.shape[1] or query.dtype != tokens.dtype:
            raise ValueError(f"queries of shape {query.shape} for {len(offsets) - 1} sets")
    if extras is not None:
        _check_array(extras, 2, "extras")
        if len(extras) != len(offsets) - 1 or not extras.shape[1] or extras.dtype != np.float64:
            raise ValueError(f"extras of shape {extras.shape} for {len(offsets) - 1} sets")
    return SetBatch._from_flat(tokens, offsets, query, extras)


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
            of_query = (built.query_centre, built.query_spread)
            if built.scaling == "standard" and any(array is not None for array in of_query):
                _check_array(built.query_centre, 1, "query_centre")
                _check_array(built.query_spread, 1, "query_spread")
                if of_query[0].shape != of_query[1].shape or not (of_query[1] > 0).all() or built.query != "given":
                    raise ValueError("a token rule whose centre and spread of queries do not fit")
            check_number(built.extras_scale, "extras_scale", minimum=0.0, exclusive=True)
            of_extras = (built.extras_centre, built.extras_spread)
            if any(array is not None for array in of_extras):
                _check_array(built.extras_centre, 1, "extras_centre")
                _check_array(built.extras_spread, 1, "extras_spread")
                if of_extras[0].shape != of_extras[1].shape or not (of_extras[1] > 0).all():
                    raise ValueError("a token rule whose centre and spread of extras do not fit")
            every = (built.centre, built.spread, *of_query)
            if built.scaling != "standard" and any(array is not None for array in every):
                raise ValueError(f"a token rule with a centre, and the scaling {built.scaling!r}")
        case "Step":
            check_count(built.step, "step", minimum=0)
            if not all(isinstance(error, float) for error in (built.loo_error, built.held_out_error)):
                raise ValueError("a step whose errors are no numbers")
        case "FittedHeads":
            _check_array(built.means_, 3, "means_")
            if 0 in built.means_.shape:
                raise ValueError(f"means of shape {built.means_.shape}")
            if not (isinstance(built.scale, float) and built.scale > 0 and math.isfinite(built.scale)):
                raise ValueError(f"a scale of {built.scale!r:.40}")
            for name in ("query_scales_", "key_scales_"):
                scales = getattr(built, name)
                if (scales is None) != (built.query_scales_ is None):
                    raise ValueError("scales of the query or of the key, and not of both")
                if scales is not None:
                    _check_array(scales, 1, name)
                    axis = 1 if name == "query_scales_" else 2
                    if len(scales) != built.means_.shape[axis] or not (scales > 0).all():
                        raise ValueError(f"{name} that do not fit the means")
            _check_looks(built)
            check_choice(built.chosen, "chosen", CHOICES)
            check_number(built.strength, "strength")
            check_count(built.steps, "steps", minimum=0)
            refuse_if(not isinstance(built.reason, str), "a law chosen for no reason in words")
            if not isinstance(built.history, tuple) or not all(isinstance(step, Step) for step in built.history):
                raise ValueError("a history of something else than steps")
        case "PooledSets":
            check_choice(built.pooling, "pooling", POOLINGS)
            known = isinstance(built.base, SetBatch if built.each else SetBatch | SetGroups)
            refuse_if(type(built.each) is not bool or not known, "pooled sets that are none")
        case "FiniteLayer":
            _check_extras_values(built)
            _check_array(built.values, 3, "values")
            _check_array(built.intercept, 1, "intercept")
            refuse_if(not isinstance(built.heads, HeadDraw), "a layer without heads")
            check_activation(built.activation)
            check_choice(built.dtype, "dtype", PRECISIONS)
            shape = (built.heads.n_heads, built.heads.dim + 1, len(built.intercept))
            refuse_if(built.values.shape != shape, f"values of shape {built.values.shape}, which should be {shape}")
        case "KernelLayer":
            _check_extras_values(built)
            _check_array(built.dual, 2, "dual")
            _check_array(built.intercept, 1, "intercept")
            refuse_if(not isinstance(built.sets, (SetBatch, PooledSets)), "a kernel without its training sets")
            check_pointwise(built.activation)
            scaled = getattr(built.law, "query_scales_", None) is not None
            known = isinstance(built.law, (GaussianHeads, FittedHeads))
            refuse_if(scaled or not known, "a kernel of a law that has none")
            if built.dual.shape != (len(built.sets), len(built.intercept)):
                raise ValueError(f"dual coefficients of shape {built.dual.shape} for {len(built.sets)} sets")
        case "LayerSums":
            known = isinstance(built.moments, DesignMoments) and isinstance(built.kept, KeptSamples)
            refuse_if(not known, "sums that are none")
        case "DesignMoments":
            _check_moments(built)
        case "KeptSamples":
            _check_kept(built)
        case "TrainingSamples":
            refuse_if(not isinstance(built.batch, (SetBatch, SetGroups)), "training samples without their sets")
            _check_array(built.columns, 2, "columns")
            n = len(built.batch)
            refuse_if(len(built.columns) != n, f"outputs of {len(built.columns)} training samples for {n}")
            for name, array, kinds in (("weights", built.weights, "f"), ("groups", built.groups, "i")):
                if array is not None:
                    _check_array(array, 1, name, kinds)
                    refuse_if(len(array) != n or array.min() < 0, f"{name} of training samples that do not fit")
            refuse_if(built.weights is not None and not built.weights.any(), "training samples of no weight")


def _check_looks(law: FittedHeads) -> None:
    """Every look asks with what the looks before it found, and the last one's means with what all of them did."""
    refuse_if(not isinstance(law.looks_, tuple), "looks that are none")
    rows, width = law.means_.shape[1:]
    for number, look in reversed(list(enumerate(law.looks_))):
        _check_array(look, 3, f"looks_[{number}]")
        asked = rows - len(look) * (width - 1)
        refuse_if(not len(look) or look.shape[1:] != (asked, width), f"a look of shape {look.shape} before {rows} rows")
        rows = asked
    refuse_if(rows < 1, "looks that find more than the last one asks with")


def _check_extras_values(layer: Any) -> None:
    if layer.extras_values is not None:
        _check_array(layer.extras_values, 2, "extras_values")
        if layer.extras_values.shape[1:] != layer.intercept.shape or not len(layer.extras_values):
            raise ValueError(f"values of extras of shape {layer.extras_values.shape}")


def _check_moments(moments: DesignMoments) -> None:
    for name, ndim in (("gram", 2), ("cross", 2), ("squares", 1), ("means", 1), ("y_mean", 1)):
        _check_array(getattr(moments, name), ndim, name)
        refuse_if(getattr(moments, name).dtype != np.float64, f"{name} of single precision")
    p, t = moments.cross.shape
    shapes = [getattr(moments, name).shape for name in ("gram", "means", "squares", "y_mean")]
    refuse_if(shapes != [(p, p), (p,), (t,), (t,)], "sums whose shapes do not fit each other")
    sizes = np.sqrt(np.abs(moments.gram.diagonal()))
    # every product of two columns is bounded by their sizes, and no square is negative
    bounded = all((np.abs(moments.gram[k:, k]) <= (1 + 1e-3) * sizes[k:] * sizes[k] + 1e-280).all() for k in range(p))
    if not bounded or (moments.gram.diagonal() < 0).any() or (moments.squares < 0).any():
        raise ValueError("sums that are no sums of squares")
    check_count(moments.count, "count")
    check_number(moments.weight, "weight", minimum=0.0, exclusive=True)
    check_number(moments.y_size, "y_size", minimum=0.0)
    check_number(moments.rounding, "rounding", minimum=0.0, exclusive=True)
    refuse_if(moments.rounding > np.finfo(np.float32).eps, f"products rounded to {moments.rounding:g}")
    refuse_if(type(moments.fit_intercept) is not bool, "no word about an intercept")


def _check_kept(kept: KeptSamples) -> None:
    check_count(kept.limit, "limit", minimum=0)
    _check_array(kept.columns, 2, "columns")
    _check_array(kept.weights, 1, "weights")
    k = len(kept.hashes) if isinstance(kept.hashes, np.ndarray) and kept.hashes.ndim == 1 else -1
    if k < 0 or k > kept.limit or kept.hashes.dtype != np.uint64 or not (kept.hashes[:-1] < kept.hashes[1:]).all():
        raise ValueError("hashes of samples that are no increasing numbers, or too many")
    if (len(kept.columns), len(kept.weights)) != (k, k) or not (kept.weights > 0).all():
        raise ValueError("samples kept without outputs, or of no weight")
    if k == 0 and kept.sets is None:
        return
    if not isinstance(kept.sets, (SetBatch, SetGroups)) or len(kept.sets) != k:
        raise ValueError("samples kept without their sets")


def _check_array(array: Any, ndim: int, name: str, kinds: str = "f") -> None:
    if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype.kind not in kinds:
        raise ValueError(f"{name} that are not an array of numbers with {ndim} axes")
    refuse_if(array.dtype == np.float16, f"{name} of half precision")
    refuse_if(not np.isfinite(array).all(), f"{name} that are not finite")


ESTIMATORS: dict[str, type] = {
    kind.__name__: kind
    for kind in (AttentionRegressor, AttentionClassifier, AttentionFeatures, NormBallRegressor, NormBallClassifier)
}
_NOTE = re.compile(r"[a-z][a-z0-9_]{0,60}_|_single")  # names of fitted attributes
LARGEST_TRIAL = 4_000_000  # entries of a head drawn while loading
_BUILT = {"layer_", "values_", "heads_", "n_heads_", "dual_coef_", "active_heads_"}
"""Attributes that are parts of the layer: stored once, as the layer."""


_OF_SAMPLES = {"loo_predictions_", "loo_decision_"}
"""Attributes of the size of the training set that no prediction needs."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError)
"""What building an estimator from a description may raise."""


@dataclass(frozen=True)
class SavedModel:
    """What a file holds: a fitted estimator and the schema of its input."""

    estimator: Any
    schema: Schema


def save(
    estimator: Any, path: Any, *, keep: str = "all", schema: Schema | None = None, overwrite: bool = False
) -> None:
    """Save a fitted estimator as one file: arrays as safetensors, all else as JSON in its header.

    Parameters
    ----------
    estimator : AttentionRegressor, AttentionClassifier, AttentionFeatures, NormBallRegressor or NormBallClassifier
        Fitted; finite or infinitely many heads, with any law of keyhole's.
    path : str or Path
        The file appears whole or not at all.
    keep : "all" or "predict"
        "all" keeps the sums of a model fitted in batches, p × p numbers, so that ``partial_fit`` goes on after loading
        exactly where it was; and the training samples of any other, so that its leave-one-out fits are made anew for
        intervals and novelty. "predict" is the lean file: without the sums, the training samples of finitely many heads
        and their leave-one-out predictions. A model loaded from it predicts, has intervals of the plain jackknife only,
        and refuses to go on.
    schema : Schema, optional
        What `read_table` learned about columns (``data.schema``), to read tables the same way when they are predicted;
        made from the estimator if not given.
    overwrite : bool
        Whether a file of that name may be replaced.

    Notes
    -----
    Heads are stored as law and seed, not as matrices. With infinitely many heads the training sets are part of the
    model, and so of the file. A model fitted on a device is loaded as one that predicts by NumPy, with the same numbers
    up to rounding. A generator given as ``random_state`` is stored as the seed that was drawn from it, and a callback
    of a law is not stored. What could not be loaded again is not written.

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
    kind, path = type(estimator).__name__, Path(path)
    check_choice(keep, "keep", ("all", "predict"))
    if not known(ESTIMATORS, estimator):
        raise TypeError(f"`estimator` must be one of keyhole's, {', '.join(ESTIMATORS)}: got {kind}.")
    if not hasattr(estimator, "n_features_in_"):
        raise ValueError(f"`estimator` must be fitted before it is saved: this {kind} is not. Call fit first.")
    if path.is_dir():
        raise ValueError(f"`path` must name a file: {path.name!r} is a folder. Add a file name, such as model.keyhole.")
    if schema is None:
        names = tuple(str(name) for name in getattr(estimator, "feature_names_in_", ()))
        schema = Schema(int(estimator.n_features_in_), bool(estimator.has_query_), names)
    packer = Packer()
    document = {
        "keyhole": __version__,
        "estimator": kind,
        "parameters": {name: packer.pack(value, name) for name, value in _parameters(estimator).items()},
        "layer": _pack_layer(packer, estimator),  # first: after partial_fit, asking for the layer solves for it
        "fitted": {
            name: packer.pack(value, name)
            for name, value in vars(estimator).items()
            if _NOTE.fullmatch(name) and name not in _BUILT and (keep == "all" or name not in _OF_SAMPLES)
        },
        "schema": {
            "names": list(schema.names),
            "target": schema.target,
            "columns": [list(pair) for pair in schema.columns],
            "codings": [coding.as_list() for coding in schema.codings],
        },
    }
    stream, training = (vars(estimator).get(name) for name in ("_stream", "_training"))
    if keep == "all" and stream is not None:
        document["stream"] = packer.pack(stream.sums, "sums")
    if keep == "all" and training is not None:
        document["training"] = packer.pack(training, "training samples")
    try:
        _restore(json.loads(json.dumps(document)), Unpacker(packer.arrays))
    except UNREADABLE as error:
        raise ValueError(
            f"a model is saved only if it can be loaded again: this {kind} has {_words(error)}. Were fitted attributes "
            "changed? Fit it anew."
        ) from None
    write_container(path, document, packer.arrays, overwrite=overwrite)


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
    refuse_if(path.is_dir(), f"`path` must name a model file: {path.name!r} is a folder.")
    document, arrays = read_container(path)
    try:
        return _restore(document, Unpacker(arrays))
    except UNREADABLE as error:
        raise damaged(path, "a model file describes an estimator that this keyhole knows", _words(error)) from None


def _words(error: BaseException) -> str:
    return f"no {error}"[:300] if isinstance(error, KeyError) else str(error)[:300]


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
            "extras_values": packer.pack(layer.extras_values, "extras_values"),
            "activation": layer.activation,
            "dtype": layer.dtype,
        }
    return packer.pack(layer, "layer_")


def _restore(document: dict[str, Any], unpacker: Unpacker) -> SavedModel:
    kind = ESTIMATORS[document["estimator"]]
    parameters = {str(name): unpacker.unpack(value) for name, value in document["parameters"].items()}
    estimator = kind(**parameters)  # an unknown parameter is a TypeError
    for name, value in document["fitted"].items():
        refuse_if(not _NOTE.fullmatch(name) or name in _BUILT, f"a fitted attribute {name!r:.60}")
        setattr(estimator, name, unpacker.unpack(value))
    if type(estimator.n_features_in_) is not int or type(estimator.has_query_) is not bool:
        raise ValueError("no token dimension, or no word about queries")
    refuse_if(estimator.n_features_in_ < 1, f"tokens of dimension {estimator.n_features_in_}")
    if not hasattr(estimator, "n_query_features_in_"):  # a file of 0.1.0: queries have the dimension of keys
        estimator.n_query_features_in_ = estimator.n_features_in_ if estimator.has_query_ else 0
    asked = estimator.n_query_features_in_
    if type(asked) is not int or (asked > 0) != estimator.has_query_ or asked < 0:
        raise ValueError(f"queries of dimension {asked!r:.40}")
    if not hasattr(estimator, "n_extras_in_"):
        estimator.n_extras_in_ = 0
    if not hasattr(estimator, "tokens_"):
        estimator.tokens_ = TokenRule("none", "given", "mean")
    count = estimator.n_extras_in_
    refuse_if(type(count) is not int or count < 0, f"{count!r:.40} columns of extras")
    _attach_layer(estimator, document["layer"], unpacker)
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
        estimator._keep_training(training)
    found = document["schema"]
    schema = Schema(
        estimator.n_features_in_,
        estimator.has_query_,
        tuple(str(name) for name in found["names"]),
        str(found["target"]),
        tuple((str(option), _option(value)) for option, value in found["columns"]),
        tuple(Coding.of_list(coding) for coding in found.get("codings", ())),
    )
    refuse_if(len({coding.column for coding in schema.codings}) < len(schema.codings), "two codings of one column")
    return SavedModel(estimator, schema)


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
        _attach_looks(estimator, heads)
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
        _attach_looks(estimator, getattr(layer, "heads", layer))
        if isinstance(layer, FiniteLayer):
            _check_heads(layer.heads, estimator)
            estimator.heads_, estimator.n_heads_ = layer.heads, layer.heads.n_heads
            estimator.values_ = layer.values[..., 0] if single else layer.values
        elif isinstance(layer, KernelLayer):
            _check_training_sets(estimator, layer.sets)
            if not _law_fits(layer.law, (layer.sets.query_dim + 1, layer.sets.dim + 1)):
                raise ValueError(f"a kernel that does not fit tokens of dimension {estimator.n_features_in_}")
            estimator.n_heads_ = math.inf
            estimator.dual_coef_ = layer.dual[..., 0] if single else layer.dual
        else:
            raise ValueError("no layer")


def _resume(estimator: Any, sums: Any) -> None:
    """Attach the sums of a model fitted in batches, checked against its layer."""
    if not isinstance(sums, LayerSums) or not isinstance(estimator, (AttentionRegressor, AttentionClassifier)):
        raise ValueError("sums that are none, or of an estimator that has none")
    layer, moments, kept = estimator.layer_, sums.moments, sums.kept
    labelled = isinstance(estimator, AttentionClassifier)
    n_columns = layer.values[..., 0].size + estimator.n_extras_in_ if isinstance(layer, FiniteLayer) else -1
    if moments.cross.shape != (n_columns, len(layer.intercept)):
        raise ValueError(f"sums of shape {moments.cross.shape}, which are not those of the layer")
    if moments.fit_intercept != bool(estimator.fit_intercept):
        raise ValueError("sums about the mean without an intercept, or the other way round")
    if not moments.count <= estimator.n_samples_seen_:
        raise ValueError(f"sums over {moments.count} samples, of which {estimator.n_samples_seen_} were seen")
    limits = (N_KEPT,) if labelled else (0, N_KEPT)  # regressors of older files keep none
    if kept.limit not in limits or kept.columns.shape[1] != len(layer.intercept):
        raise ValueError("samples kept that are not those of the layer")
    if labelled and (kept.sets is None or not (np.abs(kept.columns) == 1).all()):
        raise ValueError("no samples to calibrate on, or of other labels")
    if kept.sets is not None:
        _check_input(estimator, kept.sets, "samples to calibrate on")
    resume_stream(estimator, sums, single=_is_single(estimator))


def _check_input(estimator: Any, samples: SetBatch | SetGroups, what: str) -> None:
    """Samples must be such as the model takes."""
    refuse_if(samples.dim != estimator.n_features_in_, f"{what} of another dimension")
    if (samples.query_dim if samples.query is not None else 0) != estimator.n_query_features_in_:
        raise ValueError(f"{what} with queries and training sets without, or the other way round")
    if (0 if samples.extras is None else samples.extras.shape[1]) != estimator.n_extras_in_:
        raise ValueError(f"{what} with other extras than the training sets")


def _check_training(estimator: Any, training: Any) -> None:
    """Samples that the leave-one-out fits are made from, checked against the layer."""
    known = isinstance(training, TrainingSamples) and isinstance(estimator, (AttentionRegressor, AttentionClassifier))
    refuse_if(not known or estimator.solver_ == "cg", "training samples that are none, or of a model that has none")
    _check_input(estimator, training.batch, "training samples")
    if training.columns.shape[1] != len(estimator.layer_.intercept):
        raise ValueError("training samples with other outputs than the layer")
    if isinstance(estimator, AttentionClassifier) and not (np.abs(training.columns) == 1).all():
        raise ValueError("training samples of other labels")


def _check_training_sets(estimator: Any, sets: SetBatch | PooledSets) -> None:
    """Training sets must be what the rule for tokens makes of new ones, or a kernel cannot compare the two."""
    rule = estimator.tokens_
    refuse_if(not isinstance(rule, TokenRule), "no rule for tokens")
    base = sets.unpooled
    plain = base.is_plain
    refuse_if(base.extras is not None, "training sets with extras, whose part is in the values")
    refuse_if(sets.dim != estimator.n_features_in_, "a kernel that does not fit the tokens")
    fits = sets.pooling == rule.pooling and sets.each == (plain and rule.query == "each")
    has_query = rule.query == "mean" or (estimator.has_query_ and rule.query == "given")
    fits = fits and base.query_dim == _query_dim(estimator)
    if not fits or (not plain and rule.query != "given") or (base.query is not None) != has_query:
        raise ValueError("training sets pooled or queried otherwise than new ones")


def _attach_pruned(estimator: Any, parts: dict[str, Any]) -> None:
    heads, active, values, intercept = (parts[k] for k in ("heads", "active", "values", "intercept"))
    _attach_looks(estimator, heads)
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
    refuse_if(len(active) and not 0 <= active[0] <= active[-1] < heads.n_heads, "active heads that do not exist")
    refuse_if(np.delete(kept, active, axis=0).any(), "values of heads that are not active")
    if intercept.shape != kept.shape[2:] or intercept.dtype.kind != "f":
        raise ValueError("an intercept that does not fit the values")
    estimator.heads_, estimator.active_heads_, estimator.values_ = heads, active, values
    estimator.layer_ = PrunedLayer(
        heads, active, kept[active], intercept, activation, dtype, parts.get("extras_values")
    )
    _check_extras_values(estimator.layer_)


def _attach_looks(estimator: Any, heads: Any) -> None:
    """The rule for tokens looks through the looks of the law, which a file holds once."""
    refuse_if(not isinstance(estimator.tokens_, TokenRule), "no rule for tokens")
    estimator.tokens_ = estimator.tokens_.with_looks_of(getattr(heads, "law", None))


def _query_dim(estimator: Any) -> int:
    """The dimension of the queries that the layer sees: those given, or made of keys, and what looks find."""
    rule = estimator.tokens_
    given = estimator.has_query_ and rule.query == "given"
    asked = int(estimator.n_query_features_in_ if given else estimator.n_features_in_)
    return asked + sum(len(look) for look in rule.looks) * int(estimator.n_features_in_)


def _check_heads(heads: Any, estimator: Any) -> None:
    shape = (_query_dim(estimator) + 1, estimator.n_features_in_ + 1)
    if (
        not isinstance(heads, HeadDraw)
        or (heads.query_dim + 1, heads.dim + 1) != shape
        or not _law_fits(heads.law, shape)
    ):
        raise ValueError(f"heads that do not fit tokens of dimension {estimator.n_features_in_}")
    refuse_if(isinstance(heads.law, UnfittedLaw), "heads of a law that was never fitted")
    # a law that cannot be drawn from says so; a small file must not make us draw a large matrix
    small = math.prod(shape) + sum(shape) * getattr(heads.law, "rank", 0) <= LARGEST_TRIAL
    refuse_if(small and not np.isfinite(heads.block(0, 1)).all(), "heads that are not finite")


def _is_single(estimator: Any) -> bool:
    if isinstance(estimator, AttentionClassifier):
        return len(estimator.classes_) == 2
    refuse_if(type(estimator._single) is not bool, "no word about whether there is one output")
    return bool(estimator._single)


def _check_labels(estimator: Any) -> None:
    """Labels are sorted and all different, and a classifier has as many columns of scores as its labels need."""
    classes = estimator.classes_
    refuse_if(not isinstance(classes, np.ndarray) or classes.ndim != 1 or len(classes) < 2, "no labels to choose from")
    refuse_if(classes.dtype.kind == "f" and not np.isfinite(classes).all(), "labels that are not finite")
    labels, columns = classes.tolist(), len(estimator.layer_.intercept)
    refuse_if(labels != sorted(set(labels)), "labels that are not sorted, or not all different")
    refuse_if(columns != (1 if len(labels) == 2 else len(labels)), f"{columns} scores for {len(labels)} labels")


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
    refuse_if(missing := required - set(names), f"no {', '.join(sorted(missing))}")
    for name in names:
        if not _fits(name, getattr(estimator, name), estimator):
            raise ValueError(f"{name} that is no such thing, {getattr(estimator, name)!r:.60}")


def _fits(name: str, value: Any, estimator: Any) -> bool:
    """Whether a fitted attribute has the type, the shape and the range that it has after a fit."""
    match name:
        case "n_features_in_" | "n_query_features_in_" | "n_extras_in_" | "has_query_" | "_single" | "classes_":
            return True  # checked before the layer, or with it
        case "feature_names_in_":
            return _is_array(value, "OU", (estimator.n_features_in_,))
        case "law_":
            return _same_law(value, getattr(estimator, "heads_", estimator.layer_).law)
        case "tokens_":
            if not isinstance(value, TokenRule):
                return False
            asked = estimator.n_features_in_ if value.query_centre is None else len(value.query_centre)
            fits = value.query != "given" or not estimator.has_query_ or asked == estimator.n_query_features_in_
            return value.centre is None or (len(value.centre) == estimator.n_features_in_ and fits)
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
        case "loo_errors_" | "gcv_errors_" | "holdout_errors_" | "log_losses_":
            return _is_array(value, "f", estimator.alphas_.shape)
        case "loo_error_" | "gcv_error_" | "holdout_error_" | "log_loss_" | "residual_" | "objective_" | "duality_gap_":
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
        case "left_out_errors_":
            fits = _is_array(
                value, "f", (None, 1 if hasattr(estimator, "classes_") else len(estimator.layer_.intercept))
            )
            return fits and bool((value >= 0).all())
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
    if type(one) is not type(other):
        return False
    pairs = [(value, vars(other)[name]) for name, value in vars(one).items() if name != "looks_"]
    looks = [getattr(law, "looks_", ()) for law in (one, other)]
    same = len(looks[0]) == len(looks[1]) and all(map(np.array_equal, *looks))
    return same and all(type(a) is type(b) and np.array_equal(a, b) for a, b in pairs)
