"""What an exact kernel must not notice, and what it must be: symmetric, positive semidefinite,
blind to key order.
"""

import numpy as np
import pytest

import keyhole as kh

ROUNDING = 1e-13  # relative to the geometric mean of the diagonal entries

DISTRIBUTIONS = {
    "zero mean": kh.GaussianHeads(),
    "identity mean": kh.GaussianHeads(mean=1.0),
    "arbitrary mean": kh.GaussianHeads(mean=np.linspace(-1.0, 1.5, 25).reshape(5, 5), scale=0.3),
}
ACTIVATIONS = ("relu", "linear", "square", "step", "exp")


@pytest.fixture(params=DISTRIBUTIONS)
def distribution(request):
    return DISTRIBUTIONS[request.param]


@pytest.fixture
def keys(rng):
    """Ragged sets, one of them longer than a block of rows and all chunks of columns, and one of a
    single key.
    """
    return [rng.normal(size=(n, 4)) * 0.5 for n in (1, 3, 17, 5, 600, 2, 130, 1, 8)]


@pytest.fixture
def query(rng, keys):
    return rng.normal(size=(len(keys), 4)) * 0.5


def difference(kernel, other):
    """The largest difference, in units of the diagonal of the second."""
    scale = np.sqrt(np.diag(other))
    return np.max(np.abs(kernel - other) / np.outer(scale, scale))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_order_of_keys_does_not_matter(keys, query, distribution, activation, rng):
    shuffled = [rng.permutation(x) for x in keys]
    kernel = kh.attention_kernel(kh.SetBatch(keys, query), None, distribution, activation)
    other = kh.attention_kernel(kh.SetBatch(shuffled, query), None, distribution, activation)
    assert difference(other, kernel) < ROUNDING


def test_the_order_of_keys_matters_to_the_mlp(rng):
    """The broken twin: a kernel on the flattened keys."""
    keys = rng.normal(size=(5, 6, 4))
    kernel = kh.mlp_kernel(kh.SetBatch(keys))
    shuffled = kh.mlp_kernel(kh.SetBatch(np.stack([rng.permutation(x) for x in keys])))
    assert difference(shuffled, kernel) > 1e3 * ROUNDING


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_writing_every_key_twice_changes_nothing(keys, query, distribution, activation):
    doubled = [np.concatenate([x, x]) for x in keys]
    kernel = kh.attention_kernel(kh.SetBatch(keys, query), None, distribution, activation)
    other = kh.attention_kernel(kh.SetBatch(doubled, query), None, distribution, activation)
    assert difference(other, kernel) < ROUNDING


def test_a_sum_instead_of_a_mean_notices_doubled_keys(keys, query):
    """The broken twin: without the 1/N of both sides."""
    lengths = np.array([len(x) for x in keys])
    kernel = kh.attention_kernel(kh.SetBatch(keys, query)) * np.outer(lengths, lengths)
    doubled = kh.attention_kernel(kh.SetBatch([np.concatenate([x, x]) for x in keys], query))
    assert difference(doubled * np.outer(2 * lengths, 2 * lengths), kernel) > 1


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_batches_and_budgets_change_nothing(keys, query, distribution, activation):
    sets = kh.SetBatch(keys, query)
    kernel = kh.attention_kernel(sets, None, distribution, activation)
    parts = np.block(
        [
            [
                kh.attention_kernel(sets[:4], sets[:5], distribution, activation),
                kh.attention_kernel(sets[:4], sets[5:], distribution, activation),
            ],
            [
                kh.attention_kernel(sets[4:], sets[:5], distribution, activation),
                kh.attention_kernel(sets[4:], sets[5:], distribution, activation),
            ],
        ]
    )
    assert difference(parts, kernel) < ROUNDING
    tight = kh.attention_kernel(sets, None, distribution, activation, memory_budget=10_000)
    assert difference(tight, kernel) < ROUNDING


def test_batches_joined_in_the_wrong_order_are_caught(keys, query):
    sets = kh.SetBatch(keys, query)
    swapped = np.concatenate(
        [kh.attention_kernel(sets[4:], sets), kh.attention_kernel(sets[:4], sets)]
    )
    assert difference(swapped, kh.attention_kernel(sets)) > 1e3 * ROUNDING


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gram_matrix_is_exactly_symmetric(keys, query, distribution, activation):
    sets = kh.SetBatch(keys, query)
    for budget in (10_000, 2**30):
        kernel = kh.attention_kernel(sets, None, distribution, activation, memory_budget=budget)
        assert (kernel == kernel.T).all()
    equal = kh.SetBatch(np.stack([x[:1] for x in keys]), query)
    for budget in (1000, 2**30):
        kernel = kh.mlp_kernel(equal, memory_budget=budget)
        assert (kernel == kernel.T).all()


def least_eigenvalue(kernel):
    """In units of what rounding may do to it."""
    values = np.linalg.eigvalsh(kernel)
    return values[0] / (len(kernel) * np.finfo(float).eps * values[-1])


@pytest.fixture
def crowd(rng):
    """Sets with repeats and near-repeats, whose Gram matrix is singular to working precision."""
    keys = rng.normal(size=(40, 3, 4))
    keys = np.concatenate([keys, keys, keys + 1e-9 * rng.normal(size=keys.shape)])
    query = np.tile(rng.normal(size=(40, 4)), (3, 1))
    return kh.SetBatch(keys * 0.5, query * 0.5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernel_is_positive_semidefinite(crowd, distribution, activation):
    assert least_eigenvalue(kh.attention_kernel(crowd, None, distribution, activation)) > -10


def test_the_mlp_kernel_is_positive_semidefinite(crowd):
    assert least_eigenvalue(kh.mlp_kernel(crowd)) > -10


def test_a_best_match_instead_of_a_mean_is_not_positive_semidefinite(rng):
    """The broken twin: the largest product over pairs of keys, where the kernel has their mean."""
    x = rng.normal(size=(60, 3, 4))
    best = np.einsum("ake,ble->abkl", x, x).max(axis=(2, 3))
    assert least_eigenvalue(best) < -10
