"""Verdicts: each holds on a table that shows its claim, and fails on one that contradicts it.

With one repetition, or with repetitions that differ too much, no verdict is sure.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from keyhole.lab.curves import Estimate
from keyhole.lab.figures import (
    averages,
    complexity_order,
    correlation,
    dimension_length,
    head_count,
    prediction,
    rotation,
    theorem_learner,
)
from keyhole.lab.reproduce import FIGURES, module_of

PAGE = Path(__file__).parents[2] / "docs" / "paper" / "reproduce.md"


def sure(value, spread=0.01):
    """An estimate with a narrow interval."""
    return Estimate(value, spread, low=value - 2 * spread, high=value + 2 * spread)


def unsure(value):
    """The estimate of one repetition: no interval."""
    return Estimate(value, math.nan)


def rows_of(cells, error, repetitions=3):
    """The rows of ridge cells, if fits had these errors: 2 % apart in every repetition."""
    rows = []
    for cell in cells:
        if cell.repetition >= repetitions:
            continue
        for heads in cell.heads:
            for target in cell.targets:
                for n in cell.sizes:
                    value = error(cell.model, target, heads, n) * (1 + 0.02 * cell.repetition)
                    rows.append(
                        {
                            "model": cell.model,
                            "target": target,
                            "d": cell.dim,
                            "N": cell.n_keys,
                            "M": heads,
                            "n": n,
                            "most": max(cell.sizes),
                            "repetition": cell.repetition,
                            "error": value,
                        }
                    )
    return rows


@pytest.mark.parametrize("name", FIGURES)
def test_the_rule_is_printed_where_the_documentation_has_it(name):
    """One text: it stands in the module of the figure, and pages repeat it."""
    words = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert module_of(name).RULE in words


def averages_state(mlp_needs, repetitions=3):
    """Attention falls to 0.3 at n = 100, the MLP at so many times the samples."""
    config = averages.Config(
        dim=3, n_keys=3, n_heads=8, smallest=16, largest=4096, powers=(2,), more_repetitions=0
    )

    def error(model, target, heads, n):
        needed = 100 * (mlp_needs if model == "mlp" else 1)
        return 0.3 * needed / n

    rows = rows_of(averages.cells(config), error, repetitions)
    return averages.section(config, rows).verdict.state


def test_averages_hold_only_where_the_mlp_needs_five_times_the_samples():
    assert averages_state(8) == "holds"
    assert averages_state(1000) == "holds"  # the MLP does not arrive at all
    assert averages_state(2) == "partly"
    assert averages_state(0.5) == "does not show"
    assert averages_state(8, repetitions=1) == "not sure"


def correlation_verdict(*ratios):
    config = correlation.Config(dim=3, n_keys=2, powers=tuple(range(1, len(ratios) + 1)))
    return correlation.verdict(config, dict(enumerate(ratios, start=1)), "no prediction")


def test_correlation_holds_only_where_biased_heads_need_fewer_samples_at_every_power():
    assert correlation_verdict(sure(1.2), sure(2.0)).state == "holds"

    # q = 1 as measured, 0.754 ± 0.019: named, and the claim holds in part
    verdict = correlation_verdict(sure(0.754, 0.019), sure(2.0))
    assert verdict.state == "partly"
    assert "At q = 1 biased heads need more samples" in verdict.sentence

    assert correlation_verdict(unsure(1.2), unsure(9.0)).state == "not sure"
    assert correlation_verdict(sure(1.2), sure(1.21)).state == "not sure"
    assert correlation_verdict(sure(2.0), sure(1.1)).state == "does not show"
    assert correlation_verdict(sure(0.5), sure(0.9)).state == "does not show"
    assert correlation_verdict(sure(1.2), Estimate(None)).state == "not tested"


def rotation_state(first, last, repetitions=3):
    """The ratio of errors of biased over zero-mean heads goes from first to last with γ."""
    config = rotation.Config(
        dim=4, n_keys=2, n_heads=4, largest=64, gammas=(0.0, 1.0), n_sizes=1, more_repetitions=0
    )

    def error(model, target, heads, n):
        if model != "biased":
            return 1.0
        return first if target == rotation.notation(0.0) else last

    rows = rows_of(rotation.cells(config), error, repetitions)
    for row in rows:  # repetitions differ in how the ratio grows
        if row["model"] == "biased" and row["target"] == rotation.notation(1.0):
            row["error"] *= 1 + 0.01 * row["repetition"]
    return rotation.section(config, rows).verdict.state


def test_rotation_holds_only_where_the_advantage_is_there_and_fades():
    assert rotation_state(0.5, 1.2) == "holds"
    assert rotation_state(1.1, 2.0) == "partly"
    assert rotation_state(0.9, 0.5) == "does not show"
    assert rotation_state(0.9, 0.9) == "not sure"
    assert rotation_state(0.5, 1.2, repetitions=1) == "not sure"


def head_count_state(exponent, repetitions=3):
    config = head_count.Config(dim=6, heads=(4, 8), sizes=(64,), slope_samples=1280)

    def error(model, target, heads, n):
        return 0.1 if heads is None else 2.0 * heads**exponent

    rows = rows_of(head_count.cells(config), error, repetitions)
    for row in rows:  # repetitions differ in their slopes
        if row["M"] is not None:
            row["error"] *= row["M"] ** (0.02 * row["repetition"])
    return head_count.section(config, rows).verdict.state


def test_head_count_holds_only_where_every_slope_is_steep():
    assert head_count_state(-1.5) == "holds"
    assert head_count_state(-0.6) == "does not show"
    assert head_count_state(-1.03) == "not sure"
    assert head_count_state(-1.5, repetitions=1) == "not sure"


def complexity_rows(rng, noise, count=40):
    """Samples that follow the complexities, each blurred by noise; trivial predictors are blind."""
    rows = []
    for n in np.exp(rng.uniform(2, 8, count)):
        blurred = n * np.exp(noise * rng.standard_normal(4))
        row = {"measured": float(n), **dict(zip(complexity_order.MEASURES, blurred, strict=True))}
        row["inverse_variance"] = float(n * np.exp(2.0 * rng.standard_normal()))
        row["degree"] = float(rng.integers(1, 4))
        rows.append(row)
    return rows


def test_complexity_has_to_beat_trivial_predictors(rng):
    rows = complexity_rows(rng, noise=0.1)
    assert complexity_order.verdict(rows, seed=0).state == "holds"

    # as good as 1/Var f* and no better: a positive rank correlation alone is no confirmation
    for row in rows:
        for name in complexity_order.MEASURES:
            row[name] = row["inverse_variance"]
    assert complexity_order.verdict(rows, seed=0).state == "does not show"
    assert complexity_order.verdict(rows[:3], seed=0).state == "not tested"


def dimension_verdict(mlp_samples, miss=None, spread=1.0):
    rows = []
    for model, samples in (("attention", (100.0, 110.0)), ("mlp", (100.0, mlp_samples))):
        for n_keys, n in zip((2, 8), samples, strict=True):
            row = {"model": model, "d": 8, "N": n_keys, "measured": n, "predicted": int(n)}
            rows.append({**row, "samples": sure(n, spread), "miss": None})
    rows[-1]["miss"] = miss
    return dimension_length.verdict([], rows)


def test_dimension_holds_only_where_the_mlp_needs_grow_faster():
    assert dimension_verdict(900.0).state == "holds"
    assert dimension_verdict(150.0).state == "partly"
    assert dimension_verdict(60.0).state == "does not show"
    assert dimension_verdict(900.0, spread=90.0).state == "not sure"

    contradicted = dimension_verdict(900.0, miss="not reached at n = 2610")
    assert contradicted.state == "partly"
    assert "Contradicted: MLP at d = 8, N = 8" in contradicted.sentence


def learner_state(clean, wild):
    ratios = {
        (panel, learner): wild if panel.outliers else clean
        for panel in theorem_learner.Config().panels
        for learner in theorem_learner.CONSTRAINED
    }
    return theorem_learner.verdict(512, ratios, "no prediction").state


def test_learner_needs_whole_intervals():
    assert learner_state(clean=sure(1.1), wild=sure(0.5)) == "holds"
    assert learner_state(clean=unsure(1.1), wild=unsure(0.5)) == "not sure"
    assert learner_state(clean=sure(1.49, 0.1), wild=sure(0.5)) == "partly"
    assert learner_state(clean=sure(3.0), wild=sure(1.2)) == "does not show"


def prediction_verdict(miss=None, deviation=0.02, error=0.01):
    row = {
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
        "standard_error": error,
        "deviation": deviation,
        "excess_deviation": deviation,
        "conditional_deviation": None,
    }
    ratio = {
        "N": "4",
        "attention, predicted": "200",
        "attention, miss": miss,
        "mlp, predicted": "900",
        "mlp, miss": None,
        "ratio, predicted": "4.5",
        "ratio, measured": "4.4",
    }
    return prediction.verdict([row] * 4, [ratio])


def test_prediction_fails_on_wrong_errors_and_on_contradicted_sample_sizes():
    assert prediction_verdict().state == "holds"
    contradicted = prediction_verdict(miss="not reached at n = 320")
    assert contradicted.state == "partly"
    assert "Contradicted: attention at N = 4, not reached at n = 320" in contradicted.sentence
    assert prediction_verdict(deviation=0.5).state == "does not show"
    assert prediction_verdict(error=0.5).state == "not sure"
    assert prediction_verdict(error=math.nan).state == "not sure"
