"""Objects as JSON and arrays, in one safetensors file.

Whatever is read is checked, and nothing is executed.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from keyhole import __version__
from keyhole._checks import check_count, check_number, check_pairs
from keyhole._files import refuse_special_file, write_whole
from keyhole.attention.activations import check_activation, check_pointwise
from keyhole.attention.heads import FittedHeads, GaussianHeads, HeadDraw, QueryKeyHeads, Step
from keyhole.attention.learned import IdentityHeads, LearnedHeads, UnfittedHeads
from keyhole.choose import Candidate
from keyhole.data.sets import SET_POOLINGS, PooledSets, SetBatch, SetGroups
from keyhole.data.tokens import POOLINGS, QUERIES, SCALINGS, TokenRule
from keyhole.estimators.selection import Selection
from keyhole.key_selection import KeySelection
from keyhole.ridge.design import DesignMoments
from keyhole.solvers.layers import FiniteLayer, KernelLayer
from keyhole.streaming import KeptSamples, LayerSums
from keyhole.training import TrainingSet

FORMAT = "keyhole-model"
VERSION = "2"
"""Of the files that are written and read."""

_NAMES = {
    np.dtype(code): name
    for name, code in {
        "F64": "<f8",
        "F32": "<f4",
        "F16": "<f2",
        "I64": "<i8",
        "I32": "<i4",
        "I16": "<i2",
        "I8": "|i1",
        "U64": "<u8",
        "U32": "<u4",
        "U16": "<u2",
        "U8": "|u1",
        "BOOL": "|b1",
    }.items()
}
"""Types of arrays that a model may hold."""


def write_container(
    path: Path, document: Any, arrays: Mapping[str, np.ndarray], *, overwrite: bool
) -> None:
    """Write arrays and a document as a file that appears whole or not at all.

    An existing file is replaced only if ``overwrite``.
    """
    from safetensors.numpy import save

    stored = {
        name: np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        for name, array in arrays.items()
    }
    text = json.dumps(document, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "document": text,
        "sha256": _digest(text, stored),
    }
    try:
        write_whole(save(stored, metadata), path, overwrite=overwrite)
    except FileExistsError as error:
        raise ValueError(f"{error} Choose another name, or pass overwrite=True.") from None


def read_container(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    """Read document and arrays, and compare them with their digest.

    Raises ValueError or OSError.
    """
    from safetensors import SafetensorError, safe_open

    # the file as safetensors has it; a file that is not there is no damaged one
    refuse_special_file(path)
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise damaged(
            path, "a model file is safetensors, whole and unchanged", f"{str(error)[:200]!r}"
        ) from None

    # its format, version and digest
    if metadata.get("format") != FORMAT:
        raise damaged(path, f"a model file says that its format is {FORMAT!r}", "no such words")
    version = metadata.get("version")
    text = metadata.get("document", "")
    if version != VERSION:
        writer = _writer_of(text) or "another keyhole"
        raise ValueError(
            f"keyhole {__version__} reads version {VERSION} of its model files: {path.name!r} has "
            f"version {version!r:.40}, written by {writer}. Install {writer}, or fit and save the "
            "model anew."
        )
    has_our_types = all(array.dtype in _NAMES for array in arrays.values())
    if not has_our_types or _digest(text, arrays) != metadata.get("sha256"):
        raise damaged(
            path, "contents must match the digest that was stored with them", "contents that do not"
        )

    # its description
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(
            path, "the description of a model must be JSON", f"another ({str(error)[:80]})"
        ) from None
    if not isinstance(document, dict):
        raise damaged(
            path, "the description of a model must be a JSON object", f"a {type(document).__name__}"
        )
    return document, arrays


_RELEASE = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?[A-Za-z0-9.+]{0,20}")
"""A version of keyhole: numbers, and what may follow them."""


def _writer_of(text: str) -> str | None:
    """The keyhole that wrote a document, such as "keyhole 0.3.0"; None where it does not say."""
    try:
        release = json.loads(text)["keyhole"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(release, str) or _RELEASE.fullmatch(release) is None:
        return None
    return f"keyhole {release}"


def newer_writer(document: Any) -> str | None:
    """The keyhole that wrote a document, if it is newer than this one.

    >>> newer_writer({"keyhole": "999.0.0"}), newer_writer({"keyhole": "0.0.1"})
    ('keyhole 999.0.0', None)
    """
    release = document.get("keyhole") if isinstance(document, dict) else None
    if not isinstance(release, str) or _RELEASE.fullmatch(release) is None:
        return None
    if _release_numbers(release) > _release_numbers(__version__):
        return f"keyhole {release}"
    return None


def _release_numbers(release: str) -> tuple[int, ...]:
    """Its first three numbers."""
    match = _RELEASE.fullmatch(release)
    assert match is not None
    return tuple(int(number or 0) for number in match.groups())


def damaged(path: Path, rule: str, evidence: str) -> ValueError:
    """An error with its remedy."""
    return ValueError(
        f"{rule}: {path.name!r} has {evidence}. It is damaged, or was not written by kh.save; "
        "fetch it again, or fit and save the model anew."
    )


def _digest(text: str, arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of a description and of all arrays with their names, types and shapes."""
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


