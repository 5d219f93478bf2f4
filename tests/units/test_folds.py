"""Folds: what is held out together."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.folds import Folds
from keyhole.training import TrainingSet


def training_set(rng, n=40, **known):
    samples = kh.SetBatch(rng.normal(size=(n, 3, 2)))
    return TrainingSet(samples, rng.normal(size=(n, 1)), **known)


def test_every_sample_is_held_out_once_and_folds_have_one_size(rng):
    folds = Folds.of(training_set(rng, 42), n_folds=5)
    held_out = np.concatenate([rows for _, rows in folds.splits()])
    assert sorted(held_out) == list(range(42))
    assert sorted(np.bincount(folds.numbers)) == [8, 8, 8, 9, 9]
    for rest, rows in folds.splits():
        assert sorted([*rest, *rows]) == list(range(42))


def test_samples_are_drawn_by_the_seed(rng):
    data = training_set(rng)
    numbers = Folds.of(data, seed=1).numbers
    np.testing.assert_array_equal(Folds.of(data, seed=1).numbers, numbers)
    assert (Folds.of(data, seed=2).numbers != numbers).any()


def test_equal_samples_are_samples_each(rng):
    data = training_set(rng)[np.zeros(40, int)]
    assert np.bincount(Folds.of(data).numbers).tolist() == [8] * 5


def test_samples_without_weight_do_not_count(rng):
    data = training_set(rng, 50, weights=np.append(np.ones(40), np.zeros(10)))
    numbers = Folds.of(data).numbers
    assert np.bincount(numbers[:40]).tolist() == [8] * 5


def test_groups_are_not_divided(rng):
    groups = np.repeat(np.arange(8), 5)
    folds = Folds.of(training_set(rng, groups=groups))
    for group in range(8):
        assert len(set(folds.numbers[groups == group])) == 1
    assert folds.count == 5


def test_classes_are_spread_over_folds(rng):
    data = training_set(rng, 100)
    labels = np.where(np.arange(100) < 10, 1.0, -1.0)[:, None]
    folds = Folds.of(TrainingSet(data.samples, labels), classifies=True)
    rare = np.bincount(folds.numbers[:10], minlength=5)
    np.testing.assert_array_equal(rare, [2, 2, 2, 2, 2])


@pytest.mark.parametrize(("n", "count"), [(1, 1), (2, 2), (4, 4), (9, 5)])
def test_no_more_folds_than_samples(rng, n, count):
    assert Folds.of(training_set(rng, n)).count == count
