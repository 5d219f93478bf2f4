"""Tasks that the literature poses to a single attention layer, as generators of labelled sets.

Each task is a small dataclass: its fields are sizes, its docstring is the definition, and its
class attributes say what is known about it and from where. All are reached as ``kh.targets.NAME``:

>>> import keyhole as kh
>>> X, y = kh.targets.NearestKey().draw(400, seed=0)
>>> X, y.shape
(SetBatch(400 sets, 10 keys each (4000 in all), dim 6, with query, float64), (400,))

Draws nest: the first n samples of a larger draw with the same seed are the draw of n.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int

from keyhole._checks import check_count, check_number, check_seed
from keyhole.data.sets import SetBatch

FLOOR_DRAWS = 20_000
"""Samples behind a floor that has no closed form: its standard error is below 0.01."""


@dataclass(frozen=True)
class SetTask(ABC):
    """A distribution of labelled sets, and what the literature says about learning from it.

    Attributes
    ----------
    name : str
        Short name, as `keyhole reproduce tasks` and `keyhole explore` write it.
    formula : str
        The label in one line; x₀ is the query, x₁ … x_N are the keys.
    finding : str
        What the literature says, in one sentence.
    source : str
        Where it says so.
    """

    name: ClassVar[str]
    formula: ClassVar[str]
    finding: ClassVar[str]
    source: ClassVar[str]

    def draw(self, n_samples: int, seed: int = 0) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        """Draw n labelled sets.

        Parameters
        ----------
        n_samples, seed : int
            How many, and the name of the draw.

        Returns
        -------
        (SetBatch, array (n,))
            The sets, with a query where the task has one, and their labels.
        """
        n_samples = check_count(n_samples, "n_samples")
        return self._draw(n_samples, _Streams(check_seed(seed)))

    @abstractmethod
    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        """Draw n labelled sets from streams of random numbers."""

    @property
    def floor(self) -> float:
        """The share of Var y that is left when all is learned: 0 where a layer can have the label.

        The best prediction has it, or the best layer of the kind that the finding is about.
        """
        return 0.0


@dataclass(frozen=True)
class _Streams:
    """Independent streams of random numbers by name: each is read sample by sample.

    A longer draw reads every stream further, so that its first samples are those of a shorter one.
    """

    seed: int

    def normal(self, name: str, *shape: int) -> np.ndarray:
        """Standard normal numbers; the first axis counts samples."""
        return self._generator(name).standard_normal(shape)

    def uniform(self, name: str, *shape: int) -> np.ndarray:
        """Numbers uniform on [0, 1)."""
        return self._generator(name).random(shape)

    def sphere(self, name: str, *shape: int) -> np.ndarray:
        """Vectors uniform on the unit sphere; the last axis counts coordinates."""
        vectors = self.normal(name, *shape)
        return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))

    def integers(self, name: str, high: int, *shape: int) -> Int[np.ndarray, "..."]:
        """Integers uniform on 0 … high − 1."""
        return np.asarray(high * self.uniform(name, *shape)).astype(np.int64)

    def order(self, name: str, n: int, size: int) -> Int[np.ndarray, "n size"]:
        """A random order of 0 … size − 1 for each of n samples."""
        return np.argsort(self.uniform(name, n, size), axis=1)

    def _generator(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, *name.encode()])


def _check_sizes(**sizes: int) -> None:
    """Raise unless every size is a whole number of at least 1."""
    for name, size in sizes.items():
        check_count(size, name)


def _similarity(
    query: Float[np.ndarray, "n d"], keys: Float[np.ndarray, "n k d"]
) -> Float[np.ndarray, "n k"]:
    """The inner products <x_0, x_i>."""
    return np.asarray(np.einsum("nd,nkd->nk", query, keys))


def _keys_of(batch: SetBatch, n_keys: int) -> Float[np.ndarray, "n k d"]:
    """The keys of sets that have N keys each."""
    return np.asarray(batch.tokens, dtype=np.float64).reshape(len(batch), n_keys, batch.dim)


def _softmax(scores: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
    """Weights proportional to exp(scores), with the sum 1 in each row."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _with_positions(keys: Float[np.ndarray, "n k d"]) -> Float[np.ndarray, "n k e"]:
    """Append to each key its position as a one-hot vector."""
    n, n_keys, _ = keys.shape
    positions = np.broadcast_to(np.eye(n_keys), (n, n_keys, n_keys))
    return np.concatenate([keys, positions], axis=2)


