"""The first M heads of a longer draw with the same seed are the same heads, whatever the block
size.
"""

from itertools import pairwise

import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.features import attention_features, feature_blocks
from keyhole.attention.heads import (
    GaussianHeads,
    HeadDraw,
    sample_mlp_weights,
    standard_normals,
)

DIM = 4


class StreamedHeads:
    """The broken twin: heads from one generator, restarted for every block."""

    def sample(self, n_heads, dim, seed, *, start=0):
        return np.random.default_rng([seed, start]).normal(
            scale=0.5, size=(n_heads, dim + 1, dim + 1)
        )


class TransposedHeads:
    """Another: heads are the last axis of the draw, so that their number moves all of them."""

    def sample(self, n_heads, dim, seed, *, start=0):
        numbers = np.random.default_rng(seed).normal(size=(dim + 1, dim + 1, start + n_heads))
        return np.moveaxis(numbers, -1, 0)[start:]


DISTRIBUTIONS = [
    GaussianHeads(),
    GaussianHeads(1.0),
    GaussianHeads(np.arange(25.0).reshape(5, 5), 0.3),
]
BROKEN = [StreamedHeads(), TransposedHeads()]


def draws_nest(distribution, seed, rng):
    whole = distribution.sample(61, DIM, seed)
    cuts = np.r_[0, np.sort(rng.choice(np.arange(1, 61), size=5, replace=False)), 61]
    blocks = [distribution.sample(int(b - a), DIM, seed, start=int(a)) for a, b in pairwise(cuts)]
    prefixes = all(
        np.array_equal(distribution.sample(m, DIM, seed), whole[:m]) for m in (1, 2, 16, 60)
    )
    return prefixes and np.array_equal(np.concatenate(blocks), whole)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=repr)
def test_draws_nest(distribution, seed, rng):
    assert draws_nest(distribution, seed, rng)


@pytest.mark.parametrize("distribution", BROKEN, ids=["streamed", "transposed"])
def test_draws_that_do_not_nest_are_seen(distribution, seed, rng):
    assert not draws_nest(distribution, seed, rng)


def test_mlp_weights_nest(seed):
    whole = sample_mlp_weights(40, 3, DIM, seed)
    assert np.array_equal(sample_mlp_weights(7, 3, DIM, seed), whole[:7])
    assert np.array_equal(sample_mlp_weights(33, 3, DIM, seed, start=7), whole[7:])


@pytest.mark.parametrize("n_entries", [1, 3, 4, 5, 25])
def test_a_draw_can_begin_anywhere(seed, n_entries):
    far = 10**12
    assert np.array_equal(
        standard_normals(3, n_entries, seed, start=far)[2],
        standard_normals(1, n_entries, seed, start=far + 2)[0],
    )
    # items neither overlap nor repeat
    numbers = standard_normals(200, n_entries, seed).ravel()
    assert len(np.unique(numbers)) == len(numbers)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=repr)
def test_features_of_nested_draws_nest(distribution, seed, rng):
    batch = kh.SetBatch([rng.normal(size=(k, DIM)) for k in (3, 8)], rng.normal(size=(2, DIM)))
    few, many = (attention_features(batch, HeadDraw(distribution, m, DIM, seed)) for m in (10, 50))
    # the same heads, each weighed by M^{-1/2}
    assert np.allclose(many[:, : 10 * 5] * np.sqrt(5), few, rtol=0, atol=1e-14 * abs(few).max())


def test_heads_regenerated_in_blocks_are_the_stored_ones(seed, rng):
    batch, distribution = kh.SetBatch(rng.normal(size=(3, 4, DIM))), GaussianHeads()
    stored = attention_features(batch, distribution.sample(30, DIM, seed))
    blocks = feature_blocks(batch, HeadDraw(distribution, 30, DIM, seed), memory_budget=4000)
    assert np.array_equal(np.hstack([phi for _, phi in blocks]), stored)
