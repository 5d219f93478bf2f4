"""Laws of the query-key matrix W: how to draw heads, and the Gaussian moments of their scores."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri

from keyhole._array import blocks, is_tensor
from keyhole._checks import check_count, check_finite, check_float_array, check_number, check_seed


@runtime_checkable
class HeadLaw(Protocol):
    """A law of W: anything with this method can be passed as ``law``."""

    def sample(self, n_heads: int, dim: int, seed: int, *, start: int = 0) -> Float[np.ndarray, "m e e"]:
        """Draw heads ``start … start + n_heads − 1`` of the infinite sequence that ``seed`` names."""
        ...


class _Params:
    """scikit-learn's parameter protocol, so that ``law__mean`` can be searched over; no import needed."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        names = list(inspect.signature(type(self).__init__).parameters)[1:]
        return {name: getattr(self, name) for name in names}

    def set_params(self, **params: Any) -> _Params:
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"{type(self).__name__} has no parameter {name!r}: it has {', '.join(sorted(known))}.")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        shown = []
        for name, value in self.get_params().items():
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

    ``mean=0`` is the paper's RFA, ``mean=1`` its biased BRFA, for which E s = <x_0, x_i>. With ``scale=1/2`` and
    unit tokens the scores have unit variance.

    Parameters
    ----------
    mean : float or array (D, D)
        A number c means c·W_0 with W_0 = [[I_d, 0], [0, 0]]; an array is the mean itself, D = d + 1.
    scale : float
        Standard deviation of the entries.

    Examples
    --------
    >>> law = GaussianHeads(mean=1.0)
    >>> law.sample(n_heads=4, dim=3, seed=0).shape
    (4, 4, 4)
    >>> bool((law.sample(2, 3, seed=0) == law.sample(4, 3, seed=0)[:2]).all())   # draws nest
    True
    """

    def __init__(self, mean: Any = 0.0, scale: Any = 0.5) -> None:
        self.mean = mean
        self.scale = scale

    def sample(self, n_heads: int, dim: int, seed: int, *, start: int = 0) -> Float[np.ndarray, "m e e"]:
        """Draw heads ``start … start + n_heads − 1`` of the sequence that ``seed`` names; D = dim + 1.

        Returns
        -------
        array (n_heads, D, D)
            The same heads whatever the block size: ``sample(M, …)[a:b]`` equals ``sample(b−a, …, start=a)``.
        """
        mean, scale = self.moments(dim)
        width = dim + 1
        noise = standard_normals(n_heads, width * width, seed, start=start).reshape(n_heads, width, width)
        noise *= scale
        if mean is not None:
            noise += mean
        return noise

    def moments(self, dim: int) -> tuple[Float[np.ndarray, "e e"] | None, float]:
        """Return the mean matrix (None when it is zero) and the standard deviation of the entries, checked."""
        dim = check_count(dim, "dim")
        scale = check_number(self.scale, "scale", minimum=0.0, exclusive=True)
        if np.ndim(self.mean) == 0:
            strength = check_number(self.mean, "mean")
            return (None if strength == 0 else strength * identity_mean(dim)), scale
        mean = check_float_array(self.mean, "mean").astype(np.float64)
        if mean.shape != (dim + 1, dim + 1):
            raise ValueError(
                f"`mean` must be a number or a (D, D) matrix with D = d + 1: got shape {mean.shape} for tokens of "
                f"dimension {dim}, so D = {dim + 1}. The last row and column belong to the appended one."
            )
        check_finite(mean, "mean")
        return (mean if mean.any() else None), scale


class QueryKeyHeads(_Params):
    """Products of Gaussian query and key matrices: W = QᵀK with Q, K in R^{rank × D}.

    Entries of Q and K are i.i.d. Gaussian, scaled so that the entries of W have standard deviation ``scale``. As
    ``rank`` grows this becomes ``GaussianHeads(0, scale)``; at finite rank no closed-form kernel is known.

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

    def sample(self, n_heads: int, dim: int, seed: int, *, start: int = 0) -> Float[np.ndarray, "m e e"]:
        """Draw heads ``start … start + n_heads − 1`` of the sequence that ``seed`` names; D = dim + 1."""
        rank = check_count(self.rank, "rank")
        scale = check_number(self.scale, "scale", minimum=0.0, exclusive=True)
        width = check_count(dim, "dim") + 1
        factors = standard_normals(n_heads, 2 * rank * width, seed, start=start)
        query, key = np.moveaxis(factors.reshape(n_heads, 2, rank, width), 1, 0)
        heads: np.ndarray = np.matmul(query.transpose(0, 2, 1), key)
        heads *= scale / math.sqrt(rank)  # entries of QᵀK are sums of `rank` products, of variance 1 each
        return heads


