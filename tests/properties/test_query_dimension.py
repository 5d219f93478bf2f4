"""Queries of another dimension than the keys: the same properties as for queries of their
kind, on every route.
"""

import itertools
import math

import numpy as np
import pytest
from devices import DEVICE, as_array
from paper import PAPER_LAYER, paper_regressor
from scipy.integrate import quad
from scipy.special import ndtr

import keyhole as kh
from keyhole.attention.activations import POINTWISE
from keyhole.attention.heads import HeadDraw, identity_mean, standard_normals
from keyhole.data.sets import samples_in

ACTIVATIONS = POINTWISE
DIM, ASKED = 3, 5
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(160)


def draw_sets(rng, n=7, dim=DIM, asked=ASKED, size=0.6, longest=6):
    keys = [size * rng.normal(size=(int(rng.integers(1, longest)), dim)) for _ in range(n)]
    return kh.SetBatch(keys, size * rng.normal(size=(n, asked)))


def distributions(rng, dim=DIM, asked=ASKED):
    return {
        "zero mean": kh.GaussianHeads(),
        "identity": kh.GaussianHeads(mean=1.0),
        "pairs": kh.GaussianHeads(mean=0.8, scale=0.4, pairs=[(asked - 1, 0), (0, dim - 1)]),
        "matrix": kh.GaussianHeads(mean=rng.normal(size=(asked + 1, dim + 1)) / 3, scale=0.4),
    }


def weigh(activation, scores):
    return {
        "relu": lambda s: np.maximum(s, 0),
        "linear": lambda s: s,
        "square": np.square,
        "step": lambda s: (s > 0).astype(float),
        "exp": np.exp,
    }[activation](scores)


def quadrature_kernel(a, b, mean, scale, activation):
    """E over W by quadrature: u given, v is Gaussian, and its rectified moments are integrated on
    both sides of 0.
    """
    out = np.zeros((len(a), len(b)))
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            (x0,), (y0,) = x.extended_query(), y.extended_query()
            total = 0.0
            for p in x.extended_keys():
                for q in y.extended_keys():
                    total += (p @ q) * moment(
                        activation,
                        (x0 @ mean @ p, y0 @ mean @ q),
                        scale**2
                        * np.array([x0 @ x0 * (p @ p), x0 @ y0 * (p @ q), y0 @ y0 * (q @ q)]),
                    )
            out[i, j] = total / (len(x.tokens) * len(y.tokens))
    return out


def moment(activation, means, covariance):
    """E σ(u)σ(v): smooth σ by Gauss–Hermite in two dimensions, the others by polar angle about the
    kinks' corner.
    """
    a, b, c = covariance
    if activation in ("linear", "square", "exp"):
        root = math.sqrt(a)
        u = means[0] + root * NODES[:, None]
        v = means[1] + b / root * NODES[:, None] + math.sqrt(max(c - b * b / a, 0.0)) * NODES
        return WEIGHTS @ (weigh(activation, u) * weigh(activation, v)) @ WEIGHTS / (2 * math.pi)
    # over u > 0 of the density of u times the conditional moment of v, in closed form and one
    # dimension
    root, rest = math.sqrt(a), math.sqrt(max(c - b * b / a, 0.0))

    def integrand(u):
        centre = means[1] + b / a * (u - means[0])
        z = centre / rest
        inner = centre * ndtr(z) + rest * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        inner = inner if activation == "relu" else ndtr(z)
        density = math.exp(-0.5 * ((u - means[0]) / root) ** 2) / (root * math.sqrt(2 * math.pi))
        return (u if activation == "relu" else 1.0) * inner * density

    kinks = sorted({0.0, max(0.0, means[0]), max(0.0, means[0] - means[1] * a / b if b else 0.0)})
    top = max(kinks[-1], 0.0) + 12 * root
    edges = [*[k for k in kinks if k < top], top]
    options = {"epsabs": 1e-13, "epsrel": 1e-12, "limit": 200}
    return sum(quad(integrand, lo, hi, **options)[0] for lo, hi in itertools.pairwise(edges))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("distribution", ["zero mean", "identity", "pairs", "matrix"])