DISTRIBUTIONS: dict[str, type] = {
    distribution.__name__: distribution
    for distribution in (GaussianHeads, QueryKeyHeads, IdentityHeads, LearnedHeads, FittedHeads)
}
RECORDS: dict[str, type] = {
    record.__name__: record
    for record in (
        TokenRule,
        FittedHeads,
        Step,
        FiniteLayer,
        KernelLayer,
        PooledSets,
        LayerSums,
        DesignMoments,
        KeptSamples,
        TrainingSet,
        Selection,
        Candidate,
        KeySelection,
    )
}
PARTS_OF_SETS = ("tokens", "offsets", "query", "extras", "pairs")
"""What a file has of sets: keys as one array, however they are stored, and no summaries of them."""

UNSAVED = {
    "FiniteLayer": {"device"},
    "KernelLayer": {"device", "dtype"},
    "TokenRule": {"hops"},
}
"""What is not in a file: functions, which are no data; devices, which the reader may not have:
NumPy predicts; and the hops of a rule, which are those of the head distribution."""
CHECKED_BY_RULES = {"Selection": {"scores", "errors"}}
"""Arrays that may hold NaN and infinity, where rounding forbids a judgement."""

PRECISIONS = ("float64", "float32")
CHOICES = ("zero-mean", "identity", "learned")  # what a fitted head distribution was chosen as
MOST_HEADS = 10**9
LARGEST_RANK = 2**20
MOST_PADDING = 2**26
"""Bytes by which the text of a file may grow in memory, where NumPy makes short texts as wide as
the longest.
"""


