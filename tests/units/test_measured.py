"""Curves, crossings and their uncertainty: against cases with a known answer."""

import math

import numpy as np
import pytest

from keyhole.lab.measured import (
    Curve,
    falls_to,
    ratio_at,
    resample,
    rises_through,
    samples_measured,
    samples_ratio,
    slope,
)

X = np.array([16.0, 32.0, 64.0, 128.0])


def test_means_use_the_repetitions_there_are():
    curve = Curve(X[:2], np.array([[1.0, 3.0], [3.0, np.nan]]))
    np.testing.assert_array_equal(curve.mean, [2.0, 3.0])
    assert curve.at(16.0) == (2.0, 1.0)
    assert math.isnan(curve.error[1])
    series = curve.series("a", "attention")
    assert list(series.low) == [1.0, 3.0]


def test_a_power_law_is_read_exactly():
    runs = np.array([[1.0], [1.1], [0.9]]) * 8 / X
    curve = Curve(X, runs)
    assert samples_measured(curve, 0.2).value == pytest.approx(40.0)
    assert slope(curve).value == pytest.approx(-1.0)
    assert slope(curve).spread == pytest.approx(0.0, abs=1e-12)
    assert ratio_at(Curve(X, 0.5 * runs), curve, 64.0).value == pytest.approx(0.5)
    assert samples_ratio(curve, Curve(X, 0.5 * runs), 0.2).value == pytest.approx(2.0)


def test_what_is_not_reached_is_not_made_up():
    curve = Curve(X, np.ones((3, 4)))
    assert samples_measured(curve, 0.5).value is None
    assert samples_measured(curve, 0.5).text() == "–"
    # below from the first size on: that the crossing lies before it is all there is to say
    assert falls_to(X, np.full(4, 0.1), 0.5) is None
    assert rises_through(X, np.full(4, 0.1), 0.5) is None


def test_spread_is_the_standard_error(rng):
    """Resampling a mean of r gives its standard error; the average over draws is within a few
    percent.
    """
    found, true = [], []
    for _ in range(40):
        runs = rng.standard_normal((6, 1)) + 10
        found.append(resample(lambda tables: float(tables[0].mean()), [runs], 0).spread)
        true.append(runs.std(ddof=1) / math.sqrt(6))
    np.testing.assert_allclose(found, true, rtol=0.2)


def test_one_repetition_has_no_spread():
    estimate = samples_measured(Curve(X, (8 / X)[None, :]), 0.2)
    assert estimate.value == pytest.approx(40.0)
    assert math.isnan(estimate.spread)
    assert estimate.text() == "40"


def test_repetitions_of_different_reach_are_resampled_apart():
    """Two long repetitions among many short ones: every resampled curve still has its last
    point.
    """
    runs = np.full((8, 4), np.nan)
    runs[:2] = 8 / X
    runs[2:, :2] = 8 / X[:2]
    seen = []

    def last(tables):
        seen.append(np.isfinite(tables[0][:, -1]).sum())
        return 1.0

    resample(last, [runs], 0)
    assert set(seen) == {2}
