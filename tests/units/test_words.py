"""The language check of `make lint` finds what it is meant to find."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "words.py"


@pytest.fixture(scope="module")
def words():
    spec = importlib.util.spec_from_file_location("words_of_ci", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["words_of_ci"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "sentence",
    ["The law of the heads decides.", "With several looks it finds two facts.", "Its rivals lose."],
)
def test_a_banned_word_is_found(words, sentence):
    assert words.banned_words([words.Text("page", "pages", sentence)])


@pytest.mark.parametrize(
    "sentence",
    ["It looks up a name.", "A copy of the tokens.", "See benchmarks/baselines.py.", "Run `laws`."],
)
def test_an_ordinary_word_is_not(words, sentence):
    assert not words.banned_words([words.Text("page", "pages", sentence)])


def test_sentences_are_counted_without_code_and_tables(words):
    page = (
        "# Title of the page\n\nOne two three. Four five six.\n\n"
        "```python\nnot prose at all\n```\n\n"
        "| a | table |\n|---|---|\n\n- an item of a list\n- another item there\n"
    )
    text = words.Text("page", "pages", words.page_prose(page))
    assert text.sentences() == [
        "Title of the page",
        "One two three.",
        "Four five six.",
        "an item of a list",
        "another item there",
    ]


def test_a_long_sentence_is_counted(words):
    long = " ".join(["Word"] * 31) + "."
    counts = words.long_sentences([words.Text("page", "pages", f"Short one here. {long}")])
    assert counts == {"pages": (1, 2)}


def test_code_that_would_be_cut_off_is_found(words):
    page = "Prose may be long: " + 80 * "x" + f"\n\n```python\n{89 * 'y'}\n{88 * 'y'}\n```\n"
    assert words.bad_lines("page", page) == ["page:4: code of 89 columns"]


def test_a_line_that_would_not_be_shown_is_found(words):
    page = "The error is 2.6\n% of the variance.\n\n```\n% of code is shown\n```\n"
    [finding] = words.bad_lines("page", page)
    assert finding.startswith("page:2:")
