"""Hops before the last: where they start, and their gradient.

And ages of keys that are moved a little at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole.attention.features import KeyStack, softmax, through_weights
from keyhole.attention.heads import FittedHeads, identity_mean
from keyhole.data.sets import SetBatch

QUERY_STRENGTH, FOUND_STRENGTH = 3.0, 2.0
"""Multiples of the identity that the hops before the last start from: for the query, and for what
was found.
"""

LAST_QUERY_STRENGTH, LAST_FOUND_STRENGTH = 1.0, 3.0
"""The same for the last hop, which reads the answer off what was found."""

NEWER_STRENGTH, OLDER_STRENGTH, AGE_RANGE = 2.0, 1.0, 4.0
"""Where ages are known: every hop prefers new keys, 2·exp(−age/4), and keys older than what was
found by Δ > 0 ages, exp(−Δ/4)."""

START_NOISE = 0.02
"""Standard deviation of what tells patterns, and means, apart at the start."""

MIN_AGES = 3
"""Columns at least that are taken for ages if nobody said so."""


@dataclass(frozen=True)
class Ages:
    """Coordinates of keys that say how old each is: ``hot`` are zeros and a one, newest first.

    ``columns`` are all that follow from the age, those and others such as 2^-age, and ``table``
    their values at each age; a key of no age has zeros in all of ``hot``.
    """

    hot: Int[np.ndarray, " a"]
    columns: Int[np.ndarray, " c"]
    table: Float[np.ndarray, "a c"] = field(repr=False)

    @classmethod
    def of(cls, sets: SetBatch, hot: Any = "auto") -> Ages | None:
        """The ages of some sets: the coordinates told, or found; None if there are none.

        Found are columns of zeros and ones of which every set uses the first few, each once: its
        newest key has the first, the next the second. The last may be shared by all that are older
        still.

        >>> from keyhole.data.tokens import with_ages
        >>> keys = with_ages([np.ones((3, 2)), 2 * np.ones((4, 2))], n_ages=4)
        >>> Ages.of(SetBatch(keys)).hot
        array([2, 3, 4, 5])
        """
        if hot is None:
            return None
        found = _find_ages(sets) if isinstance(hot, str) else _check_ages(sets, hot)
        if len(found) == 0:
            return None
        ages = ages_of(sets.tokens, found)
        known = np.flatnonzero(ages >= 0)
        first = np.full(len(found), -1)
        first[ages[known][::-1]] = known[::-1]  # one key of each age
        seen = np.flatnonzero(first >= 0)
        firsts = first[seen][np.searchsorted(seen, ages[known])]
        follows = (sets.tokens[known] == sets.tokens[firsts]).all(axis=0) & (
            np.ptp(sets.tokens[known], axis=0) > 0
        )
        found = found[: seen[-1] + 1]
        columns = np.union1d(np.flatnonzero(follows), found)
        table = (columns == found[:, None]).astype(float)
        table[seen] = sets.tokens[first[seen]][:, columns]
        return cls(found, columns, table)

    def moved(self, sets: SetBatch, share: float, rng: np.random.Generator) -> SetBatch:
        """The same sets, in which before each key, with probability ``share``, a while has passed.

        It and all older ones then are one age older; none becomes older than the oldest seen in
        training.
        """
        tokens = sets.tokens.copy()
        moved, values = self.older(ages_of(tokens, self.hot), sets.lengths, share, rng)
        columns: Any = self.columns
        if columns[-1] - columns[0] == len(columns) - 1:  # side by side, which is faster to write
            columns = slice(columns[0], columns[-1] + 1)
        tokens[moved if isinstance(columns, slice) else moved[:, None], columns] = values
        return SetBatch._from_flat(tokens, sets.offsets, sets.query, sets.extras)

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
        owner, oldest = np.repeat(np.arange(len(lengths)), lengths), len(self.table) - 1
        known = np.flatnonzero(ages >= 0)
        owner, own = owner[known], np.minimum(ages[known], oldest)
        gaps = np.zeros((len(lengths), oldest + 1), np.int32)
        gaps[owner, own] = 1
        gaps *= rng.random(gaps.shape, dtype=np.float32) < share
        older = np.minimum(own + np.cumsum(gaps, axis=1, out=gaps)[owner, own], oldest)
        moved = np.flatnonzero(older > own)
        return known[moved], self.table[older[moved]].astype(np.float32)


@dataclass(frozen=True)
class UsedCoordinates:
    """Coordinates that are not zero throughout a training set.

    ``query`` are those of queries and ``keys`` those of keys.

    What meets zeros alone has no gradient and is in no score: a head distribution is learned in
    these coordinates, and its other entries stay where they started. Words that no question has,
    and ages that no story reaches, cost nothing.
    """

    query: Int[np.ndarray, " q"]
    keys: Int[np.ndarray, " d"]
    pairs: tuple[tuple[int, int], ...] | None

    @classmethod
    def of(cls, sets: SetBatch, ages: Ages | None) -> UsedCoordinates:
        """Those of some sets, and all that ages may move to; one at least of each."""
        used = sets.tokens.any(axis=0)
        used[ages.columns if ages is not None else [] if used.any() else [0]] = True
        keys = np.flatnonzero(used)
        if sets.query is None:
            return cls(keys, keys, None)
        query = np.flatnonzero(sets.query.any(axis=0))
        query = query if len(query) else np.zeros(1, int)
        both = identity_mean(sets.dim, sets.query.shape[1], sets.pairs)[np.ix_(query, keys)]
        return cls(query, keys, tuple((int(i), int(j)) for i, j in np.argwhere(both)))

    def of_sets(self, sets: SetBatch) -> SetBatch:
        """The sets in these coordinates."""
        query = None if sets.query is None else np.ascontiguousarray(sets.query[:, self.query])
        tokens = np.ascontiguousarray(sets.tokens[:, self.keys])
        return SetBatch._from_flat(tokens, sets.offsets, query, sets.extras, self.pairs)

    def of_ages(self, ages: Ages | None) -> Ages | None:
        """The ages in these coordinates."""
        if ages is None:
            return None
        hot, columns = (np.searchsorted(self.keys, own) for own in (ages.hot, ages.columns))
        return Ages(hot, columns, ages.table)

    def among_all(
        self, distribution: FittedHeads, start: Sequence[Float[np.ndarray, "p _ e"]], query_dim: int
    ) -> FittedHeads:
        """A head distribution in these coordinates in all of them.

        The others are where all hops ``start``, which is overwritten.
        """
        dim = start[-1].shape[2] - 1
        keys = np.append(self.keys, dim)
        for into, matrices in zip(start, (*distribution.hops_, distribution.means_), strict=True):
            last = into.shape[1] - 1
            found = np.arange(query_dim, last, dim)[:, None] + self.keys
            rows = np.concatenate([self.query, found.ravel(), [last]])
            into[:, rows[:, None], keys] = matrices
        *hops, means = start
        changes: dict[str, Any] = {"means_": means, "hops_": tuple(hops)}
        if distribution.query_scales_ is not None and distribution.key_scales_ is not None:
            changes |= {"query_scales_": np.ones(means.shape[1]), "key_scales_": np.ones(dim + 1)}
            changes["query_scales_"][rows], changes["key_scales_"][keys] = (
                distribution.query_scales_,
                distribution.key_scales_,
            )
        return replace(distribution, **changes)


def ages_of(tokens: Float[np.ndarray, "t d"], hot: Int[np.ndarray, " a"]) -> Int[np.ndarray, " t"]:
    """The age of every key, −1 for one of none."""
    count = np.zeros(tokens.shape[1], tokens.dtype)
    count[hot] = np.arange(1, len(hot) + 1)
    return (tokens @ count).astype(int) - 1


def _find_ages(sets: SetBatch) -> Int[np.ndarray, " a"]:
    tokens, starts = sets.tokens, sets.offsets[:-1]
    ones = tokens == 1
    binary = ((tokens == 0) | ones).all(axis=0)
    counts = np.add.reduceat(ones, starts, axis=0, dtype=int)
    once = binary & (counts <= 1).all(axis=0) & (counts > 0).any(axis=0)
    best: tuple[int, int] = (0, 0)
    column, dim = 0, sets.dim
    while column < dim:
        stop = column + 1
        if once[column]:
            aged = ones[:, column].copy()  # keys that have an age
            while stop < dim and binary[stop] and (counts[counts[:, stop] > 0, stop - 1] > 0).all():
                if (aged & ones[:, stop]).any():
                    break  # a key of two ages
                aged |= ones[:, stop]
                stop += 1
                if not once[stop - 1]:
                    break
            if (
                stop - column > best[1] - best[0]
                and (counts[:, column:stop].sum(axis=1) > 0).mean() > 0.5
            ):
                best = column, stop
        column = stop
    enough = best[1] - best[0] >= MIN_AGES
    return np.arange(*best) if enough else np.zeros(0, int)


def _check_ages(sets: SetBatch, hot: Any) -> Int[np.ndarray, " a"]:
    given = np.asarray(hot)
    if given.ndim != 1 or given.dtype.kind not in "iu" or not len(given):
        raise ValueError(
            "`ages` must be 'auto', None, or the coordinates of keys that say their age: got "
            f"{hot!r}."
        )
    if (given < 0).any() or (given >= sets.dim).any() or len(np.unique(given)) < len(given):
        raise ValueError(
            f"`ages` must name different coordinates of keys of dimension {sets.dim}, newest "
            f"first: got {hot!r}."
        )
    own = sets.tokens[:, given]
    wrong = np.flatnonzero(((own != 0) & (own != 1)).any(axis=1) | (own.sum(axis=1) > 1))
    if len(wrong):
        raise ValueError(
            f"`ages` must name coordinates of zeros and at most one 1 for each key: key {wrong[0]} "
            f"has {own[wrong[0]].tolist()}. kh.tokens.with_ages makes such; use scaling='none', so "
            "that they stay."
        )
    return given


def starting_hops(
    query_dim: int,
    dim: int,
    hops: int,
    patterns: int,
    n_means: int,
    ages: Ages | None,
    pairs: Any,
    seed: int,
) -> list[Float[np.ndarray, "p _ e"]]:
    """The matrices of all hops before anything is learned, those of the last one last.

    Keys that resemble the query, or what was found; where ages are known, new ones, and such as are
    just older than what was found.
    """
    rng = np.random.default_rng([seed, hops])
    matrices, found = [], 0
    for hop in range(hops):
        last = hop == hops - 1
        strengths = (
            (LAST_QUERY_STRENGTH, LAST_FOUND_STRENGTH) if last else (QUERY_STRENGTH, FOUND_STRENGTH)
        )
        blocks = [strengths[0] * without_ages(identity_mean(dim, query_dim, pairs), ages)[:-1]]
        blocks += [
            strengths[1] * without_ages(identity_mean(dim), ages)[:-1] + just_older(dim, ages)
        ] * found
        start = np.concatenate([*blocks, newer_first(dim, ages)[None]])
        count = n_means if last else patterns
        matrices.append(start + START_NOISE * rng.standard_normal((count, *start.shape)))
        found += patterns
    return matrices


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
        apart = np.arange(len(ages.hot)) - np.arange(len(ages.hot))[:, None]
        rows[np.ix_(ages.hot, ages.hot)] = OLDER_STRENGTH * np.where(
            apart > 0, np.exp(-apart / AGE_RANGE), 0.0
        )
    return rows


@dataclass(frozen=True)
class HopTrace:
    """Hops gone through: what each asked and how it weighed the keys.

    ``sets`` have the extended queries.

    ::

        a_pi = softmax_i(x~ᵀ U_p x~_i),   o_p = Σ_i a_pi x_i,   the next query is [x; o_1; …; o_P]
    """

    sets: SetBatch
    hops: Sequence[Float[np.ndarray, "p _ e"]]
    stacks: list[KeyStack] = field(repr=False)
    asked: list[Float[np.ndarray, "n _"]] = field(repr=False)
    weights: list[list[Float[np.ndarray, "_ p _"]]] = field(
        repr=False
    )  # of every hop, for each stack

    @classmethod
    def of(
        cls, sets: SetBatch, hops: Sequence[Float[np.ndarray, "p _ e"]], stacks: list[KeyStack]
    ) -> HopTrace:
        """Go through the hops in the precision of the sets.

        O(patterns · (n D_h D + keys · D)) operations each.
        """
        asked, weighed = [], []
        for hop in hops:
            query = sets.extended_query()
            asked.append(query)
            wide = hop.transpose(1, 0, 2).reshape(hop.shape[1], -1).astype(query.dtype)
            projected = (query @ wide).reshape(len(sets), len(hop), -1)
            weighed.append(
                [softmax(projected[rows] @ keys.transpose(0, 2, 1)) for rows, keys in stacks]
            )
            found = np.empty((len(sets), len(hop), sets.dim), query.dtype)
            for (rows, keys), weights in zip(stacks, weighed[-1], strict=True):
                found[rows] = weights @ keys[:, :, :-1]
            sets = sets.with_query(
                np.concatenate([query[:, :-1], found.reshape(len(sets), -1)], axis=1)
            )
        return cls(sets, hops, stacks, asked, weighed)

    def pullback(self, cotangent: Float[np.ndarray, "n f"]) -> list[Float[np.ndarray, "p _ e"]]:
        """The gradient in the matrices of every hop.

        From that in the extended queries x~ of the last one.

        ∂a_i = <∂o, x_i>, ∂s_i = a_i (∂a_i − Σ_j a_j ∂a_j), ∂U = Σ ∂s_i x~ x~_iᵀ, and ∂x~ = Σ_i ∂s_i
        U x~_i is added to what later hops say of the same query.
        """
        gradients: list[np.ndarray] = []
        pulled = cotangent[:, :-1]
        for hop, asked, weighed in zip(
            self.hops[::-1], self.asked[::-1], self.weights[::-1], strict=True
        ):
            n, count, own = len(asked), len(hop), asked.shape[1] - 1
            found = pulled[:, own:].reshape(n, count, -1)
            lines = np.empty((n, count, hop.shape[2]), pulled.dtype)
            for (rows, keys), weights in zip(self.stacks, weighed, strict=True):
                slopes = found[rows] @ keys[:, :, :-1].transpose(0, 2, 1)
                through_weights("softmax", weights, slopes)
                lines[rows] = slopes @ keys
            gradients.append(
                (asked.T @ lines.reshape(n, -1)).reshape(own + 1, count, -1).transpose(1, 0, 2)
            )
            wide = hop.transpose(1, 0, 2).reshape(own + 1, -1).astype(lines.dtype)
            pulled = pulled[:, :own] + (lines.reshape(n, -1) @ wide.T)[:, :-1]
        return gradients[::-1]
