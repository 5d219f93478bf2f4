"""Target functions f*(x) = (1/N) Σ_i F(x_0, x_i).

This module holds their algebra and their coefficients, the four families of the paper, and draws
from the sphere distribution. The tasks of the literature, labelled sets of which most are no such
average, are in `keyhole.theory.tasks` and have their names here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET, set_blocks
from keyhole._checks import check_count, check_finite, check_float_array, check_number, check_seed
from keyhole.data.sets import SetBatch
from keyhole.theory.tasks import (  # noqa: F401  (their public place is kh.targets)
    TASKS,
    AbsoluteAverage,
    CorrelationPower,
    Counting,
    InContextRegression,
    Lookup,
    Majority,
    Maximum,
    NearestKey,
    PairsOfKeys,
    PositionAndMeaning,
    SetTask,
    SimilarityWeightedMean,
    SingleLocation,
    SparseSelection,
    SparseTokenClasses,
    TwoHops,
    word_sensitivity,
)

# the kinds of factors; QUERY and KEY also name the slots of a coefficient tensor
QUERY = "query"
KEY = "key"
PAIR = "pair"


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
        if self.array is None:
            return self.kind, b""
        return self.kind, self.array.tobytes()

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
        if self.array is not None:
            query = query @ self.array
        return np.asarray(np.einsum("td,td->t", query[owner], tokens))


@dataclass(frozen=True)
class Term:
    """A coefficient times powers of factors <x_0, A x_i>, <β, x_i> and <γ, x_0>."""

    coefficient: float
    powers: tuple[tuple[Factor, int], ...]

    @property
    def degrees(self) -> tuple[int, int]:
        """(r, s): the degree in the query and in the key."""
        query_degree = sum(power for factor, power in self.powers if factor.kind != KEY)
        key_degree = sum(power for factor, power in self.powers if factor.kind != QUERY)
        return query_degree, key_degree

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
            coefficient = term.coefficient
            if term.monomial in collected:
                coefficient += collected[term.monomial].coefficient
            collected[term.monomial] = Term(coefficient=coefficient, powers=term.powers)
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
        query_degree = max((term.degrees[0] for term in self._terms), default=0)
        key_degree = max((term.degrees[1] for term in self._terms), default=0)
        return query_degree, key_degree

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
        """Values of the target on as many sets as fit into memory at once."""
        tokens = batch.tokens.astype(np.float64, copy=False)
        query = batch.query
        if query is not None:
            query = query.astype(np.float64, copy=False)
        owner = np.repeat(np.arange(len(batch)), batch.lengths)

        # every factor once, however many terms it occurs in
        factor_values: dict[Factor, np.ndarray] = {}
        for term in self._terms:
            for factor, _ in term.powers:
                if factor not in factor_values:
                    factor_values[factor] = factor.values(query, tokens, owner)

        # F of every key, then the average over the keys of a set
        pair_values = np.zeros(len(tokens))
        for term in self._terms:
            product = np.full(len(tokens), term.coefficient)
            for factor, power in term.powers:
                product *= factor_values[factor] ** power
            pair_values += product
        return np.asarray(np.add.reduceat(pair_values, batch.offsets[:-1]) / batch.lengths)

    def coefficient_norms(self) -> dict[tuple[int, int], float]:
        """The squared norms |f_rs|² for every degree (r, s) that occurs.

        f_rs is symmetrised in the query and in the key slots.

        Terms of equal degree are added before the norm is taken. Nothing of size d^(r+s) is formed.
        """
        by_degree: dict[tuple[int, int], list[Term]] = {}
        for term in self._terms:
            by_degree.setdefault(term.degrees, []).append(term)

        # |Σ_a T_a|² = Σ_a <T_a, T_a> + 2 Σ_{a<b} <T_a, T_b>
        norms = {}
        for degree, terms in sorted(by_degree.items()):
            total = 0.0
            for a, first in enumerate(terms):
                for second in terms[a:]:
                    multiplicity = 1.0 if first is second else 2.0
                    weight = first.coefficient * second.coefficient * multiplicity
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
        products = [first.times(second) for first in self._terms for second in other._terms]
        return Polynomial(self._dim, products)

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
        return self._dim == other._dim and self._coefficients() == other._coefficients()

    def __hash__(self) -> int:
        return hash((self._dim, frozenset(self._coefficients().items())))

    def _coefficients(self) -> dict[frozenset[tuple[Factor, int]], float]:
        """The coefficient of every monomial: what makes two targets equal."""
        return {term.monomial: term.coefficient for term in self._terms}

    def __repr__(self) -> str:
        if self._named_by:
            arguments = [f"{name}={getattr(self, name):.15g}" for name in self._named_by]
            return f"{type(self).__name__}({', '.join(arguments)})"
        term_degrees = sorted({term.degrees for term in self._terms})
        degrees = ", ".join(str(degree) for degree in term_degrees) or "none"
        return f"Polynomial(dim={self._dim}, {len(self._terms)} terms of degrees {degrees})"

    def _coerce(self, other: Any) -> Polynomial | None:
        """A number as a constant target; None for what is neither number nor target."""
        if isinstance(other, Polynomial):
            return other
        is_number = isinstance(other, (int, float, np.integer, np.floating))
        if is_number and not isinstance(other, bool):
            constant = Term(coefficient=check_number(other, "constant"), powers=())
            return Polynomial(self._dim, [constant])
        return None


def monomial(
    dim: int,
    coefficient: float | int = 1.0,
    pairs: Sequence[tuple[Any, int]] = (),
    keys: Sequence[tuple[Any, int]] = (),
    query: Sequence[tuple[Any, int]] = (),
) -> Polynomial:
    """The target of one monomial in correlations, keys and query.

    It is (1/N) Σ_i c · Π_j <x_0, A_j x_i>^{q_j} · Π_j <β_j, x_i>^{p_j} · Π_j <γ_j, x_0>^{r_j}.

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
    term = Term(coefficient=check_number(coefficient, "coefficient"), powers=())
    for kind, name, factors in (
        (PAIR, "pairs", pairs),
        (KEY, "keys", keys),
        (QUERY, "query", query),
    ):
        for array, power in factors:
            power = check_count(power, f"power of `{name}`", minimum=0)
            factor = _checked_factor(kind, name, array, dim)
            if power == 0:
                continue
            # a factor of zeros makes the whole term zero
            is_zero = factor.array is not None and not factor.array.any()
            unit = 0.0 if is_zero else 1.0
            term = term.times(Term(coefficient=unit, powers=((factor, power),)))
    return Polynomial(dim, [term])


