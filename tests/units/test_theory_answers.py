"""Questions to the theory end in their time, and a report says what it has no answer to."""

import signal
import threading
import time

import pytest

from keyhole.lab.theory_answers import OutOfTimeError, Question, time_limit


def test_an_alarm_ends_what_takes_too_long_and_only_that():
    start = time.monotonic()
    with pytest.raises(OutOfTimeError, match=r"more than 0\.1 s"), time_limit(0.1):
        time.sleep(60)
    assert 0.1 < time.monotonic() - start < 5
    with time_limit(0.2):
        pass
    time.sleep(0.3)  # its alarm was called off
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_threads_and_no_limit_have_no_alarm():
    def work():
        with time_limit(0.01):
            time.sleep(0.1)
        done.append("all")

    done = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["all"]
    with time_limit(float("inf")):
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("target", ["rotated(0.5)^6", "rotated(0.5)^4 * token"])
def test_a_curve_that_takes_minutes_is_ended_in_the_middle(target):
    question = Question(target, dim=8, n_keys=4, mean=1.0)
    start = time.monotonic()
    with pytest.raises(OutOfTimeError), time_limit(0.5):
        question.curve([100])
    assert time.monotonic() - start < 5


def test_the_mlp_is_asked_without_what_it_has_not():
    question = Question("token^2", dim=8, n_keys=8, mean=1.0, activation="exp")
    assert question.to("attention") is question
    mlp = question.to("mlp")
    assert (mlp.heads, mlp.activation) == (None, "relu")
    assert mlp.curve([100]) == Question("token^2", 8, 8, model="mlp").curve([100])


@pytest.mark.parametrize("field", ["ridge", "noise"])
def test_penalty_and_noise_are_no_less_than_zero(field):
    with pytest.raises(ValueError, match=f"`{field}` must be"):
        Question("token", **{field: -1.0})
