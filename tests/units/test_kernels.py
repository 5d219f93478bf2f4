"""The surface of the kernels: formulas against a double loop, shapes, precision, budgets,
messages.
"""

import mpmath
import numpy as np
import pytest
from jaxtyping import config

import keyhole as kh
from keyhole.attention.activations import POINTWISE, gaussian_moment
from keyhole.data.sets import check_sets


def looped_kernel(a, b, distribution, activation):
    """The definition, one pair of sets at a time."""
    mean, scale = distribution.moments(a.dim)
    mean = np.zeros((a.dim + 1, a.dim + 1)) if mean is None else mean
    out = np.empty((len(a), len(b)))
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            inner = x.extended_keys() @ y.extended_keys().T
            lengths = np.outer(
                np.linalg.norm(x.extended_keys(), axis=1), np.linalg.norm(y.extended_keys(), axis=1)
            )
            (x0,), (y0,) = x.extended_query(), y.extended_query()
            cosine = x0 @ y0 / (np.linalg.norm(x0) * np.linalg.norm(y0))
            moments = gaussian_moment(
                activation,
                (x.extended_keys() @ (x0 @ mean))[:, None],
                y.extended_keys() @ (y0 @ mean),
                scale * np.linalg.norm(x0) * np.linalg.norm(x.extended_keys(), axis=1)[:, None],
                scale * np.linalg.norm(y0) * np.linalg.norm(y.extended_keys(), axis=1),
                np.clip(cosine * inner / lengths, -1, 1),
            )
            out[i, j] = (moments * inner).mean()
    return out


def ragged(rng, lengths, dim, query=True, size=1.0):
    keys = [size * rng.normal(size=(n, dim)) for n in lengths]
    return kh.SetBatch(keys, size * rng.normal(size=(len(keys), dim)) if query else None)


@pytest.mark.parametrize("activation", POINTWISE)
@pytest.mark.parametrize("mean", ["none", "identity", "any"])
@pytest.mark.parametrize("query", [True, False])
def test_the_kernel_is_its_definition(activation, mean, query, rng):
    size = 0.5 if activation == "exp" else 1.0
    a = ragged(rng, [1, 5, 140, 3, 2, 2, 9], 5, query, size)
    b = ragged(rng, [4, 1, 30], 5, query, size)
    means = {"none": 0.0, "identity": 1.0, "any": rng.normal(size=(6, 6)) / 4}
    distribution = kh.GaussianHeads(means[mean], scale=0.4)
    kernel = kh.attention_kernel(a, b, distribution, activation)
    expected = looped_kernel(a, b, distribution, activation)
    scale = np.sqrt(
        np.outer(*(np.diag(kh.attention_kernel(x, None, distribution, activation)) for x in (a, b)))
    )
    assert kernel.shape == (7, 3)
    assert np.max(np.abs(kernel - expected) / scale) < 1e-12


@pytest.mark.parametrize("dim", [1, 3, 4, 7, 16])
def test_any_dimension(dim, rng):
    a = ragged(rng, [3, 1, 6], dim)
    np.testing.assert_allclose(
        kh.attention_kernel(a),
        looped_kernel(a, a, kh.GaussianHeads(), "relu"),
        rtol=1e-11,
        atol=1e-13,
    )


def test_one_key_per_set_in_numbers(rng):
    a = ragged(rng, [1] * 300, 2)
    expected = looped_kernel(a[:3], a, kh.GaussianHeads(mean=1.0), "relu")
    np.testing.assert_allclose(
        kh.attention_kernel(a, heads=kh.GaussianHeads(mean=1.0))[:3], expected, rtol=1e-9
    )


def test_unit_tokens_have_a_kernel_of_at_most_one(rng):
    x = rng.normal(size=(20, 1 + 5, 4))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    diagonal = np.diag(kh.attention_kernel(kh.SetBatch.from_tokens(x)))
    assert (diagonal > 0).all()
    assert (diagonal <= 1 + 1e-14).all()
    one = np.diag(kh.attention_kernel(kh.SetBatch(x[:, :1])))  # E u²_+ |x~|² = 1/2 · 2
    np.testing.assert_allclose(one, 1.0, rtol=1e-14)


def test_the_heads_default_to_mean_zero(rng):
    a = ragged(rng, [2, 4], 3)
    for distribution in (None, kh.GaussianHeads(), kh.GaussianHeads(mean=np.zeros((4, 4)))):
        assert (kh.attention_kernel(a, heads=distribution) == kh.attention_kernel(a)).all()
        assert (kh.attention_kernel(a, a, distribution) == kh.attention_kernel(a)).all()


def test_single_precision_is_computed_in_double(rng):
    a = ragged(rng, [2, 4], 3).astype(np.float32)
    for kernel in (kh.attention_kernel(a), kh.mlp_kernel(a[1:])):
        assert kernel.dtype == np.float64
    assert (kh.attention_kernel(a) == kh.attention_kernel(a.astype(np.float64))).all()


