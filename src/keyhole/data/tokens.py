"""Tokens before the layer sees them.

Their scale, where the query comes from, and tokens that are missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from keyhole._array import block_size, is_tensor, set_blocks, unit_exponent
from keyhole._checks import as_sequence, check_count, check_float_array, check_pairs
from keyhole.data import statistics
from keyhole.data.arrays import like, of_tensors, on_host
from keyhole.data.sets import (
    PooledSets,
    SampleBatch,
    SetBatch,
    check_samples,
)
from keyhole.registry import POOLINGS

SCALINGS = ("none", "sphere", "standard")
CLIP = 0.1
"""Share of the training range of a coordinate by which it is widened on either side for clipping."""
QUERIES = ("given", "mean", "each")
MEASURES = ("cosine", "dot", "euclidean")


@dataclass(frozen=True)
class TokenRule:
    """How tokens are scaled: learned on the training set, applied to every other.

    Attributes
    ----------
    scaling : "none", "sphere" or "standard"
        "sphere" divides every token by its length (a token of zeros stays); "standard" takes the
        training mean off every coordinate and divides it by √d times its standard deviation, d
        counting the coordinates that vary, so that tokens have length one on average. Queries of
        the dimension of the keys are taken to be of their kind, and go through the same. Those of
        another dimension have a mean and a spread of their own.
    query : "given", "mean" or "each"
        "mean" replaces the query by the mean of the keys, after scaling; "each" makes every key the
        query in turn and pools the features over queries.
    pooling : "mean", "mean+size", "mean+statistics", "sum", "statistics" or "extras"
        Over keys, over queries, and over the sets of a sample. "mean+size" averages, and makes the
        number of keys a further sample-level feature, the last; "mean+statistics" has the mean,
        standard deviation, least and largest value of each coordinate of the keys after it.
        "statistics" makes the features of `keyhole.data.statistics`, and "extras" none: both are
        for fits that do without heads.
    centre, spread : arrays (d,) or None
        For "standard": a token becomes (x − centre) / spread.
    query_centre, query_spread : arrays (d_q,) or None
        The same for queries of another dimension than the keys.
    extras_centre, extras_spread : arrays (c,) or None
        Sample-level features become (z − centre) / spread: their training mean taken off (without
        an intercept it stays), divided by their standard deviation (without an intercept by their
        root mean square), times ``extras_scale``.
    extras_scale : float
    low, high : arrays (d,) or None
        Tokens are clipped to these, the training range widened by a tenth, before anything else;
        not clipped if None. ``query_low`` and ``query_high`` are those of given queries.
    hops : tuple of arrays (P, D_h, D)
        Those of the head distribution: the query the layer sees is extended, last of all, by what
        each hop finds (`pass_hops`).
    """

    scaling: str
    query: str
    pooling: str
    centre: Float[np.ndarray, " d"] | None = field(default=None, repr=False)
    spread: Float[np.ndarray, " d"] | None = field(default=None, repr=False)
    query_centre: Float[np.ndarray, " q"] | None = field(default=None, repr=False)
    query_spread: Float[np.ndarray, " q"] | None = field(default=None, repr=False)
    extras_centre: Float[np.ndarray, " c"] | None = field(default=None, repr=False)
    extras_spread: Float[np.ndarray, " c"] | None = field(default=None, repr=False)
    extras_scale: float = 1.0
    hops: tuple[Float[np.ndarray, "p _ e"], ...] = field(default=(), repr=False)
    low: Float[np.ndarray, " d"] | None = field(default=None, repr=False)
    high: Float[np.ndarray, " d"] | None = field(default=None, repr=False)
    query_low: Float[np.ndarray, " q"] | None = field(default=None, repr=False)
    query_high: Float[np.ndarray, " q"] | None = field(default=None, repr=False)

    @classmethod
    def learn(
        cls,
        batch: SampleBatch,
        scaling: str,
        query: str = "given",
        pooling: str = "mean",
        weights: Float[np.ndarray, " n"] | None = None,
        *,
        fit_intercept: bool = True,
        clips: bool = False,
    ) -> TokenRule:
        """Learn a rule on training samples, of the given weights; extras at the scale 1.

        Examples
        --------
        >>> import numpy as np
        >>> rule = TokenRule.learn(SetBatch(np.array([[[0.0], [4.0]]])), "standard")
        >>> rule.apply(SetBatch(np.array([[[0.0], [2.0]]]))).tokens.ravel()
        array([-1.,  0.])
        """
        batch.check_query_rule(query)
        rule = cls(scaling=scaling, query=query, pooling=pooling)
        if clips:
            rule = rule._with_range_of(batch)
        batch = rule._with_set_features(batch)

        # sample-level features
        if batch.extras is not None:
            one_row_each = np.ones(len(batch), int)
            centre, spread, moving = mean_and_spread(batch.extras, one_row_each, weights)
            if not fit_intercept:
                # the root mean square, of the mean and of what varies among samples that have
                # weight
                size = np.hypot(centre, np.where(moving, spread, 0.0))
                centre = np.zeros_like(centre)
                spread = np.where(size > 0, size, 1.0)
            rule = replace(rule, extras_centre=centre, extras_spread=spread)

        # keys, and queries of another kind
        if scaling == "standard":
            if learns_from_statistics(batch):
                centre, spread = standardisation_of_sets(SetStatistics.of(batch), weights)
            else:
                centre, spread = standardisation(batch.sets.tokens, batch.token_counts, weights)
            rule = replace(rule, centre=centre, spread=spread)
            if batch.query is not None and batch.query_dim != batch.dim and query == "given":
                query_rows = on_host(batch.query)
                centre, spread = standardisation(query_rows, batch.set_counts, weights)
                rule = replace(rule, query_centre=centre, query_spread=spread)
        return rule

    @property
    def pooling_of_sets(self) -> str:
        """What is done over keys: "mean" or "sum"."""
        return "sum" if POOLINGS[self.pooling].is_sum else "mean"

    def n_extras(self, n_given: int, dim: int) -> int:
        """How many sample-level features the layer sees of samples with ``n_given`` of their own.

        ``dim`` is the dimension of the keys.
        """
        adds = POOLINGS[self.pooling].adds
        n_of_rows = {"": 0, "size": 1, "statistics": 1 + 4 * dim}
        n_of_rows["quantiles"] = 1 + len(statistics.NAMES) * dim
        return n_given + n_of_rows[adds]

    def _with_range_of(self, batch: SampleBatch) -> TokenRule:
        """The same rule with the range of the tokens of some samples, widened by a tenth."""
        low, high = range_of(batch.sets)
        margin = CLIP * (high - low)
        rule = replace(self, low=low - margin, high=high + margin)
        if batch.sets.query is None or self.query != "given":
            return rule
        queries = on_host(batch.sets.query).astype(np.float64)
        low, high = queries.min(axis=0), queries.max(axis=0)
        margin = CLIP * (high - low)
        return replace(rule, query_low=low - margin, query_high=high + margin)

    def clipped(self, batch: SampleBatch) -> SampleBatch:
        """The samples with their tokens in the training range."""
        if self.low is None:
            return batch
        sets = batch.sets
        if self.query != "given" and sets.query is not None:
            sets = sets.with_query(None)
        query_low = self.low if self.query_low is None else self.query_low
        query_high = self.high if self.query_high is None else self.query_high
        return batch.with_sets(
            sets.scaled(
                partial(_clipped, low=self.low, high=self.high),
                partial(_clipped, low=query_low, high=query_high),
            )
        )

    def is_outside(self, batch: SampleBatch) -> Bool[np.ndarray, " n"]:
        """Which samples have a token that clipping moves."""
        if self.low is None:
            return np.zeros(len(batch), bool)
        least, largest = least_and_largest(batch)
        return np.asarray(((least < self.low) | (largest > self.high)).any(axis=1))

    def shares_of_statistics(
        self, prepared: SampleBatch
    ) -> tuple[Float[np.ndarray, "k c"], Float[np.ndarray, " c"]]:
        """What every key of prepared samples adds to the last, scaled sample-level features.

        They are those that the pooling has made of the keys: (S − centre)/spread with S a sum over
        keys. The shares are divided by the spread; the second array is centre/spread. Without such
        features there are no columns.
        """
        if POOLINGS[self.pooling].adds != "quantiles":
            n_keys = int(prepared.unpooled.token_counts.sum())
            return np.zeros((n_keys, 0)), np.zeros(0)
        assert self.extras_centre is not None
        assert self.extras_spread is not None
        shares = statistics.row_shares(prepared)
        n_columns = shares.shape[1]
        spread = self.extras_spread[-n_columns:]
        return shares / spread, self.extras_centre[-n_columns:] / spread

    def _with_set_features(self, batch: SampleBatch) -> SampleBatch:
        """The samples with the sample-level features that the pooling makes of their sets."""
        adds = POOLINGS[self.pooling].adds
        if adds == "size":
            return with_size(batch)
        if adds == "statistics":
            return with_statistics(batch)
        if adds == "quantiles":
            columns = statistics.set_statistics(self.clipped(batch))
            if batch.extras is not None:
                columns = np.hstack([batch.extras, columns])
            return batch.with_extras(columns)
        if adds:
            raise ValueError(f"pooling {self.pooling!r} adds {adds!r}, which is not known here.")
        return batch

    def with_extras_scale(self, scale: float) -> TokenRule:
        """The same rule with extras of another scale."""
        if self.extras_spread is None:
            return self
        spread = self.extras_spread * (self.extras_scale / scale)
        return replace(self, extras_spread=spread, extras_scale=scale)

    def with_hops_of(self, distribution: Any) -> TokenRule:
        """The same rule with the hops of a head distribution, if it has any."""
        hops = getattr(distribution, "hops_", ())
        if hops and self.query == "each":
            raise ValueError(
                "further hops extend a query, and with query='each' every key is the query in "
                "turn. Use query='given' or query='mean', or a head distribution of one hop."
            )
        if not hops and not self.hops:
            return self
        return replace(self, hops=hops)

    def query_dim(self, batch: SampleBatch) -> int:
        """The dimension of the queries that the layer will see.

        Those given, or made of keys, and what hops find.
        """
        first_hop_dim = batch.dim
        if self.query == "given":
            first_hop_dim = batch.query_dim
        n_patterns = sum(len(hop) for hop in self.hops)
        return first_hop_dim + n_patterns * batch.dim

    def apply(self, batch: SampleBatch) -> SetBatch | PooledSets:
        """Scale, make queries, and pool."""
        batch = self._with_set_features(batch)
        batch = self.clipped(batch)
        sets = self.scaled(batch.sets)
        if self.query == "mean":
            sets = sets.with_query(self._mean_query(batch.sets, sets))
        elif self.query == "each":
            # a query that was given is not used: samples that differ in it alone are duplicates
            sets = sets.with_query(None)
        if self.hops:
            sets = pass_hops(sets, self.hops)
        samples = batch.with_sets(sets)
        if batch.extras is not None and self.extras_centre is not None:
            extras = (batch.extras - self.extras_centre) / self.extras_spread
            samples = samples.with_extras(extras)
        return samples.pooled(self.pooling_of_sets, each=self.query == "each")

    def _mean_query(self, given: SetBatch, scaled: SetBatch) -> Float[Any, "n d"]:
        """The mean of the scaled keys of each set, where the keys live."""
        if not learns_from_statistics(given):
            return _means_of_keys(scaled)
        # scaling to the sphere must come first; else the mean of scaled keys is the scaled mean,
        # and the means of the keys are known
        if self.scaling == "sphere":
            means = SetStatistics.of(scaled).mean
        else:
            means = SetStatistics.of(given).mean
        if self.scaling == "standard":
            means = _standardised(means, self.centre, self.spread)
        return like(means.astype(scaled.dtype), scaled.stored)

    def scaled(self, batch: SetBatch) -> SetBatch:
        """Keys and queries after scaling; keys of large sets are scaled as they are asked for.

        Folding the scale and the mean into the heads instead would save this work, some 3 % of a
        fit of 512 heads, and lose digits where the mean is far larger than the spread.
        """
        if self.scaling == "none" or not POOLINGS[self.pooling].has_heads:
            # statistics of the rows are of rows as they are, and scaled as sample-level features
            return batch
        if self.scaling == "sphere":
            return batch.scaled(_to_sphere)
        # a query that will be replaced need not fit the keys
        if self.query != "given":
            batch = batch.with_query(None)
        # queries of the kind of the keys are scaled as these are
        query_centre = self.centre
        query_spread = self.spread
        if self.query_centre is not None:
            query_centre = self.query_centre
            query_spread = self.query_spread
        return batch.scaled(
            partial(_standardised, centre=self.centre, spread=self.spread),
            partial(_standardised, centre=query_centre, spread=query_spread),
        )


def pass_hops(sets: SetBatch, hops: Sequence[Float[np.ndarray, "p _ e"]]) -> SetBatch:
    """The same sets, their queries extended by what each pattern of each hop finds.

    Σ_i a_i x_i, hop after hop.

    What is found is rounded to float32, so that duplicates of a sample remain duplicates whatever
    the order of their keys. By NumPy, wherever the sets are.
    """
    sets = sets.numpy()
    for hop in hops:
        # the mean of the keys of each set, weighed by the attention of each pattern: (n, P, d)
        weights = weights_of_hop(sets, hop)
        means = np.empty((len(sets), len(hop), sets.dim), np.float32)
        for rows in _hop_blocks(sets, hop):
            block = sets[rows]
            block_weights = weights[sets.offsets[rows.start] : sets.offsets[rows.stop]]
            weighted_keys = block_weights[:, :, None] * block.tokens[:, None, :]
            means[rows] = np.add.reduceat(weighted_keys, block.offsets[:-1], axis=0)
        # they follow the query, which the next hop asks with
        query = sets.extended_query()[:, :-1]
        query = np.concatenate([query, means.reshape(len(sets), -1)], axis=1)
        sets = sets.with_query(query.astype(sets.dtype))
    return sets


def weights_of_hop(sets: SetBatch, hop: Float[np.ndarray, "p f e"]) -> Float[np.ndarray, "t p"]:
    """softmax_i(x~_0ᵀ U_p x~_i) of every pattern p of a hop on every key, set after set."""
    n_patterns, query_dim, key_dim = hop.shape
    side_by_side = hop.transpose(1, 0, 2).reshape(query_dim, -1)  # [U_1 … U_P]
    weights = np.empty((len(sets.tokens), n_patterns))
    for rows in _hop_blocks(sets, hop):
        block = sets[rows]
        starts = block.offsets[:-1]
        lengths = block.lengths
        # x~_0ᵀ U_p of every set, then its product with every key of the set
        directions = block.extended_query().astype(np.float64) @ side_by_side
        directions = directions.reshape(len(block), n_patterns, key_dim)
        directions = np.repeat(directions, lengths, axis=0)
        scores = np.einsum("tpe,te->tp", directions, block.extended_keys())
        # softmax over the keys of each set, its largest score taken off so that exp is at most 1
        largest = np.maximum.reduceat(scores, starts, axis=0)
        scores -= np.repeat(largest, lengths, axis=0)
        np.exp(scores, out=scores)
        sums = np.add.reduceat(scores, starts, axis=0)
        scores /= np.repeat(sums, lengths, axis=0)
        weights[sets.offsets[rows.start] : sets.offsets[rows.stop]] = scores
    return weights


def _hop_blocks(sets: SetBatch, hop: Float[np.ndarray, "p f e"]) -> list[slice]:
    """Runs of sets whose keys, times patterns, take 64 MiB."""
    return set_blocks(sets.offsets, block_size(8 * len(hop) * hop.shape[2], 2**26))


def _clipped(tokens: Float[Any, "t d"], low: Any, high: Any) -> Float[Any, "t d"]:
    """Every coordinate moved into its range, where the tokens live."""
    if is_tensor(tokens):
        return tokens.clamp(like(low, tokens).to(tokens.dtype), like(high, tokens).to(tokens.dtype))
    return np.asarray(np.clip(tokens, low, high).astype(tokens.dtype))


def range_of(sets: SetBatch) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """The least and the largest value of every coordinate of the keys."""
    least, largest = least_and_largest(sets)
    return least.min(axis=0), largest.max(axis=0)


def least_and_largest(
    batch: SampleBatch,
) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "n d"]]:
    """The least and the largest value of every coordinate of the keys of each sample."""
    of_samples = SetStatistics.of(batch)
    return of_samples.least, of_samples.largest


def _standardised(tokens: Float[Any, "t d"], centre: Any, spread: Any) -> Float[Any, "t d"]:
    """(x − centre) / spread of every token, where the tokens live."""
    if is_tensor(tokens):
        return of_tensors().standardised(tokens, centre, spread)
    return np.asarray(((tokens - centre) / spread).astype(tokens.dtype))


def _to_sphere(tokens: Float[Any, "t d"]) -> Float[Any, "t d"]:
    """Every token divided by its length, where the tokens live."""
    if is_tensor(tokens):
        return of_tensors().to_sphere(tokens)
    with np.errstate(over="ignore", under="ignore"):
        squares = np.einsum("td,td->t", tokens, tokens)

    # rows whose squares overflow, or lose digits near the smallest number, have their largest
    # coordinate divided out first; tokens of zeros are among them, and stay
    number = np.finfo(tokens.dtype)
    has_safe_squares = (squares > number.tiny / number.eps**2) & (squares < number.max)
    extreme = np.flatnonzero(~has_safe_squares)
    if not len(extreme):
        return np.asarray(tokens / np.sqrt(squares)[:, None])
    tokens = np.array(tokens)
    largest = np.abs(tokens[extreme]).max(axis=1, keepdims=True)
    tokens[extreme] /= np.where(largest > 0, largest, 1)
    squares[extreme] = np.einsum("td,td->t", tokens[extreme], tokens[extreme])
    lengths = np.sqrt(squares)[:, None]
    return np.asarray(tokens / np.where(lengths > 0, lengths, 1))


def standardisation(
    tokens: Float[np.ndarray, "t d"],
    counts: Int[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"] | None,
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """The mean of tokens, and √d times their standard deviation.

    ``counts`` of the tokens belong to each sample.
    """
    centre, spread, moving = mean_and_spread(tokens, counts, weights)
    return centre, spread * math.sqrt(max(1, int(moving.sum())))


def mean_and_spread(
    tokens: Float[np.ndarray, "t d"],
    counts: Int[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"] | None,
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"], Bool[np.ndarray, " d"]]:
    """Means, standard deviations (1 for a coordinate that never moves), and which coordinates move.

    Tokens of samples without weight do not count.
    """
    # the share of each token in the mean
    if weights is None:
        weights = np.ones(len(counts))
    share = np.repeat(weights, counts)
    has_weight = share > 0
    tokens = tokens[has_weight].astype(np.float64)
    share = share[has_weight] / share.sum()

    # in float64, every coordinate in units of its own size, so that squares neither overflow nor
    # vanish, and relative to the first token: a large common offset costs no digits
    units = unit_exponent(tokens, axis=0)
    scaled = np.ldexp(tokens, -units)
    first = scaled[0]
    shifted = scaled - first
    centre = shifted.T @ share
    spread = np.sqrt(np.square(shifted - centre).T @ share)

    # a coordinate that never moves, but for rounding, says nothing
    is_still = spread <= 1e-12 * np.abs(scaled).max(axis=0)
    means = np.ldexp(centre + first, units)
    deviations = np.where(is_still, 1.0, np.ldexp(spread, units))
    return means, deviations, ~is_still


def with_size(samples: Any) -> Any:
    """The same samples with the number of keys of each as a further sample-level feature.

    For ragged sets: a layer averages over keys, and a mean does not know how many there were.

    Parameters
    ----------
    samples : SetBatch or SetGroups

    Examples
    --------
    >>> import numpy as np
    >>> with_size(SetBatch([np.ones((2, 3)), np.ones((5, 3))])).extras
    array([[2.],
           [5.]])
    """
    sizes = samples.token_counts.astype(np.float64)[:, None]
    if samples.extras is None:
        return samples.with_extras(sizes)
    return samples.with_extras(np.hstack([samples.extras, sizes]))


def with_statistics(samples: Any) -> Any:
    """The same samples with statistics of their keys as further sample-level features.

    They are the number of keys, then the mean, the standard deviation, the least and the largest
    value of every coordinate. What a maximum or a spread decides is then a linear function.

    Parameters
    ----------
    samples : SetBatch or SetGroups

    Examples
    --------
    >>> import numpy as np
    >>> with_statistics(SetBatch([np.array([[1.0], [3.0]])])).extras
    array([[2., 2., 1., 1., 3.]])
    """
    statistics = SetStatistics.of(samples).columns()
    if samples.extras is None:
        return samples.with_extras(statistics)
    return samples.with_extras(np.hstack([samples.extras, statistics]))


@dataclass(frozen=True)
class SetStatistics:
    """The number of keys of every sample, and statistics of each coordinate of its keys."""

    sizes: Int[np.ndarray, " n"]
    mean: Float[np.ndarray, "n d"]
    deviation: Float[np.ndarray, "n d"]
    least: Float[np.ndarray, "n d"]
    largest: Float[np.ndarray, "n d"]

    @classmethod
    def of(cls, samples: SampleBatch) -> SetStatistics:
        """Those of some samples, whatever the order of their keys; of a SetBatch computed once.

        The plain version is `summaries.plain_statistics`.
        """
        sets = samples.sets
        if samples.is_plain:
            of_sets = sets
        else:
            # all keys of a sample as one set
            of_sets = sets.merged(samples.set_offsets)
        mean, deviation, least, largest = of_sets.summary("statistics").transpose(1, 0, 2)
        return cls(
            sizes=of_sets.lengths, mean=mean, deviation=deviation, least=least, largest=largest
        )

    def columns(self) -> Float[np.ndarray, "n c"]:
        """All of them side by side."""
        return np.hstack([self.sizes[:, None], self.mean, self.deviation, self.least, self.largest])


def coordinate_sizes(sets: SetBatch) -> Float[np.ndarray, " d"]:
    """The largest absolute value of every coordinate of the keys."""
    if learns_from_statistics(sets):
        statistics = SetStatistics.of(sets)
        sizes = np.maximum(-statistics.least, statistics.largest)
    else:
        sizes = np.abs(sets.tokens)
    return np.asarray(sizes.max(axis=0), dtype=np.float64)


def coordinate_sizes_of_queries(sets: SetBatch) -> Float[np.ndarray, " q"]:
    """The same of queries; none where there are no queries."""
    if sets.query is None:
        return np.zeros(0)
    queries = on_host(sets.query).astype(np.float64)
    return np.asarray(np.abs(queries).max(axis=0))


def learns_from_statistics(samples: SampleBatch) -> bool:
    """Whether what is learned of keys is learned of the statistics of each sample.

    So it is where these are much smaller than the keys, and for keys on a device, where only the
    statistics come to the host.
    """
    is_on_device = is_tensor(samples.sets.stored)
    return is_on_device or samples.sets.n_tokens >= LONG_SET * len(samples)


LONG_SET = 16
"""Keys of a sample, on average, from which on what is learned of keys is learned of the statistics
of each sample: these are computed once, in one pass over the keys."""


def standardisation_of_sets(
    statistics: SetStatistics, weights: Float[np.ndarray, " n"] | None
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """`standardisation` of all keys, from the statistics of each sample.

    A sample of N_i keys and weight w_i has w_i N_i of the total weight. The variance is that within
    samples and that of their means (Chan, Golub and LeVeque 1979).
    """
    shares = statistics.sizes.astype(np.float64)
    if weights is not None:
        shares = shares * weights
    rows = np.flatnonzero(shares > 0)
    shares = shares[rows] / shares.sum()
    means = statistics.mean[rows]
    deviations = statistics.deviation[rows]
    sizes = np.maximum(np.abs(statistics.least[rows]), np.abs(statistics.largest[rows])).max(axis=0)

    # in units of the size of each coordinate, so that squares neither overflow nor vanish, and
    # relative to the first mean: a large common offset costs no digits
    units = np.where(sizes > 0, np.frexp(sizes)[1], 0)
    first = np.ldexp(means[0], -units)
    shifted = np.ldexp(means, -units) - first
    centre = shares @ shifted
    within = shares @ np.square(np.ldexp(deviations, -units))
    between = shares @ np.square(shifted - centre)
    spread = np.sqrt(within + between)

    # a coordinate that never moves, but for rounding, says nothing
    is_still = spread <= 1e-12 * np.ldexp(sizes, -units)
    n_moving = max(1, int((~is_still).sum()))
    deviation = np.where(is_still, 1.0, np.ldexp(spread, units))
    return np.ldexp(centre + first, units), deviation * math.sqrt(n_moving)


def with_similarity(
    samples: Any,
    measure: str | Sequence[str] = "cosine",
    *,
    pairs: ArrayLike | None = None,
) -> Any:
    """The same samples, each key with its similarity to the query of its set as a last coordinate.

    For targets that depend on how much a key is like the query, such as ranking: is this candidate
    like something in the history? The heads can also learn this from keys and queries, from more
    samples. It changes nothing where the query has nothing to do with the keys.

    The query gets what it has with itself: 1, its squared length, or 0. So a query of the keys'
    kind stays one, and is scaled as they are.

    Parameters
    ----------
    samples : SetBatch or SetGroups
        With queries.
    measure : "cosine", "dot" or "euclidean", or several of them
        "cosine" is the cosine of the angle between the two, 0 where one of them is zero; "dot"
        their inner product; "euclidean" minus their distance. All are larger for keys that are
        more alike. Several give a coordinate each, in their order.
    pairs : sequence of (query coordinate, key coordinate), optional
        Coordinates that are compared. By default the ``pairs`` of the batch, or all coordinates
        where keys and query have equally many.

    Examples
    --------
    >>> import numpy as np
    >>> batch = SetBatch([np.array([[3.0, 4.0], [0.0, 2.0]])], query=np.array([[0.0, 1.0]]))
    >>> with_similarity(batch).tokens
    array([[3. , 4. , 0.8],
           [0. , 2. , 1. ]])
    >>> with_similarity(batch, ["dot", "euclidean"]).tokens[:, 2:].round(2)
    array([[ 4.  , -4.24],
           [ 2.  , -1.  ]])

    In a pipeline, as any function of the samples:

    >>> import keyhole as kh
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import FunctionTransformer
    >>> similarity = FunctionTransformer(with_similarity, kw_args={"measure": "dot"})
    >>> model = make_pipeline(similarity, kh.AttentionClassifier())
    """
    check_samples(samples, "samples")
    measures = _checked_measures(measure)
    sets = samples.sets
    if sets.query is None:
        raise ValueError(
            f"sets must have a query: this {type(samples).__name__} has none. Pass "
            "kh.SetBatch(keys, query), one query for each set."
        )

    # the coordinates that are compared
    if pairs is None:
        stated_pairs = sets.pairs
    else:
        stated_pairs = check_pairs(pairs, samples.query_dim, sets.dim)
    if stated_pairs is None and samples.query_dim != sets.dim:
        raise ValueError(
            f"keys and query must have coordinates of one kind: keys have {sets.dim}, queries "
            f"{samples.query_dim}. Say which of them mean the same with "
            "pairs=[(query coordinate, key coordinate), …], here or in kh.SetBatch."
        )
    query_columns = np.arange(samples.query_dim)
    key_columns = np.arange(sets.dim)
    if stated_pairs is not None:
        query_columns, key_columns = np.array(stated_pairs).T

    # similarities, in float64 and in host memory, a block of sets at a time
    in_memory = sets.numpy()
    queries = in_memory.query[:, query_columns].astype(np.float64)
    of_keys = np.empty((len(in_memory.tokens), len(measures)))
    for rows in set_blocks(in_memory.offsets, block_size(8 * len(key_columns), 2**26)):
        block = in_memory[rows]
        keys = block.tokens[:, key_columns].astype(np.float64)
        queries_of_keys = np.repeat(queries[rows], block.lengths, axis=0)
        places = slice(in_memory.offsets[rows.start], in_memory.offsets[rows.stop])
        for j, name in enumerate(measures):
            of_keys[places, j] = _similarity(keys, queries_of_keys, name)
    of_queries = np.stack([_similarity(queries, queries, name) for name in measures], axis=1)
    _refuse_infinite_similarities(of_keys, of_queries, measures, in_memory.offsets)

    # similarities are the last coordinates of keys and queries, and mean the same
    batch_pairs = sets.pairs
    if batch_pairs is None and samples.query_dim != sets.dim:
        batch_pairs = stated_pairs
    if batch_pairs is not None:
        new_pairs = [(samples.query_dim + j, sets.dim + j) for j in range(len(measures))]
        batch_pairs = (*batch_pairs, *new_pairs)
    return samples.with_sets(sets.with_coordinates(of_keys, of_queries, batch_pairs))


def _checked_measures(measure: Any) -> tuple[str, ...]:
    """Names of measures as a tuple, each known and there once."""
    names = (measure,) if isinstance(measure, str) else tuple(measure)
    are_known = all(name in MEASURES for name in names)
    if not names or not are_known or len(set(names)) < len(names):
        raise ValueError(
            f"`measure` must be one of {', '.join(map(repr, MEASURES))}, or several of them, each "
            f"once: got {measure!r:.100}."
        )
    return names


def _similarity(
    keys: Float[np.ndarray, "t d"], queries: Float[np.ndarray, "t d"], measure: str
) -> Float[np.ndarray, " t"]:
    """The similarity of each row of ``keys`` to the same row of ``queries``."""
    # a product and its sum along rows, so that equal rows give equal bits wherever they stand
    with np.errstate(over="ignore"):
        if measure == "cosine":
            return np.asarray((_to_sphere(keys) * _to_sphere(queries)).sum(axis=1))
        if measure == "dot":
            return np.asarray((keys * queries).sum(axis=1))
        return -np.sqrt(np.square(keys - queries).sum(axis=1))


def _refuse_infinite_similarities(
    of_keys: Float[np.ndarray, "t m"],
    of_queries: Float[np.ndarray, "n m"],
    measures: tuple[str, ...],
    offsets: Int[np.ndarray, " o"],
) -> None:
    """Raise where numbers are so large that their products are not finite."""
    for similarities, noun in ((of_keys, "key"), (of_queries, "the query")):
        is_infinite = ~np.isfinite(similarities)
        if not is_infinite.any():
            continue
        row, j = (int(k) for k in np.argwhere(is_infinite)[0])
        place = f"the query of set {row}"
        if noun == "key":
            i = int(np.searchsorted(offsets, row, side="right")) - 1
            place = f"key {row - int(offsets[i])} of set {i}"
        raise ValueError(
            f"the similarity {measures[j]!r} must be finite: {place} has {similarities[row, j]}. "
            "Scale the tokens, or use 'cosine'."
        )


def _means_of_keys(sets: SetBatch) -> Float[np.ndarray, "n d"]:
    """The mean of the keys of each set, to the last bit the same for any order of its keys.

    Duplicates of a sample are found by comparing bits, and a plain sum depends on the order. Here
    each number is cut, at places that depend on the largest of its set alone, into two parts whose
    sums are exact. What remains is less than the rounding of the result.
    """
    starts = sets.offsets[:-1]
    counts = sets.lengths
    rest = sets.tokens.astype(np.float64)
    # in units of a power of two above the sum, so that nothing overflows or is lost below the
    # smallest number
    _, exponent = np.frexp(np.maximum.reduceat(np.abs(rest), starts, axis=0))
    _, room = np.frexp(counts.astype(np.float64))
    exponent += room[:, None]
    rest = np.ldexp(rest, -np.repeat(exponent, counts, axis=0))
    # adding and subtracting a large number leaves the leading bits of a part, and these sum exactly
    sums = np.zeros(exponent.shape)
    for cut in (np.full(len(counts), 1.5), np.ldexp(1.5, room - 52)):
        cuts = np.repeat(cut, counts)[:, None]
        part = (rest + cuts) - cuts
        rest -= part
        sums += np.add.reduceat(part, starts, axis=0)
    return np.asarray(np.ldexp(sums / counts[:, None], exponent).astype(sets.tokens.dtype))


def drop_missing(keys: Any) -> list[Float[np.ndarray, "k d"]]:
    """Drop the tokens that hold a NaN or a masked entry.

    A set that has none left gets one token of zeros.

    The rule for missing tokens: a set is what was observed of it. `SetBatch` itself refuses NaN, so
    that nothing is dropped unless asked.

    Parameters
    ----------
    keys : sequence of n arrays (N_i, d), or an array (n, N, d)

    Examples
    --------
    >>> import numpy as np
    >>> padded = np.array([[[1.0, 2.0], [np.nan, np.nan]], [[np.nan, 0.0], [3.0, 4.0]]])
    >>> SetBatch(drop_missing(padded)).lengths
    array([1, 1])
    """
    keys = as_sequence(keys)
    sets = []
    for tokens in _token_arrays([_with_nan(keys[i]) for i in range(len(keys))]):
        observed = tokens[~np.isnan(tokens).any(axis=1)]
        if len(observed) == 0:
            observed = np.zeros((1, tokens.shape[1]), tokens.dtype)
        sets.append(observed)
    return sets


def _with_nan(tokens: Any) -> Any:
    """Tokens whose masked entries are NaN."""
    if not isinstance(tokens, np.ma.MaskedArray):
        return tokens
    if tokens.dtype.kind != "f":
        tokens = tokens.astype(np.float64)
    return np.ma.filled(tokens, np.nan)


def _token_arrays(keys: Any) -> Iterator[Float[np.ndarray, "k d"]]:
    """The tokens of each set, checked."""
    keys = as_sequence(keys)
    for i in range(len(keys)):
        tokens = check_float_array(keys[i], f"keys[{i}]")
        if tokens.ndim != 2:
            raise ValueError(
                f"each set must have shape (N_i, d): set {i} has shape {tokens.shape}."
            )
        yield tokens


def windows(
    series: Any, width: int, stride: int = 1, *, split: bool = True
) -> list[Float[np.ndarray, "k e"]]:
    """Cut each time series into overlapping windows, which become the keys of its set.

    Parameters
    ----------
    series : sequence of n arrays (T_i,) or (T_i, channels)
        At least ``width`` steps each.
    width, stride : int
        Steps of a window, and from one window to the next; the last window ends with the series.
    split : bool
        Whether to separate the shape of a window from its level (mean) and amplitude (standard
        deviation), for each channel. A token is then the shape, with mean 0 and length √width
        (zeros where nothing varies), followed by level and amplitude.

    Returns
    -------
    list of n arrays (windows, width · channels), or (windows, (width + 2) · channels) if split

    Examples
    --------
    >>> import numpy as np
    >>> windows([np.arange(5.0)], width=3, stride=2, split=False)[0]
    array([[0., 1., 2.],
           [2., 3., 4.]])
    >>> windows([np.array([0.0, 4.0, 0.0, 4.0])], width=2, stride=2)[0]
    array([[-1.,  1.,  2.,  2.],
           [-1.,  1.,  2.,  2.]])
    """
    width = check_count(width, "width")
    stride = check_count(stride, "stride")
    series = as_sequence(series)
    sets = []
    for i in range(len(series)):
        steps = check_float_array(series[i], f"series[{i}]").astype(np.float64)
        if steps.ndim not in (1, 2) or len(steps) < width:
            raise ValueError(
                f"every series must have shape (T,) or (T, channels) with T ≥ width = {width}: "
                f"series {i} has shape {steps.shape}. Use a smaller width, or leave it out."
            )
        steps = steps.reshape(len(steps), -1)

        # windows (windows, channels, width), one of which ends with the series
        last_start = len(steps) - width
        starts = np.unique(np.append(np.arange(0, last_start + 1, stride), last_start))
        cut = steps[starts[:, None] + np.arange(width)].transpose(0, 2, 1)
        if split:
            level = cut.mean(axis=2, keepdims=True)
            amplitude = cut.std(axis=2, keepdims=True)
            shape = (cut - level) / np.where(amplitude > 0, amplitude, 1.0)
            cut = np.concatenate([shape, level, amplitude], axis=2)
        sets.append(cut.reshape(len(cut), -1))
    return sets


def with_ages(keys: Any, n_ages: int) -> list[Float[np.ndarray, "k e"]]:
    """Append to each key its age, as ``n_ages`` coordinates of 0 and 1; the last key has age 0.

    Sets with an order.

    Keys of age ``n_ages − 1`` and above share the last coordinate.

    Examples
    --------
    >>> import numpy as np
    >>> with_ages([np.array([[7.0], [8.0], [9.0]])], n_ages=2)[0]
    array([[7., 0., 1.],
           [8., 0., 1.],
           [9., 1., 0.]])
    """
    n_ages = check_count(n_ages, "n_ages")
    sets = []
    for tokens in _token_arrays(keys):
        ages = np.minimum(np.arange(len(tokens))[::-1], n_ages - 1)
        one_hot = np.eye(n_ages, dtype=tokens.dtype)[ages]
        sets.append(np.concatenate([tokens, one_hot], axis=1))
    return sets


def with_shared(keys: Any, query: Any) -> list[Float[np.ndarray, "k e"]]:
    """Append to each key its products, coordinate by coordinate, with the query of its set.

    What the two share.

    ``query`` is an array (n, d) of the keys' kind. Of zeros and ones a product is 1 where both have
    what it means.

    Examples
    --------
    >>> import numpy as np
    >>> with_shared([np.array([[1.0, 0.0], [1.0, 1.0]])], np.array([[0.0, 1.0]]))[0]
    array([[1., 0., 0., 0.],
           [1., 1., 0., 1.]])
    """
    queries = check_float_array(query, "query")
    if len(queries) != len(keys):
        raise ValueError(
            f"`query` must have one row per set: got {len(queries)} rows for {len(keys)} sets."
        )
    sets = []
    for i, tokens in enumerate(_token_arrays(keys)):
        if tokens.shape[1:] != queries.shape[1:]:
            raise ValueError(
                f"keys and query must have coordinates of one kind: set {i} has shape "
                f"{tokens.shape}, `query` {queries.shape}. Choose the columns they have in common."
            )
        sets.append(np.concatenate([tokens, tokens * queries[i]], axis=1))
    return sets