def test_the_kernel_is_its_integral(activation, distribution, rng):
    a, b = draw_sets(rng, 3, size=0.4, longest=3), draw_sets(rng, 2, size=0.4, longest=3)
    distribution = distributions(rng)[distribution]
    mean, scale = distribution.moments(DIM, ASKED)
    mean = np.zeros((ASKED + 1, DIM + 1)) if mean is None else mean
    kernel = kh.attention_kernel(a, b, distribution, activation)
    expected = quadrature_kernel(a, b, mean, scale, activation)
    size = np.sqrt(
        np.outer(*(np.diag(kh.attention_kernel(x, None, distribution, activation)) for x in (a, b)))
    )
    assert np.max(np.abs(kernel - expected) / size) < 1e-10


@pytest.mark.parametrize("asked", [1, 2, 9])
@pytest.mark.parametrize("distribution", ["zero mean", "identity", "pairs", "matrix"])
def test_zeros_for_what_is_missing_change_nothing(asked, distribution, rng):
    """The query of smaller dimension padded with zeros, and W with rows for them, is the same layer
    and kernel.
    """
    sets, distribution = draw_sets(rng, asked=asked), distributions(rng, asked=asked)[distribution]
    width = max(asked, DIM)
    keys = [
        np.pad(sets.tokens[a:b], ((0, 0), (0, width - DIM)))
        for a, b in zip(sets.offsets, sets.offsets[1:], strict=False)
    ]
    square = kh.SetBatch(keys, np.pad(sets.query, ((0, 0), (0, width - asked))))
    mean, scale = distribution.moments(DIM, asked)
    wide = np.zeros((width + 1, width + 1))
    rows, columns = [*range(asked), width], [*range(DIM), width]
    wide[np.ix_(rows, columns)] = 0.0 if mean is None else mean
    for activation in ("relu", "step", "exp"):
        kernel = kh.attention_kernel(sets, None, distribution, activation)
        other = kh.attention_kernel(square, None, kh.GaussianHeads(wide, scale), activation)
        np.testing.assert_allclose(kernel, other, rtol=1e-12, atol=1e-14)
    heads = distribution.sample(6, DIM, 3, query_dim=asked)
    padded = np.zeros((6, width + 1, width + 1))
    padded[:, np.array(rows)[:, None], columns] = heads
    features = kh.attention_features(sets, heads).reshape(len(sets), 6, -1)
    other = kh.attention_features(square, padded).reshape(len(sets), 6, -1)[:, :, columns]
    np.testing.assert_allclose(features, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "softmax"])
def test_features_are_their_definition(activation, rng):
    sets, heads = draw_sets(rng), kh.GaussianHeads(mean=1.0).sample(21, DIM, 0, query_dim=ASKED)
    rows = []
    for one in sets:
        keys = one.extended_keys()
        scores = np.einsum("f,mfe,ke->mk", one.extended_query()[0], heads, keys)
        if activation == "softmax":
            weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        else:
            weights = weigh(activation, scores) / len(keys)
        rows.append((weights @ keys).ravel() / math.sqrt(21))
    np.testing.assert_allclose(
        kh.attention_features(sets, heads, activation), rows, rtol=1e-11, atol=1e-13
    )


