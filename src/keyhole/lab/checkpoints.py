"""Query and key weights of trained transformers.

And how far their heads lean towards the identity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from safetensors import SafetensorError, safe_open

from keyhole._checks import check_count, check_finite

_READABLE = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class TensorFile:
    """The tensors of a file in the safetensors format, by name. Only its header is read here."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        # the library checks that types, shapes and offsets fit each other and the file
        try:
            with safe_open(str(self.path), framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"a checkpoint is a safetensors file, whole and unchanged: {self.path.name} does "
                f"not read ({str(error)[:300]}). It is truncated, damaged or of another format; "
                "fetch it again, or convert it."
            ) from None
        # eight bytes with the length of the header, the header as JSON, then the tensors
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self.entries: dict[str, dict[str, Any]] = json.loads(file.read(length))
        self.entries.pop("__metadata__", None)
        self._data = 8 + length

    def read(self, name: str) -> np.ndarray:
        """One tensor, finite throughout.

        float64 as it is, all else as float32, on the way to which nothing is lost.
        """
        entry = self.entries[name]
        dtype = entry["dtype"]
        if dtype not in _READABLE:
            raise ValueError(
                f"weights must be stored as one of {', '.join(_READABLE)}: {name!r} in "
                f"{self.path.name} is {dtype}. Quantised checkpoints are not read; use the one "
                "they were made from."
            )

        place = self._data + entry["data_offsets"][0]
        shape = tuple(entry["shape"])
        array = np.fromfile(
            self.path, _READABLE[dtype], count=int(np.prod(shape)), offset=place
        ).reshape(shape)

        # bfloat16 is the upper half of a float32, and NumPy has no type for it
        if dtype == "BF16":
            array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        elif dtype == "F16":
            array = array.astype(np.float32)
        check_finite(array, f"{name} in {self.path.name}")
        return array


Storage = Literal["apart", "transposed", "interleaved", "stacked"]

_LAYER = r"(?P<stack>(?:.*\.)?[A-Za-z_]+)\.(?P<layer>\d+)\."
# the part of a name after its layer, the name's key twin, and how the two are stored
_NAMES: tuple[tuple[str, str, Storage], ...] = (
    (r"attention\.(?:self|attention)\.query\.weight", "query>key", "apart"),
    (r"attention\.q_lin\.weight", "q_lin>k_lin", "apart"),
    (r"(?:self_attn|attn|attn\.attention)\.q_proj\.weight", "q_proj>k_proj", "apart"),
    (r"layer\.0\.SelfAttention\.q\.weight", "SelfAttention.q>SelfAttention.k", "apart"),
    (r"attn\.c_attn\.weight", "", "transposed"),
    (r"(?:attention|self_attention)\.query_key_value\.weight", "", "interleaved"),
    (r"self_attn\.qkv_proj\.weight", "", "stacked"),
    (r"attn\.Wqkv\.weight", "", "stacked"),
    (r"self_attn\.in_proj_weight", "", "stacked"),
)
_SCHEMES = tuple(
    (re.compile(_LAYER + rf"(?P<rest>{rest})"), twin, storage) for rest, twin, storage in _NAMES
)
# the scale of the layer norm in front of attention, under the layer's own name
_NORMS_BEFORE = (
    "ln_1.weight", "input_layernorm.weight", "layer.0.layer_norm.weight", "layer_norm1.weight",
    "layernorm_before.weight", "attn_norm.weight", "norm_1.weight",
)  # fmt: skip
# where layer norm comes last in a layer, attention sees the norm of the layer below
_NORMS_AFTER = ("output.LayerNorm.weight", "output_layer_norm.weight")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")


@dataclass(frozen=True)
class Layer:
    """Query and key weights of a layer, per head: `query` (heads, r, d), `key` (groups, r, d).

    W_h = query[h]ᵀ key[h].

    `norm` names the layer norm whose scale has been folded in, if any.
    """

    label: str
    query: np.ndarray
    key: np.ndarray
    norm: str | None


@dataclass(frozen=True)
class _Place:
    """Where a layer's weights are: the names of its tensors, and how they hold the two."""

    stack: str
    index: int
    query: str
    key: str
    storage: Storage


