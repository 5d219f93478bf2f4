"""Streams: what settling decides, what is refused where it enters, files and sources of batches."""

import numpy as np
import pytest
from paper import paper_classifier, paper_regressor
from sklearn.base import clone

import keyhole as kh
from keyhole.data import ParquetSets, write_parquet
from keyhole.fit import second_kernel, streams

N = 120


@pytest.fixture
def settled_early(monkeypatch):
    """Layers are settled on sixty sets instead of two thousand, second kernels on thirty."""
    monkeypatch.setattr(streams, "N_FIRST", 60)
    monkeypatch.setattr(second_kernel, "MOST_EXACT", 50)
    monkeypatch.setattr(second_kernel, "CENTRES", 30)


@pytest.fixture
def keys(rng):
    return rng.uniform(-2.0, 2.0, size=(N, 4, 3))


@pytest.fixture
def y(keys, rng):
    return keys[:, :, 0].mean(axis=1) + 0.1 * rng.normal(size=N)


def cut(ends, *arrays):
    """Batches that end at the given places."""
    return [
        tuple(array[start:stop] for array in arrays)
        for start, stop in zip([0, *ends], [*ends, N], strict=True)
    ]


# ---- settling


@pytest.mark.usefixtures("settled_early")
def test_default_layers_do_not_depend_on_how_batches_are_cut(keys, y):
    lengths = np.arange(N) % 4 + 1  # later sets must not show in what is settled on the first
    sets = kh.SetBatch([rows[:length] for rows, length in zip(keys, lengths, strict=True)])
    one = kh.AttentionRegressor(random_state=0).fit_batches(cut([], sets, y))
    other = kh.AttentionRegressor(random_state=0).fit_batches(cut([7, 59, 61], sets, y))
    assert [row.params for row in one.members_] == [row.params for row in other.members_]
    np.testing.assert_allclose(one.predict(sets), other.predict(sets), rtol=1e-8)


@pytest.mark.usefixtures("settled_early")
def test_layers_have_at_most_2500_features_in_all(keys, y):
    model = kh.AttentionRegressor(random_state=0).fit_batches(cut([60], keys, y))
    assert sum(model.stream_.recipe.widths) <= 2500
    assert model.not_tried_ == ("learned heads (learned from all samples at once)",)


@pytest.mark.usefixtures("settled_early")
def test_heads_that_were_given_are_never_fewer(keys, y):
    model = kh.AttentionRegressor(700, random_state=0).fit_batches(cut([60], keys, y))
    numbers = {row.n_heads for row in model.members_ if row.params["pooling"] != "statistics"}
    assert numbers <= {700}
    kept = [row.name for row in model.members_]
    too_many = [name for name in model.not_tried_ if name.endswith("too many for sums)")]
    assert not any(name.startswith(tuple(kept)) for name in too_many)


@pytest.mark.usefixtures("settled_early")
@pytest.mark.parametrize(
    ("activation", "n_keys", "expected"), [("relu", 50, kh.Landmarks(80)), ("softmax", 3, 6)]
)
def test_wide_tokens_have_few_landmarks_or_few_heads(activation, n_keys, expected, rng):
    keys = rng.normal(size=(65, n_keys, 400))
    y = keys[:, :, 0].mean(axis=1)
    model = kh.AttentionRegressor(
        activation=activation, query="given", scaling="standard", mlp="none", random_state=0
    )
    model.fit_batches([(keys, y)])
    assert sum(model.stream_.recipe.widths) <= 2500
    assert {row.n_heads for row in model.members_} == {expected}
    if activation == "softmax":
        assert "softmax, scale 4 (too many features for sums)" in model.not_tried_


@pytest.mark.usefixtures("settled_early")
def test_more_features_than_can_be_summed_are_refused(keys, y):
    model = paper_regressor(6000, random_state=0)
    with pytest.raises(ValueError, match=r"p = 24,000, of which one matrix takes 4 GiB.*fewer"):
        model.fit_batches(cut([], keys, y))


# ---- solving


@pytest.mark.usefixtures("settled_early")
def test_the_automatic_grid_and_its_errors_are_those_of_fit(keys, y, rng):
    weights = rng.uniform(0.5, 2.0, N)
    model = paper_regressor(3, random_state=0)
    stream = clone(model).fit_batches(cut([50, 90], keys, y, 7 * weights))
    whole = model.fit(keys, y, sample_weight=weights)
    np.testing.assert_allclose(stream.selection_.alphas, whole.selection_.alphas)
    np.testing.assert_allclose(stream.selection_.errors, whole.selection_.errors, rtol=1e-6)
    assert stream.alpha_ == pytest.approx(whole.alpha_)
    assert stream.loo_error_ == pytest.approx(whole.loo_error_)
    np.testing.assert_allclose(stream.predict(keys), whole.predict(keys), atol=1e-8)


def test_weights_of_few_samples_are_divided_by_their_mean(keys, y, rng):
    weights = rng.uniform(0.5, 2.0, N)
    model = paper_regressor(3, random_state=0)
    stream = clone(model).partial_fit(keys, y, sample_weight=7 * weights).solve()
    assert stream.alpha_ == pytest.approx(model.fit(keys, y, sample_weight=weights).alpha_)


