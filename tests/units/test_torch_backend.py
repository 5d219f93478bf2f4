"""The same numbers from torch tensors as from NumPy arrays, on any device, by any route."""

import math
import subprocess
import sys

import mpmath
import numpy as np
import pytest
from devices import DEVICE, as_array
from paper import PAPER_LAYER, paper_classifier, paper_regressor
from ridges import gram_fixed
from sklearn import config_context
from sklearn.base import clone

import keyhole as kh
from keyhole.attention.activations import POINTWISE, SOFTMAX
from keyhole.attention.heads import HeadDraw
from keyhole.logistic import LogisticProblem
from keyhole.ridge.problem import RidgeProblem

torch = pytest.importorskip("torch", reason="the torch backend is tested where torch is installed")


def draw_sets(rng, n=24, dim=3, *, query=True, ragged=True, size=1.0):
    lengths = rng.integers(1, 6, n) if ragged else np.full(n, 4)
    keys = [size * rng.standard_normal((k, dim)) / math.sqrt(dim) for k in lengths]
    queries = size * rng.standard_normal((n, dim)) / math.sqrt(dim)
    keys[3], queries[3] = keys[2].copy(), queries[2].copy()  # correlation 1 off the diagonal
    return kh.SetBatch(keys, queries if query else None)


DISTRIBUTIONS = {
    "zero": lambda rng, dim: kh.GaussianHeads(),
    "biased": lambda rng, dim: kh.GaussianHeads(mean=1.0),
    "matrix": lambda rng, dim: kh.GaussianHeads(
        mean=rng.standard_normal((dim + 1, dim + 1)), scale=0.4
    ),
}


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_keeps_tensors_with_type_and_device(rng):
    keys, query = (
        torch.tensor(rng.standard_normal((5, 4, 3)), dtype=torch.float32),
        torch.zeros(5, 3),
    )
    batch = kh.SetBatch(keys, query)
    assert isinstance(batch.tokens, torch.Tensor)
    assert batch.tokens.dtype == torch.float32
    assert batch.device == "cpu"
    assert (
        repr(batch)
        == "SetBatch(5 sets, 4 keys each (20 in all), dim 3, with query, float32, torch on cpu)"
    )
    assert batch.astype("float64").tokens.dtype == torch.float64


@pytest.mark.parametrize("query", [True, False])
def test_a_batch_of_tensors_is_cut_as_one_of_arrays(rng, query):
    batch = draw_sets(rng, query=query)
    moved = batch.to(DEVICE)
    for rows in (slice(2, 9), [5, 1, 1], np.arange(24) % 2 == 0, 3):
        there, here = moved[rows].numpy(), batch[rows]
        assert np.array_equal(there.tokens, here.tokens)
        assert np.array_equal(there.offsets, here.offsets)
        assert np.array_equal(there.extended_query(), here.extended_query())
    assert np.array_equal(as_array(moved.extended_keys()), batch.extended_keys())


def test_ragged_tensors_and_tokens_with_queries(rng):
    arrays = [rng.standard_normal((k, 3)) for k in (2, 5, 3)]
    tensors = [torch.from_numpy(a) for a in arrays]
    for build in (kh.SetBatch, kh.SetBatch.from_tokens):
        assert np.array_equal(build(tensors).numpy().tokens, build(arrays).tokens)


def test_a_batch_of_tensors_says_what_is_wrong(rng):
    keys = torch.zeros(2, 3, 4)
    bad = keys.clone()
    bad[1, 2, 3] = math.nan
    with pytest.raises(
        ValueError, match=r"`keys` must be finite: found NaN .* at index \(1, 2, 3\)"
    ):
        kh.SetBatch(bad)
    with pytest.raises(ValueError, match=r"must have shape \(n, N, d\).*got shape \(3, 4\)"):
        kh.SetBatch(keys[0])
    with pytest.raises(ValueError, match="must be real"):
        kh.SetBatch(keys.to(torch.complex64))
    with pytest.raises(TypeError, match="NumPy keys and a torch query"):
        kh.SetBatch(keys.numpy(), torch.zeros(2, 4))
    with pytest.raises(TypeError, match="all of one kind"):
        kh.SetBatch([keys[0], keys[1].numpy()])
    with pytest.raises(ValueError, match="must live in one place: got cpu and NumPy"):
        kh.attention_kernel(kh.SetBatch(keys), kh.SetBatch(keys.numpy()))