def known(table: dict[str, type], value: Any) -> bool:
    """Whether the type of ``value`` is in the table.

    A type derived from one that is does not count.
    """
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
        # np.float64 is a float, and stored as one; other numbers of NumPy keep their types
        if isinstance(value, (np.bool_, np.integer, np.floating)) and not isinstance(value, float):
            return self._array(np.asarray(value), name)
        # what JSON cannot hold in every reader is stored as text
        if isinstance(value, int):
            if abs(value) < 2**63:
                return int(value)
            return {"number": str(value)}
        if isinstance(value, float):
            if math.isfinite(value):
                return float(value)
            return {"number": repr(float(value))}
        if isinstance(value, np.ndarray):
            return self._array(value, name)
        if isinstance(value, (list, tuple)):
            kind = "tuple" if isinstance(value, tuple) else "list"
            items = [self.pack(item, f"{name}[{i}]") for i, item in enumerate(value)]
            return {kind: items}
        if isinstance(value, dict):
            # keys need not be text, so a dict is stored as pairs
            pairs = [
                [self.pack(key, name), self.pack(item, f"{name}[{key!r}]")]
                for key, item in value.items()
            ]
            return {"dict": pairs}
        return self._object(value, name)

    def _array(self, array: np.ndarray, name: str) -> Any:
        """JSON for an array: text goes into the JSON, numbers are put aside."""
        # text, in NumPy's own type or as objects; the first has the width of its longest entry
        is_object = array.dtype == object
        is_text = array.dtype.kind == "U"
        if is_text or (is_object and all(isinstance(item, str) for item in array.ravel())):
            items = [str(item) for item in array.ravel()]
            if is_text:
                self._padding += padding_of(items)
            if self._padding > MOST_PADDING:
                raise ValueError(
                    f"text in a model file may grow by {MOST_PADDING:,} bytes as it is read: "
                    f"{name} takes up {array.nbytes:,} because all its texts are as wide as the "
                    "longest. Shorten that one, or pass the texts as an array of objects."
                )
            kind = "text" if is_text else "object"
            return {"strings": items, "shape": list(array.shape), "as": kind}

        # numbers and booleans
        if array.dtype.newbyteorder("<") not in _NAMES:
            raise ValueError(
                f"a model file holds numbers, booleans and text: {name} is an array of "
                f"{array.dtype}. Convert it before fitting, labels for instance to text or "
                "integers."
            )
        # the order of an array in memory decides the last bit of a matrix product with it
        turned = array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous
        key = str(len(self.arrays))
        self.arrays[key] = array.T if turned else array
        return {"array": key, "turned": turned}

    def _object(self, value: Any, name: str) -> Any:
        """JSON for an object of keyhole: its kind, and its fields or parameters by name."""
        kind = type(value).__name__
        unsaved = UNSAVED.get(kind, set())
        parts: dict[str, Any]
        if isinstance(value, SetBatch):
            if value.is_on_disk:
                raise ValueError(
                    f"a model file holds arrays: the keys of {name} are files of their own, "
                    f"{value.nbytes:,} bytes in all. Save the model with keep='predict', or fit "
                    "sets that are in memory."
                )
            parts = {part: getattr(value, part) for part in PARTS_OF_SETS}
        elif isinstance(value, SetGroups):
            # how many sets each sample has says more than where its sets begin
            parts = {field.name: getattr(value, field.name) for field in fields(value)}
            del parts["set_offsets"]
            parts["counts"] = value.counts
        elif isinstance(value, HeadDraw):
            # heads are drawn again from their distribution and seed
            parts = {
                "distribution": value.distribution,
                "n_heads": value.n_heads,
                "dim": value.dim,
                "seed": value.seed,
                "query_dim": value.query_dim,
            }
        elif known(RECORDS, value):
            # dataclasses of ours; the Gram matrix of sums is symmetric, and half of it is stored
            parts = {
                field.name: getattr(value, field.name)
                for field in fields(value)
                if field.name not in unsaved
            }
            if isinstance(value, DesignMoments):
                parts["gram"] = lower_triangle(value.gram)
        elif known(DISTRIBUTIONS, value):
            # estimators in the sense of scikit-learn: their parameters are all there is
            parameters: dict[str, Any] = value.get_params(deep=False)
            parts = {key: item for key, item in parameters.items() if key not in unsaved}
        else:
            distributions = ", ".join(
                f"kh.{distribution}"
                for distribution in DISTRIBUTIONS
                if distribution != "FittedHeads"
            )
            raise ValueError(
                f"a model file holds arrays, and objects of classes that keyhole knows: {name} is "
                f"a {kind}. Known head distributions are {distributions}. Use one of these, or "
                "pickle the model."
            )
        packed = {key: self.pack(item, f"{name}.{key}") for key, item in parts.items()}
        return {"object": kind, "with": packed}


