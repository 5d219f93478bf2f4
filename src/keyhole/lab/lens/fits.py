"""Gram matrices of the learners that a lens compares, and the held-out losses of ridge on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, block_size, blocks
from keyhole.attention.features import attention_features
from keyhole.attention.heads import DRAWN_BYTES, HeadArray, HeadDraw
from keyhole.attention.kernels import attention_kernel
from keyhole.data.sets import PooledSets, SetBatch, SetGroups
from keyhole.data.tokens import SetStatistics
from keyhole.lab.lens.findings import LensConfig, Measured, TargetLoading
from keyhole.lab.lens.problem import LensProblem, balanced_order
from keyhole.ridge.calibration import class_scores, fit_temperature
from keyhole.ridge.gram import ridge_gram
from keyhole.theory.conditional import conditional_curve

EPS32 = float(np.finfo(np.float32).eps)
SUBSETS = ((2**-0.5, 2), (0.5, 2), (2**-1.5, 2), (0.25, 4))
"""Points of a learning curve below its end: share of a training part, and subsets drawn of each."""
MIN_SUBSET = 8  # samples of the smallest subset


@dataclass(frozen=True, eq=False)
class Gram:
    """K over all samples, and the unit of rounding of the features behind it."""

    matrix: Float[np.ndarray, "n n"] = field(repr=False)
    rounding: float | None = None


def held_out_losses(
    gram: Gram, problem: LensProblem, train: np.ndarray, test: np.ndarray
) -> Float[np.ndarray, " u"]:
    """Fit on ``train`` with the penalty of least leave-one-out error; the losses on ``test``."""
    scores, _ = held_out_scores(gram, problem, train, test)
    return problem.losses(test, scores)


def held_out_scores(
    gram: Gram, problem: LensProblem, train: np.ndarray, test: np.ndarray
) -> tuple[Float[np.ndarray, "r t"], float]:
    """Outputs on ``test`` of a fit on ``train``, and the temperature that makes them probabilities.

    The temperature is that of the leave-one-out scores of ``train``; 1 for regression.
    """
    train_gram = np.ascontiguousarray(gram.matrix[np.ix_(train, train)])
    fit = ridge_gram(train_gram, problem.ridge(train), rounding=gram.rounding, overwrite_gram=True)
    scores = gram.matrix[np.ix_(test, train)] @ fit.coef + fit.intercept
    temperature = 1.0
    if problem.labels is not None and fit.left_out is not None:
        left_out_scores = class_scores(problem.columns[train] - fit.left_out)
        temperature = fit_temperature(left_out_scores, problem.labels[train])
    return scores, temperature


def make_gram(
    ready: SetBatch | PooledSets, distribution: Any, heads: float, config: LensConfig
) -> Gram:
    """The Gram matrix of attention: exact for infinitely many heads, else from their features.

    Extras are added to either.
    """
    if math.isinf(heads):
        kernel = attention_kernel(ready, None, distribution, config.activation)
        return Gram(kernel + extras_gram(ready))
    [gram] = nested_head_grams(
        ready, distribution, (int(heads),), activation=config.activation, seed=config.seed
    )
    return gram


def extras_gram(ready: Any) -> Float[np.ndarray, "n n"] | float:
    """The Gram matrix of sample-level features (`extras`); 0 without any."""
    if ready.extras is None:
        return 0.0
    return np.asarray(ready.extras @ ready.extras.T, dtype=np.float64)


def feature_gram(features: np.ndarray) -> Gram:
    """ΦΦᵀ of centred features."""
    centred = features - features.mean(axis=0)
    rounding = EPS32 if features.dtype == np.float32 else None
    return Gram((centred @ centred.T).astype(np.float64), rounding)


def nested_head_grams(
    ready: SetBatch | PooledSets,
    distribution: Any,
    counts: tuple[int, ...],
    activation: str,
    seed: int,
) -> list[Gram]:
    """The Gram matrices of the first M heads of one draw, for increasing M.

    ``counts`` are increasing. The features of every head are computed once, in single precision,
    and one block of heads at a time: all heads and features together may be gigabytes. The Gram
    matrix of extras is added to each.
    """
    draw = HeadDraw(distribution, counts[-1], ready.dim, seed, ready.query_dim)
    # without a query only one row of each head is needed
    draw = draw.seen_by(query=ready.has_query)
    # two copies of the features of a head, as they are and centred
    feature_bytes = 2 * 4 * len(ready) * (ready.dim + 1)
    heads_at_once = block_size(DRAWN_BYTES * draw.entries + feature_bytes, MEMORY_BUDGET // 4)

    total: np.ndarray | float = 0.0
    grams = []
    n_done = 0
    for count in counts:
        for block in blocks(count - n_done, heads_at_once):
            heads = HeadArray(draw.block(n_done + block.start, n_done + block.stop))
            features = attention_features(ready, heads, activation, dtype="float32")
            # features of m heads are scaled by m^{-1/2}, and their Gram matrix by 1/m: undone
            # before adding up
            total = total + len(heads) * feature_gram(features).matrix
        n_done = count
        grams.append(Gram(np.asarray(total / count + extras_gram(ready)), EPS32))
    return grams


def pooled_numbers(
    sets: SetBatch | SetGroups, *, statistics: bool, pooling: str
) -> Float[np.ndarray, "n p"]:
    """Mean (or sum) of the keys, query, extras; standardised.

    With ``statistics`` also the spread, extremes and number of keys.
    """
    # the keys
    of_keys = SetStatistics.of(sets)
    sizes = of_keys.sizes[:, None]
    parts = [of_keys.mean]
    if pooling == "sum":
        parts = [of_keys.mean * sizes]
    if statistics:
        parts += [of_keys.deviation, of_keys.least, of_keys.largest, np.log(sizes)]

    # the query, averaged over the sets of a sample, and sample-level features
    batch = sets.sets
    if batch.query is not None:
        query = np.add.reduceat(batch.query.astype(np.float64), sets.set_offsets[:-1], axis=0)
        parts.append(query / sets.set_counts[:, None])
    if sets.extras is not None:
        parts.append(np.asarray(sets.extras, dtype=np.float64))
    return standardised(np.concatenate(parts, axis=1))


def standardised(numbers: Float[np.ndarray, "n p"]) -> Float[np.ndarray, "n q"]:
    """Features of mean zero and unit variance; constant features are dropped."""
    centred = numbers - numbers.mean(axis=0)
    spread = centred.std(axis=0)
    varies = spread > 1e-12 * np.maximum(1.0, np.abs(numbers).max(axis=0))
    if not varies.any():
        return np.zeros((len(numbers), 1))
    return np.asarray(centred[:, varies] / spread[varies])


def linear_gram(numbers: Float[np.ndarray, "n p"]) -> Gram:
    """Ridge on the numbers themselves."""
    return Gram(numbers @ numbers.T / numbers.shape[1])


def mlp_gram(numbers: Float[np.ndarray, "n p"], width: int, seed: int) -> Gram:
    """A two-layer network with a random first layer: ReLU of random combinations of the numbers."""
    rng = np.random.default_rng([seed, width])
    p = numbers.shape[1]
    weights = rng.standard_normal((p, width)) / np.sqrt(p)
    hidden = numbers @ weights + rng.standard_normal(width)
    np.maximum(hidden, 0.0, out=hidden)
    return feature_gram(hidden / np.sqrt(width))


def spectrum_of(m: Measured, gram: np.ndarray, columns: np.ndarray) -> TargetLoading:
    """Eigenvalues of the centred matrix over n, largest first, and the target's power.

    The power is given as its share along each eigenvector.
    """
    centred = gram - gram.mean(axis=0) - gram.mean(axis=1)[:, None] + gram.mean()
    values, vectors = np.linalg.eigh(centred / len(gram))
    target = columns - columns.mean(axis=0)
    power = np.square(vectors.T @ target).sum(axis=1) / np.square(target).sum()
    return TargetLoading(
        name=m.name,
        role="pooled" if m.family == "pooled" else m.role,
        eigenvalues=np.maximum(values[::-1], 0.0),
        power=power[::-1],
    )


def learning_curve(
    gram: Gram, problem: LensProblem, seed: int
) -> tuple[tuple[int, ...], tuple[Float[np.ndarray, " u"], ...]]:
    """Sizes below that of a training part, increasing, and the losses for each.

    Losses are those of all held-out samples, fold by fold. Every loss is a mean over a few random
    subsets of the training part of its fold. A subset is a sub-block of the Gram matrix, and its
    penalty is chosen by leave-one-out on the subset. Groups are taken whole.
    """
    folds = [problem.fold(k, len(gram.matrix)) for k in range(len(problem.folds))]
    n = problem.trained_on(len(gram.matrix))
    rng = np.random.default_rng([seed, n])
    sizes = []
    curve = []
    for share, repeats in reversed(SUBSETS):
        if share * n < MIN_SUBSET:
            continue
        fold_losses = []
        for train, test in folds:
            repeated_losses = []
            for _ in range(repeats):
                subset = _subset(train, share, problem, rng)
                repeated_losses.append(held_out_losses(gram, problem, subset, test))
            fold_losses.append(np.mean(repeated_losses, axis=0))
        sizes.append(round(share * n))
        curve.append(np.concatenate(fold_losses))
    return tuple(sizes), tuple(curve)


RIDGES = np.geomspace(1e-6, 10.0, 15)
"""Ridges tried by `theory_curve`, as shares of the mean diagonal of the Gram matrix."""


def theory_curve(
    gram: Gram, columns: Float[np.ndarray, "n t"], sizes: Sequence[int]
) -> tuple[float, ...]:
    """The errors that theory predicts at some sizes, with the best ridge at each.

    From all samples by :func:`keyhole.theory.conditional_curve`, whose formula takes out that they
    are a sample. Features come from the Gram matrix: K = ΦΦᵀ with Φ = V Λ^{1/2}.
    """
    values, vectors = np.linalg.eigh(gram.matrix)
    features = vectors * np.sqrt(np.maximum(values, 0.0))
    ridges = RIDGES * float(np.trace(gram.matrix)) / len(gram.matrix)
    total = np.zeros((len(sizes), len(ridges)))
    for y in columns.T:
        total += conditional_curve(
            features, y, np.array(sizes)[:, None], ridges[None, :], fit_intercept=True
        )
    return tuple((total / columns.shape[1]).min(axis=1).tolist())


def _subset(
    train: np.ndarray, share: float, problem: LensProblem, rng: np.random.Generator
) -> np.ndarray:
    """About a share of the rows: whole groups, or samples with each class in proportion."""
    if problem.groups is not None:
        names = rng.permutation(np.unique(problem.groups[train]))
        n_groups = max(2, round(share * len(names)))
        return train[np.isin(problem.groups[train], names[:n_groups])]
    if problem.labels is None:
        classes = np.zeros(len(train), dtype=int)
    else:
        classes = problem.labels[train]
    order = balanced_order(classes, int(rng.integers(2**31)))
    return np.sort(train[order[: round(share * len(train))]])
