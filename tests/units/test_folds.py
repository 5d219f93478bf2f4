"""Folds: what is held out together, and that it belongs to the samples and not to their places."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.folds import Folds
from keyhole.training import TrainingSet


def training_set(rng, n=40, **known):
    samples = kh.SetBatch(rng.normal(size=(n, 3, 2)))
    return TrainingSet(samples, rng.normal(size=(n, 1)), **known)


def together(folds):
    """Which pairs of samples are in one fold: what folds are, whatever their numbers."""
    return folds.numbers[:, None] == folds.numbers


def test_every_sample_is_held_out_once_and_folds_have_one_size(rng):
    folds = Folds.of(training_set(rng, 42), n_folds=5)
    held_out = np.concatenate([rows for _, rows in folds.splits()])
    assert sorted(held_out) == list(range(42))
    assert sorted(np.bincount(folds.numbers)) == [8, 8, 8, 9, 9]
    for rest, rows in folds.splits():
        assert sorted([*rest, *rows]) == list(range(42))


def test_the_order_of_samples_and_the_units_of_y_do_not_matter(rng):
    data = training_set(rng)
    order = rng.permutation(len(data))
    turned = TrainingSet(data.samples[order], 1000 * data.outputs[order] + 7)
    np.testing.assert_array_equal(
        together(Folds.of(data))[np.ix_(order, order)], together(Folds.of(turned))
    )


def test_duplicates_are_in_one_fold_and_count_as_one(rng):
    data = training_set(rng)
    rows = np.concatenate([np.arange(40), np.arange(10), np.arange(10)])
    repeated = Folds.of(data[rows])
    np.testing.assert_array_equal(together(repeated)[:40, :40], together(Folds.of(data)))
    np.testing.assert_array_equal(repeated.numbers[40:50], repeated.numbers[:10])


def test_samples_without_weight_change_nothing(rng):
    data = training_set(rng, 50, weights=np.append(np.ones(40), np.zeros(10)))
    np.testing.assert_array_equal(
        together(Folds.of(data))[:40, :40], together(Folds.of(training_set_of(data, 40)))
    )


def training_set_of(data, count):
    """The first samples, all of weight one."""
    return TrainingSet(data.samples[:count], data.outputs[:count])


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
