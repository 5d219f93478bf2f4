import math
import warnings
from typing import ClassVar

import numpy as np
import pytest
from balls import fit_norm_ball
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import KFold

import keyhole as kh
from keyhole.data.tokens import TokenRule
from keyhole.estimators.norm_ball import NormBallWarning
from keyhole.solve.ball import group_norms
from keyhole.theory.complexity import paper_complexity


@pytest.fixture
def sets(rng):
    keys = [rng.normal(size=(rng.integers(1, 6), 3)) for _ in range(40)]
    return kh.SetBatch(keys, rng.normal(size=(40, 3)))


@pytest.fixture
def y(sets, rng):
    return kh.targets.Correlation(1, 3)(sets) + 0.3 * rng.normal(size=len(sets))


def paper_features(model, sets):
    """Features of all heads without M^{-1/2}."""
    heads = model.layer_.heads.block(0, model.layer_.heads.n_heads)
    return kh.attention_features(sets, heads) * math.sqrt(len(heads))


@pytest.mark.parametrize("loss", ["huber", "absolute", "squared"])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_regression_is_the_solver_on_explicit_features(loss, fit_intercept, sets, y):
    options = {
        "group_radius": 0.5,
        "ball_radius": 0.3,
        "loss": loss,
        "fit_intercept": fit_intercept,
        "tol": 1e-3,
    }
    model = kh.NormBallRegressor(12, random_state=3, **options).fit(sets, y)
    phi = paper_features(model, sets)
    direct = fit_norm_ball(phi, y, group_size=4, **options)
    slack = 1e-9 * direct.objective
    assert (
        abs(model.objective_ - direct.objective)
        <= max(model.duality_gap_, direct.duality_gap) + slack
    )
    assert 0 <= model.duality_gap_ <= 1e-3 * model.objective_
    # the objective is that of the model which predicts, in the paper's scaling
    np.testing.assert_allclose(
        phi @ model.values_.ravel() + model.intercept_, model.predict(sets), atol=1e-10
    )
    residual = np.abs(model.predict(sets) - y)
    value = {
        "huber": np.where(residual < 1, residual**2 / 2, residual - 0.5),
        "absolute": residual,
        "squared": residual**2 / 2,
    }[loss]
    np.testing.assert_allclose(model.objective_, value.mean(), rtol=1e-9)
    if not fit_intercept:
        assert model.intercept_ == 0.0


def test_values_stay_in_the_ball_and_pruned_heads_are_exactly_zero(sets, y):
    model = kh.NormBallRegressor(30, group_radius=0.4, ball_radius=0.2, random_state=0).fit(sets, y)
    norms = group_norms(model.values_)
    assert norms.sum() <= 0.4 * (1 + 1e-9)
    assert np.linalg.norm(norms) <= 0.2 * (1 + 1e-9)
    np.testing.assert_array_equal(np.flatnonzero(norms), model.active_heads_)
    assert 0 < len(model.active_heads_) < 30
    assert model.layer_.values.shape == (len(model.active_heads_), 4, 1)


def test_a_pruned_model_never_draws_a_pruned_head(sets, y):
    class Watched(kh.GaussianHeads):
        drawn: ClassVar[list[int]] = []

        def sample(self, n_heads, dim, seed, *, start=0):
            self.drawn.extend(range(start, start + n_heads))
            return super().sample(n_heads, dim, seed, start=start)

    model = kh.NormBallRegressor(
        30, heads=Watched(), group_radius=0.3, ball_radius=0.3, random_state=0
    ).fit(sets, y)
    Watched.drawn.clear()
    predicted = model.predict(sets)
    assert sorted(Watched.drawn) == list(model.active_heads_)
    whole = paper_features(model, sets) @ model.values_.ravel() + model.intercept_
    np.testing.assert_allclose(predicted, whole, atol=1e-10)


def test_a_ball_of_radius_zero_leaves_the_best_constant(sets, y):
    model = kh.NormBallRegressor(8, loss="squared", group_radius=0.0, random_state=0).fit(sets, y)
    np.testing.assert_allclose(model.predict(sets), y.mean())
    assert len(model.active_heads_) == 0
    assert len(model.predict(sets[:1])) == 1


