"""Key selection: of large sets, the layer sees only the keys that a scoring layer finds to matter.

A few keys that matter among hundreds are lost in a mean. So a small layer, the scoring layer, is
fitted first. What each key adds to its output, its contribution (`keyhole.textbook.contributions`),
says how much the key matters; the strongest few of each set are kept, and the final layer is fitted
to them.

The scoring layer must not have seen the outputs of the samples whose keys it judges: a layer that
has seen them finds keys that explain their noise. So training samples are judged by scoring layers
that were fitted without them, fold by fold; new samples by one that was fitted to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole.attention.backends import backend_for
from keyhole.attention.features import attention_features
from keyhole.attention.heads import GaussianHeads, HeadDraw
from keyhole.costs import fit_seconds
from keyhole.data.arrays import like, on_host
from keyhole.data.sets import SampleBatch
from keyhole.data.tokens import TokenRule
from keyhole.folds import Folds
from keyhole.ridge.gram import ridge_gram
from keyhole.ridge.problem import RidgeProblem
from keyhole.solvers.layers import FiniteLayer
from keyhole.solvers.solve import solve_values
from keyhole.spec import LayerSpec
from keyhole.training import TrainingSet

ALL_KEYS = "all"
"""The setting ``keys`` under which every key is seen."""

SCORING_HEADS = 64
"""Heads of the scoring layer. It ranks keys, and need not predict well.

