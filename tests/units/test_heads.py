import copy
import math
import pickle

import numpy as np
import pytest
from jaxtyping import config
from scipy.special import ndtr, ndtri

from keyhole.attention.heads import (
    GaussianHeads,
    HeadDistribution,
    HeadDraw,
    identity_mean,
    sample_mlp_weights,
    standard_normals,
)

DIM = 3
DISTRIBUTIONS = [
    GaussianHeads(),
    GaussianHeads(1.0),
    GaussianHeads(np.arange(16.0).reshape(4, 4), 0.1),
    GaussianHeads((0.3, 20.0), 0.1),
]


def z_scores(samples, mean):
    """Distance of each column mean from ``mean``, in its own standard errors."""
    return (samples.mean(axis=0) - mean) / (samples.std(axis=0) / np.sqrt(len(samples)))


# ---- the head distributions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "scale"), [(0.0, 0.5), (1.0, 0.5), (-2.5, 0.1), (np.arange(16.0).reshape(4, 4), 3.0)]
)
def test_gaussian_entries_have_the_mean_and_scale_asked_for(seed, mean, scale):
    heads = GaussianHeads(mean, scale).sample(4000, DIM, seed).reshape(4000, -1)
    expected = (mean * identity_mean(DIM) if np.ndim(mean) == 0 else mean).ravel()
    assert np.abs(z_scores(heads, expected)).max() < 5
    assert np.abs(z_scores((heads - expected) ** 2, scale**2)).max() < 5
    # different entries of one head are uncorrelated
    noise = (heads - expected) / scale
    assert np.abs(z_scores(noise[:, :-1] * noise[:, 1:], 0.0)).max() < 5


def test_a_distribution_with_the_wrong_scale_would_be_seen(seed):
    heads = GaussianHeads(scale=0.6).sample(4000, DIM, seed).reshape(4000, -1)
    assert np.abs(z_scores(heads**2, 0.25)).max() > 5


def test_strengths_are_drawn_for_each_head_and_pair_of_coordinates(seed):
    heads = GaussianHeads((0.25, 16.0), 0.1, pairs=[(0, 1), (1, 0)]).sample(
        4000, 2, seed, query_dim=3
    )
    paired = np.zeros((4, 3), bool)
    paired[[0, 1], [1, 0]] = True
    drawn = np.log2(heads[:, paired])
    assert drawn.min() >= -2
    assert drawn.max() <= 4
    assert np.abs(z_scores(drawn, 1.0)).max() < 5
    assert np.abs(z_scores((drawn - 1.0) ** 2, 36 / 12)).max() < 5
    assert np.abs(z_scores(drawn[:, :1] * drawn[:, 1:], 1.0)).max() < 5
    assert np.abs(z_scores(heads[:, ~paired] ** 2, 0.01)).max() < 5


@pytest.mark.parametrize("dim", [1, 4, 9])
def test_scores_of_unit_tokens_have_unit_variance(seed, rng, dim):
    tokens = rng.normal(size=(2, dim))
    query, key = np.c_[tokens / np.linalg.norm(tokens, axis=1, keepdims=True), [1, 1]]
    constant = np.append(np.zeros(dim), np.sqrt(2))
    heads = GaussianHeads().sample(4000, dim, seed)
    for left in (query, constant):
        scores = (heads @ key @ left)[:, None]
        assert np.abs(z_scores(scores, 0.0)).max() < 5
        assert np.abs(z_scores(scores**2, 1.0)).max() < 5
    biased = (GaussianHeads(1.0).sample(4000, dim, seed) @ key @ query)[:, None]
    assert np.abs(z_scores(biased, query[:-1] @ key[:-1])).max() < 5


def test_mlp_weights_have_variance_one_over_n_plus_two(seed):
    weights = sample_mlp_weights(3000, n_keys=2, dim=3, seed=seed)
    assert weights.shape == (3000, 10)
    assert np.abs(z_scores(weights, 0.0)).max() < 5
    assert np.abs(z_scores(weights**2, 1 / 4)).max() < 5


def test_normals_are_normal(seed):
    x = np.sort(standard_normals(1, 20_000, seed)[0])
    gap = np.abs(ndtr(x) - (np.arange(20_000) + 0.5) / 20_000).max()
    assert gap * np.sqrt(20_000) < 2.5  # Kolmogorov: exceeded with probability 7e-6
    assert np.isfinite(x).all()


def test_seeds_give_different_heads(seed):
    a, b = (standard_normals(50, 16, s) for s in (seed, seed + 1))
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * np.sqrt(a.size) < 5
    assert abs(np.corrcoef(a[:-1].ravel(), a[1:].ravel())[0, 1]) * np.sqrt(a.size) < 5


