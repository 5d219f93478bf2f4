"""Polynomial targets f*(x) = (1/N) Σ_i F(x_0, x_i): their factors, their algebra, their values on sets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from keyhole._array import MEMORY_BUDGET
from keyhole._checks import check_count, check_finite, check_float_array, check_number
from keyhole.sets import SetBatch

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

    F is a sum of terms c · Π_j <x_0, A_j x_i>^{q_j} · Π_j <β_j, x_i>^{p_j} · Π_j <γ_j, x_0>^{r_j}. Build
    one from the families of this package or with :func:`monomial`; add, subtract, scale and multiply them
    with the usual signs. A product of two averages over the keys is no such average (it is one over pairs
    of keys), so ``*`` asks that one of the two depend on the query alone; :meth:`pairwise` multiplies the
    functions F before averaging.

    Parameters
    ----------
    dim : int
        The token dimension d.
    terms : iterable of Term
        Like terms are added.

    Examples
    --------
    >>> from keyhole.targets import Correlation, QueryPower, TokenPower, sphere_sets
    >>> target = Correlation(q=1, dim=3) * QueryPower(p=2, dim=3) - 0.5 * TokenPower(p=2, dim=3)
    >>> target.coefficient_norms()[0, 2]
    0.25
    >>> target(sphere_sets(n_sets=5, n_keys=4, dim=3, seed=0)).shape
    (5,)
    """

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
        """Values of the target on a batch, ragged or not.

        Parameters
        ----------
        batch : SetBatch
            n sets of dimension d; with a query if the target depends on it.

        Returns
        -------
        array (n,), float64

        Notes
        -----
        Cost: one pass over the tokens per factor, in blocks of sets that keep temporaries within the memory
        budget.
        """
        if batch.dim != self._dim:
            raise ValueError(
                f"target and batch must share the token dimension: the target has dim {self._dim}, the batch "
                f"{batch.dim}. Build the target with dim={batch.dim}."
            )
        if batch.query is None and self.needs_query:
            raise ValueError(
                f"{self!r} depends on the query, and the batch of {len(batch)} sets has none. "
                "Pass SetBatch(keys, query=…)."
            )
        values = np.empty(len(batch))
        for rows in _set_blocks(batch.offsets, budget=MEMORY_BUDGET // (32 * self._dim)):
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
        """|f_rs|² for every degree (r, s) that occurs, f_rs symmetrised in the query and in the key slots.

        Terms of equal degree are added before the norm is taken. Nothing of size d^(r+s) is formed.
        """
        from keyhole.targets.contractions import coefficient_norms

        return coefficient_norms(self)

    def pairwise(self, other: Polynomial) -> Polynomial:
        """The target (1/N) Σ_i F(x_0, x_i) G(x_0, x_i): multiply before averaging.

        Examples
        --------
        >>> from keyhole.targets import Correlation, TokenPower
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
                f"the product of {self!r} and {right!r} is an average over pairs of keys, not over keys, "
                "so it leaves the class (1/N) Σ_i F(x_0, x_i). One of the two must depend on the query "
                "alone; to multiply the functions of a key before averaging, use a.pairwise(b)."
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
        return f"Polynomial(dim={self._dim}, {len(self._terms)} terms of degrees {self._degree_list()})"

    def _degree_list(self) -> str:
        return ", ".join(str(d) for d in sorted({term.degrees for term in self._terms})) or "none"

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
    """The target (1/N) Σ_i c · Π_j <x_0, A_j x_i>^{q_j} · Π_j <β_j, x_i>^{p_j} · Π_j <γ_j, x_0>^{r_j}.

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
    >>> from keyhole.targets import Correlation
    >>> monomial(3, pairs=[(None, 2)], keys=[(np.array([1.0, 0.0, 0.0]), 1)]) == Correlation(q=2, dim=3)
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
        raise ValueError(f"a factor of `{name}` must have shape {shape} for dim {dim}: got shape {array.shape}.")
    check_finite(array, name)
    if kind == PAIR and np.array_equal(array, np.eye(dim)):
        return Factor(PAIR, None)
    array = array + 0.0  # a copy of our own, and −0 becomes 0, so that equal factors have equal bytes
    array.flags.writeable = False
    return Factor(kind, array)


def _check_same_dim(a: Polynomial, b: Polynomial) -> None:
    if a.dim != b.dim:
        raise ValueError(f"targets must share the token dimension: got dim {a.dim} and dim {b.dim}.")


def _set_blocks(offsets: np.ndarray, budget: int) -> Iterable[slice]:
    """Cut the sets into runs of at most ``budget`` tokens, or one set where a set is longer than that."""
    start, n = 0, len(offsets) - 1
    while start < n:
        stop = int(np.searchsorted(offsets, offsets[start] + budget, side="right")) - 1
        stop = max(stop, start + 1)
        yield slice(start, stop)
        start = stop
