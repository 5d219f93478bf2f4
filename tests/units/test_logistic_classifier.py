"""`AttentionClassifier(loss="log_loss")`: what a logistic last layer gives, and what it refuses."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from devices import DEVICE
from exports import padded
from sklearn.linear_model import LogisticRegression

import keyhole as kh
from keyhole.export import to_onnx
from keyhole.logistic.problem import working_problem


@dataclass(frozen=True)
class Bags:
    """Sets with queries and extras, and labels that a mean and an extra decide with some noise."""

    train: kh.SetBatch
    y: np.ndarray
    test: kh.SetBatch


def draw_bags(seed: int, n_classes: int) -> Bags:
    rng = np.random.default_rng(seed)
    n = 130
    keys = [rng.normal(size=(rng.integers(2, 6), 3)) for _ in range(n)]
    extras = rng.normal(size=(n, 2))
    sets = kh.SetBatch(keys, rng.normal(size=(n, 3)), extras)
    means = np.array([key.mean(axis=0) for key in keys])
    scores = np.column_stack([2 * means[:, :2], extras[:, 0]])[:, :n_classes]
    scores = scores + 0.3 * rng.normal(size=scores.shape)
    if n_classes == 2:
        y = (scores[:, 0] > 0).astype(int)
    else:
        y = scores.argmax(axis=1)
    return Bags(sets[:90], y[:90], sets[90:])


@pytest.fixture(params=[2, 3], ids=["two labels", "three labels"])
def bags(seed: int, request: pytest.FixtureRequest) -> Bags:
    return draw_bags(seed, request.param)


def logistic_model(n_heads: float = 30, **options: object) -> kh.AttentionClassifier:
    """A model with nothing to choose but the penalty and the scale of extras."""
    return kh.AttentionClassifier(
        n_heads,
        kh.GaussianHeads(),
        activation="relu",
        pooling="mean",
        scaling="none",
        query="given",
        loss="log_loss",
        random_state=0,
        **options,
    )


@pytest.mark.parametrize("n_heads", [4, 60, math.inf], ids=["primal", "dual", "kernel"])
def test_scores_are_the_logits_of_scikit_learn_on_the_same_features(
    n_heads: float, seed: int
) -> None:
    bags = draw_bags(seed, 2)
    train, test = bags.train.with_extras(None), bags.test.with_extras(None)
    model = logistic_model(n_heads, alpha=0.01).fit(train, bags.y)
    assert model.loss_ == "log_loss"

    # features whose products are the kernel: those of the heads, or a root of the exact kernel
    everything = kh.data.sets.concatenate([train, test])
    if math.isinf(n_heads):
        kernel = kh.attention_kernel(everything, None, kh.GaussianHeads())
        values, vectors = np.linalg.eigh(kernel)
        features = vectors * np.sqrt(np.maximum(values, 0.0))
    else:
        features = kh.AttentionFeatures(n_heads, kh.GaussianHeads(), random_state=0)
        features = features.set_params(activation="relu").fit_transform(everything)
    learner = LogisticRegression(C=100.0, tol=1e-10, max_iter=10_000).fit(features[:90], bags.y)
    reference = learner.decision_function(features[90:])
    np.testing.assert_allclose(model.decision_function(test), reference, atol=2e-3)


def test_contributions_add_up_to_the_logits(bags: Bags) -> None:
    model = logistic_model().fit(bags.train, bags.y)
    parts = np.array([part.sum(axis=0) for part in model.contributions(bags.test)])
    logits = model.decision_function(bags.test).reshape(len(bags.test), -1)
    total = parts.reshape(len(bags.test), -1) + model.intercept_
    total = total + model.extras_contributions(bags.test).sum(axis=1).reshape(total.shape)
    np.testing.assert_allclose(total, logits, atol=1e-8)


def test_probabilities_are_calibrated_logits(bags: Bags) -> None:
    model = logistic_model().fit(bags.train, bags.y)
    probabilities = model.predict_proba(bags.test)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
    np.testing.assert_array_equal(
        model.classes_[probabilities.argmax(axis=1)], model.predict(bags.test)
    )
    if len(model.classes_) == 2:
        odds = probabilities[:, 1] / probabilities[:, 0]
        logits = model.decision_function(bags.test)
        np.testing.assert_allclose(np.log(odds), 2 * model.temperature_ * logits, atol=1e-6)


def test_left_out_scores_are_those_of_refits_up_to_a_fifth_of_the_change(seed: int) -> None:
    bags = draw_bags(seed, 2)
    model = logistic_model(alpha=0.05, extras_scale=1.0).fit(bags.train, bags.y)
    fitted = model.decision_function(bags.train)
    errors = []
    changes = []
    for i in range(0, 90, 9):
        rest = np.flatnonzero(np.arange(90) != i)
        # extras are standardised on the training samples: those of the model, in both fits
        twin = logistic_model(alpha=0.05, extras_scale=1.0)
        weights = np.ones(90)
        weights[i] = 1e-9
        twin.fit(bags.train, bags.y, sample_weight=weights)
        refit = twin.decision_function(bags.train[[i]])[0]
        assert len(rest) == 89
        errors.append(abs(model.loo_decision_[i] - refit))
        changes.append(abs(fitted[i] - refit))
    assert max(errors) < 0.2 * max(changes)


@pytest.mark.parametrize("n_heads", [30, math.inf])
def test_files_have_all_of_a_logistic_model(n_heads: float, bags: Bags, tmp_path) -> None:
    model = logistic_model(n_heads).fit(bags.train, bags.y)
    kh.save(model, tmp_path / "model.keyhole")
    loaded = kh.load(tmp_path / "model.keyhole")
    assert loaded.loss_ == "log_loss"
    np.testing.assert_array_equal(loaded.predict_proba(bags.test), model.predict_proba(bags.test))
    np.testing.assert_array_equal(loaded.predict_set(bags.test), model.predict_set(bags.test))
    np.testing.assert_allclose(loaded.novelty(bags.test), model.novelty(bags.test), atol=1e-12)


def test_exports_have_its_probabilities(bags: Bags) -> None:
    torch = pytest.importorskip("torch")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = logistic_model().fit(bags.train, bags.y)
    expected = model.predict_proba(bags.test)
    keys, mask = padded(bags.test)
    inputs = {"keys": keys, "mask": mask, "query": bags.test.query, "extras": bags.test.extras}

    tensors = {name: torch.as_tensor(np.array(value)) for name, value in inputs.items()}
    by_torch = model.to_torch().predict_proba(**tensors).detach().numpy()
    np.testing.assert_allclose(by_torch, expected, atol=1e-9)

    session = onnxruntime.InferenceSession(
        to_onnx(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    scores, probabilities = session.run(["scores", "probabilities"], inputs)
    np.testing.assert_allclose(probabilities, expected, atol=1e-9)
    logits = model.decision_function(bags.test)
    np.testing.assert_allclose(scores.reshape(logits.shape), logits, atol=1e-8)


def test_label_sets_hold_the_label_as_often_as_promised(seed: int) -> None:
    bags = draw_bags(seed, 2)
    sets = kh.data.sets.concatenate([bags.train, bags.test])
    rng = np.random.default_rng(seed)
    means = np.add.reduceat(sets.tokens[:, 0], sets.offsets[:-1]) / sets.lengths
    y = (means + 0.3 * rng.normal(size=len(sets)) > 0).astype(int)
    model = logistic_model().fit(sets[:90], y[:90])
    assert model.interval_method == "jackknife+"
    plausible = model.predict_set(sets[90:], coverage=0.9)
    inside = plausible[np.arange(40), y[90:]].mean()
    assert inside >= 0.7  # 2c − 1 is 0.8, less two standard errors of 40 samples


def test_label_sets_are_made_of_the_fits_without_each_sample(seed: int) -> None:
    """p_{−i}(x_i, y_i) of the approximate fits is the calibrated leave-one-out probability."""
    bags = draw_bags(seed, 2)
    model = logistic_model().fit(bags.train, bags.y)
    (refits,) = model.training_.output_refits(model.layer_)
    left_out = (refits.outputs - refits.residuals)[:, 0]
    np.testing.assert_allclose(left_out, model.loo_decision_, atol=1e-4)


def test_deviations_of_logits_grow_away_from_the_training_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, size=(80, 1))
    y = x[:, 0] + 0.3 * rng.normal(size=80) > 0
    model = logistic_model(math.inf).fit(x, y)
    near, far = model.predict_std([[0.1], [5.0]])
    assert far > near
    usual, unusual = model.novelty([[0.1], [5.0]])
    assert unusual > usual
    assert unusual > 0.95


def test_importance_is_the_growth_of_the_log_loss(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(150, 4, 2))
    y = keys[:, :, 0].mean(axis=1) + 0.1 * rng.normal(size=150) > 0
    importance = logistic_model().fit(keys, y).coordinate_importance()
    assert importance.names[int(importance.across.argmax())] == "key 0"
    assert 0 < importance.baseline < math.log(2)


def test_groups_are_left_out_whole(seed: int) -> None:
    bags = draw_bags(seed, 2)
    groups = np.arange(90) // 3
    settings = {"alpha": 0.05, "extras_scale": 1.0}
    model = logistic_model(**settings).fit(bags.train, bags.y, groups=groups)
    alone = logistic_model(**settings).fit(bags.train, bags.y)
    assert model.selection_.method == "loo"
    np.testing.assert_allclose(
        model.decision_function(bags.test), alone.decision_function(bags.test), atol=1e-6
    )
    assert np.abs(model.loo_decision_ - alone.loo_decision_).max() > 1e-3


def test_with_a_given_penalty_a_sample_twice_is_one_of_weight_two(bags: Bags) -> None:
    rows = np.concatenate([np.arange(90), np.arange(20)])
    repeated = logistic_model(alpha=0.1, extras_scale=1.0).fit(bags.train[rows], bags.y[rows])
    weights = np.ones(90)
    weights[:20] = 2.0
    weighted = logistic_model(alpha=0.1, extras_scale=1.0)
    weighted.fit(bags.train, bags.y, sample_weight=weights)
    np.testing.assert_allclose(
        repeated.decision_function(bags.test), weighted.decision_function(bags.test), atol=1e-6
    )


def test_single_precision_and_a_device_give_the_same_probabilities(bags: Bags) -> None:
    pytest.importorskip("torch")
    plain = bags.train.with_extras(None)
    expected = logistic_model(alpha=0.1).fit(plain, bags.y)
    new = bags.test.with_extras(None)
    for options in ({"dtype": "float32"}, {"device": "cpu"}):
        model = logistic_model(alpha=0.1, **options).fit(plain, bags.y)
        np.testing.assert_allclose(model.predict_proba(new), expected.predict_proba(new), atol=1e-3)


def test_working_responses_are_newtons_step() -> None:
    """z − f = (t − p)/(p (1 − p)), for logits of any size."""
    curvature, responses = working_problem(np.array([0.0, 2.0, 800.0]), np.array([1.0, -1.0, 1.0]))
    p = 1 / (1 + math.exp(-2.0))
    np.testing.assert_allclose(curvature[:2], [0.25, p * (1 - p)])
    np.testing.assert_allclose(responses[:2], [2.0, 2.0 - 1 / (1 - p)])
    assert np.isfinite(responses).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "cg", "alpha": 1.0}, "solver='cg' is for loss='squared_error'"),
        ({"criterion": "squared_error"}, "squared errors of logits mean nothing"),
        ({"alpha": 0.0}, "needs a positive penalty"),
    ],
)
def test_what_newton_steps_cannot_do_is_refused(options, message, seed: int) -> None:
    bags = draw_bags(seed, 2)
    with pytest.raises(ValueError, match=message):
        logistic_model(**options).fit(bags.train, bags.y)


def test_batches_are_refused_with_the_remedy(seed: int) -> None:
    bags = draw_bags(seed, 2)
    with pytest.raises(ValueError, match="Leave it at loss='auto'"):
        logistic_model().fit_batches([(bags.train, bags.y)])
    with pytest.raises(AttributeError, match="Leave it at loss='auto'"):
        logistic_model().partial_fit  # noqa: B018
    # by default batches are fitted by squared errors
    model = kh.AttentionClassifier(20, random_state=0).fit_batches([(bags.train, bags.y)])
    assert model.loss_ == "squared_error"


def test_a_rare_class_is_found_by_the_log_loss_that_is_chosen_by_default(seed: int) -> None:
    """One in twenty, by a sample-level feature: the other class dominates squared errors."""
    rng = np.random.default_rng(seed)
    extras = rng.normal(size=(400, 1))
    sets = kh.SetBatch(rng.normal(size=(400, 3, 2)), None, extras)
    score = extras[:, 0] + 0.1 * rng.normal(size=400)
    y = (score > np.quantile(score, 0.95)).astype(int)
    model = kh.AttentionClassifier(16, random_state=0).fit(sets, y)
    squares = kh.AttentionClassifier(16, random_state=0, loss="squared_error").fit(sets, y)
    assert model.loss_ == "log_loss"
    assert model.chosen_params_["loss"] == "log_loss"
    assert "values of least log-loss" in model.summary()
    assert model.selection_.score < squares.selection_.score


def test_classes_of_equal_size_that_squares_fit_well_keep_them(seed: int) -> None:
    """Without a gain of two standard errors the simpler loss stays."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(60, 4, 3))
    y = rng.integers(2, size=60)  # nothing to learn
    model = kh.AttentionClassifier(20, random_state=0).fit(keys, y)
    assert model.loss_ == "squared_error"
    tried = {candidate.objective for candidate in model.candidates_}
    assert tried == {"squared_error", "log_loss"}


