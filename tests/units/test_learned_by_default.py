"""Default settings learn heads where that pays, and only there; numbers are of samples unseen."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.heads import FittedHeads


def turned(seed, n):
    """The query points at a key through a turn of its coordinates that nobody tells.

    The outputs are the coordinates of that key.
    """
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(n, 6, 4)) / 2
    query = rng.normal(size=(n, 4)) / 2
    turn = np.roll(np.eye(4), 1, axis=1)
    best = np.einsum("nd,de,nke->nk", query, turn, keys).argmax(axis=1)
    return kh.SetBatch(keys, query), keys[np.arange(n), best]


@pytest.fixture(scope="module")
def pointed():
    return turned(seed=0, n=600)


@pytest.fixture(scope="module")
def default_model(pointed):
    sets, y = pointed
    return kh.AttentionRegressor(random_state=0).fit(sets[:400], y[:400])


@pytest.fixture(scope="module")
def fixed_model(pointed):
    sets, y = pointed
    return kh.AttentionRegressor(heads=kh.GaussianHeads(), random_state=0).fit(sets[:400], y[:400])


def test_default_settings_learn_where_to_look(default_model, fixed_model, pointed):
    sets, y = pointed
    assert default_model.heads_.chosen == "learned"
    assert default_model.score(sets[400:], y[400:]) > 0.8
    assert fixed_model.score(sets[400:], y[400:]) < 0.7
    tried = [candidate for candidate in default_model.candidates_ if candidate.held_out == "part"]
    assert [type(candidate.heads) for candidate in tried] == [kh.GaussianHeads, kh.LearnedHeads]
    assert tried[1].loss < tried[0].loss


def test_gaussian_heads_switch_learning_off(fixed_model):
    assert isinstance(fixed_model.heads_, kh.GaussianHeads)
    assert all(type(c.heads) is not kh.LearnedHeads for c in fixed_model.candidates_)


def test_the_choice_of_learned_heads_is_repeated_to_the_last_bit(default_model, pointed):
    sets, y = pointed
    again = kh.AttentionRegressor(random_state=0).fit(sets[:400], y[:400])
    np.testing.assert_array_equal(again.predict(sets[400:]), default_model.predict(sets[400:]))


def test_nothing_is_learned_where_random_heads_are_right(seed):
    sets = kh.targets.sphere_sets(300, n_keys=5, dim=3, seed=seed)
    y = kh.targets.TokenPower(1, dim=3)(sets)
    model = kh.AttentionRegressor(random_state=0).fit(sets, y)
    assert not isinstance(model.heads_, FittedHeads)


def test_few_samples_are_not_learned_from(pointed):
    sets, y = pointed
    model = kh.AttentionRegressor(random_state=0).fit(sets[:100], y[:100])
    assert all(type(c.heads) is not kh.LearnedHeads for c in model.candidates_)


def test_numbers_are_those_of_samples_that_heads_have_not_seen(default_model, pointed):
    sets, y = pointed
    assert default_model.interval_method == "held-out"
    assert default_model.n_held_out_ == 80, "a fifth of 400"
    held_out = np.isfinite(default_model.loo_predictions_).all(axis=1)
    assert held_out.sum() == 80
    errors = np.square(y[:400] - default_model.loo_predictions_)[held_out]
    np.testing.assert_allclose(default_model.loo_error_, errors.mean())
    new_error = np.square(y[400:] - default_model.predict(sets[400:])).mean()
    assert 0.6 < default_model.loo_error_ / new_error < 1.8

    intervals = default_model.predict_interval(sets[400:], 0.9)
    inside = (intervals[..., 0] <= y[400:]) & (y[400:] <= intervals[..., 1])
    assert 0.85 < inside.mean() < 0.97


def test_a_model_that_learned_is_saved_with_its_numbers(default_model, pointed, tmp_path):
    sets, _ = pointed
    kh.save(default_model, tmp_path / "m.keyhole")
    again = kh.load(tmp_path / "m.keyhole")
    assert again.interval_method == "held-out"
    assert again.n_held_out_ == default_model.n_held_out_
    np.testing.assert_array_equal(
        again.predict_interval(sets[400:]), default_model.predict_interval(sets[400:])
    )


def test_adaptive_intervals_of_learned_heads_are_refused(default_model, pointed):
    sets, _ = pointed
    with pytest.raises(ValueError, match="heads that were learned make those too small"):
        default_model.predict_interval(sets[400:], width="adaptive")
    assert (default_model.predict_std(sets[400:]) > 0).all()
    ranks = default_model.novelty(sets[400:])
    assert ranks.min() >= 0
    assert ranks.max() <= 1


def test_batches_with_default_settings_learn_nothing(pointed):
    sets, y = pointed
    model = kh.AttentionRegressor(random_state=0).partial_fit(sets[:400], y[:400])
    model.solve()
    assert all(type(c.heads) is not kh.LearnedHeads for c in model.candidates_)
