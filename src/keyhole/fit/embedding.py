"""What a set becomes: prepared tokens under heads, infinitely many, landmarks, or statistics alone.

An `Embedding` is fitted to the training samples. It gives finite features φ(x), or the kernel
K(x, x') of infinitely many heads; sample-level features z are appended to φ, and ⟨z, z'⟩ is added to
K. Members with the same embedding share it, and what was computed from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import block_size, blocks
from keyhole.attention.features import (
    apply_values,
    attention_features,
    feature_blocks,
    key_contributions,
    written_blocks,
)
from keyhole.attention.heads import HeadDistribution, HeadDraw
from keyhole.attention.kernels import attention_kernel
from keyhole.data.sets import SampleBatch
from keyhole.data.tokens import TokenRule
from keyhole.fit.samples import TrainingSet
from keyhole.fit.settings import FitOptions, Landmarks, LayerSettings
from keyhole.solve.cholesky import fit_gram
from keyhole.solve.matrices import add_outer, as_like, copied, eigen, is_tensor, mirror_lower, on_host
from keyhole.solve.problem import RidgeProblem

SQUARED_SETS = 16
"""Sets whose kernels with themselves are computed at a time, all pairs of them."""

EXTRAS_SCALES = (0.3, 1.0, 3.0)
"""Strengths of the standardised sample-level features that are tried, in units in which they vary as
much as the features of sets do."""

MAX_SAMPLES_FOR_EXTRAS = 500
"""Samples that the strength of extras is chosen by."""


@dataclass
class Embedding:
    """Prepared samples and heads, drawn or infinitely many.

    Attributes
    ----------
    settings : LayerSettings
    options : FitOptions
    rule : TokenRule
        What is done to tokens first.
    heads : head distribution
        Fitted, if it had to be.
    train : samples
        The training samples, prepared.
    draw : HeadDraw or None
        The heads, where they are finitely many.
    landmarks : samples or None
        Prepared samples whose kernel columns are the features.
    whitening : array (q, r) or None
        K_LL^{-1/2} of the landmarks.
    """

    settings: LayerSettings
    options: FitOptions
    rule: TokenRule
    heads: HeadDistribution
    train: SampleBatch
    draw: HeadDraw | None = None
    landmarks: SampleBatch | None = None
    whitening: Float[np.ndarray, "q r"] | None = None
    cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def fit(
        cls,
        settings: LayerSettings,
        data: TrainingSet,
        options: FitOptions,
        rule: TokenRule | None = None,
    ) -> Embedding:
        """Learn the token rule on the training samples, prepare them, and draw the heads.

        Heads that are fitted to the training set must have been fitted before.
        """
        if rule is None:
            rule = learn_rule(settings, data, options)
        train = rule.apply(data.samples)
        embedding = cls(
            settings=settings, options=options, rule=rule, heads=settings.heads, train=train
        )
        if not settings.has_heads:
            return embedding
        if settings.has_landmarks:
            return embedding._with_landmarks()
        if not settings.is_exact:
            embedding.draw = HeadDraw(
                settings.heads, int(settings.n_heads), train.dim, options.seed, train.query_dim
            )
        return embedding

    def _with_landmarks(self) -> Embedding:
        """The same embedding with some of the training samples as landmarks."""
        assert isinstance(self.settings.n_heads, Landmarks)
        count = min(self.settings.n_heads.count, len(self.train))
        rng = np.random.default_rng(self.options.seed)
        rows = np.sort(rng.permutation(len(self.train))[:count])
        self.landmarks = self.train[rows].with_extras(None)
        kernel = on_host(
            attention_kernel(self.landmarks, None, self.heads, self.settings.activation)
        )
        values, vectors = eigen(np.asfortranarray(kernel))
        is_kept = values > 1e-12 * len(values) * values[0]
        self.whitening = vectors[:, is_kept] / np.sqrt(values[is_kept])
        return self

    @property
    def is_finite(self) -> bool:
        """Whether it has features; otherwise it has a kernel only."""
        return not (self.settings.has_heads and self.settings.is_exact)

    @property
    def n_features(self) -> int:
        """p of a finite embedding, sample-level features included."""
        n_extras = 0 if self.train.extras is None else self.train.extras.shape[1]
        if self.draw is not None:
            return self.draw.n_heads * (self.draw.dim + 1) + n_extras
        if self.whitening is not None:
            return self.whitening.shape[1] + n_extras
        return n_extras

    # ---- samples to features, or to rows of the kernel

    def prepared(self, samples: SampleBatch) -> SampleBatch:
        """Samples as the heads see them."""
        return self.rule.apply(samples)

    def features(self, prepared: SampleBatch) -> Any:
        """φ(x), sample-level features last; in ``dtype``, where the samples live."""
        parts: list[Any] = []
        if self.draw is not None:
            parts.append(
                attention_features(
                    prepared, self.draw, self.settings.activation, dtype=self.options.dtype
                )
            )
        elif self.landmarks is not None:
            kernel = attention_kernel(
                prepared.with_extras(None), self.landmarks, self.heads, self.settings.activation
            )
            parts.append(kernel @ as_like(self.whitening, kernel))
        extras = prepared.extras
        if not parts:
            assert extras is not None
            return extras
        if extras is None:
            return parts[0]
        return _side_by_side(parts[0], extras)

    def row_blocks(self) -> Iterator[Any]:
        """Features of the training samples, in blocks of rows within the memory budget."""
        if "features" in self.cache:
            yield self.cache["features"]
            return
        row_bytes = 8 * max(1, self.n_features)
        if len(self.train) * row_bytes <= self.options.memory_budget:
            self.cache["features"] = self.features(self.train)
            yield self.cache["features"]
            return
        for rows in blocks(len(self.train), block_size(4 * row_bytes, self.options.memory_budget)):
            yield self.features(self.train[rows])

    def gram(self) -> Any:
        """K of the training samples, both triangles, in memory of the caller's."""
        if "gram" in self.cache:
            return copied(self.cache["gram"])
        gram = self._made_gram()
        if 8 * len(self.train) ** 2 <= self.options.memory_budget // 8:
            self.cache["gram"] = gram
            return copied(gram)
        return gram

    def forget(self) -> None:
        """Drop what was kept of the training samples for other members."""
        self.cache.clear()

    def _made_gram(self) -> Any:
        """K of the training samples."""
        if not self.is_finite:
            gram = attention_kernel(
                self.train.with_extras(None),
                None,
                self.heads,
                self.settings.activation,
                memory_budget=self.options.memory_budget,
            )
            return self._with_linear_part(gram, self.train.extras, self.train.extras)
        if self.draw is None or is_tensor(self.train.sets.stored):
            features = self.features(self.train)
            return features @ features.T
        # ΦΦᵀ block by block of heads: Φ need not exist as a whole
        gram = np.zeros((len(self.train), len(self.train)), order="F")
        for _, part in self._head_blocks():
            add_outer(gram, part)
        mirror_lower(gram)
        return self._with_linear_part(gram, self.train.extras, self.train.extras)

    def _head_blocks(self) -> Iterator[tuple[slice, Float[np.ndarray, "n q"]]]:
        """Features of the training samples, block by block of heads."""
        assert self.draw is not None
        return feature_blocks(
            self.train.with_extras(None),
            self.draw,
            self.settings.activation,
            reuse_buffer=True,
            dtype=self.options.dtype,
            memory_budget=self.options.memory_budget,
        )

    def values_of_dual(self, dual: Float[np.ndarray, "n t"]) -> Float[np.ndarray, "p t"]:
        """v = Φᵀa of a finite embedding, over the blocks of heads again."""
        if self.draw is None or is_tensor(self.train.sets.stored):
            features = self.features(self.train)
            return on_host(features.T @ as_like(dual, features))
        width = self.draw.dim + 1
        values = np.empty((self.n_features, dual.shape[1]))
        for part, features in self._head_blocks():
            values[part.start * width : part.stop * width] = features.T @ dual
        if self.train.extras is not None:
            values[self.draw.n_heads * width :] = self.train.extras.T @ dual
        return values

    def cross(self, prepared: SampleBatch) -> Any:
        """K(x, x_j) of new samples and all training samples."""
        if not self.is_finite:
            cross = attention_kernel(
                prepared.with_extras(None),
                self.train.with_extras(None),
                self.heads,
                self.settings.activation,
                memory_budget=self.options.memory_budget,
            )
            return self._with_linear_part(cross, prepared.extras, self.train.extras)
        cross = None
        new = self.features(prepared)
        start = 0
        parts = []
        for block in self.row_blocks():
            parts.append(new @ block.T)
            start += len(block)
        cross = parts[0] if len(parts) == 1 else _joined_columns(parts)
        return cross

    def squares(self, prepared: SampleBatch) -> Float[np.ndarray, " n"]:
        """K(x, x) of new samples."""
        if self.is_finite:
            features = self.features(prepared)
            return on_host((features * features).sum(1))
        plain = prepared.with_extras(None)
        squares = np.empty(len(prepared))
        for rows in blocks(len(prepared), SQUARED_SETS):
            kernel = attention_kernel(plain[rows], None, self.heads, self.settings.activation)
            squares[rows] = on_host(kernel).diagonal()
        if prepared.extras is not None:
            squares += np.square(prepared.extras).sum(axis=1)
        return squares

    @staticmethod
    def _with_linear_part(kernel: Any, left: Any, right: Any) -> Any:
        """K + ⟨z, z'⟩."""
        if left is not None:
            kernel += as_like(left @ right.T, kernel)
        return kernel

    # ---- the parts of single keys

    def outputs(
        self, prepared: SampleBatch, values: Float[np.ndarray, "p t"]
    ) -> Float[np.ndarray, "n t"]:
        """φ(x)·values; the features of many heads are contracted as they are made."""
        if self.draw is None or is_tensor(prepared.sets.stored):
            features = self.features(prepared)
            return on_host(features @ as_like(values, features))
        n_of_heads = self.draw.n_heads * (self.draw.dim + 1)
        outputs = apply_values(
            prepared.with_extras(None),
            self.draw,
            values[:n_of_heads],
            self.settings.activation,
            dtype=self.options.dtype,
            memory_budget=self.options.memory_budget,
        ).astype(np.float64)
        if prepared.extras is not None:
            outputs += prepared.extras @ values[n_of_heads:]
        return outputs

    def parts_of_keys(
        self, prepared: SampleBatch, values: Float[np.ndarray, "p t"]
    ) -> Float[np.ndarray, "k t"]:
        """What every key adds to φ(x)·values, sample after sample.

        Without what sample-level features add that are no sums over keys.
        """
        if self.draw is not None:
            n_of_heads = self.draw.n_heads * (self.draw.dim + 1)
            return key_contributions(
                prepared.with_extras(None).numpy(),
                self.draw,
                values[:n_of_heads],
                self.settings.activation,
                dtype=self.options.dtype,
            )
        if self.landmarks is not None:
            assert self.whitening is not None
            dual = self.whitening @ values[: self.whitening.shape[1]]
            return kernel_parts_of_keys(self, prepared, self.landmarks, dual)
        return np.zeros((int(prepared.token_counts.sum()), values.shape[1]))