# --- kernels and features -------------------------------------------------------------------------


@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("activation", POINTWISE)
def test_kernel_equals_that_of_arrays(rng, activation, distribution, query):
    size = 0.4 if activation == "exp" else 1.0
    a, b = draw_sets(rng, query=query, size=size), draw_sets(rng, n=11, query=query, size=size)
    distribution = DISTRIBUTIONS[distribution](rng, 3)
    for other in (None, b):
        expected = kh.attention_kernel(a, other, distribution, activation)
        found = kh.attention_kernel(
            a.to(DEVICE), None if other is None else other.to(DEVICE), distribution, activation
        )
        assert found.dtype == torch.float64
        assert np.abs(as_array(found) - expected).max() <= 1e-12 * np.abs(expected).max()
        assert other is not None or torch.equal(found, found.T)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_kernel_in_blocks_and_in_float32(rng, distribution):
    batch, distribution = draw_sets(rng).to(DEVICE), DISTRIBUTIONS[distribution](rng, 3)
    whole = kh.attention_kernel(batch, None, distribution)
    cut = kh.attention_kernel(batch, None, distribution, memory_budget=2**13)
    assert torch.abs(cut - whole).max() <= 1e-14 * whole.abs().max()
    assert torch.equal(cut, cut.T)
    narrow = kh.attention_kernel(batch.astype("float32"), None, distribution)
    assert narrow.dtype == torch.float32
    assert torch.abs(narrow - whole).max() <= 1e-6 * whole.abs().max()


@pytest.mark.parametrize("correlation", [-1.0, -0.95, -0.9, 0.0, 0.5, 0.9, 0.95, 0.999999, 1.0])
@pytest.mark.parametrize("activation", ["relu", "step"])
def test_moments_equal_those_of_arrays(activation, correlation):
    from keyhole.attention.torch_loops import rectified_moment

    h, k = (
        x.ravel()
        for x in np.meshgrid(
            [-6.0, -3.0, -1.0, 0.0, 1e-9, 1.0, 3.0, 10.0], [-4.0, -1.0, 0.0, 1.0, 3.0]
        )
    )
    expected = kh.attention.activations.gaussian_moment(activation, h, k, 1.0, 1.0, correlation)
    rho = torch.full((len(h),), correlation, dtype=torch.float64)
    power = 1 if activation == "relu" else 0
    found = rectified_moment(
        power, torch.from_numpy(h), torch.from_numpy(k), rho, 1.0 - rho.abs()
    ).numpy()
    assert np.abs(found - expected).max() <= 1e-13 * np.abs(expected).max()


def test_parts_of_the_moments_are_accurate_relative_to_their_size():
    from scipy.special import owens_t

    from keyhole.attention import torch_loops as room

    def tensors(*arrays):
        return (torch.from_numpy(np.asarray(x, dtype=float)) for x in arrays)

    h = np.array([-30.0, -8.0, -1.0, -1e-3, 0.0, 0.5, 3.0, 12.0])
    (points,) = tensors(h)
    exact = [float(mpmath.npdf(x) + x * mpmath.ncdf(x)) for x in map(mpmath.mpf, h)]
    np.testing.assert_allclose(room.rectified_mean(points).numpy()[1:], exact[1:], rtol=2e-14)
    np.testing.assert_allclose(room.rectified_mean(points).numpy()[0], exact[0], rtol=1e-10)
    gap = np.array([0.0, 1e-12, 1e-4, 0.3, 1.0])
    for sign in (1.0, -1.0):
        with mpmath.workdps(40):
            rhos = [sign * (1 - mpmath.mpf(g)) for g in gap]
            angles = [mpmath.acos(r) for r in rhos]
            step = [float((mpmath.pi - t) / (2 * mpmath.pi)) for t in angles]
            relu = [
                float((mpmath.sin(t) + (mpmath.pi - t) * r) / (2 * mpmath.pi))
                for t, r in zip(angles, rhos, strict=True)
            ]
        rho, gaps = tensors([float(r) for r in rhos], gap)
        np.testing.assert_allclose(room.step_arc(rho, gaps).numpy(), step, rtol=1e-14, atol=1e-30)
        # as ρ → −1 what remains is a difference of numbers of the size of the angle
        np.testing.assert_allclose(room.relu_arc(rho, gaps).numpy(), relu, rtol=1e-14, atol=1e-17)
    a, y = (
        x.ravel()
        for x in np.meshgrid([-3.0, -0.5, 1e-9, 0.7, 4.0], [-5.0, -0.7, 0.0, 0.2, 0.7, 3.0])
    )
    np.testing.assert_allclose(
        room._owen(*tensors(a, y)).numpy(), owens_t(a, y / a), rtol=1e-13, atol=1e-17
    )


