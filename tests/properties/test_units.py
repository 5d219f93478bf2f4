"""Units are the user's: y → a·y + b gives a·f + b, and with scaling="standard" units of tokens
change nothing.
"""

import math

import numpy as np
import pytest
from sklearn.base import clone

import keyhole as kh

Regressor = kh.AttentionRegressor
PLAIN = {
    "heads": kh.GaussianHeads(),
    "activation": "relu",
    "pooling": "mean",
    "scaling": "none",
}  # a small penalty is solved for in float32 under these
ROUTES = {
    "primal": Regressor(3, random_state=0),
    "primal, float32": Regressor(3, random_state=0, dtype="float32"),
    "dual": Regressor(20, random_state=0),
    "dual, float32": Regressor(20, random_state=0, dtype="float32"),
    "one penalty": Regressor(20, random_state=0, alpha=1e-3),
    "kernel": Regressor(math.inf),
    "exp kernel": Regressor(math.inf, kh.GaussianHeads(scale=0.3), activation="exp"),
    "cg": Regressor(20, random_state=0, alpha=0.1, solver="cg", **PLAIN),
    "cg, float32": Regressor(20, random_state=0, alpha=0.1, solver="cg", dtype="float32", **PLAIN),
    "choice of scaling": Regressor(20, random_state=0, scaling="auto"),
}
UNITS = [2.0**-500, 1e-150, 1e-100, 1e100, 1e150, 1e200, 1e-250]


@pytest.fixture
def sets(rng):
    return kh.SetBatch(
        [rng.normal(size=(rng.integers(1, 5), 3)) for _ in range(24)], rng.normal(size=(24, 3))
    )


@pytest.fixture
def y(sets, rng):
    return kh.targets.Correlation(1, 3)(sets) + 0.1 * rng.normal(size=len(sets))


