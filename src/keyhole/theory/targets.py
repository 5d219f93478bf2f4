"""Target functions f*(x) = (1/N) Σ_i F(x_0, x_i).

Algebra, coefficients, the four families, the sphere distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, set_blocks
from keyhole._checks import check_count, check_finite, check_float_array, check_number, check_seed
from keyhole.data.sets import SetBatch

QUERY, KEY, PAIR = "query", "key", "pair"


@dataclass(frozen=True, eq=False)
class Factor:
    """One linear or bilinear form: <γ, x_0> (query), <β, x_i> (key) or <x_0, A x_i> (pair).

    ``array`` is γ or β (d,), or A (d, d); None is A = I, which is never stored.
    """

    kind: str
    array: Float[np.ndarray, "..."] | None

    @property
    def signature(self) -> tuple[str, bytes]:
        """Equal for equal factors: lets powers of one factor be collected."""
        return self.kind, b"" if self.array is None else self.array.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Factor) and self.signature == other.signature

    def __hash__(self) -> int:
        return hash(self.signature)

    def values(self, query: np.ndarray | None, tokens: np.ndarray, owner: np.ndarray) -> np.ndarray:
        """The form on every (query, key) pair; a form of the query alone has one value per set."""
        if self.kind == KEY:
            return np.asarray(tokens @ self.array)
        assert query is not None  # Polynomial.__call__ has checked it
        if self.kind == QUERY:
            return np.asarray((query @ self.array)[owner])
        turned = query if self.array is None else query @ self.array
        return np.asarray(np.einsum("td,td->t", turned[owner], tokens))


@dataclass(frozen=True)
class Term:
    """A coefficient times powers of factors <x_0, A x_i>, <β, x_i> and <γ, x_0>."""

    coefficient: float
    powers: tuple[tuple[Factor, int], ...]

    @property
    def degrees(self) -> tuple[int, int]:
        """(r, s): the degree in the query and in the key."""
        query = sum(power for factor, power in self.powers if factor.kind != KEY)
        key = sum(power for factor, power in self.powers if factor.kind != QUERY)
        return query, key

    @property
    def monomial(self) -> frozenset[tuple[Factor, int]]:
        """The term without its coefficient, in no particular order."""
        return frozenset(self.powers)

    def times(self, other: Term) -> Term:
        """The product of two terms, powers of the same factor collected."""
        powers = dict(self.powers)
        for factor, power in other.powers:
            powers[factor] = powers.get(factor, 0) + power
        return Term(self.coefficient * other.coefficient, tuple(powers.items()))


class Polynomial:
    """A target f*(x) = (1/N) Σ_i F(x_0, x_i) with F a polynomial of a query and one key.

    F is a sum of terms c · Π_j <x_0, A_j x_i>^{q_j} · Π_j <β_j, x_i>^{p_j} · Π_j <γ_j, x_0>^{r_j}.
    Build one from the families of this package or with :func:`monomial`; add, subtract, scale and
    multiply them with the usual signs. A product of two averages over the keys is no such average
    (it is one over pairs of keys), so ``*`` asks that one of the two depend on the query alone;
    :meth:`pairwise` multiplies the functions F before averaging.

    Parameters
    ----------
    dim : int
        The token dimension d.
    terms : iterable of Term
        Like terms are added.

    Examples
    --------
    >>> from keyhole.theory.targets import Correlation, QueryPower, TokenPower, sphere_sets
    >>> target = Correlation(q=1, dim=3) * QueryPower(p=2, dim=3) - 0.5 * TokenPower(p=2, dim=3)
    >>> target.coefficient_norms()[0, 2]
    0.25
    >>> target(sphere_sets(n_sets=5, n_keys=4, dim=3, seed=0)).shape
    (5,)
    """

    _named_by: tuple[str, ...] = ()
    """The arguments that a family's own name is followed by."""

    def __init__(self, dim: int, terms: Iterable[Term]) -> None:
        self._dim = check_count(dim, "dim")
        collected: dict[frozenset[tuple[Factor, int]], Term] = {}
        for term in terms:
            known = collected.get(term.monomial)
            coefficient = term.coefficient + (known.coefficient if known else 0.0)
            collected[term.monomial] = Term(coefficient, term.powers)
        self._terms = tuple(term for term in collected.values() if term.coefficient != 0.0)

    @property
    def dim(self) -> int:
        """The token dimension d."""
        return self._dim

    @property
    def terms(self) -> tuple[Term, ...]:
        """The terms of F."""
        return self._terms

    @property
    def degrees(self) -> tuple[int, int]:
        """The highest degrees of F in the query and in the key."""
        of_terms = [term.degrees for term in self._terms] or [(0, 0)]
        return max(r for r, _ in of_terms), max(s for _, s in of_terms)

    @property
    def needs_query(self) -> bool:
        """Whether F depends on the query."""
        return self.degrees[0] > 0

    @property
    def needs_keys(self) -> bool:
        """Whether F depends on the key; if not, the target is a function of the query alone."""
        return self.degrees[1] > 0

    def __call__(self, batch: SetBatch) -> Float[np.ndarray, " n"]:
        """Values of the target on a batch of n sets, ragged or not: an array (n,) in float64.

        One pass over the tokens per factor, in blocks of sets that keep temporaries within the
        memory budget.
        """
        if batch.dim != self._dim:
            raise ValueError(
                f"target and batch must share the token dimension: the target has dim {self._dim}, "
                f"the batch {batch.dim}. Build the target with dim={batch.dim}."
            )
        if batch.query is None and self.needs_query:
            raise ValueError(
                f"{self!r} depends on the query, and the batch of {len(batch)} sets has none. "
                "Pass SetBatch(keys, query=…)."
            )
        values = np.empty(len(batch))
        for rows in set_blocks(batch.offsets, MEMORY_BUDGET // (32 * self._dim)):
            values[rows] = self._block_values(batch[rows])
        return values

    def _block_values(self, batch: SetBatch) -> np.ndarray:
        tokens = batch.tokens.astype(np.float64, copy=False)
        query = None if batch.query is None else batch.query.astype(np.float64, copy=False)
        owner = np.repeat(np.arange(len(batch)), batch.lengths)
        forms = {factor: None for term in self._terms for factor, _ in term.powers}
        values = {factor: factor.values(query, tokens, owner) for factor in forms}
        total = np.zeros(len(tokens))
        for term in self._terms:
            product = np.full(len(tokens), term.coefficient)
            for factor, power in term.powers:
                product *= values[factor] ** power
            total += product
        return np.asarray(np.add.reduceat(total, batch.offsets[:-1]) / batch.lengths)

    def coefficient_norms(self) -> dict[tuple[int, int], float]:
        """The squared norms |f_rs|² for every degree (r, s) that occurs.

        f_rs is symmetrised in the query and in the key slots.

        Terms of equal degree are added before the norm is taken. Nothing of size d^(r+s) is formed.
        """
        by_degree: dict[tuple[int, int], list[Term]] = {}
        for term in self._terms:
            by_degree.setdefault(term.degrees, []).append(term)
        norms = {}
        for degree, terms in sorted(by_degree.items()):
            total = 0.0
            for a, first in enumerate(terms):
                for second in terms[a:]:
                    weight = (
                        first.coefficient * second.coefficient * (1.0 if first is second else 2.0)
                    )
                    total += weight * symmetric_product(first, second, self._dim)
            norms[degree] = max(total, 0.0)  # rounding may leave a cancelled norm just below zero
        return norms

    def pairwise(self, other: Polynomial) -> Polynomial:
        """The target (1/N) Σ_i F(x_0, x_i) G(x_0, x_i): multiply before averaging.

        Examples
        --------
        >>> from keyhole.theory.targets import Correlation, TokenPower
        >>> TokenPower(p=1, dim=3).pairwise(TokenPower(p=2, dim=3)) == TokenPower(p=3, dim=3)
        True
        """
        _check_same_dim(self, other)
        return Polynomial(self._dim, (a.times(b) for a in self._terms for b in other._terms))

    def __add__(self, other: Any) -> Polynomial:
        right = self._coerce(other)
        if right is None:
            return NotImplemented
        _check_same_dim(self, right)
        return Polynomial(self._dim, (*self._terms, *right._terms))

    __radd__ = __add__

    def __neg__(self) -> Polynomial:
        return self * -1.0

    def __sub__(self, other: Any) -> Polynomial:
        right = self._coerce(other)
        if right is None:
            return NotImplemented
        return self + (-right)

    def __rsub__(self, other: Any) -> Polynomial:
        return (-self).__add__(other)

    def __mul__(self, other: Any) -> Polynomial:
        right = self._coerce(other)
        if right is None:
            return NotImplemented
        if self.needs_keys and right.needs_keys:
            raise ValueError(
                f"the product of {self!r} and {right!r} is an average over pairs of keys, not over "
                "keys, so it leaves the class (1/N) Σ_i F(x_0, x_i). One of the two must depend on "
                "the query alone; to multiply the functions of a key before averaging, use "
                "a.pairwise(b)."
            )
        return self.pairwise(right)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Polynomial:
        return self * (1.0 / check_number(other, "divisor"))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Polynomial):
            return NotImplemented
        mine = {term.monomial: term.coefficient for term in self._terms}
        return self._dim == other._dim and mine == {t.monomial: t.coefficient for t in other._terms}

    def __hash__(self) -> int:
        return hash((self._dim, frozenset((t.monomial, t.coefficient) for t in self._terms)))

    def __repr__(self) -> str:
        if self._named_by:
            shown = (f"{name}={getattr(self, name):.15g}" for name in self._named_by)
            return f"{type(self).__name__}({', '.join(shown)})"
        degrees = (
            ", ".join(str(d) for d in sorted({term.degrees for term in self._terms})) or "none"
        )
        return f"Polynomial(dim={self._dim}, {len(self._terms)} terms of degrees {degrees})"

    def _coerce(self, other: Any) -> Polynomial | None:
        if isinstance(other, Polynomial):
            return other
        if isinstance(other, (int, float, np.integer, np.floating)) and not isinstance(other, bool):
            return Polynomial(self._dim, [Term(check_number(other, "constant"), ())])
        return None


