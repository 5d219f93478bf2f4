"""Plain notation: what it means, that it survives a round trip, and that every slip gets a
message.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.theory import notation
from keyhole.theory.notation import DEEPEST, HIGHEST, LONGEST, NotationError, parse_target
from keyhole.theory.targets import (
    Correlation,
    QueryPower,
    RotatedCorrelation,
    TokenPower,
    sphere_sets,
)

DIM = 4


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("token^2", TokenPower(2, DIM)),
        ("token * token", TokenPower(2, DIM)),
        ("  corr ^ 3*token ", Correlation(3, DIM)),
        ("query^3", QueryPower(3, DIM)),
        ("rotated(0.5)^3 * token", RotatedCorrelation(0.5, DIM, seed=0)),
        ("rotated(0.25, 7)^3 * token", RotatedCorrelation(0.25, DIM, seed=7)),
        ("rotated(0)^2 * token", Correlation(2, DIM)),
        ("-2 * token / 4 + corr*token", Correlation(1, DIM) - 0.5 * TokenPower(1, DIM)),
        ("1.5e-1*query - .5", 0.15 * QueryPower(1, DIM) - 0.5),
        ("token - token", TokenPower(1, DIM) - TokenPower(1, DIM)),
        ("token^0", TokenPower(0, DIM)),
    ],
)
def test_what_it_means(text, target):
    assert parse_target(text, DIM).target == target


def test_brackets_multiply_before_the_average(seed):
    batch = sphere_sets(5, 3, DIM, seed)
    tokens, query = batch.tokens.reshape(5, 3, DIM), batch.query
    pairs = (
        np.einsum("nd,nkd->nk", query, tokens) - 2 * tokens[..., 0] + query[:, :1]
    ) ** 2 * tokens[..., 0]
    read = parse_target("(corr - 2*token + query)^2 * token", DIM).target
    np.testing.assert_allclose(read(batch), pairs.mean(axis=1), rtol=1e-12)


@pytest.mark.parametrize(
    "text",
    ["token^2", "corr^3 * token", "rotated(0.5)^3 * token", "corr * token - 0.5 * query^2 + 1"],
)
def test_examples_can_be_read(text):
    assert parse_target(text, DIM).target.terms


@pytest.mark.parametrize(
    ("text", "character", "words"),
    [
        ("", 1, "empty"),
        ("corr^3 * tokn", 10, "Did you mean 'token'?"),
        ("corr token", 6, "Is a * missing"),
        ("corr ** 3", 7, "written with ^"),
        ("corr^-1", 6, "whole number"),
        ("corr^2.5", 6, "whole number"),
        (f"corr^{HIGHEST + 1}", 6, "whole number"),
        ("corr^2^2", 7, "brackets"),
        ("(corr + token", 14, "bracket of character 1 is not closed"),
        ("corr)", 5, "not expected"),
        ("corr +", 7, "ends"),
        ("corr * * token", 8, "written with ^"),
        ("token / query", 9, "below /"),
        ("token / 0", 9, "below /"),
        ("rotated^3", 8, "rotated(0.5)"),
        ("rotated(corr)", 9, "a number is needed"),
        ("rotated(0.5, 1.5)", 14, "whole number"),
        ("1e999 * token", 1, "too large"),
        ("1e300 * 1e300", 7, "too large"),
        ("(1 + token + query + corr)^64", 27, "more than 500 terms"),
        ("token^60 * token^60", 10, "degree above"),
        ("(" * 60 + "corr" + ")" * 60, 41, "brackets within brackets"),
        ("1+" * 600, 1001, "characters"),
        ("token $ 2", 7, "'$' is not expected"),
    ],
)
def test_a_slip_is_shown_where_it_is(text, character, words):
    with pytest.raises(NotationError) as caught:
        parse_target(text, DIM)
    message = str(caught.value)
    assert message.startswith(f"cannot read the target at character {character}:")
    assert words in message
    assert "corr, token, query, rotated(gamma)" in message
    line, caret = message.splitlines()[1:3]
    assert caret.strip() == "^"
    if character <= len(text) and character < 60:
        assert line[caret.index("^")] == text[character - 1]


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        (f"corr^{HIGHEST}", f"corr^{HIGHEST + 1}"),
        (f"corr^{HIGHEST - 1} * corr", f"corr^{HIGHEST} * corr"),
        (
            f"corr^{HIGHEST - 1} * (1 + corr)",
            f"corr^{HIGHEST} * (1 + corr)",
        ),  # one term of two is too much
        ("1e300 * (1e8 * corr + token)", "1e300 * (1e9 * corr + token)"),
        (
            "(" * DEEPEST + "corr" + ")" * DEEPEST,
            "(" * (DEEPEST + 1) + "corr" + ")" * (DEEPEST + 1),
        ),
        ("+".join(["(corr)"] * (2 * DEEPEST)), "+".join(["((corr)"] * (DEEPEST + 1))),
        ("corr".ljust(LONGEST), "corr".ljust(LONGEST + 1)),
        ("rotated(0.5, 123456789012345678)", "rotated(0.5, 1234567890123456789)"),
        ("(1 + token)^41", "(1 + token)^42"),
        ("(1 + token)^19 * (1 + token)^20", "(1 + token)^20 * (1 + token)^21"),  # 420 products, 462
    ],
)
def test_limits_are_where_they_are_said_to_be(within, beyond, monkeypatch):
    monkeypatch.setattr(notation, "MOST_TERMS", 42)
    assert parse_target(within, DIM).target.terms
    with pytest.raises(NotationError):
        parse_target(beyond, DIM)


def test_a_message_shows_what_stands_around_the_slip():
    text = "corr + " * 20 + "oops" + " + corr" * 10
    with pytest.raises(NotationError) as caught:
        parse_target(text, DIM)
    line, caret = str(caught.value).splitlines()[1:3]
    assert caught.value.position == 140
    assert line == "    " + text[80:160]
    assert caret == " " * 64 + "^"


def test_a_rotation_beyond_floating_point_is_refused():
    for gamma in ("1e308", "-1e308"):
        with pytest.raises(NotationError, match=r"gamma = -?1e\+308 is too large"):
            parse_target(f"rotated({gamma})", 1)
    assert np.abs(notation._factor(parse_target("rotated(-1e300)", 2).target).array).max() > 1e299


def test_a_rotation_of_a_huge_dimension_is_refused():
    with pytest.raises(NotationError, match="d × d matrix"):
        parse_target("rotated(1)", 10**5)


NUMBERS = st.floats(0, 1e6).map(repr) | st.integers(0, 99).map(str)
ATOMS = (
    st.sampled_from(["corr", "token", "query", "rotated(0.5)", "rotated(-1.25, 3)", "rotated(0)"])
    | NUMBERS
)


def larger(smaller):
    return st.one_of(
        st.tuples(smaller, st.sampled_from([" + ", "-", " * ", "*"]), smaller).map("".join),
        st.tuples(smaller, st.integers(0, 3)).map(lambda pair: f"({pair[0]})^{pair[1]}"),
        smaller.map(lambda text: f"(-{text})"),
    )


def attempt(text, dim):
    """What was read, or the error; anything else that is raised fails the test."""
    try:
        return parse_target(text, dim)
    except NotationError as error:
        return error


@settings(max_examples=150, deadline=None)
@given(st.recursive(ATOMS, larger, max_leaves=6), st.integers(1, 5))
def test_round_trip(text, dim):
    read = attempt(text, dim)
    if isinstance(read, NotationError):  # powers of powers may outgrow what is read, and say so
        assert any(
            words in str(read) for words in ("terms", "degree above", "too large", "characters")
        )
    elif len(read.text) <= LONGEST:
        again = parse_target(read.text, dim)
        assert again.target == read.target
        assert again.text == read.text


PIECES = st.sampled_from(
    [*"+-*/^(),. \t\n$é0123456789", "corr", "token", "query", "rotated", "rotated(", "1e9", "^2"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=14).map("".join) | st.text(max_size=30), st.integers(1, 4))
def test_never_fails_without_a_message(text, dim):
    read = attempt(text, dim)
    if isinstance(read, NotationError):
        assert "cannot read the target at character" in str(read)
        assert 0 <= read.position <= len(text)