@pytest.mark.parametrize("strength", [0.0, 0.1])
@pytest.mark.parametrize("activation", ["relu", "step"])
@pytest.mark.parametrize("apart", [0.05, 1e-3, 1e-6])
def test_near_copies_and_near_opposites_equal_those_of_arrays(rng, activation, apart, strength):
    keys, query = rng.normal(size=(3, 1, 3)), rng.normal(size=(3, 3))
    near = [keys, keys + apart * rng.normal(size=keys.shape), -1e4 * keys, 1e4 * keys * (1 + apart)]
    queries = [query, query + apart * rng.normal(size=query.shape)] * 2
    batch, distribution = (
        kh.SetBatch(np.concatenate(near), np.concatenate(queries)),
        kh.GaussianHeads(strength),
    )
    expected = kh.attention_kernel(batch, None, distribution, activation)
    size = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    found = as_array(kh.attention_kernel(batch.to(DEVICE), None, distribution, activation))
    assert np.max(np.abs(found - expected) / np.maximum(size, np.abs(expected))) <= 1e-11


@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("activation", [*POINTWISE, SOFTMAX])
def test_features_equal_those_of_arrays(rng, activation, query, monkeypatch):
    batch = draw_sets(rng, query=query, size=0.5)
    draw = HeadDraw(kh.GaussianHeads(mean=1.0), 13, 3, seed=1)
    expected = kh.attention_features(batch, draw, activation)
    for heads in (draw, draw.block(0, 13), torch.from_numpy(draw.block(0, 13))):
        found = kh.attention_features(batch.to(DEVICE), heads, activation)
        assert np.abs(as_array(found) - expected).max() <= 1e-12 * np.abs(expected).max()
    monkeypatch.setattr("keyhole.attention.features.MEMORY_BUDGET", 2**12)
    found = kh.attention_features(batch.to(DEVICE), draw, activation)
    assert np.abs(as_array(found) - expected).max() <= 1e-12 * np.abs(expected).max()
    narrow = kh.attention_features(batch.to(DEVICE), draw, activation, dtype="float32")
    assert narrow.dtype == torch.float32
    if activation != "step":  # which jumps where a score rounds through zero
        assert np.abs(as_array(narrow) - expected).max() <= 2e-6 * np.abs(expected).max()


def test_features_that_overflow_are_refused(rng):
    batch = kh.SetBatch(torch.full((2, 2, 3), 1e3))
    with pytest.raises(
        ValueError, match=r"features must be finite: some overflow torch\.float32 under activation"
    ):
        kh.attention_features(batch, kh.GaussianHeads().sample(20, 3, 0), "exp")
    with pytest.raises(
        ValueError, match=r"`heads` must have shape \(M, D, D\).*got shape \(2, 3, 3\)"
    ):
        kh.attention_features(batch, torch.zeros(2, 3, 3))


