"""Heads that are learned from torch tensors: the same numbers as from arrays."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.hops import Ages
from keyhole.data.tokens import with_ages

torch = pytest.importorskip("torch", reason="compared where torch is installed")


@pytest.fixture(scope="module")
def stories():
    """Keys of three coordinates with their ages, and a query that has the first three alone."""
    rng = np.random.default_rng(0)
    keys = [rng.normal(size=(int(rng.integers(3, 6)), 3)) for _ in range(80)]
    queries = np.zeros((80, 8))
    queries[:, :3] = rng.normal(size=(80, 3))
    return kh.SetBatch(with_ages(keys, n_ages=5), queries), rng.normal(size=80)


def test_keys_become_older_wherever_they_are(stories):
    sets, _ = stories
    ages = Ages.of(sets)
    on_host = ages.moved(sets, 0.5, np.random.default_rng(1))
    placed = ages.moved(sets.to("cpu"), 0.5, np.random.default_rng(1))
    assert not (on_host.tokens == sets.tokens).all()
    assert (placed.tokens.numpy() == on_host.tokens).all()


@pytest.mark.parametrize("hops", [1, 2])
def test_a_descent_on_tensors_has_the_errors_of_one_on_arrays(stories, hops):
    sets, y = stories
    heads = kh.LearnedHeads(hops=hops, max_iter=5)
    on_host = heads.fit(sets, y, activation="softmax")
    placed = heads.fit(sets.to("cpu"), y, activation="softmax")
    errors = [[step.held_out_error for step in fitted.history] for fitted in (on_host, placed)]
    assert len(errors[0]) == 2
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)
    assert np.allclose(placed.means_, on_host.means_, atol=1e-3)
