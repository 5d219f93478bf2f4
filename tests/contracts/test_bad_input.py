"""Bad input: each a clear error, with its words pinned, or a documented right answer."""

import math

import numpy as np
import pytest
from paper import paper_classifier, paper_regressor

import keyhole as kh
from keyhole._checks import check_choice, check_count, check_flag, check_number

MODELS = [
    pytest.param(
        paper_regressor(8, random_state=0),
        id="regressor",
    ),
    pytest.param(
        paper_regressor(math.inf),
        id="kernel regressor",
    ),
    pytest.param(
        paper_classifier(8, random_state=0),
        id="classifier",
    ),
]


@pytest.fixture
def sets(rng):
    return kh.SetBatch(rng.normal(size=(12, 4, 3)), rng.normal(size=(12, 3)))


@pytest.fixture
def labels():
    return np.arange(12) % 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("model", MODELS)
def test_nan_and_infinity_are_named_wherever_they_are(model, bad, sets, labels, rng):
    keys = rng.normal(size=(12, 4, 3))
    keys[7, 2, 1] = bad
    with pytest.raises(
        ValueError, match=r"`keys` must be finite: found (NaN|infinity).*index \(7, 2, 1\)"
    ):
        model.fit(keys, labels)
    table = rng.normal(size=(12, 3))
    table[3, 1] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        model.fit(table, labels)
    y = labels.astype(float)
    y[5] = bad
    with pytest.raises(ValueError, match=r"y contains NaN|y contains infinity|Input y"):
        model.fit(sets, y)
    with pytest.raises(ValueError, match="sample_weight contains"):
        model.fit(sets, labels, sample_weight=np.where(np.arange(12) == 4, bad, 1.0))
    model.fit(sets, labels)
    with pytest.raises(ValueError, match="must be finite"):
        model.predict(keys)


@pytest.mark.parametrize("model", MODELS)
def test_an_empty_set_and_no_sets_are_refused(model, labels, rng):
    tokens = [rng.normal(size=(4, 3)) for _ in range(12)]
    tokens[3] = tokens[3][:0]
    with pytest.raises(ValueError, match="set 3 has no keys"):
        model.fit(tokens, labels)
    with pytest.raises(ValueError, match=r"at least one set: got .*0 sets"):
        model.fit(kh.SetBatch(np.ones((2, 1, 3)))[:0], labels[:0])
    with pytest.raises(ValueError, match=r"0 sample\(s\)"):
        model.fit(np.empty((0, 3)), labels[:0])


@pytest.mark.parametrize("model", MODELS)
def test_fit_and_predict_must_agree(model, sets, labels, rng):
    model.fit(sets, labels)
    with pytest.raises(ValueError, match=r"X has 5 features, but .* is expecting 3 features"):
        model.predict(kh.SetBatch(rng.normal(size=(2, 4, 5)), rng.normal(size=(2, 5))))
    with pytest.raises(ValueError, match="fitted with queries and got sets without"):
        model.predict(kh.SetBatch(rng.normal(size=(2, 4, 3))))


@pytest.mark.parametrize("model", MODELS)
def test_wrong_lengths_name_both(model, sets, labels):
    with pytest.raises(ValueError, match="12 sets and 11 entries of `y`"):
        model.fit(sets, labels[:11])
    with pytest.raises(ValueError, match="12 sets and 3 entries of `sample_weight`"):
        model.fit(sets, labels, sample_weight=np.ones(3))
    with pytest.raises(ValueError, match="sample 2 has weight -1"):
        model.fit(sets, labels, sample_weight=np.where(np.arange(12) == 2, -1.0, 1.0))
    with pytest.raises(ValueError, match="all weights are zero"):
        model.fit(sets, labels, sample_weight=np.zeros(12))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weight", [5e-324, 1e-310, 1e-31, 1e31, 1e160, 1e308])
def test_weights_that_leave_no_room_for_products_are_named(model, weight, sets, labels):
    """Penalties and squared errors are in proportion to them, and some are in float32."""
    rule = (
        r"largest entry of `sample_weight` must lie between 1e-30 and 1e\+30, and no positive one "
        r"below 1e-100"
    )
    with pytest.raises(
        ValueError, match=rf"{rule}.* sample 0 has weight .*Divide all of them by a common factor"
    ):
        model.fit(sets, labels, sample_weight=np.full(12, weight))


@pytest.mark.parametrize("weight", [5e-324, 1e-310, 9e-101, 1.1e30, 1e160])
def test_one_weight_beyond_all_others_is_named(weight, sets, labels):
    one_of_many = np.where(np.arange(12) == 2, weight, 1.0)
    with pytest.raises(ValueError, match="sample 2 has weight"):
        paper_classifier(8).fit(sets, labels, sample_weight=one_of_many)


