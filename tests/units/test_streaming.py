"""Fitting in batches: the same fit as at once, whatever the batches; and what batches do not
allow.
"""

import math
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from paper import PAPER_LAYER, paper_classifier, paper_regressor
from sklearn.base import clone

import keyhole as kh
from keyhole.attention.heads import HeadDraw
from keyhole.data import ParquetSets, write_parquet
from keyhole.data.tokens import TokenRule
from keyhole.streaming import LayerRecipe, merge
from keyhole.training import TrainingSet


@pytest.fixture
def sets(rng):
    keys = [rng.normal(size=(rng.integers(1, 6), 3)) for _ in range(150)]
    return kh.SetBatch(keys, rng.normal(size=(150, 3)))


@pytest.fixture
def y(sets, rng):
    return kh.targets.Correlation(1, 3)(sets) + 0.1 * rng.normal(size=len(sets))


def batches(sets, y, sizes, weights=None):
    start, made = 0, []
    while start < len(sets):
        stop = start + sizes[len(made) % len(sizes)]
        made.append(
            (sets[start:stop], y[start:stop], None if weights is None else weights[start:stop])
        )
        start = stop
    return made


def same(a, b, relative=1e-9):
    assert np.abs(np.asarray(a) - b).max() <= relative * np.abs(b).max(), np.abs(
        np.asarray(a) - b
    ).max()


@pytest.mark.parametrize(
    "options", [{}, {"fit_intercept": False}, {"pooling": "sum", "query": "mean"}]
)
@pytest.mark.parametrize("sizes", [[1], [7, 40], [150]])
def test_batches_of_any_size_and_order_are_the_one_shot_fit(sets, y, rng, sizes, options):
    weights = rng.uniform(0.5, 2.0, 150)
    model = kh.AttentionRegressor(
        8,
        random_state=3,
        **{**PAPER_LAYER, **options},
    )
    whole = clone(model).fit(sets, y, sample_weight=weights)
    order = rng.permutation(150)
    parts = batches(sets[order], y[order], sizes, weights[order])
    streamed = clone(model).fit_batches(parts)
    assert (whole.solver_, streamed.solver_, streamed.selection_.method) == (
        "primal",
        "primal",
        "loo",
    )
    same(streamed.alpha_, whole.alpha_)
    same(streamed.loo_error_, whole.loo_error_, 1e-8)
    same(streamed.predict(sets), whole.predict(sets))
    fixed = clone(model).set_params(alpha=whole.alpha_)
    for part in parts:
        fixed.partial_fit(*part)
    same(fixed.predict(sets), whole.predict(sets))
    same(fixed.values_, whole.values_, 1e-7)
    assert fixed.n_samples_seen_ == 150


def test_a_generator_is_judged_by_generalised_cross_validation(sets, y):
    model = paper_regressor(8, random_state=0).fit_batches(b for b in batches(sets, y, [50]))
    assert model.selection_.method == "gcv"
    assert model.selection_.error == model.selection_.errors.min()
    with pytest.raises(AttributeError, match="another pass over the data"):
        _ = model.loo_error_
    assert not hasattr(model, "dual_coef_")
    with pytest.raises(ValueError, match="can be read once"):
        model.fit_batches(iter(batches(sets, y, [50])), selection="loo")
    assert model.fit_batches(batches(sets, y, [50]), selection="gcv").selection_.method == "gcv"


def test_both_errors_agree_where_leverages_are_alike(seed):
    sets = kh.targets.sphere_sets(800, n_keys=4, dim=3, seed=seed)
    y = kh.targets.TokenPower(2, 3)(sets) + 0.1 * np.random.default_rng(seed).standard_normal(800)
    whole = paper_regressor(6, random_state=0).fit(sets, y)
    streamed = paper_regressor(6, random_state=0).partial_fit(sets, y)
    streamed.solve()
    assert (whole.selection_.method, streamed.selection_.method) == ("loo", "gcv")
    # p = 24 of 800: errors differ by the spread of leverages about their mean of 3 %
    assert streamed.selection_.error == pytest.approx(whole.loo_error_, rel=0.01)


