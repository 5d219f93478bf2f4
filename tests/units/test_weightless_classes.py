"""A class whose samples all have weight 0 keeps its place among the labels, and changes nothing
else.
"""

import math
import warnings

import numpy as np
import pytest
from sklearn.base import clone

import keyhole as kh

BALL = {"group_radius": 2.0, "ball_radius": 1.0, "tol": 0.05, "random_state": 0}
MODELS = {
    "kernel": kh.AttentionClassifier(math.inf, random_state=0),
    "heads": kh.AttentionClassifier(8, random_state=0),
    "squared error": kh.AttentionClassifier(8, criterion="squared_error", random_state=0),
    "balanced": kh.AttentionClassifier(8, class_weight="balanced", random_state=0),
    "no intercept": kh.AttentionClassifier(8, fit_intercept=False, random_state=0),
    "conjugate gradients": kh.AttentionClassifier(
        8, alpha=1.0, solver="cg", scaling="none", random_state=0
    ),
    "logistic": kh.NormBallClassifier(8, **BALL),
    "hinge": kh.NormBallClassifier(8, loss="hinge", **BALL),
}


class Samples:
    """Samples of four classes, those of some of weight 0."""

    def __init__(self, rng, absent):
        keys = rng.normal(size=(60, 3, 2))
        extras = rng.normal(size=(60, 1))
        self.sets = kh.SetBatch(keys, rng.normal(size=(60, 2)), extras)
        # training samples tie with their own left-out scores, and rounding decides
        self.new = kh.SetBatch(
            rng.normal(size=(30, 3, 2)), rng.normal(size=(30, 2)), rng.normal(size=(30, 1))
        )
        score = keys[:, :, 0].mean(axis=1) + 0.3 * rng.normal(size=60)
        self.y = np.array(["ash", "beech", "cedar", "elm"])[
            np.digitize(score, np.quantile(score, [0.25, 0.5, 0.75]))
        ]
        self.weights = np.where(np.isin(self.y, absent), 0.0, rng.uniform(0.5, 2.0, 60))
        self.rows = np.flatnonzero(self.weights)
        self.is_absent = np.isin(np.unique(self.y), absent)
        self.fits = {}

    def fit_both(self, name):
        """The fit with samples of weight 0, and the fit without them: made once for all tests."""
        if name not in self.fits:
            rows = self.rows
            self.fits[name] = (
                clone(MODELS[name]).fit(self.sets, self.y, self.weights),
                clone(MODELS[name]).fit(self.sets[rows], self.y[rows], self.weights[rows]),
            )
        return self.fits[name]


@pytest.fixture(
    scope="module",
    params=[["beech"], ["ash"], ["ash", "cedar"], ["cedar", "elm"]],
    ids="-".join,
)
def samples(request):
    seed = int(request.config.getoption("--seed"))
    return Samples(np.random.default_rng(seed), request.param)


@pytest.mark.parametrize("name", MODELS)
def test_the_label_stays_and_the_fit_is_that_without_its_samples(name, samples):
    model, rest = samples.fit_both(name)
    assert model.classes_.tolist() == ["ash", "beech", "cedar", "elm"]
    assert model.class_has_weight_.tolist() == (~samples.is_absent).tolist()
    assert rest.class_has_weight_.all()
    np.testing.assert_array_equal(model.predict(samples.sets), rest.predict(samples.sets))
    decision = model.decision_function(samples.sets)
    assert decision.shape == (60, 4)
    np.testing.assert_array_equal(decision[:, samples.is_absent], -1.0)
    assert np.isfinite(decision).all()


@pytest.mark.parametrize("name", [name for name in MODELS if name != "hinge"])
def test_its_probability_is_zero_and_the_others_are_those_of_the_fit_without(name, samples):
    model, rest = samples.fit_both(name)
    chances = model.predict_proba(samples.sets)
    np.testing.assert_array_equal(chances[:, samples.is_absent], 0.0)
    np.testing.assert_allclose(
        chances[:, ~samples.is_absent], rest.predict_proba(samples.sets), rtol=1e-6, atol=1e-9
    )
    assert (model.predict_log_proba(samples.sets)[:, samples.is_absent] == -np.inf).all()


