"""Fits in batches: few samples are fitted as by `fit`, many by sums of their features."""

import math

import numpy as np
import pytest
from paper import PAPER_LAYER, paper_classifier, paper_regressor
from sklearn.base import clone

import keyhole as kh
from keyhole.fit import second_kernel, streams

N = 90


@pytest.fixture
def sets(rng):
    keys = [rng.normal(size=(int(rng.integers(1, 5)), 3)) for _ in range(N)]
    return kh.SetBatch(keys, rng.normal(size=(N, 3)), rng.normal(size=(N, 1)))


@pytest.fixture
def y(sets, rng):
    means = np.add.reduceat(sets.tokens[:, 0], sets.offsets[:-1]) / sets.lengths
    return means + sets.query[:, 0] + 0.3 * rng.normal(size=N)


@pytest.fixture
def settled_early(monkeypatch):
    """Layers are settled on thirty sets, not on two thousand, and second kernels have centres."""
    monkeypatch.setattr(streams, "N_FIRST", 30)
    monkeypatch.setattr(second_kernel, "MOST_EXACT", 20)


def in_batches(model, sets, y, ends, weights=None, **options):
    for start, stop in zip([0, *ends], [*ends, len(sets)], strict=True):
        rows = slice(start, stop)
        part = None if weights is None else weights[rows]
        model.partial_fit(sets[rows], y[rows], sample_weight=part, **options)
        options = {}
    return model


# ---- few samples


@pytest.mark.parametrize("settings", [{"pooling": "statistics"}, {"n_heads": 8, **PAPER_LAYER}])
def test_few_samples_are_fitted_as_by_fit(settings, sets, y, rng):
    model = kh.AttentionRegressor(random_state=0, **settings)
    weights = rng.uniform(0.5, 2.0, N)
    stream = in_batches(clone(model), sets, y, [20, 50], weights)
    whole = model.fit(sets, y, sample_weight=weights)
    assert np.allclose(stream.predict(sets), whole.predict(sets), rtol=1e-8)
    assert stream.held_out_loss_ == pytest.approx(whole.held_out_loss_)


# ---- sums


@pytest.mark.usefixtures("settled_early")
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("n_heads", [3, 40])
def test_sums_of_one_layer_are_one_fit_at_a_given_penalty(n_heads, fit_intercept, sets, y, rng):
    bare = sets.with_extras(None)
    weights = rng.uniform(0.5, 2.0, N)
    model = paper_regressor(n_heads, alpha=0.5, fit_intercept=fit_intercept, random_state=0)
    whole = clone(model).fit(bare, y, sample_weight=weights).predict(bare)
    for ends in ([30], [31, 60], [1, 2, 3, 50]):
        stream = in_batches(clone(model), bare, y, ends, weights)
        assert stream.n_samples_seen_ == N
        assert np.allclose(stream.predict(bare), whole, rtol=1e-8, atol=1e-8)