def off(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def rounding(model):
    return 1e-4 if model.dtype == "float32" else 1e-8


@pytest.mark.parametrize("route", ROUTES)
def test_a_fit_follows_the_unit_of_y(route, sets, y):
    model = ROUTES[route]
    wanted = clone(model).fit(sets, y)
    for unit in UNITS:
        found = clone(model).fit(sets, unit * y)
        # a unit that is no power of two rounds y, and nothing else
        allowed = 0.0 if unit == 2.0**-500 else rounding(model)
        assert off(found.predict(sets) / unit, wanted.predict(sets)) <= allowed, f"unit {unit:g}"
        if found.selection_.method == "loo":
            assert off(found.loo_predictions_ / unit, wanted.loo_predictions_) <= allowed, (
                f"unit {unit:g}"
            )
        assert found.alpha_ == pytest.approx(wanted.alpha_)


@pytest.mark.parametrize("route", [name for name in ROUTES if "cg" not in name])
@pytest.mark.parametrize("unit", [2.0**-500, 1e160, 1e250])
def test_standard_deviations_follow_the_unit_of_y(route, unit, sets, y):
    model = ROUTES[route]
    wanted = clone(model).fit(sets, y).predict_std(sets)
    found = clone(model).fit(sets, unit * y).predict_std(sets)
    np.testing.assert_allclose(found / unit, wanted, rtol=rounding(model))


def test_of_one_sample_the_standard_deviation_is_not_known(sets, y):
    """Nothing is left without it, as for intervals."""
    lone = Regressor(5, alpha=1.0, random_state=0).fit(sets[:1], y[:1])
    np.testing.assert_array_equal(lone.predict_std(sets), np.inf)


@pytest.mark.parametrize("route", [name for name in ROUTES if "32" not in name])
def test_a_fit_follows_the_origin_of_y(route, sets, y):
    model = ROUTES[route]
    wanted = clone(model).fit(sets, y).predict(sets)
    for unit, origin in ((1.0, 1e6), (1e-150, 1e-144), (1e150, -1e156)):
        found = clone(model).fit(sets, unit * y + origin).predict(sets)
        assert off((found - origin) / unit, wanted) < 1e-6, f"{unit:g} y + {origin:g}"


@pytest.mark.parametrize("unit", [1e-150, 1e-60, 1e60, 1e150])
@pytest.mark.parametrize("groups", [None, np.arange(24) // 3], ids=["samples", "groups"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_groups_and_streams_follow_the_unit_of_y(unit, groups, dtype, sets, y):
    model = Regressor(4, random_state=0, dtype=dtype)
    pair = []
    for scale in (1.0, unit):
        if groups is None:
            fitted = (
                clone(model)
                .partial_fit(sets[:9], scale * y[:9])
                .partial_fit(sets[9:], scale * y[9:])
            )
        else:
            fitted = clone(model).fit(sets, scale * y, groups=groups)
        pair.append(fitted.predict(sets) / scale)
    assert off(pair[1], pair[0]) < rounding(model)


@pytest.mark.parametrize("route", ["primal", "dual, float32", "kernel", "cg"])
def test_standard_tokens_have_no_units(route, sets, y):
    model = clone(ROUTES[route]).set_params(scaling="standard")
    wanted = clone(model).fit(sets, y).predict(sets)
    for units in ([1e-150] * 3, [1e150] * 3, [1e-300, 1.0, 1e300], [1e-155, 1e155, 1e-200]):
        scaled = kh.SetBatch(np.split(sets.tokens * units, sets.offsets[1:-1]), sets.query * units)
        found = clone(model).fit(scaled, y).predict(scaled)
        assert off(found, wanted) < rounding(model), f"units {units}"


@pytest.mark.parametrize("size", [1e30, 1e100, 1e155, 1e300])
@pytest.mark.parametrize("route", [name for name in ROUTES if name != "choice of scaling"])
def test_tokens_too_large_to_be_multiplied_are_refused_in_words(route, size, sets, y):
    huge = kh.SetBatch(np.split(size * sets.tokens, sets.offsets[1:-1]), size * sets.query)
    with np.errstate(all="ignore"), pytest.raises((ValueError, OverflowError), match="Scale"):
        clone(ROUTES[route]).set_params(scaling="none").fit(huge, y)


BALLS = {"cross-validated": {}, "fixed": {"group_radius": 3.0, "ball_radius": 1.0}}


def ball_fit(sets, y, loss, unit=1.0, **radii):
    radii = {name: unit * radius for name, radius in radii.items()}
    return kh.NormBallRegressor(10, loss=loss, random_state=0, **radii).fit(sets, y)


CROSS_VALIDATED_IS_SLOW = [pytest.param("cross-validated", marks=pytest.mark.slow), "fixed"]


@pytest.mark.parametrize("radii", CROSS_VALIDATED_IS_SLOW)
@pytest.mark.parametrize("loss", ["squared", "absolute", "huber"])
def test_the_norm_ball_follows_the_origin_of_y(loss, radii, sets, y):
    wanted = ball_fit(sets, y, loss, **BALLS[radii])
    for origin in (1e7, -1e9):
        found = ball_fit(sets, y + origin, loss, **BALLS[radii])
        assert found.score(sets, y + origin) == pytest.approx(wanted.score(sets, y), abs=1e-4)
        assert found.objective_ == pytest.approx(wanted.objective_, rel=1e-3)
        assert found.intercept_ == pytest.approx(origin, abs=10)


@pytest.mark.parametrize(
    ("loss", "degree", "radii"),
    [
        ("squared", 2, "cross-validated"),
        ("squared", 2, "fixed"),
        pytest.param("absolute", 1, "cross-validated", marks=pytest.mark.slow),
        ("absolute", 1, "fixed"),
    ],
)
def test_the_norm_ball_follows_the_unit_of_y(loss, degree, radii, sets, y):
    wanted = ball_fit(sets, y, loss, **BALLS[radii])
    for unit in (2.0**-40, 2.0**40):
        found = ball_fit(sets, unit * y, loss, unit, **BALLS[radii])
        assert off(found.predict(sets) / unit, wanted.predict(sets)) < 1e-12
        assert off(found.values_ / unit, wanted.values_) < 1e-12
        assert found.group_radius_ / unit == wanted.group_radius_
        assert found.objective_ / unit**degree == pytest.approx(wanted.objective_)
        assert found.duality_gap_ / unit**degree == pytest.approx(wanted.duality_gap_)
        losses = [fit.cv_results_["mean_test_loss"] for fit in (found, wanted)]
        np.testing.assert_allclose(losses[0] / unit**degree, losses[1])


def test_a_loss_with_a_size_of_its_own_is_caught(sets, y):
    wanted, found = (
        ball_fit(sets, unit * y, "huber", unit, **BALLS["fixed"]) for unit in (1.0, 1e3)
    )
    assert off(found.predict(sets) / 1e3, wanted.predict(sets)) > 1e-3