def monomial(
    dim: int,
    coefficient: float | int = 1.0,
    pairs: Sequence[tuple[Any, int]] = (),
    keys: Sequence[tuple[Any, int]] = (),
    query: Sequence[tuple[Any, int]] = (),
) -> Polynomial:
    """The target of one monomial in correlations, keys and query.

    (1/N) Σ_i c · Π_j <x_0, A_j x_i>^{q_j} · Π_j <β_j, x_i>^{p_j} · Π_j <γ_j, x_0>^{r_j}.

    Parameters
    ----------
    dim : int
        Token dimension d.
    coefficient : float
        c.
    pairs : sequence of (A, q)
        A is a (d, d) array, or None for the identity.
    keys : sequence of (β, p)
        β is a (d,) array.
    query : sequence of (γ, r)
        γ is a (d,) array.

    Examples
    --------
    >>> import numpy as np
    >>> from keyhole.theory.targets import Correlation
    >>> monomial(3, pairs=[(None, 2)], keys=[(np.array([1.0, 0.0, 0.0]), 1)]) == Correlation(
    ...     q=2, dim=3
    ... )
    True
    """
    dim = check_count(dim, "dim")
    term = Term(check_number(coefficient, "coefficient"), ())
    for kind, name, given in ((PAIR, "pairs", pairs), (KEY, "keys", keys), (QUERY, "query", query)):
        for array, power in given:
            power = check_count(power, f"power of `{name}`", minimum=0)
            factor = _checked_factor(kind, name, array, dim)
            if power > 0:
                nonzero = factor.array is None or bool(factor.array.any())
                term = term.times(Term(1.0 if nonzero else 0.0, ((factor, power),)))
    return Polynomial(dim, [term])


