"""Tokens that are not one array in memory: parts of other tokens, scaled ones, those of files.

A `TokenSource` gives rows of tokens when they are asked for. Whoever goes over large sets asks for
a few megabytes at a time, so that no copy of all tokens is ever made: not to scale them, not to
choose some of the sets, not to read them from a disk. Small batches hold arrays instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from keyhole._array import block_size, blocks, is_tensor
from keyhole.data import arrays

LAZY_BYTES = 2**26
"""Bytes of tokens from which on sets are chosen, and tokens scaled, when their rows are asked for.

Below it a copy is made at once, because it is asked for many times and costs next to nothing."""

CHUNK_BYTES = 2**18
"""Bytes of tokens that are changed at a time: few enough to stay in the cache from step to step,
and for the allocator to hand out the same memory for every temporary. Standardising 240 MB of
float32 takes 0.08 s in such chunks, and 0.38 s in chunks of 1 MB, whose temporaries are new pages.
"""


class TokenSource:
    """Tokens (t, d) that are made, or read, as their rows are asked for."""

    @property
    def shape(self) -> tuple[int, int]:
        """(t, d)."""
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32 or float64."""
        raise NotImplementedError

    @property
    def is_on_disk(self) -> bool:
        """Whether rows are read from files, so that every pass over them costs."""
        return False

    def rows(self, start: int, stop: int) -> Float[np.ndarray, "r d"]:
        """Rows ``start:stop`` as an array in memory, which must not be written to."""
        raise NotImplementedError

    def fill(self, start: int, stop: int, out: Float[np.ndarray, "r d"]) -> None:
        """Write rows ``start:stop`` to an array, which may have another precision."""
        out[:] = self.rows(start, stop)

    @property
    def nbytes(self) -> int:
        """Bytes that all tokens would take in memory."""
        n_rows, dim = self.shape
        return n_rows * dim * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]


