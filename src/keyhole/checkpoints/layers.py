"""Find the query and key weights of every layer by the names that model families give them.

| family | names | stored as |
|---|---|---|
| BERT, RoBERTa, ViT | `encoder.layer.3.attention.self.query.weight` | apart |
| DistilBERT | `transformer.layer.3.attention.q_lin.weight` | apart |
| Llama, Mistral, Qwen, Gemma, OPT, BART, GPT-J | `layers.3.self_attn.q_proj.weight`, `h.3.attn.q_proj.weight` | apart |
| T5 | `encoder.block.3.layer.0.SelfAttention.q.weight` | apart |
| GPT-2 | `h.3.attn.c_attn.weight` | [Q K V], transposed |
| GPT-NeoX, BLOOM | `layers.3.attention.query_key_value.weight` | Q, K, V of head 0, of head 1, … |
| Phi-3, MPT, ModernBERT, torch | `qkv_proj.weight`, `Wqkv.weight`, `in_proj_weight` | [Q; K; V] |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from keyhole._checks import check_count
from keyhole.checkpoints.tensors import TensorFile

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
_SCHEMES = tuple((re.compile(_LAYER + rf"(?P<rest>{rest})"), twin, storage) for rest, twin, storage in _NAMES)
_LONGEST_NAME = 500
# the scale of the layer norm in front of attention, under the layer's own name
_NORMS_BEFORE = (
    "ln_1.weight",
    "input_layernorm.weight",
    "layer.0.layer_norm.weight",
    "layer_norm1.weight",
    "layernorm_before.weight",
    "attn_norm.weight",
    "norm_1.weight",
)
# where layer norm comes last in a layer, attention sees the norm of the layer below
_NORMS_AFTER = ("output.LayerNorm.weight", "output_layer_norm.weight")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")


@dataclass(frozen=True)
class Layer:
    """Query and key weights of a layer, per head: `query` (heads, r, d), `key` (groups, r, d); W_h = query[h]ᵀ key[h].

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

    def __init__(self, path: Path, files: dict[str, TensorFile], config: dict[str, Any], n_heads: int) -> None:
        self.path, self.config, self.n_heads = path, config, n_heads
        self._files = files
        self._places = _find_places(files, path)

    @property
    def labels(self) -> list[str]:
        """Names of the layers: their numbers, with the name of the stack where there are several."""
        stacks = {place.stack for place in self._places}
        return [str(p.index) if len(stacks) == 1 else f"{p.stack} {p.index}" for p in self._places]

    @property
    def model_type(self) -> str:
        """What config.json calls the model, or "unknown"."""
        return str(self.config.get("model_type", "unknown"))

    def layers(self, *, fold_norm: bool = True) -> Iterator[Layer]:
        """Read layer by layer.

        Parameters
        ----------
        fold_norm : bool
            Multiply the weights by the scale γ of the layer norm that attention's input comes from, where there is one:
            W → diag(γ) W diag(γ), which then acts on tokens of equal scale in every coordinate.
        """
        for place, label in zip(self._places, self.labels, strict=True):
            query, key = self._weights(place)
            norm = self._norm_before(place) if fold_norm else None
            if norm is not None:
                scale = self._scale(norm, query.shape[2])
                query, key = query * scale, key * scale
            yield Layer(label, query, key, norm)

    def _read(self, name: str, axes: int) -> np.ndarray:
        array = self._files[name].read(name)
        if array.ndim != axes:
            raise ValueError(
                f"{name!r} must have {axes} {'axis' if axes == 1 else 'axes'}: its shape is {array.shape}. "
                "The checkpoint is of a family that is not known here."
            )
        return array

    def _weights(self, place: _Place) -> tuple[np.ndarray, np.ndarray]:
        weight = self._read(place.query, 2)
        heads = self.n_heads
        if place.storage == "apart":
            query, key = weight, self._read(place.key, 2)
            if key.shape[1] != query.shape[1]:
                raise _odd(place, f"queries act on {query.shape[1]} coordinates and keys on {key.shape[1]}")
            return _by_head(query, heads, place), _by_groups(key, query.shape[0] // heads, heads, place)
        if place.storage == "transposed":
            weight = weight.T
        if place.storage == "interleaved":
            if weight.shape[0] % (3 * heads):
                raise _odd(place, f"{weight.shape[0]} rows are not query, key and value of {heads} heads each")
            parts = weight.reshape(heads, 3, -1, weight.shape[1])
            return parts[:, 0], parts[:, 1]
        rank = self._rank(weight.shape[0], heads, place)
        groups = (weight.shape[0] - heads * rank) // (2 * rank)
        query, key = weight[: heads * rank], weight[heads * rank : (heads + groups) * rank]
        return _by_head(query, heads, place), _by_groups(key, rank, heads, place)

    def _rank(self, rows: int, heads: int, place: _Place) -> int:
        """Rows per head where queries, keys and values are stacked; keys and values may have fewer heads."""
        groups = _setting(self.config, ("num_key_value_heads",)) or heads
        if rows % (heads + 2 * groups):
            raise _odd(place, f"{rows} rows are not {heads} heads of queries and {groups} each of keys and values")
        return rows // (heads + 2 * groups)

    def _norm_before(self, place: _Place) -> str | None:
        own, below = f"{place.stack}.{place.index}.", f"{place.stack}.{place.index - 1}."
        root = place.stack.rpartition("encoder.layer")[0] or place.stack.rpartition("transformer.layer")[0]
        last = [below + name for name in _NORMS_AFTER] if place.index else [f"{root}embeddings.LayerNorm.weight"]
        names = [own + name for name in _NORMS_BEFORE] + last
        if self.model_type == "openai-gpt":  # the first GPT has the names of the second, and its norms after the fact
            names = [below + "ln_2.weight"]
        return next((name for name in names if name in self._files), None)

    def _scale(self, name: str, dim: int) -> np.ndarray:
        scale = self._read(name, 1)
        if scale.shape != (dim,):
            raise ValueError(
                f"a layer norm must have a scale per coordinate: {name!r} has {scale.shape[0]}, the weights {dim}. "
                "Measure without it (--no-fold-norm)."
            )
        # Gemma stores γ − 1
        return 1.0 + scale if self.model_type.startswith("gemma") else scale


def open_checkpoint(path: Path, n_heads: int | None = None) -> Checkpoint:
    """Open a checkpoint: a safetensors file, or a folder with one or with the index of several.

    Parameters
    ----------
    path : Path
        The file or folder. A config.json beside the weights says how many heads there are.
    n_heads : int, optional
        Heads per layer, where config.json is missing or silent.

    Returns
    -------
    Checkpoint
        Nothing but headers has been read.
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
        where = "config.json does not say" if config else "there is no config.json beside the weights"
        raise ValueError(
            f"the number of heads per layer must be known: {where}, and weights alone do not tell. "
            "Give it: --heads H (n_heads in Python)."
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
                f"a folder must hold model.safetensors, its index, or one safetensors file: {path} holds {len(found)}. "
                "Name the file itself."
            )
        index = single if single in found else found[0]
    if not index.is_file():
        raise ValueError(f"the checkpoint must be a file or a folder: {path} is neither. Check the path.")
    if index.suffix != ".json":
        file = TensorFile(index)
        return dict.fromkeys(file.entries, file)
    table = _read_object(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(n, str) and n == Path(n).name for n in table.values()):
        raise ValueError(
            f"an index must map tensors to files beside it (weight_map): that of {index.name} does not. "
            "Name a safetensors file instead."
        )
    shards: dict[str, TensorFile] = {}
    for name in sorted(set(table.values())):
        if not (index.parent / name).is_file():
            raise ValueError(f"every file of an index must be there: {name} is not. Fetch the missing part.")
        shards[name] = TensorFile(index.parent / name)
    return {tensor: shards[name] for tensor, name in table.items() if tensor in shards[name].entries}


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
                    f"queries need keys: {path.name} has {name!r} and no {key!r}. Part of the checkpoint is missing."
                )
            places.append(_Place(match["stack"], int(match["layer"]), name, key, storage))
    if not places:
        some = ", ".join(list(files)[:3]) or "none at all"
        raise ValueError(
            f"the checkpoint must hold query and key weights under a name known here: {path.name} has {len(files)} "
            f"tensors ({some}, …). BERT-, GPT-, Llama- and T5-like names are known; rename the tensors to one of them."
        )
    return sorted(places, key=lambda place: (place.stack, place.index))


def _by_head(weight: np.ndarray, heads: int, place: _Place) -> np.ndarray:
    if weight.shape[0] % heads or not weight.shape[0]:
        raise _odd(place, f"{weight.shape[0]} rows do not divide into {heads} heads")
    return weight.reshape(heads, -1, weight.shape[1])


def _by_groups(weight: np.ndarray, rank: int, heads: int, place: _Place) -> np.ndarray:
    groups, left = divmod(weight.shape[0], rank)
    if left or not groups or heads % groups:
        raise _odd(place, f"{weight.shape[0]} rows of keys do not serve {heads} heads of {rank} rows each")
    return weight.reshape(groups, rank, weight.shape[1])


def _odd(place: _Place, evidence: str) -> ValueError:
    return ValueError(
        f"weights must divide into heads: in {place.query!r} {evidence}. "
        "Give the right number of heads (--heads H; n_heads in Python)."
    )


def _setting(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((config[n] for n in names if type(config.get(n)) is int and config[n] > 0), None)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} must be JSON: it is not ({error}). Fetch it again or remove it.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} must be a JSON object: it is a {type(value).__name__}. Fetch it again.")
    return value
