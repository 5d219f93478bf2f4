"""Sample-level features: in the same ridge as the values of heads, standardised and scaled."""

import math

import numpy as np
import pytest
from paper import paper_regressor
from sklearn.linear_model import Ridge

import keyhole as kh
from keyhole.fit.embedding import EXTRAS_SCALES

N = 60
ALPHA = 0.3


def draw(rng, groups=False):
    """Ragged sets; y is a function of the keys and of two features that say nothing of them."""
    n_sets = 2 * N if groups else N
    keys = [rng.normal(size=(int(rng.integers(1, 5)), 3)) for _ in range(n_sets)]
    extras = rng.normal(size=(N, 2)) * [3.0, 0.1] + [100.0, -1.0]
    sets = kh.SetBatch(keys, rng.normal(size=(n_sets, 3)))
    if groups:
        sets = kh.SetGroups(sets, [2] * N, extras)
        part = np.array([sets[i].sets.tokens[:, 0].mean() for i in range(N)])
    else:
        sets = sets.with_extras(extras)
        part = np.array([one.tokens[:, 0].mean() for one in sets])
    return sets, part + extras @ [0.5, 4.0] + 0.1 * rng.normal(size=N)


def standardised(extras, weights=None, fit_intercept=True):
    """About the weighted mean in weighted deviations; without an intercept about zero."""
    mean = np.average(extras, axis=0, weights=weights) if fit_intercept else 0.0
    return (extras - mean) / np.sqrt(np.average(np.square(extras - mean), axis=0, weights=weights))


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("n_heads", [3, 40])
@pytest.mark.parametrize("groups", [False, True])
def test_a_layer_with_extras_is_ridge_on_both(groups, n_heads, fit_intercept, rng):
    sets, y = draw(rng, groups)
    weights = rng.uniform(0.5, 2.0, N)
    model = paper_regressor(n_heads, alpha=ALPHA, fit_intercept=fit_intercept, random_state=0)
    model.fit(sets, y, sample_weight=weights)
    z = model.tokens_.extras_scale * standardised(sets.extras, weights, fit_intercept)
    heads = kh.GaussianHeads().sample(n_heads, 3, 0)
    design = np.hstack([kh.attention_features(sets, heads), z])
    ridge = Ridge(alpha=ALPHA, fit_intercept=fit_intercept, solver="svd")
    expected = ridge.fit(design, y, sample_weight=weights).predict(design)
    assert np.allclose(model.predict(sets), expected, rtol=1e-8)
    added = model.extras_contributions(sets)
    assert np.allclose(added, z * ridge.coef_[-2:], atol=1e-7)


def test_the_exact_kernel_has_a_linear_kernel_beside_it(rng):
    sets, y = draw(rng)
    model = paper_regressor(math.inf, alpha=ALPHA, random_state=0).fit(sets, y)
    z = model.tokens_.extras_scale * standardised(sets.extras)
    gram = kh.attention_kernel(sets) + z @ z.T
    centre = np.eye(N) - 1 / N
    dual = np.linalg.solve(centre @ gram @ centre + ALPHA * np.eye(N), centre @ y)
    # the residual of ridge is α times its dual coefficients
    assert np.allclose(model.predict(sets), y - ALPHA * dual, rtol=1e-8)


@pytest.mark.parametrize("n_heads", [30, math.inf])
def test_the_scale_is_that_of_least_leave_one_out_error(n_heads, rng):
    sets, y = draw(rng)
    model = paper_regressor(n_heads, random_state=0).fit(sets, y)
    bare = sets.with_extras(None)
    gram = kh.attention_kernel(bare)
    if n_heads == 30:
        features = kh.attention_features(bare, kh.GaussianHeads().sample(30, 3, 0))
        gram = features @ features.T
    # at scale one, extras vary as much as features
    unit = math.sqrt((np.trace(gram) - gram.sum() / N) / (2 * N))
    ratios = model.tokens_.extras_scale / (unit * np.array(EXTRAS_SCALES))
    chosen = int(np.argmin(np.abs(ratios - 1)))
    assert ratios[chosen] == pytest.approx(1.0)
    z = standardised(sets.extras)
    errors = []
    for ratio in EXTRAS_SCALES:
        both = gram + (ratio * unit) ** 2 * (z @ z.T)
        errors.append(
            min(leave_one_out_error(both, y, alpha) for alpha in np.geomspace(1e-4, 1e2, 13))
        )
    assert errors[chosen] <= 1.05 * min(errors)
    assert model.loo_error_ < 0.5 * paper_regressor(n_heads, random_state=0).fit(bare, y).loo_error_


