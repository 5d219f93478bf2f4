"""Head distributions of the query-key matrix W.

How to draw heads, and the Gaussian moments of their scores.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr, ndtri

from keyhole._array import block_size, blocks, is_tensor, run_threads
from keyhole._checks import (
    check_count,
    check_finite,
    check_float_array,
    check_number,
    check_pairs,
    check_seed,
)


@runtime_checkable
class HeadDistribution(Protocol):
    """A head distribution of W: anything with this method can be passed as ``heads``.

    For queries of another dimension than the keys it is called with ``query_dim`` as well.
    """

    def sample(
        self, n_heads: int, dim: int, seed: int, *, start: int = 0
    ) -> Float[np.ndarray, "m f e"]:
        """Draw heads ``start … start + n_heads − 1`` of the infinite sequence of ``seed``."""
        ...


class _Params:
    """scikit-learn's parameter protocol, so that ``heads__mean`` can be searched over.

    No import needed.
    """

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        names = list(inspect.signature(type(self).__init__).parameters)[1:]
        return {name: getattr(self, name) for name in names}

    def set_params(self, **params: Any) -> _Params:
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(
                    f"{type(self).__name__} has no parameter {name!r}: it has "
                    f"{', '.join(sorted(known))}."
                )
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        shown = []
        for name, value in self.get_params().items():
            if name == "pairs" and value is None:
                continue
            if isinstance(value, np.ndarray):
                value = f"array{value.shape}"
            shown.append(f"{name}={value}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        theirs = other.get_params()
        return all(np.array_equal(value, theirs[name]) for name, value in self.get_params().items())

    __hash__ = None  # type: ignore[assignment]


class GaussianHeads(_Params):
    """Independent Gaussian entries around a mean: W = mean + scale · G.

    ``mean=0`` is the paper's RFA, ``mean=1`` its biased BRFA, for which E s = <x_0, x_i>. With
    ``scale=1/2`` and unit tokens the scores have unit variance.

    Parameters
    ----------
    mean : float, (low, high) or array (D_q, D)
        A number c means c·W_0 with W_0 = [[I, 0], [0, 0]], so that coordinate i of the query meets
        coordinate i of the key, for as many as both have; an array is the mean itself, D_q = d_q +
        1 and D = d + 1. With two numbers every head has a strength of its own for each coordinate,
        exp of a uniform number between log(low) and log(high), in the place of W_0's ones: some
        heads compare one column sharply, others another. Such a head distribution has no kernel.
    scale : float
        Standard deviation of the entries.
    pairs : sequence of (query coordinate, key coordinate), optional
        What W_0 pairs instead, for queries of another kind than the keys.

    Examples
    --------
    >>> distribution = GaussianHeads(mean=1.0)
    >>> distribution.sample(n_heads=4, dim=3, seed=0).shape
    (4, 4, 4)
    >>> # draws nest
    >>> bool((distribution.sample(2, 3, seed=0) == distribution.sample(4, 3, seed=0)[:2]).all())
    True
    >>> # queries of their own kind
    >>> distribution.sample(n_heads=4, dim=3, seed=0, query_dim=6).shape
    (4, 7, 4)
    >>> GaussianHeads(mean=(0.3, 20.0), scale=0.1).sample(1, dim=3, seed=0)[0].diagonal().round(1)
    array([ 0.3,  0.9,  8. , -0.1])
    """

    def __init__(self, mean: Any = 0.0, scale: Any = 0.5, pairs: Any = None) -> None:
        self.mean = mean
        self.scale = scale
        self.pairs = pairs

    def sample(
        self, n_heads: int, dim: int, seed: int, query_dim: int | None = None, *, start: int = 0
    ) -> Float[np.ndarray, "m f e"]:
        """Draw heads ``start … start + n_heads − 1`` of the sequence that ``seed`` names.

        D = dim + 1.

        Returns
        -------
        array (n_heads, D_q, D)
            D_q = query_dim + 1, D unless given. The same heads whatever the block size:
            ``sample(M, …)[a:b]`` equals ``sample(b−a, …, start=a)``.
        """
        noise = head_normals(n_heads, dim, seed, query_dim, start=start)
        if self.strength_range is not None:
            low, high = self.strength_range
            paired = identity_mean(dim, query_dim, self.pairs) > 0
            strengths = low * (high / low) ** ndtr(noise[:, paired])
            noise *= check_number(self.scale, "scale", minimum=0.0, exclusive=True)
            noise[:, paired] = strengths
            return noise
        mean, scale = self.moments(dim, query_dim)
        noise *= scale
        if mean is not None:
            noise += mean
        return noise

    @property
    def strength_range(self) -> tuple[float, float] | None:
        """The range of strengths that heads draw from, or None."""
        if np.shape(self.mean) != (2,):
            return None
        low, high = (
            check_number(c, f"mean[{i}]", minimum=0.0, exclusive=True)
            for i, c in enumerate(self.mean)
        )
        if low > high:
            raise ValueError(
                f"`mean` must be (low, high) with low ≤ high: got ({low:g}, {high:g})."
            )
        return low, high

    def last_rows(
        self, n_heads: int, dim: int, seed: int, *, start: int = 0
    ) -> Float[np.ndarray, "m 1 e"]:
        """The last rows of the heads of ``sample(n_heads, dim, seed)``, and nothing else drawn."""
        mean, scale = (None, self.scale) if self.strength_range is not None else self.moments(dim)
        noise = head_normals(n_heads, dim, seed, start=start, last_row=True)
        noise *= scale
        if mean is not None:
            noise += mean[-1:]
        return noise

    def moments(
        self, dim: int, query_dim: int | None = None
    ) -> tuple[Float[np.ndarray, "f e"] | None, float]:
        """Return the mean matrix and the standard deviation of the entries, checked.

        The matrix is None when it is zero.
        """
        dim = check_count(dim, "dim")
        asked = dim if query_dim is None else check_count(query_dim, "query_dim", minimum=0)
        scale = check_number(self.scale, "scale", minimum=0.0, exclusive=True)
        if self.strength_range is not None:
            raise ValueError(
                f"heads that draw their strengths, mean={self.strength_range}, have no kernel in "
                "closed form: use a finite `n_heads`, or one number as `mean`."
            )
        if np.ndim(self.mean) == 0:
            strength = check_number(self.mean, "mean")
            return (
                None if strength == 0 else strength * identity_mean(dim, asked, self.pairs)
            ), scale
        mean = check_float_array(self.mean, "mean").astype(np.float64)
        if mean.shape != (asked + 1, dim + 1):
            shape = (
                f"(D, D) matrix with D = d + 1: got shape {mean.shape} for tokens of dimension "
                f"{dim}, so D = "
            )
            if asked != dim:
                shape = (
                    f"(D_q, D) matrix with D = d + 1: got shape {mean.shape} for queries of "
                    f"dimension {asked} and "
                )
                shape += f"keys of dimension {dim}, so D_q = {asked + 1} and D = "
            raise ValueError(
                f"`mean` must be a number or a {shape}{dim + 1}. The last row and column belong to "
                "the appended one."
            )
        check_finite(mean, "mean")
        return (mean if mean.any() else None), scale


class QueryKeyHeads(_Params):
    """Products of Gaussian query and key matrices: W = QᵀK with Q, K in R^{rank × D}.

    Entries of Q and K are i.i.d. Gaussian, scaled so that the entries of W have standard deviation
    ``scale``. As ``rank`` grows this becomes ``GaussianHeads(0, scale)``; at finite rank no
    closed-form kernel is known.

    Parameters
    ----------
    rank : int
        Head dimension r.
    scale : float
        Standard deviation of the entries of W.

    Examples
    --------
    >>> QueryKeyHeads(rank=2).sample(n_heads=3, dim=5, seed=0).shape
    (3, 6, 6)
    """

    def __init__(self, rank: Any, scale: Any = 0.5) -> None:
        self.rank = rank
        self.scale = scale

    def sample(
        self, n_heads: int, dim: int, seed: int, query_dim: int | None = None, *, start: int = 0
    ) -> Float[np.ndarray, "m f e"]:
        """Draw heads ``start … start + n_heads − 1`` of the sequence that ``seed`` names.

        D = dim + 1.
        """
        rank = check_count(self.rank, "rank")
        scale = check_number(self.scale, "scale", minimum=0.0, exclusive=True)
        width = check_count(dim, "dim") + 1
        rows = width if query_dim is None else check_count(query_dim, "query_dim", minimum=0) + 1
        factors = standard_normals(n_heads, rank * (rows + width), seed, start=start)
        query = factors[:, : rank * rows].reshape(n_heads, rank, rows)
        key = factors[:, rank * rows :].reshape(n_heads, rank, width)
        heads: np.ndarray = np.matmul(query.transpose(0, 2, 1), key)
        heads *= scale / math.sqrt(
            rank
        )  # entries of QᵀK are sums of `rank` products, of variance 1 each
        return heads


DRAWN_BYTES = 40
"""Bytes that one entry of W takes while it is drawn, converted and packed."""


class HeadDraw:
    """M heads of a head distribution under one seed, (D_q, D) with D = dim + 1 each.

    They are regenerated block by block instead of stored.

    ``query_dim``, by default ``dim``, is that of the queries, D_q = query_dim + 1.

    >>> draw = HeadDraw(GaussianHeads(), n_heads=1000, dim=3, seed=0)
    >>> draw.block(10, 30).shape
    (20, 4, 4)
    >>> draw.seen_by(query=False).block(10, 30).shape
    (20, 1, 4)
    """

    last_row: bool = False
    """Whether only the last row of each head is drawn."""

    def __init__(
        self, distribution: Any, n_heads: Any, dim: Any, seed: Any, query_dim: Any = None
    ) -> None:
        if isinstance(distribution, type) or not isinstance(distribution, HeadDistribution):
            raise TypeError(
                "`heads` must be a head distribution, with a method sample(n_heads, dim, seed): "
                f"got {distribution!r}. Use kh.GaussianHeads() or kh.QueryKeyHeads(rank)."
            )
        self.distribution = distribution
        self.n_heads = check_count(n_heads, "n_heads")
        self.dim = check_count(dim, "dim")
        self.seed = check_seed(seed)
        self.query_dim = (
            self.dim if query_dim is None else check_count(query_dim, "query_dim", minimum=0)
        )

    def __len__(self) -> int:
        return self.n_heads

    @property
    def entries(self) -> int:
        """Numbers of one head that are drawn."""
        return (1 if self.last_row else self.query_dim + 1) * (self.dim + 1)

    def seen_by(self, *, query: bool) -> HeadDraw:
        """The same heads as sets with a query see them.

        Those without one see the last rows, and no others are drawn.

        Their query is x~_0 = [0; √2].
        """
        if query or self.last_row:
            return self
        twin = copy.copy(self)
        twin.last_row = True
        return twin

    def block(self, start: int, stop: int) -> Float[np.ndarray, "m f e"]:
        """Heads ``start … stop − 1``."""
        if not 0 <= start < stop <= self.n_heads:
            raise IndexError(
                f"block {start}:{stop} must be a part of heads 0 … {self.n_heads - 1}, and not "
                "empty. A longer draw with the same seed begins with the same heads."
            )
        options: dict[str, Any] = (
            {} if self.query_dim == self.dim else {"query_dim": self.query_dim}
        )
        rows = getattr(self.distribution, "last_rows", None)
        if self.last_row and rows is not None and not options:
            drawn: np.ndarray = rows(stop - start, self.dim, self.seed, start=start)
            return drawn
        heads = self.distribution.sample(stop - start, self.dim, self.seed, start=start, **options)
        return heads[:, -1:] if self.last_row else heads

    def blocks(self, size: int) -> Iterator[tuple[slice, Float[np.ndarray, "m f e"]]]:
        """All heads, at most ``size`` at a time."""
        return ((part, self.block(part.start, part.stop)) for part in blocks(self.n_heads, size))

    def stored(self, memory_budget: int) -> HeadDraw:
        """The same heads, drawn once and kept if they take no more than the budget; else these."""
        return _StoredDraw(self) if 8 * self.n_heads * self.entries <= memory_budget else self


class _StoredDraw(HeadDraw):
    """Heads that are needed several times, kept."""

    def __init__(self, draw: HeadDraw) -> None:
        super().__init__(draw.distribution, draw.n_heads, draw.dim, draw.seed, draw.query_dim)
        self.last_row = draw.last_row
        rows = 1 if draw.last_row else draw.query_dim + 1
        self._heads = np.empty((draw.n_heads, rows, draw.dim + 1))
        for part, block in draw.blocks(block_size(DRAWN_BYTES * draw.entries, 2**26)):
            self._heads[part] = block

    def seen_by(self, *, query: bool) -> HeadDraw:
        twin: Any = super().seen_by(query=query)
        if twin is not self:
            twin._heads = self._heads[:, -1:]
        return twin

    def block(self, start: int, stop: int) -> Float[np.ndarray, "m f e"]:
        return self._heads[start:stop]


class HeadArray:
    """Heads (M, D_q, D) that somebody holds, as an array or a tensor.

    They are handed out in blocks as a `HeadDraw` is.
    """

    def __init__(self, heads: Any) -> None:
        self.heads = heads

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def entries(self) -> int:
        """Numbers of one head."""
        return int(self.heads.shape[1] * self.heads.shape[2])

    def seen_by(self, *, query: bool) -> HeadArray:
        """The same heads; for sets without a query their last rows."""
        return self if query else HeadArray(self.heads[:, -1:])

    def blocks(self, size: int) -> Iterator[tuple[slice, Float[Any, "m f e"]]]:
        """All heads, at most ``size`` at a time."""
        return ((part, self.heads[part]) for part in blocks(len(self.heads), size))


def check_heads(
    heads: Any,
    dim: int,
    query_dim: int | None = None,
    *,
    query: bool = True,
    keep_tensor: bool = False,
) -> HeadDraw | HeadArray:
    """Return what sets see of a draw, or of an array (M, D_q, D).

    It fits keys of dimension ``dim``.

    ``query`` says whether the sets have a query, ``query_dim`` of which dimension; a tensor stays
    one if asked to.
    """
    if isinstance(heads, HeadArray):
        return heads.seen_by(query=query)
    asked = dim if query_dim is None else query_dim
    if isinstance(heads, HeadDraw):
        if query and heads.dim == dim and heads.query_dim != asked:
            raise ValueError(
                "`heads` must be drawn for the dimension of the queries: the draw is for "
                f"{heads.query_dim}, the queries have {asked}. Draw them with "
                f"HeadDraw(distribution, n_heads, dim={dim}, seed=…, query_dim={asked})."
            )
        if heads.dim != dim:
            raise ValueError(
                "`heads` must be drawn for the dimension of the tokens: the draw is for "
                f"{heads.dim}, the tokens have {dim}. Draw them with HeadDraw(distribution, "
                f"n_heads, dim={dim}, seed=…)."
            )
        return heads.seen_by(query=query)
    if is_tensor(heads):
        from keyhole._tensors import as_array, check_float_tensor

        heads = check_float_tensor(heads, "heads")
        heads = heads if keep_tensor else as_array(heads)
    else:
        heads = check_float_array(heads, "heads")
    allowed = [asked + 1] if query else [asked + 1, 1]
    if (
        heads.ndim != 3
        or heads.shape[1] not in allowed
        or heads.shape[2] != dim + 1
        or len(heads) == 0
    ):
        shape, more = (
            f"(M, D, D) with M ≥ 1 and D = d + 1 = {dim + 1} for tokens of dimension {dim}",
            "",
        )
        if asked != dim:
            shape = (
                f"(M, {asked + 1}, {dim + 1}) with M ≥ 1 for queries of dimension {asked} and keys "
                f"of {dim}"
            )
            more = f", query_dim={asked}"
        raise ValueError(
            f"`heads` must have shape {shape}: got shape {tuple(heads.shape)}. The last row and "
            f"column belong to the appended one; heads.sample(n_heads, dim={dim}, seed=…{more}) "
            "draws such heads."
        )
    if not is_tensor(heads):  # to look for NaN among tensors would be to wait for the device
        check_finite(heads, "heads")
    return HeadArray(heads).seen_by(query=query)


def identity_mean(
    dim: int, query_dim: int | None = None, pairs: Any = None
) -> Float[np.ndarray, "f e"]:
    """W_0 = [[I, 0], [0, 0]], for which the mean score is <x_0, x_i>.

    Or the sum over stated pairs of coordinates.

    >>> identity_mean(2)
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 0.]])
    >>> identity_mean(2, query_dim=1, pairs=[(0, 1)])
    array([[0., 1., 0.],
           [0., 0., 0.]])
    """
    asked = dim if query_dim is None else query_dim
    mean = np.zeros((asked + 1, dim + 1))
    both = np.arange(min(asked, dim))
    rows, columns = both, both
    if pairs is not None:
        rows, columns = (
            np.array(check_pairs(pairs, asked, dim)).T if len(pairs) else (both[:0], both[:0])
        )
    mean[rows, columns] = 1.0
    return mean


def sample_mlp_weights(
    width: int, n_keys: int, dim: int, seed: int, *, start: int = 0
) -> Float[np.ndarray, "m z"]:
    """Draw first-layer weights (width, (N+1)·d + 1) of the MLP baseline.

    w ~ N(0, I/(N+2)) on z = [x_0; …; x_N; 1].

    M(d+1) units match the parameters of M attention heads. Draws nest as heads do; ``start`` is the
    first to draw.
    """
    width, n_keys, dim = (
        check_count(width, "width"),
        check_count(n_keys, "n_keys"),
        check_count(dim, "dim"),
    )
    return standard_normals(width, (n_keys + 1) * dim + 1, seed, start=start) / math.sqrt(
        n_keys + 2
    )


def head_normals(
    n_heads: int,
    dim: int,
    seed: int,
    query_dim: int | None = None,
    *,
    start: int = 0,
    last_row: bool = False,
) -> Float[np.ndarray, "m f e"]:
    """The noise G of heads: (M, D_q, D), or the last rows of these alone."""
    width = dim + 1
    rows = width if query_dim is None else query_dim + 1
    skip = (rows - 1) * width if last_row else 0
    return standard_normals(n_heads, rows * width, seed, start=start, skip=skip).reshape(
        n_heads, -1, width
    )


WORTH_A_JUMP = 256
"""Entries of an item from which on it pays to jump over them rather than to draw them."""

WORTH_A_THREAD = 2**18
"""Entries that are worth handing to another thread."""


def standard_normals(
    n_items: int, n_entries: int, seed: int, *, start: int = 0, skip: int = 0
) -> Float[np.ndarray, "m z"]:
    """Draw items ``start … start + n_items − 1`` of an infinite sequence of Gaussian vectors.

    ``skip`` entries are not.

    Item m is a function of (seed, m, n_entries) alone. The bits are Philox counters, which NumPy
    keeps stable between versions and which can start anywhere; the normal is the inverse
    distribution function of 52 of them.
    """
    n_items = check_count(n_items, "n_heads")
    start = check_count(start, "start", minimum=0)
    key = np.random.SeedSequence(check_seed(seed)).generate_state(2, np.uint64)
    counters_per_item = -(-n_entries // 4)  # one counter gives four 64-bit words
    jumped = skip // 4 if skip >= WORTH_A_JUMP else 0
    words = 4 * (counters_per_item - jumped)
    normals = np.empty((n_items, n_entries - skip))

    def draw(part: slice) -> None:
        generator, count = np.random.Philox(key=key), part.stop - part.start
        generator.advance((start + part.start) * counters_per_item)
        if jumped:
            bits = np.empty((count, words), np.uint64)
            for item in bits:
                generator.advance(jumped)
                item[:] = generator.random_raw(words)
        else:
            bits = generator.random_raw(count * words).reshape(count, -1)
        bits = bits[:, skip - 4 * jumped : n_entries - 4 * jumped]
        # midpoints of 2^52 cells: never 0 or 1, so never infinite
        ndtri(((bits >> np.uint64(12)) + 0.5) * 2.0**-52, out=normals[part])

    run_threads(draw, blocks(n_items, max(1, WORTH_A_THREAD // max(1, n_entries - skip))))
    return normals


@dataclass(frozen=True)
class Step:
    """What a descent knew after so many steps.

    Errors are in units of the variance of the target.
    """

    step: int
    loo_error: float
    held_out_error: float


@dataclass(frozen=True, eq=False)
class FittedHeads:
    """Heads around learned means, with standard normal noise G_m.

    W_m = means_[m mod K] + scale · diag(query_scales_) G_m diag(key_scales_).

    With ``hops_`` they are those of the last of several hops: their query is extended by what
    earlier ones found.

    Attributes
    ----------
    means_ : array (K, D_q, D)
        The means; head m has mean number m mod K.
    hops_ : tuple of arrays (P, D_h, D)
        The matrices of the hops before the last, each with P patterns: hop h weighs key i by
        softmax_i(x~ᵀ U_p x~_i) and adds what pattern p finds, Σ_i a_i x_i, to the query of the hops
        after it. Empty for one hop.
    scale : float
        Standard deviation of the entries around them.
    query_scales_, key_scales_ : arrays (D_q,) and (D,), or None
        What it is multiplied by for coordinate i of the query and j of the key; None means ones.
    chosen : str
        "zero-mean", "identity" or "learned": which head distribution the training set spoke for.
    strength : float
        c of the c·W_0 that the means started from; the mean itself if ``chosen`` is "identity".
    steps : int
        Steps of the descent behind the means; 0 if nothing was learned.
    history : tuple of Step
        Held-out error along the descent.
    reason : str
        Why this head distribution, in one sentence.

    Examples
    --------
    >>> import numpy as np
    >>> distribution = FittedHeads(np.zeros((2, 4, 4)), scale=0.5)
    >>> bool((distribution.sample(3, dim=3, seed=0) == GaussianHeads().sample(3, 3, seed=0)).all())
    True
    """

    means_: Float[np.ndarray, "k f e"] = field(repr=False)
    scale: float
    chosen: str = "learned"
    strength: float = 0.0
    steps: int = 0
    history: tuple[Step, ...] = field(default=(), repr=False)
    reason: str = field(default="", repr=False)
    query_scales_: Float[np.ndarray, " f"] | None = field(default=None, repr=False)
    key_scales_: Float[np.ndarray, " e"] | None = field(default=None, repr=False)
    hops_: tuple[Float[np.ndarray, "p _ e"], ...] = field(default=(), repr=False)

    @property
    def hops(self) -> int:
        """The number of hops, the last one included."""
        return 1 + len(self.hops_)

    def sample(
        self, n_heads: int, dim: int, seed: int, query_dim: int | None = None, *, start: int = 0
    ) -> Float[np.ndarray, "m f e"]:
        """Draw heads ``start … start + n_heads − 1`` of the sequence that ``seed`` names.

        D = dim + 1.
        """
        self._check_dim(dim, query_dim)
        return self.around(head_normals(n_heads, dim, seed, query_dim, start=start), start)

    def last_rows(
        self, n_heads: int, dim: int, seed: int, *, start: int = 0
    ) -> Float[np.ndarray, "m 1 e"]:
        """The last rows of the heads of ``sample(n_heads, dim, seed)``, and nothing else drawn."""
        self._check_dim(dim)
        return self.around(head_normals(n_heads, dim, seed, start=start, last_row=True), start)

    def around(
        self, heads: Float[np.ndarray, "m g e"], start: int = 0
    ) -> Float[np.ndarray, "m g e"]:
        """The last rows of heads, as many as there are of noise; which is overwritten."""
        rows = heads.shape[1]
        heads *= self.scale
        if self.query_scales_ is not None and self.key_scales_ is not None:
            heads *= np.outer(self.query_scales_[-rows:], self.key_scales_)
        heads += self.means_[(start + np.arange(len(heads))) % len(self.means_), -rows:]
        return heads

    def components(self, dim: int, query_dim: int | None = None) -> tuple[GaussianHeads, ...]:
        """The K Gaussian head distributions that the heads are shared out among.

        Their kernels average to that of this head distribution.
        """
        self._check_dim(dim, query_dim)
        if self.query_scales_ is not None:
            raise ValueError(
                "the kernel of infinitely many heads is known for noise of one scale: this head "
                "distribution has a scale for each coordinate. Use a finite `n_heads`, or "
                "LearnedHeads(covariance='none')."
            )
        return tuple(GaussianHeads(mean, self.scale) for mean in self.means_)

    def strongest_pairs(
        self,
        names: Sequence[str],
        count: int = 10,
        *,
        mean: int = 0,
        query_names: Sequence[str] | None = None,
    ) -> list[tuple[str, str, float]]:
        """The (query name, key name, entry) of one mean of largest size.

        ``names`` are those of the d coordinates.

        The appended one is called "1". ``query_names`` are those of a query of another kind than
        the keys.

        >>> import numpy as np
        >>> distribution = FittedHeads(
        ...     np.array([[[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, -3.0, 0.0]]]), scale=0.25
        ... )
        >>> distribution.strongest_pairs(["who", "where"], count=2)
        [('1', 'where', -3.0), ('who', 'where', 2.0)]
        """
        matrix = self.means_[mean]
        labels, asked = [*names, "1"], [*(names if query_names is None else query_names), "1"]
        for given, option, size in (
            (labels, "names", matrix.shape[1]),
            (asked, "query_names", matrix.shape[0]),
        ):
            if len(given) != size:
                what = "query" if option == "query_names" and query_names is not None else "token"
                raise ValueError(
                    f"`{option}` must name the {size - 1} coordinates of a {what}: got "
                    f"{len(given) - 1} names."
                )
        order = np.argsort(-np.abs(matrix), axis=None, kind="stable")[: check_count(count, "count")]
        rows, columns = np.unravel_index(order, matrix.shape)
        return [
            (asked[i], labels[j], float(matrix[i, j])) for i, j in zip(rows, columns, strict=True)
        ]

    def _check_dim(self, dim: int, query_dim: int | None = None) -> None:
        rows, width = self.means_.shape[1:]
        asked = dim if query_dim is None else query_dim
        if (asked + 1, dim + 1) != (rows, width):
            fitted = f"tokens of dimension {width - 1}"
            if rows != width:
                fitted = f"queries of dimension {rows - 1} and keys of dimension {width - 1}"
                fitted += (
                    f" ({self.hops - 1} hops before the last extend them)" if self.hops_ else ""
                )
            got = f"dim {dim}" if asked == dim else f"dim {dim} and query_dim {asked}"
            raise ValueError(
                f"this head distribution was fitted to {fitted}, and its heads are {rows} × "
                f"{width}: got {got}. Fit a head distribution to these tokens."
            )