def _checked_factor(kind: str, name: str, array: Any, dim: int) -> Factor:
    if kind == PAIR and array is None:
        return Factor(PAIR, None)
    array = check_float_array(array, name).astype(np.float64)
    shape = (dim, dim) if kind == PAIR else (dim,)
    if array.shape != shape:
        raise ValueError(
            f"a factor of `{name}` must have shape {shape} for dim {dim}: got shape {array.shape}."
        )
    check_finite(array, name)
    if kind == PAIR and np.array_equal(array, np.eye(dim)):
        return Factor(PAIR, None)
    array = (
        array + 0.0
    )  # a copy of our own, and −0 becomes 0, so that equal factors have equal bytes
    array.flags.writeable = False
    return Factor(kind, array)


def _check_same_dim(a: Polynomial, b: Polynomial) -> None:
    if a.dim != b.dim:
        raise ValueError(
            f"targets must share the token dimension: got dim {a.dim} and dim {b.dim}."
        )


# Inner products of symmetrised coefficient tensors, by counting contractions instead of forming
# tensors. A term of degree (r, s) is a tensor with r query slots and s key slots: a vector fills
# one slot, a matrix links a query slot to a key slot. An inner product of two symmetrised terms is
# a sum over all ways to join their slots, query to query and key to key. Joined slots form chains
# that end in two vectors, and closed rings that are traces of words A_1 A_2ᵀ A_3 A_4ᵀ …. The sum
# over all joinings is the exponential of the sum over connected ones; powers are kept as
# multiplicities, so a term of degree 8 has few states where its joinings are 8! many. Joints within
# one term (Laplacians of it) are needed for its harmonic parts, joints across, from a query slot of
# one term to a key slot of the other, for its parts under joint rotations of query and key; both
# are counted apart.