# --- ridge and estimators -------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_ridge_equals_that_of_arrays(rng, weighted, fit_intercept, monkeypatch):
    from keyhole.ridge import device as ridge

    monkeypatch.setattr(ridge, "SIDE", 32)  # seven tiles
    n, alpha = 200, 1e-3
    gram = kh.attention_kernel(kh.targets.sphere_sets(n, 4, 5, seed=0))
    y, weights = rng.standard_normal((n, 2)), rng.uniform(0.5, 2.0, n)
    if not weighted:
        weights = np.ones(n)
    expected = gram_fixed(gram, y, alpha, fit_intercept=fit_intercept, weights=weights)
    problem = RidgeProblem.of(y, [alpha], fit_intercept=fit_intercept, weights=weights)
    device = ridge.DeviceRidge.of(torch.tensor(gram, device=DEVICE), problem)
    assert math.isclose(
        device.largest(), np.linalg.eigvalsh(as_array(device.matrix))[-1], rel_tol=1e-12
    )
    assert math.isclose(
        device.size(), max(np.linalg.norm(as_array(device.matrix)), device.weighing.removed)
    )
    for room in (False, True):
        options = {"rounding": 2.0**-52, "room_for_a_copy": room}
        fit = ridge.ridge_device(torch.tensor(gram, device=DEVICE), problem, **options)
        assert (expected.route, fit.route) == ("cholesky", "device")
        assert np.abs(fit.coef - expected.coef).max() <= 1e-10 * np.abs(expected.coef).max()
        assert np.abs(fit.intercept - expected.intercept).max() <= 1e-10
        assert (
            np.abs(fit.left_out - expected.left_out).max()
            <= 1e-10 * np.abs(expected.left_out).max()
        )


@pytest.mark.parametrize("fit_intercept", [True, False])
def test_penalties_are_factorised_together_as_one_by_one(rng, fit_intercept, monkeypatch):
    from keyhole.ridge import device as ridge

    monkeypatch.setattr(ridge, "SIDE", 16)  # four tiles
    n = 60
    alphas = np.geomspace(1e-3, 10.0, 7)
    gram = kh.attention_kernel(kh.targets.sphere_sets(n, 4, 5, seed=0))
    y = rng.standard_normal((n, 2))
    problem = RidgeProblem.of(y, alphas, fit_intercept=fit_intercept)
    errors = []
    bytes_of_one = 8 * n**2
    for stack_bytes in (bytes_of_one, 3 * bytes_of_one, 100 * bytes_of_one):
        monkeypatch.setattr(ridge, "STACK_BYTES", stack_bytes)
        there = torch.tensor(gram, device=DEVICE)
        fit = ridge.ridge_device(there, problem, rounding=2.0**-52)
        assert fit.route == "device"
        errors.append(fit.errors)
    one_by_one, three_together, all_together = errors
    np.testing.assert_allclose(three_together, one_by_one, rtol=1e-11)
    np.testing.assert_allclose(all_together, one_by_one, rtol=1e-11)


def test_a_matrix_without_a_cholesky_factor_is_seen():
    from keyhole.ridge.device import factorise_lower

    identity = torch.eye(4, dtype=torch.float64)
    assert factorise_lower(torch.stack([identity, identity]))
    assert not factorise_lower(-identity)
    assert not factorise_lower(torch.stack([identity, -identity]))


@pytest.mark.parametrize("n_heads", [20, 200, math.inf])
@pytest.mark.parametrize("alpha", ["loo", 1e-2, [1e-3, 1e-1, 1e-12]])
def test_regressor_on_a_device_gives_the_same_numbers(rng, n_heads, alpha):
    sets = draw_sets(rng, n=80)
    y = rng.standard_normal(80) + np.add.reduceat(sets.tokens[:, 0], sets.offsets[:-1])
    y[3] = y[2]
    weights = rng.integers(0, 3, 80).astype(float)
    weights[2:4] = 1.0
    options = {
        "n_heads": n_heads,
        "alpha": alpha,
        "random_state": 0,
        "heads": kh.GaussianHeads(mean=1.0),
    }
    there = kh.AttentionRegressor(
        **{**PAPER_LAYER, "n_heads": 512, **options},
        device=DEVICE,
    ).fit(sets, y, sample_weight=weights)
    if (
        alpha == "loo"
    ):  # the grid begins at the floor of rounding, which depends on how a matrix was summed
        own = kh.AttentionRegressor(**{**PAPER_LAYER, "n_heads": 512, **options}).fit(
            sets, y, sample_weight=weights
        )
        np.testing.assert_allclose(
            np.log(own.selection_.alphas), np.log(there.selection_.alphas), atol=3.0
        )
        options["alpha"] = there.selection_.alphas
    here = kh.AttentionRegressor(**{**PAPER_LAYER, "n_heads": 512, **options}).fit(
        sets, y, sample_weight=weights
    )
    assert math.isclose(here.alpha_, there.alpha_, rel_tol=1e-8)
    assert math.isclose(here.loo_error_, there.loo_error_, rel_tol=1e-8)
    scale = np.abs(here.predict(sets)).max()
    assert np.abs(here.predict(sets) - there.predict(sets)).max() <= 1e-8 * scale
    assert np.abs(here.loo_predictions_ - there.loo_predictions_).max() <= 1e-7 * scale
    assert isinstance(there.loo_predictions_, np.ndarray)
    assert np.array_equal(there.predict(sets), there.predict(sets.to(DEVICE)))


