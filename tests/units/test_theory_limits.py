"""What a question to the theory costs is known before it is computed, and it ends when nobody waits
for it.
"""

import math

import numpy as np
import pytest

from keyhole.attention.heads import GaussianHeads
from keyhole.lab.theory_report import TheoryQuestion, run
from keyhole.theory import blocks, targets
from keyhole.theory.blocks import Bias, biased_blocks, target_vectors
from keyhole.theory.curves import learning_curve
from keyhole.theory.limits import CancelledError, CostError, check_limits, limits
from keyhole.theory.notation import parse_target


@pytest.fixture
def fresh_caches():
    """Blocks and parts of targets are kept from question to question: here each test computes its
    own.
    """
    biased_blocks.cache_clear()
    blocks._part_products.cache_clear()


def test_parts_of_a_target_are_refused_before_they_are_computed(fresh_caches, monkeypatch):
    """rotated(0.5)^6 would take minutes: no sum over joinings is begun."""

    def never(*arguments):
        raise AssertionError("a joining was computed")

    monkeypatch.setattr(blocks, "crossed_joinings", never)
    for text in ("rotated(0.5)^6", "rotated(0.5)^4 * token"):
        target = parse_target(text, dim=8).target
        with (
            limits(seconds=8.0),
            pytest.raises(CostError, match=r"takes about [0-9]+ s, and 8 s are allowed"),
        ):
            learning_curve(target, [100], n_keys=4, ridge=1e-5, heads=GaussianHeads(mean=1.0))


def test_keyhole_theory_keeps_its_time_limit(fresh_caches, monkeypatch):
    """--bias 1 --target "rotated(0.5)^6" took minutes with --time-limit 5."""

    def never(*arguments):
        raise AssertionError("a joining was computed")

    monkeypatch.setattr(blocks, "crossed_joinings", never)
    report = run(TheoryQuestion("rotated(0.5)^6", dim=8, n_keys=4, samples=(100,), bias=1.0))
    reason = report["unavailable"]["learning_curve.attention.100"]
    assert "5 s are allowed here" in reason
    assert "raise --time-limit" in reason
    assert report["learning_curve"]["mlp"][0]["error"] > 0


def test_blocks_are_refused_before_they_are_computed(fresh_caches, monkeypatch):
    """A mean of 4 in two dimensions to degree 16 takes 3 s."""

    def never(*arguments):
        raise AssertionError("roots were computed")

    monkeypatch.setattr(blocks, "_state_roots", never)
    with (
        limits(seconds=1.0),
        pytest.raises(CostError, match="with mean 4 to degree 17 in dimension 2 takes about"),
    ):
        biased_blocks(2, Bias(slope=4.0), 16)
    with (
        limits(memory=2**20),
        pytest.raises(CostError, match=r"takes about [0-9]+ MiB, and 1 MiB are allowed"),
    ):
        biased_blocks(2, Bias(slope=4.0), 4)


def test_what_is_within_the_limits_is_the_same(fresh_caches):
    target = parse_target("rotated(0.5) * token", dim=4).target

    def curve():
        biased_blocks.cache_clear()
        blocks._part_products.cache_clear()
        return learning_curve(
            target, [50, 200], n_keys=4, ridge=1e-4, heads=GaussianHeads(mean=1.0)
        )

    plain = curve()
    with limits(seconds=60.0, memory=2**30, is_wanted=lambda: True):
        limited = curve()
    np.testing.assert_array_equal(plain, limited)


@pytest.mark.parametrize(
    "text",
    [
        "rotated(0.5) * token",
        "rotated(0.5)^2",
        "rotated(0.5)^2 * token",
        "rotated(0.5)^3",
        "rotated(0.3) * rotated(0.7) * token",
        "(rotated(0.3) + corr)^2",
    ],
)
def test_the_estimate_follows_the_work(text, fresh_caches, monkeypatch):
    """Steps of walks and of the exponential, counted, at 6 µs each: within a factor of four of the
    estimate.
    """
    steps = 0

    def counted(function):
        def call(*arguments):
            nonlocal steps
            steps += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(targets, "_apply", counted(targets._apply))
    monkeypatch.setattr(targets, "_shifted_product", counted(targets._shifted_product))
    target = parse_target(text, dim=5).target
    estimate = blocks._part_products_seconds(target)
    blocks._part_products(target)
    assert 1 / 4 < estimate / (6e-6 * steps) < 4


def test_estimates_rise_with_power_and_dimension():
    def seconds(text, dim):
        return blocks._part_products_seconds(parse_target(text, dim).target)

    powers = [seconds(f"rotated(0.5)^{power}", 8) for power in range(1, 7)]
    dimensions = [seconds("rotated(0.5)^3", dim) for dim in (4, 32, 128, 512)]
    assert powers == sorted(powers)
    assert dimensions == sorted(dimensions)
    assert powers[-1] > 60
    assert seconds("rotated(0.5) * token", 8) < 0.1


def make_blocks():
    biased_blocks(3, Bias(slope=0.5), 6)


def take_a_target_apart():
    target_vectors(parse_target("rotated(0.5)^2 * token", dim=3).target, 4)


def predict_a_curve():
    learning_curve(parse_target("corr * token", dim=3).target, [100, 1000], n_keys=4, ridge=1e-4)


def predict_without_a_penalty():
    learning_curve(parse_target("corr * token", dim=3).target, [100, 1000], n_keys=4, ridge=0.0)


@pytest.mark.parametrize(
    "work",
    [make_blocks, take_a_target_apart, predict_a_curve, predict_without_a_penalty],
)
def test_a_question_ends_when_nobody_waits(work, fresh_caches):
    """It is asked several times while computing; after the third it is not wanted any more."""
    asked = 0

    def is_wanted():
        nonlocal asked
        asked += 1
        return asked <= 3

    with limits(is_wanted=is_wanted), pytest.raises(CancelledError):
        work()
    assert asked == 4


def work_for_ever():
    while True:
        check_limits()


def test_an_estimate_that_was_far_too_low_does_not_hold_a_thread_for_ever():
    with (
        limits(seconds=1e-3),
        pytest.raises(CostError, match=r"took more than 5 times the 0\.001 s"),
    ):
        work_for_ever()


def test_the_narrower_of_two_limits_holds():
    with (
        limits(seconds=1.0, is_wanted=lambda: False),
        limits(seconds=math.inf),
        pytest.raises(CancelledError),
    ):
        check_limits()
    check_limits()  # without limits nothing ends
