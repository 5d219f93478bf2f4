"""Columns of the sample itself: solved for in the same ridge as the values of heads, on every
route.
"""

import math

import numpy as np
import pytest
from devices import DEVICE
from paper import PAPER_LAYER, paper_regressor
from sklearn.linear_model import Ridge

import keyhole as kh
from keyhole.choose import EXTRAS_SCALES, extras_unit

N = 60


def draw(rng, n=N, groups=False):
    """Ragged sets whose y is a function of the keys, and of two columns that say nothing of
    them.
    """
    keys = [rng.normal(size=(int(rng.integers(1, 5)), 3)) for _ in range(2 * n if groups else n)]
    extras = rng.normal(size=(n, 2)) * [3.0, 0.1] + [100.0, -1.0]
    sets = kh.SetBatch(keys, rng.normal(size=(len(keys), 2)))
    if groups:
        sets = kh.SetGroups(sets, [2] * n, extras)
        part = np.array([sets[i].sets.tokens[:, 0].mean() for i in range(n)])
    else:
        sets = sets.with_extras(extras)
        part = np.array([one.tokens[:, 0].mean() for one in sets])
    return sets, part + extras @ [0.5, 4.0] + 0.1 * rng.normal(size=n)


def standardised(extras, weights=None, centred=True):
    if not centred:
        return extras / np.sqrt(np.average(np.square(extras), axis=0, weights=weights))
    mean = np.average(extras, axis=0, weights=weights)
    return (extras - mean) / np.sqrt(np.average(np.square(extras - mean), axis=0, weights=weights))


ROUTES = {
    "primal": {"n_heads": 3},
    "dual": {"n_heads": 40},
    "kernel": {"n_heads": math.inf},
    "cg": {"n_heads": 40, "solver": "cg"},
    "stream": {"n_heads": 3},
    "torch dual": {"n_heads": 40, "device": DEVICE},
    "torch kernel": {"n_heads": math.inf, "device": DEVICE},
}