DRAWN_BYTES = 40
"""Bytes that one entry of W takes while it is drawn, converted and packed."""


class HeadDraw:
    """M heads of a law under one seed, (D, D) with D = dim + 1 each, regenerated block by block instead of stored.

    >>> draw = HeadDraw(GaussianHeads(), n_heads=1000, dim=3, seed=0)
    >>> draw.block(10, 30).shape
    (20, 4, 4)
    """

    def __init__(self, law: Any, n_heads: Any, dim: Any, seed: Any) -> None:
        if isinstance(law, type) or not isinstance(law, HeadLaw):
            raise TypeError(
                f"`law` must be a law of heads, with a method sample(n_heads, dim, seed): got {law!r}. "
                "Use kh.GaussianHeads() or kh.QueryKeyHeads(rank)."
            )
        self.law = law
        self.n_heads = check_count(n_heads, "n_heads")
        self.dim = check_count(dim, "dim")
        self.seed = check_seed(seed)

    def __len__(self) -> int:
        return self.n_heads

    def block(self, start: int, stop: int) -> Float[np.ndarray, "m e e"]:
        """Heads ``start … stop − 1``."""
        if not 0 <= start < stop <= self.n_heads:
            raise IndexError(
                f"block {start}:{stop} must be a part of heads 0 … {self.n_heads - 1}, and not empty. "
                "A longer draw with the same seed begins with the same heads."
            )
        return self.law.sample(stop - start, self.dim, self.seed, start=start)

    def blocks(self, size: int) -> Iterator[tuple[slice, Float[np.ndarray, "m e e"]]]:
        """All heads, at most ``size`` at a time."""
        return ((part, self.block(part.start, part.stop)) for part in blocks(self.n_heads, size))

    def stored(self, memory_budget: int) -> HeadDraw:
        """The same heads, drawn once and kept if drawing them takes no more than the budget; else these."""
        taken = DRAWN_BYTES * self.n_heads * (self.dim + 1) ** 2
        return _StoredDraw(self) if taken <= memory_budget else self


class _StoredDraw(HeadDraw):
    """Heads that are needed several times, kept."""

    def __init__(self, draw: HeadDraw) -> None:
        super().__init__(draw.law, draw.n_heads, draw.dim, draw.seed)
        self._heads = super().block(0, draw.n_heads)

    def block(self, start: int, stop: int) -> Float[np.ndarray, "m e e"]:
        return self._heads[start:stop]


class HeadArray:
    """Heads (M, D, D) that somebody holds, as an array or a tensor, handed out in blocks as a `HeadDraw` is."""

    def __init__(self, heads: Any) -> None:
        self.heads = heads

    def __len__(self) -> int:
        return len(self.heads)

    def blocks(self, size: int) -> Iterator[tuple[slice, Float[Any, "m e e"]]]:
        """All heads, at most ``size`` at a time."""
        return ((part, self.heads[part]) for part in blocks(len(self.heads), size))