class Unpacker:
    """Builds objects from JSON and arrays; whatever is not in the table is refused."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays
        self._padding = 0

    def unpack(self, value: Any) -> Any:
        """The object that ``value`` describes.

        Raises ValueError, TypeError or KeyError where it describes none.
        """
        if value is None or isinstance(value, (bool, str, int, float)):
            return value
        match value:
            # numbers that JSON does not hold, and no endless ones, which take long to read
            case {"number": str(text)} if len(text) < 1000:
                if text in ("inf", "-inf", "nan"):
                    return float(text)
                return int(text)
            # containers
            case {"list": list(items)}:
                return [self.unpack(item) for item in items]
            case {"tuple": list(items)}:
                return tuple(self.unpack(item) for item in items)
            case {"dict": list(items)}:
                return {self.unpack(k): self.unpack(v) for k, v in items}
            # arrays of numbers, which are put aside, and of text
            case {"array": str(key), "turned": bool(turned)}:
                array = self.arrays[key]
                if array.ndim == 0:  # a number of NumPy
                    return array[()]
                return array.T if turned else array
            case {"strings": list(items), "shape": list(shape), "as": ("text" | "object") as kind}:
                return self._strings(items, shape, kind)
            # objects of ours, built from their parts
            case {"object": str(kind), "with": dict(parts)}:
                return _build(kind, {str(k): self.unpack(v) for k, v in parts.items()})
        raise ValueError(f"an unknown description, {str(value)[:60]}")

    def _strings(self, items: list[Any], shape: list[Any], kind: str) -> np.ndarray:
        """An array of text, as NumPy's own text or as objects."""
        refuse_if(
            not all(isinstance(item, str) for item in items),
            "labels that are not text where text is announced",
        )
        if kind == "text":
            self._padding += padding_of(items)
            if self._padding > MOST_PADDING:
                raise ValueError(
                    f"text that grows by {self._padding:,} bytes as it is read, {MOST_PADDING:,} "
                    "allowed"
                )
        array = np.array(items, dtype=object if kind == "object" else np.str_)
        return array.reshape([int(s) for s in shape])


def lower_triangle(matrix: np.ndarray) -> np.ndarray:
    """The columns of the lower triangle end to end.

    Half the size, and nothing about symmetry left to check.
    """
    return np.concatenate([matrix[k:, k] for k in range(len(matrix))])


def from_lower_triangle(columns: Any) -> np.ndarray:
    """The matrix, its upper triangle zero."""
    # a triangle of s columns has s (s + 1) / 2 numbers, so that s² ≤ 2 · numbers < (s + 1)²
    check_array(columns, 1, "sums of products")
    size = math.isqrt(2 * len(columns))
    if size < 1 or size * (size + 1) // 2 != len(columns):
        raise ValueError(f"{len(columns)} sums of products, which make no triangle")

    # column k begins at the diagonal
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


def _build(kind: str, parts: dict[str, Any]) -> Any:
    """An object of a kind from its parts by name, checked."""
    if kind == "SetBatch":
        names = set(PARTS_OF_SETS)
        _check_names(kind, parts, required=names, allowed=names)
        return _sets(**parts)
    if kind == "SetGroups":
        names = {"sets", "counts", "extras"}
        _check_names(kind, parts, required=names, allowed=names)
        return SetGroups(parts["sets"], parts["counts"], parts["extras"])
    if kind == "HeadDraw":
        n_heads = parts["n_heads"]
        refuse_if(n_heads > MOST_HEADS, f"{n_heads:,} heads, of which {MOST_HEADS:,} are allowed")
        return HeadDraw(
            distribution=parts["distribution"],
            n_heads=n_heads,
            dim=parts["dim"],
            seed=parts["seed"],
            query_dim=parts["query_dim"],
        )
    if kind in RECORDS:
        record = RECORDS[kind]
        required = {
            field.name
            for field in fields(record)
            if field.default is MISSING and field.default_factory is MISSING
        }
        allowed = {field.name for field in fields(record)} - UNSAVED.get(kind, set())
        _check_names(kind, parts, required=required, allowed=allowed)
        if record is DesignMoments:
            parts["gram"] = from_lower_triangle(parts["gram"])
        built = record(**parts)
        _check_record(built)
        return built
    if kind in DISTRIBUTIONS:
        distribution = DISTRIBUTIONS[kind](**parts)
        _check_distribution(distribution)
        return distribution
    raise ValueError(f"an object of the unknown kind {kind!r:.60}")


def _check_names(
    kind: str, parts: dict[str, Any], *, required: set[str], allowed: set[str]
) -> None:
    """Raise unless an object is described by all names it must have and no others."""
    if not required <= set(parts) <= allowed:
        raise ValueError(f"a {kind} with {sorted(parts)}, which should have {sorted(allowed)}")