def test_a_seed_is_the_same_draw_on_every_machine():
    # pinned: a change here changes every fitted model that was stored by its seed
    pinned = GaussianHeads().sample(2, 1, 0)[1]
    expected = [
        [1.0180963955404865, -0.32773297166312326],
        [0.7593968077055616, -0.438851174560204],
    ]
    assert np.allclose(pinned, expected, rtol=1e-13, atol=0)


# ---- HeadDraw ------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_draw_is_the_sample_in_blocks(seed, distribution):
    draw = HeadDraw(distribution, n_heads=30, dim=DIM, seed=seed)
    assert len(draw) == 30
    assert np.array_equal(draw.block(0, 30), distribution.sample(30, DIM, seed))
    assert np.array_equal(draw.block(7, 19), distribution.sample(30, DIM, seed)[7:19])


@pytest.mark.parametrize(("start", "stop"), [(0, 31), (-1, 3), (5, 5), (6, 5), (30, 31)])
def test_a_block_outside_the_draw_is_named(start, stop):
    with pytest.raises(IndexError, match=f"block {start}:{stop} must be a part of heads 0 … 29"):
        HeadDraw(GaussianHeads(), n_heads=30, dim=DIM, seed=0).block(start, stop)


class Doubled:
    """A head distribution of one's own needs no more than ``sample``."""

    def sample(self, n_heads, dim, seed, *, start=0):
        return 2 * GaussianHeads().sample(n_heads, dim, seed, start=start)


def test_any_distribution_with_sample_can_be_drawn_from():
    assert isinstance(Doubled(), HeadDistribution)
    draw = HeadDraw(Doubled(), n_heads=4, dim=DIM, seed=0)
    assert np.array_equal(draw.block(1, 3), 2 * GaussianHeads().sample(4, DIM, 0)[1:3])


# ---- parameters, as scikit-learn wants them ------------------------------------------------------


def test_parameters_can_be_read_and_set():
    distribution = GaussianHeads(mean=1.0)
    assert distribution.get_params() == {"mean": 1.0, "scale": 0.5, "pairs": None}
    assert distribution.set_params(scale=0.25) is distribution
    assert distribution == GaussianHeads(1.0, 0.25)
    with pytest.raises(
        ValueError, match="GaussianHeads has no parameter 'rank': it has mean, pairs, scale"
    ):
        distribution.set_params(rank=3)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_head_distributions_compare_by_their_parameters(distribution):
    assert copy.deepcopy(distribution) == distribution
    assert pickle.loads(pickle.dumps(distribution)) == distribution
    assert sum(distribution == other for other in DISTRIBUTIONS) == 1
    assert distribution != 3


def test_repr():
    assert repr(GaussianHeads(1.0)) == "GaussianHeads(mean=1.0, scale=0.5)"
    assert repr(GaussianHeads(np.eye(4))) == "GaussianHeads(mean=array(4, 4), scale=0.5)"


def test_a_zero_mean_is_no_mean():
    assert GaussianHeads(0.0).moments(DIM) == (None, 0.5)
    assert GaussianHeads(np.zeros((4, 4))).moments(DIM) == (None, 0.5)
    mean, scale = GaussianHeads(2, np.float32(0.25)).moments(DIM)
    assert np.array_equal(mean, np.diag([2.0, 2.0, 2.0, 0.0]))
    assert scale == 0.25


# ---- bad input -----------------------------------------------------------------------------------