# ---------------------------------------------------------------- averages and weighted averages


@dataclass(frozen=True)
class AbsoluteAverage(SetTask):
    """The average of a function of the keys that is no polynomial: y = (1/N) Σ_i |<β, x_i>|.

    Query and keys are uniform on the unit sphere; β is the first basis vector.

    Parameters
    ----------
    dim, n_keys : int
        Token dimension d and keys N of each set.

    Examples
    --------
    >>> X, y = AbsoluteAverage(dim=6, n_keys=10).draw(5)
    >>> keys = X.tokens.reshape(5, 10, 6)
    >>> bool(np.allclose(y, np.abs(keys[:, :, 0]).mean(axis=1)))
    True
    """

    dim: int = 6
    n_keys: int = 10

    name: ClassVar[str] = "average"
    formula: ClassVar[str] = "(1/N) Σ |⟨β, xᵢ⟩|"
    finding: ClassVar[str] = (
        "Random attention features need far fewer samples than random features of the flattened "
        "input; zero-mean heads suffice."
    )
    source: ClassVar[str] = "Fu, Guo, Bai and Mei 2023, arXiv:2307.11353"

    def __post_init__(self) -> None:
        _check_sizes(dim=self.dim, n_keys=self.n_keys)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        query = streams.sphere("query", n, self.dim)
        keys = streams.sphere("keys", n, self.n_keys, self.dim)
        return SetBatch(keys, query), np.abs(keys[:, :, 0]).mean(axis=1)


@dataclass(frozen=True)
class CorrelationPower(SetTask):
    """Keys weighted by a power of their correlation with the query.

    The label is y = (1/N) Σ_i <x_0, x_i>^q <β, x_i>, the family f_{2,q} of the paper
    (:class:`Correlation` is the same as a polynomial, for theory). Query and keys are uniform on
    the unit sphere; β is the first basis vector.

    Parameters
    ----------
    q : int
        Power of the correlation.
    dim, n_keys : int
        Token dimension d and keys N of each set.
    """

    q: int = 2
    dim: int = 4
    n_keys: int = 4

    name: ClassVar[str] = "correlation"
    formula: ClassVar[str] = "(1/N) Σ ⟨x₀, xᵢ⟩² ⟨β, xᵢ⟩"
    finding: ClassVar[str] = "Heads with a mean along the identity need fewer samples at larger q."
    source: ClassVar[str] = "Fu, Guo, Bai and Mei 2023, arXiv:2307.11353"

    def __post_init__(self) -> None:
        check_count(self.q, "q", minimum=0)
        _check_sizes(dim=self.dim, n_keys=self.n_keys)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        query = streams.sphere("query", n, self.dim)
        keys = streams.sphere("keys", n, self.n_keys, self.dim)
        weights = _similarity(query, keys) ** self.q
        return SetBatch(keys, query), (weights * keys[:, :, 0]).mean(axis=1)


@dataclass(frozen=True)
class SimilarityWeightedMean(SetTask):
    """What one softmax head computes: y = Σ_i softmax_i(b <x_0, x_i>) <β, x_i>.

    Query and keys are uniform on the unit sphere; β is the first basis vector.

    Parameters
    ----------
    sharpness : float
        b: 0 weighs all keys alike, ∞ takes the nearest key.
    dim, n_keys : int
        Token dimension d and keys N of each set.
    """

    sharpness: float = 4.0
    dim: int = 6
    n_keys: int = 10

    name: ClassVar[str] = "similarity"
    formula: ClassVar[str] = "Σ softmaxᵢ(4⟨x₀, xᵢ⟩) ⟨β, xᵢ⟩"
    finding: ClassVar[str] = (
        "A softmax layer whose heads have a mean along the identity contains the target's own head "
        "and needs few samples; ReLU heads only approximate it."
    )
    source: ClassVar[str] = (
        "a head of Vaswani et al. 2017, arXiv:1706.03762; role of the mean: Fu et al. 2023, "
        "arXiv:2307.11353"
    )

    def __post_init__(self) -> None:
        check_number(self.sharpness, "sharpness")
        _check_sizes(dim=self.dim, n_keys=self.n_keys)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        query = streams.sphere("query", n, self.dim)
        keys = streams.sphere("keys", n, self.n_keys, self.dim)
        weights = _softmax(self.sharpness * _similarity(query, keys))
        return SetBatch(keys, query), (weights * keys[:, :, 0]).sum(axis=1)


