"""Every learner here is ridge on a Gram matrix: of pooled numbers, of heads, of infinitely many heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.features import pooled_features
from keyhole.groups import PooledSets, SetGroups
from keyhole.heads import HeadDraw
from keyhole.lens.findings import Measured, TargetLoading
from keyhole.lens.problem import LensProblem
from keyhole.pooled_kernels import pooled_kernel
from keyhole.sets import SetBatch
from keyhole.solvers import ridge_gram_path

EPS32 = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, eq=False)
class Gram:
    """K over all samples, and the unit of rounding behind it."""

    matrix: Float[np.ndarray, "n n"] = field(repr=False)
    rounding: float | None = None


def held_out_losses(
    gram: Gram, problem: LensProblem, train: np.ndarray, test: np.ndarray
) -> tuple[Float[np.ndarray, " r"], float]:
    """Fit on ``train`` with the penalty of least leave-one-out error, predict ``test``; losses and penalty."""
    own = np.ascontiguousarray(gram.matrix[np.ix_(train, train)])
    path = ridge_gram_path(own, problem.columns[train], rounding=gram.rounding, overwrite_gram=True)
    fit = path.solution()
    scores = gram.matrix[np.ix_(test, train)] @ fit.coef + fit.intercept
    return problem.losses(test, scores), fit.alpha


def kernel_gram(ready: SetBatch | PooledSets, law: Any, activation: str) -> Gram:
    """Infinitely many heads."""
    return Gram(pooled_kernel(ready, None, law, activation))


def head_gram(ready: SetBatch | PooledSets, law: Any, n_heads: int, activation: str, seed: int) -> Gram:
    """M heads, their features in single precision."""
    features = pooled_features(ready, HeadDraw(law, n_heads, ready.dim, seed), activation, dtype="float32")
    return feature_gram(features)


def feature_gram(features: np.ndarray) -> Gram:
    """ΦΦᵀ of centred features."""
    centred = features - features.mean(axis=0)
    rounding = EPS32 if features.dtype == np.float32 else None
    return Gram((centred @ centred.T).astype(np.float64), rounding)


def nested_head_grams(
    ready: SetBatch | PooledSets, law: Any, counts: tuple[int, ...], activation: str, seed: int
) -> list[Gram]:
    """The Gram matrices of the first M heads of one draw, for increasing M; every head is computed once."""
    draw = HeadDraw(law, counts[-1], ready.dim, seed)
    total: np.ndarray | float = 0.0
    grams, start = [], 0
    for count in counts:
        features = pooled_features(ready, draw.block(start, count), activation, dtype="float32")
        total = total + (count - start) * feature_gram(features).matrix
        grams.append(Gram(np.asarray(total / count), EPS32))
        start = count
    return grams


def pooled_numbers(problem: LensProblem, *, statistics: bool, pooling: str) -> Float[np.ndarray, "n p"]:
    """Mean (or sum) of the keys and the query; with ``statistics`` their spread, extremes and number as well."""
    sets = problem.sets
    batch = problem.batch
    offsets = batch.offsets[sets.offsets] if isinstance(sets, SetGroups) else batch.offsets
    tokens, lengths = batch.tokens.astype(np.float64), np.diff(offsets)[:, None]
    mean = np.add.reduceat(tokens, offsets[:-1], axis=0) / lengths
    parts = [mean * lengths if pooling == "sum" else mean]
    if statistics:
        square = np.add.reduceat(np.square(tokens), offsets[:-1], axis=0) / lengths
        spread = np.sqrt(np.maximum(square - np.square(mean), 0.0))
        low = np.minimum.reduceat(tokens, offsets[:-1], axis=0)
        high = np.maximum.reduceat(tokens, offsets[:-1], axis=0)
        parts += [spread, low, high, np.log(lengths)]
    if batch.query is not None:
        query = batch.query.astype(np.float64)
        if isinstance(sets, SetGroups):
            query = np.add.reduceat(query, sets.offsets[:-1], axis=0) / sets.counts[:, None]
        parts.append(query)
    return standardised(np.concatenate(parts, axis=1))


def standardised(numbers: Float[np.ndarray, "n p"]) -> Float[np.ndarray, "n q"]:
    """Columns of mean zero and unit variance; those that never move are left out."""
    centred = numbers - numbers.mean(axis=0)
    spread = centred.std(axis=0)
    moves = spread > 1e-12 * np.maximum(1.0, np.abs(numbers).max(axis=0))
    if not moves.any():
        return np.zeros((len(numbers), 1))
    return np.asarray(centred[:, moves] / spread[moves])


def linear_gram(numbers: Float[np.ndarray, "n p"]) -> Gram:
    """Ridge on the numbers themselves."""
    return Gram(numbers @ numbers.T / numbers.shape[1])


def mlp_gram(numbers: Float[np.ndarray, "n p"], width: int, seed: int) -> Gram:
    """A two-layer network with a random first layer: ReLU of random combinations of the numbers."""
    rng = np.random.default_rng([seed, width])
    p = numbers.shape[1]
    hidden = numbers @ (rng.standard_normal((p, width)) / np.sqrt(p)) + rng.standard_normal(width)
    np.maximum(hidden, 0.0, out=hidden)
    return feature_gram(hidden / np.sqrt(width))


def spectrum_of(m: Measured, gram: np.ndarray, columns: np.ndarray) -> TargetLoading:
    """Eigenvalues of the centred matrix over n, and what share of the target's power lies along each direction."""
    centred = gram - gram.mean(axis=0) - gram.mean(axis=1)[:, None] + gram.mean()
    values, vectors = np.linalg.eigh(centred / len(gram))
    target = columns - columns.mean(axis=0)
    power = np.square(vectors.T @ target).sum(axis=1) / np.square(target).sum()
    return TargetLoading(
        m.name, "pooled" if m.family == "pooled" else m.role, np.maximum(values[::-1], 0.0), power[::-1]
    )
