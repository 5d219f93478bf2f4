"""What a fit used is frozen with it: arrays and parameters that change afterwards change
nothing.
"""

import math
import pickle
import warnings

import numpy as np
import pytest

import keyhole as kh
from keyhole.estimators.uncertainty import PlainJackknifeWarning

FIXED = {
    "activation": "relu",
    "pooling": "mean",
    "scaling": "none",
    "query": "given",
    "random_state": 0,
}
"""Tokens as they are: what is kept of them then may share memory with what was given."""

MODELS = {
    "kernel": lambda: kh.AttentionRegressor(math.inf, kh.GaussianHeads(), **FIXED),
    "heads": lambda: kh.AttentionRegressor(10, kh.GaussianHeads(), **FIXED),
    "heads around a matrix": lambda: kh.AttentionRegressor(
        10, kh.GaussianHeads(np.eye(3, 3)), **FIXED
    ),
    "default settings": lambda: kh.AttentionRegressor(random_state=0),
    "strongest keys": lambda: kh.AttentionRegressor(10, kh.GaussianHeads(), keys=2, **FIXED),
    "classes": lambda: kh.AttentionClassifier(math.inf, kh.GaussianHeads(), **FIXED),
    "classes by log-loss": lambda: kh.AttentionClassifier(
        10, kh.GaussianHeads(), loss="log_loss", class_weight={False: 1.0, True: 3.0}, **FIXED
    ),
    "norm ball": lambda: kh.NormBallRegressor(
        10, kh.GaussianHeads(), group_radius=1.0, ball_radius=1.0, tol=0.1, random_state=0
    ),
    "norm ball of classes": lambda: kh.NormBallClassifier(
        10, kh.GaussianHeads(), group_radius=1.0, ball_radius=1.0, tol=0.1, random_state=0
    ),
    "hinge": lambda: kh.NormBallClassifier(
        10, kh.GaussianHeads(), "hinge", group_radius=1.0, ball_radius=1.0, tol=0.1, random_state=0
    ),
    "features": lambda: kh.AttentionFeatures(5, kh.GaussianHeads(), random_state=0),
}

OTHER_PARAMETERS = {
    "n_heads": 3,
    "heads": kh.GaussianHeads(2.0),
    "alpha": 7.0,
    "activation": "softmax",
    "fit_intercept": False,
    "random_state": 5,
    "dtype": "float32",
    "pooling": "sum",
    "scaling": "sphere",
    "query": "mean",
    "solver": "cg",
    "extras_scale": 3.0,
    "class_weight": "balanced",
    "criterion": "squared_error",
    "verbose": True,
    "group_radius": 9.0,
    "ball_radius": 9.0,
    "complexity": 2.0,
    "delta": 0.5,
    "constant": 3.0,
    "n_folds": 5,
    "tol": 0.5,
    "max_iter": 3,
    "keys": 1,
}
"""Another value for every parameter but ``device``, which may not be there, and ``loss``."""

OTHER_LOSS = {
    "auto": "squared_error",
    "squared_error": "log_loss",
    "log_loss": "squared_error",
    "logistic": "hinge",
    "hinge": "logistic",
    "huber": "absolute",
}

ANSWERS = (
    "predict",
    "decision_function",
    "predict_proba",
    "predict_log_proba",
    "predict_interval",
    "predict_set",
    "predict_std",
    "novelty",
    "contributions",
    "extras_contributions",
    "transform",
    "hop_weights",
)


class Inputs:
    """Arrays that an estimator is fitted to, all of which can be overwritten."""

    def __init__(self, seed, *, tensors=False):
        rng = np.random.default_rng(seed)
        self.keys = rng.normal(size=(40, 3, 2))
        self.query = rng.normal(size=(40, 2))
        self.y = self.keys[:, :, 0].mean(axis=1) + 0.1 * rng.normal(size=40)
        self.weights = rng.uniform(0.5, 2.0, 40)
        self.groups = np.arange(40) // 2
        self.new = kh.SetBatch(rng.normal(size=(5, 3, 2)), rng.normal(size=(5, 2)))

    def fit(self, model, *, groups=False):
        y = self.y
        if hasattr(model, "decision_function"):
            y = y > 0
        sets = kh.SetBatch(self.keys, self.query)
        if hasattr(model, "transform"):
            return model.fit(sets)
        if groups:
            return model.fit(sets, y, self.weights, groups=self.groups)
        return model.fit(sets, y, self.weights)

    def overwrite(self):
        """Other numbers in all arrays."""
        for array in (self.keys, self.query, self.y, self.weights):
            array[:] = array[::-1] * 1.5 + 0.25
        self.groups[:] = self.groups[::-1] % 7


def answers(model, sets):
    """Everything that a fitted model says about sets, as flat arrays."""
    said = {}
    for name in ANSWERS:
        if hasattr(model, name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PlainJackknifeWarning)
                found = getattr(model, name)(sets)
            if isinstance(found, list):
                found = np.concatenate(
                    [np.ravel(part) for part in found if not isinstance(part, list)] or [[]]
                )
            said[name] = found
    if hasattr(model, "coordinate_importance"):
        said["coordinate_importance"] = model.coordinate_importance(n_repeats=1).across
    return said


