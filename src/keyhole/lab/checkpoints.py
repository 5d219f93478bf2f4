"""Query and key weights of trained transformers.

And how far their heads lean towards the identity.
"""

from __future__ import annotations

import json
import os
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
        try:
            with safe_open(
                str(self.path), framework="numpy"
            ):  # types, shapes and offsets fit each other and the file
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"a checkpoint is a safetensors file, whole and unchanged: {self.path.name} does "
                f"not read ({str(error)[:300]}). It is truncated, damaged or of another format; "
                "fetch it again, or convert it."
            ) from None
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
        dtype, (start, stop) = entry["dtype"], entry["data_offsets"]
        if dtype not in _READABLE:
            raise ValueError(
                f"weights must be stored as one of {', '.join(_READABLE)}: {name!r} in "
                f"{self.path.name} is {dtype}. Quantised checkpoints are not read; use the one "
                "they were made from."
            )
        with self.path.open("rb") as file:
            file.seek(self._data + start)
            content = file.read(stop - start)
        if len(content) != stop - start:
            raise ValueError(
                f"a tensor's bytes must all be there: {name!r} in {self.path.name} has "
                f"{len(content):,} of {stop - start:,}. The file shrank while it was read; fetch "
                "it again."
            )
        array = np.frombuffer(content, _READABLE[dtype])
        if (
            dtype == "BF16"
        ):  # the upper half of a float32, which is why safetensors has no NumPy array for it
            array = (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
        array = array.astype(np.float32 if dtype == "F16" else array.dtype).reshape(entry["shape"])
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
_LONGEST_NAME = 500
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
        self.path, self.config, self.n_heads = path, config, n_heads
        self._files = files
        self._places = _find_places(files, path)

    @property
    def labels(self) -> list[str]:
        """Names of the layers: their numbers.

        With the name of the stack where there are several.
        """
        stacks = {place.stack for place in self._places}
        return [str(p.index) if len(stacks) == 1 else f"{p.stack} {p.index}" for p in self._places]

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
                with np.errstate(over="ignore"):
                    query, key = query * scale, key * scale
                if not (np.isfinite(query).all() and np.isfinite(key).all()):
                    raise ValueError(
                        "weights times the scale of their layer norm must be numbers: with "
                        f"{norm!r} they overflow. Measure without it (--no-fold-norm)."
                    )
            yield Layer(label, query, key, norm)

    def _read(self, name: str, axes: int) -> np.ndarray:
        array = self._files[name].read(name)
        if array.ndim != axes:
            raise ValueError(
                f"{name!r} must have {axes} {'axis' if axes == 1 else 'axes'}: its shape is "
                f"{array.shape}. The checkpoint is of a family that is not known here."
            )
        return array

    def _weights(self, place: _Place) -> tuple[np.ndarray, np.ndarray]:
        weight = self._read(place.query, 2)
        heads = self.n_heads
        if place.storage == "apart":
            query, key = weight, self._read(place.key, 2)
            if key.shape[1] != query.shape[1]:
                raise _odd(
                    place, f"queries act on {query.shape[1]} coordinates and keys on {key.shape[1]}"
                )
            return _by_head(query, heads, place), _by_groups(
                key, query.shape[0] // heads, heads, place
            )
        if place.storage == "transposed":
            weight = weight.T
        if place.storage == "interleaved":
            if weight.shape[0] % (3 * heads):
                raise _odd(
                    place,
                    f"{weight.shape[0]} rows are not query, key and value of {heads} heads each",
                )
            parts = weight.reshape(heads, 3, -1, weight.shape[1])
            return parts[:, 0], parts[:, 1]
        # keys and values may have fewer heads than queries
        groups = _setting(self.config, ("num_key_value_heads",)) or heads
        rank, left = divmod(weight.shape[0], heads + 2 * groups)
        if left:
            words = f"{heads} heads of queries and {groups} each of keys and values"
            raise _odd(place, f"{weight.shape[0]} rows are not {words}")
        query, key = weight[: heads * rank], weight[heads * rank : (heads + groups) * rank]
        return _by_head(query, heads, place), _by_groups(key, rank, heads, place)

    def _norm_before(self, place: _Place) -> str | None:
        own, below = f"{place.stack}.{place.index}.", f"{place.stack}.{place.index - 1}."
        root = (
            place.stack.rpartition("encoder.layer")[0]
            or place.stack.rpartition("transformer.layer")[0]
        )
        last = (
            [below + name for name in _NORMS_AFTER]
            if place.index
            else [f"{root}embeddings.LayerNorm.weight"]
        )
        names = [own + name for name in _NORMS_BEFORE] + last
        if (
            self.model_type == "openai-gpt"
        ):  # the first GPT has the names of the second, and its norms after the fact
            names = [below + "ln_2.weight"]
        return next((name for name in names if name in self._files), None)

    def _scale(self, name: str, dim: int) -> np.ndarray:
        scale = self._read(name, 1)
        if scale.shape != (dim,):
            raise ValueError(
                f"a layer norm must have a scale per coordinate: {name!r} has {scale.shape[0]}, "
                f"the weights {dim}. Measure without it (--no-fold-norm)."
            )
        # Gemma stores γ − 1
        return 1.0 + scale if self.model_type.startswith("gemma") else scale


def open_checkpoint(path: Path, n_heads: int | None = None) -> Checkpoint:
    """Open a checkpoint: a safetensors file, or a folder with one or with the index of several.

    Headers only are read.

    A config.json beside the weights says how many heads a layer has; ``n_heads`` where it is
    missing or silent.
    """
    path = Path(path)
    files = _tensor_files(path)
    beside = path if path.is_dir() else path.parent
    config = _read_object(beside / "config.json") if (beside / "config.json").is_file() else {}
    nested = config.get("text_config")
    config = {**nested, **config} if isinstance(nested, dict) else config
    heads = n_heads if n_heads is not None else _setting(config, _HEADS)
    if heads is None:
        _find_places(files, path)  # a file without attention should hear of that first
        where = (
            "config.json does not say" if config else "there is no config.json beside the weights"
        )
        raise ValueError(
            f"the number of heads per layer must be known: {where}, and weights alone do not tell. "
            "Give it: --n-heads H (n_heads in Python)."
        )
    return Checkpoint(path, files, config, check_count(heads, "n_heads"))


def _tensor_files(path: Path) -> dict[str, TensorFile]:
    """Which file holds each tensor."""
    index = path / "model.safetensors.index.json" if path.is_dir() else path
    if path.is_dir() and not index.is_file():
        found = sorted(path.glob("*.safetensors"))
        single = path / "model.safetensors"
        if single not in found and len(found) != 1:
            raise ValueError(
                f"a folder must hold model.safetensors, its index, or one safetensors file: {path} "
                f"holds {len(found)}. Name the file itself."
            )
        index = single if single in found else found[0]
    if not index.is_file():
        raise ValueError(
            f"the checkpoint must be a file or a folder: {path} is neither. Check the path."
        )
    if index.suffix != ".json":
        file = TensorFile(index)
        return dict.fromkeys(file.entries, file)
    table = _read_object(index).get("weight_map")
    if not isinstance(table, dict) or not all(
        isinstance(n, str) and n == Path(n).name for n in table.values()
    ):
        raise ValueError(
            f"an index must map tensors to files beside it (weight_map): that of {index.name} does "
            "not. Name a safetensors file instead."
        )
    shards: dict[str, TensorFile] = {}
    for name in sorted(set(table.values())):
        if not os.path.isfile(
            index.parent / name
        ):  # unlike pathlib's, it takes names that no system can have
            raise ValueError(
                f"every file of an index must be there: {name:.200} is not. Fetch the missing part."
            )
        shards[name] = TensorFile(index.parent / name)
    return {
        tensor: shards[name] for tensor, name in table.items() if tensor in shards[name].entries
    }


def _find_places(files: dict[str, TensorFile], path: Path) -> list[_Place]:
    places = []
    # no model has longer names, and the patterns should not be led astray by a file that does
    for name in (name for name in files if len(name) <= _LONGEST_NAME):
        for pattern, twin, storage in _SCHEMES:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            old, _, new = twin.partition(">")
            key = name[: match.start("rest")] + match["rest"].replace(old, new) if twin else name
            if key not in files:
                raise ValueError(
                    f"queries need keys: {path.name} has {name!r} and no {key!r}. Part of the "
                    "checkpoint is missing."
                )
            places.append(_Place(match["stack"], int(match["layer"]), name, key, storage))
    if not places:
        some = ", ".join(list(files)[:3]) or "none at all"
        raise ValueError(
            f"the checkpoint must hold query and key weights under a name known here: {path.name} "
            f"has {len(files)} tensors ({some}, …). BERT-, GPT-, Llama- and T5-like names are "
            "known; rename the tensors to one of them."
        )
    return sorted(places, key=lambda place: (place.stack, place.index))


def _by_head(weight: np.ndarray, heads: int, place: _Place) -> np.ndarray:
    if weight.shape[0] % heads or not weight.shape[0]:
        raise _odd(place, f"{weight.shape[0]} rows do not divide into {heads} heads")
    return weight.reshape(heads, -1, weight.shape[1])


def _by_groups(weight: np.ndarray, rank: int, heads: int, place: _Place) -> np.ndarray:
    groups, left = divmod(weight.shape[0], rank)
    if left or not groups or heads % groups:
        raise _odd(
            place, f"{weight.shape[0]} rows of keys do not serve {heads} heads of {rank} rows each"
        )
    return weight.reshape(groups, rank, weight.shape[1])


def _odd(place: _Place, evidence: str) -> ValueError:
    return ValueError(
        f"weights must divide into heads: in {place.query!r} {evidence}. "
        "Give the right number of heads (--n-heads H; n_heads in Python)."
    )


def _setting(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[n] for n in names if type(config.get(n)) is int and config[n] > 0), None)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path.name} must be JSON: it is not ({error}). Fetch it again or remove it."
        ) from None
    if not isinstance(value, dict):
        raise ValueError(
            f"{path.name} must be a JSON object: it is a {type(value).__name__}. Fetch it again."
        )
    return value


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
    query = _about_one(query.astype(np.float64))
    key = np.repeat(_about_one(key.astype(np.float64)), heads // key.shape[0], axis=0)
    diagonals = np.einsum("hrd,hrd->hd", query, key)
    traces = diagonals.sum(1)
    squares = np.maximum(np.einsum("hrs,hrs->h", query @ query.mT, key @ key.mT), 0.0)
    cross = key @ query.mT
    symmetric = (squares + np.einsum("hrs,hsr->h", cross, cross)) / 2
    norms = np.sqrt(squares)
    z = np.sqrt(dim) * _ratio(traces, norms)
    weights = _ratio(np.ones(heads), norms)
    total = (weights[:, None, None] * query).reshape(-1, dim).T @ key.reshape(-1, dim)
    total_trace = np.array([np.trace(total)])
    return LayerLean(
        label=label,
        dim=dim,
        rank=rank,
        z=z,
        z_signs=_ratio(traces, np.sqrt((diagonals**2).sum(1))),
        alignment=z / np.sqrt(min(rank, dim) * dim),
        symmetric_share=_ratio(traces**2, dim * np.maximum(symmetric, 0.0)),
        z_layer=float(np.sqrt(dim) * _ratio(total_trace, np.array([np.linalg.norm(total)]))[0]),
        z_signs_layer=float(_ratio(total_trace, np.array([np.linalg.norm(np.diag(total))]))[0]),
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


def _about_one(weights: np.ndarray) -> np.ndarray:
    """Each head times a power of two.

    No figure depends on its scale, and fourth powers neither overflow nor vanish.
    """
    _, exponent = np.frexp(np.abs(weights).max(axis=(1, 2), initial=0.0, keepdims=True))
    return np.ldexp(weights, -exponent)


def _ratio(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    """The quotient, zero where there is nothing to divide by."""
    return np.divide(over, under, out=np.zeros_like(over), where=under > 0)