BAD = [
    (
        lambda: GaussianHeads(np.eye(3)).sample(2, DIM, 0),
        ValueError,
        (
            r"`mean` must be a number or a \(D, D\) matrix with D = d \+ 1: got shape \(3, 3\) .* "
            r"so D = 4"
        ),
    ),
    (
        lambda: GaussianHeads(np.full((4, 4), np.nan)).sample(2, DIM, 0),
        ValueError,
        r"`mean` must be finite: found NaN .* at index \(0, 0\)",
    ),
    (lambda: GaussianHeads(np.nan).sample(2, DIM, 0), ValueError, "`mean` must be finite: got nan"),
    (lambda: GaussianHeads(np.inf).sample(2, DIM, 0), ValueError, "`mean` must be finite: got inf"),
    (
        lambda: GaussianHeads(scale=0.0).sample(2, DIM, 0),
        ValueError,
        "`scale` must be larger than 0: got 0",
    ),
    (
        lambda: GaussianHeads(scale=-1.0).sample(2, DIM, 0),
        ValueError,
        "`scale` must be larger than 0",
    ),
    (
        lambda: GaussianHeads(scale=np.nan).sample(2, DIM, 0),
        ValueError,
        "`scale` must be finite: got nan",
    ),
    (
        lambda: GaussianHeads((0.0, 1.0)).sample(2, DIM, 0),
        ValueError,
        r"`mean\[0\]` must be larger than 0: got 0",
    ),
    (
        lambda: GaussianHeads((3.0, 1.0)).sample(2, DIM, 0),
        ValueError,
        r"\(low, high\) with low ≤ high: got \(3, 1\)",
    ),
    (
        lambda: GaussianHeads((1.0, 3.0)).moments(DIM),
        ValueError,
        "no kernel in closed form: use a finite `n_heads`",
    ),
    (lambda: GaussianHeads().sample(0, DIM, 0), ValueError, "`n_heads` must be at least 1: got 0"),
    (
        lambda: GaussianHeads().sample(-3, DIM, 0),
        ValueError,
        "`n_heads` must be at least 1: got -3",
    ),
    (lambda: GaussianHeads().sample(2, 0, 0), ValueError, "`dim` must be at least 1: got 0"),
    (lambda: GaussianHeads().sample(2, DIM, -1), ValueError, "`seed` must be at least 0: got -1"),
    (
        lambda: GaussianHeads().sample(2, DIM, 0, start=-1),
        ValueError,
        "`start` must be at least 0: got -1",
    ),
    (
        lambda: HeadDraw(GaussianHeads(), 0, DIM, 0),
        ValueError,
        "`n_heads` must be at least 1: got 0",
    ),
    (lambda: HeadDraw(GaussianHeads(), 2, 0, 0), ValueError, "`dim` must be at least 1: got 0"),
    (
        lambda: HeadDraw(GaussianHeads(), 2, DIM, -1),
        ValueError,
        "`seed` must be at least 0: got -1",
    ),
    (lambda: sample_mlp_weights(0, 2, DIM, 0), ValueError, "`width` must be at least 1: got 0"),
    (lambda: sample_mlp_weights(2, 0, DIM, 0), ValueError, "`n_keys` must be at least 1: got 0"),
    (lambda: sample_mlp_weights(2, 2, 0, 0), ValueError, "`dim` must be at least 1: got 0"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD)
def test_bad_numbers_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


WRONG_TYPE = [
    (lambda: GaussianHeads("a").sample(2, DIM, 0), "`mean` must be a number: got 'a' of type str"),
    (
        lambda: GaussianHeads(scale=None).sample(2, DIM, 0),
        "`scale` must be a number: got None of type",
    ),
    (
        lambda: GaussianHeads().sample(2.0, DIM, 0),
        "`n_heads` must be an integer .* got 2.0 of type float",
    ),
    (
        lambda: GaussianHeads().sample(True, DIM, 0),
        "`n_heads` must be an integer .* got True of type bool",
    ),
    (
        lambda: GaussianHeads().sample(2, DIM, None),
        "`seed` must be an integer of at least 0: got None",
    ),
    (
        lambda: HeadDraw(3, 2, DIM, 0),
        r"`heads` must be a head distribution, with a method sample.*: got 3. Use kh.",
    ),
    (
        lambda: HeadDraw(GaussianHeads, 2, DIM, 0),
        r"`heads` must be a head distribution.*got <class .*GaussianHeads",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG_TYPE)
def test_wrong_types_are_named(unchecked, call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.fixture
def unchecked():
    """Turn the shape checks of the tests off, so that the library's own answer to a wrong type is
    seen.
    """
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def test_stored_heads_are_the_same_heads():
    draw = HeadDraw(GaussianHeads(mean=1.0), n_heads=7, dim=3, seed=5)
    stored = draw.stored(2**20)
    assert stored is not draw
    np.testing.assert_array_equal(stored.block(2, 6), draw.block(2, 6))
    assert draw.stored(8 * 7 * 16 - 1) is draw, "what exceeds the budget is drawn again"


@pytest.mark.parametrize("n_entries", [7, 40, 300, 16_390])
@pytest.mark.parametrize("skip", [0, 3, 255, 257])
def test_normals_are_those_of_the_plain_formula(seed, n_entries, skip):
    """All words of every item are drawn, and those of what is left out are thrown away."""
    skip = min(skip, n_entries - 1)
    words_per_item = 4 * math.ceil(n_entries / 4)
    key = np.random.SeedSequence(seed).generate_state(2, np.uint64)
    generator = np.random.Philox(key=key)
    generator.advance(2 * words_per_item // 4)
    bits = generator.random_raw(5 * words_per_item).reshape(5, -1)[:, skip:n_entries]
    expected = ndtri(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)
    normals = standard_normals(5, n_entries, seed, start=2, skip=skip)
    np.testing.assert_array_equal(normals, expected)
