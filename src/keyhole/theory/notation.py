"""Plain notation for targets: "corr^3 * token + 0.5 * query^2" to a polynomial, and back.

What is written is the function F of the query and one key; the target is its average over the keys.

    sum      one or more products, with + or − between them and perhaps a sign in front
    product  one or more powers, with * between them, or / and a number
    power    an atom, perhaps with ^ and a whole number after it
    atom     a number, a name, rotated(gamma), rotated(gamma, seed), or a sum in brackets
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

import numpy as np

from keyhole._checks import check_count
from keyhole.theory.targets import (
    KEY,
    PAIR,
    QUERY,
    Factor,
    Polynomial,
    Term,
    fixed_free_rotation,
    monomial,
)

KNOWN = {
    "corr": "<x_0, x_i>, the correlation of query and key",
    "token": "<β, x_i>, a coordinate of the key (β is the first basis vector)",
    "query": "<β, x_0>, a coordinate of the query",
    "rotated(gamma)": (
        "<x_0, S x_i> with S = (1−gamma) I + gamma P, P a rotation; rotated(gamma, seed) for "
        "another P"
    ),
}
"""What a target may be made of."""

# A notation is typed by hand. Beyond these limits it is a slip that would take all memory.

LONGEST = 1000
"""The most characters."""

HIGHEST = 64
"""The highest power."""

DEEPEST = 40
"""The most brackets within brackets."""

MOST_TERMS = 500
"""The most terms when multiplied out."""

WIDEST = 4096
"""The largest dimension of a rotation."""

ORDER = (PAIR, KEY, QUERY)
"""The order in which the factors of a product are written."""

_KINDS = ("number", "name", "sign")
"""The kinds of pieces, in the order of the groups of _PIECE."""

_PIECE = re.compile(
    r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([^\W\d]\w*)|(.))", re.DOTALL
)


class NotationError(ValueError):
    """A target that cannot be read; the message shows where, and lists what is known."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        self.position = position
        # the text around the place, on one line with a caret below it
        printable = "".join(c if c.isprintable() else " " for c in text)
        start = max(0, position - 60)
        line = printable[start : position + 20]
        names = ", ".join(KNOWN)
        super().__init__(
            f"cannot read the target at character {position + 1}: {problem}\n"
            f"    {line}\n    {' ' * (position - start)}^\n"
            f"A target is made of {names} and numbers, with + - * / ^ and brackets; for example "
            f'"corr^3 * token".'
        )


@dataclass(frozen=True)
class Notation:
    """A target that was read.

    Attributes
    ----------
    target : Polynomial
    text : str
        The same target multiplied out, in the same notation: reading it gives the same target.
    """

    target: Polynomial
    text: str


def parse_target(text: str, dim: int) -> Notation:
    """Read a target in plain notation.

    Parameters
    ----------
    text : str
        A sum of products of ``corr``, ``token``, ``query``, ``rotated(gamma)`` and numbers.
        Products multiply functions of one key, before the average: ``token * token`` is
        ``token^2``.
    dim : int
        Token dimension d.

    Returns
    -------
    Notation

    Raises
    ------
    NotationError
        With the offending character and what is known.

    Examples
    --------
    >>> from keyhole.theory.targets import Correlation
    >>> read = parse_target("corr^2 * corr * token", dim=8)
    >>> read.target == Correlation(q=3, dim=8), read.text
    (True, 'corr^3 * token')
    >>> parse_target("(token + query)^2 / 2", dim=8).text
    '0.5 * token^2 + token * query + 0.5 * query^2'
    >>> parse_target("corr^3 * tokn", dim=8)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    NotationError: cannot read the target at character 10: unknown name 'tokn'. ...
    """
    dim = check_count(dim, "dim")
    if len(text) > LONGEST:
        raise NotationError(
            text, LONGEST, f"{len(text)} characters, and at most {LONGEST} are read."
        )
    reader = _Reader(text, dim)
    target = reader.read()
    return Notation(target=target, text=_written(target, reader.names))


@dataclass(frozen=True)
class _Piece:
    """A number, a name or a sign, with the place it starts at; kind "end" after the last."""

    kind: str
    text: str
    position: int


def _pieces(text: str) -> list[_Piece]:
    """Cut a text into numbers, names and signs, and an end."""
    pieces = []
    position = 0
    end = len(text.rstrip())
    while position < end:
        match = _PIECE.match(text, position)
        # the last alternative takes any character, so that there is a match, of one group
        assert match is not None
        assert match.lastindex is not None
        piece = _Piece(
            kind=_KINDS[match.lastindex - 1],
            text=match.group(match.lastindex),
            position=match.start(match.lastindex),
        )
        pieces.append(piece)
        position = match.end()
    pieces.append(_Piece(kind="end", text="", position=end))
    return pieces


