"""Displays and importances: what is drawn is what was computed, and what matters is found."""

import math

import matplotlib as mpl
import numpy as np
import pytest
from paper import PAPER_LAYER

import keyhole as kh
from keyhole.estimators.uncertainty import _without_itself
from keyhole.lab.displays import CoverageDisplay, LeftOutDisplay, ReliabilityDisplay

mpl.use("Agg")


def test_displays_of_a_classifier_count_what_was_right(rng):
    from matplotlib.figure import Figure

    x = rng.standard_normal((90, 2))
    y = np.array(["a", "b", "c"])[np.argsort(np.argsort(x[:, 0] + rng.standard_normal(90))) // 30]
    model = kh.AttentionClassifier(10, alpha=1.0, random_state=0).fit(x[:60], y[:60])
    axes = Figure().subplots(1, 2)
    sure = CoverageDisplay.from_estimator(model, x[60:], y[60:], levels=[0.6, 0.9], ax=axes[0])
    inside = model.predict_set(x[60:], 0.9)[np.arange(30), np.searchsorted(model.classes_, y[60:])]
    assert sure.ax_ is axes[0]
    np.testing.assert_allclose(sure.share[1], inside.mean())
    drawn = axes[0].lines[1].get_xydata()
    np.testing.assert_allclose(drawn, np.stack([sure.nominal, sure.share], axis=1))
    told = ReliabilityDisplay.from_estimator(model, x[60:], y[60:], ax=axes[1])
    assert told.share.mean() == pytest.approx(1 / 3)  # of three classes one is right
    assert told.chance.mean() == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="got 3 samples, and none"):
        LeftOutDisplay.from_estimator(model, x[:3], [1, 2, 3])


@pytest.mark.parametrize("grouped", [False, True])
def test_importance_is_the_error_of_refits_on_permuted_samples(grouped, rng):
    """Of a layer whose standardisation does not move: two samples more or less change nothing."""
    keys = [rng.standard_normal((int(rng.integers(2, 5)), 3)) for _ in range(24)]
    sets = kh.SetBatch(keys, rng.standard_normal((24, 2)))
    y = np.array([k[:, 0].max() for k in keys])
    groups = np.arange(24) // 2 if grouped else None
    settings = {**PAPER_LAYER, "scaling": "none", "alpha": 0.1, "random_state": 0}
    model = kh.AttentionRegressor(5, **settings).fit(sets, y, groups=groups)

    found = model.coordinate_importance(n_repeats=2)
    assert found.names == ("key 0", "key 1", "key 2", "query 0", "query 1")
    assert np.isnan(found.within[3:]).all()
    assert np.isfinite(found.across_error).all()
    assert found.baseline == pytest.approx(np.mean((y - model.held_out_predictions_) ** 2))

    # predictions of changed samples are those of refits without them
    changed = kh.SetBatch([k[:, ::-1] for k in keys], sets.query)
    combination = model.combination_
    scores = _without_itself(combination, model._training, changed, 2**30)
    unit = np.arange(24) if groups is None else groups
    for i in range(24):
        rest = np.flatnonzero(unit != unit[i])
        refit = kh.AttentionRegressor(5, **settings).fit(sets[rest], y[rest])
        assert scores[i, 0] == pytest.approx(refit.predict(changed[i : i + 1])[0], rel=1e-7)


def test_the_coordinate_that_the_target_is_of_has_most_importance(rng):
    keys = rng.standard_normal((60, 4, 3))
    y = keys.mean(axis=1)[:, 1]
    model = kh.AttentionRegressor(math.inf, random_state=0, **PAPER_LAYER).fit(keys, y)
    found = model.coordinate_importance()
    assert found.names[int(found.across.argmax())] == "key 1"