def leave_one_out_error(gram, y, alpha):
    """Mean e_i², e = a_i/S_ii of the bordered system."""
    system = np.ones((N + 1, N + 1))
    system[:N, :N] = gram + alpha * np.eye(N)
    system[N, N] = 0.0
    inverse = np.linalg.inv(system)[:N, :N]
    return np.mean(np.square(inverse @ y / inverse.diagonal()))


def test_units_of_the_features_do_not_matter(rng):
    sets, y = draw(rng)
    moved = sets.with_extras(sets.extras * [1e6, 1e-6] + [1e9, 3.0])
    one, two = (paper_regressor(30, random_state=0).fit(x, y).predict(x) for x in (sets, moved))
    assert np.allclose(two, one, rtol=1e-5)


def test_a_feature_that_never_varies_says_nothing(rng):
    sets, y = draw(rng)
    constant = sets.with_extras(np.hstack([sets.extras, np.full((N, 1), 7.0)]))
    one = paper_regressor(30, alpha=ALPHA, random_state=0).fit(sets, y).predict(sets)
    model = paper_regressor(30, alpha=ALPHA, random_state=0).fit(constant, y)
    assert (model.extras_contributions(constant)[:, 2] == 0).all()
    assert np.isfinite(model.predict(constant)).all()
    assert np.abs(model.predict(constant) - one).max() < 0.3 * y.std()


def test_default_settings_use_them(rng):
    sets, y = draw(rng)
    model = kh.AttentionRegressor(16, random_state=0)
    with_extras = model.fit(sets, y).held_out_loss_
    assert with_extras < 0.3 * model.fit(sets.with_extras(None), y).held_out_loss_


def test_the_number_of_rows_is_offered(rng):
    keys = [rng.normal(size=(int(rng.integers(1, 9)), 2)) for _ in range(N)]
    sets = kh.tokens.with_size(kh.SetBatch(keys))
    sizes = np.array([len(key) for key in keys], float)
    assert (sets.extras[:, 0] == sizes).all()
    assert paper_regressor(20, random_state=0).fit(sets, sizes).loo_error_ < 1e-3 * sizes.var()


def test_extras_of_layers_that_act_together_are_refused(rng):
    sets, y = draw(rng)
    model = kh.AttentionRegressor(pooling="statistics", mlp="only", random_state=0).fit(sets, y)
    with pytest.raises(ValueError, match=r"of linear layers.*has a second kernel.*mlp='none'"):
        model.extras_contributions(sets)


def test_mistakes_are_named(rng):
    sets, y = draw(rng)
    with pytest.raises(ValueError, match=r"`extras` must have shape \(n, c\), one row per sample"):
        sets.with_extras(np.zeros(60))
    with pytest.raises(ValueError, match="`extras` must be finite"):
        sets.with_extras(np.full((60, 1), np.nan))
    with pytest.raises(ValueError, match="`batches` must all carry extras, or none: 1 of 2 do"):
        kh.concatenate([sets, sets.with_extras(None)])
    with pytest.raises(ValueError, match="extras belong to samples, which are groups of sets here"):
        kh.SetGroups(sets, [60])
    model = paper_regressor(5, random_state=0).fit(sets, y)
    with pytest.raises(ValueError, match=r"X has 0 columns of extras, but .* is expecting 2"):
        model.predict(sets.with_extras(None))


def test_tables_carry_extras(rng, tmp_path):
    sets, y = draw(rng)
    kh.data.write_parquet(tmp_path / "sets.parquet", [(sets, y)])
    data = kh.read_table(tmp_path / "sets.parquet")
    assert np.array_equal(data.sets.extras, sets.extras)
    parts = list(kh.data.ParquetSets(tmp_path / "sets.parquet", batch_size=7))
    assert np.array_equal(np.concatenate([batch.sets.extras for batch in parts]), sets.extras)
    rows = "set,x,y,age,rating,target\nu,1,2,30,1,5\nu,3,4,30,1,5\nv,5,6,40,0,6\n"
    (tmp_path / "rows.csv").write_text(rows)
    table = kh.read_table(tmp_path / "rows.csv", extras="age,rating", target="target")
    assert table.sets.extras.tolist() == [[30.0, 1.0], [40.0, 0.0]]