class Checkpoint:
    """A model on disk; layers are read one at a time. Made by `open_checkpoint`."""

    def __init__(
        self, path: Path, files: dict[str, TensorFile], config: dict[str, Any], n_heads: int
    ) -> None:
        self.path = path
        self.config = config
        self.n_heads = n_heads
        self._files = files
        self._places = _find_places(files, path)

    @property
    def labels(self) -> list[str]:
        """Names of the layers: their numbers.

        With the name of the stack where there are several.
        """
        stacks = {place.stack for place in self._places}
        if len(stacks) == 1:
            return [str(place.index) for place in self._places]
        return [f"{place.stack} {place.index}" for place in self._places]

    @property
    def model_type(self) -> str:
        """What config.json calls the model, or "unknown"."""
        return str(self.config.get("model_type", "unknown"))

    def layers(self, *, fold_norm: bool = True) -> Iterator[Layer]:
        """Read layer by layer.

        With ``fold_norm`` weights are multiplied by the scale γ of the layer norm that attention's
        input comes from, where there is one: W → diag(γ) W diag(γ), which then acts on tokens of
        equal scale in every coordinate.
        """
        for place, label in zip(self._places, self.labels, strict=True):
            query, key = self._weights(place)
            norm = self._norm_before(place) if fold_norm else None
            if norm is not None:
                scale = self._scale(norm, query.shape[2]).astype(np.float64)
                query = query * scale
                key = key * scale
            yield Layer(label=label, query=query, key=key, norm=norm)

    def _read(self, name: str, axes: int) -> np.ndarray:
        """A tensor with so many axes."""
        array = self._files[name].read(name)
        if array.ndim != axes:
            raise ValueError(
                f"{name!r} must have {axes} {'axis' if axes == 1 else 'axes'}: its shape is "
                f"{array.shape}. The checkpoint is of a family that is not known here."
            )
        return array

    def _weights(self, place: _Place) -> tuple[np.ndarray, np.ndarray]:
        """Query weights (heads, r, d) and key weights (groups, r, d) of a layer."""
        weight = self._read(place.query, 2)
        if place.storage == "apart":
            return self._weights_apart(place, weight)
        if place.storage == "interleaved":
            return self._weights_interleaved(place, weight)
        if place.storage == "transposed":
            weight = weight.T
        return self._weights_stacked(place, weight)

    def _weights_apart(self, place: _Place, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Queries and keys are tensors of their own."""
        key = self._read(place.key, 2)
        if key.shape[1] != query.shape[1]:
            raise _odd(
                place, f"queries act on {query.shape[1]} coordinates and keys on {key.shape[1]}"
            )
        rank = query.shape[0] // self.n_heads
        query_by_head = _by_head(query, self.n_heads, place)
        return query_by_head, _by_groups(key, rank, self.n_heads, place)

    def _weights_interleaved(
        self, place: _Place, weight: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One tensor has query, key and value of one head after the other."""
        if weight.shape[0] % (3 * self.n_heads):
            raise _odd(
                place,
                f"{weight.shape[0]} rows are not query, key and value of {self.n_heads} heads each",
            )
        parts = weight.reshape(self.n_heads, 3, -1, weight.shape[1])
        return parts[:, 0], parts[:, 1]

    def _weights_stacked(self, place: _Place, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One tensor has all queries, then all keys, then all values."""
        # keys and values may have fewer heads than queries
        heads = self.n_heads
        groups = _setting(self.config, ("num_key_value_heads",)) or heads
        rank, remainder = divmod(weight.shape[0], heads + 2 * groups)
        if remainder:
            words = f"{heads} heads of queries and {groups} each of keys and values"
            raise _odd(place, f"{weight.shape[0]} rows are not {words}")
        query = weight[: heads * rank]
        key = weight[heads * rank : (heads + groups) * rank]
        return _by_head(query, heads, place), _by_groups(key, rank, heads, place)

    def _norm_before(self, place: _Place) -> str | None:
        """The name of the layer norm that attention's input comes from, if the file has it."""
        this_layer = f"{place.stack}.{place.index}."
        layer_below = f"{place.stack}.{place.index - 1}."
        names = [this_layer + name for name in _NORMS_BEFORE]
        if place.index > 0:
            names += [layer_below + name for name in _NORMS_AFTER]
        else:
            # below the first layer lie the embeddings, beside its stack
            root = (
                place.stack.rpartition("encoder.layer")[0]
                or place.stack.rpartition("transformer.layer")[0]
            )
            names.append(f"{root}embeddings.LayerNorm.weight")
        for name in names:
            if name in self._files:
                return name
        return None

    def _scale(self, name: str, dim: int) -> np.ndarray:
        """The scale γ of a layer norm."""
        scale = self._read(name, 1)
        if scale.shape != (dim,):
            raise ValueError(
                f"a layer norm must have a scale per coordinate: {name!r} has {scale.shape[0]}, "
                f"the weights {dim}. Measure without it (--no-fold-norm)."
            )
        if self.model_type.startswith("gemma"):  # which stores γ − 1
            return 1.0 + scale
        return scale


def open_checkpoint(path: Path, n_heads: int | None = None) -> Checkpoint:
    """Open a checkpoint: a safetensors file, or a folder with one or with the index of several.

    Headers only are read.

    A config.json beside the weights says how many heads a layer has; ``n_heads`` where it is
    missing or silent.
    """
    path = Path(path)
    files = _tensor_files(path)

    # the settings; those of a model of text and pictures are nested
    folder = path if path.is_dir() else path.parent
    config: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        config = _read_object(folder / "config.json")
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config = {**text_config, **config}

    # the number of heads
    heads = n_heads
    if heads is None:
        heads = _setting(config, _HEADS)
    if heads is None:
        _find_places(files, path)  # a file without attention should be told of that first
        if config:
            evidence = "config.json does not say"
        else:
            evidence = "there is no config.json beside the weights"
        raise ValueError(
            f"the number of heads per layer must be known: {evidence}, and weights alone do not "
            "tell. Give it: --n-heads H (n_heads in Python)."
        )
    return Checkpoint(path, files, config, check_count(heads, "n_heads"))


def _tensor_files(path: Path) -> dict[str, TensorFile]:
    """Which file holds each tensor."""
    file_path = path
    if path.is_dir():
        file_path = _file_in_folder(path)
    if not file_path.is_file():
        raise ValueError(
            f"the checkpoint must be a file or a folder: {path} is neither. Check the path."
        )
    if file_path.suffix == ".json":
        return _indexed_files(file_path)
    file = TensorFile(file_path)
    return dict.fromkeys(file.entries, file)


def _file_in_folder(folder: Path) -> Path:
    """The index of a folder, else its model.safetensors, else its only safetensors file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return index
    candidates = sorted(folder.glob("*.safetensors"))
    usual = folder / "model.safetensors"
    if usual in candidates:
        return usual
    if len(candidates) != 1:
        raise ValueError(
            f"a folder must hold model.safetensors, its index, or one safetensors file: {folder} "
            f"holds {len(candidates)}. Name the file itself."
        )
    return candidates[0]


def _indexed_files(index: Path) -> dict[str, TensorFile]:
    """Which file holds each tensor, by an index."""
    # names of files beside the index, and no paths that lead elsewhere
    table: Any = _read_object(index).get("weight_map")
    is_table = isinstance(table, dict) and all(
        isinstance(name, str) and name == Path(name).name for name in table.values()
    )
    if not is_table:
        raise ValueError(
            f"an index must map tensors to files beside it (weight_map): that of {index.name} does "
            "not. Name a safetensors file instead."
        )

    shards: dict[str, TensorFile] = {}
    for name in sorted(set(table.values())):
        if not (index.parent / name).is_file():
            raise ValueError(
                f"every file of an index must be there: {name:.200} is not. Fetch the missing part."
            )
        shards[name] = TensorFile(index.parent / name)
    return {
        tensor: shards[name] for tensor, name in table.items() if tensor in shards[name].entries
    }


def _find_places(files: dict[str, TensorFile], path: Path) -> list[_Place]:
    """The layers of a checkpoint, by the names of its tensors."""
    places = []
    for name in files:
        for pattern, twin, storage in _SCHEMES:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            # the keys are in the same tensor, or in one whose name says key for query
            key = name
            if twin:
                query_word, _, key_word = twin.partition(">")
                prefix = name[: match.start("rest")]
                key = prefix + match["rest"].replace(query_word, key_word)
            if key not in files:
                raise ValueError(
                    f"queries need keys: {path.name} has {name!r} and no {key!r}. Part of the "
                    "checkpoint is missing."
                )
            places.append(
                _Place(
                    stack=match["stack"],
                    index=int(match["layer"]),
                    query=name,
                    key=key,
                    storage=storage,
                )
            )
    if not places:
        first_names = ", ".join(list(files)[:3]) or "none at all"
        raise ValueError(
            f"the checkpoint must hold query and key weights under a name known here: {path.name} "
            f"has {len(files)} tensors ({first_names}, …). BERT-, GPT-, Llama- and T5-like names "
            "are known; rename the tensors to one of them."
        )
    return sorted(places, key=lambda place: (place.stack, place.index))


def _by_head(weight: np.ndarray, heads: int, place: _Place) -> np.ndarray:
    """Query weights as (heads, r, d)."""
    if weight.shape[0] % heads or not weight.shape[0]:
        raise _odd(place, f"{weight.shape[0]} rows do not divide into {heads} heads")
    return weight.reshape(heads, -1, weight.shape[1])


def _by_groups(weight: np.ndarray, rank: int, heads: int, place: _Place) -> np.ndarray:
    """Key weights as (groups, r, d); a group serves equally many heads."""
    groups, remainder = divmod(weight.shape[0], rank)
    if remainder or not groups or heads % groups:
        raise _odd(
            place, f"{weight.shape[0]} rows of keys do not serve {heads} heads of {rank} rows each"
        )
    return weight.reshape(groups, rank, weight.shape[1])


def _odd(place: _Place, evidence: str) -> ValueError:
    """What is raised where weights do not fit the number of heads."""
    return ValueError(
        f"weights must divide into heads: in {place.query!r} {evidence}. "
        "Give the right number of heads (--n-heads H; n_heads in Python)."
    )


def _setting(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of the settings that is a positive whole number."""
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return None


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object in a file."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(
            f"{path.name} must be JSON: it is not ({error}). Fetch it again or remove it."
        ) from None
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class LayerLean:
    """The lean of every head of a layer (arrays over heads), and of the layer as a whole.

    `z_layer` is the z of the sum of its heads, each divided by its norm: one rotation is drawn for
    all of them, so heads that resemble each other do not count as independent evidence.
    `z_signs_layer` likewise.
    """

    label: str
    dim: int
    rank: int
    z: np.ndarray
    z_signs: np.ndarray
    alignment: np.ndarray
    symmetric_share: np.ndarray
    z_layer: float
    z_signs_layer: float


@dataclass(frozen=True)
class ModelLean:
    """Layers together.

    Rotations (or signs) of different layers are independent, so their z add up like Gaussians.
    """

    layers: tuple[LayerLean, ...]
    z: float
    z_signs: float


def lean_of_layer(
    query: Float[np.ndarray, "h r d"], key: Float[np.ndarray, "g r d"], label: str = ""
) -> LayerLean:
    """Measure the heads of a layer, W_h = query[h]ᵀ key[h].

    A key may serve several neighbouring heads.

    `symmetric_share` is the identity's part of the symmetric half of W, (tr W)²/(d |(W + Wᵀ)/2|²).
    A head whose W is zero leans nowhere: its figures are 0. W is not formed per head: tr W = <Q,
    K>, |W|² = <QQᵀ, KKᵀ> and tr W² = <KQᵀ, (KQᵀ)ᵀ> need r × r products; the layer's sum of heads is
    one d × d matrix. Cost O(h r d (r + d)).

    >>> # eight coordinates, and a head that compares the first four of them
    >>> projection = np.eye(4, 8)[None]
    >>> lean = lean_of_layer(projection, projection)
    >>> float(lean.z[0].round(6)), float(lean.alignment[0].round(6))
    (5.656854, 1.0)
    """
    heads, rank, dim = query.shape
    query = query.astype(np.float64)
    key = np.repeat(key.astype(np.float64), heads // key.shape[0], axis=0)

    # per head: the diagonal of W, its trace, |W|², and |(W + Wᵀ)/2|² = (|W|² + tr W²)/2
    diagonals = np.einsum("hrd,hrd->hd", query, key)
    traces = diagonals.sum(1)
    squares = np.maximum(np.einsum("hrs,hrs->h", query @ query.mT, key @ key.mT), 0.0)
    cross = key @ query.mT
    symmetric = (squares + np.einsum("hrs,hsr->h", cross, cross)) / 2
    norms = np.sqrt(squares)

    # z = tr W √d / |W|: a random rotation between queries and keys gives it variance 1
    z = np.sqrt(dim) * _ratio(traces, norms)
    z_signs = _ratio(traces, np.sqrt((diagonals**2).sum(1)))

    # the layer: the sum of its heads, each divided by its norm
    weights = _ratio(np.ones(heads), norms)
    total = (weights[:, None, None] * query).reshape(-1, dim).T @ key.reshape(-1, dim)
    total_trace = np.array([np.trace(total)])
    total_norm = np.array([np.linalg.norm(total)])
    diagonal_norm = np.array([np.linalg.norm(np.diag(total))])
    return LayerLean(
        label=label,
        dim=dim,
        rank=rank,
        z=z,
        z_signs=z_signs,
        alignment=z / np.sqrt(min(rank, dim) * dim),
        symmetric_share=_ratio(traces**2, dim * np.maximum(symmetric, 0.0)),
        z_layer=float(np.sqrt(dim) * _ratio(total_trace, total_norm)[0]),
        z_signs_layer=float(_ratio(total_trace, diagonal_norm)[0]),
    )


def lean_of_model(layers: Sequence[LayerLean]) -> ModelLean:
    """Put layers together: the sum of their z over the root of their number.

    >>> one = lean_of_layer(np.eye(4)[None], np.eye(4)[None])
    >>> lean_of_model([one, one, one, one]).z
    8.0
    """
    root = np.sqrt(len(layers)) if layers else 1.0
    return ModelLean(
        layers=tuple(layers),
        z=float(sum(layer.z_layer for layer in layers) / root),
        z_signs=float(sum(layer.z_signs_layer for layer in layers) / root),
    )


def _ratio(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    """The quotient, zero where there is nothing to divide by."""
    return np.divide(over, under, out=np.zeros_like(over), where=under > 0)