@pytest.mark.parametrize("name", ["kernel", "heads", "balanced", "squared error"])
def test_choices_and_sets_of_labels_are_those_of_the_fit_without(name, samples):
    model, rest = samples.fit_both(name)
    assert model.alpha_ == pytest.approx(rest.alpha_, rel=1e-6)
    assert model.temperature_ == pytest.approx(rest.temperature_, rel=1e-6)
    assert model.loo_error_ == pytest.approx(rest.loo_error_, rel=1e-6)
    plausible = model.predict_set(samples.new)
    assert not plausible[:, samples.is_absent].any()
    np.testing.assert_array_equal(plausible[:, ~samples.is_absent], rest.predict_set(samples.new))
    np.testing.assert_allclose(
        model.jackknife_errors_, rest.jackknife_errors_, rtol=1e-6, atol=1e-9
    )
    assert model.loo_decision_.shape == (60, 4)
    np.testing.assert_allclose(model.novelty(samples.new), rest.novelty(samples.new), atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_contributions_and_files_know_the_label(name, samples, tmp_path):
    model, _ = samples.fit_both(name)
    parts = np.array([part.sum(axis=0) for part in model.contributions(samples.sets)])
    parts += model.extras_contributions(samples.sets).sum(axis=1) + model.intercept_
    np.testing.assert_allclose(parts, model.decision_function(samples.sets), atol=1e-8)
    kh.save(model, tmp_path / "model.keyhole")
    loaded = kh.load(tmp_path / "model.keyhole")
    np.testing.assert_array_equal(loaded.class_has_weight_, model.class_has_weight_)
    method = "decision_function" if name == "hinge" else "predict_proba"
    np.testing.assert_array_equal(
        getattr(loaded, method)(samples.sets), getattr(model, method)(samples.sets)
    )


def test_groups_leave_the_label_where_it_is(samples, rng):
    groups = rng.integers(0, 15, 60)
    model = kh.AttentionClassifier(8, random_state=0)
    with_zeros = clone(model).fit(samples.sets, samples.y, samples.weights, groups=groups)
    rest = clone(model).fit(
        samples.sets[samples.rows],
        samples.y[samples.rows],
        samples.weights[samples.rows],
        groups=groups[samples.rows],
    )
    chances = with_zeros.predict_proba(samples.sets)[:, ~samples.is_absent]
    np.testing.assert_allclose(chances, rest.predict_proba(samples.sets), rtol=1e-5, atol=1e-8)


def test_a_weight_of_zero_for_a_class_is_one_for_its_samples(samples):
    zeros = dict.fromkeys(np.unique(samples.y)[samples.is_absent], 0.0)
    weights = np.where(samples.weights > 0, samples.weights, 1.0)
    options = {"n_heads": 8, "random_state": 0}
    by_class = kh.AttentionClassifier(class_weight=zeros, **options).fit(
        samples.sets, samples.y, weights
    )
    by_sample = kh.AttentionClassifier(**options).fit(samples.sets, samples.y, samples.weights)
    np.testing.assert_array_equal(
        by_class.predict_proba(samples.sets), by_sample.predict_proba(samples.sets)
    )


@pytest.mark.parametrize("name", MODELS)
def test_one_class_with_weight_is_nothing_to_tell_apart(name, rng):
    samples = Samples(rng, ["ash", "beech", "cedar"])
    with pytest.raises(
        ValueError, match=r"at least two classes.*'elm', in \d+ samples of positive weight"
    ):
        clone(MODELS[name]).fit(samples.sets, samples.y, samples.weights)


def test_batches_begin_anew_with_all_labels(samples):
    model = kh.AttentionClassifier(8, random_state=0).fit(samples.sets, samples.y, samples.weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.partial_fit(samples.sets, samples.y)
    assert (model.predict_proba(samples.sets)[:, samples.is_absent] > 0).all()
    model.fit(samples.sets, samples.y)
    assert model.class_has_weight_.all()
    assert (model.predict_proba(samples.sets) > 0).all()


def test_balanced_classes_have_the_same_total(rng):
    """With a given penalty a sample of weight two is two rows, in the totals of classes too."""
    samples = Samples(rng, [])
    rows = np.concatenate([np.arange(60), np.arange(0, 60, 3)])
    weights = 1.0 + (np.arange(60) % 3 == 0)
    model = kh.AttentionClassifier(
        8,
        heads=kh.GaussianHeads(),
        alpha=1.0,
        activation="relu",
        pooling="mean",
        scaling="none",
        query="given",
        extras_scale=1.0,
        class_weight="balanced",
        random_state=0,
    )
    weighted = clone(model).fit(samples.sets, samples.y, weights)
    repeated = clone(model).fit(samples.sets[rows], samples.y[rows])
    np.testing.assert_allclose(
        weighted.decision_function(samples.sets),
        repeated.decision_function(samples.sets),
        rtol=1e-9,
        atol=1e-9,
    )
    # the same as giving the weights of the classes by hand
    totals = {
        label: weights.sum() / (4 * weights[samples.y == label].sum())
        for label in np.unique(samples.y)
    }
    by_hand = clone(model).set_params(class_weight=totals).fit(samples.sets, samples.y, weights)
    np.testing.assert_allclose(
        weighted.predict_proba(samples.sets),
        by_hand.predict_proba(samples.sets),
        rtol=1e-6,
        atol=1e-9,
    )