def _checked_factor(kind: str, name: str, array: Any, dim: int) -> Factor:
    """A factor with an array of the right shape; the identity matrix is stored as None."""
    if kind == PAIR and array is None:
        return Factor(PAIR, None)
    array = check_float_array(array, name).astype(np.float64)
    if kind == PAIR:
        shape: tuple[int, ...] = (dim, dim)
    else:
        shape = (dim,)
    if array.shape != shape:
        raise ValueError(
            f"a factor of `{name}` must have shape {shape} for dim {dim}: got shape {array.shape}."
        )
    check_finite(array, name)
    if kind == PAIR and np.array_equal(array, np.eye(dim)):
        return Factor(PAIR, None)
    # a new array that nobody else can change; −0 becomes 0, so that equal factors have equal bytes
    array = array + 0.0
    array.flags.writeable = False
    return Factor(kind, array)


def _check_same_dim(a: Polynomial, b: Polynomial) -> None:
    """Refuse to add or multiply targets of different token dimensions."""
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
"""How often a chain, a ring or a whole joining uses each node."""

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

    The first term has the degrees (r, s), and the degrees of the second have the same parity.

    Entry [i, j] has i key joints and j query joints inside the first term, up to ⌊s/2⌋ and ⌊r/2⌋.
    Without ``inside`` slots of one term are not joined, and there is one entry. States number the
    product of (power + 1) over all factors. With one matrix, however often it occurs, a singular
    value decomposition makes every step O(d); with several, a ring costs O(d³) per state.
    """
    return _joinings(_nodes(first, second), dim, first.degrees, inside, crossings=0)[:, :, 0, 0]


def crossed_joinings(first: Term, second: Term, dim: int) -> Float[np.ndarray, "2 i j"]:
    """Joinings without and with one joint across each way.

    A joint across joins a query slot of one term to a key slot of the other.
    """
    nodes = _plain_nodes(first, second)
    sums = _joinings(nodes, dim, first.degrees, inside=True, crossings=1)
    return np.stack([sums[:, :, 0, 0], sums[:, :, 1, 1]])


def _joinings(
    nodes: list[_Node], dim: int, degrees: tuple[int, int], inside: bool, crossings: int
) -> np.ndarray:
    """Sums of all joinings, by the number of joints of each of the four kinds."""
    # one entry per number of joints, none included; a joint inside takes two slots
    n_key_joints = 1
    n_query_joints = 1
    if inside:
        n_key_joints = degrees[1] // 2 + 1
        n_query_joints = degrees[0] // 2 + 1
    shape = (n_key_joints, n_query_joints, crossings + 1, crossings + 1)

    # connected joinings first, then all of them
    connected = _Connected(nodes, dim, shape, inside)
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
    power: int


def _plain_nodes(first: Term, second: Term) -> list[_Node]:
    """The factors of both terms as they are."""
    nodes = []
    for side, term in enumerate((first, second)):
        for factor, power in term.powers:
            node = _Node(kind=factor.kind, side=side, array=factor.array, power=power)
            nodes.append(node)
    return nodes


def _nodes(first: Term, second: Term) -> list[_Node]:
    """The factors of both terms, in coordinates where a single matrix is diagonal.

    Such a matrix is stored as a vector.
    """
    # coordinates are turned where there is one matrix only, and no <x_0, x_i> beside it
    pair_factors = {factor for factor, _ in (*first.powers, *second.powers) if factor.kind == PAIR}
    plain_nodes = _plain_nodes(first, second)
    if len(pair_factors) != 1:
        return plain_nodes
    [matrix] = pair_factors
    if matrix.array is None:
        return plain_nodes

    # A = U S Vᵀ: in the coordinates Uᵀ x_0 and Vᵀ x_i the matrix is S
    left, singular_values, right = np.linalg.svd(matrix.array)
    turned_nodes = []
    for node in plain_nodes:
        if node.kind == PAIR:
            array = singular_values
        elif node.kind == QUERY:
            array = np.asarray(left.T @ node.array)
        else:
            array = np.asarray(right @ node.array)
        turned_nodes.append(replace(node, array=array))
    return turned_nodes


class _Connected:
    """Sums over connected joinings, by content.

    These are chains between two vectors, and rings of matrices.
    """

    def __init__(self, nodes: list[_Node], dim: int, shape: Joints, inside: bool) -> None:
        self.nodes = nodes
        self.sides = [node.side for node in nodes]
        self.dim = dim
        self.shape = shape
        self.inside = inside
        self.pairs = [i for i, node in enumerate(nodes) if node.kind == PAIR]
        # where all matrices are diagonal, the identity is stored by its diagonal too
        pair_arrays = [nodes[i].array for i in self.pairs]
        has_dense = any(array is not None and array.ndim == 2 for array in pair_arrays)
        self.identity: np.ndarray
        if has_dense:
            self.identity = np.eye(dim)
        else:
            self.identity = np.ones(dim)
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
                assert node.array is not None
                # a chain between two uses of one vector is walked from both of its ends
                weight = 0.5 if end == start else 1.0
                for joints, value in values.items():
                    closed_joints = self._joint(joints, slot, node.kind, last, end)
                    if closed_joints is None:
                        continue
                    product = weight * float(node.array @ value)
                    self._add(_plus(content, end), closed_joints, product)

    def add_rings(self, start: int) -> None:
        """Rings in which matrix ``start`` is the one we begin to walk from, by its key slot."""
        first = self.nodes[start]
        if first.kind != PAIR:
            return
        begin = first.array
        if begin is None:
            begin = self.identity
        for content, slot, last, values in self._walk(start, KEY, begin):
            for joints, value in values.items():
                closed_joints = self._joint(joints, slot, QUERY, last, start)
                if closed_joints is None:
                    continue
                if value.ndim == 1:
                    trace = float(value.sum())
                else:
                    trace = float(np.trace(value))
                # a ring of n matrices is walked once from each of them
                self._add(content, closed_joints, trace / sum(content))

    def _walk(
        self, start: int, slot: str, begin: np.ndarray
    ) -> Iterator[tuple[Content, str, int, dict[Joints, np.ndarray]]]:
        """Yield every (content, open slot, last node) reached from ``start``.

        The fourth item is the sum over the words that lead there, by their joints.
        """
        empty = tuple(0 for _ in self.nodes)
        layer = {(_plus(empty, start), start, slot): {(0, 0, 0, 0): begin}}
        while layer:
            # walks that are longer by one matrix; those which end in the same state are added up
            longer: dict[tuple[Content, int, str], dict[Joints, np.ndarray]] = {}
            for (content, last, open_slot), values in layer.items():
                yield content, open_slot, last, values
                for node in self.pairs:
                    if content[node] >= self.nodes[node].power:
                        continue
                    for entry, leaving in self._entries(open_slot):
                        state = (_plus(content, node), node, leaving)
                        sums = longer.setdefault(state, {})
                        self._extend(sums, values, open_slot, entry, last, node)
            layer = {state: sums for state, sums in longer.items() if sums}

    def _entries(self, slot: str) -> tuple[tuple[str, str], ...]:
        """Slots by which a walk may enter the next node, each with the one it leaves by.

        The entry by a slot of the same kind comes first.
        """
        if slot == KEY:
            straight = (KEY, QUERY)
            across = (QUERY, KEY)
        else:
            straight = (QUERY, KEY)
            across = (KEY, QUERY)
        if self.shape[2] > 1:
            return (straight, across)
        return (straight,)

    def _extend(
        self,
        sums: dict[Joints, np.ndarray],
        values: dict[Joints, np.ndarray],
        slot: str,
        entry: str,
        last: int,
        node: int,
    ) -> None:
        """Carry walks that end at ``last`` across ``node``, and add them to ``sums``."""
        array = self.nodes[node].array
        for joints, value in values.items():
            new_joints = self._joint(joints, slot, entry, last, node)
            if new_joints is None:
                continue
            moved = _apply(value, array, entry)
            if new_joints in sums:
                moved = sums[new_joints] + moved
            sums[new_joints] = moved

    def _joint(self, joints: Joints, slot: str, entry: str, last: int, node: int) -> Joints | None:
        """The joints counted so far, with the one of a slot of ``last`` with a slot of ``node``.

        None where that joint is not allowed.
        """
        side = self.sides[last]
        is_between_terms = side != self.sides[node]
        is_straight = slot == entry

        # joints that need no counting: straight ones between the terms, and inside the second term
        if is_between_terms and is_straight:
            return joints
        if not is_between_terms:
            if not self.inside or not is_straight:
                return None
            if side == 1:
                return joints

        # which of the four counts goes up by one
        if is_between_terms:
            # the joint is across: by the query slot of the first term, or by its key slot
            uses_query_of_first = (slot == QUERY) == (side == 0)
            position = 2 if uses_query_of_first else 3
        else:
            # the joint is inside the first term
            position = 0 if slot == KEY else 1
        counts = _plus(joints, position)
        if counts[position] >= self.shape[position]:
            return None
        i, j, e, f = counts
        return i, j, e, f

    def _add(self, content: Content, joints: Joints, value: float) -> None:
        """Add to the sum of a content, unless it uses a node more often than the term has it."""
        if content not in self.sums:
            if any(n > node.power for n, node in zip(content, self.nodes, strict=True)):
                return
            self.sums[content] = np.zeros(self.shape)
        self.sums[content][joints] += value


def _apply(value: np.ndarray, array: np.ndarray | None, slot: str) -> np.ndarray:
    """Carry the open end of a walk across a matrix, from its ``slot`` to its other one."""
    if array is None:
        return value
    if array.ndim == 1:  # diagonal
        return np.asarray(value * array)
    if slot == KEY:
        return np.asarray(value @ array.T)
    return np.asarray(value @ array)


def _plus(counts: tuple[int, ...], position: int) -> tuple[int, ...]:
    """The counts with one of them raised by one."""
    return (*counts[:position], counts[position] + 1, *counts[position + 1 :])


def _exponential(
    connected: dict[Content, np.ndarray], nodes: list[_Node], shape: Joints
) -> np.ndarray:
    """Sum over all joinings from the sum over connected ones, divided by r! s! of the first term.

    m_t E_m = Σ_c c_t C_c E_{m−c} for any node t, from the derivative of E = exp C. Every E_m is
    kept in units of r_m! s_m! / Π m_t!, which keeps it near one where the plain coefficient would
    underflow.
    """

    def unit(content: Content) -> tuple[int, int]:
        """Π m_t!, and r_m! s_m! of the slots that the content uses in the first term."""
        n_keys = 0
        n_queries = 0
        for count, node in zip(content, nodes, strict=True):
            if node.side == 0 and node.kind != QUERY:
                n_keys += count
            if node.side == 0 and node.kind != KEY:
                n_queries += count
        orders = math.prod(math.factorial(count) for count in content)
        return orders, math.factorial(n_keys) * math.factorial(n_queries)

    # E_0 = 1: the empty joining, without joints
    one = np.zeros(shape)
    one[0, 0, 0, 0] = 1.0
    exponentials: dict[Content, np.ndarray] = {tuple(0 for _ in nodes): one}

    # E_m needs E of smaller contents; they wait on a stack, as recursion at high powers would
    # exhaust Python's
    whole = tuple(node.power for node in nodes)
    pending = [whole]
    while pending:
        m = pending[-1]
        if m in exponentials:
            pending.pop()
            continue

        # the connected contents c within m that use the node t, and the contents m − c
        t = next(i for i, count in enumerate(m) if count > 0)
        steps = []
        rests = []
        for c in connected:
            if c[t] > 0 and all(part <= count for part, count in zip(c, m, strict=True)):
                steps.append(c)
                rests.append(tuple(count - part for part, count in zip(c, m, strict=True)))
        missing = [rest for rest in rests if rest not in exponentials]
        if missing:
            pending.extend(missing)
            continue

        # m_t E_m = Σ_c c_t C_c E_{m−c}, in the units of m and of m − c
        value = np.zeros(shape)
        orders, slots = unit(m)
        for c, rest in zip(steps, rests, strict=True):
            rest_orders, rest_slots = unit(rest)
            scale = (orders * rest_slots) / (rest_orders * slots)
            product = _shifted_product(connected[c], exponentials[rest])
            value += (c[t] / m[t] * scale) * product
        exponentials[m] = value
        pending.pop()
    return exponentials[whole]


def _shifted_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product of two polynomials in four variables, cut at their common shape."""
    product = np.zeros_like(b)
    for exponents in zip(*np.nonzero(a), strict=True):
        # a monomial of the first moves the second by its exponents; what leaves the shape is cut
        destination = tuple(slice(n, None) for n in exponents)
        source = tuple(slice(None, size - n) for n, size in zip(exponents, b.shape, strict=True))
        product[destination] += a[exponents] * b[source]
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
    n_sets = check_count(n_sets, "n_sets")
    n_keys = check_count(n_keys, "n_keys")
    dim = check_count(dim, "dim")
    seed = check_seed(seed)
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
    dim = check_count(dim, "dim")
    seed = check_seed(seed)
    if dim == 1:
        return np.array([[-1.0]])

    # quarter turns in planes of two coordinates, and the three directions that an odd dimension
    # leaves over
    is_odd = dim % 2 == 1
    n_paired = dim - 3 if is_odd else dim
    turns = np.zeros((dim, dim))
    for i in range(0, n_paired, 2):
        turns[i, i + 1] = -1.0
        turns[i + 1, i] = 1.0
    if is_odd:
        cosine = math.cos(math.pi / 3)
        sine = math.sin(math.pi / 3)
        turns[n_paired:, n_paired:] = [
            [cosine, -sine, 0.0],
            [sine, cosine, 0.0],
            [0.0, 0.0, -1.0],
        ]

    # a random basis; QR's own signs would bias it, with the signs of the diagonal it is uniform
    basis, triangle = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
    basis *= np.sign(np.diag(triangle))
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

    The matrix is S_γ = (1−γ) I + γ P. P is a random rotation without fixed directions and with
    trace zero (:func:`fixed_free_rotation`): γ = 0 is ``Correlation(q=3)``; at γ = 1 the
    correlation has nothing left in common with <x_0, x_i>. In even dimension S_γ is a multiple of a
    rotation, by √((1−γ)² + γ²), so every γ is equally hard, up to that scale, for heads of zero
    mean.

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
        rotation = fixed_free_rotation(dim, seed)
        self.rotation = (1 - self.gamma) * np.eye(dim) + self.gamma * rotation
        target = monomial(dim, pairs=[(self.rotation, 3)], keys=[(self.beta, 1)])
        super().__init__(dim, target.terms)


def _direction(beta: Any, dim: int) -> np.ndarray:
    """The direction β, or the first basis vector if none is given."""
    if beta is None:
        first = np.zeros(check_count(dim, "dim"))
        first[0] = 1.0
        return first
    return np.array(beta, dtype=np.float64)