@dataclass(frozen=True)
class NearestKey(SetTask):
    """A coordinate of the key nearest to the query: y = <β, x_j>, j = argmax_i <x_0, x_i>.

    Query and keys are uniform on the unit sphere; β is the first basis vector.

    Parameters
    ----------
    dim, n_keys : int
        Token dimension d and keys N of each set.

    Examples
    --------
    >>> X, y = NearestKey(dim=3, n_keys=4).draw(100, seed=1)
    >>> keys = X.tokens.reshape(100, 4, 3)
    >>> nearest = np.einsum("nd,nkd->nk", X.query, keys).argmax(axis=1)
    >>> bool((y == keys[np.arange(100), nearest, 0]).all())
    True
    """

    dim: int = 6
    n_keys: int = 10

    name: ClassVar[str] = "nearest-key"
    formula: ClassVar[str] = "⟨β, xⱼ⟩, j = argmaxᵢ ⟨x₀, xᵢ⟩"
    finding: ClassVar[str] = (
        "One softmax layer learns to take the nearest neighbour; weights that add up over keys, "
        "such as ReLU/N, cannot compare keys and stop improving."
    )
    source: ClassVar[str] = "Li et al. 2024, arXiv:2411.10830"

    def __post_init__(self) -> None:
        _check_sizes(dim=self.dim, n_keys=self.n_keys)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        query = streams.sphere("query", n, self.dim)
        keys = streams.sphere("keys", n, self.n_keys, self.dim)
        nearest = _similarity(query, keys).argmax(axis=1)
        return SetBatch(keys, query), keys[np.arange(n), nearest, 0]


# ---------------------------------------------------------------- finding the key that counts


@dataclass(frozen=True)
class SingleLocation(SetTask):
    """One key, at a random place, carries the label; a direction marks it.

    All keys are standard normal but x_J = √(d/2) k + z/√2, with k and v orthogonal unit vectors, z
    standard normal and J uniform. The label is y = <v, x_J>. Tokens are divided by √d.

    Parameters
    ----------
    dim, n_keys : int
        Token dimension d, at least 2, and keys N of each set.

    Notes
    -----
    A softmax head that has found k and v computes a Σ_i softmax_i(λ <k, x_i>) <v, x_i>, and
    :attr:`floor` is its error at the best λ and a: 0.39 for d = N = 10. The Bayes prediction
    weighs keys by the odds of being x_J, which depend on |x_i|² too, and has the error 0.21
    (:meth:`best_prediction`). Both tend to 0 as d grows.
    """

    dim: int = 10
    n_keys: int = 10

    name: ClassVar[str] = "single-location"
    formula: ClassVar[str] = "⟨v, x_J⟩, x_J marked by the direction k"
    finding: ClassVar[str] = (
        "An attention layer trained by gradient descent finds k and v, and comes to the Bayes "
        "error in high dimension; linear predictors do not."
    )
    source: ClassVar[str] = "Marion, Berthier, Biau and Boyer 2024, arXiv:2410.01537"

    def __post_init__(self) -> None:
        check_count(self.dim, "dim", minimum=2)
        check_count(self.n_keys, "n_keys")

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        keys = streams.normal("keys", n, self.n_keys, self.dim)
        place = streams.integers("place", self.n_keys, n)
        rows = np.arange(n)
        marked = keys[rows, place] / math.sqrt(2)
        marked[:, 0] += math.sqrt(self.dim / 2)
        keys[rows, place] = marked
        return SetBatch(keys / math.sqrt(self.dim)), marked[:, 1]

    def best_prediction(self, batch: SetBatch) -> Float[np.ndarray, " n"]:
        """E[y | x]: the second coordinates of the keys, weighed by the odds that they are x_J."""
        keys = math.sqrt(self.dim) * _keys_of(batch, self.n_keys)
        centre = np.zeros(self.dim)
        centre[0] = math.sqrt(self.dim / 2)
        # densities N(√(d/2) k, 1/2) over N(0, 1), up to a factor that all keys share
        log_odds = np.square(keys).sum(axis=2) / 2 - np.square(keys - centre).sum(axis=2)
        return np.asarray((_softmax(log_odds) * keys[:, :, 1]).sum(axis=1))

    def head_prediction(self, batch: SetBatch, sharpness: float) -> Float[np.ndarray, " n"]:
        """What a softmax head with k and v computes: Σ_i softmax_i(λ <k, x_i>) <v, x_i>."""
        keys = math.sqrt(self.dim) * _keys_of(batch, self.n_keys)
        return np.asarray((_softmax(sharpness * keys[:, :, 0]) * keys[:, :, 1]).sum(axis=1))

    @property
    def floor(self) -> float:
        """The error of the best softmax head, on 20,000 sets."""
        return _best_head_error(self)