def test_the_exact_kernel_of_learned_heads_on_a_device(rng):
    """A mixture of head distributions has the average of their kernels."""
    sets, y = draw_sets(rng, n=40), rng.standard_normal(40)
    settings = {**PAPER_LAYER, "n_heads": math.inf, "alpha": 0.1, "random_state": 0}
    learned = kh.LearnedHeads(n_means=2, max_iter=5)
    settings["heads"] = kh.AttentionRegressor(**{**settings, "heads": learned}).fit(sets, y).heads_
    here, there = (
        kh.AttentionRegressor(**settings, device=device).fit(sets, y) for device in (None, DEVICE)
    )
    np.testing.assert_allclose(there.predict(sets), here.predict(sets), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("n_heads", [3, 20, math.inf])
def test_several_outputs_on_a_device(rng, n_heads):
    sets, y = draw_sets(rng, n=30), rng.standard_normal((30, 3))
    options = {**PAPER_LAYER, "alpha": 0.1, "random_state": 0}
    here, there = (
        kh.AttentionRegressor(n_heads, device=d, **options).fit(sets, y) for d in (None, DEVICE)
    )
    np.testing.assert_allclose(
        there.predict(sets[:7]), here.predict(sets[:7]), rtol=1e-7, atol=1e-9
    )


@pytest.mark.parametrize("n_heads", [8, math.inf])
@pytest.mark.parametrize(
    "options", [{"pooling": "sum"}, {"query": "each"}, {"pooling": "sum", "query": "each"}]
)
def test_a_device_pools_as_the_host_does(rng, n_heads, options):
    sets, y = draw_sets(rng, n=12), rng.standard_normal(12)
    settings = {**PAPER_LAYER, "alpha": 0.1, "random_state": 0, **options}
    here, there = (
        kh.AttentionRegressor(**{**settings, "n_heads": n_heads}, device=device).fit(sets, y)
        for device in (None, DEVICE)
    )
    np.testing.assert_allclose(there.predict(sets), here.predict(sets), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(there.loo_predictions_, here.loo_predictions_, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("n_heads", [8, math.inf])
def test_a_device_takes_groups_of_sets(rng, n_heads):
    groups = kh.SetGroups(draw_sets(rng, n=24), np.repeat([1, 2, 3], 4))
    y = rng.standard_normal(12)
    settings = {**PAPER_LAYER, "n_heads": n_heads, "alpha": 0.1, "random_state": 0}
    here, there = (
        kh.AttentionRegressor(**settings, device=device).fit(groups, y) for device in (None, DEVICE)
    )
    np.testing.assert_allclose(there.predict(groups), here.predict(groups), rtol=1e-7, atol=1e-9)


def test_classifier_follows_its_tensors(rng):
    sets = kh.targets.sphere_sets(90, 5, 4, seed=0)
    label = (kh.targets.TokenPower(2, dim=4)(sets) > 0.25).astype(int)
    here = paper_classifier(n_heads=math.inf, alpha=0.1).fit(sets, label)
    there = paper_classifier(n_heads=math.inf, alpha=0.1).fit(sets.to(DEVICE), label)
    assert there.layer_.device == DEVICE
    assert np.abs(here.predict_proba(sets) - there.predict_proba(sets)).max() <= 1e-8
    keys = torch.tensor(sets.tokens.reshape(90, 5, 4))
    tensors = kh.SetBatch(keys, torch.tensor(sets.query))
    again = paper_classifier(n_heads=math.inf, alpha=0.1).fit(tensors, label)
    assert np.abs(here.predict_proba(sets) - again.predict_proba(sets)).max() <= 1e-8


@pytest.mark.parametrize("n_heads", [6, math.inf])
def test_classifier_on_a_device_gives_the_same_labels(rng, n_heads):
    sets = kh.SetBatch(rng.normal(size=(60, 4, 3)))
    label = np.array(["a", "b", "c"])[np.arange(60) % 3]
    here = paper_classifier(n_heads, alpha=0.1, random_state=0).fit(sets, label)
    there = paper_classifier(n_heads, alpha=0.1, random_state=0, device=DEVICE).fit(sets, label)
    assert there.layer_.device == DEVICE
    np.testing.assert_allclose(
        there.decision_function(sets), here.decision_function(sets), rtol=0, atol=1e-9
    )
    np.testing.assert_allclose(
        there.predict_proba(sets), here.predict_proba(sets), rtol=0, atol=1e-6
    )
    assert (there.predict(sets) == here.predict(sets)).all()


def test_a_device_that_is_not_there_is_named():
    sets = kh.targets.sphere_sets(10, 3, 4, seed=0)
    with pytest.raises(
        ValueError, match="`device` must be 'cpu', 'cuda' or 'cuda:i', or None: got 'gpu'"
    ):
        paper_regressor(device="gpu", n_heads=512).fit(sets, np.arange(10.0))
    with pytest.raises(
        ValueError, match="`device` must be one that torch sees here: got 'cuda:77'"
    ):
        paper_regressor(device="cuda:77", n_heads=512).fit(sets, np.arange(10.0))


def test_auto_is_numpy_without_a_gpu():
    from keyhole.attention.backends import pick_device

    expected = "cuda:0" if torch.cuda.is_available() else None
    assert pick_device("auto", kh.targets.sphere_sets(2, 2, 2, seed=0)) == expected


def test_arrays_need_no_torch():
    code = (
        "import sys, numpy as np, keyhole as kh\n"
        "sets = kh.SetBatch(np.eye(3)[:, None, :])\n"
        "kh.AttentionRegressor(n_heads=3, alpha=1.0, random_state=0).fit(sets, "
        "np.arange(3.0)).predict(sets)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_norm_balls_and_batches_take_tensors_to_the_host(rng):
    batch, y = draw_sets(rng, n=30), rng.standard_normal(30)
    moved, label = batch.to(DEVICE), y > 0
    for model, target, extra in (
        (kh.NormBallRegressor(5, group_radius=1.0, ball_radius=1.0, random_state=0), y, {}),
        (kh.NormBallClassifier(5, group_radius=1.0, ball_radius=1.0, random_state=0), label, {}),
        (
            paper_regressor(5, random_state=0),
            y,
            {},
        ),
        (
            paper_classifier(5, random_state=0),
            label,
            {"classes": [False, True]},
        ),
    ):
        fit = getattr(model, "partial_fit", model.fit)
        wanted = fit(batch, target, **extra).predict(batch)
        model = clone(model)
        found = getattr(model, "partial_fit", model.fit)(
            moved, torch.tensor(target), **extra
        ).predict(moved)
        assert isinstance(found, np.ndarray)
        np.testing.assert_array_equal(found, wanted)
    alone = kh.SetGroups(moved, np.ones(30, dtype=int))
    model = paper_regressor(5, random_state=0).partial_fit(alone, y)
    np.testing.assert_allclose(
        model.predict(alone),
        paper_regressor(5, random_state=0).partial_fit(batch, y).predict(batch),
    )


def test_heads_may_be_tensors_wherever_the_sets_are(rng):
    batch, heads = draw_sets(rng, n=8), kh.GaussianHeads().sample(5, 3, 0)
    groups = kh.SetGroups(batch, [2, 6])
    for sets in (batch, groups):
        by_numpy = kh.attention_features(sets, heads)
        np.testing.assert_array_equal(kh.attention_features(sets, torch.tensor(heads)), by_numpy)
        by_torch = kh.attention_features(sets.to(DEVICE), torch.tensor(heads))
        assert isinstance(by_torch, torch.Tensor)
        np.testing.assert_allclose(as_array(by_torch), by_numpy, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("n_heads", [3, 30])
def test_a_device_without_room_leaves_the_gram_matrix_to_the_host(rng, n_heads, monkeypatch):
    """Three matrices of n × n numbers, of which the device has to hold all."""
    from keyhole.attention import torch_backend

    batch = draw_sets(rng)
    y = rng.standard_normal(24)
    settings = {**PAPER_LAYER, "random_state": 0}
    model = kh.AttentionRegressor(n_heads, alpha=0.1, **settings)
    expected = clone(model).fit(batch, y).predict(batch)
    route_of_host = "primal" if n_heads == 3 else "dual"
    for room, device, route in (
        (24 * 24**2, DEVICE, "dual"),
        (24 * 24**2 - 1, None, route_of_host),
    ):
        monkeypatch.setattr(torch_backend, "free_bytes", lambda device, room=room: room)
        found = clone(model).set_params(device=DEVICE).fit(batch, y)
        assert found.layer_.device == device
        assert found.solver_ == route
        np.testing.assert_allclose(found.predict(batch), expected, atol=1e-9)


def test_newton_steps_are_made_on_the_host_where_the_device_has_no_room_for_them(rng, monkeypatch):
    """Two matrices of n × n numbers beside the kernel, of which the device has to hold all."""
    from keyhole.attention import torch_backend

    device_fits = []

    def counted(gram, problem, *, rounding):
        device_fits.append(len(gram))
        return logistic_device(gram, problem, rounding=rounding)

    logistic_device = torch_backend.logistic_device
    monkeypatch.setattr(torch_backend, "logistic_device", counted)
    features = rng.standard_normal((24, 5))
    gram = torch.tensor(features @ features.T, device=DEVICE)
    problem = LogisticProblem.of(rng.standard_normal((24, 1)), [0.1])
    losses = []
    for room in (16 * 24**2, 16 * 24**2 - 1):
        monkeypatch.setattr(torch_backend, "free_bytes", lambda device, room=room: room)
        fit = torch_backend.DeviceBackend(DEVICE).logistic(gram, problem, rounding=1e-16)
        losses.append(fit.loss)
    assert device_fits == [24]
    assert losses[1] == pytest.approx(losses[0])


@pytest.mark.parametrize("n_heads", [12, math.inf])
def test_groups_are_left_out_on_a_device_too(n_heads, rng):
    sets, y = (
        kh.SetBatch(rng.normal(size=(40, 3, 2)), rng.normal(size=(40, 2))),
        rng.normal(size=40),
    )
    host, device = (
        paper_regressor(n_heads, device=device, random_state=0).fit(
            sets, y, groups=np.arange(40) // 4
        )
        for device in (None, DEVICE)
    )
    assert device.alpha_ == pytest.approx(host.alpha_)
    assert device.loo_error_ == pytest.approx(host.loo_error_)
    np.testing.assert_allclose(device.predict(sets), host.predict(sets), atol=1e-6)


def test_blocks_of_heads_on_a_device_add_up(rng, monkeypatch):
    from keyhole.attention import torch_backend

    sets = kh.SetBatch(rng.normal(size=(60, 3, 8)), rng.normal(size=(60, 8)))
    options = {**PAPER_LAYER, "alpha": 1.0, "random_state": 0}
    expected = kh.AttentionRegressor(90, **options).fit(sets, sets.query[:, 0])

    # every head is in one block for the Gram matrix, and in one again for the values
    widths = []

    def counted(sets, heads, activation):
        widths.append(len(heads))
        return kh.attention_features(sets, heads, activation)

    monkeypatch.setattr(torch_backend, "attention_features", counted)
    monkeypatch.setattr(torch_backend, "free_bytes", lambda device: 2**20)
    with config_context(working_memory=0.2):  # some twenty heads at a time
        found = kh.AttentionRegressor(90, device=DEVICE, **options).fit(sets, sets.query[:, 0])
    assert len(widths) > 2
    assert sum(widths) == 2 * 90
    np.testing.assert_allclose(found.loo_predictions_, expected.loo_predictions_, rtol=1e-8)
    np.testing.assert_allclose(found.predict(sets), expected.predict(sets), rtol=1e-8)