def test_partial_fit_goes_on_after_a_fit_in_batches(sets, y):
    model = paper_regressor(8, random_state=0, alpha=0.1)
    model.fit_batches(batches(sets[:90], y[:90], [30]))
    model.partial_fit(sets[90:], y[90:])
    same(model.predict(sets), clone(model).fit(sets, y).predict(sets))
    model.fit(sets[:20], y[:20])  # and a fit at once starts over
    assert model.selection_.method == "loo"
    assert not hasattr(model, "gcv_error_")
    assert not hasattr(model, "n_samples_seen_")
    with pytest.warns(UserWarning, match="partial_fit starts over"):
        model.partial_fit(sets, y)


def test_several_outputs_and_float32(sets, y):
    both = np.column_stack([y, 1 - 2 * y])
    model = paper_regressor(8, random_state=0, alpha=0.1)
    whole = clone(model).fit(sets, both)
    streamed = clone(model).fit_batches(batches(sets, both, [40]))
    same(streamed.predict(sets), whole.predict(sets))
    assert streamed.intercept_.shape == (2,)
    single = clone(model).set_params(dtype="float32").fit_batches(batches(sets, both, [40]))
    same(single.predict(sets), whole.predict(sets), 1e-4)
    with pytest.raises(ValueError, match="outputs of the first"):
        streamed.partial_fit(sets[:3], y[:3])


@pytest.mark.parametrize("n_classes", [2, 3])
def test_classifier(sets, y, n_classes):
    label = np.array(["a", "b", "c"])[
        np.searchsorted(np.quantile(y, np.arange(1, n_classes) / n_classes), y)
    ]
    model = paper_classifier(
        8, random_state=0, alpha=0.1, class_weight={"a": 2.0, "b": 1.0, "c": 1.0}
    )
    whole = clone(model).fit(sets, label)
    parts = batches(sets, label, [20, 35])
    streams = [clone(model).fit_batches(parts)]
    streams.append(clone(model).fit_batches(iter(parts), classes=list("abc")[:n_classes]))
    streams.append(clone(model))
    for i, part in enumerate(parts):
        streams[-1].partial_fit(*part[:2], classes=np.unique(label) if i == 0 else None)
    for streamed in streams:
        same(streamed.decision_function(sets), whole.decision_function(sets))
        # every sample is kept here, so calibration is that of the fit at once
        assert streamed.temperature_ == pytest.approx(whole.temperature_, rel=1e-6)
        assert (streamed.predict(sets) == whole.predict(sets)).all()


def test_classifier_refusals(sets, y):
    label = np.where(y > 0, "yes", "no")
    model = paper_classifier(4, random_state=0)
    with pytest.raises(ValueError, match="classes must be passed on the first call to partial_fit"):
        model.partial_fit(sets, label)
    with pytest.raises(
        ValueError, match="`classes` must be given with batches that can be read only once"
    ):
        model.fit_batches(iter([(sets, label)]))
    model.partial_fit(sets, label, classes=["no", "yes"])
    with pytest.raises(ValueError, match="sample 1 of this batch has 'maybe'"):
        model.partial_fit(sets[:2], ["no", "maybe"])
    with pytest.raises(ValueError, match="must be the same in every call"):
        model.partial_fit(sets, label, classes=["no", "yes", "maybe"])
    with pytest.raises(ValueError, match="pass a dict of weights"):
        paper_classifier(4, class_weight="balanced").partial_fit(sets, label, classes=["no", "yes"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_heads": math.inf}, "the exact kernel.*Use a finite number of heads"),
        ({"device": "cpu"}, "device='cpu'.*NumPy.*Leave `device` out"),
        ({"heads": kh.LearnedHeads()}, "heads=LearnedHeads.*heads=model.heads_"),
    ],
)
def test_what_needs_the_whole_training_set_says_so(sets, y, options, words):
    model = kh.AttentionRegressor(**{**PAPER_LAYER, "n_heads": 512, **{"n_heads": 4, **options}})
    with pytest.raises(ValueError, match=words):
        model.fit_batches([(sets, y)])
    # not there at all, so that scikit-learn's tools do not try it
    with pytest.raises(AttributeError, match=words):
        model.partial_fit(sets, y)


