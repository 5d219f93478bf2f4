"""A random layer and its infinite limit are two faces of one object: E[ΦΦᵀ] = K, and ‖ΦΦᵀ − K‖
falls like M^(−1/2).
"""

import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.heads import sample_mlp_weights

DIM = 3
ALLOWED = 5.0  # standard errors


def arbitrary_mean(seed):
    return np.random.default_rng(seed + 1000).normal(scale=0.7, size=(DIM + 1, DIM + 1))


DISTRIBUTIONS = {
    "zero mean": lambda seed: kh.GaussianHeads(),
    "identity mean": lambda seed: kh.GaussianHeads(mean=1.0),
    "arbitrary mean": lambda seed: kh.GaussianHeads(mean=arbitrary_mean(seed), scale=0.8),
}


@pytest.fixture(params=["query", "no query"])
def sets(request, rng):
    keys = [rng.normal(size=(k, DIM)) for k in (1, 4, 2, 7, 3)]
    keys.append(keys[1][::-1])  # a duplicate: ρ = 1 off the diagonal
    query = rng.normal(size=(6, DIM))
    query[5] = query[1]
    return kh.SetBatch(keys, query if request.param == "query" else None)


def standard_errors_off(per_head, kernel):
    """How far the mean over heads is from the kernel, in standard errors, at the worst pair."""
    error = per_head.std(axis=0, ddof=1) / np.sqrt(len(per_head))
    return float(np.max(np.abs(per_head.mean(axis=0) - kernel) / error))


def products_per_head(sets, distribution, activation, n_heads, seed):
    phi = kh.attention_features(sets, distribution.sample(n_heads, DIM, seed), activation)
    phi = phi.reshape(len(sets), n_heads, DIM + 1) * np.sqrt(n_heads)
    return np.einsum("ame,bme->mab", phi, phi)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("activation", ["relu", "linear", "square", "step"])
def test_the_mean_over_heads_is_the_kernel(sets, distribution, activation, seed):
    distribution = DISTRIBUTIONS[distribution](seed)
    products = products_per_head(sets, distribution, activation, 20_000, seed)
    off = standard_errors_off(
        products, kh.attention_kernel(sets, heads=distribution, activation=activation)
    )
    assert off < ALLOWED, f"off by {off:.1f} standard errors, {ALLOWED} allowed"


def test_exponential_scores_meet_their_kernel(sets, seed):
    distribution = kh.GaussianHeads(
        mean=0.5, scale=0.1
    )  # light tails, or the mean over heads would not be Gaussian
    products = products_per_head(sets, distribution, "exp", 20_000, seed)
    assert (
        standard_errors_off(
            products, kh.attention_kernel(sets, heads=distribution, activation="exp")
        )
        < ALLOWED
    )


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_kernel_one_percent_off_would_be_seen(sets, distribution, seed):
    distribution = DISTRIBUTIONS[distribution](seed)
    products = products_per_head(sets, distribution, "relu", 200_000, seed)
    broken = 1.02 * kh.attention_kernel(sets, heads=distribution)
    assert standard_errors_off(products, broken) > ALLOWED


def test_the_wrong_distribution_would_be_seen(sets, seed):
    # not the identity mean: against the constant query it has mean score zero, and is no other head
    # distribution
    products = products_per_head(
        sets, kh.GaussianHeads(mean=arbitrary_mean(seed)), "relu", 20_000, seed
    )
    assert standard_errors_off(products, kh.attention_kernel(sets)) > ALLOWED


def mlp_products(sets, width, seed):
    weights = sample_mlp_weights(width, n_keys=4, dim=DIM, seed=seed)
    phi = kh.mlp_features(sets, weights) * np.sqrt(width)
    return np.einsum("am,bm->mab", phi, phi)


@pytest.mark.parametrize("with_query", [True, False])
def test_the_mean_over_hidden_units_is_the_mlp_kernel(rng, seed, with_query):
    sets = kh.SetBatch(
        rng.normal(size=(5, 4, DIM)), rng.normal(size=(5, DIM)) if with_query else None
    )
    products = mlp_products(sets, 50_000, seed)
    kernel = kh.mlp_kernel(sets)
    assert standard_errors_off(products, kernel) < ALLOWED
    assert standard_errors_off(products, 1.05 * kernel) > ALLOWED


def distance_slope(distances, counts):
    """Slope of log distance against log count."""
    return float(np.polyfit(np.log(counts), np.log(distances), 1)[0])


def mean_distances(sets, distribution, kernel, counts, seed, repeats=12):
    """Root mean square over repetitions of the Frobenius distance to the kernel, for nested numbers
    of heads.
    """
    squared = np.zeros(len(counts))
    for repeat in range(repeats):
        products = products_per_head(sets, distribution, "relu", counts[-1], 1000 * seed + repeat)
        sums = np.cumsum(products, axis=0)
        for i, count in enumerate(counts):
            squared[i] += np.sum((sums[count - 1] / count - kernel) ** 2) / repeats
    return np.sqrt(squared)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_distance_falls_like_one_over_root_heads(sets, distribution, seed):
    distribution = DISTRIBUTIONS[distribution](seed)
    counts = [2**k for k in range(4, 13)]
    kernel = kh.attention_kernel(sets, heads=distribution)
    slope = distance_slope(mean_distances(sets, distribution, kernel, counts, seed), counts)
    assert abs(slope + 0.5) < 0.1, f"slope {slope:.3f}"
    broken = distance_slope(mean_distances(sets, distribution, 0.8 * kernel, counts, seed), counts)
    assert broken > -0.4, f"a wrong kernel must stop the fall: slope {broken:.3f}"