def test_radii_from_theory(sets, y):
    complexity = paper_complexity(kh.targets.TokenPower(1, dim=3))
    model = kh.NormBallRegressor(
        20,
        group_radius="theory",
        ball_radius="theory",
        complexity=complexity,
        delta=0.1,
        constant=0.5,
    ).fit(sets, y)
    assert model.group_radius_ == 0.5 * math.sqrt(complexity)
    np.testing.assert_allclose(model.ball_radius_, math.sqrt(0.5 * complexity / (0.1 * 20)))
    matched = kh.NormBallRegressor(20, group_radius=1.0, delta=0.1).fit(sets, y)
    np.testing.assert_allclose(matched.ball_radius_, 1.0 / math.sqrt(0.1 * 20))
    with pytest.raises(ValueError, match=r"needs the complexity B .*=kh.theory.paper_complexity"):
        kh.NormBallRegressor(20, group_radius="theory").fit(sets, y)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_automatic_path_follows_the_units_of_y(scale, sets, y):
    model = kh.NormBallRegressor(12, loss="squared", random_state=0, tol=0.01)
    expected = model.fit(sets, y)
    radius, prediction = expected.group_radius_, expected.predict(sets)
    model.fit(sets, scale * y)
    np.testing.assert_allclose(model.group_radius_, scale * radius, rtol=1e-6)
    np.testing.assert_allclose(model.predict(sets), scale * prediction, atol=0.2 * scale * y.std())


def test_a_sequence_is_chosen_from_by_cross_validation(sets, y):
    model = kh.NormBallRegressor(
        8, group_radius=[2.0, 0.1], ball_radius=[math.inf, 0.5], random_state=0
    ).fit(sets, y)
    table = model.cv_results_
    pairs = list(zip(table["group_radius"], table["ball_radius"], strict=True))
    assert sorted(pairs) == [(0.1, 0.5), (0.1, math.inf), (2.0, 0.5), (2.0, math.inf)]
    assert table["fold_test_losses"].shape == (4, 3)
    best = int(np.argmin(table["mean_test_loss"]))
    assert (model.group_radius_, model.ball_radius_) == pairs[best]


def test_the_shape_of_the_ball_may_be_chosen_too(sets, y):
    model = kh.NormBallRegressor(16, group_radius=1.0, ball_radius="cv", random_state=0).fit(
        sets, y
    )
    np.testing.assert_allclose(
        model.cv_results_["ball_radius"], [1 / 4, 1 / math.sqrt(0.8), math.inf]
    )
    alone = kh.NormBallRegressor(
        16, group_radius=math.inf, ball_radius="cv", random_state=0, tol=0.01
    ).fit(sets, y)
    assert alone.group_radius_ == math.inf
    assert 0 < alone.ball_radius_ < math.inf


def test_held_out_losses_are_those_of_refits(sets, y):
    model = kh.NormBallRegressor(
        6, loss="squared", group_radius=[0.3, 1.0], random_state=0, tol=1e-3
    ).fit(sets, y)
    folds = KFold(3, shuffle=True, random_state=0).split(y)
    for k, (kept, out) in enumerate(folds):
        for radius, losses in zip([0.3, 1.0], model.cv_results_["fold_test_losses"], strict=True):
            refit = kh.NormBallRegressor(6, loss="squared", group_radius=radius, random_state=0)
            error = ((refit.fit(sets[kept], y[kept]).predict(sets[out]) - y[out]) ** 2 / 2).mean()
            np.testing.assert_allclose(losses[k], error, rtol=0.3)


def test_weights_are_copies_at_given_radii(sets, y):
    counts = np.arange(40) % 3
    rows = np.repeat(np.arange(40), counts)
    model = kh.NormBallRegressor(8, group_radius=1.0, random_state=0)
    weighted = model.fit(sets, y, sample_weight=counts).predict(sets)
    np.testing.assert_allclose(model.fit(sets[rows], y[rows]).predict(sets), weighted, rtol=1e-8)


def test_float32_is_close_to_float64(sets, y):
    exact, single = (
        kh.NormBallRegressor(12, group_radius=0.5, random_state=0, dtype=d).fit(sets, y)
        for d in ("float64", "float32")
    )
    assert single.predict(sets).dtype == np.float64
    np.testing.assert_allclose(single.objective_, exact.objective_, rtol=2e-3)


def test_several_outputs_share_heads(sets, y):
    both = np.column_stack([y, 1 - 2 * y])
    model = kh.NormBallRegressor(8, group_radius=1.0, random_state=0).fit(sets, both)
    assert model.values_.shape == (8, 4, 2)
    assert model.intercept_.shape == (2,)
    assert model.predict(sets).shape == both.shape
    one = kh.NormBallRegressor(8, group_radius=1.0, random_state=0).fit(sets, y[:, None])
    assert one.values_.shape == (8, 4, 1)
    assert one.predict(sets).shape == (40, 1)


