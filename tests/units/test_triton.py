"""Fused kernels against plain torch in float64.

They need a GPU; elsewhere these tests say so and do nothing.
"""

import math

import numpy as np
import pytest
from paper import PAPER_LAYER

import keyhole as kh

torch = pytest.importorskip("torch", reason="fused kernels are tested where torch is installed")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="fused kernels need a CUDA device"
)


def draw_sets(rng, n, n_keys, dim, *, query=True, ragged=False, size=1.0, asked=None):
    lengths = rng.integers(1, 2 * n_keys, n) if ragged else np.full(n, n_keys)
    keys = [size * rng.standard_normal((k, dim)) / math.sqrt(dim) for k in lengths]
    asked = asked or dim
    return kh.SetBatch(keys, rng.standard_normal((n, asked)) / math.sqrt(asked) if query else None)


def kernel_error(found, expected, rows, columns):
    """Largest error relative to √(K(x,x) K(x',x')), the size of an entry without cancellation."""
    return float(((found.double() - expected) / torch.sqrt(torch.outer(rows, columns))).abs().max())


CASES = {
    "equal": {"n": 300, "n_keys": 16, "dim": 16},
    "ragged": {"n": 200, "n_keys": 9, "dim": 5, "ragged": True},
    "no query": {"n": 130, "n_keys": 7, "dim": 16, "query": False},
    "one key": {"n": 65, "n_keys": 1, "dim": 2},
    "pairs": {"n": 71, "n_keys": 5, "dim": 6, "ragged": True},
    "fours": {"n": 71, "n_keys": 6, "dim": 32, "ragged": True, "query": False},
    "wide": {"n": 70, "n_keys": 3, "dim": 100, "ragged": True},
    "large": {"n": 70, "n_keys": 5, "dim": 8, "size": 20.0},
    "small": {"n": 70, "n_keys": 5, "dim": 8, "size": 1e-3},
    "narrow queries": {"n": 71, "n_keys": 5, "dim": 6, "ragged": True, "asked": 2},
    "wide queries": {"n": 71, "n_keys": 5, "dim": 6, "ragged": True, "asked": 40},
    "both wide": {"n": 40, "n_keys": 3, "dim": 70, "asked": 35},
    "the widest fused": {"n": 40, "n_keys": 3, "dim": 256, "ragged": True},
    "too wide to fuse": {"n": 40, "n_keys": 3, "dim": 300, "ragged": True},
    "queries too wide": {"n": 40, "n_keys": 3, "dim": 6, "asked": 300},
}


@pytest.mark.parametrize("mean", [0.0, 1.0, -2.0])
@pytest.mark.parametrize("case", CASES)
def test_kernel(rng, case, mean):
    a, b = draw_sets(rng, **CASES[case]), draw_sets(rng, **{**CASES[case], "n": 90})
    distribution = kh.GaussianHeads(mean=mean)
    exact = [kh.attention_kernel(x.to("cuda"), None, distribution) for x in (a, b)]
    rows, columns = (e.diagonal() for e in exact)
    fused = kh.attention_kernel(a.astype("float32").to("cuda"), None, distribution)
    narrow = a.astype("float32").astype("float64").to("cuda")
    assert fused.dtype == torch.float32
    assert torch.equal(fused, fused.T)
    assert kernel_error(fused, kh.attention_kernel(narrow, None, distribution), rows, rows) <= 1e-6
    cross = kh.attention_kernel(
        a.astype("float32").to("cuda"), b.astype("float32").to("cuda"), distribution
    )
    other = b.astype("float32").astype("float64").to("cuda")
    assert (
        kernel_error(cross, kh.attention_kernel(narrow, other, distribution), rows, columns) <= 1e-6
    )


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_kernel_streams_to_another_place_and_type(rng, mean, monkeypatch):
    from keyhole.attention import dispatch

    monkeypatch.setattr(dispatch, "_FUSED_HOST", 4 * 100**2)
    batch, distribution = (
        draw_sets(rng, 250, 4, 6, ragged=True).astype("float32").to("cuda"),
        kh.GaussianHeads(mean=mean),
    )
    whole = kh.attention_kernel(batch, None, distribution)
    for out in (torch.empty(250, 250), torch.empty(250, 250, dtype=torch.float64, device="cuda")):
        dispatch.attention_gram(batch, None, *distribution.moments(6), "relu", 2**30, out)
        assert torch.equal(out, out.T)
        assert torch.allclose(out.float().cpu(), whole.cpu(), rtol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_features(rng, case):
    batch = draw_sets(rng, **CASES[case]).astype("float32")
    heads = kh.GaussianHeads(mean=1.0).sample(37, batch.dim, 0, batch.query_dim)
    exact = kh.attention_features(batch.astype("float64").to("cuda"), heads)
    fused = kh.attention_features(batch.to("cuda"), heads)
    assert fused.dtype == torch.float32
    assert float((fused - exact).norm() / exact.norm()) <= 1e-6


def test_features_of_more_sets_than_a_grid_has_rows(rng):
    for dim in (2, 33):
        batch = kh.SetBatch(rng.standard_normal((70_000, 1, dim)).astype("float32")).to("cuda")
        heads = kh.GaussianHeads().sample(1, dim, 0)
        exact = kh.attention_features(batch.astype("float64"), heads)
        assert float((kh.attention_features(batch, heads) - exact).norm() / exact.norm()) <= 1e-6


def test_features_of_queries_that_are_a_view(rng):
    both = torch.from_numpy(rng.standard_normal((10, 8)).astype("float32")).cuda()
    keys = torch.from_numpy(rng.standard_normal((10, 3, 4)).astype("float32")).cuda()
    heads = kh.GaussianHeads().sample(5, 4, 0)
    view, copy = (
        kh.attention_features(kh.SetBatch(keys, q), heads)
        for q in (both[:, 4:], both[:, 4:].clone())
    )
    assert torch.equal(view, copy)


def test_features_of_tokens_at_odd_addresses(rng):
    flat = torch.from_numpy(rng.standard_normal(1 + 10 * 3 * 4).astype("float32")).cuda()[1:]
    batch = kh.SetBatch(flat.view(10, 3, 4))
    heads = kh.GaussianHeads().sample(5, 4, 0)
    exact = kh.attention_features(batch.astype("float64"), heads)
    assert float((kh.attention_features(batch, heads) - exact).norm() / exact.norm()) <= 1e-6


@pytest.mark.parametrize("n_heads", [30, math.inf])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-8), ("float32", 1e-3)])
def test_regressor(rng, n_heads, dtype, tolerance):
    sets = kh.targets.sphere_sets(400, 6, 5, seed=0)
    y = kh.targets.TokenPower(2, dim=5)(sets)
    extras = rng.standard_normal((400, 2))
    sets, y = (
        kh.SetBatch(sets.tokens.reshape(400, 6, 5), sets.query[:, :3], extras),
        y + 0.1 * extras[:, 0],
    )
    options = {
        **PAPER_LAYER,
        "n_heads": n_heads,
        "alpha": 1e-2,
        "random_state": 0,
        "extras_scale": 1.0,
    }
    here = kh.AttentionRegressor(**options).fit(sets, y)
    there = kh.AttentionRegressor(**options, device="cuda", dtype=dtype).fit(sets, y)
    assert math.isclose(here.loo_error_, there.loo_error_, rel_tol=tolerance)
    assert np.abs(here.predict(sets) - there.predict(sets)).max() <= tolerance * np.abs(y).max()