def test_order_of_keys_blocks_and_slices_change_nothing(rng):
    sets, distribution = draw_sets(rng, 30), kh.GaussianHeads(mean=1.0)
    draw = HeadDraw(distribution, 40, DIM, 1, ASKED)
    whole, kernel = kh.attention_features(sets, draw), kh.attention_kernel(sets, heads=distribution)
    shuffled = kh.SetBatch([rng.permutation(one.tokens) for one in sets], sets.query)
    np.testing.assert_allclose(kh.attention_features(shuffled, draw), whole, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(
        kh.attention_kernel(shuffled, heads=distribution), kernel, rtol=1e-12, atol=1e-14
    )
    parts = [kh.attention_features(sets[i : i + 7], draw) for i in range(0, 30, 7)]
    assert np.array_equal(np.concatenate(parts), whole)
    np.testing.assert_allclose(
        kh.attention_kernel(sets[:9], sets[9:], distribution),
        kernel[:9, 9:],
        rtol=1e-12,
        atol=1e-14,
    )


@pytest.mark.parametrize("distribution", [kh.GaussianHeads(mean=1.0), kh.QueryKeyHeads(2)])
def test_draws_nest_and_are_what_they_were(distribution):
    heads = distribution.sample(9, DIM, 4, query_dim=ASKED)
    assert heads.shape == (9, ASKED + 1, DIM + 1)
    assert np.array_equal(heads[3:7], distribution.sample(4, DIM, 4, ASKED, start=3))
    assert np.array_equal(
        distribution.sample(5, DIM, 4, query_dim=DIM), distribution.sample(5, DIM, 4)
    )


@pytest.mark.parametrize("dim", [2, 40])
def test_the_last_row_is_drawn_alone(dim):
    """Sets without a query see the last row of each head, and only that is drawn: the bits are
    those of the whole.
    """
    distribution = kh.GaussianHeads(
        mean=np.arange((dim + 1.0) ** 2).reshape(dim + 1, dim + 1), scale=0.3
    )
    whole = HeadDraw(distribution, 11, dim, 5)
    assert np.array_equal(whole.seen_by(query=False).block(2, 9), whole.block(2, 9)[:, -1:])
    skipped = standard_normals(7, 1003, 3, start=2, skip=901)
    assert np.array_equal(skipped, standard_normals(7, 1003, 3, start=2)[:, 901:])


def test_pairs_of_coordinates():
    assert np.array_equal(identity_mean(2, 3), [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
    with pytest.raises(
        ValueError,
        match=r"`pairs` must name coordinates that are there: got \(3, 0\) for queries of ",
    ):
        kh.GaussianHeads(1.0, pairs=[(3, 0)]).sample(2, 2, 0, query_dim=3)
    with pytest.raises(
        ValueError, match=r"`pairs` must be \(query coordinate, key coordinate\) pairs of integers"
    ):
        kh.GaussianHeads(1.0, pairs=[0.5]).sample(2, 2, 0)


def candidates(rng, n=60):
    """Histories and candidates of another kind: y is how coordinate 4 of one meets coordinate 1 of
    the other.
    """
    sets = draw_sets(rng, n, size=1.0)
    y = np.array([(one.query[0, 4] * one.tokens[:, 1]).mean() for one in sets]) + 0.01 * rng.normal(
        size=n
    )
    return sets, y


ESTIMATORS = {
    "primal": lambda: paper_regressor(4, random_state=0),
    "dual": lambda: paper_regressor(40, random_state=0, scaling="standard"),
    "kernel": lambda: kh.AttentionRegressor(
        math.inf,
        heads=kh.GaussianHeads(mean=1.0, pairs=[(4, 1)]),
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ),
    "cg": lambda: paper_regressor(30, random_state=0, solver="cg", alpha=0.01, scaling="sphere"),
    "made of keys": lambda: paper_regressor(20, random_state=0, query="mean", scaling="standard"),
    "each": lambda: paper_regressor(math.inf, query="each", scaling="standard"),
    "identity": lambda: kh.AttentionRegressor(
        30,
        heads=kh.IdentityHeads(n_heads=16, pairs=[(4, 1)]),
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ),
    "learned": lambda: kh.AttentionRegressor(
        16,
        heads=kh.LearnedHeads(n_means=2, max_iter=2, hops=1),
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ),
    "query-key": lambda: kh.AttentionRegressor(
        16,
        heads=kh.QueryKeyHeads(2),
        random_state=0,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ),
    "ball": lambda: kh.NormBallRegressor(8, group_radius=1.0, ball_radius=1.0, random_state=0),
}


@pytest.mark.parametrize("route", ESTIMATORS)
def test_saved_and_loaded_on_every_route(route, rng, tmp_path):
    sets, y = candidates(rng)
    model = ESTIMATORS[route]().fit(sets[:50], y[:50])
    assert (model.n_features_in_, model.n_query_features_in_) == (DIM, ASKED)
    kh.save(model, tmp_path / "model")
    assert np.array_equal(kh.load(tmp_path / "model").predict(sets[50:]), model.predict(sets[50:]))
    narrow = kh.SetBatch(np.ones((2, 1, DIM)), np.ones((2, DIM)))
    with pytest.raises(
        ValueError,
        match=f"X has queries of {DIM} features, but .* is expecting {ASKED}: queries must",
    ):
        model.predict(narrow)


@pytest.mark.parametrize("groups", [False, True])
def test_streamed_is_whole(groups, rng):
    sets, y = candidates(rng)
    if groups:
        sets, y = kh.SetGroups(sets, [2] * 30), y[::2]
    options = {
        "heads": kh.GaussianHeads(mean=1.0),
        "alpha": 0.01,
        "random_state": 3,
        "scaling": "sphere",
    }
    whole = kh.AttentionRegressor(6, **{**PAPER_LAYER, **options}).fit(sets, y)
    stream = kh.AttentionRegressor(6, **{**PAPER_LAYER, **options})
    for rows in (slice(0, 11), slice(11, 20), slice(20, None)):
        stream.partial_fit(sets[rows], y[rows])
    np.testing.assert_allclose(stream.predict(sets), whole.predict(sets), rtol=1e-8, atol=1e-10)
    kernel = kh.AttentionRegressor(
        math.inf,
        heads=kh.GaussianHeads(mean=1.0),
        alpha=0.01,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).fit(sets, y)
    heads = kh.AttentionRegressor(
        3000,
        heads=kh.GaussianHeads(mean=1.0),
        alpha=0.01,
        random_state=1,
        scaling="none",
        query="given",
        activation="relu",
        pooling="mean",
    ).fit(sets, y)
    assert np.std(kernel.predict(sets) - heads.predict(sets)) < 0.2 * np.std(y)


def test_queries_are_scaled_on_their_own(rng):
    sets, y = candidates(rng)
    moved = kh.SetBatch([one.tokens * [1, 10, 3] for one in sets], sets.query * 100 + 7)
    fits = [
        paper_regressor(math.inf, scaling="standard").fit(x, y).predict(x) for x in (sets, moved)
    ]
    np.testing.assert_allclose(fits[1], fits[0], rtol=1e-7, atol=1e-9)
    rule = paper_regressor(9, scaling="standard").fit(moved, y).tokens_
    np.testing.assert_allclose(rule.query_centre, moved.query.mean(axis=0))
    np.testing.assert_allclose(rule.query_spread, moved.query.std(axis=0) * math.sqrt(ASKED))


def test_sets_join_and_come_apart(rng):
    sets = draw_sets(rng)
    for wide in (sets, draw_sets(rng, asked=2)):
        assert np.array_equal(kh.concatenate([wide[:2], wide[2:]]).query, wide.query)
        again = samples_in(np.asarray(wide))
        assert np.array_equal(again.query, wide.query)
        assert np.array_equal(again.tokens, wide.tokens)
    with pytest.raises(
        ValueError, match=r"`batches` must have a query of one dimension: got \[2, 5\]"
    ):
        kh.concatenate([sets, draw_sets(rng, asked=2)])
    with pytest.raises(
        ValueError, match="`a` and `b` must share the dimension of their queries: got 5 and 2"
    ):
        kh.attention_kernel(sets, draw_sets(rng, asked=2))
    with pytest.raises(
        ValueError,
        match=r"`heads` must have shape \(M, 6, 4\) with M ≥ 1 for queries of dimension 5",
    ):
        kh.attention_features(sets, np.zeros((2, 4, 4)))
    with pytest.raises(
        ValueError,
        match="`heads` must be drawn for the dimension of the queries: the draw is for 3",
    ):
        kh.attention_features(sets, HeadDraw(kh.GaussianHeads(), 2, DIM, 0))


def test_torch_agrees(rng):
    pytest.importorskip("torch", reason="the torch route is tested where torch is installed")
    sets = draw_sets(rng, 12)
    for distribution in distributions(rng).values():
        draw = HeadDraw(distribution, 5, DIM, 2, ASKED)
        for activation in ACTIVATIONS:
            kernel = as_array(kh.attention_kernel(sets.to(DEVICE), None, distribution, activation))
            np.testing.assert_allclose(
                kernel,
                kh.attention_kernel(sets, None, distribution, activation),
                rtol=1e-9,
                atol=1e-12,
            )
            features = as_array(kh.attention_features(sets.to(DEVICE), draw, activation))
            np.testing.assert_allclose(
                features, kh.attention_features(sets, draw, activation), rtol=1e-9, atol=1e-12
            )


def test_parquet_keeps_queries_of_their_own(rng, tmp_path):
    sets, y = candidates(rng, 20)
    kh.data.write_parquet(tmp_path / "sets.parquet", [(sets, y)])
    data = kh.read_table(tmp_path / "sets.parquet")
    assert np.array_equal(data.sets.query, sets.query)
    assert np.array_equal(data.sets.tokens, sets.tokens)
    rows = "set,x,y,age,a,b,c,target\nu,1,2,30,1,0,0,5\nu,3,4,30,1,0,0,5\nv,5,6,40,0,1,0,6\n"
    (tmp_path / "rows.csv").write_text(rows)
    table = kh.read_table(tmp_path / "rows.csv", keys="x,y", query="a,b,c", target="target")
    assert table.sets.query.tolist() == [[1, 0, 0], [0, 1, 0]]


def test_a_default_estimator_pairs_what_the_sets_pair(rng, tmp_path):
    """The target looks up the key that resembles the query: coordinate 2 of the query is coordinate
    0 of a key.
    """
    keys, query = rng.normal(size=(160, 4, 2)), rng.normal(size=(160, 3))
    weights = np.maximum(3 * query[:, 2:] * keys[:, :, 0], 0)
    y = (weights * keys[:, :, 1]).mean(axis=1)
    plain, paired = kh.SetBatch(keys, query), kh.SetBatch(keys, query, pairs=[(2, 0)])
    assert paired[3:9][[1, 2]].with_extras(np.ones((2, 1))).astype(np.float32).pairs == ((2, 0),)
    assert paired.with_query(None).pairs is None
    assert kh.concatenate([paired[:5], paired[5:]]).pairs == ((2, 0),)
    with pytest.raises(ValueError, match="must pair the same coordinates"):
        kh.concatenate([plain, paired])
    with pytest.raises(ValueError, match=r"got \(3, 0\) for queries of dimension 3"):
        kh.SetBatch(keys, query, pairs=[(3, 0)])
    model = kh.AttentionRegressor(32, random_state=0).fit(paired, y)
    assert model.heads_.mean > 0
    assert model.heads_.pairs == ((2, 0),)
    assert kh.AttentionRegressor(32, random_state=0).fit(plain, y).loo_error_ > model.loo_error_
    fitted = kh.IdentityHeads(n_heads=16).fit(paired, y)
    assert np.flatnonzero(fitted.means_).tolist() == [6]  # row 2, column 0 of 4 × 3
    kh.save(model, tmp_path / "m")
    assert kh.load(tmp_path / "m").heads_ == model.heads_