@pytest.mark.usefixtures("settled_early")
def test_the_order_of_the_batches_does_not_matter(sets, y, rng):
    model = paper_regressor(8, alpha=0.5, random_state=0)
    bare = sets.with_extras(None)
    order = rng.permutation(N)
    one = in_batches(clone(model), bare, y, [40]).predict(bare)
    other = in_batches(clone(model), bare[order], y[order], [35, 60]).predict(bare)
    assert np.allclose(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.usefixtures("settled_early")
def test_batches_that_are_read_twice_have_the_leave_one_out_error_of_fit(sets, y):
    bare = sets.with_extras(None)
    alphas = [0.01, 0.1, 1.0, 10.0]
    model = paper_regressor(4, alpha=alphas, random_state=0)
    batches = [(bare[i : i + 25], y[i : i + 25]) for i in range(0, N, 25)]
    stream = clone(model).fit_batches(batches)
    whole = model.fit(bare, y)
    assert stream.selection_.selection == "loo"
    assert np.allclose(stream.selection_.errors, whole.selection_.errors)
    assert stream.alpha_ == whole.alpha_


@pytest.mark.usefixtures("settled_early")
def test_a_generator_is_judged_by_generalised_cross_validation(sets, y):
    bare = sets.with_extras(None)
    model = paper_regressor(4, random_state=0)
    model.fit_batches((bare[i : i + 25], y[i : i + 25]) for i in range(0, N, 25))
    assert model.selection_.selection == "gcv"
    with pytest.raises(ValueError, match=r"selection='loo' reads the batches twice.*generator"):
        model.fit_batches(iter([(bare, y)]), selection="loo")


@pytest.mark.usefixtures("settled_early")
@pytest.mark.parametrize("n_classes", [2, 3])
def test_classes_come_in_batches(n_classes, sets, rng):
    labels = np.array(["low", "middle", "high"])[np.digitize(sets.query[:, 0], [-0.4, 0.4])]
    if n_classes == 2:
        labels = np.where(labels == "middle", "high", labels)
    model = paper_classifier(30, alpha=0.5, random_state=0)
    whole = clone(model).fit(sets.with_extras(None), labels)
    stream = clone(model).fit_batches(
        [(sets.with_extras(None)[i : i + 30], labels[i : i + 30]) for i in (0, 30, 60)]
    )
    assert np.allclose(
        stream.decision_function(sets.with_extras(None)),
        whole.decision_function(sets.with_extras(None)),
        atol=1e-8,
    )
    probabilities = stream.predict_proba(sets.with_extras(None))
    assert np.allclose(probabilities.sum(axis=1), 1)
    assert stream.score(sets.with_extras(None), labels) > 0.8


@pytest.mark.usefixtures("settled_early")
@pytest.mark.filterwarnings("ignore::keyhole.estimators.attention.ClippedWarning")
def test_default_settings_settle_several_layers_side_by_side(sets, y):
    model = kh.AttentionRegressor(random_state=0)
    stream = in_batches(clone(model), sets, y, [30, 60])
    stream.predict(sets)
    assert {row.weight for row in stream.members_} == {1.0}
    assert np.mean(np.square(stream.predict(sets) - y)) < 0.8 * np.var(y)
    parts, rest = stream.contributions(sets, return_rest=True)
    assert np.allclose([part.sum() for part in parts] + rest, stream.predict(sets))


@pytest.mark.usefixtures("settled_early")
def test_a_common_factor_of_the_weights_changes_nothing_that_is_automatic(sets, y, rng):
    weights = rng.uniform(0.5, 2.0, N)
    predictions = [
        in_batches(paper_regressor(8, random_state=0), sets, y, [40], factor * weights).predict(
            sets
        )
        for factor in (1.0, 1000.0, 1 / weights.sum())
    ]
    assert np.allclose(predictions[1], predictions[0], rtol=1e-8)
    assert np.allclose(predictions[2], predictions[0], rtol=1e-8)


@pytest.mark.usefixtures("settled_early")
def test_samples_of_weight_zero_are_left_out(sets, y):
    weights = (np.arange(N) % 3 > 0).astype(float)
    kept = weights > 0
    model = paper_regressor(8, alpha=0.5, random_state=0)
    some = in_batches(clone(model), sets.with_extras(None), y, [40], weights)
    rest = in_batches(clone(model), sets.with_extras(None)[kept], y[kept], [40])
    assert np.allclose(
        some.predict(sets.with_extras(None)), rest.predict(sets.with_extras(None)), atol=1e-8
    )


# ---- one after the other


@pytest.mark.usefixtures("settled_early")
@pytest.mark.parametrize("n_first", [10, 50])
def test_a_batch_that_fails_leaves_the_model_as_it_was(n_first, sets, y):
    model = paper_regressor(8, alpha=0.5, random_state=0).partial_fit(sets[:n_first], y[:n_first])
    before = model.predict(sets)
    bad = y[n_first:].copy()
    bad[3] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        model.partial_fit(sets[n_first:], bad)
    assert (model.predict(sets) == before).all()
    assert model.n_samples_seen_ == n_first


@pytest.mark.usefixtures("settled_early")
def test_batches_may_use_their_memory_again(sets, y):
    memory = np.zeros((10, 2, 3))
    model, other = (paper_regressor(8, alpha=0.5, random_state=0) for _ in range(2))
    rng = np.random.default_rng(0)
    for _ in range(5):
        memory[:] = rng.normal(size=(10, 2, 3))
        model.partial_fit(memory, memory[:, 0, 0])
        other.partial_fit(memory.copy(), memory[:, 0, 0].copy())
    assert (model.predict(memory) == other.predict(memory)).all()


def test_partial_fit_goes_on_after_a_fit_in_batches_and_starts_over_after_fit(sets, y):
    model = paper_regressor(8, alpha=0.5, random_state=0).fit_batches([(sets[:60], y[:60])])
    assert model.partial_fit(sets[60:], y[60:]).n_samples_seen_ == N
    fitted = paper_regressor(8, alpha=0.5, random_state=0).fit(sets, y)
    with pytest.warns(UserWarning, match="partial_fit starts over"):
        assert fitted.partial_fit(sets[:40], y[:40]).n_samples_seen_ == 40


@pytest.mark.usefixtures("settled_early")
def test_predictions_and_plain_intervals_of_batches(sets, y):
    model = in_batches(paper_regressor(8, random_state=0), sets, y, [40])
    yielded = list(model.predict_batches([sets[:50], (sets[50:], y[50:])]))
    assert np.allclose(np.concatenate(yielded), model.predict(sets))
    with pytest.warns(UserWarning, match="plain jackknife"):
        intervals = model.predict_interval(sets, 0.8)
    errors = np.sort(model.jackknife_errors_[:, 0])
    size = errors[math.ceil(0.8 * (len(errors) + 1)) - 1]
    assert np.allclose(intervals.T, [model.predict(sets) - size, model.predict(sets) + size])
    with pytest.raises(ValueError, match="it was fitted in batches"):
        model.predict_std(sets)


# ---- refusals


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_heads": math.inf}, r"exact kernel|infinitely many|finite"),
        ({"heads": kh.LearnedHeads()}, r"LearnedHeads|learn"),
    ],
)
def test_what_needs_all_samples_at_once_is_refused_with_the_remedy(settings, words, sets, y):
    model = kh.AttentionRegressor(**{**PAPER_LAYER, "n_heads": 8, **settings})
    with pytest.raises((ValueError, AttributeError), match=words):
        model.partial_fit(sets, y)
    with pytest.raises((ValueError, AttributeError), match=words):
        model.fit_batches([(sets, y)])


