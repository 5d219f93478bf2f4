"""The second kernel: attention, then an MLP, both random and frozen.

K₂(x, x') = exp(−|μ_x − μ_x'|²/(τ·median)) on the pooled vectors μ, whose inner products are the kernel
of the embedding. Predictions are functions of μ = Σ_i μ_i, the sum of the parts of the keys, so that
contributions are exact in the sense of Aumann and Shapley: along the path from the mean training
embedding μ₀,

    c_i = ∫₀¹ ⟨∇f(μ₀ + t(μ − μ₀)), μ_i − μ₀/N⟩ dt,        Σ_i c_i = f(x) − f(μ₀).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole.attention.features import key_features
from keyhole.attention.kernels import attention_kernel
from keyhole.fit.embedding import Embedding
from keyhole.data.statistics import sets_of
from keyhole.solve.matrices import eigen, on_host

MOST_EXACT = 1500
"""Training samples up to which K₂ of all pairs is used; above, its columns at some of them."""

CENTRES = 512
"""Training samples whose columns of K₂ are the features above that size (Nyström)."""

NODE_TOLERANCE = 1e-12
"""Error of the integral over the path, relative to Σ|a_j|."""


@dataclass
class SecondKernel:
    """K₂ of the training samples of an embedding, or features of it.

    Attributes
    ----------
    width : float
        τ.
    bandwidth : float
        τ times the median squared distance of training samples.
    norms : array (n,)
        |μ_j|² of the samples that new ones are compared with.
    squares : array (n, n) or None
        Squared distances of the training samples, until `gram` has used them.
    centres : array (c, p) or None
        Features of the samples whose columns are used, where not all are.
    whitening : array (c, r) or None
    """

    width: float
    bandwidth: float
    norms: Float[np.ndarray, " n"] = field(repr=False)
    squares: Float[np.ndarray, "n n"] | None = field(default=None, repr=False)
    centres: Float[np.ndarray, "c p"] | None = field(default=None, repr=False)
    whitening: Float[np.ndarray, "c r"] | None = field(default=None, repr=False)
    embedding: Embedding | None = field(default=None, repr=False)

    @classmethod
    def fit(cls, embedding: Embedding, width: float) -> SecondKernel:
        """The bandwidth, from the distances of training samples."""
        n = len(embedding.train)
        if embedding.is_finite and n > MOST_EXACT:
            return cls._with_centres(embedding, width)
        gram = on_host(embedding.gram())
        norms = gram.diagonal().copy()
        squares = np.maximum(norms[:, None] + norms - 2.0 * gram, 0.0)
        return cls(
            width=width, bandwidth=_bandwidth(squares, norms, width), norms=norms, squares=squares
        )

    @classmethod
    def _with_centres(cls, embedding: Embedding, width: float) -> SecondKernel:
        """Columns of K₂ at some of the training samples."""
        n = len(embedding.train)
        rng = np.random.default_rng(embedding.options.seed)
        rows = np.sort(rng.permutation(n)[:CENTRES])
        centres = on_host(embedding.features(embedding.train[rows])).astype(np.float64)
        norms = np.square(centres).sum(axis=1)
        squares = np.maximum(norms[:, None] + norms - 2.0 * centres @ centres.T, 0.0)
        bandwidth = _bandwidth(squares, norms, width)
        values, vectors = eigen(np.asfortranarray(np.exp(-squares / bandwidth)))
        is_kept = values > 1e-12 * len(values) * values[0]
        return cls(
            width=width,
            bandwidth=bandwidth,
            norms=norms,
            centres=centres,
            whitening=vectors[:, is_kept] / np.sqrt(values[is_kept]),
            embedding=embedding,
        )

    @property
    def has_centres(self) -> bool:
        """Whether it is seen through the columns of some samples."""
        return self.centres is not None

    def gram(self) -> Float[np.ndarray, "n n"]:
        """K₂ of the training samples; the distances are used up."""
        assert self.squares is not None
        squares = self.squares
        self.squares = None
        squares /= -self.bandwidth
        return np.exp(squares, out=squares)

    def row_blocks(self) -> Iterator[Float[np.ndarray, "b r"]]:
        """Features of K₂ of the training samples, in blocks of rows."""
        assert self.embedding is not None
        for block in self.embedding.row_blocks():
            yield self._features(on_host(block).astype(np.float64, copy=False))

    def _features(self, features: Float[np.ndarray, "m p"]) -> Float[np.ndarray, "m r"]:
        """K₂(x, centres) times the whitening."""
        assert self.centres is not None
        assert self.whitening is not None
        norms = np.square(features).sum(axis=1)
        squares = norms[:, None] + self.norms - 2.0 * features @ self.centres.T
        return np.exp(-np.maximum(squares, 0.0) / self.bandwidth) @ self.whitening

    def rows(self, embedding: Embedding, prepared: Any) -> Float[np.ndarray, "m q"]:
        """K₂(x, x_j), or features of it."""
        if self.has_centres:
            features = on_host(embedding.features(prepared)).astype(np.float64, copy=False)
            return self._features(features)
        cross = on_host(embedding.cross(prepared))
        squares = embedding.squares(prepared)[:, None] + self.norms - 2.0 * cross
        return np.exp(-np.maximum(squares, 0.0) / self.bandwidth)

    # ---- contributions

    def contributions(
        self, member: Any, prepared: Any
    ) -> tuple[Float[np.ndarray, "k t"], Float[np.ndarray, "n t"]]:
        """c_i of every key, and f(μ₀) with what sample-level features change, for every sample.

        Sample-level features that are no sums over keys take part in the path as a part of their
        own, which belongs to the rest.
        """
        dual = member.coef
        if self.whitening is not None:
            dual = self.whitening @ dual
        products = _PathProducts.of(self, member.embedding, prepared)
        mean_row = products.mean_row
        square = products.mean_square

        # centred products: the origin is μ₀, the mean of the samples that are compared with
        norms = self.norms - 2.0 * mean_row + square
        owner = products.owner
        n_parts = np.bincount(owner, minlength=len(prepared))
        share = 1.0 / n_parts[owner]
        with_mean = products.inner.mean(axis=1)  # ⟨μ_i, μ₀⟩
        set_with_mean = np.bincount(owner, weights=with_mean)  # ⟨μ, μ₀⟩
        own = products.own - with_mean - share * (set_with_mean[owner] - square)
        inner = products.inner - with_mean[:, None] - share[:, None] * (mean_row - square)
        total = np.bincount(owner, weights=products.own) - 2.0 * set_with_mean + square
        starts = np.concatenate([[0], np.cumsum(n_parts)[:-1]])
        whole = np.add.reduceat(inner, starts, axis=0)

        # the integral along the path, by as many nodes as the bound asks for
        kappa = max(float(total.max()), 0.0) / self.bandwidth
        nodes, node_weights = np.polynomial.legendre.leggauss(nodes_needed(kappa))
        slope_inner = np.zeros((len(prepared), *dual.shape))
        slope_own = np.zeros((len(prepared), dual.shape[1]))
        for t, weight in zip((nodes + 1) / 2, node_weights / 2, strict=True):
            squares = t * t * total[:, None] - 2.0 * t * whole + norms
            kernel = np.exp(-np.maximum(squares, 0.0) / self.bandwidth)
            slope_inner += (2.0 / self.bandwidth) * weight * kernel[:, :, None] * dual
            slope_own += (2.0 / self.bandwidth) * weight * t * (kernel @ dual)
        parts = np.einsum("kn,knt->kt", inner, slope_inner[owner])
        parts -= own[:, None] * slope_own[owner]

        start = np.exp(-np.maximum(norms, 0.0) / self.bandwidth) @ dual + member.intercept
        rest = np.tile(start, (len(prepared), 1))
        of_keys = parts[products.is_key]
        np.add.at(rest, owner[~products.is_key], parts[~products.is_key])
        return of_keys, rest


@dataclass(frozen=True)
class _PathProducts:
    """Inner products of the parts μ_i of some samples, the keys of each and its sample-level part.

    Attributes
    ----------
    inner : array (k, n)
        ⟨μ_i, μ_j⟩ with the samples that are compared with.
    own : array (k,)
        ⟨μ_i, μ⟩ with the sample itself.
    owner : array (k,)
        The sample of each part, increasing.
    is_key : array (k,)
        Whether a part is a key's.
    mean_row, mean_square : array (n,) and float
        ⟨μ_j, μ₀⟩ and |μ₀|².
    """

    inner: Float[np.ndarray, "k n"]
    own: Float[np.ndarray, " k"]
    owner: np.ndarray
    is_key: np.ndarray
    mean_row: Float[np.ndarray, " n"]
    mean_square: float

    @classmethod
    def of(cls, second: SecondKernel, embedding: Embedding, prepared: Any) -> _PathProducts:
        """By features where there are some, by the kernel of single keys elsewhere."""
        if embedding.is_finite:
            return cls._of_features(second, embedding, prepared)
        return cls._of_kernel(embedding, prepared)

    @classmethod
    def _of_features(
        cls, second: SecondKernel, embedding: Embedding, prepared: Any
    ) -> _PathProducts:
        others = second.centres
        if others is None:
            others = on_host(embedding.features(embedding.train)).astype(np.float64)
        parts, owner, is_key = parts_of_features(embedding, prepared)
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        whole = np.add.reduceat(parts, starts, axis=0)
        mean = others.mean(axis=0)
        return cls(
            inner=parts @ others.T,
            own=np.einsum("kp,kp->k", parts, whole[owner]),
            owner=owner,
            is_key=is_key,
            mean_row=others @ mean,
            mean_square=float(mean @ mean),
        )

    @classmethod
    def _of_kernel(cls, embedding: Embedding, prepared: Any) -> _PathProducts:
        prepared = prepared.numpy()
        others = embedding.train
        if embedding.settings.query == "each" or len(prepared.sets) != len(prepared):
            raise ValueError(
                "contributions through a second kernel of infinitely many heads are for samples of "
                "one set with one query: use a finite n_heads, or mlp='none'."
            )
        sets = prepared.sets
        lengths = sets.lengths
        owner = np.repeat(np.arange(len(sets)), lengths)
        share = 1.0 / lengths[owner]
        if embedding.rule.pooling_of_sets == "sum":
            share = np.ones(len(owner))
        keys = sets.single_keys()
        kernel = attention_kernel(
            keys, others.with_extras(None), embedding.heads, embedding.settings.activation
        )
        inner = share[:, None] * on_host(kernel)

        # ⟨μ_i, μ⟩: the pairs of the keys of one set
        own = np.empty(len(owner))
        for i in range(len(sets)):
            rows = slice(sets.offsets[i], sets.offsets[i + 1])
            pairs = attention_kernel(
                keys[rows], None, embedding.heads, embedding.settings.activation
            )
            own[rows] = share[rows] * (on_host(pairs) @ share[rows])
        is_key = np.ones(len(owner), bool)

        # sample-level features are one more part of every sample
        if prepared.extras is not None:
            inner = np.concatenate([inner, prepared.extras @ others.extras.T])
            own = np.concatenate([own, np.square(prepared.extras).sum(axis=1)])
            owner = np.concatenate([owner, np.arange(len(sets))])
            is_key = np.concatenate([is_key, np.zeros(len(sets), bool)])
            order = np.argsort(owner, kind="stable")
            inner = inner[order]
            own = own[order]
            owner = owner[order]
            is_key = is_key[order]
        gram = on_host(embedding.gram())
        mean_row = gram.mean(axis=0)
        return cls(
            inner=inner,
            own=own,
            owner=owner,
            is_key=is_key,
            mean_row=mean_row,
            mean_square=float(mean_row.mean()),
        )


def parts_of_features(
    embedding: Embedding, prepared: Any
) -> tuple[Float[np.ndarray, "k p"], np.ndarray, np.ndarray]:
    """Parts of φ(x) that add up to it, the sample of each, and whether it is a key's.

    A sample has a part for every key, and one more for sample-level features that are no sums over
    keys, standardised with their constant.
    """
    prepared = prepared.numpy()
    sets = sets_of(prepared)
    lengths = sets.lengths
    n = len(prepared)
    owner = np.repeat(np.arange(n), lengths)
    extras = prepared.extras
    n_extras = 0 if extras is None else extras.shape[1]
    n_of_heads = embedding.n_features - n_extras
    of_keys = np.zeros((len(owner), embedding.n_features))
    of_sample = np.zeros((n, embedding.n_features))

    if embedding.draw is not None:
        # φ of every key as a set of its own with the query of its set, by its share; softmax
        # weights are those in the whole set
        of_keys[:, :n_of_heads] = key_features(
            prepared.with_extras(None), embedding.draw, embedding.settings.activation
        )
    elif embedding.landmarks is not None:
        keys = prepared.sets.single_keys()
        kernel = attention_kernel(
            keys, embedding.landmarks, embedding.heads, embedding.settings.activation
        )
        share = np.ones(len(owner))
        if embedding.rule.pooling_of_sets == "mean":
            share = 1.0 / lengths[owner]
        of_keys[:, :n_of_heads] = share[:, None] * (on_host(kernel) @ embedding.whitening)
    if extras is not None:
        shares, centre = embedding.rule.shares_of_statistics(prepared)
        n_statistics = shares.shape[1]
        n_given = n_extras - n_statistics
        of_sample[:, n_of_heads : n_of_heads + n_given] = extras[:, :n_given]
        if n_statistics:
            of_keys[:, n_of_heads + n_given :] = shares
            of_sample[:, n_of_heads + n_given :] = -centre

    # the part of the sample stands behind its keys
    order = np.argsort(np.concatenate([owner, np.arange(n)]), kind="stable")
    parts = np.concatenate([of_keys, of_sample])[order]
    is_key = np.concatenate([np.ones(len(owner), bool), np.zeros(n, bool)])[order]
    return parts, np.concatenate([owner, np.arange(n)])[order], is_key


def _bandwidth(
    squares: Float[np.ndarray, "n n"], norms: Float[np.ndarray, " n"], width: float
) -> float:
    """τ times the median of squared distances above rounding: on discrete data most may be 0."""
    is_apart = squares > 1e-12 * max(float(norms.max(initial=0.0)), 1e-300)
    if not is_apart.any():
        return 1.0
    return width * float(np.median(squares[is_apart]))


def nodes_needed(kappa: float, tolerance: float = NODE_TOLERANCE) -> int:
    """Gauss–Legendre nodes for ∫₀¹ of a Gaussian e^{−κt²}: q of them err by about (eκ/16q)^q.

    On the Bernstein ellipse of radius ρ around [0, 1] the imaginary part is at most (ρ − 1/ρ)/4, so
    that the integrand is at most e^{κρ²/16}, and the error at most that times ρ^{−2q}: least at
    ρ² = 16q/κ.
    """
    count = 4
    while True:
        ratio = 16 * count / (math.e * max(kappa, 1e-9))
        if ratio > 1.5 and count * math.log(ratio) >= -math.log(tolerance):
            return count
        count += 1