Compared were 32, 64 and 128, on generated bags of needles.
"""

SCORING_PENALTY = 0.01
"""The penalty of the scoring layer, in units of the mean eigenvalue of its Gram matrix. It is small
on purpose. The penalty that predicts best shrinks all but the strongest directions, which say what
most keys of a set are like; a few keys that matter are found along the others. On bags of needles
(eight draws) the eight keys kept of a positive bag held .98 of its needles at 0.01 and at 0.001,
.94 at 0.1, .70 at 1 and .27 at 10; leave-one-out chose penalties from 1e-8 to 160."""

SAMPLES_FOR_PENALTY = 1024
"""Samples that this mean is taken over where not all features are at hand."""

MIN_FOLDS = 3
"""Folds at least that keys are judged by."""

TIE_RESOLUTION = 2.0**-30
"""Relevance is rounded to steps of this size, in units of the largest contribution of the set. Sums
in another order differ by some 1e-15 of it: which of two equal keys is kept should not depend on
that, and be the same in `predict` and in every export. Two keys at the edge of a step may still be
told apart, about once in a million.
"""

MAX_SAMPLES_AT_ONCE = 4096
"""Samples at most whose matrix of all pairs is made, from which every fold takes its part."""


@dataclass(frozen=True)
class KeySelection:
    """Which keys of a set a layer sees: those whose contributions to a scoring layer stand out.

    Attributes
    ----------
    n_keys : int
        Keys of each set that are kept; all of a set that has no more.
    standard : TokenRule
        Every coordinate centred and scaled, as learned on the training set.
    layer : FiniteLayer
        The scoring layer, for keys that were then brought to length one. Its outputs are those of
        the model, each in units of its standard deviation.
    """

    n_keys: int
    standard: TokenRule
    layer: FiniteLayer

    def kept_keys(self, samples: SampleBatch) -> Bool[np.ndarray, " k"]:
        """Which of all keys, set after set, are kept."""
        parts = self.layer.contributions(scoring_samples(self.standard, samples))
        return strongest_keys(parts, samples.sets.offsets, self.n_keys)

    def apply(self, samples: Any) -> Any:
        """The same samples with the keys that are kept alone."""
        return samples.with_sets(samples.sets.with_kept_keys(self.kept_keys(samples)))


@dataclass(frozen=True)
class SelectedKeys:
    """What a selection of keys is on a training set.

    Attributes
    ----------
    selection : KeySelection
        For new samples.
    data : TrainingSet
        The training samples with the keys that are kept, each judged by a layer that was fitted
        without the sample.
    """

    selection: KeySelection
    data: TrainingSet = field(repr=False)


def select_keys(spec: LayerSpec, data: TrainingSet) -> SelectedKeys:
    """Fit the scoring layers, and keep ``spec.keys`` keys of every set.

    The scoring layers have zero-mean ReLU heads, whatever is chosen for the final layer: they are
    the same for all candidates, so that keys are selected once.
    """
    assert isinstance(spec.keys, int)
    data = data.with_samples(backend_for(spec.device).placed(data.samples))
    folds = Folds.of(data, seed=spec.seed, classifies=spec.classifies)
    if folds.count < MIN_FOLDS:
        raise ValueError(
            f"keys={spec.keys} selects keys by layers that are fitted without each fold of the "
            f"samples, which takes {MIN_FOLDS} samples, or groups, of positive weight: got "
            f"{len(data.positive_rows)} samples in {folds.count} folds. Use keys='all', or more "
            "samples."
        )

    # samples as the scoring layers see them; they are fitted to those with weight
    standard = TokenRule.learn(data.samples.with_extras(None), "standard", weights=data.weights)
    ready = data.with_samples(scoring_samples(standard, data.samples))
    training = with_outputs_of_one_spread(spec, ready.of_positive_weight())

    # the scoring layers without each fold, and the one that is fitted to all
    fold_of_row = folds.numbers[data.positive_rows]
    parts = [np.flatnonzero(fold_of_row != fold) for fold in range(folds.count)]
    *without_fold, of_all = fit_scoring_layers(spec, training, [*parts, np.arange(len(training))])

    # training samples: each judged by the layer that was fitted without its fold
    kept_keys: list[Any] = [None] * len(data)
    for layer, (_, held_out) in zip(without_fold, folds.splits(), strict=True):
        samples = ready.samples[held_out]
        is_kept = strongest_keys(layer.contributions(samples), samples.sets.offsets, spec.keys)
        ends = np.cumsum(samples.unpooled.token_counts)
        for row, of_sample in zip(held_out, np.split(is_kept, ends[:-1]), strict=True):
            kept_keys[row] = of_sample
    sets = data.samples.sets.with_kept_keys(np.concatenate(kept_keys))

    # new samples: judged by the layer that was fitted to all
    selection = KeySelection(n_keys=spec.keys, standard=standard, layer=of_all)
    return SelectedKeys(selection=selection, data=data.with_samples(data.samples.with_sets(sets)))


def selection_seconds(n: int, n_tokens: int, dim: int) -> float:
    """Seconds of one core that `select_keys` takes, predicted from sizes alone.

    Features of all keys are made once, and contributions take about twice as long: once for the
    training samples, once for the samples of a fold.
    """
    return 4.0 * fit_seconds(n, n_tokens, dim, SCORING_HEADS, has_query=True)


def scoring_samples(standard: TokenRule, samples: Any) -> Any:
    """Samples as the scoring layer sees them: tokens standardised, then brought to length one.

    Without the first step an offset that all keys share would hide how they differ; without the
    second, keys that are long in every respect would be taken for those that matter. Sample-level
    features stay out of it.
    """
    standardised = samples.with_sets(standard.scaled(samples.sets)).with_extras(None)
    return TokenRule("sphere", "given", "mean").apply(standardised)


def with_outputs_of_one_spread(spec: LayerSpec, data: TrainingSet) -> TrainingSet:
    """The same samples with each output in units of its standard deviation.

    Contributions to several outputs can then be compared. Classes are ±1 and stay so.
    """
    if spec.classifies:
        return data
    problem = RidgeProblem.of(data.outputs, fit_intercept=spec.fit_intercept, weights=data.weights)
    spread = np.where(problem.spread > 0, problem.spread, 1.0)
    return replace(data, outputs=data.outputs / spread)


def fit_scoring_layers(
    spec: LayerSpec, training: TrainingSet, parts: Sequence[Int[np.ndarray, " _"]]
) -> list[FiniteLayer]:
    """A layer of a few zero-mean ReLU heads on each part of some prepared samples.

    Features are made once for all parts, unless they exceed the memory.
    """
    samples = training.samples
    draw = HeadDraw(GaussianHeads(), SCORING_HEADS, samples.dim, spec.seed, samples.query_dim)
    bytes_of_features = 8 * len(training) * SCORING_HEADS * (samples.dim + 1)
    is_large = bytes_of_features > spec.memory_budget or len(training) > MAX_SAMPLES_AT_ONCE
    if is_large:
        return [solved_scoring_layer(spec, training[rows], draw) for rows in parts]

    # K = ΦΦᵀ of all samples, of which each part takes its rows and columns. Features are made, and
    # stay, where the samples are
    features = attention_features(samples, draw, "relu", dtype="float64")
    gram = on_host(features @ features.T)
    layers = []
    for rows in parts:
        part = training[rows]
        features_of_part = features[like(rows, features)]
        problem = RidgeProblem.of(
            part.outputs,
            [scoring_penalty(features_of_part, part.weights_or_ones())],
            fit_intercept=spec.fit_intercept,
            weights=part.weights,
        )
        ridge = ridge_gram(gram[np.ix_(rows, rows)], problem)

        # v = Φᵀa
        values = on_host(features_of_part.T @ like(ridge.coef, features))
        layers.append(
            FiniteLayer(
                heads=draw,
                values=values.reshape(SCORING_HEADS, samples.dim + 1, -1),
                intercept=ridge.intercept,
                activation="relu",
                dtype="float64",
                device=spec.device,
            )
        )
    return layers


def solved_scoring_layer(spec: LayerSpec, training: TrainingSet, draw: HeadDraw) -> FiniteLayer:
    """The scoring layer of samples that are too many for one matrix of their features.

    Its penalty is that of some of them, drawn at random.
    """
    drawn = training.shuffled_rows(spec.seed)[:SAMPLES_FOR_PENALTY]
    first = training[np.sort(drawn)]
    features = attention_features(first.samples, draw, "relu", dtype="float64")
    scoring = replace(
        spec,
        heads=draw.distribution,
        n_heads=SCORING_HEADS,
        activation="relu",
        alphas=np.array([scoring_penalty(features, first.weights_or_ones())]),
        dtype="float64",
        solver="auto",
        loss="squared_error",
        classifies=False,
    )
    layer = solve_values(scoring, replace(training, groups=None), draw, draft=True).layer
    assert isinstance(layer, FiniteLayer)
    return layer


def scoring_penalty(features: Float[Any, "n p"], weights: Float[np.ndarray, " n"]) -> float:
    """`SCORING_PENALTY` times the mean eigenvalue of the centred Gram matrix.

    The mean eigenvalue is Σ_i w_i |φ_i − φ̄|² / n.
    """
    weights_there = like(weights, features)
    mean = weights_there @ features / weights_there.sum()
    squares = ((features - mean) ** 2).sum(axis=1)
    mean_eigenvalue = float(weights_there @ squares) / len(features)
    if mean_eigenvalue > 0:
        return SCORING_PENALTY * mean_eigenvalue
    return 1.0


def strongest_keys(
    parts: Float[np.ndarray, "k t"], offsets: Int[np.ndarray, " o"], n_keys: int
) -> Bool[np.ndarray, " k"]:
    """The ``n_keys`` keys of each set whose contributions differ most from the mean of the set.

    Keys that speak for an output and keys that speak against it count alike: exchanging the two
    classes, or the sign of y, selects the same keys. Of several outputs the largest difference
    counts. Of keys that are equal in steps of `TIE_RESOLUTION` the first are kept.

    Examples
    --------
    >>> import numpy as np
    >>> parts = np.array([0.0, 0.1, 3.0, -0.1, -2.0, 7.0, 8.0])[:, None]
    >>> strongest_keys(parts, np.array([0, 5, 7]), n_keys=2)
    array([False, False,  True, False,  True,  True,  True])
    """
    lengths = np.diff(offsets)
    set_of_key = np.repeat(np.arange(len(lengths)), lengths)
    means = np.add.reduceat(parts, offsets[:-1], axis=0) / lengths[:, None]
    relevance = np.abs(parts - means[set_of_key]).max(axis=1)

    # relevance in whole steps, so that rounding decides nothing between equal keys
    largest = np.maximum.reduceat(np.abs(parts).max(axis=1), offsets[:-1])
    unit = np.where(largest > 0, largest, 1.0)
    steps = np.round(relevance / unit[set_of_key] / TIE_RESOLUTION)

    # every key has a rank of its own, the least for the most relevant, and equally relevant keys in
    # their order (there are fewer than 2³² steps, so that ranks of up to 2³¹ keys fit 64 bits)
    ranks = np.arange(len(parts)) - len(parts) * steps.astype(np.int64)

    # a set of more keys keeps those of the least ranks
    is_kept = np.ones(len(parts), bool)
    for start, stop in pairwise(offsets):
        if stop - start > n_keys:
            ranks_of_set = ranks[start:stop]
            last_kept = np.partition(ranks_of_set, n_keys - 1)[n_keys - 1]
            is_kept[start:stop] = ranks_of_set <= last_kept
    return is_kept
