"""Displays and importances: what is drawn is what was computed, and what matters is found."""

import matplotlib as mpl
import numpy as np
import pytest
from layers import fit_layer

import keyhole as kh
from keyhole.estimators.uncertainty import _sample_losses, _scores_without_itself
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
    keys = [rng.standard_normal((int(rng.integers(2, 5)), 3)) for _ in range(24)]
    keys += keys[:2]  # copies
    sets = kh.SetBatch(
        keys,
        np.tile(rng.standard_normal((13, 2)), (2, 1)),
        rng.standard_normal((13, 1)).repeat(2, axis=0),
    )
    y = np.array([k[:, 0].max() for k in keys])
    groups = np.arange(26) // 2 if grouped else None
    model = kh.AttentionRegressor(
        5,
        alpha=0.1,
        random_state=0,
        activation="relu",
        pooling="mean",
        query="given",
        scaling="standard",
    ).fit(sets, y, groups=groups)
    found = model.coordinate_importance(n_repeats=2)
    assert found.names == ("key 0", "key 1", "key 2", "query 0", "query 1", "extra 0")
    assert np.isnan(found.within[3:]).all()
    assert np.isfinite(found.across_error).all()
    assert found.baseline == pytest.approx(model.loo_error_)
    # nothing permuted, nothing lost; and the losses are those of refits on other samples in their
    # place
    rows = model.training_.refits().rows
    changed = kh.SetBatch([k[:, ::-1] for k in keys], sets.query, sets.extras)[rows]
    ready = model.tokens_.apply(sets)
    unit = groups if grouped else np.arange(len(y))
    refits = model.training_.refits()
    scores = _scores_without_itself([refits], model.tokens_.apply(changed), 2**30)
    losses = _sample_losses(refits.outputs, scores, is_logistic=False)
    for i, loss in zip(rows, losses, strict=True):
        rest = np.flatnonzero(unit != unit[i])
        fit = fit_layer(ready[rest], y[rest, None], model.layer_.heads, np.array([0.1]))
        new = kh.SetBatch([keys[i][:, ::-1]], sets.query[i : i + 1], sets.extras[i : i + 1])
        assert loss == pytest.approx(
            float((y[i] - fit.layer.predict(model.tokens_.apply(new))[0, 0]) ** 2), rel=1e-7
        )
