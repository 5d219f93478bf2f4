"""What other libraries expect: batches that unpack, skops, joblib, targets of several labels."""

import io
import math

import joblib
import numpy as np
import pytest
import skops.io as skops_io
from paper import paper_classifier, paper_regressor
from sklearn.multioutput import MultiOutputClassifier

import keyhole as kh
from keyhole.attention.heads import FittedHeads
from keyhole.data import ParquetSets, write_parquet


@pytest.fixture
def sets(seed):
    return kh.targets.sphere_sets(60, n_keys=3, dim=2, seed=seed)


def test_batches_unpack_as_fits_take_them(sets, tmp_path):
    path = tmp_path / "sets.parquet"
    write_parquet(path, [(sets, sets.query[:, 0], np.ones(60))], row_group_size=25)
    sizes = [(len(X), len(y)) for X, y in ParquetSets(path)]
    assert sizes == [(25, 25), (25, 25), (10, 10)]
    for X, y, sample_weight in ParquetSets(path, weight="weight"):
        assert len(X) == len(y) == len(sample_weight)
    model = paper_regressor(4, random_state=0)
    expected = model.fit_batches(ParquetSets(path)).predict(sets)
    pairs = [(X, y) for X, y in ParquetSets(path)]
    np.testing.assert_array_equal(model.fit_batches(pairs).predict(sets), expected)


@pytest.mark.parametrize("kind", [kh.AttentionClassifier, kh.NormBallClassifier])
def test_several_labels_a_sample_are_refused_with_what_fits_them(sets, kind):
    y = np.stack([sets.query[:, 0] > 0, sets.query[:, 1] > 0], axis=1).astype(int)
    message = r"one label for each sample: got 2 columns.*multilabel.*MultiOutputClassifier"
    with pytest.raises(ValueError, match=message):
        kind().fit(sets, y)


def test_one_classifier_for_each_label(sets):
    y = np.stack([sets.query[:, 0] > 0, sets.query[:, 1] > 0], axis=1).astype(int)
    model = MultiOutputClassifier(paper_classifier(20, random_state=0)).fit(sets, y)
    assert model.predict(sets).shape == (60, 2)
    assert (model.predict(sets) == y).mean() > 0.8


def fitted_estimators(sets):
    """One of every estimator; the first ones with everything that is chosen automatically."""
    y = sets.query[:, 0]
    labels = np.where(y > 0, "up", "down")
    yield kh.AttentionRegressor(6, random_state=0).fit(sets, y)
    yield kh.AttentionClassifier(6, random_state=0).fit(sets, labels)
    yield kh.AttentionClassifier(6, random_state=0, loss="log_loss").fit(sets, labels)
    yield kh.AttentionRegressor(math.inf, random_state=0).fit(sets, y)
    yield kh.AttentionFeatures(6, random_state=0).fit(sets)
    radii = {"group_radius": 2.0, "ball_radius": 2.0, "random_state": 0}
    yield kh.NormBallRegressor(6, **radii).fit(sets, y)
    yield kh.NormBallClassifier(6, **radii).fit(sets, labels)


def outputs(model, sets):
    if hasattr(model, "decision_function"):
        return model.decision_function(sets)
    if hasattr(model, "predict"):
        return model.predict(sets)
    return model.transform(sets)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_every_estimator_comes_back_from_joblib_and_from_a_file(sets, tmp_path):
    for number, model in enumerate(fitted_estimators(sets)):
        buffer = io.BytesIO()
        joblib.dump(model, buffer)
        buffer.seek(0)
        np.testing.assert_array_equal(outputs(joblib.load(buffer), sets), outputs(model, sets))
        path = tmp_path / f"{number}.keyhole"
        kh.save(model, path)
        np.testing.assert_array_equal(outputs(kh.load(path), sets), outputs(model, sets))


def keys_of_dicts(value):
    """All keys of all dictionaries in a value, at any depth."""
    if isinstance(value, dict):
        yield from value
        for entry in value.values():
            yield from keys_of_dicts(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from keys_of_dicts(entry)
    elif type(value).__module__.startswith("keyhole."):
        yield from keys_of_dicts(getattr(value, "__dict__", {}))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_fitted_dictionaries_have_names_as_keys(sets):
    """skops writes no others."""
    for model in fitted_estimators(sets):
        assert all(isinstance(key, str) for key in keys_of_dicts(vars(model)))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_every_estimator_comes_back_from_skops(sets):
    for model in fitted_estimators(sets):
        content = skops_io.dumps(model)
        untrusted = skops_io.get_untrusted_types(data=content)
        assert all(name.startswith(("keyhole.", "numpy.")) for name in untrusted), untrusted
        again = skops_io.loads(content, trusted=untrusted)
        np.testing.assert_array_equal(outputs(again, sets), outputs(model, sets))


def test_heads_with_hops_come_back_from_joblib_and_from_skops():
    rng = np.random.default_rng(0)
    sets = kh.SetBatch(rng.normal(size=(30, 4, 3)), rng.normal(size=(30, 3)))
    heads = FittedHeads(rng.normal(size=(2, 7, 4)), scale=0.5, hops_=(rng.normal(size=(1, 4, 4)),))
    model = kh.AttentionRegressor(
        8, heads, activation="relu", pooling="mean", scaling="none", query="given", random_state=0
    ).fit(sets, rng.normal(size=30))
    buffer = io.BytesIO()
    joblib.dump(model, buffer)
    buffer.seek(0)
    content = skops_io.dumps(model)
    untrusted = skops_io.get_untrusted_types(data=content)
    for again in (joblib.load(buffer), skops_io.loads(content, trusted=untrusted)):
        np.testing.assert_array_equal(outputs(again, sets), outputs(model, sets))
