"""Queries of another dimension than the rows: the same layer as for queries of their kind."""

import math

import numpy as np
import pytest
from paper import paper_regressor

import keyhole as kh
from keyhole.attention.heads import HeadDraw, identity_mean, standard_normals

DIM, ASKED = 3, 5


def draw_sets(rng, n=7, asked=ASKED):
    keys = [0.6 * rng.normal(size=(int(rng.integers(1, 6)), DIM)) for _ in range(n)]
    return kh.SetBatch(keys, 0.6 * rng.normal(size=(n, asked)))


def distributions(rng, asked=ASKED):
    return {
        "zero mean": kh.GaussianHeads(),
        "identity": kh.GaussianHeads(mean=1.0),
        "pairs": kh.GaussianHeads(mean=0.8, scale=0.4, pairs=[(asked - 1, 0), (0, DIM - 1)]),
        "matrix": kh.GaussianHeads(mean=rng.normal(size=(asked + 1, DIM + 1)) / 3, scale=0.4),
    }


@pytest.mark.parametrize("asked", [1, 2, 9])
@pytest.mark.parametrize("name", ["zero mean", "identity", "pairs", "matrix"])
def test_zeros_for_what_is_missing_change_nothing(asked, name, rng):
    """Query or rows padded with zeros, and W with rows for them, are the same layer and kernel."""
    sets, distribution = draw_sets(rng, asked=asked), distributions(rng, asked)[name]
    width = max(asked, DIM)
    keys = [np.pad(one.tokens, ((0, 0), (0, width - DIM))) for one in sets]
    square = kh.SetBatch(keys, np.pad(sets.query, ((0, 0), (0, width - asked))))
    mean, scale = distribution.moments(DIM, asked)
    wide = np.zeros((width + 1, width + 1))
    rows, columns = [*range(asked), width], [*range(DIM), width]
    wide[np.ix_(rows, columns)] = 0.0 if mean is None else mean
    for activation in ("relu", "step", "exp"):
        kernel = kh.attention_kernel(sets, None, distribution, activation)
        other = kh.attention_kernel(square, None, kh.GaussianHeads(wide, scale), activation)
        assert np.allclose(kernel, other, rtol=1e-12, atol=1e-14)
    heads = distribution.sample(6, DIM, 3, query_dim=asked)
    padded = np.zeros((6, width + 1, width + 1))
    padded[:, np.array(rows)[:, None], columns] = heads
    features = kh.attention_features(sets, heads).reshape(len(sets), 6, -1)
    other = kh.attention_features(square, padded).reshape(len(sets), 6, -1)[:, :, columns]
    assert np.allclose(features, other, rtol=1e-12, atol=1e-14)


def test_order_of_rows_and_slices_change_nothing(rng):
    sets, distribution = draw_sets(rng, 30), kh.GaussianHeads(mean=1.0)
    draw = HeadDraw(distribution, 40, DIM, 1, ASKED)
    whole, kernel = kh.attention_features(sets, draw), kh.attention_kernel(sets, heads=distribution)
    shuffled = kh.SetBatch([rng.permutation(one.tokens) for one in sets], sets.query)
    assert np.allclose(kh.attention_features(shuffled, draw), whole, rtol=1e-12, atol=1e-14)
    assert np.allclose(kh.attention_kernel(shuffled, heads=distribution), kernel, rtol=1e-12)
    parts = [kh.attention_features(sets[i : i + 7], draw) for i in range(0, 30, 7)]
    assert np.array_equal(np.concatenate(parts), whole)


def test_draws_nest():
    distribution = kh.GaussianHeads(mean=1.0)
    heads = distribution.sample(9, DIM, 4, query_dim=ASKED)
    assert heads.shape == (9, ASKED + 1, DIM + 1)
    assert np.array_equal(heads[3:7], distribution.sample(4, DIM, 4, ASKED, start=3))
    square = distribution.sample(5, DIM, 4, query_dim=DIM)
    assert np.array_equal(square, distribution.sample(5, DIM, 4))


@pytest.mark.parametrize("dim", [2, 40])
def test_without_a_query_the_last_row_is_drawn_alone(dim):
    mean = np.arange((dim + 1.0) ** 2).reshape(dim + 1, dim + 1)
    whole = HeadDraw(kh.GaussianHeads(mean=mean, scale=0.3), 11, dim, 5)
    assert np.array_equal(whole.seen_by(query=False).block(2, 9), whole.block(2, 9)[:, -1:])
    skipped = standard_normals(7, 1003, 3, start=2, skip=901)
    assert np.array_equal(skipped, standard_normals(7, 1003, 3, start=2)[:, 901:])


def test_pairs_of_coordinates():
    assert np.array_equal(identity_mean(2, 3), [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
    with pytest.raises(ValueError, match=r"`pairs` must name coordinates.*got \(3, 0\)"):
        kh.GaussianHeads(1.0, pairs=[(3, 0)]).sample(2, 2, 0, query_dim=3)
    with pytest.raises(ValueError, match=r"`pairs` must be \(query coordinate, key coordinate\)"):
        kh.GaussianHeads(1.0, pairs=[0.5]).sample(2, 2, 0)


def test_queries_are_scaled_on_their_own(rng):
    sets, y = draw_sets(rng, 60), rng.normal(size=60)
    moved = kh.SetBatch([one.tokens * [1, 10, 3] for one in sets], sets.query * 100 + 7)
    one, other = (
        paper_regressor(math.inf, alpha=0.1, scaling="standard").fit(x, y).predict(x)
        for x in (sets, moved)
    )
    assert np.allclose(other, one, rtol=1e-7, atol=1e-9)


def test_sets_join_only_with_queries_of_one_dimension(rng):
    sets = draw_sets(rng)
    assert np.array_equal(kh.concatenate([sets[:2], sets[2:]]).query, sets.query)
    with pytest.raises(ValueError, match=r"a query of one dimension: got \[2, 5\]"):
        kh.concatenate([sets, draw_sets(rng, asked=2)])