@lru_cache(maxsize=32)
def _best_head_error(task: SingleLocation) -> float:
    """The error over Var y of the best a Σ_i softmax_i(λ <k, x_i>) <v, x_i>."""
    batch, y = task.draw(FLOOR_DRAWS, seed=2**32)
    errors = []
    for sharpness in np.linspace(0.5, 6.0, 23):
        values = task.head_prediction(batch, float(sharpness))
        factor = (values @ y) / (values @ values)
        errors.append(float(np.mean(np.square(factor * values - y))))
    return min(errors) / float(np.var(y))


@dataclass(frozen=True)
class SparseSelection(SetTask):
    """The query marks a few positions, and the label is the mean of the keys there.

    Keys are [x_i; e_i] with x_i ~ N(0, 1/4) and e_i the one-hot position; the query is 0 and the
    indicator of the marked positions S over √q. The label is y = (1/q) Σ_{i in S} <β, x_i>.

    Parameters
    ----------
    n_marked, n_keys : int
        Positions q that are marked, of N.
    dim : int
        Dimension of x_i; tokens have N coordinates more.
    """

    n_marked: int = 2
    dim: int = 4
    n_keys: int = 8

    name: ClassVar[str] = "sparse-selection"
    formula: ClassVar[str] = "mean of ⟨β, xᵢ⟩ over the positions that the query marks"
    finding: ClassVar[str] = (
        "One attention layer selects the marked tokens, here even with linear weights; a fully "
        "connected network on the flattened input needs far more."
    )
    source: ClassVar[str] = "Wang, Wei, Hsu and Lee 2024, arXiv:2406.06893"

    def __post_init__(self) -> None:
        _check_sizes(dim=self.dim, n_keys=self.n_keys)
        check_count(self.n_marked, "n_marked", maximum=self.n_keys)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        content = streams.normal("keys", n, self.n_keys, self.dim) / 2
        marked = streams.order("marked", n, self.n_keys)[:, : self.n_marked]
        indicator = np.zeros((n, self.n_keys))
        np.put_along_axis(indicator, marked, 1.0, axis=1)
        empty = np.zeros((n, self.dim))
        query = np.concatenate([empty, indicator / math.sqrt(self.n_marked)], axis=1)
        labels = (indicator * content[:, :, 0]).sum(axis=1) / self.n_marked
        return SetBatch(_with_positions(content), query), labels


@dataclass(frozen=True)
class SparseTokenClasses(SetTask):
    """Is a signal hidden in a few of the tokens? Labels are ±1, learned by least squares.

    Keys are standard normal; where y = 1, the vector θξ is added to R of the N keys, ξ a unit
    vector. Tokens are divided by √d.

    Parameters
    ----------
    signal : float
        θ.
    n_carriers, n_keys : int
        Keys R that carry the signal, of N.
    dim : int
        Token dimension d.

    Notes
    -----
    With the likelihood ratio r_i = exp(θ<ξ, x_i> − θ²/2) of each key, the odds of y = 1 are the
    mean of Π_{i in S} r_i over all S of R keys. The best prediction is 2P(y = 1 | x) − 1, and
    :attr:`floor` is its error.
    """

    signal: float = 4.0
    n_carriers: int = 2
    dim: int = 10
    n_keys: int = 16

    name: ClassVar[str] = "sparse-classes"
    formula: ClassVar[str] = "±1: is θξ added to R of the N keys?"
    finding: ClassVar[str] = (
        "Attention needs a signal that grows like log N, a linear classifier one like √N: "
        "attention comes nearer to the best error than linear weights."
    )
    source: ClassVar[str] = "Barnfield, Cui and Lu 2025, arXiv:2509.25153"

    def __post_init__(self) -> None:
        check_number(self.signal, "signal")
        _check_sizes(dim=self.dim, n_keys=self.n_keys)
        check_count(self.n_carriers, "n_carriers", maximum=self.n_keys)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        labels = np.where(streams.uniform("labels", n) < 0.5, -1.0, 1.0)
        keys = streams.normal("keys", n, self.n_keys, self.dim)
        carriers = streams.order("carriers", n, self.n_keys)[:, : self.n_carriers]
        shift = np.zeros((n, self.n_keys))
        np.put_along_axis(shift, carriers, self.signal, axis=1)
        keys[:, :, 0] += np.where(labels[:, None] > 0, shift, 0.0)
        return SetBatch(keys / math.sqrt(self.dim)), labels

    def best_prediction(self, batch: SetBatch) -> Float[np.ndarray, " n"]:
        """E[y | x] = 2P(y = 1 | x) − 1."""
        along = math.sqrt(self.dim) * _keys_of(batch, self.n_keys)[:, :, 0]
        ratios = np.exp(self.signal * along - self.signal**2 / 2)
        # Σ over all S of R keys of Π r_i: add one key after the other, R products at a time
        sums = np.zeros((self.n_carriers + 1, len(ratios)))
        sums[0] = 1.0
        for key_ratios in ratios.T:
            for size in range(self.n_carriers, 0, -1):
                sums[size] += sums[size - 1] * key_ratios
        odds = sums[-1] / math.comb(self.n_keys, self.n_carriers)
        return np.asarray((odds - 1) / (odds + 1))

    @property
    def floor(self) -> float:
        """The error of E[y | x], on 20,000 sets."""
        return _measured_floor(self)