def _check_distribution(distribution: Any) -> None:
    """Raise unless a head distribution has what drawing heads relies on.

    A head distribution that a training set has yet to choose is checked when it is fitted.
    """
    if isinstance(distribution, UnfittedHeads):
        return
    check_number(distribution.scale, "scale", minimum=0.0, exclusive=True)
    if isinstance(distribution, QueryKeyHeads):
        if check_count(distribution.rank, "rank") > LARGEST_RANK:
            raise ValueError(
                f"heads of rank {distribution.rank:,}, of which {LARGEST_RANK:,} are allowed"
            )
    elif np.ndim(distribution.mean) == 0:
        check_number(distribution.mean, "mean")
    elif not isinstance(distribution, GaussianHeads) or distribution.strength_range is None:
        check_array(distribution.mean, 2, "mean", kinds="fiub")


def heads_fit(distribution: Any, shape: tuple[int, int]) -> bool:
    """Whether a head distribution has heads of shape (D_q, D)."""
    if isinstance(distribution, FittedHeads):
        return bool(distribution.means_.shape[1:] == shape)

    # pairs must name coordinates of the query and of the key, without the appended ones
    has_matrix = np.ndim(getattr(distribution, "mean", 0.0)) >= 2
    if isinstance(distribution, GaussianHeads) and not has_matrix:
        if distribution.pairs is None:
            return True
        pairs = np.asarray(distribution.pairs)
        if pairs.ndim != 2 or pairs.dtype.kind not in "iu":
            return False
        return bool(((pairs >= 0) & (pairs + 1 < shape)).all())

    # a mean that is a matrix has the shape of a head
    mean = getattr(distribution, "mean", None)
    return mean is None or np.ndim(mean) < 2 or np.shape(mean) == shape


def _sets(tokens: Any, offsets: Any, query: Any, extras: Any = None, pairs: Any = None) -> SetBatch:
    """Sets from their arrays, checked."""
    check_array(tokens, 2, "tokens")

    # offsets increase from 0 to the number of tokens: no set is empty
    is_integers = isinstance(offsets, np.ndarray) and offsets.dtype == np.int64
    if not is_integers or offsets.ndim != 1 or len(offsets) < 2:
        raise ValueError("sets without offsets")
    if offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 1).any():
        raise ValueError("sets whose offsets do not share out the tokens")

    # a row of the query, and of extras, for each set
    n_sets = len(offsets) - 1
    for name, rows, dtype in (("query", query, tokens.dtype), ("extras", extras, np.float64)):
        if rows is not None:
            check_array(rows, 2, name)
            fits = len(rows) == n_sets and rows.shape[1] > 0 and rows.dtype == dtype
            refuse_if(not fits, f"{name} of shape {rows.shape} for {n_sets} sets")
    query_dim = 0 if query is None else query.shape[1]
    pairs = check_pairs(pairs, query_dim, tokens.shape[1])
    return SetBatch._from_flat(tokens, offsets, query, extras, pairs)


def _check_record(record: Any) -> None:
    """Raise unless a record has what its methods rely on.

    Its fields are what their annotations say, and it keeps the rules of its kind.
    """
    kind = type(record).__name__
    skipped = UNSAVED.get(kind, set()) | CHECKED_BY_RULES.get(kind, set())
    sizes: dict[str, int] = {}
    for name, hint in get_type_hints(type(record)).items():
        if name not in skipped:
            _check_field(getattr(record, name), hint, name, sizes)
    for words, is_wrong in RULES.get(kind, {}).items():
        refuse_if(is_wrong(record), words)