def test_weights_of_a_stream_and_of_classes_are_named_too(sets, labels):
    names = np.unique(labels)
    stream = kh.AttentionClassifier(3, random_state=0)
    with pytest.raises(ValueError, match=r"sample 0 has weight 1e\+160"):
        stream.partial_fit(sets, labels, classes=names, sample_weight=np.full(12, 1e160))
    heavy = kh.AttentionClassifier(3, class_weight=dict.fromkeys(names.tolist(), 1e160))
    with pytest.raises(ValueError, match="largest entry of `class_weight` must lie between"):
        heavy.fit(sets, labels)
    both = kh.AttentionClassifier(3, class_weight=dict.fromkeys(names.tolist(), 1e20))
    with pytest.raises(
        ValueError, match="largest entry of `sample_weight times class_weight` must"
    ):
        both.fit(sets, labels, sample_weight=np.full(12, 1e20))


@pytest.mark.parametrize("unit", [1e-27, 1e27])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("n_heads", [2, 20, math.inf])
def test_the_unit_of_weights_changes_no_prediction(unit, dtype, n_heads, sets):
    y, weights = sets.query[:, 0], np.geomspace(1e-3, 1e3, 12)
    model = paper_regressor(n_heads, random_state=0, dtype=dtype)
    expected = model.fit(sets, y, sample_weight=weights).predict(sets)
    found = model.fit(sets, y, sample_weight=unit * weights)
    allowed = 1e-6 if dtype == "float64" else 1e-2
    np.testing.assert_allclose(
        found.predict(sets), expected, rtol=0.0, atol=allowed * np.abs(y).max()
    )
    assert np.isfinite(found.predict_std(sets)).all()


def test_the_unit_of_weights_changes_no_learned_heads(rng):
    sets = kh.targets.sphere_sets(80, n_keys=3, dim=3, seed=0)
    y, weights = kh.targets.Correlation(3, 3)(sets), rng.uniform(0.5, 2.0, 80)
    expected, *others = [
        kh.LearnedHeads(max_iter=6, hops=1).fit(sets, y, weights=2.0**power * weights)
        for power in (0, -60, 60)
    ]
    for found in others:
        np.testing.assert_allclose(found.means_, expected.means_, rtol=1e-3, atol=1e-6)


def test_one_sample_cannot_be_left_out_but_can_be_fitted(sets):
    with pytest.raises(ValueError, match="at least two samples: got 1 sample"):
        paper_regressor(8).fit(sets[:1], [3.0])
    model = paper_regressor(8, alpha=1.0, random_state=0).fit(sets[:1], [3.0])
    np.testing.assert_allclose(model.predict(sets), 3.0)
    assert math.isnan(model.loo_error_)


@pytest.mark.parametrize("n_heads", [8, math.inf])
def test_a_constant_target_is_predicted_exactly(n_heads, sets):
    model = paper_regressor(n_heads, random_state=0).fit(sets, np.full(12, 2.5))
    np.testing.assert_allclose(model.predict(sets), 2.5, rtol=1e-12)
    assert model.loo_error_ < 1e-20


def test_one_class_is_refused(sets):
    with pytest.raises(ValueError, match="at least two classes: got 1 class, 'a', in 12 samples"):
        paper_classifier(8).fit(sets, ["a"] * 12)


@pytest.mark.parametrize("model", MODELS)
def test_no_target_is_refused(model, sets):
    with pytest.raises(ValueError, match="requires y to be passed, but the target y is None"):
        model.fit(sets, None)


def test_integers_and_objects_are_numbers_too(rng, labels):
    counts = rng.integers(-3, 4, size=(12, 5, 3))
    model = paper_regressor(8, alpha=1.0, random_state=0)
    expected = model.fit(counts.astype(float), labels).predict(counts.astype(float))
    np.testing.assert_array_equal(model.fit(counts, labels).predict(counts), expected)
    np.testing.assert_array_equal(
        model.fit(counts.astype(object), labels).predict(counts), expected
    )
    ragged = np.empty(12, dtype=object)
    ragged[:] = list(counts)
    np.testing.assert_array_equal(model.fit(ragged, labels).predict(ragged), expected)
    with pytest.raises((TypeError, ValueError), match="must hold numbers"):
        model.fit(np.full((12, 5, 3), "word", dtype=object), labels)
    with pytest.raises(ValueError, match="Complex data not supported"):
        model.fit(counts + 1j, labels)


@pytest.mark.parametrize(
    ("alpha", "words"),
    [
        (-1.0, r"'alpha' parameter of AttentionRegressor must be .*Got -1.0"),
        ([1.0, -2.0], r"`alpha\[1\]` must be at least 0: got -2"),
        ([], "non-empty sequence"),
        ("gcv", "'alpha' parameter of AttentionRegressor must be .*Got 'gcv'"),
        (np.nan, "'alpha' parameter of AttentionRegressor must be .*Got nan"),
    ],
)
@pytest.mark.parametrize("n_heads", [8, math.inf])
def test_a_penalty_is_not_negative(alpha, words, n_heads, sets, labels):
    with pytest.raises(ValueError, match=words):
        paper_regressor(n_heads, alpha=alpha).fit(sets, labels)


