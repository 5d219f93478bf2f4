"""The tasks of the literature: labels by definition, draws that nest, floors that are floors."""

import math

import numpy as np
import pytest

import keyhole as kh
from keyhole.theory.tasks import TASKS, word_sensitivity

ALL = list(TASKS.values())


def keys_of(batch):
    """The keys as an array (n, N, d)."""
    return batch.tokens.reshape(len(batch), -1, batch.dim)


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_the_first_samples_of_a_draw_are_the_shorter_draw(task, seed):
    batch, y = task.draw(40, seed=seed)
    shorter, shorter_y = task.draw(15, seed=seed)
    np.testing.assert_array_equal(shorter.tokens, batch[:15].tokens)
    np.testing.assert_array_equal(shorter_y, y[:15])
    if batch.query is not None:
        np.testing.assert_array_equal(shorter.query, batch.query[:15])


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_another_seed_is_another_draw_and_labels_vary(task, seed):
    _, y = task.draw(200, seed=seed)
    _, other = task.draw(200, seed=seed + 1)
    assert not np.array_equal(y, other)
    assert np.var(y) > 0


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_every_task_is_finite_and_says_where_it_comes_from(task, seed):
    batch, y = task.draw(20, seed=seed)
    assert len(batch) == len(y) == 20
    assert np.isfinite(batch.tokens).all()
    assert np.isfinite(y).all()
    assert 0 <= task.floor < 1
    for words in (task.formula, task.finding, task.source):
        assert words


def test_there_are_fifteen_tasks_under_kh_targets():
    assert len(TASKS) == 15
    for task in ALL:
        assert getattr(kh.targets, type(task).__name__) is type(task)


# ---------------------------------------------------------------- labels by definition


def test_weighted_means_are_their_formulas(seed):
    batch, y = kh.targets.CorrelationPower(q=3, dim=4, n_keys=5).draw(30, seed)
    np.testing.assert_allclose(y, kh.targets.Correlation(3, dim=4)(batch), atol=1e-14)

    batch, y = kh.targets.SimilarityWeightedMean(sharpness=2.0, dim=3, n_keys=4).draw(30, seed)
    weights = np.exp(2 * np.einsum("nd,nkd->nk", batch.query, keys_of(batch)))
    expected = (weights * keys_of(batch)[:, :, 0]).sum(axis=1) / weights.sum(axis=1)
    np.testing.assert_allclose(y, expected, atol=1e-14)


def test_a_flat_similarity_is_the_mean_and_a_sharp_one_the_nearest_key(seed):
    flat, y_flat = kh.targets.SimilarityWeightedMean(sharpness=0.0).draw(20, seed)
    np.testing.assert_allclose(y_flat, keys_of(flat)[:, :, 0].mean(axis=1), atol=1e-14)
    _, y_sharp = kh.targets.SimilarityWeightedMean(sharpness=1e9).draw(20, seed)
    _, y_nearest = kh.targets.NearestKey().draw(20, seed)
    np.testing.assert_allclose(y_sharp, y_nearest, atol=1e-6)


def test_selection_averages_the_marked_positions(seed):
    batch, y = kh.targets.SparseSelection(n_marked=3, dim=2, n_keys=5).draw(30, seed)
    marked = batch.query[:, 2:] > 0
    assert (marked.sum(axis=1) == 3).all()
    for keys, is_marked, label in zip(keys_of(batch), marked, y, strict=True):
        assert label == pytest.approx(keys[is_marked, 0].mean())


def test_lookup_counting_and_extremes_are_what_their_names_say(seed):
    batch, y = kh.targets.Lookup(n_names=5, n_keys=3).draw(30, seed)
    for keys, query, label in zip(keys_of(batch), batch.query, y, strict=True):
        [match] = np.flatnonzero((keys[:, :5] == query[:5]).all(axis=1))
        assert label == pytest.approx(2 * keys[match, 5])

    batch, y = kh.targets.Counting(n_symbols=4, n_keys=6).draw(30, seed)
    same = (keys_of(batch) == batch.query[:, None]).all(axis=2)
    np.testing.assert_array_equal(y, same.sum(axis=1))

    batch, y = kh.targets.Maximum().draw(30, seed)
    np.testing.assert_array_equal(y, keys_of(batch)[:, :, 0].max(axis=1))

    batch, y = kh.targets.Majority().draw(30, seed)
    in_favour = (keys_of(batch)[:, :, 0] > 0).sum(axis=1)
    np.testing.assert_array_equal(y, np.where(in_favour >= 6, 1.0, -1.0))


