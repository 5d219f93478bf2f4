"""The one place where a route is chosen for torch tensors.

Fused kernels on CUDA where there are any for them (triton_loops.py), plain torch elsewhere
(torch_loops.py).
"""

from __future__ import annotations

import importlib.util
import math
from functools import cache

import numpy as np
import torch

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole._checks import FeatureOverflowError
from keyhole._tensors import as_tensor, weighted_sums
from keyhole.attention.heads import DRAWN_BYTES, HeadArray, HeadDraw
from keyhole.attention.torch_loops import (
    TensorPanel,
    fill_features,
    fill_gram,
    mean_weights,
    prepare_panel,
    seen_query,
    weigh,
)
from keyhole.data.sets import SampleBatch, SetBatch

_FUSED_HOST = 2**31
"""Bytes of a panel of K on the device while K itself goes to the host."""


WIDEST_FUSED_GRAM = 256
"""Coordinates of keys and queries up to which there is a fused Gram matrix. It takes 3.9 ms there
for 1,000 sets of 16 keys, and plain torch 30 (H200); at 300 its tiles outgrow the shared memory of
a multiprocessor."""

WIDEST_FUSED_FEATURES = 256
"""Coordinates up to which features are fused. With 512 heads, 4,000 sets of 16 keys take 4.4 ms
there and 12 in plain torch, and 150 sets of 1,500 keys as long either way (H200)."""


@cache
def has_triton() -> bool:
    """Whether the compiler of the fused kernels is there. It comes with torch for CUDA on Linux."""
    return importlib.util.find_spec("triton") is not None


def is_fused(tokens: torch.Tensor, activation: str, width: int, widest: int) -> bool:
    """Whether there is a fused kernel for these tokens: ReLU, float32, CUDA, not too wide."""
    is_float32_on_cuda = tokens.is_cuda and tokens.dtype == torch.float32
    return is_float32_on_cuda and activation == "relu" and width <= widest and has_triton()