@lru_cache(maxsize=32)
def _measured_floor(task: SparseTokenClasses) -> float:
    """The error of the best prediction over Var y, on sets of a draw of their own."""
    batch, y = task.draw(FLOOR_DRAWS, seed=2**32)
    return float(np.mean(np.square(task.best_prediction(batch) - y)) / np.var(y))


# ---------------------------------------------------------------- in context


@dataclass(frozen=True)
class InContextRegression(SetTask):
    """Linear regression from the examples in the set: a new weight vector in every sample.

    Keys are (x_i, <w, x_i>), the query is (x_0, 0) and the label is y = <w, x_0>, with x_i
    standard normal and w ~ N(0, I/d). Tokens are divided by √d.

    Parameters
    ----------
    dim, n_keys : int
        Dimension d of x_i, tokens have one coordinate more, and examples N of each set.

    Notes
    -----
    The examples determine w where N ≥ d, so that nothing forbids an error of 0. :attr:`floor` is
    that of the best layer with linear weights, η<x_0, (1/N) Σ_i y_i x_i>, which is one step of
    gradient descent: 1 − 2η + η²(1 + (d+1)/N) is least at (d+1)/(N+d+1).
    """

    dim: int = 4
    n_keys: int = 16

    name: ClassVar[str] = "in-context"
    formula: ClassVar[str] = "⟨w, x₀⟩ from keys (xᵢ, ⟨w, xᵢ⟩), w new in every sample"
    finding: ClassVar[str] = (
        "One layer with linear weights learns one step of gradient descent, whose error is "
        "(d+1)/(N+d+1); an MLP on the flattened input learns nothing."
    )
    source: ClassVar[str] = (
        "Ahn, Cheng, Daneshmand and Sra 2023, arXiv:2306.00297; Zhang, Frei and Bartlett 2023, "
        "arXiv:2306.09927"
    )

    def __post_init__(self) -> None:
        _check_sizes(dim=self.dim, n_keys=self.n_keys)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        weights = streams.normal("weights", n, self.dim) / math.sqrt(self.dim)
        points = streams.normal("keys", n, self.n_keys, self.dim)
        new_point = streams.normal("query", n, self.dim)
        answers = _similarity(weights, points)
        keys = np.concatenate([points, answers[:, :, None]], axis=2)
        query = np.concatenate([new_point, np.zeros((n, 1))], axis=1)
        unit = 1 / math.sqrt(self.dim)
        return SetBatch(unit * keys, unit * query), np.einsum("nd,nd->n", weights, new_point)

    @property
    def floor(self) -> float:
        """(d+1)/(N+d+1), the error of the best layer with linear weights."""
        return (self.dim + 1) / (self.n_keys + self.dim + 1)