def test_two_hops_are_two_lookups(seed):
    batch, y = kh.targets.TwoHops(n_names=4).draw(30, seed)
    values = np.linspace(-1, 1, 4)
    for keys, query, label in zip(keys_of(batch), batch.query, y, strict=True):
        # the key whose first block is the query, then the key whose own name is what that one says
        [first] = np.flatnonzero((keys[:, :4] == query[:4]).all(axis=1))
        second = [k for k in range(4, 8) if np.array_equal(keys[k, 4:8], keys[first, 4:8])]
        [second] = second
        assert label == values[keys[second, 8:].argmax()]


def test_in_context_labels_follow_from_the_examples(seed):
    batch, y = kh.targets.InContextRegression(dim=3, n_keys=7).draw(20, seed)
    for keys, query, label in zip(keys_of(batch), batch.query, y, strict=True):
        weights = np.linalg.lstsq(keys[:, :3], keys[:, 3], rcond=None)[0]
        assert label == pytest.approx(math.sqrt(3) * query[:3] @ weights)


def test_position_and_meaning_are_its_two_ends(seed):
    position, y_position = kh.targets.PositionAndMeaning(share=0.0).draw(20, seed)
    np.testing.assert_array_equal(y_position, keys_of(position)[:, 2, 0])
    _, y_meaning = kh.targets.PositionAndMeaning(share=1.0).draw(20, seed)
    _, expected = kh.targets.SimilarityWeightedMean(dim=6, n_keys=8).draw(20, seed)
    np.testing.assert_allclose(y_meaning, expected)


# ---------------------------------------------------------------- floors


@pytest.mark.parametrize(
    ("name", "bayes_error"), [("single-location", 0.21), ("sparse-classes", 0.042)]
)
def test_the_best_prediction_is_a_conditional_mean(name, bayes_error, seed):
    task = TASKS[name]
    batch, y = task.draw(20_000, seed)
    best = task.best_prediction(batch)
    error = np.mean((best - y) ** 2) / np.var(y)
    assert error == pytest.approx(bayes_error, abs=0.02)
    assert error < task.floor + 0.02
    # a conditional mean is orthogonal to its own residual
    slope = np.polyfit(best, y, 1)[0]
    assert slope == pytest.approx(1.0, abs=0.03)


def test_the_floor_of_single_location_is_that_of_its_best_softmax_head(seed):
    task = TASKS["single-location"]
    batch, y = task.draw(20_000, seed)
    errors = []
    for sharpness in (1.0, 3.0, 9.0):
        values = task.head_prediction(batch, sharpness)
        slope = (values @ y) / (values @ values)
        errors.append(np.mean((slope * values - y) ** 2) / np.var(y))
    assert errors[1] == pytest.approx(task.floor, abs=0.02)
    assert errors[1] < min(errors[0], errors[2])


def test_one_step_of_gradient_descent_has_the_floor_of_linear_attention(seed):
    task = kh.targets.InContextRegression()
    batch, y = task.draw(20_000, seed)
    keys = 2 * keys_of(batch)
    step = np.einsum("nkd,nk->nd", keys[:, :, :4], keys[:, :, 4]) / task.n_keys
    prediction = np.einsum("nd,nd->n", step, 2 * batch.query[:, :4])
    best_rate = (prediction @ y) / (prediction @ prediction)
    error = np.mean((best_rate * prediction - y) ** 2) / np.var(y)
    assert error == pytest.approx(task.floor, abs=0.02)


def test_pairs_of_keys_are_orthogonal_to_functions_of_single_keys(seed):
    batch, y = kh.targets.PairsOfKeys().draw(20_000, seed)
    keys = keys_of(batch)
    functions = [keys[:, :, 0], keys[:, :, 0] * keys[:, :, 1], np.abs(keys[:, :, 1])]
    for function in functions:
        correlation = np.corrcoef(function.mean(axis=1), y)[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(y))


# ---------------------------------------------------------------- word sensitivity


def test_word_sensitivity_of_a_mean_is_of_order_one_over_root_n(seed):
    """The mean of N independent keys has norm ~ N^{-1/2}, and one key changes it by ~ 1/N."""

    def mean_of_keys(batch):
        return keys_of(batch).mean(axis=1)

    small = word_sensitivity(mean_of_keys, n_keys=16, seed=seed)
    large = word_sensitivity(mean_of_keys, n_keys=1024, seed=seed)
    assert 4 < small / large < 16
    assert word_sensitivity(lambda batch: np.ones((len(batch), 2)), n_keys=4) == 0.0


# ---------------------------------------------------------------- bad input


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="odd, so that no vote is a tie: got 4"):
        kh.targets.Majority(n_keys=4)
    with pytest.raises(ValueError, match="`n_marked`"):
        kh.targets.SparseSelection(n_marked=9, n_keys=8)
    with pytest.raises(ValueError, match="`share` must be from 0 to 1"):
        kh.targets.PositionAndMeaning(share=2.0)
    with pytest.raises(ValueError, match="`n_samples`"):
        kh.targets.Lookup().draw(0)