def _check_field(value: Any, hint: Any, name: str, sizes: dict[str, int]) -> None:
    """Raise unless a value is of the annotated type.

    Axes of one letter have one length, stored in ``sizes``.
    """
    is_union = isinstance(hint, UnionType) or get_origin(hint) is Union
    kinds = get_args(hint) if is_union else (hint,)
    if value is None and NoneType in kinds:
        return
    kind = kinds[0]

    # an array, as jaxtyping writes it
    axes = getattr(kind, "dim_str", None)
    if axes is not None:
        is_float = "float64" in kind.dtypes
        check_array(value, len(axes.split()), name, "f" if is_float else "iu")
        for axis, length in zip(axes.split(), value.shape, strict=True):
            if axis != "_" and sizes.setdefault(axis, length) != length:
                raise ValueError(
                    f"{name} of shape {value.shape}, where other parts have {axis} = {sizes[axis]}"
                )
        return

    # a tuple: each item on its own
    if get_origin(kind) is tuple:
        refuse_if(not isinstance(value, tuple), f"{name} that are no tuple")
        for i, item in enumerate(value):
            _check_field(item, get_args(kind)[0], f"{name}[{i}]", sizes.copy())
        return

    # numbers of NumPy count as numbers, True and False do not
    numbers = {int: (int, np.integer), float: (float, np.floating)}
    allowed = tuple(each for kind in kinds for each in numbers.get(kind, (kind,)))
    is_stray_bool = isinstance(value, bool) and bool not in kinds
    if not isinstance(value, allowed) or is_stray_bool:
        words = " or ".join(each.__name__ for each in kinds)
        raise ValueError(f"{name} that is no {words}, {value!r:.60}")


def _is_vector(array: Any, length: int) -> bool:
    """Whether a value is a vector of floats of a given length; they need not be finite."""
    is_array = isinstance(array, np.ndarray) and array.dtype.kind == "f"
    return is_array and array.shape == (length,)


def _odd_pair(centre: Any, spread: Any) -> bool:
    """Whether only one of the two is there, or a spread is no size."""
    return (centre is None) != (spread is None) or (spread is not None and not (spread > 0).all())


def _odd_hops(distribution: FittedHeads) -> bool:
    """Every hop asks with what the hops before it found.

    The last one's means ask with what all of them found.
    """
    rows, width = distribution.means_.shape[1:]
    for hop in reversed(distribution.hops_):
        rows -= len(hop) * (width - 1)
        if not len(hop) or hop.shape[1] != rows:
            return True
    return rows < 1


def _odd_products(moments: DesignMoments) -> bool:
    """Whether a product of two columns exceeds their sizes, or a square is negative."""
    squares = moments.gram.diagonal()
    sizes = np.sqrt(np.abs(squares))
    bounds = ((1 + 1e-3) * sizes[k:] * sizes[k] + 1e-280 for k in range(len(sizes)))
    bounded = all((np.abs(moments.gram[k:, k]) <= bound).all() for k, bound in enumerate(bounds))
    return not bounded or bool((squares < 0).any() or (moments.squares < 0).any())


