r"""How far a head's matrix W = QᵀK leans towards the identity, and what chance alone would give.

The lean is tr W, the part of W along the identity. Chance is a random rotation between the space of the queries and
that of the keys, W → W R with R uniform (Haar) on the orthogonal group: then E tr(WR) = 0 and, exactly,
Var tr(WR) = |W|²/d, so

    z = tr(W) √d / |W|          (Frobenius norms throughout)

counts standard errors. It knows nothing of W's scale, its rank r or its singular values, and is close to Gaussian when
d is not small. Only the rank bounds it: |z| ≤ √(rd), reached when W is a multiple of a projection; `alignment` is
z/√(rd).

A few coordinates much larger than the rest, which trained transformers have, widen the law of tr W beyond what a
rotation does, because a rotation spreads them out. Hence a second, stricter null that leaves every coordinate in its
place and draws only its sign, W → W D with D = diag(±1): then Var tr(WD) = Σ W_ii², and `z_signs` = tr(W)/√Σ W_ii².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float


@dataclass(frozen=True)
class LayerLean:
    """The lean of every head of a layer (arrays over heads), and of the layer as a whole.

    `z_layer` is the z of the sum of its heads, each divided by its norm: one rotation is drawn for all of them, so
    heads that resemble each other do not count as independent evidence. `z_signs_layer` likewise.
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
    """Layers together; rotations (or signs) of different layers are independent, so their z add up like Gaussians."""

    layers: tuple[LayerLean, ...]
    z: float
    z_signs: float


def lean_of_layer(query: Float[np.ndarray, "h r d"], key: Float[np.ndarray, "g r d"], label: str = "") -> LayerLean:
    """Measure the heads of a layer.

    Parameters
    ----------
    query : array (heads, r, d)
        Query weights of every head, so that W_h = query[h]ᵀ key[h].
    key : array (groups, r, d)
        Key weights; where there are fewer than heads (grouped queries), each serves heads/groups neighbouring heads.
    label : str
        Name of the layer.

    Returns
    -------
    LayerLean
        With z per head and for the layer. `symmetric_share` is the identity's part of the symmetric half of W,
        (tr W)²/(d |(W + Wᵀ)/2|²). A head whose W is zero leans nowhere: its figures are 0.

    Notes
    -----
    W is not formed per head: tr W = <Q, K>, |W|² = <QQᵀ, KKᵀ> and tr W² = <KQᵀ, (KQᵀ)ᵀ> need r × r products. The
    layer's sum of heads is one d × d matrix. Cost O(h r d (r + d)).

    Examples
    --------
    Eight coordinates, and a head that compares the first four of them:

    >>> projection = np.eye(4, 8)[None]
    >>> lean = lean_of_layer(projection, projection)
    >>> float(lean.z[0].round(6)), float(lean.alignment[0].round(6))
    (5.656854, 1.0)
    """
    heads, rank, dim = query.shape
    if key.shape[0] < 1 or heads % key.shape[0]:
        raise ValueError(
            f"heads must share keys in groups of equal size: got {heads} heads and {key.shape[0]} key matrices. "
            "Check the numbers of heads."
        )
    query = query.astype(np.float64)
    key = np.repeat(key.astype(np.float64), heads // key.shape[0], axis=0)
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


def _ratio(over: np.ndarray, under: np.ndarray) -> np.ndarray:
    """The quotient, zero where there is nothing to divide by."""
    return np.divide(over, under, out=np.zeros_like(over), where=under > 0)