@dataclass(frozen=True)
class Lookup(SetTask):
    """The value that is stored under the query's name.

    Keys are [e_k; v/2] with distinct names k and values v ~ N(0, 1); the query is the one-hot name
    of one of them, and its value is the label.

    Parameters
    ----------
    n_names, n_keys : int
        Names there are, and keys N of each set, at most as many.
    """

    n_names: int = 8
    n_keys: int = 6

    name: ClassVar[str] = "lookup"
    formula: ClassVar[str] = "the value v of the key [e_k; v] whose name is the query e_k"
    finding: ClassVar[str] = (
        "Attention recalls associations from few samples; a network without it on the flattened "
        "input does not."
    )
    source: ClassVar[str] = "Arora et al. 2023, “Zoology”, arXiv:2312.04927"

    def __post_init__(self) -> None:
        check_count(self.n_names, "n_names")
        check_count(self.n_keys, "n_keys", maximum=self.n_names)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        names = streams.order("names", n, self.n_names)[:, : self.n_keys]
        values = streams.normal("values", n, self.n_keys)
        asked = streams.integers("asked", self.n_keys, n)
        rows = np.arange(n)
        one_hot = np.eye(self.n_names)
        keys = np.concatenate([one_hot[names], values[:, :, None] / 2], axis=2)
        query = np.concatenate([one_hot[names[rows, asked]], np.zeros((n, 1))], axis=1)
        return SetBatch(keys, query), values[rows, asked]


# ---------------------------------------------------------------- counts and extremes


@dataclass(frozen=True)
class Counting(SetTask):
    """How many keys equal the query: y = #{i : x_i = x_0}, with one-hot symbols.

    Parameters
    ----------
    n_symbols, n_keys : int
        Symbols there are, and keys N of each set.
    """

    n_symbols: int = 8
    n_keys: int = 12

    name: ClassVar[str] = "counting"
    formula: ClassVar[str] = "#{i : xᵢ = x₀}"
    finding: ClassVar[str] = (
        "Weights that do not add up to one count; softmax divides by the total and loses the count."
    )
    source: ClassVar[str] = (
        "Behrens, Biggio and Zdeborová 2024, arXiv:2407.11542; Yehudai et al. 2024, "
        "arXiv:2407.15160"
    )

    def __post_init__(self) -> None:
        _check_sizes(n_symbols=self.n_symbols, n_keys=self.n_keys)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        symbols = streams.integers("keys", self.n_symbols, n, self.n_keys)
        asked = streams.integers("query", self.n_symbols, n)
        one_hot = np.eye(self.n_symbols)
        counts = (symbols == asked[:, None]).sum(axis=1).astype(np.float64)
        return SetBatch(one_hot[symbols], one_hot[asked]), counts


@dataclass(frozen=True)
class Majority(SetTask):
    """The sign of a vote: y = sign(Σ_i sign <β, x_i>), N odd, keys uniform on the unit sphere.

    Parameters
    ----------
    dim, n_keys : int
        Token dimension d and voters N, an odd number.
    """

    dim: int = 6
    n_keys: int = 11

    name: ClassVar[str] = "majority"
    formula: ClassVar[str] = "sign Σ sign ⟨β, xᵢ⟩"
    finding: ClassVar[str] = (
        "The sign comes after pooling: no layer with a linear readout has it, whatever its weights."
    )
    source: ClassVar[str] = (
        "Merrill, Sabharwal and Smith 2022, arXiv:2106.16213 (attention and a threshold after it)"
    )

    def __post_init__(self) -> None:
        _check_sizes(dim=self.dim, n_keys=self.n_keys)
        if self.n_keys % 2 == 0:
            raise ValueError(
                f"`n_keys` must be odd, so that no vote is a tie: got {self.n_keys}. Use "
                f"{self.n_keys + 1}."
            )

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        keys = streams.sphere("keys", n, self.n_keys, self.dim)
        votes = np.sign(keys[:, :, 0])
        return SetBatch(keys), np.sign(votes.sum(axis=1))


@dataclass(frozen=True)
class Maximum(SetTask):
    """The largest coordinate: y = max_i <β, x_i>, keys uniform on the unit sphere.

    Parameters
    ----------
    dim, n_keys : int
        Token dimension d and keys N of each set.
    """

    dim: int = 6
    n_keys: int = 10

    name: ClassVar[str] = "maximum"
    formula: ClassVar[str] = "maxᵢ ⟨β, xᵢ⟩"
    finding: ClassVar[str] = "Softmax weights take a maximum; weights that add up over keys do not."
    source: ClassVar[str] = (
        "Wagstaff et al. 2019, arXiv:1901.09006, on sums over keys; softmax with a large scale "
        "tends to the maximum"
    )

    def __post_init__(self) -> None:
        _check_sizes(dim=self.dim, n_keys=self.n_keys)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        keys = streams.sphere("keys", n, self.n_keys, self.dim)
        return SetBatch(keys), keys[:, :, 0].max(axis=1)


