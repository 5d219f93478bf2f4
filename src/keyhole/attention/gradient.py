"""The leave-one-out error of a layer with learned heads, and its gradient, by hand.

One implementation for NumPy and torch arrays. Notation: x~ are extended queries, U^h the matrices
of the hops before the last, W_m = U_k + noise_m the heads of the last one:

    a = softmax(x~ᵀ U_p X~ᵀ),  o_p = Σ_i a_i x_i,  next query [x; o_1; …; o_P]        (each hop)
    s_mi = x~ᵀ W_m x~_i,  Φ_m = M^{-1/2} Σ_i w_mi x~_i,  K = ΦΦᵀ                       (the last)

E(K, α) is the error of `solve.gradient`, ∂E/∂Φ = 2 ∂E/∂K Φ, and from there the chain goes back
through weights, scores, heads, queries and hops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole.attention.features import (
    Stack,
    like_tokens,
    namespace_of,
    projected_heads,
    stacks,
)
from keyhole.data.sets import SetBatch
from keyhole.registry import ACTIVATIONS
from keyhole.solve.gradient import loo_gradient
from keyhole.solve.matrices import as_like, is_tensor, on_host

STACK_HEADS = 64
"""Heads that stacks of sets are cut for."""


@dataclass(frozen=True)
class Task:
    """Samples of one set each, with their outputs: what heads are learned from.

    Attributes
    ----------
    sets : SetBatch
        Prepared, in float32, of NumPy or of torch.
    outputs : array (n, t)
        In units of their spread.
    weights : array (n,) or None
    groups : array (n,) or None
    extras : array (n, c)
        Scaled sample-level features, perhaps none.
    activation : str
    fit_intercept : bool
    """

    sets: SetBatch
    outputs: Float[np.ndarray, "n t"] = field(repr=False)
    weights: Float[np.ndarray, " n"] | None = field(repr=False)
    groups: Int[np.ndarray, " n"] | None = field(repr=False)
    extras: Float[np.ndarray, "n c"] = field(repr=False)
    activation: str = "relu"
    fit_intercept: bool = True

    def __len__(self) -> int:
        return len(self.outputs)

    def __getitem__(self, rows: Int[np.ndarray, " r"]) -> Task:
        return replace(
            self,
            sets=self.sets[rows],
            outputs=self.outputs[rows],
            weights=None if self.weights is None else self.weights[rows],
            groups=None if self.groups is None else self.groups[rows],
            extras=self.extras[rows],
        )

    def with_query_columns(self, columns: Int[np.ndarray, " q"]) -> Task:
        """The same samples with some coordinates of their queries."""
        query = self.sets.query
        if query is None:
            return self
        return replace(self, sets=self.sets.with_query(query[:, columns]))


@dataclass
class Pass:
    """Features of some heads after some hops, with all that their gradient needs again."""

    stacks: list[Stack]
    queries: list[Any]
    """Extended queries (n, D_h) of every hop, those of the heads last."""
    hop_weights: list[list[Any]]
    scores: list[Any]
    features: Any
    """Φ (n, M·D)."""
    hops: list[Any]
    heads: Any
    """Both in the type and on the device of the features."""


def forward(sets: SetBatch, activation: str, hops: Sequence[Any], heads: Any) -> Pass:
    """Go through the hops, then through the heads (M, D_q, D)."""
    all_stacks = list(stacks(sets, STACK_HEADS))
    n = len(sets)
    width = sets.dim + 1
    first = all_stacks[0].queries
    hops = [like_tokens(hop, first) for hop in hops]
    heads = like_tokens(heads, first)
    query = _empty(first, (n, first.shape[1]))
    for stack in all_stacks:
        query[stack.rows] = stack.queries
    queries = [query]
    hop_weights = []
    softmax = ACTIVATIONS["softmax"]
    xp = namespace_of(query)

    # each hop extends the query by what its patterns find
    for hop in hops:
        projected = projected_heads(queries[-1], hop)
        found = _empty(query, (n, len(hop), sets.dim))
        of_hop = []
        for stack in all_stacks:
            weights = softmax.value(xp, projected[stack.rows] @ stack.keys.swapaxes(1, 2))
            of_hop.append(weights)
            found[stack.rows] = weights @ stack.keys[:, :, :-1]
        hop_weights.append(of_hop)
        before = queries[-1]
        queries.append(_side_by_side([before[:, :-1], found.reshape(n, -1), before[:, -1:]]))

    # the heads
    record = ACTIVATIONS[activation]
    n_heads = len(heads)
    projected = projected_heads(queries[-1], heads)
    features = _empty(query, (n, n_heads * width))
    scores = []
    for stack in all_stacks:
        of_stack = projected[stack.rows] @ stack.keys.swapaxes(1, 2)
        scores.append(of_stack)
        weights = record.value(xp, of_stack)
        if record.is_pointwise:
            weights = weights / stack.keys.shape[1]
        features[stack.rows] = (weights @ stack.keys).reshape(len(stack.rows), -1)
    features /= math.sqrt(n_heads)
    return Pass(
        stacks=all_stacks,
        queries=queries,
        hop_weights=hop_weights,
        scores=scores,
        features=features,
        hops=hops,
        heads=heads,
    )


@dataclass(frozen=True)
class HeadGradient:
    """The error of some heads, and its gradient.

    ``heads`` is (M, D_q, D), ``hops`` have the shapes of the matrices of the hops, of which each
    may have another number of patterns.
    """

    error: float
    log_alpha: float
    heads: Float[np.ndarray, "m f e"] = field(repr=False)
    hops: list[Float[np.ndarray, "_ _ e"]] = field(repr=False)


def error_gradient(task: Task, hops: Sequence[Any], heads: Any, alpha: float) -> HeadGradient:
    """The leave-one-out error at penalty ``alpha``, and its gradient in heads and hops."""
    passed = forward(task.sets, task.activation, hops, heads)
    if task.fit_intercept:
        # the intercept makes up for it, and float32 keeps its digits
        passed.features -= passed.features.mean(0)
    gram = passed.features @ passed.features.T
    if task.extras.shape[1]:
        gram = gram + _like(as_like(task.extras @ task.extras.T, gram), gram)
    loo = loo_gradient(
        gram,
        task.outputs,
        alpha,
        fit_intercept=task.fit_intercept,
        weights=task.weights,
        groups=task.groups,
    )
    in_features = 2.0 * _like(loo.gram, passed.features) @ passed.features
    in_heads, in_query = _back_through_heads(task, passed, in_features)
    in_hops = []
    if len(hops):
        in_hops = _back_through_hops(task, passed, passed.hops, in_query)
    return HeadGradient(
        error=loo.error,
        log_alpha=loo.log_alpha,
        heads=on_host(in_heads).astype(np.float64),
        hops=[on_host(gradient).astype(np.float64) for gradient in in_hops],
    )


def _back_through_heads(task: Task, passed: Pass, in_features: Any) -> tuple[Any, Any]:
    """The gradient in the heads, and, if there are hops, in the queries that the heads saw."""
    record = ACTIVATIONS[task.activation]
    if record.slope is None:
        raise ValueError(f"heads cannot be learned under {task.activation!r}: it has no slope.")
    heads = passed.heads
    n_heads, n_rows, width = heads.shape
    n = len(task)
    xp = namespace_of(in_features)
    # Σ_i ∂s_mi x~_i of every set and head
    lines = _empty(in_features, (n, n_heads, width))
    for stack, scores in zip(passed.stacks, passed.scores, strict=True):
        cotangent = in_features[stack.rows].reshape(len(stack.rows), n_heads, width)
        in_weights = cotangent @ stack.keys.swapaxes(1, 2)
        if record.is_pointwise:
            in_weights = in_weights / stack.keys.shape[1]
        lines[stack.rows] = record.slope(xp, scores, in_weights) @ stack.keys
    lines /= math.sqrt(n_heads)
    flat = lines.reshape(n, n_heads * width)
    in_heads = (passed.queries[-1].T @ flat).reshape(n_rows, n_heads, width).swapaxes(0, 1)
    in_query = None
    if passed.hops:
        side_by_side = heads.swapaxes(0, 1).reshape(n_rows, n_heads * width)
        in_query = flat @ side_by_side.T
    return in_heads, in_query


def _back_through_hops(task: Task, passed: Pass, hops: Sequence[Any], in_query: Any) -> list[Any]:
    """The gradient in the matrices of every hop, from that in the queries of the heads."""
    n = len(task)
    dim = task.sets.dim
    gradients: list[Any] = []
    for number in reversed(range(len(hops))):
        hop = hops[number]
        n_patterns = len(hop)
        query = passed.queries[number]
        n_rows = query.shape[1]
        # what was found stands between the query and its appended one
        in_found = in_query[:, n_rows - 1 : -1].reshape(n, n_patterns, dim)
        lines = _empty(in_query, (n, n_patterns, dim + 1))
        for stack, weights in zip(passed.stacks, passed.hop_weights[number], strict=True):
            slopes = in_found[stack.rows] @ stack.keys[:, :, :-1].swapaxes(1, 2)
            # through softmax: w (g − Σ w g)
            in_scores = weights * (slopes - (weights * slopes).sum(-1)[..., None])
            lines[stack.rows] = in_scores @ stack.keys
        flat = lines.reshape(n, -1)
        in_hop = (query.T @ flat).reshape(n_rows, n_patterns, dim + 1).swapaxes(0, 1)
        gradients.append(in_hop)
        # what later hops say of the same query, and what this one says
        side_by_side = hop.swapaxes(0, 1).reshape(n_rows, -1)
        of_later = _side_by_side([in_query[:, : n_rows - 1], in_query[:, -1:]])
        in_query = of_later + flat @ side_by_side.T
    return gradients[::-1]


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    """An array of some shape, of the type and on the device of another."""
    if is_tensor(like):
        return like.new_empty(shape)
    return np.empty(shape, like.dtype)


def _like(array: Any, other: Any) -> Any:
    """An array in the type of another."""
    if is_tensor(array):
        return array.to(other.dtype)
    return array.astype(other.dtype, copy=False)


def _side_by_side(parts: list[Any]) -> Any:
    """Columns of several arrays."""
    if is_tensor(parts[0]):
        import torch

        return torch.cat(parts, dim=1)
    return np.concatenate(parts, axis=1)
