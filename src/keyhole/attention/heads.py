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
from jaxtyping import Float, Int
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

Pairs = Sequence[Sequence[int]] | Int[np.ndarray, "_ 2"]
"""(query coordinate, key coordinate) pairs that W_0 has ones for."""


@runtime_checkable
class HeadDistribution(Protocol):
    """The distribution of a query-key matrix W.

    Anything with this method can be passed as ``heads``. If queries have another dimension than the
    keys, ``query_dim`` is passed as well.
    """

    def sample(
        self, n_heads: int, dim: int, seed: int, *, start: int = 0
    ) -> Float[np.ndarray, "m f e"]:
        """Draw heads ``start … start + n_heads − 1`` of the infinite sequence of ``seed``."""
        ...


class HeadParameters:
    """scikit-learn's parameter protocol, so that ``heads__mean`` can be searched over.

    scikit-learn itself is not imported.
    """

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The arguments of the constructor, by name."""
        names = list(inspect.signature(type(self).__init__).parameters)[1:]
        return {name: getattr(self, name) for name in names}

    def set_params(self, **params: Any) -> HeadParameters:
        """Change some of them."""
        valid_names = self.get_params()
        for name, value in params.items():
            if name not in valid_names:
                raise ValueError(
                    f"{type(self).__name__} has no parameter {name!r}: it has "
                    f"{', '.join(sorted(valid_names))}."
                )
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        arguments = []
        for name, value in self.get_params().items():
            if name == "pairs" and value is None:
                continue
            if isinstance(value, np.ndarray):
                value = f"array{value.shape}"
            arguments.append(f"{name}={value}")
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        theirs = other.get_params()
        return all(np.array_equal(value, theirs[name]) for name, value in self.get_params().items())

    __hash__ = None  # type: ignore[assignment]


class GaussianHeads(HeadParameters):
    """Independent Gaussian entries around a mean: W = mean + scale · G.

    ``mean=0`` is the paper's RFA, ``mean=1`` its biased BRFA, for which E s = <x_0, x_i>. With
    ``scale=1/2`` and unit tokens the scores have unit variance.

    Parameters
    ----------
    mean : float, (low, high) or array (D_q, D)
        A number c means c·W_0 with W_0 = [[I, 0], [0, 0]]: coordinate i of the query is compared
        with coordinate i of the key, for as many as both have. An array is the mean itself, with
        D_q = d_q + 1 and D = d + 1. With two numbers every head draws a strength for each
        coordinate between low and high, uniformly on a logarithmic scale. Some heads then compare
        one coordinate sharply, others another. Such a head distribution has no kernel.
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

    def __init__(
        self,
        mean: float | tuple[float, float] | Float[np.ndarray, "f e"] = 0.0,
        scale: float = 0.5,
        pairs: Pairs | None = None,
    ) -> None:
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
            # ndtr makes the noise of a paired entry uniform, and that its strength
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
        bounds: Any = self.mean
        low = check_number(bounds[0], "mean[0]", minimum=0.0, exclusive=True)
        high = check_number(bounds[1], "mean[1]", minimum=0.0, exclusive=True)
        if low > high:
            raise ValueError(
                f"`mean` must be (low, high) with low ≤ high: got ({low:g}, {high:g})."
            )
        return low, high

    def last_rows(
        self, n_heads: int, dim: int, seed: int, *, start: int = 0
    ) -> Float[np.ndarray, "m 1 e"]:
        """The last rows of the heads of ``sample(n_heads, dim, seed)``, and nothing else drawn."""
        if self.strength_range is not None:
            # strengths are drawn for pairs of coordinates, of which the last row has none
            mean = None
            scale = self.scale
        else:
            mean, scale = self.moments(dim)
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
        if query_dim is None:
            query_dim = dim
        else:
            query_dim = check_count(query_dim, "query_dim", minimum=0)
        scale = check_number(self.scale, "scale", minimum=0.0, exclusive=True)
        if self.strength_range is not None:
            raise ValueError(
                f"heads that draw their strengths, mean={self.strength_range}, have no kernel in "
                "closed form: use a finite `n_heads`, or one number as `mean`."
            )

        # a number c is c·W_0
        if np.ndim(self.mean) == 0:
            strength = check_number(self.mean, "mean")
            if strength == 0:
                return None, scale
            return strength * identity_mean(dim, query_dim, self.pairs), scale

        # an array is the mean itself
        mean = check_float_array(self.mean, "mean").astype(np.float64)
        if mean.shape != (query_dim + 1, dim + 1):
            raise ValueError(self._wrong_shape(mean.shape, dim, query_dim))
        check_finite(mean, "mean")
        if not mean.any():
            return None, scale
        return mean, scale

    @staticmethod
    def _wrong_shape(shape: tuple[int, ...], dim: int, query_dim: int) -> str:
        """What to say of a mean of another shape than (D_q, D)."""
        if query_dim == dim:
            rule = (
                f"(D, D) matrix with D = d + 1: got shape {shape} for tokens of dimension {dim}, "
                f"so D = {dim + 1}"
            )
        else:
            rule = (
                f"(D_q, D) matrix with D = d + 1: got shape {shape} for queries of dimension "
                f"{query_dim} and keys of dimension {dim}, so D_q = {query_dim + 1} and D = "
                f"{dim + 1}"
            )
        return (
            f"`mean` must be a number or a {rule}. The last row and column belong to the appended "
            "one."
        )


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
        self,
        distribution: HeadDistribution,
        n_heads: int,
        dim: int,
        seed: int,
        query_dim: int | None = None,
    ) -> None:
        if isinstance(distribution, type) or not isinstance(distribution, HeadDistribution):
            raise TypeError(
                "`heads` must be a head distribution, with a method sample(n_heads, dim, seed): "
                f"got {distribution!r}. Use kh.GaussianHeads()."
            )
        self.distribution = distribution
        self.n_heads = check_count(n_heads, "n_heads")
        self.dim = check_count(dim, "dim")
        self.seed = check_seed(seed)
        if query_dim is None:
            self.query_dim = self.dim
        else:
            self.query_dim = check_count(query_dim, "query_dim", minimum=0)

    def __len__(self) -> int:
        return self.n_heads

    @property
    def entries(self) -> int:
        """Numbers of one head that are drawn."""
        return self.rows * (self.dim + 1)

    @property
    def rows(self) -> int:
        """Rows of one head that are drawn."""
        return 1 if self.last_row else self.query_dim + 1

    def seen_by(self, *, query: bool) -> HeadDraw:
        """The same heads as sets with a query see them, or sets without one.

        The query of a set without one is x~_0 = [0; √2], which meets the last rows alone: no
        others are drawn.
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
        count = stop - start
        same_dim = self.query_dim == self.dim

        # only the last rows, if the head distribution can draw them alone
        last_rows = getattr(self.distribution, "last_rows", None)
        if self.last_row and last_rows is not None and same_dim:
            drawn: np.ndarray = last_rows(count, self.dim, self.seed, start=start)
            return drawn

        # a head distribution needs no parameter `query_dim` if queries are of the keys' dimension
        sample: Any = self.distribution.sample
        if same_dim:
            heads = sample(count, self.dim, self.seed, start=start)
        else:
            heads = sample(count, self.dim, self.seed, start=start, query_dim=self.query_dim)
        if self.last_row:
            heads = heads[:, -1:]
        checked: np.ndarray = heads
        return checked

    def blocks(self, size: int) -> Iterator[tuple[slice, Float[np.ndarray, "m f e"]]]:
        """All heads, at most ``size`` at a time."""
        return ((part, self.block(part.start, part.stop)) for part in blocks(self.n_heads, size))

    def stored(self, memory_budget: int) -> HeadDraw:
        """The same heads, drawn once and stored if they fit the budget; else these."""
        n_bytes = 8 * self.n_heads * self.entries
        if n_bytes <= memory_budget:
            return _StoredDraw(self)
        return self


class _StoredDraw(HeadDraw):
    """Heads that are needed several times, drawn once."""

    def __init__(self, draw: HeadDraw) -> None:
        super().__init__(draw.distribution, draw.n_heads, draw.dim, draw.seed, draw.query_dim)
        self.last_row = draw.last_row
        self._heads = np.empty((draw.n_heads, draw.rows, draw.dim + 1))
        for part, block in draw.blocks(block_size(DRAWN_BYTES * draw.entries, 2**26)):
            self._heads[part] = block

    def seen_by(self, *, query: bool) -> HeadDraw:
        twin = super().seen_by(query=query)
        if twin is not self and isinstance(twin, _StoredDraw):
            twin._heads = self._heads[:, -1:]
        return twin

    def block(self, start: int, stop: int) -> Float[np.ndarray, "m f e"]:
        return self._heads[start:stop]


class HeadArray:
    """Heads (M, D_q, D) in an array or a tensor, handed out in blocks as a `HeadDraw` is."""

    def __init__(self, heads: Float[Any, "m f e"]) -> None:
        self.heads = heads

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def entries(self) -> int:
        """Numbers of one head."""
        return int(self.heads.shape[1] * self.heads.shape[2])

    def seen_by(self, *, query: bool) -> HeadArray:
        """The same heads; for sets without a query their last rows."""
        if query:
            return self
        return HeadArray(self.heads[:, -1:])

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
    """Return what sets see of a draw, or of an array (M, D_q, D) for keys of dimension ``dim``.

    ``query`` says whether the sets have a query, ``query_dim`` of which dimension. A tensor becomes
    an array unless ``keep_tensor``.
    """
    if isinstance(heads, HeadArray):
        return heads.seen_by(query=query)
    if query_dim is None:
        query_dim = dim

    # a draw must be for these dimensions
    if isinstance(heads, HeadDraw):
        if query and heads.dim == dim and heads.query_dim != query_dim:
            raise ValueError(
                "`heads` must be drawn for the dimension of the queries: the draw is for "
                f"{heads.query_dim}, the queries have {query_dim}. Draw them with "
                f"HeadDraw(distribution, n_heads, dim={dim}, seed=…, query_dim={query_dim})."
            )
        if heads.dim != dim:
            raise ValueError(
                "`heads` must be drawn for the dimension of the tokens: the draw is for "
                f"{heads.dim}, the tokens have {dim}. Draw them with HeadDraw(distribution, "
                f"n_heads, dim={dim}, seed=…)."
            )
        return heads.seen_by(query=query)

    # an array or a tensor must hold floats
    if is_tensor(heads):
        from keyhole._tensors import as_array, check_float_tensor

        heads = check_float_tensor(heads, "heads")
        if not keep_tensor:
            heads = as_array(heads)
    else:
        heads = check_float_array(heads, "heads")

    # its shape: sets without a query may be given the last rows alone
    allowed_rows = [query_dim + 1] if query else [query_dim + 1, 1]
    fits = (
        heads.ndim == 3
        and heads.shape[1] in allowed_rows
        and heads.shape[2] == dim + 1
        and len(heads) > 0
    )
    if not fits:
        if query_dim == dim:
            shape = f"(M, D, D) with M ≥ 1 and D = d + 1 = {dim + 1} for tokens of dimension {dim}"
            arguments = f"n_heads, dim={dim}, seed=…"
        else:
            shape = (
                f"(M, {query_dim + 1}, {dim + 1}) with M ≥ 1 for queries of dimension {query_dim} "
                f"and keys of {dim}"
            )
            arguments = f"n_heads, dim={dim}, seed=…, query_dim={query_dim}"
        raise ValueError(
            f"`heads` must have shape {shape}: got shape {tuple(heads.shape)}. The last row and "
            f"column belong to the appended one; heads.sample({arguments}) draws such heads."
        )
    # to look for NaN in a tensor would be to wait for its device
    if not is_tensor(heads):
        check_finite(heads, "heads")
    return HeadArray(heads).seen_by(query=query)


def identity_mean(
    dim: int, query_dim: int | None = None, pairs: Any = None
) -> Float[np.ndarray, "f e"]:
    """W_0 = [[I, 0], [0, 0]], for which the mean score is <x_0, x_i>.

    With ``pairs`` it has ones at these pairs of coordinates instead.

    >>> identity_mean(2)
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 0.]])
    >>> identity_mean(2, query_dim=1, pairs=[(0, 1)])
    array([[0., 1., 0.],
           [0., 0., 0.]])
    """
    if query_dim is None:
        query_dim = dim
    mean = np.zeros((query_dim + 1, dim + 1))
    if pairs is None:
        shared = np.arange(min(query_dim, dim))
        mean[shared, shared] = 1.0
    elif len(pairs) > 0:
        for row, column in check_pairs(pairs, query_dim, dim) or ():
            mean[row, column] = 1.0
    return mean


def sample_mlp_weights(
    width: int, n_keys: int, dim: int, seed: int, *, start: int = 0
) -> Float[np.ndarray, "m z"]:
    """Draw first-layer weights (width, (N+1)·d + 1) of the MLP baseline.

    w ~ N(0, I/(N+2)) on z = [x_0; …; x_N; 1].

    M(d+1) units match the parameters of M attention heads. Draws nest as heads do; ``start`` is the
    first to draw.
    """
    width = check_count(width, "width")
    n_keys = check_count(n_keys, "n_keys")
    dim = check_count(dim, "dim")
    normals = standard_normals(width, (n_keys + 1) * dim + 1, seed, start=start)
    return normals / math.sqrt(n_keys + 2)


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
    normals = standard_normals(n_heads, rows * width, seed, start=start, skip=skip)
    return normals.reshape(n_heads, -1, width)


WORTH_A_JUMP = 256
"""Entries of an item from which on it pays to jump over them rather than to draw them."""

WORTH_A_THREAD = 2**18
"""Entries that are worth handing to another thread."""


def standard_normals(
    n_items: int, n_entries: int, seed: int, *, start: int = 0, skip: int = 0
) -> Float[np.ndarray, "m z"]:
    """Draw items ``start … start + n_items − 1`` of an infinite sequence of Gaussian vectors.

    The first ``skip`` entries of every item are left out.

    Item m is a function of (seed, m, n_entries) alone. The bits are Philox counters, which NumPy
    keeps stable between versions and which can start anywhere; the normal is the inverse
    distribution function of 52 of them.
    """
    n_items = check_count(n_items, "n_heads")
    start = check_count(start, "start", minimum=0)
    key = np.random.SeedSequence(check_seed(seed)).generate_state(2, np.uint64)

    # one counter gives four 64-bit words; counters of skipped entries are jumped over if many
    counters_per_item = -(-n_entries // 4)
    jumped_counters = skip // 4 if skip >= WORTH_A_JUMP else 0
    words_per_item = 4 * (counters_per_item - jumped_counters)
    normals = np.empty((n_items, n_entries - skip))

    def draw(part: slice) -> None:
        """Fill some rows of ``normals``."""
        count = part.stop - part.start
        generator = np.random.Philox(key=key)
        generator.advance((start + part.start) * counters_per_item)
        if jumped_counters:
            bits = np.empty((count, words_per_item), np.uint64)
            for item in bits:
                generator.advance(jumped_counters)
                item[:] = generator.random_raw(words_per_item)
        else:
            bits = generator.random_raw(count * words_per_item).reshape(count, -1)
        # what was drawn before the first entry, and after the last, to fill up counters
        bits = bits[:, skip - 4 * jumped_counters : n_entries - 4 * jumped_counters]
        # midpoints of 2^52 cells, never 0 or 1, so never infinite; in place, because new memory
        # for every step takes a third of the time
        np.right_shift(bits, np.uint64(12), out=bits)
        uniform = np.add(bits, 0.5, out=normals[part])
        uniform *= 2.0**-52
        ndtri(uniform, out=uniform)

    items_per_thread = max(1, WORTH_A_THREAD // max(1, n_entries - skip))
    run_threads(draw, blocks(n_items, items_per_thread))
    return normals


@dataclass(frozen=True)
class Step:
    """Errors of a descent after so many steps, in units of the variance of the target."""

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
        "zero-mean", "identity" or "learned": which head distribution the training set chose.
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
        """The last rows of the heads of ``sample(n_heads, dim, seed)``, and nothing else drawn.

        The means may be known in their last rows alone.
        """
        self._check_dim(dim, self.means_.shape[1] - 1)
        return self.around(head_normals(n_heads, dim, seed, start=start, last_row=True), start)

    def around(
        self, heads: Float[np.ndarray, "m g e"], start: int = 0
    ) -> Float[np.ndarray, "m g e"]:
        """Turn noise G into heads, in place; of noise of g rows into their last g rows."""
        rows = heads.shape[1]
        heads *= self.scale
        if self.query_scales_ is not None and self.key_scales_ is not None:
            heads *= np.outer(self.query_scales_[-rows:], self.key_scales_)
        owner = (start + np.arange(len(heads))) % len(self.means_)
        heads += self.means_[owner, -rows:]
        return heads

    def components(self, dim: int, query_dim: int | None = None) -> tuple[GaussianHeads, ...]:
        """The K Gaussian head distributions that the heads are shared out among.

        Their kernels average to that of this head distribution.
        """
        self._check_dim(dim, query_dim)
        if self.query_scales_ is not None:
            raise ValueError(
                "the kernel of infinitely many heads is known for noise of one scale: this head "
                "distribution has a scale for each coordinate. Use a finite `n_heads`, or learn "
                "it with n_heads=math.inf, which learns one scale."
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
        """The (query name, key name, entry) of the largest entries of one mean.

        ``names`` are those of the d coordinates; the appended one is called "1". ``query_names``
        are those of a query of another kind than the keys.

        >>> import numpy as np
        >>> distribution = FittedHeads(
        ...     np.array([[[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, -3.0, 0.0]]]), scale=0.25
        ... )
        >>> distribution.strongest_pairs(["who", "where"], count=2)
        [('1', 'where', -3.0), ('who', 'where', 2.0)]
        """
        matrix = self.means_[mean]
        n_query_coordinates = matrix.shape[0] - 1
        n_coordinates = matrix.shape[1] - 1
        if len(names) != n_coordinates:
            raise ValueError(
                f"`names` must name the {n_coordinates} coordinates of a token: got {len(names)} "
                "names."
            )
        if query_names is None:
            query_names = names
            what = "token"
        else:
            what = "query"
        if len(query_names) != n_query_coordinates:
            raise ValueError(
                f"`query_names` must name the {n_query_coordinates} coordinates of a {what}: got "
                f"{len(query_names)} names."
            )

        key_labels = [*names, "1"]
        query_labels = [*query_names, "1"]
        order = np.argsort(-np.abs(matrix), axis=None, kind="stable")[: check_count(count, "count")]
        rows, columns = np.unravel_index(order, matrix.shape)
        return [
            (query_labels[i], key_labels[j], float(matrix[i, j]))
            for i, j in zip(rows, columns, strict=True)
        ]

    def _check_dim(self, dim: int, query_dim: int | None = None) -> None:
        """Raise unless the heads are (D_q, D) for queries and keys of these dimensions."""
        rows, width = self.means_.shape[1:]
        if query_dim is None:
            query_dim = dim
        if (query_dim + 1, dim + 1) == (rows, width):
            return
        fitted = f"tokens of dimension {width - 1}"
        if rows != width:
            fitted = f"queries of dimension {rows - 1} and keys of dimension {width - 1}"
            if self.hops_:
                fitted += f" ({self.hops - 1} hops before the last extend them)"
        got = f"dim {dim}"
        if query_dim != dim:
            got += f" and query_dim {query_dim}"
        raise ValueError(
            f"this head distribution was fitted to {fitted}, and its heads are {rows} × "
            f"{width}: got {got}. Fit a head distribution to these tokens."
        )