Content = tuple[int, ...]
"""How many copies of each node a chain, a ring or a whole joining uses."""

Joints = tuple[int, int, int, int]
"""Joints inside the first term, key to key and query to query; then across, its query slots and its
key slots.
"""


def symmetric_product(first: Term, second: Term, dim: int) -> float:
    """<Sym T_1, Sym T_2> of two terms of equal degree, coefficients left out.

    >>> from keyhole.theory.targets import Correlation
    >>> term, = Correlation(q=2, dim=3).terms
    >>> symmetric_product(term, term, dim=3)    # (d+1)(d+2)/3!
    3.333333333333333...
    """
    if first.degrees != second.degrees:
        return 0.0
    return float(joinings(first, second, dim, inside=False)[0, 0])


def joinings(first: Term, second: Term, dim: int, inside: bool = True) -> Float[np.ndarray, "i j"]:
    """Sum of all joinings of two terms, divided by r! s!, coefficients left out.

    The terms are of degrees (r, s) and as even.

    Entry [i, j] has i key joints and j query joints inside the first term, up to ⌊s/2⌋ and ⌊r/2⌋;
    without ``inside`` slots of one term are not joined, and there is one entry. States number the
    product of (power + 1) over all factors. With one matrix, however often it occurs, a singular
    value decomposition makes every step O(d); with several, a ring costs O(d³) per state.
    """
    return _joinings(_nodes(first, second), dim, first.degrees, inside, crossings=0)[:, :, 0, 0]


def crossed_joinings(first: Term, second: Term, dim: int) -> Float[np.ndarray, "2 i j"]:
    """Joinings without and with one joint across each way.

    A query slot of each term to a key slot of the other.
    """
    nodes = [
        _Node(f.kind, side, f.array, n)
        for side, term in enumerate((first, second))
        for f, n in term.powers
    ]
    sums = _joinings(nodes, dim, first.degrees, inside=True, crossings=1)
    return np.stack([sums[:, :, 0, 0], sums[:, :, 1, 1]])


