"""Features of an attention layer in plain torch: sets of similar length padded together, products batched."""

from __future__ import annotations

import math

import numpy as np
import torch

from keyhole._array import block_size, blocks
from keyhole._tensors import as_tensor


def seen_query(query: torch.Tensor | None, n: int, like: torch.Tensor) -> torch.Tensor:
    """[x_0; 1] of every set, or the constant query without its zeros, [√2]."""
    if query is not None:
        return torch.nn.functional.pad(query.to(like.dtype), (0, 1), value=1.0)
    return torch.full((n, 1), math.sqrt(2.0), dtype=like.dtype, device=like.device)


def project_queries(query: torch.Tensor, heads: torch.Tensor, out: torch.Tensor) -> None:
    """out[s, m·D + e] = Σ_d x~_0[s, d] W_m[d, e], straight into ``out`` (n, M·D)."""
    torch.mm(query, heads.permute(1, 0, 2).reshape(heads.shape[1], -1), out=out)


def weigh(activation: str, scores: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Weights (n, m, k) of the keys: σ(s)/N, or softmax over the set; zero where there is no key."""
    if activation == "softmax":
        return torch.softmax(scores.masked_fill(~present[:, None], -math.inf), dim=2)
    if activation == "relu":
        weights = torch.relu(scores)
    elif activation == "linear":
        weights = scores
    elif activation == "square":
        weights = scores.square()
    elif activation == "step":
        weights = (scores > 0).to(scores.dtype)
    else:
        weights = torch.exp(scores)
    lengths = present.sum(dim=1).to(scores.dtype)
    return weights * (present / lengths[:, None])[:, None].to(scores.dtype)


def fill_features(
    tokens: torch.Tensor,
    offsets: np.ndarray,
    query: torch.Tensor | None,
    heads: torch.Tensor,
    activation: str,
    scale: float,
    out: torch.Tensor,
    memory_budget: int,
) -> torch.Tensor:
    """Fill ``out`` (n, M·D) with scale · Σ_i weight_i x~_i, all in the type of ``out``; heads (M, D_q, D).

    Cost: 2MD_qD + 4MD·L operations for a set in a block whose longest set has L keys; blocks hold sets of similar
    length.
    """
    n, width, n_heads = len(offsets) - 1, heads.shape[2], len(heads)
    tokens, lengths = tokens.to(out.dtype), np.diff(offsets)
    queries = seen_query(query, n, tokens)
    heads = heads.to(out)
    order = np.argsort(lengths, kind="stable")
    start = 0
    while start < n:
        longest = int(lengths[order[start]])
        stop = start
        while stop < n and lengths[order[stop]] <= max(4, longest + longest // 4):
            stop += 1
        longest = int(lengths[order[stop - 1]])
        # a set takes its projected queries, scores and weights for each head of a block
        heads_at_once = min(n_heads, block_size(8 * 3 * (width + longest), memory_budget))
        size = block_size(8 * 3 * heads_at_once * (width + longest), memory_budget)
        for part in blocks(stop - start, size):
            rows = order[start + part.start : start + part.stop]
            _fill_block(tokens, offsets, queries, heads, activation, scale, out, rows, longest, heads_at_once)
        start = stop
    return out


def _fill_block(
    tokens: torch.Tensor,
    offsets: np.ndarray,
    queries: torch.Tensor,
    heads: torch.Tensor,
    activation: str,
    scale: float,
    out: torch.Tensor,
    rows: np.ndarray,
    longest: int,
    heads_at_once: int,
) -> None:
    width = heads.shape[2]
    lengths = offsets[rows + 1] - offsets[rows]
    index = as_tensor(offsets[rows, None] + np.minimum(np.arange(longest), lengths[:, None] - 1), tokens)
    present = as_tensor(np.arange(longest) < lengths[:, None], tokens)
    keys = torch.nn.functional.pad(tokens[index], (0, 1), value=1.0)
    where = as_tensor(rows, tokens)
    for part in blocks(len(heads), heads_at_once):
        block = heads[part]
        flat = block.permute(1, 0, 2).reshape(block.shape[1], -1)
        projected = (queries[where] @ flat).view(len(rows), len(block), width)
        weights = weigh(activation, projected @ keys.transpose(1, 2), present)
        features = (weights @ keys).mul_(scale)
        out[where, part.start * width : part.stop * width] = features.reshape(len(rows), -1)