@dataclass(frozen=True)
class PairsOfKeys(SetTask):
    """An interaction of two keys: y = (1/N) Σ_{i≠j} <β, x_i> <γ, x_j>, β and γ orthogonal.

    Keys are independent and uniform on the unit sphere.

    Parameters
    ----------
    dim, n_keys : int
        Token dimension d, at least 2, and keys N of each set, at least 2.

    Notes
    -----
    Given all keys but one, the mean of y over that one is 0 for each of its terms: y is orthogonal
    to every sum of functions of single keys. So a layer whose weights add up over keys has exactly
    Var y as its least error.
    """

    dim: int = 4
    n_keys: int = 6

    name: ClassVar[str] = "pairs"
    formula: ClassVar[str] = "(1/N) Σ_{i≠j} ⟨β, xᵢ⟩⟨γ, xⱼ⟩"
    finding: ClassVar[str] = (
        "Orthogonal to every sum over single keys: additive weights learn exactly nothing. The "
        "normaliser of softmax multiplies functions of different keys, so that softmax learns some."
    )
    source: ClassVar[str] = "Hoeffding's decomposition; proof in the docstring of this class"

    def __post_init__(self) -> None:
        check_count(self.dim, "dim", minimum=2)
        check_count(self.n_keys, "n_keys", minimum=2)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        keys = streams.sphere("keys", n, self.n_keys, self.dim)
        first = keys[:, :, 0]
        second = keys[:, :, 1]
        all_pairs = first.sum(axis=1) * second.sum(axis=1)
        equal_pairs = (first * second).sum(axis=1)
        return SetBatch(keys), (all_pairs - equal_pairs) / self.n_keys


# ---------------------------------------------------------------- two steps, two kinds of cues


@dataclass(frozen=True)
class TwoHops(SetTask):
    """The value of g(f(a)), where half of the keys write down f and the other half g.

    Names are 0 … V−1. Keys are [e_a; e_{f(a)}; 0] and [0; e_b; e_{g(b)}] for all a and b, so that
    f(a) stands in the same block as the names b that it is looked up under. The query is [e_a; 0;
    0]. Labels are the values of a name, equally spaced from −1 to 1.

    Parameters
    ----------
    n_names : int
        V, at least 2; each set has 2V keys of dimension 3V.
    """

    n_names: int = 4

    name: ClassVar[str] = "two-hops"
    formula: ClassVar[str] = "the value of g(f(x₀)); keys are the pairs (a, f(a)) and (b, g(b))"
    finding: ClassVar[str] = (
        "Composition takes two hops; weights that add up over keys in one hop cannot do it."
    )
    source: ClassVar[str] = "Sanford, Hsu and Telgarsky 2024, arXiv:2402.09268"

    def __post_init__(self) -> None:
        check_count(self.n_names, "n_names", minimum=2)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        size = self.n_names
        first = streams.integers("first", size, n, size)
        second = streams.integers("second", size, n, size)
        asked = streams.integers("asked", size, n)
        one_hot = np.eye(size)

        # the keys of f: name and image; the keys of g: their names are images of f
        keys = np.zeros((n, 2 * size, 3 * size))
        keys[:, :size, :size] = one_hot
        keys[:, :size, size : 2 * size] = one_hot[first]
        keys[:, size:, size : 2 * size] = one_hot
        keys[:, size:, 2 * size :] = one_hot[second]

        # the query, and the label by two steps
        query = np.zeros((n, 3 * size))
        query[:, :size] = one_hot[asked]
        rows = np.arange(n)
        image = second[rows, first[rows, asked]]
        return SetBatch(keys, query), np.linspace(-1.0, 1.0, size)[image]


