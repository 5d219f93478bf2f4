"""Where the hops of learned heads start, and the ages of keys, which a descent moves a little."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from keyhole.attention.features import like_tokens
from keyhole.attention.heads import identity_mean
from keyhole.data import arrays
from keyhole.data.sets import SetBatch
from keyhole.solve.matrices import on_host


@dataclass(frozen=True)
class HopStrengths:
    """Multiples of the identity that the matrices of several hops start from.

    A positive strength makes a hop prefer keys that resemble something, a negative one keys that do
    not: the query, what the hop just before found (newest), or what hops before that found.
    The last hop, which reads the output off, has strengths of its own.
    """

    first_query: float
    query: float
    newest_found: float
    earlier_found: float
    last_query: float
    last_newest_found: float
    last_earlier_found: float
    older_than_all: bool
    """Whether keys should be older than all that was found, or than the newest of it only."""


SIMILAR = HopStrengths(
    first_query=3.0,
    query=3.0,
    newest_found=2.0,
    earlier_found=2.0,
    last_query=1.0,
    last_newest_found=3.0,
    last_earlier_found=3.0,
    older_than_all=True,
)
"""Every hop prefers what resembles the query or anything found so far."""

CHAIN = HopStrengths(
    first_query=5.0,
    query=-4.0,
    newest_found=6.0,
    earlier_found=-4.0,
    last_query=-4.0,
    last_newest_found=6.0,
    last_earlier_found=-4.0,
    older_than_all=False,
)
"""Every hop moves on: it prefers what resembles the newest find, and nothing before it. Without the
negative strengths a hop finds the same key once more, which resembles itself most."""


@dataclass(frozen=True)
class Start:
    """Where a descent begins: how many hops, and what they prefer."""

    hops: int
    strengths: HopStrengths = SIMILAR
    ignores_ages: bool = False

    @property
    def name(self) -> str:
        """In words, for a summary."""
        if self.hops == 1:
            return "1 hop"
        name = f"{self.hops} hops"
        if self.strengths is CHAIN:
            name += " that move on"
        if self.ignores_ages:
            name += " without ages"
        return name


NEWER_STRENGTH = 2.0
OLDER_STRENGTH = 1.0
AGE_RANGE = 4.0
"""Where ages are known: every hop prefers new keys, 2·exp(−age/4), and keys older than what was
found by Δ > 0 ages, exp(−Δ/4)."""

RARE_SIMILARITY = 0.7
"""How far a key resembles itself, on average, where rare coordinates count more. At 1.0 a start of
two hops was so sharp that it had no slope (task 5 of benchmarks/stories.py); at 0.5 three facts in
any order (tasks 2 and 22) had gained little after twenty steps."""

START_NOISE = 0.02
"""Standard deviation of what tells patterns, and means, apart at the start."""

MIN_AGES = 3
"""Columns at least that are taken for ages if nobody said so."""


@dataclass(frozen=True)
class Ages:
    """Coordinates of keys that say how old each is: ``hot`` are zeros and a one, newest first.

    ``columns`` are all that follow from the age, those and others such as 2^-age, and ``table``
    their values at each age. A key of no age has zeros in all of ``hot``.
    """

    hot: Int[np.ndarray, " a"]
    columns: Int[np.ndarray, " c"]
    table: Float[np.ndarray, "a c"] = field(repr=False)

    @classmethod
    def of(cls, sets: SetBatch) -> Ages | None:
        """The ages of some sets, where columns look like ages, or None.

        Such are columns of zeros and ones of which every set uses the first few, each once: its
        newest key has the first, the next the second. The last may be shared by all that are older
        still.

        >>> from keyhole.data.tokens import with_ages
        >>> keys = with_ages([np.ones((3, 2)), 2 * np.ones((4, 2))], n_ages=4)
        >>> Ages.of(SetBatch(keys)).hot
        array([2, 3, 4, 5])
        """
        if not _may_have_ages(sets):
            return None
        sets = sets.numpy()
        hot = _find_ages(sets)
        if len(hot) == 0:
            return None
        tokens = sets.tokens

        # the first key of each age, and the ages that occur
        ages = ages_of(tokens, hot)
        aged_keys = np.flatnonzero(ages >= 0)
        first_keys = np.full(len(hot), -1)
        first_keys[ages[aged_keys][::-1]] = aged_keys[::-1]  # the first is written last
        ages_seen = np.flatnonzero(first_keys >= 0)

        # a column follows from the age if all keys of an age have the value of its first key, and
        # the column is not constant
        places = np.searchsorted(ages_seen, ages[aged_keys])
        first_of_age = first_keys[ages_seen][places]
        same_as_first = (tokens[aged_keys] == tokens[first_of_age]).all(axis=0)
        varies = np.ptp(tokens[aged_keys], axis=0) > 0
        follows = same_as_first & varies

        # the values of these columns at each age; an age that no key has is a one in its column
        hot = hot[: ages_seen[-1] + 1]
        columns = np.union1d(np.flatnonzero(follows), hot)
        table = (columns == hot[:, None]).astype(float)
        table[ages_seen] = tokens[first_keys[ages_seen]][:, columns]
        return cls(hot=hot, columns=columns, table=table)

    def moved(self, sets: SetBatch, share: float, rng: np.random.Generator) -> SetBatch:
        """The same sets, in which before each key, with probability ``share``, a while has passed.

        It and all older ones then are one age older; none becomes older than the oldest seen in
        training.
        """
        ages = ages_of(sets.tokens, self.hot)
        moved, values = self.older(ages, sets.lengths, share, rng)
        tokens = arrays.copied(sets.tokens)
        tokens[moved[:, None], self.columns] = like_tokens(values, tokens)
        return SetBatch._from_flat(tokens, sets.offsets, sets.query, sets.extras)

    def left_out(self, sets: SetBatch) -> SetBatch:
        """The same sets with zeros in the columns of ages."""
        tokens = arrays.copied(sets.tokens)
        tokens[:, self.columns] = 0.0
        return SetBatch._from_flat(tokens, sets.offsets, sets.query, sets.extras, sets.pairs)

    def older(
        self,
        ages: Int[np.ndarray, " t"],
        lengths: Int[np.ndarray, " n"],
        share: float,
        rng: np.random.Generator,
    ) -> tuple[Int[np.ndarray, " k"], Float[np.ndarray, "k c"]]:
        """Which keys become older, and what `moved` puts into their ``columns``.

        Keys of one age stay together.
        """
        oldest = len(self.table) - 1
        set_of_key = np.repeat(np.arange(len(lengths)), lengths)
        aged_keys = np.flatnonzero(ages >= 0)
        owner = set_of_key[aged_keys]
        ages_before = np.minimum(ages[aged_keys], oldest)

        # 1 for each age of a set before which a while passes; only ages that the set has
        passes = np.zeros((len(lengths), oldest + 1), np.int32)
        passes[owner, ages_before] = 1
        passes *= rng.random(passes.shape, dtype=np.float32) < share

        # a key ages by as many as have passed before it and before all newer keys
        delays = np.cumsum(passes, axis=1, out=passes)[owner, ages_before]
        ages_after = np.minimum(ages_before + delays, oldest)
        moved = np.flatnonzero(ages_after > ages_before)
        return aged_keys[moved], self.table[ages_after[moved]].astype(np.float32)


def ages_of(tokens: Float[Any, "t d"], hot: Int[np.ndarray, " a"]) -> Int[np.ndarray, " t"]:
    """The age of every key, −1 for one of none."""
    count = np.zeros(tokens.shape[1])
    count[hot] = np.arange(1, len(hot) + 1)
    return on_host(tokens @ like_tokens(count, tokens)).astype(int) - 1


def _may_have_ages(sets: SetBatch) -> bool:
    """Whether any coordinate is zero or one in the first rows of the tokens, as ages are."""
    first_keys = sets.token_rows(0, min(1000, sets.n_tokens))
    return bool(((first_keys == 0) | (first_keys == 1)).all(axis=0).any())


def _find_ages(sets: SetBatch) -> Int[np.ndarray, " a"]:
    """The longest run of columns that look like ages, if it has at least `MIN_AGES` of them."""
    ones = sets.tokens == 1
    binary = ((sets.tokens == 0) | ones).all(axis=0)
    # keys of each set with a one in each column
    counts = np.add.reduceat(ones, sets.offsets[:-1], axis=0, dtype=int)
    at_most_once = binary & (counts <= 1).all(axis=0) & (counts > 0).any(axis=0)

    best = range(0)
    column = 0
    while column < sets.dim:
        if at_most_once[column]:
            stop = _end_of_ages(column, ones, binary, counts, at_most_once)
            share_with_ages = (counts[:, column:stop].sum(axis=1) > 0).mean()
            if stop - column > len(best) and share_with_ages > 0.5:
                best = range(column, stop)
        else:
            stop = column + 1
        column = stop
    if len(best) < MIN_AGES:
        return np.zeros(0, int)
    return np.arange(best.start, best.stop)


def _end_of_ages(
    first: int,
    ones: Bool[np.ndarray, "t d"],
    binary: Bool[np.ndarray, " d"],
    counts: Int[np.ndarray, "n d"],
    at_most_once: Bool[np.ndarray, " d"],
) -> int:
    """The column after the last of a run of ages that begins with column ``first``."""
    dim = ones.shape[1]
    aged_keys = ones[:, first].copy()
    stop = first + 1
    while stop < dim and binary[stop]:
        # a set that has this age must have the one before it
        has_age = counts[:, stop] > 0
        if not (counts[has_age, stop - 1] > 0).all():
            break
        # no key has two ages
        if (aged_keys & ones[:, stop]).any():
            break
        aged_keys |= ones[:, stop]
        stop += 1
        # an age that several keys of a set share is the last
        if not at_most_once[stop - 1]:
            break
    return stop


def starting_hops(
    query_dim: int,
    dim: int,
    hops: int,
    patterns: int,
    n_means: int,
    strengths: HopStrengths,
    ages: Ages | None,
    pairs: Any,
    seed: int,
    rarity: Float[np.ndarray, " d"] | None = None,
) -> list[Float[np.ndarray, "_ _ e"]]:
    """The matrices of all hops before anything is learned, those of the last one last.

    They prefer keys that resemble the query, or what was found, as ``strengths`` say; with
    ``rarity`` (`rarity_of`) each coordinate counts as much as that says. Where ages are known they
    also prefer new keys, and keys just older than what was found. The rows of a matrix are those of
    the query, then d for every pattern of the hops before it, then that of the appended one.
    """
    rng = np.random.default_rng([seed, hops])
    like_query = without_ages(identity_mean(dim, query_dim, pairs), ages)[:-1]
    like_found = without_ages(identity_mean(dim), ages)[:-1]
    if rarity is not None:
        like_query[:, :-1] *= rarity
        like_found[:, :-1] *= rarity
    older = just_older(dim, ages)
    matrices = []
    for hop in range(hops):
        is_last = hop == hops - 1
        if is_last:
            query_strength = strengths.last_query
            newest_strength = strengths.last_newest_found
            earlier_strength = strengths.last_earlier_found
            count = n_means
        else:
            query_strength = strengths.query
            newest_strength = strengths.newest_found
            earlier_strength = strengths.earlier_found
            count = patterns
        if hop == 0:
            query_strength = strengths.first_query

        # rows for the query, then for what each hop before found, the newest last
        rows = [query_strength * like_query]
        for earlier_hop in range(hop):
            if earlier_hop == hop - 1:
                found_rows = newest_strength * like_found + older
            elif strengths.older_than_all:
                found_rows = earlier_strength * like_found + older
            else:
                found_rows = earlier_strength * like_found
            rows += [found_rows] * patterns
        rows.append(newer_first(dim, ages)[None])
        start = np.concatenate(rows)

        # equal patterns would have equal gradients and stay equal
        matrices.append(start + START_NOISE * rng.standard_normal((count, *start.shape)))
    return matrices


def rows_of_found_ages(n_rows: int, query_dim: int, dim: int, ages: Ages) -> Int[np.ndarray, " r"]:
    """The rows of a matrix that meet the ages of what was found by the hops before."""
    first_rows = np.arange(query_dim, n_rows - 1, dim)[:, None]
    return (first_rows + ages.columns).ravel()


def rarity_of(sets: SetBatch) -> Float[np.ndarray, " d"] | None:
    """How much it says that two keys share a coordinate: the rarer it is, the more.

    For coordinates that are zero or positive, such as words that a sentence has or has not, it is
    −log of the share of keys that have it, in units in which a key resembles itself by
    `RARE_SIMILARITY` on average; for all others 0. None if no coordinate is of that kind, or none
    tells keys apart.

    >>> rarity_of(SetBatch([np.array([[1.0, 1.0, -1.0], [1.0, 0.0, 1.0]])])).round(3)
    array([0. , 1.4, 0. ])
    """
    tokens = sets.numpy().tokens
    share = (tokens > 0).mean(axis=0)
    is_presence = (tokens >= 0).all(axis=0) & (share > 0)
    rarity = np.zeros(sets.dim)
    rarity[is_presence] = np.log(1.0 / share[is_presence])
    self_similarity = float((np.square(tokens).mean(axis=0) * rarity).sum())
    if self_similarity <= 0:
        return None
    return RARE_SIMILARITY * rarity / self_similarity


def without_ages(mean: Float[np.ndarray, "f e"], ages: Ages | None) -> Float[np.ndarray, "f e"]:
    """The matrix without what it says of ages: two keys of one age need not be alike."""
    if ages is not None:
        mean[:, ages.columns] = 0.0
    return mean


def newer_first(dim: int, ages: Ages | None) -> Float[np.ndarray, " e"]:
    """The last row of a matrix, that of the appended one, which prefers new keys."""
    row = np.zeros(dim + 1)
    if ages is not None:
        row[ages.hot] = NEWER_STRENGTH * np.exp(-np.arange(len(ages.hot)) / AGE_RANGE)
    return row


def just_older(dim: int, ages: Ages | None) -> Float[np.ndarray, "d e"]:
    """Rows for what was found, which prefer keys a little older than that."""
    rows = np.zeros((dim, dim + 1))
    if ages is not None:
        age = np.arange(len(ages.hot))
        older_by = age - age[:, None]  # of the key (column) than what was found (row)
        preference = np.where(older_by > 0, np.exp(-older_by / AGE_RANGE), 0.0)
        rows[np.ix_(ages.hot, ages.hot)] = OLDER_STRENGTH * preference
    return rows