@pytest.mark.parametrize(
    ("n_heads", "error", "words"),
    [
        (0, ValueError, "'n_heads' parameter of .* must be an int in the range .*Got 0"),
        (-3, ValueError, "'n_heads' parameter of .* must be an int in the range .*Got -3"),
        (2.5, TypeError, "'n_heads' parameter of .* must be .*Got 2.5"),
        (math.nan, TypeError, "'n_heads' parameter of .* must be .*Got nan"),
        ("many", TypeError, "'n_heads' parameter of .* must be .*Got 'many'"),
    ],
)
def test_heads_are_counted(n_heads, error, words, sets, labels):
    for model in (
        paper_regressor(n_heads),
        paper_classifier(n_heads),
    ):
        with pytest.raises(error, match=words):
            model.fit(sets, labels)
    with pytest.raises(error, match=r"`n_heads` must be|'n_heads' parameter of"):
        kh.AttentionFeatures(n_heads).fit(sets)


def test_infinitely_many_heads_have_no_features(sets):
    with pytest.raises(ValueError, match="infinitely many heads have infinitely many features"):
        kh.AttentionFeatures(math.inf).fit(sets)


def test_kernels_that_do_not_exist_name_the_remedy(sets, labels):
    with pytest.raises(ValueError, match=r"softmax.*finite"):
        paper_regressor(math.inf, activation="softmax").fit(sets, labels)
    with pytest.raises((TypeError, ValueError), match=r"closed.form"):
        paper_regressor(math.inf, heads=kh.GaussianHeads(mean=(0.3, 20.0))).fit(sets, labels)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"activation": "tanh"}, ValueError, "'activation' parameter .*'relu'.*Got 'tanh'"),
        ({"heads": "gaussian"}, TypeError, "'heads' parameter .*Got 'gaussian'"),
        ({"heads": kh.GaussianHeads}, TypeError, "`heads` must be a head distribution"),
        (
            {"heads": kh.GaussianHeads(mean=np.eye(3))},
            ValueError,
            r"\(D, D\) matrix with D = d \+ 1: got shape \(3, 3\)",
        ),
        ({"heads": kh.GaussianHeads(scale=0.0)}, ValueError, "`scale` must be larger than 0"),
        ({"heads": kh.LearnedHeads(n_means=0)}, ValueError, "`n_means` must be at least 1"),
        ({"dtype": "float16"}, ValueError, "'dtype' parameter .*'float64'.*Got 'float16'"),
        ({"random_state": -1}, ValueError, "'random_state' parameter .*Got -1"),
    ],
)
def test_options_are_checked_before_any_work(options, error, words, sets, labels):
    for model in (
        paper_regressor(8),
        paper_classifier(8),
    ):
        with pytest.raises(error, match=words):
            model.set_params(**options).fit(sets, labels)


def test_lists_that_are_no_sets_are_refused_in_words(labels):
    model = paper_regressor(8, random_state=0)
    fitted = paper_regressor(8, random_state=0).fit(np.zeros((12, 4, 3)), labels)
    of_numbers = [np.arange(2.0), np.arange(5.0), np.arange(3.0)]
    with pytest.raises(ValueError, match=r"rows of 2 to 5 numbers.*x\[:, None\]"):
        model.fit(of_numbers, [0.0, 1.0, 2.0])
    for use in (lambda: model.fit([], []), lambda: fitted.predict([])):
        with pytest.raises(ValueError, match=r"`X` must be sets.*got an empty list"):
            use()


def test_a_dataset_is_refused_with_what_to_pass(labels):
    data = kh.datasets.load_digits_sets()
    with pytest.raises(TypeError, match=r"got a Dataset\. Pass its `sets`"):
        paper_classifier(8, random_state=0).fit(data, data.target)


def test_weights_of_classes_are_not_negative(sets):
    labels = np.array(["bad", "fair", "good"])[np.arange(12) % 3]
    model = kh.AttentionClassifier(3, class_weight={"bad": -1.0, "fair": 1.0, "good": 1.0})
    with pytest.raises(ValueError, match=r"`class_weight` must not be negative: class bad has -1"):
        model.fit(sets, labels)


def test_a_wrong_argument_is_not_printed_in_full():
    X = [np.zeros((50, 3)).tolist() for _ in range(100)]
    for check in (check_count, check_number, check_flag):
        with pytest.raises(TypeError, match=r"^`n` must be") as caught:
            check(X, "n")
        assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match=r"^`n` must be") as caught:
        check_choice(X, "n", ("auto", "mean"))
    assert len(str(caught.value)) < 200