def _joinings(
    nodes: list[_Node], dim: int, degrees: tuple[int, int], inside: bool, crossings: int
) -> np.ndarray:
    within = (degrees[1] // 2 + 1, degrees[0] // 2 + 1) if inside else (1, 1)
    connected = _Connected(nodes, dim, (*within, crossings + 1, crossings + 1), inside)
    for start in range(len(nodes)):
        connected.add_chains(start)
        connected.add_rings(start)
    return _exponential(connected.sums, nodes, connected.shape)


@dataclass(frozen=True)
class _Node:
    """A factor of one of the two terms (side 0 or 1) and how often it occurs there."""

    kind: str
    side: int
    array: np.ndarray | None
    copies: int


def _nodes(first: Term, second: Term) -> list[_Node]:
    """The factors of both terms, in coordinates where a single matrix is diagonal.

    Such a matrix is kept as a vector.
    """
    powers = [
        (side, factor, power)
        for side, term in enumerate((first, second))
        for factor, power in term.powers
    ]
    matrices = {
        factor for _, factor, _ in powers if factor.kind == PAIR and factor.array is not None
    }
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
    """Sums over connected joinings, by content.

    Chains between two vectors, and rings of matrices.
    """

    def __init__(self, nodes: list[_Node], dim: int, shape: Joints, inside: bool) -> None:
        self.nodes = nodes
        self.sides = [node.side for node in nodes]
        self.dim = dim
        self.shape = shape
        self.inside = inside
        self.pairs = [i for i, node in enumerate(nodes) if node.kind == PAIR]
        dense = any(
            array is not None and array.ndim == 2 for array in (nodes[i].array for i in self.pairs)
        )
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
                # a chain between copies of one vector is walked from both of its ends
                weight = 0.5 if end == start else 1.0
                for joints, value in values.items():
                    closed = self._joint(joints, slot, node.kind, last, end)
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
            for joints, value in values.items():
                closed = self._joint(joints, slot, QUERY, last, start)
                if closed is not None:
                    trace = float(value.sum() if value.ndim == 1 else np.trace(value))
                    # a ring of n matrices is walked once from each of them
                    self._add(content, closed, trace / sum(content))

    def _walk(
        self, start: int, slot: str, begin: np.ndarray
    ) -> Iterator[tuple[Content, str, int, dict[Joints, np.ndarray]]]:
        """Yield every (content, open slot, last node) reached from ``start``.

        With the sum over its words.
        """
        empty = tuple(0 for _ in self.nodes)
        layer = {(_plus(empty, start), start, slot): {(0, 0, 0, 0): begin}}
        while layer:
            following: dict[tuple[Content, int, str], dict[Joints, np.ndarray]] = {}
            for (content, last, open_slot), values in layer.items():
                yield content, open_slot, last, values
                for node in self.pairs:
                    if content[node] < self.nodes[node].copies:
                        for entry, leaving in self._entries(open_slot):
                            target = following.setdefault((_plus(content, node), node, leaving), {})
                            self._extend(target, values, open_slot, entry, last, node)
            layer = {key: values for key, values in following.items() if values}

    def _entries(self, slot: str) -> tuple[tuple[str, str], ...]:
        """Slots by which a walk may enter the next node, each with the one it leaves by.

        Its own kind first.
        """
        straight, across = (KEY, QUERY), (QUERY, KEY)
        if slot == QUERY:
            straight, across = across, straight
        return (straight, across) if self.shape[2] > 1 else (straight,)

    def _extend(
        self,
        target: dict[Joints, np.ndarray],
        values: dict[Joints, np.ndarray],
        slot: str,
        entry: str,
        last: int,
        node: int,
    ) -> None:
        array = self.nodes[node].array
        for joints, value in values.items():
            joined = self._joint(joints, slot, entry, last, node)
            if joined is not None:
                moved = _apply(value, array, entry)
                target[joined] = target[joined] + moved if joined in target else moved

    def _joint(self, joints: Joints, slot: str, entry: str, last: int, node: int) -> Joints | None:
        """Count the joint of a slot of one node with a slot of the next.

        None where it is not allowed.
        """
        side, straight, (i, j, e, f) = self.sides[last], slot == entry, joints
        if side != self.sides[node]:
            if straight:
                return joints
            # the query slot of the first term, or its key slot
            if (slot == QUERY) == (side == 0):
                return (i, j, e + 1, f) if e + 1 < self.shape[2] else None
            return (i, j, e, f + 1) if f + 1 < self.shape[3] else None
        if not self.inside or not straight:
            return None
        if side == 1:
            return joints
        if slot == KEY:
            return (i + 1, j, e, f) if i + 1 < self.shape[0] else None
        return (i, j + 1, e, f) if j + 1 < self.shape[1] else None

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
    return np.asarray(value @ array.T if slot == KEY else value @ array)


def _plus(content: Content, node: int) -> Content:
    return (*content[:node], content[node] + 1, *content[node + 1 :])


def _exponential(
    connected: dict[Content, np.ndarray], nodes: list[_Node], shape: Joints
) -> np.ndarray:
    """Sum over all joinings from the sum over connected ones, divided by r! s! of the first term.

    m_t E_m = Σ_c c_t C_c E_{m−c} for any node t, from the derivative of E = exp C. Every E_m is
    kept in units of r_m! s_m! / Π m_t!, which keeps it near one where the plain coefficient would
    underflow.
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
    one[0, 0, 0, 0] = 1.0
    known[tuple(0 for _ in nodes)] = one

    def total(content: Content) -> np.ndarray:
        pending = [content]
        while pending:  # a stack of our own: high powers would exhaust Python's
            m = pending[-1]
            if m in known:
                pending.pop()
                continue
            t = next(i for i, n in enumerate(m) if n > 0)
            steps = [
                c for c in connected if c[t] > 0 and all(a <= b for a, b in zip(c, m, strict=True))
            ]
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
    """Product of two polynomials in four variables, cut at their common shape."""
    product = np.zeros_like(b)
    for place in zip(*np.nonzero(a), strict=True):
        to = tuple(slice(n, None) for n in place)
        source = tuple(slice(None, size - n) for n, size in zip(place, b.shape, strict=True))
        product[to] += a[place] * b[source]
    return product


def sphere_sets(n_sets: int, n_keys: int, dim: int, seed: int) -> SetBatch:
    """Draw sets whose query and keys are i.i.d. uniform on the unit sphere of R^d.

    Parameters
    ----------
    n_sets, n_keys, dim : int
        n, N and d. For d = 1 the sphere is {−1, 1}.
    seed : int
        The same seed is the same sequence of sets: the first n of a longer draw are the draw of n.

    Returns
    -------
    SetBatch
        n sets of N keys, with query.

    Notes
    -----
    Cost: n (N+1) d Gaussian draws.

    Examples
    --------
    >>> batch = sphere_sets(n_sets=4, n_keys=2, dim=3, seed=0)
    >>> batch
    SetBatch(4 sets, 2 keys each (8 in all), dim 3, with query, float64)
    >>> bool((batch.query[:2] == sphere_sets(2, 2, 3, seed=0).query).all())   # draws nest
    True
    """
    n_sets, n_keys = check_count(n_sets, "n_sets"), check_count(n_keys, "n_keys")
    dim, seed = check_count(dim, "dim"), check_seed(seed)
    # a Generator fills arrays in order, set after set: that is why draws nest
    tokens = np.random.default_rng(seed).standard_normal((n_sets, 1 + n_keys, dim))
    tokens /= np.linalg.norm(tokens, axis=-1, keepdims=True)
    return SetBatch.from_tokens(tokens)


def fixed_free_rotation(dim: int, seed: int) -> Float[np.ndarray, "d d"]:
    """Draw an orthogonal matrix without fixed directions.

    No x ≠ 0 has P x = x, and tr P = 0 for d ≥ 2.

    Quarter turns in random orthogonal planes. An odd dimension leaves three directions over, which
    get a turn by 60° and a reflection: eigenvalues e^{±iπ/3} and −1, whose sum is zero too. In
    dimension one P = −1.

    Examples
    --------
    >>> import numpy as np
    >>> P = fixed_free_rotation(dim=5, seed=0)
    >>> bool(np.allclose(P @ P.T, np.eye(5))), bool(abs(np.trace(P)) < 1e-12)
    (True, True)
    """
    dim, seed = check_count(dim, "dim"), check_seed(seed)
    if dim == 1:
        return np.array([[-1.0]])
    turns = np.zeros((dim, dim))
    planes = dim - 3 if dim % 2 else dim
    for i in range(0, planes, 2):
        turns[i, i + 1], turns[i + 1, i] = -1.0, 1.0
    if dim % 2:
        cosine, sine = math.cos(math.pi / 3), math.sin(math.pi / 3)
        turns[planes:, planes:] = [[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, -1.0]]
    basis, triangle = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    basis *= np.sign(
        np.diag(triangle)
    )  # QR's own signs would bias the basis; with these it is uniform
    return np.asarray(basis @ turns @ basis.T)


class QueryPower(Polynomial):
    """A function of the query alone: f_{0,p}(x) = <β, x_0>^p.

    Parameters
    ----------
    p, dim : int
        Degree, at least 0, and token dimension d.
    beta : array (d,), optional
        The direction β, used as it is given; the first basis vector by default.

    Examples
    --------
    >>> QueryPower(p=2, dim=3).coefficient_norms()
    {(2, 0): 1.0}
    """

    _named_by = ("p", "dim")

    def __init__(self, p: int, dim: int, beta: Float[np.ndarray, " d"] | None = None) -> None:
        self.p = check_count(p, "p", minimum=0)
        self.beta = _direction(beta, dim)
        super().__init__(dim, monomial(dim, query=[(self.beta, self.p)]).terms)


class TokenPower(Polynomial):
    """The average of a function of the keys: f_{1,p}(x) = (1/N) Σ_i <β, x_i>^p.

    Parameters
    ----------
    p, dim : int
        Degree, at least 0, and token dimension d.
    beta : array (d,), optional
        The direction β, used as it is given; the first basis vector by default.

    Examples
    --------
    >>> TokenPower(p=2, dim=3).coefficient_norms()
    {(0, 2): 1.0}
    """

    _named_by = ("p", "dim")

    def __init__(self, p: int, dim: int, beta: Float[np.ndarray, " d"] | None = None) -> None:
        self.p = check_count(p, "p", minimum=0)
        self.beta = _direction(beta, dim)
        super().__init__(dim, monomial(dim, keys=[(self.beta, self.p)]).terms)


class Correlation(Polynomial):
    """Keys weighted by their correlation with the query.

    f_{2,q}(x) = (1/N) Σ_i <x_0, x_i>^q <β, x_i>.

    Its |f_{q,q+1}|² = (d+1) ⋯ (d+q) / (q+1)! grows like d^q.

    Parameters
    ----------
    q, dim : int
        Power of the correlation, at least 0, and token dimension d.
    beta : array (d,), optional
        The direction β, used as it is given; the first basis vector by default.

    Examples
    --------
    >>> Correlation(q=1, dim=3).coefficient_norms()
    {(1, 2): 2.0}
    """

    _named_by = ("q", "dim")

    def __init__(self, q: int, dim: int, beta: Float[np.ndarray, " d"] | None = None) -> None:
        self.q = check_count(q, "q", minimum=0)
        self.beta = _direction(beta, dim)
        super().__init__(dim, monomial(dim, pairs=[(None, self.q)], keys=[(self.beta, 1)]).terms)


class RotatedCorrelation(Polynomial):
    """Correlation through a rotation: f_{3,γ}(x) = (1/N) Σ_i <x_0, S_γ x_i>³ <β, x_i>.

    With S_γ = (1−γ) I + γ P.

    P is a random rotation without fixed directions and with trace zero
    (:func:`fixed_free_rotation`): γ = 0 is ``Correlation(q=3)``; at γ = 1 the correlation has
    nothing left in common with <x_0, x_i>. In even dimension S_γ is a multiple of a rotation, by
    √((1−γ)² + γ²), so every γ is equally hard, up to that scale, for heads of zero mean.

    Parameters
    ----------
    gamma : float
        How far the key is turned: 0 not at all, 1 by P. Any number is allowed.
    dim, seed : int
        Token dimension d; the seed names P.
    beta : array (d,), optional
        The direction β, as above.

    Examples
    --------
    >>> RotatedCorrelation(gamma=0.0, dim=4, seed=0) == Correlation(q=3, dim=4)
    True
    """

    _named_by = ("gamma", "dim", "seed")

    def __init__(
        self, gamma: float | int, dim: int, seed: int, beta: Float[np.ndarray, " d"] | None = None
    ) -> None:
        self.gamma = check_number(gamma, "gamma")
        self.seed = check_seed(seed)
        self.beta = _direction(beta, dim)
        self.rotation = (1 - self.gamma) * np.eye(dim) + self.gamma * fixed_free_rotation(dim, seed)
        super().__init__(
            dim, monomial(dim, pairs=[(self.rotation, 3)], keys=[(self.beta, 1)]).terms
        )


def _direction(beta: Any, dim: int) -> np.ndarray:
    if beta is None:
        first = np.zeros(check_count(dim, "dim"))
        first[0] = 1.0
        return first
    return np.array(beta, dtype=np.float64)