def test_the_step_kernel_is_exact_on_its_diagonal(rng):
    """arcsin is steep at 1: a correlation off by rounding would cost half the digits."""
    a = kh.SetBatch(rng.normal(size=(30, 1, 7)), rng.normal(size=(30, 7)))
    lengths = np.square(a.extended_keys()).sum(axis=1)
    np.testing.assert_allclose(
        np.diag(kh.attention_kernel(a, activation="step")), lengths / 2, rtol=1e-14
    )
    distribution = kh.GaussianHeads(mean=1.0)
    mean = np.einsum("nd,nd->n", a.query, a.tokens)
    std = 0.5 * np.linalg.norm(a.extended_query(), axis=1) * np.sqrt(lengths)
    expected = gaussian_moment("step", mean, mean, std, std, 1.0) * lengths
    np.testing.assert_allclose(
        np.diag(kh.attention_kernel(a, None, distribution, "step")), expected, rtol=1e-12
    )


def test_keys_at_the_origin_and_opposite_keys():
    zeros = kh.SetBatch(np.zeros((2, 3, 2)), np.zeros((2, 2)))
    # x~ = [0; 1] everywhere: variance 1/4, correlation 1
    np.testing.assert_allclose(kh.attention_kernel(zeros), 1 / 8, rtol=1e-14)
    far = kh.SetBatch(np.array([[[1e6]], [[-1e6]]]))
    kernel = kh.attention_kernel(far)
    gap = 2 / (1 + 1e12)  # 1 + cos of [1e6, 1] and [−1e6, 1]
    std = 0.5 * np.sqrt(2) * np.sqrt(1 + 1e12)
    expected = std**2 * (1 - 1e12) * np.sqrt(2) * 2 / (3 * 2 * np.pi) * gap**1.5
    assert abs(kernel[0, 1] / expected - 1) < 1e-9


def exact_arc(a, b, activation):
    """The kernel around mean zero of two sets of one key, in 40 digits."""
    with mpmath.workdps(40):
        x, y, x0, y0 = (
            mpmath.matrix(v[0].tolist())
            for v in (a.extended_keys(), b.extended_keys(), a.extended_query(), b.extended_query())
        )
        inner, sizes = (x.T * y)[0], [mpmath.norm(v) for v in (x, y, x0, y0)]
        rho = inner * (x0.T * y0)[0] / mpmath.fprod(sizes)
        angle = mpmath.acos(rho)
        if activation == "step":
            return float(inner * (1 - angle / mpmath.pi) / 2)
        arc = (mpmath.sin(angle) + (mpmath.pi - angle) * rho) / (2 * mpmath.pi)
        return float(inner * mpmath.fprod(sizes) * arc / 4)