def check_same_answers(model, expected, sets):
    said = answers(model, sets)
    assert set(said) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(said[name], value, err_msg=name)


@pytest.fixture
def inputs(seed):
    return Inputs(seed)


@pytest.mark.parametrize("name", MODELS)
def test_arrays_that_change_after_a_fit_change_nothing(name, inputs, seed):
    expected = answers(inputs.fit(MODELS[name]()), inputs.new)
    model = Inputs.fit(inputs, MODELS[name]())
    inputs.overwrite()
    check_same_answers(model, expected, inputs.new)
    # a model that was saved in between is the same too
    check_same_answers(pickle.loads(pickle.dumps(model)), expected, inputs.new)


@pytest.mark.parametrize("name", ["kernel", "heads", "classes"])
def test_groups_that_change_after_a_fit_change_nothing(name, inputs):
    expected = answers(inputs.fit(MODELS[name](), groups=True), inputs.new)
    model = inputs.fit(MODELS[name](), groups=True)
    inputs.overwrite()
    check_same_answers(model, expected, inputs.new)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_that_change_after_a_fit_change_nothing(name, inputs):
    expected = answers(inputs.fit(MODELS[name]()), inputs.new)
    parameters = MODELS[name]().get_params(deep=False)
    others = {key: OTHER_PARAMETERS[key] for key in parameters if key not in ("device", "loss")}
    if "loss" in parameters:
        others["loss"] = OTHER_LOSS[parameters["loss"]]
    model = inputs.fit(MODELS[name]())
    model.set_params(**others)
    check_same_answers(model, expected, inputs.new)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "default settings"])
def test_a_head_distribution_that_changes_after_a_fit_changes_nothing(name, inputs):
    expected = answers(inputs.fit(MODELS[name]()), inputs.new)
    model = inputs.fit(MODELS[name]())
    model.set_params(heads__scale=5.0)
    if np.ndim(model.heads.mean) == 2:
        model.heads.mean[:] = 3.0
    check_same_answers(model, expected, inputs.new)


def test_a_head_distribution_that_changes_between_batches_changes_nothing(inputs):
    sets = kh.SetBatch(inputs.keys, inputs.query)
    kept = kh.AttentionRegressor(10, kh.GaussianHeads(), **FIXED).partial_fit(
        sets[:20], inputs.y[:20]
    )
    changed = kh.AttentionRegressor(10, kh.GaussianHeads(), **FIXED).partial_fit(
        sets[:20], inputs.y[:20]
    )
    changed.heads.scale = 5.0
    for model in (kept, changed):
        model.partial_fit(sets[20:], inputs.y[20:])
    np.testing.assert_array_equal(changed.predict(inputs.new), kept.predict(inputs.new))


@pytest.mark.parametrize(("fitted", "other"), [("logistic", "hinge"), ("hinge", "logistic")])
def test_another_loss_after_a_fit_makes_no_probabilities_and_takes_none(fitted, other, inputs):
    model = kh.NormBallClassifier(
        5, loss=fitted, group_radius=1.0, ball_radius=1.0, tol=0.1, random_state=0
    )
    assert hasattr(model, "predict_proba") == (fitted == "logistic"), (
        "before a fit the parameter decides"
    )
    inputs.fit(model).set_params(loss=other)
    assert hasattr(model, "predict_proba") == (fitted == "logistic")


@pytest.mark.parametrize("name", ["kernel", "features", "hinge", "classes"])
def test_what_was_frozen_is_saved(name, inputs, tmp_path):
    model = inputs.fit(MODELS[name]())
    expected = answers(model, inputs.new)
    model.set_params(fit_intercept=False) if name != "features" else model.set_params(
        activation="softmax"
    )
    if name == "hinge":
        model.set_params(loss="logistic")
    kh.save(model, tmp_path / "model.keyhole")
    loaded = answers(kh.load(tmp_path / "model.keyhole"), inputs.new)
    assert set(loaded) == set(expected)
    for answer, value in expected.items():
        np.testing.assert_allclose(loaded[answer], value, rtol=1e-9, atol=1e-12, err_msg=answer)


def test_keys_that_change_after_a_fit_of_tensors_change_nothing(inputs):
    torch = pytest.importorskip("torch")
    keys = torch.tensor(inputs.keys)
    model = kh.AttentionRegressor(math.inf, kh.GaussianHeads(), **FIXED).fit(
        kh.SetBatch(keys), inputs.y
    )
    expected = model.predict(kh.SetBatch(inputs.keys[:5]))
    keys[:] = 0.0
    np.testing.assert_array_equal(model.predict(kh.SetBatch(inputs.keys[:5])), expected)


def test_a_model_that_reads_live_weights_is_caught(inputs):
    """The broken variant: a fit that keeps a view of the weights."""
    model = inputs.fit(MODELS["kernel"]())
    expected = answers(model, inputs.new)
    broken = inputs.fit(MODELS["kernel"]())
    object.__setattr__(broken.training_.data, "weights", inputs.weights)
    inputs.overwrite()
    with pytest.raises(AssertionError):
        check_same_answers(broken, expected, inputs.new)
