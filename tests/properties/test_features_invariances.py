"""Features belong to a set: not to the order or the count of its keys, its neighbours, or how work
is cut.

Each property is a number of roundings between two ways of computing the same features, and
each has a broken twin: features that look alike and do not obey it.
"""

import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.activations import POINTWISE, SOFTMAX
from keyhole.attention.features import (
    apply_values,
    attention_features,
    feature_blocks,
)
from keyhole.attention.heads import GaussianHeads, HeadDraw, sample_mlp_weights
from keyhole.attention.mlp import mlp_features

DIM, N_HEADS = 5, 37
SMOOTH = [
    a for a in (*POINTWISE, SOFTMAX) if a != "step"
]  # a step may turn one rounding into a whole weight
ALLOWED = 50  # roundings; sums of some 80 terms, and scores of up to 20 under an exponential
BROKEN = 1e6


def heads(seed):
    return GaussianHeads(0.5).sample(N_HEADS, DIM, seed)


def sets(rng, lengths, query=True):
    keys = [rng.normal(size=(k, DIM)) for k in lengths]
    return keys, rng.normal(size=(len(keys), DIM)) if query else None


def roundings(a, b):
    """Largest difference in units of float64 rounding of the largest feature of each set."""
    size = np.maximum(abs(a), abs(b)).max(axis=1, keepdims=True)
    return float((abs(a - b) / (np.finfo(float).eps * size)).max())


# ---- the order of keys ---------------------------------------------------------------------------


def moved_by_permutation(features, rng, lengths):
    keys, query = sets(rng, lengths)
    shuffled = [k[rng.permutation(len(k))] for k in keys]
    return roundings(features(kh.SetBatch(keys, query)), features(kh.SetBatch(shuffled, query)))


@pytest.mark.parametrize("activation", SMOOTH)
def test_the_order_of_keys_does_not_matter(rng, seed, activation):
    lengths = rng.integers(2, 80, size=12)
    assert (
        moved_by_permutation(lambda b: attention_features(b, heads(seed), activation), rng, lengths)
        < ALLOWED
    )


def test_the_order_of_keys_matters_to_the_mlp(rng, seed):
    weights = sample_mlp_weights(50, n_keys=30, dim=DIM, seed=seed)
    assert moved_by_permutation(lambda b: mlp_features(b, weights), rng, [30] * 12) > BROKEN


def test_the_order_of_keys_would_matter_if_position_did(rng, seed):
    def positional(batch):
        shift = np.concatenate([np.arange(k) for k in batch.lengths])[:, None]
        moved = np.split(batch.tokens + 1e-6 * shift, batch.offsets[1:-1])
        return attention_features(kh.SetBatch(moved, batch.query), heads(seed))

    assert moved_by_permutation(positional, rng, [30] * 12) > BROKEN


# ---- the count of keys ---------------------------------------------------------------------------


def moved_by_duplication(features, rng, times):
    keys, query = sets(rng, rng.integers(1, 40, size=12))
    repeated = [np.repeat(k, times, axis=0) for k in keys]
    return roundings(features(kh.SetBatch(keys, query)), features(kh.SetBatch(repeated, query)))


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("activation", SMOOTH)
def test_duplicating_every_key_changes_nothing(rng, seed, activation, times):
    assert (
        moved_by_duplication(lambda b: attention_features(b, heads(seed), activation), rng, times)
        < ALLOWED
    )


def test_duplicating_every_key_would_change_a_sum(rng, seed):
    def summed(batch):
        return attention_features(batch, heads(seed)) * batch.lengths[:, None]

    assert moved_by_duplication(summed, rng, 2) > BROKEN


def test_duplicating_one_key_does_change_the_features(rng, seed):
    keys, query = sets(rng, [4, 5, 6])
    longer = [np.r_[k, k[:1]] for k in keys]
    a, b = (attention_features(kh.SetBatch(k, query), heads(seed)) for k in (keys, longer))
    assert roundings(a, b) > BROKEN


# ---- the neighbours ------------------------------------------------------------------------------


def moved_by_splitting(features, rng, query):
    batch = kh.SetBatch(*sets(rng, rng.integers(1, 70, size=30), query))
    cuts = np.sort(rng.choice(np.arange(1, 30), size=4, replace=False))
    rows = np.split(np.arange(30), cuts)
    parts = np.concatenate([features(batch[r[0] : r[-1] + 1]) for r in rows])
    order = rng.permutation(30)
    whole = features(batch)
    return max(roundings(parts, whole), roundings(features(batch[order]), whole[order]))


@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("activation", [*POINTWISE, SOFTMAX])
def test_splitting_a_batch_changes_no_bit(rng, seed, activation, query):
    assert (
        moved_by_splitting(lambda b: attention_features(b, heads(seed), activation), rng, query)
        == 0
    )


@pytest.mark.parametrize("n_outputs", [1, 20])
def test_splitting_a_batch_changes_no_output(rng, seed, n_outputs):
    values = rng.normal(size=(N_HEADS * (DIM + 1), n_outputs))

    def outputs(
        batch,
    ):  # beside the size of the terms they sum, so that differences are in units of it
        size = abs(attention_features(batch, heads(seed))) @ abs(values)
        return np.hstack(
            [apply_values(batch, heads(seed), values), size.max(axis=1, keepdims=True)]
        )

    assert moved_by_splitting(outputs, rng, True) < ALLOWED


def test_splitting_a_batch_would_change_padded_features(rng, seed):
    def padded(batch):  # dividing by the longest set of the batch, as a padded mean does
        return (
            attention_features(batch, heads(seed)) * (batch.lengths / batch.lengths.max())[:, None]
        )

    assert moved_by_splitting(padded, rng, True) > BROKEN


# ---- the blocks ----------------------------------------------------------------------------------


def by_blocks(batch, draw, budget):
    return np.hstack([phi for _, phi in feature_blocks(batch, draw, memory_budget=budget)])


def rescaled_blocks(batch, draw, budget):
    """The broken twin: every block is scaled by its own number of heads."""
    parts = list(feature_blocks(batch, draw, memory_budget=budget))
    return np.hstack([phi * np.sqrt(len(draw) / (part.stop - part.start)) for part, phi in parts])


def moved_by_blocks(blocked, rng, seed):
    batch, draw = (
        kh.SetBatch(*sets(rng, rng.integers(1, 70, size=20))),
        HeadDraw(GaussianHeads(), 150, DIM, seed),
    )
    whole = attention_features(batch, draw)
    return max(roundings(blocked(batch, draw, budget), whole) for budget in (1, 30_000, 70_000))


def test_the_size_of_blocks_changes_no_bit(rng, seed):
    assert moved_by_blocks(by_blocks, rng, seed) == 0


def test_the_size_of_blocks_would_show_in_their_scale(rng, seed):
    assert moved_by_blocks(rescaled_blocks, rng, seed) > BROKEN


def test_the_size_of_tiles_and_tasks_changes_nothing_but_rounding(rng, seed, monkeypatch):
    batch, draw = (
        kh.SetBatch(*sets(rng, rng.integers(1, 70, size=20))),
        HeadDraw(GaussianHeads(), 150, DIM, seed),
    )
    whole = attention_features(batch, draw)
    for name, size in [("_TILE", 1), ("_CACHE", 1), ("_TASK", 1e4)]:
        monkeypatch.setattr(f"keyhole.attention.features.{name}", size)
        assert roundings(attention_features(batch, draw), whole) < ALLOWED
