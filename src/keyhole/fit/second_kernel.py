"""The second kernel: attention, then an MLP, both random and frozen.

K₂(x, x') = exp(−|μ_x − μ_x'|²/(τ·median)) on the pooled vectors μ, whose inner products are the
kernel
of the embedding. Predictions are functions of μ = Σ_i μ_i, the sum of the parts of the keys, so
that
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
from jaxtyping import Bool, Float, Int

from keyhole.attention.features import key_features, written_blocks
from keyhole.attention.kernels import attention_kernel
from keyhole.fit.embedding import Embedding
from keyhole.solve.matrices import eigen, on_host

MOST_KAPPA = 3600.0
"""Squared distance from the mean, in squared widths, up to which contributions are integrated."""

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
        owner = products.owner
        inner = products.inner
        own = products.own
        norms = products.norms
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        whole = np.add.reduceat(inner, starts, axis=0)
        total = np.bincount(owner, weights=own)

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
    """Inner products of the parts of μ − μ₀ of some samples.

    Every key has μ_i less an equal share of μ₀; sample-level features are one more part, which has
    their own coordinates of both.

    Attributes
    ----------
    inner : array (k, n)
        Products of the parts with μ_j − μ₀ of the samples that are compared with.
    own : array (k,)
        Products of the parts with μ − μ₀ of their sample.
    owner : array (k,)
        The sample of each part, increasing.
    is_key : array (k,)
        Whether a part is a key's.
    norms : array (n,)
        |μ_j − μ₀|².
    """

    inner: Float[np.ndarray, "k n"]
    own: Float[np.ndarray, " k"]
    owner: Int[np.ndarray, " k"]
    is_key: Bool[np.ndarray, " k"]
    norms: Float[np.ndarray, " n"]

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
        start = others.mean(axis=0)
        centred = others - start
        of_keys, of_sample = parts_of_features(embedding, prepared, start)
        owner, is_key, order = _keys_then_sample(prepared)
        parts = np.concatenate([of_keys, of_sample])[order]
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        whole = np.add.reduceat(parts, starts, axis=0)
        return cls(
            inner=parts @ centred.T,
            own=np.einsum("kp,kp->k", parts, whole[owner]),
            owner=owner,
            is_key=is_key,
            norms=np.square(centred).sum(axis=1),
        )

    @classmethod
    def _of_kernel(cls, embedding: Embedding, prepared: Any) -> _PathProducts:
        train = embedding.train.with_extras(None).numpy()
        lengths = prepared.unpooled.token_counts
        sample = np.repeat(np.arange(len(prepared)), lengths)
        share = 1.0 / lengths[sample]

        # products with μ₀ are means over the training samples
        gram = on_host(
            attention_kernel(train, None, embedding.heads, embedding.settings.activation)
        )
        mean_row = gram.mean(axis=0)
        mean_square = float(mean_row.mean())
        inner, own = kernel_of_keys(embedding, prepared, train)
        with_mean = inner.mean(axis=1)
        set_with_mean = np.bincount(sample, weights=with_mean)
        own = own - with_mean - share * (set_with_mean[sample] - mean_square)
        inner = inner - with_mean[:, None] - share[:, None] * (mean_row - mean_square)
        norms = gram.diagonal() - 2.0 * mean_row + mean_square

        # sample-level features
        of_sample = np.zeros((len(prepared), len(train)))
        own_of_sample = np.zeros(len(prepared))
        if prepared.extras is not None:
            assert embedding.train.extras is not None
            start = embedding.train.extras.mean(axis=0)
            others = embedding.train.extras - start
            extras = prepared.extras - start
            of_sample = extras @ others.T
            own_of_sample = np.square(extras).sum(axis=1)
            norms = norms + np.square(others).sum(axis=1)
        owner, is_key, order = _keys_then_sample(prepared)
        return cls(
            inner=np.concatenate([inner, of_sample])[order],
            own=np.concatenate([own, own_of_sample])[order],
            owner=owner,
            is_key=is_key,
            norms=norms,
        )


def _keys_then_sample(
    prepared: Any,
) -> tuple[Int[np.ndarray, " k"], Bool[np.ndarray, " k"], Int[np.ndarray, " k"]]:
    """The sample of every part, whether it is a key's, and the order that sorts parts by sample.

    The part of a sample stands behind those of its keys.
    """
    n = len(prepared)
    of_keys = np.repeat(np.arange(n), prepared.unpooled.token_counts)
    owner = np.concatenate([of_keys, np.arange(n)])
    is_key = np.arange(len(owner)) < len(of_keys)
    order = np.argsort(owner, kind="stable")
    return owner[order], is_key[order], order


def kernel_of_keys(
    embedding: Embedding, prepared: Any, others: Any
) -> tuple[Float[np.ndarray, "k n"], Float[np.ndarray, " k"]]:
    """The part of every key in K(x, x_j) and in K(x, x), sample after sample.

    K of a set is the mean of K over its keys, each a set of its own with the same query.
    """
    plain = prepared.with_extras(None).numpy()
    activation = embedding.settings.activation
    inner = []
    own = []
    for rows, written in written_blocks(plain, 8 * len(others)):
        keys = written.sets.single_keys()
        lengths = written.sets.lengths
        share = 1.0 / np.repeat(lengths, lengths)
        kernel = on_host(attention_kernel(keys, others, embedding.heads, activation))
        inner.append(written.of_keys(share[:, None] * kernel))
        of_own = np.empty(len(keys))
        ends = written.sets.offsets[written.offsets]
        for place, number in enumerate(range(rows.start, rows.stop)):
            of_sample = slice(ends[place], ends[place + 1])
            sample = plain[number : number + 1]
            column = attention_kernel(keys[of_sample], sample, embedding.heads, activation)
            of_own[of_sample] = on_host(column)[:, 0]
        own.append(written.of_keys((share * of_own)[:, None])[:, 0])
    return np.concatenate(inner), np.concatenate(own)


def parts_of_features(
    embedding: Embedding, prepared: Any, start: Float[np.ndarray, " p"]
) -> tuple[Float[np.ndarray, "k p"], Float[np.ndarray, "n p"]]:
    """Parts of φ(x) − start that add up to it: of every key, and of every sample.

    What is a sum over keys belongs to the keys, with equal shares of its start; other sample-level
    features belong to the sample.
    """
    prepared = prepared.numpy()
    lengths = prepared.unpooled.token_counts
    sample = np.repeat(np.arange(len(prepared)), lengths)
    share = 1.0 / lengths[sample][:, None]
    extras = prepared.extras
    n_extras = 0 if extras is None else extras.shape[1]
    n_of_heads = embedding.n_features - n_extras
    of_keys = np.zeros((len(sample), embedding.n_features))
    of_sample = np.zeros((len(prepared), embedding.n_features))

    # heads: φ of every key as a set of its own with the query of its set, by its share; softmax
    # weights are those in the whole set
    heads = slice(0, n_of_heads)
    if embedding.draw is not None:
        of_keys[:, heads] = key_features(
            prepared.with_extras(None), embedding.draw, embedding.settings.activation
        )
    elif embedding.landmarks is not None:
        kernel, _ = kernel_of_keys(embedding, prepared, embedding.landmarks.numpy())
        of_keys[:, heads] = kernel @ embedding.whitening
    of_keys[:, heads] -= share * start[heads]

    # sample-level features, of which statistics of the rows stand last
    if extras is not None:
        shares, centre = embedding.rule.shares_of_statistics(prepared)
        given = slice(n_of_heads, embedding.n_features - shares.shape[1])
        of_rows = slice(given.stop, embedding.n_features)
        of_sample[:, given] = extras[:, : given.stop - n_of_heads] - start[given]
        of_keys[:, of_rows] = shares - share * (centre + start[of_rows])
    return of_keys, of_sample


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
    if not kappa <= MOST_KAPPA:
        raise ValueError(
            "contributions through a second kernel need samples near the training samples: one is "
            f"{math.sqrt(kappa):.3g} widths of the kernel away from their mean, and at most "
            f"{math.sqrt(MOST_KAPPA):.0f} can be integrated. Leave it out, or fit with mlp='none'."
        )
    count = 4
    while True:
        ratio = 16 * count / (math.e * max(kappa, 1e-9))
        if ratio > 1.5 and count * math.log(ratio) >= -math.log(tolerance):
            return count
        count += 1