def fit(route, sets, y, **options):
    if route.startswith("torch"):
        pytest.importorskip("torch", reason="the torch route is tested where torch is installed")
    weights = options.pop("weights", None)
    model = kh.AttentionRegressor(
        **{**PAPER_LAYER, "n_heads": 512, **{**ROUTES[route], "random_state": 0, **options}}
    )
    if route != "stream":
        return model.fit(sets, y, sample_weight=weights)
    for rows in (slice(0, 13), slice(13, 30), slice(30, None)):
        model.partial_fit(
            sets[rows], y[rows], sample_weight=None if weights is None else weights[rows]
        )
    return model


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_zero_keys_leave_ridge_on_the_columns(route, fit_intercept, rng):
    """One key of zeros in every set says nothing: scikit-learn's ridge on the standardised columns
    is what remains.
    """
    extras, weights = rng.normal(size=(N, 3)) * [1, 20, 0.1] + [0, 50, -2], rng.uniform(0.5, 2.0, N)
    y = extras @ [1.0, -0.2, 3.0] + rng.normal(size=N)
    sets = kh.SetBatch(np.zeros((N, 1, 2)), extras=extras)
    # the feature of a zero key is the same for all: without an intercept it must be none, by a step
    # that is never taken
    distribution = kh.GaussianHeads(mean=-1e3 * np.eye(3), scale=1e-3)
    options = {
        "alpha": 0.7,
        "extras_scale": 1.5,
        "fit_intercept": fit_intercept,
        "weights": weights,
        "heads": distribution,
    }
    model = fit(route, sets, y, **options)
    z = standardised(extras, weights, fit_intercept)
    truth = Ridge(alpha=0.7 / 1.5**2, fit_intercept=fit_intercept, solver="svd").fit(
        z, y, sample_weight=weights
    )
    tolerance = 1e-7 if route == "cg" else 1e-10
    np.testing.assert_allclose(
        model.predict(sets), truth.predict(z), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("groups", [False, True])
def test_every_route_is_the_same_ridge(groups, rng):
    sets, y = draw(rng, groups=groups)
    new = draw(rng, groups=groups)[0]
    for fit_intercept in (True, False):
        options = {"alpha": 0.3, "extras_scale": 2.0, "fit_intercept": fit_intercept, "n_heads": 12}
        dual = fit("dual", sets, y, **options)
        z = 2.0 * standardised(sets.extras, centred=fit_intercept)
        design = np.hstack([kh.attention_features(sets, dual.layer_.heads), z])
        truth = Ridge(alpha=0.3, fit_intercept=fit_intercept, solver="svd").fit(design, y)
        np.testing.assert_allclose(dual.predict(sets), truth.predict(design), rtol=1e-9)
        np.testing.assert_allclose(dual.layer_.extras_values[:, 0], truth.coef_[-2:], rtol=1e-8)
        routes = ["primal", "cg", "stream"] if groups else ["primal", "cg", "stream", "torch dual"]
        for route in routes:
            few = {**options, "n_heads": 12}
            np.testing.assert_allclose(
                fit(route, sets, y, **few).predict(new), dual.predict(new), rtol=1e-6
            )


def test_the_kernel_is_kernel_plus_linear_kernel(rng):
    sets, y = draw(rng)
    model = fit("kernel", sets, y, alpha=0.2, extras_scale=0.5)
    z = 0.5 * standardised(sets.extras)
    gram = kh.attention_kernel(sets) + z @ z.T
    centre = np.eye(N) - 1 / N
    dual = np.linalg.solve(centre @ gram @ centre + 0.2 * np.eye(N), centre @ y)
    fitted = y - 0.2 * dual  # the residual of ridge is α times its dual coefficients
    np.testing.assert_allclose(model.predict(sets), fitted, rtol=1e-9)


@pytest.mark.parametrize("route", ["primal", "dual", "kernel", "groups"])
def test_leave_one_out_is_refits(route, rng):
    sets, y = draw(rng, 24)
    together = np.arange(24) // 2 if route == "groups" else None
    options = {**ROUTES["dual" if route == "groups" else route], "random_state": 0, "alpha": 0.5}
    model = kh.AttentionRegressor(
        **{**PAPER_LAYER, "n_heads": 512, **options},
        extras_scale=1.3,
    ).fit(sets, y, groups=together)
    # the refits have to scale the columns as all samples do
    z = 1.3 * standardised(sets.extras)
    bare = sets.with_extras(None)
    if route == "kernel":
        gram = kh.attention_kernel(bare) + z @ z.T
    else:
        design = np.hstack([kh.attention_features(bare, model.layer_.heads), z])
        gram = design @ design.T
    for i in range(24):
        rest = np.arange(24) != i if together is None else together != together[i]
        centred = gram[np.ix_(rest, rest)]
        one = np.ones(rest.sum())
        inverse = np.linalg.inv(centred + 0.5 * np.eye(rest.sum()))
        b = one @ inverse @ y[rest] / (one @ inverse @ one)
        expected = gram[i, rest] @ inverse @ (y[rest] - b) + b
        assert model.loo_predictions_[i] == pytest.approx(expected, rel=1e-8, abs=1e-8)


@pytest.mark.parametrize("n_heads", [30, math.inf])
def test_the_scale_is_that_of_least_leave_one_out_error(n_heads, rng):
    sets, y = draw(rng)
    model = paper_regressor(n_heads, random_state=0).fit(sets, y)
    bare = sets.with_extras(None)
    if n_heads == 30:
        features = kh.attention_features(bare, model.layer_.heads)
        gram = features @ features.T
    else:
        gram = kh.attention_kernel(bare)
    unit = math.sqrt((np.trace(gram) - gram.sum() / N) / (2 * N))  # extras vary as much as features
    errors = {
        unit * r: paper_regressor(n_heads, random_state=0, extras_scale=unit * r)
        .fit(sets, y)
        .loo_error_
        for r in EXTRAS_SCALES
    }
    assert model.tokens_.extras_scale == pytest.approx(min(errors, key=errors.get), rel=1e-9)
    assert model.loo_error_ == pytest.approx(min(errors.values()), rel=1e-6)
    alone = paper_regressor(n_heads, random_state=0).fit(bare, y)
    assert model.loo_error_ < 0.5 * alone.loo_error_


@pytest.mark.parametrize("n_heads", [4, math.inf])
def test_one_sample_tells_nothing_of_the_scale(n_heads, rng):
    sets, y = draw(rng, 3)
    only = np.array([0.0, 1.0, 0.0])
    for model in (
        kh.AttentionRegressor(n_heads, alpha=1.0, random_state=0),
        kh.NormBallRegressor(4, group_radius=1.0),
    ):
        assert model.fit(sets, y, sample_weight=only).tokens_.extras_scale == 1.0


def test_extras_that_do_not_vary_have_a_unit_of_one():
    assert (extras_unit(4.0, 5.0, 1.0), extras_unit(0.0, 5.0, 1.0), extras_unit(4.0, 5.0, 0.0)) == (
        2.0,
        1.0,
        1.0,
    )


def test_units_of_the_columns_do_not_matter(rng):
    sets, y = draw(rng)
    moved = sets.with_extras(sets.extras * [1e6, 1e-6] + [1e9, 3.0])
    for route in ("dual", "stream"):
        one, two = (fit(route, x, y).predict(x) for x in (sets, moved))
        np.testing.assert_allclose(two, one, rtol=1e-5)


def test_copies_differ_in_extras(rng):
    sets, _ = draw(rng, 4)
    twice = kh.concatenate([sets, sets, sets.with_extras(sets.extras + 1)])
    assert np.array_equal(twice[[5, 9]].extras, [sets.extras[1], sets.extras[1] + 1])
    assert np.array_equal(twice[2:5].extras, twice.extras[2:5])


def test_sizes_are_offered(rng):
    keys = [rng.normal(size=(int(rng.integers(1, 9)), 2)) for _ in range(N)]
    sets, y = kh.SetBatch(keys), np.array([len(k) for k in keys], float)
    assert np.array_equal(kh.tokens.with_size(sets).extras[:, 0], y)
    assert (
        paper_regressor(20, random_state=0).fit(kh.tokens.with_size(sets), y).loo_error_
        < 1e-3 * y.var()
    )


def test_mistakes_are_named(rng):
    sets, y = draw(rng)
    with pytest.raises(
        ValueError,
        match=r"`extras` must have shape \(n, c\), one row per sample: got shape \(60,\) for",
    ):
        sets.with_extras(np.zeros(60))
    with pytest.raises(ValueError, match="`extras` must be finite"):
        sets.with_extras(np.full((60, 1), np.nan))
    with pytest.raises(ValueError, match="`batches` must all carry extras, or none: 1 of 2 do"):
        kh.concatenate([sets, sets.with_extras(None)])
    with pytest.raises(ValueError, match="extras belong to samples, which are groups of sets here"):
        kh.SetGroups(sets, [60])
    model = paper_regressor(5, random_state=0).fit(sets, y)
    with pytest.raises(
        ValueError, match="X has 0 columns of extras, but AttentionRegressor is expecting 2"
    ):
        model.predict(sets.with_extras(None))
    with pytest.raises(ValueError, match=r"'extras_scale' parameter .*Got 0.0"):
        paper_regressor(5, extras_scale=0.0).fit(sets, y)
    with pytest.raises(ValueError, match=r"'extras_scale' parameter .*Got"):
        paper_regressor(5, extras_scale="many").fit(sets, y)


SAVED = {
    "dual": lambda: paper_regressor(30, random_state=0, scaling="standard"),
    "kernel": lambda: paper_regressor(math.inf, extras_scale=2.0),
    "learned": lambda: kh.AttentionRegressor(
        16,
        heads=kh.LearnedHeads(max_iter=2, hops=1),
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ),
    "identity": lambda: kh.AttentionRegressor(
        16,
        heads=kh.IdentityHeads(n_heads=8),
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ),
    "ball": lambda: kh.NormBallRegressor(8, group_radius=20.0, ball_radius=20.0, random_state=0),
    "features": lambda: kh.AttentionFeatures(8, random_state=0),
}


@pytest.mark.parametrize("route", SAVED)
def test_saved_and_loaded(route, rng, tmp_path):
    sets, y = draw(rng)
    model = SAVED[route]().fit(sets, y)
    kh.save(model, tmp_path / "model")
    again = kh.load(tmp_path / "model")
    if route == "features":
        assert np.array_equal(again.transform(sets), model.transform(sets))
        assert np.array_equal(model.transform(sets)[:, -2:], sets.extras)
        return
    assert np.array_equal(again.predict(sets), model.predict(sets))
    assert np.mean(np.square(model.predict(sets) - y)) < 0.2 * y.var(), (
        "y is mostly a sum of its extras"
    )


def test_streams_go_on_after_loading(rng, tmp_path):
    sets, y = draw(rng)
    labels = np.where(y > np.median(y), "high", "low")
    options = {"n_heads": 4, "random_state": 0, "alpha": 0.1, "extras_scale": 1.0}
    whole = kh.AttentionClassifier(**{**PAPER_LAYER, "n_heads": 512, **options}).fit(sets, labels)
    stream = kh.AttentionClassifier(**{**PAPER_LAYER, "n_heads": 512, **options}).partial_fit(
        sets[:25], labels[:25], classes=["high", "low"]
    )
    kh.save(stream, tmp_path / "model")
    again = kh.load(tmp_path / "model").partial_fit(sets[25:], labels[25:])
    np.testing.assert_allclose(
        again.decision_function(sets), whole.decision_function(sets), rtol=1e-7, atol=1e-9
    )


def test_the_norm_ball_is_least_squares_where_nothing_binds(rng):
    sets, y = draw(rng)
    model = kh.NormBallRegressor(
        2, loss="squared", group_radius=1e3, ball_radius=1e3, tol=1e-4, random_state=0
    )
    model.fit(sets, y)
    assert model.values_.shape == (2, 4)
    design = np.hstack([kh.attention_features(sets, model.layer_.heads), standardised(sets.extras)])
    truth = Ridge(alpha=1e-10, solver="svd").fit(design, y).predict(design)
    assert np.abs(model.predict(sets) - truth).max() < 0.02 * y.std()


def test_tables_carry_extras(rng, tmp_path):
    sets, y = draw(rng, 20)
    kh.data.write_parquet(tmp_path / "sets.parquet", [(sets, y)])
    data = kh.read_table(tmp_path / "sets.parquet")
    assert np.array_equal(data.sets.extras, sets.extras)
    assert data.names == ("keys[0]", "keys[1]", "keys[2]")
    parts = list(kh.data.ParquetSets(tmp_path / "sets.parquet", batch_size=7))
    assert np.array_equal(np.concatenate([batch.sets.extras for batch in parts]), sets.extras)
    rows = "set,x,y,age,rating,target\nu,1,2,30,1,5\nu,3,4,30,1,5\nv,5,6,40,0,6\n"
    (tmp_path / "rows.csv").write_text(rows)
    table = kh.read_table(tmp_path / "rows.csv", extras="age,rating", target="target")
    assert table.names == ("x", "y")
    assert table.sets.extras.tolist() == [[30, 1], [40, 0]]
    assert dict(table.columns)["extras"] == ("age", "rating")
    (tmp_path / "bad.csv").write_text(rows.replace("3,4,30", "3,4,31"))
    with pytest.raises(ValueError, match="column 'age' must be the same in all rows of a set"):
        kh.read_table(tmp_path / "bad.csv", extras="age,rating", target="target")
    (tmp_path / "gap.csv").write_text(rows.replace("30,1", ",1"))
    with pytest.raises(ValueError, match="extras must be known: 'age' is missing in row 0"):
        kh.read_table(tmp_path / "gap.csv", extras="age,rating", target="target")
    np.savez(tmp_path / "sets.npz", keys=np.zeros((3, 2, 1)), extras=np.ones((3, 4)))
    assert kh.read_table(tmp_path / "sets.npz").sets.extras.shape == (3, 4)