def test_stopping_early_warns_with_the_number(sets, y):
    model = kh.NormBallRegressor(20, group_radius=50.0, max_iter=5, tol=1e-9, random_state=0)
    with pytest.warns(
        NormBallWarning, match=r"stopped after 5 iterations at a relative duality gap of .*max_iter"
    ):
        model.fit(sets, y)
    assert issubclass(NormBallWarning, ConvergenceWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(sets, y)


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
def test_two_classes_are_one_column(loss, sets, y):
    words = np.where(y > np.median(y), "yes", "no")
    model = kh.NormBallClassifier(12, loss=loss, group_radius=5.0, random_state=0, tol=0.01).fit(
        sets, words
    )
    assert model.values_.shape == (12, 4)
    assert model.intercept_.shape == (1,)
    decision = model.decision_function(sets)
    np.testing.assert_array_equal(model.predict(sets), np.where(decision > 0, "yes", "no"))
    if loss == "logistic":
        np.testing.assert_allclose(model.predict_proba(sets)[:, 1], 1 / (1 + np.exp(-decision)))
        margins = np.where(words == "yes", decision, -decision)
        np.testing.assert_allclose(model.objective_, np.logaddexp(0, -margins).mean())
    else:
        assert not hasattr(model, "predict_proba")
        with pytest.raises(AttributeError) as error:
            model.predict_proba(sets)
        assert "the hinge loss has no probabilities" in str(error.value.__cause__)


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
def test_several_classes_share_the_ball(loss, sets, y):
    labels = np.digitize(y, np.quantile(y, [0.3, 0.6]))
    model = kh.NormBallClassifier(12, loss=loss, group_radius=5.0, random_state=0, tol=0.01).fit(
        sets, labels
    )
    assert model.values_.shape == (12, 4, 3)
    assert group_norms(model.values_.reshape(12, -1)).sum() <= 5.0 * (1 + 1e-9)
    assert model.decision_function(sets).shape == (40, 3)
    if loss == "logistic":
        np.testing.assert_allclose(model.predict_proba(sets).sum(axis=1), 1.0)
        np.testing.assert_allclose(np.log(model.predict_proba(sets)), model.predict_log_proba(sets))


def test_a_class_with_one_sample_is_never_held_out(sets):
    labels = np.arange(40) % 2
    labels[7] = 2
    model = kh.NormBallClassifier(6, random_state=0, tol=0.02).fit(sets, labels)
    assert list(model.classes_) == [0, 1, 2]


def test_a_class_without_weight_is_refused(sets):
    labels = np.arange(40) % 3
    model = kh.NormBallClassifier(6, group_radius=1.0, random_state=0, tol=0.01)
    with pytest.raises(ValueError, match="every class must have a sample of positive weight"):
        model.fit(sets, labels, sample_weight=(labels != 1).astype(float))


def test_digits_as_sets_of_pixels():
    images, labels = load_digits(n_class=3, return_X_y=True)
    pixels = []
    for image in images[:240].reshape(-1, 8, 8):
        row, column = np.nonzero(image)
        pixels.append(np.column_stack([row / 3.5 - 1, column / 3.5 - 1, image[row, column] / 16]))
    X = kh.SetBatch(pixels)
    model = kh.NormBallClassifier(random_state=0).fit(X[:140], labels[:140])  # as it comes
    assert model.score(X[140:], labels[140:240]) > 0.8


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"group_radius": -1.0}, ValueError, "'group_radius' parameter .*Got -1.0"),
        (
            {"group_radius": [1.0, -1.0]},
            ValueError,
            r"`group_radius\[1\]` must be at least 0: got -1",
        ),
        ({"group_radius": []}, ValueError, "non-empty sequence"),
        (
            {"group_radius": "loo"},
            ValueError,
            "'group_radius' parameter .*Got 'loo'",
        ),
        ({"ball_radius": "loo"}, ValueError, "'ball_radius' parameter .*'matched'.*Got 'loo'"),
        (
            {"group_radius": math.inf},
            ValueError,
            "'matched'` follows `group_radius`, which is infinite",
        ),
        (
            {"group_radius": math.inf, "ball_radius": math.inf},
            ValueError,
            "must not both be infinite",
        ),
        ({"delta": 1.0}, ValueError, "'delta' parameter .*Got 1.0"),
        ({"complexity": 0.0}, ValueError, "'complexity' parameter .*Got 0.0"),
        ({"n_heads": math.inf}, ValueError, "`n_heads` must be finite for the norm ball"),
        ({"n_folds": 1}, ValueError, "'n_folds' parameter .*Got 1"),
        ({"tol": 0.0}, ValueError, "'tol' parameter .*Got 0.0"),
        ({"loss": "quantile"}, ValueError, "'loss' parameter .*Got 'quantile'"),
    ],
)
@pytest.mark.parametrize("model", [kh.NormBallRegressor, kh.NormBallClassifier])
def test_options_are_checked_before_any_work(model, options, error, words, sets):
    with pytest.raises(error, match=words):
        model(8).set_params(**options).fit(sets, np.arange(40) % 2)