@pytest.mark.usefixtures("settled_early")
def test_what_is_not_solved_yet_says_so(keys, y):
    model = paper_regressor(4, random_state=0).partial_fit(keys[:100], y[:100]).solve()
    assert model.alpha_ > 0
    model.partial_fit(keys[100:], y[100:])
    with pytest.raises(AttributeError, match=r"'alpha_' is solved for.*call solve"):
        model.alpha_  # noqa: B018
    assert "On the first 60 samples left out one by one" in model.summary()


# ---- refusals


@pytest.mark.usefixtures("settled_early")
@pytest.mark.parametrize("n_first", [40, 80])
@pytest.mark.parametrize("what", ["X", "y"])
def test_numbers_too_large_for_sums_are_refused_where_they_enter(n_first, what, keys, y):
    model = paper_regressor(4, alpha=0.1, random_state=0).partial_fit(keys[:n_first], y[:n_first])
    reference = clone(model).partial_fit(keys[:n_first], y[:n_first])
    bad = {"X": keys, "y": y} | {what: 1e200 * {"X": keys, "y": y}[what]}
    with pytest.raises(ValueError, match=rf"below 1e\+100.*`{what}` has"):
        model.partial_fit(**bad)
    for other in (model, reference):
        other.partial_fit(keys[n_first:], y[n_first:])
    np.testing.assert_array_equal(model.predict(keys), reference.predict(keys))


@pytest.mark.usefixtures("settled_early")
def test_features_that_overflow_leave_the_model_as_it_was(keys, y):
    model = paper_regressor(4, alpha=0.1, random_state=0).partial_fit(keys, y)
    before = model.predict(keys)
    with pytest.raises(ValueError, match="squares below"):
        model.partial_fit(1e60 * keys, y)
    np.testing.assert_array_equal(model.predict(keys), before)


@pytest.mark.usefixtures("settled_early")
def test_a_batch_of_weight_zero_is_taken_and_changes_nothing(keys, y):
    model = paper_regressor(4, random_state=0).partial_fit(keys, y)
    before = model.predict(keys)
    model.partial_fit(keys, y, sample_weight=np.zeros(N))
    np.testing.assert_array_equal(model.predict(keys), before)


# ---- files, and sources of batches


@pytest.mark.usefixtures("settled_early")
@pytest.mark.parametrize("n_first", [40, 80])
def test_a_model_in_a_file_goes_on(n_first, keys, y, tmp_path):
    model = kh.AttentionRegressor(random_state=0).partial_fit(keys[:n_first], y[:n_first])
    kh.save(model, tmp_path / "model", keep="all")
    loaded = kh.load(tmp_path / "model")
    assert loaded.not_tried_ == model.not_tried_
    for each in (model, loaded):
        each.partial_fit(keys[n_first:], y[n_first:])
    assert loaded.n_samples_seen_ == N
    np.testing.assert_allclose(loaded.predict(keys), model.predict(keys), rtol=1e-10)


@pytest.mark.usefixtures("settled_early")
def test_the_leave_one_out_error_of_all_samples_is_in_the_file(keys, y, tmp_path):
    model = paper_regressor(4, random_state=0).fit_batches(cut([60], keys, y))
    for keep in ("all", "predict"):
        kh.save(model, tmp_path / keep, keep=keep)
        assert kh.load(tmp_path / keep).loo_error_ == model.loo_error_ == model.selection_.error


@pytest.mark.usefixtures("settled_early")
def test_a_model_without_its_sums_predicts_and_does_not_go_on(keys, y, tmp_path):
    model = kh.AttentionRegressor(random_state=0).fit_batches(cut([60], keys, y))
    kh.save(model, tmp_path / "model", keep="predict")
    loaded = kh.load(tmp_path / "model")
    np.testing.assert_allclose(loaded.predict(keys), model.predict(keys), rtol=1e-10)
    with pytest.raises(ValueError, match="saved with keep='predict'"):
        loaded.partial_fit(keys, y)


@pytest.mark.usefixtures("settled_early")
def test_parquet_files_and_folders_of_bags_are_batches(keys, y, tmp_path):
    sets = kh.SetBatch(keys)
    model = paper_regressor(4, alpha=0.1, random_state=0).fit(sets, y)
    write_parquet(tmp_path / "sets.parquet", [(sets, y)], row_group_size=50)
    folder = tmp_path / "bags"
    folder.mkdir()
    for i in range(N):
        np.save(folder / f"{i:03}.npy", keys[i])
    labels = {f"{i:03}": y[i] for i in range(N)}
    sources = [ParquetSets(tmp_path / "sets.parquet"), kh.read_bags(folder, labels)]
    for source in sources:
        stream = clone(model).fit_batches(source)
        assert stream.selection_.selection == "loo"
        np.testing.assert_allclose(stream.predict(sets), model.predict(sets), atol=1e-8)


@pytest.mark.usefixtures("settled_early")
def test_a_class_that_has_not_come_yet_has_a_probability(keys, y):
    labels = np.digitize(y, [-0.2, 0.2])
    seen = labels < 2
    model = paper_classifier(8, alpha=0.1, random_state=0)
    model.partial_fit(keys[seen], labels[seen], classes=[0, 1, 2])
    assert (model.predict_proba(keys)[:, 2] < 0.5).all()
    model.partial_fit(keys[~seen], labels[~seen])
    assert model.predict_proba(keys).shape == (N, 3)
    assert model.score(keys, labels) > 0.5