def check_heads(heads: Any, dim: int, *, keep_tensor: bool = False) -> HeadDraw | HeadArray:
    """Return a draw, or an array (M, D, D), that fits tokens of dimension ``dim``; a tensor stays one if asked to."""
    if isinstance(heads, HeadArray):
        return heads
    if isinstance(heads, HeadDraw):
        if heads.dim != dim:
            raise ValueError(
                f"`heads` must be drawn for the dimension of the tokens: the draw is for {heads.dim}, the "
                f"tokens have {dim}. Draw them with HeadDraw(law, n_heads, dim={dim}, seed=…)."
            )
        return heads
    if is_tensor(heads):
        from keyhole._tensors import as_array, check_float_tensor

        heads = check_float_tensor(heads, "heads")
        heads = heads if keep_tensor else as_array(heads)
    else:
        heads = check_float_array(heads, "heads")
    if heads.ndim != 3 or tuple(heads.shape[1:]) != (dim + 1, dim + 1) or len(heads) == 0:
        raise ValueError(
            f"`heads` must have shape (M, D, D) with M ≥ 1 and D = d + 1 = {dim + 1} for tokens of dimension "
            f"{dim}: got shape {tuple(heads.shape)}. The last row and column belong to the appended one; "
            f"law.sample(n_heads, dim={dim}, seed=…) draws such heads."
        )
    if not is_tensor(heads):  # to look for NaN among tensors would be to wait for the device
        check_finite(heads, "heads")
    return HeadArray(heads)


def identity_mean(dim: int) -> Float[np.ndarray, "e e"]:
    """W_0 = [[I_d, 0], [0, 0]], for which the mean score is <x_0, x_i>.

    >>> identity_mean(2)
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 0.]])
    """
    mean = np.eye(dim + 1)
    mean[-1, -1] = 0.0
    return mean


def sample_mlp_weights(width: int, n_keys: int, dim: int, seed: int, *, start: int = 0) -> Float[np.ndarray, "m z"]:
    """Draw first-layer weights (width, (N+1)·d + 1) of the MLP baseline: w ~ N(0, I/(N+2)) on z = [x_0; …; x_N; 1].

    M(d+1) units match the parameters of M attention heads. Draws nest as heads do; ``start`` is the first to draw.
    """
    width, n_keys, dim = check_count(width, "width"), check_count(n_keys, "n_keys"), check_count(dim, "dim")
    return standard_normals(width, (n_keys + 1) * dim + 1, seed, start=start) / math.sqrt(n_keys + 2)


