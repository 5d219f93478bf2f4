"""The budget of a look: all that runs is paid for, and what is cheap is not left out."""

import math

import numpy as np
import pytest

import keyhole as kh
from keyhole.attention.heads import HeadDraw
from keyhole.choose import choice_seconds
from keyhole.costs import fit_seconds
from keyhole.data.layout import Dataset
from keyhole.lab.lens import LensConfig, choice, fits, look
from keyhole.lab.lens.costs import Costs
from keyhole.lab.lens.problem import pose

CHEAP = {"mean pool, ridge", "pooled statistics, ridge", "pooled statistics, MLP"}


def random_sets(n_sets, n_keys, dim, *, query):
    """Sets whose target is the largest first coordinate of a key."""
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(n_sets, n_keys, dim))
    sets = kh.SetBatch(keys, rng.normal(size=(n_sets, dim)) if query else None)
    return Dataset(sets, keys[:, :, 0].max(axis=1))


class Meter:
    """Adds up what is computed, from the sizes that the computations are called with."""

    def __init__(self, monkeypatch):
        self.seconds = 0.0
        features = fits.attention_features
        kernel = fits.attention_kernel
        ridge = fits.ridge_gram
        choose = choice.choose

        def measured_features(sets, draw, *arguments, **options):
            batch = sets.sets
            width = batch.dim + 1
            entries = width * width if batch.query is not None else width
            work = 30 * entries + 0.1 * (2 * len(batch) * entries + 4 * len(batch.tokens) * width)
            self.seconds += 1e-9 * len(draw) * work
            return features(sets, draw, *arguments, **options)

        def measured_kernel(sets, *arguments, **options):
            batch = sets.sets
            self.seconds += 1e-9 * len(batch.tokens) ** 2 / 2 * (2.2 + 0.075 * (batch.dim + 1))
            return kernel(sets, *arguments, **options)

        def measured_ridge(gram, *arguments, **options):
            self.seconds += 1e-9 * 0.25 * len(gram) ** 3
            return ridge(gram, *arguments, **options)

        def measured_choose(spec, data):
            self.seconds += choice_seconds(spec, data)
            return choose(spec, data)

        monkeypatch.setattr(choice, "choose", measured_choose)
        monkeypatch.setattr(fits, "attention_features", measured_features)
        monkeypatch.setattr(fits, "attention_kernel", measured_kernel)
        monkeypatch.setattr(fits, "ridge_gram", measured_ridge)


SHAPES = [
    pytest.param(60, 2, 500, True, 1.5, id="wide tokens with a query"),
    pytest.param(60, 2, 500, False, 1.5, id="wide tokens without a query"),
    pytest.param(48, 1500, 2, False, 1.5, id="long sets"),
    pytest.param(48, 1500, 2, True, 1.5, id="long sets with a query"),
    pytest.param(200, 4, 4, True, 1.0, id="small sets"),
]


@pytest.mark.parametrize(("n_sets", "n_keys", "dim", "query", "budget"), SHAPES)
def test_what_runs_was_paid_for_and_what_is_cheap_runs(
    n_sets, n_keys, dim, query, budget, monkeypatch
):
    meter = Meter(monkeypatch)
    data = random_sets(n_sets, n_keys, dim, query=query)
    found = look(data, LensConfig("regression", budget=budget, n_heads=16, steps=0))
    assert meter.seconds <= found.cost <= budget
    assert {m.name for m in found.learners} >= CHEAP, found.skipped
    assert any(m.family == "attention" for m in found.learners), found.skipped
    assert found.answers["attention"].says != "not tested"


def test_600_sets_of_tokens_with_2000_coordinates():
    """`keyhole lens --budget 15` on such a table chooses within its share of 15 s."""
    data = random_sets(600, 3, 2000, query=True)
    config = LensConfig("regression", budget=15.0)
    problem = pose(data, config.kind, len(data), config.seed)
    token_choice = choice.make_choice(problem, config)
    assert token_choice.seconds <= choice.FOR_CHOICE * 15.0
    # a draft of 64 heads of 2001 × 2001 entries on 300 samples would take more than two seconds
    assert fit_seconds(300, 900, 2000, 64, has_query=True) > 2.0


def test_heads_without_a_query_are_cheap_however_wide_the_tokens():
    """Without a query a head has one row of W, not d + 1 of them."""
    wide = Costs(keys=1.0, dim=2000, activation="relu", has_query=False)
    assert wide.gram(600, 256) < 5
    assert Costs(keys=1.0, dim=2000, activation="relu").gram(600, 256) > 50


@pytest.mark.parametrize("query", [False, True])
def test_heads_are_drawn_in_blocks_and_only_the_rows_that_sets_see(query, monkeypatch):
    """Whole heads of sets without a query took 6 GB at 2,000 coordinates, and a minute."""
    sets = random_sets(30, 3, 40, query=query).sets
    distribution = kh.GaussianHeads(1.0)
    expected = []
    for count in (16, 64):
        draw = HeadDraw(distribution, count, 40, 7, sets.query_dim)
        features = kh.attention_features(sets, draw)
        centred = features - features.mean(axis=0)
        expected.append(centred @ centred.T)

    drawn = []
    block = HeadDraw.block

    def recorded(self, start, stop):
        heads = block(self, start, stop)
        drawn.append(heads.shape)
        return heads

    budget = 2**20
    monkeypatch.setattr(fits, "MEMORY_BUDGET", budget)
    monkeypatch.setattr(HeadDraw, "block", recorded)
    grams = fits.nested_head_grams(sets, distribution, (16, 64), "relu", 7)
    for gram, exact in zip(grams, expected, strict=True):
        np.testing.assert_allclose(gram.matrix, exact, atol=1e-5 * exact.max())
    assert sum(shape[0] for shape in drawn) == 64, "each head is drawn once"
    assert all(shape[1:] == (41 if query else 1, 41) for shape in drawn)
    assert len(drawn) > 2
    assert all(8 * math.prod(shape) < budget / 4 for shape in drawn)


def test_costs_grow_with_every_size():
    base = {"keys": 10.0, "dim": 20, "activation": "relu"}
    small = Costs(**base)
    for change in ({"keys": 100.0}, {"dim": 200}, {"sets": 5.0}):
        large = Costs(**{**base, **change})
        assert large.gram(200, 64) > small.gram(200, 64)
        assert large.pooled(200, statistics=True, hidden=1024) >= small.pooled(
            200, statistics=True, hidden=1024
        )
    assert small.gram(400, 64) > small.gram(200, 64)
    assert small.gram(200, 128) > small.gram(200, 64)
    assert small.pooled(200, statistics=True, hidden=1024) > small.pooled(200, statistics=True)
    assert small.pooled(200, statistics=True) > small.pooled(200)


def test_where_no_choice_is_affordable_it_is_said():
    data = random_sets(60, 50, 300, query=True)
    found = look(data, LensConfig("regression", budget=0.12, n_heads=16, steps=0))
    assert found.cost <= 0.12
    assert any("choosing how to scale tokens" in note for note in found.skipped)
    assert "tokens standard" in found.settings


def test_what_comes_last_is_not_left_out_for_want_of_little():
    """Spectra and samples taken apart are cheap: the curves before them leave that much."""
    data = random_sets(80, 4, 2, query=False)
    for budget in (0.8, 1.0, 1.2):
        found = look(data, LensConfig("regression", budget=budget, n_heads=32, steps=0))
        assert found.cost <= budget
        assert len(found.spectra) == 2, found.skipped
        assert found.examples, found.skipped
