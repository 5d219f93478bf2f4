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

LONGEST, HIGHEST, DEEPEST, MOST_TERMS, WIDEST = 1000, 64, 40, 500, 4096
"""Characters, power, brackets within brackets, terms, and the dimension of a rotation: a notation
is typed by hand, and beyond these it is a slip that would take all memory."""

ORDER = (PAIR, KEY, QUERY)
"""The order in which the factors of a product are written."""

_TOKEN = re.compile(
    r"\s*(?:(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)|([^\W\d]\w*)|(.))", re.DOTALL
)


class NotationError(ValueError):
    """A target that cannot be read; the message shows where, and lists what is known."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        self.position = position
        shown = "".join(c if c.isprintable() else " " for c in text)
        start = max(0, position - 60)
        line = shown[start : position + 20]
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
    return Notation(target, _written(target, reader.names))


@dataclass(frozen=True)
class _Piece:
    """A number, a name or a sign, with the place it starts at; kind "end" after the last."""

    kind: str
    text: str
    position: int


def _pieces(text: str) -> list[_Piece]:
    pieces, position = [], 0
    end = len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        assert match is not None  # the last alternative takes any character
        group = match.lastindex or 3
        pieces.append(
            _Piece(("number", "name", "sign")[group - 1], match.group(group), match.start(group))
        )
        position = match.end()
    return [*pieces, _Piece("end", "", end)]


class _Reader:
    """Recursive descent over the pieces; values are polynomials from the start."""

    def __init__(self, text: str, dim: int) -> None:
        self.text = text
        self.dim = dim
        self.pieces = _pieces(text)
        self.place = 0
        self.depth = 0
        first = np.zeros(dim)
        first[0] = 1.0
        self.atoms = {
            "corr": monomial(dim, pairs=[(None, 1)]),
            "token": monomial(dim, keys=[(first, 1)]),
            "query": monomial(dim, query=[(first, 1)]),
        }
        self.names = {_factor(atom): name for name, atom in self.atoms.items()}

    @property
    def next(self) -> _Piece:
        return self.pieces[self.place]

    def take(self, *signs: str) -> _Piece | None:
        """The next piece if it is one of these signs, and step over it."""
        piece = self.next
        if piece.kind == "sign" and piece.text in signs:
            self.place += 1
            return piece
        return None

    def error(self, piece: _Piece, problem: str) -> NotationError:
        return NotationError(self.text, piece.position, problem)

    def read(self) -> Polynomial:
        if self.next.kind == "end":
            raise self.error(self.next, "it is empty.")
        value = self.sum()
        if self.next.kind != "end":
            missing = "" if self.next.kind == "sign" else " Is a * missing before it?"
            raise self.error(self.next, f"{self.next.text!r} is not expected here.{missing}")
        return value

    def sum(self) -> Polynomial:
        sign = self.take("+", "-")
        value = self.product()
        if sign is not None and sign.text == "-":
            value = -value
        while (sign := self.take("+", "-")) is not None:
            term = self.product()
            value = self.checked(sign, value + (term if sign.text == "+" else -term))
        return value

    def product(self) -> Polynomial:
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
        value = self.atom()
        sign = self.take("^")
        if sign is None:
            return value
        exponent = self.next
        if (
            exponent.kind != "number"
            or not exponent.text.isdecimal()
            or int(exponent.text) > HIGHEST
        ):
            raise self.error(exponent, f"a power is a whole number from 0 to {HIGHEST}.")
        self.place += 1
        if self.next.text == "^":
            raise self.error(self.next, "a power of a power: use brackets.")
        result = monomial(self.dim)
        for _ in range(int(exponent.text)):
            result = self.times(sign, result, value)
        return result

    def atom(self) -> Polynomial:
        piece = self.next
        if piece.kind == "number":
            return monomial(self.dim, self.number())
        if (opened := self.take("(")) is not None:
            return self.brackets(opened)
        if piece.kind == "name":
            self.place += 1
            if piece.text == "rotated":
                return self.rotated(piece)
            if piece.text in self.atoms:
                return self.atoms[piece.text]
            near = difflib.get_close_matches(piece.text, [*self.atoms, "rotated"], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise self.error(piece, f"unknown name {piece.text!r}.{hint}")
        what = "the target ends" if piece.kind == "end" else f"{piece.text!r} stands"
        raise self.error(piece, f"{what} where a number, a name or a bracket should be.")

    def brackets(self, opened: _Piece) -> Polynomial:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.error(opened, f"more than {DEEPEST} brackets within brackets.")
        value = self.sum()
        if self.take(")") is None:
            raise self.error(
                self.next, f"the bracket of character {opened.position + 1} is not closed."
            )
        self.depth -= 1
        return value

    def rotated(self, name: _Piece) -> Polynomial:
        if self.dim > WIDEST:
            raise self.error(
                name, f"a rotation is a d × d matrix, and d = {self.dim} is above {WIDEST}."
            )
        if self.take("(") is None:
            raise self.error(self.next, "rotated needs its angle in brackets, as in rotated(0.5).")
        minus = self.take("-")
        gamma = self.number() * (-1.0 if minus else 1.0)
        seed, given = 0, ""
        if self.take(",") is not None:
            piece = self.next
            if piece.kind != "number" or not piece.text.isdecimal() or len(piece.text) > 18:
                raise self.error(piece, "the seed of a rotation is a whole number.")
            self.place += 1
            seed = int(piece.text)
            given = f", {seed}"
        if self.take(")") is None:
            raise self.error(self.next, "the bracket of rotated is not closed.")
        if abs(gamma) > 1e300:
            raise self.error(name, f"gamma = {gamma:g} is too large.")
        matrix = (1 - gamma) * np.eye(self.dim) + gamma * fixed_free_rotation(self.dim, seed)
        atom = monomial(self.dim, pairs=[(matrix, 1)])
        if atom.terms:
            self.names.setdefault(_factor(atom), f"rotated({gamma!r}{given})")
        return atom

    def number(self) -> float:
        piece = self.next
        if piece.kind != "number":
            raise self.error(piece, "a number is needed here.")
        self.place += 1
        return self.finite(piece, float(piece.text))

    def finite(self, piece: _Piece, value: float) -> float:
        if not math.isfinite(value):
            raise self.error(piece, "this number is too large.")
        return value

    def times(self, sign: _Piece, a: Polynomial, b: Polynomial) -> Polynomial:
        if len(a.terms) * len(b.terms) > 10 * MOST_TERMS:
            raise self.error(sign, f"multiplied out this has more than {MOST_TERMS} terms.")
        return self.checked(sign, a.pairwise(b))

    def checked(self, sign: _Piece, value: Polynomial) -> Polynomial:
        if len(value.terms) > MOST_TERMS:
            raise self.error(sign, f"multiplied out this has more than {MOST_TERMS} terms.")
        if not all(math.isfinite(term.coefficient) for term in value.terms):
            raise self.error(sign, "a coefficient is too large for floating point.")
        if any(max(term.degrees) > HIGHEST for term in value.terms):
            raise self.error(sign, f"multiplied out this has a degree above {HIGHEST}.")
        return value


def _factor(atom: Polynomial) -> Factor:
    ((factor, _),) = atom.terms[0].powers
    return factor


def _constant(value: Polynomial) -> float | None:
    """The number a polynomial is, or None where it is more than a number."""
    if not value.terms:
        return 0.0
    only = value.terms[0]
    return only.coefficient if len(value.terms) == 1 and not only.powers else None


def _written(target: Polynomial, names: dict[Factor, str]) -> str:
    """A polynomial in the notation of this module."""
    parts = []
    for i, term in enumerate(target.terms):
        size = abs(term.coefficient)
        ordered = sorted(term.powers, key=lambda pair: (ORDER.index(pair[0].kind), names[pair[0]]))
        factors = [names[f] if power == 1 else f"{names[f]}^{power}" for f, power in ordered]
        if size != 1.0 or not factors:
            factors.insert(0, f"{size:g}" if float(f"{size:g}") == size else repr(size))
        minus = term.coefficient < 0
        lead = ("-" if minus else "") if i == 0 else (" - " if minus else " + ")
        parts.append(lead + " * ".join(factors))
    return "".join(parts) or "0"