@dataclass(frozen=True)
class PositionAndMeaning(SetTask):
    """Half of the label depends on the position of a key, half on its content.

    The label is y = (1−ω) <β, x_3> + ω Σ_i softmax_i(b <x_0, x_i>) <β, x_i>: the third key, and
    the mean weighed by similarity. Keys are [x_i; e_i] with x_i uniform on the unit sphere and e_i
    the one-hot position; the query is [x_0; 0].

    Parameters
    ----------
    share : float
        ω, from 0 (position alone) to 1 (meaning alone).
    sharpness : float
        b of the similarity.
    dim, n_keys : int
        Dimension d of x_i, tokens have N coordinates more, and keys N, at least 3.
    """

    share: float = 0.5
    sharpness: float = 4.0
    dim: int = 6
    n_keys: int = 8

    name: ClassVar[str] = "position"
    formula: ClassVar[str] = "½⟨β, x₃⟩ + ½ Σ softmaxᵢ(4⟨x₀, xᵢ⟩) ⟨β, xᵢ⟩"
    finding: ClassVar[str] = (
        "One layer can attend by position and by meaning; position is learned from fewer samples."
    )
    source: ClassVar[str] = "Cui, Behrens, Krzakala and Zdeborová 2024, arXiv:2402.03902"

    def __post_init__(self) -> None:
        check_number(self.sharpness, "sharpness")
        if not 0 <= check_number(self.share, "share") <= 1:
            raise ValueError(f"`share` must be from 0 to 1: got {self.share:g}.")
        check_count(self.dim, "dim")
        check_count(self.n_keys, "n_keys", minimum=3)

    def _draw(self, n: int, streams: _Streams) -> tuple[SetBatch, Float[np.ndarray, " n"]]:
        query = streams.sphere("query", n, self.dim)
        content = streams.sphere("keys", n, self.n_keys, self.dim)
        weights = _softmax(self.sharpness * _similarity(query, content))
        by_meaning = (weights * content[:, :, 0]).sum(axis=1)
        by_position = content[:, 2, 0]
        labels = (1 - self.share) * by_position + self.share * by_meaning
        no_position = np.zeros((n, self.n_keys))
        extended_query = np.concatenate([query, no_position], axis=1)
        return SetBatch(_with_positions(content), extended_query), labels


TASKS: dict[str, SetTask] = {
    task.name: task
    for task in (
        AbsoluteAverage(),
        CorrelationPower(),
        SimilarityWeightedMean(),
        NearestKey(),
        SingleLocation(),
        SparseSelection(),
        SparseTokenClasses(),
        InContextRegression(),
        Lookup(),
        Counting(),
        Majority(),
        Maximum(),
        PairsOfKeys(),
        TwoHops(),
        PositionAndMeaning(),
    )
}
"""The fifteen tasks by name, in the sizes that `keyhole reproduce tasks` measures."""


# ---------------------------------------------------------------- a diagnostic of feature maps


def word_sensitivity(
    features: Callable[[SetBatch], Float[np.ndarray, "n p"]],
    n_keys: int,
    dim: int = 16,
    n_replacements: int = 300,
    seed: int = 0,
) -> float:
    """The largest relative change of a feature map when one key of a set is replaced.

    max over x'_1 of |φ(x_0, x'_1, x_2 … x_N) − φ(x_0, x_1 … x_N)| / |φ(x_0, x_1 … x_N)|. Random
    features of the flattened input have one of order 1/√N; softmax attention keeps it at order 1,
    because one key may draw all the weight (Bombari and Mondelli 2024, arXiv:2402.02969).

    Query and keys are uniform on the sphere of radius √d. The replacements tried are the query,
    its negative and random points of that sphere.

    Parameters
    ----------
    features : callable
        Takes a SetBatch, returns an array (n, p).
    n_keys, dim : int
        Keys N and token dimension d.
    n_replacements : int
        Replacements that are tried, at least 2.
    seed : int
        Names the set and the replacements.

    Examples
    --------
    >>> import keyhole as kh
    >>> heads = kh.GaussianHeads(mean=3.0).sample(n_heads=50, dim=16, seed=0)
    >>> for activation in ("relu", "softmax"):
    ...     features = lambda sets: kh.attention_features(sets, heads, activation)
    ...     print(activation, round(word_sensitivity(features, n_keys=256), 1))
    relu 0.1
    softmax 1.0
    """
    n_keys = check_count(n_keys, "n_keys")
    dim = check_count(dim, "dim")
    n_replacements = check_count(n_replacements, "n_replacements", minimum=2)
    streams = _Streams(check_seed(seed))
    radius = math.sqrt(dim)
    query = radius * streams.sphere("query", 1, dim)
    keys = radius * streams.sphere("keys", 1, n_keys, dim)

    # the same set with its first key replaced
    replacements = radius * streams.sphere("replacements", n_replacements, dim)
    replacements[0] = query[0]
    replacements[1] = -query[0]
    changed_keys = np.repeat(keys, n_replacements, axis=0)
    changed_keys[:, 0] = replacements
    same_query = np.repeat(query, n_replacements, axis=0)

    before = np.asarray(features(SetBatch(keys, query)))
    after = np.asarray(features(SetBatch(changed_keys, same_query)))
    changes = np.linalg.norm(after - before, axis=1)
    return float(changes.max() / np.linalg.norm(before))