@pytest.mark.parametrize("n_heads", [60, math.inf], ids=["dual", "kernel"])
@pytest.mark.parametrize("options", ["plain", "weights", "groups"])
@pytest.mark.parametrize("fit_intercept", [True, False], ids=["intercept", "no intercept"])
def test_a_device_gives_the_fit_of_the_host(
    n_heads: float, options: str, fit_intercept: bool, seed: int
) -> None:
    pytest.importorskip("torch", reason="devices are those of torch")
    bags = draw_bags(seed, 3)
    rng = np.random.default_rng([53, seed])
    weights = None
    groups = None
    if options == "weights":
        weights = rng.uniform(0.5, 2.0, size=len(bags.y))
    if options == "groups":
        groups = np.arange(len(bags.y)) // 2
    models = [
        logistic_model(
            n_heads, alpha=[0.03, 0.3, 3.0], fit_intercept=fit_intercept, device=device
        ).fit(bags.train, bags.y, sample_weight=weights, groups=groups)
        for device in (None, DEVICE)
    ]
    host, device = models
    assert device.solver_ == host.solver_
    assert device.alpha_ == host.alpha_
    assert device.selection_.scores == pytest.approx(host.selection_.scores, rel=1e-7)
    assert device.temperature_ == pytest.approx(host.temperature_, rel=1e-6)
    close = {"rtol": 1e-7, "atol": 1e-8}
    here = host.decision_function(bags.test)
    np.testing.assert_allclose(device.decision_function(bags.test), here, **close)
    np.testing.assert_allclose(device.loo_decision_, host.loo_decision_, **close)