def kernel_parts_of_keys(
    embedding: Embedding,
    prepared: SampleBatch,
    others: SampleBatch,
    dual: Float[np.ndarray, "n t"],
) -> Float[np.ndarray, "k t"]:
    """What every key adds to Σ_j a_j K(x, x_j): K of a set is the mean of K over its keys.

    Each key is a set of its own with the same query.
    """
    others = others.with_extras(None).numpy()
    parts = []
    for _, written in written_blocks(prepared.with_extras(None).numpy(), 8 * dual.shape[1]):
        keys = written.sets.single_keys()
        lengths = written.sets.lengths
        outputs = np.empty((len(keys), dual.shape[1]))
        budget = embedding.options.memory_budget
        for rows in blocks(len(keys), block_size(8 * len(others), budget)):
            kernel = attention_kernel(
                others,
                keys[rows],
                embedding.heads,
                embedding.settings.activation,
                memory_budget=budget,
            )
            outputs[rows] = kernel.T @ dual
        # each is divided by the number of keys of its set, and summed over queries
        outputs /= np.repeat(lengths, lengths)[:, None]
        parts.append(written.of_keys(outputs))
    return np.concatenate(parts)


def learn_rule(settings: LayerSettings, data: TrainingSet, options: FitOptions) -> TokenRule:
    """The token rule that the settings ask for, learned on the training samples.

    The strength of sample-level features is the one of least leave-one-out error.
    """
    if settings.pooling == "extras" and data.samples.extras is None:
        raise ValueError(
            "pooling='extras' is of sample-level features alone, and these samples have none: pass "
            "them as SetBatch(keys, query, extras), or use pooling='mean'."
        )
    rule = TokenRule.learn(
        data.samples,
        settings.scaling,
        settings.query,
        settings.pooling,
        weights=data.weights,
        fit_intercept=options.fit_intercept,
        clips=settings.clips,
    )
    rule = rule.with_hops_of(settings.heads)
    if rule.extras_spread is None or not settings.has_heads:
        return rule
    return rule.with_extras_scale(_best_extras_scale(settings, data, options, rule))