def attention_gram(
    a: SetBatch,
    b: SetBatch | None,
    mean: np.ndarray | None,
    scale: float,
    activation: str,
    memory_budget: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """K of sets, in the type and on the device of their tokens, or into ``out``.

    ``out`` may be of another type, and on the host for a matrix that outgrows the device: tiles
    stream there.
    """
    tokens = a.tokens
    left = prepare_panel(tokens, a.offsets, a.query, mean, scale, activation)
    right = None
    n_columns = len(a)
    if b is not None:
        right = prepare_panel(b.tokens, b.offsets, b.query, mean, scale, activation)
        n_columns = len(b)
    if out is None:
        out = torch.empty(len(a), n_columns, dtype=tokens.dtype, device=tokens.device)
    biased = mean is not None and activation in ("relu", "step")

    # plain torch, for any device, type, activation and width
    width = max(a.dim, a.query_dim)
    if not is_fused(tokens, activation, width, WIDEST_FUSED_GRAM):
        return fill_gram(left, right, activation, biased, out, memory_budget)

    # the fused kernel, straight into a float32 matrix on the device, else by way of tiles
    from keyhole.attention.triton_loops import fused_gram

    if out.dtype == torch.float32 and out.device == tokens.device:
        return fused_gram(left, right, biased, out)
    return _stream(left, right, biased, out)


def _stream(
    left: TensorPanel, right: TensorPanel | None, biased: bool, out: torch.Tensor
) -> torch.Tensor:
    """Fused tiles of up to 2 GiB, each converted or copied to where ``out`` is.

    One triangle if symmetric.
    """
    from keyhole.attention.triton_loops import fused_gram

    symmetric = right is None
    columns = left if right is None else right
    device = left.unit.device
    # a square tile of float32
    side = max(1, math.isqrt(_FUSED_HOST // 4))
    for row in blocks(len(out), side):
        for column in blocks(out.shape[1], side):
            if symmetric and column.start < row.start:
                continue
            on_diagonal = symmetric and column == row
            other = None
            if not on_diagonal:
                other = columns.part(column)
            tile = torch.empty(row.stop - row.start, column.stop - column.start, device=device)
            fused_gram(left.part(row), other, biased, tile)
            out[row, column] = tile.to(out)
            if symmetric and not on_diagonal:
                out[column, row] = tile.T.to(out)
    return out


def attention_features(
    samples: SampleBatch, heads: HeadDraw | HeadArray, activation: str, memory_budget: int
) -> torch.Tensor:
    """Φ (n, M·D) in the type and on the device of the tokens, pooled over the sets of a sample."""
    features = _features_of_sets(samples.sets, heads, activation, memory_budget, each=samples.each)
    if samples.is_plain:
        return features

    # Σ_j c_j φ(set j) over the sets of a sample
    return weighted_sums(features, samples.set_coefficients, samples.unpooled.set_offsets)


def _features_of_sets(
    batch: SetBatch,
    heads: HeadDraw | HeadArray,
    activation: str,
    memory_budget: int,
    *,
    each: bool,
) -> torch.Tensor:
    """Φ of sets, block by block of heads; with ``each``, every key is the query in turn."""
    tokens = batch.tokens
    width = batch.dim + 1
    out = torch.empty(len(batch), len(heads) * width, dtype=tokens.dtype, device=tokens.device)
    scale = 1.0 / math.sqrt(len(heads))
    fused = not each and is_fused(tokens, activation, batch.dim, WIDEST_FUSED_FEATURES)
    for part, block in heads.blocks(block_size(DRAWN_BYTES * heads.entries, memory_budget)):
        columns = out[:, part.start * width : part.stop * width]
        weights = as_tensor(block, tokens)
        if fused:
            from keyhole.attention.triton_loops import fill_relu_features

            fill_relu_features(tokens, batch.offsets, batch.query, weights, scale, columns)
        else:
            fill_features(
                tokens=tokens,
                offsets=batch.offsets,
                query=batch.query,
                heads=weights,
                activation=activation,
                scale=scale,
                out=columns,
                memory_budget=memory_budget,
                each=each,
            )

    # the activations that grow faster than their scores
    if activation in ("exp", "square") and not bool(torch.isfinite(out).all()):
        raise FeatureOverflowError(
            f"features must be finite: some overflow {out.dtype} under activation {activation!r}. "
            "Scale the tokens or the heads down, or use activation='softmax'."
        )
    return out


def key_contributions(
    batch: SetBatch,
    heads: HeadDraw | HeadArray,
    values: np.ndarray,
    activation: str,
    *,
    each: bool = False,
) -> torch.Tensor:
    """What every key adds to Φ·values (k, t), set by set: M^{-1/2} Σ_m w_mi <v_m, x~_i>.

    The plain version is `keyhole.textbook.contributions`. Values (M, D, t). With ``each``, every
    key is the query in turn, and the weights are means over these queries.
    """
    tokens = batch.tokens
    keys = torch.nn.functional.pad(tokens, (0, 1), value=1.0)
    queries = seen_query(batch.query, len(batch), tokens)
    n_heads, width, n_outputs = values.shape
    out = torch.zeros(len(tokens), n_outputs, dtype=tokens.dtype, device=tokens.device)
    size = block_size(DRAWN_BYTES * heads.entries, MEMORY_BUDGET // 4)
    for part, block in heads.blocks(size):
        drawn = as_tensor(np.asarray(block), tokens).to(tokens.dtype)
        # (D, m·t), so that one product with the keys of a set serves all heads and outputs
        table = as_tensor(values[part].transpose(1, 0, 2).reshape(width, -1), tokens)
        table = table.to(tokens.dtype)
        flat = drawn.permute(1, 0, 2).reshape(drawn.shape[1], -1)
        for i in range(len(batch)):
            rows = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
            n_keys = rows.stop - rows.start
            present = torch.ones(1, n_keys, dtype=torch.bool, device=keys.device)
            if each:
                bytes_per_query = 8 * 3 * (width + n_keys) * len(drawn)
                queries_at_once = block_size(bytes_per_query, MEMORY_BUDGET)
                weights = mean_weights(
                    activation, keys[rows][None], present, drawn, queries_at_once
                )[0]
            else:
                projected = (queries[i] @ flat).view(len(drawn), width)
                weights = weigh(activation, (projected @ keys[rows].T)[None], present)[0]
            parts = (keys[rows] @ table).view(-1, len(drawn), n_outputs)
            out[rows] += torch.einsum("mk,kmt->kt", weights, parts)
    return out / math.sqrt(n_heads)