@dataclass(frozen=True)
class TokenRuns(TokenSource):
    """Runs of rows of other tokens, end to end: what choosing some sets of a batch gives."""

    base: Any = field(repr=False)
    starts: Int[np.ndarray, " s"]
    stops: Int[np.ndarray, " s"]

    @cached_property
    def offsets(self) -> Int[np.ndarray, " o"]:
        """Where each run begins here, and the last one ends."""
        return np.concatenate([[0], np.cumsum(self.stops - self.starts)])

    @property
    def shape(self) -> tuple[int, int]:
        """(t, d)."""
        return int(self.offsets[-1]), int(self.base.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the tokens that rows are taken from."""
        return np.dtype(self.base.dtype)

    @property
    def is_on_disk(self) -> bool:
        """Whether the base is."""
        return is_on_disk(self.base)

    def rows(self, start: int, stop: int) -> Float[np.ndarray, "r d"]:
        """Rows as an array: a view where they lie in one run of an array, else copied together."""
        offsets = self.offsets
        first = int(np.searchsorted(offsets, start, side="right")) - 1
        pieces = []
        for run in range(first, len(self.starts)):
            if offsets[run] >= stop:
                break
            shift = int(self.starts[run] - offsets[run])
            piece_start = max(start, int(offsets[run]))
            piece_stop = min(stop, int(offsets[run + 1]))
            if piece_stop > piece_start:
                pieces.append(token_rows(self.base, piece_start + shift, piece_stop + shift))
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return np.zeros((0, self.shape[1]), self.dtype)
        return np.concatenate(pieces)


@dataclass(frozen=True)
class ChangedTokens(TokenSource):
    """Other tokens after a change of each row, such as scaling, made a few rows at a time.

    The rows are to the last bit those of ``change(all tokens)``, in the precision ``number``.
    """

    base: Any = field(repr=False)
    change: Callable[[Float[np.ndarray, "r d"]], Float[np.ndarray, "r d"]]
    number: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, int]:
        """(t, d)."""
        return int(self.base.shape[0]), int(self.base.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """``number``."""
        return self.number

    @property
    def is_on_disk(self) -> bool:
        """Whether the base is."""
        return is_on_disk(self.base)

    def rows(self, start: int, stop: int) -> Float[np.ndarray, "r d"]:
        """Rows of the base, changed, in an array of their own."""
        changed = np.empty((stop - start, self.shape[1]), self.dtype)
        self.fill(start, stop, changed)
        return changed

    def fill(self, start: int, stop: int, out: Float[np.ndarray, "r d"]) -> None:
        """Write rows of the base to an array, changed while they are in the cache."""
        if self.is_on_disk:
            # a file is opened whenever rows of it are asked for: once for all of them
            given = token_rows(self.base, start, stop)
            ChangedTokens(given, self.change, self.number).fill(0, stop - start, out)
            return
        for rows in blocks(stop - start, self.rows_per_chunk):
            given = token_rows(self.base, start + rows.start, start + rows.stop)
            out[rows] = self.change(given).astype(self.number, copy=False)

    @property
    def rows_per_chunk(self) -> int:
        """Rows that are changed at a time."""
        return block_size(self.shape[1] * self.dtype.itemsize, CHUNK_BYTES)


def token_rows(tokens: Any, start: int, stop: int) -> Any:
    """Rows of tokens in memory: a view of an array or tensor, or what a source makes of them."""
    if isinstance(tokens, TokenSource):
        return tokens.rows(start, stop)
    return tokens[start:stop]


def fill_rows(tokens: Any, start: int, stop: int, out: Float[np.ndarray, "r d"]) -> None:
    """Write rows of tokens to an array, which may have another precision."""
    if isinstance(tokens, TokenSource):
        tokens.fill(start, stop, out)
    else:
        out[:] = tokens[start:stop]


def part_of(tokens: Any, start: int, stop: int) -> Any:
    """Consecutive rows, as a view of an array or as a source."""
    if not isinstance(tokens, TokenSource):
        return tokens[start:stop]
    if (start, stop) == (0, len(tokens)):
        return tokens
    if isinstance(tokens, ChangedTokens):
        return ChangedTokens(part_of(tokens.base, start, stop), tokens.change, tokens.number)
    return TokenRuns(tokens, np.array([start]), np.array([stop]))


def runs_of(
    tokens: Any, starts: Int[np.ndarray, " s"], stops: Int[np.ndarray, " s"]
) -> TokenSource:
    """Runs of rows as a source, whatever the tokens are."""
    if isinstance(tokens, ChangedTokens):
        return ChangedTokens(runs_of(tokens.base, starts, stops), tokens.change, tokens.number)
    return TokenRuns(tokens, starts, stops)


def gathered_rows(tokens: Any, rows: Int[np.ndarray, " r"]) -> Any:
    """Rows in any order, copied; of files, those of each run of rows that follow each other."""
    if is_tensor(tokens):
        return tokens[arrays.like(rows, tokens)]
    if not isinstance(tokens, TokenSource):
        return tokens[rows]
    if isinstance(tokens, ChangedTokens):
        given = gathered_rows(tokens.base, rows)
        return ChangedTokens(given, tokens.change, tokens.number).rows(0, len(rows))
    if isinstance(tokens, TokenRuns):
        run = np.searchsorted(tokens.offsets, rows, side="right") - 1
        return gathered_rows(tokens.base, tokens.starts[run] + rows - tokens.offsets[run])

    # files, and tokens of several sources: runs of rows that follow each other
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    starts = rows[np.append(0, breaks)] if len(rows) else rows
    lengths = np.diff(np.concatenate([[0], breaks, [len(rows)]])) if len(rows) else rows
    return runs_of(tokens, starts, starts + lengths).rows(0, len(rows))


@dataclass(frozen=True)
class JoinedTokens(TokenSource):
    """Tokens of several sources and arrays end to end."""

    parts: tuple[Any, ...] = field(repr=False)

    @cached_property
    def offsets(self) -> Int[np.ndarray, " o"]:
        """Where each part begins, and the last one ends."""
        return np.concatenate([[0], np.cumsum([len(part) for part in self.parts])])

    @property
    def shape(self) -> tuple[int, int]:
        """(t, d)."""
        return sum(len(part) for part in self.parts), int(self.parts[0].shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The wider of those of the parts."""
        return np.dtype(np.result_type(*[np.dtype(part.dtype) for part in self.parts]))

    @property
    def is_on_disk(self) -> bool:
        """Whether one of the parts is."""
        return any(is_on_disk(part) for part in self.parts)

    def rows(self, start: int, stop: int) -> Float[np.ndarray, "r d"]:
        """Rows as an array: of one part, or copied together."""
        offsets = self.offsets
        pieces = []
        for part, (first, last) in zip(self.parts, pairwise(offsets.tolist()), strict=True):
            if first < stop and last > start:
                piece = token_rows(part, max(start, first) - first, min(stop, last) - first)
                pieces.append(piece.astype(self.dtype, copy=False))
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return np.zeros((0, self.shape[1]), self.dtype)
        return np.concatenate(pieces)


def joined(parts: Sequence[Any]) -> JoinedTokens:
    """Arrays and sources end to end, none of them copied."""
    if any(is_tensor(part) for part in parts):
        raise TypeError(
            "sets must be NumPy arrays or torch tensors, all of one kind: got both. Convert some "
            "of them."
        )
    return JoinedTokens(tuple(parts))


def is_on_disk(tokens: Any) -> bool:
    """Whether tokens are read from files."""
    return isinstance(tokens, TokenSource) and tokens.is_on_disk


def changed(
    tokens: Any,
    change: Callable[[Float[np.ndarray, "r d"]], Float[np.ndarray, "r d"]],
    number: Any,
) -> Any:
    """Tokens after a change of each row: at once, or as rows are asked for where they are many.

    Tensors are changed at once, where they live.
    """
    number = np.dtype(number)
    if is_tensor(tokens):
        return arrays.astype(change(tokens), number)
    source = ChangedTokens(tokens, change, number)
    if source.nbytes >= LAZY_BYTES or isinstance(tokens, TokenSource):
        return source
    return source.rows(0, len(source))


def in_memory(tokens: Any) -> Any:
    """All tokens as one array."""
    if isinstance(tokens, TokenSource):
        return tokens.rows(0, len(tokens))
    return tokens