@pytest.mark.parametrize("activation", ["relu", "step"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("apart", [0.05, 1e-3, 1e-5, 1e-8])
def test_near_copies_and_near_opposites_keep_their_digits(activation, sign, apart, rng):
    """1 − |ρ| is made of what keys and queries differ by, each; far out, opposite tokens make ρ
    nearly −1.
    """
    key, query = rng.normal(size=(2, 3))
    for far in ("keys", "queries"):
        size = 1e5 if sign < 0 else 1.0
        noise = apart * rng.normal(size=(2, 2, 3))
        x = (
            key
            * (size if far == "keys" else 1.0)
            * np.array([[1.0], [sign if far == "keys" else 1.0]])
        )
        q = (
            query
            * (size if far == "queries" else 1.0)
            * np.array([[1.0], [sign if far == "queries" else 1.0]])
        )
        x, q = x + noise[0] * np.linalg.norm(x[0]), q + noise[1] * np.linalg.norm(q[0])
        sets = kh.SetBatch(x[:, None], q)
        found = kh.attention_kernel(sets, activation=activation)[0, 1]
        assert found == pytest.approx(exact_arc(sets[0], sets[1], activation), rel=1e-9, abs=0)


@pytest.mark.parametrize("activation", ["relu", "step"])
@pytest.mark.parametrize("other", [-1.0, -0.2, 0.5, 2.0])
def test_a_series_in_one_correlation_has_terms_enough_for_it(activation, other):
    """One pair alone decides how many: with [3; 1] these keys have a cosine of −0.4, 0.1, 0.7 and
    0.99.
    """
    a, b = (kh.SetBatch(np.array([[[x]]]), np.ones((1, 1))) for x in (3.0, other))
    for strength in (0.3, -0.3):
        distribution = kh.GaussianHeads(strength, 0.4)
        np.testing.assert_allclose(
            kh.attention_kernel(a, b, distribution, activation),
            looped_kernel(a, b, distribution, activation),
            rtol=1e-12,
        )


def test_no_temporary_holds_all_pairs(rng):
    import tracemalloc

    a = ragged(rng, [16] * 200, 16)
    kh.attention_kernel(a[:2])
    tracemalloc.start()
    kernel = kh.attention_kernel(a)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # all pairs of keys would take 82 MB
    assert peak < kernel.nbytes + 5 * a.nbytes + 2**20


# --- MLP ------------------------------------------------------------------------------------------


def looped_mlp(a, b):
    def flat(batch, i):
        x0 = np.zeros(batch.dim) if batch.query is None else batch.query[i]
        return np.concatenate([x0, batch[i].tokens.ravel(), [1.0]])

    n_keys = int(a.lengths[0])
    out = np.empty((len(a), len(b)))
    for i in range(len(a)):
        for j in range(len(b)):
            z, w = flat(a, i), flat(b, j)
            lengths = np.linalg.norm(z) * np.linalg.norm(w)
            rho = np.clip(z @ w / lengths, -1, 1)
            out[i, j] = lengths / (n_keys + 2) * gaussian_moment("relu", 0, 0, 1, 1, rho)
    return out


@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("budget", [500, 5000, 2**30])
def test_the_mlp_kernel_is_its_definition(query, budget, rng):
    a, b = ragged(rng, [4] * 9, 3, query), ragged(rng, [4] * 5, 3, query)
    np.testing.assert_allclose(
        kh.mlp_kernel(a, b, memory_budget=budget), looped_mlp(a, b), rtol=1e-11
    )
    np.testing.assert_allclose(kh.mlp_kernel(a, memory_budget=budget), looped_mlp(a, a), rtol=1e-11)
    assert (kh.mlp_kernel(a, a) == kh.mlp_kernel(a)).all()


# --- messages -------------------------------------------------------------------------------------


def test_head_distributions_without_a_closed_form_name_the_remedy(rng):
    a = ragged(rng, [2, 3], 3)
    with pytest.raises(ValueError, match=r"have no kernel in closed form: use a finite"):
        kh.attention_kernel(a, heads=kh.GaussianHeads(mean=(0.3, 20.0)))
    with pytest.raises(ValueError, match=r"'softmax', whose kernel is not known. Use finite heads"):
        kh.attention_kernel(a, activation="softmax")
    with pytest.raises(ValueError, match=r"`mean` must be a number or a \(D, D\) matrix.*\(3, 3\)"):
        kh.attention_kernel(a, heads=kh.GaussianHeads(mean=np.eye(3)))


def test_a_class_is_not_a_head_distribution(rng):
    with pytest.raises(
        TypeError, match=r"not its class: got GaussianHeads. Write GaussianHeads\(\)"
    ):
        kh.attention_kernel(ragged(rng, [2, 3], 3), heads=kh.GaussianHeads)


def test_sets_from_different_spaces_are_refused(rng):
    a, b = ragged(rng, [2, 3], 3), ragged(rng, [2, 3], 4)
    with pytest.raises(
        ValueError, match="`a` and `b` must share their token dimension: got 3 and 4"
    ):
        kh.attention_kernel(a, b)
    with pytest.raises(
        ValueError, match="`a` and `b` must share their token dimension: got 3 and 4"
    ):
        kh.mlp_kernel(a[:1], b[:1])


def test_the_mlp_needs_one_number_of_keys(rng):
    a = ragged(rng, [2, 2, 3], 3)
    with pytest.raises(
        ValueError, match=r"set 0 of `a` has 2 and set 2 of `a` has 3. Use attention_features"
    ):
        kh.mlp_kernel(a)
    with pytest.raises(ValueError, match="set 0 of `a` has 2 and set 0 of `b` has 3"):
        kh.mlp_kernel(a[:2], a[2:])


def test_arrays_are_pointed_to_set_batches():
    with pytest.raises(
        TypeError, match=r"`a` must be a SetBatch: got ndarray. Wrap arrays in kh.SetBatch"
    ):
        check_sets(np.zeros((2, 3)), "a")
    sets = kh.SetBatch(np.ones((3, 2, 2)))
    config.update("jaxtyping_disable", True)
    try:
        for arguments, name in (((np.ones((3, 2, 2)),), "a"), ((sets, np.ones((3, 2, 2))), "b")):
            with pytest.raises(TypeError, match=f"`{name}` must be a SetBatch"):
                kh.attention_kernel(*arguments)
    finally:
        config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("exponent", [-700.0, -400.0, 0.0, 400.0, 700.0, 708.7])
def test_exponentials_are_right_as_long_as_they_fit(exponent):
    one = kh.SetBatch(
        np.ones((1, 1, 1)), np.ones((1, 1))
    )  # a score of mean c, the identity's strength
    kernel = kh.attention_kernel(one, None, kh.GaussianHeads(exponent / 2, 1e-9), "exp")
    np.testing.assert_allclose(kernel, [[2.0 * np.exp(exponent)]], rtol=1e-11)


def test_an_exponential_that_overflows_says_so(rng):
    with pytest.raises(OverflowError, match=r"exceeds the range of float64.*Scale the tokens down"):
        kh.attention_kernel(ragged(rng, [2, 3], 3, size=20.0), activation="exp")