def test_batches_must_be_batches(sets, y):
    model = paper_regressor(8, random_state=0)
    with pytest.raises(ValueError, match="at least one batch: got none"):
        model.fit_batches([])
    with pytest.raises(ValueError, match=r"requires y to be passed"):
        model.fit_batches([sets])
    classifier = paper_classifier(8, random_state=0)
    labels = (y > 0).astype(int)
    with pytest.raises(ValueError, match="needs `classes`"):
        classifier.partial_fit(sets, labels)
    classifier.partial_fit(sets, labels, classes=[0, 1])
    with pytest.raises(ValueError, match=r"one of `classes`.*sample 0 of this batch has 7"):
        classifier.partial_fit(sets, np.full(N, 7))
    with pytest.raises(ValueError, match="`classes` must be those of the first batch"):
        classifier.partial_fit(sets, labels, classes=[0, 1, 2])
    with pytest.raises(ValueError, match="the outputs of the first"):
        model.partial_fit(sets, y).partial_fit(sets, np.stack([y, y], axis=1))


def test_a_stream_without_weight_has_no_fit(sets, y):
    model = paper_regressor(8, random_state=0)
    with pytest.raises(ValueError, match="positive"):
        model.partial_fit(sets, y, sample_weight=np.zeros(N)).predict(sets)