def test_learned_heads_go_into_batches(sets, y):
    distribution = (
        kh.AttentionRegressor(
            8,
            heads=kh.LearnedHeads(max_iter=0),
            random_state=0,
            scaling="none",
            query="given",
            activation="relu",
            pooling="mean",
        )
        .fit(sets, y)
        .heads_
    )
    model = kh.AttentionRegressor(
        8,
        heads=distribution,
        random_state=0,
        alpha=0.1,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    )
    same(
        clone(model).fit_batches(batches(sets, y, [60])).predict(sets),
        model.fit(sets, y).predict(sets),
    )


def test_batches_must_be_batches(sets, y):
    model = paper_regressor(4, random_state=0)
    with pytest.raises(ValueError, match="at least one batch"):
        model.fit_batches([])
    with pytest.raises(TypeError, match="iterable of batches"):
        model.fit_batches(sets)
    with pytest.raises(ValueError, match="`classes` is for classifiers"):
        model.fit_batches([(sets, y)], classes=[0, 1])

    class Shrinking:
        left = 3

        def __iter__(self):
            self.left -= 1
            return iter(batches(sets[: 50 * self.left], y[: 50 * self.left], [50]))

    # iter() itself is asked once, to see whether it gives a new iterator
    with pytest.raises(ValueError, match=r"the same samples every time.* the second"):
        model.fit_batches(Shrinking())


def test_weights_of_zero_are_left_out(sets, y):
    weights = (np.arange(150) % 3 > 0).astype(float)
    model = paper_regressor(6, random_state=0, alpha=0.1)
    same(
        clone(model).fit_batches(batches(sets, y, [1, 50], weights)).predict(sets),
        clone(model).fit(sets[weights > 0], y[weights > 0]).predict(sets),
    )


def test_a_stream_without_weight_has_no_fit(sets, y):
    model = paper_regressor(4, random_state=0)
    with pytest.raises(
        ValueError, match="one sample of positive weight, and two to choose a penalty: got 1"
    ):
        model.partial_fit(sets[:3], y[:3], sample_weight=[0.0, 1.0, 0.0]).predict(sets)


def test_too_many_columns_say_what_they_would_take(sets, y):
    with pytest.raises(MemoryError, match="solver='cg'"):
        paper_regressor(1_000_000).partial_fit(sets, y)


class OneBuffer:
    """Batches that all live in the same memory, one after another."""

    def __init__(self, sets, y):
        self.sets, self.y = sets, y

    def __iter__(self):
        keys, query, y = np.empty((10, 4, 3)), np.empty((10, 3)), np.empty(10)
        for start in range(0, len(self.y), 10):
            some = self.sets[start : start + 10]
            keys[:], query[:], y[:] = (
                some.tokens.reshape(10, 4, 3),
                some.query,
                self.y[start : start + 10],
            )
            yield kh.SetBatch(keys, query), y


def test_batches_may_use_their_memory_again(seed):
    sets = kh.targets.sphere_sets(200, n_keys=4, dim=3, seed=seed)
    y = kh.targets.TokenPower(2, 3)(sets) + 0.1 * np.random.default_rng(seed).standard_normal(200)
    whole = paper_regressor(8, random_state=0).fit(sets, y)
    streamed = paper_regressor(8, random_state=0).fit_batches(OneBuffer(sets, y))
    same(streamed.predict(sets), whole.predict(sets))
    same(streamed.loo_error_, whole.loo_error_, 1e-8)


def test_prediction_yields(sets, y):
    model = paper_regressor(6, random_state=0).fit(sets, y)
    parts = model.predict_batches(iter([sets[:40], (sets[40:], y[40:])]))
    np.testing.assert_array_equal(np.concatenate(list(parts)), model.predict(sets))


def test_a_stream_can_be_pickled_midway(sets, y):
    model = paper_regressor(6, random_state=0, alpha=0.1).partial_fit(sets[:80], y[:80])
    model = pickle.loads(pickle.dumps(model)).partial_fit(sets[80:], y[80:])
    same(model.predict(sets), clone(model).fit(sets, y).predict(sets))


