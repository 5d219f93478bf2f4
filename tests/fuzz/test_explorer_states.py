"""Random states of the explorer, a few of them; and what is wrong with an answer is found."""

import math
from random import Random

import explorer_states
import pytest

from keyhole.lab.explore import views
from keyhole.lab.report.document import Chart, Series


@pytest.fixture(autouse=True)
def own_limits(monkeypatch):
    """States are checked within limits of their own; nobody else is to see what they refuse."""
    for name in ("TARGET_SECONDS", "STEP_SECONDS", "QUICK_SECONDS", "STEP_MEMORY"):
        monkeypatch.setattr(views, name, getattr(views, name))
    yield
    views.answered.cache_clear()
    views._spectral_answer.cache_clear()
    views.background._answers.clear()


def test_random_states_are_answered_or_refused(seed):
    for k in range(30):
        explorer_states.check_state(Random(100 * seed + k), seconds=60.0)


def chart_of(*values):
    series = Series("curve", list(range(len(values))), list(values))
    return views.View("t", blocks=[Chart("c", "t", "x", "y", [series])], notes=[])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (views.View("empty"), "an empty view"),
        (views.View("terse", notes=["math range error"[:10]]), "a note without words"),
        (chart_of(1.0, math.nan), "a number that is none"),
    ],
)
def test_an_answer_that_is_none_is_found(answer, words, monkeypatch):
    monkeypatch.setattr(explorer_states, "draw_query", lambda rng: {})
    monkeypatch.setattr(explorer_states, "show", lambda state, results: answer)
    with pytest.raises(AssertionError, match=words):
        explorer_states.check_state(Random(0))


def test_a_view_that_never_ends_is_found(monkeypatch):
    def never_ends(state, results):
        while True:
            pass

    monkeypatch.setattr(explorer_states, "draw_query", lambda rng: {})
    monkeypatch.setattr(explorer_states, "show", never_ends)
    with pytest.raises(AssertionError, match="of processor time"):
        explorer_states.check_state(Random(0), seconds=0.2)