class _Reader:
    """Recursive descent over the pieces; values are polynomials from the start.

    One method for each line of the grammar at the top of this module. A method reads its part of
    the text and leaves ``place`` at the piece after it.
    """

    def __init__(self, text: str, dim: int) -> None:
        self.text = text
        self.dim = dim
        self.pieces = _pieces(text)
        self.place = 0
        self.depth = 0
        first_direction = np.zeros(dim)
        first_direction[0] = 1.0
        self.atoms = {
            "corr": monomial(dim, pairs=[(None, 1)]),
            "token": monomial(dim, keys=[(first_direction, 1)]),
            "query": monomial(dim, query=[(first_direction, 1)]),
        }
        # how factors are written; rotations are added as they are read
        self.names = {_factor(atom): name for name, atom in self.atoms.items()}

    @property
    def next(self) -> _Piece:
        """The next piece."""
        return self.pieces[self.place]

    def take(self, *signs: str) -> _Piece | None:
        """The next piece if it is one of these signs, and step over it."""
        piece = self.next
        if piece.kind == "sign" and piece.text in signs:
            self.place += 1
            return piece
        return None

    def error(self, piece: _Piece, problem: str) -> NotationError:
        """An error that points to a piece."""
        return NotationError(self.text, piece.position, problem)

    def read(self) -> Polynomial:
        """The whole text."""
        if self.next.kind == "end":
            raise self.error(self.next, "it is empty.")
        value = self.sum()
        if self.next.kind != "end":
            hint = ""
            if self.next.kind != "sign":
                hint = " Is a * missing before it?"
            raise self.error(self.next, f"{self.next.text!r} is not expected here.{hint}")
        return value

    def sum(self) -> Polynomial:
        """One or more products, with + or − between them and perhaps a sign in front."""
        sign = self.take("+", "-")
        value = self.product()
        if sign is not None and sign.text == "-":
            value = -value
        while (sign := self.take("+", "-")) is not None:
            term = self.product()
            if sign.text == "-":
                term = -term
            value = self.checked(sign, value + term)
        return value

    def product(self) -> Polynomial:
        """One or more powers, with * between them, or / and a number."""
        value = self.power()
        while (sign := self.take("*", "/")) is not None:
            if sign.text == "*" and self.next.text == "*":
                raise self.error(self.next, "powers are written with ^, as in corr^3.")
            start = self.next
            factor = self.power()
            if sign.text == "/":
                divisor = _constant(factor)
                if not divisor:
                    raise self.error(start, "only a number other than 0 may stand below /.")
                factor = monomial(self.dim, self.finite(start, 1.0 / divisor))
            value = self.times(sign, value, factor)
        return value

    def power(self) -> Polynomial:
        """An atom, perhaps with ^ and a whole number after it."""
        value = self.atom()
        sign = self.take("^")
        if sign is None:
            return value

        exponent = self.next
        is_whole = exponent.kind == "number" and exponent.text.isdecimal()
        if not is_whole or int(exponent.text) > HIGHEST:
            raise self.error(exponent, f"a power is a whole number from 0 to {HIGHEST}.")
        self.place += 1
        if self.next.text == "^":
            raise self.error(self.next, "a power of a power: use brackets.")

        # factor by factor, so that a power that grows too large is stopped early
        result = monomial(self.dim)
        for _ in range(int(exponent.text)):
            result = self.times(sign, result, value)
        return result

    def atom(self) -> Polynomial:
        """A number, a name, a rotation, or a sum in brackets."""
        piece = self.next
        if piece.kind == "number":
            return monomial(self.dim, self.number())
        bracket = self.take("(")
        if bracket is not None:
            return self.brackets(bracket)
        if piece.kind == "name":
            self.place += 1
            return self.named(piece)
        if piece.kind == "end":
            subject = "the target ends"
        else:
            subject = f"{piece.text!r} stands"
        raise self.error(piece, f"{subject} where a number, a name or a bracket should be.")

    def named(self, piece: _Piece) -> Polynomial:
        """What a name stands for; the name itself has been stepped over."""
        if piece.text == "rotated":
            return self.rotated(piece)
        if piece.text in self.atoms:
            return self.atoms[piece.text]
        hint = ""
        similar_names = difflib.get_close_matches(piece.text, [*self.atoms, "rotated"], n=1)
        if similar_names:
            hint = f" Did you mean {similar_names[0]!r}?"
        raise self.error(piece, f"unknown name {piece.text!r}.{hint}")

    def brackets(self, bracket: _Piece) -> Polynomial:
        """A sum in brackets, of which the first has been stepped over."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error(bracket, f"more than {DEEPEST} brackets within brackets.")
        value = self.sum()
        if self.take(")") is None:
            raise self.error(
                self.next, f"the bracket of character {bracket.position + 1} is not closed."
            )
        self.depth -= 1
        return value

    def rotated(self, name: _Piece) -> Polynomial:
        """(gamma) or (gamma, seed) after the name: <x_0, S x_i> with S = (1−γ) I + γ P."""
        if self.dim > WIDEST:
            raise self.error(
                name, f"a rotation is a d × d matrix, and d = {self.dim} is above {WIDEST}."
            )
        if self.take("(") is None:
            raise self.error(self.next, "rotated needs its angle in brackets, as in rotated(0.5).")

        # gamma, and the seed if there is one
        minus = self.take("-")
        gamma = self.number()
        if minus is not None:
            gamma = -gamma
        seed = 0
        seed_text = ""
        if self.take(",") is not None:
            seed = self.seed()
            seed_text = f", {seed}"
        if self.take(")") is None:
            raise self.error(self.next, "the bracket of rotated is not closed.")
        if abs(gamma) > 1e300:
            raise self.error(name, f"gamma = {gamma:g} is too large.")

        # a matrix of zeros leaves no term, and nothing to write
        rotation = fixed_free_rotation(self.dim, seed)
        matrix = (1 - gamma) * np.eye(self.dim) + gamma * rotation
        atom = monomial(self.dim, pairs=[(matrix, 1)])
        if atom.terms:
            self.names.setdefault(_factor(atom), f"rotated({gamma!r}{seed_text})")
        return atom

    def seed(self) -> int:
        """The seed of a rotation."""
        piece = self.next
        is_whole = piece.kind == "number" and piece.text.isdecimal()
        if not is_whole or len(piece.text) > 18:
            raise self.error(piece, "the seed of a rotation is a whole number.")
        self.place += 1
        return int(piece.text)

    def number(self) -> float:
        """A finite number without a sign."""
        piece = self.next
        if piece.kind != "number":
            raise self.error(piece, "a number is needed here.")
        self.place += 1
        return self.finite(piece, float(piece.text))

    def finite(self, piece: _Piece, value: float) -> float:
        """The value, or an error at the piece if it is infinite."""
        if not math.isfinite(value):
            raise self.error(piece, "this number is too large.")
        return value

    def times(self, sign: _Piece, a: Polynomial, b: Polynomial) -> Polynomial:
        """The product of two values; one that is far too long is not multiplied out."""
        if len(a.terms) * len(b.terms) > 10 * MOST_TERMS:
            raise self.error(sign, f"multiplied out this has more than {MOST_TERMS} terms.")
        return self.checked(sign, a.pairwise(b))

    def checked(self, sign: _Piece, value: Polynomial) -> Polynomial:
        """The value, or an error at the sign if it has too many terms, or too large ones."""
        if len(value.terms) > MOST_TERMS:
            raise self.error(sign, f"multiplied out this has more than {MOST_TERMS} terms.")
        if not all(math.isfinite(term.coefficient) for term in value.terms):
            raise self.error(sign, "a coefficient is too large for floating point.")
        if any(max(term.degrees) > HIGHEST for term in value.terms):
            raise self.error(sign, f"multiplied out this has a degree above {HIGHEST}.")
        return value


def _factor(atom: Polynomial) -> Factor:
    """The only factor of an atom."""
    [(factor, _)] = atom.terms[0].powers
    return factor


def _constant(value: Polynomial) -> float | None:
    """The number a polynomial is, or None where it is more than a number."""
    if not value.terms:
        return 0.0
    first_term = value.terms[0]
    if len(value.terms) > 1 or first_term.powers:
        return None
    return first_term.coefficient


def _written(target: Polynomial, names: dict[Factor, str]) -> str:
    """A polynomial in the notation of this module."""
    if not target.terms:
        return "0"
    parts = []
    for i, term in enumerate(target.terms):
        is_negative = term.coefficient < 0
        if i == 0:
            sign = "-" if is_negative else ""
        else:
            sign = " - " if is_negative else " + "
        parts.append(sign + _written_product(term, names))
    return "".join(parts)


def _written_product(term: Term, names: dict[Factor, str]) -> str:
    """A term in the notation of this module, without its sign."""
    # the coefficient is left out where it is one, but not if nothing else is there
    factors = []
    size = abs(term.coefficient)
    if size != 1.0 or not term.powers:
        short = f"{size:g}"
        is_exact = float(short) == size
        factors.append(short if is_exact else repr(size))

    # factors by kind, then by name
    def position(item: tuple[Factor, int]) -> tuple[int, str]:
        factor, _ = item
        return ORDER.index(factor.kind), names[factor]

    for factor, power in sorted(term.powers, key=position):
        if power == 1:
            factors.append(names[factor])
        else:
            factors.append(f"{names[factor]}^{power}")
    return " * ".join(factors)