def test_from_parquet(sets, y):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sets.parquet"
        write_parquet(path, [(sets, y)], row_group_size=47)
        model = paper_regressor(8, random_state=0)
        whole = clone(model).fit(sets, y)
        for source in (path, str(path), ParquetSets(path, batch_size=10)):
            streamed = clone(model).fit_batches(source)
            same(streamed.predict(sets), whole.predict(sets))
            assert streamed.selection_.method == "loo"


def test_sums_merge_with_the_samples_they_keep(sets, y):
    recipe = LayerRecipe(
        HeadDraw(kh.GaussianHeads(), 4, 3, seed=0), TokenRule("none", "given", "mean"), 1, n_kept=20
    )
    whole = recipe.add(recipe.empty(), TrainingSet(sets, y[:, None])).kept
    parts = [
        recipe.add(recipe.empty(), TrainingSet(sets[rows], y[rows, None]))
        for rows in (slice(0, 60), slice(60, 150))
    ]
    one = parts[0] + parts[1]
    for joint in (parts[1] + parts[0], merge(parts), merge([recipe.empty(), *parts])):
        assert len(joint.kept.priorities) == 20
        np.testing.assert_array_equal(joint.kept.priorities, one.kept.priorities)
    # one part after the other keeps what all at once keep
    sums = recipe.empty()
    for rows in (slice(0, 60), slice(60, 150)):
        sums = recipe.add(sums, TrainingSet(sets[rows], y[rows, None]))
    np.testing.assert_array_equal(sums.kept.columns, whole.columns)
    np.testing.assert_array_equal(sums.kept.sets.tokens, whole.sets.tokens)


def test_samples_that_come_sorted_are_kept_from_everywhere(sets):
    place = np.arange(150.0)[:, None]
    recipe = LayerRecipe(
        HeadDraw(kh.GaussianHeads(), 4, 3, seed=0), TokenRule("none", "given", "mean"), 1, n_kept=40
    )
    kept = recipe.add(recipe.empty(), TrainingSet(sets, place)).kept
    # a third of 40 from each third, within four standard deviations
    assert np.abs(np.bincount(kept.columns[:, 0].astype(int) // 50) - 40 / 3).max() < 12


def test_wide_tokens_are_fitted_by_all_samples_with_all_heads(rng):
    keys = rng.normal(size=(24, 6, 100)).astype(np.float32)
    y = keys[:, :, 0].mean(axis=1).astype(float)
    batches = [(kh.SetBatch(keys[i : i + 5]), y[i : i + 5]) for i in range(0, 24, 5)]
    settings = {"scaling": "none", "activation": "relu", "pooling": "mean", "query": "given"}
    model = kh.AttentionRegressor(heads=kh.GaussianHeads(), random_state=0, **settings)
    in_batches = model.fit_batches(iter(batches)).predict(keys)
    whole = model.fit(keys, y)
    assert whole.n_heads_ >= 32
    np.testing.assert_allclose(in_batches, whole.predict(keys), rtol=1e-9)


def test_more_wide_samples_than_a_matrix_holds_are_summed_and_it_says_so(rng, monkeypatch):
    monkeypatch.setattr("keyhole.estimators.batches.MOST_SPOOLED", 10)
    keys, y = rng.normal(size=(24, 3, 100)), rng.normal(size=24)
    model = kh.AttentionRegressor(heads=kh.GaussianHeads(), random_state=0)
    with pytest.warns(UserWarning, match="24 samples of 100 coordinates are fitted with 20 heads"):
        model.fit_batches([(kh.SetBatch(keys), y)])
    assert model.n_heads_ == 20


def test_pending_samples_are_counted_in_bytes_too(rng, monkeypatch):
    monkeypatch.setattr("keyhole.estimators.batches.PENDING_BYTES", 2000)
    model = kh.AttentionRegressor(4, kh.GaussianHeads(), random_state=0)
    keys, y = rng.normal(size=(20, 10, 2)), rng.normal(size=20)
    for start in range(0, 20, 5):  # 800 bytes of keys each
        model.partial_fit(kh.SetBatch(keys[start : start + 5]), y[start : start + 5])
        assert model.stream_.n_pending < 15