RULES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "TokenRule": {
        "an unknown scaling": lambda r: r.scaling not in SCALINGS,
        "an unknown rule for query": lambda r: r.query not in QUERIES,
        "an unknown pooling": lambda r: r.pooling not in POOLINGS,
        "a token rule whose centre and spread do not fit": lambda r: _odd_pair(r.centre, r.spread),
        "a token rule whose centre and spread of queries do not fit": lambda r: (
            _odd_pair(r.query_centre, r.query_spread)
            or (r.query_centre is not None and r.query != "given")
        ),
        "a token rule whose centre and spread of extras do not fit": lambda r: (
            _odd_pair(r.extras_centre, r.extras_spread) or not 0 < r.extras_scale < math.inf
        ),
        "a token rule with a centre, and another scaling than that needs": lambda r: (
            (r.centre is not None) != (r.scaling == "standard")
            or (r.query_centre is not None and r.scaling != "standard")
        ),
    },
    "Step": {"a step before the first": lambda r: r.step < 0},
    "FittedHeads": {
        "means of no entries": lambda r: 0 in r.means_.shape,
        "a scale that is none": lambda r: not 0 < r.scale < math.inf,
        "scales of the query or of the key, and not of both": lambda r: (
            (r.query_scales_ is None) != (r.key_scales_ is None)
        ),
        "scales that are not positive": lambda r: (
            r.query_scales_ is not None
            and not ((r.query_scales_ > 0).all() and (r.key_scales_ > 0).all())
        ),
        "hops that do not follow each other": _odd_hops,
        "a head distribution chosen as nothing known": lambda r: r.chosen not in CHOICES,
        "a strength that is no number": lambda r: not math.isfinite(r.strength),
        "fewer steps than none": lambda r: r.steps < 0,
    },
    "PooledSets": {
        "an unknown pooling": lambda r: r.pooling not in SET_POOLINGS,
        "pooled sets that are none": lambda r: (
            not isinstance(r.base, SetBatch if r.each else SetBatch | SetGroups)
        ),
    },
    "FiniteLayer": {
        "no known activation": lambda r: not check_activation(r.activation),
        "a dtype that features do not have": lambda r: r.dtype not in PRECISIONS,
        "values that do not fit the heads": lambda r: (
            r.values.shape[:2] != (r.heads.n_heads, r.heads.dim + 1)
        ),
        "values of no extras": lambda r: r.extras_values is not None and not len(r.extras_values),
    },
    "KernelLayer": {
        "no known activation": lambda r: not check_pointwise(r.activation),
        "a kernel of a head distribution that has none": lambda r: (
            not isinstance(r.distribution, (GaussianHeads, FittedHeads))
            or getattr(r.distribution, "query_scales_", None) is not None
        ),
        "dual coefficients of other sets": lambda r: len(r.dual) != len(r.sets),
        "values of no extras": lambda r: r.extras_values is not None and not len(r.extras_values),
    },
    "KeySelection": {
        "a selection of no keys": lambda r: r.n_keys < 1,
        "a scoring layer of another kind than selections have": lambda r: (
            r.layer.activation != "relu" or r.layer.extras_values is not None
        ),
        "a scoring layer whose tokens are not standardised": lambda r: (
            r.standard.scaling != "standard"
            or r.standard.query != "given"
            or len(r.standard.centre) != r.layer.heads.dim
        ),
    },
    "DesignMoments": {
        "sums of single precision": lambda r: any(
            v.dtype == np.float32 for v in vars(r).values() if np.ndim(v)
        ),
        "sums that are no sums of squares": _odd_products,
        "sums of no samples": lambda r: r.count < 1 or not 0 < r.weight < math.inf,
        "outputs of no size": lambda r: not 0 <= r.y_size < math.inf,
        "products rounded to less than single precision": lambda r: (
            not 0 < r.rounding <= np.finfo(np.float32).eps
        ),
    },
    "KeptSamples": {
        "priorities of samples that do not increase, or too many": lambda r: (
            len(r.priorities) > r.limit or not (r.priorities[:-1] <= r.priorities[1:]).all()
        ),
        "samples kept of no weight": lambda r: not (r.weights > 0).all(),
        "samples kept without their sets": lambda r: (
            len(r.priorities) > 0 if r.sets is None else len(r.sets) != len(r.priorities)
        ),
    },
    "TrainingSet": {
        "training samples that are none": lambda r: not isinstance(r.samples, SetBatch | SetGroups),
        "outputs of other training samples": lambda r: len(r.outputs) != len(r.samples),
        "weights of training samples that do not fit": lambda r: (
            r.weights is not None and not (r.weights.min() >= 0 and r.weights.any())
        ),
        "groups of training samples that do not fit": lambda r: (
            r.groups is not None and r.groups.min() < 0
        ),
    },
    "Selection": {
        "a penalty chosen in an unknown way": lambda r: r.method not in ("loo", "gcv", "holdout"),
        "a penalty chosen by an unknown criterion": lambda r: (
            r.criterion not in ("squared_error", "log_loss")
        ),
        "a penalty that is none of those tried": lambda r: not 0 <= r.best < len(r.alphas),
        "penalties below zero": lambda r: not (r.alphas >= 0).all(),
        "scores of other penalties": lambda r: (
            not _is_vector(r.scores, len(r.alphas)) or not _is_vector(r.errors, len(r.alphas))
        ),
    },
}
"""What is wrong with a record of each kind, in words that follow "it has", beyond what annotations
say.
"""


def check_array(array: Any, ndim: int, name: str, kinds: str = "f") -> None:
    """Raise unless an array has so many axes, and finite numbers."""
    if not isinstance(array, np.ndarray) or array.ndim != ndim or array.dtype.kind not in kinds:
        raise ValueError(f"{name} that are not an array of numbers with {ndim} axes")
    refuse_if(array.dtype == np.float16, f"{name} of half precision")
    refuse_if(not np.isfinite(array).all(), f"{name} that are not finite")
