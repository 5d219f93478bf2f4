"""Verdicts of the figures: each is seen failing on a result that contradicts its claim."""

import math

import numpy as np
import pytest

from keyhole.lab.figures import (
    complexity_order,
    correlation,
    dimension_length,
    prediction,
    rotation,
    theorem_learner,
)
from keyhole.lab.measured import Curve, Estimate, missed_window


def sure(value, spread=0.01):
    """An estimate with a narrow interval."""
    return Estimate(value, spread, low=value - 2 * spread, high=value + 2 * spread)


def unsure(value):
    """The estimate of one repetition: no interval."""
    return Estimate(value, math.nan)


def test_without_an_interval_nothing_is_certain():
    assert unsure(5.0).lower == -math.inf
    assert unsure(5.0).upper == math.inf
    assert Estimate(None).lower == -math.inf
    assert sure(5.0).lower == pytest.approx(4.98)


def correlation_state(*ratios):
    config = correlation.Config(dim=3, n_keys=2, powers=tuple(range(1, len(ratios) + 1)))
    return correlation._verdict(config, dict(enumerate(ratios, start=1)), "no prediction")


def test_correlation_holds_only_where_biased_heads_need_fewer_samples_at_every_power():
    assert correlation_state(sure(1.2), sure(2.0)).state == "holds"

    # q = 1 as measured, 0.754 ± 0.019: named, and the claim holds in part
    verdict = correlation_state(sure(0.754, 0.019), sure(2.0))
    assert verdict.state == "partly"
    assert "At q = 1 biased heads need more samples" in verdict.sentence

    # the least certain case proves nothing
    assert correlation_state(unsure(1.2), unsure(9.0)).state == "does not show"
    assert correlation_state(sure(2.0), sure(1.1)).state == "does not show"


def complexity_rows(rng, noise):
    """Samples that follow the complexities, each blurred by noise; trivial predictors are blind."""
    samples = np.exp(rng.uniform(2, 8, 40))
    rows = []
    for n in samples:
        blurred = n * np.exp(noise * rng.standard_normal(4))
        row = {"measured": float(n), **dict(zip(complexity_order.MEASURES, blurred, strict=True))}
        row["inverse_variance"] = float(n * np.exp(2.0 * rng.standard_normal()))
        row["degree"] = float(rng.integers(1, 4))
        rows.append(row)
    return rows


def complexity_state(rows):
    names = (*complexity_order.MEASURES, *complexity_order.TRIVIAL)
    ranks = {name: complexity_order._rank(rows, name, 0) for name in names}
    trivial = "inverse_variance"
    margins = {
        name: complexity_order._margin(rows, name, trivial, 0) for name in complexity_order.MEASURES
    }
    return complexity_order._verdict(rows, rows, ranks, margins, "1/Var f*").state


def test_complexity_has_to_beat_trivial_predictors(rng):
    assert complexity_state(complexity_rows(rng, noise=0.1)) == "holds"

    # as good as 1/Var f* and no better: a positive rank correlation alone is no confirmation
    rows = complexity_rows(rng, noise=0.1)
    for row in rows:
        for name in complexity_order.MEASURES:
            row[name] = row["inverse_variance"]
    assert complexity_state(rows) == "does not show"


def test_a_curve_that_misses_its_prediction_says_on_which_side():
    x = np.array([50.0, 100.0, 200.0])
    assert missed_window(Curve(x, np.array([[0.4, 0.2, 0.1]])), 0.2) is None
    assert missed_window(Curve(x, np.array([[0.9, 0.8, 0.7]])), 0.2) == "not reached at n = 200"
    assert missed_window(Curve(x, np.array([[0.1, 0.1, 0.1]])), 0.2) == "passed before n = 50"


def dimension_state(miss):
    config = dimension_length.Config(far_keys=(), keys=(2, 8))
    rows = []
    for model, samples in (("attention", (100, 110)), ("mlp", (100, 900))):
        for n_keys, n in zip(config.keys, samples, strict=True):
            row = {"model": model, "d": 8, "N": n_keys, "measured": n, "predicted": n}
            rows.append({**row, "miss": None, "oracle": None, "standard_error": 1.0})
    rows[-1]["miss"] = miss
    return dimension_length._verdict(config, [], rows)


def test_dimension_names_a_contradicted_prediction():
    assert dimension_state(None).state == "holds"
    verdict = dimension_state("not reached at n = 2610")
    assert verdict.state == "partly"
    assert "Contradicted: MLP at d = 8, N = 8" in verdict.sentence


def prediction_state(measured_samples, deviation=0.02):
    rows = [
        {
            "model": "attention",
            "d": 8,
            "N": 4,
            "target": "f_{1,2}",
            "n": 100,
            "M": "inf",
            "ridge": 1e-3,
            "noise": 0.0,
            "predicted": 1.0 + deviation,
            "measured": 1.0,
            "standard_error": 0.01,
            "deviation": deviation,
            "excess_deviation": deviation,
            "conditional_deviation": None,
        }
    ] * 4
    ratio = {
        "N": "4",
        "attention, predicted": "200",
        "attention, measured": measured_samples,
        "mlp, predicted": "900",
        "mlp, measured": "880 ± 10",
        "ratio, predicted": "4.5",
        "ratio, measured": "4.4 ± 0.1",
    }
    return prediction._verdict(rows, [ratio])


def test_prediction_fails_on_wrong_errors_and_on_contradicted_sample_sizes():
    assert prediction_state("198 ± 3").state == "holds"
    verdict = prediction_state("not reached at n = 320")
    assert verdict.state == "partly"
    assert "Contradicted: attention at N = 4, not reached at n = 320" in verdict.sentence
    assert prediction_state("198 ± 3", deviation=0.5).state == "does not show"


def learner_state(clean, wild):
    panels = theorem_learner.Config().panels
    ratios = {
        (panel, learner): wild if panel.outliers else clean
        for panel in panels
        for learner in theorem_learner.CONSTRAINED
    }
    return theorem_learner._verdict(theorem_learner.Config(), ratios, "no prediction").state


def test_learner_needs_whole_intervals():
    assert learner_state(clean=sure(1.1), wild=sure(0.5)) == "holds"
    assert learner_state(clean=unsure(1.1), wild=unsure(0.5)) == "does not show"
    assert learner_state(clean=sure(1.49, 0.1), wild=sure(0.5)) == "partly"
    assert learner_state(clean=sure(3.0), wild=sure(1.2)) == "does not show"


def test_rotation_needs_a_known_spread(monkeypatch):
    config = rotation.Config()
    crossings = {(n, exact): Estimate(None) for n in config.shown for exact in (False, True)}

    def state(start, end):
        monkeypatch.setattr(
            rotation, "_ratio", lambda *_, turn=-1, **__: start if turn == 0 else end
        )
        return rotation._verdict(config, {}, crossings, "no prediction").state

    assert state(sure(0.5), sure(1.2)) == "holds"
    assert state(unsure(0.5), unsure(1.2)) == "does not show"
    assert state(sure(0.9), sure(0.5)) == "does not show"