def standard_normals(n_items: int, n_entries: int, seed: int, *, start: int = 0) -> Float[np.ndarray, "m z"]:
    """Draw items ``start … start + n_items − 1`` of an infinite sequence of Gaussian vectors.

    Item m is a function of (seed, m, n_entries) alone. The bits are Philox counters, which NumPy keeps stable
    between versions and which can start anywhere; the normal is the inverse distribution function of 52 of them.
    """
    n_items = check_count(n_items, "n_heads")
    start = check_count(start, "start", minimum=0)
    key = np.random.SeedSequence(check_seed(seed)).generate_state(2, np.uint64)
    generator = np.random.Philox(key=key)
    counters_per_item = -(-n_entries // 4)  # one counter gives four 64-bit words
    generator.advance(start * counters_per_item)
    bits = generator.random_raw(n_items * counters_per_item * 4).reshape(n_items, -1)[:, :n_entries]
    # midpoints of 2^52 cells: never 0 or 1, so never infinite
    normals: np.ndarray = ndtri(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)
    return normals


@dataclass(frozen=True)
class Step:
    """What a descent knew after so many steps; errors are in units of the variance of the target."""

    step: int
    loo_error: float
    held_out_error: float


@dataclass(frozen=True, eq=False)
class FittedHeads:
    """Heads W_m = means_[m mod K] + scale · diag(query_scales_) G_m diag(key_scales_) with standard normal G_m.

    Attributes
    ----------
    means_ : array (K, D, D)
        The means; head m has mean number m mod K.
    scale : float
        Standard deviation of the entries around them.
    query_scales_, key_scales_ : arrays (D,) or None
        What it is multiplied by for coordinate i of the query and j of the key; None means ones.
    chosen : str
        "zero-mean", "identity" or "learned": which law the training set spoke for.
    strength : float
        c of the c·W_0 that the means started from; the mean itself if ``chosen`` is "identity".
    steps : int
        Steps of the descent behind the means; 0 if nothing was learned.
    history : tuple of Step
        Held-out error along the descent.
    reason : str
        Why this law, in one sentence.

    Examples
    --------
    >>> import numpy as np
    >>> law = FittedHeads(np.zeros((2, 4, 4)), scale=0.5)
    >>> bool((law.sample(3, dim=3, seed=0) == GaussianHeads().sample(3, 3, seed=0)).all())
    True
    """

    means_: Float[np.ndarray, "k e e"] = field(repr=False)
    scale: float
    chosen: str = "learned"
    strength: float = 0.0
    steps: int = 0
    history: tuple[Step, ...] = field(default=(), repr=False)
    reason: str = field(default="", repr=False)
    query_scales_: Float[np.ndarray, " e"] | None = field(default=None, repr=False)
    key_scales_: Float[np.ndarray, " e"] | None = field(default=None, repr=False)

    def sample(self, n_heads: int, dim: int, seed: int, *, start: int = 0) -> Float[np.ndarray, "m e e"]:
        """Draw heads ``start … start + n_heads − 1`` of the sequence that ``seed`` names; D = dim + 1."""
        self._check_dim(dim)
        width = self.means_.shape[1]
        heads = standard_normals(n_heads, width * width, seed, start=start).reshape(n_heads, width, width)
        heads *= self.scale
        if self.query_scales_ is not None and self.key_scales_ is not None:
            heads *= np.outer(self.query_scales_, self.key_scales_)
        heads += self.means_[(start + np.arange(n_heads)) % len(self.means_)]
        return heads

    def components(self, dim: int) -> tuple[GaussianHeads, ...]:
        """The K Gaussian laws that the heads are shared out among; their kernels average to that of this law."""
        self._check_dim(dim)
        if self.query_scales_ is not None:
            raise ValueError(
                "the kernel of infinitely many heads is known for noise of one scale: this law has a scale for each "
                "coordinate. Use a finite `n_heads`, or LearnedHeads(covariance='none')."
            )
        return tuple(GaussianHeads(mean, self.scale) for mean in self.means_)

    def strongest_pairs(self, names: Sequence[str], count: int = 10, *, mean: int = 0) -> list[tuple[str, str, float]]:
        """The (query name, key name, entry) of one mean of largest size; ``names`` are those of the d coordinates.

        The appended one is called "1".

        >>> import numpy as np
        >>> law = FittedHeads(np.array([[[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.0, -3.0, 0.0]]]), scale=0.25)
        >>> law.strongest_pairs(["who", "where"], count=2)
        [('1', 'where', -3.0), ('who', 'where', 2.0)]
        """
        matrix = self.means_[mean]
        labels = [*names, "1"]
        if len(labels) != len(matrix):
            raise ValueError(f"`names` must name the {len(matrix) - 1} coordinates of a token: got {len(names)} names.")
        order = np.argsort(-np.abs(matrix), axis=None, kind="stable")[: check_count(count, "count")]
        rows, columns = np.unravel_index(order, matrix.shape)
        return [(labels[i], labels[j], float(matrix[i, j])) for i, j in zip(rows, columns, strict=True)]

    def _check_dim(self, dim: int) -> None:
        width = self.means_.shape[1]
        if dim + 1 != width:
            raise ValueError(
                f"this law was fitted to tokens of dimension {width - 1}, and its heads are {width} × {width}: got "
                f"dim {dim}. Fit a law to these tokens."
            )
