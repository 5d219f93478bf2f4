"""Inner products of symmetrised coefficient tensors, by counting contractions instead of forming tensors.

A term of degree (r, s) is a tensor with r query slots and s key slots: a vector fills one slot, a matrix
links a query slot to a key slot. Symmetrising averages over permutations of the slots, so an inner product
of two terms is a sum over all ways to join their slots, query to query and key to key. Joined slots form
chains that end in two vectors, and closed rings that are traces of words A_1 A_2ᵀ A_3 A_4ᵀ …. The sum over
all joinings is the exponential of the sum over connected ones; powers are kept as multiplicities, so a term
of degree 8 has few states where its joinings are 8! many.

Joints within one term (Laplacians of it) are needed for its harmonic parts on the sphere. They are counted
apart: entry [i, j] belongs to the joinings with i key joints and j query joints inside the first term.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from keyhole.targets.polynomial import KEY, PAIR, QUERY, Factor

if TYPE_CHECKING:
    from keyhole.targets.polynomial import Polynomial, Term

Content = tuple[int, ...]
"""How many copies of each node a chain, a ring or a whole joining uses."""

Joints = tuple[int, int]
"""Joints inside the first term: (key to key, query to query)."""


def coefficient_norms(target: Polynomial) -> dict[tuple[int, int], float]:
    """|f_rs|² for every degree (r, s) of ``target``; terms of one degree are added first."""
    by_degree: dict[tuple[int, int], list[Term]] = {}
    for term in target.terms:
        by_degree.setdefault(term.degrees, []).append(term)
    norms = {}
    for degree, terms in sorted(by_degree.items()):
        total = 0.0
        for a, first in enumerate(terms):
            for second in terms[a:]:
                weight = first.coefficient * second.coefficient * (1.0 if first is second else 2.0)
                total += weight * symmetric_product(first, second, target.dim)
        norms[degree] = max(total, 0.0)  # rounding may leave a cancelled norm just below zero
    return norms


def symmetric_product(first: Term, second: Term, dim: int) -> float:
    """<Sym T_1, Sym T_2> of two terms of equal degree, coefficients left out.

    Examples
    --------
    >>> from keyhole.targets import Correlation
    >>> term, = Correlation(q=2, dim=3).terms
    >>> symmetric_product(term, term, dim=3)    # (d+1)(d+2)/3!
    3.333333333333333...
    """
    if first.degrees != second.degrees:
        return 0.0
    return float(joinings(first, second, dim, inside=False)[0, 0])


def joinings(first: Term, second: Term, dim: int, inside: bool = True) -> Float[np.ndarray, "i j"]:
    """Sum of all joinings of two terms, divided by r! s! of the first, coefficients left out.

    Parameters
    ----------
    first, second : Term
        Of degrees (r, s) and (r', s'), equal in parity where ``inside`` is True.
    dim : int
        Token dimension d.
    inside : bool
        Whether slots of one term may be joined to each other.

    Returns
    -------
    array (⌊s/2⌋+1, ⌊r/2⌋+1), or (1, 1) without joints inside
        Entry [i, j]: the joinings with i key joints and j query joints inside the first term.

    Notes
    -----
    Cost: states number the product of (power + 1) over all factors. With one matrix, however often it occurs,
    a singular value decomposition makes every step O(d); with several, a ring costs O(d³) per state.
    """
    nodes = _nodes(first, second)
    query_degree, key_degree = first.degrees
    shape = (key_degree // 2 + 1, query_degree // 2 + 1) if inside else (1, 1)
    connected = _Connected(nodes, dim, shape, inside)
    for start in range(len(nodes)):
        connected.add_chains(start)
        connected.add_rings(start)
    return _exponential(connected.sums, nodes, shape)


@dataclass(frozen=True)
class _Node:
    """A factor of one of the two terms (side 0 or 1) and how often it occurs there."""

    kind: str
    side: int
    array: np.ndarray | None
    copies: int


def _nodes(first: Term, second: Term) -> list[_Node]:
    """The factors of both terms, in coordinates where a single matrix is diagonal (kept as a vector then)."""
    powers = [(side, factor, power) for side, term in enumerate((first, second)) for factor, power in term.powers]
    matrices = {factor for _, factor, _ in powers if factor.kind == PAIR and factor.array is not None}
    plain = any(factor.kind == PAIR and factor.array is None for _, factor, _ in powers)
    if len(matrices) != 1 or plain:
        return [_Node(factor.kind, side, factor.array, power) for side, factor, power in powers]
    (only,) = matrices
    assert only.array is not None
    left, scales, right = np.linalg.svd(only.array)
    turned: dict[str, np.ndarray] = {QUERY: left.T, KEY: right}
    return [_Node(f.kind, side, _turn(f, turned, scales), power) for side, f, power in powers]


def _turn(factor: Factor, turned: dict[str, np.ndarray], scales: np.ndarray) -> np.ndarray:
    return scales if factor.kind == PAIR else np.asarray(turned[factor.kind] @ factor.array)


class _Connected:
    """Sums over connected joinings, by content: chains between two vectors, and rings of matrices."""

    def __init__(self, nodes: list[_Node], dim: int, shape: tuple[int, int], inside: bool) -> None:
        self.nodes = nodes
        self.dim = dim
        self.shape = shape
        self.inside = inside
        self.pairs = [i for i, node in enumerate(nodes) if node.kind == PAIR]
        dense = any(array is not None and array.ndim == 2 for array in (nodes[i].array for i in self.pairs))
        self.identity = np.eye(dim) if dense else np.ones(dim)
        self.sums: dict[Content, np.ndarray] = {}

    def add_chains(self, start: int) -> None:
        """Chains that begin at vector ``start`` and end at a vector no earlier in the list."""
        first = self.nodes[start]
        if first.kind == PAIR:
            return
        ends = [i for i, node in enumerate(self.nodes) if node.kind != PAIR and i >= start]
        assert first.array is not None
        for content, slot, last, values in self._walk(start, first.kind, first.array):
            for end in ends:
                node = self.nodes[end]
                if node.kind != slot:
                    continue
                # a chain between copies of one vector is walked from both of its ends
                weight = 0.5 if end == start else 1.0
                for joints, value in values.items():
                    closed = self._joint(joints, slot, last, end)
                    if closed is not None:
                        assert node.array is not None
                        self._add(_plus(content, end), closed, weight * float(node.array @ value))

    def add_rings(self, start: int) -> None:
        """Rings in which matrix ``start`` is the one we begin to walk from, by its key slot."""
        first = self.nodes[start]
        if first.kind != PAIR:
            return
        begin = self.identity if first.array is None else first.array
        for content, slot, last, values in self._walk(start, KEY, begin):
            if slot != QUERY:
                continue
            for joints, value in values.items():
                closed = self._joint(joints, QUERY, last, start)
                if closed is not None:
                    trace = float(value.sum() if value.ndim == 1 else np.trace(value))
                    # a ring of n matrices is walked once from each of them
                    self._add(content, closed, trace / sum(content))

    def _walk(
        self, start: int, slot: str, begin: np.ndarray
    ) -> Iterator[tuple[Content, str, int, dict[Joints, np.ndarray]]]:
        """Yield every (content, open slot, last node) reached from ``start``, with the sum over its words."""
        empty = tuple(0 for _ in self.nodes)
        layer = {(_plus(empty, start), start): {(0, 0): begin}}
        while layer:
            following: dict[tuple[Content, int], dict[Joints, np.ndarray]] = {}
            for (content, last), values in layer.items():
                yield content, slot, last, values
                for node in self.pairs:
                    if content[node] < self.nodes[node].copies:
                        target = following.setdefault((_plus(content, node), node), {})
                        self._extend(target, values, slot, last, node)
            layer = {key: values for key, values in following.items() if values}
            slot = QUERY if slot == KEY else KEY

    def _extend(
        self,
        target: dict[Joints, np.ndarray],
        values: dict[Joints, np.ndarray],
        slot: str,
        last: int,
        node: int,
    ) -> None:
        array = self.nodes[node].array
        for joints, value in values.items():
            joined = self._joint(joints, slot, last, node)
            if joined is not None:
                moved = _apply(value, array, slot)
                target[joined] = target[joined] + moved if joined in target else moved

    def _joint(self, joints: Joints, slot: str, last: int, node: int) -> Joints | None:
        """Count the joint between two nodes, or None where it is not allowed."""
        sides = self.nodes[last].side, self.nodes[node].side
        if sides[0] != sides[1]:
            return joints
        if not self.inside:
            return None
        if sides[0] == 1:
            return joints
        i, j = joints
        i, j = (i + 1, j) if slot == KEY else (i, j + 1)
        return (i, j) if i < self.shape[0] and j < self.shape[1] else None

    def _add(self, content: Content, joints: Joints, value: float) -> None:
        if content not in self.sums:
            if any(n > node.copies for n, node in zip(content, self.nodes, strict=True)):
                return
            self.sums[content] = np.zeros(self.shape)
        self.sums[content][joints] += value


def _apply(value: np.ndarray, array: np.ndarray | None, slot: str) -> np.ndarray:
    """Carry the open end of a walk across a matrix, from its ``slot`` to its other one."""
    if array is None:
        return value
    if array.ndim == 1:  # diagonal
        return np.asarray(value * array)
    if value.ndim == 1:
        return np.asarray(array @ value if slot == KEY else value @ array)
    return np.asarray(value @ array.T if slot == KEY else value @ array)


def _plus(content: Content, node: int) -> Content:
    return (*content[:node], content[node] + 1, *content[node + 1 :])


def _exponential(connected: dict[Content, np.ndarray], nodes: list[_Node], shape: tuple[int, int]) -> np.ndarray:
    """Sum over all joinings from the sum over connected ones, divided by r! s! of the first term.

    m_t E_m = Σ_c c_t C_c E_{m−c} for any node t, from the derivative of E = exp C. Every E_m is kept in units
    of r_m! s_m! / Π m_t!, which keeps it near one where the plain coefficient would underflow.
    """
    in_first = [node.side == 0 for node in nodes]
    key_slots = [n.kind != QUERY and f for n, f in zip(nodes, in_first, strict=True)]
    query_slots = [n.kind != KEY and f for n, f in zip(nodes, in_first, strict=True)]

    def unit(content: Content) -> tuple[int, int]:
        keys = sum(n for n, there in zip(content, key_slots, strict=True) if there)
        queries = sum(n for n, there in zip(content, query_slots, strict=True) if there)
        copies = math.prod(math.factorial(n) for n in content)
        return copies, math.factorial(keys) * math.factorial(queries)

    known: dict[Content, np.ndarray] = {}
    one = np.zeros(shape)
    one[0, 0] = 1.0
    known[tuple(0 for _ in nodes)] = one

    def total(content: Content) -> np.ndarray:
        pending = [content]
        while pending:  # a stack of our own: high powers would exhaust Python's
            m = pending[-1]
            if m in known:
                pending.pop()
                continue
            t = next(i for i, n in enumerate(m) if n > 0)
            steps = [c for c in connected if c[t] > 0 and all(a <= b for a, b in zip(c, m, strict=True))]
            rests = [tuple(a - b for a, b in zip(m, c, strict=True)) for c in steps]
            missing = [rest for rest in rests if rest not in known]
            if missing:
                pending.extend(missing)
                continue
            value = np.zeros(shape)
            copies, slots = unit(m)
            for c, rest in zip(steps, rests, strict=True):
                rest_copies, rest_slots = unit(rest)
                scale = (copies * rest_slots) / (rest_copies * slots)
                value += (c[t] / m[t] * scale) * _shifted_product(connected[c], known[rest])
            known[m] = value
            pending.pop()
        return known[content]

    return total(tuple(node.copies for node in nodes))


def _shifted_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product of two polynomials in two variables, cut at their common shape."""
    product = np.zeros_like(b)
    rows, columns = b.shape
    for i, j in zip(*np.nonzero(a), strict=True):
        product[i:, j:] += a[i, j] * b[: rows - i, : columns - j]
    return product
