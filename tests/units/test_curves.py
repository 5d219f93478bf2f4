"""Curves, crossings and their intervals: against cases with a known answer."""

import math

import numpy as np
import pytest

from keyhole.lab.curves import (
    Curve,
    Estimate,
    above,
    all_of,
    below,
    falls_to,
    ratio_of_means,
    resample,
    rises_through,
    samples_needed,
    samples_ratio,
    slope,
)

X = np.array([16.0, 32.0, 64.0, 128.0])


def test_means_use_the_repetitions_there_are():
    curve = Curve(X[:2], np.array([[1.0, 3.0], [3.0, np.nan]]))
    np.testing.assert_array_equal(curve.mean, [2.0, 3.0])
    assert curve.error[0] == 1.0
    assert math.isnan(curve.error[1])
    series = curve.series("a", "attention")
    assert list(series.low) == [1.0, 3.0]


def test_a_power_law_is_read_exactly():
    runs = np.array([[1.0], [1.1], [0.9]]) * 8 / X
    curve = Curve(X, runs)
    half = Curve(X, 0.5 * runs)
    assert samples_needed(curve, 0.2).value == pytest.approx(40.0)
    assert slope(curve).value == pytest.approx(-1.0)
    assert slope(curve).spread == pytest.approx(0.0, abs=1e-12)
    assert ratio_of_means(half.at(64.0), curve.at(64.0)).value == pytest.approx(0.5)
    assert samples_ratio(curve, half, 0.2).value == pytest.approx(2.0)


def test_what_is_not_reached_is_not_made_up():
    curve = Curve(X, np.ones((3, 4)))
    assert samples_needed(curve, 0.5).value is None
    assert samples_needed(curve, 0.5).text() == "–"
    # below from the first size on: that the crossing lies before it is all there is to say
    assert falls_to(X, np.full(4, 0.1), 0.5) is None
    assert rises_through(X, np.full(4, 0.1), 0.5) is None


def test_spread_is_the_standard_error(rng):
    """Resampling a mean of r gives its standard error, within a few percent over many draws."""
    spreads = []
    expected = []
    for _ in range(40):
        runs = rng.standard_normal((6, 1)) + 10
        spreads.append(resample(lambda tables: float(tables[0].mean()), [runs]).spread)
        expected.append(runs.std(ddof=1) / math.sqrt(6))
    np.testing.assert_allclose(spreads, expected, rtol=0.2)


def test_one_repetition_has_no_interval_and_shows_nothing():
    estimate = samples_needed(Curve(X, (8 / X)[None, :]), 0.2)
    assert estimate.value == pytest.approx(40.0)
    assert estimate.text() == "40"
    assert above(estimate, 1.0) is None
    assert below(estimate, 100.0) is None


def test_repetitions_of_different_reach_are_resampled_apart():
    """Two long repetitions among many short ones: every resampled curve has its last point."""
    runs = np.full((8, 4), np.nan)
    runs[:2] = 8 / X
    runs[2:, :2] = 8 / X[:2]
    counts = set()

    def last(tables):
        counts.add(int(np.isfinite(tables[0][:, -1]).sum()))
        return 1.0

    resample(last, [runs])
    assert counts == {2}


def test_an_interval_around_the_level_is_not_sure():
    estimate = Estimate(1.0, 0.1, low=0.8, high=1.2)
    assert [above(estimate, level) for level in (0.7, 1.0, 1.3)] == [True, None, False]
    assert [below(estimate, level) for level in (0.7, 1.0, 1.3)] == [False, None, True]
    assert all_of([True, None]) is None
    assert all_of([True, None, False]) is False
    assert all_of([True, True]) is True