def _best_extras_scale(
    settings: LayerSettings, data: TrainingSet, options: FitOptions, rule: TokenRule
) -> float:
    """The strength of extras of least leave-one-out error, on at most 500 samples."""
    rows = np.arange(len(data))
    if len(rows) > MAX_SAMPLES_FOR_EXTRAS:
        rng = np.random.default_rng(options.seed)
        rows = np.sort(rng.permutation(len(rows))[:MAX_SAMPLES_FOR_EXTRAS])
    if len(rows) < 2:
        return 1.0
    part = data[rows]
    narrow = replace(options, device=None)
    embedding = Embedding.fit(settings, part, narrow, rule)
    extras = embedding.train.extras
    assert extras is not None
    linear = extras @ extras.T
    gram = on_host(embedding.gram()) - linear

    # the strength at which both vary alike: the trace of the centred K is tr K − 1ᵀK1/n
    spread = float(np.trace(gram))
    if options.fit_intercept:
        spread -= float(gram.sum()) / len(gram)
    unit = 1.0
    if spread > 1e-12 * float(np.trace(gram)) and np.trace(linear) > 0:
        unit = math.sqrt(spread / float(np.trace(linear)))

    losses = []
    for ratio in EXTRAS_SCALES:
        problem = RidgeProblem.of(
            part.outputs,
            None,
            fit_intercept=options.fit_intercept,
            weights=part.weights,
            groups=part.groups,
            draft=True,
        )
        losses.append(fit_gram(gram + (ratio * unit) ** 2 * linear, problem).loss)
    return unit * EXTRAS_SCALES[int(np.argmin(losses))]


def _side_by_side(features: Any, extras: Float[np.ndarray, "n c"]) -> Any:
    """Features and sample-level features, where the features live."""
    if not is_tensor(features):
        return np.concatenate([features, extras], axis=1, dtype=features.dtype)
    import torch

    return torch.cat([features, as_like(extras, features).to(features.dtype)], dim=1)


def _joined_columns(parts: list[Any]) -> Any:
    """Blocks of columns side by side."""
    if not is_tensor(parts[0]):
        return np.concatenate(parts, axis=1)
    import torch

    return torch.cat(parts, dim=1)