def test_one_sample_cannot_be_held_out_but_can_be_fitted(sets):
    with pytest.raises(ValueError, match="at least two samples: got 1 sample"):
        kh.NormBallRegressor(8).fit(sets[:1], [3.0])
    model = kh.NormBallRegressor(8, group_radius=1.0, random_state=0).fit(sets[:1], [3.0])
    np.testing.assert_allclose(model.predict(sets[:1]), 3.0)


@pytest.mark.parametrize("level", [0.0, 2.5])
def test_a_constant_target_is_predicted_exactly(level, sets):
    model = kh.NormBallRegressor(8, random_state=0).fit(sets, np.full(40, level))
    np.testing.assert_allclose(model.predict(sets), level, rtol=1e-12)


@pytest.mark.parametrize("query", ["given", "mean", "each"])
@pytest.mark.parametrize("scaling", ["none", "sphere", "standard"])
def test_token_options_are_those_rules_applied_by_hand(scaling, query, sets, y):
    options = {"group_radius": 0.5, "ball_radius": 0.3, "random_state": 3}
    model = kh.NormBallRegressor(6, scaling=scaling, query=query, **options).fit(sets, y)
    ready = TokenRule.learn(sets, scaling, query).apply(sets)
    assert (model.tokens_.scaling, model.tokens_.query) == (scaling, query)
    scores = math.sqrt(6) * kh.attention_features(ready, model.layer_.heads) @ model.values_.ravel()
    np.testing.assert_allclose(model.predict(sets), scores + model.intercept_, atol=1e-10)
    features = kh.AttentionFeatures(6, random_state=3, scaling=scaling, query=query).fit_transform(
        sets
    )
    np.testing.assert_array_equal(features, kh.attention_features(ready, model.layer_.heads))


@pytest.mark.parametrize("query_dim", [2, 3])
def test_made_queries_replace_those_of_another_kind(query_dim, rng):
    keys = [rng.normal(size=(rng.integers(1, 5), 3)) for _ in range(30)]
    sets = kh.SetBatch(keys, rng.normal(size=(30, query_dim)), rng.normal(size=(30, 1)))
    plain, y = kh.SetBatch(keys, None, sets.extras), rng.normal(size=30)
    options = {"query": "mean", "scaling": "standard", "random_state": 0}
    ball = kh.NormBallRegressor(4, group_radius=0.5, ball_radius=0.3, **options)
    np.testing.assert_array_equal(
        ball.fit(sets, y).predict(sets), ball.fit(plain, y).predict(plain)
    )
    features = kh.AttentionFeatures(4, **options)
    found = features.fit_transform(sets)
    np.testing.assert_array_equal(found, features.fit_transform(plain))
    np.testing.assert_array_equal(found[:, -1:], sets.extras, err_msg="extras stay as they are")


@pytest.mark.parametrize("name", ["scaling", "query"])
@pytest.mark.parametrize(
    "kind", [kh.NormBallRegressor, kh.NormBallClassifier, kh.AttentionFeatures]
)
def test_unknown_token_options_are_refused(kind, name, sets, y):
    word = "auto" if kind is kh.AttentionFeatures else "other"
    with pytest.raises(ValueError, match=f"'{name}' parameter .*{word}"):
        kind(4, **{name: word}).fit(sets, y > np.median(y))


@pytest.mark.parametrize(
    "kind", [kh.NormBallRegressor, kh.NormBallClassifier, kh.AttentionFeatures]
)
@pytest.mark.parametrize("query", ["mean", "each"])
def test_token_rules_are_saved(kind, query, sets, y, tmp_path):
    radii = {} if kind is kh.AttentionFeatures else {"group_radius": 0.5, "ball_radius": 0.3}
    model = kind(4, scaling="standard", query=query, random_state=0, **radii).fit(
        sets, y > np.median(y)
    )
    kh.save(model, tmp_path / "m")
    loaded = kh.load(tmp_path / "m")
    assert (loaded.scaling, loaded.query, loaded.tokens_.query) == ("standard", query, query)
    apply = "transform" if kind is kh.AttentionFeatures else "predict"
    np.testing.assert_array_equal(getattr(loaded, apply)(sets), getattr(model, apply)(sets))
